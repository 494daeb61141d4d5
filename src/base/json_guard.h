/*
 * Looks at JSON text before a parser builds it: one pass, no memory. A parser's tree is many times
 * its text ("{}," is 3 bytes and over 200 as an object), so values are counted first and what would
 * be too large is refused unbuilt. Does not check the syntax: text that is no JSON is counted as if
 * it were, and never too low.
 */
#ifndef STEEL_BASE_JSON_GUARD_H
#define STEEL_BASE_JSON_GUARD_H

#include "base/error.h"

#include <stddef.h>

struct json_limits {
    size_t values;     /* of all kinds, keys of objects too */
    size_t containers; /* of them arrays and objects */
    int depth;
};

/* A request: with jansson at most about 140 MB, and three times the bytes of its text. */
extern const struct json_limits json_limits_request;
/* A file that comes with a model: the largest tokenizer.json known has a quarter of this. */
extern const struct json_limits json_limits_file;

/* What was counted; json_guard adds to it, so that several texts may share the limits. */
struct json_counts {
    size_t values, containers;
};

/* False where a limit is passed: the message names it. counts may be NULL. */
bool json_guard(const char *text, size_t n, const struct json_limits *limits,
                struct json_counts *counts, struct error *err);

#endif
