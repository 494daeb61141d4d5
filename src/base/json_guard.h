/*
 * Checks the size of JSON text before it is parsed, in one pass without allocating. A parsed tree
 * is many times larger than its text ("{}," is 3 bytes as text and over 200 as an object), so
 * values are counted first and oversized documents are refused. Syntax is not checked; invalid JSON
 * is never counted too low.
 */
#ifndef STEEL_BASE_JSON_GUARD_H
#define STEEL_BASE_JSON_GUARD_H

#include "base/error.h"

#include <stddef.h>

struct json_limits {
    size_t values;     /* of all kinds, keys of objects too */
    size_t containers; /* arrays and objects among them */
    int depth;
};

/* For a request: at most about 140 MB in jansson, plus three times the text's bytes. */
extern const struct json_limits json_limits_request;
/* For a model's file: the largest known tokenizer.json has a quarter of this. */
extern const struct json_limits json_limits_file;

/* Counts so far. json_guard adds to them, so that several texts can share the limits. */
struct json_counts {
    size_t values, containers;
};

/* False, naming the limit, if one is exceeded. counts may be NULL. */
bool json_guard(const char *text, size_t n, const struct json_limits *limits,
                struct json_counts *counts, struct error *err);

#endif
