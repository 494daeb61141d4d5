/*
 * Panels of the formats with few bits, in plain C: packs a block of the file into its lane, and dequantises
 * a row. Both are exact; panel.h has the layouts.
 */
#include "backend/cpu/panel_low.h"
#include "backend/cpu/panel.h"
#include "base/error.h"

#include <string.h>

bool panel_is_low(enum dtype t)
{
    int blocks;
    size_t scales, bytes;
    return panel_low_unit(t, &blocks, &scales, &bytes);
}

bool panel_low_unit(enum dtype t, int *blocks, size_t *scales, size_t *bytes)
{
    *blocks = 1;
    *scales = 0;
    switch (t) {
    case DT_Q2_K:
        *bytes = LOW_SCALES + 8 * Q2K_BLOCK;
        return true;
    case DT_Q3_K:
        *bytes = LOW_SCALES + 8 * Q3K_BLOCK;
        return true;
    case DT_Q4_1:
        *blocks = 2, *scales = 2 * UNIT_SCALES, *bytes = 256;
        return true;
    case DT_Q5_0:
        *blocks = 2, *scales = UNIT_SCALES, *bytes = Q5K_BLOCK;
        return true;
    case DT_Q5_1:
        *blocks = 2, *scales = 2 * UNIT_SCALES, *bytes = Q5K_BLOCK;
        return true;
    default:
        return false;
    }
}

/* Inserts a code of up to 4 bits at a column of a C4 block that holds zeros there. */
static void put4(uint8_t *block, int lane, int col, int code)
{
    int g = col / 4;
    block[64 * (g / 2) + 4 * lane + col % 4] |= (uint8_t)(code << 4 * (g & 1));
}

static int get4(const uint8_t *block, int lane, int col)
{
    int g = col / 4;
    return block[64 * (g / 2) + 4 * lane + col % 4] >> 4 * (g & 1) & 15;
}

/* Zeros a lane of `vectors` vectors. */
static void clear_lane(uint8_t *p, int vectors, int lane)
{
    for (int i = 0; i < vectors; i++)
        memset(p + 64 * i + 4 * lane, 0, 4);
}

/* The two low bits of column i of Q2_K and Q3_K. */
static int two_bits(const uint8_t *qs, int i)
{
    return qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

static void pack_q2k(const struct block_q2_k *b, uint8_t *unit, int lane)
{
    for (int j = 0; j < 16; j++)
        unit[64 * (j / 4) + 4 * lane + j % 4] = b->scales[j];
    memcpy(unit + 256 + 2 * lane, &b->d, 2);
    memcpy(unit + 288 + 2 * lane, &b->dmin, 2);
    uint8_t *out = unit + LOW_SCALES;
    clear_lane(out, 16, lane);
    for (int i = 0; i < QK_K; i++)
        out[64 * (i / 16) + 4 * lane + i % 4] |= (uint8_t)(two_bits(b->qs, i) << 2 * (i % 16 / 4));
}

static void pack_q3k(const struct block_q3_k *b, uint8_t *unit, int lane)
{
    for (int j = 0; j < 16; j++)
        unit[64 * (j / 4) + 4 * lane + j % 4] = (uint8_t)quant_q3k_scale(b->scales, j);
    memcpy(unit + 256 + 2 * lane, &b->d, 2);
    uint8_t *out = unit + LOW_SCALES;
    clear_lane(out, 24, lane);
    for (int i = 0; i < QK_K; i++) {
        uint8_t *block = out + Q3K_BLOCK * (i / 32) + 4 * lane + i % 4;
        block[0] |= (uint8_t)((b->hmask[i % 32] >> (i / 32) & 1) << i % 32 / 4);
        block[64 + i % 32 / 16 * 64] |= (uint8_t)(two_bits(b->qs, i) << 2 * (i % 16 / 4));
    }
}

/* Packs 32 codes, columns 0-15 in the low nibbles, and (qh) their fifth bits. */
static void pack_small(const uint8_t *qs, const uint8_t *qh, uint8_t *block, int lane)
{
    uint8_t *nibbles = block + (qh ? 64 : 0);
    clear_lane(block, qh ? 5 : 4, lane);
    for (int i = 0; i < 32; i++) {
        put4(nibbles, lane, i, qs[i % 16] >> 4 * (i / 16) & 15);
        if (qh)
            block[4 * lane + i % 4] |= (uint8_t)((qh[i / 8] >> i % 8 & 1) << i / 4);
    }
}

void panel_low_pack(enum dtype t, const uint8_t *src, uint8_t *unit, int i, int lane)
{
    union {
        struct block_q2_k q2k;
        struct block_q3_k q3k;
        struct block_q4_1 q4_1;
        struct block_q5_0 q5_0;
        struct block_q5_1 q5_1;
    } b;
    int blocks;
    size_t scales, bytes;
    CHECK(panel_low_unit(t, &blocks, &scales, &bytes), "%s has no layout", dtype_name(t));
    uint8_t *block = unit + scales + (size_t)i * bytes;
    memcpy(&b, src, (size_t)dtype_table[t].block_bytes); /* files guarantee no alignment */
    switch (t) {
    case DT_Q2_K:
        pack_q2k(&b.q2k, unit, lane);
        break;
    case DT_Q3_K:
        pack_q3k(&b.q3k, unit, lane);
        break;
    case DT_Q5_0:
        memcpy(unit + 32 * i + 2 * lane, &b.q5_0.d, 2);
        pack_small(b.q5_0.qs, b.q5_0.qh, block, lane);
        break;
    default: /* Q4_1 and Q5_1: d, then m */
        memcpy(unit + 32 * i + 2 * lane, &b.q4_1.d, 2);
        memcpy(unit + UNIT_SCALES + 32 * i + 2 * lane, &b.q4_1.m, 2);
        pack_small(t == DT_Q4_1 ? b.q4_1.qs : b.q5_1.qs, t == DT_Q4_1 ? NULL : b.q5_1.qh, block,
                   lane);
    }
}

static float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return f16_to_f32(h);
}

static void row_k(enum dtype t, const uint8_t *unit, int lane, float *dst)
{
    const uint8_t *q = unit + LOW_SCALES;
    float d = half_at(unit + 256 + 2 * lane), dmin = half_at(unit + 288 + 2 * lane);
    for (int i = 0; i < QK_K; i++) {
        uint8_t sc = unit[64 * (i / 64) + 4 * lane + i / 16 % 4];
        int at = 4 * lane + i % 4, shift = 2 * (i % 16 / 4);
        if (t == DT_Q2_K) {
            int code = q[64 * (i / 16) + at] >> shift & 3;
            dst[i] = d * (float)(sc & 15) * (float)code - dmin * (float)(sc >> 4);
            continue;
        }
        const uint8_t *block = q + Q3K_BLOCK * (i / 32) + at;
        int code = (block[64 + i % 32 / 16 * 64] >> shift & 3) | (block[0] >> i % 32 / 4 & 1) << 2;
        dst[i] = d * (float)(int8_t)sc * (float)(code - 4);
    }
}

void panel_low_row(enum dtype t, const uint8_t *unit, int i, int lane, float *dst)
{
    int blocks;
    size_t scales, bytes;
    CHECK(panel_low_unit(t, &blocks, &scales, &bytes), "%s has no layout", dtype_name(t));
    const uint8_t *block = unit + scales + (size_t)i * bytes;
    if (t == DT_Q2_K || t == DT_Q3_K) {
        row_k(t, unit, lane, dst);
        return;
    }
    float d = half_at(unit + 32 * i + 2 * lane);
    float m = t == DT_Q5_0 ? 0.0f : half_at(unit + UNIT_SCALES + 32 * i + 2 * lane);
    for (int k = 0; k < 32; k++) {
        int code = get4(block + (t == DT_Q4_1 ? 0 : 64), lane, k);
        if (t != DT_Q4_1)
            code |= (block[4 * lane + k % 4] >> k / 4 & 1) << 4;
        dst[k] = t == DT_Q5_0 ? d * (float)(code - 16) : d * (float)code + m;
    }
}
