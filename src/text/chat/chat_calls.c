/*
 * Single tool calls, byte by byte: a JSON object with a name and arguments, a Python call, and the
 * typed values of XML parameters. A scanner emits the beginning of a call only when the text can be
 * nothing else. A failure before that has no effect, and the parser emits the text as content.
 */
#include "text/chat/chat_parse_int.h"

#include <stdlib.h>
#include <string.h>

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static bool is_ident(char c, bool first)
{
    return ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' ||
           (!first && ((c >= '0' && c <= '9') || c == '.' || c == '-'));
}

static void put_utf8(struct buf *b, unsigned cp)
{
    char t[4];
    size_t n = 0;
    if (cp >= 0xd800 && cp < 0xe000)
        cp = 0xfffd;
    if (cp < 0x80) {
        t[n++] = (char)cp;
    } else if (cp < 0x800) {
        t[n++] = (char)(0xc0 | cp >> 6);
        t[n++] = (char)(0x80 | (cp & 0x3f));
    } else if (cp < 0x10000) {
        t[n++] = (char)(0xe0 | cp >> 12);
        t[n++] = (char)(0x80 | (cp >> 6 & 0x3f));
        t[n++] = (char)(0x80 | (cp & 0x3f));
    } else {
        t[n++] = (char)(0xf0 | cp >> 18);
        t[n++] = (char)(0x80 | (cp >> 12 & 0x3f));
        t[n++] = (char)(0x80 | (cp >> 6 & 0x3f));
        t[n++] = (char)(0x80 | (cp & 0x3f));
    }
    buf_add(b, t, n);
}

static int hex4(const char *s, size_t n)
{
    int v = 0;
    if (n < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int c = s[i] | 32, d = s[i] >= '0' && s[i] <= '9' ? s[i] - '0'
                               : c >= 'a' && c <= 'f'     ? c - 'a' + 10
                                                          : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* Unescapes the inside of a JSON or Python string literal. */
static void unescape(struct buf *out, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (s[i] != '\\' || i + 1 == n) {
            buf_addc(out, s[i]);
            continue;
        }
        char c = s[++i];
        int hi = c == 'u' ? hex4(s + i + 1, n - i - 1) : -1;
        switch (c) {
        case 'n':
            buf_addc(out, '\n');
            break;
        case 't':
            buf_addc(out, '\t');
            break;
        case 'r':
            buf_addc(out, '\r');
            break;
        case 'b':
            buf_addc(out, '\b');
            break;
        case 'f':
            buf_addc(out, '\f');
            break;
        case 'u':
            if (hi < 0) {
                buf_adds(out, "\\u");
                break;
            }
            i += 4;
            if (hi >= 0xd800 && hi < 0xdc00 && i + 2 < n && s[i + 1] == '\\' && s[i + 2] == 'u') {
                int lo = hex4(s + i + 3, n - i - 3);
                if (lo >= 0xdc00 && lo < 0xe000) {
                    put_utf8(out,
                             0x10000u + ((unsigned)(hi - 0xd800) << 10) + (unsigned)(lo - 0xdc00));
                    i += 6;
                    break;
                }
            }
            put_utf8(out, (unsigned)hi);
            break;
        case '"':
        case '\'':
        case '\\':
        case '/':
            buf_addc(out, c);
            break;
        default:
            buf_addc(out, '\\');
            buf_addc(out, c);
        }
    }
}

void json_escape(struct buf *b, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        switch (c) {
        case '"':
            buf_adds(b, "\\\"");
            break;
        case '\\':
            buf_adds(b, "\\\\");
            break;
        case '\n':
            buf_adds(b, "\\n");
            break;
        case '\r':
            buf_adds(b, "\\r");
            break;
        case '\t':
            buf_adds(b, "\\t");
            break;
        default:
            if (c < 0x20)
                buf_addf(b, "\\u%04x", c);
            else
                buf_addc(b, s[i]);
        }
    }
}

/* ------------------------------------------------------------------ JSON */

enum { J_START, J_KEY_OR_END, J_KEY, J_COLON, J_VALUE, J_STRING, J_SCALAR, J_NEST, J_AFTER };
enum { F_OTHER, F_NAME, F_ARGS, F_ID, F_FUNCTION };

void json_scan_reset(struct json_scan *s)
{
    struct buf text = s->text, name = s->name, id = s->id, args = s->args;
    *s = (struct json_scan){.text = text, .name = name, .id = id, .args = args};
    buf_reset(&s->text);
    buf_reset(&s->name);
    buf_reset(&s->id);
    buf_reset(&s->args);
}

static int field_of(const struct buf *key)
{
    static const struct {
        const char *name;
        int field;
    } known[] = {{"name", F_NAME},       {"tool_name", F_NAME},   {"arguments", F_ARGS},
                 {"parameters", F_ARGS}, {"args", F_ARGS},        {"id", F_ID},
                 {"tool_call_id", F_ID}, {"function", F_FUNCTION}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (key->len == strlen(known[i].name) && !memcmp(key->p, known[i].name, key->len))
            return known[i].field;
    return F_OTHER;
}

/* Begins the call once its name and the start of its arguments are known. */
static void js_commit(struct chat_parser *p)
{
    struct json_scan *s = &p->js;
    if (p->call_open || !s->have_name || !s->streaming)
        return;
    chat_call_begin(p, s->name.p, s->name.len);
    chat_call_args(p, s->args.p, s->args.len);
    buf_reset(&s->args);
}

static void js_arg(struct chat_parser *p, char c)
{
    if (p->call_open)
        chat_call_args(p, &c, 1);
    else
        buf_addc(&p->js.args, c);
}

static enum scan_result js_done(struct chat_parser *p, bool bare_ok)
{
    struct json_scan *s = &p->js;
    if (!p->call_open) {
        if (!s->have_name || (!s->have_args && !bare_ok))
            return SCAN_BAD;
        chat_call_begin(p, s->name.p, s->name.len);
        if (!s->args.len || (s->args.len == 4 && !memcmp(s->args.p, "null", 4)))
            chat_call_args(p, "{}", 2);
        else
            chat_call_args(p, s->args.p, s->args.len);
    }
    return chat_call_end(p) ? SCAN_DONE : SCAN_BAD;
}

static enum scan_result js_string_end(struct chat_parser *p)
{
    struct json_scan *s = &p->js;
    s->state = J_AFTER;
    if (s->field == F_NAME || s->field == F_FUNCTION) {
        if (s->have_name)
            return SCAN_MORE;
        unescape(&s->name, s->text.p, s->text.len);
        if (!s->name.len)
            return SCAN_BAD;
        s->have_name = true;
        js_commit(p);
    } else if (s->field == F_ARGS && !s->have_args) {
        unescape(&s->args, s->text.p, s->text.len); /* arguments given as a JSON string */
        s->have_args = true;
    }
    return SCAN_MORE;
}

enum scan_result json_scan_feed(struct chat_parser *p, char c, bool bare_ok)
{
    struct json_scan *s = &p->js;
    switch (s->state) {
    case J_START:
        if (is_space(c))
            return SCAN_MORE;
        s->state = J_KEY_OR_END;
        return c == '{' ? SCAN_MORE : SCAN_BAD;
    case J_KEY_OR_END:
        if (is_space(c))
            return SCAN_MORE;
        if (c == '}')
            goto close;
        buf_reset(&s->text);
        s->state = J_KEY;
        return c == '"' ? SCAN_MORE : SCAN_BAD;
    case J_KEY:
    case J_STRING:
        if (s->escape) {
            s->escape = false;
        } else if (c == '\\') {
            s->escape = true;
        } else if (c == '"') {
            if (s->state == J_STRING)
                return js_string_end(p);
            s->field = field_of(&s->text);
            s->state = J_COLON;
            return SCAN_MORE;
        }
        buf_addc(&s->text, c);
        return SCAN_MORE;
    case J_COLON:
        if (is_space(c))
            return SCAN_MORE;
        s->state = J_VALUE;
        return c == ':' ? SCAN_MORE : SCAN_BAD;
    case J_VALUE:
        if (is_space(c))
            return SCAN_MORE;
        buf_reset(&s->text);
        if (c == '"') {
            s->state = J_STRING;
        } else if (c == '{' && s->field == F_FUNCTION && !s->level) {
            s->level++;
            s->state = J_KEY_OR_END;
        } else if (c == '{' || c == '[') {
            s->state = J_NEST;
            s->depth = 1;
            if (s->field == F_ARGS && !s->have_args) {
                s->have_args = s->streaming = true;
                js_arg(p, c);
                js_commit(p);
            } else if (s->field == F_ARGS) {
                s->field = F_OTHER; /* a duplicate is not emitted */
            }
        } else if ((c >= '0' && c <= '9') || c == '-' || ((c | 32) >= 'a' && (c | 32) <= 'z')) {
            s->state = J_SCALAR;
            if (s->field == F_ARGS && !s->have_args) {
                s->have_args = true;
                js_arg(p, c);
            } else if (s->field == F_ARGS) {
                s->field = F_OTHER;
            }
        } else {
            return SCAN_BAD;
        }
        return SCAN_MORE;
    case J_NEST:
        if (s->field == F_ARGS)
            js_arg(p, c);
        if (s->in_string) {
            if (s->escape)
                s->escape = false;
            else if (c == '\\')
                s->escape = true;
            else if (c == '"')
                s->in_string = false;
        } else if (c == '"') {
            s->in_string = true;
        } else if (c == '{' || c == '[') {
            s->depth++;
        } else if ((c == '}' || c == ']') && --s->depth == 0) {
            s->state = J_AFTER;
        }
        return SCAN_MORE;
    case J_SCALAR:
        if (!is_space(c) && c != ',' && c != '}' && c != ']') {
            if (s->field == F_ARGS)
                js_arg(p, c);
            return SCAN_MORE;
        }
        s->state = J_AFTER;
        /* fall through */
    default:
        if (is_space(c))
            return SCAN_MORE;
        if (c == '}')
            goto close;
        s->state = J_KEY_OR_END;
        return c == ',' ? SCAN_MORE : SCAN_BAD;
    }
close:
    if (s->level) {
        s->level--;
        s->state = J_AFTER;
        return SCAN_MORE;
    }
    return js_done(p, bare_ok);
}

/* ------------------------------------------------------------------ Python calls */

enum { P_NAME, P_ARG, P_KEY, P_VALUE };

void py_scan_reset(struct py_scan *s)
{
    struct buf name = s->name, key = s->key, value = s->value;
    *s = (struct py_scan){.name = name, .key = key, .value = value};
    buf_reset(&s->name);
    buf_reset(&s->key);
    buf_reset(&s->value);
}

struct py_reader {
    const char *p, *end;
    struct buf *out;
    int depth;
};

static bool py_word(struct py_reader *r, const char *word, const char *json)
{
    size_t n = strlen(word);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, word, n))
        return false;
    r->p += n;
    buf_adds(r->out, json);
    return true;
}

static void py_space(struct py_reader *r)
{
    while (r->p < r->end && is_space(*r->p))
        r->p++;
}

static bool py_value(struct py_reader *r);

static bool py_string(struct py_reader *r)
{
    char q = *r->p++;
    const char *from = r->p;
    while (r->p < r->end && *r->p != q)
        r->p += *r->p == '\\' && r->p + 1 < r->end ? 2 : 1;
    if (r->p >= r->end)
        return false;
    struct buf t = {0};
    unescape(&t, from, (size_t)(r->p - from));
    buf_addc(r->out, '"');
    json_escape(r->out, t.p ? t.p : "", t.len);
    buf_addc(r->out, '"');
    buf_clear(&t);
    r->p++;
    return true;
}

static bool py_items(struct py_reader *r, char close, bool dict)
{
    bool first = true;
    r->p++;
    buf_addc(r->out, dict ? '{' : '[');
    for (;;) {
        py_space(r);
        if (r->p < r->end && *r->p == close)
            break;
        if (!first)
            buf_adds(r->out, ", ");
        first = false;
        if (dict && (r->p >= r->end || (*r->p != '"' && *r->p != '\'')))
            return false;
        if (!py_value(r))
            return false;
        py_space(r);
        if (dict) {
            if (r->p >= r->end || *r->p++ != ':')
                return false;
            buf_adds(r->out, ": ");
            py_space(r);
            if (!py_value(r))
                return false;
            py_space(r);
        }
        if (r->p < r->end && *r->p == ',')
            r->p++;
        else if (r->p >= r->end || *r->p != close)
            return false;
    }
    r->p++;
    buf_addc(r->out, dict ? '}' : ']');
    return true;
}

static bool py_value(struct py_reader *r)
{
    if (r->p >= r->end || ++r->depth > 100)
        return false;
    bool ok;
    char c = *r->p;
    if (c == '"' || c == '\'') {
        ok = py_string(r);
    } else if (c == '[' || c == '(') {
        ok = py_items(r, c == '[' ? ']' : ')', false);
    } else if (c == '{') {
        ok = py_items(r, '}', true);
    } else if ((c >= '0' && c <= '9') || c == '-' || c == '.' || c == '+') {
        const char *from = r->p;
        while (r->p < r->end && ((*r->p >= '0' && *r->p <= '9') || strchr("+-.eE", *r->p)))
            r->p++;
        struct buf t = {0};
        buf_add(&t, from, (size_t)(r->p - from));
        json_t *j = json_loadb(t.p, t.len, JSON_DECODE_ANY, NULL);
        ok = j != NULL;
        if (ok)
            buf_add(r->out, t.p, t.len);
        json_decref(j);
        buf_clear(&t);
    } else {
        ok = py_word(r, "True", "true") || py_word(r, "False", "false") ||
             py_word(r, "None", "null") || py_word(r, "true", "true") ||
             py_word(r, "false", "false") || py_word(r, "null", "null");
    }
    r->depth--;
    return ok;
}

/* Emits `"key": value` with the value as JSON. A value that is not a literal becomes a string. */
static void py_arg_done(struct chat_parser *p)
{
    struct py_scan *s = &p->py;
    struct buf j = {0};
    const char *value = s->value.p ? s->value.p : "";
    size_t n = s->value.len;
    buf_adds(&j, s->any ? ", \"" : "{\"");
    json_escape(&j, s->key.p, s->key.len);
    buf_adds(&j, "\": ");
    while (n && is_space(value[n - 1]))
        n--;
    size_t mark = j.len;
    struct py_reader r = {.p = value, .end = value + n, .out = &j};
    py_space(&r);
    if (!py_value(&r) || r.p != r.end) {
        j.len = mark;
        buf_addc(&j, '"');
        json_escape(&j, value, n);
        buf_addc(&j, '"');
    }
    chat_call_args(p, j.p, j.len);
    buf_clear(&j);
    s->any = true;
}

static void py_begin(struct chat_parser *p)
{
    if (!p->call_open)
        chat_call_begin(p, p->py.name.p, p->py.name.len);
}

enum scan_result py_scan_feed(struct chat_parser *p, char c)
{
    struct py_scan *s = &p->py;
    switch (s->state) {
    case P_NAME:
        if (is_ident(c, !s->name.len)) {
            buf_addc(&s->name, c);
            return SCAN_MORE;
        }
        if (is_space(c) && !s->name.len)
            return SCAN_MORE;
        s->state = P_ARG;
        return c == '(' && s->name.len ? SCAN_MORE : SCAN_BAD;
    case P_ARG:
        if (is_space(c))
            return SCAN_MORE;
        if (c == ')') {
            py_begin(p);
            chat_call_args(p, s->any ? "}" : "{}", s->any ? 1 : 2);
            return chat_call_end(p) ? SCAN_DONE : SCAN_BAD;
        }
        if (!is_ident(c, true))
            return SCAN_BAD;
        buf_reset(&s->key);
        buf_addc(&s->key, c);
        s->state = P_KEY;
        return SCAN_MORE;
    case P_KEY:
        if (is_ident(c, false)) {
            buf_addc(&s->key, c);
            return SCAN_MORE;
        }
        if (is_space(c))
            return SCAN_MORE;
        if (c != '=')
            return SCAN_BAD;
        py_begin(p);
        buf_reset(&s->value);
        s->depth = 0;
        s->state = P_VALUE;
        return SCAN_MORE;
    default:
        if (s->quote) {
            if (s->escape)
                s->escape = false;
            else if (c == '\\')
                s->escape = true;
            else if (c == s->quote)
                s->quote = 0;
        } else if (c == '"' || c == '\'') {
            s->quote = c;
        } else if (c == '(' || c == '[' || c == '{') {
            s->depth++;
        } else if (s->depth && (c == ')' || c == ']' || c == '}')) {
            s->depth--;
        } else if (!s->depth && (c == ',' || c == ')')) {
            py_arg_done(p);
            s->state = P_ARG;
            return c == ')' ? py_scan_feed(p, c) : SCAN_MORE;
        } else if (!s->depth && (c == ']' || c == '}')) {
            return SCAN_BAD; /* unbalanced bracket */
        }
        buf_addc(&s->value, c);
        return SCAN_MORE;
    }
}

/* ------------------------------------------------------------------ XML parameters */

const json_t *chat_parameters(const struct chat_parser *p, const char *function)
{
    for (size_t i = 0; i < json_array_size(p->opt.schema); i++) {
        const json_t *t = json_array_get(p->opt.schema, i);
        const json_t *f = json_object_get(t, "function");
        f = f ? f : t;
        const char *name = json_string_value(json_object_get(f, "name"));
        if (name && !strcmp(name, function))
            return json_object_get(f, "parameters");
    }
    return NULL;
}

bool xml_is_string(const struct chat_parser *p, const char *function, const char *param)
{
    const json_t *props = json_object_get(chat_parameters(p, function), "properties");
    const char *type = json_string_value(json_object_get(json_object_get(props, param), "type"));
    return type && !strcmp(type, "string");
}

bool xml_has_type(const struct chat_parser *p, const char *function, const char *param)
{
    const json_t *props = json_object_get(chat_parameters(p, function), "properties");
    return json_object_get(json_object_get(props, param), "type") != NULL;
}

void xml_value(struct chat_parser *p, const char *s, size_t n)
{
    struct buf b = {0};
    /* Models often write constants in Python's spelling. */
    static const struct {
        const char *python, *json;
    } words[] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (n == strlen(words[i].python) && !memcmp(s, words[i].python, n)) {
            chat_call_args(p, words[i].json, strlen(words[i].json));
            return;
        }
    json_t *j = n ? json_loadb(s, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (j && !json_is_string(j)) {
        chat_call_args(p, s, n);
    } else {
        buf_addc(&b, '"');
        json_escape(&b, s, n);
        buf_addc(&b, '"');
        chat_call_args(p, b.p, b.len);
    }
    json_decref(j);
    buf_clear(&b);
}
