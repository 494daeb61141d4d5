/*
 * Products for steps of at most 8 rows: bound by reads, and below them by latency, since a layer is
 * a few microseconds. A block owns 16 output rows at a time; its warps cut k between them, 256
 * columns ("a slice") each. The 8 columns of the tensor-core fragment are the rows of the step, so
 * one to eight rows cost the same reads and the same arithmetic. A warp turns its slice of the
 * activations into halves on its own and streams its weight tiles through a ring of its own in
 * shared memory; the block meets only to add up. Weights that do not depend on the step (all but
 * experts) are on their way before the kernel in front has finished. Kernels are kept short, and
 * loops rolled, because between two launches of one of them others have filled the instruction
 * cache.
 *
 * A norm in front of a product is folded in: the gain goes into the activations, the sum of squares
 * is gathered on the side and divides the sums at the end.
 */
#include "backend/cuda/dot.cuh"

#include <math.h>

enum { MAX_WARPS = 16, MAX_USED = 16, MAX_EXPERTS = 512, EXPERT_WARPS = 8 };

/* Eight floats from p + k, zeros from n on. n is a multiple of 8, and so is k. */
DEVICE void load_row8(const float *p, int k, int n, float (&v)[8])
{
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (k < n) {
        a = *(const float4 *)(p + k);
        b = *(const float4 *)(p + k + 4);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

DEVICE void store_row8(float *p, int k, int n, const float (&v)[8])
{
    if (k < n) {
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(p + k + 4) = make_float4(v[4], v[5], v[6], v[7]);
    }
}

/* Shared memory: rings, slices, sums (twice, for odd and even units), squares. */
struct small_shape {
    int warps, stages, slot; /* slot: bytes of a ring entry */
};

static size_t small_shared(const struct small_shape &s, int rows, int tiles)
{
    size_t per_warp = (size_t)(s.stages * s.slot) + slice_bytes(rows) +
                      (size_t)(2 * tiles * TILE_ROWS * rows + SMALL_ROWS) * 4;
    return per_warp * (size_t)s.warps;
}

struct small_smem {
    uint8_t *ring, *slice; /* this warp's */
    float *sums;           /* (2, warps, tiles, rows, 16) */
    float *squares;        /* (warps, SMALL_ROWS) */
};

DEVICE struct small_smem small_carve(uint8_t *base, const struct small_shape &s, int rows,
                                     int tiles)
{
    struct small_smem m;
    int w = warp_id(), slice = SLICE_X + rows * SLICE_STRIDE * 2;
    m.ring = base + w * s.stages * s.slot;
    base += s.warps * s.stages * s.slot;
    m.slice = base + w * slice;
    m.sums = (float *)(base + s.warps * slice);
    m.squares = m.sums + 2 * s.warps * tiles * TILE_ROWS * rows;
    return m;
}

/* This warp's sums of one tile: [row of the step][row of the tile] */
template <bool ONE> DEVICE void put_sums(float *to, int rows, const float (&sum)[4])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int j = 0; j < (ONE ? 1 : 2); j++) {
        int t = 2 * c + j;
        if (t < rows) {
            to[t * TILE_ROWS + g] = sum[j];
            to[t * TILE_ROWS + g + 8] = sum[2 + j];
        }
    }
}

/* Adds up entry i of every warp's sums, which are `stride` apart. */
DEVICE float take_sum(const float *sums, int warps, int stride, int i)
{
    float v = 0.0f;
#pragma unroll 2
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

/* y = [norm](x) W^T (+ bias). PAIR: a unit is two tiles, gate and up of the same rows, and
 * y = silu(gate) up; else one tile. */
struct small_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int rows, ldy, n_units;
    struct small_shape s;
};

template <int SET, bool ONE, bool PAIR>
static __global__ void __launch_bounds__(MAX_WARPS * 32, 1)
    small_kernel(const __grid_constant__ struct small_args p)
{
    enum { TILES = PAIR ? 2 : 1 };
    SHARED_BYTES(shared);
    int rows = ONE ? 1 : p.rows, warps = p.s.warps, stages = p.s.stages;
    struct small_smem m = small_carve(shared, p.s, rows, TILES);
    int warp = warp_id(), lane = lane_id(), c = lane & 3, n_in = p.w.n_in;

    /* Tiles in order: units of this block, slices of this warp, gate and up. */
    int f_unit = (int)blockIdx.x, f_slice = warp, f_half = 0, f_at = 0;
    auto fetch = [&]() {
        if (f_unit < p.n_units) {
            int tile = f_unit + (PAIR ? f_half * p.n_units : 0);
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + f_at * p.s.slot, tile_address(p.w, s, 0, tile, f_slice),
                       s->tile_bytes);
            if (!PAIR || ++f_half == TILES) {
                f_half = 0;
                f_slice += warps;
                if (f_slice >= p.w.n_kt) {
                    f_slice = warp;
                    f_unit += (int)gridDim.x;
                }
            }
            f_at = ring_next(f_at, stages);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n < stages; n++)
        fetch();
    dependency_trigger();
    dependency_wait();

    struct slice_view view = slice_view_of(m.slice, rows);
    float squares = 0.0f, undo[2] = {0.0f, 0.0f};
    int staged = -1, at = 0, odd = 0;
    bool first = true;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < p.n_units; unit += (int)gridDim.x) {
        float sum[TILES][4] = {};
#pragma unroll 1
        for (int slice = warp; slice < p.w.n_kt; slice += warps) {
            if (slice != staged) {
                staged = slice;
                int k = slice * TILE_K + lane * 8;
                __syncwarp(); /* the last slice has been read */
#pragma unroll 1
                for (int t = 0; t < rows; t++) {
                    size_t row = (size_t)t * (size_t)n_in;
                    float v[8];
                    load_row8(p.in.x + row, k, n_in, v);
                    if (p.in.gain) {
                        float d[8];
                        if (p.in.d) {
                            load_row8(p.in.d + row, k, n_in, d);
#pragma unroll
                            for (int j = 0; j < 8; j++)
                                v[j] += d[j];
                        }
                        if (blockIdx.x == 0 && first && p.in.x_out)
                            store_row8(p.in.x_out + row, k, n_in, v);
                        load_row8(p.in.gain, k, n_in, d);
                        float sq = 0.0f;
#pragma unroll
                        for (int j = 0; j < 8; j++) {
                            sq += v[j] * v[j];
                            v[j] *= d[j];
                        }
                        if (first) {
                            if (ONE)
                                squares += sq;
                            else { /* lane t keeps row t's */
                                sq = warp_sum(sq);
                                squares += lane == t ? sq : 0.0f;
                            }
                        }
                    }
                    float u = stage_row(m.slice, t, v);
                    if (t == 2 * c)
                        undo[0] = u;
                    if (t == 2 * c + 1)
                        undo[1] = u;
                }
                __syncwarp();
            }
#pragma unroll 1
            for (int j = 0; j < TILES; j++) {
                const struct seg *s = seg_of(p.w, unit + (PAIR ? j * p.n_units : 0));
                ring_wait(stages);
                float part[4] = {};
                tile_dot<SET>(s, m.ring + at * p.s.slot, view, undo, part);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[0][i] += j == 0 ? part[i] : 0.0f;
                    if (PAIR)
                        sum[TILES - 1][i] += j == 1 ? part[i] : 0.0f;
                }
                at = ring_next(at, stages);
                __syncwarp(); /* every lane is done with the entry that is fetched over */
                fetch();
            }
        }
        int stride = TILES * TILE_ROWS * rows;
        float *sums = m.sums + odd * warps * stride;
        put_sums<ONE>(sums + warp * stride, rows, sum[0]);
        if (PAIR)
            put_sums<ONE>(sums + warp * stride + TILE_ROWS * rows, rows, sum[TILES - 1]);
        if (first && p.in.gain) {
            if (ONE)
                squares = warp_sum(squares);
            if (lane < rows)
                m.squares[warp * SMALL_ROWS + lane] = squares;
        }
        first = false;
        odd ^= 1;
        __syncthreads();

        const struct seg *s = seg_of(p.w, unit);
        int row0 = (unit - s->tile0) * TILE_ROWS;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < TILE_ROWS * rows; i += (int)blockDim.x) {
            int t = ONE ? 0 : i / TILE_ROWS, row = row0 + (i & 15);
            if (row >= s->rows)
                continue;
            float scale = 1.0f;
            if (p.in.gain)
                scale = rsqrtf(take_sum(m.squares, warps, SMALL_ROWS, t) / (float)n_in + p.in.eps);
            float v = take_sum(sums, warps, stride, i) * scale;
            row += s->row0;
            if (p.w.bias)
                v += p.w.bias[row];
            if (PAIR) {
                float up = take_sum(sums + TILE_ROWS * rows, warps, stride, i) * scale;
                if (p.w.bias)
                    up += p.w.bias[p.w.n_out / 2 + row];
                v = silu(v) * up;
            }
            p.y[(size_t)t * (size_t)p.ldy + (size_t)row] = v;
        }
    }
    copy_async_wait<0>();
}

/* per_warp: tiles a warp streams in all. */
static struct small_shape small_plan(const struct matrix *w, int warps, int per_warp)
{
    struct small_shape s;
    s.warps = warps;
    s.slot = w->max_tile_bytes;
    int want = w->max_tile_bytes > 8192 ? 1 : w->max_tile_bytes > 4352 ? 2 : 3;
    s.stages = per_warp < want ? per_warp : want;
    return s;
}

template <bool PAIR>
static void small_launch(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                         float *y, int rows)
{
    int warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS, units = w->n_tiles / (PAIR ? 2 : 1);
    if (w->set == SET_ALL && warps > 8)
        warps = 8; /* large tiles */
    /* Enough blocks to fill the machine; each then walks several units. */
    int per_sm = 24 / warps, most = cu->n_sm * (per_sm < 8 ? per_sm : 8);
    int grid = units < most ? units : most;
    int per_warp = ceil_div(units, grid) * ceil_div(w->n_kt, warps) * (PAIR ? 2 : 1);
    struct small_args p = {*w,   *in,   y, rows, PAIR ? w->n_out / 2 : w->n_out,
                           units, small_plan(w, warps, per_warp)};
    size_t shared = small_shared(p.s, rows, PAIR ? 2 : 1);
    dim3 g((unsigned)grid);
    int block = warps * 32;
    if (w->set == SET_ALL)
        cuda_launch(cu, small_kernel<SET_ALL, false, PAIR>, g, block, shared, LAUNCH_EARLY, p);
    else if (w->set == SET_FAST)
        cuda_launch(cu, small_kernel<SET_FAST, false, PAIR>, g, block, shared, LAUNCH_EARLY, p);
    else if (rows == 1)
        cuda_launch(cu, small_kernel<SET_K, true, PAIR>, g, block, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, small_kernel<SET_K, false, PAIR>, g, block, shared, LAUNCH_EARLY, p);
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

/* Grid: (groups of 8 experts, groups of rows); 8 warps. */
static __global__ void __launch_bounds__(256)
    router_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    float *n = (float *)shared;            /* (padded n_embd) one row at a time */
    float *part = n + p.w.n_kt * TILE_K;   /* (8) */
    int warp = warp_id(), lane = lane_id(), n_embd = p.w.n_in, n_kt = p.w.n_kt;
    int e = (int)blockIdx.x * 8 + warp;
    bool mine = e < p.w.n_out;
    const float *row = (const float *)(p.w.seg[0].base +
                                       (size_t)(e / TILE_ROWS) * (size_t)n_kt * F32_BYTES) +
                       (e % TILE_ROWS) * TILE_K + lane * 8;
    enum { KEPT = 8, TILE_FLOATS = F32_BYTES / 4 }; /* k tiles a lane keeps in registers */
    float w[KEPT][8];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (mine && i < n_kt)
            load_row8(row + i * TILE_FLOATS, 0, 8, w[i]);
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
            float v[8], d[8];
            load_row8(p.in.x + base, k, n_embd, v);
            if (p.in.gain) {
                if (p.in.d) {
                    load_row8(p.in.d + base, k, n_embd, d);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        v[j] += d[j];
                }
                if (blockIdx.x == 0 && p.in.x_out)
                    store_row8(p.in.x_out + base, k, n_embd, v);
                load_row8(p.in.gain, k, n_embd, d);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    squares += v[j] * v[j];
                    v[j] *= d[j];
                }
            }
            store_row8(n, k, n_kt * TILE_K, v);
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
                    load_row8(n + i * TILE_K + lane * 8, 0, 8, v);
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
    int per = rows <= SMALL_ROWS ? rows : 4;
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

/* The choices of every row, in shared memory of each block that needs them. */
struct __align__(16) choices {
    uint32_t key[128]; /* one row's logits, ordered as integers */
    int chosen[SMALL_ROWS][MAX_USED];
    float weight[SMALL_ROWS][MAX_USED];
    int experts[SMALL_ROWS * MAX_USED]; /* distinct */
    uint32_t set[MAX_EXPERTS / 32];
    int n_experts;
};

/* One row, at most 128 experts, 256 threads: every expert counts who beats it. */
DEVICE void choose_one(struct choices *ch, const float *logits, const struct route_rule &rule)
{
    int tid = (int)threadIdx.x, e = tid >> 1, rank = 0;
    if (tid < 128)
        ch->key[tid] = tid < rule.n_expert ? float_order(load_float_l2(logits + tid)) : 0;
    __syncthreads();
    uint32_t mine = ch->key[e];
    const uint4 *keys = (const uint4 *)(ch->key + (tid & 1) * 64);
    int j = (tid & 1) * 64;
#pragma unroll 4
    for (int i = 0; i < 16; i++, j += 4) {
        uint4 k = keys[i];
        rank += k.x > mine || (k.x == mine && j < e);
        rank += k.y > mine || (k.y == mine && j + 1 < e);
        rank += k.z > mine || (k.z == mine && j + 2 < e);
        rank += k.w > mine || (k.w == mine && j + 3 < e);
    }
    rank += __shfl_xor_sync(FULL_WARP, rank, 1);
    if (!(tid & 1) && rank < rule.used) {
        ch->chosen[0][rank] = ch->experts[rank] = e;
        ch->weight[0][rank] = float_unorder(mine); /* the logit, for now */
    }
    if (tid == 0)
        ch->n_experts = rule.used;
    __syncthreads();
}

/* Logits of the chosen to weights; one warp. */
DEVICE void weigh_one(struct choices *ch, const struct route_rule &rule)
{
    int lane = lane_id();
    float top = ch->weight[0][0], w = lane < rule.used ? fast_exp(ch->weight[0][lane] - top) : 0.0f;
    float total = rule.renormalise ? w : 0.0f;
    if (!rule.renormalise)
#pragma unroll 1
        for (int e = lane; e < rule.n_expert; e += 32)
            total += fast_exp(float_unorder(ch->key[e]) - top);
    total = warp_sum(total);
    __syncwarp();
    if (lane < rule.used)
        ch->weight[0][lane] = w / total * rule.scale;
}

/* Any row: one warp takes the largest `used` times. PER: logits a lane holds. */
template <int PER>
DEVICE void choose_row(const float *logits, const struct route_rule &rule, int *chosen,
                       float *weight)
{
    int lane = lane_id();
    uint32_t key[PER];
    float top = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        key[i] = e < rule.n_expert ? float_order(load_float_l2(logits + e)) : 0;
    }
    float kept = 0.0f, mine = 0.0f;
    int mine_e = 0;
#pragma unroll 1
    for (int k = 0; k < rule.used; k++) {
        uint32_t best = 0, low = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            best = key[i] > best ? key[i] : best;
        uint32_t all = warp_max_u32(best);
        /* the lowest index among those that reach it, as the largest of its complement */
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            if (key[i] == all)
                low = 0xffffu - (uint32_t)(i * 32 + lane);
        int e = (int)(0xffffu - warp_max_u32(low));
        if (k == 0) {
            top = float_unorder(all);
            if (!rule.renormalise) {
#pragma unroll
                for (int i = 0; i < PER; i++)
                    if (i * 32 + lane < rule.n_expert)
                        total += fast_exp(float_unorder(key[i]) - top);
                total = warp_sum(total);
            }
        }
        float v = fast_exp(float_unorder(all) - top);
        kept += v;
        if (lane == k) {
            mine = v;
            mine_e = e;
        }
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (i * 32 + lane == e)
                key[i] = 0;
    }
    if (lane < rule.used) {
        chosen[lane] = mine_e < rule.n_expert ? mine_e : 0;
        weight[lane] = mine / (rule.renormalise ? kept : total) * rule.scale;
    }
}

DEVICE void make_choices(struct choices *ch, const float *logits, const struct route_rule &rule,
                         int rows)
{
    int warp = warp_id(), warps = (int)(blockDim.x >> 5), tid = (int)threadIdx.x;
    if (tid < MAX_EXPERTS / 32)
        ch->set[tid] = 0;
#pragma unroll 1
    for (int t = warp; t < rows; t += warps) {
        const float *row = logits + (size_t)t * (size_t)rule.n_expert;
        if (rule.n_expert <= 128)
            choose_row<4>(row, rule, ch->chosen[t], ch->weight[t]);
        else
            choose_row<MAX_EXPERTS / 32>(row, rule, ch->chosen[t], ch->weight[t]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < SMALL_ROWS * MAX_USED; i += (int)blockDim.x)
        if (i / MAX_USED < rows && i % MAX_USED < rule.used) {
            int e = ch->chosen[i / MAX_USED][i % MAX_USED];
            atomicOr(&ch->set[e >> 5], 1u << (e & 31));
        }
    __syncthreads();
#pragma unroll 1
    for (int e = tid; e < rule.n_expert; e += (int)blockDim.x) {
        uint32_t word = ch->set[e >> 5];
        int rank = __popc(word & ((1u << (e & 31)) - 1));
#pragma unroll 1
        for (int i = 0; i < e >> 5; i++)
            rank += __popc(ch->set[i]);
        bool in = word >> (e & 31) & 1;
        if (in)
            ch->experts[rank] = e;
        if (e == rule.n_expert - 1)
            ch->n_experts = rank + in;
    }
    __syncthreads();
}

/* Which of row t's choices expert e is; -1: none. The whole warp asks. */
DEVICE int choice_of(const struct choices *ch, int t, int used, int e)
{
    int lane = lane_id();
    uint32_t hit = __ballot_sync(FULL_WARP, lane < used && ch->chosen[t][lane & (MAX_USED - 1)] == e);
    return __ffs(hit) - 1;
}

struct expert_args {
    struct matrix w;
    const float *logits; /* (rows, n_expert) */
    const float *x;      /* gate_up: (rows, n_embd); down: hidden (rows, used, n_in) */
    float *y;            /* gate_up: hidden (rows, used, n_ff); down: (rows, n_embd) */
    int rows;
    struct route_rule rule;
    struct small_shape s;
};

/* hidden[t, k, :] = silu(x Wg^T) * (x Wu^T) for every chosen expert. Blocks: x over tiles of 16
 * hidden units, y over distinct experts. ONE: one row, 8 warps, at most 128 experts. */
template <int SET, bool ONE>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : 3)
    expert_up_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    int rows = ONE ? 1 : p.rows, stages = p.s.stages, warps = p.s.warps;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s, rows, 2);
    int warp = warp_id(), lane = lane_id(), c = lane & 3;
    int first = (int)blockIdx.x, half = p.w.n_tiles / 2, n_embd = p.w.n_in;

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
    float v[8];
    if (ONE)
        load_row8(p.x, warp * TILE_K + lane * 8, n_embd, v);
    if (ONE)
        choose_one(ch, p.logits, p.rule);
    else
        make_choices(ch, p.logits, p.rule, rows);
    if ((int)blockIdx.y >= ch->n_experts)
        return;
    int e = ch->experts[blockIdx.y];

    int f_slice = warp, f_half = 0, f_at = 0;
    auto fetch = [&]() {
        if (f_slice < p.w.n_kt) {
            int tile = first + f_half * half;
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + f_at * p.s.slot, tile_address(p.w, s, e, tile, f_slice),
                       s->tile_bytes);
            f_slice += f_half ? warps : 0;
            f_half ^= 1;
            f_at = ring_next(f_at, stages);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n < stages; n++)
        fetch();

    struct slice_view view = slice_view_of(m.slice, rows);
    float sum[2][4] = {}, undo[2] = {0.0f, 0.0f};
    int at = 0;
#pragma unroll 1
    for (int slice = warp; slice < p.w.n_kt; slice += warps) {
        int k = slice * TILE_K + lane * 8;
        __syncwarp();
#pragma unroll 1
        for (int t = 0; t < rows; t++) {
            if (!ONE || slice != warp)
                load_row8(p.x + (size_t)t * (size_t)n_embd, k, n_embd, v);
            float u = stage_row(m.slice, t, v);
            if (t == 2 * c)
                undo[0] = u;
            if (t == 2 * c + 1)
                undo[1] = u;
        }
        __syncwarp();
#pragma unroll 1
        for (int j = 0; j < 2; j++) {
            ring_wait(stages);
            float part[4] = {};
            tile_dot<SET>(seg_of(p.w, first + j * half), m.ring + at * p.s.slot, view, undo, part);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[0][i] += j == 0 ? part[i] : 0.0f;
                sum[1][i] += j == 1 ? part[i] : 0.0f;
            }
            at = ring_next(at, stages);
            __syncwarp();
            fetch();
        }
    }
    copy_async_wait<0>();
    int stride = 2 * TILE_ROWS * rows;
    put_sums<ONE>(m.sums + warp * stride, rows, sum[0]);
    put_sums<ONE>(m.sums + warp * stride + TILE_ROWS * rows, rows, sum[1]);
    __syncthreads();
    int n_ff = p.w.n_out / 2, row = first * TILE_ROWS + (lane & 15);
#pragma unroll 1
    for (int t = warp; t < rows; t += warps) { /* a warp per row of the step */
        int k = ONE ? (int)blockIdx.y : choice_of(ch, t, p.rule.used, e);
        if (k < 0 || lane >= TILE_ROWS || row >= p.w.seg[0].rows)
            continue;
        float gate = take_sum(m.sums, warps, stride, t * TILE_ROWS + lane);
        float up = take_sum(m.sums + TILE_ROWS * rows, warps, stride, t * TILE_ROWS + lane);
        p.y[(size_t)(t * p.rule.used + k) * (size_t)n_ff + (size_t)row] = silu(gate) * up;
    }
}

/* y[t, :] = sum over row t's experts of weight * hidden Wd^T. A block owns 16 output rows and walks
 * all distinct experts: a warp takes every eighth, slice by slice. */
template <int SET, bool ONE>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : 2)
    expert_down_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    int rows = ONE ? 1 : p.rows, stages = p.s.stages;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s, rows, 1);
    int warp = warp_id(), lane = lane_id(), c = lane & 3, tile = (int)blockIdx.x;
    const struct seg *s = seg_of(p.w, tile);
    int n_in = p.w.n_in, n_kt = p.w.n_kt;

    dependency_trigger();
    if (ONE) /* the logits were written two kernels ago: see expert_up_kernel's trigger */
        choose_one(ch, p.logits, p.rule);
    else
        make_choices(ch, p.logits, p.rule, rows);
    int n_experts = ch->n_experts, f_pick = warp, f_kt = 0, f_at = 0;
    auto fetch = [&]() {
        if (f_pick < n_experts) {
            tile_fetch(m.ring + f_at * p.s.slot,
                       tile_address(p.w, s, ch->experts[f_pick], tile, f_kt), s->tile_bytes);
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
    if (ONE) {
        if (warp == 0)
            weigh_one(ch, p.rule);
        __syncthreads();
    }
    dependency_wait();

    struct slice_view view = slice_view_of(m.slice, rows);
    float sum[4] = {};
    int at = 0;
#pragma unroll 1
    for (int pick = warp; pick < n_experts; pick += EXPERT_WARPS) {
        int e = ch->experts[pick];
        float v[8];
        if (ONE)
            load_row8(p.x + (size_t)pick * (size_t)n_in, lane * 8, n_in, v);
#pragma unroll 1
        for (int kt = 0; kt < n_kt; kt++) {
            int k = kt * TILE_K + lane * 8;
            float undo[2] = {0.0f, 0.0f};
            __syncwarp();
            if (ONE) {
                undo[0] = stage_row(m.slice, 0, v) * ch->weight[0][pick];
                if (kt + 1 < n_kt)
                    load_row8(p.x + (size_t)pick * (size_t)n_in, k + TILE_K, n_in, v);
            } else {
#pragma unroll 1
                for (int t = 0; t < rows; t++) {
                    int of = choice_of(ch, t, p.rule.used, e);
                    float u = 0.0f;
                    if (of >= 0) {
                        load_row8(p.x + (size_t)(t * p.rule.used + of) * (size_t)n_in, k, n_in, v);
                        u = stage_row(m.slice, t, v) * ch->weight[t][of];
                    } else
                        stage_zeros(m.slice, t);
                    if (t == 2 * c)
                        undo[0] = u;
                    if (t == 2 * c + 1)
                        undo[1] = u;
                }
            }
            __syncwarp();
            ring_wait(stages);
            tile_dot<SET>(s, m.ring + at * p.s.slot, view, undo, sum);
            at = ring_next(at, stages);
            __syncwarp();
            fetch();
        }
    }
    copy_async_wait<0>();
    int stride = TILE_ROWS * rows;
    put_sums<ONE>(m.sums + warp * stride, rows, sum);
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < stride; i += 256) {
        int t = ONE ? 0 : i / TILE_ROWS, row = (tile - s->tile0) * TILE_ROWS + (i & 15);
        if (row < s->rows)
            p.y[(size_t)t * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
                take_sum(m.sums, EXPERT_WARPS, stride, i);
    }
}

#define LAUNCH_EXPERTS(kernel, args)                                                               \
    do {                                                                                           \
        if ((args).w.set == SET_ALL)                                                               \
            cuda_launch(cu, kernel<SET_ALL, false>, grid, block, shared, LAUNCH_EARLY, args);      \
        else if ((args).w.set == SET_FAST)                                                         \
            cuda_launch(cu, kernel<SET_FAST, false>, grid, block, shared, LAUNCH_EARLY, args);     \
        else if (one)                                                                              \
            cuda_launch(cu, kernel<SET_K, true>, grid, block, shared, LAUNCH_EARLY, args);         \
        else                                                                                       \
            cuda_launch(cu, kernel<SET_K, false>, grid, block, shared, LAUNCH_EARLY, args);        \
    } while (0)

void small_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
               const struct matrix *down, const struct norm_in *in, float *n, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    small_router(cu, router, in, n, rows);
    struct route_rule rule = {router->n_out, s->n_expert_used, s->norm_topk, s->expert_scale};
    int warps = gate_up->n_kt < EXPERT_WARPS ? gate_up->n_kt : EXPERT_WARPS;
    struct expert_args p = {*gate_up, cu->router, in->gain ? n : in->x, cu->hidden, rows, rule,
                            small_plan(gate_up, warps, 2 * ceil_div(gate_up->n_kt, warps))};
    int most = rows * rule.used < rule.n_expert ? rows * rule.used : rule.n_expert;
    size_t shared = sizeof(struct choices) + small_shared(p.s, rows, 2);
    dim3 grid((unsigned)(gate_up->n_tiles / 2), (unsigned)most);
    int block = warps * 32;
    bool one = rows == 1 && rule.n_expert <= 128 && warps == EXPERT_WARPS;
    LAUNCH_EXPERTS(expert_up_kernel, p);

    struct small_shape plan =
        small_plan(down, EXPERT_WARPS, ceil_div(most, EXPERT_WARPS) * down->n_kt);
    struct expert_args q = {*down, cu->router, cu->hidden, y, rows, rule, plan};
    shared = sizeof(struct choices) + small_shared(q.s, rows, 1);
    grid = dim3((unsigned)down->n_tiles);
    block = EXPERT_WARPS * 32;
    one = rows == 1 && rule.n_expert <= 128;
    LAUNCH_EXPERTS(expert_down_kernel, q);
}
