/* Detects the format by its first bytes, checks bounds, applies orientation and a white background. See image.h. */
#include "image/image_int.h"
#include "base/mem.h"

#include <string.h>

static const struct format {
    const char *name;
    bool (*read)(const struct image_source *s, struct raster *out);
    const char *magic;
    size_t at, n; /* magic (n) is at byte `at` */
} formats[] = {
    {"PNG", png_read_raster, "\x89PNG\r\n\x1a\n", 0, 8},
    {"JPEG", jpeg_read_raster, "\xff\xd8\xff", 0, 3},
    {"WebP", webp_read_raster, "WEBP", 8, 4},
    {"GIF", gif_read_raster, "GIF8", 0, 4},
    {"BMP", bmp_read_raster, "BM", 0, 2},
};

static const struct format *find_format(const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const struct format *f = &formats[i];
        if (n >= f->at + f->n && !memcmp(bytes + f->at, f->magic, f->n))
            return f;
    }
    return NULL;
}

bool image_check_stop(const struct image_source *s)
{
    return image_stopped(s) && !error_set(s->err, "cancelled");
}

bool raster_new(const struct image_source *s, int64_t width, int64_t height, struct raster *out)
{
    if (width < 1 || height < 1 || width > IMAGE_MAX_SIDE || height > IMAGE_MAX_SIDE)
        return error_set(s->err, "a size of %lld x %lld", (long long)width, (long long)height);
    if (width * height > s->max_pixels)
        return error_set(s->err, "%lld x %lld pixels; at most %lld pixels are accepted",
                         (long long)width, (long long)height, (long long)s->max_pixels);
    size_t bytes = (size_t)(width * height) * 4;
    *out = (struct raster){
        .width = (int)width, .height = (int)height, .channels = 4, .rgba = mem_ask(bytes)};
    if (!out->rgba)
        return error_set(s->err, "out of memory: %zu bytes for pixels", bytes);
    mem_huge_pages(out->rgba, bytes);
    memset(out->rgba, 0, bytes);
    return true;
}

/* The raster's pixel for (x, y) of the upright image. */
static const uint8_t *pixel_of(const struct raster *r, int x, int y)
{
    int w = r->width - 1, h = r->height - 1, o = r->orientation;
    int u = o >= 5 ? y : x, v = o >= 5 ? x : y;
    if (o == 2 || o == 3 || o == 7 || o == 8)
        u = w - u;
    if (o == 3 || o == 4 || o == 6 || o == 7)
        v = h - v;
    return raster_row(r, v) + (size_t)r->channels * (size_t)u;
}

static uint8_t over_white(int value, int alpha)
{
    return (uint8_t)((value * alpha + 255 * (255 - alpha) + 127) / 255);
}

/* The n pixels of `from` over white. `to` may be `from`. */
static void drop_alpha(const uint8_t *from, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++, from += 4, to += 3) {
        const uint8_t pixel[4] = {from[0], from[1], from[2], from[3]};
        for (int c = 0; c < 3; c++)
            to[c] = pixel[3] == 255 ? pixel[c] : over_white(pixel[c], pixel[3]);
    }
}

/* Takes the raster's memory if the image is upright. */
static bool make_upright(const struct image_source *s, struct raster *r, struct image *out)
{
    bool turned = r->orientation >= 5;
    int width = turned ? r->height : r->width, height = turned ? r->width : r->height;
    size_t bytes = (size_t)width * (size_t)height * 3;
    if (r->orientation <= 1) {
        if (r->channels == 4)
            drop_alpha(r->rgba, r->rgba, (size_t)width * (size_t)height);
        uint8_t *less = mem_ask_again(r->rgba, bytes);
        *out = (struct image){width, height, less ? less : r->rgba};
        r->rgba = NULL;
        return true;
    }
    uint8_t *to = mem_ask(bytes);
    if (!to)
        return error_set(s->err, "out of memory: %zu bytes for pixels", bytes);
    *out = (struct image){width, height, to};
    mem_huge_pages(to, bytes);
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++, to += 3) {
            const uint8_t *from = pixel_of(r, x, y);
            for (int c = 0; c < 3; c++)
                to[c] = r->channels == 4 ? over_white(from[c], from[3]) : from[c];
        }
    return true;
}

bool image_decode(const void *bytes, size_t n, const struct image_limits *limits, struct image *out,
                  struct error *err)
{
    struct error why = {0};
    struct image_source s = {.bytes = bytes,
                             .n = n,
                             .max_pixels = limits->max_pixels ? limits->max_pixels
                                                              : (int64_t)IMAGE_DEFAULT_PIXELS,
                             .stop = limits->stop,
                             .err = &why};
    const struct format *f = find_format(bytes, n);
    struct raster r = {0};
    *out = (struct image){0};
    if (!f)
        return error_set(err, "neither PNG, JPEG, WebP, GIF nor BMP");
    bool ok = !image_check_stop(&s) && f->read(&s, &r) && make_upright(&s, &r, out);
    mem_free(r.rgba);
    return ok || error_set(err, "%s: %s", f->name, why.msg[0] ? why.msg : "broken");
}

void image_free(struct image *m)
{
    mem_free(m->rgb);
    *m = (struct image){0};
}
