/* libFuzzer entry: Markdown for a terminal, any text in any pieces at any width. */
#include "base/buf.h"
#include "base/error.h"
#include "cli/term/markdown.h"

#include <stdint.h>
#include <string.h>

static void to_buf(void *arg, const char *p, size_t n)
{
    buf_add(arg, p, n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 3)
        return 0;
    struct buf whole = {0}, pieces = {0};
    struct markdown_options opt = {.columns = 2 + data[0] % 100,
                                   .styles = data[1] & 1,
                                   .unicode = data[1] & 2,
                                   .plain = data[1] & 4,
                                   .links = data[1] & 8,
                                   .write = to_buf,
                                   .arg = &whole};
    size_t step = 1 + data[2] % 16;
    const char *text = (const char *)data + 3;
    n -= 3;
    struct markdown *m = markdown_new(&opt);
    markdown_feed(m, text, n);
    markdown_end(m);
    markdown_free(m);
    opt.arg = &pieces;
    m = markdown_new(&opt);
    for (size_t at = 0; at < n; at += step)
        markdown_feed(m, text + at, n - at < step ? n - at : step);
    markdown_end(m);
    markdown_free(m);
    CHECK(whole.len == pieces.len && (!whole.len || !memcmp(whole.p, pieces.p, whole.len)),
          "pieces matter");
    buf_clear(&whole);
    buf_clear(&pieces);
    return 0;
}
