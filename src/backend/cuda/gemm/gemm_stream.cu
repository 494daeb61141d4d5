/*
 * y = x W^T for batches with much to read: experts of a batched decode, heads.
 * Mapping: a warp owns its output tiles and walks all of k, so warps never meet. The block's
 * activations (8*NT rows of fp16, all of k) are in shared memory, and each warp streams its weight
 * tiles through a ring of its own. Grid: (groups of tiles, tiles of 8*NT rows). PAIR: a warp
 * computes a gate tile, then the up tile of the same hidden units.
 * Prefetch: weights that do not depend on routing are issued before the preceding kernel has
 * finished.
 * Limit: the read of the weights.
 */
#include "backend/cuda/gemm/gemm.cuh"

enum { STREAM_WARPS = 16 };

/* acc += tile x B */
template <int SET, int NT>
DEVICE void tile_rows(const struct seg *s, const uint8_t *tile, const uint8_t *bs, int n_active,
                      float (&acc)[1][NT][4])
{
    if constexpr (SET == SET_K && NT <= 2) {
        if (s->kind == TILE_Q4_K)
            tile_few<TILE_Q4_K, NT>(tile, bs, acc[0]);
        else
            tile_few<TILE_Q6_K, NT>(tile, bs, acc[0]);
    } else {
#pragma unroll 1
        for (int q = 0; q < 4; q++) {
            uint32_t a[1][4][4];
            chunk_decode<SET>(s, tile, q, a[0]);
            chunk_mma<NT>(a, bs, q, n_active, acc);
        }
    }
}

DEVICE void gemm_stream_wait(int stages)
{
    if (stages >= 4)
        copy_async_wait<3>();
    else if (stages == 3)
        copy_async_wait<2>();
    else
        copy_async_wait<1>();
    __syncwarp();
}

template <int SET, int NT, bool PAIR>
static __global__ void __launch_bounds__(STREAM_WARPS * 32, 1)
    gemm_stream_kernel(const __grid_constant__ struct gemm_args p)
{
    const int BN = NT * 8;
    SHARED_BYTES(shared);
    struct gemm_rows rows;
    rows.in = (int *)shared;
    rows.out = rows.in + BN;
    rows.scale = (float *)(rows.out + BN);
    int w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3, n_kt = p.w.n_kt;
    int warps = (int)blockDim.x >> 5, stages = p.stages, half = p.w.n_tiles / 2;
    uint8_t *bs = shared + 3 * BN * 4; /* (n_kt, BN, 512 bytes) */
    uint8_t *ring = bs + n_kt * BN * (TILE_K * 2) + w * stages * p.slot;

    int first = ((int)blockIdx.x * warps + w) * (PAIR ? 1 : p.units_per_block);
    int mine = PAIR ? (first < half ? 2 : 0) : min(p.units_per_block, p.w.n_tiles - first);
    auto tile_of = [&](int n) { return PAIR ? first + n * half : first + n; };
    rows.expert = 0;
    int f_tile = 0, f_kt = 0, f_at = 0;
    auto fetch = [&]() {
        if (f_tile < mine) {
            int tile = tile_of(f_tile);
            const struct seg *s = seg_of(p.w, tile);
            tile_fetch(ring + f_at * p.slot, tile_address(p.w, s, rows.expert, tile, f_kt),
                       s->tile_bytes);
            f_tile += ++f_kt == n_kt;
            f_kt = f_kt == n_kt ? 0 : f_kt;
            f_at = f_at + 1 == stages ? 0 : f_at + 1;
        }
        copy_async_commit();
    };
    if (!p.moe)
#pragma unroll 1
        for (int i = 0; i < stages; i++)
            fetch();
    dependency_trigger();
    dependency_wait();
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, BN)) {
        copy_async_wait<0>();
        return;
    }
    int n_active = (rows.count + 7) / 8;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < BN * n_kt * 32; i += (int)blockDim.x) {
        int piece = i & 31, row = (i >> 5) % BN, kt = (i >> 5) / BN, in = rows.in[row];
        const uint16_t *from =
            p.x + (size_t)(in < 0 ? 0 : in) * (size_t)p.ldx + (size_t)(kt * TILE_K + piece * 8);
        copy_async16_or_zero(bs + (kt * BN + row) * (TILE_K * 2) + ((piece ^ (row & 7)) << 4), from,
                             in >= 0);
    }
    copy_async_commit();
    if (p.moe) {
#pragma unroll 1
        for (int i = 0; i < stages; i++)
            fetch();
        if (stages >= 4)
            copy_async_wait<4>();
        else if (stages == 3)
            copy_async_wait<3>();
        else
            copy_async_wait<2>();
    } else
        copy_async_wait<0>();
    __syncthreads(); /* the activations have landed; from here on warps are independent */

    int at = 0;
    float gate[NT][4];
#pragma unroll 1
    for (int n = 0; n < mine; n++) {
        const struct seg *s = seg_of(p.w, tile_of(n));
        float acc[1][NT][4] = {};
#pragma unroll 1
        for (int kt = 0; kt < n_kt; kt++) {
            gemm_stream_wait(stages);
            tile_rows<SET, NT>(s, ring + at * p.slot, bs + kt * BN * (TILE_K * 2), n_active, acc);
            at = at + 1 == stages ? 0 : at + 1;
            __syncwarp(); /* every lane is done with the entry that is overwritten */
            fetch();
        }
        if (PAIR && n == 0) {
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    gate[i][e] = acc[0][i][e];
            continue;
        }
        int tile_row = (PAIR ? first : tile_of(n) - s->tile0) * TILE_ROWS;
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int col = i * 8 + 2 * c + (e & 1), row = tile_row + g + 8 * (e >> 1);
                if (col >= rows.count)
                    continue;
                float v = acc[0][i][e];
                if (PAIR)
                    gemm_store_pair(p, rows, s, col, row, gate[i][e], v);
                else
                    gemm_store(p, rows, s, col, row, v);
            }
    }
    copy_async_wait<0>();
    if (PAIR && blockIdx.x == 0)
        gemm_zero_tail(p, rows, half);
}

static size_t gemm_stream_shared(const struct gemm_args &p, int nt, int warps)
{
    size_t bn = (size_t)nt * 8;
    return 3 * bn * 4 + (size_t)p.w.n_kt * bn * TILE_K * 2 +
           (size_t)(warps * p.stages) * (size_t)p.slot;
}

/* Split of a product into warps and blocks. */
struct gemm_stream_plan {
    int warps, stages, units, blocks; /* units: tiles of a warp; blocks 0: does not fit */
};
static struct gemm_stream_plan gemm_stream_plan_of(const struct cuda_backend *cu,
                                                   struct gemm_args p, bool pair, int nt)
{
    struct gemm_stream_plan plan = {nt == 1 ? 8 : STREAM_WARPS, 4, 1, 0};
    size_t room = nt == 1 ? cu->shared_per_sm / 2 - 1024 : cu->shared_limit;
    room = room < cu->shared_limit ? room : cu->shared_limit;
    p.slot = p.w.max_tile_bytes;
    for (p.stages = plan.stages; gemm_stream_shared(p, nt, plan.warps) > room;) {
        if (p.stages > 2) {
            p.stages--;
        } else if (plan.warps > 4) {
            plan.warps /= 2;
            p.stages = 4;
        } else {
            return plan;
        }
    }
    plan.stages = p.stages;
    int tiles = pair ? p.w.n_tiles / 2 : p.w.n_tiles;
    if (!pair) {
        int per = ceil_div(tiles, cu->n_sm * 16);
        plan.units = p.moe ? 2 : per > 8 ? 8 : per;
    }
    plan.blocks = ceil_div(tiles, plan.warps * plan.units);
    return plan;
}

/* Tensor-core tiles of rows in a block's tile. */
static int gemm_stream_nt(const struct gemm_args &p, int width)
{
    return p.w.set != SET_K || width == 16 ? 2 : width == 8 ? 1 : 4;
}

template <int SET, int NT, bool PAIR>
static void gemm_stream_launch(struct cuda_backend *cu, struct gemm_args p, int y)
{
    struct gemm_stream_plan plan = gemm_stream_plan_of(cu, p, PAIR, NT);
    p.slot = p.w.max_tile_bytes;
    p.stages = plan.stages;
    p.units_per_block = plan.units;
    cuda_launch(cu, gemm_stream_kernel<SET, NT, PAIR>, dim3((unsigned)plan.blocks, (unsigned)y),
                plan.warps * 32, gemm_stream_shared(p, NT, plan.warps), LAUNCH_EARLY, p);
}

bool gemm_stream_fits(const struct cuda_backend *cu, const struct gemm_args &p, bool pair,
                      int width)
{
    return p.w.set != SET_ALL &&
           gemm_stream_plan_of(cu, p, pair, gemm_stream_nt(p, width)).blocks > 0;
}

int gemm_stream_blocks(const struct cuda_backend *cu, const struct gemm_args &p, bool pair,
                       int width)
{
    return gemm_stream_plan_of(cu, p, pair, gemm_stream_nt(p, width)).blocks;
}

void gemm_stream(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int width, int y)
{
    gemm_variant(p.w, pair, width, [&](auto set, auto nt, auto two) {
        gemm_stream_launch<set.VALUE, nt.VALUE, two.VALUE>(cu, p, y);
    });
}
