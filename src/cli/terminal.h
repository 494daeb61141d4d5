/* The chat in a terminal: `steel run [MODEL]` without a prompt. */
#ifndef STEEL_CLI_TERMINAL_H
#define STEEL_CLI_TERMINAL_H

#include "cli/generate.h"

enum think_mode { THINK_ON, THINK_OFF, THINK_HIDE }; /* hide: thinks, but shows only that it does */

struct terminal_options {
    struct steel_request_options request; /* sampling, stop texts */
    const char *system;                   /* NULL = none */
    enum think_mode think;
    int n_predict; /* as generate_limit */
    bool verbose;  /* tok/s after every turn */
};

/* Talks until /bye or Ctrl-D. */
bool terminal_chat(struct steel_engine *engine, const struct terminal_options *opt,
                   struct steel_error *err);
/* One question, one answer: content on stdout, thinking on stderr. The error is STEEL_NO_CHAT where
 * the model has no chat template. */
bool terminal_ask(struct steel_engine *engine, const struct terminal_options *opt,
                  const char *prompt, struct steel_event *end, struct steel_error *err);

#endif
