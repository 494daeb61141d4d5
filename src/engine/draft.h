/*
 * Speculative decoding with an MTP block (layer.h). The block drafts the tokens after a sequence's last one. The
 * next step reads the drafts as well, and each is accepted as long as the sampler chooses the same token from the
 * row before it. So every token is chosen by the same logits and the same random number as without drafts. An
 * accepted draft saves a step, a rejected one costs a row. Knows sequences and steps; the engine chooses the
 * tokens.
 *
 * Invariants:
 *  1. The last n_open tokens of a sequence's cache are unverified drafts. Between steps there are none
 *     (draft_settle), and they are never indexed.
 *  2. The block's own cache has a row for every position: what it computed from the hidden row there and from the
 *     token after it. A shared page has the rows of the sequence that computed it. In the page's last row the token
 *     after it may differ: that may make drafts worse, but never tokens.
 *  3. After rejected drafts a recurrent state is reset to the one after the last token known before the step
 *     (kvcache_draft). Drafts that were accepted before the rejected one are read again, as tokens.
 */
#ifndef STEEL_ENGINE_DRAFT_H
#define STEEL_ENGINE_DRAFT_H

#include "engine/scheduler.h"

/* Learned costs of steps of one number of sequences. */
struct draft_rate {
    double plain_ns, draft_ns;      /* a step with everything after it; 0 = unknown */
    double tokens;                  /* per sequence of a step with drafts */
    int n_plain, n_draft, n_tokens; /* steps measured */
    uint64_t turn;                  /* counts decisions */
};

enum { DRAFT_MAX_SEQS = 16, SPEC_TRY = 16, SPEC_REST = 8, SPEC_PERIOD = 512 };

struct drafter {
    struct scheduler *sched;
    struct kvcache *kv;
    struct stepper *step;
    int most, max_seqs; /* drafts per sequence; none where more than max_seqs run */
    bool async;         /* steps without drafts overlap (backend.h) */
    bool adapts;        /* stops drafting where it does not pay */
    struct draft_rate rates[DRAFT_MAX_SEQS + 1]; /* by sequences */
    struct draft_item *items;                    /* (max_seqs of steps) */
    struct seq **seqs;                           /* (the same) owners of items */
    int *wants;                                  /* (the same) drafts wanted */
    int32_t *drafts;                             /* (the same, most) */
    /* For tests: replaces the block: writes n drafts for after tokens (n_tokens). */
    void (*draft)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n);
    void *draft_arg;
};

/* most 0: no drafts, and no other function is called. max_seqs: at most DRAFT_MAX_SEQS. */
void draft_init(struct drafter *sp, struct scheduler *sched, struct stepper *step, int most,
                int max_seqs, bool async, bool adapts);
void draft_clear(struct drafter *sp);
/* Whether the block runs after a step that is about to start. On async backends (backend.h) it does not while more
 * sequences run than may draft, or while drafts do not pay. The next step then starts before the tokens of this one
 * are known, and its sequences draft no more. */
bool draft_follows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                   int n);
/* After a step (items, n) with draft_follows, when its tokens are appended: its rows go through the block, and
 * sequence i gets up to wants[i] drafts. seqs[i] NULL: the sequence has left. */
bool draft_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err);
/* Whether drafts pay for n running sequences. Every SPEC_PERIOD decisions both ways are measured again, for SPEC_TRY
 * and SPEC_REST steps. */
bool draft_pays(struct drafter *sp, int n);
/* Learns from a step (items, n) of decodes alone: its time, and its accepted drafts. */
void draft_learn(struct drafter *sp, const struct step_item *items, int n, int n_accepted,
                 int64_t ns);
/* Drops the sequence's unverified draft tokens from the KV cache. */
void draft_settle(struct drafter *sp, struct seq *q);

#endif
