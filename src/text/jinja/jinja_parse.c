/*
 * Jinja parser: recursive descent from tokens to the syntax tree of jinja_int.h. Precedence is
 * jinja2's, which is Python's except that `**` is left-associative and unary minus binds tighter
 * than it. Names become symbol numbers. Method, filter and test names become table indices, so that
 * a render need not compare strings. Knows no values except literals.
 */
#include "text/jinja/jinja_int.h"

#include <string.h>

struct jinja_parser {
    struct jstate *st;
    struct jtoken *tok; /* (n), the last is T_EOF */
    int n, i;
    int depth;             /* current nesting of statements and expressions */
    int loops;             /* enclosing loops within the innermost macro */
    struct jparams *macro; /* innermost macro or call block, NULL outside */
    const char *open_tag;  /* (open_len) innermost block without its end tag */
    int open_len, open_line;
};

static struct jnode *parse_expr(struct jinja_parser *p);
static struct jnode *parse_or(struct jinja_parser *p);
static struct jnode *parse_unary(struct jinja_parser *p, bool with_filter);
static struct jnode *parse_postfix(struct jinja_parser *p, struct jnode *a);
static struct jnode *parse_body(struct jinja_parser *p, const char *const *ends);

/* ------------------------------------------------------------------ token stream */

static const char *token_text(const struct jtoken *t, int *len)
{
    static const char *const text[] = {[T_EOF] = "end of template",
                                       [T_DATA] = "template data",
                                       [T_VAR_BEGIN] = "{{",
                                       [T_VAR_END] = "end of print statement",
                                       [T_BLOCK_BEGIN] = "{%",
                                       [T_BLOCK_END] = "end of statement block",
                                       [T_STRING] = "string",
                                       [T_INT] = "integer",
                                       [T_FLOAT] = "float",
                                       [T_ADD] = "+",
                                       [T_SUB] = "-",
                                       [T_DIV] = "/",
                                       [T_FLOORDIV] = "//",
                                       [T_MUL] = "*",
                                       [T_MOD] = "%",
                                       [T_POW] = "**",
                                       [T_TILDE] = "~",
                                       [T_LBRACKET] = "[",
                                       [T_RBRACKET] = "]",
                                       [T_LPAREN] = "(",
                                       [T_RPAREN] = ")",
                                       [T_LBRACE] = "{",
                                       [T_RBRACE] = "}",
                                       [T_EQ] = "==",
                                       [T_NE] = "!=",
                                       [T_GT] = ">",
                                       [T_GE] = ">=",
                                       [T_LT] = "<",
                                       [T_LE] = "<=",
                                       [T_ASSIGN] = "=",
                                       [T_DOT] = ".",
                                       [T_COLON] = ":",
                                       [T_PIPE] = "|",
                                       [T_COMMA] = ",",
                                       [T_SEMICOLON] = ";"};
    if (t->type == T_NAME) {
        *len = t->val.len > 60 ? 60 : (int)t->val.len;
        return t->val.u.s;
    }
    *len = (int)strlen(text[t->type]);
    return text[t->type];
}

static struct jtoken *cur(struct jinja_parser *p)
{
    return &p->tok[p->i];
}

static struct jtoken *next(struct jinja_parser *p)
{
    struct jtoken *t = cur(p);
    if (t->type != T_EOF)
        p->i++;
    p->st->line = cur(p)->line;
    return t;
}

static _Noreturn void fail_at(struct jinja_parser *p, const struct jtoken *t)
{
    int len;
    const char *text = token_text(t, &len);
    p->st->line = t->line;
    if (t->type == T_EOF && p->open_tag)
        jinja_fail(p->st, "unexpected end of template; '%.*s' of line %d is not closed",
                   p->open_len, p->open_tag, p->open_line);
    jinja_fail(p->st, "unexpected '%.*s'", len, text);
}

static bool is_name(const struct jtoken *t, const char *name)
{
    return t->type == T_NAME && jval_is(t->val, name);
}

static bool skip(struct jinja_parser *p, enum jtok type)
{
    if (cur(p)->type != type)
        return false;
    next(p);
    return true;
}

static bool skip_name(struct jinja_parser *p, const char *name)
{
    if (!is_name(cur(p), name))
        return false;
    next(p);
    return true;
}

static struct jtoken *expect(struct jinja_parser *p, enum jtok type)
{
    if (cur(p)->type != type) {
        int len, want_len;
        struct jtoken want = {.type = (uint8_t)type, .val = jval_cstr("name")};
        const char *text = token_text(cur(p), &len), *w = token_text(&want, &want_len);
        if (cur(p)->type == T_EOF)
            fail_at(p, cur(p));
        jinja_fail(p->st, "expected '%.*s', got '%.*s'", want_len, w, len, text);
    }
    return next(p);
}

static void expect_name(struct jinja_parser *p, const char *name)
{
    if (!skip_name(p, name)) {
        int len;
        const char *text = token_text(cur(p), &len);
        jinja_fail(p->st, "expected '%s', got '%.*s'", name, len, text);
    }
}

static void enter(struct jinja_parser *p)
{
    if (++p->depth > JINJA_MAX_HEIGHT)
        jinja_fail(p->st, "nested too deeply (more than %d levels)", JINJA_MAX_HEIGHT);
}

static struct jnode *node_new(struct jinja_parser *p, enum jkind kind, int line)
{
    struct jnode *n = jalloc(p->st, 1, sizeof(*n));
    n->kind = (uint8_t)kind;
    n->line = line;
    n->sym = n->mid = -1;
    return n;
}

/* Creates an operator node. The height of left-deep chains (a + b + c...) is limited too, since the
 * evaluator recurses into them. */
static struct jnode *node_over(struct jinja_parser *p, enum jkind kind, int line, struct jnode *a,
                               struct jnode *b)
{
    struct jnode *n = node_new(p, kind, line);
    n->a = a;
    n->b = b;
    int h = a ? a->height : 0;
    if (b && b->height > h)
        h = b->height;
    if (h >= 1000)
        jinja_fail(p->st, "expression too long (more than 1000 operators in a chain)");
    n->height = (uint16_t)(h + 1);
    return n;
}

struct node_vec {
    struct jnode **v; /* (cap) */
    int n, cap;
    uint16_t height;
};

static void vec_add(struct jinja_parser *p, struct node_vec *v, struct jnode *n)
{
    if (v->n == v->cap) {
        int cap = v->cap ? v->cap * 2 : 4;
        struct jnode **nv = jalloc(p->st, (size_t)cap, sizeof(struct jnode *));
        if (v->n)
            memcpy(nv, v->v, (size_t)v->n * sizeof(struct jnode *));
        v->v = nv;
        v->cap = cap;
    }
    v->v[v->n++] = n;
    if (n && n->height > v->height)
        v->height = n->height;
}

static struct jnode *vec_node(struct jinja_parser *p, enum jkind kind, int line, struct node_vec *v)
{
    struct jnode *n = node_new(p, kind, line);
    n->list = v->v;
    n->n = v->n;
    n->height = (uint16_t)(v->height + 1);
    return n;
}

/* ------------------------------------------------------------------ expressions */

static void note_name(struct jinja_parser *p, struct jval name)
{
    if (!p->macro)
        return;
    p->macro->uses_caller |= jval_is(name, "caller");
    p->macro->uses_varargs |= jval_is(name, "varargs");
    p->macro->uses_kwargs |= jval_is(name, "kwargs");
}

static struct jnode *const_node(struct jinja_parser *p, struct jval v, int line)
{
    struct jnode *n = node_new(p, N_CONST, line);
    n->val = v;
    return n;
}

enum { TUP_COND = 1, TUP_SIMPLE = 2, TUP_PAREN = 4, TUP_NS = 8 };

static struct jnode *parse_primary(struct jinja_parser *p, bool with_ns);

/* One expression, or a tuple of several. end: a name that also ends the tuple, or NULL. */
static struct jnode *parse_tuple(struct jinja_parser *p, int how, const char *end)
{
    int line = cur(p)->line;
    struct node_vec v = {0};
    bool tuple = false;
    for (;;) {
        if (v.n)
            expect(p, T_COMMA);
        enum jtok t = (enum jtok)cur(p)->type;
        if (t == T_VAR_END || t == T_BLOCK_END || t == T_RPAREN || (end && is_name(cur(p), end)))
            break;
        vec_add(p, &v,
                how & TUP_SIMPLE ? parse_primary(p, how & TUP_NS)
                : how & TUP_COND ? parse_expr(p)
                                 : parse_or(p));
        if (cur(p)->type != T_COMMA)
            break;
        tuple = true;
    }
    if (!tuple) {
        if (v.n)
            return v.v[0];
        if (!(how & TUP_PAREN)) {
            int len;
            const char *text = token_text(cur(p), &len);
            jinja_fail(p->st, "Expected an expression, got '%.*s'", len, text);
        }
    }
    return vec_node(p, N_TUPLE, line, &v);
}

static struct jnode *parse_list(struct jinja_parser *p)
{
    int line = expect(p, T_LBRACKET)->line;
    struct node_vec v = {0};
    while (cur(p)->type != T_RBRACKET) {
        if (v.n)
            expect(p, T_COMMA);
        if (cur(p)->type == T_RBRACKET)
            break;
        vec_add(p, &v, parse_expr(p));
    }
    expect(p, T_RBRACKET);
    return vec_node(p, N_LIST, line, &v);
}

static struct jnode *parse_dict(struct jinja_parser *p)
{
    int line = expect(p, T_LBRACE)->line;
    struct node_vec v = {0};
    while (cur(p)->type != T_RBRACE) {
        if (v.n)
            expect(p, T_COMMA);
        if (cur(p)->type == T_RBRACE)
            break;
        vec_add(p, &v, parse_expr(p));
        expect(p, T_COLON);
        vec_add(p, &v, parse_expr(p));
    }
    expect(p, T_RBRACE);
    return vec_node(p, N_DICT, line, &v);
}

static struct jnode *parse_primary(struct jinja_parser *p, bool with_ns)
{
    struct jtoken *t = cur(p);
    struct jnode *n;
    enter(p);
    switch (t->type) {
    case T_NAME:
        next(p);
        if (jval_is(t->val, "true") || jval_is(t->val, "True")) {
            n = const_node(p, jval_bool(true), t->line);
        } else if (jval_is(t->val, "false") || jval_is(t->val, "False")) {
            n = const_node(p, jval_bool(false), t->line);
        } else if (jval_is(t->val, "none") || jval_is(t->val, "None")) {
            n = const_node(p, JV_NONE, t->line);
        } else if (with_ns && cur(p)->type == T_DOT) {
            next(p);
            n = node_new(p, N_NSREF, t->line);
            n->sym = jinja_symbol(p->st, t->val);
            n->val = expect(p, T_NAME)->val;
        } else {
            n = node_new(p, N_NAME, t->line);
            n->sym = jinja_symbol(p->st, t->val);
            note_name(p, t->val);
        }
        break;
    case T_STRING: {
        struct jval s = t->val;
        next(p);
        while (cur(p)->type == T_STRING)
            s = jstr_concat(p->st, s, next(p)->val);
        n = const_node(p, s, t->line);
        break;
    }
    case T_INT:
    case T_FLOAT:
        next(p);
        n = const_node(p, t->val, t->line);
        break;
    case T_LPAREN:
        next(p);
        n = parse_tuple(p, TUP_COND | TUP_PAREN, NULL);
        expect(p, T_RPAREN);
        break;
    case T_LBRACKET:
        n = parse_list(p);
        break;
    case T_LBRACE:
        n = parse_dict(p);
        break;
    default:
        fail_at(p, t);
    }
    p->depth--;
    return n;
}

static struct jcall_node *parse_args(struct jinja_parser *p)
{
    struct jcall_node *c = jalloc(p->st, 1, sizeof(*c));
    struct node_vec pos = {0};
    int line = expect(p, T_LPAREN)->line, cap_kw = 0;
    bool comma = false, ok = true;
    while (cur(p)->type != T_RPAREN) {
        if (comma) {
            expect(p, T_COMMA);
            if (cur(p)->type == T_RPAREN)
                break;
        }
        if (cur(p)->type == T_MUL) {
            ok &= !c->dyn && !c->dyn_kw;
            next(p);
            c->dyn = parse_expr(p);
        } else if (cur(p)->type == T_POW) {
            ok &= !c->dyn_kw;
            next(p);
            c->dyn_kw = parse_expr(p);
        } else if (cur(p)->type == T_NAME && cur(p)[1].type == T_ASSIGN) {
            ok &= !c->dyn_kw;
            if (c->n_kw == cap_kw) {
                cap_kw = cap_kw ? cap_kw * 2 : 4;
                struct jkwarg_node *kw = jalloc(p->st, (size_t)cap_kw, sizeof(*kw));
                if (c->n_kw)
                    memcpy(kw, c->kw, (size_t)c->n_kw * sizeof(*kw));
                c->kw = kw;
            }
            struct jval name = next(p)->val;
            next(p);
            struct jnode *value = parse_expr(p);
            for (int k = 0; k < c->n_kw; k++) {
                if (jval_eq(p->st, c->kw[k].name, name))
                    jinja_fail(p->st, "keyword argument repeated: %.*s", (int)name.len, name.u.s);
            }
            c->kw[c->n_kw++] = (struct jkwarg_node){name, value};
        } else {
            ok &= !c->dyn && !c->dyn_kw && !c->n_kw;
            vec_add(p, &pos, parse_expr(p));
        }
        if (!ok) {
            p->st->line = line;
            jinja_fail(p->st, "invalid syntax for function call expression");
        }
        comma = true;
    }
    expect(p, T_RPAREN);
    c->pos = pos.v;
    c->n_pos = pos.n;
    return c;
}

static struct jnode *parse_subscribed(struct jinja_parser *p)
{
    int line = cur(p)->line;
    struct jnode *a = NULL, *b = NULL, *c = NULL;
    if (cur(p)->type != T_COLON) {
        a = parse_expr(p);
        if (cur(p)->type != T_COLON)
            return a;
    }
    next(p);
    if (cur(p)->type != T_COLON && cur(p)->type != T_RBRACKET && cur(p)->type != T_COMMA)
        b = parse_expr(p);
    if (skip(p, T_COLON) && cur(p)->type != T_RBRACKET && cur(p)->type != T_COMMA)
        c = parse_expr(p);
    struct jnode *n = node_over(p, N_SLICE, line, a, b);
    n->c = c;
    return n;
}

static struct jnode *parse_subscript(struct jinja_parser *p, struct jnode *a)
{
    struct jtoken *t = next(p);
    if (t->type == T_DOT) {
        struct jtoken *name = next(p);
        if (name->type == T_INT)
            return node_over(p, N_ITEM, t->line, a, const_node(p, name->val, name->line));
        if (name->type != T_NAME) {
            p->st->line = name->line;
            jinja_fail(p->st, "expected name or number");
        }
        struct jnode *n = node_over(p, N_ATTR, t->line, a, NULL);
        n->val = name->val;
        n->mid = jmethod_lookup(name->val.u.s, name->val.len);
        return n;
    }
    struct node_vec v = {0};
    while (cur(p)->type != T_RBRACKET) {
        if (v.n)
            expect(p, T_COMMA);
        vec_add(p, &v, parse_subscribed(p));
    }
    expect(p, T_RBRACKET);
    if (v.n != 1) {
        for (int k = 0; k < v.n; k++) {
            if (v.v[k]->kind == N_SLICE)
                jinja_fail(p->st, "a tuple of subscripts cannot contain a slice");
        }
    }
    return node_over(p, N_ITEM, t->line, a, v.n == 1 ? v.v[0] : vec_node(p, N_TUPLE, t->line, &v));
}

static struct jnode *parse_call(struct jinja_parser *p, struct jnode *a)
{
    struct jnode *n = node_over(p, N_CALL, cur(p)->line, a, NULL);
    n->args = parse_args(p);
    return n;
}

static struct jnode *parse_postfix(struct jinja_parser *p, struct jnode *a)
{
    for (;;) {
        if (cur(p)->type == T_DOT || cur(p)->type == T_LBRACKET)
            a = parse_subscript(p, a);
        else if (cur(p)->type == T_LPAREN)
            a = parse_call(p, a);
        else
            return a;
    }
}

static struct jval dotted_name(struct jinja_parser *p)
{
    struct jval name = expect(p, T_NAME)->val;
    while (skip(p, T_DOT)) {
        name = jstr_concat(p->st, name, jval_cstr("."));
        name = jstr_concat(p->st, name, expect(p, T_NAME)->val);
    }
    return name;
}

/* Parses `| name(args)` chains applied to a (NULL: to a block's text). */
static struct jnode *parse_filter(struct jinja_parser *p, struct jnode *a, bool start_inline)
{
    while (start_inline || cur(p)->type == T_PIPE) {
        if (!start_inline)
            next(p);
        start_inline = false;
        struct jnode *n = node_over(p, N_FILTER, cur(p)->line, a, NULL);
        n->val = dotted_name(p);
        n->mid = jfilter_lookup(n->val.u.s, n->val.len);
        if (cur(p)->type == T_LPAREN)
            n->args = parse_args(p);
        a = n;
    }
    return a;
}

static struct jnode *parse_test(struct jinja_parser *p, struct jnode *a)
{
    int line = next(p)->line;
    bool negated = skip_name(p, "not");
    struct jnode *n = node_over(p, N_TEST, line, a, NULL);
    n->val = dotted_name(p);
    n->mid = jtest_lookup(n->val.u.s, n->val.len);
    struct jtoken *t = cur(p);
    if (t->type == T_LPAREN) {
        n->args = parse_args(p);
    } else if (t->type == T_STRING || t->type == T_INT || t->type == T_FLOAT ||
               t->type == T_LBRACKET || t->type == T_LBRACE ||
               (t->type == T_NAME && !is_name(t, "else") && !is_name(t, "or") &&
                !is_name(t, "and"))) {
        if (is_name(t, "is"))
            jinja_fail(p->st, "You cannot chain multiple tests with is");
        n->args = jalloc(p->st, 1, sizeof(*n->args));
        struct node_vec v = {0};
        vec_add(p, &v, parse_postfix(p, parse_primary(p, false)));
        n->args->pos = v.v;
        n->args->n_pos = 1;
    }
    return negated ? node_over(p, N_NOT, line, n, NULL) : n;
}

static struct jnode *parse_unary(struct jinja_parser *p, bool with_filter)
{
    struct jtoken *t = cur(p);
    struct jnode *a;
    if (t->type == T_SUB || t->type == T_ADD) {
        enter(p);
        next(p);
        a = node_over(p, t->type == T_SUB ? N_NEG : N_POS, t->line, parse_unary(p, false), NULL);
        p->depth--;
    } else {
        a = parse_primary(p, false);
    }
    a = parse_postfix(p, a);
    while (with_filter) {
        if (cur(p)->type == T_PIPE)
            a = parse_filter(p, a, false);
        else if (is_name(cur(p), "is"))
            a = parse_test(p, a);
        else if (cur(p)->type == T_LPAREN)
            a = parse_call(p, a);
        else
            break;
    }
    return a;
}

/* Left-associative levels: 0 is + -, 1 is ~, 2 is * / // %, 3 is **. */
static struct jnode *parse_math(struct jinja_parser *p, int level)
{
    if (level > 3)
        return parse_unary(p, true);
    int line = cur(p)->line;
    struct jnode *a = parse_math(p, level + 1);
    if (level == 1) {
        if (cur(p)->type != T_TILDE)
            return a;
        struct node_vec v = {0};
        vec_add(p, &v, a);
        while (skip(p, T_TILDE))
            vec_add(p, &v, parse_math(p, 2));
        return vec_node(p, N_CONCAT, line, &v);
    }
    for (;;) {
        int op;
        switch (cur(p)->type) {
        case T_ADD:
            op = level == 0 ? OP_ADD : -1;
            break;
        case T_SUB:
            op = level == 0 ? OP_SUB : -1;
            break;
        case T_MUL:
            op = level == 2 ? OP_MUL : -1;
            break;
        case T_DIV:
            op = level == 2 ? OP_DIV : -1;
            break;
        case T_FLOORDIV:
            op = level == 2 ? OP_FLOORDIV : -1;
            break;
        case T_MOD:
            op = level == 2 ? OP_MOD : -1;
            break;
        case T_POW:
            op = level == 3 ? OP_POW : -1;
            break;
        default:
            op = -1;
        }
        if (op < 0)
            return a;
        line = next(p)->line;
        a = node_over(p, N_BIN, line, a, parse_math(p, level + 1));
        a->op = (uint8_t)op;
    }
}

static struct jnode *parse_compare(struct jinja_parser *p)
{
    int line = cur(p)->line;
    struct jnode *a = parse_math(p, 0);
    struct node_vec v = {0};
    for (;;) {
        int op;
        struct jtoken *t = cur(p);
        switch (t->type) {
        case T_EQ:
            op = OP_EQ;
            break;
        case T_NE:
            op = OP_NE;
            break;
        case T_LT:
            op = OP_LT;
            break;
        case T_LE:
            op = OP_LE;
            break;
        case T_GT:
            op = OP_GT;
            break;
        case T_GE:
            op = OP_GE;
            break;
        default:
            op = is_name(t, "in")                            ? OP_IN
                 : is_name(t, "not") && is_name(&t[1], "in") ? OP_NOTIN
                                                             : -1;
        }
        if (op < 0)
            break;
        next(p);
        if (op == OP_NOTIN)
            next(p);
        struct jnode *o = node_over(p, N_OPERAND, t->line, parse_math(p, 0), NULL);
        o->op = (uint8_t)op;
        vec_add(p, &v, o);
    }
    if (!v.n)
        return a;
    struct jnode *n = vec_node(p, N_COMPARE, line, &v);
    n->a = a;
    if (a->height >= n->height)
        n->height = (uint16_t)(a->height + 1);
    return n;
}

static struct jnode *parse_not(struct jinja_parser *p)
{
    if (!is_name(cur(p), "not"))
        return parse_compare(p);
    enter(p);
    int line = next(p)->line;
    struct jnode *n = node_over(p, N_NOT, line, parse_not(p), NULL);
    p->depth--;
    return n;
}

static struct jnode *parse_and(struct jinja_parser *p)
{
    struct jnode *a = parse_not(p);
    while (is_name(cur(p), "and")) {
        int line = next(p)->line;
        a = node_over(p, N_AND, line, a, parse_not(p));
    }
    return a;
}

static struct jnode *parse_or(struct jinja_parser *p)
{
    struct jnode *a = parse_and(p);
    while (is_name(cur(p), "or")) {
        int line = next(p)->line;
        a = node_over(p, N_OR, line, a, parse_and(p));
    }
    return a;
}

static struct jnode *parse_expr(struct jinja_parser *p)
{
    enter(p);
    struct jnode *a = parse_or(p);
    while (is_name(cur(p), "if")) {
        int line = next(p)->line;
        struct jnode *test = parse_or(p), *other = NULL;
        if (skip_name(p, "else"))
            other = parse_expr(p);
        struct jnode *n = node_over(p, N_COND, line, test, a);
        n->c = other;
        if (other && other->height >= n->height)
            n->height = (uint16_t)(other->height + 1);
        a = n;
    }
    p->depth--;
    return a;
}

/* ------------------------------------------------------------------ statements */

static void check_target(struct jinja_parser *p, struct jnode *n)
{
    if (n->kind == N_TUPLE) {
        for (int k = 0; k < n->n; k++)
            check_target(p, n->list[k]);
    } else if (n->kind != N_NAME && n->kind != N_NSREF) {
        p->st->line = n->line;
        jinja_fail(p->st, "can't assign to %s",
                   n->kind == N_CONST ? "a constant" : "an expression");
    }
}

static struct jnode *parse_target(struct jinja_parser *p, int how, const char *end)
{
    struct jnode *n = parse_tuple(p, TUP_SIMPLE | how, end);
    check_target(p, n);
    return n;
}

/* Parses statements up to one of the names in `ends`, without consuming it. */
static struct jnode *parse_until(struct jinja_parser *p, const struct jtoken *tag,
                                 const char *const *ends)
{
    const char *open = p->open_tag;
    int len = p->open_len, line = p->open_line;
    skip(p, T_COLON);
    expect(p, T_BLOCK_END);
    p->open_tag = tag->val.u.s;
    p->open_len = tag->val.len > 40 ? 40 : (int)tag->val.len;
    p->open_line = tag->line;
    struct jnode *body = parse_body(p, ends);
    p->open_tag = open;
    p->open_len = len;
    p->open_line = line;
    return body;
}

static struct jnode *parse_until_end(struct jinja_parser *p, const struct jtoken *tag,
                                     const char *end)
{
    struct jnode *body = parse_until(p, tag, (const char *const[]){end, NULL});
    next(p);
    return body;
}

static struct jnode *parse_if(struct jinja_parser *p, struct jtoken *tag)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct jnode *first = NULL, **link = &first;
    for (;;) {
        struct jnode *n = *link = node_new(p, N_IF, cur(p)->line);
        n->a = parse_tuple(p, 0, NULL);
        n->b = parse_until(p, tag, ends);
        struct jtoken *t = next(p);
        link = &n->c;
        if (is_name(t, "elif"))
            continue;
        if (is_name(t, "else"))
            n->c = parse_until_end(p, tag, "endif");
        return first;
    }
}

static struct jnode *parse_for(struct jinja_parser *p, struct jtoken *tag)
{
    struct jnode *n = node_new(p, N_FOR, tag->line);
    n->a = parse_target(p, 0, "in");
    expect_name(p, "in");
    n->b = parse_tuple(p, 0, "recursive");
    if (skip_name(p, "if"))
        n->c = parse_expr(p);
    n->flag = skip_name(p, "recursive");
    p->loops++;
    n->body = parse_until(p, tag, (const char *const[]){"endfor", "else", NULL});
    p->loops--;
    if (is_name(next(p), "else"))
        n->orelse = parse_until_end(p, tag, "endfor");
    return n;
}

static struct jnode *parse_set(struct jinja_parser *p, struct jtoken *tag)
{
    struct jnode *n = node_new(p, N_SET, tag->line);
    n->a = parse_target(p, TUP_NS, NULL);
    if (skip(p, T_ASSIGN)) {
        n->b = parse_tuple(p, TUP_COND, NULL);
        return n;
    }
    n->kind = N_SETBLOCK;
    n->b = parse_filter(p, NULL, false);
    n->body = parse_until_end(p, tag, "endset");
    return n;
}

static void parse_signature(struct jinja_parser *p, struct jparams *ps)
{
    int cap = 0;
    bool defaults = false;
    expect(p, T_LPAREN);
    while (cur(p)->type != T_RPAREN) {
        if (ps->n)
            expect(p, T_COMMA);
        struct jtoken *t = expect(p, T_NAME);
        if (ps->n == cap) {
            cap = cap ? cap * 2 : 4;
            struct jparam *v = jalloc(p->st, (size_t)cap, sizeof(*v));
            if (ps->n)
                memcpy(v, ps->p, (size_t)ps->n * sizeof(*v));
            ps->p = v;
        }
        struct jparam *q = &ps->p[ps->n];
        *q = (struct jparam){t->val, jinja_symbol(p->st, t->val), NULL};
        for (int k = 0; k < ps->n; k++) {
            if (ps->p[k].sym == q->sym)
                jinja_fail(p->st, "duplicate argument '%.*s'", (int)t->val.len, t->val.u.s);
        }
        ps->explicit_caller |= jval_is(t->val, "caller");
        if (skip(p, T_ASSIGN)) {
            q->def = parse_expr(p);
            defaults = true;
        } else if (defaults) {
            jinja_fail(p->st, "non-default argument follows default argument");
        } else if (jval_is(t->val, "caller")) {
            jinja_fail(p->st, "the special \"caller\" argument must be omitted or be given a "
                              "default");
        }
        ps->n++;
    }
    expect(p, T_RPAREN);
}

static void parse_macro_body(struct jinja_parser *p, struct jtoken *tag, struct jnode *n,
                             const char *end)
{
    struct jparams *outer = p->macro;
    int loops = p->loops;
    p->macro = n->params;
    p->loops = 0;
    n->body = parse_until_end(p, tag, end);
    p->macro = outer;
    p->loops = loops;
    if (outer) { /* names used in an inner macro count for the outer one */
        outer->uses_caller |= n->params->uses_caller;
        outer->uses_varargs |= n->params->uses_varargs;
        outer->uses_kwargs |= n->params->uses_kwargs;
    }
}

static struct jnode *parse_macro(struct jinja_parser *p, struct jtoken *tag)
{
    struct jnode *n = node_new(p, N_MACRO, tag->line);
    n->val = expect(p, T_NAME)->val;
    n->sym = jinja_symbol(p->st, n->val);
    n->params = jalloc(p->st, 1, sizeof(*n->params));
    parse_signature(p, n->params);
    parse_macro_body(p, tag, n, "endmacro");
    return n;
}

static struct jnode *parse_call_block(struct jinja_parser *p, struct jtoken *tag)
{
    struct jnode *n = node_new(p, N_CALLBLOCK, tag->line);
    n->val = jval_cstr("caller");
    n->params = jalloc(p->st, 1, sizeof(*n->params));
    if (cur(p)->type == T_LPAREN)
        parse_signature(p, n->params);
    n->a = parse_expr(p);
    if (n->a->kind != N_CALL) {
        p->st->line = tag->line;
        jinja_fail(p->st, "expected call");
    }
    parse_macro_body(p, tag, n, "endcall");
    return n;
}

static struct jnode *parse_with(struct jinja_parser *p, struct jtoken *tag)
{
    struct node_vec v = {0};
    while (cur(p)->type != T_BLOCK_END) {
        if (v.n)
            expect(p, T_COMMA);
        vec_add(p, &v, parse_target(p, 0, NULL));
        expect(p, T_ASSIGN);
        vec_add(p, &v, parse_expr(p));
    }
    struct jnode *n = vec_node(p, N_WITH, tag->line, &v);
    n->body = parse_until_end(p, tag, "endwith");
    return n;
}

static struct jnode *parse_print(struct jinja_parser *p, struct jtoken *tag)
{
    struct node_vec v = {0};
    while (cur(p)->type != T_BLOCK_END) {
        if (v.n)
            expect(p, T_COMMA);
        struct jnode *n = node_new(p, N_PRINT, cur(p)->line);
        n->a = parse_expr(p);
        vec_add(p, &v, n);
    }
    return vec_node(p, N_BLOCK, tag->line, &v);
}

static struct jnode *parse_statement(struct jinja_parser *p)
{
    struct jtoken *tag = cur(p);
    if (tag->type == T_EOF)
        fail_at(p, tag);
    if (tag->type != T_NAME)
        jinja_fail(p->st, "tag name expected");
    next(p);
    struct jval name = tag->val;
    if (jval_is(name, "if"))
        return parse_if(p, tag);
    if (jval_is(name, "for"))
        return parse_for(p, tag);
    if (jval_is(name, "set"))
        return parse_set(p, tag);
    if (jval_is(name, "macro"))
        return parse_macro(p, tag);
    if (jval_is(name, "call"))
        return parse_call_block(p, tag);
    if (jval_is(name, "with"))
        return parse_with(p, tag);
    if (jval_is(name, "print"))
        return parse_print(p, tag);
    struct jnode *n = node_new(p, N_DO, tag->line);
    if (jval_is(name, "do")) {
        n->a = parse_tuple(p, TUP_COND, NULL);
    } else if (jval_is(name, "filter")) {
        n->kind = N_FILTERBLOCK;
        n->b = parse_filter(p, NULL, true);
        n->body = parse_until_end(p, tag, "endfilter");
    } else if (jval_is(name, "generation")) {
        int loops = p->loops;
        /* transformers runs the body as a function: it cannot break an outer loop. */
        p->loops = 0;
        n->kind = N_SCOPE;
        n->body = parse_until_end(p, tag, "endgeneration");
        p->loops = loops;
    } else if (jval_is(name, "block")) {
        struct jval block = expect(p, T_NAME)->val;
        int loops = p->loops;
        p->loops = 0;
        n->kind = N_SCOPE;
        while (is_name(cur(p), "scoped") || is_name(cur(p), "required"))
            next(p);
        n->body = parse_until_end(p, tag, "endblock");
        if (cur(p)->type == T_NAME && jval_eq(p->st, cur(p)->val, block))
            next(p);
        p->loops = loops;
    } else if (jval_is(name, "break") || jval_is(name, "continue")) {
        if (!p->loops)
            jinja_fail(p->st, "'%.*s' outside of a loop", (int)name.len, name.u.s);
        n->kind = jval_is(name, "break") ? N_BREAK : N_CONTINUE;
    } else if (jval_is(name, "include") || jval_is(name, "import") || jval_is(name, "from") ||
               jval_is(name, "extends") || jval_is(name, "autoescape")) {
        jinja_fail(p->st, "'%.*s' is not available in chat templates", (int)name.len, name.u.s);
    } else if (p->open_tag) {
        jinja_fail(p->st, "unknown tag '%.*s' (inside '%.*s' of line %d)",
                   name.len > 60 ? 60 : (int)name.len, name.u.s, p->open_len, p->open_tag,
                   p->open_line);
    } else {
        jinja_fail(p->st, "unknown tag '%.*s'", name.len > 60 ? 60 : (int)name.len, name.u.s);
    }
    return n;
}

static struct jnode *parse_body(struct jinja_parser *p, const char *const *ends)
{
    struct node_vec v = {0};
    int line = cur(p)->line;
    enter(p);
    for (;;) {
        struct jtoken *t = cur(p);
        struct jnode *n;
        if (t->type == T_EOF) {
            if (ends)
                fail_at(p, t);
            break;
        }
        next(p);
        if (t->type == T_DATA) {
            n = node_new(p, N_DATA, t->line);
            n->val = t->val;
        } else if (t->type == T_VAR_BEGIN) {
            n = node_new(p, N_PRINT, t->line);
            n->a = parse_tuple(p, TUP_COND, NULL);
            expect(p, T_VAR_END);
        } else { /* the only other token here is T_BLOCK_BEGIN */
            for (const char *const *e = ends; e && *e; e++) {
                if (is_name(cur(p), *e))
                    goto done;
            }
            n = parse_statement(p);
            expect(p, T_BLOCK_END);
        }
        vec_add(p, &v, n);
    }
done:
    p->depth--;
    return vec_node(p, N_BLOCK, line, &v);
}

void jinja_parse(struct jstate *st, struct jtoken *tokens, int n)
{
    struct jinja_parser p = {.st = st, .tok = tokens, .n = n};
    struct jinja *t = st->building;
    t->sym_loop = jinja_symbol(st, jval_cstr("loop"));
    t->sym_caller = jinja_symbol(st, jval_cstr("caller"));
    t->sym_varargs = jinja_symbol(st, jval_cstr("varargs"));
    t->sym_kwargs = jinja_symbol(st, jval_cstr("kwargs"));
    t->root = parse_body(&p, NULL);
}
