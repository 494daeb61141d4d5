/*
 * Quantised experts for many rows on Hopper (sm_90a).
 * Mapping: persistent blocks, one per SM. A block computes one tile of the result after another:
 * 256 output rows (PAIR: gate and up of 128 hidden units) x up to MOST token rows.
 * Warp roles: four consumer warpgroups convert codes to fp16 fragments and multiply with wgmma, as
 * in gemm_wgmma.cu. A producer warpgroup copies codes and activations through two rings and runs
 * ahead into the next tile. Each consumer writes its results straight from registers while others
 * still multiply.
 * Order: one launch computes gate and up of all tiles, then down. A block that needs hidden units
 * waits until their tile's counter is complete. Tiles are handed out in that order, so the block it
 * waits for is always running.
 * Kernels: one for Q4_K and Q6_K, which Q4_K_M mixes, and one for each other usual format (dot_one.cuh), whose gate,
 * up and down have it alone.
 * gemm_wgmma.cu has the rest: dense products (as fast there), split k, heads, other mixtures, fp16 weights.
 * Limit: issue slots (half are taken at 128 columns) and the decoding, which each tile repeats. On
 * an H200 the experts of 128 rows reach 430 TFLOP/s. Of their time 63 % remains with the products
 * alone, 81 % without decoding, 81 % without results, 49 % without products.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_out.cuh"
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum { PERSISTENT_ALIGN = 1024 };
enum {
    PERSISTENT_CONSUMERS = 512,
    PERSISTENT_PRODUCERS = 128,
    PERSISTENT_THREADS = PERSISTENT_CONSUMERS + PERSISTENT_PRODUCERS
};
/* Registers of a consumer and of a producer thread. */
enum { PERSISTENT_CONSUMER_REGS = 112, PERSISTENT_PRODUCER_REGS = 32 };
/* Most chunks of activations and k tiles of codes in the rings; row tiles of a block. */
enum { PERSISTENT_SLOTS = 6, PERSISTENT_STAGES = 2, PERSISTENT_TILES = 16 };
/* Bytes exchanged between the warps of a warpgroup: see gemm_persistent_swap. */
enum { PERSISTENT_SWAP = 4 * 2 * 128 * 16 };

struct gemm_persistent_args {
    struct gemm_args part[2]; /* gate and up; down */
    int blocks[2];            /* blocks of 128 hidden units, of 256 output rows */
    int n_slots;              /* stages of the activations' ring */
    int stage;                /* bytes of a stage of codes */
};

/* A tile of the result, as the consumers see it. */
struct gemm_persistent_item {
    int part, block, tile, expert, count, kind, chunks; /* count < 0: no more tiles */
    int out[PERSISTENT_ROWS];                           /* -1: none */
    float scale[PERSISTENT_ROWS];
};

/* Barriers for chunks of activations, k tiles of codes and tiles of the result: full (landed) and
 * empty (released). */
struct gemm_persistent_bars {
    uint64_t full[PERSISTENT_SLOTS], empty[PERSISTENT_SLOTS], codes_full[PERSISTENT_STAGES],
        codes_empty[PERSISTENT_STAGES];
    uint64_t item_full[2], rows_full[2], item_empty[2];
};

struct gemm_persistent_block {
    uint8_t *slots;                     /* (PERSISTENT_SLOTS, MOST, 128 bytes) */
    uint8_t *ring;                      /* (PERSISTENT_STAGES, PERSISTENT_TILES, a tile) */
    struct gemm_persistent_item *items; /* (2) */
    struct gemm_persistent_bars *bars;
    uint8_t *swap; /* (4 warpgroups, 2, 128 lanes, 16 bytes) */
    int *next;     /* (2) */
};

/* Widths of the products of a kernel for at most MOST rows a tile. */
template <int MOST> struct gemm_persistent_widths {
    enum { A = 128, B = 112, C = 80, D = 64, E = 32 };
};
template <> struct gemm_persistent_widths<64> {
    enum { A = 64, B = 48, C = 40, D = 32, E = 16 };
};

/* Positions in the rings. They advance across tiles. */
struct gemm_persistent_cursor {
    int slot, turn, kt;
};

/* Row tile of warp i of a block. A warpgroup has two tiles of gate, then two of up of the same
 * hidden units. */
DEVICE int gemm_persistent_tile_of(const struct gemm_args &p, int block, int i)
{
    if (!p.y_fp16)
        return min(block * PERSISTENT_TILES + i, p.w.n_tiles - 1);
    int half = p.w.n_tiles / 2;
    return min(block * 8 + (i >> 2) * 2 + (i & 1), half - 1) + (i >> 1 & 1) * half;
}

/* Chunks of 64 columns: not those that only pad the last k tile. At least four, a k tile. */
DEVICE int gemm_persistent_chunks(const struct matrix &w)
{
    return max((w.n_in + 63) >> 6, 4);
}

/* Waits until *count reaches `all`, counting other blocks' increments. */
DEVICE void gemm_persistent_await(const int32_t *count, int all)
{
    while (*(const volatile int32_t *)count < all) {
#ifdef STEEL_CUDA_SIM
        sim_pause();
#endif
    }
    __threadfence();
}

template <int MOST>
DEVICE void gemm_persistent_produce(const struct gemm_persistent_args &a,
                                    const struct gemm_persistent_block &k)
{
    typedef gemm_persistent_widths<MOST> W;
    const int STEP = PERSISTENT_PRODUCERS / 8, PER = MOST / STEP;
    int id = (int)threadIdx.x - PERSISTENT_CONSUMERS, piece = id & 7, row0 = id >> 3;
    const struct route_tables &r = a.part[0].route;
    int n_tiles = *r.n_tiles, first_part = n_tiles * a.blocks[0];
    int total = first_part + n_tiles * a.blocks[1];
    uint8_t *dst = k.slots + row0 * 128 + ((piece ^ (row0 & 7)) << 4);
    int slot = 0, turn = 1, kt = 0, after = 0;
    if (id == 0)
        after = atomicAdd(&r.n_tiles[2], 1);
#pragma unroll 1
    for (int it = 0;; it++) {
        struct gemm_persistent_item *to = &k.items[it & 1];
        if (id == 0)
            k.next[it & 1] = after;
        named_barrier_sync(5, PERSISTENT_PRODUCERS);
        int item = k.next[it & 1];
        bar_wait(&k.bars->item_empty[it & 1], (it >> 1) + 1);
        if (item >= total) {
            if (id == 0)
                to->count = -1;
            bar_arrive(&k.bars->item_full[it & 1]);
            break;
        }
        if (id == 0) /* fetch the next tile's number while this one is computed */
            after = atomicAdd(&r.n_tiles[2], 1);
        int part = item >= first_part, i = part ? item - first_part : item;
        const struct gemm_args &p = a.part[part];
        int tile = i / a.blocks[part], block = i - tile * a.blocks[part];
        int expert = r.tiles[3 * tile], first = r.tiles[3 * tile + 1];
        int count = r.tiles[3 * tile + 2], place = r.places[tile];
        int mine = gemm_persistent_tile_of(p, block, min(id, PERSISTENT_TILES - 1));
        const struct seg *s = seg_of(p.w, mine);
        const uint8_t *from = tile_address(p.w, s, expert, mine, 0);
        int bytes = s->tile_bytes, chunks = gemm_persistent_chunks(p.w);
        int n = count > W::C ? W::A : count > W::E ? W::C : W::E;
        if (id == 0) {
            to->part = part;
            to->block = block;
            to->tile = tile;
            to->expert = expert;
            to->count = count;
            to->kind = s->kind;
            to->chunks = chunks;
        }
        bar_arrive(&k.bars->item_full[it & 1]);
        uint32_t at[PER];
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int from = min(row0 + j * STEP, count - 1); /* past the last: not read */
            int in = !p.sorted_in ? r.lists[place + from] / p.used : first + from;
            at[j] = (uint32_t)in * (uint32_t)p.ldx + (uint32_t)piece * 8;
        }
        if (part)
            gemm_persistent_await(&r.done[tile], 4 * a.blocks[0]);
        const uint16_t *x = p.x;
#pragma unroll 1
        for (int c = 0; c < chunks; c++) {
            if (c == 3 && id < MOST) { /* not needed before the end */
                int row = min(id, count - 1), pair = r.lists[place + row], own = first + row;
                int in = p.sorted_in ? own : pair / p.used, out = p.sorted_in ? pair : own;
                to->out[id] = id < count ? out : -1;
                to->scale[id] = (p.x_scale ? p.x_scale[in] : 1.0f) * p.unscale;
                bar_arrive(&k.bars->rows_full[it & 1]);
            }
            if (!(c & 3)) {
                int stage = kt & 1;
                bar_wait(&k.bars->codes_empty[stage], (kt >> 1) + 1);
                if (id < PERSISTENT_TILES) {
                    bar_expect(&k.bars->codes_full[stage], bytes);
                    bar_copy(&k.bars->codes_full[stage], k.ring + stage * a.stage + id * bytes,
                             from, bytes);
                    from += bytes;
                }
                kt++;
            }
            bar_wait(&k.bars->empty[slot], turn);
            int to_slot = slot * (MOST * 128);
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (STEP * j < n)
                    copy_async16(dst + to_slot + j * (STEP * 128), x + at[j]);
            bar_arrive_copies(&k.bars->full[slot]);
            x += 64;
            if (++slot == a.n_slots) {
                slot = 0;
                turn ^= 1;
            }
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* One function for all widths, so that products of different widths share one set of
 * accumulators. */
template <int N, int CAP>
DEVICE void gemm_persistent_multiply(float (&acc)[CAP], const uint32_t (&f)[4], uint64_t rows)
{
    wgmma_fence();
    wgmma<N>(acc, f, rows);
    wgmma_commit();
}

/* acc = a warp's tile x the token rows. A chunk is 64 columns; a k tile is four chunks. */
template <int KIND, int MOST>
DEVICE void gemm_persistent_loop(const struct gemm_persistent_args &a,
                                 const struct gemm_persistent_block &k,
                                 struct gemm_persistent_cursor &at, int chunks, int count,
                                 float (&acc)[MOST / 2])
{
    typedef gemm_persistent_widths<MOST> W;
    int lane = lane_id();
    const uint8_t *mine = k.ring + warp_id() * format<KIND>::BYTES;
    uint64_t *last = NULL;
    format<KIND> u;
    bar_wait(&k.bars->codes_full[at.kt & 1], at.kt >> 1);
    u.fetch(mine + (at.kt & 1) * a.stage, 0, lane);
    uint32_t f[2][4];
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        u.ready();
        bar_wait(&k.bars->full[at.slot], at.turn);
        wgmma_publish();
        uint64_t rows = wgmma_desc(k.slots + at.slot * (MOST * 128));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<1>(); /* f[j & 1] has been read */
            if (j == 1 && c && lane == 0)
                bar_arrive(last); /* and all of the previous chunk */
            u.template frag<op_wgmma>(j, f[j & 1]);
            uint64_t b = rows + 2 * (uint64_t)j;
            /* no separate loop per width: each would get its own accumulator registers */
            if (count > W::C) {
                if (count > W::B)
                    gemm_persistent_multiply<W::A>(acc, f[j & 1], b);
                else
                    gemm_persistent_multiply<W::B>(acc, f[j & 1], b);
            } else if (count > W::E) {
                if (count > W::D)
                    gemm_persistent_multiply<W::C>(acc, f[j & 1], b);
                else
                    gemm_persistent_multiply<W::D>(acc, f[j & 1], b);
            } else
                gemm_persistent_multiply<W::E>(acc, f[j & 1], b);
        }
        int next = c + 1;
        if (next < chunks) {
            if (!(next & 3)) {
                bar_arrive(
                    &k.bars->codes_empty[at.kt & 1]); /* every lane releases what it has read */
                at.kt++;
                bar_wait(&k.bars->codes_full[at.kt & 1], at.kt >> 1);
            }
            u.fetch(mine + (at.kt & 1) * a.stage, next & 3, lane);
        }
        last = &k.bars->empty[at.slot];
        if (++at.slot == a.n_slots) {
            at.slot = 0;
            at.turn ^= 1;
        }
    }
    wgmma_wait<0>();
    if (lane == 0)
        bar_arrive(last);
    bar_arrive(&k.bars->codes_empty[at.kt & 1]);
    at.kt++;
}

/* Epilogue: results are written from registers (gemm_out.cuh). */

/* Warps w and w ^ 2 of a warpgroup hold matching gate and up sums. Of 16 columns, starting at n,
 * the first two warps keep the first 8 and receive the others' sums for them; the other two keep
 * the last 8. */
template <int MOST>
DEVICE void gemm_persistent_swap(const struct gemm_persistent_block &k, int n,
                                 const float (&acc)[MOST / 2], float (&low)[4], float (&high)[4])
{
    int w = warp_id(), up = w >> 1 & 1;
    float4 *swap = (float4 *)k.swap + (w >> 2) * 256 + (n & 1) * 128 + lane_id();
    float give[4], keep[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        give[i] = up ? acc[8 * n + i] : acc[8 * n + 4 + i];
        keep[i] = up ? acc[8 * n + 4 + i] : acc[8 * n + i];
    }
    swap[(w & 3) * 32] = make_float4(give[0], give[1], give[2], give[3]);
    named_barrier_sync(1 + (w >> 2), 128);
    float4 o = swap[((w & 3) ^ 2) * 32];
    float got[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low[i] = up ? got[i] : keep[i];
        high[i] = up ? keep[i] : got[i];
    }
}

/* Writes hidden units in the order of fragment_slot, with zeros from the last one to the end of the block: down
 * reads no further. */
template <int MOST, bool BIAS>
DEVICE void
gemm_persistent_store_pair(const struct gemm_args &p, const struct gemm_persistent_block &k,
                           const struct gemm_persistent_item &t, const float (&acc)[MOST / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3, w = warp_id();
    int row = (t.block * 8 + (w >> 2) * 2 + (w & 1)) * TILE_ROWS;
    int left = p.w.n_out / 2 - row - g;
    float bias[4] = {}; /* of gate, and of up: rows g and g + 8 */
    if (BIAS && p.w.bias)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & 1) * 8 < left)
                bias[i] = p.w.bias[t.expert * p.w.n_out + (i >> 1) * (p.w.n_out / 2) + row + g +
                                   (i & 1) * 8];
    uint16_t *y = p.y_fp16 + row + gemm_out_row();
#pragma unroll
    for (int n = 0; n < MOST / 16; n++) {
        if (n * 16 >= t.count)
            break;
        float gate[4], up[4], v[4];
        gemm_persistent_swap<MOST>(k, n, acc, gate, up);
        int col = n * 16 + (w >> 1 & 1) * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float scale = t.scale[col + 2 * c + (i & 1)];
            v[i] = (i >> 1) * 8 < left ? clamp_half(gated(p.act, gate[i] * scale + bias[i >> 1],
                                                          up[i] * scale + bias[2 + (i >> 1)]) *
                                                    HIDDEN_SCALE)
                                       : 0.0f;
        }
        uint2 h = gemm_out_transpose<2>(v);
        int out = t.out[col + g];
        if (out >= 0 && row < p.ldy)
            *(uint2 *)(y + (size_t)out * (size_t)p.ldy) = h;
    }
}

/* Writes fp16 scaled by HIDDEN_SCALE. The number of outputs is a multiple of four. */
template <int MOST, bool BIAS>
DEVICE void gemm_persistent_store_narrow(const struct gemm_args &p,
                                         const struct gemm_persistent_item &t, int tile,
                                         const float (&acc)[MOST / 2])
{
    int g = lane_id() >> 2, c = lane_id() & 3, row = tile * TILE_ROWS + gemm_out_row();
    uint16_t *y = (uint16_t *)p.y + row;
    float bias[2] = {}; /* rows g and g + 8 */
    if (BIAS && p.w.bias)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (tile * TILE_ROWS + g + 8 * i < p.w.n_out)
                bias[i] = p.w.bias[t.expert * p.w.n_out + tile * TILE_ROWS + g + 8 * i];
#pragma unroll
    for (int n = 0; n < MOST / 8; n++) {
        if (n * 8 >= t.count)
            break;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = clamp_half((acc[4 * n + i] * t.scale[8 * n + 2 * c + (i & 1)] + bias[i >> 1]) *
                              HIDDEN_SCALE);
        uint2 h = gemm_out_transpose<1>(v);
        int out = t.out[8 * n + g];
        if (out >= 0 && row < p.w.n_out)
            *(uint2 *)(y + (size_t)out * (size_t)p.ldy) = h;
    }
}

/* KIND: of all tiles, or ANY_K. */
template <int KIND, int MOST>
static __global__ void __launch_bounds__(PERSISTENT_THREADS, 1)
    gemm_persistent_kernel(const __grid_constant__ struct gemm_persistent_args a)
{
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, PERSISTENT_ALIGN);
    struct gemm_persistent_block k;
    k.slots = shared;
    k.ring = shared + a.n_slots * MOST * 128;
    k.swap = k.ring + PERSISTENT_STAGES * a.stage;
    k.items = (struct gemm_persistent_item *)(k.swap + PERSISTENT_SWAP);
    k.bars = (struct gemm_persistent_bars *)(k.items + 2);
    k.next = (int *)(k.bars + 1);
    int w = warp_id(), lane = lane_id();
    if (w == 0 && lane < PERSISTENT_SLOTS) {
        bar_init(&k.bars->full[lane], PERSISTENT_PRODUCERS);
        bar_init(&k.bars->empty[lane], PERSISTENT_CONSUMERS / 32);
        if (lane < 2) {
            bar_init(&k.bars->codes_full[lane], PERSISTENT_TILES);
            bar_init(&k.bars->codes_empty[lane], PERSISTENT_CONSUMERS);
            bar_init(&k.bars->item_full[lane], PERSISTENT_PRODUCERS);
            bar_init(&k.bars->rows_full[lane], MOST);
            bar_init(&k.bars->item_empty[lane], PERSISTENT_CONSUMERS);
        }
        bar_ready();
    }
    __syncthreads();
    dependency_wait();
    dependency_trigger();
    if (w >= PERSISTENT_CONSUMERS / 32) {
        registers_lower<PERSISTENT_PRODUCER_REGS>();
        gemm_persistent_produce<MOST>(a, k);
        return;
    }
    registers_raise<PERSISTENT_CONSUMER_REGS>();
    struct gemm_persistent_cursor at = {0, 0, 0};
#pragma unroll 1
    for (int it = 0;; it++) {
        bar_wait(&k.bars->item_full[it & 1], it >> 1);
        const struct gemm_persistent_item &t = k.items[it & 1];
        if (t.count < 0)
            break;
        float acc[MOST / 2] = {};
        wgmma_use(acc);
        if constexpr (KIND != ANY_K)
            gemm_persistent_loop<KIND, MOST>(a, k, at, t.chunks, t.count, acc);
        else if (t.kind == TILE_Q4_K)
            gemm_persistent_loop<TILE_Q4_K, MOST>(a, k, at, t.chunks, t.count, acc);
        else
            gemm_persistent_loop<TILE_Q6_K, MOST>(a, k, at, t.chunks, t.count, acc);
        wgmma_use(acc);
        bar_wait(&k.bars->rows_full[it & 1], it >> 1);
        const struct gemm_args &p = a.part[t.part];
        if (t.part) {
            gemm_persistent_store_narrow<MOST, KIND != ANY_K>(p, t, t.block * PERSISTENT_TILES + w,
                                                              acc);
        } else {
            gemm_persistent_store_pair<MOST, KIND != ANY_K>(p, k, t, acc);
            __threadfence();
            named_barrier_sync(1 + (w >> 2), 128);
            if ((threadIdx.x & 127) == 0)
                atomicAdd(&p.route.done[t.tile], 1);
        }
        bar_arrive(&k.bars->item_empty[it & 1]);
    }
}

static size_t gemm_persistent_shared(int tile_bytes, int most, int n_slots)
{
    return PERSISTENT_ALIGN + (size_t)(n_slots * most * 128) +
           (size_t)(PERSISTENT_STAGES * PERSISTENT_TILES * tile_bytes) + PERSISTENT_SWAP +
           2 * sizeof(struct gemm_persistent_item) + sizeof(struct gemm_persistent_bars) +
           2 * sizeof(int);
}

/* Whether both weights are of SET_K, or of one other kind. */
static bool gemm_persistent_kinds(const struct matrix *gate_up, const struct matrix *down)
{
    if (gate_up->set == SET_K && down->set == SET_K)
        return !gate_up->bias && !down->bias;
    bool one = false;
    codes_set(gate_up, [&](auto k) { one = k.VALUE != ANY_CODES; });
    return one && matrix_kind(gate_up) == matrix_kind(down);
}

bool gemm_persistent_suits(const struct cuda_backend *cu, const struct matrix *gate_up,
                           const struct matrix *down)
{
    int bytes = gate_up->max_tile_bytes, other = down->max_tile_bytes;
    bytes = other > bytes ? other : bytes;
    return gemm_persistent_kinds(gate_up, down) && gemm_wgmma_suits(cu, gate_up, true) &&
           gemm_wgmma_suits(cu, down, false) &&
           gemm_persistent_shared(bytes, PERSISTENT_ROWS, 4) <= cu->shared_limit;
}

template <int KIND, int MOST>
static void gemm_persistent_launch(struct cuda_backend *cu, struct gemm_persistent_args *a)
{
    int bytes = a->part[0].w.max_tile_bytes, other = a->part[1].w.max_tile_bytes;
    bytes = other > bytes ? other : bytes;
    a->stage = PERSISTENT_TILES * bytes;
    a->n_slots = PERSISTENT_SLOTS;
    while (gemm_persistent_shared(bytes, MOST, a->n_slots) > cu->shared_limit)
        a->n_slots--;
    cuda_launch(cu, gemm_persistent_kernel<KIND, MOST>, dim3((unsigned)cu->n_sm),
                PERSISTENT_THREADS, gemm_persistent_shared(bytes, MOST, a->n_slots), LAUNCH_EARLY,
                *a);
}
template <int KIND>
static void gemm_persistent_sized(struct cuda_backend *cu, struct gemm_persistent_args *a,
                                  int width)
{
    if (width == PERSISTENT_ROWS)
        gemm_persistent_launch<KIND, PERSISTENT_ROWS>(cu, a);
    else
        gemm_persistent_launch<KIND, 64>(cu, a);
}

static int gemm_persistent_blocks(const struct gemm_args &p)
{
    return p.y_fp16 ? ceil_div(p.w.n_tiles / 2, 8) : ceil_div(p.w.n_tiles, PERSISTENT_TILES);
}

int gemm_persistent_expert_rows(int pairs, int n_expert)
{
    return ceil_div(pairs, n_expert) > 44 ? PERSISTENT_ROWS : 64;
}

void gemm_persistent_experts(struct cuda_backend *cu, const struct gemm_args &in,
                             const struct gemm_args &out, int width)
{
    struct gemm_persistent_args a = {};
    a.part[0] = in;
    a.part[1] = out;
    a.blocks[0] = gemm_persistent_blocks(in);
    a.blocks[1] = gemm_persistent_blocks(out);
    if (in.w.set == SET_K)
        gemm_persistent_sized<ANY_K>(cu, &a, width);
    else
        codes_set(&in.w, [&](auto k) {
            if constexpr (k.VALUE != ANY_CODES)
                gemm_persistent_sized<k.VALUE>(cu, &a, width);
        });
}
