/*
 * Lark: the grammars of OpenAI's custom tools, as Codex sends them.
 *
 * Rules, terminals, strings, regular expressions with flags, ranges, groups, "|", *, +, ?, [ ], ~n and
 * ~n..m, priorities, aliases, %import common.NAME and %ignore. Parsed into trees; grammar_rules.c
 * compiles them.
 *
 * A text fits if some division of it into terminals does. So priorities, lazy quantifiers and the lexer's
 * preference for the longest match, which choose between divisions, do not change what fits. Between the
 * terminals of a rule, and around the text, ignored terminals may follow.
 *
 * What is not enforced exactly is rejected with its line: templates, other imports, %declare, %override,
 * %extend, tokens by name, anchors and look-around in terminals.
 */
#include "text/grammar/grammar_rules.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

enum { DEPTH_MAX = 200, COUNT_MAX = 10000 };

struct lark {
    const char *at, *end;
    struct rules *rules;
    int depth;
    bool terminal;      /* inside a terminal: its parts are one text */
    uint32_t gap;       /* the rule of ignored text between terminals */
    uint32_t gap_parts; /* its alternatives */
    uint32_t gap_last;  /* the last one; 0: nothing is ignored */
};

/* Names of rules that no grammar can write. */
static const char gap_name[] = "%ignore", root_name[] = "%root";

static uint32_t lark_fail(struct lark *p, const char *what)
{
    return rules_fail(p->rules, what);
}

static bool has_more(const struct lark *p)
{
    return p->at < p->end;
}

static bool try_consume(struct lark *p, const char *s)
{
    size_t n = strlen(s);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, s, n))
        return false;
    p->at += n;
    return true;
}

/* Skips white space, newlines and comments (// and #). */
static void skip_space(struct lark *p)
{
    for (; has_more(p); p->at++) {
        bool slashes = p->end - p->at >= 2 && p->at[0] == '/' && p->at[1] == '/';
        if (*p->at == '#' || slashes) {
            while (p->at + 1 < p->end && p->at[1] != '\n')
                p->at++;
        } else if (*p->at == '\n') {
            p->rules->line++;
        } else if (*p->at != ' ' && *p->at != '\t' && *p->at != '\r' && *p->at != '\f') {
            return;
        }
    }
}

static bool is_upper(char c)
{
    return c >= 'A' && c <= 'Z';
}

static bool is_lower(char c)
{
    return c >= 'a' && c <= 'z';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* A name: of a terminal in capitals, of a rule in small letters. */
static bool name_parse(struct lark *p, const char **name, size_t *len, bool *terminal)
{
    const char *s = p->at;
    while (s < p->end && *s == '_')
        s++;
    if (s >= p->end || !(is_upper(*s) || is_lower(*s)))
        return false;
    *terminal = is_upper(*s);
    while (s < p->end && (*s == '_' || is_digit(*s) || (*terminal ? is_upper(*s) : is_lower(*s))))
        s++;
    *name = p->at;
    *len = (size_t)(s - p->at);
    p->at = s;
    return true;
}

static bool count_parse(struct lark *p, uint32_t *n)
{
    const char *from = p->at;
    for (*n = 0; has_more(p) && is_digit(*p->at); p->at++)
        if (*n <= COUNT_MAX)
            *n = *n * 10 + (uint32_t)(*p->at - '0');
    return p->at > from;
}

/* The head of a definition: a name, its priority, and the colon. */
struct rule_head {
    const char *name;
    size_t len;
    bool terminal;
};

static bool head_parse(struct lark *p, struct rule_head *h)
{
    uint32_t priority;
    while (has_more(p) && (*p->at == '?' || *p->at == '!'))
        p->at++;
    if (!name_parse(p, &h->name, &h->len, &h->terminal))
        return lark_fail(p, "a definition without a name");
    if (has_more(p) && *p->at == '{')
        return lark_fail(p, "a template, which is not supported");
    if (try_consume(p, ".")) {
        try_consume(p, "-");
        if (!count_parse(p, &priority))
            return lark_fail(p, "a priority that is not a number");
    }
    skip_space(p);
    return try_consume(p, ":") || lark_fail(p, "missing \":\" after a name");
}

/* Whether the next definition or directive begins here. A body contains neither ":" nor "%". */
static bool at_head(const struct lark *p)
{
    if (*p->at == '%' || *p->at == '?' || *p->at == '!')
        return true;
    struct rules scratch = {.line = 1};
    struct lark ahead = *p;
    ahead.rules = &scratch;
    struct rule_head h;
    if (!name_parse(&ahead, &h.name, &h.len, &h.terminal))
        return false;
    while (has_more(&ahead) && strchr(".-0123456789", *ahead.at) && *ahead.at)
        ahead.at++;
    skip_space(&ahead);
    return has_more(&ahead) && *ahead.at == ':';
}

/* ---- terminals ---- */

/* A terminal. In a rule, ignored text may follow it. */
static uint32_t with_gap(struct lark *p, uint32_t tree)
{
    uint32_t cat = tree && !p->terminal ? rules_tree(p->rules, RULE_CAT, 0) : 0, last = 0;
    if (!cat)
        return tree;
    uint32_t gap = rules_tree(p->rules, RULE_CALL, p->gap);
    return rules_append(p->rules, cat, &last, tree) && rules_append(p->rules, cat, &last, gap) ? cat
                                                                                               : 0;
}

static bool hex_parse(struct lark *p, int n, uint32_t *cp)
{
    *cp = 0;
    for (; n; n--, p->at++) {
        char c = has_more(p) ? *p->at : 0;
        int d = is_digit(c)                          ? c - '0'
                : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                     : -1;
        if (d < 0)
            return lark_fail(p, "missing hexadecimal digit");
        *cp = *cp << 4 | (uint32_t)d;
    }
    return (*cp <= CP_MAX && (*cp < 0xd800 || *cp >= 0xe000)) ||
           lark_fail(p, "not a Unicode character");
}

/* One character of a string, resolving escapes. */
static bool char_parse(struct lark *p, uint32_t *cp)
{
    if (!try_consume(p, "\\")) {
        int n = has_more(p) ? utf8_decode(p->at, (size_t)(p->end - p->at), cp) : 0;
        if (!has_more(p) || *p->at == '\n')
            return lark_fail(p, "a string without its closing quote");
        p->at += n;
        return n || lark_fail(p, "invalid UTF-8");
    }
    static const char from[] = "nrtf\"\\/'", to[] = "\n\r\t\f\"\\/'";
    char c = has_more(p) ? *p->at : 0;
    const char *hit = c ? strchr(from, c) : NULL;
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (!hit && !digits)
        return lark_fail(p, "an unknown escape in a string");
    p->at++;
    if (digits)
        return hex_parse(p, digits, cp);
    *cp = (uint32_t)to[hit - from];
    return true;
}

/* After the opening quote. Returns the term, and in *one the character if there is just one. */
static uint32_t string_parse(struct lark *p, uint32_t *one)
{
    struct re_pool *pool = p->rules->pool;
    struct buf text = {0};
    uint32_t cp = 0, n = 0;
    bool ok = true;
    *one = UINT32_MAX;
    while (ok && (!has_more(p) || *p->at != '"')) {
        char out[4];
        ok = char_parse(p, &cp);
        if (ok)
            buf_add(&text, out, (size_t)utf8_encode(cp, out));
        *one = ok && !n++ ? cp : UINT32_MAX;
    }
    uint32_t term = RE_NONE;
    const char *s = text.p ? text.p : "";
    if (ok && try_consume(p, "\"") && try_consume(p, "i")) {
        struct buf quoted = {0};
        struct error err = {0};
        for (size_t i = 0; i < text.len; i++) {
            if (strchr("\\^$.|?*+()[]{}/", s[i]) && s[i])
                buf_addc(&quoted, '\\');
            buf_addc(&quoted, s[i]);
        }
        term = re_parse(pool, quoted.p ? quoted.p : "", quoted.len, RE_LARK | RE_ICASE, &err);
        if (err.msg[0])
            lark_fail(p, err.msg);
        buf_clear(&quoted);
    } else if (ok) {
        term = re_literal(pool, s, text.len);
    }
    buf_clear(&text);
    return term;
}

/* "text", "text"i, or "a".."z". */
static uint32_t literal_parse(struct lark *p)
{
    uint32_t one, two, term = string_parse(p, &one);
    if (!p->rules->err->msg[0] && try_consume(p, "..")) {
        if (!try_consume(p, "\""))
            return lark_fail(p, "a range without its second character");
        string_parse(p, &two);
        if (p->rules->err->msg[0])
            return 0;
        if (one == UINT32_MAX || two == UINT32_MAX)
            return lark_fail(p, "a range of strings that are not one character");
        if (two < one)
            return lark_fail(p, "a range in reverse order");
        term = re_set(p->rules->pool, &(struct re_range){one, two}, 1, false);
    }
    return p->rules->err->msg[0] ? 0 : rules_tree(p->rules, RULE_TERM, term);
}

/* After the opening slash. */
static uint32_t regex_parse(struct lark *p)
{
    const char *from = p->at;
    while (has_more(p) && *p->at != '/') {
        p->rules->line += *p->at == '\n';
        p->at += *p->at == '\\' && p->end - p->at > 1 ? 2 : 1;
    }
    if (!has_more(p))
        return lark_fail(p, "a regular expression without its closing slash");
    size_t len = (size_t)(p->at++ - from);
    int flags = RE_LARK;
    for (; has_more(p) && is_lower(*p->at); p->at++) {
        /* m is about anchors, which are rejected anyway; u is the default. */
        if (!strchr("imsux", *p->at))
            return lark_fail(p, "a flag of a regular expression that is not i, m, s, u or x");
        flags |= *p->at == 'i'   ? RE_ICASE
                 : *p->at == 's' ? RE_DOT_ALL
                 : *p->at == 'x' ? RE_VERBOSE
                                 : 0;
    }
    if (memchr(from, '\n', len) && !(flags & RE_VERBOSE))
        return lark_fail(p, "a regular expression of several lines without the flag x");
    struct error err = {0};
    uint32_t term = re_parse(p->rules->pool, from, len, flags, &err);
    return err.msg[0] ? lark_fail(p, err.msg) : rules_tree(p->rules, RULE_TERM, term);
}

/* ---- bodies ---- */

static uint32_t alt_parse(struct lark *p);

/* After "(" or "[". */
static uint32_t group_parse(struct lark *p, const char *close)
{
    if (++p->depth > DEPTH_MAX)
        return lark_fail(p, "nested over 200 deep");
    uint32_t t = alt_parse(p);
    p->depth--;
    if (t && !try_consume(p, close))
        return lark_fail(p, *close == ')' ? "( without )" : "[ without ]");
    return *close == ')' ? t : rules_repeat(p->rules, t, 0, 1);
}

static uint32_t atom_parse(struct lark *p)
{
    struct rule_head h;
    if (try_consume(p, "("))
        return group_parse(p, ")");
    if (try_consume(p, "["))
        return group_parse(p, "]");
    if (try_consume(p, "\""))
        return with_gap(p, literal_parse(p));
    if (try_consume(p, "/"))
        return with_gap(p, regex_parse(p));
    if (!name_parse(p, &h.name, &h.len, &h.terminal))
        return lark_fail(p, *p->at == '<' ? "tokens by name are not supported"
                                          : "an unexpected character in a definition");
    if (has_more(p) && *p->at == '{')
        return lark_fail(p, "a template, which is not supported");
    if (has_more(p) && *p->at == '[')
        return lark_fail(p, "attributes in brackets after a name are not supported");
    if (p->terminal && !h.terminal)
        return lark_fail(p, "a terminal that uses a rule");
    uint32_t t = rules_tree(p->rules, RULE_CALL, rules_find(p->rules, h.name, h.len));
    return h.terminal ? with_gap(p, t) : t;
}

/* Parses one of *, +, ?, ~n and ~n..m after an atom. */
static uint32_t repeat_parse(struct lark *p, uint32_t atom)
{
    uint32_t lo, hi;
    while (has_more(p) && (*p->at == ' ' || *p->at == '\t')) /* the next line may begin with "?" */
        p->at++;
    if (!atom)
        return 0;
    if (try_consume(p, "*"))
        return rules_repeat(p->rules, atom, 0, RE_INF);
    if (try_consume(p, "+"))
        return rules_repeat(p->rules, atom, 1, RE_INF);
    if (try_consume(p, "?"))
        return rules_repeat(p->rules, atom, 0, 1);
    if (!try_consume(p, "~"))
        return atom;
    skip_space(p);
    if (!count_parse(p, &lo))
        return lark_fail(p, "a repeat without a count");
    hi = lo;
    skip_space(p);
    if (try_consume(p, "..")) {
        skip_space(p);
        if (!count_parse(p, &hi))
            return lark_fail(p, "a repeat without its second count");
    }
    if (lo > COUNT_MAX || hi > COUNT_MAX)
        return lark_fail(p, "a repeat count over 10000");
    if (hi < lo)
        return lark_fail(p, "a repeat count with minimum above maximum");
    return rules_repeat(p->rules, atom, lo, hi);
}

/* The name that a tree would get: no text. */
static bool alias_parse(struct lark *p)
{
    struct rule_head h;
    if (!try_consume(p, "->"))
        return true;
    skip_space(p);
    return name_parse(p, &h.name, &h.len, &h.terminal) || lark_fail(p, "-> without a name");
}

static bool branch_parse(struct lark *p, uint32_t cat)
{
    uint32_t last = 0;
    skip_space(p);
    while (has_more(p) && !strchr("|)]", *p->at) && !at_head(p)) {
        if (p->at[0] == '-' && p->end - p->at > 1 && p->at[1] == '>')
            break;
        if (!rules_append(p->rules, cat, &last, repeat_parse(p, atom_parse(p))))
            return false;
        skip_space(p);
    }
    if (!alias_parse(p))
        return false;
    skip_space(p);
    return true;
}

static uint32_t alt_parse(struct lark *p)
{
    uint32_t alt = rules_tree(p->rules, RULE_ALT, 0), last = 0;
    skip_space(p);
    try_consume(p, "|"); /* may precede the first alternative */
    do {
        uint32_t cat = rules_tree(p->rules, RULE_CAT, 0);
        if (!alt || !cat || !branch_parse(p, cat) || !rules_append(p->rules, alt, &last, cat))
            return 0;
    } while (try_consume(p, "|"));
    return alt;
}

static bool define(struct lark *p, const char *name, size_t len, uint32_t tree, uint32_t line)
{
    uint32_t r = rules_find(p->rules, name, len);
    if (!tree || p->rules->err->msg[0])
        return false;
    if (p->rules->rules[r].tree)
        return lark_fail(p, "a name that is defined twice");
    p->rules->rules[r].tree = tree;
    p->rules->rules[r].line = line;
    return true;
}

static bool definition_parse(struct lark *p)
{
    struct rule_head h = {0};
    uint32_t line = p->rules->line;
    if (!head_parse(p, &h))
        return false;
    p->terminal = h.terminal;
    uint32_t tree = alt_parse(p);
    p->terminal = false;
    return define(p, h.name, h.len, tree, line);
}

/* ---- directives ---- */

/* Lark's common.lark. */
static const struct {
    const char *name, *regex;
} common[] = {
#define INT    "[0-9]+"
#define EXP    "[eE][+-]?" INT
#define FLOAT  "(?:" INT EXP "|(?:" INT "\\.[0-9]*|\\." INT ")(?:" EXP ")?)"
#define NUMBER "(?:" FLOAT "|" INT ")"
    {"DIGIT", "[0-9]"},
    {"HEXDIGIT", "[0-9a-fA-F]"},
    {"INT", INT},
    {"SIGNED_INT", "[+-]?" INT},
    {"DECIMAL", INT "\\.[0-9]*|\\." INT},
    {"FLOAT", FLOAT},
    {"SIGNED_FLOAT", "[+-]?" FLOAT},
    {"NUMBER", NUMBER},
    {"SIGNED_NUMBER", "[+-]?" NUMBER},
    {"ESCAPED_STRING", "\"(?:[^\"\\\\\\n]|\\\\[^\\n])*\""},
    {"LCASE_LETTER", "[a-z]"},
    {"UCASE_LETTER", "[A-Z]"},
    {"LETTER", "[A-Za-z]"},
    {"WORD", "[A-Za-z]+"},
    {"CNAME", "[_A-Za-z][_A-Za-z0-9]*"},
    {"WS_INLINE", "[ \\t]+"},
    {"WS", "[ \\t\\f\\r\\n]+"},
    {"CR", "\\r"},
    {"LF", "\\n"},
    {"NEWLINE", "(?:\\r?\\n)+"},
    {"SH_COMMENT", "#[^\\n]*"},
    {"CPP_COMMENT", "\\/\\/[^\\n]*"},
    {"C_COMMENT", "\\/\\*(?:[^*]|\\*+[^*\\/])*\\*+\\/"},
    {"SQL_COMMENT", "--[^\\n]*"},
#undef INT
#undef EXP
#undef FLOAT
#undef NUMBER
};

/* Defines `as` as the common terminal of this name. */
static bool import_common(struct lark *p, const struct rule_head *h, const struct rule_head *as)
{
    for (size_t i = 0; i < sizeof common / sizeof *common; i++) {
        const char *regex = common[i].regex;
        if (strlen(common[i].name) != h->len || memcmp(common[i].name, h->name, h->len) != 0)
            continue;
        uint32_t term = re_parse(p->rules->pool, regex, strlen(regex), RE_LARK, NULL);
        return define(p, as->name, as->len, rules_tree(p->rules, RULE_TERM, term), p->rules->line);
    }
    char what[120];
    snprintf(what, sizeof what, "%%import of common.%.*s, which does not exist",
             (int)(h->len < 60 ? h->len : 60), h->name);
    return lark_fail(p, what);
}

/* common.NAME, common.NAME -> OTHER, or common (NAME, NAME). */
static bool import_parse(struct lark *p)
{
    struct rule_head h, as;
    if (!try_consume(p, "common"))
        return lark_fail(p, "%import of another module than common");
    skip_space(p);
    if (try_consume(p, "(")) {
        do {
            skip_space(p);
            if (!name_parse(p, &h.name, &h.len, &h.terminal))
                return lark_fail(p, "%import without a name");
            if (!import_common(p, &h, &h))
                return false;
            skip_space(p);
        } while (try_consume(p, ","));
        return try_consume(p, ")") || lark_fail(p, "( without )");
    }
    if (!try_consume(p, ".") || !name_parse(p, &h.name, &h.len, &h.terminal))
        return lark_fail(p, "%import without a name");
    as = h;
    skip_space(p);
    if (try_consume(p, "->")) {
        skip_space(p);
        if (!name_parse(p, &as.name, &as.len, &as.terminal) || !as.terminal)
            return lark_fail(p, "-> without the name of a terminal");
    }
    return import_common(p, &h, &as);
}

static bool ignore_parse(struct lark *p)
{
    p->terminal = true;
    uint32_t t = alt_parse(p);
    p->terminal = false;
    return rules_append(p->rules, p->gap_parts, &p->gap_last, t);
}

static bool directive_parse(struct lark *p)
{
    if (try_consume(p, "%import") || try_consume(p, "%ignore")) {
        bool import = p->at[-1] == 't';
        skip_space(p);
        return import ? import_parse(p) : ignore_parse(p);
    }
    return lark_fail(p, "a directive other than %import and %ignore, which is not supported");
}

/* ---- the whole ---- */

/* The ignored text: any number of the ignored terminals. */
static bool gap_define(struct lark *p)
{
    uint32_t empty = rules_tree(p->rules, RULE_CAT, 0);
    uint32_t tree = p->gap_last ? rules_repeat(p->rules, p->gap_parts, 0, RE_INF) : empty;
    return define(p, gap_name, sizeof gap_name - 1, tree, 0);
}

/* The root: ignored text, then the rule `start`. */
static bool root_define(struct lark *p)
{
    struct rules *r = p->rules;
    uint32_t start = rules_find(r, "start", 5), last = 0, cat = rules_tree(r, RULE_CAT, 0);
    if (!r->rules[start].tree)
        return error_set(r->err, "grammar: there is no rule \"start\"");
    if (!rules_append(r, cat, &last, rules_tree(r, RULE_CALL, p->gap)) ||
        !rules_append(r, cat, &last, rules_tree(r, RULE_CALL, start)))
        return false;
    r->root = rules_find(r, root_name, sizeof root_name - 1);
    return define(p, root_name, sizeof root_name - 1, cat, 0);
}

static bool lark_parse(struct rules *rules, const char *text, size_t len)
{
    struct lark p = {.at = text, .end = text + len, .rules = rules};
    p.gap = rules_find(rules, gap_name, sizeof gap_name - 1);
    p.gap_parts = rules_tree(rules, RULE_ALT, 0);
    for (skip_space(&p); has_more(&p); skip_space(&p))
        if (!(*p.at == '%' ? directive_parse(&p) : definition_parse(&p)) || rules->err->msg[0])
            return false;
    return gap_define(&p) && root_define(&p) && !rules->err->msg[0];
}

struct grammar *lark_compile(const char *text, size_t len, enum term_kind kind,
                             const char *const *tags, struct error *err)
{
    return rules_compile(lark_parse, text, len, kind, tags, err);
}
