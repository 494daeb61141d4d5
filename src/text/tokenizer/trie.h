/*
 * A byte trie from strings to ids. Serves "longest entry here" (added tokens) and "all entries that
 * start here" (unigram). Built once, then read by any thread.
 */
#ifndef STEEL_TEXT_TRIE_H
#define STEEL_TEXT_TRIE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct trie_edge {
    uint64_t key; /* node << 8 | byte, plus 1 (0 = empty slot) */
    uint32_t child;
};

struct trie {
    uint32_t root[256];      /* child of the root per byte, 0 = none */
    struct trie_edge *edges; /* (cap) open addressing: all edges except the root's */
    size_t cap, n_edges;
    int32_t *value; /* (n_nodes) id of the entry that ends here, or -1; node 0 is the root */
    size_t n_nodes, cap_nodes;
};

void trie_clear(struct trie *t);
/* Adds a non-empty string. False if it is already present; the old id stays. */
bool trie_add(struct trie *t, const char *p, size_t n, int32_t id);

/* The node reached from `node` (0 = root) by byte c, or 0. */
static inline uint32_t trie_step(const struct trie *t, uint32_t node, unsigned char c)
{
    if (!node)
        return t->root[c];
    if (!t->cap)
        return 0;
    uint64_t key = ((uint64_t)node << 8 | c) + 1;
    size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> 20) & (t->cap - 1);
    for (;; i = (i + 1) & (t->cap - 1)) {
        if (t->edges[i].key == key)
            return t->edges[i].child;
        if (!t->edges[i].key)
            return 0;
    }
}

#endif
