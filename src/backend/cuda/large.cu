/*
 * Products of many rows (prompts), and what all products of more than one row need: activations
 * as halves, routing, the choice of kernel. A block takes 256 output rows (8 warps of two 16-row
 * tiles) and up to 8*NT rows of the step. Each warp streams its weight tiles through a ring of
 * its own and turns them into fragments in registers; the activations' 256 columns at a time are
 * shared by the block. Experts: rows are sorted by expert on the device, a work list says which
 * block takes what, blocks past its end leave at once; the grid depends on the number of rows
 * alone.
 */
#include "backend/cuda/rows.cuh"

#include <math.h>

enum { LARGE_WARPS = 8, MAX_USED = 16, MAX_EXPERTS = 512, MID_ROWS = 256 };
/* From so many rows on hopper.cu takes a product, or a head; experts of more, and route.cu their
 * router, or their routing. */
enum { WIDE_FROM = 33, WIDE_HEAD_FROM = 17, WIDE_MOE_FROM = LIST_ROWS + 1 };
enum { ROUTER_FROM = LIST_ROWS + 1, CHOOSE_FROM = 33 };

struct halves_args {
    float *x;              /* (rows, width) */
    const float *d, *gain; /* (rows, width) or NULL; (width) or NULL: then x is taken as it is */
    float *n;              /* (rows, width): norm(x + d) * gain, where there is a gain */
    uint16_t *out;         /* (rows, padded) halves, in the order of half_slot */
    uint8_t *records;      /* and in that of rows.cuh; or NULL */
    uint8_t *panels;       /* and in that of panel.cu, panel_rows to a tile; or NULL */
    int panel_rows;
    float *scale; /* (rows) */
    int width, padded;
    float eps;
    struct expert_sum sum; /* SUM: in place of d */
};

/* Columns k..k+3 of row t: the weighted sum of what its experts came to. */
DEVICE float4 expert_columns(const struct expert_sum &s, int t, int k)
{
    float v[4] = {};
#pragma unroll 8
    for (int i = 0; i < s.used; i++) {
        float w = s.weight[t * s.used + i] * (1.0f / HIDDEN_SCALE);
        uint2 h =
            *(const uint2 *)(s.out + ((size_t)t * (size_t)s.used + (size_t)i) * (size_t)s.width +
                             (size_t)k);
        v[0] += w * half_to_float(h.x & 0xffff);
        v[1] += w * half_to_float(h.x >> 16);
        v[2] += w * half_to_float(h.y & 0xffff);
        v[3] += w * half_to_float(h.y >> 16);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* Rows to halves, zeros past width, each scaled by a power of two that takes its largest to about
 * 1024; scale[row] undoes it. With a gain: x += d, and it is the norm of x that goes on. A block
 * per row, which passes through shared memory. VEC: width is a multiple of four. SUM: d are the
 * rows of the experts, still to be weighted and added up. */
template <bool VEC, bool SUM = false>
static __global__ void __launch_bounds__(512)
    halves_kernel(const __grid_constant__ struct halves_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared, *row = part + 64; /* (2, 32): sums, largest; (width) */
    int tid = (int)threadIdx.x, threads = (int)blockDim.x;
    size_t at = (size_t)blockIdx.x * (size_t)p.width;
    enum { V = VEC ? 4 : 1 };
    dependency_trigger();
    dependency_wait();
    float sum = 0.0f, top = 0.0f;
#pragma unroll 2
    for (int k = tid * V; k < p.width; k += threads * V) {
        float v[V], d[V] = {}, g[V];
        if (VEC) {
            float4 a = *(const float4 *)(p.x + at + (size_t)k);
            float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f), c = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            if (p.gain) {
                c = *(const float4 *)(p.gain + k);
                if (SUM)
                    b = expert_columns(p.sum, (int)blockIdx.x, k);
                else if (p.d)
                    b = *(const float4 *)(p.d + at + (size_t)k);
            }
            v[0] = a.x, v[V > 1] = a.y, v[V > 2 ? 2 : 0] = a.z, v[V > 2 ? 3 : 0] = a.w;
            d[0] = b.x, d[V > 1] = b.y, d[V > 2 ? 2 : 0] = b.z, d[V > 2 ? 3 : 0] = b.w;
            g[0] = c.x, g[V > 1] = c.y, g[V > 2 ? 2 : 0] = c.z, g[V > 2 ? 3 : 0] = c.w;
        } else {
            v[0] = p.x[at + (size_t)k];
            d[0] = p.gain && p.d ? p.d[at + (size_t)k] : 0.0f;
            g[0] = p.gain ? p.gain[k] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            v[i] += d[i];
            if (p.gain && p.d && !VEC)
                p.x[at + (size_t)(k + i)] = v[i];
            sum += v[i] * v[i];
            d[i] = v[i] * g[i];
            top = fmaxf(top, fabsf(d[i]));
            row[k + i] = d[i];
        }
        if (VEC && (SUM || (p.gain && p.d)))
            *(float4 *)(p.x + at + (size_t)k) =
                make_float4(v[0], v[V > 1], v[V > 2 ? 2 : 0], v[V > 2 ? 3 : 0]);
    }
    sum = warp_sum(sum);
    uint32_t most = warp_max_u32(bits_of(top));
    if (lane_id() == 0) {
        part[warp_id()] = sum;
        part[32 + warp_id()] = float_of(most);
    }
    __syncthreads();
    sum = warp_sum(lane_id() < threads >> 5 ? part[lane_id()] : 0.0f);
    most = warp_max_u32(lane_id() < threads >> 5 ? bits_of(part[32 + lane_id()]) : 0);
    float rms = p.gain ? rsqrtf(sum / (float)p.width + p.eps) : 1.0f;
    uint32_t e = bits_of(float_of(most) * rms) >> 23;
    e = e < 16 ? 16 : e;
    float f = float_of((264 - e) << 23);
    uint16_t *out = p.out + (size_t)blockIdx.x * (size_t)p.padded;
    uint8_t *panel = NULL; /* this row of the tile's first panel */
    if (p.panels) {
        int tile = (int)blockIdx.x / p.panel_rows, r = (int)blockIdx.x - tile * p.panel_rows;
        panel =
            p.panels + ((size_t)(tile * p.panel_rows) * (size_t)p.padded + (size_t)(r * 64)) * 2;
    }
#pragma unroll 2
    for (int k = tid * 4; k < p.padded; k += threads * 4) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = k + i < p.width ? row[k + i] * rms : 0.0f;
            if (!VEC && p.gain && k + i < p.width)
                p.n[at + (size_t)(k + i)] = v[i];
        }
        if (VEC && p.gain && p.n && k < p.width)
            *(float4 *)(p.n + at + (size_t)k) = make_float4(v[0], v[1], v[2], v[3]);
        uint2 h = make_uint2(pack_half2(v[0] * f, v[1] * f), pack_half2(v[2] * f, v[3] * f));
        *(uint32_t *)(out + half_slot(k)) = h.x;
        *(uint32_t *)(out + half_slot(k + 2)) = h.y;
        if (panel) {
            int at = half_slot(k), piece = at >> 3 & 7, turn = (int)blockIdx.x & 7;
            uint8_t *to = panel + (k >> 6) * p.panel_rows * 128 + (at & 7) * 2;
            *(uint32_t *)(to + ((piece ^ turn) << 4)) = h.x;
            *(uint32_t *)(to + (((piece + 1) ^ turn) << 4)) = h.y;
        }
        if (p.records) {
            uint8_t *record = p.records + ((size_t)blockIdx.x * (size_t)(p.padded / TILE_K) +
                                           (size_t)(k / TILE_K)) *
                                              (size_t)RECORD;
            float total = half_to_float(h.x & 0xffff) + half_to_float(h.x >> 16) +
                          half_to_float(h.y & 0xffff) + half_to_float(h.y >> 16);
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            *(uint2 *)(record + record_at(k)) = h;
            if (!(k & 15)) {
                uint32_t s = split_half(total);
                *(uint16_t *)(record + record_sum_at(k)) = (uint16_t)s;
                *(uint16_t *)(record + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
            }
        }
    }
    if (tid == 0)
        p.scale[blockIdx.x] = float_of((e - 10) << 23);
}

static void launch_halves(struct cuda_backend *cu, struct halves_args p, int rows)
{
    p.padded = ceil_div(p.width, TILE_K) * TILE_K;
    p.out = cu->half_in;
    p.records = rows * (p.padded / TILE_K) <= cu->n_records ? cu->records : NULL;
    p.panels = panel_fits(cu, rows, p.padded) ? cu->panels : NULL;
    p.panel_rows = panel_width(rows);
    p.scale = cu->half_scale;
    p.eps = cu->shape.norm_eps;
    cu->panels_of = cu->records_of = NULL;
    int threads = p.width >= 2048 ? 512 : 256;
    size_t shared = (size_t)(64 + p.padded) * 4;
    if (p.sum.out)
        cuda_launch(cu, halves_kernel<true, true>, dim3((unsigned)rows), threads, shared,
                    LAUNCH_EARLY, p);
    else if (p.width % 4 == 0)
        cuda_launch(cu, halves_kernel<true>, dim3((unsigned)rows), threads, shared, LAUNCH_EARLY,
                    p);
    else
        cuda_launch(cu, halves_kernel<false>, dim3((unsigned)rows), threads, shared, LAUNCH_EARLY,
                    p);
}

/* Grid: (rows), of `width` floats each. */
static __global__ void __launch_bounds__(256)
    floats_kernel(const uint16_t *halves, const float *scale, int first, int width, float *x)
{
    dependency_wait();
    dependency_trigger();
    size_t row = (size_t)first + blockIdx.x;
    const uint16_t *from = halves + row * (size_t)((width + TILE_K - 1) / TILE_K * TILE_K);
    for (int k = (int)threadIdx.x; k < width; k += 256)
        x[row * (size_t)width + (size_t)k] = half_to_float(from[half_slot(k)]) * scale[row];
}

void large_floats(struct cuda_backend *cu, const float *x)
{
    if (!x || cu->owed != x || cu->half_of != x)
        return;
    cu->owed = NULL;
    cuda_launch(cu, floats_kernel, dim3((unsigned)(cu->half_rows - cu->owed_from)), 256, 0,
                LAUNCH_EARLY, (const uint16_t *)cu->half_in, (const float *)cu->half_scale,
                cu->owed_from, cu->owed_width, (float *)x);
}

/* The halves of x (rows, width) into half_in, unless they are there. */
static void to_halves(struct cuda_backend *cu, const float *x, int rows, int width)
{
    if (cu->half_of == x && cu->half_rows >= rows)
        return;
    struct halves_args p = {};
    p.x = (float *)x;
    p.width = width;
    launch_halves(cu, p, rows);
    cu->half_of = NULL; /* nobody says when x changes */
}

void large_halves(struct cuda_backend *cu, const float *x, int width, int first, int rows)
{
    cu->half_of = cu->owed = NULL;
    if (rows <= PANEL_ROWS) /* these are wanted in other orders, too */
        return;
    if (first)
        to_halves(cu, x, first, width);
    cu->half_of = x;
    cu->half_rows = rows;
}

void large_norm(struct cuda_backend *cu, float *x, const float *d, const float *gain, float *n,
                int rows, bool floats)
{
    struct halves_args p = {};
    floats = floats || rows <= PANEL_ROWS || cu->shape.n_embd % 4;
    p.x = x;
    p.d = d;
    p.gain = gain;
    p.n = floats ? n : NULL;
    p.width = cu->shape.n_embd;
    if (d && cu->sum.y == d) {
        p.sum = cu->sum;
        cu->sum.y = NULL;
    }
    launch_halves(cu, p, rows);
    cu->half_of = n;
    cu->half_rows = rows;
    cu->owed = floats ? NULL : n;
    cu->owed_from = 0;
    cu->owed_width = p.width;
}

enum { ROUTE_MIN_TILE = 8 };

static int max_tiles(int rows, int used, int n_expert, int width)
{
    int pairs = rows * used;
    int experts = pairs < n_expert ? pairs : n_expert;
    return experts + pairs / width;
}

size_t large_route_ints(const struct shape *s)
{
    int pairs = s->max_tokens * s->n_expert_used;
    return 16 + 3 * (size_t)(s->n_expert + pairs / ROUTE_MIN_TILE + 1) + 2 * (size_t)pairs +
           (size_t)s->n_expert * (size_t)(2 + s->max_tokens) +
           (size_t)(pairs / ROUTE_MIN_TILE + 1) +
           (size_t)(s->n_expert + pairs / ROUTE_MIN_TILE + 1);
}

static struct route_tables route_tables_of(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
    int pairs = s->max_tokens * s->n_expert_used;
    struct route_tables r;
    r.n_tiles = cu->route;
    r.tiles = cu->route + 16;
    r.pairs = r.tiles + 3 * (s->n_expert + pairs / ROUTE_MIN_TILE + 1);
    r.chosen = r.pairs + pairs;
    r.counts = r.chosen + pairs;
    r.places = r.counts + s->n_expert;
    r.room = s->max_tokens;
    r.lists = r.done = NULL;
    return r;
}

/*
 * Grid: (blocks of 16 x 16 output rows, row tiles of the step). Warp w takes row tiles t0 and t1:
 * 2 (8 x + w) and the next; PAIR: gate tile 8 x + w and its up tile.
 */
template <int SET, int NT, bool PAIR>
static __global__ void __launch_bounds__(LARGE_WARPS * 32)
    gemm_kernel(const __grid_constant__ struct gemm_args p)
{
    const int BN = NT * 8, B_BYTES = BN * TILE_K * 2;
    SHARED_BYTES(shared);
    struct gemm_rows rows;
    rows.in = (int *)shared;
    rows.out = rows.in + BN;
    rows.scale = (float *)(rows.out + BN);
    uint8_t *bs = shared + 3 * BN * 4; /* (2, BN, 512 bytes) */
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    uint8_t *ring = bs + 2 * B_BYTES + w * p.stages * 2 * p.slot;

    dependency_wait();
    dependency_trigger();
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, BN))
        return;
    int expert = rows.expert, count = rows.count;

    int half = p.w.n_tiles / 2, unit = (int)blockIdx.x * LARGE_WARPS + w;
    int tile[2] = {PAIR ? unit : 2 * unit, PAIR ? half + unit : 2 * unit + 1};
    bool mine = PAIR ? unit < half : tile[0] < p.w.n_tiles;
    if (!mine)
        tile[0] = tile[1] = 0;
    if (!PAIR && tile[1] >= p.w.n_tiles)
        tile[1] = tile[0];
    const struct seg *s[2] = {seg_of(p.w, tile[0]), seg_of(p.w, tile[1])};
    int n_active = (count + 7) / 8;

    auto fetch = [&](int kt) { /* the activations' k tile */
                               if (kt < p.w.n_kt) {
                                   uint8_t *to = bs + (kt & 1) * B_BYTES;
                                   for (int i = (int)threadIdx.x; i < n_active * 8 * 32;
                                        i += LARGE_WARPS * 32) {
                                       int row = i >> 5, piece = i & 31, in = rows.in[row];
                                       const uint16_t *from =
                                           p.x + (size_t)(in < 0 ? 0 : in) * (size_t)p.ldx +
                                           (size_t)(kt * TILE_K + piece * 8);
                                       copy_async16_or_zero(to + row * (TILE_K * 2) +
                                                                ((piece ^ (row & 7)) << 4),
                                                            from, in >= 0);
                                   }
                               }
                               copy_async_commit();
    };
    auto fetch_weights = [&](int kt) {
        if (SET != SET_ALL && kt < p.w.n_kt && mine) {
            uint8_t *to = ring + kt % p.stages * 2 * p.slot;
#pragma unroll
            for (int i = 0; i < 2; i++)
                tile_fetch(to + i * p.slot, tile_address(p.w, s[i], expert, tile[i], kt),
                           s[i]->tile_bytes);
        }
        copy_async_commit();
    };
    /* Groups in order: W0, B0, W1, then per round B(kt+1), W(kt+ahead): when round kt starts, all
     * but the last `ahead - 1` are needed. */
    int ahead = p.stages - 1;
    fetch_weights(0);
    fetch(0);
    if (ahead == 2)
        fetch_weights(1);
    float acc[2][NT][4] = {};
    for (int kt = 0; kt < p.w.n_kt; kt++) {
        if (ahead == 2)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads(); /* k tile kt is there for all; the other buffers are free */
        fetch(kt + 1);
        if (ahead)
            fetch_weights(kt + ahead);
        const uint8_t *b = bs + (kt & 1) * B_BYTES;
        const uint8_t *tiles[2];
#pragma unroll
        for (int i = 0; i < 2; i++) /* rare kinds are read where they are */
            tiles[i] = SET == SET_ALL ? tile_address(p.w, s[i], expert, tile[i], kt)
                                      : ring + (kt % p.stages * 2 + i) * p.slot;
#pragma unroll 1
        for (int q = 0; q < 4; q++) {
            uint32_t a[2][4][4];
            if (SET == SET_ALL) {
                uint32_t rest[2][4][4];
                chunk_slow(s[0], tiles[0], q, lane, a[0], rest[0]);
                chunk_slow(s[1], tiles[1], q, lane, a[1], rest[1]);
                chunk_mma<NT>(rest, b, q, n_active, acc);
            } else {
                chunk_decode<SET>(s[0], tiles[0], q, a[0]);
                chunk_decode<SET>(s[1], tiles[1], q, a[1]);
            }
            if (SET == SET_K && 2 * n_active > NT)
                chunk_mma<NT, true>(a, b, q, n_active, acc);
            else
                chunk_mma<NT>(a, b, q, n_active, acc);
        }
        if (!ahead) {
            __syncwarp(); /* one ring entry: done with before it is fetched over */
            fetch_weights(kt + 1);
        }
    }
    copy_async_wait<0>();
    if (PAIR && !mine) { /* columns past the hidden units, up to whole k tiles, are zero */
        for (int i = lane; i < count * TILE_ROWS; i += 32) {
            int row = unit * TILE_ROWS + i % TILE_ROWS;
            if (row < p.ldy)
                p.y_half[(size_t)rows.out[i / TILE_ROWS] * (size_t)p.ldy + (size_t)row] = 0;
        }
    }
    if (!mine)
        return;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int col = n * 8 + 2 * c + (e & 1), r = g + 8 * (e >> 1);
            if (col >= count)
                continue;
            int out = rows.out[col];
            float scale = rows.scale[col];
            if (PAIR) {
                int row = unit * TILE_ROWS + r;
                float gate = acc[0][n][e] * scale, up = acc[1][n][e] * scale;
                if (row >= s[0]->rows) /* padding: columns of zeros */
                    gate = up = 0.0f;
                if (p.w.bias && row < s[0]->rows) {
                    gate += p.w.bias[row];
                    up += p.w.bias[p.w.n_out / 2 + row];
                }
                float v = clamp_half(silu(gate) * up * HIDDEN_SCALE);
                p.y_half[(size_t)out * (size_t)p.ldy + (size_t)half_slot(row)] = float_to_half(v);
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int row = (tile[i] - s[i]->tile0) * TILE_ROWS + r;
                    if (row >= s[i]->rows || (i == 1 && tile[1] == tile[0]))
                        continue;
                    float v = acc[i][n][e] * scale;
                    if (p.w.bias)
                        v += p.w.bias[s[i]->row0 + row];
                    p.y[(size_t)out * (size_t)p.ldy + (size_t)(s[i]->row0 + row)] = v;
                }
            }
        }
}

static size_t gemm_shared(const struct gemm_args &p, int nt)
{
    size_t bn = (size_t)nt * 8;
    return 3 * bn * 4 + 2 * bn * TILE_K * 2 +
           (size_t)LARGE_WARPS * (size_t)p.stages * 2 * (size_t)p.slot;
}

template <int SET, int NT, bool PAIR>
static void gemm_launch(struct cuda_backend *cu, struct gemm_args p, dim3 grid)
{
    p.stages = 3;
    while (p.stages > 1 && gemm_shared(p, NT) > cu->shared_limit)
        p.stages--;
    CHECK(gemm_shared(p, NT) <= cu->shared_limit, "%zu bytes of shared memory", gemm_shared(p, NT));
    cuda_launch(cu, gemm_kernel<SET, NT, PAIR>, grid, LARGE_WARPS * 32, gemm_shared(p, NT),
                LAUNCH_EARLY, p);
}

/* Not every set has every width: compiling takes its time. */
template <bool PAIR>
static void large_pick(struct cuda_backend *cu, struct gemm_args p, int width, int y)
{
    int units = PAIR ? p.ldy / TILE_ROWS : ceil_div(p.w.n_tiles, 2);
    dim3 grid((unsigned)ceil_div(units, LARGE_WARPS), (unsigned)y);
    p.slot = p.w.set == SET_ALL ? 0 : p.w.max_tile_bytes;
    if (p.w.set == SET_ALL)
        gemm_launch<SET_ALL, 8, PAIR>(cu, p, grid);
    else if (p.w.set == SET_FAST)
        gemm_launch<SET_FAST, 8, PAIR>(cu, p, grid);
    else if (width == 64)
        gemm_launch<SET_K, 8, PAIR>(cu, p, grid);
    else
        gemm_launch<SET_K, 16, PAIR>(cu, p, grid);
}

void large_gemm(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y)
{
    if (pair)
        large_pick<true>(cu, p, width, y);
    else
        large_pick<false>(cu, p, width, y);
}

/* Rows of the step a block takes when `rows` come its way: see mid_pick and large_pick. */
static int tile_width(const struct matrix *w, int rows, bool mid)
{
    if (mid)
        return w->set != SET_K ? 16 : rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
    return w->set != SET_K || rows <= 64 ? 64 : 128;
}

/* Whether a product goes through mid.cu and stream.cu: few rows, or too little shared memory for
 * large.cu's blocks (most GPUs but the A100 and its successors in data centres). */
static bool is_mid(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = {};
    p.stages = 1;
    p.slot = w->set == SET_ALL ? 0 : w->max_tile_bytes;
    return rows <= MID_ROWS || gemm_shared(p, w->set == SET_K ? 16 : 8) > cu->shared_limit;
}

static void gemm(struct cuda_backend *cu, const struct gemm_args &p, bool pair, bool mid, bool wide,
                 int width, int y)
{
    if (wide) {
        if (p.moe || p.rows <= PANEL_ROWS || !stay_gemm(cu, p, pair))
            wide_gemm(cu, p, pair, y);
        return;
    }
    if (mid && stream_gemm(cu, p, pair, width, y))
        return;
    if (mid)
        mid_gemm(cu, p, pair, width, y);
    else
        large_gemm(cu, p, pair, width, y);
}

/* Everything but where results go. */
static struct gemm_args args_in(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = {};
    p.w = *w;
    p.x = cu->half_in;
    p.x_scale = cu->half_scale;
    p.ldx = w->n_kt * TILE_K;
    p.rows = rows;
    p.unscale = 1.0f;
    return p;
}

static struct gemm_args args_hidden(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_args p = args_in(cu, w, rows);
    p.x = cu->half_hidden;
    p.x_scale = NULL;
    p.unscale = 1.0f / HIDDEN_SCALE;
    return p;
}

void large_linear(struct cuda_backend *cu, const struct matrix *w, const float *x, float *y,
                  int rows)
{
    if (cu->panels_of == x && cu->panels_rows == rows && panel_linear(cu, w, y, rows))
        return;
    if (cu->records_of == x && cu->panels_rows == rows && few_records(cu, w, y, rows))
        return;
    to_halves(cu, x, rows, w->n_in);
    if (rows < PANEL_FROM && few_records(cu, w, y, rows))
        return;
    if (rows > FEW_ROWS && panel_linear(cu, w, y, rows))
        return;
    if (few_records(cu, w, y, rows))
        return;
    struct gemm_args p = args_in(cu, w, rows);
    p.y = y;
    p.ldy = w->n_out;
    int wide_from = few_is_long(w) ? WIDE_HEAD_FROM : WIDE_FROM;
    bool mid = is_mid(cu, w, rows), wide = rows >= wide_from && wide_suits(cu, w, false);
    int width = wide ? WIDE_ROWS : tile_width(w, rows > 16 && rows <= 48 ? 16 : rows, mid);
    gemm(cu, p, false, mid, wide, width, ceil_div(rows, width));
}

/* Whether a block of hopper.cu has whole heads, each of one kind: see struct gemm_heads. */
bool large_attn_in_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    const struct shape *s = &cu->shape;
    bool fits = rows > PANEL_ROWS && wide_suits(cu, w, false) && s->head_dim == 128 &&
                s->n_rot == 128 && s->kv_type != DT_F32;
    for (int i = 0; i < w->n_seg; i++)
        fits = fits && w->seg[i].tile0 % 8 == 0 && w->seg[i].rows % 128 == 0;
    return fits;
}

void large_attn_in(struct cuda_backend *cu, const struct attn_layer *l, const struct matrix *w,
                   const struct step *step, const float *x, float *q)
{
    const struct shape *s = &cu->shape;
    int rows = step->n_tokens;
    to_halves(cu, x, rows, w->n_in);
    struct gemm_args p = args_in(cu, w, rows);
    p.ldy = w->n_out;
    p.heads.set = true;
    p.heads.bf16 = s->kv_type == DT_BF16;
    p.heads.q = q;
    p.heads.k = (uint16_t *)l->kv.k;
    p.heads.v = (uint16_t *)l->kv.v;
    p.heads.q_norm = l->q_norm;
    p.heads.k_norm = l->k_norm;
    p.heads.rope = step->rope;
    p.heads.slot = step->slot;
    p.heads.n_heads = s->n_heads;
    p.heads.n_kv = s->n_kv_heads;
    p.heads.page_len = s->page_len;
    p.heads.eps = s->norm_eps;
    wide_gemm(cu, p, false, ceil_div(rows, WIDE_ROWS));
}

void large_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
               const float *x, float *y, int rows)
{
    bool mid = is_mid(cu, gate_up, rows) || is_mid(cu, down, rows);
    to_halves(cu, x, rows, gate_up->n_in);
    struct gemm_args p = args_in(cu, gate_up, rows);
    p.y_half = cu->half_hidden;
    p.ldy = down->n_kt * TILE_K;
    bool wide = rows >= WIDE_FROM && wide_suits(cu, gate_up, true) && wide_suits(cu, down, false);
    int width = wide ? WIDE_ROWS : tile_width(gate_up, rows, mid);
    gemm(cu, p, true, mid, wide, width, ceil_div(rows, width));
    p = args_hidden(cu, down, rows);
    p.y = y;
    p.ldy = down->n_out;
    width = wide ? WIDE_ROWS : tile_width(down, rows, mid);
    gemm(cu, p, false, mid, wide, width, ceil_div(rows, width));
}

/* One warp: see choose_experts in small.cu, which needs the same; here results go to global memory.
 */
struct route_args {
    const float *logits; /* (parts, rows, n_expert), to be added up */
    int parts;
    int rows, n_expert, used, width;
    bool renormalise, route_here;
    bool even; /* an expert's tiles are of about one size, not full ones and a rest */
    float scale;
    struct route_tables t;
    float *weight; /* (rows * used) */
};

template <int PER> DEVICE int route_row(const struct route_args &p, int t)
{
    int lane = lane_id();
    const float *row = p.logits + (size_t)t * (size_t)p.n_expert;
    uint32_t key[PER];
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        float v = e < p.n_expert ? row[e] : -INFINITY;
        for (int j = 1; j < p.parts && e < p.n_expert; j++)
            v += row[(size_t)j * (size_t)p.rows * (size_t)p.n_expert + (size_t)e];
        key[i] = e < p.n_expert ? float_order(v) : 0;
        top = fmaxf(top, v);
    }
    top = warp_max(top);
    if (!p.renormalise) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (i * 32 + lane < p.n_expert)
                total += expf(float_unorder(key[i]) - top);
        total = warp_sum(total);
    }
    float kept = 0.0f, mine = 0.0f;
    int mine_e = 0;
    for (int k = 0; k < p.used; k++) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            best = key[i] > best ? key[i] : best;
        uint32_t all = warp_max_u32(best), low = 0;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            if (key[i] == all)
                low = 0xffffu - (uint32_t)(i * 32 + lane);
        int e = (int)(0xffffu - warp_max_u32(low));
        float v = expf(float_unorder(all) - top);
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
    if (lane < p.used) {
        p.t.chosen[t * p.used + lane] = mine_e;
        p.weight[t * p.used + lane] = mine / (p.renormalise ? kept : total) * p.scale;
    }
    return mine_e;
}

/* Entries of the work list for `count` pairs of expert e, the first of which is `start`. */
DEVICE void list_tiles(const struct route_args &p, int e, int count, int start, int tile0)
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

/* One warp: what is before each expert's pairs and tiles. */
DEVICE void route_scan(const struct route_args &p, const int *count, int *start, int *tile0)
{
    int lane = lane_id(), pairs = 0, tiles = 0;
    for (int e0 = 0; e0 < p.n_expert; e0 += 32) {
        int e = e0 + lane, c = e < p.n_expert ? count[e] : 0, t = (c + p.width - 1) / p.width;
        int sc = c, st = t;
        for (int d = 1; d < 32; d <<= 1) {
            int a = __shfl_up_sync(FULL_WARP, sc, d), b = __shfl_up_sync(FULL_WARP, st, d);
            if (lane >= d) {
                sc += a;
                st += b;
            }
        }
        if (e < p.n_expert) {
            start[e] = pairs + sc - c;
            tile0[e] = tiles + st - t;
        }
        pairs += __shfl_sync(FULL_WARP, sc, 31);
        tiles += __shfl_sync(FULL_WARP, st, 31);
    }
    if (lane == 0)
        p.t.n_tiles[0] = tiles;
}

/* A warp per row, ROUTE_ROWS of them a block. With lists, pairs go to their expert's list at
 * once, in whatever order the atomics give (no result depends on it), and the block that is last
 * to come lists the work. */
enum { ROUTE_ROWS = 8 };

static __global__ void __launch_bounds__(32 * ROUTE_ROWS)
    route_kernel(const __grid_constant__ struct route_args p)
{
    SHARED_BYTES(shared);
    int *count = (int *)shared, *start = count + MAX_EXPERTS, *tile0 = start + MAX_EXPERTS;
    int *last = tile0 + MAX_EXPERTS, tid = (int)threadIdx.x, threads = 32 * ROUTE_ROWS;
    const struct route_tables &r = p.t;
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.x * ROUTE_ROWS + warp_id(), e = 0, place = 0;
    bool mine = t < p.rows && lane_id() < p.used;
    if (r.lists) {
        for (int i = tid; i < p.n_expert; i += threads)
            count[i] = 0;
        __syncthreads();
    }
    if (t < p.rows)
        e = p.n_expert <= 128 ? route_row<4>(p, t) : route_row<MAX_EXPERTS / 32>(p, t);
    if (!r.lists)
        return;
    if (mine)
        place = atomicAdd(&count[e], 1);
    __syncthreads();
    for (int i = tid; i < p.n_expert; i += threads)
        start[i] = count[i] ? atomicAdd(&r.counts[i], count[i]) : 0;
    __syncthreads();
    if (mine)
        r.lists[e * r.room + start[e] + place] = t * p.used + lane_id();
    __threadfence();
    __syncthreads();
    if (tid == 0)
        *last = atomicAdd(&r.n_tiles[1], 1) == (int)gridDim.x - 1;
    __syncthreads();
    if (!*last)
        return;
    for (int i = tid; i < p.n_expert; i += threads) {
        count[i] = atomicAdd(&r.counts[i], 0);
        r.counts[i] = 0;
    }
    if (tid == 0)
        r.n_tiles[1] = r.n_tiles[2] = 0;
    __syncthreads();
    if (tid < 32)
        route_scan(p, count, start, tile0);
    __syncthreads();
    for (int i = tid; i < p.n_expert; i += threads) {
        list_tiles(p, i, count[i], start[i], tile0[i]);
        for (int j = 0; j < (count[i] + p.width - 1) / p.width; j++)
            r.done[tile0[i] + j] = 0;
    }
}

/* One block: counts pairs per expert, lays experts out one after another, lists the work. The order
 * of an expert's rows is whatever the atomics give: no result depends on it. */
static __global__ void __launch_bounds__(1024)
    sort_kernel(const __grid_constant__ struct route_args p)
{
    SHARED_BYTES(shared);
    int *count = (int *)shared, *start = count + MAX_EXPERTS, *tile0 = start + MAX_EXPERTS + 1;
    int n = p.rows * p.used, tid = (int)threadIdx.x, threads = (int)blockDim.x;
    dependency_wait();
    dependency_trigger();
    if (p.route_here)
#pragma unroll 1
        for (int t = warp_id(); t < p.rows; t += threads >> 5) {
            if (p.n_expert <= 128)
                route_row<4>(p, t);
            else
                route_row<MAX_EXPERTS / 32>(p, t);
        }
    for (int i = tid; i < MAX_EXPERTS; i += threads)
        count[i] = 0;
    __syncthreads();
    enum { AT_ONCE = 8 }; /* loads under way */
    for (int i0 = tid; i0 < n; i0 += AT_ONCE * threads) {
        int e[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            e[j] = i0 + j * threads < n ? p.t.chosen[i0 + j * threads] : -1;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (e[j] >= 0)
                atomicAdd(&count[e[j]], 1);
    }
    __syncthreads();
    if (tid < 32)
        route_scan(p, count, start, tile0);
    __syncthreads();
    for (int e = tid; e < p.n_expert; e += threads)
        list_tiles(p, e, count[e], start[e], tile0[e]);
    __syncthreads();
    for (int i0 = tid; i0 < n; i0 += AT_ONCE * threads) {
        int e[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            e[j] = i0 + j * threads < n ? p.t.chosen[i0 + j * threads] : -1;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (e[j] >= 0)
                p.t.pairs[atomicAdd(&start[e[j]], 1)] = i0 + j * threads;
    }
}

/* y[t,:] = sum_k weight[t,k] * out[t,k,:]; a thread per column. */
static __global__ void combine_kernel(const float *out, const float *weight, int used, int width,
                                      float *y)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x), t = (int)blockIdx.y;
    if (k >= width)
        return;
    float v = 0.0f;
    for (int i = 0; i < used; i++)
        v += weight[t * used + i] *
             out[((size_t)t * (size_t)used + (size_t)i) * (size_t)width + (size_t)k];
    y[(size_t)t * (size_t)width + (size_t)k] = v;
}

/* The same from halves times HIDDEN_SCALE; a thread per 4 columns. */
static __global__ void __launch_bounds__(256)
    combine_halves_kernel(const __grid_constant__ struct expert_sum s)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x) * 4, t = (int)blockIdx.y;
    if (k < s.width)
        *(float4 *)(s.y + (size_t)t * (size_t)s.width + (size_t)k) = expert_columns(s, t, k);
}

void large_sum(struct cuda_backend *cu)
{
    const struct expert_sum &s = cu->sum;
    if (s.y)
        cuda_launch(cu, combine_halves_kernel,
                    dim3((unsigned)ceil_div(s.width, 1024), (unsigned)s.rows), 256, 0, LAUNCH_EARLY,
                    s);
    cu->sum.y = NULL;
}

void large_moe(struct cuda_backend *cu, const struct matrix *router, const struct matrix *gate_up,
               const struct matrix *down, const float *x, float *y, int rows)
{
    const struct shape *s = &cu->shape;
    struct norm_in plain = {};
    plain.x = x;
    if (quad_fits(cu, gate_up, down, rows)) {
        small_router(cu, router, &plain, NULL, rows);
        to_halves(cu, x, rows, gate_up->n_in);
        quad_experts(cu, gate_up, down, y, router->n_out, rows);
        return;
    }
    int used = s->n_expert_used, n_expert = router->n_out;
    bool wide =
        rows >= WIDE_MOE_FROM && wide_suits(cu, gate_up, true) && wide_suits(cu, down, false);
    /* How many rows an expert gets on average, doubled, says how wide a block should be. */
    bool mid = is_mid(cu, gate_up, rows) || is_mid(cu, down, rows);
    int spread = rows <= 8 ? rows : 2 * ceil_div(rows * used, n_expert);
    spread = spread > rows ? rows : spread;
    int width = tile_width(gate_up, spread, mid), w2 = tile_width(down, spread, mid);
    if (gate_up->set != SET_K || down->set != SET_K)
        width = mid ? 16 : 64; /* both products walk one work list */
    else
        width = w2 < width ? w2 : width;
    int n_pairs = rows * used;
    auto fits = [&](int by) {
        return rows <= LIST_ROWS &&
               list_fits(cu, gate_up, down, n_pairs, max_tiles(rows, used, n_expert, by), by);
    };
    bool stay = wide && down->n_out % 4 == 0 && down->n_seg == 1 && stay_suits(cu, gate_up, true) &&
                stay_suits(cu, down, false);
    int list_width = fits(16) ? 16 : 8;
    bool listed = fits(list_width);
    width = listed ? list_width
            : stay ? stay_expert_rows(n_pairs, n_expert)
            : wide ? WIDE_ROWS
                   : width;
    struct route_args r = {};
    r.logits = cu->router;
    r.rows = rows;
    r.n_expert = n_expert;
    r.used = used;
    r.width = width;
    r.renormalise = s->norm_topk;
    r.route_here = rows <= 64;
    r.even = wide;
    r.scale = s->expert_scale;
    r.t = route_tables_of(cu);
    r.weight = cu->route_weight;
    if (wide && !r.route_here) {
        int pairs_most = s->max_tokens * used;
        r.t.lists = r.t.places + n_expert + pairs_most / ROUTE_MIN_TILE + 1;
        r.t.done = r.t.lists + n_expert * r.t.room;
    }
    if (listed && rows >= CHOOSE_FROM && choose_experts(cu, router, &r.t, x, rows))
        list_route(cu, &r.t, 0, n_expert, rows, width);
    else {
        bool many = rows >= ROUTER_FROM, one = listed && rows <= LIST_ROUTE_ROWS;
        r.parts = many ? router->n_kt : 1;
        if (many)
            router_rows(cu, router, x, rows);
        else
            small_router(cu, router, &plain, NULL, rows);
        if (one) /* block routes */
            list_route(cu, &r.t, r.parts, n_expert, rows, width);
        else if (!r.route_here)
            cuda_launch(cu, route_kernel, dim3((unsigned)ceil_div(rows, ROUTE_ROWS)),
                        32 * ROUTE_ROWS, (size_t)(3 * MAX_EXPERTS + 1) * 4, LAUNCH_EARLY, r);
        if (!one && !r.t.lists)
            cuda_launch(cu, sort_kernel, dim3(1), 1024, (size_t)(3 * MAX_EXPERTS + 2) * 4,
                        LAUNCH_EARLY, r);
    }
    to_halves(cu, x, rows, gate_up->n_in);
    int tiles = max_tiles(rows, used, n_expert, width);
    bool narrow = listed && down->n_out % 4 == 0;
    if (listed)
        list_experts(cu, gate_up, down, &r.t, n_pairs, tiles, width, narrow);
    else {
        struct gemm_args p = args_in(cu, gate_up, rows);
        p.y_half = cu->half_hidden;
        p.ldy = down->n_kt * TILE_K;
        p.route = r.t;
        p.moe = true;
        p.used = used;
        if (!stay)
            gemm(cu, p, true, mid, wide, width, tiles);
        struct gemm_args q = args_hidden(cu, down, rows);
        q.y = cu->expert_out;
        q.ldy = down->n_out;
        q.route = r.t;
        q.moe = true;
        q.used = used;
        q.sorted_in = true;
        q.narrow = narrow = wide && down->n_out % 4 == 0 && down->n_seg == 1;
        if (stay)
            stay_experts(cu, p, q, width);
        else
            gemm(cu, q, false, mid, wide, width, tiles);
    }
    if (narrow) { /* added up by the norm that follows, or by large_sum */
        struct expert_sum sum = {
            (const uint16_t *)cu->expert_out, cu->route_weight, y, rows, used, down->n_out};
        cu->sum = sum;
        return;
    }
    cuda_launch(cu, combine_kernel, dim3((unsigned)ceil_div(down->n_out, 256), (unsigned)rows), 256,
                0, LAUNCH_EARLY, cu->expert_out, cu->route_weight, used, down->n_out, y);
}
