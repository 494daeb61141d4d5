/* State-space models and short convolutions for AVX2. */
#define KERNELS ssm_kernels_avx2
#include "backend/cpu/ssm_kernel.h"
