/* libFuzzer entry: a Modelfile of a client. It is refused with a reason, or printed to a text that parses to the same, also after it has
 * inherited from itself. */
#include "base/mem.h"
#include "server/api/modelfile.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct modelfile m, again, base;
    struct error err = {0};
    struct buf first = {0}, second = {0};
    if (!modelfile_parse((const char *)data, size, &m, &err)) {
        CHECK(err.msg[0] && !m.from && !m.options, "an error without a reason");
        return 0;
    }
    modelfile_print(&m, &first);
    CHECK(modelfile_parse(first.p, first.len, &again, &err), "printed, but: %s\n%s", err.msg,
          first.p);
    CHECK(modelfile_parse(first.p, first.len, &base, &err), "%s", err.msg);
    modelfile_inherit(&again, &base);
    modelfile_print(&again, &second);
    CHECK(first.len == second.len && !memcmp(first.p, second.p, first.len), "%s\nbecame\n%s",
          first.p, second.p);
    modelfile_clear(&m);
    modelfile_clear(&again);
    modelfile_clear(&base);
    buf_clear(&first);
    buf_clear(&second);
    return 0;
}
