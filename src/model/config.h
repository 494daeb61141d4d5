/*
 * A model's metadata as numbers, read from GGUF keys or config.json and checked. A family turns it
 * into layers (families/family.h, layer.h); after that only the layers matter.
 */
#ifndef STEEL_MODEL_CONFIG_H
#define STEEL_MODEL_CONFIG_H

#include "backend/layer.h"
#include "file/tensorfile.h"
#include "model/layout.h"

enum {
    CONFIG_MAX_LAYERS = 1024,
    CONFIG_MAX_EXPERTS_USED = 256,
    ROPE_MAX_FACTORS = 256,
    XIELU_CONSTANTS = 4
};

struct model_family; /* model/families/family.h */
struct meta_reader;  /* model/reader.h */
struct tower_config; /* vision/tower.h */
struct eagle;        /* model/eagle.h */

enum rope_kind {
    ROPE_PLAIN,
    ROPE_LINEAR,
    ROPE_LLAMA3,
    ROPE_YARN,
    ROPE_LONG,         /* one list of factors up to the original context, another beyond it */
    ROPE_PROPORTIONAL, /* frequencies use all dims, only the first `partial` rotate */
};

struct rope_config {
    enum rope_kind kind;
    double theta, factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow, attn_factor; /* yarn; attn_factor 0 = 0.1 ln(factor) + 1 */
    double log_mul;                           /* yarn; a GGUF's key, already part of attn_factor */
    double partial;                           /* fraction of a head's dims that rotate */
    bool no_truncate;                         /* yarn: keep fractional correction bounds */
    int sections[3];  /* M-RoPE: pairs that turn by time, height and width; 0, 0, 0 = no M-RoPE */
    bool interleaved; /* the sections alternate (layer.h) */
    bool factors;     /* config.rope_short divides the frequencies; ROPE_LONG: or rope_long */
    int original_context;
};

/* Factors of a folder of Falcon-H1 on inputs, products and outputs; ssm: of each part of the projection. */
struct mup_factors {
    float attn_in, attn_out, key, ssm_in, ssm_out, mlp[2], ssm[SSM_PARTS];
};

/* Of sparse attention's indexers (layer.h); heads 0: none. */
struct index_config {
    int heads, dim, chosen, block;
    bool interleaved;
};

struct config {
    const struct model_family *family;
    char arch_name[32]; /* as the file spells it */
    /* Tensor-name prefixes of the text model and its head, where a checkpoint nests it inside a
     * larger model (default "model." and "lm_head"). */
    const char *hf_model, *hf_head;
    /* Blocks that draft tokens (layer.h, mtp): 0 or 1. The block is layer n_layers. hf_mtp: its
     * tensor-name prefix in a folder (default "model."). */
    int n_mtp;
    const char *hf_mtp;
    const struct eagle *eagle; /* a head from another file that drafts instead; NULL = none */
    int n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_vocab;
    int n_ff, n_expert, n_expert_used, n_ff_exp;
    bool norm_topk, tied;
    bool headless;  /* hidden states are wanted, not logits: the head's weights are not loaded */
    int pos_offset; /* row of position 0 in the position table */
    bool is_moe[CONFIG_MAX_LAYERS];
    bool is_mlp[CONFIG_MAX_LAYERS];  /* the layer is an mlp or experts, without a mixer */
    int window[CONFIG_MAX_LAYERS];   /* 0 = full attention */
    bool no_rope[CONFIG_MAX_LAYERS]; /* attention without RoPE */
    /* Per-layer values; 0 = n_heads, n_expert_used, n_kv_heads, head_dim, n_ff. */
    int layer_heads[CONFIG_MAX_LAYERS], layer_experts_used[CONFIG_MAX_LAYERS];
    int layer_kv_heads[CONFIG_MAX_LAYERS], layer_head_dim[CONFIG_MAX_LAYERS],
        layer_ff[CONFIG_MAX_LAYERS];
    float norm_eps, expert_scale;
    enum router_kind router;
    int n_ff_shared;             /* hidden units of the shared experts; 0 = none */
    int n_latent_exp;            /* inputs of latent experts (layer.h); 0 = none */
    int n_groups, n_groups_used; /* of experts; 0 = no groups */
    float attn_scale;            /* of scores; 0 = 1 / sqrt(head_dim) */
    /* factor folded into a GGUF's q norms, whose readers assume another attn_scale; 0 = 1 */
    float attn_fold;
    float attn_softcap, head_softcap;
    float embed_scale, residual_scale, head_scale;                          /* 0 = 1 */
    float expert_limit[CONFIG_MAX_LAYERS], shared_limit[CONFIG_MAX_LAYERS]; /* of SiLU; 0 = none */
    float xielu[XIELU_CONSTANTS][CONFIG_MAX_LAYERS];                        /* as stored */
    float qk_scale;      /* the gain of a q norm without a tensor */
    bool gelu_tanh;      /* of families where only some models approximate GELU */
    bool parallel;       /* ... where only some run their mlp in parallel with the mixer */
    bool qk_norm;        /* of families where only some models have it */
    float mlp_scale;     /* of a mixture's result; 0 = 1 */
    float router_jitter; /* of SparseMixer */
    float act_limit;     /* of ACT_SWIGLU_CLAMP */
    int n_shared_kv;     /* trailing layers that read the cache of earlier ones */
    bool k_is_v;         /* in layers without a window */
    int n_streams;       /* parts of the stream (layer.h, altup); 0 = one */
    int laurel_rank;
    float
        sparsity[CONFIG_MAX_LAYERS]; /* of hidden units, in standard deviations; -INFINITY = none */
    int n_embd_layer;                /* width of the per-layer embedding; 0 = none */
    float temp_beta;                 /* attention temperature (layer.h); 0 = none */
    int temp_len, temp_offset;
    int rel_dim, rel_len; /* relative positions (layer.h); 0 = none */
    /* latent attention (layer.h; v_dim: of MiMo's attention too); kv_rank 0 = none. Scores are multiplied by attn_mscale. */
    int q_rank, kv_rank, nope_dim, rope_dim, v_dim;
    float attn_mscale, q_latent_scale, kv_latent_scale; /* factors on the normed latents; 0 = 1 */
    int n_same; /* experts without weights, after the others (layer.h) */
    /* a mixer with a recurrent state instead of attention: a gated delta net, a state-space model (k_heads: groups,
     * v_heads: heads, k_dim: values of a state, v_dim: of a head), a selective scan (k_heads: rank of its time steps, v_dim:
     * channels, k_dim: values of a channel's state) or a short convolution */
    bool is_linear[CONFIG_MAX_LAYERS];
    int linear_k_heads, linear_v_heads, linear_k_dim, linear_v_dim, conv_len;
    float beta_scale; /* of a delta net (layer.h); 0 = 1 */
    struct index_config index;
    /* DeepSeek V4: rows of a compressor's window in each layer, or 0; groups and rank of attention's output; theta of layers
     * with a compressor; hyper-connections (layer.h) */
    int compress_rate[CONFIG_MAX_LAYERS], o_groups, o_rank, hyper_rounds;
    int n_hash; /* its first layers, which route by token */
    double compress_theta, hyper_offset;
    struct mup_factors mup;
    float keep
        [3]
        [2]; /* MiniMax-01: what lightning attention, attention and mlps keep, and a factor on their result */
    int ssm_norms;        /* of Mamba-2: parts of the result that are normed apart */
    bool ssm_norm_first;  /* a state-space model's norm comes before its gate */
    float dt_min, dt_max; /* limits of a state-space model's time steps; dt_max 0 = none */
    int n_rot, context;
    bool sees_both_ways; /* attention both ways inside an image (attention.span) */
    int n_deepstack; /* layers, the first ones, that add features of an image tower's inner layers */
    const struct tower_config *tower; /* of an image tower (vision/tower.h); NULL = a text model */
    struct rope_config rope;
    struct rope_config rope_window; /* of layers with a window; theta 0: as rope */
    int n_rot_window;
    float rope_short[ROPE_MAX_FACTORS], rope_long[ROPE_MAX_FACTORS]; /* (n_rot/2) */
    struct layout_config layout;                                     /* of compressed folders */
};

bool config_load(const struct tensorfile *f, struct config *c, struct error *err);
/* Checks that hold for every family. */
bool config_check(const struct meta_reader *in);

/* Layers of the network, without an MTP block's. */
int config_net_layers(const struct config *c);

/* Whether a folder's tensor belongs to the text model. Others are ignored. */
bool config_is_text(const struct config *c, const char *tensor);

/* Length of the longest prefix that folders of some family have on the text model's tensors; 0: none. */
size_t config_root_len(const char *tensor);
/* Whether some family's folders call the head so. */
bool config_is_head(const char *tensor);
/* Whether a tensor belongs to an MTP (draft) block. */
bool config_is_mtp(const struct config *c, const char *tensor);

/* Reads c->rope and its factors; needs c->context and c->head_dim. rope_read_hf also sets
 * c->n_rot. */
bool rope_read_gguf(const struct meta_reader *in);
bool rope_read_hf(const struct meta_reader *in);
/* The sections of M-RoPE. GGUF has no key that says whether they are interleaved. */
bool rope_read_gguf_sections(const struct meta_reader *in, bool interleaved);
/* plane (n_pairs) of struct rope from the sections; false if they do not fit n_pairs. */
bool rope_planes(const struct rope_config *r, int n_pairs, uint8_t *plane);
/* Computes freq[n_rot/2] and the factor on cos and sin. factors (n_rot/2) or NULL divide the
 * frequencies. */
void rope_frequencies(const struct rope_config *r, int n_rot, const float *factors, float *freq,
                      float *mscale);

#endif
