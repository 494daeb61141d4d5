/*
 * The marks of pages on the device (backend/canary.h): written and checked in two kernels at the start of a step, after the
 * step block. The check reads the block table that attention reads. Expected marks and results are in pinned memory, as they
 * are few.
 */
#include "backend/cuda/core/host.h"

#include <string.h>

enum { CANARY_THREADS = 256 };

static __global__ void __launch_bounds__(CANARY_THREADS)
    canary_set_kernel(const struct page_mark *set, int n_set, uint32_t *marks)
{
    int i = (int)(blockIdx.x * CANARY_THREADS + threadIdx.x);
    if (i < n_set)
        marks[set[i].page] = set[i].mark;
}

/* One block per sequence. expected (n_seqs, max_pages). */
static __global__ void __launch_bounds__(CANARY_THREADS)
    canary_check_kernel(const struct step s, const uint32_t *marks, int n_pages, int page_len,
                        const uint32_t *expected, int max_pages, int32_t *wrong)
{
    int i = (int)blockIdx.x, n = (s.kv_len[i] + page_len - 1) / page_len;
    const int32_t *pages = s.pages + (size_t)i * (size_t)s.head[STEP_PAGE_STRIDE];
    for (int k = (int)threadIdx.x; k < n; k += CANARY_THREADS)
        if ((unsigned)pages[k] >= (unsigned)n_pages ||
            marks[pages[k]] != expected[(size_t)i * (size_t)max_pages + (size_t)k])
            wrong[i] = k + 1;
    for (int t = s.q_start[i] + (int)threadIdx.x; t < s.q_start[i + 1]; t += CANARY_THREADS) {
        int k = s.pos[t] / page_len;
        if (s.slot[t] >= 0 && s.slot[t] != pages[k] * page_len + s.pos[t] % page_len)
            wrong[i] = k + 1;
    }
}

static struct cuda_canary *canary_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->canary;
}

bool canary_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    struct cuda_canary *c = canary_of(cu);
    size_t seqs = (size_t)b->max_seqs;
    if (!b->canary)
        return true;
    c->expected_at = align_up(seqs * sizeof(int32_t), 64);
    c->set_at = align_up(c->expected_at + seqs * (size_t)b->max_pages * sizeof(uint32_t), 64);
    size_t bytes = c->set_at + (size_t)b->n_pages * sizeof(struct page_mark);
    for (int i = 0; i < 2; i++)
        if (!cuda_pin((void **)&c->host[i], (void **)&c->mapped[i], bytes, err))
            return false;
    return true;
}

void canary_close(struct cuda_backend *cu)
{
    for (int i = 0; i < 2; i++)
        if (canary_of(cu)->host[i])
            cudaFreeHost(canary_of(cu)->host[i]);
}

void canary_begin(struct cuda_backend *cu, const struct batch *b, int turn)
{
    struct cuda_canary *c = canary_of(cu);
    const struct batch_canary *from = b->canary;
    c->wrong[turn] = from ? from->wrong : NULL;
    c->n_seqs[turn] = b->n_seqs;
    if (!from)
        return;
    CHECK(c->host[turn] && from->n_set <= cu->shape.n_pages, "marks without bounds.canary");
    memset(c->host[turn], 0, (size_t)b->n_seqs * sizeof(int32_t));
    for (int i = 0; i < b->n_seqs; i++) {
        size_t row = (size_t)i * (size_t)b->max_pages,
               used = (size_t)ceil_div(b->kv_len[i], cu->shape.page_len);
        memcpy((uint32_t *)(c->host[turn] + c->expected_at) + row, from->expected + row,
               used * sizeof(uint32_t));
    }
    memcpy(c->host[turn] + c->set_at, from->set, (size_t)from->n_set * sizeof *from->set);
    if (from->n_set)
        cuda_launch(cu, canary_set_kernel, dim3((unsigned)ceil_div(from->n_set, CANARY_THREADS)),
                    CANARY_THREADS, 0, LAUNCH_PLAIN,
                    (const struct page_mark *)(c->mapped[turn] + c->set_at), from->n_set,
                    from->marks);
    cuda_launch(cu, canary_check_kernel, dim3((unsigned)b->n_seqs), CANARY_THREADS, 0, LAUNCH_PLAIN,
                cuda_step(cu), (const uint32_t *)from->marks, cu->shape.n_pages, cu->shape.page_len,
                (const uint32_t *)(c->mapped[turn] + c->expected_at), b->max_pages,
                (int32_t *)c->mapped[turn]);
}

void canary_end(struct cuda_backend *cu, int turn)
{
    const struct cuda_canary *c = canary_of(cu);
    if (c->wrong[turn])
        memcpy(c->wrong[turn], c->host[turn], (size_t)c->n_seqs[turn] * sizeof(int32_t));
}
