/*
 * A fixed team of threads for data-parallel loops. The caller is thread 0. Results of ops must not
 * depend on the team's size: split work by output, never by reduction.
 */
#ifndef STEEL_BASE_POOL_H
#define STEEL_BASE_POOL_H

struct pool;

struct pool *pool_new(int n_threads); /* n_threads >= 1; fewer where the system has no more */
void pool_free(struct pool *p);
int pool_size(const struct pool *p);

/* Runs fn(arg, ith, nth) once on every thread of the team; returns when all are done. */
void pool_run(struct pool *p, void (*fn)(void *arg, int ith, int nth), void *arg);
/* Inside fn: waits until every thread of the team arrived. All must call it. */
void pool_barrier(struct pool *p);

/* Rows [*first, *last) of n for thread ith, cut at multiples of `unit`. */
static inline void pool_split(int n, int unit, int ith, int nth, int *first, int *last)
{
    long units = ((long)n + unit - 1) / unit;
    long a = units * ith / nth * unit, b = units * (ith + 1) / nth * unit;
    *first = a < n ? (int)a : n;
    *last = b < n ? (int)b : n;
}

int pool_cpu_count(void); /* CPUs this process may run on */

#endif
