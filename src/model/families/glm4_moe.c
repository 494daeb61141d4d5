/*
 * GLM-4.5, 4.6 and 4.7: RoPE over half of a head, QK-norm in some models, dense first layers, then
 * sigmoid routing with a bias and a shared expert. The layer after the last one drafts tokens.
 */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_EXPERTS,
    .ffn_norm = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    DECODER_FFN,
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.mlp.gate.e_score_correction_bias"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_experts.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_experts.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_experts.down_proj"}};

static const struct decoder decoder = {.names = &names, .router = ROUTER_SIGMOID},
                            with_norms = {
                                .names = &names, .router = ROUTER_SIGMOID, .qk_norm = true};

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int shared = 0, first = 0, draft = 0;
    double scale = 1;
    c->norm_topk = true;
    if (!reader_int(in, "n_routed_experts", "num_local_experts", 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "n_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "first_k_dense_replace", NULL, 0, 1 << 20, false, &first) ||
        !reader_int(in, "n_group", NULL, 0, 256, false, &c->n_groups) ||
        !reader_int(in, "topk_group", NULL, 0, 256, false, &c->n_groups_used) ||
        !reader_int(in, "num_nextn_predict_layers", NULL, 0, CONFIG_MAX_LAYERS, false, &draft) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    c->n_ff_shared = shared * c->n_ff_exp;
    c->expert_scale = (float)scale;
    for (int i = 0; i < c->n_layers; i++)
        c->is_moe[i] = i >= first;
    mtp_read(in, &mtp_names, draft);
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    int draft = 0;
    if (!decoder_read(in, &decoder))
        return false;
    if (!in->f->is_gguf)
        return read_hf(in);
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &draft) ||
        !rope_read_gguf_sections(in, false))
        return false;
    c->n_layers -= draft;
    mtp_read(in, &mtp_names, draft);
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    const struct decoder *d = build_has(b, &names.q_norm, 0) ? &with_norms : &decoder;
    decoder_ends(b, d);
    for (int i = 0; i < c->n_layers + c->n_mtp; i++) {
        decoder_mixer(b, d, i, rope, &b->net->layers[i].mixer);
        decoder_mlp(b, d, i, &b->net->layers[i].mlp);
    }
    if (c->n_mtp)
        mtp_build(b, &mtp_names, 0);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    uint32_t dense = 0;
    while (dense < (uint32_t)c->n_layers && !c->is_moe[dense])
        dense++;
    gguf_set_u32(w, "glm4moe.leading_dense_block_count", dense);
    rope_write_sections(c, w, "glm4moe");
}

const struct model_family family_glm4_moe = {
    .name = "glm4moe",
    .hf = "glm4_moe",
    .hf_class = "Glm4MoeForCausalLM",
    .read = read,
    .build = build,
    .write = write,
};

/* The text model of GLM-4.5V and GLM-4.6V: the same with M-RoPE in sections. */
const struct model_family family_glm4v_moe = {
    .name = "glm4v_moe",
    .hf = "glm4v_moe",
    .hf_class = "Glm4vMoeForConditionalGeneration",
    .gguf_as = "glm4moe",
    .read = read,
    .build = build,
    .write = write,
};

/* Solar Open is the same architecture, with RoPE over whole heads and no dense layers. */
const struct model_family family_solar_open = {
    .name = "solar_open",
    .hf = "solar_open",
    .hf_class = "SolarOpenForCausalLM",
    .gguf_as = "glm4moe",
    .read = read,
    .build = build,
    .write = write,
};
