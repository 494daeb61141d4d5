/*
 * Jinja2, the language of chat templates, in the configuration of transformers: an immutable
 * sandbox with trim_blocks and lstrip_blocks, loop controls, `do`, `{% generation %}`, and the
 * globals raise_exception and strftime_now. A template is compiled once and then immutable. Any
 * number of threads may render it at the same time; each render has its own state.
 *
 * Templates are not trusted: nesting, steps, memory and output are limited, and exceeding a limit
 * is an ordinary error. The limits grow with the context, so that long conversations are not
 * rejected, up to fixed maxima (jinja_int.h). Knows nothing of models, tokens or messages.
 */
#ifndef STEEL_TEXT_JINJA_H
#define STEEL_TEXT_JINJA_H

#include "base/buf.h"
#include "base/error.h"
#include "base/budget.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct jinja; /* a compiled template */

struct jinja_options {
    const struct tm *now; /* time for strftime_now; NULL = local time of the call */
    /* Limits; 0 = default. Allowances for the context are added. */
    int64_t max_steps;
    size_t max_memory, max_output; /* bytes */
    struct budget *budget;         /* charged one unit per step; NULL = none */
    bool literal;      /* the context is data: its texts get literal bytes (literal.h) */
    const json_t *own; /* further variables, which are the template's own; NULL = none */
};

/* Compiles src[0..len). On failure returns NULL with a message that begins with "line N: ". */
struct jinja *jinja_compile(const char *src, size_t len, struct error *err);
void jinja_free(struct jinja *t);

/*
 * Appends the rendered text to out. The members of the object `context` are the template's global
 * variables (NULL = none); it is not modified. On failure out is unchanged and the message begins
 * with "line N: ". opt may be NULL.
 */
bool jinja_render(const struct jinja *t, const json_t *context, const struct jinja_options *opt,
                  struct buf *out, struct error *err);

/* Whether the template uses a name anywhere. */
bool jinja_uses(const struct jinja *t, const char *name);

#endif
