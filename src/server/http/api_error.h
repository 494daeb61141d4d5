/* Errors as clients see them: OpenAI's shape, and those of Anthropic's and Ollama's APIs. */
#ifndef STEEL_SERVER_API_ERROR_H
#define STEEL_SERVER_API_ERROR_H

#include "base/buf.h"
#include "server/http/http_parse.h"

/* Whose manners errors have. */
enum dialect { DIALECT_OPENAI, DIALECT_ANTHROPIC, DIALECT_OLLAMA };

/* An error as OpenAI's API shows it. */
struct api_error {
    int status; /* 0 = none */
    const char *type, *code;
    char param[64]; /* "" = null */
    char msg[512];
    int n_prompt, n_ctx; /* of a prompt that is too long; 0 = not that */
};
/* Sets status 400, invalid_request_error; returns false. param may be NULL. */
bool api_invalid(struct api_error *err, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool api_fail(struct api_error *err, int status, const char *type, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

void api_error_json(struct buf *b, const struct api_error *err, enum dialect dialect);

#endif
