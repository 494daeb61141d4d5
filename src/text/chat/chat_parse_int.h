/* Inside the chat parser: its state, and the scanners of single calls. chat_parse*.c only. */
#ifndef STEEL_TEXT_CHAT_PARSE_INT_H
#define STEEL_TEXT_CHAT_PARSE_INT_H

#include "text/chat/chat_parse.h"

#include <string.h>

enum scan_result { SCAN_MORE, SCAN_DONE, SCAN_BAD };

/* One call as a JSON object, byte by byte. */
struct json_scan {
    int state, level, depth, field;
    bool in_string, escape;
    bool have_name, have_args, streaming; /* streaming: args go out as they come */
    struct buf text;                      /* key or string value at work, raw */
    struct buf name, id, args;
};

/* One call as name(key=value, ...), byte by byte. */
struct py_scan {
    int state, depth;
    char quote;
    bool escape, any;
    struct buf name, key, value;
};

enum state {
    S_START, /* nothing but white space yet */
    S_CONTENT,
    S_REASONING,
    S_CALL,    /* inside one call of the format */
    S_CLOSE,   /* after a call: its closing tag */
    S_BETWEEN, /* between calls of a list */
    S_HEADER,  /* gpt-oss: between <|start|> or <|channel|> and <|message|> */
    S_BODY,    /* gpt-oss: the message */
};

struct chat_parser {
    enum chat_format format;
    struct chat_parse_options opt;
    struct buf in; /* bytes not yet decided on start at pos */
    size_t pos;
    bool final;
    enum state state;
    enum chat_event_type out_kind; /* of what is in out */
    struct buf out;                /* decided text, not yet given to the callback */
    struct buf space;              /* white space held back until more text follows */
    struct buf raw;                /* a call's text so far, shown if it is none after all */
    bool wrote;                    /* some content was given out */
    bool trim;                     /* drop white space before the next text */
    bool reasoned;                 /* gpt-oss: some reasoning was given out */
    bool wrote_args;               /* gpt-oss: the open call has arguments */
    bool call_open;                /* TOOL_BEGIN was given, TOOL_END not yet */
    bool ended;                    /* this step ended a call */
    int n_calls, n_broken;         /* begun; of these */
    struct buf whole;              /* text of the call at work, before this step */
    struct buf lead;               /* white space before it */
    struct buf args;               /* its arguments so far */
    size_t step_at;                /* where this step began, in `in` */
    int mode;                      /* of the format: which variant, or the gpt-oss channel */
    struct json_scan js;
    struct py_scan py;
    /* XML calls */
    struct buf tag;           /* function or parameter name, or a gpt-oss header */
    bool xml_string, xml_any; /* the parameter is known to be a string; one was written */
};

/* 1: the tag stands at offset `at` from here; 0: it does not; -1: it may, more text will tell. */
static inline int chat_match_at(const struct chat_parser *p, size_t at, const char *tag)
{
    size_t left = p->in.len - p->pos - at, n = strlen(tag);
    if (memcmp(p->in.p + p->pos + at, tag, left < n ? left : n))
        return 0;
    return left >= n ? 1 : p->final ? 0 : -1;
}

static inline int chat_match(const struct chat_parser *p, const char *tag)
{
    return chat_match_at(p, 0, tag);
}

/* Consumes tag if it is here. The result is chat_match()'s. */
static inline int chat_accept(struct chat_parser *p, const char *tag)
{
    int m = chat_match(p, tag);
    if (m > 0)
        p->pos += strlen(tag);
    return m;
}

static inline char chat_here(const struct chat_parser *p)
{
    return p->in.p[p->pos];
}

static inline bool chat_space_here(const struct chat_parser *p)
{
    char c = chat_here(p);
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* chat_parse.c */
enum { CHAT_MODE_JSON }; /* a call's mode: one JSON object, whatever the format */
/* The call turned out to be none: its text (raw) is content, read on from here. */
void chat_not_a_call(struct chat_parser *p);
/* A call that begins with the text raw; the next one of a frame. */
void chat_start_call(struct chat_parser *p, int mode, const char *raw);
void chat_next_call(struct chat_parser *p, int mode);
/* Arguments as a bare JSON object: out as they come, up to the closing bracket. True: the call is over,
 * and whole. */
bool chat_step_args(struct chat_parser *p);
void chat_call_begin(struct chat_parser *p, const char *name, size_t len);
void chat_call_args(struct chat_parser *p, const char *s, size_t n);
/* A character of a value between tags: of a text, escaped; of other JSON, kept until it is whole. */
void chat_value_char(struct chat_parser *p, char c);
/* False: the arguments are no JSON, and the call is broken. */
bool chat_call_end(struct chat_parser *p);
/* The open call is none: all of its text is content, read on from here. */
void chat_call_break(struct chat_parser *p);
void chat_put(struct chat_parser *p, enum chat_event_type kind, const char *s, size_t n);

/* chat_tags.c: GLM, MiniMax, Kimi, Gemma */
const char *chat_tags_frame(enum chat_format f); /* what their calls begin with */
void chat_tags_start(struct chat_parser *p);     /* after that */
bool chat_tags_step(struct chat_parser *p);      /* false: wait */
void chat_tags_value_end(struct chat_parser *p);

/* chat_calls.c */
void json_scan_reset(struct json_scan *s);
/* Feeds one byte; gives out the call's name and arguments as soon as it may. */
enum scan_result json_scan_feed(struct chat_parser *p, char c, bool bare_ok);
void py_scan_reset(struct py_scan *s);
enum scan_result py_scan_feed(struct chat_parser *p, char c);
/* The value of an XML parameter as JSON: by the schema's type, else by its looks. */
void xml_value(struct chat_parser *p, const char *s, size_t n);
/* Whether the schema says that parameter of that function is a string. */
bool xml_is_string(const struct chat_parser *p, const char *function, const char *param);
void json_escape(struct buf *b, const char *s, size_t n); /* without the quotes */

#endif
