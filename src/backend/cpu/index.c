/*
 * Indexers of sparse attention: which keys a row sees. Also the plain C instance of index_kernel.h.
 *
 * The step's index keys go to the cache, one row per token. Then every row that has more keys than it may see scores all
 * of them (or blocks of them), and keeps the best. Rows are independent, and a score depends only on its query and key,
 * so a choice does not depend on the rest of the batch. Scores of some rows at a time are in scratch of bounded size.
 */
#define KERNELS index_kernels_c
#include "backend/cpu/index_kernel.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/rowops.h"
#include "base/error.h"

#include <string.h>

enum {
    PIECE = 1024,     /* keys that are scored at a time; whole blocks */
    SCORES = 1 << 21, /* scores in scratch, if one row has no more */
    DIGIT = 11,       /* bits of a score that one pass of the selection looks at */
    MAX_BLOCK = PIECE,
    MAX_HEADS = 1024,
};

struct index_state {
    float *q, *w,
        *k; /* (max_tokens, heads * dim), (max_tokens, heads), (max_tokens, dim): products */
    float *qt, *wt; /* (max_tokens, dim, lanes), (max_tokens, lanes) */
    float *scores;  /* (rows, groups, units of the longest context) */
    float *keys;    /* (n_threads, IKEYS, dim) */
    int32_t *list, *n,
        *rows; /* of the choice; the rows that choose (max_tokens), then their sequences (max_tokens) */
    int rows_cap;
    size_t longest; /* units of a context */
    struct key_choice choice;
    bool all; /* no row of the step chooses */
};

static int lanes_of(const struct indexer *x)
{
    return (x->n_heads + INDEX_LANES - 1) / INDEX_LANES * INDEX_LANES;
}

bool cpu_index_supported(const struct network *net, int layer)
{
    const struct mixer *m = &net->layers[layer].mixer;
    const struct indexer *x = mixer_index(m), *before = NULL;
    if (!x)
        return true;
    for (int i = layer - 1; i >= 0 && x->reuse && !before; i--)
        before = mixer_index(&net->layers[i].mixer);
    if (x->reuse) /* of the same sizes */
        return before && before->n_chosen == x->n_chosen && before->block == x->block &&
               before->n_heads == x->n_heads;
    bool blocks = x->block > 0;
    return x->n_heads <= MAX_HEADS && x->dim <= CPU_MAX_LATENT && x->block <= MAX_BLOCK &&
           (!blocks || PIECE % x->block == 0) && blocks == !x->ww &&
           blocks == (m->kind == MIXER_ATTENTION) &&
           (!blocks || (x->n_heads == m->attention.n_kv_heads && !m->attention.window &&
                        !m->attention.shares_kv && !m->attention.span));
}

bool cpu_index_prepare(struct cpu_backend *cb, const struct network *net, struct error *err)
{
    int T = cb->bounds.max_tokens, dim = 0, lanes = 0, unit = MAX_BLOCK;
    size_t threads = (size_t)pool_size(cb->pool);
    cb->index = NULL;
    for (int i = 0; i < net->n_layers; i++) {
        const struct indexer *x = mixer_index(&net->layers[i].mixer);
        if (!x)
            continue;
        int each = x->block ? x->block : 1;
        dim = x->dim > dim ? x->dim : dim;
        lanes = lanes_of(x) > lanes ? lanes_of(x) : lanes;
        unit = each < unit ? each : unit;
    }
    if (!dim)
        return true;
    int groups = cb->max.index_groups;
    struct index_state all = {0}, *s = &all;
    size_t context = (size_t)cb->bounds.max_pages * (size_t)cb->bounds.page_len;
    s->longest = context / (size_t)unit + 1;
    size_t each = s->longest * (size_t)groups, rows = each < SCORES ? SCORES / each : 1;
    s->rows_cap = rows < (size_t)T ? (int)rows : T;
    bool ok =
        (s->q = cpu_rows(cb, T, cb->max.index, "indexers", err)) &&
        (s->w = cpu_rows(cb, T, cb->max.index_heads, "indexers", err)) &&
        (s->k = cpu_rows(cb, T, dim, "indexers", err)) &&
        (s->qt = cpu_rows(cb, T, dim * lanes, "indexers", err)) &&
        (s->wt = cpu_rows(cb, T, lanes, "indexers", err)) &&
        (s->scores = cpu_scratch(cb, (size_t)s->rows_cap * each * sizeof(float),
                                 "scores of indexers", err)) &&
        (s->keys =
             cpu_scratch(cb, threads * IKEYS * (size_t)dim * sizeof(float), "indexers", err)) &&
        (s->list =
             cpu_scratch(cb, (size_t)T * (size_t)(groups * cb->max.index_chosen) * sizeof *s->list,
                         "chosen keys", err)) &&
        (s->n = cpu_scratch(cb, (size_t)T * (size_t)groups * sizeof *s->n, "chosen keys", err)) &&
        (s->rows = cpu_scratch(cb, 2 * (size_t)T * sizeof *s->rows, "chosen keys", err)) &&
        (cb->index = cpu_scratch(cb, sizeof *s, "indexers", err));
    if (ok && !cb->measured)
        *cb->index = all;
    return ok;
}

struct index_job {
    struct cpu_backend *cb;
    const struct indexer *x;
    const struct kv_layer *kv;
    const float *rope; /* (n_tokens, n_rot) or NULL */
    const struct index_kernels *kernels;
    int lanes, unit, groups;
    int first, n_rows; /* rows of state.rows that are scored now */
};

/* Keys that row t could see: its own and those before it, or entries. */
static int keys_of(const struct index_job *j, int t)
{
    int pos = j->cb->batch.pos[t];
    return j->x->compressor.rate ? compressor_entries(&j->x->compressor, pos) : pos + 1;
}

/* Norm and rotation of a head of row t. */
static void finish_head(const struct index_job *j, const struct norm *norm, int t, float *head)
{
    const struct rope *r = j->x->rope;
    cpu_norm_alone(norm, head, 1, j->x->dim, j->cb->isa);
    if (!r)
        return;
    const float *rope = j->rope + (size_t)t * (size_t)r->n_rot;
    float old[CPU_MAX_LATENT];
    int half = r->n_rot / 2;
    if (j->x->rope_last) {
        cpu_turn_last(rope, r->n_rot, head, j->x->dim, false);
        return;
    }
    memcpy(old, head, (size_t)r->n_rot * sizeof *old);
    for (int i = 0; i < half; i++) {
        float a = j->x->interleaved ? old[2 * i] : old[i];
        float b = j->x->interleaved ? old[2 * i + 1] : old[half + i];
        head[i] = a * rope[i] - b * rope[half + i];
        head[half + i] = b * rope[i] + a * rope[half + i];
    }
}

/* Finishes the queries and keys of rows, and stores the keys. */
static void token_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct index_job *j = arg;
    const struct indexer *x = j->x;
    struct index_state *s = j->cb->index;
    size_t D = (size_t)x->dim, H = (size_t)x->n_heads, lanes = (size_t)j->lanes;
    const struct row_kernels *kn = row_kernels(j->cb->isa);
    for (int t = first; t < last; t++) {
        float *q = s->q + (size_t)t * H * D, *qt = s->qt + (size_t)t * D * lanes;
        float *k = s->k + (size_t)t * D, *wt = s->wt + (size_t)t * lanes;
        int slot = j->cb->batch.slot[t];
        memset(qt, 0, D * lanes * sizeof *qt);
        memset(wt, 0, lanes * sizeof *wt);
        for (size_t h = 0; h < H; h++) {
            finish_head(j, &x->q_norm, t, q + h * D);
            for (size_t d = 0; d < D; d++)
                qt[d * lanes + h] = q[h * D + d];
        }
        if (x->ww)
            memcpy(wt, s->w + (size_t)t * H, H * sizeof *wt);
        if (slot < 0 || x->compressor.rate)
            continue;
        finish_head(j, &x->k_norm, t, k);
        kn->store(j->cb->bounds.k_type, k, x->dim, j->kv->index, (size_t)slot * D, 1);
    }
}

/* The place of a sequence's index keys. */
struct key_rows {
    const struct bounds *s;
    const int32_t *pages;
    const char *base;
    int dim, first;
    const struct compressor *c; /* keys are its entries */
};

static const void *key_row(void *arg, int i)
{
    const struct key_rows *k = arg;
    int p = k->first + i, len = k->s->page_len, rows = len, row = p % len;
    if (k->c->rate) {
        p = (p + 1) * k->c->rate - 1;
        rows = compressor_page_rows(k->c, len);
        row = p % len / k->c->rate;
    }
    size_t slot = (size_t)k->pages[p / len] * (size_t)rows + (size_t)row;
    return k->base + dtype_bytes(k->s->k_type, slot * (size_t)k->dim);
}

static float *scores_of(const struct index_job *j, int i, int group)
{
    const struct index_state *s = j->cb->index;
    return s->scores + ((size_t)i * (size_t)j->groups + (size_t)group) * s->longest;
}

/* Scores keys [first, last] of row number i. */
static void score_piece(const struct index_job *j, int ith, int i, int first, int last)
{
    struct index_state *s = j->cb->index;
    const struct batch *b = &j->cb->batch;
    const struct indexer *x = j->x;
    size_t D = (size_t)x->dim, lanes = (size_t)j->lanes;
    int t = s->rows[j->first + i], seq = s->rows[j->cb->bounds.max_tokens + j->first + i];
    const float *qt = s->qt + (size_t)t * D * lanes;
    float *keys = s->keys + (size_t)ith * IKEYS * D;
    struct key_rows k = {&j->cb->bounds, b->pages + (size_t)seq * (size_t)b->max_pages,
                         j->kv->index,   x->dim,
                         first,          &x->compressor};
    enum dtype type = j->cb->bounds.k_type;
    if (!x->block) {
        j->kernels->keys(qt, s->wt + (size_t)t * lanes, j->lanes, x->dim, type, key_row, &k,
                         last - first + 1, keys, scores_of(j, i, 0) + first);
        return;
    }
    for (; k.first <= last; k.first += x->block) {
        float best[MAX_HEADS];
        int n = last - k.first + 1 < x->block ? last - k.first + 1 : x->block;
        for (int h = 0; h < j->lanes; h++)
            best[h] = -INFINITY;
        j->kernels->block(qt, j->lanes, x->dim, type, key_row, &k, n, keys, best);
        for (int h = 0; h < x->n_heads; h++)
            scores_of(j, i, h)[k.first / x->block] = best[h];
    }
}

static int pieces_of(const struct index_job *j)
{
    const struct index_state *s = j->cb->index;
    int most = 0;
    for (int i = 0; i < j->n_rows; i++) {
        int last = keys_of(j, s->rows[j->first + i]) - 1;
        most = last > most ? last : most;
    }
    return most / PIECE + 1;
}

static struct pool_work pieces_work(void *arg)
{
    const struct index_job *j = arg;
    return (struct pool_work){j->n_rows * pieces_of(j), POOL_EVEN};
}

static void pieces_run(void *arg, int ith, int first, int last)
{
    const struct index_job *j = arg;
    int n = pieces_of(j);
    for (int p = first; p < last; p++) {
        int i = p / n, from = p % n * PIECE;
        int to = keys_of(j, j->cb->index->rows[j->first + i]) - 1;
        if (from <= to)
            score_piece(j, ith, i, from, from + PIECE - 1 < to ? from + PIECE - 1 : to);
    }
}

/* A number that orders as the score does. */
static uint32_t order_of(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* list = the n largest of m scores, in order; of equal ones the first. n < m. */
static void select_largest(const float *scores, int m, int n, int32_t *list)
{
    uint32_t above = 0, mask = 0; /* the digits of the n-th largest that are known */
    int want = n;
    for (int shift = 32 - DIGIT; mask != UINT32_MAX; shift = shift > DIGIT ? shift - DIGIT : 0) {
        int count[1 << DIGIT] = {0}, digit = (1 << DIGIT) - 1;
        uint32_t bits = (uint32_t)(1 << DIGIT) - 1;
        for (int i = 0; i < m; i++) {
            uint32_t o = order_of(scores[i]);
            if ((o & mask) == above)
                count[o >> shift & bits]++;
        }
        while (count[digit] < want)
            want -= count[digit--];
        above |= (uint32_t)digit << shift;
        mask |= bits << shift;
    }
    for (int i = 0, k = 0; k < n; i++) {
        uint32_t o = order_of(scores[i]);
        if (o > above || (o == above && want-- > 0))
            list[k++] = i;
    }
}

static struct pool_work select_work(void *arg)
{
    const struct index_job *j = arg;
    return (struct pool_work){j->n_rows * j->groups, POOL_EVEN};
}

static void select_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct index_job *j = arg;
    struct index_state *s = j->cb->index;
    for (int k = first; k < last; k++) {
        int i = k / j->groups, group = k % j->groups, t = s->rows[j->first + i];
        int own = (keys_of(j, t) - 1) / j->unit;
        float *scores = scores_of(j, i, group);
        if (j->x->block)
            scores[own] = INFINITY;
        select_largest(scores, own + 1, j->x->n_chosen,
                       s->list + ((size_t)t * (size_t)j->groups + (size_t)group) *
                                     (size_t)j->x->n_chosen);
    }
}

/* Lists the rows that have to choose. Returns their number. */
static int list_rows(struct index_job *j)
{
    struct index_state *s = j->cb->index;
    const struct batch *b = &j->cb->batch;
    int n = 0;
    for (int seq = 0; seq < b->n_seqs; seq++)
        for (int t = b->q_start[seq]; t < b->q_start[seq + 1]; t++) {
            bool chooses =
                b->slot[t] >= 0 && (keys_of(j, t) + j->unit - 1) / j->unit > j->x->n_chosen;
            for (int g = 0; g < j->groups; g++)
                s->n[t * j->groups + g] = chooses ? j->x->n_chosen : -1;
            if (!chooses)
                continue;
            s->rows[n] = t;
            s->rows[j->cb->bounds.max_tokens + n++] = seq;
        }
    return n;
}

const struct key_choice *cpu_index(struct cpu_backend *cb, const struct indexer *x,
                                   const struct kv_layer *kv, const float *n, const float *u,
                                   int n_groups)
{
    static const struct pool_phase phases[] = {{pieces_work, pieces_run},
                                               {select_work, select_run}};
    struct index_state *s = cb->index;
    if (x->reuse)
        return s->all ? NULL : &s->choice;
    const struct batch *b = &cb->batch;
    struct index_job j = {.cb = cb,
                          .x = x,
                          .kv = kv,
                          .rope = x->rope ? cpu_rope_of(cb, x->rope) : NULL,
                          .kernels = index_kernels(cb->isa),
                          .lanes = lanes_of(x),
                          .unit = x->block ? x->block : 1,
                          .groups = x->block ? n_groups : 1};
    cpu_stage_begin(cb);
    if (x->wk)
        gemm_linear(cb, x->wk, n, s->k, b->n_tokens);
    gemm_linear(cb, x->wq, u, s->q, b->n_tokens);
    if (x->ww)
        gemm_linear(cb, x->ww, n, s->w, b->n_tokens);
    if (b->n_tokens < 2)
        token_rows(&j, 0, 0, b->n_tokens);
    else
        pool_each(cb->pool, b->n_tokens, POOL_EVEN, token_rows, &j);
    int rows = list_rows(&j);
    for (; j.first < rows; j.first += s->rows_cap) {
        j.n_rows = rows - j.first < s->rows_cap ? rows - j.first : s->rows_cap;
        pool_phases(cb->pool, phases, 2, &j);
    }
    cpu_stage_end(cb, STAGE_ATTENTION);
    s->all = rows == 0;
    s->choice = (struct key_choice){s->list, s->n, j.groups, x->n_chosen, j.unit};
    return s->all ? NULL : &s->choice;
}
