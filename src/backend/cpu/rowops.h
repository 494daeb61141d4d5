/*
 * Row kernels compiled per instruction set (rowops_kernel.h): norms, and what attn_in does to one token
 * after the projection. Private to rowops.c and attn_post.c.
 */
#ifndef STEEL_BACKEND_CPU_ROWOPS_H
#define STEEL_BACKEND_CPU_ROWOPS_H

#include "backend/batch.h"
#include "base/cpu.h"

struct row_kernels {
    enum isa isa;
    /* x += d (or NULL); n = norm(x), which is one; one row of width floats; n may be x */
    void (*add_norm)(float *x, const float *d, const struct norm *norm, float *n, int width);
    /* One head: to = rotated(norm(from)); rope: n_rot/2 cosines, then sines */
    void (*head)(const float *from, const struct norm *norm, const float *rope, int n_rot, int dim,
                 float *to);
    /* dst[i] = from[i], stored as type, stride elements apart (V: 1, K: page_len; whole blocks: 1) */
    void (*store)(enum dtype type, const float *from, int dim, void *dst, size_t at, size_t stride);
    /* A head (dim) becomes token `off` of a tile of keys or values (kvtile.h). */
    void (*store_head)(enum dtype type, const float *from, int dim, void *tile, bool keys,
                       int page_len, int off);
    void (*turn)(float *x, int dim); /* kv_turn */
};

extern const struct row_kernels row_kernels_c, row_kernels_avx2, row_kernels_avx512;

/* The best kernels that isa includes. */
static inline const struct row_kernels *row_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa_has(isa, ISA_AVX512))
        return &row_kernels_avx512;
    if (isa_has(isa, ISA_AVX2))
        return &row_kernels_avx2;
#endif
    (void)isa;
    return &row_kernels_c;
}

#endif
