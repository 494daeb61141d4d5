/*
 * Attention of one decode, or of a few: one wave of blocks, at most one to an SM, so that each
 * may wait for the others. A block takes (sequence, up to 8 heads of one kv head, a stretch of
 * keys). Keys and values go by the copy engine straight into shared memory, as much as fits
 * beside the kernel in front (120 KB, at depth 8,192 of a 30B-A3B all of it), and are asked for
 * before that kernel has finished; no register waits for them.
 *
 * A warp takes 16 keys at a time, "a tile". Products have the keys, then the values' elements as
 * rows and the 8 heads as columns; queries and probabilities go in as two numbers of the cache's
 * type, what rounds and what that rounding lost, so they keep about 22 bits. Which key is which
 * row is chosen so that 16-byte reads of rows as they lie in the cache meet no bank twice: see
 * key_of_row.
 *
 * Blocks of one kv head join through the L2: everyone leaves its part there, in records that say by
 * themselves whether they have been written, and adds up its share of the elements as they come.
 */
#include "backend/cuda/attn_decode.cuh"

enum {
    SPLIT_WARPS = 8,
    SPLIT_THREADS = SPLIT_WARPS * 32,
    SPLIT_KEYS = 16,
    SPLIT_SLOTS = 2 * SPLIT_WARPS, /* tiles in shared memory */
    SPLIT_PARTS = 32,              /* most stretches; a power of two */
    SPLIT_RECORD = 8,              /* floats: four elements, maximum, sum, nothing */
    SPLIT_ALONE = 20,              /* most tiles in a context of one stretch */
    SPLIT_SHARE = 8                /* most in a stretch while there are blocks left */
};
static const uint32_t NOT_YET = 0xffffffffu; /* of a word of a record; no arithmetic gives it */

/* Tiles in shared memory: K as two runs of 8 keys that lie 64 bytes further apart than in the
 * cache, V as four runs of 4 keys, 32 bytes further. */
template <int D> struct attn_decode_split_tile {
    enum {
        ROW = 2 * D,
        V = 16 * ROW + 64, /* where V begins */
        BYTES = V + 16 * ROW + 96,
        Q_PITCH = 2 * ROW + 64, /* of a head's query: halves, and what they lost */
        PART_ROW = D + 4,
    };
};
/* Row r of a fragment. Rows 2c and 2c+1 are in different runs of K; of V, the keys of lanes c =
 * 0..3 are in four. */
DEVICE int key_of_row(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) * 4 + odd + (r >> 3) * 2;
}

/* Shared memory. The last tile's place first serves to make the queries. */
template <int D> struct attn_decode_split_shared {
    typedef attn_decode_split_tile<D> T;
    uint8_t ring[SPLIT_SLOTS * T::BYTES];
    uint16_t fresh[2 * D];      /* (2, D) this step's k and v as the cache has them */
    float ml[SPLIT_WARPS * 16]; /* (warps, 8, 2) maximum, sum */
    uint64_t bar[SPLIT_SLOTS];  /* (slots) */
    int part_at[SPLIT_WARPS];   /* where in the ring a warp's part lies */
    int is_last;

    /* (8): row of D, D of the cache's type */
    __device__ uint8_t *query()
    {
        return ring + (SPLIT_SLOTS - 1) * T::BYTES;
    }
    __device__ float *staged() /* (2, D) k and v before that */
    {
        return (float *)(query() + 8 * T::Q_PITCH);
    }
};

/* The tiles a block has: `count` of them, from `first` on, of 2^shift stretches. */
struct attn_decode_split_stretch {
    int split, shift, used, first, count;
    int fresh_tile; /* the one with this step's key, or -1 */
};

DEVICE struct attn_decode_split_stretch attn_decode_split_stretch_of(const struct attn_args &p,
                                                                     const struct decode_unit &u)
{
    struct attn_decode_split_stretch s;
    int start = u.from / SPLIT_KEYS, n_tiles = u.last / SPLIT_KEYS + 1 - start;
    s.split = (int)blockIdx.x;
    s.shift = 0; /* one of a short context, since joining costs more */
    if (n_tiles > SPLIT_ALONE)
#pragma unroll 1
        while (1 << s.shift < p.n_split && n_tiles > SPLIT_SHARE << s.shift)
            s.shift++;
    s.used = 1 << s.shift;
    /* What does not divide goes to the first: the last has this step's key to see to. */
    s.first = (n_tiles * s.split + s.used - 1) >> s.shift;
    s.count = ((n_tiles * (s.split + 1) + s.used - 1) >> s.shift) - s.first;
    s.first += start;
    s.fresh_tile = s.split == s.used - 1 ? s.count - 1 : -1;
    return s;
}

/* Tile i of a warp is w + 8i of the block; it has two places, by turns. Lane i knows the page of tile
 * i, for 32 of them. */
template <int D> struct attn_decode_split_walk {
    typedef attn_decode_split_tile<D> T;
    const struct attn_args &p;
    const struct decode_unit &u;
    const struct attn_decode_split_stretch &s;
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
    /* Where lane i's page has tile i, in rows of the cache */
    __device__ __forceinline__ size_t row_of(int i) const
    {
        size_t page = (size_t)__shfl_sync(FULL_WARP, warp_pages, i & 31);
        return ((page * (size_t)p.kv.n_kv + (size_t)u.kv_head) << p.kv.page_shift) +
               (size_t)((s.first + warp_id() + SPLIT_WARPS * i) * SPLIT_KEYS & (p.kv.page_len - 1));
    }
    __device__ __forceinline__ void bring(int i) const
    {
        size_t at = row_of(i) * T::ROW;
        int lane = lane_id();
#if BULK_COPIES
        /* A lane for each run of keys: 2 of K, 4 of V */
        bool k = lane < 2;
        int n = k ? lane : lane - 2, bytes = (k ? 8 : 4) * T::ROW;
        if (lane == 0)
            bulk_expect(bars + (i & 1), 32 * T::ROW);
        if (lane < 6)
            bulk_piece(tile_at(i) + (k ? n * 64 : T::V + n * 32) + n * bytes,
                       (k ? p.kv.k : p.kv.v) + at + n * bytes, bytes, bars + (i & 1));
#else
        uint8_t *to = tile_at(i);
        for (int j = lane; j < T::ROW; j += 32) { /* 16 rows in pieces of 16 bytes */
            int key = j * 16 / T::ROW;
            copy_async16(to + j * 16 + key / 8 * 64, p.kv.k + at + j * 16);
            copy_async16(to + T::V + j * 16 + key / 4 * 32, p.kv.v + at + j * 16);
        }
#endif
    }
    /* Ends a group of copies, where they come in groups, whether or not there is a tile. */
    __device__ __forceinline__ void bring_if_any(int i) const
    {
        if (warp_id() + SPLIT_WARPS * i < s.count)
            bring(i);
        copy_async_commit();
    }
    /* At least to the L2 */
    __device__ __forceinline__ void ask(int i) const
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
        copy_async_wait<1>(); /* two groups under way, the older is wanted */
        __syncwarp();
#endif
    }
};

/* This step's key and value into the tile they belong to, and for values past them zeros. */
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

/* A query in place: as two numbers of the cache's type, the second ROW bytes behind the first. */
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
        uint32_t *half = (uint32_t *)head + lane + 32 * i;
        split_pair<BF16>(e[i].x * to_log2, e[i].y * to_log2, half, half + D / 2);
    }
}

/* What a lane has of the result: rows are elements of a piece, columns heads 2c and 2c+1. */
template <int D> struct attn_decode_split_sums {
    float out[D / 16][4], top[2], total[2];
};

/* Keys times queries: s[0] becomes the scores of rows g, g+8 and heads 2c, 2c+1. */
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

/* The softmax of a tile whose first key is key0: probabilities as B fragments, and what is there
 * already shrinks. */
template <int D, bool BF16>
DEVICE void attn_decode_split_softmax(float (&s)[4][4], const struct decode_unit &u, int key0,
                                      struct attn_decode_split_sums<D> &r, uint32_t (&hi)[2],
                                      uint32_t (&lo)[2])
{
    int g = lane_id() >> 2;
    float m[2] = {r.top[0], r.top[1]}, shrink[2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int key = key0 + key_of_row(g) + (e >> 1) * 2;
        s[0][e] = (s[0][e] + s[1][e]) + (s[2][e] + s[3][e]);
        if (key < u.from || key > u.last)
            s[0][e] = -INFINITY;
        m[e & 1] = fmaxf(m[e & 1], s[0][e]);
    }
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(FULL_WARP, m[0], d));
        m[1] = fmaxf(m[1], __shfl_xor_sync(FULL_WARP, m[1], d));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float anchor = m[h] == -INFINITY ? 0.0f : m[h]; /* nothing visible yet */
        shrink[h] = fast_exp2(r.top[h] - anchor);
        r.top[h] = m[h];
        m[h] = anchor;
        r.total[h] *= shrink[h];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        s[0][e] = fast_exp2(s[0][e] - m[e & 1]);
        r.total[e & 1] += s[0][e];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        split_pair<BF16>(s[0][2 * i], s[0][2 * i + 1], &hi[i], &lo[i]);
        hi[i] = transpose8(hi[i]);
        lo[i] = transpose8(lo[i]);
    }
    if (__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
        for (int e = 0; e < D / 4; e++)
            r.out[e >> 2][e & 3] *= shrink[e & 1];
}

/* Values times probabilities. */
template <int D, bool BF16>
DEVICE void attn_decode_split_values(const uint8_t *tile, const uint32_t (&hi)[2],
                                     const uint32_t (&lo)[2], struct attn_decode_split_sums<D> &r)
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
        for (int e = 0; e < 4; e++) { /* row g: element e of these eight; g+8: e+4 */
            uint32_t sel = e & 1 ? 0x7632 : 0x5410;
            const uint32_t a[4] = {
                byte_perm(word_of(v[0], e >> 1), word_of(v[1], e >> 1), sel),
                byte_perm(word_of(v[0], 2 + (e >> 1)), word_of(v[1], 2 + (e >> 1)), sel),
                byte_perm(word_of(v[2], e >> 1), word_of(v[3], e >> 1), sel),
                byte_perm(word_of(v[2], 2 + (e >> 1)), word_of(v[3], 2 + (e >> 1)), sel)};
            mma_kv<BF16>(r.out[4 * j + e], a, hi[0], hi[1]);
            mma_kv<BF16>(r.out[4 * j + e], a, lo[0], lo[1]);
        }
    }
}

/* A warp leaves its part, (8, PART_ROW), at `place`: that of the last tile it read. */
template <int D>
DEVICE void attn_decode_split_part(const struct attn_decode_split_sums<D> &r, uint8_t *place,
                                   float *ml)
{
    typedef attn_decode_split_tile<D> T;
    int w = warp_id(), g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* row g or g+8, head 2c or 2c+1 */
        float *to = (float *)place + (2 * c + (i & 1)) * T::PART_ROW + 8 * g + (i >> 1) * 4;
#pragma unroll
        for (int j = 0; j < D / 16; j += 4)
            *(float4 *)(to + 16 * j) =
                make_float4(r.out[j][i], r.out[j + 1][i], r.out[j + 2][i], r.out[j + 3][i]);
    }
    if (g == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ml[(w * 8 + 2 * c + i) * 2] = r.top[i];
            ml[(w * 8 + 2 * c + i) * 2 + 1] = r.total[i];
        }
    }
}

/* Joins the warps' parts of a group of four elements, a thread for each: the result where there is
 * one stretch, else a record for the others. */
template <int D, bool SINK>
DEVICE void attn_decode_split_join(const struct attn_args &p, const struct decode_unit &u,
                                   const struct attn_decode_split_shared<D> &sh, bool alone,
                                   float *to, float *record)
{
    typedef attn_decode_split_tile<D> T;
    int tid = (int)threadIdx.x, h = tid / (D / 4), at = tid % (D / 4) * 4;
    float m = -INFINITY, l = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < SPLIT_WARPS; j++)
        m = fmaxf(m, sh.ml[(j * 8 + h) * 2]);
    float anchor = m == -INFINITY ? 0.0f : m;
#pragma unroll
    for (int j = 0; j < SPLIT_WARPS; j++) {
        float f = fast_exp2(sh.ml[(j * 8 + h) * 2] - anchor);
        float4 e =
            *(const float4 *)((const float *)(sh.ring + sh.part_at[j]) + h * T::PART_ROW + at);
        l += f * sh.ml[(j * 8 + h) * 2 + 1];
        v.x += f * e.x, v.y += f * e.y, v.z += f * e.z, v.w += f * e.w;
    }
    if (alone) {
        l = decode_sum<SINK>(p, u.h0 + h, m, l);
        *(float4 *)(to + h * D + at) = make_float4(fast_divide(v.x, l), fast_divide(v.y, l),
                                                   fast_divide(v.z, l), fast_divide(v.w, l));
    } else {
        auto word = [](float f) { return bits_of(f) == NOT_YET ? 0x7fffffffu : bits_of(f); };
        store_now((uint4 *)record, make_uint4(word(v.x), word(v.y), word(v.z), word(v.w)));
        store_now((uint4 *)record + 1, make_uint4(word(m), word(l), 0, 0)); /* a whole sector */
    }
}

/* A group of four elements of head h, of which this lane has the record of one part: all `used` lanes
 * of the group add up. The record is waited for, and left as it was before. */
template <bool SINK>
DEVICE void attn_decode_split_add(const struct attn_args &p, int h, float *record, bool real,
                                  int used, bool writes, float *to)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    uint4 e = make_uint4(bits_of(-INFINITY), 0, 0, 0);
    if (real) {
        do {
            v = load_now((const uint4 *)record);
            e = load_now((const uint4 *)record + 1);
        } while (v.x == NOT_YET || v.y == NOT_YET || v.z == NOT_YET || v.w == NOT_YET ||
                 e.x == NOT_YET || e.y == NOT_YET);
        const uint4 none = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
        store_now((uint4 *)record, none); /* for the next launch */
        store_now((uint4 *)record + 1, none);
    }
    __syncwarp();
    float m = float_of(e.x);
#pragma unroll 1
    for (int d = used >> 1; d; d >>= 1)
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, d));
    float f = real ? fast_exp2(float_of(e.x) - m) : 0.0f;
    float sum[5] = {f * float_of(v.x), f * float_of(v.y), f * float_of(v.z), f * float_of(v.w),
                    f * float_of(e.y)};
#pragma unroll 1
    for (int d = used >> 1; d; d >>= 1)
#pragma unroll
        for (int j = 0; j < 5; j++)
            sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], d);
    if (SINK && real)
        sum[4] = decode_sum<SINK>(p, h, m, sum[4]);
    if (real && writes)
        *(float4 *)to = make_float4(fast_divide(sum[0], sum[4]), fast_divide(sum[1], sum[4]),
                                    fast_divide(sum[2], sum[4]), fast_divide(sum[3], sum[4]));
}

/* Grid: (stretches, kv heads x groups of 8 heads, sequences). */
template <int D, bool BF16, bool SINK>
static __global__ void __launch_bounds__(640)
    attn_decode_split_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_split_tile<D> T;
    enum { PIECES = D / 32, GROUPS = D / 4 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    struct attn_decode_split_shared<D> &sh = *(struct attn_decode_split_shared<D> *)shared;
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, tid = (int)threadIdx.x;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_decode_split_stretch s = attn_decode_split_stretch_of(p, u);
    float *to = decode_result<D>(p, u);
    if (u.slot < 0 || s.split >= s.used) { /* a padding row, or fewer stretches than blocks */
        dependency_trigger();
        if (u.slot >= 0)
            return;
        dependency_wait();
        if (s.split == 0)
            for (int i = tid; i < u.heads * D; i += SPLIT_THREADS)
                to[i] = 0.0f;
        return;
    }
    struct attn_decode_split_walk<D> k = {
        p, u, s, sh.ring, sh.bar + 2 * w, 0
    };
    k.warp_pages = k.page_of(lane);
#if BULK_COPIES
    if (lane < 2)
        bulk_init(k.bars + lane);
    __syncwarp();
#endif
    bool late = w == SPLIT_WARPS - 1; /* its second place is in use for now */
#pragma unroll 1
    for (int i = 0; i < (late ? 1 : 2); i++)
        k.bring_if_any(i);
    k.ask(late ? 1 : 2);

    /* Groups of four elements are added up by the blocks of a kv head, `each` in every one, a
     * lane for each part. The records are asked for now: those of the layer before have long left
     * the L2. */
    int groups = u.heads * GROUPS, each = (groups + s.used - 1) >> s.shift;
    int part = lane & (s.used - 1), share = tid >> s.shift;
    auto record_of = [&](int of, int group) {
        size_t unit = (size_t)u.t * gridDim.y + blockIdx.y;
        return p.records +
               ((unit * (size_t)p.n_split + (size_t)of) * (8 * GROUPS) + (size_t)group) *
                   SPLIT_RECORD;
    };
    if (s.used > 1 && share < each && s.split * each + share < groups)
        prefetch_l2(record_of(part, s.split * each + share));

    struct decode_heads<D, SPLIT_WARPS> heads;
    decode_heads_begin(p, u.t, true, heads);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    decode_heads_load(p, u, true, s.split == s.used - 1, heads);
    mark(mk, 4);
    uint8_t *query = sh.query();
    decode_heads_turn<D, BF16>(
        p, u, heads, sh.fresh,
        [&](int j) { return j ? sh.staged() + w * D : (float *)(query + w * T::Q_PITCH); },
        [&](int, float *head) { attn_decode_split_query<D, BF16>(head, p.scale); });
    __syncthreads();
    mark(mk, 5);

    uint4 q_hi[PIECES], q_lo[PIECES]; /* of head g */
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        q_hi[j] = *(const uint4 *)(query + g * T::Q_PITCH + c * 16 + j * 64);
        q_lo[j] = *(const uint4 *)(query + g * T::Q_PITCH + c * 16 + j * 64 + T::ROW);
    }
    shared_to_copies();
    __syncthreads(); /* the last place is free */
    struct attn_decode_split_sums<D> r = {
        {}, {-INFINITY, -INFINITY},
        {
            0.0f, 0.0f
        }
    };
#pragma unroll 1
    for (int i = 0; w + SPLIT_WARPS * i < s.count; i++) {
        uint8_t *tile = k.tile_at(i);
        int n = w + SPLIT_WARPS * i;
        if (i || late) { /* in the place of the one before */
            if (((i + 1) & 31) == 0)
                k.warp_pages = k.page_of(i + 1 + lane);
            k.bring_if_any(i + 1);
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
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) {
        r.total[0] += __shfl_xor_sync(FULL_WARP, r.total[0], i);
        r.total[1] += __shfl_xor_sync(FULL_WARP, r.total[1], i);
    }

    uint8_t *place = k.tile_at(w < s.count ? (s.count - 1 - w) / SPLIT_WARPS : 0);
    attn_decode_split_part<D>(r, place, sh.ml);
    sh.part_at[w] = (int)(place - sh.ring);
    __syncthreads();
    mark(mk, 7);
    if (tid < groups)
        attn_decode_split_join<D, SINK>(p, u, sh, s.used == 1, to, record_of(s.split, tid));
    mark(mk, 8);
    dependency_trigger(); /* not before: the next kernel's start takes issue slots */
    if (s.used == 1) {
        marks_end(mk, 7);
        return;
    }
    /* Everyone adds up its share of the elements: a lane for each part. */
    int mine = s.split, owners = 1;
#if !BULK_COPIES /* blocks that may not wait for each other: the last one adds up all */
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        int32_t *count_of = p.split_count + ((size_t)u.t * gridDim.y + blockIdx.y) * 8;
        sh.is_last = atomicAdd(count_of, 1) == s.used - 1;
        if (sh.is_last)
            *count_of = 0;
    }
    __syncthreads();
    if (!sh.is_last)
        return;
    __threadfence();
    mine = 0, owners = s.used;
#endif
#pragma unroll 1
    for (int owner = mine; owner < mine + owners; owner++) {
        int group = owner * each + share;
        attn_decode_split_add<SINK>(p, u.h0 + group / GROUPS, record_of(part, group),
                                    share < each && group < groups, s.used, part == 0,
                                    to + 4 * group);
    }
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
    if (!cu->clusters) /* nor a copy engine */
        return false;
#endif
    return cu->may_wait && attn_tensor(cu, l) &&
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
    p.records = cu->split_records;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    auto kernel = p.kv.type == DT_F16 ? attn_decode_split_kernel<D, false, SINK>
                                      : attn_decode_split_kernel<D, true, SINK>;
    cuda_launch(cu, kernel, grid, SPLIT_THREADS, sizeof(struct attn_decode_split_shared<D>),
                LAUNCH_EARLY, p);
}

void attn_decode_split(struct cuda_backend *cu, struct attn_args p)
{
    if (p.sinks) /* heads of 64: attn_tensor */
        attn_decode_split_launch<64, true>(cu, p);
    else if (p.kv.head_dim == 64)
        attn_decode_split_launch<64, false>(cu, p);
    else
        attn_decode_split_launch<128, false>(cu, p);
}
