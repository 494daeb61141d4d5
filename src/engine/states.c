/* Slots of recurrent states: see states.h. There are few slots, so every search is a linear scan. */
#include "engine/states.h"
#include "base/error.h"
#include "base/mem.h"

enum { FREE = -1, HELD = -2 }; /* values of state_slot.page */

struct state_slot {
    int32_t page; /* >= 0: saved for this page */
    int pins;
    uint64_t used; /* time of the last save or pin */
};

struct states {
    int n_slots, n_pages, n_free, n_kept;
    struct state_slot *slots; /* (n_slots) */
    int32_t *of;              /* (n_pages) slot + 1; 0 = none */
    uint64_t clock;
};

struct states *states_new(int n_slots, int n_pages)
{
    struct states *s = mem_zalloc(1, sizeof *s);
    *s = (struct states){.n_slots = n_slots, .n_pages = n_pages, .n_free = n_slots};
    s->slots = mem_zalloc((size_t)n_slots, sizeof *s->slots);
    s->of = mem_zalloc((size_t)n_pages, sizeof *s->of);
    for (int i = 0; i < n_slots; i++)
        s->slots[i].page = FREE;
    return s;
}

void states_free(struct states *s)
{
    if (!s)
        return;
    mem_free(s->slots);
    mem_free(s->of);
    mem_free(s);
}

int states_available(const struct states *s)
{
    int n = s->n_free;
    for (int i = 0; i < s->n_slots; i++)
        n += s->slots[i].page >= 0 && !s->slots[i].pins;
    return n;
}

int states_n_kept(const struct states *s)
{
    return s->n_kept;
}

int states_n_free(const struct states *s)
{
    return s->n_free;
}

int states_n_pinned(const struct states *s)
{
    int n = 0;
    for (int i = 0; i < s->n_slots; i++)
        n += s->slots[i].pins > 0;
    return n;
}

/* Takes low slots first, so that little of the pool is touched. */
int32_t states_take(struct states *s)
{
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_slots; i++) {
        const struct state_slot *a = &s->slots[i];
        if (a->page == FREE) {
            best = i;
            break;
        }
        if (a->page >= 0 && !a->pins && (best < 0 || a->used < s->slots[best].used))
            best = i;
    }
    if (best < 0)
        return -1;
    if (s->slots[best].page >= 0)
        states_drop(s, s->slots[best].page);
    s->slots[best].page = HELD;
    s->n_free--;
    return best;
}

void states_give(struct states *s, int32_t slot)
{
    CHECK(s->slots[slot].page == HELD, "slot %d is not held", slot);
    s->slots[slot].page = FREE;
    s->n_free++;
}

void states_keep(struct states *s, int32_t slot, int32_t page)
{
    CHECK(s->slots[slot].page == HELD && !s->of[page], "slot %d for page %d", slot, page);
    s->slots[slot] = (struct state_slot){.page = page, .used = ++s->clock};
    s->of[page] = slot + 1;
    s->n_kept++;
}

int32_t states_of(const struct states *s, int32_t page)
{
    return s->of[page] - 1;
}

int32_t states_take_from(struct states *s, int32_t page)
{
    int32_t slot = s->of[page] - 1;
    if (slot < 0)
        return -1;
    CHECK(!s->slots[slot].pins, "slot %d is pinned", slot);
    s->slots[slot].page = HELD;
    s->of[page] = 0;
    s->n_kept--;
    return slot;
}

void states_drop(struct states *s, int32_t page)
{
    int32_t slot = states_take_from(s, page);
    if (slot >= 0)
        states_give(s, slot);
}

void states_pin(struct states *s, int32_t slot)
{
    CHECK(s->slots[slot].page >= 0, "slot %d is not kept", slot);
    s->slots[slot].pins++;
    s->slots[slot].used = ++s->clock;
}

void states_unpin(struct states *s, int32_t slot)
{
    CHECK(s->slots[slot].pins > 0, "slot %d is not pinned", slot);
    s->slots[slot].pins--;
}

void states_verify(const struct states *s)
{
    int n_free = 0, kept = 0, of = 0;
    for (int i = 0; i < s->n_slots; i++) {
        const struct state_slot *a = &s->slots[i];
        n_free += a->page == FREE;
        kept += a->page >= 0;
        CHECK(a->page < 0 || s->of[a->page] == i + 1, "slot %d: page %d", i, a->page);
        CHECK(a->page >= 0 || !a->pins, "slot %d is pinned and not kept", i);
    }
    for (int i = 0; i < s->n_pages; i++)
        of += s->of[i] != 0;
    CHECK(n_free == s->n_free && kept == s->n_kept && of == kept, "%d free, %d kept, %d pages",
          n_free, kept, of);
}
