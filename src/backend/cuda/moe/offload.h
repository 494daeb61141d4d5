/*
 * Experts that the device has no room for. They stay in host memory, in the form of options.host (the CPU backend), which
 * computes them while the device computes its own.
 *
 * In a step, for each layer that has such experts:
 *   1. router_select chooses for all experts. It gives the device's experts their weights (route_rule.spread, with a table
 *      of slots) and writes the others to pinned memory, as (row, place, weight).
 *   2. offload_send copies the rows there and raises the number of the request, unless no row has such an expert.
 *   3. The device's experts run.
 *   4. offload_join waits until the answer has the request's number, and adds its rows.
 * The host's thread waits for a request, has its experts computed, and answers. Steps are recorded as always: kernels wait,
 * the host does not. Requests are in the order of the stream, so one is under way at a time, whatever steps are in flight.
 *
 * Every request is answered. If the host fails, the answer means nothing, and the step ends with the host's error.
 */
#ifndef STEEL_BACKEND_CUDA_OFFLOAD_H
#define STEEL_BACKEND_CUDA_OFFLOAD_H

#include "backend/cuda/core/cuda.h"

struct error;
struct expert_stream;
struct raw_weight;
struct tier_stats;
struct weight;

/* A layer with experts on the host. */
struct offload_layer {
    int index;      /* among these layers */
    int n_device;   /* experts on the device, in slots; 0: none */
    int first_host; /* expert at the host's place 0 */
    int32_t
        *slot_of; /* device (n_expert) slot of an expert; -1 - rank: it is on the host (stream.h) */
    uint32_t *counts; /* device (n_expert) uses so far; NULL: not counted (place.h) */
    /* mapped (max_tokens, used) places; -1 = none. The same for all layers, as the next two */
    int32_t *chosen;
    float *weights;            /* mapped (max_tokens, used) */
    struct offload_sync *sync; /* device */
};

/* Numbers that only the device reads and writes. */
struct offload_sync {
    uint32_t arrived; /* blocks of the kernel that sends */
    uint32_t missed;  /* uses of experts on the host, in this layer so far */
    uint32_t active;  /* the layer's request was sent */
    uint32_t number;  /* of the last request */
    uint64_t on_device;
};

/* options.host; NULL: nothing is offloaded, and the other functions do nothing. The backend owns it from here on. reads: it
 * has expert_memory. all: options.host_all. */
void offload_open(struct cuda_backend *cu, struct backend *host, bool reads, bool all);
/* Whether such experts of the network can be computed by the host. */
bool offload_supported(const struct cuda_backend *cu, const struct network *net, struct error *err);
/* Uploads src's last n_host experts to the host, or all of them. */
bool offload_upload(struct cuda_backend *cu, const struct raw_weight *src, struct cuda_weight *cw,
                    bool *owns, struct error *err);
void offload_release(struct cuda_backend *cu, struct cuda_weight *cw);
bool offload_prepare(struct cuda_backend *cu, const struct network *net, int max_tokens,
                     struct error *err);
bool offload_settle(struct cuda_backend *cu, struct error *err);
void offload_stats(struct cuda_backend *cu, struct tier_stats *out);
void offload_close(struct cuda_backend *cu);
/* tier_ops */
size_t offload_uses(struct cuda_backend *cu, float *out);
void offload_place(struct cuda_backend *cu, const float *uses);

/* Steps: the host's thread watches for requests between begin and end. end takes over the host's failure. */
void offload_begin(struct cuda_backend *cu);
void offload_end(struct cuda_backend *cu);

/* stream.h; NULL: nothing is copied in prompts. */
struct expert_stream *offload_stream(const struct cuda_backend *cu);
/* A step's rows are known: starts its copies. */
void offload_stream_begin(struct cuda_backend *cu);
struct stream_cost offload_measure(struct cuda_backend *cu, int layer);

/* After router_select has written the choice of e's experts; sends e->offload_x (rows). */
void offload_send(struct cuda_backend *cu, const struct experts *e, int rows);
/* c->y = (adds: +=) the experts that this step copies to the device. False: none. */
bool offload_copied(struct cuda_backend *cu, const struct pick_case *c, const struct experts *e,
                    bool adds);
/* y (rows, width) = (adds: +=) the host's rows. */
void offload_join(struct cuda_backend *cu, const struct experts *e, float *y, int rows, bool adds);

#endif
