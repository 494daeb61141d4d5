/* State-space models and short convolutions for NEON. */
#define KERNELS ssm_kernels_neon
#include "backend/cpu/ssm_kernel.h"
