/* The kernels that serve every format from the file's own blocks: exact dequantisation of a few
 * rows into scratch, then float dot products. Slow, right, and always there. */
#ifndef STEEL_BACKEND_CPU_GENERIC_H
#define STEEL_BACKEND_CPU_GENERIC_H

#include "backend/cpu/matmul.h"

enum { GENERIC_ROWS = 4 }; /* weight rows dequantised at a time */

static inline size_t mm_generic_stride(int n_in)
{
    return ((size_t)n_in + 15) & ~(size_t)15;
}

static inline size_t mm_generic_scratch(int n_in)
{
    return mm_generic_stride(n_in) * GENERIC_ROWS * sizeof(float);
}

void mm_generic_avx2(const struct mm_call *c);
void mm_generic_avx512(const struct mm_call *c);

#endif
