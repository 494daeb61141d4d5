/*
 * Attention kernels for AVX-512 with VNNI and Q8_0 or Q4_0 keys: 16 lanes, tiles of 8 query rows. Scores
 * by 8-bit dot products (attn_int8.h), values as in attn_avx512.c.
 */
#define KERNELS     attn_kernels_vnni
#define ROW_KERNELS attn_rows_vnni
#define ROWS        8
#define NV          2
#define INT8_SCORES 1
#include "backend/cpu/attn_kernel.h"
