/* The page allocator behind the KV cache. See the invariants in kvcache.h. */
#include "engine/kvcache.h"
#include "base/mem.h"

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
    for (int i = 0; i < n_pages; i++)
        kv->free[i] =
            n_pages - 1 - i; /* low pages first: the touched part of the pool stays small */
    kv->n_free = n_pages;
    return kv;
}

void kvcache_free(struct kvcache *kv)
{
    if (!kv)
        return;
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

bool kvcache_grow(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    int want = pages_for(kv, n_tokens);
    if (want - s->n_pages > kv->n_free)
        return false;
    if (want > s->cap) {
        s->cap = want + want / 2 + 8;
        s->pages = mem_realloc(s->pages, (size_t)s->cap, sizeof *s->pages);
    }
    while (s->n_pages < want) {
        int32_t page = kv->free[--kv->n_free];
        kv->ref[page] = 1;
        s->pages[s->n_pages++] = page;
    }
    return true;
}

void kvcache_cut(struct kvcache *kv, struct kv_seq *s, int n_tokens)
{
    CHECK(n_tokens <= s->n_tokens, "cut to %d of %d tokens", n_tokens, s->n_tokens);
    int keep = pages_for(kv, n_tokens);
    while (s->n_pages > keep) {
        int32_t page = s->pages[--s->n_pages];
        if (--kv->ref[page] == 0)
            kv->free[kv->n_free++] = page;
    }
    s->n_tokens = n_tokens;
}

void kvcache_release(struct kvcache *kv, struct kv_seq *s)
{
    kvcache_cut(kv, s, 0);
    mem_free(s->pages);
    *s = (struct kv_seq){0};
}
