/*
 * Formats of the quantised KV cache: Q8_0 and Q4_0 (blocks of 32 values along a head, one scale
 * each) and FP8 (E4M3, no scale, saturating at 448). Rounding is part of the format, so there is
 * one copy of it: plain loops that each including file compiles for its own instruction set.
 * Backends choose their own block layout; kv_row_put writes the plain one, blocks of quant.h one
 * after another.
 */
#ifndef STEEL_QUANT_KVBLOCK_H
#define STEEL_QUANT_KVBLOCK_H

#include "quant/quant.h"

#include <string.h>

enum { KV_BLOCK = 32 };

/* Whether the cache is quantised. Heads are then whole blocks. */
static inline bool kv_quantised(enum dtype t)
{
    return t == DT_Q8_0 || t == DT_Q4_0 || t == DT_F8_E4M3;
}

/* Whether heads are rotated by kv_turn before they are stored. For keys the queries are rotated
 * too; for values the attention output is rotated back by the same transform. Latents are stored
 * unrotated. */
static inline bool kv_turned(enum dtype t)
{
    return t == DT_Q8_0 || t == DT_Q4_0;
}

/* The nearest integer, ties to even, for |x| < 2^22, in the low bits of the result. */
static inline uint32_t kv_round(float x)
{
    uint32_t bits;
    x += 0x1.8p23f;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline uint32_t kv_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* The scale as stored: saturated to finite fp16. NaN stays NaN. */
static inline uint16_t kv_scale(float d, float *as_stored)
{
    d = d > 65504.0f ? 65504.0f : d < -65504.0f ? -65504.0f : d;
    uint16_t half = f32_to_f16(d);
    *as_stored = f16_to_f32(half);
    return half;
}

/* value = scale * code, codes -127 to 127. Returns the scale. */
static inline uint16_t kv_put_q8(const float *x, int8_t *code)
{
    uint32_t most = 0;
    for (int i = 0; i < KV_BLOCK; i++) {
        uint32_t a = kv_bits(x[i]) & 0x7fffffff;
        most = a > most ? a : most;
    }
    float max, d;
    memcpy(&max, &most, 4);
    uint16_t scale = kv_scale(max * (1.0f / 127.0f), &d);
    float inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < KV_BLOCK; i++) {
        float v = x[i] * inverse;
        v = v > 127.0f ? 127.0f : v;
        v = v < -127.0f ? -127.0f : v;
        code[i] = (int8_t)kv_round(v);
    }
    return scale;
}

/* value = scale * (code - 8), codes 0 to 15. The value of largest magnitude gets code 0. */
static inline uint16_t kv_put_q4(const float *x, uint8_t *code)
{
    uint32_t most = 0;
    for (int i = 0; i < KV_BLOCK; i++) { /* the sign in the lowest bit */
        uint32_t a = kv_bits(x[i]);
        a = a << 1 | a >> 31;
        most = a > most ? a : most;
    }
    float max, d;
    most = most >> 1 | most << 31;
    memcpy(&max, &most, 4);
    uint16_t scale = kv_scale(max * -0.125f, &d);
    float inverse = d != 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < KV_BLOCK; i++) {
        float v = x[i] * inverse + 8.0f;
        v = v > 15.0f ? 15.0f : v;
        v = v < 0.0f ? 0.0f : v;
        code[i] = (uint8_t)(kv_round(v) & 15);
    }
    return scale;
}

/* FP8 E4M3, to nearest even, saturating; NaN becomes 0. */
static inline uint8_t kv_put_fp8(float x)
{
    uint32_t bits = kv_bits(x), sign = bits >> 24 & 0x80, a = bits & 0x7fffffff;
    float size;
    a = a > 0x7f800000 ? 0 : a > 0x43e00000 ? 0x43e00000 : a; /* 448 */
    memcpy(&size, &a, 4);
    uint32_t small = kv_round(size < 1.0f ? size * 512.0f : 0.0f) & 0xff; /* steps of 2^-9 */
    uint32_t large = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (a < 0x3c800000 ? small : large)); /* 2^-6 */
}

/* An FP8 value / 256 as fp16 bits. Exact below 2^-6, too. */
static inline uint16_t kv_fp8_half(uint8_t b)
{
    return (uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7);
}

static inline float kv_get_fp8(uint8_t b)
{
    return f16_to_f32(kv_fp8_half(b)) * 256.0f;
}

/* Writes n values (quantised: whole blocks) in the cache's type, in quant.h's layout (FP8:
 * bytes). */
static inline void kv_row_put(enum dtype t, const float *from, int n, void *to)
{
    if (t == DT_F32) {
        memcpy(to, from, (size_t)n * sizeof *from);
        return;
    }
    if (t == DT_F16 || t == DT_BF16) {
        uint16_t *halves = (uint16_t *)to;
        for (int i = 0; i < n; i++)
            halves[i] = t == DT_F16 ? f32_to_f16(from[i]) : f32_to_bf16(from[i]);
        return;
    }
    if (t == DT_F8_E4M3) {
        for (int i = 0; i < n; i++)
            ((uint8_t *)to)[i] = kv_put_fp8(from[i]);
        return;
    }
    for (int i = 0; i < n / KV_BLOCK; i++, from += KV_BLOCK) {
        if (t == DT_Q8_0) {
            struct block_q8_0 *b = (struct block_q8_0 *)to + i;
            b->d = kv_put_q8(from, b->qs);
            continue;
        }
        struct block_q4_0 *b = (struct block_q4_0 *)to + i;
        uint8_t code[KV_BLOCK];
        b->d = kv_put_q4(from, code);
        for (int j = 0; j < KV_BLOCK / 2; j++)
            b->qs[j] = (uint8_t)(code[j] | code[j + KV_BLOCK / 2] << 4);
    }
}

static inline void kv_row_get(enum dtype t, const void *from, int n, float *to)
{
    if (!kv_quantised(t)) {
        quant_dequantize(t, from, to, (size_t)n);
        return;
    }
    if (t == DT_F8_E4M3) {
        for (int i = 0; i < n; i++)
            to[i] = kv_get_fp8(((const uint8_t *)from)[i]);
        return;
    }
    for (int i = 0; i < n / KV_BLOCK; i++, to += KV_BLOCK) {
        if (t == DT_Q8_0) {
            const struct block_q8_0 *b = (const struct block_q8_0 *)from + i;
            float d = f16_to_f32(b->d);
            for (int j = 0; j < KV_BLOCK; j++)
                to[j] = d * (float)b->qs[j];
            continue;
        }
        const struct block_q4_0 *b = (const struct block_q4_0 *)from + i;
        float d = f16_to_f32(b->d);
        for (int j = 0; j < KV_BLOCK / 2; j++) {
            to[j] = d * (float)((b->qs[j] & 15) - 8);
            to[j + KV_BLOCK / 2] = d * (float)((b->qs[j] >> 4) - 8);
        }
    }
}

/* Sixteen floats in one or more registers. */
typedef float kv_lanes __attribute__((vector_size(64), aligned(4)));

/* p[0..16) times a Hadamard matrix and scale. Each stage pairs lanes whose indices differ in one
 * bit. */
static inline void kv_turn_lanes(float *p, float scale)
{
    const kv_lanes one = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
    const kv_lanes two = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
    const kv_lanes four = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
    const kv_lanes eight = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    kv_lanes x = *(kv_lanes *)p;
    x = one * x +
        __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    x = two * x +
        __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x = four * x +
        __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = eight * x +
        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    *(kv_lanes *)p = x * scale;
}

/* Multiplies a head (whole blocks) by an orthonormal Hadamard matrix, in runs of the largest power
 * of two that divides n. It is its own inverse, and products of two rotated heads are unchanged. It
 * spreads outliers over all components, which low-bit formats store better. */
static inline void kv_turn(float *x, int n)
{
    enum { LANES = 16 };
    int run = n & -n;
    float scale = 1.0f;
    for (int r = run; r > 1; r >>= 1)
        scale *= 0x1.6a09e6p-1f;
    for (int i = 0; i < n; i += LANES)
        kv_turn_lanes(x + i, scale);
    for (int half = LANES; half < run; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; j += LANES) {
                kv_lanes *low = (kv_lanes *)(x + j), *high = (kv_lanes *)(x + j + half);
                kv_lanes a = *low, b = *high;
                *low = a + b;
                *high = a - b;
            }
}

#endif
