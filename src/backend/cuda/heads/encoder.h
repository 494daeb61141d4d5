/*
 * What encoders need beside the parts of decoders (encoder.cu, attn_encode.cu): LayerNorm, attention
 * both ways over the rows of a step, hidden units without a gate, rows that leave without a head. Their
 * scratch exists where the network has such a part.
 */
#ifndef STEEL_BACKEND_CUDA_ENCODER_H
#define STEEL_BACKEND_CUDA_ENCODER_H

#include "backend/cuda/attn/attn_layer.h"

struct encoder_scratch {
    uint16_t *qkv; /* (max_tokens, widest wqkv) halves times HIDDEN_SCALE, of layers both ways */
    float *hidden; /* (max_tokens, n_ff) of mlps without a gate */
    /* host, pinned: (max_out, n_embd) what a network without a head ends in, of the steps under way by
     * turns */
    float *rows[2];
};

/* The rows x (n, width), to which d is added first. */
struct encoder_norm {
    const float *x, *d; /* (n, width); d or NULL */
    float scale;        /* of d */
    struct gain gain;   /* LayerNorm or RMS */
    float *x_to;        /* (n, width) x + scale * d, or NULL; may be x */
    float *y;           /* (n, width) the norm as floats, or NULL; may be x */
    bool halves;        /* the norm goes to fp16_in too */
    int n, width;
};
void encoder_norm(struct cuda_backend *cu, const struct encoder_norm &p);

/* Hidden units (rows, width) through an activation without a gate, in place. */
void encoder_act(struct cuda_backend *cu, const struct gating &act, float *h, int rows, int width);

/* q, k and v of rows as halves from their projections: rotated. From floats (rows, n_out), or, NULL,
 * in place. */
void encoder_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                   const float *qkv);

/* attn_encode.cu: attention of all rows of the step over cu->encoder->qkv. a: as floats, or halves. */
bool attn_encode_fits(const struct attn_layer *l);
void attn_encode(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                 struct rows *a);

#endif
