/*
 * A family of models: its names in files, how its metadata becomes a config, and how the config
 * becomes a network. One file per family, data and names only; decoder.c has the common code. A
 * family made of known parts (layer.h) is a new file here and a line in families.c.
 */
#ifndef STEEL_MODEL_FAMILIES_FAMILY_H
#define STEEL_MODEL_FAMILIES_FAMILY_H

#include "file/gguf_write.h"
#include "model/build.h"
#include "model/config.h"
#include "model/reader.h"

struct model_family {
    const char *name;             /* general.architecture of its GGUF files */
    const char *hf, *hf_class;    /* model_type and architectures[0] of its config.json */
    const char *gguf_as;          /* the architecture `convert` writes, if not name */
    const char *hf_embed;         /* its token embedding in a folder; NULL: "embed_tokens" */
    bool encoder;                 /* it produces embeddings, not text */
    bool interleaved_qk;          /* rotary pairs of q and k are adjacent in its GGUF files */
    bool interleaved_folder;      /* ... and in its folders */
    bool interleaved_only_folder; /* ... in folders, not in GGUF files */
    bool (*read)(const struct meta_reader *in); /* metadata to in->c */
    void (*build)(struct net_builder *b);       /* b->c to b->net */
    /* Writes extra GGUF keys for `convert`; NULL = none. */
    void (*write)(const struct config *c, struct gguf_writer *w);
    /* Each expert's output has a factor, called ffn_down_exps.scale in GGUF. With NVFP4 experts
     * their own scales are multiplied into it. */
    bool scales_experts;
    int parts;        /* layers of the network for each of the file; 0 = 1 */
    int folder_step;  /* layers that have one number in its folders, under several names; 0 = 1 */
    bool zero_heads;  /* its GGUF gives layers with a recurrent state no KV heads */
    bool one_block;   /* its layers are a mixer or an mlp; its GGUF gives others no hidden units */
    bool rot_twice;   /* its GGUF counts twice the rotary dimensions of full layers */
    bool layer_norm;  /* its norms are LayerNorms, of this key in GGUF */
    bool rms_eps;     /* ... or of the key of RMS norms */
    bool own_windows; /* its GGUF lists the layers that have a window */
    /* Whether a config.json with its model_type is of this family; NULL = every one. */
    bool (*is_kind)(const json_t *config);
    /* Whether a folder's tensor of the text model is unused; NULL = all are used. */
    bool (*spare)(const struct config *c, const char *tensor);
};

#define FAMILY_SCALED "ffn_down_exps"

extern const struct model_family *const families[]; /* ends with NULL */
extern const struct model_family family_gemma3, family_gemma4, family_glm4_moe, family_gpt_oss,
    family_llama, family_minimax_m2, family_ministral3, family_mistral, family_mixtral, family_phi3,
    family_qwen2, family_qwen3, family_qwen3moe, family_qwen3next, family_qwen3vl,
    family_qwen3vlmoe, family_qwen35, family_qwen35moe, family_deepseek2, family_kimi_k2,
    family_glm4_moe_lite, family_bert, family_roberta, family_xlm_roberta, family_nomic_bert,
    family_modern_bert, family_dots1, family_exaone4, family_exaone_moe, family_gemma2,
    family_granite, family_granitemoe, family_hy_v3, family_mellum, family_olmo2, family_olmo3,
    family_olmoe, family_qwen2moe, family_seed_oss, family_smollm3, family_solar_open,
    family_ernie4_5, family_ernie4_5_moe, family_glm4, family_deepseek32, family_glm_dsa,
    family_minimax_m3, family_jamba, family_olmo_hybrid, family_granite_hybrid, family_mamba2,
    family_falcon_h1, family_lfm2, family_lfm2_moe, family_qwen2vl, family_glm4v, family_glm4v_moe,
    family_nemotron_h, family_nemotron_h_moe, family_arcee, family_nemotron, family_starcoder2,
    family_stablelm, family_cohere2, family_cohere2_moe, family_flex_olmo, family_mistral4,
    family_axk1, family_afmoe, family_muse_glimmer, family_laguna, family_step35, family_llama4,
    family_hunyuan, family_hunyuan_moe, family_apertus, family_bitnet;
extern const struct model_family family_gpt_neox, family_gpt2, family_phimoe, family_mimo2,
    family_youtu, family_gemma3n, family_longcat_flash, family_minimax_01, family_minimax_text_01,
    family_minimax_m1, family_deepseek4, family_inkling, family_inkling_mm;

/* Common to all encoders. */
bool encoder_read_gguf(const struct meta_reader *in);
bool encoder_finish(const struct meta_reader *in); /* after reading */
bool encoder_spare(const struct config *c, const char *tensor);

/* Names of a decoder's tensors; NULL where a family has no such tensor. */
struct decoder_names {
    struct tensor_name emb, norm, head;
    struct tensor_name attn_norm, q, k, v, o, q_norm, k_norm;
    struct tensor_name sinks, attn_post;            /* attn_post: a norm after the block */
    struct tensor_name qkv;                         /* instead of q, k and v */
    struct tensor_name attn_gate;                   /* of attention's output */
    struct tensor_name attn_sub_norm, ffn_sub_norm; /* before o, before down */
    struct tensor_name ffn_norm, gate, up, down, ffn_post;
    struct tensor_name gate_up; /* instead of gate and up */
    struct tensor_name router, choice_bias, gate_exp, up_exp, down_exp;
    struct tensor_name gate_shared, up_shared, down_shared, shared_gate;
};

/* The most common names. */
#define DECODER_ENDS                                                                               \
    .emb = {"token_embd", "model.embed_tokens"}, .norm = {"output_norm", "model.norm"},            \
    .head = {"output", "lm_head"}
#define DECODER_QKV                                                                                \
    .q = {"blk.%d.attn_q", "model.layers.%d.self_attn.q_proj"},                                    \
    .k = {"blk.%d.attn_k", "model.layers.%d.self_attn.k_proj"},                                    \
    .v = {"blk.%d.attn_v", "model.layers.%d.self_attn.v_proj"},                                    \
    .o = {"blk.%d.attn_output", "model.layers.%d.self_attn.o_proj"},                               \
    .q_norm = {"blk.%d.attn_q_norm", "model.layers.%d.self_attn.q_norm"},                          \
    .k_norm = {"blk.%d.attn_k_norm", "model.layers.%d.self_attn.k_norm"}
#define DECODER_ATTENTION                                                                          \
    DECODER_QKV, .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"}
#define DECODER_FFN                                                                                \
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.mlp.gate_proj"},                                  \
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},                                        \
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}
#define DECODER_MLP                                                                                \
    DECODER_FFN, .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"}
#define DECODER_EXPERTS                                                                            \
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.gate"},                                 \
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},              \
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},                    \
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.%d.down_proj"}
/* Shared experts as DeepSeek calls them. */
#define DECODER_SHARED                                                                             \
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_experts.gate_proj"},      \
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_experts.up_proj"},            \
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_experts.down_proj"}
/* Norms of OLMo 2 and EXAONE 4: after both blocks, none before. */
#define DECODER_NORMS_AFTER                                                                        \
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},       \
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_feedforward_layernorm"}
/* Experts as Mixtral calls them. */
#define DECODER_EXPERTS_W                                                                          \
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.block_sparse_moe.gate"},                    \
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.block_sparse_moe.experts.%d.w1"},        \
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.block_sparse_moe.experts.%d.w3"},            \
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.block_sparse_moe.experts.%d.w2"}

extern const struct decoder_names decoder_names; /* DECODER_ENDS to DECODER_EXPERTS */

/* Properties of a plain decoder that are not in its metadata. */
struct decoder {
    const struct decoder_names *names; /* NULL: decoder_names */
    bool qk_norm;                      /* RMS norms of q and k, per head */
    bool norm_late;                    /* ... after RoPE */
    bool softplus;                     /* attn_gate's activation, in place of a sigmoid */
    bool norm_whole;                   /* ... over the whole projections instead of per head */
    bool
        own_values; /* values have a width of their own, config.v_dim, which the family reads from folders */
    bool latent;             /* latent attention: the family reads its key and value lengths */
    float norm_add;          /* added to a folder's norm gains (1: stored as w - 1) */
    bool experts;            /* config.json describes experts */
    bool experts_wide;       /* ... and their width is intermediate_size */
    enum router_kind router; /* default, a GGUF may name another */
    bool windows;         /* sliding_window of config.json applies if use_sliding_window is true */
    bool windows_unasked; /* ... or absent */
    bool windows_all;     /* max_window_layers is ignored */
    enum activation act;
    const char *act_name;   /* as config.json spells it; NULL: "silu" */
    const char *act_key;    /* its key; NULL: hidden_activation or hidden_act */
    const char *eps_key;    /* of the norms in config.json; NULL: "rms_norm_eps" */
    const char *layers_key; /* NULL: "num_hidden_layers" */
    bool parallel;     /* the mlp runs in parallel with the mixer, on its norm if it has none */
    int window_period; /* by default one layer per period has full attention; 0 = none */
    bool transposed;   /* a folder's matrices are stored (in, out), except embedding and head */
    bool qkv_by_head;  /* a folder's qkv has the rows of q, k and v head by head */
    bool window_rope;  /* layers with a window have a RoPE of their own (config.rope_window) */
};

bool decoder_read(const struct meta_reader *in, const struct decoder *d);
/* After decoder_read, from a folder: the routing that DeepSeek V3 began. Experts with sigmoid scores and a bias of the
 * choice, groups, shared experts, dense first layers (first_k_dense_replace or mlp_layer_types). */
bool decoder_read_routed(const struct meta_reader *in);
/* After decoder_read, of a family with window_rope: its theta in a GGUF, which has no scaling, and n_rot_window. */
bool decoder_read_window_rope(const struct meta_reader *in);
/* For `convert`: the sections of M-RoPE, if it has any. */
void rope_write_sections(const struct config *c, struct gguf_writer *w, const char *arch);
/* For `convert`: which layers have a window, as a period if they follow one; and leading_dense_block_count. */
void decoder_write_windows(const struct config *c, struct gguf_writer *w);
void decoder_write_window_list(const struct config *c, struct gguf_writer *w); /* always a list */
void decoder_write_dense(const struct config *c, struct gguf_writer *w);
void decoder_build(struct net_builder *b, const struct decoder *d);

/* Names of an MTP block's tensors, except its decoder layer's. */
struct mtp_names {
    struct tensor_name fc, embed_norm, hidden_norm, norm;
};
/* Names where the block is stored as layer n_layers. */
extern const struct mtp_names mtp_names;
/* Sets c->n_mtp if the file has an MTP block, and what c needs about its layer, which equals the
 * last one. extra: the number of blocks according to the metadata. */
void mtp_read(const struct meta_reader *in, const struct mtp_names *n, int extra);
/* Builds the block except its layer. add: see decoder.norm_add. */
void mtp_build(struct net_builder *b, const struct mtp_names *n, float add);

/* Latent attention (deepseek2.c). */
struct latent_names {
    struct tensor_name norm, q, q_a, q_b, q_norm, kv_a, kv_norm, kv_b, k_b, v_b, o;
};
#define LATENT_MIXER(prefix)                                                                       \
    .q = {"blk.%d.attn_q", prefix ".q_proj"}, .q_a = {"blk.%d.attn_q_a", prefix ".q_a_proj"},      \
    .q_b = {"blk.%d.attn_q_b", prefix ".q_b_proj"},                                                \
    .q_norm = {"blk.%d.attn_q_a_norm", prefix ".q_a_layernorm"},                                   \
    .kv_a = {"blk.%d.attn_kv_a_mqa", prefix ".kv_a_proj_with_mqa"},                                \
    .kv_norm = {"blk.%d.attn_kv_a_norm", prefix ".kv_a_layernorm"},                                \
    .kv_b = {"blk.%d.attn_kv_b", prefix ".kv_b_proj"},                                             \
    .k_b = {"blk.%d.attn_k_b", prefix ".k_b_proj"},                                                \
    .v_b = {"blk.%d.attn_v_b", prefix ".v_b_proj"}, .o = {"blk.%d.attn_output", prefix ".o_proj"}
/* From a GGUF, after decoder_read: the sizes, without the router. */
bool latent_read_gguf(const struct meta_reader *in);
bool latent_check(const struct meta_reader *in); /* after reading */
void latent_build(struct net_builder *b, const struct latent_names *n, int layer,
                  const struct rope *rope, struct mixer *m);
void latent_write(const struct config *c, struct gguf_writer *w);

/* State-space models of Mamba-2 (mamba.c). Names of the tensors, and keys of config.json. */
struct ssm_names {
    struct tensor_name in, conv, conv_bias, dt, decay, skip, norm, out;
};
#define SSM_NAMES(prefix)                                                                          \
    .in = {"blk.%d.ssm_in", prefix ".in_proj"}, .conv = {"blk.%d.ssm_conv1d", prefix ".conv1d"},   \
    .conv_bias = {"=blk.%d.ssm_conv1d.bias", "=" prefix ".conv1d.bias"},                           \
    .dt = {"=blk.%d.ssm_dt.bias", "=" prefix ".dt_bias"},                                          \
    .decay = {"=blk.%d.ssm_a", "=" prefix ".A_log"}, .skip = {"=blk.%d.ssm_d", "=" prefix ".D"},   \
    .norm = {"blk.%d.ssm_norm", prefix ".norm"}, .out = {"blk.%d.ssm_out", prefix ".out_proj"}
struct ssm_keys {
    const char *heads, *head_dim, *state, *groups, *conv;
};
bool ssm_read(const struct meta_reader *in, const struct ssm_keys *keys);
void ssm_build(struct net_builder *b, const struct ssm_names *n, int layer, struct mixer *m);
/* For `convert`: the sizes. */
void ssm_write(const struct config *c, struct gguf_writer *w);

/* Gemma 4's parts that Gemma 3n has, too. */
extern const struct decoder gemma4_decoder;
bool gemma4_check_layers(const struct meta_reader *in);
void gemma4_build(struct net_builder *b);
bool gemma4_spare(const struct config *c, const char *tensor);

/* Parts of decoder_build, for families that modify them. */
void decoder_ends(struct net_builder *b, const struct decoder *d); /* embedding and head */
void decoder_mixer(struct net_builder *b, const struct decoder *d, int layer,
                   const struct rope *rope, struct mixer *m);
void decoder_mlp(struct net_builder *b, const struct decoder *d, int layer, struct mlp *m);
void decoder_router(struct net_builder *b, const struct decoder *d, int layer, struct mlp *m);

#endif
