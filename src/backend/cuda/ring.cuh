/*
 * What kernels of one row share: which columns of the row a lane has, and a warp's ring of weight
 * tiles in shared memory, as far as taking from it goes. How it is filled is the kernel's own
 * business: see moe_gemv.cu (experts) and gemv.cu (products).
 */
#ifndef STEEL_BACKEND_CUDA_RING_CUH
#define STEEL_BACKEND_CUDA_RING_CUH

#include "backend/cuda/dot.cuh"

/* This lane's columns of slice `slice` of a row: see dot.cuh. n is a multiple of 8; zeros from
 * there on. */
DEVICE int lane_column(int slice)
{
    return slice * TILE_K + (lane_id() >> 2) * 32 + (lane_id() & 3) * 4;
}
DEVICE void load_lane(const float *p, int slice, int n, float (&v)[8])
{
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int k = lane_column(slice);
    float4 a = k < n ? *(const float4 *)(p + k) : zero;
    float4 b = k + 16 < n ? *(const float4 *)(p + k + 16) : zero;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void store_lane(float *p, int slice, int n, const float (&v)[8])
{
    int k = lane_column(slice);
    if (k < n)
        *(float4 *)(p + k) = make_float4(v[0], v[1], v[2], v[3]);
    if (k + 16 < n)
        *(float4 *)(p + k + 16) = make_float4(v[4], v[5], v[6], v[7]);
}

/* A warp's tiles, on their way or there, in the order they were asked for. */
struct ring {
    uint8_t *base;
    uint64_t *bar;               /* (stages) */
    int slot, stages, put, take; /* slot: bytes from one entry to the next */
    uint32_t parity;
};

/* The oldest tile, once it is there. */
DEVICE const uint8_t *ring_get(struct ring &r)
{
#if BULK_COPIES
    bulk_wait(r.bar + r.take, r.parity);
#else
    /* As many groups are under way as there are stages, and the oldest is wanted. */
    if (r.stages >= 4)
        copy_async_wait<3>();
    else if (r.stages == 3)
        copy_async_wait<2>();
    else if (r.stages == 2)
        copy_async_wait<1>();
    else
        copy_async_wait<0>();
    __syncwarp();
#endif
    return r.base + r.take * r.slot;
}

/* Every lane is done with it. */
DEVICE void ring_drop(struct ring &r)
{
    __syncwarp();
    if (++r.take == r.stages) {
        r.take = 0;
        r.parity ^= 1;
    }
}

/* Row `row` of what goes in. */
DEVICE struct norm_in norm_row(struct norm_in in, int row, int n)
{
    size_t at = (size_t)row * (size_t)n;
    in.x += at;
    in.d += in.d ? at : 0;
    in.x_out += in.x_out ? at : 0;
    return in;
}

#endif
