/*
 * Replies as grammars; see the header. The frame of a call (tags, names, position of the arguments)
 * is a small graph per format. Arguments and responses are compiled by their own compilers and
 * imported.
 */
#include "text/chat/chat_grammar.h"
#include "base/mem.h"
#include "text/chat/chat.h"
#include "text/chat/chat_grammar_int.h"
#include "text/grammar/schema_json.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ to and from JSON text */

static const char *const thinking_names[] = {"no", "maybe", "first"};

char *chat_constraint_text(const struct chat_constraint *c)
{
    json_t *out =
               json_pack("{s:s,s:s,s:b,s:b}", "format", chat_format_name(c->format), "thinking",
                         thinking_names[c->thinking], "required", c->required, "one", c->one_call),
           *tool, *list = json_array();
    size_t i;
    json_array_foreach((json_t *)c->tools, i, tool)
    {
        json_t *f = json_object_get(tool, "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        if (!name || (c->only && strcmp(name, c->only) != 0))
            continue;
        json_t *entry = json_object();
        json_object_set(entry, "name", json_object_get(f, "name"));
        bool strict = json_is_true(json_object_get(f, "strict"));
        json_object_set_new(entry, "strict", json_boolean(strict));
        json_t *p = json_object_get(f, "parameters");
        if (p && !json_is_null(p))
            json_object_set(entry, "parameters", p);
        json_array_append_new(list, entry);
    }
    json_object_set_new(out, "tools", list);
    if (c->thoughts)
        json_object_set_new(out, "thoughts", json_string(chat_thoughts_name(c->thoughts)));
    if (c->response) {
        json_t *r = json_pack("{s:i}", "kind", (int)c->response->kind);
        json_t *text = json_stringn(c->response->text ? c->response->text : "", c->response->len);
        json_object_set_new(r, "text", text ? text : json_string(""));
        json_object_set_new(out, "response", r);
    }
    char *s = json_dumps(out, JSON_COMPACT), *copy = mem_strdup(s ? s : "");
    mem_free(s);
    json_decref(out);
    return copy;
}

/* ------------------------------------------------------------------ graphs */

static bool reply_fail(struct reply_builder *a, const char *what)
{
    if (!a->failed)
        error_set(a->err, "%s", what);
    a->failed = true;
    return false;
}

uint32_t graph_add_state(struct call_graph *gr)
{
    return gr->n_states++;
}

void graph_add_edge(struct call_graph *gr, uint32_t from, bool call, uint32_t target, uint32_t to)
{
    if (gr->n_edges == gr->cap) {
        gr->cap = gr->cap ? 2 * gr->cap : 32;
        gr->edges = mem_realloc(gr->edges, gr->cap, sizeof *gr->edges);
    }
    gr->edges[gr->n_edges++] = (struct call_graph_edge){from, to, target, call};
}

static int edge_cmp(const void *a, const void *b)
{
    const struct call_graph_edge *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

/* Adds the graph to the grammar as this node, and clears it. */
static void graph_emit(struct reply_builder *a, struct call_graph *gr, uint32_t node)
{
    uint32_t first = a->g->n_states, e = 0;
    if (gr->edges)
        qsort(gr->edges, gr->n_edges, sizeof *gr->edges, edge_cmp);
    for (uint32_t s = 0; s < gr->n_states; s++) {
        grammar_add_state(a->g, s == gr->final || (s && s == gr->also));
        for (; gr->edges && e < gr->n_edges && gr->edges[e].from == s; e++)
            grammar_add_edge(a->g, gr->edges[e].call, gr->edges[e].target, first + gr->edges[e].to);
    }
    a->g->nodes[node].start = first;
    mem_free(gr->edges);
    *gr = (struct call_graph){0};
}

/* Returns the terminal of a term, built on first use. */
static uint32_t terminal(struct reply_builder *a, uint32_t term)
{
    struct error why = {0};
    for (uint32_t i = 0; i < a->n_terms; i++)
        if (a->terms[2 * i] == term)
            return a->terms[2 * i + 1];
    struct dfa *d = dfa_new(a->pool, &term, 1, &why);
    if (!d) {
        reply_fail(a, why.msg);
        return 0;
    }
    if (a->n_terms == a->cap_terms) {
        a->cap_terms = a->cap_terms ? 2 * a->cap_terms : 16;
        a->terms = mem_realloc(a->terms, a->cap_terms, 2 * sizeof *a->terms);
    }
    uint32_t id = grammar_add_term(a->g, TERM_RAW, d);
    a->terms[2 * a->n_terms] = term;
    a->terms[2 * a->n_terms++ + 1] = id;
    return id;
}

static uint32_t pattern_term(struct reply_builder *a, const char *re)
{
    return re_parse(a->pool, re, strlen(re), 0, NULL);
}

/* Adds edges for a regular expression, a tag, or a tool's name between two expressions. */
void graph_add_pattern(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                       const char *re, uint32_t to)
{
    graph_add_edge(gr, from, false, terminal(a, pattern_term(a, re)), to);
}

/* Bytes as a pattern that matches nothing else. */
static void add_exact(struct buf *pattern, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        buf_addf(pattern, "\\x%02x", (unsigned char)text[i]);
}

void graph_add_tag(struct reply_builder *a, struct call_graph *gr, uint32_t from, const char *text,
                   bool token_only, uint32_t to)
{
    uint32_t id = a->g->n_terms;
    for (uint32_t i = 0; i < a->g->n_terms && id == a->g->n_terms; i++)
        if (a->g->terms[i].tag && !strcmp(a->g->terms[i].tag, text) &&
            a->g->terms[i].token_only == token_only)
            id = i;
    if (id == a->g->n_terms) {
        struct error why = {0};
        uint32_t t = re_literal(a->pool, text, strlen(text));
        struct dfa *d = dfa_new(a->pool, &t, 1, &why);
        if (!d) {
            reply_fail(a, why.msg);
            return;
        }
        grammar_add_tag(a->g, d, text, token_only);
    }
    graph_add_edge(gr, from, false, id, to);
}

void graph_add_name(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                    const char *before, const struct tool *t, const char *after, uint32_t to)
{
    struct buf name = {0};
    bool quoted = strchr(before, '"') != NULL;
    for (uint32_t i = 0; i < t->name->len; i++) {
        unsigned char c = (unsigned char)t->name->text[i];
        if (quoted && (c == '"' || c == '\\'))
            buf_addc(&name, '\\');
        if (quoted && c < ' ')
            buf_addf(&name, "\\u%04x", c);
        else
            buf_addc(&name, (char)c);
    }
    /* The rest is a terminal shared by all names, so that the terminals of the names stay short. */
    uint32_t term = re_cat(a->pool, pattern_term(a, before),
                           re_literal(a->pool, name.p ? name.p : "", name.len));
    uint32_t end = *after ? graph_add_state(gr) : to;
    graph_add_edge(gr, from, false, terminal(a, term), end);
    if (*after)
        graph_add_pattern(a, gr, end, after, to);
    buf_clear(&name);
}

/* ------------------------------------------------------------------ free text */

static uint32_t bytes_term(struct reply_builder *a, const char *text)
{
    uint32_t t = RE_EPS;
    CHECK(text, "free text without an end");
    for (const unsigned char *p = (const unsigned char *)text; *p; p++)
        t = re_cat(a->pool, t, re_char(a->pool, *p));
    return t;
}

static void add_free(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                     const struct stop *stops, uint32_t n, bool may_end, uint32_t to)
{
    uint32_t terms[32];
    struct error why = {0};
    CHECK(n <= 32, "stops of a free text");
    for (uint32_t i = 0; i < n; i++)
        terms[i] = stops[i].at_start ? pattern_term(a, stops[i].at_start)
                                     : re_cat(a->pool, RE_ALL, bytes_term(a, stops[i].text));
    struct dfa *d = dfa_new(a->pool, terms, (int)n, &why);
    if (!d) {
        reply_fail(a, why.msg);
        return;
    }
    memset(d->safe, 0, d->n_states * sizeof *d->safe); /* never skip over a stop */
    uint32_t id = grammar_add_term(a->g, TERM_FREE, d);
    struct free_text *f = mem_zalloc(1, sizeof *f);
    f->n = n;
    f->may_end = may_end;
    f->idle = dfa_step(d, dfa_step(d, 1, 1), 1);
    f->again = mem_zalloc(n + 1, sizeof *f->again);
    for (uint32_t i = 0; i < n; i++)
        f->again[i] = mem_strdup(stops[i].again ? stops[i].again : stops[i].text);
    a->g->terms[id].free = f;
    graph_add_edge(gr, from, false, id, to);
}

/* ------------------------------------------------------------------ arguments */

/* Relaxes a schema that cannot be enforced to its property names, their simple types and the
 * required list. */
static void relax_schema(const struct jvalue *p, struct buf *out)
{
    static const char *const types[] = {"string", "integer", "number", "boolean",
                                        "array",  "object",  "null"};
    const struct jvalue *props = jvalue_get(p, "properties"), *req = jvalue_get(p, "required");
    buf_adds(out, "{\"properties\":{");
    for (const struct jvalue *c = props ? props->first : NULL; c; c = c->next) {
        const struct jvalue *type = jvalue_get(c, "type");
        json_t *key = json_stringn(c->key, c->key_len);
        char *text = key ? json_dumps(key, JSON_ENCODE_ANY) : NULL;
        const char *known = NULL;
        for (size_t i = 0; type && i < sizeof types / sizeof *types; i++)
            if (jvalue_is(type, types[i]))
                known = types[i];
        if (out->p[out->len - 1] != '{')
            buf_addc(out, ',');
        buf_addf(out, known ? "%s:{\"type\":\"%s\"}" : "%s:{}", text ? text : "\"\"", known);
        mem_free(text);
        json_decref(key);
    }
    buf_adds(out, "}");
    if (req && req->kind == J_ARRAY) {
        buf_adds(out, ",\"required\":");
        buf_add(out, req->raw, req->raw_len);
    }
    buf_adds(out, "}");
}

enum { ARGS_WORK = 1500000, WISHED_WORK = 1000000, MAX_RELAXED = 3 };

static bool compile_args(struct reply_builder *a, struct tool *t, int flags)
{
    const struct jvalue *p = t->parameters;
    struct error why = {0};
    static const char any[] = "{}";
    bool demanded = t->strict || a->required;
    bool whole = p && (demanded || a->work < WISHED_WORK);
    flags |= SCHEMA_OBJECT;
    if (!whole && a->any_args) {
        t->args = a->any_args;
        return true;
    }
    /* Compiling is expensive, so only a few schemas that cannot be enforced are tried. */
    struct grammar *g = NULL;
    if (t->strict || a->n_relaxed < MAX_RELAXED)
        g = schema_compile(whole ? p->raw : any, whole ? p->raw_len : 2, flags, &why);
    if (!g && !t->strict) {
        a->n_relaxed++;
        struct buf text = {0};
        relax_schema(p, &text);
        why = (struct error){0};
        g = schema_compile(text.p, text.len, flags, &why);
        buf_clear(&text);
    }
    if (!g) {
        struct error named = {0};
        error_set(&named, "the parameters of the tool '%.*s': %.600s", (int)t->name->len,
                  t->name->text, why.msg);
        return reply_fail(a, named.msg);
    }
    if (!demanded && whole && a->work + g->work + g->n_nodes > WISHED_WORK) {
        grammar_free(g);
        a->work = WISHED_WORK; /* any object will do for this tool and the following ones */
        return compile_args(a, t, flags);
    }
    a->work += g->work + g->n_nodes;
    if (a->work > ARGS_WORK) {
        grammar_free(g);
        return reply_fail(a, "the tools' schemas take over 1500000 steps");
    }
    t->args = grammar_import(a->g, g);
    if (!whole)
        a->any_args = t->args;
    return true;
}

/* ------------------------------------------------------------------ the whole reply */

/* Text of tags and words between them, as in <|channel>thought. A tag after a word may be spelled out: a vocabulary
 * without the token would otherwise lead to a word that nothing can follow. */
static void add_marks(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                      const char *text, bool token_only, uint32_t to)
{
    token_only = token_only && (*text == '<' || *text == '[');
    for (bool first = true; *text; first = false) {
        bool tag = *text == '<' || *text == '[';
        size_t n = tag ? strcspn(text, ">]") + 1 : strcspn(text, "<[");
        uint32_t next = text[n] ? graph_add_state(gr) : to;
        struct buf part = {0};
        if (tag) {
            buf_add(&part, text, n);
            buf_addc(&part, 0);
            graph_add_tag(a, gr, from, part.p, token_only, next);
        } else {
            buf_adds(&part, first ? " ?" : "");
            add_exact(&part, text, n);
            buf_addc(&part, 0);
            graph_add_pattern(a, gr, from, part.p, next);
        }
        buf_clear(&part);
        from = next;
        text += n;
    }
}

/* The answer: `body`, which the family's marks may precede if it may be a text. */
static void add_answer(struct reply_builder *a, struct call_graph *gr, uint32_t from, uint32_t body,
                       bool text)
{
    for (int i = 0; text && a->marks->answer[i]; i++) {
        uint32_t framed = graph_add_state(gr);
        add_marks(a, gr, from, a->marks->answer[i], true, framed);
        graph_add_edge(gr, framed, true, body, gr->final);
    }
    graph_add_edge(gr, from, true, body, gr->final);
}

/* Reasoning that is already open at `from`, up to its closing tag, or to a call where the family makes calls while it
 * thinks; `after` is the state after such calls. */
static void add_thoughts(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                         bool may_end, uint32_t to, uint32_t calls, uint32_t after)
{
    const struct call_form *f = calls ? chat_form_of(a->format) : NULL;
    bool both =
        f && a->marks->call && f->stops[0].text && !strcmp(a->marks->call, f->stops[0].text);
    uint32_t end = graph_add_state(gr);
    struct stop stops[2] = {{.text = a->marks->close}, {.text = a->marks->call}};
    add_free(a, gr, from, stops, both ? 2 : 1, may_end, end);
    graph_add_tag(a, gr, end, a->marks->close, false, to);
    if (both)
        graph_add_edge(gr, end, true, calls, after);
}

/* Free text from `from` that may turn into calls; in state `to` after a call. The first text of a
 * reply may also turn into reasoning, which continues at `think`. */
static void add_text(struct reply_builder *a, struct call_graph *gr, uint32_t from, uint32_t calls,
                     uint32_t think, uint32_t to)
{
    const struct call_form *f = chat_form_of(a->format);
    struct stop stops[32];
    struct buf names[24] = {0};
    uint32_t n = 0, begun = graph_add_state(gr);
    for (; n < 3 && (f->stops[n].text || f->stops[n].at_start); n++)
        stops[n] = f->stops[n];
    /* A Python call has no tag; it starts with a tool's name. */
    for (uint32_t i = 0; a->format == CHAT_PYTHONIC && i < a->n_tools && i < 24; i++) {
        const struct jvalue *name = a->tools[i].name;
        buf_adds(&names[i], CALL_LEAD "\\[");
        add_exact(&names[i], name->text, name->len);
        buf_adds(&names[i], "\\(");
        size_t expression = names[i].len + 1;
        buf_addc(&names[i], 0);
        buf_addf(&names[i], "[%.*s(", (int)name->len, name->text);
        stops[n++] = (struct stop){.at_start = names[i].p, .again = names[i].p + expression};
    }
    struct buf lead = {0};
    if (think) {
        buf_adds(&lead, CALL_LEAD);
        add_exact(&lead, a->marks->open, strlen(a->marks->open));
        buf_addc(&lead, 0);
        stops[n++] = (struct stop){.at_start = lead.p, .again = a->marks->open};
        add_marks(a, gr, begun, a->marks->open, false, think);
    }
    add_free(a, gr, from, stops, n, true, begun);
    graph_add_edge(gr, begun, true, calls, to);
    buf_clear(&lead);
    for (int i = 0; i < 24; i++)
        buf_clear(&names[i]);
}

/* tool_choice auto: text that may contain calls. */
static void reply_auto(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                       uint32_t calls)
{
    const struct call_form *f = chat_form_of(a->format);
    uint32_t text = graph_add_state(gr), think = 0;
    uint32_t after = f->last || a->one ? gr->final : text;
    if (a->thinking == CHAT_THINKS_FIRST && a->format != CHAT_GPT_OSS) {
        add_thoughts(a, gr, from, true, text, calls, after);
    } else {
        bool may = a->thinking == CHAT_THINKS_MAYBE && a->format != CHAT_GPT_OSS;
        if (may) {
            think = graph_add_state(gr);
            add_thoughts(a, gr, think, true, text, calls, after);
        }
        add_text(a, gr, from, calls, think, after);
    }
    add_text(a, gr, text, calls, 0, after);
}

/* Only calls, or a text that satisfies the response constraint. */
static void reply_fixed(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                        uint32_t calls, uint32_t response)
{
    const struct call_form *f = chat_form_of(a->format);
    if (response)
        graph_add_edge(gr, from, true, response, gr->final);
    if (!calls)
        return;
    bool more = f->repeats && !a->one;
    uint32_t after = more ? graph_add_state(gr) : gr->final;
    graph_add_edge(gr, from, true, calls, after);
    if (more) { /* a separate state: no calls after a response */
        uint32_t space = graph_add_state(gr);
        gr->also = after;
        graph_add_pattern(a, gr, after, "[ \\n]{1,2}", space);
        graph_add_edge(gr, after, true, calls, after);
        graph_add_edge(gr, space, true, calls, after);
    }
}

/* gpt-oss: every message has a header, and reasoning is one of its channels. */
static void reply_gpt_oss(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                          uint32_t calls, uint32_t response)
{
    uint32_t channel = graph_add_state(gr), analysis = graph_add_state(gr),
             thoughts = graph_add_state(gr);
    uint32_t end = graph_add_state(gr), start = graph_add_state(gr), role = graph_add_state(gr);
    struct stop close = {.text = "<|end|>"};
    graph_add_tag(a, gr, from, "<|channel|>", false, channel);
    graph_add_pattern(a, gr, channel, "analysis", analysis);
    graph_add_tag(a, gr, analysis, "<|message|>", false, thoughts);
    add_free(a, gr, thoughts, &close, 1, false, end);
    graph_add_tag(a, gr, end, "<|end|>", false, start);
    graph_add_tag(a, gr, start, "<|start|>", false, role);
    graph_add_pattern(a, gr, role, "assistant", from);
    if (calls) {
        graph_add_edge(gr, from, true, calls, gr->final);
        graph_add_edge(gr, start, true, calls, gr->final);
    }
    if (response) {
        uint32_t header = graph_add_state(gr), body = graph_add_state(gr);
        graph_add_pattern(a, gr, channel, "final", header);
        graph_add_tag(a, gr, header, "<|message|>", false, body);
        graph_add_edge(gr, body, true, response, gr->final);
    }
}

static void reply_build(struct reply_builder *a, uint32_t response)
{
    const struct call_form *f = chat_form_of(a->format);
    struct call_graph gr = {0};
    uint32_t calls = 0, from, think;
    for (int strict = 1; strict >= 0; strict--) /* the schemas that must hold come first */
        for (uint32_t i = 0; i < a->n_tools && !a->failed; i++)
            if (a->tools[i].strict == strict)
                compile_args(a, &a->tools[i], f->args);
    if (a->failed)
        return;
    if (a->n_tools) {
        calls = grammar_add_node(a->g, NODE_GRAPH);
        f->calls(a, &gr);
        graph_emit(a, &gr, calls);
    }
    from = graph_add_state(&gr);
    gr.final = graph_add_state(&gr);
    if (calls && !a->required && !response) {
        reply_auto(a, &gr, from, calls);
    } else if (a->format == CHAT_GPT_OSS) {
        reply_gpt_oss(a, &gr, from, calls, a->required ? 0 : response);
    } else {
        uint32_t body = grammar_add_node(a->g, NODE_GRAPH);
        bool text = response && !a->required;
        struct call_graph inner = {0};
        uint32_t first = graph_add_state(&inner);
        inner.final = graph_add_state(&inner);
        reply_fixed(a, &inner, first, calls, a->required ? 0 : response);
        graph_emit(a, &inner, body);
        think = from;
        if (a->thinking != CHAT_THINKS_FIRST)
            add_answer(a, &gr, from, body, text);
        if (a->thinking == CHAT_THINKS_MAYBE)
            add_marks(a, &gr, from, a->marks->open, true, think = graph_add_state(&gr));
        if (a->thinking != CHAT_THINKS_NOT) {
            uint32_t done = graph_add_state(&gr), space = graph_add_state(&gr);
            add_thoughts(a, &gr, think, false, done, calls, gr.final);
            graph_add_pattern(a, &gr, done, "[ \\n]{1,2}", space);
            add_answer(a, &gr, done, body, text);
            add_answer(a, &gr, space, body, text);
        }
    }
    graph_emit(a, &gr, 0);
}

static bool read_tools(struct reply_builder *a, const struct jvalue *list)
{
    if (!list || list->kind != J_ARRAY)
        return true;
    if (list->n > CHAT_TOOLS_MAX)
        return reply_fail(a, "over 512 tools");
    if (list->n && !chat_form_of(a->format))
        return reply_fail(a, "this model's template has no tool-call format");
    a->tools = mem_zalloc(list->n + 1, sizeof *a->tools);
    for (const struct jvalue *t = list->first; t; t = t->next) {
        const struct jvalue *name = jvalue_get(t, "name"), *strict = jvalue_get(t, "strict");
        if (!name || name->kind != J_STRING || !name->len || name->len > 256)
            return reply_fail(a, "tool without a name");
        a->tools[a->n_tools++] = (struct tool){.name = name,
                                               .parameters = jvalue_get(t, "parameters"),
                                               .strict = strict && strict->kind == J_TRUE};
    }
    return true;
}

static bool read_response(struct reply_builder *a, const struct jvalue *r, uint32_t *node)
{
    const struct jvalue *kind = jvalue_get(r, "kind"), *text = jvalue_get(r, "text");
    if (!kind || kind->kind != J_NUMBER || kind->len != 1 || kind->text[0] < '0' ||
        kind->text[0] > '4' || !text || text->kind != J_STRING)
        return reply_fail(a, "response without kind or text");
    struct grammar_source src = {.kind = (enum grammar_kind)(kind->text[0] - '0'),
                                 .flags = a->flags,
                                 .text = text->text,
                                 .len = text->len};
    struct grammar *g = grammar_compile(&src, a->err);
    if (!g)
        return !(a->failed = true);
    *node = grammar_import(a->g, g);
    return true;
}

struct grammar *chat_reply_compile(const char *text, size_t len, int flags, struct error *err)
{
    struct reply_builder a = {.err = err, .flags = flags};
    struct error ignored;
    if (!err)
        a.err = &ignored;
    struct jdoc *doc = jdoc_parse(text, len, err);
    if (!doc)
        return NULL;
    const struct jvalue *root = jdoc_root(doc), *v = jvalue_get(root, "format");
    char name[32] = "";
    if (v && v->kind == J_STRING && v->len < sizeof name)
        memcpy(name, v->text, v->len);
    v = jvalue_get(root, "thinking");
    for (int i = 0; v && i < 3; i++)
        if (jvalue_is(v, thinking_names[i]))
            a.thinking = (enum chat_thinking)i;
    enum chat_thoughts thoughts = CHAT_THOUGHTS_TAGS;
    v = jvalue_get(root, "thoughts");
    for (int i = 0; v && i < CHAT_N_THOUGHTS; i++)
        if (jvalue_is(v, chat_thoughts_name((enum chat_thoughts)i)))
            thoughts = (enum chat_thoughts)i;
    v = jvalue_get(root, "required");
    a.required = v && v->kind == J_TRUE;
    v = jvalue_get(root, "one");
    a.one = v && v->kind == J_TRUE;
    uint32_t response = 0;
    a.g = grammar_new();
    a.pool = re_pool_new();
    schema_add_json(a.g, flags);
    grammar_add_node(a.g, NODE_GRAPH);
    v = jvalue_get(root, "response");
    bool ok = chat_format_from_name(name, &a.format) || reply_fail(&a, "unknown format");
    a.marks = chat_marks_of(a.format, thoughts, false);
    ok = ok && read_tools(&a, jvalue_get(root, "tools")) &&
         (!v || read_response(&a, v, &response)) &&
         (a.n_tools || (v && !a.required) || reply_fail(&a, "there is nothing to constrain"));
    if (ok)
        reply_build(&a, response);
    if (!a.failed && re_pool_error(a.pool))
        reply_fail(&a, re_pool_error(a.pool));
    grammar_finish(a.g);
    if (a.failed) {
        grammar_free(a.g);
        a.g = NULL;
    }
    re_pool_free(a.pool);
    mem_free(a.tools);
    mem_free(a.terms);
    jdoc_free(doc);
    return a.g;
}
