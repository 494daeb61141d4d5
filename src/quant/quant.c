/*
 * The scalar definition of every number format: the dtype table, fp16, bf16 and FP8 conversions and
 * exact dequantisation. Kernels are tested against it: plain C, one loop per format, no tricks.
 * Planar formats (GPTQ, block-scaled FP8) are not handled here, because their scales are stored
 * elsewhere. Knows nothing of files, tensors or models.
 */
#include "quant/quant.h"
#include "base/error.h"

#include <string.h>
#include <strings.h>

const struct dtype_info dtype_table[DT_COUNT] = {
    [DT_NONE] = {"none", 1, 1},
    [DT_F32] = {"F32", 1, 4},
    [DT_F16] = {"F16", 1, 2},
    [DT_BF16] = {"BF16", 1, 2},
    [DT_Q4_0] = {"Q4_0", QK_32, sizeof(struct block_q4_0)},
    [DT_Q4_1] = {"Q4_1", QK_32, sizeof(struct block_q4_1)},
    [DT_Q5_0] = {"Q5_0", QK_32, sizeof(struct block_q5_0)},
    [DT_Q5_1] = {"Q5_1", QK_32, sizeof(struct block_q5_1)},
    [DT_Q8_0] = {"Q8_0", QK_32, sizeof(struct block_q8_0)},
    [DT_Q2_K] = {"Q2_K", QK_K, sizeof(struct block_q2_k)},
    [DT_Q3_K] = {"Q3_K", QK_K, sizeof(struct block_q3_k)},
    [DT_Q4_K] = {"Q4_K", QK_K, sizeof(struct block_q4_k)},
    [DT_Q5_K] = {"Q5_K", QK_K, sizeof(struct block_q5_k)},
    [DT_Q6_K] = {"Q6_K", QK_K, sizeof(struct block_q6_k)},
    [DT_IQ4_NL] = {"IQ4_NL", QK_32, sizeof(struct block_iq4_nl)},
    [DT_IQ4_XS] = {"IQ4_XS", QK_K, sizeof(struct block_iq4_xs)},
    [DT_MXFP4] = {"MXFP4", QK_32, sizeof(struct block_mxfp4)},
    [DT_IQ3_S] = {"IQ3_S", QK_K, sizeof(struct block_iq3_s)},
    [DT_IQ1_S] = {"IQ1_S", QK_K, sizeof(struct block_iq1_s)},
    [DT_IQ1_M] = {"IQ1_M", QK_K, sizeof(struct block_iq1_m)},
    [DT_IQ2_XXS] = {"IQ2_XXS", QK_K, sizeof(struct block_iq2_xxs)},
    [DT_IQ2_XS] = {"IQ2_XS", QK_K, sizeof(struct block_iq2_xs)},
    [DT_IQ2_S] = {"IQ2_S", QK_K, sizeof(struct block_iq2_s)},
    [DT_IQ3_XXS] = {"IQ3_XXS", QK_K, sizeof(struct block_iq3_xxs)},
    [DT_TQ1_0] = {"TQ1_0", QK_K, sizeof(struct block_tq1_0)},
    [DT_TQ2_0] = {"TQ2_0", QK_K, sizeof(struct block_tq2_0)},
    [DT_NVFP4] = {"NVFP4", QK_NVFP4, sizeof(struct block_nvfp4)},
    [DT_Q1_0] = {"Q1_0", QK1_0, sizeof(struct block_q1_0)},
    [DT_Q2_0] = {"Q2_0", QK2_0, sizeof(struct block_q2_0)},
    [DT_F8_E4M3] = {"F8_E4M3", 1, 1},
    [DT_GPTQ4] = {"GPTQ4", 2, 1},
    [DT_NF4] = {"NF4", QK_NF4, sizeof(struct block_nf4)},
    [DT_FP4] = {"FP4", QK_NF4, sizeof(struct block_nf4)},
    [DT_I8] = {"I8", 1, 1},
    [DT_I16] = {"I16", 1, 2},
    [DT_I32] = {"I32", 1, 4},
    [DT_I64] = {"I64", 1, 8},
    [DT_F64] = {"F64", 1, 8},
};

/* The structs are file layouts, so padding must fail here. */
_Static_assert(sizeof(struct block_q4_0) == 18 && sizeof(struct block_q4_1) == 20, "layout");
_Static_assert(sizeof(struct block_q5_0) == 22 && sizeof(struct block_q5_1) == 24, "layout");
_Static_assert(sizeof(struct block_q8_0) == 34 && sizeof(struct block_mxfp4) == 17, "layout");
_Static_assert(sizeof(struct block_q2_k) == 84 && sizeof(struct block_q3_k) == 110, "layout");
_Static_assert(sizeof(struct block_q4_k) == 144 && sizeof(struct block_q5_k) == 176, "layout");
_Static_assert(sizeof(struct block_q6_k) == 210 && sizeof(struct block_iq4_nl) == 18, "layout");
_Static_assert(sizeof(struct block_iq4_xs) == 136 && sizeof(struct block_iq3_s) == 110, "layout");
_Static_assert(sizeof(struct block_iq1_s) == 50 && sizeof(struct block_iq1_m) == 56, "layout");
_Static_assert(sizeof(struct block_iq2_xxs) == 66 && sizeof(struct block_iq2_xs) == 74, "layout");
_Static_assert(sizeof(struct block_iq2_s) == 82 && sizeof(struct block_iq3_xxs) == 98, "layout");
_Static_assert(sizeof(struct block_tq1_0) == 54 && sizeof(struct block_tq2_0) == 66, "layout");
_Static_assert(sizeof(struct block_nvfp4) == 36, "layout");
_Static_assert(sizeof(struct block_q1_0) == 18 && sizeof(struct block_q2_0) == 18, "layout");
_Static_assert(sizeof(struct block_nf4) == 36, "layout");

static const struct {
    uint8_t id;
    enum dtype type;
} ggml_ids[] = {
    {0, DT_F32},    {1, DT_F16},    {2, DT_Q4_0},     {3, DT_Q4_1},    {6, DT_Q5_0},
    {7, DT_Q5_1},   {8, DT_Q8_0},   {10, DT_Q2_K},    {11, DT_Q3_K},   {12, DT_Q4_K},
    {13, DT_Q5_K},  {14, DT_Q6_K},  {21, DT_IQ3_S},   {20, DT_IQ4_NL}, {23, DT_IQ4_XS},
    {24, DT_I8},    {25, DT_I16},   {26, DT_I32},     {27, DT_I64},    {28, DT_F64},
    {30, DT_BF16},  {39, DT_MXFP4}, {16, DT_IQ2_XXS}, {17, DT_IQ2_XS}, {18, DT_IQ3_XXS},
    {19, DT_IQ1_S}, {22, DT_IQ2_S}, {29, DT_IQ1_M},   {34, DT_TQ1_0},  {35, DT_TQ2_0},
    {40, DT_NVFP4}, {41, DT_Q1_0},  {42, DT_Q2_0},
};

enum dtype dtype_from_name(const char *name)
{
    for (int t = DT_NONE + 1; t < DT_COUNT; t++)
        if (!strcasecmp(name, dtype_table[t].name))
            return (enum dtype)t;
    return DT_NONE;
}

enum dtype dtype_from_ggml(uint32_t id)
{
    for (size_t i = 0; i < sizeof ggml_ids / sizeof *ggml_ids; i++)
        if (ggml_ids[i].id == id)
            return ggml_ids[i].type;
    return DT_NONE;
}

int dtype_to_ggml(enum dtype t)
{
    for (size_t i = 0; i < sizeof ggml_ids / sizeof *ggml_ids; i++)
        if (ggml_ids[i].type == t)
            return ggml_ids[i].id;
    return -1;
}

static float float_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint32_t float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 1023;
    if (exp == 31)
        return float_from_bits(sign | 0x7f800000 | man << 13);
    if (exp)
        return float_from_bits(sign | (exp + 112) << 23 | man << 13);
    float f = (float)man * 0x1p-24f;
    return float_from_bits(sign | float_bits(f));
}

uint16_t f32_to_f16(float f)
{
    uint32_t u = float_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) /* NaN: quiet it, keep the top of its payload */
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
    if (a >= 0x477ff000) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) {
        /* Subnormal fp16: adding 0.5 puts the rounded mantissa at the bottom. */
        float r = float_from_bits(a) + 0.5f;
        return (uint16_t)(sign | (float_bits(r) - 0x3f000000));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

float bf16_to_f32(uint16_t b)
{
    return float_from_bits((uint32_t)b << 16);
}

uint16_t f32_to_bf16(float f)
{
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float f8e4m3_to_f32(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, exp = b >> 3 & 15, man = b & 7;
    if ((b & 0x7f) == 0x7f)
        return float_from_bits(sign | 0x7fc00000);
    if (exp)
        return float_from_bits(sign | (exp + 120) << 23 | man << 20);
    return float_from_bits(sign | float_bits((float)man * 0x1p-9f));
}

/* The 16 levels of IQ4_NL and IQ4_XS; the 16 levels of MXFP4, doubled. */
static const int8_t quant_iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                            1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t quant_mxfp4_levels[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                              0, -1, -2, -3, -4, -6, -8, -12};

float quant_mxfp4_scale(uint8_t e)
{
    return float_from_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

static void dequant_q4_0(const struct block_q4_0 *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)((b->qs[i] & 15) - 8);
        y[i + 16] = d * (float)((b->qs[i] >> 4) - 8);
    }
}

static void dequant_q4_1(const struct block_q4_1 *b, float *y)
{
    float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)(b->qs[i] & 15) + m;
        y[i + 16] = d * (float)(b->qs[i] >> 4) + m;
    }
}

/* Fifth bits of values i and i + 16, already shifted to bit 4. */
static int high_lo(const uint8_t *qh, int i)
{
    return (qh[i / 8] >> i % 8 & 1) << 4;
}

static int high_hi(const uint8_t *qh, int i)
{
    return (qh[2 + i / 8] >> i % 8 & 1) << 4;
}

static void dequant_q5_0(const struct block_q5_0 *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)(((b->qs[i] & 15) | high_lo(b->qh, i)) - 16);
        y[i + 16] = d * (float)((b->qs[i] >> 4 | high_hi(b->qh, i)) - 16);
    }
}

static void dequant_q5_1(const struct block_q5_1 *b, float *y)
{
    float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)((b->qs[i] & 15) | high_lo(b->qh, i)) + m;
        y[i + 16] = d * (float)(b->qs[i] >> 4 | high_hi(b->qh, i)) + m;
    }
}

static void dequant_q8_0(const struct block_q8_0 *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 32; i++)
        y[i] = d * (float)b->qs[i];
}

static void dequant_q2_k(const struct block_q2_k *b, float *y)
{
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int i = 0; i < QK_K; i++) {
        /* 128 values share 32 bytes, two bits each; a scale covers 16 values */
        uint8_t sc = b->scales[i / 16];
        int q = b->qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        y[i] = d * (float)(sc & 15) * (float)q - dmin * (float)(sc >> 4);
    }
}

static void dequant_q3_k(const struct block_q3_k *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < QK_K; i++) {
        int q = b->qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        int high = b->hmask[i % 32] >> (i / 32) & 1;
        y[i] = d * (float)quant_q3k_scale(b->scales, i / 16) * (float)(q - (high ? 0 : 4));
    }
}

static void dequant_q4_k(const struct block_q4_k *b, float *y)
{
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j++) {
        int sc, m;
        quant_k4_scale_min(b->scales, j, &sc, &m);
        float ds = d * (float)sc, ms = dmin * (float)m;
        for (int i = 0; i < 32; i++)
            y[32 * j + i] = ds * (float)(b->qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15) - ms;
    }
}

static void dequant_q5_k(const struct block_q5_k *b, float *y)
{
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j++) {
        int sc, m;
        quant_k4_scale_min(b->scales, j, &sc, &m);
        float ds = d * (float)sc, ms = dmin * (float)m;
        for (int i = 0; i < 32; i++) {
            int q = (b->qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15) | (b->qh[i] >> j & 1) << 4;
            y[32 * j + i] = ds * (float)q - ms;
        }
    }
}

static void dequant_q6_k(const struct block_q6_k *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < QK_K; i++) {
        /* 128 values: 64 bytes of low nibbles (32 + 32, low then high), 32 bytes of high pairs */
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        int lo = b->ql[64 * half + part % 2 * 32 + l] >> (part / 2 * 4) & 15;
        int hi = b->qh[32 * half + l] >> (2 * part) & 3;
        y[i] = d * (float)b->scales[i / 16] * (float)((lo | hi << 4) - 32);
    }
}

static void dequant_iq4_nl(const struct block_iq4_nl *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)quant_iq4_levels[b->qs[i] & 15];
        y[i + 16] = d * (float)quant_iq4_levels[b->qs[i] >> 4];
    }
}

static void dequant_iq4_xs(const struct block_iq4_xs *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int j = 0; j < 8; j++) {
        int sc = (b->scales_l[j / 2] >> (j % 2 * 4) & 15) | (b->scales_h >> 2 * j & 3) << 4;
        float ds = d * (float)(sc - 32);
        for (int i = 0; i < 16; i++) {
            y[32 * j + i] = ds * (float)quant_iq4_levels[b->qs[16 * j + i] & 15];
            y[32 * j + i + 16] = ds * (float)quant_iq4_levels[b->qs[16 * j + i] >> 4];
        }
    }
}

static void dequant_mxfp4(const struct block_mxfp4 *b, float *y)
{
    float d = quant_mxfp4_scale(b->e);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)quant_mxfp4_levels[b->qs[i] & 15];
        y[i + 16] = d * (float)quant_mxfp4_levels[b->qs[i] >> 4];
    }
}

/* Expands 7 sign bits to 8 with an even number of ones. */
static unsigned even_signs(unsigned bits)
{
    return bits | (unsigned)__builtin_parity(bits) << 7;
}

static unsigned load16(const uint8_t *p)
{
    return p[0] | (unsigned)p[1] << 8;
}

static uint32_t load32(const uint8_t *p)
{
    return load16(p) | (uint32_t)load16(p + 2) << 16;
}

/* 8 codes from grid bytes (never 0) and sign bits: a set bit negates its byte. */
static void signed_codes(uint64_t bytes, unsigned signs, int8_t *out)
{
    const uint64_t low = UINT64_C(0x0101010101010101);
    uint64_t bits = signs * low & UINT64_C(0x8040201008040201); /* byte i keeps bit i */
    uint64_t ones = (bits + 0x7f * low) >> 7 & low;
    bytes = (bytes ^ ones * 255) + ones; /* no carry, as no byte is 0 */
    memcpy(out, &bytes, 8);
}

/* 8 codes of IQ1: the grid's plus or minus one. */
static void iq1_codes(uint64_t bytes, int shift, int8_t *out)
{
    memcpy(out, &bytes, 8);
    for (int i = 0; i < 8; i++)
        out[i] = (int8_t)(out[i] + shift);
}

static void codes_iq2_xxs(const struct block_iq2_xxs *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ2_XXS);
    c->d = f16_to_f32(b->d) * 0.125f;
    for (int j = 0; j < 8; j++) {
        const uint8_t *q = b->qs + 8 * j;
        uint32_t s = load32(q + 4);
        c->scale[2 * j] = c->scale[2 * j + 1] = (int8_t)(2 * (s >> 28) + 1);
        for (int i = 0; i < 4; i++)
            signed_codes(grid[q[i]], even_signs(s >> 7 * i & 127), c->code + 32 * j + 8 * i);
    }
}

static void codes_iq2_xs(const struct block_iq2_xs *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ2_XS);
    c->d = f16_to_f32(b->d) * 0.125f;
    for (int i = 0; i < 32; i++) {
        unsigned q = load16(b->qs + 2 * i);
        signed_codes(grid[q & 511], even_signs(q >> 9), c->code + 8 * i);
    }
    for (int i = 0; i < 16; i++)
        c->scale[i] = (int8_t)(2 * (b->scales[i / 2] >> 4 * (i & 1) & 15) + 1);
}

static void codes_iq2_s(const struct block_iq2_s *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ2_S);
    c->d = f16_to_f32(b->d) * 0.125f;
    for (int i = 0; i < 32; i++) {
        unsigned index = b->qs[i] | (b->qh[i / 4] >> 2 * (i % 4) & 3u) << 8;
        signed_codes(grid[index], b->signs[i], c->code + 8 * i);
    }
    for (int i = 0; i < 16; i++)
        c->scale[i] = (int8_t)(2 * (b->scales[i / 2] >> 4 * (i & 1) & 15) + 1);
}

static void codes_iq3_xxs(const struct block_iq3_xxs *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ3_XXS);
    c->d = f16_to_f32(b->d) * 0.25f;
    for (int j = 0; j < 8; j++) {
        uint32_t s = load32(b->signs + 4 * j);
        c->scale[2 * j] = c->scale[2 * j + 1] = (int8_t)(2 * (s >> 28) + 1);
        for (int i = 0; i < 4; i++) {
            const uint8_t *q = b->qs + 8 * j + 2 * i;
            signed_codes(grid[q[0]] | grid[q[1]] << 32, even_signs(s >> 7 * i & 127),
                         c->code + 32 * j + 8 * i);
        }
    }
}

static void codes_iq3_s(const struct block_iq3_s *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ3_S);
    c->d = f16_to_f32(b->d);
    for (int i = 0; i < 32; i++) {
        unsigned high = (unsigned)b->qh[i / 4] >> 2 * (i % 4);
        uint64_t first = grid[b->qs[2 * i] | (high & 1) << 8],
                 second = grid[b->qs[2 * i + 1] | (high & 2) << 7];
        signed_codes(first | second << 32, b->signs[i], c->code + 8 * i);
    }
    for (int i = 0; i < 16; i++)
        c->scale[i] = (int8_t)(2 * (b->scales[i / 4] >> (i & 2) * 2 & 15) + 1);
}

static void codes_iq1_s(const struct block_iq1_s *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ1_S);
    c->d = f16_to_f32(b->d) * 0.125f;
    for (int j = 0; j < 8; j++) {
        unsigned h = load16(b->qh + 2 * j);
        c->scale[2 * j] = c->scale[2 * j + 1] = (int8_t)(2 * (h >> 12 & 7) + 1);
        for (int i = 0; i < 4; i++)
            iq1_codes(grid[b->qs[4 * j + i] | (h >> 3 * i & 7) << 8], h & 0x8000 ? -1 : 1,
                      c->code + 32 * j + 8 * i);
    }
}

static void codes_iq1_m(const struct block_iq1_m *b, struct quant_codes *c)
{
    const uint64_t *grid = quant_grid_values(DT_IQ1_M);
    unsigned d = 0;
    for (int i = 0; i < 4; i++) /* a nibble of d at the top of each 16 bits of scales */
        d |= load16(b->scales + 2 * i) >> 12 << 4 * i;
    c->d = f16_to_f32((uint16_t)d) * 0.125f;
    for (int i = 0; i < 16; i++)
        c->scale[i] = (int8_t)(2 * (load16(b->scales + i / 4 * 2) >> 3 * (i % 4) & 7) + 1);
    for (int i = 0; i < 32; i++) {
        unsigned h = (unsigned)b->qh[i / 2] >> 4 * (i & 1);
        iq1_codes(grid[b->qs[i] | (h & 7) << 8], h & 8 ? -1 : 1, c->code + 8 * i);
    }
}

/* Digit n of a byte that holds five base-3 digits as a fraction of 256, minus one. */
static int8_t trit(uint8_t q, int n)
{
    static const uint8_t pow3[5] = {1, 3, 9, 27, 81};
    return (int8_t)(((uint8_t)(q * pow3[n]) * 3u >> 8) - 1);
}

static void codes_tq1_0(const struct block_tq1_0 *b, struct quant_codes *c)
{
    c->d = f16_to_f32(b->d);
    memset(c->scale, 1, sizeof c->scale);
    for (int i = 0; i < 160; i++)
        c->code[i] = trit(b->qs[i % 32], i / 32);
    for (int i = 0; i < 80; i++)
        c->code[160 + i] = trit(b->qs[32 + i % 16], i / 16);
    for (int i = 0; i < 16; i++)
        c->code[240 + i] = trit(b->qh[i % 4], i / 4);
}

static void codes_tq2_0(const struct block_tq2_0 *b, struct quant_codes *c)
{
    c->d = f16_to_f32(b->d);
    memset(c->scale, 1, sizeof c->scale);
    for (int i = 0; i < QK_K; i++)
        c->code[i] = (int8_t)((b->qs[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - 1);
}

bool quant_read_codes(enum dtype t, const void *block, struct quant_codes *c)
{
    union {
        struct block_iq1_s iq1_s;
        struct block_iq1_m iq1_m;
        struct block_iq2_xxs iq2_xxs;
        struct block_iq2_xs iq2_xs;
        struct block_iq2_s iq2_s;
        struct block_iq3_xxs iq3_xxs;
        struct block_iq3_s iq3_s;
        struct block_tq1_0 tq1_0;
        struct block_tq2_0 tq2_0;
    } b;
    if (!quant_has_codes(t))
        return false;
    memcpy(&b, block, (size_t)dtype_table[t].block_bytes); /* file data may be unaligned */
    switch (t) {
    case DT_IQ1_S:
        codes_iq1_s(&b.iq1_s, c);
        return true;
    case DT_IQ1_M:
        codes_iq1_m(&b.iq1_m, c);
        return true;
    case DT_IQ2_XXS:
        codes_iq2_xxs(&b.iq2_xxs, c);
        return true;
    case DT_IQ2_XS:
        codes_iq2_xs(&b.iq2_xs, c);
        return true;
    case DT_IQ2_S:
        codes_iq2_s(&b.iq2_s, c);
        return true;
    case DT_IQ3_XXS:
        codes_iq3_xxs(&b.iq3_xxs, c);
        return true;
    case DT_IQ3_S:
        codes_iq3_s(&b.iq3_s, c);
        return true;
    case DT_TQ1_0:
        codes_tq1_0(&b.tq1_0, c);
        return true;
    default:
        codes_tq2_0(&b.tq2_0, c);
        return true;
    }
}

static void dequant_codes(enum dtype t, const uint8_t *block, float *y)
{
    struct quant_codes c;
    CHECK(quant_read_codes(t, block, &c), "%s has no codes", dtype_name(t));
    for (int j = 0; j < 16; j++) {
        float scale = c.d * (float)c.scale[j];
        for (int i = 0; i < 16; i++)
            y[16 * j + i] = scale * (float)c.code[16 * j + i];
    }
}

float quant_ue4m3_half(uint8_t b)
{
    if (b == 0x7f)
        return 0;
    return b == 0xff ? 240 : 0.5f * f8e4m3_to_f32(b & 0x7f); /* the sign bit is ignored */
}

static void dequant_nvfp4(const struct block_nvfp4 *b, float *y)
{
    for (int i = 0; i < QK_NVFP4; i++) {
        int code = b->qs[i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15;
        y[i] = quant_ue4m3_half(b->d[i / 16]) * (float)quant_mxfp4_levels[code];
    }
}

static void dequant_q1_0(const struct block_q1_0 *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < QK1_0; i++)
        y[i] = b->qs[i / 8] >> i % 8 & 1 ? d : -d;
}

static void dequant_q2_0(const struct block_q2_0 *b, float *y)
{
    float d = f16_to_f32(b->d);
    for (int i = 0; i < QK2_0; i++)
        y[i] = (float)((b->qs[i / 4] >> i % 4 * 2 & 3) - 1) * d;
}

const float quant_nf4_levels[16] = {-1.0f,
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
const float quant_fp4_levels[16] = {
    0.0f,  0.0625f / 12.0f,  8.0f / 12.0f,  1.0f,  4.0f / 12.0f,  0.5f,  2.0f / 12.0f,  0.25f,
    -0.0f, -0.0625f / 12.0f, -8.0f / 12.0f, -1.0f, -4.0f / 12.0f, -0.5f, -2.0f / 12.0f, -0.25f};

static void dequant_levels(const float *levels, const struct block_nf4 *b, float *y)
{
    for (int i = 0; i < QK_NF4; i++)
        y[i] = b->d * levels[b->qs[i / 2] >> 4 * (i & 1) & 15];
}

static void dequant_nf4(const struct block_nf4 *b, float *y)
{
    dequant_levels(quant_nf4_levels, b, y);
}

static void dequant_fp4(const struct block_nf4 *b, float *y)
{
    dequant_levels(quant_fp4_levels, b, y);
}

/* Loops over a format's blocks. Blocks are copied, because file data may be unaligned. */
#define BLOCKS(len, type, fn)                                                                      \
    for (size_t i = 0; i < n; i += (len), p += sizeof(struct type)) {                              \
        struct type b;                                                                             \
        memcpy(&b, p, sizeof b);                                                                   \
        fn(&b, dst + i);                                                                           \
    }                                                                                              \
    return

bool dtype_is_weight(enum dtype t)
{
    switch (t) {
    case DT_NONE:
    case DT_I8:
    case DT_I16:
    case DT_I32:
    case DT_I64:
    case DT_F64:
    case DT_GPTQ4:
        return false;
    default:
        return true;
    }
}

void quant_dequantize(enum dtype t, const void *src, float *dst, size_t n)
{
    const uint8_t *p = src;
    CHECK(n % (size_t)dtype_table[t].block_len == 0, "%zu values of %s", n, dtype_name(t));
    switch (t) {
    case DT_F32:
        memcpy(dst, src, 4 * n);
        return;
    case DT_F16:
    case DT_BF16:
        for (size_t i = 0; i < n; i++, p += 2) {
            uint16_t h;
            memcpy(&h, p, 2);
            dst[i] = t == DT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
        }
        return;
    case DT_F64:
        for (size_t i = 0; i < n; i++, p += 8) {
            double v;
            memcpy(&v, p, 8);
            dst[i] = (float)v;
        }
        return;
    case DT_F8_E4M3:
        for (size_t i = 0; i < n; i++)
            dst[i] = f8e4m3_to_f32(p[i]);
        return;
    case DT_Q4_0:
        BLOCKS(QK_32, block_q4_0, dequant_q4_0);
    case DT_Q4_1:
        BLOCKS(QK_32, block_q4_1, dequant_q4_1);
    case DT_Q5_0:
        BLOCKS(QK_32, block_q5_0, dequant_q5_0);
    case DT_Q5_1:
        BLOCKS(QK_32, block_q5_1, dequant_q5_1);
    case DT_Q8_0:
        BLOCKS(QK_32, block_q8_0, dequant_q8_0);
    case DT_Q2_K:
        BLOCKS(QK_K, block_q2_k, dequant_q2_k);
    case DT_Q3_K:
        BLOCKS(QK_K, block_q3_k, dequant_q3_k);
    case DT_Q4_K:
        BLOCKS(QK_K, block_q4_k, dequant_q4_k);
    case DT_Q5_K:
        BLOCKS(QK_K, block_q5_k, dequant_q5_k);
    case DT_Q6_K:
        BLOCKS(QK_K, block_q6_k, dequant_q6_k);
    case DT_IQ4_NL:
        BLOCKS(QK_32, block_iq4_nl, dequant_iq4_nl);
    case DT_IQ4_XS:
        BLOCKS(QK_K, block_iq4_xs, dequant_iq4_xs);
    case DT_MXFP4:
        BLOCKS(QK_32, block_mxfp4, dequant_mxfp4);
    case DT_NVFP4:
        BLOCKS(QK_NVFP4, block_nvfp4, dequant_nvfp4);
    case DT_Q1_0:
        BLOCKS(QK1_0, block_q1_0, dequant_q1_0);
    case DT_Q2_0:
        BLOCKS(QK2_0, block_q2_0, dequant_q2_0);
    case DT_NF4:
        BLOCKS(QK_NF4, block_nf4, dequant_nf4);
    case DT_FP4:
        BLOCKS(QK_NF4, block_nf4, dequant_fp4);
    case DT_IQ1_S:
    case DT_IQ1_M:
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
    case DT_IQ3_XXS:
    case DT_IQ3_S:
    case DT_TQ1_0:
    case DT_TQ2_0:
        for (size_t i = 0; i < n; i += QK_K, p += dtype_table[t].block_bytes)
            dequant_codes(t, p, dst + i);
        return;
    case DT_NONE:
    case DT_GPTQ4:
    case DT_I8:
    case DT_I16:
    case DT_I32:
    case DT_I64:
    case DT_COUNT:
        break;
    }
    CHECK(false, "quant_dequantize of %s", t < DT_COUNT ? dtype_name(t) : "?");
}
