/*
 * The paged KV cache: one pool per model, cut into pages of page_len tokens; a sequence takes pages
 * as it grows and gives them back when it ends. Nothing is reserved for the longest case. With a
 * prefix index (prefix.h) full pages are shared between sequences that begin alike, and stay known
 * after their holders end, until the room is needed. On a CPU the pool is address space: a page takes
 * memory when it is first written.
 *
 * Invariants:
 *  1. a page is free, idle (held by nobody, but its content is indexed), or held: ref[page] counts
 *     its holders
 *  2. a sequence of n tokens holds exactly ceil(n / page_len) pages, in order
 *  3. only a page with ref 1 that is not indexed is written
 *  4. n_free + idle + (pages with ref > 0) == n_pages
 */
#ifndef STEEL_ENGINE_KVCACHE_H
#define STEEL_ENGINE_KVCACHE_H

#include "backend/backend.h"
#include "engine/prefix.h"
#include "model/config.h"

struct kvcache {
    struct backend *be;
    int page_len, n_pages, n_layers;
    enum dtype type;
    struct kv_layer *layers; /* (n_layers) into pool */
    void *pool;              /* backend memory */
    size_t pool_bytes;
    size_t plane_bytes;    /* the keys, or the values, of one layer */
    size_t page_bytes;     /* of one page in there */
    int32_t *free;         /* (n_pages) stack of the free pages that were used before */
    int n_free;            /* on the stack, and fresh */
    int n_fresh;           /* the last so many pages were never used and take no memory yet */
    int n_cold;            /* the lowest so many on the stack gave their memory back */
    uint16_t *ref;         /* (n_pages) */
    struct prefix *prefix; /* owned; NULL = released pages are forgotten */
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

int kvcache_available(const struct kvcache *kv); /* free pages and idle ones */
/* Makes room for n_tokens in all; false (and nothing taken) if too few pages are free. */
bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Forgets all but the first n_tokens. */
void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Gives every page back and frees the sequence's own memory; it is empty and usable again. */
void kvcache_release(struct kvcache *kv, struct kv_seq *s);

/* Appends an indexed page and the n_tokens it brings; the sequence's last page must be full. */
void kvcache_attach(struct kvcache *kv, struct kv_seq *s, int32_t page, int n_tokens);
/* Page i of the sequence holds the same as `page`: holds that one instead. */
void kvcache_replace(struct kvcache *kv, struct kv_seq *s, int i, int32_t page);
/* Gives the memory of free pages back to the system if they are many; returns how much. */
size_t kvcache_trim(struct kvcache *kv);
void kvcache_verify(const struct kvcache *kv); /* CHECKs the invariants; for tests */

#endif
