/* See bench_memory.h. */
#include "cli/bench_memory.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

#include <stdint.h>
#include <string.h>

enum { LINE = 8, AHEAD = 2048 / 8, PIECE = (4 << 20) / 8, N_PIECES = 256 }; /* numbers of 8 bytes */

static const size_t bytes = (size_t)N_PIECES * PIECE * sizeof(uint64_t);

struct bench_memory {
    struct pool *pool;
    uint64_t *v;             /* (N_PIECES, PIECE) */
    uint64_t sums[N_PIECES]; /* so that the reading is for something */
};

static void fill(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct bench_memory *m = arg;
    memset(m->v + (size_t)first * PIECE, 1, (size_t)(last - first) * PIECE * sizeof *m->v);
}

/* Where CPUs do not read far enough ahead by themselves, asking for it is what the kernels do too. */
static void read_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct bench_memory *m = arg;
    for (int p = first; p < last; p++) {
        const uint64_t *v = m->v + (size_t)p * PIECE;
        uint64_t sum[LINE] = {0};
        for (size_t i = 0; i < PIECE; i += LINE) {
            __builtin_prefetch(v + i + AHEAD);
            for (int k = 0; k < LINE; k++)
                sum[k] += v[i + (size_t)k];
        }
        for (int k = 0; k < LINE; k++)
            m->sums[p] += sum[k];
    }
}

struct bench_memory *bench_memory_new(int threads, struct error *err)
{
    uint64_t *v = mem_aligned(bytes);
    if (!v) {
        error_set(err, "out of memory: %zu bytes to measure how fast memory is read", bytes);
        return NULL;
    }
    struct bench_memory *m = mem_zalloc(1, sizeof *m);
    m->pool = pool_new(threads > 0 ? threads : pool_cpu_count());
    m->v = v;
    pool_each(m->pool, N_PIECES, POOL_EVEN, fill, m);
    return m;
}

void bench_memory_free(struct bench_memory *m)
{
    if (!m)
        return;
    pool_free(m->pool);
    mem_aligned_free(m->v, bytes);
    mem_free(m);
}

double bench_memory_read(struct bench_memory *m)
{
    int64_t start = clock_ns();
    pool_each(m->pool, N_PIECES, POOL_LONG, read_pieces, m);
    return (double)bytes / ((double)(clock_ns() - start) * 1e-9);
}
