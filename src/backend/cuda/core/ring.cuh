/*
 * Shared by the kernels for one row: which columns of the row a lane holds, a warp's ring of weight
 * tiles in shared memory (the consumer side), and which outputs a block has. The producer side
 * differs: see moe_ring.cuh (experts) and gemv.cu (dense).
 */
#ifndef STEEL_BACKEND_CUDA_RING_CUH
#define STEEL_BACKEND_CUDA_RING_CUH

#include "backend/cuda/core/dot_one.cuh"

/* This lane's columns of slice `slice` of a row: see dot.cuh. n is a multiple of 8; columns from n
 * on are zeros. */
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

/* A warp's tiles in flight or landed, in the order of their copies. */
struct ring {
    uint8_t *base;
    uint64_t *bar; /* (stages) */
    int slot, stages, put,
        take; /* slot: bytes per stage; put, take: copies issued, tiles released */
    uint32_t parity;
};

/* Waits for the oldest tile and returns it. */
DEVICE const uint8_t *ring_wait(struct ring &r)
{
#if BULK_COPIES
    bulk_wait(r.bar + r.take, r.parity);
#else
    /* There are as many groups in flight as stages, and the oldest is needed. */
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

/* Releases the oldest tile, after every lane has read it. */
DEVICE void ring_release(struct ring &r)
{
    __syncwarp();
    if (++r.take == r.stages) {
        r.take = 0;
        r.parity ^= 1;
    }
}

/* Row `row` of the input. */
DEVICE struct norm_in norm_row(struct norm_in in, int row, int n)
{
    size_t at = (size_t)row * (size_t)n;
    in.x += at;
    in.d += in.d ? at : 0;
    in.x_out += in.x_out ? at : 0;
    return in;
}

/* Launch shape of a kernel. */
struct gemv_shape {
    int warps, stages, slot; /* slot: bytes of a ring stage */
    int batch,
        sums; /* tiles between two reductions; buffers of sums: 2, or 1 with a single batch */
};

/* Ring bytes of a block that leave room for the next kernel. fp16 weights get two tiles for each of
 * eight warps: with one, a warp has no copy in flight while it multiplies (12 layers of the 30B-A3B
 * in BF16: 1,421 tok/s with one tile, 1,614 with two). */
static inline int ring_room(const struct matrix *w)
{
    return (w->max_tile_bytes == format<TILE_F16>::BYTES ? 128 : 116) << 10;
}

/* A block's tiles first .. end - 1, in batches of at most `most`. PAIR: gate and up of the same
 * rows alternate, n_units of each. */
struct gemv_span {
    int first, end, most, n_units;
};
template <bool PAIR>
DEVICE struct gemv_span gemv_span_of(int n_units, int units_per_block, int most)
{
    enum { TILES = PAIR ? 2 : 1 };
    struct gemv_span s;
    s.first = (int)blockIdx.x * units_per_block * TILES;
    s.end = min(s.first + units_per_block * TILES, n_units * TILES);
    s.most = most; /* one thread for every row of a batch */
    s.n_units = n_units;
    return s;
}
template <bool PAIR> DEVICE int gemv_tile(const struct gemv_span &s, int n)
{
    return PAIR ? (n >> 1) + (n & 1) * s.n_units : n;
}

/* Destination of a thread's row of a batch, and its biases (BIAS: may exist). Looked up one batch
 * ahead. */
template <bool PAIR> struct gemv_output {
    float *to, bias[PAIR ? 2 : 1];
    /* SET_K: bit n is set if tile n of the batch is Q6_K; SET_CODES: lane n has the kind of tile
     * n. */
    uint32_t kinds;
};
template <int SET, bool BIAS = true, bool PAIR>
DEVICE void gemv_locate(struct gemv_output<PAIR> &o, const struct matrix &w,
                        const struct gemv_span &s, int tile, float *y, int expert = 0)
{
    enum { TILES = PAIR ? 2 : 1 };
    int batch = min(s.most, s.end - tile);
    if (SET == SET_K)
        o.kinds = __ballot_sync(
            FULL_WARP, lane_id() < batch &&
                           seg_of(w, gemv_tile<PAIR>(s, tile + lane_id()))->kind == TILE_Q6_K);
    if (SET == SET_CODES && lane_id() < batch)
        o.kinds = (uint32_t)seg_of(w, gemv_tile<PAIR>(s, tile + lane_id()))->kind;
    int unit = (int)(threadIdx.x >> 4) * TILES;
    o.to = NULL;
    if (unit >= batch)
        return;
    int t = gemv_tile<PAIR>(s, tile + unit);
    const struct seg *g = seg_of(w, t);
    int row = (t - g->tile0) * TILE_ROWS + (int)(threadIdx.x & 15);
    if (row >= g->rows)
        return;
    o.to = y + g->row0 + row;
    if (BIAS && w.bias)
#pragma unroll
        for (int i = 0; i < TILES; i++)
            o.bias[i] = w.bias[expert * w.n_out + g->row0 + row + i * (w.n_out / 2)];
}

/* sum += tile b of the batch that starts with `tile` x the slice. STEPS: for sets other than
 * SET_K. */
template <int SET, int STEPS, bool PAIR, class SLICE>
DEVICE void gemv_dot(const struct gemv_output<PAIR> &o, const struct matrix &w,
                     const struct gemv_span &s, int tile, int b, const uint8_t *there,
                     const SLICE &x, float (&sum)[2])
{
    if constexpr (SET == SET_K)
        tile_dot(o.kinds >> b & 1, there, x, 1.0f, sum);
    else if constexpr (SET >= SET_ONE)
        tile_dot_one<set_kind(SET), STEPS>(there, x, 1.0f, sum);
    else if constexpr (SET == SET_CODES)
        tile_dot_codes<STEPS>((int)__shfl_sync(FULL_WARP, o.kinds, b), there, x, 1.0f, sum);
    else
        tile_dot<SET>(seg_of(w, gemv_tile<PAIR>(s, tile + b)), there, x, 1.0f, sum);
}

#endif
