/*
 * A loaded model: its config, its weights in a backend's memory, and the one forward pass over them.
 * The model owns the weights, the engine the KV pool, the backend the scratch.
 */
#ifndef STEEL_MODEL_MODEL_H
#define STEEL_MODEL_MODEL_H

#include "backend/backend.h"
#include "model/config.h"

struct tensor_spec; /* model/build.h */

struct model {
    struct config config;
    struct backend *be; /* not owned */
    struct network net;
    struct tensor_spec *specs; /* (n_wants) the weights and vectors of net, owned */
    int n_specs;
    const struct tensorfile *reads; /* weights are read from it in every step; NULL = none is */
    size_t bytes;                   /* compressed weights, all of them */
    size_t active_bytes;            /* read per token at batch 1 (experts: only those used) */
    int64_t n_params, n_active;
};

/* Called from time to time while loading, done of total bytes; false cancels with an error. */
struct progress {
    bool (*fn)(void *arg, size_t done, size_t total);
    void *arg;
};

/* What of a model is loaded: all that an answer needs; without its head, for embeddings (encoders have
 * none anyway); with the block that drafts tokens ahead, where there is one. */
enum model_parts { MODEL_PLAIN, MODEL_HEADLESS, MODEL_DRAFTING };
struct model *model_load(const struct tensorfile *f, struct backend *be, enum model_parts parts,
                         const struct progress *progress, struct error *err);
void model_choose(struct config *c, enum model_parts parts); /* the same of a config alone */
void model_free(struct model *m);
/* How many positions will be used at most: long RoPE has factors for short and for long contexts.
 * Before the backend's prepare(); unsaid, contexts are short. */
void model_set_context(struct model *m, int context);

/* Counts parameters and bytes from the directory alone: what `show` prints. */
struct model_size {
    int64_t n_params, n_active;
    size_t bytes, active_bytes;
};
void model_measure(const struct tensorfile *f, const struct config *c, struct model_size *out);

/* The network that a file describes, without a backend and without weights: sizes alone, as
 * backends' supports() sees it. */
struct outline {
    struct network net;
    struct tensor_spec *specs;
    int n_specs;
};
bool outline_load(const struct tensorfile *f, const struct config *c, struct outline *out,
                  struct error *err);
void outline_free(struct outline *o);

/* Floats of a row that the head makes: logits, or what the network makes of a token. */
int model_row_width(const struct model *m);

/* Begins and launches a step: reads the batch; the backend's end() waits for it, and its logits()
 * are then those of the out rows. key != 0: it may be recorded and replayed. */
void forward(struct model *m, const struct batch *b, uint64_t key);
/* Its middle: the layers, over the stream as it is. For a stage of a pipeline (pipeline.h). */
void forward_layers(struct model *m);
/* The same for a step of the MTP block (batch.from). */
void forward_draft(struct model *m, const struct batch *b, uint64_t key);

#endif
