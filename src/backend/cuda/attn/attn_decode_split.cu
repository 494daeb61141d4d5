/*
 * Split decode attention for one sequence or a few, fp16 or bf16 cache: one wave of blocks, at most
 * one per SM, so that blocks may wait for each other. A block has (sequence, up to 8 heads of one
 * kv head, a split of the keys). Bulk copies (TMA) move keys and values straight into shared
 * memory, without registers, and are issued before dependency_wait. As much is in flight as fits
 * beside the preceding kernel: 120 KB, which at depth 8,192 of a 30B-A3B is a block's whole split.
 *
 * A warp processes 16 keys at a time, "a tile". MMA rows are the keys, then the values' elements;
 * columns are the 8 heads. Queries and probabilities enter as values rounded to the cache's type
 * plus the rounding residues, so they keep about 22 bits. The mapping of keys to rows (key_of_row)
 * makes 16-byte reads free of bank conflicts. How blocks combine: attn_decode_split.cuh.
 */
#include "backend/cuda/attn/attn_decode_split.cuh"

enum { SPLIT_SLOTS = 2 * SPLIT_WARPS }; /* tiles in shared memory, two per warp */

/* A tile in shared memory: K as two runs of 8 keys, padded by 64 bytes; V as four runs of 4
 * keys, padded by 32 bytes. */
template <int D> struct attn_decode_split_tile {
    enum {
        ROW = 2 * D,
        V = 16 * ROW + 64, /* offset of V */
        BYTES = V + 16 * ROW + 96,
        Q_STRIDE = 2 * ROW + 64, /* stride of the queries: rounded values, then residues */
    };
};
/* The key in row r of a fragment. Rows 2c and 2c+1 are in different runs of K. For V, the keys
 * of lanes c = 0..3 are in four different runs. */
DEVICE int key_of_row(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) * 4 + odd + (r >> 3) * 2;
}

/* Shared memory. The last slot of the ring is scratch for making the queries first. */
template <int D> struct attn_decode_split_shared {
    typedef attn_decode_split_tile<D> T;
    uint8_t ring[SPLIT_SLOTS * T::BYTES];
    uint16_t fresh[2 * D];      /* (2, D) this step's k and v in the cache's type */
    float ml[SPLIT_WARPS * 16]; /* (warps, 8, 2) maximum, sum */
    uint64_t bar[SPLIT_SLOTS];  /* (slots) */
    int part_at[SPLIT_WARPS];   /* offset of a warp's partial result in the ring */
    int is_last;

    /* (8, Q_STRIDE bytes): D rounded values, D residues */
    __device__ uint8_t *query()
    {
        return ring + (SPLIT_SLOTS - 1) * T::BYTES;
    }
    __device__ float *staged() /* (2, D) scratch for k and v */
    {
        return (float *)(query() + 8 * T::Q_STRIDE);
    }
};

/* Iterates over a warp's tiles. Tile i of warp w is tile w + 8i of the block and uses ring slot
 * i & 1 of the warp's two. Lane i holds the page of tile i, for 32 tiles at a time. */
template <int D> struct attn_decode_split_walk {
    typedef attn_decode_split_tile<D> T;
    const struct attn_args &p;
    const struct decode_unit &u;
    const struct attn_decode_split_range &s;
    uint8_t *ring;
    uint64_t *bars; /* this warp's two */
    int32_t warp_pages;

    __device__ __forceinline__ int32_t page_of(int i) const
    {
        int tile = s.first + min(warp_id() + SPLIT_WARPS * i, s.count - 1);
        return u.pages[tile * SPLIT_KEYS >> p.kv.page_shift];
    }
    __device__ __forceinline__ uint8_t *tile_at(int i) const
    {
        return ring + ((i & 1) * SPLIT_WARPS + warp_id()) * T::BYTES;
    }
    /* The first key of tile i as a row index of the cache. */
    __device__ __forceinline__ size_t row_of(int i) const
    {
        size_t page = (size_t)__shfl_sync(FULL_WARP, warp_pages, i & 31);
        return ((page * (size_t)p.kv.n_kv + (size_t)u.kv_head) << p.kv.page_shift) +
               (size_t)((s.first + warp_id() + SPLIT_WARPS * i) * SPLIT_KEYS & (p.kv.page_len - 1));
    }
    __device__ __forceinline__ void load(int i) const
    {
        size_t at = row_of(i) * T::ROW;
        int lane = lane_id();
#if BULK_COPIES
        /* one lane per run of keys: 2 of K, 4 of V */
        bool k = lane < 2;
        int n = k ? lane : lane - 2, bytes = (k ? 8 : 4) * T::ROW;
        if (lane == 0)
            bulk_expect(bars + (i & 1), 32 * T::ROW);
        if (lane < 6)
            bulk_piece(tile_at(i) + (k ? n * 64 : T::V + n * 32) + n * bytes,
                       (k ? p.kv.k : p.kv.v) + at + n * bytes, bytes, bars + (i & 1));
#else
        uint8_t *to = tile_at(i);
        for (int j = lane; j < T::ROW; j += 32) { /* 16 rows in 16-byte pieces */
            int key = j * 16 / T::ROW;
            copy_async16(to + j * 16 + key / 8 * 64, p.kv.k + at + j * 16);
            copy_async16(to + T::V + j * 16 + key / 4 * 32, p.kv.v + at + j * 16);
        }
#endif
    }
    /* Issues tile i if it exists. Commits a copy group (cp.async only) in any case, so that
     * groups can be counted. */
    __device__ __forceinline__ void load_if_any(int i) const
    {
        if (warp_id() + SPLIT_WARPS * i < s.count)
            load(i);
        copy_async_commit();
    }
    /* Prefetches tile i to the L2. */
    __device__ __forceinline__ void prefetch(int i) const
    {
        if (warp_id() + SPLIT_WARPS * i >= s.count)
            return;
        size_t line = row_of(i) * T::ROW + (size_t)lane_id() * 128;
        if (lane_id() * 128 < SPLIT_KEYS * T::ROW) {
            prefetch_l2(p.kv.k + line);
            prefetch_l2(p.kv.v + line);
        }
    }
    __device__ __forceinline__ void wait(int i) const
    {
#if BULK_COPIES
        bulk_wait(bars + (i & 1), (uint32_t)i >> 1 & 1);
#else
        (void)i;
        copy_async_wait<1>(); /* two groups are in flight; waits for the older */
        __syncwarp();
#endif
    }
};

/* Completes the tile of the last key with this step's key and value. Values after it become
 * zeros. */
template <int D> DEVICE void attn_decode_split_fresh(uint8_t *tile, const uint16_t *fresh, int last)
{
    typedef attn_decode_split_tile<D> T;
    int lane = lane_id(), at = last & (SPLIT_KEYS - 1), piece = lane % (D / 8);
    uint4 k = ((const uint4 *)fresh)[piece], v = ((const uint4 *)(fresh + D))[piece];
    *(uint4 *)(tile + at / 8 * 64 + at * T::ROW + piece * 16) = k;
#pragma unroll
    for (int i0 = 0; i0 < SPLIT_KEYS; i0 += 256 / D) {
        int r = i0 + lane / (D / 8);
        if (r >= at)
            *(uint4 *)(tile + T::V + r / 4 * 32 + r * T::ROW + piece * 16) =
                r == at ? v : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}

/* Converts a query in place to rounded values and, ROW bytes further, their residues. */
template <int D, bool BF16> DEVICE void attn_decode_split_query(float *head, float scale)
{
    const float to_log2 = 1.4426950408889634f * scale;
    int lane = lane_id();
    float2 e[D / 64];
#pragma unroll
    for (int i = 0; i < D / 64; i++)
        e[i] = *(const float2 *)(head + 2 * lane + 64 * i);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        uint32_t *hi = (uint32_t *)head + lane + 32 * i;
        split_pair<BF16>(e[i].x * to_log2, e[i].y * to_log2, hi, hi + D / 2);
    }
}

/* K q^T in four accumulator chains. Their sum is the scores of rows g, g+8 and heads 2c, 2c+1. */
template <int D, bool BF16>
DEVICE void attn_decode_split_scores(const uint8_t *tile, const uint4 (&q_hi)[D / 32],
                                     const uint4 (&q_lo)[D / 32], float (&s)[4][4])
{
    typedef attn_decode_split_tile<D> T;
    int g = lane_id() >> 2, c = lane_id() & 3;
    const int k_at = key_of_row(g) * T::ROW + key_of_row(g) / 8 * 64 + c * 16;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint4 ka = *(const uint4 *)(tile + k_at + j * 64);
        uint4 kb = *(const uint4 *)(tile + k_at + 2 * T::ROW + j * 64);
        const uint32_t a0[4] = {ka.x, kb.x, ka.y, kb.y}, a1[4] = {ka.z, kb.z, ka.w, kb.w};
        mma_kv<BF16>(s[0], a0, q_hi[j].x, q_hi[j].y);
        mma_kv<BF16>(s[1], a1, q_hi[j].z, q_hi[j].w);
        mma_kv<BF16>(s[2], a0, q_lo[j].x, q_lo[j].y);
        mma_kv<BF16>(s[3], a1, q_lo[j].z, q_lo[j].w);
    }
}

/* Softmax of a tile whose first key is key0. Probabilities become B fragments. */
template <int D, bool BF16>
DEVICE void attn_decode_split_softmax(float (&s)[4][4], const struct decode_unit &u, int key0,
                                      struct decode_columns<D> &r, uint32_t (&hi)[2],
                                      uint32_t (&lo)[2])
{
    int key = key0 + key_of_row(lane_id() >> 2);
#pragma unroll
    for (int e = 0; e < 4; e++)
        s[0][e] = (s[0][e] + s[1][e]) + (s[2][e] + s[3][e]);
    decode_columns_softmax<D>(
        s[0], u, [&](int i) { return key + 2 * i; }, r);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        split_pair<BF16>(s[0][2 * i], s[0][2 * i + 1], &hi[i], &lo[i]);
        hi[i] = transpose8(hi[i]);
        lo[i] = transpose8(lo[i]);
    }
}

/* V^T P. */
template <int D, bool BF16>
DEVICE void attn_decode_split_values(const uint8_t *tile, const uint32_t (&hi)[2],
                                     const uint32_t (&lo)[2], struct decode_columns<D> &r)
{
    typedef attn_decode_split_tile<D> T;
    int g = lane_id() >> 2, c = lane_id() & 3, v_at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int key = key_of_row(2 * c + i);
        v_at[i] = T::V + key * T::ROW + key / 4 * 32 + g * 16;
    }
#pragma unroll
    for (int j = 0; j < D / 64; j++) {
        uint4 v[4]; /* keys of rows 2c, 2c+1, 2c+8, 2c+9; elements 8(g + 8j) on */
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = *(const uint4 *)(tile + v_at[i & 1] + (i >> 1) * 2 * T::ROW + j * 128);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            uint32_t a[4];
            decode_columns_values(v, e, a);
            mma_kv<BF16>(r.out[4 * j + e], a, hi[0], hi[1]);
            mma_kv<BF16>(r.out[4 * j + e], a, lo[0], lo[1]);
        }
    }
}

/* Grid: (splits, kv heads x groups of 8 heads, sequences). */
template <int D, bool BF16, bool SINK>
static __global__ void __launch_bounds__(640)
    attn_decode_split_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_split_tile<D> T;
    enum { PIECES = D / 32 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    struct attn_decode_split_shared<D> &sh = *(struct attn_decode_split_shared<D> *)shared;
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, tid = (int)threadIdx.x;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_decode_split_range s = attn_decode_split_range_of(p, u);
    if (attn_decode_split_idle<D, false>(p, u, s))
        return;
    struct attn_decode_split_walk<D> k = {
        p, u, s, sh.ring, sh.bar + 2 * w, 0
    };
    k.warp_pages = k.page_of(lane);
#if BULK_COPIES
    if (lane < 2)
        bulk_init(k.bars + lane);
    __syncwarp();
#endif
    bool late = w == SPLIT_WARPS - 1; /* its second slot holds the queries for now */
#pragma unroll 1
    for (int i = 0; i < (late ? 1 : 2); i++)
        k.load_if_any(i);
    k.prefetch(late ? 1 : 2);

    struct attn_decode_split_shares<D> shares(p, u, s);
    shares.prefetch();

    struct decode_heads<D, SPLIT_WARPS> heads;
    decode_heads_begin(p, u.t, true, heads);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    decode_heads_load(p, u, true, s.split == s.used - 1, heads);
    mark(mk, 4);
    uint8_t *query = sh.query();
    decode_heads_prepare<D, BF16>(
        p, u, heads, sh.fresh,
        [&](int j) { return j ? sh.staged() + w * D : (float *)(query + w * T::Q_STRIDE); },
        [&](int, float *head) { attn_decode_split_query<D, BF16>(head, p.scale); });
    __syncthreads();
    mark(mk, 5);

    uint4 q_hi[PIECES], q_lo[PIECES]; /* of head g */
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        q_hi[j] = *(const uint4 *)(query + g * T::Q_STRIDE + c * 16 + j * 64);
        q_lo[j] = *(const uint4 *)(query + g * T::Q_STRIDE + c * 16 + j * 64 + T::ROW);
    }
    fence_before_copies();
    __syncthreads(); /* the last slot is free */
    struct decode_columns<D> r;
    decode_columns_clear(r);
#pragma unroll 1
    for (int i = 0; w + SPLIT_WARPS * i < s.count; i++) {
        uint8_t *tile = k.tile_at(i);
        int n = w + SPLIT_WARPS * i;
        if (i || late) { /* reuses the slot of the previous tile */
            if (((i + 1) & 31) == 0)
                k.warp_pages = k.page_of(i + 1 + lane);
            k.load_if_any(i + 1);
        }
        k.wait(i);
        if (n == s.fresh_tile)
            attn_decode_split_fresh<D>(tile, sh.fresh, u.last);
        float sc[4][4] = {};
        uint32_t hi[2], lo[2];
        attn_decode_split_scores<D, BF16>(tile, q_hi, q_lo, sc);
        attn_decode_split_softmax<D, BF16>(sc, u, (s.first + n) * SPLIT_KEYS, r, hi, lo);
        attn_decode_split_values<D, BF16>(tile, hi, lo, r);
        __syncwarp();
    }
    mark(mk, 6);
    /* The partial result reuses the slot of the warp's last tile. */
    uint8_t *place = k.tile_at(w < s.count ? (s.count - 1 - w) / SPLIT_WARPS : 0);
    decode_columns_part<D>(r, (float *)place, sh.ml + w * 16);
    sh.part_at[w] = (int)(place - sh.ring);
    __syncthreads();
    mark(mk, 7);
    if (tid < shares.groups) {
        float m, l;
        float4 v = attn_decode_split_warps_combine<D, SPLIT_WARPS>(sh.ring, sh.part_at, sh.ml, tid,
                                                                   &m, &l);
        attn_decode_split_store<D, SINK>(shares, tid, v, m, l);
    }
    mark(mk, 8);
    dependency_trigger(); /* not earlier: starting the next kernel's blocks would take issue slots */
    if (s.used == 1) {
        marks_end(mk, 7);
        return;
    }
    attn_decode_split_combine<D, SINK>(shares, &sh.is_last);
    mark(mk, 1);
    marks_end(mk, 8);
}

/* Host */

size_t attn_decode_split_record_bytes(const struct cuda_backend *cu)
{
    return (size_t)cu->n_sm * 8 * (128 / 4) * SPLIT_RECORD * 4;
}

bool attn_decode_split_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
#ifndef STEEL_CUDA_SIM
    if (!cu->can.cluster_attention) /* GPUs without clusters have no bulk copies either */
        return false;
#endif
    return cu->can.grid_barrier && attn_mma_suits(cu, l) &&
           (l->k_dim == 64 ? sizeof(struct attn_decode_split_shared<64>)
                           : sizeof(struct attn_decode_split_shared<128>)) <= cu->shared_limit;
}

template <int D, bool SINK>
static void attn_decode_split_launch(struct cuda_backend *cu, struct attn_args p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8), units = p.kv.n_kv * groups * p.step.n_decode;
    p.n_split = 1;
    while (2 * p.n_split * units <= cu->n_sm && p.n_split < SPLIT_PARTS)
        p.n_split *= 2;
    p.records = cu->split.records;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    auto kernel = p.kv.type == DT_F16 ? attn_decode_split_kernel<D, false, SINK>
                                      : attn_decode_split_kernel<D, true, SINK>;
    cuda_launch(cu, kernel, grid, SPLIT_THREADS,
                attn_decode_split_one_per_sm(cu, sizeof(struct attn_decode_split_shared<D>)),
                LAUNCH_EARLY, p);
}

void attn_decode_split(struct cuda_backend *cu, struct attn_args p)
{
    if (p.sinks) /* heads of 64: attn_mma_suits */
        attn_decode_split_launch<64, true>(cu, p);
    else if (p.kv.head_dim == 64)
        attn_decode_split_launch<64, false>(cu, p);
    else
        attn_decode_split_launch<128, false>(cu, p);
}
