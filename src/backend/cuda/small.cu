/*
 * Products for steps of at most 8 rows: the memory-bound ones, where a layer is a few microseconds.
 * A block owns one or a few tiles of 16 output rows; its warps cut k between them, 256 columns at a
 * time ("a slice"). The 8 columns of the tensor-core fragment are the rows of the step, so one to
 * eight rows cost the same reads and the same arithmetic. Each warp turns its slice of the
 * activations into halves, scaled by a power of two so that the largest of the slice is near 1024,
 * and streams its weight tiles through a ring of its own in shared memory; no block-wide barrier is
 * needed before the sums are put together at the end. Weights that do not depend on the step (all
 * but experts) are on their way before the kernel in front has finished (dependency_wait).
 *
 * A norm in front of a product is folded in: the gain goes into the activations, the root mean
 * square is gathered on the side and multiplies the sums at the end.
 */
#include "backend/cuda/tile.cuh"

#include <math.h>

enum { MAX_WARPS = 8, MAX_USED = 16, MAX_EXPERTS = 512 };
/* Halves per row of a staged slice: 512 bytes of columns, and 32 more so that the eight rows a warp
 * reads at once fall into different banks. */
enum { SLICE_STRIDE = TILE_K + 16 };

/* Turns 256 columns of one row into halves; returns the power of two that undoes their scale. */
DEVICE float stage_halves(const float (&v)[8], uint16_t *to)
{
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        top = fmaxf(top, fabsf(v[i]));
    top = warp_max(top);
    uint32_t e = bits_of(top) >> 23;
    e = e < 16 ? 16 : e;
    float scale = float_of((264 - e) << 23); /* 2^10 / 2^floor(log2 top) */
    uint4 h;
    h.x = pack_half2(v[0] * scale, v[1] * scale);
    h.y = pack_half2(v[2] * scale, v[3] * scale);
    h.z = pack_half2(v[4] * scale, v[5] * scale);
    h.w = pack_half2(v[6] * scale, v[7] * scale);
    *(uint4 *)(to + lane_id() * 8) = h;
    return float_of((e - 10) << 23);
}

DEVICE void load_row8(const float *p, int k, int n, float (&v)[8])
{
    if (k + 8 <= n && n % 4 == 0) {
        float4 a = *(const float4 *)(p + k), b = *(const float4 *)(p + k + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = k + i < n ? p[k + i] : 0.0f;
}

/* Where this lane finds its column of a staged slice; NULL past the step's rows. */
DEVICE const uint16_t *slice_column(const uint16_t *xs, int rows)
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    return g < rows ? xs + g * SLICE_STRIDE + c * 4 : NULL;
}

/* Shared memory of the kernels here: rings, staged slices, sums. */
struct small_shape {
    int warps, stages, slot; /* slot: bytes of a ring entry */
};

static size_t small_shared(const struct small_shape &s, int rows, int tiles)
{
    size_t ring = (size_t)s.warps * (size_t)s.stages * (size_t)s.slot;
    size_t staged = (size_t)s.warps * (size_t)rows * SLICE_STRIDE * 2;
    size_t sums = (size_t)s.warps * (size_t)(tiles * TILE_ROWS * rows) * 4;
    return ring + staged + sums + (size_t)s.warps * SMALL_ROWS * 4;
}

struct small_smem {
    uint8_t *ring;  /* this warp's */
    uint16_t *xs;   /* this warp's (rows, SLICE_STRIDE) */
    float *sums;    /* (warps, tiles*16, rows) */
    float *squares; /* (warps, SMALL_ROWS) */
};

DEVICE struct small_smem small_carve(uint8_t *base, const struct small_shape &s, int rows,
                                     int tiles)
{
    struct small_smem m;
    int w = warp_id();
    m.ring = base + w * s.stages * s.slot;
    base += s.warps * s.stages * s.slot;
    m.xs = (uint16_t *)base + w * rows * SLICE_STRIDE;
    base += s.warps * rows * SLICE_STRIDE * 2;
    m.sums = (float *)base;
    m.squares = m.sums + s.warps * tiles * TILE_ROWS * rows;
    return m;
}

/* acc (this slice, scaled) into the running sums of a tile */
DEVICE void add_slice(float (&sum)[4], const float (&acc)[4], const float (&undo)[2])
{
    sum[0] += acc[0] * undo[0];
    sum[1] += acc[1] * undo[1];
    sum[2] += acc[2] * undo[0];
    sum[3] += acc[3] * undo[1];
}

/* This warp's sums of tile i to shared memory, [tile row][step row]. */
DEVICE void put_sums(const struct small_smem &m, int tiles, int rows, int i, const float (&sum)[4])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    float *to = m.sums + (warp_id() * tiles + i) * TILE_ROWS * rows;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int r = g + 8 * (j >> 1), t = 2 * c + (j & 1);
        if (t < rows)
            to[r * rows + t] = sum[j];
    }
}

DEVICE float take_sum(const struct small_smem &m, const struct small_shape &s, int tiles, int rows,
                      int i, int r, int t)
{
    float v = 0.0f;
    for (int w = 0; w < s.warps; w++)
        v += m.sums[((w * tiles + i) * TILE_ROWS + r) * rows + t];
    return v;
}

/* Ring: entry n of this warp's sequence of tiles. Waits until it has landed. */
DEVICE void ring_wait(int stages)
{
    if (stages >= 4)
        copy_async_wait<3>();
    else if (stages == 3)
        copy_async_wait<2>();
    else if (stages == 2)
        copy_async_wait<1>();
    else
        copy_async_wait<0>();
    __syncwarp();
}

/* y = [norm](x) W^T (+ bias). PAIR: two tiles, gate and up of the same rows; y = silu(gate) up. */
struct small_args {
    struct matrix w;
    struct norm_in in;
    float *y;
    int rows, ldy;
    struct small_shape s;
};

template <int SET, int TILES, bool PAIR>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : TILES > 2 ? 2 : 3)
    small_kernel(const __grid_constant__ struct small_args p)
{
    SHARED_BYTES(shared);
    struct small_smem m = small_carve(shared, p.s, p.rows, TILES);
    int warp = warp_id(), lane = lane_id(), c = lane & 3;
    int first = PAIR ? (int)blockIdx.x : (int)blockIdx.x * TILES;
    int step = PAIR ? p.w.n_tiles / 2 : 1; /* from one of the block's tiles to the next */
    int n_tiles = PAIR ? TILES : min(TILES, p.w.n_tiles - first);
    int n_slices = warp < p.w.n_kt ? (p.w.n_kt - warp + p.s.warps - 1) / p.s.warps : 0;
    int total = n_slices * n_tiles; /* tiles this warp streams: slice by slice */
    int n_embd = p.w.n_in;

    auto fetch = [&](int n) {
        if (n < total) {
            int tile = first + n % n_tiles * step, kt = warp + n / n_tiles * p.s.warps;
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + n % p.s.stages * p.s.slot, tile_address(p.w, s, 0, tile, kt),
                       s->tile_bytes);
        }
        copy_async_commit();
    };
    for (int n = 0; n < p.s.stages; n++)
        fetch(n);
    dependency_trigger();
    dependency_wait();

    const uint16_t *column = slice_column(m.xs, p.rows);
    float sum[TILES][4] = {}, squares[SMALL_ROWS] = {};
    for (int i = 0, n = 0; i < n_slices; i++) {
        int k = (warp + i * p.s.warps) * TILE_K + lane * 8;
        float undo[2] = {0.0f, 0.0f};
        __syncwarp(); /* the last slice's fragments have been read */
#pragma unroll
        for (int t = 0; t < SMALL_ROWS; t++) {
            if (t >= p.rows)
                break;
            float v[8];
            load_row8(p.in.x + (size_t)t * (size_t)n_embd, k, n_embd, v);
            if (p.in.gain) {
                if (p.in.d) {
                    float d[8];
                    load_row8(p.in.d + (size_t)t * (size_t)n_embd, k, n_embd, d);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        v[j] += d[j];
                }
                if (blockIdx.x == 0 && p.in.x_out)
                    for (int j = 0; j < 8; j++)
                        if (k + j < n_embd)
                            p.in.x_out[(size_t)t * (size_t)n_embd + (size_t)(k + j)] = v[j];
                float gain[8];
                load_row8(p.in.gain, k, n_embd, gain);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    squares[t] += v[j] * v[j];
                    v[j] *= gain[j];
                }
            }
            float u = stage_halves(v, m.xs + t * SLICE_STRIDE);
            if (t == 2 * c)
                undo[0] = u;
            if (t == 2 * c + 1)
                undo[1] = u;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            if (j >= n_tiles)
                break;
            ring_wait(p.s.stages);
            float acc[4] = {};
            tile_mma<SET>(seg_of(p.w, first + j * step), m.ring + n % p.s.stages * p.s.slot, column,
                          acc);
            add_slice(sum[j], acc, undo);
            __syncwarp(); /* every lane is done with the entry that is fetched over */
            fetch(n + p.s.stages);
            n++;
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int j = 0; j < TILES; j++)
        put_sums(m, TILES, p.rows, j, sum[j]);
    if (p.in.gain) {
#pragma unroll
        for (int t = 0; t < SMALL_ROWS; t++) {
            if (t >= p.rows)
                break;
            float s = warp_sum(squares[t]);
            if (lane == 0)
                m.squares[warp * SMALL_ROWS + t] = s;
        }
    }
    __syncthreads();

    int outs = (PAIR ? 1 : n_tiles) * TILE_ROWS;
    for (int i = (int)threadIdx.x; i < outs * p.rows; i += (int)blockDim.x) {
        int t = i / outs, j = i % outs / TILE_ROWS, r = i % TILE_ROWS;
        float rms = 1.0f;
        if (p.in.gain) {
            float s = 0.0f;
            for (int w = 0; w < p.s.warps; w++)
                s += m.squares[w * SMALL_ROWS + t];
            rms = rsqrtf(s / (float)n_embd + p.in.eps);
        }
        const struct seg *s = seg_of(p.w, first + j);
        int row = (first + j - s->tile0) * TILE_ROWS + r;
        if (row >= s->rows)
            continue;
        float v = take_sum(m, p.s, TILES, p.rows, j, r, t) * rms;
        if (PAIR) {
            float up = take_sum(m, p.s, TILES, p.rows, TILES - 1, r, t) * rms;
            if (p.w.bias) {
                v += p.w.bias[row];
                up += p.w.bias[p.w.n_out / 2 + row];
            }
            v = silu(v) * up;
        } else if (p.w.bias)
            v += p.w.bias[s->row0 + row];
        p.y[(size_t)t * (size_t)p.ldy + (size_t)(s->row0 + row)] = v;
    }
}

static struct small_shape small_plan(const struct matrix *w, int per_warp)
{
    struct small_shape s;
    s.warps = w->n_kt < MAX_WARPS ? w->n_kt : MAX_WARPS;
    s.slot = w->max_tile_bytes;
    /* Two entries of every warp keep a multiprocessor's loads in flight; big tiles need no more. */
    int want = w->max_tile_bytes > 8192 ? 1 : w->max_tile_bytes > 4096 ? 2 : 3;
    s.stages = per_warp < want ? per_warp : want;
    return s;
}

template <int TILES, bool PAIR>
static void small_launch(struct cuda_backend *cu, const struct small_args &p, int grid)
{
    size_t shared = small_shared(p.s, p.rows, TILES);
    int block = p.s.warps * 32;
    if (p.w.set == SET_K)
        cuda_launch(cu, small_kernel<SET_K, TILES, PAIR>, dim3((unsigned)grid), block, shared,
                    LAUNCH_EARLY, p);
    else if (p.w.set == SET_FAST)
        cuda_launch(cu, small_kernel<SET_FAST, TILES, PAIR>, dim3((unsigned)grid), block, shared,
                    LAUNCH_EARLY, p);
    else
        cuda_launch(cu, small_kernel<SET_ALL, TILES, PAIR>, dim3((unsigned)grid), block, shared,
                    LAUNCH_EARLY, p);
}

void small_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *y, int rows)
{
    int slices = ceil_div(w->n_kt, MAX_WARPS);
    struct small_args p = {*w, *in, y, rows, w->n_out, small_plan(w, slices)};
    if (w->n_tiles <= 8 * cu->n_sm) {
        small_launch<1, false>(cu, p, w->n_tiles);
    } else {
        p.s = small_plan(w, 4 * slices);
        small_launch<4, false>(cu, p, ceil_div(w->n_tiles, 4));
    }
}

void small_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
               const struct norm_in *in, float *y, int rows)
{
    int slices = ceil_div(gate_up->n_kt, MAX_WARPS);
    struct small_args p = {*gate_up,    *in, cu->hidden, rows, gate_up->n_out / 2,
                           small_plan(gate_up, 2 * slices)};
    small_launch<2, true>(cu, p, gate_up->n_tiles / 2);
    struct norm_in plain = {};
    plain.x = cu->hidden;
    small_linear(cu, down, &plain, y, rows);
}

/* Mixture of experts */

/* Router logits (rows, n_expert) of floats in plain fp32: a warp per expert, its row in registers
 * before the wait. n = norm(x + d) is made by every block for itself; block 0 also stores it. */
struct router_args {
    struct matrix w;
    struct norm_in in;
    float *n;      /* (rows, n_embd) or NULL */
    float *logits; /* (rows, n_expert) */
    int rows, rows_per_block;
};

/* Grid: (groups of 8 experts, groups of rows). */
static __global__ void __launch_bounds__(256)
    router_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    float *n = (float *)shared;                       /* (n_embd) one row at a time */
    float *part = n + (p.w.n_kt * TILE_K);            /* (warps) */
    int warp = warp_id(), lane = lane_id(), n_embd = p.w.n_in;
    int e = (int)blockIdx.x * (int)(blockDim.x >> 5) + warp;
    const struct seg *s = &p.w.seg[0];
    const uint8_t *tile = s->base + (size_t)(e / TILE_ROWS) * (size_t)p.w.n_kt * F32_BYTES +
                          (size_t)(e % TILE_ROWS) * TILE_K * 4;
    enum { KEPT = 8 }; /* tiles of 256 columns a lane keeps in registers: 8 floats each */
    float row[KEPT][8];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (e < p.w.n_out && i < p.w.n_kt)
            load_row8((const float *)(tile + (size_t)i * F32_BYTES), lane * 8, TILE_K, row[i]);
    }
    dependency_trigger();
    dependency_wait();
    int t0 = (int)blockIdx.y * p.rows_per_block, t1 = min(t0 + p.rows_per_block, p.rows);
    for (int t = t0; t < t1; t++) {
        float squares = 0.0f;
        __syncthreads(); /* the last row's n has been read */
        for (int k = (int)threadIdx.x; k < p.w.n_kt * TILE_K; k += (int)blockDim.x) {
            size_t at = (size_t)t * (size_t)n_embd + (size_t)k;
            float v = k < n_embd ? p.in.x[at] : 0.0f;
            if (p.in.gain && k < n_embd) {
                if (p.in.d)
                    v += p.in.d[at];
                if (blockIdx.x == 0 && p.in.x_out)
                    p.in.x_out[at] = v;
                squares += v * v;
                v *= p.in.gain[k];
            }
            n[k] = v;
        }
        if (p.in.gain) {
            squares = warp_sum(squares);
            if (lane == 0)
                part[warp] = squares;
        }
        __syncthreads();
        float rms = 1.0f;
        if (p.in.gain) {
            float sum = 0.0f;
            for (int w = 0; w < (int)(blockDim.x >> 5); w++)
                sum += part[w];
            rms = rsqrtf(sum / (float)n_embd + p.in.eps);
        }
        if (blockIdx.x == 0 && p.n)
            for (int k = (int)threadIdx.x; k < n_embd; k += (int)blockDim.x)
                p.n[(size_t)t * (size_t)n_embd + (size_t)k] = n[k] * rms;
        if (e >= p.w.n_out)
            continue;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (i < p.w.n_kt) {
                float v[8];
                load_row8(n + i * TILE_K, lane * 8, TILE_K, v);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    dot += row[i][j] * v[j];
            }
        for (int i = KEPT; i < p.w.n_kt; i++) {
            float v[8], w[8];
            load_row8(n + i * TILE_K, lane * 8, TILE_K, v);
            load_row8((const float *)(tile + (size_t)i * F32_BYTES), lane * 8, TILE_K, w);
#pragma unroll
            for (int j = 0; j < 8; j++)
                dot += w[j] * v[j];
        }
        dot = warp_sum(dot);
        if (lane == 0)
            p.logits[(size_t)t * (size_t)p.w.n_out + (size_t)e] =
                dot * rms + (p.w.bias ? p.w.bias[e] : 0.0f);
    }
}

/* How experts are chosen. */
struct route_rule {
    int n_expert, used;
    bool renormalise;
    float scale;
};

/* One warp: the `used` largest of n_expert logits (ties: lower index) and their weights. PER: values
 * a lane holds. */
template <int PER>
DEVICE void choose_experts(const float *logits, const struct route_rule &rule, int *chosen,
                           float *weight)
{
    int lane = lane_id();
    uint32_t key[PER];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        float v = -INFINITY;
        if (e < rule.n_expert) {
#ifdef STEEL_CUDA_SIM
            v = logits[e];
#else
            v = __ldcg(logits + e); /* read before the wait: never from a stale L1 line */
#endif
        }
        key[i] = e < rule.n_expert ? float_order(v) : 0;
        top = fmaxf(top, v);
    }
    float total = 0.0f;
    if (!rule.renormalise) {
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (i * 32 + lane < rule.n_expert)
                total += expf(float_unorder(key[i]) - top);
        total = warp_sum(total);
    }
    float kept = 0.0f, mine = 0.0f;
    int mine_e = 0;
    for (int k = 0; k < rule.used; k++) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            best = key[i] > best ? key[i] : best;
        uint32_t all = warp_max_u32(best);
        /* the lowest index among those that reach it, as the largest of its complement */
        uint32_t low = 0;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            if (key[i] == all)
                low = 0xffffu - (uint32_t)(i * 32 + lane);
        int e = (int)(0xffffu - warp_max_u32(low));
        float v = float_unorder(all);
        if (k == 0 && rule.renormalise)
            top = v;
        v = expf(v - top);
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
        chosen[lane] = mine_e;
        weight[lane] = mine / (rule.renormalise ? kept : total) * rule.scale;
    }
}

/* The choices of every row, in shared memory of each block that needs them. */
struct __align__(16) choices {
    int chosen[SMALL_ROWS][MAX_USED];
    float weight[SMALL_ROWS][MAX_USED];
    int experts[SMALL_ROWS * MAX_USED]; /* distinct, ascending */
    uint32_t set[MAX_EXPERTS / 32];
    int n_experts;
};

DEVICE void make_choices(struct choices *ch, const float *logits, const struct route_rule &rule,
                         int rows)
{
    int warp = warp_id(), warps = (int)(blockDim.x >> 5);
    for (int i = (int)threadIdx.x; i < MAX_EXPERTS / 32; i += (int)blockDim.x)
        ch->set[i] = 0;
    for (int t = warp; t < rows; t += warps) {
        const float *row = logits + (size_t)t * (size_t)rule.n_expert;
        if (rule.n_expert <= 128)
            choose_experts<4>(row, rule, ch->chosen[t], ch->weight[t]);
        else
            choose_experts<MAX_EXPERTS / 32>(row, rule, ch->chosen[t], ch->weight[t]);
    }
    __syncthreads();
    if (rows == 1) { /* the order does not matter, and these are distinct */
        if ((int)threadIdx.x < rule.used)
            ch->experts[threadIdx.x] = ch->chosen[0][threadIdx.x];
        if (threadIdx.x == 0)
            ch->n_experts = rule.used;
        __syncthreads();
        return;
    }
    for (int i = (int)threadIdx.x; i < rows * rule.used; i += (int)blockDim.x) {
        int e = ch->chosen[i / rule.used][i % rule.used];
        atomicOr(&ch->set[e >> 5], 1u << (e & 31));
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < rule.n_expert; e += (int)blockDim.x)
        if (ch->set[e >> 5] >> (e & 31) & 1) {
            int rank = __popc(ch->set[e >> 5] & ((1u << (e & 31)) - 1));
            for (int i = 0; i < e >> 5; i++)
                rank += __popc(ch->set[i]);
            ch->experts[rank] = e;
        }
    if (threadIdx.x == 0) {
        int n = 0;
        for (int i = 0; i < MAX_EXPERTS / 32; i++)
            n += __popc(ch->set[i]);
        ch->n_experts = n;
    }
    __syncthreads();
}

/* Which of row t's choices expert e is; -1: none. */
DEVICE int choice_of(const struct choices *ch, int t, int used, int e)
{
    for (int k = 0; k < used; k++)
        if (ch->chosen[t][k] == e)
            return k;
    return -1;
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
 * hidden units, y over distinct experts. */
template <int SET>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : 3)
    expert_up_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s, p.rows, 2);
    int warp = warp_id(), lane = lane_id(), c = lane & 3;
    int first = (int)blockIdx.x, step = p.w.n_tiles / 2, n_embd = p.w.n_in;
    int n_slices = warp < p.w.n_kt ? (p.w.n_kt - warp + p.s.warps - 1) / p.s.warps : 0;
    int total = n_slices * 2;

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
    make_choices(ch, p.logits, p.rule, p.rows);
    if ((int)blockIdx.y >= ch->n_experts)
        return;
    int e = ch->experts[blockIdx.y];

    auto fetch = [&](int n) {
        if (n < total) {
            int tile = first + (n & 1) * step, kt = warp + (n >> 1) * p.s.warps;
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(m.ring + n % p.s.stages * p.s.slot, tile_address(p.w, s, e, tile, kt),
                       s->tile_bytes);
        }
        copy_async_commit();
    };
    for (int n = 0; n < p.s.stages; n++)
        fetch(n);

    const uint16_t *column = slice_column(m.xs, p.rows);
    float sum[2][4] = {};
    for (int i = 0, n = 0; i < n_slices; i++) {
        int k = (warp + i * p.s.warps) * TILE_K + lane * 8;
        float undo[2] = {0.0f, 0.0f};
        __syncwarp();
#pragma unroll
        for (int t = 0; t < SMALL_ROWS; t++) {
            if (t >= p.rows)
                break;
            float v[8];
            load_row8(p.x + (size_t)t * (size_t)n_embd, k, n_embd, v);
            float u = stage_halves(v, m.xs + t * SLICE_STRIDE);
            if (t == 2 * c)
                undo[0] = u;
            if (t == 2 * c + 1)
                undo[1] = u;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; j++, n++) {
            ring_wait(p.s.stages);
            float acc[4] = {};
            tile_mma<SET>(seg_of(p.w, first + j * step), m.ring + n % p.s.stages * p.s.slot, column,
                          acc);
            add_slice(sum[j], acc, undo);
            __syncwarp();
            fetch(n + p.s.stages);
        }
    }
    copy_async_wait<0>();
    put_sums(m, 2, p.rows, 0, sum[0]);
    put_sums(m, 2, p.rows, 1, sum[1]);
    __syncthreads();
    const struct seg *s = seg_of(p.w, first);
    int n_ff = p.w.n_out / 2;
    for (int i = (int)threadIdx.x; i < TILE_ROWS * p.rows; i += (int)blockDim.x) {
        int t = i / TILE_ROWS, r = i % TILE_ROWS, row = first * TILE_ROWS + r;
        int k = choice_of(ch, t, p.rule.used, e);
        if (row >= s->rows || k < 0)
            continue;
        float gate = take_sum(m, p.s, 2, p.rows, 0, r, t), up = take_sum(m, p.s, 2, p.rows, 1, r, t);
        p.y[((size_t)t * (size_t)p.rule.used + (size_t)k) * (size_t)n_ff + (size_t)row] =
            silu(gate) * up;
    }
}

/* y[t, :] = sum over row t's experts of weight * hidden Wd^T. A block owns 16 output rows and walks
 * all distinct experts: slices are (expert, 256 columns), warps take every eighth. */
template <int SET>
static __global__ void __launch_bounds__(256, SET == SET_ALL ? 1 : 2)
    expert_down_kernel(const __grid_constant__ struct expert_args p)
{
    SHARED_BYTES(shared);
    struct choices *ch = (struct choices *)shared;
    struct small_smem m = small_carve(shared + sizeof(struct choices), p.s, p.rows, 1);
    int warp = warp_id(), lane = lane_id(), c = lane & 3, tile = (int)blockIdx.x;
    const struct seg *s = seg_of(p.w, tile);
    int n_in = p.w.n_in, n_kt = p.w.n_kt;

    dependency_trigger();
    make_choices(ch, p.logits, p.rule, p.rows); /* written two kernels ago */
    int total = 0, all = ch->n_experts * n_kt;
    if (warp < all)
        total = (all - warp + p.s.warps - 1) / p.s.warps;
    auto fetch = [&](int n) {
        if (n < total) {
            int slice = warp + n * p.s.warps;
            tile_fetch(m.ring + n % p.s.stages * p.s.slot,
                       tile_address(p.w, s, ch->experts[slice / n_kt], tile, slice % n_kt),
                       s->tile_bytes);
        }
        copy_async_commit();
    };
    for (int n = 0; n < p.s.stages; n++)
        fetch(n);
    dependency_wait();

    const uint16_t *column = slice_column(m.xs, p.rows);
    float sum[4] = {};
    for (int n = 0; n < total; n++) {
        int slice = warp + n * p.s.warps, e = ch->experts[slice / n_kt];
        int k = slice % n_kt * TILE_K + lane * 8;
        float undo[2] = {0.0f, 0.0f};
        __syncwarp();
#pragma unroll
        for (int t = 0; t < SMALL_ROWS; t++) {
            if (t >= p.rows)
                break;
            int pick = choice_of(ch, t, p.rule.used, e);
            float v[8] = {}, u = 0.0f;
            if (pick >= 0) { /* the same for the whole warp */
                load_row8(p.x + ((size_t)t * (size_t)p.rule.used + (size_t)pick) * (size_t)n_in, k,
                          n_in, v);
                u = stage_halves(v, m.xs + t * SLICE_STRIDE) * ch->weight[t][pick];
            } else
                *(uint4 *)(m.xs + t * SLICE_STRIDE + lane * 8) = make_uint4(0, 0, 0, 0);
            if (t == 2 * c)
                undo[0] = u;
            if (t == 2 * c + 1)
                undo[1] = u;
        }
        __syncwarp();
        ring_wait(p.s.stages);
        float acc[4] = {};
        tile_mma<SET>(s, m.ring + n % p.s.stages * p.s.slot, column, acc);
        add_slice(sum, acc, undo);
        __syncwarp();
        fetch(n + p.s.stages);
    }
    copy_async_wait<0>();
    put_sums(m, 1, p.rows, 0, sum);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < TILE_ROWS * p.rows; i += (int)blockDim.x) {
        int t = i / TILE_ROWS, r = i % TILE_ROWS, row = (tile - s->tile0) * TILE_ROWS + r;
        if (row < s->rows)
            p.y[(size_t)t * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
                take_sum(m, p.s, 1, p.rows, 0, r, t);
    }
}

void small_router(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows)
{
    int per = rows <= SMALL_ROWS ? rows : 4;
    struct router_args p = {*w, *in, n, cu->router, rows, per};
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    int warps = 8;
    cuda_launch(cu, router_kernel,
                dim3((unsigned)ceil_div(w->n_out, warps), (unsigned)ceil_div(rows, per)), warps * 32,
                (size_t)w->n_kt * TILE_K * 4 + 64, LAUNCH_EARLY, p);
}

void small_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
               const struct matrix *down, const struct norm_in *in, float *n, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    small_router(cu, router, in, n, rows);
    struct route_rule rule = {router->n_out, s->n_expert_used, s->norm_topk, s->expert_scale};
    struct expert_args p = {*gate_up, cu->router, in->gain ? n : in->x, cu->hidden, rows, rule,
                            small_plan(gate_up, 2 * ceil_div(gate_up->n_kt, MAX_WARPS))};
    int most = rows * rule.used < rule.n_expert ? rows * rule.used : rule.n_expert;
    size_t shared = sizeof(struct choices) + small_shared(p.s, rows, 2);
    dim3 grid((unsigned)(gate_up->n_tiles / 2), (unsigned)most);
    int block = p.s.warps * 32;
    if (gate_up->set == SET_K)
        cuda_launch(cu, expert_up_kernel<SET_K>, grid, block, shared, LAUNCH_EARLY, p);
    else if (gate_up->set == SET_FAST)
        cuda_launch(cu, expert_up_kernel<SET_FAST>, grid, block, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, expert_up_kernel<SET_ALL>, grid, block, shared, LAUNCH_EARLY, p);

    struct small_shape plan = small_plan(down, ceil_div(most * down->n_kt, MAX_WARPS));
    plan.warps = MAX_WARPS;
    struct expert_args q = {*down, cu->router, cu->hidden, y, rows, rule, plan};
    shared = sizeof(struct choices) + small_shared(q.s, rows, 1);
    grid = dim3((unsigned)down->n_tiles);
    block = MAX_WARPS * 32;
    if (down->set == SET_K)
        cuda_launch(cu, expert_down_kernel<SET_K>, grid, block, shared, LAUNCH_EARLY, q);
    else if (down->set == SET_FAST)
        cuda_launch(cu, expert_down_kernel<SET_FAST>, grid, block, shared, LAUNCH_EARLY, q);
    else
        cuda_launch(cu, expert_down_kernel<SET_ALL>, grid, block, shared, LAUNCH_EARLY, q);
}
