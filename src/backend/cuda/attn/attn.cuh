/*
 * What all attention kernels share: their view of the paged KV cache, their arguments, and MMA in
 * the cache's type. Does not depend on how a kernel partitions its work.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_CUH
#define STEEL_BACKEND_CUDA_ATTN_CUH

#include "backend/cuda/attn/attn_layer.h"

struct kv_view {
    const uint8_t *k, *v; /* (n_pages, K, page_len, D) */
    int n_kv, page_len, page_shift, head_dim;
    int type; /* of keys and values; of a quantised cache, key type + 256 * value type (kv_quant.cuh) */
};

/* How q, k and v are made from the raw projections: see struct attn_layer. */
struct attn_heads_spec {
    int row_width, q_stride; /* floats of a row; from one query to the next, its gate included */
    struct attn_norm norm[ATTN_PARTS];
    bool whole, k_is_v, shares_kv;
    float temp_beta;
    int temp_len;
};

struct attn_args {
    struct kv_view kv;
    struct step step;
    const float *q; /* (n_tokens, H, D) rotated; or raw projections (n_tokens, H + 2K, D) */
    float *a;       /* (n_tokens, H, D) */
    const float *q_norm, *k_norm;
    int n_heads, n_rot, window, n_split,
        cluster; /* n_split: splits of the context, a multiple of cluster */
    float eps, scale;
    float *split_acc, *split_ml;
    int32_t *split_count;
    float *records;  /* attn_decode_split.cu: (units, n_split, 8 * D / 4, 8) */
    uint8_t *panels; /* a in the layout of gemm_cluster.cu, panel_rows rows per tile; or NULL */
    float *scale_of; /* (n_tokens) scale of the rows in panels: 1 */
    int panel_rows;
    /* Read only by the kernels for any layer (attn_any, attn_decode_wide, attn_prefill_wide). */
    int v_dim;
    bool bidirectional;   /* no causal mask: attn_any only */
    const int32_t *spans; /* see attn_layer.h: attn_any only */
    bool span_only;
    const float *sinks; /* (H) or NULL */
    float softcap;      /* 0 = none */
    const float *gate;  /* row t, head h: gate + t * gate_row + h * gate_head, (v_dim); or NULL */
    int gate_row, gate_head;
    bool raw; /* q is raw projections */
    struct attn_heads_spec heads;
    bool chunked; /* see attn_layer.h: attn_any only */
    /* attn_heads_kernel only */
    bool norm_late;
    bool exact; /* cuda_backend.exact: attn_prefill_wide only */
    int temp_offset;
    bool temp_smooth;
    const float *rel_query, *rel; /* attn_layer.h */
    int rel_dim, rel_len;
};

DEVICE float score_capped(float s, float cap)
{
    return cap * tanhf(s / cap);
}
DEVICE float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
/* The term a head's sink adds to its softmax sum. `top` is the largest score, in units of log2. */
DEVICE float attn_sink(const struct attn_args &p, int h, float top)
{
    return p.sinks ? fast_exp2(p.sinks[h] * 1.4426950408889634f - top) : 0.0f;
}
/* The gate of a row's head, or NULL. */
DEVICE const float *attn_gate(const struct attn_args &p, int t, int h)
{
    return p.gate ? p.gate + (size_t)t * (size_t)p.gate_row + (size_t)h * (size_t)p.gate_head
                  : NULL;
}

DEVICE uint32_t word_of(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
template <bool BF16>
DEVICE void mma_kv(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
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
/* x and y rounded to a pair of the cache's type, and the rounding residue as a second pair */
template <bool BF16> DEVICE void split_pair(float x, float y, uint32_t *hi, uint32_t *lo)
{
    uint32_t p = pack_kv<BF16>(x, y);
    *hi = p;
    *lo = pack_kv<BF16>(x - unpack_kv<BF16>(p & 0xffff), y - unpack_kv<BF16>(p >> 16));
}

/* Loads what norm and RoPE of row t need: gains of queries and (warp 0) of the key, cos and sin.
 * They do not depend on the projections, so this runs before dependency_wait. */
template <int D>
DEVICE void head_load(const struct attn_args &p, int t, const float *const (&gain)[2], int half,
                      float (&gains)[2][D / 32], float2 (&cos_sin)[D / 64])
{
    enum { PER = D / 32 };
    int lane = lane_id(), w = warp_id();
#pragma unroll
    for (int i = 0; i < 2 * PER; i++)
        gains[i / PER][i % PER] =
            gain[i / PER] && (i < PER || w == 0) ? gain[i / PER][lane + 32 * (i % PER)] : 1.0f;
#pragma unroll
    for (int i = 0; i < D / 64; i++)
        if (lane + 32 * i < half)
            cos_sin[i] = p.step.rope[(size_t)t * (size_t)half + (size_t)(lane + 32 * i)];
}

/* One warp: norm (if `norm`) and RoPE (if `rotate`) of a head. Lane l holds elements l, l + 32,
 * .. The result goes to `head` in shared memory. */
template <int D>
DEVICE void head_norm_rope(const float (&x)[D / 32], bool norm, float eps,
                           const float (&gains)[D / 32], bool rotate,
                           const float2 (&cos_sin)[D / 64], int half, float *head)
{
    int lane = lane_id();
    float sum = 0.0f, rms = 1.0f;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        sum += x[i] * x[i];
    if (norm)
        rms = rsqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        head[lane + 32 * i] = x[i] * rms * gains[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        int at = lane + 32 * i;
        if (at < half && rotate) {
            float a = head[at], b = head[at + half];
            head[at] = a * cos_sin[i].x - b * cos_sin[i].y;
            head[at + half] = b * cos_sin[i].x + a * cos_sin[i].y;
        }
    }
    __syncwarp();
}

/* Stores this step's key (which = 0) or value (1) in the cache's type: to `fresh`, (2, D), and
 * to the cache. When several groups of heads share the kv head, only the first group writes the
 * cache. */
template <int D, bool BF16>
DEVICE void fresh_put(const struct attn_args &p, int slot, int K, int kv_head, int which,
                      const float *head, uint16_t *fresh, int h0, int G)
{
    int lane = lane_id(), page = slot >> p.kv.page_shift, off = slot & (p.kv.page_len - 1);
    size_t at =
        ((((size_t)page * (size_t)K + (size_t)kv_head) << p.kv.page_shift) + (size_t)off) * D;
    uint16_t *cache = (uint16_t *)(which == 0 ? p.kv.k : p.kv.v) + at;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        float f = head[lane + 32 * i];
        uint16_t h = BF16 ? float_to_bf16(f) : float_to_half(f);
        fresh[which * D + lane + 32 * i] = h;
        if (h0 == kv_head * G)
            cache[lane + 32 * i] = h;
    }
}

/* Position of the heads of one part (q, k or v) within a row of raw projections. */
struct attn_part_layout {
    int at, n, dim, stride;
};

DEVICE struct attn_part_layout attn_part_layout_of(const struct attn_args &p, int part)
{
    int Dk = p.kv.head_dim, keys = p.n_heads * p.heads.q_stride;
    int values = keys + (p.heads.k_is_v ? 0 : p.kv.n_kv * Dk);
    struct attn_part_layout r;
    r.at = part == ATTN_Q ? 0 : part == ATTN_K ? keys : values;
    r.n = part == ATTN_Q ? p.n_heads : p.kv.n_kv;
    r.dim = part == ATTN_V ? p.v_dim : Dk;
    r.stride = part == ATTN_Q ? p.heads.q_stride : r.dim;
    return r;
}

/* Attention temperature: the factor on row t's queries. */
DEVICE float attn_temperature(const struct attn_args &p, int t)
{
    if (p.heads.temp_beta == 0.0f)
        return 1.0f;
    return 1.0f + p.heads.temp_beta * logf(1.0f + (float)(p.step.pos[t] / p.heads.temp_len));
}

/* One warp: norm and RoPE of head i of a part of row t's raw projections, to `head` in shared
 * memory. rms: the factor of a norm over all heads. LATE: the norms of queries and keys come later. */
template <bool LATE = false>
DEVICE void attn_head_prepare(const struct attn_args &p, int t, int part, int i, float rms,
                              float *head)
{
    int lane = lane_id(), half = p.n_rot >> 1;
    struct attn_part_layout r = attn_part_layout_of(p, part);
    const struct attn_norm norm = p.heads.norm[part];
    const float *from = p.q + (size_t)t * (size_t)p.heads.row_width + (size_t)(r.at + i * r.stride);
    const bool on = norm.on && (!LATE || part == ATTN_V);
    float sum = 0.0f, by = 1.0f;
    for (int e = lane; e < r.dim; e += 32) {
        float x = from[e];
        head[e] = x;
        sum += x * x;
    }
    if (on)
        by = p.heads.whole ? rms : rsqrtf(warp_sum(sum) / (float)r.dim + norm.eps);
    const float *gain = on && norm.gain ? norm.gain + (p.heads.whole ? i * r.dim : 0) : NULL;
    for (int e = lane; on && e < r.dim; e += 32)
        head[e] = head[e] * by * (gain ? gain[e] : 1.0f);
    __syncwarp();
    const float2 *rope = p.step.rope + (size_t)t * (size_t)half;
    for (int e = lane; e < half && part != ATTN_V; e += 32) {
        float2 cs = rope[e];
        float a = head[e], b = head[e + half];
        head[e] = a * cs.x - b * cs.y;
        head[e + half] = b * cs.x + a * cs.y;
    }
    __syncwarp();
}

DEVICE size_t key_offset(const struct kv_view &kv, const int32_t *pages, int key, int kv_head,
                         int D)
{
    int page = pages[key >> kv.page_shift], off = key & (kv.page_len - 1);
    return ((((size_t)page * (size_t)kv.n_kv + (size_t)kv_head) << kv.page_shift) + (size_t)off) *
           (size_t)D;
}

/* attn_decode.cu, attn_prefill_mma.cu. raw: p.q holds raw projections. */
void attn_decode(struct cuda_backend *cu, const struct attn_args &p, bool raw);
void attn_prefill_mma(struct cuda_backend *cu, const struct attn_args &p, const int2 *tiles,
                      int n_tiles);

/* attn_decode_batch.cu, attn_decode_split.cu. p.q holds raw projections. */
bool attn_decode_batch_fits(const struct cuda_backend *cu);
bool attn_decode_batch_panels_fit(const struct cuda_backend *cu, const struct attn_layer *l,
                                  int rows); /* args.panels */
void attn_decode_batch(struct cuda_backend *cu, const struct attn_args &p, int warps); /* 8, 4, 2 */
bool attn_decode_split_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_split(struct cuda_backend *cu, struct attn_args p);

/* attn_prefill.cu: the step's prompts, where the layer's shape suits it. fp16_out: the result
 * goes to cu->forms.fp16 only. */
bool attn_prefill_suits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill(struct cuda_backend *cu, const struct attn_args &p, bool fp16_out);
/* The same for `n` tiles of the step from `first` on. */
void attn_prefill_part(struct cuda_backend *cu, const struct attn_args &p, bool fp16_out, int first,
                       int n);

/* attn_prefill_quant.cu: the same over a quantised KV cache, dequantised to fp16 in cu->dequant.kv */
bool attn_prefill_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill_quant(struct cuda_backend *cu, const struct attn_args &p, bool fp16_out);

/* attn_decode_wide.cu, attn_prefill_wide.cu: every option a layer may have. Decodes also take
 * raw projections, unless a norm spans all heads. */
bool attn_decode_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_wide(struct cuda_backend *cu, const struct attn_args &p);
bool attn_prefill_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l);
bool attn_prefill_wide_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill_wide(struct cuda_backend *cu, const struct attn_args &p);

/* attn_decode_split_quant.cu: attn_decode_split and attn_decode_batch over a quantised KV cache,
 * with optional sinks for every head size. Only the batch kernel writes args.panels. */
bool attn_decode_split_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_split_quant(struct cuda_backend *cu, struct attn_args p);
bool attn_decode_batch_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_batch_quant(struct cuda_backend *cu, struct attn_args p);

/* attn_decode_quant.cu: every option, over a quantised KV cache. Also takes raw projections,
 * unless a norm spans all heads. */
bool attn_decode_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_quant(struct cuda_backend *cu, const struct attn_args &p);

/* attn.cu: `rows` rows from `first` on */
void attn_any(struct cuda_backend *cu, const struct attn_args &p, int first, int rows);

#endif
