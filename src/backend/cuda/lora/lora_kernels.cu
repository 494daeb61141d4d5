/*
 * LoRA kernels: t = s A x (lora_shrink) and y += B t (lora_expand). In lora_shrink a block computes four
 * values of t, its warps sharing the columns. In lora_expand a thread computes a column of y and reads
 * one row of B. A row's adapter, A and B do not depend on the preceding kernel, so their loads are
 * issued before dependency_wait.
 *
 * In steps with prompts, up to LORA_ROWS rows of one adapter share the reads of A and B. Rows of
 * decodes, and the pairs of experts, are processed one by one: for usual ranks A and B stay in the
 * L2, and the grid does not depend on which adapters are used. The order of summation is the same
 * either way.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/lora/lora.cuh"

enum {
    LORA_ROWS = 8,
    LORA_THREADS = 256,
    LORA_WARPS = LORA_THREADS / 32,
    LORA_RANKS = 4,                 /* values of t per block */
    LORA_COLUMNS = LORA_THREADS * 8 /* columns of x per block and iteration */
};

/* A block's work: up to N rows, of which n exist. */
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
        if (pair < 0) { /* past the last pair: other processes have the experts */
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

/* Eight fp16 values as floats. */
DEVICE void lora_eight(const uint4 &h, float (&f)[8])
{
    const uint32_t w[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = half_to_float(w[i] & 0xffff);
        f[2 * i + 1] = half_to_float(w[i] >> 16);
    }
}

/* Eight values of a row of x from column k on; zeros past the end. */
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

/* Grid: (rows, chunks or positions; groups of LORA_RANKS ranks). */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_shrink_kernel(const __grid_constant__ struct lora_args p)
{
    enum { PREFETCH = N == 1 ? 2 : 1 }; /* loads of A issued before x is available */
    __shared__ float parts[LORA_WARPS][LORA_RANKS * N];
    struct lora_rows<N> r;
    int tid = (int)threadIdx.x, lane = lane_id(), j0 = (int)blockIdx.y * LORA_RANKS;
    if (p.pairs) /* the preceding router kernel writes the pairs */
        dependency_wait();
    lora_find(p, (int)blockIdx.x, r);
    bool mine = r.m && j0 < r.m->rank;
    uint4 first[PREFETCH][LORA_RANKS];
#pragma unroll
    for (int i = 0; i < PREFETCH; i++)
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
    for (int i = 0; i < PREFETCH; i++)
        if (i * LORA_COLUMNS + tid * 8 < p.n_in)
            add(first[i], i * LORA_COLUMNS + tid * 8);
#pragma unroll 2
    for (int k = PREFETCH * LORA_COLUMNS + tid * 8; k < p.n_in; k += LORA_COLUMNS) {
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
    for (int n = 0; n < N; n++) /* unrolled, so that r.slot stays in registers */
        if (n == i && n < r.n)
            p.t[(size_t)r.slot[n] * (size_t)p.t_len + (size_t)(j0 + j)] =
                t * r.m->scale * r.scale[n];
}

/* The first part from `from` on that contains column col; n_parts if none does. */
DEVICE int lora_part_of(const struct lora_change *m, int from, int col)
{
    while (from < m->n_parts &&
           (col < m->parts[from].first || col >= m->parts[from].first + m->parts[from].n))
        from++;
    return from;
}

/* Grid: (rows, chunks or positions; groups of LORA_THREADS columns). Shared memory: t of the
 * rows, padded with eight zeros. */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_expand_kernel(const __grid_constant__ struct lora_args p)
{
    SHARED_BYTES(shared);
    enum { PREFETCH = 2 }; /* loads of B issued before t is available */
    float *t = (float *)shared;
    struct lora_rows<N> r;
    int tid = (int)threadIdx.x, col = (int)blockIdx.y * LORA_THREADS + tid, part = 0;
    if (p.pairs)
        dependency_wait();
    lora_find(p, (int)blockIdx.x, r);
    uint4 first[PREFETCH];
    if (r.m) {
        part = col < p.n_out ? lora_part_of(r.m, 0, col) : r.m->n_parts;
        if (part < r.m->n_parts) {
            const struct lora_change_part &m = r.m->parts[part];
            const uint16_t *b = m.b + (size_t)(col - m.first) * (size_t)m.ld;
#pragma unroll
            for (int i = 0; i < PREFETCH; i++)
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
            for (int i = 0; i < PREFETCH; i++)
                if (i * 8 < m.ld)
                    add(first[i], i * 8);
            k = PREFETCH * 8;
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

/* One thread per four hidden units. Grid: (n; groups of 4 LORA_THREADS units). */
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
    if (p.fp16_out) {
        uint16_t *to = p.fp16_out + (size_t)row * (size_t)p.padded;
        *(uint32_t *)(to + fragment_slot(i)) = low;
        *(uint32_t *)(to + fragment_slot(i + 2)) = high;
    }
    if (p.panels) { /* layout as in residual.cu */
        int tile = row / p.panel_rows, at = fragment_slot(i), piece = at >> 3 & 7,
            swizzle = row & 7;
        uint8_t *to = p.panels +
                      ((size_t)(tile * p.panel_rows) * (size_t)p.padded +
                       (size_t)((row - tile * p.panel_rows) * 64)) *
                          2 +
                      (i >> 6) * p.panel_rows * 128 + (at & 7) * 2;
        *(uint32_t *)(to + ((piece ^ swizzle) << 4)) = low;
        *(uint32_t *)(to + (((piece + 1) ^ swizzle) << 4)) = high;
        if (i == 0)
            p.scale[row] = 1.0f / HIDDEN_SCALE;
    }
}

/* Host */

void lora_shrink(struct cuda_backend *cu, const struct lora_args &p, int blocks, int rank)
{
    dim3 grid((unsigned)blocks, (unsigned)ceil_div(rank, LORA_RANKS));
    auto kernel = p.chunks ? lora_shrink_kernel<LORA_ROWS> : lora_shrink_kernel<1>;
    cuda_launch(cu, kernel, grid, LORA_THREADS, 0, LAUNCH_EARLY, p);
}

void lora_expand(struct cuda_backend *cu, const struct lora_args &p, int blocks)
{
    dim3 grid((unsigned)blocks, (unsigned)ceil_div(p.n_out, LORA_THREADS));
    auto kernel = p.chunks ? lora_expand_kernel<LORA_ROWS> : lora_expand_kernel<1>;
    size_t shared = (size_t)((p.chunks ? LORA_ROWS : 1) * (p.t_len + 8)) * sizeof(float);
    cuda_launch(cu, kernel, grid, LORA_THREADS, shared, LAUNCH_EARLY, p);
}

void lora_gate(struct cuda_backend *cu, const struct lora_gate_args &p, int n)
{
    int units = p.padded > p.width ? p.padded : p.width;
    dim3 grid((unsigned)n, (unsigned)ceil_div(units, 4 * LORA_THREADS));
    cuda_launch(cu, lora_gate_kernel, grid, LORA_THREADS, 0, LAUNCH_EARLY, p);
}
