/*
 * Quantises input rows into the records of panel.h, and computes activations. Included once per
 * instruction set, after these definitions:
 *   max32    the largest magnitude of 32 values
 *   codes32  rounds 32 values times inv to codes, and returns the sums of each 16
 *   fine32   the same for the rounding errors, in 1/254 of a code
 */
#include "backend/cpu/panel.h"
#include "backend/layer.h"
#include "backend/cpu/vec.h"

#include <math.h>

static inline void quantize(const float *x, int n_in, int first, int len, bool fine,
                            uint8_t *record)
{
    struct input_layout l = input_layout(n_in);
    float *scale = (float *)(record + l.scale), *sums = (float *)(record + l.sum);
    int32_t *fine_init = (int32_t *)(record + l.fine_init);
    int32_t *fine_init16 = (int32_t *)(record + l.fine_init16);
    float *fine_sum = (float *)(record + l.fine_sum);
    int32_t *init32 = (int32_t *)(record + l.init32), *init16 = (int32_t *)(record + l.init16);
    for (int i = 0; i < len; i += 32) {
        int blk = (first + i) / 32;
        float max = max32(x + i);
        /* A subnormal maximum has no finite inverse. Such a block is taken as zeros. */
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
            fine_init16[2 * blk] = -32 * sum[0];
            fine_init16[2 * blk + 1] = -32 * sum[1];
            fine_sum[blk] = sums[blk] + scale[blk] * FINE_UNIT * (float)(sum[0] + sum[1]);
        }
    }
}

/* x / (1 + e^-(y ln 2)) */
INLINE VEC gate_vec(VEC x, VEC y)
{
    y = vec_max(vec_set(-126.0f), y); /* NaN stays NaN */
    return vec_div(x, vec_add(vec_set(1.0f), vec_exp2(vec_sub(vec_set(0.0f), y))));
}

/* GELU: 0.5 g (1 + erf(g / sqrt(2))) = max(g, 0) - 0.5 |g| erfc(|g| / sqrt(2)). erfc(z) is a
 * polynomial in 1 / (1 + p z) times e^-z^2, with an error of at most 1.5e-7 (Abramowitz and Stegun
 * 7.1.26). */
INLINE VEC gelu_vec(VEC g)
{
    VEC size = vec_max(g, vec_sub(vec_set(0.0f), g)), z = vec_mul(size, vec_set(0.7071067812f));
    VEC t = vec_div(vec_set(1.0f), vec_fma(z, vec_set(0.3275911f), vec_set(1.0f)));
    VEC p = vec_fma(t, vec_set(1.061405429f), vec_set(-1.453152027f));
    p = vec_fma(p, t, vec_set(1.421413741f));
    p = vec_fma(p, t, vec_set(-0.284496736f));
    p = vec_mul(vec_fma(p, t, vec_set(0.254829592f)), t);
    VEC e = vec_exp2(vec_mul(vec_mul(z, z), vec_set(-0x1.715476p+0f)));
    return vec_sub(vec_max(g, vec_set(0.0f)), vec_mul(vec_mul(size, vec_set(0.5f)), vec_mul(p, e)));
}

/* act(g, u) of layer.h; kind is a constant where this is inlined. GELU with tanh is a sigmoid, too:
 * (1 + tanh z) / 2 = 1 / (1 + e^-2z). */
INLINE VEC glu_vec(enum activation kind, const struct ffn *f, VEC g, VEC u)
{
    const float log2_e = 0x1.715476p+0f;
    if (kind == ACT_SWIGLU_CLAMP) {
        VEC limit = vec_set(f->limit);
        g = vec_min(g, limit);
        u = vec_max(vec_min(u, limit), vec_set(-f->limit));
        return vec_mul(gate_vec(g, vec_mul(g, vec_set(log2_e * f->alpha))),
                       vec_add(u, vec_set(1.0f)));
    }
    if (kind == ACT_SILU_CLAMP) {
        VEC limit = vec_set(f->limit);
        g = vec_min(g, limit);
        u = vec_max(vec_min(u, limit), vec_set(-f->limit));
    }
    if (kind == ACT_SILU_LIMIT) {
        VEC limit = vec_set(f->limit);
        g = vec_min(gate_vec(g, vec_mul(g, vec_set(log2_e))), limit);
        return vec_mul(g, vec_max(vec_min(u, limit), vec_set(-f->limit)));
    }
    if (kind == ACT_RELU2) {
        g = vec_max(g, vec_set(0.0f));
        return vec_mul(vec_mul(g, g), u);
    }
    if (kind == ACT_PLAIN_XIELU) {
        VEC zero = vec_set(0.0f), up = vec_max(g, zero), low = vec_min(g, zero);
        VEC e = vec_sub(vec_exp2(vec_mul(low, vec_set(log2_e))), vec_add(low, vec_set(1.0f)));
        VEC h = vec_fma(vec_mul(up, up), vec_set(f->alpha), vec_mul(e, vec_set(f->limit)));
        return vec_fma(g, vec_set(f->beta), h);
    }
    if (kind == ACT_PLAIN_RELU2) {
        g = vec_max(g, vec_set(0.0f));
        return vec_mul(g, g);
    }
    if (kind == ACT_PLAIN_GELU)
        return gelu_vec(g);
    if (kind == ACT_GELU)
        return vec_mul(gelu_vec(g), u);
    if (kind == ACT_GELU_TANH || kind == ACT_PLAIN_GELU_TANH) {
        VEC cube = vec_mul(vec_mul(g, g), g);
        VEC z = vec_fma(cube, vec_set(0.044715f), g);
        VEC h = gate_vec(g, vec_mul(z, vec_set(2 * 0.7978845608f * log2_e)));
        return kind == ACT_GELU_TANH ? vec_mul(h, u) : h;
    }
    if (kind == ACT_PLAIN_QUICK_GELU)
        return gate_vec(g, vec_mul(g, vec_set(1.702f * log2_e)));
    return vec_mul(gate_vec(g, vec_mul(g, vec_set(log2_e))), u);
}

INLINE void glu_row(enum activation kind, const struct ffn *f, float *g, const float *u, int n)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(g + i, glu_vec(kind, f, vec_load(g + i), vec_load(u + i)));
    if (i < n) {
        float a[VW] = {0}, b[VW] = {0};
        size_t rest = (size_t)(n - i) * sizeof(float);
        memcpy(a, g + i, rest);
        memcpy(b, u + i, rest);
        vec_store(a, glu_vec(kind, f, vec_load(a), vec_load(b)));
        memcpy(g + i, a, rest);
    }
}

static inline void glu(const struct ffn *f, float *g, const float *u, int n)
{
    if (f->act == ACT_SILU)
        glu_row(ACT_SILU, f, g, u, n);
    else if (f->act == ACT_GELU_TANH)
        glu_row(ACT_GELU_TANH, f, g, u, n);
    else if (f->act == ACT_SWIGLU_CLAMP)
        glu_row(ACT_SWIGLU_CLAMP, f, g, u, n);
    else if (f->act == ACT_GELU)
        glu_row(ACT_GELU, f, g, u, n);
    else if (f->act == ACT_PLAIN_GELU_TANH)
        glu_row(ACT_PLAIN_GELU_TANH, f, g, g, n);
    else if (f->act == ACT_PLAIN_QUICK_GELU)
        glu_row(ACT_PLAIN_QUICK_GELU, f, g, g, n);
    else if (f->act == ACT_SILU_CLAMP)
        glu_row(ACT_SILU_CLAMP, f, g, u, n);
    else if (f->act == ACT_SILU_LIMIT)
        glu_row(ACT_SILU_LIMIT, f, g, u, n);
    else if (f->act == ACT_RELU2)
        glu_row(ACT_RELU2, f, g, u, n);
    else if (f->act == ACT_PLAIN_XIELU)
        glu_row(ACT_PLAIN_XIELU, f, g, g, n);
    else if (f->act == ACT_PLAIN_RELU2)
        glu_row(ACT_PLAIN_RELU2, f, g, g, n);
    else if (f->act == ACT_PLAIN_GELU)
        glu_row(ACT_PLAIN_GELU, f, g, g, n);
}
