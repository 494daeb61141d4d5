/* See spare.h. */
#include "vision/spare.h"
#include "backend/backend.h"
#include "base/mem.h"

#include <pthread.h>

enum { LEAST = 4 << 20, MOST = 256 << 20, N_BLOCKS = 16 };

static struct {
    pthread_mutex_t lock;
    int n_keepers, n;
    struct backend *pins;        /* pins new blocks; NULL = none */
    const struct host_ops *host; /* of the last one that did; unpins them */
    size_t bytes;
    struct spare_block {
        void *p;
        size_t size;
    } blocks[N_BLOCKS]; /* (n) */
} spare = {.lock = PTHREAD_MUTEX_INITIALIZER};

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
    if (p && size >= LEAST && spare.host)
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
    if (spare.pins == be)
        spare.pins = NULL;
    while (!spare.n_keepers && spare.n) {
        struct spare_block *b = &spare.blocks[--spare.n];
        spare.bytes -= b->size;
        release(b->p, b->size);
    }
    pthread_mutex_unlock(&spare.lock);
}

void *spare_take(size_t bytes)
{
    size_t size = size_of(bytes);
    void *p = NULL;
    pthread_mutex_lock(&spare.lock);
    for (int i = 0; i < spare.n && !p; i++)
        if (spare.blocks[i].size == size) {
            p = spare.blocks[i].p;
            spare.blocks[i] = spare.blocks[--spare.n];
            spare.bytes -= size;
        }
    if (!p && (p = mem_aligned(size)) && size >= LEAST && spare.pins)
        spare.host->pin(spare.pins, p,
                        size); /* under the lock, which spare_drop of that backend takes */
    pthread_mutex_unlock(&spare.lock);
    return p;
}

void spare_give(void *p, size_t bytes)
{
    size_t size = size_of(bytes);
    pthread_mutex_lock(&spare.lock);
    if (p && spare.n_keepers && size >= LEAST && spare.n < N_BLOCKS && spare.bytes + size <= MOST) {
        spare.blocks[spare.n++] = (struct spare_block){p, size};
        spare.bytes += size;
        p = NULL;
    }
    pthread_mutex_unlock(&spare.lock);
    release(p, size);
}
