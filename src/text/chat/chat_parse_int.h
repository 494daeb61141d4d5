/* Inside the chat parser: its state, and the scanners of single calls. Only for chat_*.c. */
#ifndef STEEL_TEXT_CHAT_PARSE_INT_H
#define STEEL_TEXT_CHAT_PARSE_INT_H

#include "text/chat/chat_marks.h"

#include <string.h>

enum scan_result { SCAN_MORE, SCAN_DONE, SCAN_BAD };

/* One call as a JSON object, byte by byte. */
struct json_scan {
    int state, level, depth, field;
    bool in_string, escape;
    bool have_name, have_args, streaming; /* streaming: args are emitted as they arrive */
    struct buf text;                      /* current key or string value, raw */
    struct buf name, id, args;
};

/* One call as name(key=value, ...), byte by byte. */
struct py_scan {
    int state, depth;
    char quote;
    bool escape, any;
    struct buf name, key, value;
};

enum parse_state {
    S_START, /* only white space so far */
    S_CONTENT,
    S_REASONING,
    S_CALL,    /* inside one call of the format */
    S_CLOSE,   /* after a call: its closing tag */
    S_BETWEEN, /* between calls of a list */
    S_HEADER,  /* gpt-oss: between <|start|> or <|channel|> and <|message|> */
    S_BODY,    /* gpt-oss: the message */
};

struct chat_level; /* chat_elements.c */

struct chat_parser {
    enum chat_format format;
    struct chat_parse_options opt;
    const struct chat_marks *marks;
    struct buf in; /* unconsumed input, starting at pos */
    size_t pos;
    bool final;
    enum parse_state state;
    enum chat_event_type out_kind; /* kind of the text in out */
    struct buf out;                /* text not yet passed to the callback */
    struct buf space;              /* white space held back until more text follows */
    struct buf raw;                /* text of a possible call, emitted if it is none */
    bool wrote;                    /* some content was emitted */
    bool framed;                   /* a mark of the answer was dropped, or the prompt has it */
    bool trim;                     /* drop white space before the next text */
    bool reasoned;                 /* gpt-oss: some reasoning was emitted */
    bool wrote_args;               /* gpt-oss: the open call has arguments */
    bool call_open;                /* TOOL_BEGIN was emitted, TOOL_END not yet */
    bool ended;                    /* this step ended a call */
    int n_calls, n_broken;         /* calls begun; calls among them that broke */
    struct buf whole;              /* text of the current call before this step */
    struct buf lead;               /* white space before the call */
    struct buf args;               /* its arguments so far */
    size_t step_at;                /* offset in `in` where this step began */
    int mode;                      /* format-specific: variant, or the gpt-oss channel */
    struct json_scan js;
    struct py_scan py;
    /* XML calls */
    struct buf tag;           /* function or parameter name, or a gpt-oss header */
    bool xml_string, xml_any; /* the parameter is a string by its schema; a parameter was written */
    struct chat_level *levels; /* (n_levels) open elements of a call; owned */
    int n_levels;
};

/* Returns 1 if the tag is at offset `at`, 0 if not, -1 if more text is needed to decide. */
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

/* Consumes the tag if it is here. Returns chat_match()'s result. */
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
enum { CHAT_MODE_JSON }; /* mode of a call written as a JSON object, in every format */
/* The text is not a call after all: emits it (raw) as content and continues from here. */
void chat_reject_call(struct chat_parser *p);
/* Starts a call whose text begins with raw, or the next call of a frame. */
void chat_start_call(struct chat_parser *p, int mode, const char *raw);
void chat_next_call(struct chat_parser *p, int mode);
/* Arguments as a bare JSON object, emitted as they arrive up to the closing bracket. True when the
 * call is complete and valid. */
bool chat_step_args(struct chat_parser *p);
void chat_call_begin(struct chat_parser *p, const char *name, size_t len);
void chat_call_args(struct chat_parser *p, const char *s, size_t n);
/* One character of a value between tags: escaped if it is a string, else buffered until
 * complete. */
void chat_value_char(struct chat_parser *p, char c);
/* False if the arguments are not JSON; the call is then broken. */
bool chat_call_end(struct chat_parser *p);
/* Retracts the open call: emits all of its text as content and continues from here. */
void chat_call_break(struct chat_parser *p);

/* Handles a scanner's result for the current byte; `done`: the state after a whole call. */
bool chat_scan_step(struct chat_parser *p, enum scan_result r, enum parse_state done);

/* The steps of calls. False: wait for more text. */
/* chat_frames.c: Mistral, DeepSeek, Apertus, framed lists */
void chat_frames_start(struct chat_parser *p, const char *raw); /* after the frame's opening tag */
void chat_list_next(struct chat_parser *p);                     /* at a further object of a list */
bool chat_step_mistral(struct chat_parser *p);
bool chat_step_deepseek(struct chat_parser *p);
bool chat_step_list(struct chat_parser *p); /* of JSON objects, and the start of any list */
bool chat_step_apertus(struct chat_parser *p);

/* chat_tags.c: GLM, MiniMax, Kimi, Gemma, Hunyuan 3, Solar, Muse */
void chat_tags_start(struct chat_parser *p, const char *raw);
bool chat_tags_step(struct chat_parser *p);

/* chat_elements.c: MiniMax-M3 */
void chat_elements_start(struct chat_parser *p, const char *raw);
bool chat_step_elements(struct chat_parser *p);

/* chat_calls.c */
/* The schema of this function's parameters, or NULL. */
const json_t *chat_parameters(const struct chat_parser *p, const char *function);
void json_scan_reset(struct json_scan *s);
/* Feeds one byte. Emits the call's name and arguments as early as possible. */
enum scan_result json_scan_feed(struct chat_parser *p, char c, bool bare_ok);
void py_scan_reset(struct py_scan *s);
enum scan_result py_scan_feed(struct chat_parser *p, char c);
/* Emits an XML parameter's value as JSON: by the schema's type, else by its syntax. */
void xml_value(struct chat_parser *p, const char *s, size_t n);
/* Whether the schema declares this parameter of this function as a string. */
bool xml_is_string(const struct chat_parser *p, const char *function, const char *param);
bool xml_has_type(const struct chat_parser *p, const char *function, const char *param);
void json_escape(struct buf *b, const char *s, size_t n); /* without the surrounding quotes */

#endif
