/*
 * Building a network: a family names the tensors of each part, and gets the weights and vectors the
 * layers point to. Nothing is read yet but RoPE factors: sizes are enough for a backend to say
 * whether it can run the network; weights.c then loads what was asked for.
 */
#ifndef STEEL_MODEL_BUILD_H
#define STEEL_MODEL_BUILD_H

#include "backend/backend.h"
#include "model/config.h"

struct cut; /* model/split.h */

/* A tensor in both kinds of file, without ".weight"; %d: the layer, then the expert. GGUF keeps all
 * experts in one 3-D tensor, and so does a folder whose name has no place for the expert. "=name":
 * the whole name, to which nothing but "_bias" and the like is added. A folder's names begin with
 * "model." or "lm_head", whatever that part of a larger model is called (config.hf_model). */
struct name {
    const char *gguf, *hf;
};

/* Rows of a weight that come from one tensor. */
struct rows {
    const struct name *name;
    int n;
    int woven; /* in a GGUF, rotary pairs of heads of this many rows lie side by side; 0 = no */
    /* In a folder the tensor may have more: these are its rows first, first + step, ... of `of`;
     * of 0: it has these alone. across: it is stored transposed, (n_in, of). run: so many rows at
     * each step; 0 = 1. gguf_too: so it is in a GGUF. */
    int first, step, of;
    bool across, gguf_too;
    int run;
    /* pitch: one matrix of all heads, whose rows (across: columns) begin at skip of each pitch of the
     * tensor's; 0 = no. In a GGUF, too. */
    int pitch, skip;
    /* In a GGUF the heads of `len` rows (columns) behind the first `plain` lie tiled: the j-th of group
     * g at j * groups + g. For `convert`; readers know by delta_net.tiled. */
    struct tiles {
        int plain, groups, each, len;
        bool columns;
    } tiles;
};

/* What is done to a vector's values: a folder's + add, then, from any file, * times. `convert` writes
 * them times fold, so that readers who know no such number compute the same. 0 = nothing. */
struct adjust {
    float add, times, fold;
    bool decay; /* a folder has its logarithm, a GGUF its negative */
};

/* A weight or a vector of the network, and where it comes from. */
struct want {
    struct weight *w; /* or NULL: */
    float *vector;    /* (n_in) backend memory */
    enum weight_role role;
    int layer, n_in, n_expert;
    int n_rows;
    struct rows rows[3];
    struct adjust adjust; /* of a vector */
    int width;            /* of a vector that is a table of such rows; 0 = it is none */
    /* For `convert`: all rows go into one tensor of this name; as_is: in the folder's order. */
    const struct name *as;
    bool as_is;
    struct cut *cut; /* what this rank takes of it (split.h), owned; NULL = all */
};

struct builder {
    const struct tensorfile *f;
    const struct config *c;
    struct backend *be; /* NULL: sizes alone are wanted, vectors are places of their own */
    struct network *net;
    struct want *wants; /* (n_wants) */
    int n_wants, cap;
    struct error *err;
    bool failed; /* err says why */
};

/* Writes the tensor's full name; suffix: "weight", "bias", ... */
void build_name(const struct tensorfile *f, const struct config *c, const struct name *n, int layer,
                int expert, const char *suffix, char *out, size_t size);
const struct tensor *build_find(const struct tensorfile *f, const struct config *c,
                                const struct name *n, int layer, int expert, const char *suffix);
/* The number that multiplies a GGUF's weight of NVFP4 (of experts: one each): NAME.scale, or NULL. */
const struct tensor *build_scale(const struct tensorfile *f, const struct config *c,
                                 const struct name *n, int layer);
/* Whether the experts of such a name are one tensor of this file. */
bool build_stacked(const struct tensorfile *f, const struct name *n);
/* Whether the file has the matrix (of experts: the first), plain or packed. */
bool build_present(const struct tensorfile *f, const struct config *c, const struct name *n,
                   int layer);
/* Whether the builder's file has it. */
bool build_has(const struct builder *b, const struct name *n, int layer);

/* A matrix (or n_expert of them) of up to three runs of rows, with a bias if one of its tensors has
 * one. */
const struct weight *build_weight(struct builder *b, enum weight_role role, int layer, int n_in,
                                  int n_expert, int n_rows, const struct rows *rows);
const struct weight *build_matrix(struct builder *b, enum weight_role role, int layer,
                                  const struct name *name, int n_in, int n_out);
struct norm build_rms(struct builder *b, int layer, const struct name *name, int width);
struct norm build_rms_adjusted(struct builder *b, int layer, const struct name *name, int width,
                               struct adjust adjust);
/* LayerNorm; its bias is a tensor of its own name ("=..."), which a file may lack. */
struct norm build_layer_norm(struct builder *b, int layer, const struct name *gain,
                             const struct name *bias, int width);
/* Floats (width) in backend memory: sinks, biases, scales. NULL where building has failed. */
const float *build_vector(struct builder *b, int layer, const struct name *name, int width,
                          struct adjust adjust);
/* The same of a table: (rows, width). */
const float *build_table(struct builder *b, int layer, const struct name *name, int rows,
                         int width);
/* One number out of a tensor of one, or 1 where the file has none. */
float build_scalar(struct builder *b, int layer, const struct name *name);
/* RoPE by the config, with the file's factors where it has them; NULL where nothing turns. */
const struct rope *build_rope(struct builder *b);
/* The same for several: rope i by configs[i], n_rot[i] dims, the first one with the file's factors. */
const struct rope *build_ropes(struct builder *b, int n, const struct rope_config *const *configs,
                               const int *n_rot);

/* Frees what the build made: weights, vectors, layers and RoPE tables. */
void build_free(struct backend *be, struct network *net, struct want *wants, int n_wants);

#endif
