/*
 * Laguna: gates of attention's output through softplus (one per head in XS.2, one per value in M.1), QK-norm, heads that
 * differ between full layers and layers with a window, YaRN on half a head in full layers only, sigmoid routing with a
 * bias, a shared expert, dense first layers.
 */
#include "model/families/family.h"

#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    DECODER_EXPERTS,
    .attn_gate = {"blk.%d.attn_gate", "model.layers.%d.self_attn.g_proj"},
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.mlp.experts.e_score_correction_bias"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_expert.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_expert.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_expert.down_proj"}};

static const struct decoder decoder = {.names = &names,
                                       .qk_norm = true,
                                       .softplus = true,
                                       .router = ROUTER_SIGMOID,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_rope = true};

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scale = 1, cap = 0;
    bool on_input = false;
    c->norm_topk = true;
    if (!reader_int(in, "num_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "shared_expert_intermediate_size", NULL, 0, 1 << 24, false,
                    &c->n_ff_shared) ||
        !reader_number(in, in->hf, "moe_routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_number(in, in->hf, "moe_router_logit_softcapping", 0, 0, false, &cap) ||
        !reader_bool(in, "moe_apply_router_weight_on_input", &on_input) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    if (on_input)
        return error_set(in->err,
                         "%s: config.json: moe_apply_router_weight_on_input is not supported",
                         in->f->path);
    c->expert_scale = (float)scale;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    const json_t *heads = reader_get(in->hf, "num_attention_heads_per_layer", NULL);
    if ((types && json_array_size(types) != (size_t)c->n_layers) ||
        (heads && json_array_size(heads) != (size_t)c->n_layers))
        return error_set(in->err,
                         "%s: config.json: mlp_layer_types, num_attention_heads_per_layer: "
                         "expected %d entries",
                         in->f->path, c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        json_int_t n = json_integer_value(json_array_get(heads, (size_t)i));
        c->is_moe[i] = !type || !strcmp(type, "sparse");
        if (heads &&
            !reader_range(in, "config.json: num_attention_heads_per_layer", (double)n, 1, 1 << 14))
            return false;
        c->layer_heads[i] = (int)n;
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || (!in->f->is_gguf && !read_hf(in)) ||
        !decoder_read_window_rope(in))
        return false;
    if (in->f->is_gguf)
        return reader_gguf_int(in, "rope.dimension_count_swa", 0, 1 << 14, false, &c->n_rot_window);
    c->n_rot_window = (int)((double)c->head_dim * c->rope_window.partial);
    return true;
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_window_list(c, w);
    decoder_write_dense(c, w);
    if (c->n_ff_shared)
        gguf_set_u32(w, "laguna.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
    gguf_set_f32(w, "laguna.rope.freq_base_swa", (float)c->rope_window.theta);
    gguf_set_u32(w, "laguna.rope.dimension_count_swa", (uint32_t)c->n_rot_window);
}

const struct model_family family_laguna = {
    .name = "laguna",
    .hf = "laguna",
    .hf_class = "LagunaForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
