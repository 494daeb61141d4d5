/*
 * How moe_gemv.cu fills a warp's ring of weight tiles (ring.cuh): one copy at a time, by the lane
 * that knows the tile's address. Without bulk copies the whole warp copies.
 */
#ifndef STEEL_BACKEND_CUDA_MOE_RING_CUH
#define STEEL_BACKEND_CUDA_MOE_RING_CUH

#include "backend/cuda/core/ring.cuh"

/* Starts the copy of a tile. With `bytes` 0 nothing is copied, but the slot still advances (past
 * the last tile). */
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

/* Like ring_issue, for the tile whose address lane n holds. */
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

/* Starts the copies of the first tiles into an empty ring: lane n holds address and size of tile n
 * (size 0: no tile). */
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

/* Waits for the second oldest tile and returns it. */
DEVICE const uint8_t *ring_wait_next(struct ring &r)
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
    return ring_wait(n);
}

#endif
