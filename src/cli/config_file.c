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

enum { MAX_BYTES = 64 << 10 };

static struct config_file file;
static char path[512], problem[700];

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
    int wrong = config_file_parse(b.p, &file);
    if (wrong) {
        snprintf(problem, sizeof problem, "%s:%d: not a line \"option value\"", path, wrong);
        file.error = problem;
    }
    return &file;
}
