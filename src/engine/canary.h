/*
 * The marks of the cache's pages (backend/canary.h), as the engine decides them. The kvcache owns it and calls it; the
 * stepper takes the marks that a step has to write.
 *
 *  1. A page that a sequence takes gets a mark nobody has had before.
 *  2. A page that is indexed gets the mark of its serial number (prefix.h). Serial numbers are never reused, so whoever
 *     finds the page later knows the mark from the name alone, and a page that has changed hands since does not have it.
 *  3. Marks are hashed with a random seed.
 */
#ifndef STEEL_ENGINE_CANARY_H
#define STEEL_ENGINE_CANARY_H

#include "backend/canary.h"
#include "base/error.h"

#include <stdbool.h>

struct backend;
struct canary;

struct canary *canary_new(struct backend *be, int n_pages, struct error *err);
void canary_free(struct canary *c);

/* The mark for a page whose owner changes. */
uint32_t canary_fresh(struct canary *c);
/* The mark of an indexed page. */
uint32_t canary_named(const struct canary *c, uint64_t serial);
/* The next step writes it. */
void canary_set(struct canary *c, int32_t page, uint32_t mark);
/* The marks set since the last call, for a step's batch. They stay valid until the next canary_set. */
void canary_take(struct canary *c, struct batch_canary *to);

#endif
