/*
 * Vector packers for W rows at a time: 16 with AVX-512, 8 with AVX2, 4 with NEON. All of them are built
 * on one step: 16 bytes from each of W rows become four vectors, where vector i has dword i of every row in
 * the row's lane. The rest of the work is on bytes within lanes, the same for all rows.
 */
#include "backend/cpu/panel_pack.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/panel_levels.h"
#include "backend/cpu/panel_low.h"
#include "base/error.h"

#include <string.h>
#ifdef STEEL_NEON
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#ifdef STEEL_NEON

enum { W = 4 };
typedef uint32_t vec __attribute__((vector_size(16)));

static inline void load4(const uint8_t *p, size_t stride, vec t[4])
{
    uint32x4_t x[4];
    for (size_t i = 0; i < 4; i++)
        x[i] = vreinterpretq_u32_u8(vld1q_u8(p + i * stride));
    uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(x[0], x[1]));
    uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(x[0], x[1]));
    uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(x[2], x[3]));
    uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(x[2], x[3]));
    t[0] = (vec)vtrn1q_u64(a, c);
    t[1] = (vec)vtrn1q_u64(b, d);
    t[2] = (vec)vtrn2q_u64(a, c);
    t[3] = (vec)vtrn2q_u64(b, d);
}

static inline void store(uint8_t *p, vec v)
{
    vst1q_u8(p, (uint8x16_t)v);
}

static inline void store_fp16(uint8_t *p, vec v)
{
    vst1_u8(p, vreinterpret_u8_u16(vmovn_u32((uint32x4_t)v)));
}

static inline void store_bytes(uint8_t *p, vec v)
{
    uint16x4_t h = vmovn_u32((uint32x4_t)v);
    uint8x8_t b = vmovn_u16(vcombine_u16(h, h));
    vst1_lane_u32((uint32_t *)p, vreinterpret_u32_u8(b), 0);
}

#elif defined __AVX512F__

enum { W = 16 };
typedef uint32_t vec __attribute__((vector_size(64)));

/* Loads row 4l + i into 128-bit lane l of x[i], so that a 4 x 4 transpose within lanes leaves rows
 * in order. */
static inline void load4(const uint8_t *p, size_t stride, vec t[4])
{
    __m512i x[4];
    for (size_t i = 0; i < 4; i++) {
        x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(p + i * stride)));
        x[i] =
            _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(p + (i + 4) * stride)), 1);
        x[i] =
            _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(p + (i + 8) * stride)), 2);
        x[i] =
            _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(p + (i + 12) * stride)), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    t[0] = (vec)_mm512_unpacklo_epi64(a, c);
    t[1] = (vec)_mm512_unpackhi_epi64(a, c);
    t[2] = (vec)_mm512_unpacklo_epi64(b, d);
    t[3] = (vec)_mm512_unpackhi_epi64(b, d);
}

static inline void store(uint8_t *p, vec v)
{
    _mm512_storeu_si512(p, (__m512i)v);
}

/* Stores the low 16 bits, or the low byte, of every lane. */
static inline void store_fp16(uint8_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)v));
}

static inline void store_bytes(uint8_t *p, vec v)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
}

#else

enum { W = 8 };
typedef uint32_t vec __attribute__((vector_size(32)));

static inline __m256i two_rows(const uint8_t *p, const uint8_t *q)
{
    __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i *)q), 1);
}

static inline void load4(const uint8_t *p, size_t stride, vec t[4])
{
    __m256i x[4];
    for (size_t i = 0; i < 4; i++)
        x[i] = two_rows(p + i * stride, p + (i + 4) * stride);
    __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    t[0] = (vec)_mm256_unpacklo_epi64(a, c);
    t[1] = (vec)_mm256_unpackhi_epi64(a, c);
    t[2] = (vec)_mm256_unpacklo_epi64(b, d);
    t[3] = (vec)_mm256_unpackhi_epi64(b, d);
}

static inline void store(uint8_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)v);
}

static inline void store_fp16(uint8_t *p, vec v)
{
    __m256i h = _mm256_packus_epi32((__m256i)(v & 0xffff), (__m256i)(v & 0xffff));
    h = _mm256_permute4x64_epi64(h, 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(h));
}

static inline void store_bytes(uint8_t *p, vec v)
{
    v &= 0xff;
    __m128i h = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v),
                                 _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(h, h));
}

#endif

#define LOW4  0x0f0f0f0fu
#define HIGH4 0xf0f0f0f0u

/* Low nibbles of a and b in one dword: four columns and the next four. high_nibbles: the high
 * ones. */
static inline vec low_nibbles(vec a, vec b)
{
    return (a & LOW4) | (b & LOW4) << 4;
}

static inline vec high_nibbles(vec a, vec b)
{
    return (a >> 4 & LOW4) | (b & HIGH4);
}

/* Swaps the bits of a under mask << n with the bits of b under mask. */
static inline void swap_bits(vec *a, vec *b, int n, uint32_t mask)
{
    vec t = (*a >> n ^ *b) & mask;
    *b ^= t;
    *a ^= t << n;
}

/* Copies `size` bytes of each row, for sizes that are not a multiple of a vector. */
static inline void copy_small(const uint8_t *src, size_t stride, size_t size, uint8_t *dst)
{
    for (size_t r = 0; r < W; r++)
        memcpy(dst + size * r, src + r * stride, size);
}

/* Packs 64 columns of Q4_K or Q5_K: 32 bytes, columns 0-31 in the low nibbles. */
static inline void pack_split32(const uint8_t *qs, size_t stride, uint8_t *dst, int block)
{
    vec q[8];
    load4(qs, stride, q);
    load4(qs + 16, stride, q + 4);
    for (int i = 0; i < 4; i++) {
        store(dst + 64 * i, low_nibbles(q[2 * i], q[2 * i + 1]));
        store(dst + block + 64 * i, high_nibbles(q[2 * i], q[2 * i + 1]));
    }
}

/* Packs 32 columns in the order of Q4_0: 16 bytes, columns 0-15 in the low nibbles. */
static inline void pack_split16(const uint8_t *qs, size_t stride, uint8_t *dst)
{
    vec q[4];
    load4(qs, stride, q);
    store(dst, low_nibbles(q[0], q[1]));
    store(dst + 64, low_nibbles(q[2], q[3]));
    store(dst + 128, high_nibbles(q[0], q[1]));
    store(dst + 192, high_nibbles(q[2], q[3]));
}

/* Packs d, dmin and the 12 bytes of scales and mins, which panel.h splits at other bits. */
static inline void pack_scales(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    vec h[4];
    load4(src, stride, h);
    store(dst + 4 * lane, low_nibbles(h[1], h[3]));
    store(dst + 64 + 4 * lane, (h[2] & LOW4) | (h[3] & HIGH4));
    store(dst + 128 + 4 * lane, (h[1] >> 4 & LOW4) | (h[2] & HIGH4));
    store_fp16(dst + 192 + 2 * lane, h[0]);
    store_fp16(dst + 224 + 2 * lane, h[0] >> 16);
}

static inline void pack_q4k(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    pack_scales(src, stride, dst, lane);
    for (int c = 0; c < 4; c++)
        pack_split32(src + 16 + 32 * c, stride, dst + K45_SCALES + 2 * Q4K_BLOCK * c + 4 * lane,
                     Q4K_BLOCK);
}

/* Packs high bits: bit b of byte k is column 32 b + k and becomes bit g of group g in the first
 * vector of block b. This is a transpose of 8 x 8 bits. */
static inline void pack_high(const uint8_t *src, size_t stride, uint8_t *dst, int block)
{
    vec h[8];
    load4(src, stride, h);
    load4(src + 16, stride, h + 4);
    for (int i = 0; i < 4; i++)
        swap_bits(&h[i], &h[i + 4], 4, 0x0f0f0f0f);
    for (int i = 0; i < 8; i += i & 1 ? 3 : 1)
        swap_bits(&h[i], &h[i + 2], 2, 0x33333333);
    for (int i = 0; i < 8; i += 2)
        swap_bits(&h[i], &h[i + 1], 1, 0x55555555);
    for (int b = 0; b < 8; b++)
        store(dst + block * b, h[b]);
}

static inline void pack_q5k(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    pack_scales(src, stride, dst, lane);
    dst += K45_SCALES + 4 * lane;
    pack_high(src + 16, stride, dst, Q5K_BLOCK);
    for (int c = 0; c < 4; c++)
        pack_split32(src + 48 + 32 * c, stride, dst + 2 * Q5K_BLOCK * c + 64, Q5K_BLOCK);
}

static inline void pack_q6k(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    const uint8_t *ql = src, *qh = src + 128;
    vec s[4];
    load4(src + 192, stride, s);
    for (int i = 0; i < 4; i++)
        store(dst + 64 * i + 4 * lane, s[i]);
    copy_small(src + 208, stride, 2, dst + 256 + 2 * lane);
    dst += Q6K_SCALES + 4 * lane;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++) {
            /* Blocks m = 0..3 of this half, 16 columns of each. Block m has nibbles of a (m even)
             * or b, low for m < 2, and bits 2m of h, which is transposed here as 4 x 4 pairs of
             * bits. */
            vec a[4], b[4], h[4];
            load4(ql + 64 * half + 16 * i, stride, a);
            load4(ql + 64 * half + 32 + 16 * i, stride, b);
            load4(qh + 32 * half + 16 * i, stride, h);
            swap_bits(&h[0], &h[2], 4, 0x0f0f0f0f);
            swap_bits(&h[1], &h[3], 4, 0x0f0f0f0f);
            swap_bits(&h[0], &h[1], 2, 0x33333333);
            swap_bits(&h[2], &h[3], 2, 0x33333333);
            uint8_t *out = dst + Q6K_BLOCK * 4 * half + Q6K_BLOCK / 2 * i;
            for (int m = 0; m < 4; m++, out += Q6K_BLOCK) {
                const vec *q = m & 1 ? b : a;
                store(out, m < 2 ? low_nibbles(q[0], q[1]) : high_nibbles(q[0], q[1]));
                store(out + 64, m < 2 ? low_nibbles(q[2], q[3]) : high_nibbles(q[2], q[3]));
                store(out + 128, h[m]);
            }
        }
}

static inline void pack_iq4xs(const uint8_t *src, size_t stride, uint8_t *dst, int lane)
{
    vec h[4];
    load4(src, stride, h);
    store(dst + 4 * lane, h[1]);
    store_fp16(dst + 64 + 2 * lane, h[0] >> 16);
    store_fp16(dst + 96 + 2 * lane, h[0]);
    for (int b = 0; b < 8; b++)
        pack_split16(src + 8 + 16 * b, stride, dst + IQ4XS_SCALES + 256 * b + 4 * lane);
}

static inline void pack_q8_0(const uint8_t *src, size_t stride, uint8_t *unit, int i, int lane)
{
    copy_small(src, stride, 2, unit + 32 * i + 2 * lane);
    vec q[8];
    load4(src + 2, stride, q);
    load4(src + 18, stride, q + 4);
    for (int g = 0; g < 8; g++)
        store(unit + UNIT_SCALES + 512 * i + 64 * g + 4 * lane, q[g] ^ PANEL_Q8_SIGNS);
}

/* GPTQ4: 32 columns, the even ones in the low nibbles. Nibbles 01234567 of a dword become
 * 04152637. */
static inline void pack_gptq(const uint8_t *src, size_t stride, uint8_t *dst)
{
    vec q[4];
    load4(src, stride, q);
    for (int i = 0; i < 4; i++) {
        vec t = (q[i] ^ q[i] >> 8) & 0x0000ff00u;
        q[i] ^= t ^ t << 8;
        t = (q[i] ^ q[i] >> 4) & 0x00f000f0u;
        q[i] ^= t ^ t << 4;
        store(dst + 64 * i, q[i]);
    }
}

/* 16 bytes of each row of a float format; F8_E4M3: of any bytes. */
static inline void pack_floats(enum dtype t, const uint8_t *src, size_t stride, uint8_t *dst,
                               int lane)
{
    vec q[4];
    load4(src, stride, q);
    for (int i = 0; i < 4; i++)
        switch (t) {
        case DT_F32:
        case DT_BF16: /* a pair of columns is a dword */
            store(dst + 64 * i + 4 * lane, q[i]);
            break;
        case DT_F16:
            store_fp16(dst + 64 * i + 2 * lane, q[i]);
            store_fp16(dst + 64 * i + 32 + 2 * lane, q[i] >> 16);
            break;
        default:
            for (int j = 0; j < 4; j++)
                store_bytes(dst + 64 * i + 16 * j + lane, q[i] >> 8 * j);
        }
}

/* 64 columns of NF4 or FP4. */
static inline void pack_nf4(const uint8_t *src, size_t stride, uint8_t *unit, int lane)
{
    copy_small(src, stride, 4, unit + 4 * lane);
    for (int i = 0; i < 2; i++)
        pack_floats(DT_F8_E4M3, src + 4 + 16 * i, stride, unit + UNIT_SCALES + 256 * i, lane);
}

static void pack_float_rows(const struct pack_rows *p, const uint8_t *src, uint8_t *dst, int lane)
{
    size_t size = (size_t)dtype_table[p->type].block_bytes, whole = p->row_bytes / 16 * 16;
    for (size_t at = 0; at < whole; at += 16)
        pack_floats(p->type, src + at, p->row_bytes, dst + 16 * at, lane);
    for (size_t k = whole / size; k < (size_t)p->n_in; k++)
        for (size_t r = 0; r < W; r++) {
            size_t row = (size_t)lane + r;
            size_t at = p->type == DT_BF16 ? k / 2 * 32 + 2 * row + (k & 1) : k * 16 + row;
            memcpy(dst + at * size, src + r * p->row_bytes + k * size, size);
        }
}

#include "backend/cpu/panel_pack_few.h"

static void pack_lanes(const struct pack_rows *p, const uint8_t *src, uint8_t *dst, int lane)
{
    if (pack_low_bits(p, src, dst, lane))
        return;
    size_t stride = p->row_bytes;
    int n = p->n_in / dtype_table[p->type].block_len;
    switch (p->type) {
    case DT_Q4_K:
        for (int i = 0; i < n; i++, src += 144, dst += K45_SCALES + 8 * Q4K_BLOCK)
            pack_q4k(src, stride, dst, lane);
        break;
    case DT_Q5_K:
        for (int i = 0; i < n; i++, src += 176, dst += K45_SCALES + 8 * Q5K_BLOCK)
            pack_q5k(src, stride, dst, lane);
        break;
    case DT_Q6_K:
        for (int i = 0; i < n; i++, src += 210, dst += Q6K_SCALES + 8 * Q6K_BLOCK)
            pack_q6k(src, stride, dst, lane);
        break;
    case DT_IQ4_XS:
        for (int i = 0; i < n; i++, src += 136, dst += IQ4XS_SCALES + 8 * 256)
            pack_iq4xs(src, stride, dst, lane);
        break;
    case DT_Q8_0:
        for (int i = 0; i < n; i++, src += 34, dst += i & 1 ? 0 : UNIT_SCALES + 2 * 512)
            pack_q8_0(src, stride, dst, i & 1, lane);
        break;
    case DT_Q4_0:
    case DT_IQ4_NL:
        for (int i = 0; i < n; i++, src += 18, dst += i & 1 ? 0 : UNIT_SCALES + 2 * 256) {
            copy_small(src, stride, 2, dst + 32 * (i & 1) + 2 * lane);
            pack_split16(src + 2, stride, dst + UNIT_SCALES + 256 * (i & 1) + 4 * lane);
        }
        break;
    case DT_MXFP4:
        for (int i = 0; i < n; i++, src += 17, dst += i & 3 ? 0 : UNIT_SCALES + 4 * 256) {
            copy_small(src, stride, 1, dst + 16 * (i & 3) + lane);
            pack_split16(src + 1, stride, dst + UNIT_SCALES + 256 * (i & 3) + 4 * lane);
        }
        break;
    case DT_NF4:
    case DT_FP4:
        for (int i = 0; i < n; i++, src += 36, dst += PANEL_NF4_UNIT)
            pack_nf4(src, stride, dst, lane);
        break;
    case DT_GPTQ4:
        for (int k = 0; k < p->n_in; k += 32, src += 16) {
            dst += k % p->group_len ? 0 : UNIT_SCALES;
            pack_gptq(src, stride, dst + 8 * k + 4 * lane);
        }
        break;
    case DT_F32:
    case DT_F16:
    case DT_BF16:
    case DT_F8_E4M3:
        pack_float_rows(p, src, dst, lane);
        break;
    default:
        CHECK(false, "%s has no packed layout", dtype_name(p->type));
    }
}

static void pack_rows(const struct pack_rows *p, uint8_t *dst)
{
    for (int lane = 0; lane < GEMM_PANEL; lane += W)
        pack_lanes(p, p->src + (size_t)lane * p->row_bytes, dst, lane);
}
