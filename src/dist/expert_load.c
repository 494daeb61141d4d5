/* Balances experts by load: see expert_load.h. Knows counts and ranks, nothing of weights. */
#include "dist/expert_load.h"
#include "base/mem.h"
#include "dist/ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A layer's counts (n), from the first of its expert tensors that has some. NULL: the file has none. */
static const struct tensor *find_counts(const struct tensorfile *f, int layer)
{
    static const char *const names[] = {"gate_exps", "up_exps", "gate_up_exps", "down_exps"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char name[96];
        snprintf(name, sizeof name, "blk.%d.ffn_%s.weight.counts", layer, names[i]);
        const struct tensor *t = tensorfile_find(f, name);
        if (t)
            return t;
    }
    return NULL;
}

/* Greedy: assigns each item, largest load first, to the least loaded rank that has room. */
static void assign(const double *load, int n, int tp, int *rank_of)
{
    double sum[RANKS_MOST] = {0};
    int has[RANKS_MOST] = {0};
    for (int i = 0; i < n; i++)
        rank_of[i] = -1;
    for (int k = 0; k < n; k++) {
        int next = -1, to = -1;
        for (int i = 0; i < n; i++)
            if (rank_of[i] < 0 && (next < 0 || load[i] > load[next]))
                next = i;
        for (int t = 0; t < tp; t++)
            if (has[t] < range_share(n, 1, t, tp).n && (to < 0 || sum[t] < sum[to]))
                to = t;
        rank_of[next] = to;
        sum[to] += load[next];
        has[to]++;
    }
}

void expert_load_share(const float *counts, int n, int n_groups, int tp, int32_t *order)
{
    int groups = n_groups > 1 ? n_groups : n, each = n / groups, at = 0;
    bool whole = n_groups > 1 && (groups % tp || n % groups);
    double *load = mem_zalloc((size_t)groups, sizeof *load);
    int *rank_of = mem_zalloc((size_t)groups, sizeof *rank_of);
    for (int i = 0; !whole && i < n; i++)
        load[i / each] += (double)counts[i];
    if (!whole)
        assign(load, groups, tp, rank_of);
    for (int t = 0; t < (whole ? 1 : tp); t++)
        for (int i = 0; i < n; i++)
            if (whole || rank_of[i / each] == t)
                order[at++] = i;
    mem_free(load);
    mem_free(rank_of);
}

bool expert_load_order(const struct tensorfile *stats, int layer, const struct router *router,
                       int n, int tp, int32_t *order, struct error *err)
{
    const struct tensor *t = find_counts(stats, layer);
    for (int i = 0; i < n; i++)
        order[i] = i;
    if (!t)
        return true;
    if (t->type != DT_F32 || t->bytes != (size_t)n * sizeof(float))
        return error_set(err, "%s: tensor %.200s: not the counts of %d experts as F32", stats->path,
                         t->name, n);
    float *counts = mem_alloc(t->bytes);
    memcpy(counts, t->data, t->bytes);
    bool ok = true;
    for (int i = 0; ok && i < n; i++)
        if (!isfinite(counts[i]) || counts[i] < 0)
            ok = error_set(err, "%s: tensor %.200s: count %d is negative or not finite",
                           stats->path, t->name, i);
    if (ok)
        expert_load_share(counts, n, router->n_groups, tp, order);
    mem_free(counts);
    return ok;
}
