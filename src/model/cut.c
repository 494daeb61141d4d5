/* Parts of weights, vectors and adapters: see cut.h. Knows formats and layouts, nothing of who has the other parts. */
#include "model/cut.h"
#include "backend/lora.h"
#include "base/mem.h"

#include <string.h>

int cut_vector(float *values, int n, const struct cut *cut)
{
    int at = 0;
    if (cut && cut->n_order) {
        float *old = mem_alloc((size_t)n * sizeof *old);
        memcpy(old, values, (size_t)n * sizeof *old);
        for (int i = 0; i < n; i++)
            values[i] = old[cut->order[i]];
        mem_free(old);
    }
    if (!cut || !cut->n_rows)
        return n;
    for (int i = 0; i < cut->n_rows; i++) {
        memmove(values + at, values + cut->rows[i].first, (size_t)cut->rows[i].n * sizeof *values);
        at += cut->rows[i].n;
    }
    return at;
}

struct copier {
    void *(*alloc)(void *arg, size_t count, size_t size);
    void *arg;
};

/* One plane of one expert: items of `size` bytes for `pack` columns each. In the copy an item is for `step`
 * columns, which divides pack: a scale of many columns is repeated. */
struct plane {
    size_t size;
    int pack, step;
};

static size_t items(int columns, int each)
{
    return (size_t)((columns + each - 1) / each);
}

int cut_group_len(int len)
{
    int unit = CUT_PACKED_UNIT;
    while (unit) {
        int rest = len % unit;
        len = unit;
        unit = rest;
    }
    return len;
}

/* The items of a run of a row's columns; where they end. */
static uint8_t *copy_items(uint8_t *to, const struct plane *p, const uint8_t *row,
                           const struct range *cols)
{
    size_t n = items(cols->n, p->step);
    if (p->step == p->pack) {
        memcpy(to, row + (size_t)(cols->first / p->pack) * p->size, n * p->size);
        return to + n * p->size;
    }
    for (int i = 0; i < cols->n; i += p->step, to += p->size)
        memcpy(to, row + (size_t)((cols->first + i) / p->pack) * p->size, p->size);
    return to;
}

/* Rows `runs` and columns `cols` of a plane whose rows have n_in columns. */
static void *copy_plane(const struct copier *to, const struct plane *p, const uint8_t *from,
                        int n_in, const struct range *rows, int n_rows, const struct range *cols,
                        int n_cols)
{
    size_t height = 0, width = 0, pitch = items(n_in, p->pack) * p->size;
    for (int i = 0; i < n_rows; i++)
        height += (size_t)rows[i].n;
    for (int i = 0; i < n_cols; i++)
        width += items(cols[i].n, p->step) * p->size;
    uint8_t *out = to->alloc(to->arg, height, width), *at = out;
    for (int i = 0; i < n_rows; i++)
        for (int r = rows[i].first; r < rows[i].first + rows[i].n; r++)
            for (int k = 0; k < n_cols; k++)
                at = copy_items(at, p, from + (size_t)r * pitch, &cols[k]);
    return out;
}

static const void **table(const struct copier *to, int n)
{
    return to->alloc(to->arg, (size_t)n, sizeof(void *));
}

/* The rows of a segment that begins at row `base` of its weight: runs within it. */
static int rows_within(const struct cut *cut, int base, int rows, struct range *out)
{
    int n = 0;
    if (!cut->n_rows) {
        out[0] = (struct range){0, rows};
        return 1;
    }
    for (int i = 0; i < cut->n_rows; i++) {
        int first = cut->rows[i].first - base, last = first + cut->rows[i].n;
        first = first < 0 ? 0 : first;
        last = last > rows ? rows : last;
        if (first < last)
            out[n++] = (struct range){first, last - first};
    }
    return n;
}

static void cut_segment(const struct copier *to, struct raw_seg *s, int n_in, int n_expert,
                        const struct range *rows, int n_rows, const struct range *cols, int n_cols)
{
    const struct dtype_info *d = &dtype_table[s->type];
    int group = s->group_len;
    /* Columns are cut at multiples of CUT_PACKED_UNIT, which need not be where a long group begins. */
    if (s->type == DT_GPTQ4 && (n_cols > 1 || cols[0].n < n_in))
        group = cut_group_len(group);
    struct plane data = {dtype_bytes(s->type, (size_t)d->block_len), d->block_len, d->block_len};
    struct plane f8 = {sizeof(float), 128, 128};
    struct plane half = {sizeof(uint16_t), s->group_len, group}, zero = {1, s->group_len, group};
    const void **data_of = table(to, n_expert), **scale_of = table(to, n_expert),
               **zero_of = table(to, n_expert);
    bool groups = s->type == DT_GPTQ4, f8s = s->type == DT_F8_E4M3 && s->scale;
    for (int e = 0; e < n_expert; e++) {
        data_of[e] = copy_plane(to, &data, s->data[e], n_in, rows, n_rows, cols, n_cols);
        if (f8s || groups)
            scale_of[e] =
                copy_plane(to, f8s ? &f8 : &half, s->scale[e], n_in, rows, n_rows, cols, n_cols);
        if (groups)
            zero_of[e] = copy_plane(to, &zero, s->zero[e], n_in, rows, n_rows, cols, n_cols);
    }
    s->data = (const uint8_t *const *)data_of;
    s->scale = f8s || groups ? (const void *const *)scale_of : s->scale;
    s->zero = groups ? (const uint8_t *const *)zero_of : s->zero;
    s->group_len = group;
    s->rows = 0;
    for (int i = 0; i < n_rows; i++)
        s->rows += rows[i].n;
}

static const float *cut_bias(const struct copier *to, const struct raw_weight *w,
                             const struct cut *cut, int n_out)
{
    float *out = to->alloc(to->arg, (size_t)w->n_expert * (size_t)n_out, sizeof *out), *at = out;
    struct range all = {0, w->n_out};
    for (int e = 0; e < w->n_expert; e++)
        for (int i = 0; i < (cut->n_rows ? cut->n_rows : 1); i++) {
            const struct range *r = cut->n_rows ? &cut->rows[i] : &all;
            if (!cut->no_bias)
                memcpy(at, w->bias + (size_t)e * (size_t)w->n_out + r->first,
                       (size_t)r->n * sizeof *at);
            at += r->n;
        }
    return out;
}

/* Adapters */

/* Columns `cut` of a (rank, n_in), in place of it. */
static void cut_a(struct lora_matrix *m, const struct cut *cut, size_t n_in)
{
    float *at = m->a;
    for (size_t k = 0; cut->n_cols && k < (size_t)m->rank; k++)
        for (int i = 0; i < cut->n_cols; i++) {
            size_t n = (size_t)cut->cols[i].n;
            memmove(at, m->a + k * n_in + (size_t)cut->cols[i].first, n * sizeof *at);
            at += n;
        }
}

/* Rows `cut` of a part's b, in place of them: runs ascend, so that what stays is one run of the rows
 * that the weight has now. */
static void cut_part(struct lora_part *p, const struct cut *cut)
{
    size_t rank = (size_t)p->rank;
    int first = -1, n = 0, before = 0;
    for (int i = 0; i < cut->n_rows; i++) {
        const struct range *r = &cut->rows[i];
        int from = r->first > p->first ? r->first : p->first;
        int to = r->first + r->n < p->first + p->n ? r->first + r->n : p->first + p->n;
        if (from < to) {
            first = first < 0 ? before + from - r->first : first;
            memmove(p->b + (size_t)n * rank, p->b + (size_t)(from - p->first) * rank,
                    (size_t)(to - from) * rank * sizeof *p->b);
            n += to - from;
        }
        before += r->n;
    }
    p->first = first < 0 ? 0 : first;
    p->n = n;
}

/* A router's: a part covers all rows. */
static void order_part(struct lora_part *p, const struct cut *cut)
{
    size_t rank = (size_t)p->rank;
    float *b = mem_alloc((size_t)p->n * rank * sizeof *b);
    for (int i = 0; i < p->n; i++)
        memcpy(b + (size_t)i * rank, p->b + (size_t)cut->order[i] * rank, rank * sizeof *b);
    mem_free(p->b);
    p->b = b;
}

struct lora *cut_lora(struct lora *l, const struct cut *cut)
{
    if (cut->none) {
        lora_free(l);
        return NULL;
    }
    int n_in = 0, n_out = 0;
    for (int i = 0; i < cut->n_cols; i++)
        n_in += cut->cols[i].n;
    for (int i = 0; i < cut->n_rows; i++)
        n_out += cut->rows[i].n;
    int n = cut->experts.n ? cut->experts.n : l->n_expert;
    struct lora *out = lora_new(cut->n_cols ? n_in : l->n_in, cut->n_rows ? n_out : l->n_out, n);
    for (int e = 0; e < n; e++) {
        int at = cut->experts.n ? cut->experts.first + e : e;
        struct lora_matrix *from = &l->of[cut->experts.n && cut->n_order ? cut->order[at] : at];
        out->of[e] = *from;
        *from = (struct lora_matrix){0};
        cut_a(&out->of[e], cut, (size_t)l->n_in);
        for (int i = 0; cut->n_rows && i < out->of[e].n_parts; i++)
            cut_part(&out->of[e].parts[i], cut);
        for (int i = 0; cut->n_order && !cut->experts.n && i < out->of[e].n_parts; i++)
            order_part(&out->of[e].parts[i], cut);
    }
    lora_free(l);
    return out;
}

/* The experts of w as pointers to those that `cut` takes, in its order. */
static void take_experts(const struct copier *to, struct raw_weight *w, const struct cut *cut)
{
    int first = cut->experts.first, n = cut->experts.n;
    float *bias = w->bias ? to->alloc(to->arg, (size_t)n * (size_t)w->n_out, sizeof *bias) : NULL;
    for (int i = 0; i < w->n_seg; i++) {
        struct raw_seg *s = &w->seg[i];
        const void **of[4] = {table(to, n), table(to, n), table(to, n), table(to, n)};
        for (int e = 0; e < n; e++) {
            int from = cut->n_order ? cut->order[first + e] : first + e;
            of[0][e] = s->data[from];
            of[1][e] = s->scale ? s->scale[from] : NULL;
            of[2][e] = s->zero ? s->zero[from] : NULL;
            of[3][e] = s->perm ? s->perm[from] : NULL;
        }
        s->data = (const uint8_t *const *)of[0];
        s->scale = s->scale ? (const void *const *)of[1] : NULL;
        s->zero = s->zero ? (const uint8_t *const *)of[2] : NULL;
        s->perm = s->perm ? (const int32_t *const *)of[3] : NULL;
    }
    for (int e = 0; bias && e < n; e++) {
        int from = cut->n_order ? cut->order[first + e] : first + e;
        memcpy(bias + (size_t)e * (size_t)w->n_out, w->bias + (size_t)from * (size_t)w->n_out,
               (size_t)w->n_out * sizeof *bias);
    }
    w->bias = bias;
    w->n_expert = n;
}

/* All rows of a router's weight, in the order of its experts. */
static void order_rows(const struct copier *to, struct raw_weight *w, const struct cut *cut)
{
    struct range all = {0, w->n_in}, *rows = to->alloc(to->arg, (size_t)cut->n_order, sizeof *rows);
    float *bias = w->bias ? to->alloc(to->arg, (size_t)w->n_out, sizeof *bias) : NULL;
    CHECK(w->n_seg == 1 && w->n_out == cut->n_order, "a router of %d parts", w->n_seg);
    for (int i = 0; i < cut->n_order; i++) {
        rows[i] = (struct range){cut->order[i], 1};
        if (bias)
            bias[i] = w->bias[cut->order[i]];
    }
    cut_segment(to, &w->seg[0], w->n_in, 1, rows, cut->n_order, &all, 1);
    w->bias = bias;
    w->transient = true;
}

bool cut_weight(struct raw_weight *w, const struct cut *cut,
                void *(*alloc)(void *arg, size_t count, size_t size), void *arg, struct error *err)
{
    struct copier to = {alloc, arg};
    struct range all = {0, w->n_in}, rows[CUT_RUNS];
    const struct range *cols = cut->n_cols ? cut->cols : &all;
    int n_cols = cut->n_cols ? cut->n_cols : 1, n_in = w->n_in, base = 0, n_seg = 0, n_out = 0;
    if (cut->experts.n)
        take_experts(&to, w, cut);
    else if (cut->n_order)
        order_rows(&to, w, cut);
    for (int i = 0; i < w->n_seg; i++) {
        struct raw_seg s = w->seg[i];
        int n = rows_within(cut, base, s.rows, rows), height = s.rows;
        base += s.rows;
        if (s.perm && cut->n_cols)
            return error_set(err, "columns in an order of their own (act-order) cannot be cut for "
                                  "several processes");
        if (n == 0)
            continue;
        /* Gate and up of one tensor become two: tiles of a backend hold rows of one of them. */
        int each = w->n_seg == 1 && n == 2 ? 1 : n;
        for (int k = 0; k < n; k += each) {
            struct raw_seg part = s;
            if (cut->n_cols || n > 1 || rows[0].n < height) {
                cut_segment(&to, &part, n_in, w->n_expert, rows + k, each, cols, n_cols);
                w->transient = true;
            }
            n_out += part.rows;
            w->seg[n_seg++] = part;
        }
    }
    w->n_seg = n_seg;
    if (w->bias)
        w->bias = cut_bias(&to, w, cut, n_out);
    w->n_out = n_out;
    w->n_in = 0;
    for (int i = 0; i < n_cols; i++)
        w->n_in += cols[i].n;
    return true;
}
