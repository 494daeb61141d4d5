/*
 * The thread team. All threads share one word: the number of the phase (its epoch) and the number of
 * its unclaimed pieces. Invariants:
 *   1. A claim is one compare-and-swap of the word. The word alone says whether there is anything to
 *      claim, so a thread that slept through phases or jobs cannot claim a piece of an old phase.
 *   2. `left` counts unfinished pieces. The thread that finishes the last one begins the next phase: it
 *      writes the fields first and the word last. A phase ends when its pieces are finished, no matter
 *      which threads took part. A descheduled thread delays the others only if it holds pieces.
 *   3. run, arg and total are read after a claim; they cannot change until the claimed piece is
 *      finished. cut is read before it and may belong to another phase. Then only the claim's size
 *      differs.
 *   4. A waiting thread spins for SPIN_NS, then sleeps on a bell. It sets `asleep` and reads the word
 *      again before it sleeps. The publisher writes the word first and reads `asleep` after.
 */
#include "base/pool.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/os.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { PIECE_BITS = 24, IDLE = (1 << PIECE_BITS) - 1 }; /* IDLE: no job */

/* SPIN_NS is longer than the pauses between jobs of a step and than the usual difference between
 * pieces, and shorter than a scheduler's time slice. */
enum { SPIN_NS = 100000, SPINS_PER_LOOK = 32 };

struct worker {
    struct pool *pool;
    pthread_t thread;
    int ith;
};

/* A futex that threads sleep on. */
struct bell {
    _Atomic uint32_t rung;
    _Atomic bool asleep; /* a thread sleeps or is about to */
};

struct pool {
    int n;
    struct worker *workers; /* (n), entry 0 unused: the caller */
    /* The current phase. */
    _Alignas(64) _Atomic uint64_t word; /* epoch << PIECE_BITS | unclaimed, or IDLE */
    void (*run)(void *arg, int ith, int first, int last);
    void *arg;
    int total;
    _Atomic int cut;
    _Alignas(64) _Atomic int left;
    /* The job. Only the thread that begins a phase accesses these. */
    _Alignas(64) const struct pool_phase *phases;
    int n_phases, phase;
    _Alignas(64) struct bell caller; /* the caller waits for the next phase or the end */
    _Alignas(64) struct bell team;   /* helpers wait for work */
    _Atomic bool quit;
};

static inline void relax(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

static void ring(struct bell *b)
{
    if (!atomic_load(&b->asleep) || !atomic_exchange(&b->asleep, false))
        return;
    atomic_fetch_add(&b->rung, 1);
    os_wake_all(&b->rung);
}

/* Waits until the word differs from `seen`. */
static void wait_change(struct pool *p, uint64_t seen, struct bell *b)
{
    int64_t end = 0;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (atomic_load_explicit(&p->word, memory_order_acquire) != seen)
                return;
            relax();
        }
        if (!end)
            end = clock_ns() + SPIN_NS;
    } while (clock_ns() < end);
    for (;;) {
        uint32_t rung = atomic_load(&b->rung);
        atomic_store(&b->asleep, true);
        if (atomic_load(&p->word) != seen)
            return;
        os_sleep_while(&b->rung, rung);
    }
}

static void publish(struct pool *p, int unclaimed)
{
    uint64_t epoch = atomic_load_explicit(&p->word, memory_order_relaxed) >> PIECE_BITS;
    atomic_store(&p->word, (epoch + 1) << PIECE_BITS | (uint64_t)unclaimed);
}

/* Opens a phase. This thread has already claimed its first `claimed` pieces. */
static void offer(struct pool *p, struct pool_work work, int claimed)
{
    CHECK(work.n > 0 && work.n < IDLE, "a phase of %d pieces", work.n);
    p->total = work.n;
    atomic_store_explicit(&p->cut, work.cut, memory_order_relaxed);
    atomic_store_explicit(&p->left, work.n, memory_order_relaxed);
    publish(p, work.n - claimed);
    /* This thread claims a single piece for itself. */
    if (work.n > 1) {
        ring(&p->caller);
        ring(&p->team);
    }
}

/* Begins the next phase that has pieces, or ends the job. */
static void advance(struct pool *p)
{
    for (; p->phase < p->n_phases; p->phase++) {
        const struct pool_phase *ph = &p->phases[p->phase];
        struct pool_work work = ph->begin(p->arg);
        if (work.n == 0)
            continue;
        p->run = ph->run;
        p->phase++;
        offer(p, work, 0);
        return;
    }
    publish(p, IDLE);
    ring(&p->caller);
}

static int claim_size(int unclaimed, int n_threads, int cut)
{
    int n = cut == POOL_SINGLE ? 1 : unclaimed * (cut == POOL_LONG ? 3 : 2) / (4 * n_threads);
    return n < 1 ? 1 : n;
}

static void finish(struct pool *p, int n)
{
    if (atomic_fetch_sub_explicit(&p->left, n, memory_order_acq_rel) == n)
        advance(p);
}

/* Claims pieces and runs them. False if state *seen has nothing to claim. */
static bool work_once(struct pool *p, int ith, uint64_t *seen)
{
    uint64_t at = atomic_load_explicit(&p->word, memory_order_acquire);
    int unclaimed, n;
    do {
        unclaimed = (int)(at & IDLE);
        if (unclaimed == 0 || unclaimed == IDLE) {
            *seen = at;
            return false;
        }
        n = claim_size(unclaimed, p->n, atomic_load_explicit(&p->cut, memory_order_relaxed));
    } while (!atomic_compare_exchange_weak_explicit(&p->word, &at, at - (uint64_t)n,
                                                    memory_order_acquire, memory_order_acquire));
    int first = p->total - unclaimed;
    p->run(p->arg, ith, first, first + n);
    finish(p, n);
    return true;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    for (;;) {
        uint64_t seen;
        while (work_once(p, w->ith, &seen))
            ;
        if (atomic_load(&p->quit))
            return NULL;
        wait_change(p, seen, &p->team);
    }
}

/* The caller's share of a job. Returns when the job is done. */
static void work_all(struct pool *p)
{
    for (;;) {
        uint64_t seen;
        while (work_once(p, 0, &seen))
            ;
        if ((seen & IDLE) == IDLE)
            return;
        wait_change(p, seen, &p->caller);
    }
}

struct pool *pool_new(int n_threads)
{
    CHECK(n_threads >= 1, "pool of %d threads", n_threads);
    struct pool *p = mem_aligned(sizeof *p);
    if (!p)
        mem_die(sizeof *p);
    *p = (struct pool){.n = n_threads, .word = IDLE};
    p->workers = mem_zalloc((size_t)n_threads, sizeof *p->workers);
    for (int i = 1; i < n_threads; i++) {
        p->workers[i] = (struct worker){.pool = p, .ith = i};
        if (pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i])) {
            p->n = i; /* thread limit reached: go on with these */
            break;
        }
    }
    return p;
}

void pool_free(struct pool *p)
{
    if (!p)
        return;
    atomic_store(&p->quit, true);
    publish(p, IDLE);
    ring(&p->team);
    for (int i = 1; i < p->n; i++)
        pthread_join(p->workers[i].thread, NULL);
    mem_free(p->workers);
    mem_aligned_free(p, sizeof *p);
}

int pool_size(const struct pool *p)
{
    return p->n;
}

void pool_phases(struct pool *p, const struct pool_phase *phases, int n, void *arg)
{
    if (p->n == 1) {
        for (int i = 0; i < n; i++) {
            struct pool_work work = phases[i].begin(arg);
            if (work.n > 0)
                phases[i].run(arg, 0, 0, work.n);
        }
        return;
    }
    p->phases = phases;
    p->n_phases = n;
    p->phase = 0;
    p->arg = arg;
    advance(p);
    work_all(p);
}

void pool_each(struct pool *p, int n, enum pool_cut cut,
               void (*run)(void *arg, int ith, int first, int last), void *arg)
{
    if (n == 0)
        return;
    if (p->n == 1 || n == 1) {
        run(arg, 0, 0, n);
        return;
    }
    p->n_phases = p->phase = 0;
    p->run = run;
    p->arg = arg;
    offer(p, (struct pool_work){n, cut}, 0);
    work_all(p);
}

struct run_job {
    void (*fn)(void *arg, int i, int n);
    void *arg;
    int n;
};

static void run_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct run_job *j = arg;
    for (int i = first; i < last; i++)
        j->fn(j->arg, i, j->n);
}

void pool_run(struct pool *p, void (*fn)(void *, int, int), void *arg)
{
    struct run_job j = {fn, arg, p->n};
    if (p->n == 1) {
        fn(arg, 0, 1);
        return;
    }
    p->n_phases = p->phase = 0;
    p->run = run_pieces;
    p->arg = &j;
    offer(p, (struct pool_work){p->n, POOL_SINGLE}, 1);
    fn(arg, 0, p->n);
    finish(p, 1);
    work_all(p);
}

int pool_cpu_count(void)
{
    int n = os_cpus(), quota = cpu_quota("");
    return quota && quota < n ? quota : n;
}
