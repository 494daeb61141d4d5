/*
 * Image towers on the Vulkan backend: patches that become rows, rows that become features, and products of bounded inputs.
 * A merger is a chain of steps over two buffers. Joining adjacent rows is no work: they are adjacent in memory.
 */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"

bool vulkan_tower_supported(const struct network *net, struct error *err)
{
    for (int i = 0; i < net->n_mergers; i++) {
        const struct merger *m = &net->mergers[i];
        int y, width = net->n_embd;
        for (int k = 0; k < m->n_steps; k++) {
            merge_step_widths(&m->steps[k], width, &y, &width);
            if (m->steps[k].w &&
                (m->steps[k].w->n_in % 4 || y % 4)) /* rows begin at multiples of four */
                return network_refuse(err, -1, "an image tower's merger of such widths is",
                                      "vulkan");
        }
    }
    return true;
}

bool vulkan_tower_prepare(struct vulkan *v, struct error *err)
{
    const struct network *net = v->net;
    struct vulkan_scratch *s = &v->s;
    size_t tokens = (size_t)v->bounds.max_tokens, room = 0, features = 0;
    size_t in = s->ld_heads > s->ld_hidden ? s->ld_heads : s->ld_hidden;
    size_t out = s->ld_qkv > s->ld_hidden ? s->ld_qkv : s->ld_hidden;
    for (int i = 0; i < net->n_mergers; i++) {
        size_t n = merger_room(&net->mergers[i], net->n_embd, v->bounds.max_tokens);
        size_t rows = tokens / (size_t)merger_rows(&net->mergers[i]);
        room = n > room ? n : room;
        features = rows > features ? rows : features;
    }
    size_t patch = net->embed.patches ? vulkan_ld(net->embed.patches->n_in) : 0;
    out = s->ld_x > out ? s->ld_x : out;
    if (patch && !vulkan_own(v, &s->patches, tokens * patch * sizeof(float), err))
        return false;
    if (net->clips && (!vulkan_own(v, &s->clip_in, tokens * in * sizeof(float), err) ||
                       !vulkan_own(v, &s->clip_out, tokens * out * sizeof(float), err)))
        return false;
    return !net->n_mergers ||
           (vulkan_own(v, &s->merged[0], room * sizeof(float), err) &&
            vulkan_own(v, &s->merged[1], room * sizeof(float), err) &&
            vulkan_own(v, &s->features,
                       features * (size_t)network_feature_width(net) * sizeof(float), err));
}

void vulkan_patches(struct vulkan *v, const struct embed *e)
{
    const struct vulkan_scratch *s = &v->s;
    int D = e->patches->n_in, E = v->net->n_embd;
    uint32_t rows = (uint32_t)v->batch.n_tokens, width = (uint32_t)network_embed_width(v->net);
    const struct patch_args args = {.step = s->step,
                                    .embeds = s->embeds,
                                    .patches = s->patches,
                                    .x = s->x,
                                    .rows = rows,
                                    .width = (uint)D,
                                    .embed_width = width,
                                    .ldp = vulkan_ld(D),
                                    .ldx = s->ld_x,
                                    .n_vocab = v->net->n_vocab};
    vulkan_run(v, KERNEL_PATCH, 0, 0, &args, sizeof args, vulkan_wide((int)width), rows, 1);
    vulkan_product(v, &(struct product){.w = e->patches,
                                        .x = s->patches,
                                        .y = s->y,
                                        .ldx = vulkan_ld(D),
                                        .ldy = s->ld_x,
                                        .rows = rows,
                                        .x_div = 1});
    vulkan_norm(v, &e->patch_norm, s->y, s->ld_x, s->y, s->ld_x, E, (int)rows);
    vulkan_scale(v, &(struct scale_args){.x = s->x,
                                         .y = s->y,
                                         .width = (uint)E,
                                         .rows = rows,
                                         .ldx = s->ld_x,
                                         .ldy = s->ld_x,
                                         .scale = 1});
}

static void clip(struct vulkan *v, const struct clip_args *args)
{
    vulkan_run(v, KERNEL_CLIP, 0, 0, args, sizeof *args, vulkan_wide((int)args->width), args->rows,
               1);
}

void vulkan_clipped(struct vulkan *v, const struct product *p, const struct clip *clips,
                    const int *widths, int n)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t ld_in = vulkan_ld(p->w->n_in), ld_out = vulkan_ld(p->w->n_out);
    struct product bounded = *p;
    bounded.x = s->clip_in;
    bounded.ldx = ld_in;
    bounded.y = s->clip_out;
    bounded.ldy = ld_out;
    for (int k = 0, at = 0; k < n; at += widths[k++]) {
        const struct clip *c = &clips[k];
        if (!k || c->in_min != clips[k - 1].in_min || c->in_max != clips[k - 1].in_max) {
            clip(v, &(struct clip_args){p->x, s->clip_in, p->rows, (uint)p->w->n_in, p->ldx, ld_in,
                                        c->in_min, c->in_max});
            vulkan_product(v, &bounded);
        }
        clip(v,
             &(struct clip_args){s->clip_out + 4 * (uint64_t)at, p->y + 4 * (uint64_t)at, p->rows,
                                 (uint)widths[k], ld_out, p->ldy, c->out_min, c->out_max});
    }
}

/* A chain's state: `rows` rows of `width` values in buffer `at`, `ld` apart. */
struct chain {
    int at, rows, width;
    uint32_t ld;
};

/* The rows of the stream that become features, in buffer 0: all but the rest of each sequence. */
static void take_rows(struct vulkan *v, struct chain *c, int each)
{
    const struct vulkan_scratch *s = &v->s;
    const struct batch *b = &v->batch;
    c->width = v->net->n_embd;
    c->ld = (uint32_t)c->width;
    vulkan_apart(v, true);
    for (int i = 0; i < b->n_seqs; i++) {
        int n = (b->q_start[i + 1] - b->q_start[i]) / each * each;
        if (n)
            vulkan_copy_rows(v, s->x + 4 * (uint64_t)b->q_start[i] * s->ld_x, s->ld_x,
                             s->merged[0] + 4 * (uint64_t)c->rows * c->ld, c->ld, c->width, n);
        c->rows += n;
    }
    vulkan_apart(v, false);
}

static void merge_step(struct vulkan *v, const struct merge_step *m, struct chain *c)
{
    const uint64_t *to = v->s.merged;
    int y, z, each = m->rows > 1 ? m->rows : 1;
    merge_step_widths(m, c->width, &y, &z);
    vulkan_norm(v, &m->norm, to[c->at], c->ld, to[c->at], c->ld, c->width, c->rows);
    c->rows /= each;
    if (each > 1 && (m->mean || m->interleaved)) {
        const struct join_args args = {to[c->at],  to[1 - c->at],  (uint)c->rows,
                                       (uint)each, (uint)c->width, m->mean};
        vulkan_run(v, KERNEL_JOIN, 0, 0, &args, sizeof args, vulkan_wide(y), args.rows, 1);
        c->at = 1 - c->at;
    }
    c->ld = (uint32_t)y;
    vulkan_norm(v, &m->joined, to[c->at], c->ld, to[c->at], c->ld, y, c->rows);
    int wide = activation_is_gated(m->act) ? y / 2 : y;
    vulkan_activate(v, &(struct ffn){.act = m->act}, to[c->at], c->ld, wide, c->rows);
    if (m->w)
        vulkan_product(v, &(struct product){.w = m->w,
                                            .x = to[c->at],
                                            .y = to[1 - c->at],
                                            .ldx = c->ld,
                                            .ldy = (uint32_t)z,
                                            .rows = (uint32_t)c->rows,
                                            .x_div = 1});
    else if (wide != y) /* the next step joins adjacent rows */
        vulkan_copy_rows(v, to[c->at], c->ld, to[1 - c->at], (uint32_t)z, z, c->rows);
    if (m->w || wide != y)
        c->at = 1 - c->at;
    c->width = z;
    c->ld = (uint32_t)z;
}

static void merge(struct backend *be, const struct merger *m, int i)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    struct chain c = {0};
    (void)i;
    if (!v->rows)
        return;
    vulkan_settle(v);
    vulkan_stage(v, STAGE_HEAD);
    take_rows(v, &c, merger_rows(m));
    for (int k = 0; c.rows && k < m->n_steps; k++)
        merge_step(v, &m->steps[k], &c);
    if (c.rows)
        vulkan_copy_rows(v, s->merged[c.at], c.ld, s->features + 4 * (uint64_t)m->at,
                         (uint32_t)network_feature_width(v->net), c.width, c.rows);
}

static void features(struct backend *be, int rows, float *host)
{
    const struct vulkan *v = vulkan_self(be);
    vulkan_copy_out(be, host, (void *)(uintptr_t)v->s.features,
                    (size_t)rows * (size_t)network_feature_width(v->net) * sizeof(float));
}

const struct tower_ops vulkan_tower = {.merge = merge, .features = features};
