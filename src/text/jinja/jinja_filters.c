/*
 * Jinja filters on single values: text, numbers, defaults, formatting. Filters over sequences are
 * in jinja_seq.c. One table maps names to functions; a filter's number is its index.
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct jval filter_fn(struct jstate *st, struct jval v, const struct jargs *a);

/* Fails if there are arguments. */
static void no_args(struct jstate *st, const char *what, const struct jargs *a)
{
    jargs_bind(st, what, a, NULL, 0, 0, NULL);
}

/* str(v) that preserves Markup, like markupsafe.soft_str. */
static struct jval soft_str(struct jstate *st, struct jval v)
{
    return jval_tostr(st, v);
}

static struct jval f_abs(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "abs", a);
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (v.type == JT_FLOAT)
        return jval_float(fabs(v.u.f));
    if (v.type != JT_INT && v.type != JT_BOOL)
        jinja_fail(st, "bad operand type for abs(): '%s'", jval_typename(v));
    int64_t i = v.type == JT_INT ? v.u.i : v.u.b;
    if (i == INT64_MIN)
        jinja_fail(st, "integer result does not fit in 64 bits");
    return jval_int(i < 0 ? -i : i);
}

static struct jval f_attr(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"name"};
    struct jval name, out;
    jargs_bind(st, "attr", a, names, 1, 1, &name);
    name = jarg_str(st, jval_tostr(st, name), "attr");
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (jattr_get(st, v, name, jmethod_lookup(name.u.s, name.len), &out))
        return out;
    return jval_undef(st, UNDEF_ATTR, name, v, NULL);
}

static struct jval f_capitalize(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "capitalize", a);
    return jstr_case(st, soft_str(st, v), 'c');
}

static struct jval f_lower(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "lower", a);
    return jstr_case(st, soft_str(st, v), 'l');
}

static struct jval f_upper(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "upper", a);
    return jstr_case(st, soft_str(st, v), 'u');
}

static bool title_break(int cp)
{
    return jcp_isspace(cp) || cp == '-' || cp == '(' || cp == '{' || cp == '[' || cp == '<';
}

static struct jval f_title(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "title", a);
    struct jval s = soft_str(st, v);
    size_t mark = st->out->len;
    jcharge(st, s.len);
    for (size_t i = 0; i < s.len;) {
        size_t from = i, end;
        bool first_break = title_break(jutf8_next(s.u.s, s.len, &i));
        for (end = i; i < s.len; end = i) {
            size_t k = i;
            if (title_break(jutf8_next(s.u.s, s.len, &k)) != first_break)
                break;
            i = k;
        }
        size_t one = from;
        jutf8_next(s.u.s, s.len, &one);
        jprint_str(st, jstr_case(st, jval_str(s.u.s + from, one - from), 'u'));
        jprint_str(st, jstr_case(st, jval_str(s.u.s + one, end - one), 'l'));
        i = end;
    }
    return jval_take(st, st->out, mark);
}

static struct jval f_center(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"width"};
    struct jval w;
    jargs_bind(st, "center", a, names, 1, 0, &w);
    return jstr_pad(st, soft_str(st, v), w.type == JT_MISSING ? 80 : jarg_int(st, w, "center"),
                    jval_cstr(" "), 'c');
}

static struct jval f_default(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"default_value", "boolean"};
    struct jval arg[2];
    jargs_bind(st, "default", a, names, 2, 0, arg);
    if (v.type != JT_UNDEF && !(jval_true(arg[1]) && !jval_true(v)))
        return v;
    return arg[0].type == JT_MISSING ? jval_str("", 0) : arg[0];
}

static struct jval f_escape(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "escape", a);
    return jval_escape(st, v);
}

static struct jval f_forceescape(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "forceescape", a);
    v = jval_tostr(st, v);
    v.flags &= (uint8_t)~STR_MARKUP;
    return jval_escape(st, v);
}

static struct jval f_safe(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "safe", a);
    v = jval_tostr(st, v);
    v.flags |= STR_MARKUP;
    return v;
}

static struct jval f_string(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "string", a);
    return soft_str(st, v);
}

static struct jval f_filesizeformat(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"binary"};
    static const char *const units[2][8] = {
        {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"},
        {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"}};
    struct jval arg;
    double f;
    char t[64];
    jargs_bind(st, "filesizeformat", a, names, 1, 0, &arg);
    bool binary = jval_true(arg);
    if (jval_isnum(v))
        f = jval_todouble(v);
    else if (v.type != JT_STR || !jparse_float(v, &f))
        jinja_fail(st, "could not convert to float: %s", jval_typename(v));
    double base = binary ? 1024 : 1000, unit = base;
    int i = 0;
    if (f == 1) {
        strcpy(t, "1 Byte");
    } else if (f < base) {
        snprintf(t, sizeof(t), "%.0f Bytes", trunc(f));
    } else {
        for (unit = base * base; i < 7 && f >= unit; i++)
            unit *= base;
        snprintf(t, sizeof(t), "%.1f %s", base * f / unit, units[binary][i]);
    }
    return jval_copy(st, t, strlen(t));
}

static struct jval f_float(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"default"};
    struct jval def;
    double f;
    jargs_bind(st, "float", a, names, 1, 0, &def);
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (jval_isnum(v))
        return jval_float(jval_todouble(v));
    if (v.type == JT_STR && jparse_float(v, &f))
        return jval_float(f);
    return def.type == JT_MISSING ? jval_float(0) : def;
}

static struct jval f_int(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"default", "base"};
    struct jval arg[2];
    int64_t i;
    double f = NAN;
    jargs_bind(st, "int", a, names, 2, 0, arg);
    int64_t base = arg[1].type == JT_MISSING ? 10 : jarg_int(st, arg[1], "int");
    if (base != 0 && (base < 2 || base > 36))
        jinja_fail(st, "int() base must be >= 2 and <= 36, or 0");
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (v.type == JT_INT)
        return v;
    if (v.type == JT_BOOL)
        return jval_int(v.u.b);
    if (v.type == JT_STR && jparse_int(v, (int)base, &i))
        return jval_int(i);
    if (v.type == JT_FLOAT)
        f = v.u.f;
    else if (v.type == JT_STR && !jparse_float(v, &f))
        f = NAN;
    if (fabs(f) < 0x1p63)
        return jval_int((int64_t)f);
    if (v.type == JT_FLOAT && isinf(f))
        jinja_fail(st, "cannot convert float infinity to integer");
    return arg[0].type == JT_MISSING ? jval_int(0) : arg[0];
}

static struct jval f_format(struct jstate *st, struct jval v, const struct jargs *a)
{
    struct jval arg;
    if (a->n && a->n_kw)
        jinja_fail(st, "can't handle positional and keyword arguments at the same time");
    if (a->n_kw) {
        struct jdict *d = jdict_new(st, (uint32_t)a->n_kw);
        for (int i = 0; i < a->n_kw; i++)
            jdict_put(st, d, a->kw[i].name, a->kw[i].val);
        arg = jval_dict(d);
    } else {
        arg = jval_list(st, JT_TUPLE, (size_t)a->n);
        if (a->n)
            memcpy(arg.u.list->v, a->pos, (size_t)a->n * sizeof(struct jval));
    }
    return jformat_percent(st, soft_str(st, v), arg);
}

static struct jval f_indent(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"width", "first", "blank"};
    struct jval arg[3];
    jargs_bind(st, "indent", a, names, 3, 0, arg);
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    jarg_str(st, v, "indent");
    struct jval in = jval_cstr("    ");
    if (arg[0].type == JT_STR)
        in = arg[0];
    else if (arg[0].type != JT_MISSING)
        in = jstr_pad(st, jval_str("", 0), jarg_int(st, arg[0], "indent"), jval_cstr(" "), 'l');
    bool blank = jval_true(arg[2]);
    struct jlist *l = jstr_splitlines(st, jstr_concat(st, v, jval_cstr("\n")), false);
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < l->n; i++) {
        if (i)
            jprint_raw(st, "\n", 1);
        if (i ? l->v[i].len || blank : jval_true(arg[1]))
            jprint_raw(st, in.u.s, in.len);
        jprint_str(st, l->v[i]);
    }
    struct jval r = jval_take(st, st->out, mark);
    r.flags |= v.flags & STR_MARKUP;
    return r;
}

static struct jval f_pprint(struct jstate *st, struct jval v, const struct jargs *a)
{
    size_t mark = st->out->len;
    no_args(st, "pprint", a);
    jprint_pretty(st, v);
    return jval_take(st, st->out, mark);
}

static struct jval f_replace(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"old", "new", "count"};
    struct jval arg[3];
    jargs_bind(st, "replace", a, names, 3, 2, arg);
    int64_t n =
        arg[2].type == JT_MISSING || arg[2].type == JT_NONE ? -1 : jarg_int(st, arg[2], "replace");
    struct jval r =
        jstr_replace(st, jval_tostr(st, v), jval_tostr(st, arg[0]), jval_tostr(st, arg[1]), n);
    r.flags &= (uint8_t)~STR_MARKUP;
    return r;
}

/* Python's round(): exact, half to even in decimal, as printf rounds. */
static double round_to(double f, int64_t places)
{
    char t[800];
    if (!isfinite(f) || places > 340)
        return f;
    if (places < -310)
        return copysign(0.0, f);
    if (places >= 0) {
        snprintf(t, sizeof(t), "%.*f", (int)places, f);
        double r;
        return jparse_float(jval_cstr(t), &r) ? r : f;
    }
    double p = pow(10, (double)-places);
    return nearbyint(f / p) * p;
}

static struct jval f_round(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"precision", "method"};
    struct jval arg[2];
    jargs_bind(st, "round", a, names, 2, 0, arg);
    int64_t places = arg[0].type == JT_MISSING ? 0 : jarg_int(st, arg[0], "round");
    struct jval how = arg[1].type == JT_MISSING ? jval_cstr("common") : arg[1];
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (!jval_isnum(v))
        jinja_fail(st, "type %s doesn't define __round__ method", jval_typename(v));
    if (jval_is(how, "common")) {
        if (v.type == JT_FLOAT)
            return jval_float(round_to(v.u.f, places));
        if (places >= 0)
            return jval_int(v.type == JT_INT ? v.u.i : v.u.b);
        return jval_int((int64_t)round_to(jval_todouble(v), places));
    }
    if (!jval_is(how, "ceil") && !jval_is(how, "floor"))
        jinja_fail(st, "method must be common, ceil or floor");
    double p = pow(10, (double)places), f = jval_todouble(v) * p;
    if (!isfinite(f))
        jinja_fail(st, "cannot convert float infinity to integer");
    return jval_float((jval_is(how, "ceil") ? ceil(f) : floor(f)) / p);
}

static struct jval f_striptags(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "striptags", a);
    struct jval s = jval_tostr(st, v);
    size_t mark = st->out->len;
    bool space = false, any = false;
    jcharge(st, s.len);
    for (uint32_t i = 0; i < s.len;) {
        static const struct {
            const char *name, *text;
        } ent[] = {{"&amp;", "&"},  {"&lt;", "<"},    {"&gt;", ">"},         {"&#39;", "'"},
                   {"&#34;", "\""}, {"&quot;", "\""}, {"&nbsp;", "\xc2\xa0"}};
        const char *close = NULL, *text = s.u.s + i;
        size_t n = 1;
        if (i + 4 <= s.len && !memcmp(text, "<!--", 4))
            close = (close = jstr_find(text, s.len - i, "-->", 3)) ? close + 2 : NULL;
        else if (s.u.s[i] == '<')
            close = memchr(text, '>', s.len - i);
        if (close) {
            i = (uint32_t)(close - s.u.s) + 1;
            continue;
        }
        size_t k = i;
        if (jcp_isspace(jutf8_next(s.u.s, s.len, &k))) {
            space = true;
            i = (uint32_t)k;
            continue;
        }
        uint32_t next = (uint32_t)k;
        n = k - i;
        for (size_t e = 0; e < sizeof(ent) / sizeof(ent[0]); e++) {
            size_t m = strlen(ent[e].name);
            if (i + m <= s.len && !memcmp(text, ent[e].name, m)) {
                next = i + (uint32_t)m;
                text = ent[e].text;
                n = strlen(text);
                break;
            }
        }
        if (space && any)
            jprint_raw(st, " ", 1);
        jprint_raw(st, text, n);
        any = true;
        space = false;
        i = next;
    }
    return jval_take(st, st->out, mark);
}

static struct jval f_tojson(struct jstate *st, struct jval v, const struct jargs *a)
{
    size_t mark = st->out->len;
    jprint_json(st, v, a);
    return jval_take(st, st->out, mark);
}

static struct jval f_trim(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"chars"};
    struct jval chars;
    jargs_bind(st, "trim", a, names, 1, 0, &chars);
    if (chars.type != JT_MISSING && chars.type != JT_NONE)
        jarg_str(st, chars, "trim");
    else
        chars = JV_NONE;
    return jstr_strip(st, soft_str(st, v), chars, STRIP_LEFT | STRIP_RIGHT);
}

static struct jval f_truncate(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"length", "killwords", "end", "leeway"};
    struct jval arg[4];
    jargs_bind(st, "truncate", a, names, 4, 0, arg);
    int64_t length = arg[0].type == JT_MISSING ? 255 : jarg_int(st, arg[0], "truncate");
    struct jval end = arg[2].type == JT_MISSING ? jval_cstr("...") : arg[2];
    int64_t leeway =
        arg[3].type == JT_MISSING || arg[3].type == JT_NONE ? 5 : jarg_int(st, arg[3], "truncate");
    int64_t n_end = jstr_len(st, jarg_str(st, end, "truncate"));
    if (length < n_end || leeway < 0)
        jinja_fail(st, "expected length >= %lld and leeway >= 0", (long long)n_end);
    if (jval_len(st, v) - leeway <= length)
        return v;
    jarg_str(st, v, "truncate");
    struct jval head = jstr_sub(st, v, 0, length - n_end);
    if (!jval_true(arg[1])) {
        uint32_t n = head.len;
        while (n && head.u.s[n - 1] != ' ')
            n--;
        head.len = n ? n - 1 : head.len;
    }
    return jstr_concat(st, head, end);
}

static void url_quote(struct jstate *st, struct jval v, bool query)
{
    struct jval s = jval_tostr(st, v);
    char t[8];
    jcharge(st, s.len / 4);
    for (uint32_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.u.s[i];
        if ((c < 128 && c != 0 && jcp_isword(c)) || (c && strchr("-.~", c)) ||
            (c == '/' && !query)) {
            jprint_raw(st, (char *)&c, 1);
        } else if (c == ' ' && query) {
            jprint_raw(st, "+", 1);
        } else {
            snprintf(t, sizeof(t), "%%%02X", c);
            jprint_raw(st, t, 3);
        }
    }
}

static struct jval f_urlencode(struct jstate *st, struct jval v, const struct jargs *a)
{
    size_t mark = st->out->len;
    no_args(st, "urlencode", a);
    if (v.type == JT_STR || !jval_iterable(v)) {
        url_quote(st, v, false);
        return jval_take(st, st->out, mark);
    }
    if (v.type == JT_DICT) {
        struct jmethod items = {v, jmethod_lookup("items", 5)};
        v = jmethod_call(st, &items, &(struct jargs){0});
    }
    struct jlist *l = jval_tolist(st, v);
    for (uint32_t i = 0; i < l->n; i++) {
        struct jlist *pair = jval_tolist(st, l->v[i]);
        if (pair->n != 2)
            jinja_fail(st, "urlencode expects pairs");
        if (i)
            jprint_raw(st, "&", 1);
        url_quote(st, pair->v[0], true);
        jprint_raw(st, "=", 1);
        url_quote(st, pair->v[1], true);
    }
    return jval_take(st, st->out, mark);
}

static struct jval f_wordcount(struct jstate *st, struct jval v, const struct jargs *a)
{
    no_args(st, "wordcount", a);
    struct jval s = soft_str(st, v);
    int64_t n = 0;
    bool in = false;
    jcharge(st, s.len / 4);
    for (size_t i = 0; i < s.len;) {
        bool word = jcp_isword(jutf8_next(s.u.s, s.len, &i));
        n += word && !in;
        in = word;
    }
    return jval_int(n);
}

/* One line of textwrap.wrap without hyphen breaks. Long words are split if `cut`. */
static void wrap_line(struct jstate *st, struct jval line, int64_t width, bool cut, struct jval sep,
                      bool *any)
{
    int64_t col = 0;
    bool wrote = false;
    for (size_t i = 0; i < line.len;) {
        size_t from = i, k;
        while (i < line.len && (line.u.s[i] == ' ' || line.u.s[i] == '\t'))
            i++;
        size_t word = i;
        while (i < line.len && line.u.s[i] != ' ' && line.u.s[i] != '\t')
            i++;
        int64_t gap = wrote || from == 0 ? (int64_t)(word - from) : 0,
                len = jstr_len(st, jval_str(line.u.s + word, i - word));
        jcharge(st, 1);
        if (!len)
            break;
        if (wrote && col + gap + len > width) {
            jprint_raw(st, sep.u.s, sep.len);
            col = 0;
            gap = 0;
        }
        jprint_raw(st, line.u.s + word - gap, (size_t)gap);
        col += gap;
        wrote = true;
        for (k = word; k < i;) { /* a word may be longer than a line */
            size_t c = k;
            if (cut && col >= width) {
                jprint_raw(st, sep.u.s, sep.len);
                col = 0;
            }
            jutf8_next(line.u.s, line.len, &c);
            jprint_raw(st, line.u.s + k, c - k);
            k = c;
            col++;
        }
    }
    *any |= wrote;
}

static struct jval f_wordwrap(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"width", "break_long_words", "wrapstring",
                                        "break_on_hyphens"};
    struct jval arg[4];
    jargs_bind(st, "wordwrap", a, names, 4, 0, arg);
    jarg_str(st, v, "wordwrap");
    int64_t width = arg[0].type == JT_MISSING ? 79 : jarg_int(st, arg[0], "wordwrap");
    if (width <= 0)
        jinja_fail(st, "invalid width %lld (must be > 0)", (long long)width);
    struct jval sep = arg[2].type == JT_STR ? arg[2] : jval_cstr("\n");
    struct jlist *l = jstr_splitlines(st, v, false);
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < l->n; i++) {
        bool any = false;
        if (i)
            jprint_raw(st, sep.u.s, sep.len);
        wrap_line(st, l->v[i], width, arg[1].type == JT_MISSING || jval_true(arg[1]), sep, &any);
    }
    return jval_take(st, st->out, mark);
}

static struct jval f_xmlattr(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"autospace"};
    struct jval space;
    jargs_bind(st, "xmlattr", a, names, 1, 0, &space);
    if (v.type != JT_DICT)
        jinja_fail(st, "'%s' object has no attribute 'items'", jval_typename(v));
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < v.u.dict->n; i++) {
        struct jpair *e = &v.u.dict->e[i];
        if (e->v.type == JT_NONE || e->v.type == JT_UNDEF)
            continue;
        struct jval key = jarg_str(st, e->k, "xmlattr");
        for (uint32_t k = 0; k < key.len; k++) {
            if (strchr(" \t\n\r\f\v/>=", key.u.s[k]))
                jinja_fail(st, "Invalid character in attribute name");
        }
        if (st->out->len > mark || space.type == JT_MISSING || jval_true(space))
            jprint_raw(st, " ", 1);
        jprint_str(st, jval_escape(st, key));
        jprint_raw(st, "=\"", 2);
        jprint_str(st, jval_escape(st, e->v));
        jprint_raw(st, "\"", 1);
    }
    return jval_take(st, st->out, mark);
}

#define SEQ(name)                                                                                  \
    static struct jval f_##name(struct jstate *st, struct jval v, const struct jargs *a)           \
    {                                                                                              \
        return jfilter_seq(st, JSEQ_##name, v, a);                                                 \
    }
JINJA_SEQ_FILTERS(SEQ)
#undef SEQ

static const struct {
    const char *name;
    filter_fn *fn;
} filters[] = {{"abs", f_abs},
               {"attr", f_attr},
               {"capitalize", f_capitalize},
               {"center", f_center},
               {"count", f_length},
               {"d", f_default},
               {"default", f_default},
               {"e", f_escape},
               {"escape", f_escape},
               {"filesizeformat", f_filesizeformat},
               {"float", f_float},
               {"forceescape", f_forceescape},
               {"format", f_format},
               {"indent", f_indent},
               {"int", f_int},
               {"lower", f_lower},
               {"pprint", f_pprint},
               {"replace", f_replace},
               {"round", f_round},
               {"safe", f_safe},
               {"string", f_string},
               {"striptags", f_striptags},
               {"title", f_title},
               {"tojson", f_tojson},
               {"trim", f_trim},
               {"truncate", f_truncate},
               {"upper", f_upper},
               {"urlencode", f_urlencode},
               {"wordcount", f_wordcount},
               {"wordwrap", f_wordwrap},
               {"xmlattr", f_xmlattr},
#define SEQ(name) {#name, f_##name},
               JINJA_SEQ_FILTERS(SEQ)
#undef SEQ
};

int jfilter_lookup(const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof(filters) / sizeof(filters[0]); i++) {
        if (strlen(filters[i].name) == len && !memcmp(filters[i].name, name, len))
            return (int)i;
    }
    return -1;
}

struct jval jfilter_call(struct jstate *st, int filter, struct jval v, const struct jargs *a)
{
    return filters[filter].fn(st, v, a);
}
