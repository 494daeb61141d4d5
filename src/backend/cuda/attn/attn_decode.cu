/*
 * Decode attention: one row per sequence, fp16 or bf16 cache, head_dim 64 or 128. A block has
 * (sequence, up to 8 heads of one kv head, a split of the keys). A warp loads 16 keys at a time
 * from global memory directly into MMA fragments. The 16 rows of the A fragment are the 8 heads
 * twice: the value rounded to the cache's type and the rounding residue. Queries and probabilities
 * keep about 22 bits that way, at no cost. The last block of a kv head to finish combines the
 * splits.
 *
 * Keys of earlier steps do not depend on the preceding kernel, so the first loads are issued before
 * dependency_wait. Many sequences, and a few with long contexts, have kernels of their own:
 * attn_decode_batch.cu, attn_decode_split.cu.
 */
#include "backend/cuda/attn/attn_decode.cuh"

enum {
    DECODE_WARPS =
        4, /* small blocks fit beside the preceding kernel and load their first keys early */
    DECODE_THREADS = DECODE_WARPS * 32,
    DECODE_KEYS = 16,
    DECODE_STEP = DECODE_WARPS * DECODE_KEYS,
    DECODE_PREFETCH = 8, /* rounds prefetched to the L2 */
    DECODE_PARTS = 64    /* most splits */
};

/* Shared memory. */
template <int D> struct decode_shared {
    enum { ROW = D + 8, Q_ROW = D + 4 };       /* padded against bank conflicts */
    float head[10 * D];                        /* (10, D): queries, then this step's k and v */
    float part[DECODE_WARPS * 8 * ROW];        /* (warps, 8, ROW) in the order of the n tiles */
    float ml[DECODE_PARTS * 16];               /* (splits, 8, 2): maximum, sum */
    uint16_t fresh[2 * D];                     /* (2, D) this step's k and v in the cache's type */
    uint16_t q_hi[8 * Q_ROW], q_lo[8 * Q_ROW]; /* (8, Q_ROW) */
    float inbox[8 * D]; /* (blocks of the cluster, heads this block combines, D) */
    float inbox_ml[16]; /* (.., .., 2): maximum, sum */
    int is_last;
};

/* The split of the keys a block has: number `split` of the `used` that the context is divided
 * into. */
struct decode_range {
    int split, used, base, end;
    int rank, lead; /* the block's rank in its cluster; the cluster's first split */
};

DEVICE struct decode_range decode_range_of(const struct attn_args &p, const struct decode_unit &u)
{
    struct decode_range s;
    int start = u.from & ~(DECODE_KEYS - 1), n_keys = u.last + 1 - start;
    int chunk = n_keys;
    s.split = (int)blockIdx.x;
    s.used = 1; /* short contexts have one split, because combining costs more than it saves */
    if (n_keys > DECODE_STEP && p.n_split > 1) {
        chunk = (n_keys + p.n_split - 1) / p.n_split;
        chunk = (chunk + DECODE_STEP - 1) & ~(DECODE_STEP - 1);
        s.used = (n_keys + chunk - 1) / chunk;
    }
    s.rank = cluster_rank();
    s.lead = s.split - s.rank;
    s.base = start + s.split * chunk;
    s.end = s.split >= s.used ? s.base : min(s.base + chunk, u.last + 1);
    return s;
}

/* A warp's iteration over its split: 16 keys a round. Lane i holds the page of round window + i
 * (`now`) and of window + 32 + i (`next`), so no round waits for the block table. 16 keys that
 * start at a multiple of 16 lie in one page. Page indices are clamped to the last key, where the
 * block table ends. */
struct decode_walk {
    int round0, window;
    int32_t now, next;
};

DEVICE int32_t decode_walk_pages(const struct attn_args &p, const struct decode_unit &u,
                                 const struct decode_walk &k, int round)
{
    return u.pages[min(k.round0 + (round + lane_id()) * DECODE_STEP, u.last) >> p.kv.page_shift];
}

/* The first key of a round as a row index of the cache. */
DEVICE size_t decode_walk_key(const struct attn_args &p, const struct decode_unit &u,
                              const struct decode_walk &k, int round)
{
    int32_t page = __shfl_sync(FULL_WARP, round - k.window < 32 ? k.now : k.next, round & 31);
    return (((size_t)page * (size_t)p.kv.n_kv + (size_t)u.kv_head) << p.kv.page_shift) +
           (size_t)((k.round0 + round * DECODE_STEP) & (p.kv.page_len - 1));
}

/* Loads the keys and values of a round as B fragments. vf: keys 2c, 2c+1, 2c+8, 2c+9. */
template <int D>
DEVICE void decode_walk_load(const struct attn_args &p, size_t first, uint4 (&kf)[2][D / 32],
                             uint4 (&vf)[4][D / 64])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    const uint4 *kr = (const uint4 *)(p.kv.k + 2 * D * first) + g * (D / 8) + c;
    const uint4 *vr = (const uint4 *)(p.kv.v + 2 * D * first) + 2 * c * (D / 8) + D / 64 * g;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < D / 32; j++)
            kf[i][j] = load_l2(kr + i * D + 4 * j);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < D / 64; j++)
            vf[i][j] = load_l2(vr + ((i & 1) + 8 * (i >> 1)) * (D / 8) + j);
}

/* Prefetches a round to the L2. Its 16 keys and its 16 values are contiguous: one 128-byte line
 * per lane. */
template <int D> DEVICE void decode_walk_prefetch(const struct attn_args &p, size_t first)
{
    size_t line = 2 * D * first + (size_t)lane_id() * 128;
    if (lane_id() * 128 < DECODE_KEYS * 2 * D) {
        prefetch_l2(p.kv.k + line);
        prefetch_l2(p.kv.v + line);
    }
}

/* In the round of the last key, replaces it with this step's key and value, which are not in the
 * cache yet (RAW). Values after it become zeros, because cache contents there could be NaN. */
template <int D, bool RAW>
DEVICE void decode_walk_fresh(const uint16_t *fresh, int base, int last, uint4 (&kf)[2][D / 32],
                              uint4 (&vf)[4][D / 64])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    if (RAW && last < base + DECODE_KEYS && last >= base) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (base + 8 * i + g >= last)
#pragma unroll
                for (int j = 0; j < D / 32; j++)
                    kf[i][j] = ((const uint4 *)fresh)[4 * j + c];
    }
    if (last < base + DECODE_KEYS) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = base + 2 * c + (i & 1) + 8 * (i >> 1);
#pragma unroll
            for (int j = 0; j < D / 64; j++)
                if (key > last)
                    vf[i][j] = make_uint4(0, 0, 0, 0);
                else if (RAW && key == last)
                    vf[i][j] = ((const uint4 *)(fresh + D))[D / 64 * g + j];
        }
    }
}

/* q K^T of a round, in two independent accumulator chains. a0, a2: rounded queries. a1, a3:
 * their residues. Queries are read from shared memory each round because registers are scarce. */
template <int D, bool BF16>
DEVICE void decode_scores(const uint16_t *q_hi, const uint16_t *q_lo, const uint4 (&kf)[2][D / 32],
                          float (&s)[2][4], float (&s2)[2][4])
{
    int g = lane_id() >> 2, c = lane_id() & 3;
    auto query = [&](int i, uint32_t(&a)[4]) {
        int at = g * decode_shared<D>::Q_ROW + ((i >> 1) * 4 + c) * 8 + (i & 1) * 4;
        uint2 hi = load_shared8(q_hi + at), lo = load_shared8(q_lo + at);
        a[0] = hi.x, a[2] = hi.y;
        a[1] = lo.x, a[3] = lo.y;
    };
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t a[4], b[4];
        query(2 * j, a);
        query(2 * j + 1, b);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mma_kv<BF16>(s[i], a, kf[i][j].x, kf[i][j].y);
            mma_kv<BF16>(s2[i], b, kf[i][j].z, kf[i][j].w);
        }
    }
}

/* The element of a head that entry `at` of a partial result holds. */
template <int D> DEVICE int decode_element(int at)
{
    return (at & 7) * (D / 8) + (at >> 3);
}

/* Combines the partial results of a cluster's blocks, which they sent to this block's inbox, for
 * the heads this block owns. With one cluster that is the result; otherwise it is a partial
 * result again, for decode_combine_all. */
template <int D, bool SINK>
DEVICE void decode_combine_cluster(const struct attn_args &p, const struct decode_unit &u,
                                   const struct decode_range &s, const struct decode_shared<D> &sh,
                                   int n_clusters, float *to, float *acc, float *sml)
{
    int cluster = p.cluster, n_lead = s.used - s.lead < cluster ? s.used - s.lead : cluster;
    int per = (8 + cluster - 1) / cluster;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < per * D; i += DECODE_THREADS) {
        int k = i / D, h = s.rank + k * cluster, at = i % D;
        if (h >= u.heads)
            break;
        float m = -INFINITY, l = 0.0f, v = 0.0f, from_block[8], top_of[8], total_of[8];
#pragma unroll
        for (int j = 0; j < 8; j++) { /* all loads at once, to pay the latency once */
            bool real = j < n_lead;
            int part_at = real ? j * per + k : 0;
            top_of[j] = real ? sh.inbox_ml[part_at * 2] : -INFINITY;
            total_of[j] = sh.inbox_ml[part_at * 2 + 1];
            from_block[j] = sh.inbox[part_at * D + at];
            m = fmaxf(m, top_of[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float f = fast_exp2(top_of[j] - m);
            l += f * total_of[j];
            v += f * from_block[j];
        }
        if (n_clusters == 1) {
            to[h * D + decode_element<D>(at)] = fast_divide(v, decode_sum<SINK>(p, u.h0 + h, m, l));
        } else {
            acc[(s.lead / cluster * 8 + h) * D + at] = v;
            if (at < 2)
                sml[s.lead / cluster * 16 + 2 * h + at] = at ? l : m;
        }
    }
}

/* The last cluster of a unit to finish combines the partial results of all clusters. */
template <int D, bool SINK>
DEVICE void decode_combine_all(const struct attn_args &p, const struct decode_unit &u,
                               const struct decode_range &s, int n_clusters, float *to,
                               const float *acc, const float *sml)
{
    int cluster = p.cluster, per = (8 + cluster - 1) / cluster;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < per * D; i += DECODE_THREADS) {
        int h = s.rank + i / D * cluster, at = i % D;
        if (h >= u.heads)
            break;
        float m = -INFINITY, l = 0.0f, v = 0.0f;
#pragma unroll 1
        for (int j0 = 0; j0 < n_clusters;
             j0 += 8) { /* eight loads at once, to pay the L2's latency once */
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
        to[h * D + decode_element<D>(at)] = fast_divide(v, decode_sum<SINK>(p, u.h0 + h, m, l));
    }
}

/*
 * Grid: (splits, kv heads x groups of 8 heads, sequences); 4 warps. B fragments of 16 keys:
 *   K in q K^T: column g is a key. Its 16-byte piece 4j+c belongs to lane c and feeds k groups 2j and
 *   2j+1.
 *   V in P V: k indices 2c, 2c+1 (+8) are keys. Column g of n tile j is element g*D/8 + j.
 */
template <int D, bool BF16, bool RAW, int PER_SM, bool SINK>
static __global__ void __launch_bounds__(DECODE_THREADS, PER_SM)
    attn_decode_kernel(const __grid_constant__ struct attn_args p)
{
    enum { VP = D / 64, TILES = D / 8, PER = D / 32 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    struct decode_shared<D> &sh = *(struct decode_shared<D> *)shared;
    int lane = lane_id(), w = warp_id(), c = lane & 3, tid = (int)threadIdx.x;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct decode_range s = decode_range_of(p, u);
    float *to = decode_result<D>(p, u);
    if (u.slot < 0 || s.lead >= s.used) { /* a padding row, or fewer splits than blocks */
        dependency_trigger();
        if (u.slot >= 0) /* nothing to do: free the SM for other blocks at once */
            return;
        dependency_wait();
        if (s.split == 0)
            for (int i = tid; i < u.heads * D; i += DECODE_THREADS)
                to[i] = 0.0f;
        return;
    }
    cluster_arrive(); /* matched by cluster_wait before the first write to another block's shared memory */
    int base = s.base + w * DECODE_KEYS;
    struct decode_walk k = {base, 0, 0, 0};
    k.now = decode_walk_pages(p, u, k, 0);
    k.next = decode_walk_pages(p, u, k, 32);
    dependency_trigger();
#pragma unroll 1
    for (int i = 1; i <= DECODE_PREFETCH; i++)
        if (base + i * DECODE_STEP < s.end)
            decode_walk_prefetch<D>(p, decode_walk_key(p, u, k, i));
    if (!RAW)
        dependency_wait();
    uint4 kf[2][PER], vf[4][VP];
    if (base < s.end)
        decode_walk_load<D>(p, decode_walk_key(p, u, k, 0), kf, vf);
    struct decode_heads<D, DECODE_WARPS> heads;
    decode_heads_begin(p, u.t, RAW, heads);
    mark(mk, 2);
    if (RAW)
        (dependency_wait)();
    mark(mk, 3);
    decode_heads_load(p, u, RAW, RAW && s.split == s.used - 1, heads);
    mark(mk, 4);
    decode_heads_prepare<D, BF16>(
        p, u, heads, sh.fresh, [&](int j) { return sh.head + (w + j * DECODE_WARPS) * D; },
        [&](int j, const float *head) {
            int at = (w + j * DECODE_WARPS) * decode_shared<D>::Q_ROW;
            decode_query_put<D, BF16>(head, p.scale, sh.q_hi + at, sh.q_lo + at);
        });
    __syncthreads();
    mark(mk, 5);

    float out[TILES][4] = {}, top = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int round = 0; base < s.end; base += DECODE_STEP, round++) {
        decode_walk_fresh<D, RAW>(sh.fresh, base, u.last, kf, vf);
        float sa[2][4] = {}, sb[2][4] = {};
        decode_scores<D, BF16>(sh.q_hi, sh.q_lo, kf, sa, sb);
        uint32_t pf[4];
        decode_softmax<BF16>(
            sa, sb, u, [&](int i) { return base + 2 * c + (i & 1) + 8 * (i >> 1); }, top, total,
            out, pf);
#pragma unroll
        for (int j = 0; j < VP; j++)
            decode_values<BF16>(out + 8 * j, pf, vf[0][j], vf[1][j], vf[2][j], vf[3][j]);
        if (round - k.window == 31) {
            k.window += 32;
            k.now = k.next;
            k.next = decode_walk_pages(p, u, k, k.window + 32);
        }
        if (base + (DECODE_PREFETCH + 1) * DECODE_STEP < s.end)
            decode_walk_prefetch<D>(p, decode_walk_key(p, u, k, round + DECODE_PREFETCH + 1));
        if (base + DECODE_STEP < s.end)
            decode_walk_load<D>(p, decode_walk_key(p, u, k, round + 1), kf, vf);
    }
    mark(mk, 6);
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);

    /* Combine the warps, then the splits. */
    decode_part_put<D>(out, top, total, sh.part, sh.ml);
    __syncthreads();
    mark(mk, 7);
    /* Each warp combines two heads over all warps, and sends each to the block of the cluster
     * that owns the head. */
    int cluster = p.cluster, per = (8 + cluster - 1) / cluster;
    int n_clusters = (s.used + cluster - 1) / cluster;
    cluster_wait();
#pragma unroll
    for (int i = 0; i < 8 / DECODE_WARPS; i++) {
        int h = w + i * DECODE_WARPS;
        if (s.split >= s.used || h >= u.heads)
            break;
        float m, l, v[PER];
        decode_parts_combine<D, DECODE_WARPS>(
            sh.part, sh.ml, h, [&](int e) { return lane + 32 * e; }, &m, &l, v);
        if (s.used == 1) { /* a single split is the result */
            l = decode_sum<SINK>(p, u.h0 + h, m, l);
#pragma unroll
            for (int e = 0; e < PER; e++)
                to[h * D + decode_element<D>(lane + 32 * e)] = fast_divide(v[e], l);
            continue;
        }
        int at = s.rank * per + h / cluster;
        float *box = cluster_at(sh.inbox, h % cluster);
#pragma unroll
        for (int e = 0; e < PER; e++)
            box[at * D + lane + 32 * e] = v[e];
        if (lane < 2) /* inbox_ml follows inbox */
            box[8 * D + at * 2 + lane] = lane ? l : m;
    }
    if (s.used == 1) {
        marks_end(mk, 7);
        return;
    }
    cluster_arrive();
    cluster_wait();
    mark(mk, 8);
    size_t unit = ((size_t)u.t * gridDim.y + blockIdx.y) * (size_t)p.n_split;
    float *acc = p.split_acc + unit * 8 * D, *sml = p.split_ml + unit * 16;
    decode_combine_cluster<D, SINK>(p, u, s, sh, n_clusters, to, acc, sml);
    if (n_clusters == 1) {
        marks_end(mk, 7);
        return;
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        int32_t *count = p.split_count + ((size_t)u.t * gridDim.y + blockIdx.y) * 8 + s.rank;
        sh.is_last = atomicAdd(count, 1) == n_clusters - 1;
        if (sh.is_last)
            *count = 0;
    }
    __syncthreads();
    mark(mk, 1);
    if (!sh.is_last) {
        marks_end(mk, 8);
        return;
    }
    __threadfence();
    decode_combine_all<D, SINK>(p, u, s, n_clusters, to, acc, sml);
    marks_end(mk, 7);
}

int attn_splits(const struct cuda_backend *cu, int n_seqs, int n_heads, int n_kv)
{
    int units = n_seqs * n_kv * ceil_div(n_heads / n_kv, 8);
    int n = 2 * cu->n_sm / units; /* two blocks per SM */
    return n < 1 ? 1 : n > DECODE_PARTS ? DECODE_PARTS : n;
}

bool attn_clusters(const struct cuda_backend *cu)
{
#ifdef STEEL_CUDA_SIM
    return cu->sm >= 90 && cuda_blocks_concurrent();
#else
    cudaFuncAttributes a = {};
    return cu->sm >= 90 &&
           cudaFuncGetAttributes(&a, attn_decode_kernel<128, false, true, 2, false>) ==
               cudaSuccess &&
           a.ptxVersion >= 90;
#endif
}

template <int D, bool BF16, bool SINK>
static void attn_decode_launch(struct cuda_backend *cu, struct attn_args p, bool raw)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    p.n_split = attn_splits(cu, p.step.n_decode, p.n_heads, p.kv.n_kv);
    p.cluster = 1;
    while (cu->can.cluster_attention && p.cluster < 8 && 2 * p.cluster <= p.n_split)
        p.cluster *= 2;
    p.n_split -= p.n_split % p.cluster;
    int mode = LAUNCH_EARLY + p.cluster * LAUNCH_CLUSTER;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    /* Few blocks: two per SM, with more registers each. Many blocks: three per SM. */
    bool many = (int)(grid.x * grid.y * grid.z) > 2 * cu->n_sm;
    auto kernel = !raw   ? attn_decode_kernel<D, BF16, false, 3, SINK>
                  : many ? attn_decode_kernel<D, BF16, true, 3, SINK>
                         : attn_decode_kernel<D, BF16, true, 2, SINK>;
    cuda_launch(cu, kernel, grid, DECODE_THREADS, sizeof(struct decode_shared<D>), mode, p);
}

void attn_decode(struct cuda_backend *cu, const struct attn_args &p, bool raw)
{
    bool f16 = p.kv.type == DT_F16;
    if (p.sinks) /* heads of 64: attn_mma_suits */
        f16 ? attn_decode_launch<64, false, true>(cu, p, raw)
            : attn_decode_launch<64, true, true>(cu, p, raw);
    else if (p.kv.head_dim == 64)
        f16 ? attn_decode_launch<64, false, false>(cu, p, raw)
            : attn_decode_launch<64, true, false>(cu, p, raw);
    else
        f16 ? attn_decode_launch<128, false, false>(cu, p, raw)
            : attn_decode_launch<128, true, false>(cu, p, raw);
}
