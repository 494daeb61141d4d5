/* Kernels for many input rows: packed panels are unpacked once into scratch, then multiplied. */
#ifndef STEEL_BACKEND_CPU_GEMM_H
#define STEEL_BACKEND_CPU_GEMM_H

#include "backend/cpu/panel.h"

#define GEMM_KERNELS(isa)                                                                          \
    void mm_gemm_q4k_##isa(const struct mm_call *c);                                               \
    void mm_gemm_q5k_##isa(const struct mm_call *c);                                               \
    void mm_gemm_q6k_##isa(const struct mm_call *c);                                               \
    void mm_gemm_iq4xs_##isa(const struct mm_call *c);                                             \
    void mm_gemm_q4_0_##isa(const struct mm_call *c);                                              \
    void mm_gemm_iq4nl_##isa(const struct mm_call *c);                                             \
    void mm_gemm_mxfp4_##isa(const struct mm_call *c);                                             \
    void mm_gemm_q8_0_##isa(const struct mm_call *c);

GEMM_KERNELS(amx)
size_t mm_gemm_scratch_amx(int n_in); /* bytes; zeroed before the first call */

/* The same on bf16 tiles, from inputs as halves. */
#define GEMM16_KERNELS(isa)                                                                        \
    void mm_gemm16_q4k_##isa(const struct mm_call *c);                                             \
    void mm_gemm16_q5k_##isa(const struct mm_call *c);                                             \
    void mm_gemm16_q6k_##isa(const struct mm_call *c);                                             \
    void mm_gemm16_iq4xs_##isa(const struct mm_call *c);                                           \
    void mm_gemm16_q4_0_##isa(const struct mm_call *c);                                            \
    void mm_gemm16_iq4nl_##isa(const struct mm_call *c);                                           \
    void mm_gemm16_mxfp4_##isa(const struct mm_call *c);                                           \
    void mm_gemm16_q8_0_##isa(const struct mm_call *c);

GEMM16_KERNELS(amx)

/* Bytes of scratch: chunks, sums, and twice two panels as bf16. */
static inline size_t gemm16_scratch(int n_in)
{
    return (size_t)(32 << 10) + (size_t)n_in * 4 * MM_PANEL * 2;
}

/* x (n) to bf16 */
void x_halves_amx(const float *x, int n, uint16_t *out);

#endif
