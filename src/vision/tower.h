/*
 * Image towers: what a file says about its tower, as numbers, and the tower as layers (layer.h), one file a family.
 * A tower is a model like others: its family builds a network, and the one forward pass runs it (encoder.h).
 */
#ifndef STEEL_VISION_TOWER_H
#define STEEL_VISION_TOWER_H

#include "image/resize.h"
#include "model/config.h"

enum { TOWER_MAX_LEVELS = 8, TOWER_MAX_GRID = 1024 };

struct tower_config {
    int patch;  /* pixels a side */
    int merge;  /* patches a side of a feature */
    int frames; /* equal frames of a patch */
    int grid;   /* rows, and columns, of the table of positions */
    int n_out;  /* width of a feature */
    /* Layers whose outputs also become features, for the decoder's first layers. Ascending. */
    int n_levels, level[TOWER_MAX_LEVELS];
    /* An image keeps its ratio. Its sides become multiples of patch * merge, and its area lies in these bounds. */
    int64_t min_pixels, max_pixels;
    enum image_filter filter;
    float mean[3], std[3]; /* of channels between 0 and 1 */
    /* An image in a prompt, and the token in it that stands for a feature. */
    const char *mark, *placeholder;
};

/* Whether the file has a tower that Steel runs. */
bool tower_present(const struct tensorfile *f);
/* c refers to t from then on. */
bool tower_load(const struct tensorfile *f, struct config *c, struct tower_config *t,
                struct error *err);
/* The tower's layers and bytes. False: the file has none that Steel runs. */
struct model_size; /* model/model.h */
bool tower_measure(const struct tensorfile *f, int *n_layers, struct model_size *out);
/* The table of positions, (grid * grid, n_embd) floats; NULL with err. */
float *tower_positions(const struct tensorfile *f, const struct config *c, struct error *err);

/* Values of a patch: 3 channels of each frame. */
static inline int tower_patch_values(const struct tower_config *t)
{
    return 3 * t->frames * t->patch * t->patch;
}

#endif
