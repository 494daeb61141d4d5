/*
 * y = x W^T for up to 32 rows, quantised weights.
 * Mapping: a tensor-core tile has eight columns, so eight rows cost as much as one and every weight
 * is read once for all rows. The warps of a block split k in slices of 256 columns, as in gemv.cu.
 * A warp turns its slice of all rows into fragments (rows.cuh), keeps them in registers, and
 * streams its weight tiles through a ring of its own. The block meets only to add up.
 * Prefetch: everything that does not depend on this step is issued before the preceding kernel has
 * finished.
 * Limit: latency and the read of the weights. On an H200, q, k, v of eight rows take 12.7 us when a
 * norm kernel prepares records, 15.5 us when every block makes fragments from floats.
 * Other formats use gemm_splitk.cu.
 */
#include "backend/cuda/core/cuda.h"
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/rows.cuh"

#include <math.h>

/* Ring stages: four, or two. */
enum { FEW_WARPS = 16, FEW_STAGES = 4, FEW_SHORT = 2 };

DEVICE void load4f(const float *p, float (&v)[4])
{
    float4 a = *(const float4 *)p;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
}

/* Loads this lane's part of a slice: of every 16 columns four. Beyond n there are zeros. */
template <bool FULL> DEVICE void slice_part(float (&v)[16][4], const float *p, int k0, int n)
{
#pragma unroll
    for (int j = 0; j < 16; j++) {
        v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0.0f;
        if (FULL || k0 + j * 16 < n)
            load4f(p + j * 16, v[j]);
    }
}

/* Loads this lane's part of one slice of row g as floats; with a gain, x + d times the gain. For g
 * >= rows it loads some valid row. Returns the largest magnitude over the slice, and in `squares`
 * the sum of squares. FULL: all 256 columns exist. GAIN: the gain is in `gain` already; otherwise it is loaded. */
template <bool FULL, bool GAIN>
DEVICE float slice_load(float (&v)[16][4], float (&gain)[16][4], const struct norm_in &in, int rows,
                        int slice, int n, float &squares)
{
    int g = lane_id() >> 2, k0 = slice * TILE_K + (lane_id() & 3) * 4;
    size_t at = (size_t)(g < rows ? g : 0) * (size_t)n + (size_t)k0;
    float top = 0.0f;
    squares = 0.0f;
    slice_part<FULL>(v, in.x + at, k0, n);
    if (in.gain) {
        if (in.d) {
            float d[16][4];
            slice_part<FULL>(d, in.d + at, k0, n);
#pragma unroll
            for (int j = 0; j < 64; j++)
                v[j / 4][j % 4] += d[j / 4][j % 4];
        }
        if (!GAIN)
            slice_part<FULL>(gain, in.gain + k0, k0, n);
#pragma unroll
        for (int j = 0; j < 64; j++) {
            squares += v[j / 4][j % 4] * v[j / 4][j % 4];
            v[j / 4][j % 4] *= gain[j / 4][j % 4];
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
template <bool GAIN>
DEVICE float slice_load_any(float (&v)[16][4], float (&gain)[16][4], const struct norm_in &in,
                            int rows, int slice, int n, float &squares)
{
    return (slice + 1) * TILE_K <= n
               ? slice_load<true, GAIN>(v, gain, in, rows, slice, n, squares)
               : slice_load<false, GAIN>(v, gain, in, rows, slice, n, squares);
}

/* Converts the values to fp16, times a power of two that maps `top`, the row's largest magnitude,
 * to about 1024. Missing rows become zeros. Returns the inverse of the scale. */
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

/* y = x W^T (+ bias) for 8 NT rows, given as floats or as records. Grid: (groups of tiles, groups
 * of rows). FLOATS: one group of eight rows, with an optional norm fused in. For short k, two teams
 * of warps alternate tiles. NARROW: k has at most half as many slices, so that a warp has registers
 * for the norm's gain before the wait. */
struct gemm_few_args {
    struct matrix w;
    struct norm_in in;                      /* (rows, n_in) */
    const uint8_t *x;                       /* (rows, n_kt) records */
    const float *x_scale;                   /* (rows) inverse of a row's scale */
    float *y;                               /* (rows, n_out) */
    int rows, tiles_per_block, batch, slot; /* batch: tiles between two reductions */
};

template <int KIND, int NT, bool FLOATS, int STAGES, bool NARROW>
static __global__ void __launch_bounds__(NARROW ? FEW_WARPS * 16 : FEW_WARPS * 32)
    gemm_few_kernel(const __grid_constant__ struct gemm_few_args p)
{
    SHARED_BYTES(shared);
    int slices = p.w.n_kt, warps = (int)blockDim.x >> 5, teams = warps / slices;
    int team = warp_id() / slices, w = warp_id() - team * slices, lane = lane_id(), g = lane >> 2;
    int one_ring = ring_bytes(STAGES, p.slot), stride = p.batch * NT * SUM_TILE;
    float *sums = (float *)(shared + warps * one_ring); /* (2, slices, batch, NT) tiles */
    float *squares = sums + 2 * slices * stride;        /* (slices, 8) */
    int first = (int)blockIdx.x * p.tiles_per_block, row0 = (int)blockIdx.y * 8 * NT;
    int end = min(first + p.tiles_per_block, p.w.n_tiles), f_tile = first + team;
    int rows = min(8 * NT, p.rows - row0);
    struct tile_ring<STAGES> ring;
    ring_init(ring, shared + warp_id() * one_ring, p.slot);
    auto fetch = [&]() {
        const struct seg *s = seg_of(p.w, f_tile);
        ring_fetch(ring, tile_address(p.w, s, 0, f_tile, w), s->tile_bytes, f_tile < end);
        f_tile += teams;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++)
        fetch();
    dependency_trigger();
    float gain[16][4];
    if (FLOATS && NARROW && p.in.gain) {
        int k0 = w * TILE_K + (lane & 3) * 4;
        slice_part<false>(gain, p.in.gain + k0, k0, p.w.n_in);
    }
    dependency_wait();
    struct row_frag x[NT];
    float undo[NT][2];
    if constexpr (FLOATS) {
        float v[16][4], square;
        float top = slice_load_any<NARROW>(v, gain, p.in, rows, w, p.w.n_in, square);
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
            frag_tile<KIND>(kind, ring_wait(ring), x, acc);
            ring_release(ring);
            fetch();
#pragma unroll
            for (int i = 0; i < NT; i++)
                store_tile(to + w * stride + (b * NT + i) * SUM_TILE, acc[i], undo[i]);
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
    if (FLOATS && blockIdx.x == gridDim.x - 1 && p.in.x_out) /* the last block has the least work */
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

static size_t gemm_few_shared(int slices, int teams, int nt, int batch, int slot, int stages)
{
    return (size_t)slices *
           (size_t)(teams * ring_bytes(stages, slot) + 2 * batch * nt * SUM_TILE * 4 + 32);
}

/* Whether nt groups of rows fit, with rings of `stages` stages. */
static bool gemm_few_suits(const struct cuda_backend *cu, const struct matrix *w, int nt,
                           int stages)
{
    return w->set <= SET_CODES && w->n_in % 8 == 0 && w->n_kt <= FEW_WARPS &&
           gemm_few_shared(w->n_kt, 1, nt, 1, w->max_tile_bytes, stages) <= cu->shared_limit;
}

/* For more than eight rows there are kernels of one format each: without a switch they spill less.
 * The instance with short rings exists for Q8_0 only, which is used beside experts of few bits and
 * whose tiles are too large for four stages. */
template <int NT, bool FLOATS, int STAGES> static auto gemm_few_kernel_of(const struct matrix &w)
{
    auto kernel = gemm_few_kernel<ANY_CODES, NT, FLOATS, STAGES, false>;
    if constexpr (STAGES == FEW_STAGES)
        if (w.set == SET_K)
            kernel = gemm_few_kernel<ANY_K, NT, FLOATS, STAGES, false>;
    if constexpr (FLOATS)
        if (w.n_kt <= FEW_WARPS / 2)
            kernel = w.set == SET_K ? gemm_few_kernel<ANY_K, NT, FLOATS, STAGES, true>
                                    : gemm_few_kernel<ANY_CODES, NT, FLOATS, STAGES, true>;
    if constexpr (NT > 1)
        if (w.set == SET_CODES)
            codes_set(&w, [&](auto k) {
                if constexpr (STAGES == FEW_STAGES || k.VALUE == TILE_Q8_0)
                    kernel = gemm_few_kernel<k.VALUE, NT, FLOATS, STAGES, false>;
            });
    return kernel;
}

template <int NT, bool FLOATS, int STAGES>
static void gemm_few_launch(struct cuda_backend *cu, struct gemm_few_args p)
{
    int slices = p.w.n_kt, groups = ceil_div(p.rows, 8 * NT);
    int per = ceil_div(p.w.n_tiles * groups, cu->n_sm); /* one block per SM */
    int teams = NT > 1 && STAGES == FEW_STAGES && per > 1 && 2 * slices <= FEW_WARPS ? 2 : 1;
    p.slot = p.w.max_tile_bytes;
    p.tiles_per_block = per;
    auto shared = [&]() { return gemm_few_shared(slices, teams, NT, p.batch, p.slot, STAGES); };
    /* With one team, leave room for another block, unless short rings were chosen for lack of
     * room. */
    bool all = teams > 1 || STAGES != FEW_STAGES;
    size_t most = all ? cu->shared_limit : cu->shared_per_sm / 2 - 1024;
    p.batch = per < 4 ? per : 4;
    while (p.batch > teams && shared() > most)
        p.batch--;
    if (p.batch < per) /* every team gets the same number of batches, except the last */
        p.batch -= p.batch % teams;
    if (shared() > cu->shared_limit)
        teams = p.batch = 1;
    dim3 grid((unsigned)ceil_div(p.w.n_tiles, per), (unsigned)groups);
    cuda_launch(cu, gemm_few_kernel_of<NT, FLOATS, STAGES>(p.w), grid, teams * slices * 32,
                shared(), LAUNCH_EARLY, p);
}

bool gemm_few_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows <= FEW_ROWS && gemm_few_suits(cu, w, 1, FEW_STAGES);
}

void gemm_few(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *y,
              int rows)
{
    struct gemm_few_args p = {};
    p.w = *w;
    p.in = *in;
    p.y = y;
    p.rows = rows;
    gemm_few_launch<1, true, FEW_STAGES>(cu, p);
}

static struct gemm_few_args gemm_few_args_of(const struct cuda_backend *cu, const struct matrix *w,
                                             float *y, int rows)
{
    struct gemm_few_args p = {};
    p.w = *w;
    p.x = cu->forms.records;
    p.x_scale = cu->forms.scale;
    p.y = y;
    p.rows = rows;
    return p;
}

/* Groups of eight rows in a block. With two, every weight becomes a fragment once for sixteen rows. */
static int gemm_few_groups(int rows)
{
    return rows <= 8 ? 1 : 2;
}

/* Rings of two stages, where four do not fit. */
static bool gemm_few_is_short(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return gemm_few_groups(rows) == 2 && w->set == SET_CODES &&
           !gemm_few_suits(cu, w, 2, FEW_STAGES);
}

bool gemm_few_records_fit(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows * w->n_kt <= cu->forms.n_records &&
           gemm_few_suits(cu, w, gemm_few_groups(rows),
                          gemm_few_is_short(cu, w, rows) ? FEW_SHORT : FEW_STAGES);
}

void gemm_few_records(struct cuda_backend *cu, const struct matrix *w, float *y, int rows)
{
    struct gemm_few_args p = gemm_few_args_of(cu, w, y, rows);
    if (gemm_few_groups(rows) == 1)
        gemm_few_launch<1, false, FEW_STAGES>(cu, p);
    else if (gemm_few_is_short(cu, w, rows))
        gemm_few_launch<2, false, FEW_SHORT>(cu, p);
    else
        gemm_few_launch<2, false, FEW_STAGES>(cu, p);
}
