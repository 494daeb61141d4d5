/*
 * Assigns experts to ranks by measured load: a file of counts by layer (an importance matrix in GGUF, NAME.counts
 * beside NAME.in_sum2). Each rank has the same number of experts as without the file, and about equal load. Groups
 * of experts (layer.h, struct router) stay together.
 */
#ifndef STEEL_DIST_EXPERT_LOAD_H
#define STEEL_DIST_EXPERT_LOAD_H

#include "backend/layer.h"
#include "file/tensorfile.h"

/* order (n): the experts of tensor-parallel rank 0, then of rank 1 and so on, ascending within each. The identity if
 * the file has no counts of the layer, or if the groups cannot be divided by tp. False: the counts do not fit the
 * layer. */
bool expert_load_order(const struct tensorfile *stats, int layer, const struct router *router,
                       int n, int tp, int32_t *order, struct error *err);
/* The same for given counts (n). */
void expert_load_share(const float *counts, int n, int n_groups, int tp, int32_t *order);

#endif
