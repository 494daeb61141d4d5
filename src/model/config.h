/*
 * What a model's metadata says, as numbers: read from GGUF keys or config.json and checked. A family
 * reads it and makes layers of it (families/family.h); from then on the layers count (layer.h).
 */
#ifndef STEEL_MODEL_CONFIG_H
#define STEEL_MODEL_CONFIG_H

#include "file/tensorfile.h"

enum { CONFIG_MAX_LAYERS = 1024, CONFIG_MAX_EXPERTS_USED = 256 };

struct family; /* model/families/family.h */
struct reader; /* model/reader.h */

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
    const struct family *family;
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
};

bool config_load(const struct tensorfile *f, struct config *c, struct error *err);

/* c->rope, from either kind of file; c->context is known. */
bool rope_read_gguf(const struct reader *in);
bool rope_read_hf(const struct reader *in);
/* freq[n_rot/2] and the factor on cos and sin. `factors` (n_rot/2) divide the frequencies: the
 * rope_freqs tensor of a GGUF, or NULL. */
void rope_frequencies(const struct config *c, const float *factors, float *freq, float *mscale);

#endif
