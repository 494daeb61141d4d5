/*
 * Attention of decodes over a cache of codes (kv_coded.cuh), of keys and values in types of their own:
 * halves, Q8_0, FP8, Q4_0. Every part a layer may have, heads of 64 to 512, one sequence or many. A block
 * takes (sequence, up to 8 heads of one kv head, a stretch of keys), a warp 16 keys at a time ("a tile"),
 * which come as codes through a ring of the warp's own and become halves in its registers, so memory
 * and shared memory see nothing but codes. The type is asked once a tile, which costs a branch and
 * saves a kernel for every pair of types.
 *
 * Products have the keys, then the values' elements as rows and the 8 heads as columns. Queries and
 * probabilities are halves: codes are coarser than those. Which key is which row is chosen so that
 * neither reads of keys nor of values meet a bank twice; see coded_key.
 *
 * Stretches leave their parts in cu->split_acc; the last block of a unit to finish joins them.
 */
#include "backend/cuda/attn_decode.cuh"
#include "backend/cuda/kv_coded.cuh"

enum { CODED_KEYS = 16, CODED_WARPS = 8, CODED_STAGES = 4, CODED_PARTS = 64 };

/* Beside struct attn_args. A slot of a ring: keys, their scales, values, their scales. */
struct attn_coded {
    int k_type, v_type, stages;
    int k_scales, v_codes, v_scales, slot; /* where in a slot; its bytes */
    int ring; /* bytes of all rings, or of what follows in their place */
};

/* From a row to the next in shared memory: an odd number of 32 bytes. */
static __host__ __device__ constexpr int coded_pitch(int row)
{
    return ((row + 31) / 32 | 1) * 32;
}

/* Of row r of a fragment. Of rows 0-3, 4-7, of the even and of the odd ones, no two are the same key
 * modulo 4. */
DEVICE int coded_key(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) + 4 * odd + (r & 8);
}

/* What lies behind the rings. */
template <int D> struct attn_coded_shared {
    enum { Q_ROW = D + 32, PART_ROW = D + 4 };
    uint16_t q[8 * Q_ROW];   /* (8, Q_ROW) */
    uint8_t fresh[2][2 * D]; /* this step's key and value as codes ... */
    uint16_t fresh_scales[2][D / 32 < 8 ? 8 : D / 32];
    float head[CODED_WARPS * D]; /* (warps, D) */
    float ml[CODED_WARPS * 16];  /* (warps, 8, 2): maximum, sum */
    int is_last;
};

/* The tiles a block has: `count` of them, from `first` on, of `used` stretches. */
struct attn_coded_stretch {
    int used, first, count;
    bool has_last; /* this step's key is in the last of them */
};

DEVICE struct attn_coded_stretch attn_coded_stretch_of(const struct attn_args &p,
                                                       const struct decode_unit &u, int warps)
{
    struct attn_coded_stretch s;
    int start = u.from / CODED_KEYS, n = u.last / CODED_KEYS + 1 - start;
    int each = max((n + p.n_split - 1) / p.n_split, warps);
    s.used = (n + each - 1) / each;
    s.first = start + (int)blockIdx.x * each;
    s.count = min(each, start + n - s.first);
    s.has_last = (int)blockIdx.x == s.used - 1;
    return s;
}

/* A warp asks for 16 keys, or values, from `off` on of a (page, kv head) tile. */
template <int D, class T>
DEVICE void attn_coded_bring(const uint8_t *pool, size_t tile, int page_len, int off, uint8_t *to,
                             uint8_t *scales)
{
    enum { ROW = D / 32 * T::BLOCK, PIECES = ROW / 16, SCALES = T::SCALED ? D / 16 : 0 };
    const uint8_t *codes = pool + tile * (size_t)(page_len * (ROW + SCALES));
#pragma unroll 2
    for (int i = lane_id(); i < CODED_KEYS * PIECES; i += 32) {
        int r = i / PIECES;
        copy_async16(to + r * coded_pitch(ROW) + (i - r * PIECES) * 16, codes + off * ROW + i * 16);
    }
    if (T::SCALED)
        for (int i = lane_id(); i < SCALES; i += 32)
            copy_async16(scales + i * 16, codes + page_len * ROW + off * SCALES + i * 16);
}

/* This step's key, or value, in its place; of values, zeros behind it. */
template <int D, class T>
DEVICE void attn_coded_patch(uint8_t *rows, uint8_t *scales, int at, const uint8_t *fresh,
                             const uint16_t *fresh_scales, bool values)
{
    enum { ROW = D / 32 * T::BLOCK, PITCH = coded_pitch(ROW) };
    int lane = lane_id();
#pragma unroll 1
    for (int key = at; key < (values ? (int)CODED_KEYS : at + 1); key++) {
        bool mine = key == at;
        if (mine && !fresh)
            continue;
        for (int i = lane; i < ROW / 16; i += 32)
            *(uint4 *)(rows + key * PITCH + i * 16) =
                mine ? ((const uint4 *)fresh)[i] : make_uint4(0, 0, 0, 0);
        if (T::SCALED && lane < D / 32)
            ((uint16_t *)scales)[key * (D / 32) + lane] = mine ? fresh_scales[lane] : 0;
    }
    __syncwarp();
}

/* Keys times queries, in two chains: rows are keys, columns heads. */
template <int D, class T>
DEVICE void attn_coded_scores(const uint8_t *keys, const uint8_t *scales, const uint16_t *q,
                              const uint4 (&qf)[D > 128 ? 1 : D / 32], float (&s)[2][4])
{
    enum { ROW = D / 32 * T::BLOCK, PITCH = coded_pitch(ROW) };
    int g = lane_id() >> 2, c = lane_id() & 3, key = coded_key(g);
    const uint8_t *row = keys + key * PITCH + c * (T::BLOCK / 4);
    const uint16_t *scale = (const uint16_t *)scales + key * (D / 32);
    auto one = [&](int b, const uint4 &h) {
        uint32_t s0 = T::SCALED ? kv_scale_pair(scale + b) : 0;
        uint32_t s1 = T::SCALED ? kv_scale_pair(scale + 8 * (D / 32) + b) : 0;
        uint4 x = T::eight(row + b * T::BLOCK, s0);
        uint4 y = T::eight(row + 8 * PITCH + b * T::BLOCK, s1);
        const uint32_t a0[4] = {x.x, y.x, x.y, y.y}, a1[4] = {x.z, y.z, x.w, y.w};
        mma_f16(s[0], a0, h.x, h.y);
        mma_f16(s[1], a1, h.z, h.w);
    };
    if (D > 128) {
#pragma unroll 4
        for (int b = 0; b < D / 32; b++)
            one(b, *(const uint4 *)(q + g * attn_coded_shared<D>::Q_ROW + b * 32 + c * 8));
    } else {
#pragma unroll
        for (int b = 0; b < D / 32; b++)
            one(b, qf[D > 128 ? 0 : b]);
    }
}

/* A warp's sums. Of four elements e of each run of 64, at 8 g and 8 g + 4: heads 2c, 2c + 1. */
template <int D> struct attn_coded_sums {
    float out[(D + 63) / 64 * 4][4];
    float top[2], total[2]; /* of heads 2c, 2c + 1; total: this lane's part */
};

/* The softmax of a tile whose first key is key0: probabilities as B fragments, and what is there
 * already shrinks. */
template <int D>
DEVICE void attn_coded_softmax(const struct attn_args &p, const struct decode_unit &u,
                               float (&s)[2][4], int key0, struct attn_coded_sums<D> &r,
                               uint32_t (&pf)[2])
{
    int key = key0 + coded_key(lane_id() >> 2);
    float m[2] = {r.top[0], r.top[1]}, shrink[2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        s[0][e] += s[1][e];
        if (p.softcap != 0.0f)
            s[0][e] = 1.4426950408889634f * score_capped(s[0][e], p.softcap);
        if (key + (e >> 1) * 8 < u.from || key + (e >> 1) * 8 > u.last)
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
    pf[0] = transpose8(pack_half2(s[0][0], s[0][1]));
    pf[1] = transpose8(pack_half2(s[0][2], s[0][3]));
    if (__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
        for (int e = 0; e < (D + 63) / 64 * 16; e++)
            r.out[e >> 2][e & 3] *= shrink[e & 1];
}

/* Values times probabilities. Of heads of 96 the second half of the last run is read and dropped. */
template <int D, class T>
DEVICE void attn_coded_values(const uint8_t *values, const uint8_t *scales, const uint32_t (&pf)[2],
                              struct attn_coded_sums<D> &r)
{
    enum { ROW = D / 32 * T::BLOCK, PITCH = coded_pitch(ROW), EIGHT = T::BLOCK / 4 };
    int g = lane_id() >> 2, c = lane_id() & 3, key[2] = {coded_key(2 * c), coded_key(2 * c + 1)};
#pragma unroll
    for (int j = 0; j < (D + 63) / 64; j++) {
        uint4 v[4]; /* keys of rows 2c, 2c+1, 2c+8, 2c+9; elements 8(g + 8j) on */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = key[i & 1] + (i >> 1) * 8;
            const uint16_t *scale = (const uint16_t *)scales + at * (D / 32) + 2 * j + (g >> 2);
            v[i] = T::eight(values + at * PITCH + (8 * j + g) * EIGHT,
                            T::SCALED ? kv_scale_pair(scale) : 0);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) { /* row g: element e of these eight; g+8: e+4 */
            uint32_t sel = e & 1 ? 0x7632 : 0x5410;
            const uint32_t a[4] = {
                byte_perm(word_of(v[0], e >> 1), word_of(v[1], e >> 1), sel),
                byte_perm(word_of(v[0], 2 + (e >> 1)), word_of(v[1], 2 + (e >> 1)), sel),
                byte_perm(word_of(v[2], e >> 1), word_of(v[3], e >> 1), sel),
                byte_perm(word_of(v[2], 2 + (e >> 1)), word_of(v[3], 2 + (e >> 1)), sel)};
            mma_f16(r.out[4 * j + e], a, pf[0], pf[1]);
        }
    }
}

/* The unit's queries as halves, in powers of two unless a softcap comes between; and, of raw
 * projections, this step's key and value as codes. */
template <int D>
DEVICE void attn_coded_heads(const struct attn_args &p, const struct attn_coded &c,
                             const struct decode_unit &u, bool owns_fresh,
                             struct attn_coded_shared<D> &sh)
{
    int lane = lane_id(), warps = (int)blockDim.x >> 5;
    float by = p.softcap != 0.0f ? p.scale : 1.4426950408889634f * p.scale;
    float *head = sh.head + warp_id() * D;
    for (int i = u.heads * D / 2 + (int)threadIdx.x; i < 8 * D / 2; i += (int)blockDim.x)
        *(uint32_t *)(sh.q + i / (D / 2) * attn_coded_shared<D>::Q_ROW + i % (D / 2) * 2) = 0;
    for (int j = warp_id(); j < u.heads + (owns_fresh ? 2 : 0); j += warps) {
        int part = j < u.heads ? (int)ATTN_Q : (int)ATTN_K + j - u.heads;
        const float *from = p.q + ((size_t)u.t * (size_t)p.n_heads + (size_t)(u.h0 + j)) * D;
        float warm = 1.0f; /* turned and warmed by attn_heads unless they are raw */
        if (p.raw) {
            attn_head_make(p, u.t, part, part == ATTN_Q ? u.h0 + j : u.kv_head, 1.0f, head);
            if (kv_is_turned(part == ATTN_V ? c.v_type : c.k_type))
                kv_head_turn(head, D);
            from = head;
            warm = attn_temperature(p, u.t);
        }
        if (part == ATTN_Q) {
            for (int i = 2 * lane; i < D; i += 64)
                *(uint32_t *)(sh.q + j * attn_coded_shared<D>::Q_ROW + i) =
                    pack_half2(from[i] * warm * by, from[i + 1] * warm * by);
        } else {
            int is_v = part == ATTN_V, type = is_v ? c.v_type : c.k_type;
            struct kv_place place = {sh.fresh[is_v], sh.fresh_scales[is_v]};
            kv_head_put(type, head, D, place);
            if (u.h0 == u.kv_head * (p.n_heads / p.kv.n_kv)) /* the first of those that read it */
                kv_head_put(type, head, D,
                            kv_place_of(is_v ? p.kv.v : p.kv.k, type, u.slot, p.kv.page_len,
                                        p.kv.n_kv, u.kv_head, D));
        }
        __syncwarp();
    }
}

/* A warp leaves its part, (8, PART_ROW), and maximum and sum of each head. */
template <int D> DEVICE void attn_coded_part(struct attn_coded_sums<D> &r, float *part, float *ml)
{
    enum { PART_ROW = attn_coded_shared<D>::PART_ROW };
    int w = warp_id(), g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) {
        r.total[0] += __shfl_xor_sync(FULL_WARP, r.total[0], i);
        r.total[1] += __shfl_xor_sync(FULL_WARP, r.total[1], i);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* row g or g+8, head 2c or 2c+1 */
        float *to = part + (w * 8 + 2 * c + (i & 1)) * PART_ROW + 8 * g + (i >> 1) * 4;
#pragma unroll
        for (int j = 0; j < (D + 63) / 64; j++)
            if (64 * j + 8 * g < D)
                *(float4 *)(to + 64 * j) = make_float4(r.out[4 * j][i], r.out[4 * j + 1][i],
                                                       r.out[4 * j + 2][i], r.out[4 * j + 3][i]);
    }
    if (g == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ml[(w * 8 + 2 * c + i) * 2] = r.top[i];
            ml[(w * 8 + 2 * c + i) * 2 + 1] = r.total[i];
        }
}

/* A warp: the result of head h of the unit, in `head` in shared memory and not yet divided by its sum
 * l, of a largest score m: turned back, gated, written. */
template <int D>
DEVICE void attn_coded_write(const struct attn_args &p, const struct attn_coded &c,
                             const struct decode_unit &u, int h, float m, float l, float *head)
{
    float by = fast_divide(1.0f, l + attn_sink(p, u.h0 + h, m));
    const float *gate = attn_gate(p, u.t, u.h0 + h);
    float *to = decode_result<D>(p, u) + h * D;
    __syncwarp();
    if (kv_is_turned(c.v_type))
        kv_head_turn(head, D);
    for (int i = lane_id(); i < D; i += 32) {
        float v = head[i] * by;
        to[i] = gate ? v * sigmoid(gate[i]) : v;
    }
    __syncwarp();
}

/* A warp joins the stretches' parts of head h: lane i knows maximum and sum of parts i and i + 32. */
template <int D>
DEVICE void attn_coded_join(const float *acc, const float *ml, int used, int h, float *m, float *l,
                            float *head)
{
    enum { TRIP = 16 }; /* parts at once: one trip to the L2 */
    int lane = lane_id();
    float top[2], f[2];
    *m = -INFINITY, *l = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] =
            lane + 32 * i < used ? load_float_l2(ml + (lane + 32 * i) * 16 + 2 * h) : -INFINITY;
        *m = fmaxf(*m, top[i]);
    }
    *m = warp_max(*m);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        f[i] = fast_exp2(top[i] - *m);
        if (lane + 32 * i < used)
            *l += f[i] * load_float_l2(ml + (lane + 32 * i) * 16 + 2 * h + 1);
    }
    *l = warp_sum(*l);
#pragma unroll 1
    for (int at = 4 * lane; at < (D + 127) / 128 * 128; at += 128) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int j0 = 0; j0 < used; j0 += TRIP) {
            uint4 e[TRIP];
#pragma unroll
            for (int j = 0; j < TRIP; j++)
                e[j] = at < D && j0 + j < used
                           ? load_l2((const uint4 *)(acc + ((j0 + j) * 8 + h) * D + at))
                           : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < TRIP; j++) {
                float by = __shfl_sync(FULL_WARP, j0 + j < 32 ? f[0] : f[1], (j0 + j) & 31);
                v.x += by * float_of(e[j].x), v.y += by * float_of(e[j].y);
                v.z += by * float_of(e[j].z), v.w += by * float_of(e[j].w);
            }
        }
        if (at < D)
            *(float4 *)(head + at) = v;
    }
}

/* Joins the warps' parts, then, of several stretches, those of the blocks. */
template <int D>
DEVICE void attn_coded_finish(const struct attn_args &p, const struct attn_coded &c,
                              const struct decode_unit &u, const struct attn_coded_stretch &s,
                              const float *part, struct attn_coded_shared<D> &sh)
{
    enum { PART_ROW = attn_coded_shared<D>::PART_ROW };
    int lane = lane_id(), w = warp_id(), warps = (int)blockDim.x >> 5;
    size_t unit = (size_t)u.t * gridDim.y + blockIdx.y, first = unit * (size_t)p.n_split * 8;
    float *head = sh.head + w * D, *acc = p.split_acc + first * D, *ml = p.split_ml + first * 2;
    for (int h = w; h < u.heads; h += warps) {
        float m = -INFINITY, l = 0.0f;
        for (int j = 0; j < warps; j++)
            m = fmaxf(m, sh.ml[(j * 8 + h) * 2]);
        for (int i = lane; i < D; i += 32) {
            float v = 0.0f;
            for (int j = 0; j < warps; j++)
                v += fast_exp2(sh.ml[(j * 8 + h) * 2] - m) * part[(j * 8 + h) * PART_ROW + i];
            head[i] = v;
        }
        for (int j = 0; j < warps; j++)
            l += fast_exp2(sh.ml[(j * 8 + h) * 2] - m) * sh.ml[(j * 8 + h) * 2 + 1];
        if (s.used == 1) {
            attn_coded_write<D>(p, c, u, h, m, l, head);
            continue;
        }
        int at = (int)blockIdx.x * 8 + h;
        for (int i = lane; i < D; i += 32)
            acc[at * D + i] = head[i];
        if (lane < 2)
            ml[at * 2 + lane] = lane ? l : m;
        __syncwarp();
    }
    if (s.used == 1)
        return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *count = p.split_count + unit * 8;
        sh.is_last = atomicAdd(count, 1) == s.used - 1;
        if (sh.is_last)
            *count = 0;
    }
    __syncthreads();
    if (!sh.is_last)
        return;
    __threadfence();
    for (int h = w; h < u.heads; h += warps) {
        float m, l;
        attn_coded_join<D>(acc, ml, s.used, h, &m, &l, head);
        attn_coded_write<D>(p, c, u, h, m, l, head);
    }
}

/* Until the oldest of a ring's tiles has come: as many groups are under way as it has stages. */
DEVICE void attn_coded_wait(int stages)
{
    if (stages == 2)
        copy_async_wait<1>();
    else if (stages == 3)
        copy_async_wait<2>();
    else
        copy_async_wait<3>();
    __syncwarp();
}

/* Grid: (stretches, kv heads x groups of 8 heads, sequences). Unless p.q are raw projections, this
 * step's key and value are in the cache. */
template <int D>
static __global__ void __launch_bounds__(D > 256 ? 128 : 256, D > 128 ? 1 : 2)
    attn_decode_coded_kernel(const __grid_constant__ struct attn_args p,
                             const __grid_constant__ struct attn_coded c)
{
    SHARED_BYTES(shared);
    struct attn_coded_shared<D> &sh = *(struct attn_coded_shared<D> *)(shared + c.ring);
    int lane = lane_id(), w = warp_id(), warps = (int)blockDim.x >> 5;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_coded_stretch s = attn_coded_stretch_of(p, u, warps);
    dependency_trigger();
    if (u.slot < 0 ||
        (int)blockIdx.x >= s.used) { /* a padding row, or fewer stretches than blocks */
        dependency_wait();
        if (u.slot < 0 && blockIdx.x == 0)
            for (int i = (int)threadIdx.x; i < u.heads * D; i += (int)blockDim.x)
                decode_result<D>(p, u)[i] = 0.0f;
        return;
    }
    /* Tiles of earlier steps are asked for before the kernel in front has ended; the one with this
     * step's key only where that is put in later. */
    bool owns_fresh = p.raw && !p.heads.shares_kv && s.has_last;
    bool early = owns_fresh || !s.has_last;
    uint8_t *ring = shared + w * c.stages * c.slot;
    int asked = 0, n_tiles = w < s.count ? (s.count - 1 - w) / warps + 1 : 0;
    int32_t page_of = 0; /* of 32 tiles: lane i has that of tile i */
    auto bring = [&](uint8_t *to) {
        if (asked < n_tiles) {
            int key = (s.first + w + asked * warps) * CODED_KEYS;
            if (!(asked & 31))
                page_of = u.pages[min(key + lane * warps * CODED_KEYS, u.last) >> p.kv.page_shift];
            size_t tile = (size_t)__shfl_sync(FULL_WARP, page_of, asked & 31) * (size_t)p.kv.n_kv +
                          (size_t)u.kv_head;
            int off = key & (p.kv.page_len - 1);
            kv_with(c.k_type, [&](auto t) {
                attn_coded_bring<D, decltype(t)>(p.kv.k, tile, p.kv.page_len, off, to,
                                                 to + c.k_scales);
            });
            kv_with(c.v_type, [&](auto t) {
                attn_coded_bring<D, decltype(t)>(p.kv.v, tile, p.kv.page_len, off, to + c.v_codes,
                                                 to + c.v_scales);
            });
            asked++;
        }
        copy_async_commit();
    };
    if (!early)
        dependency_wait();
#pragma unroll 1
    for (int i = 0; i < c.stages; i++)
        bring(ring + i * c.slot);
    if (early)
        dependency_wait();
    attn_coded_heads<D>(p, c, u, owns_fresh, sh);
    __syncthreads();
    uint4 qf[D > 128 ? 1 : D / 32] = {};
    if (D <= 128)
#pragma unroll
        for (int b = 0; b < D / 32; b++)
            qf[D > 128 ? 0 : b] =
                *(const uint4 *)(sh.q + (lane >> 2) * attn_coded_shared<D>::Q_ROW + b * 32 +
                                 (lane & 3) * 8);
    struct attn_coded_sums<D> r = {
    };
    r.top[0] = r.top[1] = -INFINITY;
#pragma unroll 1
    for (int i = 0, at = 0; i < n_tiles; i++, at = at + 1 == c.stages ? 0 : at + 1) {
        uint8_t *tile = ring + at * c.slot;
        int key0 = (s.first + w + i * warps) * CODED_KEYS, last = u.last - key0;
        attn_coded_wait(c.stages);
        float sc[2][4] = {};
        uint32_t pf[2];
        kv_with(c.k_type, [&](auto t) {
            typedef decltype(t) T;
            if (last < CODED_KEYS && owns_fresh)
                attn_coded_patch<D, T>(tile, tile + c.k_scales, last, sh.fresh[0],
                                       sh.fresh_scales[0], false);
            attn_coded_scores<D, T>(tile, tile + c.k_scales, sh.q, qf, sc);
        });
        attn_coded_softmax<D>(p, u, sc, key0, r, pf);
        kv_with(c.v_type, [&](auto t) {
            typedef decltype(t) T;
            if (last < CODED_KEYS)
                attn_coded_patch<D, T>(tile + c.v_codes, tile + c.v_scales, last,
                                       owns_fresh ? sh.fresh[1] : NULL, sh.fresh_scales[1], true);
            attn_coded_values<D, T>(tile + c.v_codes, tile + c.v_scales, pf, r);
        });
        __syncwarp(); /* every lane is done with the tile that is fetched over */
        bring(tile);
    }
    copy_async_wait<0>();
    __syncthreads(); /* nobody reads keys any more */
    attn_coded_part<D>(r, (float *)shared, sh.ml);
    __syncthreads();
    attn_coded_finish<D>(p, c, u, s, (const float *)shared, sh);
}

/* Host */

/* Bytes of 16 rows of a type, and of their scales. */
static int coded_rows(int type, int dim)
{
    return CODED_KEYS * coded_pitch(type == DT_Q4_0 ? dim / 2 : type == DT_F16 ? 2 * dim : dim);
}
static int coded_scales(int type, int dim)
{
    return type == DT_Q8_0 || type == DT_Q4_0 ? CODED_KEYS * dim / 16 : 0;
}

template <int D>
static struct attn_coded attn_coded_of(int k_type, int v_type, int warps, int stages)
{
    struct attn_coded c = {};
    c.k_type = k_type;
    c.v_type = v_type;
    c.stages = stages;
    c.k_scales = coded_rows(k_type, D);
    c.v_codes = c.k_scales + coded_scales(k_type, D);
    c.v_scales = c.v_codes + coded_rows(v_type, D);
    c.slot = c.v_scales + coded_scales(v_type, D);
    int parts = warps * 8 * attn_coded_shared<D>::PART_ROW * 4, rings = warps * stages * c.slot;
    c.ring = rings > parts ? rings : parts;
    return c;
}

/* How many warps a block has, and how many stages their rings. Of heads up to 128 a block takes half of
 * an SM's shared memory at most: the kernel in front has the rest, and of many units several share an
 * SM. False: there is no room for two and two. */
template <int D>
static bool attn_coded_plan(const struct cuda_backend *cu, int k_type, int v_type, int units,
                            int *warps, struct attn_coded *c)
{
    int per_sm = D > 128 ? 1 : units <= 2 * cu->n_sm ? 2 : units <= 3 * cu->n_sm ? 3 : 4;
    *warps = units > cu->n_sm || D > 256 ? 4 : CODED_WARPS;
    size_t room = (cu->shared_limit + 1024) / (size_t)per_sm - 1024;
    for (; *warps >= 2; *warps /= 2) {
        for (int stages = CODED_STAGES; stages >= 2; stages--) {
            *c = attn_coded_of<D>(k_type, v_type, *warps, stages);
            if ((size_t)c->ring + sizeof(struct attn_coded_shared<D>) <= room)
                return true;
        }
    }
    *warps = 2;
    return (size_t)c->ring + sizeof(struct attn_coded_shared<D>) <= cu->shared_limit;
}

template <int D> static void attn_decode_coded_launch(struct cuda_backend *cu, struct attn_args p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8), units = p.kv.n_kv * groups * p.step.n_decode;
    int splits = attn_splits(cu, p.step.n_decode, p.n_heads, p.kv.n_kv), warps = 0;
    struct attn_coded c = {};
    CHECK(attn_coded_plan<D>(cu, p.kv.type & 255, p.kv.type >> 8, units, &warps, &c),
          "attn_decode_coded_fits was asked");
    p.n_split = cu->n_sm / units; /* no more than there is room for */
    p.n_split = p.n_split < 1 ? 1 : p.n_split > splits ? splits : p.n_split;
    p.n_split = p.n_split > CODED_PARTS ? CODED_PARTS : p.n_split;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    cuda_launch(cu, attn_decode_coded_kernel<D>, grid, warps * 32,
                (size_t)c.ring + sizeof(struct attn_coded_shared<D>), LAUNCH_EARLY, p, c);
}

template <int D> static bool attn_coded_has_room(const struct cuda_backend *cu)
{
    struct attn_coded c;
    int warps;
    return attn_coded_plan<D>(cu, cu->shape.k_type, cu->shape.v_type, 1, &warps, &c);
}

bool attn_decode_coded_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    int D = l->k_dim;
    return attn_coded_suits(cu, l) && (D == 64    ? attn_coded_has_room<64>(cu)
                                       : D == 96  ? attn_coded_has_room<96>(cu)
                                       : D == 128 ? attn_coded_has_room<128>(cu)
                                       : D == 256 ? attn_coded_has_room<256>(cu)
                                                  : attn_coded_has_room<512>(cu));
}

void attn_decode_coded(struct cuda_backend *cu, const struct attn_args &p)
{
    switch (p.kv.head_dim) {
    case 64:
        attn_decode_coded_launch<64>(cu, p);
        break;
    case 96:
        attn_decode_coded_launch<96>(cu, p);
        break;
    case 128:
        attn_decode_coded_launch<128>(cu, p);
        break;
    case 256:
        attn_decode_coded_launch<256>(cu, p);
        break;
    default:
        attn_decode_coded_launch<512>(cu, p);
        break;
    }
}
