/*
 * Attention: rotation and storage of new keys, then softmax(q K^T) V over the paged cache.
 * Three kernels, best first:
 *   decode   one row per sequence, halves or bf16 in the cache, head_dim 64 or 128. A block takes
 *            (sequence, up to 8 heads of one kv head, a stretch of keys); a warp takes 16 keys at a
 *            time straight from global memory into tensor-core fragments. The 16 rows of the A
 *            fragment are the 8 heads twice: what rounds to half, and what that rounding lost, so
 *            queries and probabilities keep about 22 bits at no cost. The last block of a kv head to
 *            finish joins the stretches.
 *            Many sequences, and few with long contexts, have kernels of their own: many.cu, wave.cu.
 *   prefill  64 rows of one head per block, keys and values through shared memory, 64 at a time.
 *   any      everything else (float caches, odd head sizes): a warp per (row, head), plain floats.
 * Keys of earlier steps do not depend on the kernel in front, so decode has its first keys in
 * flight before it waits.
 */
#include "backend/cuda/attention.cuh"

#include <math.h>

/* One warp: norm (gain may be NULL) and rotation of a head of D floats, in place in shared memory.
 */
DEVICE void prepare_head(float *head, int D, const float *gain, float eps, const float2 *rope,
                         int n_rot)
{
    int lane = lane_id(), half = n_rot >> 1;
    __syncwarp();
    if (gain) {
        float sum = 0.0f;
        for (int i = lane; i < D; i += 32)
            sum += head[i] * head[i];
        float rms = rsqrtf(warp_sum(sum) / (float)D + eps);
        for (int i = lane; i < D; i += 32)
            head[i] = head[i] * rms * gain[i];
        __syncwarp();
    }
    for (int i = lane; i < half; i += 32) {
        float2 cs = rope[i];
        float a = head[i], b = head[i + half];
        head[i] = a * cs.x - b * cs.y;
        head[i + half] = b * cs.x + a * cs.y;
    }
    __syncwarp();
}

DEVICE size_t kv_index(const struct kv_view &kv, int slot, int head)
{
    int page = slot / kv.page_len, off = slot - page * kv.page_len;
    return (((size_t)page * (size_t)kv.n_kv + (size_t)head) * (size_t)kv.page_len + (size_t)off) *
           (size_t)kv.head_dim;
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

/* q, k, v of every row from their raw projections. Blocks: x over heads, 4 a block; y over rows. */
static __global__ void __launch_bounds__(128)
    rotate_store_kernel(const __grid_constant__ struct attn_args p, const float *raw, float *q)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int D = p.kv.head_dim, H = p.n_heads, K = p.kv.n_kv, t = (int)blockIdx.y;
    int h = (int)blockIdx.x * 4 + warp_id();
    if (h >= H + 2 * K)
        return;
    float *head = (float *)shared + warp_id() * D;
    const float *from = raw + ((size_t)t * (size_t)(H + 2 * K) + (size_t)h) * (size_t)D;
    for (int i = lane_id(); i < D; i += 32)
        head[i] = from[i];
    if (h < H + K)
        prepare_head(head, D, h < H ? p.q_norm : p.k_norm, p.eps,
                     p.step.rope + (size_t)t * (size_t)(p.n_rot >> 1), p.n_rot);
    else
        __syncwarp();
    int slot = p.step.slot[t];
    if (h < H) {
        for (int i = lane_id(); i < D; i += 32)
            q[((size_t)t * (size_t)H + (size_t)h) * (size_t)D + (size_t)i] = head[i];
    } else if (slot >= 0) {
        bool is_k = h < H + K;
        size_t at = kv_index(p.kv, slot, h - H - (is_k ? 0 : K));
        for (int i = lane_id(); i < D; i += 32)
            kv_put(is_k ? p.kv.k : p.kv.v, p.kv.type, at + (size_t)i, head[i]);
    }
}

/* The plain kernel: a warp per (row, head) for rows [first, n_tokens). */
static __global__ void __launch_bounds__(128)
    attend_any_kernel(const __grid_constant__ struct attn_args p, int first)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int D = p.kv.head_dim, H = p.n_heads, lane = lane_id(), w = warp_id();
    int h = (int)blockIdx.x * 4 + w, t = first + (int)blockIdx.y;
    if (h >= H)
        return;
    float *q = (float *)shared + w * (2 * D + 32), *acc = q + D, *prob = acc + D;
    size_t at = ((size_t)t * (size_t)H + (size_t)h) * (size_t)D;
    int seq = p.step.seq_of[t], last = p.step.pos[t], kv_head = h * p.kv.n_kv / H;
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    for (int i = lane; i < D; i += 32) {
        q[i] = p.q[at + (size_t)i] * p.scale;
        acc[i] = 0.0f;
    }
    __syncwarp();
    float top = -INFINITY, total = 0.0f;
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    if (p.step.slot[t] < 0)
        from = last + 1;
    for (int base = from; base <= last; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key <= last) {
            size_t k = kv_index(
                p.kv, pages[key / p.kv.page_len] * p.kv.page_len + key % p.kv.page_len, kv_head);
            s = 0.0f;
            for (int i = 0; i < D; i++)
                s += q[i] * kv_get(p.kv.k, p.kv.type, k + (size_t)i);
        }
        float m = fmaxf(top, warp_max(s)), shrink = expf(top - m);
        prob[lane] = expf(s - m);
        total = total * shrink + warp_sum(prob[lane]);
        top = m;
        __syncwarp();
        int n = min(32, last - base + 1);
        for (int i = lane; i < D; i += 32) {
            float v = acc[i] * shrink;
            for (int j = 0; j < n; j++) {
                int key2 = base + j;
                size_t k = kv_index(
                    p.kv, pages[key2 / p.kv.page_len] * p.kv.page_len + key2 % p.kv.page_len,
                    kv_head);
                v += prob[j] * kv_get(p.kv.v, p.kv.type, k + (size_t)i);
            }
            acc[i] = v;
        }
        __syncwarp();
    }
    for (int i = lane; i < D; i += 32)
        p.a[at + (size_t)i] = total > 0.0f ? acc[i] / total : 0.0f;
}

/* Decode */

enum {
    DECODE_WARPS =
        4, /* small blocks: resident, with their first keys, beside the kernel in front */
    DECODE_THREADS = DECODE_WARPS * 32,
    DECODE_KEYS = 16,
    DECODE_AHEAD = 8, /* rounds whose keys are asked for in advance */
    DECODE_PARTS = 64 /* most stretches */
};

DEVICE size_t key_offset(const struct kv_view &kv, const int32_t *pages, int key, int kv_head,
                         int D)
{
    int page = pages[key >> kv.page_shift], off = key & (kv.page_len - 1);
    return ((((size_t)page * (size_t)kv.n_kv + (size_t)kv_head) << kv.page_shift) + (size_t)off) *
           (size_t)D;
}

/*
 * Grid: (splits, kv heads x groups of 8 heads, sequences); 4 warps. Fragments of 16 keys:
 *   K as B of q K^T: column g is a key; its 16-byte piece 4j+c belongs to lane c, and feeds column
 *   groups 2j and 2j+1 of k.
 *   V as B of P V: columns 2c 2c+1 (+8) of k are keys; tile j's column g is element g*D/8 + j.
 */
template <int D, bool BF16, bool RAW, int PER_SM>
static __global__ void __launch_bounds__(DECODE_THREADS, PER_SM)
    decode_kernel(const __grid_constant__ struct attn_args p)
{
    enum { PIECES = D / 32, VP = D / 64, TILES = D / 8, STEP = DECODE_WARPS * DECODE_KEYS };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    enum { ROW = D + 8, Q_ROW = D + 4 };       /* padded against bank conflicts */
    float *head = (float *)shared;             /* (10, D): queries, then this step's k and v */
    float *part = head + 10 * D;               /* (warps, 8, ROW) in the order of the tiles */
    float *ml = part + DECODE_WARPS * 8 * ROW; /* (parts, 8, 2): maximum, sum */
    uint16_t *fresh = (uint16_t *)(ml + DECODE_PARTS * 16);   /* (2, D) as the cache has it */
    uint16_t *q_hi = fresh + 2 * D, *q_lo = q_hi + 8 * Q_ROW; /* (8, Q_ROW) */
    float *inbox = (float *)(q_lo + 8 * Q_ROW); /* (blocks of the cluster, heads of mine, D) */
    float *inbox_ml = inbox + 8 * D;            /* (the same, 2) */
    int *is_last = (int *)(inbox_ml + 16);

    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, tid = (int)threadIdx.x;
    int H = p.n_heads, K = p.kv.n_kv, G = H / K, t = (int)blockIdx.z; /* decodes: row = sequence */
    int kv_head = (int)blockIdx.y, h0 = kv_head * G, heads = G;
    if (G > 8) {
        int groups = (G + 7) >> 3, group = (int)blockIdx.y % groups;
        kv_head = (int)blockIdx.y / groups;
        h0 = kv_head * G + group * 8;
        heads = min(8, G - group * 8);
    }
    int slot = p.step.slot[t], last = p.step.pos[t], split = (int)blockIdx.x;
    const int32_t *pages = p.step.pages + (size_t)t * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    int start = from & ~(DECODE_KEYS - 1), n_keys = last + 1 - start;
    int chunk = n_keys, used = 1; /* short contexts are one stretch: joining costs more */
    if (n_keys > STEP && p.n_split > 1) {
        chunk = (n_keys + p.n_split - 1) / p.n_split;
        chunk = (chunk + STEP - 1) & ~(STEP - 1);
        used = (n_keys + chunk - 1) / chunk;
    }
    int rank = cluster_rank(), lead = split - rank; /* the cluster's first stretch */
    bool idle = split >= used;
    if (slot < 0 || lead >= used) { /* a padding row, or fewer stretches than blocks */
        dependency_trigger();
        if (slot >= 0) /* nothing to do: make room at once, others will wait */
            return;
        dependency_wait();
        if (split == 0)
            for (int i = tid; i < heads * D; i += DECODE_THREADS)
                p.a[((size_t)t * (size_t)H + (size_t)h0) * D + (size_t)i] = 0.0f;
        return;
    }
    cluster_arrive(); /* met again before the first write to another block */
    int base = start + split * chunk, end = idle ? base : min(base + chunk, last + 1);
    bool owns_fresh = RAW && split == used - 1;
    base += w * DECODE_KEYS;

    uint4 kf[2][PIECES], vf[4][VP]; /* vf: keys 2c, 2c+1, 2c+8, 2c+9 */
    /* The pages of this warp's rounds, 32 rounds at a time and the next 32: lane i has round i's,
     * so that no round waits for the table. 16 keys from a multiple of 16 on lie in one page;
     * past the last key they are not used, but the page table ends there. */
    int round0 = base, window = 0;
    auto load_pages = [&](int from_round) {
        return pages[min(round0 + (from_round + lane) * STEP, last) >> p.kv.page_shift];
    };
    int32_t pages_now = load_pages(0), pages_next = load_pages(32);
    auto first_key =
        [&](int round) { /* in the cache, counted in rows */
                         int32_t page = __shfl_sync(
                             FULL_WARP, round - window < 32 ? pages_now : pages_next, round & 31);
                         return (((size_t)page * (size_t)K + (size_t)kv_head) << p.kv.page_shift) +
                                (size_t)((round0 + round * STEP) & (p.kv.page_len - 1));
        };
    auto load_keys = [&](int round) {
        size_t first = first_key(round);
        const uint4 *kr = (const uint4 *)(p.kv.k + 2 * D * first) + g * (D / 8) + c;
        const uint4 *vr = (const uint4 *)(p.kv.v + 2 * D * first) + 2 * c * (D / 8) + VP * g;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < PIECES; j++)
                kf[i][j] = load_l2(kr + i * D + 4 * j);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < VP; j++)
                vf[i][j] = load_l2(vr + ((i & 1) + 8 * (i >> 1)) * (D / 8) + j);
    };
    /* The keys and values of a round are 16 rows in a row: a line of 128 bytes for each lane. */
    auto ask = [&](int round) {
        size_t line = 2 * D * first_key(round) + (size_t)lane * 128;
        if (lane * 128 < DECODE_KEYS * 2 * D) {
            prefetch_l2(p.kv.k + line);
            prefetch_l2(p.kv.v + line);
        }
    };
    dependency_trigger();
#pragma unroll 1
    for (int i = 1; i <= DECODE_AHEAD; i++)
        if (base + i * STEP < end)
            ask(i);
    if (!RAW)
        dependency_wait();
    if (base < end)
        load_keys(0);
    /* A warp prepares two heads; the first two, this step's key and value besides. */
    enum { PER = D / 32, JOBS = 8 / DECODE_WARPS + 1 };
    const float *gain[2] = {RAW ? p.q_norm : NULL, RAW ? p.k_norm : NULL};
    int half = RAW ? p.n_rot >> 1 : 0;
    float gains[2][PER];
    float2 turns[D / 64];
    head_load<D>(p, t, gain, half, gains, turns);
    mark(mk, 2);
    if (RAW)
        (dependency_wait)();
    mark(mk, 3);

    const float *row = p.q + (size_t)t * (size_t)(RAW ? H + 2 * K : H) * D;
    int jobs = owns_fresh && w < 2 ? JOBS : JOBS - 1;
    float x[JOBS][PER];
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        int from_head =
            j < JOBS - 1 ? h0 + min(w + j * DECODE_WARPS, heads - 1) : H + w * K + kv_head;
#pragma unroll
        for (int i = 0; i < PER; i++)
            x[j][i] = j < jobs ? row[from_head * D + lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        bool fresh_one = j == JOBS - 1;
        if (j == 0)
            mark(mk, 4);
        if (j >= jobs)
            break;
        float *mine = head + (w + j * DECODE_WARPS) * D;
        bool is_value = fresh_one && w == 1;
        head_turn<D>(x[j], gain[fresh_one] && !is_value, p.eps, gains[fresh_one], !is_value, turns,
                     half, mine);
        if (!fresh_one) { /* as halves, and what those lost */
            const float to_log2 = 1.4426950408889634f * p.scale;
            int h = (w + j * DECODE_WARPS) * Q_ROW;
#pragma unroll
            for (int i = 0; i < D / 64; i++) {
                int at = 2 * lane + 64 * i;
                float2 e = *(const float2 *)(mine + at);
                split_pair<BF16>(e.x * to_log2, e.y * to_log2, (uint32_t *)(q_hi + h + at),
                                 (uint32_t *)(q_lo + h + at));
            }
        } else {
            fresh_put<D, BF16>(p, slot, K, kv_head, w, mine, fresh, h0, G);
        }
    }
    __syncthreads();
    mark(mk, 5);

    /* a0 a2: halves of q; a1 a3: what they lost. From shared memory each time: registers are short.
     */
    auto query = [&](int i, uint32_t(&a)[4]) {
        int at = g * Q_ROW + ((i >> 1) * 4 + c) * 8 + (i & 1) * 4;
        uint2 hi = load_shared8(q_hi + at), lo = load_shared8(q_lo + at);
        a[0] = hi.x, a[2] = hi.y;
        a[1] = lo.x, a[3] = lo.y;
    };
    float out[TILES][4] = {}, top = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int round = 0; base < end; base += STEP, round++) {
        if (RAW && last < base + DECODE_KEYS && last >= base) {
            /* this step's key, and for keys past it anything that is no NaN */
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (base + 8 * i + g >= last)
#pragma unroll
                    for (int j = 0; j < PIECES; j++)
                        kf[i][j] = ((const uint4 *)fresh)[4 * j + c];
        }
        if (last < base + DECODE_KEYS) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = base + 2 * c + (i & 1) + 8 * (i >> 1);
#pragma unroll
                for (int j = 0; j < VP; j++)
                    if (key > last)
                        vf[i][j] = make_uint4(0, 0, 0, 0);
                    else if (RAW && key == last)
                        vf[i][j] = ((const uint4 *)(fresh + D))[VP * g + j];
            }
        }
        float s[2][4] = {}, s2[2][4] = {}; /* two chains each */
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            uint32_t a[4], b[4];
            query(2 * j, a);
            query(2 * j + 1, b);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma_kv<BF16>(s[i], a, kf[i][j].x, kf[i][j].y);
                mma_kv<BF16>(s2[i], b, kf[i][j].z, kf[i][j].w);
            }
        }
        float m = top, sc[4]; /* keys 2c, 2c+1, 2c+8, 2c+9 of head g, in powers of two */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = base + 2 * c + (i & 1) + 8 * (i >> 1);
            int e = i & 1;
            sc[i] = (s[i >> 1][e] + s[i >> 1][2 + e]) + (s2[i >> 1][e] + s2[i >> 1][2 + e]);
            if (key < from || key > last)
                sc[i] = -INFINITY;
            m = fmaxf(m, sc[i]);
        }
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
        float anchor = m == -INFINITY ? 0.0f : m; /* nothing visible yet */
        float shrink = fast_exp2(top - anchor);
        top = m;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sc[i] = fast_exp2(sc[i] - anchor);
            total += sc[i];
        }
        uint32_t pf[4];
        split_pair<BF16>(sc[0], sc[1], &pf[0], &pf[1]);
        split_pair<BF16>(sc[2], sc[3], &pf[2], &pf[3]);
        if (__any_sync(FULL_WARP, shrink != 1.0f))
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    out[j][i] *= shrink;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t sel = j & 1 ? 0x7632 : 0x5410;
            uint32_t b0 = byte_perm(word_of(vf[0][j >> 3], j >> 1 & 3),
                                    word_of(vf[1][j >> 3], j >> 1 & 3), sel);
            uint32_t b1 = byte_perm(word_of(vf[2][j >> 3], j >> 1 & 3),
                                    word_of(vf[3][j >> 3], j >> 1 & 3), sel);
            mma_kv<BF16>(out[j], pf, b0, b1);
        }
        if (round - window == 31) {
            window += 32;
            pages_now = pages_next;
            pages_next = load_pages(window + 32);
        }
        if (base + (DECODE_AHEAD + 1) * STEP < end)
            ask(round + DECODE_AHEAD + 1);
        if (base + STEP < end)
            load_keys(round + 1);
    }
    mark(mk, 6);
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);

    /* Join the warps, then the stretches. */
    {
        float *mine = part + (w * 8 + g) * ROW + 2 * c;
#pragma unroll
        for (int j = 0; j < TILES; j++)
            *(float2 *)(mine + 8 * j) = make_float2(out[j][0] + out[j][2], out[j][1] + out[j][3]);
        if (c == 0) {
            ml[(w * 8 + g) * 2] = top;
            ml[(w * 8 + g) * 2 + 1] = total;
        }
    }
    __syncthreads();
    mark(mk, 7);
    /* A warp per two heads joins the warps' parts and sends each to the block of the cluster that
     * joins this head; those joins are the result, or, of a long context, parts that the last
     * cluster to finish joins. */
    int cluster = p.cluster, n_lead = used - lead < cluster ? used - lead : cluster;
    int per = (8 + cluster - 1) / cluster, n_clusters = (used + cluster - 1) / cluster;
    float *to = p.a + ((size_t)t * (size_t)H + (size_t)h0) * D;
    /* entry 8j+n is element n*TILES + j */
    auto element = [](int at) { return (at & 7) * TILES + (at >> 3); };
    cluster_wait();
#pragma unroll
    for (int k = 0; k < 8 / DECODE_WARPS; k++) {
        int h = w + k * DECODE_WARPS;
        if (idle || h >= heads)
            break;
        float m = -INFINITY, l = 0.0f, v[PER] = {};
#pragma unroll
        for (int j = 0; j < DECODE_WARPS; j++)
            m = fmaxf(m, ml[(j * 8 + h) * 2]);
#pragma unroll
        for (int j = 0; j < DECODE_WARPS; j++) {
            float f = fast_exp2(ml[(j * 8 + h) * 2] - m);
            l += f * ml[(j * 8 + h) * 2 + 1];
#pragma unroll
            for (int i = 0; i < PER; i++)
                v[i] += f * part[(j * 8 + h) * ROW + lane + 32 * i];
        }
        if (used == 1) { /* one stretch: nobody to join with */
#pragma unroll
            for (int i = 0; i < PER; i++)
                to[h * D + element(lane + 32 * i)] = fast_divide(v[i], l);
            continue;
        }
        int at = rank * per + h / cluster;
        float *box = cluster_at(inbox, h % cluster);
#pragma unroll
        for (int i = 0; i < PER; i++)
            box[at * D + lane + 32 * i] = v[i];
        if (lane < 2) /* inbox_ml lies behind */
            box[8 * D + at * 2 + lane] = lane ? l : m;
    }
    if (used == 1) {
        marks_end(mk, 7);
        return;
    }
    cluster_arrive();
    cluster_wait();
    mark(mk, 8);
    size_t unit = ((size_t)t * gridDim.y + blockIdx.y) * (size_t)p.n_split;
    float *acc = p.split_acc + unit * 8 * D, *sml = p.split_ml + unit * 16;
#pragma unroll 1
    for (int i = tid; i < per * D; i += DECODE_THREADS) {
        int k = i / D, h = rank + k * cluster, at = i % D;
        if (h >= heads)
            break;
        float m = -INFINITY, l = 0.0f, v = 0.0f, from_block[8], top_of[8], total_of[8];
#pragma unroll
        for (int j = 0; j < 8; j++) { /* at once: one trip to shared memory */
            bool real = j < n_lead;
            int part_at = real ? j * per + k : 0;
            top_of[j] = real ? inbox_ml[part_at * 2] : -INFINITY;
            total_of[j] = inbox_ml[part_at * 2 + 1];
            from_block[j] = inbox[part_at * D + at];
            m = fmaxf(m, top_of[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float f = fast_exp2(top_of[j] - m);
            l += f * total_of[j];
            v += f * from_block[j];
        }
        if (n_clusters == 1) {
            to[h * D + element(at)] = fast_divide(v, l);
        } else {
            acc[(lead / cluster * 8 + h) * D + at] = v;
            if (at < 2)
                sml[lead / cluster * 16 + 2 * h + at] = at ? l : m;
        }
    }
    if (n_clusters == 1) {
        marks_end(mk, 7);
        return;
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        int32_t *count = p.split_count + ((size_t)t * gridDim.y + blockIdx.y) * 8 + rank;
        *is_last = atomicAdd(count, 1) == n_clusters - 1;
        if (*is_last)
            *count = 0;
    }
    __syncthreads();
    mark(mk, 1);
    if (!*is_last) {
        marks_end(mk, 8);
        return;
    }
    __threadfence();
#pragma unroll 1
    for (int i = tid; i < per * D; i += DECODE_THREADS) {
        int h = rank + i / D * cluster, at = i % D;
        if (h >= heads)
            break;
        float m = -INFINITY, l = 0.0f, v = 0.0f;
#pragma unroll 1
        for (int j0 = 0; j0 < n_clusters; j0 += 8) { /* eight parts in one trip */
            float top_of[8], total_of[8], from_part[8], top = m;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                bool real = j0 + j < n_clusters;
                int from = real ? j0 + j : 0;
                top_of[j] = load_float_l2(sml + from * 16 + 2 * h);
                total_of[j] = load_float_l2(sml + from * 16 + 2 * h + 1);
                from_part[j] = load_float_l2(acc + (from * 8 + h) * D + at);
                top_of[j] = real ? top_of[j] : -INFINITY;
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
                top = fmaxf(top, top_of[j]);
            float shrink = fast_exp2(m - top);
            m = top;
            l *= shrink;
            v *= shrink;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float f = fast_exp2(top_of[j] - top);
                l += f * total_of[j];
                v += f * from_part[j];
            }
        }
        to[h * D + element(at)] = fast_divide(v, l);
    }
    marks_end(mk, 7);
}

static size_t decode_shared(int D)
{
    return (size_t)(10 * D + DECODE_WARPS * 8 * (D + 8) + DECODE_PARTS * 16) * 4 +
           (size_t)(2 * D + 16 * (D + 4)) * 2 + (size_t)(8 * D + 16) * 4 + 16;
}

/* Prefill */

enum { PRE_ROWS = 64, PRE_KEYS = 64 };

/*
 * Grid: (heads, tiles of 64 rows). Four warps of 16 rows. K and V tiles are 64 keys x D in shared
 * memory, rows of 2D bytes whose 16-byte pieces are swizzled by the row, double-buffered.
 */
template <int D, bool BF16>
static __global__ void __launch_bounds__(128)
    prefill_kernel(const __grid_constant__ struct attn_args p, const int2 *tiles)
{
    enum { ROW = 2 * D, PIECES = D / 8, TILE = PRE_KEYS * ROW };
    SHARED_BYTES(shared); /* [2][K, V] */
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    int h = (int)blockIdx.x, H = p.n_heads, kv_head = h * p.kv.n_kv / H;
    int2 tile = tiles[blockIdx.y]; /* sequence, first row */
    int seq = tile.x, row0 = tile.y, rows = min((int)PRE_ROWS, p.step.q_start[seq + 1] - row0);
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int first_pos = p.step.pos[row0], last_pos = first_pos + rows - 1;
    int from = p.window && first_pos - p.window + 1 > 0 ? first_pos - p.window + 1 : 0;
    from &= ~(PRE_KEYS - 1);

    auto fetch = [&](int base, int buffer) {
        uint8_t *to = shared + buffer * 2 * TILE;
        for (int i = (int)threadIdx.x; i < PRE_KEYS * PIECES; i += 128) {
            int key = i / PIECES, piece = i % PIECES, real = min(base + key, last_pos);
            size_t at = 2 * key_offset(p.kv, pages, real, kv_head, D) + (size_t)piece * 16;
            int where = key * ROW + ((piece ^ (key & 7)) << 4);
            copy_async16(to + where, p.kv.k + at);
            copy_async16(to + TILE + where, p.kv.v + at);
        }
        copy_async_commit();
    };
    fetch(from, 0);

    /* Queries of rows g and g+8 of this warp, already in units of log2. */
    uint32_t qf[D / 16][4];
    const float to_log2 = 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            const float *e = p.q + ((size_t)(row0 + r) * (size_t)H + (size_t)h) * D + (size_t)d;
            qf[i][j] = pack_kv<BF16>(e[0] * to_log2, e[1] * to_log2);
        }
    float out[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    int pos[2] = {first_pos + w * 16 + g, first_pos + w * 16 + g + 8};
    for (int base = from, n = 0; base <= last_pos; base += PRE_KEYS, n++) {
        bool more = base + PRE_KEYS <= last_pos;
        if (more)
            fetch(base + PRE_KEYS, (n + 1) & 1);
        else
            copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint8_t *ks = shared + (n & 1) * 2 * TILE, *vs = ks + TILE;
        float s[PRE_KEYS / 8][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int j = 0; j < PRE_KEYS / 16; j++) {
                /* matrices: keys 0-7 k 0-7, keys 0-7 k 8-15, keys 8-15 k 0-7, keys 8-15 k 8-15 */
                int key = j * 16 + (lane >> 4) * 8 + (lane & 7), piece = i * 2 + (lane >> 3 & 1);
                uint32_t b[4];
                ldmatrix4(b, ks + key * ROW + ((piece ^ (key & 7)) << 4));
                mma_kv<BF16>(s[2 * j], qf[i], b[0], b[1]);
                mma_kv<BF16>(s[2 * j + 1], qf[i], b[2], b[3]);
            }
        float m[2] = {top[0], top[1]};
        bool edge = base + PRE_KEYS - 1 > first_pos + w * 16 || p.window;
#pragma unroll
        for (int j = 0; j < PRE_KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = base + j * 8 + 2 * c + (i & 1);
                if (edge && (key > pos[i >> 1] || (p.window && key <= pos[i >> 1] - p.window)))
                    s[j][i] = -INFINITY;
                m[i >> 1] = fmaxf(m[i >> 1], s[j][i]);
            }
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 1));
            m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 2));
            float anchor = m[r] == -INFINITY ? 0.0f : m[r];
            shrink[r] = fast_exp2(top[r] - anchor);
            top[r] = m[r];
            m[r] = anchor;
            total[r] *= shrink[r];
        }
#pragma unroll
        for (int j = 0; j < PRE_KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = fast_exp2(s[j][i] - m[i >> 1]);
                total[i >> 1] += s[j][i];
            }
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= shrink[i >> 1];
#pragma unroll
        for (int i = 0; i < PRE_KEYS / 16; i++) {
            uint32_t pf[4] = {pack_kv<BF16>(s[2 * i][0], s[2 * i][1]),
                              pack_kv<BF16>(s[2 * i][2], s[2 * i][3]),
                              pack_kv<BF16>(s[2 * i + 1][0], s[2 * i + 1][1]),
                              pack_kv<BF16>(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                /* transposed: keys 0-7 d 0-7, keys 8-15 d 0-7, keys 0-7 d 8-15, keys 8-15 d 8-15 */
                int key = i * 16 + (lane & 15), piece = j * 2 + (lane >> 4);
                uint32_t b[4];
                ldmatrix4_trans(b, vs + key * ROW + ((piece ^ (key & 7)) << 4));
                mma_kv<BF16>(out[2 * j], pf, b[0], b[1]);
                mma_kv<BF16>(out[2 * j + 1], pf, b[2], b[3]);
            }
        }
        __syncthreads(); /* the buffer is fetched over in the next round */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(FULL_WARP, total[r], 1);
        total[r] += __shfl_xor_sync(FULL_WARP, total[r], 2);
        int row = w * 16 + g + 8 * r;
        if (row >= rows)
            continue;
        bool hidden = p.step.slot[row0 + row] < 0;
        float inv = hidden ? 0.0f : 1.0f / total[r];
        float *to = p.a + ((size_t)(row0 + row) * (size_t)H + (size_t)h) * D;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *(float2 *)(to + j * 8 + 2 * c) =
                hidden ? make_float2(0.0f, 0.0f)
                       : make_float2(out[j][2 * r] * inv, out[j][2 * r + 1] * inv);
    }
}

/* Host */

static struct attn_args attn_args_of(struct cuda_backend *cu, const struct attn_layer *l,
                                     const struct step *s)
{
    const struct shape *sh = &cu->shape;
    struct attn_args p = {};
    p.kv.k = (const uint8_t *)l->kv.k;
    p.kv.v = (const uint8_t *)l->kv.v;
    p.kv.n_kv = sh->n_kv_heads;
    p.kv.page_len = sh->page_len;
    p.kv.head_dim = sh->head_dim;
    p.kv.type = sh->kv_type;
    while (2 << p.kv.page_shift <= sh->page_len)
        p.kv.page_shift++;
    p.step = *s;
    p.q_norm = l->q_norm;
    p.k_norm = l->k_norm;
    p.n_heads = sh->n_heads;
    p.n_rot = sh->n_rot;
    p.window = l->window;
    p.eps = sh->norm_eps;
    p.scale = sh->attn_scale;
    p.split_acc = cu->split_acc;
    p.split_ml = cu->split_ml;
    p.split_count = cu->split_count;
    return p;
}

bool cuda_tensor_attention(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
    return s->kv_type != DT_F32 && (s->head_dim == 64 || s->head_dim == 128) && s->page_len >= 16 &&
           (s->page_len & (s->page_len - 1)) == 0 && s->n_heads % s->n_kv_heads == 0;
}

int cuda_splits(const struct cuda_backend *cu, int n_seqs)
{
    const struct shape *s = &cu->shape;
    int units = n_seqs * s->n_kv_heads * ceil_div(s->n_heads / s->n_kv_heads, 8);
    int n = 2 * cu->n_sm / units; /* two blocks to an SM */
    return n < 1 ? 1 : n > DECODE_PARTS ? DECODE_PARTS : n;
}

void cuda_rotate_store(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                       const float *qkv, float *q)
{
    struct attn_args p = attn_args_of(cu, l, s);
    int heads = p.n_heads + 2 * p.kv.n_kv;
    cuda_launch(cu, rotate_store_kernel, dim3((unsigned)ceil_div(heads, 4), (unsigned)s->n_tokens),
                128, (size_t)(4 * p.kv.head_dim) * 4, LAUNCH_EARLY, p, qkv, q);
}

bool attention_clusters(const struct cuda_backend *cu)
{
#ifdef STEEL_CUDA_SIM
    return cu->sm >= 90 && cuda_blocks_meet();
#else
    cudaFuncAttributes a = {};
    return cu->sm >= 90 &&
           cudaFuncGetAttributes(&a, decode_kernel<128, false, true, 2>) == cudaSuccess &&
           a.ptxVersion >= 90;
#endif
}

template <int D, bool BF16>
static void attend_tensor(struct cuda_backend *cu, struct attn_args p, bool raw, const int2 *tiles,
                          int n_tiles)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    if (raw && many_suits(cu, p.step.n_decode)) {
        many_attend(cu, p);
    } else if (raw && wave_suits(cu, p.step.n_decode)) {
        wave_attend(cu, p);
    } else if (p.step.n_decode) {
        p.n_split = cuda_splits(cu, p.step.n_decode);
        p.cluster = 1;
        while (cu->clusters && p.cluster < 8 && 2 * p.cluster <= p.n_split)
            p.cluster *= 2;
        p.n_split -= p.n_split % p.cluster;
        int mode = LAUNCH_EARLY + p.cluster * LAUNCH_CLUSTER;
        dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
        /* Few blocks take the registers of half an SM each; of many, three share one. */
        bool many = (int)(grid.x * grid.y * grid.z) > 2 * cu->n_sm;
        auto kernel = !raw   ? decode_kernel<D, BF16, false, 3>
                      : many ? decode_kernel<D, BF16, true, 3>
                             : decode_kernel<D, BF16, true, 2>;
        cuda_launch(cu, kernel, grid, DECODE_THREADS, decode_shared(D), mode, p);
    }
    if (n_tiles)
        cuda_launch(cu, prefill_kernel<D, BF16>, dim3((unsigned)p.n_heads, (unsigned)n_tiles), 128,
                    (size_t)4 * PRE_KEYS * 2 * D, LAUNCH_EARLY, p, tiles);
}

void cuda_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                 const float *q, bool raw, float *a)
{
    struct attn_args p = attn_args_of(cu, l, s);
    p.q = q;
    p.a = a;
    const int2 *tiles = (const int2 *)(cu->step_dev + cu->layout.q_tiles);
    int n_tiles = cu->layout.n_q_tiles;
    bool halves = false, owed = false;
    if (n_tiles && cuda_tensor_attention(cu) && flash_suits(cu)) {
        halves = flash_attend(cu, l, s, q, a, &owed);
        n_tiles = 0;
    }
    if (!cuda_tensor_attention(cu)) {
        CHECK(!raw, "raw projections and no kernel for them");
        size_t shared = (size_t)(4 * (2 * p.kv.head_dim + 32)) * 4;
        cuda_launch(cu, attend_any_kernel,
                    dim3((unsigned)ceil_div(p.n_heads, 4), (unsigned)s->n_tokens), 128, shared,
                    LAUNCH_EARLY, p, 0);
    } else if (p.kv.head_dim == 64) {
        if (p.kv.type == DT_F16)
            attend_tensor<64, false>(cu, p, raw, tiles, n_tiles);
        else
            attend_tensor<64, true>(cu, p, raw, tiles, n_tiles);
    } else {
        if (p.kv.type == DT_F16)
            attend_tensor<128, false>(cu, p, raw, tiles, n_tiles);
        else
            attend_tensor<128, true>(cu, p, raw, tiles, n_tiles);
    }
    if (halves)
        large_halves(cu, a, p.n_heads * p.kv.head_dim, s->n_decode, s->n_tokens);
    if (owed) {
        cu->owed = a;
        cu->owed_from = s->n_decode;
        cu->owed_width = p.n_heads * p.kv.head_dim;
    }
}
