/* Latent attention for AVX2. */
#define KERNELS latent_kernels_avx2
#include "backend/cpu/latent_kernel.h"
