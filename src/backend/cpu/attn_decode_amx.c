/*
 * Attention kernels for decode on AMX. A tile A is the eight query rows of a group twice: high parts in
 * rows 0 to 7, low parts in rows 8 to 15. So few rows fill a tile, and every factor keeps 16 bits. One
 * call takes a chunk of 256 keys, so the softmax needs no rescaling.
 *
 *   scores   C (rows, keys)    += A (rows, d)    * B (d, keys)
 *   values   C (rows, columns) += A (rows, keys) * B (keys, columns)
 *
 *   amx_q4   Q4_0 keys and values on 8-bit tiles.
 *            Scores: queries are rounded as in attn_int8.h. A tile spans 32 components, because keys
 *            have a scale per 32. The result has the same bytes as attn_vnni.c.
 *            Values: weights times the values' scales are rounded to 16 bits, with one scale per chunk
 *            and block of 32 columns. A tile B is 64 keys x 16 columns.
 *            (The same kernel for Q8_0 was no faster than attn_vnni.c.)
 *   amx_fp8  FP8 keys and values on bf16 tiles; FP8 numbers are exact in bf16.
 *
 * Tiles B interleave four values of the summed index (bf16: two). tmm0-3: C; tmm4, 5: A and B of 8-bit
 * scores; tmm6, 7: A and B of everything else. Data stored for a tile load is loaded one step later,
 * because tile loads wait until the stores have reached the cache. The chunk's values are prefetched
 * while its keys are multiplied, and the next chunk's keys while its values are.
 *
 * Arithmetic is the limit, not memory. Reached on a Xeon, one thread, one sequence at 8,192: Q4_0 839 us,
 * FP8 985 us; F16 with AVX-512 1,312 us (docs/formats.md).
 */
#include "backend/cpu/attn_decode_amx.h"
#include "backend/cpu/amx.h"
#include "backend/cpu/attn.h"
#include "backend/cpu/attn_load.h"
#include "backend/cpu/vec.h"

#include <immintrin.h>

enum { ROWS = 8, KEYS = ATTN_CHUNK, VECTORS = KEYS / 16, TILE = 1024, BLOCKS = 4 };

/* Contents of a tile's s. attn.c allocates 2 * ATTN_MAX_ROWS * ATTN_CHUNK floats for it. */
struct work {
    float s[ROWS][KEYS];          /* scores, then weights */
    int32_t dots[2][BLOCKS][256]; /* C as integers or floats, of this step and the previous one */
    uint8_t weights[8][TILE];     /* A, for each 64 keys (bf16: 32) */
    uint8_t tiles[2][8][TILE];    /* B, of this step and the previous one; D is at most 256 */
};
_Static_assert(sizeof(struct work) <= (size_t)2 * ATTN_MAX_ROWS * ATTN_CHUNK * sizeof(float),
               "the room for s");

/* Configures tile 4 (queries) with rows of query_bytes bytes, and tile 5 (keys) with the matching
 * number of rows. */
static void configure(int query_bytes)
{
    struct amx_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i == 5 ? query_bytes / 4 : 16);
        c.row_bytes[i] = (uint16_t)(i == 4 ? query_bytes : 64);
    }
    amx_configure(&c);
}

/* [*i0, *i1]: the vectors of 16 keys that some row sees. */
static void span(const struct attn_tile *t, const struct attn_block *b, int *i0, int *i1)
{
    *i0 = t->lo > b->first ? (t->lo - b->first) / 16 : 0;
    *i1 = t->hi - b->first < KEYS - 1 ? (t->hi - b->first) / 16 : VECTORS - 1;
}

/* Prefetches bytes [from, to) of a vector's keys or values to the second-level cache. */
INLINE void fetch(const void *tile, size_t from, size_t to)
{
    for (size_t i = (from + 63) / 64 * 64; i < to; i += 64)
        __builtin_prefetch((const char *)tile + i, 0, 2);
}

/* Turns scores into weights 2^(s - m) and updates m and l. */
static void scores_to_weights(const struct attn_tile *t, const struct attn_block *b, int i0, int i1,
                              struct work *w)
{
    for (int r = 0; r < t->rows; r++) {
        float *row = w->s[r];
        int lo = t->row_lo[r], hi = t->row_hi[r];
        bool cut = lo > b->first + i0 * 16 || hi < b->first + i1 * 16 + 15;
        VEC max = vec_set(ATTN_START), sum = vec_set(0.0f);
        for (int i = i0; i <= i1; i++) {
            VEC x = vec_load(row + i * 16);
            if (t->cap != 0)
                x = vec_softcap(x, t->cap, 1.0f / t->cap);
            if (cut)
                x = vec_within(x, b->first + i * 16, lo, hi, ATTN_MASKED);
            if (cut || t->cap != 0)
                vec_store(row + i * 16, x);
            max = vec_max(max, x);
        }
        t->m[r] = vec_hmax(max);
        max = vec_set(t->m[r]);
        for (int i = i0; i <= i1; i++) {
            VEC p = vec_exp2(vec_sub(vec_load(row + i * 16), max));
            vec_store(row + i * 16, p);
            sum = vec_add(sum, p);
        }
        vec_store(t->l + r * 16, sum);
    }
}

/* 8-bit tiles */

/* Contents of a tile's q: codes as D/32 tiles A of 16 rows x 32 bytes; per block and row a scale
 * and the sum of the codes. */
struct queries {
    int8_t *codes;
    float *scale; /* (D/32, ROWS) */
    int32_t *sum;
};

static inline struct queries queries(const float *q, int dim)
{
    int8_t *p = (int8_t *)q;
    float *scale = (float *)(p + (size_t)dim / KV_BLOCK * 512);
    return (struct queries){p, scale, (int32_t *)scale + dim / KV_BLOCK * ROWS};
}

enum { INT8_MOST = 127 * 256 + 127 }; /* largest code of a query */

static void load_q4(const float *const *from, int rows, int dim, float factor, float *q)
{
    const __m512i most = _mm512_set1_epi32(INT8_MOST), round = _mm512_set1_epi32(128);
    struct queries to = queries(q, dim);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < dim / KV_BLOCK; b++) {
            VEC x0 = vec_load(from[r] + b * KV_BLOCK), x1 = vec_load(from[r] + b * KV_BLOCK + 16);
            float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
            float inverse = max > 0 ? (float)INT8_MOST / max : 0.0f;
            __m512i c0 = _mm512_cvtps_epi32(vec_mul(x0, vec_set(inverse)));
            __m512i c1 = _mm512_cvtps_epi32(vec_mul(x1, vec_set(inverse)));
            c0 = _mm512_min_epi32(c0, most); /* two roundings may exceed it */
            c1 = _mm512_min_epi32(c1, most);
            __m128i *high = (__m128i *)(to.codes + b * 512 + r * 32);
            __m128i *low = (__m128i *)(to.codes + b * 512 + (ROWS + r) * 32);
            _mm_storeu_si128(low, _mm512_cvtepi32_epi8(c0)); /* the low byte, signed */
            _mm_storeu_si128(low + 1, _mm512_cvtepi32_epi8(c1));
            _mm_storeu_si128(
                high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(c0, round), 8)));
            _mm_storeu_si128(
                high + 1, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(c1, round), 8)));
            to.scale[b * ROWS + r] = inverse > 0 ? factor / inverse : 0.0f;
            to.sum[b * ROWS + r] = _mm512_reduce_add_epi32(_mm512_add_epi32(c0, c1));
        }
}

/* Unpacks 32 components of 16 Q4_0 keys as a tile B of codes 0 to 15. */
INLINE void unpack_keys(const char *k, size_t stride, uint8_t *out)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    UNROLL
    for (int g = 0; g < 4; g++) {
        __m512i x = _mm512_loadu_si512(k + (size_t)g * stride);
        _mm512_store_si512(out + 64 * g, _mm512_and_si512(x, nibble));
        _mm512_store_si512(out + 64 * (g + 4), _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
    }
}

/* dots[n] = block n of the queries times block n of a vector of keys */
#define SCORE_BLOCK(n)                                                                             \
    if (count > (n)) {                                                                             \
        amx_zero(n);                                                                               \
        amx_load(4, codes + 512 * (n), 32);                                                        \
        amx_load(5, keys + 512 * (n), 64);                                                         \
        amx_dot(n, 4, 5);                                                                          \
        amx_store(n, dots[n], 64);                                                                 \
    }

/* Multiplies blocks [first, first + count) of the queries with vector i of keys. */
INLINE void multiply_keys(const struct attn_tile *t, int i, int first, int count, int dim,
                          struct work *w)
{
    const int8_t *codes = queries(t->q, dim).codes + first * 512;
    int32_t(*dots)[256] = w->dots[i & 1];
    const uint8_t *keys = w->tiles[i & 1][0];
    SCORE_BLOCK(0)
    SCORE_BLOCK(1)
    SCORE_BLOCK(2)
    SCORE_BLOCK(3)
}

/* s[r, 16 i ..] += products of vector i times their scales. Prefetches the vector's values
 * meanwhile. */
INLINE void add_scores(const struct attn_tile *t, const struct attn_block *b, int i, int first,
                       int count, int dim, struct work *w)
{
    struct queries q = queries(t->q, dim);
    const int32_t(*dots)[256] = (const int32_t(*)[256])w->dots[i & 1];
    size_t part = (size_t)dim * b->v_step / (size_t)t->rows + 1;
    VEC scale[BLOCKS];
    UNROLL
    for (int n = 0; n < count; n++)
        scale[n] = key_scale(DT_Q4_0, b, i, first + n);
    for (int r = 0; r < t->rows; r++) {
        VEC acc = first ? vec_load(w->s[r] + i * 16) : vec_set(0.0f);
        UNROLL
        for (int n = 0; n < count; n++) {
            __m512i high = _mm512_loadu_si512(dots[n] + 16 * r);
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8),
                                           _mm512_loadu_si512(dots[n] + 16 * (ROWS + r)));
            int at = (first + n) * ROWS + r;
            sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(8 * q.sum[at]));
            VEC x = vec_mul(_mm512_cvtepi32_ps(sum), vec_set(q.scale[at]));
            acc = vec_fma(x, scale[n], acc);
        }
        vec_store(w->s[r] + i * 16, acc);
        if (first == 0)
            fetch(b->v_tile[i], (size_t)r * part, (size_t)(r + 1) * part);
    }
}

/* s[r, 16 i ..] (+)= q[r] . K for vectors [i0, i1] and `count` blocks of components. A pipeline of
 * three stages, one vector apart: unpack, multiply, scale. */
INLINE void scores_q4(const struct attn_tile *t, const struct attn_block *b, int i0, int i1,
                      int first, int count, int dim, struct work *w)
{
    size_t line = b->k_stride * 4; /* stride between groups of four components */
    for (int i = i0; i <= i1 + 2; i++) {
        if (i <= i1) {
            const char *keys = (const char *)b->k[i] + (size_t)first * 4 * line;
            for (int n = 0; n < count; n++)
                unpack_keys(keys + (size_t)n * 4 * line, line, w->tiles[i & 1][0] + 512 * n);
        }
        if (i > i0 && i <= i1 + 1)
            multiply_keys(t, i - 1, first, count, dim, w);
        if (i > i0 + 1)
            add_scores(t, b, i - 2, first, count, dim, w);
    }
}

/* The scales of the values of vector i in block c. Keys that no row sees get 0, since their scales
 * may be garbage. */
INLINE VEC scales_seen(const struct attn_tile *t, const struct attn_block *b, int i, int c)
{
    return vec_within(value_scale(DT_Q4_0, b, i, c), b->first + i * 16, t->lo, t->hi, 0.0f);
}

/* Packs the weights for block c of columns as tiles A of 64 keys, and returns the value of one code
 * (weights are at most 1). Byte 16 L + 4 m + e of a row is key 16 m + 4 L + e: the order in which
 * packs interleaves vectors. */
INLINE float pack_weights(const struct attn_tile *t, const struct attn_block *b, int c, int i0,
                          int i1, struct work *w)
{
    const __m512i round = _mm512_set1_epi16(128);
    VEC scale[VECTORS], most = vec_set(0.0f);
    for (int i = i0; i <= i1; i++) {
        scale[i] = scales_seen(t, b, i, c);
        most = vec_max(most, _mm512_abs_ps(scale[i]));
    }
    float max = vec_hmax(most);
    VEC inverse = vec_set(max > 0 ? 32512.0f / max : 0.0f); /* 127 * 256 */
    for (int i = i0; i <= i1; i++)
        scale[i] = vec_mul(scale[i], inverse);
    for (int i = i0 / 4 * 4; i < i1 / 4 * 4 + 4; i++)
        for (int r = 0; r < t->rows && (i < i0 || i > i1); r++) {
            vec_store(w->s[r] + i * 16, vec_set(0.0f));
            scale[i] = vec_set(0.0f);
        }
    for (int j = i0 / 4; j <= i1 / 4; j++)
        for (int r = 0; r < t->rows; r++) {
            __m512i x[4];
            UNROLL
            for (int m = 0; m < 4; m++)
                x[m] = _mm512_cvtps_epi32(
                    vec_mul(vec_load(w->s[r] + (4 * j + m) * 16), scale[4 * j + m]));
            __m512i a = _mm512_packs_epi32(x[0], x[1]), z = _mm512_packs_epi32(x[2], x[3]);
            __m512i high_a = _mm512_srai_epi16(_mm512_add_epi16(a, round), 8);
            __m512i high_z = _mm512_srai_epi16(_mm512_add_epi16(z, round), 8);
            a = _mm512_sub_epi16(a, _mm512_slli_epi16(high_a, 8));
            z = _mm512_sub_epi16(z, _mm512_slli_epi16(high_z, 8));
            _mm512_storeu_si512(w->weights[j + c % 2 * 4] + 64 * r,
                                _mm512_packs_epi16(high_a, high_z));
            _mm512_storeu_si512(w->weights[j + c % 2 * 4] + 64 * (ROWS + r),
                                _mm512_packs_epi16(a, z));
        }
    return max / 32512.0f;
}

/* 32 columns of a value as signed bytes. */
INLINE __m256i value_bytes(const char *v, int c)
{
    __m128i x = _mm_loadu_si128((const __m128i *)(v + 16 * c));
    __m256i both = _mm256_set_m128i(_mm_srli_epi16(x, 4), x);
    return _mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
}

/* Packs 64 keys x the 32 columns of block c as two tiles B, and prefetches lines of the next
 * chunk's keys. Columns have the order of interleaving four rows of bytes: tile T has columns 8T to
 * 8T + 3, the same + 16, 8T + 4 to 8T + 7, the same + 16. Row 4 L + m of a tile has keys 16 m + 4 L
 * to 16 m + 4 L + 3. */
INLINE void pack_values(const struct attn_block *b, int j, int c, int blocks, size_t k_bytes,
                        uint8_t (*out)[TILE])
{
    size_t step = k_bytes / (size_t)(4 * blocks) + 1;
    for (int m = 0; m < 4; m++) {
        const char *v = b->v[4 * j + m];
        const void *next = b->next->k_tile[4 * j + m];
        UNROLL
        for (int quad = 0; quad < 4; quad++, v += 4 * b->v_stride) {
            __m256i v0 = value_bytes(v, c), v1 = value_bytes(v + b->v_stride, c);
            __m256i v2 = value_bytes(v + 2 * b->v_stride, c);
            __m256i v3 = value_bytes(v + 3 * b->v_stride, c);
            __m256i a = _mm256_unpacklo_epi8(v0, v1), z = _mm256_unpacklo_epi8(v2, v3);
            __m256i *to = (__m256i *)(out[0] + 64 * (4 * quad + m));
            _mm256_storeu_si256(to, _mm256_unpacklo_epi16(a, z));
            _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi16(a, z));
            a = _mm256_unpackhi_epi8(v0, v1);
            z = _mm256_unpackhi_epi8(v2, v3);
            to = (__m256i *)(out[1] + 64 * (4 * quad + m));
            _mm256_storeu_si256(to, _mm256_unpacklo_epi16(a, z));
            _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi16(a, z));
            size_t at = (size_t)(4 * c + quad) * step;
            fetch(next, at, at + step < k_bytes ? at + step : k_bytes);
        }
    }
}

/* o[r] of block c from its tiles. */
INLINE void multiply_values(const struct attn_tile *t, int c, int j0, int j1, int dim, float unit,
                            struct work *w)
{
    amx_zero(0);
    amx_zero(1);
    for (int j = j0; j <= j1; j++) {
        amx_load(6, w->weights[j + c % 2 * 4], 64);
        amx_load(7, w->tiles[c & 1][2 * j], 64);
        amx_dot(0, 6, 7);
        amx_load(7, w->tiles[c & 1][2 * j + 1], 64);
        amx_dot(1, 6, 7);
    }
    amx_store(0, w->dots[0][0], 64);
    amx_store(1, w->dots[0][1], 64);
    for (int h = 0; h < 2 * t->rows; h++) {
        int r = h / 2, half = h % 2;
        __m512i high = _mm512_loadu_si512(w->dots[0][half] + 16 * r);
        __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8),
                                       _mm512_loadu_si512(w->dots[0][half] + 16 * (ROWS + r)));
        VEC x = vec_mul(_mm512_cvtepi32_ps(sum), vec_set(unit));
        x = _mm512_shuffle_f32x4(x, x, 0xd8);
        float *o = t->o + (size_t)r * (size_t)dim + c * KV_BLOCK + 8 * half;
        _mm256_storeu_ps(o, _mm512_castps512_ps256(x));
        _mm256_storeu_ps(o + 16, _mm512_extractf32x8_ps(x, 1));
    }
}

static void values_q4(const struct attn_tile *t, const struct attn_block *b, int i0, int i1,
                      int dim, struct work *w)
{
    int j0 = i0 / 4, j1 = i1 / 4, blocks = dim / KV_BLOCK;
    float unit[2];
    for (int c = 0; c <= blocks; c++) {
        if (c < blocks) {
            unit[c & 1] = pack_weights(t, b, c, i0, i1, w);
            for (int j = j0; j <= j1; j++)
                pack_values(b, j, c, blocks, (size_t)dim * b->next->k_step,
                            w->tiles[c & 1] + 2 * j);
        }
        if (c > 0)
            multiply_values(t, c - 1, j0, j1, dim, unit[(c - 1) & 1], w);
    }
}

static void attend_q4(enum dtype k_type, enum dtype v_type, struct attn_tile *const *tiles, int n,
                      const struct attn_block *b, int dim, int v_dim)
{
    (void)k_type, (void)v_type, (void)v_dim;
    configure(32);
    for (int k = 0; k < n; k++) {
        struct attn_tile *t = tiles[k];
        struct work *w = (struct work *)t->s;
        int i0, i1, first = 0, blocks = dim / KV_BLOCK;
        span(t, b, &i0, &i1);
        for (; first + BLOCKS <= blocks; first += BLOCKS)
            scores_q4(t, b, i0, i1, first, BLOCKS, dim, w);
        for (; first < blocks; first++)
            scores_q4(t, b, i0, i1, first, 1, dim, w);
        scores_to_weights(t, b, i0, i1, w);
        values_q4(t, b, i0, i1, dim, w);
        t->fresh = false;
    }
    amx_release();
}

/* bf16 tiles */

/* Splits 32 floats into bf16 and the bf16 rounding error. */
static inline void split(VEC low, VEC high, void *out, void *lost)
{
    __m512i x = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
    __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
    low = vec_sub(low, _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)));
    high = vec_sub(high, _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
    _mm512_storeu_si512(out, x);
    _mm512_storeu_si512(lost, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* q: tiles A of 32 components. */
static void load_fp8(const float *const *from, int rows, int dim, float factor, float *q)
{
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += 32) {
            uint8_t *tile = (uint8_t *)q + d / 32 * TILE;
            split(vec_mul(vec_load(from[r] + d), vec_set(factor)),
                  vec_mul(vec_load(from[r] + d + 16), vec_set(factor)), tile + 64 * r,
                  tile + 64 * (ROWS + r));
        }
}

/* Converts 64 FP8 codes to bf16. *low gets the lower half of each 16 codes, *high the upper. The
 * exponent's four bits straddle two bytes: low byte eMMM0000, high byte s0111Exx or s1000Exx. The
 * eight subnormal codes, multiples of 2^-9, are looked up. */
INLINE void widen(__m512i x, __m512i *low, __m512i *high)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i small_low = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i small_high = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
    __mmask64 small = _mm512_testn_epi8_mask(x, _mm512_set1_epi8(0x78));
    __m512i index = _mm512_and_si512(x, _mm512_set1_epi8(7));
    __m512i l = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi8((char)0xf0));
    __m512i h = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(7));
    h = _mm512_add_epi8(h, _mm512_set1_epi8(0x3c));
    l = _mm512_mask_shuffle_epi8(l, small, small_low, index);
    h = _mm512_mask_shuffle_epi8(h, small, small_high, index);
    h = _mm512_ternarylogic_epi32(h, x, sign, 0xf8); /* h | (x & sign) */
    *low = _mm512_unpacklo_epi8(l, h);
    *high = _mm512_unpackhi_epi8(l, h);
}

/* Four components of 16 keys. */
INLINE __m512i four_rows(const char *k, size_t stride)
{
    if (stride == 16)
        return _mm512_loadu_si512(k);
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)k));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(k + stride)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(k + 2 * stride)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(k + 3 * stride)), 3);
}

/* Orders four rows of 16 bytes so that `widen` gives two rows of a tile B: bytes of rows 0 and 1
 * interleaved in the lower half of each 16, those of rows 2 and 3 in the upper. */
INLINE __m512i pair_rows(__m512i x)
{
    const __m512i order = _mm512_set_epi8(
        63, 47, 62, 46, 61, 45, 60, 44, 31, 15, 30, 14, 29, 13, 28, 12, 59, 43, 58, 42, 57, 41, 56,
        40, 27, 11, 26, 10, 25, 9, 24, 8, 55, 39, 54, 38, 53, 37, 52, 36, 23, 7, 22, 6, 21, 5, 20,
        4, 51, 35, 50, 34, 49, 33, 48, 32, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi8(order, x);
}

/* Converts vector i of keys to tiles B of 32 components, and prefetches as many lines of its
 * values. */
INLINE void widen_keys(const struct attn_block *b, int i, int dim, uint8_t *to)
{
    const char *k = b->k[i], *v = b->v_tile[i];
    for (int d = 0; d < dim; d += 4, k += 4 * b->k_stride, v += 64, to += 128) {
        __m512i low, high;
        widen(pair_rows(four_rows(k, b->k_stride)), &low, &high);
        _mm512_store_si512(to, low);
        _mm512_store_si512(to + 64, high);
        __builtin_prefetch(v, 0, 2);
    }
}

/* C of even and of odd tiles of a vector, as two independent chains of products. */
#define SCORE_VECTOR(even, odd)                                                                    \
    do {                                                                                           \
        amx_zero(even);                                                                            \
        amx_zero(odd);                                                                             \
        for (int d_ = 0; d_ < dim / 32; d_ += 2) {                                                 \
            amx_load(4, q + d_ * TILE, 64);                                                        \
            amx_load(5, keys + d_ * TILE, 64);                                                     \
            amx_dot_bf16(even, 4, 5);                                                              \
            amx_load(6, q + (d_ + 1) * TILE, 64);                                                  \
            amx_load(7, keys + (d_ + 1) * TILE, 64);                                               \
            amx_dot_bf16(odd, 6, 7);                                                               \
        }                                                                                          \
    } while (0)

/* s[r, 16 i ..] = q[r] . K for vectors [i0, i1]. A pipeline of four stages, one vector apart:
 * convert, multiply, store, add. */
static void scores_fp8(const struct attn_tile *t, const struct attn_block *b, int i0, int i1,
                       int dim, struct work *w)
{
    const uint8_t *q = (const uint8_t *)t->q;
    for (int i = i0; i <= i1 + 3; i++) {
        if (i <= i1)
            widen_keys(b, i, dim, w->tiles[i & 1][0]);
        int at = i - 2; /* the vector to store */
        if (at >= i0 && at <= i1 && (at & 1)) {
            amx_store(2, w->dots[1][0], 64);
            amx_store(3, w->dots[1][1], 64);
        } else if (at >= i0 && at <= i1) {
            amx_store(0, w->dots[0][0], 64);
            amx_store(1, w->dots[0][1], 64);
        }
        at = i - 1;
        const uint8_t *keys = w->tiles[at & 1][0];
        if (at >= i0 && at <= i1 && (at & 1))
            SCORE_VECTOR(2, 3);
        else if (at >= i0 && at <= i1)
            SCORE_VECTOR(0, 1);
        at = i - 3;
        const float *c = (const float *)w->dots[at & 1][0];
        for (int r = 0; r < t->rows && at >= i0; r++, c += 16) {
            VEC high = vec_add(vec_load(c), vec_load(c + 256));
            VEC low = vec_add(vec_load(c + 16 * ROWS), vec_load(c + 16 * ROWS + 256));
            vec_store(w->s[r] + at * 16, vec_add(high, low));
        }
    }
}

/* Packs weights as tiles A of 32 keys. */
static void pack_weights_fp8(const struct attn_tile *t, int i0, int i1, struct work *w)
{
    for (int r = 0; r < t->rows; r++)
        for (int j = i0 / 2; j <= i1 / 2; j++) {
            VEC p[2];
            for (int h = 0; h < 2; h++)
                p[h] = 2 * j + h < i0 || 2 * j + h > i1 ? vec_set(0.0f)
                                                        : vec_load(w->s[r] + (2 * j + h) * 16);
            split(p[0], p[1], w->weights[j] + 64 * r, w->weights[j] + 64 * (ROWS + r));
        }
}

/* Converts 64 columns from c on of 32 keys, from vector 2j on, to four tiles B, and prefetches as
 * many lines of the next chunk's keys. Tile n has column 16 L + 4 n + i at 4 L + i. */
INLINE void widen_values(const struct attn_block *b, int j, int c, uint8_t (*out)[TILE])
{
    for (int half = 0; half < 2; half++) {
        const char *v = (const char *)b->v[2 * j + half] + c;
        const char *next = (const char *)b->next->k_tile[2 * j + half] + (size_t)c * 16;
        uint8_t *to = out[0] + 512 * half;
        UNROLL
        for (int row = 0; row < 8; row++, v += 2 * b->v_stride, to += 64) {
            __m512i x = _mm512_loadu_si512(v), y = _mm512_loadu_si512(v + b->v_stride), low, high;
            widen(_mm512_unpacklo_epi8(x, y), &low, &high);
            _mm512_store_si512(to, low);
            _mm512_store_si512(to + TILE, high);
            widen(_mm512_unpackhi_epi8(x, y), &low, &high);
            _mm512_store_si512(to + 2 * TILE, low);
            _mm512_store_si512(to + 3 * TILE, high);
            __builtin_prefetch(next + 128 * row, 0, 2);
            __builtin_prefetch(next + 128 * row + 64, 0, 2);
        }
    }
}

#define VALUE_COLUMNS(n, tile)                                                                     \
    amx_load(tile, tiles[n], 64);                                                                  \
    amx_dot_bf16(n, 4, tile);

/* o for columns [c, c + 64). */
static void values_fp8(const struct attn_tile *t, const struct attn_block *b, int i0, int i1, int c,
                       int dim, struct work *w)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    int j0 = i0 / 2, j1 = i1 / 2;
    for (int j = j0; j <= j1 + 1; j++) {
        if (j <= j1)
            widen_values(b, j, c, w->tiles[j & 1]);
        if (j == j0)
            continue;
        uint8_t(*tiles)[TILE] = w->tiles[(j - 1) & 1];
        amx_load(4, w->weights[j - 1], 64);
        VALUE_COLUMNS(0, 5)
        VALUE_COLUMNS(1, 6)
        VALUE_COLUMNS(2, 7)
        VALUE_COLUMNS(3, 5)
    }
    float(*dots)[256] = (float(*)[256])w->dots[0];
    amx_store(0, dots[0], 64);
    amx_store(1, dots[1], 64);
    amx_store(2, dots[2], 64);
    amx_store(3, dots[3], 64);
    for (int r = 0; r < t->rows; r++)
        for (int n = 0; n < 4; n++)
            for (int lane = 0; lane < 4; lane++) {
                const float *high = dots[n] + 16 * r + 4 * lane, *low = high + 16 * ROWS;
                _mm_storeu_ps(t->o + (size_t)r * (size_t)dim + c + 16 * lane + 4 * n,
                              _mm_add_ps(_mm_loadu_ps(high), _mm_loadu_ps(low)));
            }
}

static void attend_fp8(enum dtype k_type, enum dtype v_type, struct attn_tile *const *tiles, int n,
                       const struct attn_block *b, int dim, int v_dim)
{
    (void)k_type, (void)v_type, (void)v_dim;
    configure(64);
    for (int k = 0; k < n; k++) {
        struct attn_tile *t = tiles[k];
        struct work *w = (struct work *)t->s;
        int i0, i1;
        span(t, b, &i0, &i1);
        scores_fp8(t, b, i0, i1, dim, w);
        scores_to_weights(t, b, i0, i1, w);
        pack_weights_fp8(t, i0, i1, w);
        for (int c = 0; c < dim; c += 64)
            values_fp8(t, b, i0, i1, c, dim, w);
        t->fresh = false;
    }
    amx_release();
}

#define KERNELS(unit_, load_, attend_)                                                             \
    {                                                                                              \
        .unit = unit_, .rows = ROWS, .width = 16, .block = KEYS, .panel = 16, .load = load_,       \
        .attend = attend_, .row = &attn_rows_avx512,                                               \
    }

const struct attn_kernels attn_kernels_amx_q4 = KERNELS(KV_BLOCK, load_q4, attend_q4);
const struct attn_kernels attn_kernels_amx_fp8 = KERNELS(64, load_fp8, attend_fp8);
