/* Qwen2 and Qwen2.5: a plain decoder with biases of q, k and v. */
#include "model/families/family.h"

static const struct decoder decoder = {.windows = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_qwen2 = {
    .name = "qwen2",
    .hf = "qwen2",
    .hf_class = "Qwen2ForCausalLM",
    .read = read,
    .build = build,
};
