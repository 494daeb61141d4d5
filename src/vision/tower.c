/* See tower.h. Reads what all families have in common, and finds the family. */
#include "base/mem.h"
#include "model/model.h"
#include "vision/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct model_family network = {
    .name = "clip", .hf = "vision_config", .build = tower_build};

const struct tower_family *const tower_families[] = {
    &tower_qwen3,   &tower_qwen25, &tower_glm,  &tower_gemma3, &tower_gemma4,
    &tower_pixtral, &tower_intern, &tower_smol, &tower_lfm2,   &tower_minicpm,
    &tower_kimi,    &tower_llava,  NULL};

bool tower_has_grid_positions(const struct tower_config *t)
{
    return t->family->grid_positions;
}

/* Finding the family */

static const struct tower_roots *find_roots(const struct tensorfile *f,
                                            const struct tower_family *t)
{
    for (int i = 0; i < TOWER_MAX_ROOTS && t->roots[i].tower; i++) {
        struct config c = {.hf_model = t->roots[i].tower, .hf_head = t->roots[i].merger};
        if (build_find(f, &c, &t->names.patches, 0, 0, "weight"))
            return &t->roots[i];
    }
    return NULL;
}

static bool names_type(const struct tower_family *t, const char *type)
{
    for (int i = 0; i < TOWER_MAX_TYPES && t->types[i]; i++)
        if (!strcmp(t->types[i], type))
            return true;
    return false;
}

static const struct tower_family *find_family(const struct tensorfile *f)
{
    const char *type = json_string_value(json_object_get(f->config, "model_type"));
    char *projector = NULL;
    const struct tower_family *found = NULL;
    if (f->is_gguf) {
        projector = meta_get_string(f, "clip.projector_type");
        if (!projector)
            projector = meta_get_string(f, "clip.vision.projector_type");
    }
    for (int i = 0; tower_families[i] && !found; i++) {
        const struct tower_family *t = tower_families[i];
        bool is = f->is_gguf ? projector && !strcmp(projector, t->name)
                             : type && names_type(t, type) &&
                                   json_is_object(json_object_get(f->config, "vision_config")) &&
                                   find_roots(f, t);
        found = is ? t : NULL;
    }
    mem_free(projector);
    return found;
}

bool tower_owns(const struct tensorfile *f, const char *tensor)
{
    const struct tower_family *t = f->is_gguf ? NULL : find_family(f);
    const struct tower_roots *r = t ? find_roots(f, t) : NULL;
    return r && (!strncmp(tensor, r->tower, strlen(r->tower)) ||
                 (r->merger[0] && !strncmp(tensor, r->merger, strlen(r->merger))));
}

bool tower_present(const struct tensorfile *f)
{
    return find_family(f) != NULL;
}

/* Numbers */

static const struct meta *find_meta(const struct meta_reader *in, const char *key, char name[96])
{
    snprintf(name, 96, "clip.vision.%s", key);
    return tensorfile_meta(in->f, name);
}

bool tower_number(const struct meta_reader *in, const json_t *o, const char *key,
                  const char *gguf_key, double lo, double hi, double *out)
{
    if (in->f->is_gguf)
        return !gguf_key || reader_gguf_float(in, gguf_key, lo, hi, false, out);
    return !key || reader_number(in, o, key, lo, hi, false, out) ||
           error_prefix(in->err, "preprocessor_config.json");
}

bool tower_int(const struct meta_reader *in, const json_t *o, const char *key, const char *gguf_key,
               int lo, int hi, int *out)
{
    double v = *out;
    if (!tower_number(in, o, key, gguf_key, lo, hi, &v))
        return false;
    if (v != floor(v))
        return error_set(in->err, "%s: %s: %g is not a whole number", in->f->path,
                         in->f->is_gguf ? gguf_key : key, v);
    *out = (int)v;
    return true;
}

bool tower_bool(const struct meta_reader *in, const json_t *o, const char *key,
                const char *gguf_key, bool *out)
{
    if (in->f->is_gguf)
        return !gguf_key || reader_gguf_bool(in, gguf_key, out);
    const json_t *v = key ? reader_get(o, key, NULL) : NULL;
    if (v && !json_is_boolean(v))
        return error_set(in->err, "%s: preprocessor_config.json: %s: expected true or false",
                         in->f->path, key);
    if (v)
        *out = json_is_true(v);
    return true;
}

/* Three numbers between least and 255. */
static bool read_channels(const struct meta_reader *in, const json_t *o, const char *key,
                          double least, float *out)
{
    char name[96];
    const struct meta *m = in->f->is_gguf ? find_meta(in, key, name) : NULL;
    const json_t *list = in->f->is_gguf ? NULL : reader_get(o, key, NULL);
    for (size_t i = 0; i < 3 && (m || list); i++) {
        double v = -1;
        if (m && m->type == META_ARRAY)
            meta_array_number(&m->v.a, i, &v);
        else if (json_array_size(list) == 3 && json_is_number(json_array_get(list, i)))
            v = json_number_value(json_array_get(list, i));
        if (!(v >= least && v <= 255))
            return error_set(in->err, "%s: %s: expected three numbers", in->f->path, key);
        out[i] = (float)v;
    }
    return true;
}

static bool read_filter(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    static const enum image_filter filters[] = {IMAGE_LANCZOS, IMAGE_BILINEAR, IMAGE_BICUBIC};
    double v = t->filter == IMAGE_LANCZOS ? 1 : t->filter == IMAGE_BILINEAR ? 2 : 3;
    if (!tower_number(in, o, "resample", "preproc_resample", 1, 3, &v))
        return false;
    t->filter = filters[(int)v - 1];
    return true;
}

/* config.json spells it "gelu_pytorch_tanh"; a GGUF has use_gelu, use_silu or neither. */
static bool read_act(const struct meta_reader *in, struct tower_config *t)
{
    static const struct {
        const char *name;
        enum activation plain, gated;
    } acts[] = {{"gelu_pytorch_tanh", ACT_PLAIN_GELU_TANH, ACT_GELU_TANH},
                {"gelu", ACT_PLAIN_GELU, ACT_GELU},
                {"quick_gelu", ACT_PLAIN_QUICK_GELU, ACT_NONE},
                {"silu", ACT_NONE, ACT_SILU}};
    const struct tower_names *n = &t->family->names;
    bool gated = n->gate.gguf && build_present(in->f, in->c, &n->gate, 0), gelu = false,
         silu = false;
    size_t at = t->family->gelu == ACT_PLAIN_GELU ? 1 : 0;
    if (in->f->is_gguf) {
        const struct meta *g = tensorfile_meta(in->f, "clip.use_gelu"),
                          *s = tensorfile_meta(in->f, "clip.use_silu");
        gelu = g && g->type == META_BOOL && g->v.u;
        silu = s && s->type == META_BOOL && s->v.u;
        at = silu ? 3 : gelu || gated ? at : 2;
    } else {
        const char *name = json_string_value(reader_get(in->hf, "hidden_act", "hidden_activation"));
        for (size_t i = 0; name && i < sizeof acts / sizeof *acts + 1; i++) {
            if (i == sizeof acts / sizeof *acts)
                return error_set(in->err,
                                 "%s: config.json: vision_config: hidden_act \"%.40s\" is not "
                                 "supported",
                                 in->f->path, name);
            if (!strcmp(name, acts[i].name)) {
                at = i;
                break;
            }
        }
    }
    t->act = gated ? acts[at].gated : acts[at].plain;
    return t->act != ACT_NONE ||
           error_set(in->err, "%s: an image tower with %s and %s feed-forward is not supported",
                     in->f->path, acts[at].name, gated ? "a gated" : "an ungated");
}

/* A number, or a list of equal numbers. */
static bool read_side(const struct meta_reader *in, const char *key, bool need, int *out)
{
    const json_t *v = reader_get(in->hf, key, NULL), *first = json_array_get(v, 0);
    json_int_t n = json_integer_value(first);
    if (!json_is_array(v))
        return reader_int(in, key, NULL, 1, 1 << 14, need, out);
    if (json_array_size(v) != 2 || n != json_integer_value(json_array_get(v, 1)) || n < 1 ||
        n > 1 << 14)
        return error_set(in->err, "%s: config.json: vision_config: %s: not the sides of a square",
                         in->f->path, key);
    *out = (int)n;
    return true;
}

static bool read_gguf(const struct meta_reader *in, struct tower_config *t)
{
    struct config *c = in->c;
    double eps = (double)c->norm_eps;
    if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 16, true, &c->n_embd) ||
        !reader_gguf_int(in, "attention.head_count", 1, 1 << 10, true, &c->n_heads) ||
        !reader_gguf_int(in, "attention.head_dim", 1, 1 << 10, false, &c->head_dim) ||
        !reader_gguf_int(in, "feed_forward_length", 1, 1 << 20, true, &c->n_ff) ||
        !reader_gguf_int(in, "projection_dim", 1, 1 << 20, true, &t->n_out) ||
        !reader_gguf_int(in, "patch_size", 1, 64, true, &t->patch) ||
        !reader_gguf_int(in, "image_size", 1, 1 << 14, true, &t->side) ||
        !reader_gguf_int(in, "spatial_merge_size", 1, 8, false, &t->merge) ||
        !reader_gguf_int(in, "projector.scale_factor", 1, 8, false, &t->merge) ||
        !reader_gguf_float(in, "attention.layer_norm_epsilon", 0, 1, false, &eps))
        return false;
    t->frames = build_find(in->f, c, &t->family->names.patches, 0, 0, "weight.1") ? 2 : 1;
    c->norm_eps = (float)eps;
    return true;
}

static bool read_folder(const struct meta_reader *in, struct tower_config *t)
{
    struct config *c = in->c;
    const json_t *text = json_object_get(in->f->config, "text_config"),
                 *rope = reader_get(in->hf, "rope_parameters", NULL);
    struct meta_reader whole = *in;
    double eps = (double)c->norm_eps;
    whole.hf = text ? text : in->f->config;
    if (!reader_int(in, "num_hidden_layers", "depth", 1, CONFIG_MAX_LAYERS, !c->n_layers,
                    &c->n_layers) ||
        !reader_int(in, "hidden_size", NULL, 1, 1 << 16, !c->n_embd, &c->n_embd) ||
        !reader_int(in, "num_attention_heads", "num_heads", 1, 1 << 10, !c->n_heads, &c->n_heads) ||
        !reader_int(in, "head_dim", NULL, 1, 1 << 10, false, &c->head_dim) ||
        !reader_int(in, "intermediate_size", NULL, 1, 1 << 20, !c->n_ff, &c->n_ff) ||
        !read_side(in, "patch_size", !t->patch, &t->patch) ||
        !read_side(in, "image_size", false, &t->side) ||
        !reader_int(&whole, "hidden_size", NULL, 1, 1 << 20, !t->n_out, &t->n_out) ||
        !reader_int(in, "out_hidden_size", NULL, 1, 1 << 20, false, &t->n_out) ||
        !reader_int(in, "spatial_merge_size", NULL, 1, 8, false, &t->merge) ||
        !reader_int(in, "temporal_patch_size", NULL, 1, 4, false, &t->frames) ||
        !reader_number(in, in->hf, "layer_norm_eps", 0, 1, false, &eps) ||
        !reader_number(in, in->hf, "rms_norm_eps", 0, 1, false, &eps) ||
        !reader_number(in, in->hf, "rope_theta", 1, 1e12, false, &c->rope.theta) ||
        !reader_number(in, rope, "rope_theta", 1, 1e12, false, &c->rope.theta))
        return false;
    c->norm_eps = (float)eps;
    return true;
}

static bool check(const struct meta_reader *in, struct tower_config *t)
{
    struct config *c = in->c;
    if (!c->head_dim && c->n_embd % c->n_heads == 0)
        c->head_dim = c->n_embd / c->n_heads;
    c->n_kv_heads = c->n_heads;
    c->n_rot = t->axes == AXES_NONE ? 0 : c->head_dim;
    if (c->head_dim < 1 || c->head_dim % (t->axes == AXES_NONE ? 2 : 4))
        return error_set(in->err, "%s: an image tower of %d heads and a width of %d", in->f->path,
                         c->n_heads, c->n_embd);
    if (t->patch > 64 || t->merge > 8 || t->frames > 4 ||
        (t->table != TABLE_NONE && (t->grid < 1 || t->grid > TOWER_MAX_GRID)) ||
        t->max_pixels < t->min_pixels || plan_most_patches(t) < t->merge * t->merge)
        return error_set(in->err,
                         "%s: an image tower with patches of %d, features of %d x %d patches, "
                         "%lld to %lld pixels, and a table of %d",
                         in->f->path, t->patch, t->merge, t->merge, (long long)t->min_pixels,
                         (long long)t->max_pixels, t->grid);
    return true;
}

bool tower_load(const struct tensorfile *f, struct config *c, struct tower_config *t,
                struct error *err)
{
    const struct tower_family *family = find_family(f);
    *c = (struct config){.family = &network, .headless = true, .tower = t};
    *t = (struct tower_config){.family = family,
                               .merge = 1,
                               .frames = 1,
                               .middle = -1,
                               .filter = IMAGE_BICUBIC,
                               .mean = {0.5f, 0.5f, 0.5f},
                               .std = {0.5f, 0.5f, 0.5f}};
    struct meta_reader in = {f, c, err, json_object_get(f->config, "vision_config")};
    if (!family)
        return error_set(err, "%s: no image tower that Steel runs", f->path);
    snprintf(c->arch_name, sizeof c->arch_name, "%s", f->is_gguf ? "clip.vision" : family->name);
    c->rope.theta = 10000;
    c->norm_eps = 1e-6f;
    if (!f->is_gguf) {
        const struct tower_roots *roots = find_roots(f, family);
        c->hf_model = roots->tower;
        c->hf_head = roots->merger;
    }
    const json_t *o = f->preprocessor_config;
    family->defaults(c, t);
    return (f->is_gguf ? read_gguf(&in, t) : read_folder(&in, t)) &&
           (!family->read || family->read(&in, t)) && read_act(&in, t) &&
           read_channels(&in, o, "image_mean", 0, t->mean) &&
           read_channels(&in, o, "image_std", 1e-6, t->std) && read_filter(&in, o, t) &&
           (!family->read_pixels || family->read_pixels(&in, o, t)) && check(&in, t);
}

int tower_n_parts(const struct tower_config *t)
{
    return t->middle >= 0 ? 2 : 1;
}

void tower_part(const struct config *c, const struct tower_config *t, int part,
                struct config *part_c, struct tower_config *part_t)
{
    *part_c = *c;
    *part_t = *t;
    part_c->tower = part_t;
    if (t->middle < 0)
        return;
    part_t->part = part;
    part_t->first = part ? t->middle + 1 : 0;
    part_c->n_layers = part ? c->n_layers - part_t->first : t->middle + 2; /* with the join */
    if (part) {
        part_t->table = TABLE_NONE;
        part_t->class_token = false;
    }
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
