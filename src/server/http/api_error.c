/* See api_error.h. */
#include "server/http/api_error.h"
#include "server/http/jsonout.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void set_error(struct api_error *err, int status, const char *type, const char *param,
                      const char *fmt, va_list ap)
{
    *err = (struct api_error){.status = status, .type = type};
    if (param)
        snprintf(err->param, sizeof err->param, "%s", param);
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
}

bool api_invalid(struct api_error *err, const char *param, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    set_error(err, 400, "invalid_request_error", param, fmt, ap);
    va_end(ap);
    return false;
}

bool api_fail(struct api_error *err, int status, const char *type, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    set_error(err, status, type, NULL, fmt, ap);
    va_end(ap);
    return false;
}

void api_error_json(struct buf *b, const struct api_error *err, enum dialect dialect)
{
    if (dialect == DIALECT_OLLAMA) {
        buf_adds(b, "{\"error\":");
        jsonout_text(b, err->msg);
        buf_addc(b, '}');
        return;
    }
    if (dialect == DIALECT_ANTHROPIC) {
        const char *type = err->status == 429   ? "rate_limit_error"
                           : err->status == 401 ? "authentication_error"
                           : err->status == 404 ? "not_found_error"
                           : err->status == 413 ? "request_too_large"
                           : err->status == 503 ? "overloaded_error"
                           : err->status >= 500 ? "api_error"
                                                : "invalid_request_error";
        char text[sizeof err->msg];
        snprintf(text, sizeof text, "%s", err->msg);
        if (err->n_ctx) /* agents match this text to compact the conversation */
            snprintf(text, sizeof text,
                     "prompt is too long: %d tokens > %d maximum (the model's context)",
                     err->n_prompt, err->n_ctx);
        buf_addf(b, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", type);
        jsonout_text(b, text);
        buf_adds(b, "}}");
        return;
    }
    buf_adds(b, "{\"error\":{\"message\":");
    jsonout_text(b, err->msg);
    buf_addf(b, ",\"type\":\"%s\",\"param\":", err->type);
    jsonout_text(b, err->param[0] ? err->param : NULL);
    buf_adds(b, ",\"code\":");
    jsonout_text(b, err->code);
    if (err->n_ctx)
        buf_addf(b, ",\"n_prompt_tokens\":%d,\"n_ctx\":%d", err->n_prompt, err->n_ctx);
    buf_adds(b, "}}");
}
