/*
 * Shortest completions: how many bytes complete a reply from the current point, and which bytes. A
 * matcher with a token budget uses this when the budget runs low: the mask then allows only the
 * next token of a completion.
 *
 * Costs are bytes. They are upper bounds: at every point of the text some next byte lowers the
 * cost. The exception is a property name that was already used, which takes one more character.
 * Costs of terminal states, rule states and nodes are computed at compile time. Costs of items,
 * threads and waiters are derived from them at run time. Waiter costs are cached per row, since
 * they do not change while the row exists.
 */
#include "text/grammar/grammar_term.h"

#include "base/buf.h"
#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

enum {
    COST_MAX = 1 << 28,
    COST_WORK = 4 << 20, /* steps for computing a grammar's costs; unknown ones stay COST_MAX */
    NODE_WORK = 1 << 19, /* steps for each of the two passes over nodes */
    COMPLETION_MAX = 1 << 13, /* longest completion in bytes */
    RETRY_TOKENS = 64,        /* tokens until a failed search for a completion is repeated */
};

static uint32_t cost_add(uint32_t a, uint32_t b)
{
    return a + b < COST_MAX ? a + b : COST_MAX;
}

static uint32_t cost_mul(uint32_t n, uint32_t a)
{
    uint64_t v = (uint64_t)n * a;
    return v < COST_MAX ? (uint32_t)v : COST_MAX;
}

static uint32_t cost_min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- terminals ---- */

/* Bytes needed to write a character. */
static uint32_t char_cost(const struct term *tm, uint32_t cp)
{
    if (tm->kind == TERM_FREE)
        return 1;
    if (cp >= 0x80)
        return cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    if (tm->kind == TERM_RAW || tm->bare)
        return 1;
    if (cp < ' ')
        return strchr("\b\f\n\r\t", (int)cp) && cp ? 2 : 6;
    return cp == '"' || cp == '\\' ? 2 : 1;
}

/* Bytes from each state to acceptance, plus the label's own cost: of_label (by label - 1) or 0. */
static void state_costs(const struct term *tm, const uint32_t *of_label, uint32_t *left,
                        size_t *work)
{
    const struct dfa *d = tm->dfa;
    uint32_t of_class[256];
    memset(of_class, 0xff, sizeof of_class);
    for (uint32_t c = 0; c < 128; c++)
        of_class[d->ascii[c]] = cost_min(of_class[d->ascii[c]], char_cost(tm, c));
    for (uint32_t i = 0; i < d->n_ranges; i++) {
        uint32_t *c = &of_class[d->range_class[i]];
        *c = cost_min(*c, char_cost(tm, d->range_lo[i]));
    }
    left[0] = COST_MAX;
    for (uint32_t q = 1; q < d->n_states; q++)
        left[q] = !d->label[q] ? COST_MAX : of_label ? of_label[d->label[q] - 1] : 0;
    /* Successors mostly have higher numbers, so going backwards takes few rounds. */
    size_t done = 0;
    for (bool changed = true; changed && (!done || *work < COST_WORK);) {
        changed = false;
        for (uint32_t q = d->n_states; q-- > 1;) {
            uint32_t best = left[q];
            const uint32_t *next = d->next + (size_t)q * d->n_classes;
            for (uint32_t c = 0; best && c < d->n_classes; c++)
                if (next[c])
                    best = cost_min(best, cost_add(of_class[c], left[next[c]]));
            changed |= best != left[q];
            left[q] = best;
        }
        done = (size_t)d->n_states * d->n_classes;
        *work += done;
    }
}

static void term_costs(struct term *tm, size_t *work)
{
    tm->left = mem_alloc(tm->dfa->n_states * sizeof *tm->left);
    state_costs(tm, NULL, tm->left, work);
}

/* Bytes needed to write the declared names. */
static void name_costs(struct term *tm)
{
    struct names *n = tm->names;
    n->spelled = mem_zalloc(n->n + 1, sizeof *n->spelled);
    for (uint32_t i = 0; i < n->n_nodes; i++) /* children follow their parents */
        for (uint32_t c = n->nodes[i].child; c; c = n->nodes[c].sibling)
            n->nodes[c].spelled = n->nodes[i].spelled + char_cost(tm, n->nodes[c].cp);
    for (uint32_t i = 0; i < n->n_nodes; i++)
        if (n->nodes[i].name)
            n->spelled[n->nodes[i].name - 1] = n->nodes[i].spelled;
}

/* Cost of a whole terminal. */
static uint32_t term_cost(const struct grammar *g, uint32_t term)
{
    if (term == NO_LIMIT)
        return 0;
    const struct term *tm = &g->terms[term];
    return cost_add(tm->left[1], tm->kind == TERM_STR ? 2 : 0);
}

/* ---- arrays and objects ---- */

/* Cost from n items, `fit` of which satisfy `contains`, to the closing bracket. */
static uint32_t array_cost_to_end(const struct grammar *g, const struct array_node *a, uint32_t n,
                                  uint32_t fit)
{
    uint32_t cost = 0, need = fit < a->n_contains ? a->n_contains - fit : 0;
    uint32_t comma = term_cost(g, a->mark[MARK_COMMA]);
    bool any = n > 0;
    while ((n < a->min || need) && n < a->max && cost < COST_MAX) {
        uint32_t place = n < a->n_prefix ? n : a->n_prefix;
        bool both = need && a->both[place] != NO_LIMIT;
        if (need && !both && n >= a->n_prefix && n >= a->min)
            return COST_MAX; /* no position left for the required items */
        uint32_t item = both              ? g->node_cost[a->both[place]]
                        : n < a->n_prefix ? g->node_cost[a->prefix[n]]
                                          : g->node_cost[a->items];
        uint32_t many = 1;
        if (n >= a->n_prefix) /* the remaining items are alike */
            many = both ? need : a->min > n ? a->min - n : 1;
        cost =
            cost_add(cost, cost_add(cost_mul(many, item), cost_mul(any ? many : many - 1, comma)));
        need -= both ? many : 0;
        n += many;
        any = true;
    }
    return cost_add(cost, term_cost(g, a->mark[any ? MARK_CLOSE : MARK_EMPTY]));
}

/* The remaining cost of an object: `total` bytes to its end. `extra` is the share of one property
 * that is needed only for minProperties. */
struct object_cost {
    uint32_t total, extra;
    bool any; /* a property must follow; each cost includes a comma before it */
};

/* Cost of the comma, name, colon and value of declared property i. */
static uint32_t prop_cost(const struct grammar *g, const struct object_node *o, uint32_t i)
{
    const struct term *key = &g->terms[o->key];
    uint32_t quotes = key->bare ? (uint32_t)strlen(key->open) + 1 : 2;
    if (o->prop[i].node == NO_LIMIT)
        return COST_MAX;
    return cost_add(cost_add(key->names->spelled[i] + quotes, term_cost(g, o->mark[MARK_COLON])),
                    cost_add(g->node_cost[o->prop[i].node], term_cost(g, o->mark[MARK_COMMA])));
}

/* Cost of an undeclared property: from a state of its name's automaton to the end of its value,
 * without the text between name and value. */
static uint32_t other_name_cost(const struct grammar *g, const struct object_node *o, uint32_t q)
{
    const struct term *key = &g->terms[o->key];
    uint32_t best = COST_MAX;
    if (key->total)
        return key->total[q];
    for (uint32_t i = 0; i < o->n_others; i++) /* while node costs are being computed */
        best = cost_min(best, g->node_cost[o->others[i]]);
    return cost_add(key->left[q], best);
}

static uint32_t other_cost(const struct grammar *g, const struct object_node *o)
{
    const struct term *key = &g->terms[o->key];
    if (!o->n_others)
        return COST_MAX;
    uint32_t quotes = key->bare ? (uint32_t)strlen(key->open) + 1 : 2;
    return cost_add(cost_add(other_name_cost(g, o, 1), quotes + 1),
                    cost_add(term_cost(g, o->mark[MARK_COLON]), term_cost(g, o->mark[MARK_COMMA])));
}

/* Whether property i is missing: required by the schema or by a property seen, and not written
 * yet. */
static bool prop_missing(const struct object_node *o, const uint32_t *seen, uint32_t i)
{
    if (seen && seen[i / 32] >> i % 32 & 1)
        return false;
    if (o->prop[i].required)
        return true;
    for (uint32_t k = 0; seen && o->needs && k < o->n_props; k++)
        for (uint32_t j = 0; seen[k / 32] >> k % 32 & 1 && j < o->prop[k].n_needs; j++)
            if (o->needs[o->prop[k].needs + j] == i)
                return true;
    return false;
}

/* set NULL: an object without properties. */
static struct object_cost object_cost_to_end(const struct grammar *g, const struct object_node *o,
                                             const uint32_t *set)
{
    const uint32_t *seen = set ? set + SET_BITS : NULL;
    const uint32_t *allowed = set ? seen + set_words(o) : NULL;
    uint32_t count = set ? set[SET_COUNT] : 0, total = 0, n = count;
    for (uint32_t i = 0; i < o->n_props; i++)
        if (prop_missing(o, seen, i)) {
            total = cost_add(total, prop_cost(g, o, i));
            n++;
        }
    struct object_cost r = {.total = total};
    uint32_t more = n < o->min ? o->min - n : 0, want = more, extra = 0;
    for (uint32_t i = 0; i < o->n_props && want; i++) {
        bool may = o->prop[i].node != NO_LIMIT && !prop_missing(o, seen, i) &&
                   (!allowed || allowed[i / 32] >> i % 32 & 1);
        if (may && !o->prop[i].n_needs) {
            extra = cost_add(extra, prop_cost(g, o, i));
            want--;
        }
    }
    if (want)
        extra = cost_add(extra, cost_mul(want, other_cost(g, o)));
    r.extra = more ? extra / more : 0;
    r.any = n + more > count;
    r.total = cost_add(r.total, extra);
    r.total = cost_add(r.total, term_cost(g, o->mark[n + more ? MARK_CLOSE : MARK_EMPTY]));
    return r;
}

/* Like object_cost_to_end, if the next property needs no comma. */
static uint32_t first_prop_cost_to_end(const struct grammar *g, const struct object_node *o,
                                       const struct object_cost *r)
{
    return r->any && r->total < COST_MAX ? r->total - term_cost(g, o->mark[MARK_COMMA]) : r->total;
}

/* ---- a grammar's costs ---- */

static uint32_t node_cost(const struct grammar *g, uint32_t node)
{
    const struct gnode *n = &g->nodes[node];
    if (n->kind == NODE_ARRAY)
        return cost_add(term_cost(g, n->array->mark[MARK_OPEN]),
                        array_cost_to_end(g, n->array, 0, 0));
    if (n->kind == NODE_OBJECT) {
        struct object_cost r = object_cost_to_end(g, n->object, NULL);
        return cost_add(term_cost(g, n->object->mark[MARK_OPEN]),
                        first_prop_cost_to_end(g, n->object, &r));
    }
    return g->state_cost[n->start];
}

uint32_t grammar_edge_cost(const struct grammar *g, const struct edge *e)
{
    uint32_t c = e->call ? g->node_cost[e->target] : term_cost(g, e->target);
    return cost_add(c, g->state_cost[e->to]);
}

/* The largest number of bytes by which an optional part can increase the cost. */
static uint32_t longest_detour(const struct grammar *g)
{
    uint32_t most = 0;
#define MORE(cost)                                                                                 \
    do {                                                                                           \
        uint32_t c = cost;                                                                         \
        if (c < COST_MAX && c > most)                                                              \
            most = c;                                                                              \
    } while (0)
    for (uint32_t s = 0; s < g->n_states; s++)
        for (uint32_t e = g->state_at[s]; e < g->state_at[s + 1] && g->state_cost[s] < COST_MAX;
             e++)
            MORE(grammar_edge_cost(g, &g->edges[e]) - g->state_cost[s]);
    for (uint32_t n = 0; n < g->n_nodes; n++) {
        const struct array_node *a = g->nodes[n].array;
        const struct object_node *o = g->nodes[n].object;
        if (a && a->max > a->n_prefix)
            MORE(g->node_cost[a->items]);
        for (uint32_t i = 0; a && i < a->n_prefix; i++)
            MORE(g->node_cost[a->prefix[i]]);
        for (uint32_t i = 0; o && i < o->n_props; i++)
            if (!o->prop[i].required)
                MORE(prop_cost(g, o, i));
        for (uint32_t i = 0; o && i < o->n_others; i++)
            MORE(cost_add(other_cost(g, o), g->node_cost[o->others[i]]));
    }
#undef MORE
    return most;
}

static void node_costs(struct grammar *g, size_t *work)
{
    size_t most = *work + NODE_WORK;
    for (uint32_t i = 0; i < g->n_states; i++)
        g->state_cost[i] = g->state_final[i] ? 0 : COST_MAX;
    for (uint32_t i = 0; i < g->n_nodes; i++)
        g->node_cost[i] = COST_MAX;
    for (bool changed = true; changed && *work < most;) {
        changed = false;
        for (uint32_t s = g->n_states; s-- > 0;) {
            uint32_t best = g->state_cost[s];
            for (uint32_t e = g->state_at[s]; e < g->state_at[s + 1]; e++)
                best = cost_min(best, grammar_edge_cost(g, &g->edges[e]));
            changed |= best != g->state_cost[s];
            g->state_cost[s] = best;
            *work += 1 + g->state_at[s + 1] - g->state_at[s];
        }
        for (uint32_t n = g->n_nodes; n-- > 0;) {
            uint32_t c = node_cost(g, n);
            changed |= c < g->node_cost[n];
            g->node_cost[n] = cost_min(c, g->node_cost[n]);
            *work += 1 + (g->nodes[n].object ? g->nodes[n].object->n_props : 0);
        }
    }
}

static void key_totals(struct grammar *g, const struct object_node *o, size_t *work)
{
    struct term *key = &g->terms[o->key];
    uint32_t *values = mem_alloc(o->n_others * sizeof *values);
    for (uint32_t i = 0; i < o->n_others; i++)
        values[i] = g->node_cost[o->others[i]];
    key->total = mem_realloc(key->total, key->dfa->n_states, sizeof *key->total);
    state_costs(key, values, key->total, work);
    mem_free(values);
}

void grammar_costs(struct grammar *g)
{
    size_t work = 0;
    for (uint32_t i = 0; i < g->n_terms; i++) {
        if (!g->terms[i].left)
            term_costs(&g->terms[i], &work);
        if (g->terms[i].names && !g->terms[i].names->spelled)
            name_costs(&g->terms[i]);
    }
    g->state_cost = mem_realloc(g->state_cost, g->n_states + 1, sizeof *g->state_cost);
    g->node_cost = mem_realloc(g->node_cost, g->n_nodes + 1, sizeof *g->node_cost);
    /* First with the cheapest value for all undeclared names, then with each kind's own value. */
    node_costs(g, &work);
    for (uint32_t n = 0; n < g->n_nodes; n++) {
        const struct object_node *o = g->nodes[n].object;
        if (o && o->n_others > 1)
            key_totals(g, o, &work);
    }
    node_costs(g, &work);
    g->detour = longest_detour(g);
}

/* ---- items and their waiters ---- */

/* Cost from an item to the end of its node. */
static uint32_t item_cost_to_end(const struct grammar_matcher *m, const struct item *it)
{
    const struct grammar *g = m->g;
    const struct gnode *n = &g->nodes[it->node];
    if (n->kind == NODE_GRAPH)
        return g->state_cost[it->pos];
    if (n->kind == NODE_ARRAY) {
        const struct array_node *a = n->array;
        uint32_t count = it->data & 0xffff, fit = it->data >> 16, place = count, item;
        if (it->pos != 4)
            return it->pos == 0   ? g->node_cost[it->node]
                   : it->pos == 3 ? 0
                                  : array_cost_to_end(g, a, count, fit);
        place = count < a->n_prefix ? count : a->n_prefix;
        bool both = fit < a->n_contains && a->both[place] != NO_LIMIT;
        item = both ? a->both[place] : count < a->n_prefix ? a->prefix[count] : a->items;
        return cost_add(g->node_cost[item], array_cost_to_end(g, a, count + 1, fit + both));
    }
    const struct object_node *o = n->object;
    uint32_t labels = o->n_props + o->n_others;
    if (it->pos == 0)
        return g->node_cost[it->node];
    if (it->pos == 4)
        return 0;
    struct object_cost r = object_cost_to_end(g, o, it->pos == 1 ? NULL : m->data + it->data);
    if (it->pos <= 3) {
        /* After a comma one more property follows: a missing one, or any. */
        const uint32_t *set = m->data + it->data, *seen = set + SET_BITS;
        uint32_t best = COST_MAX;
        if (it->pos == 3)
            return r.total;
        if (it->pos == 1 || r.any)
            return first_prop_cost_to_end(g, o, &r);
        for (uint32_t i = 0; i < o->n_props; i++) {
            if (seen[set_words(o) + i / 32] >> i % 32 & 1)
                best = cost_min(best, prop_cost(g, o, i));
        }
        if (set[SET_OTHERS])
            best = cost_min(best, other_cost(g, o));
        return cost_add(r.total, best - cost_min(best, term_cost(g, o->mark[MARK_COMMA])));
    }
    bool colon = it->pos < 5 + labels;
    uint32_t k = it->pos - 5 - (colon ? 0 : labels);
    uint32_t value = g->node_cost[k < o->n_props ? o->prop[k].node : o->others[k - o->n_props]];
    return cost_add(cost_add(value, r.total), colon ? term_cost(g, o->mark[MARK_COLON]) : 0);
}

/* Cost from the end of this node, started at row `origin`, to the end of the reply. */
static uint32_t node_end_cost(const struct grammar_matcher *m, uint32_t node, uint32_t origin)
{
    if (node == 0 && origin == 0)
        return 0;
    uint32_t best = COST_MAX;
    uint32_t to = origin + 1 < m->n_rows ? m->rows[origin + 1] : m->n_waiters;
    for (uint32_t i = m->rows[origin]; i < to; i++)
        if (m->waiters[i].callee == node)
            best = cost_min(best, m->waiters[i].cost);
    return best;
}

static void compute_waiter_costs(struct grammar_matcher *m)
{
    for (uint32_t r = m->n_costed; r < m->n_rows; r++) {
        uint32_t from = m->rows[r], to = r + 1 < m->n_rows ? m->rows[r + 1] : m->n_waiters;
        for (uint32_t i = from; i < to; i++)
            m->waiters[i].cost = COST_MAX;
        bool changed = true;
        for (uint32_t round = 0; changed && round <= to - from; round++) {
            changed = false;
            for (uint32_t i = from; i < to; i++) {
                struct rule_waiter *w = &m->waiters[i];
                uint32_t c = node_end_cost(m, w->then.node, w->then.origin);
                if (c < COST_MAX)
                    c = cost_add(c, item_cost_to_end(m, &w->then));
                changed |= c < w->cost;
                w->cost = cost_min(c, w->cost);
            }
        }
    }
    m->n_costed = m->n_rows;
}

/* ---- threads ---- */

static uint32_t item_total_cost(const struct grammar_matcher *m, const struct item *it)
{
    uint32_t up = node_end_cost(m, it->node, it->origin);
    return up < COST_MAX ? cost_add(item_cost_to_end(m, it), up) : COST_MAX;
}

/* Cost from inside a property's name to the end of the object. */
static uint32_t key_cost_to_end(const struct grammar_matcher *m, const struct term *tm,
                                const struct thread *t, const struct object_cost *r)
{
    const struct grammar *g = m->g;
    const struct object_node *o = g->nodes[t->then.node].object;
    const uint32_t *set = m->data + t->then.data, *seen = set + SET_BITS;
    uint32_t best = COST_MAX, comma = term_cost(g, o->mark[MARK_COMMA]);
    if (t->name) {
        const struct name_node *n = &tm->names->nodes[t->name - 1];
        for (uint32_t i = n->lo; i < n->hi; i++) {
            if (!(seen[set_words(o) + i / 32] >> i % 32 & 1))
                continue;
            uint32_t whole = prop_cost(g, o, i),
                     share = prop_missing(o, seen, i) ? whole : r->extra;
            uint32_t done = n->spelled + comma + (tm->bare ? (uint32_t)strlen(tm->open) : 1);
            if (whole < COST_MAX && r->total < COST_MAX)
                best = cost_min(best, whole - done + (r->total - cost_min(share, r->total)));
        }
    }
    if (t->q && others_allowed(m, t) && tm->left[t->q] < COST_MAX) {
        uint32_t c = cost_add(other_name_cost(g, o, t->q), 1 + term_cost(g, o->mark[MARK_COLON]));
        bool declared = t->name && tm->names->nodes[t->name - 1].name;
        /* A name that ends here is not allowed (again): one more character. */
        if (!tm->left[t->q] && (declared || (!tm->repeats && other_seen(m, t))))
            c = cost_add(c, 2);
        best = cost_min(best, cost_add(c, r->total - cost_min(r->extra, r->total)));
    }
    return best;
}

/* Cost after one more character in lo..hi. */
static uint32_t range_cost_to_end(const struct grammar_matcher *m, const struct term *tm,
                                  const struct thread *t, const struct object_cost *r, uint32_t lo,
                                  uint32_t hi)
{
    uint32_t best = COST_MAX, range = 0;
    for (uint32_t cp = lo; cp <= hi && cp <= CP_MAX;) {
        struct thread x = *t;
        uint32_t next = cp + 1;
        if (cp >= 128) { /* a whole range of the automaton at once */
            while (range + 1 < tm->dfa->n_ranges && tm->dfa->range_lo[range + 1] <= cp)
                range++;
            next = range + 1 < tm->dfa->n_ranges ? tm->dfa->range_lo[range + 1] : CP_MAX + 1;
        }
        if (term_feed(m, tm, &x, cp))
            best = cost_min(best, tm->kind == TERM_KEY ? key_cost_to_end(m, tm, &x, r)
                                                       : tm->left[x.q] + (tm->kind == TERM_STR));
        cp = next;
    }
    /* Declared names differ within a range. */
    if (tm->kind == TERM_KEY && t->name && hi >= 128)
        for (uint32_t c = tm->names->nodes[t->name - 1].child; c; c = tm->names->nodes[c].sibling) {
            struct thread x = *t;
            uint32_t cp = tm->names->nodes[c].cp;
            if (cp >= lo && cp <= hi && term_feed(m, tm, &x, cp))
                best = cost_min(best, key_cost_to_end(m, tm, &x, r));
        }
    return best;
}

/* Cost from inside a multi-byte character or escape to the end of the terminal. */
static uint32_t char_cost_to_end(const struct grammar_matcher *m, const struct term *tm,
                                 const struct thread *t, const struct object_cost *r)
{
    static const uint8_t two[] = {'"', '\\', '/', 8, 9, 10, 12, 13};
    uint32_t kind = t->sub >> 28, left = t->sub >> 24 & 15, v = t->sub & 0xffffff;
    uint32_t best = COST_MAX;
    switch (kind) {
    case SUB_UTF8:
        return cost_add(left, range_cost_to_end(m, tm, t, r, v << 6 * left,
                                                (v << 6 * left) | ((1u << 6 * left) - 1)));
    case SUB_ESC:
        for (size_t i = 0; i < sizeof two; i++)
            best = cost_min(best, cost_add(1, range_cost_to_end(m, tm, t, r, two[i], two[i])));
        return cost_min(best, cost_add(5, range_cost_to_end(m, tm, t, r, 0, 0xd7ff)));
    case SUB_HEX: {
        uint32_t lo = v << 4 * left, hi = lo | ((1u << 4 * left) - 1);
        if (lo >= 0xd800 && hi <= 0xdbff)
            return cost_add(left + 6,
                            range_cost_to_end(m, tm, t, r, 0x10000 + ((lo - 0xd800) << 10),
                                              0x10000 + ((hi - 0xd800) << 10 | 0x3ff)));
        return cost_add(left, range_cost_to_end(m, tm, t, r, lo, hi));
    }
    case SUB_LOW_BS:
    case SUB_LOW_U:
        return cost_add(
            kind == SUB_LOW_BS ? 6 : 5,
            range_cost_to_end(m, tm, t, r, 0x10000 + (v << 10), 0x10000 + (v << 10 | 0x3ff)));
    default: /* SUB_LOW */
        v >>= 12;
        return cost_add(
            left, range_cost_to_end(m, tm, t, r, 0x10000 + (v << 10), 0x10000 + (v << 10 | 0x3ff)));
    }
}

/* Cost of continuing a terminal that could have ended here: at cost_min one more character. (Other
 * threads represent its end.) */
static uint32_t continue_cost(const struct term *tm, uint32_t q)
{
    const struct dfa *d = tm->dfa;
    uint32_t best = COST_MAX;
    for (uint32_t c = 0; c < 128 + d->n_ranges; c++) {
        uint32_t cp = c < 128 ? c : d->range_lo[c - 128], to = dfa_step(d, q, cp);
        if (to)
            best = cost_min(best, cost_add(char_cost(tm, cp), tm->left[to]));
    }
    return best;
}

/* known: remaining cost of the object of a property's name, or NULL. */
static uint32_t thread_cost_to_end(const struct grammar_matcher *m, const struct thread *t,
                                   const struct object_cost *known)
{
    const struct term *tm = &m->g->terms[t->term];
    uint32_t kind = t->sub >> 28;
    if (tm->kind != TERM_KEY) {
        uint32_t own = tm->tag && !t->q ? 1 : 0; /* a single token */
        if (!own && kind == SUB_OPEN)
            own = cost_add(tm->left[1], 2);
        else if (!own && kind == SUB_IN && tm->kind == TERM_STR)
            own = cost_add(tm->left[t->q], 1);
        else if (!own && kind == SUB_IN)
            own = tm->dfa->label[t->q] ? continue_cost(tm, t->q) : tm->left[t->q];
        else if (!own && kind != SUB_DONE)
            own = char_cost_to_end(m, tm, t, NULL);
        return own < COST_MAX ? cost_add(own, item_total_cost(m, &t->then)) : COST_MAX;
    }
    const struct object_node *o = m->g->nodes[t->then.node].object;
    struct object_cost r = known ? *known : object_cost_to_end(m->g, o, m->data + t->then.data);
    uint32_t up = node_end_cost(m, t->then.node, t->then.origin), own;
    if (kind == SUB_OPEN) {
        struct thread in = *t;
        uint32_t n = tm->bare ? (uint32_t)strlen(tm->open) - (t->sub & 0xffffff) : 1;
        in.sub = 0;
        own = cost_add(n, key_cost_to_end(m, tm, &in, &r));
    } else {
        own = kind == SUB_IN ? key_cost_to_end(m, tm, t, &r) : char_cost_to_end(m, tm, t, &r);
    }
    return cost_add(own, up);
}

/* Cost from a point to the end; *best: the thread with the shortest completion. */
static uint32_t point_cost_to_end(struct grammar_matcher *m, const struct point *p, uint32_t *best)
{
    uint32_t least_cost = COST_MAX;
    *best = NO_LIMIT;
    compute_waiter_costs(m);
    for (uint32_t i = 0; i < p->n_threads; i++) {
        uint32_t c = thread_cost_to_end(m, &m->threads[p->threads + i], NULL);
        if (c <= least_cost && c < COST_MAX) { /* on a tie prefer the newest thread */
            least_cost = c;
            *best = i;
        }
    }
    return p->accepts ? 0 : least_cost;
}

/* ---- the completion ---- */

/* Cost after this byte, whether the thread's terminal ends or continues. */
static uint32_t step_cost_to_end(struct grammar_matcher *m, const struct thread *t,
                                 const struct object_cost *known)
{
    const struct term *tm = &m->g->terms[t->term];
    uint32_t cost = COST_MAX;
    if (term_ends(m, t)) {
        if (tm->kind != TERM_KEY)
            return item_total_cost(m, &t->then);
        const struct object_node *o = m->g->nodes[t->then.node].object;
        uint32_t label = key_label(m, tm, t), k = label - 1;
        if (!label)
            return COST_MAX;
        struct object_cost r = *known;
        const uint32_t *seen = m->data + t->then.data + SET_BITS;
        uint32_t share =
            k < o->n_props && prop_missing(o, seen, k) ? prop_cost(m->g, o, k) : r.extra;
        uint32_t value =
            m->g->node_cost[k < o->n_props ? o->prop[k].node : o->others[k - o->n_props]];
        cost = cost_add(value, cost_add(term_cost(m->g, o->mark[MARK_COLON]),
                                        r.total - cost_min(share, r.total)));
        return cost_add(cost, node_end_cost(m, t->then.node, t->then.origin));
    }
    return thread_cost_to_end(m, t, known);
}

/* The next byte of the shortest completion, or -1. */
static int best_byte(struct grammar_matcher *m, const struct thread *t, uint32_t cost)
{
    uint32_t best = COST_MAX;
    int byte = -1;
    const struct term *tm = &m->g->terms[t->term];
    struct object_cost r = {0};
    if (tm->kind == TERM_KEY)
        r = object_cost_to_end(m->g, m->g->nodes[t->then.node].object, m->data + t->then.data);
    for (int b = 0x20; b < 0x120; b++) { /* control characters last */
        struct thread x = *t;
        uint32_t c = COST_MAX;
        if (tm->kind == TERM_FREE) {
            x.q = dfa_step(tm->dfa, x.q, (uint8_t)b);
            c = tm->left[x.q];
        } else if (term_step(m, &x, (uint8_t)b)) {
            c = step_cost_to_end(m, &x, &r);
        }
        if (c < best) {
            best = c;
            byte = (uint8_t)b;
        }
        if (tm->kind != TERM_FREE && best < cost)
            break; /* no byte can save more than its own cost */
    }
    return byte;
}

/* The special token that stops the free text here, or -1. */
static int32_t stop_token(const struct grammar_matcher *m, const struct thread *t)
{
    const struct free_text *f = m->g->terms[t->term].free;
    int32_t id = tokenizer_find(m->v->tok, f->again[0], strlen(f->again[0]));
    return t->q == f->idle && id >= 0 && !vocab_usable(m->v->tok, id) &&
                   !tokenizer_is_end(m->v->tok, id)
               ? id
               : -1;
}

/* One step of the completion: a byte, or a special token (*token). False if no completion is
 * known. */
static bool completion_step(struct grammar_matcher *m, int *byte, int32_t *token)
{
    uint32_t best, cost = point_cost_to_end(m, &m->now, &best);
    *byte = -1;
    *token = -1;
    if (cost >= COST_MAX || best == NO_LIMIT)
        return false;
    const struct thread t = m->threads[m->now.threads + best];
    const struct term *tm = &m->g->terms[t.term];
    if (tm->tag && !t.q)
        *token = m->tag_token[t.term];
    else if (tm->kind == TERM_FREE)
        *token = stop_token(m, &t);
    if (*token < 0)
        *byte = best_byte(m, &t, cost);
    if (*token >= 0 && tm->kind == TERM_FREE) {
        size_t n;
        const char *p = tokenizer_piece(m->v->tok, *token, &n);
        return match_bytes(m, p, n);
    }
    if (*token >= 0)
        return match_tag(m, *token);
    char c = (char)*byte;
    return *byte >= 0 && match_bytes(m, &c, 1);
}

/* The longest token that is a prefix of these bytes; *n: its length. */
static int32_t longest_token(const struct grammar_matcher *m, const char *p, size_t len, size_t *n)
{
    const struct grammar_vocab *v = m->v;
    int32_t best = -1;
    *n = 0;
    for (uint32_t i = 0; i < m->n_spelled; i++) {
        size_t k;
        const char *piece = tokenizer_piece(v->tok, m->spelled[i], &k);
        if (k > *n && k <= len && !memcmp(piece, p, k)) {
            best = m->spelled[i];
            *n = k;
        }
    }
    for (int g = 0; g <= DFA_GROUPS; g++) {
        const struct vocab_trie *trie = &v->trie[g];
        uint32_t i = 0, end = trie->n;
        size_t at = 0;
        while (i < end && at < len) {
            const struct trie_node *x = &trie->nodes[i];
            if (x->byte != (uint8_t)p[at]) {
                i = x->skip;
                continue;
            }
            at++;
            if (x->token >= 0 && at > *n) {
                best = x->token;
                *n = at;
            }
            end = x->skip;
            i++;
        }
    }
    return best;
}

/* The number of tokens that complete the reply from here, including the ending token. *first is the
 * first of them (-1: the ending token). 0 if no completion is known. */
static uint32_t completion_tokens(struct grammar_matcher *m, int32_t *first)
{
    struct point now = m->now;
    uint32_t n_threads = m->n_threads, count = 1;
    struct point heights = {.n_rows = m->n_rows, .n_waiters = m->n_waiters, .n_data = m->n_data};
    struct buf text = {0};
    bool ok = true, head = true;
    *first = -1;
    for (size_t steps = 0; ok && !m->now.accepts; steps++) {
        int byte;
        int32_t token;
        ok = steps < COMPLETION_MAX && completion_step(m, &byte, &token) && !m->error;
        if (ok && byte >= 0)
            buf_addc(&text, (char)byte);
        if (!ok || (byte >= 0 && !m->now.accepts))
            continue;
        /* End of a run of bytes: count its tokens. */
        for (size_t at = 0, n; ok && at < text.len; at += n, count++) {
            int32_t id = longest_token(m, text.p + at, text.len - at, &n);
            ok = id >= 0;
            if (head)
                *first = id;
            head = false;
        }
        buf_reset(&text);
        if (token >= 0) {
            count++;
            if (head)
                *first = token;
            head = false;
        }
    }
    m->now = now;
    match_pop(m, &heights, n_threads);
    if (!match_given_up(m))
        m->error = NULL; /* errors of the trial do not count */
    buf_clear(&text);
    return ok ? count : 0;
}

/* ---- interface ---- */

enum { MIN_SLACK = 8 };

void grammar_set_budget(struct grammar_matcher *m, int tokens)
{
    m->budget = tokens > 0 ? (uint32_t)tokens : 0;
    m->slack = MIN_SLACK + cost_min(m->g->detour / 2, m->budget / 2);
    m->next_check = 0;
    m->frugal = false;
}

bool match_must_end(struct grammar_matcher *m, int32_t *token)
{
    if (!m->budget || m->n_history >= m->budget || m->n_history < m->next_check)
        return false;
    uint32_t left = m->budget - (uint32_t)m->n_history, best;
    const struct thread *t = match_free(m, &m->now);
    if (t && m->g->terms[t->term].free->may_end)
        return false;
    uint32_t cost = point_cost_to_end(m, &m->now, &best);
    uint32_t n = cost;
    if (cost + m->slack >= left) {
        n = cost < COST_MAX && cost > 2 * COMPLETION_MAX ? 0 : completion_tokens(m, token);
        if (m->error) /* given up */
            return false;
        if (!n || n > left) {
            /* The budget is too small, so the reply will be cut: let the model continue freely. The
             * completion gets shorter with the model's own tokens, so it is not recomputed for
             * every token. */
            m->next_check = m->n_history + (n ? 1 + (n - left) / 8 : RETRY_TOKENS);
            return false;
        }
        if (n + MIN_SLACK >= left)
            return true;
        m->frugal |= n + m->slack >= left;
    }
    /* Far from the end, check only now and then: the cost grows by at most eight bytes per token,
     * plus one detour. */
    if (n + 2 * m->slack < left)
        m->next_check = m->n_history + (left - n - 2 * m->slack) / 8;
    return false;
}
