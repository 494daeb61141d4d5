/*
 * Whether draft tokens pay: the time of a step by its rows, and the probability that a draft is accepted. Both are
 * measured while the engine runs, so they are those of this machine, model and load. Knows numbers only.
 *
 * A step of n sequences with x draft rows takes ratio(n, x) times as long as a step of n sequences without any. Ratios
 * are learned for the numbers of rows in draft_levels, and interpolated between those that were measured. One that has
 * not been measured for long shrinks slowly, so a pessimistic one is measured again. One with few measurements shrinks
 * faster: a single slow step must not forbid drafts.
 *
 * Drafts have classes, such as the length of the match they come from. A class has a probability that the next draft is
 * accepted if those before it were. It is learned over all requests, and for each request from there. A request's rate
 * that is not used returns slowly to that of all. A class that does not pay is tried once in DRAFT_TRY chances, as long as
 * all tries take no more than 1 % of the time.
 */
#ifndef STEEL_ENGINE_DRAFT_COST_H
#define STEEL_ENGINE_DRAFT_COST_H

#include <stdbool.h>
#include <stdint.h>

enum {
    DRAFT_DEPTH = 16,  /* most drafts of a sequence */
    DRAFT_ROWS = 32,   /* most drafts of a step */
    DRAFT_CROWD = 32,  /* with more running sequences nothing is drafted */
    DRAFT_LEVELS = 11, /* numbers of draft rows that are used */
    DRAFT_CLASSES = 16,
    DRAFT_TRY = 64,
    DRAFT_MAKERS = 3, /* ways to make drafts, by cost; 0 costs nothing */
};
extern const int draft_levels[DRAFT_LEVELS];

/* Accepted drafts of those read; drafts after a rejected one do not count. Old ones count less. */
struct draft_rate {
    float tried, right;
};

struct draft_cell {
    float ratio; /* 0 = not measured */
    int n;
    uint64_t at; /* draft_cost.turn */
};

struct draft_cost {
    double plain_ns[DRAFT_CROWD + 1]; /* by sequences; 0 = unknown */
    int n_plain[DRAFT_CROWD + 1];
    struct draft_cell cells[DRAFT_CROWD + 1][DRAFT_LEVELS];
    struct draft_rate rates[DRAFT_CLASSES]; /* of all requests */
    int skipped[DRAFT_CLASSES];             /* chances not taken since the last try */
    double credit; /* time that tries may take, in steps: a small part of all steps (TRY_SHARE) */
    uint64_t turn; /* steps learned from */
};

/* A step of n sequences with n_rows drafts took ns. waits: it could not overlap the step before it, which steps
 * without drafts may. */
void draft_cost_learn(struct draft_cost *c, int n, int n_rows, bool waits, int64_t ns);
/* The time of a step of n sequences with the drafts of a level, in steps without drafts. */
double draft_cost_ratio(const struct draft_cost *c, int n, int level);
bool draft_cost_known(const struct draft_cost *c, int n); /* steps without drafts were measured */

/* n drafts of a class were accepted, and one was not (failed). own: the request's rates (DRAFT_CLASSES). */
void draft_rate_learn(struct draft_cost *c, struct draft_rate *own, int class, int n, bool failed);
/* The probability for a request's next draft. prior: what is expected of the class before anything is known. */
double draft_rate_of(const struct draft_cost *c, const struct draft_rate *own, int class,
                     double prior);
/* Drafts of a class were not made in a step of n sequences because they do not pay. True: one is to be tried all the same.
 * make: the time in which it is made, in steps. */
bool draft_rate_try(struct draft_cost *c, int class, int n, double make);
/* A token was generated: a request's rates return a little. */
void draft_rate_rest(struct draft_rate *rates);

/* A sequence that may have drafts, and how many it gets. */
struct draft_offer {
    int most;    /* drafts that there are */
    double p[2]; /* probabilities: of the first draft, of each after it */
    bool again;  /* accepted drafts before a rejected one are read again (kvcache_draft) */
    int maker;
    int depth; /* the result */
};
/* Chooses the depths of all offers (n_offers) for a step of n sequences: those with the most tokens per time. make
 * (DRAFT_MAKERS): the time in which a maker makes one draft for every sequence, in steps. waits: without drafts, too, the
 * step could not overlap the one before it. Returns the drafts in all. rate (may be NULL): tokens per time of the choice,
 * in those of a step without drafts. */
int draft_cost_choose(const struct draft_cost *c, int n, struct draft_offer *offers, int n_offers,
                      const double *make, bool waits, double *rate);

#endif
