/*
 * Preparation of a new row for MLA: norm of its latent, RoPE of its positional part, and its store
 * in the cache. Used by kernels of latent.cu and latent_heads.cu.
 */
#ifndef STEEL_BACKEND_CUDA_LATENT_ROW_CUH
#define STEEL_BACKEND_CUDA_LATENT_ROW_CUH

#include "backend/cuda/attn/kv_quant.cuh"
#include "backend/cuda/mixers/latent.cuh"

#include <math.h>

/* cos and sin of a warp's RoPE pairs at a position. */
struct latent_angles {
    float c[LATENT_MAX_ROPE / 64], s[LATENT_MAX_ROPE / 64];
};
DEVICE struct latent_angles latent_angles_of(const struct latent_rope &r, int pos)
{
    struct latent_angles t;
#pragma unroll
    for (int j = 0; j < LATENT_MAX_ROPE / 64; j++) {
        int i = lane_id() + 32 * j;
        if (i < r.n >> 1)
            sincosf((float)pos * r.freq[i], &t.s[j], &t.c[j]);
    }
    return t;
}

/* One warp applies RoPE to r.n values in place. */
DEVICE void latent_rotate(const struct latent_rope &r, const struct latent_angles &t, float *x)
{
    int half = r.n >> 1;
    float a[LATENT_MAX_ROPE / 64], b[LATENT_MAX_ROPE / 64];
#pragma unroll
    for (int j = 0; j < LATENT_MAX_ROPE / 64; j++) {
        int i = lane_id() + 32 * j;
        if (i < half) {
            float v = x[r.interleaved ? 2 * i : i], w = x[r.interleaved ? 2 * i + 1 : half + i];
            a[j] = (v * t.c[j] - w * t.s[j]) * r.mscale;
            b[j] = (w * t.c[j] + v * t.s[j]) * r.mscale;
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < LATENT_MAX_ROPE / 64; j++) {
        int i = lane_id() + 32 * j;
        if (i < half) {
            x[i] = a[j];
            x[half + i] = b[j];
        }
    }
}

/* One block: 1 / sqrt(mean(x^2) + eps) of n values. part: one float per warp. */
DEVICE float latent_rms(const float *x, int n, float eps, float *part)
{
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
        sum += x[i] * x[i];
    sum = warp_sum(sum);
    if (lane_id() == 0)
        part[warp_id()] = sum;
    __syncthreads();
    sum = warp_sum(lane_id() < (int)blockDim.x >> 5 ? part[lane_id()] : 0.0f);
    __syncthreads();
    return rsqrtf(sum / (float)n + eps);
}

DEVICE void latent_put(uint8_t *cache, int type, size_t at, float v)
{
    if (type == DT_F32)
        ((float *)cache)[at] = v;
    else
        ((uint16_t *)cache)[at] = type == DT_F16 ? float_to_half(v) : float_to_bf16(v);
}
/* One warp quantises a block of 32 values from `at` on, one value x per lane, in the block
 * layout of quant.h. */
DEVICE void latent_put_block(uint8_t *cache, int type, size_t at, float x)
{
    int lane = lane_id();
    if (type == DT_F8_E4M3) {
        cache[at + (size_t)lane] = kv_to_fp8(x);
        return;
    }
    uint16_t scale;
    uint32_t code = kv_code(type, x, &scale), high = __shfl_xor_sync(FULL_WARP, code, 16);
    uint8_t *block = cache + at / 32 * (type == DT_Q8_0 ? 34 : 18);
    if (lane == 0)
        *(uint16_t *)block = scale;
    if (type == DT_Q8_0 || lane < 16)
        block[2 + lane] = (uint8_t)(type == DT_Q8_0 ? code : code | high << 4);
}
template <bool QUANT> DEVICE float latent_get(const uint8_t *cache, int type, size_t at)
{
    if (QUANT) {
        int i = (int)(at & 31);
        const uint8_t *block = cache + at / 32 * (type == DT_Q8_0 ? 34 : 18);
        if (type == DT_F8_E4M3)
            return kv_from_fp8(cache[at]);
        float scale = half_to_float(*(const uint16_t *)block);
        if (type == DT_Q8_0)
            return scale * (float)(int8_t)block[2 + i];
        return scale * (float)((block[2 + (i & 15)] >> (i & 16) / 4 & 15) - 8);
    }
    if (type == DT_F32)
        return ((const float *)cache)[at];
    uint32_t h = ((const uint16_t *)cache)[at];
    return type == DT_F16 ? half_to_float(h) : bf16_to_float(h);
}

/* One block of 256 threads stores row t in the cache: the normed latent and the RoPE'd part.
 * QUANT: quantised in blocks of 32, which may span both. part: one float per warp. */
template <bool QUANT>
DEVICE void latent_row(const struct latent_row_args &p, int t, const struct latent_angles &angles,
                       float *part)
{
    int tid = (int)threadIdx.x, slot = p.step.slot[t], width = p.rank + p.rope.n;
    if (slot < 0)
        return;
    float *x = p.low + (size_t)t * (size_t)p.ld_low;
    size_t at = (size_t)slot * (size_t)width;
    float rms = latent_rms(x, p.rank, p.kv_eps, part);
    for (int i = tid; i < p.rank && QUANT; i += 256)
        x[i] = x[i] * rms * (p.kv_gain ? p.kv_gain[i] : 1.0f);
    for (int i = tid; i < p.rank && !QUANT; i += 256)
        latent_put(p.cache, p.type, at + (size_t)i, x[i] * rms * (p.kv_gain ? p.kv_gain[i] : 1.0f));
    if (tid < 32) {
        latent_rotate(p.rope, angles, x + p.rank);
        __syncwarp();
        for (int i = tid; i < p.rope.n && !QUANT; i += 32)
            latent_put(p.cache, p.type, at + (size_t)(p.rank + i), x[p.rank + i]);
    }
    if (QUANT) {
        __syncthreads();
        for (int i = tid & ~31; i < width; i += 256)
            latent_put_block(p.cache, p.type, at + (size_t)i, x[i + lane_id()]);
    }
}

#endif
