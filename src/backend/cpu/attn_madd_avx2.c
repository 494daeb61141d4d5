/* Attention kernels for AVX2, for keys of Q8_0 and Q4_0: 8 lanes, tiles of 4 query rows; scores by dot
 * products of 16-bit numbers, values as attn_avx2.c has them. */
#define KERNELS     attn_kernels_madd_avx2
#define ROW_KERNELS attn_rows_madd_avx2
#define ROWS        4
#define NV          2
#define INT8_SCORES 1
#include "backend/cpu/attn_kernel.h"
