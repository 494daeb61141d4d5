/* See prefix_file.h. */
#include "engine/prefix_file.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char magic[8] = {'S', 'T', 'E', 'E', 'L', 'P', 'F', 'X'};

struct file_head {
    char magic[8];
    uint32_t version, page_len;
    uint64_t model[2], owner[2];
    uint64_t page_bytes, state_bytes, file_bytes;
    uint64_t n_tokens, n_states;
    uint64_t ids_sum;  /* of ids and places */
    uint64_t head_sum; /* of all before it */
};

bool prefix_name_is_valid(const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(name);
    return n && n < PREFIX_NAME_MOST && name[0] != '.' && strspn(name, allowed) == n;
}

/* Every step is a bijection of its lane, so a single changed word always changes the sum. */
static uint64_t step(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h << 29 | h >> 35;
}

uint64_t prefix_checksum(uint64_t seed, const void *p, size_t n)
{
    const unsigned char *at = p;
    uint64_t lane[4] = {seed, seed + 1, seed + 2, seed + 3}, word[4];
    size_t left = n;
    for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
        memcpy(word, at, sizeof word);
        for (int i = 0; i < 4; i++)
            lane[i] = step(lane[i], word[i]);
    }
    memset(word, 0, sizeof word);
    memcpy(word, at, left);
    uint64_t h = step(seed, n);
    for (int i = 0; i < 4; i++)
        h = step(h, step(lane[i], word[i]));
    return h ^ h >> 31;
}

/* Files */

static bool write_all(int fd, const void *p, size_t n, struct error *err)
{
    const char *at = p;
    while (n) {
        ssize_t k = write(fd, at, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return error_set(err, "cannot write: %s", k ? strerror(errno) : "no room");
        at += k;
        n -= (size_t)k;
    }
    return true;
}

static bool read_all(int fd, void *p, size_t n, uint64_t from, struct error *err)
{
    char *at = p;
    while (n) {
        ssize_t k = pread(fd, at, n, (off_t)from);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return error_set(err, k ? "cannot read: %s" : "the file is cut off%s",
                             k ? strerror(errno) : "");
        at += k;
        from += (uint64_t)k;
        n -= (size_t)k;
    }
    return true;
}

static int open_dir(const char *dir, struct error *err)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        error_set(err, "cannot open the folder: %s", strerror(errno));
    return fd;
}

static int n_pages_of(int n_tokens, uint32_t page_len)
{
    return (int)(((uint64_t)n_tokens + page_len - 1) / page_len);
}

/* The size of a file; 0 if it overflows. */
static uint64_t file_size(const struct prefix_shape *s, int n_tokens, int n_states)
{
    uint64_t n_pages = (uint64_t)n_pages_of(n_tokens, s->page_len), n = (uint64_t)n_states, total;
    uint64_t ids = ((uint64_t)n_tokens + n) * sizeof(uint64_t), pages, states;
    bool fits = !__builtin_mul_overflow(n_pages, s->page_bytes + sizeof(uint64_t), &pages) &&
                !__builtin_mul_overflow(n, s->state_bytes + sizeof(uint64_t), &states) &&
                !__builtin_add_overflow(pages, states, &total) &&
                !__builtin_add_overflow(total, sizeof(struct file_head) + ids, &total);
    return fits && total < (uint64_t)1 << 62 ? total : 0;
}

static uint64_t ids_sum(const struct prefix_ids *ids)
{
    uint64_t h = prefix_checksum(1, ids->content, (size_t)ids->n_tokens * sizeof *ids->content);
    return prefix_checksum(h, ids->places, (size_t)ids->n_states * sizeof *ids->places);
}

/* Writing */

struct prefix_writer {
    int dir, fd;
    bool named; /* it has its name */
    int n_records, n_added;
    struct file_head head;
    char name[PREFIX_NAME_MOST], temporary[PREFIX_NAME_MOST + 8];
};

/* Opens the temporary file and locks it. One that a killed process left is used again. */
static bool open_temporary(struct prefix_writer *w, struct error *err)
{
    struct stat mine, there;
    w->fd = openat(w->dir, w->temporary, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (w->fd < 0)
        return error_set(err, "cannot create a file: %s", strerror(errno));
    if (flock(w->fd, LOCK_EX | LOCK_NB) || fstat(w->fd, &mine) ||
        fstatat(w->dir, w->temporary, &there, AT_SYMLINK_NOFOLLOW) || mine.st_ino != there.st_ino) {
        close(w->fd); /* another writer has it, or has just given it its name */
        w->fd = -1;
        return error_set(err, "this file is being saved");
    }
    if (!S_ISREG(mine.st_mode) || ftruncate(w->fd, 0) || fchmod(w->fd, 0600))
        return error_set(err, "cannot create a file: %s", strerror(errno));
    return true;
}

struct prefix_writer *prefix_writer_open(const char *dir, const char *name,
                                         const struct prefix_shape *shape,
                                         const struct prefix_ids *ids, struct error *err)
{
    struct prefix_writer *w = mem_zalloc(1, sizeof *w);
    *w = (struct prefix_writer){.dir = -1, .fd = -1};
    int n = ids->n_tokens;
    struct file_head *h = &w->head;
    *h = (struct file_head){.version = PREFIX_FILE_VERSION,
                            .page_len = shape->page_len,
                            .model = {shape->model[0], shape->model[1]},
                            .owner = {shape->owner[0], shape->owner[1]},
                            .page_bytes = shape->page_bytes,
                            .state_bytes = shape->state_bytes,
                            .file_bytes = file_size(shape, n, ids->n_states),
                            .n_tokens = (uint64_t)n,
                            .n_states = (uint64_t)ids->n_states,
                            .ids_sum = ids_sum(ids)};
    memcpy(h->magic, magic, sizeof magic);
    h->head_sum = prefix_checksum(0, h, offsetof(struct file_head, head_sum));
    w->n_records = n_pages_of(n, shape->page_len) + ids->n_states;
    snprintf(w->name, sizeof w->name, "%s", name);
    snprintf(w->temporary, sizeof w->temporary, ".%s.tmp", name);
    bool ok = prefix_name_is_valid(name) || error_set(err, "'%.40s' is no name of a file", name);
    w->dir = ok ? open_dir(dir, err) : -1;
    if (w->dir >= 0 && open_temporary(w, err) && write_all(w->fd, h, sizeof *h, err) &&
        write_all(w->fd, ids->content, (size_t)n * sizeof *ids->content, err) &&
        write_all(w->fd, ids->places, (size_t)ids->n_states * sizeof *ids->places, err))
        return w;
    prefix_writer_free(w);
    return NULL;
}

/* The checksum of record i. */
static uint64_t record_sum(const struct file_head *h, int i, const void *p, size_t n)
{
    return prefix_checksum(step(h->head_sum, (uint64_t)i), p, n);
}

static size_t record_bytes(const struct file_head *h, int i)
{
    int n_pages = n_pages_of((int)h->n_tokens, h->page_len);
    return i < n_pages ? h->page_bytes : h->state_bytes;
}

bool prefix_writer_add(struct prefix_writer *w, const void *record, struct error *err)
{
    int i = w->n_added++;
    CHECK(i < w->n_records, "%d records of %d", i + 1, w->n_records);
    size_t n = record_bytes(&w->head, i);
    uint64_t sum = record_sum(&w->head, i, record, n);
    return write_all(w->fd, record, n, err) && write_all(w->fd, &sum, sizeof sum, err);
}

bool prefix_writer_name(struct prefix_writer *w, uint64_t *bytes, struct error *err)
{
    CHECK(w->n_added == w->n_records, "%d records of %d", w->n_added, w->n_records);
    *bytes = w->head.file_bytes;
    if (renameat(w->dir, w->temporary, w->dir, w->name))
        return error_set(err, "cannot write: %s", strerror(errno));
    w->named = true;
    return true;
}

bool prefix_writer_finish(struct prefix_writer *w, uint64_t *bytes, struct error *err)
{
    if (fsync(w->fd))
        return error_set(err, "cannot write: %s", strerror(errno));
    if (!prefix_writer_name(w, bytes, err))
        return false;
    return !fsync(w->dir) || error_set(err, "cannot write: %s", strerror(errno));
}

void prefix_writer_free(struct prefix_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0 && !w->named)
        unlinkat(w->dir, w->temporary, 0);
    if (w->fd >= 0)
        close(w->fd);
    if (w->dir >= 0)
        close(w->dir);
    mem_free(w);
}

/* Reading */

struct prefix_reader {
    int fd;
    struct file_head head;
    struct prefix_ids ids; /* content is owned */
};

static bool check_head(const struct file_head *h, uint64_t size, const struct prefix_shape *want,
                       int max_tokens, struct error *err)
{
    if (memcmp(h->magic, magic, sizeof magic))
        return error_set(err, "this is no file of a saved prompt");
    if (h->version != PREFIX_FILE_VERSION)
        return error_set(err, "the file has version %u; this program reads version %d", h->version,
                         PREFIX_FILE_VERSION);
    if (h->head_sum != prefix_checksum(0, h, offsetof(struct file_head, head_sum)))
        return error_set(err, "the file's head is damaged");
    if (h->owner[0] != want->owner[0] || h->owner[1] != want->owner[1])
        return error_set(err, "the file belongs to another client or cache_salt");
    if (h->model[0] != want->model[0] || h->model[1] != want->model[1] ||
        h->page_len != want->page_len || h->page_bytes != want->page_bytes ||
        h->state_bytes != want->state_bytes)
        return error_set(err, "the file was saved with another model or another cache");
    if (!h->n_tokens || h->n_tokens > (uint64_t)max_tokens)
        return error_set(err, "the file has %llu tokens, and a prompt here at most %d",
                         (unsigned long long)h->n_tokens, max_tokens);
    if (h->n_states > PREFIX_STATES_MOST || !h->n_states != !want->state_bytes)
        return error_set(err, "the file has %llu states", (unsigned long long)h->n_states);
    uint64_t bytes = file_size(want, (int)h->n_tokens, (int)h->n_states);
    if (bytes != h->file_bytes || bytes != size)
        return error_set(err, "the file has %llu bytes instead of %llu", (unsigned long long)size,
                         (unsigned long long)bytes);
    return true;
}

/* States are after whole pages, and after all tokens. */
static bool check_places(const struct file_head *h, const struct prefix_ids *ids)
{
    for (int i = 0; i < ids->n_states; i++) {
        uint64_t at = ids->places[i];
        bool last = i == ids->n_states - 1;
        if (at <= (i ? ids->places[i - 1] : 0) || (last ? at != h->n_tokens : at % h->page_len))
            return false;
    }
    return true;
}

/* Reads the ids, and all records once unless lazy. */
static bool check_body(struct prefix_reader *r, bool lazy, struct error *err)
{
    const struct file_head *h = &r->head;
    struct prefix_ids *ids = &r->ids;
    size_t bytes = (size_t)h->n_tokens * sizeof(uint64_t);
    uint64_t *content = mem_ask(bytes);
    ids->content = content;
    ids->n_tokens = (int)h->n_tokens;
    ids->n_states = (int)h->n_states;
    if (!content)
        return error_set(err, "out of memory");
    if (!read_all(r->fd, content, bytes, sizeof *h, err) ||
        !read_all(r->fd, ids->places, (size_t)h->n_states * sizeof(uint64_t), sizeof *h + bytes,
                  err))
        return false;
    if (ids_sum(ids) != h->ids_sum || !check_places(h, ids))
        return error_set(err, "the file's tokens are damaged");
    if (lazy)
        return true;
    int n = n_pages_of((int)h->n_tokens, h->page_len) + (int)h->n_states;
    void *record = mem_ask(h->page_bytes > h->state_bytes ? h->page_bytes : h->state_bytes);
    bool ok = record || error_set(err, "out of memory");
    for (int i = 0; ok && i < n; i++)
        ok = prefix_reader_record(r, i, record, err);
    mem_free(record);
    return ok;
}

static struct prefix_reader *open_reader(int fd, const struct prefix_shape *want, int max_tokens,
                                         bool lazy, struct error *err)
{
    struct prefix_reader *r = mem_zalloc(1, sizeof *r);
    struct stat st;
    r->fd = fd;
    bool ok = !fstat(fd, &st) && S_ISREG(st.st_mode);
    if (!ok)
        error_set(err, "this is no regular file");
    if (ok && (uint64_t)st.st_size < sizeof r->head)
        ok = error_set(err, "this is no file of a saved prompt");
    ok = ok && read_all(fd, &r->head, sizeof r->head, 0, err) &&
         check_head(&r->head, (uint64_t)st.st_size, want, max_tokens, err) &&
         check_body(r, lazy, err);
    if (ok)
        return r;
    prefix_reader_free(r);
    return NULL;
}

struct prefix_reader *prefix_reader_open_fd(int fd, const struct prefix_shape *want, int max_tokens,
                                            struct error *err)
{
    return open_reader(fd, want, max_tokens, false, err);
}

/* -1 with an error. */
static int open_name(const char *dir, const char *name, struct error *err)
{
    if (!prefix_name_is_valid(name)) {
        error_set(err, "'%.40s' is no name of a file", name);
        return -1;
    }
    int at = open_dir(dir, err);
    if (at < 0)
        return -1;
    /* O_NONBLOCK: opening a FIFO must not wait. */
    int fd = openat(at, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        error_set(err, "cannot open the file: %s", strerror(errno));
    close(at);
    return fd;
}

struct prefix_reader *prefix_reader_open(const char *dir, const char *name,
                                         const struct prefix_shape *want, int max_tokens,
                                         struct error *err)
{
    int fd = open_name(dir, name, err);
    return fd < 0 ? NULL : open_reader(fd, want, max_tokens, false, err);
}

struct prefix_reader *prefix_reader_open_lazily(const char *dir, const char *name,
                                                const struct prefix_shape *want, int max_tokens,
                                                struct error *err)
{
    int fd = open_name(dir, name, err);
    return fd < 0 ? NULL : open_reader(fd, want, max_tokens, true, err);
}

const struct prefix_ids *prefix_reader_ids(const struct prefix_reader *r)
{
    return &r->ids;
}

uint64_t prefix_reader_bytes(const struct prefix_reader *r)
{
    return r->head.file_bytes;
}

bool prefix_reader_record(struct prefix_reader *r, int i, void *out, struct error *err)
{
    const struct file_head *h = &r->head;
    size_t n = record_bytes(h, i);
    uint64_t n_pages = (uint64_t)n_pages_of((int)h->n_tokens, h->page_len), k = (uint64_t)i, sum;
    uint64_t page = h->page_bytes + sizeof sum, state = h->state_bytes + sizeof sum;
    uint64_t from = sizeof *h + (h->n_tokens + h->n_states) * sizeof sum +
                    (k < n_pages ? k * page : n_pages * page + (k - n_pages) * state);
    if (!read_all(r->fd, out, n, from, err) || !read_all(r->fd, &sum, sizeof sum, from + n, err))
        return false;
    return sum == record_sum(h, i, out, n) || error_set(err, "record %d of the file is damaged", i);
}

void prefix_reader_free(struct prefix_reader *r)
{
    if (!r)
        return;
    close(r->fd);
    mem_free((void *)(uintptr_t)r->ids.content);
    mem_free(r);
}
