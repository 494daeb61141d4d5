/*
 * Several processes ("ranks") that run one model together. A launcher (mpirun, srun) starts them, MPI
 * connects them; without one there is a single process, no MPI library is loaded, and every
 * `struct ranks *` is NULL. Rank = stage * tp + lane: the lanes of a stage share its layers (tensor
 * parallel), the stages follow each other (pipeline).
 *
 * Sums are in the order of lanes, so that the same arrangement gives the same bytes. Every wait ends:
 * when a rank is lost (ranks_line.h) or nobody gets on, the first error is kept, and everything after
 * it does nothing. One thread at a time, but for ranks_lose.
 */
#ifndef STEEL_DIST_RANKS_H
#define STEEL_DIST_RANKS_H

#include "backend/comm.h"
#include "base/error.h"
#include "base/range.h"

#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>

enum {
    RANKS_MOST = COMM_MOST,
    RANKS_GATHER_BYTES = 1 << 15, /* sums up to this size go whole to everybody: one message less */
    RANKS_VALUE = 4096,           /* of a value that must be the same everywhere, and its 0 */
    /* Every limit of a wait, in seconds. */
    RANKS_TIMEOUT = 10,  /* a rank is silent, or all wait for each other; --rank-timeout */
    RANKS_PATIENCE = 30, /* times that: for a rank that says it works */
    RANKS_START = 120,   /* until MPI has begun everywhere, or has made a group */
    RANKS_LONG =
        3600, /* a rank opens its part of a model; or rank 0 is silent, and no line says more */
    RANKS_LAST = 3, /* from knowing that the job is lost to the end of the process */
};

struct ranks_link;
struct ranks_line;

/* A sum under way (ranks_sum.c). */
struct ranks_sum {
    float *rows; /* (n) */
    float *to;   /* (n) where they are to be in the end; NULL: where they are */
    size_t n;
    int n_rows, width;    /* of ranks_sum_rows; 0 of the others */
    const uint64_t *from; /* (n_rows) */
    float *room;          /* (need) */
    size_t need, each;    /* each: floats of the largest piece that a lane adds up */
    int stage;
    void *request;           /* of the link; NULL: nothing is under way */
    int talk[4][RANKS_MOST]; /* of an exchange: counts and places, out and in */
};

struct ranks {
    struct comm comm; /* first: what backends see (ranks_comm) */
    const struct ranks_link *link;
    int rank, size;
    int local, n_local; /* among those of this machine */
    int tp, pp;         /* tp * pp = size */
    bool ep;            /* experts are spread over lanes, not cut */
    int lane, stage;
    int tp_asked, pp_asked; /* on the command line; 0 = unsaid */
    bool ep_asked;
    const char
        *expert_stats; /* a file: how often experts are used (dist/expert_load.h); NULL = none */
    bool taken;        /* a model has them, or was to have them */
    bool following;    /* on rank 0: the others wait for steps */
    const char *program, *arguments; /* must be the same everywhere; for the caller to set */
    float *scratch;                  /* for sums */
    size_t n_scratch;
    struct ranks_sum sum;
    struct error failure; /* the first one; empty = none */
    struct ranks_line *line;
    bool lined;           /* every rank has one to rank 0 */
    int alarm;            /* eventfd: readable once the job is lost */
    int crowded;          /* other programs want the cores: so many waits from now on are short */
    atomic_int timeout_s; /* the same everywhere, rank 0 says it */
    atomic_bool waiting;  /* for another rank */
    atomic_uint done;     /* waits that have ended */
    atomic_bool losing;   /* somebody writes, or has written, `lost` */
    struct error lost;    /* why the job is lost: is there when `stop` is set */
    atomic_bool stop;     /* the job is lost: nothing is waited for any more */
    atomic_bool said;     /* on rank 0: the user has been told why */
};

/* Whether a launcher started this process as one of several. */
bool ranks_launched(void);
/* Whether this process is the one that speaks, also where there is no MPI to ask. */
bool ranks_first(void);
/* Loads MPI and finds the others. */
struct ranks *ranks_open(struct error *err);
/* What ranks_open gave, for the one model that all of them run; NULL: this process is alone. */
struct ranks *ranks_world(void);
/* On rank 0, for all. */
void ranks_set_timeout(struct ranks *r, int seconds);
/* Divides the ranks. tp 0: all that --pp leaves. */
bool ranks_arrange(struct ranks *r, int tp, int pp, bool ep, struct error *err);
/* The ranks of this one's stage as a backend's communicator; after ranks_arrange. */
struct comm *ranks_comm(struct ranks *r);
static inline struct ranks *ranks_from(struct comm *c) /* NULL of NULL */
{
    return (struct ranks *)c;
}
/* Whether all say the same `what` ("version", "file") is: an error names both. */
bool ranks_same(struct ranks *r, const char *what, const char *value, struct error *err);
/* Room for sums and rows of so many floats: none is made later. */
void ranks_reserve(struct ranks *r, size_t floats);
void ranks_release(struct ranks *r); /* what was reserved */
void ranks_close(struct ranks *r);   /* r may be NULL */

/* Keeps the first failure; true while there is none. */
bool ranks_ok(const struct ranks *r, struct error *err);
/* The job is lost: whoever waits stops waiting, r->alarm is readable, and the process has RANKS_LAST
 * seconds to end. From any thread; true for the first, whose reason is kept in r->lost. */
bool ranks_lose(struct ranks *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* This rank cannot go on, and why (an op has failed, a file is cut short): its failure, unless it has one, and the
 * end of the job, unless that is lost already. Rank 0 is told at once. */
void ranks_fail(struct ranks *r, const char *why);

/* From rank 0 to all. idle: there may be nothing to say for long. The line ends that wait; where a rank has none,
 * rank 0 has to say something (ranks_meet) within RANKS_LONG. */
bool ranks_tell(struct ranks *r, void *buf, size_t bytes, bool idle);
/* The same on rank 0, without waiting until all have heard: buf stays until ranks_wait_end. */
struct ranks_wait;
struct ranks_wait *ranks_tell_begin(struct ranks *r, void *buf, size_t bytes);
/* While this rank computes: lets what it sends make progress. */
void ranks_poke(struct ranks *r);
/* Each lane's rows are added up, in order, everywhere in the stage. */
void ranks_sum(struct ranks *r, float *rows, size_t n);
/* The same of rows (n_rows, width), of which lane t has something only where bit t of from[i] is set, and
 * zeros elsewhere: few rows go whole to everybody, of many each goes from the lanes that have something to the one
 * that adds it up (RANKS_GATHER_BYTES). */
void ranks_sum_rows(struct ranks *r, float *rows, int n_rows, int width, const uint64_t *from);
/* Each lane has (n_rows, its run of the vocabulary) in rows: lane 0 gets all of (n_rows, n_vocab). */
void ranks_collect(struct ranks *r, float *rows, int n_rows, int n_vocab);
struct range ranks_vocab(const struct ranks *r, int n_vocab, int lane);
/* From rank to rank. ranks_send_begin lets the caller go on; buf stays until ranks_wait_end. */
struct ranks_wait *ranks_send_begin(struct ranks *r, const void *buf, size_t bytes, int to);
void ranks_wait_end(struct ranks *r, struct ranks_wait **wait);
bool ranks_send(struct ranks *r, const void *buf, size_t bytes, int to);
bool ranks_recv(struct ranks *r, void *buf, size_t bytes, int from);
/* Whether all are there: they come here within the timeout. */
bool ranks_meet(struct ranks *r);
/* Everyone's `bytes` of all ranks, by rank; a rank that works before it comes has RANKS_LONG. */
bool ranks_share(struct ranks *r, const void *mine, void *all, size_t bytes);
/* The first error any rank has, on all: "rank 2: ...". True if none has one. */
bool ranks_agree(struct ranks *r, bool ok, struct error *err);

#endif
