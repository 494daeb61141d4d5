/* Random weights of every format for the GPU tests and benchmarks: well-formed blocks with scales
 * that give values of about 0.02, in host memory that random_weight_free gives back. */
#ifndef STEEL_TESTS_RANDOM_WEIGHT_H
#define STEEL_TESTS_RANDOM_WEIGHT_H

#include "backend/rawweight.h"

#include <stdint.h>

uint64_t random_u64(uint64_t *state);
float random_float(uint64_t *state); /* about N(0,1) */

struct random_weight {
    struct raw_weight raw;
    void *blocks[64];
    int n_blocks;
};

struct random_spec {
    int n_in, n_expert, n_seg;
    int rows[3];
    enum dtype type[3];
    bool bias, act_order;
    int group_len;    /* GPTQ */
    int same_experts; /* 1: all experts share their bytes (benchmarks) */
    int alike;        /* rows repeat after so many of them; 0: they do not */
    int bad;          /* expert bad - 1 is all ones: NaNs in most formats; 0: none is */
    int n_host;       /* experts that a device leaves in host memory */
    int low;          /* the bias of row low - 1 is -1e4: a router never chooses it; 0: none is */
    float nudge;      /* F32: each repeat is larger than the one before by so much of itself */
};

void random_weight_make(struct random_weight *w, const struct random_spec *s, uint64_t *state);
void random_weight_free(struct random_weight *w);

#endif
