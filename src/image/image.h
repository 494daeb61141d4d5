/*
 * Pictures as pixels: PNG, JPEG, WebP, GIF (first frame) and BMP become rows of RGB. The formats are decoded by libraries;
 * this shelf bounds their memory and time and returns one form. Knows nothing of models.
 *
 *  1. The size is read from the header and checked before any pixel is decoded or its memory allocated.
 *  2. Decoding holds at most 7 bytes a pixel of its own, and what the library needs (at most 12 bytes a pixel).
 *  3. A broken or cut file is an error in words. A picture is returned whole or not at all.
 */
#ifndef STEEL_IMAGE_IMAGE_H
#define STEEL_IMAGE_IMAGE_H

#include "base/error.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { IMAGE_MAX_SIDE = 65535, IMAGE_DEFAULT_PIXELS = 32 << 20 };

struct image_limits {
    int64_t max_pixels;      /* 0 = IMAGE_DEFAULT_PIXELS */
    const atomic_bool *stop; /* true: decoding ends early with an error; NULL = never */
};

/* Upright (EXIF orientation is applied), 8 bits a channel, transparent parts over white. */
struct image {
    int width, height;
    uint8_t *rgb; /* (height, width, 3) */
};

bool image_decode(const void *bytes, size_t n, const struct image_limits *limits, struct image *out,
                  struct error *err);
void image_free(struct image *m);

#endif
