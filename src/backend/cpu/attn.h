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

/* The score of a masked key, and the initial running maximum. They are finite, to avoid NaN, and far enough apart that
 * 2^(masked - start) is 0. */
#define ATTN_MASKED -3e38f
#define ATTN_START  -1e38f

/* kernels.block keys of one kv head. Vector i holds keys first + i*VW .. +VW-1: component d of them at
 * k[i] + d*k_stride; component d of key i*VW+j at v[i] + d/panel*v_panel + d%panel + j*v_stride, where
 * panel is the kernel's panel width. Strides count elements. Codes lie as kvtile.h says: k_stride
 * counts keys from one component, or group of them, to the next, v_stride bytes from key to key, and
 * scales of 32 components are scale_stride from those of the next 32. Vectors that hold no key visible
 * to some row point anywhere in the pool. */
struct attn_block {
    int first;
    size_t k_stride, v_stride, v_panel, scale_stride;
    const void *k[ATTN_BLOCK], *v[ATTN_BLOCK];
    const uint16_t *k_scale[ATTN_BLOCK], *v_scale[ATTN_BLOCK];
    /* For prefetching: the block after this one (never NULL; itself if there is none), where the
     * VW * D values begin that a vector's share of its page holds, and bytes of one of D such steps. */
    const struct attn_block *ahead;
    const void *k_tile[ATTN_BLOCK], *v_tile[ATTN_BLOCK];
    size_t k_step, v_step;
    uint16_t *fp16; /* (ATTN_BLOCK, D up to a whole panel) scratch: FP8 on its way */
};

/* Up to kernels.rows query rows of one kv head, with their partial softmax sums for the chunk. A key has D values, a
 * value Dv <= D. */
struct attn_tile {
    int rows;
    int lo, hi;                 /* keys some row sees: union of the ranges below */
    bool fresh;                 /* o and l are uninitialised and count as zeros */
    const int *row_lo, *row_hi; /* (rows) keys each row sees, both ends included */
    const float *q;             /* (D, kernels.rows), times attn_scale * log2(e) */
    float *m;                   /* (ATTN_MAX_ROWS) running maximum per row, in log2 units */
    float *l;                   /* (rows, VW) running sums of 2^(score - m) */
    float *o;                   /* (rows, Dv) running weighted sums of values */
    float *s;     /* (kernels.rows, kernels.block) scores, then weights, of the block */
    float *scale; /* (ATTN_MAX_ROWS) factor of this block for o and l */
    float cap;    /* of scores, in log2 units; 0 = none */
};

/* Operations on single rows of floats. */
struct attn_row_kernels {
    /* The sum of the VW lanes of l */
    float (*sum)(const float *l);
    /* Folds the partial (m, l, o) of one chunk into the total (tm, tl, to) of one row. */
    void (*merge)(float *tm, float *tl, float *to, float m, float l, const float *o, int dim);
    /* out = to / tl, or zeros where tl is 0: no key was seen and `to` is not read */
    void (*finish)(float tl, const float *to, float *out, int dim);
    /* 2^x */
    float (*exp2)(float x);
    void (*turn)(float *out, int dim); /* kv_turn */
};

struct attn_kernels {
    int unit;       /* head_dim must be a multiple */
    bool packs_own; /* needs whole vectors of keys a page, and packs them in a form of its own */
    int rows;       /* query rows per tile */
    int width;      /* VW */
    int block;      /* keys per block: ATTN_BLOCK or ATTN_CHUNK */
    int panel;      /* columns of V, and keys of K, per packed panel */
    /* The queries of a tile, from[r] (D) times scale, in the order the kernel wants: for those of
     * attn_kernel.h (D, kernels.rows). */
    void (*load)(const float *const *from, int rows, int dim, float scale, float *q);
    /* One block of keys for n tiles, each of which sees a key of it. */
    void (*attend)(enum dtype k_type, enum dtype v_type, struct attn_tile *const *tiles, int n,
                   const struct attn_block *b, int dim, int v_dim);
    /* Keys [k0, k1] of a block, counted from its first, into the kernel's own order, while b->ahead
     * is prefetched; fills `to`. attn_kernel.h: floats, k_out (block/panel, D, panel),
     * v_out (D/panel, block, panel). */
    void (*pack)(enum dtype k_type, enum dtype v_type, const struct attn_block *b, int k0, int k1,
                 int dim, float *k_out, float *v_out, struct attn_block *to);
    /* The same order from a cache of rows: tokens at .. at + ATTN_ROWS - 1 of a block, `at` a multiple,
     * whose D values, the first Dv their value, begin at from[i] (NULL: zeros). rows: (ATTN_ROWS, D)
     * scratch. v_out as if Dv were D. */
    void (*pack_rows)(enum dtype type, const void *const *from, int at, int dim, int v_dim,
                      float *rows, float *k_out, float *v_out);
    const struct attn_row_kernels *row;
};

/* vnni, madd: keys of Q8_0 or Q4_0 alone, by integer dot products with queries of 16 bits. */
extern const struct attn_row_kernels attn_rows_c, attn_rows_avx2, attn_rows_avx512, attn_rows_vnni,
    attn_rows_madd_avx2, attn_rows_madd_avx512;
extern const struct attn_kernels attn_kernels_c, attn_kernels_avx2, attn_kernels_avx512,
    attn_kernels_vnni, attn_kernels_madd_avx2, attn_kernels_madd_avx512, attn_kernels_amx;

#endif
