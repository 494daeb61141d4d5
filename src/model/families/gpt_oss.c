/*
 * gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped SwiGLU
 * experts with softmax after top-k, YaRN without rounded bounds. Folders store experts transposed,
 * with gate and up rows interleaved.
 */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .sinks = {"blk.%d.attn_sinks", "=model.layers.%d.self_attn.sinks"},
    .ffn_norm = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.router"}};
static const struct tensor_name gate = {"blk.%d.ffn_gate_exps",
                                        "=model.layers.%d.mlp.experts.gate_up_proj"},
                                up = {"blk.%d.ffn_up_exps",
                                      "=model.layers.%d.mlp.experts.gate_up_proj"},
                                down = {"blk.%d.ffn_down_exps",
                                        "=model.layers.%d.mlp.experts.down_proj"};
/* One tensor per expert, as Quark writes them: not transposed, rows interleaved too. */
static const struct tensor_name gate_each = {"blk.%d.ffn_gate_exps",
                                             "model.layers.%d.mlp.experts.%d.gate_up_proj"},
                                up_each = {"blk.%d.ffn_up_exps",
                                           "model.layers.%d.mlp.experts.%d.gate_up_proj"},
                                down_each = {"blk.%d.ffn_down_exps",
                                             "model.layers.%d.mlp.experts.%d.down_proj"};

/* Gate and up apart: a tensor per expert, or stacked as MLX does. */
static const struct tensor_name
    gate_apart = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},
    up_apart = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},
    gate_stack = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.gate_proj"},
    up_stack = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.up_proj"},
    down_stack = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.down_proj"};

static const struct decoder decoder = {.names = &names,
                                       .experts = true,
                                       .experts_wide = true,
                                       .router = ROUTER_SOFTMAX_TOP,
                                       .act = ACT_SWIGLU_CLAMP,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 2};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double limit = 7;
    if (!decoder_read(in, &decoder) ||
        (!in->f->is_gguf && !reader_number(in, in->hf, "swiglu_limit", 1e-3, 1e6, false, &limit)))
        return false;
    if (in->f->is_gguf)
        c->rope.no_truncate = true; /* as trained; no key has it */
    c->act_limit = (float)limit;
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    int F = c->n_ff_exp, E = c->n_embd;
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct mlp *m = &b->net->layers[i].mlp;
        decoder_mixer(b, &decoder, i, rope, &b->net->layers[i].mixer);
        decoder_mlp(b, &decoder, i, m);
        m->experts.alpha = 1.702f;
        m->experts.limit = c->act_limit;
        bool folder = !b->f->is_gguf, each = folder && build_has(b, &gate_each, i);
        bool stack = folder && build_has(b, &gate_stack, i);
        bool apart = stack || (folder && build_has(b, &gate_apart, i));
        const struct weight_rows part = {
            .n = F, .step = 2, .tensor_rows = 2 * F, .transposed = !each};
        struct weight_rows both[] = {part, part};
        both[0].name = each ? &gate_each : &gate;
        both[1].name = each ? &up_each : &up;
        both[1].first = 1;
        const struct weight_rows out = {
            .name = each ? &down_each : &down, .n = E, .tensor_rows = E, .transposed = !each};
        const struct weight_rows two[] = {{.name = stack ? &gate_stack : &gate_apart, .n = F},
                                          {.name = stack ? &up_stack : &up_apart, .n = F}};
        const struct weight_rows back = {.name = stack ? &down_stack : &down_each, .n = E};
        m->experts.gate_up =
            build_weight(b, WEIGHT_EXPERTS, i, E, c->n_expert, 2, apart ? two : both);
        m->experts.down =
            build_weight(b, WEIGHT_EXPERTS, i, F, c->n_expert, 1, apart ? &back : &out);
    }
}

const struct model_family family_gpt_oss = {
    .name = "gpt-oss",
    .hf = "gpt_oss",
    .hf_class = "GptOssForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
};
