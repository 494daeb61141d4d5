/*
 * A constraint on a whole reply: optional free reasoning, then text that satisfies a response
 * constraint, or tool calls in the model family's format. Its counterpart is the parser
 * (chat_parse.h): every call this constraint allows is recognised by the parser.
 *
 * A constraint is written as JSON text, which is the source of a grammar of kind GRAMMAR_REPLY, so
 * it is compiled, cached and limited like the other kinds. Each call format is one function in a
 * table. Knows nothing of tokens: a tag is a special token if the vocabulary has one with that
 * spelling.
 */
#ifndef STEEL_TEXT_CHAT_GRAMMAR_H
#define STEEL_TEXT_CHAT_GRAMMAR_H

#include "text/chat/chat_marks.h"
#include "text/grammar/grammar.h"

struct chat_constraint {
    enum chat_format format;
    enum chat_thoughts thoughts; /* of the template */
    enum chat_thinking thinking;
    const json_t *tools; /* array of {"type": "function", "function": {...}}, or NULL */
    const char *only;    /* name of the only tool allowed; NULL = any */
    bool required;       /* at least one call */
    bool one_call;       /* at most one call */
    /* Constraint on the text; NULL = none. With tools: a call or such a text. */
    const struct grammar_source *response;
};

enum { CHAT_TOOLS_MAX = 512 };

/*
 * The source text of the constraint (mem_free). Arguments follow the tool's schema. A schema that
 * cannot be enforced is an error if it is `strict`. Else it is relaxed to property names, simple
 * types and the required list. Where no call is required and the schemas are too large together,
 * the arguments of the last tools that are not strict are any JSON object.
 */
char *chat_constraint_text(const struct chat_constraint *c);
/* Whether the format has tool calls. */
bool chat_format_calls(enum chat_format f);

#endif
