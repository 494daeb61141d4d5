/*
 * Decides sizes: the rows and sequences of a step, the context, the KV cache, slots for recurrent states. Computed from
 * the user's options, the network's shapes and free memory. Opens nothing and allocates nothing.
 */
#ifndef STEEL_ENGINE_SIZING_H
#define STEEL_ENGINE_SIZING_H

#include "engine/runtime.h"

struct cache_size {
    int64_t tokens;
    int n_states;
    int context;
};

/* Bounds of a step. stages: of a pipeline; 1 = none. */
struct step_limits sizing_limits(const struct runtime_options *opt, bool gpu, int stages);
/* An upper estimate of a step's working memory: rows of activations, each expert's outputs, and logits. */
size_t sizing_step_bytes(const struct network *net, const struct step_limits *lim);
/* The same on a GPU, including the backend's own tables. If adapters change mlps, gate, up and hidden units are also
 * kept as floats. */
size_t sizing_gpu_step_bytes(const struct runtime_options *opt, const struct network *net,
                             const struct step_limits *lim);
/* Bounds of a step's scratch on the CPU, for plan_ops, before the cache has its size. */
struct bounds sizing_bounds(const struct runtime_options *opt, const struct step_limits *lim,
                            const struct cache_size *cache);
/* The host's memory set aside for everything but weights, cache and working memory. */
size_t sizing_host_other(void);
/* Pages of a cache of `tokens` tokens. */
int64_t sizing_pages(const struct runtime_options *opt, const struct step_limits *lim,
                     int64_t tokens);
/* Bytes of a token in the KV cache. */
size_t sizing_token_bytes(const struct runtime_options *opt, const struct network *net);
enum dtype sizing_kv_type(enum dtype t); /* DT_NONE becomes the default */
bool sizing_has_adapters(const struct runtime_options *opt);

/* The default number of checkpoints of recurrent states, `slot` bytes each, with `room` bytes left beside the weights and
 * the states of running sequences. */
int sizing_checkpoints(size_t slot, int max_seqs, bool gpu, size_t room);

/* Free memory while the KV cache is sized. */
struct cache_room {
    size_t free;   /* 0 = not known */
    size_t usable; /* the part of it that may be used */
    size_t taken;  /* needed for weights and working memory */
    bool on_gpu;
};

/* On the CPU, before anything is loaded; weights, step: bytes of them. Weights that are read from the mapped file can be evicted, so they do not count
 * if there is no room for them. */
struct cache_room sizing_host_room(const struct runtime_options *opt, size_t weights, size_t step);
/* On a GPU with `room` bytes left, after weights and adapters are loaded. */
struct cache_room sizing_gpu_room(const struct runtime_options *opt, const struct network *net,
                                  int context, size_t room);
/* The default number of sequences on a GPU with `room` bytes left: as many as its cache holds beside the working memory of
 * as many. */
int sizing_sequences(const struct runtime_options *opt, const struct network *net, int context,
                     size_t room);

/* Sizes of the context and the cache: the user's, or as much as is useful and fits. It is an error if the user's do not
 * fit. A context below the model's own is added to `notice`. */
bool sizing_cache(const struct runtime_options *opt, const struct config *c,
                  const struct network *net, const struct step_limits *lim, struct cache_room room,
                  struct cache_size *out, struct error *notice, struct error *err);
/* For texts on a GPU: a cache for two steps in flight. False: only one fits, and fit->kv_tokens is set for one. */
bool sizing_texts(struct runtime_options *fit, const struct config *c, const struct network *net,
                  const struct step_limits *lim, struct cache_room room, struct cache_size *out,
                  struct error *notice);
/* Appends `what` to the notice for the user, unless it is empty. */
void sizing_add_notice(struct error *notice, const struct error *what);

#endif
