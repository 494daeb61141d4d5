/*
 * Attention between projection and scores: per-head norm, RoPE, and the append of k and v to the paged
 * pool. RoPE reads the step's table of cosines and sines, which is computed once in begin and shared by
 * all layers. Owns the layout of a pool tile (ops.h). Work is split by token: every output belongs to one
 * token.
 */
#include "backend/cpu/kvtile.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"
#include "backend/cpu/rowops.h"
#include "base/os.h"

#include <math.h>
#include <string.h>

enum {
    TOKEN_RUN = 16
}; /* tokens a thread takes together: a page, so that no two threads write the same cache lines */

struct rope_job {
    const struct rope *rope;
    const struct batch *b;
    float *table;
};

static void rope_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct rope_job *j = arg;
    int half = j->rope->n_rot / 2;
    const uint8_t *plane = j->b->rope_pos ? j->rope->plane : NULL;
    for (int t = first; t < last; t++) {
        float *row = j->table + (size_t)t * (size_t)j->rope->n_rot;
        for (int i = 0; i < half; i++) {
            /* The angle is a float product, as in the reference implementations. The rest is in
             * double. */
            int pos = plane ? j->b->rope_pos[3 * t + plane[i]] : j->b->pos[t];
            float angle = (float)pos * j->rope->freq[i];
            double sine, cosine;
            os_sincos((double)angle, &sine, &cosine);
            row[i] = (float)cosine * j->rope->mscale;
            row[half + i] = (float)sine * j->rope->mscale;
        }
    }
}

void cpu_rope_table(const struct rope *rope, const struct batch *b, float *table, struct pool *pool)
{
    struct rope_job j = {rope, b, table};
    if (pick_single_thread(SMALL_ROPE, (size_t)b->n_tokens * (size_t)rope->n_rot))
        rope_rows(&j, 0, 0, b->n_tokens);
    else
        pool_each(pool, b->n_tokens, POOL_EVEN, rope_rows, &j);
}

struct post_job {
    const struct bounds *s;
    const struct batch *b;
    const struct attention *l;
    const struct kv_layer *kv;
    const float *rope; /* (n_tokens, n_rot) */
    float *qkv, *q;    /* (n_tokens, width), (n_tokens, H * D) */
    float *rel;        /* (n_tokens, H * R) of relative positions */
    const struct row_kernels *kernels;
    int run;      /* tokens of a piece */
    size_t width; /* of the projection */
};

/* Norm and RoPE of n heads of D, `stride` apart (norm_whole: contiguous), to contiguous heads. `to`
 * may be `from`. */
static void finish_heads(const struct post_job *j, const struct norm *norm, const float *rope,
                         float *from, int n, int D, size_t stride, float *to)
{
    static const struct norm none = {NORM_NONE, NULL, NULL, 0};
    const struct attention *l = j->l;
    int n_rot = rope ? l->rope->n_rot : 0;
    if (l->norm_whole && norm->kind != NORM_NONE) {
        j->kernels->add_norm(from, NULL, norm, from, n * D);
        norm = &none;
    }
    bool late = l->norm_late && n_rot;
    for (int h = 0; h < n; h++) {
        float *head = to + (size_t)h * (size_t)D;
        j->kernels->head(from + (size_t)h * stride, late ? &none : norm, rope, n_rot, D, head);
        if (late)
            j->kernels->head(head, norm, NULL, 0, D, head);
    }
}

static void post_token(const struct post_job *j, int t)
{
    const struct bounds *s = j->s;
    const struct attention *l = j->l;
    int D = l->k_dim, Dv = l->v_dim, H = l->n_heads, K = l->n_kv_heads;
    int n_rot = l->rope ? l->rope->n_rot : 0;
    size_t dim = (size_t)D, v_dim = (size_t)Dv, page_len = (size_t)s->page_len;
    const float *rope = n_rot ? j->rope + (size_t)t * (size_t)n_rot : NULL;
    size_t each = l->gated ? 2 : 1; /* each query head is followed by its gate */
    float *qkv = j->qkv + (size_t)t * j->width;
    float *q = j->q + (size_t)(t * H) * dim, *key = qkv + (size_t)H * each * dim;
    finish_heads(j, &l->q_norm, rope, qkv, H, D, each * dim, q);
    if (l->temp_beta != 0) {
        double n = (double)(j->b->pos[t] + 1) / l->temp_len;
        double warm = l->temp_smooth
                          ? (n > 1 ? n : 1)
                          : 1.0 + floor((double)(j->b->pos[t] + l->temp_offset) / l->temp_len);
        float temperature = 1 + l->temp_beta * (float)log(warm);
        for (size_t i = 0; i < (size_t)H * dim; i++)
            q[i] *= temperature;
        size_t rel = l->wrel ? (size_t)(H * l->rel_dim) : 0;
        for (size_t i = 0; i < rel; i++)
            j->rel[(size_t)t * rel + i] *= temperature;
    }
    for (int h = 0; h < H && kv_turned(s->k_type); h++)
        j->kernels->turn(q + (size_t)h * dim, D);
    int slot = j->b->slot[t];
    if (slot < 0 || l->shares_kv)
        return;
    float *value = key + (size_t)K * dim;
    if (l->k_is_v) { /* the queries have already been copied out of it */
        value = qkv;
        memcpy(value, key, (size_t)K * dim * sizeof(float));
    }
    finish_heads(j, &l->k_norm, rope, key, K, D, dim,
                 key); /* in place: qkv is the mixer's scratch */
    if (l->v_norm.kind != NORM_NONE)
        finish_heads(j, &l->v_norm, NULL, value, K, Dv, v_dim, value);
    size_t page = (size_t)slot / page_len, off = (size_t)slot % page_len;
    for (int h = 0; h < K; h++, key += dim, value += v_dim) {
        size_t tile = page * (size_t)K + (size_t)h;
        char *k = (char *)j->kv->k + tile * kv_tile_bytes(s->k_type, page_len, dim);
        char *v = (char *)j->kv->v + tile * kv_tile_bytes(s->v_type, page_len, v_dim);
        if (kv_turned(s->k_type))
            j->kernels->turn(key, D);
        if (kv_turned(s->v_type))
            j->kernels->turn(value, Dv);
        j->kernels->store_head(s->k_type, key, D, k, true, s->page_len, (int)off);
        j->kernels->store_head(s->v_type, value, Dv, v, false, s->page_len, (int)off);
    }
}

static void post_tokens(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct post_job *j = arg;
    int end = last * j->run < j->b->n_tokens ? last * j->run : j->b->n_tokens;
    for (int t = first * j->run; t < end; t++)
        post_token(j, t);
}

void cpu_attn_post(const struct bounds *s, const struct batch *b, const struct attention *l,
                   const struct kv_layer *kv, const float *rope, float *qkv, float *q, float *rel,
                   struct pool *pool, enum isa isa)
{
    int run = b->n_tokens >= 2 * pool_size(pool) * TOKEN_RUN ? TOKEN_RUN : 1;
    int n = (b->n_tokens + run - 1) / run;
    int H = l->n_heads, K = l->n_kv_heads;
    int width = H * (l->k_dim + (l->gated ? l->v_dim : 0)) + (l->shares_kv ? 0 : K * l->k_dim) +
                (l->shares_kv || l->k_is_v ? 0 : K * l->v_dim);
    struct post_job j = {s, b, l, kv, rope, qkv, q, rel, row_kernels(isa), run, (size_t)width};
    size_t work = (size_t)b->n_tokens * (size_t)(l->n_heads + 2 * l->n_kv_heads) * (size_t)l->k_dim;
    if (b->n_tokens < 2 || pick_single_thread(SMALL_POST, work))
        post_tokens(&j, 0, 0, n);
    else
        pool_each(pool, n, POOL_EVEN, post_tokens, &j);
}
