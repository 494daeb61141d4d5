/* Nemotron 4 and Minitron: LayerNorms whose folders store the gain minus 1, squared ReLU in place of a gate, RoPE of half
 * a head. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}};

static const struct decoder decoder = {.names = &names,
                                       .norm_add = 1,
                                       .eps_key = "norm_eps",
                                       .act = ACT_PLAIN_RELU2,
                                       .act_name = "relu2"};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_nemotron = {
    .name = "nemotron",
    .hf = "nemotron",
    .hf_class = "NemotronForCausalLM",
    .layer_norm = true,
    .read = read,
    .build = build,
};
