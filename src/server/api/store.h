/*
 * Kept responses and conversations, for GET /v1/responses/ID, previous_response_id and /v1/conversations. In
 * memory only, bounded in bytes and age; the least recently used of the owner with the most bytes are evicted
 * first. Values are JSON text, so that their size is known and any thread may copy them.
 *
 * Invariants:
 *  1. The bytes of all entries never exceed the bound. A larger response is not kept, and a conversation does
 *     not grow beyond it.
 *  2. Only its owner (API key, or address) can see an entry.
 *  3. Room is taken from the owner with the most bytes. So whoever has less than an equal share of the
 *     bound loses nothing to others.
 *  4. Continuing a response counts as a use of all responses before it.
 *
 * Functions that add allocate memory that outlives their caller's job: call them outside jobs, or suspend the
 * job (mem.h).
 */
#ifndef STEEL_SERVER_STORE_H
#define STEEL_SERVER_STORE_H

#include "base/buf.h"
#include "server/api/kept_items.h"

#include <stdbool.h>
#include <stddef.h>

struct store;
/* max_bytes 0: keeps nothing. */
struct store *store_new(size_t max_bytes, int max_age_s);
void store_free(struct store *s);

/* A response, or a conversation, whose items are its input. */
struct stored {
    const char *id, *owner, *previous; /* previous NULL = none */
    const char *reply;                 /* the object */
    struct kept_items *input, *output; /* output may be NULL */
    const char *events;                /* of its stream, if it ran in the background; "" = none */
    bool background;
};
/* Moves the items. False: there is no room; the items are left. */
bool store_put(struct store *s, const struct stored *r);
bool store_delete(struct store *s, const char *id, const char *owner);

enum store_part {
    STORE_REPLY,
    STORE_BACKGROUND, /* "true", or "" */
};
bool store_get(struct store *s, const char *id, const char *owner, enum store_part part,
               struct buf *out);

/* Appends at most n bytes of the events of its stream from byte `at` on, and sets *all to the length of all. out, all: may
 * be NULL. */
bool store_events(struct store *s, const char *id, const char *owner, size_t at, size_t n,
                  struct buf *out, size_t *all);

enum store_result { STORE_OK, STORE_NO_ENTRY, STORE_NO_ITEM, STORE_NO_ROOM, STORE_TOO_MANY };
enum {
    STORE_ITEMS_MOST = 10000
}; /* of an entry's input: items are looked for one after the other */
/* A page of the input. */
enum store_result store_page(struct store *s, const char *id, const char *owner,
                             const struct page_query *q, struct buf *out);
/* The rest is for conversations. */
enum store_result store_item(struct store *s, const char *id, const char *owner, const char *item,
                             struct buf *out);
enum store_result store_remove_item(struct store *s, const char *id, const char *owner,
                                    const char *item);
enum store_result store_set_reply(struct store *s, const char *id, const char *owner,
                                  const char *reply);
/* Moves the items to the end, unless the result is not STORE_OK. */
enum store_result store_append(struct store *s, const char *id, const char *owner,
                               struct kept_items *items);

/* Appends the items of an entry and of all responses before it, oldest first, separated by commas.
 * False: one of them is not kept, and `missing` is its id; or "" if there are more than `max` bytes. */
bool store_history(struct store *s, const char *id, const char *owner, size_t max, struct buf *out,
                   char missing[64]);
/* Appends the items of the response that contains `item` (PREFIX_xxx_n is in resp_xxx), separated by
 * commas, up to `max` bytes. Sets `id` to that response; if it already was, nothing is copied. */
bool store_items_beside(struct store *s, const char *item, const char *owner, size_t max,
                        struct buf *out, char id[64]);

size_t store_max_bytes(const struct store *s);

#endif
