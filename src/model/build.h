/*
 * Building a network: a family names the tensors of each part, and gets the weights and vectors the
 * layers point to. Nothing is read yet but RoPE factors: sizes are enough for a backend to say
 * whether it can run the network; weights.c then loads what was asked for.
 */
#ifndef STEEL_MODEL_BUILD_H
#define STEEL_MODEL_BUILD_H

#include "backend/backend.h"
#include "model/config.h"

/* A tensor in both kinds of file, without ".weight"; %d: the layer, then the expert. GGUF keeps all
 * experts in one 3-D tensor. */
struct name {
    const char *gguf, *hf;
};

/* Rows of a weight that come from one tensor. */
struct rows {
    const struct name *name;
    int n;
    int woven; /* rotary pairs of heads of this many rows lie side by side; 0 = no */
};

/* A weight or a vector of the network, and where it comes from. */
struct want {
    struct weight *w; /* or NULL: */
    float *vector;    /* (n_in) backend memory */
    enum weight_role role;
    int layer, n_in, n_expert;
    int n_rows;
    struct rows rows[3];
};

struct builder {
    const struct tensorfile *f;
    const struct config *c;
    struct backend *be; /* NULL: sizes alone are wanted, vectors point anywhere */
    struct network *net;
    struct want *wants; /* (n_wants) */
    int n_wants, cap;
    struct error *err;
    bool failed; /* err says why */
};

/* Writes the tensor's full name; suffix: "weight", "bias", ... */
void build_name(const struct tensorfile *f, const struct name *n, int layer, int expert,
                const char *suffix, char *out, size_t size);
const struct tensor *build_find(const struct tensorfile *f, const struct name *n, int layer,
                                int expert, const char *suffix);

/* A matrix (or n_expert of them) of up to three runs of rows, with a bias if one of its tensors has
 * one. */
const struct weight *build_weight(struct builder *b, enum weight_role role, int layer, int n_in,
                                  int n_expert, int n_rows, const struct rows *rows);
const struct weight *build_matrix(struct builder *b, enum weight_role role, int layer,
                                  const struct name *name, int n_in, int n_out);
struct norm build_rms(struct builder *b, int layer, const struct name *name, int width);
/* RoPE by the config, with the factors of a GGUF's rope_freqs where it has them. */
const struct rope *build_rope(struct builder *b);

/* Frees what the build made: weights, vectors, layers and RoPE tables. */
void build_free(struct backend *be, struct network *net, struct want *wants, int n_wants);

#endif
