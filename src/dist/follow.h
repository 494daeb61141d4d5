/*
 * Messages from rank 0 to the followers, the other ranks. Rank 0 has the scheduler, the server and the sampler. It
 * broadcasts what to open, and then every step. The followers run the same steps over their shard of the network.
 * Owns the message format.
 */
#ifndef STEEL_DIST_FOLLOW_H
#define STEEL_DIST_FOLLOW_H

#include "backend/batch.h"
#include "dist/ranks.h"

/* How a step runs, as rank 0 decides for all. */
struct follow_step {
    uint64_t key;       /* under which the step may be recorded; 0 = it may not */
    bool deterministic; /* backend.h */
};

/* The followers' callbacks (engine/workers.c). open: `what` (bytes) is rank 0's message; NULL if opening failed, which
 * rank 0 knows by then. The batch of a step has no kv. */
struct follow_ops {
    void *(*open)(struct ranks *r, const void *what, size_t bytes);
    bool (*step)(void *opened, struct batch *b, struct follow_step how, struct error *err);
    void (*close)(void *opened); /* may be NULL */
};

/* On a follower: runs until rank 0 sends the end. Returns the exit status of the process. */
int follow(struct ranks *r, const struct follow_ops *ops);

/* On rank 0: sends what the others open. Success or failure is then agreed on by all (ranks_agree). */
bool follow_send_open(struct ranks *r, void *what, size_t bytes);
/* On rank 0: allocates messages for steps within the bounds. NULL on other ranks. */
struct follow_sender;
struct follow_sender *follow_sender_new(struct ranks *r, const struct bounds *bounds);
void follow_sender_free(struct follow_sender *s);
/* On rank 0: sends a step before running it. Does not wait for the others to receive it. */
void follow_send_step(struct follow_sender *s, const struct batch *b, struct follow_step how);
/* On rank 0, when it has been idle for long: a barrier with all ranks, where no heartbeat shows that they are alive. */
void follow_send_alive(struct ranks *r);
/* On rank 0: no more steps come. */
void follow_send_end(struct ranks *r);

#endif
