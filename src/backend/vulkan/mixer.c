/* Mixers on the Vulkan backend: attention over the paged cache, and what all mixers end with. */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"
#include "quant/kvblock.h"

/* Which heads of the projection, and where they go. */
struct heads {
    const struct norm *norm;
    int n, dim, first, stride; /* in a row of the projection */
    uint64_t to;
    enum dtype store; /* DT_NONE: a buffer of floats */
    enum dtype turn;  /* the cache's type, for which heads are rotated */
    bool rope, whole;
};

static void finish_heads(struct vulkan *v, const struct attention *a, const struct heads *h)
{
    const struct vulkan_scratch *s = &v->s;
    uint64_t from = s->qkv + 4 * (uint64_t)h->first;
    if (h->whole) /* over all heads at once */
        vulkan_norm(v, h->norm, from, s->ld_qkv, from, s->ld_qkv, h->n * h->dim, v->rows);
    long rope = a->rope - v->net->ropes;
    bool is_q = h->store == DT_NONE;
    const struct heads_args args = {.step = v->s.step,
                                    .in_rows = s->qkv,
                                    .to = h->to,
                                    .rope = h->rope && a->rope ? s->ropes[rope] : 0,
                                    .gain = vulkan_address(h->norm->gain),
                                    .bias = vulkan_address(h->norm->bias),
                                    .rows = (uint)v->rows,
                                    .n_heads = (uint)h->n,
                                    .dim = (uint)h->dim,
                                    .ld_in = s->ld_qkv,
                                    .first = (uint)h->first,
                                    .stride = (uint)h->stride,
                                    .ld_to = s->ld_heads,
                                    .page_len = (uint)v->bounds.page_len,
                                    .kind = h->whole ? KIND_NONE : (uint)h->norm->kind,
                                    .half_rot = h->rope && a->rope ? (uint)(a->rope->n_rot / 2) : 0,
                                    .norm_dim = (uint)h->dim,
                                    .flags = (a->norm_late ? HEADS_LATE : 0u) |
                                             (kv_turned(h->turn) ? HEADS_TURN : 0u),
                                    .store = is_q ? 0 : vulkan_cache_format(h->store) + 1,
                                    .eps = h->norm->eps,
                                    .temp_beta = is_q ? a->temp_beta : 0,
                                    .temp_len = a->temp_len,
                                    .temp_offset = a->temp_offset};
    vulkan_run(v, KERNEL_HEADS, 0, 0, &args, sizeof args, (uint32_t)h->n, args.rows, 1);
}

/* q to its buffer, k and v to the cache */
static void project(struct vulkan *v, const struct attention *a, const struct kv_layer *kv)
{
    const struct vulkan_scratch *s = &v->s;
    int H = a->n_heads, K = a->n_kv_heads, Dk = a->k_dim, Dv = a->v_dim;
    bool gated = a->gated;
    int each = Dk + (gated ? Dv : 0), k_at = H * each, v_at = a->k_is_v ? k_at : k_at + K * Dk;
    enum dtype kt = v->bounds.k_type, vt = v->bounds.v_type;
    /* q whole with gates between its heads has no run to norm: supports() has refused it */
    const struct heads q = {&a->q_norm, H, Dk, 0, each, s->q, DT_NONE, kt, true, a->norm_whole};
    const struct heads k = {&a->k_norm, K,  Dk,   k_at,         Dk, vulkan_address(kv->k),
                            kt,         kt, true, a->norm_whole};
    const struct heads u = {&a->v_norm, K,  Dv,    v_at,         Dv, vulkan_address(kv->v),
                            vt,         vt, false, a->norm_whole};
    bool alone = !a->norm_whole;
    if (alone)
        vulkan_apart(v, true);
    finish_heads(v, a, &q);
    if (!a->shares_kv) { /* v first: k's norm may be in place */
        finish_heads(v, a, &u);
        finish_heads(v, a, &k);
    }
    if (alone)
        vulkan_apart(v, false);
}

static void attend(struct vulkan *v, const struct attention *a, const struct kv_layer *kv)
{
    const struct vulkan_scratch *s = &v->s;
    int each = a->k_dim + a->v_dim;
    bool own = a->gated && !a->wgate; /* gates lie after each head of q */
    struct attn_args args = {.step = v->s.step,
                             .q = s->q,
                             .k = vulkan_address(kv->k),
                             .v = vulkan_address(kv->v),
                             .a = s->a,
                             .sinks = vulkan_address(a->sinks),
                             .gate = own ? s->qkv + 4 * (uint64_t)a->k_dim : 0,
                             .n_heads = (uint)a->n_heads,
                             .n_kv_heads = (uint)a->n_kv_heads,
                             .k_dim = (uint)a->k_dim,
                             .v_dim = (uint)a->v_dim,
                             .page_len = (uint)v->bounds.page_len,
                             .ldq = s->ld_heads,
                             .lda = s->ld_heads,
                             .window = (uint)a->window,
                             .flags = (a->chunked ? ATTN_CHUNKED : 0u) |
                                      (a->index.n_chosen ? ATTN_CHOSEN : 0u) |
                                      (a->bidirectional ? ATTN_BIDIRECTIONAL : 0u) |
                                      (a->span == SPAN_ONLY ? ATTN_SPAN_ONLY : 0u) |
                                      (a->span == SPAN_ALSO ? ATTN_SPAN_ALSO : 0u) |
                                      (kv_turned(v->bounds.v_type) ? ATTN_TURN : 0u),
                             .ld_gate = s->ld_qkv,
                             .gate_stride = (uint)each,
                             .scale = a->scale,
                             .softcap = a->softcap};
    vulkan_attend(v, &args, vulkan_cache_format(v->bounds.k_type),
                  vulkan_cache_format(v->bounds.v_type));
}

static void gate(struct vulkan *v, const struct attention *a)
{
    const struct vulkan_scratch *s = &v->s;
    int width = a->n_heads * a->v_dim;
    if (a->wgate) {
        const struct gate_args args = {s->a,
                                       s->gate,
                                       (uint)width,
                                       (uint)v->rows,
                                       s->ld_heads,
                                       s->ld_gate,
                                       (uint)(width / a->wgate->n_out),
                                       a->softplus};
        vulkan_run(v, KERNEL_GATE, 0, 0, &args, sizeof args, vulkan_wide(width), args.rows, 1);
    }
    vulkan_norm(v, &a->out_norm, s->a, s->ld_heads, s->a, s->ld_heads, width, v->rows);
}

static void mix_attention(struct vulkan *v, const struct mixer *m, int layer)
{
    const struct attention *a = &m->attention;
    const struct vulkan_scratch *s = &v->s;
    const struct kv_layer *kv = &v->batch.kv[a->shares_kv ? a->kv_layer : layer];
    uint32_t rows = (uint32_t)v->rows;
    vulkan_angles(v);
    vulkan_read_block(v, &m->block);
    const struct product qkv = {.w = a->wqkv,
                                .x = s->n,
                                .y = s->qkv,
                                .ldx = s->ld_x,
                                .ldy = s->ld_qkv,
                                .rows = rows,
                                .x_div = 1};
    const int widths[] = {a->n_heads * a->k_dim, a->n_kv_heads * a->k_dim,
                          a->n_kv_heads * a->v_dim};
    if (a->clips)
        vulkan_clipped(v, &qkv, a->clips, widths, 3);
    else
        vulkan_product(v, &qkv);
    vulkan_index(v, &a->index, kv, s->n, s->ld_x, a->n_kv_heads);
    if (a->wgate)
        vulkan_product(v, &(struct product){.w = a->wgate,
                                            .x = s->n,
                                            .y = s->gate,
                                            .ldx = s->ld_x,
                                            .ldy = s->ld_gate,
                                            .rows = rows,
                                            .x_div = 1});
    project(v, a, kv);
    vulkan_stage(v, STAGE_ATTENTION);
    attend(v, a, kv);
    gate(v, a);
}

void vulkan_mixer(struct backend *be, const struct mixer *m, int layer)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    const struct weight *wo = mixer_out(m);
    uint64_t a = s->a;
    uint32_t lda = s->ld_heads;
    vulkan_stage(v, STAGE_QKV);
    vulkan_streams_predict(v, layer);
    if (m->kind == MIXER_ATTENTION)
        mix_attention(v, m, layer);
    else if (m->kind == MIXER_LATENT)
        lda = vulkan_mix_latent(v, m, layer);
    else if (wo)
        vulkan_mix_state(v, m, layer);
    vulkan_stage(v, STAGE_OUTPUT);
    if (batch_narrows(&v->batch, v->net, layer))
        vulkan_narrow(v, wo ? &a : NULL, lda, wo ? wo->n_in : 0);
    if (!wo)
        return;
    vulkan_laurel_begin(v, m);
    const struct product out = {.w = wo,
                                .x = a,
                                .y = s->y,
                                .ldx = lda,
                                .ldy = s->ld_x,
                                .rows = (uint32_t)v->rows,
                                .x_div = 1};
    if (m->kind == MIXER_ATTENTION && m->attention.clips)
        vulkan_clipped(v, &out, &m->attention.clips[3], &wo->n_out, 1);
    else
        vulkan_product(v, &out);
    if (v->parallel)
        vulkan_settle(v);
    if (v->parallel && !m->block.parallel)
        vulkan_norm(v, &(struct norm){0}, s->x, s->ld_x, s->before, s->ld_x, v->net->n_embd,
                    v->rows);
    vulkan_block_add(v, &m->block);
    vulkan_laurel_end(v, m);
}
