/*
 * The prefix index: finds KV pages by the tokens they hold, so that a sequence starts behind what
 * another one, running or long ended, has already computed. A page's name is its content and its
 * parent's serial number, a chain from the first token on: equal names mean equal prefixes, compared
 * token by token, never by hash alone. The chain starts at a root, one per salt.
 * Owns names and the order of eviction; the kvcache owns the pages and tells when they fall idle.
 *
 * Invariants:
 *  1. an indexed page is not written; a full page stays indexed while held, a tail (a page that is
 *     not full) only while idle: who takes a tail takes it out of the index and may write behind it
 *  2. no two full pages have the same parent and tokens
 *  3. an indexed page held by no sequence is in the idle list; no other page is
 *  4. who holds a full indexed page holds its parent, and lets go of the child first: so a child is
 *     always nearer to eviction than its parent, and eviction orphans nobody
 *  5. serials are never used twice: what hung below an evicted page cannot be found again
 */
#ifndef STEEL_ENGINE_PREFIX_H
#define STEEL_ENGINE_PREFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prefix;

/* keep = false: pages are shared while somebody holds them and forgotten afterwards. */
struct prefix *prefix_new(int n_pages, int page_len, bool keep);
void prefix_free(struct prefix *p);

/* Where chains of this salt start; no salt is a root of its own. A secret keys the hash, so that no
 * client can choose a salt that meets another's. */
uint64_t prefix_root(const struct prefix *p, const void *salt, size_t len);

/* The page below `parent` with these tokens (page_len), or -1. */
int32_t prefix_find(const struct prefix *p, uint64_t parent, const int32_t *tokens);
/* Names a full page; its name must be free. Returns its serial. */
uint64_t prefix_add(struct prefix *p, uint64_t parent, const int32_t *tokens, int32_t page);
uint64_t prefix_serial(const struct prefix *p, int32_t page); /* 0 = not indexed */

/* Names a page with only its first n tokens (0 < n < page_len), about to fall idle. */
void prefix_add_tail(struct prefix *p, uint64_t parent, const int32_t *tokens, int n, int32_t page);
/* The longest tail below `parent` whose tokens are all among the n given; sets *len. Or -1. */
int32_t prefix_find_tail(const struct prefix *p, uint64_t parent, const int32_t *tokens, int n,
                         int *len);

/* For the kvcache. idle: the last holder left; false if the page is not (or no longer) indexed and
 * free for anybody. hold: an idle page is held again. forget: out of the index. */
bool prefix_idle(struct prefix *p, int32_t page);
void prefix_hold(struct prefix *p, int32_t page);
void prefix_forget(struct prefix *p, int32_t page);
/* Takes the page longest idle out of the index and returns it; -1 if none is idle. */
int32_t prefix_evict(struct prefix *p);
int prefix_n_idle(const struct prefix *p);
int64_t prefix_n_evicted(const struct prefix *p);

/* CHECKs the invariants that can be seen from here, given the kvcache's counts (n_pages). */
void prefix_verify(const struct prefix *p, const uint16_t *ref);

#endif
