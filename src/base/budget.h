/*
 * A budget of work: what a stranger's input may cost, counted as it is spent, and a flag by which
 * somebody else says that the result is no longer wanted. One unit is about 30 ns of one core: a
 * step of a template, a few bytes of text through a tokenizer. Counted, so that the same input is
 * always treated alike; only what cannot be counted (a regex at work) is charged by CPU time.
 * Belongs to one thread, all but the flag. NULL stands for a budget without end.
 */
#ifndef STEEL_BASE_BUDGET_H
#define STEEL_BASE_BUDGET_H

#include "base/error.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct budget {
    uint64_t left, spent;         /* units */
    const atomic_bool *cancelled; /* or NULL */
    bool over;                    /* the budget ran out */
    bool given_up;                /* somebody set the flag */
};

/* A budget for `bytes` of input: a base, so much per byte, and an end. */
struct budget budget_for(size_t bytes, const atomic_bool *cancelled);

/* False: stop now, and leave through budget_error. */
static inline bool budget_spend(struct budget *w, uint64_t units)
{
    if (!w)
        return true;
    if (w->cancelled && atomic_load_explicit(w->cancelled, memory_order_relaxed))
        w->given_up = true;
    if (w->left < units) {
        w->over = true;
        w->left = 0;
    } else {
        w->left -= units;
        w->spent += units;
    }
    return !w->over && !w->given_up;
}

/* CPU time of this thread, in units. */
uint64_t budget_clock(void);

/* Says why budget_spend failed; returns false. */
bool budget_error(const struct budget *w, struct error *err);

#endif
