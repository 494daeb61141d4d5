/*
 * Saves the cached pages of a prompt to a file and restores them (prefix_file.h). Files are read and written on
 * the caller's thread. Pages are copied on the engine's thread between steps, a bounded piece at a time, and
 * nothing is held between the pieces: what leaves the cache meanwhile ends a save with an error.
 *
 * Restored pages are idle pages of the prefix index like any others: the next prompt that begins with them finds
 * them, and they are evicted when room is needed.
 */
#ifndef STEEL_ENGINE_PREFIX_DISK_H
#define STEEL_ENGINE_PREFIX_DISK_H

#include "engine/engine.h"

enum { PREFIX_DISK_PIECE = 8 << 20 }; /* bytes copied between two steps; one page at least */

struct prefix_disk {
    const char *dir, *name;
    const char *salt; /* of the requests that share the pages; NULL = none */
};

/* NULL, or why this engine's pages cannot be saved. */
const char *prefix_disk_refuses(const struct engine *e);

/* The shape of this engine's pages, without an owner: everything that determines a page's content. */
struct prefix_shape;
void prefix_disk_shape(const struct engine *e, struct prefix_shape *out);
/* Saves the longest cached prefix of these tokens. *n_saved: its tokens. Not in a job (mem.h). */
bool prefix_disk_save(struct engine *e, const struct prefix_disk *d, const int32_t *tokens, int n,
                      int *n_saved, uint64_t *bytes, struct error *err);
/* Restores a file. *tokens (n): its tokens, for the caller to free. */
bool prefix_disk_restore(struct engine *e, const struct prefix_disk *d, int32_t **tokens, int *n,
                         uint64_t *bytes, struct error *err);

#endif
