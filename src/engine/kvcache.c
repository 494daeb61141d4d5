/* The page allocator behind the KV cache. See the invariants in kvcache.h. */
#include "engine/kvcache.h"
#include "base/mem.h"

#include <stdlib.h>

enum {
    HUGE_PAGE = 2 << 20,
    HUGE_WASTE = 32 << 20, /* what a first token may take in huge pages, all layers together */
    TRIM_BYTES = 64 << 20, /* unused memory below this is not worth giving back */
};

static size_t layer_bytes(const struct config *c, enum dtype type, size_t tokens)
{
    return tokens * (size_t)c->n_kv_heads * (size_t)c->head_dim * dtype_bytes(type, 1);
}

size_t kvcache_token_bytes(const struct config *c, enum dtype type)
{
    return 2 * (size_t)c->n_layers * layer_bytes(c, type, 1);
}

struct kvcache *kvcache_new(struct backend *be, const struct config *c, enum dtype type,
                            int page_len, int n_pages, struct error *err)
{
    struct kvcache *kv = mem_zalloc(1, sizeof *kv);
    *kv = (struct kvcache){
        .be = be, .page_len = page_len, .n_pages = n_pages, .n_layers = c->n_layers, .type = type};
    size_t plane = layer_bytes(c, type, (size_t)n_pages * (size_t)page_len);
    plane = (plane + 63) & ~(size_t)63;
    kv->pool_bytes = plane * 2 * (size_t)c->n_layers;
    kv->pool = be->ops->alloc(be, kv->pool_bytes, "the KV cache", err);
    if (!kv->pool) {
        mem_free(kv);
        return NULL;
    }
    kv->layers = mem_zalloc((size_t)c->n_layers, sizeof *kv->layers);
    for (int i = 0; i < c->n_layers; i++) {
        kv->layers[i].k = (char *)kv->pool + plane * 2 * (size_t)i;
        kv->layers[i].v = (char *)kv->layers[i].k + plane;
    }
    kv->ref = mem_zalloc((size_t)n_pages, sizeof *kv->ref);
    kv->free = mem_zalloc((size_t)n_pages, sizeof *kv->free);
    kv->n_free = kv->n_fresh = n_pages;
    kv->plane_bytes = plane;
    kv->page_bytes = layer_bytes(c, type, (size_t)page_len);
    if (be->ops->forget && 2 * (size_t)c->n_layers * HUGE_PAGE > HUGE_WASTE)
        for (int i = 0; i < 2 * c->n_layers; i++)
            mem_small_pages((char *)kv->pool + plane * (size_t)i,
                            plane < HUGE_PAGE ? plane : HUGE_PAGE);
    return kv;
}

void kvcache_free(struct kvcache *kv)
{
    if (!kv)
        return;
    prefix_free(kv->prefix);
    kv->be->ops->free(kv->be, kv->pool, kv->pool_bytes);
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

static void reserve(struct kv_seq *s, int pages)
{
    if (pages <= s->cap)
        return;
    s->cap = pages + pages / 2 + 8;
    s->pages = mem_realloc(s->pages, (size_t)s->cap, sizeof *s->pages);
}

static void hold(struct kvcache *kv, int32_t page)
{
    CHECK(kv->ref[page] < UINT16_MAX, "page %d has too many holders", page);
    if (kv->ref[page]++ == 0)
        prefix_hold(kv->prefix, page);
}

static void let_go(struct kvcache *kv, int32_t page)
{
    if (--kv->ref[page] == 0 && !(kv->prefix && prefix_idle(kv->prefix, page)))
        kv->free[kv->n_free++ - kv->n_fresh] = page;
}

/* Low pages first, and used ones before fresh ones: the touched part of the pool stays small. */
static int32_t take_page(struct kvcache *kv)
{
    if (!kv->n_free)
        return prefix_evict(kv->prefix);
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
    if (want - s->n_pages > kvcache_available(kv))
        return false;
    reserve(s, want);
    while (s->n_pages < want) {
        int32_t page = take_page(kv);
        kv->ref[page] = 1;
        s->pages[s->n_pages++] = page;
    }
    return true;
}

void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    CHECK(n_tokens <= s->n_tokens, "cut to %d of %d tokens", n_tokens, s->n_tokens);
    int keep = pages_for(kv, n_tokens);
    while (s->n_pages > keep) /* last page first: prefix.h, invariant 4 */
        let_go(kv, s->pages[--s->n_pages]);
    s->n_tokens = n_tokens;
    if (kv->prefix && n_tokens % kv->page_len) { /* the rest of the last page will be written */
        int32_t last = s->pages[keep - 1];
        CHECK(kv->ref[last] == 1 || !prefix_serial(kv->prefix, last), "cut in a shared page");
        prefix_forget(kv->prefix, last);
    }
}

void kvcache_attach(struct kvcache *kv, struct kv_seq *s, int32_t page, int n_tokens)
{
    CHECK(s->n_tokens == s->n_pages * kv->page_len, "attach behind %d tokens", s->n_tokens);
    reserve(s, s->n_pages + 1);
    hold(kv, page);
    s->pages[s->n_pages++] = page;
    s->n_tokens += n_tokens;
}

void kvcache_replace(struct kvcache *kv, struct kv_seq *s, int i, int32_t page)
{
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
}

static int descending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

size_t kvcache_trim(struct kvcache *kv)
{
    int n = kv->n_free - kv->n_fresh;
    size_t page = kv->page_bytes, planes = 2 * (size_t)kv->n_layers;
    size_t bytes = (size_t)(n - kv->n_cold) * page * planes;
    if (!kv->be->ops->forget || bytes < TRIM_BYTES)
        return 0;
    qsort(kv->free + kv->n_cold, (size_t)(n - kv->n_cold), sizeof *kv->free, descending);
    for (int at = kv->n_cold, end; at < n; at = end) { /* runs of neighbours */
        for (end = at + 1; end < n && kv->free[end] == kv->free[end - 1] - 1;)
            end++;
        for (size_t i = 0; i < planes; i++)
            kv->be->ops->forget(
                kv->be, (char *)kv->pool + kv->plane_bytes * i + page * (size_t)kv->free[end - 1],
                page * (size_t)(end - at));
    }
    kv->n_cold = n;
    return bytes;
}

void kvcache_release(struct kvcache *kv, struct kv_seq *s)
{
    kvcache_cut(kv, s, 0);
    mem_free(s->pages);
    *s = (struct kv_seq){0};
}
