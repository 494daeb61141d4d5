/* The generic kernel with AVX2. See generic_kernel.h. */
#include <immintrin.h>

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

#include "backend/cpu/generic_kernel.h"

void mm_generic_avx2(const struct mm_call *c)
{
    generic(c);
}
