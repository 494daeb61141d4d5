/*
 * Weight formats: the layout of a tile's bytes (16 rows x 256 columns) and their conversion for
 * products. There is one struct per kind, format<KIND>, and kernels are templates over it. A new
 * quantised kind is one struct here made of parts of codes.cuh, a line in quant_kind, and its
 * packing (pack.cuh).
 *
 * fp16 fragments for the tensor cores: lane (g = lane/4, c = lane%4) of a warp holds rows g and
 * g+8. Of every 16 columns it holds 4c..4c+3 (any order within 16 columns works if both operands
 * use it), in the registers a0: row g, 4c 4c+1; a1: row g+8, the same; a2: row g, 4c+2 4c+3; a3:
 * row g+8.
 *
 *   codes  see codes.cuh: first all codes, then all scales
 *   F16    8192: [column group][lane]{a0 of row g: 4c..4c+3 | row g+8}
 *   F8     4224: see format<TILE_F8>
 *   LEVELS 2352: see format<TILE_LEVELS>
 *   F32    16384: row-major
 */
#ifndef STEEL_BACKEND_CUDA_FORMAT_CUH
#define STEEL_BACKEND_CUDA_FORMAT_CUH

#include "backend/cuda/core/codes.cuh"

enum { F16_BYTES = 8192, F32_BYTES = 16384, F8_BYTES = 4096 + 128, LEVELS_BYTES = 2048 + 256 + 48 };

template <int KIND> struct format;

template <> struct format<TILE_Q4_K> : coded<codes_nibble<0>, scales_k32_min> {
};
template <> struct format<TILE_Q6_K> : coded<codes_six, scales_k16<>> {
};
template <> struct format<TILE_Q8_0> : coded<codes_byte, scales_half<MINS_NONE>> {
};
template <> struct format<TILE_Q4_0> : coded<codes_nibble<8>, scales_half<MINS_NONE>> {
};
template <> struct format<TILE_Q4_1> : coded<codes_nibble<0>, scales_half<MINS_HALF>> {
};
template <> struct format<TILE_Q5_1> : coded<codes_five<0>, scales_half<MINS_HALF>> {
};
template <> struct format<TILE_Q5_K> : coded<codes_five<0>, scales_k32_min> {
};
template <> struct format<TILE_Q3_K> : coded<codes_pair<4, true>, scales_k16<>> {
};
template <> struct format<TILE_Q2_K> : coded<codes_pair<0, false>, scales_k16_min> {
};
template <> struct format<TILE_IQ4_NL> : coded<codes_level<levels_iq4>, scales_half<MINS_NONE>> {
};
template <> struct format<TILE_IQ4_XS> : coded<codes_level<levels_iq4>, scales_k32<>> {
};
template <> struct format<TILE_MXFP4> : coded<codes_fp4, scales_power> {
};
/* The values are odd numbers up to 15 with a sign: 2 code - 15. */
template <> struct format<TILE_IQ3_S> : coded<codes_nibble<15, true>, scales_k32<>> {
};
template <> struct format<TILE_IQ3_XXS> : coded<codes_level<levels_iq3_xxs>, scales_k32<4>> {
};
template <> struct format<TILE_IQ2> : coded<codes_level3<levels_iq2>, scales_k16<8>> {
};
template <> struct format<TILE_IQ1> : coded<codes_level3<levels_iq1>, scales_k16<8>> {
};
template <> struct format<TILE_NVFP4> : coded<codes_fp4, scales_f8> {
};
template <> struct format<TILE_GPTQ4> : coded<codes_nibble<0>, scales_half<MINS_ZERO>> {
};

/* Calls f(kind_is<KIND>()) for the quantised kind `kind`. */
template <int KIND> struct kind_is {
    static constexpr int VALUE = KIND;
};
template <class F> DEVICE void quant_kind(int kind, F f)
{
    switch (kind) {
    case TILE_Q4_K:
        return f(kind_is<TILE_Q4_K>());
    case TILE_Q6_K:
        return f(kind_is<TILE_Q6_K>());
    case TILE_Q8_0:
        return f(kind_is<TILE_Q8_0>());
    case TILE_Q4_0:
        return f(kind_is<TILE_Q4_0>());
    case TILE_Q4_1:
        return f(kind_is<TILE_Q4_1>());
    case TILE_Q5_1:
        return f(kind_is<TILE_Q5_1>());
    case TILE_Q5_K:
        return f(kind_is<TILE_Q5_K>());
    case TILE_Q3_K:
        return f(kind_is<TILE_Q3_K>());
    case TILE_Q2_K:
        return f(kind_is<TILE_Q2_K>());
    case TILE_IQ4_NL:
        return f(kind_is<TILE_IQ4_NL>());
    case TILE_IQ4_XS:
        return f(kind_is<TILE_IQ4_XS>());
    case TILE_MXFP4:
        return f(kind_is<TILE_MXFP4>());
    case TILE_IQ3_S:
        return f(kind_is<TILE_IQ3_S>());
    case TILE_IQ3_XXS:
        return f(kind_is<TILE_IQ3_XXS>());
    case TILE_IQ2:
        return f(kind_is<TILE_IQ2>());
    case TILE_IQ1:
        return f(kind_is<TILE_IQ1>());
    case TILE_NVFP4:
        return f(kind_is<TILE_NVFP4>());
    default:
        return f(kind_is<TILE_GPTQ4>());
    }
}

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

DEVICE float f8_to_float(uint32_t b)
{
    uint32_t man = b & 0x7f, sign = (b & 0x80) << 24;
    if (man == 0x7f)
        return float_of(sign | 0x7fc00000u);
    /* the seven bits, shifted below a float's exponent, are 2^-120 of the value, subnormals
     * included */
    return float_of(sign | man << 20) * 0x1p120f;
}

/* FP8 (E4M3): bytes in codes_byte's order, then floats {columns 0..127, 128..255} of each row.
 * Shifted into place, the bits of a byte are an fp16 of 2^-8 the value. */
template <> struct format<TILE_F8> {
    enum { SCALES_AT = 4096, BYTES = F8_BYTES };
    codes_byte w;
    float scale[2]; /* [row half] */
    uint32_t s[2];
    static __device__ __forceinline__ void load_scales(const uint8_t *tile, int q, int g,
                                                       float (&scale)[2])
    {
        const float *at = (const float *)(tile + SCALES_AT) + 2 * g + (q >> 1);
        scale[0] = at[0];
        scale[1] = at[16];
    }
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        w.fetch(tile, q, lane);
        load_scales(tile, q, lane >> 2, scale);
    }
    __device__ __forceinline__ void ready()
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float f = fminf(scale[h] * 256.0f, 65504.0f);
            s[h] = pack_half2(f, f);
        }
    }
    static __device__ __forceinline__ uint32_t to_fp16(uint32_t bytes, uint32_t which)
    {
        uint32_t t = byte_perm(bytes, 0, which);
        return and_or(t, H2_SIGN, t >> 1 & 0x3f803f80u);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
        uint32_t b[2];
        w.bytes(j, b);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[h] = to_fp16(b[h], 0x2404);
            a[h + 2] = to_fp16(b[h], 0x3414);
        }
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        raw(j, a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = OP::mul(a[i], s[i & 1]);
    }
    static __device__ __forceinline__ float value(const uint8_t *tile, int r, int k)
    {
        struct tile_place p = tile_place_of(r, k);
        const uint8_t *of =
            tile + (2 * p.q + (p.j >> 1)) * 512 + p.lane * 16 + (p.j & 1) * 8 + p.h * 4;
        return f8_to_float(of[(p.e & 1) * 2 + (p.e >> 1)]) *
               ((const float *)(tile + SCALES_AT))[2 * r + (k >> 7)];
    }
};

/* NF4 and FP4 (quant.h) */
DEVICE float float_level(int dtype, int code)
{
    static const float nf4[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
    const uint64_t fp4 = 0x30206040c0800100u; /* 0 1 128 192 64 96 32 48, a byte each */
    if (dtype == DT_NF4)
        return nf4[code];
    float v = (float)(fp4 >> 8 * (code & 7) & 255);
    return (code & 8 ? -v : v) / 192.0f;
}

/*
 * The levels of a TILE_LEVELS: nibble `code` of names is a code's index, and unit times a level is its fp16. Pairs of
 * indices eight apart must have equal top bits in both bytes. Signs are equal where positive and negative levels are
 * paired apart (0 is -0 if there are eight negative ones), and the lower bytes' top bits where an even number of them is
 * set among each sign. NF4's unit is the one of 400,000 with the least rounding error, 2^-12.4 of a level; FP4's levels
 * are exact.
 */
struct level_table {
    uint64_t names;
    uint32_t upper[4], lower[4];
    float unit;
};
DEVICE struct level_table level_table_of(int dtype)
{
    if (dtype == DT_NF4)
        return {0xfd75e6c4918b30a2u,
                {0xa7ac9fa9u, 0x2924281eu, 0x5a557f5cu, 0x2c262b22u},
                {0xcbef302eu, 0x8ddb5948u, 0x6221004bu, 0x1054225au},
                0.0770759375f};
    return {0xf7e6d5c4b3a29180u,
            {0x30343800u, 0xb0b4b880u, 0x32363a1cu, 0x4d494563u},
            {},
            192.0f / 256.0f};
}

/*
 * Four bits that index 16 levels of fp16, in codes_level's order; then floats, the scales of 64 columns,
 * [chunk][g]{g, g+8}; then the levels: their 16 upper bytes, their lower bytes, what they are multiplied by,
 * and the dtype, twelve bytes long. A byte is looked up as in codes_level: bytes whose indices differ
 * by eight have the same top bit, and where it is set the second one is stored inverted.
 */
template <> struct format<TILE_LEVELS> {
    enum { SCALES_AT = 2048, LEVELS_AT = 2304, BYTES = LEVELS_BYTES };
    uint32_t word[4];
    uint4 upper, lower;
    float2 scale; /* rows g, g+8 */
    uint32_t s[2];
    static __device__ __forceinline__ uint32_t four(const uint4 &bytes, uint32_t names)
    {
        return byte_perm_sign(bytes.x, bytes.y, names) ^
               byte_perm_sign(bytes.z, bytes.w, names ^ 0x88888888u);
    }
    __device__ __forceinline__ void fetch(const uint8_t *tile, int q, int lane)
    {
        uint4 w = load16(tile + q * 512 + lane * 16);
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
        upper = load16(tile + LEVELS_AT);
        lower = load16(tile + LEVELS_AT + 16);
        float2 d = *(const float2 *)(tile + SCALES_AT + q * 64 + (lane >> 2) * 8);
        float by = float_of(load4(tile + LEVELS_AT + 32));
        scale.x = d.x * by;
        scale.y = d.y * by;
    }
    __device__ __forceinline__ void ready()
    {
        float f = fminf(scale.x, 65504.0f), g = fminf(scale.y, 65504.0f);
        s[0] = pack_half2(f, f);
        s[1] = pack_half2(g, g);
    }
    __device__ __forceinline__ void raw(int j, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t names = word[j] >> 16 * h, up = four(upper, names), low = four(lower, names);
            a[h] = byte_perm(low, up, 0x6240);
            a[h + 2] = byte_perm(low, up, 0x7351);
        }
    }
    template <class OP> __device__ __forceinline__ void frag(int j, uint32_t (&a)[4]) const
    {
        raw(j, a);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = OP::mul(a[i], s[i & 1]);
    }
    static __device__ __forceinline__ float value(const uint8_t *tile, int r, int k)
    {
        struct tile_place p = tile_place_of(r, k);
        uint32_t w = load4(tile + p.q * 512 + p.lane * 16 + p.j * 4);
        uint32_t name = w >> (16 * p.h + 4 * ((p.e & 1) * 2 + (p.e >> 1))) & 15;
        int dtype = (int)load4(tile + LEVELS_AT + 36), code = 0;
        while (code < 15 && (level_table_of(dtype).names >> 4 * code & 15) != name)
            code++;
        return float_level(dtype, code) *
               *(const float *)(tile + SCALES_AT + p.q * 64 + p.g * 8 + p.h * 4);
    }
};

/* Value of (row r, column k) of a tile, exact in float. Slow: one element. */
DEVICE float tile_value(const struct seg *s, const uint8_t *tile, int r, int k)
{
    float v = 0.0f;
    if (s->kind == TILE_F32)
        return *(const float *)(tile + (r * TILE_K + k) * 4);
    if (s->kind == TILE_F8)
        return format<TILE_F8>::value(tile, r, k);
    if (s->kind == TILE_LEVELS)
        return format<TILE_LEVELS>::value(tile, r, k);
    if (s->kind == TILE_F16) {
        struct tile_place p = tile_place_of(r, k);
        return raw_half(tile + (k >> 4) * 512 + p.lane * 16 + p.h * 8 + p.e * 2);
    }
    quant_kind(s->kind, [&](auto kind) { v = format<kind.VALUE>::value(tile, r, k); });
    return v;
}

/* F32, and other kinds beside it in one weight: element by element, with a second fragment for the
 * rounding errors. Not inlined: the code is long, and instantiated many times. */
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

/* Fragments of chunk q of a tile of one of the fast kinds; a[j]: columns 64q+16j... */
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
    else if (s->kind == TILE_F16)
        chunk_frags<TILE_F16>(tile, q, a);
    else if (s->kind == TILE_F8)
        chunk_frags<TILE_F8>(tile, q, a);
    else if (s->kind == TILE_LEVELS)
        chunk_frags<TILE_LEVELS>(tile, q, a);
    else
        quant_kind(s->kind, [&](auto kind) { chunk_frags<kind.VALUE>(tile, q, a); });
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
    for (int i = 0; i < 1024; i += 512) /* every tile has at least 1024 bytes */
        copy_async16(to + i, from + i);
#pragma unroll 2
    for (int i = 1024; i < bytes - at; i += 512)
        copy_async16(to + i, from + i);
}

#endif
