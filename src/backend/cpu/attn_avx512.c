/* Attention kernels for AVX-512: 16 lanes, tiles of 8 query rows (16 accumulators of 32 registers). */
#define KERNELS     attn_kernels_avx512
#define ROW_KERNELS attn_rows_avx512
#define ROWS        8
#define NV          2
#include "backend/cpu/attn_kernel.h"
