/* Tokens that may be picked, with their logits, and their order. */
#ifndef STEEL_SAMPLE_CANDIDATES_H
#define STEEL_SAMPLE_CANDIDATES_H

#include <stdint.h>

struct candidate {
    float logit;
    int32_t id;
};

/* For qsort: larger logit first; equal logits by lower id, for a total order. */
int candidates_compare(const void *a, const void *b);
/* Moves the first k of n candidates to the front, sorted. Expected linear time. */
void candidates_select(struct candidate *c, int n, int k);

#endif
