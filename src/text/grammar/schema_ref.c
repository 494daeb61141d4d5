/*
 * Resolves $ref within the schema: by pointer, by anchor, or by the $id of a subschema. Nothing is
 * fetched.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

static bool id_is_base(const struct jvalue *v)
{
    const struct jvalue *id = v->kind == J_OBJECT ? jvalue_get(v, "$id") : NULL;
    if (!id && v->kind == J_OBJECT)
        id = jvalue_get(v, "id");
    return id && id->kind == J_STRING && id->len && id->text[0] != '#';
}

/* Whether it is part of a plain value rather than a schema. */
static bool is_plain_data(const struct jvalue *v)
{
    for (; v->parent; v = v->parent)
        if (v->parent->kind == J_OBJECT && v->key_len >= 4 && v->key_len <= 8 &&
            (!memcmp(v->key, "enum", 4) || !memcmp(v->key, "const", 4) ||
             !memcmp(v->key, "examples", 4) || !memcmp(v->key, "default", 4)))
            return true;
    return false;
}

/* The base of a reference without an address: the nearest ancestor with an $id. */
static const struct jvalue *ref_base(const struct jvalue *v)
{
    while (v->parent && !id_is_base(v))
        v = v->parent;
    return v;
}

static const char *last_part(const char *s, size_t n, size_t *len)
{
    const char *from = s + n;
    while (from > s && from[-1] != '/')
        from--;
    *len = n - (size_t)(from - s);
    return from;
}

/* The subschema with this $id, compared whole or by the last path segment. NULL if none or several
 * match. */
static const struct jvalue *ref_find_id(struct schema *s, const char *p, size_t n)
{
    const struct jvalue *hit = NULL;
    while (n && p[n - 1] == '#')
        n--;
    for (int whole = 1; whole >= 0 && !hit; whole--)
        for (uint32_t i = 0; i < jdoc_count(s->doc); i++) {
            const struct jvalue *v = jdoc_at(s->doc, i);
            if (v->kind != J_OBJECT || !id_is_base(v) || is_plain_data(v))
                continue;
            const struct jvalue *id = jvalue_get(v, "$id");
            if (!id)
                id = jvalue_get(v, "id");
            size_t m = id->len;
            while (m && id->text[m - 1] == '#')
                m--;
            size_t an, bn;
            const char *a = last_part(p, n, &an), *b = last_part(id->text, m, &bn);
            if (whole ? m == n && !memcmp(id->text, p, n)
                      : an && an == bn && !memcmp(a, b, an) && !memmem(p, n, "://", 3)) {
                if (hit)
                    return NULL;
                hit = v;
            }
        }
    return hit;
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

/* Decodes one segment of a pointer: %XX, ~0 and ~1. */
static size_t pointer_part(const char *p, size_t n, char *out)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        char c = p[i];
        if (c == '%' && i + 2 < n + 0 && hex_value(p[i + 1]) >= 0 && hex_value(p[i + 2]) >= 0) {
            c = (char)(hex_value(p[i + 1]) << 4 | hex_value(p[i + 2]));
            i += 2;
        }
        if (k && out[k - 1] == '~' && (c == '0' || c == '1')) {
            out[k - 1] = c == '0' ? '\1' : '/'; /* becomes ~ below */
            continue;
        }
        out[k++] = c;
    }
    for (size_t i = 0; i < k; i++)
        if (out[i] == '\1')
            out[i] = '~';
    return k;
}

static const struct jvalue *ref_walk(const struct jvalue *v, const char *p, size_t n)
{
    char *part = mem_alloc(n + 1);
    while (n && v) {
        const char *slash = memchr(p + 1, '/', n - 1);
        size_t len = slash ? (size_t)(slash - p) - 1 : n - 1;
        size_t k = pointer_part(p + 1, len, part);
        if (v->kind == J_ARRAY) {
            char *end;
            part[k] = 0;
            unsigned long i = strtoul(part, &end, 10);
            const struct jvalue *c = k && !*end ? v->first : NULL;
            while (c && c->index != i)
                c = c->next;
            v = c;
        } else {
            v = jvalue_get_n(v, part, k);
        }
        p += len + 1;
        n -= len + 1;
    }
    mem_free(part);
    return v;
}

static const struct jvalue *ref_anchor(struct schema *s, const struct jvalue *base, const char *p,
                                       size_t n)
{
    for (uint32_t i = 0; i < jdoc_count(s->doc); i++) {
        const struct jvalue *v = jdoc_at(s->doc, i);
        if (v->kind != J_OBJECT || is_plain_data(v))
            continue;
        const struct jvalue *a = jvalue_get(v, "$anchor"), *id = jvalue_get(v, "$id");
        if (!id)
            id = jvalue_get(v, "id");
        bool hit = a && a->kind == J_STRING && a->len == n && !memcmp(a->text, p, n);
        hit |= id && id->kind == J_STRING && id->len == n + 1 && id->text[0] == '#' &&
               !memcmp(id->text + 1, p, n);
        if (hit && ref_base(v) == base)
            return v;
    }
    return NULL;
}

const struct jvalue *schema_ref(struct schema *s, const struct jvalue *ref)
{
    const char *p = ref->text, *hash;
    size_t n = ref->len;
    if (ref->kind != J_STRING) {
        schema_fail(s, ref, "is not a string");
        return NULL;
    }
    hash = memchr(p, '#', n);
    size_t address = hash ? (size_t)(hash - p) : n;
    const struct jvalue *base = ref_base(ref->parent), *hit;
    if (address) {
        base = ref_find_id(s, p, address);
        if (!base) {
            schema_fail(s, ref, "\"%.*s\" is not in this schema, and nothing is fetched",
                        (int)(n < 200 ? n : 200), p);
            return NULL;
        }
    }
    size_t rest = hash ? n - address - 1 : 0;
    const char *frag = hash ? hash + 1 : p;
    if (!rest)
        hit = base;
    else if (*frag == '/')
        hit = ref_walk(base, frag, rest);
    else
        hit = ref_anchor(s, base, frag, rest);
    /* Many schemas write pointers relative to the document root. */
    if (!hit && !address && rest && *frag == '/')
        hit = ref_walk(jdoc_root(s->doc), frag, rest);
    if (!hit)
        schema_fail(s, ref, "\"%.*s\" does not exist", (int)(n < 200 ? n : 200), p);
    return hit;
}
