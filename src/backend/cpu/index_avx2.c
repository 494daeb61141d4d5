/* Indexers of sparse attention for AVX2. */
#define KERNELS index_kernels_avx2
#include "backend/cpu/index_kernel.h"
