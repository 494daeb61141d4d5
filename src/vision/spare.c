/* See spare.h. */
#include "vision/spare.h"
#include "backend/backend.h"
#include "base/mem.h"

#include <pthread.h>

enum { LEAST = 4 << 20, MOST = 512 << 20, N_BLOCKS = 16 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_keepers, n;
    int n_pinning;               /* threads that use `pins`, which must not close before */
    struct backend *pins;        /* pins new blocks; NULL = none */
    const struct host_ops *host; /* of the last one that did; unpins them */
    size_t bytes;
    struct spare_block {
        void *p;
        size_t size;
    } blocks[N_BLOCKS]; /* (n) */
} spare = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Rounds a block's bytes up to one of a few sizes, so that a later block can use it again. Pages that are never touched take no memory. */
static size_t size_of(size_t bytes)
{
    size_t size = LEAST;
    if (bytes < LEAST)
        return bytes;
    while (size < bytes)
        size = size % 3 ? size / 2 * 3 : size / 3 * 4;
    return size;
}

/* Frees a block, which may be pinned. */
static void release(void *p, size_t size)
{
    if (p && spare.host)
        spare.host->unpin(NULL, p);
    mem_aligned_free(p, size);
}

void spare_keep(struct backend *be)
{
    pthread_mutex_lock(&spare.lock);
    spare.n_keepers++;
    if (be->ops->host && !spare.pins) {
        spare.pins = be;
        spare.host = be->ops->host;
    }
    pthread_mutex_unlock(&spare.lock);
}

void spare_drop(struct backend *be)
{
    pthread_mutex_lock(&spare.lock);
    spare.n_keepers--;
    while (spare.n_pinning)
        pthread_cond_wait(&spare.changed, &spare.lock);
    if (spare.pins == be)
        spare.pins = NULL;
    while (!spare.n_keepers && spare.n) {
        struct spare_block *b = &spare.blocks[--spare.n];
        spare.bytes -= b->size;
        release(b->p, b->size);
    }
    pthread_mutex_unlock(&spare.lock);
}

/* A new block. Pinning takes longer than clearing its pages, so it is done without the lock. */
static void *new_block(size_t size)
{
    void *p = mem_aligned(size);
    pthread_mutex_lock(&spare.lock);
    struct backend *be = p ? spare.pins : NULL;
    const struct host_ops *host = spare.host;
    spare.n_pinning += be != NULL;
    pthread_mutex_unlock(&spare.lock);
    if (!be)
        return p;
    host->pin(be, p, size);
    pthread_mutex_lock(&spare.lock);
    spare.n_pinning--;
    pthread_cond_broadcast(&spare.changed);
    pthread_mutex_unlock(&spare.lock);
    return p;
}

void *spare_take(size_t bytes)
{
    size_t size = size_of(bytes);
    void *p = NULL;
    if (size < LEAST)
        return mem_aligned(size);
    pthread_mutex_lock(&spare.lock);
    for (int i = 0; i < spare.n && !p; i++)
        if (spare.blocks[i].size == size) {
            p = spare.blocks[i].p;
            spare.blocks[i] = spare.blocks[--spare.n];
            spare.bytes -= size;
        }
    pthread_mutex_unlock(&spare.lock);
    return p ? p : new_block(size);
}

void spare_give(void *p, size_t bytes)
{
    size_t size = size_of(bytes);
    if (size < LEAST) {
        mem_aligned_free(p, size);
        return;
    }
    pthread_mutex_lock(&spare.lock);
    if (p && spare.n_keepers && spare.n < N_BLOCKS && spare.bytes + size <= MOST) {
        spare.blocks[spare.n++] = (struct spare_block){p, size};
        spare.bytes += size;
        p = NULL;
    }
    pthread_mutex_unlock(&spare.lock);
    release(p, size);
}
