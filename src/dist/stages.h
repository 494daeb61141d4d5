/*
 * Divides layers into pipeline stages of about equal cost. The cost is the weight bytes that a stage reads in a step of
 * STAGES_ROWS sequences: the expected number of experts, and all of the head. So stages take equal time in decoding.
 * Memory is not balanced: the embedding costs nothing, and a stage with few, expensive layers may hold
 * less of the model than another one. Depends on the file's names and shapes alone, so every rank and `steel plan`
 * get the same result.
 */
#ifndef STEEL_DIST_STAGES_H
#define STEEL_DIST_STAGES_H

#include "dist/ranks.h"
#include "model/build.h"

enum { STAGES_ROWS = 8 };

/* The layers of stage r->stage in a network that is not cut yet, without the MTP block, which is on the head's stage.
 * False: there are too few layers, or too many that must stay together. */
bool stages_layers(const struct tensorfile *f, const struct config *c, const struct network *net,
                   const struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct range *out, struct error *err);
/* The same for given costs (n) of layers, plus `front` in the first stage and `back` in the last. joined[i]: layer i stays
 * with the previous one. first (pp): the first layer of each stage. False: there is no such cut. */
bool stages_cut(const double *cost, const bool *joined, int n, double front, double back, int pp,
                int *first);

/* Whether the first stage has the first rows of the head and the last one the others: on CPUs, where each stage is one
 * rank and the head is not tied. For a network that is not cut yet. */
bool stages_share_head(const struct network *net, const struct ranks *r);
/* This rank's rows of a shared head; none on the stages between. */
struct range stages_head(const struct ranks *r, int n_vocab);

/* Whether the spec belongs to a layer, and not to embedding or head. */
bool stages_spec_of_layer(const struct tensorfile *f, const struct config *c,
                          const struct tensor_spec *spec);

#endif
