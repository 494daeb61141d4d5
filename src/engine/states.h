/*
 * Slots for the states of recurrent mixers: who has which. A running sequence has one, which its steps
 * read and write. A state cannot be cut back as keys and values can, so copies are kept of what it was
 * at the end of a page (checkpoints): a sequence that begins like another goes on from there. Knows
 * numbers of slots and pages; the memory behind them is the kvcache's, and steps move the values.
 *
 * Invariants:
 *  1. a slot is free, held by one sequence, or kept for one page; a page has at most one
 *  2. only a held slot is written
 *  3. a kept slot that is pinned is not taken away: a step is about to read it
 *  4. when a slot is wanted and none is free, the kept one that was used longest ago is taken
 */
#ifndef STEEL_ENGINE_STATES_H
#define STEEL_ENGINE_STATES_H

#include <stdbool.h>
#include <stdint.h>

struct states;

struct states *states_new(int n_slots, int n_pages);
void states_free(struct states *s);

/* Slots that states_take could give. */
int states_available(const struct states *s);
int states_n_kept(const struct states *s);
int states_n_free(const struct states *s);
int states_n_pinned(const struct states *s);
/* A slot to be held; -1 if there is none. */
int32_t states_take(struct states *s);
/* A held slot is free again. */
void states_give(struct states *s, int32_t slot);

/* A held slot becomes the checkpoint of a page that has none. */
void states_keep(struct states *s, int32_t slot, int32_t page);
int32_t states_of(const struct states *s, int32_t page); /* its checkpoint, or -1 */
/* The page's checkpoint, if it has one: free again, or held by the caller (or -1). */
void states_drop(struct states *s, int32_t page);
int32_t states_take_from(struct states *s, int32_t page);
/* While pinned (counted) a kept slot stays where it is. Pinning counts as use. */
void states_pin(struct states *s, int32_t slot);
void states_unpin(struct states *s, int32_t slot);

void states_verify(const struct states *s); /* CHECKs the invariants; for tests */

#endif
