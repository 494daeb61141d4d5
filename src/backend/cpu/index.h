/*
 * The interface between the indexers of sparse attention (index.c) and their kernels, which are compiled per instruction
 * set (index_kernel.h). Private to these files.
 */
#ifndef STEEL_BACKEND_CPU_INDEX_H
#define STEEL_BACKEND_CPU_INDEX_H

#include "base/cpu.h"
#include "quant/quant.h"

#include <stdbool.h>
#include <stddef.h>

enum { INDEX_LANES = 16 }; /* heads are padded to a multiple of it */

struct index_kernels {
    /*
     * out[i] = sum_h w[h] * max(0, q_h . k_i) for n keys. q: (dim, heads) transposed, heads a multiple of INDEX_LANES;
     * w: (heads), zeros for padding. row(arg, i) is the key i of `type`, 4 rows of floats at a time go to `rows`.
     */
    void (*keys)(const float *q, const float *w, int heads, int dim, enum dtype type,
                 const void *(*row)(void *arg, int i), void *arg, int n, float *rows, float *out);
    /* best[h] = max(best[h], q_h . k_i) over n keys. */
    void (*block)(const float *q, int heads, int dim, enum dtype type,
                  const void *(*row)(void *arg, int i), void *arg, int n, float *rows, float *best);
};

extern const struct index_kernels index_kernels_c, index_kernels_avx2, index_kernels_avx512,
    index_kernels_neon;

/* The best kernels that isa supports. */
static inline const struct index_kernels *index_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa_has(isa, ISA_AVX512))
        return &index_kernels_avx512;
    if (isa_has(isa, ISA_AVX2))
        return &index_kernels_avx2;
#elif defined __aarch64__
    if (isa_has(isa, ISA_NEON))
        return &index_kernels_neon;
#endif
    (void)isa;
    return &index_kernels_c;
}

#endif
