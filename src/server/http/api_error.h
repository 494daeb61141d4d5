/* Error replies in the formats of the OpenAI, Anthropic and Ollama APIs. */
#ifndef STEEL_SERVER_API_ERROR_H
#define STEEL_SERVER_API_ERROR_H

#include "base/buf.h"
#include "server/http/http_parse.h"

/* The API whose error format is used. */
enum dialect { DIALECT_OPENAI, DIALECT_ANTHROPIC, DIALECT_OLLAMA };

/* The fields of an OpenAI error. */
struct api_error {
    int status; /* 0 = none */
    const char *type, *code;
    char param[64]; /* "" = null */
    char msg[512];
    int n_prompt, n_ctx; /* set if the prompt is too long; else 0 */
};
/* Sets status 400, invalid_request_error; returns false. param may be NULL. */
bool api_invalid(struct api_error *err, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool api_fail(struct api_error *err, int status, const char *type, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

void api_error_json(struct buf *b, const struct api_error *err, enum dialect dialect);

#endif
