/*
 * OpenAI-shaped messages to a prompt, through the model's own chat template. What a template can take
 * is learnt once, at load, by rendering small canned conversations; each request is then brought
 * into a shape the template accepts (system messages folded, roles merged, arguments parsed, calls
 * split or spelt out), so that no legal conversation fails because of a template's taste.
 *
 * Read-only once made: any number of threads may render at the same time. Knows nothing of tokens
 * or HTTP. The way back, from the model's text to a message, is chat_parse.h.
 */
#ifndef STEEL_TEXT_CHAT_H
#define STEEL_TEXT_CHAT_H

#include "text/chat/chat_parse.h"
#include "text/chat/chat_source.h"
#include "text/jinja/jinja.h"

struct chat_caps {
    bool string_content;       /* content as a string is shown */
    bool typed_content;        /* content as [{"type": "text", "text"}] is shown */
    bool system;               /* a leading system message */
    bool system_later;         /* a system message in the middle */
    bool same_role;            /* two user messages in a row */
    bool assistant_first;      /* a conversation that the assistant opens */
    bool tools;                /* tool definitions are shown */
    bool calls;                /* assistant tool_calls and tool results are shown */
    bool two_calls;            /* two calls in one message */
    bool thoughts_or_text;     /* beside a call it takes reasoning or content, not both */
    bool null_content;         /* content null beside tool_calls */
    bool string_args;          /* arguments must be JSON text; else they are objects */
    bool short_ids;            /* call ids must be nine letters or digits */
    bool developer;            /* knows the developer role */
    const char *reasoning_key; /* "reasoning_content", "thinking", "reasoning", or NULL */
};

struct chat; /* a compiled template and what it can do */
struct chat *chat_new(const struct chat_source *s, struct error *err);
void chat_free(struct chat *c);
const struct chat_caps *chat_caps(const struct chat *c);

struct chat_request {
    const json_t *messages; /* array of {"role", "content", ...} */
    const json_t *tools;    /* array of {"type": "function", "function": {...}}, or NULL */
    const json_t *kwargs;   /* chat_template_kwargs: further variables (enable_thinking), or NULL */
    bool no_generation_prompt;
    const struct tm *now;  /* NULL = the clock */
    struct budget *budget; /* what it may cost; NULL = no bound but the template's own */
};
/* Appends the prompt. A failure is the request's (its message says what is wrong). Takes time in
 * proportion to the messages, and what the template takes. */
bool chat_render(const struct chat *c, const struct chat_request *r, struct buf *out,
                 struct error *err);

/* How much a model is to think, in a word: "none", "minimal", "low", "medium", "high", "xhigh", "max". */
extern const char chat_efforts[]; /* these words, as an error names them */
bool chat_effort_known(const char *word);
/* A known word as variables: the nearest that the template takes goes where it looks for it, and thinking
 * is off at "none", else on unless kwargs says otherwise. What kwargs has of the effort stays. */
void chat_set_effort(const struct chat *c, const char *word, json_t *kwargs);

/* How the model answers; with_tools: the request has tools. */
enum chat_format chat_answer_format(const struct chat *c, bool with_tools);
/* Whether the prompt ends inside reasoning that the template opened. */
bool chat_opens_reasoning(const char *prompt, size_t len);

#endif
