/*
 * The thread team: workers spin a short while for the next job, then park on a futex, so that the
 * many small jobs of a decode step start in well under a microsecond and an idle engine costs nothing.
 */
#include "base/pool.h"
#include "base/error.h"
#include "base/mem.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN_LIMIT = 20000 };

struct worker {
    struct pool *pool;
    pthread_t thread;
    int ith;
};

struct pool {
    int n;
    struct worker *workers; /* (n), entry 0 unused: the caller */
    void (*fn)(void *, int, int);
    void *arg;
    _Alignas(64) _Atomic uint32_t job;    /* generation; workers wait for it to change */
    _Alignas(64) _Atomic uint32_t parked; /* workers asleep in the futex */
    _Alignas(64) _Atomic int pending;     /* workers still in the current job */
    _Alignas(64) _Atomic int arrived;     /* barrier */
    _Alignas(64) _Atomic uint32_t phase;  /* barrier generation */
    bool quit;
};

static inline void relax(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static void wait_change(struct pool *p, uint32_t seen)
{
    for (int i = 0; i < SPIN_LIMIT; i++) {
        if (atomic_load_explicit(&p->job, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&p->parked, 1);
    while (atomic_load(&p->job) == seen)
        syscall(SYS_futex, &p->job, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&p->parked, 1);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    uint32_t seen = 0;
    for (;;) {
        wait_change(p, seen);
        seen = atomic_load_explicit(&p->job, memory_order_acquire);
        if (p->quit)
            return NULL;
        p->fn(p->arg, w->ith, p->n);
        atomic_fetch_sub_explicit(&p->pending, 1, memory_order_release);
    }
}

static void start_job(struct pool *p)
{
    atomic_fetch_add(&p->job, 1);
    if (atomic_load(&p->parked) > 0)
        syscall(SYS_futex, &p->job, FUTEX_WAKE_PRIVATE, p->n, NULL, NULL, 0);
}

struct pool *pool_new(int n_threads)
{
    CHECK(n_threads >= 1, "pool of %d threads", n_threads);
    struct pool *p = mem_aligned(sizeof *p);
    if (!p)
        mem_die(sizeof *p);
    *p = (struct pool){.n = n_threads};
    p->workers = mem_zalloc((size_t)n_threads, sizeof *p->workers);
    for (int i = 1; i < n_threads; i++) {
        p->workers[i] = (struct worker){.pool = p, .ith = i};
        if (pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i])) {
            p->n = i; /* the system has no more: it goes with those there are */
            break;
        }
    }
    return p;
}

void pool_free(struct pool *p)
{
    if (!p)
        return;
    p->quit = true;
    start_job(p);
    for (int i = 1; i < p->n; i++)
        pthread_join(p->workers[i].thread, NULL);
    mem_free(p->workers);
    mem_aligned_free(p, sizeof *p);
}

int pool_size(const struct pool *p)
{
    return p->n;
}

void pool_run(struct pool *p, void (*fn)(void *, int, int), void *arg)
{
    if (p->n == 1) {
        fn(arg, 0, 1);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->pending, p->n - 1, memory_order_relaxed);
    start_job(p);
    fn(arg, 0, p->n);
    for (int spins = 0; atomic_load_explicit(&p->pending, memory_order_acquire) > 0; spins++) {
        if (spins < SPIN_LIMIT)
            relax();
        else
            sched_yield();
    }
}

void pool_barrier(struct pool *p)
{
    if (p->n == 1)
        return;
    uint32_t phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->n - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&p->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPIN_LIMIT)
            relax();
        else
            sched_yield();
    }
}

int pool_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}
