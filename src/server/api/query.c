/* See query.h. */
#include "server/api/query.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static int hex_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Decodes up to n characters. False: they do not fit, or hold a NUL or a control character. */
static bool decode(const char *p, size_t n, char out[QUERY_TEXT_MAX])
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        char c = p[i] == '+' ? ' ' : p[i];
        if (c == '%' && i + 2 < n && hex_of(p[i + 1]) >= 0 && hex_of(p[i + 2]) >= 0) {
            c = (char)(hex_of(p[i + 1]) << 4 | hex_of(p[i + 2]));
            i += 2;
        }
        if ((unsigned char)c < ' ' || c == 127 || k + 1 == QUERY_TEXT_MAX)
            return false;
        out[k++] = c;
    }
    out[k] = 0;
    return true;
}

/* Finds the next parameter of this name from `at` on. Returns the place after it; NULL = none. */
static const char *next_value(const char *at, const char *name, const char **value, size_t *n)
{
    size_t n_name = strlen(name);
    while (*at) {
        size_t len = strcspn(at, "&"), key = strcspn(at, "=&");
        const char *next = at[len] ? at + len + 1 : at + len;
        if (key == n_name && !strncmp(at, name, n_name)) {
            *value = key < len ? at + key + 1 : at + key;
            *n = key < len ? len - key - 1 : 0;
            return next;
        }
        at = next;
    }
    return NULL;
}

bool query_text(const char *query, const char *name, char out[QUERY_TEXT_MAX],
                struct api_error *err)
{
    const char *value;
    size_t n;
    out[0] = 0;
    if (!next_value(query, name, &value, &n))
        return true;
    return decode(value, n, out) ||
           api_invalid(err, name, "%s must be a text of less than %d bytes", name, QUERY_TEXT_MAX);
}

bool query_int(const char *query, const char *name, int least, int most, int *out,
               struct api_error *err)
{
    char text[QUERY_TEXT_MAX], *end;
    if (!query_text(query, name, text, err))
        return false;
    if (!text[0])
        return true;
    long v = strtol(text, &end, 10);
    if (*end || v < least || v > most)
        return most == INT_MAX
                   ? api_invalid(err, name, "%s must be an integer of at least %d", name, least)
                   : api_invalid(err, name, "%s must be an integer from %d to %d", name, least,
                                 most);
    *out = (int)v;
    return true;
}

bool query_bool(const char *query, const char *name, bool *out, struct api_error *err)
{
    char text[QUERY_TEXT_MAX];
    if (!query_text(query, name, text, err))
        return false;
    if (text[0])
        *out = !strcmp(text, "true") || !strcmp(text, "1");
    return *out || !text[0] || !strcmp(text, "false") || !strcmp(text, "0") ||
           api_invalid(err, name, "%s must be true or false", name);
}

/* Kept items are always complete, so `include` adds nothing. Parts that items never have are refused. */
static bool check_include(const char *query, struct api_error *err)
{
    static const char *const names[] = {"include", "include[]", "include%5B%5D", "include%5b%5d"};
    static const char *const had[] = {"message.output_text.logprobs",
                                      "reasoning.encrypted_content"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *at = query, *value;
        size_t n;
        while ((at = next_value(at, names[i], &value, &n))) {
            char text[QUERY_TEXT_MAX];
            bool ok = decode(value, n, text);
            if (!ok || (strcmp(text, had[0]) && strcmp(text, had[1])))
                return api_invalid(err, "include", "include: '%.60s' is not supported",
                                   ok ? text : "?");
        }
    }
    return true;
}

bool query_page(const char *query, struct page_query *out, struct api_error *err)
{
    char order[QUERY_TEXT_MAX];
    *out = (struct page_query){.limit = 20};
    if (!query_text(query, "after", out->after, err) ||
        !query_int(query, "limit", 1, 100, &out->limit, err) ||
        !query_text(query, "order", order, err) || !check_include(query, err))
        return false;
    out->descending = strcmp(order, "asc") != 0;
    return !order[0] || !strcmp(order, "asc") || !strcmp(order, "desc") ||
           api_invalid(err, "order", "order must be asc or desc");
}
