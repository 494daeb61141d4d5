/* See image_plan.h. */
#include "vision/image_plan.h"
#include "base/mem.h"
#include "vision/family.h"

#include <math.h>

bool plan_image(const struct tower_config *t, int width, int height, struct image_plan *out,
                struct error *err)
{
    *out = (struct image_plan){0};
    if (!t->family->plan(t, width, height, out, err))
        return false;
    CHECK(out->n_views > 0, "an image without views");
    return true;
}

int plan_add_size(struct image_plan *p, int from, int width, int height)
{
    CHECK(p->n_sizes < PLAN_MAX_SIZES, "%d sizes of an image", p->n_sizes);
    p->sizes[p->n_sizes] = (struct plan_size){from, width, height};
    return p->n_sizes++;
}

void plan_add_view(const struct tower_config *t, struct image_plan *p, int size, int x, int y,
                   int width, int height)
{
    int unit = t->patch * t->merge;
    CHECK(p->n_views < PLAN_MAX_VIEWS, "%d views of an image", p->n_views);
    p->views[p->n_views++] = (struct view){.size = size,
                                           .x = x,
                                           .y = y,
                                           .rows = (height + unit - 1) / unit * t->merge,
                                           .cols = (width + unit - 1) / unit * t->merge};
}

void plan_whole(const struct tower_config *t, struct image_plan *p, int width, int height)
{
    plan_add_view(t, p, plan_add_size(p, -1, width, height), 0, 0, width, height);
}

int plan_view_features(const struct tower_config *t, const struct view *v)
{
    return v->rows / t->merge * (v->cols / t->merge);
}

int plan_features(const struct tower_config *t, const struct image_plan *p)
{
    int n = 0;
    for (int i = 0; i < p->n_views; i++)
        n += plan_view_features(t, &p->views[i]);
    return n;
}

int plan_most_patches(const struct tower_config *t)
{
    return t->family->most(t);
}

bool plan_limit(struct tower_config *t, int n, struct error *err)
{
    if (t->family->limit(t, n))
        return true;
    struct image_plan *p = mem_zalloc(1, sizeof *p);
    bool ok = plan_image(t, t->side, t->side, p, err);
    int features = ok ? plan_features(t, p) : 0;
    mem_free(p);
    return ok && (features <= n ||
                  error_set(err, "images of this model have %d tokens; at most %d are allowed",
                            features, n));
}

const char *plan_mark(const struct tower_config *t)
{
    return t->family->feature;
}

void plan_text(const struct tower_config *t, const struct image_plan *p, int index, struct buf *out)
{
    const struct tower_family *f = t->family;
    if (f->text) {
        f->text(t, p, index, out);
        return;
    }
    buf_adds(out, f->begin ? f->begin : "");
    for (int i = 0; i < plan_n_runs(t, p); i++)
        buf_adds(out, f->feature);
    buf_adds(out, f->end ? f->end : "");
}

int plan_n_runs(const struct tower_config *t, const struct image_plan *p)
{
    return t->family->row_runs ? p->views[0].rows / t->merge : p->n_views;
}

int plan_run_length(const struct tower_config *t, const struct image_plan *p, int i)
{
    return t->family->row_runs ? p->views[0].cols / t->merge : plan_view_features(t, &p->views[i]);
}

void plan_best_tiles(const struct tower_config *t, int width, int height, int side, int *cols,
                     int *rows)
{
    double ratio = (double)width / height, area = (double)width * height, best = INFINITY;
    *cols = *rows = 1;
    for (int n = t->min_tiles; n <= t->max_tiles; n++)
        for (int w = 1; w <= n; w++) {
            if (n % w)
                continue;
            int h = n / w;
            double off = fabs(ratio - (double)w / h);
            if (off < best || (off == best && area > 0.5 * side * side * n)) {
                best = off;
                *cols = w;
                *rows = h;
            }
        }
}

/* Rounds to the nearest multiple of `unit`; a tie goes to the even one. */
static int64_t nearest(int64_t n, int64_t unit)
{
    return (int64_t)nearbyint((double)n / (double)unit) * unit;
}

/* The image keeps its ratio. Its sides become multiples of a feature's, and its area lies between min_pixels and
 * max_pixels. */
bool plan_keep_ratio(const struct tower_config *t, int width, int height, struct image_plan *out,
                     struct error *err)
{
    enum { MOST_RATIO = 200 };
    int64_t unit = (int64_t)t->patch * t->merge, w = nearest(width, unit),
            h = nearest(height, unit);
    int longer = width > height ? width : height, shorter = width + height - longer;
    double area = (double)width * height;
    if (longer > (int64_t)MOST_RATIO * shorter)
        return error_set(err, "an image of %d x %d: one side is more than %d times the other",
                         width, height, MOST_RATIO);
    if (w * h > t->max_pixels) {
        double shrink = sqrt(area / (double)t->max_pixels);
        w = (int64_t)floor(width / shrink / (double)unit) * unit;
        h = (int64_t)floor(height / shrink / (double)unit) * unit;
        /* at one feature wide, the longer side is limited instead */
        int64_t most = t->max_pixels / unit / unit * unit;
        w = h < unit && w > most ? most : w;
        h = w < unit && h > most ? most : h;
    } else if (w * h < t->min_pixels) {
        double grow = sqrt((double)t->min_pixels / area);
        w = (int64_t)ceil(width * grow / (double)unit) * unit;
        h = (int64_t)ceil(height * grow / (double)unit) * unit;
    }
    plan_whole(t, out, (int)(w > unit ? w : unit), (int)(h > unit ? h : unit));
    return true;
}
