/*
 * Trinity (AFMoE): a gate of attention's output, norms around blocks, RoPE only in layers with a window, sigmoid routing
 * with a bias, shared experts, dense first layers. Embeddings are scaled by the square root of their width.
 */
#include "model/families/family.h"

#include <math.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_FFN,
    DECODER_SHARED,
    .attn_gate = {"blk.%d.attn_gate", "model.layers.%d.self_attn.gate_proj"},
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.pre_mlp_layernorm"},
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_mlp_layernorm"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.router.gate"},
    .choice_bias = {"=blk.%d.exp_probs_b.bias", "=model.layers.%d.mlp.expert_bias"},
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.%d.down_proj"}};

static const struct decoder decoder = {.names = &names,
                                       .qk_norm = true,
                                       .router = ROUTER_SIGMOID,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 4};

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dense = 0, shared = 0;
    double scale = 1;
    bool scaled = true;
    c->norm_topk = true;
    if (!reader_int(in, "num_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "num_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "num_dense_layers", NULL, 0, 1 << 20, false, &dense) ||
        !reader_int(in, "n_group", NULL, 0, 256, false, &c->n_groups) ||
        !reader_int(in, "topk_group", NULL, 0, 256, false, &c->n_groups_used) ||
        !reader_number(in, in->hf, "route_scale", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "route_norm", &c->norm_topk) || !reader_bool(in, "mup_enabled", &scaled))
        return false;
    c->expert_scale = (float)scale;
    c->n_ff_shared = shared * c->n_ff_exp;
    for (int i = 0; i < c->n_layers; i++)
        c->is_moe[i] = i >= dense;
    c->embed_scale = scaled ? sqrtf((float)c->n_embd) : 1;
    return scaled ||
           error_set(in->err, "%s: config.json: mup_enabled false is not supported", in->f->path);
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || (!in->f->is_gguf && !read_hf(in)))
        return false;
    c->embed_scale = sqrtf((float)c->n_embd);
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = !c->window[i];
    return true;
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_windows(c, w);
    decoder_write_dense(c, w);
}

const struct model_family family_afmoe = {
    .name = "afmoe",
    .hf = "afmoe",
    .hf_class = "AfmoeForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
