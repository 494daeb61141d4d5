/*
 * Which experts a rank has where their use is known from a file of counts by layer (an importance matrix in GGUF,
 * NAME.counts beside NAME.in_sum2). All ranks have as many experts as without it, and about equal load. Groups of
 * experts (layer.h, struct router) stay together.
 */
#ifndef STEEL_DIST_EXPERT_LOAD_H
#define STEEL_DIST_EXPERT_LOAD_H

#include "backend/layer.h"
#include "file/tensorfile.h"

/* order (n): the experts of lane 0, then those of lane 1 and so on, ascending in each. Unchanged where the file has no
 * counts of the layer, or groups cannot be divided by lanes. False: the file's counts do not fit the layer. */
bool expert_load_order(const struct tensorfile *stats, int layer, const struct router *router,
                       int n, int lanes, int32_t *order, struct error *err);
/* The same for given counts (n). */
void expert_load_share(const float *counts, int n, int n_groups, int lanes, int32_t *order);

#endif
