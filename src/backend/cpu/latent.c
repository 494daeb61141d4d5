/*
 * Multi-head latent attention of the CPU backend, between its projections. The cache holds one row of
 * C + Dr values per token; its first C values are the keys and values of all heads.
 *
 * The absorbed form is used for decode and prefill alike: queries are projected into the latent space
 * (Wkb), attend there as heads of one kv head (attn.c), and their sums are projected back (Wvb).
 *   wide[t, h] = q_nope[t, h] . Wkb[h]     a[t, h] = (sum over keys of p * latent) . Wvb[h]
 * The expanded form would halve attention's products for a prompt at the start of a context, but costs
 * more deeper in.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/rowops.h"

#include <string.h>

struct latent_job {
    struct cpu_backend *cb;
    const struct latent *l;
    const struct kv_layer *kv;
    const float *rope; /* (n_tokens, Dr) */
    float *q, *low;    /* (n_tokens, H*(Dn+Dr)), (n_tokens, C+Dr) */
    float *
        wide; /* (n_tokens, H, C+Dr) queries in the latent space; then sums, in the first C of each */
    float *a; /* (n_tokens, H*Dv) */
};

/* RoPE over Dr values. interleaved: input pairs are (2i, 2i + 1), output pairs (i, Dr/2 + i). */
static void rotate(float *x, const float *rope, int n, bool interleaved)
{
    float old[CPU_MAX_LATENT];
    int half = n / 2;
    memcpy(old, x, (size_t)n * sizeof(float));
    for (int i = 0; i < half; i++) {
        float a = interleaved ? old[2 * i] : old[i],
              b = interleaved ? old[2 * i + 1] : old[half + i];
        x[i] = a * rope[i] - b * rope[half + i];
        x[half + i] = b * rope[i] + a * rope[half + i];
    }
}

/* Stores token t's row in the cache, and applies RoPE to its queries. */
static void store_token(const struct latent_job *j, int t)
{
    const struct latent *l = j->l;
    const struct cpu_backend *cb = j->cb;
    const struct row_kernels *kn = row_kernels(cb->isa);
    int C = l->kv_rank, Dr = l->rope_dim, D = l->nope_dim + Dr, slot = cb->batch.slot[t];
    const float *rope = j->rope + (size_t)t * (size_t)Dr;
    float *low = j->low + (size_t)t * (size_t)(C + Dr);
    for (int h = 0; h < l->n_heads; h++)
        rotate(j->q + ((size_t)t * (size_t)l->n_heads + (size_t)h) * (size_t)D + l->nope_dim, rope,
               Dr, l->interleaved);
    if (slot < 0)
        return;
    kn->add_norm(low, NULL, &l->kv_norm, low, C);
    rotate(low + C, rope, Dr, l->interleaved);
    kn->store(cb->bounds.k_type, low, C + Dr, j->kv->k, (size_t)slot * (size_t)(C + Dr), 1);
}

static struct pool_work tokens_work(void *arg)
{
    const struct latent_job *j = arg;
    return (struct pool_work){j->cb->batch.n_tokens, POOL_EVEN};
}

static void tokens_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    for (int t = first; t < last; t++)
        store_token(arg, t);
}

/* How a product by heads is split: each piece is a run of tokens of one head. */
struct pieces {
    const struct gemm_weight *w;
    bool bf16;
    int chunk, chunks; /* tokens per piece, pieces per head */
};

static struct pieces pieces_of(const struct latent_job *j, const struct weight *w)
{
    int T = j->cb->batch.n_tokens;
    struct pieces p = {.w = w->impl, .bf16 = gemm_takes_bf16(j->cb, w->impl, T)};
    p.bf16 &=
        gemm_head_most(j->cb, p.w, true) > 0; /* 0 where rows are too wide for a thread's tile */
    p.chunk = gemm_head_most(j->cb, p.w, p.bf16);
    p.chunks = (T + p.chunk - 1) / p.chunk;
    return p;
}

static struct pool_work queries_work(void *arg)
{
    const struct latent_job *j = arg;
    return (struct pool_work){j->l->n_heads * pieces_of(j, j->l->wkb).chunks, POOL_EVEN};
}

static void queries_run(void *arg, int ith, int first, int last)
{
    const struct latent_job *j = arg;
    const struct latent *l = j->l;
    int H = l->n_heads, C = l->kv_rank, Dr = l->rope_dim, Dn = l->nope_dim, D = Dn + Dr;
    struct pieces in = pieces_of(j, l->wkb);
    int chunks = in.chunks, chunk = in.chunk, T = j->cb->batch.n_tokens;
    size_t wide = (size_t)H * (size_t)(C + Dr);
    for (int p = first; p < last; p++) {
        int h = p / chunks, t = p % chunks * chunk, n = T - t < chunk ? T - t : chunk;
        const float *q = j->q + ((size_t)t * (size_t)H + (size_t)h) * (size_t)D;
        float *to = j->wide + (size_t)t * wide + (size_t)h * (size_t)(C + Dr);
        gemm_head(j->cb, ith, in.w, h, q, (size_t)H * (size_t)D, n, in.bf16, to, wide);
        for (int i = 0; i < n; i++)
            memcpy(to + (size_t)i * wide + C, q + (size_t)i * (size_t)H * (size_t)D + Dn,
                   (size_t)Dr * sizeof(float));
    }
}

static struct pool_work values_work(void *arg)
{
    const struct latent_job *j = arg;
    return (struct pool_work){j->l->n_heads * pieces_of(j, j->l->wvb).chunks, POOL_EVEN};
}

static void values_run(void *arg, int ith, int first, int last)
{
    const struct latent_job *j = arg;
    const struct latent *l = j->l;
    int H = l->n_heads, C = l->kv_rank, T = j->cb->batch.n_tokens;
    struct pieces in = pieces_of(j, l->wvb);
    int chunks = in.chunks, chunk = in.chunk;
    size_t wide = (size_t)H * (size_t)(C + l->rope_dim), out = (size_t)H * (size_t)l->v_dim;
    for (int p = first; p < last; p++) {
        int h = p / chunks, t = p % chunks * chunk, n = T - t < chunk ? T - t : chunk;
        gemm_head(j->cb, ith, in.w, h,
                  j->wide + (size_t)t * wide + (size_t)h * (size_t)(C + l->rope_dim), wide, n,
                  in.bf16, j->a + (size_t)t * out + (size_t)h * (size_t)l->v_dim, out);
    }
}

void cpu_latent_attention(const struct latent *l, struct attention *a)
{
    *a = (struct attention){.n_heads = l->n_heads,
                            .n_kv_heads = 1,
                            .k_dim = l->kv_rank + l->rope_dim,
                            .v_dim = l->kv_rank,
                            .scale = l->scale,
                            .index = l->index};
}

void cpu_latent(struct cpu_backend *cb, const struct latent *l, const struct kv_layer *kv,
                const struct key_choice *choice, const float *rope, float *q, float *low,
                float *wide, float *a)
{
    static const struct pool_phase before[] = {{tokens_work, tokens_run},
                                               {queries_work, queries_run}},
                                   after[] = {{values_work, values_run}};
    struct latent_job j = {
        .cb = cb, .l = l, .kv = kv, .rope = rope, .q = q, .low = low, .wide = wide, .a = a};
    struct attention inner;
    cpu_latent_attention(l, &inner);
    gemm_start(cb->gemm);
    const struct weight *heads[] = {l->wkb, l->wvb};
    for (int i = 0; i < 2; i++)
        gemm_count(cb, heads[i]->impl, cb->batch.n_tokens, pieces_of(&j, heads[i]).bf16);
    pool_phases(cb->pool, before, 2, &j);
    cpu_attention_rows(&cb->bounds, &cb->batch, &inner, kv->k, choice, wide, cb->attn_scratch,
                       cb->pool, &cb->pick);
    pool_phases(cb->pool, after, 1, &j);
}
