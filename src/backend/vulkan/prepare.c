/* Before the first step: checks that the kernels can run the network, and allocates all memory that steps write to. */
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"
#include "quant/kvblock.h"

#include <string.h>

/* What the kernels' arrays in shared memory hold. */
enum { MAX_HEAD_DIM = 1024, MAX_EXPERTS = 1024, MAX_GROUPS = 64 };

/* Parts beyond a plain decoder that the kernels support. */
static const uint64_t PARTS =
    PART_NORM_LAYER | PART_NORM_OUT | PART_SCALES | PART_EMBED | PART_SINKS | PART_SOFTCAP |
    PART_GATE | PART_NORM_WHOLE | PART_TEMPERATURE | PART_SHARED_KV | PART_BIDIRECTIONAL |
    PART_HEAD_DIMS | PART_LAYER_HEADS | PART_ACTIVATIONS | PART_ACTIVATIONS_2 | PART_ROUTERS |
    PART_BOTH | PART_EXPERT_BIAS | PART_DEEPSTACK | PART_SPANS | PART_PARALLEL | PART_OWN_GATE |
    PART_CHUNKED | PART_NORM_LATE | PART_NORM_MID | PART_ALONE | PART_DELTA_NET | PART_DELTA_BETA |
    PART_SSM | PART_SHORT_CONV | PART_LATENT | PART_LATENT_TEMPERATURE | PART_SILU_CLAMP |
    PART_ROUTER_INPUT | PART_SSM_SCALES | PART_MTP | PART_TOWER | PART_SCAN | PART_LIGHTNING |
    PART_SPARSE_MIXER | PART_ROUTERS_2 | PART_LATE_EXPERTS | PART_LATENT_EXPERTS | PART_KEEP |
    PART_SPARSE | PART_ALTUP | PART_LAYER_EMBED | PART_SPARSE_ACT;

static bool attention_supported(const struct attention *a, int i, struct error *err)
{
    int dim = a->k_dim > a->v_dim ? a->k_dim : a->v_dim;
    if (dim > MAX_HEAD_DIM)
        return error_set(err, "layer %d: heads of %d are not supported on vulkan (%d at most)", i,
                         dim, MAX_HEAD_DIM);
    if (a->k_dim % 2 || a->v_dim % 2)
        return network_refuse(err, i, "heads of an odd number of values are", "vulkan");
    if (a->clips && a->gated)
        return network_refuse(err, i, "a bound of gated attention's inputs is", "vulkan");
    if (a->gated && a->norm_whole && a->q_norm.kind)
        return network_refuse(err, i, "a gate beside a QK-norm over a whole projection is",
                              "vulkan");
    return true;
}

static bool experts_supported(const struct mlp *m, int i, struct error *err)
{
    const struct router *r = &m->router;
    if (r->w->n_out > MAX_EXPERTS || r->n_used > r->w->n_out)
        return error_set(err, "layer %d: %d experts are not supported on vulkan (%d at most)", i,
                         r->w->n_out, MAX_EXPERTS);
    if (r->n_groups > MAX_GROUPS)
        return network_refuse(err, i, "such a choice of expert groups is", "vulkan");
    return true;
}

bool vulkan_supports(struct backend *be, const struct network *net, struct error *err)
{
    if (be->comm)
        return error_set(err, "several processes are not supported on vulkan");
    if (net->has_prev_stage || net->has_next_stage)
        return error_set(err, "pipeline stages are not supported on vulkan");
    if (!network_check(net, PARTS, "vulkan", err))
        return false;
    if (net->mtp.n_taps)
        return network_refuse(err, -1, "an EAGLE-3 head is", "vulkan");
    if (!vulkan_tower_supported(net, err))
        return false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct layer *l = &net->layers[i];
        if (l->mixer.kind == MIXER_ATTENTION && !attention_supported(&l->mixer.attention, i, err))
            return false;
        if (l->mixer.kind == MIXER_LATENT && !vulkan_latent_supported(&l->mixer.latent, i, err))
            return false;
        if (!vulkan_index_supported(&l->mixer, i, err) ||
            !vulkan_state_supported(&l->mixer, i, err))
            return false;
        if (l->mlp.router.w && !experts_supported(&l->mlp, i, err))
            return false;
    }
    return true;
}

bool vulkan_own(struct vulkan *v, uint64_t *to, size_t bytes, struct error *err)
{
    CHECK(v->n_owned < (int)(sizeof v->owned / sizeof *v->owned), "too many blocks");
    void *p = vulkan_alloc(&v->be, bytes, "working memory", err);
    *to = vulkan_address(p);
    v->owned[v->n_owned] = p;
    v->owned_bytes[v->n_owned] = bytes;
    v->n_owned += p != NULL;
    return p != NULL;
}

static bool own_floats(struct vulkan *v, uint64_t *to, size_t rows, size_t ld, struct error *err)
{
    *to = 0;
    return rows * ld == 0 || vulkan_own(v, to, rows * ld * sizeof(float), err);
}

/* The frequencies of each RoPE table, its planes as words, and room for the angles of a step's rows. */
static bool put_ropes(struct vulkan *v, struct error *err)
{
    const struct network *net = v->net;
    size_t n = (size_t)net->n_ropes + 1;
    v->s.ropes = mem_zalloc(3 * n, sizeof *v->s.ropes);
    v->s.freqs = v->s.ropes + n;
    v->s.planes = v->s.freqs + n;
    size_t freqs = 0, angles = 0;
    for (int i = 0; i < net->n_ropes; i++)
        freqs += (size_t)(net->ropes[i].n_rot / 2);
    angles = freqs * (size_t)v->bounds.max_tokens * 2;
    uint64_t tables, to;
    if (!freqs)
        return true;
    if (!own_floats(v, &tables, 2, freqs, err) || !own_floats(v, &to, 1, angles, err))
        return false;
    for (int i = 0; i < net->n_ropes; i++) {
        const struct rope *r = &net->ropes[i];
        size_t half = (size_t)(r->n_rot / 2);
        uint32_t plane[4096];
        CHECK(half <= 4096, "a RoPE table of %zu pairs", half);
        v->s.ropes[i] = to;
        v->s.freqs[i] = tables;
        v->s.planes[i] = r->plane ? tables + 4 * half : 0;
        vulkan_copy_in(&v->be, (void *)(uintptr_t)tables, r->freq, 4 * half);
        for (size_t k = 0; r->plane && k < half; k++)
            plane[k] = r->plane[k];
        if (r->plane)
            vulkan_copy_in(&v->be, (void *)(uintptr_t)v->s.planes[i], plane, 4 * half);
        tables += 8 * half;
        to += 8 * half * (size_t)v->bounds.max_tokens;
    }
    return true;
}

/* The sums of attention over splits, for any number of rows. */
static size_t parts_room(const struct vulkan *v)
{
    size_t most = 0;
    for (int i = 0; i < v->net->n_layers; i++) {
        const struct mixer *m = &v->net->layers[i].mixer;
        bool latent = m->kind == MIXER_LATENT;
        if (m->kind != MIXER_ATTENTION && !latent)
            continue;
        int heads = latent ? m->latent.n_heads : m->attention.n_heads;
        int dim = latent ? m->latent.kv_rank : m->attention.v_dim;
        /* a workgroup may have all heads of a group */
        int least = latent ? heads : m->attention.n_kv_heads;
        for (int rows = 1; vulkan_splits(rows, least) > 1; rows++) {
            size_t n = (size_t)rows * (size_t)heads * vulkan_splits(rows, least);
            most = n * (size_t)(dim + 2) > most ? n * (size_t)(dim + 2) : most;
        }
    }
    return most;
}

static bool own_scratch(struct vulkan *v, struct error *err)
{
    const struct network *net = v->net;
    const struct network_max *m = &v->max;
    struct vulkan_scratch *s = &v->s;
    size_t tokens = (size_t)v->bounds.max_tokens, outs = (size_t)v->bounds.max_out;
    size_t used = tokens * (size_t)m->n_expert_used;
    int ff = m->n_ff > net->n_embd ? m->n_ff : net->n_embd;
    s->ld_x = vulkan_ld(net->n_embd);
    s->ld_qkv = vulkan_ld(m->qkv > m->latent ? m->qkv : m->latent);
    int heads = m->heads > net->n_embd ? m->heads : net->n_embd;
    s->ld_heads = vulkan_ld(heads > m->latent ? heads : m->latent);
    s->ld_gate = vulkan_ld(m->gates > 2 * m->state_heads ? m->gates : 2 * m->state_heads);
    s->ld_expert = vulkan_ld(2 * m->n_ff_exp);
    s->ld_latent = vulkan_ld(m->n_latent_exp);
    uint32_t ld_part = s->ld_x > s->ld_latent ? s->ld_x : s->ld_latent;
    bool late = false, laurel = false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct laurel *l = &net->layers[i].mixer.laurel;
        late |= net->layers[i].mlp.experts_late;
        laurel |= l->left != NULL;
        ff = l->left && l->left->n_out > ff ? l->left->n_out : ff;
    }
    ff = net->embed.layers.width > ff ? net->embed.layers.width : ff;
    s->ld_hidden = vulkan_ld(2 * ff);
    size_t absorbed = 0, summed = 0; /* of a row */
    for (int i = 0; i < net->n_layers; i++) {
        const struct latent *l = &net->layers[i].mixer.latent;
        if (net->layers[i].mixer.kind != MIXER_LATENT)
            continue;
        size_t H = (size_t)l->n_heads, C = (size_t)l->kv_rank, one = H * (C + (size_t)l->rope_dim);
        absorbed = one > absorbed ? one : absorbed;
        summed = H * C > summed ? H * C : summed;
    }
    s->ld_half = s->ld_heads > s->ld_hidden ? s->ld_heads : s->ld_hidden;
    int widest = m->n_ff_exp > net->n_embd ? m->n_ff_exp : net->n_embd;
    size_t of_experts = used * vulkan_ld(widest > m->n_latent_exp ? widest : m->n_latent_exp);
    size_t halves = tokens * s->ld_half;
    halves = of_experts > halves ? of_experts : halves;
    size_t hidden = tokens * s->ld_hidden, experts = used * s->ld_expert;
    return own_floats(v, &s->x, tokens, s->ld_x, err) &&
           own_floats(v, &s->n, tokens, s->ld_x, err) &&
           own_floats(v, &s->y, tokens, s->ld_x, err) &&
           own_floats(v, &s->sum, tokens, s->ld_x, err) &&
           own_floats(v, &s->before, v->parallel ? tokens : 0, s->ld_x, err) &&
           own_floats(v, &s->kept, net->mtp.fc ? tokens : 0, s->ld_x, err) &&
           own_floats(v, &s->joined, net->mtp.fc ? tokens : 0, vulkan_ld(2 * net->n_embd), err) &&
           own_floats(v, &s->qkv, tokens, s->ld_qkv, err) &&
           own_floats(v, &s->q, tokens, s->ld_heads, err) &&
           own_floats(v, &s->a, tokens, s->ld_heads, err) &&
           own_floats(v, &s->narrow, outs < tokens ? outs : tokens, s->ld_heads, err) &&
           own_floats(v, &s->gate, tokens, s->ld_gate, err) &&
           own_floats(v, &s->half, v->coop, halves / 2, err) &&
           own_floats(v, &s->half_scale, v->coop, used > tokens ? used : tokens, err) &&
           own_floats(v, &s->bytes[0], v->dot, halves / 4 * 3, err) &&
           own_floats(v, &s->bytes[1], v->dot, halves / 4 * 3, err) &&
           own_floats(v, &s->absorbed, tokens, absorbed, err) &&
           own_floats(v, &s->summed, tokens, summed, err) &&
           own_floats(v, &s->hidden, 1, hidden > experts ? hidden : experts, err) &&
           own_floats(v, &s->part, used, ld_part, err) &&
           own_floats(v, &s->to_experts, tokens, s->ld_latent, err) &&
           own_floats(v, &s->from_experts, tokens, s->ld_latent, err) &&
           own_floats(v, &s->streams, (size_t)net->streams.n * tokens, s->ld_x, err) &&
           own_floats(v, &s->laurel, laurel ? tokens : 0, s->ld_x, err) &&
           own_floats(v, &s->layer_embeds, tokens,
                      (size_t)(net->n_layers * net->embed.layers.width), err) &&
           own_floats(v, &s->late, late ? tokens : 0, s->ld_x, err) &&
           own_floats(v, &s->router, tokens, vulkan_ld(m->n_expert), err) &&
           own_floats(v, &s->parts, 1, parts_room(v), err) &&
           own_floats(v, &s->groups, 1, 4 + 3 * (used / 8 + (size_t)m->n_expert + 1) + used, err) &&
           own_floats(v, &s->chosen, 1, used, err) && own_floats(v, &s->weights, 1, used, err) &&
           own_floats(v, &s->logits, outs, (size_t)vulkan_logits_width(v), err);
}

/* The step block and given rows, on the device and twice on the host. */
static bool share_steps(struct vulkan *v, struct error *err)
{
    const struct bounds *b = &v->bounds;
    size_t tokens = (size_t)b->max_tokens, seqs = (size_t)b->max_seqs, outs = (size_t)b->max_out;
    size_t words = STEP_WORDS + 11 * tokens + 6 * seqs + outs + seqs * (size_t)b->max_pages + 64 +
                   vulkan_lora_words(v);
    size_t given = (size_t)b->max_embeds * (size_t)network_embed_width(v->net) * sizeof(float);
    size_t width = (size_t)vulkan_logits_width(v) * sizeof(float);
    bool ok = vulkan_own(v, &v->s.step, words * 4, err) && vulkan_own(v, &v->s.embeds, given, err);
    for (int i = 0; i < 2 && ok; i++) {
        struct vulkan_flight *f = &v->flights[i];
        f->sampled = mem_zalloc(outs + 1, sizeof *f->sampled);
        ok = vulkan_share(v, &f->step, words * 4, false, err) &&
             vulkan_share(v, &f->embeds, given, false, err) &&
             (v->net->head.w || vulkan_share(v, &f->vectors, outs * width, false, err));
    }
    return ok && vulkan_sample_prepare(v, err) && vulkan_lora_prepare(v, err) &&
           vulkan_tower_prepare(v, err);
}

void vulkan_unprepare(struct vulkan *v)
{
    vulkan_forget_recordings(v);
    for (int i = 0; i < v->n_owned; i++)
        vulkan_free(&v->be, v->owned[i], v->owned_bytes[i]);
    v->n_owned = 0;
    for (int i = 0; i < 2; i++) {
        struct vulkan_flight *f = &v->flights[i];
        struct vulkan_shared *all[] = {&f->step, &f->embeds, &f->settings, &f->results,
                                       &f->vectors};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            vulkan_unshare(v, all[k]);
        mem_free(f->sampled);
        f->sampled = NULL;
    }
    vulkan_lora_close(v);
    mem_free(v->logits_row);
    mem_free(v->s.ropes);
    v->logits_row = NULL;
    v->s = (struct vulkan_scratch){0};
}

/* Two tokens' scales may share a word, but not two tiles'. */
static bool cache_fits(const struct bounds *b, const struct network *net, struct error *err)
{
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        int k, u;
        mixer_cache_dims(m, &k, &u);
        int odd = b->page_len % 2 * (k / KV_BLOCK % 2 | u / KV_BLOCK % 2);
        if (odd && (kv_turned(b->k_type) || kv_turned(b->v_type)))
            return error_set(err,
                             "layer %d: a quantised cache of pages of %d is not supported on "
                             "vulkan for these heads",
                             i, b->page_len);
    }
    return true;
}

bool vulkan_prepare(struct backend *be, const struct network *net, const struct bounds *bounds,
                    struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    vulkan_unprepare(v);
    v->net = net;
    v->bounds = *bounds;
    network_measure(net, &v->max);
    v->parallel = false;
    for (int i = 0; i < net->n_layers; i++)
        v->parallel |= net->layers[i].mixer.block.parallel || net->layers[i].mlp.block.parallel;
    if (!cache_fits(bounds, net, err) || !own_scratch(v, err) || !vulkan_index_prepare(v, err) ||
        !share_steps(v, err) || !put_ropes(v, err))
        return false;
    uint32_t k = vulkan_cache_format(bounds->k_type), t = vulkan_cache_format(bounds->v_type);
    vulkan_pipeline(v, KERNEL_ATTN, k, t);
    for (enum vulkan_kernel i = 0; i < N_KERNELS; i++)
        if (!vulkan_has_constants(i) && (i != KERNEL_HALF || v->coop))
            vulkan_pipeline(v, i, 0, 0);
    if (v->failed && err)
        *err = v->error;
    return !v->failed;
}
