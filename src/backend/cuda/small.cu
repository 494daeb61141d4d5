/*
 * Steps of one row, or a few: bound by reads, and below them by latency, since a layer is a few microseconds.
 * A block owns 16 output rows at a time; its warps cut k between them, 256 columns ("a slice") each.
 * A warp turns its slice of the activations into halves on its own and streams its weight tiles
 * through a ring of its own in shared memory; the block meets only to add up. What does not depend on
 * the step (all weights but experts') is on its way before the kernel in front has finished. Kernels
 * are kept short, and loops rolled, because between two launches of one of them others have filled
 * the instruction cache.
 *
 * A norm in front of a product is folded in: the gain goes into the activations, the sum of squares
 * is gathered on the side and divides the sums at the end.
 */
#include "backend/cuda/dot.cuh"

#include <math.h>

enum { MAX_WARPS = 16, MAX_USED = 16, MAX_EXPERTS = 512, EXPERT_WARPS = 8 };

/* This lane's columns of slice `slice`: see dot.cuh. n is a multiple of 8; zeros from there on. */
DEVICE int lane_column(int slice)
{
    return slice * TILE_K + (lane_id() >> 2) * 32 + (lane_id() & 3) * 4;
}
DEVICE void load_lane(const float *p, int k, int n, float (&v)[8])
{
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 a = k < n ? *(const float4 *)(p + k) : zero;
    float4 b = k + 16 < n ? *(const float4 *)(p + k + 16) : zero;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void store_lane(float *p, int k, int n, const float (&v)[8])
{
    if (k < n)
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
    if (k + 16 < n)
        *(float4 *)(p + k + 16) = make_float4(v[4], v[5], v[6], v[7]);
}

/* Shared memory: rings, sums, squares. */
struct small_shape {
    int warps, stages, slot; /* slot: bytes of a ring entry */
};

enum { BATCH = 4 /* tiles between two meetings */ };

static size_t small_shared(const struct small_shape &s)
{
    return (size_t)s.warps * (size_t)(s.stages * s.slot + (2 * BATCH * TILE_ROWS + 1) * 4);
}

struct small_smem {
    uint8_t *ring;  /* this warp's */
    float *sums;    /* (2, warps, BATCH, 16) */
    float *squares; /* (warps) */
};

DEVICE struct small_smem small_carve(uint8_t *base, const struct small_shape &s)
{
    struct small_smem m;
    m.ring = base + warp_id() * s.stages * s.slot;
    m.sums = (float *)(base + s.warps * s.stages * s.slot);
    m.squares = m.sums + 2 * s.warps * BATCH * TILE_ROWS;
    return m;
}

/* This warp's sums of a tile: quads add up to rows. */
DEVICE void put_sums(float *to, float (&sum)[2])
{
    int lane = lane_id();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 1);
        sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 2);
    }
    if (!(lane & 3)) {
        to[lane >> 2] = sum[0];
        to[(lane >> 2) + 8] = sum[1];
    }
}

/* Adds up entry i of every warp's sums, which are `stride` apart. */
DEVICE float take_sum(const float *sums, int warps, int stride, int i)
{
    float v = 0.0f;
#pragma unroll 4
    for (int w = 0; w < warps; w++)
        v += sums[w * stride + i];
    return v;
}

/* A position in a ring of `stages` entries. */
DEVICE int ring_next(int at, int stages)
{
    return at + 1 == stages ? 0 : at + 1;
}

/* Until the oldest of `stages` groups under way has landed. */
DEVICE void ring_wait(int stages)
{
    if (stages >= 3)
        copy_async_wait<2>();
    else if (stages == 2)
        copy_async_wait<1>();
    else
        copy_async_wait<0>();
    __syncwarp();
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

/* y = [norm](x) W^T (+ bias); blockIdx.y is the row. Tiles come in batches of BATCH rows of tiles (PAIR: of half as many
 * pairs, gate and up of the same rows, and y = silu(gate) up). */
struct small_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int n_units, units_per_block; /* units: tiles, or pairs */
    struct small_shape s;
};

template <int SET, bool PAIR>
static __global__ void __launch_bounds__(MAX_WARPS * 32, SET == SET_ALL ? 1 : 2)
    small_kernel(const __grid_constant__ struct small_args p)
{
    enum { TILES = PAIR ? 2 : 1 };
    SHARED_BYTES(shared);
    int warps = p.s.warps, stages = p.s.stages, n_in = p.w.n_in;
    const struct norm_in in = norm_row(p.in, (int)blockIdx.y, n_in);
    float *y = p.y + (size_t)blockIdx.y * (size_t)(p.w.n_out / TILES);
    struct small_smem m = small_carve(shared, p.s);
    int warp = warp_id(), lane = lane_id();
    int first = (int)blockIdx.x * p.units_per_block * TILES;
    int end = min(first + p.units_per_block * TILES, p.n_units * TILES);

    /* Tiles in order: tiles of this block (PAIR: gate, up, gate, up), slices of this warp. */
    auto tile_of = [&](int n) { return PAIR ? (n >> 1) + (n & 1) * p.n_units : n; };
    int f_tile = first, f_slice = warp, f_at = 0;
    auto fetch = [&]() {
        if (f_tile < end) {
            int tile = tile_of(f_tile);
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + f_at * p.s.slot, tile_address(p.w, s, 0, tile, f_slice),
                       s->tile_bytes);
            f_slice += warps;
            if (f_slice >= p.w.n_kt) {
                f_slice = warp;
                f_tile++;
            }
            f_at = ring_next(f_at, stages);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n < stages; n++)
        fetch();
    float gain[8];
    if (in.gain)
        load_lane(in.gain, lane_column(warp), n_in, gain);
    dependency_trigger();
    dependency_wait();

    struct row_slice x = {};
    float squares = 0.0f;
    int staged = -1, at = 0, odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end;) {
        int batch = min((int)BATCH, end - tile), stride = BATCH * TILE_ROWS;
        float *sums = m.sums + odd * warps * stride;
#pragma unroll 1
        for (int b = 0; b < batch; b++) {
            const struct seg *s = seg_of(p.w, tile_of(tile + b));
            float sum[2] = {};
#pragma unroll 1
            for (int slice = warp; slice < p.w.n_kt; slice += warps) {
                if (slice != staged) {
                    int k = lane_column(slice);
                    float v[8], d[8];
                    load_lane(in.x, k, n_in, v);
                    if (in.gain) {
                        if (in.d) {
                            load_lane(in.d, k, n_in, d);
#pragma unroll
                            for (int j = 0; j < 8; j++)
                                v[j] += d[j];
                        }
                        if (staged >= 0)
                            load_lane(in.gain, k, n_in, gain);
                        if (tile == first && b == 0) {
                            if (blockIdx.x == 0 && in.x_out)
                                store_lane(in.x_out, k, n_in, v);
#pragma unroll
                            for (int j = 0; j < 8; j++)
                                squares += v[j] * v[j];
                        }
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            v[j] *= gain[j];
                    }
                    staged = slice;
                    x = slice_make(v);
                }
                ring_wait(stages);
                tile_dot<SET>(s, m.ring + at * p.s.slot, x, 1.0f, sum);
                at = ring_next(at, stages);
                __syncwarp(); /* every lane is done with the entry that is fetched over */
                fetch();
            }
            put_sums(sums + warp * stride + b * TILE_ROWS, sum);
        }
        if (tile == first && in.gain) {
            squares = warp_sum(squares);
            if (lane == 0)
                m.squares[warp] = squares;
        }
        odd ^= 1;
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < batch / TILES * TILE_ROWS; i += (int)blockDim.x) {
            int unit = (i >> 4) * TILES, t = tile_of(tile + unit);
            const struct seg *s = seg_of(p.w, t);
            int row = (t - s->tile0) * TILE_ROWS + (i & 15);
            if (row >= s->rows)
                continue;
            float scale = 1.0f;
            if (in.gain)
                scale = rsqrtf(take_sum(m.squares, warps, 1, 0) / (float)n_in + in.eps);
            float v = take_sum(sums, warps, stride, unit * TILE_ROWS + (i & 15)) * scale;
            row += s->row0;
            if (p.w.bias)
                v += p.w.bias[row];
            if (PAIR) {
                float up = take_sum(sums, warps, stride, (unit + 1) * TILE_ROWS + (i & 15)) * scale;
                if (p.w.bias)
                    up += p.w.bias[p.w.n_out / 2 + row];
                v = silu(v) * up;
            }
            y[row] = v;
        }
        tile += batch;
    }
    copy_async_wait<0>();
}

/* per_warp: tiles a warp streams in all. Two blocks find room in an SM, so that the next kernel's
 * first tiles are under way before this one ends. */
static struct small_shape small_plan(const struct matrix *w, int warps, int per_warp)
{
    struct small_shape s;
    s.warps = warps;
    s.slot = w->max_tile_bytes;
    s.stages = per_warp < 3 ? per_warp : 3;
    while (s.stages > 1 && small_shared(s) > 96 << 10)
        s.stages--;
    return s;
}

template <bool PAIR>
static void small_launch(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                         float *y, int rows)
{
    int warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS, units = w->n_tiles / (PAIR ? 2 : 1);
    for (;; warps = (warps + 1) / 2) { /* large tiles, little shared memory: fewer warps */
        struct small_shape least = {warps, 1, w->max_tile_bytes};
        if (warps == 1 ||
            (small_shared(least) <= cu->shared_limit && (w->set != SET_ALL || warps <= 8)))
            break;
    }
    /* Blocks of one unit while the machine holds them all at once, else as many as it holds. */
    int tiles = ceil_div(w->n_kt, warps) * (PAIR ? 2 : 1), per_block = 1;
    struct small_shape plan = small_plan(w, warps, tiles);
    for (int i = 0; i < 2; i++) { /* longer stretches may want more stages, which take more room */
        int held = (int)(cu->shared_per_sm / (small_shared(plan) + 1024)), by_regs = 32 / warps;
        held = held < by_regs ? held : by_regs;
        held = held < 1 ? 1 : held > 4 ? 4 : held;
        per_block = ceil_div(units, cu->n_sm * held);
        plan = small_plan(w, warps, per_block * tiles);
    }
    struct small_args p = {*w, *in, y, units, per_block, plan};
    size_t shared = small_shared(p.s);
    dim3 grid((unsigned)ceil_div(units, per_block), (unsigned)rows);
    if (w->set == SET_ALL)
        cuda_launch(cu, small_kernel<SET_ALL, PAIR>, grid, warps * 32, shared, LAUNCH_EARLY, p);
    else if (w->set == SET_FAST)
        cuda_launch(cu, small_kernel<SET_FAST, PAIR>, grid, warps * 32, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, small_kernel<SET_K, PAIR>, grid, warps * 32, shared, LAUNCH_EARLY, p);
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

/* Router logits (rows, n_expert) in plain floats: a warp per expert, its row in registers before the
 * wait. n = norm(x + d) is made by every block for itself; block 0 also stores it. */
struct router_args {
    struct matrix w;
    struct norm_in in;
    float *n;      /* (rows, n_embd) or NULL */
    float *logits; /* (rows, n_expert) */
    int rows, rows_per_block;
};

DEVICE void load8f(const float *p, float (&v)[8])
{
    float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void store8f(float *p, const float (&v)[8])
{
    *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    *(float4 *)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

/* Grid: (groups of 8 experts, groups of rows); 8 warps. */
static __global__ void __launch_bounds__(256)
    router_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    float *n = (float *)shared;          /* (padded n_embd) one row at a time */
    float *part = n + p.w.n_kt * TILE_K; /* (8) */
    int warp = warp_id(), lane = lane_id(), n_embd = p.w.n_in, n_kt = p.w.n_kt;
    int e = (int)blockIdx.x * 8 + warp;
    bool mine = e < p.w.n_out;
    const float *row =
        (const float *)(p.w.seg[0].base + (size_t)(e / TILE_ROWS) * (size_t)n_kt * F32_BYTES) +
        (e % TILE_ROWS) * TILE_K + lane * 8;
    enum { KEPT = 8, TILE_FLOATS = F32_BYTES / 4 }; /* k tiles a lane keeps in registers */
    float w[KEPT][8];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (mine && i < n_kt)
            load8f(row + i * TILE_FLOATS, w[i]);
    dependency_trigger();
    dependency_wait();
    int t0 = (int)blockIdx.y * p.rows_per_block, t1 = min(t0 + p.rows_per_block, p.rows);
#pragma unroll 1
    for (int t = t0; t < t1; t++) {
        float squares = 0.0f;
        size_t base = (size_t)t * (size_t)n_embd;
        __syncthreads(); /* the last row's n has been read */
#pragma unroll 1
        for (int k = (int)threadIdx.x * 8; k < n_kt * TILE_K; k += 2048) {
            float v[8] = {}, d[8];
            if (k < n_embd) {
                load8f(p.in.x + base + (size_t)k, v);
                if (p.in.gain) {
                    if (p.in.d) {
                        load8f(p.in.d + base + (size_t)k, d);
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            v[j] += d[j];
                    }
                    if (blockIdx.x == 0 && p.in.x_out)
                        store8f(p.in.x_out + base + (size_t)k, v);
                    load8f(p.in.gain + k, d);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        squares += v[j] * v[j];
                        v[j] *= d[j];
                    }
                }
            }
            store8f(n + k, v);
        }
        if (p.in.gain) {
            squares = warp_sum(squares);
            if (lane == 0)
                part[warp] = squares;
        }
        __syncthreads();
        float rms = 1.0f;
        if (p.in.gain)
            rms = rsqrtf(take_sum(part, 8, 1, 0) / (float)n_embd + p.in.eps);
        float dot = 0.0f;
        if (mine) {
#pragma unroll
            for (int i = 0; i < KEPT; i++)
                if (i < n_kt) {
                    float v[8];
                    load8f(n + i * TILE_K + lane * 8, v);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        dot += w[i][j] * v[j];
                }
#pragma unroll 1
            for (int i = KEPT; i < n_kt; i++)
#pragma unroll 1
                for (int j = 0; j < 8; j++)
                    dot += row[i * TILE_FLOATS + j] * n[i * TILE_K + lane * 8 + j];
        }
        dot = warp_sum(dot);
        if (mine && lane == 0)
            p.logits[(size_t)t * (size_t)p.w.n_out + (size_t)e] =
                dot * rms + (p.w.bias ? p.w.bias[e] : 0.0f);
        if (blockIdx.x == 0 && p.n)
#pragma unroll 1
            for (int k = (int)threadIdx.x; k < n_embd; k += 256)
                p.n[base + (size_t)k] = n[k] * rms;
    }
}

void small_router(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows)
{
    int per = rows <= 64 ? ceil_div(rows, 16) : 4; /* a block for every row while there are few */
    struct router_args p = {*w, *in, n, cu->router, rows, per};
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    cuda_launch(cu, router_kernel,
                dim3((unsigned)ceil_div(w->n_out, 8), (unsigned)ceil_div(rows, per)), 256,
                (size_t)w->n_kt * TILE_K * 4 + 64, LAUNCH_EARLY, p);
}

/* How experts are chosen. */
struct route_rule {
    int n_expert, used;
    bool renormalise;
    float scale;
};

/* The chosen experts, in shared memory of each block that needs them. */
struct __align__(16) choices
{
    float logit[MAX_EXPERTS];
    int chosen[MAX_USED];
    float weight[MAX_USED];
};

/* One warp takes the largest `used` times. PER: logits a lane holds. The order is that of the
 * logits' upper 32 - BITS bits (their difference from the rest is below what rounding upstream makes
 * of them), then of the lower index: both in one integer, so that one reduction finds the next. */
template <int PER, int BITS>
DEVICE void choose_warp(struct choices *ch, const float *logits, const struct route_rule &rule)
{
    const uint32_t low = (1u << BITS) - 1;
    int lane = lane_id();
    uint32_t key[PER], mine = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        float v = e < rule.n_expert ? load_float_l2(logits + e) : 0.0f;
        key[i] = e < rule.n_expert ? (float_order(v) & ~low) | (low - (uint32_t)e) : 0;
        if (e < rule.n_expert)
            ch->logit[e] = v;
    }
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < rule.used; k++) {
        uint32_t best = key[0];
#pragma unroll
        for (int i = 1; i < PER; i++)
            best = key[i] > best ? key[i] : best;
        best = warp_max_u32(best);
        mine = lane == k ? best : mine;
#pragma unroll
        for (int i = 0; i < PER; i++)
            key[i] = key[i] == best ? 0 : key[i];
    }
    if (lane < rule.used) {
        int e = min((int)(low - (mine & low)), rule.n_expert - 1);
        ch->chosen[lane] = e;
        ch->weight[lane] = ch->logit[e];
    }
}

/* Experts, and their logits as weights. The block. */
DEVICE void choose_experts(struct choices *ch, const float *logits, const struct route_rule &rule)
{
    if (warp_id() == 0) {
        if (rule.n_expert <= 128)
            choose_warp<4, 7>(ch, logits, rule);
        else
            choose_warp<MAX_EXPERTS / 32, 9>(ch, logits, rule);
    }
    __syncthreads();
}

/* Logits of the chosen to weights; one warp. */
DEVICE void weigh_experts(struct choices *ch, const struct route_rule &rule)
{
    int lane = lane_id();
    float top = ch->weight[0], w = lane < rule.used ? fast_exp(ch->weight[lane] - top) : 0.0f;
    float total = rule.renormalise ? w : 0.0f;
    if (!rule.renormalise)
#pragma unroll 1
        for (int e = lane; e < rule.n_expert; e += 32)
            total += fast_exp(ch->logit[e] - top);
    total = warp_sum(total);
    __syncwarp();
    if (lane < rule.used)
        ch->weight[lane] = w / total * rule.scale;
}

struct expert_args {
    struct matrix w;
    const float *logits; /* (rows, n_expert) */
    const float *x;      /* gate_up: (rows, n_embd); down: hidden (rows, used, n_in) */
    float *y;            /* gate_up: hidden (rows, used, n_ff); down: (rows, n_embd) */
    struct route_rule rule;
    struct small_shape s;
};

/* hidden[k, :] = silu(x Wg^T) * (x Wu^T) for every chosen expert. Blocks: x over tiles of 16 hidden
 * units, y over (row, chosen expert); 8 warps. Rows that chose the same expert read it twice: few do,
 * and it is in the L2 by then. */
template <int SET>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : 4)
    expert_up_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    int stages = p.s.stages;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s);
    int warp = warp_id();
    int first = (int)blockIdx.x, half = p.w.n_tiles / 2, n_embd = p.w.n_in;
    int row_in = (int)blockIdx.y / p.rule.used, pick = (int)blockIdx.y - row_in * p.rule.used;
    const float *x_row = p.x + (size_t)row_in * (size_t)n_embd;

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
    float v[8];
    load_lane(x_row, lane_column(warp), n_embd, v);
    choose_experts(ch, p.logits + row_in * p.rule.n_expert, p.rule);
    int e = ch->chosen[pick];

    int f_slice = warp, f_half = 0, f_at = 0;
    auto fetch = [&]() {
        if (f_slice < p.w.n_kt) {
            int tile = first + f_half * half;
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + f_at * p.s.slot, tile_address(p.w, s, e, tile, f_slice),
                       s->tile_bytes);
            f_slice += f_half ? EXPERT_WARPS : 0;
            f_half ^= 1;
            f_at = ring_next(f_at, stages);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n < stages; n++)
        fetch();

    float sum[2][2] = {};
    int at = 0;
#pragma unroll 1
    for (int slice = warp; slice < p.w.n_kt; slice += EXPERT_WARPS) {
        if (slice != warp)
            load_lane(x_row, lane_column(slice), n_embd, v);
        struct row_slice x = slice_make(v);
#pragma unroll 1
        for (int j = 0; j < 2; j++) {
            float part[2] = {};
            ring_wait(stages);
            tile_dot<SET>(seg_of(p.w, first + j * half), m.ring + at * p.s.slot, x, 1.0f, part);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[0][i] += j == 0 ? part[i] : 0.0f;
                sum[1][i] += j == 1 ? part[i] : 0.0f;
            }
            at = ring_next(at, stages);
            __syncwarp();
            fetch();
        }
    }
    copy_async_wait<0>();
    int stride = 2 * TILE_ROWS;
    put_sums(m.sums + warp * stride, sum[0]);
    put_sums(m.sums + warp * stride + TILE_ROWS, sum[1]);
    __syncthreads();
    int n_ff = p.w.n_out / 2, r = (int)threadIdx.x, row = first * TILE_ROWS + r;
    if (r < TILE_ROWS && row < p.w.seg[0].rows) {
        float gate = take_sum(m.sums, EXPERT_WARPS, stride, r);
        float up = take_sum(m.sums, EXPERT_WARPS, stride, TILE_ROWS + r);
        p.y[(size_t)blockIdx.y * (size_t)n_ff + (size_t)row] = silu(gate) * up;
    }
}

/* y = sum over the chosen of weight * hidden Wd^T; blockIdx.y is the row. A block owns 16 output
 * rows; its warps share out the (expert, slice) pairs. Few threads and registers, so that it is resident, with its weights on
 * the way, while the kernel in front still runs. */
template <int SET>
static __global__ void __launch_bounds__(EXPERT_WARPS * 32, SET == SET_ALL ? 1 : 4)
    expert_down_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    int stages = p.s.stages;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s);
    int warp = warp_id(), tile = (int)blockIdx.x;
    const struct seg *s = seg_of(p.w, tile);
    int n_in = p.w.n_in, n_kt = p.w.n_kt, used = p.rule.used, row_in = (int)blockIdx.y;
    const float *x_row = p.x + (size_t)(row_in * used) * (size_t)n_in;

    dependency_trigger();
    choose_experts(ch, p.logits + row_in * p.rule.n_expert,
                   p.rule);                /* written two kernels ago: see expert_up_kernel */
    int f_pick = warp, f_kt = 0, f_at = 0; /* a warp takes every eighth expert, slice by slice */
    auto fetch = [&]() {
        if (f_pick < used) {
            tile_fetch(m.ring + f_at * p.s.slot,
                       tile_address(p.w, s, ch->chosen[f_pick], tile, f_kt), s->tile_bytes);
            if (++f_kt == n_kt) {
                f_kt = 0;
                f_pick += EXPERT_WARPS;
            }
            f_at = ring_next(f_at, stages);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n < stages; n++)
        fetch();
    if (warp == 0)
        weigh_experts(ch, p.rule);
    __syncthreads();
    dependency_wait();

    float sum[2] = {}, v[8];
    int at = 0;
    if (warp < used)
        load_lane(x_row + (size_t)warp * (size_t)n_in, lane_column(0), n_in, v);
#pragma unroll 1
    for (int pick = warp, kt = 0; pick < used;) {
        struct row_slice x = slice_make(v);
        float weight = ch->weight[pick];
        if (++kt == n_kt) {
            kt = 0;
            pick += EXPERT_WARPS;
        }
        if (pick < used) /* the next slice's, on their way during the product */
            load_lane(x_row + (size_t)pick * (size_t)n_in, lane_column(kt), n_in, v);
        ring_wait(stages);
        tile_dot<SET>(s, m.ring + at * p.s.slot, x, weight, sum);
        at = ring_next(at, stages);
        __syncwarp();
        fetch();
    }
    copy_async_wait<0>();
    put_sums(m.sums + warp * TILE_ROWS, sum);
    __syncthreads();
    int r = (int)threadIdx.x, row = (tile - s->tile0) * TILE_ROWS + r;
    if (r < TILE_ROWS && row < s->rows)
        p.y[(size_t)row_in * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
            take_sum(m.sums, EXPERT_WARPS, TILE_ROWS, r);
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
    struct small_shape a = {EXPERT_WARPS, 2, gate_up->max_tile_bytes};
    struct small_shape b = {EXPERT_WARPS, 2, down->max_tile_bytes};
    return sizeof(struct choices) + small_shared(a) <= cu->shared_limit &&
           sizeof(struct choices) + small_shared(b) <= cu->shared_limit;
}

void small_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
               const struct matrix *down, const struct norm_in *in, float *n, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    CHECK(s->n_expert_used <= MAX_USED && router->n_out <= MAX_EXPERTS, "%d of %d experts",
          s->n_expert_used, router->n_out);
    small_router(cu, router, in, n, rows);
    struct route_rule rule = {router->n_out, s->n_expert_used, s->norm_topk, s->expert_scale};
    struct expert_args p = {
        *gate_up,
        cu->router,
        in->gain ? n : in->x,
        cu->hidden,
        rule,
        small_plan(gate_up, EXPERT_WARPS, 2 * ceil_div(gate_up->n_kt, EXPERT_WARPS))};
    size_t shared = sizeof(struct choices) + small_shared(p.s);
    dim3 grid((unsigned)(gate_up->n_tiles / 2), (unsigned)(rule.used * rows));
    LAUNCH_EXPERTS(expert_up_kernel, p);

    struct expert_args q = {
        *down,      cu->router,
        cu->hidden, y,
        rule,       small_plan(down, EXPERT_WARPS, ceil_div(rule.used, EXPERT_WARPS) * down->n_kt)};
    shared = sizeof(struct choices) + small_shared(q.s);
    grid = dim3((unsigned)down->n_tiles, (unsigned)rows);
    LAUNCH_EXPERTS(expert_down_kernel, q);
}
