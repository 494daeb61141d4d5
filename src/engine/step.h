/*
 * One step of the engine: any mix of prompt chunks and decodes, laid out as a batch and run through
 * the forward pass; then tokens are chosen. Owns the batch arrays, allocated once, and the few
 * threads that make the masks of constrained rows while the device computes.
 */
#ifndef STEEL_ENGINE_STEP_H
#define STEEL_ENGINE_STEP_H

#include "engine/kvcache.h"
#include "sample/sampler.h"
#include "model/model.h"

enum logits_want { LOGITS_NONE, LOGITS_LAST, LOGITS_ALL, LOGITS_FIRST };

/* An adapter that a sequence uses (engine/adapters.h), and how strongly. */
struct lora_pick {
    int adapter;
    float scale;
    uint64_t serial;
};

struct step_item {
    struct kv_seq *seq;    /* the tokens are appended to it */
    const int32_t *tokens; /* (n_tokens); -1-r: what row r (first_row) of the step before chose */
    int n_tokens;
    const int32_t *types; /* (n_tokens) of tokens, for models that know them; NULL = all 0 */
    enum logits_want want;
    const struct lora_pick *loras; /* (n_loras) LORA_MAX_USES at most, none twice */
    int n_loras;
    /* The last so many tokens are drafts: LOGITS_LAST wants the rows from the last token before them
     * on, from whose logits the sampler picks. Recurrent states can go back to before them
     * (kvcache_cut), where a slot is free; else they are left out. */
    int n_draft;
    int save_at;             /* recurrent states are saved after so many of the tokens; 0 = not */
    struct sampler *sampler; /* picks a token from the last logits (step_sample); NULL = none */
    /* It also picks one from the row of each draft, as if the drafts before were right (step_token). Only on
     * backends that run ahead, and of samplers that do not look at the tokens before. */
    bool chained;
    /* Over stages: it waits for row after - 1 of the step before, as if its tokens came from there, for benchmarks
     * that choose their own; 0 = for none. */
    int after;
    /* results */
    int first_row; /* its first logits row: see step_logits; -1 if none */
    int row;       /* its first row of the step: see draft_item */
    int32_t token; /* sampled; -1 without sampler */
};

/* Rows of the MTP block (layer.h): what it makes of rows of the step before. */
struct draft_item {
    struct kv_seq *seq;    /* does not grow: its pages hold the rows */
    const int32_t *tokens; /* (n) behind the rows: tokens[i] is the one at first + i + 1 */
    int first, n;          /* positions of the rows */
    int from;              /* the first of them in the step before: its `row` */
    bool want;             /* the token behind the last of them is drafted */
    /* results */
    int row;       /* of the last row, for a draft behind this one; -1 if nothing was wanted */
    int32_t token; /* drafted */
};

struct step_limits {
    int max_tokens, max_seqs, max_out;
    int read_chunk; /* fewer tokens of a prompt are not worth a place in a step; 0 = any */
    int lora_rank;  /* bounds.lora_rank */
    bool keep;      /* steps keep their rows for step_draft */
};

/* The logits row that the sampler of an item reads. */
static inline int step_chosen_row(const struct step_item *it)
{
    return it->first_row + (it->want == LOGITS_ALL ? it->n_tokens - 1 - it->n_draft : 0);
}

struct stepper;
/* A step that another process has laid out, from start to end. No tokens are chosen. */
bool step_follow(struct stepper *st, const struct batch *b, uint64_t key, struct error *err);
struct stepper *stepper_new(struct model *m, struct kvcache *kv, int context,
                            const struct step_limits *limits, struct error *err);
void stepper_free(struct stepper *st);
const struct step_limits *stepper_limits(const struct stepper *st);

/*
 * Runs the items. Fails without running if a sequence would pass the context, or if pages run out
 * (check kvcache.n_free before, or cut and retry); sequences are then unchanged.
 */
bool step_run(struct stepper *st, struct step_item *items, int n_items, struct error *err);
/*
 * The same in three parts. Items must stay where they are until step_finish, which waits for the oldest
 * step under way; sequences have grown from step_start on. On backends that run ahead (backend.h) a
 * second step may be started before the first is finished. An item whose seq is set to NULL meanwhile
 * belongs to nobody any more.
 * step_sample chooses the tokens of the step started last. It reads what samplers say when it is called:
 * at once, or when the step before has finished and its tokens were accepted. It comes before the next
 * step_start; without it there are no tokens.
 */
bool step_start(struct stepper *st, struct step_item *items, int n_items, struct error *err);
void step_sample(struct stepper *st);
bool step_finish(struct stepper *st, struct error *err);
/* A step of the MTP block, after step_finish, or after another one for a draft behind its drafts. */
bool step_draft(struct stepper *st, struct draft_item *items, int n_items, struct error *err);
/* What the sampler of the step finished last picked from row `row`; -1: nothing. */
int32_t step_token(const struct stepper *st, int row);
/* Log-probabilities that the sampler of the step finished last wanted, of row `row`. */
void step_probs(struct stepper *st, int row, struct sample_probs *out);
/* Copies logits row `row` (model_row_width) of the last step to the host. */
void step_logits(struct stepper *st, int row, float *out);

#endif
