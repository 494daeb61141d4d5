/* Indexers of sparse attention for NEON. */
#define KERNELS index_kernels_neon
#include "backend/cpu/index_kernel.h"
