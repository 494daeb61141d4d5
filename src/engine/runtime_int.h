/* Shared by runtime.c and workers.c only: a runtime that is being opened. */
#ifndef STEEL_ENGINE_RUNTIME_INT_H
#define STEEL_ENGINE_RUNTIME_INT_H

#include "engine/offload.h"
#include "engine/sizing.h"

/* Decisions made before loading. On a GPU limits and cache are decided after loading. */
struct opening {
    const struct runtime_options *opt;
    struct backend_options device; /* never "auto" */
    struct step_limits limits;
    struct cache_size cache;
    struct cache_room room;
    struct fit_weights weights;
    bool measured;          /* weights is known */
    size_t step;            /* bytes of working memory */
    size_t more_bytes;      /* weights beside the model's own: adapters and the image tower */
    size_t small_bytes;     /* of the draft model, on this device */
    int trained;            /* the model's own context */
    struct offload offload; /* n_host NULL: all experts are on the device */
    size_t copy_bytes;      /* of the device, for copies of experts */
};

/* Loads the model and makes its cache and stepper, on the device that is open (rt->be). */
bool runtime_build(struct runtime *rt, const struct opening *o, struct error *err);

#endif
