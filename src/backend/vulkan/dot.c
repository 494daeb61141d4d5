/*
 * Products of few rows on integer dot products (shaders/gemv_dot.comp). Their inputs are bytes, which the kernel before
 * writes where it can: scratch.bytes has two buffers, so that a product may write its outputs' bytes while it reads its
 * inputs'.
 */
#include "backend/vulkan/vulkan.h"

enum { MAX_ROWS = 8, MODE_PLAIN = 0, MODE_TILES, MODE_PAIRS, MODE_COMBINED, PAIRS = 16 };

/* Up to this many rows, those of experts counted apart, outputs are written as bytes, too. */
enum { BYTES_ROWS = 512 };

uint64_t vulkan_bytes(const struct vulkan *v, int rows, int width)
{
    bool fits = v->dot && v->full_subgroups && rows <= BYTES_ROWS && width % 16 == 0;
    return !fits ? 0 : v->s.bytes[v->bytes_at == v->s.bytes[0]];
}

void vulkan_has_bytes(struct vulkan *v, uint64_t x, uint64_t bytes)
{
    v->bytes_of = bytes ? x : 0;
    v->bytes_at = bytes;
}

bool vulkan_dot_fits(const struct vulkan *v, const struct product *p)
{
    const struct vulkan_weight *m = vulkan_matrix(p->w);
    bool fits = v->dot && v->full_subgroups && v->subgroup <= 128 && !p->cycle &&
                (p->chosen || p->rows <= (uint32_t)v->bounds.max_tokens) &&
                (p->chosen || (uint32_t)p->w->n_in <= v->s.ld_half);
    for (int i = 0; i < m->n_seg; i++) {
        uint32_t f = m->seg[i].format;
        fits = fits && (f == FORMAT_Q4_0 || f == FORMAT_Q8_0 || f == FORMAT_Q4_K ||
                        f == FORMAT_Q5_K || f == FORMAT_Q6_K || f == FORMAT_MXFP4);
    }
    return fits;
}

/* The inputs as bytes, unless they are there: segments share them, and the kernel that wrote them may have done it. */
static void put_bytes(struct vulkan *v, const struct product *p)
{
    uint32_t ld = (uint32_t)p->w->n_in, rows = p->rows / p->x_div;
    if (v->bytes_of == p->x)
        return;
    const struct half_args bytes = {p->x, v->s.bytes[0], 0, ld, rows, p->ldx, ld};
    vulkan_apart(v, false);
    vulkan_run_flat(v, KERNEL_BYTES, 0, 0, &bytes, sizeof bytes,
                    (uint32_t)(((uint64_t)ld / 16 * rows + 127) / 128));
    vulkan_has_bytes(v, p->x, v->s.bytes[0]);
    vulkan_apart(v, true);
}

static struct dot_args args_of(const struct vulkan *v, const struct product *p,
                               const struct vulkan_segment *g)
{
    return (struct dot_args){.w = g->at,
                             .x = v->bytes_at,
                             .y = p->y,
                             .bias = vulkan_matrix(p->w)->bias,
                             .chosen = p->chosen,
                             .n_in = (uint)p->w->n_in,
                             .n_out = g->rows,
                             .row_words = g->row_words,
                             .tail = g->tail,
                             .rows = p->rows,
                             .ldx = (uint)p->w->n_in,
                             .ldy = p->ldy,
                             .first = g->first,
                             .x_div = p->x_div,
                             .n_own = (uint)p->w->n_expert,
                             .expert_first = p->expert_first,
                             .n_all_out = (uint)p->w->n_out};
}

/* x workgroups across outputs, z across rows. rows: of a subgroup. */
static void dispatch(struct vulkan *v, const struct vulkan_segment *g, const struct dot_args *args,
                     uint32_t mode, uint32_t rows, uint32_t log_outs, uint32_t each, uint32_t z)
{
    uint32_t n = (args->n_out + each - 1) / each;
    uint32_t x = n < v->max_groups[0] ? n : v->max_groups[0];
    vulkan_run(v, KERNEL_GEMV_DOT, g->format, rows + 8 * log_outs + 32 * mode, args, sizeof *args,
               x, (n + x - 1) / x, z);
}

/* More outputs share inputs where there are enough for all of a large GPU's multiprocessors. */
static void dispatch_wide(struct vulkan *v, const struct vulkan_segment *g,
                          const struct dot_args *args, uint32_t mode, uint32_t rows, uint32_t z)
{
    uint32_t log_outs = rows > 4          ? g->rows < 2048 ? 1 : 2
                        : g->rows < 4096  ? 0
                        : g->rows < 16384 ? 1
                                          : 2;
    dispatch(v, g, args, mode, rows, log_outs, 128 / v->subgroup << log_outs, z);
}

void vulkan_run_dot(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                    struct product_args *unused)
{
    (void)unused;
    put_bytes(v, p);
    const struct dot_args args = args_of(v, p, g);
    if (p->chosen)
        dispatch_wide(v, g, &args, MODE_PLAIN, 1, p->rows);
    else
        dispatch_wide(v, g, &args, MODE_PLAIN, p->rows < MAX_ROWS ? p->rows : MAX_ROWS, 1);
}

void vulkan_run_dot_tiles(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                          struct product_args *listed)
{
    put_bytes(v, p);
    uint32_t tiles = vulkan_group(v, p, listed, MAX_ROWS);
    struct dot_args args = args_of(v, p, g);
    args.chosen = listed->chosen;
    dispatch_wide(v, g, &args, MODE_TILES, MAX_ROWS, tiles);
}

static bool has_lora(const struct vulkan *v, const struct product *p)
{
    return vulkan_matrix(p->w)->lora && v->loras.n_uses;
}

bool vulkan_product_act(struct vulkan *v, const struct product *p, const struct ffn *f, uint act)
{
    const struct vulkan_weight *m = vulkan_matrix(p->w);
    const struct vulkan_segment *g = m->seg;
    int width = f->down->n_in;
    uint32_t subgroups = 128 / v->subgroup, outs = 2 * PAIRS / subgroups, log_outs = 0;
    bool alike = m->n_seg == 1 || (m->n_seg == 2 && g[0].format == g[1].format &&
                                   g[0].rows == g[1].rows && g[0].row_words == g[1].row_words);
    if (!alike || act >= KERNEL_ACT_PLAIN_RELU2 || p->w->n_out != 2 * width || has_lora(v, p) ||
        (p->rows > 1 && !p->chosen) || v->subgroup < 8 || v->subgroup > 32 ||
        !vulkan_dot_fits(v, p) || !vulkan_bytes(v, (int)p->rows, width) || !vulkan_picks_dot(v, p))
        return false;
    while (1u << log_outs < outs)
        log_outs++;
    put_bytes(v, p);
    vulkan_apart(v, false);
    struct dot_args args = args_of(v, p, g);
    args.pair = m->n_seg == 2 ? g[1].at : g->at + 4 * (uint64_t)g->row_words * (uint64_t)width;
    args.n_out = (uint)width;
    args.first = g->rows;
    args.act = act;
    args.alpha = f->alpha;
    args.limit = f->limit;
    args.beta = f->beta;
    args.bytes = vulkan_bytes(v, (int)p->rows, width);
    dispatch(v, g, &args, MODE_PAIRS, 1, log_outs, PAIRS, p->rows);
    vulkan_has_bytes(v, p->y, args.bytes);
    return true;
}

bool vulkan_product_combined(struct vulkan *v, const struct product *p, uint32_t used, uint64_t to)
{
    const struct vulkan_weight *m = vulkan_matrix(p->w);
    if (!p->chosen || p->x_div != 1 || has_lora(v, p) || !vulkan_dot_fits(v, p) ||
        !vulkan_picks_dot(v, p))
        return false;
    put_bytes(v, p);
    vulkan_apart(v, true);
    for (int i = 0; i < m->n_seg; i++) {
        struct dot_args args = args_of(v, p, &m->seg[i]);
        args.y = to;
        args.weights = v->s.weights;
        args.rows = p->rows / used;
        args.x_div = used;
        dispatch_wide(v, &m->seg[i], &args, MODE_COMBINED, 1, args.rows);
    }
    vulkan_apart(v, false);
    return true;
}
