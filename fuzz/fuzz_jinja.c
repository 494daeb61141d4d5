/*
 * libFuzzer entry for the Jinja engine: the input is a template, rendered with a small
 * conversation. Limits are low so that each input is quick. No input may crash or hang.
 */
#include "text/jinja/jinja.h"

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static json_t *ctx;
    if (!ctx)
        ctx =
            json_pack("{s:[{s:s,s:s},{s:s,s:n,s:[{s:{s:s,s:{s:i,s:[f,n,b]}}}]}],s:[{s:s}],s:b,s:i,"
                      "s:s,s:{s:i,s:[i,i]}}",
                      "messages", "role", "user", "content", "Hi <b> \xc3\xa9", "role", "assistant",
                      "content", "tool_calls", "function", "name", "f", "arguments", "x", 1, "y",
                      1.5, 1, "tools", "type", "function", "t", 1, "n", 5, "s", "Hello World", "d",
                      "a", 1, "l", 3, 1);
    static const struct tm now = {.tm_year = 126, .tm_mon = 6, .tm_mday = 26};
    static const struct jinja_options opt = {
        .now = &now, .max_steps = 50000, .max_memory = 8 << 20, .max_output = 1 << 20};
    struct error err = {0};
    struct jinja *t = jinja_compile((const char *)data, size, &err);
    if (t) {
        struct buf out = {0};
        jinja_render(t, ctx, &opt, &out, &err);
        buf_clear(&out);
    }
    jinja_free(t);
    return 0;
}
