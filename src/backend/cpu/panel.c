/*
 * Packs the file's blocks into panels (panel.h) and back, in plain C, which defines the layout. Whole panels
 * of 16 rows go to the vector packers (panel_pack.h), which write the same bytes as fast as memory allows.
 * The way back rebuilds the file's block and dequantises it with quant.c, so a packed row is exact by
 * construction.
 */
#include "backend/cpu/panel_pack.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/panel_levels.h"
#include "backend/cpu/panel_low.h"
#include "base/error.h"

#include <string.h>

static uint64_t load8(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static void store4(uint8_t *p, uint64_t v)
{
    uint32_t d = (uint32_t)v;
    memcpy(p, &d, 4);
}

#define LOW4 UINT64_C(0x0f0f0f0f0f0f0f0f)
#define LOW2 UINT64_C(0x0303030303030303)
#define LOW1 UINT64_C(0x0101010101010101)

/* Packs 8 codes of 4 bits (one per byte) into 4 bytes: columns 0-3 low, 4-7 high. */
static uint64_t pack_nibbles(uint64_t codes)
{
    return codes | codes >> 28;
}

/* The inverse: 8 codes, one per byte. */
static uint64_t unpack_nibbles(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return ((uint64_t)(v >> 4) << 32 | v) & LOW4;
}

/* Packs 32 codes of one row, in the order of Q4_0: 16 bytes with columns 0-15 in the low
 * nibbles. */
static void pack_split16(const uint8_t *qs, uint8_t *dst, int lane)
{
    for (int i = 0; i < 2; i++) {
        uint64_t q = load8(qs + 8 * i);
        store4(dst + 64 * i + 4 * lane, pack_nibbles(q & LOW4));
        store4(dst + 64 * (i + 2) + 4 * lane, pack_nibbles(q >> 4 & LOW4));
    }
}

static void unpack_split16(const uint8_t *src, int lane, uint8_t *qs)
{
    for (int i = 0; i < 2; i++) {
        uint64_t q = unpack_nibbles(src + 64 * i + 4 * lane) |
                     unpack_nibbles(src + 64 * (i + 2) + 4 * lane) << 4;
        memcpy(qs + 8 * i, &q, 8);
    }
}

/* Packs 64 codes, in the order of Q4_K and Q5_K (32 bytes with columns 0-31 in the low nibbles),
 * into two blocks of the panel, `block` bytes apart. */
static void pack_split32(const uint8_t *qs, uint8_t *dst, int block, int lane)
{
    for (int i = 0; i < 4; i++) {
        uint64_t q = load8(qs + 8 * i);
        store4(dst + 64 * i + 4 * lane, pack_nibbles(q & LOW4));
        store4(dst + block + 64 * i + 4 * lane, pack_nibbles(q >> 4 & LOW4));
    }
}

static void unpack_split32(const uint8_t *src, int block, int lane, uint8_t *qs)
{
    for (int i = 0; i < 4; i++) {
        uint64_t q = unpack_nibbles(src + 64 * i + 4 * lane) |
                     unpack_nibbles(src + block + 64 * i + 4 * lane) << 4;
        memcpy(qs + 8 * i, &q, 8);
    }
}

/* Q4_K and Q5_K: converts 8 scales and mins of 6 bits in 12 bytes to the four vectors at dst, or
 * back. */
static void pack_scales(const uint8_t *in, uint16_t d, uint16_t dmin, uint8_t *dst, int lane)
{
    uint8_t sc[8], mn[8];
    for (int j = 0; j < 4; j++) {
        sc[j] = in[j] & 63;
        mn[j] = in[j + 4] & 63;
        sc[j + 4] = (uint8_t)((in[j + 8] & 15) | in[j] >> 6 << 4);
        mn[j + 4] = (uint8_t)(in[j + 8] >> 4 | in[j + 4] >> 6 << 4);
    }
    for (int j = 0; j < 4; j++) {
        dst[4 * lane + j] = (uint8_t)((sc[j] & 15) | (sc[j + 4] & 15) << 4);
        dst[64 + 4 * lane + j] = (uint8_t)((mn[j] & 15) | (mn[j + 4] & 15) << 4);
        dst[128 + 4 * lane + j] =
            (uint8_t)(sc[j] >> 4 | sc[j + 4] >> 4 << 2 | mn[j] >> 4 << 4 | mn[j + 4] >> 4 << 6);
    }
    memcpy(dst + 192 + 2 * lane, &d, 2);
    memcpy(dst + 224 + 2 * lane, &dmin, 2);
}

static void unpack_scales(const uint8_t *src, int lane, uint8_t *out, uint16_t *d, uint16_t *dmin)
{
    for (int j = 0; j < 4; j++) {
        uint8_t s = src[4 * lane + j], m = src[64 + 4 * lane + j], h = src[128 + 4 * lane + j];
        uint8_t sc0 = (uint8_t)((s & 15) | (h & 3) << 4);
        uint8_t sc4 = (uint8_t)(s >> 4 | (h >> 2 & 3) << 4);
        uint8_t mn0 = (uint8_t)((m & 15) | (h >> 4 & 3) << 4);
        uint8_t mn4 = (uint8_t)(m >> 4 | h >> 6 << 4);
        out[j] = (uint8_t)(sc0 | sc4 >> 4 << 6);
        out[j + 4] = (uint8_t)(mn0 | mn4 >> 4 << 6);
        out[j + 8] = (uint8_t)((sc4 & 15) | (mn4 & 15) << 4);
    }
    memcpy(d, src + 192 + 2 * lane, 2);
    memcpy(dmin, src + 224 + 2 * lane, 2);
}

static void pack_q4k(const struct block_q4_k *b, uint8_t *dst, int lane)
{
    for (int c = 0; c < 4; c++)
        pack_split32(b->qs + 32 * c, dst + K45_SCALES + 512 * c, 256, lane);
    pack_scales(b->scales, b->d, b->dmin, dst, lane);
}

static void unpack_q4k(const uint8_t *src, int lane, struct block_q4_k *b)
{
    for (int c = 0; c < 4; c++)
        unpack_split32(src + K45_SCALES + 512 * c, 256, lane, b->qs + 32 * c);
    unpack_scales(src, lane, b->scales, &b->d, &b->dmin);
}

static void pack_q5k(const struct block_q5_k *b, uint8_t *dst, int lane)
{
    for (int c = 0; c < 4; c++)
        pack_split32(b->qs + 32 * c, dst + K45_SCALES + 2 * Q5K_BLOCK * c + 64, Q5K_BLOCK, lane);
    /* qh[l] bit b is bit 4 of column 32 b + l. A dword of the panel collects 8 column groups of a
     * block. */
    for (int blk = 0; blk < 8; blk++) {
        uint64_t bits = 0;
        for (int i = 0; i < 4; i++) {
            uint64_t h = load8(b->qh + 8 * i) >> blk & LOW1;
            bits |= (h | h >> 31) << 2 * i;
        }
        store4(dst + K45_SCALES + Q5K_BLOCK * blk + 4 * lane, bits);
    }
    pack_scales(b->scales, b->d, b->dmin, dst, lane);
}

static void unpack_q5k(const uint8_t *src, int lane, struct block_q5_k *b)
{
    for (int c = 0; c < 4; c++)
        unpack_split32(src + K45_SCALES + 2 * Q5K_BLOCK * c + 64, Q5K_BLOCK, lane, b->qs + 32 * c);
    memset(b->qh, 0, sizeof b->qh);
    for (int blk = 0; blk < 8; blk++)
        for (int col = 0; col < 32; col++) {
            int bit = src[K45_SCALES + Q5K_BLOCK * blk + 4 * lane + col % 4] >> col / 4 & 1;
            b->qh[col] |= (uint8_t)(bit << blk);
        }
    unpack_scales(src, lane, b->scales, &b->d, &b->dmin);
}

static void pack_q6k(const struct block_q6_k *b, uint8_t *dst, int lane)
{
    for (int s = 0; s < 4; s++)
        memcpy(dst + 64 * s + 4 * lane, b->scales + 4 * s, 4);
    memcpy(dst + 256 + 2 * lane, &b->d, 2);
    uint8_t *out = dst + Q6K_SCALES + 4 * lane;
    for (int blk = 0; blk < 8; blk++) {
        /* Block 4h + m: nibbles of ql[64 h + 32 (m & 1) ..], and bits 2m of qh[32 h ..]. */
        int h = blk / 4, m = blk % 4, shift = m < 2 ? 0 : 4;
        const uint8_t *ql = b->ql + 64 * h + 32 * (m & 1), *qh = b->qh + 32 * h;
        for (int i = 0; i < 32; i += 16, out += 192) {
            store4(out, pack_nibbles(load8(ql + i) >> shift & LOW4));
            store4(out + 64, pack_nibbles(load8(ql + i + 8) >> shift & LOW4));
            uint64_t a = load8(qh + i) >> 2 * m & LOW2, c = load8(qh + i + 8) >> 2 * m & LOW2;
            store4(out + 128, (a | a >> 30) | (c | c >> 30) << 4);
        }
    }
}

static void unpack_q6k(const uint8_t *src, int lane, struct block_q6_k *b)
{
    for (int s = 0; s < 4; s++)
        memcpy(b->scales + 4 * s, src + 64 * s + 4 * lane, 4);
    memcpy(&b->d, src + 256 + 2 * lane, 2);
    memset(b->ql, 0, sizeof b->ql);
    memset(b->qh, 0, sizeof b->qh);
    for (int col = 0; col < QK_K; col++) {
        int h = col / 128, m = col / 32 % 4, l = col % 32, g = col % 16 / 4;
        const uint8_t *q = src + Q6K_SCALES + 192 * (col / 16) + 4 * lane + col % 4;
        int lo = q[64 * (g / 2)] >> 4 * (g & 1) & 15, hi = q[128] >> 2 * g & 3;
        b->ql[64 * h + 32 * (m & 1) + l] |= (uint8_t)(lo << (m < 2 ? 0 : 4));
        b->qh[32 * h + l] |= (uint8_t)(hi << 2 * m);
    }
}

static void pack_iq4xs(const struct block_iq4_xs *b, uint8_t *dst, int lane)
{
    for (int blk = 0; blk < 8; blk++)
        pack_split16(b->qs + 16 * blk, dst + IQ4XS_SCALES + 256 * blk, lane);
    memcpy(dst + 4 * lane, b->scales_l, 4);
    memcpy(dst + 64 + 2 * lane, &b->scales_h, 2);
    memcpy(dst + 96 + 2 * lane, &b->d, 2);
}

static void unpack_iq4xs(const uint8_t *src, int lane, struct block_iq4_xs *b)
{
    for (int blk = 0; blk < 8; blk++)
        unpack_split16(src + IQ4XS_SCALES + 256 * blk, lane, b->qs + 16 * blk);
    memcpy(b->scales_l, src + 4 * lane, 4);
    memcpy(&b->scales_h, src + 64 + 2 * lane, 2);
    memcpy(&b->d, src + 96 + 2 * lane, 2);
}

static void pack_q8_0(const struct block_q8_0 *b, uint8_t *dst, int lane)
{
    for (int g = 0; g < 8; g++) {
        uint32_t v;
        memcpy(&v, b->qs + 4 * g, 4);
        store4(dst + 64 * g + 4 * lane, v ^ PANEL_Q8_SIGNS);
    }
}

static void unpack_q8_0(const uint8_t *src, int lane, struct block_q8_0 *b)
{
    for (int g = 0; g < 8; g++)
        for (int j = 0; j < 4; j++)
            b->qs[4 * g + j] = (int8_t)(src[64 * g + 4 * lane + j] ^ (PANEL_Q8_SIGNS & 0x80));
}

/* GPTQ4: 32 columns in 16 bytes, the even columns in the low nibbles. */
static void pack_gptq(const uint8_t *qs, uint8_t *dst, int lane)
{
    for (int i = 0; i < 4; i++) {
        uint32_t v;
        memcpy(&v, qs + 4 * i, 4);
        uint64_t even = v & 0x0f0f0f0fu, odd = v >> 4 & 0x0f0f0f0fu;
        even = (even | even << 16) & UINT64_C(0x0000ffff0000ffff);
        even = (even | even << 8) & UINT64_C(0x00ff00ff00ff00ff);
        odd = (odd | odd << 16) & UINT64_C(0x0000ffff0000ffff);
        odd = (odd | odd << 8) & UINT64_C(0x00ff00ff00ff00ff);
        store4(dst + 64 * i + 4 * lane, pack_nibbles(even | odd << 8));
    }
}

/* Packs values of `size` bytes as columns of 16; pair: two columns' values are adjacent. */
static void pack_columns(const uint8_t *src, size_t row_bytes, int n, int n_in, size_t size,
                         bool pair, uint8_t *dst)
{
    enum {
        RUN = 64
    }; /* columns whose cache lines stay in the first-level cache while all rows are copied */
    for (int k0 = 0; k0 < n_in; k0 += RUN)
        for (int r = 0; r < n; r++)
            for (int k = k0; k < n_in && k < k0 + RUN; k++) {
                size_t at = pair ? (size_t)(k / 2) * 32 + 2 * (size_t)r + (k & 1)
                                 : (size_t)k * 16 + (size_t)r;
                const uint8_t *v = src + (size_t)r * row_bytes + (size_t)k * size;
                if (size == 4)
                    memcpy(dst + 4 * at, v, 4);
                else if (size == 2)
                    memcpy(dst + 2 * at, v, 2);
                else
                    dst[at] = *v;
            }
}

/* A format's unit: its number of file blocks, the bytes of its scales, and of one block. */
static bool unit_of(enum dtype t, int *blocks, size_t *scales, size_t *bytes)
{
    *blocks = 1;
    *scales = 0;
    switch (t) {
    case DT_Q4_K:
        *bytes = K45_SCALES + 8 * Q4K_BLOCK;
        return true;
    case DT_Q5_K:
        *bytes = K45_SCALES + 8 * Q5K_BLOCK;
        return true;
    case DT_Q6_K:
        *bytes = Q6K_SCALES + 8 * Q6K_BLOCK;
        return true;
    case DT_IQ4_XS:
        *bytes = IQ4XS_SCALES + 8 * 256;
        return true;
    case DT_Q8_0:
        *blocks = 2, *scales = UNIT_SCALES, *bytes = 512;
        return true;
    case DT_Q4_0:
    case DT_IQ4_NL:
        *blocks = 2, *scales = UNIT_SCALES, *bytes = 256;
        return true;
    case DT_MXFP4:
        *blocks = 4, *scales = UNIT_SCALES, *bytes = 256;
        return true;
    case DT_NF4:
    case DT_FP4:
        *scales = UNIT_SCALES, *bytes = PANEL_NF4_UNIT - UNIT_SCALES;
        return true;
    default:
        return panel_low_unit(t, blocks, scales, bytes) ||
               panel_levels_unit(t, blocks, scales, bytes);
    }
}

bool panel_reads_floats(enum dtype t)
{
    return t == DT_F32 || t == DT_F16 || t == DT_BF16 || t == DT_F8_E4M3 || t == DT_NF4 ||
           t == DT_FP4;
}

bool panel_reads_fine(enum dtype t)
{
    return t == DT_Q8_0 || t == DT_GPTQ4 || t == DT_MXFP4 || t == DT_NVFP4;
}

bool panel_reads_split(enum dtype t)
{
    return panel_reads_floats(t) || t == DT_GPTQ4;
}

static size_t round64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

/* Bytes of a panel before its first unit. */
static size_t head_of(enum dtype t)
{
    return t == DT_NVFP4 ? NVFP4_HEAD : 0;
}

static int groups(int n_in, int len)
{
    return (n_in + len - 1) / len;
}

size_t panel_bytes(const struct raw_seg *s, int n_in)
{
    int blocks;
    size_t scales, bytes, n = (size_t)n_in;
    switch (s->type) {
    case DT_F32:
        return n * 64;
    case DT_F16:
    case DT_BF16:
        return (n + n % 2) * 32;
    case DT_F8_E4M3:
        return panel_f8_head(n_in) + round64((n + n % 2) * 16);
    case DT_GPTQ4:
        if (n_in % 32 || s->group_len % 32)
            return 0;
        return (size_t)groups(n_in, s->group_len) * UNIT_SCALES + n / 32 * 256;
    default:
        if (!unit_of(s->type, &blocks, &scales, &bytes))
            return 0;
        return head_of(s->type) + (size_t)groups(n_in / dtype_table[s->type].block_len, blocks) *
                                      (scales + (size_t)blocks * bytes);
    }
}

bool panel_unit(enum dtype t, int *columns, int *scales, int *block)
{
    int blocks;
    size_t head, bytes;
    if (t == DT_F32 || t == DT_F16 || t == DT_BF16) {
        *columns = *scales = *block = 0;
        return true;
    }
    if (t == DT_GPTQ4 || t == DT_F8_E4M3 || quant_levels(t) || head_of(t) ||
        !unit_of(t, &blocks, &head, &bytes))
        return false;
    *columns = blocks * dtype_table[t].block_len;
    switch (t) { /* whose scales unit_of counts as part of the block */
    case DT_Q4_K:
    case DT_Q5_K:
        head = K45_SCALES;
        break;
    case DT_Q6_K:
        head = Q6K_SCALES;
        break;
    case DT_IQ4_XS:
        head = IQ4XS_SCALES;
        break;
    case DT_Q2_K:
    case DT_Q3_K:
        head = LOW_SCALES;
        break;
    default:
        if (*columns == QK_K)
            return false;
        *scales = (int)head;
        *block = (int)bytes;
        return true;
    }
    *scales = (int)head;
    *block = (int)((bytes - head) / (QK_K / 32));
    return true;
}

/* Packs block `i` of a unit, of one row, into its lane. */
static void pack_block(enum dtype t, const uint8_t *src, uint8_t *unit, int i, int lane)
{
    switch (t) {
    case DT_Q4_K:
        pack_q4k((const struct block_q4_k *)src, unit, lane);
        break;
    case DT_Q5_K:
        pack_q5k((const struct block_q5_k *)src, unit, lane);
        break;
    case DT_Q6_K:
        pack_q6k((const struct block_q6_k *)src, unit, lane);
        break;
    case DT_IQ4_XS:
        pack_iq4xs((const struct block_iq4_xs *)src, unit, lane);
        break;
    case DT_Q8_0:
        memcpy(unit + 32 * i + 2 * lane, src, 2);
        pack_q8_0((const struct block_q8_0 *)src, unit + UNIT_SCALES + 512 * i, lane);
        break;
    case DT_Q4_0:
    case DT_IQ4_NL:
        memcpy(unit + 32 * i + 2 * lane, src, 2);
        pack_split16(src + 2, unit + UNIT_SCALES + 256 * i, lane);
        break;
    case DT_MXFP4:
        unit[16 * i + lane] = src[0];
        pack_split16(src + 1, unit + UNIT_SCALES + 256 * i, lane);
        break;
    case DT_NF4:
    case DT_FP4:
        memcpy(unit + 4 * lane, src, 4);
        for (int p = 0; p < QK_NF4 / 2; p++)
            unit[UNIT_SCALES + GEMM_PANEL * p + lane] = src[4 + p];
        break;
    default:
        if (panel_has_levels(t))
            panel_levels_pack(t, src, unit, lane);
        else
            panel_low_pack(t, src, unit, i, lane);
    }
}

/* Packs scales that the file stores apart from the codes: F8_E4M3, NVFP4 and GPTQ4. */
static void pack_planes(const struct raw_seg *s, int n_in, int e, int first, int n, uint8_t *dst)
{
    if (s->type == DT_F8_E4M3) {
        float *scale = (float *)dst;
        int n_scales = groups(n_in, 128);
        for (int i = 0; i < n_scales; i++)
            for (int r = 0; r < n; r++)
                scale[GEMM_PANEL * i + r] =
                    s->scale ? ((const float *)
                                    s->scale[e])[(size_t)(first + r) * (size_t)n_scales + (size_t)i]
                             : 1.0f;
    }
    if (s->type == DT_NVFP4)
        for (int r = 0; r < n; r++)
            ((float *)dst)[r] = s->scale ? *(const float *)s->scale[e] : 1.0f;
    if (s->type == DT_GPTQ4) {
        int n_groups = groups(n_in, s->group_len);
        for (int g = 0; g < n_groups; g++, dst += UNIT_SCALES + 8 * (size_t)s->group_len)
            for (int r = 0; r < n; r++) {
                size_t at = (size_t)(first + r) * (size_t)n_groups + (size_t)g;
                memcpy(dst + 2 * r, (const uint16_t *)s->scale[e] + at, 2);
                dst[32 + r] = s->zero[e][at];
            }
    }
}

/* Packs the formats that are not made of blocks: floats and GPTQ4. */
static bool pack_planar(const struct raw_seg *s, int n_in, const uint8_t *src, int n, uint8_t *dst)
{
    size_t row_bytes = raw_seg_row_bytes(s, n_in);
    switch (s->type) {
    case DT_F32:
        pack_columns(src, row_bytes, n, n_in, 4, false, dst);
        return true;
    case DT_F16:
        pack_columns(src, row_bytes, n, n_in, 2, false, dst);
        return true;
    case DT_BF16:
        pack_columns(src, row_bytes, n, n_in, 2, true, dst);
        return true;
    case DT_F8_E4M3:
        pack_columns(src, row_bytes, n, n_in, 1, false, dst + panel_f8_head(n_in));
        return true;
    case DT_GPTQ4:
        for (int k = 0; k < n_in; k += 32) {
            dst += k % s->group_len ? 0 : UNIT_SCALES;
            for (int r = 0; r < n; r++)
                pack_gptq(src + (size_t)r * row_bytes + k / 2, dst + 8 * (size_t)k, r);
        }
        return true;
    default:
        return false;
    }
}

void panel_pack(const struct raw_weight *w, int seg, int e, int panel, const uint8_t *rows,
                enum isa isa, uint8_t *dst)
{
    const struct raw_seg *s = &w->seg[seg];
    int first = panel * GEMM_PANEL, n = s->rows - first < GEMM_PANEL ? s->rows - first : GEMM_PANEL;
    size_t row_bytes = raw_seg_row_bytes(s, w->n_in), scales, bytes;
    const uint8_t *src = rows ? rows : s->data[e] + (size_t)first * row_bytes;
    if (n < GEMM_PANEL || w->n_in % 256) /* padded lanes or columns */
        memset(dst, 0, panel_bytes(s, w->n_in));
    pack_planes(s, w->n_in, e, first, n, dst);
#ifdef __x86_64__
    if (n == GEMM_PANEL && isa_has(isa, ISA_AVX2)) {
        const struct pack_rows p = {s->type, src, row_bytes, w->n_in, s->group_len};
        uint8_t *codes = dst + (s->type == DT_F8_E4M3 ? panel_f8_head(w->n_in) : head_of(s->type));
        if (isa_has(isa, ISA_AVX512))
            panel_pack_rows_avx512(&p, codes);
        else
            panel_pack_rows_avx2(&p, codes);
        return;
    }
#elif defined __aarch64__
    if (n == GEMM_PANEL && isa_has(isa, ISA_NEON)) {
        const struct pack_rows p = {s->type, src, row_bytes, w->n_in, s->group_len};
        panel_pack_rows_neon(
            &p, dst + (s->type == DT_F8_E4M3 ? panel_f8_head(w->n_in) : head_of(s->type)));
        return;
    }
#else
    (void)isa;
#endif
    if (pack_planar(s, w->n_in, src, n, dst))
        return;
    int n_blocks = w->n_in / dtype_table[s->type].block_len, blocks;
    CHECK(unit_of(s->type, &blocks, &scales, &bytes), "%s is not packed", dtype_name(s->type));
    size_t step = (size_t)dtype_table[s->type].block_bytes;
    for (int i = 0; i < n_blocks; i++) {
        uint8_t *unit =
            dst + head_of(s->type) + (size_t)(i / blocks) * (scales + (size_t)blocks * bytes);
        for (int r = 0; r < n; r++)
            pack_block(s->type, src + (size_t)r * row_bytes + (size_t)i * step, unit, i % blocks,
                       r);
    }
}

/* Unpacks a row that pack_planar packed. */
static bool row_planar(const struct gemm_seg *s, const int32_t *perm, const uint8_t *panel,
                       int lane, int n_in, float *dst)
{
    size_t r = (size_t)lane;
    const float *f8_scale = (const float *)panel;
    for (int k = 0; k < n_in; k++) {
        uint16_t half;
        switch (s->type) {
        case DT_F32:
            memcpy(&dst[k], panel + 64 * (size_t)k + 4 * r, 4);
            break;
        case DT_F16:
            memcpy(&half, panel + 32 * (size_t)k + 2 * r, 2);
            dst[k] = f16_to_f32(half);
            break;
        case DT_BF16:
            memcpy(&half, panel + 64 * (size_t)(k / 2) + 4 * r + 2 * (k & 1), 2);
            dst[k] = bf16_to_f32(half);
            break;
        case DT_F8_E4M3:
            dst[k] = f8e4m3_to_f32(panel[panel_f8_head(n_in) + 16 * (size_t)k + r]) *
                     f8_scale[GEMM_PANEL * (k / 128) + lane];
            break;
        case DT_GPTQ4: {
            int g = k / s->group_len, in = k % s->group_len, group = in % 32 / 4;
            const uint8_t *unit = panel + (size_t)g * (UNIT_SCALES + 8 * (size_t)s->group_len);
            int code = unit[UNIT_SCALES + 256 * (in / 32) + 64 * (group / 2) + 4 * lane + in % 4];
            code = group & 1 ? code >> 4 : code & 15;
            memcpy(&half, unit + 2 * r, 2);
            dst[perm ? perm[k] : k] = (float)(code - unit[32 + r]) * f16_to_f32(half);
            break;
        }
        default:
            return false;
        }
    }
    return true;
}

void panel_row(const struct gemm_seg *s, int n_in, int e, int row, float *dst)
{
    size_t at = (size_t)e * (size_t)s->n_panels + (size_t)(row / GEMM_PANEL);
    const uint8_t *panel = s->data + at * s->panel_bytes;
    const int32_t *perm = s->perm ? s->perm + (size_t)e * (size_t)n_in : NULL;
    int lane = row % GEMM_PANEL, blocks;
    enum dtype t = s->type;
    if (row_planar(s, perm, panel, lane, n_in, dst))
        return;
    union {
        struct block_q4_k q4k;
        struct block_q5_k q5k;
        struct block_q6_k q6k;
        struct block_iq4_xs iq4xs;
        struct block_q8_0 q8_0;
        struct block_q4_0 q4_0; /* also IQ4_NL's layout */
        struct block_mxfp4 mx;
        struct block_nf4 nf4; /* also FP4's layout */
    } b;
    size_t scales, bytes;
    CHECK(unit_of(t, &blocks, &scales, &bytes), "%s is not packed", dtype_name(t));
    int len = dtype_table[t].block_len;
    for (int i = 0; i < n_in / len; i++, dst += len) {
        const uint8_t *unit =
            panel + head_of(t) + (size_t)(i / blocks) * (scales + (size_t)blocks * bytes);
        const uint8_t *q = unit + scales + (size_t)(i % blocks) * bytes;
        if (panel_is_low(t)) {
            panel_low_row(t, unit, i % blocks, lane, dst);
            continue;
        }
        if (panel_has_levels(t)) {
            panel_levels_row(t, unit, lane, dst);
            for (int k = 0; t == DT_NVFP4 && k < len; k++)
                dst[k] *= ((const float *)panel)[lane];
            continue;
        }
        switch (t) {
        case DT_Q4_K:
            unpack_q4k(unit, lane, &b.q4k);
            break;
        case DT_Q5_K:
            unpack_q5k(unit, lane, &b.q5k);
            break;
        case DT_Q6_K:
            unpack_q6k(unit, lane, &b.q6k);
            break;
        case DT_IQ4_XS:
            unpack_iq4xs(unit, lane, &b.iq4xs);
            break;
        case DT_Q8_0:
            unpack_q8_0(q, lane, &b.q8_0);
            memcpy(&b.q8_0.d, unit + 32 * (i % blocks) + 2 * lane, 2);
            break;
        case DT_MXFP4:
            unpack_split16(q, lane, b.mx.qs);
            b.mx.e = unit[16 * (i % blocks) + lane];
            break;
        case DT_NF4:
        case DT_FP4:
            memcpy(&b.nf4.d, unit + 4 * lane, 4);
            for (int p = 0; p < QK_NF4 / 2; p++)
                b.nf4.qs[p] = q[GEMM_PANEL * p + lane];
            break;
        default:
            unpack_split16(q, lane, b.q4_0.qs);
            memcpy(&b.q4_0.d, unit + 32 * (i % blocks) + 2 * lane, 2);
        }
        quant_dequantize(t, &b, dst, (size_t)len);
    }
}
