/*
 * Embeddings: the rows of a step become the stream, also with patches of images in place of tokens, with per-layer
 * embeddings, and joined with kept rows for the MTP block.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/hyper.h"
#include "backend/cpu/streams.h"

#include <string.h>

struct embed_rows_job {
    const struct cpu_backend *cb;
    const struct embed *e;
    float *x; /* (n_tokens, E) */
};

/* x += a row of the table */
static void add_row(const struct cpu_backend *cb, int ith, const struct weight *table, int row,
                    float *x)
{
    float *from = gemm_tile(cb, ith, 0);
    gemm_weight_row(table->impl, row, from);
    for (int i = 0; i < table->n_in; i++)
        x[i] += from[i];
}

static void embed_rows(void *arg, int ith, int first, int last)
{
    const struct embed_rows_job *j = arg;
    const struct embed *e = j->e;
    const struct batch *b = &j->cb->batch;
    int E = j->cb->net->n_embd;
    for (int t = first; t < last; t++) {
        float *x = j->x + (size_t)t * (size_t)E;
        int row = b->tokens[t] - e->first, given = b->tokens[t] - j->cb->net->n_vocab;
        if (e->partial && (row < 0 || row >= e->tokens->n_out)) {
            memset(x, 0, (size_t)E * sizeof *x);
            continue;
        }
        if (e->patches) { /* added to the product of the patch */
            const float *q = b->embeds[given] + e->patches->n_in;
            cpu_norm_alone(&e->patch_norm, x, 1, E, j->cb->isa);
            for (int i = 0; i < E; i++)
                x[i] += q[i];
        } else if (given >= 0) {
            memcpy(x, b->embeds[given], (size_t)E * sizeof *x);
        } else {
            gemm_weight_row(e->tokens->impl, row, x);
        }
        for (int i = 0; given < 0 && e->scale != 0 && i < E; i++)
            x[i] *= e->scale;
        if (e->positions)
            add_row(j->cb, ith, e->positions, b->pos[t] + e->pos_offset, x);
        if (e->types)
            add_row(j->cb, ith, e->types, b->types ? b->types[t] : 0, x);
        cpu_norm_alone(&e->norm, x, 1, E, j->cb->isa);
    }
}

/* Collects the patches' values. */
static void patch_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct embed_rows_job *j = arg;
    const struct batch *b = &j->cb->batch;
    size_t n = (size_t)j->e->patches->n_in;
    for (int t = first; t < last; t++)
        memcpy(j->cb->patches + (size_t)t * n, b->embeds[b->tokens[t] - j->cb->net->n_vocab],
               n * sizeof(float));
}

/* Per-layer embeddings; their projection (n_tokens, n_layers * P) is done. */
struct layers_job {
    const struct cpu_backend *cb;
    const struct embed_layers *e;
};

static void layers_rows(void *arg, int ith, int first, int last)
{
    const struct layers_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    const struct embed_layers *e = j->e;
    int n = e->width * cb->net->n_layers;
    float *row = gemm_tile(cb, ith, 0);
    for (int t = first; t < last; t++) {
        float *to = cb->layer_embeds + (size_t)t * (size_t)n;
        for (int i = 0; i < n; i++)
            to[i] *= e->project_scale;
        cpu_norm_alone(&e->norm, to, cb->net->n_layers, e->width, cb->isa);
        int32_t token = cb->batch.tokens[t];
        gemm_weight_row(e->table->impl, token < e->table->n_out ? token : e->pad, row);
        for (int i = 0; i < n; i++)
            to[i] = (to[i] + e->table_scale * row[i]) * e->scale;
    }
}

static void embed_layers(struct cpu_backend *cb, const struct embed_layers *e)
{
    struct layers_job j = {cb, e};
    if (!e->width)
        return;
    gemm_linear(cb, e->project, cb->stream.x, cb->layer_embeds, cb->stream.rows);
    pool_each(cb->pool, cb->stream.rows, POOL_EVEN, layers_rows, &j);
}

/* The stream becomes the rows' embeddings. */
static void embed_stream(struct cpu_backend *cb, const struct embed *e)
{
    struct cpu_stream *x = &cb->stream;
    cpu_stage_begin(cb);
    x->x = x->all;
    x->rows = cb->batch.n_tokens;
    x->pending = x->narrow = false;
    struct embed_rows_job j = {cb, e, x->x};
    if (e->patches) {
        pool_each(cb->pool, x->rows, POOL_EVEN, patch_rows, &j);
        gemm_linear(cb, e->patches, cb->patches, x->x, x->rows);
    }
    if (pick_single_thread(SMALL_EMBED, (size_t)x->rows))
        embed_rows(&j, 0, 0, x->rows);
    else
        pool_each(cb->pool, x->rows, POOL_EVEN, embed_rows, &j);
    cpu_stage_end(cb, STAGE_EMBED);
}

void cpu_embed(struct backend *be, const struct embed *e)
{
    struct cpu_backend *cb = cpu_self(be);
    embed_stream(cb, e);
    if (e->partial)
        cpu_sum_members(cb, cb->stream.x, NULL);
    cpu_stage_begin(cb);
    embed_layers(cb, &e->layers);
    if (cb->streams)
        cpu_streams_begin(cb);
    if (cb->hyper)
        cpu_hyper_begin(cb);
    cpu_stage_end(cb, STAGE_EMBED);
}

/* EAGLE-3 (layer.h). */

struct taps_job {
    const struct cpu_backend *cb;
    const struct mtp *m;
    int k;
};

static void tap_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct taps_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    size_t E = (size_t)cb->net->n_embd, n = (size_t)cb->net->mtp.n_taps;
    for (size_t t = (size_t)first; t < (size_t)last; t++)
        memcpy(cb->tapped + (t * n + (size_t)j->k) * E, cb->stream.x + t * E,
               E * sizeof *cb->tapped);
}

void cpu_tap(struct backend *be, int k)
{
    struct cpu_backend *cb = cpu_self(be);
    struct taps_job j = {cb, NULL, k};
    cpu_settle(cb);
    cpu_stage_begin(cb);
    if (pick_single_thread(SMALL_EMBED, (size_t)cb->stream.rows))
        tap_rows(&j, 0, 0, cb->stream.rows);
    else
        pool_each(cb->pool, cb->stream.rows, POOL_EVEN, tap_rows, &j);
    cpu_stage_end(cb, STAGE_NORM);
}

/* to_fc = the rows that the step continues, normed. */
static void fc_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct taps_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int wide = j->m->n_taps * cb->net->n_embd;
    for (int t = first; t < last; t++) {
        float *to = cb->to_fc + (size_t)t * (size_t)wide;
        memcpy(to, cb->tapped + (size_t)cb->batch.from[t] * (size_t)wide,
               (size_t)wide * sizeof *to);
        cpu_norm_alone(&j->m->taps_norm, to, 1, wide, cb->isa);
    }
}

/* What the mixer reads, from embeddings in the stream and g in d or among the kept rows. The stream becomes g. */
static void join_taps_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct taps_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd;
    size_t bytes = (size_t)E * sizeof(float);
    for (int t = first; t < last; t++) {
        float *x = cb->stream.x + (size_t)t * (size_t)E,
              *e = cb->joined + 2 * (size_t)t * (size_t)E, *h = e + E;
        const float *g = cb->batch.continues ? cb->kept + (size_t)cb->batch.from[t] * (size_t)E
                                             : cb->stream.d + (size_t)t * (size_t)E;
        memcpy(e, x, bytes);
        memcpy(h, g, bytes);
        cpu_norm_alone(&j->m->embed_norm, e, 1, E, cb->isa);
        cpu_norm_alone(&j->m->hidden_norm, h, 1, E, cb->isa);
        memcpy(x, j->m->norm_residual ? h : g, bytes);
    }
}

static void join_taps(struct cpu_backend *cb, const struct mtp *m)
{
    struct taps_job j = {cb, m, 0};
    const struct embed tokens = {.tokens = m->tokens ? m->tokens : cb->net->embed.tokens};
    embed_stream(cb, &tokens);
    cpu_stage_begin(cb);
    int rows = cb->stream.rows;
    if (!cb->batch.continues) {
        pool_each(cb->pool, rows, POOL_EVEN, fc_rows, &j);
        gemm_linear(cb, m->fc, cb->to_fc, cb->stream.d, rows);
    }
    pool_each(cb->pool, rows, POOL_EVEN, join_taps_rows, &j);
    cpu_stage_end(cb, STAGE_EMBED);
}

struct join_job {
    const struct cpu_backend *cb;
    const struct mtp *m;
};

static void join_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct join_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd;
    for (int t = first; t < last; t++) {
        float *e = cb->joined + 2 * (size_t)t * (size_t)E, *h = e + E;
        memcpy(e, cb->stream.x + (size_t)t * (size_t)E, (size_t)E * sizeof *e);
        memcpy(h, cb->kept + (size_t)cb->batch.from[t] * (size_t)E, (size_t)E * sizeof *h);
        cpu_norm_alone(&j->m->embed_norm, e, 1, E, cb->isa);
        cpu_norm_alone(&j->m->hidden_norm, h, 1, E, cb->isa);
    }
}

void cpu_join(struct backend *be, const struct mtp *m)
{
    struct cpu_backend *cb = cpu_self(be);
    const struct cpu_stream *x = &cb->stream;
    struct join_job j = {cb, m};
    if (m->n_taps) {
        join_taps(cb, m);
        return;
    }
    embed_stream(cb, &cb->net->embed);
    if (cb->net->embed.partial)
        cpu_sum_members(cb, x->x, NULL);
    cpu_stage_begin(cb);
    if (pick_single_thread(SMALL_EMBED, (size_t)x->rows))
        join_rows(&j, 0, 0, x->rows);
    else
        pool_each(cb->pool, x->rows, POOL_EVEN, join_rows, &j);
    gemm_linear(cb, m->fc, cb->joined, x->x, x->rows);
    cpu_stage_end(cb, STAGE_EMBED);
}
