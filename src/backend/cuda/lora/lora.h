/*
 * LoRA adapters on the GPU (backend/lora.h): y += s B (A x) after the products of the base weights.
 * Which rows use which adapters is part of the step block; an adapter's changes are in a table on
 * the device. So a step with adapters is recorded as a CUDA graph like any other and replayed with
 * other adapters.
 *
 * A product whose weight an adapter changes must give raw floats (no fused epilogue): pick_run then
 * adds the change, and apart.cu replaces fused MLPs. Steps without adapters run the same kernels as
 * before.
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

/* Lists of rows that use adapters: over all rows, and over the rows that need logits. */
enum { LORA_ALL, LORA_OUT, LORA_LISTS };

/* The adapters of a step's rows. Members are offsets into the step block. A row may use several
 * adapters: use u is its u-th adapter in ascending order. */
struct lora_list {
    int rows;
    int by_row;                 /* (n_uses, rows, 2): adapter or -1, bits of the scale */
    int members[LORA_MAX_USES]; /* rows sorted by adapter; steps with prompts only */
    int chunks[LORA_MAX_USES];  /* (n_chunks, 3): adapter, first member, members */
    int n_chunks[LORA_MAX_USES];
};

/* The adapters of a step. */
struct lora_step {
    bool on;      /* rows use adapters */
    bool grouped; /* the step has prompts: rows are grouped by adapter */
    int n_uses;   /* most adapters of any row */
    struct lora_list lists[LORA_LISTS];
};

struct lora_weight {
    const struct matrix *m;
    const struct weight *w;
    int rank; /* largest rank of any adapter used so far; 0: no adapter changes the weight */
};

/* Invariants:
 * 1. table[a] mirrors w->lora[a] as of generation seen[a]. A step reads only the columns of adapters it
 *    uses.
 * 2. rank never decreases. epoch counts its changes, so a recorded step has kernels for every change
 *    known when it was recorded.
 * 3. generation is the only member that other threads access. */
struct cuda_loras {
    int n_weights;
    struct lora_weight *weights; /* (n_weights) ascending by m */
    unsigned generation, seen[LORA_MAX_ADAPTERS];
    unsigned epoch;
    const struct lora_change **column; /* (n_weights) host */
    const struct lora_change **table;  /* device (LORA_MAX_ADAPTERS, n_weights) */
    int t_len, n_ff;
    float *t;                /* A x: (uses, rows, t_len), or of pairs */
    int32_t *count, *out_of; /* host (max_tokens) */
    struct lora_step step;
};

/* prepare and close. With lora_rank 0 there are no adapters, and the other functions are never
 * called with any. */
bool lora_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void lora_close(struct cuda_backend *cu);
size_t lora_step_ints(const struct cuda_backend *cu); /* most ints in the step block */
size_t lora_widest(const struct cuda_backend *cu);    /* widest row that LoRA converts to fp16 */

/* adapt and unadapt of the op table. */
void *lora_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                 struct error *err);
void lora_unadapt(struct backend *be, void *change);

/* begin: writes the step's lists to the step block from int `used` on; returns where they end.
 * For a pure decode step the sizes depend only on the step's counts and n_uses, so it can be
 * replayed. */
int lora_put(struct cuda_backend *cu, const struct batch *b, int used);
uint64_t lora_key(const struct cuda_backend *cu,
                  uint64_t key); /* added to the key of a recorded step */

/* True if rows of this step use adapters and some adapter has changed w. */
bool lora_changes(const struct cuda_backend *cu, const struct matrix *w);
bool lora_changes_experts(const struct cuda_backend *cu, const struct mlp *m); /* or their router */
/* A product whose weight is changed takes three calls. lora_input: makes x floats. lora_before,
 * before the product: t = A x, so that it overlaps with loading the weights. lora_add, after it:
 * y (rows, ldy) += B t. No other LoRA product may come between the two. */
void lora_input(struct cuda_backend *cu, struct pick_case *c);
void lora_before(struct cuda_backend *cu, const struct matrix *w, const struct rows *x);
void lora_add(struct cuda_backend *cu, const struct matrix *w, float *y, int ldy);
/* Of the mlp m, by apart.cu. lora_add_logits: the changes of router and shared expert's gate, of cu->routing.logits.
 * lora_add_experts: those of gate and up of the rows x, to cu->mlp.raw, or of down. */
bool lora_changes_router(const struct cuda_backend *cu, const struct mlp *m);
void lora_add_logits(struct cuda_backend *cu, const struct mlp *m, const struct rows *x);
struct route_tables;
void lora_add_experts(struct cuda_backend *cu, const struct pick_case *c, const struct mlp *m,
                      const float *x, const struct route_tables &t, bool down);

#endif
