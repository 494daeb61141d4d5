/*
 * A step on the stages of a pipeline (base/ranks.h): cut into parts ("micro-batches") so that the stages
 * work at the same time. Each stage gets the rows of the stream from the one in front, runs its layers
 * and gives them on; the last one's logits go to rank 0.
 */
#ifndef STEEL_MODEL_PIPELINE_H
#define STEEL_MODEL_PIPELINE_H

#include "model/model.h"

enum {
    PIPELINE_PARTS = 2,      /* a step is cut into so many */
    PIPELINE_PART_ROWS = 32, /* a prompt with fewer rows is not cut */
};

struct pipeline;
/* Room for steps of so many rows, sequences and outputs. */
struct pipeline *pipeline_new(struct model *m, int max_tokens, int max_seqs, int max_out);
void pipeline_free(struct pipeline *p);
/* In the place of forward(); when it returns on rank 0, the logits of all out rows are there. */
void pipeline_forward(struct pipeline *p, const struct batch *b);

#endif
