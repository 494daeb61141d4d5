/* Pictures dropped on the terminal: it types their paths. */
#ifndef STEEL_CLI_TERM_DROP_H
#define STEEL_CLI_TERM_DROP_H

#include "base/buf.h"

/* The absolute path of an existing picture (by its suffix) with which `line` begins: plain, in quotes, with backslashes
 * before spaces, or as a file:// URL. Returns the length in the line; 0 = none. */
size_t drop_path(const char *line, struct buf *path);

#endif
