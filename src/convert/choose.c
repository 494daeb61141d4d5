/*
 * Chooses the type of each output tensor. A type given by the user for the tensor (--tensor and
 * similar) has priority. Without any request the source's type is kept, if GGUF can hold it.
 * Otherwise the mix decides. The chosen type's blocks always divide the rows. Notes report changes
 * and requests that could not be met; a pattern that matches no tensor is an error. Writes nothing.
 */
#include "base/buf.h"
#include "base/mem.h"
#include "convert/convert.h"

#include <string.h>

static bool is_float(enum dtype t)
{
    return t == DT_F32 || t == DT_F16 || t == DT_BF16;
}

/* The source's type if it is plain; DT_NONE for packed and computed tensors. */
static enum dtype plain_type(const struct out_tensor *o)
{
    bool plain = o->mats && o->mats[0].layout.kind == LAYOUT_PLAIN;
    return plain ? o->mats[0].data->type : DT_NONE; /* also if it is a part of a tensor */
}

/* The type in which GGUF can hold the source bit for bit: the type of all its matrices, or F32 if
 * their float types differ. DT_NONE: none. A tensor with a merged adapter is re-encoded, which
 * NVFP4 cannot be. */
static enum dtype source_type(const struct out_tensor *o)
{
    enum dtype all = DT_NONE;
    for (int i = 0; o->mats && i < transcode_sources(o); i++) {
        const struct input_matrix *s = &o->mats[i];
        bool plain = s->layout.kind == LAYOUT_PLAIN;
        enum dtype type = plain ? s->data->type : s->layout.type;
        if (i == 0)
            all = type;
        else if (type != all)
            all = is_float(type) && is_float(all) ? DT_F32 : DT_NONE;
    }
    bool packed = (all == DT_MXFP4 || all == DT_Q8_0 || (all == DT_NVFP4 && !o->n_merges)) &&
                  transcode_copies(o);
    return is_float(all) || packed ? all : DT_NONE;
}

/* The type the user requested by tensor name, or DT_NONE. */
static enum dtype forced_type(const struct out_tensor *o, const struct convert_options *opt,
                              const struct mix_model *model)
{
    enum dtype forced = DT_NONE;
    bool embedding = !strcmp(o->name, "token_embd.weight");
    if (!strcmp(o->name, "output.weight") || (embedding && model->tied))
        forced = opt->head_type;
    if (embedding && opt->embedding_type != DT_NONE)
        forced = opt->embedding_type;
    for (int i = 0; i < opt->n_overrides; i++)
        if (!regexec(&opt->overrides[i].pattern, o->name, 0, NULL, 0))
            forced = opt->overrides[i].type;
    return forced;
}

/* The desired type of a matrix, before its row length is checked. */
static enum dtype wanted_type(const struct out_tensor *o, const struct convert_options *opt,
                              const struct mix_model *model)
{
    enum dtype type = forced_type(o, opt, model);
    if (type == DT_NONE && opt->keep)
        type = source_type(o);
    if (type == DT_NONE)
        type = opt->pure ? opt->mix->base : mix_choose(opt->mix, model, o->name, o->dims);
    return type;
}

/* Every pattern must match a tensor whose type can change. */
static bool check_patterns(const struct transcode *t, const struct convert_options *opt,
                           struct error *err)
{
    for (int i = 0; i < opt->n_overrides; i++) {
        const struct convert_override *x = &opt->overrides[i];
        const char *fixed = NULL; /* a match that is never quantised */
        bool used = false;
        for (size_t k = 0; !used && k < t->n; k++) {
            const struct out_tensor *o = &t->tensors[k];
            if (regexec(&x->pattern, o->name, 0, NULL, 0))
                continue;
            used = mix_is_matrix(o->name, o->n_dims, o->dims);
            fixed = o->name;
        }
        if (!used && fixed)
            return error_set(err,
                             "--tensor %s: fits '%s' and its like alone, which keep their type",
                             x->text, fixed);
        if (!used)
            return error_set(err, "--tensor %s: %s has no tensor of such a name", x->text,
                             t->in->path);
    }
    return true;
}

static void tell(const struct convert_options *opt, struct buf *text)
{
    if (opt->note && text->len)
        opt->note(opt->arg, text->p);
    buf_reset(text);
}

/* Notes about packed sources, by kind: those kept and those converted. */
static void tell_packed(const struct transcode *t, const struct convert_options *opt)
{
    static const char *const names[] = {
        [LAYOUT_GPTQ] = "GPTQ",   [LAYOUT_AWQ] = "AWQ",
        [LAYOUT_INT4] = "Int4",   [LAYOUT_INT8] = "Int8",
        [LAYOUT_FP8] = "FP8",     [LAYOUT_NVFP4] = "NVFP4",
        [LAYOUT_MXFP4] = "MXFP4", [LAYOUT_BNB4] = "bitsandbytes' 4 bits",
        [LAYOUT_MLX] = "MLX",     [LAYOUT_TERNARY] = "BitNet",
        [LAYOUT_MXFP8] = "MXFP8"};
    struct buf text = {0};
    for (size_t kind = LAYOUT_GPTQ; kind < sizeof names / sizeof *names; kind++) {
        size_t kept = 0, changed = 0, to[DT_COUNT] = {0};
        for (size_t i = 0; i < t->n; i++) {
            const struct out_tensor *o = &t->tensors[i];
            if (!o->mats || o->mats[0].layout.kind != kind)
                continue;
            bool same = o->type == o->mats[0].layout.type && !o->n_merges && !o->row_times;
            kept += same;
            changed += !same;
            to[o->type] += !same;
        }
        if (kept)
            buf_addf(&text, "%zu tensors of %s stay as they are, bit for bit", kept, names[kind]);
        tell(opt, &text);
        if (changed)
            buf_addf(&text, "%zu tensors of %s change:", changed, names[kind]);
        const char *comma = "";
        for (int type = 0; type < DT_COUNT; type++)
            if (to[type]) {
                buf_addf(&text, "%s %zu to %s", comma, to[type], dtype_name((enum dtype)type));
                comma = ",";
            }
        tell(opt, &text);
    }
    buf_clear(&text);
}

/* counts[wanted][got] */
static void tell_misfits(size_t (*counts)[DT_COUNT], const struct convert_options *opt)
{
    struct buf text = {0};
    for (int a = 0; a < DT_COUNT; a++)
        for (int b = 0; b < DT_COUNT; b++) {
            if (!counts[a][b])
                continue;
            buf_addf(&text,
                     "%zu tensors get %s instead of %s: their rows do not divide into its blocks "
                     "of %d",
                     counts[a][b], dtype_name((enum dtype)b), dtype_name((enum dtype)a),
                     dtype_table[a].block_len);
            tell(opt, &text);
        }
    buf_clear(&text);
}

static bool weigh(const struct transcode *t, struct out_tensor *o,
                  const struct convert_options *opt, size_t *without, struct error *err)
{
    if (!t->importance || is_float(o->type))
        return true;
    enum imatrix_fit fit =
        imatrix_check(t->importance, o->name, (size_t)o->dims[0], (size_t)o->n_mats);
    o->weighted = fit == IMATRIX_FITS;
    bool embedding = !strcmp(o->name, "token_embd.weight") || !strcmp(o->name, "output.weight");
    *without += fit == IMATRIX_NONE && !embedding;
    return fit != IMATRIX_MISFIT || embedding ||
           error_set(err, "%s: '%s': number of values does not fit the model", opt->imatrix,
                     o->name);
}

static bool choose_all(struct transcode *t, const struct convert_options *opt,
                       const struct mix_model *model, size_t (*misfits)[DT_COUNT], size_t *without,
                       struct error *err)
{
    for (size_t i = 0; i < t->n; i++) {
        struct out_tensor *o = &t->tensors[i];
        enum dtype from = plain_type(o);
        if (o->type == DT_I32 || from == DT_I32) { /* tables of numbers */
            o->type = DT_I32;
            continue;
        }
        bool matrix = mix_is_matrix(o->name, o->n_dims, o->dims);
        enum dtype want = matrix ? wanted_type(o, opt, model) : DT_F32;
        o->type = mix_fitting(want, o->dims[0]);
        misfits[want][o->type] += o->type != want;
        /* tensors that are not matrices keep a float type */
        if (!matrix && opt->mix->base != DT_F32 && is_float(from) && t->in->is_gguf)
            o->type = from;
        bool quantised = from != DT_NONE && from != o->type && !is_float(from);
        if (quantised && t->in->is_gguf && !opt->requantize)
            return error_set(err,
                             "%s: tensor '%s' is %s already: quantising again loses more than from "
                             "the original (--allow-requantize does it all the same)",
                             t->in->path, o->name, dtype_name(from));
        if (!weigh(t, o, opt, without, err))
            return false;
    }
    return true;
}

bool convert_choose(struct transcode *t, const struct convert_options *opt,
                    const struct mix_model *model, struct error *err)
{
    size_t without = 0;
    size_t(*misfits)[DT_COUNT] = mem_zalloc(DT_COUNT, sizeof *misfits);
    bool ok = check_patterns(t, opt, err) && choose_all(t, opt, model, misfits, &without, err);
    if (ok) {
        tell_packed(t, opt);
        tell_misfits(misfits, opt);
    }
    if (ok && without) {
        struct buf text = {0};
        buf_addf(&text, "%zu tensors have no entry in the importance matrix", without);
        tell(opt, &text);
        buf_clear(&text);
    }
    mem_free(misfits);
    return ok;
}

int convert_file_type(const struct transcode *t, const struct mix *mix)
{
    /* GGUF's file_type values for files with mostly these types */
    enum { MOSTLY_MXFP4 = 38, MOSTLY_NVFP4 = 39 };
    int type = mix->file_type;
    for (size_t i = 0; i < t->n; i++)
        if (t->tensors[i].type == DT_NVFP4)
            return MOSTLY_NVFP4;
        else if (t->tensors[i].type == DT_MXFP4 && is_float(mix->base))
            type = MOSTLY_MXFP4;
    return type;
}
