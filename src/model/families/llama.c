/* Llama and models built like it: a plain decoder. Its sliding_window is ignored. */
#include "model/families/family.h"

static const struct decoder decoder = {.windows = false};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_llama = {
    .name = "llama",
    .hf = "llama",
    .hf_class = "LlamaForCausalLM",
    .interleaved_qk = true,
    .read = read,
    .build = build,
};
