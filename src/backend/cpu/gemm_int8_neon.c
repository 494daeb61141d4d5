/*
 * Packed panels with NEON of Armv8.0, two vectors to half a panel (8 rows). Products of bytes are 16 bits
 * wide; sums of two fit, as inputs are at most 127.
 */
#define V_LANES 8
#include "backend/cpu/gemm_vec_neon.h"

#define X_QUANTIZE         input_quantize_neon
#define NAME(x)            x##_neon
#define vi_dot8(acc, u, s) vi_dot(acc, u, s)

NEON uint32x4_t dot_half(uint32x4_t acc, uint32x4_t u, int8x16_t s)
{
    int8x16_t codes = vreinterpretq_s8_u32(u);
    int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(s)), high = vmull_high_s8(codes, s);
    return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(acc), vpaddq_s16(low, high)));
}

NEON VI vi_dot(VI acc, VI u, VI s)
{
    int8x16_t x = vreinterpretq_s8_u32(s.a);
    return (VI){dot_half(acc.a, u.a, x), dot_half(acc.b, u.b, x)};
}

#include "backend/cpu/gemm_int8_kernel.h"
