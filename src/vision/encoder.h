/*
 * Runs an image tower: patches in, features out. The tower is a network of its own on a backend of its own, so that it
 * may run beside the steps of the engine.
 *
 *  1. Steps run on the encoder's own thread, in the background: it and its backend's threads yield to the engine's. A
 *     view of an image is one sequence. On a GPU views of several callers share a step; on a CPU, or with
 *     `deterministic`, each view has a step of its own. Views wait in order. Cancelled views leave the queue. On a GPU
 *     the tower's kernels have a lower priority than the engine's (backend_options.background).
 *  2. All layers share the memory of one layer's keys and values: no layer reads another's.
 *  3. Equal patches give equal features, whatever ran before; on a GPU up to rounding, if views share steps.
 */
#ifndef STEEL_VISION_ENCODER_H
#define STEEL_VISION_ENCODER_H

#include "backend/options.h"
#include "model/model.h"
#include "vision/patches.h"

struct encoder;

struct encoder_options {
    struct backend_options backend;
    enum dtype kv_type; /* of keys and values: F32, F16 or BF16; DT_NONE = F16 */
    int max_features;   /* of an image; 0 = 4096. Larger images are made smaller */
    const struct progress *progress;
};

/* The features of an image in the decoder's form: the rows of batch.embeds. */
struct features {
    struct image_plan plan;
    int n, width;  /* of all views, each row by row; values of a feature */
    float *values; /* (n, width): the last layer's, then each deepstack level's */
};

/* Seconds so far. The parts of a caller may overlap those of others. */
struct encoder_times {
    uint64_t n_views, n_steps;
    double rows;    /* callers: patches and positions become rows */
    double waiting; /* callers: until their features are there */
    double steps;   /* the encoder's thread: the tower, and */
    double fetch;   /* its features, copied from the device */
    double copy;    /* callers: features in their order */
};

struct encoder *encoder_open(const struct tensorfile *f, const struct encoder_options *opt,
                             struct error *err);
void encoder_close(struct encoder *e);
/* The tower's config, with the size limits that apply here. */
const struct tower_config *encoder_config(const struct encoder *e);
/* The same for images of which few details are wanted: at most 256 features, where the family has a choice. */
const struct tower_config *encoder_low_config(const struct encoder *e);
const struct model *encoder_model(const struct encoder *e);
void encoder_times(struct encoder *e, struct encoder_times *out);
int encoder_max_patches(const struct encoder *e); /* of a view */

/* From the thread whose steps the encoder runs beside, after each of them. decode_ns: the time of a step that only decodes; 0 =
 * nobody waits for one now. On a GPU the tower then runs at most one piece of half that time beside each step. */
void encoder_beside_step(struct encoder *e, int64_t decode_ns);

/* From any thread. stop: true ends it early with an error; NULL = never. */
bool encoder_run(struct encoder *e, const struct patches *p, const atomic_bool *stop,
                 struct features *out, struct error *err);
void features_free(struct features *f);

/* A run of features among the tokens of a prompt: placeholders [at, at + rows * cols). */
struct image_span {
    int at, rows, cols;
};
/* pos (n_tokens, 3) = Qwen's M-RoPE positions: a text token's are equal; an image's are those of its features' grid, and
 * the text after it continues from the longer side. images ascending. */
void image_positions(const struct image_span *images, int n_images, int n_tokens, int32_t *pos);

#endif
