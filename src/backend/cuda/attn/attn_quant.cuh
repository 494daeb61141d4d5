/*
 * Decode attention over a quantised KV cache (kv_quant.cuh), where keys and values may differ in
 * type: what attn_decode_quant.cu and attn_decode_split_quant.cu share. A warp processes 16 keys at
 * a time ("a tile"). Tiles arrive quantised through a ring of the warp's own and are dequantised to
 * fp16 in registers, so memory and shared memory hold quantised values only. The type is tested
 * once per tile; that costs a branch and saves a kernel per pair of types.
 *
 * MMA rows are the keys, then the values' elements; columns are the 8 heads. Queries and
 * probabilities are fp16, whose rounding is finer than the cache's. Rows lie in shared memory as in
 * the cache, with their 16-byte pieces swizzled by the key. With the mapping of keys to fragment
 * rows (quant_key), reads of keys and of values are free of bank conflicts.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_QUANT_CUH
#define STEEL_BACKEND_CUDA_ATTN_QUANT_CUH

#include "backend/cuda/attn/attn_decode_split.cuh"
#include "backend/cuda/attn/kv_quant.cuh"

enum { QUANT_KEYS = 16, QUANT_STAGES = 4, QUANT_STAGES_DEEP = 7 };

/* Additional kernel arguments: types, and the layout of a ring slot, which holds keys, their
 * scales, values, their scales. */
struct attn_quant {
    int k_type, v_type, stages;
    int k_scales, v_values, v_scales, slot; /* offsets in a slot; bytes of a slot */
    int ring; /* bytes of all rings, or of what reuses their memory if that is more */
};

/* Stride of rows in shared memory. Rows of 2^n pieces have no padding. Other rows (heads of 96)
 * get a stride that is an odd multiple of 32 bytes. */
static __host__ __device__ constexpr int quant_stride(int row)
{
    return row & (row - 1) ? ((row + 31) / 32 | 1) * 32 : row;
}

/* The key in row r of a fragment. Within rows 0-3, rows 4-7, the even rows and the odd rows, all
 * keys differ modulo 4. */
DEVICE int quant_key(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) + 4 * odd + (r & 8);
}

/* Layout of the rows of a type. */
template <int D, class T> struct attn_quant_rows {
    enum {
        ROW = D / 32 * T::BLOCK,
        PIECES = ROW / 16,
        STRIDE = quant_stride(ROW),
        EIGHT = T::BLOCK / 4 /* bytes per eight values */
    };
    /* XOR swizzle of a key's byte offsets; the same for key and key + 8. */
    static __device__ __forceinline__ int swizzle(int key)
    {
        int by = STRIDE != ROW ? 0
                 : PIECES >= 8 ? (key & 3) << 1
                 : PIECES == 4 ? (key & 2) | (key >> 2 & 1)
                               : key >> 2 & 1;
        return by << 4;
    }
};

/* This step's key and value, quantised. */
template <int D> struct attn_quant_fresh {
    alignas(16) uint8_t values[2][2 * D];
    uint16_t scales[2][D / 32 < 8 ? 8 : D / 32];
};

/* A warp issues the copies of 16 keys, or values, from `off` on of a (page, kv head) tile. */
template <int D, class T>
DEVICE void attn_quant_load(const uint8_t *pool, size_t tile, int page_len, int off, uint8_t *to,
                            uint8_t *scales)
{
    typedef attn_quant_rows<D, T> rows;
    enum { SCALES = T::SCALED ? D / 16 : 0 };
    const uint8_t *src = pool + tile * (size_t)(page_len * (rows::ROW + SCALES));
#pragma unroll 4
    for (int i = lane_id(); i < QUANT_KEYS * rows::PIECES; i += 32) {
        int r = i / rows::PIECES;
        copy_async16(to + r * rows::STRIDE + (((i - r * rows::PIECES) * 16) ^ rows::swizzle(r)),
                     src + off * rows::ROW + i * 16);
    }
    if (T::SCALED)
        for (int i = lane_id(); i < SCALES; i += 32)
            copy_async16(scales + i * 16, src + page_len * rows::ROW + off * SCALES + i * 16);
}

/* Iterates over a warp's n tiles: `first`, first + step, .. */
template <int D> struct attn_quant_walk {
    const struct attn_args &p;
    const struct attn_quant &c;
    const struct decode_unit &u;
    int first, step, n, issued;
    int32_t page_of; /* lane i holds the page of tile i, for 32 tiles at a time */

    /* Issues the copies of the next tile, if any. Commits a copy group in any case, so that
     * groups can be counted. */
    __device__ __forceinline__ void load_next(uint8_t *to)
    {
        if (issued < n) {
            int key = (first + issued * step) * QUANT_KEYS;
            if (!(issued & 31))
                page_of =
                    u.pages[min(key + lane_id() * step * QUANT_KEYS, u.last) >> p.kv.page_shift];
            size_t tile = (size_t)__shfl_sync(FULL_WARP, page_of, issued & 31) * (size_t)p.kv.n_kv +
                          (size_t)u.kv_head;
            int off = key & (p.kv.page_len - 1);
            kv_with(c.k_type, [&](auto t) {
                attn_quant_load<D, decltype(t)>(p.kv.k, tile, p.kv.page_len, off, to,
                                                to + c.k_scales);
            });
            kv_with(c.v_type, [&](auto t) {
                attn_quant_load<D, decltype(t)>(p.kv.v, tile, p.kv.page_len, off, to + c.v_values,
                                                to + c.v_scales);
            });
            issued++;
        }
        copy_async_commit();
    }
};

/* Waits for the oldest tile of a ring. One copy group per stage is in flight; a ring has at most
 * MOST stages. */
template <int MOST> DEVICE void attn_quant_wait(int stages)
{
    if constexpr (MOST > 2) {
        if (stages < MOST)
            return attn_quant_wait<MOST - 1>(stages);
    }
    copy_async_wait<MOST - 1>();
    __syncwarp();
}

/* Overwrites row `at` of a tile with this step's key, or value (fresh = NULL: it came from the
 * cache). Values after it become zeros. */
template <int D, class T>
DEVICE void attn_quant_patch(uint8_t *rows, uint8_t *scales, int at, const uint8_t *fresh,
                             const uint16_t *fresh_scales, bool values)
{
    typedef attn_quant_rows<D, T> type;
    int lane = lane_id();
#pragma unroll 1
    for (int key = at; key < (values ? (int)QUANT_KEYS : at + 1); key++) {
        bool mine = key == at;
        if (mine && !fresh)
            continue;
        for (int i = lane; i < type::PIECES; i += 32)
            *(uint4 *)(rows + key * type::STRIDE + ((i * 16) ^ type::swizzle(key))) =
                mine ? ((const uint4 *)fresh)[i] : make_uint4(0, 0, 0, 0);
        if (T::SCALED && lane < D / 32)
            ((uint16_t *)scales)[key * (D / 32) + lane] = mine ? fresh_scales[lane] : 0;
    }
    __syncwarp();
}

/* The scales of a key's blocks. For heads of 64 and 128 they are read with one load. */
template <int D> struct attn_quant_scales {
    static constexpr int WORDS = D == 64 ? 1 : D == 128 ? 2 : 0;
    const uint16_t *at;
    uint32_t w[2];

    __device__ __forceinline__ void load(const uint8_t *scales, int key)
    {
        at = (const uint16_t *)scales + key * (D / 32);
        if (WORDS == 1)
            w[0] = *(const uint32_t *)at;
        if (WORDS == 2) {
            uint2 v = *(const uint2 *)at;
            w[0] = v.x, w[1] = v.y;
        }
    }
    /* The scale of block 2j + odd, twice in a word. */
    __device__ __forceinline__ uint32_t pair(int j, int odd) const
    {
        return WORDS > 0 ? byte_perm(w[WORDS > 0 ? j : 0], 0, odd ? 0x3232 : 0x1010)
                         : kv_scale_pair(at + 2 * j + odd);
    }
};

/* K q^T in two accumulator chains: rows are keys, columns heads. q: (8, D + 32) fp16. For heads
 * up to 128, qf holds this lane's part of it. */
template <int D, class T>
DEVICE void attn_quant_scores(const uint8_t *keys, const uint8_t *scales, const uint16_t *q,
                              const uint4 (&qf)[D > 128 ? 1 : D / 32], float (&s)[2][4])
{
    typedef attn_quant_rows<D, T> rows;
    int g = lane_id() >> 2, c = lane_id() & 3, key = quant_key(g), swizzle = rows::swizzle(key);
    const uint8_t *row = keys + key * rows::STRIDE;
    struct attn_quant_scales<D> s0, s1;
    if (T::SCALED) {
        s0.load(scales, key);
        s1.load(scales, key + 8);
    }
    auto one = [&](int b, const uint4 &h) {
        const uint8_t *at = row + ((b * T::BLOCK + c * rows::EIGHT) ^ swizzle);
        uint4 x = T::eight(at, T::SCALED ? s0.pair(b >> 1, b & 1) : 0);
        uint4 y = T::eight(at + 8 * rows::STRIDE, T::SCALED ? s1.pair(b >> 1, b & 1) : 0);
        const uint32_t a0[4] = {x.x, y.x, x.y, y.y}, a1[4] = {x.z, y.z, x.w, y.w};
        mma_f16(s[0], a0, h.x, h.y);
        mma_f16(s[1], a1, h.z, h.w);
    };
    if (D > 128) {
#pragma unroll 4
        for (int b = 0; b < D / 32; b++)
            one(b, *(const uint4 *)(q + g * (D + 32) + b * 32 + c * 8));
    } else {
#pragma unroll
        for (int b = 0; b < D / 32; b++)
            one(b, qf[D > 128 ? 0 : b]);
    }
}

/* V^T P. For heads of 96, the second half of the last run is read and dropped. */
template <int D, class T>
DEVICE void attn_quant_values(const uint8_t *values, const uint8_t *scales, const uint32_t (&pf)[2],
                              struct decode_columns<D> &r)
{
    typedef attn_quant_rows<D, T> rows;
    int g = lane_id() >> 2, c = lane_id() & 3, key[2] = {quant_key(2 * c), quant_key(2 * c + 1)};
    struct attn_quant_scales<D> s[4];
    if (T::SCALED)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[i].load(scales, key[i & 1] + (i >> 1) * 8);
#pragma unroll
    for (int j = 0; j < (D + 63) / 64; j++) {
        uint4 v[4]; /* keys of rows 2c, 2c+1, 2c+8, 2c+9; elements 8(g + 8j) on */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = key[i & 1] + (i >> 1) * 8;
            v[i] = T::eight(values + at * rows::STRIDE +
                                (((8 * j + g) * rows::EIGHT) ^ rows::swizzle(at)),
                            T::SCALED ? s[i].pair(j, g >> 2) : 0);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            uint32_t a[4];
            decode_columns_values(v, e, a);
            mma_f16(r.out[4 * j + e], a, pf[0], pf[1]);
        }
    }
}

/* Processes a tile whose first key is key0. fresh: this step's key and value if they are not in
 * the cache yet, else NULL. CAP: the layer may have a softcap. */
template <int D, bool CAP>
DEVICE void attn_quant_tile(const struct attn_args &p, const struct attn_quant &c,
                            const struct decode_unit &u, uint8_t *tile, int key0,
                            const struct attn_quant_fresh<D> *fresh, const uint16_t *q,
                            const uint4 (&qf)[D > 128 ? 1 : D / 32], struct decode_columns<D> &r)
{
    int last = u.last - key0, key = key0 + quant_key(lane_id() >> 2);
    float s[2][4] = {};
    kv_with(c.k_type, [&](auto t) {
        typedef decltype(t) T;
        if (last < QUANT_KEYS && fresh)
            attn_quant_patch<D, T>(tile, tile + c.k_scales, last, fresh->values[0],
                                   fresh->scales[0], false);
        attn_quant_scores<D, T>(tile, tile + c.k_scales, q, qf, s);
    });
#pragma unroll
    for (int e = 0; e < 4; e++) {
        s[0][e] += s[1][e];
        if (CAP && p.softcap != 0.0f)
            s[0][e] = 1.4426950408889634f * score_capped(s[0][e], p.softcap);
    }
    decode_columns_softmax<D>(
        s[0], u, [&](int i) { return key + 8 * i; }, r);
    uint32_t pf[2] = {transpose8(pack_half2(s[0][0], s[0][1])),
                      transpose8(pack_half2(s[0][2], s[0][3]))};
    kv_with(c.v_type, [&](auto t) {
        typedef decltype(t) T;
        if (last < QUANT_KEYS)
            attn_quant_patch<D, T>(tile + c.v_values, tile + c.v_scales, last,
                                   fresh ? fresh->values[1] : NULL, fresh ? fresh->scales[1] : NULL,
                                   true);
        attn_quant_values<D, T>(tile + c.v_values, tile + c.v_scales, pf, r);
    });
}

/* Loads a lane's part of the queries, (8, D + 32). */
template <int D>
DEVICE void attn_quant_queries(const uint16_t *q, uint4 (&qf)[D > 128 ? 1 : D / 32])
{
#pragma unroll
    for (int b = 0; b < (D > 128 ? 0 : D / 32); b++)
        qf[D > 128 ? 0 : b] =
            *(const uint4 *)(q + (lane_id() >> 2) * (D + 32) + b * 32 + (lane_id() & 3) * 8);
}

/* Bytes of a tile's 16 rows of a type, and of their scales. */
static __host__ __device__ constexpr int quant_rows(int type, int dim)
{
    return QUANT_KEYS * quant_stride(type == DT_Q4_0 ? dim / 2 : type == DT_F16 ? 2 * dim : dim);
}
static __host__ __device__ constexpr int quant_scales(int type, int dim)
{
    return type == DT_Q8_0 || type == DT_Q4_0 ? QUANT_KEYS * dim / 16 : 0;
}

static __host__ __device__ constexpr struct attn_quant attn_quant_of(int k_type, int v_type,
                                                                     int dim, int stages)
{
    struct attn_quant c = {};
    c.k_type = k_type;
    c.v_type = v_type;
    c.stages = stages;
    c.k_scales = quant_rows(k_type, dim);
    c.v_values = c.k_scales + quant_scales(k_type, dim);
    c.v_scales = c.v_values + quant_rows(v_type, dim);
    c.slot = c.v_scales + quant_scales(v_type, dim);
    return c;
}

#endif
