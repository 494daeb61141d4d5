/*
 * Tile x one row of activations in few instructions: with one row, a step is limited by issue slots
 * and latency before bandwidth.
 *
 * fp16 path (F16, F8, and codes converted to fp16): the tensor core's B fragment has 8 columns but
 * there is one row. So column n holds the activations of column group n (32 of the slice's 256).
 * Against the weights of one group, the other columns are zeros. Lane (g, c) holds only the 8
 * activations that column g needs: columns 32g+4c.. and 32g+16+4c... Nothing goes through shared
 * memory. Activations are scaled by a power of two that maps the slice's largest to about 1024, and
 * rounded to fp16.
 * Quantised codes take the integer path: see code_slice.
 */
#ifndef STEEL_BACKEND_CUDA_DOT_CUH
#define STEEL_BACKEND_CUDA_DOT_CUH

#include "backend/cuda/core/format.cuh"

/* 256 columns of the row, as held by one lane. */
struct row_slice {
    uint32_t b[4]; /* pairs: 32g+4c, +2; 32g+16+4c, +2 */
    float undo;    /* inverse of the scale */
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

/* c += fragment of column group `group` (half 0: its first 16 columns, 1: its second). All groups
 * share one accumulator, with zeros in the other groups' columns. */
DEVICE void group_mma(float (&c)[4], const uint32_t (&a)[4], const struct row_slice &x, int group,
                      int half)
{
    bool on = (lane_id() >> 2) == group;
    mma_f16(c, a, on ? x.b[2 * half] : 0, on ? x.b[2 * half + 1] : 0);
}

/*
 * Integer path. A byte of a Q4_K word has a code of row g in its lower nibble and one of row g+8 in
 * its upper. One AND makes the register of row g; the whole word is used for row g+8, and row g's
 * part is subtracted from the sums. The activations become 16-bit integers with one scale per 64
 * columns, split into two bytes in two columns of B: column n has chunk n/2 (64 columns), upper
 * bytes if n is even, lower if odd. Against a chunk's weights the other chunks' columns are zeros,
 * so all chunks share the accumulators; lane (g, c) ends with the sums of chunk c. Weights are
 * exact, and so are sums of 16 or 32 columns. Activations keep 16 bits relative to the largest.
 */
struct code_slice {
    uint32_t b[4];  /* [16 columns] this lane's part of B, for chunk g/2 */
    float total[4]; /* sums of 16 columns of chunk c, in units */
    float undo;     /* value of one unit of chunk c */
};
/* For kernels with registers to spare: B with zeros for other chunks, made once for all tiles. */
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

/* v: as above. A lane converts half of what it needs of B, in both planes, and exchanges with the
 * lane of the other half and plane, four lanes away. */
DEVICE void slice_make(struct code_slice &s, const float (&v)[8])
{
    int lane = lane_id(), c = lane & 3;
    bool lower = lane & 4;      /* this lane's plane, and v's half of the chunk */
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
        /* column order 0 2 1 3, as in codes */
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

/* r = this lane's part of rows g and g+8, for T tiles as independent chains. JOINED: bytes of rows
 * g+8 are 16 times their code plus that of rows g, which is subtracted from the sums. STEPS: chunks
 * computed together, limited by registers. */
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

/* r[0], r[1] += this lane's part of rows g and g+8 of tile x slice, before the inverse scale. The
 * lanes of a quad add up to the row. Codes beside fp16 in one weight are rare; they are converted
 * to fp16. */
static __device__ __noinline__ void dot_converted(const struct seg *s, const uint8_t *tile,
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

/* STEPS: groups computed together. */
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

DEVICE void dot_levels(const uint8_t *tile, const struct row_slice &x, float (&r)[2])
{
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        struct format<TILE_LEVELS> f;
        float c[4] = {};
        f.fetch(tile, q, lane_id());
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t a[4];
            f.raw(j, a);
            group_mma(c, a, x, 2 * q + (j >> 1), j & 1);
        }
        r[0] += f.scale.x * (c[0] + c[1]);
        r[1] += f.scale.y * (c[2] + c[3]);
    }
}

/* Any other kind, element by element. A second fragment holds the rounding errors of the first. */
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

/* The slice type of a kernel for a set of kinds. WIDE: the kernel has registers to spare. */
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

/* sum += factor * (tile x slice), this lane's part */
template <int SET>
DEVICE void tile_dot(const struct seg *s, const uint8_t *tile, const struct row_slice &x,
                     float factor, float (&sum)[2])
{
    float r[2] = {};
    if constexpr (SET == SET_ALL) {
        dot_slow(s, tile, x, r);
    } else if (s->kind == TILE_F8) {
        dot_f8(tile, x, r);
    } else if (s->kind == TILE_LEVELS) {
        dot_levels(tile, x, r);
    } else if (s->kind != TILE_F16) {
        dot_converted(s, tile, x, r);
    } else {
        dot_f16<2>(tile, x, r);
    }
    sum[0] += factor * x.undo * r[0];
    sum[1] += factor * x.undo * r[1];
}
/* Like tile_dot: for one known kind; for Q4_K or Q6_K; for two tiles of one kind. */
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
            } else { /* one tile after the other: there are no registers for two */
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
