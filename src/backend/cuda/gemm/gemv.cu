/*
 * y = [norm](x) W^T (+ bias) for one row, or a few rows one by one (blockIdx.y). PAIR: y =
 * act(gate, up).
 * Mapping: one block per SM. A block computes 16 output rows at a time. Its warps split k in slices
 * of 256 columns. A warp converts its slice of the row to tensor-core operands (dot.cuh) once for
 * all output rows of the block, and multiplies tiles as they land in shared memory. The block meets
 * only to add up.
 * Prefetch: the first weights are issued before the preceding kernel has finished, and the
 * epilogue's operands are looked up before the wait. The remaining weights are issued after the row
 * has been read, because the row would queue after them.
 * Norm: the gain multiplies the activations; the sum of squares is gathered on the side and divides
 * the sums at the end.
 * Limit: the read of the weights and, between kernels, latency. Weights stream at 4.3 TB/s on an
 * H200. Norm + q, k, v of the 30B-A3B at depth 256 took 2.7 us from the moment the row is ready (row
 * 0.7, products 1.4, end 0.4), measured in the kernel before this one, which starts later.
 * Registers are bounded without spilling: a spill is a round trip to memory that costs more than
 * the product of a tile.
 */
#include "backend/cuda/core/act.cuh"
#include "backend/cuda/core/ring.cuh"

#include <math.h>

enum { MAX_WARPS = 16 };

/* Shared memory: the rings' barriers, rings, sums, squares. */
enum {
    BATCH = 16, /* most tiles between two reductions */
    STAGES = 8,
    BARRIERS = STAGES,     /* barriers of a warp; 16 bytes a pair */
    TILE_SUMS = TILE_ROWS, /* floats of a tile's sums per warp */
    /* Bytes a block issues before the wait: a whole short product, less of a long one. More would
     * delay the row, and the products wait for the row. */
    SHORT_BYTES = 80 << 10,
    FIRST_BYTES = 60 << 10
};

static size_t gemv_shared(const struct gemv_shape &s)
{
    return (size_t)s.warps *
           (size_t)(s.stages * s.slot + BARRIERS * 8 + (s.sums * s.batch * TILE_SUMS + 1) * 4);
}

struct gemv_smem {
    struct ring ring;
    float *sums;    /* (sums, warps, batch, TILE_SUMS) */
    float *squares; /* (warps) */
};

DEVICE struct gemv_smem gemv_carve(uint8_t *base, const struct gemv_shape &s)
{
    struct gemv_smem m;
    m.ring.bar = (uint64_t *)base + warp_id() * BARRIERS;
    m.ring.base = base + s.warps * BARRIERS * 8 + warp_id() * s.slot;
    m.ring.slot = s.slot * s.warps;
    m.ring.stages = s.stages;
    m.ring.put = m.ring.take = 0;
    m.ring.parity = 0;
    m.sums = (float *)(base + s.warps * (BARRIERS * 8 + s.stages * s.slot));
    m.squares = m.sums + s.sums * s.warps * s.batch * TILE_SUMS;
#if BULK_COPIES
    if (lane_id() < s.stages)
        bulk_init(m.ring.bar + lane_id());
    __syncwarp();
#endif
    return m;
}

/* Lane `n` starts the copy of its tile into the next ring slot. With `bytes` 0 nothing is copied,
 * but the slot still advances. */
DEVICE void ring_issue(struct ring &r, const uint8_t *from, int bytes, int n)
{
#if BULK_COPIES
    if (lane_id() == n && bytes)
        bulk_copy(r.base + r.put * r.slot, from, bytes, r.bar + r.put);
#else
    from = (const uint8_t *)__shfl_sync(FULL_WARP, (uint64_t)from, n);
    bytes = __shfl_sync(FULL_WARP, bytes, n);
    if (bytes)
        tile_fetch(r.base + r.put * r.slot, from, bytes);
    copy_async_commit();
#endif
    r.put = r.put + 1 == r.stages ? 0 : r.put + 1;
}

/* Starts the copies of tiles begin .. end-1 into an empty ring. Lane i knows the address of tile
 * i. */
DEVICE void ring_fill(struct ring &r, const uint8_t *from, int bytes, int begin, int end)
{
#if BULK_COPIES
    int n = lane_id();
    if (n >= begin && n < end && bytes)
        bulk_copy(r.base + n * r.slot, from, bytes, r.bar + n);
#else
    for (int n = begin; n < end; n++)
        ring_issue(r, from, bytes, n);
#endif
}

/* A warp's sum of a tile, from the lanes' partial sums of rows g and g+8 (a quad holds a row). */
DEVICE float quad_sum(const float (&sum)[2])
{
    bool odd = lane_id() & 1; /* odd lanes continue with row g+8 */
    float v = odd ? sum[1] : sum[0], other = odd ? sum[0] : sum[1];
    v += __shfl_xor_sync(FULL_WARP, other, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}
DEVICE void store_sums(float *to, const float (&sum)[2])
{
    float v = quad_sum(sum);
    if (!(lane_id() & 2))
        to[(lane_id() >> 2) + 8 * (lane_id() & 1)] = v;
}

DEVICE void add_sums(float *to, const float (&sum)[2])
{
    float v = quad_sum(sum);
    if (!(lane_id() & 2))
        to[(lane_id() >> 2) + 8 * (lane_id() & 1)] += v;
}

/* a / b for numbers from 0 to 2^20, in a few instructions. Instructions before a kernel's first
 * copy delay everything after. */
DEVICE int quotient(int a, int b)
{
    return (int)fast_divide((float)a + 0.5f, (float)b);
}

/* Arguments. Tiles come in batches of at most BATCH (PAIR: gate and up of the same rows
 * alternate). */
struct gemv_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int n_units, units_per_block; /* units: tiles, or pairs */
    int first;                    /* tiles per warp issued before the wait */
    struct gemv_shape s;
    float inv_n;       /* 1 / n_in */
    struct gating act; /* PAIR */
};

/* The order in which a warp copies tiles: batches of tiles (PAIR: gate, up, gate, up), then this
 * warp's slices, then the tiles of the batch. So a converted slice of the row serves a whole batch.
 * Lane n holds the address and size of the n-th of the next 32 tiles (size 0: no tile). */
struct gemv_schedule {
    const uint8_t *from;
    int bytes, base, next, each; /* each: slices of this warp */
};

template <bool PAIR>
DEVICE void gemv_look_up(struct gemv_schedule &f, const struct gemv_args &p,
                         const struct gemv_span &s)
{
    int n = f.base + lane_id(), k = quotient(n, f.each * s.most), first = s.first + k * s.most;
    int batch = min(s.most, s.end - first), rest = n - k * f.each * s.most;
    f.bytes = 0;
    if (batch <= 0)
        return;
    int turn = quotient(rest, batch), slice = warp_id() + turn * p.s.warps;
    if (turn >= f.each)
        return;
    int tile = gemv_tile<PAIR>(s, first + rest - turn * batch);
    const struct seg *g = seg_of(p.w, tile);
    f.bytes = g->tile_bytes;
    f.from = tile_address(p.w, g, 0, tile, slice);
}

template <bool PAIR>
DEVICE void gemv_fetch(struct gemv_schedule &f, struct ring &ring, const struct gemv_args &p,
                       const struct gemv_span &s)
{
    if (f.next == 32) {
        f.base += 32;
        f.next = 0;
        gemv_look_up<PAIR>(f, p, s);
    }
    ring_issue(ring, f.from, f.bytes, f.next++);
}

/* Each thread adds up the warps' sums of its output row and writes the result. */
template <bool PAIR, bool NORM>
DEVICE void gemv_write(const struct gemv_output<PAIR> &o, const struct gemv_args &p,
                       const struct gemv_smem &m, const float *sums, int stride)
{
    enum { TILES = PAIR ? 2 : 1 };
    const float *from = sums + (int)(threadIdx.x >> 4) * TILES * TILE_SUMS;
    int row = (int)(threadIdx.x & 15);
    float squares = 0.0f, r[TILES] = {}, scale = 1.0f;
#pragma unroll 8
    for (int w = 0; w < p.s.warps; w++) {
        if (NORM)
            squares += m.squares[w];
#pragma unroll
        for (int i = 0; i < TILES; i++)
            r[i] += from[w * stride + i * TILE_SUMS + row];
    }
    if (NORM)
        scale = rsqrtf(squares * p.inv_n + p.in.eps);
#pragma unroll
    for (int i = 0; i < TILES; i++)
        r[i] = r[i] * scale + o.bias[i];
    *o.to = PAIR ? gated(p.act, r[0], r[TILES - 1]) : r[0];
}

/* The thread bound limits registers (without a norm: 80), so that other kernels fit beside this
 * one. */
template <int SET, bool PAIR, bool NORM>
static __global__ void __launch_bounds__(NORM                ? 512
                                         : set_is_small(SET) ? 768
                                                             : 640)
    gemv_kernel(const __grid_constant__ struct gemv_args p)
{
    enum { TILES = PAIR ? 2 : 1 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int warps = p.s.warps, stages = p.s.stages, n_in = p.w.n_in;
    const struct norm_in in = norm_row(p.in, (int)blockIdx.y, n_in);
    float *y = p.y + (size_t)blockIdx.y * (size_t)(p.w.n_out / TILES);
    struct gemv_smem m = gemv_carve(shared, p.s);
    int warp = warp_id(), lane = lane_id();
    struct gemv_span span = gemv_span_of<PAIR>(p.n_units, p.units_per_block, p.s.batch);
    int first = span.first, end = span.end, most = span.most;
    struct gemv_schedule f = {NULL, 0, 0, stages, quotient(p.w.n_kt - warp + warps - 1, warps)};
    gemv_look_up<PAIR>(f, p, span);
    struct gemv_output<PAIR> out = {
    };
    float v[8];
    ring_fill(m.ring, f.from, f.bytes, 0, p.first);
    dependency_trigger();
    /* The row is loaded one slice ahead of its products. NORM: x + d, whose squares count in the
     * first pass, times the gain; the operands of two slices are loaded together at the start. */
    float squares = 0.0f, gain[2][8];
    int second = warp + warps < p.w.n_kt ? warp + warps : warp;
    auto norm = [&](float(&to)[8], const float(&d)[8], const float(&g)[8], int slice, bool count) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            to[j] += d[j];
        if (count) {
            if (blockIdx.x == 0 && in.x_out)
                store_lane(in.x_out, slice, n_in, to);
#pragma unroll
            for (int j = 0; j < 8; j++)
                squares += to[j] * to[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            to[j] *= g[j];
    };
    auto bring = [&](int slice, bool count) {
        load_lane(in.x, slice, n_in, v);
        if (NORM) {
            float d[8] = {}, g[8];
            load_lane(in.gain, slice, n_in, g);
            if (in.d)
                load_lane(in.d, slice, n_in, d);
            norm(v, d, g, slice, count);
        }
    };
    if (NORM) {
        load_lane(in.gain, warp, n_in, gain[0]);
        load_lane(in.gain, second, n_in, gain[1]);
    }
    gemv_locate<SET>(out, p.w, span, first, y);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    float u[8], d[2][8] = {};
    load_lane(in.x, warp, n_in, v);
    if (NORM && second != warp)
        load_lane(in.x, second, n_in, u);
    if (NORM && in.d) {
        load_lane(in.d, warp, n_in, d[0]);
        load_lane(in.d, second, n_in, d[1]);
    }
    ring_fill(m.ring, f.from, f.bytes, p.first, stages);
    typename slice_for<SET, NORM>::type x;
    if (NORM)
        norm(v, d[0], gain[0], warp, true);
    slice_make(x, v);
    if (NORM && second != warp) {
        norm(u, d[1], gain[1], second, true);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = u[j];
    } else if (second != warp) {
        load_lane(in.x, second, n_in, v);
    }
    mark(mk, 4);
    int staged = warp, odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end;) {
        int batch = min(most, end - tile), stride = most * TILE_SUMS;
        float *sums = m.sums + odd * warps * stride;
#pragma unroll 1
        for (int slice = warp; slice < p.w.n_kt; slice += warps) {
            if (slice != staged) {
                slice_make(x, v);
                staged = slice;
                int after = slice + warps;
                if (after >= p.w.n_kt)
                    after = tile + batch < end ? warp : slice;
                if (after != slice)
                    bring(after, tile == first && after > slice);
            }
#pragma unroll 1
            for (int b = 0; b < batch; b++) {
                float sum[2] = {}, *partials = sums + warp * stride + b * TILE_SUMS;
                const uint8_t *there = ring_wait(m.ring);
                if (tile + b == first && slice == warp)
                    mark(mk, 5);
                gemv_dot<SET, NORM || SET >= SET_ONE ? 4 : 2>(out, p.w, span, tile, b, there, x,
                                                              sum);
                if (slice != warp)
                    add_sums(partials, sum);
                else
                    store_sums(partials, sum);
                ring_release(m.ring);
                gemv_fetch<PAIR>(f, m.ring, p, span);
            }
        }
        mark(mk, 6);
        if (tile == first && NORM) {
            squares = warp_sum(squares);
            if (lane == 0)
                m.squares[warp] = squares;
        }
        odd ^= 1;
        __syncthreads();
        mark(mk, 7);
        if (out.to)
            gemv_write<PAIR, NORM>(out, p, m, sums, stride);
        tile += batch;
        if (tile < end)
            gemv_locate<SET>(out, p.w, span, tile, y);
    }
    copy_async_wait<0>();
    marks_end(mk, PAIR ? 2 : NORM ? 1 : 3);
}

/* tiles: of a block; per_warp: of a warp over all its slices. The ring leaves room for another
 * kernel, so that the next kernel's first tiles are in flight before this one ends. */
static struct gemv_shape gemv_plan(const struct cuda_backend *cu, const struct matrix *w, int warps,
                                   int tiles, int per_warp)
{
    struct gemv_shape s;
    int most = 2 * warps < BATCH ? 2 * warps : BATCH; /* one thread per row */
    int stages = cu->sm >= 90 ? STAGES : 4;           /* see ring_wait */
    int batches = ceil_div(tiles, most);
    s.batch = batches == 1 ? tiles : (ceil_div(tiles, batches) + 1) / 2 * 2; /* even, for pairs */
    s.sums = tiles > s.batch ? 2 : 1;
    s.warps = warps;
    s.slot = w->max_tile_bytes;
    s.stages = per_warp < stages ? per_warp : stages;
    while (s.stages > 1 &&
           (warps * s.stages * s.slot > ring_room(w) || gemv_shared(s) > cu->shared_limit))
        s.stages--;
    return s;
}

template <int SET, bool PAIR>
static void gemv_launch_set(struct cuda_backend *cu, const struct gemv_args &p, dim3 grid)
{
    cuda_launch(cu, p.in.gain ? gemv_kernel<SET, PAIR, true> : gemv_kernel<SET, PAIR, false>, grid,
                p.s.warps * 32, gemv_shared(p.s), LAUNCH_EARLY, p);
}

template <bool PAIR>
static void gemv_launch(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                        float *y, int rows, const struct gating &act)
{
    int warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS, units = w->n_tiles / (PAIR ? 2 : 1);
    for (;; warps = (warps + 1) / 2) { /* large tiles, little shared memory: fewer warps */
        struct gemv_shape least = {warps, 1, w->max_tile_bytes, BATCH, 2};
        if (warps == 1 ||
            (gemv_shared(least) <= cu->shared_limit && (w->set != SET_ALL || warps <= 8)))
            break;
    }
    /* One block per SM: its warps reuse the converted row for many tiles. */
    int per_block = ceil_div(units * rows, cu->n_sm);
    per_block = per_block < units ? per_block : units;
    struct gemv_args p = {};
    p.w = *w;
    p.in = *in;
    p.act = act;
    p.y = y;
    p.n_units = units;
    p.units_per_block = per_block;
    int tiles = per_block * (PAIR ? 2 : 1);
    p.s = gemv_plan(cu, w, warps, tiles, tiles * ceil_div(w->n_kt, warps));
    p.inv_n = 1.0f / (float)w->n_in;
    int each = warps * p.s.slot, all = each * tiles * ceil_div(w->n_kt, warps);
    p.first = all <= SHORT_BYTES ? p.s.stages : FIRST_BYTES / each;
    p.first = p.first < 1 ? 1 : p.first < p.s.stages ? p.first : p.s.stages;
    dim3 grid((unsigned)ceil_div(units, per_block), (unsigned)rows);
    matrix_set(w, [&](auto set) { gemv_launch_set<set.VALUE, PAIR>(cu, p, grid); });
}

void gemv_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                 float *y, int rows)
{
    gemv_launch<false>(cu, w, in, y, rows, gating{});
}

void gemv_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
              const struct gating &act, const struct norm_in *in, float *y, int rows)
{
    gemv_launch<true>(cu, gate_up, in, cu->mlp.hidden, rows, act);
    struct norm_in plain = {};
    plain.x = cu->mlp.hidden;
    gemv_launch<false>(cu, down, &plain, y, rows, gating{});
}
