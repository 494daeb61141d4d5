/*
 * Decode attention over a quantised KV cache (attn_quant.cuh) for every option a layer may have,
 * heads of 64 to 512, one sequence or many. A block has (sequence, up to 8 heads of one kv head, a
 * split of the keys). Splits store their partial results in cu->split.acc; the last block of a unit
 * to finish combines them.
 */
#include "backend/cuda/attn/attn_quant.cuh"

enum { QUANT_WARPS = 8, QUANT_PARTS = 64 };

/* Shared memory after the rings. */
template <int D> struct attn_quant_shared {
    enum { Q_ROW = D + 32, PART_ROW = D + 4 };
    uint16_t q[8 * Q_ROW];            /* (8, Q_ROW) */
    struct attn_quant_fresh<D> fresh; /* this step's key and value */
    float head[QUANT_WARPS * D];      /* (warps, D) */
    float ml[QUANT_WARPS * 16];       /* (warps, 8, 2): maximum, sum */
    int is_last;
};

/* The tiles a block has: `count` tiles from `first` on. The context has `used` splits. */
struct attn_quant_range {
    int used, first, count;
    bool has_last; /* its last tile contains this step's key */
};

DEVICE struct attn_quant_range attn_quant_range_of(const struct attn_args &p,
                                                   const struct decode_unit &u, int warps)
{
    struct attn_quant_range s;
    int start = u.from / QUANT_KEYS, n = u.last / QUANT_KEYS + 1 - start;
    int each = max((n + p.n_split - 1) / p.n_split, warps);
    s.used = (n + each - 1) / each;
    s.first = start + (int)blockIdx.x * each;
    s.count = min(each, start + n - s.first);
    s.has_last = (int)blockIdx.x == s.used - 1;
    return s;
}

/* Stores the unit's queries as fp16, in units of log2 unless the layer has a softcap. With raw
 * projections, also quantises this step's key and value. */
template <int D>
DEVICE void attn_quant_heads(const struct attn_args &p, const struct attn_quant &c,
                             const struct decode_unit &u, bool owns_fresh,
                             struct attn_quant_shared<D> &sh)
{
    int lane = lane_id(), warps = (int)blockDim.x >> 5;
    float by = p.softcap != 0.0f ? p.scale : 1.4426950408889634f * p.scale;
    float *head = sh.head + warp_id() * D;
    for (int i = u.heads * D / 2 + (int)threadIdx.x; i < 8 * D / 2; i += (int)blockDim.x)
        *(uint32_t *)(sh.q + i / (D / 2) * attn_quant_shared<D>::Q_ROW + i % (D / 2) * 2) = 0;
    for (int j = warp_id(); j < u.heads + (owns_fresh ? 2 : 0); j += warps) {
        int part = j < u.heads ? (int)ATTN_Q : (int)ATTN_K + j - u.heads;
        const float *from = p.q + ((size_t)u.t * (size_t)p.n_heads + (size_t)(u.h0 + j)) * D;
        float temperature = 1.0f; /* unless raw, attn_heads has rotated and scaled them */
        if (p.raw) {
            attn_head_prepare(p, u.t, part, part == ATTN_Q ? u.h0 + j : u.kv_head, 1.0f, head);
            if (kv_is_rotated(part == ATTN_V ? c.v_type : c.k_type))
                kv_head_rotate(head, D);
            from = head;
            temperature = attn_temperature(p, u.t);
        }
        if (part == ATTN_Q) {
            for (int i = 2 * lane; i < D; i += 64)
                *(uint32_t *)(sh.q + j * attn_quant_shared<D>::Q_ROW + i) =
                    pack_half2(from[i] * temperature * by, from[i + 1] * temperature * by);
        } else {
            int is_v = part == ATTN_V, type = is_v ? c.v_type : c.k_type;
            struct kv_place place = {sh.fresh.values[is_v], sh.fresh.scales[is_v]};
            kv_head_put(type, head, D, place);
            if (u.h0 ==
                u.kv_head * (p.n_heads / p.kv.n_kv)) /* the first group of heads writes the cache */
                kv_head_put(type, head, D,
                            kv_place_of(is_v ? p.kv.v : p.kv.k, type, u.slot, p.kv.page_len,
                                        p.kv.n_kv, u.kv_head, D));
        }
        __syncwarp();
    }
}

/* One warp writes the result of head h of the unit: undoes the Hadamard rotation, divides by the
 * softmax sum (l and the sink; m is the largest score), applies the gate. `head` is in shared
 * memory. */
template <int D>
DEVICE void attn_quant_write(const struct attn_args &p, const struct attn_quant &c,
                             const struct decode_unit &u, int h, float m, float l, float *head)
{
    float by = fast_divide(1.0f, l + attn_sink(p, u.h0 + h, m));
    const float *gate = attn_gate(p, u.t, u.h0 + h);
    float *to = decode_result<D>(p, u) + h * D;
    __syncwarp();
    if (kv_is_rotated(c.v_type))
        kv_head_rotate(head, D);
    for (int i = 2 * lane_id(); i < D; i += 64) {
        float x = head[i] * by, y = head[i + 1] * by;
        if (gate)
            x *= sigmoid(gate[i]), y *= sigmoid(gate[i + 1]);
        *(float2 *)(to + i) = make_float2(x, y);
        if (p.panels) /* fp16 cannot overflow: no larger than the largest value */
            panel_put(p, u.t, (u.h0 + h) * D + i, x, y);
    }
    __syncwarp();
}

/* One warp combines the splits of head h. Lane i holds maximum and sum of splits i and i + 32. */
template <int D>
DEVICE void attn_quant_combine_splits(const float *acc, const float *ml, int used, int h, float *m,
                                      float *l, float *head)
{
    enum { TRIP = 16 }; /* loads at once, to pay the L2's latency once */
    int lane = lane_id();
    float top[2], f[2];
    *m = -INFINITY, *l = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] =
            lane + 32 * i < used ? load_float_l2(ml + (lane + 32 * i) * 16 + 2 * h) : -INFINITY;
        *m = fmaxf(*m, top[i]);
    }
    *m = warp_max(*m);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        f[i] = fast_exp2(top[i] - *m);
        if (lane + 32 * i < used)
            *l += f[i] * load_float_l2(ml + (lane + 32 * i) * 16 + 2 * h + 1);
    }
    *l = warp_sum(*l);
#pragma unroll 1
    for (int at = 4 * lane; at < (D + 127) / 128 * 128; at += 128) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int j0 = 0; j0 < used; j0 += TRIP) {
            uint4 e[TRIP];
#pragma unroll
            for (int j = 0; j < TRIP; j++)
                e[j] = at < D && j0 + j < used
                           ? load_l2((const uint4 *)(acc + ((j0 + j) * 8 + h) * D + at))
                           : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < TRIP; j++) {
                float by = __shfl_sync(FULL_WARP, j0 + j < 32 ? f[0] : f[1], (j0 + j) & 31);
                v.x += by * float_of(e[j].x), v.y += by * float_of(e[j].y);
                v.z += by * float_of(e[j].z), v.w += by * float_of(e[j].w);
            }
        }
        if (at < D)
            *(float4 *)(head + at) = v;
    }
}

/* Combines the warps' partial results and then, if there are several splits, those of the
 * blocks. */
template <int D>
DEVICE void attn_quant_combine(const struct attn_args &p, const struct attn_quant &c,
                               const struct decode_unit &u, const struct attn_quant_range &s,
                               const float *part, struct attn_quant_shared<D> &sh)
{
    enum { PART_ROW = attn_quant_shared<D>::PART_ROW };
    int lane = lane_id(), w = warp_id(), warps = (int)blockDim.x >> 5;
    size_t unit = (size_t)u.t * gridDim.y + blockIdx.y, first = unit * (size_t)p.n_split * 8;
    float *head = sh.head + w * D, *acc = p.split_acc + first * D, *ml = p.split_ml + first * 2;
    for (int h = w; h < u.heads; h += warps) {
        float m = -INFINITY, l = 0.0f;
        for (int j = 0; j < warps; j++)
            m = fmaxf(m, sh.ml[(j * 8 + h) * 2]);
        for (int i = lane; i < D; i += 32) {
            float v = 0.0f;
            for (int j = 0; j < warps; j++)
                v += fast_exp2(sh.ml[(j * 8 + h) * 2] - m) * part[(j * 8 + h) * PART_ROW + i];
            head[i] = v;
        }
        for (int j = 0; j < warps; j++)
            l += fast_exp2(sh.ml[(j * 8 + h) * 2] - m) * sh.ml[(j * 8 + h) * 2 + 1];
        if (s.used == 1) {
            attn_quant_write<D>(p, c, u, h, m, l, head);
            continue;
        }
        int at = (int)blockIdx.x * 8 + h;
        for (int i = lane; i < D; i += 32)
            acc[at * D + i] = head[i];
        if (lane < 2)
            ml[at * 2 + lane] = lane ? l : m;
        __syncwarp();
    }
    if (s.used == 1)
        return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *count = p.split_count + unit * 8;
        sh.is_last = atomicAdd(count, 1) == s.used - 1;
        if (sh.is_last)
            *count = 0;
    }
    __syncthreads();
    if (!sh.is_last)
        return;
    __threadfence();
    for (int h = w; h < u.heads; h += warps) {
        float m, l;
        attn_quant_combine_splits<D>(acc, ml, s.used, h, &m, &l, head);
        attn_quant_write<D>(p, c, u, h, m, l, head);
    }
}

/* Grid: (splits, kv heads x groups of 8 heads, sequences). Unless p.q holds raw projections,
 * this step's key and value are already in the cache. */
template <int D>
static __global__ void __launch_bounds__(D > 256 ? 128 : 256, D > 128 ? 1 : 2)
    attn_decode_quant_kernel(const __grid_constant__ struct attn_args p,
                             const __grid_constant__ struct attn_quant c)
{
    SHARED_BYTES(shared);
    struct attn_quant_shared<D> &sh = *(struct attn_quant_shared<D> *)(shared + c.ring);
    int w = warp_id(), warps = (int)blockDim.x >> 5;
    struct decode_unit u = decode_unit_of(p, (int)blockIdx.y, (int)blockIdx.z);
    struct attn_quant_range s = attn_quant_range_of(p, u, warps);
    dependency_trigger();
    if (u.slot < 0 || (int)blockIdx.x >= s.used) { /* a padding row, or fewer splits than blocks */
        dependency_wait();
        if (u.slot < 0 && blockIdx.x == 0)
            panels_pad<D>(p, u);
        return;
    }
    /* Tiles of earlier steps are loaded before dependency_wait. The tile with this step's key
     * is, too, if this block overwrites that key later. */
    bool owns_fresh = p.raw && !p.heads.shares_kv && s.has_last;
    bool early = owns_fresh || !s.has_last;
    uint8_t *ring = shared + w * c.stages * c.slot;
    struct attn_quant_walk<D> k = {
        p, c, u, s.first + w, warps, w < s.count ? (s.count - 1 - w) / warps + 1 : 0, 0, 0
    };
    if (!early)
        dependency_wait();
#pragma unroll 1
    for (int i = 0; i < c.stages; i++)
        k.load_next(ring + i * c.slot);
    if (early)
        dependency_wait();
    panels_scale(p, u);
    attn_quant_heads<D>(p, c, u, owns_fresh, sh);
    __syncthreads();
    uint4 qf[D > 128 ? 1 : D / 32] = {};
    attn_quant_queries<D>(sh.q, qf);
    struct decode_columns<D> r;
    decode_columns_clear(r);
#pragma unroll 1
    for (int i = 0, at = 0; i < k.n; i++, at = at + 1 == c.stages ? 0 : at + 1) {
        uint8_t *tile = ring + at * c.slot;
        attn_quant_wait<QUANT_STAGES>(c.stages);
        attn_quant_tile<D, true>(p, c, u, tile, (s.first + w + i * warps) * QUANT_KEYS,
                                 owns_fresh ? &sh.fresh : NULL, sh.q, qf, r);
        __syncwarp(); /* all lanes have read the tile that the next copy overwrites */
        k.load_next(tile);
    }
    copy_async_wait<0>();
    __syncthreads(); /* partial results overwrite the rings */
    decode_columns_part<D>(r, (float *)shared + w * 8 * attn_quant_shared<D>::PART_ROW,
                           sh.ml + w * 16);
    __syncthreads();
    attn_quant_combine<D>(p, c, u, s, (const float *)shared, sh);
}

/* Host */

/* The rings of a block. They later hold the warps' partial results. */
template <int D>
static struct attn_quant attn_quant_rings(int k_type, int v_type, int warps, int stages)
{
    struct attn_quant c = attn_quant_of(k_type, v_type, D, stages);
    int parts = warps * 8 * attn_quant_shared<D>::PART_ROW * 4, rings = warps * stages * c.slot;
    c.ring = rings > parts ? rings : parts;
    return c;
}

/* Chooses the warps per block and the stages per ring. For heads up to 128 a block takes at most
 * half of an SM's shared memory, because the preceding kernel has the rest; with many units,
 * several blocks share an SM. Returns false if even two warps with two stages do not fit. */
template <int D>
static bool attn_quant_choose(const struct cuda_backend *cu, int k_type, int v_type, int units,
                              int *warps, struct attn_quant *c)
{
    int per_sm = D > 128 ? 1 : units <= 2 * cu->n_sm ? 2 : units <= 3 * cu->n_sm ? 3 : 4;
    *warps = units > cu->n_sm || D > 256 ? 4 : QUANT_WARPS;
    size_t room = (cu->shared_limit + 1024) / (size_t)per_sm - 1024;
    for (; *warps >= 2; *warps /= 2) {
        for (int stages = QUANT_STAGES; stages >= 2; stages--) {
            *c = attn_quant_rings<D>(k_type, v_type, *warps, stages);
            if ((size_t)c->ring + sizeof(struct attn_quant_shared<D>) <= room)
                return true;
        }
    }
    *warps = 2;
    return (size_t)c->ring + sizeof(struct attn_quant_shared<D>) <= cu->shared_limit;
}

template <int D> static void attn_decode_quant_launch(struct cuda_backend *cu, struct attn_args p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8), units = p.kv.n_kv * groups * p.step.n_decode;
    int splits = attn_splits(cu, p.step.n_decode, p.n_heads, p.kv.n_kv), warps = 0;
    struct attn_quant c = {};
    CHECK(attn_quant_choose<D>(cu, p.kv.type & 255, p.kv.type >> 8, units, &warps, &c),
          "attn_decode_quant_fits() held");
    p.n_split = cu->n_sm / units; /* one wave of blocks */
    p.n_split = p.n_split < 1 ? 1 : p.n_split > splits ? splits : p.n_split;
    p.n_split = p.n_split > QUANT_PARTS ? QUANT_PARTS : p.n_split;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    cuda_launch(cu, attn_decode_quant_kernel<D>, grid, warps * 32,
                (size_t)c.ring + sizeof(struct attn_quant_shared<D>), LAUNCH_EARLY, p, c);
}

template <int D> static bool attn_quant_has_room(const struct cuda_backend *cu)
{
    struct attn_quant c;
    int warps;
    return attn_quant_choose<D>(cu, cu->shape.k_type, cu->shape.v_type, 1, &warps, &c);
}

bool attn_decode_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    int D = l->k_dim;
    return attn_quant_suits(cu, l) && (D == 64    ? attn_quant_has_room<64>(cu)
                                       : D == 96  ? attn_quant_has_room<96>(cu)
                                       : D == 128 ? attn_quant_has_room<128>(cu)
                                       : D == 256 ? attn_quant_has_room<256>(cu)
                                                  : attn_quant_has_room<512>(cu));
}

void attn_decode_quant(struct cuda_backend *cu, const struct attn_args &p)
{
    switch (p.kv.head_dim) {
    case 64:
        attn_decode_quant_launch<64>(cu, p);
        break;
    case 96:
        attn_decode_quant_launch<96>(cu, p);
        break;
    case 128:
        attn_decode_quant_launch<128>(cu, p);
        break;
    case 256:
        attn_decode_quant_launch<256>(cu, p);
        break;
    default:
        attn_decode_quant_launch<512>(cu, p);
        break;
    }
}
