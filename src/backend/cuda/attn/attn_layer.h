/*
 * Attention of one layer as the CUDA backend sees it: numbers and pointers taken from a struct
 * attention (layer.h) and from the step's KV cache, so that kernels do not depend on the network
 * description. All of them may differ from layer to layer. Also declares what attn.cu offers to the
 * ops.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_LAYER_H
#define STEEL_BACKEND_CUDA_ATTN_LAYER_H

#include "backend/cuda/core/cuda.h"

/* RMS norm of queries, keys or values. */
struct attn_norm {
    bool on;
    const float *gain; /* NULL = ones */
    float eps;
};

enum attn_part { ATTN_Q, ATTN_K, ATTN_V, ATTN_PARTS };

struct attn_layer {
    const struct matrix *wqkv;
    void *k, *v; /* KV cache: (n_pages, K, page_len, Dk), .. Dv */
    int n_heads, n_kv, k_dim, v_dim;
    struct attn_norm norm[ATTN_PARTS];
    bool norm_whole;    /* one norm over all heads of a row */
    const float2 *rope; /* (n_tokens, n_rot/2) cos and sin from this layer's RoPE table */
    int n_rot;
    float scale, softcap; /* softcap 0 = none */
    int window;           /* 0 = all */
    bool bidirectional;   /* no causal mask: attn_encode.cu, attn_any */
    /* (n_tokens, 2) keys of the row's span; NULL = none. span_only: a row sees no others, else also
     * those of its window. */
    const int32_t *spans;
    bool span_only;
    const float *sinks; /* (H) or NULL */
    bool gated, k_is_v, shares_kv;
    float temp_beta;
    int temp_len, temp_offset;
    bool chunked;   /* the window is a chunk: keys pos - pos % window..pos */
    bool norm_late; /* q and k are normed after RoPE */
    /* Relative positions: queries (n_tokens, H, rel_dim) or NULL, (rel_dim, rel_len). attn_any adds them to the scores. */
    const float *rel_query, *rel;
    int rel_dim, rel_len;
    bool temp_smooth; /* the temperature is not in steps of temp_len */
    bool floats;      /* the result is read as floats: no other form of it */
    bool any;         /* attn_any: relative positions, or rows of other steps may have spans */
    const struct index_choice *choice; /* rows see what an indexer chose (index.h); NULL = all */
};

/* attn.cu. True if the decode kernels for heads of 64 and 128 suit the layer: an fp16 or bf16
 * cache, page_len a power of two, and softmax(q K^T) V with at most a window and, for heads of
 * 64, sinks. */
bool attn_mma_suits(const struct cuda_backend *cu, const struct attn_layer *l);
/* True if the kernels that support every layer option suit it: heads of 64, 96, 128, 256 or 512. */
bool attn_wide_suits(const struct cuda_backend *cu, const struct attn_layer *l);
/* True if the kernels for a quantised KV cache suit it: head sizes as for attn_wide_suits, keys
 * and values each F16, Q8_0, Q4_0 or FP8, and not both F16. */
bool attn_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l);
/* True if q, k and v are made from the raw projections by RoPE and per-head norms that have
 * gains and share one eps, and by nothing else. */
bool attn_heads_plain(const struct attn_layer *l);
/* True if the decode kernel makes q, k and v from the raw projections itself. */
bool attn_takes_raw(const struct cuda_backend *cu, const struct attn_layer *l);
/* Makes q, k and v from the raw projections qkv: q to (n_tokens, H, Dk), k and v to the cache. */
void attn_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                const float *qkv, float *q);
/* The same as rows of fp16 scaled by HIDDEN_SCALE, in the order of qkv; nothing goes to the cache. */
void attn_heads_packed(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                       const float *qkv, uint16_t *to);
/* raw: the step has decodes only, and cu->act.qkv still holds raw projections. */
struct rows attn_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                        bool raw);

/* attn_gate.cu: a (rows, n_heads, v_dim) *= f(g), with g (rows, width) one value per element or one per head, and f the
 * sigmoid or softplus. */
void attn_gate(struct cuda_backend *cu, float *a, const float *g, int rows, int n_heads, int v_dim,
               int width, bool softplus);

/* Attention without a causal mask. Starts from the raw projections in cu->act.qkv. */
struct rows attn_bidirectional(struct cuda_backend *cu, const struct attn_layer *l,
                               const struct step *s);

/* attn_decode.cu: the number of splits for n_seqs decodes. attn_clusters: its kernels were
 * compiled for a GPU with thread block clusters, and this GPU has them. */
bool attn_clusters(const struct cuda_backend *cu);
int attn_splits(const struct cuda_backend *cu, int n_seqs, int n_heads, int n_kv);

/* attn_prefill_quant.cu: bytes for a prompt's keys and values as fp16, and entries of their
 * block table */
size_t attn_prefill_quant_bytes(const struct cuda_backend *cu);
size_t attn_prefill_quant_page_ints(const struct cuda_backend *cu);

/* attn_decode_split.cu: bytes of the records through which blocks combine their splits */
size_t attn_decode_split_record_bytes(const struct cuda_backend *cu);

#endif
