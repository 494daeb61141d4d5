/*
 * Sparse attention (struct indexer of layer.h): which keys the rows of a step see, and attention over those. A step whose
 * sequences are all so short that every row sees all of its keys only stores index keys (step_layout.beyond).
 */
#ifndef STEEL_BACKEND_CUDA_INDEX_H
#define STEEL_BACKEND_CUDA_INDEX_H

#include "backend/cuda/attn/attn_layer.h"

struct bounds;
struct mixer;

/* The choice of a step's rows, from the layer that made it last. */
struct index_choice {
    const int32_t
        *list;        /* (n_tokens, groups, n_chosen) ascending: keys, or blocks of `block` keys */
    const int32_t *n; /* (n_tokens, groups) n_chosen; -1: the row sees all of its keys */
    int groups, n_chosen, block;
};

bool index_supported(const struct network *net, int layer, struct error *err);
/* Keys of a context from which on the network's rows do not see all of them, or attention in chunks begins a second one;
 * 0: there is no such layer. */
int index_limit(const struct network *net);
bool index_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void index_close(struct cuda_backend *cu);
/* y = x W^T with x as two parts of fp16, for what an indexer compares. */
void index_product(struct cuda_backend *cu, const struct weight *w, const float *x, int rows,
                   float *y);
/* Stores the index keys of the step's rows (entries of a compressor are there already), and makes their choice if there is one to make. Returns whether attention must
 * read *choice. */
bool index_choose(struct cuda_backend *cu, const struct mixer *m, int layer, const struct step *s,
                  struct index_choice *choice);

/* index_attend.cu: attention of all rows over their choice. */
struct attn_args;
struct latent_args;
void index_attend(struct cuda_backend *cu, const struct attn_args &p,
                  const struct index_choice &choice);
void index_attend_latent(struct cuda_backend *cu, const struct latent_args &p,
                         const struct index_choice &choice);
size_t index_attend_shared(int k_dim, int v_dim);

#endif
