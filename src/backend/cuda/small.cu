/*
 * Steps of one row, or a few: bound by reads, and below them by latency, since a layer is a few microseconds.
 * A kernel has one block to an SM. A block owns 16 output rows at a time; its warps cut k between
 * them, 256 columns ("a slice") each. A warp turns its slice of the row into what products take
 * (dot.cuh), once for all rows of the block, and works through its tiles as they land in shared
 * memory; the block meets only to add up. What does not depend on the step (all weights but experts') is on
 * its way before the kernel in front has finished, and what the end needs to know is looked up
 * before the wait.
 *
 * A norm in front of a product is folded in: the gain goes into the activations, the sum of squares
 * is gathered on the side and divides the sums at the end.
 *
 * Registers are bounded without spilling: a spilled value is a trip to memory of its own, which
 * costs more than the product of a tile.
 */
#include "backend/cuda/dot.cuh"

#include <math.h>

enum { MAX_WARPS = 16, MAX_USED = 16, MAX_EXPERTS = 512, EXPERT_WARPS = 8 };

/* This lane's columns of slice `slice` of a row: see dot.cuh. n is a multiple of 8; zeros from there
 * on. */
DEVICE int lane_column(int slice)
{
    return slice * TILE_K + (lane_id() >> 2) * 32 + (lane_id() & 3) * 4;
}
DEVICE void load_lane(const float *p, int slice, int n, float (&v)[8])
{
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int k = lane_column(slice);
    float4 a = k < n ? *(const float4 *)(p + k) : zero;
    float4 b = k + 16 < n ? *(const float4 *)(p + k + 16) : zero;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void store_lane(float *p, int slice, int n, const float (&v)[8])
{
    int k = lane_column(slice);
    if (k < n)
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
    if (k + 16 < n)
        *(float4 *)(p + k + 16) = make_float4(v[4], v[5], v[6], v[7]);
}

/* Shared memory: rings, their barriers, sums, squares. */
enum {
    BATCH = 8, /* most tiles between two meetings */
    STAGES = 8,
    BARRIERS = STAGES + 2, /* of a warp: the ring's, one for the gains; 16 bytes a pair */
    SHARES = 64            /* floats of a tile's sums in one warp */
};

struct small_shape {
    int warps, stages, slot; /* slot: bytes of a ring entry */
    int batch, sums; /* tiles between two meetings; sets of sums: 2, or 1 if there is one batch */
};

static size_t small_shared(const struct small_shape &s)
{
    return (size_t)s.warps *
           (size_t)(s.stages * s.slot + BARRIERS * 8 + (s.sums * s.batch * SHARES + 4) * 4);
}

/* A warp's tiles, on their way or there, in the order they were asked for. */
struct ring {
    uint8_t *base;
    uint64_t *bar;               /* (BARRIERS) */
    int slot, stages, put, take; /* slot: bytes from one entry to the next */
    uint32_t parity;
};

struct small_smem {
    struct ring ring;
    float *extra;   /* behind all the rest */
    float *sums;    /* (sums, warps, batch, SHARES) */
    float *squares; /* (warps, 4) */
};

DEVICE struct small_smem small_carve(uint8_t *base, const struct small_shape &s)
{
    struct small_smem m;
    m.ring.base = base + warp_id() * s.slot;
    m.ring.bar = (uint64_t *)(base + s.warps * s.stages * s.slot) + warp_id() * BARRIERS;
    m.ring.slot = s.slot * s.warps;
    m.ring.stages = s.stages;
    m.ring.put = m.ring.take = 0;
    m.ring.parity = 0;
    m.sums = (float *)(base + s.warps * (s.stages * s.slot + BARRIERS * 8));
    m.squares = m.sums + s.sums * s.warps * s.batch * SHARES;
    m.extra = m.squares + 4 * s.warps;
#if BULK_COPIES
    if (lane_id() < BARRIERS)
        bulk_init(m.ring.bar + lane_id());
    __syncwarp();
#endif
    return m;
}

/* Asks for a tile; bytes 0: for nothing, which counts (once there is no more to ask for). */
DEVICE void ring_put(struct ring &r, const uint8_t *from, int bytes)
{
#if BULK_COPIES
    if (lane_id() == 0 && bytes)
        bulk_copy(r.base + r.put * r.slot, from, bytes, r.bar + r.put);
#else
    if (bytes)
        tile_fetch(r.base + r.put * r.slot, from, bytes);
    copy_async_commit();
#endif
    r.put = r.put + 1 == r.stages ? 0 : r.put + 1;
}

/* Asks for the first tiles of an empty ring: lane n has where number n lies and its size (0: there
 * is none). */
DEVICE void ring_fill(struct ring &r, const uint8_t *from, int bytes)
{
#if BULK_COPIES
    int n = lane_id();
    if (n < r.stages && bytes)
        bulk_copy(r.base + n * r.slot, from, bytes, r.bar + n);
#else
    for (int n = 0; n < r.stages; n++)
        ring_put(r, (const uint8_t *)__shfl_sync(FULL_WARP, (uint64_t)from, n),
                 __shfl_sync(FULL_WARP, bytes, n));
#endif
}

/* The oldest tile, once it is there. */
DEVICE const uint8_t *ring_get(struct ring &r)
{
#if BULK_COPIES
    bulk_wait(r.bar + r.take, r.parity);
#else
    /* As many groups are under way as there are stages, and the oldest is wanted. */
    if (r.stages >= 4)
        copy_async_wait<3>();
    else if (r.stages == 3)
        copy_async_wait<2>();
    else if (r.stages == 2)
        copy_async_wait<1>();
    else
        copy_async_wait<0>();
    __syncwarp();
#endif
    return r.base + r.take * r.slot;
}

/* The one after it, once it is there. */
DEVICE const uint8_t *ring_get_next(struct ring &r)
{
    struct ring n = r;
    if (++n.take == n.stages) {
        n.take = 0;
        n.parity ^= 1;
    }
#if !BULK_COPIES
    copy_async_wait<0>();
    __syncwarp();
#endif
    return ring_get(n);
}

/* Every lane is done with it. */
DEVICE void ring_drop(struct ring &r)
{
    __syncwarp();
    if (++r.take == r.stages) {
        r.take = 0;
        r.parity ^= 1;
    }
}

/* A lane's share of rows g and g+8 of a tile. Quads hold a row; nobody adds them up before the end. */
DEVICE void put_sums(float *to, const float (&sum)[2])
{
    to[lane_id()] = sum[0];
    to[lane_id() + 32] = sum[1];
}

DEVICE void add_sums(float *to, const float (&sum)[2])
{
    to[lane_id()] += sum[0];
    to[lane_id() + 32] += sum[1];
}

/* Row i of a tile: adds up every warp's shares, which are `stride` apart. */
DEVICE float take_sum(const float *sums, int warps, int stride, int i)
{
    float v = 0.0f;
#pragma unroll 8
    for (int w = 0; w < warps; w++) {
        float4 q = *(const float4 *)(sums + w * stride + 4 * i);
        v += (q.x + q.y) + (q.z + q.w);
    }
    return v;
}

/* Row `row` of what goes in. */
DEVICE struct norm_in norm_row(struct norm_in in, int row, int n)
{
    size_t at = (size_t)row * (size_t)n;
    in.x += at;
    in.d += in.d ? at : 0;
    in.x_out += in.x_out ? at : 0;
    return in;
}

/* How experts are chosen. */
struct route_rule {
    int n_expert, used;
    bool renormalise;
    float scale;
};

/* The experts a row chose, as a warp finds them, largest logit first: every warp for itself, since
 * meeting the others would take longer. The order is that of the logits' upper 32 - BITS bits (their
 * difference from the rest is below what rounding upstream makes of them), then of the lower index:
 * both in one integer, so that one reduction finds the next. PER: logits a lane holds. */
template <int PER, int BITS> struct chooser {
    uint32_t key[PER]; /* PER 4: in order, largest first */
};

template <int PER, int BITS>
DEVICE void chooser_start(struct chooser<PER, BITS> &c, const float *logits, int n_expert)
{
    const uint32_t low = (1u << BITS) - 1;
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = i * 32 + lane_id() < n_expert ? load_float_l2(logits + i * 32 + lane_id()) : 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane_id();
        c.key[i] = e < n_expert ? (float_order(v[i]) & ~low) | (low - (uint32_t)e) : 0;
    }
    auto swap = [&](int i, int j) {
        uint32_t a = c.key[i], b = c.key[j];
        c.key[i] = a > b ? a : b;
        c.key[j] = a > b ? b : a;
    };
    if (PER == 4)
        swap(0, 1), swap(2, 3), swap(0, 2), swap(1, 3), swap(1, 2);
}

/* The next expert, the same for every lane. */
template <int PER, int BITS> DEVICE int chooser_next(struct chooser<PER, BITS> &c, int n_expert)
{
    const uint32_t low = (1u << BITS) - 1;
    uint32_t best = c.key[0];
    if (PER == 4) {
        best = warp_max_u32(best);
        bool mine = c.key[0] == best;
#pragma unroll
        for (int i = 0; i < PER; i++)
            c.key[i] = mine ? (i + 1 < PER ? c.key[(i + 1) % PER] : 0) : c.key[i];
    } else {
#pragma unroll
        for (int i = 1; i < PER; i++)
            best = c.key[i] > best ? c.key[i] : best;
        best = warp_max_u32(best);
#pragma unroll
        for (int i = 0; i < PER; i++)
            c.key[i] = c.key[i] == best ? 0 : c.key[i];
    }
    return min((int)(low - (best & low)), n_expert - 1);
}

/* The expert chosen as number `pick`; lane k gets number k as *all, of the first `n`. */
template <int PER, int BITS>
DEVICE int choose_with(const float *logits, const struct route_rule &rule, int pick, int n,
                       int *all)
{
    struct chooser<PER, BITS> c;
    chooser_start(c, logits, rule.n_expert);
    int found = 0;
#pragma unroll 1
    for (int k = 0; k < n; k++) {
        int e = chooser_next(c, rule.n_expert);
        found = k == pick ? e : found;
        *all = k == lane_id() ? e : *all;
    }
    return found;
}

DEVICE int choose(const float *logits, const struct route_rule &rule, int pick, int n, int *all)
{
    *all = 0;
    if (rule.n_expert <= 128)
        return choose_with<4, 7>(logits, rule, pick, n, all);
    return choose_with<MAX_EXPERTS / 32, 9>(logits, rule, pick, n, all);
}

/* The weight of the expert lane k knows to be number k. */
DEVICE float weigh(const float *logits, const struct route_rule &rule, int expert)
{
    int lane = lane_id();
    float v = load_float_l2(logits + expert), top = __shfl_sync(FULL_WARP, v, 0);
    float w = lane < rule.used ? fast_exp(v - top) : 0.0f;
    float total = rule.renormalise ? w : 0.0f;
    if (!rule.renormalise)
#pragma unroll 1
        for (int e = lane; e < rule.n_expert; e += 32)
            total += fast_exp(load_float_l2(logits + e) - top);
    return w / warp_sum(total) * rule.scale;
}

/* y = [norm](x) W^T (+ bias); blockIdx.y is the row. Tiles come in batches of BATCH at most (PAIR: gate and up
 * of the same rows by turns, and y = silu(gate) up). EXPERT: W is the expert that the row chose;
 * blockIdx.y is (row, number of the choice), and so are y's rows. */
struct small_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int n_units, units_per_block; /* units: tiles, or pairs */
    struct small_shape s;
    float inv_n;         /* 1 / n_in */
    const float *logits; /* EXPERT: (rows, n_expert) */
    struct route_rule rule;
};

enum mode { PLAIN, NORM, EXPERT };

/* The bound on threads is one on registers (PLAIN: 80), so that other kernels find room beside it. */
template <int SET, bool PAIR, int MODE>
static __global__ void __launch_bounds__(MODE == PLAIN ? 768 : 512)
    small_kernel(const __grid_constant__ struct small_args p)
{
    enum { TILES = PAIR ? 2 : 1 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int warps = p.s.warps, stages = p.s.stages, n_in = p.w.n_in;
    int row_in = MODE == EXPERT ? (int)blockIdx.y / p.rule.used : (int)blockIdx.y;
    const struct norm_in in = norm_row(p.in, row_in, n_in);
    float *y = p.y + (size_t)blockIdx.y * (size_t)(p.w.n_out / TILES);
    struct small_smem m = small_carve(shared, p.s);
    int warp = warp_id(), lane = lane_id();
    int first = (int)blockIdx.x * p.units_per_block * TILES;
    int end = min(first + p.units_per_block * TILES, p.n_units * TILES);
    int most = p.s.batch; /* a thread for every row of a batch */

    /* In order: batches of tiles (PAIR: gate, up, gate, up), slices of this warp, tiles of the batch; so
     * what is made of a slice of the row serves a whole batch. */
    auto tile_of = [&](int n) { return PAIR ? (n >> 1) + (n & 1) * p.n_units : n; };
    int f_first = first, f_slice = warp, f_b = 0, expert = 0; /* what is fetched next */
    auto go_to = [&](int n) {
        int each = (p.w.n_kt - warp + warps - 1) / warps, k = n / (each * most);
        f_first = min(first + k * most, end);
        int batch = max(min(most, end - f_first), 1), rest = n - k * each * most;
        f_slice = warp + rest / batch * warps;
        f_b = rest % batch;
        if (f_slice >= p.w.n_kt)
            f_first = end;
    };
    auto next = [&](int *bytes, size_t *expert_bytes) {
        int tile = tile_of(f_first + f_b);
        const struct seg *s = seg_of(p.w, tile);
        *bytes = s->tile_bytes;
        *expert_bytes = s->expert_bytes;
        return tile_address(p.w, s, expert, tile, f_slice);
    };
    const uint8_t *from0 = NULL; /* the first ones, a lane each; expert 0's */
    int bytes0 = 0;
    size_t expert_bytes = 0;
    go_to(lane);
    if (f_first < end)
        from0 = next(&bytes0, &expert_bytes);
    go_to(stages);
    auto fetch = [&]() {
        const uint8_t *from = NULL;
        int bytes = 0;
        size_t unused;
        if (f_first < end) {
            from = next(&bytes, &unused);
            if (++f_b == min(most, end - f_first)) {
                f_b = 0;
                f_slice += warps;
                if (f_slice >= p.w.n_kt) {
                    f_slice = warp;
                    f_first += most;
                }
            }
        }
        ring_put(m.ring, from, bytes);
    };
    /* Where this thread's row of the batch from `tile` on goes, and its biases; known a batch ahead. */
    float *to = NULL, bias[TILES] = {};
    uint32_t six = 0; /* SET_K: which tiles of the batch are Q6_K */
    auto locate = [&](int tile) {
        if (SET == SET_K)
            six =
                __ballot_sync(FULL_WARP, lane < min(most, end - tile) &&
                                             seg_of(p.w, tile_of(tile + lane))->kind == TILE_Q6_K);
        int unit = (int)(threadIdx.x >> 4) * TILES;
        to = NULL;
        if (unit >= min(most, end - tile))
            return;
        int t = tile_of(tile + unit);
        const struct seg *s = seg_of(p.w, t);
        int row = (t - s->tile0) * TILE_ROWS + (int)(threadIdx.x & 15);
        if (row >= s->rows)
            return;
        to = y + s->row0 + row;
        if (p.w.bias)
#pragma unroll
            for (int i = 0; i < TILES; i++)
                bias[i] = p.w.bias[s->row0 + row + i * (p.w.n_out / 2)];
    };
    float v[8];
    if (MODE != EXPERT) {
        ring_fill(m.ring, from0, bytes0);
        dependency_trigger();
    }
    locate(first);
#if BULK_COPIES
    uint64_t *gain_bar = m.ring.bar + STAGES;
    if (MODE == NORM && lane == 0) {
        int total = 0;
        for (int k = warp * TILE_K; k < n_in; k += warps * TILE_K)
            total += min((int)TILE_K, n_in - k) * 4;
        bulk_expect(gain_bar, total);
        for (int k = warp * TILE_K; k < n_in; k += warps * TILE_K)
            bulk_piece(m.extra + k, in.gain + k, min((int)TILE_K, n_in - k) * 4, gain_bar);
    }
#endif
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    load_lane(in.x, warp, n_in, v);
    float d[8] = {}; /* one trip for both */
    if (MODE == NORM && in.d)
        load_lane(in.d, warp, n_in, d);
    if (MODE == EXPERT) {
        dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
        int all, pick = (int)blockIdx.y - row_in * p.rule.used;
        expert = choose(p.logits + row_in * p.rule.n_expert, p.rule, pick, pick + 1, &all);
        mark(mk, 4);
        ring_fill(m.ring, from0 + (size_t)expert * expert_bytes, bytes0);
        mark(mk, 1);
    }

    typename slice_of<SET>::type x = {};
    float squares = 0.0f;
    int staged = -1, odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end;) {
        int batch = min(most, end - tile), stride = most * SHARES;
        float *sums = m.sums + odd * warps * stride;
#pragma unroll 1
        for (int slice = warp; slice < p.w.n_kt; slice += warps) {
            if (slice != staged) {
                if (staged >= 0 && slice == warp)
                    load_lane(in.x, slice, n_in, v); /* else it is there, or on its way */
                if (MODE == NORM) {
                    float gain[8];
                    if (staged >= 0 && in.d)
                        load_lane(in.d, slice, n_in, d);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        v[j] += d[j];
#if BULK_COPIES
                    bulk_wait(gain_bar, 0);
                    load_lane(m.extra, slice, n_in, gain);
#else
                    load_lane(in.gain, slice, n_in, gain);
#endif
                    if (tile == first) {
                        if (blockIdx.x == 0 && in.x_out)
                            store_lane(in.x_out, slice, n_in, v);
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            squares += v[j] * v[j];
                    }
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        v[j] *= gain[j];
                }
                staged = slice;
                slice_make(x, v);
                if (slice + warps < p.w.n_kt)
                    load_lane(in.x, slice + warps, n_in, v);
                if (MODE != EXPERT && slice == warp)
                    mark(mk, 4);
            }
#pragma unroll 1
            for (int b = 0; b < batch; b++) {
                float sum[2] = {}, *shares = sums + warp * stride + b * SHARES;
                if (SET == SET_K && MODE != PLAIN && b + 1 < batch && stages > 1 &&
                    !(six >> b & 3)) {
                    if constexpr (SET == SET_K) { /* two at a time: neither waits for the other */
                        float sum2[2] = {};
                        const uint8_t *one = ring_get(m.ring), *two = ring_get_next(m.ring);
                        if (tile + b == first && slice == warp)
                            mark(mk, 5);
                        tile_dot(false, one, x, 1.0f, sum);
                        tile_dot(false, two, x, 1.0f, sum2);
                        if (slice != warp) {
                            add_sums(shares, sum);
                            add_sums(shares + SHARES, sum2);
                        } else {
                            put_sums(shares, sum);
                            put_sums(shares + SHARES, sum2);
                        }
                        ring_drop(m.ring);
                        ring_drop(m.ring);
                        fetch();
                        fetch();
                        b++;
                        continue;
                    }
                }
                const uint8_t *there = ring_get(m.ring);
                if (tile + b == first && slice == warp)
                    mark(mk, 5);
                if constexpr (SET == SET_K)
                    tile_dot(six >> b & 1, there, x, 1.0f, sum);
                else
                    tile_dot<SET>(seg_of(p.w, tile_of(tile + b)), there, x, 1.0f, sum);
                if (slice != warp)
                    add_sums(shares, sum);
                else
                    put_sums(shares, sum);
                ring_drop(m.ring);
                fetch();
            }
        }
        mark(mk, 6);
        if (tile == first && MODE == NORM) {
#pragma unroll
            for (int i = 16; i >= 4; i >>= 1)
                squares += __shfl_xor_sync(FULL_WARP, squares, i);
            if (lane < 4)
                m.squares[4 * warp + lane] = squares;
        }
        odd ^= 1;
        __syncthreads();
        mark(mk, 7);
        if (to) {
            const float *from = sums + (int)(threadIdx.x >> 4) * TILES * SHARES;
            int row = (int)(threadIdx.x & 15);
            float scale = 1.0f;
            if (MODE == NORM)
                scale = rsqrtf(take_sum(m.squares, warps, 4, 0) * p.inv_n + in.eps);
            float r = take_sum(from, warps, stride, row) * scale + bias[0];
            if (PAIR)
                r = silu(r) *
                    (take_sum(from + SHARES, warps, stride, row) * scale + bias[TILES - 1]);
            *to = r;
        }
        tile += batch;
        if (tile < end)
            locate(tile);
    }
    copy_async_wait<0>();
    marks_end(mk, MODE == EXPERT ? 5 : PAIR ? 2 : MODE == NORM ? 1 : 3);
}

/* tiles: of a block; per_warp: of a warp, all slices of them; extra: bytes the kernel wants besides. What
 * is in flight leaves room for another kernel, so that the next one's first tiles are under way
 * before this one ends. */
static struct small_shape small_plan(const struct cuda_backend *cu, const struct matrix *w,
                                     int warps, int tiles, int per_warp, size_t extra)
{
    struct small_shape s;
    int most = 2 * warps < BATCH ? 2 * warps : BATCH;                  /* a thread for every row */
    int stages = cu->sm >= 90 ? STAGES : 4;                            /* see ring_get */
    s.batch = tiles <= most ? tiles : most >= 4 ? most / 4 * 2 : most; /* even: pairs */
    s.sums = tiles > s.batch ? 2 : 1;
    s.warps = warps;
    s.slot = w->max_tile_bytes;
    s.stages = per_warp < stages ? per_warp : stages;
    while (s.stages > 1 &&
           (warps * s.stages * s.slot > 116 << 10 || small_shared(s) + extra > cu->shared_limit))
        s.stages--;
    return s;
}

#define LAUNCH_SMALL(...)                                                                          \
    do {                                                                                           \
        int threads = p.s.warps * 32;                                                              \
        size_t shared = small_shared(p.s) + extra;                                                 \
        if (p.w.set == SET_ALL)                                                                    \
            cuda_launch(cu, small_kernel<SET_ALL, __VA_ARGS__>, grid, threads, shared,             \
                        LAUNCH_EARLY, p);                                                          \
        else if (p.w.set == SET_FAST)                                                              \
            cuda_launch(cu, small_kernel<SET_FAST, __VA_ARGS__>, grid, threads, shared,            \
                        LAUNCH_EARLY, p);                                                          \
        else                                                                                       \
            cuda_launch(cu, small_kernel<SET_K, __VA_ARGS__>, grid, threads, shared, LAUNCH_EARLY, \
                        p);                                                                        \
    } while (0)

template <bool PAIR>
static void small_launch(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                         float *y, int rows)
{
    int warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS, units = w->n_tiles / (PAIR ? 2 : 1);
    for (;; warps = (warps + 1) / 2) { /* large tiles, little shared memory: fewer warps */
        struct small_shape least = {warps, 1, w->max_tile_bytes, BATCH, 2};
        if (warps == 1 || (small_shared(least) + (size_t)w->n_kt * TILE_K * 4 <= cu->shared_limit &&
                           (w->set != SET_ALL || warps <= 8)))
            break;
    }
    /* One block to an SM: its warps share what they make of the row over many tiles. */
    int per_block = ceil_div(units * rows, cu->n_sm);
    per_block = per_block < units ? per_block : units;
    struct small_args p = {};
    p.w = *w;
    p.in = *in;
    p.y = y;
    p.n_units = units;
    p.units_per_block = per_block;
    int tiles = per_block * (PAIR ? 2 : 1);
    size_t extra = in->gain ? (size_t)w->n_kt * TILE_K * 4 : 0; /* the gains */
    p.s = small_plan(cu, w, warps, tiles, tiles * ceil_div(w->n_kt, warps), extra);
    p.inv_n = 1.0f / (float)w->n_in;
    dim3 grid((unsigned)ceil_div(units, per_block), (unsigned)rows);
    if (in->gain)
        LAUNCH_SMALL(PAIR, NORM);
    else
        LAUNCH_SMALL(PAIR, PLAIN);
}

void small_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *y, int rows)
{
    small_launch<false>(cu, w, in, y, rows);
}

void small_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
               const struct norm_in *in, float *y, int rows)
{
    small_launch<true>(cu, gate_up, in, cu->hidden, rows);
    struct norm_in plain = {};
    plain.x = cu->hidden;
    small_launch<false>(cu, down, &plain, y, rows);
}

/* Mixture of experts */

struct expert_args {
    struct matrix w;
    const float *logits; /* (rows, n_expert) */
    const float *x;      /* hidden (rows, used, n_in) */
    float *y;            /* (rows, n_embd) */
    struct route_rule rule;
    struct small_shape s;
};

/* y = sum over the chosen of weight * hidden Wd^T; blockIdx.y is the row. A block owns 16 output
 * rows; its warps share out the (expert, slice) pairs. Few threads and registers, so that it is resident, with its weights on
 * the way, while the kernel in front still runs. */
template <int SET>
static __global__ void __launch_bounds__(EXPERT_WARPS * 32, SET == SET_ALL ? 1 : 2)
    expert_down_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int stages = p.s.stages;
    struct small_smem m = small_carve(shared, p.s);
    int warp = warp_id(), tile = (int)blockIdx.x;
    const struct seg *s = seg_of(p.w, tile);
    int n_in = p.w.n_in, n_kt = p.w.n_kt, used = p.rule.used, row_in = (int)blockIdx.y;
    const float *x_row = p.x + (size_t)(row_in * used) * (size_t)n_in;

    dependency_trigger();
    /* The logits were written two kernels ago: see expert_up_kernel. */
    const float *logits = p.logits + row_in * p.rule.n_expert;
    int all;
    choose(logits, p.rule, 0, used, &all);
    /* A warp takes every eighth expert, slice by slice. */
    auto address = [&](int n, int *bytes) {
        int pick = warp + n / n_kt * EXPERT_WARPS;
        int e = __shfl_sync(FULL_WARP, all, pick & 31);
        *bytes = pick < used ? s->tile_bytes : 0;
        return tile_address(p.w, s, e, tile, n % n_kt);
    };
    int bytes, next = stages, total = (used - warp + EXPERT_WARPS - 1) / EXPERT_WARPS * n_kt;
    bool six = s->kind == TILE_Q6_K;
    const uint8_t *from = address(lane_id(), &bytes);
    ring_fill(m.ring, from, bytes);
    float weights = weigh(logits, p.rule, all);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);

    /* The hidden units of the next AHEAD slices are on their way: one trip for all of them. */
    enum { AHEAD = 3 };
    float sum[2] = {}, v[AHEAD][8] = {};
    int l_pick = warp, l_kt = 0;
    auto load = [&](float(&to)[8]) {
        if (l_pick >= used)
            return;
        load_lane(x_row + (size_t)l_pick * (size_t)n_in, l_kt, n_in, to);
        if (++l_kt == n_kt) {
            l_kt = 0;
            l_pick += EXPERT_WARPS;
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        load(v[i]);
    typename slice_of<SET>::type x, next_x; /* the next is made while this one is worked on */
    slice_make(x, v[0]);
#pragma unroll 1
    for (int n = 0, pick = warp, kt = 0; n < total; n++) {
        float weight = __shfl_sync(FULL_WARP, weights, pick);
        if (++kt == n_kt) {
            kt = 0;
            pick += EXPERT_WARPS;
        }
#pragma unroll
        for (int i = 0; i < 8 * (AHEAD - 1); i++)
            v[i / 8][i % 8] = v[i / 8 + 1][i % 8];
        load(v[AHEAD - 1]);
        if (n == 0)
            mark(mk, 4);
        const uint8_t *there = ring_get(m.ring);
        if (n == 0)
            mark(mk, 5);
        slice_make(next_x, v[0]);
        if constexpr (SET == SET_K)
            tile_dot(six, there, x, weight, sum);
        else
            tile_dot<SET>(s, there, x, weight, sum);
        x = next_x;
        ring_drop(m.ring);
        bytes = 0;
        if (next < total)
            from = address(next++, &bytes);
        ring_put(m.ring, from, bytes);
    }
    copy_async_wait<0>();
    mark(mk, 6);
    put_sums(m.sums + warp * SHARES, sum);
    __syncthreads();
    mark(mk, 7);
    int r = (int)threadIdx.x, row = (tile - s->tile0) * TILE_ROWS + r;
    if (r < TILE_ROWS && row < s->rows)
        p.y[(size_t)row_in * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
            take_sum(m.sums, EXPERT_WARPS, SHARES, r);
    marks_end(mk, 6);
}

#define LAUNCH_EXPERTS(kernel, args)                                                               \
    do {                                                                                           \
        int threads = EXPERT_WARPS * 32;                                                           \
        if ((args).w.set == SET_ALL)                                                               \
            cuda_launch(cu, kernel<SET_ALL>, grid, threads, shared, LAUNCH_EARLY, args);           \
        else if ((args).w.set == SET_FAST)                                                         \
            cuda_launch(cu, kernel<SET_FAST>, grid, threads, shared, LAUNCH_EARLY, args);          \
        else                                                                                       \
            cuda_launch(cu, kernel<SET_K>, grid, threads, shared, LAUNCH_EARLY, args);             \
    } while (0)

bool small_moe_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                    const struct matrix *down)
{
    struct small_shape a = {EXPERT_WARPS, 1, gate_up->max_tile_bytes, BATCH, 2};
    struct small_shape b = {EXPERT_WARPS, 1, down->max_tile_bytes, 1, 1};
    return small_shared(a) <= cu->shared_limit && small_shared(b) <= cu->shared_limit;
}

void small_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
               const struct matrix *down, const struct norm_in *in, float *n, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    CHECK(s->n_expert_used <= MAX_USED && router->n_out <= MAX_EXPERTS, "%d of %d experts",
          s->n_expert_used, router->n_out);
    small_router(cu, router, in, n, rows);
    struct route_rule rule = {router->n_out, s->n_expert_used, s->norm_topk, s->expert_scale};
    const float *x = in->gain ? n : in->x;
    int units = gate_up->n_tiles / 2, per_block = ceil_div(units * rule.used * rows, cu->n_sm);
    per_block = per_block < units ? per_block : units;
    struct small_args p = {};
    p.w = *gate_up;
    p.in.x = x;
    p.y = cu->hidden;
    p.n_units = units;
    p.units_per_block = per_block;
    int warps = gate_up->n_kt < EXPERT_WARPS ? gate_up->n_kt : EXPERT_WARPS;
    size_t extra = 0;
    p.s = small_plan(cu, gate_up, warps, 2 * per_block,
                     2 * per_block * ceil_div(gate_up->n_kt, warps), extra);
    p.logits = cu->router;
    p.rule = rule;
    dim3 grid((unsigned)ceil_div(units, per_block), (unsigned)(rule.used * rows));
    LAUNCH_SMALL(true, EXPERT);

    int per_warp = ceil_div(rule.used, EXPERT_WARPS) * down->n_kt;
    struct expert_args q = {*down, cu->router, cu->hidden,
                            y,     rule,       small_plan(cu, down, EXPERT_WARPS, 1, per_warp, 0)};
    size_t shared = small_shared(q.s);
    grid = dim3((unsigned)down->n_tiles, (unsigned)rows);
    LAUNCH_EXPERTS(expert_down_kernel, q);
}
