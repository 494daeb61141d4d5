/* Loads NCCL and owns the library and one communicator: see nccl.h. */
#include "backend/cuda/core/nccl.h"

extern "C" {
#include "base/mem.h"
}

#include <dlfcn.h>

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_FLOAT = 7, NCCL_SUM = 0 };

typedef void *nccl_comm;

struct nccl {
    nccl_comm comm;
    const char *(*error_string)(int result);
    int (*get_unique_id)(struct nccl_id *id);
    int (*comm_init_rank)(nccl_comm *comm, int size, struct nccl_id id, int rank);
    int (*comm_destroy)(nccl_comm comm);
    int (*comm_abort)(nccl_comm comm);
    int (*comm_async_error)(nccl_comm comm, int *result);
    int (*all_reduce)(const void *in, void *out, size_t n, int type, int op, nccl_comm comm,
                      cudaStream_t stream);
    int (*reduce)(const void *in, void *out, size_t n, int type, int op, int root, nccl_comm comm,
                  cudaStream_t stream);
};

/* The library is never unloaded: it has threads of its own. */
struct nccl *nccl_open(struct error *err)
{
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        error_set(err, "NCCL: %.400s", dlerror());
        return NULL;
    }
    struct nccl *n = (struct nccl *)mem_zalloc(1, sizeof *n);
    struct {
        void **to;
        const char *name;
    } list[] = {
        {(void **)&n->error_string, "ncclGetErrorString"},
        {(void **)&n->get_unique_id, "ncclGetUniqueId"},
        {(void **)&n->comm_init_rank, "ncclCommInitRank"},
        {(void **)&n->comm_destroy, "ncclCommDestroy"},
        {(void **)&n->comm_abort, "ncclCommAbort"},
        {(void **)&n->comm_async_error, "ncclCommGetAsyncError"},
        {(void **)&n->all_reduce, "ncclAllReduce"},
        {(void **)&n->reduce, "ncclReduce"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        *list[i].to = dlsym(lib, list[i].name);
        if (!*list[i].to) {
            error_set(err, "NCCL: libnccl.so.2 has no %s", list[i].name);
            mem_free(n);
            return NULL;
        }
    }
    return n;
}

static bool done(const struct nccl *n, int result, const char *what, struct error *err)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS ||
           error_set(err, "NCCL: %s (%d) in %s (STEEL_NCCL=0 does without it)",
                     n->error_string(result), result, what);
}

bool nccl_make_id(struct nccl *n, struct nccl_id *id, struct error *err)
{
    return done(n, n->get_unique_id(id), "ncclGetUniqueId", err);
}

bool nccl_join(struct nccl *n, const struct nccl_id *id, int rank, int size, struct error *err)
{
    return done(n, n->comm_init_rank(&n->comm, size, *id, rank), "ncclCommInitRank", err);
}

bool nccl_sum(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
              struct error *err)
{
    return done(n, n->all_reduce(in, out, count, NCCL_FLOAT, NCCL_SUM, n->comm, stream),
                "ncclAllReduce", err);
}

bool nccl_reduce(struct nccl *n, const float *in, float *out, size_t count, cudaStream_t stream,
                 struct error *err)
{
    return done(n, n->reduce(in, out, count, NCCL_FLOAT, NCCL_SUM, 0, n->comm, stream),
                "ncclReduce", err);
}

bool nccl_ok(struct nccl *n, struct error *err)
{
    int state = NCCL_SUCCESS, result = n->comm_async_error(n->comm, &state);
    return done(n, result, "ncclCommGetAsyncError", err) && done(n, state, "a sum", err);
}

void nccl_close(struct nccl *n, bool abort)
{
    if (!n)
        return;
    if (n->comm && abort)
        n->comm_abort(n->comm);
    else if (n->comm)
        n->comm_destroy(n->comm);
    mem_free(n);
}
