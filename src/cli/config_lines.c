/* Cuts the text of a config file into lines; see config_file.h. */
#include "base/mem.h"
#include "cli/config_file.h"

#include <string.h>

enum { MAX_LINES = 1000, MAX_NAME = 64 };

static char *trim(char *s)
{
    while (*s == ' ' || *s == '\t')
        s++;
    size_t n = strlen(s);
    while (n && strchr(" \t\r", s[n - 1]))
        s[--n] = 0;
    return s;
}

int config_file_parse(char *text, struct config_file *to)
{
    const char *section = NULL;
    int line = 0;
    to->lines = mem_alloc(MAX_LINES * sizeof *to->lines);
    to->n = 0;
    for (char *next = text; next;) {
        char *s = next;
        next = strchr(s, '\n');
        if (next)
            *next++ = 0;
        line++;
        s = trim(s);
        size_t n = strlen(s);
        if (!n || *s == '#')
            continue;
        if (*s == '[' && s[n - 1] == ']') {
            s[n - 1] = 0;
            section = trim(s + 1);
            continue;
        }
        if (!strncmp(s, "--", 2)) /* dashes as on the command line are allowed */
            s += 2;
        size_t name = strcspn(s, " \t=");
        char *value = s + name;
        if (*value) {
            *value++ = 0;
            value = trim(value);
            if (*value == '=')
                value = trim(value + 1);
        }
        if (!name || name > MAX_NAME || to->n == MAX_LINES)
            return line;
        to->lines[to->n++] = (struct config_line){section, s, value, line};
    }
    return 0;
}
