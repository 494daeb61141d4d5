/*
 * Loads keys and values of a block (attn.h) of any type as vectors of floats, for attn_kernel.h and
 * attn_amx.c. `type` is a constant wherever speed matters.
 */
#ifndef STEEL_BACKEND_CPU_ATTN_LOAD_H
#define STEEL_BACKEND_CPU_ATTN_LOAD_H

#include "backend/cpu/attn.h"
#include "backend/cpu/kvtile.h"
#include "backend/cpu/vec.h"

/* vec_fp8 returns FP8 values divided by this. */
#define FP8_SCALE 256.0f

/* Component d + e of vector i of keys, before its scale. Quantised: d is a multiple of 4, e < 4. */
INLINE VEC key_code(enum dtype type, const struct attn_block *b, int i, int d, int e)
{
    const char *k = b->k[i];
    size_t at = (size_t)d;
    if (type == DT_Q8_0)
        return vec_byte_of4(k + at * b->k_stride, e);
    if (type == DT_Q4_0)
        return vec_nibble_of8(k + (at / 32 * 4 + at % 16 / 4) * b->k_stride * 4,
                              8 * e + (d % 32 >= 16 ? 4 : 0));
    at = (at + (size_t)e) * b->k_stride;
    return type == DT_F8_E4M3 ? vec_fp8(k + at) : vec_load_as(type, k, at);
}

/* The scales of vector i of keys for components 32 * c to 32 * c + 31. */
INLINE VEC key_scale(enum dtype type, const struct attn_block *b, int i, int c)
{
    return kv_scaled(type) ? vec_load_f16(b->k_scale[i] + (size_t)c * b->scale_stride)
                           : vec_set(type == DT_F8_E4M3 ? FP8_SCALE : 1.0f);
}

/* VW columns of a quantised value at v, from column c + e on, before their scale. c is a multiple
 * of 16, or of the range of e. high: column c is in the upper half of a Q4_0 block (high nibbles);
 * a constant wherever speed matters. */
INLINE VEC value_code_at(enum dtype type, const char *v, int c, int e, bool high)
{
    if (type == DT_Q8_0)
        return vec_bytes(v + c + e);
    if (type == DT_F8_E4M3)
        return vec_fp8(v + c + e);
    return vec_nibbles(v + c / 32 * 16 + (c + e) % 16, high || e >= 16);
}

INLINE VEC value_code(enum dtype type, const char *v, int c, int e)
{
    return value_code_at(type, v, c, e, c % 32 >= 16);
}

/* n values of a row as floats. */
INLINE void row_as(enum dtype type, const void *from, int n, float *to)
{
    int i = 0;
    for (; i + VW <= n; i += VW)
        vec_store(to + i, vec_load_as(type, from, (size_t)i));
    for (; i < n; i++)
        quant_dequantize(type, (const char *)from + (size_t)i * (type == DT_F32 ? 4 : 2), to + i,
                         1);
}

static inline void row_load(enum dtype type, const void *from, int n, float *to)
{
    if (!from)
        memset(to, 0, (size_t)n * sizeof(float));
    else if (kv_quantised(type))
        kv_row_get(type, from, n, to);
    else if (type == DT_F32)
        row_as(DT_F32, from, n, to);
    else if (type == DT_F16)
        row_as(DT_F16, from, n, to);
    else
        row_as(DT_BF16, from, n, to);
}

/* The scales of vector i of values for columns 32 * c to 32 * c + 31. */
INLINE VEC value_scale(enum dtype type, const struct attn_block *b, int i, int c)
{
    return kv_scaled(type) ? vec_load_f16(b->v_scale[i] + (size_t)c * b->scale_stride)
                           : vec_set(FP8_SCALE);
}

#endif
