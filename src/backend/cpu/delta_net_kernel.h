/*
 * Kernels of the gated delta net over vec.h, compiled per instruction set by delta_net.c (plain C),
 * delta_net_avx2.c and delta_net_avx512.c. The includer defines KERNELS. A row's bytes depend only on its
 * inputs and the state before it, so the split of a prompt into steps changes nothing.
 *
 * Columns of a state are independent. A panel of 16 columns (8 KB at Dk = 128) stays in the first-level
 * cache while all rows of a prompt pass through it. The recurrence costs three products per value of the
 * state, as many as the chunked form, which pays only where matrix products are cheaper than vector ones.
 */
#include "backend/cpu/delta_net.h"
#include "backend/cpu/state_panel.h"
#include "backend/cpu/vec.h"

_Static_assert((int)DELTA_PANEL == (int)STATE_PANEL, "update_panel");

/* 1 / (1 + exp(-x)) */
INLINE VEC sigmoid_of(VEC x)
{
    VEC z = vec_mul(x, vec_set(-1.44269504f)); /* limits z: for very negative x the result is 0 */
    z = vec_sub(vec_set(0.0f), vec_max(vec_sub(vec_set(0.0f), z), vec_set(-126.0f)));
    float one[VW], e[VW];
    vec_store(e, vec_exp2(z));
    for (int i = 0; i < VW; i++)
        one[i] = 1.0f / (1.0f + e[i]);
    return vec_load(one);
}

static float sigmoid_one(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static void conv(const float *const *x, const float *w, size_t stride, int taps, int n, float *y)
{
    int c = 0;
    for (; c + VW <= n; c += VW) {
        VEC sum = vec_mul(vec_load(x[0] + c), vec_load(w + c));
        for (int i = 1; i < taps; i++)
            sum = vec_fma(vec_load(x[i] + c), vec_load(w + (size_t)i * stride + c), sum);
        vec_store(y + c, vec_mul(sum, sigmoid_of(sum)));
    }
    for (; c < n; c++) {
        float sum = x[0][c] * w[c];
        for (int i = 1; i < taps; i++)
            sum += x[i][c] * w[(size_t)i * stride + (size_t)c];
        y[c] = sum * sigmoid_one(sum);
    }
}

/* Sum of squares, in four independent chains of vectors. */
INLINE float squares(const float *x, int n)
{
    VEC acc[CHAINS] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
    int i = 0;
    for (; i + CHAINS * VW <= n; i += CHAINS * VW) {
        UNROLL
        for (int j = 0; j < CHAINS; j++)
            acc[j] = vec_fma(vec_load(x + i + j * VW), vec_load(x + i + j * VW), acc[j]);
    }
    float total = vec_sum(vec_add(vec_add(acc[0], acc[1]), vec_add(acc[2], acc[3])));
    for (; i < n; i++)
        total += x[i] * x[i];
    return total;
}

static void unit(float *x, int n, float scale)
{
    scale /= sqrtf(squares(x, n) + 1e-6f);
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

/* A whole panel. Sums over Dk run in CHAINS independent chains. */
INLINE void step_panel(const float *from, float *to, const float *q, const float *k, const float *v,
                       float decay, float beta, int Dk, float *o)
{
    VEC acc[CHAINS][VECS], wrong[VECS], sum[VECS];
    UNROLL
    for (int c = 0; c < CHAINS; c++)
        UNROLL
    for (int j = 0; j < VECS; j++)
        acc[c][j] = vec_set(0.0f);
    int i = 0;
    if (from) {
        for (; i + CHAINS <= Dk; i += CHAINS) {
            UNROLL
            for (int c = 0; c < CHAINS; c++)
                UNROLL
            for (int j = 0; j < VECS; j++)
                acc[c][j] = vec_fma(vec_load(from + (i + c) * DELTA_PANEL + j * VW),
                                    vec_set(k[i + c]), acc[c][j]);
        }
        for (; i < Dk; i++) {
            UNROLL
            for (int j = 0; j < VECS; j++)
                acc[0][j] =
                    vec_fma(vec_load(from + i * DELTA_PANEL + j * VW), vec_set(k[i]), acc[0][j]);
        }
    }
    UNROLL
    for (int j = 0; j < VECS; j++) {
        VEC seen = vec_add(vec_add(acc[0][j], acc[1][j]), vec_add(acc[2][j], acc[3][j]));
        seen = vec_mul(seen, vec_set(decay));
        wrong[j] = vec_mul(vec_sub(vec_load(v + j * VW), seen), vec_set(beta));
    }
    update_panel(from, to, k, q, wrong, decay, Dk, sum);
    UNROLL
    for (int j = 0; j < VECS; j++)
        vec_store(o + j * VW, sum[j]);
}

static void step(const float *from, float *to, const float *q, const float *k, const float *v,
                 float decay, float beta, int Dk, int width, float *o)
{
    if (width == DELTA_PANEL) {
        if (from)
            step_panel(from, to, q, k, v, decay, beta, Dk, o);
        else
            step_panel(NULL, to, q, k, v, decay, beta, Dk, o);
        return;
    }
    for (int j = 0; j < width;
         j++) { /* the last columns, where Dv is not a multiple of DELTA_PANEL */
        float seen = 0, sum = 0;
        for (int i = 0; from && i < Dk; i++)
            seen += from[i * width + j] * k[i];
        float wrong = beta * (v[j] - decay * seen);
        for (int i = 0; i < Dk; i++) {
            float s = k[i] * wrong + (from ? decay * from[i * width + j] : 0.0f);
            to[i * width + j] = s;
            sum += s * q[i];
        }
        o[j] = sum;
    }
}

static void gate(float *a, const float *z, const float *gain, float eps, int n)
{
    float scale = 1.0f / sqrtf(squares(a, n) / (float)n + eps);
    int i = 0;
    for (; i + VW <= n; i += VW) {
        VEC y = vec_mul(vec_mul(vec_load(a + i), vec_set(scale)), vec_load(gain + i));
        VEC g = vec_load(z + i);
        vec_store(a + i, vec_mul(y, vec_mul(g, sigmoid_of(g))));
    }
    for (; i < n; i++)
        a[i] = a[i] * scale * gain[i] * (z[i] * sigmoid_one(z[i]));
}

static void sigmoid(float *a, const float *z, int n)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(a + i, vec_mul(vec_load(a + i), sigmoid_of(vec_load(z + i))));
    for (; i < n; i++)
        a[i] *= sigmoid_one(z[i]);
}

const struct delta_kernels KERNELS = {
    .conv = conv, .unit = unit, .step = step, .gate = gate, .sigmoid = sigmoid};
