/*
 * Computes batches that step.c has laid out and samples their tokens, in this process alone or together with others
 * (dist/). Owns the pipeline and sampling over its stages. Must not know sequences or the cache.
 *
 * Invariants:
 * 1. Steps end in the order in which they were started. Two at most are in flight, one where the backend
 *    is not async.
 * 2. A batch and its arrays stay until its step has been launched, samplers until its step has ended.
 */
#ifndef STEEL_ENGINE_EXECUTOR_H
#define STEEL_ENGINE_EXECUTOR_H

#include "model/model.h"
#include "sample/sampler.h"

struct kv_seq; /* kvcache.h */

/* The sampler of an output row. It is not used if *owner has become NULL in the meantime, because the sequence has
 * ended and its sampler is freed. */
struct row_choice {
    struct sampler *sampler; /* NULL = no token is wanted */
    struct kv_seq *const *owner;
};

struct executor;
/* Prepares the model's backend for steps within the bounds. */
struct executor *executor_new(struct model *m, const struct bounds *bounds, struct error *err);
void executor_free(struct executor *x);

/* Starts a step. tokens (n_tokens) are the batch's; those below 0 may be filled in. after (n_tokens), or NULL:
 * 1 + the out row of the step before that the row waits for, 0 = none. key != 0: the backend may record and
 * replay the step. */
void executor_start(struct executor *x, const struct batch *b, int32_t *tokens,
                    const int32_t *after, uint64_t key);
/* Chooses tokens of the step started last: choices (n_out). */
void executor_sample(struct executor *x, const struct row_choice *choices);
/* Waits for the oldest step. */
bool executor_end(struct executor *x, struct error *err);
/* A whole step of the MTP block; `sampler` chooses its tokens. No other step may be in flight. */
bool executor_draft(struct executor *x, const struct batch *b, uint64_t key,
                    struct sampler *sampler, struct error *err);
/* A step that another process has laid out, from start to end. No tokens are chosen. */
bool executor_follow(struct executor *x, const struct batch *b, uint64_t key, struct error *err);

/* Results of the step that ended last, by output row. The token is -1 if none was wanted or none could be chosen. */
int32_t executor_token(const struct executor *x, int row);
void executor_probs(struct executor *x, int row, struct sample_probs *out);
void executor_logits(struct executor *x, int row, float *out); /* (model_row_width) */

#endif
