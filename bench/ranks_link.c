/*
 * Measures the link between ranks with the calls that a step makes (dist/ranks.h):
 *   mpirun -n 2 build/bench/ranks_link                              over shared memory
 *   mpirun -n 2 --mca btl tcp,self build/bench/ranks_link           over TCP
 * Prints medians in microseconds by size: a sum, a message one way, a broadcast of rank 0. The last line is the
 * argument of `steel plan --link`: the latency of small sums (256 bytes), and the rate of large ones (4 MB).
 */
#include "base/clock.h"
#include "base/mem.h"
#include "dist/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 16 << 20, RATED = 4 << 20, MOST = 2000, EACH_NS = 300000000 };

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

enum what { SUM, SEND, TELL };

/* Once, on all ranks. */
static void once(struct ranks *r, enum what what, float *buf, size_t bytes)
{
    if (what == SUM)
        ranks_sum(r, buf, bytes / sizeof *buf);
    else if (what == TELL)
        ranks_broadcast(r, buf, bytes, false);
    else if (r->rank == 0 && ranks_send(r, buf, bytes, 1))
        ranks_recv(r, buf, bytes, 1);
    else if (r->rank == 1 && ranks_recv(r, buf, bytes, 0))
        ranks_send(r, buf, bytes, 0);
}

/* The median in microseconds. A sum before each keeps the ranks together. */
static double measure(struct ranks *r, enum what what, float *buf, size_t bytes)
{
    static int64_t ns[MOST];
    int n = 0;
    float more = 1; /* as long as rank 0 has time left, all ranks continue */
    for (int64_t begin = clock_ns(); n < MOST && more > 0 && ranks_ok(r, NULL); n++) {
        more = r->rank == 0 && clock_ns() - begin < EACH_NS;
        ranks_sum(r, &more, 1);
        int64_t start = clock_ns();
        once(r, what, buf, bytes);
        if (what == TELL) /* the sender of a broadcast does not wait for its receivers */
            ranks_sum(r, buf, 1);
        ns[n] = clock_ns() - start;
    }
    qsort(ns, (size_t)n, sizeof *ns, compare);
    return (double)ns[n / 2] * 1e-3 / (what == SEND ? 2 : 1);
}

int main(void)
{
    struct error err = {0};
    struct ranks *r = ranks_launched() ? ranks_open(&err) : NULL;
    if (!r || !ranks_arrange(r, r->size, 1, false, &err)) {
        fprintf(stderr, "%s\n", err.msg[0] ? err.msg : "start it with mpirun -n 2");
        return 1;
    }
    r->program = r->arguments = "";
    float *buf = mem_zalloc(LARGEST, 1);
    ranks_reserve(r, LARGEST / sizeof *buf);
    double latency = 0, large = 0;
    if (r->rank == 0)
        printf("%10s %10s %10s %10s\n", "bytes", "sum", "message", "tell");
    for (size_t bytes = 4; bytes <= LARGEST && ranks_ok(r, &err); bytes *= 4) {
        double sum = measure(r, SUM, buf, bytes), send = measure(r, SEND, buf, bytes);
        double tell = measure(r, TELL, buf, bytes);
        latency = bytes == 256 ? sum : latency;
        large = bytes == RATED ? sum : large;
        if (r->rank == 0)
            printf("%10zu %10.2f %10.2f %10.2f\n", bytes, sum, send, tell);
    }
    double rate = 2.0 * (r->size - 1) / r->size * RATED / (large - 2 * latency) * 1e6;
    if (r->rank == 0 && ranks_ok(r, &err))
        printf("--link %.2fus:%.2fGB/s\n", latency, rate * 1e-9);
    if (!ranks_ok(r, &err))
        fprintf(stderr, "%s\n", err.msg);
    mem_free(buf);
    bool ok = ranks_ok(r, NULL);
    ranks_close(r);
    return ok ? 0 : 1;
}
