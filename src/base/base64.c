/* See base64.h. */
#include "base/base64.h"

#include <stdint.h>
#include <string.h>

/* The value of a digit; -1 = none. */
static int digit_value(int c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

bool base64_decode(const char *s, size_t n, struct buf *out)
{
    int8_t value[256];
    const uint8_t *p = (const uint8_t *)s, *end = memchr(s, '=', n);
    uint32_t acc = 0;
    int bits = 0;
    for (int c = 0; c < 256; c++)
        value[c] = (int8_t)digit_value(c);
    end = end ? end : p + n;
    buf_reserve(out, (size_t)(end - p) / 4 * 3 + 3);
    char *to = out->p + out->len;
    for (; end - p >= 4; p += 4, to += 3) {
        int a = value[p[0]], b = value[p[1]], c = value[p[2]], d = value[p[3]];
        if ((a | b | c | d) < 0)
            return false;
        uint32_t v = (uint32_t)(a << 18 | b << 12 | c << 6 | d);
        to[0] = (char)(v >> 16);
        to[1] = (char)(v >> 8);
        to[2] = (char)v;
    }
    for (; p < end; p++) {
        int v = value[*p];
        if (v < 0)
            return false;
        acc = acc << 6 | (uint32_t)v;
        bits += 6;
        if (bits < 8)
            continue;
        bits -= 8;
        *to++ = (char)(acc >> bits);
    }
    out->len = (size_t)(to - out->p);
    *to = 0;
    return true;
}

void base64_encode(const void *bytes, size_t n, struct buf *out)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)p[i] << 16;
        v |= i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0;
        v |= i + 2 < n ? p[i + 2] : 0;
        buf_addc(out, digits[v >> 18]);
        buf_addc(out, digits[v >> 12 & 63]);
        buf_addc(out, i + 1 < n ? digits[v >> 6 & 63] : '=');
        buf_addc(out, i + 2 < n ? digits[v & 63] : '=');
    }
}
