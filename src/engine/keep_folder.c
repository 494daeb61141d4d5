/* See keep_folder.h. */
#include "engine/keep_folder.h"
#include "base/mem.h"
#include "base/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { NAME_HEX = 32 };

uint64_t keep_folder_default(const char *dir)
{
    struct statvfs fs;
    char *path = mem_strdup(dir), *slash;
    while (statvfs(path, &fs) && (slash = strrchr(path, '/')) && slash > path)
        *slash = 0; /* the folder may not be there yet */
    uint64_t free = statvfs(path, &fs) ? 0 : (uint64_t)fs.f_bavail * fs.f_frsize;
    mem_free(path);
    return free / 10;
}

bool keep_folder_place(struct buf *out)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (xdg && xdg[0] == '/')
        buf_addf(out, "%s/steel/prefixes", xdg);
    else if (home && home[0] == '/')
        buf_addf(out, "%s/.cache/steel/prefixes", home);
    return out->len > 0;
}

static bool make_dirs(const char *dir, struct error *err)
{
    char *path = mem_strdup(dir);
    bool ok = true;
    for (char *c = path + 1; ok && *c; c++) {
        if (*c != '/')
            continue;
        *c = 0;
        mkdir(path, 0755);
        *c = '/';
    }
    if (mkdir(path, 0700) && errno != EEXIST)
        ok = error_set(err, "%s: %s", dir, strerror(errno));
    mem_free(path);
    return ok;
}

static bool read_key(int at, uint64_t key[4])
{
    struct stat st;
    int fd = openat(at, "key", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    size_t n = 4 * sizeof *key;
    bool ok = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
              read(fd, key, n) == (ssize_t)n;
    if (fd >= 0)
        close(fd);
    return ok;
}

/* Writes a key under another name and links it, so that of two processes one wins. */
static bool make_key(int at)
{
    uint64_t key[4];
    char name[40];
    snprintf(name, sizeof name, ".key.%ld", (long)getpid());
    int fd = openat(at, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool ok =
        fd >= 0 && os_random(key, sizeof key) && write(fd, key, sizeof key) == (ssize_t)sizeof key;
    if (fd >= 0)
        close(fd);
    ok = ok && (!linkat(at, name, at, "key", 0) || errno == EEXIST);
    unlinkat(at, name, 0);
    return ok;
}

bool keep_folder_open(const char *dir, uint64_t key[4], struct error *err)
{
    if (!make_dirs(dir, err))
        return false;
    int at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (at < 0)
        return error_set(err, "%s: %s", dir, strerror(errno));
    bool ok = read_key(at, key);
    if (!ok) {
        struct stat st;
        if (!fstatat(at, "key", &st, AT_SYMLINK_NOFOLLOW) && st.st_size != 4 * sizeof *key)
            unlinkat(at, "key", 0); /* half-written by something else: all files become foreign */
        ok = make_key(at) && read_key(at, key);
    }
    close(at);
    return ok || error_set(err, "%s/key: cannot be read or made", dir);
}

bool keep_folder_model(const char *dir, const char *hash, const char *name, struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/%s", dir, hash);
    bool ok = (!mkdir(path.p, 0700) || errno == EEXIST) ||
              error_set(err, "%s: %s", path.p, strerror(errno));
    buf_adds(&path, "/model");
    int fd = ok ? open(path.p, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        ssize_t n = write(fd, name, strlen(name));
        (void)n; /* only shown */
        close(fd);
    }
    buf_clear(&path);
    return ok;
}

/* Segments */

static bool is_hex(const char *s, size_t n)
{
    return strspn(s, "0123456789abcdef") >= n;
}

static bool is_segment(const char *name)
{
    size_t n = strlen(name);
    bool temporary = name[0] == '.' && n == NAME_HEX + 7 && is_hex(name + 1, NAME_HEX);
    return temporary || (n == NAME_HEX + 2 && is_hex(name, NAME_HEX) && name[NAME_HEX] == '.' &&
                         strchr("ks", name[NAME_HEX + 1]));
}

struct kept_segment {
    char folder[17], name[NAME_HEX + 8];
    uint64_t bytes;
    struct timespec used;
};

struct segments {
    struct kept_segment *v; /* (n) */
    size_t n, cap;
    uint64_t bytes;
};

static void add_folder(struct segments *all, int at, const char *folder)
{
    int fd = openat(at, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (fd >= 0 && !d)
        close(fd);
    for (const struct dirent *f; d && (f = readdir(d));) {
        struct stat st;
        if (!is_segment(f->d_name) || fstatat(dirfd(d), f->d_name, &st, AT_SYMLINK_NOFOLLOW) ||
            !S_ISREG(st.st_mode))
            continue;
        if (all->n == all->cap) {
            all->cap = all->cap ? 2 * all->cap : 256;
            all->v = mem_realloc(all->v, all->cap, sizeof *all->v);
        }
        struct kept_segment *s = &all->v[all->n++];
        *s = (struct kept_segment){.bytes = (uint64_t)st.st_size, .used = os_file_time(&st)};
        snprintf(s->folder, sizeof s->folder, "%s", folder);
        snprintf(s->name, sizeof s->name, "%.*s", (int)sizeof s->name - 1, f->d_name);
        all->bytes += s->bytes;
    }
    if (d)
        closedir(d);
}

/* Calls fn for each model's folder. */
static bool each_folder(const char *dir, void (*fn)(void *arg, int at, const char *name), void *arg,
                        struct error *err)
{
    int at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = at >= 0 ? fdopendir(at) : NULL;
    if (!d)
        return error_set(err, "%s: %s", dir, strerror(errno));
    for (const struct dirent *f; (f = readdir(d));)
        if (strlen(f->d_name) == 16 && is_hex(f->d_name, 16))
            fn(arg, dirfd(d), f->d_name);
    closedir(d);
    return true;
}

static void gather(void *arg, int at, const char *name)
{
    add_folder(arg, at, name);
}

static int by_age(const void *a, const void *b)
{
    const struct timespec *x = &((const struct kept_segment *)a)->used,
                          *y = &((const struct kept_segment *)b)->used;
    if (x->tv_sec != y->tv_sec)
        return x->tv_sec < y->tv_sec ? -1 : 1;
    return (x->tv_nsec > y->tv_nsec) - (x->tv_nsec < y->tv_nsec);
}

uint64_t keep_folder_trim(const char *dir, uint64_t most)
{
    struct segments all = {0};
    struct error ignored = {0};
    each_folder(dir, gather, &all, &ignored);
    if (all.n)
        qsort(all.v, all.n, sizeof *all.v, by_age);
    for (size_t i = 0; i < all.n && all.bytes > most; i++) {
        struct buf path = {0};
        buf_addf(&path, "%s/%s/%s", dir, all.v[i].folder, all.v[i].name);
        if (!unlink(path.p) || errno == ENOENT)
            all.bytes -= all.v[i].bytes;
        buf_clear(&path);
    }
    mem_free(all.v);
    return all.bytes;
}

struct listing {
    void (*fn)(void *arg, const struct keep_model *m);
    void *arg;
    const char *only;
    uint64_t cleared;
};

static void read_name(int at, const char *folder, char name[256])
{
    char path[32];
    snprintf(path, sizeof path, "%s/model", folder);
    int fd = openat(at, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, name, 255) : 0;
    if (fd >= 0)
        close(fd);
    name[n > 0 ? n : 0] = 0;
    for (char *c = name; *c; c++) /* a terminal shows it */
        if (*c < ' ' || *c > '~')
            *c = '?';
}

static void list_one(void *arg, int at, const char *folder)
{
    struct listing *l = arg;
    struct segments all = {0};
    char name[256];
    read_name(at, folder, name);
    add_folder(&all, at, folder);
    struct keep_model m = {.hash = folder, .name = name, .n_files = (int)all.n, .bytes = all.bytes};
    for (size_t i = 0; i < all.n; i++)
        m.used = all.v[i].used.tv_sec > m.used ? all.v[i].used.tv_sec : m.used;
    l->fn(l->arg, &m);
    mem_free(all.v);
}

bool keep_folder_each(const char *dir, void (*fn)(void *arg, const struct keep_model *m), void *arg,
                      struct error *err)
{
    struct listing l = {.fn = fn, .arg = arg};
    return each_folder(dir, list_one, &l, err);
}

static void clear_one(void *arg, int at, const char *folder)
{
    struct listing *l = arg;
    struct segments all = {0};
    char name[256], path[64];
    read_name(at, folder, name);
    if (l->only && strcmp(l->only, name) != 0 && strcmp(l->only, folder) != 0)
        return;
    add_folder(&all, at, folder);
    for (size_t i = 0; i < all.n; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, all.v[i].name);
        if (!unlinkat(at, path, 0))
            l->cleared += all.v[i].bytes;
    }
    snprintf(path, sizeof path, "%s/model", folder);
    unlinkat(at, path, 0);
    unlinkat(at, folder, AT_REMOVEDIR);
    mem_free(all.v);
}

bool keep_folder_clear(const char *dir, const char *only, uint64_t *bytes, struct error *err)
{
    struct listing l = {.only = only};
    bool ok = each_folder(dir, clear_one, &l, err);
    *bytes = l.cleared;
    return ok;
}
