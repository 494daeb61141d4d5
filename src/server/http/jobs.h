/*
 * Jobs for worker threads, such that nobody's work holds up everybody's. A job has a client and an
 * estimate of its work; it is short or long by that estimate, and turns long when it runs for longer
 * than short jobs do. Knows nothing of what jobs are.
 *
 * Invariants:
 *  1. waiting jobs are taken in the order of `turn`: when a job would end if its client had a worker
 *     to itself and all jobs of the client came one after the other. So little work goes before
 *     much, one client's many jobs do not delay another's first, and every turn comes
 *  2. at most n_long long jobs are started at once, and one per client; at most n_short short ones
 *     run: there is always room for a short job
 *  3. a job that turned long no longer counts as short; spare threads let others be taken meanwhile
 *  4. every job added comes out of exactly one of jobs_remove and jobs_finished
 */
#ifndef STEEL_SERVER_JOBS_H
#define STEEL_SERVER_JOBS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    JOB_SHORT_BYTES = 64 << 10, /* more is a long job */
    JOB_SHORT_MS = 250,         /* a short job that runs for longer is a long one */
    JOB_NS_A_BYTE = 1000,       /* the estimate by which turns are given */
};

struct job {
    uint64_t client; /* whose */
    size_t bytes;    /* how much work, in bytes of input */
    /* the queue's own */
    struct job *next;
    int64_t turn, started_ns;
    bool is_long;
};

struct jobs;
/* run is called on a worker; fd (an eventfd) is written when a job has finished. n_long long jobs and
 * n_short short ones run at once. NULL: no threads to be had. */
struct jobs *jobs_new(int n_long, int n_short, void (*run)(struct job *job), int fd);
void jobs_add(struct jobs *q, struct job *job, int64_t now_ns);
bool jobs_remove(struct jobs *q, struct job *job); /* false: it has been started, or is finished */
struct job *jobs_finished(struct jobs *q);         /* a list */
/* To be called often: finds jobs that turned long. False: there are none at all. */
bool jobs_check(struct jobs *q, int64_t now_ns);
/* A worker that has nothing else to do gives free memory back to the system. */
void jobs_trim(struct jobs *q);
struct jobs_count {
    int waiting, running_short, running_long;
};
struct jobs_count jobs_count(struct jobs *q);
/* Ends the threads once their jobs return; jobs that wait are finished without having run. */
void jobs_stop(struct jobs *q);
void jobs_free(struct jobs *q); /* after jobs_stop */

#endif
