/*
 * MiniCPM-V 4.6: SigLIP on images of any ratio, whose rows of four patches become one after some layers (tower_join). An
 * overview comes first, then the slices of a large image.
 */
#include "vision/family.h"

#include <math.h>
#include <string.h>

enum { ROUND = 4, MOST_RATIO = 200 };

static const struct norm_name last_norm = TOWER_NORM("v.post_ln", "model.post_layernorm"),
                              merger_norm = TOWER_NORM("mm.input_norm", "lm_head.mlp.0.pre_norm");
static const struct tensor_name merger_up = {"mm.up", "lm_head.mlp.0.linear_1"},
                                merger_down = {"mm.down", "lm_head.mlp.0.linear_2"};

#define JOIN_HF(part) "model.vit_merger." part
static const struct tower_join join = {
    .attn = {.attn_norm = TOWER_NORM("v.vit_merger.ln1", JOIN_HF("layer_norm1")),
             .q = {"v.vit_merger.attn_q", JOIN_HF("self_attn.q_proj")},
             .k = {"v.vit_merger.attn_k", JOIN_HF("self_attn.k_proj")},
             .v = {"v.vit_merger.attn_v", JOIN_HF("self_attn.v_proj")},
             .o = {"v.vit_merger.attn_out", JOIN_HF("self_attn.out_proj")}},
    .norm = TOWER_NORM("v.vit_merger.ds_ln", JOIN_HF("pre_norm")),
    .up = {"v.vit_merger.ds_ffn_up", JOIN_HF("linear_1")},
    .down = {"v.vit_merger.ds_ffn_down", JOIN_HF("linear_2")}};

static void defaults(struct config *c, struct tower_config *t)
{
    (void)c;
    t->table = TABLE_NEAREST;
    t->patch = 14;
    t->merge = ROUND;
    t->side = 448;
    t->min_tiles = 1;
    t->max_tiles = 9;
    t->middle = 6;
}

/* One of the file's numbers, which config.json has outside vision_config, too. */
static bool read_middle(const struct meta_reader *in, int *out)
{
    double v = *out;
    struct meta_reader whole = *in;
    whole.hf = in->f->config;
    if (!in->f->is_gguf)
        return reader_int(in, "insert_layer_id", NULL, -1, CONFIG_MAX_LAYERS, false, out) &&
               reader_int(&whole, "insert_layer_id", NULL, -1, CONFIG_MAX_LAYERS, false, out);
    const struct meta *m = tensorfile_meta(in->f, "clip.vision.wa_layer_indexes");
    if (m && m->type == META_ARRAY)
        meta_array_number(&m->v.a, 0, &v);
    *out = (int)v;
    return true;
}

static bool read_minicpm(const struct meta_reader *in, struct tower_config *t)
{
    const struct tensor *table =
        build_find(in->f, in->c, &t->family->names.positions, 0, 0, "weight");
    const struct tensor *up = build_find(in->f, in->c, &join.up, 0, 0, "weight");
    struct meta_reader whole = *in;
    int times = 1;
    whole.hf = in->f->config;
    t->grid = table ? (int)lround(sqrt((double)table->dims[1])) : 0;
    t->n_middle = up ? (int)up->dims[1] : 0;
    if (!read_middle(in, &t->middle) ||
        (!in->f->is_gguf && !reader_int(&whole, "merger_times", NULL, 1, 8, false, &times)))
        return false;
    if (times != 1 || t->merge != ROUND)
        return error_set(in->err, "%s: an image tower of %d mergers and features of %d x %d",
                         in->f->path, times, t->merge, t->merge);
    if (t->middle < 0 || t->middle > in->c->n_layers - 2 || t->n_middle < 1 ||
        t->n_middle > 1 << 16)
        return error_set(in->err, "%s: an image tower of %d layers whose rows are joined after %d",
                         in->f->path, in->c->n_layers, t->middle);
    return (table && t->grid * (int64_t)t->grid == table->dims[1]) ||
           error_set(in->err, "%s: the image tower's table of positions: not a square",
                     in->f->path);
}

static bool read_slices(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    bool slices = true;
    const char *mode = json_string_value(reader_get(o, "downsample_mode", NULL));
    if (mode && strcmp(mode, "16x") != 0)
        return error_set(in->err,
                         "%s: preprocessor_config.json: downsample_mode \"%.20s\" is not supported",
                         in->f->path, mode);
    if (!tower_int(in, o, "scale_resolution", NULL, t->patch, 1 << 12, &t->side) ||
        !tower_int(in, o, "max_slice_nums", "preproc_max_tiles", 1, PLAN_MAX_VIEWS - 1,
                   &t->max_tiles) ||
        !tower_bool(in, o, "slice_mode", NULL, &slices))
        return false;
    if (!slices)
        t->max_tiles = 1;
    return true;
}

/* Rounds to the nearest multiple of `unit` above 0; a tie goes to the even one. */
static int round_to(double n, int unit)
{
    int k = (int)nearbyint(n / unit);
    return (k > 1 ? k : 1) * unit;
}

/* The size of a view of this ratio. */
static void view_size(const struct tower_config *t, double width, double height, bool enlarge,
                      int *w, int *h)
{
    int unit = t->patch * t->merge;
    if (enlarge || width * height > (double)t->side * t->side) {
        double ratio = width / height;
        height = floor(t->side / sqrt(ratio));
        width = floor(height * ratio);
    }
    *w = round_to(width, unit);
    *h = round_to(height, unit);
}

/* The grid of slices, one more or less than the image's pixels need, whose ratio is nearest to the image's. */
static bool slice_grid(const struct tower_config *t, int width, int height, int *cols, int *rows)
{
    double area = (double)width * height / ((double)t->side * t->side), best = INFINITY;
    double ratio = log((double)width / height), need = ceil(area);
    int n = need < t->max_tiles ? (int)need : t->max_tiles;
    *cols = *rows = 1;
    if (n <= 1)
        return false;
    for (int k = n - 1; k <= n + 1; k++)
        for (int c = 1; k > 1 && k <= t->max_tiles && c <= k; c++) {
            double off = fabs(ratio - log((double)c / ((double)k / c)));
            if (k % c || !(off < best))
                continue;
            best = off;
            *cols = c;
            *rows = k / c;
        }
    return true;
}

static bool plan_slices(const struct tower_config *t, int width, int height, struct image_plan *out,
                        struct error *err)
{
    int cols, rows, w, h;
    int longer = width > height ? width : height, shorter = width + height - longer;
    if (longer > (int64_t)MOST_RATIO * shorter)
        return error_set(err, "an image of %d x %d: one side is more than %d times the other",
                         width, height, MOST_RATIO);
    bool sliced = slice_grid(t, width, height, &cols, &rows);
    view_size(t, width, height, !sliced, &w, &h);
    plan_whole(t, out, w, h);
    if (!sliced)
        return true;
    view_size(t, (double)round_to(width, cols) / cols, (double)round_to(height, rows) / rows, true,
              &w, &h);
    out->tile_cols = cols;
    out->tile_rows = rows;
    int at = plan_add_size(out, -1, w * cols, h * rows);
    for (int i = 0; i < cols * rows; i++)
        plan_add_view(t, out, at, i % cols * w, i / cols * h, w, h);
    return true;
}

/* Rounding may add half a feature to each side. */
static int most_slice(const struct tower_config *t)
{
    double side = (double)t->side / (t->patch * t->merge), root = sqrt(MOST_RATIO);
    int features = (int)ceil(side * side + side * (root + 1 / root) / 2 + root) + 1;
    return features * t->merge * t->merge;
}

static bool limit_slices(struct tower_config *t, int n)
{
    int area = t->merge * t->merge;
    while (t->max_tiles > 1 && (t->max_tiles + 1) * (most_slice(t) / area) > n)
        t->max_tiles--;
    while (t->side > t->patch && most_slice(t) / area > n)
        t->side -= t->patch;
    return (t->max_tiles > 1 ? t->max_tiles + 1 : 1) * (most_slice(t) / area) <= n;
}

static void text_minicpm(const struct tower_config *t, const struct image_plan *p, int index,
                         struct buf *out)
{
    const char *mark = t->family->feature;
    buf_addf(out, "<image_id>%d</image_id><image>%s</image>", index, mark);
    for (int i = 0; i < p->n_views - 1; i++)
        buf_addf(out, "%s<slice>%s</slice>", i && i % p->tile_cols == 0 ? "\n" : "", mark);
}

static void write_minicpm(const struct config *c, struct gguf_writer *w)
{
    const int32_t middle = c->tower->middle;
    gguf_set_array(w, "clip.vision.wa_layer_indexes", META_I32, &middle, 1);
    gguf_set_u32(w, "clip.vision.preproc_max_tiles", (uint32_t)c->tower->max_tiles);
}

static void merge_minicpm(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    enum { JOINED = 4 };
    int E = b->c->n_embd, wide = JOINED * E;
    struct merge_step *s = tower_step(b);
    s->rows = JOINED;
    s->norm = tower_norm(b, 0, &last_norm, E);
    s->joined = build_layer_norm(b, 0, &merger_norm.gain, &merger_norm.bias, wide);
    s->joined.eps = 1e-6f;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &merger_up, wide, wide);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &merger_down, wide, t->n_out);
}

const struct tower_family tower_minicpm = {.name = "minicpmv4_6",
                                           .types = {"minicpmv4_6"},
                                           .roots = {{"model.vision_tower.", "model.merger"}},
                                           .names = {TOWER_SIGLIP},
                                           .join = &join,
                                           .norm = NORM_LAYER,
                                           .gelu = ACT_PLAIN_GELU_TANH,
                                           .begin = "<image>",
                                           .feature = "<|image_pad|>",
                                           .end = "</image>",
                                           .defaults = defaults,
                                           .read = read_minicpm,
                                           .read_pixels = read_slices,
                                           .plan = plan_slices,
                                           .limit = limit_slices,
                                           .most = most_slice,
                                           .text = text_minicpm,
                                           .write = write_minicpm,
                                           .merge = merge_minicpm};
