/* Seed-OSS: a plain decoder with biases of q, k and v. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    DECODER_FFN};

static const struct decoder decoder = {.names = &names};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_seed_oss = {
    .name = "seed_oss",
    .hf = "seed_oss",
    .hf_class = "SeedOssForCausalLM",
    .read = read,
    .build = build,
};
