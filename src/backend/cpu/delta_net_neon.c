/* The gated delta net for NEON. */
#define KERNELS delta_kernels_neon
#include "backend/cpu/delta_net_kernel.h"
