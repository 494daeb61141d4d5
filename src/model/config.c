/*
 * Metadata to struct config. Every number is range-checked here, so that nothing after it needs to:
 * products of any three of them fit in 64 bits. Knows file formats' key names; does not see tensors
 * but to tell which layers of a GGUF are sparse.
 */
#include "model/config.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *gguf, *hf, *hf_class;
} archs[N_ARCHS] = {
    [ARCH_LLAMA] = {"llama", "llama", "LlamaForCausalLM"},
    [ARCH_MISTRAL] = {"mistral", "mistral", "MistralForCausalLM"},
    [ARCH_QWEN2] = {"qwen2", "qwen2", "Qwen2ForCausalLM"},
    [ARCH_QWEN3] = {"qwen3", "qwen3", "Qwen3ForCausalLM"},
    [ARCH_QWEN3MOE] = {"qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"},
};

#define SUPPORTED "Steel runs llama, mistral, qwen2, qwen3 and qwen3moe"

const char *config_arch_name(enum arch a)
{
    return archs[a].gguf;
}

/* One source of numbers with two spellings of the keys. */
struct source {
    const struct tensorfile *f;
    struct config *c;
    struct error *err;
};

static bool range_check(struct source *s, const char *key, double v, double lo, double hi)
{
    if (v >= lo && v <= hi)
        return true;
    return error_set(s->err, "%s: %s: %g is outside %g..%g", s->f->path, key, v, lo, hi);
}

/* GGUF */

static bool gguf_int(struct source *s, const char *suffix, int lo, int hi, bool need, int *out)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", s->c->arch_name, suffix);
    const struct meta *m = tensorfile_meta(s->f, key);
    if (!m)
        return need ? error_set(s->err, "%s: %s: missing", s->f->path, key) : true;
    int64_t v;
    if (!meta_get_int(s->f, key, &v))
        return error_set(s->err, "%s: %s: not an integer", s->f->path, key);
    if (!range_check(s, key, (double)v, lo, hi))
        return false;
    *out = (int)v;
    return true;
}

static bool gguf_float(struct source *s, const char *suffix, double lo, double hi, bool need,
                       double *out)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", s->c->arch_name, suffix);
    if (!tensorfile_meta(s->f, key))
        return need ? error_set(s->err, "%s: %s: missing", s->f->path, key) : true;
    double v;
    if (!meta_get_float(s->f, key, &v))
        return error_set(s->err, "%s: %s: not a number", s->f->path, key);
    if (!range_check(s, key, v, lo, hi))
        return false;
    *out = v;
    return true;
}

static bool gguf_rope(struct source *s)
{
    struct rope_config *r = &s->c->rope;
    r->theta = 10000;
    if (!gguf_float(s, "rope.freq_base", 1, 1e12, false, &r->theta))
        return false;
    char key[128];
    snprintf(key, sizeof key, "%s.rope.scaling.type", s->c->arch_name);
    char *kind = meta_get_string(s->f, key);
    bool linear = kind && !strcmp(kind, "linear"), yarn = kind && !strcmp(kind, "yarn");
    bool known = !kind || linear || yarn || !strcmp(kind, "none");
    if (!known)
        error_set(s->err, "%s: %s: \"%s\" is not supported (none, linear, yarn are)", s->f->path,
                  key, kind);
    mem_free(kind);
    if (!known)
        return false;
    r->kind = linear ? ROPE_LINEAR : yarn ? ROPE_YARN : ROPE_PLAIN;
    r->factor = 1;
    r->original_context = s->c->context;
    r->beta_fast = 32;
    r->beta_slow = 1;
    double attn = 1;
    if (!gguf_float(s, "rope.scaling.factor", 1e-3, 1e6, r->kind != ROPE_PLAIN, &r->factor) ||
        !gguf_int(s, "rope.scaling.original_context_length", 1, 1 << 30, false,
                  &r->original_context) ||
        !gguf_float(s, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !gguf_float(s, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !gguf_float(s, "rope.scaling.attn_factor", 1e-3, 1e3, false, &attn))
        return false;
    if (r->kind == ROPE_YARN)
        r->attn_factor = attn * (0.1 * log(r->factor > 1 ? r->factor : 1) + 1);
    return true;
}

static bool gguf_config(struct source *s)
{
    struct config *c = s->c;
    char *name = meta_get_string(s->f, "general.architecture");
    if (!name)
        return error_set(s->err, "%s: general.architecture: missing", s->f->path);
    int found = -1;
    for (int i = 0; i < N_ARCHS; i++)
        if (!strcmp(name, archs[i].gguf))
            found = i;
    if (found < 0)
        error_set(s->err, "%s: architecture \"%.40s\" is not supported; " SUPPORTED, s->f->path,
                  name);
    else
        snprintf(c->arch_name, sizeof c->arch_name, "%s", name);
    mem_free(name);
    if (found < 0)
        return false;
    c->arch = (enum arch)found;
    c->permuted_qk = c->arch == ARCH_LLAMA || c->arch == ARCH_MISTRAL;

    double eps = 1e-6, scale = 1;
    int window = 0;
    if (!gguf_int(s, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !gguf_int(s, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
        !gguf_int(s, "attention.head_count", 1, 1 << 14, true, &c->n_heads))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    if (!gguf_int(s, "attention.head_count_kv", 1, 1 << 14, false, &c->n_kv_heads) ||
        !gguf_int(s, "attention.key_length", 1, 1 << 14, false, &c->head_dim) ||
        !gguf_int(s, "feed_forward_length", 0, 1 << 24, false, &c->n_ff) ||
        !gguf_int(s, "context_length", 1, 1 << 30, false, &c->context) ||
        !gguf_float(s, "attention.layer_norm_rms_epsilon", 0, 1, true, &eps) ||
        !gguf_int(s, "expert_count", 0, 4096, false, &c->n_expert) ||
        !gguf_int(s, "expert_used_count", 0, CONFIG_MAX_EXPERTS_USED, c->n_expert > 0,
                  &c->n_expert_used) ||
        !gguf_int(s, "attention.sliding_window", 0, 1 << 30, false, &window))
        return false;
    int v_dim = c->head_dim;
    if (!gguf_int(s, "attention.value_length", 1, 1 << 14, false, &v_dim))
        return false;
    if (v_dim != c->head_dim)
        return error_set(s->err, "%s: %s.attention.value_length: %d differs from key_length %d",
                         s->f->path, c->arch_name, v_dim, c->head_dim);
    c->n_ff_exp = c->n_ff;
    c->n_rot = c->head_dim;
    if (!gguf_int(s, "expert_feed_forward_length", 1, 1 << 24, false, &c->n_ff_exp) ||
        !gguf_int(s, "rope.dimension_count", 0, 1 << 14, false, &c->n_rot) ||
        !gguf_float(s, "expert_weights_scale", 0, 1e6, false, &scale))
        return false;
    char key[128];
    snprintf(key, sizeof key, "%s.expert_weights_norm", c->arch_name);
    c->norm_topk = true;
    meta_get_bool(s->f, key, &c->norm_topk);
    c->norm_eps = (float)eps;
    c->expert_scale = scale == 0 ? 1.0f : (float)scale;
    const struct tensor *emb = tensorfile_find(s->f, "token_embd.weight");
    if (!emb)
        return error_set(s->err, "%s: tensor token_embd.weight: missing", s->f->path);
    if (!range_check(s, "vocabulary (token_embd.weight rows)", (double)emb->dims[1], 1, 1 << 24))
        return false;
    c->n_vocab = (int)emb->dims[1];
    c->tied = !tensorfile_find(s->f, "output.weight");
    for (int i = 0; i < c->n_layers; i++) {
        snprintf(key, sizeof key, "blk.%d.ffn_gate_inp.weight", i);
        c->is_moe[i] = c->n_expert > 0 && tensorfile_find(s->f, key);
        c->window[i] = window;
    }
    return gguf_rope(s);
}

/* Hugging Face */

/* First of two spellings that is present and not null. */
static const json_t *hf_get(const json_t *o, const char *a, const char *b)
{
    const json_t *v = json_object_get(o, a);
    if ((!v || json_is_null(v)) && b)
        v = json_object_get(o, b);
    return v && !json_is_null(v) ? v : NULL;
}

static bool hf_int(struct source *s, const char *a, const char *b, int lo, int hi, bool need,
                   int *out)
{
    const json_t *v = hf_get(s->f->config, a, b);
    if (!v)
        return need ? error_set(s->err, "%s: config.json: %s: missing", s->f->path, a) : true;
    if (!json_is_integer(v))
        return error_set(s->err, "%s: config.json: %s: not an integer", s->f->path, a);
    if (!range_check(s, a, (double)json_integer_value(v), lo, hi))
        return false;
    *out = (int)json_integer_value(v);
    return true;
}

static bool hf_number(struct source *s, const json_t *o, const char *key, double lo, double hi,
                      bool need, double *out)
{
    const json_t *v = hf_get(o, key, NULL);
    if (!v)
        return need ? error_set(s->err, "%s: config.json: %s: missing", s->f->path, key) : true;
    if (!json_is_number(v))
        return error_set(s->err, "%s: config.json: %s: not a number", s->f->path, key);
    if (!range_check(s, key, json_number_value(v), lo, hi))
        return false;
    *out = json_number_value(v);
    return true;
}

static bool hf_bool(struct source *s, const char *key, bool *out)
{
    const json_t *v = hf_get(s->f->config, key, NULL);
    if (!v)
        return true;
    if (!json_is_boolean(v))
        return error_set(s->err, "%s: config.json: %s: not true or false", s->f->path, key);
    *out = json_is_true(v);
    return true;
}

static bool hf_rope(struct source *s)
{
    struct rope_config *r = &s->c->rope;
    const json_t *config = s->f->config;
    const json_t *params = hf_get(config, "rope_parameters", NULL); /* transformers 5 */
    const json_t *scaling = params ? params : hf_get(config, "rope_scaling", NULL);
    r->theta = 10000;
    r->factor = 1;
    r->original_context = s->c->context;
    if (!hf_number(s, config, "rope_theta", 1, 1e12, false, &r->theta))
        return false;
    if (!scaling)
        return true;
    if (!json_is_object(scaling))
        return error_set(s->err, "%s: config.json: rope_scaling: not an object", s->f->path);
    const json_t *kind = hf_get(scaling, "rope_type", "type");
    if (kind && !json_is_string(kind))
        return error_set(s->err, "%s: config.json: rope_type: not a string", s->f->path);
    const char *name = kind ? json_string_value(kind) : "default";
    static const char *const names[] = {"default", "linear", "llama3", "yarn"};
    int found = -1;
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i]))
            found = i;
    if (found < 0)
        return error_set(s->err,
                         "%s: config.json: rope_type \"%.40s\" is not supported (default, linear, "
                         "llama3, yarn are)",
                         s->f->path, name);
    r->kind = (enum rope_kind)found;
    r->beta_fast = 32;
    r->beta_slow = 1;
    double original = r->original_context, mscale = 0, mscale_all = 0;
    const json_t *truncate = hf_get(scaling, "truncate", NULL);
    r->no_truncate = truncate && json_is_false(truncate);
    bool llama3 = r->kind == ROPE_LLAMA3;
    if (!hf_number(s, scaling, "rope_theta", 1, 1e12, false, &r->theta) ||
        !hf_number(s, scaling, "factor", 1e-3, 1e6, r->kind != ROPE_PLAIN, &r->factor) ||
        !hf_number(s, scaling, "original_max_position_embeddings", 1, 1 << 30, llama3, &original) ||
        !hf_number(s, scaling, "low_freq_factor", 1e-6, 1e6, llama3, &r->low_freq_factor) ||
        !hf_number(s, scaling, "high_freq_factor", 1e-6, 1e6, llama3, &r->high_freq_factor) ||
        !hf_number(s, scaling, "beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !hf_number(s, scaling, "beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !hf_number(s, scaling, "attention_factor", 1e-3, 1e3, false, &r->attn_factor) ||
        !hf_number(s, scaling, "mscale", 0, 1e3, false, &mscale) ||
        !hf_number(s, scaling, "mscale_all_dim", 0, 1e3, false, &mscale_all))
        return false;
    r->original_context = (int)original;
    if (r->kind == ROPE_YARN && r->attn_factor == 0 && mscale > 0 && mscale_all > 0) {
        double l = log(r->factor > 1 ? r->factor : 1);
        r->attn_factor = (0.1 * mscale * l + 1) / (0.1 * mscale_all * l + 1);
    }
    return true;
}

static bool hf_packing(struct source *s)
{
    struct config *c = s->c;
    const json_t *q = hf_get(s->f->config, "quantization_config", NULL);
    if (!q)
        return true;
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    if (!method)
        return error_set(s->err, "%s: config.json: quantization_config.quant_method: missing",
                         s->f->path);
    if (!strcmp(method, "gptq")) {
        double bits = 0, group = 0;
        if (!hf_number(s, q, "bits", 1, 16, true, &bits) ||
            !hf_number(s, q, "group_size", -1, 1 << 24, true, &group))
            return false;
        if (bits != 4)
            return error_set(s->err, "%s: GPTQ with %g bits is not supported (4 is)", s->f->path,
                             bits);
        if (group == 0)
            return error_set(s->err, "%s: config.json: group_size: 0", s->f->path);
        const char *format = json_string_value(json_object_get(q, "checkpoint_format"));
        c->packing = PACK_GPTQ;
        c->gptq_group = (int)group;
        c->gptq_zero_plus = !format || strcmp(format, "gptq_v2") != 0;
        return true;
    }
    if (!strcmp(method, "fp8")) {
        const json_t *block = json_object_get(q, "weight_block_size");
        if (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != 128 ||
            json_integer_value(json_array_get(block, 1)) != 128)
            return error_set(s->err,
                             "%s: config.json: weight_block_size: only [128, 128] is supported",
                             s->f->path);
        c->packing = PACK_FP8;
        return true;
    }
    return error_set(s->err, "%s: quantization \"%.40s\" is not supported (gptq and fp8 are)",
                     s->f->path, method);
}

static bool hf_layers(struct source *s)
{
    struct config *c = s->c;
    int step = 1, window = 0, full_layers = 0;
    bool use_window = c->arch != ARCH_QWEN2 && c->arch != ARCH_QWEN3 && c->arch != ARCH_QWEN3MOE;
    if (!hf_int(s, "decoder_sparse_step", NULL, 1, 1 << 20, false, &step) ||
        !hf_int(s, "sliding_window", NULL, 0, 1 << 30, false, &window) ||
        !hf_int(s, "max_window_layers", NULL, 0, 1 << 20, false, &full_layers) ||
        !hf_bool(s, "use_sliding_window", &use_window))
        return false;
    if (c->arch == ARCH_LLAMA)
        use_window = false; /* the key is of no effect there */
    if (c->arch == ARCH_MISTRAL || c->arch == ARCH_QWEN3MOE)
        full_layers = 0; /* these families slide in every layer */
    const json_t *types = hf_get(s->f->config, "layer_types", NULL);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(s->err, "%s: config.json: layer_types: %zu entries for %d layers",
                         s->f->path, json_array_size(types), c->n_layers);
    const json_t *dense = hf_get(s->f->config, "mlp_only_layers", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        bool slides = type ? !strcmp(type, "sliding_attention") : i >= full_layers;
        c->window[i] = use_window && slides ? window : 0;
        c->is_moe[i] = c->n_expert > 0 && (i + 1) % step == 0;
        for (size_t j = 0; j < json_array_size(dense); j++)
            if (json_integer_value(json_array_get(dense, j)) == i)
                c->is_moe[i] = false;
    }
    return true;
}

static bool hf_config(struct source *s)
{
    struct config *c = s->c;
    const char *type = json_string_value(json_object_get(s->f->config, "model_type"));
    const char *class =
        json_string_value(json_array_get(json_object_get(s->f->config, "architectures"), 0));
    int found = -1;
    for (int i = 0; i < N_ARCHS; i++)
        if ((type && !strcmp(type, archs[i].hf)) ||
            (!type && class && !strcmp(class, archs[i].hf_class)))
            found = i;
    if (!type && !class)
        return error_set(s->err, "%s: config.json: model_type: missing", s->f->path);
    if (found < 0)
        return error_set(s->err, "%s: architecture \"%.40s\" is not supported; " SUPPORTED,
                         s->f->path, class ? class : type);
    c->arch = (enum arch)found;
    snprintf(c->arch_name, sizeof c->arch_name, "%s", archs[found].hf);
    const char *act = json_string_value(json_object_get(s->f->config, "hidden_act"));
    if (act && strcmp(act, "silu"))
        return error_set(s->err, "%s: config.json: hidden_act \"%.40s\" is not supported (silu is)",
                         s->f->path, act);

    if (!hf_int(s, "num_hidden_layers", NULL, 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !hf_int(s, "hidden_size", NULL, 1, 1 << 20, true, &c->n_embd) ||
        !hf_int(s, "num_attention_heads", NULL, 1, 1 << 14, true, &c->n_heads) ||
        !hf_int(s, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    double eps = 1e-6;
    bool moe = c->arch == ARCH_QWEN3MOE;
    c->tied = false;
    if (!hf_int(s, "num_key_value_heads", NULL, 1, 1 << 14, false, &c->n_kv_heads) ||
        !hf_int(s, "head_dim", NULL, 1, 1 << 14, false, &c->head_dim) ||
        !hf_int(s, "intermediate_size", NULL, 0, 1 << 24, false, &c->n_ff) ||
        !hf_int(s, "max_position_embeddings", NULL, 1, 1 << 30, false, &c->context) ||
        !hf_number(s, s->f->config, "rms_norm_eps", 0, 1, false, &eps) ||
        !hf_bool(s, "tie_word_embeddings", &c->tied) ||
        !hf_int(s, "num_experts", "num_local_experts", 1, 4096, moe, &c->n_expert) ||
        !hf_int(s, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, moe,
                &c->n_expert_used) ||
        !hf_int(s, "moe_intermediate_size", NULL, 1, 1 << 24, moe, &c->n_ff_exp) ||
        !hf_bool(s, "norm_topk_prob", &c->norm_topk))
        return false;
    if (!moe)
        c->n_expert = c->n_expert_used = c->n_ff_exp = 0;
    c->norm_eps = (float)eps;
    c->expert_scale = 1;
    c->n_rot = c->head_dim;
    if (!tensorfile_find(s->f, "lm_head.weight"))
        c->tied = true;
    return hf_layers(s) && hf_packing(s) && hf_rope(s);
}

static bool check(struct source *s)
{
    const struct config *c = s->c;
    const char *path = s->f->path;
    if (c->n_heads % c->n_kv_heads)
        return error_set(s->err, "%s: %d heads do not divide by %d KV heads", path, c->n_heads,
                         c->n_kv_heads);
    if (c->head_dim < 1)
        return error_set(s->err, "%s: head dimension 0 (embedding %d, %d heads)", path, c->n_embd,
                         c->n_heads);
    if (c->n_rot % 2 || c->n_rot > c->head_dim)
        return error_set(s->err, "%s: %d rotary dimensions of a head of %d", path, c->n_rot,
                         c->head_dim);
    if ((int64_t)c->n_heads * c->head_dim > 1 << 24)
        return error_set(s->err, "%s: %d heads of %d are too many", path, c->n_heads, c->head_dim);
    bool dense = false, sparse = false;
    for (int i = 0; i < c->n_layers; i++)
        *(c->is_moe[i] ? &sparse : &dense) = true;
    if (dense && c->n_ff < 1)
        return error_set(s->err, "%s: feed-forward length: missing", path);
    if (sparse && (c->n_expert_used < 1 || c->n_expert_used > c->n_expert))
        return error_set(s->err, "%s: %d of %d experts used", path, c->n_expert_used, c->n_expert);
    if (sparse && c->n_ff_exp < 1)
        return error_set(s->err, "%s: expert feed-forward length: missing", path);
    return true;
}

bool config_load(const struct tensorfile *f, struct config *c, struct error *err)
{
    *c = (struct config){0};
    struct source s = {f, c, err};
    return (f->is_gguf ? gguf_config(&s) : hf_config(&s)) && check(&s);
}

/* Dimension at which a wave turns `rotations` times over the original context (YaRN). */
static double yarn_dim(const struct config *c, double rotations)
{
    const double two_pi = 6.283185307179586;
    return c->n_rot * log(c->rope.original_context / (rotations * two_pi)) /
           (2 * log(c->rope.theta));
}

void config_rope_freq(const struct config *c, const float *factors, float *freq, float *mscale)
{
    const struct rope_config *r = &c->rope;
    const double two_pi = 6.283185307179586;
    double low = 0, high = 1;
    *mscale = 1;
    if (r->kind == ROPE_YARN) {
        low = yarn_dim(c, r->beta_fast);
        high = yarn_dim(c, r->beta_slow);
        if (!r->no_truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = low < 0 ? 0 : low;
        high = high > c->n_rot - 1 ? c->n_rot - 1 : high;
        if (high == low)
            high += 0.001;
        double lf = log(r->factor > 1 ? r->factor : 1);
        *mscale = (float)(r->attn_factor > 0 ? r->attn_factor : 0.1 * lf + 1);
    }
    for (int i = 0; i < c->n_rot / 2; i++) {
        double f = (double)(float)pow(r->theta, -2.0 * i / c->n_rot);
        if (r->kind == ROPE_LINEAR) {
            f /= r->factor;
        } else if (r->kind == ROPE_YARN) {
            double ramp = (i - low) / (high - low);
            ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
            f = f / r->factor * ramp + f * (1 - ramp);
        } else if (r->kind == ROPE_LLAMA3) {
            double wavelen = two_pi / f, context = r->original_context;
            double smooth = (context / wavelen - r->low_freq_factor) /
                            (r->high_freq_factor - r->low_freq_factor);
            if (wavelen > context / r->low_freq_factor)
                f /= r->factor;
            else if (wavelen >= context / r->high_freq_factor)
                f = (1 - smooth) * f / r->factor + smooth * f;
        }
        freq[i] = (float)(factors ? f / (double)factors[i] : f);
    }
}
