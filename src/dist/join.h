/*
 * How the ranks of a job join to run one model: what a process knows of the others before they have joined, and what all
 * must have in common. A rank that differs is named in an error on all of them.
 */
#ifndef STEEL_DIST_JOIN_H
#define STEEL_DIST_JOIN_H

#include "backend/options.h"
#include "dist/ranks.h"
#include "model/model.h"

/* Before joining. All 1 where this process is alone, or its ranks already run a model. */
struct join_outlook {
    int processes; /* that share the model */
    int stages;    /* of a pipeline */
    int on_gpu;    /* that share this one's GPU, probably */
};
/* device: as the user gave it. n_gpus: of this machine. */
struct join_outlook join_outlook(const char *device, int n_gpus);
/* The name of a GPU's device for this process: without a number, the ranks of a machine take its GPUs in turn. The result
 * is device or name (size). */
const char *join_gpu(const char *device, int n_gpus, char *name, size_t size);

/* How ranks are arranged. */
struct join_shape {
    int tp, pp; /* tp 0: all that pp leaves */
    bool ep;
};

/* On all ranks, once the device is open: they agree on program, arguments, file and kernels, and be->comm is set. */
bool join_ranks(struct ranks *r, struct join_shape shape, struct backend *be,
                const struct tensorfile *f, struct error *err);
/* On the others: opens the device that rank 0 has. A job is not run by CPUs and GPUs together. */
struct backend *join_open(const struct backend_options *opt, struct error *err);

#endif
