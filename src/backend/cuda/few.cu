/*
 * Steps of 2 to 8 rows, dense products of up to 32. The tensor core has eight columns, so eight
 * rows cost what one does: every weight is read once for all rows, and experts (where experts.cu
 * does not take them: more than 128) are walked by the distinct ones chosen. As in small.cu the
 * warps of a block cut k between them, a slice of 256 columns each; a warp turns its slice of all
 * rows into fragments (rows.cuh), keeps them in registers, and streams its weight tiles through a
 * ring of its own. What does not hang on the step is on its way before the kernel in front has
 * finished. K-quants alone; the other kinds go through mid.cu.
 */
#include "backend/cuda/rows.cuh"

#include <math.h>

enum { FEW_WARPS = 16, FEW_STAGES = 4, DOWN_STAGES = 3, PAIR_SLOTS = 4 };
enum { MAX_USED = 16, MAX_EXPERTS = 512, FEW_EXPERTS = FEW_ROWS * MAX_USED };

DEVICE void load4f(const float *p, float (&v)[4])
{
    float4 a = *(const float4 *)p;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
}

/* This lane's part of a slice of the activations of row g (g >= rows: of some row), in floats;
 * with a gain, of x + d times the gain. Returns the largest, over the slice; squares: their sum.
 * FULL: all 256 columns are there. */
template <bool FULL>
DEVICE float slice_load(float (&v)[16][4], const struct norm_in &in, int rows, int slice, int n,
                        float &squares)
{
    int g = lane_id() >> 2, k0 = slice * TILE_K + (lane_id() & 3) * 4;
    size_t at = (size_t)(g < rows ? g : 0) * (size_t)n + (size_t)k0;
    const float *x = in.x + at;
    float top = 0.0f;
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0.0f;
        if (FULL || k0 + j * 16 < n)
            load4f(x + j * 16, v[j]);
    }
    if (in.gain) {
        const float *d = in.d + at, *gain = in.gain + k0;
        if (in.d)
#pragma unroll
            for (int j = 0; j < 16; j++) {
                float t[4] = {};
                if (FULL || k0 + j * 16 < n)
                    load4f(d + j * 16, t);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    v[j][i] += t[i];
            }
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float t[4] = {};
            if (FULL || k0 + j * 16 < n)
                load4f(gain + j * 16, t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                squares += v[j][i] * v[j][i];
                v[j][i] *= t[i];
            }
        }
        squares += __shfl_xor_sync(FULL_WARP, squares, 1);
        squares += __shfl_xor_sync(FULL_WARP, squares, 2);
    }
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            top = fmaxf(top, fabsf(v[j][i]));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
    return fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
}
DEVICE float slice_load_any(float (&v)[16][4], const struct norm_in &in, int rows, int slice, int n,
                            float &squares)
{
    return (slice + 1) * TILE_K <= n ? slice_load<true>(v, in, rows, slice, n, squares)
                                     : slice_load<false>(v, in, rows, slice, n, squares);
}

/* Those as halves, times a power of two that takes `top`, the largest of the row, to about 1024;
 * rows that are not there are zeros. Returns what undoes the scale. */
DEVICE float frag_pack(struct row_frag &f, const float (&v)[16][4], float top, int rows)
{
    uint32_t e = bits_of(top) >> 23;
    e = e < 16 ? 16 : e;
    float scale = lane_id() >> 2 < rows ? float_of((264 - e) << 23) : 0.0f;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            f.b[j][i] = pack_half2(v[j][2 * i] * scale, v[j][2 * i + 1] * scale);
    frag_sums(f);
    return float_of((e - 10) << 23);
}

/* y = x W^T (+ bias), for 8 NT rows, which come as floats or as records. Grid: (groups of tiles,
 * groups of rows). FLOATS: one group of eight, and a norm may stand in front. Where k is short,
 * two teams of warps take every other tile. */
struct few_args {
    struct matrix w;
    struct norm_in in;                      /* (rows, n_in) */
    const uint8_t *x;                       /* (rows, n_kt) records */
    const float *x_scale;                   /* (rows) what undoes their scale */
    float *y;                               /* (rows, n_out) */
    int rows, tiles_per_block, batch, slot; /* batch: tiles between two meetings */
};

template <int NT, bool FLOATS>
static __global__ void __launch_bounds__(FEW_WARPS * 32)
    few_kernel(const __grid_constant__ struct few_args p)
{
    SHARED_BYTES(shared);
    int slices = p.w.n_kt, warps = (int)blockDim.x >> 5, teams = warps / slices;
    int team = warp_id() / slices, w = warp_id() - team * slices, lane = lane_id(), g = lane >> 2;
    int one_ring = ring_bytes(FEW_STAGES, p.slot), stride = p.batch * NT * SUM_TILE;
    float *sums = (float *)(shared + warps * one_ring); /* (2, slices, batch, NT) tiles */
    float *squares = sums + 2 * slices * stride;        /* (slices, 8) */
    int first = (int)blockIdx.x * p.tiles_per_block, row0 = (int)blockIdx.y * 8 * NT;
    int end = min(first + p.tiles_per_block, p.w.n_tiles), f_tile = first + team;
    int rows = min(8 * NT, p.rows - row0);
    struct tile_ring<FEW_STAGES> ring;
    ring_init(ring, shared + warp_id() * one_ring, p.slot);
    auto fetch = [&]() {
        const struct seg *s = seg_of(p.w, f_tile);
        ring_fetch(ring, tile_address(p.w, s, 0, f_tile, w), s->tile_bytes, f_tile < end);
        f_tile += teams;
    };
#pragma unroll 1
    for (int i = 0; i < FEW_STAGES; i++)
        fetch();
    dependency_trigger();
    dependency_wait();
    struct row_frag x[NT];
    float undo[NT][2];
    if constexpr (FLOATS) {
        float v[16][4], square, top = slice_load_any(v, p.in, rows, w, p.w.n_in, square);
        to_columns(frag_pack(x[0], v, top, rows), undo[0]);
        if (p.in.gain && team == 0 && !(lane & 3))
            squares[w * 8 + g] = square;
    } else {
#pragma unroll
        for (int i = 0; i < NT; i++) {
            int row = row0 + min(i * 8 + g, rows - 1);
            frag_load(x[i], p.x + (size_t)(row * p.w.n_kt + w) * (size_t)RECORD);
            to_columns(p.x_scale[row], undo[i]);
        }
    }
    int odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end; tile += p.batch, odd ^= 1) {
        int n = min(p.batch, end - tile);
        float *to = sums + odd * slices * stride;
#pragma unroll 1
        for (int b = team; b < n; b += teams) {
            float acc[NT][4] = {};
            int kind = seg_of(p.w, tile + b)->kind;
            frag_tile<NT>(kind, ring_take(ring), x, acc);
            ring_give(ring);
            fetch();
#pragma unroll
            for (int i = 0; i < NT; i++)
                put_tile(to + w * stride + (b * NT + i) * SUM_TILE, acc[i], undo[i]);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < n * rows * TILE_ROWS; i += (int)blockDim.x) {
            int r = i & 15, b = (i >> 4) / rows, col = (i >> 4) - b * rows;
            const struct seg *s = seg_of(p.w, tile + b);
            int row = (tile + b - s->tile0) * TILE_ROWS + r;
            if (row >= s->rows)
                continue;
            float v = take_tile(to + b * NT * SUM_TILE, slices, stride, col, r);
            if (FLOATS && p.in.gain) {
                float sum = 0.0f;
#pragma unroll 4
                for (int j = 0; j < slices; j++)
                    sum += squares[j * 8 + col];
                v *= rsqrtf(sum / (float)p.w.n_in + p.in.eps);
            }
            row += s->row0;
            p.y[(size_t)(row0 + col) * (size_t)p.w.n_out + (size_t)row] =
                v + (p.w.bias ? p.w.bias[row] : 0.0f);
        }
    }
    if (FLOATS && blockIdx.x == gridDim.x - 1 && p.in.x_out) /* that block has least to do */
#pragma unroll 4
        for (int i = (int)threadIdx.x * 4; i < p.rows * p.w.n_in; i += (int)blockDim.x * 4) {
            float v[4], d[4];
            load4f(p.in.x + i, v);
            load4f(p.in.d + i, d);
            *(float4 *)(p.in.x_out + i) =
                make_float4(v[0] + d[0], v[1] + d[1], v[2] + d[2], v[3] + d[3]);
        }
    copy_async_wait<0>();
}

static size_t few_shared(int slices, int teams, int nt, int batch, int slot)
{
    return (size_t)slices *
           (size_t)(teams * ring_bytes(FEW_STAGES, slot) + 2 * batch * nt * SUM_TILE * 4 + 32);
}

static bool few_suits(const struct cuda_backend *cu, const struct matrix *w, int nt)
{
    return w->set == SET_K && w->n_in % 8 == 0 && w->n_kt <= FEW_WARPS &&
           few_shared(w->n_kt, 1, nt, 1, w->max_tile_bytes) <= cu->shared_limit;
}

bool few_is_long(const struct matrix *w)
{
    return w->n_tiles >= 2048;
}

bool few_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows >= FEW_FROM && rows <= FEW_ROWS && few_suits(cu, w, 1);
}

template <int NT, bool FLOATS> static void few_launch(struct cuda_backend *cu, struct few_args p)
{
    int slices = p.w.n_kt, groups = ceil_div(p.rows, 8 * NT);
    int per = ceil_div(p.w.n_tiles * groups, cu->n_sm); /* a block to an SM: rows are made once */
    int teams = NT > 1 && per > 1 && 2 * slices <= FEW_WARPS ? 2 : 1;
    p.slot = p.w.max_tile_bytes;
    p.tiles_per_block = per;
    size_t most = teams > 1 ? cu->shared_limit : cu->shared_per_sm / 2 - 1024;
    p.batch = per < 4 ? per : 4;
    while (p.batch > teams && few_shared(slices, teams, NT, p.batch, p.slot) > most)
        p.batch--;
    if (p.batch < per) /* every team has as many of each but the last */
        p.batch -= p.batch % teams;
    if (few_shared(slices, teams, NT, p.batch, p.slot) > cu->shared_limit)
        teams = p.batch = 1;
    cuda_launch(cu, few_kernel<NT, FLOATS>,
                dim3((unsigned)ceil_div(p.w.n_tiles, per), (unsigned)groups), teams * slices * 32,
                few_shared(slices, teams, NT, p.batch, p.slot), LAUNCH_EARLY, p);
}

void few_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *y,
                int rows)
{
    struct few_args p = {};
    p.w = *w;
    p.in = *in;
    p.y = y;
    p.rows = rows;
    few_launch<1, true>(cu, p);
}

bool few_records(struct cuda_backend *cu, const struct matrix *w, float *y, int rows)
{
    if (rows > FEW_RECORD_ROWS || few_is_long(w) || rows * w->n_kt > cu->n_records ||
        !few_suits(cu, w, 2))
        return false;
    struct few_args p = {};
    p.w = *w;
    p.x = cu->records;
    p.x_scale = cu->half_scale;
    p.y = y;
    p.rows = rows;
    if (rows <= 8)
        few_launch<1, false>(cu, p);
    else
        few_launch<2, false>(cu, p);
    return true;
}

/* Experts */

struct few_moe_args {
    struct matrix w;
    const float *logits;  /* (rows, n_expert) */
    const uint8_t *x;     /* up: (rows, n_kt) records */
    const float *x_scale; /* (rows) */
    uint8_t *hidden;      /* (distinct experts, FEW_ROWS, n_kt of down) records, over 16 */
    const uint8_t *zeros; /* a record */
    float *y;             /* down: (rows, n_embd) */
    int rows, n_expert, used, slot, hidden_kt;
    uint32_t per_kt; /* 65536 / n_kt of down, rounded up: i * per_kt >> 16 is i / n_kt */
    bool renormalise;
    float scale;
};

/* Router logits in plain floats, of norm(x + d) where a norm stands in front. Grid: (groups of
 * eight experts, rows). A warp takes an expert, whose row is in registers before the wait; every
 * block makes the norm of its row for itself, and stores its share of x + d and of the record of
 * its norm. */
struct few_router_args {
    struct matrix w;
    struct norm_in in;
    float *logits;   /* (rows, n_expert) */
    uint8_t *record; /* (rows, n_kt) */
    float *x_scale;  /* (rows) what undoes a record's scale */
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

/* Eight columns of x + d (sum) and of that times the gain (v). */
DEVICE void router_columns(const struct norm_in &in, size_t at, int k, float (&v)[8],
                           float (&sum)[8])
{
    load8f(in.x + at + (size_t)k, sum);
    if (in.gain && in.d) {
        load8f(in.d + at + (size_t)k, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += v[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = 1.0f;
    if (in.gain)
        load8f(in.gain + k, v);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] *= sum[i];
}

static __global__ void __launch_bounds__(256)
    few_router_kernel(const __grid_constant__ struct few_router_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared, *n = part + 16; /* (2, 8) of the warps; (n_kt * 256) */
    int warp = warp_id(), lane = lane_id(), row = (int)blockIdx.y, e = (int)blockIdx.x * 8 + warp;
    int n_embd = p.w.n_in, n_kt = p.w.n_kt, tid = (int)threadIdx.x;
    bool mine = e < p.w.n_out;
    const float *from =
        (const float *)(p.w.seg[0].base + (size_t)(e / TILE_ROWS) * (size_t)n_kt * F32_BYTES) +
        (e % TILE_ROWS) * TILE_K + lane * 8;
    enum { KEPT = 8, TILE_FLOATS = F32_BYTES / 4 }; /* k tiles a lane keeps in registers */
    float w[KEPT][8];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (mine && i < n_kt)
            load8f(from + i * TILE_FLOATS, w[i]);
    dependency_trigger();
    dependency_wait();
    size_t at = (size_t)row * (size_t)n_embd;
    float squares = 0.0f, top = 0.0f, dot = 0.0f;
#pragma unroll 1
    for (int k = tid * 8; k < n_kt * TILE_K; k += 2048) {
        float v[8] = {}, sum[8] = {};
        if (k < n_embd)
            router_columns(p.in, at, k, v, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            squares += sum[i] * sum[i];
            top = fmaxf(top, fabsf(v[i]));
        }
        store8f(n + k, v);
        /* The sixteen columns of two threads are this block's, of all that share the row. */
        if (p.in.x_out && k < n_embd && (k >> 4) % (int)gridDim.x == (int)blockIdx.x)
            store8f(p.in.x_out + at + (size_t)k, sum);
    }
    squares = warp_sum(squares);
    top = warp_max(top);
    if (lane == 0) {
        part[warp] = squares;
        part[8 + warp] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (mine && i < n_kt) {
            float v[8];
            load8f(n + i * TILE_K + lane * 8, v);
#pragma unroll
            for (int j = 0; j < 8; j++)
                dot += w[i][j] * v[j];
        }
#pragma unroll 1
    for (int i = KEPT; mine && i < n_kt; i++)
#pragma unroll 1
        for (int j = 0; j < 8; j++)
            dot += from[i * TILE_FLOATS + j] * n[i * TILE_K + lane * 8 + j];
    dot = warp_sum(dot);
    squares = warp_sum(lane < 8 ? part[lane] : 0.0f);
    float rms = p.in.gain ? rsqrtf(squares / (float)n_embd + p.in.eps) : 1.0f;
    if (mine && lane == 0)
        p.logits[row * p.w.n_out + e] = dot * rms + (p.w.bias ? p.w.bias[e] : 0.0f);
    /* The record: four lanes make sixteen columns, and their sum. */
    top = warp_max(lane < 8 ? part[8 + lane] : 0.0f);
    uint32_t ex = bits_of(top * rms) >> 23;
    ex = ex < 16 ? 16 : ex;
    float f = float_of((264 - ex) << 23) * rms;
    int groups = n_kt * (TILE_K / 16), blocks = (int)gridDim.x, b = (int)blockIdx.x;
#pragma unroll 1
    for (int i = warp * 8; b + i * blocks < groups; i += 64) {
        int group = b + (i + (lane >> 2)) * blocks, k = group * 16 + (lane & 3) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (group < groups)
            v = *(const float4 *)(n + k);
        uint32_t h0 = pack_half2(v.x * f, v.y * f), h1 = pack_half2(v.z * f, v.w * f);
        float sum = half_to_float(h0 & 0xffff) + half_to_float(h0 >> 16) +
                    half_to_float(h1 & 0xffff) + half_to_float(h1 >> 16);
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (group >= groups)
            continue;
        uint8_t *to = p.record + (size_t)(row * n_kt + k / TILE_K) * (size_t)RECORD;
        *(uint2 *)(to + record_at(k)) = make_uint2(h0, h1);
        if (!(lane & 3)) {
            uint32_t s = split_half(sum);
            *(uint16_t *)(to + record_sum_at(k)) = (uint16_t)s;
            *(uint16_t *)(to + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
        }
    }
    if (blockIdx.x == 0 && tid == 0)
        p.x_scale[row] = float_of((ex - 10) << 23);
}

static size_t few_router_shared(const struct matrix *w)
{
    return (size_t)(16 + w->n_kt * TILE_K) * 4;
}

/* Who chose what; in shared memory of every block. */
struct __align__(16) few_choice
{
    uint32_t rows[MAX_EXPERTS];          /* bits: rows that chose expert e */
    float weight[FEW_EXPERTS][FEW_ROWS]; /* of row r, for the i-th distinct expert */
    int expert[FEW_EXPERTS];             /* distinct, ascending */
    uint8_t place[MAX_EXPERTS];          /* of expert e among them */
    uint16_t chosen[FEW_ROWS][MAX_USED];
    float chosen_weight[FEW_ROWS][MAX_USED];
};

/* One warp chooses for a row, in the order of rows.cuh; `weights`: and weighs. */
template <int PER, int BITS>
DEVICE void few_choose_row(struct few_choice *ch, const struct few_moe_args &p, int row,
                           bool weights)
{
    const float *logits = p.logits + row * p.n_expert;
    int lane = lane_id();
    float v[PER];
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        bool on = e < p.n_expert;
        v[i] = on ? load_float_l2(logits + e) : -INFINITY;
        key[i] = on ? choice_key<BITS>(v[i], e) : 0;
    }
    int e = choose_largest<PER, BITS>(key, p.used, p.n_expert);
    if (lane < p.used) {
        ch->chosen[row][lane] = (uint16_t)e;
        atomicOr(&ch->rows[e], 1u << row);
    }
    if (!weights)
        return;
    float top = -INFINITY, logit = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) { /* lane e % 32 has the logit of e */
        float u = __shfl_sync(FULL_WARP, v[i], e & 31);
        logit = e >> 5 == i ? u : logit;
        top = fmaxf(top, v[i]);
    }
    top = warp_max(top);
    float w = lane < p.used ? fast_exp(logit - top) : 0.0f;
    if (p.renormalise)
        total = w;
    else
#pragma unroll
        for (int i = 0; i < PER; i++)
            total += fast_exp(v[i] - top);
    total = warp_sum(total);
    if (lane < p.used)
        ch->chosen_weight[row][lane] = w / total * p.scale;
}

/* The block. Returns the number of distinct experts. */
DEVICE int few_choose(struct few_choice *ch, const struct few_moe_args &p, bool weights)
{
    int warps = (int)blockDim.x >> 5, lane = lane_id(), tid = (int)threadIdx.x, n = 0;
#pragma unroll 1
    for (int i = tid; i < p.n_expert; i += (int)blockDim.x)
        ch->rows[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += warps) {
        if (p.n_expert <= 128)
            few_choose_row<4, 7>(ch, p, row, weights);
        else
            few_choose_row<MAX_EXPERTS / 32, 9>(ch, p, row, weights);
    }
    __syncthreads();
    /* Every warp counts, the first one also writes the list. */
#pragma unroll 4
    for (int e0 = 0; e0 < p.n_expert; e0 += 32) {
        bool some = e0 + lane < p.n_expert && ch->rows[e0 + lane];
        uint32_t all = __ballot_sync(FULL_WARP, some);
        if (some && warp_id() == 0) {
            int at = n + __popc(all & ((1u << lane) - 1));
            ch->expert[at] = e0 + lane;
            ch->place[e0 + lane] = (uint8_t)at;
        }
        n += __popc(all);
    }
    __syncthreads();
    if (weights) {
#pragma unroll 1
        for (int i = tid; i < p.rows * MAX_USED; i += (int)blockDim.x) {
            int row = i / MAX_USED, k = i % MAX_USED;
            if (k < p.used)
                ch->weight[ch->place[ch->chosen[row][k]]][row] = ch->chosen_weight[row][k];
        }
        __syncthreads();
    }
    return n;
}

/* hidden = silu(x Wg^T) * (x Wu^T) for every distinct expert. A unit is 16 hidden units of an
 * expert: a warp owns it, all of k; units are dealt out SM by SM, so that all read as much. The
 * rows lie in shared memory, (n_kt, 8) records. One block to an SM, which stays. */
static __global__ void __launch_bounds__(FEW_WARPS * 32, 1)
    few_up_kernel(const __grid_constant__ struct few_moe_args p)
{
    SHARED_BYTES(shared);
    struct few_choice *ch = (struct few_choice *)shared;
    int warps = (int)blockDim.x >> 5, w = warp_id(), g = lane_id() >> 2;
    int half = p.w.n_tiles / 2, n_kt = p.w.n_kt;
    uint8_t *rows = shared + sizeof *ch, *rings = rows + 8 * n_kt * RECORD;
    struct pair_walk<PAIR_SLOTS> walk;
    walk.gate = plane_of(p.w, 0, 0);
    walk.up = plane_of(p.w, half, 0);
    walk.n_kt = n_kt;
    ring_init(walk.ring, rings + w * ring_bytes(PAIR_SLOTS, p.slot), p.slot);

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
    for (int i = (int)threadIdx.x; i < p.rows * n_kt * (RECORD / 16); i += (int)blockDim.x) {
        int r = i / (RECORD / 16), kt = r / p.rows, row = r - kt * p.rows;
        copy_async16(rows + (kt * 8 + row) * RECORD + (i - r * (RECORD / 16)) * 16,
                     p.x + (size_t)(row * n_kt + kt) * (size_t)RECORD +
                         (i - r * (RECORD / 16)) * 16);
    }
    copy_async_commit();
    float undo[2];
    to_columns(p.x_scale[g < p.rows ? g : 0], undo);
    int n = few_choose(ch, p, false) * half;
    int step = (int)gridDim.x * warps, unit = (int)blockIdx.x + (int)gridDim.x * w, f_unit = unit;
    auto next = [&](int *expert, int *tile) {
        if (f_unit >= n)
            return false;
        int pick = f_unit / half;
        *expert = ch->expert[pick];
        *tile = f_unit - pick * half;
        f_unit += step;
        return true;
    };
    pair_start(walk, next);
    copy_async_wait<0>();
    __syncthreads();

    struct row_frag x[1];
#pragma unroll 1
    for (; unit < n; unit += step) {
        float acc[2][1][4] = {};
#pragma unroll 1
        for (int kt = 0; kt < n_kt; kt++) {
            frag_load(x[0], rows + (kt * 8 + g) * RECORD);
            pair_slice<1, -1>(walk, x, acc, next);
        }
        int pick = unit / half;
        uint32_t chose = ch->rows[ch->expert[pick]];
        put_hidden_tile(
            acc[0][0], acc[1][0], undo, p.w, unit - pick * half, p.hidden_kt, [&](int col) {
                return chose >> col & 1
                           ? p.hidden +
                                 (size_t)((pick * FEW_ROWS + col) * p.hidden_kt) * (size_t)RECORD
                           : NULL;
            });
    }
    copy_async_wait<0>();
}

/* y = sum over the chosen of weight * hidden Wd^T. A block owns 16 outputs; its warps share out the
 * (distinct expert, slice) pairs, and add up rows that chose the expert. */
static __global__ void __launch_bounds__(FEW_WARPS * 32)
    few_down_kernel(const __grid_constant__ struct few_moe_args p)
{
    SHARED_BYTES(shared);
    struct few_choice *ch = (struct few_choice *)shared;
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int tile = (int)blockIdx.x, n_kt = p.w.n_kt, one_ring = ring_bytes(DOWN_STAGES, p.slot);
    const struct seg *s = seg_of(p.w, tile);
    float *sums = (float *)(shared + sizeof *ch + warps * one_ring);
    struct tile_plane plane = plane_of(p.w, tile, 0);
    struct tile_ring<DOWN_STAGES> ring;
    ring_init(ring, shared + sizeof *ch + w * one_ring, p.slot);

    dependency_trigger();
    int n = few_choose(ch, p, true) * n_kt; /* logits: written two kernels ago, see few_up_kernel */
    int f_item = w;
    auto fetch = [&]() {
        bool real = f_item < n;
        int pick = real ? (int)((uint32_t)f_item * p.per_kt >> 16) : 0, kt = f_item - pick * n_kt;
        ring_fetch(ring, plane_tile(plane, ch->expert[pick], 0) + kt * plane.bytes, plane.bytes,
                   real);
        f_item += warps;
    };
#pragma unroll 1
    for (int i = 0; i < DOWN_STAGES; i++)
        fetch();
    dependency_wait();

    float acc[4] = {};
#pragma unroll 1
    for (int item = w; item < n; item += warps) {
        float part[1][4] = {};
        struct row_frag x[1];
        int pick = (int)((uint32_t)item * p.per_kt >> 16);
        uint32_t rows = ch->rows[ch->expert[pick]];
        frag_load(x[0], rows >> g & 1 ? p.hidden + (size_t)((pick * FEW_ROWS + g) * n_kt + item -
                                                            pick * n_kt) *
                                                       (size_t)RECORD
                                      : p.zeros);
        float w0 = rows >> 2 * c & 1 ? ch->weight[pick][2 * c] : 0.0f;
        float w1 = rows >> (2 * c + 1) & 1 ? ch->weight[pick][2 * c + 1] : 0.0f;
        frag_tile<1>(plane.kind, ring_take(ring), x, part);
        ring_give(ring);
        fetch();
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[e] += (e & 1 ? w1 : w0) * part[0][e];
    }
    copy_async_wait<0>();
    const float undo[2] = {1.0f / HIDDEN_SCALE, 1.0f / HIDDEN_SCALE};
    put_tile(sums + w * SUM_TILE, acc, undo);
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.rows * TILE_ROWS; i += (int)blockDim.x) {
        int row = (tile - s->tile0) * TILE_ROWS + (i & 15);
        if (row < s->rows)
            p.y[(size_t)(i >> 4) * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
                take_tile(sums, warps, SUM_TILE, i >> 4, i & 15);
    }
}

static size_t few_moe_shared(int warps, int stages, int tiles, int slot)
{
    return sizeof(struct few_choice) +
           (size_t)warps * (size_t)(ring_bytes(stages, slot) + tiles * SUM_TILE * 4);
}

static size_t few_up_shared(const struct matrix *w, int warps)
{
    return sizeof(struct few_choice) + (size_t)(w->n_kt * 8 * RECORD) +
           (size_t)(warps * ring_bytes(PAIR_SLOTS, w->max_tile_bytes));
}

bool few_moe_fits(const struct cuda_backend *cu, const struct matrix *router,
                  const struct matrix *gate_up, const struct matrix *down, int rows)
{
    if (rows < FEW_FROM || few_router_shared(router) > cu->shared_limit)
        return false;
    if (rows <= NORM_ROWS && quad_fits(cu, gate_up, down, rows))
        return true;
    return few_fits(cu, gate_up, rows) && down->set == SET_K && gate_up->n_seg <= 2 &&
           down->n_kt <= 16 && rows * gate_up->n_kt <= cu->n_records &&
           few_up_shared(gate_up, 4) <= cu->shared_limit &&
           few_moe_shared(8, DOWN_STAGES, 1, down->max_tile_bytes) <= cu->shared_limit;
}

void few_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
             const struct matrix *down, const struct norm_in *in, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    CHECK(s->n_expert_used <= MAX_USED && router->n_out <= MAX_EXPERTS, "%d of %d experts",
          s->n_expert_used, router->n_out);
    if (quad_moe_fits(cu, router, gate_up, down, rows)) {
        quad_moe(cu, router, gate_up, down, in, y, rows);
        return;
    }
    struct few_router_args r = {*router, *in, cu->router, cu->records, cu->half_scale};
    CHECK(router->n_seg == 1 && router->seg[0].kind == TILE_F32, "a router that is not in floats");
    cu->half_of = cu->panels_of = cu->records_of =
        NULL; /* half_scale is no longer that of half_in */
    cuda_launch(cu, few_router_kernel, dim3((unsigned)ceil_div(router->n_out, 8), (unsigned)rows),
                256, few_router_shared(router), LAUNCH_EARLY, r);
    if (quad_fits(cu, gate_up, down, rows)) {
        quad_experts(cu, gate_up, down, y, router->n_out, rows);
        return;
    }
    struct few_moe_args p = {};
    p.w = *gate_up;
    p.logits = cu->router;
    p.x = cu->records;
    p.x_scale = cu->half_scale;
    p.hidden = cu->hidden_records;
    p.zeros = cu->hidden_records + (size_t)(list_hidden_records(s) - 1) * RECORD;
    p.rows = rows;
    p.n_expert = router->n_out;
    p.used = s->n_expert_used;
    p.slot = gate_up->max_tile_bytes;
    p.hidden_kt = down->n_kt;
    p.renormalise = s->norm_topk;
    p.scale = s->expert_scale;
    int warps = FEW_WARPS;
    while (warps > 4 && few_up_shared(gate_up, warps) > cu->shared_limit)
        warps /= 2;
    cuda_launch(cu, few_up_kernel, dim3((unsigned)cu->n_sm), warps * 32,
                few_up_shared(gate_up, warps), LAUNCH_EARLY, p);
    p.w = *down;
    p.per_kt = 65535u / (uint32_t)down->n_kt + 1;
    p.slot = down->max_tile_bytes;
    p.y = y;
    warps = FEW_WARPS;
    while (warps > 8 && few_moe_shared(warps, DOWN_STAGES, 1, p.slot) > cu->shared_limit)
        warps /= 2;
    cuda_launch(cu, few_down_kernel, dim3((unsigned)down->n_tiles), warps * 32,
                few_moe_shared(warps, DOWN_STAGES, 1, p.slot), LAUNCH_EARLY, p);
}
