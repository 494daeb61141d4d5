/*
 * Attention kernels for prefill on AMX bf16 tiles, at nearly fp32 precision.
 *
 * Every factor is split into two bf16 numbers, x = hi + lo. That is exact for fp16, bf16 and fp8 keys and
 * values; queries, weights and other types keep 16 bits of mantissa. A product becomes
 * hi*hi + hi*lo + lo*hi, and the dropped lo*lo is below 2^-16 of a term. Three tile products still run at
 * five times the rate of float FMA, which is the limit of attn_avx512.c.
 *
 * One call takes a whole chunk of 256 keys, so the softmax needs no rescaling. A query tile has 32 rows:
 * two row tiles A times two tiles B fill four accumulators.
 *   scores   C (rows, keys)    += A (rows, 32 d)    * B (32 d, keys)
 *   values   C (rows, columns) += A (rows, 32 keys) * B (32 keys, columns)
 * tmm0-3: C; tmm4-5: A; tmm6-7: B. A tile B interleaves pairs of the summed index: 16 rows of
 * 16 x (even, odd).
 *
 * Rows are independent of each other here too. A row computed here and by attn_avx512.c differs in the
 * last bits (see ops.h on determinism).
 *
 * Reached on a Xeon with two threads: 512 tokens at depth 4,096 in 73 ms, with AVX-512 143 ms; a prompt
 * of 512 in 4.5 ms, with AVX-512 11.2 ms (docs/performance.md).
 */
#include "backend/cpu/attn.h"
#include "backend/cpu/attn_load.h"
#include "backend/cpu/vec.h"
#include "base/error.h"

enum {
    TILE = 512, /* bf16 values of a tile: 16 rows of 32 */
    KEYS = ATTN_CHUNK,
    ROWS = 32,
    D_STEP = 32, /* components per score tile, and keys per value tile */
};

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* GCC's tile loads are not declared to read memory. This barrier completes earlier stores first. */
static inline void memory_barrier(void)
{
    __asm__ volatile("" ::: "memory");
}

/* Configures tiles for `rows` query rows. The second row tile has the rows beyond 16, or a single
 * unused one, since a tile must have a row. */
static void configure(int rows)
{
    int top = rows < 16 ? rows : 16, bottom = rows > 16 ? rows - 16 : 1;
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = 64;
        c.rows[i] = (uint8_t)(i < 2 || i == 4 ? top : i < 4 || i == 5 ? bottom : 16);
    }
    __asm__ volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}

/* Splits 32 floats into hi and lo bf16 parts. */
static inline void split(__m512 even, __m512 odd, void *hi_out, void *lo_out)
{
    __m512i hi = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(hi));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(hi, 1));
    even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
    odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
    _mm512_storeu_si512(hi_out, hi);
    _mm512_storeu_si512(lo_out, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* Whether values of the type are exact in bf16, so that there is no lo part. */
static inline bool is_bf16(enum dtype type)
{
    return type == DT_BF16 || type == DT_F8_E4M3;
}

/* Writes pairs (a[i], b[i]): the hi and lo parts of a row of a tile B. */
INLINE void pair(enum dtype type, __m512 a, __m512 b, uint16_t *hi_out, uint16_t *lo_out)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000), half = _mm512_set1_epi32(0x8000);
    if (is_bf16(type)) {
        __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
        _mm512_storeu_si512(hi_out,
                            _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(b), upper)));
        return;
    }
    /* hi is rounded to the upper 16 bits of the float. The remainder of an fp16 value fits in the
     * upper 16 bits of another. */
    __m512i a_hi = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half), upper);
    __m512i b_hi = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half), upper);
    __m512i a_lo = _mm512_castps_si512(_mm512_sub_ps(a, _mm512_castsi512_ps(a_hi)));
    __m512i b_lo = _mm512_castps_si512(_mm512_sub_ps(b, _mm512_castsi512_ps(b_hi)));
    _mm512_storeu_si512(hi_out, _mm512_or_si512(_mm512_srli_epi32(a_hi, 16), b_hi));
    b_lo = _mm512_and_si512(b_lo, upper); /* no-op for fp16; truncates products of code and scale */
    _mm512_storeu_si512(lo_out, _mm512_or_si512(_mm512_srli_epi32(a_lo, 16), b_lo));
}

/* q: for each row tile and step of 32 components, a hi tile and a lo tile. */
static void load(const float *const *from, int rows, int dim, float scale, float *q)
{
    uint16_t *out = (uint16_t *)q;
    __m512 x = _mm512_set1_ps(scale);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += D_STEP) {
            uint16_t *hi =
                out + (size_t)(r / 16 * (dim / D_STEP) + d / D_STEP) * 2 * TILE + r % 16 * 32;
            split(_mm512_mul_ps(_mm512_loadu_ps(from[r] + d), x),
                  _mm512_mul_ps(_mm512_loadu_ps(from[r] + d + 16), x), hi, hi + TILE);
        }
}

/* Prefetches `bytes` at p to the second-level cache. */
static inline void fetch(const void *p, int bytes)
{
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}

/* k_out: for each 16 keys, dim/32 hi tiles, then dim/32 lo tiles. v_out: for each 32 keys and 16
 * columns, a hi tile and a lo tile. Values of keys outside [k0, k1] are written as zeros, since 0
 * times garbage may be NaN. */
INLINE void pack_as(enum dtype k_type, enum dtype v_type, const struct attn_block *b, int k0,
                    int k1, int dim, float *k_out, float *v_out)
{
    size_t part = (size_t)dim * 16; /* values of 16 keys */
    for (int i = k0 / 16; i <= k1 / 16; i++) {
        uint16_t *hi = (uint16_t *)k_out + (size_t)i * 2 * part;
        for (int block = 0; block < dim; block += KV_BLOCK) {
            VEC scale = key_scale(k_type, b, i, block / KV_BLOCK);
            for (int d = block; d < block + KV_BLOCK; d += 4) {
                UNROLL
                for (int e = 0; e < 4; e += 2, hi += 32) {
                    VEC even = key_code(k_type, b, i, d, e), odd = key_code(k_type, b, i, d, e + 1);
                    if (kv_quantised(k_type)) {
                        even = vec_mul(even, scale);
                        odd = vec_mul(odd, scale);
                    }
                    pair(k_type, even, odd, hi, hi + part);
                }
            }
        }
        fetch(b->next->k_tile[i], dim * (int)b->k_step);
    }
    for (int key = k0 / 32 * 32; key <= k1; key += 2) {
        /* the values of two keys, or NULL for zeros */
        const char *row[2];
        float scale[2] = {FP8_SCALE, FP8_SCALE};
        int at = key % 16;
        size_t step = kv_value_step(v_type, (size_t)dim);
        for (int j = 0; j < 2; j++)
            row[j] = key + j >= k0 && key + j <= k1
                         ? (const char *)b->v[key / 16] + (size_t)(at + j) * step
                         : NULL;
        uint16_t *hi = (uint16_t *)v_out + (size_t)(key / 32 * 2) * 2 * part + key % 32 / 2 * 32;
        for (int block = 0; block < dim; block += KV_BLOCK) {
            const uint16_t *scales =
                b->v_scale[key / 16] + (size_t)(block / KV_BLOCK) * b->scale_stride + at;
            for (int j = 0; j < 2 && kv_scaled(v_type); j++)
                scale[j] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(scales[j])));
            UNROLL
            for (int e = 0; e < KV_BLOCK; e += 16, hi += 2 * TILE) {
                VEC x[2];
                UNROLL
                for (int j = 0; j < 2; j++) {
                    x[j] = vec_set(0.0f);
                    if (row[j])
                        x[j] =
                            kv_quantised(v_type)
                                ? vec_mul(value_code(v_type, row[j], block, e), vec_set(scale[j]))
                                : vec_load_as(v_type, row[j], (size_t)(block + e));
                }
                pair(v_type, x[0], x[1], hi, hi + TILE);
            }
        }
        fetch((const char *)b->next->v_tile[key / 16] + (size_t)(at * dim) * b->v_step / 16,
              dim * (int)b->v_step / 8);
    }
    /* zero pairs up to the end of the last 32 keys */
    for (int key = (k1 / 2 + 1) * 2; key % 32; key += 2)
        for (int c = 0; c < dim; c += 16) {
            uint16_t *hi = (uint16_t *)v_out + (size_t)(key / 32 * 2) * 2 * part +
                           key % 32 / 2 * 32 + (size_t)(c / 16) * 2 * TILE;
            memset(hi, 0, 64);
            memset(hi + TILE, 0, 64);
        }
}

#define PACK(k_type, v_type)                                                                       \
    case v_type:                                                                                   \
        pack_as(k_type, v_type, b, k0, k1, dim, k_out, v_out);                                     \
        break
#define PACK_KEYS(k_type)                                                                          \
    case k_type:                                                                                   \
        switch (v) {                                                                               \
            PACK(k_type, DT_F16);                                                                  \
            PACK(k_type, DT_BF16);                                                                 \
            PACK(k_type, DT_Q8_0);                                                                 \
            PACK(k_type, DT_Q4_0);                                                                 \
            PACK(k_type, DT_F8_E4M3);                                                              \
        default:                                                                                   \
            CHECK(false, "no AMX attention for %s values", dtype_name(v));                         \
        }                                                                                          \
        break

static void pack(enum dtype k, enum dtype v, const struct attn_block *b, int k0, int k1, int dim,
                 int v_dim, float *k_out, float *v_out, struct attn_block *to)
{
    CHECK(v_dim == dim, "values of %d components beside keys of %d", v_dim, dim);
    switch (k) {
        PACK_KEYS(DT_F16);
        PACK_KEYS(DT_BF16);
        PACK_KEYS(DT_Q8_0);
        PACK_KEYS(DT_Q4_0);
        PACK_KEYS(DT_F8_E4M3);
    default:
        CHECK(false, "no AMX attention for %s keys", dtype_name(k));
    }
    *to = (struct attn_block){.first = b->first, .next = to, .k = {k_out}, .v = {v_out}};
}

/* Transposes a tile of keys: 16 keys x 16 pairs of components become 16 pairs x 16 keys. */
static inline void transpose_tile(const uint16_t *from, uint16_t *to)
{
    const float *x = (const float *)from; /* only moved, never used in arithmetic */
    float *y = (float *)to;
    for (int r = 0; r < 16; r += 4)
        for (int c = 0; c < 16; c += 4) {
            __m128 a = _mm_loadu_ps(x + r * 16 + c), b = _mm_loadu_ps(x + (r + 1) * 16 + c);
            __m128 d = _mm_loadu_ps(x + (r + 2) * 16 + c), e = _mm_loadu_ps(x + (r + 3) * 16 + c);
            _MM_TRANSPOSE4_PS(a, b, d, e);
            _mm_storeu_ps(y + c * 16 + r, a);
            _mm_storeu_ps(y + (c + 1) * 16 + r, b);
            _mm_storeu_ps(y + (c + 2) * 16 + r, d);
            _mm_storeu_ps(y + (c + 3) * 16 + r, e);
        }
}

static void pack_rows(enum dtype type, const void *const *from, int at, int dim, int v_dim,
                      float *rows, float *k_out, float *v_out)
{
    size_t part = (size_t)dim * 16; /* values of 16 keys */
    for (int i = 0; i < ATTN_ROWS; i++)
        row_load(type, from[i], dim, rows + (size_t)i * (size_t)dim);
    for (int i = 0; i < ATTN_ROWS; i += 16) {
        uint16_t *to = (uint16_t *)k_out + (size_t)(at + i) / 16 * 2 * part, hi[TILE], lo[TILE];
        for (int d = 0; d < dim; d += D_STEP, to += TILE) {
            for (int j = 0; j < 16; j++) {
                const float *x = rows + (size_t)(i + j) * (size_t)dim + d;
                split(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), hi + j * 32, lo + j * 32);
            }
            transpose_tile(hi, to);
            transpose_tile(lo, to + part);
        }
    }
    for (int i = 0; i < ATTN_ROWS; i += 2) {
        const float *x = rows + (size_t)i * (size_t)dim;
        uint16_t *hi = (uint16_t *)v_out + (size_t)(at / 32) * (size_t)(v_dim / 16) * 2 * TILE +
                       (size_t)i / 2 * 32;
        for (int c = 0; c < v_dim; c += 16, hi += 2 * TILE)
            pair(DT_F32, _mm512_loadu_ps(x + c), _mm512_loadu_ps(x + dim + c), hi, hi + TILE);
    }
}

/* C0..C3 += A (two row tiles) * B (two tiles): hi*hi, lo*hi and, if has_lo, hi*lo. a, b: hi tiles.
 * Their lo tiles are a_lo and b_lo values further, the second row and column tiles a_next and
 * b_next further. */
#define PRODUCT(two_rows, two_cols, has_lo, a, a_lo, a_next, b, b_lo, b_next)                      \
    do {                                                                                           \
        const uint16_t *a_ = (a), *b_ = (b);                                                       \
        _tile_loadd(6, b_, 64);                                                                    \
        if (two_cols)                                                                              \
            _tile_loadd(7, b_ + (b_next), 64);                                                     \
        for (int part_ = 1; part_ >= 0; part_--) {                                                 \
            _tile_loadd(4, a_ + (size_t)part_ * (a_lo), 64);                                       \
            _tile_dpbf16ps(0, 4, 6);                                                               \
            if (two_cols)                                                                          \
                _tile_dpbf16ps(1, 4, 7);                                                           \
            if (two_rows) {                                                                        \
                _tile_loadd(5, a_ + (a_next) + (size_t)part_ * (a_lo), 64);                        \
                _tile_dpbf16ps(2, 5, 6);                                                           \
                if (two_cols)                                                                      \
                    _tile_dpbf16ps(3, 5, 7);                                                       \
            }                                                                                      \
        }                                                                                          \
        if (has_lo) {                                                                              \
            _tile_loadd(6, b_ + (b_lo), 64);                                                       \
            _tile_dpbf16ps(0, 4, 6);                                                               \
            if (two_rows)                                                                          \
                _tile_dpbf16ps(2, 5, 6);                                                           \
            if (two_cols) {                                                                        \
                _tile_loadd(7, b_ + (b_lo) + (b_next), 64);                                        \
                _tile_dpbf16ps(1, 4, 7);                                                           \
                if (two_rows)                                                                      \
                    _tile_dpbf16ps(3, 5, 7);                                                       \
            }                                                                                      \
        }                                                                                          \
    } while (0)

static inline void clear(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* s[r, key] for the 16-key tiles [i0, i1] */
static void scores(const struct attn_tile *t, bool lo, int i0, int i1, int dim, const uint16_t *k)
{
    const uint16_t *q = (const uint16_t *)t->q;
    size_t part = (size_t)dim * 16, steps = (size_t)(dim / D_STEP);
    bool two_rows = t->rows > 16;
    for (int i = i0; i <= i1; i += 2) {
        bool two_cols = i < i1;
        clear();
        for (size_t d = 0; d < steps; d++)
            PRODUCT(two_rows, two_cols, lo, q + d * 2 * TILE, TILE, steps * 2 * TILE,
                    k + (size_t)i * 2 * part + d * TILE, part, 2 * part);
        float *s = t->s + i * 16;
        _tile_stored(0, s, KEYS * 4);
        if (two_cols)
            _tile_stored(1, s + 16, KEYS * 4);
        if (two_rows) {
            _tile_stored(2, s + 16 * KEYS, KEYS * 4);
            if (two_cols)
                _tile_stored(3, s + 16 * KEYS + 16, KEYS * 4);
        }
    }
}

/* Computes weights 2^(s - m) of 32-key steps, as hi and lo tiles A in p (by row tile and step),
 * and updates m and l. Scores are those of the 16-key tiles [i0, i1]; `first` is the block's
 * first key. */
static void scores_to_weights(const struct attn_tile *t, int first, int i0, int i1, uint16_t *p)
{
    for (int r = 0; r < t->rows; r++) {
        float *row = t->s + r * KEYS;
        int lo = t->row_lo[r], hi = t->row_hi[r];
        bool cut = lo > first + i0 * 16 || hi < first + i1 * 16 + 15;
        __m512 max = _mm512_set1_ps(ATTN_START);
        for (int i = i0; i <= i1; i++) {
            __m512 x = _mm512_loadu_ps(row + i * 16);
            if (t->cap != 0)
                x = vec_softcap(x, t->cap, 1.0f / t->cap);
            if (cut)
                x = vec_within(x, first + i * 16, lo, hi, ATTN_MASKED);
            if (cut || t->cap != 0)
                _mm512_storeu_ps(row + i * 16, x);
            max = _mm512_max_ps(max, x);
        }
        float high = _mm512_reduce_max_ps(max);
        t->m[r] = high;
        max = _mm512_set1_ps(high);
        __m512 sum = _mm512_setzero_ps();
        uint16_t *out = p + (size_t)(r / 16 * (KEYS / 32)) * 2 * TILE + r % 16 * 32;
        for (int j = i0 / 2; j <= i1 / 2; j++) {
            __m512 w[2];
            for (int h = 0; h < 2; h++) {
                int i = 2 * j + h;
                w[h] = i >= i0 && i <= i1
                           ? vec_exp2(_mm512_sub_ps(_mm512_loadu_ps(row + i * 16), max))
                           : _mm512_setzero_ps();
                sum = _mm512_add_ps(sum, w[h]);
            }
            split(w[0], w[1], out + (size_t)j * 2 * TILE, out + (size_t)j * 2 * TILE + TILE);
        }
        _mm512_storeu_ps(t->l + r * 16, sum);
    }
}

/* o = weights of the 32-key steps [j0, j1] times `dim` columns of values */
static void values(const struct attn_tile *t, bool lo, int j0, int j1, int dim, const uint16_t *p,
                   const uint16_t *v)
{
    size_t columns = (size_t)dim / 16;
    bool two_rows = t->rows > 16;
    for (size_t c = 0; c < columns; c += 2) { /* dim is a multiple of 32 */
        clear();
        for (int j = j0; j <= j1; j++)
            PRODUCT(two_rows, true, lo, p + (size_t)j * 2 * TILE, TILE, KEYS / 32 * 2 * TILE,
                    v + ((size_t)j * columns + c) * 2 * TILE, TILE, 2 * TILE);
        float *o = t->o + c * 16;
        size_t stride = (size_t)dim * 4;
        _tile_stored(0, o, stride);
        _tile_stored(1, o + 16, stride);
        if (two_rows) {
            _tile_stored(2, o + 16 * (size_t)dim, stride);
            _tile_stored(3, o + 16 * (size_t)dim + 16, stride);
        }
    }
}

/* The tiles share one s: (ROWS, KEYS) scores, then the weights as (2, KEYS/32) pairs of tiles. */
static void attend(enum dtype k_type, enum dtype v_type, struct attn_tile *const *tiles, int n,
                   const struct attn_block *b, int dim, int v_dim)
{
    int rows = 0;
    bool k_lo = !is_bf16(k_type), v_lo = !is_bf16(v_type);
    for (int i = 0; i < n; i++) {
        struct attn_tile *t = tiles[i];
        CHECK(t->fresh, "a chunk has one block");
        int k0 = t->lo > b->first ? t->lo - b->first : 0;
        int k1 = t->hi - b->first < KEYS - 1 ? t->hi - b->first : KEYS - 1;
        if (rows != t->rows)
            configure(rows = t->rows);
        uint16_t *p = (uint16_t *)(t->s + ROWS * KEYS);
        memory_barrier();
        scores(t, k_lo, k0 / 16, k1 / 16, dim, b->k[0]);
        scores_to_weights(t, b->first, k0 / 16, k1 / 16, p);
        memory_barrier();
        values(t, v_lo, k0 / 32, k1 / 32, v_dim, p, b->v[0]);
        t->fresh = false;
    }
    _tile_release();
}

const struct attn_kernels attn_kernels_amx = {
    .unit = D_STEP,
    .packs_own = true,
    .rows = ROWS,
    .width = 16,
    .block = KEYS,
    .panel = 16,
    .load = load,
    .attend = attend,
    .pack = pack,
    .pack_rows = pack_rows,
    .row = &attn_rows_avx512,
};
