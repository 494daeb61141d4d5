/*
 * The mixture of experts: router, top-k, tokens sorted by expert, gate and up of every expert in one
 * pass over its rows, then the down projection by output rows, which adds the experts of a token in
 * ascending order and needs no buffer of partial results. One job of six phases. Owns the routing
 * tables.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/tier.h"
#include "base/mem.h"
#include "base/range.h"

#include <math.h>
#include <string.h>

enum { GUESS_ROWS = 4 }; /* with more rows, too many experts are chosen */
#define SAME_MEMBER 1ull /* the member of a comm that adds experts without weights, as a bit */

struct moe_state {
    float *logits;       /* (max_tokens, n_expert) */
    float *keys;         /* (max_tokens, n_expert) keys that experts are chosen by */
    int32_t *chosen;     /* (max_tokens, n_used) experts of a token, ascending */
    float *weights;      /* (max_tokens, n_used) */
    int32_t *start;      /* (n_expert + 1) first slot of each expert */
    int32_t *slot_token; /* (max_tokens * n_used) token of a slot: slots are sorted by expert */
    float *slot_weight;  /* (max_tokens * n_used) */
    int32_t *active;     /* (n_active) experts with tokens, ascending */
    int n_active;
    int32_t *lora_first[2]; /* (n_expert + 1) an expert's first chunk of gate and up, of down */
    /* With a tier: experts that the next layer will probably choose. */
    struct moe_guess {
        const struct mlp *next; /* NULL = nothing is guessed */
        float *x;               /* (GUESS_ROWS, E) normed rows */
        float *keys;            /* (2 * n_expert) */
        int32_t *experts;       /* (n) of (GUESS_ROWS * n_used) */
        float *weights;         /* (n_used) */
        int n;
    } guess;
    uint64_t *members; /* (max_tokens) processes that have experts of a token, a bit each */
};

bool moe_init(struct cpu_backend *cb, struct error *err)
{
    (void)err;
    const struct network_max *max = &cb->max;
    if (max->n_expert == 0)
        return true;
    struct moe_state *m = mem_zalloc(1, sizeof *m);
    size_t tokens = (size_t)cb->bounds.max_tokens, slots = tokens * (size_t)max->n_expert_used;
    m->logits = mem_zalloc(tokens * (size_t)max->n_expert, sizeof(float));
    m->keys = mem_zalloc(tokens * (size_t)max->n_expert, sizeof(float));
    m->chosen = mem_zalloc(slots, sizeof(int32_t));
    m->weights = mem_zalloc(slots, sizeof(float));
    m->start = mem_zalloc((size_t)max->n_expert + 1, sizeof(int32_t));
    m->slot_token = mem_zalloc(slots, sizeof(int32_t));
    m->slot_weight = mem_zalloc(slots, sizeof(float));
    m->active = mem_zalloc((size_t)max->n_expert, sizeof(int32_t));
    for (int i = 0; i < 2; i++)
        m->lora_first[i] = mem_zalloc((size_t)max->n_expert + 1, sizeof(int32_t));
    m->members = mem_zalloc(tokens, sizeof *m->members);
    if (cb->tier) {
        m->guess.x = mem_zalloc((size_t)GUESS_ROWS * (size_t)cb->net->n_embd, sizeof(float));
        m->guess.keys = mem_zalloc(2 * (size_t)max->n_expert, sizeof(float));
        m->guess.experts =
            mem_zalloc((size_t)GUESS_ROWS * (size_t)max->n_expert_used, sizeof(int32_t));
        m->guess.weights = mem_zalloc((size_t)max->n_expert_used, sizeof(float));
    }
    cb->gemm->moe = m;
    return true;
}

void moe_clear(struct cpu_backend *cb)
{
    struct moe_state *m = cb->gemm->moe;
    if (!m)
        return;
    void *owned[] = {m->logits,        m->keys,          m->chosen,        m->weights,
                     m->start,         m->slot_token,    m->slot_weight,   m->active,
                     m->lora_first[0], m->lora_first[1], m->members,       m->guess.x,
                     m->guess.keys,    m->guess.experts, m->guess.weights, m};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

struct moe_job {
    struct cpu_backend *cb;
    const struct router *rule;
    const struct ffn *experts;
    int n_expert, used; /* of this layer */
    int first, n_here;  /* experts of this process; weights start with the first */
    const struct gemm_weight *router, *gate_up, *down;
    struct gemm_source to_router;
    struct gemm_source in; /* of the experts; as bf16 its rows lie in the order of slots */
    struct gemm_x hidden;
    float *y;
    int rows;
    int from, to;   /* this round's part of the active experts */
    int64_t routed; /* clock when the experts began, for the profile */
    struct lora_work lora_router, lora, lora_down; /* of gate and up; of down */
};

static int best_of(const float *keys, int n)
{
    int best = 0;
    for (int e = 1; e < n; e++)
        if (keys[e] > keys[best])
            best = e;
    return best;
}

/* Masks experts outside the best groups with -inf. A group's score is the sum of its two largest keys. */
static void keep_groups(const struct router *r, float *keys, int n)
{
    float score[MOE_MAX_GROUPS] = {0};
    int each = n / r->n_groups;
    CHECK(each > 0, "%d experts in %d groups", n, r->n_groups);
    for (int g = 0; g < r->n_groups; g++) {
        float *k = keys + g * each;
        int first = best_of(k, each);
        float high = k[first], second = -INFINITY;
        for (int e = 0; e < each; e++)
            if (e != first && k[e] > second)
                second = k[e];
        score[g] = each > 1 ? high + second : high;
    }
    bool kept[MOE_MAX_GROUPS] = {false};
    for (int i = 0; i < r->n_groups_used; i++) {
        int best = best_of(score, r->n_groups);
        kept[best] = true;
        score[best] = -INFINITY;
    }
    for (int e = 0; e < n; e++)
        if (!kept[e / each])
            keys[e] = -INFINITY;
}

/* Computes the keys that experts are chosen by. The router's logits l become the unnormalised p of layer.h; their sum is
 * returned. */
static float rate(const struct router *r, float *l, float *keys, int n)
{
    float max = -INFINITY, total = 0.0f;
    if (r->kind == ROUTER_SIGMOID)
        for (int e = 0; e < n; e++)
            l[e] = 1.0f / (1.0f + expf(-l[e]));
    if (r->kind == ROUTER_SOFTPLUS)
        for (int e = 0; e < n; e++)
            l[e] = sqrtf(l[e] > 20.0f ? l[e] : log1pf(expf(l[e])));
    for (int e = 0; e < n; e++)
        max = l[e] > max ? l[e] : max;
    for (int e = 0; r->kind == ROUTER_SOFTMAX && e < n; e++)
        total += l[e] = expf(l[e] - max);
    for (int e = 0; e < n; e++) /* a bias is one of p itself */
        keys[e] = r->choice_bias ? (total > 0 ? l[e] / total : l[e]) + r->choice_bias[e] : l[e];
    if (r->n_groups > 1)
        keep_groups(r, keys, n);
    return total > 0 ? total : 1;
}

/* The weight of expert e, chosen by SparseMixer. keys: -inf where an expert was chosen before. */
static float sparse_weight(const struct router *r, const float *l, const float *keys, int n, int e)
{
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        float size = fabsf(l[i]) > l[e] ? fabsf(l[i]) : l[e];
        if (keys[i] != -INFINITY && l[e] - l[i] <= 2 * r->jitter * size)
            total += expf(l[i] - l[e]);
    }
    return 1.0f / total;
}

/* The best n_used experts of row t of the stream (ties: lower index) in ascending order, with their weights. */
static void choose(const struct moe_job *j, int t, float *p, float *keys, int32_t *chosen,
                   float *weights)
{
    const struct router *r = j->rule;
    const struct batch *b = &j->cb->batch;
    int token = r->by_token ? b->tokens[j->cb->stream.narrow ? b->out_rows[t] : t] : 0;
    token = token < j->cb->net->n_vocab ? token : 0;
    int n = j->n_expert, used = j->used;
    float total = rate(r, p, keys, n), kept = 0.0f, top = -INFINITY;
    for (int k = 0; k < used; k++) {
        int best = r->by_token ? (int)r->by_token[(size_t)token * (size_t)used + (size_t)k]
                               : best_of(keys, n);
        int at = k;
        /* A chosen expert cannot be the best again unless no other is left. */
        for (; at > 0 && chosen[at - 1] > best; at--) {
            chosen[at] = chosen[at - 1];
            weights[at] = weights[at - 1];
        }
        chosen[at] = best;
        weights[at] = r->kind == ROUTER_SPARSE_MIXER ? sparse_weight(r, p, keys, n, best) : p[best];
        top = p[best] > top ? p[best] : top;
        keys[best] = -INFINITY;
    }
    for (int k = 0; r->kind == ROUTER_SOFTMAX_TOP && k < used; k++)
        weights[k] = expf(weights[k] - top);
    for (int k = 0; k < used; k++)
        kept += weights[k];
    float scale = r->scale == 0 ? 1.0f : r->scale;
    bool renorm = r->renorm || r->kind == ROUTER_SOFTMAX_TOP;
    for (int k = 0; k < used; k++) {
        weights[k] = weights[k] / (renorm ? kept : total) * scale;
        if (r->expert_scale)
            weights[k] *= r->expert_scale[chosen[k]];
    }
}

static bool is_here(const struct moe_job *j, int expert)
{
    return expert >= j->first && expert < j->first + j->n_here;
}

/* Counting sort of (token, expert) pairs by expert; tokens stay in order within one. */
static void sort_slots(const struct moe_job *j)
{
    struct moe_state *m = j->cb->gemm->moe;
    int used = j->used;
    int n = j->rows * used, slots = 0;
    memset(m->start, 0, ((size_t)j->n_here + 1) * sizeof *m->start);
    for (int i = 0; i < n; i++)
        if (is_here(j, m->chosen[i]))
            m->start[m->chosen[i] - j->first + 1]++;
    m->n_active = 0;
    for (int e = 0; e < j->n_here; e++) {
        if (m->start[e + 1])
            m->active[m->n_active++] = e;
        m->start[e + 1] += m->start[e];
    }
    for (int i = 0; i < n; i++) {
        if (!is_here(j, m->chosen[i]))
            continue;
        int slot = m->start[m->chosen[i] - j->first]++;
        m->slot_token[slot] = i / used;
        m->slot_weight[slot] = m->weights[i];
        slots++;
    }
    for (; slots < n; slots++)
        m->slot_token[slots] = 0; /* past the last slot: read, but not used */
    for (int e = j->n_here; e > 0; e--)
        m->start[e] = m->start[e - 1];
    m->start[0] = 0;
}

/* The router's input */

static struct pool_work router_input(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){j->to_router.n_pieces + j->lora_router.n_units, POOL_EVEN};
}

static void router_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct moe_job *j = arg;
    int n = j->to_router.n_pieces;
    if (first < n)
        gemm_convert(j->cb, &j->to_router, first, last < n ? last : n);
    if (last > n)
        cpu_lora_low(j->cb, &j->lora_router, j->to_router.from, j->router->n_in, false,
                     first > n ? first - n : 0, last - n);
}

/* The router: units of (rows of the batch, experts), so that one token and many both spread. */

static int router_units(const struct moe_job *j)
{
    return (j->n_expert + GEMM_UNIT - 1) / GEMM_UNIT;
}

static struct pool_work router_product(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){(j->rows + GEMM_CHUNK - 1) / GEMM_CHUNK * router_units(j), POOL_EVEN};
}

static void router_multiply(void *arg, int ith, int first, int last)
{
    const struct moe_job *j = arg;
    int n_expert = j->n_expert, per_chunk = router_units(j);
    for (int u = first; u < last; u++) {
        int t = u / per_chunk * GEMM_CHUNK, r0 = u % per_chunk * GEMM_UNIT;
        int r1 = r0 + GEMM_UNIT < n_expert ? r0 + GEMM_UNIT : n_expert;
        int n = j->rows - t < GEMM_CHUNK ? j->rows - t : GEMM_CHUNK;
        struct gemm_x part = gemm_x_at(j->to_router.x, t);
        float *to = j->cb->gemm->moe->logits + (size_t)t * (size_t)n_expert + r0;
        gemm_block(j->cb, ith, j->router, 0, r0, r1, &part, NULL, n, to, (size_t)n_expert);
        cpu_lora_up(j->cb, &j->lora_router, 0, j->lora_router.n_chunks, t, n, r0, r1, to,
                    (size_t)n_expert);
    }
}

/* Chooses experts, a piece per token; then converts the experts' inputs if they do not depend on the choice. */

static struct pool_work choice(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){j->rows + (j->in.x.h ? 0 : j->in.n_pieces), POOL_EVEN};
}

static void choice_make(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct moe_job *j = arg;
    const struct moe_state *m = j->cb->gemm->moe;
    for (int t = first; t < last && t < j->rows; t++)
        choose(j, t, m->logits + (size_t)t * (size_t)j->n_expert,
               m->keys + (size_t)t * (size_t)j->n_expert, m->chosen + (size_t)t * (size_t)j->used,
               m->weights + (size_t)t * (size_t)j->used);
    first = first > j->rows ? first - j->rows : 0;
    if (first < last - j->rows)
        gemm_convert(j->cb, &j->in, first, last - j->rows);
}

/* Sorts tokens by expert; bf16 inputs are stored in that order. */

static int convert_pieces(const struct moe_job *j)
{
    return j->in.x.h ? j->in.n_pieces : 0;
}

static struct pool_work expert_input(void *arg)
{
    struct moe_job *j = arg;
    const struct moe_state *m = j->cb->gemm->moe;
    sort_slots(j);
    j->to = m->n_active;
    j->lora = cpu_lora_experts(j->cb, j->experts->gate_up, LORA_FIRST, m->start, m->slot_token,
                               m->lora_first[0]);
    j->lora_down = cpu_lora_experts(j->cb, j->experts->down, LORA_SECOND, m->start, m->slot_token,
                                    m->lora_first[1]);
    if (j->lora_down.n_chunks)
        j->hidden.x = j->cb->gemm->hidden; /* as floats too */
    j->routed = clock_ns();
    return (struct pool_work){convert_pieces(j) + j->lora.n_units, POOL_EVEN};
}

static void expert_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct moe_job *j = arg;
    int n = convert_pieces(j);
    if (first < n)
        gemm_convert(j->cb, &j->in, first, last < n ? last : n);
    if (last > n)
        cpu_lora_low(j->cb, &j->lora, j->in.from, j->gate_up->n_in, false,
                     first > n ? first - n : 0, last - n);
}

/* y[token, r0..r1) += weight * (hidden . down rows) for n slots of expert e */
static void down_block(const struct moe_job *j, int ith, int e, const struct gemm_x *hidden, int s0,
                       int n, int r0, int r1)
{
    const struct moe_state *m = j->cb->gemm->moe;
    float *tile = gemm_tile(j->cb, ith, 0);
    gemm_block(j->cb, ith, j->down, e, r0, r1, hidden, NULL, n, tile, (size_t)(r1 - r0));
    if (j->lora_down.n_chunks)
        cpu_lora_up(j->cb, &j->lora_down, m->lora_first[1][e], m->lora_first[1][e + 1], s0, n, r0,
                    r1, tile, (size_t)(r1 - r0));
    for (int i = 0; i < n; i++) {
        float *y = j->y + (size_t)m->slot_token[s0 + i] * (size_t)j->down->n_out + r0;
        float weight = j->rule->weighs_input ? 1 : m->slot_weight[s0 + i];
        const float *part = tile + (size_t)i * (size_t)(r1 - r0);
        for (int c = 0; c < r1 - r0; c++)
            y[c] += weight * part[c];
    }
}

/* y[:, begin..end) = sum over experts, ascending; over rounds, too */
static void down_range(const struct moe_job *j, int ith, int begin, int end)
{
    const struct moe_state *m = j->cb->gemm->moe;
    for (int t = 0; !j->from && t < j->rows; t++)
        memset(j->y + (size_t)t * (size_t)j->down->n_out + begin, 0,
               (size_t)(end - begin) * sizeof(float));
    for (int a = j->from; a < j->to; a++) {
        int e = m->active[a], s1 = m->start[e + 1], most = gemm_most(&j->hidden);
        for (int s0 = m->start[e]; s0 < s1; s0 += most) {
            int n = s1 - s0 < most ? s1 - s0 : most,
                step = gemm_width(j->cb, j->down, n, j->hidden.h != NULL);
            struct gemm_x h = gemm_x_at(j->hidden, s0);
            for (int r0 = begin; r0 < end; r0 += step)
                down_block(j, ith, e, &h, s0, n, r0, r0 + step < end ? r0 + step : end);
        }
    }
}

/* Hidden dimensions [h0, end) of expert e for all its tokens. */
static void glu_range(const struct moe_job *j, int ith, int e, int h0, int end)
{
    const struct moe_state *m = j->cb->gemm->moe;
    const struct gemm_x *x = &j->in.x;
    int s0 = m->start[e], s1 = m->start[e + 1], most = gemm_most(x);
    int step = gemm_width(j->cb, j->gate_up, s1 - s0, x->h != NULL);
    bool adapted = j->lora.n_chunks > 0;
    int c0 = adapted ? m->lora_first[0][e] : 0, c1 = adapted ? m->lora_first[0][e + 1] : 0;
    for (int s = s0; s < s1; s += most) {
        struct gemm_x slots = gemm_x_at(*x, s);
        for (int h = h0; h < end; h += step)
            gemm_glu_block(j->cb, ith, j->experts, &j->hidden, e, h,
                           h + step < end ? h + step : end, x->h ? &slots : x,
                           x->h ? NULL : m->slot_token + s,
                           j->rule->weighs_input ? m->slot_weight : NULL,
                           s1 - s < most ? s1 - s : most, s, &j->lora, c0, c1);
    }
}

/* How units of w are claimed, by the tokens that an expert meets on average. */
static enum pool_cut cut(const struct moe_job *j, const struct gemm_weight *w)
{
    int n_active = j->cb->gemm->moe->n_active, slots = j->rows * j->used;
    n_active = n_active > 0 ? n_active : 1;
    return gemm_cut(j->cb, w, (slots + n_active - 1) / n_active);
}

static struct pool_work expert_hidden(void *arg)
{
    const struct moe_job *j = arg;
    int per_expert = (j->down->n_in + GEMM_UNIT - 1) / GEMM_UNIT;
    return (struct pool_work){(j->to - j->from) * per_expert, cut(j, j->gate_up)};
}

static void expert_glu(void *arg, int ith, int first, int last)
{
    const struct moe_job *j = arg;
    int n_ff = j->down->n_in, per_expert = (n_ff + GEMM_UNIT - 1) / GEMM_UNIT;
    for (int u = first; u < last;) {
        /* The rest of the range in this expert, as wide as its tokens allow. */
        int e = j->cb->gemm->moe->active[j->from + u / per_expert], in = u % per_expert;
        int n_units = per_expert - in < last - u ? per_expert - in : last - u;
        int end = (in + n_units) * GEMM_UNIT < n_ff ? (in + n_units) * GEMM_UNIT : n_ff;
        glu_range(j, ith, e, in * GEMM_UNIT, end);
        u += n_units;
    }
}

/* With adapters: down's A of the hidden rows. */

static struct pool_work expert_between(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){j->lora_down.n_units, POOL_EVEN};
}

static void expert_low(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct moe_job *j = arg;
    cpu_lora_low(j->cb, &j->lora_down, j->cb->gemm->hidden, j->down->n_in, true, first, last);
}

static struct pool_work expert_output(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){(j->down->n_out + GEMM_UNIT - 1) / GEMM_UNIT, cut(j, j->down)};
}

static void expert_down(void *arg, int ith, int first, int last)
{
    const struct moe_job *j = arg;
    int n_out = j->down->n_out;
    down_range(j, ith, first * GEMM_UNIT, last * GEMM_UNIT < n_out ? last * GEMM_UNIT : n_out);
}

const uint64_t *moe_members(struct cpu_backend *cb, const struct mlp *l, int rows, int n_members)
{
    const struct moe_state *m = cb->gemm->moe;
    int n = router_experts(&l->router), used = l->router.n_used;
    for (int i = 0; i < rows; i++) {
        m->members[i] = 0;
        for (int k = 0; k < used; k++) {
            int e = m->chosen[i * used + k];
            m->members[i] |= e < n ? 1ull << range_owner(n, 1, e, n_members) : SAME_MEMBER;
        }
    }
    return m->members;
}

struct same_job {
    const struct moe_state *m;
    const float *x;
    float *y;
    int first, used, width; /* first: of the experts without weights */
};

static void same_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct same_job *j = arg;
    for (int t = first; t < last; t++) {
        const float *x = j->x + (size_t)t * (size_t)j->width;
        float *y = j->y + (size_t)t * (size_t)j->width, weight = 0;
        for (int k = t * j->used; k < (t + 1) * j->used; k++)
            weight += j->m->chosen[k] >= j->first ? j->m->weights[k] : 0;
        for (int i = 0; weight != 0 && i < j->width; i++)
            y[i] += weight * x[i];
    }
}

void moe_add_same(struct cpu_backend *cb, const struct mlp *l, const float *x, float *y, int rows)
{
    struct same_job j = {cb->gemm->moe,  x, y, router_experts(&l->router), l->router.n_used,
                         cb->net->n_embd};
    const struct comm *c = cb->base.comm;
    if (l->router.n_same && (!l->experts_partial || !c || 1ull << c->index == SAME_MEMBER))
        pool_each(cb->pool, rows, POOL_EVEN, same_rows, &j);
}

/* With a tier */

/* Requests, waits for and releases the experts of a round, of those weights that have a tier. */
static void request_round(const struct moe_job *j, int from, int to)
{
    const struct gemm_weight *both[] = {j->gate_up, j->down};
    for (int i = 0; i < 2; i++)
        if (both[i]->tier)
            tier_request(j->cb->tier, both[i], j->cb->gemm->moe->active + from, to - from);
}

static bool wait_round(const struct moe_job *j)
{
    const struct gemm_weight *both[] = {j->gate_up, j->down};
    bool ok = true;
    for (int i = 0; i < 2; i++)
        if (both[i]->tier)
            ok &= tier_wait(j->cb->tier, both[i], j->cb->gemm->moe->active + j->from,
                            j->to - j->from);
    return ok;
}

static void release_round(const struct moe_job *j)
{
    const struct gemm_weight *both[] = {j->gate_up, j->down};
    for (int i = 0; i < 2; i++)
        if (both[i]->tier)
            tier_release(j->cb->tier, both[i], j->cb->gemm->moe->active + j->from, j->to - j->from);
}

static int round_size(const struct moe_job *j)
{
    int a = j->gate_up->tier ? tier_round(j->gate_up) : j->n_here;
    int b = j->down->tier ? tier_round(j->down) : j->n_here;
    return a < b ? a : b;
}

static void read_ahead(const struct moe_job *j)
{
    struct moe_guess *g = &j->cb->gemm->moe->guess;
    if (!g->next)
        return;
    const struct gemm_weight *both[] = {g->next->experts.gate_up->impl,
                                        g->next->experts.down->impl};
    for (int i = 0; i < 2; i++)
        if (both[i]->tier)
            tier_ahead(j->cb->tier, both[i], g->experts, g->n);
    g->next = NULL;
}

/* Computes the active experts in rounds. While one is computed the next is read. */
static void run_rounds(struct moe_job *j, const struct pool_phase *phases, int n_phases)
{
    struct cpu_backend *cb = j->cb;
    int n = cb->gemm->moe->n_active, step = round_size(j);
    bool ok = !cb->base.failure;
    j->from = 0;
    j->to = step < n ? step : n;
    request_round(j, 0, j->to);
    for (;;) {
        int end = j->to + step < n ? j->to + step : n;
        if (end > j->to)
            request_round(j, j->to, end);
        else
            read_ahead(j);
        ok &= wait_round(j);
        if (ok)
            pool_phases(cb->pool, phases, n_phases, j);
        release_round(j);
        if (end == j->to)
            break;
        j->from = j->to;
        j->to = end;
    }
    if (!ok && !cb->base.failure) {
        error_set(&cb->failed, "experts cannot be read from the model's file: it was truncated, or "
                               "its disk fails");
        cb->base.failure = &cb->failed;
    }
}

void moe_look_ahead(struct cpu_backend *cb, const struct mlp *next, const float *x, int rows)
{
    struct moe_guess *g = &cb->gemm->moe->guess;
    const struct gemm_weight *router = next->router.w ? next->router.w->impl : NULL;
    g->next = NULL;
    if (!router || rows > GUESS_ROWS || router->wants_q || next->experts_in.kind != NORM_NONE ||
        next->router.norm.kind != NORM_NONE || next->block.in.kind == NORM_NONE ||
        (!((const struct gemm_weight *)next->experts.gate_up->impl)->tier &&
         !((const struct gemm_weight *)next->experts.down->impl)->tier))
        return;
    int E = cb->net->n_embd, n = router->n_out, used = next->router.n_used;
    struct moe_job j = {.cb = cb, .rule = &next->router, .n_expert = n, .used = used};
    float *keys = g->keys + n;
    memcpy(g->x, x, (size_t)rows * (size_t)E * sizeof *x);
    cpu_norm_alone(&next->block.in, g->x, rows, E, cb->isa);
    g->n = 0;
    for (int t = 0; t < rows; t++) {
        struct gemm_x in = {.n_in = E, .x = g->x + (size_t)t * (size_t)E};
        gemm_block(cb, 0, router, 0, 0, n, &in, NULL, 1, g->keys, (size_t)n);
        choose(&j, t, g->keys, keys, g->experts + g->n, g->weights);
        g->n += used;
    }
    g->next = next;
}

void moe_run(struct cpu_backend *cb, const struct mlp *l, const float *router_x, const float *x,
             float *y, int rows)
{
    static const struct pool_phase phases[] = {
        {router_input, router_convert}, {router_product, router_multiply},
        {choice, choice_make},          {expert_input, expert_convert},
        {expert_hidden, expert_glu},    {expert_output, expert_down}};
    static const struct pool_phase adapted[] = {
        {router_input, router_convert}, {router_product, router_multiply},
        {choice, choice_make},          {expert_input, expert_convert},
        {expert_hidden, expert_glu},    {expert_between, expert_low},
        {expert_output, expert_down}};
    if (rows == 0)
        return;
    const struct moe_state *m = cb->gemm->moe;
    const struct gemm_weight *router = l->router.w->impl;
    const struct gemm_weight *gate_up = l->experts.gate_up->impl, *down = l->experts.down->impl;
    int used = l->router.n_used, load = rows * used / router->n_out;
    gemm_start(cb->gemm);
    struct moe_job j = {.cb = cb,
                        .rule = &l->router,
                        .experts = &l->experts,
                        .n_expert = router->n_out,
                        .first = l->expert_first,
                        .n_here = gate_up->n_expert,
                        .used = used,
                        .router = router,
                        .gate_up = gate_up,
                        .down = down,
                        /* not as bf16: the choice depends on the last bits */
                        .to_router = gemm_source(cb, router, router_x, rows, false),
                        .in = gemm_takes_bf16(cb, gate_up, load)
                                  ? gemm_source_ordered(cb, gate_up, x, m->slot_token, rows * used)
                                  : gemm_source(cb, gate_up, x, rows, false),
                        .hidden = gemm_hidden(cb, down, gemm_takes_bf16(cb, down, load)),
                        .y = y,
                        .rows = rows,
                        .lora_router = cpu_lora_work(cb, l->router.w, LORA_FIRST)};
    j.to_router.x.stamp = 0; /* its place is reused for the experts' input */
    gemm_count(cb, router, rows, j.to_router.x.h != NULL);
    gemm_count(cb, gate_up, load, j.in.x.h != NULL);
    gemm_count(cb, down, load, j.hidden.h != NULL);
    int64_t begin = clock_ns();
    enum { ROUTING = 4 }; /* phases before the experts */
    bool is_adapted = cpu_lora_changes(cb, l->experts.down);
    if (gate_up->tier || down->tier) {
        pool_phases(cb->pool, phases, ROUTING, &j);
        run_rounds(&j, is_adapted ? adapted + ROUTING : phases + ROUTING, is_adapted ? 3 : 2);
    } else if (is_adapted)
        pool_phases(cb->pool, adapted, (int)(sizeof adapted / sizeof *adapted), &j);
    else
        pool_phases(cb->pool, phases, (int)(sizeof phases / sizeof *phases), &j);
    struct profile *p = cb->base.profile;
    if (p) {
        p->ns[p->phase][STAGE_ROUTER] += (double)(j.routed - begin);
        p->ns[p->phase][STAGE_EXPERTS] += (double)(clock_ns() - j.routed);
    }
}

/* Experts that another backend's router chose */

static struct pool_work given_input(void *arg)
{
    const struct moe_job *j = arg;
    return (struct pool_work){j->in.x.h ? 0 : j->in.n_pieces, POOL_EVEN};
}

static void given_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct moe_job *j = arg;
    gemm_convert(j->cb, &j->in, first, last);
}

void moe_run_given(struct cpu_backend *cb, const struct mlp *l, const int32_t *chosen,
                   const float *weights, int used, const float *x, float *y, int rows)
{
    static const struct pool_phase phases[] = {{given_input, given_convert},
                                               {expert_input, expert_convert},
                                               {expert_hidden, expert_glu},
                                               {expert_output, expert_down}};
    struct moe_state *m = cb->gemm->moe;
    const struct gemm_weight *gate_up = l->experts.gate_up->impl, *down = l->experts.down->impl;
    int n = rows * used, pairs = 0;
    if (rows == 0)
        return;
    CHECK(rows <= cb->bounds.max_tokens && used <= cb->max.n_expert_used, "%d experts of %d rows",
          used, rows);
    for (int i = 0; i < n; i++) {
        m->chosen[i] = chosen[i];
        m->weights[i] = weights[i];
        pairs += chosen[i] >= 0;
    }
    int load = pairs / gate_up->n_expert;
    gemm_start(cb->gemm);
    struct moe_job j = {.cb = cb,
                        .rule = &l->router,
                        .experts = &l->experts,
                        .n_here = gate_up->n_expert,
                        .used = used,
                        .gate_up = gate_up,
                        .down = down,
                        .in = gemm_takes_bf16(cb, gate_up, load)
                                  ? gemm_source_ordered(cb, gate_up, x, m->slot_token, pairs)
                                  : gemm_source(cb, gate_up, x, rows, false),
                        .hidden = gemm_hidden(cb, down, gemm_takes_bf16(cb, down, load)),
                        .y = y,
                        .rows = rows};
    gemm_count(cb, gate_up, load, j.in.x.h != NULL);
    gemm_count(cb, down, load, j.hidden.h != NULL);
    if (gate_up->tier || down->tier) {
        enum { SORTING = 2 }; /* phases before the experts */
        pool_phases(cb->pool, phases, SORTING, &j);
        run_rounds(&j, phases + SORTING, 2);
    } else {
        pool_phases(cb->pool, phases, (int)(sizeof phases / sizeof *phases), &j);
    }
}
