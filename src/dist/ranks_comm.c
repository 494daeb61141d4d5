/* Ranks as a backend's communicator (backend/comm.h). Its members are the ranks of a stage. */
#include "base/clock.h"
#include "dist/ranks.h"

static struct ranks *ranks_of(struct comm *c)
{
    return (struct ranks *)c;
}

static void comm_sum(struct comm *c, float *rows, size_t n)
{
    ranks_sum(ranks_of(c), rows, n);
}

static void comm_sum_rows(struct comm *c, float *rows, int n_rows, int width, const uint64_t *from)
{
    ranks_sum_rows(ranks_of(c), rows, n_rows, width, from);
}

static void comm_gather(struct comm *c, float *rows, int n_rows, int width)
{
    ranks_gather_logits(ranks_of(c), rows, n_rows, width);
}

static void comm_progress(struct comm *c)
{
    ranks_progress(ranks_of(c));
}

static bool comm_share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    return ranks_allgather(ranks_of(c), mine, all, bytes) || (ranks_ok(ranks_of(c), err) && false);
}

static bool comm_agree(struct comm *c, bool ok, struct error *err)
{
    return ranks_agree(ranks_of(c), ok, err);
}

static bool comm_is_lost(struct comm *c, int64_t start, struct error *err)
{
    struct ranks *r = ranks_of(c);
    int limit = atomic_load_explicit(&r->timeout_s, memory_order_relaxed);
    if (atomic_load_explicit(&r->stop, memory_order_acquire))
        return !error_set(err, "%s", r->lost.msg);
    return clock_ns() - start > (int64_t)limit * 1000000000 &&
           !error_set(err, "rank %d: a step: no answer from another rank for %d s", r->rank, limit);
}

static void comm_fail(struct comm *c, const struct error *why)
{
    struct ranks *r = ranks_of(c);
    if (ranks_ok(r, NULL))
        r->failure = *why;
}

struct comm *ranks_comm(struct ranks *r)
{
    struct comm *c = &r->comm;
    c->size = r->tp;
    c->index = r->tp_rank;
    c->n_all = r->size;
    c->first = r->stage * r->tp;
    c->sum = comm_sum;
    c->sum_rows = comm_sum_rows;
    c->gather = comm_gather;
    c->progress = comm_progress;
    c->share = comm_share;
    c->agree = comm_agree;
    c->is_lost = comm_is_lost;
    c->fail = comm_fail;
    return c;
}
