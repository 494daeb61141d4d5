/*
 * Attention of decodes: one row per sequence, halves or bf16 in the cache, head_dim 64 or 128. A
 * block takes (sequence, up to 8 heads of one kv head, a stretch of keys); a warp takes 16 keys at
 * a time straight from global memory into tensor-core fragments. The 16 rows of the A fragment are
 * the 8 heads twice: what rounds to half, and what that rounding lost, so queries and probabilities
 * keep about 22 bits at no cost. The last block of a kv head to finish joins the stretches. Keys of
 * earlier steps do not depend on the kernel in front, so the first are in flight before the wait.
 * Many sequences, and few with long contexts, have kernels of their own: attn_decode_batch.cu,
 * attn_decode_split.cu.
 */
#include "backend/cuda/attn.cuh"

#include <math.h>

enum {
    DECODE_WARPS =
        4, /* small blocks: resident, with their first keys, beside the kernel in front */
    DECODE_THREADS = DECODE_WARPS * 32,
    DECODE_KEYS = 16,
    DECODE_AHEAD = 8, /* rounds whose keys are asked for in advance */
    DECODE_PARTS = 64 /* most stretches */
};

/*
 * Grid: (splits, kv heads x groups of 8 heads, sequences); 4 warps. Fragments of 16 keys:
 *   K as B of q K^T: column g is a key; its 16-byte piece 4j+c belongs to lane c, and feeds column
 *   groups 2j and 2j+1 of k.
 *   V as B of P V: columns 2c 2c+1 (+8) of k are keys; tile j's column g is element g*D/8 + j.
 */
template <int D, bool BF16, bool RAW, int PER_SM>
static __global__ void __launch_bounds__(DECODE_THREADS, PER_SM)
    attn_decode_kernel(const __grid_constant__ struct attn_args p)
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

static size_t attn_decode_shared(int D)
{
    return (size_t)(10 * D + DECODE_WARPS * 8 * (D + 8) + DECODE_PARTS * 16) * 4 +
           (size_t)(2 * D + 16 * (D + 4)) * 2 + (size_t)(8 * D + 16) * 4 + 16;
}

int attn_splits(const struct cuda_backend *cu, int n_seqs)
{
    const struct shape *s = &cu->shape;
    int units = n_seqs * s->n_kv_heads * ceil_div(s->n_heads / s->n_kv_heads, 8);
    int n = 2 * cu->n_sm / units; /* two blocks to an SM */
    return n < 1 ? 1 : n > DECODE_PARTS ? DECODE_PARTS : n;
}

bool attn_clusters(const struct cuda_backend *cu)
{
#ifdef STEEL_CUDA_SIM
    return cu->sm >= 90 && cuda_blocks_meet();
#else
    cudaFuncAttributes a = {};
    return cu->sm >= 90 &&
           cudaFuncGetAttributes(&a, attn_decode_kernel<128, false, true, 2>) == cudaSuccess &&
           a.ptxVersion >= 90;
#endif
}

template <int D, bool BF16>
static void attn_decode_launch(struct cuda_backend *cu, struct attn_args p, bool raw)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    p.n_split = attn_splits(cu, p.step.n_decode);
    p.cluster = 1;
    while (cu->clusters && p.cluster < 8 && 2 * p.cluster <= p.n_split)
        p.cluster *= 2;
    p.n_split -= p.n_split % p.cluster;
    int mode = LAUNCH_EARLY + p.cluster * LAUNCH_CLUSTER;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    /* Few blocks take the registers of half an SM each; of many, three share one. */
    bool many = (int)(grid.x * grid.y * grid.z) > 2 * cu->n_sm;
    auto kernel = !raw   ? attn_decode_kernel<D, BF16, false, 3>
                  : many ? attn_decode_kernel<D, BF16, true, 3>
                         : attn_decode_kernel<D, BF16, true, 2>;
    cuda_launch(cu, kernel, grid, DECODE_THREADS, attn_decode_shared(D), mode, p);
}

void attn_decode(struct cuda_backend *cu, const struct attn_args &p, bool raw)
{
    bool f16 = p.kv.type == DT_F16;
    if (p.kv.head_dim == 64)
        f16 ? attn_decode_launch<64, false>(cu, p, raw) : attn_decode_launch<64, true>(cu, p, raw);
    else
        f16 ? attn_decode_launch<128, false>(cu, p, raw)
            : attn_decode_launch<128, true>(cu, p, raw);
}
