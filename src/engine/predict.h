/*
 * Predicts how long a step of several ranks takes, from a model of memory, arithmetic and messages. Pure arithmetic
 * over the counts of placement.c, so that a test can check every formula by hand. Nothing is measured here.
 * docs/communication.md has the derivation, and measurements to compare it with.
 *
 * The time of a step of one stage is the slower of reading and computing, plus a fixed cost per layer, plus the
 * messages:
 *   stage = max(bytes / read, operations / flops) + layers * layer + sum over messages (latency + bytes / rate)
 * Messages do not overlap with computation.
 */
#ifndef STEEL_ENGINE_PREDICT_H
#define STEEL_ENGINE_PREDICT_H

#include "base/error.h"

/* A message of n bytes takes latency + n / rate, and so does each round of a collective. */
struct predict_link {
    const char *name;
    double latency; /* s */
    double rate;    /* bytes/s, one direction */
    const char *about;
};

/* The device of a rank. */
struct predict_device {
    const char *name;
    double memory; /* bytes */
    double read;   /* bytes/s of weights and cache */
    double flops;  /* operations/s that kernels reach in large matrix products */
    double layer;  /* s, fixed cost per layer: launches, dependent phases */
    const char *about;
};

/* Parses a name from the table, or "LATENCY:RATE" as in 12us:3GB/s. */
bool predict_link_parse(const char *text, struct predict_link *out, struct error *err);
bool predict_device_parse(const char *text, struct predict_device *out, struct error *err);

/* The work of one rank. */
struct predict_work {
    int layers;
    double bytes;         /* weights that every step reads */
    double expert_bytes;  /* of all its experts; a step reads some of them */
    double params;        /* parameters that every row is multiplied with */
    double expert_params; /* of all its experts */
    double head_params;   /* of the head: multiplied with output rows only */
    double head_bytes;    /* bytes of the head, included in `bytes` */
    double kv_bytes;      /* per token of context */
    double attn_flops;    /* per row and token of its context */
    int n_expert, n_used; /* of the model; 0 = no experts */
};

/* The messages of a stage in a step. */
struct predict_comm {
    int tp, pp;
    bool ep; /* ranks have whole experts */
    int embd, vocab;
    int sums;      /* all-reduces of all rows */
    int sums_last; /* all-reduces of the output rows only */
    bool collects; /* each rank computes a shard of the logits, which is gathered */
    int head_rows; /* this stage's rows of a head that first and last stage share; 0 = only the last has it */
    int overhead; /* for pipeline_parts */
};

/* The load of a step. context: tokens that a row attends to, on average. */
struct predict_load {
    double rows, outs, seqs, context;
};

/* Messages that one rank starts, and bytes that it sends. */
struct predict_traffic {
    double messages, bytes;
};

enum predict_bound {
    BOUND_MEMORY,
    BOUND_COMPUTE,
    BOUND_LAYERS,
    BOUND_LATENCY,
    BOUND_BANDWIDTH,
};
extern const char *const predict_bounds[]; /* their names */

struct predict_step {
    double seconds; /* the whole step */
    /* Its parts. In each stage only the longer of memory and compute counts. */
    double memory, compute, layers, latency, transfer;
    enum predict_bound bound; /* the largest part */
};

/* The expected number of experts, of n, that m rows select if each selects `used` at random. */
double predict_experts(int n, int used, double m);
/* Of `total` items distributed at random over tp ranks, the expected share of the busiest rank: at least 1/tp. */
double predict_busiest(double total, int tp);
/* Seconds of an all-reduce as dist/ranks_sum.c does it. */
double predict_sum(const struct predict_link *link, int tp, double bytes);
/* Number of micro-batches into which dist/pipeline.c cuts a step. */
int predict_parts(const struct predict_comm *t, const struct predict_load *load);
/* The messages of rank tp_rank of a stage in a step. */
struct predict_traffic predict_traffic(const struct predict_comm *t, int stage, int tp_rank,
                                       const struct predict_load *load);
/* The time of a step. w, t (t->pp): for each stage its slowest rank. link: inside a stage; between: from stage to
 * stage. */
struct predict_step predict_step(const struct predict_work *w, const struct predict_comm *t,
                                 const struct predict_device *d, const struct predict_link *link,
                                 const struct predict_link *between,
                                 const struct predict_load *load);

#endif
