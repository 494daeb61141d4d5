/*
 * Terms of regular expressions: constructors that keep a normal form (so that derivatives are
 * finitely many), and derivatives by character class. See grammar_re.h.
 *
 * Invariants:
 * 1. Equal terms have equal indices: every term is created by re_intern().
 * 2. OR and AND lists are sorted, have no duplicates, and contain no nested list of their own kind.
 * 3. CAT nests to the right: its first part is never a CAT.
 */
#include "text/grammar/grammar_re_int.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { NODES_MAX = 400000, LIST_MAX = 2000000, RANGES_MAX = 400000, WORK_MAX = 700000 };

static uint32_t re_intern(struct re_pool *p, const struct re_node *n);

struct re_pool *re_pool_new(void)
{
    struct re_pool *p = mem_zalloc(1, sizeof *p);
    p->n_nodes = 0;
    struct re_node none = {.kind = RK_NONE};
    re_intern(p, &none);
    struct re_node eps = {.kind = RK_EPS, .nullable = true};
    re_intern(p, &eps);
    struct re_node all = {.kind = RK_REP, .nullable = true, .a = RE_ANY, .b = 0, .c = RE_INF};
    re_intern(p, &all);
    struct re_range any = {0, CP_MAX};
    uint32_t x = re_set(p, &any, 1, false);
    CHECK(x == RE_ANY, "the pool's first terms");
    return p;
}

void re_pool_free(struct re_pool *p)
{
    if (!p)
        return;
    mem_free(p->nodes);
    mem_free(p->slots);
    mem_free(p->list);
    mem_free(p->ranges);
    mem_free(p->set_at);
    for (uint32_t i = 0; i < p->n_autos; i++) {
        mem_free(p->autos[i].next);
        mem_free(p->autos[i].accepts);
    }
    mem_free(p->autos);
    mem_free(p);
}

const char *re_pool_error(const struct re_pool *p)
{
    return p->error;
}

size_t re_pool_work(const struct re_pool *p)
{
    return p->work;
}

bool re_over_limit(struct re_pool *p, const char *what)
{
    if (!p->error)
        p->error = what;
    return false;
}

bool re_spend(struct re_pool *p, size_t n)
{
    p->work += n;
    if (p->work > WORK_MAX)
        return re_over_limit(p, "regular expressions take over 700000 steps to compile");
    return !p->error;
}

static uint32_t node_hash(const struct re_pool *p, const struct re_node *n)
{
    uint64_t h = (uint64_t)n->kind * 0x9e3779b97f4a7c15u;
    if (n->kind == RK_OR || n->kind == RK_AND) {
        for (uint32_t i = 0; i < n->b; i++)
            h = (h ^ p->list[n->a + i]) * 0xff51afd7ed558ccdu, h ^= h >> 29;
    } else {
        h = (h ^ n->a) * 0xff51afd7ed558ccdu, h ^= h >> 29;
        h = (h ^ n->b) * 0xc4ceb9fe1a85ec53u, h ^= h >> 31;
        h = (h ^ n->c) * 0xff51afd7ed558ccdu, h ^= h >> 29;
    }
    return (uint32_t)(h ^ h >> 32);
}

static bool node_same(const struct re_pool *p, const struct re_node *x, const struct re_node *y)
{
    if (x->kind != y->kind)
        return false;
    if (x->kind == RK_OR || x->kind == RK_AND)
        return x->b == y->b && !memcmp(p->list + x->a, p->list + y->a, x->b * sizeof(uint32_t));
    return x->a == y->a && x->b == y->b && x->c == y->c;
}

static uint32_t re_intern(struct re_pool *p, const struct re_node *n)
{
    if (2 * (p->n_nodes + 1) > p->n_slots) {
        uint32_t cap = p->n_slots ? 2 * p->n_slots : 256;
        mem_free(p->slots);
        p->slots = mem_zalloc(cap, sizeof *p->slots);
        p->n_slots = cap;
        for (uint32_t i = 0; i < p->n_nodes; i++) {
            uint32_t h = node_hash(p, &p->nodes[i]) & (cap - 1);
            while (p->slots[h])
                h = (h + 1) & (cap - 1);
            p->slots[h] = i + 1;
        }
    }
    uint32_t h = node_hash(p, n) & (p->n_slots - 1);
    for (; p->slots[h]; h = (h + 1) & (p->n_slots - 1))
        if (node_same(p, &p->nodes[p->slots[h] - 1], n))
            return p->slots[h] - 1;
    if (p->n_nodes >= NODES_MAX) {
        re_over_limit(p, "regular expressions have over 400000 terms");
        return RE_NONE;
    }
    if (p->n_nodes == p->cap_nodes) {
        p->cap_nodes = p->cap_nodes ? 2 * p->cap_nodes : 128;
        p->nodes = mem_realloc(p->nodes, p->cap_nodes, sizeof *p->nodes);
    }
    p->nodes[p->n_nodes] = *n;
    p->slots[h] = ++p->n_nodes;
    return p->n_nodes - 1;
}

static int range_cmp(const void *a, const void *b)
{
    const struct re_range *x = a, *y = b;
    return x->lo < y->lo ? -1 : x->lo > y->lo;
}

/* Creates a set from sorted, disjoint, merged ranges; equal sets share one index. */
static uint32_t set_make(struct re_pool *p, const struct re_range *r, size_t n)
{
    if (!n)
        return RE_NONE;
    for (uint32_t s = 0; s < p->n_sets; s++) {
        uint32_t at = p->set_at[s];
        if (p->set_at[s + 1] - at == n && !memcmp(p->ranges + at, r, n * sizeof *r))
            return re_intern(p, &(struct re_node){.kind = RK_SET, .a = s});
    }
    if (p->n_ranges + n > RANGES_MAX || p->n_sets >= 4096) {
        re_over_limit(p, "regular expressions have over 4096 different character sets");
        return RE_NONE;
    }
    p->ranges = mem_realloc(p->ranges, p->n_ranges + n, sizeof *p->ranges);
    memcpy(p->ranges + p->n_ranges, r, n * sizeof *r);
    p->n_ranges += (uint32_t)n;
    p->set_at = mem_realloc(p->set_at, p->n_sets + 2, sizeof *p->set_at);
    p->set_at[0] = 0;
    p->set_at[++p->n_sets] = p->n_ranges;
    return re_intern(p, &(struct re_node){.kind = RK_SET, .a = p->n_sets - 1});
}

uint32_t re_set(struct re_pool *p, const struct re_range *r, size_t n, bool negated)
{
    struct re_range *t = mem_alloc((n + 2) * sizeof *t);
    size_t m = 0;
    for (size_t i = 0; i < n; i++)
        if (r[i].lo <= r[i].hi && r[i].lo <= CP_MAX)
            t[m++] = (struct re_range){r[i].lo, r[i].hi < CP_MAX ? r[i].hi : CP_MAX};
    qsort(t, m, sizeof *t, range_cmp);
    size_t k = 0;
    for (size_t i = 0; i < m; i++) {
        if (k && t[i].lo <= t[k - 1].hi + 1) {
            if (t[i].hi > t[k - 1].hi)
                t[k - 1].hi = t[i].hi;
        } else {
            t[k++] = t[i];
        }
    }
    if (negated) {
        struct re_range *u = mem_alloc((k + 1) * sizeof *u);
        uint32_t from = 0;
        size_t j = 0;
        for (size_t i = 0; i < k; i++) {
            if (t[i].lo > from)
                u[j++] = (struct re_range){from, t[i].lo - 1};
            from = t[i].hi + 1;
        }
        if (from <= CP_MAX)
            u[j++] = (struct re_range){from, CP_MAX};
        mem_free(t);
        t = u;
        k = j;
    }
    uint32_t x = set_make(p, t, k);
    mem_free(t);
    return x;
}

uint32_t re_char(struct re_pool *p, uint32_t cp)
{
    struct re_range r = {cp, cp};
    if (cp < 128) { /* the common case, without a search */
        if (!p->ascii[cp])
            p->ascii[cp] = re_set(p, &r, 1, false);
        return p->ascii[cp];
    }
    return re_set(p, &r, 1, false);
}

uint32_t re_literal(struct re_pool *p, const char *s, size_t n)
{
    uint32_t x = RE_EPS;
    while (n) { /* from the end, so that suffixes are shared */
        size_t k = 1;
        uint32_t cp;
        while (k < n && k < 4 && ((unsigned char)s[n - k] & 0xc0) == 0x80)
            k++;
        if (!utf8_decode(s + n - k, k, &cp)) {
            k = 1;
            cp = 0xfffd;
        }
        x = re_cat(p, re_char(p, cp), x);
        n -= k;
    }
    return x;
}

bool re_nullable(const struct re_pool *p, uint32_t a)
{
    return p->nodes[a].nullable;
}

static bool re_as_set(const struct re_pool *p, uint32_t a, const struct re_range **r, size_t *n)
{
    if (p->nodes[a].kind != RK_SET)
        return false;
    uint32_t s = p->nodes[a].a;
    *r = p->ranges + p->set_at[s];
    *n = p->set_at[s + 1] - p->set_at[s];
    return true;
}

uint32_t re_cat(struct re_pool *p, uint32_t a, uint32_t b)
{
    if (a == RE_NONE || b == RE_NONE)
        return RE_NONE;
    if (a == RE_EPS)
        return b;
    if (b == RE_EPS)
        return a;
    if (a == RE_ALL && b == RE_ALL)
        return RE_ALL;
    /* Turns (xy)b into x(yb), from the last part of the chain to the first. */
    uint32_t few[32];
    size_t n = 1;
    for (uint32_t x = a; p->nodes[x].kind == RK_CAT; x = p->nodes[x].b)
        n++;
    if (!re_spend(p, n / 8))
        return RE_NONE;
    uint32_t *parts = n <= 32 ? few : mem_alloc(n * sizeof *parts);
    uint32_t x = a;
    for (size_t i = 0; i + 1 < n; i++, x = p->nodes[x].b)
        parts[i] = p->nodes[x].a;
    parts[n - 1] = x;
    while (n--)
        b = re_intern(p,
                      &(struct re_node){.kind = RK_CAT,
                                        .nullable = re_nullable(p, parts[n]) && re_nullable(p, b),
                                        .a = parts[n],
                                        .b = b});
    if (parts != few)
        mem_free(parts);
    return b;
}

static int re_cmp(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Union or intersection of two character sets. */
static uint32_t set_join(struct re_pool *p, uint32_t a, uint32_t b, bool both)
{
    const struct re_range *x = NULL, *y = NULL;
    size_t n = 0, m = 0;
    re_as_set(p, a, &x, &n);
    re_as_set(p, b, &y, &m);
    if (!re_spend(p, (n + m) / 8))
        return RE_NONE;
    struct re_range *t = mem_alloc((n + m + 1) * sizeof *t);
    size_t k = 0;
    if (both) {
        for (size_t i = 0, j = 0; i < n && j < m;) {
            uint32_t lo = x[i].lo > y[j].lo ? x[i].lo : y[j].lo;
            uint32_t hi = x[i].hi < y[j].hi ? x[i].hi : y[j].hi;
            if (lo <= hi)
                t[k++] = (struct re_range){lo, hi};
            if (x[i].hi < y[j].hi)
                i++;
            else
                j++;
        }
    } else {
        if (n)
            memcpy(t, x, n * sizeof *t);
        if (m)
            memcpy(t + n, y, m * sizeof *t);
        k = n + m;
    }
    uint32_t r = re_set(p, t, k, false);
    mem_free(t);
    return r;
}

/* OR or AND of n terms. Overwrites `t`. */
static uint32_t list_make(struct re_pool *p, enum re_kind kind, uint32_t *t, size_t n)
{
    bool is_or = kind == RK_OR;
    if (!re_spend(p, 1 + n / 8))
        return RE_NONE;
    qsort(t, n, sizeof *t, re_cmp);
    size_t k = 0;
    uint32_t set = 0;
    bool has_set = false;
    for (size_t i = 0; i < n; i++) {
        if (i && t[i] == t[i - 1])
            continue;
        if (t[i] == (is_or ? RE_NONE : RE_ALL))
            continue;
        if (t[i] == (is_or ? RE_ALL : RE_NONE))
            return t[i];
        if (p->nodes[t[i]].kind == RK_SET) {
            set = has_set ? set_join(p, set, t[i], !is_or) : t[i];
            has_set = true;
            if (set == RE_NONE)
                return RE_NONE; /* only for an intersection */
            continue;
        }
        t[k++] = t[i];
    }
    if (has_set) {
        t[k++] = set;
        qsort(t, k, sizeof *t, re_cmp);
    }
    if (!k)
        return is_or ? RE_NONE : RE_ALL;
    if (k == 1)
        return t[0];
    bool nullable = !is_or;
    for (size_t i = 0; i < k; i++)
        nullable = is_or ? nullable || re_nullable(p, t[i]) : nullable && re_nullable(p, t[i]);
    if (!is_or && !nullable) /* an intersection that excludes "" has no "" operand */
        for (size_t i = 0; i < k; i++)
            if (t[i] == RE_EPS)
                return RE_NONE;
    /* x and not x */
    for (size_t i = 0; i < k; i++)
        if (p->nodes[t[i]].kind == RK_NOT && bsearch(&p->nodes[t[i]].a, t, k, sizeof *t, re_cmp))
            return is_or ? RE_ALL : RE_NONE;
    if (p->n_list + k > p->cap_list) {
        if (p->n_list + k > LIST_MAX) {
            re_over_limit(p, "regular expressions have over 2000000 alternatives");
            return RE_NONE;
        }
        p->cap_list = 2 * (p->n_list + (uint32_t)k);
        p->list = mem_realloc(p->list, p->cap_list, sizeof *p->list);
    }
    memcpy(p->list + p->n_list, t, k * sizeof *t);
    uint32_t before = p->n_nodes;
    uint32_t x = re_intern(
        p, &(struct re_node){.kind = kind, .nullable = nullable, .a = p->n_list, .b = (uint32_t)k});
    if (p->n_nodes > before)
        p->n_list += (uint32_t)k;
    return x;
}

static uint32_t list_n(struct re_pool *p, enum re_kind kind, const uint32_t *a, size_t n)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++)
        total += p->nodes[a[i]].kind == kind ? p->nodes[a[i]].b : 1;
    uint32_t few[64];
    uint32_t *t = total <= 64 ? few : mem_alloc(total * sizeof *t);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        const struct re_node *x = &p->nodes[a[i]];
        if (x->kind == kind) {
            memcpy(t + k, p->list + x->a, x->b * sizeof *t);
            k += x->b;
        } else {
            t[k++] = a[i];
        }
    }
    uint32_t r = list_make(p, kind, t, k);
    if (t != few)
        mem_free(t);
    return r;
}

uint32_t re_or(struct re_pool *p, uint32_t a, uint32_t b)
{
    if (a == RE_NONE || a == b)
        return b;
    if (b == RE_NONE)
        return a;
    return list_n(p, RK_OR, (uint32_t[]){a, b}, 2);
}

uint32_t re_or_n(struct re_pool *p, const uint32_t *a, size_t n)
{
    return list_n(p, RK_OR, a, n);
}

uint32_t re_and(struct re_pool *p, uint32_t a, uint32_t b)
{
    if (a == RE_ALL || a == b)
        return b;
    if (b == RE_ALL)
        return a;
    return list_n(p, RK_AND, (uint32_t[]){a, b}, 2);
}

uint32_t re_not(struct re_pool *p, uint32_t a)
{
    if (a == RE_NONE)
        return RE_ALL;
    if (a == RE_ALL)
        return RE_NONE;
    if (p->nodes[a].kind == RK_NOT)
        return p->nodes[a].a;
    return re_intern(p, &(struct re_node){.kind = RK_NOT, .nullable = !re_nullable(p, a), .a = a});
}

uint32_t re_not_containing(struct re_pool *p, const char *text)
{
    uint32_t t = re_cat(p, re_literal(p, text, strlen(text)), RE_ALL);
    return re_not(p, re_cat(p, RE_ALL, t));
}

uint32_t re_rep(struct re_pool *p, uint32_t a, uint32_t min, uint32_t max)
{
    if (max == 0 || a == RE_EPS)
        return RE_EPS;
    if (a == RE_NONE)
        return min ? RE_NONE : RE_EPS;
    if (min == 1 && max == 1)
        return a;
    if (re_nullable(p, a))
        min = 0;
    const struct re_node *x = &p->nodes[a];
    if (x->kind == RK_REP && x->b == 0 && x->c == RE_INF)
        return a; /* (y*){..} is y* */
    return re_intern(
        p, &(struct re_node){
               .kind = RK_REP, .nullable = !min || re_nullable(p, a), .a = a, .b = min, .c = max});
}

uint32_t re_auto(struct re_pool *p, uint32_t n_states, const uint32_t *next, const bool *accepts)
{
    for (const char *c = "0123456789-."; *c; c++) /* creates their sets */
        re_char(p, (uint32_t)*c);
    p->autos = mem_realloc(p->autos, p->n_autos + 1, sizeof *p->autos);
    size_t cells = (size_t)n_states * RE_AUTO_SYMBOLS;
    p->autos[p->n_autos].n_states = n_states;
    p->autos[p->n_autos].next = mem_alloc(cells * sizeof *next);
    p->autos[p->n_autos].accepts = mem_alloc(n_states * sizeof *accepts);
    memcpy(p->autos[p->n_autos].next, next, cells * sizeof *next);
    memcpy(p->autos[p->n_autos].accepts, accepts, n_states * sizeof *accepts);
    re_spend(p, cells / 16);
    return re_intern(
        p, &(struct re_node){.kind = RK_AUTO, .nullable = accepts[0], .a = p->n_autos++, .b = 0});
}

static uint32_t auto_derive(struct re_pool *p, const struct re_node *n, uint32_t cp)
{
    uint32_t sym = cp >= '0' && cp <= '9' ? cp - '0' : cp == '-' ? 10 : cp == '.' ? 11 : RE_INF;
    if (sym == RE_INF)
        return RE_NONE;
    uint32_t to = p->autos[n->a].next[(size_t)n->b * RE_AUTO_SYMBOLS + sym];
    if (to == RE_INF)
        return RE_NONE;
    return re_intern(
        p, &(struct re_node){
               .kind = RK_AUTO, .nullable = p->autos[n->a].accepts[to], .a = n->a, .b = to});
}

/* The derivative of x by a character of class `c`: the term of what may follow it. */
uint32_t re_derive(struct re_pool *p, struct re_classes *cl, uint32_t x, uint32_t c)
{
    if (x == RE_NONE || x == RE_EPS || p->error)
        return RE_NONE;
    struct re_node n = p->nodes[x];
    if (n.kind == RK_SET)
        return re_class_in(p, cl, n.a, c) ? RE_EPS : RE_NONE;
    if (n.kind == RK_AUTO)
        return auto_derive(p, &n, cl->sample[c]);
    if (n.kind == RK_CAT && p->nodes[n.a].kind == RK_SET)
        return re_class_in(p, cl, p->nodes[n.a].a, c) ? n.b : RE_NONE;
    uint64_t key = ((uint64_t)x << 8 | c) + 1;
    uint32_t slot = (uint32_t)(key * 0x9e3779b97f4a7c15u >> 40) & (RE_MEMO - 1);
    if (cl->memo[slot].key == key)
        return cl->memo[slot].value;
    if (!re_spend(p, 1))
        return RE_NONE;
    if (cl->depth > 2000) {
        re_over_limit(p, "a regular expression nests over 2000 deep");
        return RE_NONE;
    }
    cl->depth++;
    uint32_t r = RE_NONE;
    if (n.kind == RK_CAT) {
        r = re_cat(p, re_derive(p, cl, n.a, c), n.b);
        if (re_nullable(p, n.a))
            r = re_or(p, r, re_derive(p, cl, n.b, c));
    } else if (n.kind == RK_OR || n.kind == RK_AND) {
        uint32_t few[32];
        uint32_t *t = n.b <= 32 ? few : mem_alloc(n.b * sizeof *t);
        size_t k = 0;
        bool dead = false;
        for (uint32_t i = 0; i < n.b && !dead; i++) {
            uint32_t d = re_derive(p, cl, p->list[n.a + i], c);
            if (d != RE_NONE)
                t[k++] = d;
            else
                dead = n.kind == RK_AND;
        }
        r = dead || (!k && n.kind == RK_OR) ? RE_NONE : list_n(p, n.kind, t, k);
        if (t != few)
            mem_free(t);
    } else if (n.kind == RK_NOT) {
        r = re_not(p, re_derive(p, cl, n.a, c));
    } else if (n.kind == RK_REP) {
        uint32_t rest = re_rep(p, n.a, n.b ? n.b - 1 : 0, n.c == RE_INF ? RE_INF : n.c - 1);
        r = re_cat(p, re_derive(p, cl, n.a, c), rest);
    }
    cl->depth--;
    cl->memo[slot].key = key;
    cl->memo[slot].value = r;
    return r;
}
