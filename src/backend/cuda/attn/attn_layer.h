/*
 * One layer's attention as the CUDA backend sees it: plain numbers made from a struct attention
 * (layer.h) and the step's cache, so that kernels know nothing of networks. Layers of one network may
 * differ in all of them. Also what attn.cu offers to the ops.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_LAYER_H
#define STEEL_BACKEND_CUDA_ATTN_LAYER_H

#include "backend/cuda/core/cuda.h"

/* Norm of queries, keys or values. */
struct attn_norm {
    bool on;
    const float *gain; /* NULL = ones */
    float eps;
};

enum attn_part { ATTN_Q, ATTN_K, ATTN_V, ATTN_PARTS };

struct attn_layer {
    const struct matrix *wqkv;
    void *k, *v; /* the cache it reads: (n_pages, K, page_len, Dk), .. Dv */
    int n_heads, n_kv, k_dim, v_dim;
    struct attn_norm norm[ATTN_PARTS];
    bool norm_whole;    /* of all heads at once */
    const float2 *rope; /* (n_tokens, n_rot/2) the step's turns by this layer's table */
    int n_rot;
    float scale, softcap; /* softcap 0 = none */
    int window;           /* 0 = all */
    bool bidirectional;   /* to both sides: attn_encode.cu, attn_any */
    const float *sinks;   /* (H) or NULL */
    bool gated, k_is_v, shares_kv;
    float temp_beta;
    int temp_len;
};

/* attn.cu. The kernels of decodes for heads of 64 and 128 suit the layer: halves or bf16 in the cache,
 * pages of a power of two, nothing beyond softmax(q K^T) V but a window and, of 64, sinks. */
bool attn_tensor(const struct cuda_backend *cu, const struct attn_layer *l);
/* The kernels for every part suit it: heads of 64, 96, 128, 256 or 512. */
bool attn_wide(const struct cuda_backend *cu, const struct attn_layer *l);
/* Those for a cache of codes suit it: heads as for attn_wide; keys and values of F16 Q8_0 Q4_0 FP8, not
 * both of F16. */
bool attn_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l);
/* q, k and v come of raw projections by norms per head with gains and one eps, RoPE, and nothing
 * else. */
bool attn_heads_plain(const struct attn_layer *l);
/* Decodes make q, k and v of raw projections by themselves. */
bool attn_raw(const struct cuda_backend *cu, const struct attn_layer *l);
/* q, k, v of the raw projections qkv: q (n_tokens, H, Dk), k and v to the cache. */
void attn_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                const float *qkv, float *q);
/* raw: the step is decodes only and q, k, v are still raw projections in cu->qkv. */
struct rows attn_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                        bool raw);

/* The same for rows that see each other both ways, from the projections in cu->qkv on. */
struct rows attn_both_ways(struct cuda_backend *cu, const struct attn_layer *l,
                           const struct step *s);

/* attn_decode.cu: stretches that n_seqs decodes of so many heads are cut into. attn_clusters: its
 * kernels were compiled for a GPU that has clusters, and this is one. */
bool attn_clusters(const struct cuda_backend *cu);
int attn_splits(const struct cuda_backend *cu, int n_seqs, int n_heads, int n_kv);

/* attn_prefill_quant.cu: room for keys and values of prompts as halves, and for where they lie */
size_t attn_prefill_quant_bytes(const struct cuda_backend *cu);
size_t attn_prefill_quant_page_ints(const struct cuda_backend *cu);

/* attn_decode_split.cu: a few decodes */
size_t attn_decode_split_record_bytes(const struct cuda_backend *cu);

#endif
