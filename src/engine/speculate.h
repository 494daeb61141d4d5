/*
 * Speculation: an MTP block (layer.h) guesses what comes behind a sequence's tokens, the next step reads the
 * guesses behind its last token, and they become tokens for as long as the sampler chooses the very same from
 * the rows before them. So every token is chosen as without guesses, by the same logits and the same random
 * number; a guess that was right has saved a step, one that was wrong has cost a row. Knows sequences and
 * steps; the engine chooses the tokens.
 *
 * Invariants:
 *  1. the last n_open tokens of a sequence's cache are guesses that no token has confirmed; between steps there
 *     are none (spec_settle), and none is ever indexed
 *  2. the block's own cache has a row for every position of the others': what it made of the hidden row there
 *     and of the token behind it. A page that is shared has the one of whoever computed it, which in its last
 *     row may have seen another token: guesses may be worse for it, tokens never are
 *  3. a recurrent state behind guesses that were wrong goes back to the one behind the last known token
 *     (kvcache_guess): guesses before the wrong one that were right are then read again, as tokens
 */
#ifndef STEEL_ENGINE_SPECULATE_H
#define STEEL_ENGINE_SPECULATE_H

#include "engine/scheduler.h"

struct spec {
    struct scheduler *sched;
    struct kvcache *kv;
    struct stepper *step;
    int most, max_seqs;       /* guesses of a sequence; while at most so many run */
    struct guess_item *items; /* (max_seqs of steps) */
    struct seq **seqs;        /* (the same) whose they are */
    int *wants;               /* (the same) guesses wanted */
    int32_t *guesses;         /* (the same, most) */
    /* For tests: writes what is guessed behind tokens (n_tokens), in the place of the block's guesses (n). */
    void (*guess)(void *arg, const int32_t *tokens, int n_tokens, int32_t *guesses, int n);
    void *guess_arg;
};

/* most 0: nothing is guessed, and nothing else is called. */
void spec_init(struct spec *sp, struct scheduler *sched, struct stepper *step, int most,
               int max_seqs);
void spec_clear(struct spec *sp);
/* After a step (items, n) whose tokens were appended: its rows go through the block, and sequence i gets up to
 * wants[i] guesses. seqs[i] NULL: left since. */
bool spec_guess(struct spec *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err);
/* What the sequence's guesses in the cache turned out to be is settled: open ones go. */
void spec_settle(struct spec *sp, struct seq *q);

#endif
