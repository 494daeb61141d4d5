/* See drop.h. */
#include "cli/term/drop.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

static bool is_picture(const char *path)
{
    static const char *const suffixes[] = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"};
    const char *dot = strrchr(path, '.');
    struct stat st;
    for (size_t i = 0; dot && i < sizeof suffixes / sizeof *suffixes; i++)
        if (!strcasecmp(dot, suffixes[i]))
            return path[0] == '/' && !stat(path, &st) && S_ISREG(st.st_mode);
    return false;
}

/* %41 and the like, in place. */
static void unescape_url(char *s)
{
    char *to = s;
    for (; *s; s++) {
        unsigned c;
        if (*s == '%' && isxdigit((unsigned char)s[1]) && isxdigit((unsigned char)s[2]) &&
            sscanf(s + 1, "%2x", &c) == 1) {
            *to++ = (char)c;
            s += 2;
        } else {
            *to++ = *s;
        }
    }
    *to = 0;
}

size_t drop_path(const char *line, struct buf *path)
{
    static const char url[] = "file://";
    char quote = line[0] == '\'' || line[0] == '"' ? line[0] : 0;
    const char *at = line + (quote != 0);
    buf_reset(path);
    for (; *at && *at != '\n' && (quote ? *at != quote : *at != ' ' && *at != '\t'); at++) {
        if (!quote && *at == '\\' && at[1])
            at++;
        buf_addc(path, *at);
    }
    if ((quote && *at != quote) || !path->len)
        return 0;
    if (!strncmp(path->p, url, sizeof url - 1)) {
        memmove(path->p, path->p + sizeof url - 1, path->len - sizeof url + 2);
        unescape_url(path->p);
    }
    return is_picture(path->p) ? (size_t)(at - line) + (quote != 0) : 0;
}
