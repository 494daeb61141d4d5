/* Several ranks in a step: see lanes.h. Owns the pinned memory they meet in, and NCCL. */
#include "backend/cuda/core/lanes.h"
#include "backend/cuda/core/host.h"
#include "backend/cuda/core/nccl.h"

extern "C" {
#include "base/clock.h"
#include "base/mem.h"
#include "base/ranks.h"
}

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { COPY_THREADS = 256, COPY_BLOCKS = 256 };

/* to = from, n floats; one of them is the host's. Rows of an odd vocabulary begin anywhere: then one by one.
 * Not launched early: the host, or what comes from it, stands between this kernel and the one in front. */
static __global__ void __launch_bounds__(COPY_THREADS)
    lanes_copy_kernel(const float *from, float *to, size_t n)
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
    cuda_launch(cu, lanes_copy_kernel,
                dim3((unsigned)(blocks < COPY_BLOCKS ? blocks : COPY_BLOCKS)), COPY_THREADS, 0,
                LAUNCH_PLAIN, from, to, n);
}

/* Rows (rows, n) of a matrix (rows, width): from column `first` on the part's, zeros elsewhere. */
static __global__ void __launch_bounds__(COPY_THREADS)
    lanes_spread_kernel(const float *part, float *all, int n, int first, int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * COPY_THREADS + threadIdx.x), at = k - first;
    if (k < width)
        all[(size_t)blockIdx.y * (size_t)width + (size_t)k] =
            at >= 0 && at < n ? part[(size_t)blockIdx.y * (size_t)n + (size_t)at] : 0.0f;
}

/* d[t, :] += beside[t, :], times the sigmoid of gate[t] where there is one. Grid: (columns, rows). */
static __global__ void __launch_bounds__(COPY_THREADS)
    lanes_beside_kernel(const float *beside, const float *gate, float *d, int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * COPY_THREADS + threadIdx.x), t = (int)blockIdx.y;
    float scale = gate ? fast_divide(1.0f, 1.0f + fast_exp(-gate[t])) : 1.0f;
    size_t at = (size_t)t * (size_t)width + (size_t)k;
    if (k < width)
        d[at] += scale * beside[at];
}

static struct ranks *ranks_of(const struct cuda_backend *cu)
{
    return cu->be->ranks;
}

static void fail(struct cuda_backend *cu, const struct error *why)
{
    if (!cu->failed)
        cu->error = *why;
    cu->failed = true;
}

bool lanes_sums(const struct cuda_backend *cu, bool partial)
{
    return partial || cuda_lanes(cu)->always;
}

/* The host waits for what was enqueued; MPI waits for the others. */
static void sum_by_host(struct cuda_backend *cu, const float *in, float *out, size_t n)
{
    struct lanes *l = cuda_lanes(cu);
    CHECK(n <= l->room, "a sum of %zu floats, %zu of room", n, l->room);
    copy(cu, in, l->mapped, n);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    ranks_sum(ranks_of(cu), l->host, n);
    copy(cu, l->mapped, out, n);
}

/* out (rows, n_embd) = in, added up over the lanes. */
static void sum(struct cuda_backend *cu, const float *in, float *out, int rows)
{
    struct lanes *l = cuda_lanes(cu);
    struct error err = {};
    size_t n = (size_t)rows * (size_t)cu->shape.n_embd;
    if (!n || l->given_up)
        return;
    step_mark(cu);
    if (!l->nccl)
        sum_by_host(cu, in, out, n);
    else if (!nccl_sum(l->nccl, in, out, n, cu->stream, &err))
        fail(cu, &err);
    step_mark_end(cu, STAGE_RANKS);
}

void lanes_sum(struct cuda_backend *cu, float *rows, int n)
{
    sum(cu, rows, rows, n);
}

void lanes_sum_stream(struct cuda_backend *cu, bool partial)
{
    struct lanes *l = cuda_lanes(cu);
    struct resid *r = &cu->resid;
    if (!lanes_sums(cu, partial))
        return;
    resid_add_rows(cu, r);
    float *to = l->nccl ? l->sum : cu->d;
    sum(cu, r->d, to, r->rows);
    r->d = to;
}

/* A process that is alone sums all the same: STEEL_NCCL=1. */
static bool is_alone(const struct cuda_backend *cu)
{
    const char *wish = getenv("STEEL_NCCL");
    return !ranks_of(cu) && wish && !strcmp(wish, "1");
}

void lanes_sum_beside(struct cuda_backend *cu, struct resid_epilogue *close, bool partial,
                      bool experts_partial)
{
    struct resid *r = &cu->resid;
    if (!close->beside || !partial)
        return;
    if (!experts_partial || close->norm.gain || close->beside_norm.gain) {
        lanes_sum(cu, cu->beside, r->rows);
        return;
    }
    resid_add_rows(cu, r);
    cuda_launch(cu, lanes_beside_kernel,
                dim3((unsigned)ceil_div(cu->shape.n_embd, COPY_THREADS), (unsigned)r->rows),
                COPY_THREADS, 0, LAUNCH_EARLY, close->beside, close->beside_gate, cu->d,
                cu->shape.n_embd);
    close->beside = close->beside_gate = NULL;
}

/* The vocabulary */

static bool head_is_cut(const struct cuda_backend *cu, const struct head *h)
{
    return ranks_of(cu) && h->w->n_out < cu->shape.n_vocab;
}

float *lanes_head_to(struct cuda_backend *cu, const struct head *h)
{
    const struct lanes *l = cuda_lanes(cu);
    return l->nccl && head_is_cut(cu, h) ? l->part : cu->logits_all;
}

/* Rows (rows, own) become (rows, n_vocab) in the same place: the last ones first, so that none is
 * overwritten before it is read. */
static void collect_by_host(struct cuda_backend *cu, int own, int rows)
{
    struct lanes *l = cuda_lanes(cu);
    struct ranks *r = ranks_of(cu);
    int width = cu->shape.n_vocab, each = (int)(l->room / (size_t)width);
    for (int last = rows, n; last > 0; last -= n) {
        n = last < each ? last : each;
        size_t at = (size_t)(last - n);
        copy(cu, cu->logits_all + at * (size_t)own, l->mapped, (size_t)n * (size_t)own);
        CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
        ranks_collect(r, l->host, n, width);
        if (r->lane == 0) {
            copy(cu, l->mapped, cu->logits_all + at * (size_t)width, (size_t)n * (size_t)width);
            CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* the room is used again */
        }
    }
}

void lanes_collect(struct cuda_backend *cu, const struct head *h, int rows)
{
    struct lanes *l = cuda_lanes(cu);
    struct error err = {};
    int width = cu->shape.n_vocab, own = h->w->n_out;
    if (!head_is_cut(cu, h) || l->given_up)
        return;
    int first = ranks_vocab(ranks_of(cu), width, ranks_of(cu)->lane).first;
    step_mark(cu);
    if (l->nccl) {
        cuda_launch(cu, lanes_spread_kernel,
                    dim3((unsigned)ceil_div(width, COPY_THREADS), (unsigned)rows), COPY_THREADS, 0,
                    LAUNCH_EARLY, l->part, cu->logits_all, own, first, width);
        if (!nccl_reduce(l->nccl, cu->logits_all, cu->logits_all, (size_t)rows * (size_t)width,
                         cu->stream, &err))
            fail(cu, &err);
    } else {
        collect_by_host(cu, own, rows);
    }
    step_mark_end(cu, STAGE_RANKS);
}

/* Steps */

bool lanes_record(const struct cuda_backend *cu)
{
    const struct ranks *r = ranks_of(cu);
    return !r || r->tp == 1 || cuda_lanes(cu)->nccl;
}

/* Why what is under way will not come to its end. */
static bool is_lost(struct cuda_backend *cu, int64_t start, struct error *err)
{
    struct ranks *r = ranks_of(cu);
    int limit = __atomic_load_n(&r->timeout_s, __ATOMIC_RELAXED);
    if (__atomic_load_n(&r->stop, __ATOMIC_ACQUIRE))
        return !error_set(err, "%s", r->lost.msg);
    if (clock_ns() - start > (int64_t)limit * 1000000000)
        return !error_set(err, "rank %d: a step: no answer from another rank for %d s", r->rank,
                          limit);
    return !nccl_ok(cuda_lanes(cu)->nccl, err);
}

/* NCCL's kernels wait for others' as long as it takes: whoever has ended would never come. */
void lanes_wait(struct cuda_backend *cu, cudaEvent_t done)
{
    struct lanes *l = cuda_lanes(cu);
    struct ranks *r = ranks_of(cu);
    int64_t start = clock_ns();
    struct error err = {};
    while (l->nccl && r && cudaEventQuery(done) == cudaErrorNotReady) {
        if (is_lost(cu, start, &err)) {
            fail(cu, &err);
            if (ranks_ok(r, NULL))
                r->failure = err;
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
    struct lanes *l = cuda_lanes(cu);
    const struct shape *s = &cu->shape;
    const struct head *h = &cu->net->head;
    size_t rows = (size_t)s->max_tokens, out = (size_t)s->max_out;
    bool nccl = l->nccl != NULL,
         cut = nccl && h->w && !cu->net->has_next_stage && head_is_cut(cu, h);
    struct want list[] = {
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

static bool share(struct ranks *r, const void *mine, void *all, size_t bytes, struct error *err)
{
    return ranks_share(r, mine, all, bytes) || (ranks_ok(r, err) && false);
}

/* Every rank or none: STEEL_NCCL=0 is MPI. */
static bool choose_nccl(struct cuda_backend *cu, const char *wish, struct error *err)
{
    struct lanes *l = cuda_lanes(cu);
    struct ranks *r = ranks_of(cu);
    struct error why = {};
    bool all[RANKS_MOST] = {}, mine = false;
    if (!r->apart || r->tp == 1 || (wish && !strcmp(wish, "0")))
        return true;
    l->nccl = nccl_open(&why);
    mine = l->nccl != NULL;
    if (!share(r, &mine, all, sizeof mine, err))
        return false;
    for (int i = 0; i < r->size; i++)
        mine = mine && all[i];
    if (mine)
        return true;
    error_set(
        &r->notice,
        "%s: GPUs add up through the host, which is slower by far (NVIDIA's package libnccl2, "
        "or LD_LIBRARY_PATH)",
        l->nccl ? "a rank does not find NCCL" : why.msg);
    nccl_close(l->nccl, false);
    l->nccl = NULL;
    return true;
}

/* A communicator of the lanes of each stage, tried once: what it allocates, it does then. */
static bool start_nccl(struct cuda_backend *cu, struct error *err)
{
    struct lanes *l = cuda_lanes(cu);
    struct ranks *r = ranks_of(cu);
    int lane = r ? r->lane : 0, lanes = r ? r->tp : 1;
    struct nccl_id ids[RANKS_MOST] = {}, mine = {};
    bool ok = lane > 0 || nccl_make_id(l->nccl, &mine, err);
    ids[0] = mine;
    if (r && (!ranks_agree(r, ok, err) || !share(r, &mine, ids, sizeof mine, err)))
        return false;
    if (!ok || !nccl_join(l->nccl, &ids[r ? r->stage * r->tp : 0], lane, lanes, err))
        return false;
    if (!nccl_sum(l->nccl, l->sum, l->sum, (size_t)cu->shape.n_embd, cu->stream, err))
        return false;
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    return true;
}

bool lanes_prepare(struct cuda_backend *cu, bool ok, struct error *err)
{
    struct lanes *l = cuda_lanes(cu);
    struct ranks *r = ranks_of(cu);
    const char *wish = getenv("STEEL_NCCL");
    if (!r && (!ok || !is_alone(cu)))
        return ok;
    if (!r) {
        l->nccl = nccl_open(err);
        l->always = true;
        return l->nccl && own_memory(cu, err) && start_nccl(cu, err);
    }
    if (!ranks_agree(r, ok, err) || !choose_nccl(cu, wish, err))
        return false;
    return ranks_agree(r, own_memory(cu, err), err) && (!l->nccl || start_nccl(cu, err));
}

void lanes_close(struct cuda_backend *cu)
{
    struct lanes *l = cuda_lanes(cu);
    nccl_close(l->nccl, cu->failed);
    l->nccl = NULL;
    if (l->host)
        cudaFreeHost(l->host);
    l->host = NULL;
}
