/*
 * Packed panels times several input rows with SMMLA: two weight rows x 8 columns times two input rows.
 *
 * Inputs are packed once, in groups of 4 rows, for all weights they meet. A panel is unpacked, 256 columns
 * at a time, and multiplied with one group after the other. Both sides hold pairs of rows: 8 columns of one
 * row, then the same columns of the next. A tile is 8 weight rows x 4 input rows: 8 registers of integer
 * sums, each 2 x 2, and 8 of float sums in the same order, which leaves 16 for operands. Scales are stored as a
 * register of a pair needs them, each number twice, after the codes that they belong to.
 *
 * Dot products are exact and additions have the order of gemm_int8_kernel.h, so the bytes are the same as
 * without SMMLA.
 */
#define V_LANES 16
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel_unpack.h"

#include <string.h>

enum {
    PAIRS = 4,   /* pairs of weight rows of a tile */
    X_PAIRS = 2, /* pairs of input rows of a tile, which is a group */
    X_ROWS = 2 * X_PAIRS,
    HALVES = 2, /* tiles of a panel */
    GROUPS = GEMM_CHUNK / X_ROWS,
    STEP = 8, /* columns of an instruction */
    STEPS = 32 / STEP,
};

/* How a block's sums become floats. */
enum kind {
    KIND_SCALE32,     /* scale per 32 columns */
    KIND_SCALE32_MIN, /* scale and min per 32 */
    KIND_SCALE16,     /* scale per 16 */
    KIND_FINE,        /* scale per 32, inputs in two parts */
    KIND_FINE_MIN,    /* the same with a min */
};

/* 32 columns of half a panel. Numbers of rows a and b are a, a, b, b. */
struct w_block {
    int8_t codes[STEPS][PAIRS][16];
    float scale[2][PAIRS][4]; /* the second: of the second 16 columns */
    float min[PAIRS][4];
};

/* 32 columns of a group of input rows, zeros where there are fewer. Numbers of rows a and b are a, b, a, b. */
struct x_block {
    int8_t codes[STEPS][X_PAIRS][16], fine[STEPS][X_PAIRS][16];
    float scale[X_PAIRS][4], sum[X_PAIRS][4];
};

/* A thread's working memory. */
struct i8mm_scratch {
    struct {
        unsigned stamp;
        const void *q, *rows;
        int n, n_in;
        bool min;
    } key; /* the inputs that are packed; first, so that any other use of the memory overwrites it */
    struct chunk chunk;                                        /* of one panel */
    _Alignas(64) struct w_block w[HALVES][CHUNK_COLUMNS / 32]; /* the same as pairs */
    _Alignas(64) float acc[GROUPS][HALVES][PAIRS][X_PAIRS][4];
    _Alignas(64) struct x_block packed[]; /* (groups, columns / 32) */
};

size_t gemm_int8_scratch_i8mm(int n_in)
{
    return sizeof(struct i8mm_scratch) +
           GROUPS * (size_t)((n_in + 31) / 32) * sizeof(struct x_block);
}

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Copies 32 codes of a row to its place among the pairs. */
INLINE void pack_codes(const uint8_t *from, int8_t (*to)[X_PAIRS][16], int row)
{
    UNROLL
    for (int k = 0; k < STEPS; k++)
        memcpy(to[k][row / 2] + row % 2 * STEP, from + STEP * k, STEP);
}

/* Packs the call's inputs, unless they are still packed from the call before. */
static void pack_inputs(const struct gemm_call *c, struct i8mm_scratch *s, bool fine, bool fine_min)
{
    const struct gemm_x *x = c->x;
    int n_in = c->w->n_in, n_blocks = n_in / 32;
    if (x->stamp && s->key.stamp == x->stamp && s->key.q == x->q && s->key.rows == c->rows &&
        s->key.n == c->n && s->key.n_in == n_in && s->key.min == fine_min)
        return;
    s->key.stamp = x->stamp;
    s->key.q = x->q;
    s->key.rows = c->rows;
    s->key.n = c->n;
    s->key.n_in = n_in;
    s->key.min = fine_min;
    struct input_layout l = input_layout(n_in);
    size_t sums = fine_min ? l.fine_sum : l.sum;
    fine = fine || c->w->wants_fine;
    if (c->n % X_ROWS)
        memset(s->packed + (size_t)(c->n / X_ROWS) * (size_t)n_blocks, 0,
               (size_t)n_blocks * sizeof *s->packed);
    for (int i = 0; i < c->n; i++) {
        const uint8_t *from = x->q + (size_t)(c->rows ? c->rows[i] : i) * l.bytes;
        const float *scale = (const float *)(from + l.scale), *sum = (const float *)(from + sums);
        struct x_block *to = s->packed + (size_t)(i / X_ROWS) * (size_t)n_blocks;
        int row = i % X_ROWS, pair = row / 2, at = row % 2;
        for (int b = 0; b < n_blocks; b++, to++, from += 32) {
            pack_codes(from, to->codes, row);
            if (fine)
                pack_codes(from + l.fine, to->fine, row);
            to->scale[pair][at] = to->scale[pair][at + 2] = scale[b];
            to->sum[pair][at] = to->sum[pair][at + 2] = sum[b];
        }
    }
}

/* 8 rows' numbers as pairs: rows a and b as a, a, b, b. */
INLINE void pair_rows(const float *from, float (*to)[4], const float unit)
{
    UNROLL
    for (int i = 0; i < PAIRS; i += 2) {
        float32x4_t v = vld1q_f32(from + 2 * i);
        v = unit == 1.0f ? v : vmulq_n_f32(v, unit);
        vst2q_f32(to[i], (float32x4x2_t){{v, v}});
    }
}

/* Makes pairs of rows of n columns of codes. gap: bytes between those of 64 columns and the next. */
INLINE void pair_chunk(struct i8mm_scratch *s, const uint8_t *codes, const int gap, int n,
                       const enum kind kind)
{
    const bool mins = kind == KIND_SCALE32_MIN || kind == KIND_FINE_MIN;
    const int scales = kind == KIND_SCALE16 ? 2 : 1;
    const float unit = kind == KIND_FINE || kind == KIND_FINE_MIN ? FINE_UNIT : 1.0f;
    for (int b = 0; b < n / 32; b++, codes += b % 2 ? 0 : gap) {
        const uint32_t *from = (const uint32_t *)codes;
        UNROLL
        for (int k = 0; k < STEPS; k++, from += 2 * GEMM_PANEL, codes += 8 * GEMM_PANEL) {
            UNROLL
            for (int i = 0; i < GEMM_PANEL;
                 i += 4) { /* rows i to i + 3, 4 columns and the next 4 */
                uint32x4x2_t v = {{vld1q_u32(from + i), vld1q_u32(from + GEMM_PANEL + i)}};
                vst2q_u32((uint32_t *)s->w[i / 8][b].codes[k][i % 8 / 2], v);
            }
        }
        UNROLL
        for (int half = 0; half < HALVES; half++) {
            struct w_block *to = &s->w[half][b];
            for (int j = 0; j < scales; j++)
                pair_rows(s->chunk.scale[b * scales + j] + half * 8, to->scale[j], unit);
            if (mins)
                pair_rows(s->chunk.min[b] + half * 8, to->min, 1.0f);
        }
    }
}

/* Loads 64 bytes, and moves the pointer to the next. */
INLINE int8x16x4_t next_four(const int8_t **p)
{
    int8x16x4_t v;
    __asm__("ld1 {%S0.16b - %V0.16b}, [%1], 64"
            : "=w"(v), "+r"(*p)
            : "m"(*(const int8_t(*)[64]) * p));
    return v;
}

/* Loads two registers. */
INLINE void load_two(const float *p, float32x4_t *to)
{
    __asm__("ldp %q0, %q1, %2"
            : "=w"(to[0]), "=w"(to[1])
            : "Ump"(*(const float32x4_t *)p), "m"(*((const float32x4_t *)p + 1)));
}

INLINE void load_four(float (*p)[4], float32x4_t *to)
{
    load_two(p[0], to);
    load_two(p[2], to + 2);
}

/* dot += 8 rows of weights x n_x pairs of input rows, n columns; moves both pointers n columns further */
INLINE void tile_dot(int32x4_t dot[PAIRS][X_PAIRS], const int8_t **w, const int8_t **x,
                     const int n_x, const int n)
{
    UNROLL
    for (int k = 0; k < n; k += 2 * STEP) {
        int8x16x4_t xs = next_four(x);
        UNROLL
        for (int step = 0; step < 2; step++) {
            int8x16x4_t ws = next_four(w);
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                UNROLL
                for (int j = 0; j < n_x; j++)
                    dot[i][j] = vmmlaq_s32(dot[i][j], ws.val[i], xs.val[X_PAIRS * step + j]);
            }
        }
    }
}

INLINE void tile_zero(int32x4_t dot[PAIRS][X_PAIRS], const int n_x)
{
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++)
            dot[i][j] = vdupq_n_s32(0);
    }
}

/* acc += dot * (scale of the weights * scale of the inputs) - min * sum of the inputs */
INLINE void add_scale32(const struct w_block *w, const struct x_block *x,
                        float32x4_t acc[PAIRS][X_PAIRS], int32x4_t dot[PAIRS][X_PAIRS],
                        const int n_x, const bool mins)
{
    float32x4_t scale[PAIRS], min[PAIRS], x_scale[X_PAIRS], x_sum[X_PAIRS];
    load_four((float(*)[4])w->scale[0], scale);
    load_two(x->scale[0], x_scale);
    if (mins) {
        load_four((float(*)[4])w->min, min);
        load_two(x->sum[0], x_sum);
    }
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++) {
            float32x4_t both = vmulq_f32(scale[i], x_scale[j]);
            acc[i][j] = vfmaq_f32(acc[i][j], vcvtq_f32_s32(dot[i][j]), both);
            if (mins)
                acc[i][j] = vfmsq_f32(acc[i][j], min[i], x_sum[j]);
        }
    }
}

/* acc += (first 16 columns * their scale + second 16 * theirs) * scale of the inputs */
INLINE void add_scale16(const struct w_block *w, const struct x_block *x,
                        float32x4_t acc[PAIRS][X_PAIRS], const int n_x)
{
    const int8_t *codes = w->codes[0][0], *inputs = x->codes[0][0];
    int32x4_t dot[PAIRS][X_PAIRS];
    float32x4_t sum[PAIRS][X_PAIRS], scale[PAIRS], x_scale[X_PAIRS];
    tile_zero(dot, n_x);
    tile_dot(dot, &codes, &inputs, n_x, 16);
    load_four((float(*)[4])w->scale[0], scale);
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++)
            sum[i][j] = vmulq_f32(vcvtq_f32_s32(dot[i][j]), scale[i]);
    }
    tile_zero(dot, n_x);
    tile_dot(dot, &codes, &inputs, n_x, 16);
    load_four((float(*)[4])w->scale[1], scale);
    load_two(x->scale[0], x_scale);
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++) {
            sum[i][j] = vfmaq_f32(sum[i][j], vcvtq_f32_s32(dot[i][j]), scale[i]);
            acc[i][j] = vfmaq_f32(acc[i][j], sum[i][j], x_scale[j]);
        }
    }
}

/* Multiplies n blocks of half a panel by those of n_x pairs of input rows. */
INLINE void multiply(const struct w_block *w, const struct x_block *x, int n,
                     float to[PAIRS][X_PAIRS][4], const int n_x, const enum kind kind)
{
    float32x4_t acc[PAIRS][X_PAIRS];
    UNROLL
    for (int i = 0; i < PAIRS; i++)
        load_two(to[i][0], acc[i]);
    for (; n > 0; n--, w++, x++) {
        if (kind == KIND_SCALE16) {
            add_scale16(w, x, acc, n_x);
            continue;
        }
        const int8_t *codes = w->codes[0][0], *inputs = x->codes[0][0];
        int32x4_t dot[PAIRS][X_PAIRS];
        tile_zero(dot, n_x);
        tile_dot(dot, &codes, &inputs, n_x, 32);
        if (kind == KIND_FINE || kind == KIND_FINE_MIN) {
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                UNROLL
                for (int j = 0; j < n_x; j++)
                    dot[i][j] = vmulq_n_s32(dot[i][j], FINE_PER_CODE);
            }
            codes = w->codes[0][0];
            tile_dot(dot, &codes, &inputs, n_x, 32);
        }
        add_scale32(w, x, acc, dot, n_x, kind == KIND_SCALE32_MIN || kind == KIND_FINE_MIN);
    }
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++)
            vst1q_f32(to[i][j], acc[i][j]);
    }
}

/* Multiplies n blocks of a panel by those of all groups, which are `stride` blocks apart. */
INLINE void multiply_all(struct i8mm_scratch *s, const struct x_block *x, int n, int stride,
                         int rows, int halves, const enum kind kind)
{
    for (int i = 0; rows > 0; i++, rows -= X_ROWS, x += stride)
        for (int half = 0; half < halves; half++)
            if (rows > 2)
                multiply(s->w[half], x, n, s->acc[i][half], X_PAIRS, kind);
            else
                multiply(s->w[half], x, n, s->acc[i][half], 1, kind);
}

/* Stores a panel's sums to y, two input rows at a time. */
static void store(const struct gemm_call *c, const struct i8mm_scratch *s, int col)
{
    int width = c->n_rows - col < GEMM_PANEL ? c->n_rows - col : GEMM_PANEL;
    for (int i = 0; i < c->n; i += 2) {
        float *y = c->y + (size_t)i * c->stride + col, *next = y + c->stride;
        float out[2][GEMM_PANEL], *first = out[0], *second = out[1];
        if (width == GEMM_PANEL && i + 1 < c->n)
            first = y, second = next;
        UNROLL
        for (int q = 0; q < GEMM_PANEL / 4; q++) { /* weight rows 4q to 4q + 3 */
            const float(*acc)[X_PAIRS][4] = s->acc[i / X_ROWS][q / 2] + q % 2 * 2;
            float32x4_t a = vld1q_f32(acc[0][i % X_ROWS / 2]),
                        b = vld1q_f32(acc[1][i % X_ROWS / 2]);
            float32x4_t v = vuzp1q_f32(a, b), w = vuzp2q_f32(a, b);
            if (c->bias) {
                float bias[4] = {0};
                int n = width - 4 * q < 4 ? width - 4 * q : 4;
                for (int j = 0; j < n; j++)
                    bias[j] = c->bias[col + 4 * q + j];
                v = vaddq_f32(v, vld1q_f32(bias));
                w = vaddq_f32(w, vld1q_f32(bias));
            }
            vst1q_f32(first + 4 * q, v);
            vst1q_f32(second + 4 * q, w);
        }
        if (first != y)
            memcpy(y, first, (size_t)width * sizeof *y);
        if (first != y && i + 1 < c->n)
            memcpy(next, second, (size_t)width * sizeof *y);
    }
}

/* For one kind of block: makes a chunk's pairs, and multiplies all groups by it. */
#define MULTIPLY(name, kind, gap)                                                                  \
    static void name(struct i8mm_scratch *s, const uint8_t *codes, const struct x_block *x, int n, \
                     int stride, int rows, int halves)                                             \
    {                                                                                              \
        pair_chunk(s, codes, gap, n, kind);                                                        \
        multiply_all(s, x, n / 32, stride, rows, halves, kind);                                    \
    }

MULTIPLY(scale32, KIND_SCALE32, 0)
MULTIPLY(scale32_min, KIND_SCALE32_MIN, 0)
MULTIPLY(scale16, KIND_SCALE16, 0)
MULTIPLY(fine, KIND_FINE, 0)
MULTIPLY(fine_units, KIND_FINE, UNIT_SCALES)
MULTIPLY(fine_min, KIND_FINE_MIN, 0)

/* Q8_0's codes are read from the panel: only scales are unpacked. */
static const uint8_t *unpack_q8_0_scales(const uint8_t *panel, int k, int n, struct chunk *c)
{
    const uint8_t *unit = panel + (size_t)(k / 64) * (UNIT_SCALES + 1024);
    for (int i = 0; i < n / 32; i++)
        vf_store(c->scale[i], vf_load_f16(unit + i / 2 * (UNIT_SCALES + 1024) + i % 2 * 32));
    return unit + UNIT_SCALES;
}

typedef const uint8_t *unpack_fn(const uint8_t *panel, int k, int n, struct chunk *c);
typedef void multiply_fn(struct i8mm_scratch *s, const uint8_t *codes, const struct x_block *x,
                         int n, int stride, int rows, int halves);

/* fine, fine_min: as pack_inputs */
static void gemm(const struct gemm_call *c, bool fine, bool fine_min, unpack_fn *unpack,
                 multiply_fn *multiply_chunk)
{
    struct i8mm_scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in;
    pack_inputs(c, s, fine, fine_min);
    s->chunk.group_len = seg->group_len;
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / GEMM_PANEL);
    const uint8_t *panel = seg->data + first * seg->panel_bytes;
    for (int col = 0; col < c->n_rows; col += GEMM_PANEL, panel += seg->panel_bytes) {
        int halves = c->n_rows - col > GEMM_PANEL / 2 ? 2 : 1;
        memset(s->acc, 0, (size_t)((c->n + X_ROWS - 1) / X_ROWS) * sizeof s->acc[0]);
        for (int k = 0; k < n_in; k += CHUNK_COLUMNS) {
            int n = n_in - k < CHUNK_COLUMNS ? n_in - k : CHUNK_COLUMNS;
            const uint8_t *codes = unpack(panel, k, n, &s->chunk);
            multiply_chunk(s, codes, s->packed + k / 32, n, n_in / 32, c->n, halves);
        }
        store(c, s, col);
    }
}

#define GEMM(name, kind)                                                                           \
    static void gemm_##name(const struct gemm_call *c)                                             \
    {                                                                                              \
        gemm(c, false, false, unpack_##name, kind);                                                \
    }
#define GEMM_FINE(name, unpack, min, kind)                                                         \
    static void gemm_##name(const struct gemm_call *c)                                             \
    {                                                                                              \
        gemm(c, true, min, unpack, kind);                                                          \
    }

GEMM(q4k, scale32_min)
GEMM(q5k, scale32_min)
GEMM(q4_1, scale32_min)
GEMM(q5_1, scale32_min)
GEMM(q4_0, scale32)
GEMM(iq4nl, scale32)
GEMM(iq4xs, scale32)
GEMM(iq3s, scale32)
GEMM(iq3xxs, scale32)
GEMM(tq, scale32)
GEMM(q6k, scale16)
GEMM(q3k, scale16)
GEMM(iq2, scale16)
GEMM(iq1, scale16)
GEMM_FINE(q8_0, unpack_q8_0_scales, false, fine_units)
GEMM_FINE(mxfp4, unpack_mxfp4, false, fine)
GEMM_FINE(gptq4, unpack_gptq4, true, fine_min)

void gemm_int8_i8mm(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_Q4_K] = gemm_q4k,     [DT_Q5_K] = gemm_q5k,    [DT_Q4_1] = gemm_q4_1,
        [DT_Q5_1] = gemm_q5_1,    [DT_Q4_0] = gemm_q4_0,   [DT_IQ4_NL] = gemm_iq4nl,
        [DT_IQ4_XS] = gemm_iq4xs, [DT_IQ3_S] = gemm_iq3s,  [DT_IQ3_XXS] = gemm_iq3xxs,
        [DT_TQ1_0] = gemm_tq,     [DT_TQ2_0] = gemm_tq,    [DT_Q6_K] = gemm_q6k,
        [DT_Q3_K] = gemm_q3k,     [DT_IQ2_XXS] = gemm_iq2, [DT_IQ2_XS] = gemm_iq2,
        [DT_IQ2_S] = gemm_iq2,    [DT_IQ1_S] = gemm_iq1,   [DT_IQ1_M] = gemm_iq1,
        [DT_Q8_0] = gemm_q8_0,    [DT_MXFP4] = gemm_mxfp4, [DT_GPTQ4] = gemm_gptq4,
    };
    by_type[c->seg->type](c);
}
