/*
 * Latent attention on the Vulkan backend, absorbed: queries are taken into the space of latents, so that a row attends
 * over the cached latents as over one kv head, and the sums of latents are taken to values.
 */
#include "backend/vulkan/vulkan.h"

bool vulkan_latent_supported(const struct latent *l, int i, struct error *err)
{
    int D = l->nope_dim + l->rope_dim, W = l->kv_rank + l->rope_dim;
    if (D % 4 || l->kv_rank % 4 || W % 2 || l->n_heads * l->v_dim % 4 || W > 1024)
        return error_set(err,
                         "layer %d: latent attention of %d + %d and %d values is not supported on "
                         "vulkan",
                         i, l->nope_dim, l->rope_dim, l->kv_rank);
    return true;
}

/* Queries of all heads to scratch.q, densely, with their last part rotated. */
static void queries(struct vulkan *v, const struct latent *l)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t D = (uint32_t)(l->nope_dim + l->rope_dim), H = (uint32_t)l->n_heads;
    uint32_t ld_low = vulkan_ld(l->q_rank), rows = (uint32_t)v->rows;
    struct product p = {
        .w = l->wqb, .x = s->n, .y = s->q, .ldx = s->ld_x, .ldy = H * D, .rows = rows};
    p.x_div = 1;
    if (l->wqa) {
        struct product low = p;
        low.w = l->wqa;
        low.y = s->qkv;
        low.ldy = ld_low;
        vulkan_product(v, &low);
        vulkan_norm(v, &l->q_norm, s->qkv, ld_low, s->qkv, ld_low, l->q_rank, v->rows);
        p.x = s->qkv;
        p.ldx = ld_low;
    }
    vulkan_product(v, &p);
    const struct heads_args args = {.step = v->s.step,
                                    .in_rows = s->q,
                                    .to = s->q,
                                    .rope = s->ropes[l->rope - v->net->ropes],
                                    .rows = rows,
                                    .n_heads = H,
                                    .dim = D,
                                    .ld_in = H * D,
                                    .stride = D,
                                    .ld_to = H * D,
                                    .page_len = (uint)v->bounds.page_len,
                                    .half_rot = (uint)l->rope_dim / 2,
                                    .flags = l->interleaved ? HEADS_INTERLEAVED : 0u,
                                    .temp_beta = l->temp_beta,
                                    .temp_len = l->temp_len,
                                    .norm_dim = D,
                                    .rope_at = (uint)l->nope_dim};
    vulkan_run(v, KERNEL_HEADS, 0, 0, &args, sizeof args, H, rows, 1);
}

/* The row's latent and rotated part to the cache. */
static void store(struct vulkan *v, const struct latent *l, const struct kv_layer *kv)
{
    const struct vulkan_scratch *s = &v->s;
    vulkan_product(v, &(struct product){.w = l->wkva,
                                        .x = s->n,
                                        .y = s->qkv,
                                        .ldx = s->ld_x,
                                        .ldy = s->ld_qkv,
                                        .rows = (uint32_t)v->rows,
                                        .x_div = 1});
    const struct heads_args args = {.step = v->s.step,
                                    .in_rows = s->qkv,
                                    .to = vulkan_address(kv->k),
                                    .rope = s->ropes[l->rope - v->net->ropes],
                                    .gain = vulkan_address(l->kv_norm.gain),
                                    .bias = vulkan_address(l->kv_norm.bias),
                                    .rows = (uint)v->rows,
                                    .n_heads = 1,
                                    .dim = (uint)(l->kv_rank + l->rope_dim),
                                    .ld_in = s->ld_qkv,
                                    .page_len = (uint)v->bounds.page_len,
                                    .kind = (uint)l->kv_norm.kind,
                                    .half_rot = (uint)l->rope_dim / 2,
                                    .flags = l->interleaved ? HEADS_INTERLEAVED : 0u,
                                    .store = vulkan_cache_format(v->bounds.k_type) + 1,
                                    .eps = l->kv_norm.eps,
                                    .norm_dim = (uint)l->kv_rank,
                                    .rope_at = (uint)l->kv_rank};
    vulkan_run(v, KERNEL_HEADS, 0, 0, &args, sizeof args, 1, args.rows, 1);
}

static void attend(struct vulkan *v, const struct latent *l, const struct kv_layer *kv)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t D = (uint32_t)(l->nope_dim + l->rope_dim), H = (uint32_t)l->n_heads;
    uint32_t C = (uint32_t)l->kv_rank, W = C + (uint32_t)l->rope_dim, rows = (uint32_t)v->rows * H;
    uint32_t format = vulkan_cache_format(v->bounds.k_type);
    vulkan_product(v, &(struct product){.w = l->wkb,
                                        .x = s->q,
                                        .y = s->absorbed,
                                        .ldx = D,
                                        .ldy = W,
                                        .rows = rows,
                                        .x_div = 1,
                                        .cycle = H});
    const struct gather_args rotated = {s->q + 4 * (uint64_t)l->nope_dim,
                                        s->absorbed + 4 * (uint64_t)C,
                                        v->s.step,
                                        (uint)l->rope_dim,
                                        rows,
                                        D,
                                        W,
                                        0};
    vulkan_run(v, KERNEL_GATHER, 0, 0, &rotated, sizeof rotated, vulkan_wide(l->rope_dim), rows, 1);
    struct attn_args args = {.step = v->s.step,
                             .q = s->absorbed,
                             .k = vulkan_address(kv->k),
                             .v = vulkan_address(kv->k),
                             .a = s->summed,
                             .n_heads = H,
                             .n_kv_heads = 1,
                             .k_dim = W,
                             .v_dim = C,
                             .page_len = (uint)v->bounds.page_len,
                             .ldq = H * W,
                             .lda = H * C,
                             .flags = ATTN_LATENT | (l->index.n_chosen ? ATTN_CHOSEN : 0u),
                             .scale = l->scale};
    vulkan_attend(v, &args, format, format);
    vulkan_product(v, &(struct product){.w = l->wvb,
                                        .x = s->summed,
                                        .y = s->a,
                                        .ldx = C,
                                        .ldy = (uint32_t)l->v_dim,
                                        .rows = rows,
                                        .x_div = 1,
                                        .cycle = H});
}

uint32_t vulkan_mix_latent(struct vulkan *v, const struct mixer *m, int layer)
{
    const struct latent *l = &m->latent;
    const struct vulkan_scratch *s = &v->s;
    const struct kv_layer *kv = &v->batch.kv[layer];
    vulkan_angles(v);
    vulkan_read_block(v, &m->block);
    queries(v, l);
    if (l->wqa)
        vulkan_index(v, &l->index, kv, s->qkv, vulkan_ld(l->q_rank), 1);
    else
        vulkan_index(v, &l->index, kv, s->n, s->ld_x, 1);
    store(v, l, kv);
    attend(v, l, kv);
    return (uint32_t)(l->n_heads * l->v_dim);
}
