/*
 * Tile times one row of activations, in as few instructions as it takes: at one row a step is short
 * of issue slots and latency before it is short of bandwidth.
 *
 * Halves (F16, F8, and what is spelled out as halves): the tensor core's B fragment has 8 columns and
 * there is only one row, so the columns are put to another use: column n has the activations of
 * column group n (32 of the slice's 256), and against a group's weights the others are zeros. Lane
 * (g, c) holds just the 8 activations that column g wants of it: columns 32g+4c.. and 32g+16+4c..;
 * nothing is staged in shared memory. Activations are rounded to halves, after scaling by a power of
 * two that takes the slice's largest to about 1024. Codes go another way: see code_slice.
 */
#ifndef STEEL_BACKEND_CUDA_DOT_CUH
#define STEEL_BACKEND_CUDA_DOT_CUH

#include "backend/cuda/core/format.cuh"

/* 256 columns of the row, as this lane has them. */
struct row_slice {
    uint32_t b[4]; /* pairs: 32g+4c, +2; 32g+16+4c, +2 */
    float undo;    /* takes the scale back */
};

/* v: columns 32g+4c.. (4) and 32g+16+4c.. (4). */
DEVICE void slice_make(struct row_slice &s, const float (&v)[8])
{
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        top = fmaxf(top, fabsf(v[i]));
    uint32_t e = warp_max_u32(bits_of(top)) >> 23;
    e = e < 16 ? 16 : e;
    float scale = float_of((264 - e) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++)
        s.b[i] = pack_half2(v[2 * i] * scale, v[2 * i + 1] * scale);
    s.undo = float_of((e - 10) << 23);
}

/* c += fragment of column group `group`'s first (half 0) or second 16 columns; the sums of all
 * groups in one accumulator, zeros in the columns of the others. */
DEVICE void group_mma(float (&c)[4], const uint32_t (&a)[4], const struct row_slice &x, int group,
                      int half)
{
    bool on = (lane_id() >> 2) == group;
    mma_f16(c, a, on ? x.b[2 * half] : 0, on ? x.b[2 * half + 1] : 0);
}

/*
 * Codes as bytes: integers are the shorter way. Of Q4_K: the nibbles of a word
 * that belong to row g are its bytes' lower halves, those of row g+8 (16 times too large) the
 * upper, so one AND makes a register of a fragment, and the word as it is the other: both rows,
 * of which the first is taken away from the sums. The row goes in as 16-bit integers, one scale
 * for 64 columns, cut into two bytes that take two columns of B: column n has chunk n/2 (64
 * columns), the upper bytes if n is even, the lower if odd. Against a chunk's weights the other
 * chunks' columns are zeros, so sums of all chunks share their accumulators; lane (g, c) ends up
 * with chunk c's. Weights are exact and so are sums of 16 or 32 columns; activations keep 16 bits
 * of the largest.
 */
struct code_slice {
    uint32_t b[4];  /* [16 columns] what this lane has of B, for chunk g/2 */
    float total[4]; /* sums of 16 columns of chunk c, in units */
    float undo;     /* one unit of chunk c */
};
/* For kernels that have the registers: zeros against other chunks' weights once for all tiles. */
struct chunk_slice : code_slice {
    uint32_t apart[4][4]; /* [chunk][16 columns] */
};
DEVICE uint32_t slice_b(const struct code_slice &s, int chunk, int j)
{
    return lane_id() >> 3 == chunk ? s.b[j] : 0;
}
DEVICE uint32_t slice_b(const struct chunk_slice &s, int chunk, int j)
{
    return s.apart[chunk][j];
}

/* v as above: half of what this lane needs of B, in both planes; the lane of the other half and
 * plane is four away. */
DEVICE void slice_make(struct code_slice &s, const float (&v)[8])
{
    int lane = lane_id(), c = lane & 3;
    bool lower = lane & 4;      /* this lane's plane, and which half of the chunk v is */
    uint32_t top = 0x0da24260u; /* 1e-30; NaN stays on top */
#pragma unroll
    for (int i = 0; i < 8; i++)
        top = max(top, bits_of(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int i = 1; i < 8; i <<= 1)
        top = max(top, __shfl_xor_sync(FULL_WARP, top, i));
    float scale = fast_divide(32512.0f, float_of(top));
    s.undo = float_of(__shfl_sync(FULL_WARP, top, 8 * c)) * (1.0f / 32512.0f);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t f[4]; /* the integer + 128 in the lower 16 bits */
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[i] = bits_of(v[4 * j + i] * scale + 12583040.0f);
        /* columns 0 2 1 3, as codes lie */
        uint32_t hi =
            byte_perm(byte_perm(f[0], f[2], 0x0051), byte_perm(f[1], f[3], 0x0051), 0x5410);
        uint32_t lo =
            byte_perm(byte_perm(f[0], f[2], 0x0040), byte_perm(f[1], f[3], 0x0040), 0x5410);
        lo ^= 0x80808080u;
        uint32_t mine = lower ? lo : hi, other = __shfl_xor_sync(FULL_WARP, lower ? hi : lo, 4);
        s.b[j] = lower ? other : mine;
        s.b[2 + j] = lower ? mine : other;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int t[4] = {};
        mma_u8_half(t, 0x01010101u, 0x01010101u, s.b[j]);
        s.total[j] = (float)(t[0] * 256 + t[1]);
    }
}

DEVICE void slice_make(struct chunk_slice &s, const float (&v)[8])
{
    slice_make((struct code_slice &)s, v);
#pragma unroll
    for (int i = 0; i < 16; i++)
        s.apart[i / 4][i % 4] = slice_b((const struct code_slice &)s, i / 4, i % 4);
}

/* r = this lane's share of rows g and g+8, of T tiles side by side, so that none waits for another.
 * JOINED: the bytes of rows g+8 are 16 times their codes plus those of rows g, which are taken away
 * from the sums. STEPS: chunks side by side, as many as there are registers for. */
template <int KIND, int STEPS, int T, class SLICE>
DEVICE void code_dot(const uint8_t *const (&tile)[T], const SLICE &x, float (&r)[T][2])
{
    typedef format<KIND> F;
    const int N = TILE_K / 4 / F::GROUP;
    int lane = lane_id(), n[T][N][4] = {};
#pragma unroll(STEPS)
    for (int q = 0; q < 4; q++)
#pragma unroll
        for (int t = 0; t < T; t++) {
            typename F::codes w;
            w.fetch(tile[t], q, lane);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t a[2], b[2];
                w.bytes(2 * h, a);
                w.bytes(2 * h + 1, b);
                if constexpr (F::GROUP == 32) {
                    const uint32_t all[4] = {a[0], a[1], b[0], b[1]};
                    mma_u8(n[t][h], all, slice_b(x, q, 2 * h), slice_b(x, q, 2 * h + 1));
                } else {
                    mma_u8_half(n[t][2 * h], a[0], a[1], slice_b(x, q, 2 * h));
                    mma_u8_half(n[t][2 * h + 1], b[0], b[1], slice_b(x, q, 2 * h + 1));
                }
            }
        }
#pragma unroll
    for (int t = 0; t < T; t++) {
        typename F::scales sc;
        sc.fetch(tile[t] + F::SCALES_AT, lane & 3, lane >> 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int unit = F::codes::JOINED && h ? 16 : 1;
            float s = 0.0f, m = 0.0f;
#pragma unroll
            for (int i = 0; i < N; i++) {
                float total = F::GROUP == 16 ? x.total[i] : x.total[2 * i] + x.total[2 * i + 1];
                int whole = n[t][i][2 * h] * 256 + n[t][i][2 * h + 1];
                if (unit > 1)
                    whole -= n[t][i][0] * 256 + n[t][i][1];
                float v = (float)whole;
                if (F::codes::BYTE_ZERO != 0)
                    v -= (float)(unit * F::codes::BYTE_ZERO) * total;
                s += sc.scale(h, i) * v;
                if constexpr (F::MINS != 0)
                    m += sc.least(h, i) * total;
            }
            r[t][h] = sc.row(h) * (1.0f / (float)unit) * s;
            if constexpr (F::MINS != 0)
                r[t][h] += sc.row_least(h) * m;
        }
    }
}

/* r[0], r[1] += this lane's share of rows g and g+8 of the tile times the slice, still scaled; the
 * lanes of a quad add up to the row. Codes beside halves in one weight are rare: they are spelled
 * out. */
static __device__ __noinline__ void dot_spelled(const struct seg *s, const uint8_t *tile,
                                                const struct row_slice &x, float (&r)[2])
{
    float c[4] = {};
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        uint32_t a[4][4];
        chunk_decode<SET_CODES>(s, tile, q, a);
#pragma unroll
        for (int j = 0; j < 4; j++)
            group_mma(c, a[j], x, 2 * q + (j >> 1), j & 1);
    }
    r[0] += c[0] + c[1];
    r[1] += c[2] + c[3];
}

/* STEPS: groups side by side. */
template <int STEPS>
DEVICE void dot_f16(const uint8_t *tile, const struct row_slice &x, float (&r)[2])
{
    float c0[4] = {}, c1[4] = {};
#pragma unroll(STEPS)
    for (int i = 0; i < 8; i++) {
        uint4 w = load16(tile + 2 * i * 512 + lane_id() * 16);
        uint32_t a[4] = {w.x, w.z, w.y, w.w};
        group_mma(c0, a, x, i, 0);
        w = load16(tile + (2 * i + 1) * 512 + lane_id() * 16);
        uint32_t b[4] = {w.x, w.z, w.y, w.w};
        group_mma(c1, b, x, i, 1);
    }
    r[0] += c0[0] + c1[0] + c0[1] + c1[1];
    r[1] += c0[2] + c1[2] + c0[3] + c1[3];
}

DEVICE void dot_f8(const uint8_t *tile, const struct row_slice &x, float (&r)[2])
{
    float c[2][4] = {}; /* [128 columns] */
    int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll 1
        for (int q = 2 * half; q < 2 * half + 2; q++) {
            struct format<TILE_F8> f;
            f.w.fetch(tile, q, lane);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t a[4];
                f.raw(j, a);
                group_mma(c[half], a, x, 2 * q + (j >> 1), j & 1);
            }
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float scale[2];
        format<TILE_F8>::load_scales(tile, 2 * half, lane >> 2, scale);
        r[0] += scale[0] * 256.0f * (c[half][0] + c[half][1]);
        r[1] += scale[1] * 256.0f * (c[half][2] + c[half][3]);
    }
}

/* Any other kind, element by element, with what rounding to half loses as a second fragment. */
DEVICE void dot_slow(const struct seg *s, const uint8_t *tile, const struct row_slice &x,
                     float (&r)[2])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    float acc[4] = {};
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        uint32_t a[4], rest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = g + 8 * (j & 1), k = 16 * i + 4 * c + 2 * (j >> 1);
            float u = tile_value_call(s, tile, row, k), v = tile_value_call(s, tile, row, k + 1);
            a[j] = pack_half2(u, v);
            rest[j] = pack_half2(u - half_to_float(a[j] & 0xffff), v - half_to_float(a[j] >> 16));
        }
        bool on = g == i >> 1;
        uint32_t b0 = i & 1 ? x.b[2] : x.b[0], b1 = i & 1 ? x.b[3] : x.b[1];
        mma_f16(acc, rest, on ? b0 : 0, on ? b1 : 0);
        mma_f16(acc, a, on ? b0 : 0, on ? b1 : 0);
    }
    r[0] += acc[0] + acc[1];
    r[1] += acc[2] + acc[3];
}

/* What a kernel for a set of kinds makes of the row. WIDE: it has registers to spare. */
template <int SET, bool WIDE = false> struct slice_of {
    typedef struct row_slice type;
};
template <> struct slice_of<SET_K, false> {
    typedef struct code_slice type;
};
template <> struct slice_of<SET_K, true> {
    typedef struct chunk_slice type;
};
template <bool WIDE> struct slice_of<SET_CODES, WIDE> : slice_of<SET_K, WIDE> {
};

/* sum += factor * (tile x slice), this lane's share */
template <int SET>
DEVICE void tile_dot(const struct seg *s, const uint8_t *tile, const struct row_slice &x,
                     float factor, float (&sum)[2])
{
    float r[2] = {};
    if constexpr (SET == SET_ALL) {
        dot_slow(s, tile, x, r);
    } else if (s->kind == TILE_F8) {
        dot_f8(tile, x, r);
    } else if (s->kind != TILE_F16) {
        dot_spelled(s, tile, x, r);
    } else {
        dot_f16<2>(tile, x, r);
    }
    sum[0] += factor * x.undo * r[0];
    sum[1] += factor * x.undo * r[1];
}
/* The same for a tile of codes of some kind; of Q4_K or Q6_K; and for two of one kind. */
template <int KIND, int STEPS, class SLICE>
DEVICE void tile_dot_kind(const uint8_t *tile, const SLICE &x, float factor, float (&sum)[2])
{
    const uint8_t *const one[1] = {tile};
    float r[1][2];
    code_dot<KIND, STEPS>(one, x, r);
    sum[0] += factor * x.undo * r[0][0];
    sum[1] += factor * x.undo * r[0][1];
}
template <int STEPS, class SLICE>
DEVICE void tile_dot_codes(int kind, const uint8_t *tile, const SLICE &x, float factor,
                           float (&sum)[2])
{
    quant_kind(kind, [&](auto k) { tile_dot_kind<k.VALUE, STEPS>(tile, x, factor, sum); });
}
template <class SLICE>
DEVICE void tile_dot(bool q6_k, const uint8_t *tile, const SLICE &x, float factor, float (&sum)[2])
{
    if (q6_k)
        tile_dot_kind<TILE_Q6_K, 4>(tile, x, factor, sum);
    else
        tile_dot_kind<TILE_Q4_K, 4>(tile, x, factor, sum);
}
template <int SET>
DEVICE void tile_dot_two(int kind, const uint8_t *const (&tile)[2], const struct code_slice &x,
                         float (&sum)[2][2])
{
    if constexpr (SET == SET_K) {
        code_dot<TILE_Q4_K, 4>(tile, x, sum);
    } else {
        quant_kind(kind, [&](auto k) {
            if constexpr (format<k.VALUE>::GROUP == 32) {
                code_dot<k.VALUE, 2>(tile, x, sum);
            } else { /* twice the sums: there are no registers for two */
                const uint8_t *const one[1] = {tile[0]}, *const two[1] = {tile[1]};
                float r[2][1][2];
                code_dot<k.VALUE, 2>(one, x, r[0]);
                code_dot<k.VALUE, 2>(two, x, r[1]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[i / 2][i % 2] = r[i / 2][0][i % 2];
            }
        });
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i / 2][i % 2] *= x.undo;
}

#endif
