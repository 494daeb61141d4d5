/*
 * A whole answer under constraint: thinking is free and comes first, then the text fits what was asked
 * for, or tools are called in the form of the model's family. Next to the parser (chat_parse.h), which
 * reads what is written here: whatever such a constraint lets through, the parser takes for calls.
 *
 * A constraint is put into words (JSON), which is the source of a grammar of kind GRAMMAR_ANSWER: so it
 * is compiled, cached and bounded like the others. Each form of calls is one function of a table.
 * Knows nothing of tokens: a tag is a special token where the vocabulary has one of that spelling.
 */
#ifndef STEEL_TEXT_CHAT_GRAMMAR_H
#define STEEL_TEXT_CHAT_GRAMMAR_H

#include "text/chat/chat_parse.h"
#include "text/grammar/grammar.h"

enum chat_thinking {
    CHAT_THINKS_NOT,
    CHAT_THINKS_MAYBE, /* the model may open it itself */
    CHAT_THINKS_FIRST, /* the prompt has opened it */
};

struct chat_constraint {
    enum chat_format format;
    enum chat_thinking thinking;
    const json_t *tools; /* array of {"type": "function", "function": {...}}, or NULL */
    const char *only;    /* the one tool that may be called; NULL = any */
    bool required;       /* there is a call */
    bool one_call;       /* ... and one only */
    /* What the text must fit; NULL = anything. Beside tools: a call or such a text. */
    const struct grammar_source *response;
};

enum { CHAT_TOOLS_MAX = 512 };

/*
 * The source's text (mem_free). Arguments follow the tool's schema where it is `strict`, or a call is
 * required; a schema that cannot be enforced is refused where it is strict, and loosened to the names,
 * their simple types and which are required where it is not. Otherwise they are a JSON object.
 */
char *chat_constraint_text(const struct chat_constraint *c);
/* Does the format know calls? */
bool chat_format_calls(enum chat_format f);
/* How an answer to this prompt begins. */
enum chat_thinking chat_thinking_of(const char *prompt, size_t len);

#endif
