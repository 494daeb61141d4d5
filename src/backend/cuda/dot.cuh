/*
 * Tile times staged activations, for steps of few rows, in few instructions: what a step of one row
 * costs beyond its reads is latency and instruction fetches. Codes go to the tensor cores as the
 * halves 1024 + code that one OR makes of them (register 1 and 3, whose nibbles sit four bits up, as
 * 1024 + 16 code: rows g+8 are 16 times too large, which their scale takes back). The 1024s cost
 * nothing to take off: the accumulator starts at -1024 * (sum of the group's activations). Scales
 * multiply accumulators in float, one group at a time, so every weight is exact; minima are a product
 * of their own, (minima) x (group sums), the sums split into two halves each. Activations are the
 * only thing that is rounded.
 */
#ifndef STEEL_BACKEND_CUDA_DOT_CUH
#define STEEL_BACKEND_CUDA_DOT_CUH

#include "backend/cuda/tile.cuh"

/* 256 columns of the step's rows as a warp stages them in shared memory. */
enum {
    SLICE_STRIDE = TILE_K + 16,         /* halves per row: 8 rows fall into different banks */
    SLICE_T16 = 0,                      /* float [16 columns][row]: -1024 * sum */
    SLICE_T32 = 16 * 8 * 4,             /* float [32 columns][row]: -1024 * sum */
    SLICE_SPLIT = SLICE_T32 + 8 * 8 * 4, /* half [row]{8 sums / 64, 8 of what that rounding lost} */
    SLICE_X = SLICE_SPLIT + 8 * 32
};

static inline size_t slice_bytes(int rows)
{
    return (size_t)SLICE_X + (size_t)rows * SLICE_STRIDE * 2;
}

/* Stages row t: this lane has columns 8 lane .. 8 lane + 7. Returns the power of two that undoes the
 * scale the halves got (the largest of the slice is near 1024, so none overflows or vanishes). */
DEVICE float stage_row(uint8_t *slice, int t, const float (&v)[8])
{
    int lane = lane_id();
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        top = fmaxf(top, fabsf(v[i]));
    uint32_t e = warp_max_u32(bits_of(top)) >> 23;
    e = e < 16 ? 16 : e;
    float scale = float_of((264 - e) << 23), sum = 0.0f;
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = pack_half2(v[2 * i] * scale, v[2 * i + 1] * scale);
        sum += half_to_float(h[i] & 0xffff) + half_to_float(h[i] >> 16);
    }
    *(uint4 *)(slice + SLICE_X + (t * SLICE_STRIDE + lane * 8) * 2) =
        make_uint4(h[0], h[1], h[2], h[3]);
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    if (!(lane & 1))
        ((float *)(slice + SLICE_T16))[(lane >> 1) * 8 + t] = -1024.0f * sum;
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (!(lane & 3)) {
        ((float *)(slice + SLICE_T32))[(lane >> 2) * 8 + t] = -1024.0f * sum;
        sum *= 0.015625f;
        uint32_t hi = float_to_half(sum);
        uint16_t *split = (uint16_t *)(slice + SLICE_SPLIT) + t * 16 + (lane >> 2);
        split[0] = (uint16_t)hi;
        split[8] = float_to_half(sum - half_to_float(hi));
    }
    return float_of((e - 10) << 23);
}

/* A row that takes no part: zeros. */
DEVICE void stage_zeros(uint8_t *slice, int t)
{
    float v[8] = {};
    stage_row(slice, t, v);
}

/* What a lane needs to read a staged slice. */
struct slice_view {
    const uint8_t *x;     /* its column of B from element 4c on */
    const uint8_t *sums;  /* base + rows 2c, 2c+1 */
    const uint8_t *split; /* its column of the split sums */
    bool on;              /* column g is a row of the step */
};

DEVICE struct slice_view slice_view_of(const uint8_t *slice, int rows)
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    struct slice_view v;
    v.on = g < rows;
    v.x = slice + SLICE_X + (g * SLICE_STRIDE + c * 4) * 2;
    v.sums = slice + c * 8;
    v.split = slice + SLICE_SPLIT + g * 32 + c * 4;
    return v;
}

DEVICE uint2 slice_b(const struct slice_view &v, int group)
{
    return v.on ? *(const uint2 *)(v.x + group * 32) : make_uint2(0, 0);
}
DEVICE void slice_start(const struct slice_view &v, int at, float (&acc)[4])
{
    float2 t = *(const float2 *)(v.sums + at * 32);
    acc[0] = acc[2] = t.x;
    acc[1] = acc[3] = t.y;
}
DEVICE void scale_add(float (&tot)[4], const float (&acc)[4], float s0, float s1)
{
    tot[0] += s0 * acc[0];
    tot[1] += s0 * acc[1];
    tot[2] += s1 * acc[2];
    tot[3] += s1 * acc[3];
}

/* The fragment of a word of codes, as 1024 + code (rows g) and 1024 + 16 code (rows g+8). */
DEVICE void nibble_frag(uint32_t w, uint32_t (&a)[4])
{
    uint32_t h = w >> 8;
    a[0] = and_or(w, 0x000f000fu, H2_1024);
    a[1] = and_or(w, 0x00f000f0u, H2_1024);
    a[2] = and_or(h, 0x000f000fu, H2_1024);
    a[3] = and_or(h, 0x00f000f0u, H2_1024);
}

DEVICE void dot_q4_k(const uint8_t *tile, const struct slice_view &v, float (&tot)[4])
{
    int lane = lane_id(), g = lane >> 2;
    const uint8_t *codes = tile + lane * 16, *scales = tile + Q4K_SCALES + g * 16;
    float sub[4] = {};
#pragma unroll 2
    for (int q = 0; q < 4; q++) {
        uint4 w4 = load16(codes + q * 512);
        uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w}, sc = load4(scales + q * 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float acc[4];
            slice_start(v, (SLICE_T32 >> 5) + 2 * q + h, acc);
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; j++) {
                uint32_t a[4];
                uint2 b = slice_b(v, 4 * q + j);
                nibble_frag(w[j], a);
                mma_f16(acc, a, b.x, b.y);
            }
            scale_add(sub, acc, (float)(sc >> 8 * h & 255), (float)(sc >> (16 + 8 * h) & 255));
        }
    }
    uint32_t mn = load4(tile + Q4K_MINS + lane * 4);
    uint32_t m0 = half2_add(byte_perm(mn, 0x64646464u, 0x4140), H2_M1024);
    uint32_t m1 = half2_add(byte_perm(mn, 0x64646464u, 0x4342), H2_M1024);
    uint32_t a[4] = {m0, m1, m0, m1};
    float min[4] = {};
    mma_f16(min, a, v.on ? load4(v.split) : 0, v.on ? load4(v.split + 16) : 0);
    uint2 d = load8(tile + Q4K_D + g * 8);
    float d0 = half_to_float(d.x & 0xffff), d1 = half_to_float(d.x >> 16) * 0.0625f;
    scale_add(tot, sub, d0, d1);
    scale_add(tot, min, half_to_float(d.y & 0xffff) * -64.0f, half_to_float(d.y >> 16) * -64.0f);
}

DEVICE void dot_q6_k(const uint8_t *tile, const struct slice_view &v, float (&tot)[4])
{
    int lane = lane_id(), g = lane >> 2;
    float sub[4] = {};
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        uint4 w4 = load16(tile + q * 512 + lane * 16);
        uint2 high = load8(tile + Q6K_HIGH + q * 256 + lane * 8);
        uint2 sc = load8(tile + Q6K_SCALES + q * 64 + g * 8);
        uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t a[4], h = j < 2 ? high.x : high.y;
            nibble_frag(w[j], a);
            a[0] = and_or(j & 1 ? h >> 4 : h << 4, 0x00300030u, a[0]);
            a[1] = and_or(j & 1 ? h >> 2 : h << 6, 0x03000300u, a[1]);
            a[2] = and_or(j & 1 ? h >> 8 : h, 0x00300030u, a[2]);
            a[3] = and_or(j & 1 ? h >> 6 : h << 2, 0x03000300u, a[3]);
            /* codes have 32 to lose as well: 1024 + 32, and 1024 + 16 * 32 for rows g+8 */
            float2 t = *(const float2 *)(v.sums + SLICE_T16 + (4 * q + j) * 32);
            float acc[4] = {t.x * 1.03125f, t.y * 1.03125f, t.x * 1.5f, t.y * 1.5f};
            uint2 b = slice_b(v, 4 * q + j);
            mma_f16(acc, a, b.x, b.y);
            scale_add(sub, acc, (float)(int)(sc.x >> 8 * j & 255) - 128.0f,
                      (float)(int)(sc.y >> 8 * j & 255) - 128.0f);
        }
    }
    uint32_t d = load4(tile + Q6K_D + g * 4);
    scale_add(tot, sub, half_to_float(d & 0xffff), half_to_float(d >> 16) * 0.0625f);
}

/* Half scales of two groups of 32 for rows g and g+8: {g:0, g:1, g+8:0, g+8:1} */
DEVICE void dot_gptq4(const uint8_t *tile, const struct slice_view &v, float (&tot)[4])
{
    int lane = lane_id(), g = lane >> 2;
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        uint4 w4 = load16(tile + q * 512 + lane * 16);
        uint2 sc = load8(tile + GPTQ_SCALES + q * 64 + g * 8);
        uint32_t z = load4(tile + GPTQ_ZEROS + q * 32 + g * 4);
        uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float acc[4], zero[4], z0 = (float)(z >> 8 * h & 255) * 0.0009765625f;
            float z1 = (float)(z >> (16 + 8 * h) & 255) * 0.015625f; /* 16 / 1024 */
            slice_start(v, (SLICE_T32 >> 5) + 2 * q + h, acc);
            zero[0] = acc[0], zero[1] = acc[1], zero[2] = acc[2], zero[3] = acc[3];
            scale_add(acc, zero, z0, z1);
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; j++) {
                uint32_t a[4];
                uint2 b = slice_b(v, 4 * q + j);
                nibble_frag(w[j], a);
                mma_f16(acc, a, b.x, b.y);
            }
            scale_add(tot, acc, half_to_float(sc.x >> 16 * h & 0xffff),
                      half_to_float(sc.y >> 16 * h & 0xffff) * 0.0625f);
        }
    }
}

DEVICE void dot_q8_0(const uint8_t *tile, const struct slice_view &v, float (&tot)[4])
{
    int lane = lane_id(), g = lane >> 2;
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        uint2 sc = load8(tile + Q80_SCALES + q * 64 + g * 8);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint4 w4 = load16(tile + (2 * q + p) * 512 + lane * 16);
            uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
            float acc[4];
            slice_start(v, (SLICE_T32 >> 5) + 2 * q + p, acc);
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[i] *= 1.125f; /* codes are 128 too large */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 b = slice_b(v, 4 * q + 2 * p + i);
                uint32_t a[4] = {byte_perm(w[2 * i], 0x64646464u, 0x4140),
                                 byte_perm(w[2 * i + 1], 0x64646464u, 0x4140),
                                 byte_perm(w[2 * i], 0x64646464u, 0x4342),
                                 byte_perm(w[2 * i + 1], 0x64646464u, 0x4342)};
                mma_f16(acc, a, b.x, b.y);
            }
            scale_add(tot, acc, half_to_float(sc.x >> 16 * p & 0xffff),
                      half_to_float(sc.y >> 16 * p & 0xffff));
        }
    }
}

DEVICE void dot_f16(const uint8_t *tile, const struct slice_view &v, float (&tot)[4])
{
#pragma unroll 4
    for (int i = 0; i < 16; i++) {
        uint4 w = load16(tile + i * 512 + lane_id() * 16);
        uint32_t a[4] = {w.x, w.z, w.y, w.w};
        uint2 b = slice_b(v, i);
        mma_f16(tot, a, b.x, b.y);
    }
}

DEVICE void dot_slow(const struct seg *s, const uint8_t *tile, const struct slice_view &v,
                     float (&tot)[4])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        uint32_t a[4], rest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = g + 8 * (j & 1), k = 16 * i + 4 * c + 2 * (j >> 1);
            float x = tile_value_call(s, tile, r, k), y = tile_value_call(s, tile, r, k + 1);
            a[j] = pack_half2(x, y);
            rest[j] =
                pack_half2(x - half_to_float(a[j] & 0xffff), y - half_to_float(a[j] >> 16));
        }
        uint2 b = slice_b(v, i);
        mma_f16(tot, rest, b.x, b.y);
        mma_f16(tot, a, b.x, b.y);
    }
}

/* sum += undo * (tile x slice) */
template <int SET>
DEVICE void tile_dot(const struct seg *s, const uint8_t *tile, const struct slice_view &v,
                     const float (&undo)[2], float (&sum)[4])
{
    float tot[4] = {};
    if (SET == SET_ALL)
        dot_slow(s, tile, v, tot);
    else if (s->kind == TILE_Q4_K)
        dot_q4_k(tile, v, tot);
    else if (SET == SET_K || s->kind == TILE_Q6_K)
        dot_q6_k(tile, v, tot);
    else if (s->kind == TILE_Q8_0)
        dot_q8_0(tile, v, tot);
    else if (s->kind == TILE_GPTQ4)
        dot_gptq4(tile, v, tot);
    else
        dot_f16(tile, v, tot);
    sum[0] += undo[0] * tot[0];
    sum[1] += undo[1] * tot[1];
    sum[2] += undo[0] * tot[2];
    sum[3] += undo[1] * tot[3];
}

#endif
