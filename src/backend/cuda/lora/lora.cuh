/* What the kernels of adapters read: one adapter's change of one weight, and a product with it. */
#ifndef STEEL_BACKEND_CUDA_LORA_CUH
#define STEEL_BACKEND_CUDA_LORA_CUH

#include "backend/cuda/core/cuda.h"

enum { LORA_PARTS = 3 }; /* LORA_MAX_PARTS, of which kernels' files know nothing */

/* Halves of rows padded with zeros to multiples of eight; scale: the power of two that they lack. */
struct lora_change_part {
    const uint16_t *b; /* (n, ld) */
    float scale;
    int first, n, at, rank, ld;
};
struct lora_change {
    const uint16_t *a; /* (rank, ld) NULL: no change of this expert */
    float scale;
    int rank, ld, n_parts;
    struct lora_change_part parts[LORA_PARTS];
};

struct lora_args {
    const struct lora_change *const *table; /* (adapters, n_weights) of n_expert each, or NULL */
    int n_weights, weight;
    int shared, shared_weight; /* this expert's changes are those of that weight; -1: none is */
    const int32_t *by_row;     /* (rows, 2) adapter, scale */
    const int32_t *members, *chunks; /* rows together: see struct lora_list */
    /* Experts: positions of a list of pairs, sorted by expert. Else NULL. */
    const int32_t *pairs, *chosen;
    int used;
    bool x_sorted, y_pairs; /* x by position, not by row; y by pair, not by position */
    const float *x;         /* (., ldx) */
    int ldx, n_in;
    float *t; /* (rows or positions, t_len) */
    int t_len;
    float *y; /* (., ldy) */
    int ldy, n_out;
};

/* Grids: `blocks` rows, chunks or positions. t = s A x of ranks up to `rank`; y += B t. */
void lora_low(struct cuda_backend *cu, const struct lora_args &p, int blocks, int rank);
void lora_up(struct cuda_backend *cu, const struct lora_args &p, int blocks);
/* gate and up to hidden units of n rows: floats, and in the forms that products read. */
struct lora_gate_args {
    struct gating act;
    const float *raw; /* (n, 2 width); without a gate (n, width) */
    float *hidden;    /* (n, ld): ld may be 2 width and the place that of raw */
    int width, ld;
    int padded;       /* width of the other forms, a multiple of TILE_K; 0: there are none */
    uint16_t *halves; /* (n, padded) times HIDDEN_SCALE, or NULL */
    uint8_t *panels;  /* the same as panels of panel_rows, or NULL; and what undoes it: scale (n) */
    float *scale;
    int panel_rows;
};
void lora_gate(struct cuda_backend *cu, const struct lora_gate_args &p, int n);

#endif
