/* Arcee's AFM: Llama with a squared ReLU in place of a gate. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}};

static const struct decoder decoder = {
    .names = &names, .act = ACT_PLAIN_RELU2, .act_name = "relu2"};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_arcee = {
    .name = "arcee",
    .hf = "arcee",
    .hf_class = "ArceeForCausalLM",
    .interleaved_qk = true,
    .read = read,
    .build = build,
};
