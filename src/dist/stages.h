/*
 * Which layers a stage of a pipeline has (dist/ranks.h): runs of about equal cost, which is what a stage
 * reads of its weights in a step of STAGES_ROWS sequences: of experts those that so many meet, of the head all.
 * So stages take about as long as each other where answers are generated. What they hold is not balanced: the
 * embedding costs nothing, and a stage of few, dear layers may have less of the model than another one.
 * A function of the file's names and shapes and of nothing else: every rank and `steel plan` come to the same.
 */
#ifndef STEEL_DIST_STAGES_H
#define STEEL_DIST_STAGES_H

#include "dist/ranks.h"
#include "model/build.h"

enum { STAGES_ROWS = 8 };

/* The layers of stage r->stage, of a network that is not cut yet; without the block that drafts, which is
 * beside the head. False: there are too few, or layers that must stay together are too many. */
bool stages_layers(const struct tensorfile *f, const struct config *c, const struct network *net,
                   const struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct range *out, struct error *err);
/* The same of costs alone: cost (n) of layers, in the first stage `front` besides, in the last one `back`;
 * joined[i]: layer i stays with the one before. first (pp): of each stage. False: there is no such cut. */
bool stages_cut(const double *cost, const bool *joined, int n, double front, double back, int pp,
                int *first);

/* Whether the first stage has the first rows of the head, and the last one the others: on CPUs, where each is
 * one rank and the head is a weight of its own. Of a network that is not cut yet. */
bool stages_share_head(const struct network *net, const struct ranks *r);
/* The rows that this rank has of a head that is shared; none between first and last. */
struct range stages_head(const struct ranks *r, int n_vocab);

/* Whether the want is of a layer, not of the model's ends. */
bool stages_want_of_layer(const struct tensorfile *f, const struct config *c,
                          const struct tensor_spec *want);

#endif
