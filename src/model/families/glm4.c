/*
 * GLM-4 and GLM-Z1 of 2025: norms before and after blocks, RoPE over adjacent pairs of half a head, biases of q, k, v. The
 * text model of GLM-4.1V and GLM-4.6V-Flash is the same with M-RoPE in sections; its GGUFs have no adjacent pairs.
 */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_self_attn_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_mlp_layernorm"},
    .gate_up = {"blk.%d.ffn_up", "model.layers.%d.mlp.gate_up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}};

static const struct decoder decoder = {.names = &names};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || (in->f->is_gguf && !rope_read_gguf_sections(in, false)))
        return false;
    if (c->rope.sections[0])
        c->family = &family_glm4v;
    return true;
}

static void write(const struct config *c, struct gguf_writer *w)
{
    rope_write_sections(c, w, "glm4");
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_glm4 = {
    .name = "glm4",
    .hf = "glm4",
    .hf_class = "Glm4ForCausalLM",
    .interleaved_folder = true,
    .read = read,
    .build = build,
};

const struct model_family family_glm4v = {
    .name = "glm4v",
    .hf = "glm4v",
    .hf_class = "Glm4vForConditionalGeneration",
    .gguf_as = "glm4",
    .interleaved_only_folder = true,
    .read = read,
    .build = build,
    .write = write,
};
