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
    CHECK(kind == ROUTER_SOFTMAX || kind == ROUTER_SIGMOID || kind == ROUTER_SOFTMAX_TOP,
          "router %d", (int)kind);
    return kind == ROUTER_SOFTMAX   ? ROUTE_SOFTMAX
           : kind == ROUTER_SIGMOID ? ROUTE_SIGMOID
                                    : ROUTE_SOFTMAX_TOP;
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
    if (!f->clips && f->act != ACT_NONE && vulkan_product_act(v, p, f, activation(f->act))) {
        vulkan_norm(v, &f->mid, p->y, p->ldy, p->y, p->ldy, width, rows);
        return;
    }
    bounded(v, p, f->clips, width);
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
                                    (uint)r->w->n_out,
                                    (uint)v->rows,
                                    ld,
                                    (uint)r->n_used,
                                    router_kind(r->kind),
                                    (uint)r->n_groups,
                                    (uint)r->n_groups_used,
                                    r->renorm,
                                    or_one(r->scale)};
    v->grouped = 0;
    vulkan_run_flat(v, KERNEL_ROUTE, 0, 0, &args, sizeof args, (uint32_t)v->rows);
}

/* to = the weighted sum of the experts' outputs */
static void combine(struct vulkan *v, const struct mlp *m, const struct product *p, uint32_t used,
                    uint64_t to)
{
    const struct vulkan_scratch *s = &v->s;
    vulkan_product(v, p);
    const struct combine_args args = {s->part,
                                      s->chosen,
                                      s->weights,
                                      to,
                                      (uint)v->net->n_embd,
                                      (uint)v->rows,
                                      used,
                                      s->ld_x,
                                      s->ld_x,
                                      (uint)m->experts.gate_up->n_expert,
                                      (uint)m->expert_first,
                                      !m->router.weighs_input};
    vulkan_run(v, KERNEL_COMBINE, 0, 0, &args, sizeof args, vulkan_wide(v->net->n_embd), args.rows,
               1);
}

/* to = experts_out(the weighted sum of the chosen experts) */
static void experts(struct vulkan *v, const struct mlp *m, uint64_t to)
{
    const struct vulkan_scratch *s = &v->s;
    uint32_t used = (uint32_t)m->router.n_used, rows = (uint32_t)v->rows * used;
    uint64_t in = s->n;
    if (m->router.norm.kind) {
        in = to;
        vulkan_norm(v, &m->router.norm, s->x, s->ld_x, in, s->ld_x, v->net->n_embd, v->rows);
    }
    if (m->experts_in.kind)
        vulkan_norm(v, &m->experts_in, s->x, s->ld_x, s->n, s->ld_x, v->net->n_embd, v->rows);
    vulkan_stage(v, STAGE_ROUTER);
    route(v, &m->router, in);
    vulkan_stage(v, STAGE_EXPERTS);
    struct product p = {.w = m->experts.gate_up,
                        .x = s->n,
                        .y = s->hidden,
                        .chosen = s->chosen,
                        .ldx = s->ld_x,
                        .ldy = s->ld_expert,
                        .rows = rows,
                        .x_div = used,
                        .expert_first = (uint32_t)m->expert_first};
    if (m->router.weighs_input) {
        const struct spread_args spread = {s->n, s->weights, s->part, (uint)v->net->n_embd,
                                           rows, used,       s->ld_x};
        vulkan_run(v, KERNEL_SPREAD, 0, 0, &spread, sizeof spread, vulkan_wide(v->net->n_embd),
                   rows, 1);
        p.x = s->part;
        p.x_div = 1;
    }
    product_and_act(v, &p, &m->experts, (int)rows);
    p.w = m->experts.down;
    p.x = s->hidden;
    p.ldx = s->ld_expert;
    p.y = s->part;
    p.ldy = s->ld_x;
    p.x_div = 1;
    if (m->router.weighs_input || !vulkan_product_combined(v, &p, used, to))
        combine(v, m, &p, used, to);
    vulkan_norm(v, &m->experts_out, to, s->ld_x, to, s->ld_x, v->net->n_embd, v->rows);
}
void vulkan_mlp(struct backend *be, const struct mlp *m, int layer)
{
    struct vulkan *v = vulkan_self(be);
    const struct vulkan_scratch *s = &v->s;
    int E = v->net->n_embd;
    bool has_dense = m->dense.gate_up, has_experts = m->router.w;
    (void)layer;
    if (mlp_is_none(m) || !v->rows)
        return;
    vulkan_stage(v, STAGE_FFN);
    if (has_dense || has_experts)
        vulkan_read_block(v, &m->block);
    if (has_dense)
        dense(v, m);
    if (has_experts)
        experts(v, m, has_dense ? s->sum : s->y);
    if (has_dense && has_experts)
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
    bool scaled = m->stream_scale != 0 && m->stream_scale != 1;
    if (scaled || m->deepstack)
        vulkan_settle(v);
    if (scaled)
        vulkan_scale(v, &(struct scale_args){.x = s->x,
                                             .width = (uint)E,
                                             .rows = (uint)v->rows,
                                             .ldx = s->ld_x,
                                             .scale = m->stream_scale});
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
