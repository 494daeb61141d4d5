/* The model in the box: demo/steel-demo.gguf, linked into the binary. */
#ifndef STEEL_FILE_BUILTIN_H
#define STEEL_FILE_BUILTIN_H

#include <stdbool.h>
#include <stddef.h>

#define BUILTIN_NAME "builtin"

/* Whether `path` means the built-in model: NULL, or its name where no file is called so. */
bool builtin_named(const char *path);
/* Its bytes; NULL if this build carries none. */
const void *builtin_bytes(size_t *n);

#endif
