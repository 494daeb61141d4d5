/*
 * Towers of Qwen and GLM: patches of two equal frames, 2-D RoPE, four patches per feature. In the decoder, features have
 * the M-RoPE positions of their grid.
 *   Qwen3-VL, Qwen3.5: a resampled table of positions; in Qwen3-VL features of inner layers for the decoder (deepstack)
 *   Qwen2.5-VL: windows in all but a few layers
 *   GLM-4.1V to GLM-4.6V: a bicubic table, a convolution as merger
 */
#include "base/mem.h"
#include "vision/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define BLOCK(part) "model.blocks.%d." part
#define LAYERS(up_name, down_name)                                                                 \
    .patches = {TOWER_GGUF_PATCHES, "model.patch_embed.proj"},                                     \
    .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), BLOCK("norm1")),                                   \
    .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), BLOCK("norm2")),                                    \
    .qkv = {TOWER_BLOCK("attn_qkv"), BLOCK("attn.qkv")},                                           \
    .q = {TOWER_BLOCK("attn_q"), BLOCK("attn.qkv")},                                               \
    .k = {TOWER_BLOCK("attn_k"), BLOCK("attn.qkv")},                                               \
    .v = {TOWER_BLOCK("attn_v"), BLOCK("attn.qkv")},                                               \
    .o = {TOWER_BLOCK("attn_out"), BLOCK("attn.proj")},                                            \
    .up = {TOWER_BLOCK("ffn_up"), BLOCK(up_name)},                                                 \
    .down = {TOWER_BLOCK("ffn_down"), BLOCK(down_name)}

/* Sizes of the whole image. GLM's count both frames. */
static bool read_area(const struct meta_reader *in, const json_t *o, struct tower_config *t,
                      int frames)
{
    const json_t *size = reader_get(o, "size", NULL);
    double least = (double)t->min_pixels * frames, most = (double)t->max_pixels * frames;
    double min = (double)t->min_pixels, max = (double)t->max_pixels;
    if (!tower_number(in, o, "min_pixels", NULL, 1, 1e12, &least) ||
        !tower_number(in, o, "max_pixels", NULL, 1, 1e12, &most) ||
        !tower_number(in, size, "shortest_edge", NULL, 1, 1e12, &least) ||
        !tower_number(in, size, "longest_edge", NULL, 1, 1e12, &most) ||
        !tower_number(in, NULL, NULL, "image_min_pixels", 1, 1e12, &min) ||
        !tower_number(in, NULL, NULL, "image_max_pixels", 1, 1e12, &max))
        return false;
    t->min_pixels = (int64_t)(in->f->is_gguf ? min : least / frames);
    t->max_pixels = (int64_t)(in->f->is_gguf ? max : most / frames);
    return true;
}

static bool read_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    return read_area(in, o, t, 1);
}

static bool limit(struct tower_config *t, int n)
{
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge, most = feature * n;
    if (t->max_pixels <= most)
        return true;
    t->max_pixels = most;
    if (t->min_pixels >
        most / 4) /* else no multiple of a feature's size may lie between the bounds */
        t->min_pixels = most / 4;
    return true;
}

static int most(const struct tower_config *t)
{
    double side = t->patch * t->merge, least = (double)t->min_pixels;
    /* Room for a small image enlarged to whole features, even at the extreme ratio of 200. */
    double grown = least + side * (sqrt(least / 200) + sqrt(least * 200)) + side * side;
    double area = grown > (double)t->max_pixels ? grown : (double)t->max_pixels;
    return ((int)(area / (side * side)) + 1) * t->merge * t->merge;
}

static void defaults(struct config *c, struct tower_config *t)
{
    (void)c;
    t->merge = t->frames = 2;
    t->axes = AXES_ROWS_FIRST;
    t->min_pixels = 65536;
    t->max_pixels = 16777216;
}

static void write_area(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "clip.vision.image_min_pixels", (uint32_t)c->tower->min_pixels);
    gguf_set_u32(w, "clip.vision.image_max_pixels", (uint32_t)c->tower->max_pixels);
}

/* Qwen3-VL */

static const struct norm_name merge_norm = TOWER_NORM("v.post_ln", "model.merger.norm"),
                              level_norm = TOWER_NORM("v.deepstack.%d.norm",
                                                      "model.deepstack_merger_list.%d.norm");
static const struct tensor_name merge_up = {"mm.0", "model.merger.linear_fc1"},
                                merge_down = {"mm.2", "model.merger.linear_fc2"},
                                level_up = {"v.deepstack.%d.fc1",
                                            "model.deepstack_merger_list.%d.linear_fc1"},
                                level_down = {"v.deepstack.%d.fc2",
                                              "model.deepstack_merger_list.%d.linear_fc2"};

static bool read_levels(const struct meta_reader *in, struct tower_config *t)
{
    const json_t *list = reader_get(in->hf, "deepstack_visual_indexes", NULL);
    size_t n = json_array_size(list);
    if (n > TOWER_MAX_LEVELS)
        return error_set(in->err, "%s: config.json: deepstack_visual_indexes: %zu; at most %d",
                         in->f->path, n, TOWER_MAX_LEVELS);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t layer = json_is_integer(v) ? json_integer_value(v) : -1;
        if (layer < (i ? t->level[i - 1] + 1 : 0) || layer >= in->c->n_layers)
            return error_set(in->err,
                             "%s: config.json: deepstack_visual_indexes[%zu]: not a later layer",
                             in->f->path, i);
        t->level[i] = (int)layer;
    }
    t->n_levels = (int)n;
    return true;
}

static bool read_gguf_levels(const struct meta_reader *in, struct tower_config *t)
{
    const struct meta *m = tensorfile_meta(in->f, "clip.vision.is_deepstack_layers");
    for (int i = 0; m && i < in->c->n_layers; i++) {
        double is = 0;
        if (m->type != META_ARRAY || !meta_array_number(&m->v.a, (size_t)i, &is))
            return error_set(in->err,
                             "%s: clip.vision.is_deepstack_layers: expected one for each layer",
                             in->f->path);
        if (is != 0 && t->n_levels == TOWER_MAX_LEVELS)
            return error_set(in->err, "%s: clip.vision.is_deepstack_layers: more than %d",
                             in->f->path, TOWER_MAX_LEVELS);
        if (is != 0)
            t->level[t->n_levels++] = i;
    }
    return true;
}

static bool read_qwen3(const struct meta_reader *in, struct tower_config *t)
{
    int cells = 0;
    t->table = TABLE_CORNERS;
    if (in->f->is_gguf) {
        t->grid = t->side / t->patch;
        return read_gguf_levels(in, t);
    }
    if (!reader_int(in, "num_position_embeddings", NULL, 1, TOWER_MAX_GRID * TOWER_MAX_GRID, true,
                    &cells) ||
        !read_levels(in, t))
        return false;
    t->grid = (int)lround(sqrt(cells));
    return t->grid * t->grid == cells ||
           error_set(in->err, "%s: config.json: num_position_embeddings: %d is no square",
                     in->f->path, cells);
}

/* level: of deepstack; -1 = the last layer's features, whose norm is per patch */
static void merge_level(struct net_builder *b, int level, struct merger *m)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge, wide = rows * E;
    bool last = level < 0;
    /* a GGUF names them by the layer, a folder by number */
    int at = last ? 0 : b->f->is_gguf ? t->level[level] : level, first_spec = b->n_specs;
    m->after = last ? b->c->n_layers - 1 : t->level[level];
    m->at = last ? 0 : (level + 1) * t->n_out;
    m->n_steps = 2;
    struct norm norm = tower_norm(b, at, last ? &merge_norm : &level_norm, last ? E : wide);
    m->steps[0] = (struct merge_step){
        .rows = rows,
        .act = ACT_NONE,
        .w = build_matrix(b, WEIGHT_LINEAR, at, last ? &merge_up : &level_up, wide, wide)};
    *(last ? &m->steps[0].norm : &m->steps[0].joined) = norm;
    m->steps[1] = (struct merge_step){
        .act = ACT_PLAIN_GELU,
        .w = build_matrix(b, WEIGHT_LINEAR, at, last ? &merge_down : &level_down, wide, t->n_out)};
    for (int i = first_spec; !last && i < b->n_specs; i++)
        b->specs[i].gguf_layer = 1 + t->level[level];
}

static void write_qwen3(const struct config *c, struct gguf_writer *w)
{
    uint8_t is[CONFIG_MAX_LAYERS] = {0};
    for (int i = 0; i < c->tower->n_levels; i++)
        is[c->tower->level[i]] = 1;
    write_area(c, w);
    gguf_set_array(w, "clip.vision.is_deepstack_layers", META_BOOL, is, (size_t)c->n_layers);
}

static void merge_qwen3(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    b->net->n_mergers = t->n_levels + 1;
    b->net->mergers = mem_zalloc((size_t)b->net->n_mergers, sizeof *b->net->mergers);
    for (int i = 0; i <= t->n_levels; i++)
        merge_level(b, i < t->n_levels ? i : -1, &b->net->mergers[i]);
}

const struct tower_family tower_qwen3 = {
    .name = "qwen3vl_merger",
    .types = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"},
    .roots = {{"model.visual.", ""}, {"visual.", ""}},
    .names = {LAYERS("mlp.linear_fc1", "mlp.linear_fc2"),
              .positions = {TOWER_GGUF_POSITIONS, "model.pos_embed"}},
    .norm = NORM_LAYER,
    .gelu = ACT_PLAIN_GELU_TANH,
    .grid_positions = true,
    .begin = "<|vision_start|>",
    .feature = "<|image_pad|>",
    .end = "<|vision_end|>",
    .defaults = defaults,
    .read = read_qwen3,
    .read_pixels = read_pixels,
    .plan = plan_keep_ratio,
    .limit = limit,
    .most = most,
    .write = write_qwen3,
    .merge = merge_qwen3};

/* Qwen2.5-VL */

static const struct norm_name query_norm = TOWER_NORM("v.post_ln", "model.merger.ln_q");
static const struct tensor_name query_up = {"mm.0", "model.merger.mlp.0"},
                                query_down = {"mm.2", "model.merger.mlp.2"};

static bool read_qwen25(const struct meta_reader *in, struct tower_config *t)
{
    const json_t *list = reader_get(in->hf, "fullatt_block_indexes", NULL), *v;
    size_t i;
    int pattern = 0, window = 112;
    if (in->f->is_gguf) {
        if (!reader_gguf_int(in, "n_wa_pattern", 1, CONFIG_MAX_LAYERS, true, &pattern) ||
            !reader_gguf_int(in, "window_size", 1, 1 << 16, false, &window))
            return false;
        for (int k = pattern - 1; k < in->c->n_layers; k += pattern)
            t->full[k] = true;
    } else if (!reader_int(in, "window_size", NULL, 1, 1 << 16, false, &window)) {
        return false;
    }
    json_array_foreach((json_t *)list, i, v)
    {
        json_int_t layer = json_is_integer(v) ? json_integer_value(v) : -1;
        if (layer < 0 || layer >= in->c->n_layers)
            return error_set(in->err, "%s: config.json: fullatt_block_indexes[%zu]: not a layer",
                             in->f->path, i);
        t->full[layer] = true;
    }
    t->window = window / t->merge / t->patch * t->merge;
    return t->window > 0 ||
           error_set(in->err, "%s: window_size: %d is less than a feature", in->f->path, window);
}

static void defaults_qwen25(struct config *c, struct tower_config *t)
{
    defaults(c, t);
    t->min_pixels = 3136;
    t->max_pixels = 12845056;
    static const float mean[] = TOWER_CLIP_MEAN, std[] = TOWER_CLIP_STD;
    memcpy(t->mean, mean, sizeof mean);
    memcpy(t->std, std, sizeof std);
}

/* A GGUF has one number n: every n-th layer has full attention. */
static void write_qwen25(const struct config *c, struct gguf_writer *w)
{
    const struct tower_config *t = c->tower;
    int n = 0;
    while (n < c->n_layers - 1 && !t->full[n])
        n++;
    write_area(c, w);
    gguf_set_u32(w, "clip.vision.n_wa_pattern", (uint32_t)n + 1);
    gguf_set_u32(w, "clip.vision.window_size", (uint32_t)(t->window * t->patch));
}

static void merge_qwen25(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int rows = t->merge * t->merge, wide = rows * b->c->n_embd;
    struct merge_step *s = tower_step(b);
    s->rows = rows;
    s->norm = tower_norm(b, 0, &query_norm, b->c->n_embd);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &query_up, wide, wide);
    s = tower_step(b);
    s->act = ACT_PLAIN_GELU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &query_down, wide, t->n_out);
}

const struct tower_family tower_qwen25 = {
    .name = "qwen2.5vl_merger",
    .types = {"qwen2_5_vl"},
    .roots = {{"visual.", ""}, {"model.visual.", ""}},
    .names = {LAYERS("mlp.up_proj", "mlp.down_proj"),
              .gate = {TOWER_BLOCK("ffn_gate"), BLOCK("mlp.gate_proj")}},
    .norm = NORM_RMS,
    .gelu = ACT_PLAIN_GELU,
    .grid_positions = true,
    .begin = "<|vision_start|>",
    .feature = "<|image_pad|>",
    .end = "<|vision_end|>",
    .defaults = defaults_qwen25,
    .read = read_qwen25,
    .read_pixels = read_pixels,
    .plan = plan_keep_ratio,
    .limit = limit,
    .most = most,
    .write = write_qwen25,
    .split_qkv = true,
    .merge = merge_qwen25};

/* GLM */

static const struct norm_name rows_norm = TOWER_NORM("v.post_ln", "model.post_layernorm"),
                              glm_norm =
                                  TOWER_NORM("mm.post_norm", "model.merger.post_projection_norm");
static const struct tensor_name glm_join = {"mm.patch_merger", "model.downsample"},
                                glm_proj = {"mm.model.fc", "model.merger.proj"},
                                glm_gate = {"mm.gate", "model.merger.gate_proj"},
                                glm_up = {"mm.up", "model.merger.up_proj"},
                                glm_down = {"mm.down", "model.merger.down_proj"};

static void defaults_glm(struct config *c, struct tower_config *t)
{
    defaults_qwen25(c, t);
    c->norm_eps = 1e-5f;
    t->min_pixels = 12544 / 2; /* published for two frames */
    t->max_pixels = 9633792 / 2;
}

/* The layers' feed-forward is as wide as a feature, the merger's as config.json says. */
static bool read_glm(const struct meta_reader *in, struct tower_config *t)
{
    t->table = TABLE_CUBIC;
    t->grid = t->side / t->patch;
    t->n_hidden = in->c->n_ff;
    in->c->n_ff = t->n_out;
    return true;
}

static bool read_glm_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    return read_area(in, o, t, 2);
}

/* An image smaller than a feature is enlarged first. */
static bool plan_glm(const struct tower_config *t, int width, int height, struct image_plan *out,
                     struct error *err)
{
    int unit = t->patch * t->merge;
    if (height < unit || width < unit) {
        double y = (double)unit / height, x = (double)unit / width, scale = y > x ? y : x;
        if (scale * (width > height ? width : height) > 1 << 24)
            return error_set(err, "an image of %d x %d is too narrow", width, height);
        height = (int)(height * scale);
        width = (int)(width * scale);
    }
    return plan_keep_ratio(t, width, height, out, err);
}

static void merge_glm(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int rows = t->merge * t->merge, E = b->c->n_embd, D = t->n_out, F = t->n_hidden;
    const struct weight_rows join = {.name = &glm_join, .n = D, .flat = true};
    const struct weight_rows gate_up[] = {{.name = &glm_gate, .n = F}, {.name = &glm_up, .n = F}};
    struct merge_step *s = tower_step(b);
    s->rows = rows;
    s->interleaved = true;
    s->norm = tower_norm(b, 0, &rows_norm, E);
    s->w = build_weight(b, WEIGHT_LINEAR, 0, rows * E, 1, 1, &join);
    s = tower_step(b);
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &glm_proj, D, D);
    s = tower_step(b);
    s->joined = build_layer_norm(b, 0, &glm_norm.gain, &glm_norm.bias, D);
    s->joined.eps = 1e-5f;
    s->act = ACT_PLAIN_GELU;
    s->w = build_weight(b, WEIGHT_LINEAR, 0, D, 1, 2, gate_up);
    s = tower_step(b);
    s->act = ACT_SILU;
    s->w = build_matrix(b, WEIGHT_LINEAR, 0, &glm_down, F, D);
}

const struct tower_family tower_glm = {
    .name = "glm4v",
    .types = {"glm4v", "glm4v_moe", "glm46v"},
    .roots = {{"model.visual.", ""}, {"visual.", ""}},
    .names = {LAYERS("mlp.up_proj", "mlp.down_proj"),
              .gate = {TOWER_BLOCK("ffn_gate"), BLOCK("mlp.gate_proj")},
              .positions = {TOWER_GGUF_POSITIONS, "model.embeddings.position_embedding"},
              .patch_norm = TOWER_NORM("v.norm_embd", "model.post_conv_layernorm")},
    .norm = NORM_RMS,
    .gelu = ACT_PLAIN_GELU,
    .grid_positions = true,
    .begin = "<|begin_of_image|>",
    .feature = "<|image|>",
    .end = "<|end_of_image|>",
    .defaults = defaults_glm,
    .read = read_glm,
    .read_pixels = read_glm_pixels,
    .plan = plan_glm,
    .limit = limit,
    .most = most,
    .write = write_area,
    .wide_layers = true,
    .merge = merge_glm};
