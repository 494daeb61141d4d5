/*
 * y = x W^T for a batched decode on Hopper (sm_90a): up to PANEL_ROWS rows, K-quants, matrices so
 * short that latency matters more than bytes.
 * Mapping: one wave of blocks. A block computes 64 output rows per warpgroup over one k split. The
 * k splits of the same output rows form a cluster.
 * Copies: a block issues all its copies at once. Weights are issued before the preceding kernel has
 * finished. Activations arrive as panels (64 columns of all rows, in the order wgmma reads shared
 * memory; written by the kernel that pick.cu chose), one copy per panel.
 * Reduction: every block of the cluster sums some of the columns. The other blocks write those
 * partial sums into its shared memory or, if there is no room beside the activations, it reads
 * theirs.
 * Limit: start-up and the cluster's reduction. On an H200, 128 rows take 12 to 14 us: 8 us of work
 * per SM and 4 us to start, where the weights' bytes alone would take 1.5 us.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum {
    PANEL_ALIGN = 1024,
    PANEL_GROUPS = 4 /* most warpgroups of a block */,
    PANEL_SPLITS = 8,
    PANEL_REMOTE_N = 32 /* widest tile whose partial sums are written remotely */
};

struct gemm_cluster_args {
    struct matrix w;
    const uint8_t *x;     /* (row tiles, n_kt * 4, N, 128 bytes) */
    const float *x_scale; /* (rows) inverse of a row's scale */
    float *y;             /* (rows, n_out) */
    int rows, kt_per, pieces;
    int sums; /* where others write partial sums; 0: sums are read remotely */
};

/* Floats; padded against bank conflicts. */
static __host__ __device__ int gemm_cluster_stride(int groups)
{
    return groups * 64 + 4;
}

/* acc += 16 weight rows per warp x N token rows. bars[c] completes when panel c of the activations
 * has landed. */
template <int KIND, int N>
DEVICE void gemm_cluster_loop(const uint8_t *tiles, const uint8_t *x, uint64_t *bars, int n_kt,
                              float (&acc)[N / 2])
{
    int lane = lane_id(), chunks = n_kt * 4;
    format<KIND> w;
    uint32_t a[4][4];
    w.fetch(tiles, 0, lane);
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        w.ready();
#if BULK_COPIES
        bulk_wait(bars + c, 0);
#else
        (void)bars;
#endif
        uint64_t desc = wgmma_desc(x + c * (N * 128));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<3>(); /* a[j] of the previous chunk has been read */
            w.template frag<op_wgmma>(j, a[j]);
            wgmma_fence();
            wgmma<N>(acc, a[j], desc + 2 * (uint64_t)j);
            wgmma_commit();
        }
        if (c + 1 < chunks)
            w.fetch(tiles + ((c + 1) >> 2) * format<KIND>::BYTES, (c + 1) & 3, lane);
    }
    wgmma_wait<0>();
}

/* Grid: (blocks of 64 output rows per warpgroup x k splits; tiles of N rows). */
template <int N>
static __global__ void __launch_bounds__(PANEL_GROUPS * 128)
    gemm_cluster_kernel(const __grid_constant__ struct gemm_cluster_args p)
{
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, PANEL_ALIGN);
    int tid = (int)threadIdx.x, threads = (int)blockDim.x, w = warp_id(), warps = threads >> 5;
    int block = (int)blockIdx.x / p.pieces, piece = (int)blockIdx.x - block * p.pieces;
    int kt0 = piece * p.kt_per, n_kt = min(p.kt_per, p.w.n_kt - kt0);
    int row0 = (int)blockIdx.y * N, count = min(N, p.rows - row0), slot = p.w.max_tile_bytes;
    uint8_t *tiles = shared + 4 * p.kt_per * (N * 128); /* (warps, kt_per, slot) */
    uint64_t *bars = (uint64_t *)(tiles + warps * p.kt_per * slot);
    uint8_t *mine = tiles + w * p.kt_per * slot;
    const uint8_t *x =
        p.x + ((size_t)blockIdx.y * (size_t)p.w.n_kt + (size_t)kt0) * (size_t)(4 * N * 128);
    /* Tiles past the end are computed and discarded. */
    int tile = min(block * warps + w, p.w.n_tiles - 1);
    const struct seg *s = seg_of(p.w, tile);
    const uint8_t *from = tile_address(p.w, s, 0, tile, kt0);
    int tile_bytes = s->tile_bytes;
    if (p.sums)
        cluster_arrive(); /* this block has started */
#if BULK_COPIES
    uint64_t *landed = bars + 4 * p.kt_per + w; /* barrier of this warp's weights */
    if (lane_id() == 0) {
        bulk_init(landed);
        bulk_copy(mine, from, n_kt * tile_bytes, landed);
    }
    if (tid == 0)
        for (int i = 0; i < 4 * n_kt; i++)
            bulk_init(bars + i);
    dependency_trigger();
    __syncthreads();
    dependency_wait();
    if (tid == 0)
        for (int i = 0; i < 4 * n_kt; i++)
            bulk_copy(shared + i * (N * 128), x + i * (N * 128), N * 128, bars + i);
    bulk_wait(landed, 0);
#else
    for (int i = lane_id() * 16; i < n_kt * tile_bytes; i += 512)
        copy_async16(mine + i, from + i);
    dependency_trigger();
    dependency_wait();
    for (int i = tid * 16; i < 4 * n_kt * N * 128; i += threads * 16)
        copy_async16(shared + i, x + i);
    copy_async_commit();
    copy_async_wait<0>();
    wgmma_publish();
    __syncthreads();
#endif
    float acc[N / 2] = {};
    wgmma_use(acc);
    if (s->kind == TILE_Q4_K)
        gemm_cluster_loop<TILE_Q4_K, N>(mine, shared, bars, n_kt, acc);
    else
        gemm_cluster_loop<TILE_Q6_K, N>(mine, shared, bars, n_kt, acc);
    wgmma_use(acc);
    int stride = gemm_cluster_stride(warps >> 2), per = (count + p.pieces - 1) / p.pieces;
    float *sums = (float *)(shared + p.sums); /* (N, stride), or (pieces, per, stride) */
    if (p.sums) {
        int lane = lane_id(), row = w * TILE_ROWS + (lane >> 2), col = 2 * (lane & 3);
        int whose = 0, from_col = 0;
        cluster_wait(); /* all blocks of the cluster have started */
#pragma unroll
        for (int n = 0; n < N / 4; n++) {
            int at = col + (n >> 1) * 8 + (n & 1);
            while (at >= from_col + per && from_col + per < count) {
                whose++;
                from_col += per;
            }
            float *to = cluster_at(sums + (piece * per + at - from_col) * stride + row, whose);
            if (at < count) {
                to[0] = acc[4 * (n >> 1) + (n & 1)];
                to[8] = acc[4 * (n >> 1) + 2 + (n & 1)];
            }
        }
    } else {
        __syncthreads(); /* activations and weights are no longer read */
        int lane = lane_id();
        float *to = sums + 2 * (lane & 3) * stride + w * TILE_ROWS + (lane >> 2);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[(n * 8 + (i & 1)) * stride + (i >> 1) * 8] = acc[4 * n + i];
        }
    }
    cluster_arrive();
    cluster_wait();
    /* A thread reduces four output rows, over the columns assigned to this block. */
    int quads = threads >> 3, quad = tid % quads, out_tile = block * warps + (quad >> 2);
    s = seg_of(p.w, min(out_tile, p.w.n_tiles - 1));
    int row = (out_tile - s->tile0) * TILE_ROWS + (quad & 3) * 4;
    int left = out_tile < p.w.n_tiles ? s->rows - row : 0, at = s->row0 + row;
    int end = min(count, (piece + 1) * per);
#pragma unroll 2
    for (int col = piece * per + tid / quads; col < end; col += 8) {
        float4 part[PANEL_SPLITS], v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float *here = sums + (p.sums ? col - piece * per : col) * stride + quad * 4;
#pragma unroll
        for (int i = 0; i < PANEL_SPLITS; i++) /* issue all loads at once */
            if (i < p.pieces)
                part[i] = *(const float4 *)(p.sums ? here + i * per * stride : cluster_at(here, i));
#pragma unroll
        for (int i = 0; i < PANEL_SPLITS; i++)
            if (i < p.pieces)
                v.x += part[i].x, v.y += part[i].y, v.z += part[i].z, v.w += part[i].w;
        float scale = p.x_scale[row0 + col],
              r[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
        float *y = p.y + (size_t)(row0 + col) * (size_t)p.w.n_out + (size_t)at;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (p.w.bias && i < left)
                r[i] += p.w.bias[at + i];
        if (left >= 4 && !((p.w.n_out | at) & 3))
            *(float4 *)y = make_float4(r[0], r[1], r[2], r[3]);
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left)
                    y[i] = r[i];
    }
    if (p.sums)
        return;
    cluster_arrive(); /* no block exits while its sums are being read */
    cluster_wait();
}

/* Split of a product into blocks and k splits. */
struct gemm_cluster_cut {
    int groups, kt_per; /* warpgroups of a block, k tiles of a k split */
    size_t shared;
};

/* Bytes of activations, weights and their barriers. */
static size_t gemm_cluster_input_bytes(const struct matrix *w, int n, int groups, int kt_per)
{
    return (size_t)kt_per * (size_t)(n * 512 + 4 * groups * w->max_tile_bytes) +
           (size_t)(4 * kt_per + 4 * groups) * 8;
}
static size_t gemm_cluster_sums(int n, int groups, int pieces)
{
    return (size_t)(ceil_div(n, pieces) * pieces * gemm_cluster_stride(groups)) * sizeof(float);
}
static size_t gemm_cluster_shared(const struct matrix *w, int n, int groups, int kt_per)
{
    size_t in = gemm_cluster_input_bytes(w, n, groups, kt_per),
           sums = gemm_cluster_sums(n, groups, 1);
    return PANEL_ALIGN + (in > sums ? in : sums);
}

/* Finds the split whose busiest SM moves the fewest bytes: activations and weights in, partial sums
 * out and in. Weights count more, because they come from memory. */
static bool gemm_cluster_cut_of(const struct cuda_backend *cu, const struct matrix *w, int rows,
                                struct gemm_cluster_cut *best)
{
    int n = gemm_cluster_width(rows), most = cu->can.cluster_attention ? PANEL_SPLITS : 1;
    double least = 0;
    for (int groups = 1; groups <= PANEL_GROUPS; groups++)
        for (int pieces = 1; pieces <= most && pieces <= w->n_kt; pieces++) {
            int kt_per = ceil_div(w->n_kt, pieces);
            if (ceil_div(w->n_kt, kt_per) != pieces)
                continue;
            size_t shared = gemm_cluster_shared(w, n, groups, kt_per);
            if (shared > cu->shared_limit)
                continue;
            int blocks = ceil_div(w->n_tiles, 4 * groups) * pieces * ceil_div(rows, n);
            double sums = pieces > 1 ? 1.5 * 256 * groups * n : 0;
            double bytes = kt_per * (n * 512 + 5.2 * groups * w->max_tile_bytes) + sums;
            double cost = bytes * ceil_div(blocks / pieces, cu->can.clusters_of[pieces - 1]);
            if (least > 0 && cost >= least)
                continue;
            least = cost;
            best->groups = groups;
            best->kt_per = kt_per;
            best->shared = shared;
        }
    return least > 0;
}

int gemm_cluster_width(int rows)
{
    return rows <= 32 ? 32 : rows <= 64 ? 64 : rows <= 96 ? 96 : 128;
}

size_t gemm_cluster_bytes(const struct cuda_backend *cu)
{
    const struct model_shape *s = &cu->shape;
    int rows = s->max_tokens < PANEL_ROWS ? s->max_tokens : PANEL_ROWS;
    int width = s->heads > s->n_embd ? s->heads : s->n_embd;
    return cu->can.wgmma ? align_up((size_t)rows, 128) * align_up((size_t)width, TILE_K) * 2 : 0;
}

bool gemm_cluster_fits(const struct cuda_backend *cu, int rows, int padded)
{
    size_t all =
        align_up((size_t)rows, (size_t)gemm_cluster_width(rows)); /* rows including padding */
    return cu->can.wgmma && rows <= PANEL_ROWS &&
           all * (size_t)padded * 2 <= gemm_cluster_bytes(cu);
}

bool gemm_cluster_suits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    struct gemm_cluster_cut cut = {};
    for (int i = 1; i < w->n_seg; i++) /* all warps of a warpgroup need tiles of one kind */
        if (w->seg[i].kind != w->seg[0].kind && w->seg[i].tile0 % 4)
            return false;
    return w->set == SET_K && gemm_cluster_fits(cu, rows, w->n_kt * TILE_K) &&
           gemm_cluster_cut_of(cu, w, rows, &cut);
}

void gemm_cluster(struct cuda_backend *cu, const struct matrix *w, float *y, int rows)
{
    struct gemm_cluster_cut cut = {};
    gemm_cluster_cut_of(cu, w, rows, &cut);
    struct gemm_cluster_args p = {};
    p.w = *w;
    p.x = cu->forms.panels;
    p.x_scale = cu->forms.scale;
    p.y = y;
    p.rows = rows;
    p.kt_per = cut.kt_per;
    p.pieces = ceil_div(w->n_kt, cut.kt_per);
    int n = gemm_cluster_width(rows);
    size_t in = align_up(gemm_cluster_input_bytes(w, n, cut.groups, cut.kt_per), 16);
    size_t apart = PANEL_ALIGN + in + gemm_cluster_sums(n, cut.groups, p.pieces);
    if (n <= PANEL_REMOTE_N && p.pieces > 1 && apart <= cu->shared_limit) {
        p.sums = (int)in;
        cut.shared = apart;
    }
    dim3 grid((unsigned)(ceil_div(w->n_tiles, 4 * cut.groups) * p.pieces),
              (unsigned)ceil_div(rows, n));
    auto kernel = n == 32   ? gemm_cluster_kernel<32>
                  : n == 64 ? gemm_cluster_kernel<64>
                  : n == 96 ? gemm_cluster_kernel<96>
                            : gemm_cluster_kernel<128>;
    cuda_launch(cu, kernel, grid, cut.groups * 128, cut.shared,
                LAUNCH_EARLY + p.pieces * LAUNCH_CLUSTER, p);
}

/* Queries how many clusters of each size can run at once. There are fewer than the SM count
 * suggests, because a cluster must fit in one GPC. */
void gemm_cluster_prepare(struct cuda_backend *cu)
{
    for (int i = 0; i < PANEL_SPLITS; i++)
        cu->can.clusters_of[i] = cu->n_sm > i ? cu->n_sm / (i + 1) : 1;
#ifndef STEEL_CUDA_SIM
    if (!cu->can.wgmma || !cu->can.cluster_attention)
        return;
    cuda_set_attributes(cu, (const void *)gemm_cluster_kernel<128>);
    for (int i = 1; i < PANEL_SPLITS; i++) {
        cudaLaunchConfig_t cfg = {};
        cudaLaunchAttribute attr = {};
        attr.id = cudaLaunchAttributeClusterDimension;
        attr.val.clusterDim.x = (unsigned)(i + 1);
        attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
        cfg.gridDim = dim3((unsigned)(i + 1));
        cfg.blockDim = dim3(256);
        cfg.dynamicSmemBytes = cu->shared_limit;
        cfg.attrs = &attr;
        cfg.numAttrs = 1;
        int n = 0;
        if (cudaOccupancyMaxActiveClusters(&n, gemm_cluster_kernel<128>, &cfg) != cudaSuccess)
            cudaGetLastError();
        cu->can.clusters_of[i] = n > 0 ? n : 1;
    }
#endif
}
