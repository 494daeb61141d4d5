/*
 * The part of a weight that this process keeps where several share the network: rows and columns, or
 * experts. Weights, vectors and adapters are cut as they are read. What is kept is decided elsewhere
 * (model_shard in model.h).
 */
#ifndef STEEL_MODEL_CUT_H
#define STEEL_MODEL_CUT_H

#include "backend/rawweight.h"
#include "base/error.h"
#include "base/range.h"

enum {
    CUT_RUNS = 16,
    CUT_PACKED_UNIT = 128, /* columns that stay together in weights that folders pack */
};

/* n_rows, n_cols 0 = all; experts.n 0 = all. */
struct cut {
    int n_rows, n_cols;
    struct range rows[CUT_RUNS], cols[CUT_RUNS];
    struct range experts;
    bool no_bias; /* another process adds it */
    bool none;    /* nothing is kept: the tensor is not read at all */
    /* n_order > 0: the experts are reordered, and `experts` is a range of the new order. For a router's
     * weight and for vectors by expert: all rows, in this order. */
    int n_order;
    int32_t order[];
};

/* w as it was read becomes the part that is kept; its data stays where it is. Copies come from alloc and
 * live as long as the result is used. False: this format cannot be cut so. */
bool cut_weight(struct raw_weight *w, const struct cut *cut,
                void *(*alloc)(void *arg, size_t count, size_t size), void *arg, struct error *err);
/* Columns that share a scale in a GPTQ4 weight whose columns are cut; `len` shared one before. */
int cut_group_len(int len);
/* An adapter's change of the weight, cut like it; l is freed. NULL: nothing of it is kept. */
struct lora;
struct lora *cut_lora(struct lora *l, const struct cut *cut);
/* Moves the values that are kept to the front; returns how many. */
int cut_vector(float *values, int n, const struct cut *cut);

#endif
