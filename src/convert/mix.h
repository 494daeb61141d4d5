/*
 * Which type each tensor gets under a named mix such as Q4_K_M: most weights the base type, the few
 * most sensitive ones (output head, attention values, some down projections) a better one. The
 * choices match llama.cpp's, so that files are comparable.
 */
#ifndef STEEL_CONVERT_MIX_H
#define STEEL_CONVERT_MIX_H

#include "quant/quant.h"

struct mix {
    const char *name;
    enum dtype base;
    int file_type; /* GGUF's general.file_type */
};

/* Model properties that the choice depends on. */
struct mix_model {
    int n_layers, n_expert, n_heads, n_kv_heads;
    bool is_llama;   /* the architecture is "llama" */
    bool tied;       /* the embedding is the output head */
    bool importance; /* an importance matrix is given */
};

const struct mix *mix_find(const char *name); /* case-insensitive; NULL if unknown */
const char *mix_names(void);                  /* "F32, F16, ...", for messages */

/* Whether a tensor may be quantised. Norms, biases, routers and similar tensors never are. */
bool mix_is_matrix(const char *name, int n_dims, const int64_t *dims);

/* The type of a matrix. Its rows may not be divisible into blocks: see mix_fitting. */
enum dtype mix_choose(const struct mix *m, const struct mix_model *model, const char *name,
                      const int64_t *dims);

/* The type itself if its blocks divide rows of n values, else the nearest type that fits. */
enum dtype mix_fitting(enum dtype type, int64_t n);

#endif
