/*
 * The CPU backend: its life, its memory and its op table. Owns the thread pool and all scratch. The
 * arithmetic is elsewhere: matmul.c and moe.c (on the kernels of matmul.h), attention and norms
 * (kernels.h). Knows nothing of files and models.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/matmul.h"
#include "base/mem.h"
#include "sample/sampler.h"

#include <string.h>

static const struct mm_weight *impl(const struct weight *w)
{
    return w->impl;
}

/* Memory */

static void *cpu_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    (void)be;
    void *p = mem_aligned(bytes);
    if (!p)
        error_set(err, "out of memory: %zu bytes for %s", bytes, what);
    return p; /* zeroed, and taken from the system as it is touched */
}

static void cpu_free(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_aligned_free(p, bytes);
}

static void cpu_forget(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_forget(p, bytes);
}

static void cpu_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static bool cpu_upload(struct backend *be, const struct raw_weight *src, struct weight *w,
                       struct error *err)
{
    struct cpu_backend *cb = cpu_self(be);
    struct mm_weight *own = mm_weight_new(src, !cb->no_repack, cb->pool, err);
    if (!own)
        return false;
    *w = (struct weight){.n_in = src->n_in,
                         .n_out = src->n_out,
                         .n_expert = src->n_expert,
                         .bytes = raw_weight_bytes(src),
                         .owns = !own->raw || src->transient,
                         .impl = own};
    return true;
}

static void cpu_release(struct backend *be, struct weight *w)
{
    (void)be;
    mm_weight_free(w->impl);
    *w = (struct weight){0};
}

/* Scratch. Everything is freed by clear(), so a second prepare() starts from nothing. */
static void clear(struct cpu_backend *cb)
{
    const struct shape *s = &cb->shape;
    mm_clear(cb);
    mem_free(cb->rope_freq);
    mem_free(cb->rope);
    mem_free(cb->sampled);
    size_t qkv = (size_t)(s->n_heads + 2 * s->n_kv_heads) * (size_t)s->head_dim;
    mem_aligned_free(cb->qkv, (size_t)s->max_tokens * qkv * sizeof(float));
    mem_aligned_free(cb->attn_scratch, cpu_attention_scratch(s, pool_size(cb->pool)));
    cb->rope_freq = cb->rope = cb->qkv = NULL;
    cb->sampled = NULL;
    cb->attn_scratch = NULL;
}

static bool cpu_prepare(struct backend *be, const struct shape *s, struct error *err)
{
    struct cpu_backend *cb = cpu_self(be);
    if (cb->sampled)
        clear(cb);
    cb->shape = *s;
    size_t half = (size_t)s->n_rot / 2;
    cb->rope_freq = mem_zalloc(half + 1, sizeof(float));
    if (half)
        memcpy(cb->rope_freq, s->rope_freq, half * sizeof(float));
    cb->shape.rope_freq = cb->rope_freq;
    cb->rope = mem_zalloc(cpu_rope_table_len(s) + 1, sizeof(float));
    cb->sampled = mem_zalloc((size_t)s->max_out + 1, sizeof *cb->sampled);
    size_t qkv = (size_t)(s->n_heads + 2 * s->n_kv_heads) * (size_t)s->head_dim;
    qkv *= (size_t)s->max_tokens * sizeof(float);
    cb->qkv = cpu_alloc(be, qkv, "attention inputs", err);
    size_t attn = cpu_attention_scratch(s, pool_size(cb->pool));
    cb->attn_scratch = cpu_alloc(be, attn, "attention scratch", err);
    return cb->qkv && cb->attn_scratch && mm_init(cb, err);
}

static void cpu_close(struct backend *be)
{
    struct cpu_backend *cb = cpu_self(be);
    if (cb->sampled)
        clear(cb);
    pool_free(cb->pool);
    mem_free(cb);
}

/* The step */

static void cpu_begin(struct backend *be, const struct batch *b)
{
    struct cpu_backend *cb = cpu_self(be);
    CHECK(b->n_tokens <= cb->shape.max_tokens && b->n_out <= cb->shape.max_out, "batch too large");
    cb->batch = *b;
    for (int i = 0; i < b->n_out; i++)
        cb->sampled[i] = -1;
    struct profile *p = be->profile;
    if (p) {
        p->phase = b->n_decode == b->n_seqs;
        p->steps[p->phase]++;
        p->tokens[p->phase] += b->n_tokens;
    }
    cpu_stage_begin(cb);
    cpu_rope_table(&cb->shape, b, cb->rope, cb->pool);
    cpu_stage_end(cb, STAGE_OTHER);
}

static bool cpu_replay(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
    return false;
}

static void cpu_record(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
}

static void cpu_launch(struct backend *be)
{
    (void)be; /* ops run as they are issued */
}

static bool cpu_end(struct backend *be, int32_t *tokens, struct error *err)
{
    (void)err;
    struct cpu_backend *cb = cpu_self(be);
    if (tokens)
        memcpy(tokens, cb->sampled, (size_t)cb->batch.n_out * sizeof *tokens);
    return true;
}

/* Compute */

struct embed_job {
    const struct mm_weight *w;
    const int32_t *tokens;
    int n;
    float *x;
};

static void embed_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct embed_job *j = arg;
    for (int t = first; t < last; t++)
        mm_weight_row(j->w, j->tokens[t], j->x + (size_t)t * (size_t)j->w->n_in);
}

static void cpu_embed(struct backend *be, const struct weight *emb, float *x)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    struct embed_job j = {impl(emb), cb->batch.tokens, cb->batch.n_tokens, x};
    if (j.n > 4)
        pool_each(cb->pool, j.n, POOL_EVEN, embed_rows, &j);
    else
        embed_rows(&j, 0, 0, j.n);
    cpu_stage_end(cb, STAGE_EMBED);
}

static void cpu_op_add_norm(struct backend *be, float *x, const float *d, const float *gain,
                            float *n, int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    cpu_add_norm(x, d, gain, n, rows, cb->shape.n_embd, cb->shape.norm_eps, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_NORM);
}

static void cpu_attn_in(struct backend *be, const struct attn_layer *l, const float *n, float *q)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    mm_linear(cb, impl(l->wqkv), n, cb->qkv, cb->batch.n_tokens);
    cpu_attn_post(&cb->shape, &cb->batch, l, cb->rope, cb->qkv, q, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_QKV);
}

static void cpu_op_attention(struct backend *be, const struct attn_layer *l, const float *q,
                             float *a)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    /* AMX takes only rows that come many at a time, so a row's bytes would depend on the step. */
    enum isa isa = be->deterministic && cb->isa == ISA_AMX ? ISA_VNNI : cb->isa;
    cpu_attention(&cb->shape, &cb->batch, l, q, a, cb->attn_scratch, cb->pool, isa);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

static void cpu_linear(struct backend *be, const struct weight *w, const float *x, float *y,
                       int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    mm_linear(cb, impl(w), x, y, rows);
    cpu_stage_end(cb, be->profile ? be->profile->linear_stage : STAGE_OTHER);
}

static void cpu_ffn(struct backend *be, const struct weight *gate_up, const struct weight *down,
                    const float *x, float *y, int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_stage_begin(cb);
    mm_ffn(cb, impl(gate_up), impl(down), x, y, rows);
    cpu_stage_end(cb, STAGE_FFN);
}

static void cpu_moe(struct backend *be, const struct moe_layer *l, const float *x, float *y,
                    int rows)
{
    moe_run(cpu_self(be), impl(l->router), impl(l->gate_up), impl(l->down), x, y, rows);
}

static void cpu_op_gather(struct backend *be, const float *src, float *dst, int width)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_gather(src, cb->batch.out_rows, cb->batch.n_out, width, dst, cb->pool);
}

struct sample_job {
    struct cpu_backend *cb;
    float *logits; /* (n_out, n_vocab) */
};

static void sample_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct sample_job *j = arg;
    const struct batch *b = &j->cb->batch;
    for (int i = first; i < last; i++)
        if (b->samplers[i])
            j->cb->sampled[i] =
                sampler_pick(b->samplers[i], j->logits + (size_t)i * (size_t)j->cb->shape.n_vocab);
}

static void cpu_sample(struct backend *be, float *logits)
{
    struct cpu_backend *cb = cpu_self(be);
    if (!cb->batch.samplers)
        return;
    cpu_stage_begin(cb);
    struct sample_job j = {cb, logits};
    pool_each(cb->pool, cb->batch.n_out, POOL_SINGLE, sample_rows, &j);
    cpu_stage_end(cb, STAGE_SAMPLING);
}

static const struct backend_ops cpu_ops = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .forget = cpu_forget,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .upload = cpu_upload,
    .release = cpu_release,
    .prepare = cpu_prepare,
    .begin = cpu_begin,
    .replay = cpu_replay,
    .record = cpu_record,
    .launch = cpu_launch,
    .end = cpu_end,
    .embed = cpu_embed,
    .add_norm = cpu_op_add_norm,
    .attn_in = cpu_attn_in,
    .attention = cpu_op_attention,
    .linear = cpu_linear,
    .ffn = cpu_ffn,
    .moe = cpu_moe,
    .gather = cpu_op_gather,
    .sample = cpu_sample,
};

struct backend *backend_open_cpu(const struct backend_options *opt, struct error *err)
{
    enum isa isa;
    if (!isa_choose(&isa, err))
        return NULL;
    if (isa == ISA_REF)
        return backend_open_ref();
    int threads = opt && opt->threads > 0 ? opt->threads : pool_cpu_count();
    struct cpu_backend *cb = mem_zalloc(1, sizeof *cb);
    cb->base.ops = &cpu_ops;
    cb->isa = isa;
    cb->base.deterministic = opt && opt->deterministic;
    cb->base.invariance = isa == ISA_AMX ? INVARIANCE_CHOSEN : INVARIANCE_ALWAYS;
    cb->no_repack = opt && opt->no_repack;
    cb->pool = pool_new(threads);
    return &cb->base;
}
