/*
 * How often experts were used, kept from one start to the next (backend.h: tier_ops.uses): a file of the model below
 * $XDG_CACHE_HOME/steel/experts, or in ~/.cache. Nothing depends on it but which experts are on the device at first, so a file that
 * cannot be read or written is no error.
 */
#ifndef STEEL_ENGINE_USES_H
#define STEEL_ENGINE_USES_H

#include <stdbool.h>
#include <stddef.h>

struct backend;

/* The file of the model at `path` with n numbers, in the folder `root`; NULL: the default folder. False: there is none. */
bool uses_place(const char *root, const char *path, size_t n, char *out, size_t size);
/* values (n). False: the file is missing, of another model, or damaged. */
bool uses_read(const char *file, float *values, size_t n);
bool uses_write(const char *file, const float *values, size_t n);

/* Both for a model's backend; they do nothing where experts are not placed by use. */
void uses_load(struct backend *be, const char *path);
void uses_save(struct backend *be, const char *path);

#endif
