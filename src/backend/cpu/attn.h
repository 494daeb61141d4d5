/*
 * Private to the attention op: the interface between its driver (attn.c) and the kernels, which are compiled once per
 * instruction set (attn_kernel.h).
 */
#ifndef STEEL_BACKEND_CPU_ATTN_H
#define STEEL_BACKEND_CPU_ATTN_H

#include "quant/quant.h"
#include "base/cpu.h"

#include <stdbool.h>

enum {
    ATTN_BLOCK = 64,     /* keys per step of the online softmax, at absolute positions */
    ATTN_CHUNK = 256,    /* keys per partial result, at absolute positions; whole blocks */
    ATTN_MAX_ROWS = 32,  /* largest tile of query rows; no smaller than a vector */
    ATTN_MAX_WIDTH = 16, /* largest vector */
    ATTN_ROWS = 32,      /* tokens of a cache of rows that are packed at a time */
};

/* The score of a masked key, and the initial running maximum. Both are finite, to avoid NaN, and
 * far enough apart that 2^(masked - start) is 0. */
#define ATTN_MASKED -3e38f
#define ATTN_START  -1e38f

/*
 * A block: kernels.block keys of one kv head, as vectors of VW adjacent keys. Strides count elements.
 *   1. Component d of vector i of keys is at k[i] + d*k_stride (VW keys from key first + i*VW on).
 *   2. Component d of the value of key i*VW + j is at v[i] + d/panel*v_panel + d%panel + j*v_stride,
 *      where panel is the kernel's panel width.
 *   3. Quantised keys and values have the layout of kvtile.h. k_stride is then the number of keys per
 *      component (or group of components), v_stride the bytes per value, and scale_stride the distance
 *      between the scales of adjacent blocks of 32 components.
 *   4. Vectors without a key that some row sees point anywhere in the pool.
 */
struct attn_block {
    int first;
    size_t k_stride, v_stride, v_panel, scale_stride;
    const void *k[ATTN_BLOCK], *v[ATTN_BLOCK];
    const uint16_t *k_scale[ATTN_BLOCK], *v_scale[ATTN_BLOCK];
    /* For prefetching. `next` is the block after this one, never NULL; the last block points to
     * itself. k_tile and v_tile are the starts of each vector's VW * D values within its page.
     * k_step and v_step are the bytes per component of a vector, so that D steps cover it. */
    const struct attn_block *next;
    const void *k_tile[ATTN_BLOCK], *v_tile[ATTN_BLOCK];
    size_t k_step, v_step;
    uint16_t
        *fp16; /* (ATTN_BLOCK, D rounded up to whole panels) scratch for FP8 converted to fp16 */
};

/* Up to kernels.rows query rows of one kv head, with their partial softmax sums of the chunk. A key
 * has D components, a value Dv <= D. */
struct attn_tile {
    int rows;
    int lo, hi;                 /* keys that some row sees: the union of the ranges below */
    bool fresh;                 /* o and l are uninitialised and count as zero */
    const int *row_lo, *row_hi; /* (rows) keys each row sees, both ends included */
    const float *q;             /* (D, kernels.rows) queries, times attn_scale * log2(e) */
    float *m;                   /* (ATTN_MAX_ROWS) running maximum per row, in log2 units */
    float *l;                   /* (rows, VW) running sums of 2^(score - m) */
    float *o;                   /* (rows, Dv) running weighted sums of values */
    float *s;     /* (kernels.rows, kernels.block) scores of the block, then weights */
    float *scale; /* (ATTN_MAX_ROWS) rescaling factor of l and o for this block */
    float cap;    /* logit softcap, in log2 units; 0 = none */
    /* Relative positions: (rows, bias_stride), in log2 units. Key p of row r has bias[r, bias_own - (row_hi[r] - p)], or none
     * where that is below 0. Entries after bias_own are zeros. NULL = none. */
    const float *bias;
    size_t bias_stride;
    int bias_own;
};

/* Operations on single rows of floats. */
struct attn_row_kernels {
    /* The sum of the VW lanes of l. */
    float (*sum)(const float *l);
    /* Folds the partial (m, l, o) of one chunk into the total (tm, tl, to) of one row. */
    void (*merge)(float *tm, float *tl, float *to, float m, float l, const float *o, int dim);
    /* out = to / tl. Where tl is 0 no key was seen: out is zeros and `to` is not read. */
    void (*finish)(float tl, const float *to, float *out, int dim);
    /* 2^x */
    float (*exp2)(float x);
    void (*turn)(float *out, int dim); /* kv_turn */
    /* out[i] = scale * sum_k r[k] * table[k * stride + i] for i from `first` to n - 1, whole vectors */
    void (*relative)(const float *r, const float *table, size_t stride, int n_r, int first, int n,
                     float scale, float *out);
};

struct attn_kernels {
    int unit; /* D and Dv must be multiples of it */
    bool
        packs_own; /* needs pages of whole vectors of keys, and packs them in a layout of its own */
    int rows;      /* query rows per tile */
    int width;     /* VW */
    int block;     /* keys per block: ATTN_BLOCK or ATTN_CHUNK */
    int panel;     /* columns of V, and keys of K, in a packed panel */
    /* Loads the queries of a tile, from[r] (D) times scale, in the kernel's order. For the kernels
     * of attn_kernel.h the order is (D, kernels.rows). */
    void (*load)(const float *const *from, int rows, int dim, float scale, float *q);
    /* Attends to one block of keys with n tiles, each of which sees at least one of its keys. */
    void (*attend)(enum dtype k_type, enum dtype v_type, struct attn_tile *const *tiles, int n,
                   const struct attn_block *b, int dim, int v_dim);
    /* Packs keys [k0, k1] of a block, counted from its first, in the kernel's order, while b->next
     * is prefetched. Fills `to`. attn_kernel.h packs floats: k_out (block/panel, D, panel), v_out
     * (Dv/panel, block, panel). */
    void (*pack)(enum dtype k_type, enum dtype v_type, const struct attn_block *b, int k0, int k1,
                 int dim, int v_dim, float *k_out, float *v_out, struct attn_block *to);
    /* Packs ATTN_ROWS tokens of a cache of rows in the same order, from token `at` of a block on (a
     * multiple of ATTN_ROWS). from[i] is the row of token at + i (NULL: zeros): D components, the
     * first Dv of which are the value. rows: (ATTN_ROWS, D) scratch. v_out is laid out as if Dv
     * were D. */
    void (*pack_rows)(enum dtype type, const void *const *from, int at, int dim, int v_dim,
                      float *rows, float *k_out, float *v_out);
    const struct attn_row_kernels *row;
};

/* vnni, madd, dotprod: only for Q8_0 and Q4_0 keys, by integer dot products with 16-bit queries. */
extern const struct attn_row_kernels attn_rows_c, attn_rows_avx2, attn_rows_avx512, attn_rows_vnni,
    attn_rows_madd_avx2, attn_rows_madd_avx512, attn_rows_neon, attn_rows_dotprod;
extern const struct attn_kernels attn_kernels_c, attn_kernels_avx2, attn_kernels_avx512,
    attn_kernels_vnni, attn_kernels_madd_avx2, attn_kernels_madd_avx512, attn_kernels_amx,
    attn_kernels_neon, attn_kernels_dotprod;

#endif
