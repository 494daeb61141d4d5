/*
 * Decode attention of many sequences: a block has a whole (sequence, up to 8 heads of one kv head),
 * so blocks never combine results. The warps of a block share the keys, 16 at a time ("a tile").
 * Each warp has its own ring in shared memory, filled by bulk copies (TMA), so loads in flight take
 * no registers and memory is always busy. Tiles of earlier steps are issued before dependency_wait.
 *
 * MMA as in attn_decode.cu: the 16 rows of A are the 8 heads twice, values rounded to the cache's
 * type and the rounding residues. Runs of 4 or 8 keys are padded by 64 bytes in shared memory, and
 * the mapping of keys to columns is chosen so that 16-byte reads have few bank conflicts.
 */
#include "backend/cuda/attn/attn_panels.cuh"

enum { BATCH_KEYS = 16 };

/* A tile in shared memory: K as two runs of 8 keys, V as four runs of 4. */
template <int D> struct attn_decode_batch_tile {
    enum {
        ROW = 2 * D, /* bytes */
        K_RUN = 8 * ROW,
        V_RUN = 4 * ROW,
        V = 2 * (K_RUN + 64), /* offset of V */
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

/* One warp issues the copies of 16 keys and 16 values, which start at k and v. */
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

/* Bytes of shared memory. The rings come first. Then follow the tiles' barriers, the rounded
 * queries and their residues, this step's key and value, one head of scratch per warp, and
 * maxima and sums. After the last round the warps' partial results reuse the rings. */
template <int D> static constexpr size_t attn_decode_batch_shared(int warps, int rounds)
{
    return (size_t)(warps * rounds * (attn_decode_batch_tile<D>::BYTES + 8)) +
           (size_t)(16 * (D + 4) + 2 * D) * 2 + (size_t)(warps * (D + 16)) * 4;
}

/* A padding row: zeros in every output form. */
template <int D>
DEVICE void attn_decode_batch_pad(const struct attn_args &p, const struct decode_unit &u)
{
    float *to = decode_result<D>(p, u);
    int threads = (int)blockDim.x;
    for (int i = (int)threadIdx.x * 2; i < u.heads * D; i += threads * 2) {
        to[i] = to[i + 1] = 0.0f;
        if (p.panels)
            panel_put(p, u.t, u.h0 * D + i, 0.0f, 0.0f);
    }
    if (p.panels && blockIdx.x == 0 && threadIdx.x == 0)
        p.scale_of[u.t] = 1.0f;
}

/* Completes the tile of the last key with this step's key and value. Values after it become
 * zeros. */
template <int D> DEVICE void attn_decode_batch_fresh(uint8_t *keys, const uint16_t *fresh, int at)
{
    typedef attn_decode_batch_tile<D> tile;
    int lane = lane_id();
#pragma unroll 1
    for (int key = at; key < BATCH_KEYS; key++)
        if (lane < D / 8) {
            bool mine = key == at;
            if (mine)
                *(uint4 *)(keys + tile::k_row(key) + lane * 16) = ((const uint4 *)fresh)[lane];
            *(uint4 *)(keys + tile::v_row(key) + lane * 16) =
                mine ? ((const uint4 *)(fresh + D))[lane] : make_uint4(0, 0, 0, 0);
        }
    __syncwarp();
}

/* q K^T of a tile, in two accumulator chains. Column g of n tile i is key 8 (g & 1) + 2 (g >> 1)
 * + i. */
template <int D, bool BF16>
DEVICE void attn_decode_batch_scores(const uint8_t *keys, const uint16_t *q_hi,
                                     const uint16_t *q_lo, float (&s)[2][4], float (&s2)[2][4])
{
    typedef attn_decode_batch_tile<D> tile;
    int g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* a0 a2: rounded queries; a1 a3: residues */
            int e = g * (D + 4) + (j * 4 + c) * 8 + i * 4;
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
}

/* Grid: (kv heads x groups of 8 heads, sequences). p.q holds raw projections. */
template <int D, bool BF16, int WARPS, int ROUNDS, bool SINK>
static __global__ void __launch_bounds__(WARPS * 32, WARPS == 8   ? 1
                                                     : WARPS == 4 ? 3
                                                                  : 5)
    attn_decode_batch_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_batch_tile<D> tile;
    enum { VP = D / 64, TILES = D / 8, STEP = WARPS * BATCH_KEYS, PER = D / 32, Q_ROW = D + 4 };
    SHARED_BYTES(shared);
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    uint8_t *ring = shared + w * ROUNDS * tile::BYTES;
    uint64_t *bars = (uint64_t *)(shared + WARPS * ROUNDS * tile::BYTES) + w * ROUNDS;
    uint16_t *q_hi = (uint16_t *)(shared + WARPS * ROUNDS * (tile::BYTES + 8));
    uint16_t *q_lo = q_hi + 8 * Q_ROW, *fresh = q_lo + 8 * Q_ROW; /* (8, Q_ROW); (2, D) */
    float *head = (float *)(fresh + 2 * D) + w * D;
    float *ml = (float *)(fresh + 2 * D) + WARPS * D; /* (warps, 8, 2): maximum, sum */
    float *part = (float *)shared;                    /* (warps, 8, D + 8) partial results */

    struct decode_unit u = decode_unit_of(p, (int)blockIdx.x, (int)blockIdx.y);
    int first = (u.from & ~(BATCH_KEYS - 1)) + w * BATCH_KEYS;
    float *to = decode_result<D>(p, u);
    dependency_trigger();
    if (u.slot < 0) {
        dependency_wait();
        attn_decode_batch_pad<D>(p, u);
        return;
    }
    /* Lane i holds the page of round i, for 32 rounds at a time. The block table may end at the
     * last key, so indices are clamped to it. */
    int issued = 0, n_rounds = first <= u.last ? (u.last - first) / STEP + 1 : 0;
    int32_t page_of = 0;
    auto fetch = [&]() {
        if (issued >= n_rounds)
            return;
        if (!(issued & 31))
            page_of = u.pages[min(first + (issued + lane) * STEP, u.last) >> p.kv.page_shift];
        int32_t page = __shfl_sync(FULL_WARP, page_of, issued & 31);
        int off = (first + issued * STEP) & (p.kv.page_len - 1);
        size_t at = ((((size_t)page * (size_t)p.kv.n_kv + (size_t)u.kv_head) << p.kv.page_shift) +
                     (size_t)off) *
                    tile::ROW;
        int i = issued % ROUNDS;
        attn_decode_batch_fetch<D>(ring + i * tile::BYTES, p.kv.k + at, p.kv.v + at, bars + i);
        issued++;
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

    struct decode_heads<D, WARPS> heads;
    decode_heads_begin(p, u.t, true, heads);
    dependency_wait();
    decode_heads_load(p, u, true, true, heads);
    decode_heads_prepare<D, BF16>(
        p, u, heads, fresh,
        [&](int) {
            __syncwarp(); /* all heads of a warp use the same scratch */
            return head;
        },
        [&](int j, const float *from) {
            int at = (w + j * WARPS) * Q_ROW;
            decode_query_put<D, BF16>(from, p.scale, q_hi + at, q_lo + at);
        });
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
        if (base + BATCH_KEYS > u.last)
            attn_decode_batch_fresh<D>(keys, fresh, u.last - base);
        float sa[2][4] = {}, sb[2][4] = {};
        attn_decode_batch_scores<D, BF16>(keys, q_hi, q_lo, sa, sb);
        uint32_t pf[4];
        decode_softmax<BF16>(
            sa, sb, u, [&](int i) { return base + 8 * (i & 1) + 2 * c + (i >> 1); }, top, total,
            out, pf);
#pragma unroll
        for (int v = 0; v < VP; v++) {
            uint4 vf[4]; /* keys 2c, 2c + 8, 2c + 1, 2c + 9; elements VP 8 g + 8 v.. */
#pragma unroll
            for (int i = 0; i < 4; i++)
                vf[i] = *(const uint4 *)(keys + tile::v_row(8 * (i & 1) + 2 * c + (i >> 1)) +
                                         (VP * g + v) * 16);
            decode_values<BF16>(out + 8 * v, pf, vf[0], vf[1], vf[2], vf[3]);
        }
        __syncwarp(); /* all lanes have read the tile that the next copy overwrites */
        fetch();
    }
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    __syncthreads(); /* partial results overwrite the rings */
    decode_part_put<D>(out, top, total, part, ml);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 8 / WARPS; k++) { /* each warp combines 8 / WARPS heads */
        int h = w + k * WARPS;
        if (h >= u.heads)
            break;
        float most, l, v[PER];
        decode_parts_combine<D, WARPS>(
            part, ml, h,
            [&](int i) {
                int e = lane * PER + i;
                return e % TILES * 8 + e / TILES;
            },
            &most, &l, v);
        l = decode_sum<SINK>(p, u.h0 + h, most, l);
#pragma unroll
        for (int i = 0; i < PER; i += 2) {
            int at = h * D + lane * PER + i;
            float x = fast_divide(v[i], l), y = fast_divide(v[i + 1], l);
            *(float2 *)(to + at) = make_float2(x, y);
            if (p.panels) /* fp16 cannot overflow: no larger than the largest value */
                panel_put(p, u.t, u.h0 * D + at, x, y);
        }
    }
    if (p.panels && blockIdx.x == 0 && threadIdx.x == 0)
        p.scale_of[u.t] = 1.0f;
}

bool attn_decode_batch_fits(const struct cuda_backend *cu)
{
#ifndef STEEL_CUDA_SIM
    if (!cu->can.cluster_attention) /* GPUs without clusters have no bulk copies either */
        return false;
#endif
    return attn_decode_batch_shared<128>(8, 3) <= cu->shared_limit;
}

bool attn_decode_batch_panels_fit(const struct cuda_backend *cu, const struct attn_layer *l,
                                  int rows)
{
    int width = l->n_heads * l->k_dim;
    return cu->shape.kv_type != DT_BF16 && width % TILE_K == 0 &&
           gemm_cluster_fits(cu, rows, width);
}

template <int D, bool BF16, int WARPS, int ROUNDS, bool SINK>
static void attn_decode_batch_launch(struct cuda_backend *cu, const struct attn_args &p, dim3 grid)
{
    cuda_launch(cu, attn_decode_batch_kernel<D, BF16, WARPS, ROUNDS, SINK>, grid, WARPS * 32,
                attn_decode_batch_shared<D>(WARPS, ROUNDS), LAUNCH_EARLY, p);
}

template <int D, bool BF16, bool SINK>
static void attn_decode_batch_warps(struct cuda_backend *cu, const struct attn_args &p, int warps)
{
    dim3 grid((unsigned)(p.kv.n_kv * ceil_div(p.n_heads / p.kv.n_kv, 8)),
              (unsigned)p.step.n_decode);
    if (warps == 8)
        attn_decode_batch_launch<D, BF16, 8, 3, SINK>(cu, p, grid);
    else if (warps == 4)
        attn_decode_batch_launch<D, BF16, 4, 2, SINK>(cu, p, grid);
    else
        attn_decode_batch_launch<D, BF16, 2, 2, SINK>(cu, p, grid);
}

void attn_decode_batch(struct cuda_backend *cu, const struct attn_args &p, int warps)
{
    bool f16 = p.kv.type == DT_F16;
    if (p.sinks) /* heads of 64: attn_mma_suits */
        f16 ? attn_decode_batch_warps<64, false, true>(cu, p, warps)
            : attn_decode_batch_warps<64, true, true>(cu, p, warps);
    else if (p.kv.head_dim == 64)
        f16 ? attn_decode_batch_warps<64, false, false>(cu, p, warps)
            : attn_decode_batch_warps<64, true, false>(cu, p, warps);
    else
        f16 ? attn_decode_batch_warps<128, false, false>(cu, p, warps)
            : attn_decode_batch_warps<128, true, false>(cu, p, warps);
}
