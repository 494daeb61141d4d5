/* Resizing with antialiasing, as Pillow and torchvision do: first the width, then the height, each rounded to 8 bits. */
#ifndef STEEL_IMAGE_RESIZE_H
#define STEEL_IMAGE_RESIZE_H

#include "image/image.h"

enum image_filter { IMAGE_BILINEAR, IMAGE_BICUBIC, IMAGE_LANCZOS };

/* out: width x height. False with err if memory runs out or stop is set (NULL = never). */
bool image_resize(const struct image *in, int width, int height, enum image_filter filter,
                  const atomic_bool *stop, struct image *out, struct error *err);

#endif
