/*
 * Compressed layouts of folders (model/layout.h): matrices of random codes are packed the way each tool
 * does it, by plain loops written from its description, and must come back exactly, whole, in part
 * and from a stack. Then every tensor of every layout is spoiled in turn (missing, another type,
 * another shape, scales that are no numbers, groups out of range): one line that names it.
 */
#include "model/layout.h"
#include "backend/rawweight.h"
#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static uint64_t seed = 1;

static uint32_t rnd(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

enum { MAX_TENSORS = 8, N_IN = 256, N_OUT = 48, STACK = 3 };

/* A matrix's tensors, what it should read as, and how it is asked for. */
struct box {
    struct tensor t[MAX_TENSORS];
    int n;
    struct layout_config config;
    int n_stack;
    bool transposed;
    float *want; /* (stack, N_OUT, N_IN) */
};

static uint8_t *add(struct box *b, const char *name, enum dtype type, const char *type_name,
                    size_t width, int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
    struct tensor *t = &b->t[b->n];
    size_t bytes = (size_t)(d0 * d1 * d2 * d3) * width;
    uint8_t *data = mem_zalloc(bytes, 1);
    *t = (struct tensor){.name = name,
                         .type = type,
                         .type_name = type_name,
                         .n_dims = 2,
                         .dims = {d0, d1, d2, d3},
                         .data = data,
                         .bytes = bytes};
    b->n++;
    return data;
}

static void box_free(struct box *b)
{
    for (int i = 0; i < b->n; i++)
        mem_free((void *)(uintptr_t)b->t[i].data);
    mem_free(b->want);
}

static const struct tensor *find(void *arg, const char *suffix)
{
    const struct box *b = arg;
    for (int i = 0; i < b->n; i++)
        if (!strcmp(b->t[i].name + 2, suffix))
            return &b->t[i];
    return NULL;
}

static bool box_find(struct box *b, struct packed_layout *l, struct error *err)
{
    struct layout_ask ask = {"folder", find, b, &b->config, N_IN, N_OUT, b->n_stack, b->transposed};
    return layout_find(&ask, l, err);
}

/* Reads rows as floats; false with an error. */
static bool read_rows(const struct packed_layout *l, const struct layout_rows *r, float *out,
                      struct error *err)
{
    struct layout_bytes bytes = layout_bytes(l, r->n);
    /* exactly as much as is asked for: a sanitizer sees more */
    uint8_t *data = mem_zalloc(bytes.data + 1, 1), *zero = mem_zalloc(bytes.zero + 1, 1);
    void *scale = mem_zalloc(bytes.scale + 1, 1);
    int32_t *order = mem_zalloc(bytes.order + 1, 1);
    struct layout_planes to = {data, scale, zero, order};
    bool permuted, ok = layout_read(l, "folder", r, &to, &permuted, err);
    const uint8_t *d = data, *z = zero;
    const void *s = scale;
    const int32_t *o = order;
    struct raw_weight w = {.n_in = N_IN, .n_out = r->n, .n_expert = 1, .n_seg = 1};
    w.seg[0] = (struct raw_seg){
        l->type, r->n, &d, bytes.scale ? &s : NULL, &z, permuted ? &o : NULL, l->group_len};
    for (int i = 0; ok && i < r->n; i++)
        raw_weight_row(&w, 0, i, out + (size_t)i * N_IN);
    mem_free(data);
    mem_free(zero);
    mem_free(scale);
    mem_free(order);
    return ok;
}

/* Whole, every other row from the third on, and two of each seven from the second on. */
static void check(struct box *b, enum dtype type, const char *what)
{
    struct packed_layout l;
    struct error err = {{0}};
    if (!box_find(b, &l, &err))
        fail_msg("%s: %s", what, err.msg);
    assert_int_equal(l.type, type);
    float *got = mem_zalloc(N_OUT * N_IN, sizeof *got);
    for (int s = 0; s < (b->n_stack ? b->n_stack : 1); s++)
        for (int part = 0; part < 3; part++) {
            static const struct layout_rows parts[] = {
                {.step = 1, .n = N_OUT},
                {.first = 3, .step = 2, .n = (N_OUT - 3) / 2},
                {.first = 2, .step = 7, .n = 13, .run_length = 2}};
            struct layout_rows r = parts[part];
            r.index = s;
            if (!read_rows(&l, &r, got, &err))
                fail_msg("%s: %s", what, err.msg);
            for (int i = 0; i < r.n; i++)
                for (int j = 0; j < N_IN; j++) {
                    int row = r.run_length
                                  ? r.first + r.step * (i / r.run_length) + i % r.run_length
                                  : r.first + r.step * i;
                    float w = b->want[(s * N_OUT + row) * N_IN + j];
                    float g = got[i * N_IN + j];
                    if (memcmp(&w, &g, 4) && fabsf(w - g) > 1e-6f * fabsf(w))
                        fail_msg("%s: row %d column %d: %g, not %g", what, i, j, (double)g,
                                 (double)w);
                }
        }
    mem_free(got);
}

/* Int4 in three packings */

struct int4 {
    int code[N_OUT][N_IN], zero[N_OUT][N_IN], group[N_IN]; /* zero by group */
    float scale[N_OUT][N_IN];
    int n_groups;
};

static struct int4 *int4_new(struct box *b, int len, bool order, bool symmetric)
{
    struct int4 *q = mem_zalloc(1, sizeof *q);
    q->n_groups = N_IN / len;
    for (int j = 0; j < N_IN; j++)
        q->group[j] = order ? j % q->n_groups : j / len;
    b->want = mem_zalloc(N_OUT * N_IN, sizeof *b->want);
    for (int o = 0; o < N_OUT; o++) {
        for (int g = 0; g < q->n_groups; g++) {
            q->zero[o][g] = symmetric ? 8 : (int)(1 + rnd() % 15);
            q->scale[o][g] = (float)(1 + rnd() % 200) / 4096;
        }
        for (int j = 0; j < N_IN; j++) {
            q->code[o][j] = (int)(rnd() % 16);
            b->want[o * N_IN + j] =
                (float)(q->code[o][j] - q->zero[o][q->group[j]]) * q->scale[o][q->group[j]];
        }
    }
    return q;
}

static void put_nibble(uint8_t *words, int word, int at, int v)
{
    uint32_t w;
    memcpy(&w, words + 4 * word, 4);
    w |= (uint32_t)v << 4 * at;
    memcpy(words + 4 * word, &w, 4);
}

static void put_half(uint8_t *p, int i, float v)
{
    uint16_t h = f32_to_f16(v);
    memcpy(p + 2 * i, &h, 2);
}

static void add_order(struct box *b, const char *name, const struct int4 *q)
{
    uint8_t *order = add(b, name, DT_I32, "I32", 4, N_IN, 1, 1, 1);
    for (int j = 0; j < N_IN; j++)
        memcpy(order + 4 * j, &q->group[j], 4);
}

static struct box gptq(bool v1, bool order, int len)
{
    struct box b = {.config = {.group_len = len, .zero_plus = v1}};
    struct int4 *q = int4_new(&b, len < 0 ? N_IN : len, order, false);
    uint8_t *codes = add(&b, "m.qweight", DT_I32, "I32", 4, N_OUT, N_IN / 8, 1, 1);
    uint8_t *zeros = add(&b, "m.qzeros", DT_I32, "I32", 4, N_OUT / 8, q->n_groups, 1, 1);
    uint8_t *scales = add(&b, "m.scales", DT_F16, "F16", 2, N_OUT, q->n_groups, 1, 1);
    for (int o = 0; o < N_OUT; o++) {
        for (int j = 0; j < N_IN; j++)
            put_nibble(codes, j / 8 * N_OUT + o, j % 8, q->code[o][j]);
        for (int g = 0; g < q->n_groups; g++) {
            put_nibble(zeros, g * (N_OUT / 8) + o / 8, o % 8, q->zero[o][g] - v1);
            put_half(scales, g * N_OUT + o, q->scale[o][g]);
        }
    }
    if (order)
        add_order(&b, "m.g_idx", q);
    mem_free(q);
    return b;
}

static struct box awq(void)
{
    static const int at[8] = {0, 2, 4, 6, 1, 3, 5, 7}; /* output that nibble i holds */
    struct box b = {.config = {.awq = true, .group_len = 64}};
    struct int4 *q = int4_new(&b, 64, false, false);
    uint8_t *codes = add(&b, "m.qweight", DT_I32, "I32", 4, N_OUT / 8, N_IN, 1, 1);
    uint8_t *zeros = add(&b, "m.qzeros", DT_I32, "I32", 4, N_OUT / 8, q->n_groups, 1, 1);
    uint8_t *scales = add(&b, "m.scales", DT_F16, "F16", 2, N_OUT, q->n_groups, 1, 1);
    for (int w = 0; w < N_OUT / 8; w++)
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < N_IN; j++)
                put_nibble(codes, j * (N_OUT / 8) + w, i, q->code[8 * w + at[i]][j]);
            for (int g = 0; g < q->n_groups; g++)
                put_nibble(zeros, g * (N_OUT / 8) + w, i, q->zero[8 * w + at[i]][g]);
        }
    for (int o = 0; o < N_OUT; o++)
        for (int g = 0; g < q->n_groups; g++)
            put_half(scales, g * N_OUT + o, q->scale[o][g]);
    mem_free(q);
    return b;
}

/* zeros: 0 symmetric, 1 packed, 2 as bytes */
static struct box ct_int4(int len, int zeros, bool order)
{
    struct box b = {0};
    struct int4 *q = int4_new(&b, len, order, zeros == 0);
    uint8_t *codes = add(&b, "m.weight_packed", DT_I32, "I32", 4, N_IN / 8, N_OUT, 1, 1);
    uint8_t *scales = add(&b, "m.weight_scale", DT_BF16, "BF16", 2, q->n_groups, N_OUT, 1, 1);
    uint8_t *z =
        zeros == 1 ? add(&b, "m.weight_zero_point", DT_I32, "I32", 4, q->n_groups, N_OUT / 8, 1, 1)
        : zeros == 2 ? add(&b, "m.weight_zero_point", DT_I8, "I8", 1, q->n_groups, N_OUT, 1, 1)
                     : NULL;
    for (int o = 0; o < N_OUT; o++) {
        for (int j = 0; j < N_IN; j++)
            put_nibble(codes, o * (N_IN / 8) + j / 8, j % 8, q->code[o][j]);
        for (int g = 0; g < q->n_groups; g++) {
            uint16_t s = f32_to_bf16(q->scale[o][g]);
            memcpy(scales + 2 * (o * q->n_groups + g), &s, 2);
            if (zeros == 1)
                put_nibble(z, o / 8 * q->n_groups + g, o % 8, q->zero[o][g]);
            if (zeros == 2)
                z[o * q->n_groups + g] = (uint8_t)(q->zero[o][g] - 8);
        }
    }
    if (order)
        add_order(&b, "m.weight_g_idx", q);
    mem_free(q);
    return b;
}

/* FP8 with a scale per block of rows x cols; names as the tools have them. */
static struct box fp8(const char *scale, int rows, int cols, int n_stack, bool flat)
{
    struct box b = {.config = {.block = {rows, cols}}, .n_stack = n_stack};
    int stack = n_stack ? n_stack : 1, down = (N_OUT + rows - 1) / rows,
        n_across = (N_IN + cols - 1) / cols;
    uint8_t *codes = add(&b, "m.weight", DT_F8_E4M3, "F8_E4M3", 1, N_IN, N_OUT, stack, 1);
    float *s = (float *)(flat ? add(&b, scale, DT_F32, "F32", 4, down * n_across, 1, stack, 1)
                              : add(&b, scale, DT_F32, "F32", 4, n_across, down, stack, 1));
    for (int i = 0; i < down * n_across * stack; i++)
        s[i] = (float)(1 + rnd() % 100) / 64;
    b.want = mem_zalloc((size_t)(stack * N_OUT * N_IN), sizeof *b.want);
    for (int i = 0; i < stack * N_OUT * N_IN; i++) {
        codes[i] = (uint8_t)(rnd() % 0x7f | (rnd() & 1) << 7);
        int m = i / (N_OUT * N_IN), o = i / N_IN % N_OUT, j = i % N_IN;
        b.want[i] =
            f8e4m3_to_f32(codes[i]) * s[m * down * n_across + o / rows * n_across + j / cols];
    }
    return b;
}

/* 8 bits: of GPTQ (0), packed (1) or bytes (2), in groups of `len`. */
static struct box int8(int how, int len)
{
    struct box b = {.config = {.group_len = len, .zero_plus = true}};
    int n_groups = N_IN / len;
    bool words = how < 2;
    uint8_t *codes = how == 0 ? add(&b, "m.qweight", DT_I32, "I32", 4, N_OUT, N_IN / 4, 1, 1)
                     : how == 1
                         ? add(&b, "m.weight_packed", DT_I32, "I32", 4, N_IN / 4, N_OUT, 1, 1)
                         : add(&b, "m.weight", DT_I8, "I8", 1, N_IN, N_OUT, 1, 1);
    uint8_t *scales = how == 0 ? add(&b, "m.scales", DT_F16, "F16", 2, N_OUT, n_groups, 1, 1)
                               : add(&b, "m.weight_scale", DT_F16, "F16", 2, n_groups, N_OUT, 1, 1);
    if (how == 0)
        memset(add(&b, "m.qzeros", DT_I32, "I32", 4, N_OUT / 4, n_groups, 1, 1), 127,
               (size_t)(N_OUT * n_groups));
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int o = 0; o < N_OUT; o++)
        for (int j = 0; j < N_IN; j++) {
            int code = (int)(rnd() % 256) - 128, g = j / len;
            int at = how == 0 ? (j / 4 * N_OUT + o) * 4 + j % 4 : o * N_IN + j;
            float scale = (float)(1 + (o * 7 + g) % 200) / 4096;
            codes[at] = (uint8_t)(words ? code + 128 : code);
            put_half(scales, how == 0 ? g * N_OUT + o : o * n_groups + g, scale);
            b.want[o * N_IN + j] = (float)code * scale;
        }
    return b;
}

static const float fp4[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                              -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

/* n_stack of them, transposed or not, with a number for each or (one) for all. */
static struct box nvfp4(bool modelopt, int n_stack, bool transposed, bool one)
{
    struct box b = {.n_stack = n_stack, .transposed = transposed};
    int stack = n_stack ? n_stack : 1, n = stack * N_OUT * N_IN, wide = N_IN / 2, each = N_IN / 16;
    uint8_t *codes = add(&b, modelopt ? "m.weight" : "m.weight_packed", DT_NONE, "U8", 1,
                         transposed ? N_OUT : wide, transposed ? wide : N_OUT, stack, 1);
    uint8_t *scales = add(&b, "m.weight_scale", DT_F8_E4M3, "F8_E4M3", 1, transposed ? N_OUT : each,
                          transposed ? each : N_OUT, stack, 1);
    float *global = (float *)add(&b, modelopt ? "m.weight_scale_2" : "m.weight_global_scale",
                                 DT_F32, "F32", 4, one ? 1 : stack, 1, 1, 1);
    for (int i = 0; i < (one ? 1 : stack); i++)
        global[i] = modelopt ? 0.037f + (float)i : 27 - (float)i;
    b.want = mem_zalloc((size_t)n, sizeof *b.want);
    for (int i = 0; i < n / 16; i++)
        scales[i] = (uint8_t)(rnd() % 0x7f);
    for (int i = 0; i < n; i++) {
        int m = i / (N_OUT * N_IN), o = i / N_IN % N_OUT, j = i % N_IN;
        int at = transposed ? (m * wide + j / 2) * N_OUT + o : i / 2;
        int s = transposed ? (m * each + j / 16) * N_OUT + o : i / 16;
        unsigned code = rnd() % 16;
        codes[at] |= (uint8_t)(code << i % 2 * 4);
        float g = global[one ? 0 : m];
        b.want[i] = fp4[code] * f8e4m3_to_f32(scales[s]) * (modelopt ? g : 1 / g);
    }
    return b;
}

static struct box mxfp4(bool stacked)
{
    struct box b = {.n_stack = stacked ? STACK : 0};
    int stack = stacked ? STACK : 1;
    uint8_t *codes = stacked ? add(&b, "m.blocks", DT_NONE, "U8", 1, 16, N_IN / 32, N_OUT, stack)
                             : add(&b, "m.weight_packed", DT_NONE, "U8", 1, N_IN / 2, N_OUT, 1, 1);
    uint8_t *scales = add(&b, stacked ? "m.scales" : "m.weight_scale", DT_NONE, "U8", 1, N_IN / 32,
                          N_OUT, stack, 1);
    b.want = mem_zalloc((size_t)(stack * N_OUT * N_IN), sizeof *b.want);
    for (int i = 0; i < stack * N_OUT * N_IN / 32; i++)
        scales[i] = (uint8_t)(100 + rnd() % 40);
    for (int i = 0; i < stack * N_OUT * N_IN; i++) {
        unsigned code = rnd() % 16;
        codes[i / 2] |= (uint8_t)(code << i % 2 * 4);
        b.want[i] = ldexpf(fp4[code], scales[i / 32] - 127);
    }
    return b;
}

static struct box mlx(int bits, int len, int n_stack)
{
    struct box b = {.n_stack = n_stack, .config = {.mlx_bits = bits}};
    int stack = n_stack ? n_stack : 1, n_groups = N_IN / len, n = stack * N_OUT * N_IN;
    uint8_t *codes = add(&b, "m.weight", DT_NONE, "U32", 4, N_IN * bits / 32, N_OUT, stack, 1);
    uint8_t *scales = add(&b, "m.scales", DT_F16, "F16", 2, n_groups, N_OUT, stack, 1);
    uint8_t *least = add(&b, "m.biases", DT_F16, "F16", 2, n_groups, N_OUT, stack, 1);
    b.want = mem_zalloc((size_t)n, sizeof *b.want);
    for (int i = 0; i < n; i++) {
        unsigned code = rnd() % (1u << bits);
        int g = i / len;
        float s = (float)(1 + g % 100) / 1024, m = -(float)(g % 37) / 64;
        put_half(scales, g, s);
        put_half(least, g, m);
        for (int k = 0; k < bits; k++) {
            size_t at = (size_t)i * (size_t)bits + (size_t)k;
            codes[at / 8] |= (uint8_t)((code >> k & 1) << at % 8);
        }
        float w = s * (float)code + m;
        b.want[i] = bits > 5 ? f16_to_f32(f32_to_f16(w)) : w;
    }
    return b;
}

/* AWQ gemv_fast: place p of the 256 codes of 64 columns of 4 rows is bits 4 * (p % 4) of word p / 4. */
static struct box gemv_fast(void)
{
    enum { LEN = 64, GROUPS = N_IN / LEN, WIDE = 16 };
    struct box b = {.config = {.awq = true, .gemv_fast = true, .group_len = LEN, .bits = 4}};
    uint8_t *codes = add(&b, "m.qweight", DT_NONE, "I16", 2, N_IN, N_OUT / 4, 1, 1);
    uint8_t *scales = add(&b, "m.scales", DT_F16, "F16", 2, N_OUT, WIDE, 1, 1);
    uint8_t *least = add(&b, "m.scaled_zeros", DT_F16, "F16", 2, N_OUT, WIDE, 1, 1);
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int o = 0; o < N_OUT; o++)
        for (int j = 0; j < N_IN; j++) {
            unsigned code = rnd() % 16;
            int at = j / LEN * N_OUT + o;
            float s = (float)(1 + at % 100) / 1024, m = -(float)(at % 37) / 64;
            put_half(scales, at, s);
            put_half(least, at, m);
            int bits = j % 32; /* abbcc of the column becomes bbcaa in its 32 */
            int place = (bits >> 1 & 3) << 3 | (bits & 1) << 2 | bits >> 3;
            int p = o % 4 * 64 + j % 64 / 32 * 32 + place,
                word = o / 4 * N_IN + j / 64 * 64 + p / 4;
            codes[2 * word + p % 4 / 2] |= (uint8_t)(code << p % 2 * 4);
            b.want[o * N_IN + j] = s * (float)code + m;
        }
    return b;
}

static void add_int(struct box *b, const char *name, int32_t v)
{
    memcpy(add(b, name, DT_I32, "I32", 4, 1, 1, 1, 1), &v, sizeof v);
}

static struct box hqq(int bits, int len, bool across)
{
    struct box b = {0};
    int n = N_OUT * N_IN, groups = n / len, high = across ? len : groups, wide = n / high;
    int per = bits == 3 ? 10 : 8 / bits, step = (high + per - 1) / per, each = bits == 3 ? 4 : 1;
    uint8_t *codes = add(&b, "m.W_q", bits == 3 ? DT_I32 : DT_NONE, bits == 3 ? "I32" : "U8",
                         (size_t)each, wide, step, 1, 1);
    uint8_t *scales = add(&b, "m.scale", DT_F16, "F16", 2, 1, groups, 1, 1);
    uint8_t *zeros = add(&b, "m.zero", DT_F16, "F16", 2, 1, groups, 1, 1);
    add_int(&b, "m.nbits", bits);
    add_int(&b, "m.group_size", len);
    add_int(&b, "m.axis", !across);
    b.want = mem_zalloc((size_t)n, sizeof *b.want);
    for (int i = 0; i < n; i++) {
        uint32_t code = rnd() % (1u << bits), word = 0;
        int g = across ? i % groups : i / len, e = across ? i / groups : i % len;
        int row = across ? e : g, column = across ? g : e;
        float s = (float)(1 + g % 100) / 1024, z = (float)(g % 8) / 2;
        put_half(scales, g, s);
        put_half(zeros, g, z);
        uint8_t *at = codes + (row % step * wide + column) * each;
        memcpy(&word, at, (size_t)each);
        word |= code << (per - 1 - row / step) * bits;
        memcpy(at, &word, (size_t)each);
        float least = f16_to_f32(f32_to_f16(-z * s));
        float half = f16_to_f32(f32_to_f16(((float)code - z) * s));
        b.want[i] = across      ? half
                    : bits == 8 ? f16_to_f32(f32_to_f16(s * (float)code + -z * s))
                                : s * (float)code + least;
    }
    return b;
}

/* torchao: signed codes, two in a byte or one. */
static struct box torchao(bool four)
{
    enum { LEN = 32, GROUPS = N_IN / LEN };
    struct box b = {.config = {.bits = four ? 4 : 8}};
    uint8_t *codes =
        add(&b, "m._weight_qdata", DT_I8, "I8", 1, four ? N_IN / 2 : N_IN, N_OUT, 1, 1);
    int64_t across = four ? N_OUT : GROUPS, down = four ? GROUPS : N_OUT;
    uint8_t *scales = add(&b, "m._weight_scale", DT_F16, "F16", 2, across, down, 1, 1);
    uint8_t *zeros = add(&b, "m._weight_zero_point", four ? DT_F16 : DT_I8, four ? "F16" : "I8",
                         four ? 2 : 1, across, down, 1, 1);
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int i = 0; i < N_OUT * N_IN; i++) {
        int code = (int)(rnd() % (four ? 16 : 200)) - (four ? 8 : 100), o = i / N_IN, j = i % N_IN;
        int g = four ? j / LEN * N_OUT + o : o * GROUPS + j / LEN, zero = g % 20 - 10;
        float s = (float)(1 + g % 100) / 1024, m = (float)(g % 37) / 64;
        put_half(scales, g, s);
        if (four) {
            put_half(zeros, g, m);
            codes[i / 2] |= (uint8_t)((code & 15) << i % 2 * 4);
            b.want[i] = s * (float)(code + 8) + f16_to_f32(f32_to_f16(m - 8 * s));
        } else {
            zeros[g] = (uint8_t)zero;
            codes[i] = (uint8_t)code;
            b.want[i] = s * (float)(code - zero);
        }
    }
    return b;
}

static struct box ternary(bool divides)
{
    struct box b = {.config = {.ternary = true, .divides = divides}};
    enum { PART = N_OUT / 4 };
    uint8_t *codes = add(&b, "m.weight", DT_NONE, "U8", 1, N_IN, PART, 1, 1);
    put_half(add(&b, "m.weight_scale", DT_F16, "F16", 2, 1, 1, 1, 1), 0, divides ? 8 : 0.375f);
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int i = 0; i < N_OUT * N_IN; i++) {
        unsigned code = rnd() % 3;
        int o = i / N_IN;
        codes[o % PART * N_IN + i % N_IN] |= (uint8_t)(code << o / PART * 2);
        b.want[i] = ((float)code - 1) * (divides ? 0.125f : 0.375f);
    }
    return b;
}

static struct box mxfp8(void)
{
    struct box b = {0};
    uint8_t *codes = add(&b, "m.weight", DT_F8_E4M3, "F8_E4M3", 1, N_IN, N_OUT, 1, 1);
    uint8_t *scales = add(&b, "m.weight_scale", DT_NONE, "U8", 1, N_IN / 32, N_OUT, 1, 1);
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int i = 0; i < N_OUT * N_IN / 32; i++)
        scales[i] = (uint8_t)(100 + rnd() % 40);
    for (int i = 0; i < N_OUT * N_IN; i++) {
        codes[i] = (uint8_t)(rnd() % 2 << 7 | rnd() % 0x7f);
        b.want[i] = ldexpf(f8e4m3_to_f32(codes[i]), scales[i / 32] - 127);
    }
    return b;
}

/* bitsandbytes' 4 bits with the levels of a type (F16: with others), scales of floats or (nested) of bytes. */
static struct box bnb4(enum dtype type, bool nested)
{
    static const char state[] =
        "{\"blocksize\": 64, \"nested_blocksize\": 256, \"nested_offset\": 0.5}";
    struct box b = {0};
    enum { BLOCKS = N_OUT * N_IN / 64 };
    uint8_t *codes = add(&b, "m.weight", DT_NONE, "U8", 1, 1, N_OUT * N_IN / 2, 1, 1);
    uint8_t *text = add(&b, "m.weight.quant_state.bitsandbytes__nf4", DT_NONE, "U8", 1,
                        (int64_t)strlen(state), 1, 1, 1);
    memcpy(text, state, strlen(state));
    float *levels = (float *)add(&b, "m.weight.quant_map", DT_F32, "F32", 4, 16, 1, 1, 1);
    float scale[BLOCKS];
    for (int i = 0; i < 16; i++)
        levels[i] = type == DT_F16 ? (float)(i * i - 60) / 128 : quant_levels(type)[i];
    if (nested) {
        uint8_t *s = add(&b, "m.weight.absmax", DT_NONE, "U8", 1, BLOCKS, 1, 1, 1);
        float *map = (float *)add(&b, "m.weight.nested_quant_map", DT_F32, "F32", 4, 256, 1, 1, 1);
        float *top = (float *)add(&b, "m.weight.nested_absmax", DT_F32, "F32", 4, 1, 1, 1, 1);
        for (int i = 0; i < 256; i++)
            map[i] = (float)(i - 128) / 256;
        top[0] = 0.75f;
        for (int i = 0; i < BLOCKS; i++) {
            s[i] = (uint8_t)(rnd() % 256);
            scale[i] = map[s[i]] * top[0] + 0.5f;
        }
    } else {
        float *s = (float *)add(&b, "m.weight.absmax", DT_F32, "F32", 4, BLOCKS, 1, 1, 1);
        for (int i = 0; i < BLOCKS; i++)
            scale[i] = s[i] = (float)(1 + rnd() % 100) / 64;
    }
    b.want = mem_zalloc(N_OUT * N_IN, sizeof *b.want);
    for (int i = 0; i < N_OUT * N_IN; i++) {
        unsigned code = rnd() % 16;
        codes[i / 2] |= (uint8_t)(code << (i % 2 ? 0 : 4)); /* the first is above */
        float value = levels[code] * scale[i / 64];
        b.want[i] = type == DT_F16 ? f16_to_f32(f32_to_f16(value)) : value;
    }
    return b;
}

static struct {
    const char *name;
    enum dtype type;
    struct box box;
} all[64];
static int n_all;

static void put(const char *name, enum dtype type, struct box box)
{
    assert_true(n_all < (int)(sizeof all / sizeof *all));
    all[n_all].name = name;
    all[n_all].type = type;
    all[n_all++].box = box;
}

static int make_all(void **state)
{
    (void)state;
    put("GPTQ v1", DT_GPTQ4, gptq(true, false, 128));
    put("GPTQ v2, ordered", DT_GPTQ4, gptq(false, true, 32));
    put("GPTQ, whole rows", DT_GPTQ4, gptq(true, false, -1));
    put("AWQ", DT_GPTQ4, awq());
    put("Int4 by group", DT_GPTQ4, ct_int4(128, 0, false));
    put("Int4 by channel", DT_GPTQ4, ct_int4(N_IN, 0, false));
    put("Int4, zero points", DT_GPTQ4, ct_int4(64, 1, false));
    put("Int4, zero points as bytes, ordered", DT_GPTQ4, ct_int4(32, 2, true));
    put("GPTQ, 8 bits", DT_Q8_0, int8(0, 64));
    put("Int8, packed", DT_Q8_0, int8(1, 32));
    put("Int8, bytes", DT_Q8_0, int8(2, N_IN));
    put("Int8, bytes by group", DT_Q8_0, int8(2, 128));
    put("FP8 by tensor", DT_F8_E4M3, fp8("m.weight_scale", N_OUT, N_IN, 0, false));
    put("FP8 by channel", DT_F8_E4M3, fp8("m.weight_scale", 1, N_IN, 0, false));
    put("FP8 by channel, flat", DT_F8_E4M3, fp8("m.weight_scale", 1, N_IN, 0, true));
    put("FP8 by block", DT_F8_E4M3, fp8("m.weight_scale_inv", 32, 128, 0, false));
    put("FP8 by block, stacked", DT_F8_E4M3, fp8("m.weight_scale_inv", 16, 128, STACK, false));
    put("NVFP4", DT_NVFP4, nvfp4(false, 0, false, true));
    put("NVFP4, ModelOpt", DT_NVFP4, nvfp4(true, 0, false, true));
    put("NVFP4, stacked", DT_NVFP4, nvfp4(false, STACK, false, false));
    put("NVFP4, stacked, transposed", DT_NVFP4, nvfp4(true, STACK, true, true));
    put("bitsandbytes, other levels", DT_F16, bnb4(DT_F16, false));
    put("bitsandbytes, other levels, nested", DT_F16, bnb4(DT_F16, true));
    put("bitsandbytes, NF4", DT_NF4, bnb4(DT_NF4, false));
    put("bitsandbytes, NF4, nested", DT_NF4, bnb4(DT_NF4, true));
    put("bitsandbytes, FP4, nested", DT_FP4, bnb4(DT_FP4, true));
    put("MXFP4", DT_MXFP4, mxfp4(false));
    put("MXFP4, stacked", DT_MXFP4, mxfp4(true));
    put("MLX, 2 bits", DT_Q4_1, mlx(2, 64, 0));
    put("MLX, 3 bits", DT_Q4_1, mlx(3, 32, 0));
    put("MLX, 4 bits, stacked", DT_Q4_1, mlx(4, 64, STACK));
    put("MLX, 5 bits", DT_Q5_1, mlx(5, 128, 0));
    put("MLX, 6 bits", DT_F16, mlx(6, 64, 0));
    put("MLX, 8 bits", DT_F16, mlx(8, 32, 0));
    put("AWQ gemv_fast", DT_Q4_1, gemv_fast());
    put("HQQ, 4 bits", DT_Q4_1, hqq(4, 64, false));
    put("HQQ, 3 bits, groups over rows", DT_Q4_1, hqq(3, 96, false));
    put("HQQ, 1 bit", DT_Q4_1, hqq(1, 32, false));
    put("HQQ, 8 bits", DT_F16, hqq(8, 128, false));
    put("HQQ, groups across", DT_F16, hqq(4, 64, true));
    put("torchao, 4 bits", DT_Q4_1, torchao(true));
    put("torchao, 8 bits with zero points", DT_Q8_0, torchao(false));
    put("BitNet", DT_TQ2_0, ternary(false));
    put("BitNet, a scale that divides", DT_TQ2_0, ternary(true));
    put("MXFP8", DT_BF16, mxfp8());
    return 0;
}

static int free_all(void **state)
{
    (void)state;
    for (int i = 0; i < n_all; i++)
        box_free(&all[i].box);
    return 0;
}

static void test_exact(void **state)
{
    (void)state;
    for (int i = 0; i < n_all; i++)
        check(&all[i].box, all[i].type, all[i].name);
}

/* Unset order, all -1, is no order. */
static void test_unset_order(void **state)
{
    (void)state;
    struct box b = ct_int4(64, 0, false);
    memset(add(&b, "m.weight_g_idx", DT_I32, "I32", 4, N_IN, 1, 1, 1), 0xff, 4 * N_IN);
    check(&b, DT_GPTQ4, "unset order");
    box_free(&b);
}

/* Nothing compressed: somebody else's. */
static void test_plain(void **state)
{
    (void)state;
    struct box b = {0};
    struct packed_layout l;
    struct error err = {{0}};
    assert_true(box_find(&b, &l, &err));
    assert_int_equal(l.kind, LAYOUT_PLAIN);
    add(&b, "m.weight", DT_BF16, "BF16", 2, N_IN, N_OUT, 1, 1);
    assert_true(box_find(&b, &l, &err));
    assert_int_equal(l.kind, LAYOUT_PLAIN);
    add(&b, "m.weight_scale", DT_F32, "F32", 4, 1, 1, 1, 1); /* beside a module left alone */
    assert_true(box_find(&b, &l, &err));
    assert_int_equal(l.kind, LAYOUT_PLAIN);
    box_free(&b);
}

/* Finding or reading fails, in one line that has the name. */
static void refused(struct box *b, const char *what, const char *name)
{
    struct packed_layout l;
    struct error err = {{0}};
    float *out = mem_zalloc(N_OUT * N_IN, sizeof *out);
    bool ok = box_find(b, &l, &err) && l.kind != LAYOUT_PLAIN &&
              read_rows(&l, &(struct layout_rows){.step = 1, .n = N_OUT}, out, &err);
    mem_free(out);
    if (ok)
        fail_msg("%s is taken", what);
    if (l.kind == LAYOUT_PLAIN && !err.msg[0])
        return; /* no codes at all: whoever needs them says so */
    if (!strstr(err.msg, name) || strchr(err.msg, '\n'))
        fail_msg("%s: \"%s\" does not name %s", what, err.msg, name);
}

static void test_spoiled(void **state)
{
    (void)state;
    for (int i = 0; i < n_all; i++)
        for (int k = 0; k < all[i].box.n; k++) {
            struct box b = all[i].box;
            char what[96];
            const char *name = b.t[k].name, *codes = b.t[0].name;
            bool optional = strstr(name, "g_idx") || strstr(name, "zero_point");
            bool text = strstr(name, "quant_state");
            /* another shape: the data is not looked at */
            for (int d = 0; d < 4 && !text; d++)
                for (int by = -1; by <= 1; by += 2) {
                    b.t[k].dims[d] += by;
                    snprintf(what, sizeof what, "%s: %s with another shape", all[i].name, name);
                    bool scales = strstr(name, "weight_scale") ||
                                  (all[i].box.config.mlx_bits && strstr(name, "scales"));
                    bool groups = b.t[k].dims[d] >= 1 && scales && d == 0;
                    b.t[k].bytes = (size_t)(b.t[k].dims[0] * b.t[k].dims[1] * b.t[k].dims[2] *
                                            b.t[k].dims[3]) *
                                   (all[i].box.t[k].bytes /
                                    (size_t)(all[i].box.t[k].dims[0] * all[i].box.t[k].dims[1] *
                                             all[i].box.t[k].dims[2] * all[i].box.t[k].dims[3]));
                    /* the number of scales says how many groups there are: then another tensor
                     * may be the one that does not fit */
                    bool ints = all[i].type == DT_GPTQ4 || all[i].type == DT_Q8_0;
                    bool other = ints && groups && N_IN % b.t[k].dims[0] == 0;
                    if (!other) /* Int4 in fewer, longer groups is Int4 all the same */
                        refused(&b, what, groups ? "m." : name);
                    b.t[k] = all[i].box.t[k];
                }
            b.t[k].type = DT_F64;
            b.t[k].type_name = "F64";
            snprintf(what, sizeof what, "%s: %s of another type", all[i].name, name);
            refused(&b, what, "m.");
            b.t[k] = all[i].box.t[k];
            b.t[k].name = "m.other";
            snprintf(what, sizeof what, "%s without %s", all[i].name, name);
            if (!optional && k > 0 && all[i].type != DT_F8_E4M3)
                refused(&b, what, codes);
        }
}

/* One value of the scales, by tensor type, that is no number. */
static void test_no_number(void **state)
{
    (void)state;
    static const uint32_t nan32 = 0x7fc00000, inf32 = 0x7f800000;
    for (int i = 0; i < n_all; i++)
        for (int k = 1; k < all[i].box.n; k++) {
            struct tensor *t = &all[i].box.t[k];
            if (!strstr(t->name, "scale"))
                continue;
            size_t width = t->type == DT_F32 ? 4 : t->type == DT_F16 || t->type == DT_BF16 ? 2 : 1;
            uint8_t *first = (uint8_t *)(uintptr_t)t->data;
            uint8_t old[4];
            memcpy(old, first, width);
            for (int inf = 0; inf < 2; inf++) {
                if (width == 4)
                    memcpy(first, inf ? &inf32 : &nan32, 4);
                else if (width == 2)
                    memset(first, 0xff, 2);
                else
                    *first = 0xff;
                char what[96];
                snprintf(what, sizeof what, "%s: %s that is no number", all[i].name, t->name);
                refused(&all[i].box, what, t->name);
            }
            memcpy(first, old, width);
        }
}

/* Groups out of range, negative, and too many columns of one. */
static void test_order(void **state)
{
    (void)state;
    for (int i = 0; i < n_all; i++)
        for (int k = 0; k < all[i].box.n; k++) {
            struct tensor *t = &all[i].box.t[k];
            if (!strstr(t->name, "g_idx"))
                continue;
            uint8_t *p = (uint8_t *)(uintptr_t)t->data;
            int32_t bad[] = {1 << 30, -5, -1, N_IN, 0}, old;
            for (int v = 0; v < 5; v++) {
                memcpy(&old, p + 4 * (N_IN - 1), 4);
                memcpy(p + 4 * (N_IN - 1), &bad[v], 4);
                refused(&all[i].box, all[i].name, t->name);
                memcpy(p + 4 * (N_IN - 1), &old, 4);
            }
        }
    struct box b = gptq(true, false, 128);
    b.config.group_len = 0;
    refused(&b, "no group size", "m.qweight");
    b.config.group_len = 96; /* a group cut short: other shapes */
    refused(&b, "an odd group size", "m.qzeros");
    box_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),     cmocka_unit_test(test_unset_order),
        cmocka_unit_test(test_plain),     cmocka_unit_test(test_spoiled),
        cmocka_unit_test(test_no_number), cmocka_unit_test(test_order),
    };
    return cmocka_run_group_tests(tests, make_all, free_all);
}
