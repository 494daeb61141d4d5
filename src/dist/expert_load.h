/*
 * Which experts a rank takes where it is known how often each is used: a file of counts (an importance
 * matrix in GGUF, NAME.counts beside NAME.in_sum2) says it by layer. All ranks have as many experts as
 * without one, and about the same load. Groups of experts (layer.h, struct router) stay together.
 */
#ifndef STEEL_DIST_EXPERT_LOAD_H
#define STEEL_DIST_EXPERT_LOAD_H

#include "backend/layer.h"
#include "file/tensorfile.h"

/* order (n): the experts of lane 0 of `lanes`, then those of lane 1, ..., ascending in each; as they
 * are where the file knows nothing of the layer, or groups do not go into lanes. False: what the file has of the layer
 * does not fit. */
bool expert_load_order(const struct tensorfile *stats, int layer, const struct router *router,
                       int n, int lanes, int32_t *order, struct error *err);
/* The same of counts that are there. */
void expert_load_share(const float *counts, int n, int n_groups, int lanes, int32_t *order);

#endif
