/*
 * Attention of a decode of many sequences: enough of them that a block takes one whole (sequence,
 * up to 8 heads of one kv head), so nothing has to be joined between blocks. The warps of a block
 * share the keys, 16 at a time ("a tile"), which travel through a ring of each warp's own in
 * shared memory: by the copy engine, so that no register waits for them and memory always has
 * work, and those of earlier steps before the kernel in front has finished.
 *
 * Products as in attn_decode.cu: the 16 rows of A are the 8 heads twice, what rounds to the cache's
 * type and what that rounding lost. Keys lie in shared memory in runs that are 64 bytes further
 * apart than in the cache, and which key is which column is chosen so that reads of 16 bytes meet
 * few banks twice.
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/rows.cuh"

#include <math.h>

enum { BATCH_KEYS = 16 };

/* A tile in shared memory: K in two runs of 8 keys, V in four of 4. */
template <int D> struct attn_decode_batch_tile {
    enum {
        ROW = 2 * D, /* bytes */
        K_RUN = 8 * ROW,
        V_RUN = 4 * ROW,
        V = 2 * (K_RUN + 64), /* where V begins */
        BYTES = V + 4 * (V_RUN + 64)
    };
    static __device__ __forceinline__ int k_row(int key)
    {
        return (key >> 3) * (K_RUN + 64) + (key & 7) * ROW;
    }
    static __device__ __forceinline__ int v_row(int key)
    {
        return V + (key >> 2) * (V_RUN + 64) + (key & 3) * ROW;
    }
};

/* One warp asks for the 16 keys and values that begin at k and v. */
template <int D>
DEVICE void attn_decode_batch_fetch(uint8_t *to, const uint8_t *k, const uint8_t *v, uint64_t *bar)
{
    typedef attn_decode_batch_tile<D> tile;
    int lane = lane_id();
#if BULK_COPIES
    if (lane == 0)
        bulk_expect(bar, 2 * BATCH_KEYS * tile::ROW);
    __syncwarp();
    if (lane < 2)
        bulk_piece(to + tile::k_row(8 * lane), k + lane * tile::K_RUN, tile::K_RUN, bar);
    else if (lane < 6)
        bulk_piece(to + tile::v_row(4 * (lane - 2)), v + (lane - 2) * tile::V_RUN, tile::V_RUN,
                   bar);
#else
    (void)bar;
    for (int i = lane; i < BATCH_KEYS * (D / 8); i += 32) {
        int key = i / (D / 8), piece = i % (D / 8) * 16;
        copy_async16(to + tile::k_row(key) + piece, k + key * tile::ROW + piece);
        copy_async16(to + tile::v_row(key) + piece, v + key * tile::ROW + piece);
    }
    copy_async_commit();
#endif
}

/* Bytes of shared memory. Behind the rings: the tiles' barriers, queries as numbers of the
 * cache's type and what those lost, this step's key and value, a head for every warp to turn,
 * maxima and sums. The warps' parts of the result take the place of the rings. */
template <int D> static constexpr size_t attn_decode_batch_shared(int warps, int rounds)
{
    return (size_t)(warps * rounds * (attn_decode_batch_tile<D>::BYTES + 8)) +
           (size_t)(16 * (D + 4) + 2 * D) * 2 + (size_t)(warps * (D + 16)) * 4;
}

/* Columns k and k+1 (k even) of row t, as halves where gemm_cluster.cu looks for them. */
DEVICE void panel_put(const struct attn_args &p, int t, int k, float x, float y)
{
    int tile = t / p.panel_rows, r = t - tile * p.panel_rows, at = half_slot(k);
    size_t width = (size_t)(p.n_heads * p.kv.head_dim);
    uint8_t *row = p.panels + ((size_t)(tile * p.panel_rows) * width + (size_t)(r * 64)) * 2;
    *(uint32_t *)(row + (k >> 6) * p.panel_rows * 128 + (((at >> 3 & 7) ^ (t & 7)) << 4) +
                  (at & 7) * 2) = pack_half2(x, y);
}

/* The record of row t that has column k. */
DEVICE uint8_t *record_of(const struct attn_args &p, int t, int k)
{
    int per_row = p.n_heads * p.kv.head_dim / TILE_K;
    return p.row_records + (size_t)(t * per_row + k / TILE_K) * (size_t)RECORD;
}

/* A warp: of each lane PER columns from k on, and of every sixteen their sum, where gemm_few.cu
 * looks for them. */
template <int PER> DEVICE void record_put(const struct attn_args &p, int t, int k, const float *v)
{
    uint8_t *to = record_of(p, t, k);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i += 2) {
        uint32_t h = pack_half2(v[i], v[i + 1]);
        sum += half_to_float(h & 0xffff) + half_to_float(h >> 16);
        *(uint32_t *)(to + record_at((k + i) & ~3) + ((k + i) & 3) * 2) = h;
    }
#pragma unroll
    for (int i = 1; i < 16 / PER; i <<= 1)
        sum += __shfl_xor_sync(FULL_WARP, sum, i);
    if (!(k & 15)) {
        uint32_t s = split_half(sum);
        *(uint16_t *)(to + record_sum_at(k)) = (uint16_t)s;
        *(uint16_t *)(to + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
    }
}

/* Grid: (kv heads x groups of 8 heads, sequences). p.q are raw projections. */
template <int D, bool BF16, int WARPS, int ROUNDS>
static __global__ void __launch_bounds__(WARPS * 32, WARPS == 8   ? 1
                                                     : WARPS == 4 ? 3
                                                                  : 5)
    attn_decode_batch_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_batch_tile<D> tile;
    enum { PIECES = D / 32, VP = D / 64, TILES = D / 8, STEP = WARPS * BATCH_KEYS, PER = D / 32 };
    enum { PART_ROW = D + 8, Q_ROW = D + 4, JOBS = 8 / WARPS + 1 };
    SHARED_BYTES(shared);
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    uint8_t *ring = shared + w * ROUNDS * tile::BYTES;
    uint64_t *bars = (uint64_t *)(shared + WARPS * ROUNDS * tile::BYTES) + w * ROUNDS;
    uint16_t *q_hi = (uint16_t *)(shared + WARPS * ROUNDS * (tile::BYTES + 8));
    uint16_t *q_lo = q_hi + 8 * Q_ROW, *fresh = q_lo + 8 * Q_ROW; /* (8, Q_ROW); (2, D) */
    float *head = (float *)(fresh + 2 * D) + w * D;
    float *ml = (float *)(fresh + 2 * D) + WARPS * D; /* (warps, 8, 2): maximum, sum */
    float *part = (float *)shared;                    /* (warps, 8, PART_ROW) */

    int H = p.n_heads, K = p.kv.n_kv, G = H / K, t = (int)blockIdx.y; /* decodes: row = sequence */
    int kv_head = (int)blockIdx.x, h0 = kv_head * G, heads = G;
    if (G > 8) {
        int groups = (G + 7) >> 3, group = (int)blockIdx.x % groups;
        kv_head = (int)blockIdx.x / groups;
        h0 = kv_head * G + group * 8;
        heads = min(8, G - group * 8);
    }
    int slot = p.step.slot[t], last = p.step.pos[t];
    const int32_t *pages = p.step.pages + (size_t)t * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    int first = (from & ~(BATCH_KEYS - 1)) + w * BATCH_KEYS;
    float *to = p.a + ((size_t)t * (size_t)H + (size_t)h0) * D;
    dependency_trigger();
    if (slot < 0) { /* a padding row */
        dependency_wait();
        for (int i = (int)threadIdx.x * 2; i < heads * D; i += WARPS * 64) {
            to[i] = to[i + 1] = 0.0f;
            if (p.panels)
                panel_put(p, t, h0 * D + i, 0.0f, 0.0f);
        }
        if (p.row_records)
            for (int i = (int)threadIdx.x * 4; i < heads * D / TILE_K * RECORD; i += WARPS * 128)
                *(uint32_t *)(record_of(p, t, h0 * D) + i) = 0;
        if ((p.panels || p.row_records) && blockIdx.x == 0 && threadIdx.x == 0)
            p.scale_of[t] = 1.0f;
        return;
    }
    /* The pages of 32 rounds: lane i has round i's. Past the last key the page table may end. */
    int asked = 0, n_rounds = first <= last ? (last - first) / STEP + 1 : 0;
    int32_t page_of = 0;
    auto fetch = [&]() {
        if (asked >= n_rounds)
            return;
        if (!(asked & 31))
            page_of = pages[min(first + (asked + lane) * STEP, last) >> p.kv.page_shift];
        int32_t page = __shfl_sync(FULL_WARP, page_of, asked & 31);
        int off = (first + asked * STEP) & (p.kv.page_len - 1);
        size_t at =
            ((((size_t)page * (size_t)K + (size_t)kv_head) << p.kv.page_shift) + (size_t)off) *
            tile::ROW;
        int i = asked % ROUNDS;
        attn_decode_batch_fetch<D>(ring + i * tile::BYTES, p.kv.k + at, p.kv.v + at, bars + i);
        asked++;
    };
#if BULK_COPIES
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            bulk_init(bars + i);
    __syncwarp();
#endif
#pragma unroll 1
    for (int i = 0; i < ROUNDS; i++)
        fetch();

    /* A warp prepares a head or two; the first two, this step's key and value besides. */
    const float *gain[2] = {p.q_norm, p.k_norm};
    int half = p.n_rot >> 1, jobs = w < 2 ? JOBS : JOBS - 1;
    float gains[2][PER], x[JOBS][PER];
    float2 turns[D / 64];
    head_load<D>(p, t, gain, half, gains, turns);
    dependency_wait();
    const float *row = p.q + (size_t)t * (size_t)(H + 2 * K) * D;
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        int from_head = j < JOBS - 1 ? h0 + min(w + j * WARPS, heads - 1) : H + w * K + kv_head;
#pragma unroll
        for (int i = 0; i < PER; i++)
            x[j][i] = j < jobs ? row[from_head * D + lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        bool is_fresh = j == JOBS - 1, is_value = is_fresh && w == 1;
        if (j >= jobs)
            break;
        float sum = 0.0f, rms = 1.0f;
#pragma unroll
        for (int i = 0; i < PER; i++)
            sum += x[j][i] * x[j][i];
        if (gain[is_fresh] && !is_value)
            rms = rsqrtf(warp_sum(sum) / (float)D + p.eps);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PER; i++)
            head[lane + 32 * i] = x[j][i] * rms * gains[is_fresh][i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
            int at = lane + 32 * i;
            if (at < half && !is_value) {
                float a = head[at], b = head[at + half];
                head[at] = a * turns[i].x - b * turns[i].y;
                head[at + half] = b * turns[i].x + a * turns[i].y;
            }
        }
        __syncwarp();
        if (!is_fresh) { /* as the cache's numbers, and what those lost */
            const float to_log2 = 1.4426950408889634f * p.scale;
            int h = (w + j * WARPS) * Q_ROW;
#pragma unroll
            for (int i = 0; i < D / 64; i++) {
                int at = 2 * lane + 64 * i;
                float2 e = *(const float2 *)(head + at);
                split_pair<BF16>(e.x * to_log2, e.y * to_log2, (uint32_t *)(q_hi + h + at),
                                 (uint32_t *)(q_lo + h + at));
            }
        } else {
            fresh_put<D, BF16>(p, slot, K, kv_head, w, head, fresh, h0, G);
        }
    }
    __syncthreads();

    float out[TILES][4] = {}, top = -INFINITY, total = 0.0f;
#if BULK_COPIES
    uint32_t parity = 0; /* a bit for each slot of the ring */
#endif
#pragma unroll 1
    for (int round = 0, at = 0; round < n_rounds; round++, at = at + 1 == ROUNDS ? 0 : at + 1) {
        uint8_t *keys = ring + at * tile::BYTES;
        int base = first + round * STEP;
#if BULK_COPIES
        bulk_wait(bars + at, parity >> at & 1);
        parity ^= 1u << at;
#else
        copy_async_wait<0>();
        __syncwarp();
#endif
        if (base + BATCH_KEYS >
            last) { /* this step's key and value; behind them, values of zeros */
#pragma unroll 1
            for (int key = last - base; key < BATCH_KEYS; key++)
                if (lane < D / 8) {
                    bool mine = key == last - base;
                    if (mine)
                        *(uint4 *)(keys + tile::k_row(key) + lane * 16) =
                            ((const uint4 *)fresh)[lane];
                    *(uint4 *)(keys + tile::v_row(key) + lane * 16) =
                        mine ? ((const uint4 *)(fresh + D))[lane] : make_uint4(0, 0, 0, 0);
                }
            __syncwarp();
        }
        /* Column g of n tile i is key 8 (g & 1) + 2 (g >> 1) + i. */
        float s[2][4] = {}, s2[2][4] = {}; /* two chains each */
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) { /* a0 a2: numbers of the cache's type; a1 a3: the rest */
                int e = g * Q_ROW + (j * 4 + c) * 8 + i * 4;
                uint2 hi = load_shared8(q_hi + e), lo = load_shared8(q_lo + e);
                a[i][0] = hi.x, a[i][2] = hi.y;
                a[i][1] = lo.x, a[i][3] = lo.y;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 k = *(const uint4 *)(keys + tile::k_row(8 * (g & 1) + 2 * (g >> 1) + i) +
                                           (4 * j + c) * 16);
                mma_kv<BF16>(s[i], a[0], k.x, k.y);
                mma_kv<BF16>(s2[i], a[1], k.z, k.w);
            }
        }
        float m = top, sc[4]; /* [i, e]: key 8e + 2c + i of head g, in powers of two */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = base + 8 * (i & 1) + 2 * c + (i >> 1), e = i & 1;
            sc[i] = (s[i >> 1][e] + s[i >> 1][2 + e]) + (s2[i >> 1][e] + s2[i >> 1][2 + e]);
            if (key < from || key > last)
                sc[i] = -INFINITY;
            m = fmaxf(m, sc[i]);
        }
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
        float anchor = m == -INFINITY ? 0.0f : m; /* nothing visible yet */
        float shrink = fast_exp2(top - anchor);
        top = m;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sc[i] = fast_exp2(sc[i] - anchor);
            total += sc[i];
        }
        uint32_t pf[4];
        split_pair<BF16>(sc[0], sc[1], &pf[0], &pf[1]);
        split_pair<BF16>(sc[2], sc[3], &pf[2], &pf[3]);
        if (__any_sync(FULL_WARP, shrink != 1.0f))
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    out[j][i] *= shrink;
#pragma unroll
        for (int v = 0; v < VP; v++) {
            uint4 vf[4]; /* keys 2c, 2c + 8, 2c + 1, 2c + 9; elements VP 8 g + 8 v.. */
#pragma unroll
            for (int i = 0; i < 4; i++)
                vf[i] = *(const uint4 *)(keys + tile::v_row(8 * (i & 1) + 2 * c + (i >> 1)) +
                                         (VP * g + v) * 16);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint32_t sel = j & 1 ? 0x7632 : 0x5410;
                uint32_t b0 = byte_perm(word_of(vf[0], j >> 1), word_of(vf[1], j >> 1), sel);
                uint32_t b1 = byte_perm(word_of(vf[2], j >> 1), word_of(vf[3], j >> 1), sel);
                mma_kv<BF16>(out[8 * v + j], pf, b0, b1);
            }
        }
        __syncwarp(); /* every lane is done with the tile that is fetched over */
        fetch();
    }
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    __syncthreads(); /* nobody reads keys any more */
    {
        float *mine = part + (w * 8 + g) * PART_ROW + 2 * c;
#pragma unroll
        for (int j = 0; j < TILES; j++)
            *(float2 *)(mine + 8 * j) = make_float2(out[j][0] + out[j][2], out[j][1] + out[j][3]);
        if (c == 0) {
            ml[(w * 8 + g) * 2] = top;
            ml[(w * 8 + g) * 2 + 1] = total;
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 8 / WARPS; k++) { /* a warp joins the parts of a head or two */
        int h = w + k * WARPS;
        if (h >= heads)
            break;
        float most = -INFINITY, l = 0.0f, v[PER] = {};
#pragma unroll
        for (int j = 0; j < WARPS; j++)
            most = fmaxf(most, ml[(j * 8 + h) * 2]);
#pragma unroll
        for (int j = 0; j < WARPS; j++) {
            float f = fast_exp2(ml[(j * 8 + h) * 2] - most);
            l += f * ml[(j * 8 + h) * 2 + 1];
#pragma unroll
            for (int i = 0; i < PER; i++) { /* entry 8j + n is element n * TILES + j */
                int e = lane * PER + i;
                v[i] += f * part[(j * 8 + h) * PART_ROW + e % TILES * 8 + e / TILES];
            }
        }
#pragma unroll
        for (int i = 0; i < PER; i += 2) {
            int at = h * D + lane * PER + i;
            float x = v[i] = fast_divide(v[i], l), y = v[i + 1] = fast_divide(v[i + 1], l);
            *(float2 *)(to + at) = make_float2(x, y);
            if (p.panels) /* no larger than the largest value, which is a half too */
                panel_put(p, t, h0 * D + at, x, y);
        }
        if (p.row_records)
            record_put<PER>(p, t, (h0 + h) * D + lane * PER, v);
    }
    if ((p.panels || p.row_records) && blockIdx.x == 0 && threadIdx.x == 0)
        p.scale_of[t] = 1.0f;
}

bool attn_decode_batch_fits(const struct cuda_backend *cu)
{
#ifndef STEEL_CUDA_SIM
    if (!cu->clusters) /* nor a copy engine */
        return false;
#endif
    return attn_decode_batch_shared<128>(8, 3) <= cu->shared_limit;
}

bool attn_decode_batch_records_fit(const struct cuda_backend *cu, int rows)
{
    const struct shape *s = &cu->shape;
    return s->kv_type == DT_F16 && s->n_heads / s->n_kv_heads % 8 == 0 &&
           rows * (s->n_heads * s->head_dim / TILE_K) <= cu->n_records;
}

bool attn_decode_batch_panels_fit(const struct cuda_backend *cu, int rows)
{
    const struct shape *s = &cu->shape;
    int width = s->n_heads * s->head_dim;
    return s->kv_type == DT_F16 && width % TILE_K == 0 && gemm_cluster_fits(cu, rows, width);
}

template <int D, bool BF16, int WARPS, int ROUNDS>
static void attn_decode_batch_launch(struct cuda_backend *cu, const struct attn_args &p, dim3 grid)
{
    cuda_launch(cu, attn_decode_batch_kernel<D, BF16, WARPS, ROUNDS>, grid, WARPS * 32,
                attn_decode_batch_shared<D>(WARPS, ROUNDS), LAUNCH_EARLY, p);
}

/* One block to an SM: eight warps; of more, three share it, or five where three would not do in
 * one go. */
template <int D, bool BF16>
static void attn_decode_batch_pick(struct cuda_backend *cu, const struct attn_args &p)
{
    dim3 grid((unsigned)(p.kv.n_kv * ceil_div(p.n_heads / p.kv.n_kv, 8)),
              (unsigned)p.step.n_decode);
    int units = (int)(grid.x * grid.y);
    if (units <= cu->n_sm)
        attn_decode_batch_launch<D, BF16, 8, 3>(cu, p, grid);
    else if (units <= 3 * cu->n_sm)
        attn_decode_batch_launch<D, BF16, 4, 2>(cu, p, grid);
    else
        attn_decode_batch_launch<D, BF16, 2, 2>(cu, p, grid);
}

void attn_decode_batch(struct cuda_backend *cu, const struct attn_args &p)
{
    bool half = p.kv.type == DT_F16;
    if (p.kv.head_dim == 64)
        half ? attn_decode_batch_pick<64, false>(cu, p) : attn_decode_batch_pick<64, true>(cu, p);
    else
        half ? attn_decode_batch_pick<128, false>(cu, p) : attn_decode_batch_pick<128, true>(cu, p);
}
