/* Any weight, dequantised to floats, with AVX-512. See gemm_dequant_kernel.h. */
#include <immintrin.h>

#define NAME(x)        x##_avx512
#define V_T            __m512
#define V_LEN          16
#define V_ZERO()       _mm512_setzero_ps()
#define V_LOAD(p)      _mm512_loadu_ps(p)
#define V_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define V_SUM(v)       _mm512_reduce_add_ps(v)

#include "backend/cpu/gemm_dequant_kernel.h"
