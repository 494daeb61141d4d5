/*
 * Before the first step: checks that the kernels can run the network, computes model_shape, and
 * allocates, once, all memory that steps write to.
 */
#include "backend/cuda/attn/attn_layer.h"
#include "backend/cuda/attn/index.h"
#include "backend/cuda/core/streams.h"
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/stream.h"
#include "backend/cuda/heads/mtp.h"
#include "backend/cuda/vision/tower.h"

extern "C" {
#include "base/mem.h"
#include "sample/sampler.h"
}

#include <string.h>

/* Largest size of the split decode buffers over all layers and numbers of sequences. */
struct split_room {
    size_t floats, units, counts; /* counts: per sequence */
};

static void widen(size_t *to, size_t n)
{
    *to = n > *to ? n : *to;
}

static struct split_room split_room_of(const struct cuda_backend *cu, const struct network *net)
{
    struct split_room r = {1, 1, 1};
    for (int i = 0; i < net->n_layers; i++) {
        const struct attention *a = &net->layers[i].mixer.attention;
        if (net->layers[i].mixer.kind != MIXER_ATTENTION)
            continue;
        size_t groups = (size_t)a->n_kv_heads * (size_t)ceil_div(a->n_heads / a->n_kv_heads, 8);
        widen(&r.counts, groups * 8);
        for (int n = 1; n <= cu->shape.max_seqs; n++) {
            size_t u = (size_t)n * groups * (size_t)attn_splits(cu, n, a->n_heads, a->n_kv_heads);
            widen(&r.units, u);
            widen(&r.floats, u * 8 * (size_t)a->k_dim);
        }
    }
    return r;
}

/* Parts beyond a plain decoder that the kernels support. */
static const uint64_t PARTS =
    PART_NORM_OUT | PART_SCALES | PART_LAYER_EMBED | PART_SINKS | PART_SOFTCAP | PART_GATE |
    PART_NORM_WHOLE | PART_TEMPERATURE | PART_SHARED_KV | PART_HEAD_DIMS | PART_LAYER_HEADS |
    PART_ACTIVATIONS | PART_ROUTERS | PART_BOTH | PART_EXPERT_BIAS | PART_DELTA_NET | PART_LATENT |
    PART_NORM_LAYER | PART_EMBED | PART_BIDIRECTIONAL | PART_MTP | PART_SSM | PART_SHORT_CONV |
    PART_ALONE | PART_TOWER | PART_DEEPSTACK | PART_SPANS | PART_ACTIVATIONS_2 | PART_NORM_MID |
    PART_ROUTER_INPUT | PART_LATENT_EXPERTS | PART_PARALLEL | PART_OWN_GATE | PART_CHUNKED |
    PART_NORM_LATE | PART_DELTA_BETA | PART_SSM_SCALES | PART_SPARSE_ACT | PART_SPARSE_MIXER |
    PART_LATENT_TEMPERATURE | PART_SCAN | PART_SPARSE | PART_KEEP | PART_LIGHTNING | PART_RELATIVE |
    PART_ROW_CONV | PART_COMPRESSED | PART_ALTUP | PART_HYPER | PART_ROUTERS_2 | PART_SILU_CLAMP |
    PART_LATE_EXPERTS;

/* For blocks whose epilogue is more than an addition, a row passes through shared memory twice,
 * four columns at a time. */
static bool block_supported(const struct cuda_backend *cu, const struct network *net, int i,
                            const struct block *b, bool has_epilogue, struct error *err)
{
    size_t shared = (2 * align_up((size_t)net->n_embd, TILE_K) + 64) * sizeof(float);
    if (b->keep != 0 && (b->parallel || b->sum.kind || b->in.kind == NORM_NONE ||
                         net->layers[i].mixer.block.parallel ||
                         net->layers[i].mlp.router.norm.kind || net->layers[i].mlp.experts_in.kind))
        return network_refuse(err, i, "such a block that keeps its normed input is", "cuda");
    if (b->sum.kind && (has_epilogue || b->out.kind))
        return network_refuse(err, i, "a norm of a block's sum beside others is", "cuda");
    if (b->sum.kind)
        return true;
    if (!has_epilogue && !b->out.kind && (b->scale == 0 || b->scale == 1) && b->keep == 0)
        return true;
    if (net->n_embd % 4 || shared > cu->shared_limit)
        return error_set(err,
                         "layer %d: norms and scales of blocks over rows of %d are not "
                         "supported on cuda",
                         i, net->n_embd);
    return true;
}

static bool experts_supported(const struct network *net, int i, struct error *err)
{
    const struct mlp *m = &net->layers[i].mlp;
    const struct router *r = &m->router;
    if (r->w->n_out > MAX_EXPERTS || r->n_used > MAX_USED)
        return error_set(err,
                         "layer %d: %d of %d experts are not supported on cuda (%d of %d at most)",
                         i, r->n_used, r->w->n_out, MAX_USED, MAX_EXPERTS);
    if (net->n_embd % 8 || m->experts.gate_up->n_in % 8)
        return network_refuse(err, i, "experts of a width that is no multiple of 8 are", "cuda");
    bool top = r->kind == ROUTER_SOFTMAX_TOP || r->kind == ROUTER_SPARSE_MIXER;
    if (r->n_groups > MAX_GROUPS || (r->n_groups > 1 && top))
        return network_refuse(err, i, "such a choice of expert groups is", "cuda");
    if (r->kind == ROUTER_SPARSE_MIXER && (r->choice_bias || r->by_token))
        return network_refuse(err, i, "a bias of SparseMixer's choice is", "cuda");
    if (r->n_same && (m->to_experts || r->weighs_input || m->experts_in.kind))
        return network_refuse(err, i, "such experts without weights are", "cuda");
    if (m->experts_late &&
        (!m->dense.gate_up || m->dense_gate || m->experts_in.kind || i + 1 >= network_depth(net) ||
         mlp_is_none(&net->layers[i + 1].mlp) || net->layers[i + 1].mlp.experts_late ||
         net->layers[i + 1].mlp.block.sum.kind || net->n_embd % 4 || net->streams.n))
        return network_refuse(err, i, "such experts of a later layer are", "cuda");
    return true;
}

static bool mlp_supported(const struct cuda_backend *cu, const struct network *net, int i,
                          struct error *err)
{
    const struct mlp *m = &net->layers[i].mlp;
    bool has_epilogue = (m->dense.gate_up && m->router.w) || m->dense_out.kind ||
                        m->experts_out.kind || m->embed.gate ||
                        (m->stream_scale != 0 && m->stream_scale != 1);
    if (m->block.parallel && net->n_embd % 4)
        return network_refuse(err, i, "a parallel mlp of such a width is", "cuda");
    return block_supported(cu, net, i, &m->block, has_epilogue, err) &&
           (!m->router.w || experts_supported(net, i, err)) && apart_supported(cu, net, i, err);
}

static bool attention_supported(const struct attention *a, int i, struct error *err)
{
    int dim = a->k_dim > a->v_dim ? a->k_dim : a->v_dim;
    if (dim > MAX_HEAD_DIM)
        return error_set(err, "layer %d: heads of %d are not supported on cuda (%d at most)", i,
                         dim, MAX_HEAD_DIM);
    if (a->q_norm.kind == NORM_LAYER || a->k_norm.kind == NORM_LAYER ||
        a->v_norm.kind == NORM_LAYER)
        return network_refuse(err, i, "LayerNorm of queries, keys or values is", "cuda");
    if (a->norm_late && a->norm_whole)
        return network_refuse(err, i, "QK-norm over a whole projection after RoPE is", "cuda");
    if (a->norm_late && a->bidirectional)
        return network_refuse(err, i, "QK-norm after RoPE in an encoder is", "cuda");
    return true;
}

static bool mixer_supported(const struct cuda_backend *cu, const struct network *net, int i,
                            struct error *err)
{
    const struct mixer *m = &net->layers[i].mixer;
    if (!block_supported(cu, net, i, &m->block, false, err) || !index_supported(net, i, err) ||
        !row_conv_supported(net, i, err))
        return false;
    bool encodes = m->kind == MIXER_ATTENTION && (m->attention.bidirectional || m->attention.clips);
    if (m->block.parallel && (net->n_embd % 4 || encodes))
        return network_refuse(err, i, "such a mixer in parallel with another is", "cuda");
    if (m->kind == MIXER_DELTA_NET)
        return delta_net_supported(cu, &m->delta_net, i, err);
    if (m->kind == MIXER_LATENT)
        return latent_supported(cu, &m->latent, i, err);
    if (m->kind == MIXER_SSM || m->kind == MIXER_SHORT_CONV || m->kind == MIXER_SCAN)
        return ssm_supported(cu, m, i, err);
    if (m->kind == MIXER_COMPRESSED)
        return compressed_supported(cu, m, i, err);
    if (m->kind == MIXER_NONE)
        return true;
    return attention_supported(&m->attention, i, err);
}

bool cuda_supports(struct backend *be, const struct network *net, struct error *err)
{
    const struct cuda_backend *cu = cuda_self(be);
    struct network_max max;
    network_measure(net, &max);
    /* A row passes through a block's shared memory when it is converted to fp16. */
    int in = net->mtp.fc ? 2 * net->n_embd : net->n_embd;
    in = net->mtp.n_taps * net->n_embd > in ? net->mtp.n_taps * net->n_embd : in;
    int widest = max.heads > in ? max.heads : in;
    if ((align_up((size_t)widest, TILE_K) + 64) * sizeof(float) > cu->shared_limit)
        return error_set(err, "rows of %d are not supported on cuda", widest);
    if (!network_check(net, PARTS, "cuda", err))
        return false;
    if (net->n_ropes > MAX_ROPES)
        return error_set(err, "%d RoPE tables are not supported on cuda (%d at most)", net->n_ropes,
                         MAX_ROPES);
    for (int i = 0; i < net->n_layers; i++)
        if (!mixer_supported(cu, net, i, err) || !mlp_supported(cu, net, i, err))
            return false;
    return offload_supported(cu, net, err) && streams_supported(cu, net, err) &&
           mtp_supported(net, err) && encoder_supported(net, err) && tower_supported(net, err);
}

/* The limits, after cuda_supports has checked the network. */
static struct model_shape shape_of(const struct network *net, const struct bounds *b)
{
    struct network_max max;
    network_measure(net, &max);
    struct model_shape s = {};
    s.n_layers = net->n_layers;
    s.n_embd = net->n_embd;
    s.n_vocab = net->head.w ? net->n_vocab : net->n_embd;
    s.heads = max.heads ? max.heads : 1; /* tests have networks without layers */
    s.n_ff = max.n_ff;
    s.n_expert = max.n_expert;
    s.n_expert_used = max.n_expert_used;
    s.n_ff_exp = max.n_ff_exp;
    for (int i = 0; i < net->n_layers; i++)
        if (join_is_done(&net->layers[i].mlp)) { /* one more than in layer.h */
            s.n_expert = max.n_expert + 1;
            s.n_expert_used = max.n_expert_used + 1;
        }
    s.page_len = b->page_len;
    s.n_pages = b->n_pages;
    s.k_type = b->k_type;
    s.v_type = b->v_type;
    bool plain = b->k_type == DT_F32 || b->k_type == DT_F16 || b->k_type == DT_BF16;
    s.kv_type = plain && b->k_type == b->v_type ? b->k_type : DT_NONE;
    s.max_tokens = b->max_tokens;
    s.max_seqs = b->max_seqs;
    s.max_out = b->max_out;
    s.max_embeds = b->max_embeds;
    s.max_pages = b->max_pages;
    s.limit = index_limit(net);
    return s;
}

static struct rope_tables ropes_of(const struct network *net)
{
    struct rope_tables t = {};
    for (; t.n < net->n_ropes; t.n++) {
        const struct rope *r = &net->ropes[t.n];
        t.of[t.n].half = r->n_rot / 2;
        t.of[t.n].at = t.pairs;
        t.of[t.n].mscale = r->mscale;
        t.of[t.n].planes = r->plane != NULL;
        t.planes |= r->plane != NULL;
        t.pairs += r->n_rot / 2;
    }
    return t;
}

/* Buffers of begin and end, for every step in flight. */
static bool alloc_steps(struct cuda_backend *cu, struct error *err)
{
    const struct model_shape *s = &cu->shape;
    size_t tokens = (size_t)s->max_tokens, seqs = (size_t)s->max_seqs, out = (size_t)s->max_out;
    size_t embeds = (size_t)s->max_embeds * (size_t)network_embed_width(cu->net) * sizeof(float);
    cu->step.capacity = STEP_HEAD + 64 + (cu->rope.tables.planes ? 8 : 5) * tokens + 6 * seqs +
                        out + 16 + 2 * (tokens / 64 + seqs + 1) + seqs * (size_t)s->max_pages +
                        lora_step_ints(cu) + mtp_step_ints(cu) +
                        tower_step_ints(cu->net, s->max_tokens) + 4 * (size_t)s->max_embeds + 8;
    for (int i = 0; i < 2; i++) {
        struct step_flight *f = &cu->queue.steps[i];
        f->chosen = (bool *)mem_zalloc(out + 1, sizeof *f->chosen);
        cudaError_t e = cudaEventCreateWithFlags(&f->done, cudaEventDisableTiming);
        if (e != cudaSuccess)
            return error_set(err, "CUDA: %s", cudaGetErrorString(e));
        if (!cuda_pin((void **)&cu->step.hosts[i], (void **)&cu->step.mappeds[i],
                      cu->step.capacity * 4, err))
            return false;
        if (i && cu->net->n_mergers) { /* a tower's steps run one at a time: one buffer */
            cu->step.embeds_hosts[1] = cu->step.embeds_hosts[0];
            cu->step.embeds_mappeds[1] = cu->step.embeds_mappeds[0];
        } else if (embeds && !cuda_pin((void **)&cu->step.embeds_hosts[i],
                                       (void **)&cu->step.embeds_mappeds[i], embeds, err)) {
            return false;
        }
    }
    return sample_prepare(cu, err);
}

/* Width of hidden units that are input rows of an ordinary product. */
static size_t hidden_width(const struct network *net)
{
    size_t most = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        if (m->dense.gate_up && !activation_is_gated(m->dense.act))
            widen(&most, (size_t)m->dense.down->n_in);
        widen(&most, (size_t)apart_widest(m));
    }
    return most;
}

/* Buffers that only some networks need: a dense part beside experts, a router's own norm, weights
 * of experts spread over processes, embeddings per layer, the gain of norms without one. */
static bool alloc_optional(struct cuda_backend *cu, const struct network *net, struct error *err)
{
    size_t tokens = (size_t)cu->shape.max_tokens, embd = (size_t)cu->shape.n_embd;
    bool beside = false, routes = false, own = false, parallel = false, late = false, same = false;
    size_t spread = 0, out = (size_t)cu->shape.max_out;
    struct network_max max;
    network_measure(net, &max);
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        beside = beside || (m->dense.gate_up && m->router.w && !join_is_done(m));
        routes = routes || m->router.norm.kind;
        own = own || m->experts_in.kind;
        late = late || m->experts_late;
        same = same || m->router.n_same;
        parallel = parallel || m->block.parallel || net->layers[i].mixer.block.parallel;
        /* Fewer than the router chooses from, on this rank or, without a joined one, on the device. */
        if (m->router.w && (m->experts.gate_up->n_expert < m->router.w->n_out ||
                            cuda_matrix(m->experts.gate_up)->n_expert < m->router.w->n_out))
            widen(&spread, (size_t)cuda_matrix(m->experts.gate_up)->n_expert);
    }
    widen(&spread, (size_t)stream_group(offload_stream(cu)));
    size_t values = (size_t)net->embed.layers.width, n_ones = embd;
    widen(&n_ones, (size_t)max.heads); /* norms of attention's result, and of hidden units */
    widen(&n_ones, hidden_width(net));
    struct device_buffer list[] = {
        {(void **)&cu->mlp.dense, beside ? tokens * embd * 4 : 0},
        {(void **)&cu->mlp.dense_gate, beside ? tokens * 4 : 0},
        {(void **)&cu->mlp.router_in, routes ? tokens * embd * 4 : 0},
        {(void **)&cu->routing.own, tokens * spread * 4},
        {(void **)&cu->mlp.experts_in, own ? NORM_ROWS * embd * 4 : 0},
        {(void **)&cu->mlp.layer_embeds, tokens * values * (size_t)net->n_layers * 4},
        {(void **)&cu->mlp.layer_gate, tokens * values * 4},
        {(void **)&cu->act.ones, n_ones * 4},
        {(void **)&cu->act.before, parallel ? tokens * embd * 4 : 0},
        {(void **)&cu->act.before_out, parallel ? (out + 1) * embd * 4 : 0},
        {(void **)&cu->act.gates, tokens * (size_t)max.gates * 4},
        {(void **)&cu->mlp.late, late ? tokens * embd * 4 : 0},
        {(void **)&cu->mlp.late_out, late ? (out + 1) * embd * 4 : 0},
        {(void **)&cu->routing.same, same ? tokens * 4 : 0},
    };
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    float *ones = (float *)mem_zalloc(n_ones, sizeof *ones);
    for (size_t i = 0; i < n_ones; i++)
        ones[i] = 1.0f;
    cuda_copy_in(cu->be, cu->act.ones, ones, n_ones * sizeof *ones);
    mem_free(ones);
    return true;
}

/* Buffers that ops write to. */
static bool alloc_scratch(struct cuda_backend *cu, struct error *err)
{
    const struct model_shape *s = &cu->shape;
    size_t tokens = (size_t)s->max_tokens, seqs = (size_t)s->max_seqs, out = (size_t)s->max_out;
    size_t embd = (size_t)s->n_embd, heads = (size_t)s->heads, used = (size_t)s->n_expert_used;
    size_t ff = align_up((size_t)s->n_ff, TILE_K), ffe = align_up((size_t)s->n_ff_exp, TILE_K);
    struct network_max max;
    network_measure(cu->net, &max);
    size_t latent = (size_t)max.latent;
    size_t values = (size_t)cu->net->embed.layers.width;
    size_t in = cu->net->mtp.fc ? 2 * embd : embd, widest = in > heads ? in : heads;
    widest =
        (size_t)cu->net->mtp.n_taps * embd > widest ? (size_t)cu->net->mtp.n_taps * embd : widest;
    widest = widest > latent ? widest : latent;
    widest = widest > values ? widest : values;
    widest = hidden_width(cu->net) > widest ? hidden_width(cu->net) : widest;
    widest = widest > tower_widest(cu->net) ? widest : tower_widest(cu->net);
    widest = widest > lora_widest(cu) ? widest : lora_widest(cu);
    size_t hidden = used * ffe > ff ? used * ffe : ff;
    size_t pairs = (size_t)cu->rope.tables.pairs;
    struct split_room split = split_room_of(cu, cu->net);
    cu->forms.n_records = moe_grouped_records(s);
    struct device_buffer list[] = {
        {(void **)&cu->act.stream, tokens * embd * 4},
        {(void **)&cu->act.stream_out, (out + 1) * embd * 4},
        {(void **)&cu->act.norm, tokens * embd * 4},
        {(void **)&cu->act.block, tokens * embd * 4},
        {(void **)&cu->act.q, tokens * heads * 4},
        {(void **)&cu->act.attn, tokens * heads * 4},
        {(void **)&cu->act.attn_out, (out + 1) * heads * 4},
        {(void **)&cu->act.logits, (out + 1) * (size_t)s->n_vocab * 4},
        {(void **)&cu->rope.freq, (pairs + 1) * 4},
        {(void **)&cu->rope.plane, pairs + 1},
        {(void **)&cu->rope.cos_sin, tokens * (pairs + 1) * sizeof(float2)},
        {(void **)&cu->step.dev, cu->step.capacity * 4},
        {(void **)&cu->act.shadow, NORM_ROWS * embd * 4},
        {(void **)&cu->act.qkv, tokens * (size_t)(max.qkv + 1) * 4},
        {(void **)&cu->split.acc, split.floats * 4},
        {(void **)&cu->split.ml, split.units * 16 * 4},
        {(void **)&cu->split.count, seqs * split.counts * 4},
        {(void **)&cu->split.records, attn_decode_split_record_bytes(cu)},
        {(void **)&cu->dequant.kv, attn_prefill_quant_bytes(cu) + 16},
        {(void **)&cu->dequant.pages, (attn_prefill_quant_page_ints(cu) + 1) * 4},
        {(void **)&cu->routing.logits,
         tokens * (size_t)(s->n_expert + 1) * 4 * (align_up(embd, TILE_K) / TILE_K)},
        {(void **)&cu->routing.sums, 2 * SUM_WORDS * 8},
        {(void **)&cu->routing.squares, SUM_BLOCKS * 4},
        {(void **)&cu->mlp.hidden, HIDDEN_ROWS * (hidden + 1) * 4},
        {(void **)&cu->forms.records, (size_t)moe_grouped_records(s) * RECORD},
        {(void **)&cu->mlp.hidden_records, (size_t)moe_grouped_hidden_records(s) * RECORD},
        {(void **)&cu->forms.panels, gemm_cluster_bytes(cu)},
        {(void **)&cu->mlp.grid_barrier, grid_barrier_bytes()},
        {(void **)&cu->forms.fp16, tokens * align_up(widest, TILE_K) * 2},
        {(void **)&cu->forms.scale, tokens * 4},
        {(void **)&cu->mlp.hidden_fp16, tokens * (hidden + 1) * 2},
        {(void **)&cu->mlp.expert_out, tokens * (used * embd + 1) * 4},
        {(void **)&cu->splitk_sums, gemm_wgmma_part_bytes(cu)},
        {(void **)&cu->routing.tables, moe_route_ints(s) * 4},
        {(void **)&cu->routing.weight, tokens * (used + 1) * 4},
        {(void **)&cu->sampling.argmax_value, (out + 1) * ARGMAX_BLOCKS * 4},
        {(void **)&cu->sampling.argmax_index, (out + 1) * ARGMAX_BLOCKS * 4},
        {(void **)&cu->sampling.argmax_count, (out + 1) * 4},
        {(void **)&cu->sampling.chosen, (out + 1) * 4},
    };
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

/* Everything except what processes do together. */
static bool prepare_alone(struct cuda_backend *cu, const struct network *net,
                          const struct bounds *bounds, struct error *err)
{
    const struct bounds own = mtp_bounds(cu, net, bounds);
    if (bounds->max_tokens > MAX_GRID)
        return error_set(err, "steps of %d rows are not supported on cuda (%d at most)",
                         bounds->max_tokens, MAX_GRID);
    for (int i = 0; i < net->n_layers; i++)
        if (!join_experts(cu, &net->layers[i].mlp, err))
            return false;
    cuda_ring_free(cu);
    cu->net = net;
    cu->shape = shape_of(net, &own);
    cu->rope.tables = ropes_of(net);
    return offload_prepare(cu, net, own.max_tokens, err) && lora_prepare(cu, &own, err) &&
           apart_prepare(cu, net, &own, err) && alloc_steps(cu, err) && alloc_scratch(cu, err) &&
           alloc_optional(cu, net, err) && delta_net_prepare(cu, &own, err) &&
           ssm_prepare(cu, &own, err) && latent_prepare(cu, &own, err) &&
           index_prepare(cu, &own, err) && encoder_prepare(cu, &own, err) &&
           streams_prepare(cu, &own, err) && compressed_prepare(cu, &own, err) &&
           row_conv_prepare(cu, &own, err) && tower_prepare(cu, &own, err) &&
           mtp_prepare(cu, net, &own, err) && canary_prepare(cu, &own, err);
}

/* Sums over processes may add in another order for another number of rows. With adapters the kernel of a product depends
 * on whether any row of the step uses one. */
static bool deterministic_supported(struct backend *be, const struct bounds *bounds,
                                    struct error *err)
{
    const char *with = be->comm ? "several processes" : bounds->lora_rank ? "adapters" : NULL;
    if (!with)
        return true;
    be->invariance = INVARIANCE_NONE;
    return !be->deterministic ||
           error_set(err, "--deterministic with %s is not supported on cuda", with);
}

bool cuda_prepare(struct backend *be, const struct network *net, const struct bounds *bounds,
                  struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    CHECK(!cu->prepared, "prepare is called once");
    if (!deterministic_supported(be, bounds, err))
        return false;
    if (be->comm && be->comm->n_on_device > 1)
        cuda_share_device(cu);
    if (!comm_prepare(cu, prepare_alone(cu, net, bounds, err), err))
        return false;
    CUDA_TRY(cu, cudaMemsetAsync(cu->split.records, 0xff, attn_decode_split_record_bytes(cu),
                                 cu->stream));
    for (int i = 0; i < net->n_ropes; i++)
        if (cu->rope.tables.of[i].half)
            cuda_copy_in(be, cu->rope.freq + cu->rope.tables.of[i].at, net->ropes[i].freq,
                         (size_t)cu->rope.tables.of[i].half * 4);
    for (int i = 0; i < net->n_ropes; i++)
        if (cu->rope.tables.of[i].planes)
            cuda_copy_in(be, cu->rope.plane + cu->rope.tables.of[i].at, net->ropes[i].plane,
                         (size_t)cu->rope.tables.of[i].half);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    cu->prepared = true;
    if (cu->failed && err)
        *err = cu->error;
    return !cu->failed;
}
