/*
 * Attention kernels, written once over vec.h and compiled per instruction set by attn.c (plain C),
 * attn_avx2.c, attn_avx512.c, attn_vnni.c, attn_madd_*.c, attn_neon.c and attn_dotprod.c. The includer defines KERNELS and ROW_KERNELS
 * (names of the tables), ROWS (query rows per tile), NV (vectors per row of the register tile), and
 * INT8_SCORES to multiply quantised keys as integers.
 *
 *   s[r, key] = q[r] . K[key]     m[r] = max over keys of s     p = 2^(s - m)
 *   l[r] = sum over keys of p     o[r] = sum over keys of p * V[key]
 *
 * The register tile of both products is ROWS x NV vectors. Scores: a vector is VW keys; each component d
 * multiplies NV loads of K by ROWS broadcasts of q. Values: a vector is VW columns of V; each key
 * multiplies NV loads of V by ROWS broadcasts of p. So K and V are read, and converted to float, once per
 * tile, whichever heads and tokens its rows are. Full tiles, such as a GQA group of 8 heads that decodes,
 * are limited by FMA throughput.
 *
 * Every lane of a row is a chain of its own: a score sums over d in order, o over keys in order, l by
 * lane. A row's bytes do not depend on the number of rows in the tile, nor on keys the row does not see,
 * which have weight exactly 0.
 *
 * Reached with AVX-512 on Zen 4, one thread, of an FMA peak of 117 GFLOP/s: 77 % for a prompt of 512,
 * 85 % for 512 tokens at depth 4,096, 76 % for decode at 4,096 (docs/performance.md).
 */
#include "backend/cpu/attn.h"
#include "backend/cpu/attn_load.h"
#include "backend/cpu/vec.h"
#include "base/error.h"

enum { VECS = ATTN_BLOCK / VW, PANEL = NV * VW };

/* Prefetches a tile's bytes [at, at + step), step <= 128, to the second-level cache, since the
 * first is full of the current block. Called once per step, it covers a tile in the time of a
 * block. */
INLINE void prefetch_step(const void *tile, size_t at, size_t step)
{
    if (at % 64 < step)
        __builtin_prefetch((const char *)tile + at, 0, 2);
    if (step > 64)
        __builtin_prefetch((const char *)tile + at + 64, 0, 2);
}

/* [*k0, *k1): the keys of the block, counted from its first, that some row of the tile sees. */
INLINE void span(const struct attn_tile *t, const struct attn_block *b, int *k0, int *k1)
{
    *k0 = t->lo > b->first ? t->lo - b->first : 0;
    *k1 = t->hi - b->first < ATTN_BLOCK - 1 ? t->hi - b->first + 1 : ATTN_BLOCK;
}

#ifndef INT8_SCORES
/* s[r, i*VW ..] = q[r] . K for `nv` vectors of keys from vector i */
INLINE void scores(enum dtype type, int rows, int nv, const struct attn_tile *t,
                   const struct attn_block *b, int i, int dim)
{
    float *s = t->s;
    VEC acc[ROWS][NV];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int j = 0; j < nv; j++)
            acc[r][j] = vec_set(0.0f);
    }
    const float *q = t->q;
    size_t fetch = 0;
    /* quantised: 4 components share a load, and a block of 32 shares a scale */
    int unit = kv_quantised(type) ? 4 : 1;
    VEC scale[NV];
    UNROLL
    for (int j = 0; j < nv; j++)
        scale[j] = vec_set(1.0f);
    for (int d = 0; d < dim; d += unit) {
        if (kv_quantised(type) && d % KV_BLOCK == 0) {
            UNROLL
            for (int j = 0; j < nv; j++)
                scale[j] = key_scale(type, b, i + j, d / KV_BLOCK);
        }
        UNROLL
        for (int e = 0; e < unit; e++, q += ROWS, fetch += b->v_step) {
            VEC k[NV];
            UNROLL
            for (int j = 0; j < nv; j++) {
                k[j] = key_code(type, b, i + j, d, e);
                if (kv_quantised(type))
                    k[j] = vec_mul(k[j], scale[j]);
                prefetch_step(b->next->v_tile[i + j], fetch, b->v_step);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                VEC x = vec_set(q[r]);
                UNROLL
                for (int j = 0; j < nv; j++)
                    acc[r][j] = vec_fma(x, k[j], acc[r][j]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int j = 0; j < nv; j++)
            vec_store(s + r * ATTN_BLOCK + (i + j) * VW, acc[r][j]);
    }
}
#endif

/* Multiplies the weights of keys [k0, k1) by the scales of their values' block c of columns. That
 * is cheaper than scaling the values, since a weight serves 32 of them. */
INLINE void scale_weights(enum dtype type, int rows, const struct attn_tile *t,
                          const struct attn_block *b, int k0, int k1, int c, float *weights)
{
    for (int i = k0 / VW; i <= (k1 - 1) / VW; i++) {
        VEC scale = value_scale(type, b, i, c);
        UNROLL
        for (int r = 0; r < rows; r++) {
            int at = r * ATTN_BLOCK + i * VW;
            vec_store(weights + at, vec_mul(vec_load(t->s + at), scale));
        }
    }
}

/* o[r] = o[r] * scale[r] + sum over the block's keys of s[r, key] * V[key], for nv vectors of
 * columns from column c on, which is at offset `column` of a row of V. high: see value_code_at. */
INLINE void values(enum dtype type, int rows, int nv, const struct attn_tile *t,
                   const struct attn_block *b, int c, size_t column, int dim, bool high)
{
    float *o = t->o + c;
    const float *p = t->s;
    VEC acc[ROWS][NV];
    if (t->fresh) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int j = 0; j < nv; j++)
                acc[r][j] = vec_set(0.0f);
        }
    } else {
        UNROLL
        for (int r = 0; r < rows; r++) {
            VEC x = vec_set(t->scale[r]);
            UNROLL
            for (int j = 0; j < nv; j++)
                acc[r][j] = vec_mul(vec_load(o + (size_t)r * (size_t)dim + j * VW), x);
        }
    }
    int k0, k1;
    span(t, b, &k0, &k1);
    float weights[ROWS * ATTN_BLOCK];
    if (kv_quantised(type)) {
        scale_weights(type, rows, t, b, k0, k1, c / KV_BLOCK, weights);
        p = weights;
    }
    size_t step = (size_t)nv * b->next->k_step;
    for (int key = k0; key < k1;) {
        int end = key / VW * VW + VW;
        size_t at = (kv_quantised(type) ? 0 : column) + (size_t)(key % VW) * b->v_stride;
        const void *v = b->v[key / VW];
        const char *next = (const char *)b->next->k_tile[key / VW] + (size_t)c * b->next->k_step;
        size_t fetch = (size_t)(key % VW) * step;
        for (end = end < k1 ? end : k1; key < end; key++, at += b->v_stride, fetch += step) {
            VEC x[NV];
            UNROLL
            for (int j = 0; j < nv; j++)
                x[j] = kv_quantised(type)
                           ? value_code_at(type, (const char *)v + at, c, j * VW, high)
                           : vec_load_as(type, v, at + (size_t)(j * VW));
            prefetch_step(next, fetch, step);
            UNROLL
            for (int r = 0; r < rows; r++) {
                VEC w = vec_set(p[r * ATTN_BLOCK + key]);
                UNROLL
                for (int j = 0; j < nv; j++)
                    acc[r][j] = vec_fma(w, x[j], acc[r][j]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int j = 0; j < nv; j++)
            vec_store(o + (size_t)r * (size_t)dim + j * VW, acc[r][j]);
    }
}

/* x + the biases of row r for keys key .. key + VW - 1 */
INLINE VEC add_bias(const struct attn_tile *t, int r, int key, VEC x)
{
    int at = t->bias_own - (t->row_hi[r] - key);
    return at <= -VW || at > t->bias_own
               ? x
               : vec_add(x, vec_load(t->bias + (ptrdiff_t)((size_t)r * t->bias_stride) + at));
}

/* Turns scores into weights 2^(s - m), and updates m, l and scale. score_factor multiplies scores,
 * weight_factor the weights (FP8's scale). */
static void scores_to_weights(const struct attn_tile *t, const struct attn_block *b,
                              float score_factor, float weight_factor)
{
    int k0, k1;
    span(t, b, &k0, &k1);
    int first = b->first, i0 = k0 / VW, i1 = (k1 - 1) / VW;
    float *s = t->s, *scale = t->scale;
    int rows = t->rows;
    float m[ATTN_MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        float *row = s + r * ATTN_BLOCK;
        bool cut = t->row_lo[r] > first + i0 * VW || t->row_hi[r] < first + i1 * VW + VW - 1;
        VEC max = vec_set(ATTN_MASKED);
        for (int i = i0; i <= i1; i++) {
            VEC x = vec_mul(vec_load(row + i * VW), vec_set(score_factor));
            if (t->cap != 0)
                x = vec_softcap(x, t->cap, 1.0f / t->cap);
            if (t->bias)
                x = add_bias(t, r, first + i * VW, x);
            if (cut)
                x = vec_within(x, first + i * VW, t->row_lo[r], t->row_hi[r], ATTN_MASKED);
            if (cut || t->cap != 0 || t->bias || score_factor != 1.0f)
                vec_store(row + i * VW, x);
            max = vec_max(max, x);
        }
        float high = vec_hmax(max);
        m[r] = high > t->m[r] ? high : t->m[r];
    }
    for (int r = rows; r < ATTN_MAX_ROWS; r++)
        m[r] = t->m[r];
    for (int r = 0; r < rows; r += VW)
        vec_store(scale + r, vec_exp2(vec_sub(vec_load(t->m + r), vec_load(m + r))));
    memcpy(t->m, m, sizeof m);
    for (int r = 0; r < rows; r++) {
        float *row = s + r * ATTN_BLOCK;
        VEC max = vec_set(m[r]), sum = vec_set(0.0f);
        if (!t->fresh)
            sum = vec_mul(vec_load(t->l + r * VW), vec_set(scale[r]));
        for (int i = i0; i <= i1; i++) {
            VEC p = vec_exp2(vec_sub(vec_load(row + i * VW), max));
            vec_store(row + i * VW, vec_mul(p, vec_set(weight_factor)));
            sum = vec_add(sum, p);
        }
        vec_store(t->l + r * VW, sum);
    }
}

#ifdef INT8_SCORES
#include "backend/cpu/attn_int8.h"
#endif

INLINE void scores_of(enum dtype type, int rows, int nv, const struct attn_tile *t,
                      const struct attn_block *b, int i, int dim)
{
#ifdef INT8_SCORES
    for (int j = 0; j < nv && kv_scaled(type); j++)
        scores_int8(type, rows, t, b, i + j, dim);
#else
    scores(type, rows, nv, t, b, i, dim);
#endif
}

/* The register tiles for every type and number of rows, with NV vectors or one. Each is a function
 * of its own: in a larger body compilers run out of registers and spill the operands. */
struct tile_fns {
    void (*scores)(const struct attn_tile *t, const struct attn_block *b, int i, int dim);
    void (*values)(const struct attn_tile *t, const struct attn_block *b, int c, size_t column,
                   int dim);
};
#define TILE(type, rows, nv, name)                                                                 \
    static __attribute__((noinline)) void scores_##name(                                           \
        const struct attn_tile *t, const struct attn_block *b, int i, int dim)                     \
    {                                                                                              \
        scores_of(type, rows, nv, t, b, i, dim);                                                   \
    }                                                                                              \
    static __attribute__((noinline)) void values_##name(                                           \
        const struct attn_tile *t, const struct attn_block *b, int c, size_t column, int dim)      \
    {                                                                                              \
        if (type == DT_Q4_0 && c % KV_BLOCK >= 16)                                                 \
            values(type, rows, nv, t, b, c, column, dim, true);                                    \
        else                                                                                       \
            values(type, rows, nv, t, b, c, column, dim, false);                                   \
    }
#define BOTH(type, rows, name)                                                                     \
    TILE(type, rows, 1, name##_one_##rows)                                                         \
    TILE(type, rows, NV, name##_all_##rows)
#define TILES(rows)                                                                                \
    BOTH(DT_F32, rows, f32)                                                                        \
    BOTH(DT_F16, rows, f16)                                                                        \
    BOTH(DT_BF16, rows, bf16)                                                                      \
    BOTH(DT_Q8_0, rows, q8)                                                                        \
    BOTH(DT_Q4_0, rows, q4)
TILES(1)
TILES(2)
TILES(3)
TILES(4)
#if ROWS == 8
TILES(5)
TILES(6)
TILES(7)
TILES(8)
#endif

#define FN(name)                                                                                   \
    {                                                                                              \
        scores_##name, values_##name                                                               \
    }
#define FOUR(name) FN(name##_1), FN(name##_2), FN(name##_3), FN(name##_4)
#if ROWS == 8
#define UP_TO(name)                                                                                \
    {                                                                                              \
        FOUR(name), FN(name##_5), FN(name##_6), FN(name##_7), FN(name##_8)                         \
    }
#elif ROWS == 4
#define UP_TO(name)                                                                                \
    {                                                                                              \
        FOUR(name)                                                                                 \
    }
#else
#error "ROWS must be 4 or 8"
#endif
/* [type][all NV vectors, or one][rows - 1] */
static const struct tile_fns tile_table[][2][ROWS] = {
    {UP_TO(f32_all), UP_TO(f32_one)},   {UP_TO(f16_all), UP_TO(f16_one)},
    {UP_TO(bf16_all), UP_TO(bf16_one)}, {UP_TO(q8_all), UP_TO(q8_one)},
    {UP_TO(q4_all), UP_TO(q4_one)},
};
static int tile_type(enum dtype t)
{
    return t == DT_F32    ? 0
           : t == DT_BF16 ? 2
           : t == DT_Q8_0 ? 3
           : t == DT_Q4_0 ? 4
                          : 1; /* FP8 is converted to fp16 first */
}

/* Converts the panel of FP8 keys at vector i to fp16, once for all tiles. An fp16 load converts to
 * float in one instruction, bytes need four. Adjacent vectors stay adjacent. */
static void keys_as_fp16(const struct attn_block *b, int i, int dim, struct attn_block *to)
{
    uint16_t *out = b->fp16;
    bool adjacent = true;
    for (int j = 1; j < NV; j++)
        adjacent = adjacent && (const char *)b->k[i + j] == (const char *)b->k[i] + j * VW;
    int n = adjacent ? PANEL : VW;
    to->k_stride = (size_t)n;
    for (int j = 0; j < NV; j += n / VW, out += (size_t)n * (size_t)dim) {
        const uint8_t *k = b->k[i + j];
        if (b->k_stride == (size_t)n)
            vec_fp8_to_fp16(k, n * dim, out);
        else
            for (int d = 0; d < dim; d++)
                vec_fp8_to_fp16(k + (size_t)d * b->k_stride, n, out + (size_t)d * (size_t)n);
        for (int m = 0; m < n / VW; m++)
            to->k[i + j + m] = out + m * VW;
    }
}

/* The same for n columns of values, from c on, of keys [k0, k1). */
INLINE void values_as_fp16(const struct attn_block *b, int k0, int k1, int c, int n,
                           struct attn_block *to)
{
    for (int key = k0; key < k1; key++)
        vec_fp8_to_fp16((const uint8_t *)b->v[key / VW] + (size_t)(key % VW) * b->v_stride + c, n,
                        b->fp16 + (size_t)key * PANEL);
    to->v_stride = PANEL;
    for (int i = k0 / VW; i <= (k1 - 1) / VW; i++)
        to->v[i] = b->fp16 + (size_t)i * VW * PANEL;
}

/* [*k0, *k1): the keys that some tile sees. */
static void span_all(struct attn_tile *const *list, int n, const struct attn_block *b, int *k0,
                     int *k1)
{
    *k0 = ATTN_BLOCK, *k1 = 0;
    for (int j = 0; j < n; j++) {
        int from, to;
        span(list[j], b, &from, &to);
        *k0 = from < *k0 ? from : *k0;
        *k1 = to > *k1 ? to : *k1;
    }
}

/* Computes panel by panel of K, then of V, each for all tiles, so that a panel stays in the first-
 * level cache. */
static void attend(enum dtype k_type, enum dtype v_type, struct attn_tile *const *list, int n,
                   const struct attn_block *b, int dim, int v_dim)
{
    const struct tile_fns *all = tile_table[tile_type(k_type)][0],
                          *one = tile_table[tile_type(k_type)][1];
    bool k_fp8 = k_type == DT_F8_E4M3, v_fp8 = v_type == DT_F8_E4M3;
    struct attn_block fp16;
    int low = 0, high = ATTN_BLOCK;
    if (k_fp8 || v_fp8) {
        span_all(list, n, b, &low, &high);
        fp16.first = b->first;
        fp16.next = b->next;
        fp16.v_step = b->v_step;
    }
    const struct attn_block *keys = k_fp8 ? &fp16 : b, *values = v_fp8 ? &fp16 : b;
    for (int i = low / PANEL * NV; i * VW < high; i += NV) {
        if (k_fp8)
            keys_as_fp16(b, i, dim, &fp16);
        for (int j = 0; j < n; j++) {
            int k0, k1;
            span(list[j], b, &k0, &k1);
            int from = k0 / VW > i ? k0 / VW : i, to = (k1 + VW - 1) / VW;
            if (to >= i + NV && from == i)
                all[list[j]->rows - 1].scores(list[j], keys, i, dim);
            else
                for (; from < to && from < i + NV; from++)
                    one[list[j]->rows - 1].scores(list[j], keys, from, dim);
        }
    }
    for (int j = 0; j < n; j++)
        scores_to_weights(list[j], b, k_fp8 ? FP8_SCALE : 1.0f, v_fp8 ? FP8_SCALE : 1.0f);
    all = tile_table[tile_type(v_type)][0];
    one = tile_table[tile_type(v_type)][1];
    int c = 0;
    size_t panel = 0, step = v_fp8 ? 0 : b->v_panel;
    for (; c + PANEL <= v_dim; c += PANEL, panel += step) {
        if (v_fp8)
            values_as_fp16(b, low, high, c, PANEL, &fp16);
        for (int j = 0; j < n; j++)
            all[list[j]->rows - 1].values(list[j], values, c, panel, v_dim);
    }
    for (; c < v_dim; c += VW, panel += v_fp8 ? 0 : VW) {
        if (v_fp8)
            values_as_fp16(b, low, high, c, VW, &fp16);
        for (int j = 0; j < n; j++)
            one[list[j]->rows - 1].values(list[j], values, c, panel, v_dim);
    }
    for (int j = 0; j < n; j++)
        list[j]->fresh = false;
}

#ifdef INT8_SCORES
#define LOAD load_int8
#else
#define LOAD load
static void load(const float *const *from, int rows, int dim, float scale, float *q)
{
    int r = 0;
#ifdef STEEL_NEON
    for (; r + 4 <= rows && dim % 4 == 0; r += 4)
        for (int d = 0; d < dim; d += 4) {
            float32x4x4_t x;
            for (int i = 0; i < 4; i++)
                x.val[i] = vec_mul(vec_load(from[r + i] + d), vec_set(scale));
            vst4q_f32(q + (size_t)d * ROWS, x); /* ROWS is 4 */
        }
#elif defined __AVX2__
    __m128 x = _mm_set1_ps(scale);
    for (; r + 4 <= rows && dim % 4 == 0; r += 4)
        for (int d = 0; d < dim; d += 4) {
            __m128 a = _mm_mul_ps(_mm_loadu_ps(from[r] + d), x);
            __m128 b = _mm_mul_ps(_mm_loadu_ps(from[r + 1] + d), x);
            __m128 c = _mm_mul_ps(_mm_loadu_ps(from[r + 2] + d), x);
            __m128 e = _mm_mul_ps(_mm_loadu_ps(from[r + 3] + d), x);
            _MM_TRANSPOSE4_PS(a, b, c, e);
            _mm_storeu_ps(q + (size_t)d * ROWS + r, a);
            _mm_storeu_ps(q + (size_t)(d + 1) * ROWS + r, b);
            _mm_storeu_ps(q + (size_t)(d + 2) * ROWS + r, c);
            _mm_storeu_ps(q + (size_t)(d + 3) * ROWS + r, e);
        }
#endif
    for (; r < rows; r++)
        for (int d = 0; d < dim; d++)
            q[(size_t)d * ROWS + r] = from[r][d] * scale;
}
#endif

INLINE void pack_as(enum dtype type, const struct attn_block *b, int first, int last, int dim,
                    int v_dim, float *k_out, float *v_out)
{
    for (int i = first; i <= last; i++) {
        float *k = k_out + (size_t)(i / NV) * (size_t)dim * PANEL + i % NV * VW;
        for (int d = 0; d < dim; d++) {
            vec_store(k + (size_t)d * PANEL, vec_load_as(type, b->k[i], (size_t)d * b->k_stride));
            prefetch_step(b->next->k_tile[i], (size_t)d * b->k_step, b->k_step);
        }
        for (int j = 0; j < VW; j++) {
            float *v = v_out + (size_t)(i * VW + j) * PANEL;
            for (int c = 0; c < v_dim; c += VW) {
                size_t at = (size_t)j * (size_t)v_dim + (size_t)c;
                vec_store(v + (size_t)(c / PANEL) * ATTN_BLOCK * PANEL + c % PANEL,
                          vec_load_as(type, b->v[i], (size_t)j * b->v_stride + (size_t)c));
                prefetch_step(b->next->v_tile[i], at / VW * b->v_step, b->v_step);
            }
        }
    }
}

static void pack(enum dtype type, enum dtype v_type, const struct attn_block *b, int k0, int k1,
                 int dim, int v_dim, float *k_out, float *v_out, struct attn_block *to)
{
    int first = k0 / VW, last = k1 / VW;
    CHECK(type == v_type && !kv_quantised(type), "only F32, F16 and BF16 caches are packed");
    if (type == DT_F32)
        pack_as(DT_F32, b, first, last, dim, v_dim, k_out, v_out);
    else if (type == DT_F16)
        pack_as(DT_F16, b, first, last, dim, v_dim, k_out, v_out);
    else
        pack_as(DT_BF16, b, first, last, dim, v_dim, k_out, v_out);
    to->first = b->first;
    to->next = to;
    to->k_stride = to->v_stride = PANEL;
    to->v_panel = ATTN_BLOCK * PANEL;
    to->k_step = to->v_step = VW * sizeof(float);
    for (int i = first; i <= last; i++) {
        to->k[i] = k_out + (size_t)(i / NV) * (size_t)dim * PANEL + i % NV * VW;
        to->v[i] = v_out + (size_t)(i * VW) * PANEL;
        to->k_tile[i] = to->k[i];
        to->v_tile[i] = to->v[i];
    }
}

/* Packs rows of keys; transposes four keys at a time. */
static void pack_rows(enum dtype type, const void *const *from, int at, int dim, int v_dim,
                      float *rows, float *k_out, float *v_out)
{
    for (int i = 0; i < ATTN_ROWS; i++) {
        float *row = rows + (size_t)i * (size_t)dim, *v = v_out + (size_t)(at + i) * PANEL;
        row_load(type, from[i], dim, row);
        for (int c = 0; c < v_dim; c += VW)
            vec_store(v + (size_t)(c / PANEL) * ATTN_BLOCK * PANEL + c % PANEL, vec_load(row + c));
    }
    for (int i = 0; i < ATTN_ROWS; i += 4) {
        const float *row = rows + (size_t)i * (size_t)dim;
        float *k = k_out + (size_t)((at + i) / PANEL) * (size_t)dim * PANEL + (at + i) % PANEL;
        int d = 0;
#ifdef STEEL_NEON
        for (; d + 4 <= dim; d += 4) {
            float32x4x4_t x;
            float column[16];
            for (int j = 0; j < 4; j++)
                x.val[j] = vec_load(row + j * dim + d);
            vst4q_f32(column, x);
            for (int j = 0; j < 4; j++)
                vec_store(k + (size_t)(d + j) * PANEL, vec_load(column + 4 * j));
        }
#elif defined __AVX2__
        for (; d + 4 <= dim; d += 4) {
            __m128 x[4];
            UNROLL
            for (int j = 0; j < 4; j++)
                x[j] = _mm_loadu_ps(row + j * dim + d);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            UNROLL
            for (int j = 0; j < 4; j++)
                _mm_storeu_ps(k + (size_t)(d + j) * PANEL, x[j]);
        }
#endif
        for (; d < dim; d++)
            for (int j = 0; j < 4; j++)
                k[(size_t)d * PANEL + (size_t)j] = row[j * dim + d];
    }
}

static float sum(const float *l)
{
    return vec_sum(vec_load(l));
}

static float exp2_one(float x)
{
    float y[VW];
    vec_store(y, vec_exp2(vec_set(x)));
    return y[0];
}

static void merge(float *tm, float *tl, float *to, float m, float l, const float *o, int dim)
{
    float max = m > *tm ? m : *tm;
    float scale[2 * VW];
    vec_store(scale, vec_exp2(vec_set(*tm - max)));
    vec_store(scale + VW, vec_exp2(vec_set(m - max)));
    float old = scale[0], new = scale[VW];
    *tm = max;
    *tl = *tl * old + l * new;
    for (int c = 0; c < dim; c += VW)
        vec_store(to + c, vec_add(vec_mul(vec_load(to + c), vec_set(old)),
                                  vec_mul(vec_load(o + c), vec_set(new))));
}

static void finish(float tl, const float *to, float *out, int dim)
{
    if (tl == 0.0f) {
        memset(out, 0, (size_t)dim * sizeof(float));
        return;
    }
    /* + 0 turns -0, from a sum that underflowed, into 0, as further zero weights would */
    for (int c = 0; c < dim; c += VW)
        vec_store(out + c, vec_add(vec_mul(vec_load(to + c), vec_set(1.0f / tl)), vec_set(0.0f)));
}

static void turn(float *out, int dim)
{
    kv_turn(out, dim);
}

static void relative(const float *r, const float *table, size_t stride, int n_r, int first, int n,
                     float scale, float *out)
{
    for (int i = first / VW * VW; i < n; i += VW) {
        VEC sum = vec_set(0.0f);
        for (int k = 0; k < n_r; k++)
            sum = vec_fma(vec_set(r[k]), vec_load(table + (size_t)k * stride + i), sum);
        vec_store(out + i, vec_mul(sum, vec_set(scale)));
    }
}

const struct attn_row_kernels ROW_KERNELS = {.sum = sum,
                                             .merge = merge,
                                             .finish = finish,
                                             .exp2 = exp2_one,
                                             .turn = turn,
                                             .relative = relative};

const struct attn_kernels KERNELS = {
    .unit = VW,
    .rows = ROWS,
    .width = VW,
    .block = ATTN_BLOCK,
    .panel = PANEL,
    .load = LOAD,
    .attend = attend,
    .pack = pack,
    .pack_rows = pack_rows,
    .row = &ROW_KERNELS,
};
