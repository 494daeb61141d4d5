/*
 * y = x W^T for 2 to about 200 rows: batched decode, still limited by the read of the weights.
 * Mapping: as for one row, the warps of a block split k in slices of 256 columns and meet to add
 * up. A unit is two tiles of 16 output rows (PAIR: gate and up of the same hidden units). Grid:
 * (groups of units, tiles of 8*NT rows).
 * Every warp keeps its slice of the activations (8*NT rows of fp16) in shared memory and streams
 * the weight tiles of its slice through a ring. If k has more slices than the block has warps, the
 * activations go through the ring with the weights.
 */
#include "backend/cuda/gemm/gemm.cuh"

enum { SPLITK_WARPS = 16, SUM_ROW = 20 /* 16 and padding */ };

template <int NT>
DEVICE void fetch_rows(uint8_t *to, const struct gemm_args &p, const int *rows_in, int n_active,
                       int slice)
{
    int piece = lane_id();
#pragma unroll 4
    for (int row = 0; row < n_active * 8; row++) {
        int in = rows_in[row];
        const uint16_t *from =
            p.x + (size_t)(in < 0 ? 0 : in) * (size_t)p.ldx + (size_t)(slice * TILE_K + piece * 8);
        copy_async16_or_zero(to + row * (TILE_K * 2) + ((piece ^ (row & 7)) << 4), from, in >= 0);
    }
}

/* Tile i of a unit. An odd last tile is computed twice and written once. */
template <bool PAIR> DEVICE int gemm_splitk_tile(const struct matrix &w, int unit, int i)
{
    return PAIR ? unit + i * (w.n_tiles / 2) : min(2 * unit + i, w.n_tiles - 1);
}

/* Adds up the warps' sums of the units from `round` on and writes them. One thread per output, rows
 * fastest. */
template <int NT, bool PAIR>
DEVICE void gemm_splitk_write(const struct gemm_args &p, const struct gemm_rows &rows,
                              const float *sums, int sum_stride, int round, int end)
{
    const int BN = NT * 8;
    int per_group = (PAIR ? 1 : 2) * rows.count * TILE_ROWS;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.groups * per_group; i += (int)blockDim.x) {
        int in_group = i / per_group, j = i - in_group * per_group;
        int r = j & 15, col = j >> 4, tile = 0;
        if (!PAIR) {
            tile = col >= rows.count;
            col -= tile ? rows.count : 0;
        }
        int u = round + in_group, t = gemm_splitk_tile<PAIR>(p.w, u, tile);
        if (u >= end || (!PAIR && 2 * u + tile >= p.w.n_tiles))
            continue;
        const struct seg *s = seg_of(p.w, t);
        const float *from =
            sums + in_group * p.k_warps * sum_stride + (tile * BN + col) * SUM_ROW + r;
        float v = 0.0f, up = 0.0f;
#pragma unroll 4
        for (int k = 0; k < p.k_warps; k++) {
            v += from[k * sum_stride];
            if (PAIR)
                up += from[k * sum_stride + BN * SUM_ROW];
        }
        int row = (t - s->tile0) * TILE_ROWS + r;
        if (PAIR)
            gemm_store_pair(p, rows, s, col, row, v, up);
        else
            gemm_store(p, rows, s, col, row, v);
    }
}

/* acc += one slice of k of two tiles in the ring x the rows at b. */
template <int SET, int NT>
DEVICE void gemm_splitk_slice(const struct gemm_args &p, const struct seg *s0, const struct seg *s1,
                              int tile0, int tile1, int slice, int expert, const uint8_t *tiles,
                              const uint8_t *b, int n_active, float (&acc)[2][NT][4])
{
    if constexpr (SET == SET_K && NT <= 2) {
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            float part[NT][4] = {};
            if ((i ? s1 : s0)->kind == TILE_Q4_K)
                tile_few<TILE_Q4_K, NT>(tiles + i * p.slot, b, part);
            else
                tile_few<TILE_Q6_K, NT>(tiles + i * p.slot, b, part);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    acc[0][n][e] += i == 0 ? part[n][e] : 0.0f;
                    acc[1][n][e] += i == 1 ? part[n][e] : 0.0f;
                }
        }
    } else {
#pragma unroll 1
        for (int q = 0; q < 4; q++) {
            uint32_t a[2][4][4];
            if (SET == SET_ALL) { /* rare formats are read from global memory */
                uint32_t rest[2][4][4];
                chunk_slow(s0, tile_address(p.w, s0, expert, tile0, slice), q, lane_id(), a[0],
                           rest[0]);
                chunk_slow(s1, tile_address(p.w, s1, expert, tile1, slice), q, lane_id(), a[1],
                           rest[1]);
                chunk_mma<NT>(rest, b, q, n_active, acc);
            } else {
                chunk_decode<SET>(s0, tiles, q, a[0]);
                chunk_decode<SET>(s1, tiles + p.slot, q, a[1]);
            }
            chunk_mma<NT>(a, b, q, n_active, acc);
        }
    }
}

template <int SET, int NT, bool PAIR>
static __global__ void __launch_bounds__(SPLITK_WARPS * 32)
    gemm_splitk_kernel(const __grid_constant__ struct gemm_args p)
{
    const int BN = NT * 8, B_BYTES = BN * TILE_K * 2;
    SHARED_BYTES(shared);
    struct gemm_rows rows;
    rows.in = (int *)shared;
    rows.out = rows.in + BN;
    rows.scale = (float *)(rows.out + BN);
    int warps = p.k_warps * p.groups, w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int group = w / p.k_warps, kw = w - group * p.k_warps;
    int entry = 2 * p.slot + (p.b_in_ring ? B_BYTES : 0);
    uint8_t *base = (uint8_t *)(rows.scale + BN + BN % 4);
    uint8_t *resident = base + w * B_BYTES;
    uint8_t *rings = base + (p.b_in_ring ? 0 : warps * B_BYTES);
    uint8_t *ring = rings + w * p.stages * entry;
    /* (groups, k warps) x (2, BN, SUM_ROW): after the rings, or over them if the block has only one
     * round, because the rings are empty by then */
    float *sums = (float *)(p.sums_in_ring ? rings : rings + warps * p.stages * entry);
    int sum_stride = p.sums_in_ring ? p.stages * entry / 4 : 2 * BN * SUM_ROW;

    int n_active = 0;
    rows.expert = 0;
    int first = (int)blockIdx.x * p.units_per_block;
    int end = min(first + p.units_per_block, p.n_units), half = p.w.n_tiles / 2;
    auto tile_of = [&](int unit, int i) { return gemm_splitk_tile<PAIR>(p.w, unit, i); };

    int f_unit = first + group, f_slice = kw, f_at = 0;
    auto fetch = [&]() {
        if (f_unit < end) {
            uint8_t *to = ring + f_at * entry;
            if (p.b_in_ring)
                fetch_rows<NT>(to + 2 * p.slot, p, rows.in, n_active, f_slice);
            if (SET != SET_ALL)
#pragma unroll 1
                for (int i = 0; i < 2; i++) {
                    int tile = tile_of(f_unit, i);
                    const struct seg *s = seg_of(p.w, tile);
                    tile_fetch(to + i * p.slot, tile_address(p.w, s, rows.expert, tile, f_slice),
                               s->tile_bytes);
                }
            f_slice += p.k_warps;
            if (f_slice >= p.w.n_kt) {
                f_slice = kw;
                f_unit += p.groups;
            }
            f_at = f_at + 1 == p.stages ? 0 : f_at + 1;
        }
        copy_async_commit();
    };
    /* Weights that do not depend on routing are issued before the wait. */
    bool early = !p.moe && !p.b_in_ring;
    dependency_trigger();
    if (early)
#pragma unroll 1
        for (int i = 0; i < p.stages; i++)
            fetch();
    dependency_wait();
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, BN)) {
        copy_async_wait<0>();
        return;
    }
    n_active = (rows.count + 7) / 8;
    if (!p.b_in_ring && kw < p.w.n_kt)
        fetch_rows<NT>(resident, p, rows.in, n_active, kw);
    if (early) {
        copy_async_commit();
        copy_async_wait<0>();
    } else
#pragma unroll 1
        for (int i = 0; i < p.stages; i++)
            fetch();
    int at = 0;
#pragma unroll 1
    for (int round = first; round < end; round += p.groups) {
        int unit = round + group;
        float acc[2][NT][4] = {};
        if (unit < end) {
            const struct seg *s0 = seg_of(p.w, tile_of(unit, 0)),
                             *s1 = seg_of(p.w, tile_of(unit, 1));
#pragma unroll 1
            for (int slice = kw; slice < p.w.n_kt; slice += p.k_warps) {
                if (p.stages >= 3)
                    copy_async_wait<2>();
                else if (p.stages == 2)
                    copy_async_wait<1>();
                else
                    copy_async_wait<0>();
                __syncwarp();
                const uint8_t *tiles = ring + at * entry;
                const uint8_t *b = p.b_in_ring ? tiles + 2 * p.slot : resident;
                gemm_splitk_slice<SET, NT>(p, s0, s1, tile_of(unit, 0), tile_of(unit, 1), slice,
                                           rows.expert, tiles, b, n_active, acc);
                at = at + 1 == p.stages ? 0 : at + 1;
                __syncwarp(); /* every lane is done with the entry that is overwritten */
                fetch();
            }
        }
        float *mine = sums + w * sum_stride;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    mine[(i * BN + n * 8 + 2 * c + (e & 1)) * SUM_ROW + g + 8 * (e >> 1)] =
                        acc[i][n][e];
        __syncthreads();
        gemm_splitk_write<NT, PAIR>(p, rows, sums, sum_stride, round, end);
        __syncthreads();
    }
    copy_async_wait<0>();
    if (PAIR && blockIdx.x == 0)
        gemm_zero_tail(p, rows, half);
}

static size_t gemm_splitk_shared(const struct gemm_args &p, int nt)
{
    size_t bn = (size_t)nt * 8, b = bn * TILE_K * 2, warps = (size_t)(p.k_warps * p.groups);
    size_t entry = 2 * (size_t)p.slot + (p.b_in_ring ? b : 0);
    return (3 * bn + bn % 4) * 4 + (p.sums_in_ring ? 0 : warps * 2 * bn * SUM_ROW * 4) +
           (p.b_in_ring ? 0 : warps * b) + warps * (size_t)p.stages * entry;
}

template <int SET, int NT, bool PAIR>
static void gemm_splitk_launch(struct cuda_backend *cu, struct gemm_args p, int y)
{
    p.slot = SET == SET_ALL ? 0 : p.w.max_tile_bytes;
    p.stages = 1;
    for (int most = NT == 4 ? 8 : SPLITK_WARPS;;
         most /= 2) { /* as many warps as shared memory allows */
        p.k_warps = p.w.n_kt < most ? p.w.n_kt : most;
        int groups = (most < 8 ? most : 8) / p.k_warps;
        p.groups = groups < 1 ? 1 : groups;
        p.b_in_ring = p.w.n_kt > p.k_warps;
        if (most == 1 || gemm_splitk_shared(p, NT) <= cu->shared_limit)
            break;
    }
    p.n_units = PAIR ? p.w.n_tiles / 2 : ceil_div(p.w.n_tiles, 2);
    /* A block with more units loads its activations once for all of them. */
    int per = p.n_units * y / (cu->n_sm * 6);
    per = per < p.groups ? p.groups : per > 8 ? 8 : per;
    p.units_per_block = ceil_div(per, p.groups) * p.groups;
    if (p.b_in_ring)
        p.units_per_block = p.groups;
    size_t sums = (size_t)(2 * NT * 8 * SUM_ROW * 4);
    p.sums_in_ring = p.units_per_block == p.groups && sums <= 2 * (size_t)p.slot;
    p.stages = SET == SET_ALL ? 1 : 3;
    size_t room = NT <= 2 ? cu->shared_per_sm / 2 - 1024 : cu->shared_limit;
    while (p.stages > 1 && gemm_splitk_shared(p, NT) > room)
        p.stages--;
    CHECK(gemm_splitk_shared(p, NT) <= cu->shared_limit, "%zu bytes of shared memory",
          gemm_splitk_shared(p, NT));
    cuda_launch(cu, gemm_splitk_kernel<SET, NT, PAIR>,
                dim3((unsigned)ceil_div(p.n_units, p.units_per_block), (unsigned)y),
                p.k_warps * p.groups * 32, gemm_splitk_shared(p, NT), LAUNCH_EARLY, p);
}

void gemm_splitk(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y)
{
    if (p.w.set == SET_ALL && pair)
        gemm_splitk_launch<SET_ALL, 2, true>(cu, p, y);
    else if (p.w.set == SET_ALL)
        gemm_splitk_launch<SET_ALL, 2, false>(cu, p, y);
    else
        gemm_variant(p.w, pair, width, [&](auto set, auto nt, auto two) {
            gemm_splitk_launch<set.VALUE, nt.VALUE, two.VALUE>(cu, p, y);
        });
}
