/*
 * A libnccl.so.2 for simulated GPUs: the functions nccl.cu calls, over memory shared between
 * processes of one machine. Reductions are kernels of the simulator, so recorded steps contain
 * them. Ranks meet in a barrier, which checks that all of them make the same calls in the same
 * order.
 */
#include "cudasim.h"

#include <atomic>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANKS = 8, PIECE = 1 << 16 };

struct meeting {
    std::atomic<int> here, round, calls[MAX_RANKS];
    float part[MAX_RANKS][PIECE];
};

struct comm {
    struct meeting *m;
    int rank, size;
    char name[128];
};
struct id {
    char name[128];
};

static void meet(struct comm *c)
{
    int round = c->m->round.load();
    if (c->m->here.fetch_add(1) + 1 == c->size) {
        c->m->here.store(0);
        c->m->round.fetch_add(1);
    }
    while (c->m->round.load() == round)
        sched_yield();
}

/* root < 0: all ranks get the sum. */
static void add_up(struct comm *c, const float *in, float *out, size_t n, int root)
{
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        memcpy(c->m->part[c->rank], in + at, k * sizeof *in);
        c->m->calls[c->rank] = (int)k;
        meet(c);
        for (int r = 0; r < c->size; r++)
            if (c->m->calls[r] != (int)k) {
                fprintf(stderr, "fakenccl: this rank reduces %zu floats, another one %d\n", k,
                        (int)c->m->calls[r]);
                abort();
            }
        for (size_t i = 0; (root < 0 || root == c->rank) && i < k; i++) {
            float sum = 0.0f;
            for (int r = 0; r < c->size; r++)
                sum += c->m->part[r][i];
            out[at + i] = sum;
        }
        meet(c);
    }
}

extern "C" {
const char *ncclGetErrorString(int)
{
    return "no error";
}
int ncclGetUniqueId(struct id *id)
{
    snprintf(id->name, sizeof id->name, "/steel-fakenccl-%d", (int)getpid());
    return 0;
}
int ncclCommInitRank(void **comm, int size, struct id id, int rank)
{
    struct comm *c = new struct comm();
    int fd = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || size > MAX_RANKS || ftruncate(fd, sizeof(struct meeting)) != 0)
        return 2;
    c->m = (struct meeting *)mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED,
                                  fd, 0);
    close(fd);
    c->rank = rank;
    c->size = size;
    snprintf(c->name, sizeof c->name, "%s", id.name);
    meet(c);
    shm_unlink(c->name); /* all ranks have mapped it */
    *comm = c;
    fprintf(stderr, "fakenccl: rank %d of %d\n", rank, size);
    return 0;
}
int ncclCommDestroy(void *)
{
    return 0;
}
int ncclCommAbort(void *)
{
    return 0;
}
int ncclCommGetAsyncError(void *, int *result)
{
    *result = 0;
    return 0;
}
int ncclReduce(const float *in, float *out, size_t n, int, int, int root, void *comm,
               cudaStream_t stream)
{
    struct comm *c = (struct comm *)comm;
    sim_launch(stream, dim3(1), dim3(32), 0, [=] {
        if (threadIdx.x == 0)
            add_up(c, in, out, n, root);
    });
    return 0;
}
int ncclAllReduce(const float *in, float *out, size_t n, int type, int op, void *comm,
                  cudaStream_t stream)
{
    return ncclReduce(in, out, n, type, op, -1, comm, stream);
}
}
