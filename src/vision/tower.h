/*
 * Image towers: what a file says about its tower, as numbers, and the tower as layers (layer.h). A tower is a model like
 * others: its family names tensors and settings, tower_build.c makes a network of them, and the one forward pass runs it
 * (encoder.h). How an image becomes patches and marks in a prompt are settings as well (image_plan.h).
 */
#ifndef STEEL_VISION_TOWER_H
#define STEEL_VISION_TOWER_H

#include "image/resize.h"
#include "model/config.h"

enum { TOWER_MAX_LEVELS = 8, TOWER_MAX_GRID = 1024 };

struct tower_family; /* family.h */

/* How a patch's place becomes values from the table of positions. */
enum tower_table {
    TABLE_NONE,
    TABLE_CORNERS, /* bilinear; the corners of the grid are those of the table */
    TABLE_CUBIC, /* bicubic between the middles of cells; the identity where grid and table agree */
    TABLE_SMOOTH,    /* bilinear between the middles of cells, with antialiasing */
    TABLE_NEAREST,   /* the cell under the patch's upper left corner */
    TABLE_TWO_LISTS, /* the sum of an entry for the column and one for the row */
};

/* Which pairs of a head's dims turn by a patch's row and which by its column, and how fast. */
enum tower_axes {
    AXES_NONE,
    AXES_ROWS_FIRST,    /* half the pairs by row, half by column, with the same frequencies */
    AXES_COLUMNS_FIRST, /* the same, columns first */
    AXES_INTERLEAVED,   /* rows have the even, columns the odd frequencies of the whole head */
};

struct tower_config {
    const struct tower_family *family;
    int patch;          /* pixels a side */
    int merge;          /* patches a side of a feature */
    int frames;         /* equal frames of a patch */
    int grid;           /* rows and columns of the table of positions */
    int n_out;          /* width of a feature */
    bool class_token;   /* a row without a patch; its position is the table's first entry */
    bool channels_last; /* a patch's values: row, column, channel */
    int window;         /* patches a side of the windows of attention; 0 = none */
    bool full[CONFIG_MAX_LAYERS]; /* with windows: layers with full attention */
    /* A layer after which the rows of four patches become one; -1 = none. Such a tower is two networks (tower_part). */
    int middle;
    int part, first; /* the network, and its first layer */
    int n_middle;    /* width inside the merger in the middle */
    enum tower_table table;
    enum tower_axes axes;
    enum activation act;
    bool clips;       /* products have bounds (layer.h) */
    bool value_norm;  /* values of attention are normed */
    bool standardise; /* features are shifted and scaled */
    bool rms;         /* norms of layers are RMS norms where the family has LayerNorm */
    float merge_eps;  /* of the merger's norms */
    int n_hidden;     /* width inside the merger; 0 = n_out */
    /* Layers whose outputs also become features, for the decoder's first layers. Ascending. */
    int n_levels, level[TOWER_MAX_LEVELS];
    /* Resizing; see the family's plan. */
    int64_t min_pixels, max_pixels; /* of an image, or of a view */
    int side;                       /* pixels: of a square view or tile; of the longer side */
    int longest;                    /* pixels: of the longer side before tiling */
    int min_tiles, max_tiles;
    int max_side; /* patches a side */
    float tolerance;
    bool scales_itself; /* the processor's values are 0 to 1; the model maps them to -1 to 1 */
    bool split, thumbnail;
    enum image_filter filter;
    float mean[3], std[3]; /* of channels between 0 and 1 */
};

/* Whether the file has a tower that Steel runs. */
bool tower_present(const struct tensorfile *f);
/* c keeps a pointer to t. */
bool tower_load(const struct tensorfile *f, struct config *c, struct tower_config *t,
                struct error *err);
/* The networks of a tower. The features of one are the rows of the next. */
int tower_n_parts(const struct tower_config *t);
/* The configs of a network, of those of the whole tower. part_c refers to part_t from then on. */
void tower_part(const struct config *c, const struct tower_config *t, int part,
                struct config *part_c, struct tower_config *part_t);
/* The tower's layers and bytes. False: the file has none that Steel runs. */
struct model_size; /* model/model.h */
bool tower_measure(const struct tensorfile *f, int *n_layers, struct model_size *out);

/* Values of a row beside its position: 3 channels of each frame of a patch, or what an earlier network made. */
static inline int tower_patch_values(const struct tower_config *t)
{
    return t->part ? t->n_middle : 3 * t->frames * t->patch * t->patch;
}

/* Whether a tensor of a folder belongs to its tower. */
bool tower_owns(const struct tensorfile *f, const char *tensor);
/* Whether the decoder gives features the M-RoPE positions of their grid. */
bool tower_has_grid_positions(const struct tower_config *t);

#endif
