/*
 * What the products of several rows share: activations as halves in the order fragments want them,
 * blocks of them in shared memory, and the routing tables that say which rows go to which expert.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_CUH
#define STEEL_BACKEND_CUDA_GEMM_CUH

#include "backend/cuda/tile.cuh"

/* The hidden units of a feed-forward are kept as halves over 16: large ones do not overflow. */
#define HIDDEN_SCALE 0.0625f

/* Where column k of 16 stands: lane c's 4c..4c+3 become 2c, 2c+1, 2c+8, 2c+9. */
DEVICE int half_slot(int k)
{
    return (k & ~15) + 2 * (k >> 2 & 3) + (k & 1) + 8 * (k >> 1 & 1);
}
DEVICE float clamp_half(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

/* Routing tables, in ints from the start of cu->route. */
struct route_tables {
    int32_t *n_tiles; /* entries of the work list */
    int32_t *tiles;   /* (max tiles, 3): expert, first sorted pair, pairs */
    int32_t *pairs;   /* (rows * used) pair = row * used + k, sorted by expert */
    int32_t *chosen;  /* (rows * used) expert of each pair */
};

struct gemm_args {
    struct matrix w;
    const uint16_t *x;    /* (., ldx) halves */
    const float *x_scale; /* (.) what undoes a row's scale; NULL = 1 */
    float *y;             /* (., ldy), or NULL */
    uint16_t *y_half;     /* PAIR: hidden units (., ldy) */
    int ldx, rows, ldy;
    float unscale;    /* multiplies the result */
    int stages, slot; /* ring entries per warp; bytes of one tile in it */
    /* experts */
    bool moe,
        sorted_in; /* sorted_in: x rows are sorted pairs (hidden units), not the step's rows */
    int used;
    struct route_tables route;
    /* mid.cu */
    int n_units, units_per_block, k_warps, groups;
    bool b_in_ring;
};

/* Rows a block takes: where each comes from, where its result goes, what undoes its scale. */
struct gemm_rows {
    int *in, *out; /* (BN) -1 = none */
    float *scale;  /* (BN) */
    int expert, count;
};

/* False: past the end of the work list. Ends with a barrier. */
DEVICE bool gemm_rows_load(const struct gemm_args &p, struct gemm_rows &r, int tile, int width)
{
    int first = tile * width;
    r.expert = 0;
    r.count = min(width, p.rows - first);
    if (p.moe) {
        if (tile >= *p.route.n_tiles)
            return false;
        const int32_t *t = p.route.tiles + 3 * tile;
        r.expert = t[0];
        first = t[1];
        r.count = t[2];
    }
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        int in = -1, out = -1;
        if (i < r.count) {
            in = out = first + i;
            if (p.moe) {
                int pair = p.route.pairs[first + i];
                in = p.sorted_in ? first + i : pair / p.used;
                out = p.sorted_in ? pair : first + i;
            }
        }
        r.in[i] = in;
        r.out[i] = out;
        r.scale[i] = (p.x_scale && in >= 0 ? p.x_scale[in] : 1.0f) * p.unscale;
    }
    __syncthreads();
    return true;
}

/* acc += tiles x B for 64 columns; bs: a k tile of the activations in shared memory, 512-byte rows
 * whose 16-byte pieces are swizzled by the row. ALL: do not skip what lies past n_active (columns of
 * anything, which nobody reads): without branches in between, loads run ahead of products. */
template <int NT, bool ALL = false>
DEVICE void chunk_mma(const uint32_t (&a)[2][4][4], const uint8_t *bs, int q, int n_active,
                      float (&acc)[2][NT][4])
{
    int lane = lane_id();
    if constexpr (NT == 1) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            int row = lane & 7, piece = q * 8 + j * 2 + (lane >> 3);
            uint32_t b[4];
            ldmatrix4(b, bs + row * (TILE_K * 2) + ((piece ^ row) << 4));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma_f16(acc[i][0], a[i][j], b[0], b[1]);
                mma_f16(acc[i][0], a[i][j + 1], b[2], b[3]);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int piece = q * 8 + j * 2 + (lane >> 3 & 1);
#pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                if (ALL || n * 2 < n_active) {
                    int row = n * 16 + (lane >> 4) * 8 + (lane & 7);
                    uint32_t b[4];
                    ldmatrix4(b, bs + row * (TILE_K * 2) + ((piece ^ (row & 7)) << 4));
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma_f16(acc[i][2 * n], a[i][j], b[0], b[1]);
                        mma_f16(acc[i][2 * n + 1], a[i][j], b[2], b[3]);
                    }
                }
            }
        }
    }
}

/* stream.cu; false: not for this one */
bool stream_gemm(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int width, int y);
/* mid.cu */
void mid_gemm(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y);
/* large.cu */
void large_gemm(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y);

#endif
