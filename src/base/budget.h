/*
 * A budget of work: the cost of untrusted input, counted as it is spent, and a flag that cancels
 * the work. One unit is about 30 ns of one core: a step of a template, a few bytes of text through
 * a tokenizer. Work is counted, not timed, so that the same input always gets the same verdict.
 * Only work that cannot be counted (a running regex) is charged by CPU time. A budget belongs to
 * one thread, except for the flag. NULL is an unlimited budget.
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
    bool given_up;                /* the flag was set */
};

/* A budget for `bytes` of input: a base amount plus an amount per byte, up to a maximum. */
struct budget budget_for(size_t bytes, const atomic_bool *cancelled);

/* Returns false when the work must stop; then return budget_error(). */
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

/* Sets err to the reason why budget_spend failed; returns false. */
bool budget_error(const struct budget *w, struct error *err);

#endif
