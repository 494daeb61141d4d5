/*
 * Adapters on the GPU (backend/lora.h): y += s B (A x) behind the products of the base weights. Which rows
 * use which adapters is part of the step's block; what an adapter does to which weight stands in a
 * table on the device. So a step with adapters is recorded like any other, and replayed with others.
 * A product whose weight an adapter changes is one of floats with nothing done to its result yet:
 * pick_run adds to it, lora_mlp takes mlps apart. Steps without adapters are what they were.
 */
#ifndef STEEL_BACKEND_CUDA_LORA_H
#define STEEL_BACKEND_CUDA_LORA_H

#include "backend/cuda/core/cuda.h"

extern "C" {
#include "backend/lora.h"
}

struct batch;
struct bounds;
struct weight;

/* Lists of rows that use adapters: of all rows, and of those that need logits. */
enum { LORA_ALL, LORA_OUT, LORA_LISTS };

/* A step's rows, as offsets in its block. A row's adapters come one after another, in ascending order:
 * u counts them. */
struct lora_list {
    int rows;
    int by_row;                 /* (n_uses, rows, 2): adapter or -1, bits of the scale */
    int members[LORA_MAX_USES]; /* rows, by adapter: of steps with prompts */
    int chunks[LORA_MAX_USES];  /* (n_chunks, 3): adapter, first member, members */
    int n_chunks[LORA_MAX_USES];
};

/* What a step has of adapters. */
struct lora_step {
    bool on;      /* rows use adapters */
    bool grouped; /* there are prompts: rows of one adapter together */
    int n_uses;   /* the most of a row */
    struct lora_list lists[LORA_LISTS];
};

struct lora_weight {
    const struct matrix *m;
    const struct weight *w;
    int rank; /* the most of any adapter that was used; 0: nothing changes it */
};

/* Invariants: 1. table[a] is what w->lora[a] were when seen[a] was generation, and steps read it of adapters
 * they use alone. 2. rank only grows; epoch counts how often, so that a recorded step has kernels for
 * every change there was. 3. generation is the only member that other threads touch. */
struct cuda_loras {
    int n_weights;
    struct lora_weight *weights; /* (n_weights) ascending by m */
    unsigned generation, seen[LORA_MAX_ADAPTERS];
    unsigned epoch;
    const struct lora_change **column; /* (n_weights) host */
    const struct lora_change **table;  /* device (LORA_MAX_ADAPTERS, n_weights) */
    int t_len, n_ff;
    float *t;                /* (uses, rows, t_len), or of pairs, A x */
    float *raw;              /* (rows or pairs, widest gate and up) */
    float *hidden;           /* (rows, n_ff) */
    int32_t *count, *out_of; /* host (max_tokens) */
    struct lora_step step;
};

/* prepare and close. lora_rank 0: there are no adapters, and nothing of the rest is called with any. */
bool lora_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void lora_close(struct cuda_backend *cu);
size_t lora_step_ints(const struct cuda_backend *cu); /* of the step's block, at most */
size_t lora_widest(const struct cuda_backend *cu);    /* rows that become halves because of it */

/* adapt and unadapt of the op table. */
void *lora_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                 struct error *err);
void lora_unadapt(struct backend *be, void *change);

/* begin: the step's lists go to its block, from int `used` on; returns where they end. Sizes depend on the
 * counts of the step and n_uses alone where it only decodes. */
int lora_put(struct cuda_backend *cu, const struct batch *b, int used);
uint64_t lora_key(const struct cuda_backend *cu, uint64_t key); /* of a recorded step */

/* Whether rows of this step use adapters, and any has changed w. */
bool lora_changes(const struct cuda_backend *cu, const struct matrix *w);
bool lora_changes_experts(const struct cuda_backend *cu, const struct mlp *m); /* or their router */
/* A product of the stream's rows: x becomes floats. In front of it: t = A x, while weights are on their way;
 * behind it: y (rows, ldy) += B t. Nothing else with adapters comes between the two. */
void lora_input(struct cuda_backend *cu, struct pick_case *c);
void lora_before(struct cuda_backend *cu, const struct matrix *w, const struct rows *x);
void lora_add(struct cuda_backend *cu, const struct matrix *w, float *y, int ldy);
/* The case's product of mlp m, whose weights adapters change: PICK_FFN or PICK_MOE. */
void lora_mlp(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, const struct mlp *m);

#endif
