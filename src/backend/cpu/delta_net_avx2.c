/* The gated delta net for AVX2. */
#define KERNELS delta_kernels_avx2
#include "backend/cpu/delta_net_kernel.h"
