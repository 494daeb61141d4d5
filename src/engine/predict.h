/*
 * How long a step of several ranks takes: a model of memory, arithmetic and messages in a page of
 * formulas. Pure arithmetic over what placement.c counts of a network, so that a test can check every
 * formula by hand and nothing is measured here. docs/communication.md has the derivation, and what
 * was measured against it.
 *
 * A step of one stage lasts as long as its slowest part, reading or computing, plus what a layer costs
 * whatever its size, plus the messages:
 *   stage = max(bytes / read, operations / flops) + layers * layer + sum over messages (latency + bytes / rate)
 * Nothing overlaps them.
 */
#ifndef STEEL_ENGINE_PREDICT_H
#define STEEL_ENGINE_PREDICT_H

#include "base/error.h"

/* A message of n bytes lasts latency + n / rate; of a collective, each of its rounds. */
struct predict_link {
    const char *name;
    double latency; /* s */
    double rate;    /* bytes/s, one direction */
    const char *about;
};

/* What runs a rank. */
struct predict_device {
    const char *name;
    double memory; /* bytes */
    double read;   /* bytes/s of weights and cache */
    double flops;  /* operations/s of large products, as kernels reach them */
    double layer;  /* s that a layer costs whatever its size: launches, dependent phases */
    const char *about;
};

/* Both tables end with a name of NULL. */
extern const struct predict_link predict_links[];
extern const struct predict_device predict_devices[];
/* By its name, or "LATENCY:RATE" as in 12us:3GB/s. */
bool predict_link_parse(const char *text, struct predict_link *out, struct error *err);
bool predict_device_parse(const char *text, struct predict_device *out, struct error *err);

/* The share of one rank. */
struct predict_work {
    int layers;
    double bytes;         /* weights that every step reads */
    double expert_bytes;  /* of all its experts, of which a step reads some */
    double params;        /* that every row is multiplied with; */
    double expert_params; /* of all its experts; */
    double head_params;   /* of the head: by rows that want logits alone */
    double head_bytes;    /* of it, among bytes */
    double kv_bytes;      /* a token of context */
    double attn_flops;    /* a row and a token of its context */
    int n_expert, n_used; /* of the model; 0 = no experts */
};

/* What a stage says to others in a step. */
struct predict_talk {
    int tp, pp;
    bool ep; /* a rank has whole experts */
    int embd, vocab;
    int sums;      /* over ranks, of all rows */
    int sums_last; /* of the rows that want logits alone */
    bool collects; /* ranks have parts of the logits */
    int head_rows; /* first and last stage share the head: so many are this one's; 0 = the last has it alone */
    int dear; /* of pipeline_parts */
};

/* A step. context: tokens that a row sees, on average. */
struct predict_load {
    double rows, outs, seqs, context;
};

/* Of one rank; bytes: what it sends. */
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
    double seconds; /* of the whole step */
    /* of it, by what it is spent for; of memory and compute the longer one counts, in each stage */
    double memory, compute, layers, latency, transfer;
    enum predict_bound bound; /* the largest of them */
};

/* Experts that m rows meet, of n with `used` each, chosen evenly. */
double predict_experts(int n, int used, double m);
/* Of `total` things spread at random over ranks, the share of the rank that has most: 1/ranks and more. */
double predict_most(double total, int tp);
/* A sum over ranks of so many bytes, as dist/ranks.c does it. */
double predict_sum(const struct predict_link *link, int tp, double bytes);
/* Parts ("micro-batches") that dist/pipeline.c cuts a step into. */
int predict_parts(const struct predict_talk *t, const struct predict_load *load);
/* What rank `rank` of stage `stage` begins and sends in a step. */
struct predict_traffic predict_traffic(const struct predict_talk *t, int stage, int tp_rank,
                                       const struct predict_load *load);
/* The step. w, t: (t->pp) of the stages, each that of its slowest rank. link: inside a stage; between:
 * from stage to stage. */
struct predict_step predict_step(const struct predict_work *w, const struct predict_talk *t,
                                 const struct predict_device *d, const struct predict_link *link,
                                 const struct predict_link *between,
                                 const struct predict_load *load);

#endif
