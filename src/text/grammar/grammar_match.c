/*
 * The matcher: an Earley parser over rules that are graphs, with automata as terminals. It is the
 * state of one sequence; the grammar and the vocabulary it refers to never change.
 *
 * A point of the text is a list of threads. A thread is a terminal in progress, with the parser
 * item that follows it. A terminal that may end both ends and continues, so nothing depends on
 * longest matches. When one ends, the closure runs: items are completed, called rules start, new
 * terminals start. A row is created only where rules are called; it records which item waits for
 * which rule. Items carry data: the count of an array, or the property set of an object.
 *
 * Invariants:
 * 1. Threads, rows, waiters and data are stacks. A point records their heights, and returning to it
 *    truncates them. History and mask walks rely only on this.
 * 2. A waiter of row r never changes once a later row exists.
 * 3. Every live point can be completed (see grammar_int.h), so a mask is empty only if a limit was
 *    exceeded.
 */
#include "text/grammar/grammar_term.h"

#include "base/mem.h"

#include <string.h>

enum {
    THREADS_MAX = 1 << 19, /* history and walk together; 32 bytes each */
    WAITERS_MAX = 1 << 19,
    DATA_MAX = 1 << 21,
    ITEMS_MAX = 20000, /* per closure */
};

bool match_over_limit(struct grammar_matcher *m, const char *what)
{
    if (!m->error)
        m->error = what;
    return false;
}

static const char given_up[] = "the mask was given up";

void match_begin_work(struct grammar_matcher *m)
{
    m->work = 0;
    m->pause_at = m->go_on ? GRAMMAR_PIECE : SIZE_MAX;
}

bool match_given_up(const struct grammar_matcher *m)
{
    return m->error == given_up;
}

bool match_pause(struct grammar_matcher *m)
{
    m->pause_at = m->work + GRAMMAR_PIECE;
    return m->go_on(m->go_on_arg) || match_over_limit(m, given_up);
}

static struct thread *thread_push(struct grammar_matcher *m)
{
    if (m->n_threads == m->cap_threads) {
        if (m->n_threads >= THREADS_MAX) {
            match_over_limit(m, "the constraint has over 524288 threads in its history");
            return NULL;
        }
        m->cap_threads *= 2;
        m->threads = mem_realloc(m->threads, m->cap_threads, sizeof *m->threads);
    }
    return &m->threads[m->n_threads++];
}

/* ---- objects: property sets ---- */

/* For schema order: after p, earlier properties can no longer be written. False if p depends on one
 * of them, or if too few later properties remain for minProperties. */
static bool order_fits(const struct object_node *o, const uint32_t *set,
                       const struct object_prop *p)
{
    const uint32_t *seen = set + SET_BITS;
    for (uint32_t k = 0; k < p->n_needs; k++) {
        uint32_t need = o->needs[p->needs + k];
        if (!(seen[need / 32] >> need % 32 & 1) && o->prop[need].order < p->order)
            return false;
    }
    if (set[SET_COUNT] + 1 >= o->min || o->n_others)
        return true;
    uint32_t left = 0;
    for (uint32_t i = 0; i < o->n_props; i++)
        left += o->prop[i].order > p->order && o->prop[i].node != NO_LIMIT;
    return set[SET_COUNT] + 1 + left >= o->min;
}

/* Computes which properties may come next from those seen. Linear in the object's properties, once
 * per property written. */
static void set_update_allowed(const struct object_node *o, uint32_t *set, bool frugal)
{
    uint32_t words = set_words(o), *seen = set + SET_BITS, *allowed = seen + words;
    uint32_t missing = 0, last = 0, barrier = NO_LIMIT;
    memset(allowed, 0, words * sizeof *allowed);
    for (uint32_t i = 0; i < o->n_props; i++) {
        bool has = seen[i / 32] >> i % 32 & 1;
        if (has && o->prop[i].order >= last)
            last = o->prop[i].order + 1;
    }
    /* First `allowed` collects the missing properties: required ones, and those that seen ones
     * depend on. */
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct object_prop *p = &o->prop[i];
        bool has = seen[i / 32] >> i % 32 & 1;
        if (p->required && !has)
            allowed[i / 32] |= 1u << i % 32;
        for (uint32_t k = 0; has && k < p->n_needs; k++) {
            uint32_t need = o->needs[p->needs + k];
            if (!(seen[need / 32] >> need % 32 & 1))
                allowed[need / 32] |= 1u << need % 32;
        }
    }
    for (uint32_t w = 0; w < words; w++)
        missing += (uint32_t)__builtin_popcount(allowed[w]);
    for (uint32_t i = 0; i < o->n_props; i++)
        if (allowed[i / 32] >> i % 32 & 1 && o->prop[i].order < barrier)
            barrier = o->prop[i].order;
    bool room = o->max == NO_LIMIT || set[SET_COUNT] + missing < o->max;
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct object_prop *p = &o->prop[i];
        uint32_t bit = 1u << i % 32, *to = &allowed[i / 32];
        bool must = *to & bit;
        *to &= ~bit;
        if (seen[i / 32] & bit || p->node == NO_LIMIT)
            continue;
        if (o->in_order && (p->order < last || p->order > barrier || !order_fits(o, set, p)))
            continue;
        if (!must && (!room || (frugal && missing)))
            continue;
        if (!must && p->n_needs && o->max != NO_LIMIT) {
            /* its dependencies must fit as well */
            uint32_t more = 0;
            for (uint32_t k = 0; k < p->n_needs; k++) {
                uint32_t need = o->needs[p->needs + k];
                more += !(seen[need / 32] >> need % 32 & 1) && !o->prop[need].required;
            }
            if (set[SET_COUNT] + missing + 1 + more > o->max)
                continue;
        }
        *to |= bit;
    }
    /* In schema order, undeclared properties come last; from then on every declared one is
     * optional. */
    set[SET_OTHERS] = o->n_others && room && (!missing || (!o->in_order && !frugal));
}

/* Whether the object may close. */
static bool set_complete(const struct object_node *o, const uint32_t *set)
{
    const uint32_t *seen = set + SET_BITS;
    if (set[SET_COUNT] < o->min)
        return false;
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct object_prop *p = &o->prop[i];
        bool has = seen[i / 32] >> i % 32 & 1;
        if (!has && p->required)
            return false;
        for (uint32_t k = 0; has && k < p->n_needs; k++) {
            uint32_t need = o->needs[p->needs + k];
            if (!(seen[need / 32] >> need % 32 & 1))
                return false;
        }
    }
    return true;
}

static bool set_has_allowed(const struct object_node *o, const uint32_t *set)
{
    return set[SET_OTHERS] || bits_any(set + SET_BITS + set_words(o), 0, o->n_props);
}

/* Creates a set: `old` (or an empty set) plus a property with this label, and its hash if
 * undeclared. */
static uint32_t set_make(struct grammar_matcher *m, const struct object_node *o, uint32_t old,
                         bool first, uint32_t label, uint32_t hash)
{
    uint32_t words = set_words(o), n = SET_BITS + 2 * words, at = m->n_data;
    while (m->n_data + n + 2 > m->cap_data) {
        if (m->cap_data >= DATA_MAX) {
            match_over_limit(m, "the constraint has over 8 MiB of objects in its history");
            return 0;
        }
        m->cap_data *= 2;
        m->data = mem_realloc(m->data, m->cap_data, sizeof *m->data);
    }
    m->n_data += n;
    uint32_t *set = m->data + at;
    if (first) {
        memset(set, 0, n * sizeof *set);
    } else {
        memcpy(set, m->data + old, n * sizeof *set);
        set[SET_COUNT]++;
        if (label <= o->n_props) {
            set[SET_BITS + (label - 1) / 32] |= 1u << (label - 1) % 32;
        } else {
            m->data[m->n_data] = hash;
            m->data[m->n_data + 1] = set[SET_CHAIN];
            set[SET_CHAIN] = m->n_data;
            set[SET_BLOOM + (hash >> 5 & 1)] |= 1u << (hash & 31);
            m->n_data += 2;
        }
    }
    set_update_allowed(o, set, m->frugal);
    m->work += 1 + o->n_props / 8;
    return at;
}

/* ---- the closure ---- */

static uint32_t item_hash(const struct item *it)
{
    return it->node * 31 + it->pos * 17 + it->data * 7 + it->origin * 3;
}

/* Spreads a long list over more heads. */
static void todo_spread(struct grammar_matcher *m)
{
    m->todo_mask = TODO_HEADS_MOST - 1;
    memset(m->todo_head, 0, sizeof m->todo_head);
    for (uint32_t i = 0; i < m->n_todo; i++) {
        uint32_t h = item_hash(&m->todo[i]) & m->todo_mask;
        m->todo_next[i] = m->todo_head[h];
        m->todo_head[h] = (uint16_t)(i + 1);
    }
}

static void todo_add(struct grammar_matcher *m, struct item it)
{
    if (m->n_todo == 4 * TODO_HEADS && m->todo_mask < TODO_HEADS_MOST - 1)
        todo_spread(m);
    uint32_t h = item_hash(&it) & m->todo_mask;
    for (uint32_t i = m->todo_head[h]; i; i = m->todo_next[i - 1])
        if (!memcmp(&m->todo[i - 1], &it, sizeof it))
            return;
    if (m->n_todo >= ITEMS_MAX) {
        match_over_limit(m, "the constraint has over 20000 items at one place");
        return;
    }
    if (m->n_todo == m->cap_todo) {
        m->cap_todo *= 2;
        m->todo = mem_realloc(m->todo, m->cap_todo, sizeof *m->todo);
        m->todo_next = mem_realloc(m->todo_next, m->cap_todo, sizeof *m->todo_next);
    }
    m->todo[m->n_todo] = it;
    m->todo_next[m->n_todo] = m->todo_head[h];
    m->todo_head[h] = (uint16_t)++m->n_todo;
}

static void start_term(struct grammar_matcher *m, uint32_t term, struct item then)
{
    const struct term *tm = &m->g->terms[term];
    bool is_token = tm->tag && m->tag_token[term] >= 0;
    if (tm->token_only && !is_token)
        return;
    struct thread *t = thread_push(m);
    if (!t)
        return;
    *t = (struct thread){.term = term, .q = 1, .then = then};
    if (is_token)
        t->q = 0; /* accepts no byte, only match_tag */
    if (tm->bare ? *tm->open : tm->kind == TERM_STR || tm->kind == TERM_KEY)
        t->sub = SUB(SUB_OPEN, 0, 0);
    if (tm->kind == TERM_KEY) {
        t->name = tm->names->n ? 1 : 0;
        if (!others_allowed(m, t))
            t->q = 0;
    }
}

static void call_node(struct grammar_matcher *m, uint32_t callee, struct item then)
{
    uint32_t row = m->n_rows;
    if (m->n_waiters == m->cap_waiters) {
        if (m->n_waiters >= WAITERS_MAX) {
            match_over_limit(m, "the constraint has over 524288 calls in its history");
            return;
        }
        m->cap_waiters *= 2;
        m->waiters = mem_realloc(m->waiters, m->cap_waiters, sizeof *m->waiters);
    }
    m->waiters[m->n_waiters++] = (struct rule_waiter){.callee = callee, .then = then};
    const struct gnode *n = &m->g->nodes[callee];
    todo_add(m, (struct item){callee, n->kind == NODE_GRAPH ? n->start : 0, 0, row});
    for (uint32_t i = 0; i < m->n_nulls; i++)
        if (m->nulls[i] == callee)
            todo_add(m, then);
}

/* Completes a rule that started at row `origin`. */
static void complete(struct grammar_matcher *m, uint32_t node, uint32_t origin, uint32_t row_start,
                     bool *accepts)
{
    if (node == 0 && origin == 0)
        *accepts = true;
    uint32_t from, to;
    if (origin == m->n_rows) { /* the current row: more waiters may be added later */
        for (uint32_t i = 0; i < m->n_nulls; i++)
            if (m->nulls[i] == node)
                return;
        if (m->n_nulls == m->cap_nulls) {
            m->cap_nulls *= 2;
            m->nulls = mem_realloc(m->nulls, m->cap_nulls, sizeof *m->nulls);
        }
        m->nulls[m->n_nulls++] = node;
        from = row_start;
        to = m->n_waiters;
    } else {
        from = m->rows[origin];
        to = origin + 1 < m->n_rows ? m->rows[origin + 1] : row_start;
    }
    m->work += to - from;
    for (uint32_t i = from; i < to; i++)
        if (m->waiters[i].callee == node)
            todo_add(m, m->waiters[i].then);
}

/* Arrays. pos: 0 before "[", 1 after it, 2 after an item, 3 complete, 4 after ",". data: the number
 * of items, and in the upper half how many satisfy `contains`. Counts saturate once they make no
 * difference. */
enum { COUNT_CAP = 0xffff };

/* The number of positions from n on whose items may satisfy `contains`. */
static uint32_t array_places(const struct array_node *a, uint32_t n)
{
    uint32_t k = 0;
    for (uint32_t i = n; i < a->n_prefix && i < a->max; i++)
        k += a->both[i] != NO_LIMIT;
    if (n < a->n_prefix)
        n = a->n_prefix;
    if (a->both[a->n_prefix] == NO_LIMIT || n >= a->max)
        return k;
    return a->max == NO_LIMIT ? NO_LIMIT : k + (a->max - n);
}

/* The next item, or none if the array is full. */
static void expand_item(struct grammar_matcher *m, const struct item *it)
{
    const struct array_node *a = m->g->nodes[it->node].array;
    uint32_t n = it->data & COUNT_CAP, fit = it->data >> 16;
    struct item to = *it;
    if (n >= a->max)
        return;
    uint32_t place = n < a->n_prefix ? n : a->n_prefix;
    to.pos = 2;
    uint32_t stop = a->min > a->n_prefix ? a->min : a->n_prefix;
    if (a->max != NO_LIMIT || a->n_contains)
        stop = COUNT_CAP;
    to.data = (fit << 16) | (n < stop ? n + 1 : n);
    /* Enough positions must remain for the items that `contains` still requires. */
    uint32_t need = fit < a->n_contains ? a->n_contains - fit : 0;
    if (!need || array_places(a, n + 1) >= need)
        call_node(m, n < a->n_prefix ? a->prefix[n] : a->items, to);
    if (need && a->both[place] != NO_LIMIT) {
        to.data += 1u << 16;
        call_node(m, a->both[place], to);
    }
}

static void expand_array(struct grammar_matcher *m, const struct item *it)
{
    const struct array_node *a = m->g->nodes[it->node].array;
    uint32_t n = it->data & COUNT_CAP, fit = it->data >> 16;
    struct item to = *it;
    if (it->pos == 0 && a->mark[MARK_OPEN] != NO_LIMIT) {
        to.pos = 1;
        start_term(m, a->mark[MARK_OPEN], to);
        return;
    }
    if (it->pos != 2) {
        if (it->pos <= 1 && a->min == 0 && fit >= a->n_contains) {
            to.pos = 3;
            start_term(m, a->mark[MARK_EMPTY], to);
            if (m->frugal)
                return;
        }
        expand_item(m, it);
        return;
    }
    bool complete = n >= a->min && fit >= a->n_contains;
    if (n < a->max && !(complete && m->frugal)) {
        to.pos = 4;
        if (a->mark[MARK_COMMA] == NO_LIMIT)
            expand_item(m, it);
        else
            start_term(m, a->mark[MARK_COMMA], to);
    }
    if (complete) {
        to.pos = 3;
        start_term(m, a->mark[MARK_CLOSE], to);
    }
}

/* Objects. pos: 0 before "{", 1 after it (no set yet), 2 after "," (a set), 3 after a value, 4
 * complete, 5 + k and 5 + K + k before and after the colon of the property with label k + 1. */
static void expand_object(struct grammar_matcher *m, const struct item *it)
{
    const struct object_node *o = m->g->nodes[it->node].object;
    uint32_t labels = o->n_props + o->n_others;
    struct item to = *it;
    if (it->pos == 0 && o->mark[MARK_OPEN] != NO_LIMIT) {
        to.pos = 1;
        start_term(m, o->mark[MARK_OPEN], to);
    } else if (it->pos <= 2) {
        if (it->pos <= 1) {
            to.data = set_make(m, o, 0, true, 0, 0);
            if (m->error)
                return;
            if (set_complete(o, m->data + to.data)) {
                to.pos = 4;
                start_term(m, o->mark[MARK_EMPTY], to);
                if (m->frugal)
                    return;
            }
        }
        to.pos = 2; /* the label is added when the key ends: see end_item */
        if (set_has_allowed(o, m->data + to.data))
            start_term(m, o->key, to);
    } else if (it->pos == 3) {
        bool done = set_complete(o, m->data + it->data);
        if (set_has_allowed(o, m->data + it->data) && !(done && m->frugal)) {
            to.pos = 2;
            start_term(m, o->mark[MARK_COMMA] == NO_LIMIT ? o->key : o->mark[MARK_COMMA], to);
        }
        if (done) {
            to.pos = 4;
            start_term(m, o->mark[MARK_CLOSE], to);
        }
    } else if (it->pos < 5 + labels && o->mark[MARK_COLON] != NO_LIMIT) {
        to.pos += labels;
        start_term(m, o->mark[MARK_COLON], to);
    } else {
        uint32_t k = it->pos - 5 - (it->pos < 5 + labels ? 0 : labels);
        to.pos = 3;
        call_node(m, k < o->n_props ? o->prop[k].node : o->others[k - o->n_props], to);
    }
}

/* The item that follows a terminal ending here. */
static struct item end_item(struct grammar_matcher *m, const struct thread *t)
{
    const struct term *tm = &m->g->terms[t->term];
    struct item it = t->then;
    if (tm->kind == TERM_KEY) {
        const struct object_node *o = m->g->nodes[it.node].object;
        uint32_t label = key_label(m, tm, t);
        it.data = set_make(m, o, it.data, false, label, t->hash);
        it.pos = 5 + label - 1;
    }
    return it;
}

/* Whether this edge is about as short as the shortest one from its state, or the end. */
static bool edge_frugal(const struct grammar *g, uint32_t state, const struct edge *e)
{
    return grammar_edge_cost(g, e) <= g->state_cost[state] + 16;
}

/* Processes the items of the list until no new one appears. Pushes the threads of new terminals. */
static void closure(struct grammar_matcher *m, struct point *to, bool first)
{
    uint32_t row_start = m->n_waiters;
    const struct grammar *g = m->g;
    m->n_nulls = 0;
    for (uint32_t i = 0; i < m->n_todo && !m->error && match_goes_on(m); i++) {
        struct item it = m->todo[i];
        const struct gnode *n = &g->nodes[it.node];
        m->work++;
        if (n->kind == NODE_ARRAY) {
            if (it.pos == 3)
                complete(m, it.node, it.origin, row_start, &to->accepts);
            else
                expand_array(m, &it);
        } else if (n->kind == NODE_OBJECT) {
            if (it.pos == 4)
                complete(m, it.node, it.origin, row_start, &to->accepts);
            else
                expand_object(m, &it);
        } else {
            if (g->state_final[it.pos])
                complete(m, it.node, it.origin, row_start, &to->accepts);
            for (uint32_t e = g->state_at[it.pos]; e < g->state_at[it.pos + 1]; e++) {
                struct item then = it;
                if (m->frugal && !edge_frugal(g, it.pos, &g->edges[e]))
                    continue;
                then.pos = g->edges[e].to;
                if (g->edges[e].call)
                    call_node(m, g->edges[e].target, then);
                else
                    start_term(m, g->edges[e].target, then);
            }
        }
    }
    if (m->n_waiters > row_start || first) {
        if (m->n_rows == m->cap_rows) {
            m->cap_rows *= 2;
            m->rows = mem_realloc(m->rows, m->cap_rows, sizeof *m->rows);
        }
        m->rows[m->n_rows++] = row_start;
    }
}

static void todo_clear(struct grammar_matcher *m)
{
    m->n_todo = 0;
    m->todo_mask = TODO_HEADS - 1;
    memset(m->todo_head, 0, TODO_HEADS * sizeof *m->todo_head);
}

const struct thread *match_free(const struct grammar_matcher *m, const struct point *p)
{
    const struct thread *t = &m->threads[p->threads];
    return p->n_threads && m->g->terms[t->term].kind == TERM_FREE ? t : NULL;
}

static void point_end(struct grammar_matcher *m, struct point *p)
{
    p->n_threads = m->n_threads - p->threads;
    p->n_rows = m->n_rows;
    p->n_waiters = m->n_waiters;
    p->n_data = m->n_data;
    const struct thread *t = match_free(m, p);
    p->accepts |= t && m->g->terms[t->term].free->may_end;
}

void match_pop(struct grammar_matcher *m, const struct point *p, uint32_t n_threads)
{
    m->n_threads = n_threads;
    m->n_rows = p->n_rows;
    if (m->n_costed > p->n_rows)
        m->n_costed = p->n_rows;
    m->n_waiters = p->n_waiters;
    m->n_data = p->n_data;
}

bool match_end_term(struct grammar_matcher *m, const struct thread *t, struct point *to)
{
    *to = (struct point){.threads = m->n_threads};
    todo_clear(m);
    struct thread copy = *t;
    todo_add(m, end_item(m, &copy));
    closure(m, to, false);
    point_end(m, to);
    return !m->error && (to->n_threads || to->accepts);
}

bool match_add_thread(struct grammar_matcher *m, const struct thread *t, struct point *p)
{
    struct thread copy = *t, *put = thread_push(m);
    if (!put)
        return false;
    *put = copy;
    p->n_threads++;
    return true;
}

/* Merges identical threads. */
static void threads_dedup(struct grammar_matcher *m, const struct point *p)
{
    struct thread *t = m->threads + p->threads;
    uint32_t n = m->n_threads - p->threads, k = 0;
    if (n < 2)
        return;
    uint32_t head[128] = {0};
    if (n > m->cap_chain) {
        m->cap_chain = 2 * n;
        m->chain = mem_realloc(m->chain, m->cap_chain, sizeof *m->chain);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t h =
            (t[i].term * 5 + t[i].q * 31 + t[i].then.pos * 17 + t[i].then.origin * 7) & 127;
        uint32_t c = head[h];
        while (c && memcmp(&t[c - 1], &t[i], sizeof *t))
            c = m->chain[c - 1];
        if (c)
            continue;
        t[k] = t[i];
        m->chain[k] = head[h];
        head[h] = ++k;
    }
    m->work += n;
    m->n_threads = p->threads + k;
}

/* Ends the tags of `from` that have this token, or (token < 0) that `text` starts with; *n is the
 * tag's length. False if there are none or nothing may follow. */
static bool end_tags(struct grammar_matcher *m, const struct point *from, int32_t token,
                     const char *text, size_t *n, struct point *to)
{
    *n = 0;
    *to = (struct point){.threads = m->n_threads};
    for (uint32_t i = 0; m->tag_token && i < from->n_threads; i++) {
        const struct thread *t = &m->threads[from->threads + i];
        const char *tag = m->g->terms[t->term].tag;
        if (!tag || t->q || (token >= 0 && m->tag_token[t->term] != token))
            continue;
        size_t len = strlen(tag);
        if ((text && strncmp(tag, text, len) != 0) || (*n && *n != len))
            continue;
        if (!*n)
            todo_clear(m);
        *n = len;
        todo_add(m, t->then);
    }
    if (!*n)
        return false;
    closure(m, to, false);
    point_end(m, to);
    return !m->error && (to->n_threads || to->accepts);
}

/* Moves the threads of p down to `base`, dropping the threads in between. */
static void point_move_down(struct grammar_matcher *m, struct point *p, uint32_t base)
{
    memmove(m->threads + base, m->threads + p->threads, p->n_threads * sizeof *m->threads);
    p->threads = base;
    m->n_threads = base + p->n_threads;
}

/* One byte of free text. The following terminals then read a completed stop. */
static bool step_free(struct grammar_matcher *m, const struct point *from, uint8_t byte,
                      struct point *to)
{
    struct thread t = m->threads[from->threads];
    const struct term *tm = &m->g->terms[t.term];
    CHECK(from->n_threads == 1, "free text beside something else");
    t.q = dfa_step(tm->dfa, t.q, byte);
    uint32_t label = tm->dfa->label[t.q];
    m->work++;
    if (!label) {
        *to = (struct point){.threads = m->n_threads};
        return match_add_thread(m, &t, to) && (point_end(m, to), true);
    }
    const char *text = tm->free->again[__builtin_ctz(label)];
    uint32_t base = m->n_threads;
    bool ok = match_end_term(m, &t, to);
    while (ok && *text) {
        struct point next;
        size_t n;
        ok = end_tags(m, to, -1, text, &n, &next);
        if (!n)
            ok = match_step(m, to, (uint8_t)*text, &next);
        text += n ? n : 1;
        if (ok)
            point_move_down(m, &next, base);
        *to = next;
    }
    return ok;
}

bool match_step(struct grammar_matcher *m, const struct point *from, uint8_t byte, struct point *to)
{
    uint32_t n = from->n_threads;
    bool ended = false;
    if (match_free(m, from))
        return step_free(m, from, byte, to);
    *to = (struct point){.threads = m->n_threads};
    m->work += n;
    for (uint32_t i = 0; i < n; i++) {
        struct thread t = m->threads[from->threads + i];
        if (!term_step(m, &t, byte))
            continue;
        if (term_ends(m, &t)) {
            if (!ended)
                todo_clear(m);
            ended = true;
            todo_add(m, end_item(m, &t));
            const struct term *tm = &m->g->terms[t.term];
            if (!term_is_open(tm) || !tm->dfa->moves[t.q])
                continue; /* it cannot continue */
        }
        struct thread *put = thread_push(m);
        if (!put)
            return false;
        *put = t;
    }
    if (ended)
        closure(m, to, false);
    if (!match_goes_on(m))
        return false;
    threads_dedup(m, to);
    point_end(m, to);
    if (m->work > m->work_max)
        return match_over_limit(m, "a mask takes over 8388608 steps");
    return !m->error && (to->n_threads || to->accepts);
}

void match_begin(struct grammar_matcher *m)
{
    struct point p = {0};
    const struct gnode *root = &m->g->nodes[0];
    todo_clear(m);
    todo_add(m, (struct item){0, root->kind == NODE_GRAPH ? root->start : 0, 0, 0});
    closure(m, &p, true); /* row 0 belongs to the root, even if nothing is called */
    point_end(m, &p);
    m->now = p;
}

bool match_tag(struct grammar_matcher *m, int32_t token)
{
    struct point to;
    size_t n;
    uint32_t base = m->n_threads;
    if (!end_tags(m, &m->now, token, NULL, &n, &to)) {
        match_pop(m, &m->now, base);
        return false;
    }
    m->now = to;
    return true;
}

/* Accepts the bytes of a token. On success the new point's threads directly follow the old
 * one's. */
bool match_bytes(struct grammar_matcher *m, const char *s, size_t n)
{
    struct point from = m->now, to = {0};
    uint32_t base = m->n_threads;
    for (size_t i = 0; i < n; i++) {
        if (!match_step(m, &from, (uint8_t)s[i], &to)) {
            match_pop(m, &m->now, base);
            return false;
        }
        point_move_down(m, &to, base);
        from = to;
    }
    m->now = from;
    return true;
}
