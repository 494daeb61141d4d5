/*
 * Kernels of latent attention over vec.h, compiled per instruction set by latent.c (plain C),
 * latent_avx2.c and latent_avx512.c. The includer defines KERNELS. A score adds its products in an
 * order that depends on the width alone, a sum its keys in order: a row's bytes do not depend on the
 * rows beside it.
 */
#include "backend/cpu/latent.h"
#include "backend/cpu/vec.h"
#include "quant/kvblock.h"

INLINE void load_as(enum dtype type, const void *from, size_t at, int n, float *to)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(to + i, vec_load_as(type, from, at + (size_t)i));
    for (; i < n; i++)
        quant_dequantize(type, (const char *)from + (at + (size_t)i) * (type == DT_F32 ? 4 : 2),
                         to + i, 1);
}

static void load(enum dtype type, const void *from, size_t at, int n, float *to)
{
    if (kv_coded(type))
        kv_row_get(type, (const char *)from + dtype_bytes(type, at), n, to);
    else if (type == DT_F32)
        load_as(DT_F32, from, at, n, to);
    else if (type == DT_F16)
        load_as(DT_F16, from, at, n, to);
    else
        load_as(DT_BF16, from, at, n, to);
}

/* Four keys at a time against one query: a load of the query serves four products. */
INLINE void scores_of(const float *q, const float *k, int width, float *s)
{
    VEC acc[4] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
    int i = 0;
    for (; i + VW <= width; i += VW) {
        VEC x = vec_load(q + i);
        UNROLL
        for (int j = 0; j < 4; j++)
            acc[j] = vec_fma(x, vec_load(k + (size_t)j * (size_t)width + i), acc[j]);
    }
    UNROLL
    for (int j = 0; j < 4; j++) {
        s[j] = vec_sum(acc[j]);
        for (int c = i; c < width; c++)
            s[j] += q[c] * k[(size_t)j * (size_t)width + (size_t)c];
    }
}

static void scores(const float *const *q, int rows, const float *k, int width,
                   float (*s)[LATENT_KEYS])
{
    for (int j = 0; j < LATENT_KEYS; j += 4)
        for (int r = 0; r < rows; r++)
            scores_of(q[r], k + (size_t)j * (size_t)width, width, s[r] + j);
}

INLINE void add_rows(float *const *o, int rows, const float *scale, const float (*p)[LATENT_KEYS],
                     const float *k, int width, int c)
{
    VEC acc[LATENT_ROWS];
    UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = vec_mul(vec_load(o[r] + c), vec_set(scale[r]));
    for (int j = 0; j < LATENT_KEYS; j++) {
        VEC x = vec_load(k + (size_t)j * (size_t)width + c);
        UNROLL
        for (int r = 0; r < rows; r++)
            acc[r] = vec_fma(x, vec_set(p[r][j]), acc[r]);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        vec_store(o[r] + c, acc[r]);
}

static void add(float *const *o, int rows, const float *scale, const float (*p)[LATENT_KEYS],
                const float *k, int width, int n)
{
    int c = 0;
    for (; c + VW <= n; c += VW)
        if (rows == LATENT_ROWS)
            add_rows(o, LATENT_ROWS, scale, p, k, width, c);
        else
            for (int r = 0; r < rows; r++)
                add_rows(o + r, 1, scale + r, p + r, k, width, c);
    for (; c < n; c++)
        for (int r = 0; r < rows; r++) {
            float sum = o[r][c] * scale[r];
            for (int j = 0; j < LATENT_KEYS; j++)
                sum += p[r][j] * k[(size_t)j * (size_t)width + (size_t)c];
            o[r][c] = sum;
        }
}

const struct latent_kernels KERNELS = {.load = load, .scores = scores, .add = add};
