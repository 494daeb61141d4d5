/*
 * Decode kernels that write their result in the layout gemm_cluster.cu reads ("panels").
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_PANELS_CUH
#define STEEL_BACKEND_CUDA_ATTN_PANELS_CUH

#include "backend/cuda/attn/attn_decode.cuh"
#include "backend/cuda/core/rows.cuh"

/* Writes columns k and k+1 (k even) of row t as fp16 to their place in the panels. */
DEVICE void panel_put(const struct attn_args &p, int t, int k, float x, float y)
{
    int tile = t / p.panel_rows, r = t - tile * p.panel_rows, at = fragment_slot(k);
    size_t width = (size_t)(p.n_heads * p.kv.head_dim);
    uint8_t *row = p.panels + ((size_t)(tile * p.panel_rows) * width + (size_t)(r * 64)) * 2;
    *(uint32_t *)(row + (k >> 6) * p.panel_rows * 128 + (((at >> 3 & 7) ^ (t & 7)) << 4) +
                  (at & 7) * 2) = pack_half2(x, y);
}

/* Writes the scale of a row in the panels. One thread of the row's blocks does it. Grid:
 * (splits, units, sequences). */
DEVICE void panels_scale(const struct attn_args &p, const struct decode_unit &u)
{
    if (p.panels && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        p.scale_of[u.t] = 1.0f;
}

/* A padding row: zeros, also in the panels if there are any. */
template <int D> DEVICE void panels_pad(const struct attn_args &p, const struct decode_unit &u)
{
    for (int i = 2 * (int)threadIdx.x; i < u.heads * D; i += 2 * (int)blockDim.x) {
        *(float2 *)(decode_result<D>(p, u) + i) = make_float2(0.0f, 0.0f);
        if (p.panels)
            panel_put(p, u.t, u.h0 * D + i, 0.0f, 0.0f);
    }
    panels_scale(p, u);
}

#endif
