/*
 * Packed panels times many input rows with SMMLA: two weight rows x 8 columns times two input rows.
 *
 * Inputs are packed once, in groups of 8 rows, for all weights they meet. A panel is unpacked, 256 columns
 * at a time, and multiplied with one group after the other. Both sides hold pairs of rows: 8 columns of one
 * row, then the same columns of the next. A tile is 8 weight rows x 8 input rows: 16 registers of integer
 * sums, each 2 x 2. Their float sums stay in memory in the same order until all columns are done. Scales are
 * stored as a register of a pair needs them, each number twice.
 *
 * Dot products are exact and additions have the order of gemm_int8_kernel.h, so the bytes are the same as
 * without SMMLA.
 */
#define V_LANES 16
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel_unpack.h"

#include <string.h>

enum {
    ROWS = 8,          /* input rows of a group */
    PAIRS = 4,         /* pairs of rows on each side of a tile */
    HALVES = 2,        /* tiles of a panel */
    BLOCK = 32 * ROWS, /* bytes of 32 columns of 8 rows */
    GROUPS = GEMM_CHUNK / ROWS,
};

/* How a block's sums become floats. */
enum kind {
    KIND_SCALE32,     /* scale per 32 columns */
    KIND_SCALE32_MIN, /* scale and min per 32 */
    KIND_SCALE16,     /* scale per 16 */
    KIND_FINE,        /* scale per 32, inputs in two parts */
    KIND_FINE_MIN,    /* the same with a min */
};

typedef float pair_floats[PAIRS][4]; /* numbers of two rows, for each pair of a tile */

/* A thread's working memory. */
struct int8_scratch {
    struct {
        unsigned stamp;
        const void *q, *rows;
        int n, n_in;
        bool min;
    } key; /* the inputs that are packed; first, so that any other use of the memory overwrites it */
    struct chunk chunk;                                      /* of one panel */
    _Alignas(64) int8_t pairs[HALVES][CHUNK_COLUMNS * ROWS]; /* the same as pairs */
    _Alignas(64) pair_floats scale[HALVES][CHUNK_COLUMNS / 16];
    _Alignas(64) pair_floats min[HALVES][CHUNK_COLUMNS / 32];
    _Alignas(64) float acc[GROUPS][HALVES][PAIRS * PAIRS][4];
    _Alignas(64) uint8_t packed[];
};

/*
 * Packed inputs of a group of 8 rows, zeros where there are fewer.
 *   codes  (columns / 8, 4 pairs, 2 rows, 8 columns); fine parts likewise
 *   scale, sum  float (columns / 32, 4 pairs, 4): of a pair's rows a and b as a, b, a, b
 */
struct group_layout {
    size_t fine, scale, sum, bytes;
};

static inline struct group_layout group_layout(int n_in)
{
    struct group_layout g;
    g.fine = (size_t)n_in * ROWS;
    g.scale = 2 * g.fine;
    g.sum = g.scale + (size_t)(n_in / 32) * sizeof(pair_floats);
    g.bytes = g.sum + (size_t)(n_in / 32) * sizeof(pair_floats);
    return g;
}

size_t gemm_int8_scratch_i8mm(int n_in)
{
    return sizeof(struct int8_scratch) + GROUPS * group_layout((n_in + 31) & ~31).bytes;
}

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Row `row` of a group: n_in columns of codes, at `to` of the group. */
static void pack_codes(const uint8_t *from, int n_in, int row, uint8_t *to)
{
    to += row / 2 * 16 + row % 2 * 8;
    for (int k = 0; k < n_in; k += 8)
        memcpy(to + (size_t)k * ROWS, from + k, 8);
}

/* Packs the call's inputs, unless they are still packed from the call before. */
static void pack_inputs(const struct gemm_call *c, struct int8_scratch *s,
                        const struct group_layout *g, bool fine, bool fine_min)
{
    const struct gemm_x *x = c->x;
    int n_in = c->w->n_in;
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
    if (c->n % ROWS)
        memset(s->packed + (size_t)(c->n / ROWS) * g->bytes, 0, g->bytes);
    for (int i = 0; i < c->n; i++) {
        const uint8_t *from = x->q + (size_t)(c->rows ? c->rows[i] : i) * l.bytes;
        uint8_t *to = s->packed + (size_t)(i / ROWS) * g->bytes;
        int row = i % ROWS;
        pack_codes(from, n_in, row, to);
        if (fine)
            pack_codes(from + l.fine, n_in, row, to + g->fine);
        pair_floats *scale = (pair_floats *)(to + g->scale), *sum = (pair_floats *)(to + g->sum);
        for (int b = 0; b < n_in / 32; b++) {
            scale[b][row / 2][row % 2] = scale[b][row / 2][row % 2 + 2] =
                ((const float *)(from + l.scale))[b];
            sum[b][row / 2][row % 2] = sum[b][row / 2][row % 2 + 2] =
                ((const float *)(from + sums))[b];
        }
    }
}

/* 16 rows' numbers as pairs of both halves: rows a and b as a, a, b, b. */
INLINE void pair_rows(const float *from, float (*first)[4], float (*second)[4])
{
    for (int i = 0; i < PAIRS; i++) {
        float32x4_t v = vld1q_f32(from + 4 * i);
        float(*to)[4] = (i < 2 ? first : second) + i % 2 * 2;
        vst1q_f32(to[0], vzip1q_f32(v, v));
        vst1q_f32(to[1], vzip2q_f32(v, v));
    }
}

/* Column groups of the unpacked panel (panel.h) become pairs of rows. */
INLINE void pair_chunk(struct int8_scratch *s, int n, const bool mins, const int scales)
{
    const uint32_t *from = (const uint32_t *)s->chunk.unpacked;
    for (int k = 0; k < n; k += 8, from += 2 * GEMM_PANEL)
        for (int i = 0; i < PAIRS; i++) { /* rows 4i to 4i + 3 */
            uint32x4_t a = vld1q_u32(from + 4 * i), b = vld1q_u32(from + GEMM_PANEL + 4 * i);
            int8_t *to = s->pairs[i / 2] + k * ROWS + i % 2 * 32;
            vst1q_s8(to, vreinterpretq_s8_u32(vzip1q_u32(a, b)));
            vst1q_s8(to + 16, vreinterpretq_s8_u32(vzip2q_u32(a, b)));
        }
    for (int j = 0; j < n / 32 * scales; j++)
        pair_rows(s->chunk.scale[j], s->scale[0][j], s->scale[1][j]);
    for (int j = 0; mins && j < n / 32; j++)
        pair_rows(s->chunk.min[j], s->min[0][j], s->min[1][j]);
}

/* dot[i][j] += pairs i of weights times pairs j of inputs, 8 columns per step */
INLINE void tile_dot(const int8_t *w, const int8_t *x, int32x4_t dot[PAIRS][PAIRS], const int n_x,
                     const int steps)
{
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < n_x; j++)
            dot[i][j] = vdupq_n_s32(0);
    }
    UNROLL
    for (int k = 0; k < steps; k++, w += 64, x += 64) {
        int8x16_t xs[PAIRS];
        UNROLL
        for (int j = 0; j < n_x; j++)
            xs[j] = vld1q_s8(x + 16 * j);
        UNROLL
        for (int i = 0; i < PAIRS; i++) {
            int8x16_t v = vld1q_s8(w + 16 * i);
            UNROLL
            for (int j = 0; j < n_x; j++)
                dot[i][j] = vmmlaq_s32(dot[i][j], v, xs[j]);
        }
    }
}

/* Computes all sums before what uses them, and leaves float sums in memory: compilers that mix the two run out
 * of registers. */
INLINE void finish_dots(int32x4_t dot[PAIRS][PAIRS])
{
    __asm__ volatile(""
                     : "+w"(dot[0][0]), "+w"(dot[0][1]), "+w"(dot[0][2]), "+w"(dot[0][3]),
                       "+w"(dot[1][0]), "+w"(dot[1][1]), "+w"(dot[1][2]), "+w"(dot[1][3])
                     :
                     : "memory");
    __asm__ volatile(""
                     : "+w"(dot[2][0]), "+w"(dot[2][1]), "+w"(dot[2][2]), "+w"(dot[2][3]),
                       "+w"(dot[3][0]), "+w"(dot[3][1]), "+w"(dot[3][2]), "+w"(dot[3][3])
                     :
                     : "memory");
}

/* A block of 32 columns of one half and one group. */
struct tile_block {
    const int8_t *w, *x, *fine;
    const float (*w_scale)[4], (*w_next)[4], (*w_min)[4]; /* w_next: of the second 16 columns */
    const float (*x_scale)[4], (*x_sum)[4];
    float (*acc)[4];
};

/* Loads n of a block's numbers of pairs. */
INLINE void load_pairs(const float (*from)[4], const int n, float32x4_t *to)
{
    UNROLL
    for (int j = 0; j < n; j++)
        to[j] = vld1q_f32(from[j]);
}

INLINE void add_scale32(const struct tile_block *b, const bool min)
{
    int32x4_t dot[PAIRS][PAIRS];
    float32x4_t x_scale[PAIRS], x_sum[PAIRS];
    tile_dot(b->w, b->x, dot, PAIRS, 4);
    finish_dots(dot);
    load_pairs(b->x_scale, PAIRS, x_scale);
    if (min)
        load_pairs(b->x_sum, PAIRS, x_sum);
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        float32x4_t w = vld1q_f32(b->w_scale[i]), w_min = min ? vld1q_f32(b->w_min[i]) : w;
        UNROLL
        for (int j = 0; j < PAIRS; j++) {
            float *acc = b->acc[PAIRS * i + j];
            float32x4_t scale = vmulq_f32(w, x_scale[j]);
            float32x4_t sum = vfmaq_f32(vld1q_f32(acc), vcvtq_f32_s32(dot[i][j]), scale);
            vst1q_f32(acc, min ? vfmsq_f32(sum, w_min, x_sum[j]) : sum);
        }
    }
}

/* Two scales: half of the input rows at a time, since there are two sums each. */
INLINE void add_two_scales(const struct tile_block *b, const int first)
{
    int32x4_t dot[PAIRS][PAIRS], next[PAIRS][PAIRS];
    float32x4_t x_scale[2];
    tile_dot(b->w, b->x + 16 * first, dot, 2, 2);
    tile_dot(b->w + BLOCK / 2, b->x + BLOCK / 2 + 16 * first, next, 2, 2);
    load_pairs(b->x_scale + first, 2, x_scale);
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        float32x4_t w = vld1q_f32(b->w_scale[i]), v = vld1q_f32(b->w_next[i]);
        UNROLL
        for (int j = 0; j < 2; j++) {
            float *acc = b->acc[PAIRS * i + j + first];
            float32x4_t sum = vmulq_f32(vcvtq_f32_s32(dot[i][j]), w);
            sum = vfmaq_f32(sum, vcvtq_f32_s32(next[i][j]), v);
            vst1q_f32(acc, vfmaq_f32(vld1q_f32(acc), sum, x_scale[j]));
        }
    }
}

INLINE void add_fine(const struct tile_block *b, const int first, const bool min)
{
    int32x4_t dot[PAIRS][2], fine[PAIRS][2];
    float32x4_t x_scale[2], x_sum[2];
    const int8_t *weights = b->w, *x = b->x + 16 * first, *x_fine = b->fine + 16 * first;
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        UNROLL
        for (int j = 0; j < 2; j++)
            dot[i][j] = fine[i][j] = vdupq_n_s32(0);
    }
    UNROLL
    for (int k = 0; k < 4; k++, weights += 64, x += 64, x_fine += 64) { /* as tile_dot */
        UNROLL
        for (int i = 0; i < PAIRS; i++) {
            int8x16_t v = vld1q_s8(weights + 16 * i);
            UNROLL
            for (int j = 0; j < 2; j++) {
                dot[i][j] = vmmlaq_s32(dot[i][j], v, vld1q_s8(x + 16 * j));
                fine[i][j] = vmmlaq_s32(fine[i][j], v, vld1q_s8(x_fine + 16 * j));
            }
        }
    }
    load_pairs(b->x_scale + first, 2, x_scale);
    if (min)
        load_pairs(b->x_sum + first, 2, x_sum);
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        float32x4_t w = vld1q_f32(b->w_scale[i]), w_min = min ? vld1q_f32(b->w_min[i]) : w;
        UNROLL
        for (int j = 0; j < 2; j++) {
            float *acc = b->acc[PAIRS * i + j + first];
            float32x4_t scale = vmulq_f32(w, x_scale[j]);
            float32x4_t sum =
                vfmaq_n_f32(vcvtq_f32_s32(dot[i][j]), vcvtq_f32_s32(fine[i][j]), 1.0f / 254.0f);
            sum = vfmaq_f32(vld1q_f32(acc), sum, scale);
            if (min)
                sum = vfmsq_f32(sum, w_min, x_sum[j]);
            vst1q_f32(acc, sum);
        }
    }
}

/* Multiplies columns [k, k + n) of half a panel by a group of input rows. */
INLINE void multiply(struct int8_scratch *s, const uint8_t *group, const struct group_layout *g,
                     int k, int n, int half, float (*acc)[4], const enum kind kind)
{
    const pair_floats *x_scale = (const pair_floats *)(group + g->scale) + k / 32;
    const pair_floats *x_sum = (const pair_floats *)(group + g->sum) + k / 32;
    const int scales = kind == KIND_SCALE16 ? 2 : 1;
    for (int i = 0; i < n / 32; i++) {
        const int8_t *x = (const int8_t *)group + (size_t)(k + 32 * i) * ROWS;
        struct tile_block b = {.w = s->pairs[half] + i * BLOCK,
                               .x = x,
                               .fine = x + g->fine,
                               .w_scale = s->scale[half][scales * i],
                               .w_next = s->scale[half][scales * i + scales - 1],
                               .w_min = s->min[half][i],
                               .x_scale = x_scale[i],
                               .x_sum = x_sum[i],
                               .acc = acc};
        if (kind == KIND_SCALE32 || kind == KIND_SCALE32_MIN) {
            add_scale32(&b, kind == KIND_SCALE32_MIN);
        } else if (kind == KIND_SCALE16) {
            add_two_scales(&b, 0);
            add_two_scales(&b, 2);
        } else {
            add_fine(&b, 0, kind == KIND_FINE_MIN);
            add_fine(&b, 2, kind == KIND_FINE_MIN);
        }
    }
}

/* Stores a panel's sums to y. */
static void store(const struct gemm_call *c, const struct int8_scratch *s, int col)
{
    int width = c->n_rows - col < GEMM_PANEL ? c->n_rows - col : GEMM_PANEL;
    for (int i = 0; i < c->n; i++) {
        float out[GEMM_PANEL], *y = c->y + (size_t)i * c->stride + col;
        for (int q = 0; q < PAIRS; q++) { /* rows 4q to 4q + 3 */
            const float(*acc)[4] = s->acc[i / ROWS][q / 2] + q % 2 * 2 * PAIRS + i % ROWS / 2;
            float32x4_t a = vld1q_f32(acc[0]), b = vld1q_f32(acc[PAIRS]);
            vst1q_f32(out + 4 * q, i % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b));
        }
        for (int j = 0; j < width && c->bias; j++)
            out[j] += c->bias[col + j];
        memcpy(y, out, (size_t)width * sizeof *y);
    }
}

INLINE void gemm(const struct gemm_call *c, const enum kind kind,
                 const uint8_t *(*unpack)(const uint8_t *, int, int, struct chunk *))
{
    struct int8_scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in;
    struct group_layout g = group_layout(n_in);
    pack_inputs(c, s, &g, kind == KIND_FINE || kind == KIND_FINE_MIN, kind == KIND_FINE_MIN);
    s->chunk.group_len = seg->group_len;
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / GEMM_PANEL);
    const uint8_t *panel = seg->data + first * seg->panel_bytes;
    for (int col = 0; col < c->n_rows; col += GEMM_PANEL, panel += seg->panel_bytes) {
        int halves = c->n_rows - col > GEMM_PANEL / 2 ? 2 : 1, groups = (c->n + ROWS - 1) / ROWS;
        memset(s->acc, 0, (size_t)groups * sizeof s->acc[0]);
        for (int k = 0; k < n_in; k += CHUNK_COLUMNS) {
            int n = n_in - k < CHUNK_COLUMNS ? n_in - k : CHUNK_COLUMNS;
            unpack(panel, k, n, &s->chunk);
            pair_chunk(s, n, kind == KIND_SCALE32_MIN || kind == KIND_FINE_MIN,
                       kind == KIND_SCALE16 ? 2 : 1);
            for (int i = 0; i < groups; i++)
                for (int half = 0; half < halves; half++)
                    multiply(s, s->packed + (size_t)i * g.bytes, &g, k, n, half, s->acc[i][half],
                             kind);
        }
        store(c, s, col);
    }
}

#define GEMM(name, kind)                                                                           \
    static void gemm_##name(const struct gemm_call *c)                                             \
    {                                                                                              \
        gemm(c, kind, unpack_##name);                                                              \
    }

GEMM(q4k, KIND_SCALE32_MIN)
GEMM(q5k, KIND_SCALE32_MIN)
GEMM(q4_1, KIND_SCALE32_MIN)
GEMM(q5_1, KIND_SCALE32_MIN)
GEMM(q4_0, KIND_SCALE32)
GEMM(iq4nl, KIND_SCALE32)
GEMM(iq4xs, KIND_SCALE32)
GEMM(iq3s, KIND_SCALE32)
GEMM(iq3xxs, KIND_SCALE32)
GEMM(tq, KIND_SCALE32)
GEMM(q6k, KIND_SCALE16)
GEMM(q3k, KIND_SCALE16)
GEMM(iq2, KIND_SCALE16)
GEMM(iq1, KIND_SCALE16)
GEMM(q8_0, KIND_FINE)
GEMM(mxfp4, KIND_FINE)
GEMM(gptq4, KIND_FINE_MIN)

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
