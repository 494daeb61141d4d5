/*
 * Rules of a context-free grammar, as trees: what grammar_gbnf.c and grammar_lark.c parse, and
 * grammar_rules.c compiles. Only for these three.
 */
#ifndef STEEL_TEXT_GRAMMAR_RULES_H
#define STEEL_TEXT_GRAMMAR_RULES_H

#include "text/grammar/grammar_int.h"

enum rule_tree_kind { RULE_TERM, RULE_CALL, RULE_CAT, RULE_ALT, RULE_REP };

struct rule_tree {
    enum rule_tree_kind kind;
    uint32_t value;       /* RULE_TERM: term; RULE_CALL: rule */
    uint32_t lo, hi;      /* RULE_REP; RE_INF: no limit */
    uint32_t first, next; /* children, linked; 0 = none */
    bool recursive;       /* contains a non-regular rule */
};

struct rule {
    const char *name; /* (len) in the source, or static */
    uint32_t len;
    uint32_t line;       /* of its definition, or first use */
    uint32_t tree;       /* 0: not defined */
    uint32_t term;       /* term of a regular rule */
    uint8_t state;       /* 0 not visited, 1 in progress, 2 regular, 3 recursive */
    uint32_t low, order; /* Tarjan's low link and visit order */
    uint32_t node;
};

struct rule_link;

struct rules {
    /* Filled by the parser. */
    struct re_pool *pool;
    struct rule_tree *trees; /* (n_trees) tree 0 is none */
    uint32_t n_trees, cap_trees;
    struct rule *rules; /* (n_rules) */
    uint32_t n_rules, cap_rules;
    uint32_t *slots, n_slots; /* rules by name: index + 1, open addressing */
    uint32_t root;            /* a rule */
    uint32_t line;            /* for errors; 0 after parsing */
    struct error *err;
    /* Of the build. */
    enum term_kind kind;             /* of the terminals */
    uint32_t without;                /* every terminal is intersected with this term */
    uint32_t *stack, n_stack, clock; /* Tarjan's stack and counter */
    int depth;
    bool split; /* every rule becomes a graph */
    struct rule_link *links;
    uint32_t n_links, cap_links;
    uint32_t *heads, n_heads, cap_heads; /* states under construction: their first link */
    struct grammar *g;
    struct {
        uint32_t term, id;
    } * made; /* (n_made) terminals */
    uint32_t n_made, cap_made;
};

/* For parsers. All return 0 after an error. */
uint32_t rules_fail(struct rules *r, const char *what); /* "grammar, line N: what" */
uint32_t rules_tree(struct rules *r, enum rule_tree_kind kind, uint32_t value);
/* Appends a child to a tree whose last child is *last (0: none). False if the child is 0. */
bool rules_append(struct rules *r, uint32_t parent, uint32_t *last, uint32_t child);
/* A tree of lo to hi repeats of this one. */
uint32_t rules_repeat(struct rules *r, uint32_t tree, uint32_t lo, uint32_t hi);
/* The rule of this name. Its tree is 0 until the parser sets it. */
uint32_t rules_find(struct rules *r, const char *name, size_t len);

/* Compiles what `parse` makes of the text. Terminals are of this kind, and contain none of the tags
 * (NULL-terminated, or NULL). `parse` may be called twice, each time with empty rules. */
typedef bool rules_parser(struct rules *r, const char *text, size_t len);
struct grammar *rules_compile(rules_parser *parse, const char *text, size_t len,
                              enum term_kind kind, const char *const *tags, struct error *err);

#endif
