/* JSON texts as trees: see schema_json.h. Values are allocated in chunks and never move; decoded
 * strings share one block. */
#include "text/grammar/schema_json.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 128, VALUES_MAX = 400000, CHUNK = 1024 };

struct jdoc {
    struct jvalue **chunks; /* (n / CHUNK + 1) of CHUNK values each */
    uint32_t n;
    char *strings; /* (2 * len) decoded strings; never longer than their source */
    size_t n_strings;
};

struct schema_json_reader {
    struct jdoc *d;
    const char *start, *at, *end;
    int depth;
    struct error *err;
};

static bool json_fail(struct schema_json_reader *r, const char *what)
{
    return error_set(r->err, "not valid JSON: %s at byte %zu", what, (size_t)(r->at - r->start));
}

static struct jvalue *value_new(struct schema_json_reader *r, enum json_kind kind)
{
    struct jdoc *d = r->d;
    if (d->n >= VALUES_MAX) {
        error_set(r->err, "JSON with over %d values", VALUES_MAX);
        return NULL;
    }
    if (d->n % CHUNK == 0) {
        d->chunks = mem_realloc(d->chunks, d->n / CHUNK + 1, sizeof *d->chunks);
        d->chunks[d->n / CHUNK] = mem_alloc(CHUNK * sizeof(struct jvalue));
    }
    struct jvalue *v = &d->chunks[d->n / CHUNK][d->n % CHUNK];
    *v = (struct jvalue){.kind = kind, .id = d->n++};
    return v;
}

static void skip_space(struct schema_json_reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\t' || *r->at == '\r'))
        r->at++;
}

static bool read_hex(struct schema_json_reader *r, uint32_t *v)
{
    *v = 0;
    if (r->end - r->at < 4)
        return json_fail(r, "truncated escape");
    for (int i = 0; i < 4; i++) {
        char c = *r->at++;
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return json_fail(r, "invalid escape");
        *v = *v << 4 | (uint32_t)d;
    }
    return true;
}

static bool read_escape(struct schema_json_reader *r, char *out, size_t *n)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->at >= r->end)
        return json_fail(r, "truncated escape");
    char c = *r->at++;
    const char *hit = c ? strchr(from, c) : NULL;
    if (hit) {
        out[(*n)++] = to[hit - from];
        return true;
    }
    uint32_t cp, low;
    if (c != 'u')
        return json_fail(r, "invalid escape");
    if (!read_hex(r, &cp))
        return false;
    if (cp >= 0xd800 && cp < 0xdc00 && r->end - r->at >= 6 && r->at[0] == '\\' && r->at[1] == 'u') {
        const char *back = r->at;
        r->at += 2;
        if (!read_hex(r, &low))
            return false;
        if (low >= 0xdc00 && low < 0xe000)
            cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
        else
            r->at = back;
    }
    if (cp >= 0xd800 && cp < 0xe000)
        return json_fail(r, "unpaired surrogate");
    *n += (size_t)utf8_encode(cp, out + *n);
    return true;
}

/* After the opening quote. */
static bool read_string(struct schema_json_reader *r, const char **text, uint32_t *len)
{
    char *out = r->d->strings + r->d->n_strings;
    size_t n = 0;
    while (r->at < r->end && *r->at != '"') {
        unsigned char c = (unsigned char)*r->at;
        uint32_t cp;
        if (c == '\\') {
            r->at++;
            if (!read_escape(r, out, &n))
                return false;
            continue;
        }
        int k = c < 0x20 ? 0 : utf8_decode(r->at, (size_t)(r->end - r->at), &cp);
        if (!k)
            return json_fail(r, c < 0x20 ? "control character in a string" : "invalid UTF-8");
        memcpy(out + n, r->at, (size_t)k);
        n += (size_t)k;
        r->at += k;
    }
    if (r->at >= r->end)
        return json_fail(r, "unterminated string");
    r->at++;
    *text = out;
    *len = (uint32_t)n;
    r->d->n_strings += n;
    return true;
}

static bool read_number(struct schema_json_reader *r, struct jvalue *v)
{
    const char *from = r->at;
    if (r->at < r->end && *r->at == '-')
        r->at++;
    const char *digits = r->at;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9')
        r->at++;
    if (r->at == digits || (*digits == '0' && r->at - digits > 1))
        return json_fail(r, "invalid number");
    for (int part = 0; part < 2; part++) {
        if (r->at >= r->end || (part ? (*r->at | 32) != 'e' : *r->at != '.'))
            continue;
        r->at++;
        if (part && r->at < r->end && (*r->at == '+' || *r->at == '-'))
            r->at++;
        digits = r->at;
        while (r->at < r->end && *r->at >= '0' && *r->at <= '9')
            r->at++;
        if (r->at == digits)
            return json_fail(r, "invalid number");
    }
    v->text = from;
    v->len = (uint32_t)(r->at - from);
    return true;
}

static struct jvalue *read_value(struct schema_json_reader *r);

static bool read_children(struct schema_json_reader *r, struct jvalue *v, char close)
{
    struct jvalue *last = NULL;
    if (++r->depth > DEPTH_MAX)
        return error_set(r->err, "JSON nested over %d deep", DEPTH_MAX);
    skip_space(r);
    if (r->at < r->end && *r->at == close) {
        r->at++;
        r->depth--;
        return true;
    }
    for (;;) {
        const char *key = NULL;
        uint32_t key_len = 0;
        if (close == '}') {
            skip_space(r);
            if (r->at >= r->end || *r->at != '"')
                return json_fail(r, "missing member name");
            r->at++;
            if (!read_string(r, &key, &key_len))
                return false;
            skip_space(r);
            if (r->at >= r->end || *r->at != ':')
                return json_fail(r, "missing \":\"");
            r->at++;
        }
        struct jvalue *c = read_value(r);
        if (!c)
            return false;
        c->parent = v;
        c->key = key;
        c->key_len = key_len;
        c->index = v->n++;
        if (last)
            last->next = c;
        else
            v->first = c;
        last = c;
        skip_space(r);
        if (r->at < r->end && *r->at == ',') {
            r->at++;
            continue;
        }
        if (r->at < r->end && *r->at == close) {
            r->at++;
            r->depth--;
            return true;
        }
        return json_fail(r, close == '}' ? "missing \",\" or \"}\"" : "missing \",\" or \"]\"");
    }
}

static struct jvalue *read_value(struct schema_json_reader *r)
{
    static const struct {
        const char *word;
        enum json_kind kind;
    } words[] = {{"null", J_NULL}, {"true", J_TRUE}, {"false", J_FALSE}};
    skip_space(r);
    const char *from = r->at;
    char c = r->at < r->end ? *r->at : 0;
    struct jvalue *v = NULL;
    bool ok = false;
    if (c == '"' || c == '{' || c == '[') {
        r->at++;
        v = value_new(r, c == '"' ? J_STRING : c == '{' ? J_OBJECT : J_ARRAY);
        ok = v && (c == '"' ? read_string(r, &v->text, &v->len)
                            : read_children(r, v, c == '{' ? '}' : ']'));
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        v = value_new(r, J_NUMBER);
        ok = v && read_number(r, v);
    } else {
        for (int i = 0; i < 3 && !ok; i++) {
            size_t n = strlen(words[i].word);
            if ((size_t)(r->end - r->at) >= n && !memcmp(r->at, words[i].word, n)) {
                r->at += n;
                v = value_new(r, words[i].kind);
                ok = v != NULL;
            }
        }
        if (!ok && !r->err->msg[0])
            json_fail(r, "missing value");
    }
    if (ok) {
        v->raw = from;
        v->raw_len = (size_t)(r->at - from);
    }
    return ok ? v : NULL;
}

struct jdoc *jdoc_parse(const char *text, size_t len, struct error *err)
{
    struct error local = {0};
    struct jdoc *d = mem_zalloc(1, sizeof *d);
    d->strings = mem_alloc(len + 1);
    struct schema_json_reader r = {
        .d = d, .start = text, .at = text, .end = text + len, .err = &local};
    bool ok = read_value(&r) != NULL;
    if (ok) {
        skip_space(&r);
        ok = r.at == r.end || json_fail(&r, "unexpected text after the value");
    }
    if (ok)
        return d;
    error_set(err, "%s", local.msg);
    jdoc_free(d);
    return NULL;
}

void jdoc_free(struct jdoc *d)
{
    if (!d)
        return;
    for (uint32_t i = 0; i < d->n; i += CHUNK)
        mem_free(d->chunks[i / CHUNK]);
    mem_free(d->chunks);
    mem_free(d->strings);
    mem_free(d);
}

const struct jvalue *jdoc_root(const struct jdoc *d)
{
    return d->chunks[0];
}

uint32_t jdoc_count(const struct jdoc *d)
{
    return d->n;
}

const struct jvalue *jdoc_at(const struct jdoc *d, uint32_t id)
{
    return &d->chunks[id / CHUNK][id % CHUNK];
}

const struct jvalue *jvalue_get_n(const struct jvalue *v, const char *name, size_t len)
{
    const struct jvalue *hit = NULL;
    if (v && v->kind == J_OBJECT)
        for (const struct jvalue *c = v->first; c; c = c->next)
            if (c->key_len == len && !memcmp(c->key, name, len))
                hit = c;
    return hit;
}

const struct jvalue *jvalue_get(const struct jvalue *v, const char *name)
{
    return jvalue_get_n(v, name, strlen(name));
}

bool jvalue_is(const struct jvalue *v, const char *s)
{
    return v && v->kind == J_STRING && v->len == strlen(s) && !memcmp(v->text, s, v->len);
}

void jvalue_path(const struct jvalue *v, struct buf *out)
{
    if (!v->parent) {
        buf_addc(out, '#');
        return;
    }
    jvalue_path(v->parent, out);
    buf_addc(out, '/');
    if (v->parent->kind == J_ARRAY) {
        buf_addf(out, "%u", v->index);
        return;
    }
    for (uint32_t i = 0; i < v->key_len && i < 100; i++) {
        if (v->key[i] == '~')
            buf_adds(out, "~0");
        else if (v->key[i] == '/')
            buf_adds(out, "~1");
        else
            buf_addc(out, v->key[i]);
    }
}

bool decimal_parse(const char *s, size_t n, struct decimal *d)
{
    size_t i = 0;
    bool point = false;
    int exp = 0;
    *d = (struct decimal){0};
    if (i < n && s[i] == '-') {
        d->negative = true;
        i++;
    }
    for (; i < n && s[i] != 'e' && s[i] != 'E'; i++) {
        if (s[i] == '.') {
            point = true;
            continue;
        }
        if (s[i] == '0' && !d->n) { /* leading zeros */
            exp -= point;
            continue;
        }
        if (d->n == (int)sizeof d->digit)
            return false;
        d->digit[d->n++] = s[i];
        exp += !point;
    }
    if (i < n) {
        char *end;
        long e = strtol(s + i + 1, &end, 10);
        if (e > 400 || e < -400)
            return false;
        exp += (int)e;
    }
    while (d->n && d->digit[d->n - 1] == '0')
        d->n--;
    d->exp = d->n ? exp : 0;
    d->negative &= d->n > 0;
    return d->exp <= 400 && d->exp >= -400;
}

void decimal_print(const struct decimal *d, char *out)
{
    if (d->negative)
        *out++ = '-';
    if (d->exp <= 0)
        *out++ = '0';
    for (int i = 0; i < d->exp; i++)
        *out++ = i < d->n ? d->digit[i] : '0';
    if (d->n > d->exp) {
        *out++ = '.';
        for (int i = d->exp; i < 0; i++)
            *out++ = '0';
        for (int i = d->exp > 0 ? d->exp : 0; i < d->n; i++)
            *out++ = d->digit[i];
    }
    *out = 0;
}

/* Prints a string as JSON, escaping only where necessary. */
static void print_string(const char *p, size_t n, struct buf *out)
{
    buf_addc(out, '"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if (c == '"' || c == '\\')
            buf_addf(out, "\\%c", c);
        else if (c == '\n')
            buf_adds(out, "\\n");
        else if (c == '\t')
            buf_adds(out, "\\t");
        else if (c == '\r')
            buf_adds(out, "\\r");
        else if (c < 0x20)
            buf_addf(out, "\\u%04x", c);
        else
            buf_addc(out, (char)c);
    }
    buf_addc(out, '"');
}

void jvalue_print(const struct jvalue *v, const char *comma, const char *colon, struct buf *out)
{
    if (v->kind == J_STRING) {
        print_string(v->text, v->len, out);
    } else if (v->kind == J_ARRAY || v->kind == J_OBJECT) {
        buf_addc(out, v->kind == J_ARRAY ? '[' : '{');
        for (const struct jvalue *c = v->first; c; c = c->next) {
            if (c != v->first)
                buf_adds(out, comma);
            if (v->kind == J_OBJECT) {
                print_string(c->key, c->key_len, out);
                buf_adds(out, colon);
            }
            jvalue_print(c, comma, colon, out);
        }
        buf_addc(out, v->kind == J_ARRAY ? ']' : '}');
    } else {
        buf_add(out, v->raw, v->raw_len);
    }
}
