/*
 * Tiles times up to eight rows of activations that a warp keeps in registers: batched decode.
 *
 * The activations of a slice (256 columns) of a row are a record of 576 bytes: halves in the
 * order of fragments (32 columns to 64 bytes, lane c's 4c.. and 16+4c.. side by side), then the
 * sums of 16 columns each, as a half and what that half leaves over. Lane (g, c) of a warp holds
 * its part of row g, which is column g of the tensor core's B: 32 registers, and 4 of sums.
 *
 * Codes go to the tensor cores as in dot.cuh: 1024 + code for rows g, 1024 + 16 code for rows
 * g+8. Scales multiply the sums of a group in floats. What the offsets and minima add is scale
 * times sum of activations, added up over the groups of a tile: a small product in itself, of the
 * scales with the sums, and so given to the tensor cores too: two instructions a tile where the
 * plain way takes eight a group. (1024 T is known to 22 bits; what is lost is a tenth of what
 * rounding the activations to halves loses.)
 */
#ifndef STEEL_BACKEND_CUDA_ROWS_CUH
#define STEEL_BACKEND_CUDA_ROWS_CUH

#include "backend/cuda/gemm/gemm.cuh"

enum { RECORD_SUMS = 512 };

struct row_frag {
    uint32_t b[16][2]; /* [16 columns]{4c 4c+1, 4c+2 4c+3} */
    uint32_t t[4];     /* sums of 16 columns 4c..4c+3: halves, what they leave over */
};

/* This lane's part of the record of its row. Rows that are not there: any record of zeros, or any
 * at all where nobody looks at the result. */
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

/* Or left where it is, in shared memory, and read as it is needed: registers for more warps. */
struct row_at {
    const uint8_t *at; /* this lane's part of the record */
};
DEVICE struct row_at frag_at(const uint8_t *record)
{
    struct row_at r = {record + (lane_id() & 3) * 16};
    return r;
}
/* 32 columns of either, and the sums. */
DEVICE uint4 frag_pair(const struct row_frag &f, int i)
{
    return make_uint4(f.b[2 * i][0], f.b[2 * i][1], f.b[2 * i + 1][0], f.b[2 * i + 1][1]);
}
DEVICE uint4 frag_pair(const struct row_at &f, int i)
{
    return load16(f.at + i * 64);
}
DEVICE uint4 frag_totals(const struct row_frag &f)
{
    return make_uint4(f.t[0], f.t[1], f.t[2], f.t[3]);
}
DEVICE uint4 frag_totals(const struct row_at &f)
{
    return load16(f.at + RECORD_SUMS);
}

/* Where in a record the four columns from k (a multiple of four) stand, and the sum of their 16. */
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
/* {half of v, half of what is left} */
DEVICE uint32_t split_half(float v)
{
    uint32_t hi = float_to_half(v);
    return hi | (uint32_t)float_to_half(v - half_to_float(hi)) << 16;
}

/* The sums of a fragment, from its halves: the activations are the A of a product whose B picks the
 * column the sum of a group goes to. */
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

/* c = A T, both halves of the sums */
DEVICE void sums_mma(float (&c)[4], const uint32_t (&a)[4], const uint4 &t)
{
    const float zero[4] = {};
    mma_f16_from(c, a, t.x, t.y, zero);
    mma_f16(c, a, t.z, t.w);
}

/* All scales of a tile as a fragment, and minima: this lane's columns are the 16-column pieces
 * 4c..4c+3 of the tile. f(h, i): the pair i of row half h. */
template <int GROUP, class F> DEVICE void scale_frags(uint32_t (&a)[4], F f)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = GROUP == 16 ? f(i & 1, i >> 1) : both_of(f(i & 1, 0), i >> 1);
}

/* Chunks of a tile at once. Rows in registers have no index that is not known when compiling; with
 * those in shared memory, kernels of all formats save code. */
template <class X> struct frag_steps {
    enum { OF_MANY = 4 };
};
template <> struct frag_steps<struct row_at> {
    enum { OF_MANY = 2 };
};

/* Codes times scales 16 columns at a time, exactly, in halves: a tile is one sum (NVFP4), of which
 * every other 16 columns stand apart, since a product waits for the one in front. */
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

/* acc[n] += tile x rows of x[n] (row_frag or row_at). d0 d1: row g, columns 2c 2c+1; d2 d3: row
 * g+8. */
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
                    for (int e = 0; e < 4; e++) { /* two instructions; of their sum: three */
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

/* KIND: of the tile, or ANY_K, ANY_CODES. */
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

/* A warp's ring of STAGES weight tiles in shared memory: tiles come out in the order they were
 * asked for. The copy engine fetches them where there is one, else the warp's own asynchronous
 * copies. */
template <int STAGES> struct tile_ring {
    uint8_t *slots; /* (STAGES, slot) */
    int slot, in, out;
#if BULK_COPIES
    uint64_t *bars;  /* (STAGES) */
    uint32_t parity; /* a bit for each */
#endif
};
/* Bytes a warp's ring takes. */
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
/* Asks for the next tile; `real` false: there is none. Its slot is free: STAGES tiles ago was given
 * back. */
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
/* The oldest tile, once it is there. */
template <int STAGES> DEVICE const uint8_t *ring_take(struct tile_ring<STAGES> &r)
{
#if BULK_COPIES
    bulk_wait(r.bars + r.out, r.parity >> r.out & 1);
#else
    copy_async_wait<STAGES - 1>();
    __syncwarp();
#endif
    return r.slots + r.out * r.slot;
}
/* Every lane is done with it: its slot may be fetched over. */
template <int STAGES> DEVICE void ring_give(struct tile_ring<STAGES> &r)
{
    __syncwarp();
#if BULK_COPIES
    r.parity ^= 1u << r.out;
#endif
    r.out = r.out + 1 == STAGES ? 0 : r.out + 1;
}

/* Where the tiles of one slice of a segment lie. */
struct tile_plane {
    const uint8_t *base;  /* of expert 0, row tile 0 of the segment, this slice */
    size_t expert;        /* bytes from expert to expert */
    int row, bytes, kind; /* bytes from row tile to row tile; of a tile */
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

enum { SUM_ROW = 20 /* 16 and a pad */, SUM_TILE = 8 * SUM_ROW };

/* What lane (g, c) has of row g, for its columns 2c and 2c+1 of a result. */
DEVICE void to_columns(float v, float (&u)[2])
{
    int c = lane_id() & 3;
    u[0] = __shfl_sync(FULL_WARP, v, 8 * c);
    u[1] = __shfl_sync(FULL_WARP, v, 8 * c + 4);
}

/* A warp's sums of a tile, (8 rows of the step, 16 outputs); and those of all warps added up. */
DEVICE void put_tile(float *to, const float (&acc)[4], const float (&undo)[2])
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

/* Sixteen lanes store hidden units row.. of a row of the step, 16 to a tile, and their sum; v
 * counts where `on`. The last tile also clears what follows it, up to whole slices. The warp. */
DEVICE void put_hidden(uint8_t *record, int k, float v, bool on, bool last, int n_kt)
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

/* A warp that owns units outright: a gate tile and its up tile, slice by slice. SLOTS / 2 slices
 * of both are in its ring, each tile in a slot of its own that is fetched over as soon as it has
 * been used. */
template <int SLOTS> struct pair_walk {
    struct tile_ring<SLOTS> ring; /* gate, up, gate, up */
    struct tile_plane gate, up;
    const uint8_t *gate_at, *up_at; /* the next to ask for */
    int kt, n_kt;                   /* its slice */
    bool real;                      /* there is one */
};
/* next(&expert, &tile): the unit to ask for next; false: there is none. */
template <int SLOTS, class F> DEVICE void pair_next(struct pair_walk<SLOTS> &p, F next)
{
    int expert = 0, tile = 0;
    p.kt = 0;
    p.real = next(&expert, &tile);
    p.gate_at = plane_tile(p.gate, expert, tile);
    p.up_at = plane_tile(p.up, expert, tile);
}
template <int SLOTS, class F> DEVICE void pair_start(struct pair_walk<SLOTS> &p, F next)
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
DEVICE void pair_slice(struct pair_walk<SLOTS> &p, const X (&x)[NT], float (&acc)[2][NT][4], F next)
{
    frag_tile<KIND>(p.gate.kind, ring_take(p.ring), x, acc[0]);
    ring_give(p.ring);
    ring_fetch(p.ring, p.gate_at, p.gate.bytes, p.real);
    frag_tile<KIND>(p.up.kind, ring_take(p.ring), x, acc[1]);
    ring_give(p.ring);
    ring_fetch(p.ring, p.up_at, p.up.bytes, p.real);
    p.gate_at += p.gate.bytes;
    p.up_at += p.up.bytes;
    if (++p.kt == p.n_kt)
        pair_next(p, next);
}

/* Hidden units of one gate tile and its up tile of an expert, from a warp's accumulators:
 * act(gate, up), over 16, to the records of up to eight rows. record(col): where that of column col
 * goes, or NULL. PLAIN: experts_are_plain. */
template <bool PLAIN, class F>
DEVICE void put_hidden_tile(const float (&gate)[4], const float (&up)[4], const float (&undo)[2],
                            const struct matrix &w, const struct gating &act, int expert, int unit,
                            int n_kt, F record)
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
        if (unit == half - 1) /* columns past the last tile, up to whole slices, are zero */
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
