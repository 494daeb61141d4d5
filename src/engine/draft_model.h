/*
 * A small model that drafts tokens for the large one (--draft-model). It has a runtime of its own, on the same or
 * another device: weights, paged cache, prefix index, steps. A scheduler of its own decides which sequences have pages,
 * and shares the reading of prompts among clients. The first step of a round reads for each sequence what the draft
 * model has not seen, mostly the tokens chosen since its last drafts. Each further step reads one draft of every
 * sequence that gets another.
 *
 * Invariants:
 *  1. A mirror is a sequence in the draft model's vocabulary. Its first n_known tokens are those of the large model's
 *     sequence. Those after them are drafts, whose keys and values are in the cache.
 *  2. At the start of a round the mirror is cut to the tokens that it has in common with the sequence. So no page with
 *     an unverified draft is ever indexed.
 *  3. Where the draft model has recurrent states, its first draft is read into another slot (kvcache_fork), so that
 *     the cut can return to the known tokens.
 *  4. A round reads prompts for a bounded time, and says how long it took for each sequence.
 *
 * Knows neither costs nor acceptance (draft.c), nor what is done with its drafts.
 */
#ifndef STEEL_ENGINE_DRAFT_MODEL_H
#define STEEL_ENGINE_DRAFT_MODEL_H

#include "engine/draft_vocab.h"
#include "engine/scheduler.h"

struct runtime;
struct draft_model;
struct draft_mirror; /* a sequence's counterpart */

/* Beside the large model it has a cache of this many tokens, unless a context is given. */
enum { DRAFT_MODEL_TOKENS = 16384, DRAFT_MODEL_SEQS = 16 };

/* rt and vocab stay the caller's. */
struct draft_model *draft_model_new(struct runtime *rt, const struct draft_vocab *vocab);
void draft_model_free(struct draft_model *m);

/* Whether it can draft for a sequence of n_tokens: of text alone, and not longer than its context. */
bool draft_model_may(const struct draft_model *m, const struct seq *q, int n_tokens);
/* Tokens that it would have to read first, of the n_tokens of a sequence. mirror may be NULL. */
int draft_model_lag(const struct draft_mirror *mirror, int n_tokens);
/* The time to read that many; 0 = unknown. */
double draft_model_read_ns(const struct draft_model *m, int n_tokens);
/* The time of a step that drafts one token for each sequence; 0 = unknown. */
double draft_model_pass_ns(const struct draft_model *m);

/* What a round is to do for a sequence. */
struct draft_wish {
    const struct seq *q;
    int n_known;                  /* its tokens */
    struct draft_mirror **mirror; /* made when it is first needed */
    int depth;                    /* drafts wanted; 0 = only read */
    int32_t *drafts;              /* (depth) */
    /* results */
    int n;          /* drafts made; 0 where more was to read than there was time for */
    double read_ns; /* the time to read its tokens */
    bool waits;     /* the draft model's cache has no room for it */
};
/* A round. It reads for about budget_ns at most. False: the draft model's device has failed. */
bool draft_model_make(struct draft_model *m, struct draft_wish *wishes, int n, double budget_ns,
                      struct error *err);
/* The sequence needs no more drafts. Its pages stay indexed. */
void draft_model_leave(struct draft_model *m, struct draft_mirror **mirror);

#endif
