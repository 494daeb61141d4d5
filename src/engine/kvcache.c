/* The page allocator of the KV cache: see the invariants in kvcache.h. */
#include "engine/kvcache.h"
#include "backend/backend.h"
#include "base/mem.h"

#include <stdlib.h>

enum {
    HUGE_PAGE = 2 << 20,
    HUGE_WASTE = 32 << 20, /* memory that a first token may take in huge pages, over all planes */
    TRIM_BYTES = 64 << 20, /* less unused memory than this is not returned to the system */
};

/* Values of a page in each of a layer's planes: keys, values, index keys. */
static void page_values(const struct mixer *m, int page_len, size_t values[3])
{
    int k, v;
    mixer_cache_dims(m, &k, &v);
    values[0] = (size_t)mixer_page_rows(m, page_len) * (size_t)k;
    values[1] = (size_t)page_len * (size_t)v;
    values[2] = (size_t)mixer_index_rows(m, page_len) * (size_t)mixer_index_dim(m);
}

size_t kvcache_token_bytes(const struct network *net, enum dtype k_type, enum dtype v_type)
{
    size_t n = 0, values[3];
    for (int i = 0; i < net->n_layers; i++) {
        page_values(&net->layers[i].mixer, KVCACHE_PAGE, values);
        n += dtype_bytes(k_type, values[0]) + dtype_bytes(v_type, values[1]) +
             dtype_bytes(k_type, values[2]);
    }
    return (n + KVCACHE_PAGE - 1) / KVCACHE_PAGE;
}

size_t kvcache_state_bytes(const struct network *net)
{
    size_t n = 0;
    for (int i = 0; i < net->n_layers; i++)
        n += layer_state_len(&net->layers[i]);
    return n * sizeof(float);
}

static size_t round64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

/* Lays out the planes of the pool, one after the other. base NULL: only counts. Returns the bytes. */
static size_t lay_planes(struct kvcache *kv, const struct network *net, char *base)
{
    size_t at = 0, pages = (size_t)kv->n_pages;
    kv->n_planes = 0;
    kv->page_bytes = 0;
    for (int i = 0; i < net->n_layers; i++) {
        size_t values[3];
        page_values(&net->layers[i].mixer, kv->page_len, values);
        for (int j = 0; j < 3; j++) {
            size_t page = dtype_bytes(j == 1 ? kv->v_type : kv->k_type, values[j]);
            if (!page)
                continue;
            if (base) {
                struct kv_layer *l = &kv->layers[i];
                *(j == 0 ? &l->k : j == 1 ? &l->v : &l->index) = base + at;
                kv->planes[kv->n_planes] = (struct kv_plane){base + at, page};
            }
            kv->n_planes++;
            kv->page_bytes += page;
            at += round64(page * pages);
        }
    }
    return at;
}

static bool make_states(struct kvcache *kv, const struct network *net, int n_states,
                        struct error *err)
{
    size_t slot = kvcache_state_bytes(net), at = 0;
    if (!slot)
        return true;
    kv->n_states = n_states;
    kv->state_pool_bytes = slot * (size_t)n_states + 64 * (size_t)net->n_layers;
    kv->state_pool =
        kv->be->ops->alloc(kv->be, kv->state_pool_bytes, "the states of sequences", err);
    if (!kv->state_pool)
        return false;
    kv->states = states_new(n_states, kv->n_pages);
    for (int i = 0; i < net->n_layers; i++) {
        size_t len = layer_state_len(&net->layers[i]);
        if (len)
            kv->layers[i].state = (float *)((char *)kv->state_pool + at);
        at += round64(len * (size_t)n_states * sizeof(float));
    }
    return true;
}

struct kvcache *kvcache_new(struct backend *be, const struct network *net, enum dtype k_type,
                            enum dtype v_type, int page_len, int n_pages, int n_states,
                            struct error *err)
{
    struct kvcache *kv = mem_zalloc(1, sizeof *kv);
    *kv = (struct kvcache){.be = be,
                           .page_len = page_len,
                           .n_pages = n_pages,
                           .n_layers = net->n_layers,
                           .k_type = k_type,
                           .v_type = v_type};
    kv->pool_bytes = lay_planes(kv, net, NULL);
    kv->layers = mem_zalloc((size_t)net->n_layers, sizeof *kv->layers);
    kv->planes = mem_zalloc((size_t)kv->n_planes, sizeof *kv->planes);
    kv->pool = be->ops->alloc(be, kv->pool_bytes + 64, "the KV cache", err);
    if (!kv->pool || !make_states(kv, net, n_states, err)) {
        kvcache_free(kv);
        return NULL;
    }
    lay_planes(kv, net, kv->pool);
    kv->ref = mem_zalloc((size_t)n_pages, sizeof *kv->ref);
    kv->free = mem_zalloc((size_t)n_pages, sizeof *kv->free);
    kv->n_free = kv->n_fresh = n_pages;
    if (!be->own_memory && (size_t)kv->n_planes * HUGE_PAGE > HUGE_WASTE)
        for (int i = 0; i < kv->n_planes; i++) {
            size_t bytes = kv->planes[i].page_bytes * (size_t)n_pages;
            mem_small_pages(kv->planes[i].at, bytes < HUGE_PAGE ? bytes : HUGE_PAGE);
        }
    return kv;
}

void kvcache_free(struct kvcache *kv)
{
    if (!kv)
        return;
    prefix_free(kv->prefix);
    states_free(kv->states);
    canary_free(kv->canary);
    if (kv->state_pool)
        kv->be->ops->free(kv->be, kv->state_pool, kv->state_pool_bytes);
    if (kv->pool)
        kv->be->ops->free(kv->be, kv->pool, kv->pool_bytes + 64);
    mem_free(kv->planes);
    mem_free(kv->layers);
    mem_free(kv->free);
    mem_free(kv->ref);
    mem_free(kv);
}

static int pages_for(const struct kvcache *kv, int n_tokens)
{
    return (n_tokens + kv->page_len - 1) / kv->page_len;
}

int kvcache_available(const struct kvcache *kv)
{
    return kv->n_free + (kv->prefix ? prefix_n_idle(kv->prefix) : 0);
}

static void reserve(const struct kvcache *kv, struct kv_seq *s, int pages)
{
    if (pages <= s->cap)
        return;
    s->cap = pages + pages / 2 + 8;
    s->pages = mem_realloc(s->pages, (size_t)s->cap, sizeof *s->pages);
    if (kv->canary)
        s->marks = mem_realloc(s->marks, (size_t)s->cap, sizeof *s->marks);
}

/* Page i of the sequence is now its own. */
static void mark_fresh(struct kvcache *kv, struct kv_seq *s, int i)
{
    if (!kv->canary)
        return;
    s->marks[i] = canary_fresh(kv->canary);
    canary_set(kv->canary, s->pages[i], s->marks[i]);
}

bool kvcache_contested(const struct kv_seq *a, const struct kv_seq *b)
{
    for (int i = 0; i < a->n_pages; i++)
        for (int k = 0; k < b->n_pages; k++)
            if (a->pages[i] == b->pages[k] && a->marks[i] != b->marks[k])
                return true;
    return false;
}

void kvcache_named(struct kvcache *kv, struct kv_seq *s, int i)
{
    uint64_t serial = kv->canary ? prefix_serial(kv->prefix, s->pages[i]) : 0;
    if (!serial) /* a tail that is not worth a name */
        return;
    s->marks[i] = canary_named(kv->canary, serial);
    canary_set(kv->canary, s->pages[i], s->marks[i]);
}

static void hold(struct kvcache *kv, int32_t page)
{
    CHECK(kv->ref[page] < UINT16_MAX, "page %d has too many holders", page);
    if (kv->ref[page]++ == 0)
        prefix_hold(kv->prefix, page);
}

static void let_go(struct kvcache *kv, int32_t page)
{
    if (!kv->ref[page] && kv->canary) /* two sequences had it, and the other one was first */
        return;
    if (--kv->ref[page] || (kv->prefix && prefix_idle(kv->prefix, page)))
        return;
    kv->free[kv->n_free++ - kv->n_fresh] = page;
    if (kv->states)
        states_drop(kv->states, page);
}

/* Takes low pages first, and used pages before fresh ones, so that little of the pool is touched. */
static int32_t take_page(struct kvcache *kv)
{
    if (!kv->n_free) {
        int32_t page = prefix_evict(kv->prefix);
        if (kv->states)
            states_drop(kv->states, page);
        return page;
    }
    int n_stack = kv->n_free-- - kv->n_fresh;
    if (!n_stack)
        return kv->n_pages - kv->n_fresh--;
    if (kv->n_cold == n_stack)
        kv->n_cold--;
    return kv->free[n_stack - 1];
}

bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    int want = pages_for(kv, n_tokens);
    CHECK(kvcache_can_grow(kv, s), "a sequence of %d tokens has lost its state", s->n_tokens);
    if (want - s->n_pages > kvcache_available(kv))
        return false;
    if (kv->states && !s->state && !(s->state = states_take(kv->states) + 1))
        return false;
    reserve(kv, s, want);
    while (s->n_pages < want) {
        int32_t page = take_page(kv);
        kv->ref[page] = 1;
        s->pages[s->n_pages++] = page;
        mark_fresh(kv, s, s->n_pages - 1);
    }
    return true;
}

bool kvcache_can_grow(const struct kvcache *kv, const struct kv_seq *s)
{
    return !kv->states || !s->n_tokens || s->from;
}

/* Drops the state that the sequence was to continue from. */
static void drop_from(struct kvcache *kv, struct kv_seq *s)
{
    if (s->from && s->from != s->state && s->from != s->back)
        states_unpin(kv->states, s->from - 1);
    s->from = 0;
}

void kvcache_settle(struct kvcache *kv, struct kv_seq *s)
{
    if (s->back)
        states_give(kv->states, s->back - 1);
    s->back = 0;
}

void kvcache_fork(struct kvcache *kv, struct kv_seq *s)
{
    int32_t slot;
    if (s->back || !s->state || s->from != s->state || (slot = states_take(kv->states)) < 0)
        return;
    s->back = s->state;
    s->back_at = s->n_tokens;
    s->state = slot + 1;
}

bool kvcache_draft(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    int32_t slot;
    if (s->back || !s->state || s->from != s->state || (slot = states_take(kv->states)) < 0)
        return false;
    s->back = slot + 1;
    s->back_at = s->n_tokens + n_tokens;
    return true;
}

static void drop_state(struct kvcache *kv, struct kv_seq *s)
{
    drop_from(kv, s);
    kvcache_settle(kv, s);
    if (s->state)
        states_give(kv->states, s->state - 1);
    s->state = 0;
}

static void drop_saved(struct kvcache *kv, struct kv_seq *s)
{
    if (s->saved)
        states_give(kv->states, s->saved - 1);
    s->saved = 0;
}

void kvcache_advance(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    s->n_tokens += n_tokens;
    if (!kv->states)
        return;
    drop_from(kv, s);
    s->from = s->state;
}

int32_t kvcache_save(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    drop_saved(kv, s);
    s->saved = states_take(kv->states) + 1;
    s->saved_at = n_tokens;
    return s->saved - 1;
}

/* The slot of the last checkpoint before page i of the sequence; -1 = none. */
static int32_t state_before(const struct kvcache *kv, const struct kv_seq *s, int i)
{
    int32_t slot = -1;
    while (slot < 0 && i > 0)
        slot = states_of(kv->states, s->pages[--i]);
    return slot;
}

void kvcache_keep(struct kvcache *kv, struct kv_seq *s, int i, int n_tokens, bool end)
{
    if (!s->saved || s->saved_at != (i + 1) * kv->page_len)
        return;
    if (states_of(kv->states, s->pages[i]) < 0) {
        states_keep(kv->states, s->saved - 1, s->pages[i], s->saved_at, end);
        states_pass(kv->states, s->saved - 1, state_before(kv, s, i), n_tokens);
        s->saved = 0;
    }
    drop_saved(kv, s);
}

void kvcache_retire(struct kvcache *kv, struct kv_seq *s)
{
    int last = s->n_pages - 1;
    if (!kv->states || !s->n_tokens || !s->state || s->from != s->state ||
        states_of(kv->states, s->pages[last]) >= 0)
        return;
    states_keep(kv->states, s->state - 1, s->pages[last], s->n_tokens, true);
    states_pass(kv->states, s->state - 1, state_before(kv, s, last), s->n_tokens);
    s->state = s->from = 0;
}

void kvcache_resume(struct kvcache *kv, struct kv_seq *s)
{
    int32_t page = s->pages[s->n_pages - 1], slot = states_of(kv->states, page);
    CHECK(slot >= 0, "page %d has no state", page);
    drop_state(kv, s);
    if (s->n_tokens % kv->page_len) { /* a tail is not shared, so its state can be taken */
        s->state = s->from = states_take_from(kv->states, page) + 1;
        return;
    }
    states_pin(kv->states, slot);
    s->from = slot + 1;
}

void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    CHECK(n_tokens <= s->n_tokens, "cut to %d of %d tokens", n_tokens, s->n_tokens);
    if (s->back && n_tokens == s->back_at) {
        states_give(kv->states, s->state - 1);
        s->state = s->from = s->back;
        s->back = 0;
    } else if (n_tokens < s->n_tokens || !n_tokens) {
        drop_state(kv, s);
    }
    if (s->saved && s->saved_at > n_tokens)
        drop_saved(kv, s);
    int keep = pages_for(kv, n_tokens);
    while (s->n_pages > keep) /* last page first: prefix.h, invariant 4 */
        let_go(kv, s->pages[--s->n_pages]);
    s->n_tokens = n_tokens;
    if (kv->prefix && n_tokens % kv->page_len) { /* the rest of the last page will be written */
        int32_t last = s->pages[keep - 1];
        CHECK(kv->ref[last] == 1 || !prefix_serial(kv->prefix, last), "cut in a shared page");
        prefix_forget(kv->prefix, last);
        if (kv->states)
            states_drop(kv->states, last);
    }
}

void kvcache_lose(struct kvcache *kv, struct kv_seq *s, int i)
{
    if (kv->prefix)
        prefix_forget(kv->prefix, s->pages[i]);
    kvcache_cut(kv, s, 0);
}

void kvcache_attach(struct kvcache *kv, struct kv_seq *s, int32_t page, int n_tokens)
{
    CHECK(s->n_tokens == s->n_pages * kv->page_len, "attach after %d tokens", s->n_tokens);
    reserve(kv, s, s->n_pages + 1);
    if (kv->canary)
        s->marks[s->n_pages] = canary_named(kv->canary, prefix_serial(kv->prefix, page));
    hold(kv, page);
    s->pages[s->n_pages++] = page;
    s->n_tokens += n_tokens;
}

void kvcache_replace(struct kvcache *kv, struct kv_seq *s, int i, int32_t page)
{
    if (kv->canary)
        s->marks[i] = canary_named(kv->canary, prefix_serial(kv->prefix, page));
    hold(kv, page);
    let_go(kv, s->pages[i]);
    s->pages[i] = page;
}

void kvcache_verify(const struct kvcache *kv)
{
    int held = 0;
    for (int i = 0; i < kv->n_pages; i++)
        held += kv->ref[i] > 0;
    CHECK(held + kvcache_available(kv) == kv->n_pages, "%d held, %d available of %d pages", held,
          kvcache_available(kv), kv->n_pages);
    for (int i = 0; i < kv->n_free - kv->n_fresh; i++)
        CHECK(kv->ref[kv->free[i]] == 0 && kv->free[i] < kv->n_pages - kv->n_fresh,
              "page %d is free, and held or fresh", kv->free[i]);
    CHECK(kv->n_cold <= kv->n_free - kv->n_fresh, "%d cold pages", kv->n_cold);
    if (kv->prefix)
        prefix_verify(kv->prefix, kv->ref);
    if (kv->states)
        states_verify(kv->states);
    for (int i = 0; kv->states && i < kv->n_free - kv->n_fresh; i++)
        CHECK(states_of(kv->states, kv->free[i]) < 0, "page %d is free and has a state",
              kv->free[i]);
}

static int descending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

size_t kvcache_trim(struct kvcache *kv)
{
    int n = kv->n_free - kv->n_fresh;
    size_t bytes = (size_t)(n - kv->n_cold) * kv->page_bytes;
    if (kv->be->own_memory || bytes < TRIM_BYTES)
        return 0;
    qsort(kv->free + kv->n_cold, (size_t)(n - kv->n_cold), sizeof *kv->free, descending);
    for (int at = kv->n_cold, end; at < n; at = end) { /* runs of adjacent pages */
        for (end = at + 1; end < n && kv->free[end] == kv->free[end - 1] - 1;)
            end++;
        for (int i = 0; i < kv->n_planes; i++) {
            size_t page = kv->planes[i].page_bytes;
            kv->be->ops->forget(kv->be, kv->planes[i].at + page * (size_t)kv->free[end - 1],
                                page * (size_t)(end - at));
        }
    }
    kv->n_cold = n;
    return bytes;
}

void kvcache_release(struct kvcache *kv, struct kv_seq *s)
{
    kvcache_cut(kv, s, 0);
    kv_seq_clear(s);
}

void kv_seq_clear(struct kv_seq *s)
{
    CHECK(s->n_pages == 0, "the sequence has pages");
    mem_free(s->pages);
    mem_free(s->marks);
    *s = (struct kv_seq){0};
}
