/*
 * Layout of keys and values in a tile of the CPU's KV cache: page_len tokens of one kv head, D values each
 * (ops.h).
 *
 * F32, F16, BF16 and FP8: keys (D, page_len), values (page_len, D). A vector load takes one component of
 * adjacent keys, or adjacent columns of a value.
 *
 * Types with a scale per block of 32 components: all codes, then the scales, (D/32, page_len) fp16.
 *   Q8_0  keys (D/4, page_len, 4): four components of a key are adjacent, as 8-bit dot products read
 *         them; values (page_len, D)
 *   Q4_0  keys (D/32, 4, page_len, 4): byte j of group g has component 4g + j of the block in its
 *         low nibble and 16 + 4g + j in the high one; values (page_len, D/32, 16): columns i and 16 + i
 */
#ifndef STEEL_BACKEND_CPU_KVTILE_H
#define STEEL_BACKEND_CPU_KVTILE_H

#include "quant/kvblock.h"

static inline bool kv_scaled(enum dtype t)
{
    return t == DT_Q8_0 || t == DT_Q4_0;
}

/* Bytes between adjacent keys in a tile of keys. */
static inline size_t kv_key_step(enum dtype t)
{
    return t == DT_F32 || kv_scaled(t) ? 4 : t == DT_F8_E4M3 ? 1 : 2;
}

/* Bytes of D values in a tile of values, without scales. */
static inline size_t kv_value_step(enum dtype t, size_t dim)
{
    return t == DT_F32 ? 4 * dim : t == DT_Q4_0 ? dim / 2 : kv_quantised(t) ? dim : 2 * dim;
}

static inline size_t kv_tile_bytes(enum dtype t, size_t page_len, size_t dim)
{
    return dtype_bytes(t, page_len * dim);
}

/* The scales of a tile: block b of token i is at [b * page_len + i]. */
static inline const uint16_t *kv_tile_scales(enum dtype t, const void *tile, size_t page_len,
                                             size_t dim)
{
    return (const uint16_t *)((const char *)tile + page_len * kv_value_step(t, dim));
}

/* Offset in bytes of component d of key `off`. Q4_0: *high tells which nibble holds it. */
static inline size_t kv_key_at(enum dtype t, size_t page_len, size_t off, size_t d, bool *high)
{
    *high = t == DT_Q4_0 && d % 32 >= 16;
    if (t == DT_Q8_0)
        return (d / 4 * page_len + off) * 4 + d % 4;
    if (t == DT_Q4_0)
        return ((d / 32 * 4 + d % 16 / 4) * page_len + off) * 4 + d % 4;
    return (d * page_len + off) * kv_key_step(t);
}

static inline size_t kv_value_at(enum dtype t, size_t dim, size_t off, size_t d, bool *high)
{
    *high = t == DT_Q4_0 && d % 32 >= 16;
    size_t column = t == DT_Q4_0 ? d / 32 * 16 + d % 16 : kv_value_step(t, d);
    return off * kv_value_step(t, dim) + column;
}

/* One value, as a float. */
static inline float kv_tile_get(enum dtype t, const void *tile, bool keys, size_t page_len,
                                size_t dim, size_t off, size_t d)
{
    bool high;
    const uint8_t *p = (const uint8_t *)tile + (keys ? kv_key_at(t, page_len, off, d, &high)
                                                     : kv_value_at(t, dim, off, d, &high));
    float x;
    if (!kv_quantised(t)) {
        quant_dequantize(t, p, &x, 1);
        return x;
    }
    if (t == DT_F8_E4M3)
        return kv_get_fp8(*p);
    x = f16_to_f32(kv_tile_scales(t, tile, page_len, dim)[d / 32 * page_len + off]);
    return x * (float)(t == DT_Q8_0 ? (int8_t)*p : (high ? *p >> 4 : *p & 15) - 8);
}

/* Stores the head x (D) as token `off` of a tile of a quantised type. */
static inline void kv_tile_put(enum dtype t, const float *x, void *tile, bool keys, size_t page_len,
                               size_t dim, size_t off)
{
    uint8_t *to = tile;
    if (t == DT_F8_E4M3) {
        size_t step = keys ? page_len : 1, at = keys ? off : off * dim;
        for (size_t d = 0; d < dim; d++)
            to[at + d * step] = kv_put_fp8(x[d]);
        return;
    }
    uint16_t *scales = (uint16_t *)(to + page_len * kv_value_step(t, dim));
    for (size_t b = 0; b < dim / 32; b++, x += 32) {
        uint8_t code[32];
        bool high;
        scales[b * page_len + off] =
            t == DT_Q8_0 ? kv_put_q8(x, (int8_t *)code) : kv_put_q4(x, code);
        if (t == DT_Q4_0)
            for (size_t j = 0; j < 16; j++)
                code[j] |= (uint8_t)(code[j + 16] << 4);
        size_t n = t == DT_Q8_0 ? 32 : 16;
        if (!keys)
            memcpy(to + kv_value_at(t, dim, off, b * 32, &high), code, n);
        for (size_t j = 0; keys && j < n; j += 4) /* four components are adjacent */
            memcpy(to + kv_key_at(t, page_len, off, b * 32 + j, &high), code + j, 4);
    }
}

#endif
