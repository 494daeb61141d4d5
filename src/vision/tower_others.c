/*
 * Towers with layers of their own:
 *   Gemma 4: norms of q, k and v, a list of positions for each axis and 2-D RoPE, products with bounds, patches are averaged
 *   Pixtral (Mistral 3, Ministral 3): 2-D RoPE, no table of positions, images of any ratio, a mark after each row
 *   InternViT (InternVL 3): a class token, layer scale, tiles and the whole image
 *   MoonViT (Kimi K2.5): a bicubic table and 2-D RoPE, images of any ratio, black at the edges
 */
#include "vision/family.h"

#include <math.h>
#include <string.h>

/* Gemma 4 */

#define GEMMA(part) "model.encoder.layers.%d." part
static const struct tensor_name gemma_bias = {"=v.std_bias", "=model.std_bias"},
                                gemma_scale = {"=v.std_scale", "=model.std_scale"},
                                gemma_project = {"mm.input_projection",
                                                 "lm_head.embedding_projection"};

static void defaults_gemma4(struct config *c, struct tower_config *t)
{
    c->rope.theta = 100;
    c->attn_scale = 1;
    t->table = TABLE_TWO_LISTS;
    t->axes = AXES_COLUMNS_FIRST;
    t->value_norm = true;
    t->patch = 16;
    t->merge = 3;
    t->grid = 10240;
    t->max_pixels = 280; /* features, until patch and merge are known */
}

static bool read_gemma4(const struct meta_reader *in, struct tower_config *t)
{
    const struct tensor *table =
        build_find(in->f, in->c, &t->family->names.positions, 0, 0, "weight");
    const struct tensor *low = build_find(in->f, in->c, &t->family->names.q, 0, 0, "input_min");
    if (!in->f->is_gguf && (!reader_int(in, "pooling_kernel_size", NULL, 1, 8, false, &t->merge) ||
                            !reader_bool(in, "use_clipped_linears", &t->clips)))
        return false;
    t->clips |= in->f->is_gguf && low;
    t->channels_last = !in->f->is_gguf;
    t->grid = table ? (int)table->dims[1] : 0;
    t->standardise = build_find(in->f, in->c, &gemma_bias, 0, 0, "weight") != NULL;
    return true;
}

static bool read_budget(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    int tokens = (int)t->max_pixels;
    if (!tower_int(in, o, "max_soft_tokens", "preproc_max_tokens", 1, 1 << 16, &tokens))
        return false;
    t->max_pixels = (int64_t)tokens * t->merge * t->merge * t->patch * t->patch;
    t->scales_itself = true;
    for (int i = 0; i < 3; i++)
        t->mean[i] = t->std[i] = 0.5f;
    return true;
}

/* The largest size of this ratio, in whole features, that has at most max_pixels. */
static bool plan_budget(const struct tower_config *t, int width, int height, struct image_plan *out,
                        struct error *err)
{
    int64_t unit = (int64_t)t->patch * t->merge, most = t->max_pixels / unit / unit * unit;
    double scale = sqrt((double)t->max_pixels / ((double)width * height));
    int64_t w = (int64_t)floor(scale * width / (double)unit) * unit,
            h = (int64_t)floor(scale * height / (double)unit) * unit;
    (void)err;
    if (h < unit) {
        h = unit;
        w = (int64_t)(width / height) * unit;
        w = w > most ? most : w;
    } else if (w < unit) {
        w = unit;
        h = (int64_t)(height / width) * unit;
        h = h > most ? most : h;
    }
    plan_whole(t, out, (int)w, (int)h);
    return true;
}

static bool limit_area(struct tower_config *t, int n)
{
    int64_t most = (int64_t)n * t->patch * t->merge * t->patch * t->merge;
    t->max_pixels = t->max_pixels > most ? most : t->max_pixels;
    return true;
}

static int most_area(const struct tower_config *t)
{
    return (int)(t->max_pixels / t->patch / t->patch);
}

static void write_gemma4(const struct config *c, struct gguf_writer *w)
{
    const struct tower_config *t = c->tower;
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge;
    gguf_set_u32(w, "clip.vision.preproc_max_tokens", (uint32_t)(t->max_pixels / feature));
}

/* The mean is multiplied by sqrt(E) before the features are standardised and normed. */
static void merge_gemma4(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd;
    float root = sqrtf((float)E);
    struct merge_step *s = tower_step(b);
    s->rows = t->merge * t->merge;
    s->mean = true;
    if (t->standardise) {
        s->joined = (struct norm){
            .kind = NORM_AFFINE,
            .bias = build_vector(b, 0, &gemma_bias, E, (struct adjust){.times = -1 / root}),
            .gain = build_vector(b, 0, &gemma_scale, E, (struct adjust){.times = root})};
    }
    s = tower_step(b);
    s->norm = (struct norm){.kind = NORM_RMS,
                            .eps = t->standardise ? b->c->norm_eps : b->c->norm_eps / (float)E};
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &gemma_project, E, t->n_out);
}

const struct tower_family tower_gemma4 = {
    .name = "gemma4v",
    .types = {"gemma4"},
    .roots = {{"model.vision_tower.", "model.embed_vision"}, {"vision_tower.", "embed_vision"}},
    .names = {.patches = {TOWER_GGUF_PATCHES, "model.patch_embedder.input_proj"},
              .positions = {TOWER_GGUF_POSITIONS, "=model.patch_embedder.position_embedding_table"},
              .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), GEMMA("input_layernorm")),
              .attn_post =
                  TOWER_NORM(TOWER_BLOCK("attn_post_norm"), GEMMA("post_attention_layernorm")),
              .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), GEMMA("pre_feedforward_layernorm")),
              .ffn_post =
                  TOWER_NORM(TOWER_BLOCK("ffn_post_norm"), GEMMA("post_feedforward_layernorm")),
              .q = {TOWER_BLOCK("attn_q"), GEMMA("self_attn.q_proj.linear")},
              .k = {TOWER_BLOCK("attn_k"), GEMMA("self_attn.k_proj.linear")},
              .v = {TOWER_BLOCK("attn_v"), GEMMA("self_attn.v_proj.linear")},
              .o = {TOWER_BLOCK("attn_out"), GEMMA("self_attn.o_proj.linear")},
              .q_norm = {TOWER_BLOCK("attn_q_norm"), GEMMA("self_attn.q_norm")},
              .k_norm = {TOWER_BLOCK("attn_k_norm"), GEMMA("self_attn.k_norm")},
              .gate = {TOWER_BLOCK("ffn_gate"), GEMMA("mlp.gate_proj.linear")},
              .up = {TOWER_BLOCK("ffn_up"), GEMMA("mlp.up_proj.linear")},
              .down = {TOWER_BLOCK("ffn_down"), GEMMA("mlp.down_proj.linear")}},
    .norm = NORM_RMS,
    .gelu = ACT_PLAIN_GELU_TANH,
    .pairs = {ROTARY_HALVES, ROTARY_HALVES},
    .begin = "<|image>",
    .feature = "<|image|>",
    .end = "<image|>",
    .defaults = defaults_gemma4,
    .read = read_gemma4,
    .read_pixels = read_budget,
    .plan = plan_budget,
    .limit = limit_area,
    .most = most_area,
    .square_table = true,
    .write = write_gemma4,
    .merge = merge_gemma4};

/* Pixtral */

#define PIXTRAL(part) "model.transformer.layers.%d." part
static const struct norm_name pixtral_norm = TOWER_NORM("mm.input_norm", "lm_head.norm");
static const struct tensor_name pixtral_join = {"mm.patch_merger",
                                                "lm_head.patch_merger.merging_layer"},
                                pixtral_up = {"mm.1", "lm_head.linear_1"},
                                pixtral_down = {"mm.2", "lm_head.linear_2"};

static void clip_colours(struct tower_config *t)
{
    static const float mean[] = TOWER_CLIP_MEAN, std[] = TOWER_CLIP_STD;
    memcpy(t->mean, mean, sizeof mean);
    memcpy(t->std, std, sizeof std);
}

static void defaults_pixtral(struct config *c, struct tower_config *t)
{
    clip_colours(t);
    c->norm_eps = t->merge_eps = 1e-5f;
    t->axes = AXES_INTERLEAVED;
    t->patch = 14;
    t->side = 1540;
}

static bool read_pixtral(const struct meta_reader *in, struct tower_config *t)
{
    struct meta_reader whole = *in, text = *in;
    double eps = (double)t->merge_eps;
    whole.hf = in->f->config;
    text.hf = reader_get(in->f->config, "text_config", NULL);
    in->c->norm_eps = 1e-5f; /* in the model's code */
    bool ok = in->f->is_gguf
                  ? reader_gguf_float(in, "projector.layer_norm_epsilon", 0, 1, false, &eps)
                  : reader_int(&whole, "spatial_merge_size", NULL, 1, 8, false, &t->merge) &&
                        reader_number(&text, text.hf, "rms_norm_eps", 0, 1, false, &eps);
    t->merge_eps = (float)eps;
    return ok;
}

static bool read_longest(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    return tower_int(in, reader_get(o, "size", NULL), "longest_edge", "preproc_image_size", 1,
                     1 << 14, &t->side);
}

/* Neither side exceeds `side` pixels. Sides are padded to whole features. */
static bool plan_longest(const struct tower_config *t, int width, int height,
                         struct image_plan *out, struct error *err)
{
    int unit = t->patch * t->merge;
    double ratio = (double)(width > height ? width : height) / t->side;
    (void)err;
    if (ratio > 1) {
        width = (int)floor(width / ratio);
        height = (int)floor(height / ratio);
    }
    int w = width > 1 ? (width - 1) / unit + 1 : 1, h = height > 1 ? (height - 1) / unit + 1 : 1;
    plan_whole(t, out, w * unit, h * unit);
    return true;
}

static int most_longest(const struct tower_config *t)
{
    int unit = t->patch * t->merge, side = ((t->side - 1) / unit + 1) * t->merge;
    return side * side;
}

static bool limit_longest(struct tower_config *t, int n)
{
    while (t->side > 1 && most_longest(t) > n * t->merge * t->merge)
        t->side -= t->side > t->patch ? t->patch : 1;
    return true;
}

#define PIXTRAL_BREAK "[IMG_BREAK]"

static void text_pixtral(const struct tower_config *t, const struct image_plan *p, int index,
                         struct buf *out)
{
    int n = plan_n_runs(t, p);
    (void)index;
    for (int i = 0; i < n; i++)
        buf_addf(out, "%s%s", t->family->feature, i + 1 < n ? PIXTRAL_BREAK : "[IMG_END]");
}

static void write_pixtral(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "clip.vision.preproc_image_size", (uint32_t)c->tower->side);
    gguf_set_f32(w, "clip.vision.projector.layer_norm_epsilon", c->tower->merge_eps);
}

static void merge_pixtral(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge;
    struct merge_step *s;
    if (build_has(b, &pixtral_join, 0)) {
        s = tower_step(b);
        s->rows = rows;
        s->interleaved = true;
        s->norm = tower_norm(b, 0, &pixtral_norm, E);
        s->norm.eps = t->merge_eps;
        s->w = build_matrix(b, WEIGHT_LINEAR, 0, &pixtral_join, rows * E, E);
    }
    s = tower_step(b);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &pixtral_up, E, t->n_out);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &pixtral_down, t->n_out, t->n_out);
}

const struct tower_family tower_pixtral = {
    .name = "pixtral",
    .types = {"mistral3", "llava"},
    .roots = {{"vision_tower.", "multi_modal_projector"},
              {"model.vision_tower.", "model.multi_modal_projector"}},
    .names = {.patches = {TOWER_GGUF_PATCHES, "model.patch_conv"},
              .pre_norm = TOWER_NORM("v.pre_ln", "model.ln_pre"),
              .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), PIXTRAL("attention_norm")),
              .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), PIXTRAL("ffn_norm")),
              .q = {TOWER_BLOCK("attn_q"), PIXTRAL("attention.q_proj")},
              .k = {TOWER_BLOCK("attn_k"), PIXTRAL("attention.k_proj")},
              .v = {TOWER_BLOCK("attn_v"), PIXTRAL("attention.v_proj")},
              .o = {TOWER_BLOCK("attn_out"), PIXTRAL("attention.o_proj")},
              .gate = {TOWER_BLOCK("ffn_gate"), PIXTRAL("feed_forward.gate_proj")},
              .up = {TOWER_BLOCK("ffn_up"), PIXTRAL("feed_forward.up_proj")},
              .down = {TOWER_BLOCK("ffn_down"), PIXTRAL("feed_forward.down_proj")}},
    .norm = NORM_RMS,
    .gelu = ACT_PLAIN_GELU,
    .pairs = {ROTARY_ADJACENT, ROTARY_PLAIN},
    .feature = "[IMG]",
    .row_runs = true,
    .row_mark = PIXTRAL_BREAK,
    .defaults = defaults_pixtral,
    .read = read_pixtral,
    .read_pixels = read_longest,
    .plan = plan_longest,
    .text = text_pixtral,
    .limit = limit_longest,
    .most = most_longest,
    .write = write_pixtral,
    .merge = merge_pixtral};

/* InternViT */

#define INTERN(part) "model.encoder.layer.%d." part
static const struct norm_name intern_norm = TOWER_NORM("mm.model.mlp.0", "lm_head.layer_norm");
static const struct tensor_name intern_up = {"mm.model.mlp.1", "lm_head.linear_1"},
                                intern_down = {"mm.model.mlp.3", "lm_head.linear_2"};

static void defaults_intern(struct config *c, struct tower_config *t)
{
    clip_colours(t);
    (void)c;
    t->table = TABLE_CUBIC;
    t->class_token = true;
    t->patch = 14;
    t->side = 448;
    t->merge = 2;
    t->min_tiles = 1;
    t->max_tiles = 12;
}

static bool read_intern(const struct meta_reader *in, struct tower_config *t)
{
    double ratio = 1.0 / t->merge;
    const char *norm = json_string_value(reader_get(in->hf, "norm_type", NULL));
    char bias[96];
    if (in->f->is_gguf) {
        build_name(in->f, in->c, &t->family->names.attn_norm.gain, 0, 0, "bias", bias, sizeof bias);
        t->rms = !tensorfile_find(in->f, bias);
    } else {
        if (!reader_number(in, in->f->config, "downsample_ratio", 0.125, 1, false, &ratio))
            return false;
        t->rms = norm && !strcmp(norm, "rms_norm");
    }
    t->merge = (int)lround(1 / ratio);
    t->grid = t->side / t->patch;
    return true;
}

/* The processor ignores crop_to_patches: images are always cut into tiles. */
static bool read_tiles(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *size = reader_get(o, "size", NULL);
    int width = t->side, height = t->side, tower = t->grid * t->patch;
    if (!tower_int(in, size, "width", NULL, 1, 1 << 14, &width) ||
        !tower_int(in, size, "height", NULL, 1, 1 << 14, &height) ||
        !tower_int(in, o, "min_patches", "preproc_min_tiles", 1, PLAN_MAX_VIEWS - 1,
                   &t->min_tiles) ||
        !tower_int(in, o, "max_patches", "preproc_max_tiles", t->min_tiles, PLAN_MAX_VIEWS - 1,
                   &t->max_tiles))
        return false;
    t->side = width;
    return (width == height && width % (t->patch * t->merge) == 0) ||
           error_set(in->err,
                     "%s: preprocessor_config.json: size: %d x %d, expected a square like the "
                     "tower's %d",
                     in->f->path, width, height, tower);
}

static bool plan_tiles(const struct tower_config *t, int width, int height, struct image_plan *out,
                       struct error *err)
{
    int cols, rows, side = t->side;
    (void)err;
    plan_best_tiles(t, width, height, side, &cols, &rows);
    out->tile_cols = cols;
    out->tile_rows = rows;
    int at = plan_add_size(out, -1, cols * side, rows * side);
    for (int i = 0; i < cols * rows; i++)
        plan_add_view(t, out, at, i % cols * side, i / cols * side, side, side);
    if (cols * rows > 1)
        plan_whole(t, out, side, side);
    return true;
}

static int most_tile(const struct tower_config *t)
{
    return t->side / t->patch * (t->side / t->patch);
}

static bool limit_tiles(struct tower_config *t, int n)
{
    int each = most_tile(t) / t->merge / t->merge;
    while (t->max_tiles > t->min_tiles && (t->max_tiles + 1) * each > n)
        t->max_tiles--;
    return (t->max_tiles > 1 ? t->max_tiles + 1 : 1) * each <= n;
}

static void write_intern(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "clip.vision.preproc_min_tiles", (uint32_t)c->tower->min_tiles);
    gguf_set_u32(w, "clip.vision.preproc_max_tiles", (uint32_t)c->tower->max_tiles);
}

static void merge_intern(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int rows = t->merge * t->merge, wide = rows * b->c->n_embd;
    struct merge_step *s = tower_step(b);
    s->rows = rows;
    s->joined = build_layer_norm(b, 0, &intern_norm.gain, &intern_norm.bias, wide);
    s->joined.eps = 1e-5f;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &intern_up, wide, t->n_out);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &intern_down, t->n_out, t->n_out);
}

const struct tower_family tower_intern = {
    .name = "internvl",
    .types = {"internvl"},
    .roots = {{"vision_tower.", "multi_modal_projector"},
              {"model.vision_tower.", "model.multi_modal_projector"}},
    .names = {.patches = {TOWER_GGUF_PATCHES, "model.embeddings.patch_embeddings.projection"},
              .positions = {TOWER_GGUF_POSITIONS, "=model.embeddings.position_embeddings"},
              .class_token = {"=v.class_embd", "=model.embeddings.cls_token"},
              .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), INTERN("layernorm_before")),
              .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), INTERN("layernorm_after")),
              .attn_scale = {TOWER_BLOCK("ls1"), "=" INTERN("lambda_1")},
              .ffn_scale = {TOWER_BLOCK("ls2"), "=" INTERN("lambda_2")},
              .q = {TOWER_BLOCK("attn_q"), INTERN("attention.q_proj")},
              .k = {TOWER_BLOCK("attn_k"), INTERN("attention.k_proj")},
              .v = {TOWER_BLOCK("attn_v"), INTERN("attention.v_proj")},
              .o = {TOWER_BLOCK("attn_out"), INTERN("attention.projection_layer")},
              .q_norm = {TOWER_BLOCK("attn_q_norm"), INTERN("attention.q_norm")},
              .k_norm = {TOWER_BLOCK("attn_k_norm"), INTERN("attention.k_norm")},
              .up = {TOWER_BLOCK("ffn_up"), INTERN("mlp.fc1")},
              .down = {TOWER_BLOCK("ffn_down"), INTERN("mlp.fc2")}},
    .norm = NORM_LAYER,
    .gelu = ACT_PLAIN_GELU,
    .begin = "<img>",
    .feature = "<IMG_CONTEXT>",
    .end = "</img>",
    .defaults = defaults_intern,
    .read = read_intern,
    .read_pixels = read_tiles,
    .plan = plan_tiles,
    .limit = limit_tiles,
    .most = most_tile,
    .write = write_intern,
    .merge = merge_intern};

/* MoonViT */

#define MOON(part) "model.encoder.blocks.%d." part
static const struct norm_name moon_last = TOWER_NORM("v.post_ln", "model.encoder.final_layernorm"),
                              moon_norm = TOWER_NORM("mm.input_norm", "lm_head.pre_norm");
static const struct tensor_name moon_up = {"mm.1", "lm_head.proj.0"},
                                moon_down = {"mm.2", "lm_head.proj.2"};

static void defaults_kimi(struct config *c, struct tower_config *t)
{
    c->norm_eps = 1e-5f;
    t->table = TABLE_CUBIC;
    t->axes = AXES_COLUMNS_FIRST;
    t->patch = 14;
    t->merge = 2;
    t->max_side = 512;
    t->max_pixels = 16384; /* patches, until their size is known */
}

static bool read_kimi(const struct meta_reader *in, struct tower_config *t)
{
    const struct tensor *table =
        build_find(in->f, in->c, &t->family->names.positions, 0, 0, "weight");
    const json_t *kernel = reader_get(in->hf, "merge_kernel_size", NULL);
    int side = (int)json_integer_value(json_array_get(kernel, 0));
    if (json_is_array(kernel) && (json_array_size(kernel) != 2 || side < 1 || side > 8 ||
                                  side != (int)json_integer_value(json_array_get(kernel, 1))))
        return error_set(in->err, "%s: config.json: merge_kernel_size: not a square", in->f->path);
    t->merge = side > 0 ? side : t->merge;
    in->c->norm_eps = 1e-5f; /* in the model's code */
    t->grid = table ? (int)table->dims[1] : 0;
    return !table || table->dims[1] == table->dims[2] ||
           error_set(in->err, "%s: the image tower's table of positions is no square", in->f->path);
}

static bool read_moon_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *inner = reader_get(o, "media_proc_cfg", NULL);
    int patches = (int)t->max_pixels;
    double most = 0;
    if (!tower_int(in, inner, "in_patch_limit", NULL, 1, 1 << 20, &patches) ||
        !tower_int(in, inner, "patch_limit_on_one_side", NULL, 1, 1 << 12, &t->max_side) ||
        !tower_int(in, o, "max_patches", NULL, 1, 1 << 20, &patches) ||
        !tower_int(in, reader_get(o, "size", NULL), "max_height", "preproc_max_side", 1, 1 << 12,
                   &t->max_side) ||
        !tower_number(in, NULL, NULL, "image_max_pixels", 1, 1e12, &most))
        return false;
    t->max_pixels = most > 0 ? (int64_t)most : (int64_t)patches * t->patch * t->patch;
    return true;
}

/* Images are never enlarged. Sides are padded to whole features. */
static bool plan_moon(const struct tower_config *t, int width, int height, struct image_plan *out,
                      struct error *err)
{
    int P = t->patch, most = t->max_side * P;
    double budget = (double)t->max_pixels / P / P, rows = height / P, cols = width / P;
    double scale = sqrt(budget / ((rows > 1 ? rows : 1) * (cols > 1 ? cols : 1)));
    scale = fmin(fmin(1, scale), fmin((double)most / height, (double)most / width));
    int w = (int)(width * scale), h = (int)(height * scale);
    (void)err;
    plan_whole(t, out, w < 1 ? 1 : w > most ? most : w, h < 1 ? 1 : h > most ? most : h);
    return true;
}

/* The budget counts whole patches only. Padding may exceed it for images a few patches wide. */
static int most_moon(const struct tower_config *t)
{
    int budget = (int)(t->max_pixels / t->patch / t->patch), side = t->max_side + t->merge;
    int room = budget + budget / 8 + 4 * t->merge * side;
    return room < side * side ? room : side * side;
}

static void write_kimi(const struct config *c, struct gguf_writer *w)
{
    const struct tower_config *t = c->tower;
    gguf_set_u32(w, "clip.vision.image_min_pixels", (uint32_t)(8 * t->patch * t->patch));
    gguf_set_u32(w, "clip.vision.image_max_pixels", (uint32_t)t->max_pixels);
    gguf_set_u32(w, "clip.vision.preproc_max_side", (uint32_t)t->max_side);
}

static void merge_kimi(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge, wide = rows * E;
    struct merge_step *s = tower_step(b);
    s->norm = tower_norm(b, 0, &moon_last, E);
    s = tower_step(b);
    s->rows = rows;
    s->norm = tower_norm(b, 0, &moon_norm, E);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &moon_up, wide, wide);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &moon_down, wide, t->n_out);
}

const struct tower_family tower_kimi = {
    .name = "kimik25",
    .types = {"kimi_k25"},
    .roots = {{"vision_tower.", "mm_projector"}},
    .names = {.patches = {TOWER_GGUF_PATCHES, "model.patch_embed.proj"},
              .positions = {TOWER_GGUF_POSITIONS, "model.patch_embed.pos_emb"},
              .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), MOON("norm0")),
              .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), MOON("norm1")),
              .qkv = {TOWER_BLOCK("attn_qkv"), MOON("wqkv")},
              .o = {TOWER_BLOCK("attn_out"), MOON("wo")},
              .up = {TOWER_BLOCK("ffn_up"), MOON("mlp.fc0")},
              .down = {TOWER_BLOCK("ffn_down"), MOON("mlp.fc1")}},
    .norm = NORM_LAYER,
    .gelu = ACT_PLAIN_GELU_TANH,
    .pairs = {ROTARY_HALVES_ADJACENT, ROTARY_WOVEN},
    .begin = "<|media_begin|>image<|media_content|>",
    .feature = "<|media_pad|>",
    .end = "<|media_end|>",
    .defaults = defaults_kimi,
    .read = read_kimi,
    .read_pixels = read_moon_pixels,
    .plan = plan_moon,
    .limit = limit_area,
    .most = most_moon,
    .square_table = true,
    .write = write_kimi,
    .merge = merge_kimi};
