/* Row kernels (norms, RoPE, KV stores) for AVX2. */
#define KERNELS     row_kernels_avx2
#define KERNELS_ISA ISA_AVX2
#include "backend/cpu/rowops_kernel.h"
