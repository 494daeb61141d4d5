/* A tower's input: an image, resized, normalised and cut into patches. */
#ifndef STEEL_VISION_PATCHES_H
#define STEEL_VISION_PATCHES_H

#include "backend/layer.h"
#include "vision/image_plan.h"

struct patches {
    const struct tower_config *tower;
    struct image_plan plan;
    int width; /* tower_patch_values */
    int n;     /* of all views */
    float *
        values; /* (n, width) view by view, each row by row; NULL = they are cut from the images below */
    struct image sizes[PLAN_MAX_SIZES]; /* resized */
    struct pixel_form *form;
};

/* The resized image. patches_row cuts and normalises. If the size stays the same, the pixels are taken from m. */
bool patches_make(const struct tower_config *t, struct image *m, const atomic_bool *stop,
                  struct patches *out, struct error *err);
/* to (width) = the patch at (row, col) of a view. */
void patches_row(const struct patches *p, int view, int row, int col, float *to);
/* Bytes of a patch's pixels, (row, column, channel). to = those at (row, col) of a view; p->values is NULL. */
size_t patch_bytes(const struct tower_config *t);
void patches_row_bytes(const struct patches *p, int view, int row, int col, uint8_t *to);
/* How the tower's pixels become values (backend/layer.h). */
void patches_form(const struct tower_config *t, struct pixel_form *out);
/* Sets p->values. */
bool patches_cut(struct patches *p, struct error *err);
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
