/*
 * Jinja operators with Python's semantics: arithmetic, comparison, attribute, item and slice
 * access. Access follows jinja2's sandbox: `a.b` tries attributes before items, `a['b']` items
 * before attributes. A name found in neither gives Undefined, not an error.
 */
#include "text/jinja/jinja_int.h"

#include <math.h>
#include <string.h>

static const char *const op_text[] = {
    "+", "-", "*", "/", "//", "%", "** or pow()", "==", "!=", "<", "<=", ">", ">=", "in", "not in"};

static _Noreturn void overflow(struct jstate *st)
{
    jinja_fail(st, "integer result does not fit in 64 bits");
}

static int64_t as_int(struct jval v)
{
    return v.type == JT_INT ? v.u.i : v.u.b;
}

static bool is_int(struct jval v)
{
    return v.type == JT_INT || v.type == JT_BOOL;
}

static struct jval int_pow(struct jstate *st, int64_t a, int64_t b)
{
    if (b < 0) {
        if (a == 0)
            jinja_fail(st, "0.0 cannot be raised to a negative power");
        return jval_float(pow((double)a, (double)b));
    }
    int64_t r = 1;
    for (; b; b >>= 1) {
        if (b & 1 && __builtin_mul_overflow(r, a, &r))
            overflow(st);
        if (b > 1 && __builtin_mul_overflow(a, a, &a))
            overflow(st);
    }
    return jval_int(r);
}

static struct jval int_op(struct jstate *st, enum jop op, int64_t a, int64_t b)
{
    int64_t r;
    bool bad = false;
    switch (op) {
    case OP_ADD:
        bad = __builtin_add_overflow(a, b, &r);
        break;
    case OP_SUB:
        bad = __builtin_sub_overflow(a, b, &r);
        break;
    case OP_MUL:
        bad = __builtin_mul_overflow(a, b, &r);
        break;
    case OP_DIV:
        if (b == 0)
            jinja_fail(st, "division by zero");
        return jval_float((double)a / (double)b);
    case OP_FLOORDIV:
    case OP_MOD:
        if (b == 0)
            jinja_fail(st, "integer %sdivision by zero", op == OP_MOD ? "modulo or " : "");
        if (b == -1) { /* INT64_MIN / -1 traps */
            bad = op == OP_FLOORDIV && a == INT64_MIN;
            r = op == OP_MOD ? 0 : bad ? 0 : -a;
            break;
        }
        r = op == OP_MOD ? a % b : a / b;
        if (a % b && (a < 0) != (b < 0))
            r += op == OP_MOD ? b : -1;
        break;
    default:
        return int_pow(st, a, b);
    }
    if (bad)
        overflow(st);
    return jval_int(r);
}

static struct jval float_op(struct jstate *st, enum jop op, double a, double b)
{
    double r;
    switch (op) {
    case OP_ADD:
        return jval_float(a + b);
    case OP_SUB:
        return jval_float(a - b);
    case OP_MUL:
        return jval_float(a * b);
    case OP_DIV:
        if (b == 0)
            jinja_fail(st, "float division by zero");
        return jval_float(a / b);
    case OP_FLOORDIV:
    case OP_MOD:
        if (b == 0)
            jinja_fail(st, "float %s", op == OP_MOD ? "modulo" : "floor division by zero");
        r = fmod(a, b);
        if (r != 0 && (r < 0) != (b < 0))
            r += b;
        else if (r == 0)
            r = copysign(0.0, b);
        if (op == OP_MOD)
            return jval_float(r);
        return jval_float(floor((a - r) / b + 0.5));
    default:
        if (a == 0 && b < 0)
            jinja_fail(st, "0.0 cannot be raised to a negative power");
        r = pow(a, b);
        if (isnan(r) && !isnan(a) && !isnan(b))
            jinja_fail(st, "complex numbers are not supported");
        if (isinf(r) && !isinf(a) && !isinf(b))
            jinja_fail(st, "(34, 'Numerical result out of range')");
        return jval_float(r);
    }
}

static struct jval repeat(struct jstate *st, struct jval v, int64_t times)
{
    if (times < 0)
        times = 0;
    if (v.type == JT_STR) {
        size_t bytes;
        if (__builtin_mul_overflow((size_t)v.len, (size_t)times, &bytes))
            jinja_fail(st, "repeated string is too long");
        jcharge_bytes(st, bytes);
        char *p = jstr_alloc(st, bytes);
        if (v.len == 1)
            memset(p, v.u.s[0], bytes);
        else
            for (int64_t i = 0; v.len && i < times; i++)
                memcpy(p + (size_t)i * v.len, v.u.s, v.len);
        struct jval r = jval_str(p, bytes);
        r.flags = v.flags & STR_MARKUP;
        return r;
    }
    size_t n;
    if (__builtin_mul_overflow((size_t)v.u.list->n, (size_t)times, &n) || n > UINT32_MAX)
        jinja_fail(st, "repeated list is too long");
    jcharge(st, n);
    struct jval r = jval_list(st, (enum jtype)v.type, n);
    for (size_t i = 0; i < n; i++)
        r.u.list->v[i] = v.u.list->v[i % v.u.list->n];
    return r;
}

static struct jval add(struct jstate *st, struct jval a, struct jval b)
{
    if (a.type == JT_STR && b.type == JT_STR) {
        if ((a.flags | b.flags) & STR_MARKUP) {
            struct jval r = jstr_concat(st, jval_escape(st, a), jval_escape(st, b));
            r.flags |= STR_MARKUP;
            return r;
        }
        return jstr_concat(st, a, b);
    }
    if (a.type == b.type && (a.type == JT_LIST || a.type == JT_TUPLE)) {
        uint32_t na = a.u.list->n, nb = b.u.list->n;
        jcharge(st, ((uint64_t)na + nb) / 2);
        struct jval r = jval_list(st, (enum jtype)a.type, (size_t)na + nb);
        if (na)
            memcpy(r.u.list->v, a.u.list->v, na * sizeof(struct jval));
        if (nb)
            memcpy(r.u.list->v + na, b.u.list->v, nb * sizeof(struct jval));
        return r;
    }
    if (a.type == JT_STR || a.type == JT_LIST || a.type == JT_TUPLE)
        jinja_fail(st, "can only concatenate %s (not \"%s\") to %s", jval_typename(a),
                   jval_typename(b), jval_typename(a));
    jinja_fail(st, "unsupported operand type(s) for +: '%s' and '%s'", jval_typename(a),
               jval_typename(b));
}

static bool is_seq(struct jval v)
{
    return v.type == JT_STR || v.type == JT_LIST || v.type == JT_TUPLE;
}

struct jval jop_binary(struct jstate *st, enum jop op, struct jval a, struct jval b)
{
    if (is_int(a) && is_int(b))
        return int_op(st, op, as_int(a), as_int(b));
    if (jval_isnum(a) && jval_isnum(b))
        return float_op(st, op, jval_todouble(a), jval_todouble(b));
    if (op == OP_MOD && a.type == JT_STR)
        return jformat_percent(st, a, b);
    if (a.type == JT_UNDEF)
        jundef_fail(st, a);
    if (b.type == JT_UNDEF)
        jundef_fail(st, b);
    if (op == OP_ADD)
        return add(st, a, b);
    if (op == OP_MUL && (is_seq(a) || is_seq(b))) {
        struct jval seq = is_seq(a) ? a : b, n = is_seq(a) ? b : a;
        if (!is_int(n))
            jinja_fail(st, "can't multiply sequence by non-int of type '%s'", jval_typename(n));
        return repeat(st, seq, as_int(n));
    }
    jinja_fail(st, "unsupported operand type(s) for %s: '%s' and '%s'", op_text[op],
               jval_typename(a), jval_typename(b));
}

bool jop_compare(struct jstate *st, enum jop op, struct jval a, struct jval b)
{
    int c;
    switch (op) {
    case OP_EQ:
        return jval_eq(st, a, b);
    case OP_NE:
        return !jval_eq(st, a, b);
    case OP_IN:
        return jval_contains(st, a, b);
    case OP_NOTIN:
        return !jval_contains(st, a, b);
    default:
        c = jval_cmp(st, a, b, op_text[op]);
        return c == 2        ? false
               : op == OP_LT ? c < 0
               : op == OP_LE ? c <= 0
               : op == OP_GT ? c > 0
                             : c >= 0;
    }
}

/* ------------------------------------------------------------------ access */

/* obj[key] in Python's sense. False where Python raises LookupError or TypeError. */
static bool subscript(struct jstate *st, struct jval obj, struct jval key, struct jval *out)
{
    if (obj.type == JT_DICT)
        return key.type != JT_LIST && key.type != JT_DICT && jdict_get(st, obj.u.dict, key, out);
    if (!is_int(key) || (!is_seq(obj) && obj.type != JT_RANGE))
        return false;
    int64_t i = as_int(key), n = jval_len(st, obj);
    if (i < 0)
        i += n;
    if (i < 0 || i >= n)
        return false;
    if (obj.type == JT_STR) {
        *out = jstr_sub(st, obj, i, i + 1);
    } else if (obj.type == JT_RANGE) {
        *out = jval_int(obj.u.range->start + i * obj.u.range->step);
    } else {
        *out = obj.u.list->v[i];
    }
    return true;
}

struct jval jget_attr(struct jstate *st, struct jval obj, struct jval name, int mid)
{
    struct jval v;
    if (obj.type == JT_UNDEF)
        jundef_fail(st, obj);
    if (jattr_get(st, obj, name, mid, &v) || subscript(st, obj, name, &v))
        return v;
    if (name.len > 4 && !memcmp(name.u.s, "__", 2) && !memcmp(name.u.s + name.len - 2, "__", 2))
        return jval_undef(st, UNDEF_UNSAFE, name, obj, NULL);
    return jval_undef(st, UNDEF_ATTR, name, obj, NULL);
}

struct jval jget_item(struct jstate *st, struct jval obj, struct jval key)
{
    struct jval v;
    if (obj.type == JT_UNDEF)
        jundef_fail(st, obj);
    if (subscript(st, obj, key, &v))
        return v;
    if (key.type == JT_STR && jattr_get(st, obj, key, jmethod_lookup(key.u.s, key.len), &v))
        return v;
    return jval_undef(st, UNDEF_ATTR, key, obj, NULL);
}

static int64_t slice_index(struct jstate *st, struct jval v, int64_t none, int64_t n, bool back)
{
    if (v.type == JT_MISSING || v.type == JT_NONE)
        return none;
    if (!is_int(v))
        jinja_fail(st, "slice indices must be integers or None or have an __index__ method");
    int64_t i = as_int(v);
    if (i < 0)
        i = i + n < 0 ? (back ? -1 : 0) : i + n;
    else if (i >= n)
        i = back ? n - 1 : n;
    return i;
}

struct jval jget_slice(struct jstate *st, struct jval obj, struct jval a, struct jval b,
                       struct jval c)
{
    if (obj.type == JT_UNDEF)
        jundef_fail(st, obj);
    if (obj.type == JT_DICT)
        jinja_fail(st, "unhashable type: 'slice'");
    if (!is_seq(obj) && obj.type != JT_RANGE)
        jinja_fail(st, "'%s' object is not subscriptable", jval_typename(obj));
    int64_t n = jval_len(st, obj), step = 1, count = 0;
    if (c.type != JT_MISSING && c.type != JT_NONE) {
        if (!is_int(c))
            jinja_fail(st, "slice indices must be integers or None or have an __index__ method");
        step = as_int(c);
        if (step == 0)
            jinja_fail(st, "slice step cannot be zero");
        step = step > n ? n + 1 : step < -n ? -n - 1 : step; /* larger steps have the same effect */
    }
    int64_t from = slice_index(st, a, step > 0 ? 0 : n - 1, n, step < 0);
    int64_t to = slice_index(st, b, step > 0 ? n : -1, n, step < 0);
    if (step > 0 && from < to)
        count = (to - from - 1) / step + 1;
    else if (step < 0 && from > to)
        count = (from - to - 1) / -step + 1;
    if (obj.type == JT_STR)
        return jstr_slice(st, obj, from, step, count);
    struct jval r;
    if (obj.type == JT_RANGE) {
        struct jrange *x = jalloc(st, 1, sizeof(*x)), *y = obj.u.range;
        /* Unsigned: the bounds of an empty or one-element range may wrap, but are never used. */
        uint64_t s0 = (uint64_t)y->start, d = (uint64_t)y->step;
        *x = (struct jrange){(int64_t)(s0 + (uint64_t)from * d), (int64_t)(s0 + (uint64_t)to * d),
                             (int64_t)(d * (uint64_t)step), count};
        r = (struct jval){.type = JT_RANGE, .u.range = x};
        return r;
    }
    if (step == 1) { /* a view */
        r = jval_list(st, (enum jtype)obj.type, 0);
        r.u.list->v = count ? obj.u.list->v + from : NULL;
        r.u.list->n = (uint32_t)count;
        return r;
    }
    jcharge(st, (uint64_t)count);
    r = jval_list(st, (enum jtype)obj.type, (size_t)count);
    for (int64_t i = 0; i < count; i++)
        r.u.list->v[i] = obj.u.list->v[from + i * step];
    return r;
}
