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
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANKS = 8, PIECE = 1 << 16 };

struct meeting {
    std::atomic<int> here, round, calls[MAX_RANKS], pids[MAX_RANKS];
    std::atomic<bool> aborted;
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

/* NCCL's kernels wait for the other ranks without limit. Here that would be the host's thread, so
 * once a rank has ended or given up the stream is stuck instead: its events never complete. */
static bool is_broken(const struct comm *c)
{
    bool gone = c->m->aborted;
    for (int r = 0; r < c->size && !gone; r++)
        gone = c->m->pids[r] && kill(c->m->pids[r], 0) != 0;
    return gone;
}

/* False: not all ranks will come. */
static bool meet(struct comm *c)
{
    int round = c->m->round.load();
    if (c->m->here.fetch_add(1) + 1 == c->size) {
        c->m->here.store(0);
        c->m->round.fetch_add(1);
    }
    for (int i = 0; c->m->round.load() == round; i++) {
        if (i % 256 == 255 && is_broken(c)) {
            sim_get_stuck();
            return false;
        }
        sched_yield();
    }
    return true;
}

/* root < 0: all ranks get the sum. */
static void add_up(struct comm *c, const float *in, float *out, size_t n, int root)
{
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        memcpy(c->m->part[c->rank], in + at, k * sizeof *in);
        c->m->calls[c->rank] = (int)k;
        if (!meet(c))
            return;
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
        if (!meet(c))
            return;
    }
}

extern "C" {
const char *ncclGetErrorString(int e)
{
    return e ? "simulated failure" : "no error";
}
int ncclGetUniqueId(struct id *id)
{
    if (sim_call_fails(SIM_NCCL))
        return 1;
    snprintf(id->name, sizeof id->name, "/steel-fakenccl-%d", (int)getpid());
    return 0;
}
int ncclCommInitRank(void **comm, int size, struct id id, int rank)
{
    if (sim_call_fails(SIM_NCCL))
        return 1;
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
    c->m->pids[rank] = (int)getpid();
    if (!meet(c)) {
        delete c;
        return 1;
    }
    shm_unlink(c->name); /* all ranks have mapped it */
    *comm = c;
    fprintf(stderr, "fakenccl: rank %d of %d\n", rank, size);
    return 0;
}
int ncclCommDestroy(void *comm)
{
    munmap(((struct comm *)comm)->m, sizeof(struct meeting));
    delete (struct comm *)comm;
    return 0;
}
int ncclCommAbort(void *comm)
{
    ((struct comm *)comm)->m->aborted = true;
    return ncclCommDestroy(comm);
}
int ncclCommGetAsyncError(void *, int *result)
{
    *result = 0;
    return sim_call_fails(SIM_NCCL) ? 1 : 0;
}
int ncclReduce(const float *in, float *out, size_t n, int, int, int root, void *comm,
               cudaStream_t stream)
{
    struct comm *c = (struct comm *)comm;
    if (sim_call_fails(SIM_NCCL))
        return 1;
    return sim_launch(stream, dim3(1), dim3(32), 0, [=] {
        if (threadIdx.x == 0)
            add_up(c, in, out, n, root);
    });
}
int ncclAllReduce(const float *in, float *out, size_t n, int type, int op, void *comm,
                  cudaStream_t stream)
{
    return ncclReduce(in, out, n, type, op, -1, comm, stream);
}
}
