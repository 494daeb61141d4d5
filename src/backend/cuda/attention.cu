/*
 * Attention: rotation and storage of new keys, then softmax(q K^T) V over the paged cache.
 * Three kernels, best first:
 *   decode   one row per sequence, halves or bf16 in the cache, head_dim 64 or 128. A block takes
 *            (sequence, up to 8 heads of one kv head, a stretch of keys); a warp takes 16 keys at a
 *            time straight from global memory into tensor-core fragments. The 16 rows of the A
 *            fragment are the 8 heads twice: what rounds to half, and what that rounding lost, so
 *            queries and probabilities keep about 22 bits at no cost. The last block of a kv head to
 *            finish joins the stretches.
 *   prefill  64 rows of one head per block, keys and values through shared memory, 64 at a time.
 *   any      everything else (float caches, odd head sizes): a warp per (row, head), plain floats.
 * Keys of earlier steps do not depend on the kernel in front, so decode has its first keys in
 * flight before it waits.
 */
#include "backend/cuda/cuda.h"

#include <math.h>

struct kv_view {
    const uint8_t *k, *v; /* (n_pages, K, page_len, D) */
    int n_kv, page_len, page_shift, head_dim, type;
};

struct attn_args {
    struct kv_view kv;
    struct step step;
    const float *q;   /* (n_tokens, H, D) rotated; or raw projections (n_tokens, H + 2K, D) */
    float *a;         /* (n_tokens, H, D) */
    const float *q_norm, *k_norm;
    int n_heads, n_rot, window, n_split;
    float eps, scale;
    float *split_acc, *split_ml;
    int32_t *split_count;
};

/* One warp: norm (gain may be NULL) and rotation of a head of D floats, in place in shared memory. */
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
            size_t k = kv_index(p.kv, pages[key / p.kv.page_len] * p.kv.page_len +
                                          key % p.kv.page_len, kv_head);
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
                size_t k = kv_index(p.kv, pages[key2 / p.kv.page_len] * p.kv.page_len +
                                              key2 % p.kv.page_len, kv_head);
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

enum { DECODE_WARPS = 4, DECODE_KEYS = 16 };

template <bool BF16> DEVICE void mma_kv(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1)
{
    if (BF16)
        mma_bf16(d, a, b0, b1);
    else
        mma_f16(d, a, b0, b1);
}
template <bool BF16> DEVICE uint32_t pack_kv(float x, float y)
{
    return BF16 ? pack_bf162(x, y) : pack_half2(x, y);
}
template <bool BF16> DEVICE float unpack_kv(uint32_t h)
{
    return BF16 ? bf16_to_float(h) : half_to_float(h);
}
/* x and y as a pair, and the pair of what that lost */
template <bool BF16> DEVICE void split_pair(float x, float y, uint32_t *hi, uint32_t *lo)
{
    uint32_t p = pack_kv<BF16>(x, y);
    *hi = p;
    *lo = pack_kv<BF16>(x - unpack_kv<BF16>(p & 0xffff), y - unpack_kv<BF16>(p >> 16));
}

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
template <int D, bool BF16, bool RAW>
static __global__ void __launch_bounds__(DECODE_WARPS * 32)
    decode_kernel(const __grid_constant__ struct attn_args p)
{
    enum { PIECES = D / 32, VP = D / 64, TILES = D / 8 };
    SHARED_BYTES(shared);
    float *q = (float *)shared;          /* (8, D) */
    float *fresh = q + 8 * D;            /* (2, D) this step's k and v */
    float *part = fresh + 2 * D;         /* (4 warps, 8, D) */
    float *ml = part + DECODE_WARPS * 8 * D; /* (4 warps, 8, 2) */
    uint16_t *fresh16 = (uint16_t *)(ml + DECODE_WARPS * 16); /* (2, D) as the cache has it */
    int *is_last = (int *)(fresh16 + 2 * D);

    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    int H = p.n_heads, K = p.kv.n_kv, G = H / K, groups = (G + 7) / 8;
    int kv_head = (int)blockIdx.y / groups, h0 = kv_head * G + (int)blockIdx.y % groups * 8;
    int heads = min(8, G - (int)blockIdx.y % groups * 8);
    int seq = (int)blockIdx.z, t = seq; /* decodes: row = sequence */
    int slot = p.step.slot[t], last = p.step.pos[t];
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    int start = from & ~(DECODE_KEYS - 1), n_keys = last + 1 - start;
    int unit = DECODE_WARPS * DECODE_KEYS;
    int chunk = ((n_keys + p.n_split - 1) / p.n_split + unit - 1) / unit * unit;
    int used = (n_keys + chunk - 1) / chunk;
    int split = (int)blockIdx.x;
    if (slot < 0 || split >= used) { /* a padding row, or fewer stretches than blocks */
        dependency_wait();
        dependency_trigger();
        if (slot < 0 && split == 0)
            for (int i = (int)threadIdx.x; i < heads * D; i += DECODE_WARPS * 32)
                p.a[((size_t)t * (size_t)H + (size_t)h0) * D + (size_t)i] = 0.0f;
        return;
    }
    int begin = start + split * chunk, end = min(begin + chunk, last + 1);
    bool owns_fresh = RAW && split == used - 1;

    uint4 kf[2][PIECES], vf[4][VP]; /* vf: keys 2c, 2c+1, 2c+8, 2c+9 */
    auto load_keys = [&](int base) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *row =
                p.kv.k + 2 * key_offset(p.kv, pages, min(base + 8 * i + g, last), kv_head, D);
#pragma unroll
            for (int j = 0; j < PIECES; j++)
                kf[i][j] = load_l2((const uint4 *)row + 4 * j + c);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = base + 2 * c + (i & 1) + 8 * (i >> 1);
            const uint8_t *row = p.kv.v + 2 * key_offset(p.kv, pages, min(key, last), kv_head, D);
#pragma unroll
            for (int j = 0; j < VP; j++)
                vf[i][j] = load_l2((const uint4 *)row + VP * g + j);
        }
    };
    int base = begin + w * DECODE_KEYS;
    if (!RAW)
        dependency_wait();
    if (base < end)
        load_keys(base);
    if (RAW)
        dependency_wait();
    dependency_trigger();

    /* Queries, and this step's key and value where the projections are still raw. */
    int q_heads = RAW ? H + 2 * K : H;
    const float *row = p.q + (size_t)t * (size_t)q_heads * D;
    const float2 *rope = p.step.rope + (size_t)t * (size_t)(p.n_rot >> 1);
    for (int h = w; h < 8; h += DECODE_WARPS) {
        for (int i = lane; i < D; i += 32)
            q[h * D + i] = h < heads ? row[(h0 + h) * D + i] : 0.0f;
        if (RAW && h < heads)
            prepare_head(q + h * D, D, p.q_norm, p.eps, rope, p.n_rot);
    }
    if (RAW && owns_fresh && w < 2) {
        float *f = fresh + w * D;
        for (int i = lane; i < D; i += 32)
            f[i] = row[(H + w * K + kv_head) * D + i];
        if (w == 0)
            prepare_head(f, D, p.k_norm, p.eps, rope, p.n_rot);
        size_t at = kv_index(p.kv, slot, kv_head);
        for (int i = lane; i < D; i += 32) {
            uint16_t h = BF16 ? float_to_bf16(f[i]) : float_to_half(f[i]);
            fresh16[w * D + i] = h;
            if (h0 == kv_head * G) /* one of the groups of heads stores it */
                ((uint16_t *)(w == 0 ? p.kv.k : p.kv.v))[at + (size_t)i] = h;
        }
    }
    __syncthreads();

    uint32_t qf[2 * PIECES][4]; /* a0 a2: halves of q; a1 a3: what they lost */
    const float to_log2 = 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 0; i < 2 * PIECES; i++) {
        const float *e = q + g * D + ((i >> 1) * 4 + c) * 8 + (i & 1) * 4;
        split_pair<BF16>(e[0] * to_log2, e[1] * to_log2, &qf[i][0], &qf[i][1]);
        split_pair<BF16>(e[2] * to_log2, e[3] * to_log2, &qf[i][2], &qf[i][3]);
    }
    float out[TILES][4] = {}, top = -INFINITY, total = 0.0f;
    for (; base < end; base += DECODE_WARPS * DECODE_KEYS) {
        if (RAW && owns_fresh && last >= base && last < base + DECODE_KEYS) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (base + 8 * i + g >= last)
#pragma unroll
                    for (int j = 0; j < PIECES; j++)
                        kf[i][j] = ((const uint4 *)fresh16)[4 * j + c];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (base + 2 * c + (i & 1) + 8 * (i >> 1) >= last)
#pragma unroll
                    for (int j = 0; j < VP; j++)
                        vf[i][j] = ((const uint4 *)(fresh16 + D))[VP * g + j];
        }
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                mma_kv<BF16>(s[i], qf[2 * j], kf[i][j].x, kf[i][j].y);
                mma_kv<BF16>(s[i], qf[2 * j + 1], kf[i][j].z, kf[i][j].w);
            }
        float m = top, sc[4]; /* keys 2c, 2c+1, 2c+8, 2c+9 of head g, in powers of two */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = base + 2 * c + (i & 1) + 8 * (i >> 1);
            sc[i] = s[i >> 1][i & 1] + s[i >> 1][2 + (i & 1)];
            if (key < from || key > last)
                sc[i] = -INFINITY;
            m = fmaxf(m, sc[i]);
        }
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
        float anchor = m == -INFINITY ? 0.0f : m; /* nothing visible yet */
        float shrink = exp2f(top - anchor);
        top = m;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sc[i] = exp2f(sc[i] - anchor);
            total += sc[i];
        }
        uint32_t pf[4];
        split_pair<BF16>(sc[0], sc[1], &pf[0], &pf[1]);
        split_pair<BF16>(sc[2], sc[3], &pf[2], &pf[3]);
        const uint32_t *v0 = (const uint32_t *)vf[0], *v1 = (const uint32_t *)vf[1];
        const uint32_t *v2 = (const uint32_t *)vf[2], *v3 = (const uint32_t *)vf[3];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t sel = j & 1 ? 0x7632 : 0x5410;
            uint32_t b0 = byte_perm(v0[j >> 1], v1[j >> 1], sel);
            uint32_t b1 = byte_perm(v2[j >> 1], v3[j >> 1], sel);
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= shrink;
            mma_kv<BF16>(out[j], pf, b0, b1);
        }
        if (base + DECODE_WARPS * DECODE_KEYS < end)
            load_keys(base + DECODE_WARPS * DECODE_KEYS);
    }
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);

    /* Join the warps. */
    float *mine = part + (w * 8 + g) * D;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        mine[2 * c * TILES + j] = out[j][0] + out[j][2];
        mine[(2 * c + 1) * TILES + j] = out[j][1] + out[j][3];
    }
    if (c == 0) {
        ml[(w * 8 + g) * 2] = top;
        ml[(w * 8 + g) * 2 + 1] = total;
    }
    __syncthreads();
    size_t unit0 = ((size_t)seq * gridDim.y + blockIdx.y) * (size_t)p.n_split;
    float *acc = p.split_acc + (unit0 + (size_t)split) * 8 * D;
    float *sml = p.split_ml + (unit0 + (size_t)split) * 16;
    for (int i = (int)threadIdx.x; i < heads * D; i += DECODE_WARPS * 32) {
        int h = i / D, d = i % D;
        float m = -INFINITY, l = 0.0f, v = 0.0f;
#pragma unroll
        for (int j = 0; j < DECODE_WARPS; j++)
            m = fmaxf(m, ml[(j * 8 + h) * 2]);
#pragma unroll
        for (int j = 0; j < DECODE_WARPS; j++) {
            float mj = ml[(j * 8 + h) * 2], f = mj == -INFINITY ? 0.0f : exp2f(mj - m);
            l += f * ml[(j * 8 + h) * 2 + 1];
            v += f * part[(j * 8 + h) * D + d];
        }
        if (used == 1)
            p.a[((size_t)t * (size_t)H + (size_t)(h0 + h)) * D + (size_t)d] = v / l;
        else {
            acc[i] = v;
            if (d == 0) {
                sml[2 * h] = m;
                sml[2 * h + 1] = l;
            }
        }
    }
    if (used == 1)
        return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *count = p.split_count + (size_t)seq * gridDim.y + blockIdx.y;
        *is_last = atomicAdd(count, 1) == used - 1;
        if (*is_last)
            *count = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    acc = p.split_acc + unit0 * 8 * D;
    sml = p.split_ml + unit0 * 16;
    for (int i = (int)threadIdx.x; i < heads * D; i += DECODE_WARPS * 32) {
        int h = i / D;
        float m = -INFINITY, l = 0.0f, v = 0.0f;
        for (int j = 0; j < used; j++)
            m = fmaxf(m, load_float_l2(sml + j * 16 + 2 * h));
        for (int j = 0; j < used; j++) {
            float mj = load_float_l2(sml + j * 16 + 2 * h);
            float f = mj == -INFINITY ? 0.0f : exp2f(mj - m);
            l += f * load_float_l2(sml + j * 16 + 2 * h + 1);
            v += f * load_float_l2(acc + j * 8 * D + i);
        }
        p.a[((size_t)t * (size_t)H + (size_t)h0) * D + (size_t)i] = v / l;
    }
}

static size_t decode_shared(int D)
{
    return (size_t)(8 * D + 2 * D + DECODE_WARPS * 8 * D + DECODE_WARPS * 16) * 4 +
           (size_t)(2 * D) * 2 + 16;
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
            const float *e =
                p.q + ((size_t)(row0 + r) * (size_t)H + (size_t)h) * D + (size_t)d;
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
            shrink[r] = exp2f(top[r] - anchor);
            top[r] = m[r];
            m[r] = anchor;
            total[r] *= shrink[r];
        }
#pragma unroll
        for (int j = 0; j < PRE_KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = exp2f(s[j][i] - m[i >> 1]);
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
    while (1 << (p.kv.page_shift + 1) <= sh->page_len)
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
    return s->kv_type != DT_F32 && (s->head_dim == 64 || s->head_dim == 128) &&
           s->page_len >= 16 && (s->page_len & (s->page_len - 1)) == 0 &&
           s->n_heads % s->n_kv_heads == 0;
}

int cuda_splits(const struct cuda_backend *cu, int n_seqs)
{
    const struct shape *s = &cu->shape;
    int units = n_seqs * s->n_kv_heads * ceil_div(s->n_heads / s->n_kv_heads, 8);
    int n = cu->n_sm / units;
    return n < 1 ? 1 : n > 64 ? 64 : n;
}

void cuda_rotate_store(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                       const float *qkv, float *q)
{
    struct attn_args p = attn_args_of(cu, l, s);
    int heads = p.n_heads + 2 * p.kv.n_kv;
    cuda_launch(cu, rotate_store_kernel, dim3((unsigned)ceil_div(heads, 4), (unsigned)s->n_tokens),
                128, (size_t)(4 * p.kv.head_dim) * 4, LAUNCH_EARLY, p, qkv, q);
}

template <int D, bool BF16>
static void attend_tensor(struct cuda_backend *cu, struct attn_args p, bool raw, const int2 *tiles,
                          int n_tiles)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    if (p.step.n_decode) {
        p.n_split = cuda_splits(cu, p.step.n_decode);
        dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
        if (raw)
            cuda_launch(cu, decode_kernel<D, BF16, true>, grid, DECODE_WARPS * 32,
                        decode_shared(D), LAUNCH_EARLY, p);
        else
            cuda_launch(cu, decode_kernel<D, BF16, false>, grid, DECODE_WARPS * 32,
                        decode_shared(D), LAUNCH_EARLY, p);
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
    if (!cuda_tensor_attention(cu)) {
        CHECK(!raw, "raw projections and no kernel for them");
        size_t shared = (size_t)(4 * (2 * p.kv.head_dim + 32)) * 4;
        cuda_launch(cu, attend_any_kernel,
                    dim3((unsigned)ceil_div(p.n_heads, 4), (unsigned)s->n_tokens), 128, shared,
                    LAUNCH_EARLY, p, 0);
    } else if (p.kv.head_dim == 64) {
        if (p.kv.type == DT_F16)
            attend_tensor<64, false>(cu, p, raw, tiles, cu->layout.n_q_tiles);
        else
            attend_tensor<64, true>(cu, p, raw, tiles, cu->layout.n_q_tiles);
    } else {
        if (p.kv.type == DT_F16)
            attend_tensor<128, false>(cu, p, raw, tiles, cu->layout.n_q_tiles);
        else
            attend_tensor<128, true>(cu, p, raw, tiles, cu->layout.n_q_tiles);
    }
}
