/* Input rows to 8 bits with AVX-512. See xquant.h. */
#include "backend/cpu/xquant.h"

#include <immintrin.h>

static float max32(const float *x)
{
    return _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x)), _mm512_abs_ps(_mm512_loadu_ps(x + 16))));
}

static void codes32(const float *x, float inv, int8_t *q, int8_t *fine, int32_t sum[3])
{
    __m512i lost = _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) {
        __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(inv));
        __m512i n = _mm512_cvtps_epi32(v);
        __m512 rest = _mm512_sub_ps(v, _mm512_cvtepi32_ps(n));
        __m512i f = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(254.0f)));
        _mm_storeu_si128((__m128i *)(q + 16 * i), _mm512_cvtsepi32_epi8(n));
        _mm_storeu_si128((__m128i *)(fine + 16 * i), _mm512_cvtsepi32_epi8(f));
        sum[i] = _mm512_reduce_add_epi32(n);
        lost = _mm512_add_epi32(lost, f);
    }
    sum[2] = _mm512_reduce_add_epi32(lost);
}

void x_quantize_avx512(const float *x, int n_in, int first, int len, uint8_t *record)
{
    quantize(x, n_in, first, len, record);
}
