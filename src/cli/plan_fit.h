/* `steel plan MODEL` for one process on this machine: where every byte would be, what fits, how fast it would be, and
 * flags that would be better. All decisions are runtime_plan's. */
#ifndef STEEL_CLI_PLAN_FIT_H
#define STEEL_CLI_PLAN_FIT_H

#include "engine/probe.h"
#include "engine/runtime.h"

#include <jansson.h>

enum { PLAN_SEQS = 8 };

struct plan_fit_options {
    struct runtime_options runtime;
    int seqs[PLAN_SEQS], n_seqs; /* that generate at once */
    int depth, prompt;           /* tokens each of them has; tokens of a prompt */
    bool no_probe;               /* predict no speeds */
};

struct plan_fit {
    struct runtime_plan plan;
    struct probe probe;
    bool has_speed;
    struct error no_speed; /* why there is none */
    struct plan_better {
        char flags[64], gain[160];
    } better[6];
    int n_better;
};

/* Makes the plan. False: the file or an option is wrong. */
bool plan_fit_make(struct tensorfile *f, const struct plan_fit_options *o, struct plan_fit *out,
                   struct error *err);
/* Tokens per second: of m sequences that generate, and of a prompt. 0 = not known. */
double plan_fit_generation(const struct plan_fit *p, int m, int depth);
double plan_fit_prompt(const struct plan_fit *p, int n);
void plan_fit_print(const struct tensorfile *f, const struct config *c,
                    const struct plan_fit_options *o, const struct plan_fit *p);
json_t *plan_fit_json(const struct plan_fit_options *o, const struct plan_fit *p);
/* For `run` and `serve`, after a model could not be opened: if it does not fit, prints one screen of what would, on
 * stderr. */
void plan_fit_advise(const char *path, const struct runtime_options *opt);

#endif
