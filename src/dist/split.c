/* Cuts a network for ranks: see split.h. Knows layers and tensor specs, nothing of backends. */
#include "dist/split.h"
#include "base/mem.h"
#include "dist/expert_load.h"
#include "dist/stages.h"

#include <string.h>

enum {
    UNEVEN_PERCENT = 10, /* a rank may have this much more than its share of every expert */
};

struct splitter {
    const struct tensorfile *f;
    const struct config *c;
    struct network *net;
    struct tensor_spec *specs;
    int n_specs;
    const struct ranks *r;
    struct tensorfile *stats; /* counts of expert use (expert_load.h), or NULL */
    struct error *err;
};

/* a, b > 0 */
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

static struct tensor_spec *spec_of(struct splitter *s, const struct weight *w)
{
    for (int i = 0; i < s->n_specs; i++)
        if (s->specs[i].w == w)
            return &s->specs[i];
    CHECK(false, "a weight without a tensor spec");
    return NULL;
}

/* The spec's cut, allocated on first use. */
static struct cut *cut_of(struct tensor_spec *spec)
{
    if (!spec->cut)
        spec->cut = mem_zalloc(1, sizeof *spec->cut);
    return spec->cut;
}

/* The number of columns that must stay together: columns are cut at multiples of it. */
static int unit_of(struct splitter *s, const struct weight *w)
{
    const struct tensor_spec *spec = spec_of(s, w);
    int unit = 1;
    for (int i = 0; i < spec->n_rows; i++) {
        const struct tensor *t =
            build_find(s->f, s->c, spec->rows[i].name, spec->layer, 0, "weight");
        /* A packed checkpoint's "weight" may be codes, as bytes or as a type that we do not have. */
        bool packed = !t || t->type == DT_F8_E4M3 || !dtype_is_weight(t->type);
        unit = lcm(unit, packed ? CUT_PACKED_UNIT : dtype_table[t->type].block_len);
    }
    return unit;
}

/* Keeps these runs of w's rows only. */
static void keep_rows(struct splitter *s, const struct weight *w, int n, const struct range *runs)
{
    struct tensor_spec *spec = spec_of(s, w);
    struct cut *k = cut_of(spec);
    CHECK(n <= CUT_RUNS, "%d runs", n);
    spec->w->n_out = 0;
    for (int i = 0; i < n; i++) {
        k->rows[i] = runs[i];
        spec->w->n_out += runs[i].n;
    }
    k->n_rows = n;
}

/* Keeps these runs of w's columns only. The products of all ranks are summed. */
static void keep_cols(struct splitter *s, const struct weight *w, int n, const struct range *runs)
{
    struct tensor_spec *spec = spec_of(s, w);
    struct cut *k = cut_of(spec);
    CHECK(n <= CUT_RUNS, "%d runs", n);
    spec->w->n_in = 0;
    for (int i = 0; i < n; i++) {
        k->cols[i] = runs[i];
        spec->w->n_in += runs[i].n;
    }
    k->n_cols = n;
    k->no_bias = s->r->tp_rank > 0;
}

static void keep_experts(struct splitter *s, const struct weight *w, struct range run)
{
    struct tensor_spec *spec = spec_of(s, w);
    cut_of(spec)->experts = run;
    spec->w->n_expert = run.n;
    if (spec->role == WEIGHT_EXPERTS_SHARED)
        spec->role = WEIGHT_EXPERTS;
}

/* Reorders the spec's experts, or its rows or values by expert. */
static void keep_order(struct tensor_spec *spec, const int32_t *order, int n)
{
    size_t bytes = (size_t)n * sizeof *order;
    spec->cut = mem_realloc(cut_of(spec), 1, sizeof *spec->cut + bytes);
    memcpy(spec->cut->order, order, bytes);
    spec->cut->n_order = n;
}

static void keep_vector_order(struct splitter *s, const float *vector, const int32_t *order, int n)
{
    for (int i = 0; i < s->n_specs; i++)
        if (vector && s->specs[i].vector == vector)
            keep_order(&s->specs[i], order, n);
}

static void keep_values(struct splitter *s, const float *vector, int n, const struct range *runs)
{
    for (int i = 0; i < s->n_specs; i++)
        if (vector && s->specs[i].vector == vector) {
            struct cut *k = cut_of(&s->specs[i]);
            memcpy(k->rows, runs, (size_t)n * sizeof *runs);
            k->n_rows = n;
        }
}

static struct range times(struct range r, int n)
{
    return (struct range){r.first * n, r.n * n};
}

static struct range after(struct range r, int n)
{
    return (struct range){r.first + n, r.n};
}

/* Attention */

/* The heads of one rank: whole kv groups, or a part of one group if there are fewer kv heads than ranks. False: the
 * rank would have no heads, or a unit of heads would be split. */
static bool heads_of(int H, int K, int unit, int tp_rank, int tp, struct range *q, struct range *kv)
{
    int group = H / K;
    if (K >= tp) {
        *kv = range_share(K, 1, tp_rank, tp);
        *q = times(*kv, group);
        return kv->n > 0 && q->first % unit == 0 && q->n % unit == 0;
    }
    for (int k = 0; k < K; k++) {
        struct range who = range_share(tp, 1, k, K);
        if (tp_rank < who.first || tp_rank >= who.first + who.n)
            continue;
        *kv = (struct range){k, 1};
        *q = after(range_share(group, unit, tp_rank - who.first, who.n), k * group);
        return group % unit == 0 && q->n > 0;
    }
    return false;
}

/* Heads that stay together so that wo's columns can be cut. */
static int head_unit(struct splitter *s, const struct weight *wo, int v_dim)
{
    return lcm(unit_of(s, wo), v_dim) / v_dim;
}

static bool can_cut_heads(int H, int K, int unit, int tp)
{
    struct range q = {0}, kv = {0};
    for (int t = 0; t < tp; t++)
        if (!heads_of(H, K, unit, t, tp, &q, &kv))
            return false;
    return true;
}

static bool can_cut(struct splitter *s, const struct mixer *m)
{
    int tp = s->r->tp;
    const struct attention *a = &m->attention;
    const struct latent *l = &m->latent;
    const struct delta_net *d = &m->delta_net;
    switch (m->kind) {
    case MIXER_ATTENTION:
        return !a->norm_whole && a->out_norm.kind == NORM_NONE && !a->index.n_chosen &&
               can_cut_heads(a->n_heads, a->n_kv_heads, head_unit(s, a->wo, a->v_dim), tp);
    case MIXER_LATENT:
        return can_cut_heads(l->n_heads, l->n_heads, head_unit(s, l->wo, l->v_dim), tp);
    case MIXER_DELTA_NET: {
        /* tiled: the v heads of a k head are not contiguous, nor are wo's columns for them */
        int each = d->n_v_heads / d->n_k_heads, unit = head_unit(s, d->wo, d->v_dim);
        return d->n_v_heads % d->n_k_heads == 0 && (!d->tiled || each <= CUT_RUNS / 2) &&
               d->n_k_heads >= tp &&
               (d->tiled ? d->n_k_heads % unit == 0 &&
                               can_cut_heads(d->n_k_heads, d->n_k_heads, unit, tp)
                         : can_cut_heads(d->n_v_heads, d->n_k_heads, unit, tp));
    }
    case MIXER_SHORT_CONV:
    case MIXER_SSM:
    case MIXER_SCAN:
    case MIXER_COMPRESSED:
    case MIXER_NONE:
        break;
    }
    return false;
}

static void cut_attention(struct splitter *s, struct attention *a)
{
    struct range q = {0}, kv = {0}, rows[3];
    heads_of(a->n_heads, a->n_kv_heads, head_unit(s, a->wo, a->v_dim), s->r->tp_rank, s->r->tp, &q,
             &kv);
    int each = a->k_dim + (a->gated ? a->v_dim : 0), n = 1;
    int k0 = a->n_heads * each, v0 = k0 + a->n_kv_heads * a->k_dim;
    rows[0] = times(q, each);
    if (!a->shares_kv)
        rows[n++] = after(times(kv, a->k_dim), k0);
    if (!a->shares_kv && !a->k_is_v)
        rows[n++] = after(times(kv, a->v_dim), v0);
    keep_rows(s, a->wqkv, n, rows);
    keep_cols(s, a->wo, 1, (struct range[]){times(q, a->v_dim)});
    keep_values(s, a->sinks, 1, &q);
    if (a->wrel)
        keep_rows(s, a->wrel, 1, (struct range[]){times(q, a->rel_dim)});
    keep_values(s, a->k_conv.taps, 1, (struct range[]){times(kv, a->k_dim * a->k_conv.len)});
    keep_values(s, a->v_conv.taps, 1, (struct range[]){times(kv, a->v_dim * a->v_conv.len)});
    if (a->wgate)
        keep_rows(s, a->wgate, 1, (struct range[]){times(q, a->wgate->n_out / a->n_heads)});
    a->n_heads = q.n;
    a->n_kv_heads = kv.n;
}

static void cut_latent(struct splitter *s, struct latent *l)
{
    struct range q = {0}, kv = {0};
    heads_of(l->n_heads, l->n_heads, head_unit(s, l->wo, l->v_dim), s->r->tp_rank, s->r->tp, &q,
             &kv);
    keep_rows(s, l->wqb, 1, (struct range[]){times(q, l->nope_dim + l->rope_dim)});
    keep_experts(s, l->wkb, q);
    keep_experts(s, l->wvb, q);
    keep_cols(s, l->wo, 1, (struct range[]){times(q, l->v_dim)});
    l->n_heads = q.n;
}

static void cut_delta_net(struct splitter *s, struct delta_net *d)
{
    int each = d->n_v_heads / d->n_k_heads, keys = d->n_k_heads * d->k_dim, n = 1;
    int unit = head_unit(s, d->wo, d->v_dim);
    struct range v[CUT_RUNS] = {{0}}, k = {0}, q = {0}, rows[CUT_RUNS];
    if (d->tiled) {
        heads_of(d->n_k_heads, d->n_k_heads, unit, s->r->tp_rank, s->r->tp, &q, &k);
        for (n = 0; n < each; n++)
            v[n] = after(k, n * d->n_k_heads);
    } else {
        heads_of(d->n_v_heads, d->n_k_heads, unit, s->r->tp_rank, s->r->tp, &v[0], &k);
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

/* A layer that reads another layer's cache must be cut like that layer. */
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

/* MLPs */

/* The number of hidden units that stay together; 0: some rank would have none, or a norm needs them all. */
static int hidden_unit(struct splitter *s, const struct ffn *f)
{
    if (f->mid.kind != NORM_NONE || f->sparse)
        return 0;
    int F = f->down->n_in, unit = unit_of(s, f->down), wide = lcm(unit, 32);
    if (F % wide == 0 && F / wide >= s->r->tp)
        unit = wide; /* whole SIMD vectors are faster */
    return F % unit || F / unit < s->r->tp ? 0 : unit;
}

/* Keeps this rank's hidden units. False: some rank would have none. */
static bool cut_hidden(struct splitter *s, struct ffn *f)
{
    int F = f->down->n_in, unit = hidden_unit(s, f);
    if (!unit)
        return false;
    struct range mine = range_share(F, unit, s->r->tp_rank, s->r->tp);
    int n = f->gate_up->n_out > F ? 2 : 1;
    keep_rows(s, f->gate_up, n, (struct range[]){mine, after(mine, F)});
    keep_cols(s, f->down, 1, &mine);
    return true;
}

/* Whether each rank takes whole experts. It does so in three cases:
 * 1. The user chose expert parallel.
 * 2. The experts' hidden units cannot be cut.
 * 3. On CPUs, cutting at block boundaries would give a rank much more than its share (768 units in blocks of 256 on
 *    two ranks). This does not hold on a GPU, which reads all experts that a row selects, its own or not. */
static bool by_expert(struct splitter *s, const struct mlp *m)
{
    int tp = s->r->tp, unit = hidden_unit(s, &m->experts);
    if (m->experts.gate_up->n_expert < tp)
        return false;
    if (s->r->ep || !unit)
        return true;
    int units = m->experts.down->n_in / unit, most = (units + tp - 1) / tp;
    bool on_gpu = s->r->comm.n_on_device > 0;
    return !on_gpu && 100 * most * tp > (100 + UNEVEN_PERCENT) * units;
}

/* Reorders the experts so that the ranks' runs of them have about equal load. The router's rows and biases are
 * reordered with the weights. */
static bool order_experts(struct splitter *s, const struct mlp *m)
{
    const struct router *r = &m->router;
    int n = m->experts.gate_up->n_expert;
    struct tensor_spec *router = spec_of(s, r->w);
    if (r->n_same)
        return error_set(s->err, "--expert-stats: not supported with experts without weights");
    int32_t *order = mem_zalloc((size_t)n, sizeof *order);
    bool ok = expert_load_order(s->stats, router->layer, r, n, s->r->tp, order, s->err);
    if (ok) {
        keep_order(router, order, n);
        keep_order(spec_of(s, m->experts.gate_up), order, n);
        keep_order(spec_of(s, m->experts.down), order, n);
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
        struct range mine = range_share(n, 1, s->r->tp_rank, s->r->tp);
        keep_experts(s, m->experts.gate_up, mine);
        keep_experts(s, m->experts.down, mine);
        m->expert_first = mine.first;
        m->experts_partial = true;
    } else {
        m->experts_partial = cut_hidden(s, &m->experts);
    }
    return true;
}

/* Cuts the rows of the embedding and of the head, which may be tied. */
static void cut_ends(struct splitter *s)
{
    struct head *h = &s->net->head;
    struct embed *e = &s->net->embed;
    struct range mine = ranks_vocab(s->r, s->net->n_vocab, s->r->tp_rank);
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
    h->partial = true;
    h->first = mine.first;
    if (s->net->mtp.fc) {
        s->net->mtp.head.partial = true;
        s->net->mtp.head.first = mine.first;
    }
}

/* Stages */

static void leave(struct splitter *s, const struct weight *w)
{
    if (w)
        cut_of(spec_of(s, w))->none = true;
}

/* Keeps this stage's layers only. */
static bool cut_layers(struct splitter *s, struct error *err)
{
    const struct ranks *r = s->r;
    struct network *net = s->net;
    struct embed_layers *e = &net->embed.layers;
    int depth = network_depth(net);
    bool shared = stages_share_head(net, r);
    struct range mine;
    if (net->streams.n)
        return error_set(err, "--pp %d: a stream of several parts cannot be divided into stages",
                         r->pp);
    if (!stages_layers(s->f, s->c, net, s->specs, s->n_specs, r, &mine, err))
        return false;
    if (r->stage == r->pp - 1)
        mine.n += net->n_layers - depth; /* the MTP block is on the head's stage */
    else
        net->mtp = (struct mtp){0};
    for (int i = mine.first; i < mine.first + mine.n; i++) {
        struct attention *a = &net->layers[i].mixer.attention;
        if (net->layers[i].mixer.kind == MIXER_ATTENTION && a->shares_kv)
            a->kv_layer -= mine.first; /* that layer is on this stage, too */
    }
    for (int i = 0; i < s->n_specs; i++) {
        int layer = s->specs[i].net_layer;
        if (stages_spec_of_layer(s->f, s->c, &s->specs[i]) &&
            (layer < mine.first || layer >= mine.first + mine.n))
            cut_of(&s->specs[i])->none = true;
    }
    net->has_prev_stage = r->stage > 0;
    net->has_next_stage = r->stage < r->pp - 1;
    bool tied = net->head.w == net->embed.tokens;
    /* Per-layer embeddings are computed from the token's embedding. The MTP block reads tokens, too. */
    if (net->has_prev_stage && !e->width && !net->mtp.fc && (!tied || net->has_next_stage))
        leave(s, net->embed.tokens);
    struct range head = stages_head(r, net->n_vocab);
    if (shared && head.n)
        keep_rows(s, net->head.w, 1, &head);
    else if (net->has_next_stage && !tied)
        leave(s, net->head.w);
    if (e->width) {
        struct range part = times(mine, e->width);
        if (part.first % unit_of(s, e->table) || part.n % unit_of(s, e->table))
            return error_set(err, "--pp %d: per-layer embeddings cannot be divided into stages",
                             r->pp);
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

bool split_for(void *arg, const struct tensorfile *f, const struct config *c, struct network *net,
               struct tensor_spec *specs, int n_specs, struct error *err)
{
    return split_network(f, c, net, specs, n_specs, arg, err);
}
