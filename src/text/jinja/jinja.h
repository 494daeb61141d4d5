/*
 * Jinja2, the language chat templates are written in, as transformers runs it: an immutable sandbox
 * with trim_blocks and lstrip_blocks on, loop controls, `do`, `{% generation %}`, and the globals
 * raise_exception and strftime_now. A template is compiled once; a compiled template is read-only,
 * so any number of threads may render it at the same time, each render owning its own state.
 *
 * A template is not trusted: nesting, steps, memory and output are bounded, and crossing a bound is
 * an ordinary error. The bounds grow with the context, so that a long conversation is never refused
 * for its length, up to ends that nothing crosses (jinja_int.h). Knows nothing of models, tokens or what a message is.
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
    const struct tm *now; /* what strftime_now formats; NULL = the local time at the call */
    /* Bounds; 0 takes the default. What the context holds is added on top. */
    int64_t max_steps;
    size_t max_memory, max_output; /* bytes */
    struct budget *budget;         /* charged a unit a step; NULL = none */
};

/* Compiles src[0..len). On failure NULL, and the message begins with "line N: ". */
struct jinja *jinja_compile(const char *src, size_t len, struct error *err);
void jinja_free(struct jinja *t);

/*
 * Appends the rendered text to out. context is an object whose members are the template's global
 * variables (NULL = none); it is only read. On failure out is as it was before the call and the
 * message begins with "line N: ". opt may be NULL.
 */
bool jinja_render(const struct jinja *t, const json_t *context, const struct jinja_options *opt,
                  struct buf *out, struct error *err);

/* Whether the template reads a global variable of that name anywhere. */
bool jinja_uses(const struct jinja *t, const char *name);

#endif
