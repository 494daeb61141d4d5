/*
 * Routing of many rows: each row's experts (one warp per row) and the work list, made on the
 * device. Pairs (row, choice) are sorted by expert. The list says which block computes what; blocks
 * past its end exit at once, so the grid depends on the number of rows alone.
 * Limit: latency of a few dependent loads.
 */
#include "backend/cuda/core/rows.cuh"

#include <math.h>

int moe_route_tiles(int rows, int used, int n_expert, int width)
{
    int pairs = rows * used;
    int experts = pairs < n_expert ? pairs : n_expert;
    return experts + pairs / width;
}

size_t moe_route_ints(const struct model_shape *s)
{
    int pairs = s->max_tokens * s->n_expert_used;
    return 16 + 3 * (size_t)(s->n_expert + pairs / MOE_ROUTE_MIN_TILE + 1) + 2 * (size_t)pairs +
           (size_t)s->n_expert * (size_t)(2 + s->max_tokens) +
           (size_t)(pairs / MOE_ROUTE_MIN_TILE + 1) +
           (size_t)(s->n_expert + pairs / MOE_ROUTE_MIN_TILE + 1);
}

struct route_tables moe_route_tables(const struct cuda_backend *cu)
{
    const struct model_shape *s = &cu->shape;
    int pairs = s->max_tokens * s->n_expert_used;
    struct route_tables r;
    r.n_tiles = cu->routing.tables;
    r.tiles = cu->routing.tables + 16;
    r.pairs = r.tiles + 3 * (s->n_expert + pairs / MOE_ROUTE_MIN_TILE + 1);
    r.chosen = r.pairs + pairs;
    r.counts = r.chosen + pairs;
    r.places = r.counts + s->n_expert;
    r.room = s->max_tokens;
    r.lists = r.done = NULL;
    return r;
}

/* Compile-time knowledge of the rule: none, route_is_plain, route_rule.spread. */
enum { ROUTE_ANY, ROUTE_PLAIN, ROUTE_SPREAD };

/* One warp chooses for row t; lane k gets the k-th expert. ROUTE_SPREAD: -1 if the expert is on
 * another rank. */
template <int PER, int WHAT> DEVICE int moe_route_row(const struct moe_route_args &p, int t)
{
    int lane = lane_id(), n = p.rule.n_expert;
    const float *row = p.logits + (size_t)t * (size_t)n;
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        v[i] = e < n ? row[e] : -INFINITY;
        for (int j = 1; j < p.parts && e < n; j++)
            v[i] += row[(size_t)j * (size_t)p.rows * (size_t)n + (size_t)e];
    }
    const auto &rule = rule_as<WHAT == ROUTE_PLAIN>(p.rule);
    int e;
    float w;
    if constexpr (WHAT == ROUTE_SPREAD) {
        int here, mine = route_present(v, p.rule, &here);
        e = lane < here ? mine : -1;
        w = lane < here ? row[mine] : 0.0f;
    } else {
        e = route_choose(v, rule);
        w = route_weigh(rule, e, v);
    }
    if (lane < p.rule.used) {
        p.t.chosen[t * p.rule.used + lane] = e;
        p.weight[t * p.rule.used + lane] = w;
    }
    return e;
}

template <int WHAT> DEVICE int moe_route_choose(const struct moe_route_args &p, int t)
{
    return WHAT == ROUTE_PLAIN || p.rule.n_expert <= 128
               ? moe_route_row<4, WHAT>(p, t)
               : moe_route_row<MAX_EXPERTS / 32, WHAT>(p, t);
}

/* Writes the work list entries for `count` pairs of expert e, the first of which is `start`. */
DEVICE void list_tiles(const struct moe_route_args &p, int e, int count, int start, int tile0)
{
    for (int i = 0, n = (count + p.width - 1) / p.width; i < n; i++) {
        int32_t *t = p.t.tiles + 3 * (tile0 + i);
        int size = p.even ? ((count + n - 1) / n + 7) & ~7 : p.width;
        t[0] = e;
        t[1] = start + i * size;
        t[2] = min(size, count - i * size);
        if (p.t.lists)
            p.t.places[tile0 + i] = e * p.t.room + i * size;
    }
}

/* One warp: prefix sums of pairs and tiles over the experts. */
DEVICE void route_scan(const struct moe_route_args &p, const int *count, int *start, int *tile0)
{
    int lane = lane_id(), pairs = 0, tiles = 0;
    for (int e0 = 0; e0 < p.rule.n_expert; e0 += 32) {
        int e = e0 + lane, c = e < p.rule.n_expert ? count[e] : 0, t = (c + p.width - 1) / p.width;
        int sc = c, st = t;
        for (int d = 1; d < 32; d <<= 1) {
            int a = __shfl_up_sync(FULL_WARP, sc, d), b = __shfl_up_sync(FULL_WARP, st, d);
            if (lane >= d) {
                sc += a;
                st += b;
            }
        }
        if (e < p.rule.n_expert) {
            start[e] = pairs + sc - c;
            tile0[e] = tiles + st - t;
        }
        pairs += __shfl_sync(FULL_WARP, sc, 31);
        tiles += __shfl_sync(FULL_WARP, st, 31);
    }
    if (lane == 0)
        p.t.n_tiles[0] = tiles;
}

/* One warp per row, ROUTE_ROWS rows per block. With lists, pairs are appended to their expert's
 * list directly, in the order of the atomics (no result depends on it), and the last block to
 * finish writes the work list. */
enum { ROUTE_ROWS = 8 };

template <int WHAT>
static __global__ void __launch_bounds__(32 * ROUTE_ROWS)
    moe_route_kernel(const __grid_constant__ struct moe_route_args p)
{
    SHARED_BYTES(shared);
    int *count = (int *)shared, *start = count + MAX_EXPERTS, *tile0 = start + MAX_EXPERTS;
    int *last = tile0 + MAX_EXPERTS, tid = (int)threadIdx.x, threads = 32 * ROUTE_ROWS;
    const struct route_tables &r = p.t;
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.x * ROUTE_ROWS + warp_id(), e = 0, place = 0;
    bool mine = t < p.rows && lane_id() < p.rule.used;
    if (r.lists) {
        for (int i = tid; i < p.rule.n_expert; i += threads)
            count[i] = 0;
        __syncthreads();
    }
    if (t < p.rows)
        e = moe_route_choose<WHAT>(p, t);
    if (!r.lists)
        return;
    if (WHAT == ROUTE_SPREAD)
        mine = mine && e >= 0;
    if (mine)
        place = atomicAdd(&count[e], 1);
    __syncthreads();
    for (int i = tid; i < p.rule.n_expert; i += threads)
        start[i] = count[i] ? atomicAdd(&r.counts[i], count[i]) : 0;
    __syncthreads();
    if (mine)
        r.lists[e * r.room + start[e] + place] = t * p.rule.used + lane_id();
    __threadfence();
    __syncthreads();
    if (tid == 0)
        *last = atomicAdd(&r.n_tiles[1], 1) == (int)gridDim.x - 1;
    __syncthreads();
    if (!*last)
        return;
    for (int i = tid; i < p.rule.n_expert; i += threads) {
        count[i] = atomicAdd(&r.counts[i], 0);
        r.counts[i] = 0;
    }
    if (tid == 0)
        r.n_tiles[1] = r.n_tiles[2] = 0;
    __syncthreads();
    if (tid < 32)
        route_scan(p, count, start, tile0);
    __syncthreads();
    for (int i = tid; i < p.rule.n_expert; i += threads) {
        list_tiles(p, i, count[i], start[i], tile0[i]);
        for (int j = 0; j < (count[i] + p.width - 1) / p.width; j++)
            r.done[tile0[i] + j] = 0;
    }
}

/* One block: counts pairs per expert, places experts one after another, and writes the work list.
 * The order of an expert's rows depends on the atomics. No result depends on it. */
template <int WHAT>
static __global__ void __launch_bounds__(1024)
    moe_route_sort_kernel(const __grid_constant__ struct moe_route_args p)
{
    SHARED_BYTES(shared);
    int *count = (int *)shared, *start = count + MAX_EXPERTS, *tile0 = start + MAX_EXPERTS + 1;
    int n = p.rows * p.rule.used, tid = (int)threadIdx.x, threads = (int)blockDim.x;
    dependency_wait();
    dependency_trigger();
    for (int i = tid; i < MAX_EXPERTS; i += threads)
        count[i] = 0;
    __syncthreads();
    enum { AT_ONCE = 8 }; /* loads in flight */
    auto each_pair = [&](auto use) {
        for (int i0 = tid; i0 < n; i0 += AT_ONCE * threads) {
            int e[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                e[j] = i0 + j * threads < n ? p.t.chosen[i0 + j * threads] : -1;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (e[j] >= 0)
                    use(e[j], i0 + j * threads);
        }
    };
    each_pair([&](int e, int) { atomicAdd(&count[e], 1); });
    __syncthreads();
    if (tid < 32)
        route_scan(p, count, start, tile0);
    __syncthreads();
    for (int e = tid; e < p.rule.n_expert; e += threads)
        list_tiles(p, e, count[e], start[e], tile0[e]);
    __syncthreads();
    each_pair([&](int e, int i) { p.t.pairs[atomicAdd(&start[e], 1)] = i; });
    if (WHAT == ROUTE_SPREAD) { /* lanes past the row's experts on this rank have none */
        __syncthreads();
        for (int i = start[p.rule.n_expert - 1] + tid; i < n; i += threads)
            p.t.pairs[i] = -1;
    }
}

void moe_route(struct cuda_backend *cu, const struct moe_route_args &p)
{
    bool plain = route_is_plain(p.rule), spread = p.rule.spread;
    cuda_launch(cu,
                plain    ? moe_route_kernel<ROUTE_PLAIN>
                : spread ? moe_route_kernel<ROUTE_SPREAD>
                         : moe_route_kernel<ROUTE_ANY>,
                dim3((unsigned)ceil_div(p.rows, ROUTE_ROWS)), 32 * ROUTE_ROWS,
                (size_t)(3 * MAX_EXPERTS + 1) * 4, LAUNCH_EARLY, p);
    if (!p.t.lists)
        cuda_launch(cu,
                    plain    ? moe_route_sort_kernel<ROUTE_PLAIN>
                    : spread ? moe_route_sort_kernel<ROUTE_SPREAD>
                             : moe_route_sort_kernel<ROUTE_ANY>,
                    dim3(1), 1024, (size_t)(3 * MAX_EXPERTS + 2) * 4, LAUNCH_EARLY, p);
}
