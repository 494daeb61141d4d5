/* See patches.h. */
#include "vision/patches.h"
#include "base/mem.h"
#include "vision/family.h"

#include <string.h>

static void patches_init(const struct tower_config *t, const struct image_plan *plan,
                         struct patches *out)
{
    *out = (struct patches){.tower = t, .plan = *plan, .width = tower_patch_values(t)};
    for (int i = 0; i < plan->n_views; i++)
        out->n += plan->views[i].rows * plan->views[i].cols;
}

static bool make_values(struct patches *p, struct error *err)
{
    size_t bytes = (size_t)p->n * (size_t)p->width * sizeof(float);
    p->values = mem_ask(bytes);
    return p->values || error_set(err, "out of memory: %zu bytes for an image's patches", bytes);
}

/* The index of channel c's value at (row, column) in a patch. Frames follow each other. */
static size_t place_in_patch(const struct tower_config *t, int c, int row, int col)
{
    int P = t->patch;
    return (size_t)(t->channels_last ? (row * P + col) * 3 + c
                                     : (c * t->frames * P + row) * P + col);
}

void patches_form(const struct tower_config *t, struct pixel_form *out)
{
    *out = (struct pixel_form){
        .side = t->patch, .frames = t->frames, .channels_last = t->channels_last};
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < 256; i++)
            out->values[c][i] = ((float)i - t->mean[c] * 255) / (t->std[c] * 255);
}

/* One patch: the image's pixels at (x, y), 0 where it ends. */
static void cut_patch(const struct tower_config *t, const struct pixel_form *form,
                      const struct image *m, int x, int y, float *to)
{
    int P = t->patch, n = m->width - x < P ? m->width - x : P;
    size_t frame = (size_t)P * (size_t)P;
    CHECK(m->rgb, "an image without pixels");
    for (int r = 0; r < P; r++) {
        bool in = y + r < m->height && n > 0;
        const uint8_t *row =
            in ? m->rgb + ((size_t)(y + r) * (size_t)m->width + (size_t)x) * 3 : NULL;
        for (int c = 0; c < 3; c++) {
            const float *of = form->values[c];
            float *at = to + place_in_patch(t, c, r, 0);
            size_t step = t->channels_last ? 3 : 1;
            for (int k = 0; k < P; k++)
                at[(size_t)k * step] = of[in && k < n ? row[3 * k + c] : 0];
        }
    }
    for (int c = 0; c < 3 && t->frames > 1; c++) /* channels_last has one frame */
        for (int f = 1; f < t->frames; f++)
            memcpy(to + place_in_patch(t, c, 0, 0) + (size_t)f * frame,
                   to + place_in_patch(t, c, 0, 0), frame * sizeof *to);
}

static bool resize_all(const struct tower_config *t, struct image *m, const struct image_plan *plan,
                       const atomic_bool *stop, struct image *sizes, struct error *err)
{
    const struct plan_size *only = plan->sizes;
    if (plan->n_sizes == 1 && only->width == m->width && only->height == m->height) {
        sizes[0] = *m;
        m->rgb = NULL;
        return true;
    }
    for (int i = 0; i < plan->n_sizes; i++) {
        const struct plan_size *s = &plan->sizes[i];
        if (!image_resize(s->from < 0 ? m : &sizes[s->from], s->width, s->height, t->filter, stop,
                          &sizes[i], err))
            return false;
    }
    return true;
}

bool patches_make(const struct tower_config *t, struct image *m, const atomic_bool *stop,
                  struct patches *out, struct error *err)
{
    struct image_plan plan;
    *out = (struct patches){0};
    if (!plan_image(t, m->width, m->height, &plan, err))
        return false;
    patches_init(t, &plan, out);
    out->form = mem_alloc(sizeof *out->form);
    patches_form(t, out->form);
    return resize_all(t, m, &plan, stop, out->sizes, err);
}

void patches_row(const struct patches *p, int view, int row, int col, float *to)
{
    const struct view *v = &p->plan.views[view];
    if (!p->values) {
        cut_patch(p->tower, p->form, &p->sizes[v->size], v->x + col * p->tower->patch,
                  v->y + row * p->tower->patch, to);
        return;
    }
    size_t at = (size_t)(row * v->cols + col);
    for (int i = 0; i < view; i++)
        at += (size_t)p->plan.views[i].rows * (size_t)p->plan.views[i].cols;
    memcpy(to, p->values + at * (size_t)p->width, (size_t)p->width * sizeof *to);
}

size_t patch_bytes(const struct tower_config *t)
{
    return 3 * (size_t)t->patch * (size_t)t->patch;
}

void patches_row_bytes(const struct patches *p, int view, int row, int col, uint8_t *to)
{
    const struct view *v = &p->plan.views[view];
    const struct image *m = &p->sizes[v->size];
    int P = p->tower->patch, x = v->x + col * P, y = v->y + row * P;
    int n = m->width - x < P ? m->width - x : P, wide = 3 * P;
    CHECK(m->rgb, "an image without pixels");
    for (int r = 0; r < P; r++, to += wide) {
        int in = y + r < m->height && n > 0 ? 3 * n : 0;
        if (in)
            memcpy(to, m->rgb + ((size_t)(y + r) * (size_t)m->width + (size_t)x) * 3, (size_t)in);
        memset(to + in, 0, (size_t)(wide - in));
    }
}

bool patches_cut(struct patches *p, struct error *err)
{
    float *values = NULL;
    struct patches cut = *p;
    if (p->values)
        return true;
    if (!make_values(&cut, err))
        return false;
    values = cut.values;
    for (int i = 0; i < p->plan.n_views; i++)
        for (int r = 0; r < p->plan.views[i].rows; r++)
            for (int c = 0; c < p->plan.views[i].cols; c++, values += p->width)
                patches_row(p, i, r, c, values);
    p->values = cut.values;
    return true;
}

void patches_free(struct patches *p)
{
    for (int i = 0; i < PLAN_MAX_SIZES; i++)
        image_free(&p->sizes[i]);
    mem_free(p->form);
    mem_free(p->values);
    *p = (struct patches){0};
}

/* Takes a record (patches, values) of all images; the patches of a feature are adjacent. */
static void take_groups(const struct tower_config *t, const float *from, struct patches *out)
{
    const struct view *v = &out->plan.views[0];
    int m = t->merge, each = m * m, across = v->cols / m;
    for (int i = 0; i < out->n; i++) {
        int row = i / each / across * m + i % each / m, col = i / each % across * m + i % m;
        memcpy(out->values + (size_t)(row * v->cols + col) * (size_t)out->width,
               from + (size_t)i * (size_t)out->width, (size_t)out->width * sizeof *from);
    }
}

/* Takes one view from values (3, height, width) with row stride `stride` and channel stride `plane`. */
static void take_view(const struct tower_config *t, const struct view *v, const float *from,
                      size_t stride, size_t plane, float *to)
{
    int P = t->patch;
    for (int p = 0; p < v->rows * v->cols; p++, to += tower_patch_values(t))
        for (int c = 0; c < 3; c++)
            for (int r = 0; r < P; r++)
                for (int k = 0; k < P; k++)
                    to[place_in_patch(t, c, r, k)] =
                        from[(size_t)c * plane + (size_t)(p / v->cols * P + r) * stride +
                             (size_t)(p % v->cols * P + k)];
}

/* Takes a record (3, patch, patches * patch): all patches of all images in one row. */
static void take_strip(const struct tower_config *t, const struct pixel_record *r,
                       struct patches *out)
{
    size_t stride = (size_t)r->dims[r->n_dims - 1], plane = stride * (size_t)t->patch;
    const struct view one = {.rows = 1, .cols = out->n};
    take_view(t, &one, r->values + (size_t)r->at * (size_t)t->patch, stride, plane, out->values);
}

/* Takes n values whose patches are (row, column, channel). */
static void take_channels_last(const struct tower_config *t, const float *from, size_t n, float *to)
{
    size_t width = (size_t)tower_patch_values(t), P = (size_t)t->patch;
    for (size_t i = 0; i < n; i++) {
        size_t in = i % width, c = in % 3, at = in / 3;
        to[i - in + place_in_patch(t, (int)c, (int)(at / P), (int)(at % P))] = from[i];
    }
}

bool patches_take(const struct tower_config *t, const struct image_plan *plan,
                  struct pixel_record *r, struct patches *out)
{
    const int *d = r->dims;
    int last = r->n_dims - 1, P = t->patch, width = tower_patch_values(t), views = plan->n_views;
    patches_init(t, plan, out);
    if (!make_values(out, NULL))
        return false;
    float *to = out->values;
    if (r->n_dims == 2 && d[1] == width && out->n <= d[0] - r->at) {
        take_groups(t, r->values + (size_t)r->at * (size_t)width, out);
        r->at += out->n;
    } else if (r->n_dims == 4 && d[0] == 1 && d[2] == P && d[3] != P && d[1] == 3 &&
               out->n <= d[3] / P - r->at) {
        take_strip(t, r, out);
        r->at += out->n;
    } else if (r->n_dims == 4 && d[1] == 3 && d[2] == P && d[3] == P && out->n <= d[0] - r->at) {
        memcpy(to, r->values + (size_t)r->at * (size_t)width,
               (size_t)out->n * (size_t)width * sizeof *to);
        r->at += out->n;
    } else if (r->n_dims == 3 && d[2] == width && views <= d[0] - r->at) {
        for (int i = 0; i < views; i++) { /* padded to the longest */
            size_t n = (size_t)(plan->views[i].rows * plan->views[i].cols) * (size_t)width;
            if (n > (size_t)d[1] * (size_t)width)
                return false;
            take_channels_last(t, r->values + (size_t)(r->at + i) * (size_t)d[1] * (size_t)width, n,
                               to);
            to += n;
        }
        r->at += views;
    } else if (r->n_dims >= 4 &&
               d[last - 2] == 3) { /* views, with a first dim for prompts or without */
        int of = r->n_dims == 5 ? d[1] : d[0];
        size_t stride = (size_t)d[last], plane = stride * (size_t)d[last - 1];
        if (views > of - r->at || (r->n_dims == 5 && d[0] != 1))
            return false;
        for (int i = 0; i < views; i++) {
            const struct view *v = &plan->views[i];
            if (v->rows * P > d[last - 1] || v->cols * P > d[last])
                return false;
            take_view(t, v, r->values + (size_t)(r->at + i) * 3 * plane, stride, plane, to);
            to += (size_t)(v->rows * v->cols) * (size_t)width;
        }
        r->at += views;
    } else {
        return false;
    }
    for (size_t i = 0; t->scales_itself && i < (size_t)out->n * (size_t)width; i++)
        out->values[i] = (out->values[i] - 0.5f) / 0.5f;
    return true;
}
