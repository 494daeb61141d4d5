/* steel list and steel rm: models in the cache shared with other tools. */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"

#include <errno.h>
#include <fts.h>
#include <ftw.h>
#include <limits.h>
#include <stdint.h>
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

/* Files are removed by their names within the cache's folder of the model. Links there are never
 * followed out of it. */
struct removal {
    const struct hub_name *name;
    const char *folder;  /* models--owner--name */
    char sha[72];        /* of the revision that the name gives; "" = all */
    char home[PATH_MAX]; /* the real path of FOLDER/snapshots */
    struct buf blobs;    /* names in FOLDER/blobs that the removed links led to, one per line */
    int n_gone, n_left, n_here; /* models removed, left, and left in snapshot `sha` */
    struct error err;
};

/* The name of the blob that a link leads to; NULL if it leads to something else. */
static const char *blob_of(const struct removal *r, const char *link, char to[PATH_MAX])
{
    struct buf blob = {0};
    struct stat a, b;
    ssize_t n = readlink(link, to, PATH_MAX - 1);
    to[n > 0 ? n : 0] = 0;
    const char *slash = strrchr(to, '/');
    buf_addf(&blob, "%s/blobs/%s", r->folder, slash ? slash + 1 : "");
    bool same = slash && slash[1] && !stat(link, &a) && !stat(blob.p, &b) && a.st_dev == b.st_dev &&
                a.st_ino == b.st_ino && S_ISREG(a.st_mode);
    buf_clear(&blob);
    return same ? slash + 1 : NULL;
}

static void note_blob(struct removal *r, const char *link)
{
    char to[PATH_MAX];
    const char *blob = blob_of(r, link, to);
    if (blob)
        buf_addf(&r->blobs, "%s\n", blob);
}

/* Takes a blob that a remaining link uses off the list. */
static void keep_blob(struct removal *r, const char *link)
{
    char to[PATH_MAX], line[PATH_MAX + 1];
    const char *blob = blob_of(r, link, to);
    snprintf(line, sizeof line, "%s\n", blob ? blob : "");
    for (char *at = blob ? r->blobs.p : NULL; at && (at = strstr(at, line));)
        *at = '#';
}

static void remove_ref(struct removal *r, const char *path)
{
    struct buf text = {0};
    struct error ignored = {0};
    bool same = cli_read_file(path, 4096, &text, &ignored) && text.len >= strlen(r->sha) &&
                !strncmp(text.p, r->sha, strlen(r->sha));
    if (same && unlink(path) && !r->err.msg[0])
        error_set(&r->err, "%s: %s", path, strerror(errno));
    buf_clear(&text);
}

/* Calls fn for every file (or every link) below a folder. Does not enter links to folders. */
static void each_below(const char *root, bool links, struct removal *r,
                       void (*fn)(struct removal *r, const char *path))
{
    char *roots[] = {(char *)(uintptr_t)root, NULL};
    FTS *t = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    for (FTSENT *e; t && (e = fts_read(t));)
        if (links ? e->fts_info == FTS_SL || e->fts_info == FTS_SLNONE : e->fts_info == FTS_F)
            fn(r, e->fts_path);
    if (t)
        fts_close(t);
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    return remove(path);
}

static bool remove_tree(const char *path, struct error *err)
{
    return !nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) ||
           error_set(err, "%s: %s", path, strerror(errno));
}

/* True if the folder of a file, with all links resolved, is inside the model's snapshots. */
static bool is_inside(const struct removal *r, const char *path)
{
    char *folder = mem_strdup(path), real[PATH_MAX];
    *strrchr(folder, '/') = 0;
    size_t n = strlen(r->home);
    bool inside = realpath(folder, real) && !strncmp(real, r->home, n) && real[n] == '/';
    mem_free(folder);
    return inside;
}

/* Removes the links of one quantisation. */
static void remove_links(void *arg, const struct hub_found *f)
{
    struct removal *r = arg;
    if (strcmp(f->repo, r->name->repo) != 0)
        return;
    bool here = r->sha[0] && !strcmp(strrchr(f->snapshot, '/') + 1, r->sha);
    if ((r->sha[0] && !here) || strcasecmp(f->quant, r->name->quant) != 0) {
        r->n_left++;
        r->n_here += here;
        return;
    }
    for (int i = 0; i < f->n; i++) {
        struct buf path = {0};
        buf_addf(&path, "%s/%s", f->snapshot, f->files[i]);
        note_blob(r, path.p);
        if (!is_inside(r, path.p))
            error_set(&r->err, "%s is behind a link that leaves the cache", path.p);
        else if (unlink(path.p) && !r->err.msg[0])
            error_set(&r->err, "%s: %s", path.p, strerror(errno));
        buf_clear(&path);
    }
    r->n_gone++;
}

/* Removes blobs that no remaining link uses. */
static bool remove_blobs(struct removal *r, struct error *err)
{
    struct buf path = {0};
    bool ok = true;
    buf_addf(&path, "%s/snapshots", r->folder);
    each_below(path.p, true, r, keep_blob);
    for (char *line = r->blobs.p, *end; ok && line && (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        buf_reset(&path);
        buf_addf(&path, "%s/blobs/%s", r->folder, line);
        if (*line != '#' && unlink(path.p) && errno != ENOENT)
            ok = error_set(err, "%s: %s", path.p, strerror(errno));
    }
    buf_clear(&path);
    return ok;
}

/* Removes a snapshot and the refs that name it. */
static bool remove_snapshot(struct removal *r, struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/snapshots/%s", r->folder, r->sha);
    each_below(path.p, true, r, note_blob);
    bool ok = remove_tree(path.p, err);
    buf_reset(&path);
    buf_addf(&path, "%s/refs", r->folder);
    if (ok)
        each_below(path.p, false, r, remove_ref);
    buf_clear(&path);
    return ok;
}

/* Removes a quantisation, a revision (@REV), or both. Other revisions stay. */
static bool remove_part(struct removal *r, struct error *err)
{
    struct buf path = {0};
    struct stat st;
    bool ok = true;
    buf_addf(&path, "%s/snapshots", r->folder);
    if (!realpath(path.p, r->home))
        r->home[0] = 0;
    if (r->name->has_revision) {
        hub_snapshot(r->name, r->folder, r->sha);
        buf_addf(&path, "/%s", r->sha);
        if (!r->sha[0] || lstat(path.p, &st))
            ok = error_set(err, "the cache has no revision %s of %s", r->name->revision,
                           r->name->repo);
    }
    if (ok && r->name->quant[0]) {
        ok = hub_each(remove_links, r, err);
        if (ok && !r->n_gone)
            ok = error_set(err, "the cache has no %s of %s", r->name->quant, r->name->repo);
    }
    if (ok && r->sha[0] && !r->n_here && !r->err.msg[0])
        ok = remove_snapshot(r, err);
    if (ok && r->err.msg[0])
        ok = error_set(err, "%s", r->err.msg);
    ok = ok && remove_blobs(r, err);
    buf_reset(&path);
    buf_addf(&path, "%s/snapshots", r->folder);
    /* Nothing is left: remove the folder. */
    if (ok && (r->sha[0] ? !rmdir(path.p) : !r->n_left))
        ok = remove_tree(r->folder, err);
    buf_clear(&path);
    return ok;
}

static bool remove_model(const struct hub_name *name, struct error *err)
{
    struct removal r = {.name = name};
    struct buf folder = {0};
    struct stat st;
    bool ok = hub_repo_folder(name->repo, &folder, err);
    r.folder = folder.p;
    if (ok && (stat(folder.p, &st) || !S_ISDIR(st.st_mode)))
        ok = error_set(err, "%s is not in the cache", name->repo);
    if (ok)
        ok = name->quant[0] || name->has_revision ? remove_part(&r, err)
                                                  : remove_tree(folder.p, err);
    buf_clear(&folder);
    buf_clear(&r.blobs);
    return ok;
}

bool hub_remove(const char *text, struct error *err)
{
    struct hub_name name;
    return hub_parse(text, &name, err) && remove_model(&name, err);
}

int cmd_rm(int argc, char **argv)
{
    const struct usage u = {
        .command = "rm",
        .synopsis = "NAME",
        .about = "Removes a model from the cache: owner/name:quant, or owner/name with all its\n"
                 "quantisations. owner/name@revision removes that revision only. The cache is\n"
                 "shared: other tools lose the model, too.",
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
    fprintf(stderr, "removed %s%s%s%s%s\n", name.repo, name.has_revision ? "@" : "",
            name.has_revision ? name.revision : "", name.quant[0] ? ":" : "", name.quant);
    return EXIT_OK;
}
