/* Parameters of a path's query, such as those of lists. Errors name the parameter. */
#ifndef STEEL_SERVER_QUERY_H
#define STEEL_SERVER_QUERY_H

#include "server/http/api_error.h"

#include <stdbool.h>

enum { QUERY_TEXT_MAX = 128 };

/* Reads the first parameter `name` of a query, decoded. "" = absent. */
bool query_text(const char *query, const char *name, char out[QUERY_TEXT_MAX],
                struct api_error *err);
/* Leaves *out as it is if the parameter is absent. */
bool query_int(const char *query, const char *name, int least, int most, int *out,
               struct api_error *err);
bool query_bool(const char *query, const char *name, bool *out, struct api_error *err);

/* A page of a list. */
struct page_query {
    char after[QUERY_TEXT_MAX]; /* the id before the page; "" = from the beginning */
    int limit;
    bool descending;
};
/* Reads after, limit and order; the last items come first by default. `include` may only name parts that
 * items always have. */
bool query_page(const char *query, struct page_query *out, struct api_error *err);

#endif
