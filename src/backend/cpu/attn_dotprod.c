/*
 * Attention kernels for SDOT and Q8_0 or Q4_0 keys: 4 lanes, tiles of 4 query rows. Scores by 8-bit dot
 * products (attn_int8.h), values as in attn_neon.c.
 */
#define KERNELS     attn_kernels_dotprod
#define ROW_KERNELS attn_rows_dotprod
#define ROWS        4
#define NV          4
#define INT8_SCORES 1
#include "backend/cpu/attn_kernel.h"
