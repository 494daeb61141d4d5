/* What the files of ranks.h share: waits that always end. */
#ifndef STEEL_DIST_RANKS_INT_H
#define STEEL_DIST_RANKS_INT_H

#include "dist/ranks.h"

/* What a rank waits for. */
enum wait {
    IN_STEP, /* a busy rank gets more time */
    OPENING, /* a busy rank gets much more time */
    FOR_WORD /* rank 0 may be idle: its line shows that it lives */
};

/* Waits for an operation of the link; NULL = MPI refused it. False: the job is lost. */
bool ranks_wait_for(struct ranks *r, void *request, enum wait kind, const char *what);
/* Sets the failure, by the lost rank where one is known; returns false. */
bool ranks_give_up(struct ranks *r, const char *what, const char *why);

/* Room for sums and rows, of n floats. */
float *ranks_scratch(struct ranks *r, size_t n);

#endif
