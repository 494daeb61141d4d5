/* See bench_memory.h. */
#include "cli/bench/bench_memory.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

#include <stdint.h>
#include <string.h>

/* Sizes in units of 8 bytes. */
enum { LINE = 8, NEAR = 512 / 8, FAR = 12288 / 8, PIECE = (4 << 20) / 8, N_PIECES = 256 };

static const size_t bytes = (size_t)N_PIECES * PIECE * sizeof(uint64_t);

struct bench_memory {
    struct pool *pool;
    uint64_t *v;             /* (N_PIECES, PIECE) */
    uint64_t sums[N_PIECES]; /* keeps the compiler from dropping the reads */
};

static void fill(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct bench_memory *m = arg;
    memset(m->v + (size_t)first * PIECE, 1, (size_t)(last - first) * PIECE * sizeof *m->v);
}

typedef uint64_t pair __attribute__((vector_size(16)));

/* Hardware prefetch alone does not reach the full bandwidth on all CPUs. Software prefetch does:
 * far ahead into the L2, as the kernels do, and just ahead into the L1. */
static void read_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct bench_memory *m = arg;
    for (int p = first; p < last; p++) {
        const uint64_t *v = m->v + (size_t)p * PIECE;
        pair sum[LINE / 2] = {{0}};
        for (size_t i = 0; i < PIECE; i += LINE) {
            __builtin_prefetch(v + i + FAR, 0, 2);
            __builtin_prefetch(v + i + NEAR);
            for (int k = 0; k < LINE / 2; k++) {
                pair x;
                memcpy(&x, v + i + 2 * k, sizeof x);
                sum[k] += x;
            }
        }
        for (int k = 0; k < LINE / 2; k++)
            m->sums[p] += sum[k][0] + sum[k][1];
    }
}

struct bench_memory *bench_memory_new(int threads, struct error *err)
{
    uint64_t *v = mem_aligned(bytes);
    if (!v) {
        error_set(err, "out of memory: %zu bytes to measure the memory bandwidth", bytes);
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
