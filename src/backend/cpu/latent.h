/*
 * Inside the latent attention of the CPU backend: what the driver (latent.c) hands to the kernels
 * compiled per instruction set (latent_kernel.h). Nobody else includes this.
 */
#ifndef STEEL_BACKEND_CPU_LATENT_H
#define STEEL_BACKEND_CPU_LATENT_H

#include "base/cpu.h"
#include "quant/quant.h"

#include <stddef.h>

enum {
    LATENT_KEYS = 16, /* of a block, at absolute positions */
    LATENT_ROWS = 8,  /* queries that share a block's conversion to floats */
};

struct latent_kernels {
    /* to = n values of the cache, as floats */
    void (*load)(enum dtype type, const void *from, size_t at, int n, float *to);
    /* s[r][j] = q[r] . k[j], r < rows, j < LATENT_KEYS; k (LATENT_KEYS, width) */
    void (*scores)(const float *const *q, int rows, const float *k, int width,
                   float (*s)[LATENT_KEYS]);
    /* o[r] = o[r] * scale[r] + sum_j p[r][j] k[j], the first n values of each */
    void (*add)(float *const *o, int rows, const float *scale, const float (*p)[LATENT_KEYS],
                const float *k, int width, int n);
};

extern const struct latent_kernels latent_kernels_c, latent_kernels_avx2, latent_kernels_avx512;

/* The best kernels not above isa. */
static inline const struct latent_kernels *latent_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa >= ISA_AVX512)
        return &latent_kernels_avx512;
    if (isa >= ISA_AVX2)
        return &latent_kernels_avx2;
#endif
    (void)isa;
    return &latent_kernels_c;
}

#endif
