/*
 * Experts placed by use (options.h: host_all). The host has all experts, the device has some of them in slots. Routers count uses,
 * and an expert of the host that was used more takes the slot of one that was used less:
 *   copies:  panels of the expert -> landing
 *   step:    ... the last step's kernels; tiles of the slot, tables; the next step's kernels ...
 *  1. Tables and slots change between steps, in the order of the stream. A step sees one placement, recorded or not.
 *  2. Counts come back every few steps, by a copy that nobody waits for. A use counts half after HALF_ROWS more rows.
 *  3. Two experts are exchanged if their counts differ by more than chance would explain (place_gain), the largest gain first.
 *  4. Copies take a share of the bandwidth that prepare() measured.
 */
#ifndef STEEL_BACKEND_CUDA_PLACE_H
#define STEEL_BACKEND_CUDA_PLACE_H

#include "backend/cuda/core/host.h"

enum { PLACE_MOVES = 8 }; /* exchanges under way */

struct expert_places;
struct expert_stream;
struct offload_layer;

/* layers (n): pointers to those of the worker, whose slots hold the first experts. Returns NULL if nothing can be exchanged, or
 * (err is set) on an error. */
struct expert_places *places_new(struct cuda_backend *cu, struct expert_stream *s,
                                 struct offload_layer *const *layers, const int *n_expert, int n,
                                 struct error *err);
void places_free(struct expert_places *p);
/* A step begins. */
void places_begin(struct cuda_backend *cu, struct expert_places *p);
/* tier_ops */
size_t places_uses(const struct expert_places *p, float *out);
void places_set(struct cuda_backend *cu, struct expert_places *p, const float *uses);

/* What an exchange gains, in uses; 0: no more than chance. */
float place_gain(float in, float out);

#endif
