/* Shared by the files that implement include/steel.h. */
#ifndef STEEL_ENGINE_API_INT_H
#define STEEL_ENGINE_API_INT_H

#include "engine/engine.h"
#include "text/grammar/grammar.h"

#include <steel.h>

struct prompt_images; /* engine/images.h */

struct steel_engine {
    struct engine *e;
    struct grammar_cache *grammars;
};

/* The constraint of the options. 1: *src is set, 0: there is none, -1: an error. */
int lib_constraint(const struct steel_request_options *o, struct grammar_source *src,
                   struct steel_error *error);
/* steel_request_submit with a compiled constraint, or NULL, whose reference it takes, and the prompt's images, or NULL. */
struct steel_request *lib_submit(struct steel_engine *engine, const struct steel_request_options *o,
                                 struct grammar *fit, struct token_rules *rules,
                                 const struct prompt_images *images, struct steel_error *error);
/* Fills the caller's error, unless it is NULL. Returns false. */
bool lib_fail(struct steel_error *out, enum steel_error_kind kind, const char *msg);
/* The model's tokenizer, or NULL with an error. */
const struct tokenizer *lib_tokenizer(const struct steel_engine *engine, struct steel_error *error);
/* Copies text to out, cut to cap bytes including a final 0. Returns the full length; -1 if it exceeds an int. */
int lib_put(const char *text, size_t len, char *out, int cap);

#endif
