/*
 * Decode attention for every option a layer may have (sinks, softcap, window, output gate) and
 * heads of 64 to 512, over an fp16 or bf16 cache. A block has (sequence, up to 8 heads of one kv
 * head, a split of the keys) and processes 64 keys a round, 8 per warp.
 *
 * A warp computes the scores of the 8 keys it copied itself, so keys need no barrier. The scores go
 * to shared memory. After the round's one barrier every warp reads all of them, computes the same
 * probabilities, and accumulates its own eighth of the values' columns. A warp therefore needs few
 * accumulators whatever the head size, and warps never combine results. As in attn_decode.cu, the
 * 16 rows of A are the 8 heads twice: values rounded to the cache's type and the rounding residues.
 *
 * With a window, the keys start at the window, so the cost is the window's. Splits store their
 * partial results in cu->split.acc; a second kernel combines them.
 */
#include "backend/cuda/attn/attn_decode.cuh"

enum {
    WIDE_WARPS = 8,
    WIDE_THREADS = WIDE_WARPS * 32,
    WIDE_OWN = 8, /* keys per warp: contiguous in one page */
    WIDE_KEYS = WIDE_WARPS * WIDE_OWN,
    WIDE_S_ROW = WIDE_KEYS + 4,
    WIDE_COMBINE_THREADS = 128 /* threads of the combine kernel, one element each */
};

/* Shared memory. Rows are padded by 16 bytes, so that eight consecutive rows are free of bank
 * conflicts. Keys have one buffer, which their warp refills as soon as it has read it. Values
 * have two. */
template <int D> struct attn_decode_wide_shared {
    enum { ROW = 2 * D + 16, Q_ROW = D + 8 };
    uint8_t k[WIDE_KEYS * ROW];
    uint8_t v[2][WIDE_KEYS * ROW];
    uint16_t q[16 * Q_ROW];     /* (16, Q_ROW) */
    uint16_t fresh[2][D];       /* this step's key and value, made from raw projections */
    float s[2][8 * WIDE_S_ROW]; /* (8, S_ROW) scores, double-buffered */
};

/* The split of the keys a block has, one of `used`: keys base .. end - 1. */
struct attn_decode_wide_range {
    int split, used, base, end;
};

DEVICE struct attn_decode_wide_range
attn_decode_wide_range_of(const struct attn_args &p, const struct decode_unit &u, int split)
{
    struct attn_decode_wide_range s;
    int start = u.from & ~(WIDE_OWN - 1), n_keys = u.last + 1 - start;
    int chunk = (n_keys + p.n_split - 1) / p.n_split;
    chunk = (chunk + WIDE_KEYS - 1) & ~(WIDE_KEYS - 1);
    s.split = split;
    s.used = (n_keys + chunk - 1) / chunk;
    s.base = start + split * chunk;
    s.end = min(s.base + chunk, u.last + 1);
    return s;
}

/* A warp issues the copies of its 8 keys, or values, of the round that starts at `base`. Rows
 * past the last key become zeros, because values must not be NaN. */
template <int D>
DEVICE void attn_decode_wide_fetch(const struct attn_args &p, const struct decode_unit &u, int base,
                                   const uint8_t *pool, uint8_t *to)
{
    enum { PIECES = D / 8, ROW = attn_decode_wide_shared<D>::ROW };
    int key = base + warp_id() * WIDE_OWN, real = u.last + 1 - key;
    int32_t page = u.pages[min(key, u.last) >> p.kv.page_shift];
    size_t row = (((size_t)page * (size_t)p.kv.n_kv + (size_t)u.kv_head) << p.kv.page_shift) +
                 (size_t)(key & (p.kv.page_len - 1));
    const uint8_t *from = pool + row * (2 * D);
    to += warp_id() * WIDE_OWN * ROW;
#pragma unroll
    for (int i = lane_id(); i < WIDE_OWN * PIECES; i += 32) {
        int r = i / PIECES, piece = i - r * PIECES;
        copy_async16_or_zero(to + r * ROW + piece * 16, from + i * 16, r < real);
    }
}

/* A query as values rounded to the cache's type and their residues, in units of log2 unless the
 * layer has a softcap. */
template <int D, bool BF16>
DEVICE void attn_decode_wide_query(const struct attn_args &p, const float *from, float by,
                                   uint16_t *to)
{
    enum { Q_ROW = attn_decode_wide_shared<D>::Q_ROW };
    by *= p.softcap != 0.0f ? p.scale : 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 2 * lane_id(); i < D; i += 64) {
        float2 e = *(const float2 *)(from + i);
        split_pair<BF16>(e.x * by, e.y * by, (uint32_t *)(to + i),
                         (uint32_t *)(to + 8 * Q_ROW + i));
    }
}

/* What a warp makes from raw projections: one query head of the unit and, in the block whose
 * split contains this step's key, possibly that key or its value. */
template <int D> struct attn_decode_wide_jobs {
    enum { PER = D / 32, ROPES = (D + 63) / 64, NONE = -1 };
    int part[2];
    float gain[2][PER], x[2][PER];
    float2 cos_sin[ROPES];
};

/* Loads gains and cos/sin, which do not depend on the projections. */
template <int D>
DEVICE void attn_decode_wide_begin(const struct attn_args &p, const struct decode_unit &u,
                                   bool owns_fresh, struct attn_decode_wide_jobs<D> &k)
{
    typedef attn_decode_wide_jobs<D> jobs;
    int lane = lane_id(), half = p.n_rot >> 1;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int at = warp_id() + j * WIDE_WARPS - u.heads;
        k.part[j] = at < 0                 ? (int)ATTN_Q
                    : owns_fresh && at < 2 ? (int)ATTN_K + at
                                           : (int)jobs::NONE;
        const float *gain = k.part[j] < 0 ? NULL : p.heads.norm[k.part[j]].gain;
#pragma unroll
        for (int i = 0; i < jobs::PER; i++)
            k.gain[j][i] = gain ? gain[lane + 32 * i] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < jobs::ROPES; i++)
        if (lane + 32 * i < half)
            k.cos_sin[i] = p.step.rope[(size_t)u.t * (size_t)half + (size_t)(lane + 32 * i)];
}

/* Norm and RoPE of job j, to `head` in shared memory. */
template <int D>
DEVICE void attn_decode_wide_norm_rope(const struct attn_args &p,
                                       const struct attn_decode_wide_jobs<D> &k, int j, float *head)
{
    typedef attn_decode_wide_jobs<D> jobs;
    int lane = lane_id(), half = p.n_rot >> 1;
    float sum = 0.0f, by = 1.0f;
#pragma unroll
    for (int i = 0; i < jobs::PER; i++)
        sum += k.x[j][i] * k.x[j][i];
    if (p.heads.norm[k.part[j]].on)
        by = rsqrtf(warp_sum(sum) / (float)D + p.heads.norm[k.part[j]].eps);
#pragma unroll
    for (int i = 0; i < jobs::PER; i++)
        head[lane + 32 * i] = k.x[j][i] * by * k.gain[j][i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < jobs::ROPES; i++) {
        int at = lane + 32 * i;
        if (at < half && k.part[j] != ATTN_V) {
            float a = head[at], b = head[at + half];
            head[at] = a * k.cos_sin[i].x - b * k.cos_sin[i].y;
            head[at + half] = b * k.cos_sin[i].x + a * k.cos_sin[i].y;
        }
    }
    __syncwarp();
}

/* Stores the unit's queries, one warp per head, and makes this step's key and value from raw
 * projections. The second values buffer serves as scratch until the first round. Query rows past
 * the unit's heads stay uninitialised. */
template <int D, bool BF16>
DEVICE void attn_decode_wide_heads(const struct attn_args &p, const struct decode_unit &u,
                                   struct attn_decode_wide_jobs<D> &k,
                                   struct attn_decode_wide_shared<D> &sh)
{
    enum { Q_ROW = attn_decode_wide_shared<D>::Q_ROW };
    int lane = lane_id(), w = warp_id();
    if (!p.raw) {
        if (w < u.heads)
            attn_decode_wide_query<D, BF16>(
                p, p.q + ((size_t)u.t * (size_t)p.n_heads + (size_t)(u.h0 + w)) * D, 1.0f,
                sh.q + w * Q_ROW);
        return;
    }
    const float *row = p.q + (size_t)u.t * (size_t)p.heads.row_width;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        struct attn_part_layout r = attn_part_layout_of(p, k.part[j]);
        const float *from = row + r.at + (k.part[j] == ATTN_Q ? u.h0 + w : u.kv_head) * r.stride;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            k.x[j][i] = k.part[j] < 0 ? 0.0f : from[lane + 32 * i];
    }
    float *head = (float *)sh.v[1] + w * D;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (k.part[j] < 0)
            break;
        attn_decode_wide_norm_rope<D>(p, k, j, head);
        if (k.part[j] == ATTN_Q)
            attn_decode_wide_query<D, BF16>(p, head, attn_temperature(p, u.t), sh.q + w * Q_ROW);
        else
            fresh_put<D, BF16>(p, u.slot, p.kv.n_kv, u.kv_head, k.part[j] - ATTN_K, head,
                               sh.fresh[0], u.h0, p.n_heads / p.kv.n_kv);
        __syncwarp();
    }
}

/* The warp that copied the last key, or value, overwrites it with this step's. */
template <int D>
DEVICE void attn_decode_wide_patch(const struct decode_unit &u, int base, const uint16_t *fresh,
                                   uint8_t *rows)
{
    int at = u.last - base;
    if (at / WIDE_OWN != warp_id()) /* belongs to another warp or another round */
        return;
    __syncwarp(); /* all lanes' copies have arrived */
#pragma unroll
    for (int i = lane_id(); i < D / 8; i += 32)
        *(uint4 *)(rows + at * attn_decode_wide_shared<D>::ROW + i * 16) =
            ((const uint4 *)fresh)[i];
    __syncwarp();
}

/* One warp: scores of its own 8 keys in units of log2, to (8, S_ROW). */
template <int D, bool BF16>
DEVICE void attn_decode_wide_scores(const struct attn_args &p, const struct decode_unit &u,
                                    const uint32_t (&qf)[D / 16][4], const uint8_t *keys, int base,
                                    float *to)
{
    enum { ROW = attn_decode_wide_shared<D>::ROW };
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    const uint8_t *row = keys + (w * WIDE_OWN + (lane & 7)) * ROW + (lane >> 3) * 16;
    float sa[4] = {}, sb[4] = {};
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t b[4]; /* elements 0-7, 8-15, 16-23, 24-31 of the eight keys */
        ldmatrix4(b, row + j * 64);
        mma_kv<BF16>(sa, qf[2 * j], b[0], b[1]);
        mma_kv<BF16>(sb, qf[2 * j + 1], b[2], b[3]);
    }
    int key = base + w * WIDE_OWN + 2 * c;
    float s[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[i] = (sa[i] + sa[2 + i]) + (sb[i] + sb[2 + i]);
        if (p.softcap != 0.0f)
            s[i] = 1.4426950408889634f * score_capped(s[i], p.softcap);
        if (key + i < u.from || key + i > u.last)
            s[i] = -INFINITY;
    }
    *(float2 *)(to + g * WIDE_S_ROW + w * WIDE_OWN + 2 * c) = make_float2(s[0], s[1]);
}

/* The probabilities of a round as A fragments. Every warp computes all of them. */
template <bool BF16>
DEVICE float attn_decode_wide_softmax(const float *scores, float &top, float &total,
                                      uint32_t (&pf)[WIDE_KEYS / 16][4])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    float2 s[WIDE_KEYS / 8];
    float m = top;
#pragma unroll
    for (int i = 0; i < WIDE_KEYS / 8; i++) {
        s[i] = *(const float2 *)(scores + g * WIDE_S_ROW + 8 * i + 2 * c);
        m = fmaxf(m, fmaxf(s[i].x, s[i].y));
    }
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
    float anchor = m == -INFINITY ? 0.0f : m; /* nothing visible yet */
    float shrink = fast_exp2(top - anchor);
    top = m;
    total *= shrink;
#pragma unroll
    for (int i = 0; i < WIDE_KEYS / 8; i++) {
        float x = fast_exp2(s[i].x - anchor), y = fast_exp2(s[i].y - anchor);
        total += x + y;
        split_pair<BF16>(x, y, &pf[i >> 1][(i & 1) * 2], &pf[i >> 1][(i & 1) * 2 + 1]);
    }
    return shrink;
}

/* Grid: (splits, kv heads x groups of 8 heads, sequences). Unless p.q holds raw projections,
 * this step's key and value are already in the cache. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(WIDE_THREADS, D > 256  ? 1
                                                       : D > 96 ? 2
                                                                : 3)
    attn_decode_wide_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_wide_shared<D> place;
    enum { TILES = D / 8, OWN_TILES = (TILES + WIDE_WARPS - 1) / WIDE_WARPS };
    SHARED_BYTES(shared);
    place &sh = *(place *)shared;
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_decode_wide_range s = attn_decode_wide_range_of(p, u, (int)blockIdx.x);
    float *to = decode_result<D>(p, u);
    dependency_trigger();
    if (u.slot < 0 || s.split >= s.used) { /* a padding row, or fewer splits than blocks */
        dependency_wait();
        for (int i = (int)threadIdx.x; u.slot < 0 && s.split == 0 && i < u.heads * D;
             i += WIDE_THREADS)
            to[i] = 0.0f;
        return;
    }
    /* The first round may be loaded before dependency_wait if its keys are all from earlier
     * steps, or if this block overwrites this step's key later. */
    bool owns_fresh = p.raw && !p.heads.shares_kv && s.split == s.used - 1;
    bool early = s.base + WIDE_KEYS <= u.last || owns_fresh;
    if (!early)
        dependency_wait();
    attn_decode_wide_fetch<D>(p, u, s.base, p.kv.k, sh.k);
    copy_async_commit();
    attn_decode_wide_fetch<D>(p, u, s.base, p.kv.v, sh.v[0]);
    copy_async_commit();
    struct attn_decode_wide_jobs<D> jobs;
    if (p.raw)
        attn_decode_wide_begin<D>(p, u, owns_fresh, jobs);
    if (early)
        dependency_wait();
    attn_decode_wide_heads<D, BF16>(p, u, jobs, sh);
    __syncthreads();
    uint32_t qf[D / 16][4];
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        ldmatrix4(qf[i], sh.q + (lane & 15) * place::Q_ROW + i * 16 + (lane >> 4) * 8);

    float out[OWN_TILES][4] = {}, top = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int base = s.base, round = 0; base < s.end; base += WIDE_KEYS, round ^= 1) {
        bool more = base + WIDE_KEYS < s.end;
        copy_async_wait<1>(); /* keys have arrived; values are still in flight */
        __syncwarp();
        if (owns_fresh)
            attn_decode_wide_patch<D>(u, base, sh.fresh[0], sh.k);
        attn_decode_wide_scores<D, BF16>(p, u, qf, sh.k, base, sh.s[round]);
        __syncwarp();
        if (more)
            attn_decode_wide_fetch<D>(p, u, base + WIDE_KEYS, p.kv.k, sh.k);
        copy_async_commit();
        copy_async_wait<1>(); /* values have arrived */
        if (owns_fresh)
            attn_decode_wide_patch<D>(u, base, sh.fresh[1], sh.v[round]);
        __syncthreads();
        if (more)
            attn_decode_wide_fetch<D>(p, u, base + WIDE_KEYS, p.kv.v, sh.v[round ^ 1]);
        copy_async_commit();
        uint32_t pf[WIDE_KEYS / 16][4];
        float shrink = attn_decode_wide_softmax<BF16>(sh.s[round], top, total, pf);
#pragma unroll
        for (int t = 0; t < OWN_TILES; t++) {
            int tile = w + t * WIDE_WARPS;
            if (tile >= TILES)
                break;
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[t][i] *= shrink;
#pragma unroll
            for (int j = 0; j < WIDE_KEYS / 32; j++) {
                uint32_t b[4]; /* keys 0-7, 8-15, 16-23, 24-31 */
                ldmatrix4_trans(b, sh.v[round] + (j * 32 + lane) * place::ROW + tile * 16);
                mma_kv<BF16>(out[t], pf[2 * j], b[0], b[1]);
                mma_kv<BF16>(out[t], pf[2 * j + 1], b[2], b[3]);
            }
        }
    }
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    if (g >= u.heads)
        return;
    int h = u.h0 + g;
    if (s.used > 1) {
        size_t part =
            (((size_t)u.t * gridDim.y + blockIdx.y) * (size_t)p.n_split + (size_t)s.split) * 8 +
            (size_t)g;
#pragma unroll
        for (int t = 0; t < OWN_TILES; t++) {
            int tile = w + t * WIDE_WARPS;
            if (tile < TILES)
                *(float2 *)(p.split_acc + part * D + tile * 8 + 2 * c) =
                    make_float2(out[t][0] + out[t][2], out[t][1] + out[t][3]);
        }
        if (w == 0 && c == 0)
            *(float2 *)(p.split_ml + part * 2) = make_float2(top, total);
        return;
    }
    const float *gate = attn_gate(p, u.t, h);
    float by = 1.0f / (total + attn_sink(p, h, top));
#pragma unroll
    for (int t = 0; t < OWN_TILES; t++) {
        int at = (w + t * WIDE_WARPS) * 8 + 2 * c;
        if (at >= D)
            break;
        float x = (out[t][0] + out[t][2]) * by, y = (out[t][1] + out[t][3]) * by;
        if (gate)
            x *= sigmoid(gate[at]), y *= sigmoid(gate[at + 1]);
        *(float2 *)(to + g * D + at) = make_float2(x, y);
    }
}

/* Combines the splits of a head, if there are several. One thread per element. Grid: (parts of
 * D, heads, sequences). */
template <int D>
static __global__ void __launch_bounds__(WIDE_COMBINE_THREADS)
    attn_decode_wide_combine_kernel(const __grid_constant__ struct attn_args p)
{
    int h = (int)blockIdx.y, t = (int)blockIdx.z,
        at = (int)(blockIdx.x * WIDE_COMBINE_THREADS + threadIdx.x);
    int G = p.n_heads / p.kv.n_kv, groups = (G + 7) >> 3, in_kv = h % G;
    int unit = h / G * groups + (in_kv >> 3);
    struct decode_unit u = decode_unit_of(p, unit, t);
    struct attn_decode_wide_range s = attn_decode_wide_range_of(p, u, 0);
    dependency_trigger();
    dependency_wait();
    if (u.slot < 0 || s.used == 1 || at >= D)
        return;
    size_t first =
        ((size_t)t * (size_t)(p.kv.n_kv * groups) + (size_t)unit) * (size_t)p.n_split * 8 +
        (size_t)(in_kv & 7);
    const float *acc = p.split_acc + first * D + at, *ml = p.split_ml + first * 2;
    float m = -INFINITY, l = 0.0f, v = 0.0f;
#pragma unroll 1
    for (int i = 0; i < s.used; i += 8) { /* eight loads at once, to pay the latency once */
        float2 of[8];
        float e[8], most = m;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int part = min(i + j, s.used - 1);
            of[j] = *(const float2 *)(ml + part * 16);
            e[j] = acc[(size_t)part * 8 * D];
            if (i + j >= s.used)
                of[j] = make_float2(-INFINITY, 0.0f);
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            most = fmaxf(most, of[j].x);
        float shrink = fast_exp2(m - most);
        m = most;
        l *= shrink;
        v *= shrink;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float f = fast_exp2(of[j].x - m);
            l += f * of[j].y;
            v += f * e[j];
        }
    }
    const float *gate = attn_gate(p, t, h);
    v /= l + attn_sink(p, h, m);
    p.a[((size_t)t * (size_t)p.n_heads + (size_t)h) * D + (size_t)at] =
        gate ? v * sigmoid(gate[at]) : v;
}

/* Host */

template <int D, bool BF16>
static void attn_decode_wide_launch(struct cuda_backend *cu, struct attn_args p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    p.n_split = attn_splits(cu, p.step.n_decode, p.n_heads, p.kv.n_kv);
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    cuda_launch(cu, attn_decode_wide_kernel<D, BF16>, grid, WIDE_THREADS,
                sizeof(struct attn_decode_wide_shared<D>), LAUNCH_EARLY, p);
    if (p.n_split > 1)
        cuda_launch(cu, attn_decode_wide_combine_kernel<D>,
                    dim3((unsigned)ceil_div(D, WIDE_COMBINE_THREADS), (unsigned)p.n_heads,
                         (unsigned)p.step.n_decode),
                    WIDE_COMBINE_THREADS, 0, LAUNCH_EARLY, p);
}

template <int D>
static void attn_decode_wide_type(struct cuda_backend *cu, const struct attn_args &p)
{
    if (p.kv.type == DT_F16)
        attn_decode_wide_launch<D, false>(cu, p);
    else
        attn_decode_wide_launch<D, true>(cu, p);
}

template <int D> static size_t attn_decode_wide_bytes(void)
{
    return sizeof(struct attn_decode_wide_shared<D>);
}

bool attn_decode_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    int D = l->k_dim;
    size_t bytes = D <= 96    ? attn_decode_wide_bytes<96>()
                   : D <= 128 ? attn_decode_wide_bytes<128>()
                   : D <= 256 ? attn_decode_wide_bytes<256>()
                              : attn_decode_wide_bytes<512>();
    return attn_wide_suits(cu, l) && bytes <= cu->shared_limit;
}

void attn_decode_wide(struct cuda_backend *cu, const struct attn_args &p)
{
    switch (p.kv.head_dim) {
    case 64:
        attn_decode_wide_type<64>(cu, p);
        break;
    case 96:
        attn_decode_wide_type<96>(cu, p);
        break;
    case 128:
        attn_decode_wide_type<128>(cu, p);
        break;
    case 256:
        attn_decode_wide_type<256>(cu, p);
        break;
    default:
        attn_decode_wide_type<512>(cu, p);
        break;
    }
}
