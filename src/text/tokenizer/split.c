/*
 * The hand-written splitters. Each follows its regex alternative by alternative; comments quote the
 * alternative. Input is valid UTF-8; knows nothing of tokens.
 */
#include "text/tokenizer/split.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

#define CL100K(WORD, NUMBER, NOT_OTHER)                                                            \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?" WORD "+|" NUMBER "| ?[^\\s" NOT_OTHER    \
    "]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const char *const regexes[SPLIT_COUNT] = {
    [SPLIT_GPT2] =
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    [SPLIT_CL100K] = CL100K("\\p{L}", "\\p{N}{1,3}", "\\p{L}\\p{N}"),
    [SPLIT_QWEN2] = CL100K("\\p{L}", "\\p{N}", "\\p{L}\\p{N}"),
    [SPLIT_QWEN35] = CL100K("[\\p{L}\\p{M}]", "\\p{N}", "\\p{L}\\p{M}\\p{N}"),
    [SPLIT_CL100K_RUNS] = CL100K("\\p{L}", "\\p{N}+", "\\p{L}\\p{N}"),
};

const char *split_regex(enum split_kind kind)
{
    return regexes[kind];
}

enum split_kind split_find(const char *regex, size_t len)
{
    for (int k = SPLIT_NONE + 1; k < SPLIT_COUNT; k++)
        if (strlen(regexes[k]) == len && !memcmp(regexes[k], regex, len))
            return (enum split_kind)k;
    return SPLIT_NONE;
}

/* End of the run of characters in `set` that starts at p. */
static inline const char *run(const char *p, const char *end, uint32_t set)
{
    while (p < end) {
        if ((unsigned char)*p < 0x80) {
            if (!(set >> unicode_ascii[(unsigned char)*p] & 1))
                break;
            p++;
            continue;
        }
        uint32_t cp;
        int n = utf8_next(p, &cp);
        if (!unicode_is(cp, set))
            break;
        p += n;
    }
    return p;
}

static inline bool is_newline(char c)
{
    return c == '\n' || c == '\r';
}

/* Length in bytes of 's 't 're 've 'm 'll 'd at p (on the apostrophe), or 0. */
static size_t contraction(const char *p, const char *end, bool any_case)
{
    size_t n = (size_t)(end - p);
    if (n < 2)
        return 0;
    char fold = any_case ? 0x20 : 0;
    char a = p[1] | fold;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if (n >= 3) {
        char b = p[2] | fold;
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
            return 3;
        /* U+017F (long s) matches s caselessly */
        if (any_case && p[1] == '\xc5' && p[2] == '\xbf')
            return 3;
    }
    return 0;
}

/* \s+(?!\S)|\s+ on the white space [p, q): all of it at the end of text, else all but the last. */
static size_t spaces(const char *p, const char *q, const char *end)
{
    if (q == end)
        return (size_t)(q - p);
    const char *last = utf8_prev(q);
    return (size_t)((last > p ? last : q) - p);
}

static size_t gpt2(const char *p, const char *end)
{
    if (*p == '\'') {
        size_t n = contraction(p, end, false);
        if (n)
            return n;
    }
    const char *q = p + (*p == ' ' && p + 1 < end); /* " ?" */
    uint32_t cp;
    utf8_next(q, &cp);
    uint32_t c = UC_SET(unicode_category(cp));
    if (c & UC_LETTER)
        return (size_t)(run(q, end, UC_LETTER) - p);
    if (c & UC_NUMBER)
        return (size_t)(run(q, end, UC_NUMBER) - p);
    if (!(c & UC_SPACE))
        return (size_t)(run(q, end, ~(UC_SPACE | UC_LETTER | UC_NUMBER)) - p);
    return spaces(p, run(p, end, UC_SPACE), end);
}

static size_t cl100k(const char *p, const char *end, int max_digits, uint32_t word)
{
    /* (?i:'s|'t|'re|'ve|'m|'ll|'d) */
    if (*p == '\'') {
        size_t n = contraction(p, end, true);
        if (n)
            return n;
    }
    uint32_t cp;
    const char *second = p + utf8_next(p, &cp);
    uint32_t first = UC_SET(unicode_category(cp));
    /* [^\r\n\p{L}\p{N}]?\p{L}+ */
    if (first & word)
        return (size_t)(run(second, end, word) - p);
    if (!(first & UC_NUMBER) && !is_newline(*p)) {
        const char *q = run(second, end, word);
        if (q > second)
            return (size_t)(q - p);
    }
    /* \p{N}{1,3} */
    if (first & UC_NUMBER) {
        if (!max_digits)
            return (size_t)(run(second, end, UC_NUMBER) - p);
        const char *q = second;
        for (int i = 1; i < max_digits && q < end; i++) {
            int n = utf8_next(q, &cp);
            if (!unicode_is(cp, UC_NUMBER))
                break;
            q += n;
        }
        return (size_t)(q - p);
    }
    /*  ?[^\s\p{L}\p{N}]+[\r\n]* */
    uint32_t other = ~(UC_SPACE | UC_NUMBER | word);
    const char *q = first & other ? run(second, end, other) : p;
    if (*p == ' ')
        q = run(second, end, other);
    if (q > p && !(*p == ' ' && q == second)) {
        while (q < end && is_newline(*q))
            q++;
        return (size_t)(q - p);
    }
    /* \s*[\r\n]+ ends after the last newline of the run */
    q = run(p, end, UC_SPACE);
    for (const char *r = q; r > p; r--)
        if (is_newline(r[-1]))
            return (size_t)(r - p);
    return spaces(p, q, end);
}

size_t split_next(enum split_kind kind, const char *text, size_t n)
{
    const char *end = text + n;
    switch (kind) {
    case SPLIT_CL100K:
        return cl100k(text, end, 3, UC_LETTER);
    case SPLIT_QWEN2:
        return cl100k(text, end, 1, UC_LETTER);
    case SPLIT_QWEN35:
        return cl100k(text, end, 1, UC_LETTER | UC_MARK);
    case SPLIT_CL100K_RUNS:
        return cl100k(text, end, 0, UC_LETTER);
    default:
        return gpt2(text, end);
    }
}
