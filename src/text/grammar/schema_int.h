/*
 * How a JSON Schema is compiled.
 *
 * 1. A literal is a place in the schema, to be fulfilled or (after `not`) to be broken; also a constant.
 *    A value that stands somewhere in an answer has to fit a set of literals: that set is a node.
 * 2. A node's set is expanded into a list of shapes, any of which will do (schema.c). A shape says for
 *    each type what is allowed: a regular language for numbers and strings, counts and literals of the
 *    items and properties for arrays and objects. allOf joins shapes, anyOf lists them, `not` goes
 *    through De Morgan, oneOf is made disjoint. Items and properties are literals again, so recursion
 *    ends by finding the same set again.
 * 3. Nodes that nothing fits are found and cut out; the rest becomes a grammar (schema_build.c).
 *
 * Everything lives in one arena that is freed after compiling. Work and memory are counted.
 */
#ifndef STEEL_TEXT_SCHEMA_INT_H
#define STEEL_TEXT_SCHEMA_INT_H

#include "text/grammar/grammar_int.h"
#include "text/grammar/schema_json.h"

/* literal = value's id << 2 | constant << 1 | negated */
enum { LIT_NOT = 1, LIT_CONST = 2 };
#define LIT_FALSE UINT32_MAX

struct lits {
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

/* The property keywords of one schema object: they know each other (additionalProperties). */
struct comp {
    struct comp *next;
    uint32_t n_props, n_pats;
    struct comp_prop {
        const char *name;
        uint32_t len;
        struct lits lits;
    } * props;
    struct comp_pat {
        uint32_t re;
        struct lits lits;
    } * pats;
    struct lits extra; /* additionalProperties */
};

struct acomp {
    struct acomp *next;
    uint32_t n_prefix;
    struct lits *prefix;
    struct lits items;
};

struct name_list {
    struct name_list *next;
    const char *name;
    uint32_t len;
    const char *needs; /* in a list of dependentRequired: `name` asks for this */
    uint32_t needs_len;
};

struct contains {
    struct contains *next;
    struct lits lits;
    uint32_t min;
};

struct shape {
    uint32_t types;
    uint32_t num, str; /* terms */
    struct comp *comps;
    struct name_list *required, *needs;
    uint32_t names; /* term that every property's name must match */
    uint32_t min_props, max_props, min_items, max_items;
    struct acomp *acomps;
    struct contains *contains;
};

struct shapes {
    struct shape *v;
    uint32_t n, cap;
    bool dropped; /* of a literal: see schema.dropped */
};

struct arena_block;

struct schema {
    struct jdoc *doc;
    struct re_pool *pool;
    int flags;
    bool old_ref; /* drafts up to 7: nothing beside $ref counts */
    struct error *err;
    bool failed;
    int probing; /* > 0: only looking whether something is empty; a failure means "who knows" */
    struct arena_block *blocks;
    size_t arena_used;
    struct shapes **memo; /* (4 * values) expanded literals */
    uint8_t *active;      /* (4 * values) being expanded: a loop of references */
    uint32_t depth;
    size_t n_shapes;
    bool dropped; /* something that could not be negated was left out (see negate) */
    /* terms by name, made on demand */
    uint32_t re_number, re_plain_number, re_integer;
    uint8_t *empty_known; /* (by term) 0 not known, 1 not empty, 2 empty */
    uint32_t n_empty_known;
};

/* Refuses: "PATH: what". Always false. */
bool schema_fail(struct schema *s, const struct jvalue *at, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *schema_alloc(struct schema *s, size_t bytes); /* zeroed; never NULL */

/* schema_shape.c */
void schema_clear(struct schema *s);
struct shape shape_any(void);
struct shape shape_none(void);
bool shapes_add(struct schema *s, struct shapes *to, const struct shape *x);
struct shape shape_merge(struct schema *s, const struct shape *a, const struct shape *b);
/* to = to AND with. */
bool shapes_and(struct schema *s, struct shapes *to, const struct shapes *with);
/* Cuts types that are plainly impossible out of x->types. */
void shape_prune(struct schema *s, struct shape *x);
/* Certainly nothing fits (looks `depth` levels down). */
bool shape_empty(struct schema *s, struct shape *x, int depth);
bool term_empty(struct schema *s, uint32_t term);
struct lits lits_join(struct schema *s, struct lits a, struct lits b);
bool lits_false(struct lits l);
/* The literals that the property `name` must fit in shape x. */
struct lits shape_prop(struct schema *s, const struct shape *x, const char *name, uint32_t len);
struct lits shape_item(struct schema *s, const struct shape *x, uint32_t index);

/* schema.c: the keywords. Terms and shapes of what fulfils them. */
struct lits schema_lits_one(struct schema *s, uint32_t lit);
struct lits schema_lits(struct schema *s, const struct jvalue *v, bool negated);
bool schema_is(const struct jvalue *v);
bool schema_list(struct schema *s, const struct jvalue *v);
bool schema_count(struct schema *s, const struct jvalue *v, uint32_t most, uint32_t *n);
bool schema_types(struct schema *s, const struct jvalue *v, uint32_t *types, bool *integer);
bool schema_number_key(struct schema *s, const struct jvalue *parent, const struct jvalue *v,
                       uint32_t *term);
bool schema_string_key(struct schema *s, const struct jvalue *v, const char *key, uint32_t *term);
bool schema_const(struct schema *s, const struct jvalue *v, struct shape *x);
bool schema_const_number(struct schema *s, const struct jvalue *v, bool all, uint32_t *term);
bool schema_not_const(struct schema *s, const struct jvalue *v, struct shapes *out);
bool schema_names(struct schema *s, const struct jvalue *v, bool negated, uint32_t *term);
bool schema_if(struct schema *s, const struct jvalue *v, bool negated, struct shapes *out);
struct comp *schema_one_prop(struct schema *s, const char *name, uint32_t len, struct lits l);
bool schema_and_sub(struct schema *s, struct shapes *all, const struct jvalue *v, bool negated);
bool schema_fulfil(struct schema *s, const struct jvalue *v, struct shapes *out);
struct shape shape_types(uint32_t types);
bool shapes_append(struct schema *s, struct shapes *to, const struct shapes *from);

/* schema_ref.c: where a $ref leads; NULL, failed, if nowhere. */
const struct jvalue *schema_ref(struct schema *s, const struct jvalue *ref);

/* schema_not.c: the shapes of a literal, and of a set of them. */
bool schema_expand(struct schema *s, uint32_t lit, const struct shapes **out);
bool schema_expand_all(struct schema *s, struct lits lits, struct shapes *out);

/* schema_num.c: terms over the spelling of numbers */
enum { CMP_LESS = 1, CMP_EQUAL = 2, CMP_MORE = 4 };
uint32_t num_plain(struct schema *s);    /* any number without an exponent */
uint32_t num_any(struct schema *s);      /* any JSON number */
uint32_t num_integer(struct schema *s);  /* an integer, without ".0" */
uint32_t num_integral(struct schema *s); /* a number whose value is an integer */
uint32_t num_compare(struct schema *s, const struct decimal *bound, int outcomes);
/* RE_NONE and *ok = false if its automaton would be too large. */
uint32_t num_multiple(struct schema *s, const struct decimal *of, bool *ok);

/* schema_format.c: the term of a format; false: one that is not enforced by anyone. */
enum format_known { FORMAT_UNKNOWN, FORMAT_TERM, FORMAT_REFUSED };
enum format_known schema_format(struct schema *s, const char *name, size_t len, uint32_t *term);

#endif
