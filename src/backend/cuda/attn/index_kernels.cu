/*
 * The indexer of sparse attention: its queries and keys, scores of all keys of a context, and the choice of the best.
 * Mapping: a block scores INDEX_KEYS keys for one row, a thread one key with eight heads at a time; a block then chooses for
 * one row (and one group of heads), by a radix select over the scores' order and a compaction in the order of keys.
 * Limit: arithmetic of the scores, in floats; for decodes the latency of the select.
 */
#include "backend/cuda/attn/index.cuh"
#include "backend/cuda/mixers/latent_row.cuh"

#include <math.h>

enum { PICK_THREADS = 1024, PICK_BINS = 256, HEADS_AT_ONCE = 8 };

/* One warp: norm, and rotation of row t, of a head of `dim` values in shared memory. */
DEVICE void index_head(const struct index_args &p, const struct gain &norm, int t, float *head)
{
    int lane = lane_id(), D = p.dim;
    float sum = 0.0f, squares = 0.0f;
    for (int i = lane; i < D && norm.gain; i += 32)
        sum += head[i];
    float mean = norm.layer ? warp_sum(sum) / (float)D : 0.0f;
    for (int i = lane; i < D && norm.gain; i += 32)
        squares += (head[i] - mean) * (head[i] - mean);
    float by = rsqrtf(warp_sum(squares) / (float)D + norm.eps);
    for (int i = lane; i < D && norm.gain; i += 32)
        head[i] = (head[i] - mean) * by * norm.gain[i] + (norm.bias ? norm.bias[i] : 0.0f);
    __syncwarp();
    float a[INDEX_MAX_DIM / 64], b[INDEX_MAX_DIM / 64];
#pragma unroll
    for (int j = 0; j < INDEX_MAX_DIM / 64; j++) {
        int i = lane + 32 * j;
        if (i < p.half) {
            float2 cs = p.rope[(size_t)t * (size_t)p.half + (size_t)i];
            int from = p.last ? D - 2 * p.half : 0;
            bool pairs = p.interleaved || p.last;
            float x = head[pairs ? from + 2 * i : i];
            float y = head[pairs ? from + 2 * i + 1 : p.half + i];
            a[j] = x * cs.x - y * cs.y;
            b[j] = y * cs.x + x * cs.y;
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < INDEX_MAX_DIM / 64; j++) {
        int i = lane + 32 * j;
        if (i < p.half) {
            head[p.last ? D - 2 * p.half + 2 * i : i] = a[j];
            head[p.last ? D - 2 * p.half + 2 * i + 1 : p.half + i] = b[j];
        }
    }
    __syncwarp();
}

DEVICE bool index_is_quant(int type)
{
    return type == DT_Q8_0 || type == DT_Q4_0 || type == DT_F8_E4M3;
}

/* Grid: (heads and the key / 4, rows). One warp per head. */
static __global__ void __launch_bounds__(128)
    index_rows_kernel(const __grid_constant__ struct index_args p)
{
    __shared__ float heads[4][INDEX_MAX_DIM];
    dependency_wait();
    dependency_trigger();
    int h = (int)blockIdx.x * 4 + warp_id(), t = (int)blockIdx.y, lane = lane_id();
    float *head = heads[warp_id()];
    if (h > p.n_heads || (h == p.n_heads && !p.k))
        return;
    bool key = h == p.n_heads;
    float *row = key ? p.k + (size_t)t * (size_t)p.dim
                     : p.q + ((size_t)t * (size_t)p.n_heads + (size_t)h) * (size_t)p.dim;
    for (int i = lane; i < p.dim; i += 32)
        head[i] = row[i];
    __syncwarp();
    index_head(p, key ? p.k_norm : p.q_norm, t, head);
    int slot = p.step.slot[t];
    size_t at = (size_t)max(slot, 0) * (size_t)p.dim;
    if (!key)
        for (int i = lane; i < p.dim; i += 32)
            row[i] = head[i];
    else if (slot >= 0 && index_is_quant(p.type))
        for (int i = 0; i < p.dim; i += 32)
            latent_put_block(p.cache, p.type, at + (size_t)i, head[i + lane]);
    else if (slot >= 0)
        for (int i = lane; i < p.dim; i += 32)
            latent_put(p.cache, p.type, at + (size_t)i, head[i]);
}

/* Keys of row t, and units to choose from. */
DEVICE int index_keys(const struct index_args &p, int t)
{
    return (p.step.pos[t] + 1) / p.rate;
}
DEVICE int index_units(const struct index_args &p, int t)
{
    return p.block ? p.step.pos[t] / p.block + 1 : index_keys(p, t);
}

/* Whether row t chooses: it has more units than can be chosen. */
DEVICE bool index_chooses(const struct index_args &p, int t)
{
    return p.step.slot[t] >= 0 && index_units(p, t) > p.n_chosen;
}

/* The row of the cache of a key: that of its last token, in units of keys. */
DEVICE size_t index_row(const struct index_args &p, const int32_t *pages, int key)
{
    int end = (key + 1) * p.rate - 1, page = end / p.page_len;
    return (size_t)pages[page] * (size_t)p.page_rows + (size_t)((end - page * p.page_len) / p.rate);
}

/* Grid: (parts of INDEX_KEYS keys, rows from p.first on). */
template <bool QUANT>
static __global__ void __launch_bounds__(INDEX_KEYS)
    index_score_kernel(const __grid_constant__ struct index_args p)
{
    SHARED_BYTES(shared);
    __shared__ float unit[INDEX_KEYS];
    dependency_wait();
    dependency_trigger();
    int r = (int)blockIdx.y, t = p.first + r, tid = (int)threadIdx.x;
    int last = index_keys(p, t) - 1;
    int base = (int)blockIdx.x * INDEX_KEYS, D = p.dim, stride = D + 4, H = p.n_heads;
    if (base > last || !index_chooses(p, t))
        return;
    int heads = (H + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE * HEADS_AT_ONCE;
    float *q = (float *)shared, *keys = q + heads * D; /* (heads, D), (INDEX_KEYS, stride) */
    const int32_t *pages =
        p.step.pages + (size_t)p.step.seq_of[t] * (size_t)p.step.head[STEP_PAGE_STRIDE];
    for (int i = tid; i < heads * D; i += INDEX_KEYS)
        q[i] = i < H * D ? p.q[(size_t)t * (size_t)(H * D) + (size_t)i] : 0.0f;
    for (int i = tid; i < INDEX_KEYS * D; i += INDEX_KEYS) {
        int j = i / D, e = i - j * D, key = min(base + j, last);
        size_t slot = index_row(p, pages, key);
        keys[j * stride + e] = latent_get<QUANT>(p.cache, p.type, slot * (size_t)D + (size_t)e);
    }
    __syncthreads();
    const float *k = keys + tid * stride;
    float total = 0.0f;
    int key = base + tid;
    float *scores = p.scores + (size_t)r * (size_t)(p.block ? H : 1) * p.units;
    for (int h0 = 0; h0 < H; h0 += HEADS_AT_ONCE) {
        float acc[HEADS_AT_ONCE] = {};
        for (int e = 0; e < D; e += 4) {
            float4 x = *(const float4 *)(k + e);
#pragma unroll
            for (int h = 0; h < HEADS_AT_ONCE; h++) {
                float4 y = *(const float4 *)(q + (h0 + h) * D + e);
                acc[h] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS_AT_ONCE; h++) {
            if (h0 + h >= H)
                break;
            if (!p.block) {
                total += p.w[(size_t)t * (size_t)H + (size_t)(h0 + h)] * fmaxf(acc[h], 0.0f);
                continue;
            }
            unit[tid] = key <= last ? acc[h] : -INFINITY;
            __syncthreads();
            if (tid % p.block == 0 && key <= last) {
                float most = unit[tid];
                for (int i = 1; i < p.block; i++)
                    most = fmaxf(most, unit[tid + i]);
                scores[(size_t)(h0 + h) * p.units + (size_t)(key / p.block)] =
                    key / p.block == last / p.block ? INFINITY : most;
            }
            __syncthreads();
        }
    }
    if (!p.block && key <= last)
        scores[key] = total;
}

/* The sum of v over a block's threads before this one; *all: over all of them. part: (32) */
DEVICE int pick_before(int v, int *part, int *all)
{
    int lane = lane_id(), sum = v;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        int u = __shfl_up_sync(FULL_WARP, sum, i);
        sum += lane >= i ? u : 0;
    }
    __syncthreads(); /* part is free */
    if (lane == 31)
        part[warp_id()] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int i = 0; i < PICK_THREADS / 32; i++) {
        before += i < warp_id() ? part[i] : 0;
        total += part[i];
    }
    *all = total;
    return before + sum - v;
}

/* Grid: (groups, rows from p.first on). */
static __global__ void __launch_bounds__(PICK_THREADS)
    index_pick_kernel(const __grid_constant__ struct index_args p)
{
    __shared__ int bins[PICK_BINS], part[32], found[2];
    dependency_wait();
    dependency_trigger();
    int g = (int)blockIdx.x, r = (int)blockIdx.y, t = p.first + r, tid = (int)threadIdx.x;
    size_t at = (size_t)t * (size_t)gridDim.x + (size_t)g;
    int32_t *list = p.list + at * (size_t)p.n_chosen;
    const float *scores = p.scores + ((size_t)r * (size_t)gridDim.x + (size_t)g) * p.units;
    bool chooses = index_chooses(p, t);
    if (tid == 0)
        p.n[at] = chooses ? p.n_chosen : -1;
    if (!chooses)
        return;
    int n = index_units(p, t), left = p.n_chosen;
    uint32_t prefix = 0; /* the upper bits of the last key chosen */
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = tid; i < PICK_BINS; i += PICK_THREADS)
            bins[i] = 0;
        __syncthreads();
        for (int i = tid; i < n; i += PICK_THREADS) {
            uint32_t key = float_order(scores[i] + 0.0f);
            if (shift == 24 || key >> (shift + 8) == prefix)
                atomicAdd(&bins[key >> shift & (PICK_BINS - 1)], 1);
        }
        __syncthreads();
        if (tid == 0) {
            int bin = PICK_BINS - 1, before = 0;
            for (; bin > 0 && before + bins[bin] < left; bin--)
                before += bins[bin];
            found[0] = bin;
            found[1] = before;
        }
        __syncthreads();
        prefix = prefix << 8 | (uint32_t)found[0];
        left -= found[1];
        __syncthreads();
    }
    /* All larger keys, and the first `left` equal ones, in the order of keys. */
    int done = 0, equal = 0;
    for (int base = 0; base < n; base += PICK_THREADS) {
        uint32_t key = base + tid < n ? float_order(scores[base + tid] + 0.0f) : 0;
        bool same = base + tid < n && key == prefix;
        int all, ties = equal + pick_before(same, part, &all);
        equal += all;
        bool mine = base + tid < n && (key > prefix || (same && ties < left));
        int place = done + pick_before(mine, part, &all);
        done += all;
        if (mine && place < p.n_chosen)
            list[place] = base + tid;
    }
}

/* Grid: (rows). */
static __global__ void __launch_bounds__(256)
    index_split_kernel(const float *x, float *y, int width)
{
    dependency_wait();
    dependency_trigger();
    size_t at = (size_t)blockIdx.x * (size_t)width, rest = (size_t)gridDim.x * (size_t)width;
    for (int i = (int)threadIdx.x; i < width; i += 256) {
        float v = x[at + (size_t)i];
        uint32_t u = bits_of(v);
        float high = float_of((u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu);
        y[at + (size_t)i] = high;
        y[rest + at + (size_t)i] = v - high;
    }
}

/* Grid: (blocks of 256 columns, rows). */
static __global__ void __launch_bounds__(256) index_join_kernel(const float *x, float *y, int width)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.x * 256 + threadIdx.x);
    size_t at = (size_t)blockIdx.y * (size_t)width + (size_t)i;
    if (i < width)
        y[at] = x[at] + x[at + (size_t)gridDim.y * (size_t)width];
}

/* Host */

size_t index_shared(int n_heads, int dim)
{
    size_t heads = align_up((size_t)n_heads, HEADS_AT_ONCE);
    return (heads * (size_t)dim + (size_t)INDEX_KEYS * (size_t)(dim + 4)) * sizeof(float);
}

void index_rows(struct cuda_backend *cu, const struct index_args &p, int rows)
{
    cuda_launch(cu, index_rows_kernel, dim3((unsigned)ceil_div(p.n_heads + 1, 4), (unsigned)rows),
                128, 0, LAUNCH_EARLY, p);
}

void index_pick(struct cuda_backend *cu, const struct index_args &p, int rows, int keys)
{
    bool quant = p.type == DT_Q8_0 || p.type == DT_Q4_0 || p.type == DT_F8_E4M3;
    cuda_launch(cu, quant ? index_score_kernel<true> : index_score_kernel<false>,
                dim3((unsigned)ceil_div(keys, INDEX_KEYS), (unsigned)rows), INDEX_KEYS,
                index_shared(p.n_heads, p.dim), LAUNCH_EARLY, p);
    cuda_launch(cu, index_pick_kernel, dim3(p.block ? (unsigned)p.n_heads : 1u, (unsigned)rows),
                PICK_THREADS, 0, LAUNCH_EARLY, p);
}

void index_split(struct cuda_backend *cu, const float *x, float *y, int rows, int width)
{
    cuda_launch(cu, index_split_kernel, dim3((unsigned)rows), 256, 0, LAUNCH_EARLY, x, y, width);
}

void index_join(struct cuda_backend *cu, const float *x, float *y, int rows, int width)
{
    cuda_launch(cu, index_join_kernel, dim3((unsigned)ceil_div(width, 256), (unsigned)rows), 256, 0,
                LAUNCH_EARLY, x, y, width);
}
