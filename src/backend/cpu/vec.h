/*
 * Float vectors for code that is written once and compiled per instruction set: the width VW and about
 * twenty operations. The flags of the including file choose: *_avx512.c, *_avx2.c, *_neon.c (and the sets that
 * include it), or plain C with VW = 1 in any other file. No operation depends on the lane: equal inputs
 * give equal bytes in every position.
 */
#ifndef STEEL_BACKEND_CPU_VEC_H
#define STEEL_BACKEND_CPU_VEC_H

#include "quant/quant.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* 2^f on [-1/2, 1/2]: minimax polynomial of degree 5 for the relative error, with 2^0 = 1 exact.
 * Its error is 0.8 ulp before rounding. */
#define EXP2_C1 0x1.62e429p-1f
#define EXP2_C2 0x1.ebf9bcp-3f
#define EXP2_C3 0x1.c6b753p-5f
#define EXP2_C4 0x1.3cea89p-7f
#define EXP2_C5 0x1.5bba15p-10f
/* Below this, 2^x is subnormal. It is taken as 0, since subnormals are slow and make no difference
 * here. */
#define EXP2_MIN -126.0f

#if defined __AVX512F__
#include <immintrin.h>

enum { VW = 16 };
#define VEC __m512
INLINE VEC vec_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
INLINE VEC vec_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE VEC vec_load_bf16(const uint16_t *p)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
INLINE void vec_store(float *p, VEC x)
{
    _mm512_storeu_ps(p, x);
}
INLINE void vec_store_f16(uint16_t *p, VEC x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void vec_store_bf16(uint16_t *p, VEC x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i r = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
INLINE VEC vec_set(float x)
{
    return _mm512_set1_ps(x);
}
INLINE VEC vec_add(VEC a, VEC b)
{
    return _mm512_add_ps(a, b);
}
INLINE VEC vec_sub(VEC a, VEC b)
{
    return _mm512_sub_ps(a, b);
}
INLINE VEC vec_mul(VEC a, VEC b)
{
    return _mm512_mul_ps(a, b);
}
INLINE VEC vec_div(VEC a, VEC b)
{
    return _mm512_div_ps(a, b);
}
INLINE VEC vec_min(VEC a, VEC b)
{
    return _mm512_min_ps(a, b);
}
INLINE VEC vec_fma(VEC a, VEC b, VEC c) /* a * b + c */
{
    return _mm512_fmadd_ps(a, b, c);
}
INLINE VEC vec_max(VEC a, VEC b)
{
    return _mm512_max_ps(a, b);
}
INLINE float vec_hmax(VEC x)
{
    return _mm512_reduce_max_ps(x);
}
INLINE float vec_sum(VEC x)
{
    return _mm512_reduce_add_ps(x);
}
/* x in lanes i with lo <= first + i <= hi, else other */
INLINE VEC vec_within(VEC x, int first, int lo, int hi, float other)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    __mmask16 in = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(lo)) &
                   _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(hi));
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), in, x);
}
INLINE VEC vec_exp2(VEC x) /* 2^x, x <= 127; 0 below EXP2_MIN; NaN stays NaN */
{
    __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP2_MIN), _CMP_NLT_UQ);
    VEC n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    VEC f = _mm512_sub_ps(x, n);
    VEC p = _mm512_fmadd_ps(_mm512_set1_ps(EXP2_C5), f, _mm512_set1_ps(EXP2_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(keep, p, n);
}

/*
 * Values of the quantised KV cache (kvtile.h):
 *   vec_byte_of4      byte j of each of VW groups of four bytes
 *   vec_nibble_of8    the nibble at bit `shift` of each of VW groups of eight, minus 8
 *   vec_bytes         VW bytes
 *   vec_nibbles       the low or high nibbles of VW bytes, minus 8
 *   vec_fp8           VW FP8 values, divided by 256
 *   vec_fp8_to_fp16   n FP8 values, divided by 256, as fp16; n is a multiple of VW
 */
INLINE VEC vec_byte_of4(const void *p, int j)
{
    __m512i x = _mm512_slli_epi32(_mm512_loadu_si512(p), (unsigned)(24 - 8 * j));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24));
}
INLINE VEC vec_nibble_of8(const void *p, int shift)
{
    __m512i x = _mm512_srli_epi32(_mm512_loadu_si512(p), (unsigned)shift);
    x = _mm512_and_si512(x, _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(x, _mm512_set1_epi32(8)));
}
INLINE VEC vec_bytes(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE VEC vec_nibbles(const void *p, bool high)
{
    const VEC levels = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_permutexvar_ps(high ? _mm512_srli_epi32(x, 4) : x,
                                 levels); /* permutexvar reads only the low four bits */
}
INLINE VEC vec_fp8(const void *p)
{
    __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    x = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbfff));
    return _mm512_cvtph_ps(x);
}
INLINE void vec_fp8_to_fp16(const uint8_t *p, int n, uint16_t *to)
{
    for (int i = 0; i + 32 <= n; i += 32) {
        __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p + i)));
        x = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16((short)0xbfff));
        _mm512_storeu_si512(to + i, x);
    }
    if (n % 32) {
        __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p + n / 32 * 32)));
        x = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbfff));
        _mm256_storeu_si256((__m256i *)(to + n / 32 * 32), x);
    }
}

#elif defined __AVX2__
#include <immintrin.h>

enum { VW = 8 };
#define VEC __m256
INLINE VEC vec_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
INLINE VEC vec_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE VEC vec_load_bf16(const uint16_t *p)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
INLINE void vec_store(float *p, VEC x)
{
    _mm256_storeu_ps(p, x);
}
INLINE void vec_store_f16(uint16_t *p, VEC x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void vec_store_bf16(uint16_t *p, VEC x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i r = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    __m256i pair = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(pair));
}
INLINE VEC vec_set(float x)
{
    return _mm256_set1_ps(x);
}
INLINE VEC vec_add(VEC a, VEC b)
{
    return _mm256_add_ps(a, b);
}
INLINE VEC vec_sub(VEC a, VEC b)
{
    return _mm256_sub_ps(a, b);
}
INLINE VEC vec_mul(VEC a, VEC b)
{
    return _mm256_mul_ps(a, b);
}
INLINE VEC vec_div(VEC a, VEC b)
{
    return _mm256_div_ps(a, b);
}
INLINE VEC vec_min(VEC a, VEC b)
{
    return _mm256_min_ps(a, b);
}
INLINE VEC vec_fma(VEC a, VEC b, VEC c)
{
    return _mm256_fmadd_ps(a, b, c);
}
INLINE VEC vec_max(VEC a, VEC b)
{
    return _mm256_max_ps(a, b);
}
INLINE float vec_hmax(VEC x)
{
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
INLINE float vec_sum(VEC x)
{
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
INLINE VEC vec_within(VEC x, int first, int lo, int hi, float other)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i at = _mm256_add_epi32(lane, _mm256_set1_epi32(first));
    __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at),
                                  _mm256_cmpgt_epi32(at, _mm256_set1_epi32(hi)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(other), _mm256_castsi256_ps(out));
}
INLINE VEC vec_exp2(VEC x)
{
    VEC keep = _mm256_cmp_ps(x, _mm256_set1_ps(EXP2_MIN), _CMP_NLT_UQ);
    VEC y = _mm256_and_ps(x, keep);
    VEC n = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    VEC f = _mm256_sub_ps(y, n);
    VEC p = _mm256_fmadd_ps(_mm256_set1_ps(EXP2_C5), f, _mm256_set1_ps(EXP2_C4));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(EXP2_C3));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(EXP2_C2));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(EXP2_C1));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    VEC scale = _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
    return _mm256_and_ps(_mm256_mul_ps(p, scale), keep);
}

INLINE VEC vec_byte_of4(const void *p, int j)
{
    __m256i x = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 24 - 8 * j);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 24));
}
INLINE VEC vec_nibble_of8(const void *p, int shift)
{
    __m256i x = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)p), shift);
    x = _mm256_and_si256(x, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(8)));
}
INLINE VEC vec_bytes(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE VEC vec_nibbles(const void *p, bool high)
{
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    x = high ? _mm256_srli_epi32(x, 4) : _mm256_and_si256(x, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(8)));
}
INLINE VEC vec_fp8(const void *p)
{
    __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    x = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((short)0xbfff));
    return _mm256_cvtph_ps(x);
}
INLINE void vec_fp8_to_fp16(const uint8_t *p, int n, uint16_t *to)
{
    for (int i = 0; i + 16 <= n; i += 16) {
        __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p + i)));
        x = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbfff));
        _mm256_storeu_si256((__m256i *)(to + i), x);
    }
    if (n % 16) {
        __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(p + n / 16 * 16)));
        x = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((short)0xbfff));
        _mm_storeu_si128((__m128i *)(to + n / 16 * 16), x);
    }
}

#elif defined STEEL_NEON
#include <arm_neon.h>

enum { VW = 4 };
#define VEC float32x4_t
INLINE VEC vec_load(const float *p)
{
    return vld1q_f32(p);
}
INLINE VEC vec_load_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
INLINE VEC vec_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
INLINE void vec_store(float *p, VEC x)
{
    vst1q_f32(p, x);
}
INLINE void vec_store_f16(uint16_t *p, VEC x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
INLINE void vec_store_bf16(uint16_t *p, VEC x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16));
}
INLINE VEC vec_set(float x)
{
    return vdupq_n_f32(x);
}
INLINE VEC vec_add(VEC a, VEC b)
{
    return vaddq_f32(a, b);
}
INLINE VEC vec_sub(VEC a, VEC b)
{
    return vsubq_f32(a, b);
}
INLINE VEC vec_mul(VEC a, VEC b)
{
    return vmulq_f32(a, b);
}
INLINE VEC vec_div(VEC a, VEC b)
{
    return vdivq_f32(a, b);
}
INLINE VEC vec_min(VEC a, VEC b)
{
    return vminq_f32(a, b);
}
INLINE VEC vec_fma(VEC a, VEC b, VEC c)
{
    return vfmaq_f32(c, a, b);
}
INLINE VEC vec_max(VEC a, VEC b)
{
    return vmaxq_f32(a, b);
}
INLINE float vec_hmax(VEC x)
{
    return vmaxvq_f32(x);
}
INLINE float vec_sum(VEC x)
{
    return vaddvq_f32(x);
}
INLINE VEC vec_within(VEC x, int first, int lo, int hi, float other)
{
    const int32_t lanes[4] = {0, 1, 2, 3};
    int32x4_t at = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(first));
    uint32x4_t in = vandq_u32(vcgeq_s32(at, vdupq_n_s32(lo)), vcleq_s32(at, vdupq_n_s32(hi)));
    return vbslq_f32(in, x, vdupq_n_f32(other));
}
INLINE VEC vec_exp2(VEC x)
{
    uint32x4_t drop = vcltq_f32(x, vdupq_n_f32(EXP2_MIN));
    VEC y = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), drop));
    VEC n = vrndnq_f32(y), f = vsubq_f32(y, n);
    VEC p = vfmaq_f32(vdupq_n_f32(EXP2_C4), vdupq_n_f32(EXP2_C5), f);
    p = vfmaq_f32(vdupq_n_f32(EXP2_C3), p, f);
    p = vfmaq_f32(vdupq_n_f32(EXP2_C2), p, f);
    p = vfmaq_f32(vdupq_n_f32(EXP2_C1), p, f);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, f);
    int32x4_t power = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    VEC scaled = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(power, 23)));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), drop));
}

INLINE VEC vec_byte_of4(const void *p, int j)
{
    int32x4_t x = vreinterpretq_s32_u8(vld1q_u8(p));
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(x, vdupq_n_s32(24 - 8 * j)), 24));
}
INLINE VEC vec_nibble_of8(const void *p, int shift)
{
    uint32x4_t x = vreinterpretq_u32_u8(vld1q_u8(p));
    x = vandq_u32(vshlq_u32(x, vdupq_n_s32(-shift)), vdupq_n_u32(15));
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(x), vdupq_n_s32(8)));
}
/* Four bytes, each in a lane of 16 bits. */
INLINE int16x4_t vec_four_bytes(const void *p)
{
    uint32_t four;
    memcpy(&four, p, 4);
    return vget_low_s16(vmovl_s8(vcreate_s8(four)));
}
INLINE VEC vec_bytes(const void *p)
{
    return vcvtq_f32_s32(vmovl_s16(vec_four_bytes(p)));
}
INLINE VEC vec_nibbles(const void *p, bool high)
{
    uint32_t four;
    memcpy(&four, p, 4);
    four = (high ? four >> 4 : four) & 0x0f0f0f0f;
    int16x4_t x = vget_low_s16(vmovl_s8(vsub_s8(vcreate_s8(four), vdup_n_s8(8))));
    return vcvtq_f32_s32(vmovl_s16(x));
}
INLINE VEC vec_fp8(const void *p)
{
    uint16x4_t x = vreinterpret_u16_s16(vshl_n_s16(vec_four_bytes(p), 7));
    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(x, vdup_n_u16(0xbfff))));
}
INLINE void vec_fp8_to_fp16(const uint8_t *p, int n, uint16_t *to)
{
    for (int i = 0; i + 8 <= n; i += 8) {
        uint16x8_t x = vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(vld1_u8(p + i)), 7));
        vst1q_u16(to + i, vandq_u16(x, vdupq_n_u16(0xbfff)));
    }
    if (n % 8) {
        uint16x4_t x = vreinterpret_u16_s16(vshl_n_s16(vec_four_bytes(p + n / 8 * 8), 7));
        vst1_u16(to + n / 8 * 8, vand_u16(x, vdup_n_u16(0xbfff)));
    }
}

#else

enum { VW = 1 };
#define VEC float
INLINE VEC vec_load(const float *p)
{
    return *p;
}
INLINE VEC vec_load_f16(const uint16_t *p)
{
    return f16_to_f32(*p);
}
INLINE VEC vec_load_bf16(const uint16_t *p)
{
    return bf16_to_f32(*p);
}
INLINE void vec_store(float *p, VEC x)
{
    *p = x;
}
INLINE void vec_store_f16(uint16_t *p, VEC x)
{
    *p = f32_to_f16(x);
}
INLINE void vec_store_bf16(uint16_t *p, VEC x)
{
    *p = f32_to_bf16(x);
}
INLINE VEC vec_set(float x)
{
    return x;
}
INLINE VEC vec_add(VEC a, VEC b)
{
    return a + b;
}
INLINE VEC vec_sub(VEC a, VEC b)
{
    return a - b;
}
INLINE VEC vec_mul(VEC a, VEC b)
{
    return a * b;
}
INLINE VEC vec_div(VEC a, VEC b)
{
    return a / b;
}
INLINE VEC vec_min(VEC a, VEC b)
{
    return a < b ? a : b;
}
INLINE VEC vec_fma(VEC a, VEC b, VEC c)
{
    return a * b + c;
}
INLINE VEC vec_max(VEC a, VEC b)
{
    return a > b ? a : b;
}
INLINE float vec_hmax(VEC x)
{
    return x;
}
INLINE float vec_sum(VEC x)
{
    return x;
}
INLINE VEC vec_within(VEC x, int first, int lo, int hi, float other)
{
    return first >= lo && first <= hi ? x : other;
}
INLINE VEC vec_exp2(VEC x)
{
    return x < EXP2_MIN ? 0.0f : exp2f(x);
}
INLINE VEC vec_byte_of4(const void *p, int j)
{
    return (float)((const int8_t *)p)[j];
}
INLINE VEC vec_nibble_of8(const void *p, int shift)
{
    return (float)((((const uint8_t *)p)[shift / 8] >> shift % 8 & 15) - 8);
}
INLINE VEC vec_bytes(const void *p)
{
    return (float)*(const int8_t *)p;
}
INLINE VEC vec_nibbles(const void *p, bool high)
{
    return (float)((*(const uint8_t *)p >> (high ? 4 : 0) & 15) - 8);
}
INLINE VEC vec_fp8(const void *p)
{
    uint8_t b = *(const uint8_t *)p;
    return f16_to_f32((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7));
}
INLINE void vec_fp8_to_fp16(const uint8_t *p, int n, uint16_t *to)
{
    for (int i = 0; i < n; i++)
        to[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
}
#endif

/* cap * tanh(x / cap) with inverse = 1 / cap. For large |x| it is cap with the sign of x. */
INLINE VEC vec_softcap(VEC x, float cap, float inverse)
{
    VEC z = vec_mul(x, vec_set(inverse * 2 * 1.44269504f)); /* 2^z = e^(2x/cap) */
    z = vec_min(vec_max(z, vec_set(-60.0f)), vec_set(60.0f));
    VEC e = vec_exp2(z);
    return vec_mul(vec_set(cap), vec_div(vec_sub(e, vec_set(1.0f)), vec_add(e, vec_set(1.0f))));
}

/* VW elements of a KV tile; `type` is a constant wherever speed matters. */
INLINE VEC vec_load_as(enum dtype type, const void *p, size_t at)
{
    if (type == DT_F32)
        return vec_load((const float *)p + at);
    if (type == DT_F16)
        return vec_load_f16((const uint16_t *)p + at);
    return vec_load_bf16((const uint16_t *)p + at);
}

INLINE void vec_store_as(enum dtype type, void *p, size_t at, VEC x)
{
    if (type == DT_F32)
        vec_store((float *)p + at, x);
    else if (type == DT_F16)
        vec_store_f16((uint16_t *)p + at, x);
    else
        vec_store_bf16((uint16_t *)p + at, x);
}

#endif
