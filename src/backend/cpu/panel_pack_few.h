/*
 * Vector packers for formats with few bits and for formats with tables of levels: part of
 * panel_pack_kernel.h, which defines the vectors. Codes that index a grid are looked up row by row
 * (panel_levels_read). All other work is on bytes within lanes.
 */
#ifndef STEEL_BACKEND_CPU_PANEL_PACK_FEW_H
#define STEEL_BACKEND_CPU_PANEL_PACK_FEW_H

#define LOW2 0x03030303u

/* Copies the first `size` <= 16 bytes of each row to rows 16 bytes apart. */
static inline void gather_small(const uint8_t *src, size_t stride, size_t size, uint8_t to[16 * W])
{
    for (size_t r = 0; r < W; r++)
        memcpy(to + 16 * r, src + r * stride, size);
}

/* Dword 0 of each row. */
static inline vec load_dwords(const uint8_t *src, size_t stride)
{
    uint32_t v[W];
    vec out;
    for (size_t r = 0; r < W; r++)
        memcpy(&v[r], src + r * stride, 4);
    memcpy(&out, v, sizeof out);
    return out;
}

/* Packs 16 columns of two bits: group g of q at bits 2g. */
static inline vec join_2bit(const vec q[4])
{
    return (q[0] & LOW2) | (q[1] & LOW2) << 2 | (q[2] & LOW2) << 4 | (q[3] & LOW2) << 6;
}

/* Q2_K, Q3_K, TQ2_0: 64 bytes. Byte k of each half has columns k, 32 + k, 64 + k and 96 + k of that
 * half. Columns 32 b + 16 s ... + 15 go to dst + block * b + 64 s. */
static inline void pack_pairs(const uint8_t *qs, size_t stride, uint8_t *dst, int block)
{
    for (int half = 0; half < 2; half++)
        for (int s = 0; s < 2; s++) {
            vec q[4];
            load4(qs + 32 * half + 16 * s, stride, q);
            /* Bit pairs j of group g become bit pairs g of block j. */
            swap_bits(&q[0], &q[2], 4, 0x0f0f0f0f);
            swap_bits(&q[1], &q[3], 4, 0x0f0f0f0f);
            swap_bits(&q[0], &q[1], 2, 0x33333333);
            swap_bits(&q[2], &q[3], 2, 0x33333333);
            for (int j = 0; j < 4; j++)
                store(dst + block * (4 * half + j) + 64 * s, q[j]);
        }
}

static inline void pack_q2k(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    vec s[4];
    load4(src, stride, s);
    for (int i = 0; i < 4; i++)
        store(dst + 64 * i + 4 * lane, s[i]);
    copy_small(src + 80, stride, 2, dst + 256 + 2 * lane);
    copy_small(src + 82, stride, 2, dst + 288 + 2 * lane);
    pack_pairs(src + 16, stride, dst + LOW_SCALES + 4 * lane, Q2K_BLOCK);
}

/* Codes of six bits minus 32, as bytes. */
static inline vec signed_6bit(vec low, vec high)
{
    vec x = ((low & LOW4) | (high & LOW2) << 4) ^ 0x20202020u;
    return x | (x & 0x20202020u) << 1 | (x & 0x20202020u) << 2;
}

static inline void pack_q3k(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    uint8_t small[16 * W] = {0};
    vec s[4];
    gather_small(src + 96, stride, 12, small);
    load4(small, 16, s);
    store(dst + 4 * lane, signed_6bit(s[0], s[2]));
    store(dst + 64 + 4 * lane, signed_6bit(s[1], s[2] >> 2));
    store(dst + 128 + 4 * lane, signed_6bit(s[0] >> 4, s[2] >> 4));
    store(dst + 192 + 4 * lane, signed_6bit(s[1] >> 4, s[2] >> 6));
    copy_small(src + 108, stride, 2, dst + 256 + 2 * lane);
    dst += LOW_SCALES + 4 * lane;
    pack_high(src, stride, dst, Q3K_BLOCK);
    pack_pairs(src + 32, stride, dst + 64, Q3K_BLOCK);
}

/* Moves bit 4 g + c of a dword to bit g of its byte c: the fifth bits of Q5_0 and Q5_1. */
static inline vec spread_bits(vec v)
{
    vec out = v & 0;
    for (int c = 0; c < 4; c++) {
        vec x = v >> c & 0x11111111u;
        x = (x | x >> 3) & 0x03030303u;
        x = (x | x >> 6) & 0x000f000fu;
        out |= ((x | x >> 12) & 0xffu) << 8 * c;
    }
    return out;
}

/* Block i of a unit of two: d, m if has_m, fifth bits if has_h, nibbles. */
static inline void pack_small_block(const uint8_t *src, size_t stride, bool has_m, bool has_h,
                                    uint8_t *unit, int i, int lane)
{
    uint8_t *block = unit + (has_m ? 2 * UNIT_SCALES : UNIT_SCALES) +
                     (has_h ? Q5K_BLOCK : Q4K_BLOCK) * i + 4 * lane;
    copy_small(src, stride, 2, unit + 32 * i + 2 * lane);
    if (has_m)
        copy_small(src + 2, stride, 2, unit + UNIT_SCALES + 32 * i + 2 * lane);
    src += has_m ? 4 : 2;
    if (has_h) {
        store(block, spread_bits(load_dwords(src, stride)));
        src += 4;
        block += 64;
    }
    pack_split16(src, stride, block);
}

static inline void pack_nvfp4(const uint8_t *src, size_t stride, uint8_t *unit, int lane)
{
    for (size_t r = 0; r < W; r++)
        for (size_t s = 0; s < 4; s++) {
            uint8_t d = src[r * stride + s];
            unit[16 * s + (size_t)lane + r] = d == 0x7f ? 0 : d == 0xff ? 0x7f : d & 0x7f;
        }
    for (int h = 0; h < 2; h++) {
        vec q[4];
        load4(src + 4 + 16 * h, stride, q);
        uint8_t *out = unit + UNIT_SCALES + 256 * h + 4 * lane;
        for (int s = 0; s < 2; s++) {
            store(out + 128 * s, low_nibbles(q[2 * s], q[2 * s + 1]));
            store(out + 128 * s + 64, high_nibbles(q[2 * s], q[2 * s + 1]));
        }
    }
}

static inline void pack_tq2(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    copy_small(src + 64, stride, 2, dst + 2 * lane);
    pack_pairs(src, stride, dst + UNIT_SCALES + 4 * lane, Q2K_BLOCK);
}

/* The next base-3 digit of each byte, which is a fraction of 256. q keeps the remaining digits. */
static inline vec next_trit(vec *q)
{
    vec even = (*q & 0x00ff00ffu) * 3u, odd = (*q >> 8 & 0x00ff00ffu) * 3u;
    *q = (even & 0x00ff00ffu) | (odd & 0x00ff00ffu) << 8;
    return (even >> 8 & 0x00030003u) | (odd & 0x03000300u);
}

static inline void pack_tq1(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    vec q[16], code[64];
    for (int i = 0; i < 3; i++)
        load4(src + 16 * i, stride, q + 4 * i);
    q[12] = load_dwords(src + 48, stride);
    for (int n = 0; n < 5; n++) {
        for (int i = 0; i < 8; i++)
            code[8 * n + i] = next_trit(&q[i]);
        for (int i = 0; i < 4; i++)
            code[40 + 4 * n + i] = next_trit(&q[8 + i]);
    }
    for (int n = 0; n < 4; n++)
        code[60 + n] = next_trit(&q[12]);
    copy_small(src + 52, stride, 2, dst + 2 * lane);
    for (int i = 0; i < 16; i++)
        store(dst + UNIT_SCALES + 64 * i + 4 * lane, join_2bit(code + 4 * i));
}

/* Packs codes of a level format, one per byte. */
static inline void pack_codes(const struct level_codes *c, int bits, uint8_t *dst)
{
    for (int b = 0; b < 8; b++) {
        vec q[8];
        for (int i = 0; i < 2; i++)
            load4(c->code + 32 * b + 16 * i, sizeof *c, q + 4 * i);
        if (bits == 4) {
            for (int i = 0; i < 4; i++)
                store(dst + 256 * b + 64 * i, q[2 * i] | q[2 * i + 1] << 4);
        } else {
            uint8_t *block = dst + (bits == 2 ? Q2K_BLOCK : Q3K_BLOCK) * b;
            if (bits == 3) {
                vec high = q[0] & 0;
                for (int g = 0; g < 8; g++)
                    high |= (q[g] >> 2 & 0x01010101u) << g;
                store(block, high);
                block += 64;
            }
            store(block, join_2bit(q));
            store(block + 64, join_2bit(q + 4));
        }
    }
}

static void pack_levels(enum dtype t, const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    struct level_codes c[W];
    bool three = t == DT_IQ3_S || t == DT_IQ3_XXS, one = t == DT_IQ1_S || t == DT_IQ1_M;
    int n_scales = three ? 1 : 2;
    for (int r = 0; r < W; r++) {
        panel_levels_read(t, src + (size_t)r * stride, &c[r]);
        for (int i = 0; i < n_scales; i++)
            memcpy(dst + 64 * i + 4 * (lane + r), &c[r].scales[i], 4);
        memcpy(dst + 64 * n_scales + 2 * (lane + r), &c[r].d, 2);
        if (one)
            memcpy(dst + 192 + 4 * (lane + r), &c[r].down, 4);
    }
    dst += (three ? IQ3_SCALES : one ? IQ1_SCALES : IQ2_SCALES) + 4 * lane;
    pack_codes(c, three ? 4 : one ? 2 : 3, dst);
}

/* Packs all columns of W rows, if the type is one of these formats. dst: the panel; NVFP4: after
 * its head. */
static bool pack_low_bits(const struct pack_rows *p, const uint8_t *src, uint8_t *dst, int lane)
{
    size_t stride = p->row_bytes, step = (size_t)dtype_table[p->type].block_bytes, bytes, scales;
    int n = p->n_in / dtype_table[p->type].block_len, blocks;
    if (!panel_low_unit(p->type, &blocks, &scales, &bytes) &&
        !panel_levels_unit(p->type, &blocks, &scales, &bytes))
        return false;
    size_t unit = scales + (size_t)blocks * bytes;
    for (int i = 0; i < n; i++, src += step, dst += i % blocks ? 0 : unit)
        switch (p->type) {
        case DT_Q2_K:
            pack_q2k(src, stride, dst, lane);
            break;
        case DT_Q3_K:
            pack_q3k(src, stride, dst, lane);
            break;
        case DT_Q4_1:
        case DT_Q5_0:
        case DT_Q5_1:
            pack_small_block(src, stride, p->type != DT_Q5_0, p->type != DT_Q4_1, dst, i & 1, lane);
            break;
        case DT_NVFP4:
            pack_nvfp4(src, stride, dst, lane);
            break;
        case DT_TQ1_0:
            pack_tq1(src, stride, dst, lane);
            break;
        case DT_TQ2_0:
            pack_tq2(src, stride, dst, lane);
            break;
        default:
            pack_levels(p->type, src, stride, dst, lane);
        }
    return true;
}

#endif
