/* Shared by the files that implement ranks.h: waits that always end. */
#ifndef STEEL_DIST_RANKS_INT_H
#define STEEL_DIST_RANKS_INT_H

#include "dist/ranks.h"

/* The kind of a wait decides its limit. */
enum wait {
    WAIT_STEP, /* a busy rank gets more time */
    WAIT_OPEN, /* a busy rank gets much more time */
    WAIT_IDLE  /* rank 0 may be idle; its heartbeat shows that it is alive */
};

/* Waits for an operation of the link; NULL = MPI refused it. False: the job is lost. */
bool ranks_wait_for(struct ranks *r, void *request, enum wait kind, const char *what);
/* Sets the failure. It names the lost rank if that is known. Returns false. */
bool ranks_give_up(struct ranks *r, const char *what, const char *why);

/* Scratch memory of n floats, for sums and rows. */
float *ranks_scratch(struct ranks *r, size_t n);

#endif
