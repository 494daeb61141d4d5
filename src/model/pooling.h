/*
 * What is made of a text's rows once the network is through with them: one row, or the mean of all;
 * dense layers and norms behind it; a vector of length 1, or a score. Read from a model's files
 * (sentence-transformers' modules.json and its folders, a GGUF's pooling_type, the classification head
 * of a reranker) and computed on the host: it is a thousandth of the work.
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
    enum pooling_kind row; /* what a score is made of: CLS, MEAN or LAST */
    bool normalize;
    int n_embd, width; /* of a row, of the result */
    struct dense dense[POOLING_MAX_DENSE];
    int n_dense;
};

/* kind: -1 as the files say. False: they ask for something that is not known, or are broken. */
bool pooling_load(const struct tensorfile *f, const struct config *c, int kind, struct pooling *p,
                  struct error *err);
/* Whether the file has a classification head, of whatever form. */
bool pooling_has_head(const struct tensorfile *f);
/* A reranker that answers yes or no: the score is how much likelier yes is. Ids of the two tokens. */
bool pooling_yes_no(const struct tensorfile *f, const struct config *c, int32_t yes, int32_t no,
                    struct pooling *p, struct error *err);
void pooling_clear(struct pooling *p);

/* The kind of that name, or -1. */
int pooling_kind_of(const char *name);
const char *pooling_name(enum pooling_kind kind);

/* The first of the rows that a text of n rows needs, and how many: all but for CLS and LAST. */
void pooling_rows(const struct pooling *p, int n, int *first, int *count);
/* rows (count, n_embd) as said by pooling_rows -> out (width). dims: the first so many are wanted, of
 * models trained for that; 0 = all. tmp: pooling_scratch bytes. */
void pooling_apply(const struct pooling *p, const float *rows, int count, int dims, void *tmp,
                   float *out);
size_t pooling_scratch(const struct pooling *p);

#endif
