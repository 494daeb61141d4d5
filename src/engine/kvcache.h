/*
 * The cache of what a network remembers of tokens: keys and values by page, and the states of
 * recurrent layers. Each layer's part is sized by what its mixer stores. One pool per model, cut into
 * pages of page_len tokens; a sequence takes pages as it grows and gives them back when it ends. Nothing is reserved for the longest case. With a
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
 *  5. where there are states: a sequence with tokens has the state behind the last of them (`from`),
 *     or none at all, once it was cut to where it has none (`back`): then it cannot go on. A page that is free has no checkpoint
 */
#ifndef STEEL_ENGINE_KVCACHE_H
#define STEEL_ENGINE_KVCACHE_H

#include "backend/batch.h"
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
    struct kv_plane *planes; /* (n_planes) the parts of pool */
    int n_planes;
    size_t page_bytes;     /* of a page in all of them */
    int32_t *free;         /* (n_pages) stack of the free pages that were used before */
    int n_free;            /* on the stack, and fresh */
    int n_fresh;           /* the last so many pages were never used and take no memory yet */
    int n_cold;            /* the lowest so many on the stack gave their memory back */
    uint16_t *ref;         /* (n_pages) */
    struct prefix *prefix; /* owned; NULL = released pages are forgotten */
    struct states *states; /* owned; NULL = no layer has any */
    int n_states;
    void *state_pool; /* (n_states) slots, layer by layer; backend memory */
    size_t state_pool_bytes;
};

struct kv_seq {
    int32_t *pages; /* (cap) */
    int n_pages, cap;
    int n_tokens; /* tokens stored */
    /* Slots of states, plus 1; 0 = none */
    int32_t state; /* its own: where the next step leaves the state */
    int32_t from;  /* what the next step goes on from: its own, or a pinned checkpoint */
    int32_t saved; /* a copy that is no checkpoint yet, of the state after saved_at tokens */
    int saved_at;
    int32_t back; /* the state after back_at tokens, until what a step did behind them counts */
    int back_at;
};

/* Of all layers, K and V. */
size_t kvcache_token_bytes(const struct network *net, enum dtype k_type, enum dtype v_type);
size_t kvcache_state_bytes(const struct network *net); /* of a slot; 0 = no layer has a state */
/* n_states: sequences that run at once, and checkpoints. kv_types_check holds. */
struct kvcache *kvcache_new(struct backend *be, const struct network *net, enum dtype k_type,
                            enum dtype v_type, int page_len, int n_pages, int n_states,
                            struct error *err);
void kvcache_free(struct kvcache *kv);

int kvcache_available(const struct kvcache *kv); /* free pages and idle ones */
/* Makes room for n_tokens in all; false (and nothing taken) if too few pages or states are free. */
bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Whether a sequence can be given tokens: one with a state that was cut cannot. */
bool kvcache_can_grow(const struct kvcache *kv, const struct kv_seq *s);
/* A step took n_tokens more: the state stands behind them now. */
void kvcache_advance(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Forgets all but the first n_tokens; a state of more tokens than that is lost. */
void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Gives every page back and frees the sequence's own memory; it is empty and usable again. */
void kvcache_release(struct kvcache *kv, struct kv_seq *s);

/* Appends an indexed page and the n_tokens it brings; the sequence's last page must be full. */
void kvcache_attach(struct kvcache *kv, struct kv_seq *s, int32_t page, int n_tokens);
/* Page i of the sequence holds the same as `page`: holds that one instead. */
void kvcache_replace(struct kvcache *kv, struct kv_seq *s, int i, int32_t page);
/* States. save: a slot for the state as it will be after n_tokens, which the next step writes; -1 if
 * none is free. keep: page i ends where the saved state was taken: that becomes its checkpoint. retire:
 * the sequence's own state becomes that of its last page; it will not go on. resume: the sequence goes
 * on from the checkpoint of its last page. */
int32_t kvcache_save(struct kvcache *kv, struct kv_seq *s, int n_tokens);
void kvcache_keep(struct kvcache *kv, struct kv_seq *s, int i);
void kvcache_retire(struct kvcache *kv, struct kv_seq *s);
void kvcache_resume(struct kvcache *kv, struct kv_seq *s);
/* A step that may turn out not to count: fork, where a slot is left, has it write elsewhere, so that
 * cutting its tokens goes back to the state before it. settle: it counts. */
void kvcache_fork(struct kvcache *kv, struct kv_seq *s);
void kvcache_settle(struct kvcache *kv, struct kv_seq *s);
/* A step will save the state in `back` after n_tokens of its tokens: what follows are drafts. False: no
 * slot is left. Cutting to there goes back to it, settle keeps what the step left. */
bool kvcache_draft(struct kvcache *kv, struct kv_seq *s, int n_tokens);
/* Gives the memory of free pages back to the system if they are many; returns how much. */
size_t kvcache_trim(struct kvcache *kv);
void kvcache_verify(const struct kvcache *kv); /* CHECKs the invariants; for tests */

#endif
