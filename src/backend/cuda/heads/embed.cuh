/*
 * Embeddings, embeddings per layer, and the logits' scale and softcap (embed.cu), for backend.cu
 * and mlp.cu.
 */
#ifndef STEEL_BACKEND_CUDA_EMBED_CUH
#define STEEL_BACKEND_CUDA_EMBED_CUH

#include "backend/cuda/core/cuda.h"

enum { EMBED_THREADS = 256 };

/* x (n_tokens, n_embd) = scale * the tokens' rows */
void embed_tokens(struct cuda_backend *cu, const struct matrix *w, const struct step *s,
                  float scale, float *x);

/* The same for a shard of the table whose rows start at token `first`. Tokens outside the shard
 * give zeros. */
void embed_part(struct cuda_backend *cu, const struct matrix *w, const struct step *s, int first,
                float scale, float *x);

/* Rows whose token is n_vocab + i become embeds[i] (n_embd). */
void embed_given(struct cuda_backend *cu, const float *const *embeds, int n_vocab,
                 const struct step *s, float *x);

/* x (rows, n_embd) += rows index[t] + offset of a table */
void embed_add(struct cuda_backend *cu, const struct matrix *w, const int32_t *index, int offset,
               float *x, int rows);

/* Row `row` of a matrix as floats: pieces of TILE_K values, `stride` floats apart */
void embed_row(struct cuda_backend *cu, const struct matrix *w, int row, float *y, int stride);

/* struct embed_layers of layer.h, after its product */
struct embed_layers_args {
    struct matrix table;   /* (n_vocab, n_layers*P) */
    const int32_t *tokens; /* (rows) */
    float *e;              /* (rows, n_layers, P) */
    struct gain norm;      /* (P) */
    int width;             /* P */
    int pad;               /* the token of rows that are no tokens */
    float table_scale, project_scale, scale;
};
void embed_layers(struct cuda_backend *cu, const struct embed_layers_args &p, int n_layers,
                  int rows);

/* struct layer_embed of layer.h, between its two products */
struct embed_gate_args {
    float *h;              /* (rows, P) */
    const float *e;        /* (., n_layers, P) */
    const int32_t *row_of; /* (rows) row of e; NULL: the identity */
    struct gating act;
    int width, layer, n_layers;
};
void embed_gate(struct cuda_backend *cu, const struct embed_gate_args &p, int rows);

/* Applies scale and softcap to logits. cap 0: no softcap. */
void embed_logits(struct cuda_backend *cu, float *logits, size_t n, float scale, float cap);

#endif
