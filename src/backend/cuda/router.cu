/*
 * The router: logits of every expert from the normed row, in plain floats, since a choice between
 * two close experts is made of them. Leaves the normed rows for the experts where asked to.
 */
#include "backend/cuda/tile.cuh"

/* Router logits (rows, n_expert) in plain floats: a warp per expert, its row in registers before
 * the wait. n = norm(x + d) is made by every block for itself; block 0 also stores it. */
struct router_args {
    struct matrix w;
    struct norm_in in;
    float *n;      /* (rows, n_embd) or NULL */
    float *logits; /* (rows, n_expert) */
    int rows, rows_per_block;
    float inv_n; /* 1 / n_embd */
};

DEVICE void load8f(const float *p, float (&v)[8])
{
    float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void store8f(float *p, const float (&v)[8])
{
    *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    *(float4 *)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

/* Grid: (groups of 8 experts, groups of rows); 8 warps. */
static __global__ void __launch_bounds__(256)
    router_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    float *n = (float *)shared;          /* (padded n_embd) one row at a time */
    float *part = n + p.w.n_kt * TILE_K; /* (8) */
    int warp = warp_id(), lane = lane_id(), n_embd = p.w.n_in, n_kt = p.w.n_kt;
    int e = (int)blockIdx.x * 8 + warp;
    bool mine = e < p.w.n_out;
    const float *row =
        (const float *)(p.w.seg[0].base + (size_t)(e / TILE_ROWS) * (size_t)n_kt * F32_BYTES) +
        (e % TILE_ROWS) * TILE_K + lane * 8;
    enum { KEPT = 8, TILE_FLOATS = F32_BYTES / 4 }; /* k tiles a lane keeps in registers */
    float w[KEPT][8];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (mine && i < n_kt)
            load8f(row + i * TILE_FLOATS, w[i]);
    dependency_trigger();
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    int t0 = (int)blockIdx.y * p.rows_per_block, t1 = min(t0 + p.rows_per_block, p.rows);
#pragma unroll 1
    for (int t = t0; t < t1; t++) {
        float squares = 0.0f;
        size_t base = (size_t)t * (size_t)n_embd;
        __syncthreads(); /* the last row's n has been read */
#pragma unroll 1
        for (int k = (int)threadIdx.x * 8; k < n_kt * TILE_K; k += 2048) {
            float v[8] = {}, d[8];
            if (k < n_embd) {
                load8f(p.in.x + base + (size_t)k, v);
                if (p.in.gain) {
                    if (p.in.d) {
                        load8f(p.in.d + base + (size_t)k, d);
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            v[j] += d[j];
                    }
                    if (blockIdx.x == 0 && p.in.x_out)
                        store8f(p.in.x_out + base + (size_t)k, v);
                    load8f(p.in.gain + k, d);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        squares += v[j] * v[j];
                        v[j] *= d[j];
                    }
                }
            }
            store8f(n + k, v);
        }
        if (p.in.gain) {
            squares = warp_sum(squares);
            if (lane == 0)
                part[warp] = squares;
        }
        __syncthreads();
        float rms = 1.0f;
        if (p.in.gain)
            rms = rsqrtf(
                (part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7]) *
                    p.inv_n +
                p.in.eps);
        mark(mk, 4);
        float dot = 0.0f;
        if (mine) {
#pragma unroll
            for (int i = 0; i < KEPT; i++)
                if (i < n_kt) {
                    float v[8];
                    load8f(n + i * TILE_K + lane * 8, v);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        dot += w[i][j] * v[j];
                }
#pragma unroll 1
            for (int i = KEPT; i < n_kt; i++)
#pragma unroll 1
                for (int j = 0; j < 8; j++)
                    dot += row[i * TILE_FLOATS + j] * n[i * TILE_K + lane * 8 + j];
        }
        mark(mk, 6);
        dot = warp_sum(dot);
        if (mine && lane == 0)
            p.logits[(size_t)t * (size_t)p.w.n_out + (size_t)e] =
                dot * rms + (p.w.bias ? p.w.bias[e] : 0.0f);
        if (blockIdx.x == 0 && p.n)
#pragma unroll 1
            for (int k = (int)threadIdx.x; k < n_embd; k += 256)
                p.n[base + (size_t)k] = n[k] * rms;
    }
    marks_end(mk, 4);
}

/* The same for few rows, in less time: a block has two experts, four warps each, which read the row
 * straight into registers and meet once. Gains are in the weights before the wait. Blocks: x over
 * pairs of experts, y over rows. */
static __global__ void __launch_bounds__(256)
    router_row_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    float *part = (float *)shared; /* (8 warps, 2): dot, squares */
    enum { KEPT = 4, STEP = 512 };
    int u = (int)(threadIdx.x & 127), half = (int)(threadIdx.x >> 7), n_embd = p.w.n_in;
    int e = (int)blockIdx.x * 2 + half, lane = lane_id();
    bool mine = e < p.w.n_out, store = blockIdx.x == 0 && half == 0;
    const uint8_t *row = p.w.seg[0].base + (size_t)(e / TILE_ROWS) * (size_t)p.w.n_kt * F32_BYTES +
                         (size_t)(e % TILE_ROWS) * TILE_K * 4;
    size_t base = (size_t)blockIdx.y * (size_t)n_embd;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto weight = [&](int k) { /* columns k..k+3 */
                               float4 w = zero;
                               if (mine && k < n_embd)
                                   w = *(const float4 *)(row + (size_t)(k / TILE_K) * F32_BYTES +
                                                         (k % TILE_K) * 4);
                               if (p.in.gain && k < n_embd) {
                                   float4 g = *(const float4 *)(p.in.gain + k);
                                   w.x *= g.x, w.y *= g.y, w.z *= g.z, w.w *= g.w;
                               }
                               return w;
    };
    /* Without branches, so that all trips go out at once. */
    bool has_d = p.in.gain && p.in.d;
    const float *xs = p.in.x + base, *ds = has_d ? p.in.d + base : xs;
    auto sum = [&](int k, float4 x, float4 d) {
        float f = has_d ? 1.0f : 0.0f;
        if (k >= n_embd)
            x = d = zero;
        return make_float4(x.x + f * d.x, x.y + f * d.y, x.z + f * d.z, x.w + f * d.w);
    };
    auto input = [&](int k) {
        return sum(k, *(const float4 *)(xs + k), *(const float4 *)(ds + k));
    };
    float4 w[KEPT], x[KEPT], d[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        w[i] = weight(4 * u + STEP * i);
    float bias = mine && p.w.bias ? p.w.bias[e] : 0.0f;
    dependency_trigger();
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        int k = min(4 * u + STEP * i, n_embd - 4);
        x[i] = *(const float4 *)(xs + k);
        d[i] = *(const float4 *)(ds + k);
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        x[i] = sum(4 * u + STEP * i, x[i], d[i]);
    float dot = 0.0f, squares = 0.0f;
    auto add = [&](const float4 &a, const float4 &b) {
        dot += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        add(x[i], w[i]);
#pragma unroll 1
    for (int k = 4 * u + STEP * KEPT; k < n_embd; k += STEP)
        add(input(k), weight(k));
    mark(mk, 4);
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        dot += __shfl_xor_sync(FULL_WARP, dot, i);
        squares += __shfl_xor_sync(FULL_WARP, squares, i);
    }
    if (lane == 0) {
        part[2 * warp_id()] = dot;
        part[2 * warp_id() + 1] = squares;
    }
    __syncthreads();
    mark(mk, 6);
    dot = squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        dot += part[2 * (4 * half + i)];
        squares += part[2 * (4 * half + i) + 1];
    }
    float rms = p.in.gain ? rsqrtf(squares * p.inv_n + p.in.eps) : 1.0f;
    if (mine && u == 0)
        p.logits[(size_t)blockIdx.y * (size_t)p.w.n_out + (size_t)e] = dot * rms + bias;
    if (store) {
        auto put = [&](int k, float4 v) {
            if (k >= n_embd)
                return;
            if (p.in.x_out)
                *(float4 *)(p.in.x_out + base + k) = v;
            if (p.n) {
                float4 g = *(const float4 *)(p.in.gain + k);
                *(float4 *)(p.n + base + k) =
                    make_float4(v.x * g.x * rms, v.y * g.y * rms, v.z * g.z * rms, v.w * g.w * rms);
            }
        };
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            put(4 * u + STEP * i, x[i]);
#pragma unroll 1
        for (int k = 4 * u + STEP * KEPT; k < n_embd; k += STEP)
            put(k, input(k));
    }
    marks_end(mk, 4);
}

void small_router(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows)
{
    if (rows <= SMALL_ROWS) {
        CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
        struct router_args p = {*w, *in, n, cu->router, rows, 1, 1.0f / (float)w->n_in};
        cuda_launch(cu, router_row_kernel, dim3((unsigned)ceil_div(w->n_out, 2), (unsigned)rows),
                    256, 64, LAUNCH_EARLY, p);
        return;
    }
    int per = rows <= 64 ? ceil_div(rows, 16) : 4; /* a block for every row while there are few */
    struct router_args p = {*w, *in, n, cu->router, rows, per, 1.0f / (float)w->n_in};
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    cuda_launch(cu, router_kernel,
                dim3((unsigned)ceil_div(w->n_out, 8), (unsigned)ceil_div(rows, per)), 256,
                (size_t)w->n_kt * TILE_K * 4 + 64, LAUNCH_EARLY, p);
}
