/* The built-in models, linked into the binary: demo/steel-demo.gguf, and the one in demo/see that sees, with its tower. */
#ifndef STEEL_FILE_BUILTIN_H
#define STEEL_FILE_BUILTIN_H

#include <stdbool.h>
#include <stddef.h>

#define BUILTIN_NAME  "builtin"
#define BUILTIN_SEE   "builtin-see"
#define BUILTIN_TOWER "builtin-see-mmproj"

/* The name of the built-in model that `path` means: "builtin" for NULL, a name if no such file exists. NULL: none. */
const char *builtin_name(const char *path);
static inline bool builtin_named(const char *path)
{
    return builtin_name(path) != NULL;
}
/* A model's bytes, by its name; NULL if this build has none. */
const void *builtin_bytes(const char *name, size_t *n);
/* The name of the image tower of the model that `path` means; NULL = it has none. */
const char *builtin_tower(const char *path);

#endif
