/*
 * Regular expressions as tokenizer.json files spell them (Oniguruma, Ruby syntax), run by PCRE2 with
 * its JIT. The dialect is translated at compile time; matching is bounded, so a catastrophic pattern
 * ends in an error and never hangs. Compiled expressions may be used by many threads at once.
 */
#ifndef STEEL_TEXT_REGEX_H
#define STEEL_TEXT_REGEX_H

#include "base/buf.h"
#include "base/error.h"
#include "base/budget.h"

#include <stddef.h>

struct regex;

/* Compiles `pattern`; `literal` takes it as plain text. The error quotes the pattern. */
struct regex *regex_new(const char *pattern, size_t len, bool literal, struct error *err);
void regex_free(struct regex *re);

/* What one thread needs to search; zero-initialise, regex_scratch_clear at the end. With a budget
 * the CPU time between calls is charged to it, whatever it went into. */
struct regex_scratch {
    void *match_data, *jit_stack, *context;
    struct budget *budget; /* or NULL */
    uint64_t seen;         /* budget_clock at the last look */
    unsigned n_calls;      /* since then */
};
void regex_scratch_clear(struct regex_scratch *s);

enum regex_result { REGEX_ERROR = -1, REGEX_NONE, REGEX_FOUND };
/* First match in text (valid UTF-8, n bytes) at or after `from`. */
enum regex_result regex_find(const struct regex *re, struct regex_scratch *s, const char *text,
                             size_t n, size_t from, size_t *start, size_t *end, struct error *err);

/* Walks all matches the way Oniguruma's iterator does: no empty match right after a match. */
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

/* PCRE2's general context over mem_alloc: for all who call that library. */
void *regex_heap(void);
/* The PCRE2 spelling of an Oniguruma pattern (exposed for tests). */
bool regex_translate(const char *pattern, size_t len, struct buf *out, struct error *err);

#endif
