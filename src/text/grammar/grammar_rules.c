/*
 * Rules of a context-free grammar, as trees, become a grammar.
 *
 * Every part without recursion is regular and becomes one terminal, however many rules it uses. The
 * rest becomes graphs of terminals and calls. If the regular parts are too large for automata, every
 * rule becomes a graph, and only terms and their repeats are terminals.
 *
 * Knows no syntax: grammar_gbnf.c and grammar_lark.c make the trees.
 */
#include "text/grammar/grammar_rules.h"

#include "base/mem.h"

#include <string.h>

enum {
    RULES_MAX = 20000,
    TREES_MAX = 400000,
    STATES_MAX = 100000,
    LINKS_MAX = 400000,
    COPIES_MAX = 10000,
    TERMS_MAX = 4096,
};

struct rule_link {
    uint8_t kind; /* 0 terminal, 1 call, 2 empty */
    uint32_t target, to, next;
};

uint32_t rules_fail(struct rules *p, const char *what)
{
    if (!p->err->msg[0] && p->line)
        error_set(p->err, "grammar, line %u: %s", p->line, what);
    else if (!p->err->msg[0])
        error_set(p->err, "grammar: %s", what);
    return 0;
}

uint32_t rules_tree(struct rules *p, enum rule_tree_kind kind, uint32_t value)
{
    if (p->n_trees >= TREES_MAX)
        return rules_fail(p, "over 400000 parts");
    if (p->n_trees == p->cap_trees) {
        p->cap_trees = p->cap_trees ? 2 * p->cap_trees : 256;
        p->trees = mem_realloc(p->trees, p->cap_trees, sizeof *p->trees);
    }
    p->trees[p->n_trees] = (struct rule_tree){.kind = kind, .value = value};
    return p->n_trees++;
}

bool rules_append(struct rules *p, uint32_t parent, uint32_t *last, uint32_t child)
{
    if (!child)
        return false;
    if (*last)
        p->trees[*last].next = child;
    else
        p->trees[parent].first = child;
    *last = child;
    return true;
}

uint32_t rules_repeat(struct rules *p, uint32_t tree, uint32_t lo, uint32_t hi)
{
    uint32_t t = tree ? rules_tree(p, RULE_REP, 0) : 0;
    if (t) {
        p->trees[t].first = tree;
        p->trees[t].lo = lo;
        p->trees[t].hi = hi;
    }
    return t;
}

static uint32_t name_slot(const struct rules *p, const char *name, size_t len)
{
    uint32_t h = 0x811c9dc5u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)name[i]) * 0x01000193u;
    for (h &= p->n_slots - 1; p->slots[h]; h = (h + 1) & (p->n_slots - 1)) {
        const struct rule *r = &p->rules[p->slots[h] - 1];
        if (r->len == len && !memcmp(r->name, name, len))
            break;
    }
    return h;
}

uint32_t rules_find(struct rules *p, const char *name, size_t len)
{
    if (p->n_rules >= RULES_MAX)
        return rules_fail(p, "over 20000 rules");
    if (2 * (p->n_rules + 1) > p->n_slots) {
        p->n_slots = p->n_slots ? 2 * p->n_slots : 64;
        mem_free(p->slots);
        p->slots = mem_zalloc(p->n_slots, sizeof *p->slots);
        for (uint32_t i = 0; i < p->n_rules; i++)
            p->slots[name_slot(p, p->rules[i].name, p->rules[i].len)] = i + 1;
    }
    uint32_t h = name_slot(p, name, len);
    if (p->slots[h])
        return p->slots[h] - 1;
    if (p->n_rules == p->cap_rules) {
        p->cap_rules = p->cap_rules ? 2 * p->cap_rules : 64;
        p->rules = mem_realloc(p->rules, p->cap_rules, sizeof *p->rules);
    }
    p->rules[p->n_rules] = (struct rule){.name = name, .len = (uint32_t)len, .line = p->line};
    p->slots[h] = ++p->n_rules;
    return p->n_rules - 1;
}

/* Whether every rule is defined. */
static bool rules_check(struct rules *p)
{
    for (uint32_t i = 0; i < p->n_rules; i++) {
        const struct rule *r = &p->rules[i];
        if (r->tree)
            continue;
        int len = (int)(r->len < 100 ? r->len : 100);
        return i == p->root ? error_set(p->err, "grammar: there is no rule \"%.*s\"", len, r->name)
                            : error_set(p->err, "grammar, line %u: there is no rule \"%.*s\"",
                                        r->line, len, r->name);
    }
    return true;
}

/* ---- which rules are regular ---- */

static bool rule_visit(struct rules *p, uint32_t r);

/* Visits the rules that a tree calls. True if one of them is recursive. */
static bool tree_visit(struct rules *p, uint32_t t, uint32_t from)
{
    bool recursive = false;
    if (++p->depth > 5000) {
        rules_fail(p, "rules nested over 5000 deep");
        return false;
    }
    if (p->trees[t].kind == RULE_CALL) {
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
static bool rule_visit(struct rules *p, uint32_t r)
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
static uint32_t tree_term(struct rules *p, uint32_t t)
{
    struct rule_tree x = p->trees[t];
    if (re_pool_error(p->pool))
        return RE_NONE;
    if (x.kind == RULE_TERM)
        return x.value;
    if (x.kind == RULE_REP)
        return re_rep(p->pool, tree_term(p, x.first), x.lo, x.hi);
    if (x.kind == RULE_CALL) {
        struct rule *r = &p->rules[x.value];
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
    if (x.kind == RULE_ALT)
        out = re_or_n(p->pool, v, n);
    else
        while (n--)
            out = re_cat(p->pool, v[n], out);
    mem_free(v);
    return out;
}

/* ---- graphs ---- */

static uint32_t head_new(struct rules *p)
{
    if (p->n_heads >= STATES_MAX) {
        rules_fail(p, "over 100000 states; repeats of recursive rules are copied");
        return 0;
    }
    if (p->n_heads == p->cap_heads) {
        p->cap_heads = p->cap_heads ? 2 * p->cap_heads : 256;
        p->heads = mem_realloc(p->heads, p->cap_heads, sizeof *p->heads);
    }
    p->heads[p->n_heads] = 0;
    return p->n_heads++;
}

static void link_add(struct rules *p, uint32_t from, int kind, uint32_t target, uint32_t to)
{
    if (p->n_links >= LINKS_MAX) {
        rules_fail(p, "over 400000 links");
        return;
    }
    if (p->n_links + 1 >= p->cap_links) {
        p->cap_links = p->cap_links ? 2 * p->cap_links : 256;
        p->links = mem_realloc(p->links, p->cap_links, sizeof *p->links);
    }
    p->links[++p->n_links] = (struct rule_link){(uint8_t)kind, target, to, p->heads[from]};
    p->heads[from] = p->n_links;
}

/* Adds a regular part as a terminal from state `from` to `to`. */
static void link_term(struct rules *p, uint32_t term, uint32_t from, uint32_t to)
{
    term = re_and(p->pool, term, p->without);
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
        rules_fail(p, "over 4096 distinct terminals in recursive rules");
        return;
    }
    struct dfa *d = dfa_new(p->pool, &term, 1, p->err->msg[0] ? NULL : p->err);
    if (!d)
        return;
    uint32_t id = NO_LIMIT;
    if (d->moves[1])
        id = grammar_add_term(p->g, p->kind, d);
    else
        dfa_free(d);
    if (id != NO_LIMIT) /* a grammar's author sees characters, not escapes */
        p->g->terms[id].plain = true;
    if (p->n_made == p->cap_made) {
        p->cap_made = p->cap_made ? 2 * p->cap_made : 64;
        p->made = mem_realloc(p->made, p->cap_made, sizeof *p->made);
    }
    p->made[p->n_made].term = term;
    p->made[p->n_made++].id = id;
    if (id != NO_LIMIT)
        link_add(p, from, 0, id, to);
}

static void tree_graph(struct rules *p, uint32_t t, uint32_t from, uint32_t to);

static void rep_graph(struct rules *p, const struct rule_tree *x, uint32_t from, uint32_t to)
{
    uint32_t copies = x->hi == RE_INF ? x->lo : x->hi;
    if (copies > COPIES_MAX) {
        rules_fail(p, "a recursive rule repeated over 10000 times");
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

static void tree_graph(struct rules *p, uint32_t t, uint32_t from, uint32_t to)
{
    struct rule_tree x = p->trees[t];
    if (p->err->msg[0])
        return;
    if (!x.recursive) {
        link_term(p, tree_term(p, t), from, to);
        return;
    }
    if (x.kind == RULE_CALL) {
        link_add(p, from, 1, p->rules[x.value].node, to);
    } else if (x.kind == RULE_REP) {
        rep_graph(p, &x, from, to);
    } else if (x.kind == RULE_ALT) {
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
static bool rule_finish(struct rules *p, uint32_t node, uint32_t start, uint32_t end)
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
                const struct rule_link *k = &p->links[l];
                if (k->kind < 2) {
                    grammar_add_edge(g, k->kind == 1, k->target, base + k->to);
                } else if (seen[k->to] != st + 1) {
                    seen[k->to] = st + 1;
                    stack[top++] = k->to;
                }
            }
            if (++steps > 4 * LINKS_MAX || g->n_edges > LINKS_MAX) {
                rules_fail(p, "over 400000 links");
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

static struct grammar *rules_build(struct rules *p, uint32_t root)
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
        p->g->work = re_pool_work(p->pool) + p->g->n_edges;
        if (!remove_dead(p->g))
            error_set(p->err, "grammar: no text matches it (infinite recursion)");
    }
    if (!p->err->msg[0])
        return p->g;
    grammar_free(p->g);
    return NULL;
}

static void rules_clear(struct rules *p)
{
    re_pool_free(p->pool);
    mem_free(p->trees);
    mem_free(p->rules);
    mem_free(p->slots);
    mem_free(p->stack);
    mem_free(p->links);
    mem_free(p->heads);
    mem_free(p->made);
}

struct grammar *rules_compile(rules_parser *parse, const char *text, size_t len,
                              enum term_kind kind, const char *const *tags, struct error *err)
{
    struct grammar *g = NULL;
    struct error local = {0};
    for (int split = 0; split < 2 && !g; split++) {
        struct rules p = {
            .line = 1, .kind = kind, .split = split, .without = RE_ALL, .err = &local};
        local.msg[0] = 0;
        p.pool = re_pool_new();
        for (size_t i = 0; tags && tags[i]; i++)
            p.without = re_and(p.pool, p.without, re_not_containing(p.pool, tags[i]));
        rules_tree(&p, RULE_TERM, RE_NONE); /* index 0 means none */
        bool parsed = parse(&p, text, len);
        p.line = 0;
        if (parsed && !local.msg[0] && rules_check(&p))
            g = rules_build(&p, p.root);
        bool limit = re_pool_error(p.pool) != NULL;
        rules_clear(&p);
        if (!limit)
            break;
    }
    if (!g)
        error_set(err, "%s", local.msg);
    return g;
}
