/*
 * Responses kept for later calls: what GET /v1/responses/ID shows and what previous_response_id goes
 * on from. In memory only, bounded in bytes and age: the least recently used are forgotten first.
 * Everything is JSON text, so that a response costs what it weighs and any thread may read a copy.
 *
 * Invariants:
 *  1. the bytes of all responses never exceed the bound; one that is larger alone is not kept
 *  2. a response is seen only by its owner: another key's is as good as absent
 *  3. whoever goes on from a response uses all those it goes back to as well
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
    const char *id, *owner, *previous; /* owner "" = nobody's; previous NULL = none */
    const char *reply;                 /* the response object */
    const char *input, *output;        /* items, separated by commas; "" = none */
    const char *first, *last;          /* ids of the input's first and last item; "" = none */
};
bool store_put(struct store *s, const struct stored *r);
bool store_delete(struct store *s, const char *id, const char *owner);

enum store_part { STORE_REPLY, STORE_INPUT, STORE_FIRST_ID, STORE_LAST_ID };
bool store_get(struct store *s, const char *id, const char *owner, enum store_part part,
               struct buf *out);

/* The items of a response and of all those before it, oldest first, separated by commas. False: one
 * of them is not there (any more); `missing` names it. More than `max` bytes: false, missing "". */
bool store_history(struct store *s, const char *id, const char *owner, size_t max, struct buf *out,
                   char missing[64]);
/* The items of the response that has this item (PREFIX_xxx_n is one of resp_xxx), separated by
 * commas, if they have no more than `max` bytes. `id` is the response's; where it is the same as
 * before, nothing is copied. */
bool store_items_beside(struct store *s, const char *item, const char *owner, size_t max,
                        struct buf *out, char id[64]);

size_t store_bytes(struct store *s);

#endif
