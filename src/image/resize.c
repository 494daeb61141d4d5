/* See resize.h. Along an axis, an output pixel is a weighted sum of the input pixels under its filter, which is as wide as
 * the reduction. */
#include "image/resize.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

static double sinc(double x)
{
    double y = x * M_PI;
    return x == 0 ? 1 : sin(y) / y;
}

static double weight_at(enum image_filter filter, double x)
{
    const double a = -0.5; /* of the cubic */
    x = fabs(x);
    if (filter == IMAGE_BILINEAR)
        return x < 1 ? 1 - x : 0;
    if (filter == IMAGE_LANCZOS)
        return x < 3 ? sinc(x) * sinc(x / 3) : 0;
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/* The weights of an axis: output i is the sum of weight[i * most + k] * input[first[i] + k], k < n[i]. */
struct taps {
    int *first, *n; /* (out) */
    float *weight;  /* (out, most) */
    int most;
};

static void taps_clear(struct taps *t)
{
    mem_free(t->first);
    mem_free(t->n);
    mem_free(t->weight);
}

static bool taps_init(struct taps *t, int in, int out, enum image_filter filter)
{
    static const double reach[] = {1, 2, 3};
    double step = (double)in / out, wide = step > 1 ? step : 1, support = reach[filter] * wide;
    int most = (int)ceil(support) * 2 + 1;
    most = most < in ? most : in;
    *t = (struct taps){mem_ask((size_t)out * sizeof(int)), mem_ask((size_t)out * sizeof(int)),
                       mem_ask((size_t)out * (size_t)most * sizeof(float)), most};
    if (!t->first || !t->n || !t->weight)
        return false;
    for (int i = 0; i < out; i++) {
        double centre = (i + 0.5) * step, sum = 0;
        int first = (int)(centre - support + 0.5), last = (int)(centre + support + 0.5);
        first = first > 0 ? first : 0;
        last = last < in ? last : in;
        last = last - first > most ? first + most : last;
        float *w = t->weight + (size_t)i * (size_t)most;
        for (int k = first; k < last; k++)
            sum += weight_at(filter, (k - centre + 0.5) / wide);
        for (int k = first; k < last; k++)
            w[k - first] = (float)(weight_at(filter, (k - centre + 0.5) / wide) / sum);
        t->first[i] = first;
        t->n[i] = last - first;
    }
    return true;
}

static uint8_t to_byte(float v)
{
    return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v + 0.5f);
}

/* A pixel as floats: its channels, then a value that is not used. */
typedef float pixel __attribute__((vector_size(16)));

/* The n pixels of a row as floats. */
static void widen_row(const uint8_t *in, pixel *out, int n)
{
    for (int i = 0; i < n; i++, in += 3)
        out[i] = (pixel){in[0], in[1], in[2], 0};
}

/* Resizes one input row to `width` pixels. */
static void resize_row(const struct taps *t, const pixel *in, uint8_t *out, int width)
{
    for (int x = 0; x < width; x++, out += 3) {
        const float *w = t->weight + (size_t)x * (size_t)t->most;
        const pixel *p = in + t->first[x];
        pixel sum = {0};
        for (int k = 0; k < t->n[x]; k++)
            sum += w[k] * p[k];
        for (int c = 0; c < 3; c++)
            out[c] = to_byte(sum[c]);
    }
}

/* Row y of the output from the rows of `in`, each of n values. sum (n): scratch. */
static void mix_rows(const struct taps *t, int y, const uint8_t *in, size_t n, float *sum,
                     uint8_t *out)
{
    const float *w = t->weight + (size_t)y * (size_t)t->most;
    memset(sum, 0, n * sizeof *sum);
    for (int k = 0; k < t->n[y]; k++) {
        const uint8_t *row = in + (size_t)(t->first[y] + k) * n;
        for (size_t i = 0; i < n; i++)
            sum[i] += w[k] * row[i];
    }
    for (size_t i = 0; i < n; i++)
        out[i] = to_byte(sum[i]);
}

static bool stopped(const atomic_bool *stop, struct error *err)
{
    return stop && atomic_load_explicit(stop, memory_order_relaxed) && !error_set(err, "cancelled");
}

static bool copy_image(const struct image *in, struct image *out, struct error *err)
{
    size_t bytes = (size_t)in->width * 3 * (size_t)in->height;
    *out = (struct image){in->width, in->height, mem_ask(bytes)};
    if (!out->rgb)
        return error_set(err, "out of memory: %zu bytes for pixels", bytes);
    memcpy(out->rgb, in->rgb, bytes);
    return true;
}

bool image_resize(const struct image *in, int width, int height, enum image_filter filter,
                  const atomic_bool *stop, struct image *out, struct error *err)
{
    struct taps across = {0}, down = {0};
    size_t row = (size_t)width * 3, old = (size_t)in->width * 3;
    if (width == in->width && height == in->height)
        return copy_image(in, out, err);
    uint8_t *narrow = mem_ask(row * (size_t)in->height + 1);
    float *sum = mem_ask(row * sizeof *sum);
    pixel *wide = mem_ask((size_t)in->width * sizeof *wide);
    uint8_t *rgb = mem_ask(row * (size_t)height);
    bool ok = narrow && sum && wide && rgb && taps_init(&across, in->width, width, filter) &&
              taps_init(&down, in->height, height, filter);
    if (!ok)
        error_set(err, "out of memory: resizing to %d x %d", width, height);
    for (int y = 0; ok && y < in->height; y++) {
        ok = !stopped(stop, err);
        if (width == in->width)
            memcpy(narrow + (size_t)y * row, in->rgb + (size_t)y * old, row);
        else
            widen_row(in->rgb + (size_t)y * old, wide, in->width);
        if (width != in->width)
            resize_row(&across, wide, narrow + (size_t)y * row, width);
    }
    for (int y = 0; ok && y < height; y++) {
        ok = !stopped(stop, err);
        if (height == in->height)
            memcpy(rgb + (size_t)y * row, narrow + (size_t)y * row, row);
        else
            mix_rows(&down, y, narrow, row, sum, rgb + (size_t)y * row);
    }
    taps_clear(&across);
    taps_clear(&down);
    mem_free(narrow);
    mem_free(wide);
    mem_free(sum);
    *out = (struct image){width, height, rgb};
    if (!ok)
        image_free(out);
    return ok;
}
