/*
 * PCRE2 behind the regex interface. Owns the translation from Oniguruma's Ruby syntax and the
 * limits on matching. Knows nothing of tokenizers.
 *
 * Differences between the dialects that are translated here:
 *   \s \w \d \h     Unicode White_Space (PCRE2 adds U+180E), words with marks, hex digits
 *   [a&&[^b]]       class intersection and nested classes, as lookaheads and alternations
 *   \uHHHH          \x{HHHH}
 *   (?m:...)        "dot matches newline" in Ruby, (?s:...) in PCRE2
 *   x{1,3}+         a repeat of a repeat in Ruby, possessive in PCRE2
 *   x{,3}           from zero
 *   ^ $             always match at line ends (PCRE2_MULTILINE)
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/tokenizer/regex.h"
#include "base/mem.h"

#include <ctype.h>
#include <pcre2.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum {
    MAX_PATTERN = 16384,
    MAX_DEPTH = 100,
    JIT_STACK_MIN = 32 << 10,
    JIT_STACK_MAX = 64 << 20,
    HEAP_LIMIT_KB = 256 << 10,
};
/* Backtracking steps allowed per match, in addition to a linear scan of the text. */
#define MATCH_STEPS 5000000u
/* One PCRE2 call tries at most this many start positions, each of which may scan all of the text.
 * The budget is checked between calls. */
enum { LONG_TEXT = 1 << 16, MAX_STARTS = 2048, MAX_STARTS_LONG = 64, CALLS_PER_CHECK = 16 };

struct regex {
    pcre2_code *code;
    char *pattern; /* for messages */
};

/* -------------------------------------------------------------------------------- translation */

struct translator {
    const char *p, *end;
    int depth;
    struct error *err;
    bool has_white_space; /* PCRE2 >= 10.40 knows \p{White_Space} */
};

/* PCRE2 allocates through mem_alloc, so that running out of memory has one handler. */
static pcre2_general_context *heap;

static void *heap_alloc(size_t n, void *arg)
{
    (void)arg;
    return mem_alloc(n);
}

static void heap_free(void *p, void *arg)
{
    (void)arg;
    mem_free(p);
}

static void heap_open(void)
{
    struct mem_job *job = mem_job_suspend();
    heap = pcre2_general_context_create(heap_alloc, heap_free, NULL);
    mem_job_resume(job);
}

void *regex_heap(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, heap_open);
    return heap;
}

static bool white_space_known;

static void white_space_probe(void)
{
    int code;
    PCRE2_SIZE at;
    struct mem_job *job = mem_job_suspend();
    pcre2_compile_context *ctx = pcre2_compile_context_create(regex_heap());
    pcre2_code *c = pcre2_compile((PCRE2_SPTR) "\\p{White_Space}", PCRE2_ZERO_TERMINATED,
                                  PCRE2_UTF | PCRE2_UCP, &code, &at, ctx);
    white_space_known = c != NULL;
    pcre2_code_free(c);
    pcre2_compile_context_free(ctx);
    mem_job_resume(job);
}

static bool class_parse(struct translator *t, struct buf *out);

#define WORD_BODY "\\p{L}\\p{M}\\p{Nd}\\p{Pc}"
#define HEX_BODY  "0-9A-Fa-f"

static bool hex_value(const char *p, const char *end, int n, uint32_t *v)
{
    *v = 0;
    if (end - p < n)
        return false;
    for (int i = 0; i < n; i++) {
        if (!isxdigit((unsigned char)p[i]))
            return false;
        *v = *v * 16 + (uint32_t)(p[i] <= '9' ? p[i] - '0' : (p[i] | 32) - 'a' + 10);
    }
    return true;
}

/*
 * Translates one escape at t->p (on the backslash). Inside a class, class members go to `out`. An
 * escape that cannot be a class member (a negated set) goes to `other` as a one-character
 * expression.
 */
static bool escape_parse(struct translator *t, bool in_class, struct buf *out, struct buf *other)
{
    if (t->end - t->p < 2)
        return error_set(t->err, "trailing backslash");
    char c = t->p[1];
    const char *start = t->p;
    t->p += 2;
    switch (c) {
    case 's':
        buf_adds(out, t->has_white_space ? "\\p{White_Space}" : "\\s");
        return true;
    case 'S':
        buf_adds(out, t->has_white_space ? "\\P{White_Space}" : "\\S");
        return true;
    case 'd':
        buf_adds(out, "\\p{Nd}");
        return true;
    case 'D':
        buf_adds(out, "\\P{Nd}");
        return true;
    case 'w':
        buf_adds(out, in_class ? WORD_BODY : "[" WORD_BODY "]");
        return true;
    case 'W':
        if (in_class && other->len)
            buf_addc(other, '|');
        buf_adds(in_class ? other : out, "[^" WORD_BODY "]");
        return true;
    case 'h':
        buf_adds(out, in_class ? HEX_BODY : "[" HEX_BODY "]");
        return true;
    case 'H':
        if (in_class && other->len)
            buf_addc(other, '|');
        buf_adds(in_class ? other : out, "[^" HEX_BODY "]");
        return true;
    case 'u': {
        uint32_t v;
        if (!hex_value(t->p, t->end, 4, &v))
            return error_set(t->err, "\\u requires four hexadecimal digits");
        t->p += 4;
        buf_addf(out, "\\x{%04X}", v);
        return true;
    }
    case 'p':
    case 'P':
    case 'x':
        if (t->p < t->end && *t->p == '{') {
            const char *close = memchr(t->p, '}', (size_t)(t->end - t->p));
            if (!close)
                return error_set(t->err, "unclosed \\%c{", c);
            t->p = close + 1;
        } else if (c == 'x') {
            for (int i = 0; i < 2 && t->p < t->end && isxdigit((unsigned char)*t->p); i++)
                t->p++;
        }
        buf_add(out, start, (size_t)(t->p - start));
        return true;
    default:
        buf_add(out, start, 2);
        return true;
    }
}

/* Class items up to "]" or "&&". `body` gets class members, `other` one-character expressions. */
static bool class_items(struct translator *t, struct buf *body, struct buf *other)
{
    bool first = true;
    for (;; first = false) {
        if (t->p >= t->end)
            return error_set(t->err, "unclosed [");
        char c = *t->p;
        if (c == ']' && !(first && !body->len && !other->len && t->p + 1 < t->end))
            return true;
        if (c == '&' && t->end - t->p >= 2 && t->p[1] == '&')
            return true;
        if (c == '\\') {
            if (!escape_parse(t, true, body, other))
                return false;
        } else if (c == '[' && t->end - t->p >= 2 && t->p[1] == ':') {
            const char *close = memmem(t->p, (size_t)(t->end - t->p), ":]", 2);
            if (!close)
                return error_set(t->err, "unclosed [:");
            buf_add(body, t->p, (size_t)(close + 2 - t->p));
            t->p = close + 2;
        } else if (c == '[') {
            if (other->len)
                buf_addc(other, '|');
            if (!class_parse(t, other))
                return false;
        } else {
            if (c == ']')
                buf_addc(body, '\\');
            buf_addc(body, c);
            t->p++;
        }
    }
}

/* Appends one operand of &&: a plain class if possible, else an alternation. */
static void class_operand(struct buf *out, const struct buf *body, const struct buf *other)
{
    if (!other->len && body->len) {
        buf_addc(out, '[');
        buf_add(out, body->p, body->len);
        buf_addc(out, ']');
    } else if (!other->len) {
        buf_adds(out, "(*FAIL)");
    } else {
        buf_adds(out, "(?:");
        buf_add(out, other->p, other->len);
        if (body->len) {
            buf_adds(out, "|[");
            buf_add(out, body->p, body->len);
            buf_addc(out, ']');
        }
        buf_addc(out, ')');
    }
}

/* Translates a class with t->p on its "[". Appends an expression that matches exactly one
 * character. */
static bool class_parse(struct translator *t, struct buf *out)
{
    if (++t->depth > MAX_DEPTH)
        return error_set(t->err, "nested too deeply");
    t->p++;
    bool negated = t->p < t->end && *t->p == '^';
    t->p += negated;
    struct buf body = {0}, other = {0}, terms = {0};
    int n_terms = 0;
    bool ok;
    while ((ok = class_items(t, &body, &other))) {
        bool more = *t->p == '&';
        t->p += more ? 2 : 1;
        if (!more && !n_terms && !other.len && body.len) { /* the common case: a plain class */
            buf_adds(out, negated ? "[^" : "[");
            buf_add(out, body.p, body.len);
            buf_addc(out, ']');
            goto done;
        }
        /* all operands but the last become lookaheads at the same character */
        if (more)
            buf_adds(&terms, "(?=");
        class_operand(&terms, &body, &other);
        if (more)
            buf_addc(&terms, ')');
        buf_reset(&body);
        buf_reset(&other);
        n_terms++;
        if (!more)
            break;
    }
    if (ok) {
        buf_adds(out, negated ? "(?:(?!" : "(?:");
        buf_add(out, terms.p, terms.len);
        buf_adds(out, negated ? ")(?s:.))" : ")");
    }
done:
    buf_clear(&body);
    buf_clear(&other);
    buf_clear(&terms);
    t->depth--;
    return ok;
}

/* Copies the group header after "(": (?flags: with Ruby's m turned into s. */
static void group_header(struct translator *t, struct buf *out)
{
    if (t->p >= t->end || *t->p != '?')
        return;
    const char *q = t->p + 1;
    while (q < t->end && (*q == 'i' || *q == 'm' || *q == 'x' || *q == '-'))
        q++;
    if (q < t->end && (*q == ':' || *q == ')')) {
        for (; t->p < q; t->p++)
            buf_addc(out, *t->p == 'm' ? 's' : *t->p);
    }
}

/* Length of "{n}", "{n,}", "{,m}" or "{n,m}" at p, or 0. */
static size_t interval_length(const char *p, const char *end)
{
    const char *q = p + 1;
    int digits = 0;
    while (q < end && isdigit((unsigned char)*q))
        q++, digits++;
    if (q < end && *q == ',') {
        q++;
        while (q < end && isdigit((unsigned char)*q))
            q++, digits++;
    }
    return q < end && *q == '}' && digits ? (size_t)(q + 1 - p) : 0;
}

static void wrap_from(struct buf *out, size_t at)
{
    buf_adds(out, "(?:)");
    memmove(out->p + at + 3, out->p + at, out->len - at - 4);
    memcpy(out->p + at, "(?:", 3);
    out->p[out->len - 1] = ')';
}

/* Translates an Oniguruma pattern to PCRE2 syntax. */
static bool regex_translate(const char *pattern, size_t len, struct buf *out, struct error *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, white_space_probe);
    struct translator t = {pattern, pattern + len, 0, err, white_space_known};
    size_t group[MAX_DEPTH]; /* where the open groups start in out */
    int n_groups = 0;
    size_t atom = out->len; /* where the last atom starts in out */
    while (t.p < t.end) {
        char c = *t.p;
        if (c == '\\') {
            atom = out->len;
            if (!escape_parse(&t, false, out, NULL))
                return false;
        } else if (c == '[') {
            atom = out->len;
            if (!class_parse(&t, out))
                return false;
        } else if (c == '(') {
            if (n_groups == MAX_DEPTH)
                return error_set(err, "nested too deeply");
            group[n_groups++] = out->len;
            atom = out->len;
            buf_addc(out, c);
            t.p++;
            group_header(&t, out);
        } else if (c == ')') {
            if (n_groups)
                atom = group[--n_groups];
            buf_addc(out, c);
            t.p++;
        } else if (c == '{') {
            size_t n = interval_length(t.p, t.end);
            if (!n) {
                atom = out->len;
                buf_addc(out, c);
                t.p++;
                continue;
            }
            buf_addc(out, '{');
            if (t.p[1] == ',')
                buf_addc(out, '0');
            buf_add(out, t.p + 1, n - 1);
            t.p += n;
            if (t.p < t.end && *t.p == '+')
                wrap_from(out, atom);
        } else if (c == '*' || c == '+' || c == '?' || c == '|' || c == '^' || c == '$') {
            buf_addc(out, c);
            t.p++;
        } else {
            atom = out->len;
            do
                buf_addc(out, *t.p++);
            while (t.p < t.end && ((unsigned char)*t.p & 0xc0) == 0x80);
        }
    }
    buf_add(out, "", 0);
    return true;
}

/* -------------------------------------------------------------------------------- compilation */

/* Quotes the pattern for a message: one line, shortened. */
static void pattern_quote(const char *p, size_t n, char out[80])
{
    size_t k = 0;
    for (size_t i = 0; i < n && k < 70; i++)
        out[k++] = (unsigned char)p[i] < 32 ? '?' : p[i];
    while (n > k && k && ((unsigned char)out[k - 1] & 0xc0) == 0x80)
        k--; /* do not cut a character in two */
    strcpy(out + k, n > k ? "..." : "");
}

struct regex *regex_new(const char *pattern, size_t len, bool literal, struct error *err)
{
    char quoted[80];
    pattern_quote(pattern, len, quoted);
    if (len > MAX_PATTERN) {
        error_set(err, "pattern \"%s\": %zu bytes, at most %d are supported", quoted, len,
                  MAX_PATTERN);
        return NULL;
    }
    struct buf text = {0};
    if (literal)
        buf_add(&text, pattern, len);
    else if (!regex_translate(pattern, len, &text, err)) {
        error_prefix(err, "pattern \"%s\"", quoted);
        buf_clear(&text);
        return NULL;
    }
    pcre2_compile_context *ctx = pcre2_compile_context_create(regex_heap());
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(ctx, MAX_DEPTH * 3);
    uint32_t flags = literal ? PCRE2_UTF | PCRE2_LITERAL
                             : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    flags |= PCRE2_USE_OFFSET_LIMIT;
    int code;
    PCRE2_SIZE at;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)text.p, text.len, flags, &code, &at, ctx);
    pcre2_compile_context_free(ctx);
    buf_clear(&text);
    if (!c) {
        char why[160] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        error_set(err, "pattern \"%s\": %s", quoted, why);
        return NULL;
    }
    struct regex *re = mem_zalloc(1, sizeof *re);
    re->code = c;
    pcre2_jit_compile(c, PCRE2_JIT_COMPLETE); /* failure only costs speed */
    re->pattern = mem_strdup(quoted);
    return re;
}

void regex_free(struct regex *re)
{
    if (!re)
        return;
    pcre2_code_free(re->code);
    mem_free(re->pattern);
    mem_free(re);
}

/* ----------------------------------------------------------------------------------- matching */

void regex_scratch_clear(struct regex_scratch *s)
{
    pcre2_match_data_free(s->match_data);
    pcre2_match_context_free(s->context);
    if (s->jit_stack)
        pcre2_jit_stack_free(s->jit_stack);
    *s = (struct regex_scratch){0};
}

/* Charges the time since the last check to the budget, every CALLS_PER_CHECK calls or if `now`. */
static bool check_budget(struct regex_scratch *s, bool now, struct error *err)
{
    if (!s->budget || (++s->n_calls < CALLS_PER_CHECK && !now))
        return true;
    uint64_t clock = budget_clock();
    uint64_t took = s->last_check && clock > s->last_check ? clock - s->last_check : 0;
    s->n_calls = 0;
    s->last_check = clock;
    return budget_spend(s->budget, took) || budget_error(s->budget, err);
}

/* Finds the first match that starts in [from, last]. */
static enum regex_result find_within(const struct regex *re, struct regex_scratch *s,
                                     const char *text, size_t n, size_t from, size_t last,
                                     size_t *start, size_t *end, struct error *err)
{
    if (!s->match_data) {
        s->match_data = pcre2_match_data_create(1, regex_heap());
        s->context = pcre2_match_context_create(regex_heap());
        pcre2_set_heap_limit(s->context, HEAP_LIMIT_KB);
    }
    uint64_t limit = MATCH_STEPS + (uint64_t)(n - from) * 8;
    pcre2_set_match_limit(s->context, limit < UINT32_MAX ? (uint32_t)limit : UINT32_MAX);
    pcre2_set_offset_limit(s->context, last);
    int rc = pcre2_match(re->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, s->match_data,
                         s->context);
    /* 32 KB of machine stack suffices for most texts. Then a larger JIT stack, then the
     * interpreter. */
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && !s->jit_stack &&
        (s->jit_stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, regex_heap()))) {
        pcre2_jit_stack_assign(s->context, NULL, s->jit_stack);
        rc = pcre2_match(re->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, s->match_data,
                         s->context);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(re->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                         s->match_data, s->context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return REGEX_NONE;
    if (rc < 0) {
        char why[160] = "";
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
        error_set(err, "pattern \"%s\" is too costly on this text: %s", re->pattern, why);
        return REGEX_ERROR;
    }
    const PCRE2_SIZE *o = pcre2_get_ovector_pointer(s->match_data);
    *start = o[0];
    *end = o[1];
    if (o[0] > o[1] || o[0] < from) { /* \K in a lookaround can do this */
        error_set(err, "pattern \"%s\": a match ends before it starts", re->pattern);
        return REGEX_ERROR;
    }
    return REGEX_FOUND;
}

enum regex_result regex_find(const struct regex *re, struct regex_scratch *s, const char *text,
                             size_t n, size_t from, size_t *start, size_t *end, struct error *err)
{
    size_t max_starts = n - from < LONG_TEXT ? MAX_STARTS : MAX_STARTS_LONG;
    if (!text)
        text = "";
    for (bool again = false;; again = true) {
        size_t last = n - from > max_starts ? from + max_starts : n;
        if (!check_budget(s, again, err))
            return REGEX_ERROR;
        enum regex_result r = find_within(re, s, text, n, from, last, start, end, err);
        if (r != REGEX_NONE || last == n)
            return r;
        for (from = last + 1; from < n && ((unsigned char)text[from] & 0xc0) == 0x80;)
            from++;
    }
}

enum regex_result regex_next(const struct regex *re, struct regex_scratch *s, struct regex_iter *it,
                             const char *text, size_t n, size_t *start, size_t *end,
                             struct error *err)
{
    while (it->at <= n) {
        enum regex_result r = regex_find(re, s, text, n, it->at, start, end, err);
        if (r != REGEX_FOUND)
            return r;
        if (*start == *end && *end == it->last_end) {
            it->at++;
            while (it->at < n && ((unsigned char)text[it->at] & 0xc0) == 0x80)
                it->at++;
            continue;
        }
        it->at = it->last_end = *end;
        return REGEX_FOUND;
    }
    return REGEX_NONE;
}
