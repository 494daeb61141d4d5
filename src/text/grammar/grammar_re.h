/*
 * Regular expressions over code points as hash-consed terms with intersection and complement, and
 * their deterministic automata, built by derivatives. The constraint compilers turn strings,
 * numbers, property names and regular grammar rules into such automata.
 *
 * Owns the pool of terms (freed after compiling) and `struct dfa` (immutable, part of the grammar).
 * Must not know JSON, tokens or schemas. All work counts against the pool's limits. Exceeding one
 * sets the pool's error; every function then quickly returns RE_NONE.
 */
#ifndef STEEL_TEXT_GRAMMAR_RE_H
#define STEEL_TEXT_GRAMMAR_RE_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

#define RE_INF UINT32_MAX
#define CP_MAX 0x10ffffu

enum {
    RE_NONE = 0, /* the empty language */
    RE_EPS = 1,  /* "" */
    RE_ALL = 2,  /* any string */
    RE_ANY = 3,  /* any one character */
};

struct re_range {
    uint32_t lo, hi; /* inclusive */
};

struct re_pool;
struct re_pool *re_pool_new(void);
void re_pool_free(struct re_pool *p);
/* NULL, or the limit that was exceeded. */
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
uint32_t re_not_containing(struct re_pool *p, const char *text); /* the texts without this one */
uint32_t re_rep(struct re_pool *p, uint32_t a, uint32_t min, uint32_t max); /* RE_INF: unlimited */
/* An existing automaton over decimal numbers. Symbols 0-9 are digits, 10 is "-", 11 is ".".
 * next is (n_states, RE_AUTO_SYMBOLS), with RE_INF for dead; state 0 is the start. Both tables
 * are copied. */
enum { RE_AUTO_SYMBOLS = 12 };
uint32_t re_auto(struct re_pool *p, uint32_t n_states, const uint32_t *next, const bool *accepts);
bool re_nullable(const struct re_pool *p, uint32_t a);
/* Whether the language is empty. Searches without building an automaton. */
bool re_is_empty(struct re_pool *p, uint32_t a);
/* Work so far, in derivatives and list entries. */
size_t re_pool_work(const struct re_pool *p);

/*
 * ECMA-262 syntax, as in JSON Schema's "pattern". The expression must match the whole text. Look-ahead
 * works where it can be expressed as an intersection. Look-behind, back references and word boundaries
 * are rejected.
 */
enum {
    RE_SEARCH = 1, /* may match anywhere in the text unless anchored */
    /* A terminal of Lark: Python's syntax, classes (\d, \w and \s of all scripts) and line ends. Anchors
     * and look-ahead are rejected, since they see the text around the terminal. */
    RE_LARK = 2,
    RE_ICASE = 4,   /* the case of letters does not matter */
    RE_DOT_ALL = 8, /* "." is any character */
    RE_VERBOSE = 16 /* white space and comments outside of classes mean nothing */
};
uint32_t re_parse(struct re_pool *p, const char *s, size_t n, int flags, struct error *err);

/*
 * Groups of characters that many tokens consist of. For each state and group, `safe` is the number
 * of arbitrary characters of the group after which the automaton is certainly still alive.
 */
enum { DFA_GROUPS = 7, DFA_SAFE_MAX = 16 };
/* Whether the group contains this character. Groups may overlap. */
bool dfa_group_has(int group, uint32_t cp);

/* State 0 is dead, state 1 the start. States that cannot reach acceptance are merged into state
 * 0. */
struct dfa {
    uint32_t n_states, n_classes, n_ranges;
    uint8_t ascii[128];          /* class of each ASCII character */
    uint32_t *range_lo;          /* (n_ranges) first code point of each range, from 128, sorted */
    uint8_t *range_class;        /* (n_ranges) */
    uint32_t *next;              /* (n_states, n_classes) */
    uint32_t *label;             /* (n_states) 0 or bits of the accepting terms */
    uint8_t (*safe)[DFA_GROUPS]; /* (n_states, DFA_GROUPS) 0..DFA_SAFE_MAX */
    uint8_t *moves;              /* (n_states) 1: some character leads to a live state */
    uint8_t *reach;              /* (n_states) longest continuation; 255 = unlimited */
    bool any;                    /* accepts every string in its only live state */
    bool finite;                 /* the language is finite */
};

/* Builds one automaton of `n` terms (n <= 32): bit i of a label means that term i accepts. States
 * from which no term can accept are dead. NULL with err if a limit is exceeded. */
struct dfa *dfa_new(struct re_pool *p, const uint32_t *terms, int n, struct error *err);
void dfa_free(struct dfa *d);
size_t dfa_bytes(const struct dfa *d);
bool dfa_empty(const struct dfa *d);
/* Replaces labels: from[k] becomes to[k], all others 0. Then removes states that became dead. */
void dfa_relabel(struct dfa *d, const uint32_t *from, const uint32_t *to, size_t n);

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
bool dfa_range_alive(const struct dfa *d, uint32_t q, uint32_t lo, uint32_t hi);

#endif
