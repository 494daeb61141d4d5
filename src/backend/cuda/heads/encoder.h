/*
 * What encoders need in addition to decoders (encoder.cu, attn_encode.cu): LayerNorm, bidirectional
 * attention over the rows of a step, MLPs without a gate, and results without an LM head. Each
 * piece of scratch is allocated only if the network needs it.
 */
#ifndef STEEL_BACKEND_CUDA_ENCODER_H
#define STEEL_BACKEND_CUDA_ENCODER_H

#include "backend/cuda/attn/attn_layer.h"

struct encoder_scratch {
    /* (max_tokens, widest wqkv) fp16 scaled by HIDDEN_SCALE, for bidirectional layers */
    uint16_t *qkv;
    float *hidden; /* (max_tokens, n_ff) for MLPs without a gate */
    /* pinned host memory, (max_out, n_embd): the result of a network without an LM head, for two
     * steps in flight */
    float *rows[2];
};

/* Norm of the rows x (n, width). d is added first. */
struct encoder_norm {
    const float *x, *d; /* (n, width); d or NULL */
    float scale;        /* of d */
    struct gain gain;   /* LayerNorm or RMS */
    float *x_to;        /* (n, width) x + scale * d, or NULL; may be x */
    float *y;           /* (n, width) the norm as floats, or NULL; may be x */
    bool fp16;          /* also stores the norm in fp16_in */
    int n, width;
};
void encoder_norm(struct cuda_backend *cu, const struct encoder_norm &p);

/* Applies an activation without a gate to hidden units (rows, width) in place. */
void encoder_act(struct cuda_backend *cu, const struct gating &act, float *h, int rows, int width);

/* q, k and v of rows as fp16, with norms and RoPE: from float projections (rows, n_out), or, without
 * norms, in place if qkv is NULL. */
void encoder_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                   const float *qkv);

/* attn_encode.cu: attention of all rows of the step over cu->encoder->qkv. Result `a` as floats
 * or fp16. */
bool attn_encode_fits(const struct attn_layer *l);
void attn_encode(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                 struct rows *a);
/* attn_encode_long.cu: the same with wgmma, without windows and spans. */
bool attn_encode_long_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_encode_long(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                      struct rows *a);

#endif
