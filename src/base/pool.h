/*
 * A team of threads for data-parallel loops. A job is a row of phases, a phase a number of pieces,
 * and pieces are claimed by whoever is running: the caller, which is thread 0, and the helpers that
 * the system happens to schedule. Nobody waits for a helper that holds no piece, so the caller can do
 * everything alone, and a neighbour on the same cores costs no more than the time it takes. Who waits
 * spins for a moment and then sleeps.
 *
 * Results must not depend on who runs a piece, nor on how many pieces are claimed at a time: split
 * work by output, never by reduction. One thread at a time starts jobs; a piece starts none.
 */
#ifndef STEEL_BASE_POOL_H
#define STEEL_BASE_POOL_H

struct pool;

struct pool *pool_new(int n_threads); /* n_threads >= 1; fewer where the system has no more */
void pool_free(struct pool *p);
int pool_size(const struct pool *p);

/* How many pieces a thread claims at a time: large ranges first, single pieces at the end, so that
 * threads finish together. POOL_LONG: even larger ones, where a piece continues the stream of memory
 * of the one before. POOL_SINGLE: one by one, for pieces of unequal size. */
enum pool_cut { POOL_EVEN, POOL_LONG, POOL_SINGLE };

struct pool_work {
    int n; /* pieces, fewer than 2^24 */
    enum pool_cut cut;
};

struct pool_phase {
    /* Called once, by one thread, when every piece of the phase before is done: says what there is
     * to do, and may do what must be done once. */
    struct pool_work (*begin)(void *arg);
    /* Pieces [first, last), on thread ith < pool_size(). */
    void (*run)(void *arg, int ith, int first, int last);
};

/* Runs the phases one after another; returns when all are done. */
void pool_phases(struct pool *p, const struct pool_phase *phases, int n, void *arg);
/* One phase of n pieces. */
void pool_each(struct pool *p, int n, enum pool_cut cut,
               void (*run)(void *arg, int ith, int first, int last), void *arg);
/* One piece per thread of the team: fn(arg, i, n) for every i < n = pool_size(). Piece 0 is the
 * caller's; the others may run on any thread, also one after another. */
void pool_run(struct pool *p, void (*fn)(void *arg, int i, int n), void *arg);

/* Rows [*first, *last) of n for part ith of nth, cut at multiples of `unit`. */
static inline void pool_split(int n, int unit, int ith, int nth, int *first, int *last)
{
    long units = ((long)n + unit - 1) / unit;
    long a = units * ith / nth * unit, b = units * (ith + 1) / nth * unit;
    *first = a < n ? (int)a : n;
    *last = b < n ? (int)b : n;
}

/* Threads worth starting: the CPUs this process may run on, and no more than its cgroups pay for. */
int pool_cpu_count(void);

#endif
