/* The heap wrappers. Owns the out-of-memory message and the allocation guard. */
#include "base/mem.h"
#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static _Thread_local int guard_depth;

static void guard_check(size_t bytes)
{
#ifdef STEEL_DEBUG
    CHECK(guard_depth == 0, "allocation of %zu bytes inside a step", bytes);
#else
    (void)bytes;
#endif
}

void mem_guard_enter(void)
{
    guard_depth++;
}

void mem_guard_leave(void)
{
    guard_depth--;
}

static void *must(void *p, size_t bytes)
{
    if (!p && bytes) {
        fprintf(stderr, "steel: out of memory (%zu bytes wanted)\n", bytes);
        abort();
    }
    return p;
}

void *mem_alloc(size_t bytes)
{
    guard_check(bytes);
    return must(malloc(bytes ? bytes : 1), bytes);
}

void *mem_zalloc(size_t count, size_t size)
{
    guard_check(count);
    return must(calloc(count ? count : 1, size ? size : 1), count);
}

void *mem_realloc(void *p, size_t count, size_t size)
{
    size_t bytes;
    CHECK(mul_size(count, size, &bytes), "realloc of %zu x %zu", count, size);
    guard_check(bytes);
    return must(realloc(p, bytes ? bytes : 1), bytes);
}

char *mem_strndup(const char *s, size_t n)
{
    char *p = mem_alloc(n + 1);
    memcpy(p, s, n);
    p[n] = 0;
    return p;
}

char *mem_strdup(const char *s)
{
    return mem_strndup(s, strlen(s));
}

void mem_free(void *p)
{
    free(p);
}

/* Large blocks come straight from mmap so that freeing gives the pages back at once. */
enum { HUGE_BLOCK = 4 << 20 };

void *mem_aligned(size_t bytes)
{
    guard_check(bytes);
    if (bytes < HUGE_BLOCK) {
        void *small = NULL;
        if (posix_memalign(&small, 64, bytes ? bytes : 64))
            return NULL;
        return memset(small, 0, bytes);
    }
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

void mem_aligned_free(void *p, size_t bytes)
{
    if (!p)
        return;
    if (bytes < HUGE_BLOCK)
        free(p);
    else
        munmap(p, bytes);
}

/* The whole pages inside a range; 0 = there are none. */
static size_t whole_pages(void **p, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), a = (uintptr_t)*p;
    uintptr_t from = (a + page - 1) / page * page, to = (a + bytes) / page * page;
    *p = (void *)from;
    return from < to ? to - from : 0;
}

void mem_forget(void *p, size_t bytes)
{
    size_t n = whole_pages(&p, bytes);
    if (n)
        madvise(p, n, MADV_DONTNEED);
}

void mem_small_pages(void *p, size_t bytes)
{
    size_t n = whole_pages(&p, bytes);
    if (n)
        madvise(p, n, MADV_NOHUGEPAGE);
}
