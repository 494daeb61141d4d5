/*
 * Router logits for many rows: (rows, n_embd) x (n_experts, n_embd) in floats, on the tensor cores.
 * Each number is cut into two of 11 bits, and three of the four products are taken, which leaves
 * about 22 bits: which experts are chosen does not change where plain floats would not waver either.
 * k is cut into k tiles; their sums are added up in order where the logits are read (large.cu).
 */
#include "backend/cuda/tile.cuh"

enum { ROUTER_ROWS = 64, ROUTER_EXPERTS = 128, ROUTER_STRIDE = TILE_K + 16 };

struct router_rows_args {
    struct matrix w;
    const float *x; /* (rows, n_embd) */
    float *logits;  /* (k tiles, rows, n_expert) */
    int rows;
};

/* v = its upper 11 bits and what is left, whose lower bits the tensor cores ignore. */
DEVICE void split_tf32(float v, uint32_t *hi, uint32_t *lo)
{
    *hi = bits_of(v) & 0xffffe000u;
    *lo = bits_of(v - float_of(*hi));
}

/* Grid: (tiles of 64 rows, k tiles, groups of 128 experts); a warp has 16 experts. */
static __global__ void __launch_bounds__(256)
    router_rows_kernel(const __grid_constant__ struct router_rows_args p)
{
    SHARED_BYTES(shared); /* (64, ROUTER_STRIDE) floats */
    float *xs = (float *)shared;
    int lane = lane_id(), g = lane >> 2, c = lane & 3, n_embd = p.w.n_in, kt = (int)blockIdx.y;
    int t0 = (int)blockIdx.x * ROUTER_ROWS, e0 = (int)blockIdx.z * ROUTER_EXPERTS + warp_id() * 16;
    dependency_trigger();
    dependency_wait();
    for (int i = (int)threadIdx.x; i < ROUTER_ROWS * (TILE_K / 4); i += 256) {
        int row = i / (TILE_K / 4), k = i % (TILE_K / 4) * 4, t = min(t0 + row, p.rows - 1);
        bool there = kt * TILE_K + k < n_embd; /* rows are of whole 32 bytes */
        copy_async16_or_zero(xs + row * ROUTER_STRIDE + k,
                             p.x + (size_t)t * (size_t)n_embd + (there ? kt * TILE_K + k : 0),
                             there);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if (e0 >= p.w.n_out)
        return;
    const float *tile = (const float *)tile_address(p.w, &p.w.seg[0], 0, e0 / TILE_ROWS, kt);
    const float *w0 = tile + g * TILE_K + 4 * c, *w1 = w0 + 8 * TILE_K;
    const float *x0 = xs + g * ROUTER_STRIDE + 4 * c;
    float acc[ROUTER_ROWS / 8][4] = {};
#pragma unroll 2
    for (int k = 0; k < TILE_K; k += 16) {
        float4 r0 = *(const float4 *)(w0 + k), r1 = *(const float4 *)(w1 + k);
        uint32_t hi[2][4], lo[2][4]; /* [step of 8][register] */
        split_tf32(r0.x, &hi[0][0], &lo[0][0]);
        split_tf32(r1.x, &hi[0][1], &lo[0][1]);
        split_tf32(r0.y, &hi[0][2], &lo[0][2]);
        split_tf32(r1.y, &hi[0][3], &lo[0][3]);
        split_tf32(r0.z, &hi[1][0], &lo[1][0]);
        split_tf32(r1.z, &hi[1][1], &lo[1][1]);
        split_tf32(r0.w, &hi[1][2], &lo[1][2]);
        split_tf32(r1.w, &hi[1][3], &lo[1][3]);
#pragma unroll
        for (int n = 0; n < ROUTER_ROWS / 8; n++) {
            float4 x = *(const float4 *)(x0 + n * 8 * ROUTER_STRIDE + k);
            uint32_t bh[4], bl[4];
            split_tf32(x.x, &bh[0], &bl[0]);
            split_tf32(x.y, &bh[1], &bl[1]);
            split_tf32(x.z, &bh[2], &bl[2]);
            split_tf32(x.w, &bh[3], &bl[3]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma_tf32(acc[n], lo[i], bh[2 * i], bh[2 * i + 1]);
                mma_tf32(acc[n], hi[i], bl[2 * i], bl[2 * i + 1]);
                mma_tf32(acc[n], hi[i], bh[2 * i], bh[2 * i + 1]);
            }
        }
    }
    float *out = p.logits + (size_t)kt * (size_t)p.rows * (size_t)p.w.n_out;
#pragma unroll
    for (int n = 0; n < ROUTER_ROWS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = t0 + n * 8 + 2 * c + (i & 1), e = e0 + g + 8 * (i >> 1);
            if (t < p.rows && e < p.w.n_out)
                out[(size_t)t * (size_t)p.w.n_out + (size_t)e] =
                    acc[n][i] + (p.w.bias && !kt ? p.w.bias[e] : 0.0f);
        }
}

void router_rows(struct cuda_backend *cu, const struct matrix *w, const float *x, int rows)
{
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    struct router_rows_args p = {*w, x, cu->router, rows};
    dim3 grid((unsigned)ceil_div(rows, ROUTER_ROWS), (unsigned)w->n_kt,
              (unsigned)ceil_div(w->n_out, ROUTER_EXPERTS));
    cuda_launch(cu, router_rows_kernel, grid, 256, (size_t)(ROUTER_ROWS * ROUTER_STRIDE * 4),
                LAUNCH_EARLY, p);
}
