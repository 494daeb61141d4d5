/*
 * Which kernel runs: one ordered table per op, with every threshold of the backend.
 * 1. The first row whose number of rows suits the case, and whose kernel fits it, runs; if none suits, the last that fits.
 * 2. STEEL_PICK=name[,name] forces a row wherever its kernel fits; -name leaves a row out.
 */
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"

#include <string.h>

enum vulkan_op { OP_LINEAR, OP_MOE };

struct pick {
    const char *name;
    enum vulkan_op op;
    int from, to;                                                  /* input rows; to 0 = no end */
    bool (*fits)(const struct vulkan *v, const struct product *p); /* NULL = always */
    const char *formats, *device;
    void (*run)(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                struct product_args *args);
};

/* Rows that a workgroup computes at once. */
enum { GEMV_ROWS = 8, GEMM_TILE = 64 };

/* gemm_coop: outputs of a tile, and the shared memory that tiles of 128 rows take. */
enum { COOP_OUTS = 128, COOP_SHARED = 40960 };

static void run_few(struct vulkan *v, enum vulkan_kernel k, const struct product *p,
                    const struct vulkan_segment *g, const struct product_args *args)
{
    uint32_t each = p->chosen || p->cycle ? 1 : p->rows < GEMV_ROWS ? p->rows : GEMV_ROWS;
    /* More outputs share inputs where there are enough for all of a large GPU's multiprocessors. */
    uint32_t fours = g->rows >= 8192 || p->chosen, outs = fours ? 4 : 2;
    uint32_t n = (g->rows + outs - 1) / outs;
    uint32_t x = n < v->max_groups[0] ? n : v->max_groups[0];
    vulkan_run(v, k, g->format, each + 8 * fours, args, sizeof *args, x, (n + x - 1) / x,
               (p->rows + each - 1) / each);
}

static void run_gemv(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                     struct product_args *args)
{
    run_few(v, KERNEL_GEMV, p, g, args);
}

bool vulkan_coop_fits(const struct vulkan *v, const struct vulkan_segment *g)
{
    return v->coop && !g->perm && g->format != FORMAT_F32 && g->format != FORMAT_BF16 &&
           g->format != FORMAT_F8_E4M3;
}

static bool coop_fits(const struct vulkan *v, const struct product *p)
{
    const struct vulkan_weight *m = vulkan_matrix(p->w);
    bool fits = p->chosen || (vulkan_ld(p->w->n_in) <= v->s.ld_half &&
                              p->rows <= (uint32_t)v->bounds.max_tokens);
    for (int i = 0; i < m->n_seg; i++)
        fits = fits && vulkan_coop_fits(v, &m->seg[i]);
    return fits;
}

/* Rows of several experts: the last tile of each may have few. */
static bool grouped_fits(const struct vulkan *v, const struct product *p)
{
    (void)v;
    return p->chosen != 0;
}

static bool grouped_coop_fits(const struct vulkan *v, const struct product *p)
{
    return p->chosen && coop_fits(v, p);
}

static bool dot_tiles_fits(const struct vulkan *v, const struct product *p)
{
    return p->chosen && vulkan_dot_fits(v, p);
}

/* The tiles of a product over experts, which are listed once a layer. Returns a bound of their number. */
uint32_t vulkan_group(struct vulkan *v, const struct product *p, struct product_args *args,
                      uint32_t tile)
{
    uint32_t own = (uint32_t)p->w->n_expert, most = p->rows / tile + own;
    const struct group_args g = {p->chosen,       v->s.groups,  p->rows, own,
                                 p->expert_first, 4 + 3 * most, tile};
    if (v->grouped != tile) {
        vulkan_apart(v, false);
        vulkan_run(v, KERNEL_GROUP, 0, 0, &g, sizeof g, 1, 1, 1);
        vulkan_apart(v, true);
    }
    v->grouped = tile;
    args->chosen = v->s.groups;
    return most < p->rows ? most : p->rows;
}

/* Tiles of `outs` outputs of `tile` rows. shape: the kernel's second constant. */
static void run_tiles(struct vulkan *v, enum vulkan_kernel k, const struct product *p,
                      const struct vulkan_segment *g, struct product_args *args, uint32_t outs,
                      uint32_t tile, uint32_t shape)
{
    uint32_t n = (g->rows + outs - 1) / outs;
    uint32_t x = n < v->max_groups[0] ? n : v->max_groups[0];
    uint32_t tiles = p->chosen ? vulkan_group(v, p, args, tile) : (p->rows + tile - 1) / tile;
    vulkan_run(v, k, g->format, shape, args, sizeof *args, x, (n + x - 1) / x, tiles);
}

static void run_gemm(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                     struct product_args *args)
{
    run_tiles(v, KERNEL_GEMM, p, g, args, GEMM_TILE, GEMM_TILE, p->chosen != 0);
}

/* The inputs as fp16, converted once for all segments. */
static void put_half(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                     struct product_args *args)
{
    uint32_t ld = vulkan_ld(p->w->n_in), rows = p->rows / p->x_div;
    if (g == vulkan_matrix(p->w)->seg) {
        const struct half_args half = {p->x,   v->s.half, v->s.half_scale, (uint)p->w->n_in, rows,
                                       p->ldx, ld};
        vulkan_apart(v, false);
        vulkan_run_flat(v, KERNEL_HALF, 0, 0, &half, sizeof half, rows);
        vulkan_apart(v, true);
    }
    args->x = v->s.half;
    args->ldx = ld;
    args->scale = v->s.half_scale;
}

static void run_coop(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                     struct product_args *args)
{
    put_half(v, p, g, args);
    /* rows of an expert, if they were divided evenly */
    uint32_t mean = p->chosen ? p->rows / (uint32_t)p->w->n_expert : p->rows;
    uint32_t shape = mean <= 32 ? 0 : mean <= 64 || p->chosen || v->shared < COOP_SHARED ? 1 : 2;
    run_tiles(v, KERNEL_GEMM_COOP, p, g, args, COOP_OUTS, 32 << shape,
              shape + 4 * (p->chosen != 0));
}

/* gemm_coop_few: rows and outputs of a tile. */
enum { FEW_TILE = 32 };

static bool few_coop_fits(const struct vulkan *v, const struct product *p)
{
    return coop_fits(v, p) && v->shared >= COOP_SHARED;
}

static bool grouped_few_fits(const struct vulkan *v, const struct product *p)
{
    return p->chosen && few_coop_fits(v, p);
}

static void run_coop_few(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                         struct product_args *args)
{
    put_half(v, p, g, args);
    run_tiles(v, KERNEL_GEMM_COOP_FEW, p, g, args, FEW_TILE, FEW_TILE, p->chosen != 0);
}

/* Rows of a product over experts are counted per eight experts: from RUN on experts have several rows often enough that
 * listing them pays; from MANY on tiles of 64 are more full than empty. */
enum { EIGHT = 8, RUN = 4, MANY = 4 * EIGHT };

/* Rows on cooperative matrices come after others of the same rows, so they run only if they are forced: they have not been
 * measured on a GPU yet. */
static const struct pick table[] = {
    {"gemv_dot", OP_LINEAR, 1, 48, vulkan_dot_fits, "Q4_0 Q8_0 Q4_K Q5_K Q6_K MXFP4", "dot",
     vulkan_run_dot},
    {"gemv", OP_LINEAR, 1, 8, NULL, "any", "", run_gemv},
    {"gemm", OP_LINEAR, 9, 0, NULL, "any", "", run_gemm},
    {"gemm_coop", OP_LINEAR, 17, 0, coop_fits, "codes F16", "coop", run_coop},
    {"gemm_coop_few", OP_LINEAR, 17, 32, few_coop_fits, "codes F16", "coop", run_coop_few},
    {"moe_dot", OP_MOE, 1, RUN - 1, vulkan_dot_fits, "Q4_0 Q8_0 Q4_K Q5_K Q6_K MXFP4", "dot",
     vulkan_run_dot},
    {"moe_dot_tiles", OP_MOE, RUN, 2 * MANY, dot_tiles_fits, "Q4_0 Q8_0 Q4_K Q5_K Q6_K MXFP4",
     "dot", vulkan_run_dot_tiles},
    {"moe_gemm", OP_MOE, MANY, 0, grouped_fits, "any", "", run_gemm},
    {"moe_gemv", OP_MOE, 1, 0, NULL, "any", "", run_gemv},
    {"moe_coop_few", OP_MOE, MANY, FEW_TILE *EIGHT, grouped_few_fits, "codes F16", "coop",
     run_coop_few},
    {"moe_coop", OP_MOE, MANY, 0, grouped_coop_fits, "codes F16", "coop", run_coop},
};
enum { N_PICKS = (int)(sizeof table / sizeof *table) };
_Static_assert((int)N_PICKS <= (int)VULKAN_MAX_PICKS, "counters of the table");

/* Whether "a,-b" has name; without: as -name. */
static bool is_listed(const char *list, const char *name, bool without)
{
    size_t n = strlen(name);
    for (const char *at = list; at && *at;) {
        bool minus = *at == '-';
        at += minus;
        size_t len = strcspn(at, ",");
        if (minus == without && len == n && !strncmp(at, name, n))
            return true;
        at += len + (at[len] == ',');
    }
    return false;
}

bool vulkan_is_forced(const struct vulkan *v, const char *name, bool without)
{
    return is_listed(v->forced, name, without);
}

static int pick(const struct vulkan *v, enum vulkan_op op, const struct product *p)
{
    int last = -1, found = -1;
    int rows =
        p->chosen ? (int)((uint64_t)EIGHT * p->rows / (uint64_t)p->w->n_expert) : (int)p->rows;
    rows = rows ? rows : 1;
    for (int i = 0; i < N_PICKS; i++) {
        if (table[i].op != op)
            continue;
        if (table[i].fits && !table[i].fits(v, p))
            continue;
        last = i;
        if (vulkan_is_forced(v, table[i].name, false))
            return i;
        bool suits = rows >= table[i].from && (!table[i].to || rows <= table[i].to);
        if (found < 0 && suits && !vulkan_is_forced(v, table[i].name, true))
            found = i;
    }
    return found < 0 ? last : found;
}

bool vulkan_picks_dot(struct vulkan *v, const struct product *p)
{
    int row = pick(v, p->chosen ? OP_MOE : OP_LINEAR, p);
    bool dot = table[row].run == vulkan_run_dot;
    v->runs[row] += dot;
    return dot;
}

void vulkan_product(struct vulkan *v, const struct product *p)
{
    const struct vulkan_weight *m = vulkan_matrix(p->w);
    if (!p->rows)
        return;
    int row = pick(v, p->chosen || p->cycle ? OP_MOE : OP_LINEAR, p);
    v->runs[row]++;
    vulkan_apart(v, true); /* segments have outputs of their own */
    for (int i = 0; i < m->n_seg; i++) {
        const struct vulkan_segment *g = &m->seg[i];
        struct product_args args = {.w = g->at,
                                    .x = p->x,
                                    .y = p->y,
                                    .bias = m->bias,
                                    .perm = g->perm,
                                    .chosen = p->chosen,
                                    .grid = v->grid,
                                    .n_in = (uint)p->w->n_in,
                                    .n_out = g->rows,
                                    .row_words = g->row_words,
                                    .tail = g->tail,
                                    .rows = p->rows,
                                    .ldx = p->ldx,
                                    .ldy = p->ldy,
                                    .first = g->first,
                                    .group_len = g->group_len,
                                    .x_div = p->x_div,
                                    .n_own = (uint)p->w->n_expert,
                                    .expert_first = p->expert_first,
                                    .n_all_out = (uint)p->w->n_out,
                                    .cycle = p->cycle};
        table[row].run(v, p, g, &args);
    }
    vulkan_apart(v, false);
    if (m->lora && v->loras.n_uses)
        vulkan_lora_add(v, p);
}

static bool is_available(const struct vulkan *v, const char *device)
{
    return !*device || (!strcmp(device, "coop") ? v->coop : v->dot);
}

bool vulkan_pick_info(struct backend *be, int i, struct pick_info *out)
{
    static const char *const ops[] = {"linear", "moe"};
    if (i < 0 || i >= N_PICKS)
        return vulkan_attn_pick_info(vulkan_self(be), i - N_PICKS, out);
    *out = (struct pick_info){.name = table[i].name,
                              .op = ops[table[i].op],
                              .formats = table[i].formats,
                              .device = table[i].device,
                              .rows_from = table[i].from,
                              .rows_to = table[i].to,
                              .available = is_available(vulkan_self(be), table[i].device),
                              .runs = vulkan_self(be)->runs[i]};
    return true;
}

static bool exists(const char *name, int n)
{
    struct vulkan none = {0};
    struct pick_info info;
    for (int i = 0; vulkan_pick_info(&none.be, i, &info); i++)
        if ((int)strlen(info.name) == n && !strncmp(info.name, name, (size_t)n))
            return true;
    return false;
}

bool vulkan_picks_exist(const char *names, struct error *err)
{
    for (const char *at = names; at && *at;) {
        at += *at == '-';
        int n = (int)strcspn(at, ",");
        if (n && !exists(at, n))
            return error_set(err, "STEEL_PICK: no kernel is called %.*s (steel bench --kernels)", n,
                             at);
        at += n + (at[n] == ',');
    }
    return true;
}

static void force(struct backend *be, const char *names)
{
    struct vulkan *v = vulkan_self(be);
    vulkan_forget_recordings(v);
    mem_free(v->forced);
    v->forced = names && *names ? mem_strdup(names) : NULL;
}

static void shapes(struct backend *be, FILE *out)
{
    (void)be, (void)out; /* the tables say it: rows alone decide */
}

const struct pick_ops vulkan_picks = {.row = vulkan_pick_info, .force = force, .shapes = shapes};
