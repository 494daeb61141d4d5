/*
 * Quantised KV cache on the GPU (the formats: quant/kvblock.h): memory layout, how a warp quantises
 * and writes a head, and how eight values are dequantised to fp16. Covers caches whose keys and
 * values differ in type, where one of the two may be F16. Does not depend on how a kernel
 * partitions its work.
 *
 * A (page, kv head) tile holds its quantised values first, (page_len, D), then its scales,
 * (page_len, D/32) fp16, so that sixteen keys are one contiguous run of each. Q4_0: of eight
 * values, the even ones are the nibbles of the low 16 bits and the odd ones those of the high 16,
 * so one mask yields a pair. MLA latents use the block layout of quant.h.
 */
#ifndef STEEL_BACKEND_CUDA_KV_QUANT_CUH
#define STEEL_BACKEND_CUDA_KV_QUANT_CUH

#include "backend/cuda/core/gpu.cuh"

extern "C" {
#include "quant/quant.h"
}

/* Kernels receive the types of keys and of values in one word. */
DEVICE int kv_keys(int types)
{
    return types & 255;
}
DEVICE int kv_values(int types)
{
    return types >> 8;
}

DEVICE bool kv_is_scaled(int type)
{
    return type == DT_Q8_0 || type == DT_Q4_0;
}
/* Heads of these types are multiplied by a Hadamard matrix before they are stored, as on the CPU
 * (quant/kvblock.h). */
DEVICE bool kv_is_rotated(int type)
{
    return type == DT_Q8_0 || type == DT_Q4_0;
}
/* Bytes of n values, scales excluded. */
DEVICE size_t kv_value_bytes(int type, size_t n)
{
    return type == DT_F32    ? 4 * n
           : type == DT_Q4_0 ? n / 2
                             : n << (type == DT_F16 || type == DT_BF16);
}

/* Where one key or value is stored: its quantised values, and its scales or NULL. */
struct kv_place {
    uint8_t *values;
    uint16_t *scales; /* (D/32) */
};

DEVICE struct kv_place kv_place_of(const uint8_t *pool, int type, int slot, int page_len, int n_kv,
                                   int head, int dim)
{
    int page = slot / page_len, off = slot - page * page_len;
    size_t n = (size_t)page_len * (size_t)dim, blocks = kv_is_scaled(type) ? n / 32 : 0;
    uint8_t *tile = (uint8_t *)pool + ((size_t)page * (size_t)n_kv + (size_t)head) *
                                          (kv_value_bytes(type, n) + 2 * blocks);
    struct kv_place at;
    at.values = tile + kv_value_bytes(type, (size_t)off * (size_t)dim);
    at.scales = (uint16_t *)(tile + kv_value_bytes(type, n)) + off * (dim / 32);
    return at;
}

/* Rounds a float to FP8 (E4M3), saturating to finite: as kv_put_fp8. */
DEVICE uint8_t kv_to_fp8(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, a = bits & 0x7fffffff;
    a = a > 0x7f800000 ? 0 : a > 0x43e00000 ? 0x43e00000 : a; /* 448 */
    float size = float_of(a);
    uint32_t small = bits_of((size < 1.0f ? size * 512.0f : 0.0f) + 0x1.8p23f) & 0xff;
    uint32_t large = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (a < 0x3c800000 ? small : large)); /* 2^-6 */
}
DEVICE float kv_from_fp8(uint32_t b)
{
    return half_to_float((b & 0x80) << 8 | (b & 0x7f) << 7) * 256.0f;
}

/* One warp quantises a block of 32 values, one per lane. Returns this lane's code; *scale is the
 * block's scale. */
DEVICE uint32_t kv_code(int type, float x, uint16_t *scale)
{
    uint32_t bits = bits_of(x);
    float d, v;
    if (type == DT_Q8_0) {
        d = float_of(warp_max_u32(bits & 0x7fffffff)) * (1.0f / 127.0f);
    } else { /* the value farthest from 0, its sign moved to the lowest bit */
        uint32_t most = warp_max_u32(bits << 1 | bits >> 31);
        d = float_of(most >> 1 | most << 31) * -0.125f;
    }
    d = d > 65504.0f ? 65504.0f : d < -65504.0f ? -65504.0f : d;
    *scale = float_to_half(d);
    d = half_to_float(*scale);
    v = x * (d != 0.0f ? 1.0f / d : 0.0f);
    if (type == DT_Q8_0) {
        v = v > 127.0f ? 127.0f : v;
        v = v < -127.0f ? -127.0f : v;
        return bits_of(v + 0x1.8p23f) & 0xff;
    }
    v += 8.0f;
    v = v > 15.0f ? 15.0f : v;
    v = v < 0.0f ? 0.0f : v;
    return bits_of(v + 0x1.8p23f) & 15;
}

/* One warp packs four bits of each lane, eight lanes to a word, in the order of a tile. */
DEVICE uint32_t kv_nibbles(uint32_t code)
{
    int j = lane_id() & 7;
    code <<= 4 * ((j >> 1) + 4 * (j & 1));
#pragma unroll
    for (int i = 1; i < 8; i <<= 1)
        code |= __shfl_xor_sync(FULL_WARP, code, i);
    return code;
}

/* One warp quantises block `at` of a head, one value x per lane, and writes it to n places. */
DEVICE void kv_block_put(int type, float x, int at, const struct kv_place *to, int n)
{
    int lane = lane_id(), i = 32 * at + lane;
    uint16_t scale = 0;
    uint32_t code = kv_is_scaled(type)   ? kv_code(type, x, &scale)
                    : type == DT_F8_E4M3 ? kv_to_fp8(x)
                    : type == DT_F16     ? float_to_half(x)
                    : type == DT_BF16    ? float_to_bf16(x)
                                         : bits_of(x);
    uint32_t word = type == DT_Q4_0 ? kv_nibbles(code & 15) : 0;
    for (int k = 0; k < n; k++) {
        if (type == DT_Q8_0 || type == DT_F8_E4M3)
            to[k].values[i] = (uint8_t)code;
        else if (type == DT_F32)
            ((uint32_t *)to[k].values)[i] = code;
        else if (type != DT_Q4_0)
            ((uint16_t *)to[k].values)[i] = (uint16_t)code;
        else if (!(lane & 7))
            *(uint32_t *)(to[k].values + i / 2) = word;
        if (kv_is_scaled(type) && lane == 0)
            to[k].scales[at] = scale;
    }
}

/* One warp writes a head (dim) from shared memory. Quantised types need whole blocks. */
DEVICE void kv_head_put(int type, const float *head, int dim, const struct kv_place &to)
{
    for (int at = 0; at < dim; at += 32) {
        bool mine = at + lane_id() < dim;
        kv_block_put(type, mine ? head[at + lane_id()] : 0.0f, at / 32, &to, mine);
    }
}

/* Reads value i of a head as a float. */
DEVICE float kv_head_get(int type, const struct kv_place &at, int i)
{
    if (type == DT_F32)
        return ((const float *)at.values)[i];
    if (type == DT_F8_E4M3)
        return kv_from_fp8(at.values[i]);
    if (type == DT_Q8_0)
        return half_to_float(at.scales[i >> 5]) * (float)(int8_t)at.values[i];
    if (type == DT_Q4_0) {
        uint32_t word = ((const uint32_t *)at.values)[i >> 3];
        int code = (int)(word >> 4 * ((i >> 1 & 3) + 4 * (i & 1)) & 15);
        return half_to_float(at.scales[i >> 5]) * (float)(code - 8);
    }
    uint32_t h = ((const uint16_t *)at.values)[i];
    return type == DT_F16 ? half_to_float(h) : bf16_to_float(h);
}

/* One warp multiplies a head (dim, whole blocks) in shared memory by the orthonormal Hadamard
 * matrix, in runs of the largest power of two that divides dim. The matrix is its own inverse. */
DEVICE void kv_head_rotate(float *head, int dim)
{
    int lane = lane_id(), run = dim & -dim;
    float by = rsqrtf((float)run);
    for (int i = lane; i < dim; i += 32) { /* each lane holds one position of the blocks */
        float x = head[i];
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) {
            float other = __shfl_xor_sync(FULL_WARP, x, bit);
            x = lane & bit ? other - x : other + x;
        }
        head[i] = x * by;
    }
    for (int half = 32; half < run; half *= 2)
        for (int i = 0; i < dim; i += 2 * half)
            for (int j = i + lane; j < i + half; j += 32) {
                float a = head[j], b = head[j + half];
                head[j] = a + b;
                head[j + half] = a - b;
            }
    __syncwarp();
}

/* The same for a head of N x LANES values held in registers, N per lane. Any assignment of index
 * bits to lanes will do. */
template <int N, int LANES> DEVICE void kv_lanes_rotate(float (&x)[N])
{
    const float by = N * LANES == 128 ? 0.08838834764831845f : rsqrtf((float)(N * LANES));
#pragma unroll
    for (int bit = 1; bit < LANES; bit <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float other = __shfl_xor_sync(FULL_WARP, x[i], bit);
            x[i] = lane_id() & bit ? other - x[i] : other + x[i];
        }
#pragma unroll
    for (int bit = 1; bit < N; bit <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & bit)) {
                float a = x[i], b = x[i + bit];
                x[i] = a + b, x[i + bit] = a - b;
            }
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] *= by;
}

/*
 * Types that kernels dequantise to fp16 for the tensor cores. BLOCK: bytes of 32 values. eight():
 * dequantises eight values from `at`, whose index is a multiple of eight. scale: their block's
 * scale, twice in a word.
 */
struct kv_f16 {
    enum { BLOCK = 64, SCALED = 0 };
    static __device__ __forceinline__ uint4 eight(const uint8_t *at, uint32_t)
    {
        return *(const uint4 *)at;
    }
};
struct kv_q8 {
    enum { BLOCK = 32, SCALED = 1 };
    static __device__ __forceinline__ uint32_t pair(uint32_t biased, uint32_t sel, uint32_t scale)
    {
        const uint32_t from_1152 = 0xe480e480u; /* 1024 + 128 */
        return half2_mul(half2_add(byte_perm(biased, 0x64646464u, sel), from_1152), scale);
    }
    static __device__ __forceinline__ uint4 eight(const uint8_t *at, uint32_t scale)
    {
        uint2 w = *(const uint2 *)at;
        w.x ^= 0x80808080u, w.y ^= 0x80808080u;
        return make_uint4(pair(w.x, 0x4140, scale), pair(w.x, 0x4342, scale),
                          pair(w.y, 0x4140, scale), pair(w.y, 0x4342, scale));
    }
};
struct kv_q4 {
    enum { BLOCK = 16, SCALED = 1 };
    static __device__ __forceinline__ uint4 eight(const uint8_t *at, uint32_t scale)
    {
        const uint32_t from_1032 = 0xe408e408u, from_72 = 0xd480d480u, sixteenth = 0x2c002c00u;
        uint32_t w = *(const uint32_t *)at, v = w >> 8;
        uint32_t a = half2_add(and_or(w, 0x000f000fu, 0x64006400u), from_1032);
        uint32_t b = half2_fma(and_or(w, 0x00f000f0u, 0x64006400u), sixteenth, from_72);
        uint32_t c = half2_add(and_or(v, 0x000f000fu, 0x64006400u), from_1032);
        uint32_t d = half2_fma(and_or(v, 0x00f000f0u, 0x64006400u), sixteenth, from_72);
        return make_uint4(half2_mul(a, scale), half2_mul(b, scale), half2_mul(c, scale),
                          half2_mul(d, scale));
    }
};
struct kv_fp8 {
    enum { BLOCK = 32, SCALED = 0 };
    static __device__ __forceinline__ uint32_t pair(uint32_t w, uint32_t sel)
    {
        uint32_t x = byte_perm(w, 0, sel); /* a byte in the upper part of each fp16 */
        return half2_mul(and_or(x, 0x80008000u, x >> 1 & 0x3f803f80u), 0x5c005c00u); /* 256 */
    }
    static __device__ __forceinline__ uint4 eight(const uint8_t *at, uint32_t)
    {
        uint2 w = *(const uint2 *)at;
        return make_uint4(pair(w.x, 0x1404), pair(w.x, 0x3424), pair(w.y, 0x1404),
                          pair(w.y, 0x3424));
    }
};

/* Calls f with the struct of a type. All threads pass the same type, so warps do not diverge. */
template <class F> DEVICE void kv_with_codes(int type, F f)
{
    if (type == DT_Q8_0)
        f(kv_q8());
    else if (type == DT_Q4_0)
        f(kv_q4());
    else
        f(kv_fp8());
}
template <class F> DEVICE void kv_with(int type, F f) /* or F16 */
{
    if (type == DT_F16)
        f(kv_f16());
    else
        kv_with_codes(type, f);
}

/* A scale, twice in a word. */
DEVICE uint32_t kv_scale_pair(const uint16_t *scale)
{
    uint32_t s = *scale;
    return s << 16 | s;
}

#endif
