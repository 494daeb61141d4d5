/* Mlps on the Vulkan backend: dense, routed, and both. Routing stays on the device. */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"

static float or_one(float scale)
{
    return scale == 0 ? 1.0f : scale;
}

/* The kernels' number of an activation. */
static uint activation(enum activation act)
{
    switch (act) {
    case ACT_SILU:
        return KERNEL_ACT_SILU;
    case ACT_GELU_TANH:
        return KERNEL_ACT_GELU_TANH;
    case ACT_GELU:
        return KERNEL_ACT_GELU;
    case ACT_SWIGLU_CLAMP:
        return KERNEL_ACT_SWIGLU_CLAMP;
    case ACT_SILU_CLAMP:
        return KERNEL_ACT_SILU_CLAMP;
    case ACT_SILU_LIMIT:
        return KERNEL_ACT_SILU_LIMIT;
    case ACT_RELU2:
        return KERNEL_ACT_RELU2;
    case ACT_PLAIN_RELU2:
        return KERNEL_ACT_PLAIN_RELU2;
    case ACT_PLAIN_XIELU:
        return KERNEL_ACT_PLAIN_XIELU;
    case ACT_PLAIN_GELU:
        return KERNEL_ACT_PLAIN_GELU;
    case ACT_PLAIN_GELU_TANH:
        return KERNEL_ACT_PLAIN_GELU_TANH;
    case ACT_PLAIN_QUICK_GELU:
        return KERNEL_ACT_PLAIN_QUICK_GELU;
    case ACT_NONE:
        break;
    }
    CHECK(false, "activation %d", (int)act);
}

static uint router_kind(enum router_kind kind)
{
    switch (kind) {
    case ROUTER_SOFTMAX:
        return ROUTE_SOFTMAX;
    case ROUTER_SIGMOID:
        return ROUTE_SIGMOID;
    case ROUTER_SOFTMAX_TOP:
        return ROUTE_SOFTMAX_TOP;
    case ROUTER_SPARSE_MIXER:
        return ROUTE_SPARSE_MIXER;
    case ROUTER_SOFTPLUS:
        return ROUTE_SOFTPLUS;
    }
    CHECK(false, "router %d", (int)kind);
}

void vulkan_activate(struct vulkan *v, const struct ffn *f, uint64_t h, uint32_t ld, int width,
                     int rows)
{
    if (f->act == ACT_NONE)
        return;
    const struct act_args args = {h,      vulkan_bytes(v, rows, width), (uint)width, (uint)rows,
                                  ld,     activation(f->act),           f->alpha,    f->limit,
                                  f->beta};
    uint32_t across = args.bytes ? vulkan_wide(width / 16) : vulkan_wide(width);
    vulkan_run(v, KERNEL_ACT, 0, 0, &args, sizeof args, across, args.rows, 1);
    vulkan_has_bytes(v, h, args.bytes);
}

/* hidden = mid(act(hidden)) */
static void activate(struct vulkan *v, const struct ffn *f, int rows, uint32_t ld)
{
    int width = f->down->n_in;
    vulkan_activate(v, f, v->s.hidden, ld, width, rows);
    vulkan_norm(v, &f->mid, v->s.hidden, ld, v->s.hidden, ld, width, rows);
}

/* A product of an mlp, bounded if the mlp has bounds. */
static void bounded(struct vulkan *v, const struct product *p, const struct clip *clips, int width)
{
    const int widths[] = {width, width};
    if (clips)
        vulkan_clipped(v, p, clips, widths, p->w->n_out / width);
    else
        vulkan_product(v, p);
}

/* hidden = mid(act(product)) */
static void product_and_act(struct vulkan *v, const struct product *p, const struct ffn *f,
                            int rows)
{
    int width = f->down->n_in;
    if (!f->clips && !f->sparse && f->act != ACT_NONE &&
        vulkan_product_act(v, p, f, activation(f->act))) {
        vulkan_norm(v, &f->mid, p->y, p->ldy, p->y, p->ldy, width, rows);
        return;
    }
    bounded(v, p, f->clips, width);
    vulkan_keep_top(v, f, p->y, p->ldy, rows);
    activate(v, f, rows, p->ldy);
}

/* scratch.y = dense_out(sigmoid(gate) * dense(n)) */
static void dense(struct vulkan *v, const struct mlp *m)
{
    const struct vulkan_scratch *s = &v->s;
    struct product p = {.w = m->dense.gate_up,
                        .x = s->n,
                        .y = s->hidden,
                        .ldx = s->ld_x,
                        .ldy = s->ld_hidden,
                        .rows = (uint32_t)v->rows,
                        .x_div = 1};
    product_and_act(v, &p, &m->dense, v->rows);
    p.w = m->dense.down;
    p.x = s->hidden;
    p.ldx = s->ld_hidden;
    p.y = s->y;
    p.ldy = s->ld_x;
    bounded(v, &p, m->dense.clips ? m->dense.clips + 2 : NULL, m->dense.down->n_out);
    if (m->dense_gate) {
        p.w = m->dense_gate;
        p.x = s->n;
        p.ldx = s->ld_x;
        p.y = s->weights; /* one value per row; the router has not run yet */
        p.ldy = 1;
        vulkan_product(v, &p);
        vulkan_scale(v, &(struct scale_args){.x = s->y,
                                             .gate = s->weights,
                                             .width = (uint)v->net->n_embd,
                                             .rows = (uint)v->rows,
                                             .ldx = s->ld_x,
                                             .scale = 1});
    }
    vulkan_norm(v, &m->dense_out, s->y, s->ld_x, s->y, s->ld_x, v->net->n_embd, v->rows);
}

/* Chooses the experts of all rows. x: the rows that the router reads. */
static void route(struct vulkan *v, const struct router *r, uint64_t x)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t ld = vulkan_ld(r->w->n_out);
    vulkan_product(v, &(struct product){.w = r->w,
                                        .x = x,
                                        .y = s->router,
                                        .ldx = s->ld_x,
                                        .ldy = ld,
                                        .rows = (uint32_t)v->rows,
                                        .x_div = 1});
    const struct route_args args = {s->router,
                                    s->chosen,
                                    s->weights,
                                    vulkan_address(r->choice_bias),
                                    vulkan_address(r->expert_scale),
                                    s->step,
                                    vulkan_address(r->by_token),
                                    s->tokens,
                                    (uint)r->w->n_out,
                                    (uint)v->rows,
                                    ld,
                                    (uint)r->n_used,
                                    router_kind(r->kind),
                                    (uint)r->n_groups,
                                    (uint)r->n_groups_used,
                                    r->renorm,
                                    or_one(r->scale),
                                    r->jitter,
                                    v->net->n_vocab,
                                    v->narrow && v->batch.n_out != v->batch.n_tokens};
    v->grouped = 0;
    vulkan_run_flat(v, KERNEL_ROUTE, 0, 0, &args, sizeof args, (uint32_t)v->rows);
}

/* What experts read and write: rows of E values, or of L for latent experts. */
struct expert_rows {
    uint64_t in, sum;
    uint32_t width, ld, used;
};

/* r->sum = the weighted sum of the experts' outputs */
static void combine(struct vulkan *v, const struct mlp *m, const struct product *p,
                    const struct expert_rows *r)
{
    const struct vulkan_scratch *s = &v->s;
    vulkan_product(v, p);
    const struct combine_args args = {s->part,
                                      s->chosen,
                                      s->weights,
                                      r->sum,
                                      r->in,
                                      r->width,
                                      (uint)v->rows,
                                      r->used,
                                      r->ld,
                                      r->ld,
                                      (uint)m->experts.gate_up->n_expert,
                                      (uint)m->expert_first,
                                      !m->router.weighs_input,
                                      (uint)router_experts(&m->router),
                                      r->ld};
    vulkan_run(v, KERNEL_COMBINE, 0, 0, &args, sizeof args, vulkan_wide((int)r->width), args.rows,
               1);
}

/* r->sum = the chosen experts' weighted sum */
static void chosen_experts(struct vulkan *v, const struct mlp *m, const struct expert_rows *r)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t rows = (uint32_t)v->rows * r->used;
    struct product p = {.w = m->experts.gate_up,
                        .x = r->in,
                        .y = s->hidden,
                        .chosen = s->chosen,
                        .ldx = r->ld,
                        .ldy = s->ld_expert,
                        .rows = rows,
                        .x_div = r->used,
                        .expert_first = (uint32_t)m->expert_first};
    if (m->router.weighs_input) {
        const struct spread_args spread = {r->in, s->weights, s->part, r->width,
                                           rows,  r->used,    r->ld};
        vulkan_run(v, KERNEL_SPREAD, 0, 0, &spread, sizeof spread, vulkan_wide((int)r->width), rows,
                   1);
        p.x = s->part;
        p.x_div = 1;
    }
    product_and_act(v, &p, &m->experts, (int)rows);
    p.w = m->experts.down;
    p.x = s->hidden;
    p.ldx = s->ld_expert;
    p.y = s->part;
    p.ldy = r->ld;
    p.x_div = 1;
    if (m->router.weighs_input || m->router.n_same ||
        !vulkan_product_combined(v, &p, r->used, r->sum))
        combine(v, m, &p, r);
}

/* A product between the stream's width and that of latent experts. */
static void project(struct vulkan *v, const struct weight *w, uint64_t x, uint32_t ldx, uint64_t y,
                    uint32_t ldy)
{
    vulkan_product(
        v,
        &(struct product){
            .w = w, .x = x, .y = y, .ldx = ldx, .ldy = ldy, .rows = (uint32_t)v->rows, .x_div = 1});
}

/* to = experts_out(the weighted sum of the chosen experts) */
static void experts(struct vulkan *v, const struct mlp *m, uint64_t to)
{
    const struct vulkan_scratch *s = &v->s;
    uint64_t in = s->n;
    struct expert_rows r = {s->n, to, (uint32_t)v->net->n_embd, s->ld_x,
                            (uint32_t)m->router.n_used};
    if (m->router.norm.kind) {
        in = to;
        vulkan_norm(v, &m->router.norm, s->x, s->ld_x, in, s->ld_x, v->net->n_embd, v->rows);
    }
    if (m->experts_in.kind)
        vulkan_norm(v, &m->experts_in, s->x, s->ld_x, s->n, s->ld_x, v->net->n_embd, v->rows);
    vulkan_stage(v, STAGE_ROUTER);
    route(v, &m->router, in);
    vulkan_stage(v, STAGE_EXPERTS);
    if (m->to_experts) {
        r = (struct expert_rows){s->to_experts, s->from_experts, (uint32_t)m->to_experts->n_out,
                                 s->ld_latent, r.used};
        project(v, m->to_experts, s->n, s->ld_x, r.in, r.ld);
    }
    chosen_experts(v, m, &r);
    if (m->to_experts)
        project(v, m->from_experts, r.sum, r.ld, to, s->ld_x);
    vulkan_norm(v, &m->experts_out, to, s->ld_x, to, s->ld_x, v->net->n_embd, v->rows);
}

/* The end of the mlp's block: the stream's layer scale, late experts of the layer before, features of inner layers. */
static void close_block(struct vulkan *v, const struct mlp *m, int layer, bool late)
{
    const struct vulkan_scratch *s = &v->s;
    int E = v->net->n_embd;
    bool scaled = m->stream_scale != 0 && m->stream_scale != 1;
    if (scaled || m->deepstack || late)
        vulkan_settle(v);
    const struct scale_args sum = {.x = s->x,
                                   .y = s->late,
                                   .width = (uint)E,
                                   .rows = (uint)v->rows,
                                   .ldx = s->ld_x,
                                   .ldy = s->ld_x,
                                   .scale = 1};
    if (late)
        vulkan_scale(v, &sum);
    vulkan_streams_correct(v, m, layer);
    if (scaled)
        vulkan_settle(v);
    if (scaled)
        vulkan_scale(v, &(struct scale_args){.x = s->x,
                                             .width = (uint)E,
                                             .rows = (uint)v->rows,
                                             .ldx = s->ld_x,
                                             .scale = m->stream_scale});
    v->late = m->experts_late;
    if (m->deepstack && v->batch.n_embeds) {
        const struct given_args args = {s->x,
                                        v->s.step,
                                        v->s.embeds,
                                        (uint)E,
                                        (uint)v->rows,
                                        s->ld_x,
                                        (uint)network_embed_width(v->net),
                                        (uint)(m->deepstack * E),
                                        v->narrow && v->batch.n_out != v->batch.n_tokens,
                                        v->net->n_vocab};
        vulkan_run(v, KERNEL_GIVEN, 0, 0, &args, sizeof args, vulkan_wide(E), args.rows, 1);
    }
}

void vulkan_mlp(struct backend *be, const struct mlp *m, int layer)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    int E = v->net->n_embd;
    bool has_dense = m->dense.gate_up, has_experts = m->router.w;
    if (mlp_is_none(m) || !v->rows)
        return;
    vulkan_stage(v, STAGE_FFN);
    if (has_dense || has_experts)
        vulkan_read_block(v, &m->block);
    if (has_dense)
        dense(v, m);
    bool late = v->late;
    if (has_experts)
        experts(v, m, m->experts_late ? s->late : has_dense ? s->sum : s->y);
    if (has_dense && has_experts && !m->experts_late)
        vulkan_scale(v, &(struct scale_args){.x = s->y,
                                             .y = s->sum,
                                             .width = (uint)E,
                                             .rows = (uint)v->rows,
                                             .ldx = s->ld_x,
                                             .ldy = s->ld_x,
                                             .scale = 1});
    vulkan_stage(v, STAGE_FFN);
    if (has_dense || has_experts)
        vulkan_block_add(v, &m->block);
    close_block(v, m, layer, late);
}
