/* An image as a tower takes it: resized, normalised and cut into patches. */
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

/* Pixels as another program's image processor stores them, for comparison with it: a record of `n_dims` dims, for all images. */
struct pixel_record {
    int n_dims, dims[5];
    const float *values;
    int at; /* rows or views that earlier images have used */
};
/* The patches of the next image, of this plan. False: the record has another form. */
bool patches_take(const struct tower_config *t, const struct image_plan *plan,
                  struct pixel_record *r, struct patches *out);

#endif
