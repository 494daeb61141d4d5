/*
 * Packed panels with SDOT, two vectors to half a panel (8 rows): one instruction per 4 rows x 4 columns,
 * which takes its inputs from a quarter of a register of 16.
 */
#define V_LANES 8
#include "backend/cpu/gemm_vec_neon.h"

#define X_QUANTIZE input_quantize_neon
#define NAME(x)    x##_dotprod
#define COLUMNS    UNROLL
#define vi_dot_at  dot_at
#define vi_dot8_at dot_at

NEON uint32x4_t dot_half(uint32x4_t acc, uint32x4_t u, int8x16_t x, const int lane)
{
    int32x4_t sum = vreinterpretq_s32_u32(acc);
    int8x16_t codes = vreinterpretq_s8_u32(u);
    switch (lane) {
    case 0:
        return vreinterpretq_u32_s32(vdotq_laneq_s32(sum, codes, x, 0));
    case 1:
        return vreinterpretq_u32_s32(vdotq_laneq_s32(sum, codes, x, 1));
    case 2:
        return vreinterpretq_u32_s32(vdotq_laneq_s32(sum, codes, x, 2));
    default:
        return vreinterpretq_u32_s32(vdotq_laneq_s32(sum, codes, x, 3));
    }
}

NEON VI dot_at(VI acc, VI u, const uint8_t *from, size_t col, const int lane)
{
    int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(from + (col - 4 * (size_t)lane)));
    return (VI){dot_half(acc.a, u.a, x, lane), dot_half(acc.b, u.b, x, lane)};
}

#include "backend/cpu/gemm_int8_kernel.h"
