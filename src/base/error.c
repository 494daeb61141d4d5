/* Error formatting, and the abort of CHECK. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A message is one line: control characters from a hostile file must not reach a terminal. */
static void make_one_line(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f)
            *s = '?';
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
