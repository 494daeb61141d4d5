/*
 * The folder of kept prefixes: DIR/key, and for each model and cache a folder of segments, DIR/HASH/NAME.k (pages) and
 * NAME.s (states), with a file `model` that names the model. Knows names, sizes and ages. keeper.h fills it.
 */
#ifndef STEEL_ENGINE_KEEP_FOLDER_H
#define STEEL_ENGINE_KEEP_FOLDER_H

#include "base/buf.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A tenth of the free disk; 0 = unknown. */
uint64_t keep_folder_default(const char *dir);
/* "$XDG_CACHE_HOME/steel/prefixes", or in ~/.cache. False: neither is there. */
bool keep_folder_place(struct buf *out);

/* Makes the folder (0700) if it is missing, and reads its key or makes one. */
bool keep_folder_open(const char *dir, uint64_t key[4], struct error *err);
/* The folder of a model, made if it is missing. `name`: the model's, for lists. */
bool keep_folder_model(const char *dir, const char *hash, const char *name, struct error *err);
/* Removes the least recently used segments until the folder has at most `most` bytes. Returns the bytes left. */
uint64_t keep_folder_trim(const char *dir, uint64_t most);

/* Lists the models; clear: removes their segments, or those of the model `only`. */
struct keep_model {
    const char *hash, *name;
    int n_files;
    uint64_t bytes;
    int64_t used; /* Unix time */
};
bool keep_folder_each(const char *dir, void (*fn)(void *arg, const struct keep_model *m), void *arg,
                      struct error *err);
bool keep_folder_clear(const char *dir, const char *only, uint64_t *bytes, struct error *err);

#endif
