/*
 * Regular expressions over code points as hash-consed terms with intersection and complement, and the
 * deterministic automata made of them by derivatives. The language tools of the constraint compiler:
 * strings, numbers, property names and regular grammar rules all become one of these automata.
 *
 * Owns: the pool of terms (freed after compiling) and `struct dfa` (immutable, lives in the grammar).
 * Must not know JSON, tokens or schemas. Every cost is counted against the pool's limits; going over
 * one sets the pool's error, and every function then returns RE_NONE quickly.
 */
#ifndef STEEL_TEXT_GRAMMAR_RE_H
#define STEEL_TEXT_GRAMMAR_RE_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

#define RE_INF UINT32_MAX
#define CP_MAX 0x10ffffu

enum { RE_NONE = 0, RE_EPS = 1, RE_ALL = 2, RE_ANY = 3 }; /* nothing, "", anything, any one char */

struct re_range {
    uint32_t lo, hi; /* both included */
};

struct re_pool;
struct re_pool *re_pool_new(void);
void re_pool_free(struct re_pool *p);
/* NULL while all is well, else what went over its limit. */
const char *re_pool_error(const struct re_pool *p);

/* Ranges need not be sorted or disjoint. */
uint32_t re_set(struct re_pool *p, const struct re_range *r, size_t n, bool negated);
uint32_t re_char(struct re_pool *p, uint32_t cp);
uint32_t re_literal(struct re_pool *p, const char *utf8, size_t n); /* valid UTF-8 */
uint32_t re_cat(struct re_pool *p, uint32_t a, uint32_t b);
uint32_t re_or(struct re_pool *p, uint32_t a, uint32_t b);
uint32_t re_or_n(struct re_pool *p, const uint32_t *a, size_t n);
uint32_t re_and(struct re_pool *p, uint32_t a, uint32_t b);
uint32_t re_not(struct re_pool *p, uint32_t a);
uint32_t re_rep(struct re_pool *p, uint32_t a, uint32_t min,
                uint32_t max); /* max RE_INF: no limit */
/* A ready automaton over decimal numbers: symbols 0-9 are digits, 10 is "-", 11 is ".". next is
 * (n_states, RE_AUTO_SYMBOLS), RE_INF = dead; state 0 begins. Both tables are copied. */
enum { RE_AUTO_SYMBOLS = 12 };
uint32_t re_auto(struct re_pool *p, uint32_t n_states, const uint32_t *next, const bool *accepts);
bool re_nullable(const struct re_pool *p, uint32_t a);
/* True if the term is one set of characters; its ranges. */
bool re_as_set(const struct re_pool *p, uint32_t a, const struct re_range **r, size_t *n);
/* Does nothing match? Searches without building an automaton. */
bool re_is_empty(struct re_pool *p, uint32_t a);
/* Work counted so far, in derivatives and list entries. */
size_t re_pool_work(const struct re_pool *p);

/*
 * ECMA-262 syntax (what JSON Schema's "pattern" uses, and what most users write). `search`: the
 * expression may match anywhere in the text unless anchored; otherwise it matches all of it.
 * Look-ahead works where it can be an intersection; look-behind, back references and word
 * boundaries are refused.
 */
uint32_t re_parse(struct re_pool *p, const char *s, size_t n, bool search, struct error *err);

/*
 * Groups of characters that many tokens are made of. A state's `safe` tells for each group how many
 * characters of it may follow, whichever they are, before the automaton can die.
 */
enum { DFA_GROUPS = 7, DFA_SAFE_MAX = 16 };
/* Smallest group that holds this character, or DFA_GROUPS; groups are not nested. */
bool dfa_group_has(int group, uint32_t cp);

/* State 0 is dead, state 1 the start. States that cannot reach acceptance are merged into 0. */
struct dfa {
    uint32_t n_states, n_classes, n_ranges;
    uint8_t ascii[128];          /* class of each ASCII character */
    uint32_t *range_lo;          /* (n_ranges) first code point of each range from 128 up, sorted */
    uint8_t *range_class;        /* (n_ranges) */
    uint32_t *next;              /* (n_states, n_classes) */
    uint32_t *label;             /* (n_states) 0 = not accepting, else bits: which parts accept */
    uint8_t (*safe)[DFA_GROUPS]; /* (n_states, DFA_GROUPS) 0..DFA_SAFE_MAX */
    uint8_t *moves;              /* (n_states) 1: some character leads on */
    uint8_t *reach;              /* (n_states) characters that may follow at most, 255 = many */
    bool any;                    /* accepts every string in its only live state */
    bool finite;                 /* its language is finite */
};

/* The automaton of `n` terms at once: bit i of a label says that term i accepts (n <= 32; states in
 * which nothing accepts any more are dead). NULL, with err, over a limit. */
struct dfa *dfa_new(struct re_pool *p, const uint32_t *terms, int n, struct error *err);
void dfa_free(struct dfa *d);
size_t dfa_bytes(const struct dfa *d);
bool dfa_empty(const struct dfa *d);
/* Gives labels new meanings: label i becomes to[k] where from[k] == i, else 0; then states that became
 * dead are cut. */
void dfa_relabel(struct dfa *d, const uint32_t *from, const uint32_t *to, size_t n);
/* Does it accept these code points? */
uint32_t dfa_run(const struct dfa *d, const char *utf8, size_t n);

static inline uint32_t dfa_class(const struct dfa *d, uint32_t cp)
{
    if (cp < 128)
        return d->ascii[cp];
    uint32_t lo = 0, hi = d->n_ranges;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (d->range_lo[mid] <= cp)
            lo = mid;
        else
            hi = mid;
    }
    return d->range_class[lo];
}

static inline uint32_t dfa_step(const struct dfa *d, uint32_t q, uint32_t cp)
{
    return d->next[(size_t)q * d->n_classes + dfa_class(d, cp)];
}

/* Can some code point of lo..hi follow in state q? */
bool dfa_some(const struct dfa *d, uint32_t q, uint32_t lo, uint32_t hi);

#endif
