/*
 * Reads what a person types: line editing and history by libedit on a terminal, plain lines from a
 * pipe. A message may span lines: between """ and """, or with a backslash at the end of a line.
 */
#ifndef STEEL_CLI_LINEEDIT_H
#define STEEL_CLI_LINEEDIT_H

#include "base/buf.h"

#include <stdbool.h>

struct lineedit;

/* history_path may be NULL: nothing is kept. */
struct lineedit *lineedit_open(const char *history_path);
void lineedit_close(struct lineedit *le);

enum line_result { LINE_OK, LINE_END, LINE_INTERRUPTED };
/* One message into out, without the marks that join its lines. LINE_END at Ctrl-D or end of input;
 * LINE_INTERRUPTED when Ctrl-C dropped what was typed. */
enum line_result lineedit_read(struct lineedit *le, const char *prompt, const char *more_prompt,
                               struct buf *out);
/* Adds a line to the history (Up finds it). */
void lineedit_remember(struct lineedit *le, const char *line);

#endif
