/*
 * A validator of JSON Schema for tests, written apart from the compiler: plain recursion over jansson
 * values, PCRE2 for patterns. Knows what the tests' schemas use; what it does not know it reports by
 * returning -1, so that nothing is counted as valid by mistake.
 */
#ifndef STEEL_TESTS_SCHEMA_CHECK_H
#define STEEL_TESTS_SCHEMA_CHECK_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <jansson.h>
#include <math.h>
#include <pcre2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static int check_value(const json_t *root, const json_t *s, const json_t *v, int depth);

static int check_pattern(const char *pattern, const char *text, size_t len)
{
    int code;
    PCRE2_SIZE at;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_DOLLAR_ENDONLY | PCRE2_ALT_BSUX, &code, &at, NULL);
    if (!re)
        return -1;
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(re, NULL);
    int rc = pcre2_match(re, (PCRE2_SPTR)text, len, 0, 0, m, NULL);
    pcre2_match_data_free(m);
    pcre2_code_free(re);
    return rc >= 0 ? 1 : rc == PCRE2_ERROR_NOMATCH ? 0 : -1;
}

static bool check_equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    if (json_is_array(a) && json_is_array(b)) {
        if (json_array_size(a) != json_array_size(b))
            return false;
        for (size_t i = 0; i < json_array_size(a); i++)
            if (!check_equal(json_array_get(a, i), json_array_get(b, i)))
                return false;
        return true;
    }
    return json_equal(a, b);
}

static bool check_type(const char *t, const json_t *v)
{
    if (!strcmp(t, "integer"))
        return json_is_integer(v) ||
               (json_is_real(v) && floor(json_real_value(v)) == json_real_value(v));
    if (!strcmp(t, "number"))
        return json_is_number(v);
    if (!strcmp(t, "string"))
        return json_is_string(v);
    if (!strcmp(t, "boolean"))
        return json_is_boolean(v);
    if (!strcmp(t, "null"))
        return json_is_null(v);
    if (!strcmp(t, "array"))
        return json_is_array(v);
    return !strcmp(t, "object") ? json_is_object(v) : true;
}

static const json_t *check_ref(const json_t *root, const char *ref)
{
    if (ref[0] != '#')
        return NULL;
    const json_t *s = root;
    for (const char *p = ref + 1; *p && s;) {
        char part[512];
        size_t n = 0;
        for (p++; *p && *p != '/' && n < sizeof part - 1; p++) {
            if (*p == '~')
                part[n++] = *++p == '1' ? '/' : '~';
            else if (*p == '%')
                return NULL;
            else
                part[n++] = *p;
        }
        part[n] = 0;
        s = json_is_array(s) ? json_array_get(s, (size_t)atoi(part)) : json_object_get(s, part);
    }
    return s;
}

static size_t check_chars(const json_t *v)
{
    size_t n = 0;
    const char *p = json_string_value(v);
    for (size_t i = 0; i < json_string_length(v); i++)
        n += ((unsigned char)p[i] & 0xc0) != 0x80;
    return n;
}

#define CHECK_SUB(x)                                                                               \
    do {                                                                                           \
        int r_ = (x);                                                                              \
        if (r_ != 1)                                                                               \
            return r_;                                                                             \
    } while (0)

static int check_object(const json_t *root, const json_t *s, const json_t *v, int depth)
{
    const json_t *props = json_object_get(s, "properties"), *k;
    const json_t *pats = json_object_get(s, "patternProperties");
    const json_t *extra = json_object_get(s, "additionalProperties");
    const char *name;
    json_t *x;
    size_t i;
    if ((k = json_object_get(s, "required")))
        json_array_foreach((json_t *)k, i,
                           x) if (!json_object_get(v, json_string_value(x))) return 0;
    if ((k = json_object_get(s, "minProperties")) &&
        (double)json_object_size(v) < json_number_value(k))
        return 0;
    if ((k = json_object_get(s, "maxProperties")) &&
        (double)json_object_size(v) > json_number_value(k))
        return 0;
    json_object_foreach((json_t *)v, name, x)
    {
        bool known = false;
        const json_t *p = json_object_get(props, name);
        if (p) {
            known = true;
            CHECK_SUB(check_value(root, p, x, depth));
        }
        const char *pattern;
        json_t *ps;
        json_object_foreach((json_t *)pats, pattern, ps)
        {
            int hit = check_pattern(pattern, name, strlen(name));
            if (hit < 0)
                return -1;
            if (hit) {
                known = true;
                CHECK_SUB(check_value(root, ps, x, depth));
            }
        }
        if (!known && extra)
            CHECK_SUB(check_value(root, extra, x, depth));
        if ((k = json_object_get(s, "propertyNames"))) {
            json_t *text = json_string(name);
            int r = check_value(root, k, text, depth);
            json_decref(text);
            CHECK_SUB(r);
        }
    }
    static const char *const deps[] = {"dependencies", "dependentRequired", "dependentSchemas"};
    for (int d = 0; d < 3; d++)
        json_object_foreach((json_t *)json_object_get(s, deps[d]), name, x)
        {
            if (!json_object_get(v, name))
                continue;
            json_t *need;
            if (json_is_array(x))
                json_array_foreach(x, i,
                                   need) if (!json_object_get(v, json_string_value(need))) return 0;
            if (!json_is_array(x))
                CHECK_SUB(check_value(root, x, v, depth));
        }
    return 1;
}

static int check_array(const json_t *root, const json_t *s, const json_t *v, int depth)
{
    const json_t *items = json_object_get(s, "items"), *k;
    const json_t *prefix = json_object_get(s, "prefixItems");
    if (json_is_array(items)) {
        prefix = items;
        items = json_object_get(s, "additionalItems");
    }
    size_t n = json_array_size(v), fits = 0;
    if ((k = json_object_get(s, "minItems")) && (double)n < json_number_value(k))
        return 0;
    if ((k = json_object_get(s, "maxItems")) && (double)n > json_number_value(k))
        return 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *is = i < json_array_size(prefix) ? json_array_get(prefix, i) : items;
        if (is)
            CHECK_SUB(check_value(root, is, json_array_get(v, i), depth));
        if ((k = json_object_get(s, "contains")))
            fits += check_value(root, k, json_array_get(v, i), depth) == 1;
    }
    if (json_object_get(s, "uniqueItems") && json_is_true(json_object_get(s, "uniqueItems")))
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < i; j++)
                if (check_equal(json_array_get(v, i), json_array_get(v, j)))
                    return 0;
    if (json_object_get(s, "contains") && !fits)
        return 0;
    return 1;
}

static int check_number(const json_t *s, const json_t *v)
{
    double x = json_number_value(v);
    const json_t *k;
    bool strict_min = json_is_true(json_object_get(s, "exclusiveMinimum"));
    bool strict_max = json_is_true(json_object_get(s, "exclusiveMaximum"));
    if ((k = json_object_get(s, "minimum")) &&
        (strict_min ? x <= json_number_value(k) : x < json_number_value(k)))
        return 0;
    if ((k = json_object_get(s, "maximum")) &&
        (strict_max ? x >= json_number_value(k) : x > json_number_value(k)))
        return 0;
    if ((k = json_object_get(s, "exclusiveMinimum")) && json_is_number(k) &&
        x <= json_number_value(k))
        return 0;
    if ((k = json_object_get(s, "exclusiveMaximum")) && json_is_number(k) &&
        x >= json_number_value(k))
        return 0;
    if ((k = json_object_get(s, "multipleOf"))) {
        double by = json_number_value(k), q = x / by;
        if (fabs(x) > 9e15)
            return -1;                                 /* not exact any more */
        bool whole = by == floor(by) && x == floor(x); /* then fmod is exact */
        if (whole ? fmod(x, by) != 0 : fabs(q - round(q)) > 1e-9 * fmax(1, fabs(q)))
            return 0;
    }
    return 1;
}

/* 1 valid, 0 not, -1 this validator does not know. */
static int check_value(const json_t *root, const json_t *s, const json_t *v, int depth)
{
    const json_t *k;
    json_t *x;
    size_t i;
    if (depth > 200)
        return -1;
    if (json_is_boolean(s))
        return json_is_true(s);
    depth++;
    if ((k = json_object_get(s, "$ref"))) {
        const json_t *to = check_ref(root, json_string_value(k));
        if (!to)
            return -1;
        CHECK_SUB(check_value(root, to, v, depth));
        const char *draft = json_string_value(json_object_get(root, "$schema"));
        if (draft && strstr(draft, "draft-0"))
            return 1;
    }
    if ((k = json_object_get(s, "type"))) {
        bool hit = json_is_string(k) && check_type(json_string_value(k), v);
        if (json_is_array(k))
            json_array_foreach((json_t *)k, i, x) hit |= check_type(json_string_value(x), v);
        if (!hit)
            return 0;
    }
    if ((k = json_object_get(s, "const")) && !check_equal(k, v))
        return 0;
    if ((k = json_object_get(s, "enum"))) {
        bool hit = false;
        json_array_foreach((json_t *)k, i, x) hit |= check_equal(x, v);
        if (!hit)
            return 0;
    }
    if (json_is_number(v))
        CHECK_SUB(check_number(s, v));
    if (json_is_string(v)) {
        if ((k = json_object_get(s, "minLength")) && (double)check_chars(v) < json_number_value(k))
            return 0;
        if ((k = json_object_get(s, "maxLength")) && (double)check_chars(v) > json_number_value(k))
            return 0;
        if ((k = json_object_get(s, "pattern")))
            CHECK_SUB(
                check_pattern(json_string_value(k), json_string_value(v), json_string_length(v)));
    }
    if (json_is_object(v))
        CHECK_SUB(check_object(root, s, v, depth));
    if (json_is_array(v))
        CHECK_SUB(check_array(root, s, v, depth));
    if ((k = json_object_get(s, "allOf")))
        json_array_foreach((json_t *)k, i, x) CHECK_SUB(check_value(root, x, v, depth));
    static const char *const some[] = {"anyOf", "oneOf"};
    for (int one = 0; one < 2; one++)
        if ((k = json_object_get(s, some[one]))) {
            int hits = 0;
            json_array_foreach((json_t *)k, i, x)
            {
                int r = check_value(root, x, v, depth);
                if (r < 0)
                    return -1;
                hits += r;
            }
            if (one ? hits != 1 : !hits)
                return 0;
        }
    if ((k = json_object_get(s, "not"))) {
        int r = check_value(root, k, v, depth);
        if (r)
            return r < 0 ? -1 : 0;
    }
    if ((k = json_object_get(s, "if"))) {
        int r = check_value(root, k, v, depth);
        if (r < 0)
            return -1;
        const json_t *branch = json_object_get(s, r ? "then" : "else");
        if (branch)
            CHECK_SUB(check_value(root, branch, v, depth));
    }
    return 1;
}

#endif
