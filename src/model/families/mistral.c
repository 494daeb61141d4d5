/* Mistral: a plain decoder with a window in every layer. GGUF calls it llama. */
#include "model/families/family.h"

static const struct decoder decoder = {
    .windows = true, .windows_unasked = true, .windows_all = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_mistral = {
    .name = "mistral",
    .hf = "mistral",
    .hf_class = "MistralForCausalLM",
    .gguf_as = "llama",
    .interleaved_qk = true,
    .read = read,
    .build = build,
};
