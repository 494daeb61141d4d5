/*
 * Heap: one handler for "out of memory", aligned blocks for kernels, and a guard that makes any
 * allocation inside a step fatal in debug builds. Parsers check sizes that come from a file.
 *
 * When the system has no memory, the allocation functions do the first of these that applies:
 *  1. In a job (mem_try): the job is abandoned, everything it allocated is freed, mem_try returns false.
 *  2. With a reserve (mem_reserve): the reserve is released to the system and the allocation is retried
 *     for a second. Jobs are abandoned and refused until the reserve is back, so that a server can
 *     answer its clients with an error.
 *  3. Otherwise the process ends with one line and exit code 1.
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
/* Return NULL if out of memory. For sizes from untrusted input, and for libraries that can handle
 * it. */
void *mem_ask(size_t bytes);
void *mem_ask_again(void *p, size_t bytes);

/*
 * Runs fn(arg) as a job. Returns false if it ran out of memory; then everything it allocated is
 * freed. Therefore fn must not
 * - take locks or open files,
 * - free memory from before the job, unless it also drops the pointer,
 * - store pointers anywhere but in data that the caller then discards. A nested job is part of the
 *   outer one.
 */
bool mem_try(void (*fn)(void *arg), void *arg);
/* Allocations between suspend and resume are not tied to the current job and survive its failure.
 * Use it for caches that outlive the job, and around code that must not be abandoned half-way
 * (pthread_once). */
struct mem_job *mem_job_suspend(void);
void mem_job_resume(struct mem_job *job);
/* Sets a few MB aside as the reserve, see above. */
void mem_reserve(void);

_Noreturn void mem_die(size_t bytes); /* prints one line and exits with code 1 */

/* 64-byte aligned and zeroed. Large blocks are advised to use huge pages and are committed when
 * touched. Returns NULL if out of memory. */
void *mem_aligned(size_t bytes);
void mem_aligned_free(void *p, size_t bytes);
/* For ranges of a large aligned block. mem_forget returns the whole pages inside to the system;
 * they read as zeros afterwards. mem_small_pages turns huge pages off, so that a touch commits one
 * small page only. mem_huge_pages turns them on, for any memory that is about to be filled: one fault in place of 512. */
void mem_forget(void *p, size_t bytes);
void mem_small_pages(void *p, size_t bytes);
void mem_huge_pages(void *p, size_t bytes);

/* While a guard is active on this thread, any mem_* allocation aborts (debug builds:
 * -DSTEEL_DEBUG). */
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
