/*
 * Parses regular expressions (ECMA-262, as in JSON Schema; Python's in Lark grammars) into terms. The parser first builds a
 * small tree, since anchors and look-ahead are not terms: they restrict the text around them. The
 * tree is then converted from the end to the start, each part knowing the term of everything after
 * it. "$" reduces that term to "", look-ahead intersects it.
 *
 * Does not know what the expression is for. A construct that cannot be expressed exactly is
 * rejected by name.
 */
#include "text/grammar/grammar_re_int.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 200, TREE_MAX = 200000, COUNT_MAX = 1 << 24 };

enum regex_tree_kind { TK_TERM, TK_CAT, TK_ALT, TK_REP, TK_BOL, TK_EOL, TK_AHEAD, TK_NOT_AHEAD };

struct regex_tree {
    enum regex_tree_kind kind;
    bool asserts;    /* contains an anchor or look-ahead */
    bool bol;        /* contains a "^" */
    uint32_t term;   /* TK_TERM */
    uint32_t lo, hi; /* TK_REP */
    uint32_t first;  /* children, linked by `next`; 0 = none */
    uint32_t next;
};

struct regex_parser {
    struct re_pool *pool;
    const char *s, *end, *at;
    struct regex_tree *trees; /* (n) index 0 is unused */
    uint32_t n, cap;
    int depth, flags;
    struct error *err;
};

static uint32_t fail(struct regex_parser *p, const char *what)
{
    int len = (int)(p->end - p->s);
    if (p->err && !p->err->msg[0])
        error_set(p->err, "regular expression \"%.*s%s\": %s at character %d", len > 80 ? 80 : len,
                  p->s, len > 80 ? "..." : "", what, (int)(p->at - p->s));
    return 0;
}

static uint32_t tree_new(struct regex_parser *p, enum regex_tree_kind kind)
{
    if (p->n >= TREE_MAX)
        return fail(p, "over 200000 parts");
    if (p->n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 64;
        p->trees = mem_realloc(p->trees, p->cap, sizeof *p->trees);
    }
    p->trees[p->n] =
        (struct regex_tree){.kind = kind, .asserts = kind >= TK_BOL, .bol = kind == TK_BOL};
    return p->n++;
}

static uint32_t tree_term(struct regex_parser *p, uint32_t term)
{
    uint32_t t = tree_new(p, TK_TERM);
    if (t)
        p->trees[t].term = term;
    return t;
}

static bool has_more(const struct regex_parser *p)
{
    return p->at < p->end;
}

static bool try_consume(struct regex_parser *p, const char *s)
{
    size_t n = strlen(s);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, s, n))
        return false;
    p->at += n;
    return true;
}

/* ---- sets of characters ---- */

struct char_set {
    struct re_range *r;
    size_t n, cap;
};

static void set_add(struct char_set *s, uint32_t lo, uint32_t hi)
{
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 16;
        s->r = mem_realloc(s->r, s->cap, sizeof *s->r);
    }
    s->r[s->n++] = (struct re_range){lo, hi};
}

static const struct re_range digits[] = {{'0', '9'}};
static const struct re_range words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
static const struct re_range spaces[] = {
    {9, 13},          {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
    {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
static const struct re_range python_spaces[] = {
    {9, 13},          {0x1c, ' '},      {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
    {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
static const struct re_range line_ends[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

static void set_add_ranges(struct char_set *s, const struct re_range *r, size_t n, bool negated)
{
    uint32_t from = 0;
    for (size_t i = 0; i < n; i++) {
        if (!negated)
            set_add(s, r[i].lo, r[i].hi);
        else if (r[i].lo > from)
            set_add(s, from, r[i].lo - 1);
        from = r[i].hi + 1;
    }
    if (negated)
        set_add(s, from, CP_MAX);
}

#define NO_CHAR UINT32_MAX

/* The term of the characters of these general categories and the character `also`, or of all others. The first
 * eight of a pool are kept, since the loop takes milliseconds. */
static uint32_t categories_term(struct re_pool *pool, uint32_t mask, uint32_t also, bool negated)
{
    enum { COST = 4000, MOST = sizeof pool->categories / sizeof *pool->categories };
    struct char_set s = {0};
    uint32_t from = 0;
    bool in = false;
    for (uint32_t i = 0; i < pool->n_categories; i++)
        if (pool->categories[i].mask == mask && pool->categories[i].also == also &&
            pool->categories[i].negated == negated)
            return pool->categories[i].term;
    if (!re_spend(pool, COST))
        return RE_NONE;
    for (uint32_t cp = 0; cp <= CP_MAX + 1; cp++) {
        /* beyond plane 3 only variation selectors (marks) have such a property */
        bool beyond = cp >= 0x32400 && (cp < 0xe0100 || cp > 0xe01ef);
        bool has = cp <= CP_MAX && ((!beyond && unicode_is(cp, mask)) || cp == also) != negated;
        if (has && !in)
            from = cp;
        if (!has && in)
            set_add(&s, from, cp - 1);
        in = has;
    }
    uint32_t term = re_set(pool, s.r, s.n, false), i = pool->n_categories;
    mem_free(s.r);
    if (i < MOST && !re_pool_error(pool)) {
        pool->categories[i].mask = mask;
        pool->categories[i].also = also;
        pool->categories[i].negated = negated;
        pool->categories[i].term = term;
        pool->n_categories++;
    }
    return term;
}

static bool set_add_categories(struct regex_parser *p, struct char_set *s, uint32_t mask,
                               uint32_t also, bool negated)
{
    struct re_pool *pool = p->pool;
    const struct re_node *x = &pool->nodes[categories_term(pool, mask, also, negated)];
    if (re_pool_error(pool) || !re_spend(pool, 300)) /* sorting and comparing its ranges */
        return fail(p, re_pool_error(pool));
    CHECK(x->kind == RK_SET, "a set of categories");
    for (uint32_t i = pool->set_at[x->a]; i < pool->set_at[x->a + 1]; i++)
        set_add(s, pool->ranges[i].lo, pool->ranges[i].hi);
    return true;
}

/* \p{L}, \p{Lu}, \p{Letter}...: general categories. */
static bool set_add_property(struct regex_parser *p, struct char_set *s, bool negated)
{
    static const struct {
        const char *name;
        uint32_t set;
    } names[] = {
        {"L", UC_LETTER},         {"Letter", UC_LETTER},     {"M", UC_MARK},
        {"Mark", UC_MARK},        {"N", UC_NUMBER},          {"Number", UC_NUMBER},
        {"P", UC_PUNCT},          {"Punctuation", UC_PUNCT}, {"S", UC_SYMBOL},
        {"Symbol", UC_SYMBOL},    {"Lu", UC_SET(UC_LU)},     {"Uppercase_Letter", UC_SET(UC_LU)},
        {"Ll", UC_SET(UC_LL)},    {"Lt", UC_SET(UC_LT)},     {"Lm", UC_SET(UC_LM)},
        {"Lo", UC_SET(UC_LO)},    {"Mn", UC_SET(UC_MN)},     {"Mc", UC_SET(UC_MC)},
        {"Nd", UC_SET(UC_ND)},    {"digit", UC_SET(UC_ND)},  {"Nl", UC_SET(UC_NL)},
        {"No", UC_SET(UC_NO)},    {"Pc", UC_SET(UC_PC)},     {"Pd", UC_SET(UC_PD)},
        {"Ps", UC_SET(UC_PS)},    {"Pe", UC_SET(UC_PE)},     {"Po", UC_SET(UC_PO)},
        {"Sm", UC_SET(UC_SM)},    {"Sc", UC_SET(UC_SC)},     {"Sk", UC_SET(UC_SK)},
        {"So", UC_SET(UC_SO)},    {"Zs", UC_SET(UC_ZS)},     {"Lowercase_Letter", UC_SET(UC_LL)},
        {"Alphabetic", UC_LETTER}};
    const char *close =
        has_more(p) && *p->at == '{' ? memchr(p->at, '}', (size_t)(p->end - p->at)) : 0;
    if (!close)
        return fail(p, "\\p without a name in braces");
    const char *name = p->at + 1;
    size_t len = (size_t)(close - name);
    if (len > 3 && !memcmp(name, "gc=", 3)) {
        name += 3;
        len -= 3;
    }
    uint32_t mask = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i].name) == len && !memcmp(names[i].name, name, len))
            mask = names[i].set;
    if (!mask)
        return fail(p, "a Unicode property that is not supported");
    p->at = close + 1;
    return set_add_categories(p, s, mask, NO_CHAR, negated);
}

/* Characters and their lower case, of all that have one. */
static struct case_pair {
    uint32_t upper, lower;
} * case_pairs;
static size_t n_case_pairs;

static void case_pairs_make(void)
{
    struct buf low = {0};
    size_t cap = 0;
    for (uint32_t cp = 'A'; cp < 0x1f000; cp++) {
        uint32_t lower;
        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        buf_reset(&low);
        unicode_add_lower(cp, &low);
        if (utf8_decode(low.p, low.len, &lower) != (int)low.len || lower == cp)
            continue;
        if (n_case_pairs == cap) {
            cap = cap ? 2 * cap : 1024;
            case_pairs = mem_realloc(case_pairs, cap, sizeof *case_pairs);
        }
        case_pairs[n_case_pairs++] = (struct case_pair){cp, lower};
    }
    buf_clear(&low);
}

static bool set_has(const struct char_set *s, size_t n, uint32_t cp)
{
    for (size_t i = 0; i < n; i++)
        if (s->r[i].lo <= cp && cp <= s->r[i].hi)
            return true;
    return false;
}

/* With RE_ICASE, adds the other case of the characters. */
static void set_fold(struct regex_parser *p, struct char_set *s)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!(p->flags & RE_ICASE))
        return;
    struct mem_job *job = mem_job_suspend(); /* the pairs outlive it */
    pthread_once(&once, case_pairs_make);
    mem_job_resume(job);
    for (int way = 0; way < 2; way++) /* first the lower case, then all that have it */
        for (size_t i = 0, n = s->n; i < n_case_pairs; i++) {
            struct case_pair c = case_pairs[i];
            if (!(i & 63) && !re_spend(p->pool, 1 + n / 4))
                return;
            if (set_has(s, n, way ? c.lower : c.upper))
                set_add(s, way ? c.upper : c.lower, way ? c.upper : c.lower);
        }
}

static bool hex(struct regex_parser *p, int n, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < n; i++) {
        char c = has_more(p) ? *p->at : 0;
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return fail(p, "missing hexadecimal digit");
        *value = *value << 4 | (uint32_t)d;
        p->at++;
    }
    return true;
}

static bool escape_unicode(struct regex_parser *p, uint32_t *cp)
{
    if (try_consume(p, "{")) {
        *cp = 0;
        while (has_more(p) && *p->at != '}') {
            uint32_t d;
            if (!hex(p, 1, &d))
                return false;
            *cp = *cp << 4 | d;
            if (*cp > CP_MAX)
                return fail(p, "not a Unicode code point");
        }
        return try_consume(p, "}") || fail(p, "\\u{ without }");
    }
    if (!hex(p, 4, cp))
        return false;
    if (*cp >= 0xd800 && *cp < 0xdc00 && try_consume(p, "\\u")) {
        uint32_t low;
        if (!hex(p, 4, &low))
            return false;
        if (low < 0xdc00 || low > 0xdfff)
            return fail(p, "unpaired surrogate");
        *cp = 0x10000 + ((*cp - 0xd800) << 10) + (low - 0xdc00);
    }
    if (*cp >= 0xd800 && *cp < 0xe000)
        return fail(p, "unpaired surrogate");
    return true;
}

/* After a backslash: adds a class to s, or returns one character. 0 failure, 1 class, 2
 * character */
static int escape(struct regex_parser *p, struct char_set *s, uint32_t *cp)
{
    if (!has_more(p))
        return (int)fail(p, "trailing backslash");
    char c = *p->at++;
    switch (c) {
    case 'd':
    case 'D':
        if (p->flags & RE_LARK)
            return set_add_categories(p, s, UC_SET(UC_ND), NO_CHAR, c == 'D');
        set_add_ranges(s, digits, 1, c == 'D');
        return 1;
    case 'w':
    case 'W':
        if (p->flags & RE_LARK)
            return set_add_categories(p, s, UC_LETTER | UC_NUMBER, '_', c == 'W');
        set_add_ranges(s, words, 4, c == 'W');
        return 1;
    case 's':
    case 'S':
        if (p->flags & RE_LARK)
            set_add_ranges(s, python_spaces, sizeof python_spaces / sizeof *python_spaces,
                           c == 'S');
        else
            set_add_ranges(s, spaces, sizeof spaces / sizeof *spaces, c == 'S');
        return 1;
    case 'p':
    case 'P':
        return set_add_property(p, s, c == 'P') ? 1 : 0;
    case 't':
        *cp = '\t';
        return 2;
    case 'n':
        *cp = '\n';
        return 2;
    case 'r':
        *cp = '\r';
        return 2;
    case 'f':
        *cp = '\f';
        return 2;
    case 'v':
        *cp = '\v';
        return 2;
    case '0':
        *cp = 0;
        return has_more(p) && *p->at >= '0' && *p->at <= '9' ? (int)fail(p, "an octal escape") : 2;
    case 'x':
        return hex(p, 2, cp) ? 2 : 0;
    case 'u':
        return escape_unicode(p, cp) ? 2 : 0;
    case 'U':
        if (!(p->flags & RE_LARK))
            break;
        if (!hex(p, 8, cp))
            return 0;
        if (*cp > CP_MAX || (*cp >= 0xd800 && *cp < 0xe000))
            return (int)fail(p, "not a Unicode code point");
        return 2;
    case 'c':
        if (!has_more(p) || !((*p->at | 32) >= 'a' && (*p->at | 32) <= 'z'))
            return (int)fail(p, "\\c without a letter");
        *cp = (uint32_t)*p->at++ & 31;
        return 2;
    default:
        break;
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '1' && c <= '9')) {
        p->at--;
        if (c >= '1' && c <= '9')
            return (int)fail(p, "a back reference, which no automaton can follow,");
        return (int)fail(p, "an escape that is not supported");
    }
    p->at--;
    int n = utf8_decode(p->at, (size_t)(p->end - p->at), cp);
    if (!n)
        return (int)fail(p, "invalid UTF-8");
    p->at += n;
    return 2;
}

/* One member of a class: 0 failure, 1 a class like \d (added to s), 2 a character. */
static int class_member(struct regex_parser *p, struct char_set *s, uint32_t *cp)
{
    if (try_consume(p, "\\")) {
        if (try_consume(p, "b")) {
            *cp = 8;
            return 2;
        }
        return escape(p, s, cp);
    }
    int n = utf8_decode(p->at, (size_t)(p->end - p->at), cp);
    if (!n)
        return (int)fail(p, "invalid UTF-8");
    p->at += n;
    return 2;
}

/* After "[". */
static uint32_t parse_class(struct regex_parser *p)
{
    struct char_set s = {0};
    bool negated = try_consume(p, "^"), ok = true;
    const char *first = p->flags & RE_LARK ? p->at : NULL; /* there, ] is a character */
    while (ok && has_more(p) && (*p->at != ']' || p->at == first)) {
        uint32_t lo, hi;
        int k = class_member(p, &s, &lo);
        ok = k != 0;
        if (k != 2)
            continue;
        hi = lo;
        if (p->end - p->at >= 2 && p->at[0] == '-' && p->at[1] != ']') {
            p->at++;
            k = class_member(p, &s, &hi);
            ok = k != 0;
            if (k == 1) { /* [a-\d]: the dash is a character */
                set_add(&s, '-', '-');
                hi = lo;
            } else if (ok && hi < lo) {
                ok = fail(p, "range in reverse order");
            }
        }
        if (ok)
            set_add(&s, lo, hi);
    }
    if (ok && !try_consume(p, "]"))
        ok = fail(p, "[ without ]");
    if (ok)
        set_fold(p, &s);
    uint32_t t = ok ? tree_term(p, re_set(p->pool, s.r, s.n, negated)) : 0;
    mem_free(s.r);
    return t;
}

/* ---- the tree ---- */

static uint32_t char_tree(struct regex_parser *p, uint32_t cp)
{
    if (!(p->flags & RE_ICASE))
        return tree_term(p, re_char(p->pool, cp));
    struct char_set s = {0};
    set_add(&s, cp, cp);
    set_fold(p, &s);
    uint32_t t = tree_term(p, re_set(p->pool, s.r, s.n, false));
    mem_free(s.r);
    return t;
}

/* With RE_VERBOSE, skips white space and comments. */
static void skip_verbose(struct regex_parser *p)
{
    bool comment = false;
    for (; p->flags & RE_VERBOSE && has_more(p); p->at++) {
        if (*p->at == '#' || *p->at == '\n')
            comment = *p->at == '#' || (comment && *p->at != '\n');
        else if (!comment && !strchr(" \t\r\f\v", *p->at))
            break;
    }
}

static uint32_t parse_alt(struct regex_parser *p);

/* After "(". */
static uint32_t parse_group(struct regex_parser *p)
{
    enum regex_tree_kind look = TK_TERM;
    if (try_consume(p, "?")) {
        if (try_consume(p, "=")) {
            look = TK_AHEAD;
        } else if (try_consume(p, "!")) {
            look = TK_NOT_AHEAD;
        } else if (try_consume(p, "<=") || try_consume(p, "<!")) {
            return fail(p, "look-behind, which is not supported,");
        } else if (try_consume(p, "P<") || try_consume(p, "<")) {
            while (has_more(p) && *p->at != '>')
                p->at++;
            if (!try_consume(p, ">"))
                return fail(p, "a group's name without >");
        } else if (!try_consume(p, ":")) {
            return fail(p, "inline flags, which are not supported,");
        }
    }
    if (++p->depth > DEPTH_MAX)
        return fail(p, "groups nested over 200 deep");
    uint32_t inner = parse_alt(p);
    p->depth--;
    if (!inner)
        return 0;
    if (!try_consume(p, ")"))
        return fail(p, "( without )");
    if (look == TK_TERM)
        return inner;
    if (p->flags & RE_LARK)
        return fail(p, "look-ahead, which is not supported in a terminal,");
    uint32_t t = tree_new(p, look);
    if (t) {
        p->trees[t].first = inner;
        p->trees[t].bol = p->trees[inner].bol;
    }
    return t;
}

static uint32_t parse_atom(struct regex_parser *p)
{
    struct char_set s = {0};
    uint32_t cp = 0, t = 0;
    if (try_consume(p, "("))
        return parse_group(p);
    if (try_consume(p, "["))
        return parse_class(p);
    if (try_consume(p, "."))
        return tree_term(p, p->flags & RE_DOT_ALL
                                ? RE_ANY
                                : re_set(p->pool, line_ends, p->flags & RE_LARK ? 1 : 3, true));
    if (p->flags & RE_LARK && (*p->at == '^' || *p->at == '$'))
        return fail(p, "an anchor, which is not supported in a terminal,");
    if (try_consume(p, "^"))
        return tree_new(p, TK_BOL);
    if (try_consume(p, "$"))
        return tree_new(p, TK_EOL);
    if (*p->at == '*' || *p->at == '+' || *p->at == '?')
        return fail(p, "nothing to repeat");
    if (try_consume(p, "\\")) {
        if (has_more(p) && (*p->at == 'b' || *p->at == 'B'))
            return fail(p, "a word boundary, which is not supported,");
        int k = escape(p, &s, &cp);
        if (k == 1)
            t = tree_term(p, re_set(p->pool, s.r, s.n, false));
        else if (k == 2)
            t = char_tree(p, cp);
        mem_free(s.r);
        return t;
    }
    int n = utf8_decode(p->at, (size_t)(p->end - p->at), &cp);
    if (!n)
        return fail(p, "invalid UTF-8");
    p->at += n;
    return char_tree(p, cp);
}

static bool parse_count(struct regex_parser *p, uint32_t *n)
{
    const char *from = p->at;
    uint64_t v = 0;
    while (has_more(p) && *p->at >= '0' && *p->at <= '9') {
        v = v * 10 + (uint64_t)(*p->at++ - '0');
        if (v > COUNT_MAX)
            v = COUNT_MAX + 1;
    }
    *n = (uint32_t)v;
    return p->at > from;
}

/* Parses a quantifier after an atom, if any. False only on failure. */
static bool parse_quantifier(struct regex_parser *p, uint32_t *lo, uint32_t *hi, bool *found)
{
    *found = true;
    if (try_consume(p, "*")) {
        *lo = 0;
        *hi = RE_INF;
    } else if (try_consume(p, "+")) {
        *lo = 1;
        *hi = RE_INF;
    } else if (try_consume(p, "?")) {
        *lo = 0;
        *hi = 1;
    } else if (has_more(p) && *p->at == '{') {
        const char *from = p->at++;
        bool ok = parse_count(p, lo);
        *hi = *lo;
        if (ok && try_consume(p, ",") && !parse_count(p, hi))
            *hi = RE_INF;
        if (!ok || !try_consume(p, "}")) { /* a literal brace */
            p->at = from;
            *found = false;
            return true;
        }
        if (*lo > COUNT_MAX || (*hi != RE_INF && *hi > COUNT_MAX))
            return fail(p, "a repeat count over 16777216");
        if (*hi < *lo)
            return fail(p, "repeat count with minimum above maximum");
    } else {
        *found = false;
        return true;
    }
    if (!try_consume(p, "?") && has_more(p) && *p->at == '+')
        return fail(p, "a possessive quantifier, which is not supported,");
    return true;
}

/* Parses alternatives up to ")" or the end. */
static uint32_t parse_alt(struct regex_parser *p)
{
    uint32_t alt = tree_new(p, TK_ALT), last_branch = 0;
    if (!alt)
        return 0;
    do {
        uint32_t cat = tree_new(p, TK_CAT), last = 0;
        if (!cat)
            return 0;
        skip_verbose(p);
        while (has_more(p) && *p->at != '|' && *p->at != ')') {
            uint32_t atom = parse_atom(p), lo, hi;
            bool found;
            skip_verbose(p);
            if (!atom || !parse_quantifier(p, &lo, &hi, &found))
                return 0;
            if (found) {
                uint32_t rep = tree_new(p, TK_REP);
                if (!rep)
                    return 0;
                p->trees[rep].first = atom;
                p->trees[rep].lo = lo;
                p->trees[rep].hi = hi;
                p->trees[rep].asserts = p->trees[atom].asserts;
                p->trees[rep].bol = p->trees[atom].bol;
                atom = rep;
            }
            if (last)
                p->trees[last].next = atom;
            else
                p->trees[cat].first = atom;
            last = atom;
            p->trees[cat].asserts |= p->trees[atom].asserts;
            p->trees[cat].bol |= p->trees[atom].bol;
            skip_verbose(p);
        }
        if (last_branch)
            p->trees[last_branch].next = cat;
        else
            p->trees[alt].first = cat;
        last_branch = cat;
        p->trees[alt].asserts |= p->trees[cat].asserts;
        p->trees[alt].bol |= p->trees[cat].bol;
    } while (try_consume(p, "|"));
    return alt;
}

/* ---- the tree to a term ---- */

/* Converts a part without anchors and look-ahead. */
static uint32_t convert_plain(struct regex_parser *p, uint32_t t)
{
    struct regex_tree x = p->trees[t];
    if (x.kind == TK_TERM)
        return x.term;
    if (x.kind == TK_REP)
        return re_rep(p->pool, convert_plain(p, x.first), x.lo, x.hi);
    size_t n = 0, k = 0;
    for (uint32_t c = x.first; c; c = p->trees[c].next)
        n++;
    uint32_t *terms = mem_alloc((n + 1) * sizeof *terms), r;
    for (uint32_t c = x.first; c; c = p->trees[c].next)
        terms[k++] = convert_plain(p, c);
    if (x.kind == TK_ALT) {
        r = re_or_n(p->pool, terms, n);
    } else {
        r = RE_EPS;
        while (n--)
            r = re_cat(p->pool, terms[n], r);
    }
    mem_free(terms);
    return r;
}

static uint32_t convert(struct regex_parser *p, uint32_t t, uint32_t then, bool start);

/* Converts the children of a CAT from last to first. `start`: nothing precedes the first. */
static uint32_t convert_cat(struct regex_parser *p, uint32_t t, uint32_t then, bool start)
{
    size_t n = 0, k = 0;
    for (uint32_t c = p->trees[t].first; c; c = p->trees[c].next)
        n++;
    uint32_t *child = mem_alloc((n + 1) * sizeof *child);
    bool *at_start = mem_alloc(n + 1);
    bool maybe = false; /* the text before may be empty */
    for (uint32_t c = p->trees[t].first; c; c = p->trees[c].next) {
        const struct regex_tree *x = &p->trees[c];
        if (maybe && x->bol) {
            fail(p, "\"^\" after something that may be empty, which is not supported,");
            then = RE_NONE;
        }
        child[k] = c;
        at_start[k++] = start && !maybe;
        if (x->kind < TK_BOL && start) {
            bool empty = x->asserts || re_nullable(p->pool, convert_plain(p, c));
            maybe = empty;
            start = empty;
        }
    }
    while (k--)
        then = convert(p, child[k], then, at_start[k]);
    mem_free(child);
    mem_free(at_start);
    return then;
}

/* Converts part t followed by the term `then`. */
static uint32_t convert(struct regex_parser *p, uint32_t t, uint32_t then, bool start)
{
    struct regex_tree x = p->trees[t];
    if (!x.asserts)
        return re_cat(p->pool, convert_plain(p, t), then);
    switch (x.kind) {
    case TK_BOL:
        return start ? then : RE_NONE;
    case TK_EOL:
        return re_nullable(p->pool, then) ? RE_EPS : RE_NONE;
    case TK_AHEAD:
        return re_and(p->pool, then, convert(p, x.first, RE_ALL, start));
    case TK_NOT_AHEAD:
        return re_and(p->pool, then, re_not(p->pool, convert(p, x.first, RE_ALL, start)));
    case TK_CAT:
        return convert_cat(p, t, then, start);
    case TK_ALT: {
        uint32_t r = RE_NONE;
        for (uint32_t c = x.first; c; c = p->trees[c].next)
            r = re_or(p->pool, r, convert(p, c, then, start));
        return r;
    }
    default: /* TK_REP */
        if (x.hi == 1)
            return re_or(p->pool, x.lo ? RE_NONE : then, convert(p, x.first, then, start));
        fail(p, "an anchor or look-ahead inside a repeat, which is not supported,");
        return RE_NONE;
    }
}

uint32_t re_parse(struct re_pool *pool, const char *s, size_t n, int flags, struct error *err)
{
    struct error local = {0};
    struct regex_parser p = {
        .pool = pool, .s = s, .at = s, .end = s + n, .flags = flags, .err = &local};
    bool search = flags & RE_SEARCH;
    uint32_t r = RE_NONE, root;
    tree_new(&p, TK_TERM); /* index 0 means none */
    root = parse_alt(&p);
    if (root && has_more(&p))
        root = fail(&p, ") without (");
    if (root) {
        p.depth = 0;
        uint32_t tail = search ? RE_ALL : RE_EPS;
        r = convert(&p, root, tail, true);
        if (search) {
            p.depth = 0;
            uint32_t later = convert(&p, root, tail, false);
            r = re_or(pool, r, re_cat(pool, RE_ANY, re_cat(pool, RE_ALL, later)));
            if (!p.trees[root].asserts) /* equivalent, with fewer terms */
                r = re_cat(pool, RE_ALL, later);
        }
        if (re_pool_error(pool))
            fail(&p, re_pool_error(pool));
    }
    mem_free(p.trees);
    if (local.msg[0]) {
        error_set(err, "%s", local.msg);
        return RE_NONE;
    }
    return r;
}
