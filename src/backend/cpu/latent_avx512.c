/* Latent attention for AVX-512. */
#define KERNELS latent_kernels_avx512
#include "backend/cpu/latent_kernel.h"
