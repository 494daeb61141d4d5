/*
 * NCCL, loaded at run time if present (libnccl.so.2): sums over the GPUs of several processes,
 * enqueued on a stream like a kernel, so that recorded steps contain them. The build does not need
 * NCCL.
 */
#ifndef STEEL_BACKEND_CUDA_NCCL_H
#define STEEL_BACKEND_CUDA_NCCL_H

#include "backend/cuda/core/cuda.h"

/* Made by the first member of a group and needed by all. */
struct nccl_id {
    char bytes[128];
};

struct nccl;
struct nccl *nccl_open(struct error *err); /* NULL: not available */
bool nccl_make_id(struct nccl *n, struct nccl_id *id, struct error *err);
/* Collective: waits until all members have called it. */
bool nccl_join(struct nccl *n, const struct nccl_id *id, int rank, int size, struct error *err);
/* out = the sum of all members' in, on every member; nccl_reduce: on rank 0 only. out may equal
 * in. */
bool nccl_sum(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
              struct error *err);
bool nccl_reduce(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
                 struct error *err);
/* False if NCCL has failed since, because another member has ended. */
bool nccl_ok(struct nccl *n, struct error *err);
/* abort: gives up operations in flight. n may be NULL. */
void nccl_close(struct nccl *n, bool abort);

#endif
