/* How a model would be placed on several ranks: see placement.h. Only counts; dist/split.c decides. */
#include "engine/placement.h"
#include "backend/kv_type.h"
#include "base/mem.h"
#include "engine/kvcache.h"
#include "engine/sizing.h"
#include "model/layout.h"
#include "dist/pipeline.h"
#include "dist/split.h"
#include "dist/stages.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct rank_counter {
    const struct tensorfile *f;
    const struct config *c;
    const struct placement_options *o;
    struct placement *plan;
    const struct outline *net; /* cut for this rank */
    struct placement_rank *to;
    struct error *err;
};

/* Bytes of weights */

/* The format of a tensor's rows once they are read (backend/rawweight.h). */
struct row_format {
    enum dtype type;
    int group_len; /* for GPTQ4 */
    bool scales;   /* for F8_E4M3 and NVFP4 */
    bool packed;   /* packed in a checkpoint folder: 128 columns stay together */
};

struct placed_tensor {
    const struct rank_counter *k;
    const struct tensor_name *name;
    int layer;
};

static const struct tensor *find_part(void *arg, const char *suffix)
{
    const struct placed_tensor *p = arg;
    return build_find(p->k->f, p->k->c, p->name, p->layer, 0, suffix);
}

/* The type after loading: quantised matrices that are cut out of one tensor and transposed become fp16. */
static enum dtype transposed_type(enum dtype t)
{
    return t == DT_F32 || t == DT_BF16 ? t : DT_F16;
}

static bool missing(const struct rank_counter *k, const struct tensor_spec *spec,
                    const struct tensor_name *n)
{
    char name[192];
    build_name(k->f, k->c, n, spec->layer, 0, "weight", name, sizeof name);
    return error_set(k->err, "%s: tensor %s: missing", k->f->path, name);
}

static bool plain_form(const struct rank_counter *k, const struct tensor_spec *spec,
                       const struct weight_rows *r, int n_in, int64_t height, int n_stack,
                       struct row_format *out)
{
    const struct tensor *t = build_find(k->f, k->c, r->name, spec->layer, 0, "weight");
    bool transposed = !k->f->is_gguf && r->transposed && !r->stride;
    int64_t d0 = transposed ? height : n_in, d1 = transposed ? n_in : height;
    if (!t)
        return missing(k, spec, r->name);
    if (!dtype_is_weight(t->type))
        return error_set(k->err, "%s: tensor %s: type %s is not supported", k->f->path, t->name,
                         t->type_name);
    if (t->dims[0] != d0 || t->dims[1] != d1 || t->dims[2] != n_stack || t->dims[3] != 1)
        return error_set(k->err,
                         "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                         "], expected [%" PRId64 ", %" PRId64 ", %d]",
                         k->f->path, t->name, t->dims[0], t->dims[1], t->dims[2], d0, d1, n_stack);
    out->type = t->type;
    out->scales = t->type == DT_NVFP4 && build_scale(k->f, k->c, r->name, spec->layer) != NULL;
    return true;
}

static bool form_of(const struct rank_counter *k, const struct tensor_spec *spec,
                    const struct weight_rows *r, struct row_format *out)
{
    struct placed_tensor place = {k, r->name, spec->layer};
    bool part = (!k->f->is_gguf || r->also_gguf) && r->tensor_rows;
    int n_expert = spec->n_expert - (r->more ? r->n_more : 0); /* the others have the same form */
    bool stacked = build_stacked(k->f, r->name) && n_expert > 1 && !r->stride;
    /* stride: one tensor has the matrices of all heads */
    int64_t height = part ? r->tensor_rows : r->n;
    int n_in = spec->n_in;
    if (r->stride) {
        height = (int64_t)spec->n_expert * r->stride;
        n_in = r->transposed ? r->n : spec->n_in;
    }
    *out = (struct row_format){0};
    if (height > INT32_MAX)
        return error_set(k->err, "%s: %" PRId64 " rows of a weight of layer %d", k->f->path, height,
                         spec->layer);
    struct layout_ask ask = {.path = k->f->path,
                             .find = find_part,
                             .arg = &place,
                             .config = &k->c->layout,
                             .n_in = n_in,
                             .n_out = (int)height,
                             .n_stack = stacked ? n_expert : 0,
                             .transposed = r->transposed && !r->stride};
    struct packed_layout lay = {0};
    if (!k->f->is_gguf && !layout_find(&ask, &lay, k->err))
        return false;
    if (lay.kind == LAYOUT_PLAIN) {
        if (!plain_form(k, spec, r, n_in, height, stacked ? n_expert : 1, out))
            return false;
    } else {
        *out = (struct row_format){lay.type, lay.group_len, lay.scale != NULL, true};
    }
    if (r->stride)
        *out = (struct row_format){.type = transposed_type(out->type)};
    return true;
}

/* The number of rows in [base, base + rows) that the cut keeps. */
static int rows_kept(const struct cut *cut, int base, int rows)
{
    int n = 0;
    if (!cut || !cut->n_rows)
        return rows;
    for (int i = 0; i < cut->n_rows; i++) {
        int first = cut->rows[i].first > base ? cut->rows[i].first : base;
        int last = cut->rows[i].first + cut->rows[i].n;
        last = last < base + rows ? last : base + rows;
        n += last > first ? last - first : 0;
    }
    return n;
}

static size_t groups(int n_in, int len)
{
    return (size_t)((n_in + len - 1) / len);
}

/* Bytes of a row of n_in columns, including its scales and zeros. */
static size_t row_bytes(const struct row_format *f, int n_in)
{
    size_t n = dtype_bytes(f->type, (size_t)n_in);
    if (f->type == DT_F8_E4M3 && f->scales)
        n += groups(n_in, 128) * sizeof(float);
    if (f->type == DT_GPTQ4 && f->group_len > 0)
        n += groups(n_in, f->group_len) * (sizeof(uint16_t) + 1);
    return n;
}

/* Bytes and number of values of this rank's shard of a weight or vector. */
static bool measure(const struct rank_counter *k, const struct tensor_spec *spec, size_t *bytes,
                    double *values)
{
    *bytes = 0;
    *values = 0;
    if (!spec->w) {
        /* a single number is a member of struct layer */
        if (spec->n_in > 1)
            *bytes = (size_t)rows_kept(spec->cut, 0, spec->n_in) * sizeof(float);
        return spec->values ||
               build_find(k->f, k->c, spec->rows[0].name, spec->layer, 0, "weight") ||
               missing(k, spec, spec->rows[0].name);
    }
    int base = 0;
    size_t experts = (size_t)spec->w->n_expert;
    for (int i = 0; i < spec->n_rows; i++) {
        struct row_format form;
        if (!form_of(k, spec, &spec->rows[i], &form))
            return false;
        size_t rows = (size_t)rows_kept(spec->cut, base, spec->rows[i].n);
        if (form.type == DT_GPTQ4 && spec->cut && spec->cut->n_cols)
            form.group_len = cut_group_len(form.group_len);
        base += spec->rows[i].n;
        *bytes += experts * rows * row_bytes(&form, spec->w->n_in);
        if (form.type == DT_NVFP4 && form.scales && rows)
            *bytes += experts * sizeof(float);
        *values += (double)experts * (double)rows * spec->w->n_in;
    }
    if (spec->w->bias)
        *bytes += experts * (size_t)spec->w->n_out * sizeof(float);
    return true;
}

bool placement_shape(const struct tensorfile *f, const struct config *c,
                     const struct tensor_spec *spec, struct raw_weight *out, struct error *err)
{
    static const float some; /* marks a bias as present; its values are not read */
    static const void *const planes[1];
    struct rank_counter k = {.f = f, .c = c, .err = err};
    *out = (struct raw_weight){.n_in = spec->w->n_in,
                               .n_out = spec->w->n_out,
                               .n_expert = spec->w->n_expert,
                               .n_seg = spec->n_rows,
                               .bias = spec->w->bias ? &some : NULL};
    for (int i = 0; i < spec->n_rows; i++) {
        struct row_format form;
        if (!form_of(&k, spec, &spec->rows[i], &form))
            return false;
        out->transient |= form.packed || form.scales || form.type == DT_F8_E4M3 ||
                          spec->rows[i].stride || rows_order(&spec->rows[i], f->is_gguf) ||
                          ((!f->is_gguf || spec->rows[i].also_gguf) && spec->rows[i].tensor_rows);
        out->seg[i] = (struct raw_seg){.type = form.type,
                                       .rows = spec->rows[i].n,
                                       .scale = form.scales ? planes : NULL,
                                       .group_len = form.group_len};
    }
    return true;
}

/* Replicated parts, and the reason */

static void add_copy(struct placement *p, const char *part, const char *why, int layers,
                     size_t bytes)
{
    struct placement_copy *c = p->copies;
    for (; c < p->copies + p->n_copies; c++)
        if (!strcmp(c->part, part) && !strcmp(c->why, why))
            break;
    if (c == p->copies + PLACEMENT_COPIES)
        c--; /* too many: the last entry counts the rest */
    else if (c == p->copies + p->n_copies) {
        p->n_copies++;
        c->part = part;
        snprintf(c->why, sizeof c->why, "%s", why);
    }
    c->layers += layers;
    c->bytes += bytes;
}

/* The block length of a weight in its file: columns are cut at multiples of it. */
static int block_of(const struct rank_counter *k, const struct weight *w)
{
    for (int i = 0; i < k->net->n_specs; i++) {
        const struct tensor_spec *spec = &k->net->specs[i];
        struct row_format form;
        struct error ignored;
        struct rank_counter quiet = *k;
        quiet.err = &ignored;
        if (spec->w == w && form_of(&quiet, spec, &spec->rows[0], &form))
            return form.packed || form.type == DT_F8_E4M3 ? 128 : dtype_table[form.type].block_len;
    }
    return 1;
}

static void why_heads(const struct rank_counter *k, const struct weight *wo, int heads, int dim,
                      char *why, size_t size)
{
    int block = block_of(k, wo);
    if (heads < k->o->tp)
        snprintf(why, size, "%d heads for %d ranks", heads, k->o->tp);
    else
        snprintf(why, size, "%d heads of %d cannot be shared by %d ranks in blocks of %d", heads,
                 dim, k->o->tp, block);
}

static const char *why_mixer(const struct rank_counter *k, const struct mixer *m, char *why,
                             size_t size)
{
    const struct attention *a = &m->attention;
    const struct delta_net *d = &m->delta_net;
    if (m->kind == MIXER_SHORT_CONV)
        return "it has no heads";
    if (m->kind == MIXER_COMPRESSED)
        return "all its heads read one key";
    if (m->kind == MIXER_SSM || m->kind == MIXER_SCAN)
        return "state-space models are not shared";
    if (m->kind == MIXER_ATTENTION && a->index.n_chosen)
        return "its keys are chosen for each group of heads";
    if (m->kind == MIXER_ATTENTION && a->norm_whole)
        return "its QK-norm is over all heads";
    if (m->kind == MIXER_ATTENTION && a->shares_kv)
        return "it reads the cache of a layer that is whole, or has fewer heads than ranks";
    if (m->kind == MIXER_ATTENTION)
        why_heads(k, a->wo, a->n_heads, a->v_dim, why, size);
    else if (m->kind == MIXER_LATENT)
        why_heads(k, m->latent.wo, m->latent.n_heads, m->latent.v_dim, why, size);
    else
        why_heads(k, d->wo, d->n_k_heads, d->v_dim * (d->n_v_heads / d->n_k_heads), why, size);
    return why;
}

static char *why_ffn(const struct rank_counter *k, const struct ffn *f, char *why, size_t size)
{
    snprintf(why, size, "%d hidden units in blocks of %d cannot be shared by %d ranks",
             f->down->n_in, block_of(k, f->down), k->o->tp);
    return why;
}

static bool is_mlp_weight(const struct mlp *m, const struct weight *w)
{
    return w == m->dense.gate_up || w == m->dense.down || w == m->experts.gate_up ||
           w == m->experts.down || w == m->dense_gate || w == m->router.w || w == m->embed.gate ||
           w == m->embed.project;
}

static void explain_layer(const struct rank_counter *k, const struct weight *w,
                          const struct layer *l, size_t bytes)
{
    static const char *const mixers[] = {"attention",
                                         "latent attention",
                                         "delta net",
                                         "short convolution",
                                         "state-space model",
                                         "selective scan",
                                         "compressed attention",
                                         "none"};
    const struct mlp *m = &l->mlp;
    char why[160];
    bool last = w == mixer_out(&l->mixer) || w == m->dense.down || w == m->experts.down;
    if (w == m->router.w || w == m->dense_gate)
        add_copy(k->plan, "routers and gates", "they are small, and every rank chooses for itself",
                 w == m->router.w, bytes);
    else if (w == m->embed.gate || w == m->embed.project)
        add_copy(k->plan, "embeddings by layer", "they are small", w == m->embed.project, bytes);
    else if (w == m->dense.gate_up || w == m->dense.down)
        add_copy(k->plan, m->router.w ? "shared experts" : "mlps",
                 why_ffn(k, &m->dense, why, sizeof why), last, bytes);
    else if (w == m->experts.gate_up || w == m->experts.down)
        add_copy(k->plan, "experts", why_ffn(k, &m->experts, why, sizeof why), last, bytes);
    else if (l->mixer.kind == MIXER_LATENT && l->mixer.partial)
        add_copy(k->plan, "latent projections", "all heads read the latent",
                 w == l->mixer.latent.wkva, bytes);
    else
        add_copy(k->plan, mixers[l->mixer.kind], why_mixer(k, &l->mixer, why, sizeof why), last,
                 bytes);
}

static void explain(const struct rank_counter *k, const struct tensor_spec *spec, size_t bytes)
{
    const struct network *net = &k->net->net;
    const struct weight *w = spec->w;
    int at = spec->net_layer - k->to->layers.first;
    if (!w)
        add_copy(k->plan, "norms and other vectors", "they are small", 0, bytes);
    else if (w == net->embed.tokens || w == net->head.w)
        add_copy(k->plan, w == net->head.w ? "head" : "embedding",
                 net->n_vocab < 64 * k->o->tp ? "fewer than 64 rows for each rank"
                                              : "positions, types or a norm are added to it",
                 0, bytes);
    else if (at >= 0 && at < net->n_layers &&
             (is_mlp_weight(&net->layers[at].mlp, w) || spec->role == WEIGHT_HEADS ||
              spec->role == WEIGHT_LINEAR))
        explain_layer(k, w, &net->layers[at], bytes);
    else
        add_copy(k->plan, "other embeddings", "their rows are looked up by all", 0, bytes);
}

/* Counts of a rank */

static void widen(struct placement_span *s, int n)
{
    s->least = !s->most || n < s->least ? n : s->least;
    s->most = n > s->most ? n : s->most;
}

static void count_mixer(const struct mixer *m, struct placement_rank *to)
{
    switch (m->kind) {
    case MIXER_ATTENTION:
        widen(&to->heads, m->attention.n_heads);
        widen(&to->kv_heads, m->attention.n_kv_heads);
        to->work.attn_flops +=
            2.0 * m->attention.n_heads * (m->attention.k_dim + m->attention.v_dim);
        break;
    case MIXER_LATENT:
        widen(&to->heads, m->latent.n_heads);
        to->work.attn_flops +=
            2.0 * m->latent.n_heads * (2 * m->latent.kv_rank + m->latent.rope_dim);
        break;
    case MIXER_DELTA_NET:
        widen(&to->heads, m->delta_net.n_v_heads);
        break;
    case MIXER_SSM:
        widen(&to->heads, m->ssm.n_heads);
        break;
    case MIXER_COMPRESSED:
        widen(&to->heads, m->compressed.n_heads);
        if (m->compressed.compressor.rate)
            to->work.attn_flops +=
                4.0 * m->compressed.n_heads * m->compressed.dim / m->compressed.compressor.rate;
        break;
    case MIXER_SHORT_CONV:
    case MIXER_SCAN:
    case MIXER_NONE:
        break;
    }
}

/* The number of all-reduces that backends do for a layer. */
static int sums_of(const struct layer *l)
{
    const struct mlp *m = &l->mlp;
    bool both = m->dense_partial && m->experts_partial;
    bool once = both && m->experts_out.kind == NORM_NONE && m->dense_out.kind == NORM_NONE;
    return l->mixer.partial + (once ? 1 : m->dense_partial + m->experts_partial);
}

static void count_layers(const struct network *net, struct placement_rank *to)
{
    int depth = network_depth(net);
    struct predict_comm *t = &to->comm;
    t->sums = net->embed.partial && !net->has_prev_stage;
    for (int i = 0; i < depth; i++) {
        const struct layer *l = &net->layers[i];
        bool narrow = i == depth - 1 && !net->has_next_stage;
        count_mixer(&l->mixer, to);
        if (l->mlp.dense.gate_up)
            widen(&to->ff, l->mlp.dense.down->n_in);
        if (l->mlp.router.w) {
            widen(&to->ff_exp, l->mlp.experts.down->n_in);
            to->experts = (struct range){l->mlp.expert_first, l->mlp.experts.down->n_expert};
            to->work.n_expert = l->mlp.router.w->n_out;
            to->work.n_used = l->mlp.router.n_used;
        }
        *(narrow ? &t->sums_last : &t->sums) += sums_of(l);
    }
    to->work.layers = depth;
    t->ep = to->experts.n < to->work.n_expert;
}

/* The kept rows of a weight that is cut to one run, or not cut. */
static struct range rows_of(const struct outline *o, const struct weight *w)
{
    for (int i = 0; i < o->n_specs; i++) {
        const struct cut *cut = o->specs[i].w == w ? o->specs[i].cut : NULL;
        if (cut && cut->n_rows)
            return cut->rows[0];
    }
    return (struct range){0, w->n_out};
}

/* shared: first and last stage share the rows of the head. */
static void count_ends(const struct outline *o, bool shared, struct placement_rank *to)
{
    const struct network *net = &o->net;
    const struct head *h = &net->head;
    bool has_head = h->w && (!net->has_next_stage || (shared && !net->has_prev_stage));
    shared = shared && has_head;
    to->comm.embd = net->n_embd;
    to->comm.vocab = h->w ? net->n_vocab : net->n_embd;
    if (has_head)
        to->vocab = rows_of(o, h->w);
    else if (!net->has_prev_stage)
        to->vocab = rows_of(o, net->embed.tokens);
    to->comm.collects = h->w && h->w->n_out < net->n_vocab && !net->has_next_stage && !shared;
    to->comm.head_rows = shared ? h->w->n_out : 0;
}

static bool count_weights(const struct rank_counter *k)
{
    struct placement_rank *to = k->to;
    const struct network *net = &k->net->net;
    bool first_in_stage = to->tp_rank == 0;
    for (int i = 0; i < k->net->n_specs; i++) {
        const struct tensor_spec *spec = &k->net->specs[i];
        const struct cut *cut = spec->cut;
        size_t bytes;
        double values;
        if (cut && cut->none)
            continue;
        if (!measure(k, spec, &bytes, &values))
            return false;
        to->weights += bytes;
        bool experts = spec->role == WEIGHT_EXPERTS || spec->role == WEIGHT_EXPERTS_SHARED;
        bool head = spec->w && spec->w == net->head.w;
        if (spec->w && experts) {
            to->work.expert_bytes += (double)bytes;
            to->work.expert_params += values;
        } else if (spec->w && spec->role == WEIGHT_EMBED && !head) {
            /* an embedding: only a row per token is read */
        } else {
            to->work.bytes += (double)bytes;
            to->work.head_bytes += head ? (double)bytes : 0;
            *(head ? &to->work.head_params : &to->work.params) += values;
        }
        bool whole = !cut || (!cut->n_rows && !cut->n_cols && !cut->experts.n);
        if (whole && k->o->tp > 1) {
            to->whole += bytes;
            if (first_in_stage)
                explain(k, spec, bytes);
        }
    }
    return true;
}

/* Counts one rank; r NULL: a single process. */
static bool place(const struct rank_counter *common, const struct ranks *r,
                  struct placement_rank *to)
{
    struct outline o = {0};
    struct rank_counter of_rank = *common, *k = &of_rank;
    int n_layers = config_net_layers(k->c);
    *to = (struct placement_rank){.layers = {0, n_layers},
                                  .comm = {.tp = r ? r->tp : 1, .pp = r ? r->pp : 1}};
    if (r) {
        to->rank = r->rank;
        to->tp_rank = r->tp_rank;
        to->stage = r->stage;
    }
    if (!outline_load(k->f, k->c, &o, k->err))
        return false;
    k->net = &o;
    k->to = to;
    bool shared = r && stages_share_head(&o.net, r);
    bool ok = !r || r->pp == 1 ||
              stages_layers(k->f, k->c, &o.net, o.specs, o.n_specs, r, &to->layers, k->err) ||
              error_prefix(k->err, "%s", k->f->path);
    ok = ok && (split_network(k->f, k->c, &o.net, o.specs, o.n_specs, r, k->err) ||
                error_prefix(k->err, "%s", k->f->path));
    ok = ok && kv_types_check(&o.net, k->o->k_type, k->o->v_type, k->err);
    if (ok) {
        struct step_limits lim = {
            .max_tokens = k->o->max_tokens, .max_seqs = k->o->max_seqs, .max_out = k->o->max_seqs};
        count_layers(&o.net, to);
        count_ends(&o, shared, to);
        to->comm.overhead = k->o->gpu ? 0 : PIPELINE_PART_OVERHEAD;
        to->token_bytes = kvcache_token_bytes(&o.net, k->o->k_type, k->o->v_type);
        to->state_bytes = kvcache_state_bytes(&o.net);
        to->scratch = sizing_step_bytes(&o.net, &lim);
        to->work.kv_bytes = (double)to->token_bytes;
        ok = count_weights(k);
    }
    outline_free(&o);
    return ok;
}

/* If there are fewer kv heads than ranks, each kv head and its cache are on several ranks. */
static void note_kv_heads(struct placement *p)
{
    char why[160];
    int all = p->one.kv_heads.most;
    if (p->tp == 1 || !all || all >= p->tp || p->ranks[0].heads.most == p->one.heads.most)
        return;
    snprintf(why, sizeof why, "%d for %d ranks: each is on %s%d of them, with its cache", all,
             p->tp, p->tp % all ? "up to " : "", (p->tp + all - 1) / all);
    add_copy(p, "KV heads", why, 0, 0);
}

bool placement_make(const struct tensorfile *f, const struct config *c,
                    const struct placement_options *o, struct placement *out, struct error *err)
{
    *out = (struct placement){.tp = o->tp, .pp = o->pp, .ep = o->ep, .n_ranks = o->tp * o->pp};
    struct rank_counter k = {.f = f, .c = c, .o = o, .plan = out, .err = err};
    if (out->n_ranks > RANKS_MOST)
        return error_set(err, "--tp %d times --pp %d are %d ranks; %d is the most", o->tp, o->pp,
                         out->n_ranks, RANKS_MOST);
    struct placement_options alone = *o;
    alone.tp = alone.pp = 1;
    k.o = &alone;
    if (!place(&k, NULL, &out->one))
        return false;
    k.o = o;
    out->ranks = mem_zalloc((size_t)out->n_ranks, sizeof *out->ranks);
    for (int i = 0; i < out->n_ranks; i++) {
        struct ranks r = {.rank = i,
                          .size = out->n_ranks,
                          .tp = o->tp,
                          .pp = o->pp,
                          .ep = o->ep,
                          .comm.n_on_device = o->gpu,
                          .tp_rank = i % o->tp,
                          .stage = i / o->tp};
        if (!place(&k, &r, &out->ranks[i])) {
            placement_clear(out);
            return false;
        }
    }
    note_kv_heads(out);
    return true;
}

void placement_clear(struct placement *p)
{
    mem_free(p->ranks);
    *p = (struct placement){0};
}
