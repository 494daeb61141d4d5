/*
 * Which tensor of a model becomes which type under a named mix such as Q4_K_M: most weights in the
 * base type, the few that matter most (output head, attention values, some down projections) a step
 * better. The choices are the ones users of GGUF know, so that files compare.
 */
#ifndef STEEL_CONVERT_MIX_H
#define STEEL_CONVERT_MIX_H

#include "quant/quant.h"

struct mix {
    const char *name;
    enum dtype base;
    int file_type; /* GGUF's general.file_type */
};

/* What the choice depends on besides the tensor. */
struct mix_model {
    int n_layers, n_expert, n_heads, n_kv_heads;
    bool is_llama;   /* the architecture called so */
    bool tied;       /* no output head of its own: the embedding is it */
    bool importance; /* an importance matrix is given */
};

const struct mix *mix_find(const char *name); /* case-insensitive; NULL if unknown */
const char *mix_names(void);                  /* "F32, F16, ...", for messages */

/* Whether a tensor may be quantised: norms, biases, routers and their like never are. */
bool mix_is_matrix(const char *name, int n_dims, const int64_t *dims);

/* Type for a matrix. Its rows may not divide into that type's blocks: see mix_fitting. */
enum dtype mix_choose(const struct mix *m, const struct mix_model *model, const char *name,
                      const int64_t *dims);

/* The type itself where rows of n values divide into its blocks, else the nearest that fits. */
enum dtype mix_fitting(enum dtype type, int64_t n);

#endif
