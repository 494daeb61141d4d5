/*
 * libFuzzer entry for literal bytes (text/literal.h): the input is a template and, after its first NUL, data. A template sees no
 * difference between data and its literal form: the two outputs are equal once the bytes are plain again, and no literal
 * byte comes from the template itself.
 */
#include "base/mem.h"
#include "text/jinja/jinja.h"
#include "text/literal.h"

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool render(struct jinja *t, json_t *ctx, bool literal, struct buf *out)
{
    static const struct tm now = {.tm_year = 126, .tm_mon = 6, .tm_mday = 26};
    const struct jinja_options opt = {.now = &now,
                                      .max_steps = 20000,
                                      .max_memory = 8 << 20,
                                      .max_output = 1 << 18,
                                      .literal = literal};
    struct error err = {0};
    return jinja_render(t, ctx, &opt, out, &err);
}

static void compare(struct jinja *t, json_t *ctx)
{
    struct buf plain = {0}, marked = {0};
    bool ok = render(t, ctx, false, &plain), same = render(t, ctx, true, &marked);
    CHECK(ok == same, "rendered with plain data: %d, with literal data: %d", ok, same);
    if (ok) {
        for (size_t i = 0; i < plain.len; i++)
            CHECK(!literal_is((unsigned char)plain.p[i]), "a literal byte from plain data");
        if (marked.len)
            literal_unmark(marked.p, marked.len);
        CHECK(plain.len == marked.len && (!plain.len || !memcmp(plain.p, marked.p, plain.len)),
              "plain data: %.*s, literal data: %.*s", (int)plain.len, plain.p, (int)marked.len,
              marked.p);
    }
    buf_clear(&plain);
    buf_clear(&marked);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size, rest = size - n - (end != NULL);
    for (size_t i = 0; i < n; i++)
        if (literal_is(data[i])) /* no UTF-8, so no template of a model */
            return 0;
    struct error err = {0};
    struct jinja *t = jinja_compile((const char *)data, n, &err);
    json_t *text = json_stringn(end ? (const char *)end + 1 : "", rest); /* NULL: not UTF-8 */
    if (t && text) {
        json_t *ctx =
            json_pack("{s:O,s:[O,O],s:{s:O}}", "s", text, "l", text, text, "d", "k", text);
        compare(t, ctx);
        json_decref(ctx);
    }
    json_decref(text);
    jinja_free(t);
    return 0;
}
