/* Hidden units of mlps whose products run apart (apart.cu). */
#ifndef STEEL_BACKEND_CUDA_APART_CUH
#define STEEL_BACKEND_CUDA_APART_CUH

#include "backend/cuda/core/cuda.h"

/* Activations of layer.h: those of struct gating, and those that fused kernels lack. */
enum apart_act { APART_GATING, APART_RELU2, APART_XIELU, APART_SILU_LIMIT };

struct apart_units {
    enum apart_act kind;
    struct gating act; /* GATING; `ungated` of all kinds */
    float alpha, limit, beta;
    float *raw; /* (n, 2 width) gate and up, ungated (n, width); overwritten if hidden is NULL */
    int width;
    /* A position's gate and up are multiplied by weight[pairs[.]]; a negative pair is no row. NULL = 1, = row. */
    const float *weight;
    const int32_t *pairs;
    bool sparse; /* Gaussian top-k of the gate: struct ffn */
    float sparsity;
    struct gain mid; /* norm of the units */
    float *hidden;   /* (n, width), or NULL: in raw's rows */
    uint16_t *fp16;  /* (n, padded) in the order of fragment_slot, with scale (n), or NULL */
    float *scale;
    int padded;
};
void apart_units(struct cuda_backend *cu, const struct apart_units &p, int n);
/* n weights that are not 0 become 1. */
void apart_ones(struct cuda_backend *cu, float *weight, int n);

#endif
