/*
 * Cuts a network to one rank's shard: heads, hidden units or experts, and rows of the head. Shrinks the network and
 * sets in its tensor specs which rows and columns are read. A tensor is replicated on every rank if it cannot be cut,
 * because a block of a quantised row would be split, or because there are fewer heads than ranks.
 */
#ifndef STEEL_DIST_SPLIT_H
#define STEEL_DIST_SPLIT_H

#include "dist/ranks.h"
#include "model/build.h"
#include "model/cut.h"

/* Cuts net and its specs for rank `r`; nothing if r is NULL. */
bool split_network(const struct tensorfile *f, const struct config *c, struct network *net,
                   struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct error *err);

/* The same as the cut of a model_shard (model.h); arg: the ranks. */
bool split_for(void *arg, const struct tensorfile *f, const struct config *c, struct network *net,
               struct tensor_spec *specs, int n_specs, struct error *err);

#endif
