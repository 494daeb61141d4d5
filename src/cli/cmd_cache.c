/* steel cache: the prefixes that `steel serve` keeps on disk. */
#include "base/buf.h"
#include "cli/cli.h"
#include "engine/keep_folder.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static void print_one(void *arg, const struct keep_model *m)
{
    int *n = arg;
    char size[16], date[32] = "";
    struct tm tm;
    time_t t = (time_t)m->used;
    if (!m->n_files)
        return;
    strftime(date, sizeof date, "%Y-%m-%d %H:%M", localtime_r(&t, &tm));
    if (!(*n)++)
        printf("%-40s %-16s %10s %8s  %s\n", "model", "folder", "size", "files", "used");
    printf("%-40s %-16s %10s %8d  %s\n", m->name, m->hash, cli_bytes((double)m->bytes, size),
           m->n_files, date);
}

int cmd_cache(int argc, char **argv)
{
    const char *dir = NULL, *pos[2] = {NULL, NULL};
    const struct opt opts[] = {
        {OPT_STRING, 0, "cache-dir", 0, &dir, 0, 0, "DIR",
         "the folder (default: ~/.cache/steel/prefixes)"},
    };
    const struct usage u = {
        .command = "cache",
        .synopsis = "list | clear [MODEL]",
        .about =
            "Lists or removes the prefixes that 'steel serve' keeps on disk. MODEL is a name or a\n"
            "folder of the list.",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 1,
        .max_args = 2,
    };
    int n = args_parse(&u, argc, argv, pos), found = 0;
    if (n < 0)
        return cli_args_exit(n);
    bool lists = !strcmp(pos[0], "list") && n == 1, clears = !strcmp(pos[0], "clear");
    if (!lists && !clears)
        return cli_args_exit(args_usage_error(&u, "use list, or clear [MODEL]"));
    struct buf place = {0};
    struct error err = {0};
    uint64_t bytes = 0;
    char size[16];
    if (!dir && keep_folder_place(&place))
        dir = place.p;
    bool ok = dir || error_set(&err, "HOME is not set: use --cache-dir");
    if (ok && lists)
        ok = keep_folder_each(dir, print_one, &found, &err);
    else if (ok)
        ok = keep_folder_clear(dir, pos[1], &bytes, &err);
    if (ok && lists && !found)
        fprintf(stderr, "no prefixes are kept in %s\n", dir);
    else if (ok && clears)
        fprintf(stderr, "removed %s\n", cli_bytes((double)bytes, size));
    buf_clear(&place);
    return ok ? EXIT_OK : cli_fail(&err);
}
