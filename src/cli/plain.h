/*
 * Prints text that is not ours: what a model wrote, or a file's strings. On a terminal no control
 * character of it reaches the terminal; elsewhere the bytes are written as they are.
 */
#ifndef STEEL_CLI_PLAIN_H
#define STEEL_CLI_PLAIN_H

#include <stddef.h>
#include <stdio.h>

/* Control characters other than newline and tab are shown as ^[ (an escape) or ^? (C1 controls),
 * and invalid UTF-8 as U+FFFD. p: whole characters. */
void plain_print(FILE *out, const char *p, size_t n);

#endif
