/* Pairs of NEON vectors, for gemm_int8_kernel.h and gemm_float_kernel.h: half a panel (8 rows). */
#ifndef STEEL_BACKEND_CPU_GEMM_VEC_NEON_H
#define STEEL_BACKEND_CPU_GEMM_VEC_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#define V_LANES 8
#define MAX_T   4

typedef struct {
    uint32x4_t a, b;
} neon_ints;
typedef struct {
    float32x4_t a, b;
} neon_floats;
#define VI neon_ints
#define VF neon_floats

#define NEON static inline __attribute__((always_inline))

/* Hardware prefetches streams. */
#define v_prefetch(p) ((void)(p))

/* The same operation on both halves, of bytes, 16-bit or 32-bit lanes. */
#define NEON_8(op, x, ...)                                                                         \
    ((neon_ints){vreinterpretq_u32_u8(op(vreinterpretq_u8_u32((x).a), __VA_ARGS__)),               \
                 vreinterpretq_u32_u8(op(vreinterpretq_u8_u32((x).b), __VA_ARGS__))})
#define NEON_16(op, x, n)                                                                          \
    ((neon_ints){vreinterpretq_u32_u16(op(vreinterpretq_u16_u32((x).a), n)),                       \
                 vreinterpretq_u32_u16(op(vreinterpretq_u16_u32((x).b), n))})
#define NEON_32(op, x, n) ((neon_ints){op((x).a, n), op((x).b, n)})

#define vi_set1_8(x)          neon_set8((uint8_t)(x))
#define vi_set1_32(x)         neon_set32((uint32_t)(x))
#define vi_zero()             neon_set32(0)
#define vi_or_and(a, b, mask) neon_or_and(a, b, mask)
#define vi_sll16(a, n)        NEON_16(vshlq_n_u16, a, n)
#define vi_srl16(a, n)        NEON_16(vshrq_n_u16, a, n)
#define vi_high4(a, nib)      ((void)(nib), NEON_8(vshrq_n_u8, a, 4))
#define vi_sll32(a, n)        NEON_32(vshlq_n_u32, a, n)
#define vi_srl32(a, n)        NEON_32(vshrq_n_u32, a, n)
#define vi_sra32(x, n)                                                                             \
    ((neon_ints){vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32((x).a), n)),              \
                 vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32((x).b), n))})
#define vf_zero()  neon_setf(0.0f)
#define vf_set1(x) neon_setf(x)

NEON VI vi_load(const void *p)
{
    const uint8_t *from = p;
    return (VI){vreinterpretq_u32_u8(vld1q_u8(from)), vreinterpretq_u32_u8(vld1q_u8(from + 16))};
}

NEON VI neon_set8(uint8_t x)
{
    uint32x4_t v = vreinterpretq_u32_u8(vdupq_n_u8(x));
    return (VI){v, v};
}

NEON VI neon_set32(uint32_t x)
{
    return (VI){vdupq_n_u32(x), vdupq_n_u32(x)};
}

NEON VI vi_and(VI x, VI y)
{
    return (VI){vandq_u32(x.a, y.a), vandq_u32(x.b, y.b)};
}

NEON VI neon_or_and(VI x, VI y, VI mask) /* x | (y & mask) */
{
    return (VI){vorrq_u32(x.a, vandq_u32(y.a, mask.a)), vorrq_u32(x.b, vandq_u32(y.b, mask.b))};
}

NEON VI vi_sub32(VI x, VI y)
{
    return (VI){vsubq_u32(x.a, y.a), vsubq_u32(x.b, y.b)};
}

NEON VF vi_to_f(VI x)
{
    return (VF){vcvtq_f32_s32(vreinterpretq_s32_u32(x.a)),
                vcvtq_f32_s32(vreinterpretq_s32_u32(x.b))};
}

NEON VI vi_load_u16(const void *p)
{
    uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p));
    return (VI){vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)};
}

NEON VI vi_load_u8(const void *p)
{
    uint16x8_t x = vmovl_u8(vld1_u8(p));
    return (VI){vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)};
}

NEON VI vi_levels(const uint8_t *table)
{
    uint32x4_t v = vreinterpretq_u32_u8(vld1q_u8(table));
    return (VI){v, v};
}

NEON VI vi_lookup(VI table, VI i)
{
    uint8x16_t t = vreinterpretq_u8_u32(table.a);
    return (VI){vreinterpretq_u32_u8(vqtbl1q_u8(t, vreinterpretq_u8_u32(i.a))),
                vreinterpretq_u32_u8(vqtbl1q_u8(t, vreinterpretq_u8_u32(i.b)))};
}

NEON VF vf_from_bits(VI x)
{
    return (VF){vreinterpretq_f32_u32(x.a), vreinterpretq_f32_u32(x.b)};
}

NEON VF neon_setf(float x)
{
    return (VF){vdupq_n_f32(x), vdupq_n_f32(x)};
}

NEON VF vf_load(const float *p)
{
    return (VF){vld1q_f32(p), vld1q_f32(p + 4)};
}

NEON void vf_store(float *p, VF x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}

NEON VF vf_add(VF x, VF y)
{
    return (VF){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)};
}

NEON VF vf_mul(VF x, VF y)
{
    return (VF){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)};
}

NEON VF vf_fma(VF x, VF y, VF z) /* x * y + z */
{
    return (VF){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
}

NEON VF vf_fnma(VF x, VF y, VF z) /* z - x * y */
{
    return (VF){vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)};
}

NEON VF neon_halves(uint16x8_t x)
{
    float16x8_t h = vreinterpretq_f16_u16(x);
    return (VF){vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}

NEON VF vf_load_f16(const void *p)
{
    return neon_halves(vreinterpretq_u16_u8(vld1q_u8(p)));
}

/* 8 FP8 codes times 1/256: the bits of E4M3 shifted into an fp16, whose exponent bias is larger by
 * 8. */
NEON VF vf_load_f8(const uint8_t *p)
{
    uint16x8_t x = vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(vld1_u8(p)), 7));
    return neon_halves(vandq_u16(x, vdupq_n_u16(0xbfff)));
}

/* Half of 2^(e - 127), exact for subnormal results too. */
NEON float32x4_t neon_e8m0_half(uint32x4_t e)
{
    uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    uint32x4_t tiny = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(e));
    return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), tiny, normal));
}

NEON VF vf_load_e8m0_half(const uint8_t *p)
{
    VI e = vi_load_u8(p);
    return (VF){neon_e8m0_half(e.a), neon_e8m0_half(e.b)};
}

/* Signed 8-bit codes, as panels have them on ARM, and tables of value + 128 as signed values. */
#define vi_load8(p)    vi_load(p)
#define vi_start(init) ((void)(init), vi_zero())
#define vi_table(t)    NEON_8(veorq_u8, vi_levels(t), vdupq_n_u8(0x80))

#endif
