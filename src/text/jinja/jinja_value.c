/*
 * Jinja values: arenas, constructors, truth, equality, order, membership, iteration, dicts, and
 * conversion from JSON. Every loop over data charges steps, so that no single expression can be
 * arbitrarily slow. Knows nothing of syntax or text output.
 */
#include "text/jinja/jinja_int.h"
#include "base/mem.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ errors, memory, steps */

void jinja_fail(struct jstate *st, const char *fmt, ...)
{
    char msg[900];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    error_set(st->err, "line %d: %s", st->line, msg);
    longjmp(st->jmp, 1);
}

static void chunk_add(struct jstate *st, struct jarena *a, size_t need)
{
    size_t size = a->total < 16384 ? 16384 : a->total < (1 << 20) ? a->total : 1 << 20;
    if (size < need)
        size = need;
    if (size > a->limit || a->total > a->limit - size)
        jinja_fail(st, "the template needs too much memory (more than %zu MB)", a->limit >> 20);
    struct jchunk *c = mem_alloc(sizeof(*c) + size);
    c->next = a->chunks;
    c->size = size;
    a->chunks = c;
    a->total += size;
    a->p = (char *)(c + 1);
    a->end = a->p + size;
}

void *jarena_alloc(struct jstate *st, struct jarena *a, size_t bytes)
{
    bytes = bytes ? (bytes + 15) & ~(size_t)15 : 16;
    if ((size_t)(a->end - a->p) < bytes)
        chunk_add(st, a, bytes);
    void *p = a->p;
    a->p += bytes;
    return memset(p, 0, bytes);
}

void jarena_clear(struct jarena *a)
{
    for (struct jchunk *c = a->chunks, *next; c; c = next) {
        next = c->next;
        mem_free(c);
    }
    *a = (struct jarena){0};
}

void *jalloc(struct jstate *st, size_t count, size_t size)
{
    size_t bytes;
    if (!mul_size(count, size, &bytes) || bytes > st->obj.limit)
        jinja_fail(st, "the template needs too much memory");
    return jarena_alloc(st, &st->obj, bytes);
}

char *jstr_alloc(struct jstate *st, size_t bytes)
{
    if (bytes > st->str.limit || bytes > UINT32_MAX)
        jinja_fail(st, "a string of %zu bytes is too long", bytes);
    if (!st->str.p || (size_t)(st->str.end - st->str.p) < bytes)
        chunk_add(st, &st->str, bytes);
    char *p = st->str.p;
    st->str.p += bytes;
    return p;
}

/* Refills the steps: the requested number, plus those until the next budget check. */
void jrefill(struct jstate *st, uint64_t steps)
{
    if (steps > (uint64_t)(st->steps + st->steps_bank)) {
        st->steps = st->steps_bank = 0;
        jinja_fail(st, "the template takes too many steps");
    }
    int64_t take = (int64_t)steps - st->steps + JINJA_STEPS_PER_CHECK;
    take = take < st->steps_bank ? take : st->steps_bank;
    st->steps += take;
    st->steps_bank -= take;
    if (!budget_spend(st->budget, (uint64_t)take)) {
        struct error why;
        budget_error(st->budget, &why);
        jinja_fail(st, "%s", why.msg);
    }
}

/* ------------------------------------------------------------------ constructors */

struct jval jval_str(const char *s, size_t len)
{
    return (struct jval){.type = JT_STR, .len = (uint32_t)len, .u.s = s};
}

struct jval jval_cstr(const char *s)
{
    return jval_str(s, strlen(s));
}

struct jval jval_copy(struct jstate *st, const char *s, size_t len)
{
    char *p = jstr_alloc(st, len);
    if (len)
        memcpy(p, s, len);
    return jval_str(p, len);
}

struct jval jval_take(struct jstate *st, struct buf *b, size_t mark)
{
    size_t len = b->len - mark;
    struct jval v = len ? jval_copy(st, b->p + mark, len) : jval_str("", 0);
    b->len = mark;
    return v;
}

struct jval jval_int(int64_t i)
{
    return (struct jval){.type = JT_INT, .u.i = i};
}

struct jval jval_bool(bool b)
{
    return (struct jval){.type = JT_BOOL, .u.b = b};
}

struct jval jval_float(double f)
{
    return (struct jval){.type = JT_FLOAT, .u.f = f};
}

struct jval jval_list(struct jstate *st, enum jtype type, size_t n)
{
    struct jlist *l = jalloc(st, 1, sizeof(*l));
    jcharge(st, n / 4);
    l->v = n ? jalloc(st, n, sizeof(*l->v)) : NULL;
    l->n = (uint32_t)n;
    return (struct jval){.type = (uint8_t)type, .u.list = l};
}

struct jval jval_iter(struct jstate *st, struct jlist *list, const char *name)
{
    struct jiter *it = jalloc(st, 1, sizeof(*it));
    it->list = list;
    it->name = name;
    return (struct jval){.type = JT_ITER, .u.iter = it};
}

struct jval jval_undef(struct jstate *st, enum jundef_kind kind, struct jval name, struct jval obj,
                       const char *hint)
{
    struct jundef *u = jalloc(st, 1, sizeof(*u));
    *u = (struct jundef){kind, name, obj, hint};
    return (struct jval){.type = JT_UNDEF, .u.undef = u};
}

struct jval jval_dict(struct jdict *d)
{
    return (struct jval){.type = JT_DICT, .u.dict = d};
}

/* ------------------------------------------------------------------ kinds and truth */

bool jval_is(struct jval v, const char *s)
{
    return v.type == JT_STR && v.len == strlen(s) && !memcmp(v.u.s, s, v.len);
}

bool jval_isnum(struct jval v)
{
    return v.type == JT_BOOL || v.type == JT_INT || v.type == JT_FLOAT;
}

double jval_todouble(struct jval v)
{
    return v.type == JT_FLOAT ? v.u.f : v.type == JT_INT ? (double)v.u.i : v.u.b;
}

bool jval_true(struct jval v)
{
    switch ((enum jtype)v.type) {
    case JT_MISSING:
    case JT_UNDEF:
    case JT_NONE:
        return false;
    case JT_BOOL:
        return v.u.b;
    case JT_INT:
        return v.u.i != 0;
    case JT_FLOAT:
        return v.u.f != 0;
    case JT_STR:
        return v.len > 0;
    case JT_LIST:
    case JT_TUPLE:
        return v.u.list->n > 0;
    case JT_DICT:
        return v.u.dict->n > 0;
    case JT_VIEW:
        return v.u.view->dict->n > 0;
    case JT_RANGE:
        return v.u.range->n > 0;
    default:
        return true;
    }
}

const char *jval_typename(struct jval v)
{
    static const char *const view[] = {"dict_keys", "dict_values", "dict_items"};
    switch ((enum jtype)v.type) {
    case JT_MISSING:
    case JT_UNDEF:
        return "Undefined";
    case JT_NONE:
        return "NoneType";
    case JT_BOOL:
        return "bool";
    case JT_INT:
        return "int";
    case JT_FLOAT:
        return "float";
    case JT_STR:
        return v.flags & STR_MARKUP ? "Markup" : "str";
    case JT_LIST:
        return "list";
    case JT_TUPLE:
        return v.u.list->group ? "_GroupTuple" : "tuple";
    case JT_DICT:
        return "dict";
    case JT_VIEW:
        return view[v.u.view->kind];
    case JT_ITER:
        return v.u.iter->name;
    case JT_RANGE:
        return "range";
    case JT_NS:
        return "Namespace";
    case JT_MACRO:
        return "Macro";
    case JT_FUNC:
        return "function";
    case JT_METHOD:
        return "builtin_function_or_method";
    case JT_LOOP:
        return "LoopContext";
    case JT_CYCLER:
        return "Cycler";
    case JT_JOINER:
        return "Joiner";
    }
    return "object";
}

void jundef_fail(struct jstate *st, struct jval v)
{
    struct jundef *u = v.u.undef;
    struct jval name = u->name.type == JT_STR ? u->name : jval_repr(st, u->name);
    int len = name.len > 200 ? 200 : (int)name.len;
    const char *type = jval_typename(u->obj);
    bool none = u->obj.type == JT_NONE;
    switch (u->kind) {
    case UNDEF_NAME:
        jinja_fail(st, "'%.*s' is undefined", len, name.u.s);
    case UNDEF_UNSAFE:
        jinja_fail(st, "access to attribute '%.*s' of '%s' object is unsafe.", len, name.u.s, type);
    case UNDEF_ATTR:
        if (u->name.type != JT_STR)
            jinja_fail(st, "%s%s has no element %.*s", none ? "None" : type, none ? "" : " object",
                       len, name.u.s);
        jinja_fail(st, "'%s%s' has no attribute '%.*s'", none ? "None" : type,
                   none ? "" : " object", len, name.u.s);
    case UNDEF_HINT:
        break;
    }
    jinja_fail(st, "%s", u->hint);
}

/* ------------------------------------------------------------------ equality and order */

static bool num_eq(struct jval a, struct jval b)
{
    if (a.type == JT_FLOAT || b.type == JT_FLOAT) {
        if (a.type == JT_INT || b.type == JT_INT) { /* exact: an int may not fit in a double */
            double f = a.type == JT_FLOAT ? a.u.f : b.u.f;
            int64_t i = a.type == JT_INT ? a.u.i : b.u.i;
            return f >= -0x1p63 && f < 0x1p63 && f == floor(f) && (int64_t)f == i;
        }
        return jval_todouble(a) == jval_todouble(b);
    }
    return (a.type == JT_INT ? a.u.i : a.u.b) == (b.type == JT_INT ? b.u.i : b.u.b);
}

static bool eq_deep(struct jstate *st, struct jval a, struct jval b, int depth)
{
    jcharge(st, 1);
    if (depth > JINJA_MAX_DATA)
        jinja_fail(st, "data nested too deeply to compare");
    if (jval_isnum(a) && jval_isnum(b))
        return num_eq(a, b);
    if (a.type != b.type)
        return false;
    switch ((enum jtype)a.type) {
    case JT_UNDEF:
    case JT_NONE:
        return true;
    case JT_STR:
        if (a.len != b.len || a.u.s == b.u.s)
            return a.len == b.len;
        jcharge_bytes(st, a.len);
        return jstr_same(a.u.s, b.u.s, a.len);
    case JT_LIST:
    case JT_TUPLE:
        if (a.u.list == b.u.list)
            return true;
        if (a.u.list->n != b.u.list->n)
            return false;
        for (uint32_t i = 0; i < a.u.list->n; i++) {
            if (!eq_deep(st, a.u.list->v[i], b.u.list->v[i], depth + 1))
                return false;
        }
        return true;
    case JT_DICT:
        if (a.u.dict == b.u.dict)
            return true;
        if (a.u.dict->n != b.u.dict->n)
            return false;
        for (uint32_t i = 0; i < a.u.dict->n; i++) {
            struct jval v;
            if (!jdict_get(st, b.u.dict, a.u.dict->e[i].k, &v) ||
                !eq_deep(st, a.u.dict->e[i].v, v, depth + 1))
                return false;
        }
        return true;
    case JT_RANGE: {
        struct jrange *x = a.u.range, *y = b.u.range;
        return x->n == y->n &&
               (x->n == 0 || (x->start == y->start && (x->n == 1 || x->step == y->step)));
    }
    default:
        return jval_same(a, b);
    }
}

bool jval_eq(struct jstate *st, struct jval a, struct jval b)
{
    return eq_deep(st, a, b, 0);
}

bool jval_same(struct jval a, struct jval b)
{
    if (a.type != b.type)
        return false;
    switch ((enum jtype)a.type) {
    case JT_MISSING:
    case JT_NONE:
        return true;
    case JT_BOOL:
        return a.u.b == b.u.b;
    case JT_INT:
        return a.u.i == b.u.i;
    case JT_FLOAT:
        return a.u.f == b.u.f;
    case JT_FUNC:
        return a.u.func == b.u.func;
    case JT_STR: /* CPython shares equal short literals and keys */
        return a.len == b.len && jstr_same(a.u.s, b.u.s, a.len);
    default:
        return a.u.list == b.u.list; /* all other types: compare the pointer */
    }
}

static int cmp_deep(struct jstate *st, struct jval a, struct jval b, const char *op, int depth)
{
    jcharge(st, 1);
    if (depth > JINJA_MAX_DATA)
        jinja_fail(st, "data nested too deeply to compare");
    if (jval_isnum(a) && jval_isnum(b)) {
        if (a.type != JT_FLOAT && b.type != JT_FLOAT) {
            int64_t x = a.type == JT_INT ? a.u.i : a.u.b, y = b.type == JT_INT ? b.u.i : b.u.b;
            return x < y ? -1 : x > y;
        }
        double x = jval_todouble(a), y = jval_todouble(b);
        return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;
    }
    if (a.type == JT_STR && b.type == JT_STR) {
        uint32_t n = a.len < b.len ? a.len : b.len;
        jcharge_bytes(st, n);
        uint32_t i = 0; /* byte order of UTF-8 is code point order */
        while (i < n && literal_plain((uint8_t)a.u.s[i]) == literal_plain((uint8_t)b.u.s[i]))
            i++;
        int c = i < n ? literal_plain((uint8_t)a.u.s[i]) - literal_plain((uint8_t)b.u.s[i]) : 0;
        return c < 0 ? -1 : c > 0 ? 1 : a.len < b.len ? -1 : a.len > b.len;
    }
    if (a.type == b.type && (a.type == JT_LIST || a.type == JT_TUPLE)) {
        struct jlist *x = a.u.list, *y = b.u.list;
        for (uint32_t i = 0; i < x->n && i < y->n; i++) {
            if (!eq_deep(st, x->v[i], y->v[i], depth + 1))
                return cmp_deep(st, x->v[i], y->v[i], op, depth + 1);
        }
        return x->n < y->n ? -1 : x->n > y->n;
    }
    if (a.type == JT_UNDEF)
        jundef_fail(st, a);
    if (b.type == JT_UNDEF)
        jundef_fail(st, b);
    jinja_fail(st, "'%s' not supported between instances of '%s' and '%s'", op, jval_typename(a),
               jval_typename(b));
}

int jval_cmp(struct jstate *st, struct jval a, struct jval b, const char *op)
{
    return cmp_deep(st, a, b, op, 0);
}

bool jval_contains(struct jstate *st, struct jval item, struct jval in)
{
    switch ((enum jtype)in.type) {
    case JT_STR:
        if (item.type != JT_STR)
            jinja_fail(st, "'in <string>' requires string as left operand, not %s",
                       jval_typename(item));
        jcharge_bytes(st, in.len);
        return jstr_find(in.u.s, in.len, item.u.s, item.len) != NULL;
    case JT_DICT: {
        struct jval v;
        return jdict_get(st, in.u.dict, item, &v);
    }
    case JT_RANGE: {
        struct jrange *r = in.u.range;
        if (item.type == JT_FLOAT && item.u.f == floor(item.u.f) && fabs(item.u.f) < 0x1p62)
            item = jval_int((int64_t)item.u.f);
        if (item.type == JT_BOOL)
            item = jval_int(item.u.b);
        if (item.type != JT_INT || !r->n)
            return false;
        int64_t last = r->start + (r->n - 1) * r->step, lo = r->step > 0 ? r->start : last,
                hi = r->step > 0 ? last : r->start;
        return item.u.i >= lo && item.u.i <= hi && (item.u.i - lo) % llabs(r->step) == 0;
    }
    default: {
        if (!jval_iterable(in))
            jinja_fail(st, "argument of type '%s' is not iterable", jval_typename(in));
        struct jlist *l = jval_tolist(st, in);
        for (uint32_t i = 0; i < l->n; i++) {
            if (jval_eq(st, l->v[i], item))
                return true;
        }
        return false;
    }
    }
}

/* ------------------------------------------------------------------ length and iteration */

int64_t jval_len(struct jstate *st, struct jval v)
{
    switch ((enum jtype)v.type) {
    case JT_UNDEF:
        return 0;
    case JT_STR:
        return jstr_len(st, v);
    case JT_LIST:
    case JT_TUPLE:
        return v.u.list->n;
    case JT_DICT:
        return v.u.dict->n;
    case JT_VIEW:
        return v.u.view->dict->n;
    case JT_RANGE:
        return v.u.range->n;
    case JT_LOOP: {
        struct jval n = jloop_attr(st, v.u.loop, jval_cstr("length"));
        return n.u.i;
    }
    default:
        jinja_fail(st, "object of type '%s' has no len()", jval_typename(v));
    }
}

bool jval_iterable(struct jval v)
{
    return v.type == JT_UNDEF || v.type == JT_STR || v.type == JT_LIST || v.type == JT_TUPLE ||
           v.type == JT_DICT || v.type == JT_VIEW || v.type == JT_ITER || v.type == JT_RANGE;
}

static struct jlist *dict_list(struct jstate *st, struct jdict *d, enum jview_kind kind)
{
    struct jlist *l = jval_list(st, JT_LIST, d->n).u.list;
    for (uint32_t i = 0; i < d->n; i++) {
        if (kind == VIEW_ITEMS) {
            l->v[i] = jval_list(st, JT_TUPLE, 2);
            l->v[i].u.list->v[0] = d->e[i].k;
            l->v[i].u.list->v[1] = d->e[i].v;
        } else {
            l->v[i] = kind == VIEW_KEYS ? d->e[i].k : d->e[i].v;
        }
    }
    return l;
}

struct jlist *jval_tolist(struct jstate *st, struct jval v)
{
    switch ((enum jtype)v.type) {
    case JT_UNDEF:
        return jval_list(st, JT_LIST, 0).u.list;
    case JT_LIST:
    case JT_TUPLE:
        return v.u.list;
    case JT_STR: {
        int64_t n = jstr_len(st, v);
        struct jlist *l = jval_list(st, JT_LIST, (size_t)n).u.list;
        for (size_t i = 0, k = 0; i < v.len; k++) {
            size_t from = i;
            jutf8_next(v.u.s, v.len, &i);
            l->v[k] = jval_str(v.u.s + from, i - from);
        }
        return l;
    }
    case JT_DICT:
        return dict_list(st, v.u.dict, VIEW_KEYS);
    case JT_VIEW:
        return dict_list(st, v.u.view->dict, v.u.view->kind);
    case JT_ITER: {
        struct jiter *it = v.u.iter;
        struct jlist *l = it->list;
        if (it->pos) {
            l = jval_list(st, JT_LIST, 0).u.list;
            l->v = it->list->v + it->pos;
            l->n = it->list->n - it->pos;
        }
        it->pos = it->list->n;
        return l;
    }
    case JT_RANGE: {
        struct jrange *r = v.u.range;
        struct jlist *l = jval_list(st, JT_LIST, (size_t)r->n).u.list;
        for (int64_t i = 0; i < r->n; i++)
            l->v[i] = jval_int(r->start + i * r->step);
        return l;
    }
    default:
        jinja_fail(st, "'%s' object is not iterable", jval_typename(v));
    }
}

/* ------------------------------------------------------------------ dicts */

#define SMALL_DICT 8 /* up to this size a scan beats hashing */

static void hashable(struct jstate *st, struct jval v, int depth)
{
    if (v.type == JT_TUPLE) {
        jcharge(st, v.u.list->n);
        if (depth > JINJA_MAX_DATA)
            jinja_fail(st, "data nested too deeply");
        for (uint32_t i = 0; i < v.u.list->n; i++)
            hashable(st, v.u.list->v[i], depth + 1);
    } else if (v.type == JT_LIST || v.type == JT_DICT) {
        jinja_fail(st, "unhashable type: '%s'", jval_typename(v));
    }
}

static void jval_hashable(struct jstate *st, struct jval v)
{
    hashable(st, v, 0);
}

/* Hashes a hashable value, whose nesting is limited. */
static uint64_t hash(struct jstate *st, struct jval v)
{
    uint64_t h = 0x9e3779b97f4a7c15u;
    if (v.type == JT_STR) {
        jcharge_bytes(st, v.len);
        for (uint32_t i = 0; i < v.len; i++)
            h = (h ^ literal_plain((uint8_t)v.u.s[i])) * 0x100000001b3u;
    } else if (jval_isnum(v)) {
        double f = jval_todouble(v); /* equal numbers of any type have equal hashes */
        if (f == 0)
            f = 0;
        memcpy(&h, &f, sizeof(h));
    } else if (v.type == JT_TUPLE) {
        for (uint32_t i = 0; i < v.u.list->n; i++)
            h = (h ^ hash(st, v.u.list->v[i])) * 0x100000001b3u;
    } else {
        h += v.type; /* None, Undefined; other objects all collide, which is only slow */
    }
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

struct jdict *jdict_new(struct jstate *st, uint32_t cap)
{
    struct jdict *d = jalloc(st, 1, sizeof(*d));
    d->e = cap ? jalloc(st, cap, sizeof(*d->e)) : NULL;
    d->cap = cap;
    return d;
}

static void index_build(struct jstate *st, struct jdict *d)
{
    d->n_index = 32;
    while (d->n_index < d->cap * 2)
        d->n_index *= 2;
    d->index = jalloc(st, d->n_index, sizeof(*d->index));
    for (uint32_t i = 0; i < d->n; i++) {
        uint64_t h = hash(st, d->e[i].k);
        while (d->index[h & (d->n_index - 1)])
            h++;
        d->index[h & (d->n_index - 1)] = i + 1;
    }
}

static struct jpair *dict_find(struct jstate *st, struct jdict *d, struct jval key)
{
    if (d->n <= SMALL_DICT) {
        for (uint32_t i = 0; i < d->n; i++) {
            struct jval k = d->e[i].k;
            if (key.type == JT_STR
                    ? k.type == JT_STR && k.len == key.len && jstr_same(k.u.s, key.u.s, k.len)
                    : jval_eq(st, k, key))
                return &d->e[i];
        }
        return NULL;
    }
    if (!d->index)
        index_build(st, d);
    for (uint64_t h = hash(st, key);; h++) {
        uint32_t i = d->index[h & (d->n_index - 1)];
        if (!i)
            return NULL;
        if (jval_eq(st, d->e[i - 1].k, key))
            return &d->e[i - 1];
    }
}

bool jdict_get(struct jstate *st, struct jdict *d, struct jval key, struct jval *out)
{
    jval_hashable(st, key);
    struct jpair *p = dict_find(st, d, key);
    if (p)
        *out = p->v;
    return p != NULL;
}

void jdict_put(struct jstate *st, struct jdict *d, struct jval key, struct jval val)
{
    jval_hashable(st, key);
    struct jpair *p = dict_find(st, d, key);
    if (p) {
        p->v = val;
        return;
    }
    if (d->n == d->cap) {
        uint32_t cap = d->cap ? d->cap * 2 : 4;
        struct jpair *e = jalloc(st, cap, sizeof(*e));
        if (d->n)
            memcpy(e, d->e, d->n * sizeof(*e));
        d->e = e;
        d->cap = cap;
        d->index = NULL;
    }
    d->e[d->n++] = (struct jpair){key, val};
    if (d->index) {
        uint64_t h = hash(st, key);
        while (d->index[h & (d->n_index - 1)])
            h++;
        d->index[h & (d->n_index - 1)] = d->n;
    }
}

/* ------------------------------------------------------------------ sorting */

/* Merge sort that only tests "b < a", like Python's sort. `reverse` keeps equal items in order. */
uint32_t *jval_sort(struct jstate *st, const struct jval *keys, uint32_t n, bool reverse)
{
    uint32_t *a = jalloc(st, (size_t)n + 1, sizeof(*a)), *b = jalloc(st, (size_t)n + 1, sizeof(*b));
    for (uint32_t i = 0; i < n; i++)
        a[i] = i;
    for (uint64_t w = 1; w < n; w *= 2) {
        for (uint64_t lo = 0; lo < n; lo += 2 * w) {
            uint64_t mid = lo + w < n ? lo + w : n, hi = lo + 2 * w < n ? lo + 2 * w : n;
            for (uint64_t i = lo, j = mid, k = lo; k < hi; k++) {
                bool right = i >= mid;
                if (!right && j < hi) {
                    int c = jval_cmp(st, keys[a[j]], keys[a[i]], "<");
                    right = reverse ? c == 1 : c == -1;
                }
                b[k] = right ? a[j++] : a[i++];
            }
        }
        uint32_t *t = a;
        a = b;
        b = t;
    }
    return a;
}

struct jpair *jdict_sorted(struct jstate *st, struct jdict *d)
{
    struct jval *keys = jalloc(st, (size_t)d->n + 1, sizeof(*keys));
    struct jpair *e = jalloc(st, (size_t)d->n + 1, sizeof(*e));
    for (uint32_t i = 0; i < d->n; i++)
        keys[i] = d->e[i].k;
    uint32_t *order = jval_sort(st, keys, d->n, false);
    for (uint32_t i = 0; i < d->n; i++)
        e[i] = d->e[order[i]];
    return e;
}

/* ------------------------------------------------------------------ from JSON */

static void grow(size_t *limit, size_t by, size_t end)
{
    if (*limit < end)
        *limit = by < end - *limit ? *limit + by : end;
}

/* The limits grow with the size of the context. */
/* A text of the context; a copy with literal bytes if it is data that needs them. */
static struct jval context_str(struct jstate *st, const char *s, size_t n)
{
    if (!st->literal || !literal_needed(s, n))
        return jval_str(s, n);
    char *copy = jstr_alloc(st, n + 1);
    memcpy(copy, s, n);
    literal_mark(copy, n);
    return jval_str(copy, n);
}

struct jval jval_fromjson(struct jstate *st, const json_t *j, int depth)
{
    st->steps_bank += st->steps_bank < JINJA_MAX_STEPS ? 2000 : 0;
    st->obj.limit += st->obj.limit < JINJA_MAX_MEMORY ? 4096 : 0;
    if (depth > JINJA_MAX_DATA)
        jinja_fail(st, "the context is nested too deeply (more than %d levels)", JINJA_MAX_DATA);
    switch (json_typeof(j)) {
    case JSON_STRING: {
        size_t len = json_string_length(j);
        if (len > UINT32_MAX)
            jinja_fail(st, "a string of %zu bytes is too long", len);
        grow(&st->str.limit, len * 32, JINJA_MAX_MEMORY);
        grow(&st->out_limit, len * 16, JINJA_MAX_OUTPUT);
        st->steps_bank += st->steps_bank < JINJA_MAX_STEPS ? (int64_t)len * 4 : 0;
        return context_str(st, json_string_value(j), len);
    }
    case JSON_INTEGER:
        return jval_int(json_integer_value(j));
    case JSON_REAL:
        return jval_float(json_real_value(j));
    case JSON_TRUE:
    case JSON_FALSE:
        return jval_bool(json_is_true(j));
    case JSON_NULL:
        return JV_NONE;
    case JSON_ARRAY: {
        struct jval v = jval_list(st, JT_LIST, json_array_size(j));
        for (uint32_t i = 0; i < v.u.list->n; i++)
            v.u.list->v[i] = jval_fromjson(st, json_array_get(j, i), depth + 1);
        return v;
    }
    case JSON_OBJECT: {
        struct jdict *d = jdict_new(st, (uint32_t)json_object_size(j) + 1);
        const char *key;
        size_t key_len;
        json_t *value;
        json_object_keylen_foreach((json_t *)j, key, key_len, value)
        {
            /* keys are distinct: no look-up */
            d->e[d->n].k = context_str(st, key, key_len); /* NOLINT: e has room for all of them */
            d->e[d->n++].v = jval_fromjson(st, value, depth + 1);
        }
        return jval_dict(d);
    }
    }
    return JV_NONE;
}
