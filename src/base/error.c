/* Error formatting, and the abort of CHECK. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The length of the UTF-8 character at s; 0 if there is none. */
static int character(const unsigned char *s)
{
    int n = s[0] < 0x80   ? 1
            : s[0] < 0xc2 ? 0
            : s[0] < 0xe0 ? 2
            : s[0] < 0xf0 ? 3
            : s[0] < 0xf5 ? 4
                          : 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

/* A message is one line of UTF-8: control characters from a hostile file must not reach a terminal.
 * Those of C1 are the characters U+0080 to U+009F, or single bytes. */
static void make_one_line(char *text)
{
    for (unsigned char *s = (unsigned char *)text; *s;) {
        int n = character(s);
        if (n <= 1 && (n == 0 || *s < 0x20 || *s == 0x7f))
            *s = '?';
        else if (n == 2 && s[0] == 0xc2 && s[1] < 0xa0)
            s[0] = s[1] = '?';
        s += n ? n : 1;
    }
}

bool error_set(struct error *err, const char *fmt, ...)
{
    if (!err)
        return false;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    make_one_line(err->msg);
    return false;
}

bool error_prefix(struct error *err, const char *fmt, ...)
{
    if (!err)
        return false;
    struct error old = *err;
    char prefix[sizeof err->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    /* The prefix says where to look, so the end of the message is cut if there is no room. */
    size_t room = sizeof err->msg - 1, n = 0;
    const char *parts[] = {prefix, ": ", old.msg};
    for (int i = 0; i < 3; i++)
        for (const char *c = parts[i]; *c && n < room; c++)
            err->msg[n++] = *c;
    err->msg[n] = 0;
    make_one_line(err->msg);
    return false;
}

_Noreturn void check_failed(const char *file, int line, const char *cond, const char *fmt, ...)
{
    fprintf(stderr, "steel: %s:%d: check failed: %s: ", file, line, cond);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    abort();
}
