/*
 * y = x W^T for many rows and fp16 weights on Hopper (sm_90a).
 * Mapping: persistent blocks, one per SM. A block computes one tile of the result after another:
 * 256 output rows x 128 token rows. The schedule is static.
 * Warp roles: four consumer warpgroups multiply with wgmma, the weights as register operand. A
 * producer warpgroup copies 64 columns of weights and activations per stage through one ring, and
 * runs ahead into the next tile while the consumers finish the current one and write results
 * straight from registers.
 * Results: floats, fp16, or the hidden units of an mlp without a gate.
 * Limit: L2 bandwidth. On an H200 with 1,024 to 4,096 columns: 430 TFLOP/s, where tiles read 4.8
 * TB/s from the L2. gemm_wgmma.cu was 8 to 12 % slower over a whole encoder. (Measured when one
 * lane of a warp released a stage; now every lane does, and it has not been measured again.)
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_out.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum { FP16_ALIGN = 1024, FP16_N = 128, FP16_TILES = 16, FP16_STAGES = 4 };
enum { FP16_CONSUMERS = 512, FP16_PRODUCERS = 128, FP16_THREADS = FP16_CONSUMERS + FP16_PRODUCERS };
enum { FP16_CONSUMER_REGS = 112, FP16_PRODUCER_REGS = 32 };
/* Bytes of 64 columns: of a row tile, of all weights, of activations; bytes of a stage. */
enum {
    FP16_CHUNK = F16_BYTES / 4,
    FP16_WEIGHTS = FP16_TILES * FP16_CHUNK,
    FP16_STAGE_BYTES = FP16_WEIGHTS + FP16_N * 128
};

struct gemm_fp16_args {
    struct gemm_args p;
    int blocks, items; /* blocks of 256 output rows; tiles of the result */
};

struct gemm_fp16_bars {
    uint64_t full[FP16_STAGES], empty[FP16_STAGES];
};

struct gemm_fp16_shared {
    float scale[2][4][FP16_N]; /* of a tile's rows, per warpgroup, double-buffered */
    struct gemm_fp16_bars bars;
};

/* Position in the ring. It advances across tiles. */
struct gemm_fp16_cursor {
    int stage, turn;
    __device__ __forceinline__ void next()
    {
        if (++stage == FP16_STAGES) {
            stage = 0;
            turn ^= 1;
        }
    }
};

DEVICE void gemm_fp16_produce(const struct gemm_fp16_args &a, uint8_t *ring,
                              struct gemm_fp16_bars *bars)
{
    const int STEP = FP16_PRODUCERS / 8, PER = FP16_N / STEP;
    const struct gemm_args &p = a.p;
    int id = (int)threadIdx.x - FP16_CONSUMERS, piece = id & 7, row0 = id >> 3;
    struct gemm_fp16_cursor at = {0, 1};
#pragma unroll 1
    for (int item = (int)blockIdx.x; item < a.items; item += (int)gridDim.x) {
        int tile = item / a.blocks, block = item - tile * a.blocks;
        int first = tile * FP16_N, count = min((int)FP16_N, p.rows - first);
        int mine = min(block * FP16_TILES + min(id, FP16_TILES - 1), p.w.n_tiles - 1);
        const uint8_t *from = tile_address(p.w, seg_of(p.w, mine), 0, mine, 0);
        const uint16_t *x = p.x + (size_t)first * (size_t)p.ldx + (size_t)(piece * 8);
        uint32_t row[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) /* rows past the last are copied but not read */
            row[i] = (uint32_t)min(row0 + i * STEP, count - 1) * (uint32_t)p.ldx;
#pragma unroll 1
        for (int c = 0; c < p.w.n_kt * 4; c++) {
            uint8_t *to = ring + at.stage * FP16_STAGE_BYTES;
            bar_wait(&bars->empty[at.stage], at.turn);
            if (id < FP16_TILES) {
                bar_expect(&bars->full[at.stage], FP16_CHUNK);
                bar_copy(&bars->full[at.stage], to + id * FP16_CHUNK, from, FP16_CHUNK);
                from += FP16_CHUNK;
            }
            to += FP16_WEIGHTS + row0 * 128 + ((piece ^ (row0 & 7)) << 4);
#pragma unroll
            for (int i = 0; i < PER; i++)
                copy_async16(to + i * (STEP * 128), x + row[i]);
            bar_arrive_copies(&bars->full[at.stage]);
            x += 64;
            at.next();
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* A warp's tile of 16 output rows. They start at `row` of their segment and `left` of them exist.
 * Token rows first .. first+count-1. */
struct gemm_fp16_tile {
    int first, count, place, left; /* place: column of its first output row in a result row */
    float bias[2];                 /* bias of rows g and g + 8 */
};

DEVICE struct gemm_fp16_tile gemm_fp16_tile_of(const struct gemm_args &p, int tile, int first)
{
    struct gemm_fp16_tile t;
    const struct seg *s = seg_of(p.w, tile);
    int row = (tile - s->tile0) * TILE_ROWS, g = lane_id() >> 2;
    t.first = first;
    t.count = min((int)FP16_N, p.rows - first);
    t.place = s->row0 + row;
    t.left = tile < p.w.n_tiles ? s->rows - row : 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
        t.bias[i] = p.w.bias && g + 8 * i < t.left ? p.w.bias[t.place + g + 8 * i] : 0.0f;
    return t;
}

/* Writes hidden units, with zeros after the last (UNGATED), or fp16 scaled by HIDDEN_SCALE. */
template <bool LONE>
DEVICE void gemm_fp16_store_narrow(const struct gemm_args &p, const struct gemm_fp16_tile &t,
                                   const float *scale, const float (&acc)[FP16_N / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3, at = t.place + gemm_out_row();
    uint16_t *y = (LONE ? p.y_fp16 : (uint16_t *)p.y) + (size_t)t.first * (size_t)p.ldy + at;
    bool kept = LONE ? at < p.ldy : gemm_out_row() < t.left;
#pragma unroll
    for (int n = 0; n < FP16_N / 8; n++) {
        if (n * 8 >= t.count)
            break;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = acc[4 * n + i] * scale[8 * n + 2 * c + (i & 1)] + t.bias[i >> 1];
            if (LONE)
                v[i] = g + 8 * (i >> 1) < t.left ? gated(p.act, v[i], 1.0f) : 0.0f;
            v[i] = clamp_half(v[i] * HIDDEN_SCALE);
        }
        uint2 h = gemm_out_transpose < LONE ? 2 : 1 > (v);
        if (kept && 8 * n + g < t.count)
            *(uint2 *)(y + (size_t)(8 * n + g) * (size_t)p.ldy) = h;
    }
}

DEVICE void gemm_fp16_store_floats(const struct gemm_args &p, const struct gemm_fp16_tile &t,
                                   const float *scale, const float (&acc)[FP16_N / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    float *y = p.y + (size_t)t.first * (size_t)p.ldy + (size_t)(t.place + g);
#pragma unroll
    for (int n = 0; n < FP16_N / 8; n++) {
        if (n * 8 >= t.count)
            break;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int col = 8 * n + 2 * c + i;
            float *to = y + (size_t)col * (size_t)p.ldy;
            if (col < t.count && g < t.left)
                to[0] = acc[4 * n + i] * scale[col] + t.bias[0];
            if (col < t.count && g + 8 < t.left)
                to[8] = acc[4 * n + 2 + i] * scale[col] + t.bias[1];
        }
    }
}

/* acc = a warp's tile x the token rows. Every lane releases a stage: one lane could not speak for
 * the reads of the others. */
DEVICE void gemm_fp16_loop(const uint8_t *ring, struct gemm_fp16_bars *bars, int chunks,
                           struct gemm_fp16_cursor &at, float (&acc)[FP16_N / 2])
{
    int lane = lane_id();
    const uint8_t *mine = ring + warp_id() * FP16_CHUNK;
    uint64_t *last = NULL;
    format<TILE_F16> u;
    uint32_t f[2][4];
    bar_wait(&bars->full[at.stage], at.turn);
    u.fetch(mine + at.stage * FP16_STAGE_BYTES, 0, lane);
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        wgmma_publish();
        uint64_t rows = wgmma_desc(ring + at.stage * FP16_STAGE_BYTES + FP16_WEIGHTS);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<1>(); /* f[j & 1] has been read */
            if (j == 1 && c)
                bar_arrive(last); /* and all of the previous chunk */
            u.template frag<op_wgmma>(j, f[j & 1]);
            wgmma_fence();
            wgmma<FP16_N>(acc, f[j & 1], rows + 2 * (uint64_t)j);
            wgmma_commit();
        }
        last = &bars->empty[at.stage];
        at.next();
        if (c + 1 < chunks) {
            bar_wait(&bars->full[at.stage], at.turn);
            u.fetch(mine + at.stage * FP16_STAGE_BYTES, 0, lane);
        }
    }
    wgmma_wait<0>();
    bar_arrive(last);
}

/* Grid: one block per SM. */
static __global__ void __launch_bounds__(FP16_THREADS, 1)
    gemm_fp16_kernel(const __grid_constant__ struct gemm_fp16_args a)
{
    SHARED_BYTES(raw);
    uint8_t *ring = shared_align(raw, FP16_ALIGN);
    struct gemm_fp16_shared *sh =
        (struct gemm_fp16_shared *)(ring + FP16_STAGES * FP16_STAGE_BYTES);
    const struct gemm_args &p = a.p;
    int w = warp_id();
    if (w == 0 && lane_id() < FP16_STAGES) {
        bar_init(&sh->bars.full[lane_id()], FP16_PRODUCERS + FP16_TILES);
        bar_init(&sh->bars.empty[lane_id()], FP16_CONSUMERS);
        bar_ready();
    }
    __syncthreads();
    dependency_wait();
    dependency_trigger();
    if (w >= FP16_CONSUMERS / 32) {
        registers_lower<FP16_PRODUCER_REGS>();
        gemm_fp16_produce(a, ring, &sh->bars);
        return;
    }
    registers_raise<FP16_CONSUMER_REGS>();
    struct gemm_fp16_cursor at = {0, 0};
#pragma unroll 1
    for (int item = (int)blockIdx.x, it = 0; item < a.items; item += (int)gridDim.x, it ^= 1) {
        int tile = item / a.blocks, block = item - tile * a.blocks, first = tile * FP16_N;
        float *scale = sh->scale[it][w >> 2];
        int mine = (int)threadIdx.x & 127, row = min(first + mine, p.rows - 1);
        scale[mine] = (p.x_scale ? p.x_scale[row] : 1.0f) * p.unscale;
        float acc[FP16_N / 2] = {};
        wgmma_use(acc);
        gemm_fp16_loop(ring, &sh->bars, p.w.n_kt * 4, at, acc);
        wgmma_use(acc);
        struct gemm_fp16_tile t = gemm_fp16_tile_of(p, block * FP16_TILES + w, first);
        named_barrier_sync(1 + (w >> 2), 128); /* the new scales are written, the old ones read */
        if (p.y_fp16)
            gemm_fp16_store_narrow<true>(p, t, scale, acc);
        else if (p.narrow)
            gemm_fp16_store_narrow<false>(p, t, scale, acc);
        else
            gemm_fp16_store_floats(p, t, scale, acc);
    }
}

enum {
    FP16_SHARED = FP16_ALIGN + FP16_STAGES * FP16_STAGE_BYTES + (int)sizeof(struct gemm_fp16_shared)
};

bool gemm_fp16_suits(const struct cuda_backend *cu, const struct matrix *w)
{
    bool fits = cu->can.wgmma && FP16_SHARED <= cu->shared_limit;
    for (int i = 0; i < w->n_seg; i++)
        fits = fits && w->seg[i].kind == TILE_F16;
    return fits;
}

int gemm_fp16_tiles(const struct matrix *w, int rows)
{
    return ceil_div(w->n_tiles, FP16_TILES) * ceil_div(rows, FP16_N);
}

void gemm_fp16(struct cuda_backend *cu, const struct gemm_args &p)
{
    struct gemm_fp16_args a = {};
    a.p = p;
    a.blocks = p.y_fp16 ? p.ldy / (FP16_TILES * TILE_ROWS) : ceil_div(p.w.n_tiles, FP16_TILES);
    a.items = a.blocks * ceil_div(p.rows, FP16_N);
    cuda_launch(cu, gemm_fp16_kernel, dim3((unsigned)(a.items < cu->n_sm ? a.items : cu->n_sm)),
                FP16_THREADS, FP16_SHARED, LAUNCH_EARLY, a);
}
