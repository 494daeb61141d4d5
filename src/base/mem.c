/* Heap wrappers. Owns the out-of-memory handling (mem.h), the jobs' allocation lists, the reserve
 * and the allocation guard. */
#include "base/mem.h"
#include "base/error.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
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

/* The reserve: unused address space and, under strict overcommit accounting, memory. */

enum { RESERVE_BYTES = 8 << 20 };

static pthread_mutex_t reserve_lock = PTHREAD_MUTEX_INITIALIZER;
static void *reserve;
static bool reserve_wanted;
static atomic_bool is_low; /* the reserve has been released */

/* True if the reserve exists now, or none was requested. */
static bool reserve_fill(void)
{
    if (!atomic_load(&is_low))
        return true;
    pthread_mutex_lock(&reserve_lock);
    if (!reserve) {
        void *p =
            mmap(NULL, RESERVE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        reserve = p == MAP_FAILED ? NULL : p;
        atomic_store(&is_low, !reserve);
    }
    bool ok = reserve != NULL;
    pthread_mutex_unlock(&reserve_lock);
    return ok;
}

static bool reserve_spend(void)
{
    pthread_mutex_lock(&reserve_lock);
    bool had = reserve != NULL;
    if (had)
        munmap(reserve, RESERVE_BYTES);
    reserve = NULL;
    atomic_store(&is_low, reserve_wanted);
    pthread_mutex_unlock(&reserve_lock);
    return had;
}

void mem_reserve(void)
{
    pthread_mutex_lock(&reserve_lock);
    bool first = !reserve_wanted;
    reserve_wanted = true;
    pthread_mutex_unlock(&reserve_lock);
    if (first) {
        atomic_store(&is_low, true);
        reserve_fill();
    }
}

/* Jobs. The addresses that a job has allocated and not freed are in a hash set. */

struct mem_job {
    jmp_buf out;
    uintptr_t *set; /* (cap) open addressing; 0 = empty */
    size_t n, cap;
};

static _Thread_local struct mem_job *job;

static size_t slot_of(const struct mem_job *j, uintptr_t p)
{
    return (size_t)((p >> 4) * 0x9e3779b97f4a7c15u >> 20) & (j->cap - 1);
}

_Noreturn static void give_up(void)
{
    longjmp(job->out, 1);
}

static void put(struct mem_job *j, uintptr_t p)
{
    size_t i = slot_of(j, p);
    while (j->set[i])
        i = (i + 1) & (j->cap - 1);
    j->set[i] = p;
    j->n++;
}

/* Records that this thread's job, if any, allocated p. */
static void *note(void *p)
{
    struct mem_job *j = job;
    if (!j)
        return p;
    if ((j->n + 1) * 2 > j->cap) {
        struct mem_job old = {.set = j->set, .cap = j->cap};
        size_t cap = j->cap ? 2 * j->cap : 256;
        uintptr_t *set = calloc(cap, sizeof *set);
        if (!set) {
            free(p);
            give_up();
        }
        j->set = set;
        j->cap = cap;
        j->n = 0;
        for (size_t i = 0; i < old.cap; i++)
            if (old.set[i])
                put(j, old.set[i]);
        free(old.set);
    }
    put(j, (uintptr_t)p);
    return p;
}

/* p will be freed or moved. Later entries of its probe sequence move up. */
static void unnote(uintptr_t p)
{
    struct mem_job *j = job;
    if (!j || !j->n || !p)
        return;
    size_t mask = j->cap - 1, i = slot_of(j, p);
    while (j->set[i] && j->set[i] != p)
        i = (i + 1) & mask;
    if (!j->set[i])
        return; /* allocated before the job */
    for (size_t k = (i + 1) & mask; j->set[k]; k = (k + 1) & mask)
        if (((k - slot_of(j, j->set[k])) & mask) >= ((k - i) & mask)) {
            j->set[i] = j->set[k];
            i = k;
        }
    j->set[i] = 0;
    j->n--;
}

bool mem_try(void (*fn)(void *arg), void *arg)
{
    if (job) {
        fn(arg);
        return true;
    }
    if (!reserve_fill())
        return false;
    struct mem_job here = {.set = NULL};
    job = &here;
    if (setjmp(here.out) == 0) {
        fn(arg);
        job = NULL;
        free(here.set);
        return true;
    }
    struct mem_job *j = job; /* read from memory: longjmp restored the registers */
    job = NULL;
    for (size_t i = 0; i < j->cap; i++)
        free((void *)j->set[i]);
    free(j->set);
    return false;
}

struct mem_job *mem_job_suspend(void)
{
    struct mem_job *j = job;
    job = NULL;
    return j;
}

void mem_job_resume(struct mem_job *j)
{
    job = j;
}

/* Allocation */

static void *raw_realloc(void *p, size_t bytes)
{
    if (job && atomic_load_explicit(&is_low, memory_order_relaxed))
        return NULL;
    return p ? realloc(p, bytes) : malloc(bytes);
}

/* Handles the n-th allocation failure in a row. Returns if a retry makes sense. */
static void no_memory(size_t bytes, int n)
{
    enum { TRIES = 100, PAUSE_US = 10000 };
    if (job)
        give_up();
    if (reserve_spend())
        return;
    if (!atomic_load(&is_low) || n > TRIES)
        mem_die(bytes);
    usleep(PAUSE_US); /* other threads' jobs are being abandoned meanwhile */
}

void mem_die(size_t bytes)
{
    static atomic_bool said;
    while (atomic_exchange(&said, true))
        pause(); /* another thread is printing its message and exiting */
    char text[80];
    int n = snprintf(text, sizeof text, "steel: out of memory (%zu bytes wanted)\n", bytes);
    (void)!write(STDERR_FILENO, text, (size_t)n);
    _exit(1);
}

void *mem_alloc(size_t bytes)
{
    return mem_realloc(NULL, bytes, 1);
}

void *mem_zalloc(size_t count, size_t size)
{
    guard_check(count);
    size_t bytes;
    void *p = NULL;
    if (!mul_size(count ? count : 1, size ? size : 1, &bytes))
        bytes = SIZE_MAX;
    bool low = job && atomic_load_explicit(&is_low, memory_order_relaxed);
    for (int n = 0; low || !(p = calloc(1, bytes)); n++)
        no_memory(bytes, n);
    return note(p);
}

void *mem_realloc(void *p, size_t count, size_t size)
{
    size_t bytes;
    if (!mul_size(count, size, &bytes))
        bytes = SIZE_MAX;
    guard_check(bytes);
    uintptr_t old = (uintptr_t)p;
    void *q;
    for (int n = 0; !(q = raw_realloc(p, bytes ? bytes : 1)); n++)
        no_memory(bytes, n);
    if ((uintptr_t)q == old)
        return q;
    unnote(old);
    return note(q);
}

void *mem_ask_again(void *p, size_t bytes)
{
    guard_check(bytes);
    enum { SMALL = 64 << 10 };
    uintptr_t old = (uintptr_t)p;
    void *q = raw_realloc(p, bytes ? bytes : 1);
    if (!q && !job && bytes <= SMALL && reserve_spend())
        q = raw_realloc(p, bytes ? bytes : 1);
    if (!q || (uintptr_t)q == old)
        return q;
    unnote(old);
    return note(q);
}

void *mem_ask(size_t bytes)
{
    return mem_ask_again(NULL, bytes);
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
    unnote((uintptr_t)p);
    free(p);
}

/* Large blocks are mmapped directly, so that freeing returns the pages at once. */
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

/* Bytes of whole pages inside a range, *p moved to the first; 0 = none. */
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

void mem_huge_pages(void *p, size_t bytes)
{
    size_t n = bytes < HUGE_BLOCK ? 0 : whole_pages(&p, bytes);
    if (n)
        madvise(p, n, MADV_HUGEPAGE);
}
