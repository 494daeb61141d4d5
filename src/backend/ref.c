/*
 * The specification: every op in plain scalar C, float storage, double accumulation, no tricks.
 * Backends are tested against this file. It is also a backend of its own (STEEL_ISA=ref).
 */
#include "backend/backend.h"
#include "backend/profile.h"
#include "base/clock.h"
#include "base/mem.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct ref {
    struct backend be;
    struct shape shape;
    float *rope_freq;    /* (n_rot/2) */
    struct batch batch;  /* views into the caller's arrays, valid from begin to end */
    float *row;          /* one dequantised weight row */
    float *qkv;          /* (H*D + 2*K*D) one row */
    float *scores;       /* (longest context) */
    float *probs;        /* (n_expert) */
    float *hidden;       /* (2 * widest ffn) */
    float *expert_out;   /* (n_embd) */
    int32_t *sampled[2]; /* (max_out) each, of the steps under way */
    int32_t *tokens;     /* (max_tokens) of the step, all known */
    int n_out[2], now;
    unsigned n_begun, n_ended;
    int64_t stage_start; /* profile clock */
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

static bool ref_upload(struct backend *be, const struct raw_weight *src, struct weight *w,
                       struct error *err)
{
    (void)be;
    struct raw_weight *own = src->transient ? raw_weight_copy(src) : raw_weight_view(src);
    if (!own)
        return error_set(err, "out of memory for a weight of %zu bytes", raw_weight_bytes(src));
    *w = (struct weight){src->n_in, src->n_out,    src->n_expert, raw_weight_bytes(src),
                         own,       src->transient};
    return true;
}

static void ref_release(struct backend *be, struct weight *w)
{
    (void)be;
    raw_weight_free(w->impl);
    *w = (struct weight){0};
}

static bool ref_prepare(struct backend *be, const struct shape *s, struct error *err)
{
    (void)err;
    struct ref *r = self(be);
    r->shape = *s;
    size_t wide = (size_t)s->n_embd;
    size_t dims[] = {(size_t)s->n_ff, (size_t)s->n_ff_exp, (size_t)(s->n_heads * s->head_dim)};
    for (int i = 0; i < 3; i++)
        wide = dims[i] > wide ? dims[i] : wide;
    size_t context = (size_t)s->max_pages * (size_t)s->page_len;
    r->rope_freq = mem_zalloc((size_t)s->n_rot / 2 + 1, sizeof(float));
    if (s->n_rot)
        memcpy(r->rope_freq, s->rope_freq, (size_t)s->n_rot / 2 * sizeof(float));
    r->row = mem_zalloc(wide, sizeof(float));
    r->qkv =
        mem_zalloc((size_t)(s->n_heads + 2 * s->n_kv_heads) * (size_t)s->head_dim, sizeof(float));
    r->scores = mem_zalloc(context + 1, sizeof(float));
    r->probs = mem_zalloc((size_t)s->n_expert + 1, sizeof(float));
    r->hidden = mem_zalloc(2 * wide, sizeof(float));
    r->expert_out = mem_zalloc((size_t)s->n_embd, sizeof(float));
    for (int i = 0; i < 2; i++)
        r->sampled[i] = mem_zalloc((size_t)s->max_out + 1, sizeof(int32_t));
    r->tokens = mem_zalloc((size_t)s->max_tokens + 1, sizeof(int32_t));
    return true;
}

static void ref_close(struct backend *be)
{
    struct ref *r = self(be);
    void *owned[] = {r->rope_freq,  r->row,        r->qkv,        r->scores, r->probs, r->hidden,
                     r->expert_out, r->sampled[0], r->sampled[1], r->tokens, r};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

/* The step */

static void ref_begin(struct backend *be, const struct batch *b)
{
    struct ref *r = self(be);
    CHECK(r->n_begun - r->n_ended < 2, "two steps are under way");
    const int32_t *before = r->sampled[(r->n_begun + 1) % 2];
    r->batch = *b;
    r->now = (int)(r->n_begun++ % 2);
    r->n_out[r->now] = b->n_out;
    for (int i = 0; i < b->n_tokens; i++)
        r->tokens[i] = b->tokens[i] < 0 ? before[-1 - b->tokens[i]] : b->tokens[i];
    r->batch.tokens = r->tokens;
    for (int i = 0; i < b->n_out; i++)
        r->sampled[r->now][i] = -1;
    if (be->profile) {
        be->profile->phase = b->n_decode == b->n_seqs;
        be->profile->steps[be->profile->phase]++;
        be->profile->tokens[be->profile->phase] += b->n_tokens;
    }
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
    (void)be; /* ops run as they are issued */
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

static float dot(const float *a, const float *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return (float)sum;
}

/* y[0..rows_out) = rows [first, first+rows_out) of expert e times x (+ bias) */
static void matvec(struct ref *r, const struct raw_weight *w, int e, int first, int rows_out,
                   const float *x, float *y)
{
    for (int o = 0; o < rows_out; o++) {
        raw_weight_row(w, e, first + o, r->row);
        y[o] = dot(r->row, x, w->n_in) + (w->bias ? w->bias[first + o] : 0.0f);
    }
}

static void rms_norm(const float *x, const float *gain, float eps, float *out, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    float scale = (float)(1.0 / sqrt(sum / n + (double)eps));
    for (int i = 0; i < n; i++)
        out[i] = x[i] * scale * gain[i];
}

static void ref_embed(struct backend *be, const struct weight *emb, float *x)
{
    struct ref *r = self(be);
    stage_begin(r);
    for (int t = 0; t < r->batch.n_tokens; t++)
        raw_weight_row(raw(emb), 0, r->batch.tokens[t], x + (size_t)t * (size_t)emb->n_in);
    stage_end(r, STAGE_EMBED);
}

static void ref_add_norm(struct backend *be, float *x, const float *d, const float *gain, float *n,
                         int rows)
{
    struct ref *r = self(be);
    stage_begin(r);
    int width = r->shape.n_embd;
    for (int t = 0; t < rows; t++) {
        float *xt = x + (size_t)t * (size_t)width;
        for (int i = 0; d && i < width; i++)
            xt[i] += d[(size_t)t * (size_t)width + (size_t)i];
        rms_norm(xt, gain, r->shape.norm_eps, n + (size_t)t * (size_t)width, width);
    }
    stage_end(r, STAGE_NORM);
}

static void kv_store(void *base, enum dtype type, size_t at, float value)
{
    if (type == DT_F32)
        ((float *)base)[at] = value;
    else
        ((uint16_t *)base)[at] = type == DT_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

static float kv_load(const void *base, enum dtype type, size_t at)
{
    if (type == DT_F32)
        return ((const float *)base)[at];
    uint16_t bits = ((const uint16_t *)base)[at];
    return type == DT_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

/* Index of element 0 of (slot, kv head) in a pool of (n_pages, K, page_len, D). */
static size_t kv_at(const struct shape *s, int slot, int head)
{
    size_t page = (size_t)(slot / s->page_len), off = (size_t)(slot % s->page_len);
    return ((page * (size_t)s->n_kv_heads + (size_t)head) * (size_t)s->page_len + off) *
           (size_t)s->head_dim;
}

static void rotate(const struct ref *r, float *head, int pos)
{
    int half = r->shape.n_rot / 2;
    for (int i = 0; i < half; i++) {
        /* The angle is a float product, as in the models' own code; then exact trigonometry. */
        float angle = (float)pos * r->rope_freq[i];
        float c = (float)cos(angle) * r->shape.rope_mscale;
        float s = (float)sin(angle) * r->shape.rope_mscale;
        float a = head[i], b = head[i + half];
        head[i] = a * c - b * s;
        head[i + half] = b * c + a * s;
    }
}

static void ref_attn_in(struct backend *be, const struct attn_layer *l, const float *n, float *q)
{
    struct ref *r = self(be);
    const struct shape *s = &r->shape;
    stage_begin(r);
    int D = s->head_dim, H = s->n_heads, K = s->n_kv_heads;
    for (int t = 0; t < r->batch.n_tokens; t++) {
        matvec(r, raw(l->wqkv), 0, 0, (H + 2 * K) * D, n + (size_t)t * (size_t)s->n_embd, r->qkv);
        for (int h = 0; h < H + K; h++) {
            float *head = r->qkv + h * D;
            const float *gain = h < H ? l->q_norm : l->k_norm;
            if (gain)
                rms_norm(head, gain, s->norm_eps, head, D);
            rotate(r, head, r->batch.pos[t]);
        }
        memcpy(q + (size_t)t * (size_t)(H * D), r->qkv, (size_t)(H * D) * sizeof(float));
        if (r->batch.slot[t] < 0)
            continue;
        for (int h = 0; h < K; h++) {
            size_t at = kv_at(s, r->batch.slot[t], h);
            for (int i = 0; i < D; i++) {
                kv_store(l->kv.k, s->kv_type, at + (size_t)i, r->qkv[(H + h) * D + i]);
                kv_store(l->kv.v, s->kv_type, at + (size_t)i, r->qkv[(H + K + h) * D + i]);
            }
        }
    }
    stage_end(r, STAGE_QKV);
}

static void attend(struct ref *r, const struct attn_layer *l, int seq, int row, int h,
                   const float *q, float *out)
{
    const struct shape *s = &r->shape;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    int D = s->head_dim, kv_head = h * s->n_kv_heads / s->n_heads;
    int last = r->batch.pos[row];
    int first = l->window && last - l->window + 1 > 0 ? last - l->window + 1 : 0;
    float max = -INFINITY;
    for (int p = first; p <= last; p++) {
        size_t at = kv_at(s, pages[p / s->page_len] * s->page_len + p % s->page_len, kv_head);
        double sum = 0;
        for (int i = 0; i < D; i++)
            sum += (double)q[i] * kv_load(l->kv.k, s->kv_type, at + (size_t)i);
        r->scores[p] = (float)sum * s->attn_scale;
        max = r->scores[p] > max ? r->scores[p] : max;
    }
    double total = 0;
    for (int p = first; p <= last; p++) {
        r->scores[p] = expf(r->scores[p] - max);
        total += r->scores[p];
    }
    for (int i = 0; i < D; i++) {
        double sum = 0;
        for (int p = first; p <= last; p++) {
            size_t at = kv_at(s, pages[p / s->page_len] * s->page_len + p % s->page_len, kv_head);
            sum += (double)r->scores[p] * kv_load(l->kv.v, s->kv_type, at + (size_t)i);
        }
        out[i] = (float)(sum / total);
    }
}

static void ref_attention(struct backend *be, const struct attn_layer *l, const float *q, float *a)
{
    struct ref *r = self(be);
    const struct shape *s = &r->shape;
    stage_begin(r);
    for (int seq = 0; seq < r->batch.n_seqs; seq++)
        for (int t = r->batch.q_start[seq]; t < r->batch.q_start[seq + 1]; t++)
            for (int h = 0; h < s->n_heads; h++) {
                size_t at = (size_t)(t * s->n_heads + h) * (size_t)s->head_dim;
                if (r->batch.slot[t] < 0)
                    memset(a + at, 0, (size_t)s->head_dim * sizeof(float));
                else
                    attend(r, l, seq, t, h, q + at, a + at);
            }
    stage_end(r, STAGE_ATTENTION);
}

static void ref_linear(struct backend *be, const struct weight *w, const float *x, float *y,
                       int rows)
{
    struct ref *r = self(be);
    stage_begin(r);
    for (int t = 0; t < rows; t++)
        matvec(r, raw(w), 0, 0, w->n_out, x + (size_t)t * (size_t)w->n_in,
               y + (size_t)t * (size_t)w->n_out);
    stage_end(r, be->profile ? be->profile->linear_stage : STAGE_OTHER);
}

/* y = (silu(g) * u) Wd^T for one row and one expert. */
static void glu(struct ref *r, const struct weight *gate_up, const struct weight *down, int e,
                const float *x, float *y)
{
    int width = down->n_in;
    float *g = r->hidden, *u = r->hidden + width;
    matvec(r, raw(gate_up), e, 0, 2 * width, x, r->hidden);
    for (int i = 0; i < width; i++)
        g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
    matvec(r, raw(down), e, 0, down->n_out, g, y);
}

static void ref_ffn(struct backend *be, const struct weight *gate_up, const struct weight *down,
                    const float *x, float *y, int rows)
{
    struct ref *r = self(be);
    stage_begin(r);
    for (int t = 0; t < rows; t++)
        glu(r, gate_up, down, 0, x + (size_t)t * (size_t)gate_up->n_in,
            y + (size_t)t * (size_t)down->n_out);
    stage_end(r, STAGE_FFN);
}

static void ref_moe(struct backend *be, const struct moe_layer *l, const float *x, float *y,
                    int rows)
{
    struct ref *r = self(be);
    const struct shape *s = &r->shape;
    int n = l->router->n_out, width = s->n_embd;
    for (int t = 0; t < rows; t++) {
        const float *xt = x + (size_t)t * (size_t)width;
        float *yt = y + (size_t)t * (size_t)width;
        stage_begin(r);
        matvec(r, raw(l->router), 0, 0, n, xt, r->probs);
        float max = -INFINITY;
        double total = 0;
        for (int e = 0; e < n; e++)
            max = r->probs[e] > max ? r->probs[e] : max;
        for (int e = 0; e < n; e++)
            total += r->probs[e] = expf(r->probs[e] - max);
        for (int e = 0; e < n; e++)
            r->probs[e] = (float)(r->probs[e] / total);
        int chosen[256] = {0};
        float weight[256] = {0};
        double kept = 0;
        for (int k = 0; k < s->n_expert_used; k++) {
            int best = -1;
            for (int e = 0; e < n; e++) {
                bool taken = false;
                for (int j = 0; j < k; j++)
                    taken |= chosen[j] == e;
                if (!taken && (best < 0 || r->probs[e] > r->probs[best]))
                    best = e;
            }
            chosen[k] = best;
            weight[k] = r->probs[best];
            kept += weight[k];
        }
        stage_end(r, STAGE_ROUTER);
        stage_begin(r);
        memset(yt, 0, (size_t)width * sizeof(float));
        for (int k = 0; k < s->n_expert_used; k++) {
            float w = (s->norm_topk ? (float)(weight[k] / kept) : weight[k]) * s->expert_scale;
            glu(r, l->gate_up, l->down, chosen[k], xt, r->expert_out);
            for (int i = 0; i < width; i++)
                yt[i] += w * r->expert_out[i];
        }
        stage_end(r, STAGE_EXPERTS);
    }
}

static void ref_gather(struct backend *be, const float *src, float *dst, int width)
{
    struct ref *r = self(be);
    for (int i = 0; i < r->batch.n_out; i++)
        memcpy(dst + (size_t)i * (size_t)width, src + (size_t)r->batch.out_rows[i] * (size_t)width,
               (size_t)width * sizeof(float));
}

static void ref_sample(struct backend *be, float *logits)
{
    struct ref *r = self(be);
    stage_begin(r);
    for (int i = 0; r->batch.samplers && i < r->batch.n_out; i++)
        if (r->batch.samplers[i])
            r->sampled[r->now][i] =
                sampler_pick(r->batch.samplers[i], logits + (size_t)i * (size_t)r->shape.n_vocab);
    stage_end(r, STAGE_SAMPLING);
}

static const struct backend_ops ref_ops = {
    .name = "ref",
    .close = ref_close,
    .alloc = ref_alloc,
    .free = ref_free,
    .forget = ref_forget,
    .copy_in = ref_copy,
    .copy_out = ref_copy,
    .upload = ref_upload,
    .release = ref_release,
    .prepare = ref_prepare,
    .begin = ref_begin,
    .replay = ref_replay,
    .record = ref_record,
    .launch = ref_launch,
    .end = ref_end,
    .embed = ref_embed,
    .add_norm = ref_add_norm,
    .attn_in = ref_attn_in,
    .attention = ref_attention,
    .linear = ref_linear,
    .ffn = ref_ffn,
    .moe = ref_moe,
    .gather = ref_gather,
    .sample = ref_sample,
};

struct backend *backend_open_ref(void)
{
    struct ref *r = mem_zalloc(1, sizeof *r);
    r->be.ops = &ref_ops;
    r->be.invariance = INVARIANCE_ALWAYS;
    r->be.ahead = true; /* nothing runs beside the host, but steps may overlap as on a device */
    return &r->be;
}
