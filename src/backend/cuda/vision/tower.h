/*
 * Image towers (layer.h) as the host's files see them: patches as a step's rows, mergers, products of
 * bounded inputs, spans of attention, and what a decoder adds from a tower's inner layers.
 * The layers themselves are those of encoders (heads/encoder.h).
 */
#ifndef STEEL_BACKEND_CUDA_TOWER_H
#define STEEL_BACKEND_CUDA_TOWER_H

#include "backend/cuda/attn/attn_layer.h"
#include "backend/cuda/core/host.h"

static inline struct cuda_tower *tower_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->tower;
}

bool tower_supported(const struct network *net, struct error *err);
bool tower_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void tower_close(struct cuda_backend *cu);
/* The widest input row of a product in a tower's ends, times its rows for each token; 0 = no tower. */
size_t tower_widest(const struct network *net);

/* The step's spans go to the step block. Returns where they end. */
size_t tower_step_ints(const struct network *net, int max_tokens); /* upper bound */
int tower_put(struct cuda_backend *cu, const struct batch *b, int used);
/* The same of batch.pixels. */
int tower_put_pixels(struct cuda_backend *cu, const struct batch *b, int used);
/* (n_tokens, 2) the step's spans on the device, for attention that reads them; NULL = none. */
const int32_t *tower_spans(const struct cuda_backend *cu, const struct attention *a);

/* x = norm(patch_norm(p Wpatches^T + bias) + q), up to the embedding's own norm */
void tower_embed(struct cuda_backend *cu, const struct embed *e);
/* The stream's rows += their features of this level. */
void tower_deepstack(struct cuda_backend *cu, int level);

/* x (rows, width) = norm(x), for every kind of norm; in place */
void tower_norm(struct cuda_backend *cu, const struct norm *n, float *x, int rows, int width);

/* Products with bounds. qkv: the raw projections, to cu->act.qkv. linear: y = x w^T. ffn: the same
 * of gate, up and down. */
void tower_clip_qkv(struct cuda_backend *cu, const struct norm *norm, const struct attention *a);
void tower_clip_linear(struct cuda_backend *cu, const struct weight *w, const struct clip *c,
                       struct rows *x, float *y);
void tower_clip_ffn(struct cuda_backend *cu, const struct norm *norm, const struct ffn *f,
                    float *y);

/* The ops. */
void tower_merge(struct backend *be, const struct merger *m, int i);
void tower_features(struct backend *be, int rows, float *host);

#endif
