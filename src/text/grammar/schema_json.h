/*
 * A JSON text as a tree that preserves what schemas need: the spelling of numbers, the order of
 * members, and each value's position (for errors). Depth, nodes and bytes are limited. Knows
 * nothing of schemas.
 */
#ifndef STEEL_TEXT_SCHEMA_JSON_H
#define STEEL_TEXT_SCHEMA_JSON_H

#include "base/buf.h"
#include "base/error.h"

#include <stdint.h>

enum json_kind { J_NULL, J_FALSE, J_TRUE, J_NUMBER, J_STRING, J_ARRAY, J_OBJECT };

struct jvalue {
    enum json_kind kind;
    uint32_t id;      /* index in the document */
    const char *key;  /* (key_len) in an object: the member's name, decoded */
    const char *text; /* (len) string: decoded UTF-8; number: as written */
    const char *raw;  /* (raw_len) the value as written */
    size_t raw_len;
    uint32_t key_len, len, index;               /* index: position among its siblings */
    const struct jvalue *parent, *next, *first; /* children are linked in order */
    uint32_t n;                                 /* children */
};

struct jdoc;
struct jdoc *jdoc_parse(const char *text, size_t len, struct error *err);
void jdoc_free(struct jdoc *d);
const struct jvalue *jdoc_root(const struct jdoc *d);
uint32_t jdoc_count(const struct jdoc *d);
const struct jvalue *jdoc_at(const struct jdoc *d, uint32_t id);

/* The member of this name (the last one if repeated), or NULL. v may be NULL. */
const struct jvalue *jvalue_get(const struct jvalue *v, const char *name);
const struct jvalue *jvalue_get_n(const struct jvalue *v, const char *name, size_t len);
bool jvalue_is(const struct jvalue *v, const char *string);
/* Appends "#/properties/a/oneOf/0". */
void jvalue_path(const struct jvalue *v, struct buf *out);
/* A number as sign, digits and exponent, without leading or trailing zeros: 0.DIGITS * 10^exp.
 * decimal_parse returns false for over 400 digits or an exponent beyond +-400. */
struct decimal {
    bool negative;
    int n, exp; /* n digits; zero has n = 0 */
    char digit[400];
};
bool decimal_parse(const char *s, size_t n, struct decimal *d);
/* Prints the shortest spelling without an exponent to out (>= 900 bytes). */
void decimal_print(const struct decimal *d, char *out);

/* Appends v as written, with the given separators between members and after names. */
void jvalue_print(const struct jvalue *v, const char *comma, const char *colon, struct buf *out);

#endif
