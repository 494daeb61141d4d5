/*
 * Builds the grammar of a schema. Nodes are created from sets of literals, starting at the root.
 * Nodes that no value satisfies are found and removed. The remaining objects then get their key
 * terminals. See schema_int.h.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { NODES_MAX = 20000, LABELS_MAX = 64, PROPS_MAX = 4000, ELEMENTS_MAX = 2000 };

/* The state of building one grammar. */
struct schema_builder {
    struct schema *s;
    struct grammar *g;
    struct literals *sets; /* (n_sets) set of literals of each node */
    uint32_t *node_of;     /* (n_sets) its grammar node */
    uint32_t n_sets, cap_sets;
    uint32_t *slots, n_slots;
    uint32_t words[3];              /* terminals of null, true and false, or NO_LIMIT */
    const struct call_style *style; /* how a call's arguments are written; NULL: as JSON */
    uint32_t no_tag;                /* term of the texts without the style's tags */
    uint32_t end;                   /* term of the text after the value at hand; RE_NONE: none */
    struct element {
        struct literals lits;
        const char *name; /* (len) of its tag; NULL = any */
        uint32_t len, node;
    } * elements; /* (n_elements) built in this order */
    uint32_t n_elements, cap_elements;
    struct {
        struct literals lits;
        uint32_t node;
        bool text;
    } * params; /* (n_params) values between tags, still to be built */
    uint32_t n_params, cap_params;
    struct {
        uint32_t term, id;
        bool str;
    } * terms; /* built so far, by term */
    uint32_t n_terms, cap_terms;
    size_t lark_work;
    struct object_keys **objects; /* (n_objects) */
    uint32_t n_objects, cap_objects;
};

/* What an object node needs until its key terminal is built. */
struct object_keys {
    uint32_t node;
    bool call;         /* arguments of a call in a non-JSON style */
    const char **name; /* (n) sorted */
    uint32_t *len;
    uint32_t n;
    struct dfa *dfa;             /* automaton of undeclared names; NULL: none */
    uint32_t labels[LABELS_MAX]; /* labels of the automaton that occur */
    uint32_t n_labels;
};

static uint32_t set_hash(struct literals l)
{
    uint64_t h = 0x9e3779b97f4a7c15u + l.n;
    for (uint32_t i = 0; i < l.n; i++)
        h = (h ^ l.v[i]) * 0xff51afd7ed558ccdu, h ^= h >> 29;
    return (uint32_t)(h ^ h >> 32);
}

/* Returns the node of a set of literals; a new one is queued for building. */
static uint32_t node_of(struct schema_builder *b, struct literals l)
{
    if (2 * (b->n_sets + 1) > b->n_slots) {
        b->n_slots = b->n_slots ? 2 * b->n_slots : 64;
        mem_free(b->slots);
        b->slots = mem_zalloc(b->n_slots, sizeof *b->slots);
        for (uint32_t i = 0; i < b->n_sets; i++) {
            uint32_t h = set_hash(b->sets[i]) & (b->n_slots - 1);
            while (b->slots[h])
                h = (h + 1) & (b->n_slots - 1);
            b->slots[h] = i + 1;
        }
    }
    uint32_t h = set_hash(l) & (b->n_slots - 1);
    for (; b->sets && b->slots[h]; h = (h + 1) & (b->n_slots - 1)) {
        const struct literals *x = &b->sets[b->slots[h] - 1];
        if (x->n == l.n && (!l.n || !memcmp(x->v, l.v, l.n * sizeof *l.v)))
            return b->node_of[b->slots[h] - 1];
    }
    if (b->n_sets >= NODES_MAX) {
        schema_fail(b->s, NULL, "over %d distinct subschemas", NODES_MAX);
        return 0;
    }
    if (b->n_sets == b->cap_sets) {
        b->cap_sets = b->cap_sets ? 2 * b->cap_sets : 32;
        b->sets = mem_realloc(b->sets, b->cap_sets, sizeof *b->sets);
        b->node_of = mem_realloc(b->node_of, b->cap_sets, sizeof *b->node_of);
    }
    CHECK(b->sets && b->node_of && b->slots, "room for sets");
    b->sets[b->n_sets] = l;
    b->node_of[b->n_sets] = grammar_add_node(b->g, NODE_GRAPH);
    b->slots[h] = ++b->n_sets;
    return b->node_of[b->n_sets - 1];
}

/* Whether the language is small, such as an enum. Then characters are escaped only where necessary,
 * so that the next token is forced more often. */
static bool is_plain(const struct dfa *d)
{
    for (uint32_t q = 1; q < d->n_states && d->finite; q++)
        if (dfa_step(d, q, 0xe000) ||
            (dfa_step(d, q, 'q') && dfa_step(d, q, 'J') && dfa_step(d, q, '7')))
            return false;
    return d->finite;
}

/* Returns the terminal of a term; NO_LIMIT if its language is empty or on failure. */
static uint32_t term_of(struct schema_builder *b, uint32_t term, bool str)
{
    struct error err = {0};
    for (uint32_t i = 0; i < b->n_terms; i++)
        if (b->terms[i].term == term && b->terms[i].str == str)
            return b->terms[i].id;
    struct dfa *d = dfa_new(b->s->pool, &term, 1, &err);
    uint32_t id = NO_LIMIT;
    if (!d) {
        schema_fail(b->s, NULL, "%s", err.msg);
    } else if (dfa_empty(d)) {
        dfa_free(d);
    } else {
        id = grammar_add_term(b->g, str ? TERM_STR : TERM_RAW, d);
        b->g->terms[id].plain = str && is_plain(d);
    }
    if (b->n_terms == b->cap_terms) {
        b->cap_terms = b->cap_terms ? 2 * b->cap_terms : 32;
        b->terms = mem_realloc(b->terms, b->cap_terms, sizeof *b->terms);
    }
    b->terms[b->n_terms].term = term;
    b->terms[b->n_terms].str = str;
    b->terms[b->n_terms++].id = id;
    return id;
}

static bool term_regex(struct schema_builder *b, const char *pattern, uint32_t *id)
{
    uint32_t t = re_parse(b->s->pool, pattern, strlen(pattern), 0, NULL);
    *id = term_of(b, t, false);
    return *id != NO_LIMIT;
}

/* The punctuation of JSON, in the order of the T_ names. White space is limited to one blank, and
 * one newline with the next line's indentation. */
void schema_add_json(struct grammar *g, int flags)
{
#define WS "[ \\t]?(\\r?\\n[ \\t]{0,24})?"
    static const char *const spaced[T_JSON_COUNT] = {"\\{" WS, "\\}",    WS "\\}",  "\\[" WS,
                                                     "\\]",    WS "\\]", WS "," WS, WS ":" WS};
    static const char *const compact[T_JSON_COUNT] = {"\\{", "\\}",     "(?:\\})", "\\[",
                                                      "\\]", "(?:\\])", ",",       ":"};
    const char *const *list = flags & GRAMMAR_COMPACT ? compact : spaced;
    struct re_pool *pool = re_pool_new();
    for (uint32_t i = 0; i < T_JSON_COUNT; i++) {
        uint32_t t = re_parse(pool, list[i], strlen(list[i]), 0, NULL);
        struct dfa *d = dfa_new(pool, &t, 1, NULL);
        CHECK(d && g->n_terms == i, "the terminals of JSON");
        grammar_add_term(g, TERM_RAW, d);
    }
    g->json = true;
    re_pool_free(pool);
#undef WS
}

/* ---- arrays ---- */

/* ---- call arguments that are not JSON ---- */

/* How call arguments that are not JSON are written. */
static const struct call_style {
    int flag;
    const char *mark[OBJECT_MARKS]; /* expressions; NULL: nothing is written */
    const char *open;               /* text before a name */
    char shut;                      /* character after a name */
    const char *end;                /* expression after a raw-text value; NULL: only JSON */
    const char *tags[8];            /* no text may contain these; NULL-terminated */
    bool spelled;                   /* ... and they may be special tokens */
    enum {
        NEST_JSON,     /* lists and objects inside the arguments are JSON */
        NEST_SAME,     /* objects have the same style */
        NEST_ELEMENTS, /* every value is an element, lists and objects too */
    } nested;
} styles[] = {
    {SCHEMA_PYTHON, {"\\(", "\\)", "\\)", ", ?", NULL}, "", '=', NULL, {NULL}, false, NEST_JSON},
    {SCHEMA_XML,
     {">\\n", "</function>", "</function>", NULL, "\\n"},
     "<parameter=",
     '>',
     "\\n</parameter>\\n",
     {"</parameter>", "\n</function>", "\n<parameter=", NULL},
     false,
     NEST_JSON},
    {SCHEMA_MINIMAX,
     {"\">\\n?", "</invoke>", "</invoke>", NULL, ">"},
     "<parameter name=\"",
     '"',
     "</parameter>\\n?",
     {"</parameter>", NULL},
     false,
     NEST_JSON},
    {SCHEMA_GLM,
     {NULL, "</tool_call>", "</tool_call>", NULL, "/arg_key>\\n?<arg_value>"},
     "<arg_key>",
     '<',
     "</arg_value>\\n?",
     {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>",
      NULL},
     true,
     NEST_JSON},
    {SCHEMA_SEED,
     {">\\n?", "</function>", "</function>", NULL, NULL},
     "<parameter=",
     '>',
     "</parameter>\\n?",
     {"</parameter>", "\n</function>", "\n<parameter=", NULL},
     false,
     NEST_JSON},
    {SCHEMA_HUNYUAN,
     {"\\n?", "</tool_call:opensource>", "</tool_call:opensource>", NULL,
      "/arg_key:opensource>\\n?<arg_value:opensource>"},
     "<arg_key:opensource>",
     '<',
     "</arg_value:opensource>\\n?",
     {"<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>",
      "</arg_value:opensource>", "<tool_call:opensource>", "</tool_call:opensource>", NULL},
     true,
     NEST_JSON},
    {SCHEMA_MUSE,
     {"\">\\n?", "</atem:invoke>", "</atem:invoke>", NULL, ">"},
     "<atem:parameter name=\"",
     '"',
     "</atem:parameter>\\n?",
     {"</atem:parameter>", NULL},
     false,
     NEST_JSON},
    {SCHEMA_DSML,
     {"\">\\n?", "</｜DSML｜invoke>", "</｜DSML｜invoke>", NULL, " string=\"(true|false)\">"},
     "<｜DSML｜parameter name=\"",
     '"',
     "</｜DSML｜parameter>\\n?",
     {"｜DSML｜", NULL},
     true,
     NEST_JSON},
    {SCHEMA_M3, {NULL}, "]<]minimax[>[<", '>', NULL, {"]<]minimax[>[", NULL}, true, NEST_ELEMENTS},
    {SCHEMA_GEMMA,
     {"\\{", "\\}", "\\}", ",", NULL},
     "",
     ':',
     NULL,
     {"<|\"|>", NULL},
     true,
     NEST_SAME},
};

static const struct call_style *style_of(int flags)
{
    for (size_t i = 0; i < sizeof styles / sizeof *styles; i++)
        if (flags & styles[i].flag)
            return &styles[i];
    return NULL;
}

/* A pattern of names that are not declared. */
#define CALL_WORD "[A-Za-z_][A-Za-z0-9_.-]{0,62}"

/* Returns the node of an element: a value and its closing tag. A new one is queued for building. */
static uint32_t element_of(struct schema_builder *b, struct literals l, const char *name,
                           uint32_t len)
{
    for (uint32_t i = 0; i < b->n_elements; i++) {
        const struct element *e = &b->elements[i];
        if (e->lits.n == l.n && (!l.n || !memcmp(e->lits.v, l.v, l.n * sizeof *l.v)) &&
            !e->name == !name && e->len == len && (!len || !memcmp(e->name, name, len)))
            return e->node;
    }
    if (b->n_elements >= ELEMENTS_MAX) {
        schema_fail(b->s, NULL, "over %d distinct elements", ELEMENTS_MAX);
        return 0;
    }
    if (b->n_elements == b->cap_elements) {
        b->cap_elements = b->cap_elements ? 2 * b->cap_elements : 32;
        b->elements = mem_realloc(b->elements, b->cap_elements, sizeof *b->elements);
    }
    uint32_t node = grammar_add_node(b->g, NODE_GRAPH);
    b->elements[b->n_elements++] = (struct element){l, name, len, node};
    return node;
}

/* Returns the node of an array's item: its opening tag, and the element. */
static uint32_t item_of(struct schema_builder *b, struct literals l)
{
    static const char name[] = "item";
    uint32_t open;
    if (!b->style || b->style->nested != NEST_ELEMENTS)
        return node_of(b, l);
    uint32_t element = element_of(b, l, name, sizeof name - 1);
    uint32_t node = grammar_add_node(b->g, NODE_GRAPH);
    uint32_t tag = re_literal(b->s->pool, b->style->open, strlen(b->style->open));
    open = term_of(b, re_cat(b->s->pool, tag, re_literal(b->s->pool, "item>", 5)), false);
    uint32_t first = grammar_add_state(b->g, false);
    b->g->nodes[node].start = first;
    grammar_add_edge(b->g, false, open, first + 1);
    grammar_add_state(b->g, false);
    grammar_add_edge(b->g, true, element, first + 2);
    grammar_add_state(b->g, true);
    return node;
}

/* The marks of an array or object that is an element: its closing tag alone. */
static void element_marks(struct schema_builder *b, uint32_t *mark, int n)
{
    for (int i = 0; i < n; i++)
        mark[i] = NO_LIMIT;
    mark[MARK_EMPTY] = mark[MARK_CLOSE] = term_of(b, b->end, false);
}

/* The closing tag of an element with this name, or with any. */
static uint32_t element_end(struct schema_builder *b, const char *name, uint32_t len)
{
    struct re_pool *p = b->s->pool;
    uint32_t open = re_literal(p, b->style->open, strlen(b->style->open));
    uint32_t word =
        name ? re_literal(p, name, len) : re_parse(p, CALL_WORD, strlen(CALL_WORD), 0, NULL);
    return re_cat(p, re_cat(p, open, re_literal(p, "/", 1)),
                  re_cat(p, word, re_literal(p, ">", 1)));
}

static bool build_array(struct schema_builder *b, const struct value_shape *x, uint32_t *out)
{
    struct schema *s = b->s;
    uint32_t prefix = 0;
    for (const struct item_keywords *c = x->item_lists; c; c = c->next)
        if (c->n_prefix > prefix)
            prefix = c->n_prefix;
    if (prefix > x->max_items)
        prefix = x->max_items;
    uint32_t node = grammar_add_node(b->g, NODE_ARRAY);
    struct array_node *a = mem_zalloc(1, sizeof *a);
    b->g->nodes[node].array = a;
    a->prefix = mem_zalloc(prefix + 1, sizeof *a->prefix);
    a->n_prefix = prefix;
    a->min = x->min_items;
    a->max = x->max_items;
    const struct contains *c = x->contains;
    if (c && c->next)
        return schema_fail(s, NULL, "two \"contains\" on one array cannot be enforced");
    if (c) {
        a->n_contains = c->min;
        a->both = mem_alloc((prefix + 1) * sizeof *a->both);
    }
    for (uint32_t i = 0; i <= prefix && !s->failed; i++) {
        struct literals l = shape_item(s, x, i < prefix ? i : NO_LIMIT - 1);
        uint32_t n = item_of(b, l);
        if (i < prefix)
            a->prefix[i] = n;
        else
            a->items = n;
        if (c)
            a->both[i] = item_of(b, lits_join(s, l, c->lits));
    }
    static const uint32_t json[ARRAY_MARKS] = {T_LBRACK, T_RBRACK0, T_RBRACK, T_COMMA};
    memcpy(a->mark, json, sizeof json);
    if (b->style && b->style->nested == NEST_ELEMENTS)
        element_marks(b, a->mark, ARRAY_MARKS);
    *out = node;
    return !s->failed;
}

/* ---- objects ---- */

struct prop_name {
    const char *p;
    uint32_t len, order;
};

static int name_cmp_text(const char *a, uint32_t n, const char *b, uint32_t m)
{
    int c = memcmp(a, b, n < m ? n : m);
    return c ? c : n < m ? -1 : n > m;
}

static int name_cmp(const void *a, const void *b)
{
    const struct prop_name *x = a, *y = b;
    int c = name_cmp_text(x->p, x->len, y->p, y->len);
    return c ? c : x->order < y->order ? -1 : x->order > y->order;
}

/* All names the shape mentions, sorted, with their order in the schema. */
static uint32_t collect_names(struct schema *s, const struct value_shape *x, struct prop_name **out)
{
    uint32_t n = 0, k = 0;
    for (const struct prop_keywords *c = x->prop_lists; c; c = c->next)
        n += c->n_props;
    for (const struct name_list *r = x->required; r; r = r->next)
        n++;
    for (const struct name_list *r = x->needs; r; r = r->next)
        n += 2;
    struct prop_name *v = schema_alloc(s, (n + 1) * sizeof *v);
    for (const struct prop_keywords *c = x->prop_lists; c; c = c->next)
        for (uint32_t i = 0; i < c->n_props; i++, k++)
            v[k] = (struct prop_name){c->props[i].name, c->props[i].len, k};
    for (const struct name_list *r = x->required; r; r = r->next, k++)
        v[k] = (struct prop_name){r->name, r->len, k};
    for (const struct name_list *r = x->needs; r; r = r->next) {
        v[k] = (struct prop_name){r->name, r->len, k};
        k++;
        v[k] = (struct prop_name){r->needs, r->needs_len, k};
        k++;
    }
    qsort(v, n, sizeof *v, name_cmp);
    k = 0;
    for (uint32_t i = 0; i < n; i++)
        if (!k || name_cmp_text(v[i].p, v[i].len, v[k - 1].p, v[k - 1].len))
            v[k++] = v[i];
    *out = v;
    return k;
}

static uint32_t find_name(const struct prop_name *v, uint32_t n, const char *p, uint32_t len)
{
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        int c = name_cmp_text(v[mid].p, v[mid].len, p, len);
        if (!c)
            return mid;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NO_LIMIT;
}

/* Whether a declared name needs no quotes. In
 * Python they are identifiers; between tags they are any text without the tags' characters. */
static bool is_word(const struct schema_builder *b, const char *p, uint32_t n)
{
    if (b->style->flag != SCHEMA_PYTHON) {
        for (uint32_t i = 0; i < n; i++)
            if ((unsigned char)p[i] < ' ' || strchr("<>\"{}[],:|", p[i]))
                return false;
        return n > 0 && n <= 200 && p[0] != ' ' && p[0] != '/' && p[n - 1] != ' ';
    }
    for (uint32_t i = 0; i < n; i++)
        if (!((p[i] | 32) >= 'a' && (p[i] | 32) <= 'z') && p[i] != '_' &&
            !(i && ((p[i] >= '0' && p[i] <= '9') || p[i] == '.' || p[i] == '-')))
            return false;
    return n > 0;
}

/* Whether the name contains a tag that would end its context. */
static bool has_tag(const struct schema_builder *b, const char *p, uint32_t n)
{
    for (int i = 0; b->style && b->style->tags[i]; i++)
        if (memmem(p, n, b->style->tags[i], strlen(b->style->tags[i])))
            return true;
    return false;
}

/* Returns the node of an argument. Between tags a value may be raw text; such nodes are built when
 * the object is done. */
static uint32_t param_of(struct schema_builder *b, struct literals l, const char *name,
                         uint32_t len)
{
    if (b->style->nested == NEST_ELEMENTS)
        return element_of(b, l, name, len);
    if (!b->style->end)
        return node_of(b, l);
    const struct jvalue *root = jdoc_root(b->s->doc), *type = NULL;
    if (name)
        type = jvalue_get(jvalue_get_n(jvalue_get(root, "properties"), name, len), "type");
    if (b->n_params == b->cap_params) {
        b->cap_params = b->cap_params ? 2 * b->cap_params : 16;
        b->params = mem_realloc(b->params, b->cap_params, sizeof *b->params);
    }
    b->params[b->n_params].lits = l;
    b->params[b->n_params].text = type && jvalue_is(type, "string");
    uint32_t node = grammar_add_node(b->g, NODE_GRAPH);
    b->params[b->n_params++].node = node;
    return node;
}

/* Sets the punctuation around the arguments. */
static bool call_marks(struct schema_builder *b, struct object_node *o)
{
    if (b->style->nested == NEST_ELEMENTS) {
        element_marks(b, o->mark, OBJECT_MARKS);
        return !b->s->failed;
    }
    for (int i = 0; i < OBJECT_MARKS; i++) {
        const char *mark = b->style->mark[i];
        o->mark[i] = NO_LIMIT;
        if (mark && !term_regex(b, mark, &o->mark[i]))
            return false;
    }
    return true;
}

/* Undeclared names: the patterns a name matches determine the literals of its value. */
static bool build_others(struct schema_builder *b, const struct value_shape *x,
                         struct object_node *o, struct object_keys *info)
{
    struct schema *s = b->s;
    uint32_t terms[32];
    int n = 0;
    for (const struct prop_keywords *c = x->prop_lists; c; c = c->next) {
        if (c->n_pats + (uint32_t)n > 30)
            return schema_fail(s, NULL, "over 30 patterns for the properties of one object");
        for (uint32_t i = 0; i < c->n_pats; i++)
            terms[n++] = c->pats[i].re;
    }
    terms[n] = b->no_tag ? re_and(s->pool, x->names, b->no_tag) : x->names;
    if (info->call)
        terms[n] =
            re_and(s->pool, terms[n], re_parse(s->pool, CALL_WORD, strlen(CALL_WORD), 0, NULL));
    bool closed = false;
    for (const struct prop_keywords *c = x->prop_lists; c; c = c->next)
        closed |= !c->n_pats && lits_false(c->extra);
    if (closed)
        return true;
    struct error err = {0};
    info->dfa = dfa_new(s->pool, terms, n + 1, &err);
    if (!info->dfa)
        return schema_fail(s, NULL, "the names of an object's properties: %s", err.msg);
    const struct dfa *d = info->dfa;
    for (uint32_t q = 1; q < d->n_states; q++) {
        bool known = !(d->label[q] >> n & 1); /* propertyNames excludes the name */
        for (uint32_t i = 0; i < info->n_labels && !known; i++)
            known = info->labels[i] == d->label[q];
        if (known)
            continue;
        if (info->n_labels == LABELS_MAX)
            return schema_fail(s, NULL, "over %d kinds of property names in one object",
                               LABELS_MAX);
        info->labels[info->n_labels++] = d->label[q];
    }
    o->others = mem_alloc((info->n_labels + 1) * sizeof *o->others);
    for (uint32_t k = 0; k < info->n_labels; k++) {
        struct literals l = {0};
        int bit = 0;
        for (const struct prop_keywords *c = x->prop_lists; c; c = c->next) {
            bool hit = false;
            for (uint32_t i = 0; i < c->n_pats; i++, bit++)
                if (info->labels[k] >> bit & 1) {
                    l = lits_join(s, l, c->pats[i].lits);
                    hit = true;
                }
            if (!hit)
                l = lits_join(s, l, c->extra);
        }
        o->others[k] = lits_false(l) ? NO_LIMIT
                       : info->call  ? param_of(b, l, NULL, 0)
                                     : node_of(b, l);
    }
    o->n_others = info->n_labels;
    return !s->failed;
}

/* Computes the transitive closure of dependentRequired. */
static void build_needs(const struct value_shape *x, const struct prop_name *names, uint32_t n,
                        struct object_node *o)
{
    if (!x->needs)
        return;
    uint8_t *m = mem_zalloc((size_t)n * n, 1); /* m[i, j]: i requires j */
    for (const struct name_list *r = x->needs; r; r = r->next)
        m[(size_t)find_name(names, n, r->name, r->len) * n +
          find_name(names, n, r->needs, r->needs_len)] = 1;
    for (uint32_t k = 0; k < n; k++)
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; m[(size_t)i * n + k] && j < n; j++)
                m[(size_t)i * n + j] |= m[(size_t)k * n + j];
    uint32_t total = 0;
    for (size_t i = 0; i < (size_t)n * n; i++)
        total += m[i];
    o->needs = mem_alloc((total + 1) * sizeof *o->needs);
    total = 0;
    for (uint32_t i = 0; i < n; i++) {
        o->prop[i].needs = total;
        for (uint32_t j = 0; j < n; j++)
            if (m[(size_t)i * n + j] && i != j)
                o->needs[total++] = j;
        o->prop[i].n_needs = total - o->prop[i].needs;
    }
    mem_free(m);
}

static bool build_object(struct schema_builder *b, const struct value_shape *x, bool root,
                         uint32_t *out)
{
    struct schema *s = b->s;
    struct prop_name *names;
    uint32_t n = collect_names(s, x, &names);
    if (n > PROPS_MAX)
        return schema_fail(s, NULL, "an object of over %d properties", PROPS_MAX);
    if (x->needs && n > 500)
        return schema_fail(s, NULL, "dependentRequired in an object of over 500 properties");
    uint32_t node = grammar_add_node(b->g, NODE_OBJECT);
    struct object_node *o = mem_zalloc(1, sizeof *o);
    b->g->nodes[node].object = o;
    o->prop = mem_zalloc(n + 1, sizeof *o->prop);
    o->n_props = n;
    o->min = x->min_props;
    o->max = x->max_props;
    o->in_order = s->flags & GRAMMAR_SCHEMA_ORDER;
    static const uint32_t json[OBJECT_MARKS] = {T_LBRACE, T_RBRACE0, T_RBRACE, T_COMMA, T_COLON};
    memcpy(o->mark, json, sizeof json);
    bool call = b->style && (root || b->style->nested != NEST_JSON);
    struct object_keys *info = schema_alloc(s, sizeof *info);
    info->node = node;
    info->call = call;
    info->n = n;
    info->name = schema_alloc(s, (n + 1) * sizeof *info->name);
    info->len = schema_alloc(s, (n + 1) * sizeof *info->len);
    if (b->n_objects == b->cap_objects) {
        b->cap_objects = b->cap_objects ? 2 * b->cap_objects : 32;
        b->objects = mem_realloc(b->objects, b->cap_objects, sizeof *b->objects);
    }
    b->objects[b->n_objects++] = info;
    if (!build_others(b, x, o, info))
        return false;
    for (uint32_t i = 0; i < n && !s->failed; i++) {
        info->name[i] = names[i].p;
        info->len[i] = names[i].len;
        struct literals l = shape_prop(s, x, names[i].p, names[i].len);
        bool allowed = !lits_false(l);
        if (allowed && x->names != RE_ALL)
            allowed = !term_empty(
                s, re_and(s->pool, x->names, re_literal(s->pool, names[i].p, names[i].len)));
        o->prop[i].order = names[i].order;
        allowed = allowed && (!call || is_word(b, names[i].p, names[i].len)) &&
                  !has_tag(b, names[i].p, names[i].len);
        o->prop[i].node = !allowed ? NO_LIMIT
                          : call   ? param_of(b, l, names[i].p, names[i].len)
                                   : node_of(b, l);
    }
    for (const struct name_list *r = x->required; r; r = r->next)
        o->prop[find_name(names, n, r->name, r->len)].required = true;
    build_needs(x, names, n, o);
    if (call && !call_marks(b, o))
        return false;
    *out = node;
    return !s->failed;
}

/* ---- a node: all its shapes ---- */

static bool word_term(struct schema_builder *b, int k, uint32_t *id)
{
    static const char *const words[3][3] = {
        {"null", "true", "false"}, {"None", "True", "False"}, {"null|None", "true", "false"}};
    int way = b->s->flags & SCHEMA_PYTHON ? 1 : b->s->flags & SCHEMA_GEMMA ? 2 : 0;
    const char *word = words[way][k];
    if (b->words[k] == NO_LIMIT && !term_regex(b, word, &b->words[k]))
        return false;
    *id = b->words[k];
    return true;
}

static uint32_t pattern_term(struct schema_builder *b, const char *re)
{
    return re_parse(b->s->pool, re, strlen(re), 0, NULL);
}

/* A raw string parameter: text, then the style's end. Values that look like JSON are parsed as
 * JSON, so where other types are possible, the text must start with a letter and not be a
 * constant. */
static uint32_t raw_text_term(struct schema_builder *b, uint32_t str, bool always)
{
    struct re_pool *p = b->s->pool;
    static const char letters[] =
        "(?!(true|false|null|True|False|None|NaN|Infinity)$)[A-Za-z_](.|\\n)*";
    if (str != RE_NONE && !always)
        str = re_and(p, str, pattern_term(b, letters));
    if (str == RE_NONE)
        return NO_LIMIT;
    return term_of(b, re_cat(p, str, b->end), false);
}

/* A string value: a JSON string, or text between the style's quotation tags. */
static uint32_t string_term(struct schema_builder *b, uint32_t str)
{
    struct re_pool *p = b->s->pool;
    if (!b->style || b->style->nested != NEST_SAME)
        return term_of(b, str, true);
    uint32_t mark = re_literal(p, b->style->tags[0], strlen(b->style->tags[0]));
    return term_of(b, re_cat(p, mark, re_cat(p, str, mark)), false);
}

enum value_kind { VALUE_JSON, VALUE_XML, VALUE_XML_TEXT, VALUE_ELEMENT };

/* The node of a string that follows a Lark grammar: a JSON string, or raw text before the style's end. */
static bool lark_node(struct schema_builder *b, const struct value_shape *x, enum value_kind kind,
                      uint32_t *node)
{
    struct schema *s = b->s;
    const struct jvalue *v = x->lark;
    struct error err = {0};
    bool quoted = kind == VALUE_JSON && !(b->style && b->style->nested == NEST_SAME);
    if (x->str != RE_ALL)
        return schema_fail(s, v, "cannot be enforced beside other rules for the string");
    if (kind == VALUE_XML)
        return schema_fail(s, v, "cannot be enforced where other types fit");
    const char *mark = quoted ? "\"" : kind == VALUE_JSON ? b->style->tags[0] : NULL;
    uint32_t open = NO_LIMIT, close;
    if (mark)
        open = close = term_of(b, re_literal(s->pool, mark, strlen(mark)), false);
    else
        close = term_of(b, b->end, false);
    struct grammar *g = s->failed ? NULL
                                  : lark_compile(v->text, v->len, quoted ? TERM_PART : TERM_RAW,
                                                 quoted ? NULL : b->style->tags, &err);
    if (!g)
        return schema_fail(s, v, "%s", err.msg);
    b->lark_work += g->work;
    uint32_t text = grammar_import(b->g, g), first = b->g->n_states;
    *node = grammar_add_node(b->g, NODE_GRAPH);
    b->g->nodes[*node].start = first;
    grammar_add_state(b->g, false);
    if (mark)
        grammar_add_edge(b->g, false, open, first + 1);
    else
        grammar_add_edge(b->g, true, text, first + 2);
    grammar_add_state(b->g, false);
    grammar_add_edge(b->g, true, text, first + 2);
    grammar_add_state(b->g, false);
    grammar_add_edge(b->g, false, close, first + 3);
    grammar_add_state(b->g, true);
    return true;
}

/* Builds a node from the shapes of its set of literals. */
static bool build_value(struct schema_builder *b, struct literals lits, uint32_t node, bool root,
                        enum value_kind kind)
{
    struct schema *s = b->s;
    struct shapes all = {0};
    uint32_t types = 0, num = RE_NONE, str = RE_NONE;
    if (!schema_expand_all(s, lits, &all))
        return false;
    uint32_t *calls = schema_alloc(s, (2 * all.n + 1) * sizeof *calls), n_calls = 0;
    uint32_t *texts = schema_alloc(s, (all.n + 1) * sizeof *texts), n_texts = 0;
    for (uint32_t k = 0; k < all.n; k++) {
        struct value_shape x = all.v[k];
        if (root && s->flags & SCHEMA_OBJECT)
            x.types &= TY_OBJ;
        types |= x.types;
        if (x.types & TY_NUM)
            num = re_or(s->pool, num, x.num == RE_ALL ? num_any(s) : x.num);
        if (x.types & TY_STR && !x.lark)
            str = re_or(s->pool, str, x.str);
        if (x.types & TY_STR && x.lark && !lark_node(b, &x, kind, &texts[n_texts++]))
            return false;
        if (x.types & TY_ARR && !build_array(b, &x, &calls[n_calls++]))
            return false;
        if (x.types & TY_OBJ && !build_object(b, &x, root, &calls[n_calls++]))
            return false;
    }
    uint32_t terms[5], n_terms = 0, text = NO_LIMIT, end = NO_LIMIT;
    if (b->no_tag && str != RE_NONE)
        str = re_and(s->pool, str, b->no_tag);
    if (kind != VALUE_JSON) {
        bool only =
            kind == VALUE_XML_TEXT || (kind == VALUE_ELEMENT && !(types & (TY_NUM | TY_BOOL)));
        if (kind == VALUE_ELEMENT && only && types & TY_STR)
            types &= ~(uint32_t)TY_NULL; /* it would be text */
        text = raw_text_term(b, str, only);
        end = term_of(b, b->end, false);
        str = RE_NONE;
    }
    for (int k = 0; k < 3; k++)
        if (types & (k == 0 ? TY_NULL : k == 1 ? TY_TRUE : TY_FALSE)) {
            if (!word_term(b, k, &terms[n_terms]))
                return false;
            n_terms++;
        }
    if (num != RE_NONE && (terms[n_terms] = term_of(b, num, false)) != NO_LIMIT)
        n_terms++;
    if (str != RE_NONE && (terms[n_terms] = string_term(b, str)) != NO_LIMIT)
        n_terms++;
    if (s->failed || re_pool_error(s->pool))
        return schema_fail(s, NULL, "%s", re_pool_error(s->pool));
    uint32_t first = grammar_add_state(b->g, false);
    b->g->nodes[node].start = first;
    for (uint32_t k = 0; k < n_terms; k++)
        grammar_add_edge(b->g, false, terms[k], first + 1);
    for (uint32_t k = 0; k < n_calls; k++)
        grammar_add_edge(b->g, true, calls[k], first + (kind == VALUE_ELEMENT ? 2 : 1));
    for (uint32_t k = 0; k < n_texts; k++)
        grammar_add_edge(b->g, true, texts[k], first + (kind == VALUE_JSON ? 1 : 2));
    if (text != NO_LIMIT)
        grammar_add_edge(b->g, false, text, first + 2);
    grammar_add_state(b->g, kind == VALUE_JSON);
    if (kind != VALUE_JSON) {
        grammar_add_edge(b->g, false, end, first + 2);
        grammar_add_state(b->g, true);
    }
    return true;
}

static bool build_params(struct schema_builder *b)
{
    bool ok = true;
    for (; ok && b->n_params; b->n_params--) {
        uint32_t i = b->n_params - 1;
        ok = build_value(b, b->params[i].lits, b->params[i].node, false,
                         b->params[i].text ? VALUE_XML_TEXT : VALUE_XML);
    }
    return ok;
}

/* ---- keys ---- */

static void add_name(struct names *t, const char *p, uint32_t len, uint32_t pos)
{
    uint32_t node = 0;
    for (uint32_t i = 0; i < len;) {
        uint32_t cp;
        int k = utf8_decode(p + i, len - i, &cp);
        i += (uint32_t)(k ? k : 1);
        t->escapes |= cp < 0x20 || cp == '"' || cp == '\\';
        /* Names are sorted, so an existing child is the last one. */
        uint32_t c = t->nodes[node].child, last = 0;
        while (c && t->nodes[c].cp < cp) {
            last = c;
            c = t->nodes[c].sibling;
        }
        if (!c || t->nodes[c].cp != cp) {
            uint32_t fresh = t->n_nodes++;
            t->nodes[fresh] = (struct name_node){.cp = cp, .sibling = c, .lo = pos, .hi = pos};
            if (last)
                t->nodes[last].sibling = fresh;
            else
                t->nodes[node].child = fresh;
            c = fresh;
        }
        node = c;
        t->nodes[node].hi = pos + 1;
    }
    t->nodes[node].name = pos + 1;
}

static bool build_key(struct schema_builder *b, struct object_keys *info, const uint8_t *ok)
{
    struct object_node *o = b->g->nodes[info->node].object;
    uint32_t from[LABELS_MAX], to[LABELS_MAX], n = 0, n_others = 0, chars = 1;
    for (uint32_t k = 0; k < info->n_labels; k++) {
        if (schema_is_dead(ok, o->others[k]))
            continue;
        from[n] = info->labels[k];
        o->others[n_others++] = o->others[k];
        to[n++] = n_others;
    }
    o->n_others = n_others;
    if (info->dfa && n) {
        dfa_relabel(info->dfa, from, to, n);
        if (dfa_empty(info->dfa))
            o->n_others = 0;
    }
    if (!o->n_others) { /* only declared names: use an automaton of the empty language */
        dfa_free(info->dfa);
        uint32_t none = RE_NONE;
        info->dfa = dfa_new(b->s->pool, &none, 1, NULL);
        if (!info->dfa)
            return schema_fail(b->s, NULL, "%s", re_pool_error(b->s->pool));
    }
    CHECK(info->dfa, "names without an automaton");
    o->key = grammar_add_term(b->g, TERM_KEY, info->dfa);
    struct term *t = &b->g->terms[o->key];
    t->plain = !o->n_others || info->dfa->finite;
    t->repeats = o->n_others && info->dfa->finite;
    if (info->call) {
        t->bare = true;
        t->open = b->style->open;
        t->shut = b->style->shut;
    }
    uint32_t n_required = 0;
    for (uint32_t i = 0; i < o->n_props; i++)
        n_required += o->prop[i].required;
    if (t->repeats && o->min > 1 && o->min > n_required) {
        info->dfa = NULL;
        return schema_fail(b->s, NULL, "minProperties with finitely many names cannot be enforced");
    }
    info->dfa = NULL;
    t->names = mem_zalloc(1, sizeof *t->names);
    for (uint32_t i = 0; i < info->n; i++)
        chars += info->len[i];
    t->names->nodes = mem_zalloc(chars, sizeof *t->names->nodes);
    t->names->n_nodes = 1;
    t->names->n = info->n;
    t->names->nodes[0].hi = info->n;
    for (uint32_t i = 0; i < info->n; i++)
        add_name(t->names, info->name[i], info->len[i], i);
    return true;
}

/* Elements inside elements join the queue. */
static bool build_elements(struct schema_builder *b)
{
    bool ok = true;
    for (uint32_t i = 0; ok && i < b->n_elements; i++) {
        struct element e = b->elements[i];
        b->end = element_end(b, e.name, e.len);
        ok = build_value(b, e.lits, e.node, false, VALUE_ELEMENT);
    }
    return ok;
}

static void builder_clear(struct schema_builder *b)
{
    for (uint32_t i = 0; i < b->n_objects; i++)
        dfa_free(b->objects[i]->dfa);
    mem_free(b->sets);
    mem_free(b->node_of);
    mem_free(b->slots);
    mem_free(b->terms);
    mem_free(b->objects);
    mem_free(b->params);
    mem_free(b->elements);
}

/* Node 0: white space, then the value. */
static bool build_root(struct schema_builder *b, const struct jvalue *root, uint32_t *value)
{
    uint32_t top = grammar_add_node(b->g, NODE_GRAPH), ws;
    b->g->nodes[top].start = grammar_add_state(b->g, false);
    if (!term_regex(b, "[ \\t]{1,4}|[ \\t]{0,2}(\\r?\\n){1,2}", &ws))
        return false;
    /* The arguments' object has its own node: a nested value with the same literals need not be an
     * object. */
    struct literals lits = schema_lits(b->s, root, false);
    bool apart = b->s->flags & SCHEMA_OBJECT;
    *value = apart ? grammar_add_node(b->g, NODE_GRAPH) : node_of(b, lits);
    if (!(b->s->flags & GRAMMAR_COMPACT) && !b->style)
        grammar_add_edge(b->g, false, ws, 1);
    grammar_add_edge(b->g, true, *value, 2);
    grammar_add_state(b->g, false);
    grammar_add_edge(b->g, true, *value, 2);
    grammar_add_state(b->g, true);
    return !apart ||
           (build_value(b, lits, *value, true, VALUE_JSON) && build_params(b) && build_elements(b));
}

static bool build(struct schema_builder *b)
{
    struct schema *s = b->s;
    const struct jvalue *root = jdoc_root(s->doc);
    uint32_t value;
    if (!schema_is(root))
        return schema_fail(s, root, "a schema is an object, true or false");
    schema_add_json(b->g, s->flags);
    b->words[0] = b->words[1] = b->words[2] = NO_LIMIT;
    b->style = style_of(s->flags);
    b->end = RE_NONE;
    if (b->style && b->style->nested == NEST_ELEMENTS)
        b->end = element_end(b, "invoke", 6);
    else if (b->style && b->style->end)
        b->end = re_parse(s->pool, b->style->end, strlen(b->style->end), 0, NULL);
    for (int i = 0; b->style && b->style->tags[i]; i++) {
        uint32_t t = re_not_containing(s->pool, b->style->tags[i]);
        b->no_tag = b->no_tag ? re_and(s->pool, b->no_tag, t) : t;
    }
    if (!build_root(b, root, &value))
        return false;
    for (uint32_t i = 0; i < b->n_sets && !s->failed; i++)
        if (!build_value(b, b->sets[i], b->node_of[i], false, VALUE_JSON))
            return false;
    if (s->failed)
        return false;
    grammar_finish(b->g);
    uint8_t *ok = mem_zalloc(b->g->n_nodes, 1);
    schema_productive(b->g, ok);
    bool fits = ok[value];
    schema_prune(b->g, ok);
    for (uint32_t i = 0; i < b->n_objects && fits; i++)
        fits = build_key(b, b->objects[i], ok);
    if (!fits && !s->failed)
        schema_fail(s, root, "no value fits this schema");
    mem_free(ok);
    if (b->style && b->style->spelled) {
        b->g->spelled = b->style->tags;
        for (uint32_t i = T_JSON_COUNT; i < b->g->n_terms; i++)
            b->g->terms[i].spells = true;
    }
    grammar_finish(b->g);
    return fits && !s->failed;
}

struct grammar *schema_compile(const char *text, size_t len, int flags, struct error *err)
{
    struct schema s = {.flags = flags, .err = err};
    s.doc = jdoc_parse(text, len, err);
    if (!s.doc)
        return NULL;
    s.pool = re_pool_new();
    s.memo = mem_zalloc((size_t)jdoc_count(s.doc) * 4, sizeof *s.memo);
    s.active = mem_zalloc((size_t)jdoc_count(s.doc) * 4, 1);
    const struct jvalue *draft = jvalue_get(jdoc_root(s.doc), "$schema");
    if (draft && draft->kind == J_STRING)
        s.old_ref = memmem(draft->text, draft->len, "draft-0", 7) != NULL;
    struct schema_builder b = {.s = &s, .g = grammar_new()};
    bool ok = build(&b);
    b.g->work = re_pool_work(s.pool) + s.n_shapes + b.lark_work;
    builder_clear(&b);
    schema_clear(&s);
    if (ok)
        return b.g;
    grammar_free(b.g);
    return NULL;
}
