/* Packed float weights with AVX2. */
#include "backend/cpu/gemm_vec_avx2.h"

#define NAME(x) x##_avx2

/* 8 FP8 codes times 1/256: the bits of E4M3 shifted into an fp16, whose exponent bias is larger by
 * 8. */
static inline __m256 vf_load_f8(const uint8_t *p)
{
    __m128i v = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x7f)), 7);
    return _mm256_cvtph_ps(_mm_or_si128(sign, rest));
}

#include "backend/cpu/gemm_float_kernel.h"
