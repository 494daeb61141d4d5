/*
 * Steps a terminal over one byte: decodes UTF-8 and JSON escapes into the automaton's characters.
 * Inline, because mask computation consists mostly of this. A thread's `sub` is its position
 * between two characters; `q` and `name` are the states of the automaton and of the name trie.
 */
#ifndef STEEL_TEXT_GRAMMAR_TERM_H
#define STEEL_TEXT_GRAMMAR_TERM_H

#include "text/grammar/grammar_int.h"

/* sub = kind << 28 | left << 24 | value */
enum {
    SUB_IN,     /* between characters */
    SUB_OPEN,   /* before the opening quote */
    SUB_UTF8,   /* `left` bytes of the character are missing */
    SUB_ESC,    /* after a backslash */
    SUB_HEX,    /* \u: `left` digits are missing */
    SUB_LOW_BS, /* after a high surrogate: value is its low ten bits */
    SUB_LOW_U,
    SUB_LOW,  /* value: ten bits, then the digits so far */
    SUB_DONE, /* after the closing quote */
};
#define SUB(kind, left, value) ((uint32_t)(kind) << 28 | (uint32_t)(left) << 24 | (value))

/*
 * The property set in an object item's data: the number of properties, whether undeclared ones may
 * follow, and the last undeclared one (a chain of hash and link in matcher.data, 0 = none; names
 * are never repeated) with a 64-bit Bloom filter of their hashes. Then one bit per declared
 * property for "seen", and one for "allowed next".
 */
enum { SET_COUNT, SET_OTHERS, SET_CHAIN, SET_BLOOM, SET_BITS = SET_BLOOM + 2 };
static inline uint32_t set_words(const struct object_node *o)
{
    return (o->n_props + 31) / 32;
}

static inline bool bits_any(const uint32_t *bits, uint32_t lo, uint32_t hi)
{
    while (lo < hi) {
        uint32_t w = bits[lo / 32] >> lo % 32;
        uint32_t n = 32 - lo % 32;
        if (n > hi - lo) {
            n = hi - lo;
            w &= (1u << n) - 1;
        }
        if (w)
            return true;
        lo += n;
    }
    return false;
}

/* Whether a name below this node of the name trie is still allowed. */
static inline bool name_alive(const struct grammar_matcher *m, const struct thread *t,
                              const struct name_node *n)
{
    const struct object_node *o = m->g->nodes[t->then.node].object;
    const uint32_t *set = m->data + t->then.data;
    return bits_any(set + SET_BITS + set_words(o), n->lo, n->hi);
}

static inline bool others_allowed(const struct grammar_matcher *m, const struct thread *t)
{
    return m->data[t->then.data + SET_OTHERS];
}

/* Reads one character. False: dead. name is node + 1 in the name trie, and 0 once the text has left
 * it. */
static inline bool term_feed(const struct grammar_matcher *m, const struct term *tm,
                             struct thread *t, uint32_t cp)
{
    t->sub = 0;
    if (tm->kind != TERM_KEY) {
        t->q = dfa_step(tm->dfa, t->q, cp);
        return t->q;
    }
    t->hash = (t->hash + cp + 1) * 0x9e3779b1u;
    t->hash ^= t->hash >> 15;
    if (t->q)
        t->q = dfa_step(tm->dfa, t->q, cp);
    if (t->name) {
        const struct name_node *nodes = tm->names->nodes;
        uint32_t c = nodes[t->name - 1].child;
        while (c && nodes[c].cp < cp)
            c = nodes[c].sibling;
        t->name = c && nodes[c].cp == cp && (t->q || name_alive(m, t, &nodes[c])) ? c + 1 : 0;
    }
    return t->q || t->name;
}

/* Whether some character in lo..hi can be read. */
static inline bool term_range_alive(const struct grammar_matcher *m, const struct term *tm,
                                    const struct thread *t, uint32_t lo, uint32_t hi)
{
    if (lo > hi)
        return false;
    if (t->q && dfa_range_alive(tm->dfa, t->q, lo, hi))
        return true;
    if (tm->kind == TERM_KEY && t->name) {
        const struct name_node *nodes = tm->names->nodes;
        for (uint32_t c = nodes[t->name - 1].child; c; c = nodes[c].sibling)
            if (nodes[c].cp >= lo && nodes[c].cp <= hi && name_alive(m, t, &nodes[c]))
                return true;
    }
    return false;
}

/* Whether the object already has an undeclared property with this name. */
static inline bool other_seen(const struct grammar_matcher *m, const struct thread *t)
{
    const uint32_t *set = m->data + t->then.data;
    if (!(set[SET_BLOOM + (t->hash >> 5 & 1)] >> (t->hash & 31) & 1))
        return false;
    for (uint32_t at = set[SET_CHAIN]; at; at = m->data[at + 1])
        if (m->data[at] == t->hash)
            return true;
    return false;
}

/* The label of a name that ends here: position + 1 if declared, n_props + label if undeclared, 0 if
 * no name may end here. */
static inline uint32_t key_label(const struct grammar_matcher *m, const struct term *tm,
                                 const struct thread *t)
{
    if (t->name) {
        uint32_t k = tm->names->nodes[t->name - 1].name;
        if (k) { /* declared: the automaton does not matter */
            const struct object_node *o = m->g->nodes[t->then.node].object;
            const uint32_t *allowed = m->data + t->then.data + SET_BITS + set_words(o);
            return allowed[(k - 1) / 32] >> (k - 1) % 32 & 1 ? k : 0;
        }
    }
    uint32_t label = t->q ? tm->dfa->label[t->q] : 0;
    return label && (tm->repeats || !other_seen(m, t)) ? tm->names->n + label : 0;
}

/* Whether the name may end here. When the budget runs low, a name is not ended as a kind whose
 * values are much longer than those of names it could still become. */
static inline bool key_ends(const struct grammar_matcher *m, const struct term *tm,
                            const struct thread *t)
{
    uint32_t label = key_label(m, tm, t);
    if (!m->frugal || !tm->total || label <= tm->names->n)
        return label;
    const struct object_node *o = m->g->nodes[t->then.node].object;
    return m->g->node_cost[o->others[label - 1 - tm->names->n]] <= tm->total[t->q] + 16;
}

static inline bool term_step_utf8(const struct grammar_matcher *m, const struct term *tm,
                                  struct thread *t, uint8_t b)
{
    if ((t->sub >> 28) != SUB_UTF8) {
        uint32_t lo, hi, v, left;
        if (b >= 0xc2 && b <= 0xdf) {
            v = b & 0x1f;
            left = 1;
            lo = v << 6;
            hi = lo | 0x3f;
        } else if (b >= 0xe0 && b <= 0xef) {
            v = b & 0xf;
            left = 2;
            lo = v ? v << 12 : 0x800;
            hi = v == 0xd ? 0xd7ff : (v << 12 | 0xfff);
        } else if (b >= 0xf0 && b <= 0xf4) {
            v = b & 7;
            left = 3;
            lo = v ? v << 18 : 0x10000;
            hi = v == 4 ? CP_MAX : (v << 18 | 0x3ffff);
        } else {
            return false;
        }
        t->sub = SUB(SUB_UTF8, left, v);
        return term_range_alive(m, tm, t, lo, hi);
    }
    if ((b & 0xc0) != 0x80)
        return false;
    uint32_t left = t->sub >> 24 & 15, old = t->sub & 0xffffff, v = old << 6 | (b & 0x3f);
    if (left == 2 && old < 0x10 && (v < 0x20 || (v >= 0x360 && v < 0x380)))
        return false; /* an overlong encoding or a surrogate */
    if (left == 3 && (v < 0x10 || v > 0x10f))
        return false;
    if (--left == 0)
        return term_feed(m, tm, t, v);
    t->sub = SUB(SUB_UTF8, left, v);
    return term_range_alive(m, tm, t, v << 6 * left, (v << 6 * left) | ((1u << 6 * left) - 1));
}

static inline int hex_digit(uint8_t b)
{
    return b >= '0' && b <= '9'   ? b - '0'
           : b >= 'a' && b <= 'f' ? b - 'a' + 10
           : b >= 'A' && b <= 'F' ? b - 'A' + 10
                                  : -1;
}

/* Whether this character may be written as \uXXXX. */
static inline bool escape_wanted(const struct term *tm, uint32_t cp)
{
    return !tm->plain || cp < 0x20 || cp > 0x7e;
}

/* Whether \u may write some character in lo..hi (16 bits), alone or as the first part of a pair. */
static inline bool term_hex_range(const struct grammar_matcher *m, const struct term *tm,
                                  const struct thread *t, uint32_t lo, uint32_t hi)
{
    if (lo > hi)
        return false;
    if (lo < 0xd800 && term_range_alive(m, tm, t, lo, hi < 0xd7ff ? hi : 0xd7ff))
        return true;
    if (hi >= 0xe000 && term_range_alive(m, tm, t, lo > 0xe000 ? lo : 0xe000, hi))
        return true;
    if (hi < 0xd800 || lo > 0xdbff)
        return false;
    uint32_t a = (lo > 0xd800 ? lo : 0xd800) - 0xd800, z = (hi < 0xdbff ? hi : 0xdbff) - 0xd800;
    return term_range_alive(m, tm, t, 0x10000 + (a << 10), 0x10000 + (z << 10 | 0x3ff));
}

/* With digits v of \u read and `left` missing: whether an allowed character starts so. */
static inline bool term_hex_alive(const struct grammar_matcher *m, const struct term *tm,
                                  const struct thread *t, uint32_t v, uint32_t left)
{
    uint32_t lo = v << 4 * left, hi = lo | ((1u << 4 * left) - 1);
    if (!tm->plain)
        return term_hex_range(m, tm, t, lo, hi);
    return term_hex_range(m, tm, t, lo, hi < 0x1f ? hi : 0x1f) ||
           term_hex_range(m, tm, t, lo > 0x7f ? lo : 0x7f, hi);
}

static inline bool term_step_escape(const struct grammar_matcher *m, const struct term *tm,
                                    struct thread *t, uint8_t b)
{
    static const uint8_t meaning[128] = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', ['b'] = 8,
                                         ['f'] = 12,  ['n'] = 10,    ['r'] = 13,  ['t'] = 9};
    uint32_t kind = t->sub >> 28, left = t->sub >> 24 & 15, v = t->sub & 0xffffff;
    int d = hex_digit(b);
    switch (kind) {
    case SUB_ESC:
        if (b == 'u') {
            t->sub = SUB(SUB_HEX, 4, 0);
            return term_hex_alive(m, tm, t, 0, 4);
        }
        if (b >= 128 || !meaning[b] || (tm->plain && b == '/'))
            return false;
        return term_feed(m, tm, t, meaning[b]);
    case SUB_HEX:
        if (d < 0)
            return false;
        v = v << 4 | (uint32_t)d;
        if (--left) {
            t->sub = SUB(SUB_HEX, left, v);
            return term_hex_alive(m, tm, t, v, left);
        }
        if (v >= 0xd800 && v <= 0xdbff) {
            t->sub = SUB(SUB_LOW_BS, 0, v - 0xd800);
            return term_hex_alive(m, tm, t, v, 0);
        }
        if ((v >= 0xdc00 && v <= 0xdfff) || !escape_wanted(tm, v))
            return false;
        return term_feed(m, tm, t, v);
    case SUB_LOW_BS:
        t->sub = SUB(SUB_LOW_U, 0, v);
        return b == '\\';
    case SUB_LOW_U:
        t->sub = SUB(SUB_LOW, 4, v << 12);
        return b == 'u';
    default: { /* SUB_LOW */
        if (d < 0)
            return false;
        uint32_t high = v >> 12, digits = (v & 0xfff) << 4 | (uint32_t)d, n = 4 - --left;
        if ((n == 1 && digits != 0xd) || (n == 2 && digits < 0xdc))
            return false;
        if (!left)
            return term_feed(m, tm, t, 0x10000 + (high << 10) + (digits - 0xdc00));
        t->sub = SUB(SUB_LOW, left, high << 12 | digits);
        uint32_t lo = (digits << 4 * left) & 0x3ff;
        if (n == 1)
            return term_range_alive(m, tm, t, 0x10000 + (high << 10),
                                    0x10000 + (high << 10 | 0x3ff));
        return term_range_alive(m, tm, t, 0x10000 + (high << 10 | lo),
                                0x10000 + (high << 10 | lo | ((1u << 4 * left) - 1)));
    }
    }
}

/* Whether an escape may follow: some character after the backslash must be possible. */
static inline bool term_esc_alive(const struct grammar_matcher *m, const struct term *tm,
                                  const struct thread *t)
{
    if (!tm->plain && t->q && tm->dfa->moves[t->q])
        return true;
    return term_range_alive(m, tm, t, 0, 0x1f) || term_range_alive(m, tm, t, '"', '"') ||
           term_range_alive(m, tm, t, '\\', '\\') ||
           term_range_alive(m, tm, t, tm->plain ? 0x7f : 0, CP_MAX);
}

/* Steps over one byte. False: the thread is dead. */
static inline bool term_step(const struct grammar_matcher *m, struct thread *t, uint8_t b)
{
    const struct term *tm = &m->g->terms[t->term];
    uint32_t kind = t->sub >> 28;
    if (tm->kind == TERM_RAW) {
        if (b < 128)
            return kind == SUB_IN && term_feed(m, tm, t, b);
        return term_step_utf8(m, tm, t, b);
    }
    if (kind == SUB_IN) {
        if (b >= 128)
            return term_step_utf8(m, tm, t, b);
        if (b == (tm->bare ? (uint8_t)tm->shut : '"')) {
            if (tm->kind == TERM_PART)
                return false; /* the quote is another terminal */
            if (tm->kind == TERM_KEY ? !key_ends(m, tm, t) : !tm->dfa->label[t->q])
                return false;
            t->sub = SUB(SUB_DONE, 0, 0);
            return true;
        }
        if (b == '\\' && !tm->bare) {
            t->sub = SUB(SUB_ESC, 0, 0);
            return term_esc_alive(m, tm, t);
        }
        return b >= ' ' && term_feed(m, tm, t, b);
    }
    if (kind == SUB_UTF8)
        return term_step_utf8(m, tm, t, b);
    if (kind == SUB_OPEN && tm->bare) {
        uint32_t at = t->sub & 0xffffff;
        t->sub = tm->open[at + 1] ? SUB(SUB_OPEN, 0, at + 1) : 0;
        return b == (uint8_t)tm->open[at];
    }
    if (kind == SUB_OPEN) {
        t->sub = 0;
        return b == '"';
    }
    if (kind == SUB_DONE)
        return false;
    return term_step_escape(m, tm, t, b);
}

/* Whether the terminal has no end of its own, and may continue where it may end. */
static inline bool term_is_open(const struct term *tm)
{
    return tm->kind == TERM_RAW || tm->kind == TERM_PART;
}

/* Whether the terminal may end here. */
static inline bool term_ends(const struct grammar_matcher *m, const struct thread *t)
{
    const struct term *tm = &m->g->terms[t->term];
    if (term_is_open(tm))
        return !t->sub && tm->dfa->label[t->q];
    return t->sub >> 28 == SUB_DONE;
}

#endif
