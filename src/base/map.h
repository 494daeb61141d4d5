/* Hash map from byte strings to 64-bit integers (open addressing; keys are not copied). */
#ifndef STEEL_BASE_MAP_H
#define STEEL_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct map_slot {
    const char *key; /* (len) owned by the caller, must outlive the map; NULL = empty */
    uint32_t len, hash;
    int64_t value;
};

struct map {
    struct map_slot *slots; /* (cap) */
    size_t cap, n;
};

void map_init(struct map *m, size_t expected);
void map_clear(struct map *m);
bool map_get(const struct map *m, const char *key, size_t len, int64_t *value);
/* Inserts only if absent; true if the key was new. */
bool map_add(struct map *m, const char *key, size_t len, int64_t value);

#endif
