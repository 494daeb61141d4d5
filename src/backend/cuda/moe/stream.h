/*
 * Prompts whose experts are in host memory: a step of many rows uses nearly all experts, and copying one to the device takes
 * less time than the CPU needs for its rows. So in such a step the experts of the first ranks of every layer are copied, and the CPU computes
 * the others meanwhile (offload.h).
 *
 * Experts are copied in groups, through two landing buffers, on a stream of its own that runs ahead of the layers:
 *   copies:  group 0 -> landing 0, group 1 -> landing 1, (landing 0 is free) group 2 -> landing 0, ...
 *   step:    (group 0 has landed) panels -> tiles, (landing 0 is free) experts of group 0 for all rows, ...
 *  1. A group is a run of ranks of one layer. Groups are copied in the order in which layers read them.
 *  2. Landing holds the host's panels. The device makes its tiles of them (pack.cuh), for one group at a time.
 *  3. How many are copied depends on the number of rows alone, by what prepare() measured: the copies of a layer take as
 *     long as the CPU's share (stream_share).
 *  4. Recorded steps copy nothing.
 *  5. Experts that the device has not have ranks; of a layer, those of the first ranks are copied. Without exchanges (place.h) ranks are places.
 */
#ifndef STEEL_BACKEND_CUDA_STREAM_H
#define STEEL_BACKEND_CUDA_STREAM_H

#include "backend/cuda/core/host.h"

struct expert_stream;

/* A layer with experts on the host. */
struct stream_layer {
    const struct mlp *mlp; /* the network's */
    int layer;             /* its index there */
    int n, first; /* experts that the device has not; the host's place of the first of them */
};

/* What the CPU takes for rows of a layer: seconds for each expert that has rows, and for each use of one. */
struct stream_cost {
    double expert, use;
};

/* Returns NULL if experts of no layer can be copied, or (cu->failed, or err is set) on an error. */
struct expert_stream *stream_new(struct cuda_backend *cu, struct backend *host,
                                 const struct stream_layer *layers, int n_layers,
                                 struct error *err);
void stream_free(struct expert_stream *s);
void stream_wait(
    struct expert_stream *s); /* until no copy reads the host's memory; s may be NULL */

size_t stream_bytes(size_t expert,
                    size_t layer); /* of all buffers, at most: device_type.copy_bytes */
int stream_group(const struct expert_stream *s); /* experts of a group, at most */

/* Of n experts, how many to copy if the CPU takes host_s for all n and a copy copy_s for each. Whole groups, or all. */
int stream_share(int n, int group, double host_s, double copy_s);

/* A step begins, whose layout is known: starts its first copies. */
void stream_begin(struct cuda_backend *cu, struct expert_stream *s);
/* Number of ranks of layer `at` that this step copies. */
int stream_count(const struct expert_stream *s, int at);
/* c->y = (adds: +=) the copied experts of layer `at`; router_select has chosen. */
void stream_run(struct cuda_backend *cu, struct expert_stream *s, int at, const struct pick_case *c,
                const struct experts *e, bool adds);

/* Single experts, for place.cu: copied to landing once the event `left` has passed; made tiles of a slot, in the order of the step's
 * stream; and the new order: `out` takes the rank of `in` among experts that the device has not. */
void stream_fetch(struct cuda_backend *cu, struct expert_stream *s, int at, int place,
                  uint8_t *landing, cudaEvent_t left, cudaEvent_t landed);
void stream_fill(struct cuda_backend *cu, struct expert_stream *s, int at, int place, int slot,
                 const uint8_t *landing);
void stream_exchange(struct expert_stream *s, int at, int in, int out);
/* By rank (n); NULL: this layer's experts cannot be copied. */
const int32_t *stream_places(const struct expert_stream *s, int at, int *n);
size_t stream_expert_bytes(const struct expert_stream *s, int at);
int stream_used(const struct expert_stream *s, int at); /* experts of a row */
double stream_seconds(const struct expert_stream *s);   /* to copy a byte */

/* Where router_select leaves the uses of copied experts: device (max_tokens, used) ranks, -1 = none, and weights. */
struct stream_uses {
    int32_t *rank;
    float *weight;
};
struct stream_uses stream_uses(const struct expert_stream *s);

/* For pick.cu: whether a step copies experts; and the number of each layer, or all. */
bool stream_can(const struct cuda_backend *cu);
bool stream_pays(const struct cuda_backend *cu, int rows);
void stream_choose(struct cuda_backend *cu, bool all);

#endif
