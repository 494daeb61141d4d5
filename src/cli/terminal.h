/* The chat in a terminal: `steel run [MODEL]` without a prompt. */
#ifndef STEEL_CLI_TERMINAL_H
#define STEEL_CLI_TERMINAL_H

#include "cli/generate.h"

enum think_mode { THINK_ON, THINK_OFF, THINK_HIDE }; /* hide: thinks, but shows only that it does */

struct terminal_options {
    struct sample_params sample;
    const char *system; /* NULL = none */
    enum think_mode think;
    int n_predict;
    const struct opt_list *stop; /* texts that end an answer */
    bool verbose;                /* tok/s after every turn */
};

/* Whether the model has a chat template. */
bool terminal_can_chat(const struct runtime *rt);
/* Talks until /bye or Ctrl-D; returns an exit code. */
int terminal_chat(struct runtime *rt, const struct terminal_options *opt);
/* One question, one answer: content on stdout, thinking on stderr. */
int terminal_ask(struct runtime *rt, const struct terminal_options *opt, const char *prompt,
                 struct generation *g, struct error *err);

#endif
