/*
 * The scalar meaning of every number format: the dtype table, half/bfloat16/FP8 conversions and
 * exact dequantisation. This is the specification that kernels are tested against: plain C, one
 * loop per format, no tricks. Planar formats (GPTQ, block-scaled FP8) are not handled here, since
 * their scales live elsewhere. Knows nothing of files, tensors or models.
 */
#include "quant/quant.h"
#include "base/error.h"

#include <pthread.h>
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
    [DT_F8_E4M3] = {"F8_E4M3", 1, 1},
    [DT_GPTQ4] = {"GPTQ4", 2, 1},
    [DT_I8] = {"I8", 1, 1},
    [DT_I16] = {"I16", 1, 2},
    [DT_I32] = {"I32", 1, 4},
    [DT_I64] = {"I64", 1, 8},
    [DT_F64] = {"F64", 1, 8},
};

/* The structs are file layouts: a compiler that pads one must fail here. */
_Static_assert(sizeof(struct block_q4_0) == 18 && sizeof(struct block_q4_1) == 20, "layout");
_Static_assert(sizeof(struct block_q5_0) == 22 && sizeof(struct block_q5_1) == 24, "layout");
_Static_assert(sizeof(struct block_q8_0) == 34 && sizeof(struct block_mxfp4) == 17, "layout");
_Static_assert(sizeof(struct block_q2_k) == 84 && sizeof(struct block_q3_k) == 110, "layout");
_Static_assert(sizeof(struct block_q4_k) == 144 && sizeof(struct block_q5_k) == 176, "layout");
_Static_assert(sizeof(struct block_q6_k) == 210 && sizeof(struct block_iq4_nl) == 18, "layout");
_Static_assert(sizeof(struct block_iq4_xs) == 136 && sizeof(struct block_iq3_s) == 110, "layout");

static const struct {
    uint8_t id;
    enum dtype type;
} ggml_ids[] = {
    {0, DT_F32},    {1, DT_F16},     {2, DT_Q4_0},    {3, DT_Q4_1},   {6, DT_Q5_0},  {7, DT_Q5_1},
    {8, DT_Q8_0},   {10, DT_Q2_K},   {11, DT_Q3_K},   {12, DT_Q4_K},  {13, DT_Q5_K}, {14, DT_Q6_K},
    {21, DT_IQ3_S}, {20, DT_IQ4_NL}, {23, DT_IQ4_XS}, {24, DT_I8},    {25, DT_I16},  {26, DT_I32},
    {27, DT_I64},   {28, DT_F64},    {30, DT_BF16},   {39, DT_MXFP4},
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
        /* Below the normal halves: adding 0.5 puts the wanted bits, rounded, at the bottom. */
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

const int8_t quant_iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
const int8_t quant_mxfp4_levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float quant_mxfp4_scale(uint8_t e)
{
    return float_from_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

/*
 * The IQ3_S grid is part of the format: 512 of the 4096 points with four digits 0..7. It is in
 * ascending order, so a set of 4096 bits says it all: bit i of the set is the point whose digits
 * are those of i in base 8, lowest first.
 */
static const uint64_t iq3s_set[64] = {
    0x92050aa5082357a7, 0x0422001022892317, 0x09000aa4112249a3, 0x228005104a052208,
    0x0100020904128801, 0x084000a208450014, 0x0200040002000a40, 0x0000110008450015,
    0x040250005205ab17, 0x410005020902114b, 0x040120090411a401, 0x0104000211820992,
    0x000011440a001428, 0x0000020005020902, 0x0000005000910000, 0x010400022002050a,
    0x2980052a058a55ab, 0x0000020412248905, 0x12008802810a0092, 0x004001040a140225,
    0x2400000224090082, 0x0100080180040210, 0x0002200000020085, 0x0000010801400220,
    0x020802942a04aa04, 0x44010001000a102a, 0x0000010014010401, 0x0800208a018a1102,
    0x0011040002044208, 0x0800401004200502, 0x0000000200004000, 0x000000002005000a,
    0x0100010204910411, 0x0000220821040a84, 0x010480010802210a, 0x0000000022050a10,
    0x0200000180100005, 0x00040000000200a0, 0x0001000010000800, 0x0000020801002100,
    0x1040049100041104, 0x040000000402042a, 0x0000080041080201, 0x0820021000800184,
    0x0000004004010012, 0x00000a0000400400, 0x0000000400000000, 0x0000000000040014,
    0x000100000a002a00, 0x0010000000810001, 0x0104200410000400, 0x0000000100021001,
    0x0004000800200000, 0x0001000010000009, 0x0000000100000020, 0x0000000000000a00,
    0x0004100140050091, 0x0000002800100204, 0x0000020001024112, 0x0000080024000004,
    0x0000010000010822, 0x0000000400040000, 0x0000000002000004, 0x0000000000000001,
};

static uint16_t iq3s_grid[512];
static pthread_once_t iq3s_once = PTHREAD_ONCE_INIT;

static void iq3s_expand(void)
{
    int n = 0;
    for (unsigned i = 0; i < 4096; i++)
        if (iq3s_set[i / 64] >> i % 64 & 1)
            iq3s_grid[n++] = (uint16_t)i;
    CHECK(n == 512, "IQ3_S grid has %d points", n);
}

const uint16_t *quant_iq3s_grid(void)
{
    pthread_once(&iq3s_once, iq3s_expand);
    return iq3s_grid;
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

static void dequant_iq3_s(const struct block_iq3_s *b, float *y)
{
    const uint16_t *grid = quant_iq3s_grid();
    float d = f16_to_f32(b->d);
    for (int i = 0; i < QK_K; i++) {
        float ds = d * (float)(1 + 2 * (b->scales[i / 64] >> (i % 64 / 32 * 4) & 15));
        int index = b->qs[i / 4] | (b->qh[i / 32] >> (i % 32 / 4) & 1) << 8;
        int v = 2 * (grid[index] >> (3 * (i % 4)) & 7) + 1;
        y[i] = ds * (float)(b->signs[i / 8] >> i % 8 & 1 ? -v : v);
    }
}

/* A format's loop over its blocks. Blocks are copied out, since file data may be unaligned. */
#define BLOCKS(len, type, fn)                                                                      \
    for (size_t i = 0; i < n; i += (len), p += sizeof(struct type)) {                              \
        struct type b;                                                                             \
        memcpy(&b, p, sizeof b);                                                                   \
        fn(&b, dst + i);                                                                           \
    }                                                                                              \
    return

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
    case DT_IQ3_S:
        BLOCKS(QK_K, block_iq3_s, dequant_iq3_s);
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
