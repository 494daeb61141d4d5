/*
 * Steps over the stages of a pipeline, cut into micro-batches ("parts") so that the stages work at the same
 * time. Each stage receives the rows of the stream from the previous one, runs its layers and sends them to the next.
 * The last stage sends its logits to rank 0, part by part: while later parts of a step are computed, the first
 * parts of the next step can start. Two steps at most are in flight. Where the head is shared (stages.h), rank 0
 * receives the rows of the stream as well, and computes its part of the logits.
 */
#ifndef STEEL_DIST_PIPELINE_H
#define STEEL_DIST_PIPELINE_H

#include "dist/ranks.h"
#include "model/model.h"

enum {
    PIPELINE_PARTS = 8, /* the most of a step, or one per stage if that is more */
    /* The fixed cost of a part on CPUs, in rows: its weights are read again, and kernels prefer many rows. Measured on
     * two cores, with experts and without. */
    PIPELINE_PART_OVERHEAD = 64,
};

/* The number of parts of a step. Decodes have one part per stage: they take turns. A prompt has the number that finishes
 * soonest: with more parts all stages start sooner, but each part costs `overhead` rows. overhead 0 (unknown): one part
 * per stage. */
int pipeline_parts(int pp, int overhead, double rows, double seqs, double outs);

struct pipeline;
/* Allocates everything for steps within the bounds. */
struct pipeline *pipeline_new(struct model *m, struct ranks *r, const struct bounds *bounds);
/* Waits for messages in flight, unless the job is lost. */
void pipeline_free(struct pipeline *p);

/* In place of forward(), on every rank: starts a step and returns the number of its parts. b and its arrays stay until
 * all parts have run. Tokens that are not chosen yet are below 0. */
int pipeline_begin(struct pipeline *p, const struct batch *b);
/* The rows of part i of the step started last. */
struct range pipeline_rows(const struct pipeline *p, int i);
/* Runs this stage's layers over part i, in order of i. On rank 0 the tokens of its rows are known now, and are sent to
 * the other ranks. */
void pipeline_part(struct pipeline *p, int i);
/* In place of forward() for a step of the MTP block, on every rank, while no step is in flight: the last stage has the
 * block, and rank 0 the logits when this returns. */
void pipeline_draft(struct pipeline *p, const struct batch *b);

/* On rank 0: waits for the logits of the next part of the oldest step. Returns their out rows; n = 0: there are no
 * more parts. */
struct range pipeline_take(struct pipeline *p);
/* Logits row `row` of that step (model_row_width). */
float *pipeline_logits(const struct pipeline *p, int row);
/* Ends the oldest step: all parts have run, and on rank 0 all were taken. */
void pipeline_end(struct pipeline *p);

#endif
