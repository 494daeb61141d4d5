/* libFuzzer entry: a connection's bytes, split at any place, through the head and body parsers. */
#include "server/http/http_parse.h"
#include "base/error.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *p = (const char *)data;
    struct http_head h;
    const char *why = NULL;
    size_t end = http_head_end(p, size);
    CHECK(end <= size, "a head longer than its input");
    if (end) {
        int status = http_head_parse(p, end, &h, &why);
        CHECK((status == 0) == (why == NULL), "a status without a reason");
        if (status == 0)
            CHECK(h.method && h.path && h.query && h.length >= 0 && !(h.chunked && h.length),
                  "a head with holes");
        http_header(&h, "Authorization");
        http_head_clear(&h);
    }
    /* the rest as a chunked body: whole, and split where the first byte says */
    p += end;
    size -= end;
    size_t cut = size ? (unsigned char)p[0] % (size + 1) : 0, used[2] = {0}, more = 0;
    struct http_chunks a = {0}, b = {0};
    struct buf x = {0}, y = {0};
    enum http_chunks_result ra = http_chunks_feed(&a, p, size, 4096, &x, &used[0]);
    enum http_chunks_result rb = http_chunks_feed(&b, p, cut, 4096, &y, &used[1]);
    if (rb == CHUNKS_MORE)
        rb = http_chunks_feed(&b, p + cut, size - cut, 4096, &y, &more);
    CHECK(ra == rb, "cut at %zu: %d, whole: %d", cut, rb, ra);
    CHECK(x.len == y.len && x.len <= 4096 && (!x.len || !memcmp(x.p, y.p, x.len)),
          "the body depends on the cut");
    if (ra == CHUNKS_DONE)
        CHECK(used[0] == used[1] + more, "the length depends on the cut");
    buf_clear(&x);
    buf_clear(&y);
    return 0;
}
