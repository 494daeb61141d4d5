/*
 * The kernels of adapters. A warp makes a value of t = s A x, reading a row of A as halves, 256 columns at a
 * time; a thread makes a column of y += B t, reading a row of B. Rows of one adapter share what is read,
 * LORA_ROWS at a time, in steps with prompts; a decode's rows, and the pairs of experts, are by themselves:
 * A and B of a rank that adapters have stay in the L2, and their number does not depend on who uses
 * what. A row's sums are the same either way.
 */
#include "backend/cuda/gemm.cuh"
#include "backend/cuda/lora.cuh"

enum { LORA_ROWS = 8, LORA_THREADS = 256, LORA_WARPS = LORA_THREADS / 32 };

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
DEVICE void lora_eight(const uint16_t *from, float (&f)[8])
{
    uint4 h = *(const uint4 *)from;
    const uint32_t w[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = half_to_float(w[i] & 0xffff);
        f[2 * i + 1] = half_to_float(w[i] >> 16);
    }
}

/* Grid: (rows, chunks or positions; ranks by LORA_WARPS). */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_low_kernel(const __grid_constant__ struct lora_args p)
{
    dependency_wait();
    dependency_trigger();
    struct lora_rows<N> r;
    lora_find(p, (int)blockIdx.x, r);
    int j = (int)blockIdx.y * LORA_WARPS + warp_id(), lane = lane_id();
    if (!r.m || j >= r.m->rank)
        return;
    const uint16_t *a = r.m->a + (size_t)j * (size_t)r.m->ld;
    float sum[N] = {};
    bool vec = !(p.ldx & 3);
#pragma unroll 4
    for (int k = lane * 8; k < p.n_in; k += 256) {
        float f[8];
        lora_eight(a + k, f);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float *x = p.x + (size_t)r.in[i] * (size_t)p.ldx + (size_t)k;
            if (vec && k + 8 <= p.n_in) {
                float4 u = *(const float4 *)x, v = *(const float4 *)(x + 4);
                sum[i] += f[0] * u.x + f[1] * u.y + f[2] * u.z + f[3] * u.w + f[4] * v.x +
                          f[5] * v.y + f[6] * v.z + f[7] * v.w;
            } else {
#pragma unroll
                for (int q = 0; q < 8; q++)
                    if (k + q < p.n_in)
                        sum[i] += f[q] * x[q];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        float t = warp_sum(sum[i]) * r.m->scale * r.scale[i];
        if (lane == 0 && i < r.n)
            p.t[(size_t)r.slot[i] * (size_t)p.t_len + (size_t)j] = t;
    }
}

/* Grid: (rows, chunks or positions; columns by LORA_THREADS). Shared: t of the rows, a part's last eight
 * padded with zeros. */
template <int N>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_up_kernel(const __grid_constant__ struct lora_args p)
{
    SHARED_BYTES(shared);
    float *t = (float *)shared;
    dependency_wait();
    dependency_trigger();
    struct lora_rows<N> r;
    lora_find(p, (int)blockIdx.x, r);
    if (!r.m)
        return;
    int stride = p.t_len + 8, tid = (int)threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++)
        for (int k = tid; k < r.m->rank + 8; k += LORA_THREADS)
            t[i * stride + k] =
                k < r.m->rank ? p.t[(size_t)r.slot[i] * (size_t)p.t_len + (size_t)k] : 0.0f;
    __syncthreads();
    int col = (int)blockIdx.y * LORA_THREADS + tid;
    if (col >= p.n_out)
        return;
    float sum[N] = {};
    for (int i = 0; i < r.m->n_parts; i++) {
        const struct lora_change_part &part = r.m->parts[i];
        int c = col - part.first;
        if (c < 0 || c >= part.n)
            continue;
        const uint16_t *b = part.b + (size_t)c * (size_t)part.ld;
        float of[N] = {};
#pragma unroll 2
        for (int k = 0; k < part.ld; k += 8) {
            float f[8];
            lora_eight(b + k, f);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int q = 0; q < 8; q++)
                    of[n] += f[q] * t[n * stride + part.at + k + q];
        }
#pragma unroll
        for (int n = 0; n < N; n++)
            sum[n] += of[n] * part.scale;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
        if (n < r.n)
            p.y[(size_t)r.out[n] * (size_t)p.ldy + (size_t)col] += sum[n];
}

/* A thread to a hidden unit. Grid: (n; units by LORA_THREADS). */
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_gate_kernel(const __grid_constant__ struct gating act, const float *raw, int width,
                     float *hidden, int ld, uint16_t *halves, int padded)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.y * LORA_THREADS + threadIdx.x);
    size_t row = blockIdx.x;
    float h = 0.0f;
    if (i < width) {
        const float *from = raw + row * (size_t)(act.lone ? width : 2 * width);
        h = gated(act, from[i], act.lone ? 1.0f : from[width + i]);
        hidden[row * (size_t)ld + (size_t)i] = h;
    }
    if (halves && i < padded)
        halves[row * (size_t)padded + (size_t)half_slot(i)] =
            float_to_half(clamp_half(h * HIDDEN_SCALE));
}

/* Host */

void lora_low(struct cuda_backend *cu, const struct lora_args &p, int blocks, int rank)
{
    dim3 grid((unsigned)blocks, (unsigned)ceil_div(rank, LORA_WARPS));
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

void lora_gate(struct cuda_backend *cu, const struct gating &act, const float *raw, int n,
               int width, float *hidden, int ld, uint16_t *halves, int padded)
{
    dim3 grid((unsigned)n, (unsigned)ceil_div(halves ? padded : width, LORA_THREADS));
    cuda_launch(cu, lora_gate_kernel, grid, LORA_THREADS, 0, LAUNCH_EARLY, act, raw, width, hidden,
                ld, halves, padded);
}
