/*
 * Masks of constrained rows. Most masks take some 40 us: a few threads compute those of a step at once, and
 * the engine waits for them. A mask that takes more than a step should wait for becomes a job: background
 * threads compute it over several steps, within a budget of CPU time for each step.
 *
 * Invariants:
 *  1. a sampler belongs to one thread at a time: to the engine's, or to the background thread that has its job
 *  2. a paused job keeps its thread, so jobs of other clients may wait for it; jobs are taken in the order of
 *     what their clients have used
 *  3. what is computed does not depend on when: a mask that was given up is computed again from the start
 */
#ifndef STEEL_ENGINE_MASKS_H
#define STEEL_ENGINE_MASKS_H

#include "sample/sampler.h"

enum mask_state {
    MASK_NONE,
    MASK_QUEUED,
    MASK_RUNNING,
    MASK_DONE,
};

/* The mask of one sequence. Zero at first. */
struct mask_job {
    struct sampler *sampler;
    int64_t used_ns; /* of its client, when the job starts: jobs with less come first */
    int most;        /* pieces of work that masks_try may spend on it */
    int64_t cpu_ns;  /* CPU time of the last masks_try, or of the job once it is done */
    int pieces;      /* the same in pieces of work (sample_constraint.pace) */
    bool dropped;    /* these three under the maker's lock */
    enum mask_state state;
    struct mask_job *next;
};

enum {
    MASK_TRY = 4,        /* pieces that a step spends on one mask */
    MASK_TRY_DEBTOR = 1, /* ... of a client that has used more than its share */
};

struct mask_maker;
/* done: called by a background thread, without locks, after each job. */
struct mask_maker *masks_new(void (*done)(void *arg), void *arg);
void masks_free(struct mask_maker *k); /* all jobs must be taken or dropped */

/* Computes the masks of jobs (n) that take no more than their `most` and are ready at that time (clock_ns); see
 * sampler_is_prepared. Jobs of clients that have used less come first. */
void masks_try(struct mask_maker *k, struct mask_job **jobs, int n, int64_t until_ns);
/* Computes the mask in the background; until masks_take or masks_drop the sampler is not the caller's. */
void masks_start(struct mask_maker *k, struct mask_job *job);
/* Whether the job is done; then it is the caller's again. */
bool masks_take(struct mask_maker *k, struct mask_job *job);
/* Gives the job up. Returns when no thread uses its sampler any more. */
void masks_drop(struct mask_maker *k, struct mask_job *job);
/* CPU time for jobs until the next call. What was left is lost, what was used beyond it is subtracted. */
void masks_grant(struct mask_maker *k, int64_t ns);

#endif
