/*
 * The router: logits = n Wr^T, with n = norm(x + d). Always in (nearly) full float precision,
 * because a choice between two close experts depends on them.
 * - router_row, router_block: few rows, optionally with the norm fused in. A block computes two
 *   experts, or eight.
 * - router_records: like router_block; it also writes the normed rows as records.
 * - router_rows: many rows on the tensor cores in split tf32. Each operand is split into two of 11
 *   bits, and three of the four products are computed, which leaves about 22 bits. k is split into
 *   k tiles; their sums are added in order where the logits are read.
 * - router_choose: logits of a batch the same way, and the choice (H200, 64 rows: 10.3 us).
 * - router_select: choices that need all logits of a row.
 * Limit: latency for few rows (H200: norm and logits 3 us), bytes for many.
 */
#include "backend/cuda/core/rows.cuh"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/stream.h"

#include <math.h>

/* Router logits (rows, n_expert) in floats. A warp computes an expert, whose weights are in
 * registers before the wait. Every block computes n = norm(x + d) itself; block 0 also stores
 * it. */
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

/* An expert's weights, held by a warp: the first KEPT k tiles in registers. */
template <int KEPT> struct router_expert {
    enum { TILE_FLOATS = F32_BYTES / 4 };
    const float *row;
    float w[KEPT][8];
};
template <int KEPT>
DEVICE void router_expert_load(struct router_expert<KEPT> &r, const struct matrix &w, int e)
{
    r.row = (const float *)(w.seg[0].base + (size_t)(e / TILE_ROWS) * (size_t)w.n_kt * F32_BYTES) +
            (e % TILE_ROWS) * TILE_K + lane_id() * 8;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (e < w.n_out && i < w.n_kt)
            load8f(r.row + i * r.TILE_FLOATS, r.w[i]);
}
/* A lane's part of the dot product with n, in shared memory. */
template <int KEPT>
DEVICE float router_expert_dot(const struct router_expert<KEPT> &r, const float *n, int n_kt)
{
    float dot = 0.0f;
    n += lane_id() * 8;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (i < n_kt) {
            float v[8];
            load8f(n + i * TILE_K, v);
#pragma unroll
            for (int j = 0; j < 8; j++)
                dot += r.w[i][j] * v[j];
        }
#pragma unroll 1
    for (int i = KEPT; i < n_kt; i++) {
        float a[8], v[8];
        load8f(r.row + i * r.TILE_FLOATS, a);
        load8f(n + i * TILE_K, v);
#pragma unroll
        for (int j = 0; j < 8; j++)
            dot += a[j] * v[j];
    }
    return dot;
}

/* Calls f(kind_is<k tiles that a warp keeps>()) for a router with n_kt of them. */
template <class F> static void router_kept(int n_kt, F f)
{
    if (n_kt <= 8)
        f(kind_is<8>());
    else if (n_kt <= 12)
        f(kind_is<12>());
    else
        f(kind_is<16>());
}

/* Grid: (groups of 8 experts, groups of rows); 8 warps. */
template <int KEPT>
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
    struct router_expert<KEPT> w;
    router_expert_load(w, p.w, e);
    dependency_trigger();
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    int t0 = (int)blockIdx.y * p.rows_per_block, t1 = min(t0 + p.rows_per_block, p.rows);
#pragma unroll 1
    for (int t = t0; t < t1; t++) {
        float squares = 0.0f;
        size_t base = (size_t)t * (size_t)n_embd;
        __syncthreads(); /* the previous row's n has been read */
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
        float dot = mine ? router_expert_dot(w, n, n_kt) : 0.0f;
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

/* For few rows, with lower latency: a block computes two experts with four warps each. The warps
 * load the row straight into registers (KEPT times 512 columns; more in further rounds) and meet
 * once. Gains multiply the weights before the wait. Grid: x over pairs of experts, y over rows. */
template <int KEPT>
static __global__ void __launch_bounds__(256)
    router_row_kernel(const __grid_constant__ struct router_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    float *part = (float *)shared; /* (8 warps, 2): dot, squares */
    enum { STEP = 512 };
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
    /* No branches, so that all loads are issued at once. */
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

void router_row(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *n,
                int rows)
{
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    struct router_args p = {*w, *in, n, cu->routing.logits, rows, 1, 1.0f / (float)w->n_in};
    cuda_launch(cu, w->n_in <= 2048 ? router_row_kernel<4> : router_row_kernel<6>,
                dim3((unsigned)ceil_div(w->n_out, 2), (unsigned)rows), 256, 64, LAUNCH_EARLY, p);
}

void router_block(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows)
{
    int per = ceil_div(rows, 16); /* one block per row as long as there are few */
    per = per < 4 ? per : 4;
    struct router_args p = {*w, *in, n, cu->routing.logits, rows, per, 1.0f / (float)w->n_in};
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    auto kernel = router_kernel<8>;
    router_kept(w->n_kt, [&](auto kept) { kernel = router_kernel<kept.VALUE>; });
    cuda_launch(cu, kernel, dim3((unsigned)ceil_div(w->n_out, 8), (unsigned)ceil_div(rows, per)),
                256, (size_t)w->n_kt * TILE_K * 4 + 64, LAUNCH_EARLY, p);
}

/* Router logits in floats, of norm(x + d) where there is a norm. Grid: (groups of eight experts,
 * rows). A warp computes an expert, whose weights are in registers before the wait. Every block
 * computes the norm of its row itself, and stores its part of x + d and of the norm's record. */
struct router_records_args {
    struct matrix w;
    struct norm_in in;
    float *logits;   /* (rows, n_expert) */
    uint8_t *record; /* (rows, n_kt) */
    float *x_scale;  /* (rows) inverse of a record's scale */
};

/* Eight columns of x + d (sum), and the same times the gain (v). */
DEVICE void router_columns(const struct norm_in &in, size_t at, int k, float (&v)[8],
                           float (&sum)[8])
{
    load8f(in.x + at + (size_t)k, sum);
    if (in.gain && in.d) {
        load8f(in.d + at + (size_t)k, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += v[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = 1.0f;
    if (in.gain)
        load8f(in.gain + k, v);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] *= sum[i];
}

template <int KEPT>
static __global__ void __launch_bounds__(256)
    router_records_kernel(const __grid_constant__ struct router_records_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared, *n = part + 16; /* (2, 8) of the warps; (n_kt * 256) */
    int warp = warp_id(), lane = lane_id(), row = (int)blockIdx.y, e = (int)blockIdx.x * 8 + warp;
    int n_embd = p.w.n_in, n_kt = p.w.n_kt, tid = (int)threadIdx.x;
    bool mine = e < p.w.n_out;
    struct router_expert<KEPT> w;
    router_expert_load(w, p.w, e);
    dependency_trigger();
    dependency_wait();
    size_t at = (size_t)row * (size_t)n_embd;
    float squares = 0.0f, top = 0.0f, dot = 0.0f;
#pragma unroll 1
    for (int k = tid * 8; k < n_kt * TILE_K; k += 2048) {
        float v[8] = {}, sum[8] = {};
        if (k < n_embd)
            router_columns(p.in, at, k, v, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            squares += sum[i] * sum[i];
            top = fmaxf(top, fabsf(v[i]));
        }
        store8f(n + k, v);
        /* Of all blocks of a row, this one stores the sixteen columns of every gridDim.x-th pair of
         * threads. */
        if (p.in.x_out && k < n_embd && (k >> 4) % (int)gridDim.x == (int)blockIdx.x)
            store8f(p.in.x_out + at + (size_t)k, sum);
    }
    squares = warp_sum(squares);
    top = warp_max(top);
    if (lane == 0) {
        part[warp] = squares;
        part[8 + warp] = top;
    }
    __syncthreads();
    if (mine)
        dot = router_expert_dot(w, n, n_kt);
    dot = warp_sum(dot);
    squares = warp_sum(lane < 8 ? part[lane] : 0.0f);
    float rms = p.in.gain ? rsqrtf(squares / (float)n_embd + p.in.eps) : 1.0f;
    if (mine && lane == 0)
        p.logits[row * p.w.n_out + e] = dot * rms + (p.w.bias ? p.w.bias[e] : 0.0f);
    /* The record: four lanes convert sixteen columns and their sum. */
    top = warp_max(lane < 8 ? part[8 + lane] : 0.0f);
    uint32_t ex = bits_of(top * rms) >> 23;
    ex = ex < 16 ? 16 : ex;
    float f = float_of((264 - ex) << 23) * rms;
    int groups = n_kt * (TILE_K / 16), blocks = (int)gridDim.x, b = (int)blockIdx.x;
#pragma unroll 1
    for (int i = warp * 8; b + i * blocks < groups; i += 64) {
        int group = b + (i + (lane >> 2)) * blocks, k = group * 16 + (lane & 3) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (group < groups)
            v = *(const float4 *)(n + k);
        uint32_t h0 = pack_half2(v.x * f, v.y * f), h1 = pack_half2(v.z * f, v.w * f);
        float sum = half_to_float(h0 & 0xffff) + half_to_float(h0 >> 16) +
                    half_to_float(h1 & 0xffff) + half_to_float(h1 >> 16);
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (group >= groups)
            continue;
        uint8_t *to = p.record + (size_t)(row * n_kt + k / TILE_K) * (size_t)RECORD;
        *(uint2 *)(to + record_at(k)) = make_uint2(h0, h1);
        if (!(lane & 3)) {
            uint32_t s = split_half(sum);
            *(uint16_t *)(to + record_sum_at(k)) = (uint16_t)s;
            *(uint16_t *)(to + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
        }
    }
    if (blockIdx.x == 0 && tid == 0)
        p.x_scale[row] = float_of((ex - 10) << 23);
}

size_t router_records_shared(const struct matrix *w)
{
    return (size_t)(16 + w->n_kt * TILE_K) * 4;
}

void router_records(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                    int rows)
{
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    struct router_records_args p = {*w, *in, cu->routing.logits, cu->forms.records,
                                    cu->forms.scale};
    auto kernel = router_records_kernel<8>;
    router_kept(w->n_kt, [&](auto kept) { kernel = router_records_kernel<kept.VALUE>; });
    cuda_launch(cu, kernel, dim3((unsigned)ceil_div(w->n_out, 8), (unsigned)rows), 256,
                router_records_shared(w), LAUNCH_EARLY, p);
}

/*
 * Choices by groups of experts, or by probabilities plus a bias. One warp per row. Logits become
 * weights as route_rule.given describes.
 */
struct router_select_args {
    float *logits; /* (parts, rows, n_expert) */
    int parts, rows;
    struct route_rule rule;
    float *own;       /* OWN: (rows, n_own) output of the weights */
    int n_own, first; /* experts first .. first + n_own - 1 */
    float jitter;     /* MIXER */
    /* BY_TOKEN: (n_vocab, used); the step's tokens, and which of them each row is, or NULL */
    const float *by_token;
    const int32_t *tokens, *row_of;
    int n_vocab;
    float *same; /* (rows) weight of experts from same_from on, which return their input; or NULL */
    int same_from;
    const int32_t
        *slot_of; /* OWN: of experts, in place of `first`, as the next three; or NULL: offload.h */
    int32_t *chosen;
    float *weights;
    struct offload_sync *sync;
    int first_host;
    uint32_t *counts;          /* (n_expert) uses, or NULL */
    struct stream_uses copied; /* of the first n_copied ranks, which the host does not compute */
    int n_copied;
};
enum { SELECT_PER = MAX_EXPERTS / 32, SELECT_ROWS = 4 };

/* The value of expert e, which lane e % 32 holds as number e / 32; e may differ between lanes. */
DEVICE float select_value(const float (&v)[SELECT_PER], int e)
{
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < SELECT_PER; i++) {
        float u = __shfl_sync(FULL_WARP, v[i], e & 31);
        mine = e >> 5 == i ? u : mine;
    }
    return mine;
}

/* Sets the keys of experts outside the best groups to -infinity. A group is ranked by its two
 * largest keys. */
DEVICE void select_groups(const struct route_rule &rule, float (&keys)[SELECT_PER])
{
    int n = route_choices(rule), each = n / rule.n_groups, lane = lane_id();
    float score = 0.0f;
#pragma unroll 1
    for (int g = 0; g < rule.n_groups; g++) {
        struct route_keys<SELECT_PER> r;
#pragma unroll
        for (int i = 0; i < SELECT_PER; i++) {
            int e = i * 32 + lane;
            bool here = e >= g * each && e < (g + 1) * each;
            route_set(r, i, e, keys[i], here ? n : 0);
        }
        float sum = select_value(keys, min(route_next(r), n - 1));
        if (each > 1)
            sum += select_value(keys, min(route_next(r), n - 1));
        score = g == lane ? sum : score;
    }
    struct route_keys<1> groups;
    route_set(groups, 0, lane, score, rule.n_groups);
    uint32_t kept = 0;
#pragma unroll 1
    for (int k = 0; k < rule.n_groups_used; k++)
        kept |= 1u << min(route_next(groups), rule.n_groups - 1);
#pragma unroll
    for (int i = 0; i < SELECT_PER; i++)
        keys[i] = kept >> min((i * 32 + lane) / each, 31) & 1 ? keys[i] : -INFINITY;
}

/* SparseMixer: lane k gets the k-th expert by its logit v, and its weight among those near it that were not chosen
 * before. */
DEVICE int select_mixer(const struct route_rule &rule, float (&v)[SELECT_PER], float jitter,
                        float *weight)
{
    int lane = lane_id(), chosen = 0;
#pragma unroll 1
    for (int k = 0; k < route_chosen(rule); k++) {
        float best = -INFINITY, total = 0.0f;
        int e = MAX_EXPERTS;
#pragma unroll
        for (int i = 0; i < SELECT_PER; i++)
            best = fmaxf(best, v[i]);
        best = warp_max(best);
#pragma unroll
        for (int i = SELECT_PER - 1; i >= 0; i--)
            e = v[i] == best ? i * 32 + lane : e;
        e = MAX_EXPERTS - (int)warp_max_u32((uint32_t)(MAX_EXPERTS - e));
        e = min(e, route_choices(rule) - 1);
#pragma unroll
        for (int i = 0; i < SELECT_PER; i++)
            if (v[i] != -INFINITY && best - v[i] <= 2.0f * jitter * fmaxf(fabsf(v[i]), best))
                total += fast_exp(v[i] - best);
        total = warp_sum(total);
        if (lane == k) {
            chosen = e;
            *weight = 1.0f / total;
        }
#pragma unroll
        for (int i = 0; i < SELECT_PER; i++)
            v[i] = i == e >> 5 && lane == (e & 31) ? -INFINITY : v[i];
    }
    return chosen;
}

/* Lane k's expert of row t, by its token. A row that is no token counts as token 0. */
DEVICE int select_by_token(const struct router_select_args &p, int t, int used)
{
    int token = p.tokens[p.row_of ? p.row_of[t] : t];
    token = token < 0 || token >= p.n_vocab ? 0 : token;
    return lane_id() < used ? (int)p.by_token[(size_t)token * (size_t)used + (size_t)lane_id()] : 0;
}

DEVICE float select_softplus(float x)
{
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

/* The slot of lane k's expert. Those without one are written for the host, or for the groups that are copied. */
DEVICE int select_slot(const struct router_select_args &p, int t, int used, int expert, float w)
{
    bool on = lane_id() < used;
    int slot = on ? p.slot_of[expert] : 0, rank = -1 - slot;
    bool copied = slot < 0 && rank < p.n_copied;
    uint32_t missed = __ballot_sync(FULL_WARP, on && slot < 0 && !copied);
    if (on) {
        p.chosen[t * used + lane_id()] = slot < 0 && !copied ? expert - p.first_host : -1;
        p.weights[t * used + lane_id()] = w;
    }
    if (on && p.n_copied) {
        p.copied.rank[t * used + lane_id()] = copied ? rank : -1;
        p.copied.weight[t * used + lane_id()] = w;
    }
    if (on && p.counts)
        atomicAdd(&p.counts[expert], 1u);
    if (lane_id() == 0) {
        if (missed)
            atomicAdd(&p.sync->missed, (uint32_t)__popc(missed));
        atomic_add_relaxed(&p.sync->on_device, (uint64_t)(used - __popc(missed)));
    }
    return slot;
}

/* OWN: other processes, or the host, hold the other experts (route_rule.spread). MIXER: SparseMixer. */
template <bool OWN, bool MIXER>
static __global__ void __launch_bounds__(32 * SELECT_ROWS)
    router_select_kernel(const __grid_constant__ struct router_select_args p)
{
    int t = (int)blockIdx.x * SELECT_ROWS + warp_id(), lane = lane_id(), n = p.rule.n_expert;
    int choices = route_choices(p.rule);
    float *row = p.logits + (size_t)t * (size_t)n;
    float v[SELECT_PER], keys[SELECT_PER], top = -INFINITY, total = 0.0f, common = 0.0f;
    dependency_wait();
    dependency_trigger();
    if (t >= p.rows)
        return;
#pragma unroll
    for (int i = 0; i < SELECT_PER; i++) {
        int e = i * 32 + lane;
        v[i] = e < n ? row[e] : -INFINITY;
        for (int j = 1; j < p.parts && e < n; j++)
            v[i] += row[(size_t)j * (size_t)p.rows * (size_t)n + (size_t)e];
        if (p.rule.shared && e == n - 1) { /* always used */
            common = v[i];
            v[i] = -INFINITY;
        }
        top = fmaxf(top, v[i]);
    }
    top = warp_max(top);
    common = __shfl_sync(FULL_WARP, common, (n - 1) & 31);
#pragma unroll
    for (int i = 0; i < SELECT_PER && !MIXER; i++) {
        v[i] = p.rule.sigmoid    ? route_sigmoid(v[i])
               : p.rule.softplus ? select_softplus(v[i])
                                 : fast_exp(v[i] - top);
        total += v[i];
    }
    total = p.rule.sigmoid || p.rule.softplus ? 1.0f : warp_sum(total);
#pragma unroll
    for (int i = 0; i < SELECT_PER && !MIXER; i++) {
        int e = i * 32 + lane;
        v[i] /= total;
        keys[i] = v[i] + (p.rule.choice_bias && e < choices ? p.rule.choice_bias[e] : 0.0f);
    }
    if (!MIXER && p.rule.n_groups > 1)
        select_groups(p.rule, keys);
    struct route_rule plain = {};
    plain.n_expert = choices;
    plain.used = route_chosen(p.rule);
    float w = 0.0f;
    int mine = MIXER        ? select_mixer(p.rule, v, p.jitter, &w)
               : p.by_token ? select_by_token(p, t, plain.used)
                            : route_choose(keys, plain);
    bool on = lane < plain.used;
    if (!MIXER)
        w = select_value(v, mine);
    total = p.rule.renormalise ? warp_sum(on ? w : 0.0f) : 1.0f;
    w = w / total * p.rule.scale * (on && p.rule.expert_scale ? p.rule.expert_scale[mine] : 1.0f);
    if (OWN && p.same) {
        float sum = warp_sum(on && mine >= p.same_from ? w : 0.0f);
        if (lane == 0)
            p.same[t] = sum;
    }
    if (OWN) {
        row = p.own + (size_t)t * (size_t)p.n_own;
        n = p.n_own;
        mine = p.slot_of ? select_slot(p, t, plain.used, mine, w) : mine - p.first;
        on = on && mine >= 0 && mine < n - (p.rule.shared ? 1 : 0);
    }
#pragma unroll
    for (int i = 0; i < SELECT_PER; i++)
        if (i * 32 + lane < n)
            row[i * 32 + lane] = -INFINITY;
    __syncwarp();
    if (on)
        row[mine] = w;
    if (p.rule.shared && lane == 0)
        row[n - 1] = p.rule.gated ? route_sigmoid(common) : 1.0f;
}

void router_select(struct cuda_backend *cu, const struct experts *e, int parts, int rows)
{
    if (!e->give)
        return;
    const struct route_rule &rule = e->full;
    CHECK(rule.n_groups <= MAX_GROUPS, "%d groups of experts", rule.n_groups);
    struct router_select_args p = {cu->routing.logits, parts,    rows,     rule, cu->routing.own,
                                   e->rule.n_expert,   e->first, e->jitter};
    bool own = e->rule.spread;
    if (e->by_token) {
        struct step s = cuda_step(cu);
        p.by_token = e->by_token;
        p.tokens = s.tokens;
        p.row_of = cu->resid.narrow && !cu->step.layout.out_is_all ? s.out_rows : NULL;
        p.n_vocab = cu->shape.n_vocab;
    }
    if (e->same_from) {
        p.same = cu->routing.same;
        p.same_from = e->same_from;
    }
    if (e->offload) {
        p.slot_of = e->offload->slot_of;
        p.chosen = e->offload->chosen;
        p.weights = e->offload->weights;
        p.sync = e->offload->sync;
        p.first_host = e->offload->first_host;
        p.counts = e->offload->counts;
        p.copied = stream_uses(offload_stream(cu));
        p.n_copied = stream_count(offload_stream(cu), e->offload->index);
    }
    cuda_launch(cu,
                e->mixer
                    ? (own ? router_select_kernel<true, true> : router_select_kernel<false, true>)
                : own ? router_select_kernel<true, false>
                      : router_select_kernel<false, false>,
                dim3((unsigned)ceil_div(rows, SELECT_ROWS)), 32 * SELECT_ROWS, 0, LAUNCH_EARLY, p);
    offload_send(cu, e, rows);
}

/* Grid: (blocks of 256 columns, rows). y += same * x */
static __global__ void __launch_bounds__(256)
    router_same_kernel(const float *x, const float *same, float *y, int width)
{
    dependency_wait();
    dependency_trigger();
    int e = (int)(blockIdx.x * 256 + threadIdx.x);
    size_t at = (size_t)blockIdx.y * (size_t)width + (size_t)e;
    float by = same[blockIdx.y];
    if (e < width && by != 0.0f)
        y[at] += by * x[at];
}

void router_add_same(struct cuda_backend *cu, const float *x, float *y, int rows, int width)
{
    cuda_launch(cu, router_same_kernel, dim3((unsigned)ceil_div(width, 256), (unsigned)rows), 256,
                0, LAUNCH_EARLY, x, (const float *)cu->routing.same, y, width);
}

enum { ROUTER_ROWS = 64, ROUTER_EXPERTS = 128, ROUTER_STRIDE = TILE_K + 16 };

struct router_rows_args {
    struct matrix w;
    const float *x; /* (rows, n_embd) */
    float *logits;  /* (k tiles, rows, n_expert) */
    int rows;
};

/* hi = v's upper 11 bits, lo = the rest, whose lower bits the tensor cores ignore. */
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
        bool there = kt * TILE_K + k < n_embd; /* rows are multiples of 32 bytes */
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
        for (int half = 0; half < 2; half++) { /* consecutive products use different accumulators */
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
    struct router_rows_args p = {*w, x, cu->routing.logits, rows};
    dim3 grid((unsigned)ceil_div(rows, ROUTER_ROWS), (unsigned)w->n_kt,
              (unsigned)ceil_div(w->n_out, ROUTER_EXPERTS));
    cuda_launch(cu, router_rows_kernel, grid, 256, (size_t)(ROUTER_ROWS * ROUTER_STRIDE * 4),
                LAUNCH_EARLY, p);
}

/*
 * A batch's logits and choice in one kernel. The blocks of a cluster share sixteen rows, one k
 * split each, and add up through each other's shared memory. Then every block chooses the experts
 * of its rows.
 */
enum { CHOOSE_ROWS = 16, CHOOSE_SPLITS = 8, CHOOSE_STRIDE = TILE_K + 16, CHOOSE_EXPERTS = 512 };

struct router_choose_args {
    struct matrix w;
    const float *x; /* (rows, n_embd) */
    int32_t *chosen;
    float *weight; /* (rows * used) */
    int rows, pieces;
    struct route_rule rule;
};

template <int PER, class RULE>
DEVICE void router_choose_row(const struct router_choose_args &p, const RULE &rule, float *logits,
                              int row)
{
    int lane = lane_id();
    float v[PER], part[CHOOSE_SPLITS][PER];
#pragma unroll
    for (int j = 0; j < CHOOSE_SPLITS; j++) { /* issue all loads at once */
        const float *from = cluster_at(logits, j < p.pieces ? j : 0);
#pragma unroll
        for (int i = 0; i < PER; i++)
            part[j][i] = j < p.pieces && i * 32 + lane < rule.n_expert ? from[i * 32 + lane] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int expert = i * 32 + lane;
        v[i] = -INFINITY;
        if (expert < rule.n_expert)
            v[i] = p.w.bias ? p.w.bias[expert] : 0.0f;
#pragma unroll
        for (int j = 0; j < CHOOSE_SPLITS; j++)
            v[i] += part[j][i];
    }
    int e = route_choose(v, rule);
    float w = route_weigh(rule, e, v);
    if (lane < rule.used) {
        p.chosen[row * rule.used + lane] = e;
        p.weight[row * rule.used + lane] = w;
    }
}

/* Grid: (tiles of CHOOSE_ROWS rows, times k splits). PLAIN: a plain_rule. */
template <bool PLAIN>
static __global__ void __launch_bounds__(256)
    router_choose_kernel(const __grid_constant__ struct router_choose_args p)
{
    SHARED_BYTES(shared);
    enum { STEPS = TILE_K / 16, NT = CHOOSE_ROWS / 8 };
    float *xs = (float *)shared, *logits = xs + CHOOSE_ROWS * CHOOSE_STRIDE; /* (rows, n_expert) */
    int lane = lane_id(), g = lane >> 2, c = lane & 3, n_embd = p.w.n_in, tid = (int)threadIdx.x;
    int tile = (int)blockIdx.x / p.pieces, piece = (int)blockIdx.x - tile * p.pieces;
    int t0 = tile * CHOOSE_ROWS, n_expert = p.rule.n_expert, warp = warp_id();
    /* This warp's 16 experts of a group of 128, one k tile, loaded a round ahead. */
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
    float acc[NT][3][4] = {}; /* three independent chains */
#pragma unroll 1
    for (;;) {
        __syncthreads(); /* the previous columns are no longer read */
#pragma unroll
        for (int i = tid; i < CHOOSE_ROWS * (TILE_K / 4); i += 256) {
            int row = i / (TILE_K / 4), k = i % (TILE_K / 4) * 4, t = min(t0 + row, p.rows - 1);
            bool there = kt * TILE_K + k < n_embd; /* rows are multiples of 32 bytes */
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
        const auto &rule = rule_as<PLAIN>(p.rule);
        if (PLAIN || n_expert <= 128)
            router_choose_row<4>(p, rule, logits + row * n_expert, t0 + row);
        else
            router_choose_row<CHOOSE_EXPERTS / 32>(p, rule, logits + row * n_expert, t0 + row);
    }
    cluster_arrive(); /* no block exits while its sums are being read */
    cluster_wait();
}

static int router_pieces(const struct cuda_backend *cu, const struct matrix *w)
{
    return !cu->can.cluster_attention ? 1 : w->n_kt < CHOOSE_SPLITS ? w->n_kt : CHOOSE_SPLITS;
}

bool router_choose_fits(const struct cuda_backend *cu, const struct matrix *w)
{
    return w->n_out <= CHOOSE_EXPERTS && w->n_kt <= 2 * router_pieces(cu, w);
}

void router_choose(struct cuda_backend *cu, const struct matrix *w, const struct route_rule &rule,
                   const struct route_tables *route, const float *x, int rows)
{
    CHECK(w->n_seg == 1 && w->seg[0].kind == TILE_F32, "a router that is not in floats");
    struct router_choose_args p = {};
    p.pieces = router_pieces(cu, w);
    p.w = *w;
    p.x = x;
    p.chosen = route->chosen;
    p.weight = cu->routing.weight;
    p.rows = rows;
    p.rule = rule;
    cuda_launch(cu, route_is_plain(rule) ? router_choose_kernel<true> : router_choose_kernel<false>,
                dim3((unsigned)(ceil_div(rows, CHOOSE_ROWS) * p.pieces)), 256,
                (size_t)(CHOOSE_ROWS * (CHOOSE_STRIDE + w->n_out)) * 4,
                LAUNCH_EARLY + p.pieces * LAUNCH_CLUSTER, p);
}
