/*
 * Speculation: an MTP block (layer.h) drafts what comes behind a sequence's tokens, the next step reads the
 * drafts behind its last token, and they become tokens for as long as the sampler chooses the very same from
 * the rows before them. So every token is chosen as without drafts, by the same logits and the same random
 * number; a draft that was right has saved a step, one that was wrong has cost a row. Knows sequences and
 * steps; the engine chooses the tokens.
 *
 * Invariants:
 *  1. the last n_open tokens of a sequence's cache are drafts that no token has confirmed; between steps there
 *     are none (draft_settle), and none is ever indexed
 *  2. the block's own cache has a row for every position of the others': what it made of the hidden row there
 *     and of the token behind it. A page that is shared has the one of whoever computed it, which in its last
 *     row may have seen another token: drafts may be worse for it, tokens never are
 *  3. a recurrent state behind drafts that were wrong goes back to the one behind the last known token
 *     (kvcache_draft): drafts before the wrong one that were right are then read again, as tokens
 */
#ifndef STEEL_ENGINE_DRAFT_H
#define STEEL_ENGINE_DRAFT_H

#include "engine/scheduler.h"

/* What steps of so many sequences took, learned as they run. */
struct draft_rate {
    double plain_ns, draft_ns;      /* a step, what follows it included; 0 = not seen */
    double tokens;                  /* that a sequence gets of a step with drafts */
    int n_plain, n_draft, n_tokens; /* steps seen of each */
    uint64_t turn;                  /* counts decisions */
};

enum { DRAFT_MAX_SEQS = 16, SPEC_TRY = 16, SPEC_REST = 8, SPEC_PERIOD = 512 };

struct drafter {
    struct scheduler *sched;
    struct kvcache *kv;
    struct stepper *step;
    int most, max_seqs; /* drafts of a sequence; while at most so many run */
    bool async;         /* steps run ahead where none of their sequences drafts */
    bool adapts;        /* where they cost more than they save, none are made */
    struct draft_rate rates[DRAFT_MAX_SEQS + 1]; /* by sequences */
    struct draft_item *items;                    /* (max_seqs of steps) */
    struct seq **seqs;                           /* (the same) whose they are */
    int *wants;                                  /* (the same) drafts wanted */
    int32_t *drafts;                             /* (the same, most) */
    /* For tests: writes what is drafted behind tokens (n_tokens), in the place of the block's drafts (n). */
    void (*draft)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n);
    void *draft_arg;
};

/* most 0: nothing is drafted, and nothing else is called. max_seqs: DRAFT_MAX_SEQS at most. */
void draft_init(struct drafter *sp, struct scheduler *sched, struct stepper *step, int most,
                int max_seqs, bool async, bool adapts);
void draft_clear(struct drafter *sp);
/* Whether the block follows a step that is about to start. Where steps run ahead of the host (backend.h) it does
 * not while more sequences run than may draft, or while drafts do not pay: the next step is begun before the
 * tokens of this one are known, and its sequences draft no more. */
bool draft_follows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                   int n);
/* After a step (items, n) that the block follows, and whose tokens were appended: its rows go through the block, and sequence i gets up to
 * wants[i] drafts. seqs[i] NULL: left since. */
bool draft_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err);
/* Whether n sequences should draft: as long as they pay. Every SPEC_PERIOD decisions both ways are tried
 * again, for SPEC_TRY and SPEC_REST steps. */
bool draft_pays(struct drafter *sp, int n);
/* A step (items, n) that only decodes took so long, and so many drafts were right. */
void draft_learn(struct drafter *sp, const struct step_item *items, int n, int n_right, int64_t ns);
/* What the sequence's drafts in the cache turned out to be is settled: open ones go. */
void draft_settle(struct drafter *sp, struct seq *q);

#endif
