/*
 * Attributes of Jinja values: Python's str, list, tuple, dict, int and float methods, the
 * attributes of the engine's own objects, and the global functions. One table lists the types of
 * each method. Mutating methods are in the table but rejected, as in jinja2's sandbox. Knows
 * nothing of syntax.
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    ON_STR = 1,
    ON_LIST = 2,
    ON_TUPLE = 4,
    ON_DICT = 8,
    ON_FLOAT = 16,
    ON_CYCLER = 32,
    BAD_LIST = 64,
    BAD_DICT = 128,
    ON_INT = 256,
    ON_LOOP = 512,
    ON_RANGE = 1024
};

/* clang-format off */
#define METHODS(X)                                                                                 \
    X(capitalize, ON_STR) X(casefold, ON_STR) X(center, ON_STR)                                    \
    X(count, ON_STR | ON_LIST | ON_TUPLE | ON_RANGE) X(endswith, ON_STR) X(expandtabs, ON_STR)     \
    X(find, ON_STR) X(format, ON_STR) X(format_map, ON_STR)                                        \
    X(index, ON_STR | ON_LIST | ON_TUPLE | ON_RANGE)                                               \
    X(isalnum, ON_STR) X(isalpha, ON_STR) X(isascii, ON_STR) X(isdecimal, ON_STR)                  \
    X(isdigit, ON_STR) X(isidentifier, ON_STR) X(islower, ON_STR) X(isnumeric, ON_STR)             \
    X(isprintable, ON_STR) X(isspace, ON_STR) X(istitle, ON_STR) X(isupper, ON_STR)                \
    X(join, ON_STR) X(ljust, ON_STR) X(lower, ON_STR) X(lstrip, ON_STR) X(partition, ON_STR)       \
    X(removeprefix, ON_STR) X(removesuffix, ON_STR) X(replace, ON_STR) X(rfind, ON_STR)            \
    X(rindex, ON_STR) X(rjust, ON_STR) X(rpartition, ON_STR) X(rsplit, ON_STR) X(rstrip, ON_STR)   \
    X(split, ON_STR) X(splitlines, ON_STR) X(startswith, ON_STR) X(strip, ON_STR)                  \
    X(swapcase, ON_STR) X(title, ON_STR) X(upper, ON_STR) X(zfill, ON_STR)                         \
    X(get, ON_DICT) X(items, ON_DICT) X(keys, ON_DICT) X(values, ON_DICT)                          \
    X(copy, ON_DICT | ON_LIST) X(is_integer, ON_FLOAT) X(bit_length, ON_INT)                       \
    X(next, ON_CYCLER) X(reset, ON_CYCLER) X(cycle, ON_LOOP) X(changed, ON_LOOP)                   \
    X(append, BAD_LIST) X(clear, BAD_LIST | BAD_DICT) X(extend, BAD_LIST) X(insert, BAD_LIST)      \
    X(pop, BAD_LIST | BAD_DICT) X(remove, BAD_LIST) X(reverse, BAD_LIST) X(sort, BAD_LIST)         \
    X(popitem, BAD_DICT) X(setdefault, BAD_DICT) X(update, BAD_DICT)

enum {
#define X(name, on) M_##name,
    METHODS(X)
#undef X
    M_COUNT
};

static const struct {
    const char *name;
    int on;
} methods[] = {
#define X(name, on) {#name, on},
    METHODS(X)
#undef X
};
/* clang-format on */

int jmethod_lookup(const char *name, size_t len)
{
    for (int i = 0; i < M_COUNT; i++) {
        if (methods[i].name[0] == name[0] && strlen(methods[i].name) == len &&
            !memcmp(methods[i].name, name, len))
            return i;
    }
    return M_NONE;
}

/* ------------------------------------------------------------------ arguments */

void jargs_bind(struct jstate *st, const char *what, const struct jargs *a,
                const char *const *names, int n, int n_min, struct jval *out)
{
    if (a->n > n)
        jinja_fail(st, "%s() takes at most %d argument%s (%d given)", what, n, n == 1 ? "" : "s",
                   a->n);
    for (int i = 0; i < n; i++)
        out[i] = i < a->n ? a->pos[i] : JV_MISSING;
    for (int k = 0; k < a->n_kw; k++) {
        int i = 0;
        while (i < n && !jval_is(a->kw[k].name, names[i]))
            i++;
        if (i == n)
            jinja_fail(st, "%s() got an unexpected keyword argument '%.*s'", what,
                       (int)a->kw[k].name.len, a->kw[k].name.u.s);
        if (out[i].type != JT_MISSING)
            jinja_fail(st, "%s() got multiple values for argument '%s'", what, names[i]);
        out[i] = a->kw[k].val;
    }
    for (int i = 0; i < n_min; i++) {
        if (out[i].type == JT_MISSING)
            jinja_fail(st, "%s() missing required argument '%s'", what, names[i]);
    }
}

int64_t jarg_int(struct jstate *st, struct jval v, const char *what)
{
    if (v.type == JT_INT || v.type == JT_BOOL)
        return v.type == JT_INT ? v.u.i : v.u.b;
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    jinja_fail(st, "%s: '%s' object cannot be interpreted as an integer", what, jval_typename(v));
}

struct jval jarg_str(struct jstate *st, struct jval v, const char *what)
{
    if (v.type != JT_STR)
        jinja_fail(st, "%s: must be str, not %s", what, jval_typename(v));
    return v;
}

static struct jval opt_str(struct jstate *st, struct jval v, const char *what)
{
    return v.type == JT_MISSING || v.type == JT_NONE ? JV_NONE : jarg_str(st, v, what);
}

static int64_t opt_int(struct jstate *st, struct jval v, int64_t none, const char *what)
{
    return v.type == JT_MISSING || v.type == JT_NONE ? none : jarg_int(st, v, what);
}

/* ------------------------------------------------------------------ str: searching */

/* The part of s selected by start and end (code points, Python's rules); *from is its offset. */
static struct jval window(struct jstate *st, struct jval s, struct jval start, struct jval end,
                          int64_t *from, bool *empty)
{
    *from = 0;
    *empty = false;
    if (start.type == JT_MISSING && end.type == JT_MISSING)
        return s;
    int64_t n = jstr_len(st, s), a = opt_int(st, start, 0, "start"), b = opt_int(st, end, n, "end");
    a = a < 0 ? (a + n < 0 ? 0 : a + n) : a;
    b = b < 0 ? (b + n < 0 ? 0 : b + n) : b > n ? n : b;
    *empty = a > b; /* not even the empty string matches */
    *from = a;
    return jstr_sub(st, s, a, b);
}

static const char *find_last(struct jstate *st, const char *s, size_t n, const char *needle,
                             size_t m)
{
    if (!m)
        return s + n;
    if (m > n)
        return NULL;
    for (size_t end = n - m + 1; end > 0;) {
        const char *p = s + --end;
        if (literal_plain((uint8_t)p[0]) != literal_plain((uint8_t)needle[0]))
            continue;
        if (jstr_same(p, needle, m))
            return p;
        jcharge(st, 1 + m / 32);
    }
    return NULL;
}

static struct jval m_find(struct jstate *st, struct jval s, const struct jargs *a, bool last,
                          bool must)
{
    static const char *const names[] = {"sub", "start", "end"};
    struct jval arg[3];
    int64_t from;
    bool empty;
    jargs_bind(st, "find", a, names, 3, 1, arg);
    struct jval sub = jarg_str(st, arg[0], "find"),
                w = window(st, s, arg[1], arg[2], &from, &empty);
    jcharge_bytes(st, w.len);
    const char *hit = empty  ? NULL
                      : last ? find_last(st, w.u.s, w.len, sub.u.s, sub.len)
                             : jstr_find(w.u.s, w.len, sub.u.s, sub.len);
    if (!hit && must)
        jinja_fail(st, "substring not found");
    if (!hit)
        return jval_int(-1);
    return jval_int(from + jstr_len(st, jval_str(w.u.s, (size_t)(hit - w.u.s))));
}

static struct jval m_count(struct jstate *st, struct jval s, const struct jargs *a)
{
    static const char *const names[] = {"sub", "start", "end"};
    struct jval arg[3];
    int64_t from, n = 0;
    bool empty;
    jargs_bind(st, "count", a, names, 3, 1, arg);
    struct jval sub = jarg_str(st, arg[0], "count"),
                w = window(st, s, arg[1], arg[2], &from, &empty);
    jcharge_bytes(st, w.len);
    if (empty)
        return jval_int(0);
    if (!sub.len)
        return jval_int(jstr_len(st, w) + 1);
    const char *p = w.u.s, *end = w.u.s + w.len;
    while ((p = jstr_find(p, (size_t)(end - p), sub.u.s, sub.len))) {
        n++;
        p += sub.len;
    }
    return jval_int(n);
}

static struct jval m_affix(struct jstate *st, struct jval s, const struct jargs *a, bool ends)
{
    static const char *const names[] = {"prefix", "start", "end"};
    struct jval arg[3];
    int64_t from;
    bool empty;
    jargs_bind(st, ends ? "endswith" : "startswith", a, names, 3, 1, arg);
    struct jval w = window(st, s, arg[1], arg[2], &from, &empty);
    struct jlist one = {.v = &arg[0], .n = 1}, *l = arg[0].type == JT_TUPLE ? arg[0].u.list : &one;
    for (uint32_t i = 0; i < l->n; i++) {
        struct jval f = l->v[i];
        if (f.type != JT_STR)
            jinja_fail(st, "%s first arg must be str or a tuple of str, not %s",
                       ends ? "endswith" : "startswith", jval_typename(f));
        jcharge_bytes(st, f.len);
        if (!empty && f.len <= w.len &&
            jstr_same(ends ? w.u.s + w.len - f.len : w.u.s, f.u.s, f.len))
            return jval_bool(true);
    }
    return jval_bool(false);
}

/* ------------------------------------------------------------------ str: splitting */

struct split_parts {
    struct jstate *st;
    struct jval *v; /* (cap) */
    uint32_t n, cap;
};

static void part_add(struct split_parts *p, const char *s, size_t n, uint8_t flags)
{
    if (p->n == p->cap) {
        uint32_t cap = p->cap ? p->cap * 2 : 8;
        struct jval *v = jalloc(p->st, cap, sizeof(*v));
        if (p->n)
            memcpy(v, p->v, p->n * sizeof(*v));
        p->v = v;
        p->cap = cap;
    }
    jcharge(p->st, 1);
    p->v[p->n] = jval_str(s, n);
    p->v[p->n++].flags = flags & STR_MARKUP;
}

static size_t step_back(const char *s, size_t i)
{
    do
        i--;
    while (i > 0 && (s[i] & 0xc0) == 0x80);
    return i;
}

static void split_space(struct split_parts *p, struct jval s, int64_t max, bool right)
{
    size_t a = 0, b = s.len, k;
    for (;;) {
        struct jval rest = jstr_strip(p->st, jval_str(s.u.s + a, b - a), JV_NONE,
                                      right ? STRIP_RIGHT : STRIP_LEFT);
        a = (size_t)(rest.u.s - s.u.s);
        b = a + rest.len;
        if (a == b)
            return;
        if (max-- == 0) {
            part_add(p, s.u.s + a, b - a, s.flags);
            return;
        }
        if (right) {
            size_t i = b;
            while (i > a) {
                size_t t = k = step_back(s.u.s, i);
                if (jcp_isspace(jutf8_next(s.u.s, b, &t)))
                    break;
                i = k;
            }
            part_add(p, s.u.s + i, b - i, s.flags);
            b = i;
        } else {
            size_t i = a;
            while (i < b) {
                k = i;
                if (jcp_isspace(jutf8_next(s.u.s, b, &k)))
                    break;
                i = k;
            }
            part_add(p, s.u.s + a, i - a, s.flags);
            a = i;
        }
    }
}

static struct jval m_split(struct jstate *st, struct jval s, const struct jargs *a, bool right)
{
    static const char *const names[] = {"sep", "maxsplit"};
    struct jval arg[2];
    jargs_bind(st, right ? "rsplit" : "split", a, names, 2, 0, arg);
    struct jval sep = opt_str(st, arg[0], "split");
    int64_t max = opt_int(st, arg[1], -1, "maxsplit");
    struct split_parts p = {.st = st};
    jcharge_bytes(st, s.len);
    if (max < 0)
        max = INT64_MAX;
    if (sep.type == JT_NONE) {
        split_space(&p, s, max, right);
    } else if (!sep.len) {
        jinja_fail(st, "empty separator");
    } else if (!right) {
        const char *at = s.u.s, *end = s.u.s + s.len, *hit;
        while (max-- > 0 && (hit = jstr_find(at, (size_t)(end - at), sep.u.s, sep.len))) {
            part_add(&p, at, (size_t)(hit - at), s.flags);
            at = hit + sep.len;
        }
        part_add(&p, at, (size_t)(end - at), s.flags);
    } else {
        size_t end = s.len;
        const char *hit;
        while (max-- > 0 && (hit = find_last(st, s.u.s, end, sep.u.s, sep.len))) {
            const char *from = hit + sep.len;
            part_add(&p, from, (size_t)(s.u.s + end - from), s.flags);
            end = (size_t)(hit - s.u.s);
        }
        part_add(&p, s.u.s, end, s.flags);
    }
    for (uint32_t i = 0; right && i < p.n / 2; i++) {
        struct jval t = p.v[i];
        p.v[i] = p.v[p.n - 1 - i];
        p.v[p.n - 1 - i] = t;
    }
    struct jval r = jval_list(st, JT_LIST, 0);
    r.u.list->v = p.v;
    r.u.list->n = p.n;
    return r;
}

static struct jval m_partition(struct jstate *st, struct jval s, const struct jargs *a, bool right)
{
    static const char *const names[] = {"sep"};
    struct jval sep, r = jval_list(st, JT_TUPLE, 3), *v = r.u.list->v;
    jargs_bind(st, "partition", a, names, 1, 1, &sep);
    jarg_str(st, sep, "partition");
    if (!sep.len)
        jinja_fail(st, "empty separator");
    jcharge_bytes(st, s.len);
    const char *hit = right ? find_last(st, s.u.s, s.len, sep.u.s, sep.len)
                            : jstr_find(s.u.s, s.len, sep.u.s, sep.len);
    v[0] = v[1] = v[2] = jval_str("", 0);
    if (!hit) {
        v[right ? 2 : 0] = s;
        return r;
    }
    size_t at = (size_t)(hit - s.u.s);
    v[0] = jval_str(s.u.s, at);
    v[1] = sep;
    v[2] = jval_str(hit + sep.len, s.len - at - sep.len);
    return r;
}

/* ------------------------------------------------------------------ str: other methods */

static struct jval m_join(struct jstate *st, struct jval s, const struct jargs *a)
{
    static const char *const names[] = {"iterable"};
    struct jval it;
    bool markup = s.flags & STR_MARKUP;
    jargs_bind(st, "join", a, names, 1, 1, &it);
    struct jlist *l = jval_tolist(st, it);
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < l->n; i++) {
        struct jval v = l->v[i];
        jcharge(st, 1);
        if (v.type != JT_STR && !markup)
            jinja_fail(st, "sequence item %u: expected str instance, %s found", i,
                       jval_typename(v));
        if (i)
            jprint_raw(st, s.u.s, s.len);
        jprint_str(st, markup ? jval_escape(st, v) : v);
    }
    struct jval r = jval_take(st, st->out, mark);
    r.flags = s.flags & STR_MARKUP;
    return r;
}

static struct jval m_expandtabs(struct jstate *st, struct jval s, const struct jargs *a)
{
    static const char *const names[] = {"tabsize"};
    struct jval arg;
    jargs_bind(st, "expandtabs", a, names, 1, 0, &arg);
    int64_t tab = opt_int(st, arg, 8, "tabsize"), col = 0;
    size_t mark = st->out->len;
    if (tab > 1000)
        jinja_fail(st, "tab size too large");
    jcharge(st, s.len / 4);
    for (size_t i = 0; i < s.len;) {
        size_t from = i;
        int cp = jutf8_next(s.u.s, s.len, &i);
        if (cp == '\t') {
            for (int64_t n = tab > 0 ? tab - col % tab : 0; n > 0; n--, col++)
                jprint_raw(st, " ", 1);
        } else {
            col = cp == '\n' || cp == '\r' ? 0 : col + 1;
            jprint_raw(st, s.u.s + from, i - from);
        }
    }
    return jval_take(st, st->out, mark);
}

static struct jval m_pad(struct jstate *st, struct jval s, const struct jargs *a, char how)
{
    static const char *const names[] = {"width", "fillchar"};
    struct jval arg[2];
    jargs_bind(st, "center", a, names, how == 'z' ? 1 : 2, 1, arg);
    struct jval fill = jval_cstr(how == 'z' ? "0" : " ");
    if (how != 'z' && arg[1].type != JT_MISSING) {
        fill = jarg_str(st, arg[1], "fillchar");
        if (jstr_len(st, fill) != 1)
            jinja_fail(st, "The fill character must be exactly one character long");
    }
    return jstr_pad(st, s, jarg_int(st, arg[0], "width"), fill, how);
}

static struct jval m_strip(struct jstate *st, struct jval s, const struct jargs *a, int sides)
{
    static const char *const names[] = {"chars"};
    struct jval chars;
    jargs_bind(st, "strip", a, names, 1, 0, &chars);
    return jstr_strip(st, s, opt_str(st, chars, "strip"), sides);
}

static struct jval m_replace(struct jstate *st, struct jval s, const struct jargs *a)
{
    static const char *const names[] = {"old", "new", "count"};
    struct jval arg[3];
    jargs_bind(st, "replace", a, names, 3, 2, arg);
    struct jval old = jarg_str(st, arg[0], "replace"), with = jarg_str(st, arg[1], "replace");
    if (s.flags & STR_MARKUP)
        with = jval_escape(st, with);
    struct jval r = jstr_replace(st, s, old, with, opt_int(st, arg[2], -1, "count"));
    r.flags |= s.flags & STR_MARKUP;
    return r;
}

static struct jval m_remove_affix(struct jstate *st, struct jval s, const struct jargs *a, bool end)
{
    static const char *const names[] = {"affix"};
    struct jval f;
    jargs_bind(st, end ? "removesuffix" : "removeprefix", a, names, 1, 1, &f);
    jarg_str(st, f, end ? "removesuffix" : "removeprefix");
    if (f.len <= s.len && jstr_same(end ? s.u.s + s.len - f.len : s.u.s, f.u.s, f.len)) {
        s.u.s += end ? 0 : f.len;
        s.len -= f.len;
    }
    return s;
}

static struct jval m_splitlines(struct jstate *st, struct jval s, const struct jargs *a)
{
    static const char *const names[] = {"keepends"};
    struct jval keep, r;
    jargs_bind(st, "splitlines", a, names, 1, 0, &keep);
    r = (struct jval){.type = JT_LIST, .u.list = jstr_splitlines(st, s, jval_true(keep))};
    return r;
}

static void no_args(struct jstate *st, const char *what, const struct jargs *a)
{
    if (a->n || a->n_kw)
        jinja_fail(st, "%s() takes no arguments (%d given)", what, a->n + a->n_kw);
}

static struct jval str_method(struct jstate *st, struct jval s, int id, const struct jargs *a)
{
    static const struct {
        uint8_t id;
        char what;
    } classes[] = {{M_isalnum, 'n'},   {M_isalpha, 'a'},   {M_isascii, 'A'},
                   {M_isdecimal, 'D'}, {M_isdigit, 'd'},   {M_isidentifier, 'i'},
                   {M_islower, 'l'},   {M_isnumeric, 'N'}, {M_isprintable, 'p'},
                   {M_isspace, 's'},   {M_istitle, 't'},   {M_isupper, 'u'}};
    static const struct {
        uint8_t id;
        char how;
    } cases[] = {{M_capitalize, 'c'}, {M_casefold, 'f'}, {M_lower, 'l'},
                 {M_swapcase, 's'},   {M_title, 't'},    {M_upper, 'u'}};
    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++) {
        if (classes[i].id == id) {
            no_args(st, methods[id].name, a);
            jcharge(st, s.len / 8);
            return jval_bool(jstr_class(s, classes[i].what));
        }
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (cases[i].id == id) {
            no_args(st, methods[id].name, a);
            return jstr_case(st, s, cases[i].how);
        }
    }
    switch (id) {
    case M_center:
        return m_pad(st, s, a, 'c');
    case M_ljust:
        return m_pad(st, s, a, 'l');
    case M_rjust:
        return m_pad(st, s, a, 'r');
    case M_zfill:
        return m_pad(st, s, a, 'z');
    case M_count:
        return m_count(st, s, a);
    case M_endswith:
        return m_affix(st, s, a, true);
    case M_startswith:
        return m_affix(st, s, a, false);
    case M_expandtabs:
        return m_expandtabs(st, s, a);
    case M_find:
        return m_find(st, s, a, false, false);
    case M_rfind:
        return m_find(st, s, a, true, false);
    case M_index:
        return m_find(st, s, a, false, true);
    case M_rindex:
        return m_find(st, s, a, true, true);
    case M_format:
        return jformat_braces(st, s, a, NULL);
    case M_format_map:
        if (a->n != 1 || a->n_kw || a->pos[0].type != JT_DICT)
            jinja_fail(st, "format_map() takes exactly one mapping");
        return jformat_braces(st, s, &(struct jargs){0}, a->pos[0].u.dict);
    case M_join:
        return m_join(st, s, a);
    case M_strip:
        return m_strip(st, s, a, STRIP_LEFT | STRIP_RIGHT);
    case M_lstrip:
        return m_strip(st, s, a, STRIP_LEFT);
    case M_rstrip:
        return m_strip(st, s, a, STRIP_RIGHT);
    case M_partition:
        return m_partition(st, s, a, false);
    case M_rpartition:
        return m_partition(st, s, a, true);
    case M_removeprefix:
        return m_remove_affix(st, s, a, false);
    case M_removesuffix:
        return m_remove_affix(st, s, a, true);
    case M_replace:
        return m_replace(st, s, a);
    case M_split:
        return m_split(st, s, a, false);
    case M_rsplit:
        return m_split(st, s, a, true);
    case M_splitlines:
        return m_splitlines(st, s, a);
    }
    jinja_fail(st, "str has no method '%s'", methods[id].name);
}

/* ------------------------------------------------------------------ containers */

static struct jval view(struct jstate *st, struct jdict *d, enum jview_kind kind)
{
    struct jview *v = jalloc(st, 1, sizeof(*v));
    *v = (struct jview){d, kind};
    return (struct jval){.type = JT_VIEW, .u.view = v};
}

static struct jval dict_method(struct jstate *st, struct jval d, int id, const struct jargs *a)
{
    if (id == M_get) {
        struct jval v;
        if (a->n_kw)
            jinja_fail(st, "dict.get() takes no keyword arguments");
        if (a->n < 1 || a->n > 2)
            jinja_fail(st, "get expected at least 1 argument and at most 2, got %d", a->n);
        if (jdict_get(st, d.u.dict, a->pos[0], &v))
            return v;
        return a->n == 2 ? a->pos[1] : JV_NONE;
    }
    no_args(st, methods[id].name, a);
    if (id == M_copy)
        return d;
    return view(st, d.u.dict, id == M_keys ? VIEW_KEYS : id == M_values ? VIEW_VALUES : VIEW_ITEMS);
}

static struct jval list_method(struct jstate *st, struct jval v, int id, const struct jargs *a)
{
    if (id == M_copy) {
        no_args(st, "copy", a);
        return v;
    }
    struct jlist *l = jval_tolist(st, v);
    if (a->n < 1 || a->n > (id == M_index ? 3 : 1) || a->n_kw)
        jinja_fail(st, "%s() takes one argument (%d given)", methods[id].name, a->n);
    int64_t n = l->n, from = a->n > 1 ? jarg_int(st, a->pos[1], "start") : 0,
            to = a->n > 2 ? jarg_int(st, a->pos[2], "stop") : n, count = 0;
    from = from < 0 ? (from + n < 0 ? 0 : from + n) : from;
    to = to < 0 ? to + n : to > n ? n : to;
    for (int64_t i = from; i < to; i++) {
        if (!jval_eq(st, l->v[i], a->pos[0]))
            continue;
        if (id == M_index)
            return jval_int(i);
        count++;
    }
    if (id == M_index)
        jinja_fail(st, "the value is not in the %s", jval_typename(v));
    return jval_int(count);
}

static struct jval loop_method(struct jstate *st, struct jloop *l, int id, const struct jargs *a)
{
    if (id == M_cycle) {
        if (a->n == 0)
            jinja_fail(st, "no items for cycling given");
        return a->pos[l->index0 % a->n];
    }
    struct jval now = jval_list(st, JT_TUPLE, (size_t)a->n);
    if (a->n)
        memcpy(now.u.list->v, a->pos, (size_t)a->n * sizeof(struct jval));
    struct jval before = {.type = JT_TUPLE, .u.list = l->changed};
    bool changed = !l->changed || !jval_eq(st, now, before);
    if (changed)
        l->changed = now.u.list;
    return jval_bool(changed);
}

struct jval jmethod_call(struct jstate *st, struct jmethod *m, const struct jargs *a)
{
    struct jval v = m->self;
    switch ((enum jtype)v.type) {
    case JT_STR:
        return str_method(st, v, m->id, a);
    case JT_DICT:
        return dict_method(st, v, m->id, a);
    case JT_LIST:
    case JT_TUPLE:
    case JT_RANGE:
        return list_method(st, v, m->id, a);
    case JT_FLOAT:
        no_args(st, "is_integer", a);
        return jval_bool(v.u.f == floor(v.u.f) && !isinf(v.u.f));
    case JT_INT: {
        int n = 0;
        for (uint64_t u = v.u.i < 0 ? -(uint64_t)v.u.i : (uint64_t)v.u.i; u; u >>= 1)
            n++;
        return jval_int(n);
    }
    case JT_CYCLER: {
        struct jcycler *c = v.u.cycler;
        uint32_t pos = c->pos;
        no_args(st, methods[m->id].name, a);
        c->pos = m->id == M_reset ? 0 : (pos + 1) % c->items->n;
        return m->id == M_reset ? JV_NONE : c->items->v[pos];
    }
    default:
        return loop_method(st, v.u.loop, m->id, a);
    }
}

static bool macro_attr(struct jstate *st, const struct jnode *n, struct jval name, struct jval *out)
{
    if (jval_is(name, "name")) {
        *out = n->val;
    } else if (jval_is(name, "arguments")) {
        *out = jval_list(st, JT_TUPLE, (size_t)n->params->n);
        for (int i = 0; i < n->params->n; i++)
            out->u.list->v[i] = n->params->p[i].name;
    } else if (jval_is(name, "caller")) {
        *out = jval_bool(n->params->uses_caller);
    } else if (jval_is(name, "catch_kwargs")) {
        *out = jval_bool(n->params->uses_kwargs);
    } else if (jval_is(name, "catch_varargs")) {
        *out = jval_bool(n->params->uses_varargs);
    } else {
        return false;
    }
    return true;
}

bool jattr_get(struct jstate *st, struct jval obj, struct jval name, int mid, struct jval *out)
{
    static const int on[] = {[JT_STR] = ON_STR,       [JT_LIST] = ON_LIST | BAD_LIST,
                             [JT_TUPLE] = ON_TUPLE,   [JT_DICT] = ON_DICT | BAD_DICT,
                             [JT_FLOAT] = ON_FLOAT,   [JT_INT] = ON_INT,
                             [JT_CYCLER] = ON_CYCLER, [JT_LOOP] = ON_LOOP,
                             [JT_RANGE] = ON_RANGE,   [JT_JOINER] = 0};
    if (mid >= 0 && methods[mid].on & on[obj.type]) {
        if (methods[mid].on & on[obj.type] & (BAD_LIST | BAD_DICT)) {
            *out = jval_undef(st, UNDEF_UNSAFE, name, obj, NULL);
            return true;
        }
        struct jmethod *m = jalloc(st, 1, sizeof(*m));
        *m = (struct jmethod){obj, mid};
        *out = (struct jval){.type = JT_METHOD, .u.method = m};
        return true;
    }
    switch ((enum jtype)obj.type) {
    case JT_NS:
        return jdict_get(st, obj.u.dict, name, out);
    case JT_LOOP:
        *out = jloop_attr(st, obj.u.loop, name);
        return out->type != JT_MISSING;
    case JT_MACRO:
        return macro_attr(st, obj.u.macro->node, name, out);
    case JT_CYCLER:
        if (!jval_is(name, "current"))
            return false;
        *out = obj.u.cycler->items->v[obj.u.cycler->pos];
        return true;
    case JT_TUPLE:
        if (!obj.u.list->group || (!jval_is(name, "grouper") && !jval_is(name, "list")))
            return false;
        *out = obj.u.list->v[jval_is(name, "list")];
        return true;
    case JT_RANGE:
        if (jval_is(name, "start") || jval_is(name, "stop") || jval_is(name, "step")) {
            *out = jval_int(name.u.s[2] == 'a'   ? obj.u.range->start
                            : name.u.s[2] == 'o' ? obj.u.range->stop
                                                 : obj.u.range->step);
            return true;
        }
        return false;
    case JT_BOOL:
    case JT_INT:
    case JT_FLOAT:
        if (!jval_is(name, "real") && !jval_is(name, "imag"))
            return false;
        *out = jval_is(name, "real") ? obj : obj.type == JT_FLOAT ? jval_float(0) : jval_int(0);
        return true;
    default:
        return false;
    }
}

/* ------------------------------------------------------------------ globals */

static const char *const funcs[F_COUNT] = {
    [F_RANGE] = "range",          [F_DICT] = "dict",     [F_NAMESPACE] = "namespace",
    [F_CYCLER] = "cycler",        [F_JOINER] = "joiner", [F_RAISE] = "raise_exception",
    [F_STRFTIME] = "strftime_now"};

int jfunc_lookup(struct jval name)
{
    for (int i = 0; i < F_COUNT; i++) {
        if (jval_is(name, funcs[i]))
            return i;
    }
    return -1;
}

const char *jfunc_name(int func)
{
    return funcs[func];
}

static struct jval f_range(struct jstate *st, const struct jargs *a)
{
    if (a->n < 1 || a->n > 3 || a->n_kw)
        jinja_fail(st, "range expected 1 to 3 arguments, got %d", a->n + a->n_kw);
    struct jrange *r = jalloc(st, 1, sizeof(*r));
    r->start = a->n > 1 ? jarg_int(st, a->pos[0], "range") : 0;
    r->stop = jarg_int(st, a->pos[a->n > 1], "range");
    r->step = a->n > 2 ? jarg_int(st, a->pos[2], "range") : 1;
    if (r->step == 0)
        jinja_fail(st, "range() arg 3 must not be zero");
    uint64_t span = 0, step = r->step > 0 ? (uint64_t)r->step : -(uint64_t)r->step;
    if (r->step > 0 ? r->start < r->stop : r->start > r->stop)
        span = r->step > 0 ? (uint64_t)r->stop - (uint64_t)r->start
                           : (uint64_t)r->start - (uint64_t)r->stop;
    uint64_t n = span ? (span - 1) / step + 1 : 0;
    if (n > JINJA_MAX_RANGE)
        jinja_fail(st, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).",
                   JINJA_MAX_RANGE);
    r->n = (int64_t)n;
    return (struct jval){.type = JT_RANGE, .u.range = r};
}

/* dict(...) and namespace(...): a mapping or pairs, then keyword arguments. */
static struct jdict *make_dict(struct jstate *st, const char *what, const struct jargs *a)
{
    if (a->n > 1)
        jinja_fail(st, "%s expected at most 1 argument, got %d", what, a->n);
    struct jdict *d = jdict_new(st, (uint32_t)a->n_kw);
    if (a->n && (a->pos[0].type == JT_DICT || a->pos[0].type == JT_NS)) {
        struct jdict *from = a->pos[0].u.dict;
        for (uint32_t i = 0; i < from->n; i++)
            jdict_put(st, d, from->e[i].k, from->e[i].v);
    } else if (a->n) {
        struct jlist *l = jval_tolist(st, a->pos[0]);
        for (uint32_t i = 0; i < l->n; i++) {
            struct jlist *pair = jval_tolist(st, l->v[i]);
            if (pair->n != 2)
                jinja_fail(st,
                           "dictionary update sequence element #%u has length %u; 2 is required", i,
                           pair->n);
            jdict_put(st, d, pair->v[0], pair->v[1]);
        }
    }
    for (int i = 0; i < a->n_kw; i++)
        jdict_put(st, d, a->kw[i].name, a->kw[i].val);
    return d;
}

static struct jval f_cycler(struct jstate *st, const struct jargs *a, bool joiner)
{
    struct jcycler *c = jalloc(st, 1, sizeof(*c));
    struct jval sep;
    if (joiner) {
        static const char *const names[] = {"sep"};
        jargs_bind(st, "joiner", a, names, 1, 0, &sep);
        if (sep.type == JT_MISSING)
            sep = jval_cstr(", ");
    } else if (!a->n) {
        jinja_fail(st, "at least one item has to be provided");
    }
    c->items = jval_list(st, JT_LIST, joiner ? 1 : (size_t)a->n).u.list;
    if (joiner)
        c->items->v[0] = sep;
    else
        memcpy(c->items->v, a->pos, (size_t)a->n * sizeof(struct jval));
    return (struct jval){.type = joiner ? JT_JOINER : JT_CYCLER, .u.cycler = c};
}

static struct jval f_strftime(struct jstate *st, const struct jargs *a)
{
    static const char *const names[] = {"format"};
    struct jval fmt;
    struct tm now;
    jargs_bind(st, "strftime_now", a, names, 1, 1, &fmt);
    jarg_str(st, fmt, "strftime_now");
    if (st->now) {
        now = *st->now;
    } else {
        time_t t = time(NULL);
        localtime_r(&t, &now);
    }
    if (fmt.len > 4096)
        jinja_fail(st, "date format too long");
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < fmt.len;) { /* one conversion at a time: each result is short */
        if (fmt.u.s[i] != '%' || i + 1 >= fmt.len) {
            jprint_raw(st, fmt.u.s + i++, 1);
            continue;
        }
        char one[5] = "%", out[256];
        uint32_t n = 1;
        while (n < 3 && i + n < fmt.len - 1 && strchr("-_0^#EO", fmt.u.s[i + n]) && fmt.u.s[i + n])
            n++;
        memcpy(one + 1, fmt.u.s + i + 1, n);
        i += n + 1;
        if (!strcmp(one, "%f"))
            jprint_raw(st, "000000", 6);
        else
            jprint_raw(st, out, strftime(out, sizeof(out), one, &now));
    }
    return jval_take(st, st->out, mark);
}

struct jval jfunc_call(struct jstate *st, int func, const struct jargs *a)
{
    switch (func) {
    case F_RANGE:
        return f_range(st, a);
    case F_DICT:
        return jval_dict(make_dict(st, "dict", a));
    case F_NAMESPACE:
        return (struct jval){.type = JT_NS, .u.dict = make_dict(st, "namespace", a)};
    case F_CYCLER:
    case F_JOINER:
        return f_cycler(st, a, func == F_JOINER);
    case F_STRFTIME:
        return f_strftime(st, a);
    default: {
        static const char *const names[] = {"message"};
        struct jval msg;
        jargs_bind(st, "raise_exception", a, names, 1, 1, &msg);
        msg = jval_tostr(st, msg);
        jinja_fail(st, "%.*s", (int)(msg.len > 800 ? 800 : msg.len), msg.u.s);
    }
    }
}
