/*
 * The kernels of matrix products, one function per technique and instruction set. Each takes every format
 * that its row of the pick table names (pick.c), and dispatches on the format itself.
 *   gemm_int8     packed panels times 8-bit inputs, by dot products of bytes (on AMX and I8MM: tiles)
 *   gemm_bf16     packed panels converted to bf16, times bf16 inputs, on AMX tiles
 *   gemm_split    packed float weights and inputs, each as a sum of two bf16, on AMX tiles
 *   gemm_float    packed float weights times float inputs
 *   gemm_dequant  any weight, from the file's blocks or from panels: a few rows are dequantised exactly and
 *                 multiplied with float inputs. Slow, but always available
 */
#ifndef STEEL_BACKEND_CPU_GEMM_KERNELS_H
#define STEEL_BACKEND_CPU_GEMM_KERNELS_H

#include "backend/cpu/panel.h"

void gemm_int8_avx2(const struct gemm_call *c);
void gemm_int8_avx512(const struct gemm_call *c);
void gemm_int8_vnni(const struct gemm_call *c);
void gemm_int8_neon(const struct gemm_call *c);
void gemm_int8_dotprod(const struct gemm_call *c);
void gemm_int8_i8mm(const struct gemm_call *c);
void gemm_int8_amx(const struct gemm_call *c);
void gemm_bf16_amx(const struct gemm_call *c);
void gemm_split_amx(const struct gemm_call *c);
void gemm_float_avx2(const struct gemm_call *c);
void gemm_float_avx512(const struct gemm_call *c);
void gemm_float_neon(const struct gemm_call *c);
void gemm_dequant_avx2(const struct gemm_call *c);
void gemm_dequant_avx512(const struct gemm_call *c);
void gemm_dequant_neon(const struct gemm_call *c);

/* Bytes of scratch that the kernels need. */
size_t gemm_int8_scratch_amx(int n_in);  /* zeroed before the first call */
size_t gemm_int8_scratch_i8mm(int n_in); /* likewise */

/* chunks, sums, and tiles of two panels and of the next two */
static inline size_t gemm_bf16_scratch(int n_in)
{
    return (size_t)(32 << 10) + (size_t)n_in * 4 * GEMM_PANEL * 2;
}

/* sums, and two panels as pairs of bf16 */
static inline size_t gemm_split_scratch(int n_in)
{
    return (size_t)(8 << 10) + (size_t)n_in * 4 * GEMM_PANEL * 2;
}

enum { DEQUANT_ROWS = 4 }; /* weight rows that are dequantised at a time */

static inline size_t gemm_dequant_stride(int n_in)
{
    return ((size_t)n_in + 15) & ~(size_t)15;
}

static inline size_t gemm_dequant_scratch(int n_in)
{
    return gemm_dequant_stride(n_in) * DEQUANT_ROWS * sizeof(float);
}

/* Whether passes of one or two input rows (float weights: of any number) prefetch in software. Set
 * before the first pass. AMD's hardware prefetchers do better alone. Intel's alone reach half of
 * the memory bandwidth, with software prefetching all of it. */
extern bool gemm_prefetch_few;

#endif
