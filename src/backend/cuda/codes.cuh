/*
 * Tiles of weights on their way to wgmma: 64 columns of a 16-row tile as the fragments of halves a
 * warp gives to the products of its warpgroup. gemm_wgmma.cu and gemm_cluster.cu stream tiles
 * through them; what a tile looks like is tile.cuh's to say.
 */
#ifndef STEEL_BACKEND_CUDA_CODES_CUH
#define STEEL_BACKEND_CUDA_CODES_CUH

#include "backend/cuda/gemm.cuh"
#include "backend/cuda/wgmma.cuh"

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

/* 64 columns of a tile: fetch (from shared memory to registers), ready (scales), then the
 * fragment of each 16. The same numbers as chunk_* of tile.cuh. */
template <int KIND> struct codes;

template <> struct codes<TILE_Q4_K> {
    enum { BYTES = Q4K_BYTES };
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
    __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        nibble_codes(word[j], a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = j < 2 ? wgmma_fma(a[i], both_lo(s[i & 1]), both_lo(m[i & 1]))
                         : wgmma_fma(a[i], both_hi(s[i & 1]), both_hi(m[i & 1]));
    }
};

template <> struct codes<TILE_Q6_K> {
    enum { BYTES = Q6K_BYTES };
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
    __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        uint32_t lo = word[j], up = lo >> 8, h = high[j >> 1];
        uint32_t h0 = j & 1 ? h >> 4 : h << 4, h2 = j & 1 ? h >> 6 : h << 2;
        uint32_t t0 = and_or(h0, 0x00300030u, and_or(lo, 0x000f000fu, H2_1024));
        uint32_t t1 = and_or(h0, 0x03000300u, and_or(lo, 0x00f000f0u, H2_1024));
        uint32_t t2 = and_or(h2, 0x00300030u, and_or(up, 0x000f000fu, H2_1024));
        uint32_t t3 = and_or(h2, 0x03000300u, and_or(up, 0x00f000f0u, H2_1024));
        uint32_t s0 = j & 1 ? both_hi(s[0][j >> 1]) : both_lo(s[0][j >> 1]);
        uint32_t s1 = j & 1 ? both_hi(s[1][j >> 1]) : both_lo(s[1][j >> 1]);
        a[0] = wgmma_mul(half2_add(t0, H2_M1056), s0);
        a[1] = wgmma_mul(half2_fma(t1, H2_R16, H2_M96), s1);
        a[2] = wgmma_mul(half2_add(t2, H2_M1056), s0);
        a[3] = wgmma_mul(half2_fma(t3, H2_R16, H2_M96), s1);
    }
};

template <> struct codes<TILE_GPTQ4> {
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
    __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        nibble_codes(word[j], a);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t f = i & 1 ? s.y : s.x;
            a[i] = j < 2 ? wgmma_mul(half2_add(a[i], both_lo(zero[i & 1])), both_lo(f))
                         : wgmma_mul(half2_add(a[i], both_hi(zero[i & 1])), both_hi(f));
        }
    }
};

template <> struct codes<TILE_Q8_0> {
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
    __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t w = word[j >> 1][2 * (j & 1) + h], f = h ? s.y : s.x;
            uint32_t lo = byte_perm(w, 0x64646464u, 0x4140), hi = byte_perm(w, 0x64646464u, 0x4342);
            uint32_t scale = j < 2 ? both_lo(f) : both_hi(f);
            a[h] = wgmma_mul(half2_add(lo, H2_M1152), scale);
            a[h + 2] = wgmma_mul(half2_add(hi, H2_M1152), scale);
        }
    }
};

template <> struct codes<TILE_F16> {
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
    __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = wgmma_move(word[j][i], zero);
    }
};

#endif
