/*
 * Loading: has the family build its network, asks the backend whether it can run it, then finds every
 * tensor it wants, checks its shape, undoes the layout quirks of its file once (rotary pairs woven
 * together in GGUF, GPTQ's packing, experts as separate tensors) and hands it to the backend. After
 * this, nothing checks shapes again.
 */
#include "base/mem.h"
#include "model/families/family.h"
#include "model/model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct loader {
    const struct tensorfile *f;
    struct model *m;
    const struct progress *progress;
    size_t done, total; /* bytes */
    struct error *err;
    /* One weight under construction: heap blocks behind its raw segments. */
    void *blocks[64];
    int n_blocks;
    const struct tensor **used; /* (n_used) tensors read by it */
    size_t n_used, cap_used;
};

static const struct tensor *lookup(struct loader *l, const struct name *n, int layer, int expert,
                                   const char *suffix)
{
    return build_find(l->f, &l->m->config, n, layer, expert, suffix);
}

static const struct tensor *need(struct loader *l, const struct name *n, int layer, int expert,
                                 const char *suffix)
{
    const struct tensor *t = lookup(l, n, layer, expert, suffix);
    if (!t) {
        char name[192];
        build_name(l->f, &l->m->config, n, layer, expert, suffix, name, sizeof name);
        error_set(l->err, "%s: tensor %s: missing", l->f->path, name);
    }
    return t;
}

static bool check_shape(struct loader *l, const struct tensor *t, int64_t d0, int64_t d1,
                        int64_t d2)
{
    if (t->dims[0] == d0 && t->dims[1] == d1 && t->dims[2] == d2 && t->dims[3] == 1)
        return true;
    return error_set(l->err,
                     "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                     "], expected [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                     l->f->path, t->name, t->dims[0], t->dims[1], t->dims[2], d0, d1, d2);
}

static bool check_type(struct loader *l, const struct tensor *t)
{
    switch (t->type) {
    case DT_NONE:
    case DT_I8:
    case DT_I16:
    case DT_I32:
    case DT_I64:
    case DT_F64:
    case DT_GPTQ4:
        return error_set(l->err, "%s: tensor %s: type %s is not supported", l->f->path, t->name,
                         t->type_name);
    default:
        return true;
    }
}

/* Heap memory that lives until the weight is uploaded. */
static void *block(struct loader *l, size_t count, size_t size)
{
    CHECK(l->n_blocks < (int)(sizeof l->blocks / sizeof *l->blocks), "too many blocks");
    return l->blocks[l->n_blocks++] = mem_zalloc(count, size);
}

static void mark_used(struct loader *l, const struct tensor *t)
{
    if (l->n_used == l->cap_used) {
        l->cap_used = l->cap_used ? l->cap_used * 2 : 64;
        l->used = mem_realloc(l->used, l->cap_used, sizeof *l->used);
    }
    l->used[l->n_used++] = t;
}

static bool check_floats(struct loader *l, const struct tensor *t)
{
    return t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16 ||
           error_set(l->err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected",
                     l->f->path, t->name, t->type_name);
}

/* Reads a vector as floats: norms, biases, rope factors. width: it is a table of such rows, between
 * which a folder may have a dimension of 1. */
static bool read_vector(struct loader *l, const struct tensor *t, int n, int width, float *out)
{
    bool apart = width && t->dims[1] == 1;
    int64_t rows = width ? n / width : 1;
    if (!check_shape(l, t, width ? width : n, apart ? 1 : rows, apart ? rows : 1) ||
        !check_floats(l, t))
        return false;
    quant_dequantize(t->type, t->data, out, (size_t)n);
    return true;
}

static bool load_vector(struct loader *l, const struct want *want)
{
    const struct tensor *t = need(l, want->rows[0].name, want->layer, 0, "weight");
    if (!t)
        return false;
    size_t n = (size_t)want->n_in;
    float *host = mem_zalloc(n, sizeof(float));
    bool ok = read_vector(l, t, want->n_in, want->width, host);
    float add = l->f->is_gguf ? 0 : want->adjust.add;
    float times = want->adjust.times == 0 ? 1 : want->adjust.times;
    for (size_t i = 0; i < n; i++)
        host[i] = (host[i] + add) * times;
    for (size_t i = 0; want->adjust.decay && i < n; i++)
        host[i] = l->f->is_gguf ? -host[i] : expf(host[i]);
    if (ok)
        l->m->be->ops->copy_in(l->m->be, want->vector, host, n * sizeof(float));
    mem_free(host);
    l->done += t->bytes;
    return ok;
}

/* GPTQ: qweight (in/8, out) i32, qzeros (groups, out/8) i32, scales (groups, out) half, g_idx (in).
 * Becomes rows of codes with columns sorted by group, so that a group is contiguous. */

struct gptq_tensors {
    const struct tensor *codes, *zeros, *scales, *g_idx;
};

static bool gptq_find(struct loader *l, const struct name *n, int layer, int expert, int n_in,
                      int n_out, struct gptq_tensors *g, int *group_len, int *n_groups)
{
    g->codes = need(l, n, layer, expert, "qweight");
    g->zeros = g->codes ? need(l, n, layer, expert, "qzeros") : NULL;
    g->scales = g->zeros ? need(l, n, layer, expert, "scales") : NULL;
    if (!g->scales)
        return false;
    g->g_idx = lookup(l, n, layer, expert, "g_idx");
    const struct config *c = &l->m->config;
    int len = c->gptq_group < 0 || c->gptq_group > n_in ? n_in : c->gptq_group;
    int groups = (n_in + len - 1) / len;
    if (n_in % 8 || n_out % 8)
        return error_set(l->err, "%s: tensor %s: GPTQ needs multiples of 8, not %d x %d",
                         l->f->path, g->codes->name, n_in, n_out);
    if (!check_shape(l, g->codes, n_out, n_in / 8, 1) ||
        !check_shape(l, g->zeros, n_out / 8, groups, 1) ||
        !check_shape(l, g->scales, n_out, groups, 1) ||
        (g->g_idx && !check_shape(l, g->g_idx, n_in, 1, 1)))
        return false;
    const struct tensor *ints[] = {g->codes, g->zeros, g->g_idx};
    for (int i = 0; i < 3; i++)
        if (ints[i] && ints[i]->type != DT_I32)
            return error_set(l->err, "%s: tensor %s: type %s where I32 is expected", l->f->path,
                             ints[i]->name, ints[i]->type_name);
    if (g->scales->type != DT_F16 && g->scales->type != DT_BF16 && g->scales->type != DT_F32)
        return error_set(l->err, "%s: tensor %s: type %s where F16 is expected", l->f->path,
                         g->scales->name, g->scales->type_name);
    *group_len = len;
    *n_groups = groups;
    return true;
}

static uint32_t load_u32(const uint8_t *p, size_t i)
{
    uint32_t v;
    memcpy(&v, p + 4 * i, 4);
    return v;
}

/* order[j] = input column stored at j: columns sorted by group, stable. True if that is not the
 * identity. Groups must come out full, or they would straddle. */
static bool gptq_order(struct loader *l, const struct gptq_tensors *g, int n_in, int group_len,
                       int n_groups, int32_t *order, bool *permuted)
{
    *permuted = false;
    for (int j = 0; j < n_in; j++)
        order[j] = j;
    if (!g->g_idx)
        return true;
    int *at = mem_zalloc((size_t)n_groups, sizeof *at);
    bool ok = true;
    for (int j = 0; ok && j < n_in; j++) {
        uint32_t group = load_u32(g->g_idx->data, (size_t)j);
        if (group >= (uint32_t)n_groups || at[group] >= group_len) {
            ok = error_set(l->err, "%s: tensor %s: entry %d: group %u is out of range or over-full",
                           l->f->path, g->g_idx->name, j, group);
            break;
        }
        int stored = (int)group * group_len + at[group]++;
        if (stored >= n_in)
            ok = error_set(l->err, "%s: tensor %s: group %u is over-full", l->f->path,
                           g->g_idx->name, group);
        else
            order[stored] = j;
        *permuted |= stored != j;
    }
    mem_free(at);
    return ok;
}

/* Rows of codes from (n_in/8, n_out) words of 8 columns each: a word is 4 bytes of a row as it is,
 * where its columns stay together. In blocks that stay in the first cache both ways. */
static void gptq_codes(const uint8_t *words, const int32_t *order, int n_in, int n_out,
                       uint8_t *out)
{
    enum { ROWS = 64, WORDS = 16 };
    uint32_t block[WORDS][ROWS];
    int n_words = n_in / 8;
    for (int o = 0; o < n_out; o += ROWS)
        for (int j = 0; j < n_words; j += WORDS) {
            int rows = n_out - o < ROWS ? n_out - o : ROWS;
            int n = n_words - j < WORDS ? n_words - j : WORDS;
            for (int i = 0; i < n; i++) {
                const int32_t *from = order + 8 * (j + i);
                bool together = from[0] % 8 == 0;
                for (int k = 1; k < 8; k++)
                    together &= from[k] == from[0] + k;
                if (!together)
                    memset(block[i], 0, sizeof block[i]);
                for (int k = 0; k < (together ? 1 : 8); k++) {
                    uint32_t in[ROWS];
                    size_t at = (size_t)(from[k] / 8) * (size_t)n_out + (size_t)o;
                    memcpy(together ? block[i] : in, words + 4 * at, (size_t)rows * sizeof *in);
                    int right = from[k] % 8 * 4, left = 4 * k;
                    for (int r = 0; r < rows && !together; r++)
                        block[i][r] |= (in[r] >> right & 15) << left;
                }
            }
            for (int r = 0; r < rows; r++) {
                uint32_t row[WORDS];
                for (int i = 0; i < n; i++)
                    row[i] = block[i][r];
                memcpy(out + (size_t)(o + r) * (size_t)(n_in / 2) + 4 * (size_t)j, row,
                       (size_t)n * sizeof *row);
            }
        }
}

static bool gptq_unpack(struct loader *l, const struct name *n, int layer, int n_in, int n_out,
                        int n_expert, struct raw_seg *s)
{
    struct gptq_tensors g;
    int len = 0, groups = 0;
    if (!gptq_find(l, n, layer, 0, n_in, n_out, &g, &len, &groups))
        return false;
    size_t code_bytes = (size_t)n_out * (size_t)(n_in / 2), planes = (size_t)n_out * (size_t)groups;
    uint8_t *codes = block(l, (size_t)n_expert, code_bytes);
    uint16_t *scales = block(l, (size_t)n_expert, planes * sizeof(uint16_t));
    uint8_t *zeros = block(l, (size_t)n_expert, planes);
    int32_t *orders = block(l, (size_t)n_expert, (size_t)n_in * sizeof(int32_t));
    const uint8_t **data = block(l, (size_t)n_expert, sizeof *data);
    const void **scale = block(l, (size_t)n_expert, sizeof *scale);
    const uint8_t **zero = block(l, (size_t)n_expert, sizeof *zero);
    const int32_t **perm = block(l, (size_t)n_expert, sizeof *perm);
    bool any = false;
    for (int e = 0; e < n_expert; e++) {
        int32_t *order = orders + (size_t)e * (size_t)n_in;
        bool permuted;
        if (!gptq_find(l, n, layer, e, n_in, n_out, &g, &len, &groups) ||
            !gptq_order(l, &g, n_in, len, groups, order, &permuted))
            return false;
        any |= permuted;
        uint8_t *out = codes + (size_t)e * code_bytes;
        gptq_codes(g.codes->data, order, n_in, n_out, out);
        for (int i = 0; i < groups; i++)
            for (int o = 0; o < n_out; o++) {
                size_t at = (size_t)e * planes + (size_t)o * (size_t)groups + (size_t)i;
                size_t from = (size_t)i * (size_t)n_out + (size_t)o;
                float value;
                size_t width = dtype_bytes(g.scales->type, 1);
                quant_dequantize(g.scales->type, g.scales->data + from * width, &value, 1);
                scales[at] = f32_to_f16(value);
                uint32_t word = load_u32(g.zeros->data, from / 8);
                zeros[at] = (uint8_t)((word >> (from % 8 * 4) & 15) +
                                      (l->m->config.gptq_zero_plus ? 1 : 0));
            }
        data[e] = out;
        scale[e] = scales + (size_t)e * planes;
        zero[e] = zeros + (size_t)e * planes;
        perm[e] = order;
        const struct tensor *all[] = {g.codes, g.zeros, g.scales, g.g_idx};
        for (int i = 0; i < 4; i++)
            if (all[i])
                mark_used(l, all[i]);
    }
    *s = (struct raw_seg){DT_GPTQ4, n_out, data, scale, zero, any ? perm : NULL, len};
    return true;
}

/* FP8 block scales as aligned floats; the codes stay in the file. */
static bool fp8_scales(struct loader *l, const struct name *n, int layer, int n_in, int n_out,
                       int n_expert, struct raw_seg *s)
{
    size_t cols = (size_t)(n_in + 127) / 128, rows = (size_t)(n_out + 127) / 128;
    float *scales = block(l, (size_t)n_expert * (size_t)n_out * cols, sizeof *scales);
    const void **table = block(l, (size_t)n_expert, sizeof *table);
    for (int e = 0; e < n_expert; e++) {
        const struct tensor *t = need(l, n, layer, e, "weight_scale_inv");
        if (!t)
            return false;
        if (!check_shape(l, t, (int64_t)cols, (int64_t)rows, 1) || !check_type(l, t))
            return false;
        if (dtype_table[t->type].block_len != 1)
            return error_set(l->err, "%s: tensor %s: type %s", l->f->path, t->name, t->type_name);
        float *out = scales + (size_t)e * (size_t)n_out * cols;
        size_t width = dtype_bytes(t->type, cols);
        for (size_t r = 0; r < (size_t)n_out; r++)
            quant_dequantize(t->type, t->data + r / 128 * width, out + r * cols, cols);
        table[e] = out;
        mark_used(l, t);
    }
    s->scale = table;
    return true;
}

/* Llama's GGUF stores rotary pairs side by side: row 2i+j of a head is row j*D/2+i of the model. */
static void unpermute(struct loader *l, struct raw_seg *s, int n_in, int head_dim)
{
    size_t row = raw_seg_row_bytes(s, n_in);
    uint8_t *copy = block(l, (size_t)s->rows, row);
    int half = head_dim / 2;
    for (int r = 0; r < s->rows; r++) {
        int in_head = r % head_dim, first = r - in_head;
        int from = first + (in_head % half) * 2 + in_head / half;
        memcpy(copy + (size_t)r * row, s->data[0] + (size_t)from * row, row);
    }
    const uint8_t **table = block(l, 1, sizeof *table);
    table[0] = copy;
    s->data = table;
}

/* Rows out of a tensor that has more, or is stored transposed: copied in the order of the weight. */
static void take_rows(struct loader *l, struct raw_seg *s, const struct tensor *t,
                      const struct rows *rows, int n_in, int n_expert)
{
    size_t row = raw_seg_row_bytes(s, n_in), each = dtype_bytes(t->type, 1), n = (size_t)rows->n;
    size_t of = (size_t)rows->of, step = rows->step ? (size_t)rows->step : 1;
    size_t run = rows->run ? (size_t)rows->run : 1;
    uint8_t *copy = block(l, (size_t)n_expert * n, row);
    const uint8_t **table = block(l, (size_t)n_expert, sizeof *table);
    for (size_t e = 0; e < (size_t)n_expert; e++) {
        uint8_t *to = copy + e * n * row;
        const uint8_t *from = t->data + e * of * row;
        table[e] = to;
        for (size_t r = 0; r < n; r++, to += row) {
            size_t at = (size_t)rows->first + step * (r / run) + r % run;
            if (!rows->across)
                memcpy(to, from + at * row, row);
            for (size_t c = 0; rows->across && c < (size_t)n_in; c++)
                memcpy(to + c * each, from + (c * of + at) * each, each);
        }
    }
    s->data = table;
}

static bool aligned(const uint8_t *p)
{
    return (uintptr_t)p % 4 == 0;
}

/* One tensor (or n_expert of them) as a segment of the weight under construction. */
static bool add_segment(struct loader *l, struct raw_weight *w, const struct rows *rows, int layer)
{
    const struct name *n = rows->name;
    int n_out = rows->n;
    struct raw_seg *s = &w->seg[w->n_seg++];
    int n_in = w->n_in, n_expert = w->n_expert;
    w->n_out += n_out;
    if (!l->f->is_gguf && l->m->config.packing == PACK_GPTQ && lookup(l, n, layer, 0, "qweight")) {
        w->transient = true;
        return gptq_unpack(l, n, layer, n_in, n_out, n_expert, s);
    }
    const uint8_t **data = block(l, (size_t)n_expert, sizeof *data);
    bool stacked = build_stacked(l->f, n); /* experts in one tensor */
    /* a folder's tensor may have more rows, which lie as they like */
    bool folder = !l->f->is_gguf, part = (folder || rows->gguf_too) && rows->of;
    bool across = folder && rows->across;
    int64_t height = part ? rows->of : n_out;
    const struct tensor *t = NULL;
    for (int e = 0; e < n_expert; e++) {
        if (e == 0 || !stacked) {
            t = need(l, n, layer, e, "weight");
            if (!t || !check_type(l, t) || (across && !check_floats(l, t)) ||
                !check_shape(l, t, across ? height : n_in, across ? n_in : height,
                             stacked ? n_expert : 1))
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
        return error_set(l->err, "%s: tensor %s: row of %d is no multiple of %s's %d", l->f->path,
                         t->name, n_in, dtype_name(s->type), dtype_table[s->type].block_len);
    if (s->type == DT_F8_E4M3 && lookup(l, n, layer, 0, "weight_scale_inv")) {
        w->transient = true;
        if (!fp8_scales(l, n, layer, n_in, n_out, n_expert, s))
            return false;
    }
    if (part) {
        take_rows(l, s, t, rows, n_in, n_expert);
        w->transient = true;
    }
    if (rows->woven && l->f->is_gguf) {
        unpermute(l, s, n_in, rows->woven);
        w->transient = true;
    }
    return true;
}

/* The bias of `rows`, of all experts, into bias, whose experts are `stride` apart; zeros if there is
 * none. */
static bool add_bias(struct loader *l, const struct want *want, const struct rows *rows, int stride,
                     float *bias)
{
    const struct tensor *t = NULL;
    bool stacked = build_stacked(l->f, rows->name), part = !l->f->is_gguf && rows->of;
    int D = l->f->is_gguf ? rows->woven : 0, width = part ? rows->of : rows->n;
    for (int e = 0; e < want->n_expert; e++, bias += stride) {
        if (e == 0 || !stacked) {
            t = lookup(l, rows->name, want->layer, e, "bias");
            if (t &&
                (!check_shape(l, t, width, stacked ? want->n_expert : 1, 1) || !check_floats(l, t)))
                return false;
            l->done += t ? t->bytes : 0;
        }
        if (!t)
            continue;
        size_t skip = stacked ? (size_t)e * (t->bytes / (size_t)want->n_expert) : 0;
        if (part) {
            size_t each = dtype_bytes(t->type, 1), step = rows->step ? (size_t)rows->step : 1;
            for (size_t r = 0; r < (size_t)rows->n; r++)
                quant_dequantize(t->type, t->data + skip + ((size_t)rows->first + step * r) * each,
                                 bias + r, 1);
        } else {
            quant_dequantize(t->type, t->data + skip, bias, (size_t)rows->n);
        }
        if (!D)
            continue;
        float *copy = block(l, (size_t)rows->n, sizeof *copy);
        memcpy(copy, bias, (size_t)rows->n * sizeof *copy);
        for (int r = 0; r < rows->n; r++)
            bias[r] = copy[r - r % D + r % D % (D / 2) * 2 + r % D / (D / 2)];
    }
    return true;
}

static bool finish(struct loader *l, const struct raw_weight *w, const struct want *want, bool ok)
{
    struct backend *be = l->m->be;
    struct weight *out = want->w;
    ok = ok && be->ops->upload(be, w, want->role, out, l->err);
    for (size_t i = 0; i < l->n_used; i++) {
        l->done += l->used[i]->bytes;
        /* The backend has its own copy now, where it made one. */
        if (ok && (w->transient || out->owns))
            tensorfile_forget(l->f, l->used[i]);
        else
            l->m->reads = l->f;
    }
    for (int i = 0; i < l->n_blocks; i++)
        mem_free(l->blocks[i]);
    l->n_blocks = 0;
    l->n_used = 0;
    if (ok && l->progress && !l->progress->fn(l->progress->arg, l->done, l->total))
        ok = error_set(l->err, "loading was interrupted");
    return ok;
}

static const uint8_t *source_read(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    return tensorfile_read(arg, data, bytes, buf);
}

/* A weight of one to three row segments, with the bias of each where it exists. */
static bool load_weight(struct loader *l, const struct want *want)
{
    struct raw_weight w = {.n_in = want->n_in,
                           .n_expert = want->n_expert,
                           .read = source_read,
                           .read_arg = (void *)(uintptr_t)l->f};
    bool ok = true;
    for (int i = 0; ok && i < want->n_rows; i++)
        ok = add_segment(l, &w, &want->rows[i], want->layer);
    size_t all = (size_t)want->n_expert * (size_t)w.n_out;
    float *bias = ok && want->w->bias ? block(l, all, sizeof *bias) : NULL;
    int first = 0;
    for (int i = 0; ok && bias && i < want->n_rows; first += want->rows[i++].n)
        ok = add_bias(l, want, &want->rows[i], w.n_out, bias + first);
    w.bias = bias;
    return finish(l, &w, want, ok);
}

/* The network as its family describes it, for a backend or for none. */
static bool describe(const struct tensorfile *f, const struct config *c, struct backend *be,
                     struct network *net, struct want **wants, int *n_wants, struct error *err)
{
    *net = (struct network){.n_layers = c->n_layers, .n_embd = c->n_embd, .n_vocab = c->n_vocab};
    net->layers = mem_zalloc((size_t)c->n_layers, sizeof *net->layers);
    struct builder b = {.f = f, .c = c, .be = be, .net = net, .err = err};
    c->family->build(&b);
    *wants = b.wants;
    *n_wants = b.n_wants;
    return !b.failed;
}

bool outline_load(const struct tensorfile *f, const struct config *c, struct outline *out,
                  struct error *err)
{
    if (describe(f, c, NULL, &out->net, &out->wants, &out->n_wants, err))
        return true;
    outline_free(out);
    return false;
}

void outline_free(struct outline *o)
{
    build_free(NULL, &o->net, o->wants, o->n_wants);
    *o = (struct outline){0};
}

/* What the weights of the network are made of goes to m->wants. */
static bool build(struct model *m, const struct tensorfile *f, struct error *err)
{
    if (!describe(f, &m->config, m->be, &m->net, &m->wants, &m->n_wants, err))
        return false;
    struct error why = {0};
    return m->be->ops->supports(m->be, &m->net, &why) || error_set(err, "%s: %s", f->path, why.msg);
}

struct model *model_load(const struct tensorfile *f, struct backend *be,
                         const struct progress *progress, struct error *err)
{
    struct model *m = mem_zalloc(1, sizeof *m);
    m->be = be;
    bool ok = config_load(f, &m->config, err) && build(m, f, err);
    struct loader l = {
        .f = f, .m = m, .progress = progress, .total = tensorfile_bytes(f), .err = err};
    for (int i = 0; ok && i < m->n_wants; i++)
        ok = m->wants[i].w ? load_weight(&l, &m->wants[i]) : load_vector(&l, &m->wants[i]);
    mem_free(l.used);
    if (!ok) {
        model_free(m);
        return NULL;
    }
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
    struct rope *rope = (struct rope *)(uintptr_t)m->net.ropes; /* ours, from the build */
    if (c->rope.kind != ROPE_LONG || !rope)
        return;
    const float *factors = context > c->rope.original_context ? c->rope_long : c->rope_short;
    rope_frequencies(&c->rope, rope->n_rot, factors, (float *)(uintptr_t)rope->freq, &rope->mscale);
}

void model_free(struct model *m)
{
    if (!m)
        return;
    build_free(m->be, &m->net, m->wants, m->n_wants);
    mem_free(m);
}

/* Parameters of a tensor: GPTQ codes hold eight each; its scales, zeros and order are none. */
static int64_t tensor_params(const struct tensor *t)
{
    int64_t n = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    const char *dot = strrchr(t->name, '.');
    const char *suffix = dot ? dot + 1 : t->name;
    if (!strcmp(suffix, "qweight"))
        return n * 8;
    if (!strcmp(suffix, "qzeros") || !strcmp(suffix, "scales") || !strcmp(suffix, "g_idx") ||
        !strcmp(suffix, "weight_scale_inv") || !strncmp(t->name, "rope_f", 6))
        return 0;
    return n;
}

void model_measure(const struct tensorfile *f, const struct config *c, struct model_size *out)
{
    *out = (struct model_size){0};
    double share = c->n_expert ? (double)c->n_expert_used / c->n_expert : 1;
    double active = 0, active_bytes = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        if (!config_is_text(c, t->name))
            continue;
        int64_t n = tensor_params(t);
        bool expert = strstr(t->name, "_exps.") || strstr(t->name, ".experts.");
        /* A token reads one row of the embedding, unless it is the head as well. */
        bool lookup_only = !c->tied && (!strcmp(t->name, "token_embd.weight") ||
                                        !strcmp(t->name, "model.embed_tokens.weight"));
        out->n_params += n;
        out->bytes += t->bytes;
        if (lookup_only)
            continue;
        active += (double)n * (expert ? share : 1);
        active_bytes += (double)t->bytes * (expert ? share : 1);
    }
    out->n_active = (int64_t)(active + 0.5);
    out->active_bytes = (size_t)active_bytes;
}
