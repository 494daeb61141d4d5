/* Inside constraints on replies: graphs of calls, and the table of their forms. Only for chat_grammar.c and chat_forms.c. */
#ifndef STEEL_TEXT_CHAT_GRAMMAR_INT_H
#define STEEL_TEXT_CHAT_GRAMMAR_INT_H

#include "text/chat/chat_grammar.h"
#include "text/grammar/grammar_int.h"

struct tool {
    const struct jvalue *name, *parameters;
    bool strict;
    uint32_t args; /* node of the arguments */
};

struct reply_builder {
    struct grammar *g;
    struct re_pool *pool;
    struct error *err;
    bool failed;
    int flags;
    enum chat_format format;
    const struct chat_marks *marks;
    enum chat_thinking thinking;
    bool required, one;
    struct tool *tools; /* (n_tools) */
    uint32_t n_tools;
    uint32_t any_args; /* node of arbitrary-object arguments; 0 = not built */
    size_t work;       /* work of the schemas so far */
    int n_relaxed;     /* schemas that could not be enforced */
    /* terminals built so far, by term */
    uint32_t *terms; /* (2 * n_terms) term, terminal */
    uint32_t n_terms, cap_terms;
};

struct call_graph {
    struct call_graph_edge {
        uint32_t from, to, target;
        bool call;
    } * edges;
    uint32_t n_edges, cap, n_states;
    uint32_t final, also; /* final states; also: 0 = none. State 0 is the start */
};

/* Ends free text: a string anywhere, or an expression at the start. `again` is the text with which
 * it is matched again after the free text. */
struct stop {
    const char *text, *at_start, *again;
};

struct call_form {
    enum chat_format format;
    int args; /* SCHEMA_* flags for compiling the arguments */
    void (*calls)(struct reply_builder *a, struct call_graph *gr);
    struct stop stops[3]; /* start of a call in free text */
    bool repeats;         /* a further call starts like the first */
    bool last;            /* after a call only further calls may follow */
};
const struct call_form *chat_form_of(enum chat_format f); /* NULL = the format has no calls */

/* White space before a call that has no tag. */
#define CALL_LEAD "[ \\t\\r\\n]*"

uint32_t graph_add_state(struct call_graph *gr);
void graph_add_edge(struct call_graph *gr, uint32_t from, bool call, uint32_t target, uint32_t to);
/* Edges for a regular expression, a tag, or a tool's name between two expressions. */
void graph_add_pattern(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                       const char *re, uint32_t to);
void graph_add_tag(struct reply_builder *a, struct call_graph *gr, uint32_t from, const char *text,
                   bool token_only, uint32_t to);
void graph_add_name(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                    const char *before, const struct tool *t, const char *after, uint32_t to);

#endif
