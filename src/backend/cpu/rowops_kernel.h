/*
 * Row kernels over vec.h, compiled per instruction set by rowops.c (plain C), rowops_avx2.c and
 * rowops_avx512.c. The includer defines KERNELS and KERNELS_ISA. Rows may have any width: whole vectors
 * come first, then single floats. The order of additions depends on the width alone.
 */
#include "backend/cpu/kvtile.h"
#include "backend/cpu/rowops.h"
#include "backend/cpu/vec.h"

INLINE float inverse_rms(float squares, int width, float eps)
{
    return 1.0f / sqrtf(squares / (float)width + eps);
}

/* Sum of squares of x, or with d of x + d, which is stored in sum. Four independent chains of
 * vectors. */
INLINE float sum_squares(const float *x, const float *d, float *sum, int width)
{
    VEC acc[4] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
    int i = 0;
    for (; i + 4 * VW <= width; i += 4 * VW) {
        UNROLL
        for (int j = 0; j < 4; j++) {
            VEC v = vec_load(x + i + j * VW);
            if (d) {
                v = vec_add(v, vec_load(d + i + j * VW));
                vec_store(sum + i + j * VW, v);
            }
            acc[j] = vec_fma(v, v, acc[j]);
        }
    }
    float total = vec_sum(vec_add(vec_add(acc[0], acc[1]), vec_add(acc[2], acc[3])));
    for (; i < width; i++) {
        float v = x[i];
        if (d)
            sum[i] = v += d[i];
        total += v * v;
    }
    return total;
}

/* to = from * scale * gain (NULL: ones); from and to may be the same */
INLINE void scale_gain(const float *from, float scale, const float *gain, int width, float *to)
{
    int i = 0;
    if (!gain) {
        for (; i + VW <= width; i += VW)
            vec_store(to + i, vec_mul(vec_load(from + i), vec_set(scale)));
        for (; i < width; i++)
            to[i] = from[i] * scale;
        return;
    }
    for (; i + VW <= width; i += VW)
        vec_store(to + i, vec_mul(vec_mul(vec_load(from + i), vec_set(scale)), vec_load(gain + i)));
    for (; i < width; i++)
        to[i] = from[i] * scale * gain[i];
}

INLINE VEC or_vec(const float *p, int i, float none)
{
    return p ? vec_load(p + i) : vec_set(none);
}

/* LayerNorm: n = (x - mean) * scale * gain + bias. */
static void layer_norm(const float *x, const struct norm *norm, float *n, int width)
{
    VEC sum = vec_set(0), squares = vec_set(0);
    int i = 0, whole = width / VW * VW;
    for (; i < whole; i += VW)
        sum = vec_add(sum, vec_load(x + i));
    float total = vec_sum(sum);
    for (; i < width; i++)
        total += x[i];
    float mean = total / (float)width;
    for (i = 0; i < whole; i += VW) {
        VEC v = vec_sub(vec_load(x + i), vec_set(mean));
        squares = vec_fma(v, v, squares);
    }
    total = vec_sum(squares);
    for (; i < width; i++)
        total += (x[i] - mean) * (x[i] - mean);
    float scale = inverse_rms(total, width, norm->eps);
    for (i = 0; i < whole; i += VW) {
        VEC v = vec_mul(vec_sub(vec_load(x + i), vec_set(mean)), vec_set(scale));
        vec_store(n + i, vec_fma(v, or_vec(norm->gain, i, 1), or_vec(norm->bias, i, 0)));
    }
    for (; i < width; i++)
        n[i] = (x[i] - mean) * scale * (norm->gain ? norm->gain[i] : 1) +
               (norm->bias ? norm->bias[i] : 0);
}

static void add_norm(float *x, const float *d, const struct norm *norm, float *n, int width)
{
    if (norm->kind == NORM_LAYER) {
        for (int i = 0; d && i < width; i++)
            x[i] += d[i];
        layer_norm(x, norm, n, width);
        return;
    }
    if (norm->kind == NORM_AFFINE) {
        for (int i = 0; i < width; i++) {
            x[i] += d ? d[i] : 0;
            n[i] = (x[i] + (norm->bias ? norm->bias[i] : 0)) * (norm->gain ? norm->gain[i] : 1);
        }
        return;
    }
    float squares = d ? sum_squares(x, d, x, width) : sum_squares(x, NULL, NULL, width);
    scale_gain(x, inverse_rms(squares, width, norm->eps), norm->gain, width, n);
}

static void head(const float *from, const struct norm *norm, const float *rope, int n_rot, int dim,
                 float *to)
{
    if (norm->kind != NORM_NONE)
        scale_gain(from, inverse_rms(sum_squares(from, NULL, NULL, dim), dim, norm->eps),
                   norm->gain, dim, to);
    else if (to != from)
        memcpy(to, from, (size_t)dim * sizeof(float));
    int half = n_rot / 2, i = 0;
    const float *cosine = rope, *sine = rope + half;
    float *low = to, *high = to + half;
    for (; i + VW <= half; i += VW) {
        VEC a = vec_load(low + i), b = vec_load(high + i);
        VEC c = vec_load(cosine + i), s = vec_load(sine + i);
        vec_store(low + i, vec_sub(vec_mul(a, c), vec_mul(b, s)));
        vec_store(high + i, vec_add(vec_mul(b, c), vec_mul(a, s)));
    }
    for (; i < half; i++) {
        float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

static void store_one(enum dtype type, float x, void *dst, size_t at)
{
    if (type == DT_F32)
        ((float *)dst)[at] = x;
    else
        ((uint16_t *)dst)[at] = type == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

static void store(enum dtype type, const float *from, int dim, void *dst, size_t at, size_t stride)
{
    int i = 0;
    if (kv_quantised(type)) {
        kv_row_put(type, from, dim, (char *)dst + dtype_bytes(type, at));
        return;
    }
    if (stride == 1)
        for (; i + VW <= dim; i += VW)
            vec_store_as(type, dst, at + (size_t)i, vec_load(from + i));
    else if (type != DT_F32)
        for (; i + VW <= dim; i += VW) {
            uint16_t half[VW];
            vec_store_as(type, half, 0, vec_load(from + i));
            for (int j = 0; j < VW; j++)
                ((uint16_t *)dst)[at + (size_t)(i + j) * stride] = half[j];
        }
    for (; i < dim; i++)
        store_one(type, from[i], dst, at + (size_t)i * stride);
}

static void store_head(enum dtype type, const float *from, int dim, void *tile, bool keys,
                       int page_len, int off)
{
    size_t at = (size_t)off, len = (size_t)page_len;
    if (kv_quantised(type))
        kv_tile_put(type, from, tile, keys, len, (size_t)dim, at);
    else
        store(type, from, dim, tile, keys ? at : at * (size_t)dim, keys ? len : 1);
}

static void turn(float *x, int dim)
{
    kv_turn(x, dim);
}

const struct row_kernels KERNELS = {
    .isa = KERNELS_ISA,
    .add_norm = add_norm,
    .head = head,
    .store = store,
    .store_head = store_head,
    .turn = turn,
};
