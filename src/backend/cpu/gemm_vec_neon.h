/*
 * NEON vectors for gemm_int8_kernel.h, gemm_float_kernel.h and panel_unpack.h: V_LANES 8, half a panel in two
 * registers, or 16 in four, as the including file says.
 */
#ifndef STEEL_BACKEND_CPU_GEMM_VEC_NEON_H
#define STEEL_BACKEND_CPU_GEMM_VEC_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_T 4
#define NEON  static inline __attribute__((always_inline))

/* Register i of a vector is field i; EACH makes a vector of the registers f(a), f(b) and so on. */
#if V_LANES == 16
typedef struct {
    uint32x4_t a, b, c, d;
} neon_ints;
typedef struct {
    float32x4_t a, b, c, d;
} neon_floats;
#define EACH(type, f) ((type){f(a, 0), f(b, 1), f(c, 2), f(d, 3)})
#else
typedef struct {
    uint32x4_t a, b;
} neon_ints;
typedef struct {
    float32x4_t a, b;
} neon_floats;
#define EACH(type, f) ((type){f(a, 0), f(b, 1)})
#endif
#define VI neon_ints
#define VF neon_floats

/* Hardware prefetches streams. */
#define v_prefetch(p) ((void)(p))

/* Keeps gcc from adding p's parts anew for every load at an offset from it. */
#define v_base(p)                                                                                  \
    ({                                                                                             \
        const uint8_t *base_ = (p);                                                                \
        __asm__("" : "+r"(base_));                                                                 \
        base_;                                                                                     \
    })

#define S32(x) vreinterpretq_s32_u32(x)
#define U8(x)  vreinterpretq_u8_u32(x)

#define vi_zero()             vi_set1_32(0)
#define vi_or_and(a, b, mask) neon_or_and(a, b, mask)
#define vf_zero()             vf_set1(0.0f)

NEON VI vi_load(const void *p)
{
#if V_LANES == 8 /* one instruction: gcc joins loads only before it schedules them */
    VI x;
    __asm__("ldp %q0, %q1, %2"
            : "=w"(x.a), "=w"(x.b)
            : "Ump"(*(const uint32x4_t *)p), "m"(*((const uint32x4_t *)p + 1)));
    return x;
#endif
#define F(r, i) vld1q_u32((const uint32_t *)p + 4 * i)
    return EACH(VI, F);
#undef F
}

NEON VI vi_set1_8(int x)
{
#define F(r, i) vreinterpretq_u32_u8(vdupq_n_u8((uint8_t)x))
    return EACH(VI, F);
#undef F
}

NEON VI vi_set1_32(int x)
{
#define F(r, i) vdupq_n_u32((uint32_t)x)
    return EACH(VI, F);
#undef F
}

NEON VI vi_and(VI x, VI y)
{
#define F(r, i) vandq_u32(x.r, y.r)
    return EACH(VI, F);
#undef F
}

NEON VI neon_or_and(VI x, VI y, VI mask) /* x | (y & mask) */
{
#define F(r, i) vorrq_u32(x.r, vandq_u32(y.r, mask.r))
    return EACH(VI, F);
#undef F
}

#define vi_mla(x, y, n) neon_mla(x, y, n)
NEON VI neon_mla(VI x, VI y, const int n) /* x + y * n */
{
#define F(r, i) vmlaq_n_u32(x.r, y.r, (uint32_t)n)
    return EACH(VI, F);
#undef F
}

/* Shifts by constants, and by any number. */
NEON VI vi_sll16(VI x, const int n)
{
#define F(r, i) vreinterpretq_u32_u16(vshlq_n_u16(vreinterpretq_u16_u32(x.r), n))
    return EACH(VI, F);
#undef F
}

NEON VI vi_srl16(VI x, const int n)
{
#define F(r, i) vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(x.r), n))
    return EACH(VI, F);
#undef F
}

NEON VI vi_sll32(VI x, const int n)
{
#define F(r, i) vshlq_n_u32(x.r, n)
    return EACH(VI, F);
#undef F
}

NEON VI vi_srl32(VI x, const int n)
{
#define F(r, i) vshrq_n_u32(x.r, n)
    return EACH(VI, F);
#undef F
}

NEON VI vi_sra32(VI x, const int n)
{
#define F(r, i) vreinterpretq_u32_s32(vshrq_n_s32(S32(x.r), n))
    return EACH(VI, F);
#undef F
}

NEON VI vi_srln32(VI x, int n)
{
#define F(r, i) vshlq_u32(x.r, vdupq_n_s32(-n))
    return EACH(VI, F);
#undef F
}

/* The high nibbles. */
NEON VI vi_high4(VI x, VI nib)
{
    (void)nib;
#define F(r, i) vreinterpretq_u32_u8(vshrq_n_u8(U8(x.r), 4))
    return EACH(VI, F);
#undef F
}

NEON VI vi_sub8(VI x, VI y)
{
#define F(r, i) vreinterpretq_u32_u8(vsubq_u8(U8(x.r), U8(y.r)))
    return EACH(VI, F);
#undef F
}

NEON VI vi_sub32(VI x, VI y)
{
#define F(r, i) vsubq_u32(x.r, y.r)
    return EACH(VI, F);
#undef F
}

NEON VF vi_to_f(VI x)
{
#define F(r, i) vcvtq_f32_s32(S32(x.r))
    return EACH(VF, F);
#undef F
}

NEON VI vi_load_u16(const void *p)
{
#define F(r, i) vmovl_u16(vld1_u16((const uint16_t *)p + 4 * i))
    return EACH(VI, F);
#undef F
}

/* Bytes 4i to 4i + 3 of x, a lane each. */
NEON uint32x4_t neon_four(const uint8_t *p, int i)
{
    uint16x8_t x = vmovl_u8(vld1_u8(p + i / 2 * 8));
    return vmovl_u16(i % 2 ? vget_high_u16(x) : vget_low_u16(x));
}

NEON VI vi_load_u8(const uint8_t *p)
{
#define F(r, i) neon_four(p, i)
    return EACH(VI, F);
#undef F
}

NEON VI vi_levels(const uint8_t *table)
{
#define F(r, i) vreinterpretq_u32_u8(vld1q_u8(table))
    return EACH(VI, F);
#undef F
}

NEON VI vi_lookup(VI table, VI x)
{
#define F(r, i) vreinterpretq_u32_u8(vqtbl1q_u8(U8(table.a), U8(x.r)))
    return EACH(VI, F);
#undef F
}

NEON void vi_store(uint8_t *p, VI x)
{
    uint32_t *to = (uint32_t *)p;
    vst1q_u32(to, x.a);
    vst1q_u32(to + 4, x.b);
#if V_LANES == 16
    vst1q_u32(to + 8, x.c);
    vst1q_u32(to + 12, x.d);
#endif
}

NEON VF vf_from_bits(VI x)
{
#define F(r, i) vreinterpretq_f32_u32(x.r)
    return EACH(VF, F);
#undef F
}

NEON VF vf_set1(float x)
{
#define F(r, i) vdupq_n_f32(x)
    return EACH(VF, F);
#undef F
}

NEON VF vf_load(const float *p)
{
#define F(r, i) vld1q_f32(p + 4 * i)
    return EACH(VF, F);
#undef F
}

NEON void vf_store(float *p, VF x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
#if V_LANES == 16
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
#endif
}

NEON VF vf_add(VF x, VF y)
{
#define F(r, i) vaddq_f32(x.r, y.r)
    return EACH(VF, F);
#undef F
}

NEON VF vf_mul(VF x, VF y)
{
#define F(r, i) vmulq_f32(x.r, y.r)
    return EACH(VF, F);
#undef F
}

NEON VF vf_fma(VF x, VF y, VF z) /* x * y + z */
{
#define F(r, i) vfmaq_f32(z.r, x.r, y.r)
    return EACH(VF, F);
#undef F
}

NEON VF vf_fnma(VF x, VF y, VF z) /* z - x * y */
{
#define F(r, i) vfmsq_f32(z.r, x.r, y.r)
    return EACH(VF, F);
#undef F
}

NEON VF vf_load_f16(const void *p)
{
#define F(r, i) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p + 4 * i)))
    return EACH(VF, F);
#undef F
}

/* Four FP8 codes times 1/256: the bits of E4M3 shifted into an fp16, whose exponent bias is larger by
 * 8. */
NEON float32x4_t neon_f8(const uint8_t *p, int i)
{
    uint16x8_t x = vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(vld1_u8(p + i / 2 * 8)), 7));
    float16x8_t h = vreinterpretq_f16_u16(vandq_u16(x, vdupq_n_u16(0xbfff)));
    return vcvt_f32_f16(i % 2 ? vget_high_f16(h) : vget_low_f16(h));
}

NEON VF vf_load_f8(const uint8_t *p)
{
#define F(r, i) neon_f8(p, i)
    return EACH(VF, F);
#undef F
}

/* Four levels of the nibbles in the bytes of v, a byte a lane of 32 bits. */
NEON float32x4_t neon_levels(uint8x16x4_t table, uint32x4_t v)
{
    uint32x4_t at = vmlaq_u32(vdupq_n_u32(0x03020100), v, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(at)));
}

/* The levels of 16 bytes' low nibbles (w0) and high nibbles (w1); levels: (16) */
NEON void vf_load_levels(const uint8_t *p, const float *levels, VF *w0, VF *w1)
{
    const uint8_t *t = (const uint8_t *)levels;
    const uint8x16x4_t table = {
        {vld1q_u8(t), vld1q_u8(t + 16), vld1q_u8(t + 32), vld1q_u8(t + 48)}};
    uint8x16_t v = vld1q_u8(p), low = vandq_u8(v, vdupq_n_u8(15)), high = vshrq_n_u8(v, 4);
    uint16x8_t a = vmovl_u8(vget_low_u8(low)), b = vmovl_u8(vget_high_u8(low));
    uint16x8_t c = vmovl_u8(vget_low_u8(high)), d = vmovl_u8(vget_high_u8(high));
    uint32x4_t x[4] = {vmovl_u16(vget_low_u16(a)), vmovl_u16(vget_high_u16(a)),
                       vmovl_u16(vget_low_u16(b)), vmovl_u16(vget_high_u16(b))};
    uint32x4_t y[4] = {vmovl_u16(vget_low_u16(c)), vmovl_u16(vget_high_u16(c)),
                       vmovl_u16(vget_low_u16(d)), vmovl_u16(vget_high_u16(d))};
#define F(r, i) neon_levels(table, x[i])
    *w0 = EACH(VF, F);
#undef F
#define F(r, i) neon_levels(table, y[i])
    *w1 = EACH(VF, F);
#undef F
}

/* Half of 2^(e - 127), exact for subnormal results too. */
NEON float32x4_t neon_e8m0_half(uint32x4_t e)
{
    uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    uint32x4_t tiny = vshlq_u32(vdupq_n_u32(0x00200000), S32(e));
    return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), tiny, normal));
}

NEON VF vf_load_e8m0_half(const uint8_t *p)
{
    VI e = vi_load_u8(p);
#define F(r, i) neon_e8m0_half(e.r)
    return EACH(VF, F);
#undef F
}

/* Signed 8-bit codes, as panels have them on ARM, and tables of value + 128 as signed values. */
#define vi_load8(p)    vi_load(p)
#define vi_start(init) ((void)(init), vi_zero())
#define vi_table(t)    vi_sub8(vi_levels(t), vi_set1_8(0x80))

#endif
