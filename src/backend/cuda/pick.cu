/*
 * Which kernel a product takes.
 */
#include "backend/cuda/rows.cuh"

enum { MID_ROWS = 256 };
/* From so many rows on gemm_wgmma.cu takes a product, or a head; experts of more, and router.cu
 * their router, or their routing. */
enum { WGMMA_FROM = 33, WGMMA_HEAD_FROM = 17, WGMMA_MOE_FROM = LIST_ROWS + 1 };
enum { ROUTER_FROM = LIST_ROWS + 1, CHOOSE_FROM = 33 };

/* Rows of the step a block takes when `rows` come its way: see gemm_splitk_pick and
 * gemm_mma_pick. */
static int tile_width(const struct matrix *w, int rows, bool mid)
{
    if (mid)
        return w->set != SET_K ? 16 : rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
    return w->set != SET_K || rows <= 64 ? 64 : 128;
}

/* Whether a product goes through gemm_splitk.cu and gemm_stream.cu: few rows, or too little
 * shared memory for pick.cu's blocks (most GPUs but the A100 and its successors in data
 * centres). */
static bool is_splitk(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows <= MID_ROWS || !gemm_mma_fits(cu, w);
}

static void gemm(struct cuda_backend *cu, const struct gemm_args &p, bool pair, bool mid, bool wide,
                 int width, int y)
{
    if (wide) {
        if (p.moe || p.rows <= PANEL_ROWS || !gemm_persistent(cu, p, pair))
            gemm_wgmma(cu, p, pair, y);
        return;
    }
    if (mid && gemm_stream(cu, p, pair, width, y))
        return;
    if (mid)
        gemm_splitk(cu, p, pair, width, y);
    else
        gemm_mma(cu, p, pair, width, y);
}

/* Everything but where results go. */
static struct gemm_args args_in(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = {};
    p.w = *w;
    p.x = cu->half_in;
    p.x_scale = cu->half_scale;
    p.ldx = w->n_kt * TILE_K;
    p.rows = rows;
    p.unscale = 1.0f;
    return p;
}

static struct gemm_args args_hidden(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = args_in(cu, w, rows);
    p.x = cu->half_hidden;
    p.x_scale = NULL;
    p.unscale = 1.0f / HIDDEN_SCALE;
    return p;
}

void pick_linear(struct cuda_backend *cu, const struct matrix *w, const float *x, float *y,
                 int rows)
{
    if (cu->panels_of == x && cu->panels_rows == rows && gemm_cluster(cu, w, y, rows))
        return;
    if (cu->records_of == x && cu->panels_rows == rows && gemm_few_records(cu, w, y, rows))
        return;
    resid_to_halves(cu, x, rows, w->n_in);
    if (rows < PANEL_FROM && gemm_few_records(cu, w, y, rows))
        return;
    if (rows > FEW_ROWS && gemm_cluster(cu, w, y, rows))
        return;
    if (gemm_few_records(cu, w, y, rows))
        return;
    struct gemm_args p = args_in(cu, w, rows);
    p.y = y;
    p.ldy = w->n_out;
    int wide_from = gemm_few_is_long(w) ? WGMMA_HEAD_FROM : WGMMA_FROM;
    bool mid = is_splitk(cu, w, rows), wide = rows >= wide_from && gemm_wgmma_suits(cu, w, false);
    int width = wide ? WGMMA_ROWS : tile_width(w, rows > 16 && rows <= 48 ? 16 : rows, mid);
    gemm(cu, p, false, mid, wide, width, ceil_div(rows, width));
}

/* Whether a block of gemm_wgmma.cu has whole heads, each of one kind: see struct gemm_heads. */
bool pick_heads_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    const struct shape *s = &cu->shape;
    bool fits = rows > PANEL_ROWS && gemm_wgmma_suits(cu, w, false) && s->head_dim == 128 &&
                s->n_rot == 128 && s->kv_type != DT_F32;
    for (int i = 0; i < w->n_seg; i++)
        fits = fits && w->seg[i].tile0 % 8 == 0 && w->seg[i].rows % 128 == 0;
    return fits;
}

void pick_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct matrix *w,
                const struct step *step, const float *x, float *q)
{
    const struct shape *s = &cu->shape;
    int rows = step->n_tokens;
    resid_to_halves(cu, x, rows, w->n_in);
    struct gemm_args p = args_in(cu, w, rows);
    p.ldy = w->n_out;
    p.heads.set = true;
    p.heads.bf16 = s->kv_type == DT_BF16;
    p.heads.q = q;
    p.heads.k = (uint16_t *)l->kv.k;
    p.heads.v = (uint16_t *)l->kv.v;
    p.heads.q_norm = l->q_norm;
    p.heads.k_norm = l->k_norm;
    p.heads.rope = step->rope;
    p.heads.slot = step->slot;
    p.heads.n_heads = s->n_heads;
    p.heads.n_kv = s->n_kv_heads;
    p.heads.page_len = s->page_len;
    p.heads.eps = s->norm_eps;
    gemm_wgmma(cu, p, false, ceil_div(rows, WGMMA_ROWS));
}

void pick_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
              const float *x, float *y, int rows)
{
    bool mid = is_splitk(cu, gate_up, rows) || is_splitk(cu, down, rows);
    resid_to_halves(cu, x, rows, gate_up->n_in);
    struct gemm_args p = args_in(cu, gate_up, rows);
    p.y_half = cu->half_hidden;
    p.ldy = down->n_kt * TILE_K;
    bool wide = rows >= WGMMA_FROM && gemm_wgmma_suits(cu, gate_up, true) &&
                gemm_wgmma_suits(cu, down, false);
    int width = wide ? WGMMA_ROWS : tile_width(gate_up, rows, mid);
    gemm(cu, p, true, mid, wide, width, ceil_div(rows, width));
    p = args_hidden(cu, down, rows);
    p.y = y;
    p.ldy = down->n_out;
    width = wide ? WGMMA_ROWS : tile_width(down, rows, mid);
    gemm(cu, p, false, mid, wide, width, ceil_div(rows, width));
}

void pick_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
              const struct matrix *down, const float *x, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    struct norm_in plain = {};
    plain.x = x;
    if (moe_quad_fits(cu, gate_up, down, rows)) {
        router_logits(cu, router, &plain, NULL, rows);
        resid_to_halves(cu, x, rows, gate_up->n_in);
        moe_quad(cu, gate_up, down, y, router->n_out, rows);
        return;
    }
    int used = s->n_expert_used, n_expert = router->n_out;
    bool wide = rows >= WGMMA_MOE_FROM && gemm_wgmma_suits(cu, gate_up, true) &&
                gemm_wgmma_suits(cu, down, false);
    /* How many rows an expert gets on average, doubled, says how wide a block should be. */
    bool mid = is_splitk(cu, gate_up, rows) || is_splitk(cu, down, rows);
    int spread = rows <= 8 ? rows : 2 * ceil_div(rows * used, n_expert);
    spread = spread > rows ? rows : spread;
    int width = tile_width(gate_up, spread, mid), w2 = tile_width(down, spread, mid);
    if (gate_up->set != SET_K || down->set != SET_K)
        width = mid ? 16 : 64; /* both products walk one work list */
    else
        width = w2 < width ? w2 : width;
    int n_pairs = rows * used;
    auto fits = [&](int by) {
        return rows <= LIST_ROWS && moe_grouped_fits(cu, gate_up, down, n_pairs,
                                                     moe_route_tiles(rows, used, n_expert, by), by);
    };
    bool stay = wide && down->n_out % 4 == 0 && down->n_seg == 1 &&
                gemm_persistent_suits(cu, gate_up, true) && gemm_persistent_suits(cu, down, false);
    int list_width = fits(16) ? 16 : 8;
    bool listed = fits(list_width);
    width = listed ? list_width
            : stay ? gemm_persistent_expert_rows(n_pairs, n_expert)
            : wide ? WGMMA_ROWS
                   : width;
    struct moe_route_args r = {};
    r.logits = cu->router;
    r.rows = rows;
    r.rule = route_rule_of(s, n_expert);
    r.width = width;
    r.route_here = rows <= 64;
    r.even = wide;
    r.t = moe_route_tables(cu);
    r.weight = cu->route_weight;
    if (wide && !r.route_here) {
        int pairs_most = s->max_tokens * used;
        r.t.lists = r.t.places + n_expert + pairs_most / MOE_ROUTE_MIN_TILE + 1;
        r.t.done = r.t.lists + n_expert * r.t.room;
    }
    if (listed && rows >= CHOOSE_FROM && router_choose(cu, router, &r.t, x, rows))
        moe_grouped_route(cu, &r.t, 0, n_expert, rows, width);
    else {
        bool many = rows >= ROUTER_FROM, one = listed && rows <= LIST_ROUTE_ROWS;
        r.parts = many ? router->n_kt : 1;
        if (many)
            router_rows(cu, router, x, rows);
        else
            router_logits(cu, router, &plain, NULL, rows);
        if (one) /* block routes */
            moe_grouped_route(cu, &r.t, r.parts, n_expert, rows, width);
        else
            moe_route(cu, r);
    }
    resid_to_halves(cu, x, rows, gate_up->n_in);
    int tiles = moe_route_tiles(rows, used, n_expert, width);
    bool narrow = listed && down->n_out % 4 == 0;
    if (listed)
        moe_grouped(cu, gate_up, down, &r.t, n_pairs, tiles, width, narrow);
    else {
        struct gemm_args p = args_in(cu, gate_up, rows);
        p.y_half = cu->half_hidden;
        p.ldy = down->n_kt * TILE_K;
        p.route = r.t;
        p.moe = true;
        p.used = used;
        if (!stay)
            gemm(cu, p, true, mid, wide, width, tiles);
        struct gemm_args q = args_hidden(cu, down, rows);
        q.y = cu->expert_out;
        q.ldy = down->n_out;
        q.route = r.t;
        q.moe = true;
        q.used = used;
        q.sorted_in = true;
        q.narrow = narrow = wide && down->n_out % 4 == 0 && down->n_seg == 1;
        if (stay)
            gemm_persistent_experts(cu, p, q, width);
        else
            gemm(cu, q, false, mid, wide, width, tiles);
    }
    if (narrow) { /* added up by the norm that follows, or by resid_sum */
        struct expert_sum sum = {
            (const uint16_t *)cu->expert_out, cu->route_weight, y, rows, used, down->n_out};
        cu->sum = sum;
        return;
    }
    resid_sum_floats(cu, y, rows, used, down->n_out);
}
