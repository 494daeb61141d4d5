/*
 * Worker threads with a fair queue. A job has a client and an estimate of its work. The estimate makes
 * it short or long, and a short job that runs too long turns long. The queue knows nothing about the
 * work itself.
 *
 * Invariants:
 *  1. Jobs start in the order of `turn`, the virtual time at which the job would end if its client had a
 *     worker of its own and ran its jobs one after the other (fair queueing). Small jobs go first, many
 *     jobs of one client do not delay another's first, and no job starves.
 *  2. At most n_long long jobs run, n_each per client, and at most n_short short ones: long jobs never take
 *     all workers.
 *  3. A job that turned long no longer counts as short. Spare threads take its place.
 *  4. Every job added is returned by exactly one of jobs_remove and jobs_finished.
 */
#ifndef STEEL_SERVER_JOBS_H
#define STEEL_SERVER_JOBS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    JOB_SHORT_BYTES = 64 << 10, /* estimates above are long jobs */
    JOB_SHORT_MS = 250,         /* a short job that runs longer turns long */
    JOB_NS_A_BYTE = 1000,       /* the estimated speed, for `turn` */
};

struct job {
    uint64_t client; /* whose */
    size_t bytes;    /* how much work, in bytes of input */
    /* private */
    struct job *next;
    int64_t turn, started_ns;
    bool is_long;
};

struct jobs;
/* Workers call `run`. os_wake(fd) when a job has finished. NULL: no thread could be
 * started. */
struct jobs *jobs_new(int n_long, int n_each, int n_short, void (*run)(struct job *job), int fd);
void jobs_add(struct jobs *q, struct job *job, int64_t now_ns);
bool jobs_remove(struct jobs *q, struct job *job); /* false: it has started or finished */
/* A list. os_woken(fd) comes first: queues may share it, and a job may finish meanwhile. */
struct job *jobs_finished(struct jobs *q);
/* Call it often: marks jobs that turned long. False: there are no jobs. */
bool jobs_check(struct jobs *q, int64_t now_ns);
/* An idle worker returns free memory to the system. */
void jobs_trim(struct jobs *q);
struct jobs_count {
    int waiting, running_short, running_long;
};
struct jobs_count jobs_count(struct jobs *q);
/* Stops the threads after their current jobs. Waiting jobs finish without running. */
void jobs_stop(struct jobs *q);
void jobs_free(struct jobs *q); /* after jobs_stop */

#endif
