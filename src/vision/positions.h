/* A tower's table of learned positions, sampled at the places of a view's patches. */
#ifndef STEEL_VISION_POSITIONS_H
#define STEEL_VISION_POSITIONS_H

#include "vision/image_plan.h"

struct positions {
    int width;        /* E */
    float *table;     /* (grid * grid, E), or the two lists (2 * grid, E); NULL = none */
    float *class_row; /* (E) replaces a patch's product and position; NULL = none */
};

bool positions_load(const struct tensorfile *f, const struct config *c, struct positions *out,
                    struct error *err);
void positions_free(struct positions *p);

/* Interpolation weights of a view's rows and columns. */
struct position_axes {
    float *y, *x; /* (rows, grid), (cols, grid); NULL = no table */
};
void positions_begin(const struct tower_config *t, const struct view *v, struct position_axes *out);
void positions_end(struct position_axes *a);
/* q (E) = the position at (row, col). */
void positions_at(const struct tower_config *t, const struct positions *p,
                  const struct position_axes *a, int row, int col, float *q);

#endif
