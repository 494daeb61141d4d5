/*
 * The kernels of adapters. A block makes four values of t = s A x, its warps sharing the columns; a thread
 * makes a column of y += B t, reading a row of B. Which adapter a row uses, and A and B, are known before the
 * kernel in front has ended, and on their way by then. Rows of one adapter share what is read, LORA_ROWS at a
 * time, in steps with prompts; a decode's rows, and the pairs of experts, are by themselves: A and B of a
 * rank that adapters have stay in the L2, and the number of blocks does not depend on who uses what. A row's
 * sums are the same either way.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/lora/lora.cuh"

enum {
    LORA_ROWS = 8,
    LORA_THREADS = 256,
    LORA_WARPS = LORA_THREADS / 32,
    LORA_RANKS = 4,                 /* values of t of a block */
    LORA_COLUMNS = LORA_THREADS * 8 /* of x that a block takes at a time */
};

/* What a block is about: N rows, of which n are real. */
template <int N> struct lora_rows {
    const struct lora_change *m; /* NULL: nothing to do */
    int n;
    int slot[N], in[N], out[N]; /* in t, x and y */
    float scale[N];
};

DEVICE const struct lora_change *lora_of(const struct lora_args &p, int adapter, int expert)
{
    if (adapter < 0)
        return NULL;
    bool shared = p.shared >= 0 && expert == p.shared;
    int w = shared ? p.shared_weight : p.weight;
    const struct lora_change *m =
        w < 0 ? NULL : p.table[(size_t)adapter * (size_t)p.n_weights + (size_t)w];
    if (!m)
        return NULL;
    m += shared ? 0 : expert;
    return m->rank ? m : NULL;
}

DEVICE void lora_find(const struct lora_args &p, int block, struct lora_rows<1> &r)
{
    int row = block, expert = 0;
    r.n = 1;
    r.slot[0] = r.in[0] = r.out[0] = block;
    if (p.pairs) {
        int pair = p.pairs[block];
        if (pair < 0) { /* behind the last, where other ranks have other experts */
            r.m = NULL;
            return;
        }
        row = pair / p.used;
        expert = p.chosen[pair];
        r.in[0] = p.x_sorted ? block : row;
        r.out[0] = p.y_pairs ? pair : block;
    }
    r.m = lora_of(p, p.by_row[2 * row], expert);
    r.scale[0] = float_of((uint32_t)p.by_row[2 * row + 1]);
}

DEVICE void lora_find(const struct lora_args &p, int block, struct lora_rows<LORA_ROWS> &r)
{
    const int32_t *c = p.chunks + 3 * block;
    r.m = lora_of(p, c[0], 0);
    r.n = c[2];
#pragma unroll
    for (int i = 0; i < LORA_ROWS; i++) {
        int row = p.members[c[1] + (i < r.n ? i : 0)];
        r.slot[i] = r.in[i] = r.out[i] = row;
        r.scale[i] = float_of((uint32_t)p.by_row[2 * row + 1]);
    }
}

/* Eight halves as floats. */
DEVICE void lora_eight(const uint4 &h, float (&f)[8])
{
    const uint32_t w[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = half_to_float(w[i] & 0xffff);
        f[2 * i + 1] = half_to_float(w[i] >> 16);
    }
}

/* Eight values of row x from column k on; what is past the end is zero. */
DEVICE void lora_x(const struct lora_args &p, int row, int k, float (&x)[8])
{
    const float *from = p.x + (size_t)row * (size_t)p.ldx + (size_t)k;
    if (!(p.ldx & 3) && k + 8 <= p.n_in) {
        float4 u = *(const float4 *)from, v = *(const float4 *)(from + 4);
        x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
        x[4] = v.x, x[5] = v.y, x[6] = v.z, x[7] = v.w;
        return;
    }
#pragma unroll
    for (int q = 0; q < 8; q++)
        x[q] = k + q < p.n_in ? from[q] : 0.0f;
}

/* Eight columns of A's rows [j0, j0 + LORA_RANKS), from k on. */
DEVICE void lora_a(const struct lora_change *m, int j0, int k, uint4 (&a)[LORA_RANKS])
{
#pragma unroll
    for (int j = 0; j < LORA_RANKS; j++) {
        a[j] = make_uint4(0, 0, 0, 0);
        if (j0 + j < m->rank && k < m->ld)
            a[j] = *(const uint4 *)(m->a + (size_t)(j0 + j) * (size_t)m->ld + (size_t)k);
    }
}

/* Grid: (rows, chunks or positions; ranks by LORA_RANKS). */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_low_kernel(const __grid_constant__ struct lora_args p)
{
    enum { AHEAD = N == 1 ? 2 : 1 }; /* of A, before x is there */
    __shared__ float parts[LORA_WARPS][LORA_RANKS * N];
    struct lora_rows<N> r;
    int tid = (int)threadIdx.x, lane = lane_id(), j0 = (int)blockIdx.y * LORA_RANKS;
    if (p.pairs) /* made by the router in front */
        dependency_wait();
    lora_find(p, (int)blockIdx.x, r);
    bool mine = r.m && j0 < r.m->rank;
    uint4 first[AHEAD][LORA_RANKS];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (mine)
            lora_a(r.m, j0, i * LORA_COLUMNS + tid * 8, first[i]);
    if (!p.pairs)
        dependency_wait();
    dependency_trigger();
    if (!mine)
        return;
    float sum[LORA_RANKS][N] = {};
    auto add = [&](const uint4(&a)[LORA_RANKS], int k) {
        float f[LORA_RANKS][8];
#pragma unroll
        for (int j = 0; j < LORA_RANKS; j++)
            lora_eight(a[j], f[j]);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float x[8];
            lora_x(p, r.in[i], k, x);
#pragma unroll
            for (int j = 0; j < LORA_RANKS; j++)
#pragma unroll
                for (int q = 0; q < 8; q++)
                    sum[j][i] += f[j][q] * x[q];
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i * LORA_COLUMNS + tid * 8 < p.n_in)
            add(first[i], i * LORA_COLUMNS + tid * 8);
#pragma unroll 2
    for (int k = AHEAD * LORA_COLUMNS + tid * 8; k < p.n_in; k += LORA_COLUMNS) {
        uint4 a[LORA_RANKS];
        lora_a(r.m, j0, k, a);
        add(a, k);
    }
#pragma unroll
    for (int j = 0; j < LORA_RANKS; j++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = warp_sum(sum[j][i]);
            if (lane == 0)
                parts[warp_id()][j * N + i] = s;
        }
    __syncthreads();
    int j = tid / N, i = tid % N;
    if (j >= LORA_RANKS || j0 + j >= r.m->rank)
        return;
    float t = 0.0f;
    for (int w = 0; w < LORA_WARPS; w++)
        t += parts[w][tid];
#pragma unroll
    for (int n = 0; n < N; n++) /* which is known when this is compiled */
        if (n == i && n < r.n)
            p.t[(size_t)r.slot[n] * (size_t)p.t_len + (size_t)(j0 + j)] =
                t * r.m->scale * r.scale[n];
}

/* The part that column col is of, from part `from` on; n_parts: none. */
DEVICE int lora_part_of(const struct lora_change *m, int from, int col)
{
    while (from < m->n_parts &&
           (col < m->parts[from].first || col >= m->parts[from].first + m->parts[from].n))
        from++;
    return from;
}

/* Grid: (rows, chunks or positions; columns by LORA_THREADS). Shared: t of the rows, a part's last eight
 * padded with zeros. */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_up_kernel(const __grid_constant__ struct lora_args p)
{
    SHARED_BYTES(shared);
    enum { AHEAD = 2 }; /* eights of B, before t is there */
    float *t = (float *)shared;
    struct lora_rows<N> r;
    int tid = (int)threadIdx.x, col = (int)blockIdx.y * LORA_THREADS + tid, part = 0;
    if (p.pairs)
        dependency_wait();
    lora_find(p, (int)blockIdx.x, r);
    uint4 first[AHEAD];
    if (r.m) {
        part = col < p.n_out ? lora_part_of(r.m, 0, col) : r.m->n_parts;
        if (part < r.m->n_parts) {
            const struct lora_change_part &m = r.m->parts[part];
            const uint16_t *b = m.b + (size_t)(col - m.first) * (size_t)m.ld;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (i * 8 < m.ld)
                    first[i] = *(const uint4 *)(b + i * 8);
        }
    }
    if (!p.pairs)
        dependency_wait();
    dependency_trigger();
    if (!r.m)
        return;
    int stride = p.t_len + 8;
#pragma unroll
    for (int i = 0; i < N; i++)
        for (int k = tid; k < r.m->rank + 8; k += LORA_THREADS)
            t[i * stride + k] =
                k < r.m->rank ? p.t[(size_t)r.slot[i] * (size_t)p.t_len + (size_t)k] : 0.0f;
    __syncthreads();
    if (part == r.m->n_parts)
        return;
    float sum[N] = {};
    for (bool early = true; part < r.m->n_parts; part = lora_part_of(r.m, part + 1, col)) {
        const struct lora_change_part &m = r.m->parts[part];
        const uint16_t *b = m.b + (size_t)(col - m.first) * (size_t)m.ld;
        float of[N] = {};
        auto add = [&](const uint4 &h, int k) {
            float f[8];
            lora_eight(h, f);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int q = 0; q < 8; q++)
                    of[n] += f[q] * t[n * stride + m.at + k + q];
        };
        int k = 0;
        if (early) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (i * 8 < m.ld)
                    add(first[i], i * 8);
            k = AHEAD * 8;
            early = false;
        }
#pragma unroll 2
        for (; k < m.ld; k += 8)
            add(*(const uint4 *)(b + k), k);
#pragma unroll
        for (int n = 0; n < N; n++)
            sum[n] += of[n] * m.scale;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
        if (n < r.n)
            p.y[(size_t)r.out[n] * (size_t)p.ldy + (size_t)col] += sum[n];
}

/* A thread to four hidden units. Grid: (n; units by 4 LORA_THREADS). */
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_gate_kernel(const __grid_constant__ struct lora_gate_args p)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.y * LORA_THREADS + threadIdx.x) * 4, row = (int)blockIdx.x;
    const float *from = p.raw + (size_t)row * (size_t)(p.act.ungated ? p.width : 2 * p.width);
    float h[4] = {};
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (i + q < p.width)
            h[q] = gated(p.act, from[i + q], p.act.ungated ? 1.0f : from[p.width + i + q]);
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (i + q < p.width)
            p.hidden[(size_t)row * (size_t)p.ld + (size_t)(i + q)] = h[q];
    if (i >= p.padded)
        return;
#pragma unroll
    for (int q = 0; q < 4; q++)
        h[q] = clamp_half(h[q] * HIDDEN_SCALE);
    uint32_t low = pack_half2(h[0], h[1]), high = pack_half2(h[2], h[3]);
    if (p.halves) {
        uint16_t *to = p.halves + (size_t)row * (size_t)p.padded;
        *(uint32_t *)(to + fragment_slot(i)) = low;
        *(uint32_t *)(to + fragment_slot(i + 2)) = high;
    }
    if (p.panels) { /* as residual.cu's */
        int tile = row / p.panel_rows, at = fragment_slot(i), piece = at >> 3 & 7, turn = row & 7;
        uint8_t *to = p.panels +
                      ((size_t)(tile * p.panel_rows) * (size_t)p.padded +
                       (size_t)((row - tile * p.panel_rows) * 64)) *
                          2 +
                      (i >> 6) * p.panel_rows * 128 + (at & 7) * 2;
        *(uint32_t *)(to + ((piece ^ turn) << 4)) = low;
        *(uint32_t *)(to + (((piece + 1) ^ turn) << 4)) = high;
        if (i == 0)
            p.scale[row] = 1.0f / HIDDEN_SCALE;
    }
}

/* Host */

void lora_low(struct cuda_backend *cu, const struct lora_args &p, int blocks, int rank)
{
    dim3 grid((unsigned)blocks, (unsigned)ceil_div(rank, LORA_RANKS));
    auto kernel = p.chunks ? lora_low_kernel<LORA_ROWS> : lora_low_kernel<1>;
    cuda_launch(cu, kernel, grid, LORA_THREADS, 0, LAUNCH_EARLY, p);
}

void lora_up(struct cuda_backend *cu, const struct lora_args &p, int blocks)
{
    dim3 grid((unsigned)blocks, (unsigned)ceil_div(p.n_out, LORA_THREADS));
    auto kernel = p.chunks ? lora_up_kernel<LORA_ROWS> : lora_up_kernel<1>;
    size_t shared = (size_t)((p.chunks ? LORA_ROWS : 1) * (p.t_len + 8)) * sizeof(float);
    cuda_launch(cu, kernel, grid, LORA_THREADS, shared, LAUNCH_EARLY, p);
}

void lora_gate(struct cuda_backend *cu, const struct lora_gate_args &p, int n)
{
    int units = p.padded > p.width ? p.padded : p.width;
    dim3 grid((unsigned)n, (unsigned)ceil_div(units, 4 * LORA_THREADS));
    cuda_launch(cu, lora_gate_kernel, grid, LORA_THREADS, 0, LAUNCH_EARLY, p);
}
