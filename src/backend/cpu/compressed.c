/*
 * Compressed attention. Keys and entries of compressors are rows of one plane of the cache (layer.h, mixer_page_rows), so one
 * attention over a list of rows (attn.c) serves both: each row of the step lists the keys of its window, then its entries.
 * Layers without a compressor have a window only, and no list.
 *
 * A compressor runs in two phases: sums by block of channels, each through all rows of a sequence in order; then norm, RoPE
 * and store of the entries that were completed. So a row's bytes do not depend on how a prompt was split.
 *
 * Owns the layout of a state: that of the keys' compressor, then that of the indexer's; in each, for every series, maxima,
 * weights and weighted values, D each.
 */
#include "backend/cpu/compressed.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/rowops.h"
#include "base/error.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 64 }; /* channels of a piece of a compressor */

struct compressed_state {
    float *kv; /* (max_tokens, D) keys */
    float *cz,
        *entries; /* (max_tokens, 2*S*D), (max_tokens, D): row t has the entry that it completes */
    int32_t *list, *n;     /* of the choice: (max_tokens, most), (max_tokens) */
    struct key_choice all; /* of keys and entries */
    int most;
};

static bool has_list(const struct compressed *l)
{
    return l->compressor.rate > 0;
}

/* Attention over the plane's rows. */
static struct attention inner_of(const struct compressed *l)
{
    return (struct attention){.n_heads = l->n_heads,
                              .n_kv_heads = 1,
                              .k_dim = l->dim,
                              .v_dim = l->dim,
                              .scale = l->scale,
                              .window = l->window,
                              .sinks = l->sinks,
                              .index.n_chosen = has_list(l)};
}

static struct bounds bounds_of(const struct bounds *s, const struct mixer *m)
{
    struct bounds own = *s;
    own.page_len = mixer_page_rows(m, s->page_len);
    return own;
}

size_t cpu_compressed_scratch(const struct bounds *s, const struct mixer *m, int n_threads)
{
    struct attention inner = inner_of(&m->compressed);
    struct bounds own = bounds_of(s, m);
    return cpu_attention_rows_scratch(&own, &inner, n_threads);
}

bool cpu_compressed_supported(const struct network *net, int layer)
{
    const struct mixer *m = &net->layers[layer].mixer;
    const struct compressed *l = &m->compressed;
    if (m->kind != MIXER_COMPRESSED)
        return true;
    return l->dim <= CPU_MAX_LATENT && l->window > 0 && !m->block.parallel &&
           (!l->index.n_chosen || (l->index.compressor.rate == l->compressor.rate &&
                                   l->index.rope_last && !l->index.reuse)) &&
           l->woa->n_in <= GEMM_TILE;
}

bool cpu_compressed_prepare(struct cpu_backend *cb, const struct network *net, struct error *err)
{
    struct compressed_state s = {0};
    int T = cb->bounds.max_tokens, dim = 0;
    cb->compressed = NULL;
    for (int i = 0; i < net->n_layers; i++) {
        const struct compressed *l = &net->layers[i].mixer.compressed;
        if (net->layers[i].mixer.kind != MIXER_COMPRESSED)
            continue;
        int entries =
            has_list(l) ? cb->bounds.max_pages * cb->bounds.page_len / l->compressor.rate : 0;
        int seen = l->index.n_chosen && l->index.n_chosen < entries ? l->index.n_chosen : entries;
        int wide = l->index.n_chosen && l->index.dim > l->dim ? l->index.dim : l->dim;
        dim = wide > dim ? wide : dim;
        s.most = l->window + seen > s.most ? l->window + seen : s.most;
    }
    if (!dim)
        return true;
    bool ok = (s.kv = cpu_rows(cb, T, dim, "keys", err)) &&
              (s.cz = cpu_rows(cb, T, cb->max.compressed, "compressors", err)) &&
              (s.entries = cpu_rows(cb, T, dim, "entries", err)) &&
              (s.list = cpu_scratch(cb, (size_t)T * (size_t)s.most * sizeof *s.list, "visible keys",
                                    err)) &&
              (s.n = cpu_scratch(cb, (size_t)T * sizeof *s.n, "visible keys", err)) &&
              (cb->compressed = cpu_scratch(cb, sizeof *cb->compressed, "compressors", err));
    if (ok && !cb->measured)
        *cb->compressed = s;
    return ok;
}

struct compress_job {
    struct cpu_backend *cb;
    const struct mixer *m;
    const struct kv_layer *kv;
    const struct compressor *c;
    const struct rope *rope;
    size_t at, len; /* of this compressor in a state, and the state's length */
    void *plane;
    int rows, first; /* of a page of the plane, and before its entries */
    float *q;        /* (n_tokens, H*D) */
};

void cpu_turn_last(const float *rope, int n_rot, float *head, int dim, bool back)
{
    float *x = head + dim - n_rot;
    const float *cos = rope, *sin = rope + n_rot / 2;
    for (int i = 0; i < n_rot / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1], s = back ? -sin[i] : sin[i];
        x[2 * i] = a * cos[i] - b * s;
        x[2 * i + 1] = b * cos[i] + a * s;
    }
}

static float *state_of(const struct compress_job *j, int32_t slot)
{
    return slot < 0 ? NULL : j->kv->state + (size_t)slot * j->len + j->at;
}

/* Adds n values with their exponents to sums: maxima, weights and weighted values, D apart. */
static void add_values(float *sum, size_t D, const float *z, const float *bias, const float *c,
                       int n)
{
    for (int d = 0; d < n; d++) {
        float e = z[d] + bias[d], max = sum[D + (size_t)d] == 0 || e > sum[d] ? e : sum[d];
        float old = sum[D + (size_t)d] == 0 ? 0 : expf(sum[d] - max), new = expf(e - max);
        sum[d] = max;
        sum[D + (size_t)d] = sum[D + (size_t)d] * old + new;
        sum[2 * D + (size_t)d] = sum[2 * D + (size_t)d] * old + new *c[d];
    }
}

/* Copies n channels of all sums; from NULL: zeros. */
static void copy_sums(const struct compress_job *j, const float *from, float *to, int at, int n)
{
    size_t D = (size_t)j->c->dim, width = (size_t)n * sizeof *to;
    for (size_t i = 0; i < (size_t)(3 * compressor_series(j->c)); i++) {
        if (!from)
            memset(to + i * D + at, 0, width);
        else if (from != to)
            memcpy(to + i * D + at, from + i * D + at, width);
    }
}

/* Takes the rows of a sequence into the sums of n channels from `at` on. */
static void sum_block(const struct compress_job *j, int seq, int at, int n)
{
    const struct compressor *c = j->c;
    const struct batch *b = &j->cb->batch;
    int S = compressor_series(c);
    size_t D = (size_t)c->dim, width = (size_t)c->w->n_out, first = (size_t)at;
    float *out = state_of(j, b->state_out[seq]);
    if (!out) /* padding */
        return;
    copy_sums(j, state_of(j, b->state_in[seq]), out, at, n);
    for (int t = b->q_start[seq]; t < b->q_start[seq + 1]; t++) {
        const float *cz = j->cb->compressed->cz + (size_t)t * width;
        size_t in = (size_t)(b->pos[t] % c->rate);
        for (int s = 0; s < S; s++) { /* the last half is of this window, the first of the next */
            size_t half = (size_t)(S - 1 - s) * D + first;
            add_values(out + (size_t)(3 * s) * D + first, D, cz + (size_t)S * D + half,
                       c->bias + in * (size_t)S * D + half, cz + half, n);
        }
        if ((int)in == c->rate - 1) {
            float *entry = j->cb->compressed->entries + (size_t)t * D;
            for (size_t d = first; d < first + (size_t)n; d++)
                entry[d] = out[2 * D + d] / out[D + d];
            for (size_t i = 0; i < 3; i++) {
                if (S > 1)
                    memcpy(out + i * D + at, out + (3 + i) * D + at, (size_t)n * sizeof *out);
                memset(out + ((size_t)(3 * (S - 1)) + i) * D + at, 0, (size_t)n * sizeof *out);
            }
        }
        if (b->save_rows[seq] == t - b->q_start[seq] + 1)
            copy_sums(j, out, state_of(j, b->save_state[seq]), at, n);
    }
}

static struct pool_work sums_work(void *arg)
{
    const struct compress_job *j = arg;
    return (struct pool_work){j->cb->batch.n_seqs * ((j->c->dim + BLOCK - 1) / BLOCK), POOL_EVEN};
}

static void sums_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct compress_job *j = arg;
    int blocks = (j->c->dim + BLOCK - 1) / BLOCK;
    for (int i = first; i < last; i++) {
        int at = i % blocks * BLOCK, left = j->c->dim - at;
        sum_block(j, i / blocks, at, left < BLOCK ? left : BLOCK);
    }
}

/* Norms, turns and stores the entries that a sequence's rows completed. */
static void store_entries(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct compress_job *j = arg;
    const struct batch *b = &j->cb->batch;
    const struct row_kernels *kn = row_kernels(j->cb->isa);
    int D = j->c->dim, rate = j->c->rate, len = j->cb->bounds.page_len, n_rot = j->rope->n_rot;
    for (int t = first; t < last; t++) {
        int slot = b->slot[t], pos = b->pos[t];
        if (slot < 0 || pos % rate != rate - 1)
            continue;
        float *entry = j->cb->compressed->entries + (size_t)t * (size_t)D, rope[CPU_MAX_LATENT];
        for (int i = 0; i < n_rot / 2; i++) {
            double angle = (double)(pos - rate + 1) * (double)j->rope->freq[i];
            rope[i] = (float)cos(angle) * j->rope->mscale;
            rope[n_rot / 2 + i] = (float)sin(angle) * j->rope->mscale;
        }
        cpu_norm_alone(&j->c->norm, entry, 1, D, j->cb->isa);
        cpu_turn_last(rope, n_rot, entry, D, false);
        size_t row =
            (size_t)(slot / len) * (size_t)j->rows + (size_t)(j->first + slot % len / rate);
        kn->store(j->cb->bounds.k_type, entry, D, j->plane, row * (size_t)D, 1);
    }
}

static void compress(struct compress_job *j, const float *n)
{
    static const struct pool_phase phases[] = {{sums_work, sums_run}};
    struct cpu_backend *cb = j->cb;
    gemm_linear(cb, j->c->w, n, cb->compressed->cz, cb->batch.n_tokens);
    pool_phases(cb->pool, phases, 1, j);
    pool_each(cb->pool, cb->batch.n_tokens, POOL_EVEN, store_entries, j);
}

/* Finishes the queries and the key of rows, and stores the key. */
static void token_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct compress_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    const struct compressed *l = &j->m->compressed;
    const struct row_kernels *kn = row_kernels(cb->isa);
    int D = l->dim, H = l->n_heads, len = cb->bounds.page_len, n_rot = l->rope->n_rot;
    for (int t = first; t < last; t++) {
        const float *rope = cpu_rope_of(cb, l->rope) + (size_t)t * (size_t)n_rot;
        float *q = j->q + (size_t)t * (size_t)(H * D);
        float *k = cb->compressed->kv + (size_t)t * (size_t)D;
        int slot = cb->batch.slot[t];
        cpu_norm_alone(&l->head_norm, q, H, D, cb->isa);
        for (int h = 0; h < H; h++)
            cpu_turn_last(rope, n_rot, q + h * D, D, false);
        if (slot < 0)
            continue;
        cpu_norm_alone(&l->kv_norm, k, 1, D, cb->isa);
        cpu_turn_last(rope, n_rot, k, D, false);
        size_t row = (size_t)(slot / len) * (size_t)j->rows + (size_t)(slot % len);
        kn->store(cb->bounds.k_type, k, D, j->kv->k, row * (size_t)D, 1);
    }
}

struct list_job {
    const struct cpu_backend *cb;
    const struct mixer *m;
    const struct key_choice *chosen; /* of entries; NULL = all */
};

/* Lists what rows see: positions in a sequence whose pages have the plane's rows. */
static void list_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct list_job *j = arg;
    const struct compressed *l = &j->m->compressed;
    const struct compressed_state *s = j->cb->compressed;
    int len = j->cb->bounds.page_len, rows = mixer_page_rows(j->m, len);
    int rate = l->compressor.rate;
    for (int t = first; t < last; t++) {
        int32_t *list = s->list + (size_t)t * (size_t)s->most, n = 0;
        int pos = j->cb->batch.pos[t], all = compressor_entries(&l->compressor, pos);
        bool some = j->chosen && j->chosen->n[t] >= 0;
        const int32_t *of = some ? j->chosen->list + (size_t)t * (size_t)j->chosen->most : NULL;
        for (int p = pos - l->window + 1 > 0 ? pos - l->window + 1 : 0; p <= pos; p++)
            list[n++] = p / len * rows + p % len;
        for (int i = 0; i < (some ? j->chosen->n[t] : all); i++) {
            int end = ((some ? of[i] : i) + 1) * rate - 1;
            list[n++] = end / len * rows + len + end % len / rate;
        }
        s->n[t] = n;
    }
}

/* The product of each group's heads, whose sums lie in cb->q, after they were turned back. */
struct group_job {
    struct cpu_backend *cb;
    const struct compressed *l;
    bool bf16;
    int chunk, chunks; /* rows of a piece, pieces of a group */
};

static void back_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct group_job *j = arg;
    const struct compressed *l = j->l;
    int n_rot = l->rope->n_rot;
    for (int t = first; t < last; t++)
        for (int h = 0; h < l->n_heads; h++)
            cpu_turn_last(cpu_rope_of(j->cb, l->rope) + (size_t)t * (size_t)n_rot, n_rot,
                          j->cb->q + ((size_t)t * (size_t)l->n_heads + (size_t)h) * (size_t)l->dim,
                          l->dim, true);
}

static void group_pieces(void *arg, int ith, int first, int last)
{
    const struct group_job *j = arg;
    const struct compressed *l = j->l;
    int T = j->cb->batch.n_tokens;
    size_t in = (size_t)(l->n_heads * l->dim), out = (size_t)l->wob->n_in;
    for (int p = first; p < last; p++) {
        int g = p / j->chunks, t = p % j->chunks * j->chunk;
        gemm_head(j->cb, ith, l->woa->impl, g,
                  j->cb->q + (size_t)t * in + (size_t)(g * l->woa->n_in), in,
                  T - t < j->chunk ? T - t : j->chunk, j->bf16,
                  j->cb->a + (size_t)t * out + (size_t)(g * l->woa->n_out), out);
    }
}

static void group_outputs(struct cpu_backend *cb, const struct compressed *l)
{
    int T = cb->batch.n_tokens;
    const struct gemm_weight *w = l->woa->impl;
    struct group_job j = {.cb = cb, .l = l, .bf16 = gemm_takes_bf16(cb, w, T)};
    j.bf16 &= gemm_head_most(cb, w, true) > 0;
    j.chunk = gemm_head_most(cb, w, j.bf16);
    j.chunks = (T + j.chunk - 1) / j.chunk;
    pool_each(cb->pool, T, POOL_EVEN, back_rows, &j);
    gemm_start(cb->gemm);
    gemm_count(cb, w, T, j.bf16);
    pool_each(cb->pool, l->n_groups * j.chunks, POOL_EVEN, group_pieces, &j);
}

void cpu_mix_compressed(struct cpu_backend *cb, const struct mixer *m, int layer, const float *n)
{
    const struct compressed *l = &m->compressed;
    const struct batch *b = &cb->batch;
    const struct kv_layer *kv = &b->kv[layer];
    struct compressed_state *s = cb->compressed;
    int len = cb->bounds.page_len, T = b->n_tokens;
    cpu_stage_begin(cb);
    gemm_linear(cb, l->wqa, n, cb->low, T);
    cpu_add_norm(cb->low, NULL, &l->q_norm, cb->low, T, l->q_rank, cb->pool, cb->isa);
    gemm_linear(cb, l->wqb, cb->low, cb->q, T);
    gemm_linear(cb, l->wkv, n, s->kv, T);
    struct compress_job j = {.cb = cb,
                             .m = m,
                             .kv = kv,
                             .c = &l->compressor,
                             .rope = l->rope,
                             .len = mixer_state_len(m),
                             .plane = kv->k,
                             .rows = mixer_page_rows(m, len),
                             .first = len,
                             .q = cb->q};
    pool_each(cb->pool, T, POOL_EVEN, token_rows, &j);
    cpu_stage_end(cb, STAGE_QKV);
    cpu_stage_begin(cb);
    const struct key_choice *choice = NULL;
    if (has_list(l)) {
        compress(&j, n);
        struct list_job list = {cb, m, NULL};
        if (l->index.n_chosen) {
            j.at = (size_t)(3 * compressor_series(&l->compressor) * l->dim);
            j.c = &l->index.compressor;
            j.rope = l->index.rope;
            j.plane = kv->index;
            j.rows = compressor_page_rows(j.c, len);
            j.first = 0;
            compress(&j, n);
            list.chosen = cpu_index(cb, &l->index, kv, n, cb->low, 1);
        }
        pool_each(cb->pool, T, POOL_EVEN, list_rows, &list);
        s->all = (struct key_choice){s->list, s->n, 1, s->most, 1};
        choice = &s->all;
    }
    struct attention inner = inner_of(l);
    struct bounds own = bounds_of(&cb->bounds, m);
    cpu_attention_rows(&own, b, &inner, kv->k, choice, cb->q, cb->attn_scratch, cb->pool,
                       &cb->pick);
    group_outputs(cb, l);
    cpu_stage_end(cb, STAGE_ATTENTION);
}
