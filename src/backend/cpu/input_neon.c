/* Quantises input rows to 8 bits with NEON. See input_kernel.h. */
#include <arm_neon.h>
#include <stdint.h>

static inline float max32(const float *x)
{
    float32x4_t most = vabsq_f32(vld1q_f32(x));
    for (int i = 1; i < 8; i++)
        most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + 4 * i)));
    return vmaxvq_f32(most);
}

/* Stores 16 integers, which fit, as bytes, and returns their sum. */
static inline int32_t store16(const int32x4_t n[4], int8_t *q)
{
    int16x8_t a = vuzp1q_s16(vreinterpretq_s16_s32(n[0]), vreinterpretq_s16_s32(n[1]));
    int16x8_t b = vuzp1q_s16(vreinterpretq_s16_s32(n[2]), vreinterpretq_s16_s32(n[3]));
    int8x16_t v = vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
    vst1q_s8(q, v);
    return vaddlvq_s8(v);
}

static inline void codes32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    for (int j = 0; j < 2; j++, x += 16, q += 16) {
        int32x4_t n[4];
        for (int i = 0; i < 4; i++)
            n[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * i), inv));
        sum[j] = store16(n, q);
    }
}

static inline void fine32(const float *x, float inv, int8_t *q, int32_t sum[2])
{
    for (int j = 0; j < 2; j++, x += 16, q += 16) {
        int32x4_t n[4];
        for (int i = 0; i < 4; i++) {
            float32x4_t v = vmulq_n_f32(vld1q_f32(x + 4 * i), inv);
            n[i] = vcvtnq_s32_f32(vmulq_n_f32(vsubq_f32(v, vrndnq_f32(v)), 254.0f));
        }
        sum[j] = store16(n, q);
    }
}

#include "backend/cpu/input_kernel.h"

void input_quantize_neon(const float *x, int n_in, int first, int len, bool fine, uint8_t *record)
{
    quantize(x, n_in, first, len, fine, record);
}

void input_glu_neon(const struct ffn *f, float *g, const float *u, int n)
{
    glu(f, g, u, n);
}
