/*
 * Sizes of a network's parts, and which of them go beyond a plain decoder. Knows only the description (layer.h), no
 * backend and no file.
 */
#include "backend/layer.h"

static void widen(int *to, int n)
{
    *to = n > *to ? n : *to;
}

static void measure_attention(const struct attention *a, struct network_max *out)
{
    int q = a->n_heads * a->k_dim, v = a->n_heads * a->v_dim;
    widen(&out->qkv, q + (a->gated ? v : 0) + a->n_kv_heads * (a->k_dim + a->v_dim));
    widen(&out->heads, q > v ? q : v);
    if (a->wgate)
        widen(&out->gates, a->wgate->n_out);
    if (a->wrel) {
        widen(&out->rel, a->wrel->n_out);
        widen(&out->rel_len, a->rel_len);
    }
    widen(&out->conv_len, a->k_conv.len);
    widen(&out->n_heads, a->n_heads);
    widen(&out->n_kv_heads, a->n_kv_heads);
    widen(&out->head_dim, a->k_dim > a->v_dim ? a->k_dim : a->v_dim);
    widen(&out->group, (a->n_heads + a->n_kv_heads - 1) / a->n_kv_heads);
}

static void measure_latent(const struct latent *l, struct network_max *out)
{
    int q = l->n_heads * (l->nope_dim + l->rope_dim), v = l->n_heads * l->v_dim;
    widen(&out->qkv, q);
    widen(&out->heads, q > v ? q : v);
    widen(&out->n_heads, l->n_heads);
    widen(&out->latent,
          l->kv_rank + l->rope_dim > l->q_rank ? l->kv_rank + l->rope_dim : l->q_rank);
}

static void measure_delta_net(const struct delta_net *d, struct network_max *out)
{
    int values = d->n_v_heads * d->v_dim;
    widen(&out->qkv, 2 * d->n_k_heads * d->k_dim + values);
    widen(&out->heads, values);
    widen(&out->state_heads, d->n_v_heads);
}

static void measure_ssm(const struct ssm *m, struct network_max *out)
{
    widen(&out->qkv, m->w_in->n_out + (m->w_z ? m->w_z->n_out : 0));
    widen(&out->heads, m->n_heads * m->head_dim);
    widen(&out->state_heads, m->n_heads);
}

static void measure_scan(const struct scan *m, struct network_max *out)
{
    widen(&out->qkv, m->w_in->n_out);
    widen(&out->heads, m->n_channels);
    widen(&out->latent, m->w_x->n_out);
}

static void measure_index(const struct indexer *x, int n_kv_heads, struct network_max *out)
{
    widen(&out->index, x->n_heads * x->dim);
    widen(&out->index_heads, x->n_heads);
    widen(&out->index_chosen, x->n_chosen);
    widen(&out->index_groups, x->block ? n_kv_heads : 1);
}

static void measure_compressed(const struct compressed *c, struct network_max *out)
{
    int q = c->n_heads * c->dim, o = c->wob->n_in;
    widen(&out->qkv, q > o ? q : o);
    widen(&out->heads, q > o ? q : o);
    widen(&out->n_heads, c->n_heads);
    widen(&out->latent, c->dim > c->q_rank ? c->dim : c->q_rank);
    const struct compressor *both[] = {&c->compressor, &c->index.compressor};
    for (int i = 0; i < 2; i++)
        if (both[i]->rate)
            widen(&out->compressed, both[i]->w->n_out);
}

static void measure_mixer(const struct mixer *m, struct network_max *out)
{
    switch (m->kind) {
    case MIXER_ATTENTION:
        measure_attention(&m->attention, out);
        break;
    case MIXER_LATENT:
        measure_latent(&m->latent, out);
        break;
    case MIXER_DELTA_NET:
        measure_delta_net(&m->delta_net, out);
        break;
    case MIXER_SHORT_CONV:
        widen(&out->qkv, m->short_conv.w_in->n_out);
        widen(&out->heads, m->short_conv.w_out->n_in);
        break;
    case MIXER_SSM:
        measure_ssm(&m->ssm, out);
        break;
    case MIXER_SCAN:
        measure_scan(&m->scan, out);
        break;
    case MIXER_COMPRESSED:
        measure_compressed(&m->compressed, out);
        break;
    case MIXER_NONE:
        break;
    }
    if (mixer_index(m))
        measure_index(mixer_index(m), m->attention.n_kv_heads, out);
}

int merger_rows(const struct merger *m)
{
    int n = 1;
    for (int i = 0; i < m->n_steps; i++)
        n *= m->steps[i].rows ? m->steps[i].rows : 1;
    return n;
}

void merge_step_widths(const struct merge_step *s, int width, int *y, int *z)
{
    *y = s->mean || !s->rows ? width : width * s->rows;
    *z = s->w ? s->w->n_out : activation_is_gated(s->act) ? *y / 2 : *y;
}

int merger_width(const struct merger *m, int n_embd)
{
    int y, width = n_embd;
    for (int i = 0; i < m->n_steps; i++)
        merge_step_widths(&m->steps[i], width, &y, &width);
    return width;
}

size_t merger_room(const struct merger *m, int n_embd, int tokens)
{
    size_t most = 0;
    for (int i = 0, y, width = n_embd, rows = tokens; i < m->n_steps; i++) {
        const struct merge_step *s = &m->steps[i];
        size_t before = (size_t)rows * (size_t)width; /* normed, not joined yet */
        merge_step_widths(s, width, &y, &width);
        rows = s->rows ? rows / s->rows : rows;
        size_t wide = (size_t)rows * (size_t)(y > width ? y : width);
        most = before > most ? before : most;
        most = wide > most ? wide : most;
    }
    return most;
}

static void measure_merger(const struct merger *m, int n_embd, struct network_max *out)
{
    int y, width = n_embd;
    widen(&out->merged, n_embd);
    for (int i = 0; i < m->n_steps; i++) {
        merge_step_widths(&m->steps[i], width, &y, &width);
        widen(&out->merged, y);
        widen(&out->merged, width);
    }
}

void network_measure(const struct network *net, struct network_max *out)
{
    *out = (struct network_max){0};
    for (int i = 0; i < net->n_ropes; i++)
        widen(&out->n_rot, net->ropes[i].n_rot);
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        measure_mixer(&net->layers[i].mixer, out);
        widen(&out->conv_len, net->layers[i].mixer.block.conv.len);
        widen(&out->conv_len, m->block.conv.len);
        if (m->dense.down)
            widen(&out->n_ff, m->dense.down->n_in);
        if (!m->router.w)
            continue;
        widen(&out->n_expert, m->router.w->n_out);
        widen(&out->n_expert_used, m->router.n_used);
        widen(&out->n_ff_exp, m->experts.down->n_in);
        if (m->to_experts)
            widen(&out->n_latent_exp, m->to_experts->n_out);
    }
    for (int i = 0; i < net->n_mergers; i++)
        measure_merger(&net->mergers[i], net->n_embd, out);
}

int network_embed_width(const struct network *net)
{
    int levels = 0;
    for (int i = 0; i < net->n_layers; i++)
        widen(&levels, net->layers[i].mlp.deepstack);
    return (1 + levels) * net->n_embd + (net->embed.patches ? net->embed.patches->n_in : 0);
}

int network_feature_width(const struct network *net)
{
    int width = 0;
    for (int i = 0; i < net->n_mergers; i++)
        width += merger_width(&net->mergers[i], net->n_embd);
    return width;
}

const struct weight *mixer_out(const struct mixer *m)
{
    switch (m->kind) {
    case MIXER_ATTENTION:
        return m->attention.wo;
    case MIXER_LATENT:
        return m->latent.wo;
    case MIXER_DELTA_NET:
        return m->delta_net.wo;
    case MIXER_SHORT_CONV:
        return m->short_conv.w_out;
    case MIXER_SSM:
        return m->ssm.w_out;
    case MIXER_SCAN:
        return m->scan.w_out;
    case MIXER_COMPRESSED:
        return m->compressed.wob;
    case MIXER_NONE:
        break;
    }
    return NULL;
}

void mixer_cache_dims(const struct mixer *m, int *k, int *v)
{
    const struct attention *a = &m->attention;
    *k = *v = 0;
    if (m->kind == MIXER_LATENT) {
        *k = m->latent.kv_rank + m->latent.rope_dim;
    } else if (m->kind == MIXER_COMPRESSED) {
        *k = m->compressed.dim;
    } else if (m->kind == MIXER_ATTENTION && !a->shares_kv) {
        *k = a->n_kv_heads * a->k_dim;
        *v = a->n_kv_heads * a->v_dim;
    }
}

const struct indexer *mixer_index(const struct mixer *m)
{
    const struct indexer *x = m->kind == MIXER_LATENT       ? &m->latent.index
                              : m->kind == MIXER_ATTENTION  ? &m->attention.index
                              : m->kind == MIXER_COMPRESSED ? &m->compressed.index
                                                            : NULL;
    return x && x->n_chosen ? x : NULL;
}

int mixer_index_dim(const struct mixer *m)
{
    const struct indexer *x = mixer_index(m);
    return x && !x->reuse ? x->dim : 0;
}

int compressor_page_rows(const struct compressor *c, int page_len)
{
    return !c->rate ? 0 : c->rate < page_len ? (page_len + c->rate - 1) / c->rate : 1;
}

int mixer_page_rows(const struct mixer *m, int page_len)
{
    return page_len + (m->kind == MIXER_COMPRESSED
                           ? compressor_page_rows(&m->compressed.compressor, page_len)
                           : 0);
}

int mixer_index_rows(const struct mixer *m, int page_len)
{
    const struct indexer *x = mixer_index(m);
    return x && x->compressor.rate ? compressor_page_rows(&x->compressor, page_len) : page_len;
}

/* Floats that a sequence keeps of a compressor. */
static size_t compressor_state(const struct compressor *c)
{
    return c->rate ? (size_t)(3 * compressor_series(c) * c->dim) : 0;
}

size_t mixer_state_len(const struct mixer *m)
{
    if (m->kind == MIXER_COMPRESSED) {
        const struct compressed *c = &m->compressed;
        return compressor_state(&c->compressor) +
               (c->index.n_chosen ? compressor_state(&c->index.compressor) : 0);
    }
    if (m->kind == MIXER_DELTA_NET) {
        const struct delta_net *d = &m->delta_net;
        size_t keys = (size_t)d->n_k_heads * (size_t)d->k_dim;
        size_t values = (size_t)d->n_v_heads * (size_t)d->v_dim;
        return values * (size_t)d->k_dim + (size_t)(d->conv_len - 1) * (2 * keys + values);
    }
    if (m->kind == MIXER_SSM) {
        const struct ssm *s = &m->ssm;
        size_t values = (size_t)s->n_heads * (size_t)s->head_dim;
        return values * (size_t)s->state_dim + (size_t)(s->conv_len - 1) * (size_t)ssm_channels(s);
    }
    if (m->kind == MIXER_SCAN)
        return (size_t)m->scan.n_channels * (size_t)(m->scan.state_dim + m->scan.conv_len - 1);
    if (m->kind == MIXER_SHORT_CONV)
        return (size_t)(m->short_conv.conv_len - 1) * (size_t)m->short_conv.w_in->n_in;
    const struct attention *a = &m->attention;
    if (m->kind == MIXER_ATTENTION && a->k_conv.len)
        return (size_t)(a->k_conv.len - 1) * (size_t)a->n_kv_heads * (size_t)(a->k_dim + a->v_dim);
    return 0;
}

static size_t conv_state(const struct block *b, int n_embd)
{
    return b->conv.len ? (size_t)(b->conv.len - 1) * (size_t)n_embd : 0;
}

/* The convolution of a block has as many channels as its last matrix has rows. */
static int block_width(const struct layer *l)
{
    const struct weight *w = mixer_out(&l->mixer);
    return w ? w->n_out : 0;
}

size_t layer_conv_at(const struct layer *l, const struct block *b)
{
    size_t mixer = mixer_state_len(&l->mixer);
    return b == &l->mixer.block ? mixer : mixer + conv_state(&l->mixer.block, block_width(l));
}

size_t layer_state_len(const struct layer *l)
{
    return layer_conv_at(l, &l->mlp.block) + conv_state(&l->mlp.block, block_width(l));
}

bool network_refuse(struct error *err, int layer, const char *what, const char *backend)
{
    return layer < 0 ? error_set(err, "%s not supported on %s", what, backend)
                     : error_set(err, "layer %d: %s not supported on %s", layer, what, backend);
}

/* A network being checked against the parts of a backend. */
struct check {
    uint64_t parts;
    int layer;
    const char *backend;
    struct error *err;
};

/* False with an error if the network needs a part that the backend lacks. `what` ends in "is" or "are". */
static bool has(const struct check *c, bool needed, uint64_t part, const char *what)
{
    if (!needed || c->parts & part)
        return true;
    return network_refuse(c->err, c->layer, what, c->backend);
}

static bool norm_ok(const struct check *c, const struct norm *n)
{
    return has(c, n->kind == NORM_LAYER, PART_NORM_LAYER, "LayerNorm is") &&
           has(c, n->kind == NORM_AFFINE, PART_TOWER, "a scale of features is") &&
           has(c, n->kind == NORM_RMS && !n->gain, PART_NORM_OUT, "a norm without a gain is");
}

/* A norm of queries, keys or values. */
static bool head_norm_ok(const struct check *c, const struct norm *n)
{
    return has(c, n->kind == NORM_LAYER, PART_NORM_LAYER, "LayerNorm is") &&
           has(c, n->kind == NORM_RMS && !n->gain, PART_NORM_WHOLE, "a norm without a gain is");
}

static bool block_ok(const struct check *c, const struct block *b)
{
    return norm_ok(c, &b->in) && norm_ok(c, &b->out) && norm_ok(c, &b->sum) &&
           has(c, b->keep != 0, PART_KEEP, "a block that keeps its normed input is") &&
           has(c, b->conv.len, PART_ROW_CONV, "a convolution of a block's result is") &&
           has(c, b->out.kind || b->sum.kind, PART_NORM_OUT, "a norm after a block is") &&
           has(c, b->scale != 0 && b->scale != 1, PART_SCALES, "a residual scale is");
}

static bool attention_ok(const struct check *c, const struct attention *a)
{
    return head_norm_ok(c, &a->q_norm) && head_norm_ok(c, &a->k_norm) &&
           head_norm_ok(c, &a->v_norm) && has(c, a->sinks, PART_SINKS, "attention sinks are") &&
           has(c, a->softcap != 0, PART_SOFTCAP, "a softcap of attention scores is") &&
           norm_ok(c, &a->out_norm) &&
           has(c, a->wgate, PART_OWN_GATE, "a gate of attention with a matrix of its own is") &&
           has(c, a->wrel, PART_RELATIVE, "attention with relative positions is") &&
           has(c, a->temp_smooth, PART_RELATIVE, "such an attention temperature is") &&
           has(c, a->k_conv.len, PART_ROW_CONV, "a convolution of keys and values is") &&
           has(c, a->chunked, PART_CHUNKED, "attention in chunks is") &&
           has(c, a->norm_late, PART_NORM_LATE, "QK-norm after RoPE is") &&
           has(c, a->out_norm.kind, PART_NORM_LATE, "a norm of attention's result is") &&
           has(c, a->gated, PART_GATE, "an output gate of attention is") &&
           has(c, a->norm_whole, PART_NORM_WHOLE, "QK-norm over a whole projection is") &&
           has(c, a->v_norm.kind, PART_NORM_WHOLE, "a norm of values is") &&
           has(c, a->temp_beta != 0, PART_TEMPERATURE, "an attention temperature is") &&
           has(c, a->shares_kv, PART_SHARED_KV, "another layer's keys and values are") &&
           has(c, a->k_is_v, PART_SHARED_KV, "one projection for keys and values is") &&
           has(c, a->span, PART_SPANS, "attention both ways inside an image is") &&
           has(c, a->clips, PART_TOWER, "a product of bounded inputs is") &&
           has(c, a->bidirectional, PART_BIDIRECTIONAL, "attention to later positions is") &&
           has(c, a->k_dim != a->v_dim, PART_HEAD_DIMS, "a value dimension of its own is");
}

static bool mixer_ok(const struct check *c, const struct mixer *m, const struct mixer *first)
{
    if (!block_ok(c, &m->block) ||
        !has(c, m->block.parallel, PART_PARALLEL, "a mixer in parallel with another is") ||
        !has(c, mixer_index(m), PART_SPARSE, "sparse attention is"))
        return false;
    if (m->kind == MIXER_LATENT)
        return has(c, true, PART_LATENT, "latent attention is") &&
               has(c, m->latent.temp_beta != 0, PART_LATENT_TEMPERATURE,
                   "a temperature of latent attention is");
    if (m->kind == MIXER_DELTA_NET)
        return has(c, true, PART_DELTA_NET, "a gated delta net is") &&
               has(c, m->delta_net.beta_scale != 0 && m->delta_net.beta_scale != 1, PART_DELTA_BETA,
                   "a factor on a delta net's beta is");
    if (m->kind == MIXER_SHORT_CONV)
        return has(c, true, PART_SHORT_CONV, "a short convolution is");
    if (m->kind == MIXER_SSM)
        return has(c, true, PART_SSM, "a state-space model is") &&
               has(c,
                   m->ssm.w_z || m->ssm.sigmoid_gate || !m->ssm.conv || !m->ssm.dt_bias ||
                       !m->ssm.skip,
                   PART_LIGHTNING, "lightning attention is") &&
               has(c, m->ssm.in_scale[0] != 0, PART_SSM_SCALES,
                   "a factor on a state-space model's projection is");
    if (m->kind == MIXER_SCAN)
        return has(c, true, PART_SCAN, "a selective scan is");
    if (m->kind == MIXER_COMPRESSED)
        return has(c, true, PART_COMPRESSED, "compressed attention is");
    if (m->kind == MIXER_NONE)
        return has(c, true, PART_ALONE, "a layer without a mixer is");
    const struct attention *a = &m->attention, *b = &first->attention;
    bool heads = false, rope = false;
    if (first->kind == MIXER_ATTENTION) {
        heads = a->n_heads != b->n_heads || a->n_kv_heads != b->n_kv_heads || a->k_dim != b->k_dim;
        rope = a->rope != b->rope || a->scale != b->scale;
    }
    return attention_ok(c, a) &&
           has(c, heads, PART_LAYER_HEADS, "heads unlike those of layer 0 are") &&
           has(c, rope, PART_LAYER_HEADS, "a RoPE table or scale unlike layer 0's is");
}

static bool router_ok(const struct check *c, const struct router *r)
{
    return norm_ok(c, &r->norm) &&
           has(c, r->kind == ROUTER_SIGMOID, PART_ROUTERS, "sigmoid routing is") &&
           has(c, r->kind == ROUTER_SOFTMAX_TOP, PART_ROUTERS,
               "softmax after the choice of experts is") &&
           has(c, r->kind == ROUTER_SPARSE_MIXER, PART_SPARSE_MIXER, "SparseMixer's routing is") &&
           has(c, r->kind == ROUTER_SOFTPLUS, PART_ROUTERS_2, "routing by softplus is") &&
           has(c, r->by_token, PART_ROUTERS_2, "a choice of experts by token is") &&
           has(c, r->choice_bias || r->w->bias, PART_ROUTERS, "a router's bias is") &&
           has(c, r->n_groups > 1, PART_ROUTERS, "a choice of expert groups is") &&
           has(c, r->expert_scale, PART_ROUTERS, "a scale per expert is") &&
           has(c, r->norm.kind, PART_ROUTERS, "a router's own norm is");
}

static bool is_rare(enum activation act)
{
    return act == ACT_PLAIN_RELU2 || act == ACT_RELU2 || act == ACT_SILU_LIMIT ||
           act == ACT_PLAIN_XIELU;
}

static bool mlp_ok(const struct check *c, const struct mlp *m)
{
    const struct ffn *d = &m->dense, *e = &m->experts;
    if (mlp_is_none(m))
        return has(c, true, PART_ALONE, "a layer without an mlp is");
    if (!block_ok(c, &m->block) || !norm_ok(c, &m->dense_out) || !norm_ok(c, &m->experts_in) ||
        !norm_ok(c, &m->experts_out) ||
        !has(c, (d->gate_up && d->act) || (m->router.w && e->act), PART_ACTIVATIONS,
             "an activation other than silu is") ||
        !has(c, (d->gate_up && is_rare(d->act)) || (m->router.w && is_rare(e->act)),
             PART_ACTIVATIONS_2, "a squared ReLU, xIELU or limit of SiLU is") ||
        !has(c,
             (d->gate_up && d->act == ACT_SILU_CLAMP) || (m->router.w && e->act == ACT_SILU_CLAMP),
             PART_SILU_CLAMP, "a clamp before SiLU is") ||
        !has(c, (d->gate_up && d->mid.kind) || (m->router.w && e->mid.kind), PART_NORM_MID,
             "a norm of hidden units is") ||
        !has(c, d->gate_up && d->act > ACT_PLAIN_GELU && !is_rare(d->act), PART_TOWER,
             "a tanh GELU without a gate is") ||
        !has(c, (d->gate_up && d->sparse) || (m->router.w && e->sparse), PART_SPARSE_ACT,
             "a Gaussian top-k of hidden units is") ||
        !norm_ok(c, &d->mid) ||
        !has(c, d->gate_up && d->clips, PART_TOWER, "a product of bounded inputs is") ||
        !has(c, m->deepstack, PART_DEEPSTACK, "features of an image tower's inner layers are") ||
        !has(c, m->embed.gate, PART_LAYER_EMBED, "an embedding per layer is") ||
        !has(c, m->block.parallel, PART_PARALLEL, "an mlp in parallel with its mixer is") ||
        !has(c, m->stream_scale != 0 && m->stream_scale != 1, PART_SCALES, "a layer scale is"))
        return false;
    if (!m->router.w)
        return true;
    return router_ok(c, &m->router) &&
           has(c, m->experts_late, PART_LATE_EXPERTS, "experts added one layer later are") &&
           has(c, m->router.n_same, PART_LATE_EXPERTS, "experts without weights are") &&
           has(c, m->router.weighs_input, PART_ROUTER_INPUT, "a weight on experts' inputs is") &&
           has(c, m->to_experts, PART_LATENT_EXPERTS, "projections around experts are") &&
           has(c, d->gate_up, PART_BOTH, "a dense mlp beside experts is") &&
           has(c, m->experts_in.kind || m->experts_out.kind, PART_BOTH, "a norm of experts is") &&
           has(c, e->gate_up->bias || e->down->bias, PART_EXPERT_BIAS, "a bias of experts is");
}

bool network_check(const struct network *net, uint64_t parts, const char *backend,
                   struct error *err)
{
    struct check c = {parts, -1, backend, err};
    const struct embed *e = &net->embed;
    const struct head *h = &net->head;
    if (!norm_ok(&c, &e->norm) || !norm_ok(&c, &e->patch_norm) || !norm_ok(&c, &h->norm) ||
        !has(&c, e->scale != 0 && e->scale != 1, PART_SCALES, "a scale of embeddings is") ||
        !has(&c, h->scale != 0 && h->scale != 1, PART_SCALES, "a scale of logits is") ||
        !has(&c, h->softcap != 0, PART_SCALES, "a softcap of logits is") ||
        !has(&c, e->positions || e->types, PART_EMBED, "an embedding of positions or types is") ||
        !has(&c, e->norm.kind, PART_EMBED, "a norm of embeddings is") ||
        !has(&c, !h->w, PART_EMBED, "a model without a head is") ||
        !has(&c, e->layers.width, PART_LAYER_EMBED, "an embedding per layer is") ||
        !has(&c, net->mtp.fc, PART_MTP, "multi-token prediction is") ||
        !has(&c, net->streams.n && net->streams.project, PART_ALTUP,
             "a stream of several parts (AltUp) is") ||
        !has(&c, net->streams.head.w, PART_HYPER,
             "a stream of several parts (hyper-connections) is") ||
        !has(&c, e->patches || net->n_mergers, PART_TOWER, "an image tower is"))
        return false;
    if (net->mtp.fc && (!norm_ok(&c, &net->mtp.taps_norm) || !norm_ok(&c, &net->mtp.embed_norm) ||
                        !norm_ok(&c, &net->mtp.hidden_norm) || !norm_ok(&c, &net->mtp.head.norm)))
        return false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        c.layer = i;
        if (m->kind == MIXER_LATENT && m->latent.rope && m->latent.rope->plane)
            return network_refuse(err, i, "M-RoPE in latent attention is", backend);
        if (!has(&c, m->laurel.left, PART_ALTUP, "a low-rank residual (LAuReL) is"))
            return false;
        if (!mixer_ok(&c, &net->layers[i].mixer, &net->layers[0].mixer) ||
            !mlp_ok(&c, &net->layers[i].mlp))
            return false;
    }
    return true;
}
