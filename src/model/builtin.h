/* The model in the box: demo/steel-demo.gguf, linked into the binary. */
#ifndef STEEL_MODEL_BUILTIN_H
#define STEEL_MODEL_BUILTIN_H

#include "file/tensorfile.h"

#define BUILTIN_NAME "builtin"

/* Opens `path`, or the built-in model for NULL and for "builtin" (unless a file is called so). */
struct tensorfile *builtin_or_open(const char *path, struct error *err);

#endif
