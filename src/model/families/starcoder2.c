/* StarCoder2: LayerNorms, biases everywhere, tanh GELU without a gate, a window. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.c_fc"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.c_proj"}};

static const struct decoder decoder = {.names = &names,
                                       .eps_key = "norm_epsilon",
                                       .act = ACT_PLAIN_GELU_TANH,
                                       .act_name = "gelu_pytorch_tanh",
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_starcoder2 = {
    .name = "starcoder2",
    .hf = "starcoder2",
    .hf_class = "Starcoder2ForCausalLM",
    .layer_norm = true,
    .read = read,
    .build = build,
};
