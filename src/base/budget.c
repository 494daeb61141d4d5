/* Budgets of work. Owns the constants: how much input of a given size may cost. */
#include "base/budget.h"

#include <time.h>

enum { UNIT_NS = 30 };

/*
 * Text takes about 3 units per byte. A conversation of one-letter messages takes up to 4 per byte
 * with nearly all published templates and 20 with the most expensive one. MOST is a few seconds of
 * one core.
 */
static const uint64_t BASE = 5000000, PER_BYTE = 64, MOST = 250000000;

struct budget budget_for(size_t bytes, const atomic_bool *cancelled)
{
    uint64_t units = bytes < MOST / PER_BYTE ? BASE + bytes * PER_BYTE : MOST;
    return (struct budget){.left = units < MOST ? units : MOST, .cancelled = cancelled};
}

uint64_t budget_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) / UNIT_NS;
}

bool budget_error(const struct budget *w, struct error *err)
{
    if (w && w->given_up)
        return error_set(err, "given up: nobody waits for it any more");
    return error_set(err, "this takes too much work for its size (given up after %llu units)",
                     (unsigned long long)(w ? w->spent : 0));
}
