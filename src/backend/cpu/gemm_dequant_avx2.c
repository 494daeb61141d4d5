/* Any weight, dequantised to floats, with AVX2. See gemm_dequant_kernel.h. */
#include <immintrin.h>

#define NAME(x)        x##_avx2
#define V_T            __m256
#define V_LEN          8
#define V_ZERO()       _mm256_setzero_ps()
#define V_LOAD(p)      _mm256_loadu_ps(p)
#define V_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define V_SUM(v)       sum8(v)

static inline float sum8(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

#include "backend/cpu/gemm_dequant_kernel.h"
