/*
 * Tiles x up to four rows, for gemm_quad.cu and moe_quad.cu. As in rows.cuh, but the four rows use
 * the even columns of the tensor core's eight, which halves the sums to scale.
 */
#ifndef STEEL_BACKEND_CUDA_QUAD_CUH
#define STEEL_BACKEND_CUDA_QUAD_CUH

#include "backend/cuda/core/rows.cuh"

/* quad_codes for formats whose code times scale is exact in fp16: see frag_scaled. */
template <int KIND>
DEVICE void quad_scaled(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    typedef format<KIND> F;
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t a[2][4];
        scaled_codes<KIND>(a, tile, i);
#pragma unroll
        for (int j = 0; j < 2; j++)
            mma_f16(sum[j], a[j], x.b[2 * i + j][0], x.b[2 * i + j][1]);
    }
    typename F::scales all;
    all.fetch(tile + F::SCALES_AT, 0, lane_id() >> 2);
#pragma unroll
    for (int h = 0; h < 2; h++)
        acc[h] += all.row(h) * (sum[0][2 * h] + sum[1][2 * h]);
}

/* acc[0], acc[1] += rows g, g+8 of the tile x row c of four; x holds row g/2 for column g.
 * Independent products are interleaved, because a warp waits for each result it uses. */
template <int KIND>
DEVICE void quad_codes(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    typedef format<KIND> F;
    if constexpr (frag_is_scaled<KIND>::VALUE)
        return quad_scaled<KIND>(tile, x, acc);
    int lane = lane_id();
    const float zero[4] = {};
    float sum[2] = {}, ts[4] = {}, tm[4] = {};
    /* Contribution of offsets and minima: see frag_codes. */
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

/* KIND: kind of the tile, or ANY_K, ANY_CODES. */
template <int KIND>
DEVICE void quad_tile(int kind, const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    if constexpr (KIND == ANY_CODES)
        quant_kind(kind, [&](auto k) { quad_codes<k.VALUE>(tile, x, acc); });
    else if constexpr (KIND >= 0)
        quad_codes<KIND>(tile, x, acc);
    else if (kind == TILE_Q4_K)
        quad_codes<TILE_Q4_K>(tile, x, acc);
    else
        quad_codes<TILE_Q6_K>(tile, x, acc);
}

/* This lane's columns in a slice of row lane / 8: of every 32 columns four of the first or the
 * second 16. */
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

/* Converts them to fp16 in fragment order, times a power of two that maps the slice's largest to
 * about 1024. The other 16 of 32 columns are four lanes away. Returns the inverse scale for row
 * c. */
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
