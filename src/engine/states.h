/*
 * Slots for the states of recurrent mixers, and who owns which. A running sequence has one, which its steps
 * read and write. A state cannot be cut back as keys and values can. So copies of it are kept at the ends
 * of pages (checkpoints), from which a sequence with the same prefix continues. Knows slot and page
 * numbers only: the memory is the kvcache's, and steps move the values.
 *
 * Invariants:
 *  1. A slot is free, held by one sequence, or kept as the checkpoint of one page. A page has at most one.
 *  2. Only a held slot is written.
 *  3. A pinned checkpoint is not evicted: a step is about to read it.
 *  4. If a slot is wanted and none is free, the checkpoint is evicted that is expected to save the fewest
 *     tokens (worth() in states.c).
 *  5. A checkpoint's `up` is a checkpoint with fewer tokens on the same path, or none.
 */
#ifndef STEEL_ENGINE_STATES_H
#define STEEL_ENGINE_STATES_H

#include <stdbool.h>
#include <stdint.h>

struct states;

struct states *states_new(int n_slots, int n_pages);
void states_free(struct states *s);

/* Slots that states_take can return. */
int states_available(const struct states *s);
int states_n_kept(const struct states *s);
int states_n_pinned(const struct states *s);
/* Returns a slot, now held; -1 if there is none. */
int32_t states_take(struct states *s);
/* Frees a held slot. */
void states_give(struct states *s, int32_t slot);

/* A held slot becomes the checkpoint of a page that has none, after `at` tokens (> 0). end: other prompts are likely to
 * start there, because a prompt or a message ends there, or prompts diverge. */
void states_keep(struct states *s, int32_t slot, int32_t page, int at, bool end);
/* A sequence of n_tokens has this checkpoint on its path, next after checkpoint `up` (slot; -1 = none). To be called in
 * the order of the path. */
void states_pass(struct states *s, int32_t slot, int32_t up, int n_tokens);
void states_tick(struct states *s); /* a sequence was admitted: all checkpoints age */
int32_t states_of(const struct states *s, int32_t page); /* its checkpoint, or -1 */
/* The page's checkpoint, if it has one, is freed (drop), or held by the caller and returned, else -1 (take_from). */
void states_drop(struct states *s, int32_t page);
int32_t states_take_from(struct states *s, int32_t page);
/* A pinned checkpoint is not evicted. Pins are counted. Who pins it starts there. */
void states_pin(struct states *s, int32_t slot);
void states_unpin(struct states *s, int32_t slot);

void states_verify(const struct states *s); /* CHECKs the invariants; for tests */

#endif
