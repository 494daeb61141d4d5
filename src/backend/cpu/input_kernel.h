/*
 * Quantising input rows into the records of panel.h, and SiLU, included once per instruction set with
 * these defined: max32, the largest magnitude of 32 values; codes32, which rounds 32 values times inv
 * to codes and gives the sums of both halves; fine32, the same for what rounding lost; and vec_div.
 */
#include "backend/cpu/panel.h"
#include "backend/cpu/vec.h"

#include <math.h>

static inline void quantize(const float *x, int n_in, int first, int len, bool fine,
                            uint8_t *record)
{
    struct input_layout l = input_layout(n_in);
    float *scale = (float *)(record + l.scale), *sums = (float *)(record + l.sum);
    int32_t *fine_init = (int32_t *)(record + l.fine_init);
    float *fine_sum = (float *)(record + l.fine_sum);
    int32_t *init32 = (int32_t *)(record + l.init32), *init16 = (int32_t *)(record + l.init16);
    for (int i = 0; i < len; i += 32) {
        int blk = (first + i) / 32;
        float max = max32(x + i);
        /* Subnormal maxima have no finite inverse: such a block is as good as zero. */
        max = max < 1e-36f ? 0.0f : max;
        float inv = max > 0.0f ? 127.0f / max : 0.0f;
        int8_t *q = (int8_t *)record + first + i;
        int32_t sum[2];
        codes32(x + i, inv, q, sum);
        scale[blk] = max * (1.0f / 127.0f);
        sums[blk] = scale[blk] * (float)(sum[0] + sum[1]);
        init32[blk] = -128 * (sum[0] + sum[1]);
        init16[2 * blk] = -32 * sum[0];
        init16[2 * blk + 1] = -32 * sum[1];
        if (fine) {
            fine32(x + i, inv, q + l.fine, sum);
            fine_init[blk] = -128 * (sum[0] + sum[1]);
            fine_sum[blk] = sums[blk] + scale[blk] * (1.0f / 254.0f) * (float)(sum[0] + sum[1]);
        }
    }
}

/* g / (1 + e^-g) * u */
static inline VEC glu_vec(VEC g, VEC u)
{
    VEC y = vec_max(vec_set(-126.0f), vec_mul(g, vec_set(0x1.715476p+0f))); /* NaN stays */
    VEC e = vec_exp2(vec_sub(vec_set(0.0f), y));
    return vec_mul(vec_div(g, vec_add(vec_set(1.0f), e)), u);
}

static inline void glu(float *g, const float *u, int n)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(g + i, glu_vec(vec_load(g + i), vec_load(u + i)));
    if (i < n) {
        float a[VW] = {0}, b[VW] = {0};
        size_t rest = (size_t)(n - i) * sizeof(float);
        memcpy(a, g + i, rest);
        memcpy(b, u + i, rest);
        vec_store(a, glu_vec(vec_load(a), vec_load(b)));
        memcpy(g + i, a, rest);
    }
}
