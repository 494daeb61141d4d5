/*
 * Which kernel runs: one ordered table per op, with every threshold of the backend.
 * 1. The first row whose formats, device, rows and `pays` suit the case, and whose kernel fits it,
 *    runs. The last row of an op always fits.
 * 2. `rows` and `pays` are measurements (H200). `fits` is what a kernel can do at all: shapes,
 *    shared memory.
 * 3. STEEL_PICK=name[,name] forces a row wherever its kernel fits, so that tests and benchmarks can
 *    run every row. -name leaves a row out, so that a benchmark can measure its gain over the next.
 * 4. How a kernel splits its work (tiles, warps, stages, k splits) is decided in its own file.
 * 5. In an exact step (cuda_backend.exact) `rows` and `pays` are not read. The first row of the op that offers a
 *    class (struct pick_exact) and can run the case decides; if several rows of that class can, the one with
 *    an end goes first. So a weight's class depends on its format and shape alone: `fits` of such a row must not
 *    read the number of rows. tests/ops/invariant.c compares the bytes.
 * This file has the choice itself and the rows of dense products. The rows of experts and routers are in
 * pick_experts.cu, those of mixers in pick_mixers.cu.
 */
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/core/pick.cuh"
#include "backend/cuda/core/rows.cuh"
#include "backend/cuda/core/host.h"

extern "C" {
#include "base/mem.h"
}

#include <string.h>

/* As many tiles as an output head: long enough to fuse a norm, too long for the batch kernels. */
static bool is_long(const struct matrix *w)
{
    return w->n_tiles >= 2048;
}

/* The weights stay in the L2 while several rows read them one after another. */
static bool stays_in_l2(const struct matrix *w)
{
    return (size_t)w->n_tiles * (size_t)w->n_kt * (size_t)w->max_tile_bytes <= 24 << 20;
}

bool pick_deep(int keys)
{
    return keys > 512;
}

/* The kernels for this many rows read neither panels nor records. */
bool pick_fp16_only(const struct cuda_backend *cu, int rows)
{
    return rows > PANEL_ROWS && !cu->exact;
}

int pick_tile_width(const struct matrix *w, int rows, bool mma)
{
    if (mma)
        return w->set != SET_K || rows <= 64 ? 64 : 128;
    return w->set != SET_K ? 16 : rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
}

struct gemm_args pick_args(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = {};
    p.w = *w;
    p.x = cu->forms.fp16;
    p.x_scale = cu->forms.scale;
    p.ldx = w->n_kt * TILE_K;
    p.rows = rows;
    p.unscale = 1.0f;
    return p;
}

static struct gemm_args args_hidden(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = pick_args(cu, w, rows);
    p.x = cu->mlp.hidden_fp16;
    p.x_scale = NULL;
    p.unscale = 1.0f / HIDDEN_SCALE;
    return p;
}

/*
 * linear: y = x W^T + bias
 */
static bool linear_quad_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_quad_fits(cu, c->w, c->rows);
}
static void linear_quad(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_quad(cu, c->w, &c->in, c->y, c->rows);
}

static bool linear_few_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_few_fits(cu, c->w, c->rows);
}
/* From five rows on a norm kernel that makes records is faster than fragments in every block. */
static bool linear_few_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return is_long(c->w) ||
           (!c->gain.gain && (c->rows <= 4 || !gemm_few_records_fit(cu, c->w, c->rows)));
}
static void linear_few(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_few(cu, c->w, &c->in, c->y, c->rows);
}

static bool linear_gemv_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->w->n_in % 8 == 0;
}
static bool linear_gemv_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->rows == 1 ||
           (stays_in_l2(c->w) && (c->rows < 3 || !gemm_few_fits(cu, c->w, c->rows)));
}
static void linear_gemv(struct cuda_backend *cu, const struct pick_case *c)
{
    gemv_linear(cu, c->w, &c->in, c->y, c->rows);
}

static bool linear_cluster_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_cluster_suits(cu, c->w, c->rows);
}
/* Attention has left its rows as panels. */
static bool linear_has_panels(const struct pick_case *c)
{
    return c->x->panels && !c->x->fp16;
}
static bool linear_records_fit(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_few_records_fit(cu, c->w, c->rows);
}
static bool linear_cluster_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return !is_long(c->w) &&
           (c->rows > 16 || linear_has_panels(c) || !gemm_few_records_fit(cu, c->w, c->rows));
}
static void linear_cluster(struct cuda_backend *cu, const struct pick_case *c)
{
    if (!c->x->panels)
        rows_to_fp16(cu, c->x);
    gemm_cluster(cu, c->w, c->y, c->rows);
}
static bool linear_records_pay(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return !is_long(c->w);
}
static void linear_records(struct cuda_backend *cu, const struct pick_case *c)
{
    if (!c->x->records)
        rows_to_fp16(cu, c->x);
    gemm_few_records(cu, c->w, c->y, c->rows);
}

static struct gemm_args linear_args(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    p.y = c->y;
    p.ldy = c->w->n_out;
    return p;
}
static bool linear_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_wgmma_suits(cu, c->w, false);
}
static bool linear_wgmma_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->rows >= 33 || is_long(c->w);
}
static void linear_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_wgmma(cu, linear_args(cu, c), false, ceil_div(c->rows, WGMMA_ROWS));
}

static bool linear_fp16_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_fp16_suits(cu, c->w);
}
static bool linear_fp16_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_fp16_tiles(c->w, c->rows) > cu->n_sm; /* otherwise no block has a second tile */
}
static void linear_fp16(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_fp16(cu, linear_args(cu, c));
}

void pick_wgmma(struct cuda_backend *cu, const struct gemm_args &p)
{
    if (pick_fp16_only(cu, p.rows) && gemm_fp16_suits(cu, &p.w) &&
        gemm_fp16_tiles(&p.w, p.rows) > cu->n_sm)
        gemm_fp16(cu, p);
    else
        gemm_wgmma(cu, p, false, ceil_div(p.rows, WGMMA_ROWS));
}

static bool linear_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_mma_fits(cu, c->w);
}
static void linear_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = pick_tile_width(c->w, c->rows, true);
    gemm_mma(cu, linear_args(cu, c), false, width, ceil_div(c->rows, width));
}

/* Rows of a tile that have the arithmetic of CLASS_CHUNKS. */
static int chunks_width(const struct matrix *w)
{
    return w->set == SET_K ? 32 : 16;
}

/* Two tiles of 16 rows instead of one of 32: more blocks. */
static int linear_width(const struct cuda_backend *cu, const struct pick_case *c)
{
    if (cu->exact)
        return chunks_width(c->w);
    return pick_tile_width(c->w, c->rows > 16 && c->rows <= 48 ? 16 : c->rows, false);
}
static bool linear_stream_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    return gemm_stream_fits(cu, p, false, linear_width(cu, c));
}
static bool linear_stream_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    /* Enough blocks for the GPU; fp16 tiles are so large that splits of k read them faster. */
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    return c->w->seg[0].kind != TILE_F16 &&
           gemm_stream_blocks(cu, p, false, linear_width(cu, c)) >= cu->n_sm * 3 / 4;
}
static void linear_stream(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = linear_width(cu, c);
    gemm_stream(cu, linear_args(cu, c), false, width, ceil_div(c->rows, width));
}
static void linear_splitk(struct cuda_backend *cu, const struct pick_case *c)
{
    int width = cu->exact ? (int)SPLITK_WIDTH : linear_width(cu, c);
    gemm_splitk(cu, linear_args(cu, c), false, width, ceil_div(c->rows, width));
}

/*
 * ffn: y = act(x Wg^T, x Wu^T) Wd^T. Each of the two products may use another kernel than the row's
 * name says where that pays, unless the row is forced.
 */
static bool ffn_gemv_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->rows <= HIDDEN_ROWS && c->w->n_in % 8 == 0 && c->mlp.down->n_in % 8 == 0;
}
static bool ffn_gemv_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->rows == 1 || (stays_in_l2(c->w) && stays_in_l2(c->mlp.down));
}
static void ffn_gemv(struct cuda_backend *cu, const struct pick_case *c)
{
    gemv_ffn(cu, c->w, c->mlp.down, c->mlp.act, &c->in, c->y, c->rows);
}

/* Gate and up (i = 0), then down. */
struct gemm_args pick_ffn_args(const struct cuda_backend *cu, const struct pick_case *c, int i)
{
    struct gemm_args p = i ? args_hidden(cu, c->mlp.down, c->rows) : pick_args(cu, c->w, c->rows);
    if (i) {
        p.y = c->y;
        p.ldy = c->mlp.down->n_out;
    } else {
        p.y_fp16 = cu->mlp.hidden_fp16;
        p.act = c->mlp.act;
        p.ldy = c->mlp.down->n_kt * TILE_K;
    }
    return p;
}

bool pick_ffn_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_wgmma_suits(cu, c->w, true) && gemm_wgmma_suits(cu, c->mlp.down, false);
}
static void ffn_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    for (int i = 0; i < 2; i++)
        gemm_wgmma(cu, pick_ffn_args(cu, c, i), !i, ceil_div(c->rows, WGMMA_ROWS));
}

bool pick_pair_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_mma_fits(cu, c->w) && gemm_mma_fits(cu, c->mlp.down);
}
static void ffn_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    for (int i = 0; i < 2; i++) {
        int width = pick_tile_width(i ? c->mlp.down : c->w, c->rows, true);
        gemm_mma(cu, pick_ffn_args(cu, c, i), !i, width, ceil_div(c->rows, width));
    }
}

static void ffn_splitk(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    for (int i = 0; i < 2; i++) {
        int width =
            cu->exact ? (int)SPLITK_WIDTH : pick_tile_width(i ? c->mlp.down : c->w, c->rows, false);
        gemm_splitk(cu, pick_ffn_args(cu, c, i), !i, width, ceil_div(c->rows, width));
    }
}

/*
 * ungated: y = act(x Wu^T) Wd^T
 */
/* Hidden units stay fp16, so adapters could not be applied in between. */
static bool ungated_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->w->n_seg == 1 && !lora_changes(cu, c->w) && !lora_changes(cu, c->mlp.down);
}
static bool ungated_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return ungated_fits(cu, c) && gemm_wgmma_suits(cu, c->w, false) &&
           gemm_wgmma_suits(cu, c->mlp.down, false);
}
static void ungated_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    for (int i = 0; i < 2; i++)
        pick_wgmma(cu, pick_ffn_args(cu, c, i));
}
static void ungated_linear(struct cuda_backend *cu, const struct pick_case *c)
{
    struct rows h = rows_of(cu->encoder->hidden, c->rows, c->w->n_out);
    struct pick_case up = {}, down = {};
    up.rows = down.rows = c->rows;
    up.w = c->w;
    up.x = c->x;
    up.y = h.floats;
    pick_run(cu, PICK_LINEAR, &up, N_STAGES);
    encoder_act(cu, c->mlp.act, h.floats, h.n, h.width);
    down.w = c->mlp.down;
    down.x = &h;
    down.y = c->y;
    pick_run(cu, PICK_LINEAR, &down, N_STAGES);
}

/* name, op, formats, rows from, to (0: no end), needs, takes, pays, fits, run */
static const struct cuda_pick products[] = {
    {"gemm_quad", PICK_LINEAR, CODES, 2, 4, NEEDS_NOTHING, TAKES_NORM, NULL, linear_quad_fits,
     linear_quad},
    {"gemm_few", PICK_LINEAR, CODES, 3, 8, NEEDS_NOTHING, TAKES_NORM, linear_few_pays,
     linear_few_fits, linear_few},
    {"gemv", PICK_LINEAR, ANY, 1, 4, NEEDS_NOTHING, TAKES_NORM, linear_gemv_pays, linear_gemv_fits,
     linear_gemv},
    {"gemm_cluster", PICK_LINEAR, K, 9, 256, NEEDS_WGMMA, TAKES_ROWS, linear_cluster_pays,
     linear_cluster_fits, linear_cluster},
    {"gemm_few_records", PICK_LINEAR, CODES, 1, 32, NEEDS_NOTHING, TAKES_ROWS, linear_records_pay,
     linear_records_fit, linear_records},
    {"gemm_fp16", PICK_LINEAR, FAST, 257, 0, NEEDS_WGMMA, TAKES_ROWS, linear_fp16_pays,
     linear_fp16_fits, linear_fp16},
    {"gemm_wgmma",
     PICK_LINEAR,
     FAST,
     17,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     linear_wgmma_pays,
     linear_wgmma_fits,
     linear_wgmma,
     {CLASS_WGMMA, 1, 0}},
    {"gemm_mma",
     PICK_LINEAR,
     ANY,
     257,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     linear_mma_fits,
     linear_mma,
     {CLASS_CHUNKS, 1, 0}},
    {"gemm_stream",
     PICK_LINEAR,
     FAST,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     linear_stream_pays,
     linear_stream_fits,
     linear_stream,
     {CLASS_CHUNKS, 1, 64}},
    {"gemm_splitk",
     PICK_LINEAR,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     linear_splitk,
     {CLASS_SPLITK, 1, 0}},

    {"ffn_gemv", PICK_FFN, ANY, 1, 4, NEEDS_NOTHING, TAKES_NORM, ffn_gemv_pays, ffn_gemv_fits,
     ffn_gemv},
    {"ffn_wgmma",
     PICK_FFN,
     FAST,
     33,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     NULL,
     pick_ffn_wgmma_fits,
     ffn_wgmma,
     {CLASS_WGMMA, 1, 0}},
    {"ffn_mma",
     PICK_FFN,
     ANY,
     257,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     pick_pair_mma_fits,
     ffn_mma,
     {CLASS_CHUNKS, 1, 0}},
    {"ffn_splitk",
     PICK_FFN,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     ffn_splitk,
     {CLASS_SPLITK, 1, 0}},

    {"ungated_wgmma", PICK_UNGATED, FAST, 33, 0, NEEDS_WGMMA, TAKES_ROWS, NULL, ungated_wgmma_fits,
     ungated_wgmma},
    {"ungated_linear",
     PICK_UNGATED,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     ungated_linear,
     {CLASS_OWN, 1, 0}}, /* linear, twice */
};
static const struct pick_table pick_products = {products,
                                                (int)(sizeof products / sizeof *products)};
/* The parts of the whole table. */
static const struct pick_table *const parts[] = {&pick_products, &pick_experts, &pick_mixers};
enum { N_PARTS = 3 };

/* Row i of the whole table; NULL after the last. */
static const struct cuda_pick *pick_at(int i)
{
    for (int part = 0; part < N_PARTS; i -= parts[part++]->n)
        if (i < parts[part]->n)
            return &parts[part]->rows[i];
    return NULL;
}
/* The place of a row in it. */
static int pick_place(const struct cuda_pick *p)
{
    int at = 0;
    for (int part = 0; part < N_PARTS; at += parts[part++]->n)
        if (p >= parts[part]->rows && p < parts[part]->rows + parts[part]->n)
            return at + (int)(p - parts[part]->rows);
    CHECK(false, "a row of no table");
    return 0;
}

/* Whether `name` is in the list "a,b,c"; out: whether "-name" is. */
static bool is_listed(const char *list, const char *name, bool out)
{
    size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) {
        const char *at = p + (out && *p == '-');
        if (out == (at > p) && !strncmp(at, name, n) && (at[n] == ',' || !at[n]))
            return true;
    }
    return false;
}

static bool has_needs(const struct cuda_backend *cu, const struct cuda_pick *p)
{
    return p->needs == NEEDS_WGMMA          ? cu->can.wgmma
           : p->needs == NEEDS_GRID_BARRIER ? cu->can.grid_barrier
                                            : true;
}

/* Whether the kernel can run the case. */
static bool can_run(const struct cuda_backend *cu, const struct cuda_pick *p,
                    const struct pick_case *c)
{
    bool router = p->op == PICK_ROUTER || p->op == PICK_LOGITS;
    const struct matrix *all[] = {router ? NULL : c->w, c->mlp.down};
    for (int i = 0; i < 2; i++)
        if (all[i] && !(p->formats >> all[i]->set & 1))
            return false;
    return has_needs(cu, p) && (!p->fits || p->fits(cu, c));
}

/* Whether a row serves any number of rows in an exact step, and so offers its class. */
static bool offers_class(const struct cuda_pick *p)
{
    return p->exact.is != CLASS_NONE && p->exact.from == 1 && !p->exact.to;
}

/* The row of an exact step: see rule 5. */
static const struct cuda_pick *find_exact(const struct cuda_backend *cu, enum pick_op op,
                                          const struct pick_case *c)
{
    const struct cuda_pick *p, *offers = NULL;
    for (int i = 0; !offers && (p = pick_at(i)) != NULL; i++)
        if (p->op == op && offers_class(p) && can_run(cu, p, c))
            offers = p;
    CHECK(offers, "no exact kernel for op %d", (int)op);
    for (int i = 0; offers->exact.is != CLASS_OWN && (p = pick_at(i)) != NULL; i++)
        if (p->op == op && p->exact.is == offers->exact.is && c->rows >= p->exact.from &&
            p->exact.to && c->rows <= p->exact.to && can_run(cu, p, c))
            return p;
    return offers;
}

const struct cuda_pick *pick_find(const struct cuda_backend *cu, enum pick_op op,
                                  struct pick_case *c)
{
    const struct cuda_pick *p;
    c->forced = true;
    for (int i = 0; cu->picks.forced && (p = pick_at(i)) != NULL; i++)
        if (p->op == op && is_listed(cu->picks.forced, p->name, false) && can_run(cu, p, c) &&
            (!cu->exact || offers_class(p)))
            return p;
    c->forced = false;
    if (cu->exact)
        return find_exact(cu, op, c);
    const struct cuda_pick *left_out = NULL; /* used if no other row suits */
    for (int i = 0; (p = pick_at(i)) != NULL; i++) {
        if (p->op != op || c->rows < p->from || (p->to && c->rows > p->to) ||
            (p->pays && !p->pays(cu, c)) || !can_run(cu, p, c))
            continue;
        if (!is_listed(cu->picks.forced, p->name, true))
            return p;
        left_out = p;
    }
    CHECK(left_out, "no kernel for %d rows", c->rows);
    return left_out;
}

void pick_go(struct cuda_backend *cu, const struct cuda_pick *p, const struct pick_case *c)
{
    cu->picks.count[pick_place(p)]++;
    if (p->run)
        p->run(cu, c);
}

void pick_input(struct cuda_backend *cu, const struct cuda_pick *p, struct pick_case *c)
{
    struct resid *r = c->made ? NULL : c->stream;
    bool norm = r && c->gain.gain;
    if (norm && p->takes == TAKES_PRODUCT) {
        c->in.gain = c->gain.gain;
        c->in.eps = c->gain.eps;
        return;
    }
    if (norm && p->takes == TAKES_NORM && c->rows <= NORM_ROWS && resid_adds(r) && !c->gain.layer) {
        c->in = resid_norm_in(cu, r, c->gain);
        return;
    }
    if (norm)
        *c->x = resid_norm(cu, r, c->gain,
                           p->op == PICK_MOE || p->takes == TAKES_NORM); /* a router reads floats */
    else if (r)
        *c->x = resid_plain(cu, r);
    if (p->takes == TAKES_NORM) {
        rows_to_floats(cu, c->x);
        c->in.x = c->x->floats;
    }
}

void pick_run(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, enum stage stage)
{
    bool changed = op == PICK_LINEAR && lora_changes(cu, c->w);
    if (changed) {
        lora_input(cu, c);
        c->stream = NULL;
    }
    const struct cuda_pick *p = pick_find(cu, op, c);
    pick_input(cu, p, c);
    if (stage != N_STAGES)
        step_mark(cu);
    if (changed)
        lora_before(cu, c->w, c->x);
    pick_go(cu, p, c);
    if (changed)
        lora_add(cu, c->w, c->y, c->w->n_out);
    if (stage != N_STAGES)
        step_mark_end(cu, stage);
}

bool pick_info(struct backend *be, int i, struct pick_info *out)
{
    static const char *const ops[] = {
        "linear",        "qkv",           "output", "ffn",          "moe",          "router",
        "logits",        "decode",        "prompt", "delta_decode", "delta_prompt", "heads",
        "latent_decode", "latent_prompt", "listed", "encode",       "ungated",      "away"};
    const struct cuda_backend *cu = cuda_self(be);
    const struct cuda_pick *p = pick_at(i);
    if (!p)
        return false;
    struct pick_info info = {};
    info.name = p->name;
    info.op = ops[p->op];
    info.formats = p->op == PICK_ROUTER || p->op == PICK_LOGITS ? "F32"
                   : !p->formats                                ? ""
                   : p->formats == ANY                          ? "any"
                   : p->formats == FAST                         ? "codes F16 F8 NF4 FP4"
                   : p->formats == CODES                        ? "codes"
                                                                : "Q4_K Q6_K";
    info.device = p->needs == NEEDS_WGMMA ? "wgmma" : p->needs == NEEDS_GRID_BARRIER ? "alone" : "";
    info.rows_from = p->from;
    info.rows_to = p->to;
    info.available = has_needs(cu, p);
    info.runs = cu->picks.count[i];
    *out = info;
    return true;
}

void pick_force(struct backend *be, const char *names)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_forget_recordings(cu);
    mem_free(cu->picks.forced);
    cu->picks.forced = names && *names ? mem_strdup(names) : NULL;
}
