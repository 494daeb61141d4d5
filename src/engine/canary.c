/* Marks of pages: see canary.h. */
#include "engine/canary.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "base/os.h"

struct canary {
    struct backend *be;
    uint32_t *marks; /* (n_pages) backend memory */
    int n_pages;
    struct page_mark *set; /* (n_pages) the marks to be written, each page once */
    int32_t *at;           /* (n_pages) 1 + its index in set; 0 = not there */
    int n_set;
    bool taken; /* a step has set */
    uint64_t seed, n_fresh;
};

struct canary *canary_new(struct backend *be, int n_pages, struct error *err)
{
    uint64_t seed;
    if (!os_random(&seed, sizeof seed)) {
        error_set(err, "the kernel has no random bytes");
        return NULL;
    }
    size_t n = (size_t)n_pages;
    uint32_t *marks = be->ops->alloc(be, n * sizeof *marks, "the marks of pages", err);
    if (!marks)
        return NULL;
    struct canary *c = mem_zalloc(1, sizeof *c);
    *c = (struct canary){.be = be,
                         .marks = marks,
                         .n_pages = n_pages,
                         .set = mem_zalloc(n, sizeof *c->set),
                         .at = mem_zalloc(n, sizeof *c->at),
                         .seed = seed};
    return c;
}

void canary_free(struct canary *c)
{
    if (!c)
        return;
    c->be->ops->free(c->be, c->marks, (size_t)c->n_pages * sizeof *c->marks);
    mem_free(c->set);
    mem_free(c->at);
    mem_free(c);
}

/* SplitMix64 of the seed and x. */
static uint32_t mark_of(const struct canary *c, uint64_t x)
{
    uint64_t z = c->seed + x * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z ^ z >> 31);
}

uint32_t canary_fresh(struct canary *c)
{
    return mark_of(c, ++c->n_fresh << 1);
}

uint32_t canary_named(const struct canary *c, uint64_t serial)
{
    return mark_of(c, serial << 1 | 1);
}

/* Forgets the marks that a step has taken. */
static void drop_taken(struct canary *c)
{
    for (int i = 0; c->taken && i < c->n_set; i++)
        c->at[c->set[i].page] = 0;
    c->n_set = c->taken ? 0 : c->n_set;
    c->taken = false;
}

void canary_set(struct canary *c, int32_t page, uint32_t mark)
{
    drop_taken(c);
    if (!c->at[page])
        c->at[page] = ++c->n_set;
    c->set[c->at[page] - 1] = (struct page_mark){page, mark};
}

void canary_take(struct canary *c, struct batch_canary *to)
{
    drop_taken(c);
    to->marks = c->marks;
    to->set = c->set;
    to->n_set = c->n_set;
    c->taken = true;
}
