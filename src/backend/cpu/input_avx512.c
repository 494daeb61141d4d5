/* Quantises input rows to 8 bits with AVX-512. See input_kernel.h. */
#include <immintrin.h>
#include <stdint.h>

static inline float max32(const float *x)
{
    return _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x)), _mm512_abs_ps(_mm512_loadu_ps(x + 16))));
}

/* Stores two vectors of integers as bytes and sums each. */
static inline void store_codes(__m512i a, __m512i b, int8_t *q, int32_t sum[2])
{
    __m256i v = _mm256_set_m128i(_mm512_cvtsepi32_epi8(b), _mm512_cvtsepi32_epi8(a));
    _mm256_storeu_si256((__m256i *)q, v);
    v = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
    v = _mm256_hadd_epi32(v, v);
    v = _mm256_hadd_epi32(v, v);
    sum[0] = _mm256_extract_epi32(v, 0);
    sum[1] = _mm256_extract_epi32(v, 4);
}

static inline void codes32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    __m512 s = _mm512_set1_ps(inv);
    store_codes(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), s)),
                _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), s)), q, sum);
}

/* (v - round(v)) * 254 of v = x * inv */
static inline __m512i lost16(const float *x, float inv)
{
    __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inv));
    __m512 rest = _mm512_sub_ps(v, _mm512_cvtepi32_ps(_mm512_cvtps_epi32(v)));
    return _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(254.0f)));
}

static inline void fine32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    store_codes(lost16(x, inv), lost16(x + 16, inv), q, sum);
}

#include "backend/cpu/input_kernel.h"

void input_quantize_avx512(const float *x, int n_in, int first, int len, bool fine, uint8_t *record)
{
    quantize(x, n_in, first, len, fine, record);
}

void input_glu_avx512(const struct ffn *f, float *g, const float *u, int n)
{
    glu(f, g, u, n);
}
