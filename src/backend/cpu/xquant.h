/*
 * Quantising input rows into the records of panel.h, included once per instruction set with
 * two functions defined: max32, the largest magnitude of 32 values, and codes32, which rounds 32 values
 * times inv to codes and what that lost to fine ones, and sums the codes of both halves and the fine.
 */
#include "backend/cpu/panel.h"

#include <math.h>

static float max32(const float *x);
static void codes32(const float *x, float inv, int8_t *q, int8_t *fine, int32_t sum[3]);

static void quantize(const float *x, int n_in, int first, int len, uint8_t *record)
{
    struct x_layout l = x_layout(n_in);
    float *scale = (float *)(record + l.scale), *sums = (float *)(record + l.sum);
    int32_t *fine_init = (int32_t *)(record + l.fine_init);
    int32_t *init32 = (int32_t *)(record + l.init32), *init16 = (int32_t *)(record + l.init16);
    for (int i = 0; i < len; i += 32) {
        int blk = (first + i) / 32;
        float max = max32(x + i);
        float inv = max > 0.0f ? 127.0f / max : 0.0f;
        if (!(inv < INFINITY)) /* all values subnormal: as good as zero */
            inv = max = 0.0f;
        int32_t sum[3];
        int8_t *q = (int8_t *)record + first + i;
        codes32(x + i, inv, q, q + l.fine, sum);
        scale[blk] = max / 127.0f;
        sums[blk] = scale[blk] * (float)(sum[0] + sum[1]);
        init32[blk] = -128 * (sum[0] + sum[1]);
        fine_init[blk] = -128 * sum[2];
        init16[2 * blk] = -32 * sum[0];
        init16[2 * blk + 1] = -32 * sum[1];
    }
}
