/* Divides layers into pipeline stages by cost: see stages.h. Knows shapes and formats, nothing of data or backends. */
#include "dist/stages.h"
#include "base/mem.h"
#include "file/tensorfile.h"

#include <math.h>
#include <string.h>

enum { HEAD_UNIT = 64 }; /* rows of the head are cut at multiples of this */

bool stages_spec_of_layer(const struct tensorfile *f, const struct config *c,
                          const struct tensor_spec *spec)
{
    const struct tensor_name *n = spec->rows[0].name;
    return spec->values || spec->layer >= c->n_layers ||
           strstr(f->is_gguf ? n->gguf : n->hf, "%d") != NULL;
}

bool stages_share_head(const struct network *net, const struct ranks *r)
{
    return r->pp > 1 && r->tp == 1 && r->comm.n_on_device == 0 && net->head.w && !net->mtp.fc &&
           net->head.w != net->embed.tokens && net->n_vocab >= 2 * HEAD_UNIT;
}

struct range stages_head(const struct ranks *r, int n_vocab)
{
    if (r->stage > 0 && r->stage < r->pp - 1)
        return (struct range){0, 0};
    return range_share(n_vocab, HEAD_UNIT, r->stage > 0, 2);
}

/* Bytes of the weight, or of one of its experts. Packed formats of checkpoint folders are counted as 4.5 bits a value. */
static double weight_bytes(const struct tensorfile *f, const struct config *c,
                           const struct tensor_spec *spec)
{
    double bytes = 0;
    for (int i = 0; i < spec->n_rows; i++) {
        const struct tensor *t = build_find(f, c, spec->rows[i].name, spec->layer, 0, "weight");
        double each = 4.5 / 8;
        if (t && dtype_is_weight(t->type)) {
            int len = dtype_table[t->type].block_len;
            each = (double)dtype_bytes(t->type, (size_t)len) / len;
        }
        bytes += each * spec->rows[i].n * spec->n_in;
    }
    return bytes;
}

/* The expected number of experts, of n, that STAGES_ROWS rows select at random. */
static double experts_met(const struct mlp *m, int n)
{
    int used = m->router.n_used < n ? m->router.n_used : n;
    return m->router.w ? n * (1 - pow(1 - (double)used / n, STAGES_ROWS)) : n;
}

/* Bytes that a step reads of a weight. The few rows of an embedding count as 0. */
static double cost_of(const struct tensorfile *f, const struct config *c, const struct network *net,
                      const struct tensor_spec *spec)
{
    bool experts = spec->role == WEIGHT_EXPERTS || spec->role == WEIGHT_EXPERTS_SHARED;
    if (!spec->w || (spec->role == WEIGHT_EMBED && spec->w != net->head.w))
        return 0;
    double times = spec->n_expert > 1 ? spec->n_expert : 1;
    if (experts && spec->net_layer < net->n_layers)
        times = experts_met(&net->layers[spec->net_layer].mlp, spec->n_expert);
    return floor(times * weight_bytes(f, c, spec));
}

/* The input of a cut. */
struct stage_input {
    const double *sums; /* (n + 1) prefix sums of the costs */
    const bool *joined;
    int n, pp;
    double front, back;
};

/* The cost of layers [j, i) as stage p. */
static double stage_cost(const struct stage_input *k, int p, int j, int i)
{
    return k->sums[i] - k->sums[j] + (p == 0 ? k->front : 0) + (p == k->pp - 1 ? k->back : 0);
}

/* Dynamic programming over table (pp, n + 1). Entry (p, i) is the minimum over all cuts of layers [0, i) into stages
 * 0..p: of the largest cost if most < 0, else of the sum of squared costs with no cost above `most`.
 * from (pp, n + 1): the first layer of stage p in that cut. */
static void fill_table(const struct stage_input *k, double most, double *table, int *from)
{
    size_t width = (size_t)k->n + 1;
    for (int p = 0; p < k->pp; p++)
        for (int i = 0; i <= k->n; i++) {
            double best = INFINITY;
            int at = 0;
            bool ends = i == k->n || (i > 0 && !k->joined[i]);
            /* Downwards, so that the cost only grows. Among equal cuts, earlier stages get more layers. */
            for (int j = i - 1; ends && j >= p; j--) {
                double cost = stage_cost(k, p, j, i);
                if (cost > (most >= 0 ? most : best))
                    break;
                if (p == 0 && j > 0)
                    continue;
                double before = p ? table[(size_t)(p - 1) * width + (size_t)j] : 0;
                double all = most >= 0 ? before + cost * cost : fmax(before, cost);
                if (all < best) {
                    best = all;
                    at = j;
                }
            }
            table[(size_t)p * width + (size_t)i] = best;
            from[(size_t)p * width + (size_t)i] = at;
        }
}

bool stages_cut(const double *cost, const bool *joined, int n, double front, double back, int pp,
                int *first)
{
    size_t cells = (size_t)pp * ((size_t)n + 1);
    double *sums = mem_zalloc((size_t)n + 1, sizeof *sums);
    double *table = mem_zalloc(cells, sizeof *table);
    int *from = mem_zalloc(cells, sizeof *from);
    for (int i = 0; i < n; i++)
        sums[i + 1] = sums[i] + cost[i];
    struct stage_input k = {sums, joined, n, pp, front, back};
    fill_table(&k, -1, table, from);
    double most = table[cells - 1];
    bool ok = isfinite(most);
    if (ok) /* the largest cost is minimal; now the others are evened out */
        fill_table(&k, most, table, from);
    for (int p = pp - 1, end = n; ok && p >= 0; p--)
        end = first[p] = from[(size_t)p * ((size_t)n + 1) + (size_t)end];
    mem_free(sums);
    mem_free(table);
    mem_free(from);
    return ok;
}

/* A layer that reads another layer's cache or choice of keys, runs in parallel with the one before, or adds its experts, must
 * be on the same stage. */
static void join_layers(const struct network *net, int depth, bool *joined)
{
    for (int i = 0; i < depth; i++) {
        const struct attention *a = &net->layers[i].mixer.attention;
        const struct indexer *x = mixer_index(&net->layers[i].mixer);
        joined[i] |= net->layers[i].mixer.block.parallel || (x && x->reuse) ||
                     (i > 0 && net->layers[i - 1].mlp.experts_late);
        if (net->layers[i].mixer.kind == MIXER_ATTENTION && a->shares_kv)
            for (int k = a->kv_layer + 1; k <= i; k++)
                joined[k] = true;
    }
}

bool stages_layers(const struct tensorfile *f, const struct config *c, const struct network *net,
                   const struct tensor_spec *specs, int n_specs, const struct ranks *r,
                   struct range *out, struct error *err)
{
    int depth = network_depth(net), first[RANKS_MOST];
    double front = 0, back = 0;
    if (depth < r->pp)
        return error_set(err, "--pp %d: the model has %d layers", r->pp, depth);
    double *cost = mem_zalloc((size_t)depth, sizeof *cost);
    bool *joined = mem_zalloc((size_t)depth, sizeof *joined), shared = stages_share_head(net, r);
    join_layers(net, depth, joined);
    for (int i = 0; i < n_specs; i++) {
        double reads = cost_of(f, c, net, &specs[i]);
        if (specs[i].w && specs[i].w == net->head.w) {
            front += shared ? reads / 2 : 0;
            back += shared ? reads / 2 : reads;
        } else if (stages_spec_of_layer(f, c, &specs[i])) {
            *(specs[i].net_layer < depth ? &cost[specs[i].net_layer] : &back) += reads;
        }
    }
    bool ok = stages_cut(cost, joined, depth, front, back, r->pp, first);
    if (ok) {
        int end = r->stage == r->pp - 1 ? depth : first[r->stage + 1];
        *out = (struct range){first[r->stage], end - first[r->stage]};
    } else {
        error_set(err, "--pp %d: too many layers read the cache of one which another stage has",
                  r->pp);
    }
    mem_free(cost);
    mem_free(joined);
    return ok;
}
