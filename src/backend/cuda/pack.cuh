/*
 * Packing: from the file's blocks to the words of a tile, for weights.cu, one word at a time. What a
 * format is in the file (codes_of, the *_of of its scales) is kept apart from where it lies in a tile
 * (*_word), which coded.cuh says.
 */
#ifndef STEEL_BACKEND_CUDA_PACK_CUH
#define STEEL_BACKEND_CUDA_PACK_CUH

#include "backend/cuda/format.cuh"

/* One piece of a segment on its way: `rows` rows of the file's blocks, and where they go. */
struct repack {
    int kind, dtype, n_in, n_kt, rows, tile_bytes;
    int block_len, block_bytes;
    size_t row_bytes;
    const uint8_t *data; /* (rows, row_bytes) */
    /* GPTQ: half (rows, n_groups); FP8: float (rows, n_groups); NVFP4: one float */
    const uint8_t *scale;
    const uint8_t *zero;    /* GPTQ: (rows, n_groups) */
    const int32_t *inverse; /* GPTQ act-order: stored column of input column k */
    int n_groups, group_len;
    int raw_bytes; /* of 256 columns of a row in the file */
    const void *aux;
    uint8_t *out; /* (tiles, n_kt, tile_bytes) */
};

/* The block that has (row, column), or NULL: padding. */
DEVICE const uint8_t *block_of(const struct repack &p, int row, int col)
{
    if (row >= p.rows || col >= p.n_in)
        return NULL;
    return p.data + (size_t)row * p.row_bytes + (size_t)(col / p.block_len) * (size_t)p.block_bytes;
}

/* The code of (row, column) as tiles have it; padding is anything, since its scale is 0. */
DEVICE uint32_t code_of(const struct repack &p, int row, int col)
{
    const uint8_t *b = block_of(p, row, col);
    if (!b)
        return 0;
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
    default: /* GPTQ4: two columns a byte */
        return b[0] >> (col & 1) * 4 & 15;
    }
}

DEVICE uint32_t two_bytes(const uint8_t *b)
{
    return (uint32_t)(b[0] | b[1] << 8);
}

/* Halves of a row (scales_k*): what multiplies its scales (0), its minima (1). */
DEVICE uint32_t row_half_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    int at = p.dtype == DT_Q6_K ? 208 : p.dtype == DT_Q3_K ? 108 : p.dtype == DT_Q2_K ? 80 : 0;
    return b ? two_bytes(b + at + 2 * which) : 0;
}

/* The byte of a group's scale, or minimum (scales_k*). */
DEVICE uint32_t group_byte_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    int k = col & 255, blk = k >> 5, s = k >> 4, scale, least;
    switch (b ? p.dtype : DT_NONE) {
    case DT_Q2_K: /* both in one */
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
    default:
        return 0;
    }
}

/* The half of a group's scale, or of what is added to it (scales_half). */
DEVICE uint32_t group_half_of(const struct repack &p, int row, int col, int which)
{
    const uint8_t *b = block_of(p, row, col);
    if (!b)
        return 0;
    if (p.dtype == DT_GPTQ4)
        return two_bytes(p.scale +
                         2 * ((size_t)row * (size_t)p.n_groups + (size_t)(col / p.group_len)));
    if (p.dtype == DT_Q5_0 && which)
        return float_to_half(-16.0f * raw_half(b));
    return two_bytes(b + 2 * which);
}

/* MXFP4 (scales_power): the largest exponent of a row's 256 columns, and a group's below it. */
DEVICE int top_exponent(const struct repack &p, int row, int kt)
{
    int top = 0;
    for (int col = kt * TILE_K; col < (kt + 1) * TILE_K; col += 32) {
        const uint8_t *b = block_of(p, row, col);
        top = b && b[0] > top ? b[0] : top;
    }
    return top;
}
DEVICE uint32_t power_of(const struct repack &p, int row, int col)
{
    const uint8_t *b = block_of(p, row, col);
    int e = b ? b[0] - top_exponent(p, row, col / TILE_K) + 30 : 0;
    return (uint32_t)(e < 0 ? 0 : e);
}
/* Levels are doubled, the largest scale is 2^15. */
DEVICE uint32_t row_power_of(const struct repack &p, int row, int kt)
{
    int e = top_exponent(p, row, kt) - 127 - 16;
    return e >= -126 ? (uint32_t)(e + 127) << 23 : 1u << (e + 149);
}

/* Words of codes: w from the start of the tile. f(row, column): a code, or its part. */

/* Nibbles and pairs of a word: register i of 16 columns at `bits` i, odd columns 16 above. */
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
/* codes_five's and codes_pair's top bits. */
template <class F> DEVICE uint32_t tops_word(int row0, int kt, int w, F f)
{
    uint32_t v = 0;
    for (int j = 0; j < 4; j++)
        v |= regs_word(row0, kt * TILE_K + 64 * (w >> 5) + 16 * j, w & 31, 4,
                       [&](int r, int c) { return f(r, c) & 1; })
             << j;
    return v;
}
/* codes_six's high pairs. */
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

DEVICE uint32_t codes_word(const struct repack &p, int row0, int kt, int w)
{
    auto code = [&](int r, int c) { return code_of(p, r, c); };
    switch (p.kind) {
    case TILE_Q8_0:
        return bytes_word(row0, kt, w, code);
    case TILE_Q2_K:
        return pairs_word(row0, kt, w, code);
    case TILE_Q3_K:
        return w < 256 ? pairs_word(row0, kt, w, code)
                       : tops_word(row0, kt, w - 256,
                                   [&](int r, int c) { return code_of(p, r, c) >> 2; });
    case TILE_IQ4_NL:
    case TILE_IQ4_XS:
    case TILE_MXFP4:
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

/* Words of scales: w from the start of the scales. */

/* Bytes of 32 columns, [g][chunk]{g: 2, g+8: 2}; f(row, column). */
template <class F> DEVICE uint32_t byte_scales_word(int row0, int kt, int w, F f)
{
    uint32_t v = 0;
    for (int b = 0; b < 4; b++)
        v |= f(row0 + (w >> 2) + 8 * (b >> 1), kt * TILE_K + 64 * (w & 3) + 32 * (b & 1)) << 8 * b;
    return v;
}
/* Halves of a row, [g]{g, g+8}. */
DEVICE uint32_t row_halves_word(const struct repack &p, int row0, int kt, int g, int which)
{
    int row = row0 + g, col = kt * TILE_K;
    return row_half_of(p, row, col, which) | row_half_of(p, row + 8, col, which) << 16;
}
/* Halves of 32 columns, [chunk][g][row half]{2}. */
DEVICE uint32_t half_scales_word(const struct repack &p, int row0, int kt, int w, int which)
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
            return row_halves_word(p, row0, kt, (w - 64) >> 1, w & 1);
        return byte_scales_word(row0, kt, w & 31,
                                [&](int r, int c) { return group_byte_of(p, r, c, w >= 32); });
    case TILE_IQ4_XS:
    case TILE_IQ3_S:
        if (w >= 32)
            return row_halves_word(p, row0, kt, w - 32, 0);
        return byte_scales_word(row0, kt, w,
                                [&](int r, int c) { return group_byte_of(p, r, c, 0); });
    case TILE_MXFP4:
        if (w >= 32)
            return row_power_of(p, row0 + ((w - 32) >> 1) + 8 * (w & 1), kt);
        return byte_scales_word(row0, kt, w, [&](int r, int c) { return power_of(p, r, c); });
    case TILE_Q6_K:
    case TILE_Q3_K:
    case TILE_Q2_K: { /* 16 columns, [chunk][g][row half]{4} */
        if (w >= 64)
            return p.kind == TILE_Q2_K ? row_halves_word(p, row0, kt, (w - 64) >> 1, w & 1)
                                       : row_halves_word(p, row0, kt, w - 64, 0);
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
        return half_scales_word(p, row0, kt, w, 0);
    default:
        return half_scales_word(p, row0, kt, w & 63, w >= 64);
    }
}

DEVICE float repack_value(const struct repack &p, int row, int col)
{
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
    /* Elements count from the start of 256 columns, whatever a block has. */
    b -= (size_t)((col & 255) / p.block_len) * (size_t)p.block_bytes;
    float v = raw_value(p.dtype, b, col & 255, p.aux);
    return p.dtype == DT_NVFP4 && p.scale ? v * *(const float *)p.scale : v;
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
    if (p.kind != TILE_RAW) {
        int codes = 0;
        coded_kind(p.kind, [&](auto kind) { codes = format<kind.VALUE>::SCALES_AT / 4; });
        return w < codes ? codes_word(p, row0, kt, w) : scales_word(p, row0, kt, w - codes);
    }
    if (p.dtype == DT_F8_E4M3 && w >= (F8_SCALES >> 2)) {
        int s = w - (F8_SCALES >> 2), row = row0 + (s >> 1), col = kt * 256 + 128 * (s & 1);
        if (row >= p.rows || col >= p.n_in)
            return 0;
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(col / 128);
        return bits_of(p.scale ? ((const float *)p.scale)[g] : 1.0f);
    }
    /* The file's own bytes, 256 columns of each row; past the row's end zeros, which every format
     * reads as zero. */
    int chunk = p.dtype == DT_F8_E4M3 ? TILE_K : p.tile_bytes / TILE_ROWS;
    if (p.dtype == DT_NVFP4 && 4 * w % chunk == NVFP4_SCALE)
        return bits_of(p.scale ? *(const float *)p.scale : 1.0f);
    uint32_t v = 0;
    for (int b = 0; b < 4; b++) {
        int at = 4 * w + b, row = row0 + at / chunk, in = at % chunk;
        size_t off = (size_t)kt * (size_t)p.raw_bytes + (size_t)in;
        if (row < p.rows && in < p.raw_bytes && off < p.row_bytes)
            v |= (uint32_t)p.data[(size_t)row * p.row_bytes + off] << 8 * b;
    }
    return v;
}

#endif
