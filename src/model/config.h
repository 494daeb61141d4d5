/*
 * What a model is, as numbers: read from GGUF metadata or config.json, checked, and the same struct
 * for every family. Families differ by data here, never by code in the forward pass.
 */
#ifndef STEEL_MODEL_CONFIG_H
#define STEEL_MODEL_CONFIG_H

#include "file/tensorfile.h"

enum { CONFIG_MAX_LAYERS = 1024, CONFIG_MAX_EXPERTS_USED = 256 };

enum arch { ARCH_LLAMA, ARCH_MISTRAL, ARCH_QWEN2, ARCH_QWEN3, ARCH_QWEN3MOE, N_ARCHS };

enum rope_kind { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

struct rope_config {
    enum rope_kind kind;
    double theta, factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow, attn_factor; /* yarn; attn_factor 0 = 0.1 ln(factor) + 1 */
    bool no_truncate;                         /* yarn: keep fractional correction bounds */
    int original_context;
};

/* Compressed safetensors: how q4 codes and FP8 blocks are stored. */
enum packing { PACK_NONE, PACK_GPTQ, PACK_FP8 };

struct config {
    enum arch arch;
    char arch_name[32]; /* as the file spells it */
    int n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_vocab;
    int n_ff, n_expert, n_expert_used, n_ff_exp;
    bool norm_topk, tied;
    bool is_moe[CONFIG_MAX_LAYERS];
    int window[CONFIG_MAX_LAYERS]; /* 0 = full attention */
    float norm_eps, expert_scale;
    int n_rot, context;
    struct rope_config rope;
    enum packing packing;
    int gptq_group;      /* -1 = whole row */
    bool gptq_zero_plus; /* v1 files store zero - 1 */
    bool permuted_qk;    /* GGUF of the llama architecture interleaves rotary pairs */
};

bool config_load(const struct tensorfile *f, struct config *c, struct error *err);
const char *config_arch_name(enum arch a);

/* freq[n_rot/2] and the factor on cos and sin. `factors` (n_rot/2) divide the frequencies: the
 * rope_freqs tensor of a GGUF, or NULL. */
void config_rope_freq(const struct config *c, const float *factors, float *freq, float *mscale);

#endif
