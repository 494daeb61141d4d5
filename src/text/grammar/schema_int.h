/*
 * How a JSON Schema is compiled.
 *
 * 1. A literal is a subschema that must be satisfied or (after `not`) violated, or a constant. A
 *    value in a reply must satisfy a set of literals. Each such set is a node.
 * 2. A node's set is expanded into a list of alternative shapes (schema.c). For each type, a shape
 *    says what is allowed: a regular language for numbers and strings, counts and the literals of
 *    items and properties for arrays and objects. allOf merges shapes, anyOf lists them, `not`
 *    applies De Morgan, oneOf makes them disjoint. Items and properties are literals again, so
 *    recursion ends when a set repeats.
 * 3. Nodes that no value satisfies are found and removed. The rest becomes a grammar
 *    (schema_build.c).
 *
 * All memory comes from one arena that is freed after compiling. Work and memory are limited.
 */
#ifndef STEEL_TEXT_SCHEMA_INT_H
#define STEEL_TEXT_SCHEMA_INT_H

#include "text/grammar/grammar_int.h"
#include "text/grammar/schema_json.h"

/* literal = value's id << 2 | constant << 1 | negated */
enum { LIT_NOT = 1, LIT_CONST = 2 };
#define LIT_FALSE UINT32_MAX

struct literals {
    uint32_t n;
    const uint32_t *v; /* (n) */
};

enum {
    TY_NULL = 1,
    TY_TRUE = 2,
    TY_FALSE = 4,
    TY_NUM = 8,
    TY_STR = 16,
    TY_ARR = 32,
    TY_OBJ = 64,
    TY_BOOL = TY_TRUE | TY_FALSE,
    TY_ANY = 127
};

/* The property keywords of one schema object. They interact (additionalProperties). */
struct prop_keywords {
    struct prop_keywords *next;
    uint32_t n_props, n_pats;
    struct prop_schema {
        const char *name;
        uint32_t len;
        struct literals lits;
    } * props;
    struct pattern_schema {
        uint32_t re;
        struct literals lits;
    } * pats;
    struct literals extra; /* additionalProperties */
};

struct item_keywords {
    struct item_keywords *next;
    uint32_t n_prefix;
    struct literals *prefix;
    struct literals items;
};

struct name_list {
    struct name_list *next;
    const char *name;
    uint32_t len;
    const char *needs; /* in dependentRequired: `name` requires this property */
    uint32_t needs_len;
};

struct contains {
    struct contains *next;
    struct literals lits;
    uint32_t min;
};

struct value_shape {
    uint32_t types;
    uint32_t num, str;         /* terms */
    const struct jvalue *lark; /* x-lark of the strings; NULL: none */
    struct prop_keywords *prop_lists;
    struct name_list *required, *needs;
    uint32_t names; /* term that every property's name must match */
    uint32_t min_props, max_props, min_items, max_items;
    struct item_keywords *item_lists;
    struct contains *contains;
};

struct shapes {
    struct value_shape *v;
    uint32_t n, cap;
    bool dropped; /* a literal was left out: see schema.dropped */
};

struct arena_block;

struct schema {
    struct jdoc *doc;
    struct re_pool *pool;
    int flags;
    bool old_ref; /* drafts up to 7: keywords next to $ref are ignored */
    struct error *err;
    bool failed;
    int probing; /* > 0: only testing emptiness; a failure means "unknown" */
    struct arena_block *blocks;
    size_t arena_used;
    struct shapes **memo; /* (4 * values) expanded literals */
    uint8_t *active;      /* (4 * values) being expanded: detects reference cycles */
    uint32_t depth;
    size_t n_shapes;
    bool dropped; /* an alternative that cannot be negated was left out (see schema_not.c) */
    /* terms created on first use */
    uint32_t re_number, re_plain_number, re_integer;
    uint8_t *empty_known; /* (by term) 0 unknown, 1 not empty, 2 empty */
    uint32_t n_empty_known;
};

/* Fails with "PATH: message". Always returns false. */
bool schema_fail(struct schema *s, const struct jvalue *at, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *schema_alloc(struct schema *s, size_t bytes); /* zeroed; never NULL */

/* schema_shape.c */
void schema_clear(struct schema *s);
struct value_shape shape_any(void);
struct value_shape shape_none(void);
bool shapes_add(struct schema *s, struct shapes *to, const struct value_shape *x);
struct value_shape shape_merge(struct schema *s, const struct value_shape *a,
                               const struct value_shape *b);
/* to = to AND with. */
bool shapes_and(struct schema *s, struct shapes *to, const struct shapes *with);
/* Removes types from x->types that are plainly impossible. */
void shape_prune(struct schema *s, struct value_shape *x);
/* True if certainly no value satisfies x (looks `depth` levels down). */
bool shape_empty(struct schema *s, struct value_shape *x, int depth);
bool term_empty(struct schema *s, uint32_t term);
struct literals lits_join(struct schema *s, struct literals a, struct literals b);
bool lits_false(struct literals l);
/* The literals that the property `name` of shape x must satisfy. */
struct literals shape_prop(struct schema *s, const struct value_shape *x, const char *name,
                           uint32_t len);
struct literals shape_item(struct schema *s, const struct value_shape *x, uint32_t index);

/* schema.c: terms and shapes of keywords. */
struct literals schema_lits_one(struct schema *s, uint32_t lit);
struct literals schema_lits(struct schema *s, const struct jvalue *v, bool negated);
bool schema_is(const struct jvalue *v);
bool schema_list(struct schema *s, const struct jvalue *v);
bool schema_count(struct schema *s, const struct jvalue *v, uint32_t most, uint32_t *n);
bool schema_types(struct schema *s, const struct jvalue *v, uint32_t *types, bool *integer);
bool schema_number_key(struct schema *s, const struct jvalue *parent, const struct jvalue *v,
                       uint32_t *term);
bool schema_string_key(struct schema *s, const struct jvalue *v, const char *key, uint32_t *term);
bool schema_const(struct schema *s, const struct jvalue *v, struct value_shape *x);
bool schema_const_number(struct schema *s, const struct jvalue *v, bool all, uint32_t *term);
bool schema_not_const(struct schema *s, const struct jvalue *v, struct shapes *out);
bool schema_if(struct schema *s, const struct jvalue *v, bool negated, struct shapes *out);
struct prop_keywords *schema_one_prop(struct schema *s, const char *name, uint32_t len,
                                      struct literals l);
bool schema_and_sub(struct schema *s, struct shapes *all, const struct jvalue *v, bool negated);
bool schema_satisfy(struct schema *s, const struct jvalue *v, struct shapes *out);
struct value_shape shape_types(uint32_t types);
bool shapes_append(struct schema *s, struct shapes *to, const struct shapes *from);

/* schema_ref.c: the target of a $ref; NULL with an error if there is none. */
const struct jvalue *schema_ref(struct schema *s, const struct jvalue *ref);

/* schema_not.c: the shapes of a literal, and of a set of literals. */
bool schema_expand_all(struct schema *s, struct literals lits, struct shapes *out);

/* schema_num.c: terms over the decimal spelling of numbers */
enum { CMP_LESS = 1, CMP_EQUAL = 2, CMP_MORE = 4 };
uint32_t num_plain(struct schema *s);    /* any number without an exponent */
uint32_t num_any(struct schema *s);      /* any JSON number */
uint32_t num_integer(struct schema *s);  /* an integer, without ".0" */
uint32_t num_integral(struct schema *s); /* a number whose value is an integer */
uint32_t num_compare(struct schema *s, const struct decimal *bound, int outcomes);
/* RE_NONE with *ok = false if the automaton would be too large. */
uint32_t num_multiple(struct schema *s, const struct decimal *of, bool *ok);

/* schema_format.c: the term of a format. */
enum format_known { FORMAT_UNKNOWN, FORMAT_TERM, FORMAT_REFUSED };
enum format_known schema_format(struct schema *s, const char *name, size_t len, uint32_t *term);

/* schema_prune.c. ok: (n_nodes), zeroed; it receives which nodes have a value. */
void schema_productive(const struct grammar *g, uint8_t *ok);
bool schema_is_dead(const uint8_t *ok, uint32_t node);
/* Removes impossible items, properties and calls. */
void schema_prune(struct grammar *g, const uint8_t *ok);

#endif
