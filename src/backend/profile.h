/* Time per stage of a step, separately for steps with prompts and for steps that only decode. */
#ifndef STEEL_BACKEND_PROFILE_H
#define STEEL_BACKEND_PROFILE_H

#include <stdint.h>
#include <stdio.h>

enum stage {
    STAGE_EMBED,
    STAGE_NORM,
    STAGE_QKV,
    STAGE_ATTENTION,
    STAGE_OUTPUT,
    STAGE_ROUTER,
    STAGE_EXPERTS,
    STAGE_FFN,
    STAGE_HEAD,
    STAGE_SAMPLING,
    STAGE_COMM, /* sums with other processes */
    STAGE_OTHER,
    N_STAGES
};

struct profile {
    int phase; /* 0 = prefill (or mixed), 1 = decode: set by begin() */
    double ns[2][N_STAGES];
    int64_t steps[2], tokens[2];
};

const char *stage_name(enum stage s);
void profile_print(const struct profile *p, FILE *out);

#endif
