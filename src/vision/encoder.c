/* See encoder.h. */
#include "vision/encoder.h"
#include "backend/backend.h"
#include "base/mem.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { PAGE_LEN = 16, MAX_FEATURES = 4096 };

struct encoder {
    struct backend *be;
    struct model *model;
    struct config config;
    struct tower_config tower;
    float *positions; /* (grid * grid, E) */
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

/* Limits the area of an image to n features. */
static void limit_area(struct tower_config *t, int n)
{
    int64_t feature = (int64_t)t->patch * t->merge * t->patch * t->merge, most = feature * n;
    if (t->max_pixels <= most)
        return;
    t->max_pixels = most;
    if (t->min_pixels >
        most / 4) /* room between the bounds for sizes in multiples of a feature's */
        t->min_pixels = most / 4;
}

/* Sizes of steps: the largest image's patches. */
static struct bounds bounds_of(const struct encoder *e, enum dtype kv_type)
{
    const struct tower_config *t = &e->tower;
    double side = t->patch * t->merge, least = (double)t->min_pixels;
    /* A small image is made larger in whole features, also where it is 200 times as long as wide. */
    double grown = least + side * (sqrt(least / 200) + sqrt(least * 200)) + side * side;
    double most = grown > (double)t->max_pixels ? grown : (double)t->max_pixels;
    int unit = t->merge * t->merge, patches = ((int)(most / (side * side)) + 1) * unit;
    int pages = (patches + PAGE_LEN - 1) / PAGE_LEN;
    return (struct bounds){.page_len = PAGE_LEN,
                           .n_pages = pages,
                           .k_type = kv_type ? kv_type : DT_F16,
                           .v_type = kv_type ? kv_type : DT_F16,
                           .max_tokens = patches,
                           .max_seqs = 1,
                           .max_out = 1,
                           .max_pages = pages,
                           .max_embeds = patches};
}

static bool alloc_kv(struct encoder *e, struct error *err)
{
    const struct bounds *b = &e->bounds;
    size_t values = (size_t)e->config.n_embd * (size_t)b->n_pages * PAGE_LEN;
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
    e->positions = tower_positions(f, &e->config, err);
    e->be = e->positions ? backend_open(&opt->backend, err) : NULL;
    if (!e->be)
        return false;
    if (!e->be->ops->tower)
        return error_set(err, "%s: image towers are not supported on %s", f->path,
                         e->be->ops->name);
    e->model = model_load_config(f, e->be, &e->config, NULL, opt->progress, err);
    if (!e->model)
        return false;
    limit_area(&e->tower, opt->max_features ? opt->max_features : MAX_FEATURES);
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
    mem_free(e->positions);
    mem_free(e->index);
    mem_free(e->pages);
    mem_free(e);
}

/* The table cells around place i of n along an axis, and the weight of the second. The ends of the grid are the ends of
 * the table. */
static float around(int i, int n, int grid, int *first, int *second)
{
    float step = n > 1 ? (float)(grid - 1) / (float)(n - 1) : 0;
    float at =
        i < n / 2 || n == 1 ? step * (float)i : (float)(grid - 1) - step * (float)(n - 1 - i);
    *first = (int)at;
    *second = *first + 1 < grid ? *first + 1 : *first;
    return at - (float)*first;
}

/* q (E) = the table of positions at a patch's place, bilinear. */
static void position_at(const struct encoder *e, const struct patches *p, int row, int col,
                        float *q)
{
    int grid = e->tower.grid, E = e->config.n_embd, top, bottom, left, right;
    float y = around(row, p->rows, grid, &top, &bottom);
    float x = around(col, p->cols, grid, &left, &right);
    const int cells[4] = {top * grid + left, top * grid + right, bottom * grid + left,
                          bottom * grid + right};
    const float weights[4] = {(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x};
    memset(q, 0, (size_t)E * sizeof *q);
    for (int k = 0; k < 4; k++) {
        const float *from = e->positions + (size_t)cells[k] * (size_t)E;
        for (int i = 0; i < E; i++)
            q[i] += weights[k] * from[i];
    }
}

/* A step's rows: each patch with its position. */
struct step_rows {
    float *values;      /* (n, patch values + E) */
    const float **rows; /* (n) */
    int32_t *rope_pos;  /* (n, 3) */
};

static bool rows_init(struct step_rows *r, const struct encoder *e, const struct patches *p,
                      struct error *err)
{
    size_t n = (size_t)p->rows * (size_t)p->cols, D = (size_t)p->width;
    size_t width = D + (size_t)e->config.n_embd, bytes = n * width * sizeof(float);
    *r = (struct step_rows){mem_ask(bytes), mem_ask(n * sizeof *r->rows),
                            mem_ask(3 * n * sizeof *r->rope_pos)};
    if (!r->values || !r->rows || !r->rope_pos)
        return error_set(err, "out of memory: %zu bytes for an image's patches", bytes);
    for (size_t i = 0; i < n; i++) {
        float *to = r->values + i * width;
        int row, col;
        patch_place(&e->tower, p, (int)i, &row, &col);
        memcpy(to, p->values + i * D, D * sizeof *to);
        position_at(e, p, row, col, to + D);
        memcpy(r->rope_pos + 3 * i, (int32_t[]){0, row, col}, 3 * sizeof(int32_t));
        r->rows[i] = to;
    }
    return true;
}

static void rows_clear(struct step_rows *r)
{
    mem_free(r->values);
    mem_free((void *)(uintptr_t)r->rows);
    mem_free(r->rope_pos);
}

static bool features_new(const struct encoder *e, const struct patches *p, struct features *out,
                         struct error *err)
{
    const struct tower_config *t = &e->tower;
    *out = (struct features){.rows = p->rows / t->merge,
                             .cols = p->cols / t->merge,
                             .width = t->n_out * (1 + t->n_levels)};
    out->n = out->rows * out->cols;
    size_t bytes = (size_t)out->n * (size_t)out->width * sizeof(float);
    out->values = mem_ask(bytes);
    return out->values || error_set(err, "out of memory: %zu bytes for an image's features", bytes);
}

static bool run_step(struct encoder *e, const struct step_rows *r, int n, const atomic_bool *stop,
                     struct features *out, struct error *err)
{
    const struct batch b = {.n_tokens = n,
                            .n_seqs = 1,
                            .max_pages = e->bounds.max_pages,
                            .tokens = e->index, /* no vocabulary: embeds[i] */
                            .pos = e->index,
                            .rope_pos = r->rope_pos,
                            .embeds = r->rows,
                            .n_embeds = n,
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
    e->be->ops->tower->features(e->be, out->n, out->values);
    return true;
}

bool encoder_run(struct encoder *e, const struct patches *p, const atomic_bool *stop,
                 struct features *out, struct error *err)
{
    struct step_rows r = {0};
    int n = p->rows * p->cols;
    *out = (struct features){0};
    CHECK(p->width == tower_patch_values(&e->tower), "patches of %d values", p->width);
    if (n > e->bounds.max_tokens)
        return error_set(err, "an image of %d patches; at most %d", n, e->bounds.max_tokens);
    bool ok = rows_init(&r, e, p, err) && features_new(e, p, out, err);
    if (ok) {
        pthread_mutex_lock(&e->lock);
        ok = run_step(e, &r, n, stop, out, err);
        pthread_mutex_unlock(&e->lock);
    }
    rows_clear(&r);
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
