/* The roofline of a benchmark: what each stage of a step took, read and computed. */
#ifndef STEEL_CLI_BENCH_STAGES_H
#define STEEL_CLI_BENCH_STAGES_H

#include "engine/runtime.h"

#include <stdio.h>

/* A step as the stages see it. */
struct bench_step {
    int rows, outs; /* rows, and those of them that need logits */
    double seen;    /* keys a row sees, on average */
    double kv_rows; /* keys and values read: once by every sequence's rows together */
};

/* As a JSON object: {"qkv": {"us": .., "bytes": .., "ops": ..}, ..}, a step, for stages that ran
 * between the two profiles in `phase`. Bytes: weights (experts: those expected to be hit) and KV. */
void bench_stages_json(const struct model *m, size_t kv_token_bytes, const struct bench_step *s,
                       const struct profile *before, const struct profile *after, int phase,
                       FILE *out);

#endif
