/*
 * The KV cache: keys and values in pages, and states of recurrent layers in slots. Each layer's part is
 * sized by what its mixer stores. One pool per model is cut into pages of page_len tokens. A sequence
 * takes pages as it grows and releases them when it ends; nothing is reserved for the longest case. With
 * a prefix index (prefix.h), full pages are shared between sequences with a common prefix, and stay
 * indexed after their holders end, until the room is needed. On a CPU the pool is address space: a page
 * takes memory when it is first written.
 *
 * Invariants:
 *  1. A page is free, idle (indexed and held by no sequence) or held. ref[page] counts its holders.
 *  2. A sequence of n tokens holds exactly ceil(n / page_len) pages, in order.
 *  3. A page is written only while its ref is 1 and it is not indexed.
 *  4. n_free + idle pages + held pages == n_pages.
 *  5. Where there are states, a sequence with tokens has the state after its last token (`from`). It has
 *     none after it was cut to a position without one (`back`), and cannot grow then. A free page has no
 *     checkpoint.
 */
#ifndef STEEL_ENGINE_KVCACHE_H
#define STEEL_ENGINE_KVCACHE_H

#include "backend/batch.h"
#include "engine/canary.h"
#include "engine/prefix.h"
#include "engine/states.h"

/* The keys, or the values, of one layer. */
struct kv_plane {
    char *at;
    size_t page_bytes;
};

struct kvcache {
    struct backend *be;
    int page_len, n_pages, n_layers;
    enum dtype k_type, v_type;
    struct kv_layer *layers; /* (n_layers) into pool and state_pool */
    void *pool;              /* backend memory */
    size_t pool_bytes;
    struct kv_plane *planes; /* (n_planes) parts of pool */
    int n_planes;
    size_t page_bytes; /* of a page in all planes */
    int32_t *free;     /* (n_pages) stack of free pages that have been used */
    int n_free;        /* on the stack, and never used */
    int n_fresh;       /* pages at the end of the pool that were never used and take no memory */
    int n_cold;        /* pages at the bottom of the stack whose memory was returned */
    uint16_t *ref;     /* (n_pages) */
    struct prefix *prefix; /* owned; NULL = nothing is shared */
    struct states *states; /* owned; NULL = no layer has states */
    struct canary *canary; /* owned; NULL = pages have no marks */
    int n_states;
    void *state_pool; /* (n_states) slots, layer by layer; backend memory */
    size_t state_pool_bytes;
};

struct kv_seq {
    int32_t *pages;  /* (cap) */
    uint32_t *marks; /* (cap) the pages' marks; with kvcache.canary */
    int n_pages, cap;
    int n_tokens; /* tokens stored */
    /* State slots + 1; 0 = none */
    int32_t state; /* its own, which the next step writes */
    int32_t from;  /* what the next step reads: its own, or a pinned checkpoint */
    int32_t saved; /* a copy of the state after saved_at tokens, not a checkpoint yet */
    int saved_at;
    int32_t back; /* the state after back_at tokens, kept until the tokens after them are settled */
    int back_at;
};

enum { KVCACHE_PAGE = 16 }; /* tokens of a page, by default */

/* Bytes of a token: K and V of all layers, in pages of the default length. */
size_t kvcache_token_bytes(const struct network *net, enum dtype k_type, enum dtype v_type);
size_t
kvcache_state_bytes(const struct network *net); /* of a state slot; 0 = no layer has states */
/* n_states: one slot per running sequence, and checkpoints. kv_types_check must hold. */
struct kvcache *kvcache_new(struct backend *be, const struct network *net, enum dtype k_type,
                            enum dtype v_type, int page_len, int n_pages, int n_states,
                            struct error *err);
void kvcache_free(struct kvcache *kv);

int kvcache_available(const struct kvcache *kv); /* free and idle pages */
/* Makes room for n_tokens in total. False if too few pages or slots are free; nothing is taken then. */
bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* False for a sequence that was cut to a position without a state (invariant 5). */
bool kvcache_can_grow(const struct kvcache *kv, const struct kv_seq *s);
/* A step has stored n_tokens more: the state is the one after them. */
void kvcache_advance(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Drops all but the first n_tokens, and the state after later tokens. */
void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Releases all pages and frees the sequence's own memory. It is empty and can be used again. */
void kvcache_release(struct kvcache *kv, struct kv_seq *s);
/* The same for a sequence without pages. */
void kv_seq_clear(struct kv_seq *s);

/* Appends an indexed page with n_tokens. The sequence's last page must be full. */
void kvcache_attach(struct kvcache *kv, struct kv_seq *s, int32_t page, int n_tokens);
/* Replaces page i of the sequence by `page`, which has the same content. */
void kvcache_replace(struct kvcache *kv, struct kv_seq *s, int i, int32_t page);
/* With marks: whether a and b have a page that they do not agree on. What either has written there is lost. */
bool kvcache_contested(const struct kv_seq *a, const struct kv_seq *b);
/* Page i of the sequence is another one's: it is not found by its content any more, and the sequence gives up all pages. */
void kvcache_lose(struct kvcache *kv, struct kv_seq *s, int i);
/* Page i of the sequence has just been indexed: its mark is that of its name from now on (canary.h). */
void kvcache_named(struct kvcache *kv, struct kv_seq *s, int i);
/* States.
 * save: returns a slot in which the next step saves the state after n_tokens; -1 if none is free.
 * keep: the saved state becomes the checkpoint of page i, which ends at its position. The sequence will have n_tokens.
 *       end: see states_keep.
 * retire: the sequence's own state becomes the checkpoint of its last page. It does not grow any more.
 * resume: the sequence continues from the checkpoint of its last page. */
int32_t kvcache_save(struct kvcache *kv, struct kv_seq *s, int n_tokens);
void kvcache_keep(struct kvcache *kv, struct kv_seq *s, int i, int n_tokens, bool end);
void kvcache_retire(struct kvcache *kv, struct kv_seq *s);
void kvcache_resume(struct kvcache *kv, struct kv_seq *s);
/* For a step that may be rolled back. fork: the step writes its state to another slot if one is free, so that
 * kvcache_cut can return to the state before it. settle: the step is final. */
void kvcache_fork(struct kvcache *kv, struct kv_seq *s);
void kvcache_settle(struct kvcache *kv, struct kv_seq *s);
/* For a step with drafts: it saves the state after the first n_tokens of its tokens in `back`. False: no slot is
 * free. kvcache_cut to that position returns to it, kvcache_settle keeps the state after the step. */
bool kvcache_draft(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Returns the memory of free pages to the system if there are many; the result is the bytes returned. */
size_t kvcache_trim(struct kvcache *kv);
void kvcache_verify(const struct kvcache *kv); /* CHECKs the invariants; for tests */

#endif
