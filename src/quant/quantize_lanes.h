/*
 * The quantisers, compiled once per instruction set (see quantize_isa.h).
 *
 * A format divides a row into sub-blocks of 16 or 32 values that share a scale (and maybe a minimum).
 * Sixteen sub-blocks are searched at a time, one per vector lane: t.x[k] holds value k of each. So sums over
 * a sub-block are plain vector sums, and lanes are independent.
 *
 * The search minimises sum w (x - value)^2, where w is the column's importance (1 without an importance
 * matrix; for Q3_K see lanes_weigh). For a given scale the best codes are the nearest ones. For given codes
 * the best scale (and minimum) is the least-squares solution. The search tries a range of scales around the
 * one that spans the values, keeps the best, then alternates the two steps. Formats with quantised sub-scales
 * then try the integer neighbours of each sub-scale and fit the super-block's scale again.
 */
#include "quant/quantize_isa.h"
#include "quant/simd16.h"

#include <float.h>

enum { LANES = 16, MAX_SUB = 32 };

struct quant_lanes {
    float x[MAX_SUB][LANES]; /* value k of each sub-block */
    float w[MAX_SUB][LANES]; /* its weight; only filled and read when weighted */
};

/* Loads up to 16 sub-blocks of `len` values starting at value `at` of the rows. */
V_INLINE void lanes_load(struct quant_lanes *t, const float *src, size_t at, int len, int n_lanes,
                         const float *importance, size_t n)
{
    for (int l = 0; l < n_lanes; l++)
        for (int k = 0; k < len; k++)
            t->x[k][l] = src[at + (size_t)(l * len + k)];
    for (int l = n_lanes; l < LANES; l++)
        for (int k = 0; k < len; k++)
            t->x[k][l] = 0;
    if (!importance)
        return;
    for (int l = 0; l < LANES; l++) {
        const float *w = importance + (at + (size_t)((l < n_lanes ? l : 0) * len)) % n;
        for (int k = 0; k < len; k++)
            t->w[k][l] = w[k];
    }
}

/* Weights the errors of a super-block of 256 values by sqrt(mean square + x^2): large values matter
 * more than their own error suggests. */
V_INLINE void lanes_weigh(struct quant_lanes *t)
{
    float mean = 0;
    for (int k = 0; k < 16; k++)
        for (int l = 0; l < LANES; l++)
            mean += t->x[k][l] * t->x[k][l];
    mean /= 256;
    for (int k = 0; k < 16; k++)
        for (int l = 0; l < LANES; l++)
            t->w[k][l] = sqrtf(mean + t->x[k][l] * t->x[k][l]);
}

V_INLINE vf weight(const struct quant_lanes *t, int k, bool weighted, vf v)
{
    return weighted ? v_mul(v_load(t->w[k]), v) : v;
}

V_INLINE vf clamp(vf q, float lo, float hi)
{
    return v_min(v_max(q, v_set(lo)), v_set(hi));
}

/* 1/x, or 0 where x is 0. */
V_INLINE vf inverse(vf x)
{
    vf tiny = v_set(FLT_MIN);
    return v_pick(v_gt(v_abs(x), tiny), v_div(v_set(1), x), v_set(0));
}

/* Formats with codes lo..hi and no minimum */

/* The value of largest magnitude in each lane, with its sign. */
V_INLINE vf signed_max(const struct quant_lanes *t, int len)
{
    vf amax = v_set(0), best = v_set(0);
    for (int k = 0; k < len; k++) {
        vf x = v_load(t->x[k]), a = v_abs(x);
        best = v_pick(v_gt(a, amax), x, best);
        amax = v_max(amax, a);
    }
    return best;
}

/* Rounds with inverse scale `is` and fits the scale. Keeps it if it explains more of the block. */
V_INLINE void sym_try(const struct quant_lanes *t, int len, bool weighted, float lo, float hi,
                      vf is, vf *scale, vf *best)
{
    vf sxq = v_set(0), sqq = v_set(0);
    for (int k = 0; k < len; k++) {
        vf x = v_load(t->x[k]);
        vf q = clamp(v_round(v_mul(x, is)), lo, hi);
        vf wq = weight(t, k, weighted, q);
        sxq = v_add(sxq, v_mul(wq, x));
        sqq = v_add(sqq, v_mul(wq, q));
    }
    vf s = v_mul(sxq, inverse(sqq)), gain = v_mul(s, sxq);
    vm better = v_gt(gain, *best);
    *scale = v_pick(better, s, *scale);
    *best = v_pick(better, gain, *best);
}

/*
 * Best scale for codes lo..hi: tries `tries` inverse scales that put the largest value at
 * lo - from, lo - from - step, ... (beyond lo it is clipped), then two rounds of refinement.
 */
V_INLINE vf sym_fit(const struct quant_lanes *t, int len, bool weighted, float lo, float hi,
                    float from, float step, int tries)
{
    vf inv = inverse(signed_max(t, len));
    vf scale = v_set(0), best = v_set(0);
    for (int i = 0; i < tries; i++)
        sym_try(t, len, weighted, lo, hi, v_mul(v_set(lo - from - step * (float)i), inv), &scale,
                &best);
    for (int i = 0; i < 2; i++)
        sym_try(t, len, weighted, lo, hi, inverse(scale), &scale, &best);
    return scale;
}

/* Formats with codes 0..hi and a minimum: value = scale q + min */

struct affine {
    vf scale, min;
};

struct affine_sums {
    vf origin; /* subtracted from every value first: sums of large near-equal values would cancel */
    vf w, wx;  /* sums over the block, independent of the codes */
    vf gain;   /* of the best fit so far */
};

V_INLINE void affine_try(const struct quant_lanes *t, int len, bool weighted, float hi,
                         bool min_below_0, vf is, vf base, struct affine_sums *sum,
                         struct affine *best)
{
    vf sq = v_set(0), sqq = v_set(0), sxq = v_set(0), offset = v_mul(base, is);
    for (int k = 0; k < len; k++) {
        vf x = v_sub(v_load(t->x[k]), sum->origin);
        vf q = clamp(v_round(v_sub(v_mul(x, is), offset)), 0, hi);
        vf wq = weight(t, k, weighted, q);
        sq = v_add(sq, wq);
        sqq = v_add(sqq, v_mul(wq, q));
        sxq = v_add(sxq, v_mul(wq, x));
    }
    vf det = v_sub(v_mul(sum->w, sqq), v_mul(sq, sq)), inv = inverse(det);
    vf scale = v_mul(v_sub(v_mul(sum->w, sxq), v_mul(sum->wx, sq)), inv);
    vf min = v_mul(v_sub(v_mul(sqq, sum->wx), v_mul(sq, sxq)), inv);
    if (min_below_0) {
        /* a positive minimum cannot be stored: use none, and the best scale without it */
        vm above = v_gt(min, v_set(0));
        scale = v_pick(above, v_mul(sxq, inverse(sqq)), scale);
        min = v_pick(above, v_set(0), min);
    }
    vf gain = v_add(v_mul(scale, sxq), v_mul(min, sum->wx));
    vm better = v_gt(gain, sum->gain); /* a singular system yields 0, 0: no gain */
    best->scale = v_pick(better, scale, best->scale);
    best->min = v_pick(better, min, best->min);
    sum->gain = v_pick(better, gain, sum->gain);
}

/* Best scale and minimum: inverse scales (hi + from + step i) / range, then refinement. */
V_INLINE struct affine affine_fit(const struct quant_lanes *t, int len, bool weighted, float hi,
                                  bool min_below_0, float from, float step, int tries)
{
    vf low = v_load(t->x[0]), high = low;
    for (int k = 1; k < len; k++) {
        low = v_min(low, v_load(t->x[k]));
        high = v_max(high, v_load(t->x[k]));
    }
    if (min_below_0)
        low = v_min(low, v_set(0));
    struct affine_sums sum = {min_below_0 ? v_set(0) : low, v_set(0), v_set(0), v_set(0)};
    for (int k = 0; k < len; k++) {
        sum.w = v_add(sum.w, weight(t, k, weighted, v_set(1)));
        sum.wx = v_add(sum.wx, weight(t, k, weighted, v_sub(v_load(t->x[k]), sum.origin)));
    }
    vf range = v_sub(high, low), inv = inverse(range);
    low = v_sub(low, sum.origin);
    struct affine best = {v_mul(range, v_set(1 / hi)), low};
    for (int i = 0; i < tries; i++)
        affine_try(t, len, weighted, hi, min_below_0,
                   v_mul(v_set(hi + from + step * (float)i), inv), low, &sum, &best);
    for (int i = 0; i < 2; i++)
        affine_try(t, len, weighted, hi, min_below_0, inverse(best.scale), best.min, &sum, &best);
    best.min = v_add(best.min, sum.origin);
    return best;
}

/* Sub-scales as integers under a super-block's scale. */

/* Weighted squared error of each lane for value = scale q + min, codes lo..hi nearest. */
V_INLINE vf lane_error(const struct quant_lanes *t, int len, bool weighted, float lo, float hi,
                       vf scale, vf min)
{
    vf is = inverse(scale), offset = v_mul(min, is), sum = v_set(0);
    for (int k = 0; k < len; k++) {
        vf x = v_load(t->x[k]);
        vf q = clamp(v_round(v_sub(v_mul(x, is), offset)), lo, hi);
        vf e = v_sub(v_sub(x, v_mul(scale, q)), min);
        sum = v_add(sum, weight(t, k, weighted, v_mul(e, e)));
    }
    return sum;
}

/* A super-block's two scales, and the sub-scales of its 8 or 16 lanes. */
struct super {
    float d[LANES], dmin[LANES]; /* the same for all lanes of a super-block */
    float ls[LANES], lm[LANES];  /* integer sub-scales and sub-minima */
};

/* Tries the neighbours of each integer sub-scale (and sub-minimum, value = d ls q - dmin lm). */
V_INLINE void super_polish(struct super *s, const struct quant_lanes *t, int len, bool weighted,
                           float lo, float hi, float ls_lo, float ls_hi, float lm_hi)
{
    vf d = v_load(s->d), dmin = v_load(s->dmin), ls = v_load(s->ls), lm = v_load(s->lm);
    vf best = v_set(FLT_MAX), best_ls = ls, best_lm = lm;
    int reach = lm_hi > 0 ? 1 : 0;
    for (int a = -1; a <= 1; a++)
        for (int b = -reach; b <= reach; b++) {
            vf x = clamp(v_add(ls, v_set((float)a)), ls_lo, ls_hi);
            vf y = clamp(v_add(lm, v_set((float)b)), 0, lm_hi);
            vf e =
                lane_error(t, len, weighted, lo, hi, v_mul(d, x), v_mul(v_set(-1), v_mul(dmin, y)));
            vm better = v_gt(best, e);
            best = v_pick(better, e, best);
            best_ls = v_pick(better, x, best_ls);
            best_lm = v_pick(better, y, best_lm);
        }
    v_store(s->ls, best_ls);
    v_store(s->lm, best_lm);
}

/* Fits d (and dmin) again with codes and integers held: least squares over the super-block. */
V_INLINE void super_refit(struct super *s, const struct quant_lanes *t, int len, bool weighted,
                          float lo, float hi, int per_super, bool has_min)
{
    vf scale = v_mul(v_load(s->d), v_load(s->ls)), min = v_mul(v_load(s->dmin), v_load(s->lm));
    vf is = inverse(scale), offset = v_mul(min, is);
    vf uu = v_set(0), xu = v_set(0), u1 = v_set(0), x1 = v_set(0), w1 = v_set(0);
    for (int k = 0; k < len; k++) {
        vf x = v_load(t->x[k]);
        vf q = clamp(v_round(v_add(v_mul(x, is), offset)), lo, hi);
        vf u = v_mul(v_load(s->ls), q), wu = weight(t, k, weighted, u);
        uu = v_add(uu, v_mul(wu, u));
        xu = v_add(xu, v_mul(wu, x));
        u1 = v_add(u1, wu);
        x1 = v_add(x1, weight(t, k, weighted, x));
        w1 = v_add(w1, weight(t, k, weighted, v_set(1)));
    }
    /* x ~ d u - dmin v, with v = lm constant in a lane */
    vf v = v_load(s->lm);
    float suu[LANES], sxu[LANES], suv[LANES], sxv[LANES], svv[LANES];
    v_store(suu, uu);
    v_store(sxu, xu);
    v_store(suv, v_mul(u1, v));
    v_store(sxv, v_mul(x1, v));
    v_store(svv, v_mul(w1, v_mul(v, v)));
    for (int a = 0; a < LANES; a += per_super) {
        double guu = 0, gxu = 0, guv = 0, gxv = 0, gvv = 0;
        for (int l = a; l < a + per_super; l++) {
            guu += (double)suu[l];
            gxu += (double)sxu[l];
            guv += (double)suv[l];
            gxv += (double)sxv[l];
            gvv += (double)svv[l];
        }
        double det = guu * gvv - guv * guv, d = s->d[a], m = s->dmin[a];
        if (has_min && det > 1e-9 * guu * gvv) {
            double nd = (gxu * gvv - gxv * guv) / det, nm = (gxu * guv - gxv * guu) / det;
            if (nd > 0 && nm > 0) {
                d = nd;
                m = nm;
            }
        } else if (guu > 0) {
            double nd = (gxu + m * guv) / guu;
            if (nd * d > 0)
                d = nd;
        }
        for (int l = a; l < a + per_super; l++) {
            s->d[l] = f16_to_f32(f32_to_f16((float)d));
            s->dmin[l] = f16_to_f32(f32_to_f16((float)m));
        }
    }
}

/* First d and integers: the largest sub-scale becomes `top`. Signed scales make it negative. */
V_INLINE void super_start(float *d, float *ints, vf scales, int per_super, float top, float lo,
                          float hi)
{
    float s[LANES];
    v_store(s, scales);
    for (int a = 0; a < LANES; a += per_super) {
        float max = 0;
        for (int l = a; l < a + per_super; l++)
            if (fabsf(s[l]) > fabsf(max))
                max = s[l];
        float dd = f16_to_f32(f32_to_f16(max / top));
        float id = dd != 0 ? 1 / dd : 0;
        for (int l = a; l < a + per_super; l++) {
            float i = rintf(s[l] * id);
            d[l] = dd;
            ints[l] = i < lo ? lo : i > hi ? hi : i;
        }
    }
}

/* Codes of one sub-block, biased to start at 0: clamp(round((x - min) / scale), lo, hi) - lo. */
V_INLINE void codes(const float *x, int len, float scale, float min, float lo, float hi, uint8_t *q)
{
    float is = fabsf(scale) > FLT_MIN ? 1 / scale : 0;
    for (int k = 0; k < len; k += LANES) {
        vf v = v_mul(v_sub(v_load(x + k), v_set(min)), v_set(is));
        v_store_u8(q + k, v_sub(clamp(v_round(v), lo, hi), v_set(lo)));
    }
}

/* Formats. Each walks all sub-blocks of all rows, sixteen at a time. */

static int lane_count(size_t left, int len)
{
    size_t n = left / (size_t)len;
    return n < LANES ? (int)n : LANES;
}

#define FOR_LANES(len)                                                                             \
    for (size_t total = rows * n, at = 0, used; at < total; at += used * (size_t)(len))            \
        if ((used = (size_t)lane_count(total - at, len)))

static void rows_f32(const float *src, void *dst, size_t rows, size_t n, const float *importance)
{
    (void)importance;
    memcpy(dst, src, rows * n * sizeof *src);
}

static void rows_f16(const float *src, void *dst, size_t rows, size_t n, const float *importance)
{
    (void)importance;
    uint8_t *out = dst;
    size_t total = rows * n, i = 0;
    for (; i + LANES <= total; i += LANES)
        v_store_f16(out + 2 * i, v_load(src + i));
    for (; i < total; i++) {
        uint16_t h = f32_to_f16(src[i]);
        memcpy(out + 2 * i, &h, 2);
    }
}

static void rows_bf16(const float *src, void *dst, size_t rows, size_t n, const float *importance)
{
    (void)importance;
    uint8_t *out = dst;
    /* f32_to_bf16 in a form that compilers vectorise: round to even, NaN stays NaN */
    for (size_t i = 0; i < rows * n; i++) {
        uint32_t u;
        memcpy(&u, src + i, 4);
        uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 64;
        uint16_t h = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
        memcpy(out + 2 * i, &h, 2);
    }
}

static void rows_q8_0(const float *src, void *dst, size_t rows, size_t n, const float *importance)
{
    (void)importance; /* with 127 levels per side the span is the best scale */
    struct block_q8_0 *out = dst;
    for (size_t i = 0; i < rows * n; i += 32, out++) {
        vf a = v_load(src + i), b = v_load(src + i + 16);
        float d = v_hmax(v_max(v_abs(a), v_abs(b))) / 127, id = d > 0 ? 1 / d : 0;
        uint8_t q[32];
        v_store_u8(q, v_add(v_round(v_mul(a, v_set(id))), v_set(128)));
        v_store_u8(q + 16, v_add(v_round(v_mul(b, v_set(id))), v_set(128)));
        out->d = f32_to_f16(d);
        for (int k = 0; k < 32; k++)
            out->qs[k] = (int8_t)(q[k] ^ 0x80);
    }
}

/* Low nibbles: first half of 32 codes; high nibbles: second half. */
V_INLINE void pack_halves(uint8_t *qs, const uint8_t *q)
{
    for (int k = 0; k < 16; k++)
        qs[k] = (uint8_t)((q[k] & 15) | (q[k + 16] & 15) << 4);
}

/* Fifth bits of 32 codes, in order. */
V_INLINE void pack_fifth(uint8_t *qh, const uint8_t *q)
{
    for (int b = 0; b < 4; b++) {
        unsigned v = 0;
        for (int k = 0; k < 8; k++)
            v |= (unsigned)(q[8 * b + k] >> 4 & 1) << k;
        qh[b] = (uint8_t)v;
    }
}

/* Q4_0 and Q5_0: one half scale for 32 codes. */
V_INLINE void rows_q45_0(bool five, const float *src, void *dst, size_t rows, size_t n,
                         const float *importance, bool weighted)
{
    float lo = five ? -16 : -8, hi = five ? 15 : 7;
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        float scale[LANES];
        v_store(scale, sym_fit(&t, 32, weighted, lo, hi, five ? -1.5f : -1.0f, five ? 0.25f : 0.15f,
                               five ? 14 : 16));
        for (size_t l = 0; l < used; l++) {
            uint16_t d = f32_to_f16(scale[l]);
            uint8_t q[32];
            codes(src + at + 32 * l, 32, f16_to_f32(d), 0, lo, hi, q);
            size_t b = at / 32 + l;
            if (five) {
                struct block_q5_0 *o = (struct block_q5_0 *)dst + b;
                o->d = d;
                pack_halves(o->qs, q);
                pack_fifth(o->qh, q);
            } else {
                struct block_q4_0 *o = (struct block_q4_0 *)dst + b;
                o->d = d;
                pack_halves(o->qs, q);
            }
        }
    }
}

/* Q4_1 and Q5_1: half scale and half minimum for 32 codes. */
V_INLINE void rows_q45_1(bool five, const float *src, void *dst, size_t rows, size_t n,
                         const float *importance, bool weighted)
{
    float hi = five ? 31 : 15;
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        struct affine fit = affine_fit(&t, 32, weighted, hi, false, -1, 0.15f, 16);
        float scale[LANES], min[LANES];
        v_store(scale, fit.scale);
        v_store(min, fit.min);
        for (size_t l = 0; l < used; l++) {
            uint16_t d = f32_to_f16(scale[l]), m = f32_to_f16(min[l]);
            uint8_t q[32];
            codes(src + at + 32 * l, 32, f16_to_f32(d), f16_to_f32(m), 0, hi, q);
            size_t b = at / 32 + l;
            if (five) {
                struct block_q5_1 *o = (struct block_q5_1 *)dst + b;
                o->d = d;
                o->m = m;
                pack_halves(o->qs, q);
                pack_fifth(o->qh, q);
            } else {
                struct block_q4_1 *o = (struct block_q4_1 *)dst + b;
                o->d = d;
                o->m = m;
                pack_halves(o->qs, q);
            }
        }
    }
}

/* Q4_K and Q5_K: eight sub-blocks of 32, 6-bit scales and minima. Two super-blocks at a time. */

V_INLINE void pack_k4_scales(uint8_t *out, const float *ls, const float *lm)
{
    memset(out, 0, 12);
    for (int j = 0; j < 8; j++) {
        unsigned s = (unsigned)ls[j], m = (unsigned)lm[j];
        if (j < 4) {
            out[j] |= (uint8_t)s;
            out[j + 4] |= (uint8_t)m;
        } else {
            out[j + 4] = (uint8_t)((s & 15) | (m & 15) << 4);
            out[j - 4] |= (uint8_t)(s >> 4 << 6);
            out[j] |= (uint8_t)(m >> 4 << 6);
        }
    }
}

V_INLINE void rows_q45_k(bool five, const float *src, void *dst, size_t rows, size_t n,
                         const float *importance, bool weighted)
{
    float hi = five ? 31 : 15;
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        struct affine fit =
            affine_fit(&t, 32, weighted, hi, true, five ? -1.0f : -1.2f, five ? 0.2f : 0.15f, 16);
        struct super s;
        super_start(s.d, s.ls, fit.scale, 8, 63, 0, 63);
        super_start(s.dmin, s.lm, v_mul(v_set(-1), fit.min), 8, 63, 0, 63);
        super_polish(&s, &t, 32, weighted, 0, hi, 0, 63, 63);
        super_refit(&s, &t, 32, weighted, 0, hi, 8, true);
        for (size_t a = 0; a < used; a += 8) {
            uint8_t q[QK_K];
            for (size_t j = 0; j < 8; j++)
                codes(src + at + 32 * (a + j), 32, s.d[a] * s.ls[a + j], -s.dmin[a] * s.lm[a + j],
                      0, hi, q + 32 * j);
            size_t b = (at + 32 * a) / QK_K;
            struct block_q5_k *o5 = (struct block_q5_k *)dst + b;
            struct block_q4_k *o4 = (struct block_q4_k *)dst + b;
            uint8_t *qs = five ? o5->qs : o4->qs;
            for (int j = 0; j < 4; j++)
                for (int k = 0; k < 32; k++)
                    qs[32 * j + k] =
                        (uint8_t)((q[64 * j + k] & 15) | (q[64 * j + 32 + k] & 15) << 4);
            if (five)
                for (int k = 0; k < 32; k++) {
                    unsigned h = 0;
                    for (int j = 0; j < 8; j++)
                        h |= (unsigned)(q[32 * j + k] >> 4) << j;
                    o5->qh[k] = (uint8_t)h;
                }
            pack_k4_scales(five ? o5->scales : o4->scales, s.ls + a, s.lm + a);
            *(five ? &o5->d : &o4->d) = f32_to_f16(s.d[a]);
            *(five ? &o5->dmin : &o4->dmin) = f32_to_f16(s.dmin[a]);
        }
    }
}

/* Two bits of 128 codes share 32 bytes. */
V_INLINE void pack_pairs(uint8_t *qs, const uint8_t *q)
{
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 32; k++) {
            const uint8_t *c = q + 128 * h + k;
            qs[32 * h + k] =
                (uint8_t)((c[0] & 3) | (c[32] & 3) << 2 | (c[64] & 3) << 4 | (c[96] & 3) << 6);
        }
}

/* Q2_K: sixteen sub-blocks of 16, 4-bit scales and minima. */
V_INLINE void rows_q2_k(const float *src, void *dst, size_t rows, size_t n, const float *importance,
                        bool weighted)
{
    struct quant_lanes t;
    FOR_LANES(16)
    {
        lanes_load(&t, src, at, 16, (int)used, importance, n);
        struct affine fit = affine_fit(&t, 16, weighted, 3, true, -0.6f, 0.1f, 18);
        struct super s;
        super_start(s.d, s.ls, fit.scale, 16, 15, 0, 15);
        super_start(s.dmin, s.lm, v_mul(v_set(-1), fit.min), 16, 15, 0, 15);
        for (int i = 0; i < 2; i++) {
            super_polish(&s, &t, 16, weighted, 0, 3, 0, 15, 15);
            super_refit(&s, &t, 16, weighted, 0, 3, 16, true);
        }
        super_polish(&s, &t, 16, weighted, 0, 3, 0, 15, 15);
        struct block_q2_k *o = (struct block_q2_k *)dst + at / QK_K;
        uint8_t q[QK_K];
        for (int j = 0; j < 16; j++) {
            codes(src + at + 16 * (size_t)j, 16, s.d[0] * s.ls[j], -s.dmin[0] * s.lm[j], 0, 3,
                  q + 16 * j);
            o->scales[j] = (uint8_t)((unsigned)s.ls[j] | (unsigned)s.lm[j] << 4);
        }
        pack_pairs(o->qs, q);
        o->d = f32_to_f16(s.d[0]);
        o->dmin = f32_to_f16(s.dmin[0]);
    }
}

/* Q3_K: sixteen sub-blocks of 16, codes -4..3, signed 6-bit scales. */
V_INLINE void rows_q3_k(const float *src, void *dst, size_t rows, size_t n, const float *importance,
                        bool has_weights)
{
    const bool weighted = true;
    struct quant_lanes t;
    FOR_LANES(16)
    {
        lanes_load(&t, src, at, 16, (int)used, importance, n);
        if (!has_weights)
            lanes_weigh(&t);
        struct super s;
        super_start(s.d, s.ls, sym_fit(&t, 16, weighted, -4, 3, -0.9f, 0.1f, 18), 16, -32, -32, 31);
        memset(s.dmin, 0, sizeof s.dmin);
        memset(s.lm, 0, sizeof s.lm);
        super_polish(&s, &t, 16, weighted, -4, 3, -32, 31, 0);
        super_refit(&s, &t, 16, weighted, -4, 3, 16, false);
        struct block_q3_k *o = (struct block_q3_k *)dst + at / QK_K;
        uint8_t q[QK_K];
        memset(o->scales, 0, sizeof o->scales);
        for (int j = 0; j < 16; j++) {
            codes(src + at + 16 * (size_t)j, 16, s.d[0] * s.ls[j], 0, -4, 3, q + 16 * j);
            unsigned l = (unsigned)(s.ls[j] + 32);
            o->scales[j % 8] |= (uint8_t)(j < 8 ? l & 15 : (l & 15) << 4);
            o->scales[8 + j % 4] |= (uint8_t)((l >> 4) << 2 * (j / 4));
        }
        pack_pairs(o->qs, q);
        for (int k = 0; k < 32; k++) {
            unsigned h = 0;
            for (int j = 0; j < 8; j++)
                h |= (unsigned)(q[32 * j + k] >> 2) << j;
            o->hmask[k] = (uint8_t)h;
        }
        o->d = f32_to_f16(s.d[0]);
    }
}

/* Q6_K: sixteen sub-blocks of 16, codes -32..31, signed 8-bit scales. */
V_INLINE void rows_q6_k(const float *src, void *dst, size_t rows, size_t n, const float *importance,
                        bool weighted)
{
    struct quant_lanes t;
    FOR_LANES(16)
    {
        lanes_load(&t, src, at, 16, (int)used, importance, n);
        struct super s;
        super_start(s.d, s.ls, sym_fit(&t, 16, weighted, -32, 31, -1.0f, 0.2f, 12), 16, -128, -128,
                    127);
        struct block_q6_k *o = (struct block_q6_k *)dst + at / QK_K;
        uint8_t q[QK_K];
        for (int j = 0; j < 16; j++) {
            codes(src + at + 16 * (size_t)j, 16, s.d[0] * s.ls[j], 0, -32, 31, q + 16 * j);
            o->scales[j] = (int8_t)s.ls[j];
        }
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 32; k++) {
                const uint8_t *c = q + 128 * h + k;
                o->ql[64 * h + k] = (uint8_t)((c[0] & 15) | (c[64] & 15) << 4);
                o->ql[64 * h + 32 + k] = (uint8_t)((c[32] & 15) | (c[96] & 15) << 4);
                o->qh[32 * h + k] =
                    (uint8_t)(c[0] >> 4 | c[32] >> 4 << 2 | c[64] >> 4 << 4 | c[96] >> 4 << 6);
            }
        o->d = f32_to_f16(s.d[0]);
    }
}

/* IQ4_NL and IQ4_XS: codes name one of 16 uneven levels. */

/* Midpoints between neighbouring levels, and the steps. */
static const float iq4_middle[15] = {-115.5f, -93.5f, -74,   -57,   -42, -28.5f, -16, -4.5f,
                                     7,       19,     31.5f, 45.5f, 61,  79,     101};
static const float iq4_step[15] = {23, 21, 18, 16, 14, 13, 12, 11, 12, 12, 13, 15, 16, 20, 24};

/* The level nearest to each value. */
V_INLINE vf iq4_level(vf x)
{
    vf y = v_set(-127);
    for (int i = 0; i < 15; i++)
        y = v_add_if(v_gt(x, v_set(iq4_middle[i])), y, v_set(iq4_step[i]));
    return y;
}

V_INLINE void iq4_codes(const float *x, float scale, uint8_t *q)
{
    float is = fabsf(scale) > FLT_MIN ? 1 / scale : 0;
    for (int k = 0; k < 32; k += LANES) {
        vf v = v_mul(v_load(x + k), v_set(is)), c = v_set(0);
        for (int i = 0; i < 15; i++)
            c = v_add_if(v_gt(v, v_set(iq4_middle[i])), c, v_set(1));
        v_store_u8(q + k, c);
    }
}

V_INLINE void iq4_try(const struct quant_lanes *t, bool weighted, vf is, vf *scale, vf *best)
{
    vf sxq = v_set(0), sqq = v_set(0);
    for (int k = 0; k < 32; k++) {
        vf x = v_load(t->x[k]), q = iq4_level(v_mul(x, is));
        vf wq = weight(t, k, weighted, q);
        sxq = v_add(sxq, v_mul(wq, x));
        sqq = v_add(sqq, v_mul(wq, q));
    }
    vf s = v_mul(sxq, inverse(sqq)), gain = v_mul(s, sxq);
    vm better = v_gt(gain, *best);
    *scale = v_pick(better, s, *scale);
    *best = v_pick(better, gain, *best);
}

/* The levels are not symmetric, so the largest value may map to either end. */
V_INLINE vf iq4_fit(const struct quant_lanes *t, bool weighted)
{
    static const float ends[] = {-100, -107, -114, -121, -128, -136, -145, 90, 97, 104, 112, 120};
    vf inv = inverse(signed_max(t, 32)), scale = v_set(0), best = v_set(0);
    for (int i = 0; i < (int)(sizeof ends / sizeof *ends); i++)
        iq4_try(t, weighted, v_mul(v_set(ends[i]), inv), &scale, &best);
    for (int i = 0; i < 2; i++)
        iq4_try(t, weighted, inverse(scale), &scale, &best);
    return scale;
}

V_INLINE void rows_iq4_nl(const float *src, void *dst, size_t rows, size_t n,
                          const float *importance, bool weighted)
{
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        float scale[LANES];
        v_store(scale, iq4_fit(&t, weighted));
        for (size_t l = 0; l < used; l++) {
            struct block_iq4_nl *o = (struct block_iq4_nl *)dst + at / 32 + l;
            uint8_t q[32];
            o->d = f32_to_f16(scale[l]);
            iq4_codes(src + at + 32 * l, f16_to_f32(o->d), q);
            pack_halves(o->qs, q);
        }
    }
}

V_INLINE void rows_iq4_xs(const float *src, void *dst, size_t rows, size_t n,
                          const float *importance, bool weighted)
{
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        struct super s;
        super_start(s.d, s.ls, iq4_fit(&t, weighted), 8, -32, -32, 31);
        for (size_t a = 0; a < used; a += 8) {
            struct block_iq4_xs *o = (struct block_iq4_xs *)dst + (at + 32 * a) / QK_K;
            unsigned high = 0;
            memset(o->scales_l, 0, sizeof o->scales_l);
            for (size_t j = 0; j < 8; j++) {
                uint8_t q[32];
                iq4_codes(src + at + 32 * (a + j), s.d[a] * s.ls[a + j], q);
                pack_halves(o->qs + 16 * j, q);
                unsigned l = (unsigned)(s.ls[a + j] + 32);
                o->scales_l[j / 2] |= (uint8_t)((l & 15) << 4 * (j % 2));
                high |= (l >> 4) << 2 * j;
            }
            o->scales_h = (uint16_t)high;
            o->d = f32_to_f16(s.d[a]);
        }
    }
}

/* MXFP4: a power of two for 32 codes of sign and eight magnitudes. */

static const float mx_middle[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
static const float mx_step[7] = {1, 1, 1, 1, 2, 2, 4};

V_INLINE void rows_mxfp4(const float *src, void *dst, size_t rows, size_t n,
                         const float *importance, bool weighted)
{
    struct quant_lanes t;
    FOR_LANES(32)
    {
        lanes_load(&t, src, at, 32, (int)used, importance, n);
        /* The exponent that puts the largest value just under 8, and its neighbours. */
        float amax[LANES], e0[LANES], scale[LANES], inv[LANES], best_e[LANES];
        v_store(amax, v_abs(signed_max(&t, 32)));
        for (int l = 0; l < LANES; l++) {
            int e = 0;
            frexpf(amax[l], &e); /* amax = m 2^e, m in [0.5, 1) */
            e += 127 - 3;
            e0[l] = best_e[l] = (float)(amax[l] > 0 ? (e < 1 ? 1 : e > 253 ? 253 : e) : 0);
        }
        vf best = v_set(FLT_MAX);
        for (int c = -1; c <= 1; c++) {
            for (int l = 0; l < LANES; l++) {
                int e = (int)e0[l] + c;
                e = e < 0 ? 0 : e > 254 ? 254 : e;
                scale[l] = quant_mxfp4_scale((uint8_t)e);
                inv[l] = 1 / scale[l];
            }
            vf sum = v_set(0), is = v_load(inv), s = v_load(scale);
            for (int k = 0; k < 32; k++) {
                vf x = v_abs(v_load(t.x[k])), v = v_mul(x, is), y = v_set(0);
                for (int i = 0; i < 7; i++)
                    y = v_add_if(v_gt(v, v_set(mx_middle[i])), y, v_set(mx_step[i]));
                vf err = v_sub(x, v_mul(s, y));
                sum = v_add(sum, weight(&t, k, weighted, v_mul(err, err)));
            }
            vm better = v_gt(best, sum);
            best = v_pick(better, sum, best);
            v_store(best_e, v_pick(better, v_add(v_load(e0), v_set((float)c)), v_load(best_e)));
        }
        for (size_t l = 0; l < used; l++) {
            struct block_mxfp4 *o = (struct block_mxfp4 *)dst + at / 32 + l;
            const float *x = src + at + 32 * l;
            o->e = (uint8_t)(best_e[l] < 0 ? 0 : best_e[l]);
            float is = 1 / quant_mxfp4_scale(o->e);
            uint8_t q[32];
            for (int k = 0; k < 32; k += LANES) {
                vf v = v_mul(v_load(x + k), v_set(is)), a = v_abs(v), c = v_set(0);
                for (int i = 0; i < 7; i++)
                    c = v_add_if(v_gt(a, v_set(mx_middle[i])), c, v_set(1));
                v_store_u8(q + k, v_add_if(v_gt(v_set(0), v), c, v_set(8)));
            }
            pack_halves(o->qs, q);
        }
    }
}

/* Out-of-line functions. The weighted and the plain form are compiled separately. */
#define ROWS(name, call)                                                                           \
    static void name##_plain(const float *src, void *dst, size_t rows, size_t n)                   \
    {                                                                                              \
        const float *importance = NULL;                                                            \
        const bool weighted = false;                                                               \
        call;                                                                                      \
    }                                                                                              \
    static void name##_weighted(const float *src, void *dst, size_t rows, size_t n,                \
                                const float *importance)                                           \
    {                                                                                              \
        const bool weighted = true;                                                                \
        call;                                                                                      \
    }                                                                                              \
    static void name(const float *src, void *dst, size_t rows, size_t n, const float *importance)  \
    {                                                                                              \
        if (importance)                                                                            \
            name##_weighted(src, dst, rows, n, importance);                                        \
        else                                                                                       \
            name##_plain(src, dst, rows, n);                                                       \
    }

ROWS(make_q4_0, rows_q45_0(false, src, dst, rows, n, importance, weighted))
ROWS(make_q5_0, rows_q45_0(true, src, dst, rows, n, importance, weighted))
ROWS(make_q4_1, rows_q45_1(false, src, dst, rows, n, importance, weighted))
ROWS(make_q5_1, rows_q45_1(true, src, dst, rows, n, importance, weighted))
ROWS(make_q4_k, rows_q45_k(false, src, dst, rows, n, importance, weighted))
ROWS(make_q5_k, rows_q45_k(true, src, dst, rows, n, importance, weighted))
ROWS(make_q2_k, rows_q2_k(src, dst, rows, n, importance, weighted))
ROWS(make_q3_k, rows_q3_k(src, dst, rows, n, importance, weighted))
ROWS(make_q6_k, rows_q6_k(src, dst, rows, n, importance, weighted))
ROWS(make_iq4_nl, rows_iq4_nl(src, dst, rows, n, importance, weighted))
ROWS(make_iq4_xs, rows_iq4_xs(src, dst, rows, n, importance, weighted))
ROWS(make_mxfp4, rows_mxfp4(src, dst, rows, n, importance, weighted))

static void load_f16(const uint8_t *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        v_store(dst + i, v_load_f16(src + 2 * i));
}

static void load_bf16(const uint8_t *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i += LANES)
        v_store(dst + i, v_load_bf16(src + 2 * i));
}

static float amax(const float *x, size_t n)
{
    /* x - x is 0 for finite values and NaN for others, and NaN propagates through the sum */
    vf m = v_set(0), bad = v_set(0);
    for (size_t i = 0; i < n; i += LANES) {
        vf v = v_load(x + i);
        m = v_max(m, v_abs(v));
        bad = v_add(bad, v_sub(v, v));
    }
    float sum[LANES], result = v_hmax(m);
    v_store(sum, bad);
    for (int i = 0; i < LANES; i++)
        result += sum[i];
    return result;
}

const struct quantize_isa QUANTIZE_ISA = {
    .rows = {[DT_F32] = rows_f32,
             [DT_F16] = rows_f16,
             [DT_BF16] = rows_bf16,
             [DT_Q8_0] = rows_q8_0,
             [DT_Q4_0] = make_q4_0,
             [DT_Q5_0] = make_q5_0,
             [DT_Q4_1] = make_q4_1,
             [DT_Q5_1] = make_q5_1,
             [DT_Q2_K] = make_q2_k,
             [DT_Q3_K] = make_q3_k,
             [DT_Q4_K] = make_q4_k,
             [DT_Q5_K] = make_q5_k,
             [DT_Q6_K] = make_q6_k,
             [DT_IQ4_NL] = make_iq4_nl,
             [DT_IQ4_XS] = make_iq4_xs,
             [DT_IQ3_S] = quantize_iq3_s,
             [DT_MXFP4] = make_mxfp4},
    .load_f16 = load_f16,
    .load_bf16 = load_bf16,
    .amax = amax,
};
