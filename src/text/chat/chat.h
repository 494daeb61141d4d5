/*
 * OpenAI-shaped messages to a prompt, through the model's own chat template. The template's
 * capabilities are probed once, at load, by rendering small canned conversations. Each request is
 * then converted to a shape the template accepts: system messages are folded, roles merged,
 * arguments parsed, calls split or written as text. So no valid conversation fails because of a
 * template's restrictions.
 *
 * Immutable once created: any number of threads may render at the same time. Knows nothing of
 * tokens or HTTP. chat_parse.h does the reverse, from the model's text to a message.
 */
#ifndef STEEL_TEXT_CHAT_H
#define STEEL_TEXT_CHAT_H

#include "text/chat/chat_marks.h"
#include "text/chat/chat_source.h"
#include "text/jinja/jinja.h"

struct chat_caps {
    bool string_content;       /* renders content given as a string */
    bool typed_content;        /* renders content given as [{"type": "text", "text"}] */
    bool system;               /* renders a leading system message */
    bool system_later;         /* renders a system message in the middle */
    bool same_role;            /* accepts two user messages in a row */
    bool assistant_first;      /* accepts a conversation that starts with the assistant */
    bool tools;                /* renders tool definitions */
    bool calls;                /* renders assistant tool_calls and tool results */
    bool two_calls;            /* renders two calls in one message */
    bool reasoning_or_content; /* with a call, renders reasoning or content, not both */
    bool null_content;         /* accepts content null with tool_calls */
    bool string_args;          /* arguments must be JSON text, else objects */
    bool short_ids;            /* call ids must have nine letters or digits */
    bool developer;            /* knows the developer role */
    const char *reasoning_key; /* "reasoning_content", "thinking", "reasoning", or NULL */
};

struct chat; /* a compiled template and its capabilities */
struct chat *chat_new(const struct chat_source *s, struct error *err);
void chat_free(struct chat *c);
const struct chat_caps *chat_caps(const struct chat *c);

struct chat_request {
    const json_t *messages; /* array of {"role", "content", ...} */
    const json_t *tools;    /* array of {"type": "function", "function": {...}}, or NULL */
    const json_t *kwargs;   /* chat_template_kwargs (enable_thinking), or NULL */
    bool no_generation_prompt;
    const struct tm *now;  /* NULL = the clock */
    struct budget *budget; /* limits the work; NULL = only the template's own limits */
    bool literal; /* the prompt has literal bytes where it comes from the request (literal.h) */
};
const char *chat_template_text(const struct chat *c); /* its source */
/* Appends the prompt. On failure the request is at fault, and err says how. Takes time linear in
 * the messages, plus the template's own. */
bool chat_render(const struct chat *c, const struct chat_request *r, struct buf *out,
                 struct error *err);

/* Reasoning effort: "none", "minimal", "low", "medium", "high", "xhigh", "max". */
extern const char chat_efforts[]; /* the list of words for error messages */
bool chat_effort_known(const char *word);
/* Words that the template itself knows, at most most_out; 0 = it has no efforts. Turning thinking off is not among them. */
int chat_own_efforts(const struct chat *c, const char **out, int most_out);
/* Turns a known word into template variables. The template's effort variable is set to the nearest
 * word it accepts. Thinking is off at "none", else on unless kwargs says otherwise. An effort
 * already in kwargs is kept. */
void chat_set_effort(const struct chat *c, const char *word, json_t *kwargs);

/* Tells the template the most tokens of thinking, if it has a variable for them and kwargs has no value. */
void chat_set_budget(const struct chat *c, int tokens, json_t *kwargs);

/* The format of the model's replies. with_tools: the request has tools. */
enum chat_format chat_reply_format(const struct chat *c, bool with_tools);
enum chat_thoughts chat_thoughts(const struct chat *c);

#endif
