/*
 * Mlps of the CPU backend: a dense one, experts or both, and what follows them in a layer. The products are in gemm.c and
 * moe.c.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/hyper.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/streams.h"

#include <math.h>
#include <string.h>

struct mid_job {
    const struct cpu_backend *cb;
    const struct ffn *f;
};

static void mid_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct mid_job *j = arg;
    size_t wide = (size_t)j->f->gate_up->n_out, F = (size_t)j->f->down->n_in;
    for (int i = first; i < last; i++) {
        float *g = j->cb->products + (size_t)i * wide;
        if (j->f->sparse)
            cpu_keep_top(j->f->sparsity, g, (int)F);
        gemm_activate(j->cb, j->f, g, wide > F ? g + F : g, (int)F);
    }
}

/* Where hidden units are normed or compared, all of a row's must be there first. */
static void ffn_whole(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y,
                      int rows)
{
    struct mid_job j = {cb, f};
    size_t wide = (size_t)f->gate_up->n_out, F = (size_t)f->down->n_in;
    gemm_linear(cb, f->gate_up, x, cb->products, rows);
    pool_each(cb->pool, rows, POOL_EVEN, mid_rows, &j);
    for (size_t i = 1; i < (size_t)rows; i++)
        memmove(cb->products + i * F, cb->products + i * wide, F * sizeof(float));
    if (f->mid.kind)
        cpu_add_norm(cb->products, NULL, &f->mid, cb->products, rows, (int)F, cb->pool, cb->isa);
    gemm_linear(cb, f->down, cb->products, y, rows);
}

static void dense(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows)
{
    (f->clips ? cpu_clip_ffn : f->mid.kind || f->sparse ? ffn_whole : gemm_ffn)(cb, f, x, y, rows);
}

static void dense_gate(struct cpu_backend *cb, const struct weight *w, const float *n, float *y,
                       int rows)
{
    gemm_linear(cb, w, n, cb->gate, rows);
    for (int t = 0; t < rows; t++)
        cpu_add_scale(y + (size_t)t * (size_t)cb->net->n_embd, NULL,
                      1.0f / (1.0f + expf(-cb->gate[t])), 1, cb->net->n_embd, cb->pool);
}

/* Bit mask per row of the comm members that contribute to the experts' output. NULL: all of them, because hidden units
 * are split. */
static const uint64_t *expert_members(struct cpu_backend *cb, const struct mlp *m)
{
    return m->experts.down->n_expert == router_experts(&m->router)
               ? NULL
               : moe_members(cb, m, cb->stream.rows, cb->base.comm->size);
}

/* The experts' result d stays until the end of the next layer. */
static void keep_late(struct cpu_backend *cb, const struct mlp *m)
{
    struct cpu_stream *x = &cb->stream;
    float *d = x->d;
    if (m->experts_partial)
        cpu_sum_members(cb, d, expert_members(cb, m));
    cpu_stage_begin(cb);
    cpu_norm_rows(cb, &m->experts_out, d, d);
    cpu_stage_end(cb, STAGE_NORM);
    x->d = cb->late;
    cb->late = d;
}

static void late_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct cpu_backend *cb = arg;
    int E = cb->net->n_embd;
    for (int i = first; i < last; i++) {
        float *x = cb->stream.x + (size_t)i * (size_t)E;
        const float *late =
            cb->late + (size_t)(cb->stream.narrow ? cb->batch.out_rows[i] : i) * (size_t)E;
        for (int e = 0; e < E; e++)
            x[e] += late[e];
    }
}

/* d = experts, plus the dense mlp if there is one. Returns true if d is still to be added up over the members of
 * comm. */
static bool experts(struct cpu_backend *cb, const struct mlp *m, const float *n)
{
    struct cpu_stream *x = &cb->stream;
    const float *router_x = n, *in = n;
    cpu_stage_begin(cb);
    if (m->experts_in.kind != NORM_NONE) {
        cpu_norm_rows(cb, &m->experts_in, x->x, cb->n2);
        router_x = in = cb->n2;
    }
    if (m->router.norm.kind != NORM_NONE) {
        cpu_norm_rows(cb, &m->router.norm, x->x, cb->n3);
        router_x = cb->n3;
    }
    cpu_stage_end(cb, STAGE_NORM);
    if (m->to_experts) {
        cpu_linear(cb, m->to_experts, in, cb->to_experts, x->rows, STAGE_EXPERTS);
        moe_run(cb, m, router_x, cb->to_experts, cb->from_experts, x->rows);
        cpu_linear(cb, m->from_experts, cb->from_experts, x->d, x->rows, STAGE_EXPERTS);
    } else {
        moe_run(cb, m, router_x, in, x->d, x->rows); /* measures its own stages */
        moe_add_same(cb, m, in, x->d, x->rows);
    }
    if (!m->dense.gate_up)
        return m->experts_partial;
    if (m->experts_late) {
        keep_late(cb, m);
        cpu_stage_begin(cb);
        dense(cb, &m->dense, n, x->d, x->rows);
        cpu_stage_end(cb, STAGE_FFN);
        return m->dense_partial;
    }
    /* Without norms of their own, both parts share one sum over members. */
    bool once = m->dense_partial && m->experts_partial && m->experts_out.kind == NORM_NONE &&
                m->dense_out.kind == NORM_NONE;
    if (m->experts_partial && !once)
        cpu_sum_members(cb, x->d, expert_members(cb, m));
    cpu_norm_rows(cb, &m->experts_out, x->d, x->d);
    cpu_stage_begin(cb);
    dense(cb, &m->dense, n, cb->dense, x->rows);
    if (m->dense_gate)
        dense_gate(cb, m->dense_gate, n, cb->dense, x->rows);
    cpu_stage_end(cb, STAGE_FFN);
    if (m->dense_partial && !once)
        cpu_sum_members(cb, cb->dense, NULL);
    cpu_stage_begin(cb);
    cpu_norm_rows(cb, &m->dense_out, cb->dense, cb->dense);
    cpu_add_scale(x->d, cb->dense, 1, x->rows, cb->net->n_embd, cb->pool);
    cpu_stage_end(cb, STAGE_FFN);
    return once;
}

struct gate_job {
    const struct cpu_backend *cb;
    const struct ffn act;
    int layer, width;
};

/* gate = act(gate) * e, of each row */
static void gate_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct gate_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    size_t P = (size_t)j->width, all = P * (size_t)cb->net->n_layers;
    for (int i = first; i < last; i++) {
        size_t row = (size_t)(cb->stream.narrow ? cb->batch.out_rows[i] : i);
        gemm_activate(cb, &j->act, cb->layer_gate + (size_t)i * P,
                      cb->layer_embeds + row * all + (size_t)j->layer * P, j->width);
    }
}

/* d = the layer embedding, after the mlp has been added to x. With several streams it goes to all but x_0. */
static void layer_embed(struct cpu_backend *cb, const struct layer_embed *l, int layer)
{
    const struct altup *altup = &cb->net->layers[layer].altup;
    struct cpu_stream *x = &cb->stream;
    struct gate_job j = {cb, {.act = l->act}, layer, l->gate->n_out};
    cpu_stage_begin(cb);
    cpu_settle(cb);
    const float *in = altup->scale ? cpu_streams_scaled(cb, altup) : x->x;
    gemm_linear(cb, l->gate, in, cb->layer_gate, x->rows);
    pool_each(cb->pool, x->rows, POOL_EVEN, gate_rows, &j);
    gemm_linear(cb, l->project, cb->layer_gate, x->d, x->rows);
    cpu_norm_rows(cb, &l->norm, x->d, x->d);
    if (altup->router)
        cpu_streams_add(cb);
    x->pending = !altup->router;
    cpu_stage_end(cb, STAGE_FFN);
}

/* d = the result of the mlp: of its only part, or the sum of both parts after their norms. */
static void finish_mlp(struct cpu_backend *cb, const struct mlp *m, int layer)
{
    struct cpu_stream *x = &cb->stream;
    bool both = m->router.w && m->dense.gate_up;
    cpu_stage_begin(cb);
    if (!both)
        cpu_norm_rows(cb, m->router.w ? &m->experts_out : &m->dense_out, x->d, x->d);
    cpu_stage_end(cb, STAGE_NORM);
    cpu_finish_block(cb, &m->block, layer);
    if (layer && cb->net->layers[layer - 1].mlp.experts_late) {
        cpu_stage_begin(cb);
        cpu_settle(cb);
        pool_each(cb->pool, x->rows, POOL_EVEN, late_rows, cb);
        cpu_stage_end(cb, STAGE_NORM);
    }
    if (cb->net->layers[layer].altup.router)
        cpu_streams_correct(cb, &cb->net->layers[layer].altup);
    if (m->embed.gate)
        layer_embed(cb, &m->embed, layer);
    if (m->stream_scale != 0 && m->stream_scale != 1) {
        cpu_stage_begin(cb);
        cpu_add_scale(x->x, x->pending ? x->d : NULL, m->stream_scale, x->rows, cb->net->n_embd,
                      cb->pool);
        x->pending = false;
        cpu_stage_end(cb, STAGE_NORM);
    }
    if (m->deepstack)
        cpu_deepstack(cb, m->deepstack);
}

void cpu_mlp(struct backend *be, const struct mlp *m, int layer)
{
    struct cpu_backend *cb = cpu_self(be);
    struct cpu_stream *x = &cb->stream;
    if (mlp_is_none(m))
        return;
    if (cb->hyper)
        cpu_hyper_read(cb, &cb->net->layers[layer].hyper[1]);
    const float *n = cpu_block_input(cb, &m->block);
    bool partial = m->dense_partial, has_experts = m->router.w;
    if (has_experts) {
        if (cb->tier && layer + 1 < network_depth(cb->net))
            moe_look_ahead(cb, &cb->net->layers[layer + 1].mlp, x->x, x->rows);
        partial = experts(cb, m, n);
    } else {
        cpu_stage_begin(cb);
        dense(cb, &m->dense, n, x->d, x->rows);
        cpu_stage_end(cb, STAGE_FFN);
    }
    /* with a dense part, every member contributes to every row */
    bool some = has_experts && !m->dense.gate_up;
    if (partial)
        cpu_sum_members(cb, x->d, some ? expert_members(cb, m) : NULL);
    finish_mlp(cb, m, layer);
}
