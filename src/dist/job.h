/*
 * The job: the processes (ranks) that a launcher such as mpirun has started together, as commands and the server see it.
 * Rank 0 runs the command, the others are its workers. In a single process none of this does anything.
 */
#ifndef STEEL_DIST_JOB_H
#define STEEL_DIST_JOB_H

#include "base/error.h"

#include <stdbool.h>

enum job_role {
    JOB_ALONE,
    JOB_FIRST,
    JOB_WORKER, /* runs the steps of rank 0, not the command */
    JOB_FAILED, /* there is a job, but it could not be joined */
};
/* At the start of the program. The arguments must be the same on all ranks, and must stay. say: a message for the user if
 * this process is the one to report it, else empty. */
enum job_role job_join(const char *program, const char *arguments, struct error *say);
enum { JOB_ARGUMENTS = 4096 }; /* bytes, including the final 0 */
/* At the end of the program. Ends workers that still wait for a model. */
void job_leave(void);

/* Flags of commands that open a model. */
struct job_options {
    int tp, pp; /* 0 = not given */
    bool ep;
    const char *expert_stats; /* a file, or NULL */
    int timeout_s;            /* 0 = the default */
};
bool job_arrange(const struct job_options *o, struct error *err);
int job_size(void); /* ranks; 1 = alone */

/* A file descriptor that is readable once the job is lost; -1 = alone. */
int job_alarm(void);
/* Why the job is lost, for the caller to tell the user; NULL = it is not. */
const char *job_lost(void);
/* Declares the job lost. False: this process is alone. */
bool job_fail(const char *why);

#endif
