/* What the files of ranks.h share: waits that end, and sums that move on meanwhile. */
#ifndef STEEL_DIST_RANKS_INT_H
#define STEEL_DIST_RANKS_INT_H

#include "dist/ranks.h"

/* What is waited for. */
enum wait {
    IN_STEP, /* who is known to work is waited for longer */
    OPENING, /* the same, and much longer */
    FOR_WORD /* rank 0 may have none: its line says that it lives */
};

/* Waits for an operation that the link began; NULL: it was refused. False: the job is lost. */
bool ranks_wait_for(struct ranks *r, void *request, enum wait kind, const char *what);
/* Keeps the failure that names a rank, where there is such; false. */
bool ranks_give_up(struct ranks *r, const char *what, const char *why);

/* Room for sums and rows, of n floats. */
float *ranks_scratch(struct ranks *r, size_t n);

#endif
