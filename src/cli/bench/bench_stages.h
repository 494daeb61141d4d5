/* The roofline of a benchmark: time, bytes and operations of each stage of a step. */
#ifndef STEEL_CLI_BENCH_STAGES_H
#define STEEL_CLI_BENCH_STAGES_H

#include "engine/runtime.h"

#include <stdio.h>

/* The shape of a step. */
struct bench_step {
    int rows, outs; /* rows; rows that need logits */
    double seen;    /* average number of keys a row sees */
    double kv_rows; /* keys and values read, counted once per sequence */
};

/* Prints {"qkv": {"us": .., "bytes": .., "ops": ..}, ..}, per step, for the stages that ran
 * between the two profiles in `phase`. Bytes: weights (of experts, the expected number hit) and
 * KV cache. */
void bench_stages_json(const struct model *m, size_t kv_token_bytes, const struct bench_step *s,
                       const struct profile *before, const struct profile *after, int phase,
                       FILE *out);

#endif
