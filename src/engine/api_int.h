/* Shared by the files behind include/steel.h. */
#ifndef STEEL_ENGINE_API_INT_H
#define STEEL_ENGINE_API_INT_H

#include "engine/engine.h"

#include <steel.h>

struct steel_engine {
    struct engine *e;
};

/* Fills the caller's error, where there is one; returns false. */
bool lib_fail(struct steel_error *out, enum steel_error_kind kind, const char *msg);
/* The model's tokenizer, or NULL with an error. */
const struct tokenizer *lib_tokenizer(const struct steel_engine *engine, struct steel_error *error);
/* Copies as much as fits into cap bytes, a 0 behind it; returns the length of all, -1 if no int holds
 * it. */
int lib_put(const char *text, size_t len, char *out, int cap);

#endif
