/* See lora.h. Owns the adapters while a file is written; transcode.c computes the rows. */
#include "convert/lora.h"
#include "base/buf.h"
#include "base/mem.h"
#include "model/families/family.h"
#include "quant/quantize.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void gguf_name(const struct config *c, const struct tensor_spec *spec, int k, char out[192])
{
    static const struct tensorfile gguf = {.is_gguf = true};
    build_name(&gguf, c, spec->rows[k].name, spec->layer, 0, "weight", out, 192);
}

static struct out_tensor *find_out(struct transcode *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (!strcmp(t->tensors[i].name, name))
            return &t->tensors[i];
    return NULL;
}

/* The weight's row that is row i of a GGUF's tensor. */
static int weight_row(const struct weight_rows *rows, int i)
{
    return rows->interleaved ? rows_from_tensor(rows, ROTARY_ADJACENT, i) : i;
}

/* Whether a GGUF has a separate tensor for these rows, in this order. */
static bool has_place(const struct tensor_spec *spec, const struct weight_rows *rows, bool is_gguf)
{
    bool tied = spec->role == WEIGHT_HEAD && !strcmp(rows->name->gguf, "token_embd");
    return !spec->as && !rows->stride && !rows->tiles.groups && !(is_gguf && rows->also_gguf) &&
           rows->name->gguf && !tied;
}

static bool refuse_place(const char *path, const char *name, struct error *err)
{
    return error_set(err, "%s: tensor %s: its change has no place in a GGUF", path, name);
}

static void add_merge(struct out_tensor *o, const struct tensor_spec *spec, int k,
                      const struct lora *l, float scale)
{
    int first = 0;
    for (int i = 0; i < k; i++)
        first += spec->rows[i].n;
    o->merges = mem_realloc(o->merges, (size_t)o->n_merges + 1, sizeof *o->merges);
    o->merges[o->n_merges++] = (struct merge_part){l, scale};
    if (o->merge_rows)
        return;
    o->merge_rows = mem_zalloc((size_t)o->rows, sizeof *o->merge_rows);
    for (int r = 0; r < (int)o->rows; r++)
        o->merge_rows[r] = first + weight_row(&spec->rows[k], r);
}

/* Whether the adapter changes any of these rows. */
static bool touches(const struct lora *l, int first, int n)
{
    for (int e = 0; e < l->n_expert; e++)
        for (int i = 0; i < l->of[e].n_parts; i++)
            if (l->of[e].parts[i].first < first + n &&
                l->of[e].parts[i].first + l->of[e].parts[i].n > first)
                return true;
    return false;
}

static bool attach(struct merge *m, int which, struct transcode *t, const struct tensorfile *f,
                   const struct config *c, const struct tensor_spec *specs, struct error *err)
{
    const struct adapter *a = m->adapters[which];
    for (int i = 0; i < a->n_specs; i++) {
        const struct tensor_spec *spec = &specs[i];
        int first = 0;
        for (int k = 0; a->changes[i] && k < spec->n_rows; first += spec->rows[k++].n) {
            char name[192];
            if (!touches(a->changes[i], first, spec->rows[k].n))
                continue;
            gguf_name(c, spec, k, name);
            struct out_tensor *o = find_out(t, name);
            if (!has_place(spec, &spec->rows[k], f->is_gguf) || !o || !o->mats)
                return refuse_place(m->refs[which].path, name, err);
            add_merge(o, spec, k, a->changes[i], m->refs[which].scale);
        }
    }
    return true;
}

bool merge_open(struct merge *m, struct transcode *t, const struct tensorfile *f,
                const struct config *c, const struct convert_options *opt, struct error *err)
{
    *m = (struct merge){.refs = opt->merge, .n = opt->n_merge};
    if (!opt->n_merge)
        return true;
    struct outline o = {0};
    if (!outline_load(f, c, &o, err))
        return false;
    m->adapters = mem_zalloc((size_t)m->n, sizeof *m->adapters);
    bool ok = true;
    for (int i = 0; ok && i < m->n; i++) {
        m->adapters[i] = adapter_open(m->refs[i].path, c, f->is_gguf, o.specs, o.n_specs, err);
        ok = m->adapters[i] && attach(m, i, t, f, c, o.specs, err);
    }
    outline_free(&o);
    return ok;
}

void merge_close(struct merge *m)
{
    for (int i = 0; m->adapters && i < m->n; i++)
        adapter_free(m->adapters[i]);
    mem_free(m->adapters);
    *m = (struct merge){0};
}

/* Tensor types are kept. A changed tensor that cannot be re-encoded in its type is an error. */
static bool keep_types(struct transcode *t, struct error *err)
{
    for (size_t i = 0; i < t->n; i++) {
        struct out_tensor *o = &t->tensors[i];
        o->type = o->mats[0].data->type;
        if (o->n_merges && !quantize_supported(o->type))
            return error_set(err,
                             "%s: tensor %s: %s cannot be written anew: merge into a model of "
                             "another type",
                             t->in->path, o->name, dtype_name(o->type));
    }
    return true;
}

static bool write_merged(struct transcode *t, const char *out, const struct convert_options *opt,
                         struct convert_result *result, struct error *err)
{
    convert_count(t, result);
    if (opt->planned)
        opt->planned(opt->arg, t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, err);
    if (!w)
        return false;
    for (size_t i = 0; i < t->in->n_meta; i++)
        if (strncmp(t->in->meta[i].key, "split.", 6) != 0 &&
            strcmp(t->in->meta[i].key, "general.alignment") != 0)
            gguf_set_meta(w, &t->in->meta[i]);
    bool ok = transcode_run(t, w, err);
    if (!ok && !gguf_writer_failed(w, NULL) && strncmp(err->msg, "tensor", 6) == 0)
        error_prefix(err, "%s", t->in->path);
    ok = ok && gguf_writer_finish(w, err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool merge_file(const char *in, const char *out, const struct convert_options *opt,
                struct convert_result *result, struct error *err)
{
    struct tensorfile *f = tensorfile_open(in, err);
    if (!f)
        return false;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct transcode t = {
        .in = f, .threads = opt->threads, .progress = opt->progress, .progress_arg = opt->arg};
    struct merge m = {0};
    bool ok = config_load(f, c, err) && convert_add_tensors(&t, err) &&
              merge_open(&m, &t, f, c, opt, err) && keep_types(&t, err) &&
              write_merged(&t, out, opt, result, err);
    transcode_clear(&t);
    merge_close(&m);
    mem_free(c);
    tensorfile_close(f);
    return ok;
}

/* Adapters to GGUF */

static const struct lora_part *part_at(const struct lora_matrix *m, int first)
{
    for (int i = 0; i < m->n_parts; i++)
        if (m->parts[i].first == first)
            return &m->parts[i];
    return NULL;
}

/* The largest rank of any expert. Others are padded with zero rows and columns. */
static int run_rank(const struct lora *l, int first)
{
    int most = 0;
    for (int e = 0; e < l->n_expert; e++) {
        const struct lora_part *p = part_at(&l->of[e], first);
        most = p && p->rank > most ? p->rank : most;
    }
    return most;
}

static struct out_tensor *add_factor(struct transcode *t, const char *name, const char *end,
                                     int64_t n, int64_t rows, int experts)
{
    char full[128];
    snprintf(full, sizeof full, "%.110s.%s", name, end);
    struct out_tensor *o =
        transcode_add(t, full, experts > 1 ? 3 : 2, (const int64_t[]){n, rows, experts});
    o->rows = rows * experts;
    o->values = mem_zalloc((size_t)(n * rows * experts), sizeof *o->values);
    return o;
}

static void add_run(struct transcode *t, const struct tensor_spec *spec, int k,
                    const struct lora *l, int first, const char *name)
{
    size_t rank = (size_t)run_rank(l, first), n_in = (size_t)l->n_in, n = (size_t)spec->rows[k].n;
    float *a = add_factor(t, name, "lora_a", l->n_in, (int64_t)rank, l->n_expert)->values;
    float *b = add_factor(t, name, "lora_b", (int64_t)rank, (int64_t)n, l->n_expert)->values;
    for (int e = 0; e < l->n_expert; e++, a += rank * n_in, b += n * rank) {
        const struct lora_part *p = part_at(&l->of[e], first);
        if (!p)
            continue;
        memcpy(a, l->of[e].a + (size_t)p->at * n_in, (size_t)p->rank * n_in * sizeof *a);
        for (size_t r = 0; r < n; r++)
            memcpy(b + r * rank,
                   p->b + (size_t)weight_row(&spec->rows[k], (int)r) * (size_t)p->rank,
                   (size_t)p->rank * sizeof *b);
    }
}

/* B already includes the scale. Readers compute alpha / rank, so alpha is set to the rank if all
 * ranks are equal. Otherwise it is omitted, which means a scale of 1. */
static bool list_factors(struct transcode *t, const char *path, const struct config *c,
                         const struct tensor_spec *specs, const struct adapter *a, int *alpha,
                         struct error *err)
{
    *alpha = -1;
    for (int i = 0; i < a->n_specs; i++) {
        const struct lora *l = a->changes[i];
        int first = 0;
        for (int k = 0; l && k < specs[i].n_rows; first += specs[i].rows[k++].n) {
            char name[192];
            int rank = run_rank(l, first);
            if (!rank)
                continue;
            gguf_name(c, &specs[i], k, name);
            if (!has_place(&specs[i], &specs[i].rows[k], t->in->is_gguf))
                return refuse_place(path, name, err);
            add_run(t, &specs[i], k, l, first, name);
            *alpha = *alpha < 0 || *alpha == rank ? rank : 0;
        }
    }
    return true;
}

static bool write_adapter(struct transcode *t, const struct config *c, int alpha, const char *out,
                          const struct convert_options *opt, struct convert_result *result,
                          struct error *err)
{
    const char *arch = c->family->gguf_as ? c->family->gguf_as : c->family->name;
    enum dtype type = opt->mix ? opt->mix->base : DT_F32;
    for (size_t i = 0; i < t->n; i++)
        t->tensors[i].type = type;
    convert_count(t, result);
    if (opt->planned)
        opt->planned(opt->arg, t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, err);
    if (!w)
        return false;
    gguf_set_string(w, "general.architecture", arch, strlen(arch));
    gguf_set_string(w, "general.type", "adapter", 7);
    gguf_set_string(w, "adapter.type", "lora", 4);
    if (alpha > 0)
        gguf_set_f32(w, "adapter.lora.alpha", (float)alpha);
    gguf_set_u32(w, "general.quantization_version", 2);
    bool ok = transcode_run(t, w, err) && gguf_writer_finish(w, err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool convert_adapter(const char *in, const char *base, const char *out,
                     const struct convert_options *opt, struct convert_result *result,
                     struct error *err)
{
    if (opt->mix && opt->mix->base != DT_F32 && opt->mix->base != DT_F16 &&
        opt->mix->base != DT_BF16)
        return error_set(err, "an adapter is written as f32, f16 or bf16");
    struct tensorfile *f = tensorfile_open(base, err);
    if (!f)
        return false;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct outline o = {0};
    struct transcode t = {
        .in = f, .threads = opt->threads, .progress = opt->progress, .progress_arg = opt->arg};
    int alpha = 0;
    bool ok = config_load(f, c, err) && outline_load(f, c, &o, err);
    struct adapter *a = ok ? adapter_open(in, c, f->is_gguf, o.specs, o.n_specs, err) : NULL;
    ok = a && list_factors(&t, in, c, o.specs, a, &alpha, err) &&
         write_adapter(&t, c, alpha, out, opt, result, err);
    transcode_clear(&t);
    adapter_free(a);
    if (o.specs)
        outline_free(&o);
    mem_free(c);
    tensorfile_close(f);
    return ok;
}

bool convert_is_adapter(const char *path)
{
    const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path;
    struct buf inside = {0}, model = {0};
    buf_addf(&inside, "%s/adapter_config.json", path);
    buf_addf(&model, "%s/config.json", path);
    bool folder = access(inside.p, F_OK) == 0 && access(model.p, F_OK) != 0;
    buf_clear(&inside);
    buf_clear(&model);
    return folder || !strcmp(last, "adapter_config.json") ||
           !strcmp(last, "adapter_model.safetensors");
}
