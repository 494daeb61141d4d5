/*
 * Tile x one row where all tiles of a weight have one kind, known at compile time: no switch, fewer
 * registers, more of a tile at once. The set of such a kernel is SET_ONE + kind (dot.cuh explains
 * sets and slices).
 *
 * MXFP4 has its own product, because at one row its table look-ups cost more instructions than its
 * bytes cost time. In byte_perm's sign mode a selector returns eight copies of a byte's top bit,
 * which is 0 for every magnitude. So one instruction gives the magnitudes of four positive weights
 * and zeros for negative ones; with the signs inverted, the reverse. The tensor cores sum both
 * separately, and the difference is the result. There is no zero point to subtract.
 * F8 is converted to fp16 two adjacent bytes at a time, in one instruction where the device has it.
 * The row's pairs are permuted to match.
 */
#ifndef STEEL_BACKEND_CUDA_DOT_ONE_CUH
#define STEEL_BACKEND_CUDA_DOT_ONE_CUH

#include "backend/cuda/core/dot.cuh"

enum { SET_ONE = 64 };

/* The kind of a one-kind set, or -1; whether a set has only quantised codes. */
static __host__ __device__ constexpr int set_kind(int set)
{
    return set >= SET_ONE ? set - SET_ONE : -1;
}
static __host__ __device__ constexpr bool set_is_codes(int set)
{
    return set >= SET_ONE ? set_kind(set) <= TILE_GPTQ4 : set <= SET_CODES;
}

/* Whether a weight takes at most one byte: then two tiles fit in registers. */
static __host__ __device__ constexpr bool set_is_small(int set)
{
    return set_is_codes(set) || set_kind(set) == TILE_F8;
}

/* The common kind of all tiles of a weight, or -1. */
static inline int matrix_kind(const struct matrix *w)
{
    for (int i = 1; i < w->n_seg; i++)
        if (w->seg[i].kind != w->seg[0].kind)
            return -1;
    return w->seg[0].kind;
}

/* Calls f(kind_is<SET>()) for the set of a weight: its one-kind set, unless it is SET_K or
 * SET_ALL. */
template <class F> static inline void matrix_set(const struct matrix *w, F f)
{
    int kind = matrix_kind(w);
    if (w->set == SET_K)
        f(kind_is<SET_K>());
    else if (w->set == SET_FAST && kind == TILE_F16)
        f(kind_is<SET_ONE + TILE_F16>());
    else if (w->set == SET_FAST && kind == TILE_F8)
        f(kind_is<SET_ONE + TILE_F8>());
    else if (w->set == SET_FAST)
        f(kind_is<SET_FAST>());
    else if (w->set == SET_ALL)
        f(kind_is<SET_ALL>());
    else
        switch (kind) {
        case TILE_Q8_0:
            return f(kind_is<SET_ONE + TILE_Q8_0>());
        case TILE_Q4_0:
            return f(kind_is<SET_ONE + TILE_Q4_0>());
        case TILE_Q5_K:
            return f(kind_is<SET_ONE + TILE_Q5_K>());
        case TILE_Q3_K:
            return f(kind_is<SET_ONE + TILE_Q3_K>());
        case TILE_Q2_K:
            return f(kind_is<SET_ONE + TILE_Q2_K>());
        case TILE_IQ4_XS:
            return f(kind_is<SET_ONE + TILE_IQ4_XS>());
        case TILE_IQ3_S:
            return f(kind_is<SET_ONE + TILE_IQ3_S>());
        case TILE_MXFP4:
            return f(kind_is<SET_ONE + TILE_MXFP4>());
        case TILE_NVFP4:
            return f(kind_is<SET_ONE + TILE_NVFP4>());
        case TILE_GPTQ4:
            return f(kind_is<SET_ONE + TILE_GPTQ4>());
        default:
            return f(kind_is<SET_CODES>());
        }
}

/* Calls f(kind_is<KIND>()) for a weight of SET_CODES: its one kind, or ANY_CODES. */
template <class F> static inline void codes_set(const struct matrix *w, F f)
{
    matrix_set(w, [&](auto set) {
        if constexpr (set.VALUE == SET_CODES)
            f(kind_is<ANY_CODES>());
        else if constexpr (set.VALUE >= SET_ONE && set_is_codes(set.VALUE))
            f(kind_is<set_kind(set.VALUE)>());
    });
}

template <int SET, bool WIDE> struct slice_for {
    typedef typename slice_of<(SET < SET_ONE       ? SET
                               : set_is_codes(SET) ? (int)SET_CODES
                                                   : (int)SET_FAST),
                              WIDE>::type type;
};

/* A row for F8 weights: of four columns, 0 2 and 1 3 are pairs, in the order of the bytes. */
struct f8_slice : row_slice {
};
DEVICE void slice_make(struct f8_slice &s, const float (&v)[8])
{
    const float turned[8] = {v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]};
    slice_make((struct row_slice &)s, turned);
}
template <bool WIDE> struct slice_for<SET_ONE + TILE_F8, WIDE> {
    typedef struct f8_slice type;
};

/* mma_u8 of gpu.cuh with zero accumulators: no registers need clearing. */
DEVICE void mma_u8_first(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#ifdef STEEL_CUDA_SIM
    d[0] = d[1] = d[2] = d[3] = 0;
    sim_mma_u8(d, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
#endif
}

/* code_dot of dot.cuh for MXFP4. */
template <int STEPS, int T, class SLICE>
DEVICE void mxfp4_dot(const uint8_t *const (&tile)[T], const SLICE &x, float (&r)[T][2])
{
    typedef format<TILE_MXFP4> F;
    const uint32_t low = 0x03020100u, high = 0x0c080604u; /* levels_fp4's, doubled */
    int lane = lane_id(), n[T][2][2][4];                  /* [32 columns of a chunk][sign] */
#pragma unroll(STEPS)
    for (int q = 0; q < 4; q++)
#pragma unroll
        for (int t = 0; t < T; t++) {
            uint4 w = load16(tile[t] + q * 512 + lane * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t turn = i & 1 ? 0x88888888u : 0;
                uint32_t u = (i & 2 ? w.z : w.x) ^ turn, v = (i & 2 ? w.w : w.y) ^ turn;
                const uint32_t all[4] = {
                    byte_perm_sign(low, high, u), byte_perm_sign(low, high, u >> 16),
                    byte_perm_sign(low, high, v), byte_perm_sign(low, high, v >> 16)};
                uint32_t b0 = slice_b(x, q, i & 2), b1 = slice_b(x, q, (i & 2) + 1);
                if (q == 0)
                    mma_u8_first(n[t][i >> 1][i & 1], all, b0, b1);
                else
                    mma_u8(n[t][i >> 1][i & 1], all, b0, b1);
            }
        }
#pragma unroll
    for (int t = 0; t < T; t++) {
        F::scales sc;
        sc.fetch(tile[t] + F::SCALES_AT, lane & 3, lane >> 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float s = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int(&plus)[4] = n[t][i][0], (&minus)[4] = n[t][i][1];
                int whole = (plus[2 * h] - minus[2 * h]) * 256 + plus[2 * h + 1] - minus[2 * h + 1];
                s += sc.scale(h, i) * (float)whole;
            }
            r[t][h] = sc.row(h) * s;
        }
    }
}

/* The lower (UPPER: upper) two bytes of a word as fp16. */
template <bool UPPER> DEVICE uint32_t f8_pair(uint32_t w)
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t r;
    uint16_t two = (uint16_t)(UPPER ? w >> 16 : w);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
    return r;
#else
    return half2_mul(format<TILE_F8>::to_fp16(w, UPPER ? 0x3424 : 0x1404), 0x5c005c00u); /* 256 */
#endif
}

/* code_dot of dot.cuh for F8. With one tile there are two sums per scale, so that consecutive
 * products are independent. */
template <int STEPS, int T>
DEVICE void f8_dot(const uint8_t *const (&tile)[T], const struct f8_slice &x, float (&r)[T][2])
{
    const int N = T == 1 ? 2 : 1;
    float c[T][2][N][4] = {}; /* [128 columns] */
    int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll(STEPS / 2)
        for (int q = 2 * half; q < 2 * half + 2; q++)
#pragma unroll
            for (int t = 0; t < T; t++) {
                codes_byte w;
                w.fetch(tile[t], q, lane);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint32_t b[2];
                    w.bytes(j, b);
                    const uint32_t a[4] = {f8_pair<false>(b[0]), f8_pair<false>(b[1]),
                                           f8_pair<true>(b[0]), f8_pair<true>(b[1])};
                    group_mma(c[t][half][j % N], a, x, 2 * q + (j >> 1), j & 1);
                }
            }
#pragma unroll
    for (int t = 0; t < T; t++) {
        const float2 *scales = (const float2 *)(tile[t] + format<TILE_F8>::SCALES_AT);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 scale = scales[(lane >> 2) + 8 * h];
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < 2 * N; i++)
                sum[i / N] += c[t][i / N][i % N][2 * h] + c[t][i / N][i % N][2 * h + 1];
            r[t][h] = scale.x * sum[0] + scale.y * sum[1];
        }
    }
}

/* r = this lane's part of T tiles of one kind; see code_dot. */
template <int KIND, int STEPS, int T, class SLICE>
DEVICE void one_dot(const uint8_t *const (&tile)[T], const SLICE &x, float (&r)[T][2])
{
    if constexpr (KIND == TILE_MXFP4)
        mxfp4_dot<STEPS>(tile, x, r);
    else if constexpr (KIND == TILE_F8)
        f8_dot<STEPS>(tile, x, r);
    else
        code_dot<KIND, STEPS>(tile, x, r);
}
/* sum += factor * (tile x slice) */
template <int KIND, int STEPS>
DEVICE void tile_dot_one(const uint8_t *tile, const struct row_slice &x, float factor,
                         float (&sum)[2])
{
    static_assert(KIND == TILE_F16, "the one fp16 kind with its own kernels");
    float r[2] = {};
    dot_f16<STEPS>(tile, x, r);
    sum[0] += factor * x.undo * r[0];
    sum[1] += factor * x.undo * r[1];
}
template <int KIND, int STEPS, class SLICE>
DEVICE void tile_dot_one(const uint8_t *tile, const SLICE &x, float factor, float (&sum)[2])
{
    const uint8_t *const one[1] = {tile};
    float r[1][2];
    one_dot<KIND, STEPS>(one, x, r);
    sum[0] += factor * x.undo * r[0][0];
    sum[1] += factor * x.undo * r[0][1];
}
/* sum = (two tiles x slice) */
template <int KIND, int STEPS, class SLICE>
DEVICE void tile_dot_one_two(const uint8_t *const (&tile)[2], const SLICE &x, float (&sum)[2][2])
{
    one_dot<KIND, STEPS>(tile, x, sum);
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i / 2][i % 2] *= x.undo;
}

#endif
