/*
 * The part of the scheduler that knows what sequences have in common: it attaches cached pages, decides where
 * recurrent states are saved, and lets a sequence wait for another one that computes the same tokens.
 *
 * Where states are saved: at the ends of messages, shortly before the end of the prompt, where the prompt
 * diverges from cached pages, where a waiting sequence needs one, and at every multiple of SAVE_EVERY. A step
 * saves one state of a sequence. states.h says which states are evicted.
 *
 * Invariants:
 *  1. A sequence waits only for one that is in `readers`, so does not wait itself. So there is no deadlock,
 *     and a sequence whose leader is cancelled, fails or is preempted finds another one or reads.
 *  2. A sequence that waits forgoes its fair share of each step. It waits no more when it has forgone
 *     WAIT_FACTOR times what its leaders have read meanwhile, and a few steps besides. So it waits for a slow
 *     or a stopped leader for those few steps, and for any other in proportion to what it gains.
 */
#ifndef STEEL_ENGINE_REUSE_H
#define STEEL_ENGINE_REUSE_H

#include "engine/scheduler.h"

static inline int scheduler_pages(const struct scheduler *s, int n_tokens)
{
    return (n_tokens + s->kv->page_len - 1) / s->kv->page_len;
}

/* The content id of position i (prefix.h). */
uint64_t seq_content(const struct seq *q, int i);
/* The content ids of n positions starting at `at`, at most a page of them. Valid until the next call. */
const uint64_t *reuse_content(struct scheduler *s, const struct seq *q, int at, int n);

/* Attaches every cached page of the unread tokens that q can start after. The last token is always computed. */
void reuse_attach(struct scheduler *s, struct seq *q);
/* Indexes the pages of q that are full now, and keeps the states saved at their ends. */
void reuse_index(struct scheduler *s, struct seq *q);

/* After how many of the next n tokens of q its state is saved; 0 = never. */
int reuse_save_in(const struct scheduler *s, const struct seq *q, int n);
/* How many of the next n tokens of q a step may read, so that it passes at most one place where a state is saved. */
int reuse_cut(const struct scheduler *s, const struct seq *q, int n);

/* Before reuse_waits is called for the sequences of a step. budget: the step's prompt tokens. */
void reuse_begin(struct scheduler *s, int budget);
/* Whether q waits in this step for one of the readers so far. */
bool reuse_waits(struct scheduler *s, struct seq *q);
/* readers[i] reads in this step, so others may wait for it. In ascending order of i. */
void reuse_reads(struct scheduler *s, int i);

#endif
