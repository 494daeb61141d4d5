/* The hash map: power-of-two table, linear probing, FNV-like hash with a final mix. */
#include "base/map.h"
#include "base/mem.h"

#include <string.h>

static uint32_t hash_bytes(const char *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)p[i]) * 0x100000001b3u;
    h ^= h >> 29;
    return (uint32_t)(h ^ h >> 32);
}

void map_init(struct map *m, size_t expected)
{
    size_t cap = 16;
    while (cap < expected * 2)
        cap *= 2;
    m->slots = mem_zalloc(cap, sizeof *m->slots);
    m->cap = cap;
    m->n = 0;
}

void map_clear(struct map *m)
{
    mem_free(m->slots);
    *m = (struct map){0};
}

static struct map_slot *find(const struct map *m, const char *key, size_t len, uint32_t hash)
{
    size_t i = hash & (m->cap - 1);
    for (;; i = (i + 1) & (m->cap - 1)) {
        struct map_slot *s = &m->slots[i];
        if (!s->key || (s->hash == hash && s->len == len && !memcmp(s->key, key, len)))
            return s;
    }
}

bool map_get(const struct map *m, const char *key, size_t len, int64_t *value)
{
    if (!m->cap)
        return false;
    const struct map_slot *s = find(m, key, len, hash_bytes(key, len));
    if (!s->key)
        return false;
    if (value)
        *value = s->value;
    return true;
}

static void grow(struct map *m)
{
    struct map old = *m;
    map_init(m, old.n * 2 + 8);
    for (size_t i = 0; i < old.cap; i++)
        if (old.slots[i].key)
            *find(m, old.slots[i].key, old.slots[i].len, old.slots[i].hash) = old.slots[i];
    m->n = old.n;
    mem_free(old.slots);
}

bool map_add(struct map *m, const char *key, size_t len, int64_t value)
{
    if ((m->n + 1) * 2 > m->cap)
        grow(m);
    uint32_t hash = hash_bytes(key, len);
    struct map_slot *s = find(m, key, len, hash);
    if (s->key)
        return false;
    *s = (struct map_slot){key, (uint32_t)len, hash, value};
    m->n++;
    return true;
}
