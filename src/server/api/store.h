/*
 * Kept responses, for GET /v1/responses/ID and previous_response_id. In memory only, bounded in bytes
 * and age; the least recently used of the owner with the most bytes are evicted first. Values are JSON text, so that their size is known
 * and any thread may copy them.
 *
 * Invariants:
 *  1. The bytes of all responses never exceed the bound. A larger response is not kept.
 *  2. Only its owner (API key, or address) can see a response.
 *  3. Room is taken from the owner with the most bytes. So whoever has less than an equal share of the
 *     bound loses nothing to others.
 *  4. Continuing a response counts as a use of all responses before it.
 */
#ifndef STEEL_SERVER_STORE_H
#define STEEL_SERVER_STORE_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>

struct store;
/* max_bytes 0: keeps nothing. */
struct store *store_new(size_t max_bytes, int max_age_s);
void store_free(struct store *s);

struct stored {
    const char *id, *owner, *previous; /* previous NULL = none */
    const char *reply;                 /* the response object */
    const char *input, *output;        /* items, separated by commas; "" = none */
    const char *first, *last;          /* ids of the input's first and last item; "" = none */
    const char *events;                /* of its stream, if it ran in the background; "" = none */
    bool background;
};
bool store_put(struct store *s, const struct stored *r);
bool store_delete(struct store *s, const char *id, const char *owner);

enum store_part {
    STORE_REPLY,
    STORE_INPUT,
    STORE_FIRST_ID,
    STORE_LAST_ID,
    STORE_EVENTS,
    STORE_BACKGROUND, /* "true", or "" */
};
bool store_get(struct store *s, const char *id, const char *owner, enum store_part part,
               struct buf *out);

/* Appends the items of a response and of all responses before it, oldest first, separated by commas.
 * False: one of them is not kept, and `missing` is its id; or "" if there are more than `max` bytes. */
bool store_history(struct store *s, const char *id, const char *owner, size_t max, struct buf *out,
                   char missing[64]);
/* Appends the items of the response that contains `item` (PREFIX_xxx_n is in resp_xxx), separated by
 * commas, up to `max` bytes. Sets `id` to that response; if it already was, nothing is copied. */
bool store_items_beside(struct store *s, const char *item, const char *owner, size_t max,
                        struct buf *out, char id[64]);

size_t store_bytes(struct store *s);
size_t store_max_bytes(const struct store *s);

#endif
