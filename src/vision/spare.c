/* See spare.h. */
#include "vision/spare.h"
#include "base/mem.h"

#include <pthread.h>

enum { LEAST = 4 << 20, MOST = 256 << 20, N_BLOCKS = 16 };

static struct {
    pthread_mutex_t lock;
    int n_keepers, n;
    size_t bytes;
    struct block {
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

void spare_keep(void)
{
    pthread_mutex_lock(&spare.lock);
    spare.n_keepers++;
    pthread_mutex_unlock(&spare.lock);
}

void spare_drop(void)
{
    pthread_mutex_lock(&spare.lock);
    spare.n_keepers--;
    while (!spare.n_keepers && spare.n) {
        struct block *b = &spare.blocks[--spare.n];
        spare.bytes -= b->size;
        mem_aligned_free(b->p, b->size);
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
    pthread_mutex_unlock(&spare.lock);
    return p ? p : mem_aligned(size);
}

void spare_give(void *p, size_t bytes)
{
    size_t size = size_of(bytes);
    pthread_mutex_lock(&spare.lock);
    if (p && spare.n_keepers && size >= LEAST && spare.n < N_BLOCKS && spare.bytes + size <= MOST) {
        spare.blocks[spare.n++] = (struct block){p, size};
        spare.bytes += size;
        p = NULL;
    }
    pthread_mutex_unlock(&spare.lock);
    mem_aligned_free(p, size);
}
