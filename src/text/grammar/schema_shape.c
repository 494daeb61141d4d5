/*
 * Shapes: what a value may be, per type. Merges shapes and detects empty ones. See schema_int.h.
 * Shapes are values; the lists they point to live in the arena and never change.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { LIST_MAX = 400, TOTAL_MAX = 60000, ARENA_MAX = 48 << 20, BLOCK = 64 << 10 };

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    char data[];
};

bool schema_fail(struct schema *s, const struct jvalue *at, const char *fmt, ...)
{
    if (s->failed)
        return false;
    s->failed = true;
    if (s->probing)
        return false;
    struct buf path = {0};
    char what[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    if (at)
        jvalue_path(at, &path);
    error_set(s->err, "%.300s%s%s", at ? path.p : "", at ? ": " : "", what);
    buf_clear(&path);
    return false;
}

void *schema_alloc(struct schema *s, size_t bytes)
{
    bytes = (bytes + 15) & ~(size_t)15;
    struct arena_block *b = s->blocks;
    if (!b || b->used + bytes > b->size) {
        size_t size = bytes > BLOCK ? bytes : BLOCK;
        b = mem_alloc(sizeof *b + size);
        b->next = s->blocks;
        b->used = 0;
        b->size = size;
        s->blocks = b;
        s->arena_used += size;
        if (s->arena_used > ARENA_MAX)
            schema_fail(s, NULL, "the schema takes over 48 MiB to compile");
    }
    void *p = b->data + b->used;
    b->used += bytes;
    memset(p, 0, bytes);
    return p;
}

void schema_clear(struct schema *s)
{
    while (s->blocks) {
        struct arena_block *b = s->blocks;
        s->blocks = b->next;
        mem_free(b);
    }
    mem_free(s->memo);
    mem_free(s->active);
    mem_free(s->empty_known);
    re_pool_free(s->pool);
    jdoc_free(s->doc);
}

struct value_shape shape_any(void)
{
    return (struct value_shape){.types = TY_ANY,
                                .num = RE_ALL,
                                .str = RE_ALL,
                                .names = RE_ALL,
                                .max_props = NO_LIMIT,
                                .max_items = NO_LIMIT};
}

struct value_shape shape_none(void)
{
    struct value_shape x = shape_any();
    x.types = 0;
    return x;
}

/* Identical parts, not just equivalent ones. */
static bool shape_same(const struct value_shape *a, const struct value_shape *b)
{
    return a->types == b->types && a->num == b->num && a->str == b->str && a->lark == b->lark &&
           a->prop_lists == b->prop_lists && a->required == b->required && a->needs == b->needs &&
           a->names == b->names && a->min_props == b->min_props && a->max_props == b->max_props &&
           a->min_items == b->min_items && a->max_items == b->max_items &&
           a->item_lists == b->item_lists && a->contains == b->contains;
}

bool shapes_add(struct schema *s, struct shapes *to, const struct value_shape *x)
{
    if (!x->types || s->failed)
        return !s->failed;
    for (uint32_t i = 0; i < to->n; i++)
        if (shape_same(&to->v[i], x))
            return true;
    if (to->n >= LIST_MAX)
        return schema_fail(s, NULL, "over %d alternatives for one value", LIST_MAX);
    if (++s->n_shapes > TOTAL_MAX)
        return schema_fail(s, NULL, "over %d alternatives in all", TOTAL_MAX);
    if (to->n == to->cap) {
        uint32_t cap = to->cap ? 2 * to->cap : 2;
        struct value_shape *v = schema_alloc(s, cap * sizeof *v);
        if (to->n)
            memcpy(v, to->v, to->n * sizeof *v);
        to->v = v;
        to->cap = cap;
    }
    to->v[to->n++] = *x;
    return true;
}

bool lits_false(struct literals l)
{
    for (uint32_t i = 0; i < l.n; i++)
        if (l.v[i] == LIT_FALSE)
            return true;
    return false;
}

/* Union of two sorted sets, without duplicates. */
struct literals lits_join(struct schema *s, struct literals a, struct literals b)
{
    if (!a.n || !b.n)
        return a.n ? a : b;
    if (a.n == b.n && !memcmp(a.v, b.v, a.n * sizeof *a.v))
        return a;
    uint32_t *v = schema_alloc(s, (a.n + b.n) * sizeof *v), n = 0;
    for (uint32_t i = 0, j = 0; i < a.n || j < b.n;) {
        uint32_t x = j >= b.n || (i < a.n && a.v[i] <= b.v[j]) ? a.v[i] : b.v[j];
        while (i < a.n && a.v[i] == x)
            i++;
        while (j < b.n && b.v[j] == x)
            j++;
        v[n++] = x;
    }
    return (struct literals){n, v};
}

static bool name_is(const char *a, uint32_t n, const char *b, uint32_t m)
{
    return n == m && !memcmp(a, b, n);
}

/* Whether the term matches this text. Uses derivatives; no automaton is built. */
static bool term_matches(struct schema *s, uint32_t term, const char *text, size_t n)
{
    uint32_t both = re_and(s->pool, term, re_literal(s->pool, text, n));
    return !term_empty(s, both);
}

struct literals shape_prop(struct schema *s, const struct value_shape *x, const char *name,
                           uint32_t len)
{
    struct literals l = {0};
    for (const struct prop_keywords *c = x->prop_lists; c; c = c->next) {
        bool known = false;
        for (uint32_t i = 0; i < c->n_props; i++)
            if (name_is(c->props[i].name, c->props[i].len, name, len)) {
                l = lits_join(s, l, c->props[i].lits);
                known = true;
            }
        for (uint32_t i = 0; i < c->n_pats; i++)
            if (term_matches(s, c->pats[i].re, name, len)) {
                l = lits_join(s, l, c->pats[i].lits);
                known = true;
            }
        if (!known)
            l = lits_join(s, l, c->extra);
    }
    return l;
}

struct literals shape_item(struct schema *s, const struct value_shape *x, uint32_t index)
{
    struct literals l = {0};
    for (const struct item_keywords *c = x->item_lists; c; c = c->next)
        l = lits_join(s, l, index < c->n_prefix ? c->prefix[index] : c->items);
    return l;
}

#define JOIN_LISTS(type, a, b, out)                                                                \
    do {                                                                                           \
        struct type *head_ = NULL, **at_ = &head_;                                                 \
        if (!(a) || !(b)) {                                                                        \
            head_ = (a) ? (a) : (b);                                                               \
        } else {                                                                                   \
            for (const struct type *x_ = (a); x_; x_ = x_->next) {                                 \
                *at_ = schema_alloc(s, sizeof *x_);                                                \
                **at_ = *x_;                                                                       \
                at_ = &(*at_)->next;                                                               \
            }                                                                                      \
            *at_ = (b);                                                                            \
        }                                                                                          \
        (out) = head_;                                                                             \
    } while (0)

struct value_shape shape_merge(struct schema *s, const struct value_shape *a,
                               const struct value_shape *b)
{
    struct value_shape x = *a;
    x.types &= b->types;
    if (!x.types)
        return x;
    x.num = re_and(s->pool, a->num, b->num);
    x.str = re_and(s->pool, a->str, b->str);
    if (a->lark && b->lark && a->lark != b->lark)
        schema_fail(s, b->lark, "a second x-lark for one string cannot be enforced");
    x.lark = a->lark ? a->lark : b->lark;
    x.names = re_and(s->pool, a->names, b->names);
    if (a->prop_lists != b->prop_lists)
        JOIN_LISTS(prop_keywords, a->prop_lists, b->prop_lists, x.prop_lists);
    if (a->required != b->required)
        JOIN_LISTS(name_list, a->required, b->required, x.required);
    if (a->needs != b->needs)
        JOIN_LISTS(name_list, a->needs, b->needs, x.needs);
    if (a->item_lists != b->item_lists)
        JOIN_LISTS(item_keywords, a->item_lists, b->item_lists, x.item_lists);
    if (a->contains != b->contains)
        JOIN_LISTS(contains, a->contains, b->contains, x.contains);
#define MOST(f)  x.f = a->f > b->f ? a->f : b->f
#define LEAST(f) x.f = a->f < b->f ? a->f : b->f
    MOST(min_props);
    LEAST(max_props);
    MOST(min_items);
    LEAST(max_items);
    shape_prune(s, &x);
    return x;
}

bool term_empty(struct schema *s, uint32_t term)
{
    if (term == RE_NONE || term == RE_ALL || term == RE_EPS || term == RE_ANY)
        return term == RE_NONE;
    if (re_nullable(s->pool, term))
        return false;
    if (term >= s->n_empty_known) {
        uint32_t n = 2 * term + 64;
        s->empty_known = mem_realloc(s->empty_known, n, 1);
        memset(s->empty_known + s->n_empty_known, 0, n - s->n_empty_known);
        s->n_empty_known = n;
    }
    if (!s->empty_known[term])
        s->empty_known[term] = re_is_empty(s->pool, term) ? 2 : 1;
    return s->empty_known[term] == 2;
}

void shape_prune(struct schema *s, struct value_shape *x)
{
    if (x->types & TY_NUM && x->num != RE_ALL && term_empty(s, x->num))
        x->types &= ~(uint32_t)TY_NUM;
    if (x->types & TY_STR && x->str != RE_ALL && term_empty(s, x->str))
        x->types &= ~(uint32_t)TY_STR;
    if (x->min_items > x->max_items)
        x->types &= ~(uint32_t)TY_ARR;
    if (x->min_props > x->max_props)
        x->types &= ~(uint32_t)TY_OBJ;
    for (const struct name_list *r = x->required; r && x->types & TY_OBJ; r = r->next)
        if (lits_false(shape_prop(s, x, r->name, r->len)))
            x->types &= ~(uint32_t)TY_OBJ;
    for (uint32_t i = 0; i < x->min_items && i < 64 && x->types & TY_ARR && x->item_lists; i++)
        if (lits_false(shape_item(s, x, i)))
            x->types &= ~(uint32_t)TY_ARR;
}

bool shapes_and(struct schema *s, struct shapes *to, const struct shapes *with)
{
    struct shapes out = {0};
    if (with->n == 1 && with->v[0].types == TY_ANY) { /* common: a schema with only annotations */
        struct value_shape any = shape_any();
        if (shape_same(&with->v[0], &any))
            return true;
    }
    for (uint32_t i = 0; i < to->n; i++)
        for (uint32_t j = 0; j < with->n; j++) {
            struct value_shape x = shape_merge(s, &to->v[i], &with->v[j]);
            if (re_pool_error(s->pool))
                return schema_fail(s, NULL, "%s", re_pool_error(s->pool));
            if (!shapes_add(s, &out, &x))
                return false;
        }
    *to = out;
    return true;
}

static bool lits_empty(struct schema *s, struct literals l, int depth)
{
    if (lits_false(l))
        return true;
    if (l.n < 2 || depth <= 0)
        return false;
    struct shapes all = {0};
    bool dropped = s->dropped, empty = true;
    s->probing++;
    if (schema_expand_all(s, l, &all))
        for (uint32_t i = 0; i < all.n && empty; i++)
            empty = shape_empty(s, &all.v[i], depth - 1);
    empty = empty && !s->failed;
    s->failed = false;
    s->probing--;
    s->dropped = dropped;
    return empty;
}

bool shape_empty(struct schema *s, struct value_shape *x, int depth)
{
    shape_prune(s, x);
    for (const struct name_list *r = x->required; r && x->types & TY_OBJ && !s->failed; r = r->next)
        if (lits_empty(s, shape_prop(s, x, r->name, r->len), depth))
            x->types &= ~(uint32_t)TY_OBJ;
    for (uint32_t i = 0; i < x->min_items && i < 8 && x->types & TY_ARR && !s->failed; i++)
        if (lits_empty(s, shape_item(s, x, i), depth))
            x->types &= ~(uint32_t)TY_ARR;
    return !x->types;
}
