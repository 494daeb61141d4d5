/* Attention kernels for NEON: 4 lanes, tiles of 4 query rows (16 accumulators of 32 registers). */
#define KERNELS     attn_kernels_neon
#define ROW_KERNELS attn_rows_neon
#define ROWS        4
#define NV          4
#include "backend/cpu/attn_kernel.h"
