/* Arguments of the LoRA kernels: one adapter's change of one weight, and a product with it. */
#ifndef STEEL_BACKEND_CUDA_LORA_CUH
#define STEEL_BACKEND_CUDA_LORA_CUH

#include "backend/cuda/core/cuda.h"

enum { LORA_PARTS = 3 }; /* = LORA_MAX_PARTS, which kernel files do not include */

/* fp16 matrices whose rows are padded with zeros to multiples of eight. scale: a power of two
 * that was divided out. */
struct lora_change_part {
    const uint16_t *b; /* (n, ld) */
    float scale;
    int first, n, at, rank, ld;
};
struct lora_change {
    const uint16_t *a; /* (rank, ld); rank 0: this expert is unchanged */
    float scale;
    int rank, ld, n_parts;
    struct lora_change_part parts[LORA_PARTS];
};

struct lora_args {
    const struct lora_change *const *table; /* (adapters, n_weights) of n_expert each, or NULL */
    int n_weights, weight;
    int shared,
        shared_weight;     /* index of the shared expert and of its weight in the table; -1: none */
    const int32_t *by_row; /* (rows, 2) adapter, scale */
    const int32_t *members, *chunks; /* rows grouped by adapter: see struct lora_list */
    /* Experts: (row, expert) pairs sorted by expert, and the expert of each pair. Otherwise
     * NULL. */
    const int32_t *pairs, *chosen;
    int used;
    bool x_sorted, y_pairs; /* x is indexed by position, not by row; y by pair, not by position */
    const float *x;         /* (., ldx) */
    int ldx, n_in;
    float *t; /* (rows or positions, t_len) */
    int t_len;
    float *y; /* (., ldy) */
    int ldy, n_out;
};

/* `blocks`: rows, chunks or positions. lora_shrink: t = s A x for ranks up to `rank`. lora_expand: y +=
 * B t. */
void lora_shrink(struct cuda_backend *cu, const struct lora_args &p, int blocks, int rank);
void lora_expand(struct cuda_backend *cu, const struct lora_args &p, int blocks);
/* Gate and up projections to the hidden units of n rows, as floats and in the forms that
 * products read. */
struct lora_gate_args {
    struct gating act;
    const float *raw; /* (n, 2 width); ungated: (n, width) */
    float *hidden;    /* (n, ld); may be raw itself with ld = 2 width */
    int width, ld;
    int padded;         /* width of the other forms, a multiple of TILE_K; 0: not needed */
    uint16_t *fp16_out; /* (n, padded) fp16 scaled by HIDDEN_SCALE, or NULL */
    /* the same as panels of panel_rows rows, or NULL; scale (n) undoes HIDDEN_SCALE */
    uint8_t *panels;
    float *scale;
    int panel_rows;
};
void lora_gate(struct cuda_backend *cu, const struct lora_gate_args &p, int n);

#endif
