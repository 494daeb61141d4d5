/* A runtime on its way: what runtime.c and workers.c share. Nobody else includes this. */
#ifndef STEEL_ENGINE_RUNTIME_INT_H
#define STEEL_ENGINE_RUNTIME_INT_H

#include "engine/sizing.h"

/* What was decided before loading. On a GPU limits and cache are decided after it. */
struct opening {
    const struct runtime_options *opt;
    struct backend_options device; /* never "auto" */
    struct step_limits limits;
    struct cache_size cache;
};

/* Loads the model and makes its cache and stepper, on the device that is open (rt->be). */
bool runtime_build(struct runtime *rt, const struct opening *o, struct error *err);

#endif
