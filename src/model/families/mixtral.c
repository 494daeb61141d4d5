/* Mixtral: Mistral with experts. GGUF calls it llama. */
#include "model/families/family.h"

static const struct decoder_names names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
                                           DECODER_EXPERTS_W};

static const struct decoder decoder = {.names = &names,
                                       .experts = true,
                                       .experts_wide = true,
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

const struct model_family family_mixtral = {
    .name = "mixtral",
    .hf = "mixtral",
    .hf_class = "MixtralForCausalLM",
    .gguf_as = "llama",
    .interleaved_qk = true,
    .read = read,
    .build = build,
};
