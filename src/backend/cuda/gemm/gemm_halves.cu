/*
 * Products of many rows with weights of halves on Hopper (sm_90a), by blocks that stay, one to an SM,
 * and take one tile of the result after another: 256 output rows x 128 rows of the step. Four
 * warpgroups multiply, with the weights as the operand in registers; a fifth brings 64 columns of both
 * through one ring, and is with the next tile while they still work on one and write its results
 * straight from registers. Results: floats, halves, or hidden units of an mlp without a gate. Which
 * tile is whose is known from the start: nothing is handed out. Reached on an H200, 1,024 to 4,096
 * columns: 430 TFLOP/s, where tiles ask the L2 for 4.8 TB/s; gemm_wgmma.cu was 8 to 12 % slower over a
 * whole encoder. (Then one lane of a warp gave stages back; since every lane does, not measured again.)
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_out.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum { HALVES_ALIGN = 1024, HALVES_N = 128, HALVES_TILES = 16, HALVES_STAGES = 4 };
enum { HALVES_USERS = 512, HALVES_BRINGERS = 128, HALVES_THREADS = HALVES_USERS + HALVES_BRINGERS };
enum { HALVES_REGS = 112, HALVES_BRING_REGS = 32 };
/* Bytes of a chunk of 64 columns: of a row tile, of all weights, of activations; a stage. */
enum {
    HALVES_CHUNK = F16_BYTES / 4,
    HALVES_WEIGHTS = HALVES_TILES * HALVES_CHUNK,
    HALVES_STAGE = HALVES_WEIGHTS + HALVES_N * 128
};

struct gemm_halves_args {
    struct gemm_args p;
    int blocks, items; /* of 256 output rows; tiles of the result */
};

struct gemm_halves_bars {
    uint64_t full[HALVES_STAGES], empty[HALVES_STAGES];
};

struct gemm_halves_shared {
    float scale[2][4][HALVES_N]; /* of a tile's rows, a copy for each warpgroup; tiles by turns */
    struct gemm_halves_bars bars;
};

/* A place in the ring; it goes on from tile to tile. */
struct gemm_halves_place {
    int stage, turn;
    __device__ __forceinline__ void next()
    {
        if (++stage == HALVES_STAGES) {
            stage = 0;
            turn ^= 1;
        }
    }
};

DEVICE void gemm_halves_bring(const struct gemm_halves_args &a, uint8_t *ring,
                              struct gemm_halves_bars *bars)
{
    const int STEP = HALVES_BRINGERS / 8, PER = HALVES_N / STEP;
    const struct gemm_args &p = a.p;
    int id = (int)threadIdx.x - HALVES_USERS, piece = id & 7, row0 = id >> 3;
    struct gemm_halves_place at = {0, 1};
#pragma unroll 1
    for (int item = (int)blockIdx.x; item < a.items; item += (int)gridDim.x) {
        int tile = item / a.blocks, block = item - tile * a.blocks;
        int first = tile * HALVES_N, count = min((int)HALVES_N, p.rows - first);
        int mine = min(block * HALVES_TILES + min(id, HALVES_TILES - 1), p.w.n_tiles - 1);
        const uint8_t *from = tile_address(p.w, seg_of(p.w, mine), 0, mine, 0);
        const uint16_t *x = p.x + (size_t)first * (size_t)p.ldx + (size_t)(piece * 8);
        uint32_t row[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) /* past the last: nobody reads */
            row[i] = (uint32_t)min(row0 + i * STEP, count - 1) * (uint32_t)p.ldx;
#pragma unroll 1
        for (int c = 0; c < p.w.n_kt * 4; c++) {
            uint8_t *to = ring + at.stage * HALVES_STAGE;
            bar_wait(&bars->empty[at.stage], at.turn);
            if (id < HALVES_TILES) {
                bar_expect(&bars->full[at.stage], HALVES_CHUNK);
                bar_copy(&bars->full[at.stage], to + id * HALVES_CHUNK, from, HALVES_CHUNK);
                from += HALVES_CHUNK;
            }
            to += HALVES_WEIGHTS + row0 * 128 + ((piece ^ (row0 & 7)) << 4);
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

/* A warp's tile of 16 output rows, which are those from `row` on of its segment; left: how many there
 * are. Rows of the step: count from `first` on. */
struct gemm_halves_tile {
    int first, count, place, left; /* place: of its first row in a row of the results */
    float bias[2];                 /* of rows g and g + 8 */
};

DEVICE struct gemm_halves_tile gemm_halves_tile_of(const struct gemm_args &p, int tile, int first)
{
    struct gemm_halves_tile t;
    const struct seg *s = seg_of(p.w, tile);
    int row = (tile - s->tile0) * TILE_ROWS, g = lane_id() >> 2;
    t.first = first;
    t.count = min((int)HALVES_N, p.rows - first);
    t.place = s->row0 + row;
    t.left = tile < p.w.n_tiles ? s->rows - row : 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
        t.bias[i] = p.w.bias && g + 8 * i < t.left ? p.w.bias[t.place + g + 8 * i] : 0.0f;
    return t;
}

/* Hidden units, zeros behind the last (LONE); or halves times HIDDEN_SCALE. */
template <bool LONE>
DEVICE void gemm_halves_narrow(const struct gemm_args &p, const struct gemm_halves_tile &t,
                               const float *scale, const float (&acc)[HALVES_N / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3, at = t.place + gemm_out_row();
    uint16_t *y = (LONE ? p.y_half : (uint16_t *)p.y) + (size_t)t.first * (size_t)p.ldy + at;
    bool kept = LONE ? at < p.ldy : gemm_out_row() < t.left;
#pragma unroll
    for (int n = 0; n < HALVES_N / 8; n++) {
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
        uint2 h = gemm_out_turn < LONE ? 2 : 1 > (v);
        if (kept && 8 * n + g < t.count)
            *(uint2 *)(y + (size_t)(8 * n + g) * (size_t)p.ldy) = h;
    }
}

DEVICE void gemm_halves_floats(const struct gemm_args &p, const struct gemm_halves_tile &t,
                               const float *scale, const float (&acc)[HALVES_N / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    float *y = p.y + (size_t)t.first * (size_t)p.ldy + (size_t)(t.place + g);
#pragma unroll
    for (int n = 0; n < HALVES_N / 8; n++) {
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

/* acc = a warp's tile x the rows of the step. Every lane gives a stage back: one that spoke for its warp
 * would say nothing of what the others have read. */
DEVICE void gemm_halves_loop(const uint8_t *ring, struct gemm_halves_bars *bars, int chunks,
                             struct gemm_halves_place &at, float (&acc)[HALVES_N / 2])
{
    int lane = lane_id();
    const uint8_t *mine = ring + warp_id() * HALVES_CHUNK;
    uint64_t *last = NULL;
    format<TILE_F16> u;
    uint32_t f[2][4];
    bar_wait(&bars->full[at.stage], at.turn);
    u.fetch(mine + at.stage * HALVES_STAGE, 0, lane);
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        wgmma_publish();
        uint64_t rows = wgmma_rows(ring + at.stage * HALVES_STAGE + HALVES_WEIGHTS);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<1>(); /* f[j & 1] has been read */
            if (j == 1 && c)
                bar_arrive(last); /* and all of the chunk before */
            u.template frag<op_wgmma>(j, f[j & 1]);
            wgmma_fence();
            wgmma<HALVES_N>(acc, f[j & 1], rows + 2 * (uint64_t)j);
            wgmma_commit();
        }
        last = &bars->empty[at.stage];
        at.next();
        if (c + 1 < chunks) {
            bar_wait(&bars->full[at.stage], at.turn);
            u.fetch(mine + at.stage * HALVES_STAGE, 0, lane);
        }
    }
    wgmma_wait<0>();
    bar_arrive(last);
}

/* Grid: one block to an SM. */
static __global__ void __launch_bounds__(HALVES_THREADS, 1)
    gemm_halves_kernel(const __grid_constant__ struct gemm_halves_args a)
{
    SHARED_BYTES(raw);
    uint8_t *ring = shared_align(raw, HALVES_ALIGN);
    struct gemm_halves_shared *sh =
        (struct gemm_halves_shared *)(ring + HALVES_STAGES * HALVES_STAGE);
    const struct gemm_args &p = a.p;
    int w = warp_id();
    if (w == 0 && lane_id() < HALVES_STAGES) {
        bar_init(&sh->bars.full[lane_id()], HALVES_BRINGERS + HALVES_TILES);
        bar_init(&sh->bars.empty[lane_id()], HALVES_USERS);
        bar_ready();
    }
    __syncthreads();
    dependency_wait();
    dependency_trigger();
    if (w >= HALVES_USERS / 32) {
        registers_fewer<HALVES_BRING_REGS>();
        gemm_halves_bring(a, ring, &sh->bars);
        return;
    }
    registers_more<HALVES_REGS>();
    struct gemm_halves_place at = {0, 0};
#pragma unroll 1
    for (int item = (int)blockIdx.x, it = 0; item < a.items; item += (int)gridDim.x, it ^= 1) {
        int tile = item / a.blocks, block = item - tile * a.blocks, first = tile * HALVES_N;
        float *scale = sh->scale[it][w >> 2];
        int mine = (int)threadIdx.x & 127, row = min(first + mine, p.rows - 1);
        scale[mine] = (p.x_scale ? p.x_scale[row] : 1.0f) * p.unscale;
        float acc[HALVES_N / 2] = {};
        wgmma_use(acc);
        gemm_halves_loop(ring, &sh->bars, p.w.n_kt * 4, at, acc);
        wgmma_use(acc);
        struct gemm_halves_tile t = gemm_halves_tile_of(p, block * HALVES_TILES + w, first);
        part_sync(1 + (w >> 2), 128); /* scales are there, and those of the tile before read */
        if (p.y_half)
            gemm_halves_narrow<true>(p, t, scale, acc);
        else if (p.narrow)
            gemm_halves_narrow<false>(p, t, scale, acc);
        else
            gemm_halves_floats(p, t, scale, acc);
    }
}

enum {
    HALVES_SHARED =
        HALVES_ALIGN + HALVES_STAGES * HALVES_STAGE + (int)sizeof(struct gemm_halves_shared)
};

bool gemm_halves_suits(const struct cuda_backend *cu, const struct matrix *w)
{
    bool fits = cu->wgmma && HALVES_SHARED <= cu->shared_limit;
    for (int i = 0; i < w->n_seg; i++)
        fits = fits && w->seg[i].kind == TILE_F16;
    return fits;
}

int gemm_halves_tiles(const struct matrix *w, int rows)
{
    return ceil_div(w->n_tiles, HALVES_TILES) * ceil_div(rows, HALVES_N);
}

void gemm_halves(struct cuda_backend *cu, const struct gemm_args &p)
{
    struct gemm_halves_args a = {};
    a.p = p;
    a.blocks = p.y_half ? p.ldy / (HALVES_TILES * TILE_ROWS) : ceil_div(p.w.n_tiles, HALVES_TILES);
    a.items = a.blocks * ceil_div(p.rows, HALVES_N);
    cuda_launch(cu, gemm_halves_kernel, dim3((unsigned)(a.items < cu->n_sm ? a.items : cu->n_sm)),
                HALVES_THREADS, HALVES_SHARED, LAUNCH_EARLY, a);
}
