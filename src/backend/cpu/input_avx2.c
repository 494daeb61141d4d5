/* Quantises input rows to 8 bits with AVX2. See input_kernel.h. */
#include <immintrin.h>
#include <stdint.h>

static inline float max32(const float *x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 m = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++)
        m = _mm256_max_ps(m, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 8 * i)));
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}

/* Stores four vectors of integers as 32 bytes and sums each 16 of them. */
static inline void store_codes(const __m256i n[4], int8_t *q, int32_t sum[2])
{
    /* packs works within 128-bit lanes; the permutation restores the order */
    __m256i a = _mm256_packs_epi32(n[0], n[1]), b = _mm256_packs_epi32(n[2], n[3]);
    __m256i v = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b),
                                            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)q, v);
    v = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
    v = _mm256_hadd_epi32(v, v);
    v = _mm256_hadd_epi32(v, v);
    sum[0] = _mm256_extract_epi32(v, 0);
    sum[1] = _mm256_extract_epi32(v, 4);
}

static inline void codes32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    __m256i n[4];
    for (int i = 0; i < 4; i++)
        n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inv)));
    store_codes(n, q, sum);
}

static inline void fine32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    __m256i n[4];
    for (int i = 0; i < 4; i++) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inv));
        __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(_mm256_cvtps_epi32(v)));
        n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(254.0f)));
    }
    store_codes(n, q, sum);
}

#include "backend/cpu/input_kernel.h"

void input_quantize_avx2(const float *x, int n_in, int first, int len, bool fine, uint8_t *record)
{
    quantize(x, n_in, first, len, fine, record);
}

void input_glu_avx2(const struct ffn *f, float *g, const float *u, int n)
{
    glu(f, g, u, n);
}
