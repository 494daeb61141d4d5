/*
 * Decodes over a cache of codes (kv_quant.cuh), keys and values in types of their own: what
 * attn_decode_quant.cu and attn_decode_split_quant.cu share. A warp takes 16 keys at a time ("a tile"),
 * which come as codes through a ring of its own and become halves in its registers, so memory
 * and shared memory see nothing but codes. The type is asked once a tile, which costs a branch and
 * saves a kernel for every pair of types.
 *
 * Products have the keys, then the values' elements as rows and the 8 heads as columns. Queries and
 * probabilities are halves: codes are coarser than those. Rows lie in shared memory as in the cache,
 * their pieces of 16 bytes in an order of the key's; with which key is which row of a fragment
 * (quant_key) neither reads of keys nor of values meet a bank twice.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_CODED_CUH
#define STEEL_BACKEND_CUDA_ATTN_CODED_CUH

#include "backend/cuda/attn/attn_decode_split.cuh"
#include "backend/cuda/attn/kv_quant.cuh"

enum { QUANT_KEYS = 16, QUANT_STAGES = 4, QUANT_STAGES_DEEP = 7 };

/* Beside struct attn_args. A slot of a ring: keys, their scales, values, their scales. */
struct attn_quant {
    int k_type, v_type, stages;
    int k_scales, v_codes, v_scales, slot; /* where in a slot; its bytes */
    int ring; /* bytes of all rings, or of what follows in their place */
};

/* From a row to the next in shared memory. Rows of 2^n pieces have no gap; others (heads of 96) are an
 * odd number of 32 bytes apart. */
static __host__ __device__ constexpr int quant_pitch(int row)
{
    return row & (row - 1) ? ((row + 31) / 32 | 1) * 32 : row;
}

/* Of row r of a fragment. Of rows 0-3, 4-7, of the even and of the odd ones, no two are the same key
 * modulo 4. */
DEVICE int quant_key(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) + 4 * odd + (r & 8);
}

/* Rows of a type. */
template <int D, class T> struct attn_quant_rows {
    enum {
        ROW = D / 32 * T::BLOCK,
        PIECES = ROW / 16,
        PITCH = quant_pitch(ROW),
        EIGHT = T::BLOCK / 4 /* bytes of eight values */
    };
    /* What a key's offsets are turned by: the same for key + 8. */
    static __device__ __forceinline__ int turn(int key)
    {
        int by = PITCH != ROW  ? 0
                 : PIECES >= 8 ? (key & 3) << 1
                 : PIECES == 4 ? (key & 2) | (key >> 2 & 1)
                               : key >> 2 & 1;
        return by << 4;
    }
};

/* This step's key and value as codes. */
template <int D> struct attn_quant_fresh {
    alignas(16) uint8_t codes[2][2 * D];
    uint16_t scales[2][D / 32 < 8 ? 8 : D / 32];
};

/* A warp asks for 16 keys, or values, from `off` on of a (page, kv head) tile. */
template <int D, class T>
DEVICE void attn_quant_bring(const uint8_t *pool, size_t tile, int page_len, int off, uint8_t *to,
                             uint8_t *scales)
{
    typedef attn_quant_rows<D, T> rows;
    enum { SCALES = T::SCALED ? D / 16 : 0 };
    const uint8_t *codes = pool + tile * (size_t)(page_len * (rows::ROW + SCALES));
#pragma unroll 4
    for (int i = lane_id(); i < QUANT_KEYS * rows::PIECES; i += 32) {
        int r = i / rows::PIECES;
        copy_async16(to + r * rows::PITCH + (((i - r * rows::PIECES) * 16) ^ rows::turn(r)),
                     codes + off * rows::ROW + i * 16);
    }
    if (T::SCALED)
        for (int i = lane_id(); i < SCALES; i += 32)
            copy_async16(scales + i * 16, codes + page_len * rows::ROW + off * SCALES + i * 16);
}

/* A warp's tiles: `first` and every step-th from there, n of them. */
template <int D> struct attn_quant_walk {
    const struct attn_args &p;
    const struct attn_quant &c;
    const struct decode_unit &u;
    int first, step, n, asked;
    int32_t page_of; /* of 32 tiles: lane i has that of tile i */

    /* The next tile, if there is one; a group of copies in any case. */
    __device__ __forceinline__ void bring(uint8_t *to)
    {
        if (asked < n) {
            int key = (first + asked * step) * QUANT_KEYS;
            if (!(asked & 31))
                page_of =
                    u.pages[min(key + lane_id() * step * QUANT_KEYS, u.last) >> p.kv.page_shift];
            size_t tile = (size_t)__shfl_sync(FULL_WARP, page_of, asked & 31) * (size_t)p.kv.n_kv +
                          (size_t)u.kv_head;
            int off = key & (p.kv.page_len - 1);
            kv_with(c.k_type, [&](auto t) {
                attn_quant_bring<D, decltype(t)>(p.kv.k, tile, p.kv.page_len, off, to,
                                                 to + c.k_scales);
            });
            kv_with(c.v_type, [&](auto t) {
                attn_quant_bring<D, decltype(t)>(p.kv.v, tile, p.kv.page_len, off, to + c.v_codes,
                                                 to + c.v_scales);
            });
            asked++;
        }
        copy_async_commit();
    }
};

/* Until the oldest of a ring's tiles has come: as many groups are under way as it has stages, which are
 * at most MOST. */
template <int MOST> DEVICE void attn_quant_wait(int stages)
{
    if constexpr (MOST > 2) {
        if (stages < MOST)
            return attn_quant_wait<MOST - 1>(stages);
    }
    copy_async_wait<MOST - 1>();
    __syncwarp();
}

/* This step's key, or value, in its place (fresh: or NULL, it is there); of values, zeros behind it. */
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
            *(uint4 *)(rows + key * type::PITCH + ((i * 16) ^ type::turn(key))) =
                mine ? ((const uint4 *)fresh)[i] : make_uint4(0, 0, 0, 0);
        if (T::SCALED && lane < D / 32)
            ((uint16_t *)scales)[key * (D / 32) + lane] = mine ? fresh_scales[lane] : 0;
    }
    __syncwarp();
}

/* The scales of a key's blocks, of heads of 64 and 128 read at once. */
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
    /* Of block 2j + odd, as a pair. */
    __device__ __forceinline__ uint32_t pair(int j, int odd) const
    {
        return WORDS > 0 ? byte_perm(w[WORDS > 0 ? j : 0], 0, odd ? 0x3232 : 0x1010)
                         : kv_scale_pair(at + 2 * j + odd);
    }
};

/* Keys times queries, in two chains: rows are keys, columns heads. q: (8, D + 32) halves, of which qf
 * has this lane's where heads are no wider than 128. */
template <int D, class T>
DEVICE void attn_quant_scores(const uint8_t *keys, const uint8_t *scales, const uint16_t *q,
                              const uint4 (&qf)[D > 128 ? 1 : D / 32], float (&s)[2][4])
{
    typedef attn_quant_rows<D, T> rows;
    int g = lane_id() >> 2, c = lane_id() & 3, key = quant_key(g), turn = rows::turn(key);
    const uint8_t *row = keys + key * rows::PITCH;
    struct attn_quant_scales<D> s0, s1;
    if (T::SCALED) {
        s0.load(scales, key);
        s1.load(scales, key + 8);
    }
    auto one = [&](int b, const uint4 &h) {
        const uint8_t *at = row + ((b * T::BLOCK + c * rows::EIGHT) ^ turn);
        uint4 x = T::eight(at, T::SCALED ? s0.pair(b >> 1, b & 1) : 0);
        uint4 y = T::eight(at + 8 * rows::PITCH, T::SCALED ? s1.pair(b >> 1, b & 1) : 0);
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

/* Values times probabilities. Of heads of 96 the second half of the last run is read and dropped. */
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
            v[i] =
                T::eight(values + at * rows::PITCH + (((8 * j + g) * rows::EIGHT) ^ rows::turn(at)),
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

/* A tile whose first key is key0. fresh: this step's key and value, where they are not in the cache;
 * or NULL. CAP: a softcap may come between. */
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
            attn_quant_patch<D, T>(tile, tile + c.k_scales, last, fresh->codes[0], fresh->scales[0],
                                   false);
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
            attn_quant_patch<D, T>(tile + c.v_codes, tile + c.v_scales, last,
                                   fresh ? fresh->codes[1] : NULL, fresh ? fresh->scales[1] : NULL,
                                   true);
        attn_quant_values<D, T>(tile + c.v_codes, tile + c.v_scales, pf, r);
    });
}

/* A lane's queries of (8, D + 32). */
template <int D>
DEVICE void attn_quant_queries(const uint16_t *q, uint4 (&qf)[D > 128 ? 1 : D / 32])
{
#pragma unroll
    for (int b = 0; b < (D > 128 ? 0 : D / 32); b++)
        qf[D > 128 ? 0 : b] =
            *(const uint4 *)(q + (lane_id() >> 2) * (D + 32) + b * 32 + (lane_id() & 3) * 8);
}

/* Bytes of 16 rows of a type, and of their scales. */
static __host__ __device__ constexpr int quant_rows(int type, int dim)
{
    return QUANT_KEYS * quant_pitch(type == DT_Q4_0 ? dim / 2 : type == DT_F16 ? 2 * dim : dim);
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
    c.v_codes = c.k_scales + quant_scales(k_type, dim);
    c.v_scales = c.v_codes + quant_rows(v_type, dim);
    c.slot = c.v_scales + quant_scales(v_type, dim);
    return c;
}

#endif
