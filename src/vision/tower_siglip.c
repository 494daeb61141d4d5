/*
 * Towers with the layers of SigLIP or CLIP. They differ in preprocessing and merger:
 *   Gemma 3: square images, patches are averaged
 *   SmolVLM and Idefics 3: tiles and the whole image, patches are joined
 *   LFM2-VL: images of any ratio, large ones in tiles
 *   LLaVA: CLIP with a class token, the last layer left out, square images cut from the middle
 */
#include "vision/family.h"

#include <math.h>
#include <string.h>

static const struct norm_name last_norm = TOWER_NORM("v.post_ln", "model.post_layernorm");

/* One size for all images. */
static bool fixed(struct tower_config *t, int n)
{
    (void)t;
    (void)n;
    return false;
}

static int most_square(const struct tower_config *t)
{
    int unit = t->patch * t->merge, side = (t->side + unit - 1) / unit * t->merge;
    return side * side;
}

/* Gemma 3 */

static const struct norm_name soft_norm =
    TOWER_NORM("mm.soft_emb_norm", "lm_head.mm_soft_emb_norm");
static const struct tensor_name soft_project = {"mm.input_projection",
                                                "=lm_head.mm_input_projection_weight"};

static void defaults_gemma3(struct config *c, struct tower_config *t)
{
    (void)c;
    t->filter = IMAGE_BILINEAR;
    t->table = TABLE_CUBIC;
    t->merge = 4;
    t->side = 896;
    t->patch = 14;
}

static bool read_gemma3(const struct meta_reader *in, struct tower_config *t)
{
    int tokens = 256;
    struct meta_reader whole = *in;
    whole.hf = in->f->config;
    t->grid = t->side / t->patch;
    if (in->f->is_gguf)
        return true;
    if (!reader_int(&whole, "mm_tokens_per_image", NULL, 1, 1 << 16, false, &tokens))
        return false;
    int side = (int)lround(sqrt(tokens));
    t->merge = side > 0 ? t->grid / side : 0;
    return (side * side == tokens && t->merge > 0 && t->merge * side == t->grid) ||
           error_set(in->err, "%s: config.json: mm_tokens_per_image: %d of a grid of %d x %d",
                     in->f->path, tokens, t->grid, t->grid);
}

static bool read_side(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *size = reader_get(o, "size", NULL);
    int width = t->side, height = t->side;
    if (!tower_int(in, size, "width", NULL, 1, 1 << 16, &width) ||
        !tower_int(in, size, "height", NULL, 1, 1 << 16, &height))
        return false;
    return (width == height && width == t->side) ||
           error_set(in->err,
                     "%s: preprocessor_config.json: size: %d x %d, expected the tower's %d",
                     in->f->path, width, height, t->side);
}

static bool plan_square(const struct tower_config *t, int width, int height, struct image_plan *out,
                        struct error *err)
{
    (void)width, (void)height, (void)err;
    plan_whole(t, out, t->side, t->side);
    return true;
}

static void merge_gemma3(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd;
    /* stored as (E, n_out) in both kinds of file */
    const struct weight_rows rows = {.name = &soft_project,
                                     .n = t->n_out,
                                     .tensor_rows = t->n_out,
                                     .transposed = true,
                                     .also_gguf = true};
    struct merge_step *s = tower_step(b);
    s->rows = t->merge * t->merge;
    s->mean = true;
    s->norm = tower_norm(b, 0, &last_norm, E);
    s->joined = build_rms_adjusted(b, 0, &soft_norm.gain, E, (struct adjust){.add = 1});
    s->w = build_weight(b, WEIGHT_LINEAR, 0, E, 1, 1, &rows);
}

#define SIGLIP_ROOTS                                                                               \
    {"vision_tower.vision_model.", "multi_modal_projector"},                                       \
    {                                                                                              \
        "model.vision_tower.vision_model.", "model.multi_modal_projector"                          \
    }

const struct tower_family tower_gemma3 = {.name = "gemma3",
                                          .types = {"gemma3"},
                                          .roots = {SIGLIP_ROOTS},
                                          .names = {TOWER_SIGLIP},
                                          .norm = NORM_LAYER,
                                          .gelu = ACT_PLAIN_GELU_TANH,
                                          .begin = "\n\n<start_of_image>",
                                          .feature = "<image_soft_token>",
                                          .end = "<end_of_image>\n\n",
                                          .defaults = defaults_gemma3,
                                          .read = read_gemma3,
                                          .read_pixels = read_side,
                                          .plan = plan_square,
                                          .limit = fixed,
                                          .most = most_square,
                                          .merge = merge_gemma3};

/* SmolVLM and Idefics 3 */

static const struct tensor_name smol_project = {"mm.model.fc", "lm_head.modality_projection.proj"};

static void defaults_smol(struct config *c, struct tower_config *t)
{
    t->filter = IMAGE_LANCZOS;
    t->table = TABLE_NEAREST;
    t->side = 512;
    t->longest = 2048;
    t->patch = 16;
    t->merge = 4;
    t->split = true;
    c->n_layers = 12;
    c->n_embd = 1152;
    c->n_heads = 16;
    c->n_ff = 3072;
}

static bool read_smol(const struct meta_reader *in, struct tower_config *t)
{
    struct meta_reader whole = *in;
    whole.hf = in->f->config;
    t->grid = t->side / t->patch;
    return in->f->is_gguf || reader_int(&whole, "scale_factor", NULL, 1, 8, false, &t->merge);
}

static bool read_smol_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    return tower_int(in, reader_get(o, "size", NULL), "longest_edge", "preproc_image_size", 1,
                     1 << 14, &t->longest) &&
           tower_int(in, reader_get(o, "max_image_size", NULL), "longest_edge", NULL, 1, 1 << 14,
                     &t->side) &&
           tower_bool(in, o, "do_image_splitting", "preproc_split", &t->split);
}

static int up_to(double n, int unit)
{
    return (int)ceil(n / unit) * unit;
}

/* The longer side becomes `longest` pixels, then both sides are rounded up to whole tiles. The tiles come first, the whole
 * image last. */
static bool plan_smol(const struct tower_config *t, int width, int height, struct image_plan *out,
                      struct error *err)
{
    enum { MOST_PIXELS = 4096 };
    double ratio = (double)width / height;
    int side = t->side, w = t->longest, h = t->longest;
    if (width >= height) {
        h = (int)(w / ratio);
        h += h % 2;
    } else {
        w = (int)(h * ratio);
        w += w % 2;
    }
    w = w < 1 ? 1 : w;
    h = h < 1 ? 1 : h;
    if (w > MOST_PIXELS || h > MOST_PIXELS) {
        double again = (double)w / h;
        if (w >= h) {
            w = MOST_PIXELS;
            h = (int)(w / again);
        } else {
            h = MOST_PIXELS;
            w = (int)(h * again);
        }
        w = w < 1 ? 1 : w;
        h = h < 1 ? 1 : h;
    }
    int at = plan_add_size(out, -1, w, h);
    double now = (double)w / h;
    if (w >= h) {
        w = up_to(w, side);
        h = up_to((int)(w / now), side);
    } else {
        h = up_to(h, side);
        w = up_to((int)(h * now), side);
    }
    h = h ? h : side;
    w = w ? w : side;
    if (t->split)
        at = plan_add_size(out, at, w, h);
    if (t->split && (h > side || w > side)) {
        out->tile_rows = h / side;
        out->tile_cols = w / side;
        if (out->tile_rows * out->tile_cols >= PLAN_MAX_VIEWS)
            return error_set(err, "an image of %d x %d tiles", out->tile_cols, out->tile_rows);
        for (int i = 0; i < out->tile_rows * out->tile_cols; i++)
            plan_add_view(t, out, at, i % out->tile_cols * side, i / out->tile_cols * side, side,
                          side);
    }
    if (!t->split || out->n_views)
        at = plan_add_size(out, at, side, side);
    plan_add_view(t, out, at, 0, 0, side, side);
    return true;
}

static int count_views(const struct tower_config *t, int pixels)
{
    int tiles = (pixels + t->side - 1) / t->side;
    return tiles > 1 && t->split ? tiles * tiles + 1 : 1;
}

static bool limit_smol(struct tower_config *t, int n)
{
    int each = most_square(t) / t->merge / t->merge;
    while (count_views(t, t->longest) > 1 && count_views(t, t->longest) * each > n)
        t->longest -= t->side < t->longest ? t->side : t->longest - 1;
    return count_views(t, t->longest) * each <= n;
}

static void text_smol(const struct tower_config *t, const struct image_plan *p, int index,
                      struct buf *out)
{
    (void)index;
    for (int i = 0; i < p->n_views - 1; i++) {
        int col = i % p->tile_cols, row = i / p->tile_cols;
        buf_addf(out, "%s<row_%d_col_%d>%s%s", t->family->begin, row + 1, col + 1,
                 t->family->feature, col + 1 == p->tile_cols ? "\n" : "");
    }
    buf_addf(out, "%s%s<global-img>%s%s", p->n_views > 1 ? "\n" : "", t->family->begin,
             t->family->feature, t->family->end);
}

static void write_smol(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "clip.vision.preproc_image_size", (uint32_t)c->tower->longest);
    gguf_set_bool(w, "clip.vision.preproc_split", c->tower->split);
}

static void merge_smol(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge;
    struct merge_step *s = tower_step(b);
    s->rows = rows;
    s->norm = tower_norm(b, 0, &last_norm, E);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &smol_project, rows * E, t->n_out);
}

const struct tower_family tower_smol = {.name = "idefics3",
                                        .types = {"smolvlm", "idefics3"},
                                        .roots = {{"model.vision_model.", "model.connector"}},
                                        .names = {TOWER_SIGLIP},
                                        .norm = NORM_LAYER,
                                        .gelu = ACT_PLAIN_GELU_TANH,
                                        .begin = "<fake_token_around_image>",
                                        .feature = "<image>",
                                        .end = "<fake_token_around_image>",
                                        .defaults = defaults_smol,
                                        .read = read_smol,
                                        .read_pixels = read_smol_pixels,
                                        .plan = plan_smol,
                                        .text = text_smol,
                                        .limit = limit_smol,
                                        .most = most_square,
                                        .write = write_smol,
                                        .merge = merge_smol};

/* LFM2-VL */

static const struct norm_name lfm2_norm = TOWER_NORM("mm.input_norm", "lm_head.layer_norm");
static const struct tensor_name lfm2_up = {"mm.1", "lm_head.linear_1"},
                                lfm2_down = {"mm.2", "lm_head.linear_2"};

static void defaults_lfm2(struct config *c, struct tower_config *t)
{
    (void)c;
    t->filter = IMAGE_BILINEAR;
    t->table = TABLE_SMOOTH;
    t->patch = 16;
    t->merge = 2;
    t->longest = 512; /* of a tile */
    t->min_tiles = 2;
    t->max_tiles = 10;
    t->tolerance = 2;
    t->split = t->thumbnail = true;
    t->min_pixels = 64; /* features, until patch and merge are known */
    t->max_pixels = 256;
}

static bool read_lfm2(const struct meta_reader *in, struct tower_config *t)
{
    struct meta_reader whole = *in;
    int n = 256, layer = -1;
    whole.hf = in->f->config;
    const struct tensor *table =
        build_find(in->f, in->c, &t->family->names.positions, 0, 0, "weight");
    if (!in->f->is_gguf &&
        (!reader_int(in, "num_patches", NULL, 1, 1 << 20, false, &n) ||
         !reader_int(&whole, "downsample_factor", NULL, 1, 8, false, &t->merge) ||
         !reader_int(&whole, "vision_feature_layer", NULL, -in->c->n_layers, -1, false, &layer) ||
         !reader_int(&whole, "projector_hidden_size", NULL, 1, 1 << 20, true, &t->n_hidden)))
        return false;
    if (in->f->is_gguf) {
        const struct tensor *up = build_find(in->f, in->c, &lfm2_up, 0, 0, "weight");
        n = table ? (int)table->dims[1] : 0;
        t->n_hidden = up ? (int)up->dims[1] : 0;
    }
    in->c->n_layers += layer + 1;
    t->grid = (int)lround(sqrt(n));
    const struct tensor *patches =
        build_find(in->f, in->c, &t->family->names.patches, 0, 0, "weight");
    t->channels_last = !in->f->is_gguf && patches && patches->n_dims == 2;
    return (t->grid * t->grid == n && in->c->n_layers > 0) ||
           error_set(in->err, "%s: the image tower's table of positions: %d are no square",
                     in->f->path, n);
}

static bool read_lfm2_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge;
    int least = (int)t->min_pixels, most = (int)t->max_pixels;
    double tolerance = (double)t->tolerance;
    if (!tower_int(in, o, "min_image_tokens", "preproc_min_tokens", 1, 1 << 16, &least) ||
        !tower_int(in, o, "max_image_tokens", "preproc_max_tokens", 1, 1 << 16, &most) ||
        !tower_int(in, o, "tile_size", "preproc_tile_size", 1, 1 << 12, &t->longest) ||
        !tower_int(in, o, "min_tiles", "preproc_min_tiles", 1, PLAN_MAX_VIEWS - 1, &t->min_tiles) ||
        !tower_int(in, o, "max_tiles", "preproc_max_tiles", t->min_tiles, PLAN_MAX_VIEWS - 1,
                   &t->max_tiles) ||
        !tower_number(in, o, "max_pixels_tolerance", "preproc_tolerance", 0, 1e6, &tolerance) ||
        !tower_bool(in, o, "do_image_splitting", "preproc_split", &t->split) ||
        !tower_bool(in, o, "use_thumbnail", "preproc_thumbnail", &t->thumbnail))
        return false;
    t->tolerance = (float)tolerance;
    t->min_pixels = least * feature;
    t->max_pixels = most * feature;
    t->side = t->longest;
    return true;
}

/* Rounds to the nearest multiple of `unit`; a tie goes to the even one. */
static int64_t round_to(double n, int64_t unit)
{
    return (int64_t)nearbyint(n / (double)unit) * unit;
}

static bool plan_lfm2(const struct tower_config *t, int width, int height, struct image_plan *out,
                      struct error *err)
{
    int64_t unit = (int64_t)t->patch * t->merge, wide = round_to(width, unit),
            high = round_to(height, unit);
    double area = (double)width * height, large = (double)(wide > t->patch ? wide : t->patch) *
                                                  (double)(high > t->patch ? high : t->patch);
    int64_t w = wide > unit ? wide : unit, h = high > unit ? high : unit;
    (void)err;
    if (w * h > t->max_pixels) {
        double shrink = sqrt(area / (double)t->max_pixels);
        w = (int64_t)floor(width / shrink / (double)unit) * unit;
        h = (int64_t)floor(height / shrink / (double)unit) * unit;
        int64_t most = t->max_pixels / unit / unit * unit; /* one feature wide */
        w = h < unit && w > most ? most : w > unit ? w : unit;
        h = w <= unit && h > most ? most : h > unit ? h : unit;
    } else if (w * h < t->min_pixels) {
        double grow = sqrt((double)t->min_pixels / area);
        w = (int64_t)ceil(width * grow / (double)unit) * unit;
        h = (int64_t)ceil(height * grow / (double)unit) * unit;
    }
    if (t->split && large > (double)t->max_pixels * (double)t->tolerance) {
        int cols, rows;
        plan_best_tiles(t, width, height, t->longest, &cols, &rows);
        out->tile_rows = rows;
        out->tile_cols = cols;
        int at = plan_add_size(out, -1, cols * t->longest, rows * t->longest);
        for (int i = 0; i < rows * cols; i++)
            plan_add_view(t, out, at, i % cols * t->longest, i / cols * t->longest, t->longest,
                          t->longest);
        if (!t->thumbnail || rows * cols == 1)
            return true;
    }
    plan_whole(t, out, (int)w, (int)h);
    return true;
}

static int most_lfm2(const struct tower_config *t)
{
    int unit = t->patch * t->merge;
    double least = (double)t->min_pixels,
           grown = least + unit * (sqrt(least / 1e4) + sqrt(least * 1e4)) + unit * unit;
    double area = grown > (double)t->max_pixels ? grown : (double)t->max_pixels;
    int whole = ((int)(area / unit / unit) + 1) * t->merge * t->merge,
        tile = (t->longest + unit - 1) / unit * t->merge;
    return t->split && tile * tile > whole ? tile * tile : whole;
}

static bool limit_lfm2(struct tower_config *t, int n)
{
    int unit = t->patch * t->merge, tile = (t->longest + unit - 1) / unit,
        whole = (int)(t->max_pixels / unit / unit);
    while (t->max_tiles > t->min_tiles && t->max_tiles * tile * tile + whole > n)
        t->max_tiles--;
    if (t->max_tiles * tile * tile + whole > n)
        t->split = false;
    if (whole > n) {
        t->max_pixels = (int64_t)n * unit * unit;
        t->min_pixels = t->min_pixels > t->max_pixels / 4 ? t->max_pixels / 4 : t->min_pixels;
    }
    return true;
}

static void text_lfm2(const struct tower_config *t, const struct image_plan *p, int index,
                      struct buf *out)
{
    int tiles = p->tile_rows * p->tile_cols;
    (void)index;
    buf_adds(out, t->family->begin);
    for (int i = 0; tiles > 1 && i < tiles; i++)
        buf_addf(out, "<|img_row_%d_col_%d|>%s", i / p->tile_cols + 1, i % p->tile_cols + 1,
                 t->family->feature);
    if (tiles > 1 && t->thumbnail)
        buf_adds(out, "<|img_thumbnail|>");
    if (tiles <= 1 || t->thumbnail)
        buf_adds(out, t->family->feature);
    buf_adds(out, t->family->end);
}

static void write_lfm2(const struct config *c, struct gguf_writer *w)
{
    const struct tower_config *t = c->tower;
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge;
    gguf_set_u32(w, "clip.vision.preproc_min_tokens", (uint32_t)(t->min_pixels / feature));
    gguf_set_u32(w, "clip.vision.preproc_max_tokens", (uint32_t)(t->max_pixels / feature));
    gguf_set_u32(w, "clip.vision.preproc_tile_size", (uint32_t)t->longest);
    gguf_set_u32(w, "clip.vision.preproc_min_tiles", (uint32_t)t->min_tiles);
    gguf_set_u32(w, "clip.vision.preproc_max_tiles", (uint32_t)t->max_tiles);
    gguf_set_f32(w, "clip.vision.preproc_tolerance", t->tolerance);
    gguf_set_bool(w, "clip.vision.preproc_split", t->split);
    gguf_set_bool(w, "clip.vision.preproc_thumbnail", t->thumbnail);
}

static void merge_lfm2(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge;
    struct merge_step *s = tower_step(b);
    s->rows = rows;
    s->norm = tower_norm(b, 0, &last_norm, E);
    s->joined = tower_norm(b, 0, &lfm2_norm, rows * E);
    s->joined.eps = 1e-5f;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &lfm2_up, rows * E, t->n_hidden);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &lfm2_down, t->n_hidden, t->n_out);
}

const struct tower_family tower_lfm2 = {
    .name = "lfm2",
    .types = {"lfm2_vl", "lfm2-vl"},
    .roots = {SIGLIP_ROOTS,
              {"vision_tower.", "multi_modal_projector"},
              {"model.vision_tower.", "model.multi_modal_projector"}},
    .names = {TOWER_SIGLIP},
    .norm = NORM_LAYER,
    .gelu = ACT_PLAIN_GELU_TANH,
    .begin = "<|image_start|>",
    .feature = "<image>",
    .end = "<|image_end|>",
    .defaults = defaults_lfm2,
    .read = read_lfm2,
    .read_pixels = read_lfm2_pixels,
    .plan = plan_lfm2,
    .text = text_lfm2,
    .limit = limit_lfm2,
    .most = most_lfm2,
    .write = write_lfm2,
    .merge = merge_lfm2};

/* LLaVA */

static const struct tensor_name llava_up = {"mm.0", "lm_head.linear_1"},
                                llava_down = {"mm.2", "lm_head.linear_2"};

static void defaults_llava(struct config *c, struct tower_config *t)
{
    static const float mean[] = TOWER_CLIP_MEAN, std[] = TOWER_CLIP_STD;
    memcpy(t->mean, mean, sizeof mean);
    memcpy(t->std, std, sizeof std);
    c->norm_eps = 1e-5f;
    c->n_layers = 12;
    c->n_embd = 768;
    c->n_heads = 12;
    c->n_ff = 3072;
    t->table = TABLE_CUBIC;
    t->class_token = true;
    t->act = ACT_PLAIN_QUICK_GELU;
    t->side = 336;
    t->patch = 14;
}

/* config.json counts all layers and names the one whose output is used. A GGUF contains only the layers up to it. */
static bool read_llava(const struct meta_reader *in, struct tower_config *t)
{
    struct meta_reader whole = *in;
    int layer = -2;
    const char *select =
        json_string_value(json_object_get(in->f->config, "vision_feature_select_strategy"));
    whole.hf = in->f->config;
    t->grid = t->side / t->patch;
    if (in->f->is_gguf)
        return true;
    if (!reader_int(&whole, "vision_feature_layer", NULL, -in->c->n_layers, -1, false, &layer))
        return false;
    in->c->n_layers += layer + 1;
    return !select || !strcmp(select, "default") ||
           error_set(in->err,
                     "%s: config.json: vision_feature_select_strategy \"%.40s\" is not supported",
                     in->f->path, select);
}

static bool read_crop(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *size = reader_get(o, "size", NULL), *crop = reader_get(o, "crop_size", NULL);
    int shortest = t->side, width = t->side, height = t->side;
    if (json_is_object(size) && !tower_int(in, size, "shortest_edge", NULL, 1, 1 << 14, &shortest))
        return false;
    if (json_is_object(crop) && (!tower_int(in, crop, "width", NULL, 1, 1 << 14, &width) ||
                                 !tower_int(in, crop, "height", NULL, 1, 1 << 14, &height)))
        return false;
    t->longest = shortest;
    return (width == t->side && height == t->side && shortest >= t->side) ||
           error_set(in->err,
                     "%s: preprocessor_config.json: crop_size: %d x %d of %d, expected the "
                     "tower's %d",
                     in->f->path, width, height, shortest, t->side);
}

/* The shorter side is resized to the square's side, and the square is cropped from the centre. */
static bool plan_crop(const struct tower_config *t, int width, int height, struct image_plan *out,
                      struct error *err)
{
    int shortest = t->longest ? t->longest : t->side, w = shortest, h = shortest;
    int64_t longer =
        width > height ? (int64_t)shortest * width / height : (int64_t)shortest * height / width;
    if (longer > IMAGE_MAX_SIDE)
        return error_set(err, "an image of %d x %d is too narrow", width, height);
    *(width > height ? &w : &h) = (int)longer;
    plan_add_view(t, out, plan_add_size(out, -1, w, h), (w - t->side) / 2, (h - t->side) / 2,
                  t->side, t->side);
    return true;
}

/* Without this key, readers skip the last layer. */
static void write_llava(const struct config *c, struct gguf_writer *w)
{
    const int32_t layer = c->n_layers;
    gguf_set_array(w, "clip.vision.feature_layer", META_I32, &layer, 1);
}

static void merge_llava(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    struct merge_step *s = tower_step(b);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &llava_up, b->c->n_embd, t->n_out);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &llava_down, t->n_out, t->n_out);
}

const struct tower_family tower_llava = {
    .name = "mlp",
    .types = {"llava"},
    .roots = {SIGLIP_ROOTS},
    .names = {TOWER_SIGLIP, .class_token = {"=v.class_embd", "=model.embeddings.class_embedding"},
              .pre_norm = TOWER_NORM("v.pre_ln", "model.pre_layrnorm")},
    .norm = NORM_LAYER,
    .gelu = ACT_PLAIN_GELU_TANH,
    .feature = "<image>",
    .defaults = defaults_llava,
    .read = read_llava,
    .read_pixels = read_crop,
    .plan = plan_crop,
    .limit = fixed,
    .most = most_square,
    .write = write_llava,
    .merge = merge_llava};
