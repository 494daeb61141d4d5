/*
 * The parts of quantised formats: how a tile stores its codes (codes_*) and its scales (scales_*).
 * A format is one of each, coded<CODES, SCALES>; format.cuh has the list. Every product is written
 * over these two parts. A new pair needs a line there and a packing function (pack.cuh).
 *
 * Products read codes in one of three forms, for 16 columns j of a chunk (64 columns) at a time:
 *   raw    fp16 in as few instructions as possible: LESS + code, for rows g+8 possibly 16 times the
 *          code. The excess is subtracted from the sums (less, unit).
 *   exact  fp16 of the true value, for fragments that are scaled one by one
 *   bytes  code + ZERO in column order 0 2 1 3, for integer products. JOINED: the bytes of rows g+8
 *          are 16 times their code plus the byte of rows g.
 *
 * A scale is the product of one per GROUP columns (16 or 32) and one per row (256 columns). Both
 * are exact floats; without the row's factor it is also exact in fp16. MINS: likewise for the value
 * added to a group. value = row() * scale() * code + row_least() * least(). `full` is the product
 * of both as fp16, rounded once.
 */
#ifndef STEEL_BACKEND_CUDA_CODES_CUH
#define STEEL_BACKEND_CUDA_CODES_CUH

#include "backend/cuda/core/cuda.h"

/* Pairs of fp16 */
#define H2_1024  0x64006400u
#define H2_M1024 0xe400e400u /* -1024 */
#define H2_M1152 0xe480e480u
#define H2_M64   0xd400d400u
#define H2_R16   0x2c002c00u /* 1/16 */
#define H2_32768 0x78007800u
#define H2_SIGN  0x80008000u
/* -(1024 + n), -(64 + n): n below 1024, 64 */
#define H2_LESS_1024(n) (H2_M1024 + (uint32_t)(n)*0x10001u)
#define H2_LESS_64(n)   (H2_M64 + (uint32_t)(n)*0x100010u)

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
DEVICE float raw_half(const uint8_t *p)
{
    return half_to_float((uint32_t)p[0] | (uint32_t)p[1] << 8);
}
/* {h, h} of the low or the high fp16 of a word */
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
/* byte_perm in sign mode: if bit 3 of a selector is set, the result byte is eight copies of the
 * selected byte's top bit. */
DEVICE uint32_t byte_perm_sign(uint32_t a, uint32_t b, uint32_t sel)
{
#ifdef STEEL_CUDA_SIM
    uint32_t r = sim_byte_perm(a, b, sel);
    for (int i = 0; i < 4; i++)
        if (sel >> (4 * i + 3) & 1)
            r = (r & ~(255u << 8 * i)) | (r >> (8 * i + 7) & 1 ? 255u << 8 * i : 0);
    return r;
#else
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
#endif
}
DEVICE float byte_float(uint32_t w, int i)
{
    return (float)(w >> 8 * i & 255);
}
/* Like byte_1024, as a float, for a byte stored with an offset of 128. */
DEVICE float byte_less_128(uint32_t w, int i)
{
    return (float)(int8_t)((w ^ 0x80808080u) >> 8 * i & 255);
}
/* {h, h} of either fp16 of a word, in a form that the compiler folds into the instruction that
 * reads it. */
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
DEVICE uint32_t both_of(uint32_t w, bool high)
{
    return high ? both_hi(w) : both_lo(w);
}
/* One element of a pair, as float. */
DEVICE float half_of(uint32_t w, int i)
{
    return half_to_float(i ? w >> 16 : w & 0xffff);
}
/* {1024 + byte i, 1024 + byte i + 1} */
DEVICE uint32_t bytes_1024(uint32_t w, int i)
{
    return byte_perm(w, 0x64646464u, 0x4140u + 0x0101u * (uint32_t)i);
}

/* The last instruction that makes a fragment. op_wgmma (wgmma.cuh) is used where products in flight
 * may still read the registers. */
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

/* Position of element (row r, column k) of a tile: lane (g, c), row half h, chunk q, 16 columns j
 * of it, element e of four, register i of its fragment. */
struct tile_place {
    int q, j, c, e, g, h, lane, i;
};
DEVICE struct tile_place tile_place_of(int r, int k)
{
    struct tile_place p;
    p.q = k >> 6;
    p.j = k >> 4 & 3;
    p.c = k >> 2 & 3;
    p.e = k & 3;
    p.g = r & 7;
    p.h = r >> 3;
    p.lane = p.g * 4 + p.c;
    p.i = (p.e >> 1) * 2 + p.h;
    return p;
}

/* Codes that store rows g+8 four bits higher than rows g, so that they come out 16 times as
 * large. */
template <int ZERO> struct codes_apart {
    enum { BYTE_ZERO = ZERO };
    static __device__ __forceinline__ float less(int h)
    {
        return 1024.0f + (h ? 16.0f * ZERO : 1.0f * ZERO);
    }
    static __device__ __forceinline__ float unit(int h)
    {
        return h ? 0.0625f : 1.0f;
    }
    static __device__ __forceinline__ void settle(uint32_t (&a)[4])
    {
        a[0] = half2_add(a[0], H2_LESS_1024(ZERO));
        a[1] = half2_fma(a[1], H2_R16, H2_LESS_64(ZERO));
        a[2] = half2_add(a[2], H2_LESS_1024(ZERO));
        a[3] = half2_fma(a[3], H2_R16, H2_LESS_64(ZERO));
    }
};

/* Four bits: 64 columns are 512 bytes, 16 for each lane. Word j has columns 16j.., register i is in
 * nibbles i and i+4. DOUBLE: the value is 2 code + ZERO. */
template <int ZERO, bool DOUBLE = false> struct codes_nibble : codes_apart<ZERO> {
    enum { CODE_BYTES = 2048, HAS_LESS = 1, JOINED = !DOUBLE };
    uint32_t word[4];
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint4 w = load16(tile + q * 512 + lane * 16);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        const uint32_t low = DOUBLE ? 0x001e001eu : 0x000f000fu, high = low << 4;
        uint32_t w = DOUBLE ? word[j] << 1 : word[j], h = DOUBLE ? word[j] >> 7 : word[j] >> 8;
        a[0] = and_or(w, low, H2_1024);
        a[1] = and_or(w, high, H2_1024);
        a[2] = and_or(h, low, H2_1024);
        a[3] = and_or(h, high, H2_1024);
    }
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        const uint32_t mask = DOUBLE ? 0x1e1e1e1eu : 0x0f0f0f0fu;
        a[0] = (DOUBLE ? word[j] << 1 : word[j]) & mask;
        a[1] = DOUBLE ? word[j] >> 3 & mask : word[j];
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        uint32_t w = load4(tile + p.q * 512 + p.lane * 16 + p.j * 4);
        int code = (int)(w >> (4 * p.i + 16 * (p.e & 1)) & 15);
        return (float)((DOUBLE ? 2 * code : code) - ZERO);
    }
};

/* Bit position of the fifth (or third) bit of 16 columns j, register i, within a lane's word of a
 * chunk; the odd columns are 16 bits above. Registers 0 and 1 need it in bits b and b+4, so they
 * are four apart. Registers 2 and 3 are eight further, which also suits the byte form. */
DEVICE int top_bit(int j, int i)
{
    return j + 4 * (i & 1) + 8 * (i >> 1);
}
/* x shifted left by `by`, or right if negative. */
DEVICE uint32_t shift_left(uint32_t x, int by)
{
    return by < 0 ? x >> -by : x << by;
}

template <int ZERO> struct codes_five : codes_apart<ZERO> {
    enum { TOPS = 2048, CODE_BYTES = 2560, HAS_LESS = 1, JOINED = 0 };
    uint32_t word[4], top;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint4 w = load16(tile + q * 512 + lane * 16);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
        top = load4(tile + TOPS + q * 128 + lane * 4);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t w = word[j], h = w >> 8, t = shift_left(top, 4 - j), u = top >> (4 + j);
        a[0] = and_or(t, 0x00100010u, and_or(w, 0x000f000fu, H2_1024));
        a[1] = and_or(t, 0x01000100u, and_or(w, 0x00f000f0u, H2_1024));
        a[2] = and_or(u, 0x00100010u, and_or(h, 0x000f000fu, H2_1024));
        a[3] = and_or(u, 0x01000100u, and_or(h, 0x00f000f0u, H2_1024));
    }
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        a[0] = and_or(shift_left(top, 4 - j), 0x10101010u, word[j] & 0x0f0f0f0fu);
        a[1] = and_or(shift_left(top, -j), 0x10101010u, word[j] >> 4 & 0x0f0f0f0fu);
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        uint32_t w = load4(tile + p.q * 512 + p.lane * 16 + p.j * 4);
        uint32_t t = load4(tile + TOPS + p.q * 128 + p.lane * 4);
        int code = (int)(w >> (4 * p.i + 16 * (p.e & 1)) & 15);
        return (float)((code | (int)(t >> (top_bit(p.j, p.i) + 16 * (p.e & 1)) & 1) << 4) - ZERO);
    }
};

/* Six bits: low nibbles, and pairs of high bits, 8 bytes per lane. Word j/2 has the pair of
 * register i of 16 columns j at bits 8(j%2) + {0, 4, 2, 6}[i] and 16 above. Registers 0 and 2 need
 * their pair at bit 4, 1 and 3 at bit 8, so one shift serves two. */
DEVICE int high_pair(int i)
{
    return (i & 1) * 4 + (i >> 1) * 2;
}
struct codes_six : codes_apart<32> {
    enum { HIGH = 2048, CODE_BYTES = 3072, HAS_LESS = 1, JOINED = 0 };
    uint32_t word[4], high[2];
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint4 w = load16(tile + q * 512 + lane * 16);
        uint2 t = load8(tile + HIGH + q * 256 + lane * 8);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
        high[0] = t.x, high[1] = t.y;
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t w = word[j], up = w >> 8, t = high[j >> 1];
        uint32_t t0 = j & 1 ? t >> 4 : t << 4, t2 = j & 1 ? t >> 6 : t << 2;
        a[0] = and_or(t0, 0x00300030u, and_or(w, 0x000f000fu, H2_1024));
        a[1] = and_or(t0, 0x03000300u, and_or(w, 0x00f000f0u, H2_1024));
        a[2] = and_or(t2, 0x00300030u, and_or(up, 0x000f000fu, H2_1024));
        a[3] = and_or(t2, 0x03000300u, and_or(up, 0x00f000f0u, H2_1024));
    }
    /* A nibble has two pairs, so the product is shifted by six bits more for the upper one. */
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        uint32_t w = word[j], t = high[j >> 1];
        uint32_t lo = j & 1 ? t >> 8 & 0x000f000fu : t & 0x000f000fu;
        uint32_t hi = j & 1 ? t >> 12 & 0x000f000fu : t >> 4 & 0x000f000fu;
        a[0] = and_or(lo * 1040, 0x30303030u, w & 0x0f0f0f0fu);
        a[1] = and_or(hi * 1040, 0x30303030u, w >> 4 & 0x0f0f0f0fu);
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        uint32_t w = load4(tile + p.q * 512 + p.lane * 16 + p.j * 4);
        uint32_t t = load4(tile + HIGH + p.q * 256 + p.lane * 8 + (p.j >> 1) * 4);
        int code = (int)(w >> (4 * p.i + 16 * (p.e & 1)) & 15);
        int top = (int)(t >> (8 * (p.j & 1) + high_pair(p.i) + 16 * (p.e & 1)) & 3);
        return (float)((code | top << 4) - 32);
    }
};

/* Two bits: 8 bytes per lane of a chunk. Word j/2 has register i of 16 columns j at bits 2(j%2) +
 * 4i and 16 above. TOPS: with a third bit, stored like the fifth of codes_five. */
template <int ZERO, bool TOPS> struct codes_pair : codes_apart<ZERO> {
    enum { TOPS_AT = 1024, CODE_BYTES = TOPS ? 1536 : 1024, HAS_LESS = 1, JOINED = 0 };
    uint32_t word[2], top;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint2 w = load8(tile + q * 256 + lane * 8);
        word[0] = w.x, word[1] = w.y;
        if (TOPS)
            top = load4(tile + TOPS_AT + q * 128 + lane * 4);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t w = shift_left(word[j >> 1], -2 * (j & 1)), h = word[j >> 1] >> (8 + 2 * (j & 1));
        a[0] = and_or(w, 0x00030003u, H2_1024);
        a[1] = and_or(w, 0x00300030u, H2_1024);
        a[2] = and_or(h, 0x00030003u, H2_1024);
        a[3] = and_or(h, 0x00300030u, H2_1024);
        if (TOPS) {
            uint32_t t = shift_left(top, 2 - j), u = top >> (6 + j);
            a[0] = and_or(t, 0x00040004u, a[0]);
            a[1] = and_or(t, 0x00400040u, a[1]);
            a[2] = and_or(u, 0x00040004u, a[2]);
            a[3] = and_or(u, 0x00400040u, a[3]);
        }
    }
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        a[0] = shift_left(word[j >> 1], -2 * (j & 1)) & 0x03030303u;
        a[1] = word[j >> 1] >> (4 + 2 * (j & 1)) & 0x03030303u;
        if (TOPS) {
            a[0] = and_or(shift_left(top, 2 - j), 0x04040404u, a[0]);
            a[1] = and_or(top >> (2 + j), 0x04040404u, a[1]);
        }
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        uint32_t w = load4(tile + p.q * 256 + p.lane * 8 + (p.j >> 1) * 4);
        int code = (int)(w >> (2 * (p.j & 1) + 4 * p.i + 16 * (p.e & 1)) & 3);
        if (TOPS) {
            uint32_t t = load4(tile + TOPS_AT + p.q * 128 + p.lane * 4);
            code |= (int)(t >> (top_bit(p.j, p.i) + 16 * (p.e & 1)) & 1) << 2;
        }
        return (float)(code - ZERO);
    }
};

/* Codes stored as bytes plus 128: as fp16 they are 1024 + 128 too large. */
struct codes_of_bytes {
    enum { HAS_LESS = 1, BYTE_ZERO = 128, JOINED = 0 };
    static __device__ __forceinline__ float less(int h)
    {
        (void)h;
        return 1152.0f;
    }
    static __device__ __forceinline__ float unit(int h)
    {
        (void)h;
        return 1.0f;
    }
    static __device__ __forceinline__ void settle(uint32_t (&a)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = half2_add(a[i], H2_M1152);
    }
    static __device__ __forceinline__ void to_fp16(const uint32_t (&b)[2], uint32_t (&a)[4])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[h] = byte_perm(b[h], 0x64646464u, 0x4240);
            a[h + 2] = byte_perm(b[h], 0x64646464u, 0x4341);
        }
    }
};

/* Eight bits: code + 128. Twice 16 columns take 16 bytes, {row g, row g+8} x 2, in column order 0 2
 * 1 3. */
struct codes_byte : codes_of_bytes {
    enum { CODE_BYTES = 4096 };
    uint32_t word[2][4]; /* [32 columns][16 of them, row half] */
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint4 w = load16(tile + (2 * q + p) * 512 + lane * 16);
            word[p][0] = w.x, word[p][1] = w.y, word[p][2] = w.z, word[p][3] = w.w;
        }
    }
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        a[0] = word[j >> 1][2 * (j & 1)];
        a[1] = word[j >> 1][2 * (j & 1) + 1];
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t b[2];
        bytes(j, b);
        to_fp16(b, a);
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        int b = (p.e & 1) * 2 + (p.e >> 1);
        const uint8_t *of =
            tile + (2 * p.q + (p.j >> 1)) * 512 + p.lane * 16 + (p.j & 1) * 8 + p.h * 4;
        return (float)(of[b] - 128);
    }
};

/*
 * Four bits that index one of sixteen levels. A word has row g's four columns of 16 in its lower
 * half and row g+8's in the upper, in column order 0 2 1 3. One byte_perm looks up eight levels, a
 * second the other eight. For an index of the other eight, byte_perm returns eight copies of the
 * top bit of the level at that place. Levels whose indices differ by eight have the same top bit.
 * If it is set, one of the two tables is stored inverted, so the unwanted result cancels or is
 * zero.
 */
struct levels_iq4 { /* -127 -104 -83 -65 1 13 25 38, -49 -35 -22 -10 53 69 89 113, plus 128 */
    enum { ZERO = 128 };
    static __device__ __forceinline__ uint32_t four(int i)
    {
        return i == 0 ? 0x3f2d1801u : i == 1 ? 0xa6998d81u : i == 2 ? 0x766a5d4fu : 0xf1d9c5b5u;
    }
};
struct levels_fp4 { /* 0 .5 1 1.5 2 3 4 6 and their negatives, doubled, plus 16 */
    enum { ZERO = 16 };
    static __device__ __forceinline__ uint32_t four(int i)
    {
        return i == 0 ? 0x13121110u : i == 1 ? 0x1c181614u : i == 2 ? 0x0d0e0f10u : 0x04080a0cu;
    }
};
struct levels_iq3_xxs { /* 4 12 20 28 and their negatives, 36 44 52 62 and theirs, plus 128 */
    enum { ZERO = 128 };
    static __device__ __forceinline__ uint32_t four(int i)
    {
        return i == 0 ? 0x9c948c84u : i == 1 ? 0x646c747cu : i == 2 ? 0xbeb4aca4u : 0x424c545cu;
    }
};
/* The stored index of an IQ4 or IQ3_XXS code: its upper two bits exchanged. */
DEVICE uint32_t level_name(uint32_t code)
{
    return (code & 3) | (code & 4) << 1 | (code & 8) >> 1;
}
template <class LEVELS> struct codes_level : codes_of_bytes {
    enum { CODE_BYTES = 2048, BYTE_ZERO = LEVELS::ZERO };
    uint32_t word[4];
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint4 w = load16(tile + q * 512 + lane * 16);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
    }
    /* Bytes of rows g and g+8. */
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        uint32_t w = word[j], v = w ^ 0x88888888u, l[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            l[i] = i < 2 || LEVELS::four(i) < 1u << 31 ? LEVELS::four(i) : ~LEVELS::four(i);
        a[0] = byte_perm_sign(l[0], l[1], w) ^ byte_perm_sign(l[2], l[3], v);
        a[1] = byte_perm_sign(l[0], l[1], w >> 16) ^ byte_perm_sign(l[2], l[3], v >> 16);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t b[2];
        bytes(j, b);
        to_fp16(b, a);
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        uint32_t w = load4(tile + p.q * 512 + p.lane * 16 + p.j * 4);
        int name = (int)(w >> (16 * p.h + 4 * ((p.e & 1) * 2 + (p.e >> 1))) & 15);
        return (float)((int)(LEVELS::four(name >> 2) >> 8 * (name & 3) & 255) - LEVELS::ZERO);
    }
};

/* FP4 (E2M1): sign, two exponent bits, one mantissa bit. Shifted to the positions of an fp16's
 * sign, exponent and mantissa, the bits are the (doubled) level times 2^-15, also for the
 * subnormal. No table is needed. An fp16's lower byte is zero here, so the upper bytes of four are
 * made at once: columns 2 and 3 from the upper nibbles, 0 and 1 from the lower. */
struct codes_fp4 : codes_level<levels_fp4> {
    enum { HAS_LESS = 0 };
    static __device__ __forceinline__ float less(int h)
    {
        (void)h;
        return 0.0f;
    }
    static __device__ __forceinline__ float unit(int h)
    {
        (void)h;
        return 32768.0f;
    }
    static __device__ __forceinline__ void settle(uint32_t (&a)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = half2_mul(a[i], H2_32768);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t w = word[j];
        uint32_t low = and_or(w << 4, 0x80808080u, w << 1 & 0x0e0e0e0eu);
        uint32_t high = and_or(w, 0x80808080u, w >> 3 & 0x0e0e0e0eu);
        a[0] = byte_perm(low, 0, 0x1404);
        a[1] = byte_perm(low, 0, 0x3424);
        a[2] = byte_perm(high, 0, 0x1404);
        a[3] = byte_perm(high, 0, 0x3424);
    }
};

/* Three bits that index one of eight levels: pairs of bits as in codes_pair, third bits as its
 * TOPS, both in codes_level's order of nibbles. */
struct levels_iq2 { /* 8 25 43, then their negatives, plus 128 */
    static __device__ __forceinline__ uint32_t four(int i)
    {
        return i ? 0x80556778u : 0x80ab9988u;
    }
};
struct levels_iq1 { /* -9 -1 7, -7 1 9, plus 128 */
    static __device__ __forceinline__ uint32_t four(int i)
    {
        return i ? 0x80898179u : 0x80877f77u;
    }
};
template <class LEVELS> struct codes_level3 : codes_of_bytes {
    enum { TOPS_AT = 1024, CODE_BYTES = 1536 };
    uint32_t word[2], top;
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint2 w = load8(tile + q * 256 + lane * 8);
        word[0] = w.x, word[1] = w.y;
        top = load4(tile + TOPS_AT + q * 128 + lane * 4);
    }
    __device__ __forceinline__ void bytes(int j, uint32_t (&a)[2]) const
    {
        uint32_t low = shift_left(word[j >> 1], -2 * (j & 1)) & 0x33333333u;
        uint32_t at = and_or(shift_left(top, 2 - j), 0x44444444u, low);
        a[0] = byte_perm_sign(LEVELS::four(0), LEVELS::four(1), at);
        a[1] = byte_perm_sign(LEVELS::four(0), LEVELS::four(1), at >> 16);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t b[2];
        bytes(j, b);
        to_fp16(b, a);
    }
    static __device__ __forceinline__ float at(const uint8_t *tile, const struct tile_place &p)
    {
        int nibble = 4 * p.h + (p.e & 1) * 2 + (p.e >> 1);
        uint32_t w = load4(tile + p.q * 256 + p.lane * 8 + (p.j >> 1) * 4);
        uint32_t t = load4(tile + TOPS_AT + p.q * 128 + p.lane * 4);
        int code = (int)(w >> (4 * nibble + 2 * (p.j & 1)) & 3);
        uint32_t four = LEVELS::four((int)(t >> (4 * nibble + p.j) & 1));
        return (float)((int)(four >> 8 * code & 255) - 128);
    }
};

/*
 * Scales. fetch(q) loads chunk q for rows g and g+8 (h selects). Group i of a chunk; pair i: groups
 * 2i and 2i+1, so with GROUP 32 there is one pair.
 */

/* Byte scales times an fp16 of the row, and the same for minima: {g: 2q, 2q+1, g+8: 2q, 2q+1},
 * [g][chunk], 128 | minima 128 | [g]{d g, d g+8, dmin g, dmin g+8} 64. */
struct scales_k32_min {
    enum { GROUP = 32, MINS = 1, SCALE_BYTES = 320 };
    uint32_t sc, mn;
    uint2 d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        sc = load4(at + g * 16 + q * 4);
        mn = load4(at + 128 + g * 16 + q * 4);
        d = load8(at + 256 + g * 8);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return byte_float(sc, 2 * h + i);
    }
    __device__ __forceinline__ float least(int h, int i) const
    {
        return byte_float(mn, 2 * h + i);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return half_of(d.x, h);
    }
    __device__ __forceinline__ float row_least(int h) const
    {
        return -half_of(d.y, h);
    }
    __device__ __forceinline__ uint32_t pair(int h, int) const
    {
        return half2_add(bytes_1024(sc, 2 * h), H2_M1024);
    }
    __device__ __forceinline__ uint32_t least_pair(int h, int) const
    {
        return half2_add(bytes_1024(mn, 2 * h), H2_M1024);
    }
    __device__ __forceinline__ uint32_t full(int h, int) const
    {
        return half2_mul(pair(h, 0), both_of(d.x, h));
    }
    __device__ __forceinline__ uint32_t full_least(int h, int) const
    {
        return half2_mul(least_pair(h, 0), both_of(d.y ^ H2_SIGN, h));
    }
};

/* Part PART of a pair of small integers, exact. */
template <int PART> DEVICE uint32_t part_of(uint32_t pair)
{
    static_assert(PART == 1 || PART == 4 || PART == 8, "no such part");
    return PART == 1 ? pair : half2_mul(pair, PART == 4 ? 0x34003400u : 0x30003000u);
}

/* Bytes (plus 128) times an fp16 of the row (PART of it), as above: 128 | [g]{d g, d g+8} 32. */
template <int PART = 1> struct scales_k32 {
    enum { GROUP = 32, MINS = 0, SCALE_BYTES = 160 };
    uint32_t sc, d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        sc = load4(at + g * 16 + q * 4);
        d = load4(at + 128 + g * 4);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return byte_less_128(sc, 2 * h + i);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return half_of(d, h) * (1.0f / PART);
    }
    __device__ __forceinline__ uint32_t pair(int h, int) const
    {
        return half2_add(bytes_1024(sc, 2 * h), H2_M1152);
    }
    __device__ __forceinline__ uint32_t full(int h, int) const
    {
        return half2_mul(part_of<PART>(pair(h, 0)), both_of(d, h));
    }
};

/* Like scales_k32, for 16 columns: [chunk][g][row half]{4} 256 | [g]{d g, d g+8} 32. */
template <int PART = 1> struct scales_k16 {
    enum { GROUP = 16, MINS = 0, SCALE_BYTES = 288 };
    uint32_t sc[2], d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        uint2 e = load8(at + q * 64 + g * 8);
        sc[0] = e.x, sc[1] = e.y;
        d = load4(at + 256 + g * 4);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return byte_less_128(sc[h], i);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return half_of(d, h) * (1.0f / PART);
    }
    __device__ __forceinline__ uint32_t pair(int h, int i) const
    {
        return half2_add(bytes_1024(sc[h], 2 * i), H2_M1152);
    }
    __device__ __forceinline__ uint32_t full(int h, int i) const
    {
        return half2_mul(part_of<PART>(pair(h, i)), both_of(d, h));
    }
};

/* Nibbles for 16 columns, scale | minimum << 4: 256 in the order of scales_k16 | [g]{d g, d g+8,
 * dmin g, dmin g+8} 64. */
struct scales_k16_min {
    enum { GROUP = 16, MINS = 1, SCALE_BYTES = 320 };
    uint32_t sc[2];
    uint2 d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        uint2 e = load8(at + q * 64 + g * 8);
        sc[0] = e.x, sc[1] = e.y;
        d = load8(at + 256 + g * 8);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return (float)(sc[h] >> 8 * i & 15);
    }
    __device__ __forceinline__ float least(int h, int i) const
    {
        return (float)(sc[h] >> (8 * i + 4) & 15);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return half_of(d.x, h);
    }
    __device__ __forceinline__ float row_least(int h) const
    {
        return -half_of(d.y, h);
    }
    __device__ __forceinline__ uint32_t pair(int h, int i) const
    {
        return half2_add(bytes_1024(sc[h] & 0x0f0f0f0fu, 2 * i), H2_M1024);
    }
    __device__ __forceinline__ uint32_t least_pair(int h, int i) const
    {
        return half2_add(bytes_1024(sc[h] >> 4 & 0x0f0f0f0fu, 2 * i), H2_M1024);
    }
    __device__ __forceinline__ uint32_t full(int h, int i) const
    {
        return half2_mul(pair(h, i), both_of(d.x, h));
    }
    __device__ __forceinline__ uint32_t full_least(int h, int i) const
    {
        return half2_mul(least_pair(h, i), both_of(d.y ^ H2_SIGN, h));
    }
};

/* fp16 scales: [chunk][g]{g: 2q, 2q+1, g+8: 2q, 2q+1} 256. MINS_HALF: then fp16 addends in the same
 * order, 256. MINS_ZERO: then bytes in the same order, the codes that mean zero, 128. */
enum { MINS_NONE, MINS_HALF, MINS_ZERO };
template <int WITH> struct scales_half {
    enum {
        GROUP = 32,
        MINS = WITH == MINS_ZERO ? 2 : WITH == MINS_HALF,
        SCALE_BYTES = WITH == MINS_HALF   ? 512
                      : WITH == MINS_ZERO ? 384
                                          : 256
    };
    uint2 s, m; /* MINS_ZERO: m.x has the bytes */
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        s = load8(at + q * 64 + g * 8);
        if (WITH == MINS_HALF)
            m = load8(at + 256 + q * 64 + g * 8);
        if (WITH == MINS_ZERO)
            m.x = load4(at + 256 + q * 32 + g * 4);
    }
    __device__ __forceinline__ uint32_t pair(int h, int) const
    {
        return h ? s.y : s.x;
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return half_of(pair(h, 0), i);
    }
    __device__ __forceinline__ float least(int h, int i) const
    {
        return WITH == MINS_HALF ? half_of(h ? m.y : m.x, i)
                                 : -byte_float(m.x, 2 * h + i) * scale(h, i);
    }
    __device__ __forceinline__ float row(int) const
    {
        return 1.0f;
    }
    __device__ __forceinline__ float row_least(int) const
    {
        return 1.0f;
    }
    /* MINS_ZERO: rounded; least_rest returns the rounding error. */
    __device__ __forceinline__ uint32_t least_pair(int h, int) const
    {
        return WITH == MINS_HALF ? (h ? m.y : m.x) : pack_half2(least(h, 0), least(h, 1));
    }
    __device__ __forceinline__ uint32_t least_rest(int h, int) const
    {
        uint32_t p = least_pair(h, 0);
        return pack_half2(least(h, 0) - half_of(p, 0), least(h, 1) - half_of(p, 1));
    }
    __device__ __forceinline__ uint32_t full(int h, int) const
    {
        return pair(h, 0);
    }
    __device__ __forceinline__ uint32_t full_least(int h, int) const
    {
        return h ? m.y : m.x;
    }
};

/* Powers of two, as float exponents (0: the scale is 0): bytes in the order of scales_k32, 128 |
 * floats of the row [g]{g, g+8} 64. The largest scale of a row's 256 columns becomes 2^15.
 * Scales below 2^-30 of it become 0. */
struct scales_power {
    enum { GROUP = 32, MINS = 0, SCALE_BYTES = 192 };
    uint32_t e;
    uint2 d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        e = load4(at + g * 16 + q * 4);
        d = load8(at + 128 + g * 8);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return float_of(shift_left(e, 23 - 8 * (2 * h + i)) & 0x7f800000u);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return float_of(h ? d.y : d.x);
    }
    __device__ __forceinline__ uint32_t full(int h, int) const
    {
        /* capped: no level times it is infinite */
        return pack_half2(fminf(scale(h, 0) * row(h), 4096.0f),
                          fminf(scale(h, 1) * row(h), 4096.0f));
    }
};

/* FP8 scales (E4M3 without sign) for 16 columns: bytes in the order of scales_k16, 256 | floats
 * of the row [g]{g, g+8} 64. As fp16 they are 2^-8 of their value; the row's factor corrects it. */
struct scales_f8 {
    enum { GROUP = 16, MINS = 0, SCALE_BYTES = 320 };
    uint32_t sc[2];
    uint2 d;
    __device__ __forceinline__ void fetch(const uint8_t *at, int q, int g)
    {
        uint2 e = load8(at + q * 64 + g * 8);
        sc[0] = e.x, sc[1] = e.y;
        d = load8(at + 256 + g * 8);
    }
    __device__ __forceinline__ uint32_t pair(int h, int i) const
    {
        return byte_perm(sc[h], 0, i ? 0x3424 : 0x1404) >> 1;
    }
    /* Scales that also undo the factor of raw FP4 levels. A level has two significant bits and a
     * scale four, so raw code times this is exact in fp16. */
    __device__ __forceinline__ uint32_t pair_of_raw(int h, int i) const
    {
        return half2_mul(pair(h, i), H2_32768);
    }
    __device__ __forceinline__ float scale(int h, int i) const
    {
        return half_to_float((sc[h] >> 8 * i & 127) << 7);
    }
    __device__ __forceinline__ float row(int h) const
    {
        return float_of(h ? d.y : d.x);
    }
    __device__ __forceinline__ uint32_t full(int h, int i) const
    {
        /* capped: no level times it is infinite */
        return pack_half2(fminf(scale(h, 2 * i) * row(h), 4096.0f),
                          fminf(scale(h, 2 * i + 1) * row(h), 4096.0f));
    }
};

/*
 * A format. For tensor cores that take fragments of true values: fetch loads 64 columns into
 * registers, then the scales are prepared, then the fragment of each 16 columns is made.
 */
template <class CODES, class SCALES> struct coded {
    enum {
        SCALES_AT = CODES::CODE_BYTES,
        BYTES = CODES::CODE_BYTES + SCALES::SCALE_BYTES,
        GROUP = SCALES::GROUP,
        MINS = SCALES::MINS,
        PAIRS = GROUP == 16 ? 2 : 1
    };
    typedef CODES codes;
    typedef SCALES scales;
    CODES w;
    SCALES sc;
    uint32_t s[2][PAIRS], m[2][PAIRS];
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        w.fetch(tile, q, lane);
        sc.fetch(tile + SCALES_AT, q, lane >> 2);
    }
    __device__ __forceinline__ void ready()
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                if constexpr (MINS == 2)
                    m[h][i] = half2_add(bytes_1024(sc.m.x, 2 * h) ^ H2_SIGN, H2_1024);
                else if constexpr (MINS == 1)
                    m[h][i] = sc.full_least(h, i);
                s[h][i] = sc.full(h, i);
            }
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        w.raw(j, a);
        CODES::settle(a);
        const int at = GROUP == 16 ? j >> 1 : 0;
        const bool high = GROUP == 16 ? j & 1 : j >> 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t f = both_of(s[i & 1][at], high);
            if constexpr (MINS == 2)
                a[i] = OP::mul(half2_add(a[i], both_of(m[i & 1][at], high)), f);
            else if constexpr (MINS == 1)
                a[i] = OP::fma(a[i], f, both_of(m[i & 1][at], high));
            else
                a[i] = OP::mul(a[i], f);
        }
    }
    /* Value of (row r, column k), exact in float. Slow: one element. */
    static __device__ __forceinline__ float value(const uint8_t *tile, int r, int k)
    {
        struct tile_place p = tile_place_of(r, k);
        int i = GROUP == 16 ? p.j : p.j >> 1;
        SCALES sc;
        sc.fetch(tile + SCALES_AT, p.q, p.g);
        float v = sc.row(p.h) * sc.scale(p.h, i) * CODES::at(tile, p);
        if constexpr (MINS != 0)
            v += sc.row_least(p.h) * sc.least(p.h, i);
        return v;
    }
};

#endif
