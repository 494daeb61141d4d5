/* The interface between image.c and the decoders, one file per format. A decoder fills a raster;
 * image.c turns it into an image. */
#ifndef STEEL_IMAGE_IMAGE_INT_H
#define STEEL_IMAGE_IMAGE_INT_H

#include "image/image.h"

struct image_source {
    const uint8_t *bytes; /* (n) the file */
    size_t n;
    int64_t max_pixels;
    const atomic_bool *stop;
    struct error *err;
};

struct raster {
    int width, height;
    int channels; /* 4 from raster_new on; a decoder may set 3, before it writes, for pixels without alpha */
    uint8_t *rgba;   /* (height, width, channels) zeroed by raster_new */
    int orientation; /* as EXIF counts, 1 to 8; 0 = 1 */
};

/* Checks the size that a header states and allocates the pixels. False with s->err. */
bool raster_new(const struct image_source *s, int64_t width, int64_t height, struct raster *out);
static inline uint8_t *raster_row(const struct raster *r, int y)
{
    return r->rgba + (size_t)y * (size_t)r->width * (size_t)r->channels;
}

static inline bool image_stopped(const struct image_source *s)
{
    return s->stop && atomic_load_explicit(s->stop, memory_order_relaxed);
}
/* Whether decoding should end, with an error. */
bool image_check_stop(const struct image_source *s);

/* The orientation in EXIF data (TIFF, without "Exif\0\0"); 0 = none. */
int exif_orientation(const uint8_t *tiff, size_t n);

/* False with s->err. image.c frees the raster. */
bool png_read_raster(const struct image_source *s, struct raster *out);
bool jpeg_read_raster(const struct image_source *s, struct raster *out);
bool webp_read_raster(const struct image_source *s, struct raster *out);
bool gif_read_raster(const struct image_source *s, struct raster *out);
bool bmp_read_raster(const struct image_source *s, struct raster *out);

#endif
