/*
 * Steps on the stages of a pipeline (dist/ranks.h), cut into parts ("micro-batches") so that the stages
 * work at the same time. Each stage gets the rows of the stream from the one in front, runs its layers
 * and gives them on; the last one's logits go to rank 0, part by part: while the later parts of a step
 * are on their way, the first ones of the next step can begin. Two steps at most are under way. Where the head is
 * shared (stages.h), rank 0 gets the rows of the stream as well, and computes its half of the logits from them.
 */
#ifndef STEEL_DIST_PIPELINE_H
#define STEEL_DIST_PIPELINE_H

#include "dist/ranks.h"
#include "model/model.h"

enum {
    PIPELINE_PARTS = 8, /* of a step at most, or one for each stage */
    /* What a part costs besides its rows, in rows, on CPUs: its weights are read, and kernels like many rows. So measured
     * on two cores, with experts and without. */
    PIPELINE_DEAR = 64,
};

/* Parts of a step of so many rows, sequences and outputs. Where sequences generate, one for each stage: they take turns.
 * Of a prompt, as many as are done soonest: with more of them all stages work sooner, but each costs `dear` rows. dear 0: not
 * known, one for each stage. */
int pipeline_parts(int pp, int dear, double rows, double seqs, double outs);

struct pipeline;
/* Allocates everything for steps within the bounds. */
struct pipeline *pipeline_new(struct model *m, struct ranks *r, const struct bounds *bounds);
/* Waits until what was sent is there, as long as any wait of ranks; not where the job is lost. */
void pipeline_free(struct pipeline *p);

/* In the place of forward(), on every rank: a step begins and is cut; how many parts it has. b and its
 * arrays stay until all of them have run. Tokens that are still to be chosen are below 0. */
int pipeline_begin(struct pipeline *p, const struct batch *b);
/* The rows of part i of the step begun last. */
struct range pipeline_rows(const struct pipeline *p, int i);
/* Runs this stage's layers over part i, in order. On rank 0 b's tokens of these rows are known now; the
 * others hear them. */
void pipeline_part(struct pipeline *p, int i);
/* In place of forward() for a step of the MTP block, on every rank, while no step is in flight: the last stage has the
 * block, and rank 0 the logits when this returns. */
void pipeline_draft(struct pipeline *p, const struct batch *b);

/* On rank 0: waits for the next part of the oldest step under way. Which out rows of it are there now;
 * n = 0: all were there before. */
struct range pipeline_take(struct pipeline *p);
/* Row `row` of what was taken of the step, (model_row_width). */
float *pipeline_logits(const struct pipeline *p, int row);
/* The oldest step under way is over: all parts have run, and on rank 0 all were taken. */
void pipeline_end(struct pipeline *p);

#endif
