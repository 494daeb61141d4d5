/* What a tower sees of an image: the sizes it is resized to, the views that are cut out of it, and its marks in a prompt.
 * Sizes only; patches.h makes the values. */
#ifndef STEEL_VISION_IMAGE_PLAN_H
#define STEEL_VISION_IMAGE_PLAN_H

#include "base/buf.h"
#include "vision/tower.h"

enum { PLAN_MAX_VIEWS = 128, PLAN_MAX_SIZES = 4 };

/* The image at one size: resized from size `from` of the list, or from the original (from < 0). */
struct plan_size {
    int from, width, height;
};

/* What the tower sees as one sequence: a rectangle at (x, y) of the image at one size. Beyond the image's right and bottom
 * edges it is black. */
struct view {
    int size, x, y;
    int rows, cols; /* of patches, multiples of merge */
};

struct image_plan {
    int n_sizes;
    struct plan_size sizes[PLAN_MAX_SIZES];
    int n_views;
    struct view views[PLAN_MAX_VIEWS]; /* in the order of the prompt */
    int tile_rows, tile_cols;          /* 0 = not cut into tiles */
};

bool plan_image(const struct tower_config *t, int width, int height, struct image_plan *out,
                struct error *err);
/* Features of a view, and of all views. */
int plan_view_features(const struct tower_config *t, const struct view *v);
int plan_features(const struct tower_config *t, const struct image_plan *p);
/* Patches of the largest view that any image may have. */
int plan_most_patches(const struct tower_config *t);
/* Limits images to n features by resizing. False with err where the family's sizes are fixed. */
bool plan_limit(struct tower_config *t, int n, struct error *err);

/* The marks of image `index` of a prompt. Each run of features has one mark. */
void plan_text(const struct tower_config *t, const struct image_plan *p, int index,
               struct buf *out);
const char *plan_mark(const struct tower_config *t); /* of a feature */
/* The lengths of the runs of features. */
int plan_n_runs(const struct tower_config *t, const struct image_plan *p);
int plan_run_length(const struct tower_config *t, const struct image_plan *p, int i);

/* For families: append a size (returns its index) or a view. */
int plan_add_size(struct image_plan *p, int from, int width, int height);
void plan_add_view(const struct tower_config *t, struct image_plan *p, int size, int x, int y,
                   int width, int height);
/* The whole image at this size as the only view. */
void plan_whole(const struct tower_config *t, struct image_plan *p, int width, int height);
/* Chooses the grid of min_tiles to max_tiles tiles whose aspect ratio is nearest to the image's. A tie goes to the larger
 * grid, unless the image has less than half its pixels. */
void plan_best_tiles(const struct tower_config *t, int width, int height, int side, int *cols,
                     int *rows);
bool plan_keep_ratio(const struct tower_config *t, int width, int height, struct image_plan *out,
                     struct error *err);

#endif
