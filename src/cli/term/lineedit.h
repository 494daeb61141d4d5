/*
 * Reads what a person types: line editing and history by libedit on a terminal, plain lines from a
 * pipe. A message may span lines: pasted at once, between """ and """, or with a backslash at the end
 * of a line. Tab completes by what the owner offers.
 */
#ifndef STEEL_CLI_LINEEDIT_H
#define STEEL_CLI_LINEEDIT_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>

struct lineedit;

/* history_path may be NULL: nothing is kept. */
struct lineedit *lineedit_open(const char *history_path);
void lineedit_close(struct lineedit *le);

/* What may stand in place of the end of `before`, the line up to the cursor: one a line into list;
 * returns where in `before` that end begins. What ends in a slash goes on, all else gets a blank. */
typedef size_t (*lineedit_offer)(void *arg, const char *before, struct buf *list);
void lineedit_complete(struct lineedit *le, lineedit_offer offer, void *arg);

enum line_result { LINE_OK, LINE_END, LINE_INTERRUPTED };
/* One message into out, without the marks that join its lines. LINE_END at Ctrl-D or end of input;
 * LINE_INTERRUPTED when Ctrl-C dropped what was typed. */
enum line_result lineedit_read(struct lineedit *le, const char *prompt, const char *more_prompt,
                               struct buf *out);
/* Adds a line to the history (Up finds it). */
void lineedit_remember(struct lineedit *le, const char *line);

#endif
