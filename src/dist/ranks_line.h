/*
 * A line from each rank to rank 0, beside MPI: a TCP connection with a beat now and then. MPI does not
 * say that a process has died, and launchers end all ranks a moment after one of them: who has a word
 * to say must know at once. A line ends when its process does, and is silent when it is stopped.
 *
 * A thread watches the lines. It finds a rank that has ended or is silent, and it ends this process
 * where the job is lost and nothing else does, or where MPI never comes back from starting or ending.
 * It waits for nobody, and knows nothing of models.
 */
#ifndef STEEL_DIST_RANKS_LINE_H
#define STEEL_DIST_RANKS_LINE_H

#include "dist/ranks.h"

struct ranks_line;

/* Who has not looked for so long stood still itself (all ranks were stopped together, as a scheduler suspends a job):
 * that time counts against nobody. */
enum { RANKS_AWAY_MS = 1000 };

/* Where rank 0 is to be reached, and the word that proves who calls. */
struct ranks_offer {
    uint64_t key[2];
    int32_t port; /* 0: nowhere */
    int32_t n;
    int32_t named; /* the only address is the one that STEEL_RANK_ADDRESS names */
    char address[16][64];
};

/* From here on MPI has RANKS_START seconds to begin. NULL: there is no thread to be had. */
struct ranks_line *ranks_line_new(struct ranks *r);
/* On rank 0: listens. nearby: all ranks share its network, so that nobody else need reach it: at 127.0.0.1, or where
 * STEEL_RANK_ADDRESS says. */
void ranks_line_listen(struct ranks_line *l, bool nearby, struct ranks_offer *offer);
/* On the others: whether rank 0 answered. */
bool ranks_line_dial(struct ranks_line *l, const struct ranks_offer *offer, bool nearby);
/* What had a limit has come: all lines that will be are there. */
void ranks_line_ready(struct ranks_line *l);
/* The process ends after so many seconds and says why, unless ranks_line_ready comes before: for what cannot be waited
 * for otherwise. */
void ranks_line_limit(struct ranks_line *l, int seconds, const char *why);
/* The others hear of this rank now, not at the next beat. */
void ranks_line_beat(struct ranks_line *l);
/* Something has changed that the thread should see at once. */
void ranks_line_wake(struct ranks_line *l);
/* Whether another rank is known to work, or to have got on with something lately. */
bool ranks_line_busy(struct ranks_line *l);
/* On the others: what they end with, for rank 0 to say; then rank 0 has a moment to end first. */
void ranks_line_tell(struct ranks_line *l, const char *why);
/* This rank is about to end as it should: MPI has `timeout` seconds for it. */
void ranks_line_bye(struct ranks_line *l);
void ranks_line_free(struct ranks_line *l);

#endif
