/* Models in the cache: finding one, iterating over all, and resolving MODEL arguments. */
#include "cli/hub/hub.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/plain.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEEPEST = 4, MOST_FILES = 100000 };

/* Lists the files under a folder as of a repository. Links are followed; dangling links are
 * skipped. */
static void add_files(struct buf *path, size_t root, int depth, struct hub_repo *out)
{
    DIR *d = opendir(path->p);
    size_t mark = path->len;
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        if (e->d_name[0] == '.')
            continue;
        buf_addf(path, "/%s", e->d_name);
        if (stat(path->p, &st) == 0 && S_ISDIR(st.st_mode) && depth < DEEPEST)
            add_files(path, root, depth + 1, out);
        else if (stat(path->p, &st) == 0 && S_ISREG(st.st_mode) && out->n < MOST_FILES) {
            out->files = mem_realloc(out->files, (size_t)out->n + 1, sizeof *out->files);
            out->files[out->n++] =
                (struct hub_file){.path = mem_strdup(path->p + root + 1), .size = st.st_size};
        }
        path->len = mark;
        path->p[mark] = 0;
    }
    if (d)
        closedir(d);
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct hub_file *)a)->path, ((const struct hub_file *)b)->path);
}

static void read_snapshot(const char *folder, struct hub_repo *out)
{
    struct buf path = {0};
    buf_adds(&path, folder);
    *out = (struct hub_repo){0};
    add_files(&path, path.len, 0, out);
    if (out->n)
        qsort(out->files, (size_t)out->n, sizeof *out->files, by_path);
    buf_clear(&path);
}

/* True if all shards are present: of "x-00001-of-00003.safetensors", all three. */
static bool shards_are_whole(const struct hub_repo *r, const bool *wanted)
{
    int have = 0, of = 0;
    for (int i = 0; i < r->n; i++) {
        int k, n, used = 0;
        size_t len = strlen(r->files[i].path);
        if (wanted[i] && len > 27 &&
            sscanf(r->files[i].path + len - 27, "-%5d-of-%5d.safetensors%n", &k, &n, &used) == 2 &&
            used == 27) {
            have++;
            of = n;
        }
    }
    return have == of;
}

void hub_snapshot(const struct hub_name *name, const char *folder, char sha[72])
{
    struct buf ref = {0}, text = {0};
    struct error ignored = {0};
    buf_addf(&ref, "%s/refs/%s", folder, name->revision);
    sha[0] = 0;
    if (access(ref.p, R_OK) == 0 && cli_read_file(ref.p, 4096, &text, &ignored) && text.len)
        snprintf(sha, 72, "%.*s", (int)strcspn(text.p, " \r\n"), text.p);
    else if (strlen(name->revision) == 40)
        snprintf(sha, 72, "%.40s", name->revision);
    if (strspn(sha, "0123456789abcdef") != strlen(sha))
        sha[0] = 0;
    buf_clear(&ref);
    buf_clear(&text);
}

bool hub_find(const struct hub_name *name, struct buf *out, struct error *err)
{
    struct buf folder = {0};
    struct error why = {0};
    char sha[72], quant[64];
    if (!hub_repo_folder(name->repo, &folder, err))
        return false;
    hub_snapshot(name, folder.p, sha);
    buf_addf(&folder, "/snapshots/%s", sha);
    struct hub_repo files = {0};
    int first = -1;
    bool found = false;
    if (sha[0])
        read_snapshot(folder.p, &files);
    if (files.n) {
        bool *wanted = mem_zalloc((size_t)files.n, sizeof *wanted);
        snprintf(quant, sizeof quant, "%s", name->quant);
        found = hub_choose(files.files, files.n, quant, wanted, &first, &why) &&
                (first >= 0 || shards_are_whole(&files, wanted));
        mem_free(wanted);
    }
    if (found) {
        buf_adds(out, folder.p);
        if (first >= 0)
            buf_addf(out, "/%s", files.files[first].path);
    }
    hub_repo_clear(&files);
    buf_clear(&folder);
    return found;
}

/* Pulls a model that is not on this machine, if the user at the terminal agrees. Says which files of
 * which repository that would be, and their size; without a terminal that is the error. */
static bool offer_pull(const char *text, const struct hub_name *name, struct buf *out,
                       struct error *err)
{
    struct buf full = {0}, files = {0};
    struct error why = {0};
    char line[16] = "";
    bool terminal = isatty(STDIN_FILENO) && isatty(STDERR_FILENO), agreed = false;
    hub_print(name, &full);
    bool known = hub_describe(name, &files, &why);
    if (known && terminal) {
        fprintf(stderr, "%s is not on this machine. Pull %s (", text, full.p);
        plain_print(stderr, files.p, files.len); /* the Hub's text */
        fprintf(stderr, ") from %s? [y/N] ", hub_endpoint());
        agreed = fgets(line, sizeof line, stdin) && (line[0] | 32) == 'y';
    }
    bool ok = agreed;
    if (agreed)
        ok = hub_pull(name, false, NULL, out, err);
    else if (known)
        error_set(err,
                  "%s is neither a file nor a cached model; 'steel pull %s' downloads it (%s) "
                  "from %s",
                  text, full.p, files.p, hub_endpoint());
    else
        error_set(err,
                  "%s is neither a file nor a cached model; 'steel pull %s' downloads it, but its "
                  "files cannot be listed: %s",
                  text, full.p, why.msg);
    buf_clear(&full);
    buf_clear(&files);
    return ok;
}

bool hub_open(const char *text, struct buf *out, struct error *err)
{
    struct hub_name name;
    if (!hub_is_name(text))
        return true;
    return hub_parse(text, &name, err) &&
           (hub_find(&name, out, err) || (!err->msg[0] && offer_pull(text, &name, out, err)));
}

bool hub_resolve(const char **model, struct error *err)
{
    static struct buf path; /* kept for the rest of the process */
    buf_reset(&path);
    if (!*model)
        return true;
    if (!hub_open(*model, &path, err))
        return false;
    *model = path.len ? path.p : *model;
    return true;
}

/* Iteration */

static void tell(const struct hub_repo *r, const bool *wanted, struct hub_found *f,
                 void (*fn)(void *arg, const struct hub_found *f), void *arg)
{
    const char **names = mem_zalloc((size_t)r->n, sizeof *names);
    f->n = 0;
    f->bytes = 0;
    f->changed = 0;
    for (int i = 0; i < r->n; i++) {
        struct buf path = {0};
        struct stat st;
        if (!wanted[i])
            continue;
        names[f->n++] = r->files[i].path;
        f->bytes += r->files[i].size;
        buf_addf(&path, "%s/%s", f->snapshot, r->files[i].path);
        if (stat(path.p, &st) == 0 && st.st_mtime > f->changed)
            f->changed = st.st_mtime;
        buf_clear(&path);
    }
    f->files = names;
    fn(arg, f);
    mem_free(names);
}

/* Reports every quantisation of a snapshot, or the folder. */
static void each_of(const char *repo, const char *snapshot,
                    void (*fn)(void *arg, const struct hub_found *f), void *arg)
{
    struct hub_repo r;
    read_snapshot(snapshot, &r);
    bool *wanted = mem_zalloc((size_t)r.n + 1, sizeof *wanted);
    bool *told = mem_zalloc((size_t)r.n + 1, sizeof *told);
    int first = -1;
    char quant[64] = "";
    struct error why = {0};
    struct hub_found f = {.repo = repo, .snapshot = snapshot, .quant = quant};
    bool any = false;
    for (int i = 0; i < r.n; i++) {
        if (told[i] || !hub_quant(r.files[i].path, quant))
            continue;
        any = true;
        f.whole = hub_choose(r.files, r.n, quant, wanted, &first, &why);
        wanted[i] = true;
        for (int k = 0; k < r.n; k++)
            told[k] |= wanted[k];
        tell(&r, wanted, &f, fn, arg);
    }
    quant[0] = 0;
    if (!any && r.n && hub_choose(r.files, r.n, quant, wanted, &first, &why)) {
        f.whole = shards_are_whole(&r, wanted);
        tell(&r, wanted, &f, fn, arg);
    }
    mem_free(wanted);
    mem_free(told);
    hub_repo_clear(&r);
}

bool hub_each(void (*fn)(void *arg, const struct hub_found *f), void *arg, struct error *err)
{
    struct buf cache = {0};
    struct dirent **list = NULL;
    if (!hub_cache(&cache, err))
        return false;
    int n = scandir(cache.p, &list, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char repo[512];
        snprintf(repo, sizeof repo, "%s", list[i]->d_name);
        char *sep = strncmp(repo, "models--", 8) ? NULL : strstr(repo + 8, "--");
        if (sep) {
            struct buf path = {0};
            struct dirent **shots = NULL;
            *sep = '/';
            memmove(sep + 1, sep + 2, strlen(sep + 2) + 1);
            buf_addf(&path, "%s/%s/snapshots", cache.p, list[i]->d_name);
            int m = scandir(path.p, &shots, NULL, alphasort);
            for (int k = 0; k < m; k++) {
                struct buf shot = {0};
                buf_addf(&shot, "%s/%s", path.p, shots[k]->d_name);
                if (shots[k]->d_name[0] != '.')
                    each_of(repo + 8, shot.p, fn, arg);
                buf_clear(&shot);
                free(shots[k]);
            }
            free(shots);
            buf_clear(&path);
        }
        free(list[i]);
    }
    free(list);
    buf_clear(&cache);
    return true;
}
