/*
 * The CPU backend: opening, memory and the op table. Owns the thread pool and all scratch. The arithmetic is in gemm.c
 * and moe.c (on the kernels of gemm.h) and, for attention and norms, behind ops.h. Knows no files and models.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/compressed.h"
#include "backend/cpu/hyper.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/streams.h"
#include "backend/cpu/tier.h"
#include "backend/canary.h"
#include "base/mem.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CPU_MAX_LAYER_EMBEDS = 4 * GEMM_TILE }; /* a thread's scratch holds them */

static int logits_width(const struct cpu_backend *cb)
{
    const struct head *h = &cb->net->head;
    return !h->w ? cb->net->n_embd : h->partial ? cb->net->n_vocab : h->w->n_out;
}

/* Memory */

static void *cpu_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    (void)be;
    void *p = mem_aligned(bytes);
    if (!p)
        error_set(err, "out of memory: %zu bytes for %s", bytes, what);
    return p; /* zeroed; pages are committed when first touched */
}

static void cpu_free(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_aligned_free(p, bytes);
}

static void cpu_forget(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    mem_forget(p, bytes);
}

static void cpu_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static void free_weight(struct cpu_backend *cb, struct gemm_weight *w)
{
    if (w && w->tier)
        tier_weight_free(cb->tier, w);
    else
        gemm_weight_free(w);
}

static bool cpu_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                       struct weight *w, struct error *err)
{
    struct cpu_backend *cb = cpu_self(be);
    bool tiered = cb->tier && tier_takes(src, role);
    struct gemm_weight *own = tiered ? tier_weight_new(cb->tier, src)
                              : role == WEIGHT_HEADS && !cb->no_repack
                                  ? gemm_weight_heads(src, cb->pool, err)
                                  : gemm_weight_new(src, !cb->no_repack, cb->pool, err);
    if (!own || (role != WEIGHT_EMBED && !pick_check_weight(&cb->pick, own, err))) {
        free_weight(cb, own);
        return false;
    }
    *w = (struct weight){.n_in = src->n_in,
                         .n_out = src->n_out,
                         .n_expert = src->n_expert,
                         .bias = src->bias != NULL,
                         .bytes = raw_weight_bytes(src),
                         .owns = !tiered && (!own->raw || src->transient),
                         .impl = own};
    return true;
}

static void cpu_release(struct backend *be, struct weight *w)
{
    free_weight(cpu_self(be), w->impl);
    *w = (struct weight){0};
}

static bool cpu_supports(struct backend *be, const struct network *net, struct error *err)
{
    (void)be;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        const struct mixer *x = &net->layers[i].mixer;
        if (x->kind == MIXER_ATTENTION && x->attention.gated &&
            (x->attention.norm_whole || x->attention.k_is_v))
            return network_refuse(err, i, "a gate beside whole norms or shared projections is",
                                  "cpu");
        if (x->kind == MIXER_ATTENTION && x->attention.k_dim != x->attention.v_dim &&
            (x->attention.gated || x->attention.k_is_v))
            return network_refuse(err, i, "a value dimension of its own beside a gate is", "cpu");
        if (x->kind == MIXER_LATENT && x->latent.kv_rank + x->latent.rope_dim > CPU_MAX_LATENT)
            return network_refuse(err, i, "a latent of more than 1024 values is", "cpu");
        if ((x->kind == MIXER_DELTA_NET && x->delta_net.conv_len > CPU_MAX_TAPS) ||
            (x->kind == MIXER_SSM && x->ssm.conv_len > CPU_MAX_TAPS) ||
            (x->kind == MIXER_SCAN && x->scan.conv_len > CPU_MAX_TAPS) ||
            (x->kind == MIXER_SHORT_CONV && x->short_conv.conv_len > CPU_MAX_TAPS))
            return network_refuse(err, i, "a convolution of more than 64 rows is", "cpu");
        if (m->block.parallel && (m->block.in.kind == NORM_NONE || x->block.sum.kind != NORM_NONE ||
                                  m->experts_in.kind != NORM_NONE || m->router.norm.kind))
            return network_refuse(err, i, "such norms of parallel blocks are", "cpu");
        if (x->kind == MIXER_SCAN &&
            (x->scan.dt_rank > net->n_embd || x->block.in.kind == NORM_NONE))
            return network_refuse(err, i, "such a selective scan is", "cpu");
        if (!cpu_convs_supported(net, i))
            return network_refuse(err, i, "such convolutions or relative positions are", "cpu");
        if (!cpu_index_supported(net, i))
            return network_refuse(err, i, "such an indexer is", "cpu");
        if (!cpu_compressed_supported(net, i))
            return network_refuse(err, i, "such compressed attention is", "cpu");
        if (net->streams.head.w &&
            (!x->block.in.kind || !m->block.in.kind || x->block.sum.kind || m->block.sum.kind ||
             x->block.parallel || m->block.parallel || m->embed.gate || m->deepstack ||
             m->experts_late || m->experts_in.kind || m->router.norm.kind || mlp_is_none(m) ||
             !mixer_out(x) || m->stream_scale != 0))
            return network_refuse(err, i, "such blocks between hyper-connections are", "cpu");
        if (x->block.parallel &&
            (!i || x->block.in.kind == NORM_NONE || !mlp_is_none(&net->layers[i - 1].mlp) ||
             net->layers[i - 1].mixer.block.sum.kind != NORM_NONE ||
             !mixer_out(&net->layers[i - 1].mixer)))
            return network_refuse(err, i, "such parallel mixers are", "cpu");
        if (x->kind == MIXER_SSM && x->ssm.w_z && x->ssm.in_scale[0] != 0)
            return network_refuse(err, i, "such a state-space model is", "cpu");
        if ((x->block.keep != 0 || m->block.keep != 0) &&
            (x->block.in.kind == NORM_NONE || x->block.parallel || x->laurel.left ||
             (!mlp_is_none(m) && m->block.in.kind == NORM_NONE) || m->block.parallel ||
             m->experts_in.kind || m->router.norm.kind || net->streams.n))
            return network_refuse(err, i, "such blocks that keep their input are", "cpu");
        if (m->router.w && m->router.n_same && (m->to_experts || m->router.weighs_input))
            return network_refuse(err, i, "such experts without weights are", "cpu");
        if (m->experts_late &&
            (!m->dense.gate_up || m->dense_gate || i + 1 >= network_depth(net) ||
             mlp_is_none(&net->layers[i + 1].mlp) || net->layers[i + 1].mlp.experts_late))
            return network_refuse(err, i, "such experts of a later layer are", "cpu");
        if (m->router.w && (m->experts.mid.kind || m->experts.sparse ||
                            (m->router.weighs_input && m->experts.gate_up->bias)))
            return network_refuse(err, i, "such experts are", "cpu");
        if (m->router.n_groups > MOE_MAX_GROUPS)
            return network_refuse(err, i, "more than 256 groups of experts are", "cpu");
    }
    if (net->streams.project && net->n_embd > GEMM_TILE)
        return network_refuse(err, -1, "streams that are so wide are", "cpu");
    if ((net->embed.positions || net->embed.types) && net->n_embd > CPU_MAX_LAYER_EMBEDS)
        return network_refuse(err, -1, "embeddings of positions that are so wide are", "cpu");
    if (net->embed.layers.width > CPU_MAX_LAYER_EMBEDS / net->n_layers)
        return network_refuse(err, -1, "more than 65536 values of layer embeddings are", "cpu");
    return network_check(
        net,
        PART_LAYER_HEADS | PART_NORM_OUT | PART_SCALES | PART_LAYER_EMBED | PART_SINKS |
            PART_SOFTCAP | PART_NORM_WHOLE | PART_TEMPERATURE | PART_SHARED_KV | PART_ACTIVATIONS |
            PART_ROUTERS | PART_BOTH | PART_EXPERT_BIAS | PART_GATE | PART_DELTA_NET | PART_LATENT |
            PART_NORM_LAYER | PART_EMBED | PART_BIDIRECTIONAL | PART_MTP | PART_TOWER |
            PART_DEEPSTACK | PART_SSM | PART_SHORT_CONV | PART_ALONE | PART_SPANS |
            PART_ACTIVATIONS_2 | PART_LATENT_EXPERTS | PART_PARALLEL | PART_LATENT_TEMPERATURE |
            PART_ALTUP | PART_SPARSE_ACT | PART_SSM_SCALES | PART_SPARSE | PART_SCAN |
            PART_DELTA_BETA | PART_LATE_EXPERTS | PART_HYPER | PART_COMPRESSED | PART_ROUTERS_2 |
            PART_SILU_CLAMP | PART_KEEP | PART_LIGHTNING | PART_HEAD_DIMS | PART_SPARSE_MIXER |
            PART_OWN_GATE | PART_CHUNKED | PART_NORM_LATE | PART_NORM_MID | PART_ROUTER_INPUT |
            PART_RELATIVE | PART_ROW_CONV,
        "cpu", err);
}

/* Scratch. Everything is freed by clear(), so a second prepare() starts from nothing. */
static void clear(struct cpu_backend *cb)
{
    gemm_clear(cb);
    cpu_lora_clear(cb);
    for (int i = 0; i < cb->n_blocks; i++)
        mem_aligned_free(cb->blocks[i].p, cb->blocks[i].bytes);
    cb->n_blocks = 0;
    for (int i = 0; i < cb->n_ropes; i++) /* the network may be gone by now */
        mem_free(cb->rope[i]);
    cpu_convs_clear(cb);
    for (int i = 0; i < cb->n_taps; i++) {
        mem_free(cb->taps[i]);
        mem_free(cb->decays[i]);
    }
    mem_free(cb->taps);
    mem_free(cb->decays);
    cb->taps = cb->decays = NULL;
    cb->n_taps = 0;
    mem_free(cb->rope);
    mem_free(cb->features);
    cb->features = NULL;
    mem_free(cb->sampled);
    mem_free(cb->probs);
    cb->rope = NULL;
    cb->n_ropes = 0;
    cb->sampled = NULL;
    cb->probs = NULL;
}

void *cpu_scratch(struct cpu_backend *cb, size_t bytes, const char *what, struct error *err)
{
    CHECK(cb->n_blocks < (int)(sizeof cb->blocks / sizeof *cb->blocks), "too many blocks");
    if (cb->measured) {
        *cb->measured += bytes;
        return cb; /* never read */
    }
    void *p = mem_aligned(bytes);
    if (!p)
        error_set(err, "out of memory: %zu bytes for %s", bytes, what);
    else
        cb->blocks[cb->n_blocks++] = (struct cpu_block){p, bytes};
    return p;
}

float *cpu_rows(struct cpu_backend *cb, int rows, int width, const char *what, struct error *err)
{
    return cpu_scratch(cb, ((size_t)rows * (size_t)width + 1) * sizeof(float), what, err);
}

/* Scratch of parts that few networks have. */
static bool prepare_parts(struct cpu_backend *cb, const struct network *net, int T,
                          struct error *err)
{
    int E = net->n_embd, P = net->embed.layers.width;
    int L = cb->max.n_latent_exp;
    bool both = false, own_in = false, own_router = false, mid = false, late = false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        both |= m->router.w && m->dense.gate_up;
        late |= m->experts_late;
        mid |= m->dense.gate_up && (m->dense.mid.kind || m->dense.sparse);
        own_in |= m->experts_in.kind != NORM_NONE;
        own_router |= m->router.norm.kind != NORM_NONE;
    }
    cb->late = NULL;
    return (!late || (cb->late = cpu_rows(cb, T, E, "results of experts", err))) &&
           (!own_in || (cb->n2 = cpu_rows(cb, T, E, "inputs of experts", err))) &&
           (!own_router || (cb->n3 = cpu_rows(cb, T, E, "inputs of routers", err))) &&
           (!both || ((cb->dense = cpu_rows(cb, T, E, "dense outputs", err)) &&
                      (cb->gate = cpu_rows(cb, T, 1, "gates", err)))) &&
           (!mid || (cb->products = cpu_rows(cb, T, 2 * cb->max.n_ff, "hidden units", err))) &&
           cpu_streams_prepare(cb, net, T, err) && cpu_hyper_prepare(cb, net, err) &&
           (!cb->max.gates || (cb->gates = cpu_rows(cb, T, cb->max.gates, "gates", err))) &&
           (!L || ((cb->to_experts = cpu_rows(cb, T, L, "inputs of experts", err)) &&
                   (cb->from_experts = cpu_rows(cb, T, L, "outputs of experts", err)))) &&
           (!P ||
            ((cb->layer_embeds = cpu_rows(cb, T, P * net->n_layers, "layer embeddings", err)) &&
             (cb->layer_gate = cpu_rows(cb, T, P, "layer embeddings", err))));
}

/* The transposed convolution of a layer with a recurrent state. */
static float *taps_of(const struct mixer *m)
{
    const float *conv;
    int channels, W;
    if (m->kind == MIXER_DELTA_NET) {
        const struct delta_net *d = &m->delta_net;
        conv = d->conv, W = d->conv_len;
        channels = 2 * d->n_k_heads * d->k_dim + d->n_v_heads * d->v_dim;
    } else if (m->kind == MIXER_SSM) {
        conv = m->ssm.conv, W = m->ssm.conv_len, channels = ssm_channels(&m->ssm);
    } else if (m->kind == MIXER_SCAN) {
        conv = m->scan.conv, W = m->scan.conv_len, channels = m->scan.n_channels;
    } else {
        conv = m->short_conv.conv, W = m->short_conv.conv_len;
        channels = m->short_conv.w_out->n_in;
    }
    float *taps = mem_zalloc((size_t)channels, (size_t)W * sizeof(float));
    for (int c = 0; !conv && c < channels; c++)
        taps[c] = 1; /* the row itself */
    if (conv)
        cpu_conv_taps(conv, channels, W, taps);
    return taps;
}

static size_t state_scratch(const struct mixer *m)
{
    return m->kind == MIXER_DELTA_NET ? cpu_delta_scratch(&m->delta_net)
           : m->kind == MIXER_SSM     ? cpu_ssm_scratch(m->ssm.conv_len)
           : m->kind == MIXER_SCAN    ? cpu_ssm_scratch(m->scan.conv_len)
                                      : cpu_ssm_scratch(m->short_conv.conv_len);
}

/* What mixers with recurrent states need. */
static bool prepare_states(struct cpu_backend *cb, const struct network *net, int T,
                           struct error *err)
{
    bool nets = false;
    cb->taps = mem_zalloc((size_t)net->n_layers, sizeof *cb->taps);
    cb->decays = mem_zalloc((size_t)net->n_layers, sizeof *cb->decays);
    cb->n_taps = net->n_layers;
    cb->delta_len = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        if (!mixer_state_len(m) || m->kind == MIXER_COMPRESSED || m->kind == MIXER_ATTENTION)
            continue;
        size_t scratch = state_scratch(m);
        cb->delta_len = scratch > cb->delta_len ? scratch : cb->delta_len;
        cb->taps[i] = cb->measured ? NULL : taps_of(m);
        nets |= m->kind == MIXER_DELTA_NET;
        if (m->kind == MIXER_SCAN && !cb->measured)
            cb->decays[i] = cpu_scan_decay(&m->scan);
    }
    size_t convs = cb->max.conv_len ? cpu_ssm_scratch(cb->max.conv_len) : 0;
    cb->delta_len = convs > cb->delta_len ? convs : cb->delta_len;
    if (!cpu_convs_prepare(cb, net, T, err))
        return false;
    if (!cb->delta_len)
        return true;
    size_t old = cb->delta_len * (size_t)pool_size(cb->pool) * sizeof(float);
    return (!nets || ((cb->z = cpu_rows(cb, T, cb->max.heads, "gates", err)) &&
                      (cb->ba = cpu_rows(cb, T, 2 * cb->max.state_heads, "gates", err)))) &&
           (cb->delta_old = cpu_scratch(cb, old, "convolutions", err));
}

static bool prepare_latent(struct cpu_backend *cb, const struct network *net, int T,
                           struct error *err)
{
    int wide = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct latent *l = &net->layers[i].mixer.latent;
        if (net->layers[i].mixer.kind == MIXER_LATENT &&
            l->n_heads * (l->kv_rank + l->rope_dim) > wide)
            wide = l->n_heads * (l->kv_rank + l->rope_dim);
    }
    return (!cb->max.latent || (cb->low = cpu_rows(cb, T, cb->max.latent, "latents", err))) &&
           (!wide || (cb->wide = cpu_rows(cb, T, wide, "queries of latents", err)));
}

static bool prepare_mtp(struct cpu_backend *cb, const struct network *net, int T, struct error *err)
{
    int E = net->n_embd, wide = net->mtp.n_taps * E;
    cb->kept = cb->joined = cb->tapped = cb->to_fc = NULL;
    if (!net->mtp.fc)
        return true;
    return (cb->kept = cpu_rows(cb, T, E, "rows for drafts", err)) &&
           (cb->joined = cpu_rows(cb, T, 2 * E, "inputs of drafts", err)) &&
           (!wide || ((cb->tapped = cpu_rows(cb, T, wide, "rows for drafts", err)) &&
                      (cb->to_fc = cpu_rows(cb, T, wide, "inputs of drafts", err))));
}

/* Everything of prepare() that allocates. */
static bool make_scratch(struct cpu_backend *cb, const struct network *net, const struct bounds *s,
                         struct error *err)
{
    cb->net = net;
    cb->bounds = *s;
    network_measure(net, &cb->max);
    int T = s->max_tokens, E = net->n_embd, heads = cb->max.heads;
    cb->sampled = mem_zalloc((size_t)s->max_out + 1, sizeof *cb->sampled);
    cb->probs = mem_zalloc((size_t)s->max_out + 1, sizeof *cb->probs);
    cb->n_ropes = net->n_ropes;
    cb->rope = mem_zalloc((size_t)net->n_ropes + 1, sizeof *cb->rope);
    for (int i = 0; i < net->n_ropes; i++)
        cb->rope[i] = mem_zalloc((size_t)T * (size_t)net->ropes[i].n_rot + 1, sizeof(float));
    size_t attn = 1;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        struct attention latent;
        size_t bytes = 0;
        if (m->kind == MIXER_ATTENTION) {
            bytes = cpu_attention_scratch(s, &m->attention, pool_size(cb->pool));
        } else if (m->kind == MIXER_LATENT) {
            cpu_latent_attention(&m->latent, &latent);
            bytes = cpu_attention_rows_scratch(s, &latent, pool_size(cb->pool));
        } else if (m->kind == MIXER_COMPRESSED) {
            bytes = cpu_compressed_scratch(s, m, pool_size(cb->pool));
        }
        attn = bytes > attn ? bytes : attn;
    }
    return (cb->stream.all = cpu_rows(cb, T, E, "the residual stream", err)) &&
           (cb->stream.out = cpu_rows(cb, s->max_out, E, "output rows", err)) &&
           (cb->stream.d = cpu_rows(cb, T, E, "block outputs", err)) &&
           (cb->n = cpu_rows(cb, T, E, "normalised activations", err)) &&
           (cb->qkv = cpu_rows(cb, T, cb->max.qkv, "attention inputs", err)) &&
           (cb->q = cpu_rows(cb, T, heads, "queries", err)) &&
           (cb->a = cpu_rows(cb, T, heads, "attention outputs", err)) &&
           (cb->a_out = cpu_rows(cb, s->max_out, heads, "output rows", err)) &&
           (cb->logits = cpu_rows(cb, s->max_out, logits_width(cb), "logits", err)) &&
           (cb->attn_scratch = cpu_scratch(cb, attn, "attention scratch", err)) &&
           prepare_parts(cb, net, T, err) && prepare_states(cb, net, T, err) &&
           prepare_latent(cb, net, T, err) && cpu_index_prepare(cb, net, err) &&
           cpu_compressed_prepare(cb, net, err) && prepare_mtp(cb, net, T, err) &&
           cpu_tower_prepare(cb, net, T, err) && cpu_lora_init(cb, err) && gemm_init(cb, err);
}

static bool cpu_prepare(struct backend *be, const struct network *net, const struct bounds *s,
                        struct error *err)
{
    struct cpu_backend *cb = cpu_self(be);
    if (cb->sampled)
        clear(cb);
    return pick_check_network(&cb->pick, net, s, err) && make_scratch(cb, net, s, err);
}

static size_t cpu_weight_bytes(struct backend *be, const struct raw_weight *src,
                               enum weight_role role, size_t *mapped)
{
    bool repack = !cpu_self(be)->no_repack;
    return gemm_weight_bytes(src, role == WEIGHT_HEADS && repack, repack, mapped);
}

static size_t cpu_step_bytes(struct backend *be, const struct network *net, const struct bounds *s)
{
    const struct cpu_backend *cb = cpu_self(be);
    struct error none;
    size_t bytes = 0;
    struct cpu_backend *like = mem_zalloc(1, sizeof *like);
    *like = (struct cpu_backend){
        .base = cb->base, .pool = cb->pool, .isa = cb->isa, .pick = cb->pick, .measured = &bytes};
    make_scratch(like, net, s, &none);
    clear(like);
    mem_free(like);
    return bytes;
}

static void cpu_close(struct backend *be)
{
    struct cpu_backend *cb = cpu_self(be);
    if (cb->sampled)
        clear(cb);
    tier_free(cb->tier);
    pool_free(cb->pool);
    mem_free(cb);
}

/* The step */

/* This step's angles. */
float *cpu_rope_of(const struct cpu_backend *cb, const struct rope *rope)
{
    return cb->rope[rope - cb->net->ropes];
}

static void count_step(struct cpu_backend *cb, const struct batch *b)
{
    struct profile *p = cb->base.profile;
    if (!p)
        return;
    p->phase = b->n_decode == b->n_seqs;
    p->steps[p->phase]++;
    p->tokens[p->phase] += b->n_tokens;
}

static void cpu_begin(struct backend *be, const struct batch *b)
{
    struct cpu_backend *cb = cpu_self(be);
    CHECK(b->n_tokens <= cb->bounds.max_tokens && b->n_out <= cb->bounds.max_out &&
              b->n_embeds <= cb->bounds.max_embeds,
          "batch too large");
    cb->pick.deterministic = be->deterministic;
    count_step(cb, b);
    canary_check(b, cb->bounds.page_len);
    cb->batch = *b;
    cb->stream.rows = 0;
    cb->stream.pending = cb->stream.narrow = false;
    for (int i = 0; i < b->n_out; i++)
        cb->sampled[i] = -1;
    cpu_stage_begin(cb);
    for (int i = 0; i < cb->net->n_ropes; i++)
        cpu_rope_table(&cb->net->ropes[i], b, cpu_rope_of(cb, &cb->net->ropes[i]), cb->pool);
    cpu_stage_end(cb, STAGE_OTHER);
    cpu_lora_begin(cb);
}

static bool cpu_replay(struct backend *be, uint64_t key)
{
    (void)be, (void)key;
    return false;
}

static void cpu_launch(struct backend *be)
{
    (void)be; /* ops run as they are issued */
}

static bool cpu_end(struct backend *be, int32_t *tokens, struct error *err)
{
    struct cpu_backend *cb = cpu_self(be);
    if (be->failure)
        return error_set(err, "%s", be->failure->msg);
    if (tokens)
        memcpy(tokens, cb->sampled, (size_t)cb->batch.n_out * sizeof *tokens);
    return true;
}

/* Compute */

void cpu_sum_members(struct cpu_backend *cb, float *rows, const uint64_t *from)
{
    int n = cb->stream.rows, E = cb->net->n_embd;
    struct comm *c = cb->base.comm;
    cpu_stage_begin(cb);
    if (from)
        c->sum_rows(c, rows, n, E, from);
    else
        c->sum(c, rows, (size_t)n * (size_t)E);
    cpu_stage_end(cb, STAGE_COMM);
}

void cpu_settle(struct cpu_backend *cb)
{
    struct cpu_stream *x = &cb->stream;
    if (x->pending)
        cpu_add_scale(x->x, x->d, 1, x->rows, cb->net->n_embd, cb->pool);
    x->pending = false;
}

void cpu_norm_rows(struct cpu_backend *cb, const struct norm *norm, float *from, float *to)
{
    if (norm->kind != NORM_NONE)
        cpu_add_norm(from, NULL, norm, to, cb->stream.rows, cb->net->n_embd, cb->pool, cb->isa);
}

void cpu_finish_block(struct cpu_backend *cb, const struct block *b, int layer)
{
    struct cpu_stream *x = &cb->stream;
    cpu_stage_begin(cb);
    cpu_conv_block(cb, b, layer);
    cpu_norm_rows(cb, &b->out, x->d, x->d);
    if (b->scale != 0 && b->scale != 1)
        cpu_add_scale(x->d, NULL, b->scale, x->rows, cb->net->n_embd, cb->pool);
    if (cb->hyper) {
        cpu_hyper_write(cb);
        cpu_stage_end(cb, STAGE_NORM);
        return;
    }
    x->pending = b->sum.kind == NORM_NONE;
    if (!x->pending)
        cpu_add_norm(x->x, x->d, &b->sum, x->x, x->rows, cb->net->n_embd, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_NORM);
}

/* The input rows of a block: (rows, E) */
static const float *norm_stream(struct cpu_backend *cb, const struct norm *norm)
{
    struct cpu_stream *x = &cb->stream;
    int E = cb->net->n_embd;
    cpu_stage_begin(cb);
    if (norm->kind == NORM_NONE)
        cpu_settle(cb);
    else
        cpu_add_norm(x->x, x->pending ? x->d : NULL, norm, cb->n, x->rows, E, cb->pool, cb->isa);
    x->pending = false;
    cpu_stage_end(cb, STAGE_NORM);
    return norm->kind == NORM_NONE ? x->x : cb->n;
}

/* The same of a block that runs in parallel with a mixer, whose result is still pending. */
static const float *norm_before(struct cpu_backend *cb, const struct norm *norm)
{
    struct cpu_stream *x = &cb->stream;
    cpu_stage_begin(cb);
    cpu_add_norm(x->x, NULL, norm, cb->n, x->rows, cb->net->n_embd, cb->pool, cb->isa);
    cpu_settle(cb);
    cpu_stage_end(cb, STAGE_NORM);
    return cb->n;
}

const float *cpu_block_input(struct cpu_backend *cb, const struct block *b)
{
    if (b->parallel)
        return norm_before(cb, &b->in);
    if (b->joined)
        return cb->joined;
    const float *n = norm_stream(cb, &b->in);
    if (b->keep != 0) {
        size_t E = (size_t)cb->net->n_embd;
        cpu_stage_begin(cb);
        memcpy(cb->stream.x, n, (size_t)cb->stream.rows * E * sizeof *n);
        cpu_add_scale(cb->stream.x, NULL, b->keep, cb->stream.rows, (int)E, cb->pool);
        cpu_stage_end(cb, STAGE_NORM);
    }
    return n;
}

/* The stream becomes its output rows. */
static void narrow(struct cpu_backend *cb)
{
    struct cpu_stream *x = &cb->stream;
    const struct batch *b = &cb->batch;
    if (x->narrow)
        return;
    cpu_settle(cb);
    cpu_gather(x->x, b->out_rows, b->n_out, cb->net->n_embd, x->out, cb->pool);
    if (cb->hyper)
        cpu_hyper_narrow(cb);
    x->x = x->out;
    x->rows = b->n_out;
    x->narrow = true;
    cpu_lora_narrow(cb);
}

void cpu_linear(struct cpu_backend *cb, const struct weight *w, const float *x, float *y, int rows,
                enum stage stage)
{
    cpu_stage_begin(cb);
    gemm_linear(cb, w, x, y, rows);
    cpu_stage_end(cb, stage);
}

/* Attention before wo: into a */
static void mix_attention(struct cpu_backend *cb, const struct attention *l, int layer,
                          const float *n)
{
    const struct batch *b = &cb->batch;
    const struct kv_layer *kv = &b->kv[l->shares_kv ? l->kv_layer : layer];
    cpu_stage_begin(cb);
    if (l->clips)
        cpu_clip_qkv(cb, l, n);
    else
        gemm_linear(cb, l->wqkv, n, cb->qkv, b->n_tokens);
    if (l->wrel)
        gemm_linear(cb, l->wrel, n, cb->rel, b->n_tokens);
    if (l->k_conv.len)
        cpu_conv_kv(cb, l, layer);
    cpu_attn_post(&cb->bounds, b, l, kv, l->rope ? cpu_rope_of(cb, l->rope) : NULL, cb->qkv, cb->q,
                  cb->rel, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_QKV);
    cpu_stage_begin(cb);
    const struct key_choice *choice =
        l->index.n_chosen ? cpu_index(cb, &l->index, kv, n, n, l->n_kv_heads) : NULL;
    struct relative rel = cpu_relative(cb, l, layer);
    cpu_attention(&cb->bounds, b, l, kv, choice, &rel, cb->q, cb->a, cb->attn_scratch, cb->pool,
                  &cb->pick);
    if (l->gated)
        cpu_attn_gate(b, l, cb->qkv, l->wqkv->n_out, cb->a, cb->pool, cb->isa);
    if (l->wgate) {
        gemm_linear(cb, l->wgate, n, cb->gates, b->n_tokens);
        cpu_attn_own_gate(b, l, cb->gates, cb->a, cb->pool, cb->isa);
    }
    if (l->out_norm.kind != NORM_NONE)
        cpu_add_norm(cb->a, NULL, &l->out_norm, cb->a, b->n_tokens, l->wo->n_in, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

static void mix_delta_net(struct cpu_backend *cb, const struct mixer *m, int layer, const float *n)
{
    const struct delta_net *d = &m->delta_net;
    const struct batch *b = &cb->batch;
    cpu_linear(cb, d->wqkv, n, cb->qkv, b->n_tokens, STAGE_QKV);
    cpu_linear(cb, d->wz, n, cb->z, b->n_tokens, STAGE_QKV);
    cpu_linear(cb, d->wba, n, cb->ba, b->n_tokens, STAGE_QKV);
    cpu_stage_begin(cb);
    cpu_delta_net(b, m, b->kv[layer].state, cb->taps[layer], cb->qkv, cb->z, cb->ba, cb->a,
                  cb->delta_old, cb->delta_len, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

static void mix_scan(struct cpu_backend *cb, const struct mixer *m, int layer, const float *n)
{
    const struct batch *b = &cb->batch;
    cpu_linear(cb, m->scan.w_in, n, cb->qkv, b->n_tokens, STAGE_QKV);
    cpu_stage_begin(cb);
    cpu_scan(cb, m, b->kv[layer].state, cb->taps[layer], cb->decays[layer], cb->qkv, cb->q, cb->low,
             cb->a);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

/* A state-space model or a short convolution. */
static void mix_ssm(struct cpu_backend *cb, const struct mixer *m, int layer, const float *n)
{
    const struct batch *b = &cb->batch;
    bool is_ssm = m->kind == MIXER_SSM;
    const struct weight *w_in = is_ssm ? m->ssm.w_in : m->short_conv.w_in;
    float *z = cb->qkv + (size_t)b->n_tokens * (size_t)w_in->n_out, *state = b->kv[layer].state;
    cpu_linear(cb, w_in, n, cb->qkv, b->n_tokens, STAGE_QKV);
    if (is_ssm && m->ssm.w_z)
        cpu_linear(cb, m->ssm.w_z, n, z, b->n_tokens, STAGE_QKV);
    cpu_stage_begin(cb);
    if (is_ssm)
        cpu_ssm(b, m, state, cb->taps[layer], cb->qkv, z, cb->a, cb->delta_old, cb->delta_len,
                cb->pool, cb->isa);
    else
        cpu_short_conv(b, m, state, cb->taps[layer], cb->qkv, cb->a, cb->delta_old, cb->delta_len,
                       cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

static void mix_latent(struct cpu_backend *cb, const struct latent *l, int layer, const float *n)
{
    const struct batch *b = &cb->batch;
    const float *in = n;
    if (l->wqa) {
        cpu_linear(cb, l->wqa, n, cb->low, b->n_tokens, STAGE_QKV);
        cpu_stage_begin(cb);
        cpu_add_norm(cb->low, NULL, &l->q_norm, cb->low, b->n_tokens, l->q_rank, cb->pool, cb->isa);
        cpu_stage_end(cb, STAGE_NORM);
        in = cb->low;
    }
    const struct key_choice *choice =
        l->index.n_chosen ? cpu_index(cb, &l->index, &b->kv[layer], n, in, 1) : NULL;
    cpu_linear(cb, l->wqb, in, cb->q, b->n_tokens, STAGE_QKV);
    for (int t = 0; l->temp_beta != 0 && t < b->n_tokens; t++)
        cpu_add_scale(cb->q + (size_t)t * (size_t)l->wqb->n_out, NULL,
                      1 + l->temp_beta * (float)log(1.0 + floor((double)b->pos[t] / l->temp_len)),
                      1, l->wqb->n_out, cb->pool);
    cpu_linear(cb, l->wkva, n, cb->low, b->n_tokens, STAGE_QKV);
    cpu_stage_begin(cb);
    cpu_latent(cb, l, &b->kv[layer], choice, cpu_rope_of(cb, l->rope), cb->q, cb->low, cb->wide,
               cb->a);
    cpu_stage_end(cb, STAGE_ATTENTION);
}

static void cpu_mixer(struct backend *be, const struct mixer *m, int layer)
{
    struct cpu_backend *cb = cpu_self(be);
    const struct batch *b = &cb->batch;
    const struct weight *wo = mixer_out(m);
    const float *a = cb->a;
    const struct altup *altup = &cb->net->layers[layer].altup;
    if (altup->router)
        cpu_streams_predict(cb, altup);
    if (cb->hyper)
        cpu_hyper_read(cb, &cb->net->layers[layer].hyper[0]);
    if (wo) {
        const float *n = cpu_block_input(cb, &m->block);
        if (m->laurel.left)
            cpu_laurel(cb, &m->laurel, n);
        if (m->kind == MIXER_DELTA_NET)
            mix_delta_net(cb, m, layer, n);
        else if (m->kind == MIXER_LATENT)
            mix_latent(cb, &m->latent, layer, n);
        else if (m->kind == MIXER_ATTENTION)
            mix_attention(cb, &m->attention, layer, n);
        else if (m->kind == MIXER_SCAN)
            mix_scan(cb, m, layer, n);
        else if (m->kind == MIXER_COMPRESSED)
            cpu_mix_compressed(cb, m, layer, n);
        else
            mix_ssm(cb, m, layer, n);
    }
    if (batch_narrows(b, cb->net, layer)) {
        narrow(cb);
        if (wo)
            cpu_gather(cb->a, b->out_rows, b->n_out, wo->n_in, cb->a_out, cb->pool);
        a = cb->a_out;
    }
    if (!wo)
        return;
    cpu_stage_begin(cb);
    if (m->kind == MIXER_ATTENTION && m->attention.clips)
        cpu_clip_linear(cb, wo, &m->attention.clips[3], a, cb->stream.d, cb->stream.rows);
    else
        gemm_linear(cb, wo, a, cb->stream.d, cb->stream.rows);
    cpu_stage_end(cb, STAGE_OUTPUT);
    if (m->partial)
        cpu_sum_members(cb, cb->stream.d, NULL);
    cpu_finish_block(cb, &m->block, layer);
    if (m->laurel.left)
        cpu_laurel_add(cb);
}

struct cap_job {
    const struct head *h;
    float *l; /* (rows, width) */
    int width;
};

static void cap_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct cap_job *j = arg;
    size_t at = (size_t)first * (size_t)j->width, end = (size_t)last * (size_t)j->width;
    float scale = j->h->scale == 0 ? 1 : j->h->scale, cap = j->h->softcap;
    for (; at < end; at++) {
        float l = j->l[at] * scale;
        j->l[at] = cap != 0 ? cap * tanhf(l / cap) : l;
    }
}

/* Rows of n logits become rows of `width`, the others -inf. In place, so from the last one. */
static void widen_logits(float *logits, int rows, size_t n, size_t width)
{
    for (size_t t = (size_t)rows; t-- > 0;) {
        memmove(logits + t * width, logits + t * n, n * sizeof *logits);
        for (size_t i = n; i < width; i++)
            logits[t * width + i] = -INFINITY;
    }
}

static void cpu_head(struct backend *be, const struct head *h)
{
    struct cpu_backend *cb = cpu_self(be);
    size_t width = (size_t)logits_width(cb);
    float *logits = cb->logits;
    narrow(cb);
    if (cb->streams)
        cpu_streams_end(cb);
    if (cb->hyper)
        cpu_hyper_read(cb, &cb->net->streams.head);
    const float *n = norm_stream(cb, &h->norm);
    if (!h->w) {
        memcpy(logits, n, (size_t)cb->stream.rows * width * sizeof(float));
        return;
    }
    cpu_linear(cb, h->w, n, logits, cb->stream.rows, STAGE_HEAD);
    if (h->partial) {
        cpu_stage_begin(cb);
        cb->base.comm->gather(cb->base.comm, logits, cb->stream.rows, cb->net->n_vocab);
        cpu_stage_end(cb, STAGE_COMM);
    }
    if ((size_t)h->w->n_out < width && !h->partial)
        widen_logits(logits, cb->stream.rows, (size_t)h->w->n_out, width);
    if (h->softcap != 0 || (h->scale != 0 && h->scale != 1)) {
        /* pieces of a row, so that one token spreads */
        struct cap_job j = {h, logits, 64};
        size_t n_logits = (size_t)cb->stream.rows * width;
        cpu_stage_begin(cb);
        pool_each(cb->pool, (int)(n_logits / 64), POOL_EVEN, cap_rows, &j);
        j = (struct cap_job){h, logits + n_logits / 64 * 64, (int)(n_logits % 64)};
        cap_rows(&j, 0, 0, 1);
        cpu_stage_end(cb, STAGE_HEAD);
    }
}

static void cpu_keep(struct backend *be, const struct norm *norm)
{
    struct cpu_backend *cb = cpu_self(be);
    const struct cpu_stream *x = &cb->stream;
    cpu_settle(cb); /* the head reads the stream, too */
    cpu_stage_begin(cb);
    if (norm->kind == NORM_NONE)
        memcpy(cb->kept, x->x, (size_t)x->rows * (size_t)cb->net->n_embd * sizeof *x->x);
    else
        cpu_add_norm(x->x, NULL, norm, cb->kept, x->rows, cb->net->n_embd, cb->pool, cb->isa);
    cpu_stage_end(cb, STAGE_NORM);
}

static void cpu_logits(struct backend *be, int row, float *host)
{
    struct cpu_backend *cb = cpu_self(be);
    size_t n = (size_t)logits_width(cb);
    memcpy(host, cb->logits + (size_t)row * n, n * sizeof(float));
}

static void cpu_stream_put(struct backend *be, const float *host, int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    struct cpu_stream *x = &cb->stream;
    CHECK(rows <= cb->bounds.max_tokens, "%d rows", rows);
    memcpy(x->all, host, (size_t)rows * (size_t)cb->net->n_embd * sizeof(float));
    x->x = x->all;
    x->rows = rows;
    x->pending = x->narrow = false;
}

static void cpu_stream_get(struct backend *be, float *host, int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    cpu_settle(cb);
    memcpy(host, cb->stream.x, (size_t)rows * (size_t)cb->net->n_embd * sizeof(float));
}

static void cpu_logits_put(struct backend *be, const float *host, int rows)
{
    struct cpu_backend *cb = cpu_self(be);
    memcpy(cb->logits, host, (size_t)rows * (size_t)cb->net->n_vocab * sizeof(float));
}

struct sample_job {
    struct cpu_backend *cb;
    struct sampler *const *samplers;
};

static void sample_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct sample_job *j = arg;
    struct cpu_backend *cb = j->cb;
    for (int i = first; i < last; i++)
        if (j->samplers[i])
            cb->sampled[i] = sampler_pick(
                j->samplers[i], cb->logits + (size_t)i * (size_t)cb->net->n_vocab, &cb->probs[i]);
}

static void cpu_sample(struct backend *be, struct sampler *const *samplers)
{
    struct cpu_backend *cb = cpu_self(be);
    struct sample_job job = {cb, samplers};
    cpu_stage_begin(cb);
    pool_each(cb->pool, cb->batch.n_out, POOL_SINGLE, sample_rows, &job);
    cpu_stage_end(cb, STAGE_SAMPLING);
}

static void cpu_probs(struct backend *be, int row, struct sample_probs *out)
{
    *out = cpu_self(be)->probs[row];
}

static bool cpu_pick(struct backend *be, int i, struct pick_info *out)
{
    return pick_describe(&cpu_self(be)->pick, i, out);
}

static void cpu_pick_force(struct backend *be, const char *names)
{
    pick_force(&cpu_self(be)->pick, names);
}

static void cpu_pick_shapes(struct backend *be, FILE *out)
{
    const struct cpu_backend *cb = cpu_self(be);
    pick_print_shapes(&cb->pick, cb->net, &cb->bounds, out);
}

static const struct adapter_ops cpu_adapters = {.adapt = cpu_lora_adapt,
                                                .unadapt = cpu_lora_unadapt};
static const struct draft_ops cpu_draft = {.keep = cpu_keep, .tap = cpu_tap, .join = cpu_join};
static const struct tower_ops cpu_tower = {.merge = cpu_merge, .features = cpu_features};
static const struct stream_ops cpu_stream_ops = {
    .put = cpu_stream_put, .get = cpu_stream_get, .put_logits = cpu_logits_put};
static const struct pick_ops cpu_picks = {
    .row = cpu_pick, .force = cpu_pick_force, .shapes = cpu_pick_shapes};

static bool cpu_tier_settle(struct backend *be, struct error *err)
{
    return tier_settle(cpu_self(be)->tier, err);
}

static void cpu_tier_stats(struct backend *be, struct tier_stats *out)
{
    *out = (struct tier_stats){0};
    if (cpu_self(be)->tier)
        tier_stats(cpu_self(be)->tier, out);
}

static void cpu_experts_run(struct backend *be, const struct mlp *m, const int32_t *chosen,
                            const float *weights, int used, const float *x, float *y, int rows)
{
    moe_run_given(cpu_self(be), m, chosen, weights, used, x, y, rows);
}

static bool cpu_experts_panels(struct backend *be, const struct weight *w, int seg,
                               struct expert_panels *out)
{
    (void)be;
    return gemm_weight_panels(w->impl, seg, out);
}

static const struct expert_ops cpu_experts = {.run = cpu_experts_run, .panels = cpu_experts_panels};
static const struct tier_ops cpu_tier = {.settle = cpu_tier_settle, .stats = cpu_tier_stats};
static const struct plan_ops cpu_plan = {.weight_bytes = cpu_weight_bytes,
                                         .step_bytes = cpu_step_bytes};

static const struct backend_ops cpu_ops = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .forget = cpu_forget,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .supports = cpu_supports,
    .upload = cpu_upload,
    .release = cpu_release,
    .prepare = cpu_prepare,
    .begin = cpu_begin,
    .replay = cpu_replay,
    .launch = cpu_launch,
    .end = cpu_end,
    .embed = cpu_embed,
    .mixer = cpu_mixer,
    .mlp = cpu_mlp,
    .head = cpu_head,
    .sample = cpu_sample,
    .probs = cpu_probs,
    .logits = cpu_logits,
    .adapters = &cpu_adapters,
    .draft = &cpu_draft,
    .tower = &cpu_tower,
    .stream = &cpu_stream_ops,
    .picks = &cpu_picks,
    .plan = &cpu_plan,
    .tier = &cpu_tier,
    .experts = &cpu_experts,
};

struct backend *backend_open_cpu(const struct backend_options *opt, struct error *err)
{
    enum isa isa;
    if (!isa_choose(&isa, err))
        return NULL;
    struct pick pick;
    /* beside a GPU the names are of the GPU's kernels */
    const char *names = opt && opt->host_experts ? NULL : getenv("STEEL_PICK");
    if (!pick_init(&pick, isa, opt && opt->deterministic, names, err))
        return NULL;
    if (isa == ISA_REF)
        return backend_open_ref();
    int threads = opt && opt->threads > 0 ? opt->threads : pool_cpu_count();
    struct cpu_backend *cb = mem_zalloc(1, sizeof *cb);
    cb->base.ops = &cpu_ops;
    cb->isa = isa;
    cb->pick = pick;
    cb->base.deterministic = opt && opt->deterministic;
    cb->base.invariance = isa_has(isa, ISA_AMX) ? INVARIANCE_CHOSEN : INVARIANCE_ALWAYS;
    cb->no_repack = opt && opt->no_repack;
    cb->pool = pool_new(threads);
    if (opt && opt->expert_memory)
        cb->tier = tier_new(opt->expert_memory, pool_size(cb->pool));
    return &cb->base;
}
