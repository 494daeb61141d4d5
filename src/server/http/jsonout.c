/* See jsonout.h. */
#include "server/http/jsonout.h"
#include "base/mem.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Length of the UTF-8 character at s, or 0. */
static size_t character(const unsigned char *s, size_t n)
{
    if (s[0] < 0x80)
        return 1;
    size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool long_form = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool outside = (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f);
    return long_form || outside ? 0 : len;
}

void jsonout_string(struct buf *b, const char *s, size_t n)
{
    static const char names[] = "btn\0fr"; /* 8, 9, 10, -, 12, 13 */
    buf_reserve(b, n + 2);
    buf_addc(b, '"');
    size_t plain = 0; /* start of the bytes that need no escape */
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t len = c < 0x80 ? 1 : character((const unsigned char *)s + i, n - i);
        if (len && c >= 32 && c != '"' && c != '\\') {
            i += len;
            continue;
        }
        buf_add(b, s + plain, i - plain);
        if (!len)
            buf_adds(b, "\xef\xbf\xbd");
        else if (c >= 32)
            buf_add(b, (char[]){'\\', (char)c}, 2);
        else if (c >= 8 && c <= 13 && c != 11)
            buf_add(b, (char[]){'\\', names[c - 8]}, 2);
        else
            buf_addf(b, "\\u%04x", c);
        plain = ++i;
    }
    buf_add(b, s + plain, n - plain);
    buf_addc(b, '"');
}

void jsonout_text(struct buf *b, const char *s)
{
    if (s)
        jsonout_string(b, s, strlen(s));
    else
        buf_adds(b, "null");
}

void jsonout_value(struct buf *b, const json_t *v)
{
    char *s = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    buf_adds(b, s ? s : "null");
    mem_free(s);
}

void jsonout_number(struct buf *b, double v)
{
    if (!isfinite(v)) {
        buf_adds(b, "null");
        return;
    }
    char s[32];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(s, sizeof s, "%.*g", digits, v);
        if (strtod(s, NULL) == v || (digits >= 9 && (float)strtod(s, NULL) == (float)v))
            break;
    }
    buf_adds(b, s);
}
