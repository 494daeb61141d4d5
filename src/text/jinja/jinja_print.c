/*
 * Text of Jinja values: Python's str() and repr(), JSON in the format of json.dumps, pprint, HTML
 * escapes. All output goes through jprint_raw into one buf, which enforces the size limit. A string
 * value is created by printing it and moving the tail out (jval_take).
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void jprint_raw(struct jstate *st, const char *s, size_t n)
{
    if (n > st->out_limit || st->out->len > st->out_limit - n)
        jinja_fail(st, "the output of the template is too long (more than %zu MB)",
                   st->out_limit >> 20);
    if (n)
        buf_add(st->out, s, n);
}

static void put(struct jstate *st, const char *s)
{
    jprint_raw(st, s, strlen(s));
}

static void put_int(struct jstate *st, int64_t i)
{
    char t[24];
    jprint_raw(st, t, (size_t)snprintf(t, sizeof(t), "%lld", (long long)i));
}

void jprint_float(struct jstate *st, double f)
{
    char t[40], digits[24];
    if (isnan(f) || isinf(f)) {
        put(st, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    /* The fewest digits that round-trip; fewer than 15 are tried only for denormals. */
    int prec = fabs(f) < 0x1p-1022 ? 1 : 15;
    do
        snprintf(t, sizeof(t), "%.*e", prec - 1, f);
    while (strtod(t, NULL) != f && ++prec <= 17);
    char *e = strchr(t, 'e');
    int exp = atoi(e + 1), n = 0;
    for (char *p = t; p < e; p++) {
        if (*p >= '0' && *p <= '9')
            digits[n++] = *p;
    }
    while (n > 1 && digits[n - 1] == '0')
        n--;
    digits[n] = 0;
    if (signbit(f))
        put(st, "-");
    if (exp < -4 || exp >= 16) {
        jprint_raw(st, digits, 1);
        if (n > 1) {
            put(st, ".");
            put(st, digits + 1);
        }
        snprintf(t, sizeof(t), "e%c%02d", exp < 0 ? '-' : '+', abs(exp));
        put(st, t);
    } else if (exp < 0) {
        put(st, "0.");
        for (int i = -1; i > exp; i--)
            put(st, "0");
        put(st, digits);
    } else {
        for (int i = 0; i <= exp; i++)
            jprint_raw(st, i < n ? &digits[i] : "0", 1);
        put(st, ".");
        put(st, n > exp + 1 ? digits + exp + 1 : "0");
    }
}

static void repr_str(struct jstate *st, struct jval s)
{
    char quote = memchr(s.u.s, '\'', s.len) && !memchr(s.u.s, '"', s.len) ? '"' : '\'', t[16];
    jcharge(st, s.len / 16);
    jprint_raw(st, &quote, 1);
    for (size_t i = 0; i < s.len;) {
        size_t from = i;
        int cp = jutf8_next(s.u.s, s.len, &i);
        if (cp == quote || cp == '\\') {
            t[0] = '\\';
            t[1] = (char)cp;
            jprint_raw(st, t, 2);
        } else if (cp == '\n' || cp == '\r' || cp == '\t') {
            put(st, cp == '\n' ? "\\n" : cp == '\r' ? "\\r" : "\\t");
        } else if (cp < 0 || jcp_isprintable(cp)) {
            jprint_raw(st, s.u.s + from, i - from);
        } else {
            snprintf(t, sizeof(t),
                     cp < 0x100     ? "\\x%02x"
                     : cp < 0x10000 ? "\\u%04x"
                                    : "\\U%08x",
                     (unsigned)cp);
            put(st, t);
        }
    }
    jprint_raw(st, &quote, 1);
}

static void jprint_repr(struct jstate *st, struct jval v, int depth);

static void repr_list(struct jstate *st, struct jlist *l, char open, char close, int depth)
{
    jprint_raw(st, &open, 1);
    for (uint32_t i = 0; i < l->n; i++) {
        if (i)
            put(st, ", ");
        jprint_repr(st, l->v[i], depth + 1);
    }
    if (open == '(' && l->n == 1)
        put(st, ",");
    jprint_raw(st, &close, 1);
}

static void repr_dict(struct jstate *st, struct jdict *d, int depth)
{
    put(st, "{");
    for (uint32_t i = 0; i < d->n; i++) {
        if (i)
            put(st, ", ");
        jprint_repr(st, d->e[i].k, depth + 1);
        put(st, ": ");
        jprint_repr(st, d->e[i].v, depth + 1);
    }
    put(st, "}");
}

static void jprint_repr(struct jstate *st, struct jval v, int depth)
{
    jcharge(st, 1);
    if (depth > JINJA_MAX_DATA)
        jinja_fail(st, "data nested too deeply to print");
    switch ((enum jtype)v.type) {
    case JT_MISSING:
    case JT_UNDEF:
        put(st, "Undefined");
        break;
    case JT_NONE:
        put(st, "None");
        break;
    case JT_BOOL:
        put(st, v.u.b ? "True" : "False");
        break;
    case JT_INT:
        put_int(st, v.u.i);
        break;
    case JT_FLOAT:
        jprint_float(st, v.u.f);
        break;
    case JT_STR:
        if (v.flags & STR_MARKUP)
            put(st, "Markup(");
        repr_str(st, v);
        if (v.flags & STR_MARKUP)
            put(st, ")");
        break;
    case JT_LIST:
        repr_list(st, v.u.list, '[', ']', depth);
        break;
    case JT_TUPLE:
        repr_list(st, v.u.list, '(', ')', depth);
        break;
    case JT_DICT:
        repr_dict(st, v.u.dict, depth);
        break;
    case JT_VIEW:
        put(st, jval_typename(v));
        put(st, "(");
        repr_list(st, jval_tolist(st, v), '[', ']', depth);
        put(st, ")");
        break;
    case JT_RANGE:
        put(st, "range(");
        put_int(st, v.u.range->start);
        put(st, ", ");
        put_int(st, v.u.range->stop);
        if (v.u.range->step != 1) {
            put(st, ", ");
            put_int(st, v.u.range->step);
        }
        put(st, ")");
        break;
    case JT_NS:
        put(st, "<Namespace ");
        repr_dict(st, v.u.dict, depth);
        put(st, ">");
        break;
    case JT_MACRO:
        put(st, "<Macro ");
        repr_str(st, v.u.macro->node->val);
        put(st, ">");
        break;
    case JT_LOOP: {
        put(st, "<LoopContext ");
        put_int(st, v.u.loop->index0 + 1);
        put(st, "/");
        put_int(st, jval_len(st, v));
        put(st, ">");
        break;
    }
    case JT_FUNC:
        put(st, "<function ");
        put(st, jfunc_name(v.u.func));
        put(st, ">");
        break;
    case JT_ITER:
    case JT_METHOD:
    case JT_CYCLER:
    case JT_JOINER:
        put(st, "<");
        put(st, jval_typename(v));
        put(st, " object>");
        break;
    }
}

void jprint_str(struct jstate *st, struct jval v)
{
    if (v.type == JT_STR)
        jprint_raw(st, v.u.s, v.len);
    else if (v.type != JT_UNDEF)
        jprint_repr(st, v, 0);
}

struct jval jval_tostr(struct jstate *st, struct jval v)
{
    if (v.type == JT_STR)
        return v;
    size_t mark = st->out->len;
    jprint_str(st, v);
    return jval_take(st, st->out, mark);
}

struct jval jval_repr(struct jstate *st, struct jval v)
{
    size_t mark = st->out->len;
    jprint_repr(st, v, 0);
    return jval_take(st, st->out, mark);
}

/* ------------------------------------------------------------------ HTML */

static void jprint_escaped(struct jstate *st, struct jval v)
{
    struct jval s = jval_tostr(st, v);
    jcharge(st, s.len / 16);
    for (uint32_t i = 0, from = 0; i <= s.len; i++) {
        const char *e = NULL;
        if (i < s.len) {
            switch (literal_plain((uint8_t)s.u.s[i])) {
            case '&':
                e = "&amp;";
                break;
            case '<':
                e = "&lt;";
                break;
            case '>':
                e = "&gt;";
                break;
            case '\'':
                e = "&#39;";
                break;
            case '"':
                e = "&#34;";
                break;
            default:
                continue;
            }
        }
        jprint_raw(st, s.u.s + from, i - from);
        if (e)
            put(st, e);
        from = i + 1;
    }
}

struct jval jval_escape(struct jstate *st, struct jval v)
{
    if (v.type == JT_STR && v.flags & STR_MARKUP)
        return v;
    size_t mark = st->out->len;
    jprint_escaped(st, v);
    v = jval_take(st, st->out, mark);
    v.flags |= STR_MARKUP;
    return v;
}

/* ------------------------------------------------------------------ JSON */

struct json_style {
    bool ascii, sort;
    bool pretty;
    struct jval indent; /* string, if pretty */
    struct jval comma, colon;
};

static void json_str(struct jstate *st, struct jval s, bool ascii)
{
    static const char special[] = "\"\\\n\r\t\f\b", letter[] = "\"\\nrtfb";
    char t[16];
    jcharge(st, s.len / 16);
    put(st, "\"");
    size_t from = 0;
    for (size_t i = 0; i < s.len;) {
        uint8_t c = (uint8_t)s.u.s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && (!ascii || c < 0x7f || literal_is(c))) {
            i++;
            continue;
        }
        jprint_raw(st, s.u.s + from, i - from);
        int cp = jutf8_next(s.u.s, s.len, &i);
        from = i;
        const char *k = cp > 0 && cp < 128 ? strchr(special, cp) : NULL;
        if (k) {
            t[0] = '\\';
            t[1] = letter[k - special];
            jprint_raw(st, t, 2);
        } else if (cp >= 0x10000) {
            snprintf(t, sizeof(t), "\\u%04x\\u%04x", (unsigned)(0xd800 + ((cp - 0x10000) >> 10)),
                     (unsigned)(0xdc00 + ((cp - 0x10000) & 0x3ff)));
            put(st, t);
        } else {
            snprintf(t, sizeof(t), "\\u%04x", (unsigned)(cp < 0 ? 0xfffd : cp));
            put(st, t);
        }
    }
    jprint_raw(st, s.u.s + from, s.len - from);
    put(st, "\"");
}

static void json_newline(struct jstate *st, const struct json_style *y, int level)
{
    if (!y->pretty)
        return;
    put(st, "\n");
    for (int i = 0; i < level; i++)
        jprint_raw(st, y->indent.u.s, y->indent.len);
}

static void json_float(struct jstate *st, double f)
{
    if (isnan(f) || isinf(f))
        put(st, isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity");
    else
        jprint_float(st, f);
}

static void json_value(struct jstate *st, struct jval v, const struct json_style *y, int level);

static void json_key(struct jstate *st, struct jval k, bool ascii)
{
    if (k.type == JT_STR) {
        json_str(st, k, ascii);
        return;
    }
    if (k.type != JT_INT && k.type != JT_FLOAT && k.type != JT_BOOL && k.type != JT_NONE)
        jinja_fail(st, "keys must be str, int, float, bool or None, not %s", jval_typename(k));
    put(st, "\"");
    if (k.type == JT_NONE)
        put(st, "null");
    else if (k.type == JT_BOOL)
        put(st, k.u.b ? "true" : "false");
    else if (k.type == JT_FLOAT)
        json_float(st, k.u.f);
    else
        put_int(st, k.u.i);
    put(st, "\"");
}

static void json_dict(struct jstate *st, struct jdict *d, const struct json_style *y, int level)
{
    put(st, "{");
    const struct jpair *e = d->e;
    if (y->sort)
        e = jdict_sorted(st, d);
    for (uint32_t i = 0; i < d->n; i++) {
        if (i)
            jprint_raw(st, y->comma.u.s, y->comma.len);
        json_newline(st, y, level + 1);
        json_key(st, e[i].k, y->ascii);
        jprint_raw(st, y->colon.u.s, y->colon.len);
        json_value(st, e[i].v, y, level + 1);
    }
    if (d->n)
        json_newline(st, y, level);
    put(st, "}");
}

static void json_value(struct jstate *st, struct jval v, const struct json_style *y, int level)
{
    jcharge(st, 1);
    if (level > JINJA_MAX_DATA)
        jinja_fail(st, "data nested too deeply for JSON");
    switch ((enum jtype)v.type) {
    case JT_NONE:
        put(st, "null");
        break;
    case JT_BOOL:
        put(st, v.u.b ? "true" : "false");
        break;
    case JT_INT:
        put_int(st, v.u.i);
        break;
    case JT_FLOAT:
        json_float(st, v.u.f);
        break;
    case JT_STR:
        json_str(st, v, y->ascii);
        break;
    case JT_LIST:
    case JT_TUPLE: {
        struct jlist *l = v.u.list;
        put(st, "[");
        for (uint32_t i = 0; i < l->n; i++) {
            if (i)
                jprint_raw(st, y->comma.u.s, y->comma.len);
            json_newline(st, y, level + 1);
            json_value(st, l->v[i], y, level + 1);
        }
        if (l->n)
            json_newline(st, y, level);
        put(st, "]");
        break;
    }
    case JT_DICT:
        json_dict(st, v.u.dict, y, level);
        break;
    default:
        jinja_fail(st, "Object of type %s is not JSON serializable", jval_typename(v));
    }
}

void jprint_json(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"ensure_ascii", "indent", "separators", "sort_keys"};
    struct jval arg[4];
    jargs_bind(st, "tojson", a, names, 4, 0, arg);
    struct json_style y = {.ascii = jval_true(arg[0]),
                           .sort = jval_true(arg[3]),
                           .comma = jval_cstr(", "),
                           .colon = jval_cstr(": ")};
    if (arg[1].type != JT_MISSING && arg[1].type != JT_NONE) {
        y.pretty = true;
        y.comma = jval_cstr(",");
        if (arg[1].type == JT_STR)
            y.indent = arg[1];
        else
            y.indent =
                jstr_pad(st, jval_cstr(""), jarg_int(st, arg[1], "indent"), jval_cstr(" "), 'l');
    }
    if (arg[2].type != JT_MISSING && arg[2].type != JT_NONE) {
        struct jlist *l = jval_tolist(st, arg[2]);
        if (l->n != 2)
            jinja_fail(st, "separators must be a pair of strings");
        y.comma = jarg_str(st, l->v[0], "separators");
        y.colon = jarg_str(st, l->v[1], "separators");
    }
    json_value(st, v, &y, 0);
}

/* ------------------------------------------------------------------ pprint */

/* pprint.pformat with width 80: on one line if it fits, else one element per line. */
static void pretty(struct jstate *st, struct jval v, int indent, int after, int depth)
{
    bool seq = v.type == JT_LIST || v.type == JT_TUPLE;
    if (depth > JINJA_MAX_DATA)
        jinja_fail(st, "data nested too deeply to print");
    if (v.type == JT_DICT) { /* sorted at every level, also when it fits on one line */
        struct jdict *d = jalloc(st, 1, sizeof(*d));
        d->e = jdict_sorted(st, v.u.dict);
        d->n = d->cap = v.u.dict->n;
        v.u.dict = d;
    }
    size_t mark = st->out->len;
    if (!seq && v.type != JT_DICT) {
        jprint_repr(st, v, depth);
        return;
    }
    uint32_t n = seq ? v.u.list->n : v.u.dict->n;
    for (int wrap = 0; wrap < 2; wrap++) {
        st->out->len = mark;
        put(st, seq ? (v.type == JT_LIST ? "[" : "(") : "{");
        for (uint32_t i = 0; i < n; i++) {
            if (i)
                put(st, wrap ? ",\n" : ", ");
            for (int k = 0; wrap && i && k <= indent; k++)
                put(st, " ");
            size_t at = st->out->len;
            if (!seq) {
                jprint_repr(st, v.u.dict->e[i].k, depth);
                put(st, ": ");
            }
            struct jval item = seq ? v.u.list->v[i] : v.u.dict->e[i].v;
            int in = indent + 1 + (int)(st->out->len - at);
            pretty(st, item, wrap ? in : -10000, i + 1 == n ? after + 1 : 1, depth + 1);
        }
        put(st, v.type == JT_TUPLE && n == 1 ? ",)" : seq ? (v.type == JT_LIST ? "]" : ")") : "}");
        if ((int64_t)(st->out->len - mark) <= 80 - indent - after)
            break;
        jcharge(st, st->out->len - mark);
    }
}

void jprint_pretty(struct jstate *st, struct jval v)
{
    pretty(st, v, 0, 0, 0);
}
