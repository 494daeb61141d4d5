/*
 * Converts a schema's keywords to shapes: see schema_int.h. Each keyword can be satisfied or
 * negated. If one of these cannot be expressed exactly, the keyword is rejected with its path.
 *
 * Must not know the parser or tokens.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 100, COUNT_MAX = 60000, LENGTH_MAX = 32768 };

struct literals schema_lits_one(struct schema *s, uint32_t lit)
{
    uint32_t *v = schema_alloc(s, sizeof *v);
    *v = lit;
    return (struct literals){1, v};
}

/* The literals of a subschema: none for `true` and {}, FALSE for `false`. */
struct literals schema_lits(struct schema *s, const struct jvalue *v, bool negated)
{
    if (v->kind == J_TRUE || (v->kind == J_OBJECT && !v->n))
        return negated ? schema_lits_one(s, LIT_FALSE) : (struct literals){0};
    if (v->kind == J_FALSE)
        return negated ? (struct literals){0} : schema_lits_one(s, LIT_FALSE);
    return schema_lits_one(s, v->id << 2 | (negated ? LIT_NOT : 0));
}

/* ---- numbers in keywords ---- */

static bool get_decimal(struct schema *s, const struct jvalue *v, struct decimal *d)
{
    if (v->kind != J_NUMBER)
        return schema_fail(s, v, "is not a number");
    /* Long decimals come from printing doubles: use the shortest form of the double. */
    if (v->len > 15 && memchr(v->text, '.', v->len) && v->len < 60) {
        char text[64];
        memcpy(text, v->text, v->len);
        text[v->len] = 0;
        double x = strtod(text, NULL);
        for (int p = 15; p <= 17; p++) {
            snprintf(text, sizeof text, "%.*g", p, x);
            if (strtod(text, NULL) == x)
                break;
        }
        return decimal_parse(text, strlen(text), d) || schema_fail(s, v, "is too large");
    }
    return decimal_parse(v->text, v->len, d) ||
           schema_fail(s, v, "has over 400 digits or too large an exponent");
}

/* A count: a non-negative integer (2.0 is valid). Returns at most `most` + 1. */
bool schema_count(struct schema *s, const struct jvalue *v, uint32_t most, uint32_t *n)
{
    struct decimal d;
    if (!get_decimal(s, v, &d))
        return false;
    if (d.negative || d.n > d.exp)
        return schema_fail(s, v, "is not a count");
    uint64_t x = 0;
    for (int i = 0; i < d.exp && x <= most; i++)
        x = x * 10 + (uint64_t)(i < d.n ? d.digit[i] - '0' : 0);
    *n = x > most ? most + 1 : (uint32_t)x;
    return true;
}

static bool too_complex(struct schema *s, const struct jvalue *at)
{
    if (!re_pool_error(s->pool))
        return false;
    schema_fail(s, at, "%s", re_pool_error(s->pool));
    return true;
}

/* ---- constants ---- */

/* The term of a number: its preferred spelling, or all spellings. */
bool schema_const_number(struct schema *s, const struct jvalue *v, bool all, uint32_t *term)
{
    struct decimal d;
    char text[1000];
    if (!get_decimal(s, v, &d))
        return false;
    if (all) {
        *term = num_compare(s, &d, CMP_EQUAL);
        return true;
    }
    decimal_print(&d, text);
    *term = re_literal(s->pool, text, strlen(text));
    return true;
}

/* The shape of the single value v. */
bool schema_const(struct schema *s, const struct jvalue *v, struct value_shape *x)
{
    *x = shape_any();
    switch (v->kind) {
    case J_NULL:
        x->types = TY_NULL;
        return true;
    case J_TRUE:
        x->types = TY_TRUE;
        return true;
    case J_FALSE:
        x->types = TY_FALSE;
        return true;
    case J_NUMBER:
        x->types = TY_NUM;
        return schema_const_number(s, v, false, &x->num);
    case J_STRING:
        x->types = TY_STR;
        x->str = re_literal(s->pool, v->text, v->len);
        return true;
    case J_ARRAY:
        x->types = TY_ARR;
        x->min_items = x->max_items = v->n;
        x->item_lists = schema_alloc(s, sizeof *x->item_lists);
        x->item_lists->n_prefix = v->n;
        x->item_lists->prefix = schema_alloc(s, (v->n + 1) * sizeof(struct literals));
        for (const struct jvalue *c = v->first; c; c = c->next)
            x->item_lists->prefix[c->index] = schema_lits_one(s, c->id << 2 | LIT_CONST);
        return true;
    default:
        x->types = TY_OBJ;
        x->prop_lists = schema_alloc(s, sizeof *x->prop_lists);
        x->prop_lists->props = schema_alloc(s, (v->n + 1) * sizeof(struct prop_schema));
        x->prop_lists->extra = schema_lits_one(s, LIT_FALSE);
        for (const struct jvalue *c = v->first; c; c = c->next) {
            if (jvalue_get_n(v, c->key, c->key_len) != c)
                continue; /* a later member has the same name */
            x->prop_lists->props[x->prop_lists->n_props++] = (struct prop_schema){
                c->key, c->key_len, schema_lits_one(s, c->id << 2 | LIT_CONST)};
            struct name_list *r = schema_alloc(s, sizeof *r);
            *r = (struct name_list){.next = x->required, .name = c->key, .len = c->key_len};
            x->required = r;
        }
        return true;
    }
}

/* Shapes of all values except v. */
bool schema_not_const(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    struct value_shape x = shape_any();
    if (v->kind == J_ARRAY) {
        x.types = TY_ANY & ~(uint32_t)TY_ARR;
        if (!shapes_add(s, out, &x))
            return false;
        x.types = TY_ARR;
        x.min_items = v->n + 1;
        if (!shapes_add(s, out, &x))
            return false;
        x.min_items = 0;
        x.max_items = v->n - 1;
        if (v->n && !shapes_add(s, out, &x))
            return false;
        for (const struct jvalue *c = v->first; c; c = c->next) {
            x = shape_any();
            x.types = TY_ARR;
            x.min_items = x.max_items = v->n;
            x.item_lists = schema_alloc(s, sizeof *x.item_lists);
            x.item_lists->n_prefix = c->index + 1;
            x.item_lists->prefix = schema_alloc(s, (c->index + 1) * sizeof(struct literals));
            x.item_lists->prefix[c->index] = schema_lits_one(s, c->id << 2 | LIT_CONST | LIT_NOT);
            if (!shapes_add(s, out, &x))
                return false;
        }
        return true;
    }
    if (v->kind == J_OBJECT) {
        /* Too many members, too few, one missing, or one different. (With the right number and none
         * missing, there are no others.) */
        x.types = TY_ANY & ~(uint32_t)TY_OBJ;
        if (!shapes_add(s, out, &x))
            return false;
        x.types = TY_OBJ;
        x.min_props = v->n + 1;
        if (!shapes_add(s, out, &x))
            return false;
        for (const struct jvalue *c = v->first; c; c = c->next)
            for (int missing = 0; missing < 2; missing++) {
                x = shape_any();
                x.types = TY_OBJ;
                x.prop_lists = schema_alloc(s, sizeof *x.prop_lists);
                x.prop_lists->n_props = 1;
                x.prop_lists->props = schema_alloc(s, sizeof *x.prop_lists->props);
                *x.prop_lists->props = (struct prop_schema){
                    c->key, c->key_len,
                    schema_lits_one(s, missing ? LIT_FALSE : (c->id << 2 | LIT_CONST | LIT_NOT))};
                if (!shapes_add(s, out, &x))
                    return false;
            }
        return true;
    }
    if (v->kind == J_NULL || v->kind == J_TRUE || v->kind == J_FALSE) {
        uint32_t ty = v->kind == J_NULL ? TY_NULL : v->kind == J_TRUE ? TY_TRUE : TY_FALSE;
        x.types = TY_ANY & ~ty;
    } else if (v->kind == J_NUMBER) {
        uint32_t term;
        if (!schema_const_number(s, v, true, &term))
            return false;
        x.num = re_and(s->pool, num_plain(s), re_not(s->pool, term));
    } else {
        x.str = re_not(s->pool, re_literal(s->pool, v->text, v->len));
    }
    return shapes_add(s, out, &x);
}

/* Shapes of a list of values. Values of simple types share one shape. */
static bool enum_shapes(struct schema *s, const struct jvalue *list, struct shapes *out)
{
    struct value_shape simple = shape_none();
    uint32_t *nums = mem_alloc((list->n + 1) * sizeof *nums), n_nums = 0;
    uint32_t *strs = mem_alloc((list->n + 1) * sizeof *strs), n_strs = 0;
    bool ok = true;
    for (const struct jvalue *c = list->first; c && ok; c = c->next) {
        struct value_shape x;
        ok = schema_const(s, c, &x);
        if (!ok)
            break;
        if (x.types & (TY_ARR | TY_OBJ)) {
            ok = shapes_add(s, out, &x);
            continue;
        }
        simple.types |= x.types;
        if (x.types & TY_NUM)
            nums[n_nums++] = x.num;
        if (x.types & TY_STR)
            strs[n_strs++] = x.str;
    }
    simple.num = n_nums ? re_or_n(s->pool, nums, n_nums) : RE_ALL;
    simple.str = n_strs ? re_or_n(s->pool, strs, n_strs) : RE_ALL;
    mem_free(nums);
    mem_free(strs);
    return ok && shapes_add(s, out, &simple);
}

/* ---- simple keywords: each gives one shape, also when negated ---- */

bool schema_types(struct schema *s, const struct jvalue *v, uint32_t *types, bool *integer)
{
    static const struct {
        const char *name;
        uint32_t ty;
    } names[] = {{"null", TY_NULL},  {"boolean", TY_BOOL}, {"number", TY_NUM}, {"integer", TY_NUM},
                 {"string", TY_STR}, {"array", TY_ARR},    {"object", TY_OBJ}, {"any", TY_ANY}};
    bool number = false;
    *types = 0;
    *integer = false;
    for (const struct jvalue *c = v->kind == J_ARRAY ? v->first : v; c; c = c->next) {
        uint32_t ty = 0;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (jvalue_is(c, names[i].name))
                ty = names[i].ty;
        if (!ty)
            return schema_fail(s, c, "is not a type name");
        *types |= ty;
        if (ty & TY_NUM) {
            if (jvalue_is(c, "integer"))
                *integer = true;
            else
                number = true;
        }
        if (v->kind != J_ARRAY)
            break;
    }
    *integer = *integer && !number;
    return true;
}

/* The term of the numbers that satisfy a number keyword. */
bool schema_number_key(struct schema *s, const struct jvalue *parent, const struct jvalue *v,
                       uint32_t *term)
{
    struct decimal d = {0};
    bool is_min = jvalue_get(parent, "minimum") == v, is_max = jvalue_get(parent, "maximum") == v;
    if (!get_decimal(s, v, &d))
        return false;
    if (jvalue_get(parent, "multipleOf") == v) {
        bool ok = false;
        if (!d.n || d.negative)
            return schema_fail(s, v, "is not greater than zero");
        *term = num_multiple(s, &d, &ok);
        return ok || schema_fail(s, v, "an automaton for this multiple would be too large");
    }
    int outcome = is_min || jvalue_get(parent, "exclusiveMinimum") == v ? CMP_MORE : CMP_LESS;
    if (is_min || is_max) {
        /* draft 4: exclusiveMinimum is a boolean next to minimum */
        const struct jvalue *ex =
            jvalue_get(parent, is_min ? "exclusiveMinimum" : "exclusiveMaximum");
        if (!ex || ex->kind != J_TRUE)
            outcome |= CMP_EQUAL;
    }
    *term = num_compare(s, &d, outcome);
    return true;
}

/* The term of the strings that satisfy a string keyword. RE_ALL: no restriction. */
bool schema_string_key(struct schema *s, const struct jvalue *v, const char *key, uint32_t *term)
{
    *term = RE_ALL;
    if (!strcmp(key, "minLength") || !strcmp(key, "maxLength")) {
        uint32_t n;
        bool min = key[1] == 'i';
        if (!schema_count(s, v, LENGTH_MAX, &n))
            return false;
        if (min && n > LENGTH_MAX)
            return schema_fail(s, v, "requires over %d characters", LENGTH_MAX);
        if (!min && n > LENGTH_MAX)
            n = LENGTH_MAX; /* stricter than the schema: no reply is that long */
        *term = re_rep(s->pool, RE_ANY, min ? n : 0, min ? RE_INF : n);
        return true;
    }
    if (v->kind != J_STRING)
        return schema_fail(s, v, "is not a string");
    if (!strcmp(key, "pattern")) {
        struct error err = {0};
        *term = re_parse(s->pool, v->text, v->len, RE_SEARCH, &err);
        return !err.msg[0] || schema_fail(s, v, "%s", err.msg);
    }
    enum format_known known = schema_format(s, v->text, v->len, term);
    if (known == FORMAT_REFUSED)
        return schema_fail(s, v, "the format \"%.*s\" cannot be enforced", (int)v->len, v->text);
    if (known == FORMAT_UNKNOWN)
        *term = RE_ALL;
    return true;
}

/* ---- arrays and objects ---- */

bool schema_is(const struct jvalue *v)
{
    return v->kind == J_OBJECT || v->kind == J_TRUE || v->kind == J_FALSE;
}

/* prefixItems, items and additionalItems of one schema, in every draft's form. */
static bool schema_array(struct schema *s, const struct jvalue *v, struct item_keywords **out)
{
    const struct jvalue *items = jvalue_get(v, "items"), *prefix = jvalue_get(v, "prefixItems");
    const struct jvalue *rest = items;
    *out = NULL;
    if (items && items->kind == J_ARRAY) {
        prefix = items;
        rest = jvalue_get(v, "additionalItems");
    }
    if (!prefix && !rest)
        return true;
    struct item_keywords *a = schema_alloc(s, sizeof *a);
    if (prefix) {
        if (prefix->kind != J_ARRAY)
            return schema_fail(s, prefix, "is not a list");
        a->n_prefix = prefix->n;
        a->prefix = schema_alloc(s, (prefix->n + 1) * sizeof *a->prefix);
        for (const struct jvalue *c = prefix->first; c; c = c->next) {
            if (!schema_is(c))
                return schema_fail(s, c, "is not a schema");
            a->prefix[c->index] = schema_lits(s, c, false);
        }
    }
    if (rest) {
        if (!schema_is(rest))
            return schema_fail(s, rest, "is not a schema");
        a->items = schema_lits(s, rest, false);
    }
    *out = a;
    return true;
}

static bool schema_object(struct schema *s, const struct jvalue *v, struct prop_keywords **out)
{
    const struct jvalue *props = jvalue_get(v, "properties"),
                        *pats = jvalue_get(v, "patternProperties"),
                        *extra = jvalue_get(v, "additionalProperties");
    *out = NULL;
    if (!props && !pats && !extra)
        return true;
    struct prop_keywords *c = schema_alloc(s, sizeof *c);
    for (int k = 0; k < 2; k++) {
        const struct jvalue *list = k ? pats : props;
        if (!list)
            continue;
        if (list->kind != J_OBJECT)
            return schema_fail(s, list, "is not an object");
        if (k)
            c->pats = schema_alloc(s, (list->n + 1) * sizeof *c->pats);
        else
            c->props = schema_alloc(s, (list->n + 1) * sizeof *c->props);
        for (const struct jvalue *p = list->first; p; p = p->next) {
            if (!schema_is(p))
                return schema_fail(s, p, "is not a schema");
            struct literals l = schema_lits(s, p, false);
            if (!k) {
                c->props[c->n_props++] = (struct prop_schema){p->key, p->key_len, l};
                continue;
            }
            struct error err = {0};
            uint32_t re = re_parse(s->pool, p->key, p->key_len, RE_SEARCH, &err);
            if (err.msg[0])
                return schema_fail(s, p, "%s", err.msg);
            c->pats[c->n_pats++] = (struct pattern_schema){re, l};
        }
    }
    if (extra) {
        if (!schema_is(extra))
            return schema_fail(s, extra, "is not a schema");
        c->extra = schema_lits(s, extra, false);
    }
    *out = c;
    return true;
}

static bool name_add(struct schema *s, struct name_list **to, const struct jvalue *name,
                     const struct jvalue *needs)
{
    if (name->kind != J_STRING)
        return schema_fail(s, name, "is not a string");
    struct name_list *n = schema_alloc(s, sizeof *n), **at = to;
    *n = (struct name_list){.name = name->text, .len = name->len};
    if (needs)
        *n = (struct name_list){
            .name = needs->key, .len = needs->key_len, .needs = name->text, .needs_len = name->len};
    while (*at)
        at = &(*at)->next;
    *at = n;
    return true;
}

/* The term of the strings that satisfy a schema (propertyNames). */
static bool schema_names(struct schema *s, const struct jvalue *v, bool negated, uint32_t *term)
{
    struct shapes all = {0};
    *term = RE_NONE;
    if (!schema_is(v))
        return schema_fail(s, v, "is not a schema");
    if (!schema_expand_all(s, schema_lits(s, v, negated), &all))
        return false;
    for (uint32_t i = 0; i < all.n; i++)
        if (all.v[i].types & TY_STR && all.v[i].lark)
            return schema_fail(s, all.v[i].lark, "cannot be enforced for names");
        else if (all.v[i].types & TY_STR)
            *term = re_or(s->pool, *term, all.v[i].str);
    return true;
}

/* ---- a satisfied schema ---- */

struct value_shape shape_types(uint32_t types)
{
    struct value_shape x = shape_any();
    x.types = types;
    return x;
}

bool shapes_append(struct schema *s, struct shapes *to, const struct shapes *from)
{
    for (uint32_t i = 0; i < from->n; i++)
        if (!shapes_add(s, to, &from->v[i]))
            return false;
    return true;
}

/* Exactly one of the list: each alternative, minus the others that may overlap with it. */
static bool one_of(struct schema *s, const struct jvalue *list, struct shapes *out)
{
    uint32_t n = list->n;
    const struct shapes **each = schema_alloc(s, (n + 1) * sizeof *each);
    const struct jvalue **at = schema_alloc(s, (n + 1) * sizeof *at);
    for (const struct jvalue *c = list->first; c; c = c->next) {
        struct shapes *x = schema_alloc(s, sizeof *x);
        at[c->index] = c;
        if (!schema_expand_all(s, schema_lits(s, c, false), x))
            return false;
        each[c->index] = x;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct shapes mine = *each[i];
        for (uint32_t j = 0; j < n; j++) {
            bool apart = true;
            for (uint32_t a = 0; a < mine.n && apart && i != j; a++)
                for (uint32_t b = 0; b < each[j]->n && apart; b++) {
                    struct value_shape both = shape_merge(s, &mine.v[a], &each[j]->v[b]);
                    apart = shape_empty(s, &both, 2);
                    if (s->failed)
                        return false;
                }
            if (apart)
                continue;
            struct shapes others = {0};
            bool dropped = s->dropped;
            s->dropped = false;
            if (!schema_expand_all(s, schema_lits(s, at[j], true), &others) ||
                !shapes_and(s, &mine, &others))
                return false;
            if (s->dropped && !mine.n)
                return schema_fail(s, at[j], "may overlap with %s %u", "alternative", i);
            s->dropped = dropped;
        }
        if (!shapes_append(s, out, &mine))
            return false;
    }
    return true;
}

bool schema_list(struct schema *s, const struct jvalue *v)
{
    if (v->kind != J_ARRAY || !v->n)
        return schema_fail(s, v, "is not a list of schemas");
    for (const struct jvalue *c = v->first; c; c = c->next)
        if (!schema_is(c))
            return schema_fail(s, c, "is not a schema");
    return true;
}

bool schema_and_sub(struct schema *s, struct shapes *all, const struct jvalue *v, bool negated)
{
    struct shapes x = {0};
    return schema_expand_all(s, schema_lits(s, v, negated), &x) && shapes_and(s, all, &x);
}

/* (condition and then) or (not condition and else) */
bool schema_if(struct schema *s, const struct jvalue *v, bool negated, struct shapes *out)
{
    const struct jvalue *cond = jvalue_get(v, "if");
    for (int k = 0; k < 2; k++) {
        const struct jvalue *branch = jvalue_get(v, k ? "else" : "then");
        struct shapes x = {0};
        if (negated && !branch)
            continue;
        if (!schema_expand_all(s, schema_lits(s, cond, k), &x))
            return false;
        if (branch && !schema_and_sub(s, &x, branch, negated))
            return false;
        if (!shapes_append(s, out, &x))
            return false;
    }
    return true;
}

struct prop_keywords *schema_one_prop(struct schema *s, const char *name, uint32_t len,
                                      struct literals l)
{
    struct prop_keywords *c = schema_alloc(s, sizeof *c);
    c->n_props = 1;
    c->props = schema_alloc(s, sizeof *c->props);
    *c->props = (struct prop_schema){name, len, l};
    return c;
}

/* dependentSchemas, or a schema in `dependencies`: the property is absent or the schema holds. */
static bool dependent_schema(struct schema *s, const struct jvalue *c, struct shapes *all)
{
    struct shapes either = {0}, with = {0};
    struct value_shape x = shape_any();
    x.prop_lists = schema_one_prop(s, c->key, c->key_len, schema_lits_one(s, LIT_FALSE));
    struct value_shape has = shape_types(TY_OBJ);
    has.required = schema_alloc(s, sizeof *has.required);
    *has.required = (struct name_list){.name = c->key, .len = c->key_len};
    return shapes_add(s, &either, &x) && shapes_add(s, &with, &has) &&
           schema_and_sub(s, &with, c, false) && shapes_append(s, &either, &with) &&
           shapes_and(s, all, &either);
}

static bool dependencies(struct schema *s, const struct jvalue *v, struct value_shape *x,
                         struct shapes *all)
{
    if (v->kind != J_OBJECT)
        return schema_fail(s, v, "is not an object");
    for (const struct jvalue *c = v->first; c; c = c->next) {
        if (c->kind == J_ARRAY || c->kind == J_STRING) {
            for (const struct jvalue *n = c->kind == J_ARRAY ? c->first : c; n; n = n->next) {
                if (!name_add(s, &x->needs, n, c))
                    return false;
                if (c->kind == J_STRING)
                    break;
            }
        } else if (!schema_is(c)) {
            return schema_fail(s, c, "is not a schema or a list of names");
        } else if (!dependent_schema(s, c, all)) {
            return false;
        }
    }
    return true;
}

/* For keywords with a count: the shape's field and type. */
static uint32_t *count_field(struct value_shape *x, const char *key, uint32_t *type)
{
    *type = 0;
    if (!strcmp(key, "minItems") || !strcmp(key, "maxItems")) {
        *type = TY_ARR;
        return key[1] == 'i' ? &x->min_items : &x->max_items;
    }
    if (!strcmp(key, "minProperties") || !strcmp(key, "maxProperties")) {
        *type = TY_OBJ;
        return key[1] == 'i' ? &x->min_props : &x->max_props;
    }
    return NULL;
}

static const char *const number_keys[] = {"minimum", "maximum", "exclusiveMinimum",
                                          "exclusiveMaximum", "multipleOf"};
static const char *const string_keys[] = {"minLength", "maxLength", "pattern", "format"};
static const char *const count_keys[] = {"minItems", "maxItems", "minProperties", "maxProperties"};
static const char *const refused_keys[] = {"unevaluatedProperties", "unevaluatedItems",
                                           "$dynamicRef", "$recursiveRef"};
#define EACH(keys, k) for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)

static bool contains_keyword(struct schema *s, const struct jvalue *v, struct value_shape *x)
{
    const struct jvalue *c = jvalue_get(v, "contains"), *min = jvalue_get(v, "minContains"),
                        *max = jvalue_get(v, "maxContains");
    uint32_t n = 1;
    if (!c)
        return true;
    if (!schema_is(c))
        return schema_fail(s, c, "is not a schema");
    if (min && !schema_count(s, min, COUNT_MAX, &n))
        return false;
    if (max)
        return schema_fail(s, max, "cannot be enforced");
    if (n > COUNT_MAX)
        return schema_fail(s, min, "requires over %d items", COUNT_MAX);
    if (!n)
        return true;
    x->contains = schema_alloc(s, sizeof *x->contains);
    *x->contains = (struct contains){.lits = schema_lits(s, c, false), .min = n};
    if (x->min_items < n)
        x->min_items = n;
    return true;
}

/* Processes the keywords that affect only one shape. */
static bool simple_keywords(struct schema *s, const struct jvalue *v, struct value_shape *x)
{
    const struct jvalue *k;
    uint32_t num = RE_ALL, term = RE_ALL;
    if ((k = jvalue_get(v, "type"))) {
        bool integer = false;
        if (!schema_types(s, k, &x->types, &integer))
            return false;
        if (integer)
            num = num_integer(s);
    }
    EACH(number_keys, i)
    {
        k = jvalue_get(v, number_keys[i]);
        if (!k || k->kind == J_TRUE || k->kind == J_FALSE) /* draft 4's booleans */
            continue;
        if (!schema_number_key(s, v, k, &term))
            return false;
        num = re_and(s->pool, num, term);
    }
    x->num = num;
    EACH(string_keys, i)
    {
        if (!(k = jvalue_get(v, string_keys[i])))
            continue;
        if (!schema_string_key(s, k, string_keys[i], &term))
            return false;
        x->str = re_and(s->pool, x->str, term);
    }
    if ((k = jvalue_get(v, "x-lark"))) {
        if (k->kind != J_STRING || x->types != TY_STR)
            return schema_fail(s, k, "is not a Lark grammar of a schema whose type is string");
        x->lark = k;
    }
    EACH(count_keys, i)
    {
        uint32_t ty, n, *field = count_field(x, count_keys[i], &ty);
        if (!(k = jvalue_get(v, count_keys[i])))
            continue;
        if (!schema_count(s, k, COUNT_MAX, &n))
            return false;
        if (count_keys[i][1] == 'i' && n > COUNT_MAX)
            return schema_fail(s, k, "requires over %d", COUNT_MAX);
        *field = n > COUNT_MAX ? COUNT_MAX : n;
    }
    if (!schema_array(s, v, &x->item_lists) || !schema_object(s, v, &x->prop_lists) ||
        !contains_keyword(s, v, x))
        return false;
    if ((k = jvalue_get(v, "required")) && k->kind == J_ARRAY)
        for (const struct jvalue *c = k->first; c; c = c->next)
            if (!name_add(s, &x->required, c, NULL))
                return false;
    if ((k = jvalue_get(v, "propertyNames")) && !schema_names(s, k, false, &x->names))
        return false;
    if ((k = jvalue_get(v, "uniqueItems")) && k->kind == J_TRUE && x->types & TY_ARR &&
        x->max_items > 1)
        return schema_fail(s, k, "cannot be enforced");
    return !too_complex(s, v);
}

bool schema_satisfy(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    struct value_shape x = shape_any();
    struct shapes all = {0};
    const struct jvalue *k, *ref = jvalue_get(v, "$ref");
    EACH(refused_keys, i)
    if ((k = jvalue_get(v, refused_keys[i])) && k->kind != J_TRUE && (!ref || !s->old_ref))
        return schema_fail(s, k, "cannot be enforced");
    if (ref && (!s->old_ref || ref->kind == J_STRING)) {
        const struct jvalue *to = schema_ref(s, ref);
        if (!to)
            return false;
        if (!schema_is(to))
            return schema_fail(s, ref, "refers to something that is not a schema");
        if (!shapes_add(s, &all, &x) || !schema_and_sub(s, &all, to, false))
            return false;
        if (s->old_ref) {
            *out = all;
            return true;
        }
    }
    if (!simple_keywords(s, v, &x))
        return false;
    struct shapes own = {0};
    /* Dependencies are processed before x is used, since they may modify it. */
    struct shapes deps = {0};
    struct value_shape any = shape_any();
    shapes_add(s, &deps, &any);
    static const char *const dep_keys[] = {"dependencies", "dependentRequired", "dependentSchemas"};
    EACH(dep_keys, i)
    if ((k = jvalue_get(v, dep_keys[i])) && !dependencies(s, k, &x, &deps))
        return false;
    shape_prune(s, &x);
    if (!shapes_add(s, &own, &x))
        return false;
    if ((k = jvalue_get(v, "enum"))) {
        struct shapes e = {0};
        if (k->kind != J_ARRAY)
            return schema_fail(s, k, "is not a list");
        if (!enum_shapes(s, k, &e) || !shapes_and(s, &own, &e))
            return false;
    }
    if ((k = jvalue_get(v, "const"))) {
        struct shapes e = {0};
        struct value_shape c;
        if (!schema_const(s, k, &c) || !shapes_add(s, &e, &c) || !shapes_and(s, &own, &e))
            return false;
    }
    if (all.n || ref ? !shapes_and(s, &own, &all) : false)
        return false;
    if (!shapes_and(s, &own, &deps))
        return false;
    if ((k = jvalue_get(v, "allOf"))) {
        if (!schema_list(s, k))
            return false;
        for (const struct jvalue *c = k->first; c; c = c->next)
            if (!schema_and_sub(s, &own, c, false))
                return false;
    }
    if ((k = jvalue_get(v, "anyOf"))) {
        struct shapes any_of = {0};
        if (!schema_list(s, k))
            return false;
        for (const struct jvalue *c = k->first; c; c = c->next) {
            struct shapes y = {0};
            if (!schema_expand_all(s, schema_lits(s, c, false), &y) ||
                !shapes_append(s, &any_of, &y))
                return false;
        }
        if (!shapes_and(s, &own, &any_of))
            return false;
    }
    if ((k = jvalue_get(v, "oneOf"))) {
        struct shapes y = {0};
        if (!schema_list(s, k) || !one_of(s, k, &y) || !shapes_and(s, &own, &y))
            return false;
    }
    if ((k = jvalue_get(v, "not"))) {
        bool dropped = s->dropped;
        s->dropped = false;
        if (!schema_is(k))
            return schema_fail(s, k, "is not a schema");
        if (!schema_and_sub(s, &own, k, true))
            return false;
        if (s->dropped)
            return schema_fail(s, k, "cannot be enforced");
        s->dropped = dropped;
    }
    if ((k = jvalue_get(v, "if"))) {
        struct shapes y = {0};
        if (!schema_is(k))
            return schema_fail(s, k, "is not a schema");
        if (!schema_if(s, v, false, &y) || !shapes_and(s, &own, &y))
            return false;
    }
    *out = own;
    return !too_complex(s, v);
}
