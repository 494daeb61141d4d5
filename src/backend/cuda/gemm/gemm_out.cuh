/*
 * How sums of wgmma leave registers as halves. Of its warp's tile a lane has rows g and g + 8 (g =
 * lane / 4) of columns 2c and 2c + 1 (c = lane % 4) of every eight, sums 4n.. of eight n. Pairs of
 * columns become pairs of rows first, and lanes c and c ^ BY then make four of them: rows gemm_out_row..
 * of column g; in the order of half_slot with BY 2, in that of the matrix with BY 1.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_OUT_CUH
#define STEEL_BACKEND_CUDA_GEMM_OUT_CUH

#include "backend/cuda/core/gpu.cuh"

template <int BY> DEVICE uint2 gemm_out_turn(const float (&v)[4])
{
    bool up = lane_id() & BY;
    uint32_t lo = transpose8(pack_half2(v[0], v[1])), hi = transpose8(pack_half2(v[2], v[3]));
    uint32_t got = __shfl_xor_sync(FULL_WARP, up ? lo : hi, BY);
    return up ? make_uint2(got, hi) : make_uint2(lo, got);
}
DEVICE int gemm_out_row()
{
    return (lane_id() & 1) * 8 + (lane_id() >> 1 & 1) * 4;
}

#endif
