/*
 * What steps cost, learned as they run: the time of a step of n decodes, and what n prompt rows add to it. Neither is
 * proportional to n: weights are read once for all rows. So costs are kept by rows, and interpolated between the sizes
 * that were measured. Knows numbers only.
 */
#ifndef STEEL_ENGINE_STEP_COST_H
#define STEEL_ENGINE_STEP_COST_H

enum {
    COST_BUCKETS = 16,
    COST_FIRST = 8, /* decodes of a step before any was measured */
};

/* Running means of the steps of a bucket. */
struct cost_point {
    double rows, ns; /* ns 0 = none was measured */
    int mixed;       /* decodes: steps beside prompts since one alone was measured */
};

struct step_cost {
    struct cost_point decode[COST_BUCKETS]; /* steps of 2^(b-1) < n <= 2^b decodes alone */
    struct cost_point read[COST_BUCKETS];   /* what as many prompt rows add */
    double read_ns;                         /* mean time that a prompt row adds; 0 = unknown */
    int most_read;                          /* the most prompt rows of a step so far */
};

/* 0 = unknown, or no rows. */
double step_cost_decode(const struct step_cost *c, int n);
double step_cost_read(const struct step_cost *c, int n);
/* The most prompt rows that add `ns` at most, at most `most`. */
int step_cost_reads_in(const struct step_cost *c, double ns, int most);
/* The most decodes of a step of `ns`: up to twice as many as were measured, or COST_FIRST, and at most `most`. 0 = not
 * one. */
int step_cost_decodes_in(const struct step_cost *c, double ns, int most);
/* A step has taken ns. */
void step_cost_learn(struct step_cost *c, int n_decode, int n_read, double ns);

#endif
