/*
 * Joins the ranks of a job to run one model: what a process knows of the others before joining, and the checks that
 * all ranks agree. A rank that differs is named in an error on all ranks.
 */
#ifndef STEEL_DIST_JOIN_H
#define STEEL_DIST_JOIN_H

#include "backend/options.h"
#include "dist/ranks.h"
#include "model/model.h"

/* Known before joining. All 1 if this process is alone, or if its ranks already run a model. */
struct join_outlook {
    int processes; /* sharing the model */
    int stages;    /* of the pipeline */
    int on_gpu;    /* processes that probably share this one's GPU */
};
/* device: as the user gave it. n_gpus: on this machine. */
struct join_outlook join_outlook(const char *device, int n_gpus);
/* The name of a GPU's device for this process: without a number, the ranks of a machine take its GPUs in turn. The result
 * is device or name (size). */
const char *join_gpu(const char *device, int n_gpus, char *name, size_t size);

/* How ranks are arranged. */
struct join_shape {
    int tp, pp; /* tp 0 = size / pp */
    bool ep;
};

/* On all ranks, once the device is open: checks that program, arguments, file and kernels agree, and sets be->comm. */
bool join_ranks(struct ranks *r, struct join_shape shape, struct backend *be,
                const struct tensorfile *f, struct error *err);
/* On the other ranks: opens the kind of device that rank 0 has. A job never mixes CPUs and GPUs. */
struct backend *join_open(const struct backend_options *opt, struct error *err);

#endif
