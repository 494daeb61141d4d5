/*
 * Online softmax of a tile whose scores are MMA accumulators. A warp has sixteen rows. With g =
 * lane / 4 and c = lane % 4, a lane holds rows g and g + 8, and of every eight keys 2c and 2c + 1:
 * accumulator i belongs to row g + 8 (i >> 1 & 1) and key 8 (i >> 2) + 2c + (i & 1). Scores are in
 * units of log2. Kernels lay out their accumulators differently, so they pass a function from i to
 * the accumulator.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_SOFTMAX_CUH
#define STEEL_BACKEND_CUDA_ATTN_SOFTMAX_CUH

#include "backend/cuda/core/gpu.cuh"

#include <math.h>

/* Rows g and g + 8: the largest score, this lane's part of the softmax sum, and the factor by
 * which the last tile rescaled earlier results. */
struct softmax_rows {
    float top[2], total[2], shrink[2];
};

DEVICE void softmax_clear(struct softmax_rows &st)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        st.top[r] = -INFINITY;
        st.total[r] = 0.0f;
    }
}

/* Masks keys from `base` on that rows at pos do not see: later keys, and keys outside the
 * window. */
template <int N, class SUM>
DEVICE void softmax_mask(SUM sum, const int (&pos)[2], int base, int window)
{
    int c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int key = base + (i >> 2) * 8 + 2 * c + (i & 1), at = pos[i >> 1 & 1];
        if (key > at || (window && key <= at - window))
            sum(i) = -INFINITY;
    }
}

/* Turns the N scores of a tile into probabilities. */
template <int N, class SUM> DEVICE void softmax_tile(SUM sum, struct softmax_rows &st)
{
    float m[2] = {st.top[0], st.top[1]};
#pragma unroll
    for (int i = 0; i < N; i++)
        m[i >> 1 & 1] = fmaxf(m[i >> 1 & 1], sum(i));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 1));
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 2));
        float anchor = m[r] == -INFINITY ? 0.0f : m[r]; /* nothing visible yet */
        st.shrink[r] = fast_exp2(st.top[r] - anchor);
        st.top[r] = m[r];
        m[r] = anchor;
        st.total[r] *= st.shrink[r];
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        sum(i) = fast_exp2(sum(i) - m[i >> 1 & 1]);
        st.total[i >> 1 & 1] += sum(i);
    }
}

/* The softmax sum of row g + 8 r. */
DEVICE float softmax_total(const struct softmax_rows &st, int r)
{
    float total = st.total[r];
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    return total + __shfl_xor_sync(FULL_WARP, total, 2);
}

/* All lanes of a warp write columns 2c, 2c + 1, 2c + 8 and 2c + 9 of sixteen as fp16, in the
 * order of fragment_slot. Two lanes share 8 columns; they exchange words so that each writes four
 * adjacent ones. to: the first of the sixteen. mine: this lane's row exists. */
DEVICE void softmax_fp16_put(uint32_t lo, uint32_t hi, uint16_t *to, bool mine)
{
    int c = lane_id() & 3;
    uint32_t other = __shfl_xor_sync(FULL_WARP, c < 2 ? hi : lo, 2);
    if (mine)
        *(uint2 *)(to + (c & 1) * 8 + (c >> 1) * 4) =
            c < 2 ? make_uint2(lo, other) : make_uint2(other, hi);
}

#endif
