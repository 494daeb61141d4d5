/*
 * y = x W^T for many rows with mma.sync, for GPUs before Hopper and for what gemm_wgmma.cu does not
 * take.
 * Mapping: a block computes 256 output rows (8 warps x two 16-row tiles) x up to 8*NT token rows.
 * Each warp streams its weight tiles through a ring of its own and converts them to fragments in
 * registers. The block shares the activations, 256 columns at a time.
 */
#include "backend/cuda/gemm/gemm.cuh"

enum { MMA_WARPS = 8 };

/*
 * Grid: (blocks of 16 x 16 output rows, tiles of token rows). Warp w computes row tiles t0 = 2 (8 x
 * + w) and t1 = t0 + 1; PAIR: gate tile 8 x + w and its up tile.
 */
template <int SET, int NT, bool PAIR>
static __global__ void __launch_bounds__(MMA_WARPS * 32)
    gemm_mma_kernel(const __grid_constant__ struct gemm_args p)
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

    int half = p.w.n_tiles / 2, unit = (int)blockIdx.x * MMA_WARPS + w;
    int tile[2] = {PAIR ? unit : 2 * unit, PAIR ? half + unit : 2 * unit + 1};
    bool mine = PAIR ? unit < half : tile[0] < p.w.n_tiles;
    if (!mine)
        tile[0] = tile[1] = 0;
    if (!PAIR && tile[1] >= p.w.n_tiles)
        tile[1] = tile[0];
    const struct seg *s[2] = {seg_of(p.w, tile[0]), seg_of(p.w, tile[1])};
    int n_active = (count + 7) / 8;

    auto fetch = [&](int kt) { /* copies a k tile of the activations */
                               if (kt < p.w.n_kt) {
                                   uint8_t *to = bs + (kt & 1) * B_BYTES;
                                   for (int i = (int)threadIdx.x; i < n_active * 8 * 32;
                                        i += MMA_WARPS * 32) {
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
    /* Order of the copy groups: W0, B0, W1, then per round B(kt+1), W(kt+prefetch). When round kt
     * starts, all groups but the last `prefetch - 1` must have landed. */
    int prefetch = p.stages - 1;
    fetch_weights(0);
    fetch(0);
    if (prefetch == 2)
        fetch_weights(1);
    float acc[2][NT][4] = {};
    for (int kt = 0; kt < p.w.n_kt; kt++) {
        if (prefetch == 2)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads(); /* k tile kt has landed for all warps; the other buffers are free */
        fetch(kt + 1);
        if (prefetch)
            fetch_weights(kt + prefetch);
        const uint8_t *b = bs + (kt & 1) * B_BYTES;
        const uint8_t *tiles[2];
#pragma unroll
        for (int i = 0; i < 2; i++) /* rare formats are read from global memory */
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
        if (!prefetch) {
            __syncwarp(); /* one ring entry: every lane must be done before it is overwritten */
            fetch_weights(kt + 1);
        }
    }
    copy_async_wait<0>();
    if (PAIR && !mine) { /* columns from the last hidden unit up to a whole k tile are zero */
        for (int i = lane; i < count * TILE_ROWS; i += 32) {
            int row = unit * TILE_ROWS + i % TILE_ROWS;
            if (row < p.ldy)
                p.y_fp16[(size_t)rows.out[i / TILE_ROWS] * (size_t)p.ldy + (size_t)row] = 0;
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
            if (PAIR)
                gemm_store_pair(p, rows, s[0], col, unit * TILE_ROWS + r, acc[0][n][e],
                                acc[1][n][e]);
            else
                gemm_store(p, rows, s[0], col, (tile[0] - s[0]->tile0) * TILE_ROWS + r,
                           acc[0][n][e]);
            if (!PAIR && tile[1] != tile[0])
                gemm_store(p, rows, s[1], col, (tile[1] - s[1]->tile0) * TILE_ROWS + r,
                           acc[1][n][e]);
        }
}

static size_t gemm_mma_shared(const struct gemm_args &p, int nt)
{
    size_t bn = (size_t)nt * 8;
    return 3 * bn * 4 + 2 * bn * TILE_K * 2 +
           (size_t)MMA_WARPS * (size_t)p.stages * 2 * (size_t)p.slot;
}

bool gemm_mma_fits(const struct cuda_backend *cu, const struct matrix *w)
{
    struct gemm_args p = {};
    p.stages = 1;
    p.slot = w->set == SET_ALL ? 0 : w->max_tile_bytes;
    return gemm_mma_shared(p, w->set == SET_K ? 16 : 8) <= cu->shared_limit;
}

template <int SET, int NT, bool PAIR>
static void gemm_mma_launch(struct cuda_backend *cu, struct gemm_args p, dim3 grid)
{
    p.stages = 3;
    while (p.stages > 1 && gemm_mma_shared(p, NT) > cu->shared_limit)
        p.stages--;
    CHECK(gemm_mma_shared(p, NT) <= cu->shared_limit, "%zu bytes of shared memory",
          gemm_mma_shared(p, NT));
    cuda_launch(cu, gemm_mma_kernel<SET, NT, PAIR>, grid, MMA_WARPS * 32, gemm_mma_shared(p, NT),
                LAUNCH_EARLY, p);
}

/* Not every set has every width, to limit compile time. */
template <bool PAIR>
static void gemm_mma_pick(struct cuda_backend *cu, struct gemm_args p, int width, int y)
{
    int units = PAIR ? p.ldy / TILE_ROWS : ceil_div(p.w.n_tiles, 2);
    dim3 grid((unsigned)ceil_div(units, MMA_WARPS), (unsigned)y);
    p.slot = p.w.set == SET_ALL ? 0 : p.w.max_tile_bytes;
    if (p.w.set == SET_ALL)
        gemm_mma_launch<SET_ALL, 8, PAIR>(cu, p, grid);
    else if (p.w.set != SET_K)
        gemm_mma_launch<SET_FAST, 8, PAIR>(cu, p, grid);
    else if (width == 64)
        gemm_mma_launch<SET_K, 8, PAIR>(cu, p, grid);
    else
        gemm_mma_launch<SET_K, 16, PAIR>(cu, p, grid);
}

void gemm_mma(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y)
{
    if (pair)
        gemm_mma_pick<true>(cu, p, width, y);
    else
        gemm_mma_pick<false>(cu, p, width, y);
}
