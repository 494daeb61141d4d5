/*
 * The online softmax of a tile, for kernels whose scores are sums of the tensor core: of a warp's
 * sixteen rows a lane has rows g and g + 8 (g = lane / 4) of keys 2c and 2c + 1 (c = lane % 4) of every
 * eight; sum i is of row g + 8 (i >> 1 & 1) and key 8 (i >> 2) + 2c + (i & 1). Scores are in powers of
 * two. Kernels have their sums as they need them, so they say with a function which float sum i is.
 * Knows nothing of where scores come from, and of what values they are multiplied with.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_SOFTMAX_CUH
#define STEEL_BACKEND_CUDA_ATTN_SOFTMAX_CUH

#include "backend/cuda/core/gpu.cuh"

#include <math.h>

/* Rows g and g + 8: the largest score, this lane's part of the sum of probabilities, and what sums from
 * before the last tile are to be multiplied by. */
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

/* Keys base.. that rows at pos do not see: those behind them, and those a window or more before. */
template <int N, class SUM>
DEVICE void softmax_hide(SUM sum, const int (&pos)[2], int base, int window)
{
    int c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int key = base + (i >> 2) * 8 + 2 * c + (i & 1), at = pos[i >> 1 & 1];
        if (key > at || (window && key <= at - window))
            sum(i) = -INFINITY;
    }
}

/* The N sums of a tile: scores become probabilities. */
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

/* The sum of a row's probabilities: r of g + 8 r. */
DEVICE float softmax_total(const struct softmax_rows &st, int r)
{
    float total = st.total[r];
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    return total + __shfl_xor_sync(FULL_WARP, total, 2);
}

/* Columns 2c, 2c + 1, 2c + 8, 2c + 9 of sixteen to their row as halves, by all lanes of a warp. Two lanes
 * share 8 of the columns, as fragment_slot has them, and each takes four next to each other. to: the first
 * of the sixteen; mine: this lane's row is there. */
DEVICE void softmax_halves_put(uint32_t lo, uint32_t hi, uint16_t *to, bool mine)
{
    int c = lane_id() & 3;
    uint32_t other = __shfl_xor_sync(FULL_WARP, c < 2 ? hi : lo, 2);
    if (mine)
        *(uint2 *)(to + (c & 1) * 8 + (c >> 1) * 4) =
            c < 2 ? make_uint2(lo, other) : make_uint2(other, hi);
}

#endif
