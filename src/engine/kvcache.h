/*
 * The paged KV cache: one pool per model, cut into pages of page_len tokens; a sequence takes pages
 * as it grows and gives them back when it ends. Nothing is reserved for the longest case.
 *
 * Invariants:
 *  1. a page is free, or held by at least one sequence: ref[page] counts its holders
 *  2. a sequence of n tokens holds exactly ceil(n / page_len) pages, in order
 *  3. only a page with ref 1 is written
 *  4. n_free + (pages with ref > 0) == n_pages
 */
#ifndef STEEL_ENGINE_KVCACHE_H
#define STEEL_ENGINE_KVCACHE_H

#include "backend/backend.h"
#include "model/config.h"

struct kvcache {
    struct backend *be;
    int page_len, n_pages, n_layers;
    enum dtype type;
    struct kv_layer *layers; /* (n_layers) into pool */
    void *pool;              /* backend memory */
    size_t pool_bytes;
    int32_t *free; /* (n_pages) stack of free page numbers */
    int n_free;
    uint16_t *ref; /* (n_pages) */
};

struct kv_seq {
    int32_t *pages; /* (cap) */
    int n_pages, cap;
    int n_tokens; /* tokens stored */
};

size_t kvcache_token_bytes(const struct config *c, enum dtype type); /* all layers, K and V */
struct kvcache *kvcache_new(struct backend *be, const struct config *c, enum dtype type,
                            int page_len, int n_pages, struct error *err);
void kvcache_free(struct kvcache *kv);

/* Makes room for n_tokens in all; false (and nothing taken) if too few pages are free. */
bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Forgets all but the first n_tokens. */
void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Gives every page back and frees the sequence's own memory; it is empty and usable again. */
void kvcache_release(struct kvcache *kv, struct kv_seq *s);

#endif
