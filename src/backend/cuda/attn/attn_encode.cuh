/* What the kernels of encoder attention share: arguments and the epilogue. */
#ifndef STEEL_BACKEND_CUDA_ATTN_ENCODE_CUH
#define STEEL_BACKEND_CUDA_ATTN_ENCODE_CUH

#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/attn_softmax.cuh"
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/heads/encoder.h"

struct encode_args {
    const uint16_t *qkv; /* (n_tokens, stride): H heads of q, K of k, K of v */
    const int2 *tiles;   /* sequence, first row */
    const int32_t *q_start, *slot;
    const int32_t *spans; /* (n_tokens, 2) keys that a row sees, or NULL: all */
    float *a;             /* (n_tokens, H, D), or NULL: */
    uint16_t *fp16_out;   /* (n_tokens, padded) fp16, in the order of fragment_slot */
    float *fp16_scale;    /* (n_tokens) */
    float to_log2;        /* factor from q K^T to scores in units of log2 */
    int stride, padded, n_heads, n_kv, window;
    int dim; /* D without its padding, a multiple of 8 */
};

/* attn_encode.cu. Also sets the form of the result. */
struct encode_args attn_encode_args(struct cuda_backend *cu, const struct attn_layer *l,
                                    const struct step *s, struct rows *a);

/* Writes a warp's 16 rows, from `row0` on, of head h; `rows` of them exist. out(j, i): accumulator i of columns 8 j. */
template <int D, class OUT>
DEVICE void attn_encode_write(const struct encode_args &p, const struct softmax_rows &st, OUT out,
                              int h, int row0, int rows)
{
    int lane = lane_id(), g = lane >> 2, c = lane & 3, H = p.n_heads, dim = p.dim;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax_total(st, r);
        int row = g + 8 * r;
        bool mine = row < rows, hidden = !mine || p.slot[row0 + row] < 0;
        float inv = hidden ? 0.0f : 1.0f / total;
        float *to = p.a + ((size_t)(row0 + row) * (size_t)H + (size_t)h) * (size_t)dim;
        uint16_t *to_half = p.fp16_out + (size_t)(row0 + row) * (size_t)p.padded;
#pragma unroll
        for (int j = 0; j < D / 8; j += 2) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = hidden || j + i / 2 >= D / 8 ? 0.0f : out(j + i / 2, 2 * r + i % 2) * inv;
            if (p.fp16_out && dim % 16 == 0) {
                softmax_fp16_put(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]),
                                 to_half + h * dim + j * 8, mine && j * 8 < dim);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int k = j * 8 + 8 * i + 2 * c;
                if (!mine || k >= dim)
                    continue;
                if (p.fp16_out)
                    *(uint32_t *)(to_half + fragment_slot(h * dim + k)) =
                        pack_half2(v[2 * i], v[2 * i + 1]);
                else
                    *(float2 *)(to + k) =
                        make_float2(v[2 * i] / HIDDEN_SCALE, v[2 * i + 1] / HIDDEN_SCALE);
            }
        }
        if (p.fp16_out && mine && h == 0 && c == 0)
            p.fp16_scale[row0 + row] = 1.0f / HIDDEN_SCALE;
        if (p.fp16_out && mine && h == H - 1)
            for (int k = H * dim + 2 * c; k < p.padded; k += 8)
                *(uint32_t *)(to_half + fragment_slot(k)) = 0;
    }
}

#endif
