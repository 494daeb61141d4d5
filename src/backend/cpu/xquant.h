/*
 * Quantising input rows into the records of panel.h, included once per instruction set with three
 * functions defined: max32, the largest magnitude of 32 values; codes32, which rounds 32 values times
 * inv to codes and gives the sums of both halves; and fine32, the same for what rounding lost.
 */
#include "backend/cpu/panel.h"

#include <math.h>

static inline void quantize(const float *x, int n_in, int first, int len, bool fine,
                            uint8_t *record)
{
    struct x_layout l = x_layout(n_in);
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
