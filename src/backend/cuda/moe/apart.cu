/*
 * Mlps by products of their own: gate and up as floats, hidden units by a kernel between, then down. It runs what the
 * fused kernels of pick.cu lack: changes by adapters between the products (lora.h), rare activations, a top-k or norm of
 * hidden units, weights on the inputs of experts, experts without a gate or on projections of their input.
 */
#include "backend/cuda/moe/apart.cuh"
#include "backend/cuda/core/host.h"
#include "backend/cuda/core/pick.cuh"
#include "backend/cuda/lora/lora.cuh"

static bool act_is_rare(enum activation act)
{
    return act == ACT_SILU_LIMIT || act == ACT_RELU2 || act == ACT_PLAIN_RELU2 ||
           act == ACT_PLAIN_XIELU;
}

/* Kernels of pairs take gate and up in tiles of 16 rows: a tensor of both must split at the edge of a tile. Weights that
 * are not uploaded yet do. */
static bool is_odd_pair(const struct ffn *f)
{
    const struct cuda_weight *w = (const struct cuda_weight *)f->gate_up->impl;
    return w && activation_is_gated(f->act) && w->m.n_seg == 1 && w->m.n_out % (2 * TILE_ROWS);
}

static bool is_rare(const struct ffn *f)
{
    return f->gate_up && (act_is_rare(f->act) || f->mid.kind || f->sparse || is_odd_pair(f));
}

bool apart_dense(const struct mlp *m)
{
    return is_rare(&m->dense);
}

bool apart_experts(const struct mlp *m)
{
    return m->router.w && (is_rare(&m->experts) || !activation_is_gated(m->experts.act) ||
                           m->router.weighs_input || m->to_experts);
}

bool apart_supported(const struct cuda_backend *cu, const struct network *net, int i,
                     struct error *err)
{
    const struct mlp *m = &net->layers[i].mlp;
    const struct ffn *e = &m->experts;
    if ((align_up((size_t)apart_widest(m), TILE_K) + 64) * sizeof(float) > cu->shared_limit)
        return error_set(err, "layer %d: hidden units of %d are not supported on cuda", i,
                         apart_widest(m));
    if (m->dense.mid.kind > NORM_RMS)
        return network_refuse(err, i, "such a norm of hidden units is", "cuda");
    if (!apart_experts(m))
        return true;
    if (e->mid.kind || e->sparse)
        return network_refuse(err, i, "a norm or top-k of experts' hidden units is", "cuda");
    if (m->router.weighs_input && (e->gate_up->bias || e->down->bias))
        return network_refuse(err, i, "a bias of experts with weights on their inputs is", "cuda");
    if (m->to_experts && (m->from_experts->bias || m->to_experts->n_out > net->n_embd))
        return network_refuse(err, i, "such a projection around experts is", "cuda");
    return true;
}

int apart_widest(const struct mlp *m)
{
    int dense = apart_dense(m) ? m->dense.down->n_in : 0;
    int latent = m->to_experts ? m->to_experts->n_out : 0;
    return dense > latent ? dense : latent;
}

bool apart_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                   struct error *err)
{
    size_t raw = 0, units = 0, latent = 0, pairs = 0, tokens = (size_t)cu->shape.max_tokens;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        bool dense = m->dense.gate_up && (apart_dense(m) || b->lora_rank);
        bool experts = m->router.w && (apart_experts(m) || b->lora_rank);
        size_t used = experts ? (size_t)m->router.n_used + join_is_done(m) : 0;
        size_t wide = dense ? (size_t)m->dense.gate_up->n_out : 0;
        size_t each = experts ? (size_t)m->experts.gate_up->n_out * used : 0;
        raw = wide > raw ? wide : raw;
        raw = each > raw ? each : raw;
        units = dense && (size_t)m->dense.down->n_in > units ? (size_t)m->dense.down->n_in : units;
        pairs = used > pairs ? used : pairs;
        if (m->to_experts && (size_t)m->to_experts->n_out > latent)
            latent = (size_t)m->to_experts->n_out;
    }
    const struct device_buffer list[] = {{(void **)&cu->mlp.raw, tokens * raw * 4},
                                         {(void **)&cu->mlp.units, tokens * units * 4},
                                         {(void **)&cu->mlp.units_scale, tokens * pairs * 4},
                                         {(void **)&cu->mlp.latent_in, tokens * latent * 4},
                                         {(void **)&cu->mlp.latent_out, tokens * latent * 4}};
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

static void product(struct cuda_backend *cu, const struct matrix *w, struct rows *x, float *y)
{
    struct pick_case c = {};
    c.rows = x->n;
    c.w = w;
    c.x = x;
    c.y = y;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
}

static struct apart_units units_of(struct cuda_backend *cu, const struct ffn *f, int width)
{
    struct apart_units u = {};
    u.kind = f->act == ACT_RELU2 || f->act == ACT_PLAIN_RELU2 ? APART_RELU2
             : f->act == ACT_PLAIN_XIELU                      ? APART_XIELU
             : f->act == ACT_SILU_LIMIT                       ? APART_SILU_LIMIT
                                                              : APART_GATING;
    u.act = cuda_gating(f);
    u.alpha = f->alpha;
    u.limit = f->limit;
    u.beta = f->beta;
    u.raw = cu->mlp.raw;
    u.width = width;
    u.sparse = f->sparse;
    u.sparsity = f->sparsity;
    u.mid.gain = f->mid.kind ? f->mid.gain ? f->mid.gain : cu->act.ones : NULL;
    u.mid.eps = f->mid.eps;
    return u;
}

static void forget_forms(struct rows *x) /* other rows have overwritten their buffers */
{
    x->fp16 = x->records = x->panels = false;
}

/* Hidden units of an activation that fused kernels know, with a form that saves a conversion. */
static void known_units(struct cuda_backend *cu, const struct pick_case *c, struct rows *hidden)
{
    struct lora_gate_args g = {};
    g.act = c->mlp.act;
    g.raw = cu->mlp.raw;
    g.hidden = cu->mlp.units;
    g.width = g.ld = hidden->width;
    g.padded = c->mlp.down->n_kt * TILE_K;
    if (gemm_cluster_fits(cu, hidden->n, g.padded)) {
        g.panels = cu->forms.panels;
        g.panel_rows = gemm_cluster_width(hidden->n);
        g.scale = cu->forms.scale;
        hidden->panels = true;
    }
    lora_gate(cu, g, hidden->n);
}

static void rare_units(struct cuda_backend *cu, const struct ffn *f, struct rows *hidden)
{
    struct apart_units u = units_of(cu, f, hidden->width);
    u.hidden = cu->mlp.units;
    if (pick_fp16_only(cu, hidden->n)) {
        u.fp16 = cu->forms.fp16;
        u.scale = cu->forms.scale;
        u.padded = (int)align_up((size_t)hidden->width, TILE_K);
        hidden->fp16 = true;
    }
    apart_units(cu, u, hidden->n);
}

static void run_dense(struct cuda_backend *cu, const struct pick_case *c, const struct mlp *m)
{
    struct rows hidden = rows_of(cu->mlp.units, c->x->n, c->mlp.down->n_in);
    product(cu, c->w, c->x, cu->mlp.raw);
    if (is_rare(&m->dense))
        rare_units(cu, &m->dense, &hidden);
    else
        known_units(cu, c, &hidden);
    product(cu, c->mlp.down, &hidden, c->y);
    forget_forms(c->x);
}

/* The GEMM kernel for both products of experts. It must write floats, which excludes the faster
 * fused ones. */
enum experts_kernel { EXPERTS_WGMMA, EXPERTS_MMA, EXPERTS_STREAM };

static enum experts_kernel experts_kernel_for(const struct cuda_backend *cu,
                                              const struct pick_case *c)
{
    if (!cu->exact && !pick_fp16_only(cu, c->rows))
        return EXPERTS_STREAM;
    if (cu->can.wgmma && gemm_wgmma_suits(cu, c->w, false) &&
        gemm_wgmma_suits(cu, c->mlp.down, false))
        return EXPERTS_WGMMA;
    return gemm_mma_fits(cu, c->w) && gemm_mma_fits(cu, c->mlp.down) ? EXPERTS_MMA : EXPERTS_STREAM;
}

static void experts_product(struct cuda_backend *cu, const struct gemm_args &p,
                            enum experts_kernel kernel, int width, int tiles)
{
    if (kernel == EXPERTS_WGMMA)
        gemm_wgmma(cu, p, false, tiles);
    else if (kernel == EXPERTS_MMA)
        gemm_mma(cu, p, false, width, tiles);
    else if (gemm_stream_fits(cu, p, false, width))
        gemm_stream(cu, p, false, width, tiles);
    else
        gemm_splitk(cu, p, false, width, tiles);
}

/* Router logits, with adapters' changes, the choice of experts, and the work list. */
static struct route_tables route_rows(struct cuda_backend *cu, const struct pick_case *c,
                                      const struct mlp *m, int width)
{
    struct moe_route_args r = {};
    r.rows = c->rows;
    r.parts = 1;
    r.rule = c->moe.experts->rule;
    r.width = width;
    r.t = moe_route_tables(cu);
    r.weight = cu->routing.weight;
    r.logits = router_selected(cu, c->moe.experts);
    struct pick_case l = {};
    l.rows = c->rows;
    l.w = c->moe.router;
    l.x = c->moe.router_x ? c->moe.router_x : c->x;
    l.in.x = l.x->floats;
    l.routing.experts = c->moe.experts;
    l.routing.args = &r;
    if (!lora_changes_router(cu, m)) {
        pick_run(cu, PICK_ROUTER, &l, N_STAGES);
        return r.t;
    }
    pick_run(cu, PICK_LOGITS, &l, N_STAGES);
    lora_add_logits(cu, m, l.x);
    router_select(cu, c->moe.experts, 1, c->rows);
    moe_route(cu, r);
    return r.t;
}

/* Hidden units of pairs: fp16, and floats in place of gate and up for adapters. */
static void pair_units(struct cuda_backend *cu, const struct pick_case *c, const struct mlp *m,
                       const struct route_tables &t, int pairs)
{
    struct apart_units u = units_of(cu, &m->experts, c->mlp.down->n_in);
    u.fp16 = cu->mlp.hidden_fp16;
    u.padded = c->mlp.down->n_kt * TILE_K;
    u.scale = cu->mlp.units_scale;
    u.pairs = t.pairs;
    if (m->router.weighs_input)
        u.weight = cu->routing.weight;
    apart_units(cu, u, pairs);
    if (m->router.weighs_input)
        apart_ones(cu, cu->routing.weight, pairs);
}

/* Experts: gate and up of every pair as floats, then hidden units in place. */
static void run_experts(struct cuda_backend *cu, const struct pick_case *c, const struct mlp *m)
{
    enum experts_kernel kernel = experts_kernel_for(cu, c);
    int used = c->moe.experts->rule.used, pairs = c->rows * used, out = c->mlp.down->n_out;
    int width = kernel == EXPERTS_WGMMA ? (int)WGMMA_ROWS : kernel == EXPERTS_MMA ? 64 : 16;
    int tiles = moe_route_tiles(c->rows, used, c->moe.router->n_out, width);
    struct route_tables t = route_rows(cu, c, m, width);
    struct rows in = *c->x;
    float *y = m->to_experts ? cu->mlp.latent_out : c->y;
    if (m->to_experts) {
        product(cu, cuda_matrix(m->to_experts), c->x, cu->mlp.latent_in);
        in = rows_of(cu->mlp.latent_in, c->rows, m->to_experts->n_out);
    }
    rows_to_fp16(cu, &in);
    for (int i = 0; i < 2; i++) {
        struct gemm_args p = pick_args(cu, i ? c->mlp.down : c->w, c->rows);
        p.moe = true;
        p.used = used;
        p.route = t;
        p.y = i ? cu->mlp.expert_out : cu->mlp.raw;
        p.ldy = p.w.n_out;
        if (i) {
            p.x = cu->mlp.hidden_fp16;
            p.x_scale = cu->mlp.units_scale;
            p.sorted_in = true;
        }
        experts_product(cu, p, kernel, width, tiles);
        lora_add_experts(cu, c, m, in.floats, t, i);
        if (!i)
            pair_units(cu, c, m, t, pairs);
    }
    resid_sum_floats(cu, y, c->rows, used, out, c->moe.experts->rule.spread, false);
    forget_forms(c->x);
    if (m->to_experts) {
        struct rows sums = rows_of(y, c->rows, out);
        product(cu, cuda_matrix(m->from_experts), &sums, c->y);
    }
}

void apart_mlp(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, const struct mlp *m)
{
    lora_input(cu, c);
    if (c->y == cu->act.block) {
        c->stream->add = ADD_ROWS;
        c->stream->d = c->y;
    }
    step_mark(cu);
    if (op == PICK_MOE)
        run_experts(cu, c, m);
    else
        run_dense(cu, c, m);
    step_mark_end(cu, op == PICK_MOE ? STAGE_EXPERTS : STAGE_FFN);
}
