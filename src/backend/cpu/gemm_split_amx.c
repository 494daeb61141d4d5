/*
 * Packed float weights times many input rows on AMX bf16 tiles, at nearly fp32 precision. Also GPTQ4, NF4 and
 * FP4, whose users expect no loss.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns) * B (32 columns, 16 weight rows)
 *   x w = x0 w0 + x0 w1 + x1 w0, with x = x0 + x1 and w = w0 + w1
 * A float is split into the nearest bf16 and the bf16 nearest to the remainder, 16 bits of mantissa in
 * all. The product of the remainders is too small to count. BF16 weights have no remainder and take two
 * tile products instead of three. Against AVX-512 on a Xeon, BF16 is 1.4 times as fast for 9 rows and 2.5
 * times for 16 (pick.c).
 *
 * A: rows of bf16, then of their remainders (struct gemm_x); B: 16 rows of column pairs. BF16 panels have
 * this form already; others are converted, two panels at a time. tmm0-3: C of (inputs, panel); tmm4, 6: A;
 * tmm5, 7: B. The last tiles of inputs read up to 31 rows past the last one and drop their results.
 *
 * Sums are floats and stay in the tiles to the end, in the tile's own order. With --deterministic
 * gemm_float is used instead.
 */
#include "backend/cpu/gemm_tiles_amx.h"

struct split_scratch {
    _Alignas(64) float out[32][GEMM_UNIT];
    uint8_t tiles[]; /* (2 panels, n_in/32) tiles, each followed by the tile of its remainders */
};

/* Rounds floats to bf16 (half up), as floats. */
INLINE VF round_bf16(VF v)
{
    VI bits = _mm512_add_epi32(_mm512_castps_si512(v), vi_set1_32(0x8000));
    return _mm512_castsi512_ps(vi_and(bits, vi_set1_32((int)0xffff0000)));
}

/* Packs floats a and b, which are exact in bf16, as pairs (a low, b high). */
INLINE VI pair(VF a, VF b)
{
    return vi_or_and(vi_srl32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b),
                     vi_set1_32((int)0xffff0000));
}

/* Column k of a panel; F8: 1/256 of its values. */
INLINE VF column(const enum dtype type, const uint8_t *panel, int k)
{
    if (type == DT_F8_E4M3)
        return vf_load_f8(panel + (size_t)k * 16);
    return type == DT_F16 ? vf_load_f16(panel + (size_t)k * 32)
                          : vf_load((const float *)(panel + (size_t)k * 64));
}

/* Writes columns a and b as row i of a tile, and their remainders to the next tile. */
INLINE void put_pair(VF a, VF b, uint8_t *out, int i)
{
    VF a0 = round_bf16(a), b0 = round_bf16(b);
    vi_store(out + 64 * i, pair(a0, b0));
    vi_store(out + TILE + 64 * i,
             pair(round_bf16(_mm512_sub_ps(a, a0)), round_bf16(_mm512_sub_ps(b, b0))));
}

/* GPTQ4: code * scale - zero * scale, per group. */
static void convert_gptq(const uint8_t *panel, int n_in, int group_len, uint8_t *out)
{
    const VI byte = vi_set1_32(0xff);
    struct chunk c;
    c.group_len = group_len;
    for (int k = 0; k < n_in; k += 32, out += 2 * TILE) {
        const uint8_t *codes = unpack_gptq4(panel, k, 32, &c);
        VF scale = vf_load(c.scale[0]), min = vf_load(c.min[0]);
        for (int g = 0; g < 8; g++) {
            VI v = vi_load(codes + 64 * g);
            VF f[4] = {vi_to_f(vi_and(v, byte)), vi_to_f(vi_and(vi_srl32(v, 8), byte)),
                       vi_to_f(vi_and(vi_srl32(v, 16), byte)), vi_to_f(vi_srl32(v, 24))};
            for (int i = 0; i < 4; i++)
                f[i] = _mm512_fmsub_ps(f[i], scale, min);
            put_pair(f[0], f[1], out, 2 * g);
            put_pair(f[2], f[3], out, 2 * g + 1);
        }
    }
}

/* NF4 and FP4: level * scale, a scale per 64 columns. */
INLINE void convert_levels(const enum dtype type, const uint8_t *panel, int n_in, uint8_t *out)
{
    for (int k = 0; k < n_in; k += 32, out += 2 * TILE) {
        const uint8_t *unit = panel + (size_t)(k / QK_NF4) * PANEL_NF4_UNIT;
        VF scale = vf_load((const float *)unit);
        for (int i = 0; i < 16; i++) {
            VF a, b;
            vf_load_levels(unit + UNIT_SCALES + GEMM_PANEL * (k % QK_NF4 / 2 + i),
                           quant_levels(type), &a, &b);
            put_pair(vf_mul(a, scale), vf_mul(b, scale), out, i);
        }
    }
}

INLINE void convert(const enum dtype type, const uint8_t *panel, int n_in, uint8_t *out)
{
    const float *scales = (const float *)panel; /* F8: a vector of scales per 128 columns */
    if (type == DT_F8_E4M3)
        panel += panel_f8_head(n_in);
    for (int k = 0; k < n_in; k += 32, out += 2 * TILE) {
        VF scale = vf_zero();
        if (type == DT_F8_E4M3)
            scale = vf_mul(vf_load(scales + (size_t)(k / 128) * GEMM_PANEL), vf_set1(256.0f));
        for (int i = 0; i < 16; i++) {
            VF a = column(type, panel, k + 2 * i), b = column(type, panel, k + 2 * i + 1);
            if (type == DT_F8_E4M3) {
                a = vf_mul(a, scale);
                b = vf_mul(b, scale);
            }
            put_pair(a, b, out, i);
        }
    }
}

/* Multiplies tile 4, and with `two` tile 6, by the tiles at b0 and b1. */
#define DOTS(b0, b1)                                                                               \
    do {                                                                                           \
        amx_load(5, b0, 64);                                                                       \
        amx_dot_bf16(0, 4, 5);                                                                     \
        amx_load(7, b1, 64);                                                                       \
        amx_dot_bf16(1, 4, 7);                                                                     \
        if (two) {                                                                                 \
            amx_dot_bf16(2, 6, 5);                                                                 \
            amx_dot_bf16(3, 6, 7);                                                                 \
        }                                                                                          \
    } while (0)

/* Multiplies one or two tiles of inputs at a by panels b[2], all columns. Sums go to s->out. */
INLINE void multiply(struct split_scratch *s, const enum dtype type, const uint8_t *const b[2],
                     int n_in, const uint8_t *a, size_t stride, const int two)
{
    const bool exact = type == DT_BF16; /* weights have no remainders */
    const size_t step = exact ? TILE : 2 * TILE;
    tiles_zero();
    for (int i = 0; i < n_in / 32; i++) {
        const uint8_t *b0 = b[0] + (size_t)i * step, *b1 = b[1] + (size_t)i * step;
        const uint8_t *x = a + 64 * (size_t)i, *rest = x + 2 * (size_t)n_in;
        amx_load(4, x, stride);
        if (two)
            amx_load(6, x + 16 * stride, stride);
        if (!exact)
            DOTS(b0 + TILE, b1 + TILE);
        DOTS(b0, b1);
        amx_load(4, rest, stride);
        amx_dot_bf16(0, 4, 5);
        amx_dot_bf16(1, 4, 7);
        if (two) {
            amx_load(6, rest + 16 * stride, stride);
            amx_dot_bf16(2, 6, 5);
            amx_dot_bf16(3, 6, 7);
        }
    }
    tiles_store(s->out, two);
}

INLINE void gemm(const struct gemm_call *c, const enum dtype type)
{
    struct split_scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in;
    size_t stride = gemm_bf16_stride(c->x), bytes = seg->panel_bytes;
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / GEMM_PANEL);
    const uint8_t *panel = seg->data + first * bytes;
    tiles_configure();
    for (int col = 0; col < c->n_rows; col += GEMM_UNIT, panel += 2 * bytes) {
        const uint8_t *b[2] = {panel, col + GEMM_PANEL < c->n_rows ? panel + bytes : panel};
        for (int p = 0; type != DT_BF16 && p < 2; p++) {
            uint8_t *tiles = s->tiles + (size_t)p * (size_t)(n_in / 32) * 2 * TILE;
            if (type == DT_GPTQ4)
                convert_gptq(b[p], n_in, seg->group_len, tiles);
            else if (type == DT_NF4 || type == DT_FP4)
                convert_levels(type, b[p], n_in, tiles);
            else
                convert(type, b[p], n_in, tiles);
            b[p] = tiles;
        }
        for (int i0 = 0; i0 < c->n; i0 += 32) {
            int n = c->n - i0 < 32 ? c->n - i0 : 32;
            const uint8_t *a = c->x->h + (size_t)i0 * stride;
            if (n > 16)
                multiply(s, type, b, n_in, a, stride, 1);
            else
                multiply(s, type, b, n_in, a, stride, 0);
            put_sums(s->out, c, i0, n, col);
        }
    }
    amx_release();
}

void gemm_split_amx(const struct gemm_call *c)
{
    if (c->seg->type == DT_F32)
        gemm(c, DT_F32);
    else if (c->seg->type == DT_F16)
        gemm(c, DT_F16);
    else if (c->seg->type == DT_F8_E4M3)
        gemm(c, DT_F8_E4M3);
    else if (c->seg->type == DT_GPTQ4)
        gemm(c, DT_GPTQ4);
    else if (c->seg->type == DT_NF4)
        gemm(c, DT_NF4);
    else if (c->seg->type == DT_FP4)
        gemm(c, DT_FP4);
    else
        gemm(c, DT_BF16);
}

void input_split_amx(const float *x, int n, uint16_t *out, uint16_t *rest)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        VF v = vf_load(x + i), near = round_bf16(v), left = round_bf16(_mm512_sub_ps(v, near));
        _mm256_storeu_si256((__m256i *)(out + i),
                            _mm512_cvtepi32_epi16(vi_srl32(_mm512_castps_si512(near), 16)));
        _mm256_storeu_si256((__m256i *)(rest + i),
                            _mm512_cvtepi32_epi16(vi_srl32(_mm512_castps_si512(left), 16)));
    }
    for (; i < n; i++) {
        uint32_t u;
        float near;
        memcpy(&u, x + i, 4);
        u = (u + 0x8000) & 0xffff0000u;
        memcpy(&near, &u, 4);
        out[i] = (uint16_t)(u >> 16);
        float left = x[i] - near;
        memcpy(&u, &left, 4);
        rest[i] = (uint16_t)((u + 0x8000) >> 16);
    }
}
