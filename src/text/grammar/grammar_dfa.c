/*
 * Automata of terms: character classes of the terms, states by derivatives, live states, and the
 * length of tokens that cannot leave the live states. See grammar_re.h. Works on a pool; the
 * resulting `struct dfa` does not need the pool.
 */
#include "text/grammar/grammar_re_int.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { STATES_MAX = 40000, TABLE_MAX = 4 << 20, TERMS_MAX = 32 };

/* Definition of the token groups. */
bool dfa_group_has(int group, uint32_t c)
{
    bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z', digit = c >= '0' && c <= '9';
    switch (group) {
    case 0:
        return lower;
    case 1:
        return lower || upper;
    case 2:
        return lower || upper || digit || c == '_' || c == '-';
    case 3:
        return lower || c == ' ';
    case 4:
        return lower || upper || digit || c == ' ' || c == '_' || c == '-' || c == '.' || c == ',';
    case 5:
        return c >= ' ' && c < 0x7f && c != '"' && c != '\\';
    default: /* other scripts; ASCII punctuation is left out */
        return c >= 0x80 || lower || upper || digit || c == ' ';
    }
}

static bool set_has(const struct re_pool *p, uint32_t set, uint32_t cp)
{
    uint32_t lo = p->set_at[set], hi = p->set_at[set + 1];
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (cp > p->ranges[mid].hi)
            lo = mid + 1;
        else if (cp < p->ranges[mid].lo)
            hi = mid;
        else
            return true;
    }
    return false;
}

void re_classes_grow(const struct re_pool *p, struct re_classes *cl)
{
    cl->in = mem_realloc(cl->in, p->n_sets, 32);
    memset(cl->in + (size_t)cl->n_in * 32, 0, (size_t)(p->n_sets - cl->n_in) * 32);
    for (uint32_t s = cl->n_in; s < p->n_sets; s++)
        for (uint32_t c = 0; c < cl->n; c++)
            if (set_has(p, s, cl->sample[c]))
                cl->in[(size_t)s * 32 + c / 8] |= (uint8_t)(1u << c % 8);
    cl->n_in = p->n_sets;
}

/* Marks the sets used by the terms. Iterative, because terms can be long chains. */
static bool sets_used(struct re_pool *p, const uint32_t *terms, int n, uint8_t *used)
{
    uint8_t *seen = mem_zalloc(p->n_nodes, 1);
    uint32_t *stack = mem_alloc((size_t)(p->n_nodes + 1) * sizeof *stack);
    size_t top = 0;
    for (int i = 0; i < n; i++)
        if (!seen[terms[i]]) {
            seen[terms[i]] = 1;
            stack[top++] = terms[i];
        }
#define PUSH(x)                                                                                    \
    do {                                                                                           \
        uint32_t y_ = (x);                                                                         \
        if (!seen[y_]) {                                                                           \
            seen[y_] = 1;                                                                          \
            stack[top++] = y_;                                                                     \
        }                                                                                          \
    } while (0)
    size_t visited = 0;
    while (top) {
        const struct re_node *x = &p->nodes[stack[--top]];
        visited++;
        if (x->kind == RK_SET)
            used[x->a] = 1;
        if (x->kind == RK_AUTO)
            for (const char *c = "0123456789-."; *c; c++)
                used[p->nodes[p->ascii[(int)*c]].a] = 1;
        if (x->kind == RK_CAT || x->kind == RK_NOT || x->kind == RK_REP)
            PUSH(x->a);
        if (x->kind == RK_CAT)
            PUSH(x->b);
        if (x->kind == RK_OR || x->kind == RK_AND)
            for (uint32_t i = 0; i < x->b; i++)
                PUSH(p->list[x->a + i]);
    }
#undef PUSH
    mem_free(seen);
    mem_free(stack);
    return re_spend(p, visited / 8);
}

static int u32_cmp(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void classes_free(struct re_classes *cl)
{
    if (!cl)
        return;
    mem_free(cl->edge_lo);
    mem_free(cl->edge_class);
    mem_free(cl->in);
    mem_free(cl);
}

/* Splits code points into classes: two share a class if the same sets contain both. */
static bool classes_split(struct re_pool *p, struct re_classes *cl, const uint32_t *sets,
                          uint32_t n_sets)
{
    uint32_t *cls = mem_zalloc(cl->n_edges, sizeof *cls);
    uint32_t n = 1;
    bool ok = true;
    for (uint32_t s = 0; s < n_sets && ok; s++) {
        /* Splits every class into the part inside the set and the part outside. */
        uint32_t moved[256];
        bool out[256] = {false};
        memset(moved, 0, sizeof moved);
        const struct re_range *r = p->ranges + p->set_at[sets[s]];
        uint32_t n_r = p->set_at[sets[s] + 1] - p->set_at[sets[s]], k = 0;
        uint32_t before = n;
        for (uint32_t e = 0; e < cl->n_edges; e++) {
            while (k < n_r && r[k].hi < cl->edge_lo[e])
                k++;
            if (!(k < n_r && r[k].lo <= cl->edge_lo[e]))
                out[cls[e]] = true;
        }
        k = 0;
        for (uint32_t e = 0; e < cl->n_edges && ok; e++) {
            while (k < n_r && r[k].hi < cl->edge_lo[e])
                k++;
            uint32_t c = cls[e];
            if (!(k < n_r && r[k].lo <= cl->edge_lo[e]) || c >= before || !out[c])
                continue;
            if (!moved[c]) {
                if (n >= 255) {
                    ok = re_over_limit(
                        p, "a regular expression distinguishes over 255 character classes");
                    break;
                }
                moved[c] = n++;
            }
            cls[e] = moved[c];
        }
        ok = ok && re_spend(p, 1 + cl->n_edges / 16);
    }
    cl->n = n;
    cl->edge_class = mem_alloc(cl->n_edges);
    for (uint32_t e = cl->n_edges; e-- > 0;) {
        cl->edge_class[e] = (uint8_t)cls[e];
        cl->sample[cls[e]] = cl->edge_lo[e];
    }
    mem_free(cls);
    return ok;
}

static struct re_classes *classes_new(struct re_pool *p, const uint32_t *terms, int n)
{
    struct re_classes *cl = mem_zalloc(1, sizeof *cl);
    uint8_t *used = mem_zalloc(p->n_sets + 1, 1);
    bool ok = sets_used(p, terms, n, used);
    uint32_t *sets = mem_alloc((p->n_sets + 1) * sizeof *sets), n_sets = 0, n_edges = 3;
    for (uint32_t s = 0; s < p->n_sets; s++)
        if (used[s]) {
            sets[n_sets++] = s;
            n_edges += 2 * (p->set_at[s + 1] - p->set_at[s]);
        }
    cl->edge_lo = mem_alloc(n_edges * sizeof *cl->edge_lo);
    uint32_t k = 0;
    cl->edge_lo[k++] = 0;
    cl->edge_lo[k++] = 128;
    for (uint32_t i = 0; i < n_sets; i++)
        for (uint32_t j = p->set_at[sets[i]]; j < p->set_at[sets[i] + 1]; j++) {
            cl->edge_lo[k++] = p->ranges[j].lo;
            if (p->ranges[j].hi < CP_MAX)
                cl->edge_lo[k++] = p->ranges[j].hi + 1;
        }
    qsort(cl->edge_lo, k, sizeof *cl->edge_lo, u32_cmp);
    for (uint32_t i = 0; i < k; i++)
        if (!i || cl->edge_lo[i] != cl->edge_lo[cl->n_edges - 1])
            cl->edge_lo[cl->n_edges++] = cl->edge_lo[i];
    ok = ok && classes_split(p, cl, sets, n_sets);
    mem_free(used);
    mem_free(sets);
    if (ok) {
        re_classes_grow(p, cl);
        return cl;
    }
    classes_free(cl);
    return NULL;
}

/* A DFA under construction. Each state is a vector of n terms, looked up by hash. */
struct dfa_builder {
    struct re_pool *p;
    struct re_classes *cl;
    int n;
    uint32_t *vec; /* (n_states, n) */
    uint32_t *next, *label;
    uint32_t n_states, cap;
    uint32_t *slots, n_slots;
};

static uint32_t vec_hash(const uint32_t *v, int n)
{
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < n; i++)
        h = (h ^ v[i]) * 0xff51afd7ed558ccdu, h ^= h >> 29;
    return (uint32_t)(h ^ h >> 32);
}

static void builder_rehash(struct dfa_builder *m)
{
    m->n_slots = m->n_slots ? 4 * m->n_slots : 64;
    mem_free(m->slots);
    m->slots = mem_zalloc(m->n_slots, sizeof *m->slots);
    for (uint32_t s = 1; s < m->n_states; s++) {
        uint32_t h = vec_hash(m->vec + (size_t)s * (size_t)m->n, m->n) & (m->n_slots - 1);
        while (m->slots[h])
            h = (h + 1) & (m->n_slots - 1);
        m->slots[h] = s;
    }
}

/* Returns the state of this vector, creating it if new. 0 (dead) if every term is RE_NONE. */
static uint32_t builder_state(struct dfa_builder *m, const uint32_t *v)
{
    bool dead = true;
    for (int i = 0; i < m->n && dead; i++)
        dead = v[i] == RE_NONE;
    if (dead)
        return 0;
    if (2 * m->n_states >= m->n_slots)
        builder_rehash(m);
    uint32_t h = vec_hash(v, m->n) & (m->n_slots - 1);
    for (; m->slots[h]; h = (h + 1) & (m->n_slots - 1))
        if (!memcmp(m->vec + (size_t)m->slots[h] * (size_t)m->n, v, (size_t)m->n * sizeof *v))
            return m->slots[h];
    if (m->n_states >= STATES_MAX || (size_t)m->n_states * m->cl->n >= TABLE_MAX) {
        re_over_limit(m->p, "an automaton has over 40000 states");
        return 0;
    }
    if (m->n_states == m->cap) {
        m->cap *= 2;
        m->vec = mem_realloc(m->vec, (size_t)m->cap * (size_t)m->n, sizeof *m->vec);
        m->next = mem_realloc(m->next, (size_t)m->cap * m->cl->n, sizeof *m->next);
        m->label = mem_realloc(m->label, m->cap, sizeof *m->label);
    }
    uint32_t s = m->n_states++;
    memcpy(m->vec + (size_t)s * (size_t)m->n, v, (size_t)m->n * sizeof *v);
    m->label[s] = 0;
    for (int i = 0; i < m->n; i++)
        if (re_nullable(m->p, v[i]))
            m->label[s] |= 1u << i;
    m->slots[h] = s;
    return s;
}

/* Fills the transition table by derivatives, state by state. */
static bool builder_run(struct dfa_builder *m)
{
    uint32_t v[TERMS_MAX], w[TERMS_MAX];
    uint32_t n_cl = m->cl->n;
    for (uint32_t s = 1; s < m->n_states && !m->p->error; s++) {
        memcpy(v, m->vec + (size_t)s * (size_t)m->n, (size_t)m->n * sizeof *v);
        if (!re_spend(m->p, 1 + n_cl / 16))
            break;
        const struct re_node *x = &m->p->nodes[v[0]];
        if (m->n == 1 && x->kind == RK_CAT && m->p->nodes[x->a].kind == RK_SET) {
            /* The first term is one set: the common case inside literals. */
            uint32_t set = m->p->nodes[x->a].a, to = builder_state(m, (uint32_t[]){x->b});
            for (uint32_t c = 0; c < n_cl; c++)
                m->next[(size_t)s * n_cl + c] = re_class_in(m->p, m->cl, set, c) ? to : 0;
            continue;
        }
        for (uint32_t c = 0; c < n_cl; c++) {
            for (int i = 0; i < m->n; i++)
                w[i] = re_derive(m->p, m->cl, v[i], c);
            uint32_t to = builder_state(m, w);
            m->next[(size_t)s * n_cl + c] = to;
        }
    }
    return !m->p->error;
}

/* Removes states that cannot reach acceptance: they become state 0. */
static void dfa_remove_dead(struct dfa *d)
{
    uint32_t n = d->n_states, nc = d->n_classes;
    uint32_t *head = mem_zalloc(n + 1, sizeof *head);
    for (size_t i = nc; i < (size_t)n * nc; i++)
        head[d->next[i]]++;
    uint32_t sum = 0;
    for (uint32_t s = 0; s <= n; s++) {
        uint32_t k = s < n ? head[s] : 0;
        head[s] = sum;
        sum += k;
    }
    uint32_t *from = mem_alloc(((size_t)sum + 1) * sizeof *from),
             *at = mem_alloc((size_t)n * 4 + 4);
    memcpy(at, head, (size_t)n * sizeof *at);
    for (uint32_t s = 1; s < n; s++)
        for (uint32_t c = 0; c < nc; c++)
            from[at[d->next[(size_t)s * nc + c]]++] = s;
    uint8_t *live = mem_zalloc(n, 1);
    uint32_t *stack = mem_alloc((size_t)n * sizeof *stack), top = 0;
    for (uint32_t s = 1; s < n; s++)
        if (d->label[s]) {
            live[s] = 1;
            stack[top++] = s;
        }
    while (top) {
        uint32_t s = stack[--top];
        for (uint32_t i = head[s]; i < head[s + 1]; i++)
            if (!live[from[i]]) {
                live[from[i]] = 1;
                stack[top++] = from[i];
            }
    }
    uint32_t *to = at, k = 1;
    to[0] = 0;
    for (uint32_t s = 1; s < n; s++)
        to[s] = live[s] ? k++ : 0;
    if (!live[1]) { /* empty language: keep a dead start state */
        to[1] = 1;
        k = 2;
    }
    for (uint32_t s = 1; s < n; s++) {
        if (!to[s])
            continue;
        d->label[to[s]] = d->label[s];
        for (uint32_t c = 0; c < nc; c++)
            d->next[(size_t)to[s] * nc + c] = to[d->next[(size_t)s * nc + c]];
    }
    if (!live[1])
        memset(d->next + nc, 0, nc * sizeof *d->next);
    d->n_states = k;
    mem_free(head);
    mem_free(from);
    mem_free(at);
    mem_free(live);
    mem_free(stack);
}

/* For each state and group: how many arbitrary characters of the group are safe. Round k finds the
 * states that can die within k characters; states that never die keep the maximum. */
static void dfa_find_safe(struct dfa *d)
{
    uint32_t n = d->n_states, nc = d->n_classes;
    uint8_t cls[256] = {0}; /* bits: groups with a character in the class */
    for (uint32_t cp = 0; cp < 128; cp++)
        for (int g = 0; g < DFA_GROUPS; g++)
            if (dfa_group_has(g, cp))
                cls[d->ascii[cp]] |= (uint8_t)(1u << g);
    for (uint32_t i = 0; i < d->n_ranges; i++)
        cls[d->range_class[i]] |= 1u << (DFA_GROUPS - 1);
    const uint8_t all = (1u << DFA_GROUPS) - 1;
    uint8_t *dies = mem_zalloc(n, 1), *fresh = mem_zalloc(n, 1);
    uint32_t *open = mem_alloc((size_t)n * sizeof *open), n_open = 0;
    dies[0] = all;
    memset(d->safe, DFA_SAFE_MAX, sizeof *d->safe * n);
    memset(d->safe, 0, sizeof *d->safe);
    for (uint32_t s = 1; s < n; s++)
        open[n_open++] = s;
    for (uint8_t k = 0; k < DFA_SAFE_MAX && n_open; k++) {
        bool changed = false;
        for (uint32_t i = 0; i < n_open; i++) {
            uint32_t s = open[i];
            uint8_t m = 0;
            for (uint32_t c = 0; c < nc && m != all; c++)
                m |= cls[c] & dies[d->next[(size_t)s * nc + c]];
            fresh[s] = m & (uint8_t)~dies[s];
            changed |= fresh[s] != 0;
        }
        uint32_t left = 0;
        for (uint32_t i = 0; i < n_open; i++) {
            uint32_t s = open[i];
            for (int g = 0; g < DFA_GROUPS; g++)
                if (fresh[s] >> g & 1)
                    d->safe[s][g] = k;
            dies[s] |= fresh[s];
            if (dies[s] != all)
                open[left++] = s;
        }
        n_open = left;
        if (!changed)
            break;
    }
    mem_free(dies);
    mem_free(fresh);
    mem_free(open);
}

/* Depth-first search for cycles among live states. If there are none, `reach` is the longest path
 * from each state. */
static bool dfa_acyclic(struct dfa *d)
{
    uint8_t *color = mem_zalloc(d->n_states, 1);
    uint32_t *stack = mem_alloc((size_t)d->n_states * sizeof *stack);
    uint32_t *edge = mem_zalloc(d->n_states, sizeof *edge), top = 0;
    bool ok = true;
    memset(d->reach, 0, d->n_states);
    stack[top++] = 1;
    color[1] = 1;
    while (top && ok) {
        uint32_t s = stack[top - 1];
        if (edge[s] == d->n_classes) {
            color[s] = 2;
            if (--top) {
                uint32_t up = stack[top - 1];
                uint8_t way = d->reach[s] < 255 ? d->reach[s] + 1 : 255;
                if (d->reach[up] < way)
                    d->reach[up] = way;
            }
            continue;
        }
        uint32_t t = d->next[(size_t)s * d->n_classes + edge[s]++];
        if (!t)
            continue;
        if (color[t] == 2) {
            uint8_t way = d->reach[t] < 255 ? d->reach[t] + 1 : 255;
            if (d->reach[s] < way)
                d->reach[s] = way;
        } else if (color[t] == 1) {
            ok = false;
        } else {
            color[t] = 1;
            stack[top++] = t;
        }
    }
    if (!ok)
        memset(d->reach, 255, d->n_states);
    mem_free(color);
    mem_free(stack);
    mem_free(edge);
    return ok;
}

/* Computes everything but the transition table: moves, safe, reach, any, finite. */
static void dfa_analyse(struct dfa *d)
{
    d->next = mem_realloc(d->next, (size_t)d->n_states * d->n_classes, sizeof *d->next);
    d->label = mem_realloc(d->label, d->n_states, sizeof *d->label);
    d->safe = mem_realloc(d->safe, d->n_states, sizeof *d->safe);
    d->reach = mem_realloc(d->reach, d->n_states, 1);
    mem_free(d->moves);
    d->moves = mem_zalloc(d->n_states, 1);
    d->any = d->n_states == 2 && d->label[1];
    for (uint32_t s = 1; s < d->n_states; s++)
        for (uint32_t c = 0; c < d->n_classes; c++) {
            uint32_t t = d->next[(size_t)s * d->n_classes + c];
            d->moves[s] |= t != 0;
            d->any &= t == 1;
        }
    dfa_find_safe(d);
    d->finite = dfa_acyclic(d);
}

void dfa_relabel(struct dfa *d, const uint32_t *from, const uint32_t *to, size_t n)
{
    for (uint32_t s = 1; s < d->n_states; s++) {
        uint32_t label = 0;
        for (size_t i = 0; i < n; i++)
            if (from[i] == d->label[s])
                label = to[i];
        d->label[s] = label;
    }
    dfa_remove_dead(d);
    dfa_analyse(d);
}

/* The automaton of all strings, built directly. */
static struct dfa *dfa_any(void)
{
    struct dfa *d = mem_zalloc(1, sizeof *d);
    d->n_states = 2;
    d->n_classes = d->n_ranges = 1;
    d->range_lo = mem_alloc(sizeof *d->range_lo);
    d->range_lo[0] = 128;
    d->range_class = mem_zalloc(1, 1);
    d->next = mem_zalloc(2, sizeof *d->next);
    d->label = mem_zalloc(2, sizeof *d->label);
    d->next[1] = d->label[1] = 1;
    dfa_analyse(d);
    return d;
}

static void dfa_finish(struct dfa *d, const struct re_classes *cl)
{
    uint32_t first = 0;
    while (cl->edge_lo[first] < 128)
        first++;
    d->n_ranges = cl->n_edges - first;
    d->range_lo = mem_alloc(d->n_ranges * sizeof *d->range_lo);
    d->range_class = mem_alloc(d->n_ranges);
    memcpy(d->range_lo, cl->edge_lo + first, d->n_ranges * sizeof *d->range_lo);
    memcpy(d->range_class, cl->edge_class + first, d->n_ranges);
    for (uint32_t cp = 0, e = 0; cp < 128; cp++) {
        while (e + 1 < cl->n_edges && cl->edge_lo[e + 1] <= cp)
            e++;
        d->ascii[cp] = cl->edge_class[e];
    }
    memset(d->next, 0, d->n_classes * sizeof *d->next); /* state 0 */
    dfa_remove_dead(d);
    dfa_analyse(d);
}

bool re_is_empty(struct re_pool *p, uint32_t term)
{
    struct re_classes *cl = p->error ? NULL : classes_new(p, &term, 1);
    if (!cl)
        return false;
    struct dfa_builder m = {.p = p, .cl = cl, .n = 1, .cap = 16, .n_states = 1};
    m.vec = mem_zalloc(m.cap, sizeof *m.vec);
    m.next = mem_alloc((size_t)m.cap * cl->n * sizeof *m.next);
    m.label = mem_zalloc(m.cap, sizeof *m.label);
    bool found = false;
    builder_state(&m, &term);
    for (uint32_t s = 1; s < m.n_states && !found && !p->error; s++) {
        found = m.label[s] != 0;
        for (uint32_t c = 0; c < cl->n && !found; c++) {
            uint32_t d = re_derive(p, cl, m.vec[s], c);
            found = re_nullable(p, d);
            builder_state(&m, &d);
        }
        re_spend(p, 1 + cl->n / 16);
    }
    mem_free(m.vec);
    mem_free(m.next);
    mem_free(m.label);
    mem_free(m.slots);
    classes_free(cl);
    return !found && !p->error;
}

struct dfa *dfa_new(struct re_pool *p, const uint32_t *terms, int n, struct error *err)
{
    CHECK(n >= 1 && n <= TERMS_MAX, "terms of an automaton");
    if (n == 1 && terms[0] == RE_ALL && !p->error)
        return dfa_any();
    struct re_classes *cl = p->error ? NULL : classes_new(p, terms, n);
    if (!cl) {
        error_set(err, "%s", p->error);
        return NULL;
    }
    struct dfa_builder m = {.p = p, .cl = cl, .n = n, .cap = 16, .n_states = 1};
    m.vec = mem_zalloc((size_t)m.cap * (size_t)n, sizeof *m.vec);
    m.next = mem_alloc((size_t)m.cap * cl->n * sizeof *m.next);
    m.label = mem_zalloc(m.cap, sizeof *m.label);
    if (!builder_state(&m, terms)) { /* empty language: a dead start state */
        m.label[1] = 0;
        m.n_states = 2;
        memset(m.next + cl->n, 0, cl->n * sizeof *m.next);
    } else {
        builder_run(&m);
    }
    struct dfa *d = NULL;
    if (!p->error) {
        d = mem_zalloc(1, sizeof *d);
        d->n_states = m.n_states;
        d->n_classes = cl->n;
        d->next = m.next;
        d->label = m.label;
        dfa_finish(d, cl);
    } else {
        error_set(err, "%s", p->error);
        mem_free(m.next);
        mem_free(m.label);
    }
    mem_free(m.vec);
    mem_free(m.slots);
    classes_free(cl);
    return d;
}

void dfa_free(struct dfa *d)
{
    if (!d)
        return;
    mem_free(d->range_lo);
    mem_free(d->range_class);
    mem_free(d->next);
    mem_free(d->label);
    mem_free(d->safe);
    mem_free(d->moves);
    mem_free(d->reach);
    mem_free(d);
}

size_t dfa_bytes(const struct dfa *d)
{
    return sizeof *d + (size_t)d->n_states * (4 * (size_t)d->n_classes + 5 + DFA_GROUPS) +
           5 * (size_t)d->n_ranges;
}

bool dfa_empty(const struct dfa *d)
{
    return !d->label[1] && !d->moves[1];
}

bool dfa_range_alive(const struct dfa *d, uint32_t q, uint32_t lo, uint32_t hi)
{
    const uint32_t *row = d->next + (size_t)q * d->n_classes;
    for (; lo < 128 && lo <= hi; lo++)
        if (row[d->ascii[lo]])
            return true;
    if (lo > hi)
        return false;
    uint32_t a = 0, b = d->n_ranges;
    while (b - a > 1) {
        uint32_t mid = (a + b) / 2;
        if (d->range_lo[mid] <= lo)
            a = mid;
        else
            b = mid;
    }
    for (; a < d->n_ranges && d->range_lo[a] <= hi; a++)
        if (row[d->range_class[a]])
            return true;
    return false;
}
