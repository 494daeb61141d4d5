/*
 * The heads of a model on the Hub: see hub.h. A head's length is not known before it is read, so the first megabytes are
 * fetched, and more of them until the file opens and its tensors begin where bytes were fetched. The rest is a hole.
 */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/fetch.h"
#include "cli/hub/hub.h"
#include "file/tensorfile.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t FIRST_BYTES = 4 << 20, MOST_BYTES = 256 << 20, JSON_MOST = 64 << 20;

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end);
}

/* Whether a plan reads this file: weights, and JSON that is not a vocabulary. */
static bool is_read(const struct hub_file *f)
{
    return ends_with(f->path, ".gguf") || ends_with(f->path, ".safetensors") ||
           (ends_with(f->path, ".json") && !strstr(f->path, "tokenizer") &&
            !strstr(f->path, "vocab"));
}

/* Writes the head of a file and a hole for the rest. */
static bool write_head(const char *path, const struct hub_file *f, const struct buf *head,
                       struct error *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && !ftruncate(fd, (off_t)f->size);
    for (size_t done = 0; ok && done < head->len;) {
        ssize_t n = write(fd, head->p + done, head->len - done);
        ok = n > 0;
        done += n > 0 ? (size_t)n : 0;
    }
    if (!ok)
        error_set(err, "%s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return ok;
}

static bool make_folders(const char *folder, const char *path, struct error *err)
{
    struct buf b = {0};
    bool ok = true;
    for (const char *c = path; ok && (c = strchr(c, '/')); c++) {
        buf_reset(&b);
        buf_addf(&b, "%s/%.*s", folder, (int)(c - path), path);
        ok = !mkdir(b.p, 0700) || errno == EEXIST || error_set(err, "%s: %s", b.p, strerror(errno));
    }
    buf_clear(&b);
    return ok;
}

struct hub_head_files {
    const struct hub_name *name;
    const struct hub_repo *repo;
    const struct fetch_options *opt;
    const char *folder;
    struct error *err;
};

static bool fetch_one(const struct hub_head_files *h, const struct hub_file *f, size_t bytes)
{
    struct buf url = {0}, head = {0}, path = {0};
    long status;
    bool json = ends_with(f->path, ".json");
    hub_file_url(h->name, h->repo, f, &url);
    buf_addf(&path, "%s/%s", h->folder, f->path);
    bool ok = !json || (f->size >= 0 && (uint64_t)f->size <= JSON_MOST) ||
              error_set(h->err, "%s: larger than %zu MB", f->path, JSON_MOST >> 20);
    if (json || (f->size >= 0 && (uint64_t)f->size < bytes))
        bytes = f->size > 0 ? (size_t)f->size : 1;
    ok = ok && fetch_head(url.p, h->opt, bytes, &head, &status, h->err);
    if (ok && status != 200 && status != 206)
        ok = error_set(h->err, "%s: %s: HTTP %ld: %s", h->name->repo, f->path, status,
                       fetch_explain(status));
    ok = ok && make_folders(h->folder, f->path, h->err) && write_head(path.p, f, &head, h->err);
    buf_clear(&url);
    buf_clear(&head);
    buf_clear(&path);
    return ok;
}

/* Whether the files open, and what was read of them was fetched. */
static bool opens(const char *path, size_t bytes, struct error *err)
{
    struct tensorfile *f = tensorfile_open(path, err);
    bool ok = f != NULL;
    for (int i = 0; ok && i < f->n_shards; i++) {
        const struct shard *s = &f->shards[i];
        const uint8_t *begin = s->map + s->bytes; /* of the shard's first tensor */
        for (size_t k = 0; k < f->n_tensors; k++)
            if (f->tensors[k].shard == i && f->tensors[k].data < begin)
                begin = f->tensors[k].data;
        ok = (size_t)(begin - s->map) <= bytes || s->bytes <= bytes;
    }
    tensorfile_close(f);
    if (!ok && !err->msg[0])
        error_set(err, "its head is longer than %zu MB", bytes >> 20);
    return ok;
}

bool hub_heads(const struct hub_name *asked, struct buf *folder, struct buf *out, struct error *err)
{
    struct hub_name name = *asked;
    struct hub_repo r = {0};
    struct buf token = {0};
    struct error why = {0};
    struct fetch_options opt = {.quiet = true};
    const char *offline = getenv("HF_HUB_OFFLINE"), *tmp = getenv("TMPDIR");
    int first = -1;
    if (offline && *offline && strcmp(offline, "0") != 0)
        return error_set(err, "%s is not on this machine, and HF_HUB_OFFLINE is set", name.repo);
    cli_catch_interrupt();
    if (hub_token(&token))
        opt.token = token.p;
    bool ok = hub_read_list(&name, &opt, &r, err);
    bool *wanted = mem_zalloc((size_t)r.n + 1, sizeof *wanted);
    if (ok && !hub_choose(r.files, r.n, name.quant, wanted, &first, &why))
        ok = error_set(err, "%s: %s", name.repo, why.msg);
    if (ok) {
        buf_addf(folder, "%s/steel-plan-XXXXXX", tmp && tmp[0] == '/' ? tmp : "/tmp");
        if (!mkdtemp(folder->p)) {
            ok = error_set(err, "%s: %s", folder->p, strerror(errno));
            buf_reset(folder);
        }
    }
    if (ok) {
        buf_adds(out, folder->p);
        if (first >= 0)
            buf_addf(out, "/%s", r.files[first].path);
    }
    struct hub_head_files h = {&name, &r, &opt, folder->p, err};
    bool whole = false;
    for (size_t bytes = FIRST_BYTES; ok && !whole; bytes *= 4) {
        for (int i = 0; ok && i < r.n; i++)
            if (wanted[i] && is_read(&r.files[i]))
                ok = fetch_one(&h, &r.files[i], bytes);
        why = (struct error){0};
        whole = ok && opens(out->p, bytes, &why);
        if (ok && !whole && bytes * 4 > MOST_BYTES)
            ok = error_set(err, "%s: %s", name.repo, why.msg);
    }
    mem_free(wanted);
    hub_repo_clear(&r);
    buf_clear(&token);
    return ok;
}

static void remove_folder(struct buf *path, int depth)
{
    size_t mark = path->len;
    DIR *d = depth < 8 ? opendir(path->p) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        buf_addf(path, "/%s", e->d_name);
        if (unlink(path->p))
            remove_folder(path, depth + 1);
        path->len = mark;
        path->p[mark] = 0;
    }
    if (d)
        closedir(d);
    rmdir(path->p);
}

void hub_heads_remove(struct buf *folder)
{
    if (folder->len)
        remove_folder(folder, 0);
    buf_clear(folder);
}
