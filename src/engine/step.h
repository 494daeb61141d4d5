/*
 * One step of the engine: any mix of prompt chunks and decodes, laid out as a batch. The executor computes it
 * and chooses tokens (executor.h). Owns the batch's arrays, allocated once.
 */
#ifndef STEEL_ENGINE_STEP_H
#define STEEL_ENGINE_STEP_H

#include "engine/kvcache.h"
#include "sample/sampler.h"
#include "model/model.h"

enum logits_want { LOGITS_NONE, LOGITS_LAST, LOGITS_ALL, LOGITS_FIRST };

/* An adapter that a sequence uses (adapters.h), with its scale. */
struct lora_pick {
    int adapter;
    float scale;
    uint64_t serial;
    uint64_t mark; /* of what it adds to weights; the same in every process */
};

/* Data of a prompt besides its tokens, by position: embedding rows, such as an image's, and M-RoPE positions. Unchanged
 * while its sequence runs. */
struct prompt_rows {
    int n;                      /* tokens of the prompt */
    const float *const *embeds; /* (n) the row (E) that replaces the token; NULL = none */
    const int32_t *rope_pos;    /* (n, 3) time, height, width; NULL = the position three times */
    int rope_delta;             /* later tokens: position + rope_delta three times */
    /* (n, 2) the first and the end of the rows that see each other (batch.spans); a step has all of a span or none. NULL =
     * none */
    const int32_t *spans;
    const uint64_t *content; /* (n) content ids (prefix.h) */
};

/* The number of tokens, of n from position `at` on, that a step may read: the end is not inside a span. It may be more than
 * n, where a span begins at `at`. */
static inline int rows_whole(const struct prompt_rows *r, int at, int n)
{
    int last = at + n - 1;
    if (!r || !r->spans || n < 1 || last >= r->n)
        return n;
    const int32_t *span = r->spans + 2 * (ptrdiff_t)last;
    if (span[0] >= span[1] || span[1] == last + 1)
        return n;
    return (span[0] > at ? span[0] : span[1]) - at;
}

struct step_item {
    struct kv_seq *seq;    /* grows by the tokens */
    const int32_t *tokens; /* (n_tokens); -1-r: the token chosen from row r of the step before */
    int n_tokens;
    const int32_t *types;           /* (n_tokens) token types; NULL = all 0 */
    const struct prompt_rows *rows; /* of the sequence; NULL = tokens only */
    enum logits_want want;
    const struct lora_pick *loras; /* (n_loras) at most LORA_MAX_USES, no duplicates */
    int n_loras;
    /* Number of draft tokens at the end of tokens. LOGITS_LAST then starts at the row of the last token before them. A
     * recurrent state can be reset to before them (kvcache_cut). If no slot is free for that, they are dropped. */
    int n_draft;
    int save_at;             /* recurrent states are saved after this many tokens; 0 = never */
    struct sampler *sampler; /* picks the token (step_sample); NULL = none */
    /* It also picks a token from each draft's row, as if the drafts before it were accepted (step_token). Async
     * backends only, and samplers that do not depend on earlier tokens. */
    bool chained;
    /* Pipeline stages: waits for row after - 1 of the step before, as if its tokens came from there. For benchmarks
     * that choose tokens themselves; 0 = waits for none. */
    int after;
    /* results */
    int first_row; /* its first logits row (step_logits); -1 = none */
    int row;       /* its first row of the step (draft_item.from) */
    int32_t token; /* sampled; -1 without sampler */
    int number;    /* of its sequence in the batch */
    int wrong;     /* --kv-canary: 1 + the index of a page that is another sequence's; 0 = none */
};

/* Rows of the MTP block (layer.h), which reads hidden rows of the previous step. */
struct draft_item {
    struct kv_seq *seq;    /* does not grow: its pages have the rows already */
    const int32_t *tokens; /* (n) the tokens after the rows: tokens[i] is at first + i + 1 */
    int first, n;          /* positions of the rows */
    int from;              /* the first of them in the step before (step_item.row) */
    bool want;             /* the token after the last of them is drafted */
    /* results */
    int row;       /* the last row, for a draft after this one; -1 = no draft */
    int32_t token; /* drafted */
};

struct step_limits {
    int max_tokens, max_seqs, max_out;
    int read_chunk; /* the smallest prompt chunk worth planning; 0 = any */
    int lora_rank;  /* bounds.lora_rank */
    int max_embeds; /* bounds.max_embeds */
    bool keep;      /* steps keep their hidden rows for step_draft */
    bool drafts;    /* bounds.drafts */
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
/* With --kv-canary: false: the next steps check no marks, to measure what checking costs. */
void stepper_check_marks(struct stepper *st, bool on);

/* Runs the items. Fails before running if a sequence would exceed the context, or if pages run out (check
 * kvcache_available before, or cut and retry). Sequences are then unchanged. */
bool step_run(struct stepper *st, struct step_item *items, int n_items, struct error *err);
/*
 * The same in three parts.
 * step_start launches a step; its sequences have grown when it returns. On async backends (backend.h) a
 * second step may be started before the first is finished. Items must not move until step_finish. If a
 * sequence ends before that, the caller sets its seq to NULL.
 * step_sample chooses the tokens of the step started last, by the samplers' state at that time: at once, or
 * after the step before has finished and its tokens were accepted. It comes before the next step_start.
 * Without it there are no tokens.
 * step_finish waits for the oldest step in flight.
 */
bool step_start(struct stepper *st, struct step_item *items, int n_items, struct error *err);
void step_sample(struct stepper *st);
bool step_finish(struct stepper *st, struct error *err);
/* A step of the MTP block, after step_finish, or after another step of the block to draft the token after its drafts. */
bool step_draft(struct stepper *st, struct draft_item *items, int n_items, struct error *err);
/* The token picked from row `row` of the step finished last; -1 = none. */
int32_t step_token(const struct stepper *st, int row);
/* The log-probabilities of that row, if its sampler computes them. */
void step_probs(struct stepper *st, int row, struct sample_probs *out);
/* Copies logits row `row` (model_row_width) of the last step to the host. The device may fail there: check step_ok
 * before the values are used. */
void step_logits(struct stepper *st, int row, float *out);
bool step_ok(const struct stepper *st, struct error *err);
/* The error of a finished item that has read a wrong page. False then: its results are invalid, and so is what it has
 * written to the cache. */
bool step_item_ok(const struct step_item *it, struct error *err);

#endif
