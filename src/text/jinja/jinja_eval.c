/*
 * Jinja evaluator: walks the syntax tree of a compiled template and writes the output. Owns scopes,
 * loops, macros and the limits of a render. Scopes are opened where jinja2 opens them (loops,
 * macros, with, set and filter blocks, generation; never if). Each iteration of a loop starts with
 * an empty scope.
 */
#include "text/jinja/jinja_int.h"
#include "base/mem.h"

#include <string.h>

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

static struct jval eval(struct jstate *st, const struct jnode *n);
static enum flow exec(struct jstate *st, const struct jnode *n);

static void enter(struct jstate *st)
{
    char *here = __builtin_frame_address(0);
    size_t used =
        here < st->stack_base ? (size_t)(st->stack_base - here) : (size_t)(here - st->stack_base);
    if (++st->depth > JINJA_MAX_DEPTH || used > JINJA_MAX_STACK)
        jinja_fail(st, "nested too deeply (recursion without end?)");
}

/* ------------------------------------------------------------------ scopes */

static struct jscope *scope_push(struct jstate *st, struct jscope *parent)
{
    struct jscope *s = jalloc(st, 1, sizeof(*s));
    s->parent = parent;
    st->scope = s;
    return s;
}

static void scope_set(struct jstate *st, struct jscope *s, int sym, struct jval v)
{
    if (!s) {
        st->top[sym] = v;
        return;
    }
    for (int i = 0; i < s->n; i++) {
        if (s->b[i].sym == sym) {
            s->b[i].val = v;
            return;
        }
    }
    if (s->n == s->cap) {
        int cap = s->cap ? s->cap * 2 : 4;
        struct jbind *b = jalloc(st, (size_t)cap, sizeof(*b));
        if (s->n)
            memcpy(b, s->b, (size_t)s->n * sizeof(*b));
        s->b = b;
        s->cap = cap;
    }
    s->b[s->n++] = (struct jbind){sym, v};
}

static struct jval load_global(struct jstate *st, int sym)
{
    struct jval name = st->t->names[sym], v;
    const json_t *j = st->own ? json_object_getn(st->own, name.u.s, name.len) : NULL;
    bool literal = st->literal;
    if (j)
        st->literal = false;
    else if (st->context)
        j = json_object_getn(st->context, name.u.s, name.len);
    int func = jfunc_lookup(name);
    if (j)
        v = jval_fromjson(st, j, 0);
    else if (func >= 0)
        v = (struct jval){.type = JT_FUNC, .u.func = func};
    else
        v = jval_undef(st, UNDEF_NAME, name, JV_NONE, NULL);
    st->literal = literal;
    st->globals[sym] = v;
    return v;
}

static struct jval load(struct jstate *st, int sym)
{
    for (struct jscope *s = st->scope; s; s = s->parent) {
        for (int i = 0; i < s->n; i++) {
            if (s->b[i].sym == sym)
                return s->b[i].val;
        }
    }
    if (st->top[sym].type != JT_MISSING)
        return st->top[sym];
    if (st->globals[sym].type != JT_MISSING)
        return st->globals[sym];
    return load_global(st, sym);
}

static void assign(struct jstate *st, struct jscope *s, const struct jnode *target, struct jval v)
{
    if (target->kind == N_NAME) {
        scope_set(st, s, target->sym, v);
    } else if (target->kind == N_NSREF) {
        struct jval ns = load(st, target->sym);
        if (ns.type == JT_UNDEF)
            jundef_fail(st, ns);
        if (ns.type != JT_NS)
            jinja_fail(st, "cannot assign attribute on non-namespace object");
        jdict_put(st, ns.u.dict, target->val, v);
    } else {
        if (!jval_iterable(v))
            jinja_fail(st, "cannot unpack non-iterable %s object", jval_typename(v));
        struct jlist *l = jval_tolist(st, v);
        if (l->n > (uint32_t)target->n)
            jinja_fail(st, "too many values to unpack (expected %d)", target->n);
        if (l->n < (uint32_t)target->n)
            jinja_fail(st, "not enough values to unpack (expected %d, got %u)", target->n, l->n);
        for (int i = 0; i < target->n; i++)
            assign(st, s, target->list[i], l->v[i]);
    }
}

/* ------------------------------------------------------------------ calls */

static void eval_args(struct jstate *st, const struct jcall_node *c, struct jargs *a)
{
    *a = (struct jargs){0};
    if (!c)
        return;
    struct jlist *dyn = c->dyn ? jval_tolist(st, eval(st, c->dyn)) : NULL;
    struct jdict *dyn_kw = NULL;
    if (c->dyn_kw) {
        struct jval d = eval(st, c->dyn_kw);
        if (d.type != JT_DICT)
            jinja_fail(st, "argument after ** must be a mapping, not %s", jval_typename(d));
        dyn_kw = d.u.dict;
    }
    size_t n = (size_t)c->n_pos + (dyn ? dyn->n : 0),
           n_kw = (size_t)c->n_kw + (dyn_kw ? dyn_kw->n : 0);
    if (n > 100000 || n_kw > 10000)
        jinja_fail(st, "too many arguments");
    a->pos = jalloc(st, n + 1, sizeof(*a->pos));
    /* one extra: the caller of a call block */
    a->kw = jalloc(st, n_kw + 1, sizeof(*a->kw));
    for (int i = 0; i < c->n_pos; i++)
        a->pos[a->n++] = eval(st, c->pos[i]);
    for (uint32_t i = 0; dyn && i < dyn->n; i++)
        a->pos[a->n++] = dyn->v[i];
    for (int i = 0; i < c->n_kw; i++)
        a->kw[a->n_kw++] = (struct jkwarg){c->kw[i].name, eval(st, c->kw[i].value)};
    for (uint32_t i = 0; dyn_kw && i < dyn_kw->n; i++) {
        struct jval key = dyn_kw->e[i].k;
        if (key.type != JT_STR)
            jinja_fail(st, "keywords must be strings");
        for (int k = 0; k < a->n_kw; k++) {
            jcharge(st, 1);
            if (jval_eq(st, a->kw[k].name, key))
                jinja_fail(st, "got multiple values for keyword argument '%.*s'",
                           (int)(key.len > 60 ? 60 : key.len), key.u.s);
        }
        a->kw[a->n_kw++] = (struct jkwarg){key, dyn_kw->e[i].v};
    }
}

/* Takes the keyword argument of this name from a. Its name becomes MISSING to mark it as used. */
static bool take_kwarg(struct jargs *a, struct jval name, struct jval *out)
{
    for (int i = 0; i < a->n_kw; i++) {
        struct jval k = a->kw[i].name;
        if (k.type == JT_STR && k.len == name.len && !memcmp(k.u.s, name.u.s, k.len)) {
            *out = a->kw[i].val;
            a->kw[i].name = JV_MISSING;
            return true;
        }
    }
    return false;
}

static void bind_params(struct jstate *st, const struct jnode *n, const struct jargs *given,
                        struct jscope *s)
{
    const struct jparams *ps = n->params;
    struct jargs a = *given;
    struct jval v;
    int len = (int)(n->val.len > 60 ? 60 : n->val.len);
    if (a.n_kw) { /* copy: take_kwarg modifies the array */
        a.kw = jalloc(st, (size_t)a.n_kw, sizeof(*a.kw));
        memcpy(a.kw, given->kw, (size_t)a.n_kw * sizeof(*a.kw));
    }
    bool found_caller = ps->explicit_caller;
    for (int i = 0; i < ps->n; i++) {
        if (i < a.n || take_kwarg(&a, ps->p[i].name, &v))
            scope_set(st, s, ps->p[i].sym, i < a.n ? a.pos[i] : v);
        else if (ps->p[i].def)
            scope_set(st, s, ps->p[i].sym, eval(st, ps->p[i].def));
        else
            scope_set(st, s, ps->p[i].sym,
                      jval_undef(st, UNDEF_NAME, ps->p[i].name, JV_NONE, NULL));
    }
    if (ps->uses_caller && !found_caller) {
        if (!take_kwarg(&a, jval_cstr("caller"), &v) || v.type == JT_NONE)
            v = jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE, "No caller defined");
        scope_set(st, s, st->t->sym_caller, v);
    }
    struct jdict *kw = ps->uses_kwargs ? jdict_new(st, 0) : NULL;
    for (int i = 0; i < a.n_kw; i++) {
        struct jval name = a.kw[i].name;
        if (name.type == JT_MISSING)
            continue;
        if (!kw)
            jinja_fail(st, "macro '%.*s' takes no keyword argument '%.*s'", len, n->val.u.s,
                       (int)(name.len > 60 ? 60 : name.len), name.u.s);
        jdict_put(st, kw, name, a.kw[i].val);
    }
    if (kw)
        scope_set(st, s, st->t->sym_kwargs, jval_dict(kw));
    if (ps->uses_varargs) {
        int extra = a.n > ps->n ? a.n - ps->n : 0;
        v = jval_list(st, JT_TUPLE, (size_t)extra);
        if (extra)
            memcpy(v.u.list->v, a.pos + ps->n, (size_t)extra * sizeof(struct jval));
        scope_set(st, s, st->t->sym_varargs, v);
    } else if (a.n > ps->n) {
        jinja_fail(st, "macro '%.*s' takes not more than %d argument(s)", len, n->val.u.s, ps->n);
    }
}

static struct jval call_macro(struct jstate *st, struct jmacro *m, const struct jargs *a)
{
    struct jscope *outer = st->scope;
    int line = st->line;
    size_t mark = st->out->len;
    enter(st);
    bind_params(st, m->node, a, scope_push(st, m->scope));
    exec(st, m->node->body);
    st->depth--;
    st->scope = outer;
    st->line = line;
    return jval_take(st, st->out, mark);
}

static void run_loop(struct jstate *st, const struct jnode *n, struct jval over, int depth0,
                     struct jscope *outer);

static struct jval jcall(struct jstate *st, struct jval f, const struct jargs *a)
{
    jcharge(st, 1);
    switch ((enum jtype)f.type) {
    case JT_MACRO:
        return call_macro(st, f.u.macro, a);
    case JT_FUNC:
        return jfunc_call(st, f.u.func, a);
    case JT_METHOD:
        return jmethod_call(st, f.u.method, a);
    case JT_JOINER:
        jargs_bind(st, "joiner", a, NULL, 0, 0, NULL);
        return f.u.cycler->pos++ ? f.u.cycler->items->v[0] : jval_str("", 0);
    case JT_LOOP: {
        struct jloop *l = f.u.loop;
        struct jscope *scope = st->scope;
        size_t mark = st->out->len;
        if (!l->node->flag)
            jinja_fail(st, "The loop must have the 'recursive' marker to be called recursively.");
        if (a->n != 1 || a->n_kw)
            jinja_fail(st, "loop() takes one argument (%d given)", a->n + a->n_kw);
        enter(st);
        run_loop(st, l->node, a->pos[0], l->depth0 + 1, l->outer);
        st->depth--;
        st->scope = scope;
        return jval_take(st, st->out, mark);
    }
    case JT_UNDEF:
        jundef_fail(st, f);
    default:
        jinja_fail(st, "'%s' object is not callable", jval_typename(f));
    }
}

/* ------------------------------------------------------------------ expressions */

static struct jval eval_filter(struct jstate *st, const struct jnode *n, struct jval *block)
{
    struct jval v;
    struct jargs a;
    if (!n->a)
        v = *block;
    else if (block && n->a->kind == N_FILTER)
        v = eval_filter(st, n->a, block);
    else
        v = eval(st, n->a);
    eval_args(st, n->args, &a);
    st->line = n->line;
    if (n->mid < 0)
        jinja_fail(st, "No filter named '%.*s'.", (int)(n->val.len > 60 ? 60 : n->val.len),
                   n->val.u.s);
    return jfilter_call(st, n->mid, v, &a);
}

static struct jval eval_test(struct jstate *st, const struct jnode *n)
{
    struct jargs a;
    struct jval v = eval(st, n->a);
    eval_args(st, n->args, &a);
    st->line = n->line;
    if (n->mid < 0)
        jinja_fail(st, "No test named '%.*s'.", (int)(n->val.len > 60 ? 60 : n->val.len),
                   n->val.u.s);
    return jval_bool(jtest_call(st, n->mid, v, &a));
}

static struct jval eval_call(struct jstate *st, const struct jnode *n, const struct jval *caller)
{
    struct jargs a;
    struct jval f = eval(st, n->a);
    eval_args(st, n->args, &a);
    if (caller)
        a.kw[a.n_kw++] = (struct jkwarg){jval_cstr("caller"), *caller};
    st->line = n->line;
    return jcall(st, f, &a);
}

static struct jval eval_compare(struct jstate *st, const struct jnode *n)
{
    struct jval left = eval(st, n->a);
    for (int i = 0; i < n->n; i++) {
        struct jval right = eval(st, n->list[i]->a);
        st->line = n->list[i]->line;
        if (!jop_compare(st, (enum jop)n->list[i]->op, left, right))
            return jval_bool(false);
        left = right;
    }
    return jval_bool(true);
}

static struct jval eval_items(struct jstate *st, const struct jnode *n)
{
    if (n->kind == N_DICT) {
        struct jdict *d = jdict_new(st, (uint32_t)n->n / 2);
        for (int i = 0; i < n->n; i += 2) {
            struct jval k = eval(st, n->list[i]);
            jdict_put(st, d, k, eval(st, n->list[i + 1]));
        }
        return jval_dict(d);
    }
    struct jval v = jval_list(st, n->kind == N_LIST ? JT_LIST : JT_TUPLE, (size_t)n->n);
    for (int i = 0; i < n->n; i++)
        v.u.list->v[i] = eval(st, n->list[i]);
    return v;
}

static struct jval eval_item(struct jstate *st, const struct jnode *n)
{
    struct jval obj = eval(st, n->a);
    if (n->b->kind != N_SLICE) {
        struct jval key = eval(st, n->b);
        st->line = n->line;
        return jget_item(st, obj, key);
    }
    struct jval a = n->b->a ? eval(st, n->b->a) : JV_NONE,
                b = n->b->b ? eval(st, n->b->b) : JV_NONE,
                c = n->b->c ? eval(st, n->b->c) : JV_NONE;
    st->line = n->line;
    return jget_slice(st, obj, a, b, c);
}

static struct jval eval_unary(struct jstate *st, const struct jnode *n)
{
    struct jval v = eval(st, n->a);
    st->line = n->line;
    if (v.type == JT_UNDEF)
        jundef_fail(st, v);
    if (!jval_isnum(v))
        jinja_fail(st, "bad operand type for unary %c: '%s'", n->kind == N_NEG ? '-' : '+',
                   jval_typename(v));
    if (n->kind == N_POS)
        return v.type == JT_BOOL ? jval_int(v.u.b) : v;
    if (v.type == JT_FLOAT)
        return jval_float(-v.u.f);
    return jop_binary(st, OP_SUB, jval_int(0), v);
}

static struct jval eval_concat(struct jstate *st, const struct jnode *n)
{
    struct jval r = jval_str("", 0);
    for (int i = 0; i < n->n; i++) {
        struct jval s = jval_tostr(st, eval(st, n->list[i]));
        r = jstr_concat(st, r, s);
    }
    r.flags &= (uint8_t)~STR_MARKUP;
    return r;
}

static struct jval eval_binary(struct jstate *st, const struct jnode *n)
{
    struct jval a = eval(st, n->a), b = eval(st, n->b);
    st->line = n->line;
    return jop_binary(st, (enum jop)n->op, a, b);
}

static struct jval eval_kind(struct jstate *st, const struct jnode *n)
{
    struct jval v;
    switch ((enum jkind)n->kind) {
    case N_ATTR:
        v = eval(st, n->a);
        st->line = n->line;
        return jget_attr(st, v, n->val, n->mid);
    case N_ITEM:
        return eval_item(st, n);
    case N_CALL:
        return eval_call(st, n, NULL);
    case N_FILTER:
        return eval_filter(st, n, NULL);
    case N_TEST:
        return eval_test(st, n);
    case N_COMPARE:
        return eval_compare(st, n);
    case N_NOT:
        return jval_bool(!jval_true(eval(st, n->a)));
    case N_AND:
        v = eval(st, n->a);
        return jval_true(v) ? eval(st, n->b) : v;
    case N_OR:
        v = eval(st, n->a);
        return jval_true(v) ? v : eval(st, n->b);
    case N_BIN:
        return eval_binary(st, n);
    case N_CONCAT:
        return eval_concat(st, n);
    case N_COND:
        if (jval_true(eval(st, n->a)))
            return eval(st, n->b);
        if (n->c)
            return eval(st, n->c);
        return jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE,
                          "the inline if-expression evaluated to false and no else section was "
                          "defined.");
    case N_NEG:
    case N_POS:
        return eval_unary(st, n);
    case N_TUPLE:
    case N_LIST:
    case N_DICT:
        return eval_items(st, n);
    default:
        CHECK(false, "expression of kind %d", n->kind);
    }
}

static struct jval eval(struct jstate *st, const struct jnode *n)
{
    st->line = n->line;
    jcharge(st, 1);
    if (n->kind == N_CONST)
        return n->val;
    if (n->kind == N_NAME)
        return load(st, n->sym);
    enter(st);
    struct jval v = eval_kind(st, n);
    st->depth--;
    return v;
}

/* ------------------------------------------------------------------ loops */

/* Returns the next item that passes the loop's filter. */
static bool loop_pull(struct jstate *st, struct jloop *l, struct jval *out)
{
    while (l->pos < l->src->n) {
        *out = l->src->v[l->pos++];
        if (!l->node->c)
            return true;
        struct jscope *scope = st->scope, *s = scope_push(st, l->outer);
        assign(st, s, l->node->a, *out);
        bool pass = jval_true(eval(st, l->node->c));
        st->scope = scope;
        if (pass)
            return true;
    }
    return false;
}

static bool loop_peek(struct jstate *st, struct jloop *l)
{
    return l->after.type != JT_MISSING || loop_pull(st, l, &l->after);
}

static int64_t loop_length(struct jstate *st, struct jloop *l)
{
    if (l->length < 0) {
        if (!l->node->c) {
            l->length = l->src->n;
        } else { /* filter the remaining items now */
            struct jval v, rest = jval_list(st, JT_LIST, l->src->n - l->pos);
            uint32_t n = 0;
            bool after = l->after.type != JT_MISSING;
            while (loop_pull(st, l, &v))
                rest.u.list->v[n++] = v;
            rest.u.list->n = n;
            l->src = rest.u.list;
            l->pos = 0;
            l->length = n + l->index0 + 1 + after;
            struct jnode *plain = jalloc(st, 1, sizeof(*plain)); /* without the filter */
            *plain = *l->node;
            plain->c = NULL;
            l->node = plain;
        }
    }
    return l->length;
}

struct jval jloop_attr(struct jstate *st, struct jloop *l, struct jval name)
{
    if (jval_is(name, "index"))
        return jval_int(l->index0 + 1);
    if (jval_is(name, "index0"))
        return jval_int(l->index0);
    if (jval_is(name, "first"))
        return jval_bool(l->index0 == 0);
    if (jval_is(name, "last"))
        return jval_bool(!loop_peek(st, l));
    if (jval_is(name, "length"))
        return jval_int(loop_length(st, l));
    if (jval_is(name, "revindex"))
        return jval_int(loop_length(st, l) - l->index0);
    if (jval_is(name, "revindex0"))
        return jval_int(loop_length(st, l) - l->index0 - 1);
    if (jval_is(name, "depth"))
        return jval_int(l->depth0 + 1);
    if (jval_is(name, "depth0"))
        return jval_int(l->depth0);
    if (jval_is(name, "previtem"))
        return l->index0 == 0
                   ? jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE, "there is no previous item")
                   : l->before;
    if (jval_is(name, "nextitem"))
        return loop_peek(st, l)
                   ? l->after
                   : jval_undef(st, UNDEF_HINT, JV_NONE, JV_NONE, "there is no next item");
    return JV_MISSING;
}

static void run_loop(struct jstate *st, const struct jnode *n, struct jval over, int depth0,
                     struct jscope *outer)
{
    struct jloop *l = jalloc(st, 1, sizeof(*l));
    struct jval loop = {.type = JT_LOOP, .u.loop = l}, item;
    bool completed = false;
    l->src = jval_tolist(st, over);
    l->node = n;
    l->outer = outer;
    l->index0 = l->length = -1;
    l->depth0 = depth0;
    struct jscope *s = scope_push(st, outer);
    for (;;) {
        if (l->after.type != JT_MISSING) {
            item = l->after;
            l->after = JV_MISSING;
        } else if (!loop_pull(st, l, &item)) {
            break;
        }
        l->index0++;
        l->before = l->current;
        l->current = item;
        s->n = 0; /* assignments do not carry over to the next iteration */
        st->scope = s;
        assign(st, s, n->a, item);
        scope_set(st, s, st->t->sym_loop, loop);
        jcharge(st, 1);
        enum flow f = exec(st, n->body);
        if (f == FLOW_BREAK)
            break;
        completed |= f == FLOW_NEXT;
    }
    /* As in jinja2, `else` runs unless some iteration completed, so also after a `break` in the
     * first one. */
    if (n->orelse && !completed) {
        scope_push(st, outer);
        exec(st, n->orelse);
    }
    st->scope = outer;
}

/* ------------------------------------------------------------------ statements */

static struct jval make_macro(struct jstate *st, const struct jnode *n)
{
    struct jmacro *m = jalloc(st, 1, sizeof(*m));
    *m = (struct jmacro){n, st->scope};
    return (struct jval){.type = JT_MACRO, .u.macro = m};
}

static enum flow exec_if(struct jstate *st, const struct jnode *n)
{
    for (; n && n->kind == N_IF; n = n->c) {
        if (jval_true(eval(st, n->a)))
            return exec(st, n->b);
    }
    return n ? exec(st, n) : FLOW_NEXT;
}

/* Runs the body in its own scope; *out is the text it writes. */
static enum flow capture(struct jstate *st, const struct jnode *n, struct jval *out)
{
    struct jscope *outer = st->scope;
    size_t mark = st->out->len;
    scope_push(st, outer);
    enum flow f = exec(st, n->body);
    st->scope = outer;
    *out = jval_take(st, st->out, mark);
    if (n->b && f == FLOW_NEXT)
        *out = eval_filter(st, n->b, out);
    return f;
}

static enum flow exec_with(struct jstate *st, const struct jnode *n)
{
    struct jscope *outer = st->scope;
    struct jval *v = jalloc(st, (size_t)n->n / 2 + 1, sizeof(*v));
    for (int i = 0; i < n->n; i += 2)
        v[i / 2] = eval(st, n->list[i + 1]);
    struct jscope *s = scope_push(st, outer);
    for (int i = 0; i < n->n; i += 2)
        assign(st, s, n->list[i], v[i / 2]);
    enum flow f = exec(st, n->body);
    st->scope = outer;
    return f;
}

static enum flow exec_kind(struct jstate *st, const struct jnode *n)
{
    struct jval v;
    enum flow f;
    struct jscope *outer = st->scope;
    switch ((enum jkind)n->kind) {
    case N_IF:
        return exec_if(st, n);
    case N_FOR:
        run_loop(st, n, eval(st, n->b), 0, outer);
        return FLOW_NEXT;
    case N_SET:
        v = eval(st, n->b);
        st->line = n->line;
        assign(st, outer, n->a, v);
        return FLOW_NEXT;
    case N_SETBLOCK:
        f = capture(st, n, &v);
        if (f == FLOW_NEXT)
            assign(st, outer, n->a, v);
        return f;
    case N_FILTERBLOCK:
        f = capture(st, n, &v);
        if (f == FLOW_NEXT)
            jprint_str(st, v);
        return f;
    case N_MACRO:
        scope_set(st, outer, n->sym, make_macro(st, n));
        return FLOW_NEXT;
    case N_CALLBLOCK:
        v = make_macro(st, n);
        jprint_str(st, eval_call(st, n->a, &v));
        return FLOW_NEXT;
    case N_WITH:
        return exec_with(st, n);
    case N_SCOPE:
        scope_push(st, outer);
        exec(st, n->body);
        st->scope = outer;
        return FLOW_NEXT;
    case N_DO:
        eval(st, n->a);
        return FLOW_NEXT;
    case N_BREAK:
        return FLOW_BREAK;
    case N_CONTINUE:
        return FLOW_CONTINUE;
    default:
        CHECK(false, "statement of kind %d", n->kind);
    }
}

static enum flow exec(struct jstate *st, const struct jnode *block)
{
    enter(st);
    enum flow f = FLOW_NEXT;
    for (int i = 0; i < block->n && f == FLOW_NEXT; i++) {
        const struct jnode *n = block->list[i];
        jcharge(st, 1);
        if (n->kind == N_DATA) {
            jprint_raw(st, n->val.u.s, n->val.len);
        } else if (n->kind == N_PRINT) {
            jprint_str(st, eval(st, n->a));
        } else if (n->kind == N_BLOCK) {
            f = exec(st, n);
        } else {
            st->line = n->line;
            f = exec_kind(st, n);
        }
    }
    st->depth--;
    return f;
}

/* ------------------------------------------------------------------ entry points */

static bool run_compile(struct jstate *st, const char *src, size_t len)
{
    if (setjmp(st->jmp))
        return false;
    int n;
    struct jtoken *tokens = jinja_lex(st, src, len, &n);
    jinja_parse(st, tokens, n);
    return true;
}

struct jinja *jinja_compile(const char *src, size_t len, struct error *err)
{
    struct jinja *t = mem_zalloc(1, sizeof(*t));
    struct buf out = {0};
    struct jstate st = {.err = err, .building = t, .steps = INT64_MAX, .out = &out};
    st.obj.limit = st.str.limit = st.tmp.limit = st.out_limit = 512u << 20;
    bool ok = run_compile(&st, src, len);
    jarena_clear(&st.tmp);
    buf_clear(&out);
    t->arena = st.obj;
    t->text = st.str;
    if (!ok) {
        jinja_free(t);
        return NULL;
    }
    return t;
}

void jinja_free(struct jinja *t)
{
    if (!t)
        return;
    jarena_clear(&t->arena);
    jarena_clear(&t->text);
    mem_free(t);
}

bool jinja_uses(const struct jinja *t, const char *name)
{
    for (int i = 0; i < t->n_names; i++) {
        if (jval_is(t->names[i], name))
            return true;
    }
    return false;
}

static bool run_render(struct jstate *st)
{
    if (setjmp(st->jmp))
        return false;
    size_t n = (size_t)st->t->n_names;
    st->globals = jalloc(st, n, sizeof(*st->globals));
    st->top = jalloc(st, n, sizeof(*st->top));
    exec(st, st->t->root);
    return true;
}

bool jinja_render(const struct jinja *t, const json_t *context, const struct jinja_options *opt,
                  struct buf *out, struct error *err)
{
    static const struct jinja_options none;
    if (!opt)
        opt = &none;
    size_t mark = out->len;
    size_t memory = opt->max_memory ? opt->max_memory : 32u << 20;
    size_t output = opt->max_output ? opt->max_output : 24u << 20;
    struct jstate st = {.err = err,
                        .t = t,
                        .line = 1,
                        .context = json_is_object(context) ? context : NULL,
                        .own = json_is_object(opt->own) ? opt->own : NULL,
                        .literal = opt->literal,
                        .now = opt->now,
                        .out = out,
                        .out_limit = mark + output,
                        .steps_bank = opt->max_steps ? opt->max_steps : 1000000,
                        .budget = opt->budget,
                        .stack_base = __builtin_frame_address(0)};
    st.obj.limit = st.str.limit = memory;
    st.seed = (uint64_t)(uintptr_t)&st ^ (uint64_t)time(NULL);
    bool ok = run_render(&st);
    jarena_clear(&st.obj);
    jarena_clear(&st.str);
    if (!ok) {
        out->len = mark;
        if (out->p)
            out->p[mark] = 0;
    } else {
        buf_add(out, "", 0);
    }
    return ok;
}
