/*
 * Reads messages from the user: line editing and history by libedit on a terminal, plain lines from
 * a pipe. A message may have several lines: pasted at once, between """ and """, or with a
 * backslash at the end of a line. Tab completes with the owner's suggestions.
 */
#ifndef STEEL_CLI_LINEEDIT_H
#define STEEL_CLI_LINEEDIT_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>

struct lineedit;

/* history_path NULL: no history is stored. */
struct lineedit *lineedit_open(const char *history_path);
void lineedit_close(struct lineedit *le);

/* Completions for the end of `before`, the line up to the cursor: appended to list, one per
 * line. Returns the offset in `before` of the text they replace. A completion that ends in a
 * slash can be extended; others get a blank. */
typedef size_t (*lineedit_offer)(void *arg, const char *before, struct buf *list);
void lineedit_complete(struct lineedit *le, lineedit_offer offer, void *arg);

enum line_result { LINE_OK, LINE_END, LINE_INTERRUPTED };
/* Reads one message into out, without the marks that join its lines. LINE_END: Ctrl-D or end of
 * input. LINE_INTERRUPTED: Ctrl-C discarded the input. */
enum line_result lineedit_read(struct lineedit *le, const char *prompt, const char *more_prompt,
                               struct buf *out);
/* Adds a line to the history. */
void lineedit_remember(struct lineedit *le, const char *line);

#endif
