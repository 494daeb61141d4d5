/* Attention kernels for AVX2: 8 lanes, tiles of 4 query rows (8 accumulators of 16 registers). */
#define KERNELS     attn_kernels_avx2
#define ROW_KERNELS attn_rows_avx2
#define ROWS        4
#define NV          2
#include "backend/cpu/attn_kernel.h"
