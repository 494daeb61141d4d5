/*
 * Negated schemas by De Morgan, and the expansion of literals and sets of literals into shapes.
 * Expansion is memoised and detects reference cycles.
 *
 * Negating a keyword about all other properties would need a witness among infinitely many names.
 * This cannot be expressed. Such alternatives are left out (schema.dropped), which only makes the
 * result stricter. `not` is then rejected; oneOf and if continue with the remaining alternatives.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"

#include <string.h>

enum { DEPTH_MAX = 100, COUNT_MAX = 60000 };
#define EACH(keys, k) for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)

static bool add_sub(struct schema *s, const struct jvalue *v, bool negated, struct shapes *out)
{
    struct shapes x = {0};
    return schema_expand_all(s, schema_lits(s, v, negated), &x) && shapes_append(s, out, &x);
}

/* None of a list of values. */
static bool not_enum(struct schema *s, const struct jvalue *list, struct shapes *out)
{
    struct value_shape simple = shape_any();
    struct shapes all = {0};
    uint32_t num = RE_NONE, *strs = mem_alloc((list->n + 1) * sizeof *strs), n_strs = 0, term;
    bool ok = true;
    for (const struct jvalue *c = list->first; c && ok; c = c->next) {
        if (c->kind == J_NUMBER) {
            ok = schema_const_number(s, c, true, &term);
            num = re_or(s->pool, num, ok ? term : RE_NONE);
        } else if (c->kind == J_STRING) {
            strs[n_strs++] = re_literal(s->pool, c->text, c->len);
        } else if (c->kind != J_ARRAY && c->kind != J_OBJECT) {
            simple.types &= ~(uint32_t)(c->kind == J_NULL   ? TY_NULL
                                        : c->kind == J_TRUE ? TY_TRUE
                                                            : TY_FALSE);
        }
    }
    if (num != RE_NONE)
        simple.num = re_and(s->pool, num_plain(s), re_not(s->pool, num));
    if (n_strs)
        simple.str = re_not(s->pool, re_or_n(s->pool, strs, n_strs));
    mem_free(strs);
    ok = ok && shapes_add(s, &all, &simple);
    for (const struct jvalue *c = list->first; c && ok; c = c->next) {
        struct shapes x = {0};
        if (c->kind == J_ARRAY || c->kind == J_OBJECT)
            ok = schema_not_const(s, c, &x) && shapes_and(s, &all, &x);
    }
    return ok && shapes_append(s, out, &all);
}

static bool negate_scalars(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    static const char *const number_keys[] = {"minimum", "maximum", "exclusiveMinimum",
                                              "exclusiveMaximum", "multipleOf"};
    static const char *const string_keys[] = {"minLength", "maxLength", "pattern", "format"};
    const struct jvalue *k;
    uint32_t term;
    if ((k = jvalue_get(v, "x-lark")))
        return schema_fail(s, k, "cannot be negated");
    if ((k = jvalue_get(v, "type"))) {
        uint32_t types;
        bool integer;
        if (!schema_types(s, k, &types, &integer))
            return false;
        struct value_shape x = shape_types(TY_ANY & ~types);
        if (!shapes_add(s, out, &x))
            return false;
        x = shape_types(TY_NUM);
        x.num = re_and(s->pool, num_plain(s), re_not(s->pool, num_integral(s)));
        if (integer && !shapes_add(s, out, &x))
            return false;
    }
    EACH(number_keys, i)
    {
        k = jvalue_get(v, number_keys[i]);
        if (!k || k->kind == J_TRUE || k->kind == J_FALSE)
            continue;
        if (!schema_number_key(s, v, k, &term))
            return false;
        struct value_shape x = shape_types(TY_NUM);
        x.num = re_and(s->pool, num_plain(s), re_not(s->pool, term));
        if (!shapes_add(s, out, &x))
            return false;
    }
    EACH(string_keys, i)
    {
        if (!(k = jvalue_get(v, string_keys[i])))
            continue;
        if (!schema_string_key(s, k, string_keys[i], &term))
            return false;
        struct value_shape x = shape_types(TY_STR);
        x.str = re_not(s->pool, term);
        if (x.str != RE_NONE && !shapes_add(s, out, &x))
            return false;
    }
    return true;
}

static bool negate_counts(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    static const char *const keys[] = {"minItems", "maxItems", "minProperties", "maxProperties"};
    EACH(keys, i)
    {
        const struct jvalue *k = jvalue_get(v, keys[i]);
        uint32_t n;
        if (!k)
            continue;
        if (!schema_count(s, k, COUNT_MAX, &n))
            return false;
        struct value_shape x = shape_types(i < 2 ? TY_ARR : TY_OBJ);
        uint32_t *min = i < 2 ? &x.min_items : &x.min_props;
        uint32_t *max = i < 2 ? &x.max_items : &x.max_props;
        if (i % 2 == 0 && !n)
            continue;
        if (i % 2 && n >= COUNT_MAX) {
            s->dropped = true;
            continue;
        }
        if (i % 2)
            *min = n + 1;
        else
            *max = n - 1;
        if (!shapes_add(s, out, &x))
            return false;
    }
    return true;
}

static bool negate_arrays(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    const struct jvalue *items = jvalue_get(v, "items"), *prefix = jvalue_get(v, "prefixItems");
    const struct jvalue *rest = items, *contains = jvalue_get(v, "contains"), *k;
    if (items && items->kind == J_ARRAY) {
        prefix = items;
        rest = jvalue_get(v, "additionalItems");
    }
    uint32_t n = prefix && prefix->kind == J_ARRAY ? prefix->n : 0;
    for (const struct jvalue *c = n ? prefix->first : NULL; c; c = c->next) {
        struct value_shape x = shape_types(TY_ARR);
        x.min_items = c->index + 1;
        x.item_lists = schema_alloc(s, sizeof *x.item_lists);
        x.item_lists->n_prefix = c->index + 1;
        x.item_lists->prefix = schema_alloc(s, (c->index + 1) * sizeof(struct literals));
        x.item_lists->prefix[c->index] = schema_lits(s, c, true);
        if (!lits_false(x.item_lists->prefix[c->index]) && !shapes_add(s, out, &x))
            return false;
    }
    if (rest && schema_is(rest)) {
        struct literals l = schema_lits(s, rest, true);
        struct value_shape x = shape_types(TY_ARR);
        if (!l.n) { /* no further items are allowed: one too many */
            x.min_items = n + 1;
        } else if (!lits_false(l) && !n) {
            x.min_items = 1;
            x.contains = schema_alloc(s, sizeof *x.contains);
            *x.contains = (struct contains){.lits = l, .min = 1};
        } else if (!lits_false(l)) {
            s->dropped = true;
            x.types = 0;
        } else {
            x.types = 0;
        }
        if (!shapes_add(s, out, &x))
            return false;
    }
    if (contains && schema_is(contains)) {
        const struct jvalue *min = jvalue_get(v, "minContains");
        if (min || jvalue_get(v, "maxContains")) {
            s->dropped = true;
        } else {
            struct value_shape x = shape_types(TY_ARR);
            x.item_lists = schema_alloc(s, sizeof *x.item_lists);
            x.item_lists->items = schema_lits(s, contains, true);
            if (!shapes_add(s, out, &x))
                return false;
        }
    }
    if ((k = jvalue_get(v, "uniqueItems")) && k->kind == J_TRUE)
        s->dropped = true;
    return true;
}

static struct value_shape has_prop(struct schema *s, const char *name, uint32_t len)
{
    struct value_shape x = shape_types(TY_OBJ);
    x.required = schema_alloc(s, sizeof *x.required);
    *x.required = (struct name_list){.name = name, .len = len};
    return x;
}

static bool negate_dependencies(struct schema *s, const struct jvalue *k, struct shapes *out)
{
    for (const struct jvalue *c = k->first; c; c = c->next) {
        struct value_shape has = has_prop(s, c->key, c->key_len);
        if (c->kind == J_ARRAY || c->kind == J_STRING) {
            for (const struct jvalue *n = c->kind == J_ARRAY ? c->first : c; n; n = n->next) {
                struct value_shape x = has;
                x.prop_lists = schema_one_prop(s, n->text, n->len, schema_lits_one(s, LIT_FALSE));
                shape_prune(s, &x);
                if (!shapes_add(s, out, &x))
                    return false;
                if (c->kind == J_STRING)
                    break;
            }
        } else {
            struct shapes with = {0};
            if (!shapes_add(s, &with, &has) || !schema_and_sub(s, &with, c, true) ||
                !shapes_append(s, out, &with))
                return false;
        }
    }
    return true;
}

static bool negate_objects(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    static const char *const dep_keys[] = {"dependencies", "dependentRequired", "dependentSchemas"};
    const struct jvalue *k;
    if ((k = jvalue_get(v, "required")) && k->kind == J_ARRAY)
        for (const struct jvalue *c = k->first; c; c = c->next) {
            struct value_shape x = shape_types(TY_OBJ);
            if (c->kind != J_STRING)
                return schema_fail(s, c, "is not a string");
            x.prop_lists = schema_one_prop(s, c->text, c->len, schema_lits_one(s, LIT_FALSE));
            if (!shapes_add(s, out, &x))
                return false;
        }
    if ((k = jvalue_get(v, "properties")) && k->kind == J_OBJECT)
        for (const struct jvalue *c = k->first; c; c = c->next) {
            struct literals l = schema_lits(s, c, true);
            struct value_shape x = has_prop(s, c->key, c->key_len);
            x.prop_lists = schema_one_prop(s, c->key, c->key_len, l);
            if (!lits_false(l) && !shapes_add(s, out, &x))
                return false;
        }
    if ((k = jvalue_get(v, "patternProperties")) && k->kind == J_OBJECT)
        for (const struct jvalue *c = k->first; c; c = c->next)
            s->dropped |= !lits_false(schema_lits(s, c, true));
    if ((k = jvalue_get(v, "additionalProperties")))
        s->dropped |= !lits_false(schema_lits(s, k, true));
    if ((k = jvalue_get(v, "propertyNames")))
        s->dropped |= !lits_false(schema_lits(s, k, true));
    EACH(dep_keys, i)
    if ((k = jvalue_get(v, dep_keys[i])) && !negate_dependencies(s, k, out))
        return false;
    return true;
}

/* None of oneOf's schemas, or two of them. */
static bool not_one_of(struct schema *s, const struct jvalue *list, struct shapes *out)
{
    struct shapes none = {0};
    struct value_shape any = shape_any();
    shapes_add(s, &none, &any);
    for (const struct jvalue *c = list->first; c; c = c->next)
        if (!schema_and_sub(s, &none, c, true))
            return false;
    for (const struct jvalue *a = list->first; a; a = a->next)
        for (const struct jvalue *b = a->next; b; b = b->next) {
            struct shapes both = {0};
            shapes_add(s, &both, &any);
            if (!schema_and_sub(s, &both, a, false) || !schema_and_sub(s, &both, b, false) ||
                !shapes_append(s, out, &both))
                return false;
        }
    return shapes_append(s, out, &none);
}

static bool negate_combined(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    const struct jvalue *k;
    if ((k = jvalue_get(v, "allOf"))) {
        if (!schema_list(s, k))
            return false;
        for (const struct jvalue *c = k->first; c; c = c->next)
            if (!add_sub(s, c, true, out))
                return false;
    }
    if ((k = jvalue_get(v, "anyOf"))) {
        struct shapes all = {0};
        struct value_shape any = shape_any();
        shapes_add(s, &all, &any);
        if (!schema_list(s, k))
            return false;
        for (const struct jvalue *c = k->first; c; c = c->next)
            if (!schema_and_sub(s, &all, c, true))
                return false;
        if (!shapes_append(s, out, &all))
            return false;
    }
    if ((k = jvalue_get(v, "oneOf")) && (!schema_list(s, k) || !not_one_of(s, k, out)))
        return false;
    if ((k = jvalue_get(v, "not")) &&
        (!(schema_is(k) || schema_fail(s, k, "is not a schema")) || !add_sub(s, k, false, out)))
        return false;
    if ((k = jvalue_get(v, "if")) &&
        (!(schema_is(k) || schema_fail(s, k, "is not a schema")) || !schema_if(s, v, true, out)))
        return false;
    return true;
}

static bool negate_schema(struct schema *s, const struct jvalue *v, struct shapes *out)
{
    static const char *const refused[] = {"unevaluatedProperties", "unevaluatedItems",
                                          "$dynamicRef", "$recursiveRef"};
    const struct jvalue *k, *ref = jvalue_get(v, "$ref");
    if (ref) {
        const struct jvalue *to = schema_ref(s, ref);
        if (!to)
            return false;
        if (!schema_is(to))
            return schema_fail(s, ref, "refers to something that is not a schema");
        if (!add_sub(s, to, true, out))
            return false;
        if (s->old_ref)
            return true;
    }
    EACH(refused, i)
    if ((k = jvalue_get(v, refused[i])) && k->kind != J_TRUE)
        return schema_fail(s, k, "cannot be enforced");
    if (!negate_scalars(s, v, out) || !negate_counts(s, v, out) || !negate_arrays(s, v, out) ||
        !negate_objects(s, v, out))
        return false;
    if ((k = jvalue_get(v, "enum")) &&
        !((k->kind == J_ARRAY || schema_fail(s, k, "is not a list")) && not_enum(s, k, out)))
        return false;
    if ((k = jvalue_get(v, "const")) && !schema_not_const(s, k, out))
        return false;
    return negate_combined(s, v, out);
}

static bool schema_expand(struct schema *s, uint32_t lit, const struct shapes **out)
{
    const struct jvalue *v = jdoc_at(s->doc, lit >> 2);
    if (s->failed)
        return false;
    if (s->memo[lit]) {
        *out = s->memo[lit];
        s->dropped |= s->memo[lit]->dropped;
        return true;
    }
    if (s->active[lit])
        return schema_fail(s, v, "refers to itself");
    if (s->depth >= DEPTH_MAX)
        return schema_fail(s, v, "over %d nested schemas for one value", DEPTH_MAX);
    struct shapes *all = schema_alloc(s, sizeof *all);
    bool ok, dropped = s->dropped;
    s->depth++;
    s->dropped = false;
    s->active[lit] = 1;
    if (lit & LIT_CONST) {
        struct value_shape x;
        ok = lit & LIT_NOT ? schema_not_const(s, v, all)
                           : schema_const(s, v, &x) && shapes_add(s, all, &x);
    } else {
        ok = lit & LIT_NOT ? negate_schema(s, v, all) : schema_satisfy(s, v, all);
    }
    s->active[lit] = 0;
    s->depth--;
    if (!ok)
        return s->failed ? false : schema_fail(s, v, "cannot be enforced");
    all->dropped = s->dropped;
    s->dropped |= dropped;
    s->memo[lit] = all;
    *out = all;
    return true;
}

bool schema_expand_all(struct schema *s, struct literals lits, struct shapes *out)
{
    *out = (struct shapes){0};
    if (lits_false(lits))
        return !s->failed;
    struct value_shape any = shape_any();
    if (!lits.n)
        return shapes_add(s, out, &any);
    for (uint32_t i = 0; i < lits.n; i++) {
        const struct shapes *x = NULL;
        if (!schema_expand(s, lits.v[i], &x))
            return false;
        if (i == 0) {
            if (!shapes_append(s, out, x))
                return false;
        } else if (!shapes_and(s, out, x)) {
            return false;
        }
    }
    return true;
}
