/*
 * EAGLE-3 heads (struct mtp of layer.h): one decoder layer that drafts tokens for another model, in a file of its own.
 * Either a published folder (config.json, safetensors) or llama.cpp's GGUF of architecture "eagle3". Reads and checks
 * the file, and adds the layer to a model's network. Knows nothing of drafting.
 */
#ifndef STEEL_MODEL_EAGLE_H
#define STEEL_MODEL_EAGLE_H

#include "model/config.h"

struct net_builder; /* model/build.h */

struct eagle {
    struct tensorfile *file; /* owned */
    struct config config;    /* of its layer; n_vocab: of the model it drafts for */
    int n_out;               /* outputs of its head: its own vocabulary */
    int n_taps,
        taps[MTP_MAX_TAPS]; /* layers before which it reads the stream; n_taps 0: the usual */
    bool norm_taps, norm_residual; /* layer.h: taps_norm, norm_residual */
};

/* Whether the file is such a head, not a model. */
bool eagle_is(const struct tensorfile *f);
/* NULL: the file is no EAGLE-3 head that Steel can run. f is closed then, and by eagle_close. */
struct eagle *eagle_open(struct tensorfile *f, struct error *err);
void eagle_close(struct eagle *e);
/* Whether the head is for such a model: width, vocabulary, layers. model: the model's path. */
bool eagle_fits(const struct eagle *e, const struct config *c, const char *model,
                struct error *err);
/* Adds c->eagle, the head of the builder's config, to the network that has been built: its last layer, mtp and a RoPE. */
void eagle_build(struct net_builder *b);

#endif
