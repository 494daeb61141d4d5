/* Where halves of a step pay: see overlap.h. */
#include "engine/overlap.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

#include <math.h>

enum {
    LARGE = 1 << 18, /* floats of a large sum, */
    FEW = 1 << 10,   /* and of a small one */
    TIMES = 3,       /* the median of so many counts */
};

void overlap_init(struct overlap *o, const struct network *net, const struct ranks *r)
{
    *o = (struct overlap){.dear = r->sharers > 0 ? OVERLAP_DEAR_GPU : OVERLAP_DEAR_CPU,
                          .row_bytes = (double)net->n_embd * sizeof(float)};
    o->sums = net->embed.partial;
    for (int i = 0; i < network_depth(net); i++) {
        const struct mlp *m = &net->layers[i].mlp;
        o->sums += net->layers[i].mixer.partial;
        o->sums += m->dense_partial || m->experts_partial;
    }
}

static double seconds_since(int64_t start)
{
    return (double)(clock_ns() - start) * 1e-9;
}

/* A sum that is waited for. */
static double sum_at_once(struct ranks *r, float *buf, size_t n)
{
    int64_t start = clock_ns();
    ranks_sum(r, buf, n);
    return seconds_since(start);
}

/* What this thread has to do for a sum while it computes for twice as long as the sum would take: the rest of it is
 * hidden. */
static double sum_beside(struct ranks *r, float *buf, size_t n, double whole)
{
    int64_t start = clock_ns(), at;
    ranks_sum_begin(r, 0, buf, n);
    double own = seconds_since(start);
    while (seconds_since(start) < 2 * whole) {
        for (at = clock_ns(); clock_ns() < at + POOL_LOOK_NS;)
            continue;
        at = clock_ns();
        ranks_poke(r);
        own += seconds_since(at);
    }
    at = clock_ns();
    ranks_sum_end(r, 0);
    return own + seconds_since(at);
}

static double median(double *v)
{
    double least = fmin(v[0], fmin(v[1], v[2])), most = fmax(v[0], fmax(v[1], v[2]));
    return v[0] + v[1] + v[2] - least - most;
}

/* The most that any rank has, on all. */
static void take_slowest(struct ranks *r, double *v, int n)
{
    double all[RANKS_MOST * 3];
    if (!ranks_share(r, v, all, (size_t)n * sizeof *v))
        return;
    for (int i = 0; i < r->size * n; i++)
        v[i % n] = fmax(v[i % n], all[i]);
}

void overlap_measure(struct overlap *o, struct backend *be, size_t most)
{
    struct ranks *r = be->ranks;
    size_t large = most < LARGE ? most : LARGE, few = FEW;
    double at_once[TIMES] = {0}, small[TIMES] = {0}, beside[TIMES] = {0}, v[3];
    if (large < 8 * few)
        return; /* such steps are not worth it */
    float *buf = mem_zalloc(large, sizeof *buf);
    for (int i = -1; i < TIMES; i++) { /* the first one connects */
        int k = i < 0 ? 0 : i;
        ranks_sum(r, buf, 1); /* they begin together */
        small[k] = be->ops->sum_seconds ? be->ops->sum_seconds(be, few) : sum_at_once(r, buf, few);
        at_once[k] =
            be->ops->sum_seconds ? be->ops->sum_seconds(be, large) : sum_at_once(r, buf, large);
    }
    v[0] = median(small);
    v[1] = median(at_once);
    take_slowest(r, v, 2);
    for (int i = 0; !be->ops->sum_seconds && i < TIMES; i++) {
        ranks_sum(r, buf, 1);
        beside[i] = sum_beside(r, buf, large, v[1]);
    }
    v[2] = median(beside);
    take_slowest(r, v, 3);
    mem_free(buf);
    double bytes = (double)(large - few) * sizeof *buf;
    o->latency = v[0];
    o->byte = fmax(v[1] - v[0], 0) / bytes;
    o->own = fmax(v[2] - v[0], 0) / bytes;
}

void overlap_learn(struct overlap *o, int rows, double seconds)
{
    double row = seconds / (rows + o->dear);
    if (rows >= OVERLAP_ROWS)
        o->row = o->row > 0 ? 0.75 * o->row + 0.25 * row : row;
}

double overlap_gain(const struct overlap *o, int rows)
{
    double step = o->row * (rows + o->dear), bytes = o->sums * rows * o->row_bytes;
    double latency = o->sums * o->latency, transfer = bytes * o->byte;
    double products = fmax(step - transfer - latency, 0);
    /* Of each half the sum or the product of the other one is hidden, whichever is shorter. */
    double hidden = fmin(bytes * fmax(o->byte - o->own, 0), products);
    return hidden - o->row * o->dear - latency;
}

bool overlap_pays(const struct overlap *o, int rows)
{
    return rows >= OVERLAP_ROWS && o->row > 0 &&
           overlap_gain(o, rows) > OVERLAP_WORTH * o->row * (rows + o->dear);
}
