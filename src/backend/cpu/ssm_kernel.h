/*
 * Kernels of state-space models and short convolutions over vec.h, compiled per instruction set by ssm.c (plain C),
 * ssm_avx2.c, ssm_avx512.c and ssm_neon.c. The includer defines KERNELS. A row's bytes depend only on its inputs and
 * the state before it, so the split of a prompt into steps changes nothing.
 *
 * Columns of a state are independent. A panel of 16 columns (8 KB at N = 128) stays in the first-level cache while all
 * rows of a prompt pass through it.
 */
#include "backend/cpu/ssm.h"
#include "backend/cpu/state_panel.h"
#include "backend/cpu/vec.h"

_Static_assert((int)SSM_PANEL == (int)STATE_PANEL, "update_panel");

/* 1 / (1 + exp(-x)) */
INLINE VEC sigmoid_of(VEC x)
{
    VEC z = vec_mul(x, vec_set(-1.44269504f)); /* limits z: for very negative x silu is 0 */
    z = vec_sub(vec_set(0.0f), vec_max(vec_sub(vec_set(0.0f), z), vec_set(-126.0f)));
    float one[VW], e[VW];
    vec_store(e, vec_exp2(z));
    for (int i = 0; i < VW; i++)
        one[i] = 1.0f / (1.0f + e[i]);
    return vec_load(one);
}

INLINE VEC silu_of(VEC x)
{
    return vec_mul(x, sigmoid_of(x));
}

static float silu_one(float x)
{
    return x / (1.0f + expf(-x));
}

static void conv(const float *const *x, const float *w, size_t stride, int taps, const float *bias,
                 bool silu, int n, float *y)
{
    int c = 0;
    for (; c + VW <= n; c += VW) {
        VEC sum = bias ? vec_load(bias + c) : vec_set(0.0f);
        for (int i = 0; i < taps; i++)
            sum = vec_fma(vec_load(x[i] + c), vec_load(w + (size_t)i * stride + c), sum);
        vec_store(y + c, silu ? silu_of(sum) : sum);
    }
    for (; c < n; c++) {
        float sum = bias ? bias[c] : 0.0f;
        for (int i = 0; i < taps; i++)
            sum += x[i][c] * w[(size_t)i * stride + (size_t)c];
        y[c] = silu ? silu_one(sum) : sum;
    }
}

/* A whole panel. */
INLINE void step_panel(const float *from, float *to, const float *b, const float *c, const float *x,
                       float decay, float dt, float skip, int N, float *o)
{
    VEC in[VECS], sum[VECS];
    UNROLL
    for (int j = 0; j < VECS; j++)
        in[j] = vec_mul(vec_load(x + j * VW), vec_set(dt));
    update_panel(from, to, b, c, in, decay, N, sum);
    UNROLL
    for (int j = 0; j < VECS; j++)
        vec_store(o + j * VW, vec_fma(vec_load(x + j * VW), vec_set(skip), sum[j]));
}

static void step(const float *from, float *to, const float *b, const float *c, const float *x,
                 float decay, float dt, float skip, int N, int width, float *o)
{
    if (width == SSM_PANEL) {
        if (from)
            step_panel(from, to, b, c, x, decay, dt, skip, N, o);
        else
            step_panel(NULL, to, b, c, x, decay, dt, skip, N, o);
        return;
    }
    for (int j = 0; j < width; j++) { /* the last columns, where P is no multiple of SSM_PANEL */
        float sum = 0, in = x[j] * dt;
        for (int n = 0; n < N; n++) {
            float s = b[n] * in + (from ? decay * from[n * width + j] : 0.0f);
            to[n * width + j] = s;
            sum += s * c[n];
        }
        o[j] = sum + skip * x[j];
    }
}

static void scan(const float *from, float *to, const float *decay, const float *b, const float *c,
                 const float *x, const float *dt, const float *skip, int N, int width, float *o)
{
    if (width == SSM_PANEL) {
        UNROLL
        for (int j = 0; j < VECS; j++) {
            VEC t = vec_load(dt + j * VW), v = vec_load(x + j * VW), sum = vec_set(0.0f);
            VEC in = vec_mul(t, v);
            for (int n = 0; n < N; n++) {
                size_t at = (size_t)(n * SSM_PANEL + j * VW);
                VEC s = vec_mul(vec_set(b[n]), in);
                if (from)
                    s = vec_fma(vec_load(from + at), vec_exp2(vec_mul(vec_load(decay + at), t)), s);
                vec_store(to + at, s);
                sum = vec_fma(s, vec_set(c[n]), sum);
            }
            vec_store(o + j * VW, vec_fma(v, vec_load(skip + j * VW), sum));
        }
        return;
    }
    for (int j = 0; j < width; j++) { /* the last channels */
        float sum = 0, in = x[j] * dt[j], t = dt[j];
        for (int n = 0; n < N; n++) {
            float s =
                b[n] * in + (from ? exp2f(decay[n * width + j] * t) * from[n * width + j] : 0.0f);
            to[n * width + j] = s;
            sum += s * c[n];
        }
        o[j] = sum + skip[j] * x[j];
    }
}

static void gate(float *o, const float *z, bool sigmoid, int n)
{
    int i = 0;
    for (; i + VW <= n; i += VW) {
        VEC v = vec_load(z + i);
        vec_store(o + i, vec_mul(vec_load(o + i), sigmoid ? sigmoid_of(v) : silu_of(v)));
    }
    for (; i < n; i++)
        o[i] *= sigmoid ? 1.0f / (1.0f + expf(-z[i])) : silu_one(z[i]);
}

static void norm(float *o, const float *gain, float eps, int n)
{
    VEC acc[CHAINS] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
    int i = 0;
    for (; i + CHAINS * VW <= n; i += CHAINS * VW) {
        UNROLL
        for (int j = 0; j < CHAINS; j++)
            acc[j] = vec_fma(vec_load(o + i + j * VW), vec_load(o + i + j * VW), acc[j]);
    }
    float total = vec_sum(vec_add(vec_add(acc[0], acc[1]), vec_add(acc[2], acc[3])));
    for (; i < n; i++)
        total += o[i] * o[i];
    float scale = 1.0f / sqrtf(total / (float)n + eps);
    for (i = 0; i < n; i++)
        o[i] = o[i] * scale * (gain ? gain[i] : 1.0f);
}

static void multiply(float *y, const float *a, const float *b, int n)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(y + i, vec_mul(vec_load(a + i), vec_load(b + i)));
    for (; i < n; i++)
        y[i] = a[i] * b[i];
}

const struct ssm_kernels KERNELS = {
    .conv = conv, .step = step, .scan = scan, .gate = gate, .norm = norm, .multiply = multiply};
