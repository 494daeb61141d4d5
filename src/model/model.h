/*
 * A loaded model: its config, its weights in a backend's memory, and the one forward pass over them.
 * The model owns the weights, the engine the KV pool, the backend the scratch.
 */
#ifndef STEEL_MODEL_MODEL_H
#define STEEL_MODEL_MODEL_H

#include "backend/batch.h"
#include "model/config.h"

#include <stdatomic.h>

struct tensor_spec; /* model/build.h */

struct model {
    struct config config;
    struct backend *be; /* not owned */
    struct network net;
    struct tensor_spec *specs; /* (n_specs) how net's tensors are assembled; owned */
    int n_specs;
    struct direct *direct; /* file/direct.h: reads of experts that are not in memory; owned */
    const struct tensorfile *file; /* not owned */
    /* The file, and that of config.eagle, if mapped weights of theirs are used in every step; or NULL. */
    const struct tensorfile *reads[2];
    size_t bytes;        /* of all weights, as stored */
    size_t active_bytes; /* read per token at batch 1 (experts: only those used) */
    int64_t n_params, n_active;
    const atomic_bool *stop; /* true: a step skips its remaining layers; NULL = never */
    void (*after_layer)(
        void *arg); /* called when a layer but the last was enqueued; NULL = nothing is */
    void *after_layer_arg;
};

/* Called while loading, with done of total bytes. Returning false cancels with an error. */
struct progress {
    bool (*fn)(void *arg, size_t done, size_t total);
    void *arg;
};

/* Decides which part of the network this process keeps, where several share it (dist/): makes the network smaller
 * and sets the cut of each spec. NULL: all of it. And which experts its device leaves in host memory. */
struct model_shard {
    bool (*cut)(void *arg, const struct tensorfile *f, const struct config *c, struct network *net,
                struct tensor_spec *specs, int n_specs, struct error *err);
    void *arg;
    const int
        *n_host; /* (layers of the network) the last experts of each (rawweight.h); NULL = none */
};

/* Parts to load: everything text generation needs; all but the head, for embeddings (encoders have
 * no head); with the block that drafts tokens; for prompts with images. The last three are flags. */
enum model_parts {
    MODEL_PLAIN = 0,
    MODEL_HEADLESS = 1,
    MODEL_DRAFTING = 2,
    MODEL_SEEING = 4, /* with what an image tower's inner layers add */
};
struct model *model_load(const struct tensorfile *f, struct backend *be, enum model_parts parts,
                         const struct model_shard *shard, const struct progress *progress,
                         struct error *err);
/* The same of a config that the caller has read. */
struct model *model_load_config(const struct tensorfile *f, struct backend *be,
                                const struct config *c, const struct model_shard *shard,
                                const struct progress *progress, struct error *err);
void model_choose(struct config *c, enum model_parts parts); /* applies `parts` to a config */
void model_free(struct model *m);
/* The largest context in use: long RoPE has different factors for short and long contexts. Call it
 * before the backend's prepare(). The default is short. */
void model_set_context(struct model *m, int context);

/* Parameter and byte counts from the tensor directory, as `show` prints them. */
struct model_size {
    int64_t n_params, n_active;
    size_t bytes, active_bytes;
};
void model_measure(const struct tensorfile *f, const struct config *c, struct model_size *out);

/* The network of a file without a backend and without weights. A backend's supports() needs no
 * more. */
struct outline {
    struct network net;
    struct tensor_spec *specs;
    int n_specs;
};
bool outline_load(const struct tensorfile *f, const struct config *c, struct outline *out,
                  struct error *err);
void outline_free(struct outline *o);

/* Floats per output row: logits, or hidden states of a headless network. */
int model_row_width(const struct model *m);

/* Begins and launches a step over the batch, of the MTP block where batch.from is set. The backend's end()
 * waits for it; logits() then returns the output rows. key != 0: the step may be recorded as a graph and
 * replayed. */
void forward(struct model *m, const struct batch *b, uint64_t key);
/* The layers alone, over the stream as it is: for a stage of a pipeline. */
void forward_layers(struct model *m);
#endif
