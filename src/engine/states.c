/* Slots of recurrent states: see states.h. There are few slots, so every search is a linear scan. */
#include "engine/states.h"
#include "base/error.h"
#include "base/mem.h"

enum { FREE = -1, HELD = -2 }; /* values of state_slot.page */
enum { NONE = -1 };            /* of state_slot.up */

/* How much more likely the next prompt starts at the end of the last one than it diverges from it. */
static const double END_WEIGHT = 4;

struct state_slot {
    int32_t page; /* >= 0: saved for this page */
    int pins;
    int32_t up;      /* the slot of the checkpoint before it on its path; NONE */
    int at, reach;   /* tokens before it; up to the next checkpoint or the end of the path */
    int path;        /* tokens of the sequence that passed last */
    uint64_t passed; /* admission of that sequence */
    bool end;        /* a sequence ended, diverged or started here */
    int since;       /* sequences that have passed since then */
};

struct states {
    int n_slots, n_pages, n_free, n_kept;
    struct state_slot *slots; /* (n_slots) */
    int32_t *of;              /* (n_pages) slot + 1; 0 = none */
    uint64_t clock;           /* counts admissions, from 1 */
};

struct states *states_new(int n_slots, int n_pages)
{
    struct states *s = mem_zalloc(1, sizeof *s);
    *s = (struct states){.n_slots = n_slots, .n_pages = n_pages, .n_free = n_slots, .clock = 1};
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

int states_n_pinned(const struct states *s)
{
    int n = 0;
    for (int i = 0; i < s->n_slots; i++)
        n += s->slots[i].pins > 0;
    return n;
}

/* The tokens that a checkpoint is expected to save: those after the checkpoint before it, times the chance that a prompt
 * starts here. The next prompt on this path may diverge anywhere, so this chance is the part of the path up to the next
 * checkpoint. It is more likely to start where earlier ones ended, above all the last one. The chance that the next
 * prompt is on this path at all falls with the square of the admissions since the last one. The constants are those
 * that serve the loops of tests/test_agents.c best. */
static double worth(const struct states *s, const struct state_slot *a)
{
    double saved = a->at - (a->up == NONE ? 0 : s->slots[a->up].at);
    double age = (double)(s->clock - a->passed + 1), since = a->since + 1;
    double diverges = (double)(a->reach - a->at) / a->path;
    double continues = a->end ? END_WEIGHT / (since * since) : 0;
    return saved * (diverges + continues) / (age * age);
}

/* Takes low slots first, so that little of the pool is touched. */
int32_t states_take(struct states *s)
{
    int32_t best = -1;
    double least = 0;
    for (int32_t i = 0; i < s->n_slots; i++) {
        const struct state_slot *a = &s->slots[i];
        if (a->page == FREE) {
            best = i;
            break;
        }
        if (a->page < 0 || a->pins)
            continue;
        double w = worth(s, a);
        if (best < 0 || w < least) {
            best = i;
            least = w;
        }
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

void states_keep(struct states *s, int32_t slot, int32_t page, int at, bool end)
{
    CHECK(s->slots[slot].page == HELD && !s->of[page], "slot %d for page %d", slot, page);
    s->slots[slot] = (struct state_slot){.page = page,
                                         .up = NONE,
                                         .at = at,
                                         .reach = at,
                                         .path = at,
                                         .passed = s->clock,
                                         .end = end};
    s->of[page] = slot + 1;
    s->n_kept++;
}

void states_pass(struct states *s, int32_t slot, int32_t up, int n_tokens)
{
    struct state_slot *a = &s->slots[slot];
    a->up = up < 0 ? NONE : up;
    a->reach = a->path = n_tokens > a->at ? n_tokens : a->at;
    a->since += a->passed != s->clock;
    a->passed = s->clock;
    if (up >= 0)
        s->slots[up].reach = a->at;
}

void states_tick(struct states *s)
{
    s->clock++;
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
    struct state_slot *a = &s->slots[slot], *up = a->up == NONE ? NULL : &s->slots[a->up];
    CHECK(!a->pins, "slot %d is pinned", slot);
    if (up && up->reach == a->at)
        up->reach = a->reach;
    for (int i = 0; i < s->n_slots; i++)
        if (s->slots[i].page >= 0 && s->slots[i].up == slot)
            s->slots[i].up = a->up;
    a->page = HELD;
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
    s->slots[slot].end = true;
    s->slots[slot].since = 0;
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
        CHECK(a->page < 0 || a->up == NONE ||
                  (s->slots[a->up].page >= 0 && s->slots[a->up].at < a->at),
              "slot %d at %d comes after slot %d", i, a->at, a->up);
    }
    for (int i = 0; i < s->n_pages; i++)
        of += s->of[i] != 0;
    CHECK(n_free == s->n_free && kept == s->n_kept && of == kept, "%d free, %d kept, %d pages",
          n_free, kept, of);
}
