/* The ends of the network on the Vulkan backend: embeddings, norms and sums of the stream, the head. */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"

_Static_assert(NORM_NONE == KIND_NONE && NORM_RMS == KIND_RMS && NORM_LAYER == KIND_LAYER &&
                   NORM_AFFINE == KIND_AFFINE,
               "the kernels' kinds of norms");

static float or_one(float scale)
{
    return scale == 0 ? 1.0f : scale;
}

int vulkan_logits_width(const struct vulkan *v)
{
    const struct head *h = &v->net->head;
    return h->w ? h->w->n_out : v->net->n_embd;
}

uint32_t vulkan_wide(int width)
{
    return ((uint32_t)width + 127) / 128;
}

void vulkan_norm(struct vulkan *v, const struct norm *n, uint64_t x, uint32_t ldx, uint64_t y,
                 uint32_t ldy, int width, int rows)
{
    if (n->kind == NORM_NONE && x == y)
        return;
    const struct norm_args args = {x,
                                   y,
                                   vulkan_address(n->gain),
                                   vulkan_address(n->bias),
                                   (uint)n->kind,
                                   (uint)width,
                                   (uint)rows,
                                   ldx,
                                   ldy,
                                   n->eps};
    vulkan_run_flat(v, KERNEL_NORM, 0, 0, &args, sizeof args, (uint32_t)rows);
}

void vulkan_block_add(struct vulkan *v, const struct block *b)
{
    vulkan_settle(v);
    v->pending = b;
}

/* Units of 16 values that an invocation of add_bytes.comp holds. */
enum { HELD = 4 };

/* Adds the block that is not added yet. n: receives norm(x); 0 = nothing does. */
static void add_pending(struct vulkan *v, const struct norm *norm, uint64_t n, uint32_t ldn)
{
    const struct vulkan_scratch *s = &v->s;
    const struct block *b = v->pending;
    if (b->keep != 0) {
        vulkan_norm(v, &b->in, s->x, s->ld_x, s->x, s->ld_x, v->net->n_embd, v->rows);
        vulkan_scale(v, &(struct scale_args){.x = s->x,
                                             .width = (uint)v->net->n_embd,
                                             .rows = (uint)v->rows,
                                             .ldx = s->ld_x,
                                             .scale = b->keep});
    }
    struct add_args args = {.x = s->x,
                            .y = s->y,
                            .out_gain = vulkan_address(b->out.gain),
                            .out_bias = vulkan_address(b->out.bias),
                            .sum_gain = vulkan_address(b->sum.gain),
                            .sum_bias = vulkan_address(b->sum.bias),
                            .n = n,
                            .in_gain = vulkan_address(norm->gain),
                            .in_bias = vulkan_address(norm->bias),
                            .width = (uint)v->net->n_embd,
                            .rows = (uint)v->rows,
                            .ldx = s->ld_x,
                            .ldy = s->ld_x,
                            .out_kind = (uint)b->out.kind,
                            .sum_kind = (uint)b->sum.kind,
                            .out_eps = b->out.eps,
                            .sum_eps = b->sum.eps,
                            .scale = or_one(b->scale),
                            .in_eps = norm->eps,
                            .in_kind = (uint)norm->kind,
                            .ldn = ldn};
    v->pending = NULL;
    if (args.width % 16 || args.width > HELD * 16 * v->wide) {
        vulkan_run_flat(v, KERNEL_ADD, 0, 0, &args, sizeof args, (uint32_t)v->rows);
        return;
    }
    args.bytes = n ? vulkan_bytes(v, v->rows, v->net->n_embd) : 0;
    vulkan_run_flat(v, KERNEL_ADD_BYTES, 0, 0, &args, sizeof args, (uint32_t)v->rows);
    if (n)
        vulkan_has_bytes(v, n, args.bytes);
}

void vulkan_settle(struct vulkan *v)
{
    if (v->pending)
        add_pending(v, &(struct norm){0}, 0, 0);
}

void vulkan_read(struct vulkan *v, const struct norm *norm, uint64_t n, uint32_t ldn)
{
    if (v->pending)
        add_pending(v, norm, n, ldn);
    else
        vulkan_norm(v, norm, v->s.x, v->s.ld_x, n, ldn, v->net->n_embd, v->rows);
}

void vulkan_read_block(struct vulkan *v, const struct block *b)
{
    const struct vulkan_scratch *s = &v->s;
    if (b->parallel) {
        vulkan_settle(v);
        vulkan_norm(v, &b->in, s->before, s->ld_x, s->n, s->ld_x, v->net->n_embd, v->rows);
    } else {
        vulkan_read(v, &b->in, s->n, s->ld_x);
    }
}

void vulkan_scale(struct vulkan *v, const struct scale_args *a)
{
    vulkan_run(v, KERNEL_SCALE, 0, 0, a, sizeof *a, vulkan_wide((int)a->width), a->rows, 1);
}

void vulkan_copy_rows(struct vulkan *v, uint64_t from, uint32_t ld_from, uint64_t to,
                      uint32_t ld_to, int width, int rows)
{
    const struct gather_args args = {from,       to,      v->s.step, (uint)width,
                                     (uint)rows, ld_from, ld_to,     0};
    vulkan_run(v, KERNEL_GATHER, 0, 0, &args, sizeof args, vulkan_wide(width), args.rows, 1);
}

/* to = the output rows of from, or all n_out rows of it in their order */
static void gather(struct vulkan *v, uint64_t from, uint64_t to, uint32_t ld, int width, bool index)
{
    const struct gather_args args = {
        from, to, v->s.step, (uint)width, (uint)v->batch.n_out, ld, ld, index ? STEP_OUT_ROWS : 0};
    vulkan_run(v, KERNEL_GATHER, 0, 0, &args, sizeof args, vulkan_wide(width), args.rows, 1);
}

void vulkan_narrow(struct vulkan *v, uint64_t *a, uint32_t lda, int width)
{
    const struct vulkan_scratch *s = &v->s;
    if (v->narrow)
        return;
    vulkan_settle(v);
    v->narrow = true;
    v->rows = v->batch.n_out;
    if (v->batch.n_out == v->batch.n_tokens)
        return; /* out_rows ascends, so it has all rows */
    uint64_t lists[3 + STREAMS_MAX] = {s->x, v->parallel ? s->before : 0, v->late ? s->late : 0};
    int n = 3;
    for (int j = 0; j < v->net->streams.n; j++)
        lists[n++] = vulkan_part(v, j);
    for (int i = 0; i < n; i++) { /* the stream stays where it is */
        if (!lists[i])
            continue;
        gather(v, lists[i], s->narrow, s->ld_x, v->net->n_embd, true);
        gather(v, s->narrow, lists[i], s->ld_x, v->net->n_embd, false);
    }
    if (a) {
        gather(v, *a, s->narrow, lda, width, true);
        *a = s->narrow;
    }
}

/* a: what is not of the table's rows */
static void lookup_rows(struct vulkan *v, const struct weight *table, const struct embed_args *a)
{
    const struct vulkan_weight *m = vulkan_matrix(table);
    for (int i = 0; i < m->n_seg; i++) {
        const struct vulkan_segment *g = &m->seg[i];
        const struct embed_args args = {.w = g->at,
                                        .x = a->x,
                                        .perm = g->perm,
                                        .grid = v->grid,
                                        .step = v->s.step,
                                        .embeds = v->s.embeds,
                                        .chosen = v->s.tokens,
                                        .n_in = (uint)table->n_in,
                                        .row_words = g->row_words,
                                        .tail = g->tail,
                                        .rows = (uint)v->batch.n_tokens,
                                        .ldx = a->ldx,
                                        .group_len = g->group_len,
                                        .index = a->index,
                                        .n_table = g->rows,
                                        .first = (int)g->first + a->first,
                                        .n_vocab = v->net->n_vocab,
                                        .offset = a->offset,
                                        .add = a->add || i > 0, /* rows of other segments stay */
                                        .scale = a->scale,
                                        .embed_width = (uint)network_embed_width(v->net),
                                        .pad = a->pad};
        vulkan_run_flat(v, KERNEL_EMBED, g->format, 0, &args, sizeof args, args.rows);
    }
}

static void lookup(struct vulkan *v, const struct embed *e, const struct weight *table, uint index,
                   int offset, float scale, bool add)
{
    lookup_rows(v, table,
                &(struct embed_args){.x = v->s.x,
                                     .ldx = v->s.ld_x,
                                     .index = index,
                                     .first = index == STEP_TOKENS ? e->first : 0,
                                     .offset = offset,
                                     .add = add,
                                     .scale = scale,
                                     .pad = -1});
}

void vulkan_lookup_layers(struct vulkan *v, const struct embed_layers *e, uint64_t to, uint32_t ld)
{
    lookup_rows(v, e->table,
                &(struct embed_args){.x = to,
                                     .ldx = ld,
                                     .index = STEP_TOKENS,
                                     .add = true,
                                     .scale = e->table_scale,
                                     .pad = e->pad});
}

/* cos and sin of all rows, for every RoPE table. */
static void angles(struct vulkan *v)
{
    vulkan_apart(v, true);
    for (int i = 0; i < v->net->n_ropes; i++) {
        const struct rope *r = &v->net->ropes[i];
        const struct rope_args args = {v->s.step,     v->s.freqs[i],           v->s.planes[i],
                                       v->s.ropes[i], (uint)v->batch.n_tokens, (uint)(r->n_rot / 2),
                                       r->mscale};
        uint32_t n = vulkan_wide(v->batch.n_tokens * (r->n_rot / 2));
        vulkan_run(v, KERNEL_ROPE, 0, 0, &args, sizeof args, n < 1024 ? n : 1024, 1, 1);
    }
    vulkan_apart(v, false);
}

void vulkan_embed(struct backend *be, const struct embed *e)
{
    struct vulkan *v = vulkan_self(be);
    v->rows = v->batch.n_tokens;
    v->narrow = false;
    v->angles = v->late = false;
    v->pending = NULL;
    vulkan_stage(v, STAGE_EMBED);
    if (e->patches)
        vulkan_patches(v, e);
    else
        lookup(v, e, e->tokens, STEP_TOKENS, 0, or_one(e->scale), false);
    if (e->positions)
        lookup(v, e, e->positions, STEP_POS, e->pos_offset, 1, true);
    if (e->types)
        lookup(v, e, e->types, STEP_TYPES, 0, 1, true);
    vulkan_norm(v, &e->norm, v->s.x, v->s.ld_x, v->s.x, v->s.ld_x, v->net->n_embd, v->rows);
    vulkan_layer_embeds(v, &e->layers);
    vulkan_streams_begin(v);
}

void vulkan_angles(struct vulkan *v)
{
    if (!v->angles)
        angles(v);
    v->angles = true;
}

void vulkan_head(struct backend *be, const struct head *h)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    uint32_t width = (uint32_t)vulkan_logits_width(v);
    vulkan_stage(v, STAGE_HEAD);
    vulkan_narrow(v, NULL, 0, 0);
    if (v->net->streams.n)
        vulkan_streams_end(v);
    vulkan_read(v, &h->norm, h->w ? s->n : s->logits, h->w ? s->ld_x : width);
    if (h->w)
        vulkan_product(v, &(struct product){.w = h->w,
                                            .x = s->n,
                                            .y = s->logits,
                                            .ldx = s->ld_x,
                                            .ldy = width,
                                            .rows = (uint32_t)v->rows,
                                            .x_div = 1});
    if ((h->scale != 0 && h->scale != 1) || h->softcap != 0)
        vulkan_scale(v, &(struct scale_args){.x = s->logits,
                                             .width = width,
                                             .rows = (uint)v->rows,
                                             .ldx = width,
                                             .scale = or_one(h->scale),
                                             .softcap = h->softcap});
}

static void vulkan_keep(struct backend *be, const struct norm *norm)
{
    struct vulkan *v = vulkan_self(be);
    if (v->rows)
        vulkan_read(v, norm, v->s.kept, v->s.ld_x);
}

static void vulkan_join(struct backend *be, const struct mtp *m)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    const struct embed *e = &v->net->embed;
    int E = v->net->n_embd;
    uint32_t ld = vulkan_ld(2 * E), rows = (uint32_t)v->batch.n_tokens;
    uint64_t hidden = s->joined + 4 * (uint64_t)E;
    v->rows = v->batch.n_tokens;
    v->narrow = v->angles = false;
    v->pending = NULL;
    vulkan_stage(v, STAGE_EMBED);
    lookup(v, e, e->tokens, STEP_TOKENS, 0, or_one(e->scale), false);
    const struct gather_args kept = {s->kept, hidden,  s->step, (uint)E,
                                     rows,    s->ld_x, ld,      STEP_FROM};
    vulkan_run(v, KERNEL_GATHER, 0, 0, &kept, sizeof kept, vulkan_wide(E), rows, 1);
    vulkan_norm(v, &m->embed_norm, s->x, s->ld_x, s->joined, ld, E, v->rows);
    vulkan_norm(v, &m->hidden_norm, hidden, ld, hidden, ld, E, v->rows);
    vulkan_product(v, &(struct product){.w = m->fc,
                                        .x = s->joined,
                                        .y = s->x,
                                        .ldx = ld,
                                        .ldy = s->ld_x,
                                        .rows = rows,
                                        .x_div = 1});
}

const struct draft_ops vulkan_draft = {.keep = vulkan_keep, .join = vulkan_join};
