/* Networks cut for ranks: see split.h. Knows layers and the list of wants, nothing of backends. */
#include "model/split.h"
#include "backend/lora.h"
#include "base/mem.h"
#include "model/expert_load.h"
#include "model/stages.h"

#include <string.h>

enum {
    UNEVEN_PERCENT = 10, /* more than its share that a lane may have of every expert */
    PACKED_UNIT = 128,   /* columns that stay together of what folders pack */
};

struct splitter {
    const struct tensorfile *f;
    const struct config *c;
    struct network *net;
    struct tensor_spec *specs;
    int n_specs;
    const struct ranks *r;
    struct tensorfile *stats; /* how often experts are used (expert_load.h); NULL = not known */
    struct error *err;
};

/* Of positive numbers. */
static int gcd(int a, int b)
{
    CHECK(a > 0 && b > 0, "%d and %d", a, b);
    while (b) {
        int t = a % b;
        a = b;
        b = t;
    }
    return a;
}

static int lcm(int a, int b)
{
    return a / gcd(a, b) * b;
}

static struct tensor_spec *want_of(struct splitter *s, const struct weight *w)
{
    for (int i = 0; i < s->n_specs; i++)
        if (s->specs[i].w == w)
            return &s->specs[i];
    CHECK(false, "a weight nobody wants");
    return NULL;
}

/* The cut of a want, made when first asked for. */
static struct cut *cut_of(struct tensor_spec *want)
{
    if (!want->cut)
        want->cut = mem_zalloc(1, sizeof *want->cut);
    return want->cut;
}

/* So many columns of the weight stay together. */
static int unit_of(struct splitter *s, const struct weight *w)
{
    const struct tensor_spec *want = want_of(s, w);
    int unit = 1;
    for (int i = 0; i < want->n_rows; i++) {
        const struct tensor *t =
            build_find(s->f, s->c, want->rows[i].name, want->layer, 0, "weight");
        /* Codes may be called "weight", of bytes or of no type of ours. */
        bool packed = !t || t->type == DT_F8_E4M3 || !dtype_is_weight(t->type);
        unit = lcm(unit, packed ? PACKED_UNIT : dtype_table[t->type].block_len);
    }
    return unit;
}

/* Rows of w in runs, all of them its new rows. */
static void keep_rows(struct splitter *s, const struct weight *w, int n, const struct run *runs)
{
    struct tensor_spec *want = want_of(s, w);
    struct cut *k = cut_of(want);
    CHECK(n <= CUT_RUNS, "%d runs", n);
    want->w->n_out = 0;
    for (int i = 0; i < n; i++) {
        k->rows[i] = runs[i];
        want->w->n_out += runs[i].n;
    }
    k->n_rows = n;
}

/* Columns of w: the other ranks have the others, and what they give is added up. */
static void keep_cols(struct splitter *s, const struct weight *w, int n, const struct run *runs)
{
    struct tensor_spec *want = want_of(s, w);
    struct cut *k = cut_of(want);
    CHECK(n <= CUT_RUNS, "%d runs", n);
    want->w->n_in = 0;
    for (int i = 0; i < n; i++) {
        k->cols[i] = runs[i];
        want->w->n_in += runs[i].n;
    }
    k->n_cols = n;
    k->no_bias = s->r->lane > 0;
}

static void keep_experts(struct splitter *s, const struct weight *w, struct run run)
{
    struct tensor_spec *want = want_of(s, w);
    cut_of(want)->experts = run;
    want->w->n_expert = run.n;
    if (want->role == WEIGHT_EXPERTS_SHARED)
        want->role = WEIGHT_EXPERTS;
}

/* The experts of `want`, or its rows or values by expert, are in this order now. */
static void keep_order(struct tensor_spec *want, const int32_t *order, int n)
{
    size_t bytes = (size_t)n * sizeof *order;
    want->cut = mem_realloc(cut_of(want), 1, sizeof *want->cut + bytes);
    memcpy(want->cut->order, order, bytes);
    want->cut->n_order = n;
}

static void keep_vector_order(struct splitter *s, const float *vector, const int32_t *order, int n)
{
    for (int i = 0; i < s->n_specs; i++)
        if (vector && s->specs[i].vector == vector)
            keep_order(&s->specs[i], order, n);
}

static void keep_values(struct splitter *s, const float *vector, int n, const struct run *runs)
{
    for (int i = 0; i < s->n_specs; i++)
        if (vector && s->specs[i].vector == vector) {
            struct cut *k = cut_of(&s->specs[i]);
            memcpy(k->rows, runs, (size_t)n * sizeof *runs);
            k->n_rows = n;
        }
}

static struct run times(struct run r, int n)
{
    return (struct run){r.first * n, r.n * n};
}

static struct run after(struct run r, int n)
{
    return (struct run){r.first + n, r.n};
}

/* Attention */

/* The heads of a lane: whole kv heads, or, where there are fewer than lanes, some of those that share
 * one. False: it would have none, or tear a unit of heads apart. */
static bool heads_of(int H, int K, int unit, int lane, int lanes, struct run *q, struct run *kv)
{
    int group = H / K;
    if (K >= lanes) {
        *kv = run_of(K, 1, lane, lanes);
        *q = times(*kv, group);
        return kv->n > 0 && q->first % unit == 0 && q->n % unit == 0;
    }
    for (int k = 0; k < K; k++) {
        struct run who = run_of(lanes, 1, k, K);
        if (lane < who.first || lane >= who.first + who.n)
            continue;
        *kv = (struct run){k, 1};
        *q = after(run_of(group, unit, lane - who.first, who.n), k * group);
        return group % unit == 0 && q->n > 0;
    }
    return false;
}

/* Heads that stay together so that wo's columns can be cut. */
static int head_unit(struct splitter *s, const struct weight *wo, int v_dim)
{
    return lcm(unit_of(s, wo), v_dim) / v_dim;
}

static bool can_cut_heads(int H, int K, int unit, int lanes)
{
    struct run q = {0}, kv = {0};
    for (int t = 0; t < lanes; t++)
        if (!heads_of(H, K, unit, t, lanes, &q, &kv))
            return false;
    return true;
}

static bool can_cut(struct splitter *s, const struct mixer *m)
{
    int lanes = s->r->tp;
    const struct attention *a = &m->attention;
    const struct latent *l = &m->latent;
    const struct delta_net *d = &m->delta_net;
    switch (m->kind) {
    case MIXER_ATTENTION:
        return !a->norm_whole &&
               can_cut_heads(a->n_heads, a->n_kv_heads, head_unit(s, a->wo, a->v_dim), lanes);
    case MIXER_LATENT:
        return can_cut_heads(l->n_heads, l->n_heads, head_unit(s, l->wo, l->v_dim), lanes);
    case MIXER_DELTA_NET: {
        /* tiled: the v heads of a k head lie apart, and so do wo's columns */
        int each = d->n_v_heads / d->n_k_heads, unit = head_unit(s, d->wo, d->v_dim);
        return d->n_v_heads % d->n_k_heads == 0 && (!d->tiled || each <= CUT_RUNS / 2) &&
               d->n_k_heads >= lanes &&
               (d->tiled ? d->n_k_heads % unit == 0 &&
                               can_cut_heads(d->n_k_heads, d->n_k_heads, unit, lanes)
                         : can_cut_heads(d->n_v_heads, d->n_k_heads, unit, lanes));
    }
    case MIXER_SHORT_CONV:
        break;
    }
    return false;
}

static void cut_attention(struct splitter *s, struct attention *a)
{
    struct run q = {0}, kv = {0}, rows[3];
    heads_of(a->n_heads, a->n_kv_heads, head_unit(s, a->wo, a->v_dim), s->r->lane, s->r->tp, &q,
             &kv);
    int each = a->k_dim + (a->gated ? a->v_dim : 0), n = 1;
    int k0 = a->n_heads * each, v0 = k0 + a->n_kv_heads * a->k_dim;
    rows[0] = times(q, each);
    if (!a->shares_kv)
        rows[n++] = after(times(kv, a->k_dim), k0);
    if (!a->shares_kv && !a->k_is_v)
        rows[n++] = after(times(kv, a->v_dim), v0);
    keep_rows(s, a->wqkv, n, rows);
    keep_cols(s, a->wo, 1, (struct run[]){times(q, a->v_dim)});
    keep_values(s, a->sinks, 1, &q);
    a->n_heads = q.n;
    a->n_kv_heads = kv.n;
}

static void cut_latent(struct splitter *s, struct latent *l)
{
    struct run q = {0}, kv = {0};
    heads_of(l->n_heads, l->n_heads, head_unit(s, l->wo, l->v_dim), s->r->lane, s->r->tp, &q, &kv);
    keep_rows(s, l->wqb, 1, (struct run[]){times(q, l->nope_dim + l->rope_dim)});
    keep_experts(s, l->wkb, q);
    keep_experts(s, l->wvb, q);
    keep_cols(s, l->wo, 1, (struct run[]){times(q, l->v_dim)});
    l->n_heads = q.n;
}

static void cut_delta_net(struct splitter *s, struct delta_net *d)
{
    int each = d->n_v_heads / d->n_k_heads, keys = d->n_k_heads * d->k_dim, n = 1;
    int unit = head_unit(s, d->wo, d->v_dim);
    struct run v[CUT_RUNS] = {{0}}, k = {0}, q = {0}, rows[CUT_RUNS];
    if (d->tiled) {
        heads_of(d->n_k_heads, d->n_k_heads, unit, s->r->lane, s->r->tp, &q, &k);
        for (n = 0; n < each; n++)
            v[n] = after(k, n * d->n_k_heads);
    } else {
        heads_of(d->n_v_heads, d->n_k_heads, unit, s->r->lane, s->r->tp, &v[0], &k);
    }
    rows[0] = times(k, d->k_dim);
    rows[1] = after(times(k, d->k_dim), keys);
    for (int i = 0; i < n; i++)
        rows[2 + i] = after(times(v[i], d->v_dim), 2 * keys);
    keep_rows(s, d->wqkv, 2 + n, rows);
    for (int i = 0; i < 2 + n; i++)
        rows[i] = times(rows[i], d->conv_len);
    keep_values(s, d->conv, 2 + n, rows);
    for (int i = 0; i < n; i++)
        rows[i] = times(v[i], d->v_dim);
    keep_rows(s, d->wz, n, rows);
    keep_cols(s, d->wo, n, rows);
    for (int i = 0; i < n; i++) {
        rows[i] = v[i];
        rows[n + i] = after(v[i], d->n_v_heads);
    }
    keep_rows(s, d->wba, 2 * n, rows);
    keep_values(s, d->decay, n, v);
    keep_values(s, d->dt_bias, n, v);
    d->n_k_heads = k.n;
    d->n_v_heads = k.n * each;
}

static void cut_mixer(struct splitter *s, struct mixer *m)
{
    m->partial = true;
    if (m->kind == MIXER_ATTENTION)
        cut_attention(s, &m->attention);
    else if (m->kind == MIXER_LATENT)
        cut_latent(s, &m->latent);
    else
        cut_delta_net(s, &m->delta_net);
}

/* Layers that read another's cache must be cut as that one is. */
static void choose_mixers(struct splitter *s, bool *cut)
{
    struct layer *layers = s->net->layers;
    for (int i = 0; i < s->net->n_layers; i++)
        cut[i] = can_cut(s, &layers[i].mixer);
    for (int again = 1; again;) {
        again = 0;
        for (int i = 0; i < s->net->n_layers; i++) {
            const struct attention *a = &layers[i].mixer.attention;
            if (layers[i].mixer.kind != MIXER_ATTENTION || !a->shares_kv ||
                cut[i] == cut[a->kv_layer])
                continue;
            cut[i] = cut[a->kv_layer] = false;
            again = 1;
        }
    }
}

/* Mlps */

/* Hidden units that stay together; 0: some lane would have none. */
static int hidden_unit(struct splitter *s, const struct ffn *f)
{
    int F = f->down->n_in, unit = unit_of(s, f->down), wide = lcm(unit, 32);
    if (F % wide == 0 && F / wide >= s->r->tp)
        unit = wide; /* whole vectors are faster */
    return F % unit || F / unit < s->r->tp ? 0 : unit;
}

/* Hidden units of a lane; false: some lane would have none. */
static bool cut_hidden(struct splitter *s, struct ffn *f)
{
    int F = f->down->n_in, unit = hidden_unit(s, f);
    if (!unit)
        return false;
    struct run mine = run_of(F, unit, s->r->lane, s->r->tp);
    int n = f->gate_up->n_out > F ? 2 : 1;
    keep_rows(s, f->gate_up, n, (struct run[]){mine, after(mine, F)});
    keep_cols(s, f->down, 1, &mine);
    return true;
}

/* Whether each lane takes whole experts: where that was asked for, where their hidden units cannot be cut,
 * and on CPUs where blocks of them would leave a lane with much more than its share (768 units in blocks of 256
 * on two lanes). A GPU reads as many experts as a row takes, whether they are its own or not. */
static bool by_expert(struct splitter *s, const struct mlp *m)
{
    int lanes = s->r->tp, unit = hidden_unit(s, &m->experts);
    if (m->experts.gate_up->n_expert < lanes)
        return false;
    if (s->r->ep || !unit)
        return true;
    int units = m->experts.down->n_in / unit, most = (units + lanes - 1) / lanes;
    bool on_gpu = s->r->sharers > 0;
    return !on_gpu && 100 * most * lanes > (100 + UNEVEN_PERCENT) * units;
}

/* Experts change places so that runs of them have about the same load: their weights, and with them what the
 * router has of each. */
static bool order_experts(struct splitter *s, const struct mlp *m)
{
    const struct router *r = &m->router;
    int n = m->experts.gate_up->n_expert;
    struct tensor_spec *router = want_of(s, r->w);
    int32_t *order = mem_zalloc((size_t)n, sizeof *order);
    bool ok = expert_load_order(s->stats, router->layer, r, n, s->r->tp, order, s->err);
    if (ok) {
        keep_order(router, order, n);
        keep_order(want_of(s, m->experts.gate_up), order, n);
        keep_order(want_of(s, m->experts.down), order, n);
        keep_vector_order(s, r->choice_bias, order, n);
        keep_vector_order(s, r->expert_scale, order, n);
    }
    mem_free(order);
    return ok;
}

static bool cut_mlp(struct splitter *s, struct mlp *m)
{
    if (m->dense.gate_up)
        m->dense_partial = cut_hidden(s, &m->dense);
    if (!m->router.w)
        return true;
    int n = m->experts.gate_up->n_expert;
    if (by_expert(s, m)) {
        if (s->stats && !order_experts(s, m))
            return false;
        struct run mine = run_of(n, 1, s->r->lane, s->r->tp);
        keep_experts(s, m->experts.gate_up, mine);
        keep_experts(s, m->experts.down, mine);
        m->expert_first = mine.first;
        m->experts_partial = true;
    } else {
        m->experts_partial = cut_hidden(s, &m->experts);
    }
    return true;
}

/* Rows of the embedding and of the head, which may be the same. */
static void cut_ends(struct splitter *s)
{
    struct head *h = &s->net->head;
    struct embed *e = &s->net->embed;
    struct run mine = ranks_vocab(s->r, s->net->n_vocab, s->r->lane);
    if (ranks_vocab(s->r, s->net->n_vocab, s->r->tp - 1).n == 0)
        return;
    bool plain = !e->positions && !e->types && e->norm.kind == NORM_NONE;
    bool tied = h->w == e->tokens;
    if (plain) {
        keep_rows(s, e->tokens, 1, &mine);
        e->partial = true;
        e->first = mine.first;
    }
    if (!h->w || (tied && !plain))
        return;
    keep_rows(s, h->w, 1, &mine);
}

/* Stages */

static void leave(struct splitter *s, const struct weight *w)
{
    if (w)
        cut_of(want_of(s, w))->none = true;
}

/* The layers of this stage become the network's. */
static bool cut_layers(struct splitter *s, struct error *err)
{
    const struct ranks *r = s->r;
    struct network *net = s->net;
    struct embed_layers *e = &net->embed.layers;
    int depth = network_depth(net);
    bool shared = stages_share_head(net, r);
    struct run mine;
    if (!stages_layers(s->f, s->c, net, s->specs, s->n_specs, r, &mine, err))
        return false;
    if (r->stage == r->pp - 1)
        mine.n += net->n_layers - depth; /* the block that drafts is beside the head */
    else
        net->mtp = (struct mtp){0};
    for (int i = mine.first; i < mine.first + mine.n; i++) {
        struct attention *a = &net->layers[i].mixer.attention;
        if (net->layers[i].mixer.kind == MIXER_ATTENTION && a->shares_kv)
            a->kv_layer -= mine.first; /* is of this stage, too */
    }
    for (int i = 0; i < s->n_specs; i++) {
        int layer = s->specs[i].layer;
        if (stages_want_of_layer(s->f, s->c, &s->specs[i]) &&
            (layer < mine.first || layer >= mine.first + mine.n))
            cut_of(&s->specs[i])->none = true;
    }
    net->has_prev_stage = r->stage > 0;
    net->has_next_stage = r->stage < r->pp - 1;
    bool tied = net->head.w == net->embed.tokens;
    /* Embeddings of layers are made of the token's own; the block that drafts reads tokens, too. */
    if (net->has_prev_stage && !e->width && !net->mtp.fc && (!tied || net->has_next_stage))
        leave(s, net->embed.tokens);
    struct run head = stages_head(r, net->n_vocab);
    if (shared && head.n)
        keep_rows(s, net->head.w, 1, &head);
    else if (net->has_next_stage && !tied)
        leave(s, net->head.w);
    if (e->width) {
        struct run part = times(mine, e->width);
        if (part.first % unit_of(s, e->table) || part.n % unit_of(s, e->table))
            return error_set(err, "--pp %d: embeddings of layers cannot be cut so", r->pp);
        keep_rows(s, e->project, 1, &part);
        keep_cols(s, e->table, 1, &part);
    }
    memmove(net->layers, net->layers + mine.first, (size_t)mine.n * sizeof *net->layers);
    net->n_layers = mine.n;
    return true;
}

bool split_network(const struct tensorfile *f, const struct config *c, struct network *net,
                   struct tensor_spec *specs, int n_specs, const struct ranks *r, struct error *err)
{
    struct splitter s = {.f = f, .c = c, .net = net, .specs = specs, .n_specs = n_specs, .r = r};
    if (r && r->pp > 1 && !cut_layers(&s, err))
        return false;
    if (!r || r->tp == 1)
        return true;
    s.err = err;
    if (r->expert_stats && !(s.stats = tensorfile_open(r->expert_stats, err)))
        return false;
    bool *cut = mem_zalloc((size_t)net->n_layers, sizeof *cut), ok = true;
    choose_mixers(&s, cut);
    for (int i = 0; ok && i < net->n_layers; i++) {
        if (cut[i])
            cut_mixer(&s, &net->layers[i].mixer);
        ok = cut_mlp(&s, &net->layers[i].mlp);
    }
    cut_ends(&s);
    mem_free(cut);
    tensorfile_close(s.stats);
    return ok;
}

/* Weights as they are read */

int split_vector(float *values, int n, const struct cut *cut)
{
    int at = 0;
    if (cut && cut->n_order) {
        float *old = mem_alloc((size_t)n * sizeof *old);
        memcpy(old, values, (size_t)n * sizeof *old);
        for (int i = 0; i < n; i++)
            values[i] = old[cut->order[i]];
        mem_free(old);
    }
    if (!cut || !cut->n_rows)
        return n;
    for (int i = 0; i < cut->n_rows; i++) {
        memmove(values + at, values + cut->rows[i].first, (size_t)cut->rows[i].n * sizeof *values);
        at += cut->rows[i].n;
    }
    return at;
}

struct copier {
    void *(*alloc)(void *arg, size_t count, size_t size);
    void *arg;
};

/* One plane of one expert: items of `size` bytes for `pack` columns each. In the copy an item is for `step`
 * columns, which divides pack: a scale of many columns is repeated. */
struct plane {
    size_t size;
    int pack, step;
};

static size_t items(int columns, int each)
{
    return (size_t)((columns + each - 1) / each);
}

int split_group_len(int len)
{
    return gcd(len, PACKED_UNIT);
}

/* The items of a run of a row's columns; where they end. */
static uint8_t *copy_items(uint8_t *to, const struct plane *p, const uint8_t *row,
                           const struct run *cols)
{
    size_t n = items(cols->n, p->step);
    if (p->step == p->pack) {
        memcpy(to, row + (size_t)(cols->first / p->pack) * p->size, n * p->size);
        return to + n * p->size;
    }
    for (int i = 0; i < cols->n; i += p->step, to += p->size)
        memcpy(to, row + (size_t)((cols->first + i) / p->pack) * p->size, p->size);
    return to;
}

/* Rows `runs` and columns `cols` of a plane whose rows have n_in columns. */
static void *copy_plane(const struct copier *to, const struct plane *p, const uint8_t *from,
                        int n_in, const struct run *rows, int n_rows, const struct run *cols,
                        int n_cols)
{
    size_t height = 0, width = 0, pitch = items(n_in, p->pack) * p->size;
    for (int i = 0; i < n_rows; i++)
        height += (size_t)rows[i].n;
    for (int i = 0; i < n_cols; i++)
        width += items(cols[i].n, p->step) * p->size;
    uint8_t *out = to->alloc(to->arg, height, width), *at = out;
    for (int i = 0; i < n_rows; i++)
        for (int r = rows[i].first; r < rows[i].first + rows[i].n; r++)
            for (int k = 0; k < n_cols; k++)
                at = copy_items(at, p, from + (size_t)r * pitch, &cols[k]);
    return out;
}

static const void **table(const struct copier *to, int n)
{
    return to->alloc(to->arg, (size_t)n, sizeof(void *));
}

/* The rows of a segment that begins at row `base` of its weight: runs within it. */
static int rows_within(const struct cut *cut, int base, int rows, struct run *out)
{
    int n = 0;
    if (!cut->n_rows) {
        out[0] = (struct run){0, rows};
        return 1;
    }
    for (int i = 0; i < cut->n_rows; i++) {
        int first = cut->rows[i].first - base, last = first + cut->rows[i].n;
        first = first < 0 ? 0 : first;
        last = last > rows ? rows : last;
        if (first < last)
            out[n++] = (struct run){first, last - first};
    }
    return n;
}

static void cut_segment(const struct copier *to, struct raw_seg *s, int n_in, int n_expert,
                        const struct run *rows, int n_rows, const struct run *cols, int n_cols)
{
    const struct dtype_info *d = &dtype_table[s->type];
    int group = s->group_len;
    /* Columns are cut at multiples of PACKED_UNIT, which need not be where a long group begins. */
    if (s->type == DT_GPTQ4 && (n_cols > 1 || cols[0].n < n_in))
        group = split_group_len(group);
    struct plane data = {dtype_bytes(s->type, (size_t)d->block_len), d->block_len, d->block_len};
    struct plane f8 = {sizeof(float), 128, 128};
    struct plane half = {sizeof(uint16_t), s->group_len, group}, zero = {1, s->group_len, group};
    const void **data_of = table(to, n_expert), **scale_of = table(to, n_expert),
               **zero_of = table(to, n_expert);
    bool groups = s->type == DT_GPTQ4, f8s = s->type == DT_F8_E4M3 && s->scale;
    for (int e = 0; e < n_expert; e++) {
        data_of[e] = copy_plane(to, &data, s->data[e], n_in, rows, n_rows, cols, n_cols);
        if (f8s || groups)
            scale_of[e] =
                copy_plane(to, f8s ? &f8 : &half, s->scale[e], n_in, rows, n_rows, cols, n_cols);
        if (groups)
            zero_of[e] = copy_plane(to, &zero, s->zero[e], n_in, rows, n_rows, cols, n_cols);
    }
    s->data = (const uint8_t *const *)data_of;
    s->scale = f8s || groups ? (const void *const *)scale_of : s->scale;
    s->zero = groups ? (const uint8_t *const *)zero_of : s->zero;
    s->group_len = group;
    s->rows = 0;
    for (int i = 0; i < n_rows; i++)
        s->rows += rows[i].n;
}

static const float *cut_bias(const struct copier *to, const struct raw_weight *w,
                             const struct cut *cut, int n_out)
{
    float *out = to->alloc(to->arg, (size_t)w->n_expert * (size_t)n_out, sizeof *out), *at = out;
    struct run all = {0, w->n_out};
    for (int e = 0; e < w->n_expert; e++)
        for (int i = 0; i < (cut->n_rows ? cut->n_rows : 1); i++) {
            const struct run *r = cut->n_rows ? &cut->rows[i] : &all;
            if (!cut->no_bias)
                memcpy(at, w->bias + (size_t)e * (size_t)w->n_out + r->first,
                       (size_t)r->n * sizeof *at);
            at += r->n;
        }
    return out;
}

/* Adapters */

/* Columns `cut` of a (rank, n_in), in place of it. */
static void cut_a(struct lora_matrix *m, const struct cut *cut, size_t n_in)
{
    float *at = m->a;
    for (size_t k = 0; cut->n_cols && k < (size_t)m->rank; k++)
        for (int i = 0; i < cut->n_cols; i++) {
            size_t n = (size_t)cut->cols[i].n;
            memmove(at, m->a + k * n_in + (size_t)cut->cols[i].first, n * sizeof *at);
            at += n;
        }
}

/* Rows `cut` of a part's b, in place of them: runs ascend, so that what stays is one run of the rows
 * that the weight has now. */
static void cut_part(struct lora_part *p, const struct cut *cut)
{
    size_t rank = (size_t)p->rank;
    int first = -1, n = 0, before = 0;
    for (int i = 0; i < cut->n_rows; i++) {
        const struct run *r = &cut->rows[i];
        int from = r->first > p->first ? r->first : p->first;
        int to = r->first + r->n < p->first + p->n ? r->first + r->n : p->first + p->n;
        if (from < to) {
            first = first < 0 ? before + from - r->first : first;
            memmove(p->b + (size_t)n * rank, p->b + (size_t)(from - p->first) * rank,
                    (size_t)(to - from) * rank * sizeof *p->b);
            n += to - from;
        }
        before += r->n;
    }
    p->first = first < 0 ? 0 : first;
    p->n = n;
}

/* A router's: a part covers all rows. */
static void order_part(struct lora_part *p, const struct cut *cut)
{
    size_t rank = (size_t)p->rank;
    float *b = mem_alloc((size_t)p->n * rank * sizeof *b);
    for (int i = 0; i < p->n; i++)
        memcpy(b + (size_t)i * rank, p->b + (size_t)cut->order[i] * rank, rank * sizeof *b);
    mem_free(p->b);
    p->b = b;
}

struct lora *split_lora(struct lora *l, const struct cut *cut)
{
    if (cut->none) {
        lora_free(l);
        return NULL;
    }
    int n_in = 0, n_out = 0;
    for (int i = 0; i < cut->n_cols; i++)
        n_in += cut->cols[i].n;
    for (int i = 0; i < cut->n_rows; i++)
        n_out += cut->rows[i].n;
    int n = cut->experts.n ? cut->experts.n : l->n_expert;
    struct lora *out = lora_new(cut->n_cols ? n_in : l->n_in, cut->n_rows ? n_out : l->n_out, n);
    for (int e = 0; e < n; e++) {
        int at = cut->experts.n ? cut->experts.first + e : e;
        struct lora_matrix *from = &l->of[cut->experts.n && cut->n_order ? cut->order[at] : at];
        out->of[e] = *from;
        *from = (struct lora_matrix){0};
        cut_a(&out->of[e], cut, (size_t)l->n_in);
        for (int i = 0; cut->n_rows && i < out->of[e].n_parts; i++)
            cut_part(&out->of[e].parts[i], cut);
        for (int i = 0; cut->n_order && !cut->experts.n && i < out->of[e].n_parts; i++)
            order_part(&out->of[e].parts[i], cut);
    }
    lora_free(l);
    return out;
}

/* The experts of w as pointers to those that `cut` takes, in its order. */
static void take_experts(const struct copier *to, struct raw_weight *w, const struct cut *cut)
{
    int first = cut->experts.first, n = cut->experts.n;
    float *bias = w->bias ? to->alloc(to->arg, (size_t)n * (size_t)w->n_out, sizeof *bias) : NULL;
    for (int i = 0; i < w->n_seg; i++) {
        struct raw_seg *s = &w->seg[i];
        const void **of[4] = {table(to, n), table(to, n), table(to, n), table(to, n)};
        for (int e = 0; e < n; e++) {
            int from = cut->n_order ? cut->order[first + e] : first + e;
            of[0][e] = s->data[from];
            of[1][e] = s->scale ? s->scale[from] : NULL;
            of[2][e] = s->zero ? s->zero[from] : NULL;
            of[3][e] = s->perm ? s->perm[from] : NULL;
        }
        s->data = (const uint8_t *const *)of[0];
        s->scale = s->scale ? (const void *const *)of[1] : NULL;
        s->zero = s->zero ? (const uint8_t *const *)of[2] : NULL;
        s->perm = s->perm ? (const int32_t *const *)of[3] : NULL;
    }
    for (int e = 0; bias && e < n; e++) {
        int from = cut->n_order ? cut->order[first + e] : first + e;
        memcpy(bias + (size_t)e * (size_t)w->n_out, w->bias + (size_t)from * (size_t)w->n_out,
               (size_t)w->n_out * sizeof *bias);
    }
    w->bias = bias;
    w->n_expert = n;
}

/* All rows of a router's weight, in the order of its experts. */
static void order_rows(const struct copier *to, struct raw_weight *w, const struct cut *cut)
{
    struct run all = {0, w->n_in}, *rows = to->alloc(to->arg, (size_t)cut->n_order, sizeof *rows);
    float *bias = w->bias ? to->alloc(to->arg, (size_t)w->n_out, sizeof *bias) : NULL;
    CHECK(w->n_seg == 1 && w->n_out == cut->n_order, "a router of %d parts", w->n_seg);
    for (int i = 0; i < cut->n_order; i++) {
        rows[i] = (struct run){cut->order[i], 1};
        if (bias)
            bias[i] = w->bias[cut->order[i]];
    }
    cut_segment(to, &w->seg[0], w->n_in, 1, rows, cut->n_order, &all, 1);
    w->bias = bias;
    w->transient = true;
}

bool split_weight(struct raw_weight *w, const struct cut *cut,
                  void *(*alloc)(void *arg, size_t count, size_t size), void *arg,
                  struct error *err)
{
    struct copier to = {alloc, arg};
    struct run all = {0, w->n_in}, rows[CUT_RUNS];
    const struct run *cols = cut->n_cols ? cut->cols : &all;
    int n_cols = cut->n_cols ? cut->n_cols : 1, n_in = w->n_in, base = 0, n_seg = 0, n_out = 0;
    if (cut->experts.n)
        take_experts(&to, w, cut);
    else if (cut->n_order)
        order_rows(&to, w, cut);
    for (int i = 0; i < w->n_seg; i++) {
        struct raw_seg s = w->seg[i];
        int n = rows_within(cut, base, s.rows, rows), height = s.rows;
        base += s.rows;
        if (s.perm && cut->n_cols)
            return error_set(err, "columns in an order of their own (act-order) cannot be cut for "
                                  "several ranks");
        if (n == 0)
            continue;
        /* Gate and up of one tensor become two: tiles of a backend hold rows of one of them. */
        int each = w->n_seg == 1 && n == 2 ? 1 : n;
        for (int k = 0; k < n; k += each) {
            struct raw_seg part = s;
            if (cut->n_cols || n > 1 || rows[0].n < height) {
                cut_segment(&to, &part, n_in, w->n_expert, rows + k, each, cols, n_cols);
                w->transient = true;
            }
            n_out += part.rows;
            w->seg[n_seg++] = part;
        }
    }
    w->n_seg = n_seg;
    if (w->bias)
        w->bias = cut_bias(&to, w, cut, n_out);
    w->n_out = n_out;
    w->n_in = 0;
    for (int i = 0; i < n_cols; i++)
        w->n_in += cols[i].n;
    return true;
}
