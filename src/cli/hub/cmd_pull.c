/* steel pull: downloads a model from the Hub, or a file from any URL, and verifies it. */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/fetch.h"
#include "cli/hub/hub.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { LIST_MAX = 64 << 20, SPARE_BYTES = 64 << 20, AT_ONCE = 4 };

/* Takes the Hub tools' lock, so that only one program on this machine downloads a file. */
static int lock_file(const char *folder, const char *id, const char *name,
                     const struct fetch_options *opt, struct error *err)
{
    struct buf path = {0};
    const char *slash = strrchr(folder, '/');
    buf_addf(&path, "%.*s/.locks/%s/%s.lock", (int)(slash - folder), folder, slash + 1, id);
    int fd = cli_make_parents(path.p, err) ? open(path.p, O_RDWR | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (fd < 0 && !err->msg[0])
        error_set(err, "%s: %s", path.p, strerror(errno));
    bool waits = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB);
    if (waits && !opt->watch)
        fprintf(stderr, "steel: another program is downloading %s; waiting for it\n", name);
    while (waits && !fetch_stopped(opt) && (waits = flock(fd, LOCK_EX | LOCK_NB) != 0))
        usleep(100000);
    if (waits) {
        error_set(err, "interrupted while another program downloads %s", name);
        close(fd);
        fd = -1;
    }
    buf_clear(&path);
    return fd;
}

static int64_t size_on_disk(const char *path)
{
    struct stat st;
    return stat(path, &st) ? -1 : st.st_size;
}

static bool has_space(const char *folder, int64_t need, struct error *err)
{
    struct statvfs fs;
    char a[16], b[16];
    if (need <= 0 || statvfs(folder, &fs))
        return true; /* unknown, so not an error */
    double left = (double)fs.f_bavail * (double)fs.f_frsize;
    return left >= (double)need + SPARE_BYTES ||
           error_set(err,
                     "%s has %s free, but %s are needed: free space, or set HF_HOME to another "
                     "disk",
                     folder, cli_bytes(left, a), cli_bytes((double)need, b));
}

/* The files still to download. */
struct download_list {
    struct fetch_file *files; /* (n) with owned strings */
    int *locks;               /* (n) */
    int n;
    int64_t bytes; /* bytes to download */
};

static void download_list_clear(struct download_list *h)
{
    for (int i = 0; i < h->n; i++) {
        mem_free((char *)h->files[i].url);
        mem_free((char *)h->files[i].path);
        close(h->locks[i]);
    }
    mem_free(h->files);
    mem_free(h->locks);
}

static void add_escaped(struct buf *b, const char *path)
{
    for (; *path; path++)
        if ((*path | 32) >= 'a' && (*path | 32) <= 'z')
            buf_addc(b, *path);
        else if ((*path >= '0' && *path <= '9') || strchr("-_./~", *path))
            buf_addc(b, *path);
        else
            buf_addf(b, "%%%02X", (unsigned char)*path);
}

void hub_file_url(const struct hub_name *name, const struct hub_repo *r, const struct hub_file *f,
                  struct buf *out)
{
    buf_addf(out, "%s/%s/resolve/%s/", hub_endpoint(), name->repo, r->sha);
    add_escaped(out, f->path);
}

static bool download_list_add(struct download_list *h, const struct hub_name *name,
                              const struct hub_repo *r, const struct hub_file *f,
                              const char *folder, const struct fetch_options *opt,
                              struct error *err)
{
    struct buf blob = {0}, url = {0}, partial = {0};
    for (int i = 0; i < h->n; i++)
        if (!strcmp(h->files[i].hex, f->id))
            return true; /* two files with the same content share a blob */
    buf_addf(&blob, "%s/blobs/%s", folder, f->id);
    if (size_on_disk(blob.p) == f->size) {
        buf_clear(&blob);
        return true;
    }
    int lock = cli_make_parents(blob.p, err) ? lock_file(folder, f->id, f->path, opt, err) : -1;
    if (lock < 0 ||
        size_on_disk(blob.p) == f->size) { /* another program has downloaded it meanwhile */
        if (lock >= 0)
            close(lock);
        buf_clear(&blob);
        return lock >= 0;
    }
    hub_file_url(name, r, f, &url);
    buf_addf(&partial, "%s.incomplete", blob.p);
    int64_t have = size_on_disk(partial.p);
    if (__builtin_add_overflow(h->bytes, f->size - (have > 0 && have <= f->size ? have : 0),
                               &h->bytes)) {
        close(lock);
        buf_clear(&blob);
        buf_clear(&url);
        buf_clear(&partial);
        return error_set(err, "%s: the sizes of its files are too large", name->repo);
    }
    h->locks[h->n] = lock;
    h->files[h->n++] = (struct fetch_file){.url = buf_take(&url),
                                           .path = buf_take(&blob),
                                           .name = f->path,
                                           .size = f->size,
                                           .digest = f->large ? FETCH_SHA256 : FETCH_GIT_BLOB,
                                           .hex = f->id};
    buf_clear(&partial);
    return true;
}

/* snapshots/SHA/PATH -> ../../blobs/ID */
static bool link_file(const struct hub_repo *r, const struct hub_file *f, const char *folder,
                      struct error *err)
{
    struct buf link = {0}, to = {0}, fresh = {0};
    buf_addf(&link, "%s/snapshots/%s/%s", folder, r->sha, f->path);
    for (const char *c = f->path; (c = strchr(c, '/')); c++)
        buf_adds(&to, "../");
    buf_addf(&to, "../../blobs/%s", f->id);
    buf_addf(&fresh, "%s.%ld", link.p,
             (long)getpid()); /* other programs may do the same concurrently */
    bool ok = cli_make_parents(link.p, err);
    if (ok && (symlink(to.p, fresh.p) || rename(fresh.p, link.p))) {
        error_set(err, "%s: %s", link.p, strerror(errno));
        unlink(fresh.p);
        ok = false;
    }
    buf_clear(&fresh);
    buf_clear(&link);
    buf_clear(&to);
    return ok;
}

static bool write_ref(const struct hub_name *name, const struct hub_repo *r, const char *folder,
                      struct error *err)
{
    struct buf path = {0};
    if (!strcmp(name->revision, r->sha))
        return true;
    buf_addf(&path, "%s/refs/%s", folder, name->revision);
    bool ok = cli_make_parents(path.p, err);
    FILE *f = ok ? fopen(path.p, "w") : NULL;
    bool written = f && fputs(r->sha, f) >= 0;
    if (f)
        written = fclose(f) == 0 && written;
    if (ok && !written)
        ok = error_set(err, "%s: %s", path.p, strerror(errno));
    buf_clear(&path);
    return ok;
}

static bool fetch_wanted(const struct hub_name *name, const struct hub_repo *r, const bool *wanted,
                         const char *folder, const struct fetch_options *opt, struct error *err)
{
    struct download_list h = {.files = mem_zalloc((size_t)r->n, sizeof *h.files),
                              .locks = mem_zalloc((size_t)r->n, sizeof *h.locks)};
    bool ok = true;
    char a[16];
    for (int i = 0; ok && i < r->n; i++)
        if (wanted[i])
            ok = download_list_add(&h, name, r, &r->files[i], folder, opt, err);
    ok = ok && has_space(folder, h.bytes, err);
    if (ok && h.n) {
        if (!opt->watch)
            fprintf(stderr, "pulling %s%s%s: %d file%s, %s\n", name->repo,
                    name->quant[0] ? ":" : "", name->quant, h.n, h.n == 1 ? "" : "s",
                    cli_bytes((double)h.bytes, a));
        ok = fetch_files(h.files, h.n, opt, err);
    }
    download_list_clear(&h);
    for (int i = 0; ok && i < r->n; i++)
        if (wanted[i])
            ok = link_file(r, &r->files[i], folder, err);
    return ok && write_ref(name, r, folder, err);
}

bool hub_read_list(const struct hub_name *name, const struct fetch_options *opt,
                   struct hub_repo *out, struct error *err)
{
    struct buf url = {0}, text = {0};
    long status;
    buf_addf(&url, "%s/api/models/%s/revision/", hub_endpoint(), name->repo);
    for (const char *c = name->revision; *c; c++)
        *c == '/' ? buf_adds(&url, "%2F") : buf_addc(&url, *c);
    buf_adds(&url, "?blobs=true");
    bool ok = fetch_text(url.p, opt, LIST_MAX, &text, &status, err);
    if (ok && status != 200)
        ok = error_set(err, "%s: HTTP %ld: %s", name->repo, status, fetch_explain(status));
    ok = ok && hub_repo_read(text.p ? text.p : "", text.len, out, err);
    buf_clear(&url);
    buf_clear(&text);
    return ok;
}

bool hub_describe(const struct hub_name *asked, struct buf *out, struct error *err)
{
    struct hub_name name = *asked;
    struct hub_repo r = {0};
    struct buf token = {0};
    struct error why = {0};
    struct fetch_options opt = {.once = true};
    const char *offline = getenv("HF_HUB_OFFLINE");
    int first = -1, n = 0;
    double bytes = 0;
    char size[16];
    if (offline && *offline && strcmp(offline, "0") != 0)
        return error_set(err, "HF_HUB_OFFLINE is set");
    if (hub_token(&token))
        opt.token = token.p;
    bool ok = hub_read_list(&name, &opt, &r, err);
    bool *wanted = mem_zalloc((size_t)r.n + 1, sizeof *wanted);
    if (ok && !hub_choose(r.files, r.n, name.quant, wanted, &first, &why))
        ok = error_set(err, "%s: %s", name.repo, why.msg);
    for (int i = 0; ok && i < r.n; i++)
        if (wanted[i]) {
            n++;
            bytes += (double)r.files[i].size;
        }
    cli_bytes(bytes, size);
    if (ok && n == 1 && first >= 0)
        buf_addf(out, "%s, %s", r.files[first].path, size);
    else if (ok)
        buf_addf(out, "%d files, %s", n, size);
    mem_free(wanted);
    hub_repo_clear(&r);
    buf_clear(&token);
    return ok;
}

bool hub_pull(const struct hub_name *asked, bool quiet, struct pull_watch *watch, struct buf *out,
              struct error *err)
{
    struct hub_name name = *asked;
    struct hub_repo r = {0};
    struct buf folder = {0}, token = {0};
    struct error why = {0};
    struct fetch_options opt = {.at_once = AT_ONCE, .quiet = quiet, .watch = watch};
    int first = -1;
    if (!watch)
        cli_catch_interrupt();
    if (hub_token(&token))
        opt.token = token.p;
    struct fetch_options list = opt;
    list.once = watch != NULL;
    bool ok = hub_repo_folder(name.repo, &folder, err) && hub_read_list(&name, &list, &r, err);
    bool *wanted = mem_zalloc((size_t)r.n + 1, sizeof *wanted);
    if (ok && !hub_choose(r.files, r.n, name.quant, wanted, &first, &why))
        ok = error_set(err, "%s: %s", name.repo, why.msg);
    ok = ok && fetch_wanted(&name, &r, wanted, folder.p, &opt, err);
    if (ok) {
        buf_addf(out, "%s/snapshots/%s", folder.p, r.sha);
        if (first >= 0)
            buf_addf(out, "/%s", r.files[first].path);
    }
    mem_free(wanted);
    hub_repo_clear(&r);
    buf_clear(&folder);
    buf_clear(&token);
    return ok;
}

bool hub_pull_watched(const char *text, struct pull_watch *w, struct error *err)
{
    struct hub_name name;
    struct buf path = {0};
    bool ok = hub_parse(text, &name, err) && hub_pull(&name, true, w, &path, err);
    buf_clear(&path);
    return ok;
}

bool hub_prepare(struct error *err)
{
    return fetch_prepare(err);
}

/* Downloads a file from any other server into the current folder. */
static bool pull_url(const char *url, bool quiet, struct buf *out, struct error *err)
{
    const char *from = strrchr(url, '/') + 1;
    size_t n = strcspn(from, "?#");
    if (!n || *from == '.' || n > 200)
        return error_set(err, "%s does not name a file", url);
    buf_addf(out, "%.*s", (int)n, from);
    struct stat st;
    if (lstat(out->p, &st) == 0)
        return error_set(err, "%s exists already", out->p);
    struct fetch_file file = {.url = url, .path = out->p, .name = out->p, .size = -1};
    struct fetch_options opt = {.at_once = 1, .quiet = quiet};
    cli_catch_interrupt();
    return fetch_files(&file, 1, &opt, err);
}

static void print_shorts(void)
{
    const char *name, *full;
    for (int i = 0; (full = hub_short(i, &name)); i++)
        printf("%-14s %s\n", name, full);
}

int cmd_pull(int argc, char **argv)
{
    bool quiet = false, names = false;
    const struct opt opts[] = {
        {OPT_FLAG, 'q', "quiet", 0, &quiet, 0, 0, 0, "print no progress"},
        {OPT_FLAG, 0, "names", 0, &names, 0, 0, 0, "list the short names"},
    };
    const struct usage u = {
        .command = "pull",
        .synopsis = "NAME | URL",
        .about =
            "Downloads a model and prints its path. NAME is owner/name[@revision][:quant] on the\n"
            "Hub, a short name (--names), or hf://NAME. Without a quant, Q4_K_M or the next best\n"
            "is taken, or the safetensors folder. Files go to the cache shared with other tools\n"
            "(HF_HOME, HF_HUB_CACHE). Interrupted downloads resume, and files are verified. Set\n"
            "HF_TOKEN for gated models and HF_ENDPOINT for another Hub. A file at any other URL\n"
            "goes to the current folder; it is not verified, and its download resumes only if\n"
            "the server's ETag or date says that the file is still the same.",
        .examples = "  steel pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M\n"
                    "  steel run Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (names) {
        print_shorts();
        return EXIT_OK;
    }
    if (n == 0)
        return cli_args_exit(args_usage_error(&u, "name a model"));
    struct error err = {0};
    struct buf path = {0};
    struct hub_name name;
    bool url = !strncmp(pos[0], "http://", 7) || !strncmp(pos[0], "https://", 8);
    bool ok = url && !hub_is_name(pos[0])
                  ? pull_url(pos[0], quiet, &path, &err)
                  : hub_parse(pos[0], &name, &err) && hub_pull(&name, quiet, NULL, &path, &err);
    if (ok)
        puts(path.p);
    else
        cli_fail(&err);
    buf_clear(&path);
    return ok ? EXIT_OK : cli_interrupted() ? EXIT_INTERRUPTED : EXIT_FAIL;
}
