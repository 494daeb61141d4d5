/*
 * Tiles x up to eight rows of activations held in registers by a warp: batched decode.
 *
 * Record: the activations of a slice (256 columns) of one row, 576 bytes. First fp16 values in
 * fragment order (32 columns in 64 bytes; lane c's 4c.. and 16+4c.. adjacent), then the sums of
 * each 16 columns, as an fp16 plus the fp16 of its rounding error. Lane (g, c) of a warp holds its
 * part of row g, which is column g of the tensor core's B: 32 registers, and 4 of sums.
 * Codes go to the tensor cores as in dot.cuh: 1024 + code for rows g, 1024 + 16 code for rows g+8.
 * Scales multiply the float sums of a group.
 * Offsets and minima contribute scale x sum of activations, added over the groups of a tile. That
 * is a small matrix product, so the tensor cores compute it too: two instructions per tile, where
 * the direct way takes eight per group. (1024 T is exact to 22 bits; the loss is a tenth of that of
 * rounding the activations to fp16.)
 */
#ifndef STEEL_BACKEND_CUDA_ROWS_CUH
#define STEEL_BACKEND_CUDA_ROWS_CUH

#include "backend/cuda/gemm/gemm.cuh"

enum { RECORD_SUMS = 512 };

struct row_frag {
    uint32_t b[16][2]; /* [16 columns]{4c 4c+1, 4c+2 4c+3} */
    uint32_t t[4];     /* sums of 16 columns 4c..4c+3: fp16, and rounding errors */
};

/* Loads this lane's part of its row's record. A missing row needs a record of zeros, or any record
 * if nobody reads the result. */
DEVICE void frag_load(struct row_frag &f, const uint8_t *record)
{
    const uint8_t *from = record + (lane_id() & 3) * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint4 v = load16(from + i * 64);
        f.b[2 * i][0] = v.x, f.b[2 * i][1] = v.y;
        f.b[2 * i + 1][0] = v.z, f.b[2 * i + 1][1] = v.w;
    }
    uint4 v = load16(from + RECORD_SUMS);
    f.t[0] = v.x, f.t[1] = v.y, f.t[2] = v.z, f.t[3] = v.w;
}

/* A row that stays in shared memory and is read as needed: leaves registers for more warps. */
struct row_in_shared {
    const uint8_t *at; /* this lane's part of the record */
};
DEVICE struct row_in_shared frag_at(const uint8_t *record)
{
    struct row_in_shared r = {record + (lane_id() & 3) * 16};
    return r;
}
/* 32 columns of a row_frag or row_in_shared, and the sums. */
DEVICE uint4 frag_pair(const struct row_frag &f, int i)
{
    return make_uint4(f.b[2 * i][0], f.b[2 * i][1], f.b[2 * i + 1][0], f.b[2 * i + 1][1]);
}
DEVICE uint4 frag_pair(const struct row_in_shared &f, int i)
{
    return load16(f.at + i * 64);
}
DEVICE uint4 frag_totals(const struct row_frag &f)
{
    return make_uint4(f.t[0], f.t[1], f.t[2], f.t[3]);
}
DEVICE uint4 frag_totals(const struct row_in_shared &f)
{
    return load16(f.at + RECORD_SUMS);
}

/* Offset within a record of the four columns from k (a multiple of four), and of the sum of their
 * 16. */
DEVICE int record_at(int k)
{
    int j = k >> 4 & 15;
    return (j >> 1) * 64 + (k >> 2 & 3) * 16 + (j & 1) * 8;
}
DEVICE int record_sum_at(int k)
{
    int j = k >> 4 & 15;
    return RECORD_SUMS + (j >> 2) * 16 + (j & 3) * 2;
}
/* {fp16 of v, fp16 of the rounding error} */
DEVICE uint32_t split_half(float v)
{
    uint32_t hi = float_to_half(v);
    return hi | (uint32_t)float_to_half(v - half_to_float(hi)) << 16;
}

/* The sums of a fragment, computed from its fp16 values by a product: the activations are A, and B
 * selects the column of each group's sum. */
DEVICE void frag_sums(struct row_frag &f)
{
    int g = lane_id() >> 2;
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int j = 0; j < 16; j++) {
        uint32_t one = g == (j >> 2) * 2 + (j & 1) ? 0x3c003c00u : 0;
        uint32_t a[4] = {f.b[j][0], 0, f.b[j][1], 0};
        mma_f16(j & 2 ? hi : lo, a, one, one);
    }
    uint32_t s[4] = {split_half(lo[0]), split_half(lo[1]), split_half(hi[0]), split_half(hi[1])};
    f.t[0] = byte_perm(s[0], s[1], 0x5410);
    f.t[1] = byte_perm(s[2], s[3], 0x5410);
    f.t[2] = byte_perm(s[0], s[1], 0x7632);
    f.t[3] = byte_perm(s[2], s[3], 0x7632);
}

/* c = A T, with both parts of the sums */
DEVICE void sums_mma(float (&c)[4], const uint32_t (&a)[4], const uint4 &t)
{
    const float zero[4] = {};
    mma_f16_from(c, a, t.x, t.y, zero);
    mma_f16(c, a, t.z, t.w);
}

/* All scales (or minima) of a tile as a fragment: this lane's columns are the 16-column groups
 * 4c..4c+3 of the tile. f(h, i) returns pair i of row half h. */
template <int GROUP, class F> DEVICE void scale_frags(uint32_t (&a)[4], F f)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = GROUP == 16 ? f(i & 1, i >> 1) : both_of(f(i & 1, 0), i >> 1);
}

/* Chunks of a tile unrolled together. Rows in registers need compile-time indices. With rows in
 * shared memory, kernels of all formats unroll less to save code. */
template <class X> struct frag_steps {
    enum { OF_MANY = 4 };
};
template <> struct frag_steps<struct row_in_shared> {
    enum { OF_MANY = 2 };
};

/* Formats whose code times scale is exact in fp16 (NVFP4): a tile is one sum. Alternate 16-column
 * groups use two accumulators, since a product waits for the previous one. */
template <int KIND> struct frag_is_scaled {
    enum { VALUE = KIND == TILE_NVFP4 };
};
template <int KIND> DEVICE void scaled_codes(uint32_t (&a)[2][4], const uint8_t *tile, int i)
{
    typedef format<KIND> F;
    typename F::codes w;
    typename F::scales sc;
    w.fetch(tile, i >> 1, lane_id());
    sc.fetch(tile + F::SCALES_AT, i >> 1, lane_id() >> 2);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w.raw(2 * (i & 1) + j, a[j]);
#pragma unroll
        for (int e = 0; e < 4; e++)
            a[j][e] = half2_mul(a[j][e], both_of(sc.pair_of_raw(e & 1, i & 1), j));
    }
}
template <int KIND, int STEPS, int NT, class X>
DEVICE void frag_scaled(const uint8_t *tile, const X (&x)[NT], float (&acc)[NT][4])
{
    typedef format<KIND> F;
    float sum[2][NT][4] = {};
#pragma unroll(STEPS)
    for (int q = 0; q < 4; q++)
#pragma unroll
        for (int i = 2 * q; i < 2 * q + 2; i++) {
            uint32_t a[2][4];
            scaled_codes<KIND>(a, tile, i);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint4 b = frag_pair(x[n], i);
                mma_f16(sum[0][n], a[0], b.x, b.y);
                mma_f16(sum[1][n], a[1], b.z, b.w);
            }
        }
    typename F::scales all;
    all.fetch(tile + F::SCALES_AT, 0, lane_id() >> 2);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] += all.row(e >> 1) * (sum[0][n][e] + sum[1][n][e]);
}

/* acc[n] += tile x rows of x[n] (row_frag or row_in_shared). d0 d1: row g, columns 2c 2c+1; d2 d3:
 * row g+8. */
template <int KIND, int STEPS, int NT, class X>
DEVICE void frag_codes(const uint8_t *tile, const X (&x)[NT], float (&acc)[NT][4])
{
    typedef format<KIND> F;
    if constexpr (frag_is_scaled<KIND>::VALUE)
        return frag_scaled<KIND, STEPS>(tile, x, acc);
    int lane = lane_id();
    const float zero[4] = {};
    float sum[NT][4] = {};
#pragma unroll(STEPS)
    for (int q = 0; q < 4; q++) {
        typename F::codes w;
        typename F::scales sc;
        w.fetch(tile, q, lane);
        sc.fetch(tile + F::SCALES_AT, q, lane >> 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a0[4], a1[4];
            w.raw(2 * h, a0);
            w.raw(2 * h + 1, a1);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint4 b = frag_pair(x[n], 2 * q + h);
                float c[4];
                mma_f16_from(c, a0, b.x, b.y, zero);
                if constexpr (F::GROUP == 32) {
                    mma_f16(c, a1, b.z, b.w);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[n][e] += sc.scale(e >> 1, h) * c[e];
                } else {
                    float d[4];
                    mma_f16_from(d, a1, b.z, b.w, zero);
#pragma unroll
                    for (int e = 0; e < 4; e++) { /* two instructions; as a sum, three */
                        sum[n][e] += sc.scale(e >> 1, 2 * h) * c[e];
                        sum[n][e] += sc.scale(e >> 1, 2 * h + 1) * d[e];
                    }
                }
            }
        }
    }
    typename F::scales all;
    all.fetch(tile + F::SCALES_AT, lane & 3, lane >> 2);
    uint32_t as[4], am[4], rest[4];
    if constexpr (F::codes::HAS_LESS)
        scale_frags<F::GROUP>(as, [&](int h, int i) { return all.pair(h, i); });
    if constexpr (F::MINS != 0)
        scale_frags<F::GROUP>(am, [&](int h, int i) { return all.least_pair(h, i); });
    if constexpr (F::MINS == 2)
        scale_frags<F::GROUP>(rest, [&](int h, int i) { return all.least_rest(h, i); });
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint4 t = frag_totals(x[n]);
        float ts[4] = {}, tm[4] = {};
        if constexpr (F::codes::HAS_LESS)
            sums_mma(ts, as, t);
        if constexpr (F::MINS != 0)
            sums_mma(tm, am, t);
        if constexpr (F::MINS == 2) {
            mma_f16(tm, rest, t.x, t.y);
            mma_f16(tm, rest, t.z, t.w);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int h = e >> 1;
            acc[n][e] += all.row(h) * F::codes::unit(h) * (sum[n][e] - F::codes::less(h) * ts[e]);
            if constexpr (F::MINS != 0)
                acc[n][e] += all.row_least(h) * tm[e];
        }
    }
}

/* KIND: kind of the tile, or ANY_K, ANY_CODES. */
template <int KIND, int NT, class X>
DEVICE void frag_tile(int kind, const uint8_t *tile, const X (&x)[NT], float (&acc)[NT][4])
{
    if constexpr (KIND == ANY_CODES)
        quant_kind(kind, [&](auto k) {
            constexpr int steps = k.VALUE <= TILE_Q6_K ? 4 : frag_steps<X>::OF_MANY;
            frag_codes<k.VALUE, steps>(tile, x, acc);
        });
    else if constexpr (KIND >= 0)
        frag_codes<KIND, 4>(tile, x, acc);
    else if (kind == TILE_Q4_K)
        frag_codes<TILE_Q4_K, 4>(tile, x, acc);
    else
        frag_codes<TILE_Q6_K, 4>(tile, x, acc);
}

/* A warp's ring of STAGES weight tiles in shared memory, first in, first out. Filled by bulk copies
 * where available, otherwise by the warp's own asynchronous copies. */
template <int STAGES> struct tile_ring {
    uint8_t *slots; /* (STAGES, slot) */
    int slot, in, out;
#if BULK_COPIES
    uint64_t *bars;  /* (STAGES) */
    uint32_t parity; /* phase bit of each stage */
#endif
};
/* Bytes of a warp's ring. */
static __host__ __device__ constexpr int ring_bytes(int stages, int slot)
{
    return stages * (slot + 16);
}
template <int STAGES> DEVICE void ring_init(struct tile_ring<STAGES> &r, uint8_t *base, int slot)
{
    r.slots = base;
    r.slot = slot;
    r.in = r.out = 0;
#if BULK_COPIES
    r.bars = (uint64_t *)(base + STAGES * slot);
    r.parity = 0;
    if (lane_id() == 0)
#pragma unroll
        for (int i = 0; i < STAGES; i++)
            bulk_init(r.bars + i);
    __syncwarp();
#endif
}
/* Starts the copy of the next tile; `real` false: there is none. Its slot is free: the tile STAGES
 * before was released. */
template <int STAGES, bool ONCE = false>
DEVICE void ring_fetch(struct tile_ring<STAGES> &r, const uint8_t *from, int bytes, bool real)
{
#if BULK_COPIES
    if (real && lane_id() == 0) {
        if (ONCE)
            bulk_copy_once(r.slots + r.in * r.slot, from, bytes, r.bars + r.in);
        else
            bulk_copy(r.slots + r.in * r.slot, from, bytes, r.bars + r.in);
    }
#else
    if (real)
        tile_fetch(r.slots + r.in * r.slot, from, bytes);
    copy_async_commit();
#endif
    r.in = r.in + 1 == STAGES ? 0 : r.in + 1;
}
/* Waits for the oldest tile and returns it. */
template <int STAGES> DEVICE const uint8_t *ring_wait(struct tile_ring<STAGES> &r)
{
#if BULK_COPIES
    bulk_wait(r.bars + r.out, r.parity >> r.out & 1);
#else
    copy_async_wait<STAGES - 1>();
    __syncwarp();
#endif
    return r.slots + r.out * r.slot;
}
/* Releases the oldest tile, after every lane has read it. */
template <int STAGES> DEVICE void ring_release(struct tile_ring<STAGES> &r)
{
    __syncwarp();
#if BULK_COPIES
    r.parity ^= 1u << r.out;
#endif
    r.out = r.out + 1 == STAGES ? 0 : r.out + 1;
}

/* Addresses of the tiles of one slice of a segment. */
struct tile_plane {
    const uint8_t *base;  /* of expert 0, row tile 0 of the segment, this slice */
    size_t expert;        /* stride between experts in bytes */
    int row, bytes, kind; /* stride between row tiles in bytes; bytes of a tile */
};
DEVICE struct tile_plane plane_of(const struct matrix &w, int tile, int slice)
{
    const struct seg *s = seg_of(w, tile);
    struct tile_plane p;
    p.base = tile_address(w, s, 0, tile, slice);
    p.expert = s->expert_bytes;
    p.row = w.n_kt * s->tile_bytes;
    p.bytes = s->tile_bytes;
    p.kind = s->kind;
    return p;
}
DEVICE const uint8_t *plane_tile(const struct tile_plane &p, int expert, int tile)
{
    return p.base + (size_t)expert * p.expert + (size_t)(tile * p.row);
}

enum { SUM_ROW = 20 /* 16 and padding */, SUM_TILE = 8 * SUM_ROW };

/* From row g's value in lane (g, c): the values for columns 2c and 2c+1 of a result. */
DEVICE void to_columns(float v, float (&u)[2])
{
    int c = lane_id() & 3;
    u[0] = __shfl_sync(FULL_WARP, v, 8 * c);
    u[1] = __shfl_sync(FULL_WARP, v, 8 * c + 4);
}

/* Stores a warp's sums of a tile, (8 token rows, 16 outputs); and adds up those of all warps. */
DEVICE void store_tile(float *to, const float (&acc)[4], const float (&undo)[2])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int e = 0; e < 4; e++)
        to[(2 * c + (e & 1)) * SUM_ROW + g + 8 * (e >> 1)] = acc[e] * undo[e & 1];
}
DEVICE float take_tile(const float *from, int warps, int stride, int col, int r)
{
    float v = 0.0f;
#pragma unroll 4
    for (int w = 0; w < warps; w++)
        v += from[w * stride + col * SUM_ROW + r];
    return v;
}

/* Sixteen lanes store hidden units k.. of a token row (one tile) and their sum; v counts if `on`.
 * For the last tile it also clears up to the end of the slice. Called by the whole warp. */
DEVICE void store_hidden(uint8_t *record, int k, float v, bool on, bool last, int n_kt)
{
    uint32_t h = float_to_half(v);
    float sum = half_to_float(h);
#pragma unroll
    for (int i = 8; i; i >>= 1)
        sum += __shfl_xor_sync(FULL_WARP, sum, i);
    uint32_t s = split_half(sum);
    if (!on)
        return;
#pragma unroll 1
    for (;;) {
        uint8_t *slice = record + k / TILE_K * RECORD;
        *(uint16_t *)(slice + record_at(k & ~3) + (k & 3) * 2) = (uint16_t)h;
        if (!(k & 15)) {
            *(uint16_t *)(slice + record_sum_at(k)) = (uint16_t)s;
            *(uint16_t *)(slice + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
        }
        k += TILE_ROWS;
        if (!last || k >= n_kt * TILE_K)
            break;
        h = s = 0;
    }
}

/* The schedule of a warp that owns whole units: a gate tile and its up tile, slice by slice. The
 * ring holds SLOTS / 2 slices of both. A slot is refilled as soon as its tile has been used. */
template <int SLOTS> struct pair_schedule {
    struct tile_ring<SLOTS> ring; /* gate, up, gate, up */
    struct tile_plane gate, up;
    const uint8_t *gate_at, *up_at; /* next tiles to copy */
    int kt, n_kt;                   /* their slice */
    bool real;                      /* whether there is one */
};
/* next(&expert, &tile) returns the next unit to copy; false: none left. */
template <int SLOTS, class F> DEVICE void pair_next(struct pair_schedule<SLOTS> &p, F next)
{
    int expert = 0, tile = 0;
    p.kt = 0;
    p.real = next(&expert, &tile);
    p.gate_at = plane_tile(p.gate, expert, tile);
    p.up_at = plane_tile(p.up, expert, tile);
}
template <int SLOTS, class F> DEVICE void pair_start(struct pair_schedule<SLOTS> &p, F next)
{
    pair_next(p, next);
#pragma unroll 1
    for (int i = 0; i < SLOTS / 2; i++) {
        ring_fetch(p.ring, p.gate_at, p.gate.bytes, p.real);
        ring_fetch(p.ring, p.up_at, p.up.bytes, p.real);
        p.gate_at += p.gate.bytes;
        p.up_at += p.up.bytes;
        if (++p.kt == p.n_kt)
            pair_next(p, next);
    }
}
/* acc[0], acc[1] += gate and up tile of one slice x rows. */
template <int NT, int KIND, int SLOTS, class X, class F>
DEVICE void pair_slice(struct pair_schedule<SLOTS> &p, const X (&x)[NT], float (&acc)[2][NT][4],
                       F next)
{
    frag_tile<KIND>(p.gate.kind, ring_wait(p.ring), x, acc[0]);
    ring_release(p.ring);
    ring_fetch(p.ring, p.gate_at, p.gate.bytes, p.real);
    frag_tile<KIND>(p.up.kind, ring_wait(p.ring), x, acc[1]);
    ring_release(p.ring);
    ring_fetch(p.ring, p.up_at, p.up.bytes, p.real);
    p.gate_at += p.gate.bytes;
    p.up_at += p.up.bytes;
    if (++p.kt == p.n_kt)
        pair_next(p, next);
}

/* Stores the hidden units of one gate tile and its up tile from a warp's accumulators: act(gate,
 * up), scaled by 1/16, to the records of up to eight rows. record(col) returns the record of column
 * col, or NULL. PLAIN: experts_are_plain. */
template <bool PLAIN, class F>
DEVICE void store_hidden_tile(const float (&gate)[4], const float (&up)[4], const float (&undo)[2],
                              const struct matrix &w, const struct gating &act, int expert,
                              int unit, int n_kt, F record)
{
    int g = lane_id() >> 2, c = lane_id() & 3, half = w.n_tiles / 2;
    uint32_t h[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int row = unit * TILE_ROWS + g + 8 * (e >> 1);
        float v = gate[e] * undo[e & 1], u = up[e] * undo[e & 1];
        if (!PLAIN && w.bias && row < w.seg[0].rows) {
            v += w.bias[expert * w.n_out + row];
            u += w.bias[expert * w.n_out + w.n_out / 2 + row];
        }
        v = clamp_half(gated_as<PLAIN>(act, v, u) * HIDDEN_SCALE);
        h[e] = row < w.seg[0].rows ? float_to_half(v) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = half_to_float(h[i]) + half_to_float(h[2 + i]);
        sum += __shfl_xor_sync(FULL_WARP, sum, 4);
        sum += __shfl_xor_sync(FULL_WARP, sum, 8);
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        uint8_t *to = record(2 * c + i);
        if (!to)
            continue;
        int k = unit * TILE_ROWS + g;
        uint8_t *slice = to + k / TILE_K * RECORD;
        uint32_t s = split_half(sum);
        *(uint16_t *)(slice + record_at(k & ~3) + (k & 3) * 2) = (uint16_t)h[i];
        *(uint16_t *)(slice + record_at((k + 8) & ~3) + (k & 3) * 2) = (uint16_t)h[2 + i];
        if (g == 0) {
            *(uint16_t *)(slice + record_sum_at(k)) = (uint16_t)s;
            *(uint16_t *)(slice + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
        }
        if (unit == half - 1) /* columns from the last tile to the end of its slice are zero */
#pragma unroll 1
            for (k += TILE_ROWS; k < n_kt * TILE_K; k += TILE_ROWS) {
                slice = to + k / TILE_K * RECORD;
                *(uint16_t *)(slice + record_at(k & ~3) + (k & 3) * 2) = 0;
                *(uint16_t *)(slice + record_at((k + 8) & ~3) + (k & 3) * 2) = 0;
                if (g == 0) {
                    *(uint16_t *)(slice + record_sum_at(k)) = 0;
                    *(uint16_t *)(slice + record_sum_at(k) + 8) = 0;
                }
            }
    }
}

#endif
