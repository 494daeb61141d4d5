/*
 * Attention of rows over the keys that an indexer chose (index.h), or over all keys where a row has no choice: of heads
 * over a KV cache, and of absorbed queries over latents. Only the chosen keys are read.
 * Mapping: a block has a row and up to eight heads that share keys. Tiles of 32 keys pass through shared memory as floats: a
 * warp scores one head, a lane one key; then every thread adds its columns of the values. Limit: arithmetic in floats; for
 * decodes the number of blocks.
 */
#include "backend/cuda/attn/index.h"
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/kv_quant.cuh"
#include "backend/cuda/mixers/compressed.cuh"
#include "backend/cuda/mixers/latent_row.cuh"

#include <math.h>

enum { CHOSEN_THREADS = 256, CHOSEN_HEADS = 8, CHOSEN_KEYS = 32, CHOSEN_COLUMNS = 4 };

/* What both kinds of layer have in common. Shared memory: q (CHOSEN_HEADS, k_dim), tile (CHOSEN_KEYS, stride). */
struct chosen_args {
    struct index_choice choice;
    int k_dim, v_dim, stride;
};

/* Key i of a row: through its choice, or itself. */
DEVICE int chosen_key(const struct index_choice &c, const int32_t *list, int i)
{
    return !list ? i : c.block ? list[i / c.block] * c.block + i % c.block : list[i];
}

/* The loop over keys: load(tile, first, n, values) puts n keys or values of the row into the tile; `same`: values are the
 * first columns of keys. Leaves sums in acc, and each head's total in shrinks. */
template <class LOAD>
DEVICE void chosen_loop(const struct chosen_args &p, int n_keys, bool same, const float *q,
                        float *tile, float (*prob)[CHOSEN_KEYS], float *shrinks,
                        float (&acc)[CHOSEN_COLUMNS][CHOSEN_HEADS], float *top, float *total,
                        LOAD load)
{
    int tid = (int)threadIdx.x, w = warp_id(), lane = lane_id();
    for (int base = 0; base < n_keys; base += CHOSEN_KEYS) {
        int n = min((int)CHOSEN_KEYS, n_keys - base);
        __syncthreads(); /* the tile is free */
        load(tile, base, n, false);
        __syncthreads();
        float s = -INFINITY;
        if (lane < n) {
            const float *k = tile + lane * p.stride, *mine = q + w * p.k_dim;
            float dot = 0.0f;
            for (int e = 0; e < p.k_dim; e++)
                dot += mine[e] * k[e];
            s = dot;
        }
        float m = fmaxf(*top, warp_max(s)), shrink = expf(*top - m), e = expf(s - m);
        prob[w][lane] = lane < n ? e : 0.0f;
        *total = *total * shrink + warp_sum(lane < n ? e : 0.0f);
        *top = m;
        if (lane == 0)
            shrinks[w] = shrink;
        __syncthreads();
        if (!same) {
            load(tile, base, n, true);
            __syncthreads();
        }
#pragma unroll
        for (int c = 0; c < CHOSEN_COLUMNS; c++) {
            int column = tid + c * CHOSEN_THREADS;
            if (column >= p.v_dim)
                break;
#pragma unroll
            for (int h = 0; h < CHOSEN_HEADS; h++)
                acc[c][h] *= shrinks[h];
            for (int j = 0; j < n; j++) {
                float v = tile[j * p.stride + column];
#pragma unroll
                for (int h = 0; h < CHOSEN_HEADS; h++)
                    acc[c][h] += prob[h][j] * v;
            }
        }
    }
    __syncthreads();
    if (lane == 0)
        shrinks[w] = *total;
    __syncthreads();
}

/* Keys that row t sees, and its list or NULL. */
DEVICE int chosen_keys(const struct index_choice &c, const struct step &s, int t, int group,
                       const int32_t **list)
{
    int last = s.slot[t] < 0 ? -1 : s.pos[t];
    size_t at = (size_t)t * (size_t)c.groups + (size_t)(c.groups > 1 ? group : 0);
    *list = c.n[at] < 0 ? NULL : c.list + at * (size_t)c.n_chosen;
    if (last < 0 || !*list)
        return last + 1;
    if (!c.block)
        return c.n_chosen;
    /* the row's own block is the last, and may be partly filled */
    return (c.n_chosen - 1) * c.block + last % c.block + 1;
}

/* Grid: (groups of heads of all kv heads, rows). */
template <bool QUANT>
static __global__ void __launch_bounds__(CHOSEN_THREADS)
    chosen_heads_kernel(const __grid_constant__ struct attn_args a,
                        const __grid_constant__ struct chosen_args p)
{
    SHARED_BYTES(shared);
    __shared__ float prob[CHOSEN_HEADS][CHOSEN_KEYS], shrinks[CHOSEN_HEADS];
    dependency_wait();
    dependency_trigger();
    int K = a.kv.n_kv, G = a.n_heads / K, parts = (G + CHOSEN_HEADS - 1) / CHOSEN_HEADS;
    int kv_head = (int)blockIdx.x / parts, h0 = (int)blockIdx.x % parts * CHOSEN_HEADS;
    int t = (int)blockIdx.y, tid = (int)threadIdx.x, heads = min((int)CHOSEN_HEADS, G - h0);
    int first = kv_head * G + h0, w = warp_id();
    float *q = (float *)shared, *tile = q + CHOSEN_HEADS * p.k_dim;
    const int32_t *list,
        *pages = a.step.pages + (size_t)a.step.seq_of[t] * (size_t)a.step.head[STEP_PAGE_STRIDE];
    int n_keys = chosen_keys(p.choice, a.step, t, kv_head, &list);
    for (int i = tid; i < CHOSEN_HEADS * p.k_dim; i += CHOSEN_THREADS)
        q[i] =
            i < heads * p.k_dim
                ? a.scale * a.q[((size_t)t * (size_t)a.n_heads + (size_t)first) * (size_t)p.k_dim +
                                (size_t)i]
                : 0.0f;
    float acc[CHOSEN_COLUMNS][CHOSEN_HEADS] = {};
    float sink = a.sinks && w < heads ? a.sinks[first + w] : -INFINITY;
    float top = sink, total = a.sinks && w < heads ? 1.0f : 0.0f;
    int k_type = QUANT ? kv_keys(a.kv.type) : a.kv.type;
    int v_type = QUANT ? kv_values(a.kv.type) : a.kv.type;
    auto load = [&](float *to, int base, int n, bool values) {
        int dim = values ? p.v_dim : p.k_dim, type = values ? v_type : k_type;
        const uint8_t *pool = values ? a.kv.v : a.kv.k;
        for (int j = w; j < n; j += CHOSEN_THREADS / 32) {
            int key = chosen_key(p.choice, list, base + j);
            int slot = pages[key / a.kv.page_len] * a.kv.page_len + key % a.kv.page_len;
            struct kv_place at = kv_place_of(pool, type, slot, a.kv.page_len, K, kv_head, dim);
            for (int e = lane_id(); e < dim; e += 32)
                to[j * p.stride + e] = kv_head_get(type, at, e);
        }
    };
    chosen_loop(p, n_keys, false, q, tile, prob, shrinks, acc, &top, &total, load);
#pragma unroll
    for (int c = 0; c < CHOSEN_COLUMNS; c++)
        for (int h = 0; h < CHOSEN_HEADS; h++) {
            int column = tid + c * CHOSEN_THREADS;
            if (column < p.v_dim)
                tile[h * p.stride + column] = shrinks[h] > 0.0f ? acc[c][h] / shrinks[h] : 0.0f;
        }
    __syncthreads();
    if (w >= heads)
        return;
    if (QUANT && kv_is_rotated(v_type))
        kv_head_rotate(tile + w * p.stride, p.v_dim);
    float *out = a.a + ((size_t)t * (size_t)a.n_heads + (size_t)(first + w)) * (size_t)p.v_dim;
    for (int e = lane_id(); e < p.v_dim; e += 32)
        out[e] = tile[w * p.stride + e];
}

/* Grid: (groups of heads, rows). */
template <bool QUANT>
static __global__ void __launch_bounds__(CHOSEN_THREADS)
    chosen_latent_kernel(const __grid_constant__ struct latent_args a,
                         const __grid_constant__ struct chosen_args p)
{
    SHARED_BYTES(shared);
    __shared__ float prob[CHOSEN_HEADS][CHOSEN_KEYS], shrinks[CHOSEN_HEADS];
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, h0 = (int)blockIdx.x * CHOSEN_HEADS, tid = (int)threadIdx.x;
    int C = a.rank, Dr = a.rope_dim, width = C + Dr, heads = min((int)CHOSEN_HEADS, a.n_heads - h0);
    float *q = (float *)shared, *tile = q + CHOSEN_HEADS * width;
    const int32_t *list,
        *pages = a.step.pages + (size_t)a.step.seq_of[t] * (size_t)a.step.head[STEP_PAGE_STRIDE];
    int n_keys = chosen_keys(p.choice, a.step, t, 0, &list);
    for (int i = tid; i < CHOSEN_HEADS * width; i += CHOSEN_THREADS) {
        int h = i / width, e = i - h * width;
        size_t row = (size_t)t * (size_t)a.n_heads + (size_t)(h0 + h);
        q[i] =
            h >= heads
                ? 0.0f
                : a.scale *
                      (e < C
                           ? a.q[row * (size_t)C + (size_t)e]
                           : a.qr[row * (size_t)(a.nope_dim + Dr) + (size_t)(a.nope_dim + e - C)]);
    }
    float acc[CHOSEN_COLUMNS][CHOSEN_HEADS] = {}, top = -INFINITY, total = 0.0f;
    auto load = [&](float *to, int base, int n, bool) {
        for (int j = warp_id(); j < n; j += CHOSEN_THREADS / 32) {
            int key = chosen_key(p.choice, list, base + j);
            size_t at = ((size_t)pages[key / a.page_len] * (size_t)a.page_len +
                         (size_t)(key % a.page_len)) *
                        (size_t)width;
            for (int e = lane_id(); e < width; e += 32)
                to[j * p.stride + e] = latent_get<QUANT>(a.cache, a.type, at + (size_t)e);
        }
    };
    chosen_loop(p, n_keys, true, q, tile, prob, shrinks, acc, &top, &total, load);
#pragma unroll
    for (int c = 0; c < CHOSEN_COLUMNS; c++)
        for (int h = 0; h < heads; h++) {
            int column = tid + c * CHOSEN_THREADS;
            if (column < C)
                *latent_sum_at(a, t, h0 + h, column) =
                    float_to_half(clamp_half(shrinks[h] > 0.0f ? acc[c][h] / shrinks[h] : 0.0f));
        }
}

/* Compressed attention. Grid: (groups of heads, rows). */
template <bool QUANT>
static __global__ void __launch_bounds__(CHOSEN_THREADS)
    chosen_compressed_kernel(const __grid_constant__ struct compressed_args a,
                             const __grid_constant__ struct chosen_args p)
{
    SHARED_BYTES(shared);
    __shared__ float prob[CHOSEN_HEADS][CHOSEN_KEYS], shrinks[CHOSEN_HEADS];
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, h0 = (int)blockIdx.x * CHOSEN_HEADS, tid = (int)threadIdx.x;
    int D = a.dim, heads = min((int)CHOSEN_HEADS, a.n_heads - h0), w = warp_id();
    float *q = (float *)shared, *tile = q + CHOSEN_HEADS * D;
    struct compressed_view view = compressed_view_of(a, t);
    size_t row = ((size_t)t * (size_t)a.n_heads + (size_t)h0) * (size_t)D;
    for (int i = tid; i < CHOSEN_HEADS * D; i += CHOSEN_THREADS)
        q[i] = i < heads * D ? a.scale * a.q[row + (size_t)i] : 0.0f;
    bool sinks = a.sinks && w < heads;
    float acc[CHOSEN_COLUMNS][CHOSEN_HEADS] = {};
    float top = sinks ? a.sinks[h0 + w] : -INFINITY, total = sinks ? 1.0f : 0.0f;
    auto load = [&](float *to, int base, int n, bool) {
        for (int j = w; j < n; j += CHOSEN_THREADS / 32) {
            size_t at = compressed_row(a, view, base + j) * (size_t)D;
            for (int e = lane_id(); e < D; e += 32)
                to[j * p.stride + e] = latent_get<QUANT>(a.cache, a.type, at + (size_t)e);
        }
    };
    chosen_loop(p, view.n, true, q, tile, prob, shrinks, acc, &top, &total, load);
    float *out = q; /* (heads, D): pairs turn together */
#pragma unroll
    for (int c = 0; c < CHOSEN_COLUMNS; c++)
        for (int h = 0; h < heads; h++) {
            int column = tid + c * CHOSEN_THREADS;
            if (column < D)
                out[h * D + column] = view.n && shrinks[h] > 0.0f ? acc[c][h] / shrinks[h] : 0.0f;
        }
    __syncthreads();
    for (int i = 2 * tid; i < heads * D; i += 2 * CHOSEN_THREADS) {
        int h = i / D, e = i - h * D;
        float x = out[i], y = out[i + 1];
        compressed_turn_back(a, t, e, &x, &y);
        *compressed_sum_at(a, t, h0 + h, e) = float_to_half(clamp_half(x));
        *compressed_sum_at(a, t, h0 + h, e + 1) = float_to_half(clamp_half(y));
    }
}

/* Host */

size_t index_attend_shared(int k_dim, int v_dim)
{
    int stride = (k_dim > v_dim ? k_dim : v_dim) | 1;
    return (size_t)(CHOSEN_HEADS * k_dim + CHOSEN_KEYS * stride) * sizeof(float);
}

void index_attend(struct cuda_backend *cu, const struct attn_args &a,
                  const struct index_choice &choice)
{
    int G = a.n_heads / a.kv.n_kv, parts = ceil_div(G, CHOSEN_HEADS);
    struct chosen_args p = {choice, a.kv.head_dim, a.v_dim,
                            (a.kv.head_dim > a.v_dim ? a.kv.head_dim : a.v_dim) | 1};
    cuda_launch(cu, cu->shape.kv_type ? chosen_heads_kernel<false> : chosen_heads_kernel<true>,
                dim3((unsigned)(a.kv.n_kv * parts), (unsigned)a.step.n_tokens), CHOSEN_THREADS,
                index_attend_shared(p.k_dim, p.v_dim), LAUNCH_EARLY, a, p);
}

void index_attend_latent(struct cuda_backend *cu, const struct latent_args &a,
                         const struct index_choice &choice)
{
    int width = a.rank + a.rope_dim;
    struct chosen_args p = {choice, width, a.rank, width | 1};
    bool quant = a.type == DT_Q8_0 || a.type == DT_Q4_0 || a.type == DT_F8_E4M3;
    cuda_launch(cu, quant ? chosen_latent_kernel<true> : chosen_latent_kernel<false>,
                dim3((unsigned)ceil_div(a.n_heads, CHOSEN_HEADS), (unsigned)a.step.n_tokens),
                CHOSEN_THREADS, index_attend_shared(p.k_dim, p.v_dim), LAUNCH_EARLY, a, p);
}

void compressed_attn_any(struct cuda_backend *cu, const struct compressed_args &a)
{
    struct chosen_args p = {{}, a.dim, a.dim, a.dim | 1};
    bool quant = a.type == DT_Q8_0 || a.type == DT_Q4_0 || a.type == DT_F8_E4M3;
    cuda_launch(cu, quant ? chosen_compressed_kernel<true> : chosen_compressed_kernel<false>,
                dim3((unsigned)ceil_div(a.n_heads, CHOSEN_HEADS), (unsigned)a.step.n_tokens),
                CHOSEN_THREADS, index_attend_shared(a.dim, a.dim), LAUNCH_EARLY, a, p);
}
