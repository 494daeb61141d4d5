/* Ollama's API: its bodies in OpenAI's shape, and what it tells of the model. */
#ifndef STEEL_SERVER_OLLAMA_H
#define STEEL_SERVER_OLLAMA_H

#include "server/api/params.h"

/* A body of /api/chat or /api/generate as one of /v1/chat/completions; NULL with an error. A new
 * reference. raw: the prompt is taken as it is, and the body is one of /v1/completions. */
json_t *ollama_translate(const json_t *body, bool generate, bool *raw, struct api_error *err);

#endif
