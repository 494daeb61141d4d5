/*
 * The rows of a tower's step, made of an image's patches.
 *
 *  1. Views of one shape share the order of their rows and their positions (struct view_grid). Grids of recent shapes are kept:
 *     sampling a table of positions takes as long as cutting the patches.
 *  2. A row is a patch's values and its position; or, where the backend takes pixels (tower_ops), its bytes and its position.
 *  3. Grids are shared between threads; rows belong to one.
 */
#ifndef STEEL_VISION_STEP_ROWS_H
#define STEEL_VISION_STEP_ROWS_H

#include "vision/patches.h"
#include "vision/positions.h"

#include <stdatomic.h>
#include <stdint.h>

/* The order of a view's rows in a step: by window, then by feature. The patches of a feature are adjacent. Where rows
 * are joined twice, four patches that become one row are a window. */
struct row_order {
    int n, n_features;
    int *row, *col;   /* (n) of patches */
    int *feature;     /* (n_features) its place in the view */
    int32_t *windows; /* (n, 2) as batch.spans; NULL = none */
};

struct view_grid {
    atomic_int refs;
    int rows, cols; /* of the view */
    int n;          /* rows of the step: the patches, then the class token */
    struct row_order order;
    int32_t *rope_pos; /* (n, 3) */
    float *positions;  /* (n, E) */
    size_t bytes;      /* of positions */
};

struct grids;
/* t and p must outlive it. */
struct grids *grids_new(const struct tower_config *t, const struct positions *p, int n_embd);
void grids_free(struct grids *g);

struct step_rows {
    struct view_grid *grid;
    float *values;            /* (n, patch values + E), or NULL: */
    uint8_t *pixels;          /* (patches, bytes of a patch) */
    size_t bytes;             /* of either */
    const float **rows;       /* (n) */
    const uint8_t **bytes_of; /* (n) as batch.pixels; NULL = none */
};

/* pixels: the backend takes them. */
bool rows_init(struct step_rows *r, struct grids *g, const struct patches *p, int view, bool pixels,
               struct error *err);
void rows_clear(struct step_rows *r);

#endif
