/* An image as a tower takes it: resized, normalised and cut into patches. */
#ifndef STEEL_VISION_PATCHES_H
#define STEEL_VISION_PATCHES_H

#include "vision/tower.h"

/* Patches in the order of features: those of a feature side by side, row by row. A patch's values: channel, frame, row,
 * column. */
struct patches {
    int rows, cols; /* of patches, multiples of merge */
    int width;      /* tower_patch_values */
    float *values;  /* (rows * cols, width) */
};

/* The size that an image is resized to. False with err if one side is more than 200 times the other. */
bool patches_size(const struct tower_config *t, int width, int height, int *out_width,
                  int *out_height, struct error *err);
bool patches_make(const struct tower_config *t, const struct image *m, const atomic_bool *stop,
                  struct patches *out, struct error *err);
void patches_free(struct patches *p);

/* The place of patch i in the grid. */
static inline void patch_place(const struct tower_config *t, const struct patches *p, int i,
                               int *row, int *col)
{
    int each = t->merge * t->merge, across = p->cols / t->merge, group = i / each, in = i % each;
    *row = group / across * t->merge + in / t->merge;
    *col = group % across * t->merge + in % t->merge;
}

#endif
