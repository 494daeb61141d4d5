/* State-space models and short convolutions for AVX-512. */
#define KERNELS ssm_kernels_avx512
#include "backend/cpu/ssm_kernel.h"
