/*
 * GGUF to GGUF: copies metadata, chooses every tensor's type (choose.c), streams the data through
 * transcode. Knows only the metadata keys that it changes (file type, split, importance matrix).
 */
#include "base/mem.h"
#include "quant/quantize.h"
#include "convert/convert.h"
#include "model/config.h"
#include "model/families/family.h"
#include "vision/tower.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void convert_mix_model(const struct config *c, bool importance, struct mix_model *m)
{
    *m = (struct mix_model){
        .n_layers = c->n_layers,
        .n_expert = c->n_expert,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .is_llama = !strcmp(c->arch_name, "llama"),
        .tied = c->tied,
        .importance = importance,
    };
}

void convert_count(const struct transcode *t, struct convert_result *r)
{
    *r = (struct convert_result){0};
    for (size_t i = 0; i < t->n; i++) {
        const struct out_tensor *o = &t->tensors[i];
        r->n_by_type[o->type]++;
        r->n_params += o->dims[0] * o->rows * o->n_mats;
        r->bytes_out += dtype_bytes(o->type, (size_t)(o->dims[0] * o->rows * o->n_mats));
    }
    r->bytes_in = tensorfile_bytes(t->in);
}

static void copy_metadata(struct gguf_writer *w, const struct tensorfile *f,
                          const struct convert_options *opt)
{
    static const char *const own[] = {"general.file_type",
                                      "general.quantization_version",
                                      "general.alignment",
                                      "split.no",
                                      "split.count",
                                      "split.tensors.count",
                                      "quantize.imatrix.file",
                                      "quantize.imatrix.dataset",
                                      "quantize.imatrix.entries_count",
                                      "quantize.imatrix.chunks_count"};
    for (size_t i = 0; i < f->n_meta; i++) {
        bool skip = false;
        for (size_t k = 0; k < sizeof own / sizeof *own; k++)
            skip |= !strcmp(f->meta[i].key, own[k]);
        if (!skip)
            gguf_set_meta(w, &f->meta[i]);
    }
    gguf_set_u32(w, "general.quantization_version", 2);
    gguf_set_u32(w, "general.file_type", (uint32_t)opt->mix->file_type);
}

bool convert_add_tensors(struct transcode *t, struct error *err)
{
    for (size_t i = 0; i < t->in->n_tensors; i++) {
        const struct tensor *s = &t->in->tensors[i];
        bool readable = s->type == DT_I32 || /* a table of numbers, which stays as it is */
                        quant_has_codes(s->type) || quantize_supported(s->type) ||
                        s->type == DT_NVFP4 || s->type == DT_Q1_0 || s->type == DT_Q2_0;
        if (!readable)
            return error_set(err, "%s: tensor '%s': cannot read type %s", t->in->path, s->name,
                             s->type_name);
        if (strlen(s->name) >= sizeof t->tensors->name)
            return error_set(err, "%s: tensor '%.60s...': name is too long", t->in->path, s->name);
        struct out_tensor *o = transcode_add(t, s->name, s->n_dims, s->dims);
        o->rows = s->dims[1] * s->dims[3];
        o->n_mats = (int)s->dims[2];
        if (s->dims[3] > 1 && s->dims[2] > 1) { /* a convolution: one matrix of all rows */
            o->rows *= s->dims[2];
            o->n_mats = 1;
        }
        if (o->n_mats > 1 << 20)
            return error_set(err, "%s: tensor '%s': unexpected shape", t->in->path, s->name);
        o->mats = mem_zalloc(1, sizeof *o->mats);
        o->mats[0].data = s;
    }
    return true;
}

static struct out_tensor *find_out(struct transcode *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (!strcmp(t->tensors[i].name, name))
            return &t->tensors[i];
    return NULL;
}

/* Removes tensor s from the list; its values become the factors of the tensor at `of`. */
static bool fold_scale(struct transcode *t, struct out_tensor *s, size_t of, struct error *err)
{
    struct out_tensor *o = &t->tensors[of];
    const struct tensor *in = s->mats[0].data;
    bool floats = in->type == DT_F32 || in->type == DT_F16 || in->type == DT_BF16;
    if (!floats || in->dims[0] != o->n_mats || in->dims[1] != 1 || in->dims[2] != 1)
        return error_set(err, "%s: tensor '%s': %d numbers are expected", t->in->path, s->name,
                         o->n_mats);
    o->scales = mem_zalloc((size_t)o->n_mats, sizeof *o->scales);
    quant_dequantize(in->type, in->data, o->scales, (size_t)o->n_mats);
    for (int i = 0; i < o->n_mats; i++)
        if (!isfinite(o->scales[i]))
            return error_set(err, "%s: tensor '%s': entry %d: %g is not a valid scale", t->in->path,
                             s->name, i, (double)o->scales[i]);
    mem_free(s->mats);
    memmove(s, s + 1, (size_t)(t->tensors + t->n - (s + 1)) * sizeof *s);
    t->n--;
    return true;
}

/* NVFP4 weights have one more factor each, NAME.scale. Other types include it in their values. */
static bool fold_scales(struct transcode *t, const struct model_family *family, struct error *err)
{
    for (size_t i = 0; i < t->n; i++) {
        const struct out_tensor *o = &t->tensors[i];
        size_t len = strlen(o->name);
        bool matrix = o->mats[0].data->type == DT_NVFP4 && o->type != DT_NVFP4 && len > 7 &&
                      !strcmp(o->name + len - 7, ".weight");
        char name[sizeof o->name];
        snprintf(name, sizeof name, "%.*s.scale", matrix ? (int)len - 7 : 0, o->name);
        bool own = family->scales_experts && strstr(name, FAMILY_SCALED);
        struct out_tensor *s = matrix && !own ? find_out(t, name) : NULL;
        size_t before = s && s < o;
        if (s && !fold_scale(t, s, i, err))
            return false;
        i -= before; /* entries moved down */
    }
    return true;
}

static bool quantize_open(const struct tensorfile *f, const char *out, struct transcode *t,
                          const struct convert_options *opt, struct convert_result *result,
                          struct error *err)
{
    struct config *c = mem_zalloc(1, sizeof *c);
    struct tower_config tower;
    bool ok = tower_present(f) ? tower_load(f, c, &tower, err) : config_load(f, c, err);
    struct mix_model model;
    if (ok)
        convert_mix_model(c, t->importance != NULL, &model);
    ok = ok && convert_add_tensors(t, err) && convert_choose(t, opt, &model, err) &&
         fold_scales(t, c->family, err);
    mem_free(c);
    if (!ok)
        return false;
    convert_count(t, result);
    if (opt->planned)
        opt->planned(opt->arg, t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, err);
    if (!w)
        return false;
    copy_metadata(w, f, opt);
    if (t->importance && opt->imatrix) {
        gguf_set_string(w, "quantize.imatrix.file", opt->imatrix, strlen(opt->imatrix));
        gguf_set_u32(w, "quantize.imatrix.entries_count", (uint32_t)imatrix_count(t->importance));
    }
    ok = transcode_run(t, w, err);
    if (!ok && !gguf_writer_failed(w, NULL) && strncmp(err->msg, "tensor", 6) == 0)
        error_prefix(err, "%s", f->path);
    ok = ok && gguf_writer_finish(w, err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool quantize_file(const char *in, const char *out, const struct convert_options *opt,
                   struct convert_result *result, struct error *err)
{
    CHECK(opt->mix, "quantize_file needs a mix");
    struct tensorfile *f = tensorfile_open(in, err);
    if (!f)
        return false;
    if (!f->is_gguf) {
        error_set(err, "%s: a Hugging Face folder: `steel convert` makes a GGUF of it", in);
        tensorfile_close(f);
        return false;
    }
    struct imatrix *im = opt->imatrix ? imatrix_open(opt->imatrix, err) : NULL;
    struct transcode t = {.in = f,
                          .importance = im,
                          .threads = opt->threads,
                          .progress = opt->progress,
                          .progress_arg = opt->arg};
    bool ok = (im || !opt->imatrix) && quantize_open(f, out, &t, opt, result, err);
    transcode_clear(&t);
    imatrix_close(im);
    tensorfile_close(f);
    return ok;
}
