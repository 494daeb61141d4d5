/*
 * Turns the network's output rows of a text into an embedding or a score. Pooling picks one row or
 * the mean, then optional dense layers, norms and normalisation follow. Parameters come from the
 * model's files: sentence-transformers' modules.json and its folders, a GGUF's pooling_type, a
 * reranker's classification head. It runs on the host, since it is a thousandth of the work.
 */
#ifndef STEEL_MODEL_POOLING_H
#define STEEL_MODEL_POOLING_H

#include "model/config.h"

enum pooling_kind {
    POOLING_NONE, /* every row */
    POOLING_CLS,  /* the first */
    POOLING_MEAN,
    POOLING_LAST,
    POOLING_RANK, /* a score, by the model's classification head */
};

enum dense_act { DENSE_NONE, DENSE_TANH, DENSE_GELU, DENSE_RELU };

/* y = norm(act(x W^T + bias)); host memory */
struct dense {
    int n_in, n_out;
    float *w, *bias; /* (n_out, n_in), (n_out) or NULL */
    enum dense_act act;
    float *gain; /* (n_out) of a LayerNorm; NULL = none */
    float eps;
};

enum { POOLING_MAX_DENSE = 8 };

struct pooling {
    enum pooling_kind kind;
    enum pooling_kind row; /* input of a score: CLS, MEAN or LAST */
    bool normalize;
    int n_embd, width; /* input row width, result width */
    struct dense dense[POOLING_MAX_DENSE];
    int n_dense;
};

/* kind: -1 = from the files. Fails if the files are broken or name an unknown pooling. */
bool pooling_load(const struct tensorfile *f, const struct config *c, int kind, struct pooling *p,
                  struct error *err);
/* What the file declares that its rows are pooled to: POOLING_RANK, another kind for embeddings, or -1: it declares
 * nothing, so it generates text. */
int pooling_declared(const struct tensorfile *f, const struct config *c);
/* Whether the file has a classification head of any form. */
bool pooling_has_head(const struct tensorfile *f);
/* A reranker that answers yes or no: score = logit(yes) - logit(no). yes and no are token ids. */
bool pooling_yes_no(const struct tensorfile *f, const struct config *c, int32_t yes, int32_t no,
                    struct pooling *p, struct error *err);
void pooling_clear(struct pooling *p);

/* The pooling kind of a name, or -1. */
int pooling_kind_of(const char *name);
const char *pooling_name(enum pooling_kind kind);

/* The rows needed of a text of n rows: all of them, except for CLS and LAST. */
void pooling_rows(const struct pooling *p, int n, int *first, int *count);
/* rows (count, n_embd) chosen by pooling_rows -> out (width). dims: keep only the first dims values
 * (Matryoshka); 0 = all. tmp: pooling_scratch bytes. */
void pooling_apply(const struct pooling *p, const float *rows, int count, int dims, void *tmp,
                   float *out);
size_t pooling_scratch(const struct pooling *p);

#endif
