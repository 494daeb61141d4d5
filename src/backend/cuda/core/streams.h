/*
 * Streams of several parts (layer.h): hyper-connections (hyper.cu), AltUp and low-rank residuals (streams.cu). Blocks see
 * an ordinary stream, struct resid. The parts are in buffers beside it.
 */
#ifndef STEEL_BACKEND_CUDA_STREAMS_H
#define STEEL_BACKEND_CUDA_STREAMS_H

#include "backend/cuda/core/host.h"

/* Index 0: rows of the step; 1: its output rows. A plane is one part of all rows. */
struct stream_parts {
    float *parts[2]; /* (N, rows, n_embd) s_j; AltUp: x_j, and p_0 between mixer and mlp */
    int rows[2];     /* of a plane */
    /* Hyper-connections */
    float *mixes[2]; /* (rows, N*(N+2)) pre, post and M of the block that runs */
    float *sums;     /* of slices of a row */
    int32_t *count;  /* slices that are done; zero between launches */
    /* Low-rank residuals */
    bool has_laurel;
    float *low;       /* (max_tokens, rank) */
    float *laurel[2]; /* (rows, n_embd) n + norm((n Wl^T) Wr^T) */
};

bool streams_supported(const struct cuda_backend *cu, const struct network *net, struct error *err);
bool streams_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void streams_close(struct cuda_backend *cu);

/* The parts follow from embed's result. */
void streams_begin(struct cuda_backend *cu);
/* The parts of the output rows, when the stream becomes those. */
void streams_narrow(struct cuda_backend *cu, const struct step *s);
/* What the head reads. */
void streams_end(struct cuda_backend *cu);

/* Before a layer's mixer (0) or mlp (1): the result of the block before goes to all parts, and the stream becomes what the
 * block reads. Nothing without hyper-connections. */
void hyper_read(struct cuda_backend *cu, const struct hyper *h);
size_t hyper_sums(const struct network *net, int rows); /* floats */

/* AltUp: before the mixer, after the mlp. */
void streams_predict(struct cuda_backend *cu, const struct altup *a);
void streams_correct(struct cuda_backend *cu, const struct altup *a);
/* y = scale * x; parts other than 0 += y. */
struct rows streams_scaled(struct cuda_backend *cu, const struct altup *a);
void streams_add(struct cuda_backend *cu, const float *y);

/* Computes the low-rank residual of what the mixer reads. resid_epilogue.after then adds it. */
void streams_laurel(struct cuda_backend *cu, const struct norm *in, const struct laurel *l);
const float *streams_laurel_rows(const struct cuda_backend *cu);

#endif
