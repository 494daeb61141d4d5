/*
 * JSON with long strings, such as images in base64. jansson reads strings byte by byte, at 7 ns each, so long strings of plain
 * characters are cut out before it parses, and copied into the result.
 */
#ifndef STEEL_BASE_JSON_LONG_H
#define STEEL_BASE_JSON_LONG_H

#include <jansson.h>

/* The result of json_loadb, errors included. */
json_t *json_load_long(const char *text, size_t n, size_t flags, json_error_t *err);

#endif
