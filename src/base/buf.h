/* A growing byte string. NUL-terminated once anything was appended. */
#ifndef STEEL_BASE_BUF_H
#define STEEL_BASE_BUF_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    char *p;    /* (cap) */
    size_t len; /* bytes used, without the NUL */
    size_t cap;
};

void buf_clear(struct buf *b); /* frees; the buf is empty and usable again */
void buf_reset(struct buf *b); /* len = 0, keeps the memory */
void buf_reserve(struct buf *b, size_t extra);
/* For sizes from untrusted input: false, with the buf unchanged, if out of memory. */
bool buf_try_reserve(struct buf *b, size_t extra);
void buf_add(struct buf *b, const void *p, size_t n);
void buf_addc(struct buf *b, char c);
void buf_adds(struct buf *b, const char *s);
void buf_addi(struct buf *b, int64_t v);
/* Takes the time of a printf: for text that is written once a request, not once a token. */
void buf_addf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
char *
buf_take(struct buf *b); /* the heap string (never NULL; free with mem_free), buf becomes empty */

#endif
