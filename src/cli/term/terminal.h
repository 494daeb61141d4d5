/* The chat in a terminal: `steel run [MODEL]` without a prompt. */
#ifndef STEEL_CLI_TERMINAL_H
#define STEEL_CLI_TERMINAL_H

#include "cli/generate.h"

enum think_mode {
    THINK_ON,
    THINK_OFF,
    THINK_HIDE
}; /* hide: the model thinks, but only the time is shown */
enum overflow_mode {
    OVERFLOW_DROP,
    OVERFLOW_ERROR
}; /* what to do when a chat exceeds its context */

struct terminal_options {
    /* sampling settings (generate_unset: the model's) and stop texts */
    struct steel_request_options request;
    struct steel_engine_options engine; /* how /model opens another model */
    const char *system;                 /* NULL = none */
    const char *const *images;          /* (n_images) files for the first message */
    int n_images;
    const char *chat_template; /* a file or a model; NULL = the model's own */
    const char *format;        /* format of thinking and tool calls; NULL = from the template */
    enum think_mode think;
    enum overflow_mode overflow;
    int n_predict; /* see generate_limit */
    bool verbose;  /* print all counters after every turn */
    bool quiet;    /* do not print speed and remaining context */
    bool plain;    /* print the model's text unchanged: no markdown, no wrapping */
};

/* Runs the chat until /bye or Ctrl-D. /model may replace *engine; it is NULL if neither the new
 * model nor the previous one could be opened. */
bool terminal_chat(struct steel_engine **engine, const struct terminal_options *opt,
                   struct steel_error *err);
/* Answers one prompt, with opt's images: text to stdout, thinking to stderr. The error is STEEL_NO_CHAT if the
 * model has no chat template. */
bool terminal_ask(struct steel_engine *engine, const struct terminal_options *opt,
                  const char *prompt, struct steel_event *end, struct steel_error *err);

#endif
