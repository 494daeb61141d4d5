/* See json_long.h. A string that is cut out becomes a mark that no text can guess: random digits and its index. */
#include "base/json_long.h"
#include "base/buf.h"
#include "base/mem.h"
#include "base/os.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { LONG = 4096, MOST = 10000, RANDOM = 16, INDEX = 4, MARK = 2 * RANDOM + INDEX };

struct piece {
    const char *at;
    size_t n;
};

struct cut {
    struct buf text;      /* with marks */
    struct piece *pieces; /* (n) the strings that they stand for */
    int n, room;
    char mark[2 * RANDOM + 1]; /* without the index */
};

/* Whether a string has the same bytes as JSON and as text: ASCII without escapes and control characters. */
static bool is_plain(const char *s, size_t n)
{
    unsigned char other = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        other |= (unsigned char)(c < ' ') | (unsigned char)(c > '~') | (unsigned char)(c == '\\');
    }
    return !other;
}

/* The quote that ends the string at p, or NULL. */
static const char *string_end(const char *p, const char *end)
{
    for (const char *q = p; (q = memchr(q, '"', (size_t)(end - q))); q++) {
        const char *slash = q;
        while (slash > p && slash[-1] == '\\')
            slash--;
        if ((q - slash) % 2 == 0)
            return q;
    }
    return NULL;
}

/* Whether the string before p is the name of a member. */
static bool is_name(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
        p++;
    return p < end && *p == ':';
}

/* Puts a mark in the place of the string [at, last). done: the text up to here is in c->text. */
static void cut_string(struct cut *c, const char *done, const char *at, const char *last)
{
    if (c->n == c->room) {
        c->room = 2 * c->room + 8;
        c->pieces = mem_realloc(c->pieces, (size_t)c->room, sizeof *c->pieces);
    }
    buf_add(&c->text, done, (size_t)(at - done));
    buf_addf(&c->text, "%s%04d", c->mark, c->n);
    c->pieces[c->n++] = (struct piece){at, (size_t)(last - at)};
}

static void cut_all(struct cut *c, const char *text, size_t n)
{
    const char *p = text, *end = text + n, *done = text, *last;
    while (c->n < MOST && (p = memchr(p, '"', (size_t)(end - p))) &&
           (last = string_end(++p, end))) {
        if (last - p >= LONG && !is_name(last + 1, end) && is_plain(p, (size_t)(last - p))) {
            cut_string(c, done, p, last);
            done = last;
        }
        p = last + 1;
    }
    if (c->n)
        buf_add(&c->text, done, (size_t)(end - done));
}

/* Sets the strings in the places of their marks. */
static void put_back(json_t *v, const struct cut *c)
{
    json_t *inner;
    const char *key, *s = json_string_value(v);
    size_t i;
    if (s && json_string_length(v) == MARK && !memcmp(s, c->mark, MARK - INDEX)) {
        int at = 0;
        for (s += MARK - INDEX; *s; s++)
            at = at * 10 + (*s - '0');
        json_string_setn_nocheck(v, c->pieces[at].at, c->pieces[at].n);
    }
    json_array_foreach(v, i, inner) put_back(inner, c);
    json_object_foreach(v, key, inner) put_back(inner, c);
}

static bool make_mark(struct cut *c)
{
    unsigned char random[RANDOM];
    if (!os_random(random, sizeof random))
        return false;
    for (int i = 0; i < RANDOM; i++)
        snprintf(c->mark + 2 * i, 3, "%02x", random[i]);
    return true;
}

json_t *json_load_long(const char *text, size_t n, size_t flags, json_error_t *err)
{
    struct cut c = {0};
    json_t *v = NULL;
    if (n > LONG && make_mark(&c))
        cut_all(&c, text, n);
    if (c.n && (v = json_loadb(c.text.p, c.text.len, flags, err)))
        put_back(v, &c);
    if (!v) /* nothing was cut out, or the error's place is that of the whole text */
        v = json_loadb(text, n, flags, err);
    buf_clear(&c.text);
    mem_free(c.pieces);
    return v;
}
