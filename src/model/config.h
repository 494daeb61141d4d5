/*
 * What a model's metadata says, as numbers: read from GGUF keys or config.json and checked. A family
 * reads it and makes layers of it (families/family.h); from then on the layers count (layer.h).
 */
#ifndef STEEL_MODEL_CONFIG_H
#define STEEL_MODEL_CONFIG_H

#include "backend/layer.h"
#include "file/tensorfile.h"
#include "model/layout.h"

enum { CONFIG_MAX_LAYERS = 1024, CONFIG_MAX_EXPERTS_USED = 256, ROPE_MAX_FACTORS = 256 };

struct model_family; /* model/families/family.h */
struct meta_reader;  /* model/reader.h */

enum rope_kind {
    ROPE_PLAIN,
    ROPE_LINEAR,
    ROPE_LLAMA3,
    ROPE_YARN,
    ROPE_LONG,         /* factors for contexts up to the original one, others for longer ones */
    ROPE_PROPORTIONAL, /* all dims count for the frequencies, only the first `partial` turn */
};

struct rope_config {
    enum rope_kind kind;
    double theta, factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow, attn_factor; /* yarn; attn_factor 0 = 0.1 ln(factor) + 1 */
    double log_mul;                           /* yarn, as a GGUF says it; attn_factor has it */
    double partial;                           /* of a head's dims that turn */
    bool no_truncate;                         /* yarn: keep fractional correction bounds */
    bool factors; /* config.rope_short divides the frequencies; ROPE_LONG: or rope_long */
    int original_context;
};

struct config {
    const struct model_family *family;
    char arch_name[32]; /* as the file spells it */
    /* What names of a folder's tensors begin with where others have "model." and "lm_head": a text
     * model may be part of a larger one. */
    const char *hf_model, *hf_head;
    /* Blocks that draft tokens ahead (layer.h's mtp): 0, or the one that is used. Its layer is number
     * n_layers; hf_mtp: what its tensors' names begin with in a folder where others have "model." */
    int n_mtp;
    const char *hf_mtp;
    int n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_vocab;
    int n_ff, n_expert, n_expert_used, n_ff_exp;
    bool norm_topk, tied;
    bool
        headless; /* rows of the stream are wanted, not logits: weights of the head are not loaded */
    int pos_offset; /* row of position 0 in a table of positions */
    bool is_moe[CONFIG_MAX_LAYERS];
    int window[CONFIG_MAX_LAYERS]; /* 0 = full attention */
    /* Where a layer has its own: 0 = n_kv_heads, head_dim, n_ff. */
    int layer_kv_heads[CONFIG_MAX_LAYERS], layer_head_dim[CONFIG_MAX_LAYERS],
        layer_ff[CONFIG_MAX_LAYERS];
    float norm_eps, expert_scale;
    enum router_kind router;
    int n_ff_shared;             /* hidden units of the shared experts; 0 = none */
    int n_groups, n_groups_used; /* of experts; 0 = no groups */
    float attn_scale;            /* of scores; 0 = 1 / sqrt(head_dim) */
    float attn_fold;             /* what a GGUF's q norms are multiplied by, where its readers take
                                    another scale; 0 = 1 */
    float attn_softcap, head_softcap, embed_scale;
    float act_limit;  /* of ACT_SWIGLU_CLAMP */
    int n_shared_kv;  /* layers at the end that read the cache of earlier ones */
    bool k_is_v;      /* in layers that do not slide */
    int n_embd_layer; /* values of a layer's own embedding; 0 = none */
    float temp_beta;  /* attention temperature (layer.h); 0 = none */
    int temp_len;
    /* latent attention (layer.h); kv_rank 0 = none. attn_mscale multiplies the scores */
    int q_rank, kv_rank, nope_dim, rope_dim, v_dim;
    float attn_mscale;
    bool is_linear[CONFIG_MAX_LAYERS]; /* a gated delta net instead of attention */
    int linear_k_heads, linear_v_heads, linear_k_dim, linear_v_dim, conv_len;
    int n_rot, context;
    struct rope_config rope;
    struct rope_config rope_window; /* of layers that slide; theta 0: the same */
    int n_rot_window;
    float rope_short[ROPE_MAX_FACTORS], rope_long[ROPE_MAX_FACTORS]; /* (n_rot/2) */
    struct layout_config layout;                                     /* of compressed folders */
};

bool config_load(const struct tensorfile *f, struct config *c, struct error *err);

/* Whether a tensor of a folder belongs to the text model: others are left alone. */
bool config_is_text(const struct config *c, const char *tensor);
/* Whether a tensor is of a block that drafts tokens ahead. */
bool config_is_mtp(const struct config *c, const char *tensor);

/* c->rope and its factors, from either kind of file; c->context and c->head_dim are known. From a
 * folder also c->n_rot. */
bool rope_read_gguf(const struct meta_reader *in);
bool rope_read_hf(const struct meta_reader *in);
/* One object of rope_parameters or rope_scaling; *r has the defaults. */
bool rope_read_hf_object(const struct meta_reader *in, const json_t *o, struct rope_config *r);
/* freq[n_rot/2] and the factor on cos and sin. `factors` (n_rot/2) divide the frequencies, or NULL. */
void rope_frequencies(const struct rope_config *r, int n_rot, const float *factors, float *freq,
                      float *mscale);

#endif
