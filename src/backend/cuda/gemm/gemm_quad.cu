/*
 * y = [norm](x) W^T (+ bias) for 2 to 4 rows, quantised weights.
 * Mapping: as in moe_gemv.cu the warps of a block split k, a norm is fused in, and the first
 * weights are issued before the wait for the preceding kernel. Tiles go to the tensor core with
 * four rows at a time (quad.cuh).
 * Limit: latency, then the read of the weights.
 */
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/quad.cuh"

enum { LINEAR_WARPS = 16, LINEAR_BATCH = 4 };

struct gemm_quad_args {
    struct matrix w;
    struct norm_in in;                      /* (rows, n_in) */
    float *y;                               /* (rows, n_out) */
    int rows, tiles_per_block, batch, slot; /* batch: tiles between two reductions */
};

template <int KIND, bool NORM, int STAGES>
static __global__ void __launch_bounds__(LINEAR_WARPS * 32)
    gemm_quad_kernel(const __grid_constant__ struct gemm_quad_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), n_in = p.w.n_in;
    int one_ring = ring_bytes(STAGES, p.slot);
    float *sums = (float *)(shared + warps * one_ring); /* (2, batch, warps, 64) */
    float *squares = sums + 2 * p.batch * warps * 64;   /* (warps, 4) */
    int first = (int)blockIdx.x * p.tiles_per_block;
    int end = min(first + p.tiles_per_block, p.w.n_tiles), f_tile = first;
    struct tile_ring<STAGES> ring;
    ring_init(ring, shared + w * one_ring, p.slot);
    const uint8_t *f_at = NULL; /* next tile to copy; tiles of a segment are contiguous */
    int f_bytes = 0, f_end = 0;
    auto fetch = [&]() {
        if (f_tile < end && f_tile >= f_end) {
            const struct seg *s = seg_of(p.w, f_tile);
            f_at = tile_address(p.w, s, 0, f_tile, w);
            f_bytes = s->tile_bytes;
            f_end = s->tile0 + s->n_tiles;
        }
        ring_fetch(ring, f_at, f_bytes, f_tile < end);
        f_at += p.w.n_kt * f_bytes;
        f_tile++;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++)
        fetch();
    dependency_trigger();

    /* Looks up, before the wait, which tiles of a batch are Q6_K and where sum number i goes. */
    auto kinds = [&](int tile) {
        return __ballot_sync(FULL_WARP, lane < min(p.batch, end - tile) &&
                                            seg_of(p.w, tile + lane)->kind == TILE_Q6_K);
    };
    auto place = [&](int tile, int i, float *bias) {
        int b = (i >> 4) / p.rows, col = (i >> 4) - b * p.rows;
        *bias = 0.0f;
        if (tile + b >= end || b >= p.batch)
            return (float *)NULL;
        const struct seg *s = seg_of(p.w, tile + b);
        int out = (tile + b - s->tile0) * TILE_ROWS + (i & 15);
        if (out >= s->rows)
            return (float *)NULL;
        out += s->row0;
        if (p.w.bias)
            *bias = p.w.bias[out];
        return p.y + (size_t)col * (size_t)p.w.n_out + (size_t)out;
    };
    float bias, *to = place(first, (int)threadIdx.x, &bias);
    uint32_t six = kinds(first);
    int row = lane >> 3;
    size_t at = (size_t)(row < p.rows ? row : 0) * (size_t)n_in;
    float v[8][4], d[8][4], gain[8][4], square = 0.0f;
    if (NORM)
        quad_load(gain, p.in.gain, w, n_in);
    mark(mk, 2);
    dependency_wait();
    mark(mk, 3);
    quad_load(v, p.in.x + at, w, n_in);
    if (NORM) {
        if (p.in.d) {
            quad_load(d, p.in.d + at, w, n_in);
#pragma unroll
            for (int j = 0; j < 32; j++)
                v[j / 4][j % 4] += d[j / 4][j % 4];
        }
        if (blockIdx.x == gridDim.x - 1 && p.in.x_out && row < p.rows) {
            int k = quad_column(w);
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (k + j * 32 < n_in)
                    *(float4 *)(p.in.x_out + at + k + j * 32) =
                        make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
        }
#pragma unroll
        for (int j = 0; j < 32; j++) {
            square += v[j / 4][j % 4] * v[j / 4][j % 4];
            v[j / 4][j % 4] *= gain[j / 4][j % 4];
        }
    }
    if (NORM) {
#pragma unroll
        for (int i = 1; i < 8; i <<= 1)
            square += __shfl_xor_sync(FULL_WARP, square, i);
        if (!(lane & 7))
            squares[w * 4 + row] = square;
    }
    struct row_frag x;
    float undo = quad_pack(x, v);
    mark(mk, 4);
    int odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end; tile += p.batch, odd ^= 1) {
        int n = min(p.batch, end - tile);
        float *from = sums + odd * p.batch * warps * 64;
#pragma unroll 1
        for (int b = 0; b < n; b++) {
            float acc[2] = {}, *mine = from + (b * warps + w) * 64 + lane;
            const uint8_t *there = ring_wait(ring);
            if (tile + b == first)
                mark(mk, 5);
            if constexpr (KIND == ANY_K)
                quad_tile<KIND>(six >> b & 1 ? TILE_Q6_K : TILE_Q4_K, there, x, acc);
            else
                quad_tile<KIND>(seg_of(p.w, tile + b)->kind, there, x, acc);
            ring_release(ring);
            fetch();
            mine[0] = acc[0] * undo;
            mine[32] = acc[1] * undo;
        }
        mark(mk, 6);
        __syncthreads();
        mark(mk, 7);
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < n * p.rows * TILE_ROWS; i += (int)blockDim.x) {
            int b = (i >> 4) / p.rows, col = (i >> 4) - b * p.rows;
            const float *share = from + b * warps * 64 + (i & 15) * 4 + col;
            float sum = 0.0f, y = 0.0f;
            if (i != (int)threadIdx.x)
                to = place(tile, i, &bias);
#pragma unroll 8
            for (int j = 0; j < warps; j++)
                y += share[j * 64];
            if (NORM) {
#pragma unroll 8
                for (int j = 0; j < warps; j++)
                    sum += squares[j * 4 + col];
                y *= rsqrtf(sum / (float)n_in + p.in.eps);
            }
            if (to)
                *to = y + bias;
        }
        if (tile + p.batch < end) {
            to = place(tile + p.batch, (int)threadIdx.x, &bias);
            six = kinds(tile + p.batch);
        }
    }
    copy_async_wait<0>();
    marks_end(mk, 11);
}

/* Rings have four stages. Wide rows of Q8_0, whose tiles are too large for four, have a kernel of their own with three. */
enum { QUAD_STAGES = 4, QUAD_SHORT = 3 };

struct gemm_quad_plan {
    int per, batch, stages; /* stages 0: does not fit */
    size_t shared;
};
static struct gemm_quad_plan gemm_quad_plan_of(const struct cuda_backend *cu,
                                               const struct matrix *w)
{
    struct gemm_quad_plan p;
    p.per = ceil_div(w->n_tiles, cu->n_sm); /* one block per SM: each converts the rows once */
    p.batch = p.per < LINEAR_BATCH ? p.per : LINEAR_BATCH;
    for (p.stages = QUAD_STAGES; p.stages >= QUAD_SHORT; p.stages--) {
        p.shared = (size_t)w->n_kt *
                   (size_t)(ring_bytes(p.stages, w->max_tile_bytes) + 2 * p.batch * 64 * 4 + 16);
        if (p.shared <= cu->shared_limit)
            break;
    }
    bool is_short = p.stages == QUAD_SHORT && matrix_kind(w) == TILE_Q8_0;
    if (p.stages < QUAD_STAGES && !is_short)
        p.stages = 0;
    return p;
}

bool gemm_quad_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows >= 2 && rows <= 4 && w->set <= SET_CODES && w->n_in % 8 == 0 &&
           w->n_kt <= LINEAR_WARPS && gemm_quad_plan_of(cu, w).stages;
}

template <bool NORM> static auto gemm_quad_kernel_of(const struct matrix &w, int stages)
{
    auto kernel = gemm_quad_kernel<ANY_CODES, NORM, QUAD_STAGES>;
    if (w.set == SET_K)
        kernel = gemm_quad_kernel<ANY_K, NORM, QUAD_STAGES>;
    if (stages == QUAD_SHORT)
        kernel = gemm_quad_kernel<TILE_Q8_0, NORM, QUAD_SHORT>;
    return kernel;
}

void gemm_quad(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *y,
               int rows)
{
    struct gemm_quad_plan plan = gemm_quad_plan_of(cu, w);
    struct gemm_quad_args p = {*w, *in, y, rows, plan.per, plan.batch, w->max_tile_bytes};
    dim3 grid((unsigned)ceil_div(w->n_tiles, plan.per));
    cuda_launch(cu,
                in->gain ? gemm_quad_kernel_of<true>(*w, plan.stages)
                         : gemm_quad_kernel_of<false>(*w, plan.stages),
                grid, w->n_kt * 32, plan.shared, LAUNCH_EARLY, p);
}
