/* Counts JSON values. See json_guard.h. */
#include "base/json_guard.h"

#include <stdbool.h>
#include <string.h>

const struct json_limits json_limits_request = {1000000, 250000, 100};
const struct json_limits json_limits_file = {10000000, 2000000, 100};

/* Position after the string that starts before p; n if it is unterminated. */
static size_t skip_string(const char *text, size_t n, size_t p)
{
    while (p < n) {
        const char *quote = memchr(text + p, '"', n - p);
        if (!quote)
            return n;
        size_t end = (size_t)(quote - text), slashes = 0;
        while (end - slashes > p && text[end - slashes - 1] == '\\')
            slashes++;
        p = end + 1;
        if (slashes % 2 == 0)
            return p;
    }
    return n;
}

/* Characters of numbers, true, false, null: anything but punctuation and space. */
static bool in_word(char c)
{
    return c != '"' && c != '{' && c != '}' && c != '[' && c != ']' && c != ',' && c != ':' &&
           (unsigned char)c > ' ';
}

bool json_guard(const char *text, size_t n, const struct json_limits *limits,
                struct json_counts *counts, struct error *err)
{
    struct json_counts own = {0};
    struct json_counts *c = counts ? counts : &own;
    int depth = 0;
    for (size_t i = 0; i < n;) {
        char ch = text[i++];
        if (ch == '"') {
            i = skip_string(text, n, i);
        } else if (ch == '{' || ch == '[') {
            c->containers++;
            if (++depth > limits->depth)
                return error_set(err, "JSON nested too deeply (more than %d levels)",
                                 limits->depth);
        } else if (in_word(ch)) {
            while (i < n && in_word(text[i]))
                i++;
        } else {
            depth -= (ch == '}' || ch == ']') && depth > 0;
            continue;
        }
        if (++c->values > limits->values)
            return error_set(err, "more than %zu JSON values", limits->values);
        if (c->containers > limits->containers)
            return error_set(err, "more than %zu JSON arrays and objects", limits->containers);
    }
    return true;
}
