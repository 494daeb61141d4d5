/* Indexers of sparse attention for AVX-512. */
#define KERNELS index_kernels_avx512
#include "backend/cpu/index_kernel.h"
