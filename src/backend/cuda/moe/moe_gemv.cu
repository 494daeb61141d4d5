/*
 * Experts of one row, or a few rows one by one, and the output projection before them.
 * Equations: output projection y += x W^T with the router's logits as a side product; hidden =
 * act(n Wg^T, n Wu^T) per chosen expert; y = sum over the chosen of weight * hidden Wd^T.
 * Mapping: one block per SM. A block computes 16 output rows at a time; its warps split k in slices
 * of 256 columns. A warp converts its slice of the row to tensor-core operands (dot.cuh) once for
 * all rows of the block, and multiplies tiles as they land in shared memory. The block meets only
 * to add up.
 * Prefetch: everything that does not depend on the step (all weights except the experts') is issued
 * before the preceding kernel has finished, and the epilogue's operands are looked up before the
 * wait.
 * Norm: the gain multiplies the activations; the sum of squares is gathered on the side and divides
 * the sums at the end.
 * Limit: the read of the weights; below that latency, since a layer takes a few microseconds. On an
 * H200 (30B-A3B Q4_K_M, depth 256), from the moment the row is ready: output projection with router
 * sums 2.3 us, gate and up with the choice 5 us (reading at 4.3 TB/s), down 3.2 us.
 * Registers are bounded without spilling: a spill is a round trip to memory that costs more than
 * the product of a tile.
 */
#include "backend/cuda/core/act.cuh"
#include "backend/cuda/moe/route.cuh"
#include "backend/cuda/moe/moe_ring.cuh"

#include <math.h>

enum { MAX_WARPS = 16, EXPERT_WARPS = 8, DOWN_WARPS = 12 };

/* Shared memory: rings, their barriers, sums, squares. */
enum {
    BATCH = 8, /* most tiles between two reductions */
    STAGES = 8,
    BARRIERS = STAGES + 2, /* per warp: the ring's, and one for the gains; 16 bytes a pair */
    TILE_SUMS = 64         /* floats of a tile's partial sums per warp */
};

static size_t moe_gemv_shared(const struct gemv_shape &s)
{
    return (size_t)s.warps *
           (size_t)(s.stages * s.slot + BARRIERS * 8 + (s.sums * s.batch * TILE_SUMS + 4) * 4);
}

struct moe_gemv_smem {
    struct ring ring;
    float *extra;   /* after everything else */
    float *sums;    /* (sums, warps, batch, TILE_SUMS) */
    float *squares; /* (warps, 4) */
};

DEVICE struct moe_gemv_smem moe_gemv_carve(uint8_t *base, const struct gemv_shape &s)
{
    struct moe_gemv_smem m;
    m.ring.base = base + warp_id() * s.slot;
    m.ring.bar = (uint64_t *)(base + s.warps * s.stages * s.slot) + warp_id() * BARRIERS;
    m.ring.slot = s.slot * s.warps;
    m.ring.stages = s.stages;
    m.ring.put = m.ring.take = 0;
    m.ring.parity = 0;
    m.sums = (float *)(base + s.warps * (s.stages * s.slot + BARRIERS * 8));
    m.squares = m.sums + s.sums * s.warps * s.batch * TILE_SUMS;
    m.extra = m.squares + 4 * s.warps;
#if BULK_COPIES
    if (lane_id() < BARRIERS)
        bulk_init(m.ring.bar + lane_id());
    __syncwarp();
#endif
    return m;
}

/* Stores a lane's partial sums of rows g and g+8 of a tile. A quad holds a row; its lanes are
 * summed only at the end. */
DEVICE void store_sums(float *to, const float (&sum)[2])
{
    to[lane_id()] = sum[0];
    to[lane_id() + 32] = sum[1];
}

DEVICE void add_sums(float *to, const float (&sum)[2])
{
    to[lane_id()] += sum[0];
    to[lane_id() + 32] += sum[1];
}

/* Row i of a tile: adds up all warps' partial sums, `stride` floats apart. */
DEVICE float load_sum(const float *sums, int warps, int stride, int i)
{
    float v = 0.0f;
#pragma unroll 8
    for (int w = 0; w < warps; w++) {
        float4 q = *(const float4 *)(sums + w * stride + 4 * i);
        v += (q.x + q.y) + (q.z + q.w);
    }
    return v;
}

/* y = [norm](x) W^T (+ bias); blockIdx.y is the row. Tiles come in batches of at most BATCH (PAIR:
 * gate and up of the same rows alternate, and y = act(gate, up)). EXPERT modes: W is the expert
 * chosen by the row; blockIdx.y is (row, choice), and so is the row of y. */
struct moe_gemv_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int n_units, units_per_block; /* units: tiles, or pairs */
    struct gemv_shape s;
    float inv_n;         /* 1 / n_in */
    struct gating act;   /* PAIR */
    const float *logits; /* EXPERT: (rows, n_expert) */
    struct route_rule rule;
    struct route_sums sums; /* OUTPUT_ROUTER: written; EXPERT_FUSED: read in place of logits */
    struct matrix router;   /* OUTPUT_ROUTER */
};

/* OUTPUT_ROUTER: y += x W^T of one row, one tile per block, plus the router's sums over y times
 * in.gain. EXPERT_FUSED: EXPERT with such sums in place of logits, and with the norm. EXPERT_TWO:
 * EXPERT, two blocks per SM. */
enum mode { EXPERT, OUTPUT_ROUTER, EXPERT_FUSED, EXPERT_TWO };
/* Compile-time knowledge of the experts: none, route_is_plain, experts_are_plain,
 * route_rule.spread. */
enum { PLAIN_NOT, PLAIN_RULE, PLAIN_ALL, SPREAD };

/* Shared memory of OUTPUT_ROUTER after the rest: y of this tile, the gains and the router's
 * columns. */
struct route_tile {
    float y[TILE_ROWS], gain[TILE_ROWS];
    float w[][TILE_ROWS]; /* (n_expert) */
};
static size_t route_shared(const struct matrix &router)
{
    return sizeof(struct route_tile) + (size_t)router.n_out * TILE_ROWS * 4;
}

/* Issues the loads that do not depend on the step. Every thread copies the part of w that it reads
 * itself. */
DEVICE void route_prefetch(const struct moe_gemv_args &p, struct route_tile *t)
{
    int k = (int)blockIdx.x * TILE_ROWS, q = 4 * (int)(threadIdx.x & 3);
    const float *tile = (const float *)(p.router.seg[0].base + (size_t)(k / TILE_K) * F32_BYTES);
#pragma unroll 1
    for (int e = (int)(threadIdx.x >> 2); e < p.router.n_out; e += (int)(blockDim.x >> 2)) {
        size_t at = (size_t)(e / TILE_ROWS * p.router.n_kt) * (F32_BYTES / 4);
        copy_async16(&t->w[e][q], tile + at + e % TILE_ROWS * TILE_K + k % TILE_K + q);
    }
    if (threadIdx.x < 4)
        copy_async16(&t->gain[q], p.in.gain + k + q);
    copy_async_commit();
}

/* Adds the block's part to every expert's sum. t->y must be complete. */
DEVICE void route_add(const struct moe_gemv_args &p, const struct route_tile *t)
{
    int q = 4 * (int)(threadIdx.x & 3), n = p.router.n_out;
    float4 v = *(const float4 *)&t->y[q], g = *(const float4 *)&t->gain[q];
    float square = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    v.x *= g.x, v.y *= g.y, v.z *= g.z, v.w *= g.w;
#pragma unroll 1
    for (int e0 = 0; e0 < n; e0 += (int)(blockDim.x >> 2)) {
        int e = e0 + (int)(threadIdx.x >> 2);
        float4 w = *(const float4 *)&t->w[min(e, n - 1)][q];
        float dot = v.x * w.x + v.y * w.y + v.z * w.z + v.w * w.w;
        dot += __shfl_xor_sync(FULL_WARP, dot, 1);
        dot += __shfl_xor_sync(FULL_WARP, dot, 2);
        if (q == 0 && e < n)
            atomic_add_relaxed(p.sums.sums + sum_at(e), sum_part(dot));
    }
    square += __shfl_xor_sync(FULL_WARP, square, 1);
    square += __shfl_xor_sync(FULL_WARP, square, 2);
    if (threadIdx.x == 0)
        p.sums.squares[blockIdx.x] = square;
}

/* Registers per thread. OUTPUT_ROUTER and EXPERT_FUSED use all 64 K of an SM; the others leave room
 * for other kernels. */
static constexpr int moe_gemv_registers(int set, int mode)
{
    return mode == OUTPUT_ROUTER  ? 72
           : mode == EXPERT_TWO   ? 80
           : !set_is_small(set)   ? 128
           : mode == EXPERT_FUSED ? 112
                                  : 120;
}

/* The order in which a warp copies tiles: batches of tiles (PAIR: gate, up, gate, up), then this
 * warp's slices, then the tiles of the batch. So a converted slice of the row serves a whole
 * batch. */
struct moe_gemv_schedule {
    int first, slice, b, expert;
};

DEVICE void moe_gemv_seek(struct moe_gemv_schedule &f, const struct moe_gemv_args &p,
                          const struct gemv_span &s, int n)
{
    int warp = warp_id(), warps = p.s.warps;
    int each = (p.w.n_kt - warp + warps - 1) / warps, k = n / (each * s.most);
    f.first = min(s.first + k * s.most, s.end);
    int batch = max(min(s.most, s.end - f.first), 1), rest = n - k * each * s.most;
    f.slice = warp + rest / batch * warps;
    f.b = rest % batch;
    if (f.slice >= p.w.n_kt)
        f.first = s.end;
}

template <bool PAIR>
DEVICE const uint8_t *moe_gemv_next(const struct moe_gemv_schedule &f,
                                    const struct moe_gemv_args &p, const struct gemv_span &s,
                                    int *bytes, size_t *expert_bytes)
{
    int tile = gemv_tile<PAIR>(s, f.first + f.b);
    const struct seg *g = seg_of(p.w, tile);
    *bytes = g->tile_bytes;
    *expert_bytes = g->expert_bytes;
    return tile_address(p.w, g, f.expert, tile, f.slice);
}

template <bool PAIR>
DEVICE void moe_gemv_fetch(struct moe_gemv_schedule &f, struct ring &ring,
                           const struct moe_gemv_args &p, const struct gemv_span &s)
{
    const uint8_t *from = NULL;
    int bytes = 0;
    size_t unused;
    if (f.first < s.end) {
        from = moe_gemv_next<PAIR>(f, p, s, &bytes, &unused);
        if (++f.b == min(s.most, s.end - f.first)) {
            f.b = 0;
            f.slice += p.s.warps;
            if (f.slice >= p.w.n_kt) {
                f.slice = warp_id();
                f.first += s.most;
            }
        }
    }
    ring_issue(ring, from, bytes);
}

/* The expert of this block: choice number `pick` of its row. */
template <int MODE, int PLAIN>
DEVICE int moe_gemv_choose(const struct moe_gemv_args &p, const struct moe_gemv_smem &m, int row_in)
{
    const auto &rule = rule_as < PLAIN == PLAIN_RULE || PLAIN == PLAIN_ALL > (p.rule);
    int pick = (int)blockIdx.y - row_in * p.rule.used;
    if (MODE == EXPERT_FUSED) {
        int *found = (int *)(m.extra + p.w.n_kt * TILE_K);
        if (warp_id() == 0) {
            int mine = route_choose_first(p.sums, rule, pick + 1);
            if (lane_id() == pick)
                *found = mine;
        }
        __syncthreads();
        return *found;
    }
    int mine = route_choose_first(p.logits + row_in * p.rule.n_expert, rule, pick + 1);
    return __shfl_sync(FULL_WARP, mine, pick);
}

/* SPREAD: the blocks of a row are divided among the experts on this rank. Returns this block's
 * expert and sets its range of units (s) and the address of its hidden units (y). -1: nothing to
 * do. */
template <bool PAIR>
DEVICE int moe_gemv_assign(const struct moe_gemv_args &p, int row_in, struct gemv_span &s,
                           float *&y)
{
    enum { TILES = PAIR ? 2 : 1 };
    int here, mine = route_present(p.logits + row_in * p.rule.n_expert, p.rule, &here);
    if (!here)
        return -1;
    int across = (int)gridDim.x, at = ((int)blockIdx.y - row_in * p.rule.used) * across;
    int blocks = across * p.rule.used / here; /* blocks per expert */
    int per = (p.n_units + blocks - 1) / blocks, pick;
    at += (int)blockIdx.x;
    pick = at / blocks;
    s.first = (at - pick * blocks) * per * TILES;
    s.end = min(s.first + per * TILES, p.n_units * TILES);
    y = p.y + (size_t)(row_in * p.rule.used + pick) * (size_t)(p.w.n_out / TILES);
    return pick < here && s.first < s.end ? __shfl_sync(FULL_WARP, mine, pick) : -1;
}

/* EXPERT_FUSED: issues the copy of the gains of this warp's slices to shared memory. */
DEVICE void moe_gemv_prefetch_gains(const struct moe_gemv_args &p, const struct moe_gemv_smem &m)
{
#if BULK_COPIES
    int n_in = p.w.n_in, step = p.s.warps * TILE_K, total = 0;
    uint64_t *bar = m.ring.bar + STAGES;
    if (lane_id())
        return;
    for (int k = warp_id() * TILE_K; k < n_in; k += step)
        total += min((int)TILE_K, n_in - k) * 4;
    bulk_expect(bar, total);
    for (int k = warp_id() * TILE_K; k < n_in; k += step)
        bulk_piece(m.extra + k, p.in.gain + k, min((int)TILE_K, n_in - k) * 4, bar);
#else
    (void)p, (void)m;
#endif
}

/* EXPERT_FUSED: v *= gains of its slice. The squares are counted once. */
DEVICE void moe_gemv_norm(const struct moe_gemv_args &p, const struct moe_gemv_smem &m, int slice,
                          bool count, float (&v)[8], float &squares)
{
    float gain[8];
#if BULK_COPIES
    bulk_wait(m.ring.bar + STAGES, 0);
    load_lane(m.extra, slice, p.w.n_in, gain);
#else
    (void)m;
    load_lane(p.in.gain, slice, p.w.n_in, gain);
#endif
    if (count) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            squares += v[j] * v[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] *= gain[j];
}

/* Each thread adds up the warps' partial sums of its row and writes the result. */
template <bool PAIR, int MODE, int PLAIN>
DEVICE void moe_gemv_write(const struct gemv_output<PAIR> &o, const struct moe_gemv_args &p,
                           const struct moe_gemv_smem &m, const float *sums, int stride, float old)
{
    enum { TILES = PAIR ? 2 : 1 };
    const float *from = sums + (int)(threadIdx.x >> 4) * TILES * TILE_SUMS;
    int row = (int)(threadIdx.x & 15), warps = p.s.warps;
    float scale = 1.0f;
    if (MODE == EXPERT_FUSED)
        scale = rsqrtf(load_sum(m.squares, warps, 4, 0) * p.inv_n + p.in.eps);
    float r = load_sum(from, warps, stride, row) * scale + o.bias[0];
    if (PAIR)
        r = gated_as<PLAIN == PLAIN_ALL>(
            p.act, r, load_sum(from + TILE_SUMS, warps, stride, row) * scale + o.bias[TILES - 1]);
    if (MODE == OUTPUT_ROUTER)
        ((struct route_tile *)m.extra)->y[row] = r += old;
    *o.to = r;
}

/* The kind of tiles b and b + 1 of a batch; -1 if they differ, or the kind has no two-tile
 * product. */
template <int SET, bool PAIR> DEVICE int moe_gemv_kind(const struct gemv_output<PAIR> &out, int b)
{
    int kind = SET >= SET_ONE ? set_kind(SET)
               : SET == SET_K ? (out.kinds >> b & 3 ? -1 : (int)TILE_Q4_K)
                              : (int)__shfl_sync(FULL_WARP, out.kinds, b);
    if (SET == SET_CODES && kind != (int)__shfl_sync(FULL_WARP, out.kinds, b + 1))
        kind = -1;
    return kind;
}

/* Stores partial sums of a tile's rows; `again`: adds to those of an earlier slice. */
DEVICE void moe_gemv_store_partial(float *partials, const float (&sum)[2], bool again)
{
    if (again)
        add_sums(partials, sum);
    else
        store_sums(partials, sum);
}

/* Two tiles at a time, as independent chains. */
template <int SET, class X>
DEVICE void moe_gemv_two(struct ring &ring, int kind, const X &x, float *partials, bool again,
                         struct marks &mk, bool first)
{
    float both[2][2];
    const uint8_t *const two[2] = {ring_wait(ring), ring_wait_next(ring)};
    if (first)
        mark(mk, 5);
    if constexpr (SET >= SET_ONE)
        tile_dot_one_two<set_kind(SET), 4>(two, x, both);
    else
        tile_dot_two<SET>(kind, two, x, both);
#pragma unroll
    for (int i = 0; i < 2; i++)
        moe_gemv_store_partial(partials + i * TILE_SUMS, both[i], again);
    ring_release(ring);
    ring_release(ring);
}

/* EXPERT_FUSED: stores the squares of this warp's slices. One lane in eight has a sum. */
DEVICE void moe_gemv_store_squares(const struct moe_gemv_smem &m, float squares)
{
#pragma unroll
    for (int i = 16; i >= 4; i >>= 1)
        squares += __shfl_xor_sync(FULL_WARP, squares, i);
    if (lane_id() < 4)
        m.squares[4 * warp_id() + lane_id()] = squares;
}

/* EXPERT_FUSED: the first block clears the next layer's sums. */
DEVICE void moe_gemv_clear_next(const struct moe_gemv_args &p)
{
    if (blockIdx.x + blockIdx.y == 0)
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < SUM_EXPERTS; i += (int)blockDim.x)
            p.sums.next[sum_at(i)] = 0;
}

template <int SET, bool PAIR, int MODE, int PLAIN>
static __global__ void __launch_bounds__(MAX_WARPS * 32) __maxnreg__(moe_gemv_registers(SET, MODE))
    moe_gemv_kernel(const __grid_constant__ struct moe_gemv_args p)
{
    const bool IS_EXPERT = MODE != OUTPUT_ROUTER;
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int warps = p.s.warps, stages = p.s.stages, n_in = p.w.n_in;
    int row_in = IS_EXPERT ? (int)blockIdx.y / p.rule.used : (int)blockIdx.y;
    const struct norm_in in = norm_row(p.in, row_in, n_in);
    float *y = p.y + (size_t)blockIdx.y * (size_t)(p.w.n_out / (PAIR ? 2 : 1));
    struct moe_gemv_smem m = moe_gemv_carve(shared, p.s);
    int warp = warp_id(), lane = lane_id();
    struct gemv_span span = gemv_span_of<PAIR>(p.n_units, p.units_per_block, p.s.batch);
    int spread = 0; /* the expert */
    if constexpr (PLAIN == SPREAD) {
        (dependency_wait)();
        dependency_trigger();
        spread = moe_gemv_assign<PAIR>(p, row_in, span, y);
        if (spread < 0)
            return;
    }
    int first = span.first, end = span.end, most = span.most;
    struct moe_gemv_schedule f = {first, warp, 0, 0};
    const uint8_t *from0 = NULL; /* the first tiles, one per lane; address for expert 0 */
    int bytes0 = 0;
    size_t expert_bytes = 0;
    moe_gemv_seek(f, p, span, lane);
    if (f.first < end)
        from0 = moe_gemv_next<PAIR>(f, p, span, &bytes0, &expert_bytes);
    moe_gemv_seek(f, p, span, stages);
    /* One kind: lane n holds the address of the n-th of 32 tiles, and looks up 32 more at a
     * time. */
    int asked = stages;
    auto fetch = [&]() {
        if constexpr (SET < SET_ONE) {
            moe_gemv_fetch<PAIR>(f, m.ring, p, span);
        } else {
            if ((asked & 31) == 0) {
                struct moe_gemv_schedule g = f;
                moe_gemv_seek(g, p, span, asked + lane);
                bytes0 = 0;
                if (g.first < end)
                    from0 = moe_gemv_next<PAIR>(g, p, span, &bytes0, &expert_bytes);
            }
            ring_issue_from(m.ring, from0, bytes0, asked & 31);
            asked++;
        }
    };
    struct gemv_output<PAIR> out = {
    };
    float v[8], old = 0.0f;
    if (!IS_EXPERT)
        ring_fill(m.ring, from0, bytes0);
    if (MODE == OUTPUT_ROUTER)
        route_prefetch(p, (struct route_tile *)m.extra);
    gemv_locate<SET, PLAIN != PLAIN_ALL>(out, p.w, span, first, y);
    if (MODE == EXPERT_FUSED)
        moe_gemv_prefetch_gains(p, m);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    load_lane(in.x, warp, n_in, v);
    if (MODE == OUTPUT_ROUTER) {
        /* Not earlier: the next kernel prefetches nothing here and would take issue slots. */
        dependency_trigger();
        old = out.to ? *out.to : 0.0f;
    }
    if (IS_EXPERT) {
        if constexpr (PLAIN == SPREAD) {
            f.expert = spread;
        } else {
            dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
            f.expert = moe_gemv_choose<MODE, PLAIN>(p, m, row_in);
        }
        mark(mk, 4);
        if constexpr (SET >= SET_ONE) {
            from0 += (size_t)f.expert * expert_bytes;
            ring_fill(m.ring, from0, bytes0);
        } else {
            ring_fill(m.ring, from0 + (size_t)f.expert * expert_bytes, bytes0);
        }
        mark(mk, 1);
        if (PLAIN != PLAIN_ALL && p.w.bias) /* this expert's */
            gemv_locate<SET>(out, p.w, span, first, y, f.expert);
        if (MODE == EXPERT_FUSED)
            moe_gemv_clear_next(p);
    }

    typename slice_for<SET, (SET >= SET_ONE && MODE == EXPERT)>::type x = {};
    float squares = 0.0f;
    int staged = -1, odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end;) {
        int batch = min(most, end - tile), stride = most * TILE_SUMS;
        float *sums = m.sums + odd * warps * stride;
#pragma unroll 1
        for (int slice = warp; slice < p.w.n_kt; slice += warps) {
            if (slice != staged) {
                if (staged >= 0 && slice == warp)
                    load_lane(in.x, slice, n_in, v); /* otherwise it has been loaded already */
                if (MODE == EXPERT_FUSED)
                    moe_gemv_norm(p, m, slice, tile == first, v, squares);
                staged = slice;
                slice_make(x, v);
                if (slice + warps < p.w.n_kt)
                    load_lane(in.x, slice + warps, n_in, v);
                if (!IS_EXPERT && slice == warp)
                    mark(mk, 4);
            }
#pragma unroll 1
            for (int b = 0; b < batch; b++) {
                float sum[2] = {}, *partials = sums + warp * stride + b * TILE_SUMS;
                if constexpr (set_is_small(SET) && MODE != OUTPUT_ROUTER && MODE != EXPERT_TWO) {
                    int kind = moe_gemv_kind<SET>(out, b);
                    if (b + 1 < batch && stages > 1 && kind >= 0) {
                        moe_gemv_two<SET>(m.ring, kind, x, partials, slice != warp, mk,
                                          tile + b == first && slice == warp);
                        fetch();
                        fetch();
                        b++;
                        continue;
                    }
                }
                const uint8_t *there = ring_wait(m.ring);
                if (tile + b == first && slice == warp)
                    mark(mk, 5);
                gemv_dot<SET, SET >= SET_ONE && MODE != OUTPUT_ROUTER ? 4 : 2>(out, p.w, span, tile,
                                                                               b, there, x, sum);
                moe_gemv_store_partial(partials, sum, slice != warp);
                ring_release(m.ring);
                fetch();
            }
        }
        mark(mk, 6);
        if (tile == first && MODE == EXPERT_FUSED)
            moe_gemv_store_squares(m, squares);
        odd ^= 1;
        __syncthreads();
        mark(mk, 7);
        if (out.to)
            moe_gemv_write<PAIR, MODE, PLAIN>(out, p, m, sums, stride, old);
        if (MODE == OUTPUT_ROUTER) {
            copy_async_wait<0>();
            __syncthreads();
            route_add(p, (const struct route_tile *)m.extra);
        }
        tile += batch;
        if (tile < end)
            gemv_locate<SET, PLAIN != PLAIN_ALL>(out, p.w, span, tile, y, f.expert);
    }
    copy_async_wait<0>();
    marks_end(mk, IS_EXPERT ? 5 : 3);
}

/* tiles: of a block; per_warp: of a warp over all its slices; extra: more bytes of shared memory.
 * The ring leaves room for another kernel, so that the next kernel's first tiles are in flight
 * before this one ends. */
static struct gemv_shape moe_gemv_plan(const struct cuda_backend *cu, const struct matrix *w,
                                       int warps, int tiles, int per_warp, size_t extra)
{
    struct gemv_shape s;
    int most = 2 * warps < BATCH ? 2 * warps : BATCH;                  /* one thread per row */
    int stages = cu->sm >= 90 ? STAGES : 4;                            /* see ring_wait */
    s.batch = tiles <= most ? tiles : most >= 4 ? most / 4 * 2 : most; /* even, for pairs */
    s.sums = tiles > s.batch ? 2 : 1;
    s.warps = warps;
    s.slot = w->max_tile_bytes;
    s.stages = per_warp < stages ? per_warp : stages;
    while (s.stages > 1 && (warps * s.stages * s.slot > ring_room(w) ||
                            moe_gemv_shared(s) + extra > cu->shared_limit))
        s.stages--;
    return s;
}

template <bool PAIR, int MODE, int PLAIN>
static void moe_gemv_launch(struct cuda_backend *cu, const struct moe_gemv_args &p, dim3 grid,
                            size_t extra)
{
    matrix_set(&p.w, [&](auto set) {
        cuda_launch(cu, moe_gemv_kernel<set.VALUE, PAIR, MODE, PLAIN>, grid, p.s.warps * 32,
                    moe_gemv_shared(p.s) + extra, LAUNCH_EARLY, p);
    });
}

static int moe_gemv_warps(const struct cuda_backend *cu, const struct matrix *w)
{
    int warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS;
    for (;; warps = (warps + 1) / 2) { /* large tiles, little shared memory: fewer warps */
        struct gemv_shape least = {warps, 1, w->max_tile_bytes, BATCH, 2};
        if (warps == 1 ||
            (moe_gemv_shared(least) + (size_t)w->n_kt * TILE_K * 4 <= cu->shared_limit &&
             (w->set != SET_ALL || warps <= 8)))
            return warps;
    }
}

/* Down projection. */

struct moe_gemv_down_args {
    struct matrix w;
    const float *logits; /* (rows, n_expert) */
    const float *x;      /* hidden (rows, used, n_in) */
    float *y;            /* (rows, n_embd) */
    struct route_rule rule;
    struct gemv_shape s;
    struct route_sums sums; /* in place of logits */
};

/* y = sum over the chosen of weight * hidden Wd^T; blockIdx.y is the row. A block owns 16 output
 * rows; its warps divide the (expert, slice) pairs among them. Few threads and registers let it
 * become resident, with its weights in flight, while the preceding kernel still runs, and leave
 * room for the next kernel (8 warps with 120 registers). */
template <int SET, int WARPS, bool SUMS, int PLAIN>
static __global__ void __launch_bounds__(WARPS * 32)
    __maxnreg__(WARPS == EXPERT_WARPS || SET == SET_ALL ? 128 : 88)
        moe_gemv_down_kernel(const __grid_constant__ struct moe_gemv_down_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int stages = p.s.stages;
    struct moe_gemv_smem m = moe_gemv_carve(shared, p.s);
    int warp = warp_id(), tile = (int)blockIdx.x;
    const struct seg *s = seg_of(p.w, tile);
    int n_in = p.w.n_in, n_kt = p.w.n_kt, used = p.rule.used, row_in = (int)blockIdx.y;
    const float *x_row = p.x + (size_t)(row_in * used) * (size_t)n_in;

    dependency_trigger();
    /* Logits or sums are two kernels old: gate and up let this kernel start after their own
     * wait. */
    const float *logits = p.logits + row_in * p.rule.n_expert;
    const auto &rule = rule_as < PLAIN == PLAIN_RULE || PLAIN == PLAIN_ALL > (p.rule);
    int all, here = used; /* SPREAD: the row's experts on this rank */
    if constexpr (PLAIN == SPREAD)
        all = route_present(logits, p.rule, &here);
    else
        all =
            SUMS ? route_choose_first(p.sums, rule, used) : route_choose_first(logits, rule, used);
    /* A warp takes `per` consecutive (expert, slice) pairs. */
    int per = (here * n_kt + WARPS - 1) / WARPS, total = min(per, here * n_kt - warp * per);
    const int pick0 = warp * per / n_kt, kt0 = warp * per % n_kt;
    auto address = [&](int n, int *bytes) {
        int pick = (warp * per + n) / n_kt, e = __shfl_sync(FULL_WARP, all, pick & 31);
        *bytes = n < total ? s->tile_bytes : 0;
        return tile_address(p.w, s, e, tile, (warp * per + n) % n_kt);
    };
    auto advance = [&](int &pick, int &kt) {
        if (++kt == n_kt) {
            kt = 0;
            pick++;
        }
    };
    int bytes, next = stages;
    int kind = s->kind;
    bool six = kind == TILE_Q6_K;
    const uint8_t *from = address(lane_id(), &bytes);
    ring_fill(m.ring, from, bytes);
    float scale = SUMS ? sum_scale(p.sums) : 1.0f;
    float weights;
    if constexpr (PLAIN == SPREAD)
        weights = load_float_l2(logits + all);
    else
        weights = route_weigh(rule, all, [&](int e) {
            return SUMS ? sum_value(load_u64_l2(p.sums.sums + sum_at(e))) * scale
                        : load_float_l2(logits + e);
        });
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);

    /* The hidden units of the next PREFETCH slices are loaded together. */
    enum { PREFETCH = WARPS == EXPERT_WARPS ? 3 : 2 };
    float sum[2] = {}, v[PREFETCH][8] = {};
    int l_pick = pick0, l_kt = kt0;
    auto load = [&](float(&to)[8]) {
        if (l_pick >= here)
            return;
        load_lane(x_row + (size_t)l_pick * (size_t)n_in, l_kt, n_in, to);
        advance(l_pick, l_kt);
    };
#pragma unroll
    for (int i = 0; i < PREFETCH; i++)
        load(v[i]);
    typename slice_for<SET, false>::type x,
        next_x; /* the next one is converted while this one is multiplied */
    slice_make(x, v[0]);
#pragma unroll 1
    for (int n = 0, pick = pick0, kt = kt0; n < total; n++) {
        float weight = __shfl_sync(FULL_WARP, weights, pick);
        advance(pick, kt);
#pragma unroll
        for (int i = 0; i < 8 * (PREFETCH - 1); i++)
            v[i / 8][i % 8] = v[i / 8 + 1][i % 8];
        load(v[PREFETCH - 1]);
        if (n == 0)
            mark(mk, 4);
        const uint8_t *there = ring_wait(m.ring);
        if (n == 0)
            mark(mk, 5);
        slice_make(next_x, v[0]);
        if constexpr (SET == SET_K)
            tile_dot(six, there, x, weight, sum);
        else if constexpr (SET >= SET_ONE)
            tile_dot_one<set_kind(SET), 4>(there, x, weight, sum);
        else if constexpr (SET == SET_CODES)
            tile_dot_codes<4>(kind, there, x, weight, sum);
        else
            tile_dot<SET>(s, there, x, weight, sum);
        x = next_x;
        ring_release(m.ring);
        bytes = 0;
        if (next < total)
            from = address(next++, &bytes);
        ring_issue(m.ring, from, bytes);
    }
    copy_async_wait<0>();
    mark(mk, 6);
    store_sums(m.sums + warp * TILE_SUMS, sum);
    __syncthreads();
    mark(mk, 7);
    int r = (int)threadIdx.x, row = (tile - s->tile0) * TILE_ROWS + r;
    float bias = 0.0f; /* weighted biases of the chosen experts */
    if (PLAIN != PLAIN_ALL && p.w.bias && warp == 0)
#pragma unroll 1
        for (int i = 0; i < here; i++) {
            int e = __shfl_sync(FULL_WARP, all, i);
            float weight = __shfl_sync(FULL_WARP, weights, i);
            if (r < TILE_ROWS && row < s->rows)
                bias += weight * p.w.bias[e * p.w.n_out + s->row0 + row];
        }
    if (r < TILE_ROWS && row < s->rows)
        p.y[(size_t)row_in * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
            load_sum(m.sums, WARPS, TILE_SUMS, r) + bias;
    marks_end(mk, 6);
}

template <int WARPS, bool SUMS, int PLAIN>
static void moe_gemv_launch_down(struct cuda_backend *cu, const struct moe_gemv_down_args &q,
                                 dim3 grid)
{
    matrix_set(&q.w, [&](auto set) {
        cuda_launch(cu, moe_gemv_down_kernel<set.VALUE, WARPS, SUMS, PLAIN>, grid, q.s.warps * 32,
                    moe_gemv_shared(q.s), LAUNCH_EARLY, q);
    });
}

/* Down projection for long rows: a block owns DOWN_TILES x 16 output rows, so that a converted
 * slice of hidden units serves all of them. The blocks of a cluster divide the (expert, slice)
 * pairs, and the first block adds up. Without clusters one block has all pairs. Its registers fit
 * where one of the two blocks of gate and up was. */
enum { DOWN_TILES = 3, LONG_KT = 8 };

struct moe_gemv_long_args {
    struct moe_gemv_down_args d;
    int ranks;
};

template <int SET, int PLAIN>
static __global__ void __launch_bounds__(DOWN_WARPS * 32, 2)
    moe_gemv_long_kernel(const __grid_constant__ struct moe_gemv_long_args q)
{
    SHARED_BYTES(shared);
    const struct moe_gemv_down_args &p = q.d;
    enum { WARPS = DOWN_WARPS };
    int stages = p.s.stages, warp = warp_id(), lane = lane_id(), rank = cluster_rank();
    struct moe_gemv_smem m = moe_gemv_carve(shared, p.s);
    int n_in = p.w.n_in, n_kt = p.w.n_kt, used = p.rule.used, row_in = (int)blockIdx.y;
    int first = (int)blockIdx.x / q.ranks * DOWN_TILES;
    int n_tiles = min((int)DOWN_TILES, p.w.n_tiles - first);
    const float *x_row = p.x + (size_t)(row_in * used) * (size_t)n_in;

    dependency_trigger();
    /* Logits are two kernels old: gate and up let this kernel start after their own wait. */
    const float *logits = p.logits + row_in * p.rule.n_expert;
    const auto &rule = rule_as < PLAIN == PLAIN_RULE || PLAIN == PLAIN_ALL > (p.rule);
    int all, here = used; /* SPREAD: the row's experts on this rank */
    if constexpr (PLAIN == SPREAD)
        all = route_present(logits, p.rule, &here);
    else
        all = route_choose_first(logits, rule, used);
    /* A warp takes every WARPS-th pair of the block. */
    int per = (here * n_kt + q.ranks - 1) / q.ranks, pair0 = rank * per + warp;
    int end = min((rank + 1) * per, here * n_kt);
    int pairs = pair0 < end ? (end - pair0 + WARPS - 1) / WARPS : 0, total = pairs * n_tiles;
    const uint8_t *from = NULL; /* lane n has the address of the n-th of 32 tiles */
    int bytes = 0, next = stages;
    auto look_up = [&](int base) {
        int n = min(base + lane, max(total - 1, 0)), turn = n / n_tiles;
        int pair = pair0 + turn * WARPS, pick = pair / n_kt;
        int e = __shfl_sync(FULL_WARP, all, pick & 31);
        bytes = base + lane < total ? p.w.seg[0].tile_bytes : 0;
        from = tile_address(p.w, &p.w.seg[0], e, first + n - turn * n_tiles, pair - pick * n_kt);
    };
    look_up(0);
    ring_fill(m.ring, from, bytes);
    float weights;
    if constexpr (PLAIN == SPREAD)
        weights = load_float_l2(logits + all);
    else
        weights = route_weigh(rule, all, [&](int e) { return load_float_l2(logits + e); });
    (dependency_wait)();

    float sum[DOWN_TILES][2] = {}, v[8] = {};
    auto load = [&](int pair) {
        int pick = pair / n_kt;
        if (pair < end)
            load_lane(x_row + (size_t)pick * (size_t)n_in, pair - pick * n_kt, n_in, v);
    };
    load(pair0);
    typename slice_for<SET, false>::type x;
#pragma unroll 1
    for (int pair = pair0; pair < end; pair += WARPS) {
        float weight = __shfl_sync(FULL_WARP, weights, pair / n_kt & 31);
        slice_make(x, v);
        load(pair + WARPS);
#pragma unroll
        for (int t = 0; t < DOWN_TILES; t++) {
            if (t >= n_tiles)
                break;
            const uint8_t *there = ring_wait(m.ring);
            tile_dot_one<set_kind(SET), 4>(there, x, weight, sum[t]);
            ring_release(m.ring);
            if (next < total) {
                if ((next & 31) == 0)
                    look_up(next);
                ring_issue_from(m.ring, from, bytes, next & 31);
                next++;
            } else {
                ring_issue(m.ring, NULL, 0);
            }
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int t = 0; t < DOWN_TILES; t++)
        store_sums(m.sums + (warp * DOWN_TILES + t) * TILE_SUMS, sum[t]);
    __syncthreads();
    int r = (int)threadIdx.x, row = first * TILE_ROWS + r;
    bool mine = r < n_tiles * TILE_ROWS && row < p.w.n_out;
    float bias = 0.0f, v0 = 0.0f; /* weighted biases of the chosen experts */
    if (p.w.bias && rank == 0 && r < (DOWN_TILES * TILE_ROWS + 31) / 32 * 32)
#pragma unroll 1
        for (int i = 0; i < here; i++) {
            int e = __shfl_sync(FULL_WARP, all, i);
            float weight = __shfl_sync(FULL_WARP, weights, i);
            if (mine)
                bias += weight * p.w.bias[e * p.w.n_out + row];
        }
    if (mine)
        v0 = load_sum(m.sums + (r >> 4) * TILE_SUMS, WARPS, DOWN_TILES * TILE_SUMS, r & 15);
    if (q.ranks > 1) {
        if (mine)
            m.extra[r] = v0;
        cluster_arrive();
        cluster_wait();
        if (rank == 0 && mine)
#pragma unroll 1
            for (int i = 1; i < q.ranks; i++)
                v0 += cluster_at(m.extra, i)[r];
        cluster_arrive();
        cluster_wait();
    }
    if (rank == 0 && mine)
        p.y[(size_t)row_in * (size_t)p.w.n_out + (size_t)row] = v0 + bias;
}

/* Blocks of a cluster, where clusters exist. */
enum { LONG_RANKS = 2 };

static bool moe_gemv_long_fits(const struct cuda_backend *cu, const struct matrix *down)
{
    struct gemv_shape s = {DOWN_WARPS, 1, down->max_tile_bytes, DOWN_TILES, 1};
    return matrix_kind(down) == TILE_MXFP4 && down->n_seg == 1 && down->n_kt >= LONG_KT &&
           cu->sm >= 90 && moe_gemv_shared(s) + DOWN_TILES * TILE_ROWS * 4 <= cu->shared_limit;
}

static void moe_gemv_long(struct cuda_backend *cu, const struct moe_gemv_down_args &d, int rows)
{
    struct moe_gemv_long_args q = {d, cuda_blocks_concurrent() ? (int)LONG_RANKS : 1};
    int pairs = ceil_div(ceil_div(d.rule.used * d.w.n_kt, q.ranks), DOWN_WARPS);
    size_t extra = DOWN_TILES * TILE_ROWS * 4;
    q.d.s = moe_gemv_plan(cu, &d.w, DOWN_WARPS, DOWN_TILES, pairs * DOWN_TILES, extra);
    dim3 grid((unsigned)(ceil_div(d.w.n_tiles, DOWN_TILES) * q.ranks), (unsigned)rows);
    auto kernel = route_is_plain(d.rule) ? moe_gemv_long_kernel<SET_ONE + TILE_MXFP4, PLAIN_RULE>
                  : d.rule.spread        ? moe_gemv_long_kernel<SET_ONE + TILE_MXFP4, SPREAD>
                                         : moe_gemv_long_kernel<SET_ONE + TILE_MXFP4, PLAIN_NOT>;
    cuda_launch(cu, kernel, grid, DOWN_WARPS * 32, moe_gemv_shared(q.d.s) + extra,
                LAUNCH_EARLY + q.ranks * LAUNCH_CLUSTER, q);
}

bool moe_gemv_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down)
{
    struct gemv_shape a = {EXPERT_WARPS, 1, gate_up->max_tile_bytes, BATCH, 2};
    struct gemv_shape b = {DOWN_WARPS, 1, down->max_tile_bytes, 1, 1};
    return moe_gemv_shared(a) <= cu->shared_limit && moe_gemv_shared(b) <= cu->shared_limit;
}

/* Extra shared memory of EXPERT_FUSED: gains and the choice. */
static size_t fused_extra_bytes(const struct matrix &w)
{
    return (size_t)w.n_kt * TILE_K * 4 + 16;
}

/* Gate and up of MXFP4, which is limited by issue slots: two blocks per SM, if there is work and
 * room for both. Returns whether it was launched. */
static bool moe_gemv_two(struct cuda_backend *cu, struct moe_gemv_args q, dim3 grid, size_t extra)
{
    enum { TWO_STAGES = 3, TWO_UNITS = 4 };
    if (matrix_kind(&q.w) != TILE_MXFP4 || q.w.n_kt > DOWN_WARPS || q.units_per_block < TWO_UNITS)
        return false;
    q.units_per_block = (q.units_per_block + 1) / 2;
    q.s = moe_gemv_plan(cu, &q.w, q.w.n_kt, 2 * q.units_per_block, TWO_STAGES, extra);
    size_t shared = moe_gemv_shared(q.s) + extra;
    if (2 * (shared + 1024) > cu->shared_per_sm)
        return false;
    grid.x = (unsigned)ceil_div(q.n_units, q.units_per_block);
    auto kernel =
        route_is_plain(q.rule) ? moe_gemv_kernel<SET_ONE + TILE_MXFP4, true, EXPERT_TWO, PLAIN_RULE>
        : q.rule.spread        ? moe_gemv_kernel<SET_ONE + TILE_MXFP4, true, EXPERT_TWO, SPREAD>
                               : moe_gemv_kernel<SET_ONE + TILE_MXFP4, true, EXPERT_TWO, PLAIN_NOT>;
    cuda_launch(cu, kernel, grid, q.s.warps * 32, shared, LAUNCH_EARLY, q);
    return true;
}

/* Launches the experts, given logits or sums; `in`: their input rows. */
template <int PLAIN>
static void launch_experts_as(struct cuda_backend *cu, const struct experts *e,
                              const struct norm_in *in, const struct route_sums &sums, float *y,
                              int rows)
{
    const struct matrix *gate_up = e->gate_up, *down = e->down;
    const struct route_rule &rule = e->rule;
    int units = gate_up->n_tiles / 2, per_block = ceil_div(units * rule.used * rows, cu->n_sm);
    per_block = per_block < units ? per_block : units;
    struct moe_gemv_args p = {};
    p.w = *gate_up;
    p.in = *in;
    p.act = e->act;
    p.y = cu->mlp.hidden;
    p.n_units = units;
    p.units_per_block = per_block;
    /* One slice per warp: with 12 slices, two rounds of eight warps would leave half of them
     * idle. */
    size_t extra = in->gain ? fused_extra_bytes(*gate_up) : 0;
    struct gemv_shape least = {DOWN_WARPS, 1, gate_up->max_tile_bytes, BATCH, 2};
    bool wide = !sums.sums && gate_up->set <= SET_CODES && gate_up->n_kt <= DOWN_WARPS &&
                moe_gemv_shared(least) + extra <= cu->shared_limit;
    int most = wide ? (int)DOWN_WARPS : (int)EXPERT_WARPS;
    int warps = gate_up->n_kt < most ? gate_up->n_kt : most;
    p.s = moe_gemv_plan(cu, gate_up, warps, 2 * per_block,
                        2 * per_block * ceil_div(gate_up->n_kt, warps), extra);
    p.logits = router_selected(cu, e);
    p.rule = rule;
    p.sums = sums;
    p.inv_n = 1.0f / (float)gate_up->n_in;
    dim3 grid((unsigned)ceil_div(units, per_block), (unsigned)(rule.used * rows));
    if (PLAIN != SPREAD && sums.sums)
        moe_gemv_launch<true, EXPERT_FUSED, PLAIN == SPREAD ? PLAIN_NOT : PLAIN>(cu, p, grid,
                                                                                 extra);
    else if (!moe_gemv_two(cu, p, grid, extra))
        moe_gemv_launch<true, EXPERT, PLAIN>(cu, p, grid, extra);

    int down_warps = sums.sums ? DOWN_WARPS : EXPERT_WARPS;
    int per_warp = ceil_div(rule.used * down->n_kt, down_warps);
    struct moe_gemv_down_args q = {
        *down, p.logits, cu->mlp.hidden,
        y,     rule,     moe_gemv_plan(cu, down, down_warps, 1, per_warp, 0),
        sums};
    grid = dim3((unsigned)down->n_tiles, (unsigned)rows);
    if (PLAIN != SPREAD && sums.sums)
        moe_gemv_launch_down<DOWN_WARPS, true, PLAIN == SPREAD ? PLAIN_NOT : PLAIN>(cu, q, grid);
    else if (moe_gemv_long_fits(cu, down))
        moe_gemv_long(cu, q, rows);
    else
        moe_gemv_launch_down<EXPERT_WARPS, false, PLAIN>(cu, q, grid);
}
static void launch_experts(struct cuda_backend *cu, const struct experts *e,
                           const struct norm_in *in, const struct route_sums &sums, float *y,
                           int rows)
{
    if (experts_are_plain(e))
        launch_experts_as<PLAIN_ALL>(cu, e, in, sums, y, rows);
    else if (e->rule.spread)
        launch_experts_as<SPREAD>(cu, e, in, sums, y, rows);
    else
        launch_experts_as<PLAIN_NOT>(cu, e, in, sums, y, rows);
}

void moe_gemv(struct cuda_backend *cu, const struct experts *e, const float *x, float *y, int rows)
{
    struct norm_in made = {};
    made.x = x;
    launch_experts(cu, e, &made, route_sums{}, y, rows);
}

bool moe_gemv_routed_fits(const struct cuda_backend *cu, const struct matrix *w,
                          const struct experts *e)
{
    const struct matrix *router = e->router, *gate_up = e->gate_up, *down = e->down;
    /* Sums are logits up to a positive factor. Other rules need the factor. */
    if (e->rule.given || e->rule.sigmoid || e->rule.choice_bias)
        return false;
    struct gemv_shape a = {MAX_WARPS, 1, w->max_tile_bytes, 1, 1};
    struct gemv_shape b = {EXPERT_WARPS, 1, gate_up->max_tile_bytes, BATCH, 2};
    return moe_gemv_shared(a) + route_shared(*router) <= cu->shared_limit &&
           moe_gemv_shared(b) + fused_extra_bytes(*gate_up) <= cu->shared_limit && w->n_seg == 1 &&
           w->n_out % TILE_ROWS == 0 && w->n_tiles <= SUM_BLOCKS && w->n_in % 8 == 0 &&
           router->n_in == w->n_out && router->n_out <= SUM_EXPERTS && router->n_out % 4 == 0 &&
           !router->bias && router->n_seg == 1 && router->seg[0].kind == TILE_F32 &&
           gate_up->n_in == w->n_out && moe_gemv_fits(cu, gate_up, down);
}

void moe_gemv_routed(struct cuda_backend *cu, const struct matrix *w, const float *a,
                     const struct experts *e, const struct norm_in *in, float *x, float *y)
{
    const struct matrix *router = e->router;
    int turn = cu->routing.n_summed++ & 1;
    struct route_sums sums = {cu->routing.sums + turn * SUM_WORDS,
                              cu->routing.sums + (turn ^ 1) * SUM_WORDS,
                              cu->routing.squares,
                              w->n_tiles,
                              1.0f / (float)w->n_out,
                              in->eps};
    struct moe_gemv_args p = {};
    p.w = *w;
    p.in.x = a;
    p.in.gain = in->gain;
    p.y = x;
    p.n_units = w->n_tiles;
    p.units_per_block = 1;
    p.sums = sums;
    p.router = *router;
    size_t extra = route_shared(*router);
    int warps = moe_gemv_warps(cu, w);
    p.s = moe_gemv_plan(cu, w, warps, 1, ceil_div(w->n_kt, warps), extra);
    dim3 grid((unsigned)w->n_tiles);
    moe_gemv_launch<false, OUTPUT_ROUTER, PLAIN_NOT>(cu, p, grid, extra);
    struct norm_in made = {};
    made.x = x;
    made.gain = in->gain;
    made.eps = in->eps;
    launch_experts(cu, e, &made, sums, y, 1);
}
