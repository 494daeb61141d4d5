/* Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, whose weights are not normalised, and a shared expert with a gate. */
#include "model/families/family.h"

#include <stdio.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    DECODER_EXPERTS,
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_expert.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_expert.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_expert.down_proj"},
    .shared_gate = {"blk.%d.ffn_gate_inp_shexp", "model.layers.%d.mlp.shared_expert_gate"}};

static const struct decoder decoder = {.names = &names, .experts = true, .windows = true};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder))
        return false;
    if (!in->f->is_gguf)
        return reader_int(in, "shared_expert_intermediate_size", NULL, 1, 1 << 24, true,
                          &c->n_ff_shared);
    c->norm_topk = false;
    if (!c->n_ff_shared)
        c->n_ff_shared = c->n_ff;
    return reader_gguf_bool(in, "expert_weights_norm", &c->norm_topk);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "qwen2moe.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
}

const struct model_family family_qwen2moe = {
    .name = "qwen2moe",
    .hf = "qwen2_moe",
    .hf_class = "Qwen2MoeForCausalLM",
    .read = read,
    .build = build,
    .write = write,
};
