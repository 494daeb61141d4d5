/* Passes over all logits of a row. */
#ifndef STEEL_SAMPLE_SCAN_H
#define STEEL_SAMPLE_SCAN_H

#include "sample/candidates.h"

#include <stdint.h>

struct token_prob;

/* Per-block maxima, so that a search for the largest logits can skip most blocks. */
enum { SCAN_BLOCKS = 2048 };
struct scan {
    float max_of[SCAN_BLOCKS]; /* (n_blocks) maximum of each block, NaN ignored */
    int n_blocks, step, n;
    float max;
};

static inline int scan_end(const struct scan *sc, int block)
{
    int end = (block + 1) * sc->step;
    return end < sc->n ? end : sc->n;
}

void scan_logits(struct scan *sc, const float *logits, int n);
/* Index of the first maximum. NaN is skipped, except at index 0. */
int32_t scan_first(const struct scan *sc, const float *logits);
/* The number of logits that are `floor` or more. */
int scan_count(const struct scan *sc, const float *logits, float floor);
/* Collects the candidates with logits lo .. hi, in the order of their ids; returns their number. out has room for all. */
int scan_collect(const struct scan *sc, const float *logits, float lo, float hi,
                 struct candidate *out);
/* Log-probability of `token`, and the n best tokens in `top`. */
float scan_logprobs(const struct scan *sc, const float *logits, int32_t token,
                    struct token_prob *top, int n);

#endif
