/*
 * What the kernels of attention share: the paged cache as they see it, their arguments, and
 * products in the cache's type. Knows nothing of how a kernel cuts its work.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_CUH
#define STEEL_BACKEND_CUDA_ATTN_CUH

#include "backend/cuda/attn/attn_layer.h"

struct kv_view {
    const uint8_t *k, *v; /* (n_pages, K, page_len, D) */
    int n_kv, page_len, page_shift, head_dim;
    int type; /* of both; or, of codes, keys + 256 * values: kv_quant.cuh */
};

/* How q, k and v come of raw projections: see struct attn_layer. */
struct attn_heads_rule {
    int width, each; /* floats of a row; of a query and its gate */
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
    int n_heads, n_rot, window, n_split, cluster; /* n_split: a multiple of cluster */
    float eps, scale;
    float *split_acc, *split_ml;
    int32_t *split_count;
    float *records;  /* attn_decode_split.cu: (units, n_split, 8 * D / 4, 8) */
    uint8_t *panels; /* a in the order of gemm_cluster.cu, panel_rows to a tile; or NULL */
    float *scale_of; /* (n_tokens) what undoes their scale: one */
    int panel_rows;
    uint8_t *row_records; /* or in that of rows.cuh; or NULL */
    /* What only the kernels for any layer know (attn_any, attn_decode_wide, attn_prefill_wide). */
    int v_dim;
    bool both;          /* rows see later keys too: attn_any alone */
    const float *sinks; /* (H) or NULL */
    float softcap;      /* 0 = none */
    const float
        *gate; /* of row t and head h: gate + t * gate_row + h * gate_head, (v_dim); or NULL */
    int gate_row, gate_head;
    bool raw; /* q is raw projections */
    struct attn_heads_rule heads;
};

DEVICE float score_capped(float s, float cap)
{
    return cap * tanhf(s / cap);
}
DEVICE float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
/* What a head's sink adds to a sum of probabilities whose largest score, of powers of two, is top. */
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
/* x and y as a pair, and the pair of what that lost */
template <bool BF16> DEVICE void split_pair(float x, float y, uint32_t *hi, uint32_t *lo)
{
    uint32_t p = pack_kv<BF16>(x, y);
    *hi = p;
    *lo = pack_kv<BF16>(x - unpack_kv<BF16>(p & 0xffff), y - unpack_kv<BF16>(p >> 16));
}

/* What norm and rotation of row t's heads take: gains of queries and (warp 0) of the key, turns.
 * Known before the projections are. */
template <int D>
DEVICE void head_load(const struct attn_args &p, int t, const float *const (&gain)[2], int half,
                      float (&gains)[2][D / 32], float2 (&turns)[D / 64])
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
            turns[i] = p.step.rope[(size_t)t * (size_t)half + (size_t)(lane + 32 * i)];
}

/* A warp: norm, where asked for, and rotation of a head of which lane l has elements l, l + 32,
 * ..; the result lies in `head`, in shared memory. */
template <int D>
DEVICE void head_turn(const float (&x)[D / 32], bool norm, float eps, const float (&gains)[D / 32],
                      bool turn, const float2 (&turns)[D / 64], int half, float *head)
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
        if (at < half && turn) {
            float a = head[at], b = head[at + half];
            head[at] = a * turns[i].x - b * turns[i].y;
            head[at + half] = b * turns[i].x + a * turns[i].y;
        }
    }
    __syncwarp();
}

/* This step's key (which: 0) or value (1) of a kv head of K as the cache has it: to fresh, (2,
 * D), and, by the first of the groups of heads that read it, to the cache. */
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

/* Where a row's heads of one part begin, how many and how far apart they are. */
struct attn_heads_run {
    int at, n, dim, stride;
};

DEVICE struct attn_heads_run attn_heads_run_of(const struct attn_args &p, int part)
{
    int Dk = p.kv.head_dim, keys = p.n_heads * p.heads.each;
    int values = keys + (p.heads.k_is_v ? 0 : p.kv.n_kv * Dk);
    struct attn_heads_run r;
    r.at = part == ATTN_Q ? 0 : part == ATTN_K ? keys : values;
    r.n = part == ATTN_Q ? p.n_heads : p.kv.n_kv;
    r.dim = part == ATTN_V ? p.v_dim : Dk;
    r.stride = part == ATTN_Q ? p.heads.each : r.dim;
    return r;
}

/* What row t's queries are multiplied by. */
DEVICE float attn_temperature(const struct attn_args &p, int t)
{
    if (p.heads.temp_beta == 0.0f)
        return 1.0f;
    return 1.0f + p.heads.temp_beta * logf(1.0f + (float)(p.step.pos[t] / p.heads.temp_len));
}

/* A warp: head i of a part of row t's raw projections, normed and rotated, to `head` in shared memory.
 * rms: what a norm of all heads multiplies by. */
DEVICE void attn_head_make(const struct attn_args &p, int t, int part, int i, float rms,
                           float *head)
{
    int lane = lane_id(), half = p.n_rot >> 1;
    struct attn_heads_run r = attn_heads_run_of(p, part);
    const struct attn_norm norm = p.heads.norm[part];
    const float *from = p.q + (size_t)t * (size_t)p.heads.width + (size_t)(r.at + i * r.stride);
    float sum = 0.0f, by = 1.0f;
    for (int e = lane; e < r.dim; e += 32) {
        float x = from[e];
        head[e] = x;
        sum += x * x;
    }
    if (norm.on)
        by = p.heads.whole ? rms : rsqrtf(warp_sum(sum) / (float)r.dim + norm.eps);
    const float *gain = norm.on && norm.gain ? norm.gain + (p.heads.whole ? i * r.dim : 0) : NULL;
    for (int e = lane; norm.on && e < r.dim; e += 32)
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

/* attn_decode.cu, attn_prefill_mma.cu; raw: q, k, v are still raw projections */
void attn_decode(struct cuda_backend *cu, const struct attn_args &p, bool raw);
void attn_prefill_mma(struct cuda_backend *cu, const struct attn_args &p, const int2 *tiles,
                      int n_tiles);

/* attn_decode_batch.cu, attn_decode_split.cu: raw projections */
bool attn_decode_batch_fits(const struct cuda_backend *cu);
bool attn_decode_batch_records_fit(const struct cuda_backend *cu, const struct attn_layer *l,
                                   int rows); /* args.row_records */
bool attn_decode_batch_panels_fit(const struct cuda_backend *cu, const struct attn_layer *l,
                                  int rows); /* args.panels */
void attn_decode_batch(struct cuda_backend *cu, const struct attn_args &p, int warps); /* 8, 4, 2 */
bool attn_decode_split_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_split(struct cuda_backend *cu, struct attn_args p);

/* attn_prefill.cu: prompts of a step, where the shape suits it. halves: their rows go to half_in and
 * nowhere else. */
bool attn_prefill_suits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill(struct cuda_backend *cu, const struct attn_args &p, bool halves);
/* Tiles `first`.. of the step, n of them. */
void attn_prefill_part(struct cuda_backend *cu, const struct attn_args &p, bool halves, int first,
                       int n);

/* attn_prefill_quant.cu: the same over a cache of codes, which become halves in cu->expanded */
bool attn_prefill_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill_quant(struct cuda_backend *cu, const struct attn_args &p, bool halves);

/* attn_decode_wide.cu, attn_prefill_wide.cu: every part a layer may have. Decodes take raw projections
 * too, unless norms are of all heads. */
bool attn_decode_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_wide(struct cuda_backend *cu, const struct attn_args &p);
bool attn_prefill_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l);
bool attn_prefill_wide_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_prefill_wide(struct cuda_backend *cu, const struct attn_args &p);

/* attn_decode_split_quant.cu: attn_decode_split and attn_decode_batch over a cache of codes, sinks of any
 * heads; args.panels: of the latter */
bool attn_decode_split_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_split_quant(struct cuda_backend *cu, struct attn_args p);
bool attn_decode_batch_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_batch_quant(struct cuda_backend *cu, struct attn_args p);

/* attn_decode_quant.cu: every part, over a cache of codes. Raw projections too, unless norms are of all
 * heads. */
bool attn_decode_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l);
void attn_decode_quant(struct cuda_backend *cu, const struct attn_args &p);

/* attn.cu: rows from `first` on */
void attn_any(struct cuda_backend *cu, const struct attn_args &p, int first, int rows);

#endif
