/*
 * Formats of weights: how the bytes of a tile (16 rows x 256 columns) are laid out, and how they
 * become what products take. One struct per kind (format<KIND>): kernels are templates over it. A
 * new kind is one struct here and one function that packs it (weights.cu).
 *
 * Fragments of halves for the tensor cores: lane (g = lane/4, c = lane%4) of a warp holds rows g
 * and g+8; of every 16 columns it holds 4c..4c+3 (the order inside 16 columns is free as long as
 * both operands use it), in the registers a0: row g, 4c 4c+1; a1: row g+8, the same; a2: row g,
 * 4c+2 4c+3; a3: row g+8.
 *
 * Four-bit codes: 64 columns ("a chunk") are 512 bytes, 16 for each lane; word j has columns
 * 16j..16j+15; register i sits in nibbles i and i+4 of it. So (word >> 4i) & 0x000f000f are the two
 * codes of register i, one OR away from halves 1024 + code.
 *   Q4_K  2368 bytes: codes 4x512 | scales [g][chunk]{g:2q, g:2q+1, g+8:2q, g+8:2q+1} 128 | minima,
 *         the same 128 | [g]{d g, d g+8, dmin g, dmin g+8} 64
 *   Q6_K  3360: low nibbles 4x512 | high pairs [chunk][lane] 8 bytes, word j/2 has register i of
 *         column group j at bits 8(j%2) + {0, 4, 2, 6}[i] and 16 above, 4x256 | scale+128
 *         [chunk][g][row half][j] 256 | [g]{d g, d g+8} 32
 *   GPTQ4 2432: codes | half scales [chunk][g]{g:2q, g:2q+1, g+8:2q, g+8:2q+1} 256 | zeros,
 *         bytes in the same order 128
 *   Q8_0  4352: code+128, two column groups to 16 bytes: {row g, row g+8} x 2, 8x512 | half scales
 *         as GPTQ4's
 *   F16   8192: [column group][lane]{a0 of row g: 4c..4c+3 | row g+8}
 *   F32   16384: row-major
 *   RAW   16 rows of the file's own blocks; FP8: 16x256 codes, then float scales [row][column/128]
 */
#ifndef STEEL_BACKEND_CUDA_FORMAT_CUH
#define STEEL_BACKEND_CUDA_FORMAT_CUH

#include "backend/cuda/cuda.h"

enum {
    Q4K_SCALES = 2048,
    Q4K_MINS = 2176,
    Q4K_D = 2304,
    Q4K_BYTES = 2368,
    Q6K_HIGH = 2048,
    Q6K_SCALES = 3072,
    Q6K_D = 3328,
    Q6K_BYTES = 3360,
    GPTQ_SCALES = 2048,
    GPTQ_ZEROS = 2304,
    GPTQ_BYTES = 2432,
    Q80_SCALES = 4096,
    Q80_BYTES = 4352,
    F16_BYTES = 8192,
    F32_BYTES = 16384,
    F8_SCALES = 4096,
    F8_BYTES = 4096 + 128,
    NVFP4_SCALE = 144, /* a row: four blocks, then the tensor's scale */
    NVFP4_ROW = 148,
    RAW_ROW_LEAST = 64 /* bytes of a raw row, so that a tile has 1024 */
};

/* Pairs of halves */
#define H2_1024  0x64006400u
#define H2_M1024 0xe400e400u /* -1024 */
#define H2_M1056 0xe420e420u
#define H2_M1536 0xe600e600u
#define H2_M1152 0xe480e480u
#define H2_M64   0xd400d400u
#define H2_M96   0xd600d600u
#define H2_R16   0x2c002c00u /* 1/16 */
#define H2_SIGN  0x80008000u

DEVICE uint2 load8(const uint8_t *p)
{
    return *(const uint2 *)p;
}
DEVICE uint4 load16(const uint8_t *p)
{
    return *(const uint4 *)p;
}
DEVICE uint32_t load4(const uint8_t *p)
{
    return *(const uint32_t *)p;
}
/* {h, h} of the low or the high half of a word */
DEVICE uint32_t dup_lo(uint32_t w)
{
    return byte_perm(w, 0, 0x1010);
}
DEVICE uint32_t dup_hi(uint32_t w)
{
    return byte_perm(w, 0, 0x3232);
}
/* {1024 + b, 1024 + b} of byte i */
DEVICE uint32_t byte_1024(uint32_t w, int i)
{
    return byte_perm(w, 0x64646464u, 0x4040u + 0x0101u * (uint32_t)i);
}

/* The codes of a word of nibbles as exact halves: register i holds code, 16 code + ... removed. */
DEVICE void nibble_codes(uint32_t w, uint32_t (&r)[4])
{
    uint32_t h = w >> 8;
    r[0] = half2_add(and_or(w, 0x000f000fu, H2_1024), H2_M1024);
    r[1] = half2_fma(and_or(w, 0x00f000f0u, H2_1024), H2_R16, H2_M64);
    r[2] = half2_add(and_or(h, 0x000f000fu, H2_1024), H2_M1024);
    r[3] = half2_fma(and_or(h, 0x00f000f0u, H2_1024), H2_R16, H2_M64);
}

/* {h, h} of either half of a word, in a form that becomes part of the instruction that reads it. */
DEVICE uint32_t both_lo(uint32_t w)
{
#ifdef STEEL_CUDA_SIM
    return dup_lo(w);
#else
    uint32_t r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(w));
    return r;
#endif
}
DEVICE uint32_t both_hi(uint32_t w)
{
#ifdef STEEL_CUDA_SIM
    return dup_hi(w);
#else
    uint32_t r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(w));
    return r;
#endif
}
/* {1024 + byte i, 1024 + byte i + 1} */
DEVICE uint32_t bytes_1024(uint32_t w, int i)
{
    return byte_perm(w, 0x64646464u, 0x4140u + 0x0101u * (uint32_t)i);
}

/* The last step of what makes a fragment: plainly, or (wgmma.cuh) where products run on that may
 * still read the registers. */
struct op_plain {
    static __device__ __forceinline__ uint32_t fma(uint32_t x, uint32_t y, uint32_t z)
    {
        return half2_fma(x, y, z);
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t x, uint32_t y)
    {
        return half2_mul(x, y);
    }
    static __device__ __forceinline__ uint32_t move(uint32_t x, uint32_t zero)
    {
        (void)zero;
        return x;
    }
};

/* 64 columns of a tile ("a chunk"): fetch them to registers, make their scales ready, then the
 * fragment of each 16 columns, as halves that are exact but for the product with the scale. */
template <int KIND> struct format;

template <> struct format<TILE_Q4_K> {
    enum { BYTES = Q4K_BYTES };
    /* A word of codes as they are: 1024 + code in rows g, 1024 + 16 code in rows g+8. */
    static __device__ __forceinline__ void frag_offset(uint32_t w, uint32_t (&a)[4])
    {
        uint32_t h = w >> 8;
        a[0] = and_or(w, 0x000f000fu, H2_1024);
        a[1] = and_or(w, 0x00f000f0u, H2_1024);
        a[2] = and_or(h, 0x000f000fu, H2_1024);
        a[3] = and_or(h, 0x00f000f0u, H2_1024);
    }
    /* Two words as bytes: rows g, and 16 times rows g+8 plus rows g. */
    static __device__ __forceinline__ void bytes(uint32_t w0, uint32_t w1, uint32_t (&a)[4])
    {
        a[0] = w0 & 0x0f0f0f0fu, a[1] = w0, a[2] = w1 & 0x0f0f0f0fu, a[3] = w1;
    }
    /* All scales and minima of a tile as fragments: this lane's columns are groups 2c and 2c+1,
     * each over two sums of 16 columns. */
    static __device__ __forceinline__ void scale_frags(uint32_t scales, uint32_t minima,
                                                       uint32_t (&as)[4], uint32_t (&am)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int byte = (i & 1) * 2 + (i >> 1);
            as[i] = half2_add(byte_1024(scales, byte), H2_M1024);
            am[i] = half2_add(byte_1024(minima, byte), H2_M1024);
        }
    }
    uint32_t word[4], sc, mn, s[2], m[2]; /* [row half]: a pair for the two groups of 32 */
    uint2 d;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        int g = lane >> 2;
        uint4 w = load16(tile + q * 512 + lane * 16);
        sc = load4(tile + Q4K_SCALES + g * 16 + q * 4);
        mn = load4(tile + Q4K_MINS + g * 16 + q * 4);
        d = load8(tile + Q4K_D + g * 8);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
    }
    __device__ __forceinline__ void ready()
    {
        uint32_t minus = d.y ^ H2_SIGN;
        s[0] = half2_mul(half2_add(bytes_1024(sc, 0), H2_M1024), both_lo(d.x));
        s[1] = half2_mul(half2_add(bytes_1024(sc, 2), H2_M1024), both_hi(d.x));
        m[0] = half2_mul(half2_add(bytes_1024(mn, 0), H2_M1024), both_lo(minus));
        m[1] = half2_mul(half2_add(bytes_1024(mn, 2), H2_M1024), both_hi(minus));
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        nibble_codes(word[j], a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = j < 2 ? OP::fma(a[i], both_lo(s[i & 1]), both_lo(m[i & 1]))
                         : OP::fma(a[i], both_hi(s[i & 1]), both_hi(m[i & 1]));
    }
};

template <> struct format<TILE_Q6_K> {
    enum { BYTES = Q6K_BYTES };
    /* Word j of a chunk and its high bits as they are: 1024 + code + 32 in rows g, 1024 + 16
     * (code + 32) in rows g+8. Registers 0 and 2 want their pair of high bits at bit 4, 1 and 3
     * at bit 8: one shift serves two. */
    static __device__ __forceinline__ void frag_offset(uint32_t w, uint32_t high, int j,
                                                       uint32_t (&a)[4])
    {
        uint32_t up = w >> 8, t0 = j & 1 ? high >> 4 : high << 4;
        uint32_t t2 = j & 1 ? high >> 6 : high << 2;
        a[0] = and_or(t0, 0x00300030u, and_or(w, 0x000f000fu, H2_1024));
        a[1] = and_or(t0, 0x03000300u, and_or(w, 0x00f000f0u, H2_1024));
        a[2] = and_or(t2, 0x00300030u, and_or(up, 0x000f000fu, H2_1024));
        a[3] = and_or(t2, 0x03000300u, and_or(up, 0x00f000f0u, H2_1024));
    }
    /* The same as bytes, code + 32: rows g, rows g+8. Pairs of high bits go to bits 4 and 5 of
     * their bytes: two lie in a nibble, the upper six bits further up after a product. */
    static __device__ __forceinline__ void bytes(uint32_t w, uint32_t high, int j, uint32_t (&a)[2])
    {
        uint32_t lo = j & 1 ? high >> 8 & 0x000f000fu : high & 0x000f000fu;
        uint32_t hi = j & 1 ? high >> 12 & 0x000f000fu : high >> 4 & 0x000f000fu;
        a[0] = and_or(lo * 1040, 0x30303030u, w & 0x0f0f0f0fu);
        a[1] = and_or(hi * 1040, 0x30303030u, w >> 4 & 0x0f0f0f0fu);
    }
    /* All scales of a tile as a fragment: this lane's columns are 4c..4c+3. */
    static __device__ __forceinline__ void scale_frag(const uint2 &scales, uint32_t (&as)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            as[i] = half2_add(
                byte_perm(i & 1 ? scales.y : scales.x, 0x64646464u, i & 2 ? 0x4342u : 0x4140u),
                H2_M1152);
    }
    uint32_t word[4], high[2], sc[2], d, s[2][2]; /* s: [row half][two of 16 columns] */
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        int g = lane >> 2;
        uint4 w = load16(tile + q * 512 + lane * 16);
        uint2 h = load8(tile + Q6K_HIGH + q * 256 + lane * 8);
        uint2 e = load8(tile + Q6K_SCALES + q * 64 + g * 8);
        d = load4(tile + Q6K_D + g * 4);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
        high[0] = h.x, high[1] = h.y;
        sc[0] = e.x, sc[1] = e.y;
    }
    __device__ __forceinline__ void ready()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[0][i] = half2_mul(half2_add(bytes_1024(sc[0], 2 * i), H2_M1152), both_lo(d));
            s[1][i] = half2_mul(half2_add(bytes_1024(sc[1], 2 * i), H2_M1152), both_hi(d));
        }
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        uint32_t t[4];
        frag_offset(word[j], high[j >> 1], j, t);
        uint32_t s0 = j & 1 ? both_hi(s[0][j >> 1]) : both_lo(s[0][j >> 1]);
        uint32_t s1 = j & 1 ? both_hi(s[1][j >> 1]) : both_lo(s[1][j >> 1]);
        a[0] = OP::mul(half2_add(t[0], H2_M1056), s0);
        a[1] = OP::mul(half2_fma(t[1], H2_R16, H2_M96), s1);
        a[2] = OP::mul(half2_add(t[2], H2_M1056), s0);
        a[3] = OP::mul(half2_fma(t[3], H2_R16, H2_M96), s1);
    }
};

template <> struct format<TILE_GPTQ4> {
    enum { BYTES = GPTQ_BYTES };
    uint32_t word[4], z, zero[2]; /* [row half]: a pair for the two groups of 32 */
    uint2 s;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        int g = lane >> 2;
        uint4 w = load16(tile + q * 512 + lane * 16);
        s = load8(tile + GPTQ_SCALES + q * 64 + g * 8);
        z = load4(tile + GPTQ_ZEROS + q * 32 + g * 4);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
    }
    __device__ __forceinline__ void ready()
    {
        zero[0] = half2_add(bytes_1024(z, 0) ^ H2_SIGN, H2_1024);
        zero[1] = half2_add(bytes_1024(z, 2) ^ H2_SIGN, H2_1024);
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        nibble_codes(word[j], a);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t f = i & 1 ? s.y : s.x;
            a[i] = j < 2 ? OP::mul(half2_add(a[i], both_lo(zero[i & 1])), both_lo(f))
                         : OP::mul(half2_add(a[i], both_hi(zero[i & 1])), both_hi(f));
        }
    }
};

template <> struct format<TILE_Q8_0> {
    enum { BYTES = Q80_BYTES };
    uint32_t word[2][4]; /* [two column groups][column group of the pair, row half] */
    uint2 s;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        s = load8(tile + Q80_SCALES + q * 64 + (lane >> 2) * 8);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint4 w = load16(tile + (2 * q + p) * 512 + lane * 16);
            word[p][0] = w.x, word[p][1] = w.y, word[p][2] = w.z, word[p][3] = w.w;
        }
    }
    __device__ __forceinline__ void ready()
    {
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t w = word[j >> 1][2 * (j & 1) + h], f = h ? s.y : s.x;
            uint32_t lo = byte_perm(w, 0x64646464u, 0x4140), hi = byte_perm(w, 0x64646464u, 0x4342);
            uint32_t scale = j < 2 ? both_lo(f) : both_hi(f);
            a[h] = OP::mul(half2_add(lo, H2_M1152), scale);
            a[h + 2] = OP::mul(half2_add(hi, H2_M1152), scale);
        }
    }
};

template <> struct format<TILE_F16> {
    enum { BYTES = F16_BYTES };
    uint32_t word[4][4], zero;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 w = load16(tile + (4 * q + j) * 512 + lane * 16);
            word[j][0] = w.x, word[j][1] = w.z, word[j][2] = w.y, word[j][3] = w.w;
        }
        zero = blockDim.y - 1;
    }
    __device__ __forceinline__ void ready()
    {
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = OP::move(word[j][i], zero);
    }
};

/* Scalar meaning of every file format: element k of 256 columns whose blocks start at b. */

DEVICE float raw_half(const uint8_t *p)
{
    return half_to_float((uint32_t)p[0] | (uint32_t)p[1] << 8);
}
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
DEVICE float f8_to_float(uint32_t b)
{
    uint32_t man = b & 0x7f, sign = (b & 0x80) << 24;
    if (man == 0x7f)
        return float_of(sign | 0x7fc00000u);
    /* the seven bits, moved under a float's exponent, are 2^120 too small, subnormals included */
    return float_of(sign | man << 20) * 0x1p120f;
}

DEVICE uint32_t raw_word(const uint8_t *b)
{
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* Sign i of the eight that 7 bits stand for: the number of set ones is even. */
DEVICE bool even_sign(uint32_t bits, int i)
{
    bits &= 127;
    for (int j = 0; i == 7 && j < 7; j++)
        bits ^= (bits >> j & 1) << 7;
    return bits >> i & 1;
}

/* Value k of a block of the grid formats: see quant.h. grid: the format's. */
DEVICE float grid_value(int dtype, const uint8_t *b, int k, const uint16_t *grid)
{
    int blk = k >> 5, i = k & 7, g = k >> 3, in = g & 3; /* g: of 32 groups of eight */
    uint32_t point, scale, shift = 2 * i;
    bool sign;
    float d = raw_half(b);
    switch (dtype) {
    case DT_IQ1_S: {
        uint32_t h = b[34 + 2 * blk] | (uint32_t)b[35 + 2 * blk] << 8;
        point = grid[b[2 + g] | (h >> 3 * in & 7) << 8];
        return d * (float)(2 * (h >> 12 & 7) + 1) * 0.125f *
               (float)(8 * ((int)(point >> shift & 3) - 1) + (h & 0x8000 ? -1 : 1));
    }
    case DT_IQ1_M: {
        uint8_t parts[2] = {(uint8_t)(b[49] >> 4 | (b[51] & 0xf0)),
                            (uint8_t)(b[53] >> 4 | (b[55] & 0xf0))};
        uint32_t h = b[32 + g / 2] >> 4 * (g & 1),
                 s = b[48 + k / 64 * 2] | (uint32_t)b[49 + k / 64 * 2] << 8;
        point = grid[b[g] | (h & 7) << 8];
        return raw_half(parts) * (float)(2 * (s >> 3 * (k / 16 % 4) & 7) + 1) * 0.125f *
               (float)(8 * ((int)(point >> shift & 3) - 1) + (h & 8 ? -1 : 1));
    }
    case DT_IQ2_XXS: {
        uint32_t s = raw_word(b + 2 + 8 * blk + 4);
        point = grid[b[2 + 8 * blk + in]];
        scale = s >> 28;
        sign = even_sign(s >> 7 * in, i);
        break;
    }
    case DT_IQ2_XS: {
        uint32_t q = b[2 + 2 * g] | (uint32_t)b[3 + 2 * g] << 8;
        point = grid[q & 511];
        scale = b[66 + k / 32] >> 4 * (k / 16 & 1) & 15;
        sign = even_sign(q >> 9, i);
        break;
    }
    case DT_IQ2_S:
        point = grid[b[2 + g] | (b[66 + g / 4] >> 2 * in & 3u) << 8];
        scale = b[74 + k / 32] >> 4 * (k / 16 & 1) & 15;
        sign = b[34 + g] >> i & 1;
        break;
    case DT_IQ3_XXS: {
        const uint8_t levels[8] = {4, 12, 20, 28, 36, 44, 52, 62};
        uint32_t s = raw_word(b + 66 + 4 * blk);
        float v = d * (float)(2 * (s >> 28) + 1) * 0.25f *
                  (float)levels[grid[b[2 + k / 4]] >> 3 * (k % 4) & 7];
        return even_sign(s >> 7 * in, i) ? -v : v;
    }
    default: { /* IQ3_S */
        float s = d * (float)(1 + 2 * (b[106 + k / 64] >> (k % 64 / 32 * 4) & 15));
        int index = b[2 + k / 4] | (b[66 + blk] >> (k % 32 / 4) & 1) << 8;
        float v = s * (float)(2 * (grid[index] >> 3 * (k % 4) & 7) + 1);
        return b[74 + g] >> i & 1 ? -v : v;
    }
    }
    uint32_t digit = point >> shift & 3, level = digit == 0 ? 8 : digit == 1 ? 25 : 43;
    float v = d * (float)(2 * scale + 1) * 0.125f * (float)level;
    return sign ? -v : v;
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
    case DT_IQ3_XXS:
    case DT_IQ3_S:
        return grid_value(dtype, b, k, (const uint16_t *)aux);
    case DT_TQ1_0: {
        int digit = k < 160 ? k / 32 : k < 240 ? (k - 160) / 16 : (k - 240) / 4;
        uint32_t q = b[k < 160 ? k % 32 : k < 240 ? 32 + k % 16 : 48 + k % 4];
        for (int i = 0; i < digit; i++)
            q = q * 3 & 255;
        return raw_half(b + 52) * (float)((int)(q * 3 >> 8) - 1);
    }
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

DEVICE int q6k_high_bit(int reg)
{
    return (reg & 1) * 4 + (reg >> 1) * 2;
}

/* Value (row r, column k) of a tile in its own layout, exact in float. Slow: one element. */
DEVICE float tile_value(const struct seg *s, const uint8_t *tile, int r, int k)
{
    int q = k >> 6, j = k >> 4 & 3, c = k >> 2 & 3, e = k & 3, g = r & 7, h = r >> 3;
    int lane = g * 4 + c, grp = k >> 5 & 1, reg = (e >> 1) * 2 + h;
    switch (s->kind) {
    case TILE_Q4_K:
    case TILE_GPTQ4:
    case TILE_Q6_K: {
        uint32_t w = load4(tile + q * 512 + lane * 16 + j * 4);
        int code = (int)(w >> (4 * reg + 16 * (e & 1)) & 15);
        if (s->kind == TILE_Q4_K) {
            float sc = (float)tile[Q4K_SCALES + g * 16 + q * 4 + h * 2 + grp];
            float mn = (float)tile[Q4K_MINS + g * 16 + q * 4 + h * 2 + grp];
            return raw_half(tile + Q4K_D + g * 8 + h * 2) * sc * (float)code -
                   raw_half(tile + Q4K_D + g * 8 + 4 + h * 2) * mn;
        }
        if (s->kind == TILE_GPTQ4) {
            int zero = tile[GPTQ_ZEROS + q * 32 + g * 4 + h * 2 + grp];
            return (float)(code - zero) *
                   raw_half(tile + GPTQ_SCALES + q * 64 + g * 8 + h * 4 + grp * 2);
        }
        uint32_t top = load4(tile + Q6K_HIGH + q * 256 + lane * 8 + (j >> 1) * 4);
        code |= (int)(top >> (8 * (j & 1) + q6k_high_bit(reg) + 16 * (e & 1)) & 3) << 4;
        float sc = (float)(tile[Q6K_SCALES + q * 64 + g * 8 + h * 4 + j] - 128);
        return raw_half(tile + Q6K_D + g * 4 + h * 2) * sc * (float)(code - 32);
    }
    case TILE_Q8_0:
        return raw_half(tile + Q80_SCALES + q * 64 + g * 8 + h * 4 + grp * 2) *
               (float)(tile[(k >> 5) * 512 + lane * 16 + (j & 1) * 8 + h * 4 + e] - 128);
    case TILE_F16:
        return raw_half(tile + (k >> 4) * 512 + lane * 16 + h * 8 + e * 2);
    case TILE_F32:
        return *(const float *)(tile + (r * TILE_K + k) * 4);
    }
    int row_bytes = s->tile_bytes / TILE_ROWS;
    if (s->dtype == DT_F8_E4M3)
        return f8_to_float(tile[r * TILE_K + k]) *
               *(const float *)(tile + F8_SCALES + (r * 2 + (k >> 7)) * 4);
    tile += r * row_bytes;
    float v = raw_value(s->dtype, tile, k, s->aux);
    return s->dtype == DT_NVFP4 ? v * *(const float *)(tile + NVFP4_SCALE) : v;
}

/* Kinds without a fast path: element by element, with a second fragment for what rounding to half
 * loses where the weights are floats. Called, not inlined: it is long, and compiled many times. */
static __device__ __noinline__ float tile_value_call(const struct seg *s, const uint8_t *tile,
                                                     int r, int k)
{
    return tile_value(s, tile, r, k);
}

DEVICE void chunk_slow(const struct seg *s, const uint8_t *tile, int q, int lane,
                       uint32_t (&a)[4][4], uint32_t (&rest)[4][4])
{
    int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = g + 8 * (i & 1), k = 64 * q + 16 * j + 4 * c + 2 * (i >> 1);
            float x = tile_value_call(s, tile, r, k), y = tile_value_call(s, tile, r, k + 1);
            uint32_t p = pack_half2(x, y);
            a[j][i] = p;
            rest[j][i] = pack_half2(x - half_to_float(p & 0xffff), y - half_to_float(p >> 16));
        }
}

/* Fragments of chunk q of a tile of one of the fast kinds: a[j] are columns 64q+16j.. */
template <int KIND> DEVICE void chunk_frags(const uint8_t *tile, int q, uint32_t (&a)[4][4])
{
    struct format<KIND> f;
    f.fetch(tile, q, lane_id());
    f.ready();
#pragma unroll
    for (int j = 0; j < 4; j++)
        f.template frag<op_plain>(j, a[j]);
}
template <int SET>
DEVICE void chunk_decode(const struct seg *s, const uint8_t *tile, int q, uint32_t (&a)[4][4])
{
    if (s->kind == TILE_Q4_K)
        chunk_frags<TILE_Q4_K>(tile, q, a);
    else if (SET == SET_K || s->kind == TILE_Q6_K)
        chunk_frags<TILE_Q6_K>(tile, q, a);
    else if (s->kind == TILE_Q8_0)
        chunk_frags<TILE_Q8_0>(tile, q, a);
    else if (s->kind == TILE_GPTQ4)
        chunk_frags<TILE_GPTQ4>(tile, q, a);
    else
        chunk_frags<TILE_F16>(tile, q, a);
}

/* The segment a row tile belongs to. */
DEVICE const struct seg *seg_of(const struct matrix &w, int tile)
{
    int i = 0;
    while (i + 1 < w.n_seg && tile >= w.seg[i + 1].tile0)
        i++;
    return &w.seg[i];
}

DEVICE const uint8_t *tile_address(const struct matrix &w, const struct seg *s, int expert,
                                   int tile, int kt)
{
    return s->base + (size_t)expert * s->expert_bytes +
           ((size_t)(tile - s->tile0) * (size_t)w.n_kt + (size_t)kt) * (size_t)s->tile_bytes;
}

/* One warp starts copying a tile to shared memory. The caller commits. */
DEVICE void tile_fetch(uint8_t *to, const uint8_t *from, int bytes)
{
    int at = lane_id() * 16;
    to += at;
    from += at;
#pragma unroll
    for (int i = 0; i < 1024; i += 512) /* every tile has that much */
        copy_async16(to + i, from + i);
#pragma unroll 2
    for (int i = 1024; i < bytes - at; i += 512)
        copy_async16(to + i, from + i);
}

#endif
