/* The gated delta net for AVX-512. */
#define KERNELS delta_kernels_avx512
#include "backend/cpu/delta_net_kernel.h"
