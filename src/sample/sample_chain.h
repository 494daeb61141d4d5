/*
 * The sampling stages that other programs know and no device kernel has: DRY, top-n-sigma, typical,
 * XTC, dynamic temperature, mirostat, and stages in an order of the caller's. A chain exists for
 * samplers that use one of them; the others never come here. It works on a list of candidates and
 * owns what its stages remember: the token history of DRY and mirostat's mu.
 */
#ifndef STEEL_SAMPLE_SAMPLE_CHAIN_H
#define STEEL_SAMPLE_SAMPLE_CHAIN_H

#include "sample/candidates.h"
#include "sample/sampler.h"

struct sample_chain;
/* NULL if p uses none of its stages. */
struct sample_chain *sample_chain_new(const struct sample_params *p, int n_vocab);
void sample_chain_free(struct sample_chain *c);
/* Whether choices depend on earlier tokens. */
bool sample_chain_has_memory(const struct sample_chain *c);
void sample_chain_accept(struct sample_chain *c, int32_t token, bool generated);

/* The logit of a token after the penalties of the sampler. */
typedef float sample_penalty(const struct sampler *s, int32_t token, float logit);
/* Picks one of n > 0 candidates, in the order of their ids; the list is modified. */
int32_t sample_chain_pick(struct sample_chain *c, struct candidate *list, int n, uint64_t draw,
                          const struct sampler *s, sample_penalty *penalty);

#endif
