/*
 * What ops do where several processes compute a layer together (backend/comm.h): add up what each
 * member has of a block's output, and gather the vocabulary. A process that is alone has none of
 * it: struct cuda_comm is empty, and nothing here enqueues anything.
 *
 * There are two ways. With NCCL, where it is found and every process has a GPU of its own, sums are
 * part of the stream and of recorded steps. Otherwise rows go to pinned memory, the host waits for
 * them, MPI adds them up in the order of members, and they come back; such steps are not recorded.
 */
#ifndef STEEL_BACKEND_CUDA_COMM_H
#define STEEL_BACKEND_CUDA_COMM_H

#include "backend/cuda/core/cuda.h"

struct head;
struct nccl;

struct cuda_comm {
    struct nccl *nccl;    /* NULL: MPI */
    bool given_up;        /* NCCL was aborted with a step in flight: there are no more sums */
    bool always;          /* a process alone sums nevertheless (STEEL_NCCL=1): for tests */
    float *host, *mapped; /* MPI: pinned (room), and as the device sees it */
    size_t room;
    float *sum;  /* NCCL: (max_tokens, n_embd) */
    float *part; /* NCCL: (max_out, own rows of the head) */
};

/* Finds the way, after scratch is allocated and before the first step. All processes call it; ok:
 * whether this one has succeeded so far. */
bool comm_prepare(struct cuda_backend *cu, bool ok, struct error *err);
void comm_close(struct cuda_backend *cu);
/* Steps may be recorded. */
bool comm_record(const struct cuda_backend *cu);
/* Waits for a step. Ends with an error where another process has ended. */
void comm_wait(struct cuda_backend *cu, cudaEvent_t done);

/* Whether this process has failed. It then takes part in no more operations, because what it would
 * add was not computed. The others wait until they learn that it has ended. */
bool comm_has_failed(struct cuda_backend *cu);

/* Rows (n, n_embd), in place: added up over the members. */
void comm_sum(struct cuda_backend *cu, float *rows, int n);
/* For a part of which each member computes a partial sum (`partial`): the pending output becomes
 * rows, summed over the members. comm_sums: whether that happens. */
bool comm_sums(const struct cuda_backend *cu, bool partial);
void comm_sum_stream(struct cuda_backend *cu, bool partial);
/* Sums the rows of a dense mlp beside experts. If both are partial and no norm is between, it adds
 * them to the pending output first, so that one sum serves both. */
void comm_sum_beside(struct cuda_backend *cu, struct resid_epilogue *epilogue, bool partial,
                     bool experts_partial);
/* The output buffer of the head's product. comm_collect then gathers the whole vocabulary on member
 * 0, in cu->act.logits. */
float *comm_head_to(struct cuda_backend *cu, const struct head *h);
void comm_collect(struct cuda_backend *cu, const struct head *h, int rows);

/* residual.cu: turns the pending output, if any, into rows. */
void resid_add_rows(struct cuda_backend *cu, struct resid *r);

#endif
