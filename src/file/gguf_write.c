/*
 * The GGUF writer: see gguf_write.h. Owns the temporary file and, while it is open, the handlers
 * that remove it on SIGINT, SIGTERM and SIGHUP. Only one writer per process may be open, because
 * the handler knows one path. Knows nothing of models or quantisation.
 */
#include "file/gguf_write.h"
#include "base/mem.h"
#include "base/os.h"

#include <sys/file.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { ALIGNMENT = 32, FLUSH_STEP = 16 << 20 };

struct gguf_tensor {
    size_t offset, bytes; /* offset in the data section; after begin, in the file */
};

struct gguf_writer {
    char *path, *temp;
    int fd;
    struct buf meta, directory; /* encoded entries */
    uint64_t n_meta;
    struct gguf_tensor *tensors; /* (n_tensors) */
    int n_tensors, cap_tensors;
    struct map keys, names; /* declared keys and names, to catch duplicates */
    char **strings;         /* (n_strings) storage of keys and names */
    size_t n_strings, cap_strings;
    size_t data_bytes, total;
    bool begun, finished;
    atomic_size_t written;
    pthread_mutex_t lock;
    struct error first; /* first failed write */
};

/* Removes the temporary file when a signal ends the program. */

static const int fatal_signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { N_FATAL = sizeof fatal_signals / sizeof *fatal_signals };
static struct sigaction old_actions[N_FATAL], old_xfsz;
static char *volatile doomed; /* path to unlink; NULL = none */

static void remove_and_die(int sig)
{
    int saved = errno;
    if (doomed)
        unlink(doomed);
    errno = saved;
    signal(sig, SIG_DFL);
    raise(sig);
}

static void guard_temp(char *path)
{
    CHECK(!doomed, "two GGUF files written at a time");
    doomed = path;
    struct sigaction sa = {.sa_handler = remove_and_die};
    sigemptyset(&sa.sa_mask);
    for (int i = 0; i < N_FATAL; i++) {
        sigaction(fatal_signals[i], NULL, &old_actions[i]);
        if (old_actions[i].sa_handler != SIG_IGN)
            sigaction(fatal_signals[i], &sa, NULL);
    }
    /* Makes a file-size limit an error of write instead of a signal. */
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigemptyset(&ignore.sa_mask);
    sigaction(SIGXFSZ, &ignore, &old_xfsz);
}

static void release_temp(void)
{
    for (int i = 0; i < N_FATAL; i++)
        sigaction(fatal_signals[i], &old_actions[i], NULL);
    sigaction(SIGXFSZ, &old_xfsz, NULL);
    doomed = NULL;
}

/* Removes temporary files of the same output whose writers were killed: their process is gone, and
 * nobody holds their lock. */
static void remove_leftovers(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *folder = slash ? mem_strndup(path, (size_t)(slash - path) + 1) : mem_strdup(".");
    DIR *d = opendir(folder);
    size_t n = strlen(name);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *number = e->d_name + n + strlen(".tmp-");
        if (strncmp(e->d_name, name, n) != 0 || strncmp(e->d_name + n, ".tmp-", 5) != 0 ||
            !*number || strspn(number, "0123456789") != strlen(number) ||
            kill((pid_t)strtol(number, NULL, 10), 0) == 0 || errno != ESRCH)
            continue;
        int fd = openat(dirfd(d), e->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
            unlinkat(dirfd(d), e->d_name, 0);
        if (fd >= 0)
            close(fd);
    }
    if (d)
        closedir(d);
    mem_free(folder);
}

struct gguf_writer *gguf_writer_new(const char *path, struct error *err)
{
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        error_set(err, "%s: exists and is not a regular file", path);
        return NULL;
    }
    remove_leftovers(path);
    struct buf name = {0};
    buf_addf(&name, "%s.tmp-%ld", path, (long)getpid());
    char *temp = buf_take(&name);
    guard_temp(temp); /* before the file exists: a signal right after open must find it */
    int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) { /* left by a killed process with the same id */
        unlink(temp);
        fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (fd < 0) {
        error_set(err, "%s: cannot create: %s", path, strerror(errno));
        release_temp();
        mem_free(temp);
        return NULL;
    }
    flock(fd, LOCK_EX | LOCK_NB); /* says to others, also in other containers, that it is in use */
    struct gguf_writer *w = mem_zalloc(1, sizeof *w);
    w->path = mem_strdup(path);
    w->temp = temp;
    w->fd = fd;
    pthread_mutex_init(&w->lock, NULL);
    map_init(&w->keys, 64);
    map_init(&w->names, 256);
    return w;
}

void gguf_writer_free(struct gguf_writer *w)
{
    if (!w)
        return;
    if (!w->finished) {
        close(w->fd);
        unlink(w->temp);
        release_temp();
    }
    for (size_t i = 0; i < w->n_strings; i++)
        mem_free(w->strings[i]);
    mem_free(w->strings);
    map_clear(&w->keys);
    map_clear(&w->names);
    buf_clear(&w->meta);
    buf_clear(&w->directory);
    pthread_mutex_destroy(&w->lock);
    mem_free(w->tensors);
    mem_free(w->path);
    mem_free(w->temp);
    mem_free(w);
}

static void put_u32(struct buf *b, uint32_t v)
{
    buf_add(b, &v, 4);
}

static void put_u64(struct buf *b, uint64_t v)
{
    buf_add(b, &v, 8);
}

void gguf_pack_string(struct buf *packed, const char *s, size_t len)
{
    put_u64(packed, len);
    buf_add(packed, s, len);
}

/* Records a key or name. A duplicate is a bug of the caller. */
static void declare(struct gguf_writer *w, struct map *m, const char *name)
{
    CHECK(!w->begun, "'%s' declared after gguf_writer_begin", name);
    if (w->n_strings == w->cap_strings) {
        w->cap_strings = w->cap_strings ? 2 * w->cap_strings : 64;
        w->strings = mem_realloc(w->strings, w->cap_strings, sizeof *w->strings);
    }
    char *copy = w->strings[w->n_strings++] = mem_strdup(name);
    CHECK(map_add(m, copy, strlen(copy), 0), "'%s' declared twice", name);
}

static void put_key(struct gguf_writer *w, const char *key, enum meta_type type)
{
    declare(w, &w->keys, key);
    gguf_pack_string(&w->meta, key, strlen(key));
    put_u32(&w->meta, type);
    w->n_meta++;
}

void gguf_set_u32(struct gguf_writer *w, const char *key, uint32_t v)
{
    put_key(w, key, META_U32);
    put_u32(&w->meta, v);
}

void gguf_set_f32(struct gguf_writer *w, const char *key, float v)
{
    put_key(w, key, META_F32);
    buf_add(&w->meta, &v, 4);
}

void gguf_set_bool(struct gguf_writer *w, const char *key, bool v)
{
    put_key(w, key, META_BOOL);
    buf_addc(&w->meta, v);
}

void gguf_set_string(struct gguf_writer *w, const char *key, const char *s, size_t len)
{
    put_key(w, key, META_STRING);
    gguf_pack_string(&w->meta, s, len);
}

static size_t element_bytes(enum meta_type t)
{
    switch (t) {
    case META_U8:
    case META_I8:
    case META_BOOL:
        return 1;
    case META_U16:
    case META_I16:
        return 2;
    case META_U32:
    case META_I32:
    case META_F32:
        return 4;
    case META_U64:
    case META_I64:
    case META_F64:
        return 8;
    case META_STRING:
    case META_ARRAY:
        break;
    }
    CHECK(false, "no fixed size for metadata type %d", (int)t);
}

void gguf_set_array(struct gguf_writer *w, const char *key, enum meta_type type, const void *data,
                    size_t n)
{
    put_key(w, key, META_ARRAY);
    put_u32(&w->meta, type);
    put_u64(&w->meta, n);
    buf_add(&w->meta, data, n * element_bytes(type));
}

void gguf_set_strings(struct gguf_writer *w, const char *key, const struct buf *packed, size_t n)
{
    put_key(w, key, META_ARRAY);
    put_u32(&w->meta, META_STRING);
    put_u64(&w->meta, n);
    buf_add(&w->meta, packed->p, packed->len);
}

void gguf_set_meta(struct gguf_writer *w, const struct meta *m)
{
    put_key(w, m->key, m->type);
    switch (m->type) {
    case META_STRING:
        gguf_pack_string(&w->meta, m->v.s.p, m->v.s.len);
        return;
    case META_ARRAY:
        put_u32(&w->meta, m->v.a.type);
        put_u64(&w->meta, m->v.a.n);
        buf_add(&w->meta, m->v.a.data, m->v.a.bytes);
        return;
    case META_F32:
        buf_add(&w->meta, &(float){(float)m->v.f}, 4);
        return;
    case META_F64:
        buf_add(&w->meta, &m->v.f, 8);
        return;
    default: /* an integer: the low bytes of the 64-bit value, little-endian */
        buf_add(&w->meta, &m->v.u, element_bytes(m->type));
        return;
    }
}

int gguf_add_tensor(struct gguf_writer *w, const char *name, enum dtype type, int n_dims,
                    const int64_t *dims)
{
    CHECK(n_dims >= 1 && n_dims <= TENSOR_MAX_DIMS, "tensor %s: %d dims", name, n_dims);
    CHECK(dtype_to_ggml(type) >= 0, "tensor %s: GGUF has no %s", name, dtype_name(type));
    CHECK(dims[0] % dtype_table[type].block_len == 0, "tensor %s: row of %lld", name,
          (long long)dims[0]);
    declare(w, &w->names, name);
    gguf_pack_string(&w->directory, name, strlen(name));
    put_u32(&w->directory, (uint32_t)n_dims);
    size_t n = 1;
    for (int d = 0; d < n_dims; d++) {
        put_u64(&w->directory, (uint64_t)dims[d]);
        n *= (size_t)dims[d];
    }
    put_u32(&w->directory, (uint32_t)dtype_to_ggml(type));
    put_u64(&w->directory, w->data_bytes);
    if (w->n_tensors == w->cap_tensors) {
        w->cap_tensors = w->cap_tensors ? 2 * w->cap_tensors : 64;
        w->tensors = mem_realloc(w->tensors, (size_t)w->cap_tensors, sizeof *w->tensors);
    }
    size_t bytes = dtype_bytes(type, n);
    w->tensors[w->n_tensors] = (struct gguf_tensor){w->data_bytes, bytes};
    w->data_bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return w->n_tensors++;
}

static bool write_at(const struct gguf_writer *w, size_t at, const void *data, size_t bytes,
                     struct error *err)
{
    const char *p = data;
    while (bytes) {
        ssize_t n = pwrite(w->fd, p, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return error_set(err, "%s: cannot write: %s", w->path,
                             n < 0 ? strerror(errno) : "nothing was written");
        p += n;
        at += (size_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Reserves the disk space, so that a full disk fails at once and not at the end. */
static bool reserve(const struct gguf_writer *w, struct error *err)
{
    if (os_reserve_file(w->fd, (off_t)w->total))
        return true;
    int e = errno;
    if (e == EOPNOTSUPP || e == ENOSYS || e == EINVAL) { /* not supported by every file system */
        if (ftruncate(w->fd, (off_t)w->total) == 0)
            return true;
        e = errno;
    }
    struct statvfs v;
    if (e == ENOSPC && fstatvfs(w->fd, &v) == 0)
        return error_set(err, "%s: disk full: %.3f GB needed, %.3f GB free", w->path,
                         (double)w->total / 1e9, (double)v.f_bavail * (double)v.f_frsize / 1e9);
    return error_set(err, "%s: cannot reserve %zu bytes: %s", w->path, w->total, strerror(e));
}

bool gguf_writer_begin(struct gguf_writer *w, struct error *err)
{
    CHECK(!w->begun, "gguf_writer_begin twice");
    struct buf b = {0};
    buf_adds(&b, "GGUF");
    put_u32(&b, 3);
    put_u64(&b, (uint64_t)w->n_tensors);
    put_u64(&b, w->n_meta);
    buf_add(&b, w->meta.p, w->meta.len);
    buf_add(&b, w->directory.p, w->directory.len);
    while (b.len % ALIGNMENT)
        buf_addc(&b, 0);
    for (int i = 0; i < w->n_tensors; i++)
        w->tensors[i].offset += b.len;
    w->total = b.len + w->data_bytes;
    w->begun = true;
    bool ok = reserve(w, err) && write_at(w, 0, b.p, b.len, err);
    buf_clear(&b);
    return ok;
}

/*
 * Starts write-back of older data, so that the disk works during computation and the final fsync is
 * short. Chunks arrive nearly in order, so the number of bytes written approximates the position.
 * It is only a hint.
 */
static void flush_behind(struct gguf_writer *w, size_t bytes)
{
    size_t before = atomic_fetch_add(&w->written, bytes), step = (before + bytes) / FLUSH_STEP;
    if (step > 1 && step != before / FLUSH_STEP)
        sync_file_range(w->fd, (off_t)(step - 2) * FLUSH_STEP, FLUSH_STEP, SYNC_FILE_RANGE_WRITE);
}

bool gguf_writer_put(struct gguf_writer *w, int tensor, size_t offset, const void *data,
                     size_t bytes)
{
    CHECK(w->begun && tensor >= 0 && tensor < w->n_tensors, "tensor %d of %d", tensor,
          w->n_tensors);
    const struct gguf_tensor *t = &w->tensors[tensor];
    CHECK(offset <= t->bytes && bytes <= t->bytes - offset, "tensor %d: %zu + %zu of %zu", tensor,
          offset, bytes, t->bytes);
    struct error err = {0};
    if (write_at(w, t->offset + offset, data, bytes, &err)) {
        flush_behind(w, bytes);
        return true;
    }
    pthread_mutex_lock(&w->lock);
    if (!w->first.msg[0])
        w->first = err;
    pthread_mutex_unlock(&w->lock);
    return false;
}

bool gguf_writer_failed(struct gguf_writer *w, struct error *err)
{
    pthread_mutex_lock(&w->lock);
    bool failed = w->first.msg[0] != 0;
    if (failed && err)
        *err = w->first;
    pthread_mutex_unlock(&w->lock);
    return failed;
}

bool gguf_writer_finish(struct gguf_writer *w, struct error *err)
{
    CHECK(w->begun && !w->finished, "gguf_writer_finish out of order");
    if (gguf_writer_failed(w, err))
        return false;
    /* fsync before rename: after a crash the final name has either no file or the complete one. */
    if (fsync(w->fd) != 0)
        return error_set(err, "%s: cannot flush to disk: %s", w->path, strerror(errno));
    if (rename(w->temp, w->path) != 0)
        return error_set(err, "%s: cannot rename %s: %s", w->path, w->temp, strerror(errno));
    close(w->fd);
    release_temp();
    w->finished = true;
    return true;
}

size_t gguf_writer_bytes(const struct gguf_writer *w)
{
    return w->total;
}
