/*
 * What one rank takes of a network that several run together (dist/ranks.h): heads, hidden units or
 * experts, and rows of the head. The network becomes a smaller one, and the list of its weights says
 * which rows and columns are read. What cannot be cut (a block of a quantised row would be torn, there
 * are fewer heads than ranks) every rank has whole.
 */
#ifndef STEEL_DIST_SPLIT_H
#define STEEL_DIST_SPLIT_H

#include "dist/ranks.h"
#include "model/build.h"
#include "model/cut.h"

/* Cuts net and its wants for rank `r`; does nothing without ranks. */
bool split_network(const struct tensorfile *f, const struct config *c, struct network *net,
                   struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct error *err);

/* The same as the cut of a model_shard (model.h); arg: the ranks. */
bool split_for(void *arg, const struct tensorfile *f, const struct config *c, struct network *net,
               struct tensor_spec *specs, int n_specs, struct error *err);

#endif
