/*
 * What the commands that generate share on top of the library (steel.h): opening a model with a
 * progress bar, a plain completion on stdout, counters for people to read. Ctrl-C is looked for
 * between events; it cancels what runs, and the answer ends cleanly.
 */
#ifndef STEEL_CLI_GENERATE_H
#define STEEL_CLI_GENERATE_H

#include "cli/cli.h"

#include <steel.h>

enum { INTERRUPT_MS = 50 }; /* how often a wait for events looks for Ctrl-C */

/* Opens the model, with a bar where stderr is a terminal, and prints what its user should know. */
struct steel_engine *generate_open(const char *path, struct steel_engine_options *opt,
                                   struct steel_error *err);
/* Streams the text of a request to stdout. `end` is its last event. */
bool generate_text(struct steel_engine *engine, const struct steel_request_options *o,
                   struct steel_event *end, struct steel_error *err);
/* Whether it ended as it should; else err says what is wrong: it failed, or the context is full. */
bool generate_ended(const struct steel_engine *engine, const struct steel_request_options *o,
                    const struct steel_event *end, struct steel_error *err);
/* -n: -1 = until the end, 0 = the prompt is only read. */
void generate_limit(struct steel_request_options *o, int n_predict);

/* Sampling that nobody has set (NAN, INT_MIN) is as the model's author advises. */
struct steel_request_options generate_unset(void);
void generate_advise(struct steel_request_options *o, const struct steel_engine *engine);

/* "prompt 12 tokens, 340.1 tok/s | generated 40 tokens, 88.0 tok/s" */
void generation_describe(const struct steel_event *end, struct buf *out);
void generation_print(const struct steel_event *end, FILE *out);

#endif
