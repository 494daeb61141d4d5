/*
 * Unpacks columns of a panel's 16 rows to one signed byte per code, in column groups of 64 bytes, with float
 * scales (and mins) in vectors of 16. For kernels that multiply the same weights with many input rows.
 * Needs vectors of 16 rows: those of gemm_vec_avx512.h, or of gemm_vec_neon.h with 16 lanes.
 */
#ifndef STEEL_BACKEND_CPU_PANEL_UNPACK_H
#define STEEL_BACKEND_CPU_PANEL_UNPACK_H

#include "backend/cpu/panel.h"
#ifdef STEEL_NEON
#include "backend/cpu/gemm_vec_neon.h"
#else
#include "backend/cpu/gemm_vec_avx512.h"
#endif
#include "backend/cpu/gemm_tables.h"

enum { CHUNK_COLUMNS = 256 };

/* CHUNK_COLUMNS of a panel. scale and min have a vector per 32 columns; per 16 for Q2_K, Q3_K,
 * Q6_K, IQ1, IQ2 and NVFP4. */
struct chunk {
    _Alignas(64) uint8_t unpacked[CHUNK_COLUMNS * GEMM_PANEL];
    float scale[CHUNK_COLUMNS / 16][GEMM_PANEL];
    float min[CHUNK_COLUMNS / 16][GEMM_PANEL];
    int group_len; /* GPTQ4; set by the caller */
};

/* Unpacks columns [k, k + n) of a panel, both multiples of the format's unit. Returns the codes. */
static inline const uint8_t *unpack_k45(const uint8_t *panel, int k, int n, struct chunk *c,
                                        const int five)
{
    const VI nib = vi_set1_8(15), two = vi_set1_8(0x30), fifth = vi_set1_8(16);
    const VI byte = vi_set1_32(0xff);
    const size_t block = five ? Q5K_BLOCK : Q4K_BLOCK;
    const uint8_t *q = panel + (size_t)(k / 256) * (K45_SCALES + 8 * block);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 32; i++, q += block) {
        if (i % 8 == 0) {
            VI sl = vi_load(q), ml = vi_load(q + 64), h = vi_load(q + 128);
            VF d = vf_load_f16(q + 192), dmin = vf_load_f16(q + 224);
            VI sc = vi_or_and(vi_and(sl, nib), vi_sll16(h, 4), two);
            VI mn = vi_or_and(vi_and(ml, nib), h, two);
            VI sc_next = vi_or_and(vi_high4(sl, nib), vi_sll16(h, 2), two);
            VI mn_next = vi_or_and(vi_high4(ml, nib), vi_srl16(h, 2), two);
            for (int j = 0; j < 8; j++) {
                vf_store(c->scale[i + j], vf_mul(vi_to_f(vi_and(sc, byte)), d));
                vf_store(c->min[i + j], vf_mul(vi_to_f(vi_and(mn, byte)), dmin));
                sc = j == 3 ? sc_next : vi_srl32(sc, 8);
                mn = j == 3 ? mn_next : vi_srl32(mn, 8);
            }
            q += K45_SCALES;
        }
        VI high = five ? vi_load(q) : vi_zero();
        const uint8_t *nibbles = five ? q + 64 : q;
        for (int j = 0; j < 4; j++, out += 128) {
            VI v = vi_load(nibbles + 64 * j);
            VI lo = vi_and(v, nib), hi = vi_high4(v, nib);
            if (five) {
                lo = vi_or_and(lo, vi_sll16(high, 4), fifth);
                hi = vi_or_and(hi, vi_sll16(high, 3), fifth);
                high = vi_srl16(high, 2);
            }
            vi_store(out, lo);
            vi_store(out + 64, hi);
        }
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_q4k(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_k45(panel, k, n, c, 0);
}

static inline const uint8_t *unpack_q5k(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_k45(panel, k, n, c, 1);
}

static inline const uint8_t *unpack_q6k(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI nib = vi_set1_8(15), two = vi_set1_8(0x30), center = vi_set1_8(32);
    const uint8_t *q = panel + (size_t)(k / 256) * (Q6K_SCALES + 8 * Q6K_BLOCK);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 16; i++, q += Q6K_BLOCK / 2, out += 256) {
        if (i % 16 == 0) {
            VF d = vf_load_f16(q + 256);
            for (int j = 0; j < 16; j++) {
                VI sc = vi_srln32(vi_load(q + 64 * (j / 4)), 8 * (j % 4));
                vf_store(c->scale[i + j], vf_mul(vi_to_f(vi_sra32(vi_sll32(sc, 24), 24)), d));
            }
            q += Q6K_SCALES;
        }
        VI v = vi_load(q), w = vi_load(q + 64), h = vi_load(q + 128);
        VI g0 = vi_or_and(vi_and(v, nib), vi_sll16(h, 4), two);
        VI g1 = vi_or_and(vi_high4(v, nib), vi_sll16(h, 2), two);
        VI g2 = vi_or_and(vi_and(w, nib), h, two);
        VI g3 = vi_or_and(vi_high4(w, nib), vi_srl16(h, 2), two);
        vi_store(out, vi_sub8(g0, center));
        vi_store(out + 64, vi_sub8(g1, center));
        vi_store(out + 128, vi_sub8(g2, center));
        vi_store(out + 192, vi_sub8(g3, center));
    }
    return c->unpacked;
}

static inline void unpack_nibbles(const uint8_t *q, VI table, uint8_t *out)
{
    const VI nib = vi_set1_8(15);
    for (int j = 0; j < 4; j++) {
        VI v = vi_load(q + 64 * j);
        vi_store(out + 128 * j, vi_lookup(table, vi_and(v, nib)));
        vi_store(out + 128 * j + 64, vi_lookup(table, vi_high4(v, nib)));
    }
}

static inline VI unpack_table(const uint8_t *t)
{
    return vi_sub8(vi_levels(t), vi_set1_8((char)0x80));
}

static inline const uint8_t *unpack_small4(const uint8_t *panel, int k, int n, struct chunk *c,
                                           const uint8_t *table, const int mx)
{
    const int blocks = mx ? 4 : 2;
    const uint8_t *unit = panel + (size_t)(k / 32 / blocks) * (size_t)(UNIT_SCALES + 256 * blocks);
    VI lut = unpack_table(table);
    for (int i = 0; i < n / 32; i++) {
        int in = i % blocks;
        vf_store(c->scale[i], mx ? vf_load_e8m0_half(unit + 16 * in) : vf_load_f16(unit + 32 * in));
        unpack_nibbles(unit + UNIT_SCALES + 256 * in, lut, c->unpacked + 512 * i);
        if (in == blocks - 1)
            unit += UNIT_SCALES + 256 * blocks;
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_q4_0(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_small4(panel, k, n, c, table_q4_0, 0);
}

static inline const uint8_t *unpack_iq4nl(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_small4(panel, k, n, c, table_iq4, 0);
}

static inline const uint8_t *unpack_mxfp4(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_small4(panel, k, n, c, table_mxfp4, 1);
}

static inline const uint8_t *unpack_iq4xs(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI low = vi_set1_32(15), two = vi_set1_32(0x30), center = vi_set1_32(32);
    VI lut = unpack_table(table_iq4);
    const uint8_t *q = panel + (size_t)(k / 256) * (IQ4XS_SCALES + 8 * 256);
    for (int i = 0; i < n / 32; i += 8) {
        VI sl = vi_load(q), sh = vi_sll32(vi_load_u16(q + 64), 4);
        VF d = vf_load_f16(q + 96);
        q += IQ4XS_SCALES;
        for (int b = i; b < i + 8; b++, q += 256) {
            unpack_nibbles(q, lut, c->unpacked + 512 * b);
            VI sc = vi_sub32(vi_or_and(vi_and(sl, low), sh, two), center);
            vf_store(c->scale[b], vf_mul(vi_to_f(sc), d));
            sl = vi_srl32(sl, 4);
            sh = vi_srl32(sh, 2);
        }
    }
    return c->unpacked;
}

/* Every block has the scale of its group. The group's zero point becomes the min. */
static inline const uint8_t *unpack_gptq4(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI nib = vi_set1_8(15);
    for (int i = 0; i < n / 32; i++) {
        int col = k + 32 * i, len = c->group_len;
        const uint8_t *group = panel + (size_t)(col / len) * (UNIT_SCALES + 8 * (size_t)len);
        const uint8_t *q = group + UNIT_SCALES + 8 * (size_t)(col % len);
        VF scale = vf_load_f16(group);
        vf_store(c->scale[i], scale);
        vf_store(c->min[i], vf_mul(scale, vi_to_f(vi_load_u8(group + 32))));
        for (int j = 0; j < 4; j++) {
            VI v = vi_load(q + 64 * j);
            vi_store(c->unpacked + 512 * i + 128 * j, vi_and(v, nib));
            vi_store(c->unpacked + 512 * i + 128 * j + 64, vi_high4(v, nib));
        }
    }
    return c->unpacked;
}

/* Scale j of 16 in four vectors of bytes. */
static inline VI unpack_scale(const uint8_t *scales, int j)
{
    return vi_srln32(vi_load(scales + 64 * (j / 4)), 8 * (j % 4));
}

static inline const uint8_t *unpack_q2k(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI two = vi_set1_8(3), nib = vi_set1_32(15);
    const uint8_t *q = panel + (size_t)(k / 256) * (LOW_SCALES + 8 * Q2K_BLOCK);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 16; i++, q += 64, out += 256) {
        if (i % 16 == 0) {
            VF d = vf_load_f16(q + 256), dmin = vf_load_f16(q + 288);
            for (int j = 0; j < 16; j++) {
                VI sc = unpack_scale(q, j);
                vf_store(c->scale[i + j], vf_mul(vi_to_f(vi_and(sc, nib)), d));
                vf_store(c->min[i + j], vf_mul(vi_to_f(vi_and(vi_srl32(sc, 4), nib)), dmin));
            }
            q += LOW_SCALES;
        }
        VI v = vi_load(q);
        vi_store(out, vi_and(v, two));
        vi_store(out + 64, vi_and(vi_srl16(v, 2), two));
        vi_store(out + 128, vi_and(vi_srl16(v, 4), two));
        vi_store(out + 192, vi_and(vi_srl16(v, 6), two));
    }
    return c->unpacked;
}

/* 16 scales (signed bytes) times d */
static inline void unpack_scales16(const uint8_t *scales, VF d, float (*out)[GEMM_PANEL])
{
    for (int j = 0; j < 16; j++)
        vf_store(out[j], vf_mul(vi_to_f(vi_sra32(vi_sll32(unpack_scale(scales, j), 24), 24)), d));
}

static inline const uint8_t *unpack_q3k(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI two = vi_set1_8(3), third = vi_set1_8(4);
    const uint8_t *q = panel + (size_t)(k / 256) * (LOW_SCALES + 8 * Q3K_BLOCK);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 32; i++, q += Q3K_BLOCK) {
        if (i % 8 == 0) {
            unpack_scales16(q, vf_load_f16(q + 256), c->scale + 2 * i);
            q += LOW_SCALES;
        }
        VI h = vi_sll16(vi_load(q), 2);
        for (int j = 0; j < 2; j++) {
            VI v = vi_load(q + 64 + 64 * j);
            for (int g = 0; g < 4; g++, out += 64) {
                vi_store(out, vi_sub8(vi_or_and(vi_and(v, two), h, third), third));
                v = vi_srl16(v, 2);
                h = vi_srl16(h, 1);
            }
            h = vi_srl16(vi_load(q), 2);
        }
    }
    return c->unpacked;
}

/* Q5_0 subtracts 16 from codes; Q4_1 and Q5_1 have min = -m. */
static inline const uint8_t *unpack_offset(const uint8_t *panel, int k, int n, struct chunk *c,
                                           const int five, const int mins)
{
    const VI nib = vi_set1_8(15), fifth = vi_set1_8(16);
    const size_t scales = mins ? 2 * UNIT_SCALES : UNIT_SCALES, bytes = five ? Q5K_BLOCK : 256;
    const uint8_t *unit = panel + (size_t)(k / 64) * (scales + 2 * bytes);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 32; i++) {
        int in = i % 2;
        const uint8_t *q = unit + scales + (size_t)in * bytes;
        vf_store(c->scale[i], vf_load_f16(unit + 32 * in));
        if (mins)
            vf_store(c->min[i], vf_mul(vf_load_f16(unit + UNIT_SCALES + 32 * in), vf_set1(-1.0f)));
        VI high = five ? vi_load(q) : vi_zero();
        for (int j = 0; j < 4; j++, out += 128) {
            VI v = vi_load(q + (five ? 64 : 0) + 64 * j);
            VI lo = vi_and(v, nib), hi = vi_high4(v, nib);
            if (five) {
                lo = vi_or_and(lo, vi_sll16(high, 4), fifth);
                hi = vi_or_and(hi, vi_sll16(high, 3), fifth);
                high = vi_srl16(high, 2);
            }
            vi_store(out, mins ? lo : vi_sub8(lo, fifth));
            vi_store(out + 64, mins ? hi : vi_sub8(hi, fifth));
        }
        unit += in ? scales + 2 * bytes : 0;
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_q4_1(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_offset(panel, k, n, c, 0, 1);
}

static inline const uint8_t *unpack_q5_0(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_offset(panel, k, n, c, 1, 0);
}

static inline const uint8_t *unpack_q5_1(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_offset(panel, k, n, c, 1, 1);
}

/* The levels of gemm_tables.h as signed bytes. */
static inline VI unpack_levels(const uint8_t *levels)
{
    return vi_sub8(vi_levels(levels), vi_set1_8(LEVEL_ZERO));
}

/* (2n + 1) * d, for nibble j of each lane */
static inline VF unpack_odd_scale(VI nibbles, int j, VF d)
{
    VI n = vi_srln32(nibbles, 4 * j);
    return vf_mul(vi_to_f(vi_or_and(vi_set1_32(1), vi_sll32(n, 1), vi_set1_32(30))), d);
}

static inline const uint8_t *unpack_iq3(const uint8_t *panel, int k, int n, struct chunk *c,
                                        const uint8_t *levels, float factor)
{
    VI lut = unpack_levels(levels);
    const uint8_t *q = panel + (size_t)(k / 256) * (IQ3_SCALES + 8 * 256);
    for (int i = 0; i < n / 32; i++, q += 256) {
        if (i % 8 == 0) {
            VF d = vf_mul(vf_load_f16(q + 64), vf_set1(factor));
            for (int j = 0; j < 8; j++)
                vf_store(c->scale[i + j], unpack_odd_scale(vi_load(q), j, d));
            q += IQ3_SCALES;
        }
        unpack_nibbles(q, lut, c->unpacked + 512 * i);
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_iq3s(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_iq3(panel, k, n, c, levels_iq3s, 1.0f);
}

static inline const uint8_t *unpack_iq3xxs(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_iq3(panel, k, n, c, levels_iq3xxs, 0.25f);
}

/* A scale per 16 columns. IQ1 stores third bits, one per 8 columns, next to the scales. */
static inline const uint8_t *unpack_iq12(const uint8_t *panel, int k, int n, struct chunk *c,
                                         const int one)
{
    const VI two = vi_set1_8(3), third = vi_set1_8(4);
    const size_t scales = one ? IQ1_SCALES : IQ2_SCALES, bytes = one ? Q2K_BLOCK : Q3K_BLOCK;
    VI lut = unpack_levels(one ? levels_iq1 : levels_iq2), down = vi_zero();
    const uint8_t *q = panel + (size_t)(k / 256) * (scales + 8 * bytes);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 32; i++, q += bytes) {
        if (i % 8 == 0) {
            VF d = vf_mul(vf_load_f16(q + 128), vf_set1(0.125f));
            for (int j = 0; j < 16; j++)
                vf_store(c->scale[2 * i + j],
                         unpack_odd_scale(vi_load(q + 64 * (j / 8)), j % 8, d));
            down = one ? vi_load(q + 192) : vi_zero();
            q += scales;
        }
        VI h = one ? vi_zero() : vi_load(q);
        for (int g = 0; g < 8; g++, out += 64) {
            VI v = vi_srln32(vi_load(q + (one ? 0 : 64) + 64 * (g / 4)), 2 * (g % 4));
            VI high = one ? vi_sra32(vi_sll32(down, 31), 31) : vi_sll32(vi_srln32(h, g), 2);
            vi_store(out, vi_lookup(lut, vi_or_and(vi_and(v, two), high, third)));
            down = g % 2 ? vi_srl32(down, 1) : down;
        }
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_iq2(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_iq12(panel, k, n, c, 0);
}

static inline const uint8_t *unpack_iq1(const uint8_t *panel, int k, int n, struct chunk *c)
{
    return unpack_iq12(panel, k, n, c, 1);
}

static inline const uint8_t *unpack_tq(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI two = vi_set1_8(3), one = vi_set1_8(1);
    const uint8_t *q = panel + (size_t)(k / 256) * (UNIT_SCALES + 8 * Q2K_BLOCK);
    uint8_t *out = c->unpacked;
    for (int i = 0; i < n / 32; i++, q += Q2K_BLOCK) {
        if (i % 8 == 0) {
            for (int j = 0; j < 8; j++)
                vf_store(c->scale[i + j], vf_load_f16(q));
            q += UNIT_SCALES;
        }
        for (int g = 0; g < 8; g++, out += 64) {
            VI v = vi_srln32(vi_load(q + 64 * (g / 4)), 2 * (g % 4));
            vi_store(out, vi_sub8(vi_and(v, two), one));
        }
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_nvfp4(const uint8_t *panel, int k, int n, struct chunk *c)
{
    VI lut = unpack_levels(levels_fp4);
    VF scale = vf_load((const float *)panel); /* the tensor's scale */
    const uint8_t *unit = panel + NVFP4_HEAD + (size_t)(k / 64) * (UNIT_SCALES + 512);
    for (int i = 0; i < n / 32; i++) {
        for (int j = 0; j < 2; j++) {
            VI bits = vi_sll32(vi_load_u8(unit + 32 * (i % 2) + 16 * j), 20);
            VF own = vf_mul(vf_from_bits(bits), vf_set1(0x1p119f)); /* see pass_nvfp4 */
            vf_store(c->scale[2 * i + j], vf_mul(own, scale));
        }
        unpack_nibbles(unit + UNIT_SCALES + 256 * (i % 2), lut, c->unpacked + 512 * i);
        unit += i % 2 ? UNIT_SCALES + 512 : 0;
    }
    return c->unpacked;
}

static inline const uint8_t *unpack_q8_0(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const VI offset = vi_set1_8((char)(PANEL_Q8_SIGNS & 0xff));
    const uint8_t *unit = panel + (size_t)(k / 64) * (UNIT_SCALES + 1024);
    for (int i = 0; i < n / 32; i++) {
        vf_store(c->scale[i], vf_load_f16(unit + 32 * (i % 2)));
        for (int g = 0; g < 8; g++)
            vi_store(c->unpacked + 512 * i + 64 * g,
                     vi_sub8(vi_load(unit + UNIT_SCALES + 512 * (i % 2) + 64 * g), offset));
        if (i % 2)
            unit += UNIT_SCALES + 1024;
    }
    return c->unpacked;
}

#endif
