/*
 * The processes ("ranks") that run one model together. A launcher (mpirun, srun) starts them and MPI connects them.
 * Without a launcher there is one process, no MPI library is loaded, and every `struct ranks *` is NULL.
 * rank = stage * tp + tp_rank. The ranks of a stage share its layers (tensor parallel). The stages run one after the
 * other (pipeline parallel).
 *
 * Invariants:
 * 1. Sums are in the order of ranks, so the same arrangement gives the same bytes.
 * 2. Every wait ends: when a rank is lost (ranks_line.h), or when nobody makes progress.
 * 3. The first error is kept, and operations after it do nothing.
 * 4. One thread at a time calls these functions, except ranks_lose.
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
    RANKS_GATHER_BYTES =
        1 << 15, /* sums up to this size are sent whole to all ranks, which saves a message */
    RANKS_VALUE = 4096, /* bytes of a value that must be the same on all ranks, with its 0 */
    /* Limits of waits, in seconds. */
    RANKS_TIMEOUT = 10,  /* a rank is silent, or all ranks wait for each other; --rank-timeout */
    RANKS_PATIENCE = 30, /* times RANKS_TIMEOUT, for a rank that reports that it is busy */
    RANKS_START = 120,   /* for MPI to start on all ranks, or to make a group */
    RANKS_LONG = 3600,   /* for opening a shard of a model, or for an idle rank 0 without lines */
    RANKS_LAST = 3,      /* from the loss of the job to the end of the process */
};

struct ranks_link;
struct ranks_line;

/* A sum in flight (ranks_sum.c). */
struct ranks_sum {
    float *rows; /* (n) */
    float *to;   /* (n) the destination; NULL = rows */
    size_t n;
    int n_rows, width;    /* of ranks_sum_rows, else 0 */
    const uint64_t *from; /* (n_rows) */
    float *room;          /* (need) */
    size_t need, each;    /* each: floats of the largest piece that a rank adds up */
    int phase;
    void *request;             /* of the link; NULL = no sum is in flight */
    int counts[4][RANKS_MOST]; /* counts and offsets of an exchange: sent, sent_at, got, got_at */
};

struct ranks {
    struct comm comm; /* first: what backends see (ranks_comm) */
    const struct ranks_link *link;
    int rank, size;
    int local, n_local;     /* among the ranks on this machine */
    int tp, pp;             /* tp * pp = size */
    bool ep;                /* expert parallel: ranks have whole experts */
    int tp_rank, stage;     /* tp_rank: index within the stage */
    int tp_asked, pp_asked; /* on the command line; 0 = not given */
    bool ep_asked;
    const char *expert_stats;        /* a file of expert counts (expert_load.h); NULL = none */
    bool taken;                      /* a model uses the ranks, or has tried to */
    bool following;                  /* on rank 0: workers wait for steps */
    const char *program, *arguments; /* set by the caller; must be the same on all ranks */
    float *scratch;                  /* for sums */
    size_t n_scratch;
    struct ranks_sum sum;
    struct error failure; /* the first one; empty = none */
    struct ranks_line *line;
    bool lined;  /* every rank has a line to rank 0 */
    int alarm;   /* os_wake_fd: readable once the job is lost */
    int crowded; /* other programs compete for the cores: number of waits that spin only briefly */
    atomic_int timeout_s; /* the same on all ranks, set by rank 0 */
    atomic_bool waiting;  /* for another rank */
    atomic_uint done;     /* waits that have ended */
    atomic_bool losing;   /* a thread writes, or has written, `lost` */
    struct error lost;    /* why the job is lost: complete once `stop` is set */
    atomic_bool stop;     /* the job is lost: all waits end */
    atomic_bool said;     /* on rank 0: the user has been told why */
};

/* Whether a launcher started this process as one of several. */
bool ranks_launched(void);
/* Whether this process reports to the user. Works without MPI. */
bool ranks_first(void);
/* Loads MPI and finds the others. */
struct ranks *ranks_open(struct error *err);
/* The result of ranks_open, for the one model that the ranks run; NULL = this process is alone. */
struct ranks *ranks_world(void);
/* On rank 0, for all ranks. */
void ranks_set_timeout(struct ranks *r, int seconds);
/* Arranges the ranks. tp 0 = size / pp. */
bool ranks_arrange(struct ranks *r, int tp, int pp, bool ep, struct error *err);
/* The ranks of this one's stage as a backend's communicator; after ranks_arrange. */
struct comm *ranks_comm(struct ranks *r);
static inline struct ranks *ranks_from(struct comm *c) /* NULL of NULL */
{
    return (struct ranks *)c;
}
/* Whether all ranks have the same value; an error names `what` ("the programs") and two values. */
bool ranks_same(struct ranks *r, const char *what, const char *value, struct error *err);
/* Allocates scratch memory for sums and rows of up to `floats`. Nothing is allocated later. */
void ranks_reserve(struct ranks *r, size_t floats);
void ranks_release(struct ranks *r); /* what was reserved */
void ranks_close(struct ranks *r);   /* r may be NULL */

/* Keeps the first failure; true while there is none. */
bool ranks_ok(const struct ranks *r, struct error *err);
/* Declares the job lost: waits end, r->alarm becomes readable, and the process has RANKS_LAST seconds to end. Any
 * thread may call it. True for the first call, whose reason is kept in r->lost. */
bool ranks_lose(struct ranks *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* This rank cannot continue (an op has failed, a file was cut short). Sets its failure, unless it has one, and loses
 * the job, unless it is lost already. Rank 0 hears it at once. */
void ranks_fail(struct ranks *r, const char *why);

/* Broadcast from rank 0. idle: the message may take long to come. Lines then report lost ranks; a rank without a line
 * expects a message within RANKS_LONG. */
bool ranks_broadcast(struct ranks *r, void *buf, size_t bytes, bool idle);
/* The same on rank 0, without waiting for the others. buf must stay until ranks_wait_end. */
struct ranks_wait;
struct ranks_wait *ranks_broadcast_begin(struct ranks *r, void *buf, size_t bytes);
/* Lets messages in flight make progress while this rank computes. */
void ranks_progress(struct ranks *r);
/* All-reduce: rows (n) = the sum of rows over the ranks of the stage, in order of tp_rank. */
void ranks_sum(struct ranks *r, float *rows, size_t n);
/* The same for sparse rows (n_rows, width). Rank t of the stage has zeros in row i unless bit t of from[i] is set. Few
 * rows are sent whole to all ranks (RANKS_GATHER_BYTES). With many, each row is sent only from the ranks that have it
 * to the one that adds it up. */
void ranks_sum_rows(struct ranks *r, float *rows, int n_rows, int width, const uint64_t *from);
/* Gathers logits: each rank of the stage has (n_rows, its range of the vocabulary) in rows. Its rank 0 receives
 * (n_rows, n_vocab). */
void ranks_gather_logits(struct ranks *r, float *rows, int n_rows, int n_vocab);
struct range ranks_vocab(const struct ranks *r, int n_vocab, int tp_rank);
/* Point to point. ranks_send_begin does not wait. buf must stay until ranks_wait_end. */
struct ranks_wait *ranks_send_begin(struct ranks *r, const void *buf, size_t bytes, int to);
void ranks_wait_end(struct ranks *r, struct ranks_wait **wait);
bool ranks_send(struct ranks *r, const void *buf, size_t bytes, int to);
bool ranks_recv(struct ranks *r, void *buf, size_t bytes, int from);
/* A barrier. */
bool ranks_barrier(struct ranks *r);
/* all (size, bytes) = `mine` of every rank. A rank that is busy before it arrives has RANKS_LONG. */
bool ranks_allgather(struct ranks *r, const void *mine, void *all, size_t bytes);
/* Shares errors: all ranks get the first error of any rank ("rank 2: ..."). True if there is none. */
bool ranks_agree(struct ranks *r, bool ok, struct error *err);

#endif
