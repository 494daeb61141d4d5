/*
 * Loading. The family builds its network and the backend checks that it can run it. Then every listed
 * tensor is found, its shape checked, the layout quirks of its file undone (interleaved rotary pairs
 * in GGUF, GPTQ packing, one tensor per expert), and the result uploaded to the backend. Nothing
 * checks shapes after this.
 */
#include "base/mem.h"
#include "backend/backend.h"
#include "file/direct.h"
#include "model/eagle.h"
#include "model/families/family.h"
#include "model/fp8_check.h"
#include "model/model.h"
#include "model/cut.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct weight_loader {
    const struct tensorfile *f;
    const struct config *c; /* of f */
    struct model *m;
    const struct progress *progress;
    const int *n_host;  /* of model_shard */
    size_t done, total; /* bytes */
    struct error *err;
    /* The weight under construction: heap blocks that its raw segments point into. */
    void **blocks; /* (n_blocks) */
    int n_blocks, cap_blocks;
    const struct tensor **used; /* (n_used) tensors read by it */
    size_t n_used, cap_used;
};

static const struct tensor *lookup(struct weight_loader *l, const struct tensor_name *n, int layer,
                                   int expert, const char *suffix)
{
    return build_find(l->f, l->c, n, layer, expert, suffix);
}

static const struct tensor *need(struct weight_loader *l, const struct tensor_name *n, int layer,
                                 int expert, const char *suffix)
{
    const struct tensor *t = lookup(l, n, layer, expert, suffix);
    if (!t) {
        char name[192];
        build_name(l->f, l->c, n, layer, expert, suffix, name, sizeof name);
        error_set(l->err, "%s: tensor %s: missing", l->f->path, name);
    }
    return t;
}

static bool check_shape(struct weight_loader *l, const struct tensor *t, int64_t d0, int64_t d1,
                        int64_t d2)
{
    if (t->dims[0] == d0 && t->dims[1] == d1 && t->dims[2] == d2 && t->dims[3] == 1)
        return true;
    return error_set(l->err,
                     "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                     "], expected [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                     l->f->path, t->name, t->dims[0], t->dims[1], t->dims[2], d0, d1, d2);
}

static bool check_values(struct weight_loader *l, const struct tensor *t, int64_t n)
{
    int64_t has = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]; /* at most the file's bytes */
    return has == n || error_set(l->err, "%s: tensor %s: %" PRId64 " values, expected %" PRId64,
                                 l->f->path, t->name, has, n);
}

static bool check_type(struct weight_loader *l, const struct tensor *t)
{
    return dtype_is_weight(t->type) || error_set(l->err, "%s: tensor %s: type %s is not supported",
                                                 l->f->path, t->name, t->type_name);
}

/* Heap memory that lives until the weight is uploaded. */
static void *block(struct weight_loader *l, size_t count, size_t size)
{
    if (l->n_blocks == l->cap_blocks) {
        l->cap_blocks = l->cap_blocks ? 2 * l->cap_blocks : 64;
        l->blocks = mem_realloc(l->blocks, (size_t)l->cap_blocks, sizeof *l->blocks);
    }
    return l->blocks[l->n_blocks++] = mem_zalloc(count, size);
}

static void *block_for(void *arg, size_t count, size_t size)
{
    return block(arg, count, size);
}

static void mark_used(struct weight_loader *l, const struct tensor *t)
{
    if (l->n_used == l->cap_used) {
        l->cap_used = l->cap_used ? l->cap_used * 2 : 64;
        l->used = mem_realloc(l->used, l->cap_used, sizeof *l->used);
    }
    l->used[l->n_used++] = t;
}

static bool check_floats(struct weight_loader *l, const struct tensor *t)
{
    return t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16 ||
           error_set(l->err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected",
                     l->f->path, t->name, t->type_name);
}

/* out = n integers of 0 to below - 1. */
static bool read_numbers(struct weight_loader *l, const struct tensor *t, int n, int below,
                         float *out)
{
    if (t->type != DT_I32 && t->type != DT_I64)
        return error_set(l->err, "%s: tensor %s: type %s where I32 or I64 is expected", l->f->path,
                         t->name, t->type_name);
    for (int i = 0; i < n; i++) {
        int32_t narrow;
        int64_t v;
        if (t->type == DT_I32) {
            memcpy(&narrow, (const char *)t->data + (size_t)i * sizeof narrow, sizeof narrow);
            v = narrow;
        } else {
            memcpy(&v, (const char *)t->data + (size_t)i * sizeof v, sizeof v);
        }
        if (v < 0 || v >= below)
            return error_set(l->err, "%s: tensor %s: %" PRId64 " is not from 0 to %d", l->f->path,
                             t->name, v, below - 1);
        out[i] = (float)v;
    }
    return true;
}

/* Reads a vector as floats: norms, biases, RoPE factors. width: row length if it is a table, whose
 * folder tensor may have an extra dimension of 1. */
static bool read_vector(struct weight_loader *l, const struct tensor *t, int n, int width, int wrap,
                        int below, float *out)
{
    bool apart = width && t->dims[1] == 1;
    int64_t rows = width ? n / width : 1;
    if (wrap && t->dims[0] == wrap && t->dims[0] * t->dims[1] == n)
        width = wrap, rows = n / wrap, apart = false;
    if (!check_shape(l, t, width ? width : n, apart ? 1 : rows, apart ? rows : 1))
        return false;
    if (below)
        return read_numbers(l, t, n, below, out);
    if (!check_floats(l, t))
        return false;
    quant_dequantize(t->type, t->data, out, (size_t)n);
    return true;
}

/* Gains of q and k follow the rows of heads. */
static void reorder_vector(const struct tensor_spec *spec, bool is_gguf, float *values)
{
    const struct weight_rows *rows = &spec->rows[0];
    float *copy = mem_zalloc((size_t)spec->n_in, sizeof *copy);
    memcpy(copy, values, (size_t)spec->n_in * sizeof *copy);
    for (int i = 0; i < spec->n_in; i++)
        values[i] = copy[rows_to_tensor(rows, rows_order(rows, is_gguf), i)];
    mem_free(copy);
}

static bool load_vector(struct weight_loader *l, const struct tensor_spec *spec)
{
    if (spec->adjust.fill != 0 && !l->f->is_gguf) {
        float *host = mem_zalloc((size_t)spec->n_in, sizeof *host);
        for (int i = 0; i < spec->n_in; i++)
            host[i] = spec->adjust.fill;
        l->m->be->ops->copy_in(l->m->be, spec->vector, host, (size_t)spec->n_in * sizeof *host);
        mem_free(host);
        return true;
    }
    size_t n = (size_t)spec->n_in;
    if (spec->values) {
        l->m->be->ops->copy_in(l->m->be, spec->vector, spec->values, n * sizeof(float));
        return true;
    }
    float *host = mem_zalloc(n, sizeof(float)), *to = host;
    bool ok = true;
    for (int i = 0; ok && i < spec->n_rows; i++) {
        int part =
            spec->n_rows > 1 ? spec->rows[i].n * spec->width : spec->n_in - spec->adjust.n_tail;
        const struct tensor *t =
            need(l, spec->rows[i].name, spec->layer, 0, spec->is_bias ? "bias" : "weight");
        ok = t && read_vector(l, t, part, spec->width, l->f->is_gguf ? spec->adjust.wrap : 0,
                              spec->adjust.below, to);
        to += part;
        l->done += t ? t->bytes : 0;
    }
    float add = l->f->is_gguf ? 0 : spec->adjust.add;
    float times = spec->adjust.times == 0 ? 1 : spec->adjust.times;
    for (size_t i = 0; i < n; i++)
        host[i] = (host[i] + add) * times;
    for (size_t i = n - (size_t)spec->adjust.n_tail; i < n; i++)
        host[i] = spec->adjust.tail;
    for (size_t i = 0; spec->adjust.decay && i < n; i++)
        host[i] = l->f->is_gguf ? -host[i] : expf(host[i]);
    if (ok && rows_order(&spec->rows[0], l->f->is_gguf))
        reorder_vector(spec, l->f->is_gguf, host);
    if (ok)
        l->m->be->ops->copy_in(l->m->be, spec->vector, host,
                               (size_t)cut_vector(host, spec->n_in, spec->cut) * sizeof(float));
    mem_free(host);
    return ok;
}

/* Packed matrices of folders, see layout.h. */

struct tensor_place {
    struct weight_loader *l;
    const struct tensor_name *name;
    int layer, expert;
};

static const struct tensor *find_part(void *arg, const char *suffix)
{
    const struct tensor_place *p = arg;
    return lookup(p->l, p->name, p->layer, p->expert, suffix);
}

/* The layout of expert e's matrix, or of all experts if they are stacked. */
static bool find_layout(struct weight_loader *l, const struct weight_rows *rows, int layer, int e,
                        int n_in, int n_stack, struct packed_layout *out)
{
    struct tensor_place place = {l, rows->name, layer, e};
    struct layout_ask ask = {.path = l->f->path,
                             .find = find_part,
                             .arg = &place,
                             .config = &l->c->layout,
                             .n_in = n_in,
                             .n_out = rows->tensor_rows ? rows->tensor_rows : rows->n,
                             .n_stack = n_stack,
                             .transposed = rows->transposed};
    if (!layout_find(&ask, out, l->err))
        return false;
    const struct tensor *all[] = {out->data, out->scale, out->zero, out->order, out->global};
    for (int i = 0; i < 5; i++)
        if (all[i])
            mark_used(l, all[i]);
    return true;
}

/* The planes of n_expert matrices, and tables of pointers to each expert's plane. */
struct planes {
    struct layout_bytes each;
    uint8_t *data, *scale, *zero, *order;
    const uint8_t **data_of, **zero_of;
    const void **scale_of;
    const int32_t **order_of;
};

static void planes_make(struct weight_loader *l, const struct packed_layout *lay, int n,
                        int n_expert, bool direct, struct planes *p)
{
    size_t experts = (size_t)n_expert;
    *p = (struct planes){.each = layout_bytes(lay, n)};
    p->data = direct ? NULL : block(l, experts, p->each.data);
    p->scale = p->each.scale ? block(l, experts, p->each.scale) : NULL;
    p->zero = p->each.zero ? block(l, experts, p->each.zero) : NULL;
    p->order = p->each.order ? block(l, experts, p->each.order) : NULL;
    p->data_of = block(l, experts, sizeof *p->data_of);
    p->scale_of = block(l, experts, sizeof *p->scale_of);
    p->zero_of = block(l, experts, sizeof *p->zero_of);
    p->order_of = block(l, experts, sizeof *p->order_of);
}

/* Adds a segment from a packed layout. Leaves s->data NULL if the matrix is plain. */
static bool add_packed(struct weight_loader *l, struct raw_weight *w,
                       const struct weight_rows *rows, int layer, struct raw_seg *s)
{
    int n_in = w->n_in, n_expert = w->n_expert;
    int n_stack = build_stacked(l->f, rows->name) && n_expert > 1 ? n_expert : 0;
    struct packed_layout first, lay;
    if (!find_layout(l, rows, layer, 0, n_in, n_stack, &first))
        return false;
    if (first.kind == LAYOUT_PLAIN)
        return true;
    struct layout_rows r = {.first = rows->first,
                            .step = rows->step ? rows->step : 1,
                            .n = rows->n,
                            .run_length = rows->run_length};
    struct planes p;
    bool any = false, permuted;
    planes_make(l, &first, rows->n, n_expert, layout_direct(&first, &r) != NULL, &p);
    lay = first;
    for (int e = 0; e < n_expert; e++) {
        if (e > 0 && !n_stack && !find_layout(l, rows, layer, e, n_in, 0, &lay))
            return false;
        if (lay.kind != first.kind || lay.group_len != first.group_len)
            return error_set(l->err, "%s: tensor %s: packed unlike expert 0's", l->f->path,
                             lay.data ? lay.data->name : first.data->name);
        size_t at = (size_t)e;
        r.index = n_stack ? e : 0;
        struct layout_planes to = {p.data ? p.data + at * p.each.data : NULL,
                                   p.scale ? p.scale + at * p.each.scale : NULL,
                                   p.zero ? p.zero + at * p.each.zero : NULL,
                                   (int32_t *)(p.order ? p.order + at * p.each.order : NULL)};
        if (!layout_read(&lay, l->f->path, &r, &to, &permuted, l->err))
            return false;
        any |= permuted;
        p.data_of[e] = to.data ? to.data : layout_direct(&lay, &r);
        p.scale_of[e] = to.scale;
        p.zero_of[e] = to.zero;
        p.order_of[e] = to.order;
    }
    *s = (struct raw_seg){first.type,
                          rows->n,
                          p.data_of,
                          p.scale ? p.scale_of : NULL,
                          p.zero ? p.zero_of : NULL,
                          any ? p.order_of : NULL,
                          first.group_len};
    w->transient = true;
    return true;
}

/* NVFP4 weights of a GGUF may have one more factor per matrix: NAME.scale. */
static bool tensor_scales(struct weight_loader *l, const struct tensor_name *n, int layer,
                          int n_expert, struct raw_seg *s)
{
    const struct tensor *t = build_scale(l->f, l->c, n, layer);
    if (!t)
        return true;
    if (!check_shape(l, t, n_expert, 1, 1) || !check_floats(l, t))
        return false;
    float *scales = block(l, (size_t)n_expert, sizeof *scales);
    const void **table = block(l, (size_t)n_expert, sizeof *table);
    quant_dequantize(t->type, t->data, scales, (size_t)n_expert);
    for (int e = 0; e < n_expert; e++) {
        if (!isfinite(scales[e]))
            return error_set(l->err, "%s: tensor %s: entry %d: %g is not a valid scale", l->f->path,
                             t->name, e, (double)scales[e]);
        table[e] = &scales[e];
    }
    s->scale = table;
    return true;
}

/* One plane of a segment in the weight's order of rows. */
static const uint8_t *reorder_plane(struct weight_loader *l, const struct weight_rows *rows,
                                    const void *plane, size_t row)
{
    enum rotary_rows order = rows_order(rows, l->f->is_gguf);
    uint8_t *copy = block(l, (size_t)rows->n, row);
    for (int r = 0; r < rows->n; r++)
        memcpy(copy + (size_t)r * row,
               (const uint8_t *)plane + (size_t)rows_to_tensor(rows, order, r) * row, row);
    return copy;
}

/* Brings rotary pairs into the model's order. */
static void unpermute(struct weight_loader *l, struct raw_seg *s, const struct weight_rows *rows,
                      int n_in)
{
    CHECK(s->data, "a segment without data");
    const uint8_t **data = block(l, 1, sizeof *data);
    data[0] = reorder_plane(l, rows, s->data[0], raw_seg_row_bytes(s, n_in));
    s->data = data;
    size_t n_groups = s->group_len ? (size_t)(n_in / s->group_len) : 0;
    size_t scales = s->type == DT_F8_E4M3 ? ((size_t)n_in + 127) / 128 * sizeof(float)
                    : s->type == DT_GPTQ4 ? n_groups * sizeof(uint16_t)
                                          : 0; /* NVFP4: one for all rows */
    if (s->scale && scales) {
        const void **table = block(l, 1, sizeof *table);
        table[0] = reorder_plane(l, rows, s->scale[0], scales);
        s->scale = table;
    }
    if (s->zero) {
        const uint8_t **table = block(l, 1, sizeof *table);
        table[0] = reorder_plane(l, rows, s->zero[0], n_groups);
        s->zero = table;
    }
}

/* Copies the weight's rows out of a tensor that has more rows or is transposed. */
static void take_rows(struct weight_loader *l, struct raw_seg *s, const struct tensor *t,
                      const struct weight_rows *rows, int n_in, int n_expert)
{
    size_t row = raw_seg_row_bytes(s, n_in), each = dtype_bytes(t->type, 1), n = (size_t)rows->n;
    size_t of = (size_t)rows->tensor_rows, step = rows->step ? (size_t)rows->step : 1;
    size_t run = rows->run_length ? (size_t)rows->run_length : 1;
    uint8_t *copy = block(l, (size_t)n_expert * n, row);
    const uint8_t **table = block(l, (size_t)n_expert, sizeof *table);
    for (size_t e = 0; e < (size_t)n_expert; e++) {
        uint8_t *to = copy + e * n * row;
        const uint8_t *from = t->data + e * of * row;
        table[e] = to;
        for (size_t r = 0; r < n; r++, to += row) {
            size_t at = (size_t)rows->first + step * (r / run) + r % run;
            if (!rows->transposed)
                memcpy(to, from + at * row, row);
            for (size_t c = 0; rows->transposed && c < (size_t)n_in; c++)
                memcpy(to + c * each, from + (c * of + at) * each, each);
        }
    }
    s->data = table;
}

static bool aligned(const uint8_t *p)
{
    return (uintptr_t)p % 4 == 0;
}

/* Names the tensor and entry of an FP8 NaN. */
static bool refuse_nan(struct weight_loader *l)
{
    for (size_t i = 0; i < l->n_used; i++) {
        const struct tensor *t = l->used[i];
        size_t at = t->type == DT_F8_E4M3 ? fp8_check_find(t->data, t->bytes) : t->bytes;
        if (at < t->bytes)
            return error_set(l->err, "%s: tensor %s: entry %zu: FP8 code 0x%02x is not a number",
                             l->f->path, t->name, at, t->data[at]);
    }
    return error_set(l->err, "%s: an FP8 code is not a number", l->f->path);
}

/* Q1_0 and Q2_0 become Q4_0, which holds their values exactly and has kernels everywhere. */
static void expand_bits(struct weight_loader *l, struct raw_seg *s, int n_in, int n_expert)
{
    size_t blocks = (size_t)s->rows * (size_t)n_in / QK_32, most = QK1_0 / QK_32;
    struct block_q4_0 *to = block(l, (size_t)n_expert * blocks, sizeof *to);
    const uint8_t **table = block(l, (size_t)n_expert, sizeof *table);
    bool one = s->type == DT_Q1_0;
    size_t each = one ? most : QK2_0 / QK_32;
    for (int e = 0; e < n_expert; e++) {
        const uint8_t *from = s->data[e];
        table[e] = (const uint8_t *)to;
        for (size_t i = 0; i < blocks; i++, to++) {
            const uint8_t *b = from + i / each * sizeof(struct block_q1_0), *bits = b + 2;
            memcpy(&to->d, b, 2);
            for (size_t k = 0; k < 16; k++)
                for (size_t half = 0; half < 2; half++) {
                    size_t at = i % each * QK_32 + 16 * half + k;
                    int code =
                        one ? 2 * (bits[at / 8] >> at % 8 & 1) : bits[at / 4] >> at % 4 * 2 & 3;
                    to->qs[k] |= (uint8_t)((code + 7) << 4 * half);
                }
        }
    }
    s->type = DT_Q4_0;
    s->data = table;
}

static bool add_segment(struct weight_loader *l, struct raw_weight *w,
                        const struct weight_rows *rows, int layer);

/* Splits one tensor into a matrix per head (rows.stride), transposing if needed. Quantised blocks
 * do not survive a transposition, so other types than F32 and BF16 become F16. */
static bool add_heads(struct weight_loader *l, struct raw_weight *w, const struct weight_rows *rows,
                      int layer, struct raw_seg *s)
{
    int n_in = w->n_in, n = rows->n, heads = w->n_expert, wide = rows->transposed ? n : n_in;
    int n_rows = rows->transposed ? n_in : n;
    struct raw_weight whole = {.n_in = wide, .n_expert = 1};
    struct weight_rows all = {.name = rows->name, .n = heads * rows->stride};
    if (!add_segment(l, &whole, &all, layer))
        return false;
    enum dtype type = whole.seg[0].type;
    size_t bytes = (size_t)all.n * (size_t)wide;
    if (type == DT_F8_E4M3 && fp8_check_find(whole.seg[0].data[0], bytes) < bytes)
        return refuse_nan(l);
    type = type == DT_F32 || type == DT_BF16 ? type : DT_F16;
    size_t each = dtype_bytes(type, 1), values = (size_t)n * (size_t)n_in;
    uint8_t *copy = block(l, (size_t)heads, values * each);
    const uint8_t **table = block(l, (size_t)heads, sizeof *table);
    float *row = block(l, (size_t)wide, sizeof *row), *one = block(l, values, sizeof *one);
    for (int h = 0; h < heads; h++) {
        uint8_t *to = copy + (size_t)h * values * each;
        table[h] = to;
        for (int r = 0; r < n_rows; r++) {
            raw_weight_row(&whole, 0, h * rows->stride + rows->offset + r, row);
            for (int c = 0; c < wide; c++)
                one[rows->transposed ? (size_t)c * (size_t)n_in + (size_t)r
                                     : (size_t)r * (size_t)n_in + (size_t)c] = row[c];
        }
        for (size_t i = 0; i < values; i++) {
            uint16_t half = type == DT_F16 ? f32_to_f16(one[i]) : f32_to_bf16(one[i]);
            memcpy(to + i * each, type == DT_F32 ? (const void *)&one[i] : &half, each);
        }
    }
    *s = (struct raw_seg){.type = type, .rows = n, .data = table};
    w->transient = true;
    return true;
}

/* The patches' weights of a GGUF: one tensor a frame, NAME.weight and NAME.weight.1. An output's values become channel,
 * frame, row, column, as in a folder. */
static bool join_frames(struct weight_loader *l, struct raw_weight *w,
                        const struct weight_rows *rows, int layer, struct raw_seg *s)
{
    const struct tensor *t[2] = {need(l, rows->name, layer, 0, "weight"),
                                 need(l, rows->name, layer, 0, "weight.1")};
    enum { CHANNELS = 3 };
    int64_t half = (int64_t)w->n_in / 2 * rows->n;
    if (!t[0] || !t[1] || !check_floats(l, t[0]) || !check_values(l, t[0], half) ||
        !check_values(l, t[1], half))
        return false;
    if (t[1]->type != t[0]->type)
        return error_set(l->err, "%s: tensor %s: type %s differs from the first frame's",
                         l->f->path, t[1]->name, t[1]->type_name);
    size_t plane = dtype_bytes(t[0]->type, (size_t)w->n_in / 2 / CHANNELS);
    uint8_t *copy = block(l, (size_t)rows->n * CHANNELS * 2, plane), *to = copy;
    for (size_t i = 0; i < (size_t)rows->n * CHANNELS; i++)
        for (int f = 0; f < 2; f++, to += plane)
            memcpy(to, t[f]->data + i * plane, plane);
    const uint8_t **table = block(l, 1, sizeof *table);
    table[0] = copy;
    *s = (struct raw_seg){.type = t[0]->type, .rows = rows->n, .data = table};
    w->transient = true;
    mark_used(l, t[0]);
    mark_used(l, t[1]);
    return true;
}

static bool read_segment(struct weight_loader *l, struct raw_weight *w,
                         const struct weight_rows *rows, int layer, struct raw_seg *s);

/* The pointers of experts of two segments, one after the other. */
static const void *join_tables(struct weight_loader *l, const void *a, int n, const void *b, int m)
{
    if (!a)
        return NULL;
    const void **table = block(l, (size_t)(n + m), sizeof *table);
    memcpy(table, a, (size_t)n * sizeof *table);
    memcpy(table + n, b, (size_t)m * sizeof *table);
    return table;
}

/* Experts of two tensors (weight_rows.more). */
static bool join_experts(struct weight_loader *l, struct raw_weight *w,
                         const struct weight_rows *rows, int layer, struct raw_seg *s)
{
    int n = w->n_expert - rows->n_more, m = rows->n_more;
    struct raw_weight part[2] = {{.n_in = w->n_in, .n_expert = n},
                                 {.n_in = w->n_in, .n_expert = m}};
    struct weight_rows of[2] = {*rows, *rows};
    struct raw_seg seg[2] = {{0}};
    of[0].more = of[1].more = NULL;
    of[1].name = rows->more;
    if (rows->more_whole)
        of[1].first = of[1].step = of[1].tensor_rows = 0;
    for (int i = 0; i < 2; i++)
        if (!read_segment(l, &part[i], &of[i], layer, &seg[i]))
            return false;
    char name[192];
    build_name(l->f, &l->m->config, rows->more, layer, 0, "weight", name, sizeof name);
    if (seg[0].type != seg[1].type || seg[0].group_len != seg[1].group_len ||
        !seg[0].scale != !seg[1].scale || !seg[0].zero != !seg[1].zero || seg[0].perm ||
        seg[1].perm)
        return error_set(
            l->err, "%s: tensor %s: type %s, or its packing, differs from %s of the other experts",
            l->f->path, name, dtype_name(seg[1].type), dtype_name(seg[0].type));
    *s = seg[0];
    s->data = join_tables(l, seg[0].data, n, seg[1].data, m);
    s->scale = join_tables(l, seg[0].scale, n, seg[1].scale, m);
    s->zero = join_tables(l, seg[0].zero, n, seg[1].zero, m);
    w->transient |= part[0].transient || part[1].transient;
    return true;
}

/* One tensor (or n_expert of them) as a segment, in the file's order of rotary pairs. */
static bool read_segment(struct weight_loader *l, struct raw_weight *w,
                         const struct weight_rows *rows, int layer, struct raw_seg *s)
{
    const struct tensor_name *n = rows->name;
    int n_out = rows->n, n_in = w->n_in, n_expert = w->n_expert;
    if (rows->more)
        return join_experts(l, w, rows, layer, s);
    if (rows->stride)
        return add_heads(l, w, rows, layer, s);
    if (rows->flat && lookup(l, n, layer, 0, "weight.1"))
        return join_frames(l, w, rows, layer, s);
    if (!l->f->is_gguf && (!add_packed(l, w, rows, layer, s) || s->data))
        return s->data != NULL;
    const uint8_t **data = block(l, (size_t)n_expert, sizeof *data);
    bool stacked = build_stacked(l->f, n); /* experts in one tensor */
    /* a folder's tensor may have more rows, in another order */
    bool folder = !l->f->is_gguf, part = (folder || rows->also_gguf) && rows->tensor_rows;
    bool transposed = part && rows->transposed;
    int64_t height = part ? rows->tensor_rows : n_out;
    const struct tensor *t = NULL;
    for (int e = 0; e < n_expert; e++) {
        if (e == 0 || !stacked) {
            t = need(l, n, layer, e, "weight");
            if (!t || !check_type(l, t) || (transposed && !check_floats(l, t)) ||
                !(rows->flat ? check_values(l, t, (int64_t)n_in * height)
                             : check_shape(l, t, transposed ? height : n_in,
                                           transposed ? n_in : height, stacked ? n_expert : 1)))
                return false;
            mark_used(l, t);
            if (e == 0)
                *s = (struct raw_seg){.type = t->type, .rows = n_out, .data = data};
            if (t->type != s->type)
                return error_set(l->err, "%s: tensor %s: type %s differs from expert 0's",
                                 l->f->path, t->name, t->type_name);
            w->transient |= !aligned(t->data);
        }
        data[e] = stacked ? t->data + (size_t)e * (t->bytes / (size_t)n_expert) : t->data;
    }
    CHECK(t, "no expert");
    if (n_in % dtype_table[s->type].block_len)
        return error_set(l->err, "%s: tensor %s: row of %d is not a multiple of %s's %d",
                         l->f->path, t->name, n_in, dtype_name(s->type),
                         dtype_table[s->type].block_len);
    if (s->type == DT_Q1_0 || s->type == DT_Q2_0) {
        expand_bits(l, s, n_in, n_expert);
        w->transient = true;
        return !part || error_set(l->err, "%s: tensor %s: parts of %s tensors are not supported",
                                  l->f->path, t->name, t->type_name);
    }
    if (s->type == DT_NVFP4 && !tensor_scales(l, n, layer, n_expert, s))
        return false;
    w->transient |= s->scale != NULL; /* the scales are in the loader's blocks */
    if (part) {
        take_rows(l, s, t, rows, n_in, n_expert);
        w->transient = true;
    }
    return true;
}

/* A segment of the weight under construction. */
static bool add_segment(struct weight_loader *l, struct raw_weight *w,
                        const struct weight_rows *rows, int layer)
{
    struct raw_seg *s = &w->seg[w->n_seg++];
    w->n_out += rows->n;
    if (!read_segment(l, w, rows, layer, s))
        return false;
    if (rows_order(rows, l->f->is_gguf)) {
        unpermute(l, s, rows, w->n_in);
        w->transient = true;
    }
    return true;
}

/* Reads the bias of `rows` for all experts into bias, experts `stride` apart. Zeros if there is
 * none. */
static bool add_bias(struct weight_loader *l, const struct tensor_spec *spec,
                     const struct weight_rows *rows, int stride, float *bias)
{
    const struct tensor *t = NULL;
    bool stacked = build_stacked(l->f, rows->name),
         part = (!l->f->is_gguf || rows->also_gguf) && rows->tensor_rows;
    int width = part ? rows->tensor_rows : rows->n;
    for (int e = 0; e < spec->n_expert; e++, bias += stride) {
        if (e == 0 || !stacked) {
            t = lookup(l, rows->name, spec->layer, e, "bias");
            if (t &&
                (!check_shape(l, t, width, stacked ? spec->n_expert : 1, 1) || !check_floats(l, t)))
                return false;
            l->done += t ? t->bytes : 0;
        }
        if (!t)
            continue;
        size_t skip = stacked ? (size_t)e * (t->bytes / (size_t)spec->n_expert) : 0;
        if (part) {
            size_t each = dtype_bytes(t->type, 1), step = rows->step ? (size_t)rows->step : 1;
            size_t run = rows->run_length ? (size_t)rows->run_length : 1;
            for (size_t r = 0; r < (size_t)rows->n; r++) {
                size_t at = (size_t)rows->first + step * (r / run) + r % run;
                quant_dequantize(t->type, t->data + skip + at * each, bias + r, 1);
            }
        } else {
            quant_dequantize(t->type, t->data + skip, bias, (size_t)rows->n);
        }
        if (rows_order(rows, l->f->is_gguf))
            memcpy(bias, reorder_plane(l, rows, bias, sizeof *bias),
                   (size_t)rows->n * sizeof *bias);
    }
    return true;
}

/* raw_weight.fetch */
static const uint8_t *fetch(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    return direct_read(arg, data, bytes, buf);
}

static bool finish(struct weight_loader *l, struct raw_weight *w, const struct tensor_spec *spec,
                   bool ok)
{
    struct backend *be = l->m->be;
    struct weight *out = spec->w;
    struct fp8_check check;
    if (ok && l->m->direct && !w->transient && w->n_seg &&
        direct_has(l->m->direct, w->seg[0].data[0])) {
        w->fetch = fetch;
        w->fetch_arg = l->m->direct;
    }
    fp8_check_begin(&check, l->f, w);
    ok = ok && be->ops->upload(be, w, spec->role, out, l->err);
    ok = ok && (fp8_check_end(&check) || refuse_nan(l));
    for (size_t i = 0; i < l->n_used; i++) {
        l->done += l->used[i]->bytes;
        /* The backend may have made its own copy. */
        if (ok && (w->transient || out->owns))
            tensorfile_forget(l->f, l->used[i]);
        else
            l->m->reads[l->f != l->m->file] = l->f;
    }
    for (int i = 0; i < l->n_blocks; i++)
        mem_free(l->blocks[i]);
    l->n_blocks = 0;
    l->n_used = 0;
    if (ok && l->progress && !l->progress->fn(l->progress->arg, l->done, l->total))
        ok = error_set(l->err, "loading was interrupted");
    return ok;
}

/* A weight of one to three row segments, with the bias of each where it exists. */
static bool load_weight(struct weight_loader *l, const struct tensor_spec *spec)
{
    struct raw_weight w = {.n_in = spec->n_in, .n_expert = spec->n_expert};
    bool ok = true;
    for (int i = 0; ok && i < spec->n_rows; i++)
        ok = add_segment(l, &w, &spec->rows[i], spec->layer);
    size_t all = (size_t)spec->n_expert * (size_t)w.n_out;
    float *bias = ok && spec->w->bias ? block(l, all, sizeof *bias) : NULL;
    int first = 0;
    for (int i = 0; ok && bias && i < spec->n_rows; first += spec->rows[i++].n)
        ok = add_bias(l, spec, &spec->rows[i], w.n_out, bias + first);
    w.bias = bias;
    if (ok && spec->cut)
        ok = cut_weight(&w, spec->cut, block_for, l, l->err) ||
             error_prefix(l->err, "%s: weights of layer %d", l->f->path, spec->layer);
    bool experts = spec->role == WEIGHT_EXPERTS || spec->role == WEIGHT_EXPERTS_SHARED;
    if (l->n_host && experts && w.n_expert > 1)
        w.n_host = l->n_host[spec->net_layer];
    return finish(l, &w, spec, ok);
}

/* Has the family describe the network. be: NULL for sizes only. */
static bool describe(const struct tensorfile *f, const struct config *c, struct backend *be,
                     struct network *net, struct tensor_spec **specs, int *n_specs,
                     struct error *err)
{
    int n = config_net_layers(c) + c->n_mtp + (c->eagle != NULL);
    *net = (struct network){.n_layers = n, .n_embd = c->n_embd, .n_vocab = c->n_vocab};
    net->layers = mem_zalloc((size_t)n, sizeof *net->layers);
    struct net_builder b = {
        .f = f, .c = c, .be = be, .net = net, .spare_ropes = c->eagle != NULL, .err = err};
    c->family->build(&b);
    if (c->eagle)
        eagle_build(&b);
    *specs = b.specs;
    *n_specs = b.n_specs;
    return !b.failed;
}

bool outline_load(const struct tensorfile *f, const struct config *c, struct outline *out,
                  struct error *err)
{
    if (describe(f, c, NULL, &out->net, &out->specs, &out->n_specs, err))
        return true;
    outline_free(out);
    return false;
}

void outline_free(struct outline *o)
{
    build_free(NULL, &o->net, o->specs, o->n_specs);
    *o = (struct outline){0};
}

/* Fills m->specs with the tensors that each weight is assembled from. */
static bool build(struct model *m, const struct tensorfile *f, const struct model_shard *shard,
                  struct error *err)
{
    if (!describe(f, &m->config, m->be, &m->net, &m->specs, &m->n_specs, err))
        return false;
    if (shard && shard->cut &&
        !shard->cut(shard->arg, f, &m->config, &m->net, m->specs, m->n_specs, err))
        return error_prefix(err, "%s", f->path);
    struct error why = {0};
    return m->be->ops->supports(m->be, &m->net, &why) || error_set(err, "%s: %s", f->path, why.msg);
}

int model_row_width(const struct model *m)
{
    return m->net.head.w ? m->net.n_vocab : m->net.n_embd;
}

void model_choose(struct config *c, enum model_parts parts)
{
    c->headless |= (parts & MODEL_HEADLESS) != 0;
    if (!(parts & MODEL_DRAFTING) || c->headless)
        c->eagle = NULL;
    if (!(parts & MODEL_DRAFTING) || c->headless || c->eagle)
        c->n_mtp = 0;
    if (!(parts & MODEL_SEEING)) {
        c->n_deepstack = 0;
        c->sees_both_ways = false;
    }
}

struct model *model_load(const struct tensorfile *f, struct backend *be, enum model_parts parts,
                         const struct model_shard *shard, const struct progress *progress,
                         struct error *err)
{
    struct config *c = mem_zalloc(1, sizeof *c);
    struct model *m = NULL;
    if (config_load(f, c, err)) {
        model_choose(c, parts);
        m = model_load_config(f, be, c, shard, progress, err);
    }
    mem_free(c);
    return m;
}

struct model *model_load_config(const struct tensorfile *f, struct backend *be,
                                const struct config *c, const struct model_shard *shard,
                                const struct progress *progress, struct error *err)
{
    struct model *m = mem_zalloc(1, sizeof *m);
    m->be = be;
    m->config = *c;
    m->file = f;
    m->direct = direct_open(f);
    bool ok = build(m, f, shard, err);
    struct weight_loader l = {
        .m = m, .progress = progress, .total = tensorfile_bytes(f), .err = err};
    l.total += c->eagle ? tensorfile_bytes(c->eagle->file) : 0;
    l.n_host = shard ? shard->n_host : NULL;
    for (int i = 0; ok && i < m->n_specs; i++) {
        const struct tensor_spec *spec = &m->specs[i];
        l.f = f;
        l.c = &m->config;
        build_source(spec, &l.f, &l.c);
        if (!spec->cut || !spec->cut->none)
            ok = spec->w ? load_weight(&l, spec) : load_vector(&l, spec);
    }
    mem_free(l.used);
    mem_free(l.blocks);
    if (!ok) {
        model_free(m);
        return NULL;
    }
    if (!m->reads[0])
        tensorfile_forget_all(f);
    if (c->eagle && !m->reads[1])
        tensorfile_forget_all(c->eagle->file);
    struct model_size size;
    model_measure(f, &m->config, &size);
    m->bytes = size.bytes;
    m->active_bytes = size.active_bytes;
    m->n_params = size.n_params;
    m->n_active = size.n_active;
    return m;
}

void model_set_context(struct model *m, int context)
{
    const struct config *c = &m->config;
    struct rope *rope =
        (struct rope *)(uintptr_t)m->net.ropes; /* owned: build_ropes allocated it */
    if (c->rope.kind != ROPE_LONG || !rope)
        return;
    const float *factors = context > c->rope.original_context ? c->rope_long : c->rope_short;
    rope_frequencies(&c->rope, rope->n_rot, factors, (float *)(uintptr_t)rope->freq, &rope->mscale);
}

void model_free(struct model *m)
{
    if (!m)
        return;
    build_free(m->be, &m->net, m->specs, m->n_specs);
    direct_close(m->direct);
    mem_free(m);
}

void model_measure(const struct tensorfile *f, const struct config *c, struct model_size *out)
{
    *out = (struct model_size){0};
    double share = c->n_expert ? (double)c->n_expert_used / c->n_expert : 1;
    double active = 0, active_bytes = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        bool drafts = config_is_mtp(c, t->name);
        if (!config_is_text(c, t->name) || (drafts && !c->n_mtp))
            continue;
        int64_t n = strncmp(t->name, "rope_f", 6) ? layout_params(t, &c->layout) : 0;
        bool expert = strstr(t->name, "_exps.") || strstr(t->name, ".experts.");
        /* A token reads one row of the embedding. A tied embedding is also the head. */
        bool lookup_only = !c->tied && (!strcmp(t->name, "token_embd.weight") ||
                                        !strcmp(t->name, "model.embed_tokens.weight"));
        bool few = t->type == DT_Q1_0 || t->type == DT_Q2_0; /* expand_bits */
        size_t bytes = few ? dtype_bytes(DT_Q4_0, (size_t)n) : t->bytes;
        out->n_params += n;
        out->bytes += bytes;
        if (lookup_only || drafts)
            continue;
        active += (double)n * (expert ? share : 1);
        active_bytes += (double)bytes * (expert ? share : 1);
    }
    for (size_t i = 0; c->eagle && i < c->eagle->file->n_tensors; i++)
        out->bytes += c->eagle->file->tensors[i].bytes;
    out->n_active = (int64_t)(active + 0.5);
    out->active_bytes = (size_t)active_bytes;
}
