/*
 * Where it pays to compute a step in two halves, one of them while the ranks add up the other (model.h,
 * forward_halves): a rule over what the ranks measured of their link when they began, and of steps since. Rank 0
 * decides and tells the others with the step. Results do not depend on it where they do not on how prompts are cut.
 */
#ifndef STEEL_ENGINE_OVERLAP_H
#define STEEL_ENGINE_OVERLAP_H

#include "backend/backend.h"
#include "base/ranks.h"

enum {
    OVERLAP_ROWS = 128, /* fewer are not halved unasked, and nothing is learned from them */
    OVERLAP_DEAR_CPU =
        64, /* what a part costs besides its rows, in rows: as PIPELINE_DEAR, for the same reasons */
    OVERLAP_DEAR_GPU = 256, /* tiles are half full, and layers cost what they cost twice */
};
#define OVERLAP_WORTH 0.05 /* of a step: less is not worth the halving */

struct overlap {
    double dear; /* OVERLAP_DEAR */
    double sums; /* over ranks in a step of prompts, of all rows each */
    double row_bytes;
    /* Of the link, as the slowest rank has it: */
    double latency; /* s of a sum of few bytes */
    double byte;    /* s, of large ones */
    double own;     /* of it, what a rank has to do itself, and cannot while it computes */
    double row;     /* s that a row costs in steps that are not halved; 0 = not known */
};

/* What is to be known beforehand. */
void overlap_init(struct overlap *o, const struct network *net, const struct ranks *r);
/* On all ranks: measures the link, by sums of up to `most` floats. */
void overlap_measure(struct overlap *o, struct backend *be, size_t most);
/* A step of so many rows, not halved, took so long. */
void overlap_learn(struct overlap *o, int rows, double seconds);
/* Seconds that halves save of a step of so many rows; below 0: they cost. */
double overlap_gain(const struct overlap *o, int rows);
bool overlap_pays(const struct overlap *o, int rows);

#endif
