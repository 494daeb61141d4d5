/*
 * The host's side of sparse attention's indexer: limits, scratch, and the order of its kernels (index_kernels.cu). Its
 * products take their inputs as two parts of fp16, so that rounding does not choose other keys.
 */
#include "backend/cuda/attn/index.h"
#include "backend/cuda/attn/index.cuh"
#include "backend/cuda/core/host.h"

extern "C" {
#include "base/mem.h"
}

enum {
    SPLIT_ROWS = 256,  /* of a product at a time */
    SCORES = 32 << 20, /* floats of scores, if one row has no more */
};

struct index_scratch {
    float *q, *w, *k,
        *u; /* (max_tokens, .): products; u: a latent's queries before the last product */
    float *split_in, *split_out; /* (2 SPLIT_ROWS, widest) */
    float *scores;               /* (rows_most, groups, units) */
    int32_t *list, *n;
    int rows_most, keys;
    size_t units;
};

static const struct indexer *index_at(const struct network *net, int layer)
{
    return mixer_index(&net->layers[layer].mixer);
}

bool index_supported(const struct network *net, int layer, struct error *err)
{
    const struct mixer *m = &net->layers[layer].mixer;
    const struct attention *a = &m->attention;
    const struct indexer *x = mixer_index(m), *before = NULL;
    if (!x)
        return true;
    for (int i = layer - 1; i >= 0 && x->reuse && !before; i--)
        before = index_at(net, i);
    bool compressed = m->kind == MIXER_COMPRESSED; /* its own checks: compressed.cu */
    bool fits = x->dim <= INDEX_MAX_DIM && x->dim % 4 == 0 && x->n_heads <= 1024 &&
                compressed == (x->compressor.rate > 0) && compressed == x->rope_last &&
                (!x->block || INDEX_KEYS % x->block == 0) &&
                (x->block > 0) == (m->kind == MIXER_ATTENTION) && (!x->rope || !x->rope->plane);
    if (x->reuse)
        fits = before && before->n_chosen == x->n_chosen && before->block == x->block &&
               before->n_heads == x->n_heads;
    else
        fits = fits && (x->block > 0) == !x->ww;
    if (m->kind == MIXER_ATTENTION)
        fits = fits && x->n_heads == a->n_kv_heads && !a->window && !a->shares_kv && !a->span &&
               !a->gated && !a->bidirectional && a->softcap == 0;
    return fits || network_refuse(err, layer, "such an indexer of sparse attention is", "cuda");
}

int index_limit(const struct network *net)
{
    int limit = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        const struct indexer *x = mixer_index(m);
        int unit = !x ? 0 : x->compressor.rate ? x->compressor.rate : x->block ? x->block : 1;
        int keys = x ? x->n_chosen * unit : 0;
        if (m->kind == MIXER_ATTENTION && m->attention.chunked)
            keys = m->attention.window;
        limit = keys && (!limit || keys < limit) ? keys : limit;
    }
    return limit;
}

/* Queries of a low rank, from which the indexer's are made; wqa NULL: they are made from what the mixer reads. */
struct index_source {
    const struct weight *wqa;
    const struct norm *norm;
    int rank;
};

static struct index_source source_of(const struct mixer *m)
{
    struct index_source s = {};
    if (m->kind == MIXER_LATENT)
        s = index_source{m->latent.wqa, &m->latent.q_norm, m->latent.q_rank};
    else if (m->kind == MIXER_COMPRESSED)
        s = index_source{m->compressed.wqa, &m->compressed.q_norm, m->compressed.q_rank};
    return s;
}

bool index_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    size_t tokens = (size_t)b->max_tokens, in = 0, out = 0, dim = 0, u = 0, unit = INDEX_KEYS;
    struct network_max max;
    network_measure(net, &max);
    for (int i = 0; i < net->n_layers; i++) {
        const struct indexer *x = index_at(net, i);
        if (!x || x->reuse)
            continue;
        const struct latent *l = &net->layers[i].mixer.latent;
        const struct index_source from = source_of(&net->layers[i].mixer);
        const struct weight *all[] = {x->wq, x->wk, x->ww, from.wqa,
                                      x->compressor.rate ? x->compressor.w : NULL};
        for (int j = 0; j < 5; j++) {
            in = all[j] && (size_t)all[j]->n_in > in ? (size_t)all[j]->n_in : in;
            out = all[j] && (size_t)all[j]->n_out > out ? (size_t)all[j]->n_out : out;
        }
        u = from.wqa && (size_t)from.rank > u ? (size_t)from.rank : u;
        size_t each = x->compressor.rate ? (size_t)x->compressor.rate
                      : x->block         ? (size_t)x->block
                                         : 1;
        unit = each < unit ? each : unit;
        dim = (size_t)x->dim > dim ? (size_t)x->dim : dim;
        size_t attends = x->block ? index_attend_shared(net->layers[i].mixer.attention.k_dim,
                                                        net->layers[i].mixer.attention.v_dim)
                         : x->compressor.rate
                             ? index_attend_shared(net->layers[i].mixer.compressed.dim,
                                                   net->layers[i].mixer.compressed.dim)
                             : index_attend_shared(l->kv_rank + l->rope_dim, l->kv_rank);
        if (attends > cu->shared_limit)
            return network_refuse(err, i, "sparse attention with heads of such a size is", "cuda");
        if (index_shared(x->n_heads, x->dim) > cu->shared_limit)
            return error_set(err, "layer %d: %d index heads of %d are not supported on cuda", i,
                             x->n_heads, x->dim);
        if ((b->k_type == DT_Q8_0 || b->k_type == DT_Q4_0) && x->dim % 32)
            return error_set(err,
                             "layer %d: index keys of %d in a quantised cache are not "
                             "supported on cuda",
                             i, x->dim);
    }
    if (!dim)
        return true;
    struct index_scratch *s = (struct index_scratch *)mem_zalloc(1, sizeof *s);
    cu->index = s;
    s->keys = b->max_pages * b->page_len;
    s->units = align_up((size_t)s->keys / unit + 1, 4);
    size_t each = s->units * (size_t)max.index_groups, rows = each < SCORES ? SCORES / each : 1;
    s->rows_most = rows < tokens ? (int)rows : b->max_tokens;
    const struct device_buffer list[] = {
        {(void **)&s->q, tokens * (size_t)max.index * 4},
        {(void **)&s->w, tokens * (size_t)max.index_heads * 4},
        {(void **)&s->k, tokens * dim * 4},
        {(void **)&s->u, tokens * u * 4},
        {(void **)&s->split_in, 2 * SPLIT_ROWS * in * 4},
        {(void **)&s->split_out, 2 * SPLIT_ROWS * out * 4},
        {(void **)&s->scores, (size_t)s->rows_most * each * 4},
        {(void **)&s->list, tokens * (size_t)max.index_groups * (size_t)max.index_chosen * 4},
        {(void **)&s->n, tokens * (size_t)max.index_groups * 4}};
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

void index_close(struct cuda_backend *cu)
{
    mem_free(cu->index);
}

/* y = x W^T with x as two parts of fp16. */
void index_product(struct cuda_backend *cu, const struct weight *w, const float *x, int rows,
                   float *y)
{
    struct index_scratch *s = cu->index;
    int most = cu->shape.max_tokens / 2; /* other forms of rows have room for max_tokens */
    most = most < SPLIT_ROWS ? most : (int)SPLIT_ROWS;
    struct pick_case c = {};
    if (!most || lora_changes(cu, cuda_matrix(w))) {
        struct rows one = rows_of((float *)x, rows, w->n_in);
        c.rows = rows;
        c.w = cuda_matrix(w);
        c.x = &one;
        c.y = y;
        pick_run(cu, PICK_LINEAR, &c, N_STAGES);
        return;
    }
    for (int at = 0; at < rows; at += most) {
        int n = rows - at < most ? rows - at : most;
        struct rows both = rows_of(s->split_in, 2 * n, w->n_in);
        index_split(cu, x + (size_t)at * (size_t)w->n_in, s->split_in, n, w->n_in);
        c.rows = 2 * n;
        c.w = cuda_matrix(w);
        c.x = &both;
        c.y = s->split_out;
        pick_run(cu, PICK_LINEAR, &c, N_STAGES);
        index_join(cu, s->split_out, y + (size_t)at * (size_t)w->n_out, n, w->n_out);
    }
}

bool index_choose(struct cuda_backend *cu, const struct mixer *m, int layer, const struct step *s,
                  struct index_choice *choice)
{
    const struct indexer *x = mixer_index(m);
    struct index_scratch *b = cu->index;
    bool beyond = cu->step.layout.beyond;
    if (!x)
        return false;
    choice->list = b->list;
    choice->n = b->n;
    choice->groups = x->block ? x->n_heads : 1;
    choice->n_chosen = x->n_chosen;
    choice->block = x->block;
    if (x->reuse || !s->n_tokens || (!beyond && !x->wk))
        return beyond;
    struct rows n = resid_norm(cu, &cu->resid, cuda_gain(cu, &m->block.in), true);
    const struct index_source from = source_of(m);
    const float *u = n.floats;
    step_mark(cu);
    if (from.wqa && beyond) {
        index_product(cu, from.wqa, n.floats, n.n, b->u);
        if (from.norm->kind)
            rows_norm(cu, b->u, cuda_gain(cu, from.norm), b->u, n.n, from.rank);
        u = b->u;
    }
    if (beyond)
        index_product(cu, x->wq, u, n.n, b->q);
    if (beyond && x->ww)
        index_product(cu, x->ww, n.floats, n.n, b->w);
    if (x->wk)
        index_product(cu, x->wk, n.floats, n.n, b->k);
    struct index_args p = {};
    p.step = *s;
    p.rope = step_rope(cu, x->rope);
    p.half = x->rope ? x->rope->n_rot / 2 : 0;
    p.interleaved = x->interleaved;
    p.last = x->rope_last;
    p.q = b->q;
    p.w = b->w;
    p.k = x->wk ? b->k : NULL;
    p.rate = x->compressor.rate ? x->compressor.rate : 1;
    p.page_rows = mixer_index_rows(m, cu->shape.page_len);
    p.q_norm = cuda_gain(cu, &x->q_norm);
    p.k_norm = cuda_gain(cu, &x->k_norm);
    p.cache = (uint8_t *)cu->kv[layer].index;
    p.type = cu->shape.k_type;
    p.page_len = cu->shape.page_len;
    p.n_heads = x->n_heads;
    p.dim = x->dim;
    p.n_chosen = x->n_chosen;
    p.block = x->block;
    p.scores = b->scores;
    p.units = b->units;
    p.list = b->list;
    p.n = b->n;
    index_rows(cu, p, n.n);
    for (int at = 0; beyond && at < n.n; at += b->rows_most) {
        p.first = at;
        index_pick(cu, p, n.n - at < b->rows_most ? n.n - at : b->rows_most, b->keys);
    }
    step_mark_end(cu, STAGE_QKV);
    return beyond;
}
