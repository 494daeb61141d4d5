/*
 * Attention kernels for AVX2 and Q8_0 or Q4_0 keys: 8 lanes, tiles of 4 query rows. Scores by dot
 * products of 16-bit numbers (attn_int8.h), values as in attn_avx2.c.
 */
#define KERNELS     attn_kernels_madd_avx2
#define ROW_KERNELS attn_rows_madd_avx2
#define ROWS        4
#define NV          2
#define INT8_SCORES 1
#include "backend/cpu/attn_kernel.h"
