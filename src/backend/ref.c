/*
 * The specification: every part of a network in plain scalar C, one row at a time, with float storage and double
 * accumulation. Backends are tested against it (ref.c, ref_mixer.c, ref_mlp.c). It is also a backend itself
 * (STEEL_ISA=ref). layer.h has the equations. This file: memory, the step, embeddings, the head.
 */
#include "backend/ref.h"
#include "backend/canary.h"
#include "base/mem.h"
#include "sample/sampler.h"

#include <stdlib.h>
#include <string.h>

/* Memory */

static void *ref_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    (void)be;
    void *p = mem_aligned(bytes);
    if (!p)
        error_set(err, "out of memory: %zu bytes for %s", bytes, what);
    return p;
}

static void ref_free(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_aligned_free(p, bytes);
}

static void ref_forget(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_forget(p, bytes);
}

static void ref_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static bool ref_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                       struct weight *w, struct error *err)
{
    (void)be, (void)role;
    struct raw_weight *own = src->transient ? raw_weight_copy(src) : raw_weight_view(src);
    if (!own)
        return error_set(err, "out of memory for a weight of %zu bytes", raw_weight_bytes(src));
    *w = (struct weight){.n_in = src->n_in,
                         .n_out = src->n_out,
                         .n_expert = src->n_expert,
                         .bias = src->bias != NULL,
                         .bytes = raw_weight_bytes(src),
                         .owns = src->transient,
                         .impl = own};
    return true;
}

static void ref_release(struct backend *be, struct weight *w)
{
    (void)be;
    raw_weight_free(w->impl);
    *w = (struct weight){0};
}

static void *ref_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                       struct error *err)
{
    (void)be, (void)w, (void)err;
    return lora_copy(l);
}

static void ref_unadapt(struct backend *be, void *change)
{
    (void)be;
    lora_free(change);
}

/* Everything but the short convolution, which has no reference yet. */
static bool ref_supports(struct backend *be, const struct network *net, struct error *err)
{
    (void)be;
    for (int i = 0; i < net->n_layers; i++) {
        const struct router *t = &net->layers[i].mlp.router;
        if (t->n_used > REF_MAX_USED || t->n_groups > REF_MAX_USED)
            return network_refuse(err, i, "more than 256 experts of a token, or groups, are",
                                  "ref");
    }
    return network_check(net, ~0ull, "ref", err);
}

static float *floats(size_t n)
{
    return mem_zalloc(n + 1, sizeof(float));
}

static void clear(struct ref *r)
{
    void *owned[] = {
        r->x,          r->row_of,  r->layer_embeds, r->logits[0], r->logits[1], r->q,
        r->gate,       r->a,       r->qkv,          r->n,         r->y,         r->part,
        r->row,        r->keys,    r->hidden,       r->scores,    r->probs,     r->index_q,
        r->index_w,    r->index_k, r->chosen,       r->n_chosen,  r->seen,      r->sampled[0],
        r->sampled[1], r->tokens,  r->sum,          r->gap,       r->latent,    r->told[0],
        r->told[1],    r->kept,    r->joined,       r->mean,      r->merged,    r->clipped,
        r->to_experts, r->before,  r->weighed,      r->streams,   r->late,      r->mixes,
        r->compressed, r->visible, r->rel,          r->taps};
    for (int i = 0; i < r->n_features; i++)
        mem_free(r->features[i]);
    mem_free(r->features);
    r->features = NULL;
    r->n_features = 0;
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static void prepare_features(struct ref *r, const struct network *net, size_t tokens)
{
    r->merged = floats(3 * MERGER_MAX_STEPS * (size_t)r->max.merged);
    r->features = mem_zalloc((size_t)net->n_mergers + 1, sizeof *r->features);
    r->n_features = net->n_mergers;
    for (int i = 0; i < net->n_mergers; i++) {
        const struct merger *m = &net->mergers[i];
        r->features[i] =
            floats(tokens / (size_t)merger_rows(m) * (size_t)merger_width(m, net->n_embd));
    }
}

static bool ref_prepare(struct backend *be, const struct network *net, const struct bounds *s,
                        struct error *err)
{
    (void)err;
    struct ref *r = ref_self(be);
    clear(r);
    r->net = net;
    r->bounds = *s;
    network_measure(net, &r->max);
    const struct network_max *max = &r->max;
    size_t embd = (size_t)net->n_embd, heads = (size_t)max->heads, tokens = (size_t)s->max_tokens;
    size_t per_layer = (size_t)net->embed.layers.width;
    size_t ff = (size_t)(max->n_ff > max->n_ff_exp ? max->n_ff : max->n_ff_exp);
    size_t wide = embd > heads ? embd : heads;
    wide = (size_t)max->latent > wide ? (size_t)max->latent : wide;
    wide = net->streams.head.w ? (size_t)net->streams.n * embd : wide;
    wide = (size_t)max->state_heads > wide ? (size_t)max->state_heads : wide;
    wide = ff > wide ? ff : wide;
    wide = (size_t)max->n_latent_exp > wide ? (size_t)max->n_latent_exp : wide;
    wide = (size_t)max->merged > wide ? (size_t)max->merged : wide;
    size_t patch = net->embed.patches ? (size_t)net->embed.patches->n_in : 0;
    wide = patch > wide ? patch : wide;
    wide = net->mtp.fc && 2 * embd > wide ? 2 * embd : wide;
    wide = (size_t)net->mtp.n_taps * embd > wide ? (size_t)net->mtp.n_taps * embd : wide;
    wide = per_layer * (size_t)net->n_layers > wide ? per_layer * (size_t)net->n_layers : wide;
    r->x = floats(tokens * embd);
    r->row_of = mem_zalloc(tokens + 1, sizeof(int32_t));
    r->streams = net->streams.n ? floats((size_t)net->streams.n * tokens * embd) : NULL;
    r->layer_embeds = floats(tokens * per_layer * (size_t)net->n_layers);
    for (int i = 0; i < 2; i++)
        r->logits[i] = floats((size_t)s->max_out * (net->head.w ? (size_t)net->n_vocab : embd));
    r->q = floats(tokens * heads);
    r->gate = floats(tokens * heads);
    r->a = floats(tokens * heads);
    r->qkv = floats((size_t)max->qkv);
    r->rel = floats(tokens * (size_t)max->rel);
    r->before = floats(tokens * embd);
    r->late = floats(tokens * embd);
    r->mixes = floats(tokens * (size_t)(net->streams.n * (net->streams.n + 2)));
    r->compressed = floats(2 * (size_t)max->compressed);
    r->visible = mem_zalloc(2 * (size_t)s->max_pages * (size_t)s->page_len + 1, sizeof *r->visible);
    r->n = floats(2 * embd);
    r->y = floats(embd);
    r->part = floats(wide);
    r->sum = floats(wide);
    r->weighed = floats(wide);
    r->to_experts = floats((size_t)max->n_latent_exp);
    r->row = floats(wide);
    r->clipped = floats(wide);
    r->mean = mem_zalloc(wide + 1, sizeof *r->mean);
    r->hidden = floats(2 * wide);
    r->latent = floats(4 * (size_t)max->latent);
    r->scores = floats(2 * (size_t)s->max_pages * (size_t)s->page_len); /* with entries */
    r->probs = floats((size_t)max->n_expert);
    if (max->index) {
        size_t groups = tokens * (size_t)max->index_groups;
        r->index_q = floats(tokens * (size_t)max->index);
        r->index_w = floats(tokens * (size_t)max->index_heads);
        r->index_k = floats((size_t)max->index);
        r->chosen = mem_zalloc(groups * (size_t)max->index_chosen, sizeof *r->chosen);
        r->n_chosen = mem_zalloc(groups, sizeof *r->n_chosen);
        r->seen = mem_zalloc((size_t)s->max_pages * (size_t)s->page_len, sizeof *r->seen);
    }
    r->keys = floats((size_t)max->n_expert);
    r->gap = floats(tokens);
    prepare_features(r, net, tokens);
    r->kept = net->mtp.fc ? floats(tokens * embd) : NULL;
    r->joined = net->mtp.fc ? floats((net->mtp.n_taps ? tokens : 1) * 2 * embd) : NULL;
    r->taps = floats(tokens * (size_t)net->mtp.n_taps * embd);
    for (int i = 0; i < 2; i++) {
        r->sampled[i] = mem_zalloc((size_t)s->max_out + 1, sizeof(int32_t));
        r->told[i] = mem_zalloc((size_t)s->max_out + 1, sizeof *r->told[i]);
    }
    r->tokens = mem_zalloc(tokens + 1, sizeof(int32_t));
    return true;
}

static void ref_close(struct backend *be)
{
    clear(ref_self(be));
    mem_free(be);
}

/* The step */

static int logits_width(const struct ref *r)
{
    const struct head *h = &r->net->head;
    return !h->w ? r->net->n_embd : h->partial ? r->net->n_vocab : h->w->n_out;
}

static void ref_begin(struct backend *be, const struct batch *b)
{
    struct ref *r = ref_self(be);
    struct profile *p = be->profile;
    CHECK(r->n_begun - r->n_ended < 2, "two steps are in flight");
    CHECK(b->n_embeds <= r->bounds.max_embeds, "%d embedding rows", b->n_embeds);
    r->now = (int)(r->n_begun++ % 2);
    if (r->n_begun - r->n_ended == 1)
        r->readable = r->now;
    const int32_t *before = r->sampled[!r->now];
    r->batch = *b;
    canary_check(b, r->bounds.page_len);
    for (int i = 0; i < b->n_tokens; i++) {
        r->tokens[i] = b->tokens[i] < 0 ? before[-1 - b->tokens[i]] : b->tokens[i];
        r->gap[i] = INFINITY;
    }
    r->batch.tokens = r->tokens;
    r->n_out[r->now] = b->n_out;
    for (int i = 0; i < b->n_out; i++)
        r->sampled[r->now][i] = -1;
    if (!p)
        return;
    p->phase = b->n_decode == b->n_seqs;
    p->steps[p->phase]++;
    p->tokens[p->phase] += b->n_tokens;
}

static bool ref_replay(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
    return false;
}

static void ref_launch(struct backend *be)
{
    (void)be; /* ops run as they are issued */
}

static bool ref_end(struct backend *be, int32_t *tokens, struct error *err)
{
    (void)err;
    struct ref *r = ref_self(be);
    int at = r->readable = (int)(r->n_ended++ % 2);
    if (tokens)
        memcpy(tokens, r->sampled[at], (size_t)r->n_out[at] * sizeof *tokens);
    return true;
}

/* Compute */

/* Eight partial sums, so that additions do not wait for each other: tests spend their time here. */
float ref_dot(const float *a, const float *b, int n)
{
    double sum[8] = {0}, all = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] += (double)a[i + j] * b[i + j];
    for (; i < n; i++)
        all += (double)a[i] * b[i];
    for (int j = 0; j < 8; j++)
        all += sum[j];
    return (float)all;
}

/* y (n_out) += the changes of the product by the adapters of row r->at */
static void adapt_row(struct ref *r, const struct weight *w, int e, const float *x, float *y)
{
    for (int i = 0; w->lora && i < r->batch.n_loras; i++) {
        const struct lora_use *u = &r->batch.loras[i];
        if (r->at >= u->first && r->at < u->first + u->n && w->lora[u->adapter])
            lora_add(w->lora[u->adapter], e, u->scale, x, y);
    }
}

void ref_matvec(struct ref *r, const struct weight *weight, int e, const float *x, float *y)
{
    const struct raw_weight *w = ref_raw(weight);
    const float *bias = w->bias ? w->bias + (size_t)e * (size_t)w->n_out : NULL;
    for (int o = 0; o < w->n_out; o++) {
        raw_weight_row(w, e, o, r->row);
        y[o] = ref_dot(r->row, x, w->n_in) + (bias ? bias[o] : 0.0f);
    }
    adapt_row(r, weight, e, x, y);
}

static float clamp(float x, float min, float max)
{
    return x < min ? min : x > max ? max : x;
}

void ref_matvec_rows(struct ref *r, const struct weight *weight, int first, int n,
                     const struct clip *clip, const float *x, float *y)
{
    const struct raw_weight *w = ref_raw(weight);
    for (int i = 0; clip && i < w->n_in; i++)
        r->clipped[i] = clamp(x[i], clip->in_min, clip->in_max);
    for (int o = 0; o < n; o++) {
        raw_weight_row(w, 0, first + o, r->row);
        y[o] = ref_dot(r->row, clip ? r->clipped : x, w->n_in) + (w->bias ? w->bias[first + o] : 0);
        if (clip)
            y[o] = clamp(y[o], clip->out_min, clip->out_max);
    }
}

void ref_norm_row(const struct norm *norm, const float *x, float *out, int n)
{
    double mean = 0, sum = 0;
    for (int i = 0; norm->kind == NORM_LAYER && i < n; i++)
        mean += (double)x[i] / n;
    for (int i = 0; i < n; i++)
        sum += ((double)x[i] - mean) * ((double)x[i] - mean);
    float scale = (float)(1.0 / sqrt(sum / n + (double)norm->eps));
    if (norm->kind == NORM_NONE)
        memmove(out, x, (size_t)n * sizeof(float));
    for (int i = 0; norm->kind == NORM_AFFINE && i < n; i++)
        out[i] = (x[i] + (norm->bias ? norm->bias[i] : 0.0f)) * (norm->gain ? norm->gain[i] : 1.0f);
    if (norm->kind == NORM_NONE || norm->kind == NORM_AFFINE)
        return;
    for (int i = 0; i < n; i++) {
        float v = norm->kind == NORM_LAYER ? (float)((double)x[i] - mean) : x[i];
        v = v * scale * (norm->gain ? norm->gain[i] : 1.0f);
        out[i] = v + (norm->bias ? norm->bias[i] : 0.0f);
    }
}

void ref_block_add(struct ref *r, const struct block *b, float *y, float *x)
{
    int E = r->net->n_embd;
    ref_norm_row(&b->out, y, y, E);
    if (r->net->streams.head.w) {
        for (int i = 0; i < E; i++)
            y[i] *= ref_or_one(b->scale);
        ref_hyper_write(r, y, (int)((x - r->x) / E));
        return;
    }
    if (b->keep != 0)
        ref_norm_row(&b->in, x, x, E);
    for (int i = 0; i < E; i++)
        x[i] = ref_or_one(b->keep) * x[i] + ref_or_one(b->scale) * y[i];
    ref_norm_row(&b->sum, x, x, E);
}

/* The stream becomes the output rows. They ascend, so none is overwritten before it is moved. */
void ref_narrow(struct ref *r)
{
    if (r->narrow)
        return;
    for (int i = 0; i < r->batch.n_out; i++) {
        r->row_of[i] = r->batch.out_rows[i];
        memmove(ref_stream_row(r, i), ref_stream_row(r, r->row_of[i]),
                (size_t)r->net->n_embd * sizeof(float));
    }
    r->rows = r->batch.n_out;
    r->narrow = true;
}

static void add_row(struct ref *r, const struct weight *table, int row, float scale, float *x)
{
    raw_weight_row(ref_raw(table), 0, row, r->row);
    for (int i = 0; i < table->n_in; i++)
        x[i] += scale * r->row[i];
}

/* out (n_layers, P) = the per-layer embeddings of one row. */
static void embed_layers(struct ref *r, const struct embed_layers *e, int token, const float *x,
                         float *out)
{
    int n = r->net->n_layers * e->width;
    if (!e->width)
        return;
    ref_matvec(r, e->project, 0, x, out);
    for (int i = 0; i < n; i++)
        out[i] *= e->project_scale;
    for (int i = 0; i < r->net->n_layers; i++)
        ref_norm_row(&e->norm, out + i * e->width, out + i * e->width, e->width);
    add_row(r, e->table, token < e->table->n_out ? token : e->pad, e->table_scale, out);
    for (int i = 0; i < n; i++)
        out[i] *= e->scale;
}

/* x = patch_norm(p W^T + bias) + q, where the row is p, then q */
static void patch_row(struct ref *r, const struct embed *e, const float *row, float *x)
{
    const struct weight *w = e->patches;
    ref_matvec(r, w, 0, row, x);
    ref_norm_row(&e->patch_norm, x, x, w->n_out);
    for (int i = 0; i < w->n_out; i++)
        x[i] += row[w->n_in + i];
}

static void ref_embed(struct backend *be, const struct embed *e)
{
    struct ref *r = ref_self(be);
    const struct batch *b = &r->batch;
    int E = r->net->n_embd, P = e->layers.width * r->net->n_layers;
    ref_stage_begin(r);
    r->rows = b->n_tokens;
    r->narrow = false;
    for (int t = 0; t < b->n_tokens; t++) {
        float *x = ref_stream_row(r, t);
        r->row_of[t] = r->at = t;
        memset(x, 0, (size_t)E * sizeof(float));
        int row = b->tokens[t] - e->first, given = b->tokens[t] - r->net->n_vocab;
        if (e->patches)
            patch_row(r, e, b->embeds[given], x);
        else if (given >= 0)
            memcpy(x, b->embeds[given], (size_t)E * sizeof(float));
        else if (!e->partial || (row >= 0 && row < e->tokens->n_out))
            add_row(r, e->tokens, row, ref_or_one(e->scale), x);
        if (e->partial)
            be->comm->sum(be->comm, x, (size_t)E);
        if (e->positions)
            add_row(r, e->positions, b->pos[t] + e->pos_offset, 1, x);
        if (e->types)
            add_row(r, e->types, b->types ? b->types[t] : 0, 1, x);
        ref_norm_row(&e->norm, x, x, E);
        embed_layers(r, &e->layers, given >= 0 ? e->layers.pad : b->tokens[t], x,
                     r->layer_embeds + (size_t)t * (size_t)P);
        if (r->net->streams.head.w)
            ref_hyper_begin(r, t);
        else if (r->streams)
            ref_streams_begin(r, t);
    }
    ref_stage_end(r, STAGE_EMBED);
}

static void ref_keep(struct backend *be, const struct norm *norm)
{
    struct ref *r = ref_self(be);
    size_t E = (size_t)r->net->n_embd;
    ref_stage_begin(r);
    for (int i = 0; i < r->rows; i++)
        ref_norm_row(norm, ref_stream_row(r, i), r->kept + (size_t)i * E, r->net->n_embd);
    ref_stage_end(r, STAGE_NORM);
}

static void ref_tap(struct backend *be, int k)
{
    struct ref *r = ref_self(be);
    size_t E = (size_t)r->net->n_embd, n = (size_t)r->net->mtp.n_taps;
    ref_stage_begin(r);
    for (int i = 0; i < r->rows; i++)
        memcpy(r->taps + ((size_t)i * n + (size_t)k) * E, ref_stream_row(r, i), E * sizeof(float));
    ref_stage_end(r, STAGE_NORM);
}

/* The stream and what the mixer reads, of row t of an EAGLE-3 block. */
static void join_taps(struct ref *r, const struct mtp *m, int t)
{
    const struct batch *b = &r->batch;
    int E = r->net->n_embd, wide = m->n_taps * E, from = b->from[t];
    float *x = ref_stream_row(r, t), *e = r->joined + 2 * (size_t)t * (size_t)E, *h = e + E;
    memset(e, 0, (size_t)E * sizeof *e);
    add_row(r, m->tokens ? m->tokens : r->net->embed.tokens, b->tokens[t], 1, e);
    ref_norm_row(&m->embed_norm, e, e, E);
    if (b->continues) {
        memcpy(x, r->kept + (size_t)from * (size_t)E, (size_t)E * sizeof *x);
    } else {
        ref_norm_row(&m->taps_norm, r->taps + (size_t)from * (size_t)wide, r->part, wide);
        ref_matvec(r, m->fc, 0, r->part, x);
    }
    ref_norm_row(&m->hidden_norm, x, h, E);
    if (m->norm_residual)
        memcpy(x, h, (size_t)E * sizeof *x);
}

static void ref_join(struct backend *be, const struct mtp *m)
{
    struct ref *r = ref_self(be);
    const struct batch *b = &r->batch;
    int E = r->net->n_embd;
    ref_stage_begin(r);
    r->rows = b->n_tokens;
    r->narrow = false;
    for (int t = 0; t < b->n_tokens; t++) {
        float *e = r->joined, *h = r->joined + E;
        r->row_of[t] = r->at = t;
        if (m->n_taps) {
            join_taps(r, m, t);
            continue;
        }
        const struct embed *from = &r->net->embed;
        int row = b->tokens[t] - from->first;
        memset(e, 0, (size_t)E * sizeof(float));
        if (!from->partial || (row >= 0 && row < from->tokens->n_out))
            add_row(r, from->tokens, row, ref_or_one(from->scale), e);
        if (from->partial)
            be->comm->sum(be->comm, e, (size_t)E);
        ref_norm_row(&m->embed_norm, e, e, E);
        ref_norm_row(&m->hidden_norm, r->kept + (size_t)b->from[t] * (size_t)E, h, E);
        ref_matvec(r, m->fc, 0, r->joined, ref_stream_row(r, t));
    }
    ref_stage_end(r, STAGE_EMBED);
}

static void ref_head(struct backend *be, const struct head *h)
{
    struct ref *r = ref_self(be);
    int n = logits_width(r), own = !h->w || h->partial ? n : h->w->n_out;
    ref_stage_begin(r);
    ref_narrow(r);
    for (int t = 0; t < r->rows; t++) {
        float *l = r->logits[r->now] + (size_t)t * (size_t)n;
        r->at = r->row_of[t];
        if (r->net->streams.head.w)
            ref_hyper_read(r, &r->net->streams.head, t);
        else if (r->streams)
            ref_streams_end(r, t);
        ref_norm_row(&h->norm, ref_stream_row(r, t), h->w ? r->n : l, r->net->n_embd);
        if (h->w)
            ref_matvec(r, h->w, 0, r->n, l);
        if (h->partial)
            be->comm->gather(be->comm, l, 1, n);
        for (int i = own; i < n; i++)
            l[i] = -INFINITY;
        for (int i = 0; i < own; i++) {
            l[i] *= ref_or_one(h->scale);
            if (h->softcap != 0)
                l[i] = h->softcap * tanhf(l[i] / h->softcap);
        }
    }
    ref_stage_end(r, STAGE_HEAD);
}

static void ref_sample(struct backend *be, struct sampler *const *samplers)
{
    struct ref *r = ref_self(be);
    ref_stage_begin(r);
    for (int i = 0; i < r->batch.n_out; i++)
        if (samplers[i])
            r->sampled[r->now][i] =
                sampler_pick(samplers[i], r->logits[r->now] + (size_t)i * (size_t)r->net->n_vocab,
                             &r->told[r->now][i]);
    ref_stage_end(r, STAGE_SAMPLING);
}

static void ref_probs(struct backend *be, int row, struct sample_probs *out)
{
    const struct ref *r = ref_self(be);
    *out = r->told[(r->n_ended + 1) % 2][row];
}

static void ref_logits(struct backend *be, int row, float *host)
{
    struct ref *r = ref_self(be);
    size_t n = (size_t)logits_width(r);
    memcpy(host, r->logits[r->readable] + (size_t)row * n, n * sizeof(float));
}

static void ref_features(struct backend *be, int rows, float *host)
{
    const struct ref *r = ref_self(be);
    size_t width = (size_t)network_feature_width(r->net);
    for (int i = 0; i < r->net->n_mergers; i++) {
        const struct merger *m = &r->net->mergers[i];
        size_t n = (size_t)merger_width(m, r->net->n_embd);
        for (size_t row = 0; row < (size_t)rows; row++)
            memcpy(host + row * width + (size_t)m->at, r->features[i] + row * n, n * sizeof *host);
    }
}

static void ref_stream_put(struct backend *be, const float *host, int rows)
{
    struct ref *r = ref_self(be);
    CHECK(rows <= r->bounds.max_tokens, "%d rows", rows);
    memcpy(r->x, host, (size_t)rows * (size_t)r->net->n_embd * sizeof(float));
    r->rows = rows;
    r->narrow = false;
    for (int i = 0; i < rows; i++)
        r->row_of[i] = i;
}

static void ref_stream_get(struct backend *be, float *host, int rows)
{
    struct ref *r = ref_self(be);
    memcpy(host, r->x, (size_t)rows * (size_t)r->net->n_embd * sizeof(float));
}

static void ref_logits_put(struct backend *be, const float *host, int rows)
{
    struct ref *r = ref_self(be);
    memcpy(r->logits[r->now], host, (size_t)rows * (size_t)logits_width(r) * sizeof(float));
}

static const struct adapter_ops ref_adapters = {.adapt = ref_adapt, .unadapt = ref_unadapt};
static const struct draft_ops ref_draft = {.keep = ref_keep, .tap = ref_tap, .join = ref_join};
static const struct tower_ops ref_tower = {.merge = ref_merge, .features = ref_features};
static const struct stream_ops ref_stream = {
    .put = ref_stream_put, .get = ref_stream_get, .put_logits = ref_logits_put};

static const struct expert_ops ref_expert_ops = {.run = ref_experts};

static const struct backend_ops ref_ops = {
    .name = "ref",
    .close = ref_close,
    .alloc = ref_alloc,
    .free = ref_free,
    .forget = ref_forget,
    .copy_in = ref_copy,
    .copy_out = ref_copy,
    .supports = ref_supports,
    .upload = ref_upload,
    .release = ref_release,
    .prepare = ref_prepare,
    .begin = ref_begin,
    .replay = ref_replay,
    .launch = ref_launch,
    .end = ref_end,
    .embed = ref_embed,
    .mixer = ref_mixer,
    .mlp = ref_mlp,
    .head = ref_head,
    .sample = ref_sample,
    .probs = ref_probs,
    .logits = ref_logits,
    .adapters = &ref_adapters,
    .draft = &ref_draft,
    .tower = &ref_tower,
    .stream = &ref_stream,
    .experts = &ref_expert_ops,
};

struct backend *backend_open_ref(void)
{
    struct ref *r = mem_zalloc(1, sizeof *r);
    r->be.ops = &ref_ops;
    r->be.invariance = INVARIANCE_ALWAYS;
    /* Nothing runs beside the host and nothing is recorded, but the engine may overlap and pad steps as for a GPU:
     * tests of it need no GPU. */
    r->be.async = r->be.records = true;
    return &r->be;
}

float backend_ref_gap(struct backend *be, int row)
{
    return ref_self(be)->gap[row];
}
