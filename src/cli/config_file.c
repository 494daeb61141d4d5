/* Reads the config file; see config_file.h. */
#include "cli/config_file.h"
#include "base/buf.h"
#include "base/mem.h"
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_BYTES = 64 << 10, MAX_LINES = 1000, MAX_NAME = 64 };

static struct config_file file;
static char path[512], problem[700], *text;

static char *trim(char *s)
{
    while (*s == ' ' || *s == '\t')
        s++;
    size_t n = strlen(s);
    while (n && strchr(" \t\r", s[n - 1]))
        s[--n] = 0;
    return s;
}

/* Finds "$XDG_CONFIG_HOME/steel/config" or "~/.config/steel/config". False if neither is
 * defined. */
static bool find_path(void)
{
    const char *given = getenv("STEEL_CONFIG"), *xdg = getenv("XDG_CONFIG_HOME"),
               *home = getenv("HOME");
    int n = 0;
    if (given)
        n = snprintf(path, sizeof path, "%s", given);
    else if (xdg && xdg[0] == '/')
        n = snprintf(path, sizeof path, "%s/steel/config", xdg);
    else if (home && home[0] == '/')
        n = snprintf(path, sizeof path, "%s/.config/steel/config", home);
    return n > 0 && n < (int)sizeof path;
}

static void parse(void)
{
    const char *section = NULL;
    int line = 0;
    file.lines = mem_alloc(MAX_LINES * sizeof *file.lines);
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
        if (!name || name > MAX_NAME || file.n == MAX_LINES) {
            snprintf(problem, sizeof problem, "%s:%d: not a line \"option value\"", path, line);
            file.error = problem;
            return;
        }
        file.lines[file.n++] = (struct config_line){section, s, value, line};
    }
}

const struct config_file *config_file_get(void)
{
    if (file.path)
        return &file;
    file.path = path;
    if (!find_path())
        return &file;
    if (access(path, F_OK) && (errno == ENOENT || errno == ENOTDIR))
        return &file;
    struct error err = {0};
    struct buf b = {0};
    if (!cli_read_file(path, MAX_BYTES, &b, &err)) {
        snprintf(problem, sizeof problem, "%.600s", err.msg);
        file.error = problem;
        return &file;
    }
    buf_add(&b, "", 1);
    text = b.p; /* lines point into it */
    parse();
    return &file;
}
