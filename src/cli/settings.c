/* See settings.h. */
#include "cli/settings.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/config_file.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Variables that are not options. */
static const char *const others[] = {
    "CONFIG", "ISA",    "PICK", "MPI",         "NCCL",     "RANK_ADDRESS",
    "SMS",    "FAULTS", "FULL", "TEST_DEVICE", "LAUNCHES",
};

struct option_names {
    const char **names; /* options by their names and aliases, without dashes */
    int n, cap;
    const char *commands[64];
    int n_commands;
};

static void add_name(struct option_names *all, const char *name)
{
    if (all->n == all->cap) {
        all->cap = all->cap ? 2 * all->cap : 256;
        all->names = mem_realloc(all->names, (size_t)all->cap, sizeof *all->names);
    }
    all->names[all->n++] = name;
}

static void add_command(const struct usage *u, void *ctx)
{
    struct option_names *all = ctx;
    for (int i = 0; i < u->n_opts; i++) {
        if (u->opts[i].kind == OPT_HEADING)
            continue;
        add_name(all, u->opts[i].name);
        if (u->opts[i].alias && u->opts[i].alias[0] != '-')
            add_name(all, u->opts[i].alias);
    }
    if (all->n_commands < (int)(sizeof all->commands / sizeof *all->commands))
        all->commands[all->n_commands++] = u->command;
}

static bool is_among(const char *word, const char *const *words, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(word, words[i]))
            return true;
    return false;
}

/* "; did you mean X?", or "". */
static const char *advice(const char *word, const char *const *words, int n, char out[120])
{
    const char *near = args_nearest(word, words, n);
    *out = 0;
    if (near)
        snprintf(out, 120, "; did you mean %s?", near);
    return out;
}

static bool check_file(const struct option_names *all, const char *command)
{
    const struct config_file *f = config_file_get();
    char near[120];
    for (int i = 0; !f->error && i < f->n; i++) {
        const struct config_line *l = &f->lines[i];
        if (l->section && !strncmp(l->section, "model ", 6)) /* of steel serve, which checks it */
            continue;
        if (l->section && !is_among(l->section, all->commands, all->n_commands)) {
            fprintf(stderr, "steel %s: %s:%d: the section [%s] is not a command%s\n", command,
                    f->path, l->line, l->section,
                    advice(l->section, all->commands, all->n_commands, near));
            return false;
        }
        if (!l->section && !is_among(l->name, all->names, all->n)) {
            fprintf(stderr, "steel %s: %s:%d: unknown option '%s'%s\n", command, f->path, l->line,
                    l->name, advice(l->name, all->names, all->n, near));
            return false;
        }
    }
    return true;
}

static void check_variables(const struct option_names *all, const char *command)
{
    for (char **e = environ; e && *e; e++) {
        char name[80], near[120];
        size_t n = strcspn(*e, "=");
        if (strncmp(*e, "STEEL_", 6) != 0 || n - 6 >= sizeof name)
            continue;
        snprintf(name, sizeof name, "%.*s", (int)(n - 6), *e + 6);
        if (is_among(name, others, (int)(sizeof others / sizeof *others)))
            continue;
        for (char *c = name; *c; c++)
            *c = *c == '_' ? '-' : (char)tolower((unsigned char)*c);
        if (!is_among(name, all->names, all->n))
            fprintf(stderr, "steel %s: warning: the variable %.*s is not an option%s\n", command,
                    (int)n, *e, advice(name, all->names, all->n, near));
    }
}

bool settings_check(const char *command)
{
    const struct config_file *f = config_file_get();
    struct option_names all = {0};
    bool any = f->n > 0;
    for (char **e = environ; !any && e && *e; e++)
        any = !strncmp(*e, "STEEL_", 6) && strncmp(*e, "STEEL_CONFIG=", 13) != 0;
    if (!any)
        return true;
    cli_walk(add_command, &all);
    bool ok = check_file(&all, command);
    if (ok)
        check_variables(&all, command);
    mem_free(all.names);
    return ok;
}
