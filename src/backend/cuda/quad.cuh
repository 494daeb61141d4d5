/*
 * Tiles times up to four rows: as in rows.cuh, with the rows in the even columns of the tensor
 * core's eight, so that half the sums are left to scale. For gemm_quad.cu and moe_quad.cu.
 */
#ifndef STEEL_BACKEND_CUDA_QUAD_CUH
#define STEEL_BACKEND_CUDA_QUAD_CUH

#include "backend/cuda/rows.cuh"

/* acc[0], acc[1] += rows g, g+8 of the tile times row c of four: x has row g/2 for column g. A
 * warp waits for each result it uses, so products that do not need each other stand side by
 * side. */
DEVICE void quad_q4_k(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    int lane = lane_id(), g = lane >> 2;
    const float zero[4] = {};
    float sum[2] = {}, ts[4], tm[4];
    uint4 s4 = load16(tile + Q4K_SCALES + g * 16);
    uint32_t scales[4] = {s4.x, s4.y, s4.z, s4.w};
    /* What offsets and minima add: see frag_q4_k. */
    uint32_t sc = load4(tile + Q4K_SCALES + lane * 4), mn = load4(tile + Q4K_MINS + lane * 4);
    uint2 d = load8(tile + Q4K_D + g * 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t w[2][4], a[4];
        float c[4][4];
#pragma unroll
        for (int q = 0; q < 2; q++) {
            uint4 w4 = load16(tile + (2 * half + q) * 512 + lane * 16);
            w[q][0] = w4.x, w[q][1] = w4.y, w[q][2] = w4.z, w[q][3] = w4.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { /* the first 16 columns of every group, then the second */
            int j = 8 * half + 2 * i;
            format<TILE_Q4_K>::frag_offset(w[i >> 1][2 * (i & 1)], a);
            mma_f16_from(c[i], a, x.b[j][0], x.b[j][1], zero);
        }
        if (half == 0) {
            uint32_t as[4], am[4];
            format<TILE_Q4_K>::scale_frags(sc, mn, as, am);
            mma_f16_from(ts, as, x.t[0], x.t[1], zero);
            mma_f16_from(tm, am, x.t[0], x.t[1], zero);
            mma_f16(ts, as, x.t[2], x.t[3]);
            mma_f16(tm, am, x.t[2], x.t[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int j = 8 * half + 2 * i + 1;
            format<TILE_Q4_K>::frag_offset(w[i >> 1][2 * (i & 1) + 1], a);
            mma_f16(c[i], a, x.b[j][0], x.b[j][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t scale = scales[2 * half + (i >> 1)];
            sum[0] += byte_float(scale, i & 1) * c[i][0];
            sum[1] += byte_float(scale, 2 + (i & 1)) * c[i][2];
        }
    }
    acc[0] += half_to_float(d.x & 0xffff) * (sum[0] - 1024.0f * ts[0]) -
              half_to_float(d.y & 0xffff) * tm[0];
    acc[1] += half_to_float(d.x >> 16) * 0.0625f * (sum[1] - 1024.0f * ts[2]) -
              half_to_float(d.y >> 16) * tm[2];
}

DEVICE void quad_q6_k(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    int lane = lane_id(), g = lane >> 2;
    const float zero[4] = {};
    float sum[2] = {}, ts[4];
    /* As in frag_q6_k. */
    uint2 all = load8(tile + Q6K_SCALES + (lane & 3) * 64 + g * 8);
    uint32_t as[4], d = load4(tile + Q6K_D + g * 4);
    format<TILE_Q6_K>::scale_frag(all, as);
    mma_f16_from(ts, as, x.t[0], x.t[1], zero);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint4 w4 = load16(tile + q * 512 + lane * 16);
        uint2 high = load8(tile + Q6K_HIGH + q * 256 + lane * 8);
        uint2 sc = load8(tile + Q6K_SCALES + q * 64 + g * 8);
        sc.x ^= 0x80808080u; /* stored 128 too large */
        sc.y ^= 0x80808080u;
        uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
        float c[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t a[4];
            codes_six::raw_of(w[i], i & 2 ? high.y : high.x, i, a);
            mma_f16_from(c[i], a, x.b[4 * q + i][0], x.b[4 * q + i][1], zero);
        }
        if (q == 0)
            mma_f16(ts, as, x.t[2], x.t[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[0] += signed_byte_float(sc.x, i) * c[i][0];
            sum[1] += signed_byte_float(sc.y, i) * c[i][2];
        }
    }
    acc[0] += half_to_float(d & 0xffff) * (sum[0] - 1056.0f * ts[0]);
    acc[1] += half_to_float(d >> 16) * 0.0625f * (sum[1] - 1536.0f * ts[2]);
}

/* The same for any kind of codes. */
template <int KIND>
DEVICE void quad_codes(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    typedef format<KIND> F;
    int lane = lane_id();
    const float zero[4] = {};
    float sum[2] = {}, ts[4] = {}, tm[4] = {};
    /* What offsets and minima add: see frag_codes. */
    typename F::scales all;
    all.fetch(tile + F::SCALES_AT, lane & 3, lane >> 2);
    uint32_t a[4];
    if constexpr (F::codes::HAS_LESS) {
        scale_frags<F::GROUP>(a, [&](int h, int i) { return all.pair(h, i); });
        mma_f16(ts, a, x.t[0], x.t[1]);
        mma_f16(ts, a, x.t[2], x.t[3]);
    }
    if constexpr (F::MINS != 0) {
        scale_frags<F::GROUP>(a, [&](int h, int i) { return all.least_pair(h, i); });
        mma_f16(tm, a, x.t[0], x.t[1]);
        mma_f16(tm, a, x.t[2], x.t[3]);
    }
    if constexpr (F::MINS == 2) {
        scale_frags<F::GROUP>(a, [&](int h, int i) { return all.least_rest(h, i); });
        mma_f16(tm, a, x.t[0], x.t[1]);
        mma_f16(tm, a, x.t[2], x.t[3]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
        typename F::codes w;
        typename F::scales sc;
        float c[4][4];
        w.fetch(tile, q, lane);
        sc.fetch(tile + F::SCALES_AT, q, lane >> 2);
#pragma unroll
        for (int j = 0; j < 4; j += F::GROUP / 16) {
            w.raw(j, a);
            mma_f16_from(c[j], a, x.b[4 * q + j][0], x.b[4 * q + j][1], zero);
        }
#pragma unroll
        for (int j = 1; j < 4 && F::GROUP == 32; j += 2) {
            w.raw(j, a);
            mma_f16(c[j - 1], a, x.b[4 * q + j][0], x.b[4 * q + j][1]);
        }
#pragma unroll
        for (int j = 0; j < 4; j += F::GROUP / 16) {
            sum[0] += sc.scale(0, j * 16 / F::GROUP) * c[j][0];
            sum[1] += sc.scale(1, j * 16 / F::GROUP) * c[j][2];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        acc[h] += all.row(h) * F::codes::unit(h) * (sum[h] - F::codes::less(h) * ts[2 * h]);
        if constexpr (F::MINS != 0)
            acc[h] += all.row_least(h) * tm[2 * h];
    }
}

/* KIND: of the tile, or ANY_K, ANY_CODES. */
template <int KIND>
DEVICE void quad_tile(int kind, const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    if constexpr (KIND == ANY_CODES)
        coded_kind(kind, [&](auto k) { quad_codes<k.VALUE>(tile, x, acc); });
    else if ((KIND < 0 ? kind : KIND) == TILE_Q4_K)
        quad_q4_k(tile, x, acc);
    else
        quad_q6_k(tile, x, acc);
}

/* This lane's part of a slice of row lane / 8: of 32 columns the first or the second 16, four of
 * them. */
DEVICE int quad_column(int slice)
{
    return slice * TILE_K + (lane_id() >> 2 & 1) * 16 + (lane_id() & 3) * 4;
}
DEVICE void quad_load(float (&v)[8][4], const float *row, int slice, int n)
{
    int k = quad_column(slice);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k + i * 32 < n)
            a = *(const float4 *)(row + k + i * 32);
        v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
    }
}

/* Their halves in the order of fragments, times a power of two that takes the slice's largest to
 * about 1024: the other 16 of 32 columns are four lanes away. Returns what undoes the scale, for
 * row c. */
DEVICE float quad_pack(struct row_frag &f, const float (&v)[8][4])
{
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++)
        top = fmaxf(top, fabsf(v[i / 4][i % 4]));
#pragma unroll
    for (int i = 1; i < 8; i <<= 1)
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, i));
    uint32_t e = bits_of(top) >> 23;
    e = e < 16 ? 16 : e;
    float scale = float_of((264 - e) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t h = pack_half2(v[i][2 * j] * scale, v[i][2 * j + 1] * scale);
            f.b[2 * i][j] = h;
            f.b[2 * i + 1][j] = __shfl_xor_sync(FULL_WARP, h, 4);
        }
    frag_sums(f);
    return __shfl_sync(FULL_WARP, float_of((e - 10) << 23), 8 * (lane_id() & 3));
}

#endif
