/* See patches.h. */
#include "vision/patches.h"
#include "base/mem.h"

#include <math.h>

/* To the nearest multiple; of two as near the even one. */
static int64_t nearest(int64_t n, int64_t unit)
{
    return (int64_t)nearbyint((double)n / (double)unit) * unit;
}

bool patches_size(const struct tower_config *t, int width, int height, int *out_width,
                  int *out_height, struct error *err)
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
        /* one feature wide: the longer side gives way */
        int64_t most = t->max_pixels / unit / unit * unit;
        w = h < unit && w > most ? most : w;
        h = w < unit && h > most ? most : h;
    } else if (w * h < t->min_pixels) {
        double grow = sqrt((double)t->min_pixels / area);
        w = (int64_t)ceil(width * grow / (double)unit) * unit;
        h = (int64_t)ceil(height * grow / (double)unit) * unit;
    }
    *out_width = (int)(w > unit ? w : unit);
    *out_height = (int)(h > unit ? h : unit);
    return true;
}

/* One patch from the image's pixels from (x, y) on. */
static void cut_patch(const struct tower_config *t, const struct image *m, int x, int y, float *to)
{
    for (int c = 0; c < 3; c++)
        for (int f = 0; f < t->frames; f++)
            for (int r = 0; r < t->patch; r++) {
                const uint8_t *from =
                    m->rgb + ((size_t)(y + r) * (size_t)m->width + (size_t)x) * 3 + c;
                for (int k = 0; k < t->patch; k++)
                    *to++ = ((float)from[3 * k] - t->mean[c] * 255) / (t->std[c] * 255);
            }
}

bool patches_make(const struct tower_config *t, const struct image *m, const atomic_bool *stop,
                  struct patches *out, struct error *err)
{
    struct image small;
    int width = 0, height = 0;
    *out = (struct patches){.width = tower_patch_values(t)};
    if (!patches_size(t, m->width, m->height, &width, &height, err) ||
        !image_resize(m, width, height, t->filter, stop, &small, err))
        return false;
    out->rows = height / t->patch;
    out->cols = width / t->patch;
    size_t n = (size_t)out->rows * (size_t)out->cols,
           bytes = n * (size_t)out->width * sizeof(float);
    out->values = mem_ask(bytes);
    if (!out->values) {
        image_free(&small);
        return error_set(err, "out of memory: %zu bytes for an image's patches", bytes);
    }
    for (int i = 0; i < (int)n; i++) {
        int row, col;
        patch_place(t, out, i, &row, &col);
        cut_patch(t, &small, col * t->patch, row * t->patch,
                  out->values + (size_t)i * (size_t)out->width);
    }
    image_free(&small);
    return true;
}

void patches_free(struct patches *p)
{
    mem_free(p->values);
    *p = (struct patches){0};
}
