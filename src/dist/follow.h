/*
 * How the ranks follow rank 0, which has the scheduler, the server and the choice of tokens. It tells the others what to
 * open, and then every step; they run the same steps over their part of the network. Owns the form of the messages.
 */
#ifndef STEEL_DIST_FOLLOW_H
#define STEEL_DIST_FOLLOW_H

#include "backend/batch.h"
#include "dist/ranks.h"

/* How a step runs, as rank 0 decides for all. */
struct follow_step {
    uint64_t key;       /* it may be recorded; 0 = not */
    bool deterministic; /* backend.h */
};

/* What the followers do (engine/workers.c). open: `what` (bytes) is what rank 0 told; NULL where it failed, which
 * rank 0 has heard by then. The batch lacks kv. */
struct follow_ops {
    void *(*open)(struct ranks *r, const void *what, size_t bytes);
    bool (*step)(void *opened, struct batch *b, struct follow_step how, struct error *err);
    void (*close)(void *opened); /* may be NULL */
};

/* On the others: until rank 0 tells the end. Returns what the process should exit with. */
int follow(struct ranks *r, const struct follow_ops *ops);

/* On rank 0: what the others open. They agree on it (ranks_agree), whether it goes well or not. */
bool follow_tell_open(struct ranks *r, void *what, size_t bytes);
/* On rank 0: room for messages of steps within the bounds. NULL elsewhere. */
struct follow_teller;
struct follow_teller *follow_teller_new(struct ranks *r, const struct bounds *bounds);
void follow_teller_free(struct follow_teller *s);
/* On rank 0, before each step, which the others run too. Does not wait until they have heard. */
void follow_tell_step(struct follow_teller *s, const struct batch *b, struct follow_step how);
/* On rank 0, where it has nothing to tell for long and lines do not tell that all live: they meet. */
void follow_tell_alive(struct ranks *r);
/* On rank 0: no more steps come. */
void follow_tell_end(struct ranks *r);

#endif
