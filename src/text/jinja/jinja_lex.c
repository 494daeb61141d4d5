/*
 * Jinja lexer: converts template text to an array of tokens. Handles white-space control ('-', '+',
 * trim_blocks, lstrip_blocks), comments, raw blocks and string escapes exactly as jinja2's
 * regular-expression lexer does. Knows no grammar except balanced brackets, which decide whether
 * "}}" ends a tag or closes two dicts. Also keeps the table of names (symbols).
 */
#include "text/jinja/jinja_int.h"
#include "base/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct jinja_lexer {
    struct jstate *st;
    const char *s; /* (n) newlines normalised to \n */
    size_t n, pos;
    bool line_starting; /* the last match ended with a newline */
    struct jtoken *tok; /* (cap) in st->tmp */
    int n_tok, cap;
    char brackets[JINJA_MAX_HEIGHT]; /* expected closing brackets */
    int n_brackets;
};

static void emit(struct jinja_lexer *lx, enum jtok type, struct jval val)
{
    if (lx->n_tok == lx->cap) {
        int cap = lx->cap ? lx->cap * 2 : 256;
        struct jtoken *t = jarena_alloc(lx->st, &lx->st->tmp, (size_t)cap * sizeof(*t));
        if (lx->n_tok)
            memcpy(t, lx->tok, (size_t)lx->n_tok * sizeof(*t));
        lx->tok = t;
        lx->cap = cap;
    }
    lx->tok[lx->n_tok++] = (struct jtoken){.type = (uint8_t)type, .line = lx->st->line, .val = val};
}

static void advance(struct jinja_lexer *lx, size_t to)
{
    for (size_t i = lx->pos; i < to; i++)
        lx->st->line += lx->s[i] == '\n';
    if (to > lx->pos)
        lx->line_starting = lx->s[to - 1] == '\n';
    lx->pos = to;
}

static bool at(const struct jinja_lexer *lx, size_t i, const char *what)
{
    size_t m = strlen(what);
    return i + m <= lx->n && !memcmp(lx->s + i, what, m);
}

static size_t skip_space(const struct jinja_lexer *lx, size_t i)
{
    while (i < lx->n) {
        size_t k = i;
        if (!jcp_isspace(jutf8_next(lx->s, lx->n, &k)))
            break;
        i = k;
    }
    return i;
}

/* End of the data text [from, to) before a tag with this sign, after white-space control. */
static size_t strip_data(struct jinja_lexer *lx, size_t from, size_t to, char sign, bool variable)
{
    struct jval text = jval_str(lx->s + from, to - from);
    if (sign == '-')
        return from + jstr_strip(lx->st, text, JV_NONE, STRIP_RIGHT).len;
    if (sign == '+' || variable)
        return to;
    size_t l = to;
    while (l > from && lx->s[l - 1] != '\n')
        l--;
    if ((l > from || lx->line_starting) && skip_space(lx, l) >= to)
        return l;
    return to;
}

/* If a tag's closer (with an optional sign) is here, moves past it and the white space it
 * strips. */
static bool close_tag(struct jinja_lexer *lx, const char *closer, bool trim, bool plus)
{
    size_t i = lx->pos;
    char sign = 0;
    if ((at(lx, i, "-") || (plus && at(lx, i, "+"))) && at(lx, i + 1, closer))
        sign = lx->s[i++];
    else if (!at(lx, i, closer))
        return false;
    i += 2;
    if (sign == '-')
        i = skip_space(lx, i);
    else if (!sign && trim && i < lx->n && lx->s[i] == '\n')
        i++;
    advance(lx, i);
    return true;
}

/* Whether "{% raw %}" is at i; *end is the position before its closer. */
static bool raw_tag(const struct jinja_lexer *lx, size_t i, const char *word, size_t *end)
{
    i += 2;
    if (at(lx, i, "-") || at(lx, i, "+"))
        i++;
    i = skip_space(lx, i);
    if (!at(lx, i, word))
        return false;
    i = skip_space(lx, i + strlen(word));
    *end = i;
    return at(lx, i, "%}") || at(lx, i, "-%}") || (word[0] == 'e' && at(lx, i, "+%}"));
}

static char sign_at(const struct jinja_lexer *lx, size_t i)
{
    return i < lx->n && (lx->s[i] == '-' || lx->s[i] == '+') ? lx->s[i] : 0;
}

static void emit_data(struct jinja_lexer *lx, size_t from, size_t to)
{
    if (to > from)
        emit(lx, T_DATA, jval_str(lx->s + from, to - from));
}

static void lex_raw(struct jinja_lexer *lx)
{
    size_t from = lx->pos, end;
    const char *p = lx->s + from;
    for (;;) {
        p = jstr_find(p, lx->n - (size_t)(p - lx->s), "{%", 2);
        if (!p)
            jinja_fail(lx->st, "Missing end of raw directive");
        if (raw_tag(lx, (size_t)(p - lx->s), "endraw", &end))
            break;
        p++;
    }
    size_t to = (size_t)(p - lx->s);
    emit_data(lx, from, strip_data(lx, from, to, sign_at(lx, to + 2), false));
    advance(lx, end);
    close_tag(lx, "%}", true, true);
}

static void lex_comment(struct jinja_lexer *lx)
{
    const char *p = jstr_find(lx->s + lx->pos, lx->n - lx->pos, "#}", 2);
    if (!p)
        jinja_fail(lx->st, "Missing end of comment tag");
    size_t i = (size_t)(p - lx->s);
    if (i > lx->pos && sign_at(lx, i - 1))
        i--;
    advance(lx, i);
    close_tag(lx, "#}", true, true);
}

static int hex_digits(struct jinja_lexer *lx, const char *p, const char *end, int n)
{
    int v = 0;
    for (int i = 0; i < n; i++) {
        int c = p + i < end ? p[i] | 32 : 0;
        if (c >= '0' && c <= '9')
            c -= '0';
        else if (c >= 'a' && c <= 'f')
            c -= 'a' - 10;
        else
            jinja_fail(lx->st, "truncated escape in a string literal");
        v = v > 0xffffff ? v : v * 16 + c;
    }
    return v;
}

/* Unescapes a literal's inside p[0..n), like Python's unicode-escape codec. */
static struct jval unescape(struct jinja_lexer *lx, const char *p, size_t n)
{
    if (!memchr(p, '\\', n))
        return jval_str(p, n);
    static const char from[] = "ntr\\'\"abfv", to[] = "\n\t\r\\'\"\a\b\f\v";
    char *out = jstr_alloc(lx->st, n + 4), *o = out;
    const char *end = p + n;
    while (p < end) {
        if (*p != '\\' || p + 1 == end) {
            *o++ = *p++;
            continue;
        }
        char c = p[1];
        const char *k = memchr(from, c, sizeof(from) - 1);
        p += 2;
        if (k) {
            *o++ = to[k - from];
        } else if (c == '\n') {
            continue;
        } else if (c >= '0' && c <= '7') {
            int v = c - '0';
            for (int i = 0; i < 2 && p < end && *p >= '0' && *p <= '7'; i++)
                v = v * 8 + *p++ - '0';
            o += jutf8_put(v, o);
        } else if (c == 'x' || c == 'u' || c == 'U') {
            int digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
            int v = hex_digits(lx, p, end, digits);
            if (v > 0x10ffff)
                jinja_fail(lx->st, "illegal Unicode character in a string literal");
            o += jutf8_put(v, o);
            p += digits;
        } else if (c == 'N') {
            jinja_fail(lx->st, "\\N{...} escapes are not supported");
        } else {
            *o++ = '\\';
            *o++ = c;
        }
    }
    return jval_str(out, (size_t)(o - out));
}

static bool digit(const struct jinja_lexer *lx, size_t i)
{
    return i < lx->n && lx->s[i] >= '0' && lx->s[i] <= '9';
}

/* Matches (\d+_)*\d+ at i. Returns its end, or i if there is no match. */
static size_t digits(const struct jinja_lexer *lx, size_t i)
{
    size_t end = i;
    while (digit(lx, i)) {
        while (digit(lx, i))
            i++;
        end = i;
        if (i < lx->n && lx->s[i] == '_')
            i++;
    }
    return end;
}

static bool lex_float(struct jinja_lexer *lx)
{
    size_t i = digits(lx, lx->pos), start = lx->pos, e;
    if (i == start || (start > 0 && lx->s[start - 1] == '.'))
        return false;
    bool frac = at(lx, i, ".") && (e = digits(lx, i + 1)) > i + 1, exp = false;
    if (frac)
        i = e;
    if (i < lx->n && (lx->s[i] | 32) == 'e') {
        size_t k = i + 1 + (sign_at(lx, i + 1) != 0);
        e = digits(lx, k);
        exp = e > k;
        if (exp)
            i = e;
    }
    if (!frac && !exp)
        return false;
    char text[512];
    size_t m = 0;
    for (size_t k = start; k < i; k++) {
        if (lx->s[k] == '_')
            continue;
        if (m + 1 == sizeof(text))
            jinja_fail(lx->st, "number too long");
        text[m++] = lx->s[k];
    }
    text[m] = 0;
    emit(lx, T_FLOAT, jval_float(strtod(text, NULL)));
    advance(lx, i);
    return true;
}

static bool lex_int(struct jinja_lexer *lx)
{
    if (!digit(lx, lx->pos))
        return false;
    size_t i = lx->pos, end;
    int base = 10, x = i + 1 < lx->n ? lx->s[i + 1] | 32 : 0;
    if (lx->s[i] == '0')
        base = x == 'x' ? 16 : x == 'o' ? 8 : x == 'b' ? 2 : 10;
    uint64_t v = 0;
    for (end = i, i += base != 10 ? 2 : 0; i < lx->n; i++) {
        if (lx->s[i] == '_' && i > lx->pos && lx->s[i - 1] != '_')
            continue;
        int c = (unsigned char)lx->s[i] | 32, d = c >= 'a' ? c - 'a' + 10 : (c & 15);
        if (!(c >= 'a' && c <= 'f') && !digit(lx, i))
            break;
        if (d >= base)
            break;
        if (base == 10 && lx->s[lx->pos] == '0' && d)
            break; /* only zeros may follow a leading 0 */
        if (__builtin_mul_overflow(v, (uint64_t)base, &v) ||
            __builtin_add_overflow(v, (uint64_t)d, &v) || v > INT64_MAX)
            jinja_fail(lx->st, "integer literal does not fit in 64 bits");
        end = i + 1;
    }
    if (end == lx->pos) /* "0x" without digits: only the 0 */
        end++;
    emit(lx, T_INT, jval_int((int64_t)v));
    advance(lx, end);
    return true;
}

static bool lex_name(struct jinja_lexer *lx)
{
    size_t i = lx->pos, k = i;
    int cp = jutf8_next(lx->s, lx->n, &k);
    if (!jcp_isword(cp))
        return false;
    if (!jcp_isident_start(cp))
        jinja_fail(lx->st, "Invalid character in identifier");
    while (k < lx->n) {
        size_t next = k;
        if (!jcp_isword(jutf8_next(lx->s, lx->n, &next)))
            break;
        k = next;
    }
    emit(lx, T_NAME, jval_str(lx->s + i, k - i));
    advance(lx, k);
    return true;
}

static bool lex_string(struct jinja_lexer *lx)
{
    char q = lx->s[lx->pos];
    if (q != '\'' && q != '"')
        return false;
    size_t i = lx->pos + 1;
    while (i < lx->n && lx->s[i] != q)
        i += lx->s[i] == '\\' ? 2 : 1;
    if (i >= lx->n)
        return false;
    emit(lx, T_STRING, unescape(lx, lx->s + lx->pos + 1, i - lx->pos - 1));
    advance(lx, i + 1);
    return true;
}

static bool lex_operator(struct jinja_lexer *lx)
{
    static const struct {
        char text[3];
        uint8_t type;
    } ops[] = {{"//", T_FLOORDIV}, {"**", T_POW},     {"==", T_EQ},    {"!=", T_NE},
               {">=", T_GE},       {"<=", T_LE},      {"+", T_ADD},    {"-", T_SUB},
               {"/", T_DIV},       {"*", T_MUL},      {"%", T_MOD},    {"~", T_TILDE},
               {"[", T_LBRACKET},  {"]", T_RBRACKET}, {"(", T_LPAREN}, {")", T_RPAREN},
               {"{", T_LBRACE},    {"}", T_RBRACE},   {">", T_GT},     {"<", T_LT},
               {"=", T_ASSIGN},    {".", T_DOT},      {":", T_COLON},  {"|", T_PIPE},
               {",", T_COMMA},     {";", T_SEMICOLON}};
    for (size_t k = 0; k < sizeof(ops) / sizeof(ops[0]); k++) {
        if (!at(lx, lx->pos, ops[k].text))
            continue;
        char c = ops[k].text[0];
        if (c == '(' || c == '[' || c == '{') {
            if (lx->n_brackets == JINJA_MAX_HEIGHT)
                jinja_fail(lx->st, "too many nested brackets");
            lx->brackets[lx->n_brackets++] = c == '(' ? ')' : c == '[' ? ']' : '}';
        } else if (c == ')' || c == ']' || c == '}') {
            if (!lx->n_brackets)
                jinja_fail(lx->st, "unexpected '%c'", c);
            char want = lx->brackets[--lx->n_brackets];
            if (want != c)
                jinja_fail(lx->st, "unexpected '%c', expected '%c'", c, want);
        }
        emit(lx, (enum jtok)ops[k].type, JV_NONE);
        advance(lx, lx->pos + strlen(ops[k].text));
        return true;
    }
    return false;
}

static void lex_tag(struct jinja_lexer *lx, bool variable)
{
    for (;;) {
        if (lx->pos >= lx->n)
            return; /* the parser reports the end with the open tag */
        int line = lx->st->line;
        if (!lx->n_brackets &&
            (variable ? close_tag(lx, "}}", false, false) : close_tag(lx, "%}", true, true))) {
            int after = lx->st->line;
            lx->st->line = line;
            emit(lx, variable ? T_VAR_END : T_BLOCK_END, JV_NONE);
            lx->st->line = after;
            return;
        }
        size_t i = skip_space(lx, lx->pos);
        if (i > lx->pos) {
            advance(lx, i);
            continue;
        }
        if (!lex_float(lx) && !lex_int(lx) && !lex_name(lx) && !lex_string(lx) &&
            !lex_operator(lx)) {
            size_t k = lx->pos;
            jutf8_next(lx->s, lx->n, &k);
            jinja_fail(lx->st, "unexpected char '%.*s'", (int)(k - lx->pos), lx->s + lx->pos);
        }
    }
}

/* Lexes text up to the next tag, and the tag. */
static void lex_root(struct jinja_lexer *lx)
{
    size_t from = lx->pos, i = from;
    const char *p = lx->s + from;
    for (;; p++) {
        p = memchr(p, '{', lx->n - (size_t)(p - lx->s));
        if (!p || p + 1 >= lx->s + lx->n) {
            emit_data(lx, from, lx->n);
            advance(lx, lx->n);
            return;
        }
        if (p[1] == '%' || p[1] == '{' || p[1] == '#')
            break;
    }
    i = (size_t)(p - lx->s);
    char sign = sign_at(lx, i + 2);
    size_t raw_end;
    bool raw = p[1] == '%' && raw_tag(lx, i, "raw", &raw_end);
    emit_data(lx, from, strip_data(lx, from, i, sign, p[1] == '{'));
    if (raw) {
        advance(lx, raw_end);
        close_tag(lx, "%}", false, false);
        lex_raw(lx);
        return;
    }
    advance(lx, i + 2 + (sign != 0));
    if (p[1] == '#') {
        lex_comment(lx);
        return;
    }
    emit(lx, p[1] == '{' ? T_VAR_BEGIN : T_BLOCK_BEGIN, JV_NONE);
    lex_tag(lx, p[1] == '{');
}

struct jtoken *jinja_lex(struct jstate *st, const char *src, size_t len, int *n_tokens)
{
    st->line = 1;
    if (len > JINJA_MAX_SOURCE)
        jinja_fail(st, "template of %zu bytes is too long (at most %d)", len, JINJA_MAX_SOURCE);
    char *text = jstr_alloc(st, len + 1);
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (src[i] == '\r') {
            text[n++] = '\n';
            i += i + 1 < len && src[i + 1] == '\n';
        } else {
            text[n++] = src[i];
        }
    }
    if (n && text[n - 1] == '\n')
        n--;
    for (size_t i = 0; i < n;) {
        if (jutf8_next(text, n, &i) < 0)
            jinja_fail(st, "the template is not valid UTF-8");
    }
    struct jinja_lexer lx = {.st = st, .s = text, .n = n, .line_starting = true};
    while (lx.pos < lx.n)
        lex_root(&lx);
    emit(&lx, T_EOF, JV_NONE);
    *n_tokens = lx.n_tok;
    return lx.tok;
}

/* ------------------------------------------------------------------ symbols */

static uint32_t name_hash(struct jval s)
{
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < s.len; i++)
        h = (h ^ (uint8_t)s.u.s[i]) * 16777619u;
    return h ^ h >> 15;
}

int jinja_symbol(struct jstate *st, struct jval name)
{
    struct jinja *t = st->building;
    if (t->n_names * 2 >= t->n_name_index) {
        int n = t->n_name_index ? t->n_name_index * 2 : 128;
        int *index = jalloc(st, (size_t)n, sizeof(*index));
        for (int k = 0; k < t->n_names; k++) {
            uint32_t h = name_hash(t->names[k]);
            while (index[h & (uint32_t)(n - 1)])
                h++;
            index[h & (uint32_t)(n - 1)] = k + 1;
        }
        t->name_index = index;
        t->n_name_index = n;
    }
    uint32_t mask = (uint32_t)t->n_name_index - 1, h = name_hash(name);
    for (; t->name_index[h & mask]; h++) {
        int k = t->name_index[h & mask] - 1;
        if (t->names[k].len == name.len && !memcmp(t->names[k].u.s, name.u.s, name.len))
            return k;
    }
    if (t->n_names == t->cap_names) {
        int cap = t->cap_names ? t->cap_names * 2 : 64;
        struct jval *names = jalloc(st, (size_t)cap, sizeof(*names));
        if (t->n_names)
            memcpy(names, t->names, (size_t)t->n_names * sizeof(*names));
        t->names = names;
        t->cap_names = cap;
    }
    t->names[t->n_names] = name;
    t->name_index[h & mask] = t->n_names + 1;
    return t->n_names++;
}
