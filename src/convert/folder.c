/*
 * A Hugging Face folder to GGUF: maps tensors, row orders and the values of config.json to GGUF's.
 * Packed sources (layout.h) are copied or unpacked, as choose.c decides. Every tensor of the folder
 * must have a destination; an unknown one is an error, never silently dropped. vocab.c writes the
 * vocabulary.
 */
#include "base/mem.h"
#include "convert/convert.h"
#include "convert/encoder.h"
#include "convert/folder.h"
#include "convert/lora.h"
#include "convert/vocab.h"
#include "model/config.h"
#include "model/families/family.h"
#include "model/model.h"
#include "vision/tower.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool check_shape(struct folder_plan *p, const struct tensor *t, int64_t n, int64_t rows)
{
    if (t->dims[0] == n && t->dims[1] == rows && t->dims[2] == 1 && t->dims[3] == 1)
        return true;
    return error_set(p->err,
                     "%s: tensor %s: shape [%" PRId64 ", %" PRId64 "], expected [%" PRId64
                     ", %" PRId64 "]",
                     p->f->path, t->name, t->dims[1], t->dims[0], rows, n);
}

static bool check_type(struct folder_plan *p, const struct tensor *t)
{
    return t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16 ||
           error_set(p->err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected",
                     p->f->path, t->name, t->type_name);
}

/* A tensor's name in both kinds of file, with suffix. A GGUF has one name for all experts. */
static void names_of(const struct folder_plan *p, const struct tensor_spec *spec,
                     const struct tensor_name *n, int expert, const char *suffix, char to[128],
                     char from[192])
{
    static const struct tensorfile gguf = {.is_gguf = true};
    int layer = spec->layer;
    build_name(&gguf, p->c, n, spec->gguf_layer ? spec->gguf_layer - 1 : layer, 0, suffix, to, 128);
    build_name(p->f, p->c, n, layer, expert, suffix, from, 192);
}

const struct tensor *folder_find(struct folder_plan *p, const char *name)
{
    const struct tensor *t = tensorfile_find(p->f, name);
    if (t)
        p->used[t - p->f->tensors] = true;
    return t;
}

/* All of a tensor as floats. NULL with an error if its shape differs. */
static float *read_floats(struct folder_plan *p, const struct tensor *t, int64_t n, int64_t rows)
{
    if (!check_shape(p, t, n, rows) || !check_type(p, t))
        return NULL;
    float *v = mem_zalloc((size_t)(n * rows), sizeof *v);
    quant_dequantize(t->type, t->data, v, (size_t)(n * rows));
    return v;
}

/* The folder's row (or column) at index i of a GGUF's tensor. */
static int64_t tiled(const struct head_tiles *t, int64_t i)
{
    if (!t->groups || i < t->plain)
        return i;
    int64_t head = (i - t->plain) / t->len, in = (i - t->plain) % t->len;
    return t->plain + (head % t->groups * t->each + head / t->groups) * t->len + in;
}

/* A table of values, or a vector with reordered entries. */
static bool add_table(struct folder_plan *p, const struct tensor_spec *spec, const struct tensor *t,
                      const char *to)
{
    int64_t width = spec->width ? spec->width : 1, n = spec->n_in, rows = n / width;
    bool apart = spec->width && t->dims[1] == 1; /* convolutions have an extra dimension */
    struct tensor flat = *t;
    if (apart) {
        flat.dims[1] = t->dims[2];
        flat.dims[2] = t->dims[1];
    }
    float *v = read_floats(p, &flat, spec->width ? width : n, spec->width ? rows : 1);
    if (!v)
        return false;
    float *out = mem_zalloc((size_t)n, sizeof *out);
    for (int64_t i = 0; i < n; i++) {
        float x = v[tiled(&spec->rows[0].tiles, i / width) * width + i % width];
        out[i] = spec->adjust.decay ? -expf(x) : x;
    }
    mem_free(v);
    width = spec->width ? width : spec->adjust.wrap ? spec->adjust.wrap : n;
    rows = n / width;
    struct out_tensor *o =
        transcode_add(p->t, to, rows > 1 ? 2 : 1, (const int64_t[]){width, rows});
    o->values = out;
    o->rows = rows;
    return true;
}

/* A table of whole numbers as I32. The model's loader checks their range. */
static bool add_numbers(struct folder_plan *p, const struct tensor_spec *spec,
                        const struct tensor *t, const char *to)
{
    int64_t width = spec->width, n = spec->n_in, rows = n / width;
    size_t each = t->type == DT_I64 ? sizeof(int64_t) : sizeof(int32_t);
    if (!check_shape(p, t, width, rows))
        return false;
    if (t->type != DT_I32 && t->type != DT_I64)
        return error_set(p->err, "%s: tensor %s: type %s where I32 or I64 is expected", p->f->path,
                         t->name, t->type_name);
    float *bits = mem_zalloc((size_t)n, sizeof *bits);
    for (size_t i = 0; i < (size_t)n; i++) /* the low half of an I64 */
        memcpy(&bits[i], (const char *)t->data + i * each, sizeof *bits);
    struct out_tensor *o = transcode_add(p->t, to, 2, (const int64_t[]){width, rows});
    o->type = DT_I32;
    o->values = bits;
    o->rows = rows;
    return true;
}

/* A vector as F32: norms, sinks, scales. */
static bool add_vector(struct folder_plan *p, const struct tensor_spec *spec)
{
    const struct adjust *adjust = &spec->adjust;
    char to[128], from[192];
    int64_t n = spec->n_in - adjust->n_tail;
    names_of(p, spec, spec->rows[0].name, 0, spec->is_bias ? "bias" : "weight", to, from);
    if (adjust->fill != 0) {
        float *values = transcode_add(p->t, to, 1, &n)->values =
            mem_zalloc((size_t)n, sizeof *values);
        for (int64_t i = 0; i < n; i++)
            values[i] = adjust->fill;
        return true;
    }
    const struct tensor *t = folder_find(p, from);
    if (!t)
        return error_set(p->err, "%s: tensor %s: missing", p->f->path, from);
    if (adjust->below)
        return add_numbers(p, spec, t, to);
    if (spec->width || spec->adjust.decay || spec->rows[0].tiles.groups)
        return add_table(p, spec, t, to);
    float *v = read_floats(p, t, n, 1);
    if (!v)
        return false;
    for (int64_t i = 0; i < n; i++)
        v[i] = (v[i] + adjust->add) * (adjust->fold == 0 ? 1 : adjust->fold);
    int64_t width = adjust->wrap ? adjust->wrap : n, rows = n / width;
    struct out_tensor *o =
        transcode_add(p->t, to, rows > 1 ? 2 : 1, (const int64_t[]){width, rows});
    o->values = v;
    o->rows = rows;
    return true;
}

/* Whether rotary pairs become adjacent: they are in the GGUF, but not in the folder. */
static bool swaps(const struct weight_rows *rows)
{
    return rows_order(rows, true) == ROTARY_ADJACENT && rows_order(rows, false) == ROTARY_PLAIN;
}

/* The row of the folder's rows that is row i of the GGUF's. */
static int source_row(const struct weight_rows *rows, int i)
{
    enum rotary_rows to = rows_order(rows, true), from = rows_order(rows, false);
    return to == from ? i : rows_to_tensor(rows, from, rows_from_tensor(rows, to, i));
}

/* The bias of `rows`, if any, as F32: (n_expert, n). Interleaved like the rows. */
static bool add_bias(struct folder_plan *p, const struct tensor_spec *spec,
                     const struct weight_rows *rows)
{
    char to[128], from[192];
    int64_t n = rows->n, of = rows->tensor_rows ? rows->tensor_rows : n, experts = spec->n_expert;
    bool stacked = build_stacked(p->f, rows->name);
    names_of(p, spec, rows->name, 0, "bias", to, from);
    if (!tensorfile_find(p->f, from))
        return true;
    struct out_tensor *o =
        transcode_add(p->t, to, experts > 1 ? 2 : 1, (const int64_t[]){n, experts});
    o->rows = experts;
    o->values = mem_zalloc((size_t)(n * experts), sizeof *o->values);
    for (int64_t e = 0; e < experts; e += stacked ? experts : 1) {
        names_of(p, spec, rows->name, (int)e, "bias", to, from);
        const struct tensor *t = folder_find(p, from);
        if (!t)
            return error_set(p->err, "%s: tensor %s: missing", p->f->path, from);
        int64_t count = stacked ? experts : 1, step = rows->step ? rows->step : 1;
        float *v = read_floats(p, t, of, count);
        if (!v)
            return false;
        for (int64_t i = 0; i < n * count; i++) {
            int64_t at = source_row(rows, (int)(i % n));
            o->values[e * n + i] = v[i / n * of + rows->first + step * at];
        }
        mem_free(v);
    }
    return true;
}

/* One matrix of a folder, or a stack of them. */
struct folder_matrix {
    struct folder_plan *p;
    const struct tensor_name *name;
    int layer, expert;
};

static const struct tensor *find_beside(void *arg, const char *suffix)
{
    const struct folder_matrix *at = arg;
    char from[192];
    build_name(at->p->f, at->p->c, at->name, at->layer, at->expert, suffix, from, sizeof from);
    return folder_find(at->p, from);
}

/* Finds expert e's matrix, or all experts' if they are stacked: packed or plain. */
static bool matrix_source(struct folder_plan *p, const struct tensor_spec *spec,
                          const struct weight_rows *rows, int e, bool stacked,
                          struct input_matrix *s)
{
    char to[128], from[192];
    int64_t n = spec->n_in, of = rows->tensor_rows ? rows->tensor_rows : rows->n;
    int64_t experts = stacked ? spec->n_expert : 1;
    struct folder_matrix place = {p, rows->name, spec->layer, e};
    struct layout_ask ask = {.path = p->f->path,
                             .find = find_beside,
                             .arg = &place,
                             .config = &p->c->layout,
                             .n_in = spec->n_in,
                             .n_out = (int)of,
                             .n_stack = stacked ? spec->n_expert : 0,
                             .transposed = rows->transposed};
    if (!layout_find(&ask, &s->layout, p->err))
        return false;
    s->first = rows->first;
    s->step = rows->step ? rows->step : 1;
    s->data = s->layout.data;
    if (s->layout.kind != LAYOUT_PLAIN)
        return true;
    names_of(p, spec, rows->name, e, "weight", to, from);
    s->data = folder_find(p, from);
    if (!s->data)
        return error_set(p->err, "%s: tensor %s: missing", p->f->path, from);
    const struct tensor *t = s->data;
    int64_t d0 = rows->transposed ? of : n, d1 = rows->transposed ? n : of;
    if (experts == 1 && !check_shape(p, t, d0, d1))
        return false;
    if (t->dims[0] != d0 || t->dims[1] != d1 || t->dims[2] != experts || t->dims[3] != 1)
        return error_set(p->err,
                         "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                         "], expected [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                         p->f->path, t->name, t->dims[2], t->dims[1], t->dims[0], experts, d1, d0);
    s->tensor_rows = rows->tensor_rows;
    s->transposed = rows->transposed;
    return check_type(p, t);
}

/* The bias beside a tensor of add_as, in its order. */
static bool add_bias_as(struct folder_plan *p, const struct tensor_spec *spec, const int32_t *order)
{
    char to[128], other[128], from[192];
    int64_t n = spec->w->n_out;
    names_of(p, spec, spec->as, 0, "bias", to, from);
    names_of(p, spec, spec->rows[0].name, 0, "bias", other, from);
    if (!tensorfile_find(p->f, from))
        return true;
    float *v = read_floats(p, folder_find(p, from), n, 1);
    if (!v)
        return false;
    float *out = mem_zalloc((size_t)n, sizeof *out);
    for (int64_t i = 0; i < n; i++)
        out[i] = v[order[i]];
    mem_free(v);
    transcode_add(p->t, to, 1, &n)->values = out;
    return true;
}

/* Writes a weight whose rows are all parts of one tensor as one tensor of another name, or that
 * tensor unchanged. */
static bool add_as(struct folder_plan *p, const struct tensor_spec *spec)
{
    char to[128], from[192];
    const struct weight_rows *first = &spec->rows[0];
    int64_t n_out = spec->w->n_out;
    names_of(p, spec, spec->as, 0, "weight", to, from);
    struct out_tensor *o = transcode_add(p->t, to, 2, (const int64_t[]){spec->n_in, n_out});
    o->rows = n_out;
    o->n_mats = 1;
    o->mats = mem_zalloc(1, sizeof *o->mats);
    o->order = mem_zalloc((size_t)n_out, sizeof *o->order);
    int64_t at = 0;
    for (int k = 0; k < spec->n_rows; k++)
        for (int r = 0, run = spec->rows[k].run_length; r < spec->rows[k].n; r++, at++)
            o->order[at] = spec->as_is
                               ? (int32_t)at
                               : spec->rows[k].first + spec->rows[k].step * (r / run) + r % run;
    return matrix_source(p, spec, first, 0, false, &o->mats[0]) && add_bias_as(p, spec, o->order);
}

/* Splits a tensor of all heads into one matrix per head. */
static bool add_heads(struct folder_plan *p, const struct tensor_spec *spec,
                      const struct tensor_name *name)
{
    char to[128], from[192];
    const struct weight_rows *rows = &spec->rows[0];
    int H = spec->n_expert, n = spec->n_in;
    names_of(p, spec, name, 0, "weight", to, from);
    struct out_tensor *o = transcode_add(p->t, to, 3, (const int64_t[]){n, rows->n, H});
    o->rows = rows->n;
    o->n_mats = H;
    o->mats = mem_zalloc((size_t)H, sizeof *o->mats);
    struct input_matrix all = {0};
    struct tensor_spec one = {
        .layer = spec->layer, .n_in = rows->transposed ? rows->n : n, .n_expert = 1};
    struct weight_rows whole = {.name = rows->name, .n = H * rows->stride};
    if (!matrix_source(p, &one, &whole, 0, false, &all))
        return false;
    for (int h = 0; h < H; h++) {
        o->mats[h] = all;
        o->mats[h].tensor_rows = rows->transposed ? rows->n : H * rows->stride;
        o->mats[h].transposed = rows->transposed;
        o->mats[h].offset = (int64_t)h * rows->stride + rows->offset;
    }
    return true;
}

/* Sets the order of rows or columns in a GGUF. */
static void reorder(const struct tensor_spec *spec, const struct weight_rows *rows,
                    struct out_tensor *o)
{
    const struct head_tiles *t = &rows->tiles;
    struct input_matrix *s = &o->mats[0];
    int n = t->columns ? spec->n_in : rows->n;
    int32_t *order = mem_zalloc((size_t)n, sizeof *order);
    for (int i = 0; i < n; i++)
        order[i] = (int32_t)tiled(t, i);
    *(t->columns ? &o->columns : &o->order) = order;
    s->tensor_rows = rows->n;
    s->step = 1;
}

/* Sets the order of rows whose rotary pairs are elsewhere in a GGUF. */
static void reorder_pairs(const struct weight_rows *rows, struct out_tensor *o)
{
    struct input_matrix *s = &o->mats[0];
    o->order = mem_zalloc((size_t)rows->n, sizeof *o->order);
    for (int i = 0; i < rows->n; i++)
        o->order[i] = rows->first + source_row(rows, i);
    s->tensor_rows = rows->tensor_rows ? rows->tensor_rows : rows->n;
    s->first = 0;
    s->step = 1;
}

/* Sets the factors on a tensor's rows. */
static void fold_rows(const struct weight_rows *rows, struct out_tensor *o)
{
    if (!rows->fold[0].n)
        return;
    o->row_times = mem_zalloc((size_t)o->rows, sizeof *o->row_times);
    int at = 0;
    for (const struct row_fold *f = rows->fold; f->n; f++)
        for (int i = 0; i < f->n; i++)
            o->row_times[at++] = f->times;
}

/* Writes rows of a weight, for all experts, as one GGUF tensor. */
static bool add_rows(struct folder_plan *p, const struct tensor_spec *spec,
                     const struct weight_rows *rows)
{
    char to[128], from[192];
    int experts = spec->n_expert;
    bool stacked = experts > 1 && build_stacked(p->f, rows->name);
    names_of(p, spec, rows->name, 0, "weight", to, from);
    struct out_tensor *o = transcode_add(p->t, to, experts > 1 ? 3 : 2,
                                         (const int64_t[]){spec->n_in, rows->n, experts});
    o->rows = rows->n;
    o->n_mats = experts;
    o->heads = swaps(rows) ? rows->n / rows->interleaved : 0;
    o->mats = mem_zalloc((size_t)experts, sizeof *o->mats);
    for (int e = 0; e < (stacked ? 1 : experts); e++)
        if (!matrix_source(p, spec, rows, e, stacked, &o->mats[e]))
            return false;
    if (rows->tiles.groups)
        reorder(spec, rows, o);
    else if (!o->heads && rows_order(rows, true) != rows_order(rows, false))
        reorder_pairs(rows, o);
    fold_rows(rows, o);
    return true;
}

static bool add_weight(struct folder_plan *p, const struct tensor_spec *spec)
{
    if (spec->as_is && spec->rows[0].stride) { /* the matrices of all heads, as one */
        struct tensor_spec one = *spec;
        one.n_expert = 1;
        const struct weight_rows whole = {.name = spec->rows[0].name,
                                          .n = spec->n_expert * spec->rows[0].stride};
        return add_rows(p, &one, &whole);
    }
    if (spec->as && spec->rows[0].stride)
        return add_heads(p, spec, spec->as);
    if (spec->as)
        return add_as(p, spec);
    for (int k = 0; k < spec->n_rows; k++) {
        struct weight_rows rows = spec->rows[k];
        if (!strcmp(rows.name->gguf,
                    "position_embd")) { /* a GGUF has only the rows of the context */
            rows.tensor_rows = rows.n;
            rows.first = p->c->pos_offset;
            rows.n = p->c->context;
        }
        struct tensor_spec one = *spec;
        one.n_expert = spec->n_expert - rows.n_more;
        if (!add_rows(p, &one, &rows) || !add_bias(p, &one, &rows))
            return false;
        if (!rows.more)
            continue;
        one.n_expert = rows.n_more;
        rows.name = rows.more;
        if (rows.more_whole)
            rows.first = rows.step = rows.tensor_rows = 0;
        if (!add_rows(p, &one, &rows))
            return false;
    }
    return true;
}

/* Each tensor of a table of several. */
static bool add_tables(struct folder_plan *p, const struct tensor_spec *spec)
{
    bool ok = true;
    for (int i = 0; ok && i < spec->n_rows; i++) {
        struct tensor_spec one = *spec;
        one.n_rows = 1;
        one.rows[0] = spec->rows[i];
        one.n_in = spec->rows[i].n * spec->width;
        ok = add_vector(p, &one);
    }
    return ok;
}

bool folder_add_spec(struct folder_plan *p, const struct tensor_spec *spec)
{
    if (!spec->w && spec->n_rows > 1)
        return add_tables(p, spec);
    return spec->copy || spec->values || (spec->w ? add_weight(p, spec) : add_vector(p, spec));
}

float *folder_values(struct folder_plan *p, const struct tensor *t, int64_t n)
{
    if (!check_type(p, t))
        return NULL;
    if (t->bytes != dtype_bytes(t->type, (size_t)n)) {
        error_set(p->err, "%s: tensor %s: %zu bytes, expected %" PRId64 " values", p->f->path,
                  t->name, t->bytes, n);
        return NULL;
    }
    float *v = mem_zalloc((size_t)n, sizeof *v);
    quant_dequantize(t->type, t->data, v, (size_t)n);
    return v;
}

static void add_values(struct folder_plan *p, const char *name, int64_t n, float *values)
{
    transcode_add(p->t, name, 1, &n)->values = values;
}

/* Scaled RoPE frequencies as GGUF stores them: factors that divide the unscaled ones. */
static void add_rope_factors(struct folder_plan *p)
{
    int64_t half = p->c->n_rot / 2, n = p->c->family->rot_twice ? 2 * half : half;
    if (p->c->rope.kind == ROPE_LONG) {
        float *brief = mem_zalloc((size_t)half, sizeof *brief);
        float *lasting = mem_zalloc((size_t)half, sizeof *lasting);
        memcpy(brief, p->c->rope_short, (size_t)half * sizeof *brief);
        memcpy(lasting, p->c->rope_long, (size_t)half * sizeof *lasting);
        add_values(p, "rope_factors_short.weight", half, brief);
        add_values(p, "rope_factors_long.weight", half, lasting);
        return;
    }
    struct config plain = *p->c;
    plain.rope.kind = ROPE_PLAIN;
    float *a = mem_zalloc((size_t)n, sizeof *a), *b = mem_zalloc((size_t)half, sizeof *b), scale;
    rope_frequencies(&plain.rope, plain.n_rot, NULL, a, &scale);
    rope_frequencies(&p->c->rope, p->c->n_rot, NULL, b, &scale);
    /* 1e30 marks dims that do not rotate */
    for (int64_t i = 0; i < half; i++)
        a[i] = b[i] == 0 ? 1e30f : (float)((double)a[i] / (double)b[i]);
    for (int64_t i = half; i < n; i++)
        a[i] = 1;
    mem_free(b);
    add_values(p, "rope_freqs.weight", n, a);
}

/* A tensor that has no GGUF name and that the text model does not use: other towers, unused draft
 * blocks, tensors that can be computed. */
static bool is_spare(const struct folder_plan *p, const char *name)
{
    const struct config *c = p->c;
    if (!config_is_text(c, name) || strstr(name, "rotary_emb.inv_freq") || layout_is_spare(name))
        return true;
    if (c->tied && !strncmp(name, c->hf_head, strlen(c->hf_head)))
        return true;            /* some folders store the tied head too */
    if (config_is_mtp(c, name)) /* draft blocks after the first; copies of embedding and head */
        return true;
    return c->family->spare && c->family->spare(c, name);
}

static bool plan_tensors(struct folder_plan *p)
{
    const struct config *c = p->c;
    struct outline o = {0};
    if (!outline_load(p->f, c, &o, p->err))
        return false;
    bool ok = true;
    if (c->rope.kind == ROPE_LLAMA3 || c->rope.kind == ROPE_LONG ||
        c->rope.kind == ROPE_PROPORTIONAL)
        add_rope_factors(p);
    for (int i = 0; ok && i < o.n_specs; i++) {
        ok = folder_add_spec(p, &o.specs[i]);
    }
    outline_free(&o);
    if (ok && encoder_pools(p->f, c))
        ok = encoder_head(p->t, p->f, c, &p->pooling, p->err);
    for (size_t i = 0; ok && i < p->f->n_tensors; i++)
        if (!p->used[i] && !is_spare(p, p->f->tensors[i].name) &&
            !tower_owns(p->f, p->f->tensors[i].name))
            ok = error_set(p->err, "%s: tensor %s: no place for it in a %s GGUF", p->f->path,
                           p->f->tensors[i].name, c->family->name);
    return ok;
}

/* NVFP4 kept as it is has one factor per matrix in a tensor of its own: NAME.scale. If the router
 * has per-expert factors under the same name, the factors are multiplied into those. */
static bool add_scales(struct folder_plan *p)
{
    for (size_t i = 0, n = p->t->n; i < n; i++) {
        const struct out_tensor *o = &p->t->tensors[i];
        if (o->type != DT_NVFP4)
            continue;
        struct out_tensor *to = NULL;
        char name[sizeof o->name];
        snprintf(name, sizeof name, "%.*s.scale", (int)(strlen(o->name) - strlen(".weight")),
                 o->name);
        for (size_t k = 0; k < n && !to; k++)
            to = strcmp(p->t->tensors[k].name, name) ? NULL : &p->t->tensors[k];
        int64_t mats = o->n_mats;
        if (!to) {
            to = transcode_add(p->t, name, 1, &mats);
            to->values = mem_zalloc((size_t)mats, sizeof *to->values);
            for (int e = 0; e < mats; e++)
                to->values[e] = 1;
            o = &p->t->tensors[i];
        }
        for (int e = 0; e < o->n_mats; e++) {
            float scale;
            bool permuted;
            const struct layout_rows none = {.step = 1, .index = e};
            const struct layout_planes planes = {.scale = &scale};
            const struct input_matrix *s = &o->mats[transcode_sources(o) > 1 ? e : 0];
            if (!layout_read(&s->layout, p->f->path, &none, &planes, &permuted, p->err))
                return false;
            to->values[e] *= scale;
        }
    }
    return true;
}

/* Metadata. */

static void set_u32(struct gguf_writer *w, const char *arch, const char *key, int v)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    gguf_set_u32(w, full, (uint32_t)v);
}

static void set_f32(struct gguf_writer *w, const char *arch, const char *key, double v)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    gguf_set_f32(w, full, (float)v);
}

/* One number, or one per layer if they differ. */
static void set_layers(struct gguf_writer *w, const char *arch, const char *key, int one,
                       const int *each, int n)
{
    char full[96];
    int32_t list[CONFIG_MAX_LAYERS] = {one};
    bool differ = false;
    for (int i = 0; i < n; i++) {
        list[i] = each[i] ? each[i] : one;
        differ |= list[i] != list[0];
    }
    snprintf(full, sizeof full, "%s.%s", arch, key);
    if (differ)
        gguf_set_array(w, full, META_I32, list, (size_t)n);
    else
        gguf_set_u32(w, full, (uint32_t)list[0]);
}

/* KV heads by layer: none where a recurrent state takes the place of attention. */
static void set_hybrid_heads(struct gguf_writer *w, const char *arch, const struct config *c)
{
    char key[96];
    int32_t heads[CONFIG_MAX_LAYERS];
    for (int i = 0; i < c->n_layers; i++)
        heads[i] = c->is_linear[i] || c->is_mlp[i] ? 0 : c->n_kv_heads;
    snprintf(key, sizeof key, "%s.attention.head_count_kv", arch);
    gguf_set_array(w, key, META_I32, heads, (size_t)c->n_layers);
}

/* Hidden units by layer: none where a layer has no mlp. */
static void set_hidden(struct gguf_writer *w, const char *arch, const struct config *c)
{
    char key[96];
    int32_t width[CONFIG_MAX_LAYERS];
    for (int i = 0; i < c->n_layers; i++)
        width[i] = !c->is_mlp[i] ? 0 : c->is_moe[i] ? c->n_ff_exp : c->n_ff;
    snprintf(key, sizeof key, "%s.feed_forward_length", arch);
    gguf_set_array(w, key, META_I32, width, (size_t)c->n_layers);
}

static void set_rope(struct gguf_writer *w, const char *arch, const struct config *c)
{
    const struct rope_config *r = &c->rope;
    set_f32(w, arch, "rope.freq_base", r->theta);
    set_u32(w, arch, "rope.dimension_count", c->family->rot_twice ? 2 * c->n_rot : c->n_rot);
    if (r->kind == ROPE_LONG) {
        set_u32(w, arch, "rope.scaling.original_context_length", r->original_context);
        set_f32(w, arch, "rope.scaling.attn_factor", r->attn_factor > 0 ? r->attn_factor : 1);
    }
    if (r->kind != ROPE_LINEAR && r->kind != ROPE_YARN)
        return;
    char key[96];
    snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
    const char *kind = r->kind == ROPE_LINEAR ? "linear" : "yarn";
    gguf_set_string(w, key, kind, strlen(kind));
    set_f32(w, arch, "rope.scaling.factor", r->factor);
    if (r->kind == ROPE_LINEAR)
        return;
    set_u32(w, arch, "rope.scaling.original_context_length", r->original_context);
    set_f32(w, arch, "rope.scaling.yarn_beta_fast", r->beta_fast);
    set_f32(w, arch, "rope.scaling.yarn_beta_slow", r->beta_slow);
    /* Readers multiply it by 0.1 ln(factor) + 1, the default. With log_mul (deepseek2) they compute
     * the value themselves. */
    if (r->attn_factor > 0 && !(r->log_mul > 0))
        set_f32(w, arch, "rope.scaling.attn_factor",
                r->attn_factor / (0.1 * log(r->factor > 1 ? r->factor : 1) + 1));
}

/* The author's sampling defaults, under the keys that GGUF readers use. */
static void set_sampling(struct gguf_writer *w, const json_t *generation)
{
    static const char *const keys[][2] = {
        {"temperature", "general.sampling.temp"},
        {"top_p", "general.sampling.top_p"},
        {"min_p", "general.sampling.min_p"},
        {"repetition_penalty", "general.sampling.penalty_repeat"}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *v = json_object_get(generation, keys[i][0]);
        if (json_is_number(v))
            gguf_set_f32(w, keys[i][1], (float)json_number_value(v));
    }
    const json_t *k = json_object_get(generation, "top_k");
    if (json_is_integer(k) && json_integer_value(k) >= 0 && json_integer_value(k) <= INT32_MAX)
        gguf_set_u32(w, "general.sampling.top_k", (uint32_t)json_integer_value(k));
}

static void set_experts(struct gguf_writer *w, const char *arch, const struct config *c)
{
    char key[96];
    set_u32(w, arch, "expert_count", c->n_expert);
    set_layers(w, arch, "expert_used_count", c->n_expert_used, c->layer_experts_used, c->n_layers);
    set_u32(w, arch, "expert_feed_forward_length", c->n_ff_exp);
    snprintf(key, sizeof key, "%s.expert_weights_norm", arch);
    gguf_set_bool(w, key, c->norm_topk);
    if (c->router != ROUTER_SOFTMAX)
        set_u32(w, arch, "expert_gating_func",
                c->router == ROUTER_SIGMOID    ? 2
                : c->router == ROUTER_SOFTPLUS ? 4
                                               : 3);
    if (c->expert_scale != 1)
        set_f32(w, arch, "expert_weights_scale", (double)c->expert_scale);
    if (c->n_ff_shared)
        set_u32(w, arch, "expert_shared_count", c->n_ff_shared / c->n_ff_exp);
    if (c->n_groups > 1) {
        set_u32(w, arch, "expert_group_count", c->n_groups);
        set_u32(w, arch, "expert_group_used_count", c->n_groups_used);
    }
}

static bool set_metadata(struct gguf_writer *w, const struct folder_plan *p, const struct mix *mix)
{
    const struct config *c = p->c;
    const char *arch = c->family->gguf_as ? c->family->gguf_as : c->family->name;
    int window = c->window[0];
    for (int i = 1; i < c->n_layers; i++) {
        if (c->window[i] != window && !c->family->own_windows)
            return error_set(p->err,
                             "%s: config.json: sliding_window in some layers only has no place in "
                             "GGUF",
                             p->f->path);
        window = c->window[i] > window ? c->window[i] : window;
    }
    char *dir = convert_dir(p->f);
    char *slash = strrchr(dir, '/');
    const char *name = slash && slash[1] ? slash + 1 : dir;
    gguf_set_string(w, "general.architecture", arch, strlen(arch));
    gguf_set_string(w, "general.type", "model", 5);
    gguf_set_string(w, "general.name", name, strlen(name));
    mem_free(dir);
    set_sampling(w, p->f->generation_config);
    gguf_set_u32(w, "general.file_type", (uint32_t)convert_file_type(p->t, mix));
    gguf_set_u32(w, "general.quantization_version", 2);
    int n_layers = c->n_layers + c->n_mtp;
    set_u32(w, arch, "block_count", n_layers);
    if (c->n_mtp)
        set_u32(w, arch, "nextn_predict_layers", c->n_mtp);
    set_u32(w, arch, "context_length", c->context);
    set_u32(w, arch, "embedding_length", c->n_embd);
    if (c->family->one_block)
        set_hidden(w, arch, c);
    else
        set_layers(w, arch, "feed_forward_length", c->n_ff ? c->n_ff : c->n_ff_exp, c->layer_ff,
                   n_layers);
    set_layers(w, arch, "attention.head_count", c->n_heads, c->layer_heads, n_layers);
    /* a latent is one key and value for all heads; the rotated part is in the key only */
    bool latent = c->kv_rank > 0;
    if (c->family->zero_heads)
        set_hybrid_heads(w, arch, c);
    else
        set_layers(w, arch, "attention.head_count_kv", latent ? 1 : c->n_kv_heads,
                   c->layer_kv_heads, n_layers);
    set_u32(w, arch, "attention.key_length", latent ? c->kv_rank + c->rope_dim : c->head_dim);
    set_u32(w, arch, "attention.value_length",
            latent     ? c->kv_rank
            : c->v_dim ? c->v_dim
                       : c->head_dim);
    if (c->family->layer_norm && !c->family->rms_eps)
        set_f32(w, arch, "attention.layer_norm_epsilon", (double)c->norm_eps);
    else if (!c->family->encoder)
        set_f32(w, arch, "attention.layer_norm_rms_epsilon", (double)c->norm_eps);
    set_u32(w, arch, "vocab_size", c->n_vocab);
    if (window && !c->family->encoder)
        set_u32(w, arch, "attention.sliding_window", window);
    if (c->n_rot || !c->family->encoder)
        set_rope(w, arch, c);
    if (c->n_expert)
        set_experts(w, arch, c);
    if (c->family->write)
        c->family->write(c, w);
    return !encoder_pools(p->f, c) || encoder_metadata(w, arch, p->f, c, &p->pooling, p->err);
}

char *convert_dir(const struct tensorfile *f)
{
    /* every shard is in the folder */
    const char *path = f->shards[0].path, *slash = strrchr(path, '/');
    char *dir = slash ? mem_strndup(path, (size_t)(slash - path)) : mem_strdup(".");
    char *full = realpath(dir, NULL);
    if (full) {
        mem_free(dir);
        dir = mem_strdup(full);
        free(full);
    }
    return dir;
}

/* The folder's own type, taken from the embedding. Packed folders get F16 in place of BF16: weights
 * that GGUF cannot hold packed are finer than BF16. */
static const struct mix *source_mix(const struct tensorfile *f, const struct config *c)
{
    char name[96];
    snprintf(name, sizeof name, "%s%s.weight", c->hf_model,
             c->family->hf_embed ? c->family->hf_embed : "embed_tokens");
    return folder_mix(f, tensorfile_find(f, name));
}

const struct mix *folder_mix(const struct tensorfile *f, const struct tensor *t)
{
    enum dtype type = t ? t->type : DT_BF16;
    if (json_object_get(f->config, "quantization_config") && type == DT_BF16)
        type = DT_F16;
    return mix_find(type == DT_F32 ? "F32" : type == DT_F16 ? "F16" : "BF16");
}

/* No GGUF key says whether YaRN's bounds are rounded; readers follow the architecture's default.
 * Notes a difference. */
static void tell_yarn(const struct folder_plan *p, const struct convert_options *opt)
{
    bool whole = p->c->family != &family_gpt_oss; /* the readers' default */
    if (p->c->rope.kind == ROPE_YARN && p->c->rope.no_truncate == whole && opt->note)
        opt->note(opt->arg,
                  whole ? "config.json: truncate: GGUF has no key for it: the bounds of YaRN "
                          "will be rounded"
                        : "config.json: truncate: GGUF has no key for it: the bounds of YaRN "
                          "will not be rounded");
}

static bool write_folder(struct folder_plan *p, struct merge *merge, const char *out,
                         const struct convert_options *opt, struct convert_result *result)
{
    struct mix_model model;
    convert_mix_model(p->c, p->t->importance != NULL, &model);
    if (!plan_tensors(p) || !merge_open(merge, p->t, p->f, p->c, opt, p->err) ||
        !convert_choose(p->t, opt, &model, p->err) || !add_scales(p))
        return false;
    tell_yarn(p, opt);
    convert_count(p->t, result);
    if (opt->planned)
        opt->planned(opt->arg, p->t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, p->err);
    if (!w)
        return false;
    bool ok = set_metadata(w, p, opt->mix) && vocab_write(w, p->f, p->c, opt, p->err);
    if (ok) {
        ok = transcode_run(p->t, w, p->err);
        if (!ok && !gguf_writer_failed(w, NULL) && strncmp(p->err->msg, "tensor", 6) == 0)
            error_prefix(p->err, "%s", p->f->path);
    }
    ok = ok && gguf_writer_finish(w, p->err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool convert_folder(const char *in, const char *out, const struct convert_options *options,
                    struct convert_result *result, struct error *err)
{
    struct tensorfile *f = tensorfile_open(in, err);
    if (!f)
        return false;
    struct convert_options opt = *options;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct imatrix *im = NULL;
    bool ok = !f->is_gguf;
    if (!ok)
        error_set(err, "%s: a GGUF already: `steel quantize` changes its type", in);
    ok = ok && config_load(f, c, err);
    if (ok && opt.imatrix) {
        im = imatrix_open(opt.imatrix, err);
        ok = im != NULL;
    }
    if (ok) {
        if (!opt.mix) {
            opt.mix = source_mix(f, c);
            opt.keep = true;
        }
        struct transcode t = {.in = f,
                              .importance = im,
                              .threads = opt.threads,
                              .progress = opt.progress,
                              .progress_arg = opt.arg};
        struct folder_plan p = {
            .f = f, .c = c, .t = &t, .used = mem_zalloc(f->n_tensors, sizeof(bool)), .err = err};
        struct merge merge = {0};
        ok = write_folder(&p, &merge, out, &opt, result);
        merge_close(&merge);
        mem_free(p.used);
        pooling_clear(&p.pooling);
        transcode_clear(&t);
    }
    imatrix_close(im);
    mem_free(c);
    tensorfile_close(f);
    return ok;
}
