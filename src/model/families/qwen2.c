/*
 * Qwen2 and Qwen2.5: a plain decoder with biases of q, k and v. The text model of Qwen2.5-VL is the same with M-RoPE in
 * sections.
 */
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

static bool read_seeing(const struct meta_reader *in)
{
    return read(in) && (!in->f->is_gguf || rope_read_gguf_sections(in, false));
}

static void write_seeing(const struct config *c, struct gguf_writer *w)
{
    rope_write_sections(c, w, "qwen2vl");
}

const struct model_family family_qwen2vl = {
    .name = "qwen2vl",
    .hf = "qwen2_5_vl",
    .hf_class = "Qwen2_5_VLForConditionalGeneration",
    .read = read_seeing,
    .build = build,
    .write = write_seeing,
};
