/* Attention kernels for AVX-512 without VNNI, for keys of Q8_0 and Q4_0: 16 lanes, tiles of 8 query rows;
 * scores by dot products of 16-bit numbers, values as attn_avx512.c has them. */
#define KERNELS     attn_kernels_madd_avx512
#define ROW_KERNELS attn_rows_madd_avx512
#define ROWS        8
#define NV          2
#define INT8_SCORES 1
#include "backend/cpu/attn_kernel.h"
