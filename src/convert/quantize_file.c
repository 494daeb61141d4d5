/*
 * GGUF to GGUF: metadata carried over, every tensor's type chosen by the mix, data streamed through
 * transcode. Knows metadata keys of its own concern only (file type, split, importance matrix).
 */
#include "base/mem.h"
#include "quant/quantize.h"
#include "convert/convert.h"
#include "model/config.h"
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

void convert_mix_model(const struct config *c, bool importance, struct mix_model *m)
{
    *m = (struct mix_model){
        .n_layers = c->n_layers,
        .n_expert = c->n_expert,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .is_llama = c->family->weaves_qk,
        .tied = c->tied,
        .importance = importance,
    };
}

/* The type a source has where it is plain; DT_NONE for packed and computed ones. */
static enum dtype plain_type(const struct out_tensor *o)
{
    bool plain = o->mats && o->mats[0].layout.kind == LAYOUT_PLAIN;
    return plain ? o->mats[0].data->type : DT_NONE; /* also of a part */
}

static bool is_float(enum dtype t)
{
    return t == DT_F32 || t == DT_F16 || t == DT_BF16;
}

static enum dtype choose_one(const struct out_tensor *o, const struct convert_options *opt,
                             const struct mix_model *model)
{
    enum dtype type = mix_choose(opt->mix, model, o->name, o->n_dims, o->dims);
    bool matrix = type != DT_F32;
    if (matrix && opt->pure)
        type = o->dims[0] % dtype_table[opt->mix->base].block_len ? DT_F16 : opt->mix->base;
    enum dtype forced = DT_NONE;
    if (matrix && !strcmp(o->name, "output.weight"))
        forced = opt->head_type;
    if (matrix && !strcmp(o->name, "token_embd.weight"))
        forced = opt->embedding_type;
    for (int i = 0; matrix && i < opt->n_overrides; i++)
        if (!regexec(&opt->overrides[i].pattern, o->name, 0, NULL, 0))
            forced = opt->overrides[i].type;
    if (forced != DT_NONE && o->dims[0] % dtype_table[forced].block_len == 0)
        type = forced;
    return type;
}

/* Packed sources whose codes GGUF cannot hold, by kind, for a line each. */
static void tell_changes(const struct transcode *t, const struct convert_options *opt)
{
    static const char *const names[] = {
        [LAYOUT_GPTQ] = "GPTQ", [LAYOUT_AWQ] = "AWQ",     [LAYOUT_INT4] = "Int4",
        [LAYOUT_FP8] = "FP8",   [LAYOUT_NVFP4] = "NVFP4", [LAYOUT_MXFP4] = "MXFP4"};
    for (size_t kind = LAYOUT_GPTQ; kind < sizeof names / sizeof *names; kind++) {
        size_t changed = 0, kept = 0;
        enum dtype to = DT_NONE;
        for (size_t i = 0; i < t->n; i++) {
            const struct out_tensor *o = &t->tensors[i];
            if (!o->mats || o->mats[0].layout.kind != kind)
                continue;
            bool same = o->type == o->mats[0].layout.type;
            kept += same;
            changed += !same;
            to = same ? to : o->type;
        }
        char text[160];
        if (kept)
            snprintf(text, sizeof text, "%zu tensors of %s stay as they are, bit for bit", kept,
                     names[kind]);
        if (kept && opt->note)
            opt->note(opt->arg, text);
        if (changed)
            snprintf(text, sizeof text, "%zu tensors of %s change: to %s, as GGUF has it", changed,
                     names[kind], dtype_name(to));
        if (changed && opt->note)
            opt->note(opt->arg, text);
    }
}

bool convert_choose(struct transcode *t, const struct convert_options *opt,
                    const struct mix_model *model, struct error *err)
{
    size_t without = 0;
    for (size_t i = 0; i < t->n; i++) {
        struct out_tensor *o = &t->tensors[i];
        enum dtype from = plain_type(o);
        o->type = choose_one(o, opt, model);
        if (opt->keep && o->mats && o->mats[0].layout.type == DT_MXFP4)
            o->type = DT_MXFP4;
        /* what is no matrix stays as it is, if it is a plain number */
        if (o->type == DT_F32 && opt->mix->base != DT_F32 && is_float(from) && t->in->is_gguf)
            o->type = from;
        bool quantised = from != DT_NONE && from != o->type && !is_float(from);
        if (quantised && t->in->is_gguf && !opt->requantize)
            return error_set(err,
                             "%s: tensor '%s' is %s already: quantising again loses more than from "
                             "the original (--allow-requantize does it all the same)",
                             t->in->path, o->name, dtype_name(from));
        if (!t->importance || is_float(o->type))
            continue;
        enum imatrix_fit fit =
            imatrix_check(t->importance, o->name, (size_t)o->dims[0], (size_t)o->n_mats);
        o->weighted = fit == IMATRIX_FITS;
        bool embedding = !strcmp(o->name, "token_embd.weight") || !strcmp(o->name, "output.weight");
        without += fit == IMATRIX_NONE && !embedding;
        if (fit == IMATRIX_MISFIT && !embedding)
            return error_set(err, "%s: '%s': number of values does not fit the model", opt->imatrix,
                             o->name);
    }
    tell_changes(t, opt);
    if (without && opt->note) {
        char text[160];
        snprintf(text, sizeof text, "%zu tensors have no entry in the importance matrix", without);
        opt->note(opt->arg, text);
    }
    return true;
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
        bool readable = quant_has_codes(s->type) || quantize_supported(s->type);
        if (!readable)
            return error_set(err, "%s: tensor '%s': cannot read type %s", t->in->path, s->name,
                             s->type_name);
        if (strlen(s->name) >= sizeof t->tensors->name)
            return error_set(err, "%s: tensor '%.60s...': name is too long", t->in->path, s->name);
        struct out_tensor *o = transcode_add(t, s->name, s->n_dims, s->dims);
        o->rows = s->dims[1] * s->dims[3];
        o->n_mats = (int)s->dims[2];
        if (s->dims[2] > 1 << 20 || (s->dims[3] > 1 && s->dims[2] > 1))
            return error_set(err, "%s: tensor '%s': unexpected shape", t->in->path, s->name);
        o->mats = mem_zalloc(1, sizeof *o->mats);
        o->mats[0].data = s;
    }
    return true;
}

static bool quantize_open(const struct tensorfile *f, const char *out, struct transcode *t,
                          const struct convert_options *opt, struct convert_result *result,
                          struct error *err)
{
    struct config *c = mem_zalloc(1, sizeof *c);
    bool ok = config_load(f, c, err);
    struct mix_model model;
    if (ok)
        convert_mix_model(c, t->importance != NULL, &model);
    mem_free(c);
    if (!ok || !convert_add_tensors(t, err) || !convert_choose(t, opt, &model, err))
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
