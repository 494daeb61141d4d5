/*
 * What a model takes of a device's memory, part by part, before anything is loaded: weights in the backend's own form,
 * the KV cache, states, working memory. runtime_open decides by these numbers, and `steel plan` prints them
 * (runtime_plan in runtime.h). Reads names and shapes of tensors, never their data.
 */
#ifndef STEEL_ENGINE_FIT_H
#define STEEL_ENGINE_FIT_H

#include "model/model.h"

struct backend;

enum fit_part {
    FIT_EMBED,
    FIT_MIXERS,
    FIT_MLPS,
    FIT_SHARED, /* shared experts and their gates */
    FIT_EXPERTS,
    FIT_ROUTERS,
    FIT_HEAD,
    FIT_DRAFT, /* the MTP block */
    FIT_REST,  /* norms and other vectors */
    FIT_PARTS,
};
extern const char *const fit_parts[]; /* (FIT_PARTS) names */

/* Values of one format that a step multiplies with. */
struct fit_format {
    double dense;   /* with every row */
    double experts; /* of all experts of all layers */
    double head;    /* with output rows */
};

struct fit_weights {
    size_t memory[FIT_PARTS]; /* bytes of the backend's form */
    size_t mapped[FIT_PARTS]; /* bytes that steps read in the file */
    size_t fixed_experts;     /* bytes of experts that cannot stay in the file */
    size_t host;              /* bytes of experts in host memory beside a GPU (engine/offload.h) */
    struct fit_format formats[DT_COUNT];
    int n_expert, n_used; /* of a layer; 0 = no experts */
    int n_products;       /* matrix products of a step */
    double attn_flops;    /* per row and token of its context */
};

/* In the form of the open backend be, or of a GPU that need not be open; both NULL: of the file. */
bool fit_weights(const struct tensorfile *f, const struct config *c, const struct outline *o,
                 const char *device, struct backend *be, struct fit_weights *out,
                 struct error *err);
/* Fills in the experts of each layer (net.n_layers), zeroed before: bytes of their forms on `device` and on `host`. */
struct expert_layer;
bool fit_experts(const struct tensorfile *f, const struct config *c, const struct outline *o,
                 const char *device, struct backend *host, struct expert_layer *layers,
                 struct error *err);
size_t fit_memory(const struct fit_weights *w); /* sum of all parts */
size_t fit_mapped(const struct fit_weights *w);

#endif
