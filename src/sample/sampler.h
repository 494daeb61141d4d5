/*
 * Logits to a token. A sampler belongs to one sequence: its parameters, the tokens it has seen (for
 * penalties), its constraint and a counter. Randomness is a pure function of (seed, counter), so the
 * same seed gives the same text whatever the threads, the batch or the backend.
 * Order: log-probabilities of the raw logits, constraint, logit bias, penalties, then greedy
 * (temp <= 0) or: top-k, temperature, top-p, min-p, draw.
 *
 * A backend that chooses on a device reads a sampler through sampler_edits, sampler_mask and its
 * parameters, and has an answer for every field of SAMPLE_FIELDS: does the device know it? Rows that
 * use one it does not know (sampler_uses) go through sampler_pick.
 */
#ifndef STEEL_SAMPLE_SAMPLER_H
#define STEEL_SAMPLE_SAMPLER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

enum { SAMPLE_MAX_TOP = 20 }; /* alternatives whose log-probabilities can be asked for */

struct logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
};

/* Every parameter there is: struct sample_params is made of this list, and so is the enum by which
 * backends answer. A new one does not compile before all of them have an answer. */
#define SAMPLE_FIELDS(FIELD)                                                                       \
    FIELD(TEMP, float, temp)   /* <= 0: greedy */                                                  \
    FIELD(TOP_K, int, top_k)   /* 0 = off */                                                       \
    FIELD(TOP_P, float, top_p) /* 1 = off */                                                       \
    FIELD(MIN_P, float, min_p) /* 0 = off */                                                       \
    /* 1 = off; divides positive, multiplies negative logits of seen tokens */                     \
    FIELD(REPEAT_PENALTY, float, repeat_penalty)                                                   \
    /* 0 = off; on generated tokens only */                                                        \
    FIELD(PRESENCE_PENALTY, float, presence_penalty)                                               \
    FIELD(FREQUENCY_PENALTY, float, frequency_penalty)                                             \
    FIELD(REPEAT_LAST_N, int, repeat_last_n) /* that the repeat penalty looks back on; -1 = all */ \
    FIELD(SEED, uint64_t, seed)                                                                    \
    FIELD(BIAS, const struct logit_bias *, bias) /* (n_bias), copied by sampler_new */             \
    FIELD(N_BIAS, int, n_bias)                                                                     \
    FIELD(LOGPROBS, bool, logprobs) /* the token's log-probability is wanted */                    \
    FIELD(N_TOP, int, n_top)        /* ... and that of so many best; up to SAMPLE_MAX_TOP */

struct sample_params {
#define SAMPLE_FIELD(upper, type, name) type name;
    SAMPLE_FIELDS(SAMPLE_FIELD)
#undef SAMPLE_FIELD
};

enum sample_field {
#define SAMPLE_FIELD(upper, type, name) SAMPLE_##upper,
    SAMPLE_FIELDS(SAMPLE_FIELD)
#undef SAMPLE_FIELD
        SAMPLE_CONSTRAINT, /* sampler_constrain */
    N_SAMPLE_FIELDS
};

struct sample_params sample_params_default(void);

struct sampler;
struct sampler *sampler_new(const struct sample_params *p, int n_vocab);
void sampler_free(struct sampler *s);
const struct sample_params *sampler_params(const struct sampler *s);
/* Drops all but the first n_bias entries of the logit bias. */
void sampler_keep_bias(struct sampler *s, int n_bias);
/* Bit f: what the field says has an effect on this sampler's choices or on what is told of them. */
uint32_t sampler_uses(const struct sampler *s);

/* What the text must fit (text/grammar/grammar.h has such): a mask of what may come next, one bit a token, and
 * the taking of a token. False: it cannot go on; err may say why. */
struct sample_constraint {
    bool (*mask)(void *state, uint32_t *bits, struct error *err);
    bool (*accept)(void *state, int32_t token, struct error *err);
    void (*unhurry)(
        void *state); /* masks from now on have all that fits, not what ends soonest; or NULL */
    void (*free)(void *state);
    void *state;  /* owned from sampler_constrain on */
    int n_tokens; /* that the mask has bits for */
};
/* From now on only tokens that fit may be chosen. */
void sampler_constrain(struct sampler *s, const struct sample_constraint *c);
bool sampler_is_constrained(const struct sampler *s);
/* Makes the mask of the next choice, if it is not there. Takes a while and may allocate: so not
 * inside a step, and beside others on any thread. */
void sampler_prepare(struct sampler *s);
/* Bit i: token i may be chosen next: it fits, and no bias bans it. After sampler_prepare. NULL = any may:
 * there is no constraint, or it allows all of them here (free text). */
const uint32_t *sampler_mask(const struct sampler *s);
/* The token that the next choice must be, whatever the logits, or -1: it can be accepted unchosen.
 * After sampler_prepare. Never where log-probabilities are wanted, which need the logits. */
int32_t sampler_forced(const struct sampler *s);
/* False, with the reason: the constraint went over a limit, or nothing that fits could be chosen. What
 * was asked for did it. */
bool sampler_ok(const struct sampler *s, struct error *err);
/* Records tokens that went by: prompt tokens (generated = false) and chosen ones (true). */
void sampler_accept(struct sampler *s, int32_t token, bool generated);
/* Log-probabilities of a choice, by the raw logits: the token's, and the best tokens', best first. */
struct token_prob {
    int32_t token;
    float logprob;
};
/* Log-probability of `token` under logits (n_vocab), and the n best tokens. */
float sample_logprobs(const float *logits, int n_vocab, int32_t token, struct token_prob *top,
                      int n);
struct sample_probs {
    float logprob;
    int n_top;
    struct token_prob top[SAMPLE_MAX_TOP];
};
/* Picks a token from logits (n_vocab), which it may change. Does not accept it. probs: written where
 * they are wanted; may be NULL where they are not. */
int32_t sampler_pick(struct sampler *s, float *logits, struct sample_probs *probs);
/* The same of a token that is expected already: draw is what sampler_counter was before. */
int32_t sampler_pick_late(struct sampler *s, uint64_t draw, float *logits,
                          struct sample_probs *probs);
/* What bias and penalties do to the logits, as a list, for samplers on a device: l += bias; l = l > 0
 * ? l / repeat : l * repeat; l -= less. Every token at most once. Returns how many, -1 if more than
 * max. */
struct logit_edit {
    int32_t token;
    float bias, repeat, less;
};
int sampler_edits(const struct sampler *s, struct logit_edit *out, int max);
/* Uniform in [0,1) for draw number `counter` of `seed`. Shared with the device samplers. */
float sampler_uniform(uint64_t seed, uint64_t counter);
uint64_t sampler_counter(const struct sampler *s); /* draws so far = tokens generated */
/* A token was chosen that will be accepted later: the next draw is the one after it. */
void sampler_expect(struct sampler *s);
/* Whether its choices depend on the tokens before: nothing can be chosen ahead then. */
bool sampler_has_memory(const struct sampler *s);

#endif
