/*
 * Panels of formats whose values are a few levels, in plain C: packs a block of the file into its lane, and
 * dequantises a row. Both are exact; panel.h has the layouts.
 *
 * Codes of the IQ formats index a grid of points in the file. They are looked up here, once, at loading. A
 * panel stores an index of a level for each value, about one bit per value more than the file, so that
 * kernels need no gathers. panel_levels_pack defines the layout. panel_levels_read computes the same codes
 * for the vector packers, without going through values.
 */
#include "backend/cpu/panel_levels.h"
#include "backend/cpu/gemm_tables.h"
#include "backend/cpu/panel.h"
#include "base/error.h"

#include <pthread.h>
#include <string.h>

bool panel_has_levels(enum dtype t)
{
    return quant_has_codes(t) || t == DT_NVFP4;
}

bool panel_levels_unit(enum dtype t, int *blocks, size_t *scales, size_t *bytes)
{
    *blocks = 1;
    *scales = 0;
    switch (t) {
    case DT_IQ3_S:
    case DT_IQ3_XXS:
        *bytes = IQ3_SCALES + 8 * 256;
        return true;
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
        *bytes = IQ2_SCALES + 8 * Q3K_BLOCK;
        return true;
    case DT_IQ1_S:
    case DT_IQ1_M:
        *bytes = IQ1_SCALES + 8 * Q2K_BLOCK;
        return true;
    case DT_TQ1_0:
    case DT_TQ2_0:
        *bytes = UNIT_SCALES + 8 * Q2K_BLOCK;
        return true;
    case DT_NVFP4:
        *bytes = UNIT_SCALES + 2 * 256;
        return true;
    default:
        return false;
    }
}

/* The table of levels of a type, and the factor of its d. */
static const uint8_t *levels_of(enum dtype t, float *factor)
{
    switch (t) {
    case DT_IQ3_S:
        *factor = 1.0f;
        return levels_iq3s;
    case DT_IQ3_XXS:
        *factor = 0.25f;
        return levels_iq3xxs;
    case DT_IQ1_S:
    case DT_IQ1_M:
        *factor = 0.125f;
        return levels_iq1;
    case DT_NVFP4:
        *factor = 1.0f;
        return levels_fp4;
    default:
        *factor = 0.125f;
        return levels_iq2;
    }
}

/* Inverts a table of levels: codes[(uint8_t)level] = code. */
static void invert(const uint8_t *levels, int n, uint8_t *codes)
{
    for (int i = n - 1; i >= 0; i--)
        codes[(uint8_t)(levels[i] - LEVEL_ZERO)] = (uint8_t)i;
}

/* Zeros a lane of `vectors` vectors. */
static void clear_lane(uint8_t *p, int vectors, int lane)
{
    for (int i = 0; i < vectors; i++)
        memset(p + 64 * i + 4 * lane, 0, 4);
}

/* Inserts codes of four columns, a byte each, into a lane's dword, shifted left by `shift` bits. */
static void put_group(uint8_t *vector, int lane, uint32_t codes, int shift)
{
    uint32_t v;
    memcpy(&v, vector + 4 * lane, 4);
    v |= codes << shift;
    memcpy(vector + 4 * lane, &v, 4);
}

static uint32_t load4(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Packs 16 scales 2n + 1 as nibbles n: nibble j % 8 of the lane's dword in vector j / 8. */
static void put_scales(const int8_t *scale, int step, int n, uint8_t *dst, int lane)
{
    uint32_t v[2] = {0, 0};
    for (int j = 0; j < n; j++)
        v[j / 8] |= (uint32_t)(scale[step * j] >> 1) << 4 * (j % 8);
    for (int i = 0; i < (n + 7) / 8; i++)
        memcpy(dst + 64 * i + 4 * lane, &v[i], 4);
}

static int get_scale(const uint8_t *src, int j, int lane)
{
    return (int)(2 * (load4(src + 64 * (j / 8) + 4 * lane) >> 4 * (j % 8) & 15) + 1);
}

/* d as the file's fp16 bits. IQ1_M stores it in four parts. */
static uint16_t file_d(enum dtype t, const uint8_t *src)
{
    uint16_t d;
    if (t == DT_IQ1_M) {
        const uint8_t *s = src + 48;
        return (uint16_t)(s[1] >> 4 | (s[3] >> 4) << 4 | (s[5] >> 4) << 8 | (s[7] >> 4) << 12);
    }
    memcpy(&d, t == DT_TQ1_0 ? src + 52 : t == DT_TQ2_0 ? src + 64 : src, 2);
    return d;
}

/* Packs 256 codes of up to `bits` bits, one per byte, after a unit's scales. */
static void put_codes(const uint8_t *code, int bits, uint8_t *dst, int lane)
{
    clear_lane(dst, bits * 8, lane);
    for (int g = 0; g < 64; g++) { /* column groups */
        uint32_t c = load4(code + 4 * g);
        if (bits == 4) {
            put_group(dst + 64 * (g / 2), lane, c, 4 * (g & 1));
        } else if (bits == 2) {
            put_group(dst + 64 * (g / 4), lane, c, 2 * (g & 3));
        } else {
            uint8_t *block = dst + Q3K_BLOCK * (g / 8);
            put_group(block, lane, c >> 2 & 0x01010101u, g & 7);
            put_group(block + 64 + 64 * (g / 4 & 1), lane, c & 0x03030303u, 2 * (g & 3));
        }
    }
}

static int get_code(const uint8_t *src, int bits, int col, int lane)
{
    int g = col / 4, at = 4 * lane + col % 4;
    if (bits == 4)
        return src[64 * (g / 2) + at] >> 4 * (g & 1) & 15;
    if (bits == 2)
        return src[64 * (g / 4) + at] >> 2 * (g & 3) & 3;
    const uint8_t *block = src + Q3K_BLOCK * (g / 8);
    return (block[64 + 64 * (g / 4 & 1) + at] >> 2 * (g & 3) & 3) | (block[at] >> (g & 7) & 1) << 2;
}

static void pack_nvfp4(const uint8_t *src, uint8_t *unit, int lane)
{
    struct block_nvfp4 b;
    memcpy(&b, src, sizeof b);
    clear_lane(unit + UNIT_SCALES, 8, lane);
    for (int s = 0; s < 4; s++) {
        /* E4M3 scales 0x7f and 0xff mean 0 and 480 in the file. They are stored as 0 and 0x7f,
         * which kernels decode without a special case. */
        unit[16 * s + lane] = b.d[s] == 0x7f ? 0 : b.d[s] == 0xff ? 0x7f : b.d[s] & 0x7f;
        for (int i = 0; i < 16; i += 4) { /* columns 0-7 in low nibbles, 8-15 in high ones */
            uint32_t q = load4(b.qs + 8 * s + i % 8) >> (i / 8 * 4) & 0x0f0f0f0fu;
            put_group(unit + UNIT_SCALES + 128 * s + 64 * (i / 8), lane, q, i & 4);
        }
    }
}

void panel_levels_pack(enum dtype t, const uint8_t *src, uint8_t *unit, int lane)
{
    struct quant_codes c;
    uint8_t code[QK_K], codes[256] = {0};
    float factor;
    if (t == DT_NVFP4) {
        pack_nvfp4(src, unit, lane);
        return;
    }
    CHECK(quant_read_codes(t, src, &c), "%s has no codes", dtype_name(t));
    uint16_t d = file_d(t, src);
    if (t == DT_TQ1_0 || t == DT_TQ2_0) {
        memcpy(unit + 2 * lane, &d, 2);
        for (int i = 0; i < QK_K; i++)
            code[i] = (uint8_t)(c.code[i] + 1);
        put_codes(code, 2, unit + UNIT_SCALES, lane);
        return;
    }
    bool three = t == DT_IQ3_S || t == DT_IQ3_XXS, one = t == DT_IQ1_S || t == DT_IQ1_M;
    invert(levels_of(t, &factor), three ? 16 : 8, codes);
    for (int i = 0; i < QK_K; i++)
        code[i] = codes[(uint8_t)c.code[i]];
    if (three) {
        put_scales(c.scale, 2, 8, unit, lane);
        memcpy(unit + 64 + 2 * lane, &d, 2);
        put_codes(code, 4, unit + IQ3_SCALES, lane);
        return;
    }
    put_scales(c.scale, 1, 16, unit, lane);
    memcpy(unit + 128 + 2 * lane, &d, 2);
    if (!one) {
        put_codes(code, 3, unit + IQ2_SCALES, lane);
        return;
    }
    uint32_t down = 0; /* 8 columns share their third bit */
    for (int i = 0; i < 32; i++)
        down |= (uint32_t)(code[8 * i] >> 2) << i;
    memcpy(unit + 192 + 4 * lane, &down, 4);
    for (int i = 0; i < QK_K; i++)
        code[i] &= 3;
    put_codes(code, 2, unit + IQ1_SCALES, lane);
}

/* The points of the grids with one digit per byte, so that one lookup returns 8 codes (IQ3: 4). */
static uint64_t digits[QUANT_GRID_POINTS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void spread_digits(void)
{
    static const enum dtype types[] = {DT_IQ3_S,  DT_IQ3_XXS, DT_IQ2_XXS,
                                       DT_IQ2_XS, DT_IQ2_S,   DT_IQ1_S};
    const uint16_t *all = quant_grids();
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        bool three = types[t] == DT_IQ3_S || types[t] == DT_IQ3_XXS;
        const uint16_t *grid = quant_grid(types[t]);
        const uint16_t *end = t + 1 < sizeof types / sizeof *types ? quant_grid(types[t + 1])
                                                                   : all + QUANT_GRID_POINTS;
        for (const uint16_t *p = grid; p < end; p++)
            for (int i = 0; i < (three ? 4 : 8); i++)
                digits[p - all] |= (uint64_t)(*p >> (three ? 3 : 2) * i & (three ? 7 : 3)) << 8 * i;
    }
}

/* 8 codes: the digits of a grid point, with one sign bit each at bit `bit`. */
static void put_signed(uint64_t grid, unsigned signs, int bit, uint8_t *out)
{
    const uint64_t low = UINT64_C(0x0101010101010101);
    uint64_t bits = signs * low & UINT64_C(0x8040201008040201); /* byte i: bit i */
    grid |= ((bits + 0x7f * low) >> 7 & low) << bit;
    memcpy(out, &grid, 8);
}

static unsigned even_signs(unsigned bits)
{
    return bits | (unsigned)__builtin_parity(bits) << 7;
}

static unsigned load2(const uint8_t *p)
{
    return p[0] | (unsigned)p[1] << 8;
}

static void read_iq2(enum dtype t, const uint8_t *src, const uint64_t *grid,
                     struct level_codes *out)
{
    if (t == DT_IQ2_XXS) {
        out->scales[0] = out->scales[1] = 0;
        for (int j = 0; j < 8; j++) {
            const uint8_t *q = src + 2 + 8 * j;
            uint32_t s = load4(q + 4);
            out->scales[j / 4] |= (s >> 28) * 0x11 << 8 * (j % 4);
            for (int i = 0; i < 4; i++)
                put_signed(grid[q[i]], even_signs(s >> 7 * i & 127), 2, out->code + 32 * j + 8 * i);
        }
        return;
    }
    const uint8_t *scales = src + (t == DT_IQ2_XS ? 66 : 74);
    for (int i = 0; i < 2; i++)
        out->scales[i] = load4(scales + 4 * i);
    for (int i = 0; i < 32; i++)
        if (t == DT_IQ2_XS) {
            unsigned q = load2(src + 2 + 2 * i);
            put_signed(grid[q & 511], even_signs(q >> 9), 2, out->code + 8 * i);
        } else {
            unsigned high = src[66 + i / 4] >> 2 * (i % 4) & 3u;
            put_signed(grid[src[2 + i] | high << 8], src[34 + i], 2, out->code + 8 * i);
        }
}

static void read_iq3(enum dtype t, const uint8_t *src, const uint64_t *grid,
                     struct level_codes *out)
{
    const uint8_t *qs = src + 2;
    out->scales[0] = t == DT_IQ3_S ? load4(src + 106) : 0;
    for (int i = 0; i < 32; i++, qs += 2) {
        unsigned first = qs[0], second = qs[1], signs;
        if (t == DT_IQ3_S) {
            unsigned high = (unsigned)src[66 + i / 4] >> 2 * (i % 4);
            first |= (high & 1) << 8;
            second |= (high & 2) << 7;
            signs = src[74 + i];
        } else {
            uint32_t s = load4(src + 66 + i / 4 * 4);
            signs = even_signs(s >> 7 * (i % 4) & 127);
            out->scales[0] |= i % 4 ? 0 : s >> 28 << i;
        }
        put_signed(grid[first] | grid[second] << 32, signs, 3, out->code + 8 * i);
    }
}

static void read_iq1(enum dtype t, const uint8_t *src, const uint64_t *grid,
                     struct level_codes *out)
{
    const uint8_t *qs = src + (t == DT_IQ1_S ? 2 : 0), *qh = qs + 32, *scales = qs + 48;
    out->scales[0] = out->scales[1] = out->down = 0;
    for (int i = 0; i < 32; i++) {
        unsigned h = t == DT_IQ1_S ? load2(qh + i / 4 * 2) : (unsigned)qh[i / 2] >> 4 * (i & 1);
        unsigned high = t == DT_IQ1_S ? h >> 3 * (i % 4) & 7 : h & 7;
        out->down |= (uint32_t)(t == DT_IQ1_S ? h >> 15 : h >> 3 & 1) << i;
        memcpy(out->code + 8 * i, &grid[qs[i] | high << 8], 8);
    }
    for (int j = 0; j < 16; j++) {
        unsigned s =
            t == DT_IQ1_S ? load2(qh + j / 2 * 2) >> 12 : load2(scales + j / 4 * 2) >> 3 * (j % 4);
        out->scales[j / 8] |= (uint32_t)(s & 7) << 4 * (j % 8);
    }
}

void panel_levels_read(enum dtype t, const uint8_t *src, struct level_codes *out)
{
    pthread_once(&once, spread_digits);
    const uint64_t *grid = digits + (quant_grid(t) - quant_grids());
    out->d = file_d(t, src);
    if (t == DT_IQ3_S || t == DT_IQ3_XXS)
        read_iq3(t, src, grid, out);
    else if (t == DT_IQ1_S || t == DT_IQ1_M)
        read_iq1(t, src, grid, out);
    else
        read_iq2(t, src, grid, out);
}

void panel_levels_row(enum dtype t, const uint8_t *unit, int lane, float *dst)
{
    float factor;
    const uint8_t *levels = levels_of(t, &factor);
    uint16_t d;
    if (t == DT_NVFP4) {
        for (int i = 0; i < QK_NVFP4; i++)
            dst[i] =
                0.5f *
                (unit[16 * (i / 16) + lane] == 0x7f ? 480.0f
                                                    : f8e4m3_to_f32(unit[16 * (i / 16) + lane])) *
                (float)(levels[get_code(unit + UNIT_SCALES, 4, i, lane)] - LEVEL_ZERO);
        return;
    }
    if (t == DT_TQ1_0 || t == DT_TQ2_0) {
        memcpy(&d, unit + 2 * lane, 2);
        for (int i = 0; i < QK_K; i++)
            dst[i] = f16_to_f32(d) * (float)(get_code(unit + UNIT_SCALES, 2, i, lane) - 1);
        return;
    }
    bool three = t == DT_IQ3_S || t == DT_IQ3_XXS, one = t == DT_IQ1_S || t == DT_IQ1_M;
    memcpy(&d, unit + (three ? 64 : 128) + 2 * lane, 2);
    const uint8_t *codes = unit + (three ? IQ3_SCALES : one ? IQ1_SCALES : IQ2_SCALES);
    uint32_t down = one ? load4(unit + 192 + 4 * lane) : 0;
    for (int i = 0; i < QK_K; i++) {
        int code = get_code(codes, three ? 4 : one ? 2 : 3, i, lane);
        if (one)
            code |= (int)(down >> i / 8 & 1) << 2;
        float scale =
            f16_to_f32(d) * factor * (float)get_scale(unit, three ? i / 32 : i / 16, lane);
        dst[i] = scale * (float)(levels[code] - LEVEL_ZERO);
    }
}
