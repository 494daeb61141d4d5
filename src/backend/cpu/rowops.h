/*
 * Row kernels, compiled per instruction set (rowops_kernel.h): norms, RoPE and stores to the KV cache.
 * Private to rowops.c, attn_post.c and latent.c.
 */
#ifndef STEEL_BACKEND_CPU_ROWOPS_H
#define STEEL_BACKEND_CPU_ROWOPS_H

#include "backend/batch.h"
#include "base/cpu.h"

struct row_kernels {
    enum isa isa;
    /* x += d (NULL: nothing to add); n = norm(x), for any norm but NORM_NONE. One row of `width`
     * floats; n may be x. */
    void (*add_norm)(float *x, const float *d, const struct norm *norm, float *n, int width);
    /* One head: to = RoPE(norm(from)). rope: n_rot/2 cosines, then as many sines. */
    void (*head)(const float *from, const struct norm *norm, const float *rope, int n_rot, int dim,
                 float *to);
    /* dst[at + i * stride] = from[i], converted to type. Quantised types store whole blocks with
     * stride 1. */
    void (*store)(enum dtype type, const float *from, int dim, void *dst, size_t at, size_t stride);
    /* Stores a head (dim) as token `off` of a tile of keys or values (kvtile.h). */
    void (*store_head)(enum dtype type, const float *from, int dim, void *tile, bool keys,
                       int page_len, int off);
    void (*turn)(float *x, int dim); /* kv_turn */
};

extern const struct row_kernels row_kernels_c, row_kernels_avx2, row_kernels_avx512,
    row_kernels_neon;

/* The best kernels that isa supports. */
static inline const struct row_kernels *row_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa_has(isa, ISA_AVX512))
        return &row_kernels_avx512;
    if (isa_has(isa, ISA_AVX2))
        return &row_kernels_avx2;
#elif defined __aarch64__
    if (isa_has(isa, ISA_NEON))
        return &row_kernels_neon;
#endif
    (void)isa;
    return &row_kernels_c;
}

#endif
