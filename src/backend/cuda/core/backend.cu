/*
 * The ops of the CUDA backend (embed, mixer, head, sample) and the op table; mlp is in mlp.cu.
 * Between ops the residual stream is in cu->resid, in whatever form the last op left it (struct
 * resid). Everything else an op makes is local to it. pick.cu chooses the kernels; device.cu,
 * prepare.cu and step.cu have what surrounds the ops.
 */
#include "backend/cuda/attn/index.h"
#include "backend/cuda/core/streams.h"
#include "backend/cuda/heads/embed.cuh"
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/stream.h"
#include "backend/cuda/heads/mtp.h"
#include "backend/cuda/vision/tower.h"

extern "C" {
#include "backend/cuda/device.h"
#include "base/mem.h"
#include "sample/sampler.h"
}

#include <math.h>

struct resid *cuda_start_stream(struct cuda_backend *cu, int rows)
{
    struct resid r = {};
    r.x = cu->act.stream;
    r.other = cu->act.shadow;
    r.rows = rows;
    cu->resid = r;
    return &cu->resid;
}

struct pick_case cuda_case(struct cuda_backend *cu, const struct norm *norm, struct rows *x)
{
    struct pick_case c = {};
    c.rows = cu->resid.rows;
    c.x = x;
    c.stream = &cu->resid;
    c.made = cu->resid.reads_before;
    if (c.made)
        *x = cuda_norm_before(cu, norm);
    else
        c.gain = cuda_gain(cu, norm);
    return c;
}

struct rows cuda_norm_before(struct cuda_backend *cu, const struct norm *norm)
{
    struct gain gain = cuda_gain(cu, norm);
    int rows = cu->resid.rows, width = cu->shape.n_embd;
    if (!gain.gain)
        return rows_of((float *)cu->resid.before, rows, width);
    step_mark(cu);
    rows_norm(cu, cu->resid.before, gain, cu->act.norm, rows, width);
    step_mark_end(cu, STAGE_NORM);
    return rows_of(cu->act.norm, rows, width);
}

/* The values of every row that layers add later. */
static void embed_values(struct cuda_backend *cu, const struct embed_layers *e)
{
    struct step s = cuda_step(cu);
    struct rows x = resid_plain(cu, &cu->resid);
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.w = cuda_matrix(e->project);
    c.x = &x;
    c.y = cu->mlp.layer_embeds;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
    struct embed_layers_args p = {};
    p.table = *cuda_matrix(e->table);
    p.tokens = s.tokens;
    p.e = cu->mlp.layer_embeds;
    p.norm = cuda_gain(cu, &e->norm);
    p.width = e->width;
    p.pad = e->pad;
    p.table_scale = e->table_scale;
    p.project_scale = e->project_scale;
    p.scale = e->scale;
    embed_layers(cu, p, cu->shape.n_layers, s.n_tokens);
}

void cuda_embed(struct cuda_backend *cu, const struct embed *e, float *x)
{
    struct step s = cuda_step(cu);
    float scale = e->scale == 0 ? 1.0f : e->scale;
    if (!e->partial && !cu->step.layout.n_embeds) {
        embed_tokens(cu, cuda_matrix(e->tokens), &s, scale, x);
        return;
    }
    if (!e->partial) {
        embed_part(cu, cuda_matrix(e->tokens), &s, 0, scale, x);
        embed_given(cu, cuda_embeds(cu), cu->net->n_vocab, &s, x);
        return;
    }
    embed_part(cu, cuda_matrix(e->tokens), &s, e->first, scale, x);
    step_mark_end(cu, STAGE_EMBED);
    comm_sum(cu, x, s.n_tokens);
    step_mark(cu);
}

static void op_embed(struct backend *be, const struct embed *e)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step s = cuda_step(cu);
    struct resid *r = cuda_start_stream(cu, s.n_tokens);
    step_mark(cu);
    if (e->patches) {
        tower_embed(cu, e);
        step_mark_end(cu, STAGE_EMBED);
        return;
    }
    cuda_embed(cu, e, r->x);
    if (e->positions)
        embed_add(cu, cuda_matrix(e->positions), s.pos, e->pos_offset, r->x, s.n_tokens);
    if (e->types)
        embed_add(cu, cuda_matrix(e->types), s.types, 0, r->x, s.n_tokens);
    if (e->norm.kind && s.n_tokens)
        rows_norm(cu, r->x, cuda_gain(cu, &e->norm), r->x, s.n_tokens, cu->shape.n_embd);
    if (e->layers.width && s.n_tokens)
        embed_values(cu, &e->layers);
    streams_begin(cu);
    step_mark_end(cu, STAGE_EMBED);
}

/* [q k v] = n W^T; norms, RoPE; q is written to cu->act.q, k and v to the cache. Returns true for a
 * step of decodes whose attention itself rotates and stores; then the raw projections are in
 * cu->act.qkv. */
static bool project(struct cuda_backend *cu, const struct attn_layer *l, const struct block *block,
                    int layer)
{
    const struct attention *own = &cu->net->layers[layer].mixer.attention;
    bool plain = !own->k_conv.len && !l->any;
    struct step s = cuda_step(cu);
    struct rows n = {};
    struct pick_case c = {};
    if (block->joined) {
        n = mtp_joined(cu);
        c.rows = n.n;
        c.x = &n;
    } else {
        c = cuda_case(cu, &block->in, &n);
    }
    c.w = l->wqkv;
    c.y = cu->act.q;
    c.attn.raw = plain && !cu->exact && s.n_decode == s.n_tokens && !l->spans && !l->chunked &&
                 !l->choice && attn_takes_raw(cu, l);
    c.attn.layer = l;
    c.step = &s;
    const struct cuda_pick *p =
        block->joined || own->k_conv.len ? NULL : pick_find(cu, PICK_QKV, &c);
    if (p && p->run && !lora_changes(cu, c.w)) {
        pick_input(cu, p, &c);
        step_mark(cu);
        pick_go(cu, p, &c);
        step_mark_end(cu, STAGE_QKV);
        return false;
    }
    if (p && !p->run)
        pick_go(cu, p, &c);
    c.y = cu->act.qkv;
    pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    if (c.attn.raw)
        return true;
    row_conv_kv(cu, own, layer);
    step_mark(cu);
    attn_heads(cu, l, &s, cu->act.qkv, cu->act.q);
    step_mark_end(cu, STAGE_QKV);
    return false;
}

void mixer_products(struct cuda_backend *cu, const struct norm *norm,
                    const struct mixer_product *list, int n)
{
    struct rows x = {}; /* made by the first product without a fused norm */
    for (int i = 0; i < n; i++) {
        struct pick_case c = {};
        if (x.floats) {
            c.rows = cu->resid.rows;
            c.x = &x;
        } else {
            c = cuda_case(cu, norm, &x);
        }
        c.w = list[i].w;
        c.y = list[i].y;
        pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    }
}

/* Drops rows that need no logits, from the stream and from the pending rows. */
static void narrow(struct cuda_backend *cu, struct rows *a)
{
    struct step s = cuda_step(cu);
    struct resid *r = &cu->resid;
    if (r->narrow)
        return;
    r->narrow = true;
    if (cu->step.layout.out_is_all && !cu->exact)
        return;
    struct rows x = resid_plain(cu, r);
    if (cu->step.layout.out_is_all) /* only the sum, so that it is rounded as in other steps */
        return;
    step_gather(cu, &s, x.floats, cu->act.stream_out, x.width);
    if (r->before) {
        step_gather(cu, &s, r->before, cu->act.before_out, x.width);
        r->before = cu->act.before_out;
    }
    streams_narrow(cu, &s);
    int at = mtp_of(cu)->narrows;
    if (at > 0 && cu->net->layers[at - 1].mlp.experts_late)
        step_gather(cu, &s, cu->mlp.late, cu->mlp.late_out, x.width);
    r->parts_narrow = true;
    r->x = cu->act.stream_out;
    r->other = cu->act.shadow;
    r->rows = s.n_out;
    if (!a)
        return;
    rows_to_floats(cu, a);
    step_gather(cu, &s, a->floats, cu->act.attn_out, a->width);
    *a = rows_of(cu->act.attn_out, s.n_out, a->width);
}

static struct attn_norm norm_of(const struct norm *n)
{
    struct attn_norm r = {n->kind != NORM_NONE, n->kind != NORM_NONE ? n->gain : NULL, n->eps};
    return r;
}

static struct attn_layer layer_of(const struct cuda_backend *cu, const struct attention *a,
                                  int layer)
{
    const struct kv_layer *kv = &cu->kv[a->shares_kv ? a->kv_layer : layer];
    struct attn_layer l = {};
    l.wqkv = cuda_matrix(a->wqkv);
    l.k = kv->k;
    l.v = kv->v;
    l.n_heads = a->n_heads;
    l.n_kv = a->n_kv_heads;
    l.k_dim = a->k_dim;
    l.v_dim = a->v_dim;
    l.norm[ATTN_Q] = norm_of(&a->q_norm);
    l.norm[ATTN_K] = norm_of(&a->k_norm);
    l.norm[ATTN_V] = norm_of(&a->v_norm);
    l.norm_whole = a->norm_whole;
    l.rope = step_rope(cu, a->rope);
    l.n_rot = a->rope ? a->rope->n_rot : 0;
    l.scale = a->scale;
    l.softcap = a->softcap;
    l.window = a->window;
    l.bidirectional = a->bidirectional;
    l.spans = tower_spans(cu, a);
    l.span_only = a->span == SPAN_ONLY;
    l.sinks = a->sinks;
    l.gated = a->gated;
    l.k_is_v = a->k_is_v;
    l.shares_kv = a->shares_kv;
    l.temp_beta = a->temp_beta;
    l.temp_len = a->temp_len;
    l.temp_offset = a->temp_offset;
    l.chunked = a->chunked && cu->step.layout.beyond; /* else there is one chunk */
    l.window = a->chunked && !l.chunked ? 0 : l.window;
    l.norm_late = a->norm_late;
    l.floats = a->wgate || a->out_norm.kind;
    l.any = a->wrel || (cu->exact && a->span && cu->shape.max_embeds);
    l.temp_smooth = a->temp_smooth;
    if (a->wrel) {
        l.rel_query = row_conv_rel(cu);
        l.rel = a->rel;
        l.rel_dim = a->rel_dim;
        l.rel_len = a->rel_len;
    }
    return l;
}

/* What follows the softmax: a gate with a matrix of its own, whose values are in cu->act.gates, and a norm. */
static void finish_attention(struct cuda_backend *cu, const struct attention *l, struct rows *a)
{
    struct gain norm = cuda_gain(cu, &l->out_norm);
    rows_to_floats(cu, a);
    if (l->wgate)
        attn_gate(cu, a->floats, cu->act.gates, a->n, l->n_heads, l->v_dim, l->wgate->n_out,
                  l->softplus);
    if (norm.gain)
        rows_norm(cu, a->floats, norm, a->floats, a->n, a->width);
    *a = rows_of(a->floats, a->n, a->width);
}

static struct rows mix_attention(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct attention *l = &m->attention;
    struct attn_layer al = layer_of(cu, l, layer);
    struct step s = mtp_rows(cu);
    struct index_choice choice;
    if (index_choose(cu, m, layer, &s, &choice))
        al.choice = &choice;
    if (l->clips) {
        tower_clip_qkv(cu, &m->block.in, l);
        return encoder_attend(cu, &al);
    }
    if (l->bidirectional)
        return encoder_mix(cu, &m->block.in, &al);
    if (l->wgate) {
        const struct mixer_product gate = {cuda_matrix(l->wgate), cu->act.gates};
        mixer_products(cu, &m->block.in, &gate, 1);
    }
    if (l->wrel) {
        const struct mixer_product rel = {cuda_matrix(l->wrel), row_conv_rel(cu)};
        mixer_products(cu, &m->block.in, &rel, 1);
    }
    bool raw = project(cu, &al, &m->block, layer);
    step_mark(cu);
    struct rows a = attn_attend(cu, &al, &s, raw);
    if (al.floats)
        finish_attention(cu, l, &a);
    step_mark_end(cu, STAGE_ATTENTION);
    return a;
}

/* What the mixer reads is kept where its mlp or the next mixer reads it too. A mixer in parallel with the one before reads
 * what that one read, and what that one wrote is added now. */
static void start_mixer(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct layer *l = &cu->net->layers[layer];
    bool before_next = layer + 1 < cu->net->n_layers && l[1].mixer.block.parallel;
    cu->resid.reads_before = m->block.parallel;
    if (m->block.parallel)
        resid_plain(cu, &cu->resid);
    else if (l->mlp.block.parallel || before_next)
        resid_keep(cu, &cu->resid);
}

/* The kernel of the next experts may take over the mixer's last product. */
static bool takes_product(const struct cuda_backend *cu, const struct mlp *next)
{
    return next->router.w && cuda_is_plain(next) && !apart_experts(next) && !next->block.parallel &&
           !cu->streams && next->block.in.kind != NORM_LAYER && !lora_changes_experts(cu, next);
}

struct block cuda_keep(struct cuda_backend *cu, const struct block *b)
{
    struct resid *r = &cu->resid;
    struct block own = *b;
    if (b->keep == 0)
        return own;
    resid_plain(cu, r);
    step_mark(cu);
    rows_norm(cu, r->x, cuda_gain(cu, &b->in), r->x, r->rows, cu->shape.n_embd);
    step_mark_end(cu, STAGE_NORM);
    r->before = r->x;
    r->reads_before = true;
    struct norm none = {};
    own.in = none;
    return own;
}

static void op_mixer(struct backend *be, const struct mixer *mixer, int layer)
{
    struct cuda_backend *cu = cuda_self(be);
    const struct weight *wo = mixer_out(mixer);
    streams_predict(cu, &cu->net->layers[layer].altup);
    hyper_read(cu, &cu->net->layers[layer].hyper[0]);
    if (!wo) { /* the layer is an mlp alone */
        if (layer == mtp_of(cu)->narrows)
            narrow(cu, NULL);
        return;
    }
    start_mixer(cu, mixer, layer);
    struct mixer own = *mixer;
    own.block = cuda_keep(cu, &mixer->block);
    const struct mixer *m = &own;
    streams_laurel(cu, &m->block.in, &m->laurel);
    struct rows a = m->kind == MIXER_DELTA_NET    ? delta_net_mix(cu, m, layer)
                    : m->kind == MIXER_LATENT     ? latent_mix(cu, m, layer)
                    : m->kind == MIXER_ATTENTION  ? mix_attention(cu, m, layer)
                    : m->kind == MIXER_COMPRESSED ? compressed_mix(cu, m, layer)
                                                  : ssm_mix(cu, m, layer);
    cu->resid.reads_before = false;
    if (m->block.keep != 0)
        cu->resid.before = NULL; /* it was the stream */
    if (layer == mtp_of(cu)->narrows)
        narrow(cu, &a);
    struct resid *r = &cu->resid;
    struct pick_case c = {};
    c.rows = r->rows;
    c.w = cuda_matrix(wo);
    c.x = &a;
    c.y = cu->act.block;
    c.stream = r;
    struct resid_epilogue epilogue = cuda_epilogue(cu, &m->block);
    if (m->laurel.left) {
        epilogue.set = true;
        epilogue.after = streams_laurel_rows(cu);
        epilogue.stream_scale = sqrtf(0.5f);
    }
    const struct mlp *next = &cu->net->layers[layer].mlp;
    struct experts experts = {};
    if (!comm_sums(cu, m->partial) && takes_product(cu, next) && !epilogue.set &&
        !m->block.conv.len && m->block.out.kind != NORM_AFFINE && !lora_changes(cu, c.w)) {
        experts = cuda_experts(next);
        c.moe.experts = &experts;
    }
    if (!c.rows)
        return;
    const struct cuda_pick *p = pick_find(cu, PICK_OUTPUT, &c);
    pick_go(cu, p, &c);
    if (p->run)
        return;
    c.stream = NULL; /* the input is a */
    if (m->kind == MIXER_ATTENTION && m->attention.clips)
        tower_clip_linear(cu, wo, &m->attention.clips[3], &a, c.y);
    else
        pick_run(cu, PICK_LINEAR, &c, STAGE_OUTPUT);
    if (m->block.out.kind == NORM_AFFINE)
        tower_norm(cu, &m->block.out, c.y, c.rows, cu->shape.n_embd);
    r->add = ADD_ROWS;
    r->d = cu->act.block;
    comm_sum_stream(cu, m->partial);
    row_conv_block(cu, false, layer, &epilogue);
    r->epilogue = epilogue;
}

static void op_head(struct backend *be, const struct head *h)
{
    struct cuda_backend *cu = cuda_self(be);
    streams_end(cu);
    narrow(cu, NULL);
    if (cu->exact &&
        cu->resid.rows) /* as in steps that keep their rows, whose sum is made before the norm */
        resid_plain(cu, &cu->resid);
    struct rows n = {};
    struct pick_case c = cuda_case(cu, &h->norm, &n);
    if (!h->w) {
        if (c.rows)
            encoder_head(cu, &h->norm);
        return;
    }
    c.w = cuda_matrix(h->w);
    float *few = mtp_few_logits(cu, h);
    c.y = few ? few : comm_head_to(cu, h);
    if (!c.rows)
        return;
    pick_run(cu, PICK_LINEAR, &c, STAGE_HEAD);
    if (few) {
        mtp_widen(cu, h, c.rows);
        return;
    }
    float scale = h->scale == 0 ? 1.0f : h->scale;
    if (scale != 1.0f || h->softcap != 0)
        embed_logits(cu, c.y, (size_t)c.rows * (size_t)c.w->n_out, scale, h->softcap);
    comm_collect(cu, h, c.rows);
}

static void op_sample(struct backend *be, struct sampler *const *samplers)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step_flight *f = &cu->queue.steps[(cu->queue.n_begun + 1) % 2]; /* the one begun last */
    cuda_launch_step(be); /* the recording ends with the head */
    step_mark(cu);
    for (int i = 0; i < f->n_out; i++)
        f->chosen[i] = samplers[i] != NULL;
    sample_tokens(cu, samplers, f->n_out);
    step_mark_end(cu, STAGE_SAMPLING);
    CUDA_TRY(cu, cudaEventRecord(f->done, cu->stream));
}

static void op_probs(struct backend *be, int row, struct sample_probs *out)
{
    const struct cuda_backend *cu = cuda_self(be);
    *out = sample_probs_of(cu, (int)((cu->queue.n_ended + 1) % 2))[row];
}

static void op_logits(struct backend *be, int row, float *host)
{
    struct cuda_backend *cu = cuda_self(be);
    size_t n = (size_t)cu->shape.n_vocab;
    if (!cu->net->head.w)
        encoder_row(cu, row, host);
    else
        cuda_copy_out(be, host, cu->act.logits + (size_t)row * n, n * sizeof(float));
}

static void op_stream_put(struct backend *be, const float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    struct resid *r = cuda_start_stream(cu, rows);
    cuda_copy_in(be, r->x, host, (size_t)rows * (size_t)cu->shape.n_embd * sizeof(float));
}

static void op_stream_get(struct backend *be, float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    struct rows x = resid_plain(cu, &cu->resid);
    cuda_copy_out(be, host, x.floats, (size_t)rows * (size_t)x.width * sizeof(float));
}

static void op_logits_put(struct backend *be, const float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    size_t bytes = (size_t)rows * (size_t)cu->shape.n_vocab * 4;
    cuda_copy_in(be, cu->act.logits, host, bytes);
    if (!cu->net->head.w)
        encoder_rows_put(cu, host, bytes);
}

/* Device memory is freed as a whole, never in part. */
static void op_forget(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)p, (void)bytes;
}

static bool op_replay(struct backend *be, uint64_t key)
{
    if (cuda_replay(be, key))
        return true;
    cuda_record(be, key);
    return false;
}

/* The choice of a kernel depends on more than a weight's shape and the number of rows. */
static void op_pick_shapes(struct backend *be, FILE *out)
{
    (void)be, (void)out;
}

static bool op_settle(struct backend *be, struct error *err)
{
    return offload_settle(cuda_self(be), err);
}

static void op_tier_stats(struct backend *be, struct tier_stats *out)
{
    offload_stats(cuda_self(be), out);
}

static size_t op_uses(struct backend *be, float *out)
{
    return offload_uses(cuda_self(be), out);
}

static void op_place(struct backend *be, const float *uses)
{
    offload_place(cuda_self(be), uses);
}

static const struct tier_ops tier = {op_settle, op_tier_stats, op_uses, op_place};
static const struct adapter_ops adapters = {lora_adapt, lora_unadapt};
static const struct draft_ops draft = {mtp_keep, mtp_tap, mtp_join};
static const struct tower_ops tower = {tower_merge, tower_features, true};
static const struct stream_ops stream = {op_stream_put, op_stream_get, op_logits_put};
static const struct pick_ops picks = {pick_info, pick_force, op_pick_shapes};

static struct backend_ops make_ops(void)
{
    struct backend_ops o = {};
    o.name = "cuda";
    o.close = cuda_close;
    o.alloc = cuda_alloc;
    o.free = cuda_free;
    o.forget = op_forget;
    o.copy_in = cuda_copy_in;
    o.copy_out = cuda_copy_out;
    o.host = &cuda_host_ops;
    o.supports = cuda_supports;
    o.upload = cuda_upload;
    o.release = cuda_release;
    o.prepare = cuda_prepare;
    o.begin = cuda_begin;
    o.replay = op_replay;
    o.launch = cuda_launch_step;
    o.end = cuda_end;
    o.embed = op_embed;
    o.mixer = op_mixer;
    o.mlp = cuda_mlp;
    o.head = op_head;
    o.sample = op_sample;
    o.probs = op_probs;
    o.logits = op_logits;
    o.adapters = &adapters;
    o.draft = &draft;
    o.tower = &tower;
    o.stream = &stream;
    o.picks = &picks;
    o.tier = &tier;
    return o;
}

static struct backend *open_device(const struct backend_options *opt, struct error *err)
{
    static struct backend_ops ops;
    ops = make_ops();
    struct cuda_whole *whole = (struct cuda_whole *)mem_zalloc(1, sizeof *whole);
    struct cuda_backend *cu = &whole->cu;
    whole->be.ops = &ops;
    whole->be.async = whole->be.records = true;
    whole->be.own_memory = true;
    whole->be.invariance =
        opt->host ? INVARIANCE_NONE : INVARIANCE_CHOSEN; /* the host follows its own */
    whole->be.deterministic = opt->deterministic;
    cu->be = &whole->be;
    offload_open(cu, opt->host, opt->host && opt->expert_memory, opt->host_all);
    if (!cuda_open_device(cu, cuda_device_number(opt->device), opt->background, err)) {
        cuda_close(cu->be);
        return NULL;
    }
    return cu->be;
}

extern "C" const struct device_type cuda_device = {
    "cuda",    DEVICE_GPU, NULL,         open_device,       cuda_count,     NULL,       cuda_room,
    cuda_held, true,       stream_bytes, cuda_weight_bytes, cuda_device_id, cuda_facts, true};
