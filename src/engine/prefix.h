/*
 * The prefix index: finds KV pages by their content, so that a sequence starts after the tokens
 * that another one has already computed, whether that one still runs or not. A page is named by its content and by
 * the serial number of its parent, a chain from the first token on. Equal names mean equal prefixes; they
 * are compared id by id. A chain starts at a root, one per salt.
 *
 * The content id of a token is the token itself (prefix_text), that of an embedding row a hash of the image
 * and of the row's index in it (prefix_embed). So two images never share a page, although their placeholder
 * tokens are equal.
 *
 * Owns names and the order of eviction. The kvcache owns the pages and reports when they fall idle.
 *
 * Invariants:
 *  1. An indexed page is not written. A full page stays indexed while it is held. A tail (a page that is
 *     not full) is indexed only while idle: whoever takes it removes it from the index and may append to it.
 *  2. No two full pages have the same parent and content.
 *  3. An indexed page held by no sequence is in the idle list, and no other page is.
 *  4. A holder of a full indexed page also holds its parent, and releases the child first. So a child is
 *     always evicted before its parent, and no page loses its parent.
 *  5. Serial numbers are never reused: the children of an evicted page cannot be found again.
 */
#ifndef STEEL_ENGINE_PREFIX_H
#define STEEL_ENGINE_PREFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prefix;

/* keep = false: pages are shared while they are held, and dropped afterwards. */
struct prefix *prefix_new(int n_pages, int page_len, bool keep);
void prefix_free(struct prefix *p);

/* The root of chains of this salt; no salt has a root of its own. The hash is keyed by a secret, so that no client can
 * construct a salt that collides with another one. */
uint64_t prefix_root(const struct prefix *p, const void *salt, size_t len);

/* The content id of a token. delta: its RoPE position less its position in the sequence. */
static inline uint64_t prefix_text(int32_t token, int delta)
{
    return (uint32_t)token | (uint64_t)((uint32_t)delta & 0x7fffffff) << 32;
}
/* The content id of an embedding row. id: whatever determines the row and its RoPE position, hashed
 * with the process's secret, or with this key. Never equal to a token's. */
void prefix_embed_key(struct prefix *p, const uint64_t key[2]);
uint64_t prefix_embed(const struct prefix *p, const void *id, size_t len);

/* The child of `parent` with this content (page_len), or -1. */
int32_t prefix_find(const struct prefix *p, uint64_t parent, const uint64_t *content);
/* Indexes a full page, whose name must not be in use. Returns its serial number. */
uint64_t prefix_add(struct prefix *p, uint64_t parent, const uint64_t *content, int32_t page);
uint64_t prefix_serial(const struct prefix *p, int32_t page); /* 0 = not indexed */

/* Indexes a page by its first n positions (0 < n < page_len), before it falls idle. */
void prefix_add_tail(struct prefix *p, uint64_t parent, const uint64_t *content, int n,
                     int32_t page);
/* The longest tail of `parent` whose content begins the n ids given, or -1; sets *len. */
int32_t prefix_find_tail(const struct prefix *p, uint64_t parent, const uint64_t *content, int n,
                         int *len);

/* For the kvcache. idle: the last holder has left; false if the page is not indexed, or no longer, and becomes
 * free. hold: an idle page is held again. forget: removes it from the index. */
bool prefix_idle(struct prefix *p, int32_t page);
void prefix_hold(struct prefix *p, int32_t page);
void prefix_forget(struct prefix *p, int32_t page);
/* Removes the page that has been idle longest from the index and returns it; -1 if none is idle. */
int32_t prefix_evict(struct prefix *p);
int prefix_n_idle(const struct prefix *p);
int64_t prefix_n_evicted(const struct prefix *p);

/* CHECKs the invariants, given the kvcache's reference counts (n_pages). */
void prefix_verify(const struct prefix *p, const uint16_t *ref);

#endif
