/*
 * The mask cache: a small table in the vocabulary, shared by all sequences and grammars. The key
 * contains everything the mask depends on: the threads, and the rules waiting for them up to the
 * root. Rows are numbered in the order they are encountered, so equal situations (the next item of
 * a list, another sequence's object) give the same key at any position. Keys are compared in full,
 * so a mask never belongs to another state.
 *
 * Owns the table and its lock; callable from any thread. Holds at most MEMO_SETS * MEMO_WAYS masks.
 * States with long keys (deep nesting, many names) and cheap masks are not cached.
 */
#include "text/grammar/grammar_term.h"

#include "base/mem.h"

#include <pthread.h>
#include <string.h>

enum { MEMO_SETS = 64, MEMO_WAYS = 4, PAIRS_MAX = 64 };

struct memo_entry {
    uint64_t hash, used; /* used: time of the last use */
    uint32_t n_key;      /* 0 = empty entry */
    uint32_t *key, *bits;
};

struct mask_memo {
    pthread_mutex_t lock;
    struct memo_entry entries[MEMO_SETS * MEMO_WAYS];
    uint64_t clock, hits;
    size_t n_words;
};

struct mask_memo *memo_new(size_t n_words)
{
    struct mask_memo *t = mem_zalloc(1, sizeof *t);
    pthread_mutex_init(&t->lock, NULL);
    t->n_words = n_words;
    return t;
}

void memo_free(struct mask_memo *t)
{
    if (!t)
        return;
    for (int i = 0; i < MEMO_SETS * MEMO_WAYS; i++) {
        mem_free(t->entries[i].key);
        mem_free(t->entries[i].bits);
    }
    pthread_mutex_destroy(&t->lock);
    mem_free(t);
}

/* A key under construction. */
struct key_writer {
    const struct grammar_matcher *m;
    struct memo_key *key;
    struct {
        uint32_t node, origin;
    } pairs[PAIRS_MAX]; /* active rules in the order encountered */
    uint32_t n_pairs;
    bool full;
};

static void put(struct key_writer *w, uint32_t v)
{
    if (w->key->n < MEMO_KEY_MAX)
        w->key->v[w->key->n++] = v;
    else
        w->full = true;
}

/* The part of an object's set that affects what may come next. */
static void put_set(struct key_writer *w, const struct object_node *o, uint32_t at)
{
    const uint32_t *set = w->m->data + at;
    uint32_t count = set[SET_COUNT];
    if (o->max == NO_LIMIT && count > o->min)
        count = o->min;
    put(w, count);
    for (uint32_t i = 0; i < 2 * set_words(o) && !w->full; i++)
        put(w, set[SET_BITS + i]);
    put(w, set[SET_OTHERS]);
    for (uint32_t c = set[SET_CHAIN]; c && !w->full; c = w->m->data[c + 1])
        put(w, w->m->data[c]);
    put(w, NO_LIMIT);
}

static void put_item(struct key_writer *w, const struct item *it)
{
    const struct gnode *n = &w->m->g->nodes[it->node];
    uint32_t i = 0;
    while (i < w->n_pairs && (w->pairs[i].node != it->node || w->pairs[i].origin != it->origin))
        i++;
    if (i == PAIRS_MAX) {
        w->full = true;
        return;
    }
    if (i == w->n_pairs) {
        w->pairs[i].node = it->node;
        w->pairs[w->n_pairs++].origin = it->origin;
    }
    put(w, it->node);
    put(w, it->pos);
    put(w, i);
    if (n->kind == NODE_OBJECT && it->pos >= 2)
        put_set(w, n->object, it->data);
    else
        put(w, it->data);
}

bool memo_key(const struct grammar_matcher *m, struct memo_key *key)
{
    struct key_writer w = {.m = m, .key = key};
    key->n = 0;
    put(&w, (uint32_t)m->g->serial);
    put(&w, (uint32_t)(m->g->serial >> 32));
    put(&w, (uint32_t)m->frugal << 1 | m->now.accepts);
    for (uint32_t i = 0; i < m->now.n_threads && !w.full; i++) {
        const struct thread *t = &m->threads[m->now.threads + i];
        put(&w, t->term);
        put(&w, t->q);
        put(&w, t->sub);
        put(&w, t->name);
        put(&w, t->q ? t->hash : 0); /* not needed if all possible names are declared */
        put_item(&w, &t->then);
    }
    /* The waiters of the active rules, and transitively their waiters. */
    for (uint32_t i = 0; i < w.n_pairs && !w.full; i++) {
        uint32_t row = w.pairs[i].origin, node = w.pairs[i].node;
        uint32_t end = row + 1 < m->n_rows ? m->rows[row + 1] : m->n_waiters;
        put(&w, NO_LIMIT);
        put(&w, node == 0 && row == 0);
        for (uint32_t k = m->rows[row]; k < end && !w.full; k++)
            if (m->waiters[k].callee == node)
                put_item(&w, &m->waiters[k].then);
    }
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (uint32_t i = 0; i < key->n; i++)
        h = (h ^ key->v[i]) * 0xff51afd7ed558ccdu, h ^= h >> 29;
    key->hash = h;
    return !w.full;
}

static struct memo_entry *set_of(struct mask_memo *t, uint64_t hash)
{
    return &t->entries[(hash >> 32) % MEMO_SETS * MEMO_WAYS];
}

bool memo_find(struct mask_memo *t, const struct memo_key *key, uint32_t *bits)
{
    bool found = false;
    pthread_mutex_lock(&t->lock);
    struct memo_entry *e = set_of(t, key->hash);
    for (int i = 0; i < MEMO_WAYS && !found; i++, e++) {
        found = e->hash == key->hash && e->n_key == key->n &&
                !memcmp(e->key, key->v, key->n * sizeof *key->v);
        if (found) {
            memcpy(bits, e->bits, t->n_words * sizeof *bits);
            e->used = ++t->clock;
            t->hits++;
        }
    }
    pthread_mutex_unlock(&t->lock);
    return found;
}

void memo_add(struct mask_memo *t, const struct memo_key *key, const uint32_t *bits)
{
    pthread_mutex_lock(&t->lock);
    struct memo_entry *e = set_of(t, key->hash), *to = e;
    for (int i = 1; i < MEMO_WAYS; i++)
        to = e[i].used < to->used ? &e[i] : to;
    if (!to->bits)
        to->bits = mem_alloc(t->n_words * sizeof *bits);
    to->key = mem_realloc(to->key, key->n, sizeof *to->key);
    memcpy(to->key, key->v, key->n * sizeof *to->key);
    memcpy(to->bits, bits, t->n_words * sizeof *bits);
    to->hash = key->hash;
    to->n_key = key->n;
    to->used = ++t->clock;
    pthread_mutex_unlock(&t->lock);
}

uint64_t memo_hits(struct mask_memo *t)
{
    pthread_mutex_lock(&t->lock);
    uint64_t n = t->hits;
    pthread_mutex_unlock(&t->lock);
    return n;
}
