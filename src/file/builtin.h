/* The built-in model: demo/steel-demo.gguf, linked into the binary. */
#ifndef STEEL_FILE_BUILTIN_H
#define STEEL_FILE_BUILTIN_H

#include <stdbool.h>
#include <stddef.h>

#define BUILTIN_NAME "builtin"

/* Whether `path` means the built-in model: NULL, or "builtin" if no such file exists. */
bool builtin_named(const char *path);
/* The model's bytes; NULL if this build has none. */
const void *builtin_bytes(size_t *n);

#endif
