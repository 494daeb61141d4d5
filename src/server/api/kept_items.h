/*
 * Lists of items (messages, calls, results) as JSON texts with ids: the input and output of a kept response, or a
 * conversation. Not thread-safe; the store (store.h) has its lists under its lock.
 */
#ifndef STEEL_SERVER_KEPT_ITEMS_H
#define STEEL_SERVER_KEPT_ITEMS_H

#include "base/buf.h"
#include "server/api/query.h"

struct kept_item {
    struct kept_item *next, *prev;
    size_t n;         /* bytes of json */
    const char *json; /* an object; in the same allocation, after id */
    char id[];
};

struct kept_items {
    struct kept_item *first, *last;
    int n;
    size_t bytes; /* of memory */
    size_t text;  /* bytes of all texts */
};

void kept_items_add(struct kept_items *l, const char *id, const char *json, size_t n);
/* Moves all items of `from` to the end of l. Allocates nothing. */
void kept_items_move(struct kept_items *l, struct kept_items *from);
void kept_items_copy(struct kept_items *l, const struct kept_items *from);
struct kept_item *kept_items_find(const struct kept_items *l, const char *id);
void kept_items_remove(struct kept_items *l, struct kept_item *item);
void kept_items_clear(struct kept_items *l);

/* The length of all texts, separated by commas. */
size_t kept_items_text(const struct kept_items *l);
/* Writes a page as OpenAI's list object. False: `after` names no item. */
bool kept_items_page(const struct kept_items *l, const struct page_query *q, struct buf *out);

#endif
