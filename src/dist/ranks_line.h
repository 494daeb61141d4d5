/*
 * Lines: a TCP connection from each rank to rank 0 beside MPI, with a heartbeat. MPI does not report that a
 * process has died, and launchers end all ranks shortly after one of them, so the reason must be known at
 * once. A line closes when its process ends, and is silent when the process is stopped.
 *
 * A thread watches the lines. It detects a rank that has ended or is silent. It ends this process if the job is
 * lost and nothing else ends it, or if MPI does not return from starting or ending. It never waits for another
 * rank, and knows nothing of models.
 */
#ifndef STEEL_DIST_RANKS_LINE_H
#define STEEL_DIST_RANKS_LINE_H

#include "dist/ranks.h"

struct ranks_line;

/* A rank whose own thread did not run for this long was stopped, maybe with all others (a suspended job). That time
 * does not count as silence of any rank. */
enum { RANKS_AWAY_MS = 1000 };

/* The address of rank 0, and the key that proves a caller is one of the ranks. */
struct ranks_offer {
    uint64_t key[2];
    int32_t port; /* 0 = none */
    int32_t n;
    int32_t named; /* the address is that of STEEL_RANK_ADDRESS */
    char address[16][64];
};

/* Starts the thread. From here on MPI has RANKS_START seconds to start. NULL: no thread could be created. */
struct ranks_line *ranks_line_new(struct ranks *r);
/* On rank 0: listens. nearby: all ranks share its network, so it listens at 127.0.0.1, or at STEEL_RANK_ADDRESS. */
void ranks_line_listen(struct ranks_line *l, bool nearby, struct ranks_offer *offer);
/* On the others: connects; whether rank 0 has answered. */
bool ranks_line_dial(struct ranks_line *l, const struct ranks_offer *offer, bool nearby);
/* Cancels the limit below. */
void ranks_line_ready(struct ranks_line *l);
/* The process ends after this many seconds with the reason, unless ranks_line_ready comes first: for calls that cannot be
 * interrupted. */
void ranks_line_limit(struct ranks_line *l, int seconds, const char *why);
/* Sends a heartbeat now. */
void ranks_line_beat(struct ranks_line *l);
/* Wakes the thread to look at changed state. */
void ranks_line_wake(struct ranks_line *l);
/* Whether another rank is known to be busy, or has made progress lately. */
bool ranks_line_busy(struct ranks_line *l);
/* On the others: sends rank 0 the reason of this rank's end, and gives it a moment to end first. */
void ranks_line_tell(struct ranks_line *l, const char *why);
/* This rank ends normally: MPI has timeout_s seconds for it. */
void ranks_line_bye(struct ranks_line *l);
void ranks_line_free(struct ranks_line *l);

#endif
