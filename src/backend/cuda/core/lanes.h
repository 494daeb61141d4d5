/*
 * What several ranks (base/ranks.h) that run one network have to do with each other in a step, for the
 * ops: adding up what each lane has of a block, collecting the vocabulary.
 * A process that is alone has none of it: struct lanes is empty, and nothing here enqueues anything.
 *
 * Two ways. NCCL, where it is found and every rank has a GPU of its own: sums are part of the stream,
 * and of recorded steps. Else MPI: rows go to pinned memory, the host waits for them, MPI adds them up
 * in the order of lanes, and they come back; such steps are not recorded.
 */
#ifndef STEEL_BACKEND_CUDA_LANES_H
#define STEEL_BACKEND_CUDA_LANES_H

#include "backend/cuda/core/cuda.h"

struct head;
struct nccl;

struct lanes {
    struct nccl *nccl;    /* NULL: MPI */
    bool given_up;        /* NCCL was ended with a step under way: there are no sums any more */
    bool always;          /* a process that is alone sums all the same (STEEL_NCCL=1): for tests */
    float *host, *mapped; /* MPI: pinned (room), and as the device sees it */
    size_t room;
    float *sum;  /* NCCL: (max_tokens, n_embd) */
    float *part; /* NCCL: (max_out, own rows of the head) */
};

/* Whether and how others are there: after scratch, before the first step. All ranks call it; ok: what
 * is known to have gone well here. */
bool lanes_prepare(struct cuda_backend *cu, bool ok, struct error *err);
void lanes_close(struct cuda_backend *cu);
/* Steps may be recorded. */
bool lanes_record(const struct cuda_backend *cu);
/* Waits for a step; ends where another rank has. */
void lanes_wait(struct cuda_backend *cu, cudaEvent_t done);

/* Rows (n, n_embd), in place: added up over the lanes. */
void lanes_sum(struct cuda_backend *cu, float *rows, int n);
/* What the stream is to add: becomes rows, added up, where `partial` says that each lane has a part.
 * lanes_sums: whether that is so. */
bool lanes_sums(const struct cuda_backend *cu, bool partial);
void lanes_sum_stream(struct cuda_backend *cu, bool partial);
/* A dense part beside experts, added up; or, where both are partial and no norm stands between, added to
 * what the stream is to add, so that one sum does for both. */
void lanes_sum_beside(struct cuda_backend *cu, struct resid_epilogue *close, bool partial,
                      bool experts_partial);
/* Where the head's product goes; then lane 0 gets all of the vocabulary in cu->logits_all. */
float *lanes_head_to(struct cuda_backend *cu, const struct head *h);
void lanes_collect(struct cuda_backend *cu, const struct head *h, int rows);

/* residual.cu: what is to be added as rows, if it is anything. */
void resid_add_rows(struct cuda_backend *cu, struct resid *r);

#endif
