/* Packed float weights with AVX-512. */
#include "backend/cpu/gemm_vec_avx512.h"

#define NAME(x) x##_avx512

#include "backend/cpu/gemm_float_kernel.h"
