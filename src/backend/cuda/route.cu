/*
 * Router logits for many rows: (rows, n_embd) x (n_experts, n_embd) in floats, on the tensor
 * cores. Each number is cut into two of 11 bits, and three of the four products are taken, which
 * leaves about 22 bits: which experts are chosen does not change where plain floats would not
 * waver either. k is cut into k tiles; their sums are added up in order where the logits are read
 * (large.cu).
 */
#include "backend/cuda/rows.cuh"

#include <math.h>

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
/* Four columns of rows g and g+8, as two fragments of eight: [step][register]. */
DEVICE void split_rows(const float4 &r0, const float4 &r1, uint32_t (&hi)[2][4],
                       uint32_t (&lo)[2][4])
{
    split_tf32(r0.x, &hi[0][0], &lo[0][0]);
    split_tf32(r1.x, &hi[0][1], &lo[0][1]);
    split_tf32(r0.y, &hi[0][2], &lo[0][2]);
    split_tf32(r1.y, &hi[0][3], &lo[0][3]);
    split_tf32(r0.z, &hi[1][0], &lo[1][0]);
    split_tf32(r1.z, &hi[1][1], &lo[1][1]);
    split_tf32(r0.w, &hi[1][2], &lo[1][2]);
    split_tf32(r1.w, &hi[1][3], &lo[1][3]);
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
    float4 n0 = *(const float4 *)w0, n1 = *(const float4 *)w1;
#pragma unroll 2
    for (int k = 0; k < TILE_K; k += 16) {
        float4 r0 = n0, r1 = n1;
        int next = (k + 16) % TILE_K;
        n0 = *(const float4 *)(w0 + next), n1 = *(const float4 *)(w1 + next);
        uint32_t hi[2][4], lo[2][4]; /* [step of 8][register] */
        split_rows(r0, r1, hi, lo);
#pragma unroll
        for (int half = 0; half < 2;
             half++) { /* products that follow each other are of other sums */
            const int NT = ROUTER_ROWS / 16;
            uint32_t bh[NT][4], bl[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float4 x = *(const float4 *)(x0 + (half * NT + n) * 8 * ROUTER_STRIDE + k);
                split_tf32(x.x, &bh[n][0], &bl[n][0]);
                split_tf32(x.y, &bh[n][1], &bl[n][1]);
                split_tf32(x.z, &bh[n][2], &bl[n][2]);
                split_tf32(x.w, &bh[n][3], &bl[n][3]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_tf32(acc[half * NT + n], lo[i], bh[n][2 * i], bh[n][2 * i + 1]);
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_tf32(acc[half * NT + n], hi[i], bl[n][2 * i], bl[n][2 * i + 1]);
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_tf32(acc[half * NT + n], hi[i], bh[n][2 * i], bh[n][2 * i + 1]);
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

/*
 * A batch: logits and choice in one kernel. Clusters of blocks share sixteen rows, a piece of k
 * each, and add up through each other's shared memory; then every block chooses the experts of
 * its rows.
 */
enum { CHOOSE_ROWS = 16, CHOOSE_PIECES = 8, CHOOSE_STRIDE = TILE_K + 16, CHOOSE_EXPERTS = 512 };

struct choose_args {
    struct matrix w;
    const float *x; /* (rows, n_embd) */
    int32_t *chosen;
    float *weight; /* (rows * used) */
    int rows, pieces;
    struct route_rule rule;
};

template <int PER, int BITS>
DEVICE void choose_row(const struct choose_args &p, float *logits, int row)
{
    int lane = lane_id(), e;
    float v[PER], part[CHOOSE_PIECES][PER];
#pragma unroll
    for (int j = 0; j < CHOOSE_PIECES; j++) { /* all on their way at once */
        const float *from = cluster_at(logits, j < p.pieces ? j : 0);
#pragma unroll
        for (int i = 0; i < PER; i++)
            part[j][i] =
                j < p.pieces && i * 32 + lane < p.rule.n_expert ? from[i * 32 + lane] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int expert = i * 32 + lane;
        v[i] = -INFINITY;
        if (expert < p.rule.n_expert)
            v[i] = p.w.bias ? p.w.bias[expert] : 0.0f;
#pragma unroll
        for (int j = 0; j < CHOOSE_PIECES; j++)
            v[i] += part[j][i];
    }
    float w = route_choice<PER, BITS>(v, p.rule, &e);
    if (lane < p.rule.used) {
        p.chosen[row * p.rule.used + lane] = e;
        p.weight[row * p.rule.used + lane] = w;
    }
}

/* Grid: (tiles of CHOOSE_ROWS rows, times pieces of k). */
static __global__ void __launch_bounds__(256)
    choose_experts_kernel(const __grid_constant__ struct choose_args p)
{
    SHARED_BYTES(shared);
    enum { STEPS = TILE_K / 16, NT = CHOOSE_ROWS / 8 };
    float *xs = (float *)shared, *logits = xs + CHOOSE_ROWS * CHOOSE_STRIDE; /* (rows, n_expert) */
    int lane = lane_id(), g = lane >> 2, c = lane & 3, n_embd = p.w.n_in, tid = (int)threadIdx.x;
    int tile = (int)blockIdx.x / p.pieces, piece = (int)blockIdx.x - tile * p.pieces;
    int t0 = tile * CHOOSE_ROWS, n_expert = p.rule.n_expert, warp = warp_id();
    /* This warp's 16 experts of a group of 128, one k tile: in registers a round ahead. */
    float4 kept[STEPS][2];
    auto load = [&](int e0, int kt) {
        const float *from = (const float *)tile_address(p.w, &p.w.seg[0], 0, e0 / TILE_ROWS, kt) +
                            g * TILE_K + 4 * c;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            kept[i][0] = *(const float4 *)(from + i * 16);
            kept[i][1] = *(const float4 *)(from + i * 16 + 8 * TILE_K);
        }
    };
    int e0 = warp * 16, kt = piece;
    if (e0 < n_expert)
        load(e0, kt);
    dependency_trigger();
    dependency_wait();
    float acc[NT][3][4] = {}; /* three chains each */
#pragma unroll 1
    for (;;) {
        __syncthreads(); /* nobody reads the columns before */
#pragma unroll
        for (int i = tid; i < CHOOSE_ROWS * (TILE_K / 4); i += 256) {
            int row = i / (TILE_K / 4), k = i % (TILE_K / 4) * 4, t = min(t0 + row, p.rows - 1);
            bool there = kt * TILE_K + k < n_embd; /* rows are of whole 32 bytes */
            copy_async16_or_zero(xs + row * CHOOSE_STRIDE + k,
                                 p.x + (size_t)t * (size_t)n_embd + (there ? kt * TILE_K + k : 0),
                                 there);
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        if (e0 < n_expert) {
            const float *x0 = xs + g * CHOOSE_STRIDE + 4 * c;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const float4 &r0 = kept[step][0], &r1 = kept[step][1];
                uint32_t hi[2][4], lo[2][4]; /* [step of 8][register] */
                split_rows(r0, r1, hi, lo);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float4 x = *(const float4 *)(x0 + n * 8 * CHOOSE_STRIDE + step * 16);
                    uint32_t bh[4], bl[4];
                    split_tf32(x.x, &bh[0], &bl[0]);
                    split_tf32(x.y, &bh[1], &bl[1]);
                    split_tf32(x.z, &bh[2], &bl[2]);
                    split_tf32(x.w, &bh[3], &bl[3]);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma_tf32(acc[n][0], lo[i], bh[2 * i], bh[2 * i + 1]);
                        mma_tf32(acc[n][1], hi[i], bl[2 * i], bl[2 * i + 1]);
                        mma_tf32(acc[n][2], hi[i], bh[2 * i], bh[2 * i + 1]);
                    }
                }
            }
        }
        int done = e0;
        kt += p.pieces;
        if (kt >= p.w.n_kt) { /* the next experts */
            kt = piece;
            e0 += 128;
        }
        if (e0 < n_expert)
            load(e0, kt);
        if (e0 == done)
            continue;
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) {
            int e = done + g + 8 * (i >> 1 & 1);
            float(&a)[3][4] = acc[i >> 2];
            if (e < n_expert)
                logits[((i >> 2) * 8 + 2 * c + (i & 1)) * n_expert + e] =
                    (a[0][i & 3] + a[1][i & 3]) + a[2][i & 3];
            a[0][i & 3] = a[1][i & 3] = a[2][i & 3] = 0.0f;
        }
        if (e0 - warp * 16 >= n_expert)
            break;
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (int row = piece + warp * p.pieces; row < CHOOSE_ROWS; row += 8 * p.pieces) {
        if (t0 + row >= p.rows)
            break;
        if (n_expert <= 128)
            choose_row<4, 7>(p, logits + row * n_expert, t0 + row);
        else
            choose_row<CHOOSE_EXPERTS / 32, 9>(p, logits + row * n_expert, t0 + row);
    }
    cluster_arrive(); /* nobody leaves while his sums are being read */
    cluster_wait();
}

bool choose_experts(struct cuda_backend *cu, const struct matrix *w,
                    const struct route_tables *route, const float *x, int rows)
{
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    struct choose_args p = {};
    p.pieces = !cu->clusters ? 1 : w->n_kt < CHOOSE_PIECES ? w->n_kt : CHOOSE_PIECES;
    if (w->n_out > CHOOSE_EXPERTS || w->n_kt > 2 * p.pieces)
        return false;
    p.w = *w;
    p.x = x;
    p.chosen = route->chosen;
    p.weight = cu->route_weight;
    p.rows = rows;
    p.rule = route_rule_of(&cu->shape, w->n_out);
    cuda_launch(cu, choose_experts_kernel, dim3((unsigned)(ceil_div(rows, CHOOSE_ROWS) * p.pieces)),
                256, (size_t)(CHOOSE_ROWS * (CHOOSE_STRIDE + w->n_out)) * 4,
                LAUNCH_EARLY + p.pieces * LAUNCH_CLUSTER, p);
    return true;
}
