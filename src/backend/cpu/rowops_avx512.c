/* Row kernels (norms, RoPE, KV stores) for AVX-512. */
#define KERNELS     row_kernels_avx512
#define KERNELS_ISA ISA_AVX512
#include "backend/cpu/rowops_kernel.h"
