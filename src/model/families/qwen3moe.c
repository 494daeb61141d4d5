/* Qwen3-MoE: Qwen3 with experts in most layers. */
#include "model/families/family.h"

static const struct decoder decoder = {
    .qk_norm = true, .experts = true, .windows = true, .windows_all = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_qwen3moe = {
    .name = "qwen3moe",
    .hf = "qwen3_moe",
    .hf_class = "Qwen3MoeForCausalLM",
    .read = read,
    .build = build,
};
