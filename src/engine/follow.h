/*
 * Ranks other than the first. Rank 0 has the scheduler, the server and the choice of tokens; it says
 * what to open and then every step, and the others run the same steps over their part of the network.
 */
#ifndef STEEL_ENGINE_FOLLOW_H
#define STEEL_ENGINE_FOLLOW_H

#include "dist/ranks.h"
#include "engine/runtime.h"

/* What rank 0 has decided, and all do. */
struct follow_plan {
    char path[4096], device[64];
    char expert_stats[4096];    /* a file; "" = none */
    struct runtime_options opt; /* pointers in it are nobody's */
    int tp, pp;
    bool ep;
    int timeout_s; /* of ranks: lines say it too, where there are some */
    int64_t kv_tokens;
    int n_states, context;
    int draft; /* tokens that are drafted (runtime.h) */
    int n_loras;
    struct step_limits limits;
};

/* An adapter to begin with. */
struct follow_lora {
    char name[ADAPTER_NAME_MAX], path[4096];
    float scale;
};

/* On rank 0: says it; loras (plan->n_loras). */
bool follow_tell_plan(struct ranks *r, struct follow_plan *plan, struct follow_lora *loras);
/* On rank 0: room for what is said of steps, of so many pages a sequence. */
struct follow_said;
struct follow_said *follow_said_new(struct ranks *r, const struct step_limits *limits,
                                    int max_pages);
void follow_said_free(struct follow_said *s);
/* On rank 0, before each step; the others run it too. Does not wait until they have heard. */
void follow_tell_step(struct follow_said *s, const struct batch *b, int page_len,
                      struct step_way how);
/* On rank 0, where it has nothing to say for long and lines do not say that all live: they meet. */
void follow_tell_here(struct ranks *r);
/* On rank 0: there will be no more. */
void follow_tell_end(struct ranks *r);

/* On the others: until rank 0 says that there will be no more. What the process should exit with. */
int follow(struct ranks *r);
/* The runtime of such a rank (runtime.c); NULL: rank 0 has heard why. */
struct runtime *runtime_follow(const struct follow_plan *plan, const struct follow_lora *loras,
                               struct ranks *r, struct error *err);

#endif
