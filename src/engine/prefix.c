/* The prefix index. One entry per page, all allocated at the start: a step allocates nothing here. */
#include "engine/prefix.h"
#include "base/siphash.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/os.h"

#include <string.h>

enum { NONE = -1, MAX_TAILS_SEEN = 32 };

struct entry {
    uint64_t serial;           /* 0 = not indexed */
    uint64_t parent;           /* serial, or a root */
    int32_t n_tokens;          /* page_len, or fewer: a tail */
    int32_t next;              /* in its bucket */
    int32_t idle_up, idle_dwn; /* neighbours in the idle list: older, younger */
    bool idle;
};

struct prefix {
    int n_pages, page_len;
    bool keep;
    struct entry *e;   /* (n_pages) */
    uint64_t *content; /* (n_pages, page_len) */
    /* (n_buckets) first entry; full pages by parent and content, tails by parent */
    int32_t *buckets;
    uint32_t n_buckets;
    uint64_t next_serial;
    uint64_t key[2];       /* random, secret to this process */
    uint64_t embed_key[2]; /* of embedding rows: the same, or the caller's */
    int32_t oldest, youngest;
    int n_idle;
    int64_t n_evicted;
};

static uint64_t rotl(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

struct prefix *prefix_new(int n_pages, int page_len, bool keep)
{
    struct prefix *p = mem_zalloc(1, sizeof *p);
    *p = (struct prefix){.n_pages = n_pages,
                         .page_len = page_len,
                         .keep = keep,
                         .next_serial = 1,
                         .oldest = NONE,
                         .youngest = NONE};
    p->n_buckets = 16;
    while (p->n_buckets < (uint32_t)n_pages)
        p->n_buckets *= 2;
    p->e = mem_zalloc((size_t)n_pages, sizeof *p->e);
    p->content = mem_zalloc((size_t)n_pages * (size_t)page_len, sizeof *p->content);
    p->buckets = mem_alloc(p->n_buckets * sizeof *p->buckets);
    for (uint32_t i = 0; i < p->n_buckets; i++)
        p->buckets[i] = NONE;
    if (!os_random(p->key, sizeof p->key))
        p->key[0] =
            (uint64_t)(uintptr_t)p; /* without entropy salts still differ, but can be guessed */
    memcpy(p->embed_key, p->key, sizeof p->embed_key);
    return p;
}

void prefix_free(struct prefix *p)
{
    if (!p)
        return;
    mem_free(p->e);
    mem_free(p->content);
    mem_free(p->buckets);
    mem_free(p);
}

/* Roots have the top bit set; serials never do. */
uint64_t prefix_root(const struct prefix *p, const void *salt, size_t len)
{
    return len ? siphash(p->key, salt, len) | (uint64_t)1 << 63 : 0;
}

static int32_t *bucket(const struct prefix *p, uint64_t parent, const uint64_t *content, int n)
{
    uint64_t h = p->key[0] ^ parent * 0x9e3779b97f4a7c15u;
    for (int i = 0; n == p->page_len && i < n; i++)
        h = (rotl(h, 27) ^ content[i]) * 0x9fb21c651e98df25u;
    h ^= h >> 32;
    return &p->buckets[(uint32_t)(h ^ (h >> 16)) & (p->n_buckets - 1)];
}

static uint64_t *content_of(const struct prefix *p, int32_t page)
{
    return p->content + (size_t)page * (size_t)p->page_len;
}

void prefix_embed_key(struct prefix *p, const uint64_t key[2])
{
    memcpy(p->embed_key, key, sizeof p->embed_key);
}

uint64_t prefix_embed(const struct prefix *p, const void *id, size_t len)
{
    return siphash(p->embed_key, id, len) | (uint64_t)1 << 63;
}

int32_t prefix_find(const struct prefix *p, uint64_t parent, const uint64_t *content)
{
    int n = p->page_len;
    for (int32_t i = *bucket(p, parent, content, n); i != NONE; i = p->e[i].next)
        if (p->e[i].parent == parent && p->e[i].n_tokens == n &&
            !memcmp(content_of(p, i), content, (size_t)n * sizeof *content))
            return i;
    return NONE;
}

int32_t prefix_find_tail(const struct prefix *p, uint64_t parent, const uint64_t *content, int n,
                         int *len)
{
    int32_t best = NONE;
    *len = 0;
    int seen = 0; /* a bound, because a parent may have very many tails; the newest come first */
    for (int32_t i = *bucket(p, parent, NULL, 0); i != NONE && seen < MAX_TAILS_SEEN;
         i = p->e[i].next, seen++) {
        const struct entry *e = &p->e[i];
        if (e->parent == parent && e->n_tokens < p->page_len && e->n_tokens <= n &&
            e->n_tokens > *len &&
            !memcmp(content_of(p, i), content, (size_t)e->n_tokens * sizeof *content)) {
            best = i;
            *len = e->n_tokens;
        }
    }
    return best;
}

static void insert(struct prefix *p, uint64_t parent, const uint64_t *content, int n, int32_t page)
{
    struct entry *e = &p->e[page];
    CHECK(!e->serial, "page %d is already indexed", page);
    int32_t *head = bucket(p, parent, content, n);
    *e = (struct entry){.serial = p->next_serial++, .parent = parent, .n_tokens = n, .next = *head};
    *head = page;
    memcpy(content_of(p, page), content, (size_t)n * sizeof *content);
}

uint64_t prefix_add(struct prefix *p, uint64_t parent, const uint64_t *content, int32_t page)
{
    insert(p, parent, content, p->page_len, page);
    return p->e[page].serial;
}

void prefix_add_tail(struct prefix *p, uint64_t parent, const uint64_t *content, int n,
                     int32_t page)
{
    CHECK(n > 0 && n < p->page_len, "a tail of %d tokens", n);
    int same;
    if (p->keep && (prefix_find_tail(p, parent, content, n, &same) < 0 || same < n))
        insert(p, parent, content, n, page);
}

uint64_t prefix_serial(const struct prefix *p, int32_t page)
{
    return p->e[page].serial;
}

static void leave_idle(struct prefix *p, int32_t page)
{
    struct entry *e = &p->e[page];
    *(e->idle_up == NONE ? &p->oldest : &p->e[e->idle_up].idle_dwn) = e->idle_dwn;
    *(e->idle_dwn == NONE ? &p->youngest : &p->e[e->idle_dwn].idle_up) = e->idle_up;
    e->idle = false;
    p->n_idle--;
}

bool prefix_idle(struct prefix *p, int32_t page)
{
    struct entry *e = &p->e[page];
    if (!e->serial)
        return false;
    if (!p->keep) {
        prefix_forget(p, page);
        return false;
    }
    CHECK(!e->idle, "page %d is idle twice", page);
    e->idle = true;
    e->idle_up = p->youngest;
    e->idle_dwn = NONE;
    *(p->youngest == NONE ? &p->oldest : &p->e[p->youngest].idle_dwn) = page;
    p->youngest = page;
    p->n_idle++;
    return true;
}

void prefix_hold(struct prefix *p, int32_t page)
{
    CHECK(p->e[page].idle, "page %d is not idle", page);
    leave_idle(p, page);
    if (p->e[page].n_tokens < p->page_len)
        prefix_forget(p, page);
}

void prefix_forget(struct prefix *p, int32_t page)
{
    struct entry *e = &p->e[page];
    if (!e->serial)
        return;
    if (e->idle)
        leave_idle(p, page);
    int32_t *at = bucket(p, e->parent, content_of(p, page), e->n_tokens);
    while (*at != page)
        at = &p->e[*at].next;
    *at = e->next;
    e->serial = 0;
}

int32_t prefix_evict(struct prefix *p)
{
    int32_t page = p->oldest;
    if (page == NONE)
        return NONE;
    prefix_forget(p, page);
    p->n_evicted++;
    return page;
}

int prefix_n_idle(const struct prefix *p)
{
    return p->n_idle;
}

int64_t prefix_n_evicted(const struct prefix *p)
{
    return p->n_evicted;
}

void prefix_verify(const struct prefix *p, const uint16_t *ref)
{
    int idle = 0, indexed = 0, reached = 0;
    for (int32_t i = p->oldest; i != NONE; i = p->e[i].idle_dwn, idle++)
        CHECK(p->e[i].idle && p->e[i].serial && ref[i] == 0, "page %d in the idle list", i);
    CHECK(idle == p->n_idle, "%d idle pages, counted %d", idle, p->n_idle);
    for (int32_t i = 0; i < p->n_pages; i++) {
        const struct entry *e = &p->e[i];
        indexed += e->serial != 0;
        CHECK(!e->serial || e->idle == (ref[i] == 0), "page %d: held %d, idle %d", i, ref[i],
              e->idle);
        CHECK(!e->serial || e->idle || e->n_tokens == p->page_len, "page %d: a held tail", i);
    }
    for (uint32_t b = 0; b < p->n_buckets; b++)
        for (int32_t i = p->buckets[b]; i != NONE; i = p->e[i].next, reached++)
            CHECK(p->e[i].serial, "page %d in a bucket without a name", i);
    CHECK(reached == indexed, "%d pages in buckets, %d indexed", reached, indexed);
}
