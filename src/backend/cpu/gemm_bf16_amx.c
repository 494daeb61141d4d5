/*
 * Packed panels times many input rows on AMX bf16 tiles.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns) * B (32 columns, 16 weight rows)
 * A: rows of bf16 (struct gemm_x); B: 16 rows of column pairs. tmm0-3: C of (inputs, panel); tmm4, 6: A;
 * tmm5, 7: B. The last tiles of inputs read up to 31 rows past the last one and drop their results.
 *
 * All columns of two panels are converted to bf16 once, into the second-level cache. Then 32 input rows at
 * a time run through all columns, with four tile products per step. Sums stay in the tiles to the end, so
 * scales cost nothing per input row, unlike in gemm_int8_amx.c. With up to 64 input rows the conversion of
 * weights is the limit. Against VNNI on a Xeon, 128 rows are 2.6 times as fast for Q4_K and 1.3 times for
 * Q6_K (pick.c).
 *
 * Inputs and weights lose what bf16 rounds away, and a sum has the tile's own order. --deterministic
 * therefore excludes this kernel.
 */
#include "backend/cpu/gemm_tiles_amx.h"

enum { PREFETCH_MAX = 512 << 10 }; /* bytes that may wait in the second-level cache */

enum kind {
    KIND_SCALE32,     /* signed codes, scale per 32 */
    KIND_SCALE32_MIN, /* small unsigned codes, scale and min per 32 */
    KIND_SCALE16,     /* signed codes, scale per 16 */
    KIND_SCALE16_MIN, /* small unsigned codes, scale and min per 16 */
};

/* Packs floats a and b as pairs of bf16 (a low, b high), rounded half up. */
INLINE VI pair(VF a, VF b)
{
    const VI half = vi_set1_32(0x8000), high = vi_set1_32((int)0xffff0000);
    VI lo = _mm512_add_epi32(_mm512_castps_si512(a), half);
    VI hi = _mm512_add_epi32(_mm512_castps_si512(b), half);
    return vi_or_and(vi_srl32(lo, 16), hi, high);
}

/* Two panels, and the tiles B that they are converted to. */
struct panel_pair {
    const uint8_t *panel[2], *codes[2];
    uint8_t *tiles[2];
};

struct bf16_scratch {
    struct chunk chunk[2];
    _Alignas(64) float out[32][GEMM_UNIT];
    uint8_t tiles[]; /* tiles of two panels, and of the next two */
};

/* Progress in prefetching the memory that is read after the product. */
struct prefetch_progress {
    const struct gemm_prefetch *list;
    int run;
    size_t at;
    int share; /* cache lines to prefetch with each tile of columns */
};

static struct prefetch_progress prefetch_begin(const struct gemm_call *c, int n_tiles)
{
    struct prefetch_progress a = {.list = c->prefetch};
    size_t bytes = 0, steps = (size_t)((c->n_rows + GEMM_UNIT - 1) / GEMM_UNIT) * (size_t)n_tiles;
    for (int i = 0; c->prefetch && i < c->prefetch->n; i++)
        bytes += c->prefetch->bytes[i];
    if (bytes && bytes <= PREFETCH_MAX)
        a.share = (int)(bytes / 64 / steps) + 1;
    return a;
}

INLINE void prefetch_more(struct prefetch_progress *a)
{
    for (int i = 0; i < a->share && a->run < a->list->n; i++) {
        _mm_prefetch(a->list->at[a->run] + a->at, _MM_HINT_T1);
        a->at += 64;
        if (a->at >= a->list->bytes[a->run]) {
            a->run++;
            a->at = 0;
        }
    }
}

typedef const uint8_t *unpack_fn(const uint8_t *panel, int k, int n, struct chunk *c);

/* Converts 32 columns of 16 rows, block b of a chunk, to a tile. */
INLINE void tile_of(const uint8_t *codes, const struct chunk *chunk, int b, uint8_t *out,
                    const enum kind kind)
{
    const VI byte = vi_set1_32(0xff);
    const bool by16 = kind == KIND_SCALE16 || kind == KIND_SCALE16_MIN;
    const bool mins = kind == KIND_SCALE32_MIN || kind == KIND_SCALE16_MIN;
    int at = by16 ? 2 * b : b;
    VF scale = vf_load(chunk->scale[at]);
    VF min = mins ? vf_load(chunk->min[at]) : vf_zero();
    for (int g = 0; g < 8; g++, codes += 64, out += 128) {
        if (by16 && g == 4) {
            scale = vf_load(chunk->scale[at + 1]);
            min = mins ? vf_load(chunk->min[at + 1]) : vf_zero();
        }
        VI v = vi_load(codes), q[4];
        VF f[4];
        for (int i = 0; i < 4; i++)
            if (mins)
                q[i] = i == 3 ? vi_srl32(v, 24) : vi_and(vi_srl32(v, 8 * i), byte);
            else
                q[i] = vi_sra32(i == 3 ? v : vi_sll32(v, 24 - 8 * i), 24);
        for (int i = 0; i < 4; i++)
            f[i] = mins ? _mm512_fmsub_ps(vi_to_f(q[i]), scale, min) : vf_mul(vi_to_f(q[i]), scale);
        vi_store(out, pair(f[0], f[1]));
        vi_store(out + 64, pair(f[2], f[3]));
    }
}

/* Converts tile i of both panels. Tiles are converted in order, since codes are unpacked a chunk at
 * a time. */
INLINE void convert(struct bf16_scratch *s, struct panel_pair *src, int i, int n_in,
                    const enum kind kind, unpack_fn *unpack)
{
    int b = i % (CHUNK_COLUMNS / 32), k = 32 * i;
    for (int p = 0; p < 2; p++) {
        if (b == 0)
            src->codes[p] =
                unpack(src->panel[p], k, n_in - k < CHUNK_COLUMNS ? n_in - k : CHUNK_COLUMNS,
                       &s->chunk[p]);
        tile_of(src->codes[p] + 512 * b, &s->chunk[p], b, src->tiles[p] + (size_t)i * TILE, kind);
    }
}

/* Multiplies one or two tiles of inputs by two panels, all columns; sums go to s->out. Meanwhile it
 * converts `next` (if not NULL) and prefetches `fetch` bytes at `later`. */
INLINE void multiply(struct bf16_scratch *s, const struct panel_pair *src, struct panel_pair *next,
                     int n_in, const uint8_t *a, size_t stride, const uint8_t *later, size_t fetch,
                     struct prefetch_progress *more, const int two, const enum kind kind,
                     unpack_fn *unpack)
{
    const uint8_t *a1 = a + 16 * stride;
    size_t share = (fetch * 32 / (size_t)n_in + 63) & ~(size_t)63, at = 0;
    tiles_zero();
    for (int i = 0; i < n_in / 32; i++) {
        amx_load(5, src->tiles[0] + (size_t)i * TILE, 64);
        amx_load(4, a + 64 * i, stride);
        amx_dot_bf16(0, 4, 5);
        amx_load(7, src->tiles[1] + (size_t)i * TILE, 64);
        amx_dot_bf16(1, 4, 7);
        if (two) {
            amx_load(6, a1 + 64 * i, stride);
            amx_dot_bf16(2, 6, 5);
            amx_dot_bf16(3, 6, 7);
        }
        if (next)
            convert(s, next, i, n_in, kind, unpack);
        for (size_t end = at + share; at < end && at < fetch; at += 64)
            _mm_prefetch((const char *)later + at, _MM_HINT_T1);
        prefetch_more(more);
    }
    tiles_store(s->out, two);
}

INLINE void gemm(const struct gemm_call *c, const enum kind kind, unpack_fn *unpack)
{
    struct bf16_scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in, n_tiles = n_in / 32;
    size_t stride = bf16_stride(n_in), bytes = seg->panel_bytes;
    tiles_configure();
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / GEMM_PANEL);
    struct panel_pair now = {0};
    struct prefetch_progress progress = prefetch_begin(c, n_tiles);
    for (int col = 0, u = 0; col < c->n_rows; col += GEMM_UNIT, u++) {
        struct panel_pair next[2]; /* this unit, and the next one */
        for (int i = 0; i < 2; i++) {
            const uint8_t *panel = seg->data + (first + 2 * (size_t)(u + i)) * bytes;
            bool both = col + i * GEMM_UNIT + GEMM_PANEL < c->n_rows;
            uint8_t *tiles = s->tiles + (size_t)((u + i) % 2) * 2 * (size_t)n_tiles * TILE;
            next[i] = (struct panel_pair){.panel = {panel, both ? panel + bytes : panel},
                                          .tiles = {tiles, tiles + (size_t)n_tiles * TILE}};
        }
        /* With few inputs, converting takes longer than multiplying, so the two overlap. */
        bool more = col + GEMM_UNIT < c->n_rows, overlap = more && c->n <= 64;
        if (!now.panel[0]) {
            now = next[0];
            for (int i = 0; i < n_tiles; i++)
                convert(s, &now, i, n_in, kind, unpack);
        }
        const uint8_t *later = now.panel[0] + (overlap ? 4 : 2) * bytes;
        size_t fetch = 2 * bytes;
        for (int i0 = 0; i0 < c->n; i0 += 32, fetch = 0) {
            int n = c->n - i0 < 32 ? c->n - i0 : 32;
            const uint8_t *a = c->x->h + (size_t)i0 * stride;
            if (i0 == 0 && overlap)
                multiply(s, &now, &next[1], n_in, a, stride, later, fetch, &progress, n > 16, kind,
                         unpack);
            else
                multiply(s, &now, NULL, n_in, a, stride, later, fetch, &progress, n > 16, kind,
                         unpack);
            put_sums(s->out, c, i0, n, col);
        }
        now = overlap ? next[1] : (struct panel_pair){0};
    }
    amx_release();
}

#define GEMM(name, kind)                                                                           \
    static void gemm_##name(const struct gemm_call *c)                                             \
    {                                                                                              \
        gemm(c, kind, unpack_##name);                                                              \
    }

GEMM(q4k, KIND_SCALE32_MIN)
GEMM(q5k, KIND_SCALE32_MIN)
GEMM(q6k, KIND_SCALE16)
GEMM(iq4xs, KIND_SCALE32)
GEMM(q4_0, KIND_SCALE32)
GEMM(iq4nl, KIND_SCALE32)
GEMM(mxfp4, KIND_SCALE32)
GEMM(q8_0, KIND_SCALE32)
GEMM(q2k, KIND_SCALE16_MIN)
GEMM(q3k, KIND_SCALE16)
GEMM(q4_1, KIND_SCALE32_MIN)
GEMM(q5_0, KIND_SCALE32)
GEMM(q5_1, KIND_SCALE32_MIN)
GEMM(iq3s, KIND_SCALE32)
GEMM(iq3xxs, KIND_SCALE32)
GEMM(iq2, KIND_SCALE16)
GEMM(iq1, KIND_SCALE16)
GEMM(tq, KIND_SCALE32)
GEMM(nvfp4, KIND_SCALE16)

void gemm_bf16_amx(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_Q4_K] = gemm_q4k,     [DT_Q5_K] = gemm_q5k,    [DT_Q6_K] = gemm_q6k,
        [DT_IQ4_XS] = gemm_iq4xs, [DT_Q4_0] = gemm_q4_0,   [DT_IQ4_NL] = gemm_iq4nl,
        [DT_MXFP4] = gemm_mxfp4,  [DT_Q8_0] = gemm_q8_0,   [DT_Q2_K] = gemm_q2k,
        [DT_Q3_K] = gemm_q3k,     [DT_Q4_1] = gemm_q4_1,   [DT_Q5_0] = gemm_q5_0,
        [DT_Q5_1] = gemm_q5_1,    [DT_IQ3_S] = gemm_iq3s,  [DT_IQ3_XXS] = gemm_iq3xxs,
        [DT_IQ2_XXS] = gemm_iq2,  [DT_IQ2_XS] = gemm_iq2,  [DT_IQ2_S] = gemm_iq2,
        [DT_IQ1_S] = gemm_iq1,    [DT_IQ1_M] = gemm_iq1,   [DT_TQ1_0] = gemm_tq,
        [DT_TQ2_0] = gemm_tq,     [DT_NVFP4] = gemm_nvfp4,
    };
    by_type[c->seg->type](c);
}

void input_bf16_amx(const float *x, int n, uint16_t *out)
{
    int i = 0;
    for (; i + 32 <= n; i += 32)
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16),
                                                                  _mm512_loadu_ps(x + i)));
    for (; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        out[i] = (uint16_t)((u + 0x8000) >> 16);
    }
}
