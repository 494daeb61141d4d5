/*
 * Heap: one handler for "out of memory", aligned blocks for kernels, and a guard that makes any
 * allocation inside a step fatal in debug builds. Sizes that come from a file are checked by the
 * parser before they get here.
 *
 * When the system has no memory, mem_alloc and its like do one of three things, in this order:
 *  1. in a job (mem_try): the job is given up, all it allocated is freed, mem_try returns false
 *  2. with a reserve (mem_reserve): the reserve is given to the system and the allocation tried again,
 *     for a second; until it is back, jobs are given up and refused. What serves others can so tell
 *     them that it is out of memory
 *  3. else the process ends: one line, exit code 1
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
/* For sizes that strangers choose, and for libraries that can do without: NULL when there is none. */
void *mem_ask(size_t bytes);
void *mem_ask_again(void *p, size_t bytes);

/*
 * Runs fn(arg) as a job: false if it ran out of memory, and then nothing it allocated is left. So fn
 * must take no locks, open no files, free nothing it did not allocate unless it also forgets it, and
 * leave behind no pointers but in what its caller then discards. A job inside a job is part of it.
 */
bool mem_try(void (*fn)(void *arg), void *arg);
/* Between the two nothing belongs to the job that is going on, if one is: for what outlives it, and
 * for code that must come to its end, such as pthread_once's. */
struct mem_job *mem_job_suspend(void);
void mem_job_resume(struct mem_job *job);
/* From here on a few MB are kept for hard times; see above. */
void mem_reserve(void);

_Noreturn void mem_die(size_t bytes); /* one line, exit code 1: for programs that start */

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
