/*
 * Logits to a token. A sampler belongs to one sequence. It holds the parameters, the counts of
 * tokens seen (for penalties), an optional constraint and a counter. Randomness is a pure function
 * of (seed, counter): the same seed gives the same text for any number of threads, batch or
 * backend.
 *
 * Order: log-probabilities of the raw logits, constraint, logit bias, penalties. Then the argmax if
 * temp <= 0, else top-k, temperature, top-p, min-p and a draw. Samplers with further stages, or an
 * order of their own, choose by sample_chain.h.
 *
 * A backend that samples on a device reads a sampler through sampler_edits, sampler_mask and its
 * parameters. For every field of SAMPLE_FIELDS it declares whether the device supports it. Rows
 * that use an unsupported field (sampler_uses) go through sampler_pick.
 */
#ifndef STEEL_SAMPLE_SAMPLER_H
#define STEEL_SAMPLE_SAMPLER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

enum { SAMPLE_MAX_TOP = 20 }; /* maximum number of alternatives with log-probabilities */
enum { SAMPLE_DRY_WINDOW = 1 << 16 };
enum { FORESEE_MOST = 32 }; /* tokens of sampler_foresee */

struct logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
};

/* Every sampling parameter. The list generates struct sample_params and the enum in which backends
 * declare their support. A new field does not compile until every backend declares it. */
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
    FIELD(REPEAT_LAST_N, int, repeat_last_n) /* window of the repeat penalty; -1 = all */          \
    FIELD(SEED, uint64_t, seed)                                                                    \
    FIELD(BIAS, const struct logit_bias *, bias) /* (n_bias), copied by sampler_new */             \
    FIELD(N_BIAS, int, n_bias)                                                                     \
    /* The stages of sample_chain.h. */                                                            \
    FIELD(TYPICAL_P, float, typical_p)             /* outside (0, 1): off */                       \
    FIELD(TOP_N_SIGMA, float, top_n_sigma)         /* <= 0: off */                                 \
    FIELD(XTC_PROBABILITY, float, xtc_probability) /* 0 = off */                                   \
    FIELD(XTC_THRESHOLD, float, xtc_threshold)                                                     \
    FIELD(DYNATEMP_RANGE, float, dynatemp_range) /* 0 = off */                                     \
    FIELD(DYNATEMP_EXPONENT, float, dynatemp_exponent)                                             \
    FIELD(MIROSTAT, int, mirostat) /* 0 = off, 1, 2; replaces the truncating stages */             \
    FIELD(MIROSTAT_TAU, float, mirostat_tau)                                                       \
    FIELD(MIROSTAT_ETA, float, mirostat_eta)                                                       \
    FIELD(DRY_MULTIPLIER, float, dry_multiplier) /* 0 = off */                                     \
    FIELD(DRY_BASE, float, dry_base)                                                               \
    FIELD(DRY_ALLOWED_LENGTH, int, dry_allowed_length)                                             \
    FIELD(DRY_LAST_N, int, dry_last_n) /* window in tokens; < 0: SAMPLE_DRY_WINDOW */              \
    FIELD(DRY_BREAKERS, const int32_t *, dry_breakers) /* (n_dry_breakers), copied */              \
    FIELD(N_DRY_BREAKERS, int, n_dry_breakers)                                                     \
    FIELD(ORDER, uint64_t,                                                                         \
          order) /* stages, four bits each, the first in the lowest; 0 = default */                \
    FIELD(LOGPROBS, bool, logprobs) /* report the token's log-probability */                       \
    FIELD(N_TOP, int, n_top)        /* ... and those of the best n_top, up to SAMPLE_MAX_TOP */

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

/* Stages in their default order. A list of sample_params.order has each at most once; stages that
 * are not in it are off. */
enum sample_stage {
    STAGE_PENALTIES = 1,
    STAGE_DRY,
    STAGE_TOP_N_SIGMA,
    STAGE_TOP_K,
    STAGE_TEMPERATURE,
    STAGE_TYPICAL,
    STAGE_TOP_P,
    STAGE_MIN_P,
    STAGE_XTC,
    N_STAGES_END
};
/* The stage with a name of llama.cpp ("top_k") or a letter of its short form; 0 = unknown. */
int sample_stage_named(const char *name);
int sample_stage_letter(char letter);
/* Appends a stage to an order of n stages. False if the order has it already. */
bool sample_order_add(uint64_t *order, int n, int stage);
/* An order from names ("top_k;temperature", also separated by commas) or letters ("kt"). */
bool sample_order_parse(const char *text, uint64_t *order, struct error *err);

struct sampler;
struct sampler *sampler_new(const struct sample_params *p, int n_vocab);
void sampler_free(struct sampler *s);
const struct sample_params *sampler_params(const struct sampler *s);
/* Drops all entries of the logit bias after the first n_bias. */
void sampler_keep_bias(struct sampler *s, int n_bias);
/* Bit f is set if field f affects this sampler's choices or reported log-probabilities. */
uint32_t sampler_uses(const struct sampler *s);

/* A constraint on the text, such as a grammar (text/grammar/grammar.h): computes the mask of
 * allowed tokens, one bit per token, and consumes tokens. false means that the constraint failed;
 * err may say why. */
struct sample_constraint {
    bool (*mask)(void *state, uint32_t *bits, struct error *err);
    bool (*accept)(void *state, int32_t token, struct error *err);
    /* From now on masks contain every fitting token, not only the shortest completion; or NULL. */
    void (*relax)(void *state);
    void (*free)(void *state);
    void *state;  /* owned by the sampler after sampler_constrain */
    int n_tokens; /* number of bits in the mask */
    /* go_on is called now and then by mask and accept, and may wait. If it returns false, they return false
     * with err empty, and may be called again. NULL ends that. `pace` may be NULL: they cannot be given up. */
    void (*pace)(void *state, bool (*go_on)(void *arg), void *arg);
    /* Whether every token is allowed from now on; the constraint is then dropped. NULL = never.
     * Called after mask. */
    bool (*done)(void *state);
    /* Cuts tokens (n) to those that fit one after the other, appends the ones determined by them, up to `most` in all, and
     * returns their number. It changes nothing, and may stop early. NULL = unknown. */
    int (*foresee)(void *state, int32_t *tokens, int n, int most);
};
/* From now on only tokens that satisfy the constraint may be picked. */
void sampler_constrain(struct sampler *s, const struct sample_constraint *c);
bool sampler_is_constrained(const struct sampler *s);
/* Computes the mask of the next choice unless it is up to date. May be slow and allocate, so call
 * it outside a step. Safe on any thread, in parallel with other samplers. */
void sampler_prepare(struct sampler *s);
/* The same with a go_on (sample_constraint.pace, or NULL). False: it was given up. The next call starts anew. */
bool sampler_prepare_paced(struct sampler *s, bool (*go_on)(void *arg), void *arg);
bool sampler_is_prepared(const struct sampler *s); /* the mask is up to date */
/* Bit i: token i may be picked next, that is, it fits the constraint and no bias bans it. Call
 * after sampler_prepare. NULL means that every token is allowed. */
const uint32_t *sampler_mask(const struct sampler *s);
/* The only token the next choice can be, whatever the logits, or -1. It can be accepted without
 * sampling. Call after sampler_prepare. Always -1 if log-probabilities are requested, since they
 * need the logits. */
int32_t sampler_forced(const struct sampler *s);
/* sample_constraint.foresee with at most `pieces` calls of go_on. *n_kept: those of the n that fit. Returns n without a
 * constraint, or if the mask is not prepared. */
int sampler_foresee(struct sampler *s, int32_t *tokens, int n, int most, int pieces, int *n_kept);
/* False, with the reason, if the constraint exceeded a limit or left no token to pick. The request
 * is at fault. */
bool sampler_ok(const struct sampler *s, struct error *err);
/* Records a token: of the prompt (generated = false) or picked (true). The constraint takes it in the next
 * sampler_prepare. */
void sampler_accept(struct sampler *s, int32_t token, bool generated);
/* Log-probability of a token under the raw logits. Lists are sorted, best first. */
struct token_prob {
    int32_t token;
    float logprob;
};
/* Returns the log-probability of `token` under logits (n_vocab) and fills the n best tokens. */
float sample_logprobs(const float *logits, int n_vocab, int32_t token, struct token_prob *top,
                      int n);
struct sample_probs {
    float logprob;
    int n_top;
    struct token_prob top[SAMPLE_MAX_TOP];
};
/* Picks a token from logits (n_vocab), which may be modified. Does not accept it. `probs` is filled
 * if log-probabilities are requested; otherwise it may be NULL. */
int32_t sampler_pick(struct sampler *s, float *logits, struct sample_probs *probs);
/* Like sampler_pick, for a token that sampler_expect has announced. `draw` is the counter before
 * that. */
int32_t sampler_pick_at(struct sampler *s, uint64_t draw, float *logits,
                        struct sample_probs *probs);
/* The effect of bias and penalties as a list, for samplers on a device: l += bias; l = l > 0 ? l /
 * repeat : l * repeat; l -= less. Each token occurs at most once. Returns the number of edits, or
 * -1 if there are more than max. */
struct logit_edit {
    int32_t token;
    float bias, repeat, less;
};
int sampler_edits(const struct sampler *s, struct logit_edit *out, int max);
/* Uniform in [0, 1) for draw number `counter` of `seed`. Device samplers use the same function. */
float sampler_uniform(uint64_t seed, uint64_t counter);
uint64_t sampler_counter(const struct sampler *s); /* number of draws so far = tokens generated */
/* The time of a draw on the host, a running mean; 0 = the host has drawn none. */
double sampler_draw_ns(const struct sampler *s);
/* Announces that a picked token will be accepted later. The next draw uses the following
 * counter. */
void sampler_expect(struct sampler *s);
/* Whether choices depend on earlier tokens. Then no token can be sampled ahead of time. */
bool sampler_has_memory(const struct sampler *s);

#endif
