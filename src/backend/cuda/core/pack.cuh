/*
 * Packing: converts the file's blocks to the words of a tile, one word at a time, for weights.cu.
 * What a format means in the file (code_of, *_of for scales) is separate from its position in a
 * tile (*_word, see codes.cuh).
 */
#ifndef STEEL_BACKEND_CUDA_PACK_CUH
#define STEEL_BACKEND_CUDA_PACK_CUH

#include "backend/cuda/core/panel.cuh"

/* Scalar meaning of every file format: element k of 256 columns whose blocks start at b. */

DEVICE int iq4_level(int code)
{
    /* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, each plus 128, a byte each */
    const uint64_t lo = 0x766a5d4f3f2d1801u, hi = 0xf1d9c5b5a6998d81u;
    return (int)((code < 8 ? lo : hi) >> 8 * (code & 7) & 255) - 128;
}
DEVICE int fp4_level(int code) /* doubled */
{
    int v = (int)(0xc8643210u >> 4 * (code & 7) & 15);
    return code & 8 ? -v : v;
}
DEVICE void k4_scale_min(const uint8_t *s, int j, int *scale, int *min)
{
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

DEVICE uint32_t raw_word(const uint8_t *b)
{
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* Sign i of the eight that 7 bits encode: the number of set signs is even. */
DEVICE bool even_sign(uint32_t bits, int i)
{
    bits &= 127;
    for (int j = 0; i == 7 && j < 7; j++)
        bits ^= (bits >> j & 1) << 7;
    return bits >> i & 1;
}

/* The level index of value k of a block of a grid format: see codes.cuh and quant.h. */
DEVICE uint32_t grid_code(int dtype, const uint8_t *b, int k, const uint16_t *grid)
{
    int blk = k >> 5, i = k & 7, g = k >> 3, in = g & 3; /* g: group of eight, of 32 */
    switch (dtype) {
    case DT_IQ1_S: {
        uint32_t h = b[34 + 2 * blk] | (uint32_t)b[35 + 2 * blk] << 8;
        uint32_t point = grid[b[2 + g] | (h >> 3 * in & 7) << 8];
        return (point >> 2 * i & 3) | (h & 0x8000 ? 0 : 4);
    }
    case DT_IQ1_M: {
        uint32_t h = b[32 + g / 2] >> 4 * (g & 1), point = grid[b[g] | (h & 7) << 8];
        return (point >> 2 * i & 3) | (h & 8 ? 0 : 4);
    }
    case DT_IQ2_XXS: {
        uint32_t s = raw_word(b + 2 + 8 * blk + 4), point = grid[b[2 + 8 * blk + in]];
        return (point >> 2 * i & 3) | (uint32_t)even_sign(s >> 7 * in, i) << 2;
    }
    case DT_IQ2_XS: {
        uint32_t q = b[2 + 2 * g] | (uint32_t)b[3 + 2 * g] << 8;
        return (uint32_t)(grid[q & 511] >> 2 * i & 3) | (uint32_t)even_sign(q >> 9, i) << 2;
    }
    case DT_IQ2_S: {
        uint32_t point = grid[b[2 + g] | (b[66 + g / 4] >> 2 * in & 3u) << 8];
        return (point >> 2 * i & 3) | (b[34 + g] >> i & 1u) << 2;
    }
    default: { /* IQ3_XXS */
        uint32_t s = raw_word(b + 66 + 4 * blk), point = grid[b[2 + k / 4]];
        return (point >> 3 * (k % 4) & 7) | (uint32_t)even_sign(s >> 7 * in, i) << 3;
    }
    }
}

/* The level of an index. */
DEVICE int grid_level(int dtype, uint32_t code)
{
    if (dtype == DT_IQ1_S || dtype == DT_IQ1_M)
        return 8 * ((int)(code & 3) - 1) + (code & 4 ? 1 : -1);
    if (dtype == DT_IQ3_XXS) {
        int v = (int)(8 * (code & 7)) + ((code & 7) == 7 ? 6 : 4);
        return code & 8 ? -v : v;
    }
    int v = (code & 3) == 0 ? 8 : (code & 3) == 1 ? 25 : 43;
    return code & 4 ? -v : v;
}

DEVICE int tq1_digit(const uint8_t *b, int k)
{
    int digit = k < 160 ? k / 32 : k < 240 ? (k - 160) / 16 : (k - 240) / 4;
    uint32_t q = b[k < 160 ? k % 32 : k < 240 ? 32 + k % 16 : 48 + k % 4];
    for (int i = 0; i < digit; i++)
        q = q * 3 & 255;
    return (int)(q * 3 >> 8);
}

DEVICE uint32_t two_bytes(const uint8_t *b)
{
    return (uint32_t)(b[0] | b[1] << 8);
}

/* fp16 factor of a row (scales_k*): of its scales (which = 0) or its minima (1). */
DEVICE uint32_t row_half(int dtype, const uint8_t *b, int which)
{
    switch (dtype) {
    case DT_Q2_K:
        return two_bytes(b + 80 + 2 * which);
    case DT_Q3_K:
        return two_bytes(b + 108);
    case DT_Q6_K:
        return two_bytes(b + 208);
    case DT_TQ1_0:
        return two_bytes(b + 52);
    case DT_TQ2_0:
        return two_bytes(b + 64);
    case DT_IQ1_M:
        return b[49] >> 4 | (b[51] & 0xf0u) | (b[53] & 0xf0u) << 4 | (b[55] & 0xf0u) << 8;
    default:
        return two_bytes(b + 2 * which);
    }
}

/* Byte of a group's scale or minimum (scales_k*). */
DEVICE uint32_t group_byte(int dtype, const uint8_t *b, int k, int which)
{
    int blk = k >> 5, s = k >> 4, scale, least;
    switch (dtype) {
    case DT_Q2_K: /* both in one byte */
        return b[s];
    case DT_Q3_K: {
        int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
        return (uint32_t)((low | (b[104 + s % 4] >> 2 * (s / 4) & 3) << 4) + 96);
    }
    case DT_Q4_K:
    case DT_Q5_K:
        k4_scale_min(b + 4, blk, &scale, &least);
        return (uint32_t)(which ? least : scale);
    case DT_Q6_K:
        return b[192 + s] ^ 0x80u;
    case DT_IQ4_XS:
        return (uint32_t)(((b[4 + blk / 2] >> (blk % 2 * 4) & 15) |
                           (two_bytes(b + 2) >> 2 * blk & 3) << 4) +
                          96);
    case DT_IQ3_S:
        return (uint32_t)(129 + 2 * (b[106 + k / 64] >> (k % 64 / 32 * 4) & 15));
    case DT_IQ1_S:
        return 129 + 2 * (two_bytes(b + 34 + 2 * blk) >> 12 & 7);
    case DT_IQ1_M:
        return 129 + 2 * (two_bytes(b + 48 + k / 64 * 2) >> 3 * (s % 4) & 7);
    case DT_IQ2_XXS:
        return 129 + 2 * (raw_word(b + 2 + 8 * blk + 4) >> 28);
    case DT_IQ2_XS:
        return 129 + 2 * (b[66 + blk] >> 4 * (s & 1) & 15);
    case DT_IQ2_S:
        return 129 + 2 * (b[74 + blk] >> 4 * (s & 1) & 15);
    case DT_IQ3_XXS:
        return 129 + 2 * (raw_word(b + 66 + 4 * blk) >> 28);
    case DT_TQ1_0: /* like Q2_K; the code for zero is the minimum */
    case DT_TQ2_0:
        return 0x11;
    case DT_NVFP4: /* 0x7f counts as 0, and 0xff as its negative */
        return b[s % 4] == 0x7f ? 0 : b[s % 4] & 127u;
    default:
        return 0;
    }
}

DEVICE float raw_value(int dtype, const uint8_t *b, int k, const void *aux)
{
    int j = k & 31, hi = j >> 4, i = j & 15, blk = k >> 5;
    switch (dtype) {
    case DT_Q4_0:
        b += blk * 18;
        return raw_half(b) * (float)((b[2 + i] >> 4 * hi & 15) - 8);
    case DT_Q4_1:
        b += blk * 20;
        return raw_half(b) * (float)(b[4 + i] >> 4 * hi & 15) + raw_half(b + 2);
    case DT_Q5_0: {
        b += blk * 22;
        int top = b[2 + j / 8] >> j % 8 & 1;
        return raw_half(b) * (float)(((b[6 + i] >> 4 * hi & 15) | top << 4) - 16);
    }
    case DT_Q5_1: {
        b += blk * 24;
        int top = b[4 + j / 8] >> j % 8 & 1;
        return raw_half(b) * (float)((b[8 + i] >> 4 * hi & 15) | top << 4) + raw_half(b + 2);
    }
    case DT_Q8_0:
        b += blk * 34;
        return raw_half(b) * (float)(int8_t)b[2 + j];
    case DT_IQ4_NL:
        b += blk * 18;
        return raw_half(b) * (float)iq4_level(b[2 + i] >> 4 * hi & 15);
    case DT_MXFP4: {
        b += blk * 17;
        uint32_t e = b[0];
        float scale = float_of(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        return scale * (float)fp4_level(b[1 + i] >> 4 * hi & 15);
    }
    case DT_Q2_K: {
        int q = b[16 + k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3, sc = b[k / 16];
        return raw_half(b + 80) * (float)(sc & 15) * (float)q - raw_half(b + 82) * (float)(sc >> 4);
    }
    case DT_Q3_K: {
        int q = b[32 + k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3, s = k / 16;
        int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
        int sc = (low | (b[104 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
        return raw_half(b + 108) * (float)sc * (float)(q - (b[j] >> (k / 32) & 1 ? 0 : 4));
    }
    case DT_Q4_K:
    case DT_Q5_K: {
        int sc, m, shift = blk % 2 * 4;
        k4_scale_min(b + 4, blk, &sc, &m);
        const uint8_t *qs = b + (dtype == DT_Q4_K ? 16 : 48);
        int q = qs[blk / 2 * 32 + j] >> shift & 15;
        if (dtype == DT_Q5_K)
            q |= (b[16 + j] >> blk & 1) << 4;
        return raw_half(b) * (float)sc * (float)q - raw_half(b + 2) * (float)m;
    }
    case DT_Q6_K: {
        int half = k / 128, part = k % 128 / 32;
        int low = b[64 * half + part % 2 * 32 + j] >> (part / 2 * 4) & 15;
        int top = b[128 + 32 * half + j] >> (2 * part) & 3;
        return raw_half(b + 208) * (float)(int8_t)b[192 + k / 16] * (float)((low | top << 4) - 32);
    }
    case DT_IQ4_XS: {
        int sc = (b[4 + blk / 2] >> (blk % 2 * 4) & 15) | ((b[2] | b[3] << 8) >> 2 * blk & 3) << 4;
        return raw_half(b) * (float)(sc - 32) *
               (float)iq4_level(b[8 + 16 * blk + i] >> 4 * hi & 15);
    }
    case DT_NF4:
    case DT_FP4:
        b += k / 64 * 36;
        return float_of(raw_word(b)) * float_level(dtype, b[4 + k % 64 / 2] >> 4 * (k & 1) & 15);
    case DT_NVFP4: {
        b += k / 64 * 36;
        int group = k % 64 / 16, code = b[4 + 8 * group + k % 8] >> (k % 16 / 8 * 4) & 15;
        uint8_t e = b[group];
        float scale = e == 0x7f ? 0.0f : e == 0xff ? 240.0f : 0.5f * f8_to_float(e & 0x7f);
        return scale * (float)fp4_level(code);
    }
    case DT_IQ1_S:
    case DT_IQ1_M:
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
    case DT_IQ3_XXS: {
        float d = half_to_float(row_half(dtype, b, 0)) *
                  ((float)group_byte(dtype, b, k, 0) - 128.0f) *
                  (dtype == DT_IQ3_XXS ? 0.25f : 0.125f);
        return d * (float)grid_level(dtype, grid_code(dtype, b, k, (const uint16_t *)aux));
    }
    case DT_IQ3_S: {
        float d = raw_half(b) * ((float)group_byte(dtype, b, k, 0) - 128.0f);
        int index = b[2 + k / 4] | (b[66 + blk] >> (j / 4) & 1) << 8;
        int v = 2 * (((const uint16_t *)aux)[index] >> 3 * (k % 4) & 7) + 1;
        return b[74 + k / 8] >> k % 8 & 1 ? -d * (float)v : d * (float)v;
    }
    case DT_TQ1_0:
        return raw_half(b + 52) * (float)(tq1_digit(b, k) - 1);
    case DT_TQ2_0:
        return raw_half(b + 64) * (float)((int)(b[k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3) - 1);
    case DT_F8_E4M3:
        return f8_to_float(b[k]);
    case DT_F16:
        return raw_half(b + 2 * k);
    case DT_BF16:
        return bf16_to_float((uint32_t)b[2 * k] | (uint32_t)b[2 * k + 1] << 8);
    case DT_F32:
        return float_of(b[4 * k] | (uint32_t)b[4 * k + 1] << 8 | (uint32_t)b[4 * k + 2] << 16 |
                        (uint32_t)b[4 * k + 3] << 24);
    }
    return 0.0f;
}

/* A piece of a segment being repacked: `rows` rows of the file's blocks, and their destination. */
struct repack {
    int kind, dtype, n_in, n_kt, rows, tile_bytes;
    int block_len, block_bytes;
    size_t row_bytes;
    const uint8_t *data;     /* (rows, row_bytes), or panels */
    struct panel_form panel; /* panel_bytes 0: the file's blocks */
    /* GPTQ: fp16 (rows, n_groups); FP8: float (rows, n_groups); NVFP4: one float */
    const uint8_t *scale;
    const uint8_t *zero;    /* GPTQ: (rows, n_groups) */
    const int32_t *inverse; /* GPTQ act-order: stored column of input column k */
    int n_groups, group_len;
    const void *aux;
    uint8_t *out; /* (tiles, n_kt, tile_bytes) */
};

/* weights.cu: makes tiles of panels. */
void cuda_repack(struct cuda_backend *cu, const struct repack &p, int tiles);

/* The block with (row, column), or the unit of a panel; NULL for padding. */
DEVICE const uint8_t *block_of(const struct repack &p, int row, int col)
{
    if (row >= p.rows || col >= p.n_in)
        return NULL;
    if (p.panel.panel_bytes)
        return panel_unit(p.panel, p.data, row, col);
    return p.data + (size_t)row * p.row_bytes + (size_t)(col / p.block_len) * (size_t)p.block_bytes;
}

/* The tile's code of (row, column). For padding any value will do, since its scale is 0. */
DEVICE uint32_t code_of(const struct repack &p, int row, int col)
{
    const uint8_t *b = block_of(p, row, col);
    if (!b)
        return 0;
    if (p.panel.panel_bytes)
        return panel_code(p.dtype, p.panel, b, row, col);
    int k = col & 255, j = k & 31, hi = j >> 4, i = j & 15, blk = k >> 5;
    switch (p.dtype) {
    case DT_Q4_0:
    case DT_IQ4_NL:
        return b[2 + i] >> 4 * hi & 15;
    case DT_MXFP4:
        return b[1 + i] >> 4 * hi & 15;
    case DT_Q4_1:
        return b[4 + i] >> 4 * hi & 15;
    case DT_Q5_0:
        return (b[6 + i] >> 4 * hi & 15) | (b[2 + j / 8] >> j % 8 & 1) << 4;
    case DT_Q5_1:
        return (b[8 + i] >> 4 * hi & 15) | (b[4 + j / 8] >> j % 8 & 1) << 4;
    case DT_Q8_0:
        return b[2 + j] ^ 0x80u;
    case DT_Q2_K:
        return b[16 + k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3;
    case DT_Q3_K:
        return (b[32 + k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3) | (b[j] >> blk & 1) << 2;
    case DT_Q4_K:
        return b[16 + blk / 2 * 32 + j] >> (blk & 1) * 4 & 15;
    case DT_Q5_K:
        return (b[48 + blk / 2 * 32 + j] >> (blk & 1) * 4 & 15) | (b[16 + j] >> blk & 1) << 4;
    case DT_Q6_K: {
        int half = k / 128, part = k % 128 / 32;
        uint32_t low = b[64 * half + part % 2 * 32 + j] >> (part / 2 * 4) & 15;
        return low | (b[128 + 32 * half + j] >> (2 * part) & 3) << 4;
    }
    case DT_IQ4_XS:
        return b[8 + 16 * blk + i] >> 4 * hi & 15;
    case DT_IQ3_S: {
        int index = b[2 + k / 4] | (b[66 + blk] >> (j / 4) & 1) << 8;
        uint32_t v = ((const uint16_t *)p.aux)[index] >> 3 * (k % 4) & 7;
        return b[74 + k / 8] >> k % 8 & 1 ? 7 - v : 8 + v;
    }
    case DT_IQ1_S:
    case DT_IQ1_M:
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
    case DT_IQ3_XXS:
        return grid_code(p.dtype, b, k, (const uint16_t *)p.aux);
    case DT_TQ1_0:
        return (uint32_t)tq1_digit(b, k);
    case DT_TQ2_0:
        return b[k / 128 * 32 + j] >> (k % 128 / 32 * 2) & 3;
    case DT_NVFP4:
        return b[4 + 8 * (k % 64 / 16) + k % 8] >> (k % 16 / 8 * 4) & 15;
    case DT_NF4:
    case DT_FP4:
        return (uint32_t)(level_table_of(p.dtype).names >>
                          4 * (b[4 + k % 64 / 2] >> 4 * (k & 1) & 15)) &
               15;
    case DT_F8_E4M3:
        return b[0];
    default: /* GPTQ4: two columns per byte */
        return b[0] >> (col & 1) * 4 & 15;
    }
}

/* row_half of (row, column); 0 for padding. */
DEVICE uint32_t row_half_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    if (b && p.panel.panel_bytes)
        return two_bytes(panel_row_half(p.dtype, b, row, which));
    return b ? row_half(p.dtype, b, which) : 0;
}
DEVICE uint32_t group_byte_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    if (b && p.panel.panel_bytes)
        return panel_group_byte(p.dtype, b, row, col & 255, which);
    return b ? group_byte(p.dtype, b, col & 255, which) : 0;
}

/* fp16 scale of a group, or its addend (scales_half). */
DEVICE uint32_t group_half_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    if (!b)
        return 0;
    if (p.dtype == DT_GPTQ4)
        return two_bytes(p.scale +
                         2 * ((size_t)row * (size_t)p.n_groups + (size_t)(col / p.group_len)));
    const uint8_t *half = b + 2 * which, *scale = b;
    if (p.panel.panel_bytes) {
        scale = panel_group_half(p.panel, b, row, col, 0);
        half = panel_group_half(p.panel, b, row, col, which);
    }
    if (p.dtype == DT_Q5_0 && which)
        return float_to_half(-16.0f * raw_half(scale));
    return two_bytes(half);
}

DEVICE int exponent_of(const struct repack &p, int row, int col)
{
    const uint8_t *b = block_of(p, row, col);
    return !b ? 0 : p.panel.panel_bytes ? panel_exponent(p.panel, b, row, col) : b[0];
}

/* MXFP4 (scales_power): the largest exponent of a row's 256 columns, and a group's relative to
 * it. */
DEVICE int top_exponent(const struct repack &p, int row, int kt)
{
    int top = 0;
    for (int col = kt * TILE_K; col < (kt + 1) * TILE_K; col += 32) {
        int e = exponent_of(p, row, col);
        top = e > top ? e : top;
    }
    return top;
}
DEVICE uint32_t power_of(const struct repack &p, int row, int col)
{
    bool in = row < p.rows && col < p.n_in;
    int e = in ? exponent_of(p, row, col) - top_exponent(p, row, col / TILE_K) + 30 : 0;
    return e <= 0 ? 0 : (uint32_t)(e - 15 + 127);
}
/* Levels are doubled; the largest scale is 2^15. */
DEVICE uint32_t row_power_of(const struct repack &p, int row, int kt)
{
    int e = top_exponent(p, row, kt) - 127 - 16;
    return e >= -126 ? (uint32_t)(e + 127) << 23 : 1u << (e + 149);
}

/* Words of codes; w counts from the start of the tile. f(row, column) returns a code, or part of
 * one. */

/* A word of nibbles or pairs: register i of 16 columns at bit `bits` * i, odd columns 16 bits
 * above. */
template <class F> DEVICE uint32_t regs_word(int row0, int col0, int lane, int bits, F f)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++)
        for (int e = 0; e < 2; e++)
            v |= f(row0 + (lane >> 2) + 8 * (i & 1), col0 + 4 * (lane & 3) + 2 * (i >> 1) + e)
                 << (bits * i + 16 * e);
    return v;
}
template <class F> DEVICE uint32_t nibbles_word(int row0, int kt, int w, F f)
{
    int col = kt * TILE_K + 64 * (w >> 7) + 16 * (w & 3);
    return regs_word(row0, col, w >> 2 & 31, 4, [&](int r, int c) { return f(r, c) & 15; });
}
template <class F> DEVICE uint32_t pairs_word(int row0, int kt, int w, F f)
{
    int col = kt * TILE_K + 64 * (w >> 6) + 32 * (w & 1), lane = w >> 1 & 31;
    auto two = [&](int r, int c) { return f(r, c) & 3; };
    return regs_word(row0, col, lane, 4, two) | regs_word(row0, col + 16, lane, 4, two) << 2;
}
/* The top bits of codes_five and codes_pair. */
template <class F> DEVICE uint32_t tops_word(int row0, int kt, int w, F f)
{
    uint32_t v = 0;
    for (int j = 0; j < 4; j++)
        v |= regs_word(row0, kt * TILE_K + 64 * (w >> 5) + 16 * j, w & 31, 4,
                       [&](int r, int c) { return f(r, c) & 1; })
             << j;
    return v;
}
/* The high pairs of codes_six. */
template <class F> DEVICE uint32_t highs_word(int row0, int kt, int w, F f)
{
    int col = kt * TILE_K + 64 * (w >> 6) + 32 * (w & 1), lane = w >> 1 & 31;
    uint32_t v = 0;
    for (int jj = 0; jj < 2; jj++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++)
                v |= f(row0 + (lane >> 2) + 8 * (i & 1),
                       col + 16 * jj + 4 * (lane & 3) + 2 * (i >> 1) + e)
                     << (8 * jj + high_pair(i) + 16 * e);
    return v;
}
template <class F> DEVICE uint32_t bytes_word(int row0, int kt, int w, F f)
{
    int lane = w >> 2 & 31, row = row0 + (lane >> 2) + 8 * (w & 1);
    int col = kt * TILE_K + 32 * (w >> 7) + 16 * (w >> 1 & 1) + 4 * (lane & 3);
    return f(row, col) | f(row, col + 2) << 8 | f(row, col + 1) << 16 | f(row, col + 3) << 24;
}
template <class F> DEVICE uint32_t levels_word(int row0, int kt, int w, F f)
{
    int lane = w >> 2 & 31, row = row0 + (lane >> 2);
    int col = kt * TILE_K + 64 * (w >> 7) + 16 * (w & 3) + 4 * (lane & 3);
    uint32_t v = 0;
    for (int h = 0; h < 2; h++)
        for (int e = 0; e < 4; e++)
            v |= f(row + 8 * h, col + e) << (16 * h + 4 * ((e & 1) * 2 + (e >> 1)));
    return v;
}

/* codes_level3: f returns three bits; pairs first, then the third bits. */
template <class F> DEVICE uint32_t level_pairs_word(int row0, int kt, int w, F f)
{
    int lane = w >> 1 & 31, col = kt * TILE_K + 64 * (w >> 6) + 32 * (w & 1) + 4 * (lane & 3);
    uint32_t v = 0;
    for (int i = 0; i < 16; i++) { /* [16 columns][row half][column] */
        int nibble = (i >> 2 & 1) * 4 + (i & 1) * 2 + (i >> 1 & 1);
        v |= (f(row0 + (lane >> 2) + 8 * (i >> 2 & 1), col + 16 * (i >> 3) + (i & 3)) & 3)
             << (4 * nibble + 2 * (i >> 3));
    }
    return v;
}
template <class F> DEVICE uint32_t level_tops_word(int row0, int kt, int w, F f)
{
    int lane = w & 31, col = kt * TILE_K + 64 * (w >> 5) + 4 * (lane & 3);
    uint32_t v = 0;
    for (int i = 0; i < 32; i++) {
        int nibble = (i >> 2 & 1) * 4 + (i & 1) * 2 + (i >> 1 & 1);
        v |= (f(row0 + (lane >> 2) + 8 * (i >> 2 & 1), col + 16 * (i >> 3) + (i & 3)) >> 2 & 1)
             << (4 * nibble + (i >> 3));
    }
    return v;
}

DEVICE uint32_t codes_word(const struct repack &p, int row0, int kt, int w)
{
    auto code = [&](int r, int c) { return code_of(p, r, c); };
    switch (p.kind) {
    case TILE_Q8_0:
    case TILE_F8:
        return bytes_word(row0, kt, w, code);
    case TILE_IQ1:
    case TILE_IQ2:
        return w < 256 ? level_pairs_word(row0, kt, w, code)
                       : level_tops_word(row0, kt, w - 256, code);
    case TILE_Q2_K:
        return pairs_word(row0, kt, w, code);
    case TILE_Q3_K:
        return w < 256 ? pairs_word(row0, kt, w, code)
                       : tops_word(row0, kt, w - 256,
                                   [&](int r, int c) { return code_of(p, r, c) >> 2; });
    case TILE_IQ4_NL:
    case TILE_IQ4_XS:
    case TILE_IQ3_XXS:
        return levels_word(row0, kt, w, [&](int r, int c) { return level_name(code_of(p, r, c)); });
    case TILE_MXFP4:
    case TILE_NVFP4:
    case TILE_LEVELS:
        return levels_word(row0, kt, w, code);
    case TILE_Q6_K:
        return w < 512 ? nibbles_word(row0, kt, w, code)
                       : highs_word(row0, kt, w - 512,
                                    [&](int r, int c) { return code_of(p, r, c) >> 4; });
    case TILE_Q5_1:
    case TILE_Q5_K:
        return w < 512 ? nibbles_word(row0, kt, w, code)
                       : tops_word(row0, kt, w - 512,
                                   [&](int r, int c) { return code_of(p, r, c) >> 4; });
    default:
        return nibbles_word(row0, kt, w, code);
    }
}

/* Words of scales; w counts from the start of the scales. */

/* Bytes of 32 columns, [g][chunk]{g: 2, g+8: 2}; f(row, column). */
template <class F> DEVICE uint32_t byte_scales_word(int row0, int kt, int w, F f)
{
    uint32_t v = 0;
    for (int b = 0; b < 4; b++)
        v |= f(row0 + (w >> 2) + 8 * (b >> 1), kt * TILE_K + 64 * (w & 3) + 32 * (b & 1)) << 8 * b;
    return v;
}
/* fp16 factors of a row, [g]{g, g+8}. */
DEVICE uint32_t row_fp16_word(const struct repack &p, int row0, int kt, int g, int which)
{
    int row = row0 + g, col = kt * TILE_K;
    return row_half_of(p, row, col, which) | row_half_of(p, row + 8, col, which) << 16;
}
/* fp16 scales of 32 columns, [chunk][g][row half]{2}. */
DEVICE uint32_t fp16_scales_word(const struct repack &p, int row0, int kt, int w, int which)
{
    int row = row0 + (w >> 1 & 7) + 8 * (w & 1), col = kt * TILE_K + 64 * (w >> 4);
    return group_half_of(p, row, col, which) | group_half_of(p, row, col + 32, which) << 16;
}

DEVICE uint32_t scales_word(const struct repack &p, int row0, int kt, int w)
{
    switch (p.kind) {
    case TILE_Q4_K:
    case TILE_Q5_K:
        if (w >= 64)
            return row_fp16_word(p, row0, kt, (w - 64) >> 1, w & 1);
        return byte_scales_word(row0, kt, w & 31,
                                [&](int r, int c) { return group_byte_of(p, r, c, w >= 32); });
    case TILE_IQ4_XS:
    case TILE_IQ3_S:
    case TILE_IQ3_XXS:
        if (w >= 32)
            return row_fp16_word(p, row0, kt, w - 32, 0);
        return byte_scales_word(row0, kt, w,
                                [&](int r, int c) { return group_byte_of(p, r, c, 0); });
    case TILE_MXFP4:
        if (w >= 32)
            return row_power_of(p, row0 + ((w - 32) >> 1) + 8 * (w & 1), kt);
        return byte_scales_word(row0, kt, w, [&](int r, int c) { return power_of(p, r, c); });
    case TILE_Q6_K:
    case TILE_Q3_K:
    case TILE_Q2_K:
    case TILE_IQ1:
    case TILE_IQ2:
    case TILE_NVFP4: {                       /* 16 columns, [chunk][g][row half]{4} */
        if (w >= 64 && p.kind == TILE_NVFP4) /* levels are doubled */
            return bits_of(128.0f * (p.scale ? *(const float *)p.scale : 1.0f));
        if (w >= 64)
            return p.kind == TILE_Q2_K ? row_fp16_word(p, row0, kt, (w - 64) >> 1, w & 1)
                                       : row_fp16_word(p, row0, kt, w - 64, 0);
        uint32_t v = 0;
        for (int j = 0; j < 4; j++)
            v |= group_byte_of(p, row0 + (w >> 1 & 7) + 8 * (w & 1),
                               kt * TILE_K + 64 * (w >> 4) + 16 * j, 0)
                 << 8 * j;
        return v;
    }
    case TILE_GPTQ4:
        if (w >= 64) { /* zeros, [chunk][g] */
            uint32_t v = 0;
            for (int b = 0; b < 4; b++) {
                int row = row0 + (w & 7) + 8 * (b >> 1);
                int col = kt * TILE_K + 64 * ((w - 64) >> 3) + 32 * (b & 1);
                if (row < p.rows && col < p.n_in)
                    v |= (uint32_t)
                             p.zero[(size_t)row * (size_t)p.n_groups + (size_t)(col / p.group_len)]
                         << 8 * b;
            }
            return v;
        }
        return fp16_scales_word(p, row0, kt, w, 0);
    default:
        return fp16_scales_word(p, row0, kt, w & 63, w >= 64);
    }
}

DEVICE float repack_value(const struct repack &p, int row, int col)
{
    if (p.panel.panel_bytes) /* of floats */
        return row < p.rows && col < p.n_in ? panel_float(p.dtype, p.panel, p.data, row, col)
                                            : 0.0f;
    const uint8_t *b = block_of(p, row, col);
    if (!b)
        return 0.0f;
    if (p.dtype == DT_GPTQ4) {
        int at = p.inverse ? p.inverse[col] : col;
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(at / p.group_len);
        return ((float)code_of(p, row, at) - (float)p.zero[g]) * raw_half(p.scale + 2 * g);
    }
    if (p.dtype == DT_F8_E4M3) {
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(col / 128);
        return f8_to_float(*b) * (p.scale ? ((const float *)p.scale)[g] : 1.0f);
    }
    /* Elements are counted from the start of 256 columns, whatever the block length is. */
    b -= (size_t)((col & 255) / p.block_len) * (size_t)p.block_bytes;
    float v = raw_value(p.dtype, b, col & 255, p.aux);
    return p.dtype == DT_NVFP4 && p.scale ? v * *(const float *)p.scale : v;
}

/* Words of a TILE_LEVELS behind its codes. */
DEVICE uint32_t level_word(const struct repack &p, int row0, int kt, int w)
{
    if (w < 64) { /* a block's scale; 0 for padding */
        const uint8_t *b =
            block_of(p, row0 + (w >> 1 & 7) + 8 * (w & 1), kt * TILE_K + 64 * (w >> 4));
        return b ? raw_word(b) : 0;
    }
    struct level_table t = level_table_of(p.dtype);
    return w < 68   ? t.upper[w - 64]
           : w < 72 ? t.lower[w - 68]
           : w < 73 ? bits_of(1.0f / t.unit)
                    : (uint32_t)p.dtype;
}

DEVICE uint32_t repack_word(const struct repack &p, int tile, int kt, int w)
{
    int row0 = tile * TILE_ROWS;
    if (p.kind == TILE_F16) {
        int grp = w >> 7, lane = w >> 2 & 31, h = w >> 1 & 1, pair = w & 1;
        int row = row0 + (lane >> 2) + 8 * h, col = kt * 256 + 16 * grp + 4 * (lane & 3) + 2 * pair;
        float x = repack_value(p, row, col), y = repack_value(p, row, col + 1);
        return pack_half2(fminf(fmaxf(x, -65504.0f), 65504.0f),
                          fminf(fmaxf(y, -65504.0f), 65504.0f));
    }
    if (p.kind == TILE_F32)
        return bits_of(repack_value(p, row0 + (w >> 8), kt * 256 + (w & 255)));
    if (p.kind == TILE_F8) {
        int scale = w - 1024, row = row0 + (scale >> 1), col = kt * 256 + 128 * (scale & 1);
        if (scale < 0)
            return codes_word(p, row0, kt, w);
        if (row >= p.rows || col >= p.n_in)
            return 0;
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(col / 128);
        return bits_of(p.scale ? ((const float *)p.scale)[g] : 1.0f);
    }
    if (p.kind == TILE_LEVELS)
        return w < 512 ? codes_word(p, row0, kt, w) : level_word(p, row0, kt, w - 512);
    int codes = 0;
    quant_kind(p.kind, [&](auto kind) { codes = format<kind.VALUE>::SCALES_AT / 4; });
    return w < codes ? codes_word(p, row0, kt, w) : scales_word(p, row0, kt, w - codes);
}

#endif
