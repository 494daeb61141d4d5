/* Shared by the files behind include/steel.h. */
#ifndef STEEL_ENGINE_API_INT_H
#define STEEL_ENGINE_API_INT_H

#include "engine/engine.h"
#include "text/grammar/grammar.h"

#include <steel.h>

struct steel_engine {
    struct engine *e;
    struct grammar_cache *grammars;
};

/* What the options say the answer must fit: 1 and *src, 0 where it is nothing, -1 with an error. */
int lib_constraint(const struct steel_request_options *o, struct grammar_source *src,
                   struct steel_error *error);
/* steel_request_submit with a constraint that is ready (a reference it takes over; may be NULL). */
struct steel_request *lib_submit(struct steel_engine *engine, const struct steel_request_options *o,
                                 struct grammar *fit, struct steel_error *error);
/* Fills the caller's error, where there is one; returns false. */
bool lib_fail(struct steel_error *out, enum steel_error_kind kind, const char *msg);
/* The model's tokenizer, or NULL with an error. */
const struct tokenizer *lib_tokenizer(const struct steel_engine *engine, struct steel_error *error);
/* Copies as much as fits into cap bytes, a 0 behind it; returns the length of all, -1 if no int holds
 * it. */
int lib_put(const char *text, size_t len, char *out, int cap);

#endif
