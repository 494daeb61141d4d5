/* The 512-bit vectors of gemm_int8_kernel.h and gemm_float_kernel.h, with or without VNNI. */
#ifndef STEEL_BACKEND_CPU_PANEL_AVX512_H
#define STEEL_BACKEND_CPU_PANEL_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define V_LANES               16
#define MAX_T                 8
#define VI                    __m512i
#define VF                    __m512
#define v_prefetch(p)         _mm_prefetch((const char *)(p), _MM_HINT_T1)
#define vi_zero()             _mm512_setzero_si512()
#define vi_load(p)            _mm512_loadu_si512(p)
#define vi_store(p, v)        _mm512_store_si512(p, v)
#define vi_add32(a, b)        _mm512_add_epi32(a, b)
#define vi_srln32(a, n)       _mm512_srl_epi32(a, _mm_cvtsi32_si128(n))
#define vi_set1_8(x)          _mm512_set1_epi8(x)
#define vi_set1_32(x)         _mm512_set1_epi32(x)
#define vi_and(a, b)          _mm512_and_si512(a, b)
#define vi_or_and(a, b, mask) _mm512_ternarylogic_epi32(a, b, mask, 0xf8) /* a | (b & mask) */
#define vi_sll16(a, n)        _mm512_slli_epi16(a, n)
#define vi_srl16(a, n)        _mm512_srli_epi16(a, n)
#define vi_high4(a, nib)      vi_and(vi_srl16(a, 4), nib)
#define vi_sll32(a, n)        _mm512_slli_epi32(a, n)
#define vi_srl32(a, n)        _mm512_srli_epi32(a, n)
#define vi_sra32(a, n)        _mm512_srai_epi32(a, n)
#define vi_sub8(a, b)         _mm512_sub_epi8(a, b)
#define vi_sub32(a, b)        _mm512_sub_epi32(a, b)
#define vi_to_f(a)            _mm512_cvtepi32_ps(a)
#define vi_load_u16(p)        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define vi_load_u8(p)         _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define vi_lookup(table, i)   _mm512_shuffle_epi8(table, i)
#define vi_levels(t)          _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(t)))
#define vf_from_bits(v)       _mm512_castsi512_ps(v)
#define vf_zero()             _mm512_setzero_ps()
#define vf_set1(x)            _mm512_set1_ps(x)
#define vf_load(p)            _mm512_loadu_ps(p)
#define vf_store(p, v)        _mm512_storeu_ps(p, v)
#define vf_add(a, b)          _mm512_add_ps(a, b)
#define vf_mul(a, b)          _mm512_mul_ps(a, b)
#define vf_fma(a, b, c)       _mm512_fmadd_ps(a, b, c)
#define vf_fnma(a, b, c)      _mm512_fnmadd_ps(a, b, c)
#define vf_load_f16(p)        _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))

/* Half of 2^(e - 127), exact for subnormal results too. */
static inline __m512 vf_load_e8m0_half(const uint8_t *p)
{
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    __mmask16 small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, small, tiny));
}

/* 16 FP8 codes times 1/256: the bits of E4M3 shifted into an fp16, whose exponent bias is larger by
 * 8. */
static inline __m512 vf_load_f8(const uint8_t *p)
{
    __m256i v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m256i sign = _mm256_slli_epi16(v, 1);
    /* the sign bit from `sign`, the other bits from v */
    v = _mm256_ternarylogic_epi32(_mm256_set1_epi16((short)0x8000), sign, v, 0xca);
    return _mm512_cvtph_ps(_mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80)));
}

/* The levels of 16 bytes' low nibbles (w0) and high nibbles (w1); levels: (16) */
static inline __attribute__((always_inline)) void
vf_load_levels(const uint8_t *p, const float *levels, __m512 *w0, __m512 *w1)
{
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512 table = _mm512_loadu_ps(levels);
    *w0 = _mm512_permutexvar_ps(v, table); /* reads the low four bits alone */
    *w1 = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table);
}

#ifdef __AVX512VNNI__
/* In assembly, because gcc copies the intrinsic's accumulators around in loops. */
static inline __attribute__((always_inline)) __m512i vnni_dot(__m512i acc, __m512i u, __m512i s)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
    return acc;
}
#endif
#endif
