/*
 * What the generating commands share on top of the library (steel.h): opening a model with a
 * progress bar, a plain completion on stdout, and printed counters. Ctrl-C is polled between
 * events. It cancels the request, and the answer ends normally.
 */
#ifndef STEEL_CLI_GENERATE_H
#define STEEL_CLI_GENERATE_H

#include "cli/cli.h"

#include <steel.h>

enum { INTERRUPT_MS = 50 }; /* interval at which Ctrl-C is polled */

/* Opens the model, with a progress bar if stderr is a terminal, and prints its notice. */
struct steel_engine *generate_open(const char *path, struct steel_engine_options *opt,
                                   struct steel_error *err);
/* Streams the text of a request to stdout. *end: its last event. */
bool generate_text(struct steel_engine *engine, const struct steel_request_options *o,
                   struct steel_event *end, struct steel_error *err);
/* True if the request ended normally. Otherwise err says why: it failed, or the context is full. */
bool generate_ended(const struct steel_engine *engine, const struct steel_request_options *o,
                    const struct steel_event *end, struct steel_error *err);
/* Applies -n: -1 = until the answer ends, 0 = only read the prompt. */
void generate_limit(struct steel_request_options *o, int n_predict);

/* generate_unset: options whose sampling settings are marked as not set (NAN, INT_MIN).
 * generate_advise: replaces those by the settings the model's authors recommend. */
struct steel_request_options generate_unset(void);
void generate_advise(struct steel_request_options *o, const struct steel_engine *engine);

/* "prompt 12 tokens, 340.1 tok/s | generated 40 tokens, 88.0 tok/s" */
void generation_describe(const struct steel_event *end, struct buf *out);
void generation_print(const struct steel_event *end, FILE *out);

#endif
