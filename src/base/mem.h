/*
 * Heap: one handler for "out of memory" (it aborts with the size asked for), aligned blocks for
 * kernels, and a guard that makes any allocation inside a step fatal in debug builds.
 * Sizes that come from a file are checked by the parser before they get here.
 */
#ifndef STEEL_BASE_MEM_H
#define STEEL_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void *mem_alloc(size_t bytes);                         /* never NULL; contents undefined */
void *mem_zalloc(size_t count, size_t size);           /* never NULL; zeroed; overflow-checked */
void *mem_realloc(void *p, size_t count, size_t size); /* never NULL; overflow-checked */
char *mem_strdup(const char *s);
char *mem_strndup(const char *s, size_t n);
void mem_free(void *p);

/* 64-byte aligned and zeroed; large blocks are huge-page advised and take memory only as they are
 * touched. Returns NULL when the system has no memory. */
void *mem_aligned(size_t bytes);
void mem_aligned_free(void *p, size_t bytes);
/* For parts of a large aligned block. forget: whole pages inside go back to the system and are zero
 * when next read. small_pages: no huge pages there, where a touch should cost no more than it must. */
void mem_forget(void *p, size_t bytes);
void mem_small_pages(void *p, size_t bytes);

/* While > 0 on this thread, any mem_* allocation aborts (debug builds: -DSTEEL_DEBUG). */
void mem_guard_enter(void);
void mem_guard_leave(void);

/* *out = a * b and a + b; false on overflow. */
static inline bool mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

#endif
