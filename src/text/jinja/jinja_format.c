/*
 * Python's two formatting methods, `%` and str.format, and parsing of numbers. Both formatters
 * share struct format_spec and the functions that print a field. Widths and precisions come from
 * templates and are checked before printing.
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct format_spec {
    struct jval fill; /* one character */
    char align;       /* < > ^ = or 0 */
    char sign;        /* + - space or 0 */
    bool alt, zero;
    char group;          /* , _ or 0 */
    int64_t width, prec; /* -1: none */
    char type;           /* 0: none */
};

#define MAX_WIDTH 100000
#define MAX_PREC  400

static void check_spec(struct jstate *st, const struct format_spec *s)
{
    if (s->width > MAX_WIDTH)
        jinja_fail(st, "format width too large");
    if (s->prec > MAX_WIDTH)
        jinja_fail(st, "format precision too large");
}

/* Prints sign, prefix and digits with padding. By default numbers are right-aligned and text
 * left-aligned. */
static void put_padded(struct jstate *st, const struct format_spec *s, const char *head,
                       size_t n_head, struct jval body, bool number)
{
    int64_t len = (int64_t)n_head + jstr_len(st, body), pad = s->width - len;
    char align = s->align ? s->align : s->zero && number ? '=' : number ? '>' : '<';
    struct jval fill = s->fill.len ? s->fill : s->zero && number ? jval_cstr("0") : jval_cstr(" ");
    int64_t left = pad <= 0 || align == '<' ? 0 : align == '^' ? pad / 2 : pad;
    if (pad > 0)
        jcharge(st, (uint64_t)pad / 4);
    if (align == '=')
        jprint_raw(st, head, n_head);
    for (int64_t i = 0; i < left; i++)
        jprint_raw(st, fill.u.s, fill.len);
    if (align != '=')
        jprint_raw(st, head, n_head);
    jprint_raw(st, body.u.s, body.len);
    for (int64_t i = left; i < pad; i++)
        jprint_raw(st, fill.u.s, fill.len);
}

/* Inserts thousands separators into the digits before '.' or the end. */
static struct jval group_digits(struct jstate *st, struct jval v, char sep, int every)
{
    uint32_t n = 0;
    while (n < v.len && ((v.u.s[n] >= '0' && v.u.s[n] <= '9') ||
                         (every == 4 && (v.u.s[n] | 32) >= 'a' && (v.u.s[n] | 32) <= 'f')))
        n++;
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < n; i++) {
        if (i && (n - i) % (uint32_t)every == 0)
            jprint_raw(st, &sep, 1);
        jprint_raw(st, v.u.s + i, 1);
    }
    jprint_raw(st, v.u.s + n, v.len - n);
    return jval_take(st, st->out, mark);
}

static size_t sign_text(const struct format_spec *s, bool negative, char *out)
{
    if (!negative && s->sign != '+' && s->sign != ' ')
        return 0;
    *out = negative ? '-' : s->sign;
    return 1;
}

static void put_int(struct jstate *st, const struct format_spec *s, int64_t i, char type)
{
    char digits[72], head[4];
    uint64_t u = i < 0 ? -(uint64_t)i : (uint64_t)i;
    size_t n = 0, n_head = sign_text(s, i < 0, head);
    unsigned base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
    do
        digits[sizeof(digits) - ++n] =
            (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[u % base];
    while (u /= base);
    if (s->alt && base != 10) {
        head[n_head++] = '0';
        head[n_head++] = type;
    }
    struct jval body = jval_copy(st, digits + sizeof(digits) - n, n);
    if (s->group) {
        int every = base == 10 ? 3 : 4;
        if (s->zero && !s->align) { /* the padding zeros are grouped, too */
            int64_t want = s->width - (int64_t)n_head, len = (int64_t)n;
            while (len + (len - 1) / every < want)
                len++;
            body = jstr_pad(st, body, len, jval_cstr("0"), 'r');
        }
        body = group_digits(st, body, s->group, every);
    }
    if (s->prec > (int64_t)body.len) /* only with `%`: the minimum number of digits */
        body = jstr_pad(st, body, s->prec > MAX_PREC ? MAX_PREC : s->prec, jval_cstr("0"), 'z');
    put_padded(st, s, head, n_head, body, true);
}

static void put_float(struct jstate *st, const struct format_spec *s, double f, char type)
{
    char head[2], t[MAX_PREC + 340], fmt[16];
    size_t n_head = sign_text(s, signbit(f) && !isnan(f), head);
    int prec = s->prec < 0 ? 6 : s->prec > MAX_PREC ? MAX_PREC : (int)s->prec;
    double a = fabs(f) * (type == '%' ? 100 : 1);
    if (isnan(a) || isinf(a)) {
        bool up = type == 'F' || type == 'E' || type == 'G';
        strcpy(t, isnan(a) ? (up ? "NAN" : "nan") : up ? "INF" : "inf");
    } else if (!type && s->prec < 0) { /* format(f, ''): like repr */
        size_t mark = st->out->len;
        jprint_float(st, a);
        struct jval v = jval_take(st, st->out, mark);
        snprintf(t, sizeof(t), "%.*s", (int)v.len, v.u.s);
    } else {
        char c = type == '%' ? 'f' : type == 'n' || !type ? 'g' : type;
        snprintf(fmt, sizeof(fmt), "%%%s.%d%c", s->alt ? "#" : "", prec, c);
        snprintf(t, sizeof(t), fmt, a);
        if (!type && !strpbrk(t, ".en")) /* a float keeps its decimal point */
            strcat(t, ".0");
    }
    if (type == '%')
        strcat(t, "%");
    struct jval body = jval_copy(st, t, strlen(t));
    if (s->group)
        body = group_digits(st, body, s->group, 3);
    put_padded(st, s, head, n_head, body, true);
}

static void put_text(struct jstate *st, const struct format_spec *s, struct jval v)
{
    if (s->prec >= 0)
        v = jstr_sub(st, v, 0, s->prec);
    put_padded(st, s, "", 0, v, false);
}

/* ------------------------------------------------------------------ % */

static int64_t percent_int(struct jstate *st, struct jval v, char type)
{
    if (v.type == JT_INT || v.type == JT_BOOL)
        return v.type == JT_INT ? v.u.i : v.u.b;
    if (v.type == JT_FLOAT && type == 'd' && fabs(v.u.f) < 0x1p63)
        return (int64_t)v.u.f;
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    jinja_fail(st, "%%%c format: %s is required, not %s", type,
               type == 'd' ? "a real number" : "an integer", jval_typename(v));
}

static void percent_value(struct jstate *st, struct format_spec *s, char type, struct jval v,
                          bool escape)
{
    switch (type) {
    case 's':
    case 'r':
    case 'a':
        v = type == 's' ? jval_tostr(st, v) : jval_repr(st, v);
        if (escape)
            v = jval_escape(st, v);
        if (!s->align)
            s->align = '>';
        put_text(st, s, v);
        return;
    case 'c':
        if (v.type == JT_INT) {
            char t[4];
            if (v.u.i < 0 || v.u.i > 0x10ffff)
                jinja_fail(st, "%%c arg not in range(0x110000)");
            v = jval_copy(st, t, jutf8_put((int)v.u.i, t));
        }
        if (v.type != JT_STR || jstr_len(st, v) != 1)
            jinja_fail(st, "%%c requires int or char");
        if (!s->align)
            s->align = '>';
        put_text(st, s, v);
        return;
    case 'd':
    case 'i':
    case 'u':
        put_int(st, s, percent_int(st, v, 'd'), 'd');
        return;
    case 'x':
    case 'X':
    case 'o':
        put_int(st, s, percent_int(st, v, type), type);
        return;
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
        if (v.type == JT_UNDEF)
            jundef_fail(st, v);
        if (!jval_isnum(v))
            jinja_fail(st, "must be real number, not %s", jval_typename(v));
        put_float(st, s, jval_todouble(v), type);
        return;
    default:
        jinja_fail(st, "unsupported format character '%c'", type >= 32 && type < 127 ? type : '?');
    }
}

struct percent_state {
    struct jval fmt, arg;
    struct jlist *tuple; /* NULL: arg is the only argument */
    uint32_t used;
};

static struct jval percent_next(struct jstate *st, struct percent_state *p)
{
    if (p->tuple ? p->used >= p->tuple->n : p->used >= 1)
        jinja_fail(st, "not enough arguments for format string");
    p->used++;
    return p->tuple ? p->tuple->v[p->used - 1] : p->arg;
}

static int64_t percent_number(struct jstate *st, struct percent_state *p, uint32_t *i)
{
    const char *f = p->fmt.u.s;
    if (*i < p->fmt.len && f[*i] == '*') {
        ++*i;
        struct jval v = percent_next(st, p);
        if (v.type != JT_INT)
            jinja_fail(st, "* requires an int");
        return v.u.i;
    }
    int64_t n = 0;
    for (; *i < p->fmt.len && f[*i] >= '0' && f[*i] <= '9'; ++*i)
        n = n > MAX_WIDTH ? n : n * 10 + f[*i] - '0';
    return n;
}

struct jval jformat_percent(struct jstate *st, struct jval fmt, struct jval arg)
{
    struct percent_state p = {.fmt = fmt, .arg = arg};
    bool escape = fmt.flags & STR_MARKUP, mapped = false;
    size_t mark = st->out->len;
    if (arg.type == JT_TUPLE)
        p.tuple = arg.u.list;
    jcharge_bytes(st, fmt.len);
    for (uint32_t i = 0; i < fmt.len;) {
        if (fmt.u.s[i] != '%') {
            const char *next = memchr(fmt.u.s + i, '%', fmt.len - i);
            uint32_t to = next ? (uint32_t)(next - fmt.u.s) : fmt.len;
            jprint_raw(st, fmt.u.s + i, to - i);
            i = to;
            continue;
        }
        struct format_spec s = {.width = -1, .prec = -1};
        struct jval v = JV_MISSING;
        jcharge(st, 1);
        if (++i < fmt.len && fmt.u.s[i] == '(') {
            uint32_t from = ++i;
            int depth = 1;
            for (; i < fmt.len; i++) {
                depth += fmt.u.s[i] == '(' ? 1 : fmt.u.s[i] == ')' ? -1 : 0;
                if (!depth)
                    break;
            }
            if (i >= fmt.len)
                jinja_fail(st, "incomplete format key");
            if (arg.type != JT_DICT)
                jinja_fail(st, "format requires a mapping");
            struct jval key = jval_str(fmt.u.s + from, i - from);
            if (!jdict_get(st, arg.u.dict, key, &v))
                jinja_fail(st, "format key '%.*s' is missing", (int)(i - from), fmt.u.s + from);
            mapped = true;
            i++;
        }
        for (; i < fmt.len && strchr("-+ #0", fmt.u.s[i]) && fmt.u.s[i]; i++) {
            char c = fmt.u.s[i];
            s.align = c == '-' ? '<' : s.align;
            s.sign = c == '+' || (c == ' ' && !s.sign) ? c : s.sign;
            s.alt |= c == '#';
            s.zero |= c == '0';
        }
        s.width = percent_number(st, &p, &i);
        if (s.width < 0) {
            s.align = '<';
            s.width = s.width < -MAX_WIDTH ? MAX_WIDTH + 1 : -s.width;
        }
        if (s.align == '<')
            s.zero = false;
        if (i < fmt.len && fmt.u.s[i] == '.') {
            i++;
            s.prec = percent_number(st, &p, &i);
            s.prec = s.prec < 0 ? 0 : s.prec;
        }
        while (i < fmt.len && fmt.u.s[i] && strchr("hlL", fmt.u.s[i]))
            i++;
        if (i >= fmt.len)
            jinja_fail(st, "incomplete format");
        check_spec(st, &s);
        char type = fmt.u.s[i++];
        if (type == '%') {
            jprint_raw(st, "%", 1);
            continue;
        }
        if (v.type == JT_MISSING)
            v = percent_next(st, &p);
        percent_value(st, &s, type, v, escape);
    }
    bool dict_like =
        arg.type == JT_DICT || arg.type == JT_LIST || arg.type == JT_UNDEF || arg.type == JT_RANGE;
    if (p.tuple ? p.used < p.tuple->n : !p.used && !mapped && !dict_like)
        jinja_fail(st, "not all arguments converted during string formatting");
    struct jval r = jval_take(st, st->out, mark);
    r.flags = fmt.flags & STR_MARKUP;
    return r;
}

/* ------------------------------------------------------------------ str.format */

static void parse_spec(struct jstate *st, struct jval t, struct format_spec *s)
{
    size_t i = 0, k = 0;
    *s = (struct format_spec){.width = -1, .prec = -1};
    if (!t.len)
        return;
    jutf8_next(t.u.s, t.len, &k);
    if (k < t.len && strchr("<>^=", t.u.s[k]) && t.u.s[k]) {
        s->fill = jval_str(t.u.s, k);
        s->align = t.u.s[k];
        i = k + 1;
    } else if (strchr("<>^=", t.u.s[0]) && t.u.s[0]) {
        s->align = t.u.s[0];
        i = 1;
    }
    if (i < t.len && (t.u.s[i] == '+' || t.u.s[i] == '-' || t.u.s[i] == ' '))
        s->sign = t.u.s[i++];
    if (i < t.len && t.u.s[i] == '#') {
        s->alt = true;
        i++;
    }
    if (i < t.len && t.u.s[i] == '0') {
        s->zero = true;
        i++;
    }
    if (i < t.len && t.u.s[i] >= '0' && t.u.s[i] <= '9') {
        s->width = 0;
        for (; i < t.len && t.u.s[i] >= '0' && t.u.s[i] <= '9'; i++)
            s->width = s->width > MAX_WIDTH ? s->width : s->width * 10 + t.u.s[i] - '0';
    }
    if (i < t.len && (t.u.s[i] == ',' || t.u.s[i] == '_'))
        s->group = t.u.s[i++];
    if (i < t.len && t.u.s[i] == '.') {
        s->prec = 0;
        if (++i >= t.len || t.u.s[i] < '0' || t.u.s[i] > '9')
            jinja_fail(st, "Format specifier missing precision");
        for (; i < t.len && t.u.s[i] >= '0' && t.u.s[i] <= '9'; i++)
            s->prec = s->prec > MAX_WIDTH ? s->prec : s->prec * 10 + t.u.s[i] - '0';
    }
    if (i < t.len)
        s->type = t.u.s[i++];
    if (i < t.len)
        jinja_fail(st, "Invalid format specifier '%.*s'", (int)(t.len > 60 ? 60 : t.len), t.u.s);
    check_spec(st, s);
}

static void format_value(struct jstate *st, struct jval v, struct jval spec_text)
{
    struct format_spec s;
    parse_spec(st, spec_text, &s);
    if (v.type == JT_STR) {
        if ((s.type && s.type != 's') || s.align == '=' || s.sign || s.group)
            jinja_fail(st, "Invalid format specifier for a string");
        if (s.zero && !s.fill.len) /* since Python 3.10 a zero only sets the fill */
            s.fill = jval_cstr("0");
        put_text(st, &s, v);
    } else if (jval_isnum(v) && !(v.type == JT_BOOL && !spec_text.len)) {
        char t = s.type;
        if (t && strchr("eEfFgG%", t)) {
            put_float(st, &s, jval_todouble(v), t);
        } else if (v.type == JT_FLOAT) {
            if (t && t != 'n')
                jinja_fail(st, "Unknown format code '%c' for object of type 'float'", t);
            put_float(st, &s, v.u.f, t);
        } else if (t == 'c') {
            percent_value(st, &s, 'c', v, false);
        } else {
            if ((t && !strchr("bdoxXn", t)) || s.prec >= 0)
                jinja_fail(st, "Unknown format code '%c' for object of type 'int'", t ? t : '.');
            put_int(st, &s, v.type == JT_INT ? v.u.i : v.u.b, t ? t : 'd');
        }
    } else if (spec_text.len) {
        jinja_fail(st, "unsupported format string passed to %s.__format__", jval_typename(v));
    } else {
        jprint_str(st, v);
    }
}

struct braces_state {
    const struct jargs *args;
    struct jdict *map; /* argument of format_map, or NULL */
    int next_auto;     /* -1 after an explicit number */
    bool escape;
};

static struct jval lookup_field(struct jstate *st, struct braces_state *b, struct jval name)
{
    uint32_t i = 0;
    while (i < name.len && name.u.s[i] != '.' && name.u.s[i] != '[')
        i++;
    struct jval first = jval_str(name.u.s, i), v = JV_MISSING;
    int64_t n = -1;
    if (!first.len) {
        if (b->next_auto < 0)
            jinja_fail(st, "cannot switch from manual field specification to automatic field "
                           "numbering");
        n = b->next_auto++;
    } else if (first.u.s[0] >= '0' && first.u.s[0] <= '9' && jparse_int(first, 10, &n)) {
        if (b->next_auto > 0)
            jinja_fail(st, "cannot switch from automatic field numbering to manual field "
                           "specification");
        b->next_auto = -1;
    }
    if (n >= 0) {
        if (n >= b->args->n)
            jinja_fail(st, "Replacement index %lld out of range for positional args tuple",
                       (long long)n);
        v = b->args->pos[n];
    } else if (b->map) {
        if (!jdict_get(st, b->map, first, &v))
            v = JV_MISSING;
    } else {
        for (int k = 0; k < b->args->n_kw; k++) {
            if (jval_eq(st, b->args->kw[k].name, first))
                v = b->args->kw[k].val;
        }
    }
    if (v.type == JT_MISSING)
        jinja_fail(st, "format key '%.*s' is missing", (int)(first.len > 60 ? 60 : first.len),
                   first.u.s);
    while (i < name.len) {
        uint32_t from = ++i;
        if (name.u.s[from - 1] == '.') {
            while (i < name.len && name.u.s[i] != '.' && name.u.s[i] != '[')
                i++;
            v = jget_attr(st, v, jval_str(name.u.s + from, i - from),
                          jmethod_lookup(name.u.s + from, i - from));
        } else {
            while (i < name.len && name.u.s[i] != ']')
                i++;
            if (i >= name.len)
                jinja_fail(st, "expected '}' before end of string");
            struct jval key = jval_str(name.u.s + from, i - from);
            int64_t k;
            if (key.len && key.u.s[0] >= '0' && key.u.s[0] <= '9' && jparse_int(key, 10, &k))
                key = jval_int(k);
            v = jget_item(st, v, key);
            i++;
            if (i < name.len && name.u.s[i] != '.' && name.u.s[i] != '[')
                jinja_fail(st, "Only '.' or '[' may follow ']' in format field specifier");
        }
    }
    return v;
}

static void format_text(struct jstate *st, struct braces_state *b, struct jval f, int level)
{
    if (level > 1)
        jinja_fail(st, "Max string recursion exceeded");
    for (uint32_t i = 0; i < f.len;) {
        char c = f.u.s[i];
        jcharge(st, 1);
        if (c != '{' && c != '}') {
            uint32_t from = i;
            while (i < f.len && f.u.s[i] != '{' && f.u.s[i] != '}')
                i++;
            jprint_raw(st, f.u.s + from, i - from);
            continue;
        }
        if (i + 1 < f.len && f.u.s[i + 1] == c) {
            jprint_raw(st, &c, 1);
            i += 2;
            continue;
        }
        if (c == '}')
            jinja_fail(st, "Single '}' encountered in format string");
        uint32_t from = ++i, depth = 1;
        for (; i < f.len; i++) {
            depth += f.u.s[i] == '{' ? 1u : f.u.s[i] == '}' ? -1u : 0;
            if (!depth)
                break;
        }
        if (i >= f.len)
            jinja_fail(st, "Single '{' encountered in format string");
        struct jval field = jval_str(f.u.s + from, i - from), spec = jval_str("", 0);
        i++;
        uint32_t end = 0;
        bool bracket = false;
        for (; end < field.len && (bracket || (field.u.s[end] != '!' && field.u.s[end] != ':'));
             end++)
            bracket = field.u.s[end] == '[' || (bracket && field.u.s[end] != ']');
        struct jval v = lookup_field(st, b, jval_str(field.u.s, end));
        if (end < field.len && field.u.s[end] == '!') {
            char conv = end + 1 < field.len ? field.u.s[end + 1] : 0;
            if (conv == 'r' || conv == 'a')
                v = jval_repr(st, v);
            else if (conv == 's')
                v = jval_tostr(st, v);
            else
                jinja_fail(st, "Unknown conversion specifier in a format string");
            end += 2;
            if (end < field.len && field.u.s[end] != ':')
                jinja_fail(st, "expected ':' after conversion specifier");
        }
        if (end < field.len)
            spec = jval_str(field.u.s + end + 1, field.len - end - 1);
        if (memchr(spec.u.s, '{', spec.len)) {
            size_t mark = st->out->len;
            format_text(st, b, spec, level + 1);
            spec = jval_take(st, st->out, mark);
        }
        if (b->escape && v.type == JT_STR)
            v = jval_escape(st, v);
        format_value(st, v, spec);
    }
}

struct jval jformat_braces(struct jstate *st, struct jval fmt, const struct jargs *a,
                           struct jdict *map)
{
    struct braces_state b = {.args = a, .map = map, .escape = fmt.flags & STR_MARKUP};
    size_t mark = st->out->len;
    jcharge_bytes(st, fmt.len);
    format_text(st, &b, fmt, 0);
    struct jval r = jval_take(st, st->out, mark);
    r.flags = fmt.flags & STR_MARKUP;
    return r;
}

/* ------------------------------------------------------------------ parsing numbers */

/* The ASCII text of a number, stripped and without single underscores between digits. False if it
 * does not fit. */
static bool number_text(struct jval s, char *out, size_t cap)
{
    size_t a = 0, b = s.len, n = 0;
    for (size_t i; a < b; a = i) {
        i = a;
        if (!jcp_isspace(jutf8_next(s.u.s, b, &i)))
            break;
    }
    while (b > a) {
        size_t i = b - 1;
        while (i > a && (s.u.s[i] & 0xc0) == 0x80)
            i--;
        size_t k = i;
        if (!jcp_isspace(jutf8_next(s.u.s, b, &k)))
            break;
        b = i;
    }
    for (size_t i = a; i < b; i++) {
        char c = s.u.s[i];
        if (c == '_') {
            bool ok = i > a && i + 1 < b && s.u.s[i - 1] != '_' && s.u.s[i + 1] != '_';
            if (!ok)
                return false;
            continue;
        }
        if (n + 1 >= cap || !c)
            return false;
        out[n++] = c;
    }
    out[n] = 0;
    return n > 0;
}

bool jparse_int(struct jval s, int base, int64_t *out)
{
    char t[80], *p = t;
    if (!number_text(s, t, sizeof(t)))
        return false;
    bool neg = *p == '-';
    if (*p == '-' || *p == '+')
        p++;
    if (p[0] == '0' && p[1]) {
        char c = (char)(p[1] | 32);
        int implied = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 0;
        if (implied && (base == implied || base == 0)) {
            base = implied;
            p += 2;
        }
    }
    if (base == 0)
        base = 10;
    if (!*p)
        return false;
    uint64_t v = 0;
    for (; *p; p++) {
        int c = (unsigned char)*p | 32, d = *p >= '0' && *p <= '9' ? *p - '0'
                                            : c >= 'a' && c <= 'z' ? c - 'a' + 10
                                                                   : 99;
        if (d >= base || __builtin_mul_overflow(v, (uint64_t)base, &v) ||
            __builtin_add_overflow(v, (uint64_t)d, &v) || v > (uint64_t)INT64_MAX + neg)
            return false;
    }
    *out = (int64_t)(neg ? -v : v);
    return true;
}

bool jparse_float(struct jval s, double *out)
{
    char t[512], *end;
    if (!number_text(s, t, sizeof(t)))
        return false;
    const char *p = t + (t[0] == '-' || t[0] == '+');
    if (strchr(p, 'x') || strchr(p, 'X') || strchr(p, '(')) /* only C reads these */
        return false;
    *out = strtod(t, &end);
    return *end == 0 && end != t;
}
