/*
 * GBNF (llama.cpp's grammar syntax) and lists of choices.
 *
 * Rules are parsed into trees. Every part without recursion is regular and becomes one terminal,
 * however many rules it uses. The rest becomes graphs of terminals and calls. If the regular parts
 * are too large for automata, every rule becomes a graph, and only characters, literals and their
 * repeats are terminals.
 *
 * An extension of llama.cpp's syntax: "|" may begin a line. Token names in angle brackets are
 * rejected.
 */
#include "text/grammar/grammar_int.h"
#include "text/grammar/schema_json.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

enum {
    RULES_MAX = 20000,
    TREES_MAX = 400000,
    STATES_MAX = 100000,
    LINKS_MAX = 400000,
    DEPTH_MAX = 200,
    COPIES_MAX = 10000,
    TERMS_MAX = 4096,
};

enum gbnf_tree_kind { G_TERM, G_RULE, G_CAT, G_ALT, G_REP };

struct gbnf_tree {
    enum gbnf_tree_kind kind;
    uint32_t value; /* G_TERM: term; G_RULE: rule */
    uint32_t lo, hi;
    uint32_t first, next; /* children, linked; 0 = none */
    bool recursive;       /* contains a non-regular rule */
};

struct gbnf_rule {
    const char *name;
    uint32_t len, line;
    uint32_t tree;       /* 0: not defined */
    uint32_t term;       /* term of a regular rule */
    uint8_t state;       /* 0 not visited, 1 in progress, 2 regular, 3 recursive */
    uint32_t low, order; /* Tarjan's low link and visit order */
    uint32_t node;
};

struct gbnf_link {
    uint8_t kind; /* 0 terminal, 1 call, 2 empty */
    uint32_t target, to, next;
};

struct gbnf {
    const char *s, *at, *end;
    uint32_t line;
    int depth;
    struct re_pool *pool;
    struct gbnf_tree *trees;
    uint32_t n_trees, cap_trees;
    struct gbnf_rule *rules;
    uint32_t n_rules, cap_rules;
    uint32_t *stack, n_stack, clock; /* Tarjan's stack and counter */
    bool split;                      /* every rule becomes a graph */
    struct gbnf_link *links;
    uint32_t n_links, cap_links;
    uint32_t *heads, n_heads, cap_heads; /* states under construction: their first link */
    struct grammar *g;
    struct {
        uint32_t term, id;
    } * made;
    uint32_t n_made, cap_made;
    struct error *err;
};

static uint32_t gbnf_fail(struct gbnf *p, const char *what)
{
    if (!p->err->msg[0])
        error_set(p->err, "grammar, line %u: %s", p->line, what);
    return 0;
}

static uint32_t tree_new(struct gbnf *p, enum gbnf_tree_kind kind, uint32_t value)
{
    if (p->n_trees >= TREES_MAX)
        return gbnf_fail(p, "over 400000 parts");
    if (p->n_trees == p->cap_trees) {
        p->cap_trees = p->cap_trees ? 2 * p->cap_trees : 256;
        p->trees = mem_realloc(p->trees, p->cap_trees, sizeof *p->trees);
    }
    p->trees[p->n_trees] = (struct gbnf_tree){.kind = kind, .value = value};
    return p->n_trees++;
}

/* ---- syntax ---- */

/* Skips white space and comments. Newlines are skipped only if `lines`, since they may end a
 * rule. */
static void skip_space(struct gbnf *p, bool lines)
{
    for (; p->at < p->end; p->at++) {
        if (*p->at == '#') {
            while (p->at + 1 < p->end && p->at[1] != '\n')
                p->at++;
        } else if (*p->at == '\n') {
            if (!lines)
                return;
            p->line++;
        } else if (*p->at != ' ' && *p->at != '\t' && *p->at != '\r') {
            return;
        }
    }
}

static bool name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_';
}

static bool name_parse(struct gbnf *p, const char **name, uint32_t *len)
{
    *name = p->at;
    while (p->at < p->end && name_char(*p->at))
        p->at++;
    *len = (uint32_t)(p->at - *name);
    return *len > 0;
}

static uint32_t rule_find(struct gbnf *p, const char *name, uint32_t len)
{
    for (uint32_t i = 0; i < p->n_rules; i++)
        if (p->rules[i].len == len && !memcmp(p->rules[i].name, name, len))
            return i;
    if (p->n_rules >= RULES_MAX) {
        gbnf_fail(p, "over 20000 rules");
        return 0;
    }
    if (p->n_rules == p->cap_rules) {
        p->cap_rules = p->cap_rules ? 2 * p->cap_rules : 64;
        p->rules = mem_realloc(p->rules, p->cap_rules, sizeof *p->rules);
    }
    p->rules[p->n_rules] = (struct gbnf_rule){.name = name, .len = len, .line = p->line};
    return p->n_rules++;
}

/* Parses one character of a literal or class, resolving escapes. */
static bool char_parse(struct gbnf *p, uint32_t *cp)
{
    if (p->at >= p->end)
        return gbnf_fail(p, "unterminated literal or character class");
    if (*p->at != '\\') {
        int n = utf8_decode(p->at, (size_t)(p->end - p->at), cp);
        if (!n)
            return gbnf_fail(p, "invalid UTF-8");
        p->line += *cp == '\n';
        p->at += n;
        return true;
    }
    if (++p->at >= p->end)
        return gbnf_fail(p, "trailing backslash");
    char c = *p->at++;
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits) {
        *cp = 0;
        for (int i = 0; i < digits; i++) {
            char h = p->at < p->end ? *p->at : 0;
            int d = h >= '0' && h <= '9'                 ? h - '0'
                    : (h | 32) >= 'a' && (h | 32) <= 'f' ? (h | 32) - 'a' + 10
                                                         : -1;
            if (d < 0)
                return gbnf_fail(p, "missing hexadecimal digit");
            *cp = *cp << 4 | (uint32_t)d;
            p->at++;
        }
        if (*cp > CP_MAX || (*cp >= 0xd800 && *cp < 0xe000))
            return gbnf_fail(p, "not a Unicode character");
        return true;
    }
    static const char from[] = "nrt\"\\[]-/'^", to[] = "\n\r\t\"\\[]-/'^";
    const char *hit = c ? strchr(from, c) : NULL;
    if (!hit)
        return gbnf_fail(p, "unknown escape");
    *cp = (uint32_t)to[hit - from];
    return true;
}

static uint32_t class_parse(struct gbnf *p)
{
    struct re_range *r = NULL;
    size_t n = 0, cap = 0;
    bool negated = p->at < p->end && *p->at == '^', ok = true;
    p->at += negated;
    while (ok && p->at < p->end && *p->at != ']') {
        uint32_t lo, hi;
        ok = char_parse(p, &lo);
        hi = lo;
        if (ok && p->end - p->at >= 2 && p->at[0] == '-' && p->at[1] != ']') {
            p->at++;
            ok = char_parse(p, &hi);
        }
        if (n == cap) {
            cap = cap ? 2 * cap : 16;
            r = mem_realloc(r, cap, sizeof *r);
        }
        r[n++] = (struct re_range){lo, hi};
    }
    if (ok && (p->at >= p->end || *p->at++ != ']'))
        ok = gbnf_fail(p, "[ without ]");
    uint32_t t = ok ? tree_new(p, G_TERM, re_set(p->pool, r, n, negated)) : 0;
    mem_free(r);
    return t;
}

static uint32_t alt_parse(struct gbnf *p, bool nested);

static uint32_t atom_parse(struct gbnf *p)
{
    char c = *p->at;
    if (c == '"') {
        struct buf text = {0};
        p->at++;
        bool ok = true;
        while (ok && p->at < p->end && *p->at != '"') {
            uint32_t cp = 0;
            char out[4];
            ok = char_parse(p, &cp);
            if (ok)
                buf_add(&text, out, (size_t)utf8_encode(cp, out));
        }
        if (ok && (p->at >= p->end || *p->at++ != '"'))
            ok = gbnf_fail(p, "unterminated literal");
        uint32_t t =
            ok ? tree_new(p, G_TERM, re_literal(p->pool, text.p ? text.p : "", text.len)) : 0;
        buf_clear(&text);
        return t;
    }
    if (c == '[') {
        p->at++;
        return class_parse(p);
    }
    if (c == '.') {
        p->at++;
        return tree_new(p, G_TERM, RE_ANY);
    }
    if (c == '(') {
        p->at++;
        if (++p->depth > DEPTH_MAX)
            return gbnf_fail(p, "nested over 200 deep");
        skip_space(p, true);
        uint32_t t = alt_parse(p, true);
        p->depth--;
        if (t && (p->at >= p->end || *p->at++ != ')'))
            return gbnf_fail(p, "( without )");
        return t;
    }
    const char *name;
    uint32_t len;
    if (!name_parse(p, &name, &len))
        return gbnf_fail(p, c == '<' || c == '!' ? "tokens by name are not supported"
                                                 : "unexpected character in a rule");
    return tree_new(p, G_RULE, rule_find(p, name, len));
}

static bool count_parse(struct gbnf *p, uint32_t *n)
{
    const char *from = p->at;
    uint64_t v = 0;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9' && v < 100000000)
        v = v * 10 + (uint64_t)(*p->at++ - '0');
    *n = (uint32_t)v;
    return p->at > from;
}

/* Parses *, +, ?, {m}, {m,}, {,n}, {m,n} after an atom, repeatedly. */
static uint32_t repeat_parse(struct gbnf *p, uint32_t atom)
{
    while (atom && p->at < p->end && strchr("*+?{", *p->at)) {
        char c = *p->at++;
        uint32_t lo = c == '+', hi = c == '?' ? 1 : RE_INF;
        if (c == '{') {
            skip_space(p, false);
            bool some = count_parse(p, &lo);
            skip_space(p, false);
            hi = lo;
            if (p->at < p->end && *p->at == ',') {
                p->at++;
                skip_space(p, false);
                bool upper = count_parse(p, &hi);
                if (!upper)
                    hi = RE_INF;
                some |= upper;
                skip_space(p, false);
            }
            if (!some || p->at >= p->end || *p->at++ != '}')
                return gbnf_fail(p, "invalid repeat count");
            if (hi < lo)
                return gbnf_fail(p, "repeat count with minimum above maximum");
        }
        uint32_t t = tree_new(p, G_REP, 0);
        if (!t)
            return 0;
        p->trees[t].first = atom;
        p->trees[t].lo = lo;
        p->trees[t].hi = hi;
        atom = t;
    }
    return atom;
}

/* Whether a new rule begins here. */
static bool at_rule(struct gbnf *p)
{
    struct gbnf copy = *p;
    const char *name;
    uint32_t len;
    if (!name_parse(&copy, &name, &len))
        return false;
    skip_space(&copy, false);
    return copy.end - copy.at >= 3 && !memcmp(copy.at, "::=", 3);
}

static uint32_t alt_parse(struct gbnf *p, bool nested)
{
    uint32_t alt = tree_new(p, G_ALT, 0), last_branch = 0;
    if (!alt)
        return 0;
    for (;;) {
        uint32_t cat = tree_new(p, G_CAT, 0), last = 0;
        if (!cat)
            return 0;
        skip_space(p, nested);
        while (p->at < p->end && *p->at != '|' && *p->at != ')' && *p->at != '\n') {
            if (!nested && !last && at_rule(p)) /* an empty rule before the next one */
                break;
            uint32_t atom = repeat_parse(p, atom_parse(p));
            if (!atom)
                return 0;
            if (last)
                p->trees[last].next = atom;
            else
                p->trees[cat].first = atom;
            last = atom;
            skip_space(p, nested);
        }
        if (last_branch)
            p->trees[last_branch].next = cat;
        else
            p->trees[alt].first = cat;
        last_branch = cat;
        if (!nested && p->at < p->end && *p->at == '\n') { /* does the next line start with "|"? */
            struct gbnf copy = *p;
            skip_space(&copy, true);
            if (copy.at < copy.end && *copy.at == '|') {
                p->at = copy.at;
                p->line = copy.line;
            }
        }
        if (p->at >= p->end || *p->at != '|')
            return alt;
        p->at++;
        skip_space(p, true);
    }
}

static bool rules_parse(struct gbnf *p)
{
    skip_space(p, true);
    while (p->at < p->end) {
        const char *name;
        uint32_t len, line = p->line;
        if (!name_parse(p, &name, &len))
            return gbnf_fail(p, "missing rule name");
        skip_space(p, false);
        if (p->end - p->at < 3 || memcmp(p->at, "::=", 3))
            return gbnf_fail(p, "missing \"::=\"");
        p->at += 3;
        skip_space(p, true);
        uint32_t r = rule_find(p, name, len);
        uint32_t t = p->err->msg[0] ? 0 : alt_parse(p, false);
        if (!t)
            return false;
        if (p->rules[r].tree)
            return gbnf_fail(p, "duplicate rule");
        p->rules[r].tree = t;
        p->rules[r].line = line;
        skip_space(p, false);
        if (p->at < p->end && *p->at != '\n')
            return gbnf_fail(p, "unexpected text after a rule");
        skip_space(p, true);
    }
    for (uint32_t i = 0; i < p->n_rules; i++)
        if (!p->rules[i].tree)
            return error_set(p->err, "grammar, line %u: there is no rule \"%.*s\"",
                             p->rules[i].line, (int)(p->rules[i].len < 100 ? p->rules[i].len : 100),
                             p->rules[i].name);
    return true;
}

/* ---- which rules are regular ---- */

static bool rule_visit(struct gbnf *p, uint32_t r);

/* Visits the rules that a tree calls. True if one of them is recursive. */
static bool tree_visit(struct gbnf *p, uint32_t t, uint32_t from)
{
    bool recursive = false;
    if (++p->depth > 5000) {
        gbnf_fail(p, "rules nested over 5000 deep");
        return false;
    }
    if (p->trees[t].kind == G_RULE) {
        uint32_t r = p->trees[t].value;
        if (!p->rules[r].state)
            rule_visit(p, r);
        if (p->rules[r].state == 1) { /* on the stack: a cycle */
            if (p->rules[r].low < p->rules[from].low)
                p->rules[from].low = p->rules[r].low;
            recursive = true;
        } else {
            recursive = p->rules[r].state == 3 || p->split;
        }
    }
    for (uint32_t c = p->trees[t].first; c && !p->err->msg[0]; c = p->trees[c].next)
        recursive |= tree_visit(p, c, from);
    p->trees[t].recursive = recursive;
    p->depth--;
    return recursive;
}

/* Tarjan's algorithm: rules on a cycle, and all rules that call them, are recursive. */
static bool rule_visit(struct gbnf *p, uint32_t r)
{
    uint32_t bottom = p->n_stack;
    CHECK(p->rules, "no rules");
    p->rules[r].state = 1;
    p->rules[r].low = p->rules[r].order = p->clock++;
    p->stack[p->n_stack++] = r;
    bool recursive = tree_visit(p, p->rules[r].tree, r);
    if (p->rules[r].low != p->rules[r].order)
        return true; /* part of a cycle that started earlier */
    while (p->n_stack > bottom)
        p->rules[p->stack[--p->n_stack]].state = recursive ? 3 : 2;
    return recursive;
}

/* Returns the term of a regular tree. */
static uint32_t tree_term(struct gbnf *p, uint32_t t)
{
    struct gbnf_tree x = p->trees[t];
    if (re_pool_error(p->pool))
        return RE_NONE;
    if (x.kind == G_TERM)
        return x.value;
    if (x.kind == G_REP)
        return re_rep(p->pool, tree_term(p, x.first), x.lo, x.hi);
    if (x.kind == G_RULE) {
        struct gbnf_rule *r = &p->rules[x.value];
        if (r->term == RE_INF) {
            uint32_t term = tree_term(p, r->tree);
            p->rules[x.value].term = term;
        }
        return p->rules[x.value].term;
    }
    uint32_t n = 0, k = 0;
    for (uint32_t c = x.first; c; c = p->trees[c].next)
        n++;
    uint32_t *v = mem_alloc((n + 1) * sizeof *v), out = RE_EPS;
    for (uint32_t c = x.first; c; c = p->trees[c].next)
        v[k++] = tree_term(p, c);
    if (x.kind == G_ALT)
        out = re_or_n(p->pool, v, n);
    else
        while (n--)
            out = re_cat(p->pool, v[n], out);
    mem_free(v);
    return out;
}

/* ---- graphs ---- */

static uint32_t head_new(struct gbnf *p)
{
    if (p->n_heads >= STATES_MAX) {
        gbnf_fail(p, "over 100000 states; repeats of recursive rules are copied");
        return 0;
    }
    if (p->n_heads == p->cap_heads) {
        p->cap_heads = p->cap_heads ? 2 * p->cap_heads : 256;
        p->heads = mem_realloc(p->heads, p->cap_heads, sizeof *p->heads);
    }
    p->heads[p->n_heads] = 0;
    return p->n_heads++;
}

static void link_add(struct gbnf *p, uint32_t from, int kind, uint32_t target, uint32_t to)
{
    if (p->n_links >= LINKS_MAX) {
        gbnf_fail(p, "over 400000 links");
        return;
    }
    if (p->n_links + 1 >= p->cap_links) {
        p->cap_links = p->cap_links ? 2 * p->cap_links : 256;
        p->links = mem_realloc(p->links, p->cap_links, sizeof *p->links);
    }
    p->links[++p->n_links] = (struct gbnf_link){(uint8_t)kind, target, to, p->heads[from]};
    p->heads[from] = p->n_links;
}

/* Adds a regular part as a terminal from state `from` to `to`. */
static void link_term(struct gbnf *p, uint32_t term, uint32_t from, uint32_t to)
{
    if (term == RE_NONE)
        return;
    if (re_nullable(p->pool, term))
        link_add(p, from, 2, 0, to);
    if (term == RE_EPS)
        return;
    for (uint32_t i = 0; i < p->n_made; i++)
        if (p->made[i].term == term) {
            if (p->made[i].id != NO_LIMIT)
                link_add(p, from, 0, p->made[i].id, to);
            return;
        }
    if (p->n_made >= TERMS_MAX) {
        gbnf_fail(p, "over 4096 distinct terminals in recursive rules");
        return;
    }
    struct dfa *d = dfa_new(p->pool, &term, 1, p->err->msg[0] ? NULL : p->err);
    if (!d)
        return;
    uint32_t id = NO_LIMIT;
    if (d->moves[1])
        id = grammar_add_term(p->g, TERM_RAW, d);
    else
        dfa_free(d);
    if (p->n_made == p->cap_made) {
        p->cap_made = p->cap_made ? 2 * p->cap_made : 64;
        p->made = mem_realloc(p->made, p->cap_made, sizeof *p->made);
    }
    p->made[p->n_made].term = term;
    p->made[p->n_made++].id = id;
    if (id != NO_LIMIT)
        link_add(p, from, 0, id, to);
}

static void tree_graph(struct gbnf *p, uint32_t t, uint32_t from, uint32_t to);

static void rep_graph(struct gbnf *p, const struct gbnf_tree *x, uint32_t from, uint32_t to)
{
    uint32_t copies = x->hi == RE_INF ? x->lo : x->hi;
    if (copies > COPIES_MAX) {
        gbnf_fail(p, "a recursive rule repeated over 10000 times");
        return;
    }
    for (uint32_t i = 0; i < copies && !p->err->msg[0]; i++) {
        uint32_t mid = head_new(p);
        if (i >= x->lo)
            link_add(p, from, 2, 0, to);
        tree_graph(p, x->first, from, mid);
        from = mid;
    }
    if (x->hi == RE_INF) { /* any number of further repeats: a loop at its own state */
        uint32_t loop = head_new(p);
        link_add(p, from, 2, 0, loop);
        tree_graph(p, x->first, loop, loop);
        from = loop;
    }
    link_add(p, from, 2, 0, to);
}

static void tree_graph(struct gbnf *p, uint32_t t, uint32_t from, uint32_t to)
{
    struct gbnf_tree x = p->trees[t];
    if (p->err->msg[0])
        return;
    if (!x.recursive) {
        link_term(p, tree_term(p, t), from, to);
        return;
    }
    if (x.kind == G_RULE) {
        link_add(p, from, 1, p->rules[x.value].node, to);
    } else if (x.kind == G_REP) {
        rep_graph(p, &x, from, to);
    } else if (x.kind == G_ALT) {
        for (uint32_t c = x.first; c; c = p->trees[c].next)
            tree_graph(p, c, from, to);
    } else {
        /* Adjacent regular parts become one terminal. */
        for (uint32_t c = x.first; c;) {
            uint32_t term = RE_EPS, stop = c, mid;
            while (stop && !p->trees[stop].recursive) {
                term = re_cat(p->pool, term, tree_term(p, stop));
                stop = p->trees[stop].next;
            }
            if (stop == c) {
                stop = p->trees[c].next;
                mid = stop ? head_new(p) : to;
                tree_graph(p, c, from, mid);
            } else {
                mid = stop ? head_new(p) : to;
                link_term(p, term, from, mid);
            }
            from = mid;
            c = stop;
        }
    }
}

/* Emits one rule's graph with empty links eliminated. */
static bool rule_finish(struct gbnf *p, uint32_t node, uint32_t start, uint32_t end)
{
    struct grammar *g = p->g;
    uint32_t base = g->n_states, n = p->n_heads;
    uint32_t *seen = mem_zalloc(n, sizeof *seen), *stack = mem_alloc(n * sizeof *stack);
    size_t steps = 0;
    for (uint32_t st = 0; st < n && !p->err->msg[0]; st++) {
        uint32_t top = 0;
        bool final = false;
        grammar_add_state(g, false);
        stack[top++] = st;
        seen[st] = st + 1;
        while (top) {
            uint32_t q = stack[--top];
            final |= q == end;
            for (uint32_t l = p->heads[q]; l; l = p->links[l].next, steps++) {
                const struct gbnf_link *k = &p->links[l];
                if (k->kind < 2) {
                    grammar_add_edge(g, k->kind == 1, k->target, base + k->to);
                } else if (seen[k->to] != st + 1) {
                    seen[k->to] = st + 1;
                    stack[top++] = k->to;
                }
            }
            if (++steps > 4 * LINKS_MAX || g->n_edges > LINKS_MAX) {
                gbnf_fail(p, "over 400000 links");
                break;
            }
        }
        g->state_final[g->n_states - 1] = final;
    }
    g->nodes[node].start = base + start;
    mem_free(seen);
    mem_free(stack);
    return !p->err->msg[0];
}

/* Removes states that never reach their rule's end. False if the root then matches nothing. */
static bool remove_dead(struct grammar *g)
{
    uint8_t *state_ok = mem_zalloc(g->n_states, 1);
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t st = g->n_states; st-- > 0;) {
            bool ok = g->state_final[st];
            for (uint32_t e = g->state_at[st]; e < g->state_at[st + 1] && !ok; e++) {
                const struct edge *x = &g->edges[e];
                ok = state_ok[x->to] && (!x->call || state_ok[g->nodes[x->target].start]);
            }
            if (ok && !state_ok[st])
                state_ok[st] = changed = true;
        }
    }
    uint32_t k = 0;
    for (uint32_t st = 0; st < g->n_states; st++) {
        uint32_t from = g->state_at[st], to = g->state_at[st + 1];
        g->state_at[st] = k;
        for (uint32_t e = from; e < to; e++)
            if (state_ok[g->edges[e].to] &&
                (!g->edges[e].call || state_ok[g->nodes[g->edges[e].target].start]))
                g->edges[k++] = g->edges[e];
    }
    g->state_at[g->n_states] = g->n_edges = k;
    bool ok = state_ok[g->nodes[0].start];
    mem_free(state_ok);
    return ok;
}

static struct grammar *rules_build(struct gbnf *p, uint32_t root)
{
    p->g = grammar_new();
    p->n_made = p->n_stack = p->clock = 0;
    p->stack = mem_realloc(p->stack, p->n_rules + 1, sizeof *p->stack);
    for (uint32_t i = 0; i < p->n_rules; i++) {
        p->rules[i].state = 0;
        p->rules[i].term = RE_INF;
    }
    p->depth = 0;
    rule_visit(p, root);
    grammar_add_node(p->g, NODE_GRAPH); /* the root */
    for (uint32_t i = 0; i < p->n_rules; i++)
        if (p->rules[i].state == 3 || p->split || i == root)
            p->rules[i].node = i == root ? 0 : grammar_add_node(p->g, NODE_GRAPH);
    for (uint32_t i = 0; i < p->n_rules && !p->err->msg[0]; i++) {
        if (!(p->rules[i].state == 3 || (p->split && p->rules[i].state) || i == root))
            continue;
        p->n_heads = p->n_links = 0;
        uint32_t start = head_new(p), end = head_new(p);
        tree_graph(p, p->rules[i].tree, start, end);
        if (!p->err->msg[0])
            rule_finish(p, p->rules[i].node, start, end);
    }
    if (!p->err->msg[0] && re_pool_error(p->pool))
        error_set(p->err, "grammar: %s", re_pool_error(p->pool));
    if (!p->err->msg[0]) {
        grammar_finish(p->g);
        if (!remove_dead(p->g))
            error_set(p->err, "grammar: no text matches it (infinite recursion)");
    }
    if (!p->err->msg[0])
        return p->g;
    grammar_free(p->g);
    return NULL;
}

static void gbnf_clear(struct gbnf *p)
{
    re_pool_free(p->pool);
    mem_free(p->trees);
    mem_free(p->rules);
    mem_free(p->stack);
    mem_free(p->links);
    mem_free(p->heads);
    mem_free(p->made);
}

struct grammar *gbnf_compile(const char *text, size_t len, struct error *err)
{
    struct grammar *g = NULL;
    struct error local = {0};
    for (int split = 0; split < 2 && !g; split++) {
        struct gbnf p = {.s = text, .at = text, .end = text + len, .line = 1, .err = &local};
        local.msg[0] = 0;
        p.pool = re_pool_new();
        p.split = split;
        tree_new(&p, G_TERM, RE_NONE); /* index 0 means none */
        bool parsed = rules_parse(&p);
        uint32_t root = parsed ? 0 : NO_LIMIT;
        while (parsed && root < p.n_rules &&
               (p.rules[root].len != 4 || memcmp(p.rules[root].name, "root", 4)))
            root++;
        if (parsed && root == p.n_rules)
            parsed = error_set(&local, "grammar: there is no rule \"root\"");
        if (parsed)
            g = rules_build(&p, root);
        bool limit = re_pool_error(p.pool) != NULL;
        gbnf_clear(&p);
        if (!limit)
            break;
    }
    if (!g)
        error_set(err, "%s", local.msg);
    return g;
}

struct grammar *choice_compile(const char *text, size_t len, struct error *err)
{
    struct jdoc *doc = jdoc_parse(text, len, err);
    if (!doc)
        return NULL;
    const struct jvalue *list = jdoc_root(doc);
    struct error local = {0};
    struct grammar *g = NULL;
    struct re_pool *pool = re_pool_new();
    uint32_t *v = mem_alloc((list->n + 1) * sizeof *v), n = 0;
    if (list->kind != J_ARRAY || !list->n)
        error_set(&local, "choices: not a list of strings");
    for (const struct jvalue *c = list->first; c && !local.msg[0]; c = c->next) {
        if (c->kind != J_STRING || !c->len)
            error_set(&local, "choices[%u]: not a string, or empty", c->index);
        v[n++] = re_literal(pool, c->text, c->len);
    }
    if (!local.msg[0]) {
        uint32_t term = re_or_n(pool, v, n);
        struct dfa *d = dfa_new(pool, &term, 1, &local);
        if (d) {
            g = grammar_new();
            uint32_t t = grammar_add_term(g, TERM_RAW, d), node = grammar_add_node(g, NODE_GRAPH);
            g->nodes[node].start = grammar_add_state(g, false);
            grammar_add_edge(g, false, t, 1);
            grammar_add_state(g, true);
            grammar_finish(g);
        }
    }
    if (!g)
        error_set(err, "%s", local.msg);
    mem_free(v);
    re_pool_free(pool);
    jdoc_free(doc);
    return g;
}
