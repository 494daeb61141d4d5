/*
 * How experts of one row (moe_gemv.cu) fill a warp's ring of weight tiles (ring.cuh): a copy at a time, by whichever
 * lane knows where the tile lies. Where there is no copy engine, the whole warp copies.
 */
#ifndef STEEL_BACKEND_CUDA_MOE_RING_CUH
#define STEEL_BACKEND_CUDA_MOE_RING_CUH

#include "backend/cuda/core/ring.cuh"

/* Asks for a tile; bytes 0: for nothing, which counts (once there is no more to ask for). */
DEVICE void ring_issue(struct ring &r, const uint8_t *from, int bytes)
{
#if BULK_COPIES
    if (lane_id() == 0 && bytes)
        bulk_copy(r.base + r.put * r.slot, from, bytes, r.bar + r.put);
#else
    if (bytes)
        tile_fetch(r.base + r.put * r.slot, from, bytes);
    copy_async_commit();
#endif
    r.put = r.put + 1 == r.stages ? 0 : r.put + 1;
}

/* The same of a tile that lane n knows of. */
DEVICE void ring_issue_from(struct ring &r, const uint8_t *from, int bytes, int n)
{
#if BULK_COPIES
    if (lane_id() == n && bytes)
        bulk_copy(r.base + r.put * r.slot, from, bytes, r.bar + r.put);
    r.put = r.put + 1 == r.stages ? 0 : r.put + 1;
#else
    ring_issue(r, (const uint8_t *)__shfl_sync(FULL_WARP, (uint64_t)from, n),
               __shfl_sync(FULL_WARP, bytes, n));
#endif
}

/* Asks for the first tiles of an empty ring: lane n has where number n lies and its size (0: there
 * is none). */
DEVICE void ring_fill(struct ring &r, const uint8_t *from, int bytes)
{
#if BULK_COPIES
    int n = lane_id();
    if (n < r.stages && bytes)
        bulk_copy(r.base + n * r.slot, from, bytes, r.bar + n);
#else
    for (int n = 0; n < r.stages; n++)
        ring_issue(r, (const uint8_t *)__shfl_sync(FULL_WARP, (uint64_t)from, n),
                   __shfl_sync(FULL_WARP, bytes, n));
#endif
}

/* The tile behind the oldest, once it is there. */
DEVICE const uint8_t *ring_get_next(struct ring &r)
{
    struct ring n = r;
    if (++n.take == n.stages) {
        n.take = 0;
        n.parity ^= 1;
    }
#if !BULK_COPIES
    copy_async_wait<0>();
    __syncwarp();
#endif
    return ring_get(n);
}

#endif
