/* The byte trie: a hash table of edges keyed by node and byte; the root's edges are an array. */
#include "text/tokenizer/trie.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

void trie_clear(struct trie *t)
{
    mem_free(t->edges);
    mem_free(t->value);
    memset(t, 0, sizeof *t);
}

static uint32_t node_new(struct trie *t)
{
    if (t->n_nodes == t->cap_nodes) {
        t->cap_nodes = t->cap_nodes ? t->cap_nodes * 2 : 64;
        t->value = mem_realloc(t->value, t->cap_nodes, sizeof *t->value);
    }
    CHECK(t->n_nodes < UINT32_MAX, "too many trie nodes");
    t->value[t->n_nodes] = -1;
    return (uint32_t)t->n_nodes++;
}

static void edge_put(struct trie *t, uint64_t key, uint32_t child)
{
    size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> 20) & (t->cap - 1);
    while (t->edges[i].key)
        i = (i + 1) & (t->cap - 1);
    t->edges[i] = (struct trie_edge){key, child};
}

static void edge_add(struct trie *t, uint32_t node, unsigned char c, uint32_t child)
{
    if ((t->n_edges + 1) * 2 > t->cap) {
        struct trie_edge *old = t->edges;
        size_t n = t->cap;
        t->cap = n ? n * 2 : 64;
        t->edges = mem_zalloc(t->cap, sizeof *t->edges);
        for (size_t i = 0; i < n; i++)
            if (old[i].key)
                edge_put(t, old[i].key, old[i].child);
        mem_free(old);
    }
    edge_put(t, ((uint64_t)node << 8 | c) + 1, child);
    t->n_edges++;
}

bool trie_add(struct trie *t, const char *p, size_t n, int32_t id)
{
    CHECK(n > 0, "an empty string in a trie");
    if (!t->n_nodes)
        node_new(t); /* the root */
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        uint32_t next = trie_step(t, node, c);
        if (!next) {
            next = node_new(t);
            if (node)
                edge_add(t, node, c, next);
            else
                t->root[c] = next;
        }
        node = next;
    }
    if (t->value[node] >= 0)
        return false;
    t->value[node] = id;
    return true;
}
