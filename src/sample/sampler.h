/*
 * Logits to a token. A sampler belongs to one sequence: its parameters, the tokens it has seen (for
 * penalties) and a counter. Randomness is a pure function of (seed, counter), so the same seed gives
 * the same text whatever the threads, the batch or the backend.
 * Order: constraint, logit bias, penalties, then greedy (temp <= 0) or: top-k, temperature, top-p, min-p, draw.
 */
#ifndef STEEL_SAMPLE_SAMPLER_H
#define STEEL_SAMPLE_SAMPLER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

struct logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
};

struct sample_params {
    float temp;           /* <= 0: greedy */
    int top_k;            /* 0 = off */
    float top_p;          /* 1 = off */
    float min_p;          /* 0 = off */
    float repeat_penalty; /* 1 = off; divides positive, multiplies negative logits of seen tokens */
    float presence_penalty, frequency_penalty; /* 0 = off; on generated tokens only */
    int repeat_last_n; /* tokens the repeat penalty looks back on; -1 = all */
    uint64_t seed;
    const struct logit_bias *bias; /* (n_bias), copied by sampler_new */
    int n_bias;
};

struct sample_params sample_params_default(void);

struct sampler;
struct sampler *sampler_new(const struct sample_params *p, int n_vocab);
void sampler_free(struct sampler *s);
const struct sample_params *sampler_params(const struct sampler *s);
/* Drops all but the first n_bias entries of the logit bias. */
void sampler_keep_bias(struct sampler *s, int n_bias);
/* What the text must fit (text/grammar.h has such): a mask of what may come next, one bit a token, and
 * the taking of a token. False: it cannot go on; err may say why. */
struct sample_constraint {
    bool (*mask)(void *state, uint32_t *bits, struct error *err);
    bool (*accept)(void *state, int32_t token, struct error *err);
    void (*free)(void *state);
    void *state;  /* owned from sampler_constrain on */
    int n_tokens; /* that the mask has bits for */
};
/* From now on only tokens that fit may be chosen. The mask of the next choice is made here and whenever
 * a generated token is accepted, never inside a step. */
void sampler_constrain(struct sampler *s, const struct sample_constraint *c);
/* False, with the reason: the constraint went over a limit, or nothing that fits could be chosen. */
bool sampler_ok(const struct sampler *s, struct error *err);
/* Records tokens that went by: prompt tokens (generated = false) and chosen ones (true). */
void sampler_accept(struct sampler *s, int32_t token, bool generated);
/* Picks a token from logits (n_vocab), which it may change. Does not accept it. */
int32_t sampler_pick(struct sampler *s, float *logits);
/* What bias and penalties do to the logits, as a list, for samplers on a device: l += bias; l = l > 0
 * ? l / repeat : l * repeat; l -= less. Every token at most once. Returns how many, -1 if more than
 * max or not to be said so: a constraint, which only sampler_pick knows. */
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
