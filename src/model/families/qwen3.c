/* Qwen3: a plain decoder with QK-norm. */
#include "model/families/family.h"

static const struct decoder decoder = {.qk_norm = true, .windows = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_qwen3 = {
    .name = "qwen3",
    .hf = "qwen3",
    .hf_class = "Qwen3ForCausalLM",
    .read = read,
    .build = build,
};
