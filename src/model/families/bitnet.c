/* BitNet b1.58 in plain weights: a gate with squared ReLU, norms of attention's result and of hidden units. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
    .attn_sub_norm = {"blk.%d.attn_sub_norm", "model.layers.%d.self_attn.attn_sub_norm"},
    .ffn_sub_norm = {"blk.%d.ffn_sub_norm", "model.layers.%d.mlp.ffn_sub_norm"}};

static const struct decoder decoder = {.names = &names, .act = ACT_RELU2, .act_name = "relu2"};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_bitnet = {
    .name = "bitnet-b1.58",
    .hf = "bitnet",
    .hf_class = "BitNetForCausalLM",
    .read = read,
    .build = build,
};
