/*
 * The tower of Qwen3-VL and Qwen3.5: patches of two equal frames, a resampled table of positions, 2-D RoPE, two-way
 * attention, and four patches a feature. In Qwen3-VL features of inner layers go to the decoder, too (deepstack).
 */
#include "base/mem.h"
#include "model/families/family.h"
#include "model/model.h"
#include "vision/tower.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define PAIR(var, gguf, hf)                                                                        \
    static const struct tensor_name var = {gguf, hf},                                              \
                                    var##_bias = {"=" gguf ".bias", "=" hf ".bias"}

static const struct tensor_name patches = {"v.patch_embd", "model.patch_embed.proj"},
                                positions = {"v.position_embd", "model.pos_embed"},
                                qkv = {"v.blk.%d.attn_qkv", "model.blocks.%d.attn.qkv"},
                                attn_out = {"v.blk.%d.attn_out", "model.blocks.%d.attn.proj"},
                                up = {"v.blk.%d.ffn_up", "model.blocks.%d.mlp.linear_fc1"},
                                down = {"v.blk.%d.ffn_down", "model.blocks.%d.mlp.linear_fc2"};
PAIR(attn_norm, "v.blk.%d.ln1", "model.blocks.%d.norm1");
PAIR(ffn_norm, "v.blk.%d.ln2", "model.blocks.%d.norm2");
PAIR(merge_norm, "v.post_ln", "model.merger.norm");
PAIR(level_norm, "v.deepstack.%d.norm", "model.deepstack_merger_list.%d.norm");
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

/* clip.vision.*, as llama.cpp writes them */
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

static bool read_gguf_channels(const struct meta_reader *in, const char *key, double least,
                               float *out)
{
    const struct meta *m = tensorfile_meta(in->f, key);
    for (size_t i = 0; i < 3; i++) {
        double v = 0.5;
        if (m && (m->type != META_ARRAY || !meta_array_number(&m->v.a, i, &v) ||
                  !(v >= least && v <= 255)))
            return error_set(in->err, "%s: %s: expected three numbers", in->f->path, key);
        out[i] = (float)v;
    }
    return true;
}

static bool read_gguf_tower(const struct meta_reader *in)
{
    struct config *c = in->c;
    struct tower_config *t = (struct tower_config *)(uintptr_t)c->tower;
    double eps = 1e-6, least = 65536, most = 16777216;
    int side = 0;
    t->merge = 2;
    if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 16, true, &c->n_embd) ||
        !reader_gguf_int(in, "attention.head_count", 1, 1 << 10, true, &c->n_heads) ||
        !reader_gguf_int(in, "feed_forward_length", 1, 1 << 20, true, &c->n_ff) ||
        !reader_gguf_int(in, "projection_dim", 1, 1 << 20, true, &t->n_out) ||
        !reader_gguf_int(in, "patch_size", 1, 64, true, &t->patch) ||
        !reader_gguf_int(in, "image_size", 1, 64 * TOWER_MAX_GRID, true, &side) ||
        !reader_gguf_int(in, "spatial_merge_size", 1, 8, false, &t->merge) ||
        !reader_gguf_float(in, "attention.layer_norm_epsilon", 0, 1, false, &eps) ||
        !reader_gguf_float(in, "image_min_pixels", 1, 1e12, false, &least) ||
        !reader_gguf_float(in, "image_max_pixels", 1, 1e12, false, &most) ||
        !read_gguf_levels(in, t) || !read_gguf_channels(in, "clip.vision.image_mean", 0, t->mean) ||
        !read_gguf_channels(in, "clip.vision.image_std", 1e-6, t->std))
        return false;
    t->grid = side / t->patch;
    t->frames = build_find(in->f, c, &patches, 0, 0, "weight.1") ? 2 : 1;
    t->min_pixels = (int64_t)least;
    t->max_pixels = (int64_t)most;
    t->filter = IMAGE_BICUBIC;
    c->norm_eps = (float)eps;
    return true;
}

/* What both kinds of file have in common. */
static bool finish_tower(const struct meta_reader *in)
{
    struct config *c = in->c;
    struct tower_config *t = (struct tower_config *)(uintptr_t)c->tower;
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge;
    if (c->n_embd % c->n_heads || c->n_embd / c->n_heads % 4)
        return error_set(in->err, "%s: an image tower of %d heads and a width of %d", in->f->path,
                         c->n_heads, c->n_embd);
    if (t->grid < 1 || t->grid > TOWER_MAX_GRID || t->max_pixels < feature ||
        t->max_pixels < t->min_pixels)
        return error_set(in->err, "%s: an image tower for %lld to %lld pixels, and a table of %d",
                         in->f->path, (long long)t->min_pixels, (long long)t->max_pixels, t->grid);
    t->mark = "<|vision_start|><|image_pad|><|vision_end|>";
    t->placeholder = "<|image_pad|>";
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_rot = c->n_embd / c->n_heads;
    return true;
}

static bool read_tower(const struct meta_reader *in)
{
    struct config *c = in->c;
    struct tower_config *t = (struct tower_config *)(uintptr_t)c->tower; /* the caller's */
    const json_t *rope = reader_get(in->hf, "rope_parameters", NULL);
    const char *act = json_string_value(reader_get(in->hf, "hidden_act", NULL));
    int cells = 0;
    if (act && strcmp(act, "gelu_pytorch_tanh") != 0)
        return error_set(in->err,
                         "%s: config.json: vision_config: hidden_act \"%.40s\" is not supported "
                         "(gelu_pytorch_tanh is)",
                         in->f->path, act);
    t->merge = t->frames = 2;
    if (!reader_int(in, "depth", NULL, 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "hidden_size", NULL, 1, 1 << 16, true, &c->n_embd) ||
        !reader_int(in, "num_heads", NULL, 1, 1 << 10, true, &c->n_heads) ||
        !reader_int(in, "intermediate_size", NULL, 1, 1 << 20, true, &c->n_ff) ||
        !reader_int(in, "out_hidden_size", NULL, 1, 1 << 20, true, &t->n_out) ||
        !reader_int(in, "patch_size", NULL, 1, 64, true, &t->patch) ||
        !reader_int(in, "spatial_merge_size", NULL, 1, 8, false, &t->merge) ||
        !reader_int(in, "temporal_patch_size", NULL, 1, 4, false, &t->frames) ||
        !reader_int(in, "num_position_embeddings", NULL, 1, TOWER_MAX_GRID * TOWER_MAX_GRID, true,
                    &cells) ||
        !reader_number(in, rope, "rope_theta", 1, 1e12, false, &c->rope.theta) ||
        !read_levels(in, t))
        return false;
    t->grid = (int)lround(sqrt(cells));
    if (t->grid * t->grid != cells)
        return error_set(in->err, "%s: config.json: num_position_embeddings: %d is no square",
                         in->f->path, cells);
    c->norm_eps = 1e-6f;
    return true;
}

/* The first half of the pairs turns by the patch's row, the other by its column, with the same frequencies. */
static const struct rope *build_axes(struct net_builder *b)
{
    int quarter = b->c->n_rot / 4;
    struct rope *rope = mem_zalloc(1, sizeof *rope);
    float *freq = mem_zalloc((size_t)quarter * 2, sizeof *freq);
    uint8_t *plane = mem_zalloc((size_t)quarter * 2, sizeof *plane);
    for (int i = 0; i < 2 * quarter; i++) {
        freq[i] = (float)(1 / pow(b->c->rope.theta, (double)(i % quarter) / quarter));
        plane[i] = i < quarter ? 1 : 2;
    }
    *rope = (struct rope){.n_rot = 4 * quarter, .freq = freq, .mscale = 1, .plane = plane};
    b->net->ropes = rope;
    b->net->n_ropes = 1;
    return rope;
}

static void build_layer(struct net_builder *b, int i, const struct rope *rope, struct layer *l)
{
    const struct config *c = b->c;
    int E = c->n_embd;
    l->mixer = (struct mixer){.kind = MIXER_ATTENTION};
    l->mixer.block.in = build_layer_norm(b, i, &attn_norm, &attn_norm_bias, E);
    l->mixer.attention =
        (struct attention){.n_heads = c->n_heads,
                           .n_kv_heads = c->n_heads,
                           .k_dim = c->head_dim,
                           .v_dim = c->head_dim,
                           .rope = rope,
                           .scale = 1.0f / sqrtf((float)c->head_dim),
                           .bidirectional = true,
                           .wqkv = build_matrix(b, WEIGHT_LINEAR, i, &qkv, E, 3 * E),
                           .wo = build_matrix(b, WEIGHT_LINEAR, i, &attn_out, E, E)};
    l->mlp = (struct mlp){.block.in = build_layer_norm(b, i, &ffn_norm, &ffn_norm_bias, E)};
    l->mlp.dense = (struct ffn){.act = ACT_PLAIN_GELU_TANH,
                                .gate_up = build_matrix(b, WEIGHT_LINEAR, i, &up, E, c->n_ff),
                                .down = build_matrix(b, WEIGHT_LINEAR, i, &down, c->n_ff, E)};
}

/* level: of deepstack; -1 = the last layer's features, whose norm is per patch and whose GELU is exact in published
 * models' code as well */
static void build_merger(struct net_builder *b, int level, struct merger *m)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd, rows = t->merge * t->merge, wide = rows * E;
    bool last = level < 0;
    /* a GGUF names them by the layer, a folder by number */
    int at = last ? 0 : b->f->is_gguf ? t->level[level] : level;
    m->after = last ? b->c->n_layers - 1 : t->level[level];
    m->at = last ? 0 : (level + 1) * t->n_out;
    m->n_steps = 2;
    struct norm norm = last ? build_layer_norm(b, 0, &merge_norm, &merge_norm_bias, E)
                            : build_layer_norm(b, at, &level_norm, &level_norm_bias, wide);
    int number = last ? 0 : level;
    m->steps[0] = (struct merge_step){
        .rows = rows,
        .act = ACT_NONE,
        .w = build_matrix(b, WEIGHT_LINEAR, number, last ? &merge_up : &level_up, wide, wide)};
    *(last ? &m->steps[0].norm : &m->steps[0].joined) = norm;
    m->steps[1] =
        (struct merge_step){.act = ACT_PLAIN_GELU,
                            .w = build_matrix(b, WEIGHT_LINEAR, number,
                                              last ? &merge_down : &level_down, wide, t->n_out)};
}

static void build_tower(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct tower_config *t = c->tower;
    const struct rope *rope = build_axes(b);
    const struct weight_rows rows = {.name = &patches, .n = c->n_embd, .flat = true};
    b->net->embed.patches = build_weight(b, WEIGHT_LINEAR, 0, tower_patch_values(t), 1, 1, &rows);
    for (int i = 0; i < c->n_layers; i++)
        build_layer(b, i, rope, &b->net->layers[i]);
    b->net->n_mergers = t->n_levels + 1;
    b->net->mergers = mem_zalloc((size_t)b->net->n_mergers, sizeof *b->net->mergers);
    for (int i = 0; i <= t->n_levels; i++)
        build_merger(b, i < t->n_levels ? i : -1, &b->net->mergers[i]);
}

static const struct model_family family_tower = {
    .name = "qwen3vl_merger", .hf = "qwen3_vl_vision", .read = read_tower, .build = build_tower};

/* Preprocessing. preprocessor_config.json may be absent: then as Qwen3-VL publishes it. */

static bool read_channels(const struct meta_reader *in, const json_t *o, const char *key,
                          double least, float *out)
{
    const json_t *list = reader_get(o, key, NULL);
    for (size_t i = 0; i < 3; i++) {
        const json_t *v = json_array_get(list, i);
        double x = json_is_number(v) ? json_number_value(v) : -1;
        if (list && (json_array_size(list) != 3 || !(x >= least && x <= 255)))
            return error_set(in->err, "%s: preprocessor_config.json: %s: expected three numbers",
                             in->f->path, key);
        out[i] = list ? (float)x : 0.5f;
    }
    return true;
}

static bool read_pixels(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *size = reader_get(o, "size", NULL);
    double least = 65536, most = 16777216, filter = 3;
    struct meta_reader side = *in;
    side.hf = o;
    if (!reader_number(&side, o, "min_pixels", 1, 1e12, false, &least) ||
        !reader_number(&side, o, "max_pixels", 1, 1e12, false, &most) ||
        !reader_number(&side, size, "shortest_edge", 1, 1e12, false, &least) ||
        !reader_number(&side, size, "longest_edge", 1, 1e12, false, &most) ||
        !reader_number(&side, o, "resample", 1, 3, false, &filter) ||
        !read_channels(in, o, "image_mean", 0, t->mean) ||
        !read_channels(in, o, "image_std", 1e-6, t->std))
        return error_prefix(in->err, "preprocessor_config.json");
    t->min_pixels = (int64_t)least;
    t->max_pixels = (int64_t)most;
    t->filter = filter == 1 ? IMAGE_LANCZOS : filter == 2 ? IMAGE_BILINEAR : IMAGE_BICUBIC;
    return true;
}

static const char *find_root(const struct tensorfile *f)
{
    static const char *const roots[] = {"model.visual.", "visual."};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++) {
        char name[96];
        snprintf(name, sizeof name, "%spatch_embed.proj.weight", roots[i]);
        if (tensorfile_find(f, name))
            return roots[i];
    }
    return NULL;
}

bool tower_present(const struct tensorfile *f)
{
    static const char *const types[] = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"};
    const char *type = json_string_value(json_object_get(f->config, "model_type"));
    if (f->is_gguf) {
        char *projector = meta_get_string(f, "clip.projector_type");
        if (!projector)
            projector = meta_get_string(f, "clip.vision.projector_type");
        bool known = projector && !strcmp(projector, family_tower.name);
        mem_free(projector);
        return known;
    }
    for (size_t i = 0; type && i < sizeof types / sizeof *types; i++)
        if (!strcmp(type, types[i]))
            return json_is_object(json_object_get(f->config, "vision_config")) && find_root(f);
    return false;
}

bool tower_load(const struct tensorfile *f, struct config *c, struct tower_config *t,
                struct error *err)
{
    *c = (struct config){.family = &family_tower, .headless = true, .tower = t};
    *t = (struct tower_config){0};
    struct meta_reader in = {f, c, err, json_object_get(f->config, "vision_config")};
    if (!tower_present(f))
        return error_set(err, "%s: no image tower that Steel runs", f->path);
    snprintf(c->arch_name, sizeof c->arch_name, "%s", f->is_gguf ? "clip.vision" : family_tower.hf);
    c->rope.theta = 10000;
    if (f->is_gguf)
        return read_gguf_tower(&in) && finish_tower(&in);
    c->hf_model = c->hf_head = find_root(f);
    return read_tower(&in) && read_pixels(&in, f->preprocessor_config, t) && finish_tower(&in);
}

bool tower_measure(const struct tensorfile *f, int *n_layers, struct model_size *out)
{
    struct tower_config t;
    struct config *c = mem_zalloc(1, sizeof *c);
    bool ok = tower_present(f) && tower_load(f, c, &t, NULL);
    if (ok)
        model_measure(f, c, out);
    *n_layers = c->n_layers;
    mem_free(c);
    return ok;
}

float *tower_positions(const struct tensorfile *f, const struct config *c, struct error *err)
{
    const struct tower_config *t = c->tower;
    const struct tensor *table = build_find(f, c, &positions, 0, 0, "weight");
    if (!table || table->dims[0] != c->n_embd || table->dims[1] != (int64_t)t->grid * t->grid ||
        table->dims[2] != 1 || table->dims[3] != 1) {
        error_set(err, "%s: the image tower's table of positions: %s", f->path,
                  table ? "unexpected shape" : "missing");
        return NULL;
    }
    if (table->type != DT_F32 && table->type != DT_F16 && table->type != DT_BF16) {
        error_set(err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected", f->path,
                  table->name, table->type_name);
        return NULL;
    }
    size_t n = (size_t)table->dims[0] * (size_t)table->dims[1];
    float *values = mem_zalloc(n, sizeof *values);
    quant_dequantize(table->type, table->data, values, n);
    return values;
}
