/* Input rows to 8 bits with AVX2. See xquant.h. */
#include "backend/cpu/xquant.h"

#include <immintrin.h>

static float max32(const float *x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 m = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++)
        m = _mm256_max_ps(m, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 8 * i)));
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}

static int32_t sum8(__m256i v)
{
    __m128i u = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    u = _mm_add_epi32(u, _mm_unpackhi_epi64(u, u));
    return _mm_cvtsi128_si32(u) + _mm_extract_epi32(u, 1);
}

static void store16(int8_t *dst, __m256i a, __m256i b)
{
    /* packs works in 128-bit lanes: put the quarters back in order before the last step */
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    __m128i c = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)dst, c);
}

static void codes32(const float *x, float inv, int8_t *q, int8_t *fine, int32_t sum[3])
{
    __m256i lost = _mm256_setzero_si256();
    for (int i = 0; i < 2; i++) {
        __m256i n[2], f[2];
        for (int j = 0; j < 2; j++) {
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 16 * i + 8 * j), _mm256_set1_ps(inv));
            n[j] = _mm256_cvtps_epi32(v);
            __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(n[j]));
            f[j] = _mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(254.0f)));
        }
        store16(q + 16 * i, n[0], n[1]);
        store16(fine + 16 * i, f[0], f[1]);
        sum[i] = sum8(_mm256_add_epi32(n[0], n[1]));
        lost = _mm256_add_epi32(lost, _mm256_add_epi32(f[0], f[1]));
    }
    sum[2] = sum8(lost);
}

void x_quantize_avx2(const float *x, int n_in, int first, int len, uint8_t *record)
{
    quantize(x, n_in, first, len, record);
}
