/*
 * Formats of weights: how the bytes of a tile (16 rows x 256 columns) are laid out, and how they
 * become what products take. One struct per kind (format<KIND>): kernels are templates over it. A
 * new kind of codes is one struct here, made of parts of coded.cuh, a line in coded_kind, and what
 * packs it (pack.cuh).
 *
 * Fragments of halves for the tensor cores: lane (g = lane/4, c = lane%4) of a warp holds rows g
 * and g+8; of every 16 columns it holds 4c..4c+3 (the order inside 16 columns is free as long as
 * both operands use it), in the registers a0: row g, 4c 4c+1; a1: row g+8, the same; a2: row g,
 * 4c+2 4c+3; a3: row g+8.
 *
 *   codes  as coded.cuh says: first all codes, then all scales
 *   F16    8192: [column group][lane]{a0 of row g: 4c..4c+3 | row g+8}
 *   F32    16384: row-major
 *   RAW    16 rows of the file's own blocks; FP8: 16x256 codes, then float scales [row][column/128]
 */
#ifndef STEEL_BACKEND_CUDA_FORMAT_CUH
#define STEEL_BACKEND_CUDA_FORMAT_CUH

#include "backend/cuda/coded.cuh"

enum {
    Q4K_SCALES = 2048,
    Q4K_MINS = 2176,
    Q4K_D = 2304,
    Q4K_BYTES = 2368,
    Q6K_HIGH = 2048,
    Q6K_SCALES = 3072,
    Q6K_D = 3328,
    Q6K_BYTES = 3360,
    Q80_BYTES = 4352,
    F16_BYTES = 8192,
    F32_BYTES = 16384,
    F8_SCALES = 4096,
    F8_BYTES = 4096 + 128,
    NVFP4_SCALE = 144, /* a row: four blocks, then the tensor's scale */
    NVFP4_ROW = 148,
    RAW_ROW_LEAST = 64 /* bytes of a raw row, so that a tile has 1024 */
};

template <int KIND> struct format;

template <> struct format<TILE_Q4_K> : coded<codes_nibble<0>, scales_k32_min> {
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
};

template <> struct format<TILE_Q6_K> : coded<codes_six, scales_k16> {
    /* All scales of a tile as a fragment: this lane's columns are 4c..4c+3. */
    static __device__ __forceinline__ void scale_frag(const uint2 &scales, uint32_t (&as)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            as[i] = half2_add(
                byte_perm(i & 1 ? scales.y : scales.x, 0x64646464u, i & 2 ? 0x4342u : 0x4140u),
                H2_M1152);
    }
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
template <> struct format<TILE_Q3_K> : coded<codes_pair<4, true>, scales_k16> {
};
template <> struct format<TILE_Q2_K> : coded<codes_pair<0, false>, scales_k16_min> {
};
template <> struct format<TILE_IQ4_NL> : coded<codes_level<levels_iq4>, scales_half<MINS_NONE>> {
};
template <> struct format<TILE_IQ4_XS> : coded<codes_level<levels_iq4>, scales_k32> {
};
template <> struct format<TILE_MXFP4> : coded<codes_level<levels_fp4>, scales_power> {
};
/* Its values are odd numbers up to 15 with a sign: 2 code - 15. */
template <> struct format<TILE_IQ3_S> : coded<codes_nibble<15, true>, scales_k32> {
};
template <> struct format<TILE_GPTQ4> : coded<codes_nibble<0>, scales_half<MINS_ZERO>> {
};

/* f(kind_is<KIND>()) for the kind of codes that `kind` is. */
template <int KIND> struct kind_is {
    enum { VALUE = KIND };
};
template <class F> DEVICE void coded_kind(int kind, F f)
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

/* Scalar meaning of every file format: element k of 256 columns whose blocks start at b. */

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

/* Value (row r, column k) of a tile in its own layout, exact in float. Slow: one element. */
DEVICE float tile_value(const struct seg *s, const uint8_t *tile, int r, int k)
{
    float v = 0.0f;
    if (s->kind == TILE_F32)
        return *(const float *)(tile + (r * TILE_K + k) * 4);
    if (s->kind == TILE_F16) {
        struct tile_place p = tile_place_of(r, k);
        return raw_half(tile + (k >> 4) * 512 + p.lane * 16 + p.h * 8 + p.e * 2);
    }
    if (s->kind != TILE_RAW) {
        coded_kind(s->kind, [&](auto kind) { v = format<kind.VALUE>::value(tile, r, k); });
        return v;
    }
    int row_bytes = s->tile_bytes / TILE_ROWS;
    if (s->dtype == DT_F8_E4M3)
        return f8_to_float(tile[r * TILE_K + k]) *
               *(const float *)(tile + F8_SCALES + (r * 2 + (k >> 7)) * 4);
    tile += r * row_bytes;
    v = raw_value(s->dtype, tile, k, s->aux);
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
    else if (s->kind == TILE_F16)
        chunk_frags<TILE_F16>(tile, q, a);
    else
        coded_kind(s->kind, [&](auto kind) { chunk_frags<kind.VALUE>(tile, q, a); });
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
