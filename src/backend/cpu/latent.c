/*
 * Latent attention of the CPU backend between its projections: the cache holds one row of C + Dr
 * values a token, of which the first C are keys and values of all heads at once. Absorbed: queries are
 * taken into the latent's space (Wkb), attend there, and what they gather comes back (Wvb). One job of
 * four phases: rows to the cache; queries, by head; attention, by tile of queries of a sequence; values,
 * by head. Also the plain C instance of latent_kernel.h.
 *
 * Keys are taken in blocks at absolute positions, and those a row does not see add exactly 0, so that a
 * row's bytes do not depend on the batch or on how the prompt was cut.
 */
#define KERNELS latent_kernels_c
#include "backend/cpu/latent_kernel.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/rowops.h"
#include "base/error.h"

struct latent_job {
    struct cpu_backend *cb;
    const struct latent *l;
    const struct kv_layer *kv;
    const float *rope; /* (n_tokens, Dr) */
    float *q, *low;    /* (n_tokens, H*(Dn+Dr)), (n_tokens, C+Dr) */
    float *wide; /* (n_tokens, H, C+Dr) queries in the latent's space; then, C of each, sums */
    float *a;    /* (n_tokens, H*Dv) */
    int n_tiles; /* of queries, all sequences */
};

/* Rotates Dr values; woven: pairs that lie side by side come apart on the way. */
static void rotate(float *x, const float *rope, int n, bool woven)
{
    float old[CPU_MAX_LATENT];
    int half = n / 2;
    memcpy(old, x, (size_t)n * sizeof(float));
    for (int i = 0; i < half; i++) {
        float a = woven ? old[2 * i] : old[i], b = woven ? old[2 * i + 1] : old[half + i];
        x[i] = a * rope[i] - b * rope[half + i];
        x[half + i] = b * rope[i] + a * rope[half + i];
    }
}

/* The row of token t goes to the cache; the turning parts of its queries are turned. */
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
               Dr, l->woven);
    if (slot < 0)
        return;
    kn->add_norm(low, NULL, &l->kv_norm, low, C);
    rotate(low + C, rope, Dr, l->woven);
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

/* Tokens that a head's product takes at a time: their rows pass through a tile. */
static int chunk_of(int width)
{
    int n = GEMM_TILE / width;
    return n < GEMM_CHUNK ? n : GEMM_CHUNK;
}

static int chunks_of(const struct latent_job *j, int width)
{
    int chunk = chunk_of(width);
    return (j->cb->batch.n_tokens + chunk - 1) / chunk;
}

/* y (n, stride) = rows of `from`, `apart` floats from each other, times w's matrix of head h */
static void head_product(const struct latent_job *j, int ith, const struct weight *w, int h,
                         const float *from, size_t apart, int n, float *y, size_t stride)
{
    float *x = gemm_tile(j->cb, ith, 0);
    size_t width = (size_t)w->n_in;
    for (int i = 0; i < n; i++)
        memcpy(x + (size_t)i * width, from + (size_t)i * apart, width * sizeof(float));
    struct gemm_x in = {.n_in = w->n_in, .x = x};
    gemm_block(j->cb, ith, w->impl, h, 0, w->n_out, &in, NULL, n, y, stride);
}

static struct pool_work queries_work(void *arg)
{
    const struct latent_job *j = arg;
    return (struct pool_work){j->l->n_heads * chunks_of(j, j->l->nope_dim), POOL_EVEN};
}

static void queries_run(void *arg, int ith, int first, int last)
{
    const struct latent_job *j = arg;
    const struct latent *l = j->l;
    int H = l->n_heads, C = l->kv_rank, Dr = l->rope_dim, Dn = l->nope_dim, D = Dn + Dr;
    int chunks = chunks_of(j, Dn), chunk = chunk_of(Dn), T = j->cb->batch.n_tokens;
    size_t wide = (size_t)H * (size_t)(C + Dr);
    for (int p = first; p < last; p++) {
        int h = p / chunks, t = p % chunks * chunk, n = T - t < chunk ? T - t : chunk;
        const float *q = j->q + ((size_t)t * (size_t)H + (size_t)h) * (size_t)D;
        float *to = j->wide + (size_t)t * wide + (size_t)h * (size_t)(C + Dr);
        head_product(j, ith, l->wkb, h, q, (size_t)H * (size_t)D, n, to, wide);
        for (int i = 0; i < n; i++)
            memcpy(to + (size_t)i * wide + C, q + (size_t)i * (size_t)H * (size_t)D + Dn,
                   (size_t)Dr * sizeof(float));
    }
}

/* Tiles of queries: those of a sequence side by side, heads fastest. */
static int tiles_of(const struct latent_job *j, int seq)
{
    const int32_t *start = j->cb->batch.q_start;
    return ((start[seq + 1] - start[seq]) * j->l->n_heads + LATENT_ROWS - 1) / LATENT_ROWS;
}

static struct pool_work tiles_work(void *arg)
{
    struct latent_job *j = arg;
    j->n_tiles = 0;
    for (int seq = 0; seq < j->cb->batch.n_seqs; seq++)
        j->n_tiles += tiles_of(j, seq);
    return (struct pool_work){j->n_tiles, POOL_SINGLE};
}

/* Up to LATENT_ROWS queries, and what they have gathered. */
struct tile {
    int rows, last[LATENT_ROWS]; /* last: position of the query; -1 = it sees nothing */
    float *q[LATENT_ROWS];
    float out[LATENT_ROWS][CPU_MAX_LATENT], *o[LATENT_ROWS];
    float max[LATENT_ROWS], sum[LATENT_ROWS];
};

/* Scores become weights; scale: what the block multiplies older sums by. */
static void soften(struct tile *t, int first, float factor, float (*s)[LATENT_KEYS], float *scale)
{
    for (int r = 0; r < t->rows; r++) {
        float max = t->max[r];
        for (int j = 0; j < LATENT_KEYS; j++) {
            s[r][j] *= factor;
            if (first + j <= t->last[r] && s[r][j] > max)
                max = s[r][j];
        }
        scale[r] = exp2f(t->max[r] - max);
        t->sum[r] *= scale[r];
        for (int j = 0; j < LATENT_KEYS; j++) {
            s[r][j] = first + j <= t->last[r] ? exp2f(s[r][j] - max) : 0.0f;
            t->sum[r] += s[r][j];
        }
        t->max[r] = max;
    }
}

static void run_tile(const struct latent_job *j, int ith, int seq, struct tile *t)
{
    const struct cpu_backend *cb = j->cb;
    const struct latent_kernels *kn = latent_kernels(cb->isa);
    int C = j->l->kv_rank, width = C + j->l->rope_dim, len = cb->bounds.page_len, last = -1;
    const int32_t *pages = cb->batch.pages + (size_t)seq * (size_t)cb->batch.max_pages;
    float *k = gemm_tile(cb, ith, 1), s[LATENT_ROWS][LATENT_KEYS], scale[LATENT_ROWS];
    for (int r = 0; r < t->rows; r++) {
        last = t->last[r] > last ? t->last[r] : last;
        t->max[r] = -1e30f;
        t->sum[r] = 0;
        t->o[r] = t->out[r];
        memset(t->out[r], 0, (size_t)C * sizeof(float));
    }
    for (int first = 0; first <= last; first += LATENT_KEYS) {
        for (int i = 0; i < LATENT_KEYS; i++) { /* keys past the last are as good as zeros */
            int at = first + i;
            size_t slot =
                at > last ? 0 : (size_t)pages[at / len] * (size_t)len + (size_t)(at % len);
            if (at > last)
                memset(k + (size_t)i * (size_t)width, 0, (size_t)width * sizeof(float));
            else
                kn->load(cb->bounds.k_type, j->kv->k, slot * (size_t)width, width,
                         k + (size_t)i * (size_t)width);
        }
        kn->scores((const float *const *)t->q, t->rows, k, width, s);
        soften(t, first, j->l->scale * 1.44269504f, s, scale);
        kn->add(t->o, t->rows, scale, (const float(*)[LATENT_KEYS])s, k, width, C);
    }
    for (int r = 0; r < t->rows; r++) /* in the place of the query */
        for (int c = 0; c < C; c++)
            t->q[r][c] = t->sum[r] > 0 ? t->out[r][c] / t->sum[r] : 0.0f;
}

static void tiles_run(void *arg, int ith, int first, int last)
{
    const struct latent_job *j = arg;
    const struct batch *b = &j->cb->batch;
    int H = j->l->n_heads, width = j->l->kv_rank + j->l->rope_dim;
    for (int p = first; p < last; p++) {
        int seq = 0, at = p;
        while (at >= tiles_of(j, seq))
            at -= tiles_of(j, seq++);
        int begin = b->q_start[seq] * H + at * LATENT_ROWS, end = b->q_start[seq + 1] * H;
        struct tile t = {.rows = end - begin < LATENT_ROWS ? end - begin : LATENT_ROWS};
        for (int r = 0; r < t.rows; r++) {
            int token = (begin + r) / H;
            t.q[r] = j->wide + (size_t)(begin + r) * (size_t)width;
            t.last[r] = b->slot[token] < 0 ? -1 : b->pos[token];
        }
        run_tile(j, ith, seq, &t);
    }
}

static struct pool_work values_work(void *arg)
{
    const struct latent_job *j = arg;
    return (struct pool_work){j->l->n_heads * chunks_of(j, j->l->kv_rank), POOL_EVEN};
}

static void values_run(void *arg, int ith, int first, int last)
{
    const struct latent_job *j = arg;
    const struct latent *l = j->l;
    int H = l->n_heads, C = l->kv_rank, T = j->cb->batch.n_tokens;
    int chunks = chunks_of(j, C), chunk = chunk_of(C);
    size_t wide = (size_t)H * (size_t)(C + l->rope_dim), out = (size_t)H * (size_t)l->v_dim;
    for (int p = first; p < last; p++) {
        int h = p / chunks, t = p % chunks * chunk, n = T - t < chunk ? T - t : chunk;
        head_product(j, ith, l->wvb, h,
                     j->wide + (size_t)t * wide + (size_t)h * (size_t)(C + l->rope_dim), wide, n,
                     j->a + (size_t)t * out + (size_t)h * (size_t)l->v_dim, out);
    }
}

void cpu_latent(struct cpu_backend *cb, const struct latent *l, const struct kv_layer *kv,
                const float *rope, float *q, float *low, float *wide, float *a)
{
    static const struct pool_phase phases[] = {{tokens_work, tokens_run},
                                               {queries_work, queries_run},
                                               {tiles_work, tiles_run},
                                               {values_work, values_run}};
    struct latent_job j = {
        .cb = cb, .l = l, .kv = kv, .rope = rope, .q = q, .low = low, .wide = wide, .a = a};
    gemm_start(cb->gemm);
    gemm_count(cb, l->wkb->impl, cb->batch.n_tokens, false);
    gemm_count(cb, l->wvb->impl, cb->batch.n_tokens, false);
    pool_phases(cb->pool, phases, 4, &j);
}
