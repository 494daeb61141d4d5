/*
 * Jinja filters over sequences: selecting, mapping, sorting, grouping, joining. Where jinja2
 * returns a generator, these return an iterator over a complete list (JT_ITER). Iterating consumes
 * it likewise, but it is computed eagerly.
 */
#include "text/jinja/jinja_int.h"

#include <string.h>

struct value_vec {
    struct jval *v; /* (cap) */
    uint32_t n, cap;
};

static void vec_add(struct jstate *st, struct value_vec *x, struct jval v)
{
    if (x->n == x->cap) {
        uint32_t cap = x->cap ? x->cap * 2 : 8;
        struct jval *nv = jalloc(st, cap, sizeof(*nv));
        if (x->n)
            memcpy(nv, x->v, x->n * sizeof(*nv));
        x->v = nv;
        x->cap = cap;
    }
    x->v[x->n++] = v;
}

static struct jval vec_list(struct jstate *st, struct value_vec *x)
{
    struct jval r = jval_list(st, JT_LIST, 0);
    r.u.list->v = x->v;
    r.u.list->n = x->n;
    return r;
}

static struct jval vec_iter(struct jstate *st, struct value_vec *x)
{
    return jval_iter(st, vec_list(st, x).u.list, "generator");
}

static bool given(struct jval v)
{
    return v.type != JT_MISSING && v.type != JT_NONE;
}

/* The arguments without the first n positional ones. */
static struct jargs args_after(const struct jargs *a, int n)
{
    if (a->n <= n)
        return (struct jargs){.kw = a->kw, .n_kw = a->n_kw};
    return (struct jargs){a->pos + n, a->kw, a->n - n, a->n_kw};
}

/* ------------------------------------------------------------------ keys */

/* Resolves item.a.0.b: items before attributes, digits as indices. def replaces undefined
 * values. */
static struct jval attr_path(struct jstate *st, struct jval item, struct jval path, struct jval def)
{
    if (!given(path))
        return item;
    if (path.type != JT_STR) {
        item = jget_item(st, item, path);
        return item.type == JT_UNDEF && given(def) ? def : item;
    }
    for (uint32_t i = 0; i <= path.len;) {
        uint32_t from = i;
        bool digits = true;
        for (; i < path.len && path.u.s[i] != '.'; i++)
            digits &= path.u.s[i] >= '0' && path.u.s[i] <= '9';
        struct jval part = jval_str(path.u.s + from, i - from);
        int64_t n;
        if (digits && jparse_int(part, 10, &n))
            part = jval_int(n);
        jcharge(st, 1);
        item = jget_item(st, item, part);
        if (item.type == JT_UNDEF && given(def))
            item = def;
        i++;
    }
    return item;
}

static struct jval fold(struct jstate *st, struct jval v, bool case_sensitive)
{
    if (v.type == JT_STR && !case_sensitive) {
        v = jstr_case(st, v, 'l');
        v.flags &= (uint8_t)~STR_MARKUP;
    }
    return v;
}

/* Computes the keys of all items. Several attributes separated by commas (sort only) give list
 * keys. */
static struct jval *make_keys(struct jstate *st, struct jlist *l, struct jval path, struct jval def,
                              bool case_sensitive, bool multi)
{
    struct jval *keys = jalloc(st, (size_t)l->n + 1, sizeof(*keys));
    bool wrap = multi;
    multi = multi && path.type == JT_STR && memchr(path.u.s, ',', path.len);
    for (uint32_t i = 0; i < l->n; i++) {
        jcharge(st, 1);
        if (!multi) {
            keys[i] = fold(st, attr_path(st, l->v[i], path, def), case_sensitive);
            continue;
        }
        struct value_vec parts = {0};
        for (uint32_t k = 0; k <= path.len;) {
            uint32_t from = k;
            while (k < path.len && path.u.s[k] != ',')
                k++;
            struct jval one = attr_path(st, l->v[i], jval_str(path.u.s + from, k - from), def);
            vec_add(st, &parts, fold(st, one, case_sensitive));
            k++;
        }
        keys[i] = vec_list(st, &parts);
    }
    /* jinja2 sorts by lists of keys, in which two undefined keys are equal rather than an error. */
    bool undefined = false;
    for (uint32_t i = 0; wrap && i < l->n; i++)
        undefined |= keys[i].type == JT_UNDEF;
    for (uint32_t i = 0; undefined && i < l->n; i++) {
        struct value_vec one = {0};
        vec_add(st, &one, keys[i]);
        keys[i] = vec_list(st, &one);
    }
    return keys;
}

/* ------------------------------------------------------------------ filters */

static struct jval f_batch(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"linecount", "fill_with"};
    struct jval arg[2];
    jargs_bind(st, "batch", a, names, 2, 1, arg);
    int64_t size = jarg_int(st, arg[0], "batch");
    struct jlist *l = jval_tolist(st, v);
    struct value_vec out = {0};
    if (size < 1)
        size = size < 0 || l->n == 0 ? INT64_MAX : 1; /* as jinja2 */
    for (uint32_t i = 0; i < l->n;) {
        struct value_vec row = {0};
        while (i < l->n && (int64_t)row.n < size)
            vec_add(st, &row, l->v[i++]);
        if (given(arg[1]) && size < INT64_MAX) {
            jcharge(st, (uint64_t)(size - row.n));
            while ((int64_t)row.n < size)
                vec_add(st, &row, arg[1]);
        }
        vec_add(st, &out, vec_list(st, &row));
    }
    return vec_iter(st, &out);
}

static struct jval f_slice(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"slices", "fill_with"};
    struct jval arg[2];
    jargs_bind(st, "slice", a, names, 2, 1, arg);
    int64_t n = jarg_int(st, arg[0], "slice");
    struct jlist *l = jval_tolist(st, v);
    if (n == 0)
        jinja_fail(st, "integer division or modulo by zero");
    if (n < 0)
        n = 0;
    jcharge(st, (uint64_t)n);
    int64_t per = n ? l->n / n : 0, extra = n ? l->n % n : 0, at = 0;
    struct value_vec out = {0};
    for (int64_t i = 0; i < n; i++) {
        struct value_vec row = {0};
        int64_t end = at + per + (i < extra);
        while (at < end)
            vec_add(st, &row, l->v[at++]);
        if (given(arg[1]) && i >= extra)
            vec_add(st, &row, arg[1]);
        vec_add(st, &out, vec_list(st, &row));
    }
    return vec_iter(st, &out);
}

static struct jval f_dictsort(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"case_sensitive", "by", "reverse"};
    struct jval arg[3];
    jargs_bind(st, "dictsort", a, names, 3, 0, arg);
    bool by_value = jval_is(arg[1], "value");
    if (arg[1].type != JT_MISSING && !by_value && !jval_is(arg[1], "key"))
        jinja_fail(st, "You can only sort by either \"key\" or \"value\"");
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (v.type != JT_DICT)
        jinja_fail(st, "'%s' object has no attribute 'items'", jval_typename(v));
    struct jdict *d = v.u.dict;
    struct jval *keys = jalloc(st, (size_t)d->n + 1, sizeof(*keys)), r;
    for (uint32_t i = 0; i < d->n; i++)
        keys[i] = fold(st, by_value ? d->e[i].v : d->e[i].k, jval_true(arg[0]));
    uint32_t *order = jval_sort(st, keys, d->n, jval_true(arg[2]));
    r = jval_list(st, JT_LIST, d->n);
    for (uint32_t i = 0; i < d->n; i++) {
        struct jval pair = jval_list(st, JT_TUPLE, 2);
        pair.u.list->v[0] = d->e[order[i]].k;
        pair.u.list->v[1] = d->e[order[i]].v;
        r.u.list->v[i] = pair;
    }
    return r;
}

static struct jval f_first(struct jstate *st, struct jval v, bool last)
{
    if (last && v.type == JT_ITER && strcmp(v.u.iter->name, "list_reverseiterator"))
        jinja_fail(st, "'%s' object is not reversible", v.u.iter->name);
    if (!last && v.type == JT_ITER && v.u.iter->pos < v.u.iter->list->n)
        return v.u.iter->list->v[v.u.iter->pos++];
    if (v.type == JT_STR && v.len) { /* avoids a list of all characters */
        size_t i = last ? v.len - 1 : 0, end = 0;
        while (last && i > 0 && (v.u.s[i] & 0xc0) == 0x80)
            i--;
        end = i;
        jutf8_next(v.u.s, v.len, &end);
        return jval_str(v.u.s + i, end - i);
    }
    struct jlist *l = jval_tolist(st, v);
    if (!l->n)
        return jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE,
                          last ? "No last item, sequence was empty."
                               : "No first item, sequence was empty.");
    return l->v[last ? l->n - 1 : 0];
}

static struct jval f_groupby(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"attribute", "default", "case_sensitive"};
    struct jval arg[3];
    jargs_bind(st, "groupby", a, names, 3, 1, arg);
    struct jlist *l = jval_tolist(st, v);
    struct jval *keys = make_keys(st, l, arg[0], arg[1], jval_true(arg[2]), false);
    uint32_t *order = jval_sort(st, keys, l->n, false);
    struct value_vec out = {0};
    for (uint32_t i = 0; i < l->n;) {
        struct value_vec group = {0};
        uint32_t first = i;
        while (i < l->n && jval_eq(st, keys[order[i]], keys[order[first]]))
            vec_add(st, &group, l->v[order[i++]]);
        struct jval pair = jval_list(st, JT_TUPLE, 2);
        pair.u.list->group = true;
        pair.u.list->v[0] = attr_path(st, l->v[order[first]], arg[0], arg[1]);
        pair.u.list->v[1] = vec_list(st, &group);
        vec_add(st, &out, pair);
    }
    return vec_list(st, &out);
}

static struct jval f_items(struct jstate *st, struct jval v, const struct jargs *a)
{
    jargs_bind(st, "items", a, NULL, 0, 0, NULL);
    if (v.type != JT_UNDEF && v.type != JT_DICT)
        jinja_fail(st, "Can only get item pairs from a mapping.");
    if (v.type == JT_DICT) {
        struct jview view = {v.u.dict, VIEW_ITEMS};
        v = (struct jval){.type = JT_VIEW, .u.view = &view};
        return jval_iter(st, jval_tolist(st, v), "generator");
    }
    return jval_iter(st, jval_tolist(st, v), "generator");
}

static struct jval f_join(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"d", "attribute"};
    struct jval arg[2];
    jargs_bind(st, "join", a, names, 2, 0, arg);
    struct jval sep = arg[0].type == JT_MISSING ? jval_str("", 0) : jval_tostr(st, arg[0]);
    struct jlist *l = jval_tolist(st, v);
    size_t mark = st->out->len;
    for (uint32_t i = 0; i < l->n; i++) {
        jcharge(st, 1);
        if (i)
            jprint_raw(st, sep.u.s, sep.len);
        jprint_str(st, attr_path(st, l->v[i], arg[1], JV_NONE));
    }
    return jval_take(st, st->out, mark);
}

static struct jval f_minmax(struct jstate *st, struct jval v, const struct jargs *a, bool max)
{
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct jval arg[2];
    jargs_bind(st, max ? "max" : "min", a, names, 2, 0, arg);
    struct jlist *l = jval_tolist(st, v);
    if (!l->n)
        return jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE,
                          "No aggregated item, sequence was empty.");
    struct jval *keys = make_keys(st, l, arg[1], JV_NONE, jval_true(arg[0]), false);
    uint32_t best = 0;
    for (uint32_t i = 1; i < l->n; i++) {
        if (jval_cmp(st, keys[i], keys[best], max ? ">" : "<") == (max ? 1 : -1))
            best = i;
    }
    return l->v[best];
}

static struct jval f_sort(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"reverse", "case_sensitive", "attribute"};
    struct jval arg[3];
    jargs_bind(st, "sort", a, names, 3, 0, arg);
    struct jlist *l = jval_tolist(st, v);
    struct jval *keys = make_keys(st, l, arg[2], JV_NONE, jval_true(arg[1]), true);
    uint32_t *order = jval_sort(st, keys, l->n, jval_true(arg[0]));
    struct jval r = jval_list(st, JT_LIST, l->n);
    for (uint32_t i = 0; i < l->n; i++)
        r.u.list->v[i] = l->v[order[i]];
    return r;
}

static struct jval f_sum(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"attribute", "start"};
    struct jval arg[2];
    jargs_bind(st, "sum", a, names, 2, 0, arg);
    struct jlist *l = jval_tolist(st, v);
    struct jval total = arg[1].type == JT_MISSING ? jval_int(0) : arg[1];
    if (total.type == JT_STR)
        jinja_fail(st, "sum() can't sum strings [use ''.join(seq) instead]");
    for (uint32_t i = 0; i < l->n; i++) {
        jcharge(st, 1);
        total = jop_binary(st, OP_ADD, total, attr_path(st, l->v[i], arg[0], JV_NONE));
    }
    return total;
}

static struct jval f_unique(struct jstate *st, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct jval arg[2];
    jargs_bind(st, "unique", a, names, 2, 0, arg);
    struct jlist *l = jval_tolist(st, v);
    struct jval *keys = make_keys(st, l, arg[1], JV_NONE, jval_true(arg[0]), false), seen;
    struct jdict *d = jdict_new(st, 0);
    struct value_vec out = {0};
    for (uint32_t i = 0; i < l->n; i++) {
        if (jdict_get(st, d, keys[i], &seen))
            continue;
        jdict_put(st, d, keys[i], JV_NONE);
        vec_add(st, &out, l->v[i]);
    }
    return vec_iter(st, &out);
}

static struct jval f_map(struct jstate *st, struct jval v, const struct jargs *a)
{
    struct value_vec out = {0};
    if (!jval_true(v))
        return vec_iter(st, &out);
    struct jlist *l = jval_tolist(st, v);
    if (!a->n && a->n_kw) {
        static const char *const names[] = {"attribute", "default"};
        struct jval arg[2];
        jargs_bind(st, "map", a, names, 2, 1, arg);
        for (uint32_t i = 0; i < l->n; i++) {
            jcharge(st, 1);
            vec_add(st, &out, attr_path(st, l->v[i], arg[0], arg[1]));
        }
        return vec_iter(st, &out);
    }
    if (!a->n)
        jinja_fail(st, "map requires a filter argument");
    struct jval name = jarg_str(st, a->pos[0], "map");
    int filter = jfilter_lookup(name.u.s, name.len);
    if (filter < 0)
        jinja_fail(st, "No filter named '%.*s'.", (int)(name.len > 60 ? 60 : name.len), name.u.s);
    struct jargs rest = args_after(a, 1);
    for (uint32_t i = 0; i < l->n; i++) {
        jcharge(st, 2);
        vec_add(st, &out, jfilter_call(st, filter, l->v[i], &rest));
    }
    return vec_iter(st, &out);
}

static struct jval f_select(struct jstate *st, struct jval v, const struct jargs *a, bool want,
                            bool by_attr)
{
    struct value_vec out = {0};
    if (!jval_true(v))
        return vec_iter(st, &out);
    int off = by_attr, test = -1;
    if (by_attr && !a->n)
        jinja_fail(st, "Missing parameter for attribute name");
    if (a->n > off) {
        struct jval name = jarg_str(st, a->pos[off], "select");
        test = jtest_lookup(name.u.s, name.len);
        if (test < 0)
            jinja_fail(st, "No test named '%.*s'.", (int)(name.len > 60 ? 60 : name.len), name.u.s);
    }
    struct jargs rest = args_after(a, off + 1);
    struct jlist *l = jval_tolist(st, v);
    for (uint32_t i = 0; i < l->n; i++) {
        struct jval item = by_attr ? attr_path(st, l->v[i], a->pos[0], JV_NONE) : l->v[i];
        jcharge(st, 2);
        if ((test >= 0 ? jtest_call(st, test, item, &rest) : jval_true(item)) == want)
            vec_add(st, &out, l->v[i]);
    }
    return vec_iter(st, &out);
}

static struct jval f_reverse(struct jstate *st, struct jval v, const struct jargs *a)
{
    jargs_bind(st, "reverse", a, NULL, 0, 0, NULL);
    if (v.type == JT_STR)
        return jstr_slice(st, v, jstr_len(st, v) - 1, -1, jstr_len(st, v));
    bool list = v.type == JT_ITER;
    struct jlist *l = jval_tolist(st, v);
    struct jval r = jval_list(st, JT_LIST, l->n);
    for (uint32_t i = 0; i < l->n; i++)
        r.u.list->v[i] = l->v[l->n - 1 - i];
    return list ? r : jval_iter(st, r.u.list, "list_reverseiterator");
}

static struct jval f_list(struct jstate *st, struct jval v)
{
    struct jlist *l = jval_tolist(st, v);
    struct jval r = jval_list(st, JT_LIST, 0);
    *r.u.list = (struct jlist){.v = l->v, .n = l->n};
    return r;
}

static struct jval f_random(struct jstate *st, struct jval v)
{
    struct jlist *l = jval_tolist(st, v);
    if (!l->n)
        return jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE, "No random item, sequence was empty.");
    st->seed = st->seed * 6364136223846793005u + 1442695040888963407u;
    return l->v[(st->seed >> 33) % l->n];
}

struct jval jfilter_seq(struct jstate *st, enum jseq which, struct jval v, const struct jargs *a)
{
    switch (which) {
    case JSEQ_first:
    case JSEQ_last:
        jargs_bind(st, which == JSEQ_last ? "last" : "first", a, NULL, 0, 0, NULL);
        return f_first(st, v, which == JSEQ_last);
    case JSEQ_length:
        jargs_bind(st, "length", a, NULL, 0, 0, NULL);
        return jval_int(jval_len(st, v));
    case JSEQ_list:
        jargs_bind(st, "list", a, NULL, 0, 0, NULL);
        return f_list(st, v);
    case JSEQ_random:
        jargs_bind(st, "random", a, NULL, 0, 0, NULL);
        return f_random(st, v);
    case JSEQ_batch:
        return f_batch(st, v, a);
    case JSEQ_slice:
        return f_slice(st, v, a);
    case JSEQ_dictsort:
        return f_dictsort(st, v, a);
    case JSEQ_groupby:
        return f_groupby(st, v, a);
    case JSEQ_items:
        return f_items(st, v, a);
    case JSEQ_join:
        return f_join(st, v, a);
    case JSEQ_map:
        return f_map(st, v, a);
    case JSEQ_max:
    case JSEQ_min:
        return f_minmax(st, v, a, which == JSEQ_max);
    case JSEQ_select:
    case JSEQ_reject:
        return f_select(st, v, a, which == JSEQ_select, false);
    case JSEQ_selectattr:
    case JSEQ_rejectattr:
        return f_select(st, v, a, which == JSEQ_selectattr, true);
    case JSEQ_reverse:
        return f_reverse(st, v, a);
    case JSEQ_sort:
        return f_sort(st, v, a);
    case JSEQ_sum:
        return f_sum(st, v, a);
    case JSEQ_unique:
        return f_unique(st, v, a);
    }
    return JV_NONE;
}
