/*
 * The specification: every part of a network in plain scalar C, float storage, double accumulation,
 * no tricks, a row at a time. Backends are tested against this file. It is also a backend of its own
 * (STEEL_ISA=ref). layer.h has the equations.
 */
#include "backend/backend.h"
#include "backend/profile.h"
#include "base/ranks.h"
#include "base/clock.h"
#include "base/mem.h"
#include "quant/kvblock.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_USED = 256 }; /* experts of a row */

struct ref {
    struct backend be;
    const struct network *net;
    struct network_max max;
    struct bounds bounds;
    struct batch batch;  /* views into the caller's arrays, valid from begin to end */
    float *x;            /* (max_tokens, E) the residual stream */
    int rows;            /* rows of it */
    int32_t *row_of;     /* (max_tokens) which row of the batch each of them is */
    bool narrow;         /* it has the out rows only */
    float *layer_embeds; /* (max_tokens, n_layers, P) or NULL */
    float *logits;       /* (max_out, n_vocab or E) */
    float *q, *gate, *a; /* (max_tokens, widest H*D) queries, gates, outputs of attention */
    float *qkv;          /* one row of the projection */
    float *n, *y;        /* (E) one row: normed, what a block adds */
    float *part, *sum;   /* (E) one expert of that, and the sum of all */
    float *row;          /* one row of floats, of a weight or of the cache */
    double *mean;        /* as wide: what attention gathers */
    float *hidden;       /* one row of gate and up */
    float *latent;       /* (4, widest latent) */
    float *kept;         /* (max_tokens, E) for guesses; NULL = there is no MTP block */
    float *joined;       /* (2, E) one row of it beside an embedding */
    float *scores;       /* (longest context) */
    float *probs, *keys; /* (n_expert) */
    float *gap;          /* (max_tokens) of the batch's rows: backend_ref_gap */
    int32_t *sampled[2]; /* (max_out) each, of the steps under way */
    struct sample_probs *told[2];
    int32_t *tokens; /* (max_tokens) of the step, all known */
    int n_out[2], now;
    unsigned n_begun, n_ended;
    int64_t stage_start; /* profile clock */
    int at;              /* the batch's row in work: it says which adapters are used */
    /* A step in halves: pointers above are those of the one in work, -1 = the step is whole. */
    struct {
        struct batch batch;
        int rows, first, first_out;
        bool narrow;
    } halves[2];
    int half;
};

static struct ref *self(struct backend *be)
{
    return (struct ref *)be;
}

static const struct raw_weight *raw(const struct weight *w)
{
    return w->impl;
}

static void stage_begin(struct ref *r)
{
    if (r->be.profile)
        r->stage_start = clock_ns();
}

static void stage_end(struct ref *r, enum stage stage)
{
    struct profile *p = r->be.profile;
    if (p)
        p->ns[p->phase][stage] += (double)(clock_ns() - r->stage_start);
}

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

/* Everything but the mixer that no reference exists of yet. */
static bool ref_supports(struct backend *be, const struct network *net, struct error *err)
{
    (void)be;
    for (int i = 0; i < net->n_layers; i++) {
        const struct router *t = &net->layers[i].mlp.router;
        if (t->n_used > MAX_USED || t->n_groups > MAX_USED)
            return network_refuse(err, i, "more than 256 experts of a token, or groups, are",
                                  "ref");
    }
    return network_check(net, ~(unsigned)PART_SHORT_CONV, "ref", err);
}

static float *floats(size_t n)
{
    return mem_zalloc(n + 1, sizeof(float));
}

static void clear(struct ref *r)
{
    void *owned[] = {r->x,      r->row_of,     r->layer_embeds, r->logits,  r->q,
                     r->gate,   r->a,          r->qkv,          r->n,       r->y,
                     r->part,   r->row,        r->keys,         r->hidden,  r->scores,
                     r->probs,  r->sampled[0], r->sampled[1],   r->tokens,  r->sum,
                     r->gap,    r->latent,     r->told[0],      r->told[1], r->kept,
                     r->joined, r->mean};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static bool ref_prepare(struct backend *be, const struct network *net, const struct bounds *s,
                        struct error *err)
{
    (void)err;
    struct ref *r = self(be);
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
    wide = (size_t)max->state_heads > wide ? (size_t)max->state_heads : wide;
    wide = ff > wide ? ff : wide;
    wide = net->mtp.fc && 2 * embd > wide ? 2 * embd : wide;
    wide = per_layer * (size_t)net->n_layers > wide ? per_layer * (size_t)net->n_layers : wide;
    r->x = floats(tokens * embd);
    r->row_of = mem_zalloc(tokens + 1, sizeof(int32_t));
    r->layer_embeds = floats(tokens * per_layer * (size_t)net->n_layers);
    r->logits = floats((size_t)s->max_out * (net->head.w ? (size_t)net->n_vocab : embd));
    r->q = floats(tokens * heads);
    r->gate = floats(tokens * heads);
    r->a = floats(tokens * heads);
    r->qkv = floats((size_t)max->qkv);
    r->n = floats(embd);
    r->y = floats(embd);
    r->part = floats(embd);
    r->sum = floats(embd);
    r->row = floats(wide);
    r->mean = mem_zalloc(wide + 1, sizeof *r->mean);
    r->hidden = floats(2 * wide);
    r->latent = floats(4 * (size_t)max->latent);
    r->scores = floats((size_t)s->max_pages * (size_t)s->page_len);
    r->probs = floats((size_t)max->n_expert);
    r->keys = floats((size_t)max->n_expert);
    r->gap = floats(tokens);
    r->kept = net->mtp.fc ? floats(tokens * embd) : NULL;
    r->joined = net->mtp.fc ? floats(2 * embd) : NULL;
    for (int i = 0; i < 2; i++) {
        r->sampled[i] = mem_zalloc((size_t)s->max_out + 1, sizeof(int32_t));
        r->told[i] = mem_zalloc((size_t)s->max_out + 1, sizeof *r->told[i]);
    }
    r->tokens = mem_zalloc(tokens + 1, sizeof(int32_t));
    r->half = -1;
    be->halves = ranks_halve(be->ranks);
    return true;
}

static void ref_close(struct backend *be)
{
    clear(self(be));
    mem_free(be);
}

/* The step */

/* Stages of one rank may share the head: then these are the logits of its own rows (model/stages.h). */
static int logits_width(const struct ref *r)
{
    const struct weight *w = r->net->head.w;
    bool alone = r->be.ranks && r->be.ranks->tp == 1;
    return w ? (alone ? w->n_out : r->net->n_vocab) : r->net->n_embd;
}

/* Ops are those of b from here on, whose rows and out rows of the step begin at row and out. */
static void take_batch(struct ref *r, const struct batch *b, int row, int out)
{
    const int32_t *before = r->sampled[r->n_begun % 2];
    r->batch = *b;
    for (int i = 0; i < b->n_tokens; i++) {
        r->tokens[row + i] = b->tokens[i] < 0 ? before[-1 - b->tokens[i]] : b->tokens[i];
        r->gap[row + i] = INFINITY;
    }
    r->batch.tokens = r->tokens + row;
    r->n_out[r->now] = out + b->n_out;
    for (int i = 0; i < b->n_out; i++)
        r->sampled[r->now][out + i] = -1;
}

static void begin_step(struct ref *r, int rows, bool decodes)
{
    struct profile *p = r->be.profile;
    CHECK(r->n_begun - r->n_ended < 2, "two steps are under way");
    r->now = (int)(r->n_begun++ % 2);
    if (!p)
        return;
    p->phase = decodes;
    p->steps[p->phase]++;
    p->tokens[p->phase] += rows;
}

static void ref_begin(struct backend *be, const struct batch *b)
{
    struct ref *r = self(be);
    begin_step(r, b->n_tokens, b->n_decode == b->n_seqs);
    take_batch(r, b, 0, 0);
}

static void ref_begin_halves(struct backend *be, const struct batch halves[2])
{
    struct ref *r = self(be);
    begin_step(r, halves[0].n_tokens + halves[1].n_tokens, false);
    if (be->profile)
        be->profile->halved++;
    for (int i = 0; i < 2; i++) {
        r->halves[i].first = i ? halves[0].n_tokens : 0;
        r->halves[i].first_out = i ? halves[0].n_out : 0;
        take_batch(r, &halves[i], r->halves[i].first, r->halves[i].first_out);
        r->halves[i].batch = r->batch;
    }
}

/* What belongs to rows and to out rows, so many further on. */
static void shift(struct ref *r, int rows, int outs)
{
    int per_layer = r->net->embed.layers.width * r->net->n_layers;
    r->x += (ptrdiff_t)rows * r->net->n_embd;
    r->row_of += rows;
    r->gap += rows;
    r->layer_embeds += (ptrdiff_t)rows * per_layer;
    r->logits += (ptrdiff_t)outs * logits_width(r);
}

/* Leaves the half in work; its rows stay. */
static void leave_half(struct ref *r)
{
    if (r->half < 0)
        return;
    r->halves[r->half].rows = r->rows;
    r->halves[r->half].narrow = r->narrow;
    shift(r, -r->halves[r->half].first, -r->halves[r->half].first_out);
    r->half = -1;
}

static void ref_half(struct backend *be, int i)
{
    struct ref *r = self(be);
    leave_half(r);
    r->half = i;
    r->batch = r->halves[i].batch;
    r->rows = r->halves[i].rows;
    r->narrow = r->halves[i].narrow;
    shift(r, r->halves[i].first, r->halves[i].first_out);
}

static bool ref_replay(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
    return false;
}

static void ref_record(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
}

static void ref_launch(struct backend *be)
{
    struct ref *r = self(be); /* ops run as they are issued */
    leave_half(r);
    r->batch.n_out = r->n_out[r->now]; /* samplers are of both halves */
}

static bool ref_end(struct backend *be, int32_t *tokens, struct error *err)
{
    (void)err;
    struct ref *r = self(be);
    int at = (int)(r->n_ended++ % 2);
    if (tokens)
        memcpy(tokens, r->sampled[at], (size_t)r->n_out[at] * sizeof *tokens);
    return true;
}

/* Compute */

/* Eight sums, because one alone would wait for itself at every step: tests spend their time here. */
static float dot(const float *a, const float *b, int n)
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

/* y (n_out) += what the adapters of row r->at change of the product */
static void adapt_row(struct ref *r, const struct weight *w, int e, const float *x, float *y)
{
    for (int i = 0; w->lora && i < r->batch.n_loras; i++) {
        const struct lora_use *u = &r->batch.loras[i];
        if (r->at >= u->first && r->at < u->first + u->n && w->lora[u->adapter])
            lora_add(w->lora[u->adapter], e, u->scale, x, y);
    }
}

/* y (n_out) = x W^T + bias, of expert e */
static void matvec(struct ref *r, const struct weight *weight, int e, const float *x, float *y)
{
    const struct raw_weight *w = raw(weight);
    const float *bias = w->bias ? w->bias + (size_t)e * (size_t)w->n_out : NULL;
    for (int o = 0; o < w->n_out; o++) {
        raw_weight_row(w, e, o, r->row);
        y[o] = dot(r->row, x, w->n_in) + (bias ? bias[o] : 0.0f);
    }
    adapt_row(r, weight, e, x, y);
}

/* out may be x */
static void norm_row(const struct norm *norm, const float *x, float *out, int n)
{
    double mean = 0, sum = 0;
    for (int i = 0; norm->kind == NORM_LAYER && i < n; i++)
        mean += (double)x[i] / n;
    for (int i = 0; i < n; i++)
        sum += ((double)x[i] - mean) * ((double)x[i] - mean);
    float scale = (float)(1.0 / sqrt(sum / n + (double)norm->eps));
    if (norm->kind == NORM_NONE)
        memmove(out, x, (size_t)n * sizeof(float));
    for (int i = 0; norm->kind != NORM_NONE && i < n; i++) {
        float v = norm->kind == NORM_LAYER ? (float)((double)x[i] - mean) : x[i];
        v = v * scale * (norm->gain ? norm->gain[i] : 1.0f);
        out[i] = v + (norm->bias ? norm->bias[i] : 0.0f);
    }
}

static float or_one(float scale)
{
    return scale == 0 ? 1.0f : scale;
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float gelu_tanh(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static float gelu(float x)
{
    return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
}

static float *stream_row(struct ref *r, int i)
{
    return r->x + (size_t)i * (size_t)r->net->n_embd;
}

/* x = sum(x + scale * out(y)); y is changed */
static void block_add(struct ref *r, const struct block *b, float *y, float *x)
{
    int E = r->net->n_embd;
    norm_row(&b->out, y, y, E);
    for (int i = 0; i < E; i++)
        x[i] += or_one(b->scale) * y[i];
    norm_row(&b->sum, x, x, E);
}

/* The stream becomes the out rows. They ascend, so that none is overwritten before it is moved. */
static void narrow(struct ref *r)
{
    if (r->narrow)
        return;
    for (int i = 0; i < r->batch.n_out; i++) {
        r->row_of[i] = r->batch.out_rows[i];
        memmove(stream_row(r, i), stream_row(r, r->row_of[i]),
                (size_t)r->net->n_embd * sizeof(float));
    }
    r->rows = r->batch.n_out;
    r->narrow = true;
}

static void add_row(struct ref *r, const struct weight *table, int row, float scale, float *x)
{
    raw_weight_row(raw(table), 0, row, r->row);
    for (int i = 0; i < table->n_in; i++)
        x[i] += scale * r->row[i];
}

/* The values that layers add later: (n_layers, P) of one row. */
static void embed_layers(struct ref *r, const struct embed_layers *e, int token, const float *x,
                         float *out)
{
    int n = r->net->n_layers * e->width;
    if (!e->width)
        return;
    matvec(r, e->project, 0, x, out);
    for (int i = 0; i < n; i++)
        out[i] *= e->project_scale;
    for (int i = 0; i < r->net->n_layers; i++)
        norm_row(&e->norm, out + i * e->width, out + i * e->width, e->width);
    add_row(r, e->table, token, e->table_scale, out);
    for (int i = 0; i < n; i++)
        out[i] *= e->scale;
}

static void ref_embed(struct backend *be, const struct embed *e)
{
    struct ref *r = self(be);
    const struct batch *b = &r->batch;
    int E = r->net->n_embd, P = e->layers.width * r->net->n_layers;
    stage_begin(r);
    r->rows = b->n_tokens;
    r->narrow = false;
    for (int t = 0; t < b->n_tokens; t++) {
        float *x = stream_row(r, t);
        r->row_of[t] = r->at = t;
        memset(x, 0, (size_t)E * sizeof(float));
        int row = b->tokens[t] - e->first;
        if (!e->partial || (row >= 0 && row < e->tokens->n_out))
            add_row(r, e->tokens, row, or_one(e->scale), x);
        if (e->partial)
            ranks_sum(be->ranks, x, (size_t)E);
        if (e->positions)
            add_row(r, e->positions, b->pos[t] + e->pos_offset, 1, x);
        if (e->types)
            add_row(r, e->types, b->types ? b->types[t] : 0, 1, x);
        norm_row(&e->norm, x, x, E);
        embed_layers(r, &e->layers, b->tokens[t], x, r->layer_embeds + (size_t)t * (size_t)P);
    }
    stage_end(r, STAGE_EMBED);
}

/* n values of a head, from element `at` on */
static void kv_store(void *base, enum dtype type, size_t at, const float *from, int n)
{
    kv_row_put(type, from, n, (char *)base + dtype_bytes(type, at));
}

/* The same back, into r->row */
static const float *kv_load(struct ref *r, const void *base, enum dtype type, size_t at, int n)
{
    kv_row_get(type, (const char *)base + dtype_bytes(type, at), n, r->row);
    return r->row;
}

/* Index of element 0 of (slot, kv head) in a pool of (n_pages, K, page_len, dim). */
static size_t kv_at(const struct bounds *s, int slot, int n_heads, int head, int dim)
{
    size_t page = (size_t)(slot / s->page_len), off = (size_t)(slot % s->page_len);
    return ((page * (size_t)n_heads + (size_t)head) * (size_t)s->page_len + off) * (size_t)dim;
}

static void rotate(const struct rope *rope, float *head, int pos)
{
    int half = rope->n_rot / 2;
    for (int i = 0; i < half; i++) {
        /* The angle is a float product, as in the models' own code; then exact trigonometry. */
        float angle = (float)pos * rope->freq[i];
        float c = (float)cos(angle) * rope->mscale;
        float s = (float)sin(angle) * rope->mscale;
        float a = head[i], b = head[i + half];
        head[i] = a * c - b * s;
        head[i + half] = b * c + a * s;
    }
}

/* Norm and rotation of n heads that lie side by side. */
static void finish_heads(const struct norm *norm, bool whole, const struct rope *rope, int pos,
                         float *heads, int n, int dim)
{
    if (whole)
        norm_row(norm, heads, heads, n * dim);
    for (int h = 0; h < n; h++) {
        if (!whole)
            norm_row(norm, heads + h * dim, heads + h * dim, dim);
        if (rope)
            rotate(rope, heads + h * dim, pos);
    }
}

static void turn_heads(enum dtype type, float *heads, int n, int dim)
{
    for (int h = 0; h < n && kv_turned(type); h++)
        kv_turn(heads + h * dim, dim);
}

static void store_heads(struct ref *r, void *pool, enum dtype type, int slot, const float *heads,
                        int n, int dim)
{
    for (int h = 0; h < n; h++)
        kv_store(pool, type, kv_at(&r->bounds, slot, n, h, dim), heads + h * dim, dim);
}

/* q of row t, and its gate; its k and v go to the cache. */
static void project_row(struct ref *r, const struct attention *a, const struct kv_layer *kv, int t)
{
    int H = a->n_heads, K = a->n_kv_heads, Dk = a->k_dim, Dv = a->v_dim;
    int pos = r->batch.pos[t], each = Dk + (a->gated ? Dv : 0);
    float *q = r->q + (size_t)t * (size_t)(H * Dk), *gate = r->gate + (size_t)t * (size_t)(H * Dv);
    float *k = r->qkv + H * each, *v = k + K * Dk;
    matvec(r, a->wqkv, 0, r->n, r->qkv);
    for (int h = 0; h < H; h++) {
        memcpy(q + h * Dk, r->qkv + h * each, (size_t)Dk * sizeof(float));
        if (a->gated)
            memcpy(gate + h * Dv, r->qkv + h * each + Dk, (size_t)Dv * sizeof(float));
    }
    finish_heads(&a->q_norm, a->norm_whole, a->rope, pos, q, H, Dk);
    float warm = 1;
    if (a->temp_beta != 0)
        warm += a->temp_beta * (float)log(1.0 + floor((double)pos / a->temp_len));
    for (int i = 0; i < H * Dk; i++)
        q[i] *= warm;
    turn_heads(r->bounds.k_type, q, H, Dk);
    if (a->shares_kv || r->batch.slot[t] < 0)
        return;
    if (a->k_is_v)
        memcpy(v, k, (size_t)(K * Dv) * sizeof(float));
    finish_heads(&a->k_norm, a->norm_whole, a->rope, pos, k, K, Dk);
    finish_heads(&a->v_norm, a->norm_whole, NULL, pos, v, K, Dv);
    turn_heads(r->bounds.k_type, k, K, Dk);
    turn_heads(r->bounds.v_type, v, K, Dv);
    store_heads(r, kv->k, r->bounds.k_type, r->batch.slot[t], k, K, Dk);
    store_heads(r, kv->v, r->bounds.v_type, r->batch.slot[t], v, K, Dv);
}

/* out (Dv) = the values head h of row t sees, weighted */
static void attend(struct ref *r, const struct attention *a, const struct kv_layer *kv, int seq,
                   int t, int h, const float *q, float *out)
{
    const struct bounds *s = &r->bounds;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    int K = a->n_kv_heads, kv_head = h * K / a->n_heads, pos = r->batch.pos[t];
    int first = a->window && pos - a->window + 1 > 0 ? pos - a->window + 1 : 0, last = pos;
    if (a->bidirectional) {
        last = r->batch.kv_len[seq] - 1;
        last = a->window && pos + a->window - 1 < last ? pos + a->window - 1 : last;
    }
    float max = a->sinks ? a->sinks[h] : -INFINITY;
    for (int p = first; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        size_t at = kv_at(s, slot, K, kv_head, a->k_dim);
        float score = dot(q, kv_load(r, kv->k, s->k_type, at, a->k_dim), a->k_dim) * a->scale;
        if (a->softcap != 0)
            score = a->softcap * tanhf(score / a->softcap);
        r->scores[p] = score;
        max = score > max ? score : max;
    }
    double total = a->sinks ? (double)expf(a->sinks[h] - max) : 0;
    for (int p = first; p <= last; p++) {
        r->scores[p] = expf(r->scores[p] - max);
        total += r->scores[p];
    }
    memset(r->mean, 0, (size_t)a->v_dim * sizeof *r->mean);
    for (int p = first; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        size_t at = kv_at(s, slot, K, kv_head, a->v_dim);
        const float *v = kv_load(r, kv->v, s->v_type, at, a->v_dim);
        for (int i = 0; i < a->v_dim; i++)
            r->mean[i] += (double)r->scores[p] * v[i];
    }
    for (int i = 0; i < a->v_dim; i++)
        out[i] = (float)(r->mean[i] / total);
    turn_heads(s->v_type, out, 1, a->v_dim);
}

static void attend_rows(struct ref *r, const struct attention *a, const struct kv_layer *kv)
{
    int H = a->n_heads;
    for (int seq = 0; seq < r->batch.n_seqs; seq++)
        for (int t = r->batch.q_start[seq]; t < r->batch.q_start[seq + 1]; t++)
            for (int h = 0; h < H; h++) {
                size_t at = (size_t)(t * H + h) * (size_t)a->v_dim;
                float *out = r->a + at;
                memset(out, 0, (size_t)a->v_dim * sizeof(float));
                if (r->batch.slot[t] >= 0) /* else padding */
                    attend(r, a, kv, seq, t, h, r->q + (size_t)(t * H + h) * (size_t)a->k_dim, out);
                for (int i = 0; a->gated && i < a->v_dim; i++)
                    out[i] *= sigmoid(r->gate[at + (size_t)i]);
            }
}

static void mix_attention(struct ref *r, const struct mixer *m, int layer)
{
    const struct attention *a = &m->attention;
    const struct kv_layer *kv = &r->batch.kv[a->shares_kv ? a->kv_layer : layer];
    stage_begin(r);
    for (int t = 0; t < r->rows; t++) {
        r->at = t;
        norm_row(&m->block.in, stream_row(r, t), r->n, r->net->n_embd);
        project_row(r, a, kv, t);
    }
    stage_end(r, STAGE_QKV);
    stage_begin(r);
    attend_rows(r, a, kv);
    stage_end(r, STAGE_ATTENTION);
}

/* Pairs that lie side by side come apart. */
static void unweave(struct ref *r, float *x, int n)
{
    for (int i = 0; i < n; i++)
        r->hidden[i] = x[i % (n / 2) * 2 + i / (n / 2)];
    memcpy(x, r->hidden, (size_t)n * sizeof(float));
}

/* q of row t; its latent and rotated part go to the cache. */
static void latent_row(struct ref *r, const struct latent *l, const struct kv_layer *kv, int t)
{
    int Dn = l->nope_dim, Dr = l->rope_dim, C = l->kv_rank, pos = r->batch.pos[t];
    float *q = r->q + (size_t)t * (size_t)(l->n_heads * (Dn + Dr)), *low = r->latent;
    if (l->wqa) {
        matvec(r, l->wqa, 0, r->n, low);
        norm_row(&l->q_norm, low, low, l->q_rank);
    }
    matvec(r, l->wqb, 0, l->wqa ? low : r->n, q);
    for (int h = 0; h < l->n_heads; h++) {
        if (l->woven)
            unweave(r, q + h * (Dn + Dr) + Dn, Dr);
        rotate(l->rope, q + h * (Dn + Dr) + Dn, pos);
    }
    if (r->batch.slot[t] < 0)
        return;
    matvec(r, l->wkva, 0, r->n, low);
    norm_row(&l->kv_norm, low, low, C);
    if (l->woven)
        unweave(r, low + C, Dr);
    rotate(l->rope, low + C, pos);
    store_heads(r, kv->k, r->bounds.k_type, r->batch.slot[t], low, 1, C + Dr);
}

/* out (Dv): what head h of row t, with query q, makes of the latents it sees */
static void attend_latent(struct ref *r, const struct latent *l, const struct kv_layer *kv, int seq,
                          int t, int h, const float *q, float *out)
{
    const struct bounds *s = &r->bounds;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    int C = l->kv_rank, Dr = l->rope_dim, width = C + Dr, last = r->batch.pos[t];
    float *query = r->latent, *sum = query + width, max = -INFINITY;
    double total = 0;
    matvec(r, l->wkb, h, q, query);
    memcpy(query + C, q + l->nope_dim, (size_t)Dr * sizeof(float));
    for (int p = 0; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        const float *row = kv_load(r, kv->k, s->k_type, kv_at(s, slot, 1, 0, width), width);
        r->scores[p] = dot(query, row, width) * l->scale;
        max = r->scores[p] > max ? r->scores[p] : max;
    }
    for (int p = 0; p <= last; p++)
        total += r->scores[p] = expf(r->scores[p] - max);
    memset(r->mean, 0, (size_t)C * sizeof *r->mean);
    for (int p = 0; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        const float *row = kv_load(r, kv->k, s->k_type, kv_at(s, slot, 1, 0, width), width);
        for (int i = 0; i < C; i++)
            r->mean[i] += (double)r->scores[p] * row[i];
    }
    for (int i = 0; i < C; i++)
        sum[i] = (float)(r->mean[i] / total);
    matvec(r, l->wvb, h, sum, out);
}

static void mix_latent(struct ref *r, const struct mixer *m, int layer)
{
    const struct latent *l = &m->latent;
    const struct kv_layer *kv = &r->batch.kv[layer];
    int H = l->n_heads, D = l->nope_dim + l->rope_dim;
    stage_begin(r);
    for (int t = 0; t < r->rows; t++) {
        r->at = t;
        norm_row(&m->block.in, stream_row(r, t), r->n, r->net->n_embd);
        latent_row(r, l, kv, t);
    }
    stage_end(r, STAGE_QKV);
    stage_begin(r);
    for (int seq = 0; seq < r->batch.n_seqs; seq++)
        for (int t = r->batch.q_start[seq]; t < r->batch.q_start[seq + 1]; t++)
            for (int h = 0; h < H; h++) {
                float *out = r->a + (size_t)(t * H + h) * (size_t)l->v_dim;
                memset(out, 0, (size_t)l->v_dim * sizeof(float));
                if (r->batch.slot[t] >= 0) /* else padding */
                    attend_latent(r, l, kv, seq, t, h, r->q + (size_t)(t * H + h) * (size_t)D, out);
            }
    stage_end(r, STAGE_ATTENTION);
}

/* One step of a v head: S (Dk, Dv) decays, is corrected by what it gets wrong about k, and read. */
static void delta_head(float *S, const float *q, const float *k, const float *v, float decay,
                       float beta, int Dk, int Dv, float *out)
{
    for (int j = 0; j < Dv; j++) {
        double seen = 0, sum = 0;
        for (int i = 0; i < Dk; i++) {
            S[i * Dv + j] *= decay;
            seen += (double)S[i * Dv + j] * k[i];
        }
        float wrong = beta * (v[j] - (float)seen);
        for (int i = 0; i < Dk; i++) {
            S[i * Dv + j] += k[i] * wrong;
            sum += (double)S[i * Dv + j] * q[i];
        }
        out[j] = (float)sum;
    }
}

/* x = x / |x| * scale */
static void l2_norm(float *x, int n, float scale)
{
    scale /= sqrtf(dot(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

/* Row t, r->n after its norm, through the net: out (Hv*Dv). state: W-1 rows before the convolution,
 * the oldest first, then S of each head. */
static void delta_row(struct ref *r, const struct delta_net *d, float *state, float *out)
{
    int Hk = d->n_k_heads, Hv = d->n_v_heads, Dk = d->k_dim, Dv = d->v_dim, W = d->conv_len;
    int width = 2 * Hk * Dk + Hv * Dv;
    float *u = r->qkv, *ba = r->hidden, *k = u + Hk * Dk, *v = k + Hk * Dk;
    float *S = state + (size_t)(W - 1) * (size_t)width;
    matvec(r, d->wqkv, 0, r->n, u);
    matvec(r, d->wba, 0, r->n, ba);
    for (int c = 0; c < width; c++) {
        float *past = state + c, now = u[c];
        double sum = (double)d->conv[c * W + W - 1] * now;
        for (int i = 0; i < W - 1; i++)
            sum += (double)d->conv[c * W + i] * past[i * width];
        for (int i = 0; i + 1 < W - 1; i++)
            past[i * width] = past[(i + 1) * width];
        if (W > 1)
            past[(W - 2) * width] = now;
        u[c] = (float)sum * sigmoid((float)sum);
    }
    for (int h = 0; h < Hk; h++) {
        l2_norm(u + h * Dk, Dk, 1.0f / sqrtf((float)Dk));
        l2_norm(k + h * Dk, Dk, 1.0f);
    }
    for (int h = 0; h < Hv; h++) {
        float a = ba[Hv + h] + d->dt_bias[h];
        float soft = a > 20.0f ? a : log1pf(expf(a)); /* ln(1 + exp(a)) */
        int of = delta_net_k_head(d, h);
        delta_head(S + (size_t)h * (size_t)(Dk * Dv), u + of * Dk, k + of * Dk, v + h * Dv,
                   expf(-d->decay[h] * soft), sigmoid(ba[h]), Dk, Dv, out + h * Dv);
        norm_row(&d->norm, out + h * Dv, out + h * Dv, Dv);
    }
    matvec(r, d->wz, 0, r->n, r->gate);
    for (int i = 0; i < Hv * Dv; i++)
        out[i] *= r->gate[i] * sigmoid(r->gate[i]);
}

static void mix_delta_net(struct ref *r, const struct mixer *m, int layer)
{
    const struct delta_net *d = &m->delta_net;
    const struct batch *b = &r->batch;
    size_t len = mixer_state_len(m), values = (size_t)d->n_v_heads * (size_t)d->v_dim;
    float *states = b->kv[layer].state;
    stage_begin(r);
    for (int seq = 0; seq < b->n_seqs; seq++) {
        int first = b->q_start[seq];
        float *state = states + (size_t)b->state_out[seq] * len;
        if (b->state_out[seq] < 0) { /* padding */
            memset(r->a + (size_t)first * values, 0,
                   (size_t)(b->q_start[seq + 1] - first) * values * sizeof(float));
            continue;
        }
        if (b->state_in[seq] < 0)
            memset(state, 0, len * sizeof(float));
        else if (b->state_in[seq] != b->state_out[seq])
            memcpy(state, states + (size_t)b->state_in[seq] * len, len * sizeof(float));
        for (int t = first; t < b->q_start[seq + 1]; t++) {
            r->at = t;
            norm_row(&m->block.in, stream_row(r, t), r->n, r->net->n_embd);
            delta_row(r, d, state, r->a + (size_t)t * values);
            if (b->save_rows[seq] == t - first + 1)
                memcpy(states + (size_t)b->save_state[seq] * len, state, len * sizeof(float));
        }
    }
    stage_end(r, STAGE_ATTENTION);
}

static void ref_mixer(struct backend *be, const struct mixer *m, int layer)
{
    struct ref *r = self(be);
    const struct weight *wo = NULL;
    if (m->kind == MIXER_ATTENTION) {
        mix_attention(r, m, layer);
        wo = m->attention.wo;
    } else if (m->kind == MIXER_LATENT) {
        mix_latent(r, m, layer);
        wo = m->latent.wo;
    } else if (m->kind == MIXER_DELTA_NET) {
        mix_delta_net(r, m, layer);
        wo = m->delta_net.wo;
    }
    CHECK(wo, "a mixer of kind %d", (int)m->kind);
    stage_begin(r);
    if (batch_narrows(&r->batch, r->net, layer))
        narrow(r);
    for (int i = 0; i < r->rows; i++) {
        r->at = r->row_of[i];
        matvec(r, wo, 0, r->a + (size_t)r->row_of[i] * (size_t)wo->n_in, r->y);
        if (m->partial)
            ranks_sum(be->ranks, r->y, (size_t)r->net->n_embd);
        block_add(r, &m->block, r->y, stream_row(r, i));
    }
    stage_end(r, STAGE_OUTPUT);
}

/* h[i] = act(h[i], h[width + i]) */
static void activate(const struct ffn *f, float *h, int width)
{
    for (int i = 0; i < width; i++) {
        float g = h[i], u = h[width + i];
        switch (f->act) {
        case ACT_SILU:
            h[i] = g / (1.0f + expf(-g)) * u;
            break;
        case ACT_GELU_TANH:
            h[i] = gelu_tanh(g) * u;
            break;
        case ACT_GELU:
            h[i] = gelu(g) * u;
            break;
        case ACT_SWIGLU_CLAMP:
            g = g < f->limit ? g : f->limit;
            u = u < f->limit ? u : f->limit;
            u = u > -f->limit ? u : -f->limit;
            h[i] = g / (1.0f + expf(-f->alpha * g)) * (u + 1.0f);
            break;
        case ACT_PLAIN_GELU:
            h[i] = gelu(g);
            break;
        }
    }
}

static void ffn_row(struct ref *r, const struct ffn *f, int e, const float *x, float *y)
{
    matvec(r, f->gate_up, e, x, r->hidden);
    activate(f, r->hidden, f->down->n_in);
    matvec(r, f->down, e, r->hidden, y);
}

/* The largest of keys that is not yet chosen; of equal ones the first. */
static int best_key(const float *keys, int n, const int *chosen, int n_chosen)
{
    int best = -1;
    for (int e = 0; e < n; e++) {
        bool taken = false;
        for (int j = 0; j < n_chosen; j++)
            taken |= chosen[j] == e;
        if (!taken && (best < 0 || keys[e] > keys[best]))
            best = e;
    }
    return best;
}

/* Experts outside the best groups get a key that nothing is below. Returns by how much of itself the
 * last of those groups is above the best of the others. */
static float keep_groups(const struct router *t, float *keys, int n)
{
    int each = n / t->n_groups, best[MAX_USED] = {0};
    float score[MAX_USED] = {0};
    CHECK(each > 0, "%d experts in %d groups", n, t->n_groups);
    for (int g = 0; g < t->n_groups; g++) {
        int two[2] = {0};
        two[0] = best_key(keys + g * each, each, two, 0);
        score[g] = keys[g * each + two[0]];
        if (each > 1)
            score[g] += keys[g * each + best_key(keys + g * each, each, two, 1)];
    }
    for (int k = 0; k < t->n_groups_used; k++)
        best[k] = best_key(score, t->n_groups, best, k);
    float last = score[best[t->n_groups_used - 1]], gap = INFINITY;
    if (t->n_groups_used < t->n_groups)
        gap = (last - score[best_key(score, t->n_groups, best, t->n_groups_used)]) / fabsf(last);
    for (int e = 0; e < n; e++) {
        bool kept = false;
        for (int k = 0; k < t->n_groups_used; k++)
            kept |= e / each == best[k];
        keys[e] = kept ? keys[e] : -INFINITY;
    }
    return gap;
}

static void softmax(float *p, int n)
{
    float max = -INFINITY;
    double total = 0;
    for (int i = 0; i < n; i++)
        max = p[i] > max ? p[i] : max;
    for (int i = 0; i < n; i++)
        total += p[i] = expf(p[i] - max);
    for (int i = 0; i < n; i++)
        p[i] = (float)(p[i] / total);
}

/* Experts and weights (n_used) of one row, from what the router reads. Returns by how much of
 * itself the last one's key (or group) is above the best of those not chosen. */
static float route(struct ref *r, const struct router *t, const float *x, int *chosen,
                   float *weight)
{
    int n = t->w->n_out;
    float *p = r->probs, *keys = r->keys;
    matvec(r, t->w, 0, x, p);
    if (t->kind == ROUTER_SOFTMAX)
        softmax(p, n);
    for (int e = 0; e < n; e++) {
        if (t->kind == ROUTER_SIGMOID)
            p[e] = sigmoid(p[e]);
        keys[e] = p[e] + (t->choice_bias ? t->choice_bias[e] : 0.0f);
    }
    float groups = t->n_groups > 1 ? keep_groups(t, keys, n) : INFINITY;
    double kept = 0;
    float last = 0, gap = INFINITY;
    for (int k = 0; k < t->n_used; k++) {
        chosen[k] = best_key(keys, n, chosen, k);
        weight[k] = p[chosen[k]];
        last = keys[chosen[k]];
        kept += weight[k];
    }
    if (t->n_used < n)
        gap = (last - keys[best_key(keys, n, chosen, t->n_used)]) / fabsf(last);
    gap = groups < gap ? groups : gap;
    if (t->kind == ROUTER_SOFTMAX_TOP)
        softmax(weight, t->n_used);
    for (int k = 0; k < t->n_used; k++) {
        if (t->renorm && t->kind != ROUTER_SOFTMAX_TOP)
            weight[k] = (float)(weight[k] / kept);
        weight[k] *= or_one(t->scale);
        if (t->expert_scale)
            weight[k] *= t->expert_scale[chosen[k]];
    }
    return gap;
}

/* y += experts_out(sum over the chosen); n: the row as the dense part reads it */
static void experts_row(struct ref *r, const struct mlp *m, const float *x, float *n, float *y,
                        float *gap)
{
    int chosen[MAX_USED], E = r->net->n_embd;
    float weight[MAX_USED];
    stage_begin(r);
    if (m->experts_in.kind)
        norm_row(&m->experts_in, x, n, E);
    if (m->router.norm.kind)
        norm_row(&m->router.norm, x, r->part, E);
    float g = route(r, &m->router, m->router.norm.kind ? r->part : n, chosen, weight);
    *gap = g < *gap ? g : *gap;
    stage_end(r, STAGE_ROUTER);
    stage_begin(r);
    float *sum = r->sum;
    memset(sum, 0, (size_t)E * sizeof(float));
    for (int k = 0; k < m->router.n_used; k++) {
        int e = chosen[k] - m->expert_first;
        if (e < 0 || e >= m->experts.gate_up->n_expert)
            continue; /* another rank has it */
        ffn_row(r, &m->experts, e, n, r->part);
        for (int i = 0; i < E; i++)
            sum[i] += weight[k] * r->part[i];
    }
    if (m->experts_partial)
        ranks_sum(r->be.ranks, sum, (size_t)E);
    norm_row(&m->experts_out, sum, sum, E);
    for (int i = 0; i < E; i++)
        y[i] += sum[i];
    stage_end(r, STAGE_EXPERTS);
}

/* x += norm((act(x Wg^T) * e) Wp^T) */
static void layer_embed_row(struct ref *r, const struct layer_embed *l, const float *e, float *x)
{
    int P = l->gate->n_out, E = r->net->n_embd;
    matvec(r, l->gate, 0, x, r->hidden);
    memcpy(r->hidden + P, e, (size_t)P * sizeof(float));
    activate(&(struct ffn){.act = l->act}, r->hidden, P);
    matvec(r, l->project, 0, r->hidden, r->part);
    norm_row(&l->norm, r->part, r->part, E);
    for (int i = 0; i < E; i++)
        x[i] += r->part[i];
}

static void ref_mlp(struct backend *be, const struct mlp *m, int layer)
{
    struct ref *r = self(be);
    int E = r->net->n_embd, P = r->net->embed.layers.width;
    for (int i = 0; i < r->rows; i++) {
        float *x = stream_row(r, i), *y = r->y;
        r->at = r->row_of[i];
        stage_begin(r);
        norm_row(&m->block.in, x, r->n, E);
        memset(y, 0, (size_t)E * sizeof(float));
        stage_end(r, STAGE_NORM);
        if (m->dense.gate_up) {
            float gate = 0;
            stage_begin(r);
            ffn_row(r, &m->dense, 0, r->n, y);
            if (m->dense_gate)
                matvec(r, m->dense_gate, 0, r->n, &gate);
            for (int j = 0; m->dense_gate && j < E; j++)
                y[j] *= sigmoid(gate);
            if (m->dense_partial)
                ranks_sum(be->ranks, y, (size_t)E);
            norm_row(&m->dense_out, y, y, E);
            stage_end(r, STAGE_FFN);
        }
        if (m->router.w)
            experts_row(r, m, x, r->n, y, &r->gap[r->row_of[i]]);
        stage_begin(r);
        block_add(r, &m->block, y, x);
        if (m->embed.gate)
            layer_embed_row(
                r, &m->embed,
                r->layer_embeds + (size_t)((r->row_of[i] * r->net->n_layers + layer) * P), x);
        for (int j = 0; j < E; j++)
            x[j] *= or_one(m->stream_scale);
        stage_end(r, STAGE_NORM);
    }
}

static void ref_keep(struct backend *be, const struct norm *norm)
{
    struct ref *r = self(be);
    size_t E = (size_t)r->net->n_embd;
    stage_begin(r);
    for (int i = 0; i < r->rows; i++)
        norm_row(norm, stream_row(r, i), r->kept + (size_t)i * E, r->net->n_embd);
    stage_end(r, STAGE_NORM);
}

static void ref_join(struct backend *be, const struct mtp *m)
{
    struct ref *r = self(be);
    const struct batch *b = &r->batch;
    int E = r->net->n_embd;
    stage_begin(r);
    r->rows = b->n_tokens;
    r->narrow = false;
    for (int t = 0; t < b->n_tokens; t++) {
        float *e = r->joined, *h = r->joined + E;
        r->row_of[t] = r->at = t;
        const struct embed *from = &r->net->embed;
        int row = b->tokens[t] - from->first;
        memset(e, 0, (size_t)E * sizeof(float));
        if (!from->partial || (row >= 0 && row < from->tokens->n_out))
            add_row(r, from->tokens, row, or_one(from->scale), e);
        if (from->partial)
            ranks_sum(be->ranks, e, (size_t)E);
        norm_row(&m->embed_norm, e, e, E);
        norm_row(&m->hidden_norm, r->kept + (size_t)b->from[t] * (size_t)E, h, E);
        matvec(r, m->fc, 0, r->joined, stream_row(r, t));
    }
    stage_end(r, STAGE_EMBED);
}

static void ref_head(struct backend *be, const struct head *h)
{
    struct ref *r = self(be);
    int n = logits_width(r);
    stage_begin(r);
    narrow(r);
    for (int t = 0; t < r->rows; t++) {
        float *l = r->logits + (size_t)t * (size_t)n;
        r->at = r->row_of[t];
        norm_row(&h->norm, stream_row(r, t), h->w ? r->n : l, r->net->n_embd);
        if (h->w)
            matvec(r, h->w, 0, r->n, l);
        if (h->w && h->w->n_out < n)
            ranks_collect(be->ranks, l, 1, n);
        for (int i = 0; i < n; i++) {
            l[i] *= or_one(h->scale);
            if (h->softcap != 0)
                l[i] = h->softcap * tanhf(l[i] / h->softcap);
        }
    }
    stage_end(r, STAGE_HEAD);
}

static void ref_sample(struct backend *be, struct sampler *const *samplers)
{
    struct ref *r = self(be);
    stage_begin(r);
    for (int i = 0; i < r->batch.n_out; i++)
        if (samplers[i])
            r->sampled[r->now][i] = sampler_pick(
                samplers[i], r->logits + (size_t)i * (size_t)r->net->n_vocab, &r->told[r->now][i]);
    stage_end(r, STAGE_SAMPLING);
}

static void ref_probs(struct backend *be, int row, struct sample_probs *out)
{
    const struct ref *r = self(be);
    *out = r->told[(r->n_ended + 1) % 2][row];
}

static void ref_logits(struct backend *be, int row, float *host)
{
    struct ref *r = self(be);
    size_t n = (size_t)logits_width(r);
    memcpy(host, r->logits + (size_t)row * n, n * sizeof(float));
}

static void ref_stream_put(struct backend *be, const float *host, int rows)
{
    struct ref *r = self(be);
    CHECK(rows <= r->bounds.max_tokens, "%d rows", rows);
    memcpy(r->x, host, (size_t)rows * (size_t)r->net->n_embd * sizeof(float));
    r->rows = rows;
    r->narrow = false;
    for (int i = 0; i < rows; i++)
        r->row_of[i] = i;
}

static void ref_stream_get(struct backend *be, float *host, int rows)
{
    struct ref *r = self(be);
    memcpy(host, r->x, (size_t)rows * (size_t)r->net->n_embd * sizeof(float));
}

static void ref_logits_put(struct backend *be, const float *host, int rows)
{
    struct ref *r = self(be);
    memcpy(r->logits, host, (size_t)rows * (size_t)logits_width(r) * sizeof(float));
}

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
    .adapt = ref_adapt,
    .unadapt = ref_unadapt,
    .prepare = ref_prepare,
    .begin = ref_begin,
    .begin_halves = ref_begin_halves,
    .half = ref_half,
    .replay = ref_replay,
    .record = ref_record,
    .launch = ref_launch,
    .end = ref_end,
    .embed = ref_embed,
    .mixer = ref_mixer,
    .mlp = ref_mlp,
    .head = ref_head,
    .keep = ref_keep,
    .join = ref_join,
    .sample = ref_sample,
    .probs = ref_probs,
    .logits = ref_logits,
    .stream_put = ref_stream_put,
    .stream_get = ref_stream_get,
    .logits_put = ref_logits_put,
};

struct backend *backend_open_ref(void)
{
    struct ref *r = mem_zalloc(1, sizeof *r);
    r->be.ops = &ref_ops;
    r->be.invariance = INVARIANCE_ALWAYS;
    r->be.ahead = true; /* nothing runs beside the host, but steps may overlap as on a device */
    return &r->be;
}

float backend_ref_gap(struct backend *be, int row)
{
    return self(be)->gap[row];
}
