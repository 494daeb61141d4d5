/* Sums over several processes: see comm.h. Owns NCCL, and the pinned memory through which MPI adds
 * up. */
#include "backend/cuda/core/comm.h"
#include "backend/cuda/core/host.h"
#include "backend/cuda/core/nccl.h"

extern "C" {
#include "base/clock.h"
#include "base/mem.h"
}

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { COPY_THREADS = 256, COPY_BLOCKS = 256 };

/* Copies n floats; one of the two arrays is pinned host memory. Rows of an odd vocabulary are not
 * aligned; those are copied one float at a time. A plain launch: this kernel depends on the host,
 * or on a copy from it. */
static __global__ void __launch_bounds__(COPY_THREADS)
    comm_copy_kernel(const float *from, float *to, size_t n)
{
    size_t first = (size_t)blockIdx.x * COPY_THREADS + threadIdx.x;
    size_t step = (size_t)gridDim.x * COPY_THREADS;
    size_t quads = ((uintptr_t)from | (uintptr_t)to) % sizeof(float4) ? 0 : n / 4;
    for (size_t i = first; i < quads; i += step)
        ((float4 *)to)[i] = ((const float4 *)from)[i];
    for (size_t i = quads * 4 + first; i < n; i += step)
        to[i] = from[i];
}

static void copy(struct cuda_backend *cu, const float *from, float *to, size_t n)
{
    size_t blocks = (n / 4 + COPY_THREADS) / COPY_THREADS;
    cuda_launch(cu, comm_copy_kernel, dim3((unsigned)(blocks < COPY_BLOCKS ? blocks : COPY_BLOCKS)),
                COPY_THREADS, 0, LAUNCH_PLAIN, from, to, n);
}

/* Rows (rows, n) of a matrix (rows, width): from column `first` on the part's, zeros elsewhere. */
static __global__ void __launch_bounds__(COPY_THREADS)
    comm_spread_kernel(const float *part, float *all, int n, int first, int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * COPY_THREADS + threadIdx.x), at = k - first;
    if (k < width)
        all[(size_t)blockIdx.y * (size_t)width + (size_t)k] =
            at >= 0 && at < n ? part[(size_t)blockIdx.y * (size_t)n + (size_t)at] : 0.0f;
}

/* d[t, :] += beside[t, :], times the sigmoid of gate[t] where there is one. Grid: (columns,
 * rows). */
static __global__ void __launch_bounds__(COPY_THREADS)
    comm_beside_kernel(const float *beside, const float *gate, float *d, int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * COPY_THREADS + threadIdx.x), t = (int)blockIdx.y;
    float scale = gate ? fast_divide(1.0f, 1.0f + fast_exp(-gate[t])) : 1.0f;
    size_t at = (size_t)t * (size_t)width + (size_t)k;
    if (k < width)
        d[at] += scale * beside[at];
}

static struct comm *members_of(const struct cuda_backend *cu)
{
    return cu->be->comm;
}

static void fail(struct cuda_backend *cu, const struct error *why)
{
    if (!cu->failed)
        cu->error = *why;
    cu->failed = true;
    cu->be->failure = &cu->error;
}

bool comm_has_failed(struct cuda_backend *cu)
{
    struct comm *c = members_of(cu);
    if (cu->failed && c)
        c->fail(c, &cu->error);
    return cu->failed;
}

bool comm_sums(const struct cuda_backend *cu, bool partial)
{
    return partial || cuda_comm_of(cu)->always;
}

/* Waits for the enqueued input, then MPI waits for the other members. */
static void sum_by_host(struct cuda_backend *cu, const float *in, float *out, size_t n)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    CHECK(n <= l->room, "a sum of %zu floats, %zu of room", n, l->room);
    copy(cu, in, l->mapped, n);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    if (comm_has_failed(cu))
        return;
    members_of(cu)->sum(members_of(cu), l->host, n);
    copy(cu, l->mapped, out, n);
}

/* out (rows, n_embd) = in, added up over the members. */
static void sum(struct cuda_backend *cu, const float *in, float *out, int rows)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct error err = {};
    size_t n = (size_t)rows * (size_t)cu->shape.n_embd;
    if (!n || l->given_up || comm_has_failed(cu))
        return;
    step_mark(cu);
    if (!l->nccl)
        sum_by_host(cu, in, out, n);
    else if (!nccl_sum(l->nccl, in, out, n, cu->stream, &err))
        fail(cu, &err);
    step_mark_end(cu, STAGE_COMM);
}

void comm_sum(struct cuda_backend *cu, float *rows, int n)
{
    sum(cu, rows, rows, n);
}

void comm_sum_stream(struct cuda_backend *cu, bool partial)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct resid *r = &cu->resid;
    if (!comm_sums(cu, partial))
        return;
    resid_add_rows(cu, r);
    float *to = l->nccl ? l->sum : cu->act.block;
    sum(cu, r->d, to, r->rows);
    r->d = to;
}

/* A process alone sums nevertheless (STEEL_NCCL=1). */
static bool is_alone(const struct cuda_backend *cu)
{
    const char *wish = getenv("STEEL_NCCL");
    return !members_of(cu) && wish && !strcmp(wish, "1");
}

void comm_sum_beside(struct cuda_backend *cu, struct resid_epilogue *epilogue, bool partial,
                     bool experts_partial)
{
    struct resid *r = &cu->resid;
    if (!epilogue->beside || !partial)
        return;
    if (!experts_partial || epilogue->norm.gain || epilogue->beside_norm.gain) {
        comm_sum(cu, cu->mlp.dense, r->rows);
        return;
    }
    resid_add_rows(cu, r);
    cuda_launch(cu, comm_beside_kernel,
                dim3((unsigned)ceil_div(cu->shape.n_embd, COPY_THREADS), (unsigned)r->rows),
                COPY_THREADS, 0, LAUNCH_EARLY, epilogue->beside, epilogue->beside_gate,
                cu->act.block, cu->shape.n_embd);
    epilogue->beside = epilogue->beside_gate = NULL;
}

/* The vocabulary */

float *comm_head_to(struct cuda_backend *cu, const struct head *h)
{
    const struct cuda_comm *l = cuda_comm_of(cu);
    return l->nccl && h->partial ? l->part : cu->act.logits;
}

/* Spreads rows (rows, own) to (rows, n_vocab) in place, the last row first, so that no row is
 * overwritten before it is read. */
static void collect_by_host(struct cuda_backend *cu, int own, int rows)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct comm *c = members_of(cu);
    int width = cu->shape.n_vocab, each = (int)(l->room / (size_t)width);
    for (int last = rows, n; last > 0; last -= n) {
        n = last < each ? last : each;
        size_t at = (size_t)(last - n);
        copy(cu, cu->act.logits + at * (size_t)own, l->mapped, (size_t)n * (size_t)own);
        CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
        if (comm_has_failed(cu))
            return;
        c->gather(c, l->host, n, width);
        if (c->index == 0) {
            copy(cu, l->mapped, cu->act.logits + at * (size_t)width, (size_t)n * (size_t)width);
            CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* the buffer is reused */
        }
    }
}

void comm_collect(struct cuda_backend *cu, const struct head *h, int rows)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct error err = {};
    int width = cu->shape.n_vocab, own = h->w->n_out;
    if (!h->partial || l->given_up || comm_has_failed(cu))
        return;
    step_mark(cu);
    if (l->nccl) {
        cuda_launch(cu, comm_spread_kernel,
                    dim3((unsigned)ceil_div(width, COPY_THREADS), (unsigned)rows), COPY_THREADS, 0,
                    LAUNCH_EARLY, l->part, cu->act.logits, own, h->first, width);
        if (!nccl_reduce(l->nccl, cu->act.logits, cu->act.logits, (size_t)rows * (size_t)width,
                         cu->stream, &err))
            fail(cu, &err);
    } else {
        collect_by_host(cu, own, rows);
    }
    step_mark_end(cu, STAGE_COMM);
}

/* Steps */

bool comm_record(const struct cuda_backend *cu)
{
    const struct comm *c = members_of(cu);
    return !c || c->size == 1 || cuda_comm_of(cu)->nccl;
}

/* The reason why the step in flight cannot end. */
static bool is_lost(struct cuda_backend *cu, int64_t start, struct error *err)
{
    struct comm *c = members_of(cu);
    return c->is_lost(c, start, err) || !nccl_ok(cuda_comm_of(cu)->nccl, err);
}

/* NCCL's kernels wait for the other members without limit, and a member that has ended never
 * arrives. So the wait polls for that. */
void comm_wait(struct cuda_backend *cu, cudaEvent_t done)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct comm *c = members_of(cu);
    int64_t start = clock_ns();
    struct error err = {};
    while (l->nccl && c && cudaEventQuery(done) == cudaErrorNotReady) {
        if (is_lost(cu, start, &err)) {
            fail(cu, &err);
            c->fail(c, &err);
            nccl_close(l->nccl, true);
            l->nccl = NULL;
            l->given_up = true;
            return;
        }
        sched_yield();
    }
    CUDA_TRY(cu, cudaEventSynchronize(done));
}

/* Before the first */

static bool own_memory(struct cuda_backend *cu, struct error *err)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    const struct model_shape *s = &cu->shape;
    const struct head *h = &cu->net->head;
    size_t rows = (size_t)s->max_tokens, out = (size_t)s->max_out;
    bool nccl = l->nccl != NULL, cut = nccl && !cu->net->has_next_stage && h->partial;
    struct device_buffer list[] = {
        {(void **)&l->sum, nccl ? rows * (size_t)s->n_embd * 4 : 0},
        {(void **)&l->part, cut ? out * (size_t)h->w->n_out * 4 : 0},
    };
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    if (nccl)
        return true;
    l->room = rows * (size_t)s->n_embd;
    l->room = l->room > (size_t)s->n_vocab ? l->room : (size_t)s->n_vocab;
    return cuda_pin((void **)&l->host, (void **)&l->mapped, l->room * sizeof(float), err);
}

/* All processes use NCCL, or none: STEEL_NCCL=0 forces MPI. */
static bool choose_nccl(struct cuda_backend *cu, const char *wish, struct error *err)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct comm *c = members_of(cu);
    struct error why = {};
    bool all[COMM_MOST] = {}, mine = false;
    if (!c->own_devices || c->size == 1 || (wish && !strcmp(wish, "0")))
        return true;
    l->nccl = nccl_open(&why);
    mine = l->nccl != NULL;
    if (!c->share(c, &mine, all, sizeof mine, err))
        return false;
    for (int i = 0; i < c->n_all; i++)
        mine = mine && all[i];
    if (mine)
        return true;
    error_set(
        &c->notice,
        "%s: GPUs add up through the host, which is slower by far (NVIDIA's package libnccl2, "
        "or LD_LIBRARY_PATH)",
        l->nccl ? "a rank does not find NCCL" : why.msg);
    nccl_close(l->nccl, false);
    l->nccl = NULL;
    return true;
}

/* Others may wait in NCCL for a process that has failed, so it leaves the job. */
static bool leave(struct cuda_backend *cu, const struct error *why, struct error *err)
{
    fail(cu, why);
    comm_has_failed(cu);
    return error_set(err, "%s", cu->error.msg);
}

/* Creates NCCL's communicator, and runs one sum so that it allocates now. */
static bool start_nccl(struct cuda_backend *cu, struct error *err)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct comm *c = members_of(cu);
    int index = c ? c->index : 0, size = c ? c->size : 1;
    struct nccl_id ids[COMM_MOST] = {}, mine = {};
    struct error why = {};
    bool ok = index > 0 || nccl_make_id(l->nccl, &mine, err);
    ids[0] = mine;
    if (c && (!c->agree(c, ok, err) || !c->share(c, &mine, ids, sizeof mine, err)))
        return false;
    if (!ok)
        return false;
    if (!nccl_join(l->nccl, &ids[c ? c->first : 0], index, size, &why) ||
        !nccl_sum(l->nccl, l->sum, l->sum, (size_t)cu->shape.n_embd, cu->stream, &why))
        return leave(cu, &why, err);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    return !cu->failed || leave(cu, &cu->error, err);
}

bool comm_prepare(struct cuda_backend *cu, bool ok, struct error *err)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    struct comm *c = members_of(cu);
    const char *wish = getenv("STEEL_NCCL");
    if (!c && (!ok || !is_alone(cu)))
        return ok;
    if (!c) {
        l->nccl = nccl_open(err);
        l->always = true;
        return l->nccl && own_memory(cu, err) && start_nccl(cu, err);
    }
    if (!c->agree(c, ok, err) || !choose_nccl(cu, wish, err))
        return false;
    return c->agree(c, own_memory(cu, err), err) && (!l->nccl || start_nccl(cu, err));
}

void comm_close(struct cuda_backend *cu)
{
    struct cuda_comm *l = cuda_comm_of(cu);
    nccl_close(l->nccl, cu->failed);
    l->nccl = NULL;
    if (l->host)
        cudaFreeHost(l->host);
    l->host = NULL;
}
