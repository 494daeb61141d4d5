/*
 * The kernel tables' rows of experts and routers: see pick.cu.
 */
#include "backend/cuda/core/pick.cuh"
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/rows.cuh"
#include "backend/cuda/moe/stream.h"

#include <limits.h>

/*
 * moe: y = the weighted sum of a row's experts
 */
static bool moe_product_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->stream->add == ADD_PRODUCT; /* as output_experts left it */
}
static void moe_product(struct cuda_backend *cu, const struct pick_case *c)
{
    const struct resid *r = c->stream;
    moe_gemv_routed(cu, r->w, r->a.floats, c->moe.experts, &c->in, r->x, c->y);
}

static bool moe_quad_records_fit(const struct cuda_backend *cu, const struct pick_case *c)
{
    return !c->moe.router_x && !c->moe.experts->routed && c->rows <= NORM_ROWS &&
           router_records_shared(c->moe.router) <= cu->shared_limit &&
           moe_quad_fits(cu, c->w, c->mlp.down, c->rows);
}
/* Wide experts of MXFP4 (gpt-oss): moe_quad.cu has a kernel for them, and moe_grouped reads them faster than moe_few. */
static bool moe_is_wide_mxfp4(const struct pick_case *c)
{
    return c->w->n_kt > 8 && matrix_kind(c->w) == TILE_MXFP4 &&
           matrix_kind(c->mlp.down) == TILE_MXFP4;
}
/* Other wide experts are limited by their weights, which moe_few reads once for eight rows. So are more than four rows of
 * K-quants. */
static bool moe_quad_records_pay(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    bool k = c->w->set == SET_K && c->mlp.down->set == SET_K;
    if (c->w->n_kt > 8)
        return moe_is_wide_mxfp4(c) && c->rows <= 5;
    return !k || c->rows <= 4 || c->rows > 8;
}
static void moe_quad_records(struct cuda_backend *cu, const struct pick_case *c)
{
    router_records(cu, c->moe.router, &c->in, c->rows);
    router_select(cu, c->moe.experts, 1, c->rows);
    moe_quad(cu, c->moe.experts, c->y, c->rows);
}

static bool moe_few_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return !c->moe.router_x && !c->moe.experts->routed &&
           router_records_shared(c->moe.router) <= cu->shared_limit &&
           moe_few_fits(cu, c->w, c->mlp.down, c->rows);
}
static void moe_few_run(struct cuda_backend *cu, const struct pick_case *c)
{
    router_records(cu, c->moe.router, &c->in, c->rows);
    router_select(cu, c->moe.experts, 1, c->rows);
    moe_few(cu, c->moe.experts, c->y, c->rows);
}

/* Router logits to cu->routing.logits; with a norm, n gets the normed rows. */
static void router_logits(struct cuda_backend *cu, const struct experts *e,
                          const struct norm_in *in, float *n, int rows)
{
    struct pick_case c = {};
    c.rows = rows;
    c.w = e->router;
    c.in = *in;
    c.y = n;
    pick_run(cu, PICK_LOGITS, &c, N_STAGES);
    router_select(cu, e, 1, rows);
}
/* Router logits of rows as they are. */
static void router_logits_of(struct cuda_backend *cu, const struct experts *e, const struct rows *x)
{
    struct norm_in plain = {};
    plain.x = x->floats;
    router_logits(cu, e, &plain, NULL, x->n);
}

static bool moe_gemv_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->rows <= HIDDEN_ROWS && !c->moe.experts->routed && c->mlp.down->n_in % 8 == 0 &&
           moe_gemv_fits(cu, c->w, c->mlp.down);
}
static void moe_gemv_run(struct cuda_backend *cu, const struct pick_case *c)
{
    float *n = c->in.gain ? cu->act.norm : NULL;
    if (c->moe.router_x)
        router_logits_of(cu, c->moe.experts, c->moe.router_x);
    else
        router_logits(cu, c->moe.experts, &c->in, n, c->rows);
    moe_gemv(cu, c->moe.experts, n ? n : c->in.x, c->y, c->rows);
}

/* How rows are sorted by expert: full tiles, made from the choice by the kernel that runs them (FULL_LISTED) or not
 * (FULL); tiles of even sizes (EVEN); the same without sorting, as pairs are stored by expert directly (DIRECT). */
enum moe_order { MOE_FULL, MOE_FULL_LISTED, MOE_EVEN, MOE_DIRECT };

/* Routes, with tiles of `width` rows in the work list. */
static struct route_tables moe_lists(struct cuda_backend *cu, const struct pick_case *c, int width,
                                     enum moe_order order)
{
    const struct model_shape *s = &cu->shape;
    struct moe_route_args r = {};
    r.logits = router_selected(cu, c->moe.experts);
    r.rows = c->rows;
    r.parts = 1;
    r.rule = c->moe.experts->rule;
    r.width = width;
    r.even = order >= MOE_EVEN;
    r.t = moe_route_tables(cu);
    r.weight = cu->routing.weight;
    if (order == MOE_DIRECT) {
        int pairs_most = s->max_tokens * s->n_expert_used;
        r.t.lists = r.t.places + c->moe.router->n_out + pairs_most / MOE_ROUTE_MIN_TILE + 1;
        r.t.done = r.t.lists + c->moe.router->n_out * r.t.room;
    }
    struct pick_case route = {};
    route.rows = c->rows;
    route.w = c->moe.router;
    route.x = c->moe.router_x ? c->moe.router_x : c->x;
    route.routing.experts = c->moe.experts;
    route.routing.args = &r;
    route.routing.listed = order == MOE_FULL_LISTED;
    if (c->moe.experts->routed)
        moe_route(cu, r);
    else
        pick_run(cu, PICK_ROUTER, &route, N_STAGES);
    rows_to_fp16(cu, c->x);
    return r.t;
}

/* fp16 sums are added by the norm that reads the stream. Exception: rows of which other processes hold
 * some experts, since their sums are added first. */
static void moe_sum(struct cuda_backend *cu, const struct pick_case *c, bool narrow)
{
    int used = c->moe.experts->rule.used;
    struct expert_sum sum = {(const uint16_t *)cu->mlp.expert_out,
                             cu->routing.weight,
                             c->y,
                             c->rows,
                             used,
                             c->mlp.down->n_out,
                             c->moe.experts->adds};
    if (narrow && c->moe.experts->rule.spread) {
        resid_sum_some(cu, sum);
    } else if (narrow) {
        c->stream->add = ADD_EXPERTS;
        c->stream->experts = sum;
    } else {
        resid_sum_floats(cu, c->y, c->rows, used, c->mlp.down->n_out, c->moe.experts->rule.spread,
                         c->moe.experts->adds);
    }
}

static int moe_tiles(const struct cuda_backend *cu, const struct pick_case *c, int width)
{
    (void)cu;
    return moe_route_tiles(c->rows, c->moe.experts->rule.used, c->moe.router->n_out, width);
}
/* Rows of an entry: sixteen if shared memory allows, else eight; 0: neither. */
static int moe_grouped_width(const struct cuda_backend *cu, const struct pick_case *c)
{
    int pairs = c->rows * c->moe.experts->rule.used;
    for (int width = 16; width >= 8 && c->rows <= LIST_ROWS; width /= 2)
        if (moe_grouped_fits(cu, c->w, c->mlp.down, pairs, moe_tiles(cu, c, width), width))
            return width;
    return 0;
}
/* Of the rows of eight or fewer: whether moe_grouped is not faster. */
static bool moe_short_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return !moe_is_wide_mxfp4(c) || c->rows <= 5 || !moe_grouped_width(cu, c);
}
static bool moe_grouped_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return moe_grouped_width(cu, c) > 0;
}
static void moe_grouped_run(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = moe_grouped_width(cu, c);
    bool narrow = c->mlp.down->n_out % 4 == 0;
    struct route_tables t = moe_lists(cu, c, width, MOE_FULL_LISTED);
    moe_grouped(cu, c->moe.experts, &t, c->rows * c->moe.experts->rule.used,
                moe_tiles(cu, c, width), width, narrow);
    moe_sum(cu, c, narrow);
}

/* Gate and up (i = 0), then down, over a work list. */
static struct gemm_args moe_args(const struct cuda_backend *cu, const struct pick_case *c,
                                 const struct route_tables &t, int i, bool narrow)
{
    struct gemm_args p = pick_ffn_args(cu, c, i);
    p.route = t;
    p.moe = true;
    p.used = c->moe.experts->rule.used;
    if (i) {
        p.y = cu->mlp.expert_out;
        p.sorted_in = true;
        p.narrow = narrow;
    }
    return p;
}

static bool moe_is_narrow(const struct pick_case *c)
{
    return c->mlp.down->n_out % 4 == 0 && c->mlp.down->n_seg == 1;
}
/* From fourteen rows an expert on (96 rows of gpt-oss: 3 % slower, 128: 9 % faster), a tile's conversion to fp16 costs
 * less than decoding it again for every eight rows. moe_grouped has room for sixteen rows of Q4_K and Q6_K, and needs
 * fewer instructions for those. */
static bool moe_persistent_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->rows > LIST_ROWS ||
           (moe_grouped_width(cu, c) < 16 &&
            c->rows * c->moe.experts->rule.used >= 14 * c->moe.router->n_out);
}
static bool moe_persistent_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return moe_is_narrow(c) && c->rows > 64 && gemm_persistent_suits(cu, c->w, c->mlp.down);
}
static void moe_persistent(struct cuda_backend *cu, const struct pick_case *c)
{
    int pairs = c->rows * c->moe.experts->rule.used;
    int width = gemm_persistent_expert_rows(pairs, c->moe.router->n_out);
    struct route_tables t = moe_lists(cu, c, width, MOE_DIRECT);
    gemm_persistent_experts(cu, moe_args(cu, c, t, 0, false), moe_args(cu, c, t, 1, true), width);
    moe_sum(cu, c, true);
}
static void moe_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    bool narrow = moe_is_narrow(c);
    struct route_tables t = moe_lists(cu, c, WGMMA_ROWS, c->rows > 64 ? MOE_DIRECT : MOE_EVEN);
    for (int i = 0; i < 2; i++)
        gemm_wgmma(cu, moe_args(cu, c, t, i, narrow), !i, moe_tiles(cu, c, WGMMA_ROWS));
    moe_sum(cu, c, narrow);
}

/* The block width: twice the average number of rows per expert. Both products use one work list. */
static int moe_width(const struct cuda_backend *cu, const struct pick_case *c, bool mma)
{
    if (cu->exact && !mma)
        return SPLITK_WIDTH;
    int spread = 2 * ceil_div(c->rows * c->moe.experts->rule.used, c->moe.router->n_out);
    spread = c->rows <= 8 || spread > c->rows ? c->rows : spread;
    if (c->w->set != SET_K || c->mlp.down->set != SET_K)
        return mma ? 64 : 16;
    int a = pick_tile_width(c->w, spread, mma), b = pick_tile_width(c->mlp.down, spread, mma);
    return a < b ? a : b;
}
static void moe_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = moe_width(cu, c, true);
    struct route_tables t = moe_lists(cu, c, width, MOE_FULL);
    for (int i = 0; i < 2; i++)
        gemm_mma(cu, moe_args(cu, c, t, i, false), !i, width, moe_tiles(cu, c, width));
    moe_sum(cu, c, false);
}
static bool moe_one_stream(const struct cuda_backend *cu, const struct pick_case *c, int i)
{
    struct gemm_args p = pick_ffn_args(cu, c, i);
    p.moe = true;
    return gemm_stream_fits(cu, p, !i, moe_width(cu, c, false));
}
static void moe_stream(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = moe_width(cu, c, false), tiles = moe_tiles(cu, c, width);
    struct route_tables t = moe_lists(cu, c, width, MOE_FULL);
    for (int i = 0; i < 2; i++) {
        struct gemm_args p = moe_args(cu, c, t, i, false);
        if (moe_one_stream(cu, c, i))
            gemm_stream(cu, p, !i, width, tiles);
        else
            gemm_splitk(cu, p, !i, width, tiles);
    }
    moe_sum(cu, c, false);
}

/*
 * router: logits, choice and work list
 */
static bool router_choose_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->routing.listed && !c->routing.experts->give && router_choose_fits(cu, c->w);
}
static void router_choose_run(struct cuda_backend *cu, const struct pick_case *c)
{
    router_choose(cu, c->w, c->routing.args->rule, &c->routing.args->t, c->x->floats, c->rows);
    moe_grouped_route(cu, &c->routing.args->t, c->routing.args->rule, c->rows,
                      c->routing.args->width);
}
static void logits_row(struct cuda_backend *cu, const struct pick_case *c)
{
    router_row(cu, c->w, &c->in, c->y, c->rows);
}
static void logits_block(struct cuda_backend *cu, const struct pick_case *c)
{
    router_block(cu, c->w, &c->in, c->y, c->rows);
}
static void router_tensor(struct cuda_backend *cu, const struct pick_case *c)
{
    c->routing.args->parts = c->w->n_kt;
    router_rows(cu, c->w, c->x->floats, c->rows);
    router_select(cu, c->routing.experts, c->w->n_kt, c->rows);
    if (c->routing.experts->give)
        c->routing.args->parts = 1;
    moe_route(cu, *c->routing.args);
}
static void router_plain(struct cuda_backend *cu, const struct pick_case *c)
{
    router_logits_of(cu, c->routing.experts, c->x);
    moe_route(cu, *c->routing.args);
}

/*
 * away: where experts in host memory are computed in this step. See moe/stream.h
 */
static bool away_can_copy(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)c;
    return stream_can(cu);
}
static bool away_copies_pay(const struct cuda_backend *cu, const struct pick_case *c)
{
    return stream_pays(cu, c->rows);
}
static void away_copied(struct cuda_backend *cu, const struct pick_case *c)
{
    stream_choose(cu, c->forced);
}

/* name, op, formats, rows from, to (0: no end), needs, takes, pays, fits, run */
static const struct cuda_pick rows[] = {
    {"moe_gemv_product", PICK_MOE, ANY, 1, 1, NEEDS_NOTHING, TAKES_PRODUCT, NULL, moe_product_fits,
     moe_product},
    {"moe_quad_records", PICK_MOE, CODES, 3, 16, NEEDS_NOTHING, TAKES_NORM, moe_quad_records_pay,
     moe_quad_records_fit, moe_quad_records},
    {"moe_few", PICK_MOE, CODES, 3, 8, NEEDS_NOTHING, TAKES_NORM, moe_short_pays, moe_few_suits,
     moe_few_run},
    {"moe_gemv", PICK_MOE, ANY, 1, 8, NEEDS_NOTHING, TAKES_NORM, moe_short_pays, moe_gemv_suits,
     moe_gemv_run},
    {"moe_persistent",
     PICK_MOE,
     CODES,
     65,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     moe_persistent_pays,
     moe_persistent_fits,
     moe_persistent,
     {CLASS_WGMMA, 65, INT_MAX}},
    {"moe_grouped", PICK_MOE, CODES, 1, 256, NEEDS_NOTHING, TAKES_ROWS, NULL, moe_grouped_suits,
     moe_grouped_run},
    {"moe_wgmma",
     PICK_MOE,
     FAST,
     257,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     NULL,
     pick_ffn_wgmma_fits,
     moe_wgmma,
     {CLASS_WGMMA, 1, 0}},
    {"moe_mma",
     PICK_MOE,
     ANY,
     257,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     pick_pair_mma_fits,
     moe_mma,
     {CLASS_CHUNKS, 1, 0}},
    {"moe_stream",
     PICK_MOE,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     moe_stream,
     {CLASS_SPLITK, 1, 0}}, /* or splitk, product by product */

    {"router_choose", PICK_ROUTER, ANY, 33, 256, NEEDS_NOTHING, TAKES_ROWS, NULL,
     router_choose_suits, router_choose_run},
    {"router_tensor",
     PICK_ROUTER,
     ANY,
     257,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     router_tensor,
     {CLASS_OWN, 1, 0}},
    {"router_plain", PICK_ROUTER, ANY, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, NULL, router_plain},

    {"router_row", PICK_LOGITS, ANY, 1, 4, NEEDS_NOTHING, TAKES_ROWS, NULL, NULL, logits_row},
    {"router_block",
     PICK_LOGITS,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     logits_block,
     {CLASS_OWN, 1, 0}},

    {"away_copied", PICK_AWAY, ANY, 1, 0, NEEDS_NOTHING, TAKES_ROWS, away_copies_pay, away_can_copy,
     away_copied},
    {"away_hosted", PICK_AWAY, ANY, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, NULL, NULL},
};
const struct pick_table pick_experts = {rows, (int)(sizeof rows / sizeof *rows)};
