/*
 * Jinja tests: the names after `is`. One table maps names to numbers; aliases share one.
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <string.h>

enum test {
    IS_BOOLEAN,
    IS_CALLABLE,
    IS_DEFINED,
    IS_DIVISIBLEBY,
    IS_ESCAPED,
    IS_EVEN,
    IS_FALSE,
    IS_FILTER,
    IS_FLOAT,
    IS_IN,
    IS_INTEGER,
    IS_ITERABLE,
    IS_LOWER,
    IS_MAPPING,
    IS_NONE,
    IS_NUMBER,
    IS_ODD,
    IS_SAMEAS,
    IS_SEQUENCE,
    IS_STRING,
    IS_TEST,
    IS_TRUE,
    IS_UNDEFINED,
    IS_UPPER,
    IS_EQ,
    IS_NE,
    IS_LT,
    IS_LE,
    IS_GT,
    IS_GE,
};

static const struct {
    const char *name;
    uint8_t test, n_args;
} tests[] = {
    {"boolean", IS_BOOLEAN, 0},
    {"callable", IS_CALLABLE, 0},
    {"defined", IS_DEFINED, 0},
    {"divisibleby", IS_DIVISIBLEBY, 1},
    {"escaped", IS_ESCAPED, 0},
    {"even", IS_EVEN, 0},
    {"false", IS_FALSE, 0},
    {"filter", IS_FILTER, 0},
    {"float", IS_FLOAT, 0},
    {"in", IS_IN, 1},
    {"integer", IS_INTEGER, 0},
    {"iterable", IS_ITERABLE, 0},
    {"lower", IS_LOWER, 0},
    {"mapping", IS_MAPPING, 0},
    {"none", IS_NONE, 0},
    {"number", IS_NUMBER, 0},
    {"odd", IS_ODD, 0},
    {"sameas", IS_SAMEAS, 1},
    {"sequence", IS_SEQUENCE, 0},
    {"string", IS_STRING, 0},
    {"test", IS_TEST, 0},
    {"true", IS_TRUE, 0},
    {"undefined", IS_UNDEFINED, 0},
    {"upper", IS_UPPER, 0},
    {"==", IS_EQ, 1},
    {"eq", IS_EQ, 1},
    {"equalto", IS_EQ, 1},
    {"!=", IS_NE, 1},
    {"ne", IS_NE, 1},
    {"<", IS_LT, 1},
    {"lt", IS_LT, 1},
    {"lessthan", IS_LT, 1},
    {"<=", IS_LE, 1},
    {"le", IS_LE, 1},
    {">", IS_GT, 1},
    {"gt", IS_GT, 1},
    {"greaterthan", IS_GT, 1},
    {">=", IS_GE, 1},
    {"ge", IS_GE, 1},
};

int jtest_lookup(const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        if (strlen(tests[i].name) == len && !memcmp(tests[i].name, name, len))
            return (int)i;
    }
    return -1;
}

static bool is_divisible(struct jstate *st, struct jval v, struct jval by, int64_t rest)
{
    return jval_eq(st, jop_binary(st, OP_MOD, v, by), jval_int(rest));
}

bool jtest_call(struct jstate *st, int test, struct jval v, const struct jargs *a)
{
    static const char *const names[] = {"other"};
    struct jval arg = JV_MISSING;
    jargs_bind(st, tests[test].name, a, names, tests[test].n_args, tests[test].n_args, &arg);
    switch ((enum test)tests[test].test) {
    case IS_BOOLEAN:
        return v.type == JT_BOOL;
    case IS_CALLABLE:
        return v.type == JT_MACRO || v.type == JT_FUNC || v.type == JT_METHOD ||
               v.type == JT_JOINER || v.type == JT_LOOP || v.type == JT_UNDEF;
    case IS_DEFINED:
        return v.type != JT_UNDEF;
    case IS_UNDEFINED:
        return v.type == JT_UNDEF;
    case IS_DIVISIBLEBY:
        return is_divisible(st, v, arg, 0);
    case IS_EVEN:
        return is_divisible(st, v, jval_int(2), 0);
    case IS_ODD:
        return is_divisible(st, v, jval_int(2), 1);
    case IS_ESCAPED:
        return v.type == JT_STR && v.flags & STR_MARKUP;
    case IS_FALSE:
        return v.type == JT_BOOL && !v.u.b;
    case IS_TRUE:
        return v.type == JT_BOOL && v.u.b;
    case IS_FILTER:
        return v.type == JT_STR && jfilter_lookup(v.u.s, v.len) >= 0;
    case IS_TEST:
        return v.type == JT_STR && jtest_lookup(v.u.s, v.len) >= 0;
    case IS_FLOAT:
        return v.type == JT_FLOAT;
    case IS_INTEGER:
        return v.type == JT_INT;
    case IS_NUMBER:
        return jval_isnum(v);
    case IS_ITERABLE:
        return jval_iterable(v) || v.type == JT_LOOP;
    case IS_LOWER:
        return jstr_islower(jval_tostr(st, v));
    case IS_UPPER:
        return jstr_isupper(jval_tostr(st, v));
    case IS_MAPPING:
        return v.type == JT_DICT;
    case IS_NONE:
        return v.type == JT_NONE;
    case IS_STRING:
        return v.type == JT_STR;
    case IS_SEQUENCE: /* has a length and is indexable; Undefined counts as both */
        return v.type == JT_STR || v.type == JT_LIST || v.type == JT_TUPLE || v.type == JT_DICT ||
               v.type == JT_RANGE || v.type == JT_UNDEF;
    case IS_SAMEAS:
        return jval_same(v, arg);
    case IS_IN:
        return jval_contains(st, v, arg);
    case IS_EQ:
        return jop_compare(st, OP_EQ, v, arg);
    case IS_NE:
        return jop_compare(st, OP_NE, v, arg);
    case IS_LT:
        return jop_compare(st, OP_LT, v, arg);
    case IS_LE:
        return jop_compare(st, OP_LE, v, arg);
    case IS_GT:
        return jop_compare(st, OP_GT, v, arg);
    case IS_GE:
        return jop_compare(st, OP_GE, v, arg);
    }
    return false;
}
