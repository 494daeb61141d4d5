/* See kept_items.h. */
#include "server/api/kept_items.h"
#include "base/mem.h"
#include "server/http/jsonout.h"

#include <string.h>

static size_t size_of(size_t n_id, size_t n)
{
    return sizeof(struct kept_item) + n_id + n + 2;
}

static void append(struct kept_items *l, struct kept_item *item)
{
    item->next = NULL;
    item->prev = l->last;
    *(l->last ? &l->last->next : &l->first) = item;
    l->last = item;
    l->n++;
    l->bytes += size_of(strlen(item->id), item->n);
    l->text += item->n;
}

void kept_items_add(struct kept_items *l, const char *id, const char *json, size_t n)
{
    size_t n_id = strlen(id);
    struct kept_item *item = mem_alloc(size_of(n_id, n));
    char *text = item->id + n_id + 1;
    memcpy(item->id, id, n_id + 1);
    memcpy(text, json, n);
    text[n] = 0;
    item->n = n;
    item->json = text;
    append(l, item);
}

void kept_items_move(struct kept_items *l, struct kept_items *from)
{
    if (from->first) {
        from->first->prev = l->last;
        *(l->last ? &l->last->next : &l->first) = from->first;
        l->last = from->last;
        l->n += from->n;
        l->bytes += from->bytes;
        l->text += from->text;
    }
    *from = (struct kept_items){0};
}

void kept_items_copy(struct kept_items *l, const struct kept_items *from)
{
    for (const struct kept_item *i = from->first; i; i = i->next)
        kept_items_add(l, i->id, i->json, i->n);
}

struct kept_item *kept_items_find(const struct kept_items *l, const char *id)
{
    struct kept_item *i = l->first;
    while (i && strcmp(i->id, id))
        i = i->next;
    return i;
}

void kept_items_remove(struct kept_items *l, struct kept_item *item)
{
    *(item->prev ? &item->prev->next : &l->first) = item->next;
    *(item->next ? &item->next->prev : &l->last) = item->prev;
    l->n--;
    l->bytes -= size_of(strlen(item->id), item->n);
    l->text -= item->n;
    mem_free(item);
}

void kept_items_clear(struct kept_items *l)
{
    while (l->first)
        kept_items_remove(l, l->first);
}

size_t kept_items_text(const struct kept_items *l)
{
    return l->text + (l->n ? (size_t)l->n - 1 : 0);
}

bool kept_items_page(const struct kept_items *l, const struct page_query *q, struct buf *out)
{
    const struct kept_item *i = q->descending ? l->last : l->first, *first, *last = NULL;
    if (q->after[0]) {
        i = kept_items_find(l, q->after);
        if (!i)
            return false;
        i = q->descending ? i->prev : i->next;
    }
    first = i;
    buf_adds(out, "{\"object\":\"list\",\"data\":[");
    for (int n = 0; i && n < q->limit; n++, i = q->descending ? i->prev : i->next) {
        if (n)
            buf_addc(out, ',');
        buf_add(out, i->json, i->n);
        last = i;
    }
    buf_adds(out, "],\"first_id\":");
    jsonout_text(out, first ? first->id : NULL);
    buf_adds(out, ",\"last_id\":");
    jsonout_text(out, last ? last->id : NULL);
    buf_addf(out, ",\"has_more\":%s}", i ? "true" : "false");
    return true;
}
