/*
 * NCCL, loaded where it is found (libnccl.so.2): sums over the GPUs of several processes, enqueued on a
 * stream like any kernel, so that a recorded step contains them. Nothing of it is needed to build.
 */
#ifndef STEEL_BACKEND_CUDA_NCCL_H
#define STEEL_BACKEND_CUDA_NCCL_H

#include "backend/cuda/core/cuda.h"

/* What the first of a group makes and all of it need. */
struct nccl_id {
    char bytes[128];
};

struct nccl;
struct nccl *nccl_open(struct error *err); /* NULL: it is not there */
bool nccl_make_id(struct nccl *n, struct nccl_id *id, struct error *err);
/* All of the group call it, and it waits for them. */
bool nccl_join(struct nccl *n, const struct nccl_id *id, int rank, int size, struct error *err);
/* out = the sum of everybody's in, everywhere; or, of nccl_reduce, at rank 0 alone. out may be in. */
bool nccl_sum(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
              struct error *err);
bool nccl_reduce(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
                 struct error *err);
/* Whether it has failed meanwhile: another of the group has ended. */
bool nccl_ok(struct nccl *n, struct error *err);
/* abort: what is under way is given up. n may be NULL. */
void nccl_close(struct nccl *n, bool abort);

#endif
