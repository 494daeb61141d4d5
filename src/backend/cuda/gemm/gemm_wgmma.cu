/*
 * y = x W^T for many rows on Hopper (sm_90a), computed as y^T = W x^T with wgmma, the weights as
 * register operand.
 * Mapping: a block computes 256 output rows, 64 per consumer warpgroup (PAIR: gate and up of the
 * same hidden units), x up to 128 token rows. k is split where there are few blocks.
 * Warp roles: four consumer warpgroups and one producer. The producer copies codes by k tiles and
 * activations by chunks of 64 columns through rings of the block, with full and empty barriers. A
 * consumer warp converts the codes of its 16 rows to fp16 fragments one step ahead of the product
 * that uses them.
 * The work list, the input rows and the output's layout are chosen in pick.cu.
 * Limit: issue slots. On an H200 the loop alone reaches 960 TFLOP/s with decoding; long products
 * reach 670 (feed-forward of the 8B), the output projection of the 30B-A3B 620.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum { WGMMA_N = WGMMA_ROWS, WGMMA_ALIGN = 1024 };
/* Four consumer warpgroups, for two units of 128 output rows; one producer. */
enum { WGMMA_UNITS = 2, WGMMA_CONSUMERS = 256 * WGMMA_UNITS, WGMMA_PRODUCERS = 128 };
enum { WGMMA_THREADS = WGMMA_CONSUMERS + WGMMA_PRODUCERS };
/* Registers of a consumer and of a producer thread. */
enum { WGMMA_CONSUMER_REGS = 112, WGMMA_PRODUCER_REGS = 32 };

enum { WGMMA_MOST_SLOTS = 6, WGMMA_TILES = 8 * WGMMA_UNITS };

/* Stages of the activations' ring: what fits beside the ring of codes. */
static __host__ __device__ constexpr int gemm_wgmma_slots(int tile_bytes)
{
    return tile_bytes <= format<TILE_Q6_K>::BYTES ? WGMMA_MOST_SLOTS : 4;
}
/* Chunks of codes per copy: a k tile, or less if a k tile would be too large. */
static __host__ __device__ constexpr int gemm_wgmma_step(int tile_bytes)
{
    return tile_bytes <= format<TILE_Q8_0>::BYTES ? 4 : 1;
}

/* Barriers for chunks of activations and k tiles of codes: full (landed) and empty (released). */
struct gemm_wgmma_bars {
    uint64_t full[WGMMA_MOST_SLOTS], empty[WGMMA_MOST_SLOTS], codes_full[2], codes_empty[2];
};

struct gemm_wgmma_block {
    uint8_t *ring;  /* (2, WGMMA_TILES, gemm_wgmma_step chunks of a tile) */
    uint8_t *slots; /* (gemm_wgmma_slots, N, 128 bytes) */
    struct gemm_wgmma_bars *bars;
    int n_kt;
};

/* The producer warpgroup. Each of its first threads copies one row of tiles. */
DEVICE void gemm_wgmma_produce(const struct gemm_wgmma_block &k, const uint8_t *from,
                               int tile_bytes, const uint16_t *x, const int *rows_in, int ldx,
                               int n)
{
    const int STEP = WGMMA_PRODUCERS / 8, PER = WGMMA_N / STEP;
    int id = (int)threadIdx.x - WGMMA_CONSUMERS, piece = id & 7, row0 = id >> 3;
    int n_slots = gemm_wgmma_slots(tile_bytes);
    uint32_t at[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int in = rows_in[row0 + i * STEP];
        in = in < 0 ? rows_in[0] : in; /* columns nobody reads */
        at[i] = (uint32_t)in * (uint32_t)ldx + (uint32_t)piece * 8;
    }
    uint8_t *dst = k.slots + row0 * 128 + ((piece ^ (row0 & 7)) << 4);
    int slot = 0, turn = 1, chunks = k.n_kt * 4, stage = 0, codes_turn = 1;
    int step = gemm_wgmma_step(tile_bytes), bytes = tile_bytes / 4 * step;
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        if (!(c & (step - 1))) {
            bar_wait(&k.bars->codes_empty[stage], codes_turn);
            if (id < WGMMA_TILES) {
                bar_expect(&k.bars->codes_full[stage], bytes);
                bar_copy(&k.bars->codes_full[stage], k.ring + (stage * WGMMA_TILES + id) * bytes,
                         from, bytes);
                from += bytes;
            }
            codes_turn ^= stage;
            stage ^= 1;
        }
        bar_wait(&k.bars->empty[slot], turn);
        int to = slot * (n * 128);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (STEP * i < n)
                copy_async16(dst + to + i * (STEP * 128), x + at[i]);
        bar_arrive_copies(&k.bars->full[slot]);
        x += 64;
        if (++slot == n_slots) {
            slot = 0;
            turn ^= 1;
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* acc += a warp's tile x N rows. A chunk is 64 columns; a k tile is four chunks. */
template <int KIND, int N>
DEVICE void gemm_wgmma_loop(const struct gemm_wgmma_block &k, int tile, float (&acc)[WGMMA_N / 2])
{
    const int SLOTS = gemm_wgmma_slots(format<KIND>::BYTES), SLOT = N * 128;
    const int STEP = gemm_wgmma_step(format<KIND>::BYTES), BYTES = format<KIND>::BYTES / 4 * STEP;
    int lane = lane_id(), slot = 0, turn = 0, chunks = k.n_kt * 4;
    const uint8_t *mine = k.ring + tile * BYTES;
    uint64_t *last = NULL;
    format<KIND> w;
    bar_wait(&k.bars->codes_full[0], 0);
    w.fetch(mine, 0, lane);
    uint32_t a[2][4];
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        w.ready();
        bar_wait(&k.bars->full[slot], turn);
        wgmma_publish();
        uint64_t desc = wgmma_desc(k.slots + slot * SLOT);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<1>(); /* a[j & 1] has been read */
            if (j == 1 && c && lane == 0)
                bar_arrive(last); /* and all of the previous chunk */
            w.template frag<op_wgmma>(j, a[j & 1]);
            wgmma_fence();
            wgmma<N>(acc, a[j & 1], desc + 2 * (uint64_t)j);
            wgmma_commit();
        }
        int next = c + 1, stage = next / STEP & 1;
        if (next < chunks) {
            if (!(next & (STEP - 1))) {
                bar_arrive(
                    &k.bars->codes_empty[stage ^ 1]); /* every lane releases what it has read */
                bar_wait(&k.bars->codes_full[stage], next / (2 * STEP));
            }
            w.fetch(mine + stage * (WGMMA_TILES * BYTES), next & (STEP - 1), lane);
        }
        last = &k.bars->empty[slot];
        if (++slot == SLOTS) {
            slot = 0;
            turn ^= 1;
        }
    }
    wgmma_wait<0>();
}

/* Width of the product for `count` rows. FEW: not every kernel has every width, to limit compile
 * time. */
template <bool FEW> DEVICE int gemm_wgmma_columns(int count)
{
    if (FEW)
        return count > 64 ? 128 : 64;
    return count > 64 ? (count + 15) & ~15 : count > 32 ? 64 : 32;
}

template <int KIND, bool FEW>
DEVICE void gemm_wgmma_width(const struct gemm_wgmma_block &k, int tile, int count,
                             float (&acc)[WGMMA_N / 2])
{
    if (count > 112 || (FEW && count > 64))
        gemm_wgmma_loop<KIND, 128>(k, tile, acc);
    else if (FEW)
        gemm_wgmma_loop<KIND, 64>(k, tile, acc);
    else if (count > 96)
        gemm_wgmma_loop<KIND, FEW ? 64 : 112>(k, tile, acc);
    else if (count > 80)
        gemm_wgmma_loop<KIND, FEW ? 64 : 96>(k, tile, acc);
    else if (count > 64)
        gemm_wgmma_loop<KIND, FEW ? 64 : 80>(k, tile, acc);
    else if (count > 32)
        gemm_wgmma_loop<KIND, 64>(k, tile, acc);
    else
        gemm_wgmma_loop<KIND, FEW ? 64 : 32>(k, tile, acc);
}

/* Whether results combine gate and up. */
DEVICE bool gemm_wgmma_pairs(const struct gemm_args &p)
{
    return p.y_fp16 && !p.act.ungated;
}

/* Row tile of warp w of a block. Tiles past the end are computed and discarded. */
DEVICE int gemm_wgmma_tile_of(const struct gemm_args &p, int block, int w)
{
    if (!gemm_wgmma_pairs(p))
        return min(block * 8 + w, p.w.n_tiles - 1);
    int half = p.w.n_tiles / 2; /* gate, then up of the same hidden units */
    return min(block * 4 + (w & 3), half - 1) + (w >> 2) * half;
}

/*
 * Epilogue: results are written through shared memory. The 128 sums of a column of the block are
 * contiguous there, and a warp writes one column at a time. A lane has rows 4 lane .. 4 lane + 3 of
 * the block (PAIR: gate and up of hidden units 2 lane, 2 lane + 1), so its work is the same for all
 * columns. Short code matters here, because every block runs it only once.
 */
enum { WGMMA_STRIDE = 128 * WGMMA_UNITS + 4 };

struct gemm_wgmma_lane {
    int at, left; /* column of its first row in a result row (-1: none); rows that exist */
    float bias[4];
    float gain[4]; /* gain of a head's norm */
    bool norm;
};

DEVICE struct gemm_wgmma_lane gemm_wgmma_lane_of(const struct gemm_args &p, int block, int expert)
{
    struct gemm_wgmma_lane l = {};
    int lane = lane_id();
    const float *bias = p.w.bias + (p.w.bias ? expert * p.w.n_out : 0);
    if (gemm_wgmma_pairs(p)) {
        int row = block * 64 + 2 * lane;
        l.at = row < p.ldy ? fragment_slot(row) : -1;
        l.left = p.w.n_out / 2 - row; /* zeros from there up to a whole k tile */
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (p.w.bias && (i & 1) < l.left)
                l.bias[i] = bias[(i >> 1) * (p.w.n_out / 2) + row + (i & 1)];
        return l;
    }
    int tile = block * 8 + (lane >> 2);
    const struct seg *s = seg_of(p.w, tile);
    int row = (tile - s->tile0) * TILE_ROWS + (lane & 3) * 4;
    l.at = s->row0 + row;
    l.left = tile < p.w.n_tiles ? s->rows - row : 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (p.w.bias && i < l.left)
            l.bias[i] = bias[l.at + i];
    const struct gemm_heads &h = p.heads;
    const float *gain = block < h.n_heads ? h.q_norm : h.k_norm;
    l.norm = h.set && gain && block < h.n_heads + h.n_kv;
    if (l.norm) {
        float4 g = *(const float4 *)(gain + 4 * lane);
        l.gain[0] = g.x, l.gain[1] = g.y, l.gain[2] = g.z, l.gain[3] = g.w;
    }
    return l;
}

/* A lane's part of a column of 128 sums. */
DEVICE float4 gemm_wgmma_column(const struct gemm_args &p, const float *column)
{
    if (!gemm_wgmma_pairs(p))
        return *(const float4 *)(column + 4 * lane_id());
    float2 gate = *(const float2 *)(column + 2 * lane_id());
    float2 up = *(const float2 *)(column + 64 + 2 * lane_id());
    return make_float4(gate.x, gate.y, up.x, up.y);
}

/* A warp writes one head of B token rows (t < 0: none); a lane has elements 4 lane .. 4 lane + 3.
 * All loads are issued first. */
template <int B>
DEVICE void gemm_wgmma_heads(const struct gemm_heads &h, const struct gemm_wgmma_lane &l, int head,
                             const int (&t)[B], float (&v)[B][4])
{
    int lane = lane_id(), kv = head - h.n_heads;
    if (kv >= 2 * h.n_kv) /* a unit past the end */
        return;
    float4 turn[B][2] = {}; /* cos, sin of two elements */
    int slot[B] = {};
#pragma unroll
    for (int b = 0; b < B; b++) {
        int row = max(t[b], 0);
        const float4 *from = (const float4 *)(h.rope + (size_t)row * 64 + 4 * (lane & 15));
        if (kv < h.n_kv) {
            turn[b][0] = from[0];
            turn[b][1] = from[1];
        }
        if (kv >= 0)
            slot[b] = h.slot[row];
    }
    if (l.norm) {
        float sum[B];
#pragma unroll
        for (int b = 0; b < B; b++)
            sum[b] = v[b][0] * v[b][0] + v[b][1] * v[b][1] + v[b][2] * v[b][2] + v[b][3] * v[b][3];
#pragma unroll
        for (int i = 16; i; i >>= 1)
#pragma unroll
            for (int b = 0; b < B; b++)
                sum[b] += __shfl_xor_sync(FULL_WARP, sum[b], i);
#pragma unroll
        for (int b = 0; b < B; b++) {
            float rms = rsqrtf(sum[b] / 128.0f + h.eps);
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[b][i] = v[b][i] * rms * l.gain[i];
        }
    }
    if (kv < h.n_kv) /* element i is rotated with i + 64 */
#pragma unroll
        for (int b = 0; b < B; b++) {
            float4 x = turn[b][0], y = turn[b][1];
            float c[4] = {x.x, x.z, y.x, y.z}, s[4] = {x.y, x.w, y.y, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float other = __shfl_xor_sync(FULL_WARP, v[b][i], 16);
                v[b][i] = v[b][i] * c[i] + (lane < 16 ? -other : other) * s[i];
            }
        }
    uint16_t *cache = kv < h.n_kv ? h.k : h.v;
    int kv_head = kv < h.n_kv ? kv : kv - h.n_kv;
#pragma unroll
    for (int b = 0; b < B; b++) {
        if (t[b] < 0 || slot[b] < 0)
            continue;
        if (kv < 0) {
            float *q = h.q + ((size_t)t[b] * (size_t)h.n_heads + (size_t)head) * 128 + 4 * lane;
            *(float4 *)q = make_float4(v[b][0], v[b][1], v[b][2], v[b][3]);
            continue;
        }
        int page = slot[b] / h.page_len, off = slot[b] - page * h.page_len;
        uint16_t *to =
            cache +
            (((size_t)page * (size_t)h.n_kv + (size_t)kv_head) * (size_t)h.page_len + (size_t)off) *
                128;
        *(uint2 *)(to + 4 * lane) =
            h.bf16 ? make_uint2(pack_bf162(v[b][0], v[b][1]), pack_bf162(v[b][2], v[b][3]))
                   : make_uint2(pack_half2(v[b][0], v[b][1]), pack_half2(v[b][2], v[b][3]));
    }
}

DEVICE void gemm_wgmma_store(const struct gemm_args &p, const struct gemm_wgmma_lane &l,
                             const struct gemm_rows &rows, int block, int col, float4 sums)
{
    float scale = rows.scale[col];
    size_t at = (size_t)rows.out[col] * (size_t)p.ldy + (size_t)l.at;
    float v[4] = {sums.x * scale + l.bias[0], sums.y * scale + l.bias[1],
                  sums.z * scale + l.bias[2], sums.w * scale + l.bias[3]};
    if (p.heads.set) {
        const int t[1] = {rows.out[col]};
        float one[1][4] = {{v[0], v[1], v[2], v[3]}};
        gemm_wgmma_heads(p.heads, l, block, t, one);
    } else if (p.y_fp16 && p.act.ungated) { /* four consecutive hidden units: see fragment_slot */
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = i < l.left ? clamp_half(gated(p.act, v[i], 1.0f) * HIDDEN_SCALE) : 0.0f;
        uint16_t *to =
            p.y_fp16 + (size_t)rows.out[col] * (size_t)p.ldy + (size_t)fragment_slot(l.at);
        *(uint32_t *)to = pack_half2(v[0], v[1]);
        *(uint32_t *)(to + 8) = pack_half2(v[2], v[3]);
    } else if (p.y_fp16) {
        if (l.at < 0)
            return;
#pragma unroll
        for (int i = 0; i < 2; i++)
            v[i] = i < l.left ? clamp_half(gated(p.act, v[i], v[i + 2]) * HIDDEN_SCALE) : 0.0f;
        *(uint32_t *)(p.y_fp16 + at) = pack_half2(v[0], v[1]);
    } else if (p.narrow) { /* result rows are multiples of four */
        if (l.left > 0) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = clamp_half(v[i] * HIDDEN_SCALE);
            *(uint2 *)((uint16_t *)p.y + at) =
                make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
        }
    } else if (l.left >= 4 && !((p.ldy | l.at) & 3))
        *(float4 *)(p.y + at) = make_float4(v[0], v[1], v[2], v[3]);
    else
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < l.left)
                p.y[at + (size_t)i] = v[i];
}

/* Address of a column's partial sums of a split-k product: (k splits, row tiles, blocks, columns,
 * 128). */
DEVICE float *gemm_wgmma_part(const struct gemm_args &p, int piece, int block, int col)
{
    size_t at = ((size_t)piece * gridDim.y + blockIdx.y) * (size_t)p.blocks + (size_t)block;
    return p.part + (at * WGMMA_N + (size_t)col) * 128;
}

DEVICE void gemm_wgmma_tables(struct gemm_rows &rows, uint8_t *at)
{
    rows.in = (int *)at;
    rows.out = rows.in + WGMMA_N;
    rows.scale = (float *)(rows.out + WGMMA_N);
}

/* Grid: (blocks of 128 output rows, WGMMA_UNITS of them; tiles of token rows; k splits). */
template <int SET>
static __global__ void __launch_bounds__(WGMMA_THREADS, 1)
    gemm_wgmma_kernel(const __grid_constant__ struct gemm_args p)
{
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, WGMMA_ALIGN);
    struct gemm_rows rows;
    struct gemm_wgmma_block k;
    /* after the rings, whose size depends on the format of the weights */
    gemm_wgmma_tables(rows, shared + p.slot);
    k.bars = (struct gemm_wgmma_bars *)(rows.scale + WGMMA_N);
    int w = warp_id(), lane = lane_id(), unit = w >> 3;
    if (w == WGMMA_CONSUMERS / 32 && lane < WGMMA_MOST_SLOTS) {
        bar_init(&k.bars->full[lane], WGMMA_PRODUCERS);
        bar_init(&k.bars->empty[lane], WGMMA_CONSUMERS / 32);
        if (lane < 2) {
            bar_init(&k.bars->codes_full[lane], WGMMA_TILES);
            bar_init(&k.bars->codes_empty[lane], WGMMA_CONSUMERS);
        }
        bar_ready();
    }
    dependency_wait();
    dependency_trigger();
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, p.width, WGMMA_N))
        return;
    const bool FEW = SET != SET_K;
    int kt0 = (int)blockIdx.z * p.kt_per, block = (int)blockIdx.x * WGMMA_UNITS + unit;
    const struct seg *s = seg_of(p.w, gemm_wgmma_tile_of(p, (int)blockIdx.x * WGMMA_UNITS, 0));
    k.slots = shared;
    k.ring = shared + p.slot - WGMMA_TILES / 2 * gemm_wgmma_step(s->tile_bytes) * s->tile_bytes;
    k.n_kt = min(p.kt_per, p.w.n_kt - kt0);
    if (w >= WGMMA_CONSUMERS / 32) {
        registers_lower<WGMMA_PRODUCER_REGS>();
        int mine = min((int)threadIdx.x - WGMMA_CONSUMERS, (int)WGMMA_TILES - 1);
        int tile = gemm_wgmma_tile_of(p, (int)blockIdx.x * WGMMA_UNITS + (mine >> 3), mine & 7);
        const uint8_t *from = tile_address(p.w, seg_of(p.w, tile), rows.expert, tile, kt0);
        gemm_wgmma_produce(k, from, s->tile_bytes, p.x + kt0 * TILE_K, rows.in, p.ldx,
                           gemm_wgmma_columns<FEW>(rows.count));
        return;
    }
    registers_raise<WGMMA_CONSUMER_REGS>();
    float acc[WGMMA_N / 2] = {};
    wgmma_use(acc);
    if (s->kind == TILE_Q4_K)
        gemm_wgmma_width<TILE_Q4_K, FEW>(k, w, rows.count, acc);
    else if (SET == SET_K || s->kind == TILE_Q6_K)
        gemm_wgmma_width<TILE_Q6_K, FEW>(k, w, rows.count, acc);
    else if constexpr (SET != SET_K) {
        if (s->kind == TILE_F16)
            gemm_wgmma_width<TILE_F16, FEW>(k, w, rows.count, acc);
        else if (s->kind == TILE_F8)
            gemm_wgmma_width<TILE_F8, FEW>(k, w, rows.count, acc);
        else if (s->kind == TILE_LEVELS)
            gemm_wgmma_width<TILE_LEVELS, FEW>(k, w, rows.count, acc);
        else
            quant_kind(s->kind, [&](auto kind) {
                gemm_wgmma_width<kind.VALUE, FEW>(k, w, rows.count, acc);
            });
    }
    wgmma_use(acc);
    named_barrier_sync(1, WGMMA_CONSUMERS); /* the rings are no longer read */
    float *sums = (float *)shared;          /* (columns, WGMMA_STRIDE) */
    {
        float *to = sums + 2 * (lane & 3) * WGMMA_STRIDE + w * 16 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < WGMMA_N / 8; n++) {
            if (n * 8 >= rows.count)
                break;
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[(n * 8 + (i & 1)) * WGMMA_STRIDE + (i >> 1) * 8] = acc[4 * n + i];
        }
    }
    named_barrier_sync(1, WGMMA_CONSUMERS);
    struct gemm_wgmma_lane l = gemm_wgmma_lane_of(p, block, rows.expert);
    if (p.heads.set && !p.part) {
        enum { AT_ONCE = 4 };
#pragma unroll 1
        for (int col = w & 7; col < rows.count; col += 8 * AT_ONCE) {
            int t[AT_ONCE];
            float v[AT_ONCE][4];
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                int at = min(col + 8 * b, WGMMA_N - 1);
                float4 f = *(const float4 *)(sums + at * WGMMA_STRIDE + unit * 128 + 4 * lane);
                float scale = rows.scale[at];
                t[b] = rows.out[at]; /* -1 past the end */
                v[b][0] = f.x * scale + l.bias[0], v[b][1] = f.y * scale + l.bias[1];
                v[b][2] = f.z * scale + l.bias[2], v[b][3] = f.w * scale + l.bias[3];
            }
            gemm_wgmma_heads(p.heads, l, block, t, v);
        }
        return;
    }
#pragma unroll 4
    for (int col = w & 7; col < rows.count; col += 8) {
        const float *column = sums + col * WGMMA_STRIDE + unit * 128;
        if (p.part)
            ((float4 *)gemm_wgmma_part(p, (int)blockIdx.z, block, col))[lane] =
                ((const float4 *)column)[lane];
        else
            gemm_wgmma_store(p, l, rows, block, col, gemm_wgmma_column(p, column));
    }
}

enum { WGMMA_REDUCE_THREADS = 128 };

/* Adds up the k splits in order. Grid: (as above, as above, columns / 8). */
static __global__ void __launch_bounds__(WGMMA_REDUCE_THREADS)
    gemm_wgmma_sum_kernel(const __grid_constant__ struct gemm_args p)
{
    SHARED_BYTES(shared);
    struct gemm_rows rows;
    dependency_wait();
    dependency_trigger();
    gemm_wgmma_tables(rows, shared);
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, p.width, WGMMA_N))
        return;
    struct gemm_wgmma_lane l = gemm_wgmma_lane_of(p, (int)blockIdx.x, rows.expert);
    int first = (int)blockIdx.z * 8 + warp_id();
#pragma unroll
    for (int col = first; col < first + 8; col += 4) {
        if (col >= rows.count)
            break;
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i * p.kt_per < p.w.n_kt; i++) {
            float4 f = gemm_wgmma_column(p, gemm_wgmma_part(p, i, (int)blockIdx.x, col));
            sums.x += f.x, sums.y += f.y, sums.z += f.z, sums.w += f.w;
        }
        gemm_wgmma_store(p, l, rows, (int)blockIdx.x, col, sums);
    }
}

/* Blocks that run at a time. With fewer, k is split. */
static int gemm_wgmma_blocks(const struct cuda_backend *cu)
{
    return 2 * cu->n_sm;
}

size_t gemm_wgmma_part_bytes(const struct cuda_backend *cu)
{
    return cu->can.wgmma ? (size_t)gemm_wgmma_blocks(cu) * 128 * WGMMA_N * sizeof(float) : 0;
}

/* Bytes before the tables of rows, and in all. */
static size_t gemm_wgmma_shared(const struct matrix &w, size_t *tables)
{
    size_t slots = 0;
    for (int i = 0; i < w.n_seg; i++) {
        size_t n =
            (size_t)gemm_wgmma_slots(w.seg[i].tile_bytes) * WGMMA_N * 128 +
            (size_t)(WGMMA_TILES / 2 * gemm_wgmma_step(w.seg[i].tile_bytes) * w.seg[i].tile_bytes);
        slots = n > slots ? n : slots;
    }
    size_t sums = (size_t)(WGMMA_N * WGMMA_STRIDE) * sizeof(float);
    slots = slots > sums ? slots : sums;
    *tables = slots;
    return WGMMA_ALIGN + slots + 3 * WGMMA_N * 4 + sizeof(struct gemm_wgmma_bars);
}

/* Every block needs tiles of one kind. */
bool gemm_wgmma_suits(const struct cuda_backend *cu, const struct matrix *w, bool pair)
{
    size_t tables;
    if (!cu->can.wgmma || w->set == SET_ALL || gemm_wgmma_shared(*w, &tables) > cu->shared_limit)
        return false;
    for (int i = 1; i < w->n_seg; i++)
        if (w->seg[i].kind != w->seg[0].kind && (pair || w->seg[i].tile0 % WGMMA_TILES))
            return false;
    return !pair || w->n_seg == 1 || (w->n_seg == 2 && w->seg[0].n_tiles == w->seg[1].n_tiles);
}

/* Chooses the rows per tile so that the last round of blocks is not nearly empty: decoding, start
 * and end of a block take about as long as the products of 100 rows. Returns the number of
 * tiles. */
static int gemm_wgmma_balance(const struct cuda_backend *cu, int x, int rows, int *width)
{
    int best = 0, tiles = 0;
    for (int w = WGMMA_N; w >= 80; w -= 16) {
        int y = ceil_div(rows, w), cost = ceil_div(x * y, cu->n_sm) * (w + 100);
        if (!tiles || cost < best) {
            best = cost;
            tiles = y;
            *width = w;
        }
    }
    return tiles;
}

/* k splits of an exact step, by the weight alone: x blocks of rows, EXACT_K k tiles in each split at least. A step of
 * one row has few blocks, and every split of a long step costs a write and a read of its sums. */
enum { EXACT_K = 4, EXACT_SPLITS = 8 };
static int gemm_wgmma_exact_splits(const struct cuda_backend *cu, const struct matrix &w, int x)
{
    int n = w.n_kt / EXACT_K, most = cu->n_sm / x;
    n = n < most ? n : most;
    return n < 1 ? 1 : n < EXACT_SPLITS ? n : (int)EXACT_SPLITS;
}

/* The rows from tile `first` on. */
static struct gemm_args gemm_wgmma_rows_from(struct gemm_args p, int first)
{
    size_t rows = (size_t)(first * WGMMA_N), at = rows * (size_t)p.ldy;
    p.x += rows * (size_t)p.ldx;
    p.x_scale = p.x_scale ? p.x_scale + rows : NULL;
    if (p.y_fp16)
        p.y_fp16 += at;
    else
        p.y = p.narrow ? (float *)((uint16_t *)p.y + at) : p.y + at;
    p.rows -= first * WGMMA_N;
    return p;
}

/* A product in `pieces` k splits whatever its rows, as many rows at a time as the splits' sums have room for. */
template <int SET>
static void gemm_wgmma_launch_exact(struct cuda_backend *cu, const struct gemm_args &p, int x,
                                    int y, int pieces, size_t shared)
{
    int room = gemm_wgmma_blocks(cu) / (p.blocks * pieces);
    for (int first = 0; first < y; first += room) {
        struct gemm_args part = gemm_wgmma_rows_from(p, first);
        int n = y - first < room ? y - first : room;
        part.rows = part.rows < n * WGMMA_N ? part.rows : n * WGMMA_N;
        cuda_launch(cu, gemm_wgmma_kernel<SET>, dim3((unsigned)x, (unsigned)n, (unsigned)pieces),
                    WGMMA_THREADS, shared, LAUNCH_EARLY, part);
        cuda_launch(cu, gemm_wgmma_sum_kernel, dim3((unsigned)p.blocks, (unsigned)n, WGMMA_N / 8),
                    WGMMA_REDUCE_THREADS, (size_t)(3 * WGMMA_N * 4), LAUNCH_EARLY, part);
    }
}

template <int SET>
static void gemm_wgmma_launch(struct cuda_backend *cu, struct gemm_args p, bool pair, int y)
{
    size_t tables, shared = gemm_wgmma_shared(p.w, &tables);
    p.slot = (int)tables;
    int tiles = p.y_fp16 ? p.ldy / TILE_ROWS : p.w.n_tiles;
    int x = ceil_div(ceil_div(tiles, pair ? 4 : 8), WGMMA_UNITS);
    p.blocks = x * WGMMA_UNITS;
    int pieces = p.moe       ? 1
                 : cu->exact ? gemm_wgmma_exact_splits(cu, p.w, x)
                             : gemm_wgmma_blocks(cu) / (p.blocks * y);
    p.width = WGMMA_N;
    if (pieces <= 1 && !p.moe && SET == SET_K)
        y = gemm_wgmma_balance(cu, x, p.rows, &p.width);
    p.kt_per = p.w.n_kt;
    if (pieces > 1) {
        p.kt_per = ceil_div(p.w.n_kt, pieces);
        p.part = cu->splitk_sums;
    }
    pieces = ceil_div(p.w.n_kt, p.kt_per);
    p.part = pieces > 1 ? p.part : NULL;
    if (pieces > 1 && cu->exact) {
        gemm_wgmma_launch_exact<SET>(cu, p, x, y, pieces, shared);
        return;
    }
    cuda_launch(cu, gemm_wgmma_kernel<SET>, dim3((unsigned)x, (unsigned)y, (unsigned)pieces),
                WGMMA_THREADS, shared, LAUNCH_EARLY, p);
    if (pieces > 1)
        cuda_launch(cu, gemm_wgmma_sum_kernel, dim3((unsigned)p.blocks, (unsigned)y, WGMMA_N / 8),
                    WGMMA_REDUCE_THREADS, (size_t)(3 * WGMMA_N * 4), LAUNCH_EARLY, p);
}

void gemm_wgmma(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int y)
{
    if (p.w.set == SET_K)
        gemm_wgmma_launch<SET_K>(cu, p, pair, y);
    else
        gemm_wgmma_launch<SET_FAST>(cu, p, pair, y);
}

static __global__ void probe_kernel(int *there)
{
    *there = wgmma_compiled();
}

/* Whether this program was built for this GPU: sm_90a code runs nowhere else, and other code has no
 * wgmma. */
bool gemm_wgmma_available(struct cuda_backend *cu, int *scratch)
{
    int there = 0;
    if (cu->sm != 90)
        return false;
    cuda_launch(cu, probe_kernel, dim3(1), 32, 0, LAUNCH_PLAIN, scratch);
    CUDA_TRY(cu,
             cudaMemcpyAsync(&there, scratch, sizeof there, cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    return there;
}
