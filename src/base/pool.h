/*
 * A team of threads for data-parallel loops. A job is a sequence of phases and a phase a number of
 * pieces. Running threads claim pieces: the caller, which is thread 0, and any helpers that the
 * system schedules. Nobody waits for a helper that holds no piece. So the caller can do everything
 * alone, and other processes on the same cores cost only the time they take. A waiting thread spins
 * briefly, then sleeps.
 *
 * Results must not depend on which thread runs a piece or on how many pieces are claimed at a time:
 * split work by output, never by reduction. Only one thread at a time starts jobs. A piece starts none.
 */
#ifndef STEEL_BASE_POOL_H
#define STEEL_BASE_POOL_H

struct pool;

struct pool *pool_new(int n_threads); /* n_threads >= 1; fewer at the system's limit */
void pool_free(struct pool *p);
int pool_size(const struct pool *p);

/* Pieces claimed at a time. POOL_EVEN: large ranges first, single pieces at the end, so that
 * threads finish together. POOL_LONG: larger ranges, for pieces that read memory sequentially.
 * POOL_SINGLE: one by one, for pieces of unequal size. */
enum pool_cut { POOL_EVEN, POOL_LONG, POOL_SINGLE };

struct pool_work {
    int n; /* pieces, fewer than 2^24 */
    enum pool_cut cut;
};

struct pool_phase {
    /* Called once, by one thread, after every piece of the previous phase is done. Returns the work
     * of this phase, and may do serial work itself. */
    struct pool_work (*begin)(void *arg);
    /* Pieces [first, last), on thread ith < pool_size(). */
    void (*run)(void *arg, int ith, int first, int last);
};

/* Runs the phases in order; returns when all are done. */
void pool_phases(struct pool *p, const struct pool_phase *phases, int n, void *arg);
/* One phase of n pieces. */
void pool_each(struct pool *p, int n, enum pool_cut cut,
               void (*run)(void *arg, int ith, int first, int last), void *arg);
/* Runs fn(arg, i, n) for every i < n = pool_size(). Piece 0 is the caller's. The others may run on
 * any thread, also one after another. */
void pool_run(struct pool *p, void (*fn)(void *arg, int i, int n), void *arg);

/* Rows [*first, *last) of n for part ith of nth, in multiples of `unit`. */
static inline void pool_split(int n, int unit, int ith, int nth, int *first, int *last)
{
    long units = ((long)n + unit - 1) / unit;
    long a = units * ith / nth * unit, b = units * (ith + 1) / nth * unit;
    *first = a < n ? (int)a : n;
    *last = b < n ? (int)b : n;
}

/* Number of useful threads: the CPUs in this process's affinity mask, limited by its cgroups' CPU
 * quota. */
int pool_cpu_count(void);

#endif
