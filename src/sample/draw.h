/* Draws a token from a row of logits by temperature, top-k, top-p and min-p. Knows no penalties, masks or stages. */
#ifndef STEEL_SAMPLE_DRAW_H
#define STEEL_SAMPLE_DRAW_H

#include "sample/sampler.h"
#include "sample/scan.h"

struct draw {
    const struct sample_params *p;
    const float *logits;     /* (n_vocab) */
    const struct scan *scan; /* of the logits */
    float max;               /* the largest, finite */
    float u;                 /* the random number */
    struct candidate *cand;  /* (n_vocab) scratch */
};

/* -1: there are no candidates. */
int32_t draw_token(const struct draw *d);

#endif
