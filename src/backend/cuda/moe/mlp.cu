/*
 * The mlp op: a layer's dense part, its experts or both, and the epilogue of their sum (struct mlp
 * of layer.h).
 * A plain mlp is one pick of a table; the norm before it is left to the kernel. Where a dense part
 * runs beside experts, the norm is computed once and struct resid_epilogue says how the two are
 * added to the residual stream (unless the dense part is one of the experts: join.cu).
 * This file also converts layer.h's norms, activations and routers to what kernels take.
 */
#include "backend/cuda/core/streams.h"
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/heads/embed.cuh"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/vision/tower.h"

#include <math.h>

static float or_one(float scale)
{
    return scale == 0 ? 1.0f : scale;
}

struct gain cuda_gain(const struct cuda_backend *cu, const struct norm *n)
{
    struct gain g = {};
    if (n->kind == NORM_NONE)
        return g;
    g.gain = n->gain ? n->gain : cu->act.ones;
    g.eps = n->eps;
    g.layer = n->kind == NORM_LAYER;
    g.bias = g.layer ? n->bias : NULL;
    return g;
}

struct resid_epilogue cuda_epilogue(const struct cuda_backend *cu, const struct block *b)
{
    struct resid_epilogue c = {};
    if (b->out.kind != NORM_AFFINE) /* applied to the block's rows at once */
        c.out = cuda_gain(cu, &b->out);
    c.sum = cuda_gain(cu, &b->sum);
    c.scale = or_one(b->scale);
    c.stream_scale = 1.0f;
    if (b->keep != 0) { /* keep * n + scale * y, where x is n: cuda_keep */
        c.scale /= b->keep;
        c.stream_scale = b->keep;
    }
    c.set = c.out.gain || c.sum.gain || c.scale != 1.0f || c.stream_scale != 1.0f;
    return c;
}

struct gating cuda_gating(const struct ffn *f)
{
    struct gating g = {};
    g.plain = f->act == ACT_SILU;
    g.ungated = !activation_is_gated(f->act);
    g.erf = f->act == ACT_GELU || f->act == ACT_PLAIN_GELU;
    g.linear = 1.0f;
    g.limit = INFINITY;
    if (f->act == ACT_GELU_TANH ||
        f->act == ACT_PLAIN_GELU_TANH) { /* 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)) */
        g.linear = 1.5957691216f;
        g.cubic = g.linear * 0.044715f;
    } else if (f->act == ACT_PLAIN_QUICK_GELU) {
        g.linear = 1.702f;
    } else if (f->act == ACT_SILU_CLAMP) {
        g.limit = f->limit;
    } else if (f->act == ACT_SWIGLU_CLAMP) {
        g.linear = f->alpha;
        g.limit = f->limit;
        g.offset = 1.0f;
    }
    return g;
}

static struct route_rule rule_of(const struct mlp *m)
{
    const struct router *r = &m->router;
    struct route_rule rule = {};
    rule.shared = join_is_done(m);
    rule.gated = m->dense_gate != NULL;
    rule.n_expert = r->w->n_out + rule.shared;
    rule.used = r->n_used + rule.shared;
    /* A softmax over the chosen experts equals a softmax over all, renormalised. */
    rule.renormalise = r->renorm || r->kind == ROUTER_SOFTMAX_TOP;
    rule.sigmoid = r->kind == ROUTER_SIGMOID;
    rule.softplus = r->kind == ROUTER_SOFTPLUS;
    rule.scale = or_one(r->scale);
    rule.choice_bias = r->choice_bias;
    rule.expert_scale = r->expert_scale;
    rule.n_groups = r->n_groups > 1 ? r->n_groups : 0;
    rule.n_groups_used = r->n_groups_used;
    return rule;
}

struct experts cuda_experts(const struct mlp *m)
{
    struct experts e = {};
    e.gate_up = cuda_matrix(m->experts.gate_up);
    e.down = cuda_matrix(m->experts.down);
    e.router = cuda_matrix(m->router.w);
    e.act = cuda_gating(&m->experts);
    e.rule = e.full = rule_of(m);
    e.offload = ((const struct cuda_weight *)m->experts.gate_up->impl)->offload;
    bool all = m->experts.gate_up->n_expert >= m->router.w->n_out && !e.offload;
    e.give = !all || e.full.n_groups ||
             (m->router.kind == ROUTER_SOFTMAX && m->router.choice_bias) ||
             m->router.kind == ROUTER_SPARSE_MIXER || m->router.kind == ROUTER_SOFTPLUS ||
             m->router.by_token;
    e.mixer = m->router.kind == ROUTER_SPARSE_MIXER;
    e.jitter = m->router.jitter;
    e.by_token = m->router.by_token;
    e.same_from = m->router.n_same ? router_experts(&m->router) : 0;
    if (e.give) {
        e.rule = route_rule{};
        e.rule.n_expert = all ? e.full.n_expert : e.gate_up->n_expert;
        e.rule.used = e.full.used < e.rule.n_expert ? e.full.used : e.rule.n_expert;
        e.rule.given = true;
        e.rule.spread = !all;
        e.first = m->expert_first;
    }
    return e;
}

bool cuda_is_plain(const struct mlp *m)
{
    if (m->router.w && ((const struct cuda_weight *)m->experts.gate_up->impl)->offload)
        return false; /* the host needs the normed rows */
    return join_is_done(m) || (!(m->router.w && m->dense.gate_up) && !m->router.norm.kind &&
                               !m->experts_in.kind && !(m->router.w && m->router.n_same));
}

/* Runs the case's kernel. The result goes to c->y, or becomes what is pending on the residual
 * stream. */
static void run(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, const struct mlp *m)
{
    bool changed = op == PICK_MOE ? lora_changes_experts(cu, m)
                                  : lora_changes(cu, c->w) || lora_changes(cu, c->mlp.down);
    /* the products of PICK_UNGATED add changes themselves */
    if ((op == PICK_MOE ? apart_experts(m) : apart_dense(m)) || (changed && op != PICK_UNGATED)) {
        apart_mlp(cu, op, c, m);
        return;
    }
    const struct cuda_pick *p = pick_find(cu, op, c);
    pick_input(cu, p, c);
    if (c->y == cu->act.block) {
        c->stream->add = ADD_ROWS; /* unless the kernel leaves another form */
        c->stream->d = c->y;
    }
    step_mark(cu);
    pick_go(cu, p, c);
    step_mark_end(cu, op == PICK_MOE ? STAGE_EXPERTS : STAGE_FFN);
}

/* Experts of which the host computes some, or all: sends the host's rows, and computes the device's experts. */
static void start_offloaded(struct cuda_backend *cu, struct pick_case *c, struct experts *e,
                            const struct mlp *m)
{
    rows_to_floats(cu, c->x);
    e->offload_x = c->x->floats;
    if (e->offload->n_device) {
        run(cu, PICK_MOE, c, m);
    } else {
        struct pick_case l = {};
        l.rows = c->rows;
        l.w = e->router;
        l.in.x = (c->moe.router_x ? c->moe.router_x : c->x)->floats;
        pick_run(cu, PICK_LOGITS, &l, STAGE_ROUTER);
        router_select(cu, e, 1, c->rows);
        c->stream->add = ADD_ROWS;
        c->stream->d = c->y;
    }
}

/* Adds the experts that are copied to the device, and the host's. */
static void finish_offloaded(struct cuda_backend *cu, struct pick_case *c, struct experts *e)
{
    step_mark(cu);
    bool some = e->offload->n_device > 0;
    some |= offload_copied(cu, c, e, some);
    offload_join(cu, e, c->y, c->rows, some);
    step_mark_end(cu, STAGE_EXPERTS);
}

static void set_dense(struct pick_case *c, const struct mlp *m)
{
    c->w = cuda_matrix(m->dense.gate_up);
    c->mlp.down = cuda_matrix(m->dense.down);
    c->mlp.act = cuda_gating(&m->dense);
}

static void set_experts(struct pick_case *c, const struct experts *e)
{
    c->w = e->gate_up;
    c->mlp.down = e->down;
    c->moe.router = e->router;
    c->mlp.act = e->act;
    c->moe.experts = e;
}

/* The experts' result stays in cu->mlp.late until the end of the next layer. What is pending becomes the dense part. */
static void keep_late(struct cuda_backend *cu, const struct mlp *m, struct resid_epilogue *epilogue)
{
    struct resid *r = &cu->resid;
    struct gain norm = cuda_gain(cu, &m->experts_out);
    resid_add_rows(cu, r); /* if they are not rows yet */
    if (m->experts_partial)
        comm_sum(cu, cu->mlp.late, r->rows);
    if (norm.gain)
        rows_norm(cu, cu->mlp.late, norm, cu->mlp.late, r->rows, cu->shape.n_embd);
    r->add = ADD_ROWS;
    r->d = epilogue->beside;
    epilogue->norm = epilogue->beside_norm;
    epilogue->beside = NULL;
    epilogue->beside_norm = gain{};
}

/* The chosen experts that return their input. One member of several processes adds it. */
static void add_same(struct cuda_backend *cu, const struct mlp *m, const struct pick_case *c)
{
    const struct comm *members = cu->be->comm;
    if (m->experts_partial && members && members->index)
        return;
    rows_to_floats(cu, c->x);
    step_mark(cu);
    router_add_same(cu, c->x->floats, c->y, c->rows, cu->shape.n_embd);
    step_mark_end(cu, STAGE_EXPERTS);
}

/* The dense part beside experts. */
static void run_beside(struct cuda_backend *cu, const struct mlp *m, struct pick_case *d,
                       struct resid_epilogue *epilogue)
{
    set_dense(d, m);
    epilogue->beside = d->y = cu->mlp.dense;
    run(cu, d->mlp.act.ungated ? PICK_UNGATED : PICK_FFN, d, m);
    if (m->dense_gate) {
        d->w = cuda_matrix(m->dense_gate);
        epilogue->beside_gate = d->y = cu->mlp.dense_gate;
        pick_run(cu, PICK_LINEAR, d, STAGE_FFN);
    }
    epilogue->beside_norm = cuda_gain(cu, &m->dense_out);
}

/* Dense beside experts, or experts whose rows or router have a norm of their own. All norms read
 * the same row, so they are computed together, except the experts' norm if the experts need more
 * than floats. */
static void run_both(struct cuda_backend *cu, const struct mlp *m, struct resid_epilogue *epilogue)
{
    struct resid *r = &cu->resid;
    struct rows n = {}, route = {}, own = {};
    struct gain in = cuda_gain(cu, &m->block.in);
    struct experts e = cuda_experts(m);
    struct pick_case c = {}, d = {};
    struct norm_more more[MORE_NORMS];
    int n_more = 0, width = cu->shape.n_embd;
    c.rows = r->rows;
    c.x = &n;
    c.stream = r;
    c.made = true;
    d = c;
    set_experts(&c, &e);
    c.y = m->experts_late ? cu->mlp.late : cu->act.block;
    if (m->router.norm.kind) {
        more[n_more++] = norm_more{cuda_gain(cu, &m->router.norm), cu->mlp.router_in};
        route = rows_of(cu->mlp.router_in, r->rows, width);
        c.moe.router_x = &route;
    }
    bool floats = m->experts_in.kind && r->rows <= NORM_ROWS &&
                  pick_find(cu, PICK_MOE, &c)->takes == TAKES_NORM;
    if (floats) {
        more[n_more++] = norm_more{cuda_gain(cu, &m->experts_in), cu->mlp.experts_in};
        own = rows_of(cu->mlp.experts_in, r->rows, width);
        c.x = &own;
    }
    struct gain any = {cu->act.ones, 1.0f}; /* not read */
    if (r->reads_before)
        n = cuda_norm_before(cu, &m->block.in);
    else if (in.layer)
        n = resid_norm(cu, r, in, true);
    else
        n = resid_norms(cu, r, in.gain ? in : any, true, more, n_more);
    if (!in.gain && !r->reads_before)
        n = resid_plain(cu, r);
    bool later = e.offload && !m->experts_in.kind; /* while the host computes */
    if (m->dense.gate_up && !later)
        run_beside(cu, m, &d, epilogue);
    if (m->experts_in.kind && !floats) /* nothing is pending: only the norm */
        n = resid_norm(cu, r, cuda_gain(cu, &m->experts_in), true);
    if (e.offload)
        start_offloaded(cu, &c, &e, m);
    else
        run(cu, PICK_MOE, &c, m);
    if (m->dense.gate_up && later)
        run_beside(cu, m, &d, epilogue);
    if (e.offload)
        finish_offloaded(cu, &c, &e);
    if (e.same_from)
        add_same(cu, m, &c);
    epilogue->norm = cuda_gain(cu, &m->experts_out);
    if (m->experts_late)
        keep_late(cu, m, epilogue);
}

static void run_plain(struct cuda_backend *cu, const struct mlp *m, struct resid_epilogue *epilogue)
{
    struct rows n = {};
    struct experts e = {};
    struct pick_case c = cuda_case(cu, &m->block.in, &n);
    if (m->router.w) {
        e = cuda_experts(m);
        set_experts(&c, &e);
        epilogue->norm = cuda_gain(cu, &m->experts_out);
    } else {
        set_dense(&c, m);
        epilogue->norm = cuda_gain(cu, &m->dense_out);
    }
    c.y = cu->act.block;
    run(cu, m->router.w ? PICK_MOE : c.mlp.act.ungated ? PICK_UNGATED : PICK_FFN, &c, m);
}

/* The dense mlp, or the experts, or both; what they add to the stream is pending afterwards. */
static void run_mlp(struct cuda_backend *cu, const struct mlp *m, struct resid_epilogue *epilogue)
{
    struct resid *r = &cu->resid;
    if (m->dense.gate_up && m->dense.clips) {
        tower_clip_ffn(cu, &m->block.in, &m->dense, cu->act.block);
        r->add = ADD_ROWS;
        r->d = cu->act.block;
    } else if (cuda_is_plain(m)) {
        run_plain(cu, m, epilogue);
    } else {
        run_both(cu, m, epilogue);
    }
    if (m->block.out.kind == NORM_AFFINE)
        tower_norm(cu, &m->block.out, cu->act.block, r->rows, cu->shape.n_embd);
}

/* x += norm((act(x Wg^T) * e) Wp^T). With AltUp the product reads scale * x, and its result goes to the other parts. */
static void run_layer_embed(struct cuda_backend *cu, const struct layer_embed *l, int layer,
                            struct resid_epilogue *epilogue)
{
    struct resid *r = &cu->resid;
    struct step s = cuda_step(cu);
    const struct altup *altup = &cu->net->layers[layer].altup;
    struct rows x = streams_scaled(cu, altup);
    struct pick_case c = {};
    c.rows = r->rows;
    c.w = cuda_matrix(l->gate);
    c.x = &x;
    c.y = cu->mlp.layer_gate;
    pick_run(cu, PICK_LINEAR, &c, STAGE_FFN);
    struct ffn f = {};
    f.act = l->act;
    struct embed_gate_args p = {};
    p.h = cu->mlp.layer_gate;
    p.e = cu->mlp.layer_embeds;
    p.row_of = r->narrow && !cu->step.layout.out_is_all ? s.out_rows : NULL;
    p.act = cuda_gating(&f);
    p.width = c.w->n_out;
    p.layer = layer;
    p.n_layers = cu->shape.n_layers;
    embed_gate(cu, p, r->rows);
    x = rows_of(cu->mlp.layer_gate, r->rows, p.width);
    c.w = cuda_matrix(l->project);
    c.y = cu->act.block;
    pick_run(cu, PICK_LINEAR, &c, STAGE_FFN);
    *epilogue = resid_epilogue{};
    if (altup->router) {
        if (l->norm.kind)
            rows_norm(cu, c.y, cuda_gain(cu, &l->norm), c.y, r->rows, cu->shape.n_embd);
        streams_add(cu, c.y);
        return;
    }
    epilogue->set = true;
    epilogue->norm = cuda_gain(cu, &l->norm);
    epilogue->scale = epilogue->stream_scale = 1.0f;
    r->add = ADD_ROWS;
    r->d = cu->act.block;
}

void cuda_mlp(struct backend *be, const struct mlp *mlp, int layer)
{
    struct cuda_backend *cu = cuda_self(be);
    struct resid *r = &cu->resid;
    struct resid_epilogue epilogue = cuda_epilogue(cu, &mlp->block);
    if (!r->rows || mlp_is_none(mlp))
        return;
    hyper_read(cu, &cu->net->layers[layer].hyper[1]);
    struct mlp own = *mlp;
    own.block = cuda_keep(cu, &mlp->block);
    const struct mlp *m = &own;
    r->reads_before = m->block.parallel || m->block.keep != 0;
    if (m->block.parallel)
        resid_plain(cu, r); /* the mixer's result */
    if (m->dense.gate_up || m->router.w)
        run_mlp(cu, m, &epilogue);
    r->reads_before = false;
    if (m->block.keep != 0)
        r->before = NULL;
    comm_sum_beside(cu, &epilogue, m->dense_partial, m->experts_partial);
    comm_sum_stream(cu, m->router.w && !m->experts_late ? m->experts_partial : m->dense_partial);
    if (layer && cu->net->layers[layer - 1].mlp.experts_late)
        epilogue.after = r->parts_narrow ? cu->mlp.late_out : cu->mlp.late;
    epilogue.set = epilogue.set || epilogue.beside || epilogue.norm.gain || epilogue.after;
    row_conv_block(cu, true, layer, &epilogue);
    if (cu->net->layers[layer].altup.router) {
        r->epilogue = epilogue;
        streams_correct(cu, &cu->net->layers[layer].altup);
        epilogue = resid_epilogue{};
        epilogue.scale = epilogue.stream_scale = 1.0f;
    }
    if (m->embed.gate) {
        r->epilogue = epilogue;
        run_layer_embed(cu, &m->embed, layer, &epilogue);
    }
    epilogue.stream_scale =
        (m->embed.gate ? 1.0f : epilogue.stream_scale) * or_one(m->stream_scale);
    epilogue.set = epilogue.set || epilogue.stream_scale != 1.0f;
    r->epilogue = epilogue;
    if (m->deepstack)
        tower_deepstack(cu, m->deepstack);
}
