/*
 * A loaded model: its config, its weights in a backend's memory, and the one forward pass over them.
 * The model owns the weights; the KV pool and the scratch belong to the engine.
 */
#ifndef STEEL_MODEL_MODEL_H
#define STEEL_MODEL_MODEL_H

#include "backend/backend.h"
#include "model/config.h"

struct layer {
    float *attn_norm, *ffn_norm; /* (n_embd) */
    float *q_norm, *k_norm;      /* (head_dim) or NULL */
    struct weight wqkv, wo;
    struct weight gate_up, down; /* one matrix each, or n_expert of them */
    struct weight router;        /* n_expert rows; empty (n_out 0) in dense layers */
    int window;
};

struct model {
    struct config config;
    struct backend *be;   /* not owned */
    struct weight emb;    /* (n_vocab, n_embd) */
    struct weight head;   /* (n_vocab, n_embd); unused when config.tied */
    float *norm;          /* (n_embd) */
    struct layer *layers; /* (n_layers) */
    float *rope_freq;     /* (n_rot/2) host */
    float rope_mscale;
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

struct model *model_load(const struct tensorfile *f, struct backend *be,
                         const struct progress *progress, struct error *err);
void model_free(struct model *m);

/* Counts parameters and bytes from the directory alone: what `show` prints. */
struct model_size {
    int64_t n_params, n_active;
    size_t bytes, active_bytes;
};
void model_measure(const struct tensorfile *f, const struct config *c, struct model_size *out);

/* Activations of a step, allocated once by the engine in backend memory. */
struct scratch {
    float *x, *n, *d; /* (max_tokens, n_embd) */
    float *q, *a;     /* (max_tokens, n_heads * head_dim) */
    float *xo, *ao;   /* (max_out, n_embd), (max_out, n_heads * head_dim) */
    float *logits;    /* (max_out, n_vocab) */
};

/* Begins and launches a step: reads the batch, leaves logits of its out rows in s->logits; the
 * backend's end() waits for it. `kv`: (n_layers). key != 0: it may be recorded and replayed. */
void forward(struct model *m, const struct batch *b, const struct kv_layer *kv, struct scratch *s,
             uint64_t key);

#endif
