/*
 * Decides which experts of a mixture stay in host memory, where the CPU computes them beside a GPU. The user says so
 * (llama.cpp's --cpu-moe, --n-cpu-moe and -ot), or the GPU has no room for all: then whole layers stay, the first ones first,
 * and of one more layer some experts. A whole layer costs one exchange with the host, as a part of one does.
 * If host memory has room for all experts, it keeps all, and every layer has as many on the device, which are then exchanged by use
 * (backend/options.h: host_all).
 * Pure arithmetic over sizes; reads no weights.
 */
#ifndef STEEL_ENGINE_OFFLOAD_H
#define STEEL_ENGINE_OFFLOAD_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

/* The experts of a layer of the network. */
struct expert_layer {
    int layer;         /* its number in the file */
    int n_expert;      /* 0 = none */
    size_t bytes;      /* of all of them, in the device's form */
    size_t host_bytes; /* in the host's; 0 = not known */
};

/* What the user asked for. */
struct offload_wish {
    int layers; /* number of layers, from the first, whose experts stay on the host; -1 = all; 0 = none */
    const char
        *tensors; /* "REGEX=CPU[,REGEX=CPU]" over names as blk.3.ffn_up_exps.weight; NULL = none */
};
static inline bool offload_is_wished(const struct offload_wish *w)
{
    return w->layers || w->tensors;
}

struct offload {
    int *n_host; /* (n_layers) a layer's experts in host memory; NULL = all are on the device */
    int n_layers, layers; /* layers: that have such experts, */
    int of;               /* number of layers with experts */
    bool all;             /* the host keeps the device's experts, too */
    size_t device, host;  /* bytes of experts on the device, in host memory */
};

/* room: bytes of the device for experts; host_room: of host memory for a copy of all, 0 = none is kept. False: the wish cannot be understood, or fits no experts. */
bool offload_choose(const struct expert_layer *layers, int n_layers,
                    const struct offload_wish *wish, size_t room, size_t host_room,
                    struct offload *out, struct error *err);
void offload_free(struct offload *o);

#endif
