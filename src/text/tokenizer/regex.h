/*
 * Regular expressions in the dialect of tokenizer.json files (Oniguruma, Ruby syntax), run by PCRE2
 * with its JIT. The dialect is translated at compile time. Matching is bounded: a catastrophic
 * pattern ends in an error and never hangs. Compiled expressions may be shared by threads.
 */
#ifndef STEEL_TEXT_REGEX_H
#define STEEL_TEXT_REGEX_H

#include "base/buf.h"
#include "base/error.h"
#include "base/budget.h"

#include <stddef.h>

struct regex;

/* Compiles `pattern`, as plain text if `literal`. The error quotes the pattern. */
struct regex *regex_new(const char *pattern, size_t len, bool literal, struct error *err);
void regex_free(struct regex *re);

/* Search state of one thread; zero-initialise, regex_scratch_clear at the end. A budget is charged
 * with all CPU time that passes between calls. */
struct regex_scratch {
    void *match_data, *jit_stack, *context;
    struct budget *budget; /* or NULL */
    uint64_t last_check;   /* budget_clock at the last check */
    unsigned n_calls;      /* since the last check */
};
void regex_scratch_clear(struct regex_scratch *s);

enum regex_result { REGEX_ERROR = -1, REGEX_NONE, REGEX_FOUND };
/* Finds the first match in text (valid UTF-8, n bytes) that starts at or after `from`. */
enum regex_result regex_find(const struct regex *re, struct regex_scratch *s, const char *text,
                             size_t n, size_t from, size_t *start, size_t *end, struct error *err);

/* Iterates over all matches as Oniguruma does: no empty match right after a match. */
struct regex_iter {
    size_t at, last_end;
};
static inline struct regex_iter regex_iter_start(void)
{
    return (struct regex_iter){0, (size_t)-1};
}
enum regex_result regex_next(const struct regex *re, struct regex_scratch *s, struct regex_iter *it,
                             const char *text, size_t n, size_t *start, size_t *end,
                             struct error *err);

/* PCRE2's general context over mem_alloc, for every user of that library. */
void *regex_heap(void);

#endif
