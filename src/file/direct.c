/* Reads past the page cache: see direct.h. */
#include "file/direct.h"
#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

enum { NOT_OPEN = -2 };

struct direct {
    const struct tensorfile *f;
    pthread_mutex_t lock;
    int *fds; /* (n_shards) NOT_OPEN until the first read; -1 = only through the page cache */
};

struct direct *direct_open(const struct tensorfile *f)
{
    struct direct *d = mem_zalloc(1, sizeof *d);
    d->f = f;
    pthread_mutex_init(&d->lock, NULL);
    d->fds = mem_zalloc((size_t)f->n_shards + 1, sizeof *d->fds);
    for (int i = 0; i < f->n_shards; i++)
        d->fds[i] = NOT_OPEN;
    return d;
}

void direct_close(struct direct *d)
{
    if (!d)
        return;
    for (int i = 0; i < d->f->n_shards; i++)
        if (d->fds[i] >= 0)
            close(d->fds[i]);
    pthread_mutex_destroy(&d->lock);
    mem_free(d->fds);
    mem_free(d);
}

static int fd_of(struct direct *d, int shard)
{
    pthread_mutex_lock(&d->lock);
    if (d->fds[shard] == NOT_OPEN)
        d->fds[shard] = os_open_direct(d->f->shards[shard].fd);
    int fd = d->fds[shard];
    pthread_mutex_unlock(&d->lock);
    return fd;
}

static int shard_of(const struct direct *d, const uint8_t *data)
{
    for (int i = 0; i < d->f->n_shards; i++) {
        const struct shard *s = &d->f->shards[i];
        if (s->fd >= 0 && data >= s->map && data < s->map + s->bytes)
            return i;
    }
    return -1;
}

bool direct_has(const struct direct *d, const uint8_t *data)
{
    return shard_of(d, data) >= 0;
}

/* Reads at least `least` of the bytes at `at`, as far as the file goes. */
static bool read_at(int fd, uint8_t *buf, size_t bytes, size_t least, size_t at)
{
    for (size_t done = 0; done < least;) {
        ssize_t n = pread(fd, buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
        if (done < least && done % DIRECT_ALIGN)
            return false; /* the file's end */
    }
    return true;
}

const uint8_t *direct_read(struct direct *d, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    int i = shard_of(d, data);
    if (i < 0)
        return NULL;
    const struct shard *s = &d->f->shards[i];
    size_t at = (size_t)(data - s->map), from = at / DIRECT_ALIGN * DIRECT_ALIGN;
    size_t end = (at + bytes + DIRECT_ALIGN - 1) / DIRECT_ALIGN * DIRECT_ALIGN;
    int fd = fd_of(d, i);
    if (fd >= 0 && read_at(fd, buf, end - from, at - from + bytes, from))
        return buf + (at - from);
    /* Some file systems refuse direct reads only now. */
    if (!read_at(s->fd, buf, end - from, at - from + bytes, from))
        return NULL;
    os_forget_range(s->fd, (off_t)from, (off_t)(end - from));
    return buf + (at - from);
}
