/*
 * Decode attention over a quantised KV cache (attn_quant.cuh), in two forms of one kernel:
 *   - split, for a few decodes: one wave of blocks that wait for each other, eight warps each;
 *   - batch, for many: a block per (sequence, up to 8 heads of one kv head), nothing to combine, with
 *     four warps or eight.
 *
 * This file minimises the costs beside reading the cache. Heads are normed, RoPE'd and
 * Hadamard-rotated in registers, with gains and RoPE table loaded before dependency_wait. Blocks
 * combine through records. The Hadamard rotation of values is undone before that, where a warp
 * holds whole heads.
 *
 * If keys and values have the same type, the kernel is compiled for it: code that runs once or
 * twice per layer costs by its size. Other pairs branch on the type once
 * per tile. The loop over a warp's tiles is repeated in attn_decode_quant.cu: as a shared function,
 * four of these kernels spill more.
 */
#include "backend/cuda/attn/attn_quant.cuh"

/* Bytes of a block's rings. Eight warps: as much as attn_decode_split.cu uses. Four warps: so
 * little that four blocks share an SM. */
enum { SPLIT_QUANT_RING_BYTES = 136 * 1024, SPLIT_QUANT_SMALL_RING_BYTES = 48 * 1024 };

/* Shared memory after the rings. */
template <int D, int WARPS> struct attn_split_quant_shared {
    uint16_t q[8 * (D + 32)];
    struct attn_quant_fresh<D> fresh;
    float head[WARPS * D]; /* (warps, D): scratch */
    float ml[WARPS * 16];  /* (warps, 8, 2): maximum, sum */
    int part_at[WARPS];
    int is_last;
};

/* Most stages of a ring. A block alone on its SM has more: tiles that arrive before the
 * preceding kernel has ended cost no time. */
static __host__ __device__ constexpr int attn_split_quant_stages(int warps)
{
    return warps == SPLIT_WARPS ? QUANT_STAGES_DEEP : QUANT_STAGES;
}

/* Uses as many stages as fit into the rings' bytes. Even a ring of two stages can hold a warp's
 * partial result. */
template <int D, int WARPS>
static __host__ __device__ constexpr struct attn_quant attn_split_quant_of(int k_type, int v_type)
{
    struct attn_quant c = {};
    for (int stages = attn_split_quant_stages(WARPS); stages >= 2; stages--) {
        c = attn_quant_of(k_type, v_type, D, stages);
        c.ring = WARPS * stages * c.slot;
        if (c.ring <=
            (WARPS == SPLIT_WARPS ? SPLIT_QUANT_RING_BYTES : SPLIT_QUANT_SMALL_RING_BYTES))
            break;
    }
    return c;
}

/* A query as fp16 in units of log2, Hadamard-rotated if keys are. */
template <int D>
DEVICE void attn_split_quant_query(const float *head, float scale, bool rotated, uint16_t *q)
{
    const float to_log2 = 1.4426950408889634f * scale;
    float x[D / 32];
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        float2 e = *(const float2 *)(head + 2 * lane_id() + 64 * i);
        x[2 * i] = e.x * to_log2, x[2 * i + 1] = e.y * to_log2;
    }
    if (rotated)
        kv_lanes_rotate<D / 32, 32>(x);
#pragma unroll
    for (int i = 0; i < D / 64; i++)
        *(uint32_t *)(q + 2 * lane_id() + 64 * i) = pack_half2(x[2 * i], x[2 * i + 1]);
}

/* Quantises this step's key or value into `fresh` and into the cache. When several groups of
 * heads share the kv head, only the first writes the cache. */
template <int D>
DEVICE void attn_split_quant_put(const struct attn_args &p, const struct attn_quant &c,
                                 const struct decode_unit &u, int which, const float *head,
                                 struct attn_quant_fresh<D> &fresh)
{
    int type = which ? c.v_type : c.k_type;
    float x[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        x[i] = head[lane_id() + 32 * i];
    if (kv_is_rotated(type))
        kv_lanes_rotate<D / 32, 32>(x);
    const struct kv_place to[2] = {
        {fresh.values[which], fresh.scales[which]},
        kv_place_of(which ? p.kv.v : p.kv.k, type, u.slot, p.kv.page_len, p.kv.n_kv, u.kv_head, D)};
    int n = u.h0 == u.kv_head * (p.n_heads / p.kv.n_kv) ? 2 : 1;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        kv_block_put(type, x[i], i, to, n);
}

/* Grid: (splits, kv heads x groups of 8 heads, sequences). TYPE: the type of keys and values, or
 * NONE to take both from `given`. */
template <int D, int WARPS, int TYPE>
static __global__ void __launch_bounds__(WARPS == SPLIT_WARPS ? 640 : WARPS * 32,
                                         WARPS == SPLIT_WARPS ? 1 : 4)
    attn_decode_split_quant_kernel(const __grid_constant__ struct attn_args p,
                                   const __grid_constant__ struct attn_quant given)
{
    enum { MOST = attn_split_quant_stages(WARPS) };
    SHARED_BYTES(shared);
    const struct attn_quant c = TYPE ? attn_split_quant_of<D, WARPS>(TYPE, TYPE) : given;
    struct attn_split_quant_shared<D, WARPS> &sh =
        *(struct attn_split_quant_shared<D, WARPS> *)(shared + c.ring);
    int w = warp_id(), mine = w * c.stages * c.slot;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_decode_split_range s = attn_decode_split_range_of(p, u);
    if (attn_decode_split_idle<D, true>(p, u, s))
        return;
    if (WARPS != SPLIT_WARPS)
        dependency_trigger();
    uint8_t *ring = shared + mine;
    int n_tiles = w < s.count ? (s.count - 1 - w) / WARPS + 1 : 0;
    struct attn_quant_walk<D> k = {
        p, c, u, s.first + w, WARPS, n_tiles, 0, 0
    };
#pragma unroll 1
    for (int i = 0; i < c.stages; i++)
        k.load_next(ring + i * c.slot);
    struct attn_decode_split_shares<D> shares(p, u, s);
    shares.prefetch();

    bool owns_fresh = s.fresh_tile >= 0;
    struct decode_heads<D, WARPS> heads;
    decode_heads_begin(p, u.t, true, heads);
    dependency_wait();
    decode_heads_load(p, u, true, owns_fresh, heads);
    panels_scale(p, u);
    decode_heads_each(
        p, heads,
        [&](int) {
            __syncwarp(); /* all heads of a warp use the same scratch */
            return sh.head + w * D;
        },
        [&](int j, const float *head) {
            attn_split_quant_query<D>(head, p.scale, kv_is_rotated(c.k_type),
                                      sh.q + (w + j * WARPS) * (D + 32));
        },
        [&](int which, const float *head) {
            attn_split_quant_put<D>(p, c, u, which, head, sh.fresh);
        });
    __syncthreads();

    uint4 qf[D / 32];
    attn_quant_queries<D>(sh.q, qf);
    struct decode_columns<D> r;
    decode_columns_clear(r);
#pragma unroll 1
    for (int i = 0, at = 0; i < k.n; i++, at = at + 1 == c.stages ? 0 : at + 1) {
        uint8_t *tile = ring + at * c.slot;
        attn_quant_wait<MOST>(c.stages);
        attn_quant_tile<D, false>(p, c, u, tile, (s.first + w + i * WARPS) * QUANT_KEYS,
                                  owns_fresh ? &sh.fresh : NULL, sh.q, qf, r);
        __syncwarp(); /* all lanes have read the tile that the next copy overwrites */
        k.load_next(tile);
    }
    decode_columns_part<D>(r, (float *)ring, sh.ml + w * 16);
    sh.part_at[w] = mine;
    __syncthreads();

#pragma unroll
    for (int group = (int)threadIdx.x; group < 2 * D; group += WARPS * 32) {
        float m, l;
        float4 v =
            attn_decode_split_warps_combine<D, WARPS>(shared, sh.part_at, sh.ml, group, &m, &l);
        if (kv_is_rotated(c.v_type)) {
            float x[4] = {v.x, v.y, v.z, v.w};
            kv_lanes_rotate<4, D / 4>(x);
            v = make_float4(x[0], x[1], x[2], x[3]);
        }
        if (group < shares.groups) {
            v = attn_decode_split_store<D, true>(shares, group, v, m, l);
            if (p.panels) { /* fp16 cannot overflow: no larger than the largest value */
                panel_put(p, u.t, u.h0 * D + 4 * group, v.x, v.y);
                panel_put(p, u.t, u.h0 * D + 4 * group + 2, v.z, v.w);
            }
        }
    }
    if (WARPS == SPLIT_WARPS)
        dependency_trigger(); /* not earlier: starting the next kernel's blocks would take issue slots */
    if (s.used > 1)
        attn_decode_split_combine<D, true>(shares, &sh.is_last);
}

/* Host */

/* Bytes of shared memory of a block with WARPS warps. */
template <int D, int WARPS> static size_t attn_split_quant_bytes(const struct cuda_backend *cu)
{
    return (size_t)attn_split_quant_of<D, WARPS>(cu->shape.k_type, cu->shape.v_type).ring +
           sizeof(struct attn_split_quant_shared<D, WARPS>);
}

bool attn_decode_batch_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return attn_quant_suits(cu, l) && attn_heads_plain(l) && l->softcap == 0 &&
           (l->k_dim == 64    ? attn_split_quant_bytes<64, SPLIT_WARPS>(cu) <= cu->shared_limit
            : l->k_dim == 128 ? attn_split_quant_bytes<128, SPLIT_WARPS>(cu) <= cu->shared_limit
                              : false);
}

bool attn_decode_split_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
#ifndef STEEL_CUDA_SIM
    if (!cu->can.cluster_attention) /* without clusters the blocks do not wait for each other */
        return false;
#endif
    return cu->can.grid_barrier && attn_decode_batch_quant_fits(cu, l);
}

template <int D, int WARPS>
static void attn_split_quant_launch(struct cuda_backend *cu, const struct attn_args &p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8);
    enum dtype k = cu->shape.k_type, v = cu->shape.v_type;
    struct attn_quant c = attn_split_quant_of<D, WARPS>(k, v);
    auto kernel = k != v            ? attn_decode_split_quant_kernel<D, WARPS, DT_NONE>
                  : k == DT_Q8_0    ? attn_decode_split_quant_kernel<D, WARPS, DT_Q8_0>
                  : k == DT_F8_E4M3 ? attn_decode_split_quant_kernel<D, WARPS, DT_F8_E4M3>
                                    : attn_decode_split_quant_kernel<D, WARPS, DT_Q4_0>;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    size_t bytes = attn_split_quant_bytes<D, WARPS>(cu);
    if (WARPS == SPLIT_WARPS)
        bytes = attn_decode_split_one_per_sm(cu, bytes);
    cuda_launch(cu, kernel, grid, WARPS * 32, bytes, LAUNCH_EARLY, p, c);
}

static int attn_split_quant_units(const struct attn_args &p)
{
    return p.kv.n_kv * ceil_div(p.n_heads / p.kv.n_kv, 8) * p.step.n_decode;
}

void attn_decode_split_quant(struct cuda_backend *cu, struct attn_args p)
{
    int units = attn_split_quant_units(p);
    p.n_split = 1;
    while (2 * p.n_split * units <= cu->n_sm && p.n_split < SPLIT_PARTS)
        p.n_split *= 2;
    p.records = cu->split.records;
    if (p.kv.head_dim == 64)
        attn_split_quant_launch<64, SPLIT_WARPS>(cu, p);
    else
        attn_split_quant_launch<128, SPLIT_WARPS>(cu, p);
}

void attn_decode_batch_quant(struct cuda_backend *cu, struct attn_args p)
{
    bool few = attn_split_quant_units(p) <= cu->n_sm;
    p.n_split = 1;
    if (p.kv.head_dim == 64)
        few ? attn_split_quant_launch<64, SPLIT_WARPS>(cu, p)
            : attn_split_quant_launch<64, SPLIT_WARPS / 2>(cu, p);
    else
        few ? attn_split_quant_launch<128, SPLIT_WARPS>(cu, p)
            : attn_split_quant_launch<128, SPLIT_WARPS / 2>(cu, p);
}
