/*
 * GBNF (llama.cpp's grammar syntax) and lists of choices.
 *
 * Rules are parsed into trees; grammar_rules.c compiles them.
 *
 * An extension of llama.cpp's syntax: "|" may begin a line. Token names in angle brackets are
 * rejected.
 */
#include "text/grammar/grammar_rules.h"
#include "text/grammar/schema_json.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

enum { DEPTH_MAX = 200 };

struct gbnf {
    const char *at, *end;
    struct rules *rules;
    int depth;
};

static uint32_t gbnf_fail(struct gbnf *p, const char *what)
{
    return rules_fail(p->rules, what);
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
            p->rules->line++;
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

/* Parses one character of a literal or class, resolving escapes. */
static bool char_parse(struct gbnf *p, uint32_t *cp)
{
    if (p->at >= p->end)
        return gbnf_fail(p, "unterminated literal or character class");
    if (*p->at != '\\') {
        int n = utf8_decode(p->at, (size_t)(p->end - p->at), cp);
        if (!n)
            return gbnf_fail(p, "invalid UTF-8");
        p->rules->line += *cp == '\n';
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
        uint32_t lo = 0, hi;
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
    uint32_t t = ok ? rules_tree(p->rules, RULE_TERM, re_set(p->rules->pool, r, n, negated)) : 0;
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
        uint32_t t = ok ? rules_tree(p->rules, RULE_TERM,
                                     re_literal(p->rules->pool, text.p ? text.p : "", text.len))
                        : 0;
        buf_clear(&text);
        return t;
    }
    if (c == '[') {
        p->at++;
        return class_parse(p);
    }
    if (c == '.') {
        p->at++;
        return rules_tree(p->rules, RULE_TERM, RE_ANY);
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
    return rules_tree(p->rules, RULE_CALL, rules_find(p->rules, name, len));
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
        atom = rules_repeat(p->rules, atom, lo, hi);
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
    uint32_t alt = rules_tree(p->rules, RULE_ALT, 0), last_branch = 0;
    if (!alt)
        return 0;
    for (;;) {
        uint32_t cat = rules_tree(p->rules, RULE_CAT, 0), last = 0;
        if (!cat)
            return 0;
        skip_space(p, nested);
        while (p->at < p->end && *p->at != '|' && *p->at != ')' && *p->at != '\n') {
            if (!nested && !last && at_rule(p)) /* an empty rule before the next one */
                break;
            if (!rules_append(p->rules, cat, &last, repeat_parse(p, atom_parse(p))))
                return 0;
            skip_space(p, nested);
        }
        rules_append(p->rules, alt, &last_branch, cat);
        if (!nested && p->at < p->end && *p->at == '\n') { /* does the next line start with "|"? */
            const char *at = p->at;
            uint32_t line = p->rules->line;
            skip_space(p, true);
            if (p->at >= p->end || *p->at != '|') {
                p->at = at;
                p->rules->line = line;
            }
        }
        if (p->at >= p->end || *p->at != '|')
            return alt;
        p->at++;
        skip_space(p, true);
    }
}

static bool gbnf_rules(struct gbnf *p)
{
    skip_space(p, true);
    while (p->at < p->end) {
        const char *name;
        uint32_t len, line = p->rules->line;
        if (!name_parse(p, &name, &len))
            return gbnf_fail(p, "missing rule name");
        skip_space(p, false);
        if (p->end - p->at < 3 || memcmp(p->at, "::=", 3))
            return gbnf_fail(p, "missing \"::=\"");
        p->at += 3;
        skip_space(p, true);
        uint32_t r = rules_find(p->rules, name, len);
        uint32_t t = p->rules->err->msg[0] ? 0 : alt_parse(p, false);
        if (!t)
            return false;
        if (p->rules->rules[r].tree)
            return gbnf_fail(p, "duplicate rule");
        p->rules->rules[r].tree = t;
        p->rules->rules[r].line = line;
        skip_space(p, false);
        if (p->at < p->end && *p->at != '\n')
            return gbnf_fail(p, "unexpected text after a rule");
        skip_space(p, true);
    }
    p->rules->root = rules_find(p->rules, "root", 4);
    return true;
}

static bool gbnf_parse(struct rules *rules, const char *text, size_t len)
{
    return gbnf_rules(&(struct gbnf){.at = text, .end = text + len, .rules = rules});
}

struct grammar *gbnf_compile(const char *text, size_t len, struct error *err)
{
    return rules_compile(gbnf_parse, text, len, TERM_RAW, NULL, err);
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
