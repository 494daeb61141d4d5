/* The chat in a terminal: `steel run [MODEL]` without a prompt. */
#ifndef STEEL_CLI_TERMINAL_H
#define STEEL_CLI_TERMINAL_H

#include "cli/generate.h"

enum think_mode { THINK_ON, THINK_OFF, THINK_HIDE }; /* hide: thinks, but shows only that it does */
enum overflow_mode { OVERFLOW_DROP, OVERFLOW_ERROR }; /* a chat that outgrows its context */

struct terminal_options {
    struct steel_request_options request; /* sampling (generate_unset: the model's), stop texts */
    struct steel_engine_options engine;   /* how /model opens another */
    const char *system;                   /* NULL = none */
    const char *format;                   /* how answers are parsed; NULL = by the template */
    enum think_mode think;
    enum overflow_mode overflow;
    int n_predict; /* as generate_limit */
    bool verbose;  /* all counters after every turn */
    bool quiet;    /* no line with speed and context left */
    bool plain;    /* text as the model writes it: no markdown, no wrapping */
};

/* Talks until /bye or Ctrl-D. /model puts another engine into *engine; NULL: it could not be opened, and
 * neither could the last one again. */
bool terminal_chat(struct steel_engine **engine, const struct terminal_options *opt,
                   struct steel_error *err);
/* One question, one answer: content on stdout, thinking on stderr. The error is STEEL_NO_CHAT where
 * the model has no chat template. */
bool terminal_ask(struct steel_engine *engine, const struct terminal_options *opt,
                  const char *prompt, struct steel_event *end, struct steel_error *err);

#endif
