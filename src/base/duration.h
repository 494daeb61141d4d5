/* Spans of time as people and Ollama's clients write them: "5m", "1h30m", "90s", "500ms", "90" (seconds); a negative
 * one, such as "-1", has no end. */
#ifndef STEEL_BASE_DURATION_H
#define STEEL_BASE_DURATION_H

#include <stdbool.h>
#include <stdint.h>

/* *ns: -1 = without end. *unit (may be NULL): the text names a unit. */
bool duration_parse(const char *text, int64_t *ns, bool *unit);
/* The same of a number of seconds. False: it is not a number. */
bool duration_of_seconds(double s, int64_t *ns);

#endif
