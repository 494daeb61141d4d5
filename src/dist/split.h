/*
 * The part of a network that one rank has: heads, hidden units or experts, and rows of the head. Makes the network
 * smaller, and sets in its specs which rows and columns are read. Every rank has those parts whole that cannot be cut:
 * a block of a quantised row would be split, or there are fewer heads than ranks.
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
