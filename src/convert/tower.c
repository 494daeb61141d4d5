/*
 * The image tower of a folder as an mmproj file, with llama.cpp's names and keys. Matrices go through folder.c. What has
 * another shape there is made here: convolutions, tables of positions, bounds of products.
 */
#include "base/mem.h"
#include "convert/folder.h"
#include "model/model.h"
#include "text/tokenizer/tokenizer.h"
#include "vision/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct out_tensor *add(struct folder_plan *p, const char *name, int n_dims,
                              const int64_t *dims, float *values)
{
    struct out_tensor *o = transcode_add(p->t, name, n_dims, dims);
    o->values = values;
    o->rows = 1;
    for (int i = 1; i < n_dims; i++)
        o->rows *= dims[i];
    return o;
}

/* A tensor of n values under its GGUF name, F32. NULL with err. */
static bool add_plain(struct folder_plan *p, const struct tensor_name *name, const char *suffix,
                      int n_dims, const int64_t *dims, bool need)
{
    static const struct tensorfile gguf = {.is_gguf = true};
    char to[128], from[192];
    int64_t n = 1;
    build_name(&gguf, p->c, name, 0, 0, suffix, to, sizeof to);
    build_name(p->f, p->c, name, 0, 0, suffix, from, sizeof from);
    const struct tensor *t = folder_find(p, from);
    if (!t)
        return !need || error_set(p->err, "%s: tensor %s: missing", p->f->path, from);
    for (int i = 0; i < n_dims; i++)
        n *= dims[i];
    float *v = folder_values(p, t, n);
    if (v)
        add(p, to, n_dims, dims, v);
    return v != NULL;
}

/* The patches' weights: one convolution a frame, channels outermost. */
static bool add_patches(struct folder_plan *p)
{
    const struct tower_config *t = p->c->tower;
    const struct tensor_name *name = &t->family->names.patches;
    int P = t->patch, E = p->c->n_embd, F = t->frames;
    int64_t plane = (int64_t)P * P, n = (int64_t)E * 3 * plane;
    char from[192];
    build_name(p->f, p->c, name, 0, 0, "weight", from, sizeof from);
    const struct tensor *in = folder_find(p, from);
    float *all = in ? folder_values(p, in, n * F) : NULL;
    if (!in)
        return error_set(p->err, "%s: tensor %s: missing", p->f->path, from);
    if (!all)
        return false;
    for (int f = 0; f < F; f++) {
        float *one = mem_zalloc((size_t)n, sizeof *one);
        for (int64_t i = 0; i < n; i++) {
            int64_t out = i / (3 * plane), c = i / plane % 3, at = i % plane;
            one[i] = all[t->channels_last ? (out * plane + at) * 3 + c
                                          : ((out * 3 + c) * F + f) * plane + at];
        }
        add(p, f ? "v.patch_embd.weight.1" : "v.patch_embd.weight", 4,
            (const int64_t[]){P, P, 3, E}, one);
    }
    mem_free(all);
    return add_plain(p, name, "bias", 1, &(int64_t){E}, false);
}

static bool add_positions(struct folder_plan *p)
{
    const struct tower_config *t = p->c->tower;
    const struct tower_names *n = &t->family->names;
    int64_t E = p->c->n_embd, G = t->grid;
    if (t->class_token && !add_plain(p, &n->class_token, "weight", 1, &E, true))
        return false;
    if (t->table == TABLE_NONE)
        return true;
    bool lists = t->table == TABLE_TWO_LISTS, cube = lists || t->family->square_table;
    const int64_t two[] = {E, G * G + t->class_token}, three[] = {E, G, lists ? 2 : G};
    return add_plain(p, &n->positions, "weight", cube ? 3 : 2, cube ? three : two, true);
}

/* A convolution over a feature's patches. */
static bool add_join(struct folder_plan *p, const struct tensor_spec *spec)
{
    const struct tower_config *t = p->c->tower;
    int64_t m = t->merge, n = spec->rows[0].n;
    const int64_t dims[] = {m, m, spec->n_in / (m * m), n};
    return add_plain(p, spec->rows[0].name, "weight", 4, dims, true) &&
           add_plain(p, spec->rows[0].name, "bias", 1, &n, false);
}

/* Rows that one tensor of both kinds of file holds, in another order. */
static bool add_fused(struct folder_plan *p, const struct tensor_spec *spec)
{
    struct tensor_spec one = *spec;
    size_t first = p->t->n;
    for (int k = 0; k < spec->n_rows; k++) {
        one.n_rows = 1;
        one.rows[0] = spec->rows[k];
        if (!folder_add_spec(p, &one))
            return false;
    }
    /* q.weight, q.bias, k.weight, ...: one after the other */
    size_t parts = p->t->n - first, each = parts / (size_t)spec->n_rows;
    for (size_t kind = 0; kind < each; kind++) {
        struct out_tensor *to = &p->t->tensors[first + kind];
        int64_t n = spec->rows[0].n, all = n * spec->n_rows;
        int32_t *order = kind ? NULL : mem_zalloc((size_t)all, sizeof *order);
        float *values = kind ? mem_zalloc((size_t)all, sizeof *values) : NULL;
        for (int k = 0; k < spec->n_rows; k++) {
            const struct out_tensor *from = &p->t->tensors[first + (size_t)k * each + kind];
            for (int64_t i = 0; i < n; i++) {
                if (kind)
                    values[k * n + i] = from->values[i];
                else
                    order[k * n + i] =
                        from->order ? from->order[i] : (int32_t)(spec->rows[k].first + i);
            }
        }
        mem_free(to->order);
        mem_free(to->values);
        to->order = order;
        to->values = values;
        to->rows = kind ? 1 : all;
        to->dims[kind ? 0 : 1] = all;
        if (!kind) {
            to->mats[0].first = 0;
            to->mats[0].step = 1;
            to->mats[0].tensor_rows = (int)all;
        }
    }
    for (size_t i = first + each; i < p->t->n; i++) {
        struct out_tensor *o = &p->t->tensors[i];
        mem_free(o->mats);
        mem_free(o->order);
        mem_free(o->values);
    }
    p->t->n = first + each;
    return true;
}

static bool add_spec(struct folder_plan *p, const struct tensor_spec *spec)
{
    const struct tower_names *n = &p->c->tower->family->names;
    const struct weight_rows *rows = &spec->rows[0];
    if (rows->name == &n->patches)
        return add_patches(p);
    if (rows->flat)
        return add_join(p, spec);
    if (rows->transposed) /* as it is */
        return add_plain(p, rows->name, "weight", 2, (const int64_t[]){rows->n, spec->n_in}, true);
    if (spec->w && spec->n_rows > 1 && spec->rows[1].name == rows->name)
        return add_fused(p, spec);
    return folder_add_spec(p, spec);
}

/* The bounds of products: beside a folder's ".linear". */
static bool add_bounds(struct folder_plan *p)
{
    static const char *const kinds[] = {"input_min", "input_max", "output_min", "output_max"};
    static const struct tensorfile gguf = {.is_gguf = true};
    const struct tower_names *n = &p->c->tower->family->names;
    const struct tensor_name *const names[] = {&n->q,    &n->k,  &n->v,   &n->o,
                                               &n->gate, &n->up, &n->down};
    for (int i = 0; p->c->tower->clips && i < p->c->n_layers; i++)
        for (size_t k = 0; k < sizeof names / sizeof *names; k++)
            for (size_t j = 0; j < 4; j++) {
                char to[128], from[192];
                build_name(&gguf, p->c, names[k], i, 0, kinds[j], to, sizeof to);
                tower_bound_name(p->f, p->c, names[k], i, kinds[j], from, sizeof from);
                const struct tensor *t = folder_find(p, from);
                float *v = t ? folder_values(p, t, 1) : NULL;
                if (t && !v)
                    return false;
                if (v)
                    add(p, to, 1, &(int64_t){1}, v);
            }
    return true;
}

/* One of the tower's networks. */
static bool add_part(struct folder_plan *p, int part)
{
    struct outline o = {0};
    struct tower_config tower;
    struct config *c = mem_zalloc(1, sizeof *c);
    const struct config *whole = p->c;
    tower_part(whole, whole->tower, part, c, &tower);
    p->c = c;
    bool ok = outline_load(p->f, c, &o, p->err);
    for (int i = 0; ok && i < o.n_specs; i++)
        ok = add_spec(p, &o.specs[i]);
    outline_free(&o);
    p->c = whole;
    mem_free(c);
    return ok;
}

/* The text model's table of embeddings. NULL: none, or one of an unknown kind. */
static const struct tensor *find_embeddings(const struct tensorfile *f)
{
    static const char *const names[] = {"embed_tokens.weight", "tok_embeddings.weight"};
    for (size_t i = 0; i < f->n_tensors; i++)
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            const struct tensor *t = &f->tensors[i];
            size_t n = strlen(t->name), len = strlen(names[k]);
            if (n >= len && !strcmp(t->name + n - len, names[k]) && t->n_dims == 2 &&
                (t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16))
                return t;
        }
    return NULL;
}

/* The embedding of the token between rows of features. Without a tokenizer it is left out. */
static bool add_row_mark(struct folder_plan *p)
{
    const char *mark = p->c->tower->family->row_mark;
    struct tokenizer *tok = mark ? tokenizer_load(p->f, NULL) : NULL;
    int32_t id = tok ? tokenizer_find(tok, mark, strlen(mark)) : -1;
    const struct tensor *t = id >= 0 ? find_embeddings(p->f) : NULL;
    tokenizer_free(tok);
    int64_t E = t ? t->dims[0] : 0;
    if (!t || id >= t->dims[1] || E != p->c->tower->n_out)
        return true;
    float *v = mem_zalloc((size_t)E, sizeof *v);
    quant_dequantize(t->type, (const char *)t->data + dtype_bytes(t->type, (size_t)(id * E)), v,
                     (size_t)E);
    add(p, "v.token_embd.img_break", 1, &E, v);
    return true;
}

static bool plan(struct folder_plan *p)
{
    bool ok = add_positions(p) && add_bounds(p) && add_row_mark(p);
    for (int i = 0; ok && i < tower_n_parts(p->c->tower); i++)
        ok = add_part(p, i);
    return ok;
}

static void set_u32(struct gguf_writer *w, const char *key, int64_t v)
{
    char full[96];
    snprintf(full, sizeof full, "clip.vision.%s", key);
    if (v > 0)
        gguf_set_u32(w, full, (uint32_t)v);
}

/* Readers want one also of towers for images of any size. */
static int image_size(const struct tower_config *t)
{
    enum { ANY = 560 };
    if (t->table == TABLE_NONE || t->table == TABLE_TWO_LISTS)
        return t->side ? t->side : ANY;
    return t->table == TABLE_CORNERS || !t->side ? t->grid * t->patch : t->side;
}

static void set_metadata(struct gguf_writer *w, const struct folder_plan *p, const struct mix *mix)
{
    const struct config *c = p->c;
    const struct tower_config *t = c->tower;
    float mean[3], std[3];
    gguf_set_string(w, "general.architecture", "clip", 4);
    gguf_set_string(w, "general.type", "mmproj", 6);
    gguf_set_u32(w, "general.file_type", (uint32_t)convert_file_type(p->t, mix));
    gguf_set_u32(w, "general.quantization_version", 2);
    gguf_set_bool(w, "clip.has_vision_encoder", true);
    gguf_set_string(w, "clip.projector_type", t->family->name, strlen(t->family->name));
    bool silu = t->act == ACT_SILU, quick = t->act == ACT_PLAIN_QUICK_GELU;
    gguf_set_bool(w, silu ? "clip.use_silu" : "clip.use_gelu", !quick);
    set_u32(w, "block_count", c->n_layers);
    set_u32(w, "embedding_length", c->n_embd);
    set_u32(w, "feed_forward_length",
            t->n_hidden && t->family->wide_layers ? t->n_hidden : c->n_ff);
    set_u32(w, "attention.head_count", c->n_heads);
    if (c->head_dim * c->n_heads != c->n_embd)
        set_u32(w, "attention.head_dim", c->head_dim);
    gguf_set_f32(w, "clip.vision.attention.layer_norm_epsilon", c->norm_eps);
    set_u32(w, "projection_dim", t->n_out);
    set_u32(w, "patch_size", t->patch);
    set_u32(w, "image_size", image_size(t));
    set_u32(w, "spatial_merge_size", t->merge);
    set_u32(w, "projector.scale_factor", t->merge);
    for (int i = 0; i < 3; i++) {
        mean[i] = t->scales_itself ? 0 : t->mean[i];
        std[i] = t->scales_itself ? 1 : t->std[i];
    }
    gguf_set_array(w, "clip.vision.image_mean", META_F32, mean, 3);
    gguf_set_array(w, "clip.vision.image_std", META_F32, std, 3);
    set_u32(w, "preproc_resample",
            t->filter == IMAGE_LANCZOS    ? 1
            : t->filter == IMAGE_BILINEAR ? 2
                                          : 3);
    if (t->family->write)
        t->family->write(c, w);
}

static bool write(struct folder_plan *p, const char *out, const struct convert_options *opt,
                  struct convert_result *result)
{
    const struct mix_model model = {
        .n_layers = p->c->n_layers, .n_heads = p->c->n_heads, .n_kv_heads = p->c->n_heads};
    if (!plan(p) || !convert_choose(p->t, opt, &model, p->err))
        return false;
    convert_count(p->t, result);
    if (opt->planned)
        opt->planned(opt->arg, p->t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, p->err);
    if (!w)
        return false;
    set_metadata(w, p, opt->mix);
    bool ok = transcode_run(p->t, w, p->err) && gguf_writer_finish(w, p->err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool convert_tower(const char *in, const char *out, const struct convert_options *options,
                   struct convert_result *result, struct error *err)
{
    struct tensorfile *f = tensorfile_open(in, err);
    if (!f)
        return false;
    struct convert_options opt = *options;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct tower_config tower;
    bool ok = !f->is_gguf && tower_present(f) && tower_load(f, c, &tower, err);
    if (ok) {
        if (!opt.mix) {
            opt.mix = folder_mix(f, build_find(f, c, &tower.family->names.o, 0, 0, "weight"));
            opt.keep = true;
        }
        struct transcode t = {
            .in = f, .threads = opt.threads, .progress = opt.progress, .progress_arg = opt.arg};
        struct folder_plan p = {
            .f = f, .c = c, .t = &t, .used = mem_zalloc(f->n_tensors, sizeof(bool)), .err = err};
        ok = write(&p, out, &opt, result);
        mem_free(p.used);
        transcode_clear(&t);
    }
    mem_free(c);
    tensorfile_close(f);
    return ok;
}
