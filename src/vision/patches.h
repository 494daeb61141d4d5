/* A tower's input: an image, resized, normalised and cut into patches. */
#ifndef STEEL_VISION_PATCHES_H
#define STEEL_VISION_PATCHES_H

#include "vision/image_plan.h"

struct patches {
    struct image_plan plan;
    int width;     /* tower_patch_values */
    int n;         /* of all views */
    float *values; /* (n, width) view by view, each row by row */
};

bool patches_make(const struct tower_config *t, const struct image *m, const atomic_bool *stop,
                  struct patches *out, struct error *err);
void patches_free(struct patches *p);

/* Pixels written by another program's image processor, for comparison: one tensor for all images. */
struct pixel_record {
    int n_dims, dims[5];
    const float *values;
    int at; /* rows or views taken by earlier images */
};
/* Takes the next image's patches, laid out by `plan`. False: the record has another form. */
bool patches_take(const struct tower_config *t, const struct image_plan *plan,
                  struct pixel_record *r, struct patches *out);

#endif
