/*
 * Writes wgmma accumulators as fp16 from registers.
 * Of its warp's tile a lane holds rows g and g + 8 (g = lane / 4) and columns 2c and 2c + 1 (c =
 * lane % 4) of every eight columns; accumulators 4n .. 4n+3 belong to column group n.
 * Pairs of columns are first exchanged for pairs of rows. Then lanes c and c ^ BY combine two pairs
 * into four rows of column g, from row gemm_out_row on: in the order of fragment_slot with BY 2, in
 * matrix order with BY 1.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_OUT_CUH
#define STEEL_BACKEND_CUDA_GEMM_OUT_CUH

#include "backend/cuda/core/gpu.cuh"

template <int BY> DEVICE uint2 gemm_out_transpose(const float (&v)[4])
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
