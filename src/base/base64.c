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
    char bytes[3 * 256]; /* those of the last digits */
    const uint8_t *p = (const uint8_t *)s, *end = memchr(s, '=', n);
    size_t at = 0;
    uint32_t acc = 0;
    int bits = 0;
    for (int c = 0; c < 256; c++)
        value[c] = (int8_t)digit_value(c);
    end = end ? end : p + n;
    while (p < end) {
        int v = value[*p++];
        if (v < 0)
            return false;
        acc = acc << 6 | (uint32_t)v;
        bits += 6;
        if (bits < 8)
            continue;
        bits -= 8;
        bytes[at++] = (char)(acc >> bits);
        if (at == sizeof bytes) {
            buf_add(out, bytes, at);
            at = 0;
        }
    }
    buf_add(out, bytes, at);
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
