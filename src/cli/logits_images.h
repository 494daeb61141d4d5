/* The images of `steel logits --input`: a prompt with placeholders and the pictures beside it, as rows of embeddings. */
#ifndef STEEL_CLI_LOGITS_IMAGES_H
#define STEEL_CLI_LOGITS_IMAGES_H

#include "engine/runtime.h"

struct image_input {
    int32_t n;
    int32_t *ids;       /* (n) placeholders expanded */
    const char *path;   /* of input.json */
    const char *pixels; /* pixel_values.bin; NULL = of the pictures */
    json_t *json;       /* input.json */
    /* after image_input_encode */
    struct prompt_rows rows;
    const float **embeds;     /* (n) */
    int32_t *pos;             /* (n, 3) */
    struct image_span *spans; /* (n_spans) runs of features */
    int n_spans;
    int32_t *see;              /* (n, 2) prompt_rows.spans */
    struct features *features; /* (n_images) */
    int n_images;
};

/* Reads ids from input.json. */
bool image_input_read(struct image_input *in, const char *path, struct error *err);
/* Runs the tower and fills in->rows. features: the file that the features are written to; NULL = none. */
bool image_input_encode(struct image_input *in, const struct runtime *rt, const char *features,
                        struct error *err);
void image_input_clear(struct image_input *in);

#endif
