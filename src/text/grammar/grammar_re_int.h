/* Inside a pool of terms. Only for grammar_re.c (terms), grammar_dfa.c (automata) and
 * grammar_regex.c (syntax). */
#ifndef STEEL_TEXT_GRAMMAR_RE_INT_H
#define STEEL_TEXT_GRAMMAR_RE_INT_H

#include "text/grammar/grammar_re.h"

enum re_kind {
    RK_NONE,
    RK_EPS,
    RK_SET,  /* a = set */
    RK_CAT,  /* a, then b */
    RK_OR,   /* list[a .. a + b) */
    RK_AND,  /* likewise */
    RK_NOT,  /* a */
    RK_REP,  /* a, b to c times */
    RK_AUTO, /* automaton a in state b; see re_auto */
};

struct re_node {
    uint8_t kind, nullable;
    uint32_t a, b, c;
};

struct re_pool {
    struct re_node *nodes; /* (n_nodes) */
    uint32_t n_nodes, cap_nodes;
    uint32_t *slots; /* (n_slots) node + 1, open addressing */
    uint32_t n_slots;
    uint32_t *list; /* (n_list) operand lists of OR and AND */
    uint32_t n_list, cap_list;
    struct re_range *ranges; /* (n_ranges) of all sets, concatenated */
    uint32_t n_ranges;
    uint32_t *set_at; /* (n_sets + 1) start of each set's ranges */
    uint32_t n_sets;
    uint32_t ascii[128]; /* terms of single characters, 0 = not created */
    struct {
        uint32_t mask, also, term;
        bool negated;
    } categories[8]; /* (n_categories) sets of general categories: see grammar_regex.c */
    uint32_t n_categories;
    struct {
        uint32_t n_states;
        uint32_t *next; /* (n_states, RE_AUTO_SYMBOLS); RE_INF = dead */
        bool *accepts;  /* (n_states) */
    } * autos;          /* (n_autos) */
    uint32_t n_autos;
    size_t work;
    const char *error;
};

enum { RE_MEMO = 1 << 12 };

/* A partition of the code points: code points of one class are in the same sets. */
struct re_classes {
    uint32_t n;           /* classes, at most 255 */
    uint32_t n_edges;     /* elementary ranges */
    uint32_t *edge_lo;    /* (n_edges) sorted, starting with 0 */
    uint8_t *edge_class;  /* (n_edges) */
    uint8_t *in;          /* (pool's n_sets, 32) bits: the set contains the class */
    uint32_t n_in;        /* sets covered by the table */
    uint32_t sample[256]; /* (n) one code point of each class */
    uint32_t depth;
    struct {
        uint64_t key;
        uint32_t value;
    } memo[RE_MEMO];
};

/* Extends the table to sets created after the classes (unions formed during derivation). */
void re_classes_grow(const struct re_pool *p, struct re_classes *cl);

static inline bool re_class_in(const struct re_pool *p, struct re_classes *cl, uint32_t set,
                               uint32_t c)
{
    if (set >= cl->n_in)
        re_classes_grow(p, cl);
    return cl->in[(size_t)set * 32 + c / 8] >> (c % 8) & 1;
}

bool re_over_limit(struct re_pool *p, const char *what);
bool re_spend(struct re_pool *p, size_t n);
uint32_t re_derive(struct re_pool *p, struct re_classes *cl, uint32_t x, uint32_t c);

#endif
