/*
 * Split decode for attn_decode_split.cu (fp16 or bf16 cache) and attn_decode_split_quant.cu
 * (quantised cache): the keys of a unit are divided among blocks that wait for each other. Here:
 * which tiles a block has, a warp's partial result when the heads are the columns of the MMA
 * (attn_decode_quant.cu uses that, too), and how warps and blocks combine.
 *
 * The blocks of a kv head combine through the L2. Each stores its partial result as records, and
 * reduces its share of the elements over the records of all blocks. A record needs no flag: its
 * words hold a value that arithmetic never produces until they are written.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_DECODE_SPLIT_CUH
#define STEEL_BACKEND_CUDA_ATTN_DECODE_SPLIT_CUH

#include "backend/cuda/attn/attn_panels.cuh"

enum {
    SPLIT_WARPS = 8,
    SPLIT_THREADS = SPLIT_WARPS * 32,
    SPLIT_KEYS = 16,
    SPLIT_PARTS = 32,         /* most splits; a power of two */
    SPLIT_RECORD = 8,         /* floats: four elements, maximum, sum, two unused */
    SPLIT_UNSPLIT_TILES = 20, /* contexts of up to this many tiles are not split */
    SPLIT_MAX_TILES = 8       /* most tiles in a split while blocks are left */
};
static const uint32_t SPLIT_EMPTY =
    0xffffffffu; /* a record's word before it is written; a NaN that arithmetic never produces */

/* The tiles a block has: `count` tiles from `first` on. The context has 2^shift splits. */
struct attn_decode_split_range {
    int split, shift, used, first, count;
    int fresh_tile; /* index of the tile with this step's key, or -1 */
};

DEVICE struct attn_decode_split_range attn_decode_split_range_of(const struct attn_args &p,
                                                                 const struct decode_unit &u)
{
    struct attn_decode_split_range s;
    int start = u.from / SPLIT_KEYS, n_tiles = u.last / SPLIT_KEYS + 1 - start;
    s.split = (int)blockIdx.x;
    s.shift = 0; /* short contexts have one split, because combining costs more than it saves */
    if (n_tiles > SPLIT_UNSPLIT_TILES)
#pragma unroll 1
        while (1 << s.shift < p.n_split && n_tiles > SPLIT_MAX_TILES << s.shift)
            s.shift++;
    s.used = 1 << s.shift;
    /* The remainder goes to the first splits: the last one has the extra work of this step's
     * key. */
    s.first = (n_tiles * s.split + s.used - 1) >> s.shift;
    s.count = ((n_tiles * (s.split + 1) + s.used - 1) >> s.shift) - s.first;
    s.first += start;
    s.fresh_tile = s.split == s.used - 1 ? s.count - 1 : -1;
    return s;
}

/* True if the block has no keys: a padding row, whose result is written here, or fewer splits
 * than blocks. PANELS: args.panels may be set. */
template <int D, bool PANELS>
DEVICE bool attn_decode_split_idle(const struct attn_args &p, const struct decode_unit &u,
                                   const struct attn_decode_split_range &s)
{
    if (u.slot >= 0 && s.split < s.used)
        return false;
    dependency_trigger();
    if (u.slot >= 0)
        return true;
    dependency_wait();
    if (s.split == 0 && PANELS)
        panels_pad<D>(p, u);
    else if (s.split == 0)
        for (int i = (int)threadIdx.x; i < u.heads * D; i += SPLIT_THREADS)
            decode_result<D>(p, u)[i] = 0.0f;
    return true;
}

/*
 * Heads as MMA columns: the rows are keys in K q^T and elements in V^T P.
 */

/* A lane's accumulators. Elements come in runs of 64. Entry (j, i) of `out` belongs to run j >>
 * 2 and element 8 g + 4 (i >> 1) + (j & 3) of it, and to head 2c + (i & 1). */
template <int D> struct decode_columns {
    float out[(D + 63) / 64 * 4][4];
    float top[2], total[2]; /* of heads 2c, 2c + 1; total: this lane's part of the softmax sum */
};

template <int D> DEVICE void decode_columns_clear(struct decode_columns<D> &r)
{
#pragma unroll
    for (int e = 0; e < (D + 63) / 64 * 16; e++)
        r.out[e >> 2][e & 3] = 0.0f;
    r.top[0] = r.top[1] = -INFINITY;
    r.total[0] = r.total[1] = 0.0f;
}

/* Scores of a tile, in units of log2, to probabilities: entry e belongs to key_of(e >> 1) and
 * head 2c + (e & 1). Rescales the accumulators if a larger score was found. */
template <int D, class KEY>
DEVICE void decode_columns_softmax(float (&s)[4], const struct decode_unit &u, KEY key_of,
                                   struct decode_columns<D> &r)
{
    float m[2] = {r.top[0], r.top[1]}, shrink[2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int key = key_of(e >> 1);
        if (key < u.from || key > u.last)
            s[e] = -INFINITY;
        m[e & 1] = fmaxf(m[e & 1], s[e]);
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
        s[e] = fast_exp2(s[e] - m[e & 1]);
        r.total[e & 1] += s[e];
    }
    if (__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
        for (int e = 0; e < (D + 63) / 64 * 16; e++)
            r.out[e >> 2][e & 3] *= shrink[e & 1];
}

/* The A fragment of elements e and e + 4 of a piece of eight: row g is element e, row g + 8 is e
 * + 4. v holds 16 bytes each of the keys of probability rows 2c, 2c+1, 2c+8 and 2c+9. */
DEVICE void decode_columns_values(const uint4 (&v)[4], int e, uint32_t (&a)[4])
{
    uint32_t sel = e & 1 ? 0x7632 : 0x5410;
    a[0] = byte_perm(word_of(v[0], e >> 1), word_of(v[1], e >> 1), sel);
    a[1] = byte_perm(word_of(v[0], 2 + (e >> 1)), word_of(v[1], 2 + (e >> 1)), sel);
    a[2] = byte_perm(word_of(v[2], e >> 1), word_of(v[3], e >> 1), sel);
    a[3] = byte_perm(word_of(v[2], 2 + (e >> 1)), word_of(v[3], 2 + (e >> 1)), sel);
}

/* A warp stores its partial result, (8, D + 4), and each head's maximum and sum, (8, 2). */
template <int D>
DEVICE void decode_columns_part(struct decode_columns<D> &r, float *part, float *ml)
{
    int g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) {
        r.total[0] += __shfl_xor_sync(FULL_WARP, r.total[0], i);
        r.total[1] += __shfl_xor_sync(FULL_WARP, r.total[1], i);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* row g or g+8, head 2c or 2c+1 */
        float *to = part + (2 * c + (i & 1)) * (D + 4) + 8 * g + (i >> 1) * 4;
#pragma unroll
        for (int j = 0; j < (D + 63) / 64; j++)
            if (D % 64 == 0 || 64 * j + 8 * g < D)
                *(float4 *)(to + 64 * j) = make_float4(r.out[4 * j][i], r.out[4 * j + 1][i],
                                                       r.out[4 * j + 2][i], r.out[4 * j + 3][i]);
    }
    if (g == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ml[(2 * c + i) * 2] = r.top[i];
            ml[(2 * c + i) * 2 + 1] = r.total[i];
        }
    }
}

/*
 * Combining splits. Elements are reduced in groups of four, a lane per split. Each block of a kv
 * head reduces `each` groups.
 */
template <int D> struct attn_decode_split_shares {
    enum { GROUPS = D / 4 };
    const struct attn_args &p;
    const struct decode_unit &u;
    const struct attn_decode_split_range &s;
    int groups, each, part, share;

    __device__ __forceinline__ attn_decode_split_shares(const struct attn_args &args,
                                                        const struct decode_unit &unit,
                                                        const struct attn_decode_split_range &st)
        : p(args), u(unit), s(st)
    {
        groups = u.heads * GROUPS;
        each = (groups + s.used - 1) >> s.shift;
        part = lane_id() & (s.used - 1);
        share = (int)threadIdx.x >> s.shift;
    }
    __device__ __forceinline__ float *record_of(int of, int group) const
    {
        size_t unit = (size_t)u.t * gridDim.y + blockIdx.y;
        return p.records +
               ((unit * (size_t)p.n_split + (size_t)of) * (8 * GROUPS) + (size_t)group) *
                   SPLIT_RECORD;
    }
    /* Prefetches this lane's record to the L2: records last used by the previous layer have been
     * evicted. */
    __device__ __forceinline__ void prefetch() const
    {
        if (s.used > 1 && share < each && s.split * each + share < groups)
            prefetch_l2(record_of(part, s.split * each + share));
    }
};

/* One thread combines the warps' partial results of a group of four elements. The result is not
 * yet divided by the sum l; m is the largest score. part_at: byte offset of each warp's partial
 * result. */
template <int D, int WARPS>
DEVICE float4 attn_decode_split_warps_combine(const uint8_t *ring, const int *part_at,
                                              const float *ml, int group, float *m, float *l)
{
    int h = group / (D / 4) & 7, at = group % (D / 4) * 4;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    *m = -INFINITY, *l = 0.0f;
#pragma unroll
    for (int j = 0; j < WARPS; j++)
        *m = fmaxf(*m, ml[(j * 8 + h) * 2]);
    float anchor = *m == -INFINITY ? 0.0f : *m;
#pragma unroll
    for (int j = 0; j < WARPS; j++) {
        float f = fast_exp2(ml[(j * 8 + h) * 2] - anchor);
        float4 e = *(const float4 *)((const float *)(ring + part_at[j]) + h * (D + 4) + at);
        *l += f * ml[(j * 8 + h) * 2 + 1];
        v.x += f * e.x, v.y += f * e.y, v.z += f * e.z, v.w += f * e.w;
    }
    return v;
}

/* Stores a block's combined group: the final result if there is one split (also returned),
 * otherwise a record for the other blocks. */
template <int D, bool SINK>
DEVICE float4 attn_decode_split_store(const struct attn_decode_split_shares<D> &k, int group,
                                      float4 v, float m, float l)
{
    if (k.s.used == 1) {
        l = decode_sum<SINK>(k.p, k.u.h0 + group / (D / 4), m, l);
        v = make_float4(fast_divide(v.x, l), fast_divide(v.y, l), fast_divide(v.z, l),
                        fast_divide(v.w, l));
        *(float4 *)(decode_result<D>(k.p, k.u) + 4 * group) = v;
    } else {
        uint4 *record = (uint4 *)k.record_of(k.s.split, group);
        auto word = [](float f) { return bits_of(f) == SPLIT_EMPTY ? 0x7fffffffu : bits_of(f); };
        store_relaxed(record, make_uint4(word(v.x), word(v.y), word(v.z), word(v.w)));
        store_relaxed(record + 1,
                      make_uint4(word(m), word(l), 0, 0)); /* completes the 32-byte sector */
    }
    return v;
}

/* Reduces a group of four elements of head h over the `used` lanes that hold its splits. Waits
 * for this lane's record, then resets it to SPLIT_EMPTY for the next launch. */
template <bool SINK>
DEVICE void attn_decode_split_reduce(const struct attn_args &p, int h, float *record, bool real,
                                     int used, bool writes, float *to)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    uint4 e = make_uint4(bits_of(-INFINITY), 0, 0, 0);
    if (real) {
        do {
            v = load_relaxed((const uint4 *)record);
            e = load_relaxed((const uint4 *)record + 1);
        } while (v.x == SPLIT_EMPTY || v.y == SPLIT_EMPTY || v.z == SPLIT_EMPTY ||
                 v.w == SPLIT_EMPTY || e.x == SPLIT_EMPTY || e.y == SPLIT_EMPTY);
        const uint4 none = make_uint4(SPLIT_EMPTY, SPLIT_EMPTY, SPLIT_EMPTY, SPLIT_EMPTY);
        store_relaxed((uint4 *)record, none);
        store_relaxed((uint4 *)record + 1, none);
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

/* Each block reduces its share of the elements. is_last: a word of shared memory. */
template <int D, bool SINK>
DEVICE void attn_decode_split_combine(const struct attn_decode_split_shares<D> &k, int *is_last)
{
    int mine = k.s.split, owners = 1;
#if !BULK_COPIES /* blocks must not wait for each other here, so the last one to finish reduces all shares */
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *count_of = k.p.split_count + ((size_t)k.u.t * gridDim.y + blockIdx.y) * 8;
        *is_last = atomicAdd(count_of, 1) == k.s.used - 1;
        if (*is_last)
            *count_of = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    mine = 0, owners = k.s.used;
#else
    (void)is_last;
#endif
#pragma unroll 1
    for (int owner = mine; owner < mine + owners; owner++) {
        int group = owner * k.each + k.share;
        attn_decode_split_reduce<SINK>(k.p, k.u.h0 + group / (D / 4), k.record_of(k.part, group),
                                       k.share < k.each && group < k.groups, k.s.used, k.part == 0,
                                       decode_result<D>(k.p, k.u) + 4 * group);
    }
}

/* Host: enough shared memory per block that no two share an SM. Blocks start while the preceding
 * kernel is still running, and SMs become free at different times: without this, two blocks
 * would share an early SM while others stay idle (q4_0, heads of 128, depth 8,192: 571 tok/s
 * instead of 626). */
static inline size_t attn_decode_split_one_per_sm(const struct cuda_backend *cu, size_t bytes)
{
    size_t half = cu->shared_per_sm / 2;
    return bytes > half || half > cu->shared_limit ? bytes : half;
}

#endif
