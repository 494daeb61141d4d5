/*
 * Tool calls written between tags: GLM, MiniMax, Kimi, Gemma, Hunyuan 3, Solar, Muse, DeepSeek V3.2 and V4. Handles frames, names and values;
 * chat_parse.c begins and ends calls. A call begins once its name is complete and the text can be
 * nothing else. A failure before that leaves the text as content; afterwards it breaks the call.
 */
#include "text/chat/chat_parse_int.h"

#include <string.h>

enum { MAX_NAME = 256 }; /* longest function or parameter name, with Solar's id */

/* Position in a call: p->mode. */
enum {
    T_OPEN = 100, /* before a call's name, or between calls */
    T_NAME,
    T_BODY, /* between parameters */
    T_KEY,
    T_GAP, /* between a key and its value */
    T_VALUE,
    T_ARGS, /* inside a JSON object */
    T_END,  /* after it */
};

/* The tags of a format; "" if it has no such tag. */
struct tag_form {
    enum chat_format format;
    const char *frame, *frame_end; /* around all calls */
    const char *call, *name_end;   /* around a name */
    const char *key, *key_end;     /* around a parameter's name */
    const char *value, *value_end; /* around its value */
    const char *call_end;
};

static const struct tag_form forms[] = {
    {CHAT_GLM, "<tool_call>", "", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
     "</tool_call>"},
    {CHAT_MINIMAX, "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=\"", "\">",
     "<parameter name=\"", "\">", "", "</parameter>", "</invoke>"},
    {CHAT_KIMI, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
     "<|tool_call_argument_begin|>", "", "", "", "", "<|tool_call_end|>"},
    {CHAT_GEMMA, "<|tool_call>", "", "call:", "{", "", "", "", "", "<tool_call|>"},
    {CHAT_HUNYUAN, "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>",
     "<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>",
     "<arg_value:opensource>", "</arg_value:opensource>", "</tool_call:opensource>"},
    {CHAT_SOLAR, "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:args|>", "", "",
     "", "", "<|tool_call:end|>"},
    {CHAT_MUSE, "<atem:function_calls>", "</atem:function_calls>", "<atem:invoke name=\"", "\">",
     "<atem:parameter name=\"", "\">", "", "</atem:parameter>", "</atem:invoke>"},
    {CHAT_DEEPSEEK_V32, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
     "<｜DSML｜invoke name=\"", "\">", "<｜DSML｜parameter name=\"", "\" string=\"", "true\">",
     "</｜DSML｜parameter>", "</｜DSML｜invoke>"},
    {CHAT_DEEPSEEK_V4, "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "<｜DSML｜invoke name=\"",
     "\">", "<｜DSML｜parameter name=\"", "\" string=\"", "true\">", "</｜DSML｜parameter>",
     "</｜DSML｜invoke>"},
};

static const struct tag_form *form_of(enum chat_format f)
{
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (forms[i].format == f)
            return &forms[i];
    return NULL;
}

/* Consumes a byte that is not yet known to belong to a call. */
static void consume(struct chat_parser *p)
{
    buf_addc(&p->raw, chat_here(p));
    p->pos++;
}

static bool is_name(const struct buf *b)
{
    if (!b->len || b->len > MAX_NAME)
        return false;
    for (size_t i = 0; i < b->len; i++)
        if (strchr(" \n\t\r<>{}\"'()", b->p[i]) && b->p[i])
            return false;
    return true;
}

/* Solar writes a call's id before its name, which is dropped. */
static void drop_id(struct buf *tag)
{
    static const char mark[] = "<|tool_call:name|>";
    const char *at = tag->len ? memmem(tag->p, tag->len, mark, sizeof mark - 1) : NULL;
    if (at) {
        tag->len -= (size_t)(at + sizeof mark - 1 - tag->p);
        memmove(tag->p, at + sizeof mark - 1, tag->len);
    }
}

/* Begins the call. Kimi writes names as functions.NAME:3. */
static void begin(struct chat_parser *p)
{
    const char *name = p->tag.p;
    size_t n = p->tag.len;
    if (p->format == CHAT_KIMI) {
        if (n > 10 && !memcmp(name, "functions.", 10)) {
            name += 10;
            n -= 10;
        }
        size_t digits = 0;
        while (digits < n && name[n - 1 - digits] >= '0' && name[n - 1 - digits] <= '9')
            digits++;
        if (digits && digits + 1 < n && name[n - 1 - digits] == ':')
            n -= digits + 1;
    }
    chat_call_begin(p, name, n);
    p->xml_any = false;
}

/* Between calls: the next one, or the end of the frame. */
static bool step_open(struct chat_parser *p, const struct tag_form *t)
{
    if (chat_space_here(p)) {
        if (p->raw.len)
            buf_addc(&p->raw, chat_here(p));
        p->pos++;
        return true;
    }
    int call = t->call[0] ? chat_match(p, t->call) : 0;
    int end = t->frame_end[0] ? chat_match(p, t->frame_end) : 0;
    if (call < 0 || end < 0)
        return false;
    if (call || (!t->call[0] && p->raw.len)) {
        chat_next_call(p, T_NAME);
        buf_adds(&p->raw, t->call);
        p->pos += strlen(t->call);
        if (p->format == CHAT_GLM && chat_here(p) == '{')
            p->mode = CHAT_MODE_JSON; /* these models also write calls as JSON */
    } else if (p->raw.len) {
        chat_reject_call(p);
    } else {
        if (end)
            p->pos += strlen(t->frame_end);
        p->state = S_CONTENT;
    }
    return true;
}

/* Reads a name up to its tag. GLM's name ends at a parameter, the end of the call, or a newline. */
static bool step_name(struct chat_parser *p, const struct tag_form *t)
{
    bool glm = p->format == CHAT_GLM;
    int end = t->name_end[0] ? chat_match(p, t->name_end) : 0;
    int key = glm ? chat_match(p, t->key) : 0, close = glm ? chat_match(p, t->call_end) : 0;
    if (end < 0 || key < 0 || close < 0)
        return false;
    if (glm && chat_space_here(p)) {
        end = 1;
        p->mode = T_END; /* white space, then a parameter or the end */
    }
    if (!end && !key && !close) {
        if (p->tag.len > MAX_NAME) {
            chat_reject_call(p);
            return true;
        }
        buf_addc(&p->tag, chat_here(p));
        consume(p);
        return true;
    }
    if (p->format == CHAT_SOLAR)
        drop_id(&p->tag);
    if (!is_name(&p->tag)) {
        chat_reject_call(p);
        return true;
    }
    if (glm) {
        if (p->mode != T_END) {
            begin(p);
            p->mode = T_BODY;
        }
        return true;
    }
    buf_adds(&p->raw, t->name_end);
    p->pos += strlen(t->name_end);
    if (p->format == CHAT_KIMI || p->format == CHAT_SOLAR) {
        p->mode = T_GAP;
        return true;
    }
    begin(p);
    p->mode = T_BODY;
    if (p->format == CHAT_GEMMA) {
        chat_call_args(p, "{", 1);
        p->js.depth = 1;
        p->js.in_string = false;
        buf_reset(&p->js.text);
        p->mode = T_ARGS;
    }
    return true;
}

/* After GLM's name and white space. */
static bool step_glm_named(struct chat_parser *p, const struct tag_form *t)
{
    int key = chat_match(p, t->key), close = chat_match(p, t->call_end);
    if (key < 0 || close < 0)
        return false;
    if (key || close) {
        begin(p);
        p->mode = T_BODY;
    } else if (chat_space_here(p)) {
        consume(p);
    } else {
        chat_reject_call(p);
    }
    return true;
}

static bool step_body(struct chat_parser *p, const struct tag_form *t)
{
    int key = chat_match(p, t->key), end = chat_match(p, t->call_end);
    if (key < 0 || end < 0)
        return false;
    if (key) {
        p->pos += strlen(t->key);
        buf_reset(&p->js.name);
        p->mode = T_KEY;
    } else if (end) {
        p->pos += strlen(t->call_end);
        chat_call_args(p, p->xml_any ? "}" : "{}", p->xml_any ? 1 : 2);
        p->state = S_CONTENT;
        if (chat_call_end(p) && t->frame_end[0])
            chat_next_call(p, T_OPEN);
    } else if (chat_space_here(p)) {
        p->pos++;
    } else {
        chat_call_break(p);
    }
    return true;
}

/* text: the call says that its value is a string, where the schema has no type. */
static void begin_value(struct chat_parser *p, bool text)
{
    struct buf key = {0};
    buf_adds(&key, p->xml_any ? ", \"" : "{\"");
    json_escape(&key, p->js.name.p, p->js.name.len);
    buf_adds(&key, "\": ");
    buf_addc(&p->js.name, 0);
    buf_addc(&p->tag, 0);
    p->xml_string = xml_is_string(p, p->tag.p, p->js.name.p) ||
                    (text && !xml_has_type(p, p->tag.p, p->js.name.p));
    p->tag.len--;
    p->xml_any = true;
    if (p->xml_string)
        buf_addc(&key, '"');
    chat_call_args(p, key.p, key.len);
    buf_clear(&key);
    buf_reset(&p->js.args);
    p->mode = T_VALUE;
}

static bool step_key(struct chat_parser *p, const struct tag_form *t)
{
    int m = chat_match(p, t->key_end);
    if (m < 0)
        return false;
    if (m) {
        p->pos += strlen(t->key_end);
        p->mode = T_GAP;
        if (!t->value[0])
            begin_value(p, false);
    } else if (p->js.name.len > MAX_NAME) {
        chat_call_break(p);
    } else {
        buf_addc(&p->js.name, chat_here(p));
        p->pos++;
    }
    return true;
}

static bool step_gap(struct chat_parser *p, const struct tag_form *t)
{
    if (chat_space_here(p)) {
        if (!p->call_open)
            buf_addc(&p->raw, chat_here(p));
        p->pos++;
        return true;
    }
    if (p->format == CHAT_KIMI || p->format == CHAT_SOLAR) {
        if (chat_here(p) != '{') {
            chat_reject_call(p);
            return true;
        }
        begin(p);
        p->mode = T_ARGS;
        return true;
    }
    static const char other[] = "false\">";
    bool typed = p->format == CHAT_DEEPSEEK_V32 || p->format == CHAT_DEEPSEEK_V4;
    int m = chat_match(p, t->value), json = typed ? chat_match(p, other) : 0;
    if (m < 0 || json < 0)
        return false;
    if (m || json) {
        p->pos += m ? strlen(t->value) : sizeof other - 1;
        begin_value(p, typed && m);
    } else {
        chat_call_break(p);
    }
    return true;
}

static void value_end(struct chat_parser *p)
{
    if (p->xml_string)
        chat_call_args(p, "\"", 1);
    else
        xml_value(p, p->js.args.p ? p->js.args.p : "", p->js.args.len);
    p->mode = T_BODY;
}

static bool step_value(struct chat_parser *p, const struct tag_form *t)
{
    char c = chat_here(p);
    int m = chat_match(p, t->value_end);
    if (m < 0)
        return false;
    if (m) {
        p->pos += strlen(t->value_end);
        value_end(p);
        return true;
    }
    p->pos++;
    chat_value_char(p, c);
    return true;
}

/* A bare word of Gemma's: a key before ':', else a number, a constant or an unquoted string. */
static void gemma_word(struct chat_parser *p, bool is_key)
{
    struct buf *w = &p->js.text, b = {0};
    while (w->len && strchr(" \n\t\r", w->p[w->len - 1]))
        w->len--;
    if (w->len && is_key) {
        buf_addc(&b, '"');
        json_escape(&b, w->p, w->len);
        buf_addc(&b, '"');
        chat_call_args(p, b.p, b.len);
        buf_clear(&b);
    } else if (w->len) {
        xml_value(p, w->p, w->len);
    }
    buf_reset(w);
}

/* Converts Gemma's arguments {key:<|"|>text<|"|>,key:[1,true]} to JSON as they arrive. */
static bool step_gemma(struct chat_parser *p)
{
    static const char mark[] = "<|\"|>";
    struct json_scan *s = &p->js;
    char c = chat_here(p);
    int m = chat_match(p, mark);
    if (m < 0)
        return false;
    if (m) {
        gemma_word(p, false);
        s->in_string = !s->in_string;
        chat_call_args(p, "\"", 1);
        p->pos += sizeof mark - 1;
        return true;
    }
    p->pos++;
    if (s->in_string) {
        struct buf b = {0};
        json_escape(&b, &c, 1);
        chat_call_args(p, b.p, b.len);
        buf_clear(&b);
        return true;
    }
    if (!strchr("{}[],:", c) || !c) {
        bool space = c == ' ' || c == '\n' || c == '\t' || c == '\r';
        if (!space || s->text.len)
            buf_addc(&s->text, c);
        return true;
    }
    gemma_word(p, c == ':');
    chat_call_args(p, &c, 1);
    s->depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    if (s->depth <= 0 && chat_call_end(p))
        p->mode = T_END;
    return true;
}

/* After arguments that end by themselves: the call's closing tag. */
static bool step_end(struct chat_parser *p, const struct tag_form *t)
{
    if (chat_space_here(p)) {
        p->pos++;
        return true;
    }
    int m = chat_match(p, t->call_end);
    if (m < 0)
        return false;
    if (m)
        p->pos += strlen(t->call_end);
    p->state = S_CONTENT;
    if (m && t->frame_end[0])
        chat_next_call(p, T_OPEN);
    return true;
}

bool chat_tags_step(struct chat_parser *p)
{
    const struct tag_form *t = form_of(p->format);
    switch (p->mode) {
    case T_NAME:
        return step_name(p, t);
    case T_BODY:
        return step_body(p, t);
    case T_KEY:
        return step_key(p, t);
    case T_GAP:
        return step_gap(p, t);
    case T_VALUE:
        return step_value(p, t);
    case T_ARGS:
        if (p->format == CHAT_GEMMA)
            return step_gemma(p);
        if (chat_step_args(p))
            chat_next_call(p, T_END);
        return true;
    case T_END:
        return p->format == CHAT_GLM ? step_glm_named(p, t) : step_end(p, t);
    default:
        return step_open(p, t);
    }
}

void chat_tags_start(struct chat_parser *p, const char *raw)
{
    chat_start_call(p, T_OPEN, raw);
}
