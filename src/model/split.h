/*
 * What one rank takes of a network that several run together (base/ranks.h): heads, hidden units or
 * experts, and rows of the head. The network becomes a smaller one, and the list of its weights says
 * which rows and columns are read. What cannot be cut (a block of a quantised row would be torn, there
 * are fewer heads than ranks) every rank has whole.
 */
#ifndef STEEL_MODEL_SPLIT_H
#define STEEL_MODEL_SPLIT_H

#include "base/ranks.h"
#include "model/build.h"

enum { CUT_RUNS = 16 };

/* n_rows, n_cols 0 = all; experts.n 0 = all. */
struct cut {
    int n_rows, n_cols;
    struct run rows[CUT_RUNS], cols[CUT_RUNS];
    struct run experts;
    bool no_bias; /* another rank adds it */
    bool none;    /* another stage has it: it is not read at all */
    /* n_order > 0: the experts in another order, from which `experts` takes its run; of a router's weight
     * and of vectors by expert: all of their rows in this order */
    int n_order;
    int32_t order[];
};

/* Cuts net and its wants for rank `r`; does nothing without ranks. */
bool split_network(const struct tensorfile *f, const struct config *c, struct network *net,
                   struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct error *err);

/* The weight as this rank has it: w as it was read, whose data stays where it is. What must be copied
 * comes from alloc and lives as long as the result is used. False: no such cut of its format. */
bool split_weight(struct raw_weight *w, const struct cut *cut,
                  void *(*alloc)(void *arg, size_t count, size_t size), void *arg,
                  struct error *err);
/* Of a GPTQ4 weight whose columns are cut: how many share a scale then, where they were `len`. */
int split_group_len(int len);
/* An adapter's change of the weight, cut like it; l is freed. NULL: nothing of it is this rank's. */
struct lora;
struct lora *split_lora(struct lora *l, const struct cut *cut);
/* The values of a vector that stay, moved to its front; how many. */
int split_vector(float *values, int n, const struct cut *cut);

#endif
