/* Packed float weights with AVX-512. */
#include "backend/cpu/gemm_vec_avx512.h"

#define NAME(x) x##_avx512

/* 16 codes times 1/256: the bits of E4M3 shifted into a half, whose exponent's bias is 8 larger. */
static inline __m512 vf_load_f8(const uint8_t *p)
{
    __m256i v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m256i sign = _mm256_slli_epi16(v, 1);
    /* sign from one, the rest from the other */
    v = _mm256_ternarylogic_epi32(_mm256_set1_epi16((short)0x8000), sign, v, 0xca);
    return _mm512_cvtph_ps(_mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80)));
}

#include "backend/cpu/gemm_float_kernel.h"
