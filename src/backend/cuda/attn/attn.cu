/*
 * Attention: makes queries, keys and values from the raw projections and chooses a kernel for
 * softmax(q K^T) V over the paged KV cache. Also the fallback kernel, attn_any, for what no other
 * kernel takes (float caches, odd head sizes): one warp per (row, head), float arithmetic, every
 * option a layer may have.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/index.h"
#include "backend/cuda/attn/kv_quant.cuh"
#include "backend/cuda/gemm/gemm.cuh"

#include <math.h>

/* Element 0 of (slot, kv head) in a pool of (n_pages, n_kv, page_len, dim). */
DEVICE size_t kv_index(int slot, int page_len, int n_kv, int head, int dim)
{
    int page = slot / page_len, off = slot - page * page_len;
    return (((size_t)page * (size_t)n_kv + (size_t)head) * (size_t)page_len + (size_t)off) *
           (size_t)dim;
}

DEVICE void kv_put(const uint8_t *base, int type, size_t at, float v)
{
    if (type == DT_F32)
        ((float *)base)[at] = v;
    else
        ((uint16_t *)base)[at] = type == DT_F16 ? float_to_half(v) : float_to_bf16(v);
}

DEVICE float kv_get(const uint8_t *base, int type, size_t at)
{
    if (type == DT_F32)
        return ((const float *)base)[at];
    uint32_t h = ((const uint16_t *)base)[at];
    return type == DT_F16 ? half_to_float(h) : bf16_to_float(h);
}

/* One block: for each part with a norm over all heads, the factor of that norm. */
DEVICE void attn_heads_whole(const struct attn_args &p, const float *row, float *sums,
                             float (&rms)[ATTN_PARTS])
{
    int tid = (int)threadIdx.x, threads = (int)blockDim.x;
#pragma unroll
    for (int part = 0; part < ATTN_PARTS; part++) {
        struct attn_part_layout r = attn_part_layout_of(p, part);
        float sum = 0.0f;
        if (!p.heads.norm[part].on || (part != ATTN_Q && p.heads.shares_kv))
            continue;
        for (int i = tid; i < r.n * r.dim; i += threads) {
            float x = row[r.at + i / r.dim * r.stride + i % r.dim];
            sum += x * x;
        }
        sum = warp_sum(sum);
        __syncthreads(); /* the previous part's sums have been read */
        if (lane_id() == 0)
            sums[warp_id()] = sum;
        __syncthreads();
        sum = 0.0f;
        for (int i = 0; i < threads >> 5; i++)
            sum += sums[i];
        rms[part] = rsqrtf(sum / (float)(r.n * r.dim) + p.heads.norm[part].eps);
    }
}

/* One warp: the norm of a head in shared memory, after RoPE. */
DEVICE void attn_head_norm_late(const struct attn_args &p, int part, float *head)
{
    const struct attn_norm norm = p.heads.norm[part];
    int dim = p.kv.head_dim;
    float sum = 0.0f;
    if (part == ATTN_V || !norm.on)
        return;
    for (int e = lane_id(); e < dim; e += 32)
        sum += head[e] * head[e];
    float by = rsqrtf(warp_sum(sum) / (float)dim + norm.eps);
    for (int e = lane_id(); e < dim; e += 32)
        head[e] *= by * (norm.gain ? norm.gain[e] : 1.0f);
    __syncwarp();
}

/* The factor of row t's queries, of every kind of temperature. */
DEVICE float attn_temperature_rare(const struct attn_args &p, int t)
{
    int at = p.step.pos[t] + p.temp_offset, len = p.heads.temp_len;
    if (p.heads.temp_beta == 0.0f)
        return 1.0f;
    if (p.temp_smooth)
        return 1.0f +
               p.heads.temp_beta * logf(fmaxf(1.0f, (float)(p.step.pos[t] + 1) / (float)len));
    return 1.0f + p.heads.temp_beta * logf(1.0f + (float)(at / len));
}

/* The bias of head h's score of a key `back` positions before. rel: the row's queries. */
DEVICE float attn_relative(const struct attn_args &p, const float *rel, int back)
{
    float sum = 0.0f;
    if (back >= p.rel_len)
        return 0.0f;
    for (int i = 0; i < p.rel_dim; i++)
        sum += rel[i] * p.rel[(size_t)i * (size_t)p.rel_len + (size_t)back];
    return sum;
}

/*
 * q, k and v of every row from its raw projections p.q: norms, RoPE, temperature. q goes to
 * (n_tokens, H, Dk), k and v to the cache. One warp per head. Grid: (groups of heads, rows); with a
 * norm over all heads, one block has all heads of its row. QUANT: p.kv.type holds two types.
 * packed: all three go to its rows (n_tokens, row_width) instead, as fp16 scaled by HIDDEN_SCALE.
 * RARE: norms of q and k may come after RoPE, and the temperature's positions have an offset.
 */
template <bool QUANT, bool RARE>
static __global__ void __launch_bounds__(512)
    attn_heads_kernel(const __grid_constant__ struct attn_args p, float *q, uint16_t *packed)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), warps = (int)blockDim.x >> 5, t = (int)blockIdx.y;
    int H = p.n_heads, K = p.kv.n_kv, widest = max(p.kv.head_dim, p.v_dim);
    float *head = (float *)shared + 16 + warp_id() * widest, rms[ATTN_PARTS] = {};
    if (p.heads.whole)
        attn_heads_whole(p, p.q + (size_t)t * (size_t)p.heads.row_width, (float *)shared, rms);
    int slot = p.step.slot[t], n = p.heads.shares_kv ? H : H + 2 * K;
    for (int h = (int)blockIdx.x * warps + warp_id(); h < n; h += (int)gridDim.x * warps) {
        int part = h < H ? ATTN_Q : h < H + K ? ATTN_K : ATTN_V;
        int i = part == ATTN_Q ? h : part == ATTN_K ? h - H : h - H - K;
        int dim = part == ATTN_V ? p.v_dim : p.kv.head_dim;
        if (RARE && p.norm_late) {
            attn_head_prepare<true>(p, t, part, i, rms[part], head);
            attn_head_norm_late(p, part, head);
        } else {
            attn_head_prepare(p, t, part, i, rms[part], head);
        }
        if (packed) {
            uint16_t *to = packed + (size_t)t * (size_t)p.heads.row_width +
                           (size_t)(attn_part_layout_of(p, part).at + i * dim);
            for (int e = lane; e < dim; e += 32)
                to[e] = float_to_half(clamp_half(head[e] * HIDDEN_SCALE));
            __syncwarp();
            continue;
        }
        int type = part == ATTN_V ? kv_values(p.kv.type) : kv_keys(p.kv.type);
        if (QUANT && kv_is_rotated(type))
            kv_head_rotate(head, dim);
        if (part == ATTN_Q) {
            float temperature = attn_temperature(p, t);
            if (RARE)
                temperature = attn_temperature_rare(p, t);
            float *to = q + ((size_t)t * (size_t)H + (size_t)i) * (size_t)dim;
            for (int e = lane; e < dim; e += 32)
                to[e] = head[e] * temperature;
        } else if (QUANT && slot >= 0) {
            kv_head_put(type, head, dim,
                        kv_place_of(part == ATTN_K ? p.kv.k : p.kv.v, type, slot, p.kv.page_len, K,
                                    i, dim));
        } else if (slot >= 0) {
            size_t at = kv_index(slot, p.kv.page_len, K, i, dim);
            for (int e = lane; e < dim; e += 32)
                kv_put(part == ATTN_K ? p.kv.k : p.kv.v, p.kv.type, at + (size_t)e, head[e]);
        }
        __syncwarp();
    }
}

/* The fallback kernel: one warp per (row, head), rows [first, n_tokens). QUANT: p.kv.type holds
 * two types. */
template <bool QUANT>
static __global__ void __launch_bounds__(128)
    attn_any_kernel(const __grid_constant__ struct attn_args p, int first)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int Dk = p.kv.head_dim, Dv = p.v_dim, H = p.n_heads, lane = lane_id(), w = warp_id();
    int h = (int)blockIdx.x * 4 + w, t = first + (int)blockIdx.y;
    if (h >= H)
        return;
    float *q = (float *)shared + w * (Dk + Dv + 32 + p.rel_dim), *acc = q + Dk, *prob = acc + Dv;
    float *rel = prob + 32;
    size_t row = (size_t)t * (size_t)H + (size_t)h;
    int seq = p.step.seq_of[t], last = p.step.pos[t], kv_head = h * p.kv.n_kv / H;
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    auto key_at = [&](int key, int dim) {
        int slot = pages[key / p.kv.page_len] * p.kv.page_len + key % p.kv.page_len;
        return kv_index(slot, p.kv.page_len, p.kv.n_kv, kv_head, dim);
    };
    auto place = [&](const uint8_t *pool, int type, int key, int dim) {
        int slot = pages[key / p.kv.page_len] * p.kv.page_len + key % p.kv.page_len;
        return kv_place_of(pool, type, slot, p.kv.page_len, p.kv.n_kv, kv_head, dim);
    };
    for (int i = lane; i < Dk; i += 32)
        q[i] = p.q[row * (size_t)Dk + (size_t)i] * p.scale;
    for (int i = lane; i < Dv; i += 32)
        acc[i] = 0.0f;
    for (int i = lane; i < p.rel_dim; i += 32)
        rel[i] = attn_temperature_rare(p, t) * p.rel_query[row * (size_t)p.rel_dim + (size_t)i];
    __syncwarp();
    float top = p.sinks ? p.sinks[h] : -INFINITY, total = p.sinks ? 1.0f : 0.0f;
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    from = p.chunked ? last - last % p.window : from;
    if (p.bidirectional) {
        int end = p.step.kv_len[seq] - 1;
        last = p.window ? min(last + p.window - 1, end) : end;
    }
    if (p.spans && p.spans[2 * t] < p.spans[2 * t + 1]) {
        int begin = p.spans[2 * t], end = p.spans[2 * t + 1] - 1;
        from = p.span_only ? begin : min(from, begin);
        last = p.span_only ? end : max(last, end);
    }
    if (p.step.slot[t] < 0)
        from = last + 1;
    for (int base = from; base <= last; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key <= last) {
            s = 0.0f;
            if (QUANT) {
                struct kv_place k = place(p.kv.k, kv_keys(p.kv.type), key, Dk);
                for (int i = 0; i < Dk; i++)
                    s += q[i] * kv_head_get(kv_keys(p.kv.type), k, i);
            } else {
                size_t k = key_at(key, Dk);
                for (int i = 0; i < Dk; i++)
                    s += q[i] * kv_get(p.kv.k, p.kv.type, k + (size_t)i);
            }
            if (p.softcap != 0.0f)
                s = score_capped(s, p.softcap);
            if (p.rel_dim)
                s += attn_relative(p, rel, p.step.pos[t] - key);
        }
        float m = fmaxf(top, warp_max(s)), shrink = expf(top - m);
        prob[lane] = expf(s - m);
        total = total * shrink + warp_sum(prob[lane]);
        top = m;
        __syncwarp();
        int n = min(32, last - base + 1);
        for (int i = lane; i < Dv; i += 32) {
            float v = acc[i] * shrink;
            for (int j = 0; j < n; j++)
                if (QUANT) {
                    int type = kv_values(p.kv.type);
                    v += prob[j] * kv_head_get(type, place(p.kv.v, type, base + j, Dv), i);
                } else {
                    v += prob[j] * kv_get(p.kv.v, p.kv.type, key_at(base + j, Dv) + (size_t)i);
                }
            acc[i] = v;
        }
        __syncwarp();
    }
    if (QUANT && kv_is_rotated(kv_values(p.kv.type)))
        kv_head_rotate(acc, Dv);
    const float *gate = attn_gate(p, t, h);
    for (int i = lane; i < Dv; i += 32) {
        float v = total > 0.0f ? acc[i] / total : 0.0f;
        p.a[row * (size_t)Dv + (size_t)i] = gate ? v * sigmoid(gate[i]) : v;
    }
}

/* Host */

static struct attn_args attn_args_of(struct cuda_backend *cu, const struct attn_layer *l,
                                     const struct step *s)
{
    const struct model_shape *sh = &cu->shape;
    struct attn_args p = {};
    p.kv.k = (const uint8_t *)l->k;
    p.kv.v = (const uint8_t *)l->v;
    p.kv.n_kv = l->n_kv;
    p.kv.page_len = sh->page_len;
    p.kv.head_dim = l->k_dim;
    p.kv.type = sh->kv_type ? (int)sh->kv_type : (int)sh->k_type | (int)sh->v_type << 8;
    while (2 << p.kv.page_shift <= sh->page_len)
        p.kv.page_shift++;
    p.step = *s;
    p.step.rope = l->rope;
    p.q_norm = l->norm[ATTN_Q].gain;
    p.k_norm = l->norm[ATTN_K].gain;
    p.n_heads = l->n_heads;
    p.n_rot = l->n_rot;
    p.window = l->window;
    p.bidirectional = l->bidirectional;
    p.spans = l->spans;
    p.span_only = l->span_only;
    p.eps = l->norm[l->norm[ATTN_Q].on ? ATTN_Q : ATTN_K].eps;
    p.scale = l->scale;
    p.split_acc = cu->split.acc;
    p.split_ml = cu->split.ml;
    p.split_count = cu->split.count;
    p.v_dim = l->v_dim;
    p.sinks = l->sinks;
    p.softcap = l->softcap;
    if (l->gated) {
        p.gate = cu->act.qkv + l->k_dim;
        p.gate_row = l->wqkv->n_out;
        p.gate_head = l->k_dim + l->v_dim;
    }
    p.heads.row_width = l->wqkv->n_out;
    p.heads.q_stride = l->k_dim + (l->gated ? l->v_dim : 0);
    for (int i = 0; i < ATTN_PARTS; i++)
        p.heads.norm[i] = l->norm[i];
    p.heads.whole = l->norm_whole;
    p.heads.k_is_v = l->k_is_v;
    p.heads.shares_kv = l->shares_kv;
    p.heads.temp_beta = l->temp_beta;
    p.heads.temp_len = l->temp_len;
    p.temp_offset = l->temp_offset;
    p.temp_smooth = l->temp_smooth;
    p.rel_query = l->rel_query;
    p.rel = l->rel;
    p.rel_dim = l->rel_query ? l->rel_dim : 0;
    p.rel_len = l->rel_len;
    p.norm_late = l->norm_late;
    p.chunked = l->chunked;
    p.exact = cu->exact;
    return p;
}

void attn_any(struct cuda_backend *cu, const struct attn_args &p, int first, int rows)
{
    size_t shared = (size_t)(4 * (p.kv.head_dim + p.v_dim + 32 + p.rel_dim)) * 4;
    auto kernel = cu->shape.kv_type ? attn_any_kernel<false> : attn_any_kernel<true>;
    cuda_launch(cu, kernel, dim3((unsigned)ceil_div(p.n_heads, 4), (unsigned)rows), 128, shared,
                LAUNCH_EARLY, p, first);
}

/* page_len is a power of two and a multiple of 16, the keys of a tile. */
static bool pages_suit(const struct cuda_backend *cu)
{
    int len = cu->shape.page_len;
    return len >= 16 && (len & (len - 1)) == 0;
}

/* Tensor cores can read the cache without conversion. */
static bool cache_suits(const struct cuda_backend *cu)
{
    enum dtype type = cu->shape.kv_type;
    return (type == DT_F16 || type == DT_BF16) && pages_suit(cu);
}

static bool dims_suit(const struct attn_layer *l)
{
    int D = l->k_dim;
    return (D == 64 || D == 96 || D == 128 || D == 256 || D == 512) && l->v_dim == D &&
           l->n_heads % l->n_kv == 0;
}

/* The kernels convert values of this type to fp16 for the tensor cores. */
static bool read_as_fp16(enum dtype t)
{
    return t == DT_F16 || t == DT_Q8_0 || t == DT_Q4_0 || t == DT_F8_E4M3;
}

bool attn_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    const struct model_shape *s = &cu->shape;
    return !s->kv_type && read_as_fp16(s->k_type) && read_as_fp16(s->v_type) && pages_suit(cu) &&
           dims_suit(l);
}

bool attn_mma_suits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return cache_suits(cu) && (l->k_dim == 64 || l->k_dim == 128) && l->v_dim == l->k_dim &&
           l->n_heads % l->n_kv == 0 && (!l->sinks || l->k_dim == 64) && l->softcap == 0 &&
           !l->gated;
}

bool attn_wide_suits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return cache_suits(cu) && dims_suit(l);
}

bool attn_heads_plain(const struct attn_layer *l)
{
    const struct attn_norm *q = &l->norm[ATTN_Q], *k = &l->norm[ATTN_K];
    return !l->gated && !l->k_is_v && !l->shares_kv && !l->norm_whole && l->temp_beta == 0 &&
           !l->norm_late && !l->norm[ATTN_V].on && (!q->on || q->gain) && (!k->on || k->gain) &&
           (!q->on || !k->on || q->eps == k->eps);
}

/* Only attn_heads makes such queries and keys. */
static bool heads_are_rare(const struct attn_layer *l)
{
    return l->norm_late || (l->temp_beta != 0 && (l->temp_offset || l->temp_smooth));
}

bool attn_takes_raw(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return (attn_mma_suits(cu, l) && attn_heads_plain(l)) ||
           ((attn_decode_wide_fits(cu, l) || attn_decode_quant_fits(cu, l)) && !l->norm_whole &&
            !heads_are_rare(l));
}

static void heads_launch(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                         const float *qkv, float *q, uint16_t *packed)
{
    struct attn_args p = attn_args_of(cu, l, s);
    p.q = qkv;
    int heads = l->shares_kv ? l->n_heads : l->n_heads + 2 * l->n_kv;
    int warps = l->norm_whole ? 16 : 4, widest = l->k_dim > l->v_dim ? l->k_dim : l->v_dim;
    dim3 grid((unsigned)(l->norm_whole ? 1 : ceil_div(heads, warps)), (unsigned)s->n_tokens);
    auto kernel =
        heads_are_rare(l)
            ? (cu->shape.kv_type ? attn_heads_kernel<false, true> : attn_heads_kernel<true, true>)
            : (cu->shape.kv_type ? attn_heads_kernel<false, false>
                                 : attn_heads_kernel<true, false>);
    cuda_launch(cu, kernel, grid, warps * 32, (size_t)(16 + warps * widest) * 4, LAUNCH_EARLY, p, q,
                packed);
}

void attn_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                const float *qkv, float *q)
{
    heads_launch(cu, l, s, qkv, q, NULL);
}

void attn_heads_packed(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                       const float *qkv, uint16_t *to)
{
    heads_launch(cu, l, s, qkv, NULL, to);
}

struct rows attn_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                        bool raw)
{
    struct attn_args p = attn_args_of(cu, l, s);
    struct rows a = rows_of(cu->act.attn, s->n_tokens, p.n_heads * p.v_dim);
    p.raw = raw;
    p.q = raw ? cu->act.qkv : cu->act.q;
    p.a = a.floats;
    struct pick_case c = {};
    c.attn.raw = raw;
    c.attn.layer = l;
    c.step = s;
    c.attn.args = &p;
    c.attn.out = &a;
    if (l->choice) {
        index_attend(cu, p, *l->choice);
        return a;
    }
    if (l->spans || l->chunked || l->any) {
        attn_any(cu, p, 0, s->n_tokens);
        return a;
    }
    if ((c.rows = s->n_tokens - s->n_decode))
        pick_run(cu, PICK_PROMPT, &c, N_STAGES);
    if ((c.rows = s->n_decode))
        pick_run(cu, PICK_DECODE, &c, N_STAGES);
    if (a.fp16 && s->n_decode)
        rows_join_fp16(cu, &a, s->n_decode);
    return a;
}

struct rows attn_bidirectional(struct cuda_backend *cu, const struct attn_layer *l,
                               const struct step *s)
{
    struct attn_args p = attn_args_of(cu, l, s);
    struct rows a = rows_of(cu->act.attn, s->n_tokens, p.n_heads * p.v_dim);
    attn_heads(cu, l, s, cu->act.qkv, cu->act.q);
    p.q = cu->act.q;
    p.a = a.floats;
    attn_any(cu, p, 0, s->n_tokens);
    return a;
}
