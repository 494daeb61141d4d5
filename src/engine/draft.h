/*
 * Speculative decoding. Sources propose the tokens after a sequence's last one: earlier text (draft_text.h), the model's
 * MTP block (layer.h), or a small model (draft_model.h). The next step reads these drafts as well, and each is accepted as long as the sampler
 * chooses the same token from the row before it. So every token is chosen by the same logits and the same random number
 * as without drafts. An accepted draft saves a step, a rejected one costs a row. How many drafts a sequence gets, and
 * from which source, is decided before every step by what they cost and save (draft_cost.h). Knows sequences and steps;
 * the engine chooses the tokens.
 *
 * Invariants:
 *  1. The last n_open tokens of a sequence's cache are unverified drafts. Between steps there are none
 *     (draft_settle), and they are never indexed.
 *  2. The block's own cache has a row for every position: what it computed from the hidden row there and from the
 *     token after it. A shared page has the rows of the sequence that computed it. In the page's last row the token
 *     after it may differ: that may make drafts worse, but never tokens.
 *  3. After rejected drafts a recurrent state is reset to the one after the last token known before the step
 *     (kvcache_draft). Drafts that were accepted before the rejected one are read again, as tokens.
 *  4. A sequence's drafts come from one source at a time, and after them from its grammar.
 */
#ifndef STEEL_ENGINE_DRAFT_H
#define STEEL_ENGINE_DRAFT_H

#include "engine/draft_cost.h"
#include "engine/draft_count.h"
#include "engine/draft_model.h"
#include "engine/draft_text.h"
#include "engine/scheduler.h"

/* DRAFT_SEQS: with more running sequences the block drafts nothing, and no recurrent state is saved for drafts. The block
 * is tried for HEAD_TRY of HEAD_PERIOD steps, also if it does not pay. */
enum { DRAFT_SEQS = 4, HEAD_TRY = 8, HEAD_PERIOD = 512 };

/* Classes of drafts: text by the length of its match, the sequence's own and recent answers; the first draft of the block
 * and of the small model, and those after it; text after a match that has ended, where the last token is not the text's, and
 * where it is. */
enum {
    TEXT_LENGTHS = 5,
    CLASS_RECENT = TEXT_LENGTHS,
    CLASS_HEAD = 2 * TEXT_LENGTHS,
    CLASS_MODEL = CLASS_HEAD + 2,
    CLASS_BRIDGE = CLASS_MODEL + 2,
};
/* draft_offer.maker */
enum { MAKER_NONE, MAKER_HEAD, MAKER_MODEL };

/* The drafter's state of a sequence. */
struct draft_seq {
    struct draft_match match;
    struct draft_rate rates[DRAFT_CLASSES];
    int n_rested;             /* tokens up to which the rates have rested */
    enum draft_source source; /* of its first n_own drafts; those after them are the grammar's */
    int n_own;
    int class;                   /* of text drafts */
    struct draft_mirror *mirror; /* of the small model, or NULL */
    int paused;                  /* tokens up to which it has no room for the sequence */
};

struct draft_options {
    unsigned from;             /* 1 << source; 0: no drafts, and no other function is called */
    int fixed;                 /* drafts per step and sequence; 0 = as many as pay */
    int most_head;             /* most drafts of the block */
    struct draft_model *model; /* NULL = none; owned by the drafter from draft_init on */
    bool async;                /* steps without drafts overlap (backend.h) */
};

struct drafter {
    struct scheduler *sched;
    struct kvcache *kv;
    struct stepper *step;
    struct draft_options opt;
    int n_vocab;
    struct draft_cost cost;
    struct draft_history history;
    bool tries_text; /* the step started last is followed to try drafts that do not pay */
    /* the block */
    bool head_follows;          /* the step started last */
    uint64_t head_turn;         /* steps that could have drafts of the block */
    double pass_ns;             /* the block drafts one token for every sequence; 0 = unknown */
    int n_pass;                 /* passes measured */
    struct draft_item *items;   /* (max_seqs of steps) */
    struct seq **seqs;          /* (the same) owners of items */
    int *wants;                 /* (the same) drafts wanted of the block */
    struct draft_offer *offers; /* (the same) */
    int *depths;                /* (the same) drafts of the block, by items of the step */
    struct draft_wish *wishes;  /* (the same) */
    uint64_t model_turn;        /* steps after which the small model could draft */
    int64_t made_ns; /* what the block and the small model took after the step finished last */
    int32_t *drafts; /* (the same, DRAFT_DEPTH) */
    /* Cuts drafts (n) of q to those that its constraint allows, and appends up to `most` in all that it forces.
     * Returns their number; *n_kept: of the n. NULL = no constraints. */
    int (*fit)(void *arg, struct seq *q, int32_t *drafts, int n, int most, int *n_kept);
    void *fit_arg;
    /* For tests and benchmarks: changes the n drafts after tokens (n_tokens), `most` at most. Returns their number.
     * hook_makes: also where there are none. */
    int (*hook)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n, int most);
    void *hook_arg;
    bool hook_makes;
};

void draft_init(struct drafter *sp, struct scheduler *sched, struct stepper *step,
                const struct draft_options *opt, int n_vocab);
void draft_clear(struct drafter *sp);
/* Whether drafts may be made after a step that is about to start. On async backends (backend.h) not while none would
 * pay: then the next step starts before the tokens of this one are known. Sequences of a step that the block does not
 * follow get no more drafts from it. */
bool draft_follows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                   int n);
/* What is expected of a source's drafts (draft_offer.p). class: of its first draft. */
void draft_rates(const struct drafter *sp, const struct draft_rate *own, int class, double p[2]);
/* After a step with draft_follows, when its tokens are appended: drafts for the next one, wants[i] at most for sequence
 * i. seqs[i] NULL: the sequence has left. */
bool draft_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err);
/* After any other step: follows the text of its sequences. */
void draft_note(struct drafter *sp, struct seq *const *seqs, int n);
/* Learns the time of a step (items, n) of decodes alone. follows: as draft_follows said. */
void draft_learn(struct drafter *sp, const struct step_item *items, int n, bool follows,
                 int64_t ns);
/* Of n_draft drafts of q the first n_accepted were accepted. */
void draft_verified(struct drafter *sp, struct seq *q, int n_draft, int n_accepted);
enum draft_source draft_source_of(const struct seq *q, int i); /* of its draft i */
/* Drops the sequence's unverified draft tokens from the KV cache. */
void draft_settle(struct drafter *sp, struct seq *q);
/* The sequence ends. keep: its answer becomes one of its client's recent answers. */
void draft_leave(struct drafter *sp, struct seq *q, bool keep);

/* draft_head.c: the block. */
bool draft_head_follows(struct drafter *sp, struct seq *const *seqs, int n);
bool draft_head_may(const struct drafter *sp, const struct seq *q);
/* Its rows of the step go through the block, and sequence i gets wants[i] drafts. */
bool draft_head_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                     const int *wants, int n, struct error *err);
double draft_head_cost(const struct drafter *sp, int n); /* of a pass, in steps */

/* draft_small.c: when the small model drafts, and for whom. */
double draft_small_cost(const struct drafter *sp, int n); /* of a pass, in steps */
/* What it may draft for q, `most` at most; most 0: nothing, or it has to read first. */
struct draft_offer draft_small_offer(const struct drafter *sp, const struct seq *q, int most);
/* Whether it is to follow one of the sequences after this step, to draft for it. */
bool draft_small_follows(struct drafter *sp, struct seq *const *seqs, int n);
/* Makes the drafts of its offers, and reads what it lacks of other sequences that it follows. wants: as draft_make. */
bool draft_small_make(struct drafter *sp, struct seq *const *seqs, const int *wants, int n,
                      struct error *err);

#endif
