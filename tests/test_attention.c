/*
 * The CPU backend's attention, RoPE, KV append, norms and gather: every instruction set this machine
 * has, against an oracle in double precision and against the reference ops; and the invariant of
 * attn.c, byte for byte: a row's result does not depend on the batch around it, on how its
 * prompt was cut, on page numbers or on the number of threads.
 *
 * A world is a set of sequences whose q, k and v are a fixed function of (sequence, position), so
 * that any step over any part of any of them can be computed from scratch.
 */
#include "backend/backend.h"
#include "backend/cpu/kvtile.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"
#include "base/mem.h"
#include "size.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    return x ^ x >> 15;
}

/* Mean 0, deviation 1: the sum of four bytes. */
static float noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = hash(a, b, c);
    int sum = (int)((x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24));
    return (float)(sum - 510) * (1.0f / 147.8f) + (float)(x * 0x9e3779b1u >> 8) * 0x1p-31f;
}

/* The instruction sets of this machine that have kernels of their own here. */
static const enum isa isas[] = {ISA_REF, ISA_AVX2, ISA_AVX512, ISA_VNNI,
                                ISA_AMX, ISA_NEON, ISA_DOTPROD};
#define FOR_EACH_ISA(isa)                                                                          \
    for (int isa##_i = 0; isa##_i < (int)(sizeof isas / sizeof *isas); isa##_i++)                  \
        for (enum isa isa = isas[isa##_i], isa##_once = isa_has(isa_best(), isa); isa##_once;      \
             isa##_once = 0)

enum { MAX_SEQS = 8 };

struct world {
    struct bounds s;
    struct attention layer; /* no weights */
    struct rope rope_of;
    struct kv_layer kv;
    int width; /* of a row of q, k and v */
    int n_seqs, len[MAX_SEQS];
    int32_t *pages; /* (n_seqs, max_pages) */
    float *q_norm, *k_norm, *freq, *rope;
    size_t k_bytes, v_bytes, scratch_bytes;
    char *scratch;
    struct pool *pool;
    enum isa isa;
    struct pick pick;
};

static void world_open(struct world *w, int heads, int kv_heads, int dim, int n_rot, int page_len,
                       enum dtype k_type, enum dtype v_type, int window, const int *len, int n_seqs,
                       int threads, enum isa isa, uint32_t page_seed)
{
    *w = (struct world){.n_seqs = n_seqs, .isa = isa, .pick = {.isa = isa}};
    struct bounds *s = &w->s;
    int longest = 0, total = 0, pages = 0;
    for (int i = 0; i < n_seqs; i++) {
        w->len[i] = len[i];
        longest = len[i] > longest ? len[i] : longest;
        total += len[i];
        pages += (len[i] + page_len - 1) / page_len;
    }
    *s = (struct bounds){.page_len = page_len,
                         .n_pages = pages + 3,
                         .k_type = k_type,
                         .v_type = v_type,
                         .max_tokens = total,
                         .max_seqs = n_seqs,
                         .max_out = n_seqs,
                         .max_pages = (longest + page_len - 1) / page_len};
    w->width = (heads + 2 * kv_heads) * dim;
    w->freq = mem_zalloc((size_t)n_rot / 2 + 1, sizeof(float));
    for (int i = 0; i < n_rot / 2; i++)
        w->freq[i] = powf(10000.0f, -2.0f * (float)i / (float)n_rot);
    w->rope_of = (struct rope){n_rot, w->freq, 1.0f, NULL};
    /* Shuffled pages, so that no two neighbours in a sequence are neighbours in memory. */
    int32_t *deck = mem_zalloc((size_t)s->n_pages, sizeof *deck);
    for (int i = 0; i < s->n_pages; i++) {
        int j = (int)(hash(page_seed, (uint32_t)i, 7) % (uint32_t)(i + 1));
        deck[i] = deck[j];
        deck[j] = i;
    }
    w->pages = mem_zalloc((size_t)n_seqs * (size_t)s->max_pages, sizeof *w->pages);
    for (int i = 0, next = 0; i < n_seqs; i++)
        for (int p = 0; p < s->max_pages; p++)
            w->pages[i * s->max_pages + p] =
                p * page_len < len[i] ? deck[next++] : 0x7fffffff; /* not to be read */
    mem_free(deck);
    w->q_norm = mem_zalloc((size_t)dim, sizeof(float));
    w->k_norm = mem_zalloc((size_t)dim, sizeof(float));
    for (int i = 0; i < dim; i++) {
        w->q_norm[i] = 1.5f + 0.3f * noise(1, 1, (uint32_t)i);
        w->k_norm[i] = 1.5f + 0.3f * noise(1, 2, (uint32_t)i);
    }
    w->layer = (struct attention){.n_heads = heads,
                                  .n_kv_heads = kv_heads,
                                  .k_dim = dim,
                                  .v_dim = dim,
                                  .q_norm = {NORM_RMS, w->q_norm, NULL, 1e-6f},
                                  .k_norm = {NORM_RMS, w->k_norm, NULL, 1e-6f},
                                  .rope = n_rot ? &w->rope_of : NULL,
                                  .scale = 1.0f / sqrtf((float)dim),
                                  .window = window};
    size_t values = (size_t)s->n_pages * (size_t)(kv_heads * page_len * dim);
    w->k_bytes = dtype_bytes(k_type, values);
    w->v_bytes = dtype_bytes(v_type, values);
    w->kv.k = mem_aligned(w->k_bytes);
    w->kv.v = mem_aligned(w->v_bytes);
    /* NaN in every format but FP8 (480 there): what was never written must never count. */
    memset(w->kv.k, 0xff, w->k_bytes);
    memset(w->kv.v, 0xff, w->v_bytes);
    w->rope = mem_zalloc((size_t)(total * n_rot) + 1, sizeof(float));
    w->pool = pool_new(threads);
    /* malloc, of the exact size: ASan then sees a byte too far. */
    w->scratch_bytes = cpu_attention_scratch(s, &w->layer, threads);
    w->scratch = aligned_alloc(64, w->scratch_bytes);
    memset(w->scratch, 0xff, w->scratch_bytes);
}

static void world_close(struct world *w)
{
    mem_aligned_free(w->kv.k, w->k_bytes);
    mem_aligned_free(w->kv.v, w->v_bytes);
    mem_free(w->pages);
    mem_free(w->q_norm);
    mem_free(w->k_norm);
    mem_free(w->freq);
    mem_free(w->rope);
    free(w->scratch);
    pool_free(w->pool);
}

/* q, k, v of one token as the projection gives them; the spread differs by sequence, so that some
 * rows of softmax are flat and some are peaked. */
static void qkv_row(const struct world *w, int seq, int pos, float *row)
{
    for (int i = 0; i < w->width; i++)
        row[i] = noise((uint32_t)seq + 10, (uint32_t)pos, (uint32_t)i);
}

/* A step over tokens [from, to) of each sequence (from == to: not in the step). */
struct step {
    struct batch b;
    int32_t *tokens, *pos, *slot, *q_start, *kv_len, *pages;
    float *qkv, *q, *a;
    size_t q_len; /* floats of q and of a */
};

static void step_open(struct step *st, const struct world *w, const int *from, const int *to)
{
    int n = 0, seqs = 0;
    for (int i = 0; i < w->n_seqs; i++) {
        n += to[i] - from[i];
        seqs += to[i] > from[i];
    }
    const struct bounds *s = &w->s;
    *st = (struct step){0};
    st->tokens = mem_zalloc((size_t)n, sizeof(int32_t));
    st->pos = mem_zalloc((size_t)n, sizeof(int32_t));
    st->slot = mem_zalloc((size_t)n, sizeof(int32_t));
    st->q_start = mem_zalloc((size_t)seqs + 1, sizeof(int32_t));
    st->kv_len = mem_zalloc((size_t)seqs, sizeof(int32_t));
    st->pages = mem_zalloc((size_t)(seqs * s->max_pages), sizeof(int32_t));
    st->q_len = (size_t)n * (size_t)(w->layer.n_heads * w->layer.k_dim);
    st->qkv = mem_zalloc((size_t)n * (size_t)w->width, sizeof(float));
    st->q = mem_zalloc(st->q_len, sizeof(float));
    st->a = mem_zalloc(st->q_len, sizeof(float));
    int t = 0, q = 0, decode = 0;
    for (int pass = 0; pass < 2; pass++) /* single tokens first */
        for (int i = 0; i < w->n_seqs; i++) {
            if (to[i] <= from[i] || (to[i] - from[i] == 1) != (pass == 0))
                continue;
            decode += pass == 0;
            memcpy(st->pages + q * s->max_pages, w->pages + i * s->max_pages,
                   (size_t)s->max_pages * sizeof(int32_t));
            st->q_start[q] = t;
            st->kv_len[q++] = to[i];
            for (int p = from[i]; p < to[i]; p++, t++) {
                st->pos[t] = p;
                st->slot[t] =
                    w->pages[i * s->max_pages + p / s->page_len] * s->page_len + p % s->page_len;
                qkv_row(w, i, p, st->qkv + (size_t)t * (size_t)w->width);
            }
        }
    st->q_start[q] = t;
    st->b = (struct batch){.n_tokens = n,
                           .n_seqs = seqs,
                           .n_decode = decode,
                           .max_pages = s->max_pages,
                           .tokens = st->tokens,
                           .pos = st->pos,
                           .slot = st->slot,
                           .q_start = st->q_start,
                           .kv_len = st->kv_len,
                           .pages = st->pages};
}

static void step_close(struct step *st)
{
    void *owned[] = {st->tokens, st->pos, st->slot, st->q_start, st->kv_len,
                     st->pages,  st->qkv, st->q,    st->a};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static void step_append(struct step *st, struct world *w)
{
    if (w->layer.rope)
        cpu_rope_table(w->layer.rope, &st->b, w->rope, w->pool);
    cpu_attn_post(&w->s, &st->b, &w->layer, &w->kv, w->rope, st->qkv, st->q, NULL, w->pool, w->isa);
}

static void step_run(struct step *st, struct world *w)
{
    step_append(st, w);
    cpu_attention(&w->s, &st->b, &w->layer, &w->kv, NULL, NULL, st->q, st->a, w->scratch, w->pool,
                  &w->pick);
}

/* Copies the step's rows to `out`: (n_seqs, longest, H*D) by sequence and position. */
static void scatter(const struct step *st, const struct world *w, const int *from, const int *to,
                    float *out)
{
    size_t width = (size_t)(w->layer.n_heads * w->layer.k_dim), longest = 0;
    for (int i = 0; i < w->n_seqs; i++)
        longest = (size_t)w->len[i] > longest ? (size_t)w->len[i] : longest;
    int t = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < w->n_seqs; i++) {
            if (to[i] <= from[i] || (to[i] - from[i] == 1) != (pass == 0))
                continue;
            for (int p = from[i]; p < to[i]; p++, t++)
                memcpy(out + ((size_t)i * longest + (size_t)p) * width, st->a + (size_t)t * width,
                       width * sizeof(float));
        }
}

static float *out_new(const struct world *w, size_t *bytes)
{
    size_t longest = 0;
    for (int i = 0; i < w->n_seqs; i++)
        longest = (size_t)w->len[i] > longest ? (size_t)w->len[i] : longest;
    size_t n = (size_t)w->n_seqs * longest * (size_t)(w->layer.n_heads * w->layer.k_dim);
    *bytes = n * sizeof(float);
    return mem_zalloc(n, sizeof(float));
}

/* The oracle: from the raw rows, all in double but for the stored type of k and v. */
static void oracle_head(const struct world *w, const float *from, const float *gain, int pos,
                        double *to)
{
    int dim = w->layer.k_dim, half = w->layer.rope ? w->layer.rope->n_rot / 2 : 0;
    double sum = 0;
    for (int i = 0; i < dim; i++)
        sum += (double)from[i] * from[i];
    double scale = gain ? 1 / sqrt(sum / dim + 1e-6f) : 1;
    for (int i = 0; i < dim; i++)
        to[i] = from[i] * scale * (gain ? gain[i] : 1);
    for (int i = 0; i < half; i++) {
        double angle = (double)((float)pos * w->freq[i]), c = cos(angle), s = sin(angle);
        double a = to[i], b = to[i + half];
        to[i] = a * c - b * s;
        to[i + half] = b * c + a * s;
    }
}

static double stored(enum dtype type, double x)
{
    float f = (float)x;
    return type == DT_F32 || kv_quantised(type) ? f
           : type == DT_F16                     ? f16_to_f32(f32_to_f16(f))
                                                : bf16_to_f32(f32_to_bf16(f));
}

/* A head of keys or values as the pool has it, turned back. */
static void pool_head(const struct world *w, int seq, int pos, int head, bool keys, double *out)
{
    const struct bounds *s = &w->s;
    size_t dim = (size_t)w->layer.k_dim, len = (size_t)s->page_len;
    enum dtype type = keys ? s->k_type : s->v_type;
    size_t page = (size_t)w->pages[seq * s->max_pages + pos / s->page_len];
    size_t tile = page * (size_t)w->layer.n_kv_heads + (size_t)head;
    const char *p = (const char *)(keys ? w->kv.k : w->kv.v) + tile * kv_tile_bytes(type, len, dim);
    float x[256];
    for (size_t d = 0; d < dim; d++)
        x[d] = kv_tile_get(type, p, keys, len, dim, (size_t)(pos % s->page_len), d);
    if (kv_turned(type))
        kv_turn(x, (int)dim);
    for (size_t d = 0; d < dim; d++)
        out[d] = x[d];
}

/* How far a coded type may be from what was stored, as a part of the block's largest value; a turn
 * spreads that over the head. */
static double step_of(enum dtype t)
{
    return t == DT_Q8_0 ? 0.01 : t == DT_Q4_0 ? 0.2 : 0.0625;
}

/* What the pool has instead of `want` (D), of a coded type: near to it, and that is what counts. */
static void from_pool(const struct world *w, int seq, int pos, int head, bool keys, double *want)
{
    double got[256], size = 0, off = 0;
    int dim = w->layer.k_dim;
    pool_head(w, seq, pos, head, keys, got);
    for (int d = 0; d < dim; d++) {
        size += want[d] * want[d];
        off += (want[d] - got[d]) * (want[d] - got[d]);
        want[d] = got[d];
    }
    double allowed = step_of(keys ? w->s.k_type : w->s.v_type);
    if (!(off <= allowed * allowed * size))
        fail_msg("%s at %d: %g of %g", keys ? "key" : "value", pos, sqrt(off), sqrt(size));
}

/* For a coded cache the world has run: what it stored is looked at, and taken. */
static void oracle(const struct world *w, float *out)
{
    const struct bounds *s = &w->s;
    int H = w->layer.n_heads, K = w->layer.n_kv_heads, D = w->layer.k_dim, longest = 0;
    for (int i = 0; i < w->n_seqs; i++)
        longest = w->len[i] > longest ? w->len[i] : longest;
    size_t dim = (size_t)D;
    float *row = mem_zalloc((size_t)w->width, sizeof(float));
    double *q = mem_zalloc((size_t)longest * (size_t)H * dim, sizeof(double));
    double *k = mem_zalloc((size_t)longest * (size_t)K * dim, sizeof(double));
    double *v = mem_zalloc((size_t)longest * (size_t)K * dim, sizeof(double));
    double *p = mem_zalloc((size_t)longest, sizeof(double));
    double *sum = mem_zalloc(dim, sizeof(double));
    for (int i = 0; i < w->n_seqs; i++) {
        for (int t = 0; t < w->len[i]; t++) {
            qkv_row(w, i, t, row);
            for (int h = 0; h < H; h++)
                oracle_head(w, row + h * D, w->layer.q_norm.gain, t,
                            q + ((size_t)(t * H + h)) * dim);
            for (int h = 0; h < K; h++) {
                double *key = k + (size_t)(t * K + h) * dim;
                oracle_head(w, row + (H + h) * D, w->layer.k_norm.gain, t, key);
                double *value = v + (size_t)(t * K + h) * dim;
                for (int d = 0; d < D; d++) {
                    key[d] = stored(s->k_type, key[d]);
                    value[d] = stored(s->v_type, row[(H + K + h) * D + d]);
                }
                if (kv_quantised(s->k_type))
                    from_pool(w, i, t, h, true, key);
                if (kv_quantised(s->v_type))
                    from_pool(w, i, t, h, false, value);
            }
        }
        for (int t = 0; t < w->len[i]; t++)
            for (int h = 0; h < H; h++) {
                int first =
                    w->layer.window && t - w->layer.window + 1 > 0 ? t - w->layer.window + 1 : 0;
                int kv_head = h * K / H;
                double max = -INFINITY, total = 0;
                for (int j = first; j <= t; j++) {
                    p[j] = 0;
                    for (int d = 0; d < D; d++)
                        p[j] += q[(size_t)(t * H + h) * dim + (size_t)d] *
                                k[(size_t)(j * K + kv_head) * dim + (size_t)d];
                    p[j] *= w->layer.scale;
                    max = p[j] > max ? p[j] : max;
                }
                memset(sum, 0, dim * sizeof *sum);
                for (int j = first; j <= t; j++) {
                    p[j] = exp(p[j] - max);
                    total += p[j];
                    for (int d = 0; d < D; d++)
                        sum[d] += p[j] * v[(size_t)(j * K + kv_head) * dim + (size_t)d];
                }
                for (int d = 0; d < D; d++)
                    out[(((size_t)i * (size_t)longest + (size_t)t) * (size_t)H + (size_t)h) * dim +
                        (size_t)d] = (float)(sum[d] / total);
            }
    }
    void *owned[] = {row, q, k, v, p, sum};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static double max_diff(const float *a, const float *b, size_t n)
{
    double max = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= max)) /* NaN counts */
            max = d;
    }
    return max;
}

/* AMX takes steps of many rows, at 16 bits of mantissa, and AVX-512 the rest: close, not equal. */
#define AMX_ALLOWED   1e-4
#define QUANT_ALLOWED 5e-4 /* the rest then has queries of 16 bits */

struct config {
    int heads, kv_heads, dim, n_rot, page_len, window, n_seqs, len[MAX_SEQS];
};

static const struct config configs[] = {
    {32, 4, 128, 128, 16, 0, 3, {140, 1, 70}}, /* Qwen3-30B-A3B */
    {8, 2, 64, 64, 16, 0, 4, {65, 64, 63, 2}}, /* block edges */
    {7, 1, 80, 80, 16, 0, 2, {97, 31}},        /* seven heads a group; a vector left of the panel */
    {5, 5, 16, 16, 16, 0, 2, {40, 33}},        /* no grouping */
    {12, 1, 32, 16, 32, 50, 2, {270, 51}},     /* more rows than a tile; partial rotation; window */
    {6, 2, 24, 24, 8, 0, 2, {70, 20}},         /* eight lanes only */
    {4, 2, 96, 96, 7, 40, 2, {90, 41}},        /* pages that hold no whole vector */
    {3, 2, 13, 12, 5, 0, 2, {66, 20}},         /* odd everything; uneven groups */
    {2, 1, 256, 256, 64, 0, 1, {530}},         /* more than two chunks */
    {4, 4, 128, 128, 1, 3, 2, {20, 5}},        /* a key a page, a short window */
};
enum { N_CONFIGS = sizeof configs / sizeof *configs };

/* The largest two are left out where instructions are slow; test_oracle has them with F16. */
static bool is_left_out(int c)
{
    return test_small() && configs[c].dim * configs[c].len[0] > 15000;
}
static const enum dtype kv_types[] = {DT_F32, DT_F16, DT_BF16};

static void open_typed(struct world *w, const struct config *c, enum dtype k_type,
                       enum dtype v_type, int threads, enum isa isa, uint32_t page_seed)
{
    world_open(w, c->heads, c->kv_heads, c->dim, c->n_rot, c->page_len, k_type, v_type, c->window,
               c->len, c->n_seqs, threads, isa, page_seed);
}

static void open_config(struct world *w, const struct config *c, enum dtype kv, int threads,
                        enum isa isa, uint32_t page_seed)
{
    open_typed(w, c, kv, kv, threads, isa, page_seed);
}

/* Runs steps of `cut` tokens of every sequence side by side (0: all at once). */
static void run_cut(struct world *w, int cut, float *out)
{
    int from[MAX_SEQS] = {0}, to[MAX_SEQS];
    for (;;) {
        bool any = false;
        for (int i = 0; i < w->n_seqs; i++) {
            to[i] = cut && from[i] + cut < w->len[i] ? from[i] + cut : w->len[i];
            any |= to[i] > from[i];
        }
        if (!any)
            return;
        struct step st;
        step_open(&st, w, from, to);
        step_run(&st, w);
        scatter(&st, w, from, to, out);
        step_close(&st);
        memcpy(from, to, sizeof from);
    }
}

static void test_oracle(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++)
        for (int k = 0; k < 3; k++) {
            if (is_left_out(c) && kv_types[k] != DT_F16)
                continue;
            float *want = NULL;
            FOR_EACH_ISA(isa)
            {
                struct world w;
                open_config(&w, &configs[c], kv_types[k], 2, isa, 1);
                size_t bytes;
                float *got = out_new(&w, &bytes);
                if (!want) {
                    want = out_new(&w, &bytes);
                    oracle(&w, want);
                }
                run_cut(&w, 0, got);
                double diff = max_diff(want, got, bytes / sizeof(float));
                /* Rounded storage may fall the other way where the float before it is an ulp off. */
                double allowed = kv_types[k] == DT_F32 ? 1e-5 : kv_types[k] == DT_F16 ? 3e-3 : 2e-2;
                if (!(diff <= allowed))
                    fail_msg("config %d, %s, %s: off by %g", c, dtype_name(kv_types[k]),
                             isa_name(isa), diff);
                mem_free(got);
                world_close(&w);
            }
            mem_free(want);
        }
}

/* The pool may round differently from the oracle's double k; fed with k and v that the type holds
 * exactly, all that is left is the arithmetic of attention. */
static void test_exact_storage(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++)
        for (int k = 1; k < 3 && !is_left_out(c); k++)
            FOR_EACH_ISA(isa)
            {
                /* The same worlds, one stored as F32 and one as the type, with neither norm nor
                 * rotation, and inputs cut to what the type can hold. */
                float *out[2];
                size_t bytes = 0;
                for (int typed = 0; typed < 2; typed++) {
                    struct world w;
                    open_config(&w, &configs[c], typed ? kv_types[k] : DT_F32, 2, isa, 1);
                    w.layer.rope = NULL;
                    w.layer.q_norm = w.layer.k_norm = (struct norm){0};
                    int from[MAX_SEQS] = {0};
                    struct step st;
                    step_open(&st, &w, from, w.len);
                    for (size_t i = 0; i < (size_t)st.b.n_tokens * (size_t)w.width; i++)
                        st.qkv[i] = (float)stored(kv_types[k], st.qkv[i]);
                    step_run(&st, &w);
                    out[typed] = out_new(&w, &bytes);
                    scatter(&st, &w, from, w.len, out[typed]);
                    step_close(&st);
                    world_close(&w);
                }
                if (!isa_has(isa, ISA_AMX))
                    assert_memory_equal(out[0], out[1], bytes);
                double diff = max_diff(out[0], out[1], bytes / sizeof(float));
                if (!(diff <= AMX_ALLOWED))
                    fail_msg("config %d, %s: off by %g", c, isa_name(isa), diff);
                mem_free(out[0]);
                mem_free(out[1]);
            }
}

static void check_invariance(const struct config *c, enum dtype k_type, enum dtype v_type,
                             enum isa isa)
{
    struct world w;
    char what[128];
    snprintf(what, sizeof what, "heads of %d, %s and %s, %s", c->dim, dtype_name(k_type),
             dtype_name(v_type), isa_name(isa));
    open_typed(&w, c, k_type, v_type, 1, isa, 1);
    size_t bytes;
    float *want = out_new(&w, &bytes), *got = out_new(&w, &bytes);
    for (int i = 0; i < w.n_seqs; i++)
        for (int p = 0; p < w.len[i]; p++) {
            int from[MAX_SEQS] = {0}, to[MAX_SEQS] = {0};
            from[i] = p;
            to[i] = p + 1;
            struct step st;
            step_open(&st, &w, from, to);
            step_run(&st, &w);
            scatter(&st, &w, from, to, want);
            step_close(&st);
        }
    world_close(&w);
    static const int cuts[] = {0, 1, 7, 64}, threads[] = {7, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        open_typed(&w, c, k_type, v_type, threads[i], isa, 2 + (uint32_t)i);
        memset(got, 0, bytes);
        run_cut(&w, cuts[i], got);
        world_close(&w);
        double diff = max_diff(got, want, bytes / sizeof(float));
        if (!(diff <= (kv_quantised(k_type) ? QUANT_ALLOWED : AMX_ALLOWED)))
            fail_msg("%s, cut %d, %d threads: off by %g", what, cuts[i], threads[i], diff);
        for (size_t j = 0; j < bytes / sizeof(float) && !isa_has(isa, ISA_AMX); j++)
            if (memcmp(&got[j], &want[j], sizeof(float)))
                fail_msg("%s, cut %d, %d threads: float %zu is %.9g, not %.9g", what, cuts[i],
                         threads[i], j, (double)got[j], (double)want[j]);
    }
    mem_free(want);
    mem_free(got);
}

/* All cuts, thread counts and page orders give the bytes of one token at a time, alone. */
static void test_invariance(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++)
        if (!is_left_out(c))
            FOR_EACH_ISA(isa)
    check_invariance(&configs[c], kv_types[(c + 1) % 3], kv_types[(c + 1) % 3], isa);
}

/* Caches of codes, and keys and values of different types: heads of whole blocks. */
static const struct {
    enum dtype k, v;
} coded[] = {{DT_Q8_0, DT_Q8_0}, {DT_Q4_0, DT_Q4_0}, {DT_F8_E4M3, DT_F8_E4M3}, {DT_Q8_0, DT_Q4_0},
             {DT_F16, DT_Q8_0},  {DT_Q4_0, DT_F32},  {DT_F8_E4M3, DT_BF16}};
enum { N_QUANT = sizeof coded / sizeof *coded };

static void test_quant(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++)
        for (int k = 0; k < N_QUANT && configs[c].dim % 32 == 0 && !is_left_out(c); k++)
            FOR_EACH_ISA(isa)
            {
                struct world w;
                open_typed(&w, &configs[c], coded[k].k, coded[k].v, 2, isa, 1);
                size_t bytes;
                float *got = out_new(&w, &bytes), *want = out_new(&w, &bytes);
                run_cut(&w, 0, got);
                oracle(&w, want);
                double diff = max_diff(want, got, bytes / sizeof(float));
                /* F16 and BF16 may round the other way than the oracle */
                bool short_queries = isa_has(isa, ISA_VNNI) || /* of 16 bits */
                                     ((isa_has(isa, ISA_AVX2) || isa_has(isa, ISA_DOTPROD)) &&
                                      coded[k].k != DT_F8_E4M3);
                double allowed = coded[k].v == DT_BF16  ? 2e-2
                                 : coded[k].k == DT_F16 ? 3e-3
                                 : short_queries        ? 5e-4
                                                        : 1e-4;
                if (!(diff <= allowed))
                    fail_msg("config %d, %s and %s, %s: off by %g", c, dtype_name(coded[k].k),
                             dtype_name(coded[k].v), isa_name(isa), diff);
                mem_free(got);
                mem_free(want);
                world_close(&w);
            }
}

static void test_quant_invariance(void **state)
{
    (void)state;
    static const int few[] = {0, 1, 4, 6};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < N_QUANT; k++)
            if ((k < 3 || k % 4 == i) && !is_left_out(few[i]))
                FOR_EACH_ISA(isa)
    check_invariance(&configs[few[i]], coded[k].k, coded[k].v, isa);
}

/* The largest values a type can hold, zeros, and what is too large for it. */
static void test_quant_edges(void **state)
{
    (void)state;
    float x[64], y[64];
    static const enum dtype types[] = {DT_Q8_0, DT_Q4_0, DT_F8_E4M3};
    for (int k = 0; k < 3; k++) {
        uint8_t row[64 * sizeof(float)];
        for (int i = 0; i < 64; i++)
            x[i] = i < 32 ? 0.0f : i % 2 ? -1e30f : 1e-30f;
        kv_row_put(types[k], x, 64, row);
        kv_row_get(types[k], row, 64, y);
        for (int i = 0; i < 64; i++) {
            assert_true(isfinite(y[i]));
            assert_true(i < 32 || i % 2 == 0 ? y[i] == 0 : y[i] <= -448);
        }
    }
    for (int b = 0; b < 256; b++) /* every FP8 number comes back, and the nearest of others */
        if (b % 128 != 127) {
            assert_int_equal(kv_put_fp8(f8e4m3_to_f32((uint8_t)b)), b);
            assert_true(kv_get_fp8((uint8_t)b) == f8e4m3_to_f32((uint8_t)b));
            if (b % 128 < 126) {
                float low = f8e4m3_to_f32((uint8_t)b), high = f8e4m3_to_f32((uint8_t)(b + 1));
                assert_int_equal(kv_put_fp8(low + (high - low) * 0.49f), b);
                assert_int_equal(kv_put_fp8(low + (high - low) * 0.51f), b + 1);
                assert_int_equal(kv_put_fp8((low + high) / 2), b % 2 ? b + 1 : b);
            }
        }
    assert_int_equal(kv_put_fp8(NAN), 0);
    for (int n = 32; n <= 96; n += 64) { /* its own inverse, and lengths stay */
        double before = 0, after = 0;
        float z[96];
        for (int i = 0; i < n; i++) {
            z[i] = noise(3, 3, (uint32_t)i);
            before += (double)z[i] * z[i];
        }
        kv_turn(z, n);
        for (int i = 0; i < n; i++)
            after += (double)z[i] * z[i];
        assert_true(fabs(before - after) < 1e-4 * before);
        kv_turn(z, n);
        for (int i = 0; i < n; i++)
            assert_float_equal(z[i], noise(3, 3, (uint32_t)i), 1e-5);
    }
}

/* One sequence decodes at length while others are read: every row as if alone. Also what a team of
 * many does to one long row: the chunks are split and folded. */
static void test_mixed(void **state)
{
    (void)state;
    const int len[] = {test_small() ? 300 : 1500, 40, 1, test_small() ? 140 : 700};
    FOR_EACH_ISA(isa)
    {
        float *out[3];
        size_t bytes = 0;
        for (int run = 0; run < 3; run++) {
            struct world w;
            world_open(&w, 16, 2, 64, 64, 16, DT_F16, DT_F16, 0, len, 4,
                       run == 0   ? 1
                       : run == 1 ? 2
                                  : 6,
                       isa, 5);
            out[run] = out_new(&w, &bytes);
            int from[MAX_SEQS] = {0}, to[MAX_SEQS];
            for (int i = 0; i < 4; i++) {
                to[i] = len[i] - 1;
                from[i] = 0;
            }
            to[1] = 0; /* sequence 1 is read whole in the last step */
            struct step st;
            step_open(&st, &w, from, to);
            step_append(&st, &w);
            step_close(&st);
            for (int i = 0; i < 4; i++) {
                from[i] = i == 1 ? 0 : len[i] - 1;
                to[i] = len[i];
            }
            if (run == 0) /* each alone */
                for (int i = 0; i < 4; i++) {
                    int f[MAX_SEQS] = {0}, t[MAX_SEQS] = {0};
                    f[i] = from[i];
                    t[i] = to[i];
                    step_open(&st, &w, f, t);
                    step_run(&st, &w);
                    scatter(&st, &w, f, t, out[run]);
                    step_close(&st);
                }
            else {
                step_open(&st, &w, from, to);
                step_run(&st, &w);
                scatter(&st, &w, from, to, out[run]);
                step_close(&st);
            }
            world_close(&w);
        }
        assert_memory_equal(out[0], out[1], bytes);
        assert_memory_equal(out[0], out[2], bytes);
        for (int run = 0; run < 3; run++)
            mem_free(out[run]);
    }
}

/* Padding rows: zeros out, nothing stored. */
static void test_padding(void **state)
{
    (void)state;
    static const int len[] = {40, 9};
    FOR_EACH_ISA(isa)
    {
        struct world w;
        world_open(&w, 8, 2, 32, 32, 16, DT_F16, DT_F16, 0, len, 2, 2, isa, 9);
        int from[MAX_SEQS] = {0};
        size_t bytes;
        float *want = out_new(&w, &bytes), *got = out_new(&w, &bytes);
        run_cut(&w, 0, want);
        memset(w.kv.k, 0xff, w.k_bytes);
        memset(w.kv.v, 0xff, w.v_bytes);
        struct step st;
        step_open(&st, &w, from, w.len);
        st.slot[48] = -1; /* the last row of the last sequence */
        memset(st.a, 0xff, st.q_len * sizeof(float));
        step_run(&st, &w);
        scatter(&st, &w, from, w.len, got);
        step_close(&st);
        size_t width = 8 * 32, at = (40 + 8) * width; /* sequence 1, position 8 */
        for (size_t i = 0; i < width; i++) {
            assert_true(got[at + i] == 0.0f);
            want[at + i] = 0.0f;
        }
        assert_memory_equal(want, got, bytes);
        mem_free(want);
        mem_free(got);
        world_close(&w);
    }
}

/* Scores far beyond what a half holds, ties, and weights that underflow. */
static void test_extremes(void **state)
{
    (void)state;
    static const int len[] = {200};
    FOR_EACH_ISA(isa)
    for (int kind = 0; kind < 3; kind++) {
        struct world w;
        world_open(&w, 8, 1, 32, 0, 16, DT_F32, DT_F32, 0, len, 1, 2, isa, 9);
        w.layer.q_norm = w.layer.k_norm = (struct norm){0};
        int from[MAX_SEQS] = {0};
        struct step st;
        step_open(&st, &w, from, w.len);
        for (int t = 0; t < 200; t++)
            for (int i = 0; i < w.width; i++) {
                float *x = &st.qkv[t * w.width + i];
                if (i < 8 * 32) /* q */
                    *x = kind == 0 ? 0.0f : 100.0f;
                else if (i < 9 * 32) /* k: growing or falling by 5e4 in score from key to key */
                    *x = kind == 1 ? (float)t * 100.0f : -(float)t * 100.0f;
                else
                    *x = (float)t;
            }
        step_run(&st, &w);
        for (int t = 0; t < 200; t++) {
            float want = kind == 0 ? (float)t / 2 : kind == 1 ? (float)t : 0.0f;
            for (int i = 0; i < 8 * 32; i++)
                assert_float_equal(st.a[t * 8 * 32 + i], want, 1e-4);
        }
        step_close(&st);
        world_close(&w);
    }
}

/* A float matrix that passes its first min(rows, columns) inputs on. */
static struct weight upload_identity(struct backend *be, int rows, int columns)
{
    float *values = mem_zalloc((size_t)rows * (size_t)columns, sizeof(float));
    for (int i = 0; i < rows && i < columns; i++)
        values[(size_t)i * (size_t)columns + (size_t)i] = 1;
    const uint8_t *data = (const uint8_t *)values;
    struct raw_weight raw = {.n_in = columns,
                             .n_out = rows,
                             .n_expert = 1,
                             .n_seg = 1,
                             .seg = {{.type = DT_F32, .rows = rows, .data = &data}},
                             .transient = true};
    struct error err;
    struct weight w;
    assert_true(be->ops->upload(be, &raw, WEIGHT_LINEAR, &w, &err));
    mem_free(values);
    return w;
}

/* The same worlds through the reference backend's mixer, between projections that change nothing. */
static void test_reference(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++) {
        struct world w;
        open_config(&w, &configs[c], DT_F32, 2, ISA_REF, 1);
        if (w.width > 2000) { /* the identity matrix would be large */
            world_close(&w);
            continue;
        }
        struct backend *be = backend_open_ref();
        struct error err;
        int heads = w.layer.n_heads * w.layer.k_dim;
        struct weight wqkv = upload_identity(be, w.width, w.width);
        struct weight wo = upload_identity(be, w.width, heads);
        struct layer layers[2] = {{.mixer.attention = w.layer}, {.mixer.attention = w.layer}};
        struct attention *a = &layers[0].mixer.attention;
        a->wqkv = &wqkv;
        a->wo = &wo;
        struct network net = {.n_layers = 2,
                              .n_embd = w.width,
                              .n_vocab = 1,
                              .layers = layers,
                              .ropes = &w.rope_of,
                              .n_ropes = 1};
        assert_true(be->ops->prepare(be, &net, &w.s, &err));
        struct kv_layer kv[2] = {{.k = be->ops->alloc(be, w.k_bytes, "keys", &err),
                                  .v = be->ops->alloc(be, w.v_bytes, "values", &err)}};
        int from[MAX_SEQS] = {0};
        struct step want;
        step_open(&want, &w, from, w.len);
        want.b.kv = kv;
        size_t n = (size_t)want.b.n_tokens * (size_t)w.width;
        float *after = mem_zalloc(n, sizeof *after);
        be->ops->begin(be, &want.b);
        be->ops->stream->put(be, want.qkv, want.b.n_tokens);
        be->ops->mixer(be, &layers[0].mixer, 0);
        be->ops->stream->get(be, after, want.b.n_tokens);
        assert_true(be->ops->end(be, NULL, &err));
        for (int t = 0; t < want.b.n_tokens; t++)
            for (int i = 0; i < heads; i++)
                want.a[t * heads + i] = after[t * w.width + i] - want.qkv[t * w.width + i];
        FOR_EACH_ISA(isa)
        {
            w.isa = w.pick.isa = isa;
            struct step got;
            step_open(&got, &w, from, w.len);
            step_run(&got, &w);
            double da = max_diff(want.a, got.a, want.q_len);
            if (!(da <= 1e-5))
                fail_msg("config %d, %s: off by %g", c, isa_name(isa), da);
            step_close(&got);
        }
        step_close(&want);
        be->ops->free(be, kv[0].k, w.k_bytes);
        be->ops->free(be, kv[0].v, w.v_bytes);
        be->ops->release(be, &wqkv);
        be->ops->release(be, &wo);
        be->ops->close(be);
        mem_free(after);
        world_close(&w);
    }
}

static void test_add_norm(void **state)
{
    (void)state;
    static const int widths[] = {1, 5, 16, 64, 100, 2048, 2051}, rows[] = {1, 3, 40};
    struct pool *pool = pool_new(3);
    for (int wi = 0; wi < 7; wi++)
        for (int ri = 0; ri < 3; ri++)
            FOR_EACH_ISA(isa)
    for (int mode = 0; mode < 4; mode++) {
        bool with_d = mode & 1, layer = mode & 2;
        int width = widths[wi], n_rows = rows[ri];
        size_t n = (size_t)width * (size_t)n_rows;
        float *x = mem_zalloc(n, 4), *d = mem_zalloc(n, 4), *out = mem_zalloc(n, 4);
        float *gain = mem_zalloc((size_t)width, 4), *bias = mem_zalloc((size_t)width, 4);
        const struct norm norm = {.kind = layer ? NORM_LAYER : NORM_RMS,
                                  .gain = gain,
                                  .bias = layer ? bias : NULL,
                                  .eps = 1e-5f};
        for (size_t i = 0; i < n; i++) {
            x[i] = noise(1, 3, (uint32_t)i);
            d[i] = noise(1, 4, (uint32_t)i);
        }
        for (int i = 0; i < width; i++)
            gain[i] = noise(1, 5, (uint32_t)i);
        for (int i = 0; i < width; i++)
            bias[i] = noise(1, 6, (uint32_t)i);
        cpu_add_norm(x, with_d ? d : NULL, &norm, out, n_rows, width, pool, isa);
        for (int r = 0; r < n_rows; r++) {
            double sum = 0, mean = 0;
            for (int i = 0; i < width; i++) {
                size_t at = (size_t)r * (size_t)width + (size_t)i;
                float want = noise(1, 3, (uint32_t)at);
                want += with_d ? noise(1, 4, (uint32_t)at) : 0;
                assert_true(x[at] == want);
                mean += layer ? (double)want / width : 0;
            }
            for (int i = 0; i < width; i++) {
                double v = x[(size_t)r * (size_t)width + (size_t)i] - mean;
                sum += v * v;
            }
            double scale = 1 / sqrt(sum / width + (double)1e-5f);
            for (int i = 0; i < width; i++) {
                size_t at = (size_t)r * (size_t)width + (size_t)i;
                double want = (x[at] - mean) * scale * gain[i] + (layer ? bias[i] : 0);
                double near = layer ? 1e-5 * scale : 1e-12;
                assert_true(fabs(out[at] - want) <= 1e-6 * fabs(want) + near);
            }
        }
        mem_free(x);
        mem_free(d);
        mem_free(out);
        mem_free(gain);
        mem_free(bias);
    }
    pool_free(pool);
}

static void test_gather(void **state)
{
    (void)state;
    enum { ROWS = 90, WIDTH = 1000 };
    struct pool *pool = pool_new(3);
    float *src = mem_zalloc((size_t)ROWS * WIDTH, 4), *dst = mem_zalloc((size_t)ROWS * WIDTH, 4);
    int32_t index[ROWS];
    for (int i = 0; i < ROWS * WIDTH; i++)
        src[i] = (float)i;
    for (int n = 1; n <= ROWS; n += 89) {
        for (int i = 0; i < n; i++)
            index[i] = (i * 37 + 5) % ROWS;
        cpu_gather(src, index, n, WIDTH, dst, pool);
        for (int i = 0; i < n; i++)
            assert_memory_equal(dst + (size_t)i * WIDTH, src + (size_t)index[i] * WIDTH, WIDTH * 4);
    }
    mem_free(src);
    mem_free(dst);
    pool_free(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_exact_storage), cmocka_unit_test(test_invariance),
        cmocka_unit_test(test_quant),         cmocka_unit_test(test_quant_invariance),
        cmocka_unit_test(test_quant_edges),   cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_padding),       cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_add_norm),      cmocka_unit_test(test_gather),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
