/* See encoder.h. */
#include "vision/encoder.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "vision/positions.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { PAGE_LEN = 16, MAX_FEATURES = 4096 };

struct encoder {
    struct backend *be;
    struct model *model;
    struct config config;
    struct tower_config tower;
    struct positions positions;
    struct bounds bounds;
    struct kv_layer kv, *layers; /* (n_layers) all equal to kv */
    size_t kv_bytes;             /* of keys, and of values */
    pthread_mutex_t lock;
    /* (bounds.max_tokens) of a step, by the row's index */
    int32_t *index, *pages;
};

const struct tower_config *encoder_config(const struct encoder *e)
{
    return &e->tower;
}

const struct model *encoder_model(const struct encoder *e)
{
    return e->model;
}

int encoder_max_patches(const struct encoder *e)
{
    return e->bounds.max_tokens;
}

/* Sizes of steps: the largest view's patches. */
static struct bounds bounds_of(const struct encoder *e, enum dtype kv_type)
{
    int rows = plan_most_patches(&e->tower) + e->tower.class_token;
    int pages = (rows + PAGE_LEN - 1) / PAGE_LEN;
    return (struct bounds){.page_len = PAGE_LEN,
                           .n_pages = pages,
                           .k_type = kv_type ? kv_type : DT_F16,
                           .v_type = kv_type ? kv_type : DT_F16,
                           .max_tokens = rows,
                           .max_seqs = 1,
                           .max_out = 1,
                           .max_pages = pages,
                           .max_embeds = rows};
}

static bool alloc_kv(struct encoder *e, struct error *err)
{
    const struct bounds *b = &e->bounds;
    size_t wide = (size_t)e->config.n_heads * (size_t)e->config.head_dim;
    size_t values = wide * (size_t)b->n_pages * PAGE_LEN;
    e->kv_bytes = dtype_bytes(b->k_type, values);
    e->kv.k = e->be->ops->alloc(e->be, e->kv_bytes, "an image's keys", err);
    e->kv.v = e->kv.k ? e->be->ops->alloc(e->be, e->kv_bytes, "an image's values", err) : NULL;
    e->layers = mem_zalloc((size_t)e->config.n_layers, sizeof *e->layers);
    for (int i = 0; i < e->config.n_layers; i++)
        e->layers[i] = e->kv;
    return e->kv.v != NULL;
}

static bool open_all(struct encoder *e, const struct tensorfile *f,
                     const struct encoder_options *opt, struct error *err)
{
    if (!tower_load(f, &e->config, &e->tower, err))
        return false;
    if (!plan_limit(&e->tower, opt->max_features ? opt->max_features : MAX_FEATURES, err) ||
        !positions_load(f, &e->config, &e->positions, err))
        return false;
    e->be = backend_open(&opt->backend, err);
    if (!e->be)
        return false;
    if (!e->be->ops->tower)
        return error_set(err, "%s: image towers are not supported on %s", f->path,
                         e->be->ops->name);
    e->model = model_load_config(f, e->be, &e->config, NULL, opt->progress, err);
    if (!e->model)
        return false;
    e->bounds = bounds_of(e, opt->kv_type);
    e->index = mem_zalloc((size_t)e->bounds.max_tokens, sizeof *e->index);
    e->pages = mem_zalloc((size_t)e->bounds.max_pages, sizeof *e->pages);
    for (int i = 0; i < e->bounds.max_tokens; i++)
        e->index[i] = i;
    for (int i = 0; i < e->bounds.max_pages; i++)
        e->pages[i] = i;
    return alloc_kv(e, err) && e->be->ops->prepare(e->be, &e->model->net, &e->bounds, err);
}

struct encoder *encoder_open(const struct tensorfile *f, const struct encoder_options *opt,
                             struct error *err)
{
    struct encoder *e = mem_zalloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    if (open_all(e, f, opt, err))
        return e;
    encoder_close(e);
    return NULL;
}

void encoder_close(struct encoder *e)
{
    if (!e)
        return;
    if (e->be && e->kv.k)
        e->be->ops->free(e->be, e->kv.k, e->kv_bytes);
    if (e->be && e->kv.v)
        e->be->ops->free(e->be, e->kv.v, e->kv_bytes);
    model_free(e->model);
    if (e->be)
        e->be->ops->close(e->be);
    pthread_mutex_destroy(&e->lock);
    mem_free(e->layers);
    positions_free(&e->positions);
    mem_free(e->index);
    mem_free(e->pages);
    mem_free(e);
}

/* The order of a view's rows in a step: by windows, then by features, whose patches are adjacent. */
struct row_order {
    int n, n_features;
    int *row, *col;   /* (n) of patches */
    int *feature;     /* (n_features) its place in the view */
    int32_t *windows; /* (n, 2) as batch.spans; NULL = none */
};

static void order_window(const struct tower_config *t, const struct view *v, int top, int left,
                         int high, int wide, struct row_order *o)
{
    int m = t->merge, first = o->n;
    for (int y = top; y < top + high && y < v->rows; y += m)
        for (int x = left; x < left + wide && x < v->cols; x += m) {
            o->feature[o->n_features++] = y / m * (v->cols / m) + x / m;
            for (int i = 0; i < m * m; i++, o->n++) {
                o->row[o->n] = y + i / m;
                o->col[o->n] = x + i % m;
            }
        }
    for (int i = first; o->windows && i < o->n; i++) {
        o->windows[2 * i] = first;
        o->windows[2 * i + 1] = o->n;
    }
}

static bool order_init(struct row_order *o, const struct tower_config *t, const struct view *v)
{
    size_t n = (size_t)v->rows * (size_t)v->cols;
    int high = t->window ? t->window : v->rows, wide = t->window ? t->window : v->cols;
    *o = (struct row_order){.row = mem_ask(n * sizeof *o->row),
                            .col = mem_ask(n * sizeof *o->col),
                            .feature = mem_ask(n * sizeof *o->feature),
                            .windows = t->window ? mem_ask(2 * n * sizeof *o->windows) : NULL};
    if (!o->row || !o->col || !o->feature || (t->window && !o->windows))
        return false;
    for (int y = 0; y < v->rows; y += high)
        for (int x = 0; x < v->cols; x += wide)
            order_window(t, v, y, x, high, wide, o);
    return true;
}

static void order_clear(struct row_order *o)
{
    mem_free(o->row);
    mem_free(o->col);
    mem_free(o->feature);
    mem_free(o->windows);
}

/* A step's rows: each patch with its position, then the class token. */
struct step_rows {
    struct row_order order;
    int n;
    float *values;      /* (n, patch values + E) */
    const float **rows; /* (n) */
    int32_t *rope_pos;  /* (n, 3) */
    float *features;    /* (order.n_features, width) in the step's order */
};

static void fill_rows(struct step_rows *r, const struct encoder *e, const struct view *v,
                      const float *patches)
{
    size_t D = (size_t)tower_patch_values(&e->tower), E = (size_t)e->config.n_embd;
    struct position_axes axes;
    positions_begin(&e->tower, v, &axes);
    for (int i = 0; i < r->n; i++) {
        float *to = r->values + (size_t)i * (D + E);
        int32_t *pos = r->rope_pos + (ptrdiff_t)3 * i;
        memset(pos, 0, 3 * sizeof *pos);
        r->rows[i] = to;
        if (i == r->order.n) {
            memset(to, 0, D * sizeof *to);
            memcpy(to + D, e->positions.class_row, E * sizeof *to);
            continue;
        }
        pos[1] = r->order.row[i];
        pos[2] = r->order.col[i];
        memcpy(to, patches + (size_t)(pos[1] * v->cols + pos[2]) * D, D * sizeof *to);
        positions_at(&e->tower, &e->positions, &axes, pos[1], pos[2], to + D);
    }
    positions_end(&axes);
}

static bool rows_init(struct step_rows *r, const struct encoder *e, const struct view *v,
                      const float *patches, int width, struct error *err)
{
    const struct tower_config *t = &e->tower;
    *r = (struct step_rows){.n = v->rows * v->cols + t->class_token};
    size_t n = (size_t)r->n, each = (size_t)tower_patch_values(t) + (size_t)e->config.n_embd;
    size_t bytes = n * each * sizeof(float),
           features = (size_t)plan_view_features(t, v) * (size_t)width * sizeof(float);
    bool ok = order_init(&r->order, t, v);
    r->values = mem_ask(bytes);
    r->rows = mem_ask(n * sizeof *r->rows);
    r->rope_pos = mem_ask(3 * n * sizeof *r->rope_pos);
    r->features = mem_ask(features);
    if (!ok || !r->values || !r->rows || !r->rope_pos || !r->features)
        return error_set(err, "out of memory: %zu bytes for an image's patches", bytes + features);
    fill_rows(r, e, v, patches);
    return true;
}

static void rows_clear(struct step_rows *r)
{
    order_clear(&r->order);
    mem_free(r->values);
    mem_free((void *)(uintptr_t)r->rows);
    mem_free(r->rope_pos);
    mem_free(r->features);
}

static bool run_step(struct encoder *e, const struct step_rows *r, const atomic_bool *stop,
                     struct error *err)
{
    int n = r->n;
    const struct batch b = {.n_tokens = n,
                            .n_seqs = 1,
                            .max_pages = e->bounds.max_pages,
                            .tokens = e->index, /* no vocabulary: embeds[i] */
                            .pos = e->index,
                            .rope_pos = r->rope_pos,
                            .embeds = r->rows,
                            .n_embeds = n,
                            .spans = r->order.windows,
                            .slot = e->index,
                            .q_start = (int32_t[]){0, n},
                            .kv_len = (int32_t[]){n},
                            .pages = e->pages,
                            .out_rows = e->index,
                            .kv = e->layers};
    e->model->stop = stop;
    forward(e->model, &b, 0);
    e->model->stop = NULL;
    if (!e->be->ops->end(e->be, NULL, err))
        return false;
    if (stop && atomic_load(stop))
        return error_set(err, "cancelled");
    e->be->ops->tower->features(e->be, r->order.n_features, r->features);
    return true;
}

/* Encodes one view; its features go to `to`, row by row. */
static bool run_view(struct encoder *e, const struct view *v, const float *patches, int width,
                     const atomic_bool *stop, float *to, struct error *err)
{
    struct step_rows r = {0};
    if (v->rows * v->cols + e->tower.class_token > e->bounds.max_tokens)
        return error_set(err, "an image of %d patches; at most %d", v->rows * v->cols,
                         e->bounds.max_tokens);
    bool ok = rows_init(&r, e, v, patches, width, err) && run_step(e, &r, stop, err);
    for (int i = 0; ok && i < r.order.n_features; i++)
        memcpy(to + (size_t)r.order.feature[i] * (size_t)width,
               r.features + (size_t)i * (size_t)width, (size_t)width * sizeof *to);
    rows_clear(&r);
    return ok;
}

bool encoder_run(struct encoder *e, const struct patches *p, const atomic_bool *stop,
                 struct features *out, struct error *err)
{
    const struct tower_config *t = &e->tower;
    const float *patches = p->values;
    *out = (struct features){
        .plan = p->plan, .n = plan_features(t, &p->plan), .width = t->n_out * (1 + t->n_levels)};
    size_t width = (size_t)out->width, bytes = (size_t)out->n * width * sizeof(float);
    CHECK(p->width == tower_patch_values(t), "patches of %d values", p->width);
    out->values = mem_ask(bytes);
    bool ok =
        out->values || error_set(err, "out of memory: %zu bytes for an image's features", bytes);
    float *to = out->values;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; ok && i < p->plan.n_views; i++) {
        const struct view *v = &p->plan.views[i];
        ok = run_view(e, v, patches, out->width, stop, to, err);
        patches += (size_t)v->rows * (size_t)v->cols * (size_t)p->width;
        to += (size_t)plan_view_features(t, v) * width;
    }
    pthread_mutex_unlock(&e->lock);
    if (!ok)
        features_free(out);
    return ok;
}

void features_free(struct features *f)
{
    mem_free(f->values);
    *f = (struct features){0};
}

void image_positions(const struct image_span *images, int n_images, int n_tokens, int32_t *pos)
{
    int32_t next = 0;
    for (int i = 0, k = 0; i < n_tokens; i++, pos += 3) {
        const struct image_span *m = k < n_images ? &images[k] : NULL;
        bool in_image = m && i >= m->at;
        int at = in_image ? i - m->at : 0;
        pos[0] = next;
        pos[1] = next + (in_image ? at / m->cols : 0);
        pos[2] = next + (in_image ? at % m->cols : 0);
        if (!in_image) {
            next++;
        } else if (at == m->rows * m->cols - 1) {
            next += m->rows > m->cols ? m->rows : m->cols;
            k++;
        }
    }
}
