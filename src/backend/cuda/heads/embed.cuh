/*
 * What embed.cu does, for backend.cu and mlp.cu.
 */
#ifndef STEEL_BACKEND_CUDA_EMBED_CUH
#define STEEL_BACKEND_CUDA_EMBED_CUH

#include "backend/cuda/core/cuda.h"

enum { EMBED_THREADS = 256 };

/* x (n_tokens, n_embd) = scale * the tokens' rows */
void embed_tokens(struct cuda_backend *cu, const struct matrix *w, const struct step *s,
                  float scale, float *x);

/* The same of a table that has the rows of tokens from `first` on; zeros for others. */
void embed_part(struct cuda_backend *cu, const struct matrix *w, const struct step *s, int first,
                float scale, float *x);

/* x (rows, n_embd) += rows index[t] + offset of a table */
void embed_add(struct cuda_backend *cu, const struct matrix *w, const int32_t *index, int offset,
               float *x, int rows);

/* Row `row` of a matrix as floats, TILE_K of them every `stride` */
void embed_row(struct cuda_backend *cu, const struct matrix *w, int row, float *y, int stride);

/* struct embed_layers of layer.h, behind its product */
struct embed_layers_args {
    struct matrix table;   /* (n_vocab, n_layers*P) */
    const int32_t *tokens; /* (rows) */
    float *e;              /* (rows, n_layers, P) */
    struct gain norm;      /* (P) */
    int width;             /* P */
    float table_scale, project_scale, scale;
};
void embed_layers(struct cuda_backend *cu, const struct embed_layers_args &p, int n_layers,
                  int rows);

/* struct layer_embed of layer.h, between its products */
struct embed_gate_args {
    float *h;              /* (rows, P) */
    const float *e;        /* (., n_layers, P) */
    const int32_t *row_of; /* (rows) of e, or NULL: the same */
    struct gating act;
    int width, layer, n_layers;
};
void embed_gate(struct cuda_backend *cu, const struct embed_gate_args &p, int rows);

/* Scale and softcap of logits; cap 0: none. */
void embed_logits(struct cuda_backend *cu, float *logits, size_t n, float scale, float cap);

#endif
