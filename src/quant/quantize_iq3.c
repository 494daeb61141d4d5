/*
 * IQ3_S: blocks of 256 values. Each four magnitudes are one of the 512 points of a grid (each a level of
 * 1, 3, .. 15). Signs are separate. Each 32 values have an odd multiple of the block's scale. Plain C, so
 * that every machine computes the same bits.
 *
 * As in quantize_lanes.h, the search alternates between codes for a scale and the best scale for codes. For a
 * given scale, the nearest level of each value selects one of 4,096 points, and a table lists the grid points
 * near it. The search of scales takes the first of those; later steps take the best. Squared errors are
 * weighted by sqrt(mean square of the block + x^2) times the column's importance, because large values
 * matter more than their own error suggests.
 */
#include "quant/quantize_isa.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

enum { SUB = 32, SUBS = QK_K / SUB, GROUPS = SUB / 4, POINTS = 4096, GRID = 512, NEAR = 8 };

static uint16_t near[POINTS][NEAR]; /* grid points, nearest first */
static uint8_t n_near[POINTS];      /* 1: is itself a grid point */
static float levels[GRID][4];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int distance(unsigned a, unsigned b)
{
    int sum = 0;
    for (int j = 0; j < 4; j++) {
        int d = (int)(a >> 3 * j & 7) - (int)(b >> 3 * j & 7);
        sum += d * d;
    }
    return sum;
}

static void find_near(void)
{
    const uint16_t *grid = quant_grid(DT_IQ3_S);
    for (unsigned g = 0; g < GRID; g++)
        for (int j = 0; j < 4; j++)
            levels[g][j] = (float)(2 * (grid[g] >> 3 * j & 7) + 1);
    for (unsigned p = 0; p < POINTS; p++) {
        int far[NEAR], n = 0;
        for (unsigned g = 0; g < GRID; g++) {
            int d = distance(p, grid[g]), at = n < NEAR ? n++ : NEAR;
            for (; at > 0 && d < far[at - 1]; at--)
                if (at < NEAR) {
                    far[at] = far[at - 1];
                    near[p][at] = near[p][at - 1];
                }
            if (at < NEAR) {
                far[at] = d;
                near[p][at] = (uint16_t)g;
            }
        }
        n_near[p] = far[0] == 0 ? 1 : NEAR;
    }
}

struct sub {
    float x[SUB], w[SUB]; /* magnitudes, and weights of squared errors */
    uint16_t point[GROUPS];
    float xq, qq; /* sums over the codes: w x q, w q q */
};

/* The best grid point near four values v, in units of levels. */
static unsigned best_point(const float *v, const float *w, unsigned p)
{
    unsigned best = near[p][0];
    float least = FLT_MAX;
    for (int i = 0; i < n_near[p]; i++) {
        const float *l = levels[near[p][i]];
        float d[4], e;
        for (int j = 0; j < 4; j++)
            d[j] = w[j] * (v[j] - l[j]) * (v[j] - l[j]);
        e = (d[0] + d[1]) + (d[2] + d[3]);
        if (e < least) {
            least = e;
            best = near[p][i];
        }
    }
    return best;
}

/* Codes for an inverse scale, and their sums, in eight lanes so that compilers can vectorise. */
static void code_sub(struct sub *s, float inverse, bool search)
{
    float v[SUB], q[SUB], xq[8] = {0}, qq[8] = {0};
    int l[SUB];
    for (int k = 0; k < SUB; k++) {
        v[k] = s->x[k] * inverse;
        float half = v[k] * 0.5f;
        l[k] = (int)(half < 7.0f ? half : 7.0f);
    }
    for (int g = 0; g < GROUPS; g++) {
        const int *c = l + 4 * g;
        unsigned p = (unsigned)(c[0] | c[1] << 3 | c[2] << 6 | c[3] << 9);
        unsigned point = search ? best_point(v + 4 * g, s->w + 4 * g, p) : near[p][0];
        s->point[g] = (uint16_t)point;
        memcpy(q + 4 * g, levels[point], sizeof levels[point]);
    }
    for (int k = 0; k < SUB; k += 8)
        for (int i = 0; i < 8; i++) {
            float wq = s->w[k + i] * q[k + i];
            xq[i] += wq * s->x[k + i];
            qq[i] += wq * q[k + i];
        }
    s->xq = ((xq[0] + xq[4]) + (xq[1] + xq[5])) + ((xq[2] + xq[6]) + (xq[3] + xq[7]));
    s->qq = ((qq[0] + qq[4]) + (qq[1] + qq[5])) + ((qq[2] + qq[6]) + (qq[3] + qq[7]));
}

/* The best scale of one sub-block of 32 values. */
static float fit_sub(struct sub *s)
{
    float max = 0, scale = 0, best = 0;
    for (int k = 0; k < SUB; k++)
        max = s->x[k] > max ? s->x[k] : max;
    if (max < FLT_MIN * 64)
        return 0;
    for (int i = 0; i < 16; i++) { /* small scales suit values of similar magnitude */
        code_sub(s, (i < 4 ? 1.0f + 2.0f * (float)i : 6.0f + (float)i) / max, false);
        if (s->xq * s->xq > best * s->qq) {
            best = s->xq * s->xq / s->qq;
            scale = s->xq / s->qq;
        }
    }
    for (int i = 0; i < 2 && scale > FLT_MIN; i++) {
        code_sub(s, 1 / scale, true);
        if (s->xq * s->xq > best * s->qq) {
            best = s->xq * s->xq / s->qq;
            scale = s->xq / s->qq;
        }
    }
    return scale;
}

static float error_of(const struct sub *s, float scale)
{
    return scale * (scale * s->qq - 2 * s->xq); /* without the constant term */
}

/* The multiple of d, 2 i + 1, for a sub-block whose own scale is `scale`. */
static int multiple(struct sub *s, float d, float scale)
{
    int middle = (int)(scale / d * 0.5f), best = 0;
    middle = middle < 15 ? middle : 15;
    float least = FLT_MAX;
    for (int i = middle > 0 ? middle - 1 : 0; i <= middle + 1 && i < 16; i++) {
        float unit = d * (float)(2 * i + 1);
        code_sub(s, 1 / unit, true);
        float e = error_of(s, unit);
        if (e < least) {
            least = e;
            best = i;
        }
    }
    return best;
}

static void load_block(struct sub *subs, const float *x, const float *importance)
{
    float mean = 0;
    for (int k = 0; k < QK_K; k++)
        mean += x[k] * x[k];
    mean /= QK_K;
    for (int k = 0; k < QK_K; k++) {
        struct sub *s = &subs[k / SUB];
        s->x[k % SUB] = fabsf(x[k]);
        s->w[k % SUB] = sqrtf(mean + x[k] * x[k]) * (importance ? importance[k] : 1);
    }
}

static void make_block(const float *x, const float *importance, struct block_iq3_s *out)
{
    struct sub subs[SUBS];
    float scale[SUBS], max = 0;
    int mult[SUBS];
    memset(out, 0, sizeof *out);
    load_block(subs, x, importance);
    for (int b = 0; b < SUBS; b++) {
        scale[b] = fit_sub(&subs[b]);
        max = scale[b] > max ? scale[b] : max;
    }
    out->d = f32_to_f16(max / 31);
    for (int round = 0; round < 2 && f16_to_f32(out->d) > 0; round++) {
        float d = f16_to_f32(out->d), xq = 0, qq = 0;
        for (int b = 0; b < SUBS; b++) {
            mult[b] = multiple(&subs[b], d, scale[b]);
            float m = (float)(2 * mult[b] + 1);
            code_sub(&subs[b], 1 / (d * m), true);
            xq += m * subs[b].xq;
            qq += m * m * subs[b].qq;
        }
        if (qq > 0 && xq > 0)
            out->d = f32_to_f16(xq / qq);
    }
    float d = f16_to_f32(out->d);
    if (!(d > 0))
        return;
    for (int b = 0; b < SUBS; b++) {
        code_sub(&subs[b], 1 / (d * (float)(2 * mult[b] + 1)), true);
        out->scales[b / 2] |= (uint8_t)(mult[b] << 4 * (b % 2));
        for (int g = 0; g < GROUPS; g++) {
            out->qs[GROUPS * b + g] = (uint8_t)subs[b].point[g];
            out->qh[b] |= (uint8_t)(subs[b].point[g] >> 8 << g);
        }
    }
    for (int k = 0; k < QK_K; k++)
        out->signs[k / 8] |= (uint8_t)((x[k] < 0) << k % 8);
}

void quantize_iq3_s(const float *src, void *dst, size_t rows, size_t n, const float *importance)
{
    pthread_once(&once, find_near);
    struct block_iq3_s *out = dst;
    for (size_t i = 0; i < rows * n; i += QK_K)
        make_block(src + i, importance ? importance + i % n : NULL, out++);
}
