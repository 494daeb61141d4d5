/* Packed float weights with NEON. */
#define V_LANES 8
#include "backend/cpu/gemm_vec_neon.h"

#define NAME(x) x##_neon

#include "backend/cpu/gemm_float_kernel.h"
