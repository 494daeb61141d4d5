/* Two LRU lists (of all, and of each owner) and a hash table under one lock. See store.h. */
#include "server/api/store.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { STORE_BUCKETS = 4096 };
enum list { LIST_ALL, LIST_OWN, N_LISTS }; /* of all entries, and of the owner's */

/* Entries by use. */
struct lru {
    struct store_entry *newest, *oldest;
};

/* A client with responses. Freed with its last one. */
struct owner {
    struct owner *next, *prev;
    struct lru own;
    size_t bytes;
    char name[];
};

struct store_entry {
    struct {
        struct store_entry *newer, *older;
    } links[N_LISTS];
    struct store_entry *chain; /* in the hash bucket */
    struct owner *owner;
    size_t bytes, n_events;
    int64_t used_ns;
    bool background;
    struct kept_items input, output;
    char *reply;                  /* owned */
    char *id, *previous, *events; /* point into text */
    char text[];
};

struct store {
    pthread_mutex_t lock;
    size_t max_bytes, bytes;
    int64_t max_age_ns;
    struct lru all;
    struct owner *owners;
    struct store_entry *buckets[STORE_BUCKETS];
};

struct store *store_new(size_t max_bytes, int max_age_s)
{
    struct store *s = mem_zalloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    s->max_bytes = max_bytes;
    s->max_age_ns = (int64_t)max_age_s * 1000000000;
    return s;
}

static struct store_entry **bucket_of(struct store *s, const char *id)
{
    uint32_t h = 2166136261u;
    for (const char *p = id; *p; p++)
        h = (h ^ (unsigned char)*p) * 16777619u;
    return &s->buckets[h % STORE_BUCKETS];
}

static struct lru *lru_of(struct store *s, struct store_entry *e, enum list l)
{
    return l == LIST_ALL ? &s->all : &e->owner->own;
}

static void unlink_entry(struct store *s, struct store_entry *e)
{
    for (enum list l = 0; l < N_LISTS; l++) {
        struct lru *lru = lru_of(s, e, l);
        struct store_entry *newer = e->links[l].newer, *older = e->links[l].older;
        *(newer ? &newer->links[l].older : &lru->newest) = older;
        *(older ? &older->links[l].newer : &lru->oldest) = newer;
    }
}

static void link_newest(struct store *s, struct store_entry *e)
{
    for (enum list l = 0; l < N_LISTS; l++) {
        struct lru *lru = lru_of(s, e, l);
        e->links[l].newer = NULL;
        e->links[l].older = lru->newest;
        *(lru->newest ? &lru->newest->links[l].newer : &lru->oldest) = e;
        lru->newest = e;
    }
    e->used_ns = clock_ns();
}

static struct owner *find_owner(const struct store *s, const char *name)
{
    struct owner *o = s->owners;
    while (o && strcmp(o->name, name))
        o = o->next;
    return o;
}

static void add_owner(struct store *s, struct owner *o)
{
    o->prev = NULL;
    o->next = s->owners;
    if (o->next)
        o->next->prev = o;
    s->owners = o;
}

static void remove_owner(struct store *s, struct owner *o)
{
    *(o->prev ? &o->prev->next : &s->owners) = o->next;
    if (o->next)
        o->next->prev = o->prev;
    mem_free(o);
}

static void remove_entry(struct store *s, struct store_entry *e)
{
    struct store_entry **at = bucket_of(s, e->id);
    while (*at != e)
        at = &(*at)->chain;
    *at = e->chain;
    unlink_entry(s, e);
    s->bytes -= e->bytes;
    e->owner->bytes -= e->bytes;
    if (!e->owner->own.newest)
        remove_owner(s, e->owner);
    kept_items_clear(&e->input);
    kept_items_clear(&e->output);
    mem_free(e->reply);
    mem_free(e);
}

static void forget_old(struct store *s)
{
    int64_t now = clock_ns();
    while (s->all.oldest && now - s->all.oldest->used_ns > s->max_age_ns)
        remove_entry(s, s->all.oldest);
    while (s->bytes > s->max_bytes) {
        struct owner *most = s->owners;
        CHECK(most, "bytes without an owner");
        for (struct owner *o = s->owners; o; o = o->next)
            if (o->bytes > most->bytes)
                most = o;
        remove_entry(s, most->own.oldest);
    }
}

void store_free(struct store *s)
{
    if (!s)
        return;
    while (s->all.oldest)
        remove_entry(s, s->all.oldest);
    pthread_mutex_destroy(&s->lock);
    mem_free(s);
}

/* Finds an entry of this owner and makes it the most recently used. */
static struct store_entry *find(struct store *s, const char *id, const char *owner)
{
    struct store_entry *e = *bucket_of(s, id);
    while (e && strcmp(e->id, id))
        e = e->chain;
    if (!e || strcmp(e->owner->name, owner))
        return NULL;
    unlink_entry(s, e);
    link_newest(s, e);
    return e;
}

bool store_put(struct store *s, const struct stored *r)
{
    const char *parts[] = {r->id, r->previous ? r->previous : "", r->events ? r->events : ""};
    enum { N = sizeof parts / sizeof *parts };
    size_t sizes[N], n_name = strlen(r->owner) + 1, n_text = 0;
    for (int i = 0; i < N; i++)
        n_text += sizes[i] = strlen(parts[i]) + 1;
    size_t total = sizeof(struct store_entry) + sizeof(struct owner) + n_name + n_text +
                   strlen(r->reply) + 1 + r->input->bytes + (r->output ? r->output->bytes : 0);
    if (total > s->max_bytes)
        return false;
    struct owner *spare = mem_alloc(sizeof *spare + n_name);
    *spare = (struct owner){0};
    memcpy(spare->name, r->owner, n_name);
    struct store_entry *e = mem_alloc(sizeof *e + n_text);
    *e = (struct store_entry){.bytes = total, .background = r->background};
    char **to[] = {&e->id, &e->previous, &e->events};
    char *at = e->text;
    for (int i = 0; i < N; at += sizes[i++])
        *to[i] = memcpy(at, parts[i], sizes[i]);
    e->n_events = sizes[N - 1] - 1;
    e->reply = mem_strdup(r->reply);
    kept_items_move(&e->input, r->input);
    if (r->output)
        kept_items_move(&e->output, r->output);
    pthread_mutex_lock(&s->lock);
    e->owner = find_owner(s, r->owner);
    if (!e->owner) {
        add_owner(s, e->owner = spare);
        spare = NULL;
    }
    struct store_entry **bucket = bucket_of(s, e->id);
    e->chain = *bucket;
    *bucket = e;
    link_newest(s, e);
    s->bytes += e->bytes;
    e->owner->bytes += e->bytes;
    forget_old(s);
    pthread_mutex_unlock(&s->lock);
    mem_free(spare);
    return true;
}

bool store_delete(struct store *s, const char *id, const char *owner)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    struct store_entry *e = find(s, id, owner);
    if (e)
        remove_entry(s, e);
    pthread_mutex_unlock(&s->lock);
    return e != NULL;
}

bool store_get(struct store *s, const char *id, const char *owner, enum store_part part,
               struct buf *out)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    struct store_entry *e = find(s, id, owner);
    if (e)
        buf_adds(out, part == STORE_REPLY ? e->reply : e->background ? "true" : "");
    pthread_mutex_unlock(&s->lock);
    return e != NULL;
}

bool store_events(struct store *s, const char *id, const char *owner, size_t at, size_t n,
                  struct buf *out, size_t *all)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    const struct store_entry *e = find(s, id, owner);
    size_t left = e && at < e->n_events ? e->n_events - at : 0;
    if (out && left)
        buf_add(out, e->events + at, n < left ? n : left);
    if (e && all)
        *all = e->n_events;
    pthread_mutex_unlock(&s->lock);
    return e != NULL;
}

enum store_result store_page(struct store *s, const char *id, const char *owner,
                             const struct page_query *q, struct buf *out)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    const struct store_entry *e = find(s, id, owner);
    enum store_result r = !e                                   ? STORE_NO_ENTRY
                          : kept_items_page(&e->input, q, out) ? STORE_OK
                                                               : STORE_NO_ITEM;
    pthread_mutex_unlock(&s->lock);
    return r;
}

enum store_result store_item(struct store *s, const char *id, const char *owner, const char *item,
                             struct buf *out)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    const struct store_entry *e = find(s, id, owner);
    const struct kept_item *i = e ? kept_items_find(&e->input, item) : NULL;
    if (i)
        buf_add(out, i->json, i->n);
    pthread_mutex_unlock(&s->lock);
    return !e ? STORE_NO_ENTRY : !i ? STORE_NO_ITEM : STORE_OK;
}

/* The entry has `more` bytes than before. */
static void grow(struct store *s, struct store_entry *e, size_t more)
{
    e->bytes += more;
    e->owner->bytes += more;
    s->bytes += more;
}

enum store_result store_remove_item(struct store *s, const char *id, const char *owner,
                                    const char *item)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    struct store_entry *e = find(s, id, owner);
    struct kept_item *i = e ? kept_items_find(&e->input, item) : NULL;
    if (i) {
        size_t before = e->input.bytes;
        kept_items_remove(&e->input, i);
        grow(s, e, e->input.bytes - before);
    }
    pthread_mutex_unlock(&s->lock);
    return !e ? STORE_NO_ENTRY : !i ? STORE_NO_ITEM : STORE_OK;
}

enum store_result store_set_reply(struct store *s, const char *id, const char *owner,
                                  const char *reply)
{
    char *copy = mem_strdup(reply);
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    struct store_entry *e = find(s, id, owner);
    size_t more = e ? strlen(copy) - strlen(e->reply) : 0;
    bool fits = e && e->bytes + more <= s->max_bytes;
    if (fits) {
        char *old = e->reply;
        e->reply = copy;
        copy = old;
        grow(s, e, more);
        forget_old(s);
    }
    pthread_mutex_unlock(&s->lock);
    mem_free(copy);
    return !e ? STORE_NO_ENTRY : !fits ? STORE_NO_ROOM : STORE_OK;
}

enum store_result store_append(struct store *s, const char *id, const char *owner,
                               struct kept_items *items)
{
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    struct store_entry *e = find(s, id, owner);
    bool many = e && e->input.n + items->n > STORE_ITEMS_MOST;
    bool fits = e && !many && e->bytes + items->bytes <= s->max_bytes;
    if (fits) {
        grow(s, e, items->bytes);
        kept_items_move(&e->input, items);
        forget_old(s); /* it is its owner's newest entry: others go first */
    }
    pthread_mutex_unlock(&s->lock);
    return !e ? STORE_NO_ENTRY : many ? STORE_TOO_MANY : !fits ? STORE_NO_ROOM : STORE_OK;
}

/*
 * The functions below run in jobs that are abandoned if an allocation fails (mem.h), which must not
 * happen under the lock. So memory for a copy is allocated without the lock, and its size checked again.
 */

/* Copies a list in front of the items that begin at `at`. Returns their start. */
static size_t put_before(struct buf *out, size_t at, size_t end, const struct kept_items *l)
{
    for (const struct kept_item *i = l->last; i; i = i->prev) {
        if (at < end)
            out->p[--at] = ',';
        memcpy(out->p + at - i->n, i->json, i->n);
        at -= i->n;
    }
    return at;
}

bool store_history(struct store *s, const char *id, const char *owner, size_t max, struct buf *out,
                   char missing[64])
{
    size_t bytes = 0, from = out->len;
    const char *at = id;
    bool ok = true;
    missing[0] = 0;
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    while (ok && *at) {
        const struct store_entry *e = find(s, at, owner);
        if (!e) {
            snprintf(missing, 64, "%s", at);
            ok = false;
            break;
        }
        size_t input = kept_items_text(&e->input), output = kept_items_text(&e->output);
        bytes += input + output + (input > 0) + (output > 0);
        ok = bytes <= max;
        at = e->previous;
    }
    bytes -= bytes > 0; /* no comma after the last */
    if (ok && out->cap < from + bytes + 2) {
        pthread_mutex_unlock(&s->lock);
        buf_reserve(out, bytes + 2);
        return store_history(s, id, owner, max, out, missing);
    }
    size_t end = from + bytes, place = end;
    for (at = id; ok && *at;) { /* from the newest to the oldest */
        const struct store_entry *e = find(s, at, owner);
        place = put_before(out, place, end, &e->output);
        place = put_before(out, place, end, &e->input);
        at = e->previous;
    }
    pthread_mutex_unlock(&s->lock);
    if (ok) {
        CHECK(place == from, "items of %zu bytes were counted as %zu", end - place, bytes);
        out->len = end;
        out->p[end] = 0;
    }
    return ok;
}

bool store_items_beside(struct store *s, const char *item, const char *owner, size_t max,
                        struct buf *out, char id[64])
{
    const char *from = strchr(item, '_'), *to = from ? strchr(from + 1, '_') : NULL;
    char own[64];
    if (!to || snprintf(own, 64, "resp_%.*s", (int)(to - from - 1), from + 1) >= 64)
        return false;
    if (!strcmp(own, id))
        return true;
    memcpy(id, own, 64);
    pthread_mutex_lock(&s->lock);
    forget_old(s);
    const struct store_entry *e = find(s, id, owner);
    size_t bytes = e ? kept_items_text(&e->input) + kept_items_text(&e->output) + 1 : 0;
    bool fits = e && bytes <= max;
    if (fits && out->cap < out->len + bytes + 2) {
        pthread_mutex_unlock(&s->lock);
        buf_reserve(out, bytes + 2);
        id[0] = 0;
        return store_items_beside(s, item, owner, max, out, id);
    }
    if (fits) {
        size_t text = bytes - 1 + (e->input.n && e->output.n), start = out->len, end = start + text;
        size_t place = put_before(out, end, end, &e->output);
        place = put_before(out, place, end, &e->input);
        CHECK(place == start, "items of %zu bytes were counted as %zu", end - place, text);
        out->len = end;
        out->p[end] = 0;
    }
    pthread_mutex_unlock(&s->lock);
    return fits;
}

size_t store_max_bytes(const struct store *s)
{
    return s->max_bytes;
}
