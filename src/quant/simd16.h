/*
 * Sixteen floats at a time: one AVX-512 register, two AVX2 registers, four NEON registers or a plain
 * array, depending on what the including file is compiled for. Every operation is one IEEE operation per
 * lane and sums are reduced in a fixed order, so all of them give the same bits. Has only what the quantisers need.
 */
#ifndef STEEL_QUANT_SIMD16_H
#define STEEL_QUANT_SIMD16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined STEEL_NEON
#include <arm_neon.h>
#endif

/* Without vector registers, inlining everything would take a minute to compile, for a path that
 * only machines older than AVX2 take. There each step stays a call. */
#if defined __AVX2__ || defined STEEL_NEON
#define V_INLINE static inline __attribute__((always_inline))
#else
#define V_INLINE static __attribute__((noinline, unused))
#endif

#if defined(__AVX512F__)

/* Register types, the same names for every instruction set. */
typedef __m512 vf;
typedef __mmask16 vm;

V_INLINE vf v_set(float f)
{
    return _mm512_set1_ps(f);
}
V_INLINE vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
V_INLINE void v_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
V_INLINE vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
V_INLINE vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
V_INLINE vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
V_INLINE vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
V_INLINE vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
V_INLINE vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
V_INLINE vf v_abs(vf a)
{
    return _mm512_abs_ps(a);
}
V_INLINE vf v_round(vf a) /* to nearest, ties to even; |a| < 2^22 */
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
V_INLINE vm v_gt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
V_INLINE vf v_pick(vm m, vf yes, vf no)
{
    return _mm512_mask_blend_ps(m, no, yes);
}
V_INLINE vf v_add_if(vm m, vf a, vf b) /* a + (m ? b : 0) */
{
    return _mm512_mask_add_ps(a, m, a, b);
}
V_INLINE void v_store_u8(uint8_t *p, vf a) /* whole numbers 0..255 */
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a)));
}
V_INLINE vf v_load_f16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
V_INLINE vf v_load_bf16(const uint8_t *p)
{
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
V_INLINE void v_store_f16(uint8_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p,
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

typedef struct {
    __m256 a, b;
} vf;
typedef vf vm;

#define V_BOTH(op) ((vf){op(x.a, y.a), op(x.b, y.b)})

V_INLINE vf v_set(float f)
{
    return (vf){_mm256_set1_ps(f), _mm256_set1_ps(f)};
}
V_INLINE vf v_load(const float *p)
{
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
V_INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
V_INLINE vf v_add(vf x, vf y)
{
    return V_BOTH(_mm256_add_ps);
}
V_INLINE vf v_sub(vf x, vf y)
{
    return V_BOTH(_mm256_sub_ps);
}
V_INLINE vf v_mul(vf x, vf y)
{
    return V_BOTH(_mm256_mul_ps);
}
V_INLINE vf v_div(vf x, vf y)
{
    return V_BOTH(_mm256_div_ps);
}
V_INLINE vf v_min(vf x, vf y)
{
    return V_BOTH(_mm256_min_ps);
}
V_INLINE vf v_max(vf x, vf y)
{
    return V_BOTH(_mm256_max_ps);
}
V_INLINE vf v_abs(vf x)
{
    vf y = v_set(-0.0f);
    return (vf){_mm256_andnot_ps(y.a, x.a), _mm256_andnot_ps(y.b, x.b)};
}
V_INLINE vf v_round(vf x)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (vf){_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)};
}
V_INLINE vm v_gt(vf x, vf y)
{
    return (vm){_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
V_INLINE vf v_pick(vm m, vf yes, vf no)
{
    return (vf){_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
V_INLINE vf v_add_if(vm m, vf x, vf y)
{
    return (vf){_mm256_add_ps(x.a, _mm256_and_ps(m.a, y.a)),
                _mm256_add_ps(x.b, _mm256_and_ps(m.b, y.b))};
}
V_INLINE void v_store_u8(uint8_t *p, vf x)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b));
    w = _mm256_permute4x64_epi64(w, 0xd8);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
V_INLINE vf v_load_f16(const uint8_t *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
V_INLINE vf v_load_bf16(const uint8_t *p)
{
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16)));
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
V_INLINE void v_store_f16(uint8_t *p, vf x)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, NEAREST));
    _mm_storeu_si128((__m128i *)(p + 16), _mm256_cvtps_ph(x.b, NEAREST));
}

#elif defined STEEL_NEON

typedef struct {
    float32x4_t a, b, c, d;
} vf;
typedef struct {
    uint32x4_t a, b, c, d;
} vm;

#define V_FOUR(op)                                                                                 \
    {                                                                                              \
        op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)                                     \
    }

V_INLINE vf v_set(float f)
{
    float32x4_t v = vdupq_n_f32(f);
    return (vf){v, v, v, v};
}
V_INLINE vf v_load(const float *p)
{
    return (vf){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
V_INLINE void v_store(float *p, vf x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
V_INLINE vf v_add(vf x, vf y)
{
    return (vf)V_FOUR(vaddq_f32);
}
V_INLINE vf v_sub(vf x, vf y)
{
    return (vf)V_FOUR(vsubq_f32);
}
V_INLINE vf v_mul(vf x, vf y)
{
    return (vf)V_FOUR(vmulq_f32);
}
V_INLINE vf v_div(vf x, vf y)
{
    return (vf)V_FOUR(vdivq_f32);
}
V_INLINE vm v_gt(vf x, vf y)
{
    return (vm)V_FOUR(vcgtq_f32);
}
V_INLINE vf v_pick(vm m, vf x, vf y)
{
    return (vf){vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b), vbslq_f32(m.c, x.c, y.c),
                vbslq_f32(m.d, x.d, y.d)};
}
V_INLINE vf v_min(vf x, vf y) /* y where one is NaN, unlike vminq_f32 */
{
    return v_pick(v_gt(y, x), x, y);
}
V_INLINE vf v_max(vf x, vf y)
{
    return v_pick(v_gt(x, y), x, y);
}
V_INLINE vf v_abs(vf x)
{
    return (vf){vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)};
}
V_INLINE vf v_round(vf x)
{
    return (vf){vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)};
}
V_INLINE float32x4_t v_and4(uint32x4_t m, float32x4_t x)
{
    return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(x)));
}
V_INLINE vf v_add_if(vm m, vf x, vf y)
{
    y = (vf){v_and4(m.a, y.a), v_and4(m.b, y.b), v_and4(m.c, y.c), v_and4(m.d, y.d)};
    return v_add(x, y);
}
V_INLINE void v_store_u8(uint8_t *p, vf x)
{
    uint16x8_t low = vcombine_u16(vmovn_u32(vcvtq_u32_f32(x.a)), vmovn_u32(vcvtq_u32_f32(x.b)));
    uint16x8_t high = vcombine_u16(vmovn_u32(vcvtq_u32_f32(x.c)), vmovn_u32(vcvtq_u32_f32(x.d)));
    vst1q_u8(p, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
V_INLINE float32x4_t v_half4(const uint8_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
V_INLINE vf v_load_f16(const uint8_t *p)
{
    return (vf){v_half4(p), v_half4(p + 8), v_half4(p + 16), v_half4(p + 24)};
}
V_INLINE float32x4_t v_bf16x4(const uint8_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
V_INLINE vf v_load_bf16(const uint8_t *p)
{
    return (vf){v_bf16x4(p), v_bf16x4(p + 8), v_bf16x4(p + 16), v_bf16x4(p + 24)};
}
V_INLINE void v_store_f16(uint8_t *p, vf x)
{
    vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x.a)));
    vst1_u8(p + 8, vreinterpret_u8_f16(vcvt_f16_f32(x.b)));
    vst1_u8(p + 16, vreinterpret_u8_f16(vcvt_f16_f32(x.c)));
    vst1_u8(p + 24, vreinterpret_u8_f16(vcvt_f16_f32(x.d)));
}

#else /* any machine */

#include "quant/quant.h"

typedef struct {
    float v[16];
} vf;
typedef struct {
    int32_t v[16];
} vm;

#define V_EACH(expr)                                                                               \
    do {                                                                                           \
        vf r;                                                                                      \
        for (int i = 0; i < 16; i++)                                                               \
            r.v[i] = (expr);                                                                       \
        return r;                                                                                  \
    } while (0)

V_INLINE vf v_set(float f)
{
    V_EACH(f);
}
V_INLINE vf v_load(const float *p)
{
    V_EACH(p[i]);
}
V_INLINE void v_store(float *p, vf x)
{
    memcpy(p, x.v, sizeof x.v);
}
V_INLINE vf v_add(vf x, vf y)
{
    V_EACH(x.v[i] + y.v[i]);
}
V_INLINE vf v_sub(vf x, vf y)
{
    V_EACH(x.v[i] - y.v[i]);
}
V_INLINE vf v_mul(vf x, vf y)
{
    V_EACH(x.v[i] * y.v[i]);
}
V_INLINE vf v_div(vf x, vf y)
{
    V_EACH(x.v[i] / y.v[i]);
}
V_INLINE vf v_min(vf x, vf y)
{
    V_EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i]);
}
V_INLINE vf v_max(vf x, vf y)
{
    V_EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]);
}
V_INLINE vf v_abs(vf x)
{
    V_EACH(fabsf(x.v[i]));
}
V_INLINE vf v_round(vf x)
{
    /* adding 1.5 * 2^23 leaves no room for a fraction; the sign of a zero does not matter here */
    V_EACH((x.v[i] + 12582912.0f) - 12582912.0f);
}
V_INLINE vm v_gt(vf x, vf y)
{
    vm r;
    for (int i = 0; i < 16; i++)
        r.v[i] = x.v[i] > y.v[i];
    return r;
}
V_INLINE vf v_pick(vm m, vf yes, vf no)
{
    V_EACH(m.v[i] ? yes.v[i] : no.v[i]);
}
V_INLINE vf v_add_if(vm m, vf x, vf y)
{
    V_EACH(m.v[i] ? x.v[i] + y.v[i] : x.v[i]);
}
V_INLINE void v_store_u8(uint8_t *p, vf x)
{
    for (int i = 0; i < 16; i++)
        p[i] = (uint8_t)x.v[i];
}
V_INLINE vf v_load_f16(const uint8_t *p)
{
    uint16_t h[16];
    memcpy(h, p, sizeof h);
    V_EACH(f16_to_f32(h[i]));
}
V_INLINE vf v_load_bf16(const uint8_t *p)
{
    uint16_t h[16];
    memcpy(h, p, sizeof h);
    V_EACH(bf16_to_f32(h[i]));
}
V_INLINE void v_store_f16(uint8_t *p, vf x)
{
    uint16_t h[16];
    for (int i = 0; i < 16; i++)
        h[i] = f32_to_f16(x.v[i]);
    memcpy(p, h, sizeof h);
}

#endif

/* Reductions of one register: the upper half is combined with the lower. */
V_INLINE float v_hmax(vf x)
{
    float t[16];
    v_store(t, x);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++)
            t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
    return t[0];
}

#endif
