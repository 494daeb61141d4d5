/*
 * Compiled grammars: construction, reference counts, choosing the compiler for a source, and the
 * cache. Owns `struct grammar` and `struct grammar_cache`; knows no syntax.
 */
#include "text/grammar/grammar_int.h"

#include "base/mem.h"

#include <pthread.h>
#include <string.h>

struct grammar *grammar_new(void)
{
    struct grammar *g = mem_zalloc(1, sizeof *g);
    static uint64_t serial;
    g->refs = 1;
    g->serial = __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
    return g;
}

uint32_t grammar_add_term(struct grammar *g, enum term_kind kind, struct dfa *dfa)
{
    if (g->n_terms == g->cap_terms) {
        g->cap_terms = g->cap_terms ? 2 * g->cap_terms : 32;
        g->terms = mem_realloc(g->terms, g->cap_terms, sizeof *g->terms);
    }
    g->terms[g->n_terms] = (struct term){.kind = kind, .dfa = dfa};
    return g->n_terms++;
}

uint32_t grammar_add_node(struct grammar *g, enum node_kind kind)
{
    if (g->n_nodes == g->cap_nodes) {
        g->cap_nodes = g->cap_nodes ? 2 * g->cap_nodes : 32;
        g->nodes = mem_realloc(g->nodes, g->cap_nodes, sizeof *g->nodes);
    }
    g->nodes[g->n_nodes] = (struct gnode){.kind = kind};
    return g->n_nodes++;
}

uint32_t grammar_add_state(struct grammar *g, bool final)
{
    if (g->n_states + 2 > g->cap_states) {
        g->cap_states = g->cap_states ? 2 * g->cap_states : 64;
        g->state_at = mem_realloc(g->state_at, g->cap_states, sizeof *g->state_at);
        g->state_final = mem_realloc(g->state_final, g->cap_states, sizeof *g->state_final);
    }
    g->state_at[g->n_states] = g->n_edges;
    g->state_final[g->n_states] = final;
    return g->n_states++;
}

void grammar_add_edge(struct grammar *g, bool call, uint32_t target, uint32_t to)
{
    if (g->n_edges == g->cap_edges) {
        g->cap_edges = g->cap_edges ? 2 * g->cap_edges : 64;
        g->edges = mem_realloc(g->edges, g->cap_edges, sizeof *g->edges);
    }
    g->edges[g->n_edges++] = (struct edge){call, target, to};
}

uint32_t grammar_add_tag(struct grammar *g, struct dfa *dfa, const char *text, bool token_only)
{
    uint32_t id = grammar_add_term(g, TERM_RAW, dfa);
    g->terms[id].tag = mem_strdup(text);
    g->terms[id].token_only = token_only;
    g->tags = true;
    return id;
}

/* Renumbers node references after an import. */
static void renumber(uint32_t *v, uint32_t n, uint32_t by)
{
    for (uint32_t i = 0; v && i < n; i++)
        if (v[i] != NO_LIMIT)
            v[i] += by;
}

uint32_t grammar_import(struct grammar *g, struct grammar *sub)
{
    uint32_t shared = sub->json ? T_JSON_COUNT : 0, node = g->n_nodes, state = g->n_states;
    uint32_t term = g->n_terms - shared;
    CHECK(sub->refs == 1 && (g->json || !sub->json), "what is imported");
    for (uint32_t i = shared; i < sub->n_terms; i++) {
        uint32_t id = grammar_add_term(g, sub->terms[i].kind, NULL);
        g->terms[id] = sub->terms[i];
        sub->terms[i] = (struct term){0};
    }
    g->tags |= sub->tags;
    g->spelled = sub->spelled ? sub->spelled : g->spelled;
    for (uint32_t i = 0; i < sub->n_nodes; i++) {
        uint32_t id = grammar_add_node(g, sub->nodes[i].kind);
        struct gnode *n = &g->nodes[id];
        *n = sub->nodes[i];
        n->start += state;
        struct array_node *a = n->array;
        struct object_node *o = n->object;
        if (a) {
            renumber(a->prefix, a->n_prefix, node);
            renumber(a->both, a->n_prefix + 1, node);
            a->items += node;
            for (int k = 0; k < ARRAY_MARKS; k++)
                if (a->mark[k] != NO_LIMIT && a->mark[k] >= shared)
                    a->mark[k] += term;
        }
        for (uint32_t k = 0; o && k < o->n_props; k++)
            renumber(&o->prop[k].node, 1, node);
        if (o) {
            renumber(o->others, o->n_others, node);
            o->key += term;
            for (int k = 0; k < OBJECT_MARKS; k++)
                if (o->mark[k] != NO_LIMIT && o->mark[k] >= shared)
                    o->mark[k] += term;
        }
        sub->nodes[i] = (struct gnode){0};
    }
    for (uint32_t i = 0; i < sub->n_states; i++) {
        grammar_add_state(g, sub->state_final[i]);
        for (uint32_t e = sub->state_at[i]; e < sub->state_at[i + 1]; e++) {
            const struct edge *x = &sub->edges[e];
            bool punctuation = !x->call && x->target < shared;
            grammar_add_edge(g, x->call,
                             x->target + (x->call       ? node
                                          : punctuation ? 0
                                                        : term),
                             x->to + state);
        }
    }
    grammar_free(sub);
    return node;
}

void grammar_finish(struct grammar *g)
{
    if (!g->n_states) /* allocates state_at */
        grammar_add_state(g, false);
    g->state_at[g->n_states] = g->n_edges;
    g->bytes = sizeof *g + g->cap_terms * sizeof *g->terms + g->cap_nodes * sizeof *g->nodes +
               g->cap_edges * sizeof *g->edges + g->cap_states * (sizeof *g->state_at + 1);
    for (uint32_t i = 0; i < g->n_terms; i++) {
        if (g->terms[i].dfa)
            g->bytes += dfa_bytes(g->terms[i].dfa);
        if (g->terms[i].names)
            g->bytes += g->terms[i].names->n_nodes * sizeof(struct name_node);
    }
    for (uint32_t i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].object)
            g->bytes += sizeof(struct object_node) +
                        g->nodes[i].object->n_props * sizeof(struct object_prop);
}

struct grammar *grammar_ref(struct grammar *g)
{
    __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED);
    return g;
}

void grammar_free(struct grammar *g)
{
    if (!g || __atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    for (uint32_t i = 0; i < g->n_terms; i++) {
        dfa_free(g->terms[i].dfa);
        if (g->terms[i].names) {
            mem_free(g->terms[i].names->nodes);
            mem_free(g->terms[i].names->spelled);
        }
        mem_free(g->terms[i].left);
        mem_free(g->terms[i].total);
        mem_free(g->terms[i].names);
        mem_free(g->terms[i].tag);
        struct free_text *f = g->terms[i].free;
        for (uint32_t k = 0; f && k < f->n; k++)
            mem_free(f->again[k]);
        if (f)
            mem_free(f->again);
        mem_free(f);
    }
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        struct array_node *a = g->nodes[i].array;
        struct object_node *o = g->nodes[i].object;
        if (a) {
            mem_free(a->prefix);
            mem_free(a->both);
        }
        if (o) {
            mem_free(o->prop);
            mem_free(o->needs);
            mem_free(o->others);
        }
        mem_free(a);
        mem_free(o);
    }
    mem_free(g->terms);
    mem_free(g->nodes);
    mem_free(g->edges);
    mem_free(g->state_at);
    mem_free(g->state_final);
    mem_free(g->state_cost);
    mem_free(g->node_cost);
    mem_free(g);
}

size_t grammar_bytes(const struct grammar *g)
{
    return g->bytes;
}

static struct grammar *regex_compile(const char *text, size_t len, struct error *err)
{
    struct re_pool *p = re_pool_new();
    struct grammar *g = NULL;
    struct error local = {0};
    uint32_t r = re_parse(p, text, len, 0, &local);
    struct dfa *d = local.msg[0] ? NULL : dfa_new(p, &r, 1, &local);
    if (d && dfa_empty(d)) {
        error_set(&local, "regular expression: no text matches it");
        dfa_free(d);
        d = NULL;
    }
    if (d) {
        g = grammar_new();
        uint32_t t = grammar_add_term(g, TERM_RAW, d), node = grammar_add_node(g, NODE_GRAPH);
        g->nodes[node].start = grammar_add_state(g, d->label[1] != 0);
        grammar_add_edge(g, false, t, 1);
        grammar_add_state(g, true);
        grammar_finish(g);
    } else {
        error_set(err, "%s", local.msg);
    }
    re_pool_free(p);
    return g;
}

static struct grammar *compile(const struct grammar_source *src, struct error *err)
{
    if (src->len > GRAMMAR_TEXT_MAX) {
        error_set(err, "a grammar of %zu bytes; the limit is %d", src->len, GRAMMAR_TEXT_MAX);
        return NULL;
    }
    static const char any_object[] = "{\"type\":\"object\"}";
    const char *text = src->text ? src->text : "";
    switch (src->kind) {
    case GRAMMAR_SCHEMA:
        return schema_compile(text, src->len, src->flags & 3, err);
    case GRAMMAR_JSON_OBJECT:
        return schema_compile(any_object, sizeof any_object - 1, src->flags & 3, err);
    case GRAMMAR_REGEX:
        return regex_compile(text, src->len, err);
    case GRAMMAR_GBNF:
        return gbnf_compile(text, src->len, err);
    case GRAMMAR_LARK:
        return lark_compile(text, src->len, TERM_RAW, NULL, err);
    case GRAMMAR_REPLY:
        return chat_reply_compile(text, src->len, src->flags & 3, err);
    default:
        return choice_compile(text, src->len, err);
    }
}

struct grammar *grammar_compile(const struct grammar_source *src, struct error *err)
{
    struct grammar *g = compile(src, err);
    if (g)
        grammar_costs(g);
    return g;
}

/* ---- the cache: a short list, most recently used first ---- */

struct cached_grammar {
    struct cached_grammar *next;
    enum grammar_kind kind;
    int flags;
    uint64_t hash;
    size_t len;
    struct grammar *g;
    char text[];
};

struct grammar_cache {
    pthread_mutex_t lock;
    struct cached_grammar *first;
    int n, cap;
};

struct grammar_cache *grammar_cache_new(int cap)
{
    struct grammar_cache *c = mem_zalloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    c->cap = cap > 0 ? cap : 1;
    return c;
}

static void cached_free(struct cached_grammar *e)
{
    grammar_free(e->g);
    mem_free(e);
}

void grammar_cache_free(struct grammar_cache *c)
{
    if (!c)
        return;
    while (c->first) {
        struct cached_grammar *e = c->first;
        c->first = e->next;
        cached_free(e);
    }
    pthread_mutex_destroy(&c->lock);
    mem_free(c);
}

static uint64_t text_hash(const char *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u ^ n;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    for (; n; p++, n--)
        h = (h ^ (unsigned char)*p) * 0x100000001b3u;
    return h ^ h >> 29;
}

/* Finds an entry, moves it to the front and returns a new reference. The caller holds the lock. */
static struct grammar *cache_find(struct grammar_cache *c, const struct grammar_source *src,
                                  uint64_t hash)
{
    for (struct cached_grammar **at = &c->first; *at; at = &(*at)->next) {
        struct cached_grammar *e = *at;
        if (e->hash != hash || e->kind != src->kind || e->flags != src->flags ||
            e->len != src->len || (src->text && src->len && memcmp(e->text, src->text, src->len)))
            continue;
        *at = e->next;
        e->next = c->first;
        c->first = e;
        return grammar_ref(e->g);
    }
    return NULL;
}

struct grammar *grammar_cache_get(struct grammar_cache *c, const struct grammar_source *src,
                                  bool *hit, struct error *err)
{
    if (src->len > GRAMMAR_TEXT_MAX)
        return grammar_compile(src, err); /* fails with the limit's message */
    uint64_t hash = text_hash(src->text ? src->text : "", src->len);
    pthread_mutex_lock(&c->lock);
    struct grammar *g = cache_find(c, src, hash);
    pthread_mutex_unlock(&c->lock);
    if (hit)
        *hit = g != NULL;
    if (g || !(g = grammar_compile(src, err)))
        return g;
    struct cached_grammar *e = mem_alloc(sizeof *e + src->len), *old = NULL;
    *e = (struct cached_grammar){
        .kind = src->kind, .flags = src->flags, .hash = hash, .len = src->len};
    if (src->text && src->len)
        memcpy(e->text, src->text, src->len);
    e->g = grammar_ref(g);
    pthread_mutex_lock(&c->lock);
    e->next = c->first;
    c->first = e;
    if (++c->n > c->cap) {
        struct cached_grammar **at = &c->first;
        while ((*at)->next)
            at = &(*at)->next;
        old = *at;
        *at = NULL;
        c->n--;
    }
    pthread_mutex_unlock(&c->lock);
    if (old)
        cached_free(old);
    return g;
}
