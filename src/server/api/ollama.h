/* Translation of Ollama's request bodies. */
#ifndef STEEL_SERVER_OLLAMA_H
#define STEEL_SERVER_OLLAMA_H

#include "server/api/endpoints.h"
#include "server/api/params.h"

/* Translates a body of /api/chat or /api/generate to one of /v1/chat/completions. Returns a new
 * reference, or NULL with an error. *raw: the result is a body of /v1/completions instead. */
json_t *ollama_translate(const json_t *body, bool generate, bool *raw, struct api_error *err);
/* Adds the members of body's `options` to out, by the names of /v1/chat/completions. */
bool ollama_add_options(const json_t *body, json_t *out, struct api_error *err);
/* Whether the request has no prompt: it loads its model, or unloads it. */
bool ollama_only_loads(const struct endpoint *e, const json_t *body);

#endif
