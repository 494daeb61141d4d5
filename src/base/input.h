/* Opens the text files that a user names: keys, templates, settings, prompts. */
#ifndef STEEL_BASE_INPUT_H
#define STEEL_BASE_INPUT_H

#include "base/error.h"

#include <stdio.h>

/* Opens a file for reading; the caller closes it. NULL after an error that names the path. A named
 * pipe is refused, as reading it may wait for ever. A pipe that this process was started with is
 * read: /dev/stdin, or /dev/fd/63 of a shell's <(command). */
FILE *input_open(const char *path, struct error *err);

#endif
