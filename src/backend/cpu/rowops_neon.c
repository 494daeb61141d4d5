/* Row kernels (norms, RoPE, KV stores) for NEON. */
#define KERNELS     row_kernels_neon
#define KERNELS_ISA ISA_NEON
#include "backend/cpu/rowops_kernel.h"
