/* The growing byte string. */
#include "base/buf.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

void buf_clear(struct buf *b)
{
    mem_free(b->p);
    *b = (struct buf){0};
}

void buf_reset(struct buf *b)
{
    b->len = 0;
    if (b->p)
        b->p[0] = 0;
}

void buf_reserve(struct buf *b, size_t extra)
{
    if (b->len + extra + 1 <= b->cap)
        return;
    size_t cap = b->cap ? b->cap * 2 : 64;
    if (cap < b->len + extra + 1)
        cap = b->len + extra + 1;
    b->p = mem_realloc(b->p, cap, 1);
    b->cap = cap;
}

bool buf_try_reserve(struct buf *b, size_t extra)
{
    size_t need;
    if (!add_size(b->len, extra, &need) || !add_size(need, 1, &need))
        return false;
    if (need <= b->cap)
        return true;
    size_t cap = need < SIZE_MAX / 2 && b->cap * 2 > need ? b->cap * 2 : need;
    char *p = mem_ask_again(b->p, cap);
    if (!p)
        return false;
    b->p = p;
    b->cap = cap;
    return true;
}

void buf_add(struct buf *b, const void *p, size_t n)
{
    buf_reserve(b, n);
    if (n)
        memcpy(b->p + b->len, p, n);
    b->len += n;
    b->p[b->len] = 0;
}

void buf_addc(struct buf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_adds(struct buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}

void buf_addf(struct buf *b, const char *fmt, ...)
{
    enum { USUAL = 128 };
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    buf_reserve(b, USUAL);
    size_t room = b->cap - b->len;
    int n = vsnprintf(b->p + b->len, room, fmt, ap);
    va_end(ap);
    if (n > 0 && (size_t)n >= room) {
        buf_reserve(b, (size_t)n);
        vsnprintf(b->p + b->len, (size_t)n + 1, fmt, again);
    }
    b->len += n > 0 ? (size_t)n : 0;
    b->p[b->len] = 0;
    va_end(again);
}

void buf_addi(struct buf *b, int64_t v)
{
    char digits[24], *p = digits + sizeof digits;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    do
        *--p = (char)('0' + u % 10);
    while (u /= 10);
    if (v < 0)
        *--p = '-';
    buf_add(b, p, (size_t)(digits + sizeof digits - p));
}

char *buf_take(struct buf *b)
{
    buf_add(b, "", 0);
    char *p = b->p;
    *b = (struct buf){0};
    return p;
}
