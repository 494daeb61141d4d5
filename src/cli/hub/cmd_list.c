/* steel list and steel rm: models in the cache shared with other tools. */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void print_one(void *arg, const struct hub_found *f)
{
    int *n = arg;
    struct buf name = {0};
    char size[16], date[32] = "";
    struct tm tm;
    time_t t = (time_t)f->changed;
    buf_addf(&name, "%s%s%s", f->repo, f->quant[0] ? ":" : "", f->quant);
    strftime(date, sizeof date, "%Y-%m-%d", localtime_r(&t, &tm));
    if (!(*n)++)
        printf("%-52s %10s  %s\n", "name", "size", "pulled");
    printf("%-52s %10s  %s%s\n", name.p, cli_bytes((double)f->bytes, size), date,
           f->whole ? "" : "  incomplete: pull it again");
    buf_clear(&name);
}

int cmd_list(int argc, char **argv)
{
    const struct usage u = {
        .command = "list",
        .synopsis = "",
        .about = "Lists the models in the cache (HF_HUB_CACHE, HF_HOME), whichever tool downloaded "
                 "them.",
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos), found = 0;
    if (n < 0)
        return cli_args_exit(n);
    struct error err = {0};
    if (!hub_each(print_one, &found, &err))
        return cli_fail(&err);
    if (!found)
        fprintf(stderr, "no models yet; 'steel pull --names' lists some to start with\n");
    return EXIT_OK;
}

/* rm */

struct removal {
    const struct hub_name *name;
    struct buf blobs; /* their paths, one per line */
    int n_gone, n_left;
    struct error err;
};

static void remove_links(void *arg, const struct hub_found *f)
{
    struct removal *r = arg;
    if (strcmp(f->repo, r->name->repo) != 0)
        return;
    if (r->name->quant[0] && strcasecmp(f->quant, r->name->quant) != 0) {
        r->n_left++;
        return;
    }
    for (int i = 0; i < f->n; i++) {
        struct buf path = {0};
        char real[PATH_MAX];
        buf_addf(&path, "%s/%s", f->snapshot, f->files[i]);
        if (realpath(path.p, real) && strstr(real, "/blobs/"))
            buf_addf(&r->blobs, "%s\n", real);
        if (unlink(path.p) && !r->err.msg[0])
            error_set(&r->err, "%s: %s", path.p, strerror(errno));
        buf_clear(&path);
    }
    r->n_gone++;
}

/* Removes blobs that another snapshot still uses from the list. */
static void keep_used(void *arg, const struct hub_found *f)
{
    struct removal *r = arg;
    if (strcmp(f->repo, r->name->repo) != 0)
        return;
    for (int i = 0; i < f->n; i++) {
        struct buf path = {0};
        char real[PATH_MAX + 1];
        buf_addf(&path, "%s/%s", f->snapshot, f->files[i]);
        if (realpath(path.p, real)) {
            strcat(real, "\n");
            char *at = r->blobs.p ? strstr(r->blobs.p, real) : NULL;
            if (at)
                *at = '#';
        }
        buf_clear(&path);
    }
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    return remove(path);
}

/* Removes one quantisation, or the whole model if none is named, and blobs that nothing uses any
 * more. */
static bool remove_model(const struct hub_name *name, struct error *err)
{
    struct removal r = {.name = name};
    struct buf folder = {0};
    struct stat st;
    bool ok = hub_repo_folder(name->repo, &folder, err);
    if (ok && (stat(folder.p, &st) || !S_ISDIR(st.st_mode)))
        ok = error_set(err, "%s is not in the cache", name->repo);
    ok = ok && hub_each(remove_links, &r, err);
    if (ok && name->quant[0] && !r.n_gone)
        ok = error_set(err, "the cache has no %s of %s", name->quant, name->repo);
    if (ok && r.err.msg[0])
        ok = error_set(err, "%s", r.err.msg);
    ok = ok && hub_each(keep_used, &r, err);
    for (char *line = r.blobs.p, *end; ok && line && (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (*line != '#' && unlink(line) && errno != ENOENT)
            ok = error_set(err, "%s: %s", line, strerror(errno));
    }
    /* Nothing is left: remove the folder. */
    if (ok && !r.n_left && nftw(folder.p, remove_entry, 16, FTW_DEPTH | FTW_PHYS))
        ok = error_set(err, "%s: %s", folder.p, strerror(errno));
    buf_clear(&folder);
    buf_clear(&r.blobs);
    return ok;
}

int cmd_rm(int argc, char **argv)
{
    const struct usage u = {
        .command = "rm",
        .synopsis = "NAME",
        .about = "Removes a model from the cache: owner/name:quant, or owner/name with all its\n"
                 "quantisations. The cache is shared: other tools lose the model, too.",
        .min_args = 1,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    struct error err = {0};
    struct hub_name name;
    if (!hub_parse(pos[0], &name, &err) || !remove_model(&name, &err))
        return cli_fail(&err);
    fprintf(stderr, "removed %s%s%s\n", name.repo, name.quant[0] ? ":" : "", name.quant);
    return EXIT_OK;
}
