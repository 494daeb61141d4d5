/*
 * Step 3.5 and 3.7 Flash: more heads in layers with a window, a gate per head of attention's output, QK-norm, llama3
 * RoPE of half a head in full layers, norms whose folders store the gain minus 1, sigmoid routing with a bias, a shared
 * expert, and limits of SiLU in some layers.
 */
#include "model/families/family.h"

#include <stdlib.h>
#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    .attn_gate = {"blk.%d.attn_gate", "model.layers.%d.self_attn.g_proj"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.moe.gate"},
    .choice_bias = {"=blk.%d.exp_probs_b.bias", "=model.layers.%d.moe.router_bias"},
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.moe.gate_proj"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.moe.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.moe.down_proj"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.share_expert.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.share_expert.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.share_expert.down_proj"}};

static const struct decoder decoder = {.names = &names,
                                       .norm_add = 1,
                                       .qk_norm = true,
                                       .router = ROUTER_SIGMOID,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_rope = true};

/* The first number of a list at a full layer (`window` false) or at one with a window. */
static double entry_of(const struct meta_reader *in, const char *key, bool window, double other)
{
    const json_t *list = reader_get(in->hf, key, NULL);
    for (int i = 0; i < in->c->n_layers; i++)
        if ((in->c->window[i] != 0) == window && json_is_number(json_array_get(list, (size_t)i)))
            return json_number_value(json_array_get(list, (size_t)i));
    return other;
}

static bool read_limits(const struct meta_reader *in, const char *key, float *out)
{
    const json_t *list = reader_get(in->hf, key, NULL);
    for (int i = 0; i < in->c->n_layers; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        if (!reader_range(in, key, json_number_value(v), 0, 1e6))
            return false;
        out[i] = (float)json_number_value(v);
    }
    return true;
}

static bool read_experts(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scale = 1;
    c->norm_topk = true;
    if (!reader_int(in, "moe_num_experts", "n_routed_experts", 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "moe_top_k", "num_experts_per_tok", 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "share_expert_dim", "share_expert_dims", 0, 1 << 24, false,
                    &c->n_ff_shared) ||
        !reader_number(in, in->hf, "moe_router_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_expert_weight", &c->norm_topk) ||
        !read_limits(in, "swiglu_limits", c->expert_limit) ||
        !read_limits(in, "swiglu_limits_shared", c->shared_limit))
        return false;
    c->expert_scale = (float)scale;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    const char *list = json_string_value(reader_get(in->hf, "moe_layers_enum", NULL));
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = type && !strcmp(type, "sparse");
    }
    while (!types && list && *list) { /* "3,4,5" */
        char *end;
        long i = strtol(list, &end, 10);
        if (end == list || i < 0 || i >= c->n_layers)
            return error_set(in->err, "%s: config.json: moe_layers_enum: \"%.40s\" is no layer",
                             in->f->path, list);
        c->is_moe[i] = true;
        list = *end == ',' ? end + 1 : end;
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *other = reader_get(in->hf, "attention_other_setting", NULL);
    double heads = c->n_heads, groups = 0;
    int full_groups = c->n_kv_heads;
    if (!reader_int(in, "num_attention_groups", "num_key_value_heads", 1, 1 << 14, true,
                    &full_groups) ||
        !reader_number(in, other, "num_attention_heads", 1, 1 << 14, false, &heads))
        return false;
    groups = full_groups;
    if (!reader_number(in, other, "num_attention_groups", 1, 1 << 14, false, &groups) ||
        !read_experts(in))
        return false;
    c->n_kv_heads = full_groups;
    for (int i = 0; i < c->n_layers; i++) {
        c->layer_heads[i] = c->window[i] ? (int)heads : c->n_heads;
        c->layer_kv_heads[i] = c->window[i] ? (int)groups : full_groups;
    }
    if (!reader_get(in->hf, "rope_parameters", NULL)) { /* as published: lists by layer */
        c->rope.theta = entry_of(in, "rope_theta", false, c->rope.theta);
        c->rope_window = (struct rope_config){
            .theta = entry_of(in, "rope_theta", true, 10000), .factor = 1, .partial = 1};
        c->rope.partial = entry_of(in, "partial_rotary_factors", false, 0.5);
        c->rope_window.partial = entry_of(in, "partial_rotary_factors", true, 1);
    }
    c->n_rot = (int)((double)c->head_dim * c->rope.partial);
    c->n_rot_window = (int)((double)c->head_dim * c->rope_window.partial);
    return true;
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int extra = 0;
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra) ||
        !reader_gguf_layer_floats(in, "swiglu_clamp_exp", 0, 1e6, c->expert_limit) ||
        !reader_gguf_layer_floats(in, "swiglu_clamp_shexp", 0, 1e6, c->shared_limit))
        return false;
    c->n_layers -= extra; /* blocks that draft tokens are not used */
    /* the key counts the rotary dimensions of layers with a window; full ones have half of them */
    c->n_rot_window = c->n_rot;
    c->n_rot /= 2;
    return decoder_read_window_rope(in);
}

static bool read(const struct meta_reader *in)
{
    int rot;
    if (!decoder_read(in, &decoder))
        return false;
    rot = in->c->n_rot;
    if (!(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    if (in->f->is_gguf)
        in->c->n_rot_window = rot;
    return true;
}

static void limit(struct ffn *f, float most)
{
    if (f->gate_up && most > 1e-6f) {
        f->act = ACT_SILU_LIMIT;
        f->limit = most;
    }
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
    for (int i = 0; i < b->c->n_layers; i++) {
        limit(&b->net->layers[i].mlp.experts, b->c->expert_limit[i]);
        limit(&b->net->layers[i].mlp.dense, b->c->shared_limit[i]);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_window_list(c, w);
    decoder_write_dense(c, w);
    if (c->n_ff_shared)
        gguf_set_u32(w, "step35.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
    gguf_set_f32(w, "step35.rope.freq_base_swa", (float)c->rope_window.theta);
    gguf_set_array(w, "step35.swiglu_clamp_exp", META_F32, c->expert_limit, (size_t)c->n_layers);
    gguf_set_array(w, "step35.swiglu_clamp_shexp", META_F32, c->shared_limit, (size_t)c->n_layers);
}

static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "vision_model.", 13) || !strncmp(tensor, "vit_large_projector.", 20);
}

const struct model_family family_step35 = {
    .name = "step35",
    .hf = "step3p5",
    .hf_class = "Step3p5ForCausalLM",
    .own_windows = true,
    .rot_twice = true,
    .spare = spare,
    .read = read,
    .build = build,
    .write = write,
};
