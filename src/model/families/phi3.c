/* Phi-3, Phi-3.5 and Phi-4: a plain decoder with fused q, k, v and fused gate, up tensors, and long
 * RoPE. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    .qkv = {"blk.%d.attn_qkv", "model.layers.%d.self_attn.qkv_proj"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .gate_up = {"blk.%d.ffn_up", "model.layers.%d.mlp.gate_up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}};

static const struct decoder decoder = {
    .names = &names, .windows = true, .windows_unasked = true, .windows_all = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    if (!c->window[0]) /* readers assume the first Phi-3's window if the key is absent */
        gguf_set_u32(w, "phi3.attention.sliding_window", 0);
}

const struct model_family family_phi3 = {
    .name = "phi3",
    .hf = "phi3",
    .hf_class = "Phi3ForCausalLM",
    .read = read,
    .build = build,
    .write = write,
};
