/* libFuzzer entry: a server's bytes through the response parser, whole and split in three at any places. The output must
 * be the same, and never more than was sent. */
#include "route/http_response.h"
#include "base/error.h"

#include <string.h>

struct got {
    struct buf body;
    int status;
    int n_headers;
    enum http_response_result last;
    size_t used;
};

/* Until the parser needs more bytes, or has ended. */
static bool feed(struct http_response *a, const char *p, size_t n, struct got *g)
{
    for (;;) {
        size_t used = 0, before = g->body.len;
        const char *why = NULL;
        g->last = http_response_feed(a, p, n, &g->body, &used, &why);
        CHECK(used <= n, "took more than there is");
        CHECK((g->last == RESPONSE_BAD) == (why != NULL), "bad without a reason");
        CHECK((g->last == RESPONSE_DATA) == (g->body.len > before), "data without bytes");
        p += used;
        n -= used;
        g->used += used;
        if (g->last == RESPONSE_HEAD) {
            CHECK(a->head.status >= 200 && a->head.length >= -1, "a head with holes");
            g->status = a->head.status;
            g->n_headers = a->head.n_headers;
            http_header(&a->head, "Content-Type");
        }
        if (g->last == RESPONSE_END || g->last == RESPONSE_BAD)
            return false;
        if (g->last == RESPONSE_MORE) {
            CHECK(n == 0, "%zu bytes left, and wants more", n);
            return true;
        }
    }
}

static void run(const char *p, size_t n, const size_t cuts[2], bool head_request, struct got *g)
{
    struct http_response a = {.head_request = head_request};
    size_t at[] = {0, cuts[0], cuts[1], n};
    const char *why = NULL;
    bool open = true;
    for (int i = 0; i < 3 && open; i++)
        open = feed(&a, p + at[i], at[i + 1] - at[i], g);
    if (open) {
        g->last = http_response_close(&a, &why);
        CHECK(g->last == RESPONSE_END || (g->last == RESPONSE_BAD && why), "no end at the end");
    }
    if (g->last == RESPONSE_END && a.head.length >= 0 && !head_request && a.head.status != 204 &&
        a.head.status != 304)
        CHECK((int64_t)g->body.len == a.head.length, "a body of the wrong length is whole");
    http_response_clear(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    const char *p = (const char *)data + 3;
    size_t n = size - 3, cuts[2] = {data[0] % (n + 1), data[1] * 7u % (n + 1)}, none[2] = {n, n};
    if (cuts[0] > cuts[1]) {
        size_t c = cuts[0];
        cuts[0] = cuts[1];
        cuts[1] = c;
    }
    struct got whole = {0}, cut = {0};
    run(p, n, none, data[2] & 1, &whole);
    run(p, n, cuts, data[2] & 1, &cut);
    CHECK(whole.last == cut.last, "whole: %d, cut at %zu and %zu: %d", whole.last, cuts[0], cuts[1],
          cut.last);
    CHECK(whole.status == cut.status && whole.n_headers == cut.n_headers, "another head");
    if (whole.last == RESPONSE_END)
        CHECK(whole.used == cut.used, "another end");
    CHECK(whole.body.len == cut.body.len && whole.body.len <= n &&
              (!whole.body.len || !memcmp(whole.body.p, cut.body.p, whole.body.len)),
          "another body");
    buf_clear(&whole.body);
    buf_clear(&cut.body);
    return 0;
}
